"""How soon a client that hangs up frees its slot: 50 clients a round, ten at once, every other one streaming.

Measured is from the client's close to the first status in which the request's instance no longer holds it. Instances
are asked every 10 ms, so what is measured is up to that much, and the asking, too long. The goal is one step and
50 ms, since an instance takes orders between steps. One step: its mean with ten requests in flight.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator
from typing import NamedTuple

import httpx

from contracts import subjects
from contracts.messages import GenerateRequest, InstanceStatus, ProgressRecord, StatusAsk
from services.bus import Bus, NatsSettings
from services.progress import subject_of
from tools.bench.serving import quantile

NUM_CLIENTS = 50
AT_ONCE = 10
ALLOWED_S = 0.05  # beyond one step
_ASK_EVERY_S = 0.01
_SPREAD_S = 0.005  # between those that hang up together; a fast machine ends a request within 0.2 s
_LIMIT_S = 30.0  # of every wait


class Round(NamedTuple):
    """What one round of hang-ups took, in seconds, and how their requests ended."""

    step_s: float
    p50_s: float
    p95_s: float
    worst_s: float
    ends: set[tuple[str, str]]  # state and reason of the final records

    @property
    def is_good(self) -> bool:
        return self.p95_s <= self.step_s + ALLOWED_S


class _Slot:
    """A client's request, known by the seed that it sent: what instances and records say of it."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.request_id = ""
        self.holder: asyncio.Future[str] = loop.create_future()
        self.freed_at: asyncio.Future[float] = loop.create_future()
        self.final: asyncio.Future[ProgressRecord] = loop.create_future()


class _Watch:
    """Hears who holds what."""

    def __init__(self) -> None:
        self.slots: dict[int, _Slot] = {}  # by seed
        self._by_request: dict[str, _Slot] = {}

    def on_request(self, request: GenerateRequest, _: int) -> None:
        if slot := self.slots.get(request.seed):
            slot.request_id = request.request_id
            self._by_request[request.request_id] = slot

    def on_record(self, record: ProgressRecord, _: int) -> None:
        slot = self._by_request.get(record.request_id)
        if slot and record.is_final:
            slot.final.set_result(record)

    def on_status(self, status: InstanceStatus) -> None:
        held = {entry.request_id for entry in status.held}
        for request_id, slot in self._by_request.items():
            if request_id in held:
                if not slot.holder.done():
                    slot.holder.set_result(status.instance_id)
            elif slot.holder.done() and slot.holder.result() == status.instance_id and not slot.freed_at.done():
                slot.freed_at.set_result(time.monotonic())


async def hang_ups(url: str, nats_url: str, rounds: int, *, stop_at_good: bool = False) -> list[Round]:
    """Rounds on the stack at these addresses, which must be idle; `stop_at_good`: none after the first good one.

    Raises TimeoutError, RuntimeError.
    """
    done: list[Round] = []
    limits = httpx.Limits(max_connections=AT_ONCE, max_keepalive_connections=0)
    async with (
        httpx.AsyncClient(base_url=url, timeout=90, limits=limits) as client,
        _watching(nats_url) as watch,
    ):
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        for number in range(rounds):
            done.append(await _round(client, model, watch, first_seed=1000 * (number + 1)))
            if stop_at_good and done[-1].is_good:
                break
    return done


@contextlib.asynccontextmanager
async def _watching(nats_url: str) -> AsyncIterator[_Watch]:
    bus = await Bus.connect(NatsSettings(url=nats_url), "hang-ups")
    watch = _Watch()
    await bus.follow(subjects.REQUESTS, "req.*", GenerateRequest, watch.on_request)
    await bus.follow(subjects.PROGRESS, "prog.*.*", ProgressRecord, watch.on_record, subject_of=subject_of)
    await bus.subscribe("status.instance.*", InstanceStatus, watch.on_status)

    async def ask() -> None:
        while True:
            await bus.publish(subjects.STATUS_ASK, StatusAsk())
            await asyncio.sleep(_ASK_EVERY_S)

    asking = asyncio.create_task(ask())
    try:
        yield watch
    finally:
        asking.cancel()
        await bus.close()


async def _round(client: httpx.AsyncClient, model: str, watch: _Watch, first_seed: int) -> Round:
    step_s = await _step_s(client, model)
    delays: list[float] = []
    ends: set[tuple[str, str]] = set()
    for first in range(first_seed, first_seed + NUM_CLIENTS, AT_ONCE):
        together = range(first, min(first + AT_ONCE, first_seed + NUM_CLIENTS))
        hanging_up = (_hang_up(client, model, watch, seed, _SPREAD_S * (i + 1)) for i, seed in enumerate(together))
        delays += await asyncio.gather(*hanging_up)
        async with asyncio.timeout(_LIMIT_S):
            finals = await asyncio.gather(*(watch.slots[seed].final for seed in together))
        ends |= {(record.state, record.reason) for record in finals}
    return Round(step_s, statistics.median(delays), quantile(delays, 0.95), max(delays), ends)


async def _step_s(client: httpx.AsyncClient, model: str) -> float:
    """What a step takes, in seconds, with as many requests as are held when clients hang up."""
    bodies = [_body(model, seed, max_tokens=64) for seed in range(AT_ONCE)]
    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    told = [answer.raise_for_status().json()["tediserve"] for answer in answers]
    return statistics.median(float(extra["run_ms"] / 1000 / extra["steps"]) for extra in told)


async def _hang_up(client: httpx.AsyncClient, model: str, watch: _Watch, seed: int, run_s: float) -> float:
    """Calls, and hangs up `run_s` seconds after an instance took it. Returns for how long the slot stayed taken."""
    slot = watch.slots[seed] = _Slot()
    call = asyncio.create_task(_call(client, _body(model, seed, max_tokens=256) | {"stream": seed % 2 == 0}))
    async with asyncio.timeout(_LIMIT_S):
        await slot.holder
    await asyncio.sleep(run_s)
    if call.done():
        raise RuntimeError(f"request {slot.request_id} ended before its client hung up")
    closed_at = time.monotonic()
    call.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await call
    async with asyncio.timeout(_LIMIT_S):
        return await slot.freed_at - closed_at


def _body(model: str, seed: int, max_tokens: int) -> dict[str, object]:
    """A call that takes long: as few tokens a step as may be, to its last token."""
    messages = [{"role": "user", "content": "Tom has 12 apples. He buys 7 more. How many apples does he have now?"}]
    slow = {"threshold": 0.9, "ignore_eos": True}
    return {"model": model, "messages": messages, "seed": seed, "max_tokens": max_tokens, **slow}


async def _call(client: httpx.AsyncClient, body: dict[str, object]) -> None:
    async with client.stream("POST", "/v1/chat/completions", json=body) as response:
        async for _ in response.aiter_bytes():
            pass
