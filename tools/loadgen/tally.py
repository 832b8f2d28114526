"""What came of a run, summed up as it goes on. Memory stays bounded, however long it runs.

1. Only requests that are due within the measured window (after the warm-up) count.
2. Latency goes from when a request was due to its last byte: a client that is late makes it worse, not better.
3. SLO attainment is of all that were due: errors, and what was not sent as too many were in flight, have missed it.
4. Goodput is the requests a second that met their SLO, over the window; requests and tokens a second go over the window
   and the time until the last of its requests has ended.
5. A run does not count where the client was late itself (the 99th percentile of the time from due to sent), where it
   was to have more in flight than it may, where it was interrupted, and where nothing was due in its window.
6. Percentiles are exact up to SAMPLE_SIZE requests, beyond that of a random sample of so many.
"""

from collections import Counter
from random import Random
from typing import NamedTuple

import msgspec

from tools.bench.serving import quantile
from tools.loadgen.schedule import Send

SAMPLE_SIZE = 100_000
NOT_SENT = "not sent, too many in flight"
_MAX_KINDS = 30  # of errors that are told apart


class Outcome(NamedTuple):
    """What came of one request."""

    send: Send
    lag_s: float  # from when it was due to when it was sent
    latency_s: float  # from when it was due to its end
    error: str = ""  # what kind; empty: it has an answer
    first_text_s: float | None = None  # from when it was due
    tokens: int = 0
    steps: int | None = None
    mean_threshold: float | None = None
    moves: int | None = None
    is_correct: bool | None = None  # None: nobody knows
    answer: str = ""

    @property
    def met(self) -> bool | None:
        """Its SLO; None where it has none."""
        if self.send.slo_ms is None:
            return None
        return not self.error and 1e3 * self.latency_s <= self.send.slo_ms


class Percentiles(msgspec.Struct, frozen=True):
    """In milliseconds."""

    p50: float
    p95: float
    p99: float


