"""python -m tools.bench.telemetry: what traces cost, on a live stack and alone. Prints Markdown for BENCHMARKS.md.

1. A pair is two stacks that stand side by side for as long as it lasts: one sends every trace to a collector, the other
   has traces off. They are given the same requests by turns: off, on, on, off, on, off, off, on, ..., so that a machine
   which gets faster or slower does so for both.
2. Each pair starts its stacks anew, the one or the other first. So pairs are independent: the luck that a start brings
   is in their scatter, and not taken for an effect.
3. Work is equal: the same prompts, greedily, at a pinned threshold. What counts is the time that it takes.
4. Settings are the defaults. So spans are sent in whoever's turn it is: a few milliseconds every five seconds, about a
   thousandth. Of processor time nothing goes astray: what the processes of one stack, and the collector, take from a
   pair's first turn to its last is compared with what the other's take. Both are idle for about as long.
5. The loss of a pair is 1 - (time off / time on). Its upper bound is Student's, over all pairs, of the logarithms.
6. Of a step of the worker is compared what goes by outside forward pass and commit: spans are made by another thread of
   the worker's process, which holds up the hot loop's where they meet.
7. Alone: the processor time of making and sending the span of a block, of all threads, times the spans that the worker
   made a step of a request.
Takes about sixteen minutes on two quiet cores; no pair begins after eighteen (`--minutes`).
"""

import argparse
import contextlib
import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families
from scipy import stats  # type: ignore[import-untyped]

from contracts.messages import BlockCost, ProgressRecord
from services import telemetry
from services.bus import new_trace_parent, trace_parent
from services.denoiser.worker import record_spans
from services.denoiser.worker_events import Write
from tools.bench.collector import running_collector
from tools.bench.machine import describe_machine
from tools.bench.serving import measure_throughput
from tools.bench.stack import free_ports, running_stack

PAIRS = 36
TURNS = 8  # of each side in a pair
REQUESTS = 16  # a turn
LOSS_BUDGET = 0.03
STEP_BUDGET_US = 50.0

_THRESHOLD = 0.9
_IN_FLIGHT = 4
_BATCH = 1_000  # spans made before it is waited until they are sent: fewer than may wait
_BATCHES = 10
_SEND_LIMIT_S = 30.0


class Part(NamedTuple):
    """What some work took. Such are added up field by field."""

    seconds: float
    cpu_s: float  # processor time of all processes; `on`'s is `off`'s and what its stack took more in the whole pair
    tokens: float
    steps: float  # of the engine
    request_steps: float  # of all requests: those that share a step of the engine count each
    overhead_s: float  # of the steps, outside forward pass and commit
    spans: float  # that the worker made

    @property
    def overhead_us(self) -> float:
        """A step."""
        return 1e6 * self.overhead_s / self.steps


def total(parts: Iterable[Part]) -> Part:
    return Part(*map(sum, zip(*parts, strict=True)))


class Pair(NamedTuple):
    off: Part
    on: Part


class Bound(NamedTuple):
    """A mean and the value that it does not exceed, 19 times in 20."""

    mean: float
    upper: float


def upper_bound(values: Sequence[float]) -> Bound:
    """Of the mean of values that vary normally. Raises ValueError for less than two."""
    if len(values) < 2:
        raise ValueError(f"{len(values)} values have no bound: at least two pairs are needed")
    mean, error = statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))
    return Bound(mean, mean + float(stats.t.ppf(0.95, len(values) - 1)) * error)


def loss(pairs: Sequence[Pair]) -> Bound:
    """Of throughput, as a share of that with traces off."""
    return _loss([(pair.off.seconds, pair.on.seconds) for pair in pairs])


def loss_per_cpu(pairs: Sequence[Pair]) -> Bound:
    """Of the work done in a second of processor time, as a share of that with traces off."""
    return _loss([(pair.off.cpu_s, pair.on.cpu_s) for pair in pairs])


def _loss(took: Sequence[tuple[float, float]]) -> Bound:
    slower = upper_bound([math.log(on / off) for off, on in took])
    return Bound(*(1 - math.exp(-value) for value in slower))


def overhead_us(pairs: Sequence[Pair]) -> Bound:
    """What a step's overhead grows by, in microseconds."""
    return upper_bound([pair.on.overhead_us - pair.off.overhead_us for pair in pairs])


# --- live ---------------------------------------------------------------------------------------------------------


