"""python -m tools.bench: starts stacks of its own, measures, prints Markdown for BENCHMARKS.md.

1. Throughput by number of concurrent requests, then gateway overhead on the idle stack, then how soon clients that hang
   up free their slots, with two workers.
2. Step overhead of one worker: with the machine's cores free, and with the whole stack on one core.
3. The threshold-controller: load control over many open requests, and the way from a report to a threshold.
4. The step predictor: one batch of forecasts on one core.
5. The planner: both stages for a large cluster.
Run it on an otherwise idle machine; the ratios travel, the absolute numbers do not.
"""

import argparse
import asyncio
import os
import statistics

from tools.bench.control import OPEN, REPORTS_PER_S, RUNNING, SLOS_S, measure_load_control, measure_reaction
from tools.bench.hangups import NUM_CLIENTS, hang_ups
from tools.bench.machine import describe_machine
from tools.bench.planner import print_planner
from tools.bench.predictor import measure_predictor
from tools.bench.serving import measure_overhead, measure_throughput, quantile
from tools.bench.stack import free_ports, running_stack
from tools.bench.step import StepOverhead, read_overhead

_IN_FLIGHT = (1, 2, 4, 8)
_HANG_UP_ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench", description="Measures what BENCHMARKS.md reports.")
    parser.add_argument("--profile", default="profiles/tiny-cpu", help="folder of the profile")
    parser.add_argument("--requests", type=int, default=64, help="requests of each measurement")
    options = parser.parse_args()
    print(f"Hardware: {describe_machine()}. Profile: {options.profile}.\n")
    _serving(options.profile, options.requests)
    _steps(options.profile, options.requests)
    _control(options.profile)
    _predictor(options.profile)
    print_planner()


def _serving(profile: str, count: int) -> None:
    with running_stack(profile, workers=2) as (url, nats_url):
        print("| in flight | requests/s | output tokens/s | against 1 | median s | p95 s | correct |")
        print("|---|---|---|---|---|---|---|")
        alone = None
        for in_flight in _IN_FLIGHT:
            t = measure_throughput(url, count, in_flight)
            alone = alone or t.tokens_per_s
            print(
                f"| {t.in_flight} | {t.requests_per_s:.2f} | {t.tokens_per_s:.0f} | {t.tokens_per_s / alone:.2f} |"
                f" {t.median_s:.3f} | {t.p95_s:.3f} | {t.correct:.0%} |",
                flush=True,
            )
        overhead = measure_overhead(url, count)
        print(
            f"\nGateway overhead (HTTP time less time at the worker), one request, idle, {count} requests:"
            f" p50 {statistics.median(overhead.of_calls):.2f} ms, p95 {quantile(overhead.of_calls, 0.95):.2f} ms"
            f" (`/health/live`: p50 {statistics.median(overhead.of_nothing):.2f} ms)\n",
            flush=True,
        )
        print(f"{NUM_CLIENTS} clients hang up, half of them streaming: from the close to the free slot\n")
        print("| round | one step, ms | p50 ms | p95 ms | at most ms | p95 within a step and 50 ms |")
        print("|---|---|---|---|---|---|")
        for number, r in enumerate(asyncio.run(hang_ups(url, nats_url, _HANG_UP_ROUNDS)), start=1):
            times = " | ".join(f"{1e3 * seconds:.1f}" for seconds in (r.step_s, r.p50_s, r.p95_s, r.worst_s))
            print(f"| {number} | {times} | {'yes' if r.is_good else 'no'} |", flush=True)
        print()


def _steps(profile: str, count: int) -> None:
    print("| cores | steps | step to step, mean ms | overhead, mean ms | under 0.2 ms | under 1 ms |")
    print("|---|---|---|---|---|---|")
    everywhere = os.sched_getaffinity(0)
    for label, cores in (("its own free", everywhere), ("one for the whole stack", {min(everywhere)})):
        os.sched_setaffinity(0, cores)  # the stack inherits it
        try:
            o = _step_overhead(profile, count)
        finally:
            os.sched_setaffinity(0, everywhere)
        print(
            f"| {label} | {o.steps} | {o.mean_turn_ms:.2f} | {o.mean_ms:.3f} | {o.share_under_0_2_ms:.1%} |"
            f" {o.share_under_1_ms:.1%} |",
            flush=True,
        )


def _step_overhead(profile: str, count: int) -> StepOverhead:
    (port,) = free_ports(1)
    with running_stack(profile, workers=1, environment={"TEDISERVE_WORKER_METRICS_PORT": str(port)}) as (url, _):
        measure_throughput(url, count, in_flight=4)
        return read_overhead(f"http://127.0.0.1:{port}/metrics")


def _control(profile: str) -> None:
    print(
        f"\nLoad control over {OPEN:,} open requests, and from a report to a threshold at {REPORTS_PER_S} reports/s\n"
    )
    print("| what | times | p50 ms | p99 ms |")
    print("|---|---|---|---|")
    one, several = measure_load_control(profile, SLOS_S[:1]), measure_load_control(profile, SLOS_S)
    for what, times in (
        (f"load control, {RUNNING} requests have moved", one.moved),
        ("load control, and prices have changed", one.repriced),
        ("load control with several SLOs, as many have moved", several.moved),
        ("load control with several SLOs, and prices have changed", several.repriced),
        ("report to threshold", asyncio.run(measure_reaction(profile))),
    ):
        print(
            f"| {what} | {len(times)} | {1e3 * quantile(times, 0.5):.2f} | {1e3 * quantile(times, 0.99):.2f} |",
            flush=True,
        )


def _predictor(profile: str) -> None:
    print("\nStep predictor, one core: a batch of forecasts, from reports to the entries of the message\n")
    print("| requests | thresholds | p50 ms | p95 ms |")
    print("|---|---|---|---|")
    for b in measure_predictor(profile):
        print(f"| {b.requests} | {b.thresholds} | {b.p50_ms:.2f} | {b.p95_ms:.2f} |", flush=True)


if __name__ == "__main__":
    main()
