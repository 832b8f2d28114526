"""What came of a run: a row for each request, and what they come to. The same run gives the same bytes."""

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

import msgspec

from contracts.messages import GenerateRequest, ProgressRecord


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one request. Times in seconds."""

    request_id: str
    prompt: int  # its number
    prompt_tokens: int
    arrived_at: float
    state: str  # finished, or why not: cancelled, failed
    reason: str
    latency_s: float  # from the call to the answer
    queue_s: float  # until an instance had accepted it
    met: bool | None  # its deadline; None: it has none
    blocks: int
    steps: int
    recompute_steps: int
    mean_threshold: float | None  # over its steps; None: it has run none
    moves: int
    correctness: float | None  # 1 or 0, or what is expected; None: nobody can tell

    @classmethod
    def of(
        cls, request: GenerateRequest, record: ProgressRecord, prompt: int, correctness: float | None, now: float
    ) -> "Outcome":
        """Of a final record that was read at `now`."""
        recompute_steps = sum(block.recompute_steps for block in record.blocks)
        steps = recompute_steps + sum(block.cache_steps for block in record.blocks)
        weighed = sum(b.mean_threshold * (b.recompute_steps + b.cache_steps) for b in record.blocks)
        began = now if record.started_at is None else record.started_at
        in_time = request.deadline_at is not None and now <= request.deadline_at
        return cls(
            request_id=request.request_id,
            prompt=prompt,
            prompt_tokens=len(request.prompt_ids),
            arrived_at=_rounded(request.created_at),
            state=record.state,
            reason=record.reason,
            latency_s=_rounded(now - request.created_at),
            queue_s=_rounded(began - request.created_at),
            met=None if request.deadline_at is None else record.state == "finished" and in_time,
            blocks=len(record.blocks),
            steps=steps,
            recompute_steps=recompute_steps,
            mean_threshold=_rounded(weighed / steps) if steps else None,
            moves=record.moves,
            correctness=None if correctness is None else _rounded(correctness),
        )


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What the rows come to. Means and percentiles are over finished requests."""

    requests: int
    finished: int
    attainment: float | None  # share of all requests that met their deadline
    latency_mean_s: float | None
    latency_p50_s: float | None
    latency_p95_s: float | None
    latency_p99_s: float | None
    queue_mean_s: float | None
    steps_mean: float | None
    recompute_steps_mean: float | None
    threshold_mean: float | None
    threshold_p10: float | None
    accuracy: float | None
    accuracy_of_met: float | None
    moves_mean: float | None
    goodput_rps: float | None  # requests that met their deadline (or finished, without one), per second


def summarise(outcomes: Sequence[Outcome]) -> Summary:
    """Raises ValueError without a request."""
    if not outcomes:
        raise ValueError("there was no request: a longer time or a higher rate gives some")
    done = [outcome for outcome in outcomes if outcome.state == "finished"]
    timed = [outcome.met for outcome in outcomes if outcome.met is not None]
    latencies = [outcome.latency_s for outcome in done]
    thresholds = [outcome.mean_threshold for outcome in done if outcome.mean_threshold is not None]
    good = sum(outcome.met is not False for outcome in done)
    span_s = max(o.arrived_at + o.latency_s for o in outcomes) - min(o.arrived_at for o in outcomes)
    return Summary(
        requests=len(outcomes),
        finished=len(done),
        attainment=_mean(timed),
        latency_mean_s=_mean(latencies),
        latency_p50_s=percentile(latencies, 50),
        latency_p95_s=percentile(latencies, 95),
        latency_p99_s=percentile(latencies, 99),
        queue_mean_s=_mean([outcome.queue_s for outcome in done]),
        steps_mean=_mean([outcome.steps for outcome in done]),
        recompute_steps_mean=_mean([outcome.recompute_steps for outcome in done]),
        threshold_mean=_mean(thresholds),
        threshold_p10=percentile(thresholds, 10),
        accuracy=_mean([o.correctness for o in done if o.correctness is not None]),
        accuracy_of_met=_mean([o.correctness for o in done if o.correctness is not None and o.met]),
        moves_mean=_mean([outcome.moves for outcome in done]),
        goodput_rps=_rounded(good / span_s) if span_s > 0 else None,
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Linear between neighbours; None for no values."""
    if not values:
        return None
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return _rounded(ordered[below] + (place - below) * (ordered[above] - ordered[below]))


def _mean(values: Sequence[float]) -> float | None:
    return _rounded(fmean(values)) if values else None


def _rounded(value: float) -> float:
    return round(value, 6)


# --- files --------------------------------------------------------------------------------------------------------


def write_csv(path: Path, outcomes: Sequence[Outcome]) -> None:
    """One line a request, by arrival."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(Outcome.__struct_fields__)
    for outcome in by_arrival(outcomes):
        writer.writerow(["" if value is None else value for value in msgspec.structs.astuple(outcome)])
    path.write_text(text.getvalue(), encoding="utf-8")


def by_arrival(outcomes: Sequence[Outcome]) -> list[Outcome]:
    return sorted(outcomes, key=lambda outcome: (outcome.arrived_at, outcome.request_id))