class ClassReport(msgspec.Struct, frozen=True):
    """Requests of one SLO and tier."""

    slo_ms: float | None
    tier: str | None
    due: int
    met: int


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What came of a run. None: not told by the endpoint, or not asked for."""

    window_s: float  # the measured part, rule 1
    due: int
    finished: int
    due_per_s: float
    slo_attainment: float | None  # share
    goodput_per_s: float | None
    finished_per_s: float
    tokens_per_s: float
    latency_ms: Percentiles | None
    first_text_ms: Percentiles | None
    mean_steps: float | None
    mean_threshold: float | None
    moves: int | None
    correct: float | None  # share of the finished ones whose answers can be checked
    checked: int
    errors: dict[str, int]
    classes: list[ClassReport]
    most_in_flight: int
    lag_p99_ms: float
    why_it_does_not_count: list[str]

    @property
    def counts(self) -> bool:
        return not self.why_it_does_not_count


class Sample:
    """Rule 6."""

    def __init__(self, size: int = SAMPLE_SIZE) -> None:
        self._size = size
        self._rng = Random(0)
        self.values: list[float] = []
        self.count = 0

    def add(self, value: float) -> None:
        self.count += 1
        if len(self.values) < self._size:
            self.values.append(value)
        elif (place := self._rng.randrange(self.count)) < self._size:
            self.values[place] = value

    def percentiles_ms(self) -> Percentiles | None:
        """Of values in seconds."""
        if not self.values:
            return None
        return Percentiles(*(round(1e3 * quantile(self.values, share), 3) for share in (0.5, 0.95, 0.99)))


class _Mean:
    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: float | None) -> None:
        if value is not None:
            self.total += value
            self.count += 1

    @property
    def value(self) -> float | None:
        return self.total / self.count if self.count else None


class Tally:
    """Takes outcomes in any order; `report` at any time."""

    def __init__(self, warmup_s: float, window_s: float, *, max_in_flight: int, max_lag_ms: float) -> None:
        self.warmup_s, self.window_s = warmup_s, window_s
        self.max_in_flight, self._max_lag_ms = max_in_flight, max_lag_ms
        self.due = self.finished = self.met = 0
        self.most_in_flight = 0
        self.interrupted = False
        self._tokens = 0
        self._last_end_s = warmup_s + window_s
        self._lag, self._latency, self._first_text = Sample(), Sample(), Sample()
        self._steps, self._threshold, self._moves, self._correct = _Mean(), _Mean(), _Mean(), _Mean()
        self._errors: Counter[str] = Counter()
        self._due_of: Counter[tuple[float | None, str | None]] = Counter()
        self._met_of: Counter[tuple[float | None, str | None]] = Counter()

    def add(self, outcome: Outcome) -> None:
        send = outcome.send
        if send.due_s < self.warmup_s:
            return
        kind = (send.slo_ms, send.tier)
        self.due += 1
        self._due_of[kind] += 1
        self._met_of[kind] += outcome.met is True
        self.met += outcome.met is True
        self._lag.add(outcome.lag_s)
        self._last_end_s = max(self._last_end_s, send.due_s + outcome.latency_s)
        if outcome.error:
            known = outcome.error in self._errors or len(self._errors) < _MAX_KINDS
            self._errors[outcome.error if known else "other"] += 1
        else:
            self._add_finished(outcome)

    def _add_finished(self, outcome: Outcome) -> None:
        self.finished += 1
        self._tokens += outcome.tokens
        self._latency.add(outcome.latency_s)
        if outcome.first_text_s is not None:
            self._first_text.add(outcome.first_text_s)
        self._steps.add(outcome.steps)
        self._threshold.add(outcome.mean_threshold)
        self._moves.add(outcome.moves)
        self._correct.add(outcome.is_correct)

    @property
    def lag_p99_ms(self) -> float:
        lag = self._lag.percentiles_ms()
        return lag.p99 if lag else 0.0

    def report(self) -> Report:
        has_slo = any(slo_ms is not None for slo_ms, _ in self._due_of)
        until_end_s = self._last_end_s - self.warmup_s
        return Report(
            window_s=self.window_s,
            due=self.due,
            finished=self.finished,
            due_per_s=self.due / self.window_s,
            slo_attainment=self.met / self.due if has_slo else None,
            goodput_per_s=self.met / self.window_s if has_slo else None,
            finished_per_s=self.finished / until_end_s,
            tokens_per_s=self._tokens / until_end_s,
            latency_ms=self._latency.percentiles_ms(),
            first_text_ms=self._first_text.percentiles_ms(),
            mean_steps=self._steps.value,
            mean_threshold=self._threshold.value,
            moves=int(self._moves.total) if self._moves.count else None,
            correct=self._correct.value,
            checked=self._correct.count,
            errors=dict(self._errors.most_common()),
            classes=[
                ClassReport(slo_ms, tier, due, self._met_of[slo_ms, tier])
                for (slo_ms, tier), due in sorted(self._due_of.items(), key=str)
            ],
            most_in_flight=self.most_in_flight,
            lag_p99_ms=self.lag_p99_ms,
            why_it_does_not_count=list(self._objections()),
        )

    def _objections(self) -> list[str]:
        """Rule 5."""
        not_sent = self._errors[NOT_SENT]
        found = {
            f"the client was late: p99 {self.lag_p99_ms:.1f} ms from due to sent, {self._max_lag_ms:g} ms are allowed; "
            "the machine is too busy or the rate too high for it": self.lag_p99_ms > self._max_lag_ms,
            f"{not_sent} requests were not sent, as {self.max_in_flight} were in flight": not_sent > 0,
            "it was interrupted": self.interrupted,
            "no request was due in its window": self.due == 0,
        }
        return [reason for reason, holds in found.items() if holds]


def describe(report: Report) -> str:
    """The report as a Markdown table, and whether it counts."""
    rows = [
        ("requests due", f"{report.due} ({report.due_per_s:.2f}/s over {report.window_s:g} s)"),
        ("finished", f"{report.finished} ({report.finished_per_s:.2f}/s)"),
        ("SLO attainment", _share(report.slo_attainment)),
        ("goodput, requests/s", _number(report.goodput_per_s, ".2f")),
        ("latency p50 / p95 / p99, ms", _percentiles(report.latency_ms)),
        ("first text p50 / p95 / p99, ms", _percentiles(report.first_text_ms)),
        ("output tokens/s", f"{report.tokens_per_s:.0f}"),
        ("mean steps", _number(report.mean_steps, ".2f")),
        ("mean threshold applied", _number(report.mean_threshold, ".3f")),
        ("moves", _number(report.moves, "d")),
        ("correct", f"{_share(report.correct)} of {report.checked}" if report.checked else "-"),
        ("most in flight", str(report.most_in_flight)),
        ("client's own lag p99, ms", f"{report.lag_p99_ms:.1f}"),
    ]
    if len(report.classes) > 1:
        for kind in report.classes:
            label = f"met, SLO {_number(kind.slo_ms, 'g')} ms, tier {kind.tier or '-'}"
            rows.append((label, f"{kind.met} of {kind.due} ({kind.met / kind.due:.1%})"))
    rows += [(f"error: {kind}", str(count)) for kind, count in report.errors.items()]
    width = max(len(name) for name, _ in rows)
    lines = [f"| {name:{width}} | {value} |" for name, value in [("what", "measured"), ("-" * width, "---"), *rows]]
    verdict = [f"THIS RUN DOES NOT COUNT: {reason}" for reason in report.why_it_does_not_count]
    return "\n".join([*lines, "", *(verdict or ["The client kept up: this run counts."])])


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.1%}"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percentiles(found: Percentiles | None) -> str:
    return "-" if found is None else f"{found.p50:.0f} / {found.p95:.0f} / {found.p99:.0f}"
