"""What serving costs and yields: gateway overhead on an idle stack, throughput by number of concurrent requests."""

import asyncio
import math
import statistics
import time
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import httpx

from tools.tiny_model import tasks

_REQUEST_LIMIT_S = 120.0


class Answered(NamedTuple):
    """One request, seen from the client."""

    http_s: float  # from sending it to having the whole answer
    run_s: float  # at the worker, from the accepted assignment to the final record
    output_tokens: int
    steps: int
    correct: bool


class Throughput(NamedTuple):
    """A run of many requests with a fixed number in flight."""

    in_flight: int
    requests_per_s: float
    tokens_per_s: float
    median_s: float
    p95_s: float
    correct: float  # share


def problems(count: int, seed: int = 1) -> list[tasks.Problem]:
    """Held-out problems, the same ones for the same seed."""
    rng = Random(seed)
    return [tasks.sample(rng, "held_out") for _ in range(count)]


def measure_overhead(url: str, count: int) -> list[float]:
    """HTTP time minus the time at the worker, in milliseconds, of `count` requests one after another."""
    answers = asyncio.run(_run(url, problems(count + 5), in_flight=1))[0]
    return [1e3 * (a.http_s - a.run_s) for a in answers[5:]]  # the first ones warm connections and caches


def measure_throughput(url: str, count: int, in_flight: int) -> Throughput:
    """`count` requests, `in_flight` at a time."""
    answers, took_s = asyncio.run(_run(url, problems(count), in_flight))
    latencies = [a.http_s for a in answers]
    return Throughput(
        in_flight=in_flight,
        requests_per_s=count / took_s,
        tokens_per_s=sum(a.output_tokens for a in answers) / took_s,
        median_s=statistics.median(latencies),
        p95_s=quantile(latencies, 0.95),
        correct=statistics.fmean(a.correct for a in answers),
    )


def quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


async def _run(url: str, asked: Sequence[tasks.Problem], in_flight: int) -> tuple[list[Answered], float]:
    slots = asyncio.Semaphore(in_flight)
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_LIMIT_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def answer(problem: tasks.Problem) -> Answered:
            async with slots:
                return await _ask(client, model, problem)

        started_at = time.perf_counter()
        answers = await asyncio.gather(*(answer(problem) for problem in asked))
        return list(answers), time.perf_counter() - started_at


async def _ask(client: httpx.AsyncClient, model: str, problem: tasks.Problem) -> Answered:
    body = {"model": model, "messages": [{"role": "user", "content": problem.prompt}]}
    started_at = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    http_s = time.perf_counter() - started_at
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    ours = answer["tediserve"]
    return Answered(
        http_s=http_s,
        run_s=ours["run_s"],
        output_tokens=answer["usage"]["completion_tokens"],
        steps=ours["steps"],
        correct=tasks.is_correct(problem, answer["choices"][0]["message"]["content"]),
    )
