"""The folder of a benchmark: what it is based on, and one file for each finished cell.

1. `basis.json` holds what all cells share. A run that would share something else needs another folder.
2. A cell is one policy under one seed's arrivals at one rate. Its file is written whole, when it has ended: what is
   there is finished, and is not run again. Remove a file to have its cell run again.
3. The first rate comes first, with all seeds; the policies of one seed take turns, each seed beginning with another.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from services.settings import ConfigError
from tools.bench.slo.work import Work
from tools.loadgen.tally import Outcome

T = TypeVar("T")

_SHARED = ("profile", "workers", "seconds", "warmup_s", "slo_factor", "problems", "tokens_each")


class Basis(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured first, and under what. All cells share it but for the matrix, which may grow."""

    profile: str
    workers: int
    seconds: float  # measured of each cell
    warmup_s: float  # before that
    slo_factor: float  # SLO over the median latency alone
    problems: int  # that prompts are drawn from
    tokens_each: int = 0  # output tokens that are asked for, for each problem that a prompt numbers; 0: the profile's
    machine: str
    threshold: float  # the profile's, of `fixed`
    alone_ms: float  # median latency of one request at a time, fixed threshold
    capacity_per_s: float  # C: completions/s of the fixed threshold with a full queue
    rates: list[float]  # times C; of the last run, as are the next two
    seeds: list[int]
    policies: list[str]
    alone_work: list[Work] = []  # of each instance, while `alone_ms` was measured; []: nobody looked
    full_work: list[Work] = []  # while C was

    @property
    def slo_ms(self) -> float:
        return self.slo_factor * self.alone_ms


class Cell(NamedTuple):
    """One run of the benchmark."""

    rate: float  # times C
    seed: int
    policy: str

    @property
    def file_name(self) -> str:
        return re.sub(r"[^\w.+=-]", "_", f"rate-{self.rate:g}_seed-{self.seed}_{self.policy}") + ".json"


class Row(msgspec.Struct, frozen=True, array_like=True):
    """One request that was due in a cell's window."""

    number: int  # the same number is the same request in all policies of a seed and rate
    prompt: int  # the same number is the same prompt
    due_s: float
    latency_ms: float
    met: bool
    error: str  # empty: it has an answer, of which the rest tells
    is_correct: bool | None
    tokens: int
    steps: int | None
    mean_threshold: float | None
    moves: int | None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """A finished cell."""

    rate: float
    seed: int
    policy: str
    settings: dict[str, Any]  # of the threshold-controller
    scheduler: dict[str, Any] = {}
    rate_per_s: float
    slo_ms: float
    lag_p99_ms: float
    why_it_does_not_count: list[str]
    rows: list[Row]
    work: list[Work] = []  # of each instance, warm-up included; []: nobody looked

    @property
    def cell(self) -> Cell:
        return Cell(self.rate, self.seed, self.policy)

    @property
    def attainment(self) -> float:
        """Share of what was due that met its SLO."""
        return sum(row.met for row in self.rows) / len(self.rows) if self.rows else 0.0


def row_of(outcome: Outcome, prompt: int) -> Row:
    return Row(
        number=outcome.send.number,
        prompt=prompt,
        due_s=round(outcome.send.due_s, 4),
        latency_ms=round(1e3 * outcome.latency_s, 2),
        met=outcome.met is True,
        error=outcome.error,
        is_correct=outcome.is_correct,
        tokens=outcome.tokens,
        steps=outcome.steps,
        mean_threshold=outcome.mean_threshold,
        moves=outcome.moves,
    )


def in_order(rates: Sequence[float], seeds: Sequence[int], policies: Sequence[str]) -> Iterator[Cell]:
    """Rule 3."""
    for rate in rates:
        for turn, seed in enumerate(seeds):
            first = turn % len(policies)
            for policy in (*policies[first:], *policies[:first]):
                yield Cell(rate, seed, policy)


class Folder:
    """Rules 1 and 2."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._basis_file = path / "basis.json"

    def basis(self) -> Basis | None:
        """Raises ConfigError where the file is not what it should be."""
        if not self._basis_file.exists():
            return None
        return _read(self._basis_file, Basis)

    def save_basis(self, basis: Basis) -> None:
        self.path.mkdir(parents=True, exist_ok=True)
        _write(self._basis_file, basis)

    def is_done(self, cell: Cell) -> bool:
        return (self.path / cell.file_name).exists()

    def save(self, result: Result) -> None:
        _write(self.path / result.cell.file_name, result)

    def results(self) -> list[Result]:
        """Of all finished cells. Raises ConfigError."""
        return [_read(path, Result) for path in sorted(self.path.glob("rate-*.json"))]


def check_same(basis: Basis, **wanted: object) -> None:
    """Rule 1. Raises ConfigError."""
    for name in _SHARED:
        if getattr(basis, name) != wanted[name]:
            raise ConfigError(
                f"{name}: this folder's cells have {getattr(basis, name)}, not {wanted[name]}: choose another folder"
            )


def _read(path: Path, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{path}: {error}") from None


def _write(path: Path, value: object) -> None:
    draft = path.with_suffix(".new")
    draft.write_bytes(msgspec.json.encode(value) + b"\n")
    draft.replace(path)  # whole, or not at all
