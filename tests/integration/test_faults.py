"""Anything may die under load: no request is lost, none ends twice, none says anything but what it says without faults.

Twenty streamed calls are in flight when the fault comes. Their prompts are pinned to one threshold and their weights
are float32, so what each must answer is known: it was asked before, without a fault.
"""

import asyncio
import contextlib
import os
import signal
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from contracts import subjects
from contracts.messages import ProgressRecord
from services.progress import subject_of
from tests.integration import random_model
from tests.integration.gateway_rig import GatewayProcess
from tests.integration.stack import Proxy, Stack, Streamed, open_client, running_stack, stream
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

NUM_CALLS = 20
LOST_AT_LEAST = 5  # calls that the worker holds that is hurt
PROMPTS = random_model.STABLE_PROMPTS[:NUM_CALLS]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("faults")
    with running_stack(folder, random_model.write_profile(folder / "profile")) as running:
        yield running


_known: dict[int, str] = {}


async def expected_texts(stack: Stack) -> dict[int, str]:
    """What each prompt is answered when nothing fails; asked once."""
    if not _known:
        async with open_client(stack.url) as client:
            calls = [stream(client, random_model.body_of(number), Streamed()) for number in PROMPTS]
            for number, told in zip(PROMPTS, await asyncio.gather(*calls), strict=True):
                assert told.finishes == ["length"]
                assert len(told.text) == random_model.PROMPT_TOKENS
                _known[number] = told.text
        assert len(set(_known.values())) == NUM_CALLS  # else one could stand for another
    return _known


@dataclass
class Calls:
    """Calls in flight, with all that their clients are told."""

    client: httpx.AsyncClient
    told: dict[int, Streamed] = field(default_factory=dict)
    tasks: list[asyncio.Task[Streamed]] = field(default_factory=list)

    def start(self, number: int) -> None:
        self.told[number] = Streamed()
        self.tasks.append(asyncio.create_task(stream(self.client, random_model.body_of(number), self.told[number])))

    @property
    def num_begun(self) -> int:
        return sum(told.began for told in self.told.values())

    def fail_if_one_failed(self) -> bool:
        for task in self.tasks:
            if task.done():
                task.result()
        return True


