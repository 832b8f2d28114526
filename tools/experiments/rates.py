"""The paper's rate sweep on GSM8K: attainment and accuracy over the rate of arrivals, for each system.

The published figures are from 16 H100, each an instance; 1,319 requests; an SLO of five times the published latency of
a request alone, which runs to the end of its output. Published profiles know nothing of what a step took beside the
model. Two numbers stand for that, the same for all systems, known to all policies, and fitted to two published figures:
1. a request alone takes the published latency: `extra_pass_ms` + `extra_step_ms` are what is missing, over its steps;
2. INFaaS keeps up with about the rate it did: so much of it is `extra_step_ms`, which a batch pays for each member.
What is to be seen is whether the other systems then do what was published of them.
Rows that are in the file already are not computed again.
"""

import csv
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.settings import ConfigError
from tools.simulate.run import Job, simulate
from tools.simulate.workload import Phase

PUBLISHED = Path(__file__).parent / "published_rates.json"
SYSTEMS = ("tedi", "paper", "llumnix", "infaas", "proteus", "fixed-0.5")
INSTANCES = 16
REQUESTS = 1319


class Model(NamedTuple):
    """A model as the paper measured it."""

    name: str
    profile: str
    base_s: float  # published latency of a request alone
    rates: tuple[float, ...]  # per second and GPU
    extra_pass_ms: float
    extra_step_ms: float
    note: str = ""


_LLADA_NOTE = (
    "With fixed thresholds the published systems hold out longer below 1.7 requests/s and fall faster above:\n"
    "two numbers do not make their costs ours (probably theirs grow with the load).\n"
    "Published TeDiServe stands beside both `paper`, whose rules are its threshold control,\n"
    "and `tedi`; for Proteus nothing is published here."
)
MODELS = {
    "llada": Model("LLaDA-8B", "profiles/llada-8b-h100", 1.9, (1.5, 1.625, 1.6874, 1.75, 1.875), 5.4, 2.4, _LLADA_NOTE),
    "dream": Model(
        "Dream-7B",
        "profiles/dream-7b-h100",
        1.6,
        (1.5, 1.75, 2.0, 2.25),
        0.0,
        2.4,
        "Steps of Dream are not published: these are LLaDA's, so the figures are made up and count for nothing.",
    ),
}
SLO_OVER_BASE = 5.0


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Numbers that a run does not have are None."""

    model: str
    system: str
    rate: float  # per second and GPU
    seed: int
    extra_pass_ms: float
    extra_step_ms: float
    requests: int
    attainment: float | None
    accuracy: float | None
    accuracy_of_met: float | None
    latency_mean_s: float | None
    latency_p95_s: float | None
    threshold_mean: float | None
    steps_mean: float | None
    moves_mean: float | None


class PublishedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A point of the paper's plot."""

    system: str
    rate: float
    attainment: float
    accuracy: float


class PublishedRates(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    rows: list[PublishedRow]


def read_published() -> PublishedRates:
    return msgspec.json.decode(PUBLISHED.read_bytes(), type=PublishedRates)


def run_cell(model: Model, system: str, rate: float, seed: int, requests: int) -> Cell:
    job = Job(
        profile=Path(model.profile),
        system=system,
        workload="gsm8k",
        phases=(Phase(INSTANCES * rate, 2 * requests / (INSTANCES * rate) + 1.0),),
        tp_degrees=(1,) * INSTANCES,
        most_requests=requests,
        slo_s=SLO_OVER_BASE * model.base_s,
        step_overhead_s=0.0,
        extra_pass_ms=model.extra_pass_ms,
        extra_step_ms=model.extra_step_ms,
        seed=seed,
    )
    summary = simulate(job).summary
    return Cell(
        model=model.name,
        system=system,
        rate=rate,
        seed=seed,
        extra_pass_ms=model.extra_pass_ms,
        extra_step_ms=model.extra_step_ms,
        **{name: getattr(summary, name) for name in _MEASURED},
    )


_MEASURED = (
    "requests",
    "attainment",
    "accuracy",
    "accuracy_of_met",
    "latency_mean_s",
    "latency_p95_s",
    "threshold_mean",
    "steps_mean",
    "moves_mean",
)


# --- the file -----------------------------------------------------------------------------------------------------


def read_cells(path: Path) -> list[Cell]:
    """Raises ConfigError for a file that is none of these."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: value or None for key, value in row.items()} for row in csv.DictReader(file)]
    try:
        return [msgspec.convert(row, Cell, strict=False) for row in rows]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds other rows than this sweep's: {error}; name another file") from None


def write_cells(path: Path, cells: Sequence[Cell]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Cell.__struct_fields__)
        for cell in sorted(cells, key=_place):
            writer.writerow(["" if value is None else value for value in msgspec.structs.astuple(cell)])


def _place(cell: Cell) -> tuple[str, float, str, int]:
    return cell.model, cell.rate, cell.system, cell.seed


def sweep(
    model: Model,
    path: Path,
    *,
    systems: Sequence[str],
    rates: Sequence[float],
    seeds: Sequence[int],
    requests: int = REQUESTS,
    on_cell: Callable[[Cell], object] = lambda cell: None,
) -> list[Cell]:
    """All cells of the file, with those that were missing. Each is stored as soon as it is known."""
    cells = read_cells(path)
    known = {(*_place(cell), cell.extra_pass_ms, cell.extra_step_ms, cell.requests) for cell in cells}
    for rate, system, seed in _wanted(systems, rates, seeds):
        if (model.name, rate, system, seed, model.extra_pass_ms, model.extra_step_ms, requests) not in known:
            cells.append(run_cell(model, system, rate, seed, requests))
            write_cells(path, cells)
            on_cell(cells[-1])
    return read_cells(path)


def _wanted(systems: Sequence[str], rates: Sequence[float], seeds: Sequence[int]) -> Iterator[tuple[float, str, int]]:
    """The highest rate first: there the systems differ most."""
    for seed in seeds:
        for rate in sorted(rates, reverse=True):
            for system in systems:
                yield rate, system, seed
