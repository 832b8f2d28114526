"""What came of a point, and the files that hold it: docs/results/<experiment>.csv, a row for each run.

A row knows the code that it is of: the simulator and what it runs. A run that finds rows of other code runs them anew.
"""

import csv
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from services.digest import digest
from services.settings import ConfigError
from tools.experiments.plan import Point
from tools.experiments.recordings import ROOT
from tools.experiments.setups import SETUPS, base_s, capacity, job_of
from tools.simulate.forecasts import ForecastKind
from tools.simulate.run import simulate
from tools.simulate.workload import Phase

_CODE = (
    "services/costs.py",
    "services/profile.py",
    "services/scheduler/*.py",
    "services/threshold_controller/*.py",
    "services/step_predictor/*.py",
    "services/denoiser/batching.py",
    "tools/simulate/*.py",
    "tools/simulate/published/*",
    "tools/traces/replay.py",
    "tools/experiments/setups.py",
    "services/opening.py",
    "profiles/*/latency.json",
    "profiles/*/profile.toml",
    "profiles/*/step_predictor.*",
)
_CODE_OF_LAYOUTS = (
    *_CODE,
    "services/denoiser/agent_policy.py",
    "services/reconfigurator/*.py",
    "services/workload_monitor/*.py",
    "tools/experiments/diurnal.py",
    "tools/experiments/diurnal_layouts.py",
    "tools/experiments/published_diurnal.json",
)
_MEASURED = (
    "requests",
    "attainment",
    "accuracy",
    "accuracy_of_met",
    "latency_mean_s",
    "latency_p95_s",
    "latency_p99_s",
    "threshold_mean",
    "steps_mean",
    "moves_mean",
)


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """One run. Numbers that a run does not have are None."""

    setup: str
    system: str
    rate: float  # in the setup's unit
    rate_rps: float  # of the whole cluster
    slo_factor: float
    slo_s: float
    seed: int
    requests: int
    attainment: float | None
    accuracy: float | None
    accuracy_of_met: float | None
    latency_mean_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    threshold_mean: float | None
    steps_mean: float | None
    moves_mean: float | None
    code: str  # digest

    @property
    def right_in_time(self) -> float | None:
        """Share of all requests that are answered in time and (as far as that is expected) correctly."""
        if self.attainment is None:
            return None
        if self.attainment == 0:
            return 0.0
        return None if self.accuracy_of_met is None else self.attainment * self.accuracy_of_met

    @property
    def key(self) -> tuple[str, str, float, float, int]:
        """A point without its experiment."""
        return self.setup, self.system, self.rate, self.slo_factor, self.seed


def code_digest(*, layouts: bool = False) -> str:
    """Of what rows depend on, or (`layouts`) runs in which the layout follows the load."""
    patterns = _CODE_OF_LAYOUTS if layouts else _CODE
    return digest(path for pattern in patterns for path in sorted(ROOT.glob(pattern)))


def run(point: Point, requests: int | None, code: str) -> Cell:
    """`requests`: fewer than the setup has. `code`: the digest that the row gets. Raises ConfigError."""
    setup = SETUPS[point.setup]
    rate = point.rate * setup.instances * (capacity(setup) if setup.rate_unit == "x C" else 1.0)
    slo_s = point.slo_factor * base_s(setup)
    most = min(setup.requests, requests or setup.requests)
    system, _, forecasts = point.system.partition(":")
    kind: ForecastKind | None = forecasts or None  # type: ignore[assignment]
    job = job_of(setup, system)._replace(
        phases=(Phase(rate, 2 * most / rate + 1.0),),  # long enough for so many
        most_requests=most,
        slo_s=slo_s,
        forecasts=kind,
        seed=point.seed,
    )
    summary = simulate(job).summary
    return Cell(
        **dict(zip(Point._fields[1:], point[1:], strict=True)),  # type: ignore[arg-type]
        rate_rps=round(rate, 4),
        slo_s=round(slo_s, 4),
        code=code,
        **{name: getattr(summary, name) for name in _MEASURED},
    )


# --- files --------------------------------------------------------------------------------------------------------


def path_of(results: Path, experiment: str) -> Path:
    return results / f"{experiment}.csv"


def read_cells(path: Path) -> list[Cell]:
    """[] without a file. Raises ConfigError for a file of other rows."""
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        rows = [{key: value or None for key, value in row.items()} for row in csv.DictReader(file)]
    try:
        return [msgspec.convert(row, Cell, strict=False) for row in rows]
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path} holds other rows than an experiment's: {error}; remove it") from None


def write_cells(path: Path, cells: Iterable[Cell]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".new")
    with draft.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(Cell.__struct_fields__)
        for cell in sorted(cells, key=_place):
            writer.writerow(["" if value is None else value for value in msgspec.structs.astuple(cell)])
    draft.replace(path)  # whole, or not at all


def _place(cell: Cell) -> tuple[str, float, float, str, int]:
    return cell.setup, cell.rate, -cell.slo_factor, cell.system, cell.seed


def kept(cells: Sequence[Cell], points: Sequence[Point], requests: int | None, code: str) -> list[Cell]:
    """Those that still hold: of one of these points, of this code, and as long as wanted."""
    wanted = {point[1:] for point in points}
    return [
        cell
        for cell in cells
        if cell.key in wanted
        and cell.code == code
        and cell.requests == min(SETUPS[cell.setup].requests, requests or SETUPS[cell.setup].requests)
    ]
