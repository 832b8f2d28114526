"""What serving costs and yields: gateway overhead on an idle stack, throughput by number of concurrent requests."""

import asyncio
import json
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


class Overhead(NamedTuple):
    """What the way to a worker and back takes, in milliseconds."""

    of_calls: list[float]  # HTTP time minus the time at the worker, of each call
    of_nothing: list[float]  # HTTP time of `/health/live`, which goes no further than the gateway


def measure_overhead(url: str, count: int) -> Overhead:
    """Of `count` requests one after another, by a client that does hardly more than wait for bytes."""
    return asyncio.run(_overhead(url, problems(count)))


def measure_throughput(url: str, count: int, in_flight: int, threshold: float | None = None) -> Throughput:
    """`count` requests, `in_flight` at a time. `threshold`: pins theirs."""
    pinned: dict[str, Any] = {} if threshold is None else {"threshold": threshold}
    answers, took_s = asyncio.run(_run(url, problems(count), in_flight, pinned))
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


async def _overhead(url: str, asked: Sequence[tasks.Problem]) -> Overhead:
    address = httpx.URL(url)
    reader, writer = await asyncio.open_connection(address.host, address.port)
    _, models = await _exchange(reader, writer, "GET /v1/models")
    model = models["data"][0]["id"]

    async def call_ms(problem: tasks.Problem) -> float:
        http_s, answer = await _exchange(reader, writer, "POST /v1/chat/completions", _body(model, problem))
        return 1e3 * http_s - float(answer["tediserve"]["run_ms"])

    for problem in asked[:5]:  # warm connections and caches
        await call_ms(problem)
    of_calls = [await call_ms(problem) for problem in asked]
    of_nothing = [1e3 * (await _exchange(reader, writer, "GET /health/live"))[0] for _ in asked]
    writer.close()
    return Overhead(of_calls, of_nothing)


async def _exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, what: str, body: dict[str, Any] | None = None
) -> tuple[float, Any]:
    """One request on a connection that is kept. Returns how long its whole answer took, in seconds, and the answer."""
    content = b"" if body is None else json.dumps(body).encode()
    head = f"{what} HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    started_at = time.perf_counter()
    writer.write(head.encode() + content)
    async with asyncio.timeout(_REQUEST_LIMIT_S):
        told = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        answer = await reader.readexactly(int(told.split("content-length:")[1].split("\r\n")[0]))
    took_s = time.perf_counter() - started_at
    if " 200 " not in told.splitlines()[0]:
        raise RuntimeError(f"{what}: {answer.decode()}")
    return took_s, json.loads(answer)


def _body(model: str, problem: tasks.Problem) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": problem.prompt}]}


async def _run(
    url: str, asked: Sequence[tasks.Problem], in_flight: int, more: dict[str, Any]
) -> tuple[list[Answered], float]:
    slots = asyncio.Semaphore(in_flight)
    limits = httpx.Limits(max_connections=in_flight, max_keepalive_connections=in_flight)
    async with httpx.AsyncClient(base_url=url, timeout=_REQUEST_LIMIT_S, limits=limits) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]

        async def answer(problem: tasks.Problem) -> Answered:
            async with slots:
                return await _ask(client, _body(model, problem) | more, problem)

        started_at = time.perf_counter()
        answers = await asyncio.gather(*(answer(problem) for problem in asked))
        return list(answers), time.perf_counter() - started_at


async def _ask(client: httpx.AsyncClient, body: dict[str, Any], problem: tasks.Problem) -> Answered:
    started_at = time.perf_counter()
    response = await client.post("/v1/chat/completions", json=body)
    http_s = time.perf_counter() - started_at
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    ours = answer["tediserve"]
    return Answered(
        http_s=http_s,
        run_s=ours["run_ms"] / 1000,
        output_tokens=answer["usage"]["completion_tokens"],
        steps=ours["steps"],
        correct=tasks.is_correct(problem, answer["choices"][0]["message"]["content"]),
    )
