"""Clients that hang up free their slots at once: 50 of them, half streaming, none with an Idempotency-Key.

Measured is from the client's close to the first status in which the request's instance no longer holds it. Instances
are asked every 10 ms, so what is measured is up to that much, and the asking, too long.
"""

import asyncio
import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import httpx
import pytest

from contracts import subjects
from contracts.messages import GenerateRequest, InstanceStatus, ProgressRecord, StatusAsk
from services.bus import Bus
from services.progress import subject_of
from tests.integration import random_model
from tests.integration.stack import Stack, Streamed, chat_body, open_client, running_stack, stream, until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NUM_CLIENTS = 50
AT_ONCE = 10
ASK_EVERY_S = 0.01
ALLOWED_S = 0.05  # beyond one step
MAX_ROUNDS = 5


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("hang_up")
    with running_stack(folder, random_model.write_profile(folder / "profile")) as running:
        yield running


@dataclass
class Watch:
    """Who holds what, by the instances' own words. A client is known by the seed that it sent."""

    request_ids: dict[int, str] = field(default_factory=dict)  # by seed
    holders: dict[str, str] = field(default_factory=dict)  # request -> instance
    freed_at: dict[str, float] = field(default_factory=dict)  # request -> when its instance was first seen without it
    finals: dict[str, ProgressRecord] = field(default_factory=dict)

    def on_request(self, request: GenerateRequest, _: int) -> None:
        self.request_ids[request.seed] = request.request_id

    def on_record(self, record: ProgressRecord, _: int) -> None:
        if record.is_final:
            self.finals[record.request_id] = record

    def on_status(self, status: InstanceStatus) -> None:
        held = {entry.request_id for entry in status.held}
        for request_id in held:
            self.holders.setdefault(request_id, status.instance_id)
        for request_id, holder in self.holders.items():
            if holder == status.instance_id and request_id not in held:
                self.freed_at.setdefault(request_id, time.monotonic())

    def is_held(self, seed: int) -> bool:
        return self.request_ids.get(seed) in self.holders


@contextlib.asynccontextmanager
async def watching(bus: Bus) -> AsyncIterator[Watch]:
    watch = Watch()
    await bus.follow(subjects.REQUESTS, "req.*", GenerateRequest, watch.on_request)
    await bus.follow(subjects.PROGRESS, "prog.*.*", ProgressRecord, watch.on_record, subject_of=subject_of)
    await bus.subscribe("status.instance.*", InstanceStatus, watch.on_status)

    async def ask() -> None:
        while True:
            await bus.publish(subjects.STATUS_ASK, StatusAsk())
            await asyncio.sleep(ASK_EVERY_S)

    asking = asyncio.create_task(ask())
    try:
        yield watch
    finally:
        asking.cancel()


async def call(client: httpx.AsyncClient, seed: int, *, streaming: bool) -> None:
    body = chat_body(random_model.MODEL, random_model.prompt(seed), max_tokens=256, seed=seed)
    if streaming:
        await stream(client, body, Streamed())
    else:
        await client.post("/v1/chat/completions", json=body)


async def hang_up_after(client: httpx.AsyncClient, watch: Watch, seed: int, run_s: float) -> float:
    """Calls, closes the connection `run_s` seconds after an instance has taken it, and returns when that was."""
    task = asyncio.create_task(call(client, seed, streaming=seed % 2 == 0))
    await until(lambda: watch.is_held(seed), f"{seed} is held")
    await asyncio.sleep(run_s)
    assert not task.done(), "it ran to its end before its client hung up"
    closed_at = time.monotonic()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    await until(lambda: watch.request_ids[seed] in watch.freed_at, f"{seed} is dropped")
    return closed_at


async def step_s_of(client: httpx.AsyncClient) -> float:
    """What a step takes, in seconds, with as many requests as are held when clients hang up."""
    bodies = [chat_body(random_model.MODEL, random_model.prompt(n), max_tokens=64) for n in range(AT_ONCE)]
    answers = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for body in bodies))
    told = [answer.json()["tediserve"] for answer in answers]
    return statistics.median(extra["run_s"] / extra["steps"] for extra in told)


async def round_of_hang_ups(client: httpx.AsyncClient, watch: Watch, seeds: range) -> list[float]:
    """Each client calls and hangs up. Returns how long their slots stayed taken, in seconds."""
    delays: list[float] = []
    for first in range(0, len(seeds), AT_ONCE):
        together = seeds[first : first + AT_ONCE]
        hang_ups = (hang_up_after(client, watch, seed, 0.1 + 0.05 * i) for i, seed in enumerate(together))
        for seed, closed_at in zip(together, await asyncio.gather(*hang_ups), strict=True):
            delays.append(watch.freed_at[watch.request_ids[seed]] - closed_at)
    return delays


async def test_fifty_clients_hang_up(stack: Stack) -> None:
    """A busy machine makes the delay longer, never shorter: the best of a few rounds is what the stack does."""
    async with open_client(stack.url) as client, stack.bus() as bus, watching(bus) as watch:
        step_s = await step_s_of(client)
        p95s = []
        for number in range(MAX_ROUNDS):
            seeds = range(1000 * (number + 1), 1000 * (number + 1) + NUM_CLIENTS)
            delays = await round_of_hang_ups(client, watch, seeds)
            p50, p95 = statistics.median(delays), statistics.quantiles(delays, n=20)[-1]
            print(
                f"{NUM_CLIENTS} clients hang up: slots free after p50 {p50 * 1000:.0f} ms, p95 {p95 * 1000:.0f} ms, "
                f"at most {max(delays) * 1000:.0f} ms; one step takes {step_s * 1000:.0f} ms"
            )
            ids = {watch.request_ids[seed] for seed in seeds}
            await until(lambda ids=ids: ids <= watch.finals.keys(), "all have a final record")  # type: ignore[misc]
            assert {(watch.finals[i].state, watch.finals[i].reason) for i in ids} == {("cancelled", "client_gone")}
            p95s.append(p95)
            if p95 < step_s + ALLOWED_S:
                break
        assert min(p95s) < step_s + ALLOWED_S