class _Side:
    """One of the two stacks, and what else works for it."""

    def __init__(self, url: str, metrics_url: str, requests: int, processes: Sequence[psutil.Process]) -> None:
        self._url, self._metrics_url, self._requests = url, metrics_url, requests
        self._processes = processes

    def run(self) -> Part:
        before, cpu_before = self._counters(), self.cpu_s()
        done = measure_throughput(self._url, self._requests, _IN_FLIGHT, threshold=_THRESHOLD)
        cpu_after, after = self.cpu_s(), self._counters()
        grown = {name: after[name] - before.get(name, 0.0) for name in after}
        seconds = self._requests / done.requests_per_s
        return Part(
            seconds=seconds,
            cpu_s=cpu_after - cpu_before,
            tokens=done.tokens_per_s * seconds,
            steps=grown["tediserve_worker_step_overhead_seconds_count"],
            request_steps=grown["tediserve_worker_step_threshold_count"],
            overhead_s=grown["tediserve_worker_step_overhead_seconds_sum"],
            spans=grown.get("tediserve_telemetry_spans_total made", 0.0),
        )

    def cpu_s(self) -> float:
        """Processor time so far, of all processes."""
        return sum(sum(process.cpu_times()[:2]) for process in self._processes)

    def _counters(self) -> dict[str, float]:
        """What the worker has counted so far; a counter's `outcome` stands behind its name."""
        told = httpx.get(self._metrics_url, timeout=10).text
        return {
            " ".join([sample.name, *filter(None, [sample.labels.get("outcome")])]): sample.value
            for family in text_string_to_metric_families(told)
            for sample in family.samples
        }


@contextlib.contextmanager
def _sides(
    profile: str, requests: int, collector_url: str, collector_pid: int, *, on_first: bool
) -> Iterator[dict[bool, _Side]]:
    """Both stacks, by whether traces are on, warm."""
    sides: dict[bool, _Side] = {}
    with contextlib.ExitStack() as stack:
        for is_on in (on_first, not on_first):
            (port,) = free_ports(1)
            settings = {"TEDISERVE_WORKER_METRICS_PORT": str(port)}
            if is_on:
                settings["TEDISERVE_TELEMETRY_ENDPOINT"] = collector_url
            others = set(psutil.Process().children(recursive=True))
            url, _ = stack.enter_context(running_stack(profile, workers=1, environment=settings))
            processes = set(psutil.Process().children(recursive=True)) - others
            processes |= {psutil.Process(collector_pid)} if is_on else set()
            sides[is_on] = _Side(url, f"http://127.0.0.1:{port}/metrics", requests, list(processes))
            sides[is_on].run()
        yield sides


def measure_pair(
    profile: str, requests: int, turns: int, collector_url: str, collector_pid: int, *, on_first: bool
) -> Pair:
    """`turns` of each side, which follow each other so that both have the same share of any even trend."""
    parts: dict[bool, list[Part]] = {False: [], True: []}
    with _sides(profile, requests, collector_url, collector_pid, on_first=on_first) as sides:
        more_cpu_s = sides[False].cpu_s() - sides[True].cpu_s()
        for turn in range(turns):
            first = on_first != bool(turn.bit_count() % 2)
            for is_on in (first, not first):
                parts[is_on].append(sides[is_on].run())
        more_cpu_s += sides[True].cpu_s() - sides[False].cpu_s()
    off = total(parts[False])
    return Pair(off=off, on=total(parts[True])._replace(cpu_s=off.cpu_s + more_cpu_s))


# --- alone --------------------------------------------------------------------------------------------------------


def span_us(collector_url: str, batches: int = _BATCHES) -> float:
    """Processor time of one block's span, in microseconds: made as the worker does it, and sent."""
    telemetry.set_up("bench", telemetry.TelemetrySettings(endpoint=collector_url, send_every_s=0.05))
    trace_parent.set(new_trace_parent())
    write = _a_write()
    try:
        _record_and_send(write)  # connects
        began = time.process_time()
        for _ in range(batches):
            _record_and_send(write)
        return 1e6 * (time.process_time() - began) / (batches * _BATCH)
    finally:
        telemetry.shut_down()
        trace_parent.set("")


def _record_and_send(write: Write) -> None:
    """Raises RuntimeError if the collector does not take them."""
    wanted = _sent() + _BATCH
    for _ in range(_BATCH):
        record_spans(write, stored_at=time.time())
    give_up_at = time.monotonic() + _SEND_LIMIT_S
    while _sent() < wanted:
        if time.monotonic() > give_up_at:
            raise RuntimeError(f"{wanted - _sent():.0f} spans were not sent within {_SEND_LIMIT_S:g} s")
        time.sleep(0.02)