@contextlib.asynccontextmanager
async def calls_in_flight(stack: Stack, url: str = "") -> AsyncIterator[Calls]:
    """Half of the twenty have begun to answer, and hardly one has ended. On leaving, all must have ended well."""
    expected = await expected_texts(stack)
    async with open_client(url or stack.url) as client:
        calls = Calls(client)
        for number in PROMPTS:
            calls.start(number)
        await until(lambda: calls.fail_if_one_failed() and calls.num_begun >= NUM_CALLS // 2, "half have begun")
        ended = [told for told in calls.told.values() if told.ended]
        assert len(ended) <= NUM_CALLS // 4, f"the fault would come too late: {ended}"
        yield calls
        async with asyncio.timeout(90):
            await asyncio.gather(*calls.tasks)
        for number, told in calls.told.items():
            assert_ended_well(told, expected[number])
        await assert_results_agree(client, calls.told)


def assert_ended_well(told: Streamed, expected: str) -> None:
    assert told.errors == []
    assert told.finishes == ["length"]
    assert told.num_done == 1
    assert told.after_done == 0
    assert told.text == expected


async def assert_results_agree(client: httpx.AsyncClient, all_told: dict[int, Streamed]) -> None:
    """What was streamed is what the records say."""
    for told in all_told.values():
        result = (await client.get(f"/v1/results/{told.id}")).json()
        assert result["state"] == "finished"
        assert result["choices"][0]["message"]["content"] == told.text
        assert result["choices"][0]["finish_reason"] == "length"


async def records_of(stack: Stack, calls: Calls) -> list[ProgressRecord]:
    """The last record of each call."""
    ids = {told.id.removeprefix("chatcmpl-") for told in calls.told.values()}
    found: dict[str, ProgressRecord] = {}
    async with stack.bus() as bus:
        follower = await bus.follow(
            subjects.PROGRESS,
            "prog.*.*",
            ProgressRecord,
            lambda record, _: found.update({record.request_id: record}),
            subject_of=subject_of,
        )
        await follower.caught_up()
    assert ids <= found.keys()
    return [found[request_id] for request_id in sorted(ids)]


async def assert_some_were_lost_once(stack: Stack, calls: Calls) -> None:
    attempts = [record.attempt for record in await records_of(stack, calls)]
    assert set(attempts) <= {1, 2}
    assert attempts.count(2) >= LOST_AT_LEAST


async def until_purged(stack: Stack) -> None:
    """No request is open any more."""
    async with stack.bus() as bus:

        async def none_is_open() -> bool:
            return await bus.last(subjects.REQUESTS, "req.*", Any) is None

        await until(none_is_open, "no request is open", limit_s=20)


@pytest_asyncio.fixture(autouse=True)
async def whole_before_and_after(stack: Stack) -> AsyncIterator[None]:
    await stack.until_whole()
    yield
    await stack.until_whole()
    await until_purged(stack)
    assert "Traceback" not in stack.logs(), stack.logs()


# --- faults -------------------------------------------------------------------------------------------------------


async def test_scheduler_killed(stack: Stack) -> None:
    async with calls_in_flight(stack) as calls:
        killed = stack.kill("scheduler")
        await until(lambda: stack.status()["services"].get("scheduler", killed) != killed, "it is started again")
    # its successor has adopted what ran: nothing was run again
    assert {record.attempt for record in await records_of(stack, calls)} == {1}


async def test_requests_that_come_while_there_is_no_scheduler_are_answered(stack: Stack) -> None:
    async with calls_in_flight(stack) as calls:
        calls.told.pop(PROMPTS[0])
        calls.tasks.pop(0).cancel()
        stack.kill("scheduler")
        calls.start(PROMPTS[0])


async def test_worker_killed(stack: Stack) -> None:
    async with calls_in_flight(stack) as calls:
        os.kill(await stack.busiest_worker(at_least=LOST_AT_LEAST), signal.SIGKILL)
    await assert_some_were_lost_once(stack, calls)


async def test_agent_killed(stack: Stack) -> None:
    """Its workers run on, and the next agent adopts them."""
    async with calls_in_flight(stack) as calls:
        workers = stack.worker_pids()
        killed = stack.kill("agent")
        await until(lambda: stack.status()["services"].get("agent", killed) != killed, "it is started again")
    await stack.until_whole()
    assert stack.worker_pids() == workers
    assert {record.attempt for record in await records_of(stack, calls)} == {1}


async def test_nats_server_killed(stack: Stack) -> None:
    async with calls_in_flight(stack):
        killed = stack.kill("nats")
        await until(lambda: stack.status()["services"].get("nats", killed) != killed, "it is started again")


async def test_everything_but_the_gateway_killed_one_after_another(stack: Stack) -> None:
    async with calls_in_flight(stack):
        stack.kill("scheduler")
        await asyncio.sleep(0.3)
        stack.kill("nats")
        await asyncio.sleep(0.3)
        os.kill(await stack.busiest_worker(at_least=1), signal.SIGKILL)


async def test_worker_stopped_and_continued(stack: Stack) -> None:
    """It is given up after 3 s. When it goes on it finds that others own its requests."""
    async with calls_in_flight(stack) as calls, stack.bus() as bus:
        lost: set[str] = set()

        def on_record(record: ProgressRecord, _: int) -> None:
            if record.attempt == 2:
                lost.add(record.request_id)

        follower = await bus.follow(subjects.PROGRESS, "prog.*.*", ProgressRecord, on_record)
        await follower.caught_up()
        before = len(lost)
        worker = await stack.busiest_worker(at_least=LOST_AT_LEAST)
        os.kill(worker, signal.SIGSTOP)
        try:
            await until(lambda: len(lost) >= before + LOST_AT_LEAST, "its requests are placed anew")
        finally:
            os.kill(worker, signal.SIGCONT)
    await assert_some_were_lost_once(stack, calls)
    assert worker in stack.worker_pids().values()  # it lives on


async def test_worker_stopped_for_a_moment_keeps_its_requests(stack: Stack) -> None:
    async with calls_in_flight(stack) as calls:
        worker = await stack.busiest_worker(at_least=LOST_AT_LEAST)
        os.kill(worker, signal.SIGSTOP)
        await asyncio.sleep(1.0)
        os.kill(worker, signal.SIGCONT)
    assert {record.attempt for record in await records_of(stack, calls)} == {1}


# --- the gateway's line -------------------------------------------------------------------------------------------


class SecondGateway(GatewayProcess):
    """Another gateway of the same stack, whose line to NATS goes through a proxy."""

    def __init__(self, stack: Stack, folder: Path, proxy: Proxy) -> None:
        super().__init__(folder, f"nats://127.0.0.1:{proxy.port}", profile=stack.profile)
        self.proxy = proxy


@pytest_asyncio.fixture
async def gateway(stack: Stack, tmp_path: Path) -> AsyncIterator[SecondGateway]:
    proxy = Proxy(stack.nats_port)
    await proxy.start()
    second = SecondGateway(stack, tmp_path, proxy)
    second.start()
    try:
        await second.until_ready()
        yield second
    finally:
        second.signal(signal.SIGTERM)
        await second.exit_code()
        await proxy.stop()
    assert "Traceback" not in second.log, second.log


async def test_the_gateways_connection_is_cut(stack: Stack, gateway: SecondGateway) -> None:
    async with calls_in_flight(stack, gateway.url) as calls:
        before = gateway.proxy.connections
        gateway.proxy.cut()
        await until(lambda: gateway.proxy.connections > before, "it has connected again")
    assert {record.attempt for record in await records_of(stack, calls)} == {1}


async def test_the_gateways_connection_goes_dead_for_some_seconds(stack: Stack, gateway: SecondGateway) -> None:
    """Nobody tells it: it has to find out by its pings."""
    async with calls_in_flight(stack, gateway.url) as calls:
        gateway.proxy.go_dead()
        await asyncio.sleep(4)
        gateway.proxy.revive()
    assert {record.attempt for record in await records_of(stack, calls)} == {1}
