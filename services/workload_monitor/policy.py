"""Which classes of requests there are, and how often they come. Pure.

1. A class is a priority, a bin of prompt lengths and a bin of output lengths. Its sizes are the means of its requests.
2. Requests are counted in buckets of time, and so forgotten a bucket at a time; nothing is kept of a single one. Where
   `max_classes` classes are known, one of another counts with the nearest: of the nearest priority, then bins.
3. A request's weight halves with each `half_life_s` of its bucket's age, and so does the weight of the time in it: the
   rate is weighted requests over weighted seconds, so that an even stream is measured as what it is, and the end of a
   burst is soon seen.
4. Time counts from the start of the window, or from when this monitor began, or from the oldest request that it found
   then, if that is later: what had ended by then it cannot know.
5. Requests for other models are not counted.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from contracts import messages as m
from services.workload_monitor.config import WorkloadMonitorConfig


@dataclass(frozen=True, slots=True)
class RequestSeen:
    """A request has come. `arrived_at`: on the clock of `handle`."""

    request: m.GenerateRequest
    arrived_at: float


@dataclass(frozen=True, slots=True)
class SnapshotDue:
    """It is time to say what there is; `wall`: the time of day."""

    wall: float


Event: TypeAlias = RequestSeen | SnapshotDue


@dataclass(frozen=True, slots=True)
class Say:
    """Store this snapshot."""

    snapshot: m.WorkloadSnapshot


class _Key(NamedTuple):
    priority: int
    prompt_bin: int
    output_bin: int

    def distance(self, other: "_Key") -> tuple[int, int, "_Key"]:
        bins = abs(self.prompt_bin - other.prompt_bin) + abs(self.output_bin - other.output_bin)
        return abs(self.priority - other.priority), bins, other


@dataclass(slots=True)
class _Cell:
    """Requests of one class: of a bucket, or weighted and added up."""

    requests: float = 0.0
    prompt_tokens: float = 0.0
    output_tokens: float = 0.0
    with_slo: float = 0.0
    slo_s: float = 0.0
    unweighted: int = 0

    def add(self, other: "_Cell", weight: float) -> None:
        self.requests += weight * other.requests
        self.prompt_tokens += weight * other.prompt_tokens
        self.output_tokens += weight * other.output_tokens
        self.with_slo += weight * other.with_slo
        self.slo_s += weight * other.slo_s
        self.unweighted += other.unweighted


@dataclass(slots=True)
class _Bucket:
    cells: dict[_Key, _Cell] = field(default_factory=dict)


class WorkloadMonitor:
    """Event in, commands out. One model's requests."""

    def __init__(self, config: WorkloadMonitorConfig, model: str, began_at: float) -> None:
        self._config, self._model = config, model
        self._known_since = began_at
        self._buckets: dict[int, _Bucket] = {}  # by number: of `bucket_s` seconds each, on the clock of `handle`
        self._classes: Counter[_Key] = Counter()  # in how many buckets each is

    @property
    def num_classes(self) -> int:
        return len(self._classes)

    @property
    def num_cells(self) -> int:
        """What memory goes by."""
        return sum(len(bucket.cells) for bucket in self._buckets.values())

    def handle(self, event: Event, now: float) -> list[Say]:
        """`now`: monotonic seconds."""
        self._forget(now)
        match event:
            case RequestSeen():
                self._count(event.request, min(event.arrived_at, now), now)
                return []
            case SnapshotDue():
                return [Say(self._snapshot(now, event.wall))]

    def _count(self, request: m.GenerateRequest, arrived_at: float, now: float) -> None:
        number = self._number(arrived_at)
        if request.model != self._model or number < self._first_number(now):
            return
        self._known_since = min(self._known_since, arrived_at)
        bucket = self._buckets.setdefault(number, _Bucket())
        key = self._class_of(request)
        if key not in bucket.cells:
            bucket.cells[key] = _Cell()
            self._classes[key] += 1
        slo_s = None if request.deadline_at is None else max(0.0, request.deadline_at - request.created_at)
        one = _Cell(1.0, len(request.prompt_ids), request.max_tokens, float(slo_s is not None), slo_s or 0.0, 1)
        bucket.cells[key].add(one, 1.0)

    def _class_of(self, request: m.GenerateRequest) -> _Key:
        """Rules 1 and 2. Bin 0 holds lengths 1 to `bin_tokens`."""
        width = self._config.bin_tokens
        key = _Key(request.priority, max(0, len(request.prompt_ids) - 1) // width, (request.max_tokens - 1) // width)
        if key in self._classes or len(self._classes) < self._config.max_classes:
            return key
        return min(self._classes, key=key.distance)

    def _number(self, at: float) -> int:
        return int(at // self._config.bucket_s)

    def _first_number(self, now: float) -> int:
        return self._number(now) - self._config.buckets + 1

    def _forget(self, now: float) -> None:
        for number in [number for number in self._buckets if number < self._first_number(now)]:
            for key in self._buckets.pop(number).cells:
                self._classes[key] -= 1
                if not self._classes[key]:
                    del self._classes[key]

    # --- snapshots ------------------------------------------------------------------------------------------------

    def _snapshot(self, now: float, wall: float) -> m.WorkloadSnapshot:
        """Rules 3 and 4."""
        width_s, first = self._config.bucket_s, self._first_number(now)
        since = min(max(self._known_since, first * width_s), now)
        weighted_s, sums = 0.0, dict[_Key, _Cell]()
        for number in range(max(first, self._number(since)), self._number(now) + 1):
            begin, end = max(number * width_s, since), min((number + 1) * width_s, now)
            weight = 0.5 ** ((now - (begin + end) / 2) / self._config.half_life_s)
            weighted_s += weight * (end - begin)
            for key, cell in self._buckets.get(number, _Bucket()).cells.items():
                sums.setdefault(key, _Cell()).add(cell, weight)
        classes = [_describe(key, cell, weighted_s) for key, cell in sorted(sums.items())] if weighted_s > 0 else []
        return m.WorkloadSnapshot(
            sent_at=wall,
            model=self._model,
            window_s=self._config.window_s,
            covered_s=now - since,
            classes=sorted(classes, key=lambda one: -one.rate_rps),
        )

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        assert self._classes == Counter(key for bucket in self._buckets.values() for key in bucket.cells)
        assert len(self._buckets) <= self._config.buckets
        assert self.num_classes <= self._config.max_classes


def _describe(key: _Key, cell: _Cell, weighted_s: float) -> m.WorkloadClass:
    return m.WorkloadClass(
        priority=key.priority,
        prompt_tokens=max(1, round(cell.prompt_tokens / cell.requests)),
        output_tokens=max(1, round(cell.output_tokens / cell.requests)),
        rate_rps=cell.requests / weighted_s,
        requests=cell.unweighted,
        slo_s=cell.slo_s / cell.with_slo if cell.with_slo else None,
    )
