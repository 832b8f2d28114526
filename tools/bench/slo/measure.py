"""Measures what a benchmark is based on, and its cells, on a running cluster.

1. Alone: one request at a time; the median of their latencies, times a factor, is the SLO.
2. C: completions a second with twice as many requests in flight as all instances hold, so that the queue is full.
3. A cell is open-loop Poisson load. Its arrivals and prompts follow from seed and rate alone.
"""

import asyncio
import itertools
import sys
import zlib
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

import msgspec

from services.settings import ConfigError
from tools.bench.slo.cells import Basis, Cell, Result, Row, row_of
from tools.bench.slo.cluster import MAX_OPEN, Cluster
from tools.bench.slo.policies import policy_of
from tools.bench.slo.work import Work, done_since
from tools.loadgen.__main__ import shown
from tools.loadgen.arrivals import poisson
from tools.loadgen.asks import Ask
from tools.loadgen.client import Endpoint, open_endpoint
from tools.loadgen.run import OpenLoop
from tools.loadgen.schedule import Mix, Send, sends
from tools.loadgen.tally import Outcome, Tally

MAX_LAG_MS = 50.0
_TIMEOUT_S = 180.0  # of a request; longer than the server's own
_WARM_UP_SHARE = 0.2  # of a closed loop


class Measured(NamedTuple):
    """Rules 1 and 2."""

    alone_ms: float
    capacity_per_s: float
    alone_work: list[Work]
    full_work: list[Work]


async def measure_basis(
    cluster: Cluster, asks: Sequence[Ask], *, threshold: float, held: int, seconds: float
) -> Measured:
    """`held`: requests that all instances hold together. `seconds`: of each of the two. Raises ConfigError, Failed."""
    async with open_endpoint(cluster.url, max_in_flight=2 * held, timeout_s=_TIMEOUT_S) as endpoint:
        body = {"model": await endpoint.choose_model(None), "threshold": threshold}
        begun = cluster.done_so_far()
        alone_s = await closed_loop(endpoint, body, asks, 1, seconds)
        between = cluster.done_so_far()
        full_s = await closed_loop(endpoint, body, asks, 2 * held, seconds)
        ended = cluster.done_so_far()
    if not alone_s or not full_s:
        raise ConfigError(f"basis_seconds: no request has ended within {seconds:g} s, give it more")
    return Measured(
        1e3 * median(alone_s), len(full_s) / seconds, done_since(begun, between), done_since(between, ended)
    )


async def closed_loop(
    endpoint: Endpoint, body: dict[str, Any], asks: Sequence[Ask], in_flight: int, seconds: float
) -> list[float]:
    """Latencies, in seconds, of what ended within `seconds` after a warm-up. What still runs then is given up.

    Raises Failed where a request does.
    """
    clock = asyncio.get_running_loop().time
    begins_at = clock() + _WARM_UP_SHARE * seconds
    found: list[float] = []
    prompts = itertools.cycle(asks)

    async def client() -> None:
        while True:
            started = clock()
            await endpoint.ask(next(prompts), body)
            if clock() >= begins_at:
                found.append(clock() - started)

    try:
        async with asyncio.timeout_at(begins_at + seconds), asyncio.TaskGroup() as tasks:
            for _ in range(in_flight):
                tasks.create_task(client())
    except TimeoutError:
        return found
    except BaseExceptionGroup as group:
        raise group.exceptions[0] from None
    raise AssertionError("clients end by failing only")


async def run_cell(cluster: Cluster, basis: Basis, cell: Cell, asks: Sequence[Ask]) -> Result:
    """Rule 3, on a cluster that runs the cell's policy."""
    policy = policy_of(cell.policy)
    before = cluster.done_so_far()
    rate_per_s = cell.rate * basis.capacity_per_s
    due = what_is_due(basis, cell.seed, rate_per_s, asks)
    tally = Tally(basis.warmup_s, basis.seconds, max_in_flight=MAX_OPEN, max_lag_ms=MAX_LAG_MS)
    rows: list[Row] = []

    def note(outcome: Outcome) -> None:
        tally.add(outcome)
        if outcome.send.due_s >= basis.warmup_s:
            rows.append(row_of(outcome, prompt_number(outcome.send.ask)))

    async with open_endpoint(cluster.url, max_in_flight=MAX_OPEN, timeout_s=_TIMEOUT_S) as endpoint:
        body: dict[str, Any] = {"model": await endpoint.choose_model(None)}
        if policy.is_pinned:
            body["threshold"] = basis.threshold
        loop = OpenLoop(endpoint, body, note, max_in_flight=MAX_OPEN)
        async with shown(loop, tally, sys.stderr):
            await loop.run(due)
    report = tally.report()
    return Result(
        rate=cell.rate,
        seed=cell.seed,
        policy=cell.policy,
        settings=policy.controller,
        scheduler=policy.scheduler,
        rate_per_s=rate_per_s,
        slo_ms=basis.slo_ms,
        lag_p99_ms=report.lag_p99_ms,
        why_it_does_not_count=report.why_it_does_not_count,
        rows=sorted(rows, key=lambda row: row.number),
        work=done_since(before, cluster.done_so_far()),
    )


def what_is_due(basis: Basis, seed: int, rate_per_s: float, asks: Sequence[Ask]) -> list[Send]:
    """All that a cell asks, warm-up included: the same for all policies, and for whoever wants to ask it again."""
    until_s = basis.warmup_s + basis.seconds
    return list(sends(poisson(rate_per_s), seed, until_s, asks=asks, slo_ms=Mix((basis.slo_ms,), (1.0,))))


def prompt_number(ask: Ask) -> int:
    """That tells prompts apart: `Row.prompt`."""
    return zlib.crc32(msgspec.json.encode({name: part for name, part in ask.content.items() if name != "max_tokens"}))
