"""python -m tools.bench.footprint: processor time of each process of a live stack, idle and for each request.

1. The stack, its settings and its prompts are those of the benchmark of policies (`tools/bench/slo`), policy `ours`.
2. Load is open-loop at a fixed rate, after a warm-up that is not counted; then the stack is left idle for a while.
   Where that is more than the machine can serve, a queue grows and the run lasts longer than asked for: lower the rate.
3. What a process took under load, divided by the requests sent, is what a request costs, its share of what goes on
   anyway included: compare runs of the same rate. Another tree is measured by running this file's command there.
Takes about a minute. Prints Markdown.
"""

import argparse
import asyncio
import time
from collections.abc import Sequence
from typing import NamedTuple

import psutil

from tools.bench.machine import describe_machine
from tools.bench.slo.cluster import MAX_OPEN, Cluster, running_cluster
from tools.bench.slo.policies import policy_of
from tools.loadgen.arrivals import poisson
from tools.loadgen.asks import Ask, built_in
from tools.loadgen.client import open_endpoint
from tools.loadgen.run import OpenLoop
from tools.loadgen.schedule import Mix, sends
from tools.loadgen.tally import Outcome

_SLO_MS = 500.0
_TIMEOUT_S = 60.0
_PROBLEMS = 1000


class Footprint(NamedTuple):
    """What a process took, in seconds of processor time."""

    name: str
    busy_s: float
    idle_s: float


class Run(NamedTuple):
    """All processes over the same time. Those that came or went meanwhile are left out."""

    busy_wall_s: float
    idle_wall_s: float
    requests: int
    failed: int
    footprints: list[Footprint]


def measure(profile: str, workers: int, rate_per_s: float, warmup_s: float, seconds: float, idle_s: float) -> Run:
    """Starts a stack for it. Raises RuntimeError where it does not start."""
    asks = built_in(_PROBLEMS, seed=0)
    others = set(psutil.Process().children(recursive=True))
    with running_cluster(profile, workers, policy_of("ours")) as cluster:
        asyncio.run(_load(cluster, asks, rate_per_s, warmup_s, seed=0))
        processes = sorted(set(psutil.Process().children(recursive=True)) - others, key=lambda process: process.pid)
        begun_at, begun = time.monotonic(), _cpu_s(processes)
        outcomes = asyncio.run(_load(cluster, asks, rate_per_s, seconds, seed=1))
        busy_at, busy = time.monotonic(), _cpu_s(processes)
        time.sleep(idle_s)
        ended_at, ended = time.monotonic(), _cpu_s(processes)
        footprints = [
            Footprint(name_of(process.cmdline()), busy[process] - begun[process], ended[process] - busy[process])
            for process in processes
            if process in begun and process in ended
        ]
    failed = sum(bool(outcome.error) for outcome in outcomes)
    return Run(busy_at - begun_at, ended_at - busy_at, len(outcomes), failed, footprints)


async def _load(
    cluster: Cluster, asks: Sequence[Ask], rate_per_s: float, seconds: float, *, seed: int
) -> list[Outcome]:
    """Returns once all has been answered."""
    outcomes: list[Outcome] = []
    due = sends(poisson(rate_per_s), seed, seconds, asks=asks, slo_ms=Mix((_SLO_MS,), (1.0,)))
    async with open_endpoint(cluster.url, max_in_flight=MAX_OPEN, timeout_s=_TIMEOUT_S) as endpoint:
        body = {"model": await endpoint.choose_model(None)}
        await OpenLoop(endpoint, body, outcomes.append, max_in_flight=MAX_OPEN).run(due)
    return outcomes


def _cpu_s(processes: list[psutil.Process]) -> dict[psutil.Process, float]:
    """Processor time so far of those that run, all their threads together."""
    found = {}
    for process in processes:
        try:
            found[process] = sum(process.cpu_times()[:2])
        except psutil.NoSuchProcess:
            continue
    return found


def name_of(command: list[str]) -> str:
    """Of a process of the stack: the module that it runs, without `services.`, or its program."""
    if "-m" not in command:
        return command[0].rpartition("/")[2] if command else "gone"
    module, *words = command[command.index("-m") + 1 :]
    return " ".join([module.removeprefix("services."), *(word for word in words[:1] if word.isidentifier())])


def report(run: Run) -> str:
    """The table, the dearest process first, all together last."""
    rows = sorted(run.footprints, key=lambda footprint: -footprint.busy_s)
    everything = Footprint("all", sum(row.busy_s for row in rows), sum(row.idle_s for row in rows))
    lines = [
        f"{run.requests} requests in {run.busy_wall_s:.1f} s, {run.failed} of them refused or failed.\n",
        "| process | ms of CPU a request | % of a core | % of a core, idle |",
        "|---|---|---|---|",
    ]
    for name, busy_s, idle_s in [*rows, everything]:
        lines.append(
            f"| {name} | {1e3 * busy_s / run.requests:.2f} | {100 * busy_s / run.busy_wall_s:.1f} |"
            f" {100 * idle_s / run.idle_wall_s:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.bench.footprint", description="Processor time a request.")
    add = parser.add_argument
    add("--profile", default="profiles/tiny-cpu", help="folder of the profile (default: %(default)s)")
    add("--workers", type=int, default=2, help="instances (default: 2)")
    add("--rate", type=float, default=30.0, help="requests a second (default: 30)")
    add("--warmup", type=float, default=10.0, help="seconds of load before (default: 10)")
    add("--seconds", type=float, default=20.0, help="of load that are measured (default: 20)")
    add("--idle", type=float, default=10.0, help="seconds without load, after that (default: 10)")
    options = parser.parse_args()
    print(f"Hardware: {describe_machine()}. Profile: {options.profile}, {options.workers} workers.", end=" ")
    run = measure(options.profile, options.workers, options.rate, options.warmup, options.seconds, options.idle)
    print(report(run))


if __name__ == "__main__":
    main()