def _sent() -> float:
    return sum(s.value for m in telemetry.SPANS.collect() for s in m.samples if s.labels.get("outcome") == "sent")


def _a_write() -> Write:
    """Of a record that tells of one more block."""
    cost = BlockCost(
        instance_id="bench-0", tp_degree=1, recompute_steps=1, cache_steps=7, mean_threshold=0.9, seconds=0.1
    )
    record = ProgressRecord(
        request_id="bench",
        gateway_id="bench",
        attempt=1,
        state="running",
        blocks_done=1,
        blocks=[cost],
        written_at=time.time(),
    )
    return Write(run_id="bench.1", record=record, after_seq=0, blocks_before=0, trace="")


# --- the command --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.telemetry", description="Measures what traces cost.")
    parser.add_argument("--profile", default="profiles/tiny-cpu", help="folder of the profile")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="requests of a turn")
    parser.add_argument("--turns", type=int, default=TURNS, help="turns of each side in a pair")
    parser.add_argument(
        "--pairs", type=int, default=PAIRS, help="pairs, for each of which both stacks are started anew"
    )
    parser.add_argument("--minutes", type=float, default=18.0, help="no pair begins after so long")
    options = parser.parse_args()
    give_up_at = time.monotonic() + 60 * options.minutes
    print(
        f"Hardware: {describe_machine()}. Profile: {options.profile}. {_IN_FLIGHT} requests in flight, one worker;"
        f" {options.turns} turns of {options.requests} requests for each side of a pair.\n"
    )
    print(
        "| pair | off s | on s | on / off | off CPU s | on CPU s | on / off | overhead a step off µs | on µs |", end=""
    )
    print(" steps off | on | tokens off | on |\n" + "|---" * 13 + "|")
    done: list[Pair] = []
    with running_collector() as (url, pid):
        while len(done) < options.pairs and time.monotonic() < give_up_at:
            on_first = len(done) % 2 == 1
            done.append(measure_pair(options.profile, options.requests, options.turns, url, pid, on_first=on_first))
            _print_pair(len(done), done[-1])
        per_span_us = span_us(url)
    _print_result(done, per_span_us)


def _print_pair(number: int, pair: Pair) -> None:
    off, on = pair
    print(
        f"| {number} | {off.seconds:.2f} | {on.seconds:.2f} | {on.seconds / off.seconds:.3f} |"
        f" {off.cpu_s:.2f} | {on.cpu_s:.2f} | {on.cpu_s / off.cpu_s:.3f} |"
        f" {off.overhead_us:.0f} | {on.overhead_us:.0f} | {off.steps:.0f} | {on.steps:.0f} |"
        f" {off.tokens:.0f} | {on.tokens:.0f} |",
        flush=True,
    )


def _print_result(pairs: Sequence[Pair], per_span_us: float) -> None:
    lost, lost_per_cpu, held_up = loss(pairs), loss_per_cpu(pairs), overhead_us(pairs)
    spans = sum(pair.on.spans for pair in pairs)
    alone_us = per_span_us * spans / sum(pair.on.request_steps for pair in pairs)
    in_all_us = per_span_us * spans / sum(pair.on.steps for pair in pairs)
    print(f"\nOver {len(pairs)} pairs, bounds at 95 %, one-sided:\n")
    print("| what | mean | upper bound | budget | kept |")
    print("|---|---|---|---|---|")
    kept = _yes(lost.upper < LOSS_BUDGET)
    print(f"| loss of throughput | {lost.mean:.2%} | {lost.upper:.2%} | {LOSS_BUDGET:.0%} | {kept} |")
    print(f"| loss of work a second of processor time | {lost_per_cpu.mean:.2%} | {lost_per_cpu.upper:.2%} | | |")
    kept = _yes(held_up.upper < STEP_BUDGET_US)
    print(f"| more overhead a step, µs | {held_up.mean:.1f} | {held_up.upper:.1f} | {STEP_BUDGET_US:.0f} | {kept} |")
    kept = _yes(alone_us < STEP_BUDGET_US)
    print(f"| processor time of spans a step of a request, µs | {alone_us:.1f} | | {STEP_BUDGET_US:.0f} | {kept} |")
    print(
        f"\n{per_span_us:.0f} µs of processor time a span, made and sent, outside the hot loop's thread;"
        f" with {spans:.0f} spans of the worker that is {in_all_us:.0f} µs a step of the engine."
    )


def _yes(kept: bool) -> str:
    return "yes" if kept else "no"


if __name__ == "__main__":
    main()
