"""Requests move between real workers as the real scheduler says: at block ends, not a step more, the same tokens."""

import signal
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path

import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from tests.conftest import NatsServer
from tests.integration.worker_stage import Served, Stage, ended
from tests.processes import ServiceProcess
from tests.waiting import until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]


class MovingStage(Stage):
    """Workers, and the scheduler."""

    def __init__(self, bus: Bus, nats_url: str, folder: Path, served: Served) -> None:
        super().__init__(bus, nats_url, folder, served)
        self.scheduler = ServiceProcess(
            "services.scheduler",
            folder / "scheduler.log",
            nats_url,
            profile=served.folder,
            instance_silent_s=60,
            gateway_silent_s=60,
        )

    async def begin(self) -> None:
        await super().begin()
        for instance_id in ("w-0", "w-1"):
            await self.worker(instance_id)
        self.scheduler.start()
        await until(lambda: "acting" in self.scheduler.log, "the scheduler acts")

    async def submit(self, request: m.GenerateRequest) -> m.GenerateRequest:
        """As a gateway does."""
        await self.bus.append(subjects.request(request.request_id), request)
        return request

    async def holds(self, instance_id: str) -> set[str]:
        """As it says when asked."""
        asked_at = self.heard_at[instance_id]
        await self.bus.publish(subjects.STATUS_ASK, m.StatusAsk())
        await until(lambda: self.heard_at[instance_id] > asked_at)
        return self.held_by(instance_id)


@pytest_asyncio.fixture
async def stage(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[MovingStage]:
    stage = MovingStage(bus, nats_server.url, tmp_path, Served(tmp_path_factory.mktemp("profile")))
    with ended(stage):
        await stage.begin()
        yield stage
        assert "Traceback" not in stage.scheduler.log, stage.scheduler.log
    stage.scheduler.kill()


async def test_requests_move_to_an_instance_that_empties_and_off_one_that_drains(stage: MovingStage) -> None:
    """One test, since it takes two workers to load."""
    await moves_to_where_it_is_empty(stage)
    await leaves_a_draining_worker(stage)


async def moves_to_where_it_is_empty(stage: MovingStage) -> None:
    """All weigh the same, so they are placed in turn; those on w-1 take a step a block and are soon done."""
    slow = []
    for number in range(4):
        slow.append(await stage.submit(stage.served.request(number, threshold=0.9)))
        await stage.submit(stage.served.request(number, request_id=f"quick-{number}", threshold=0.0))
    records = [await stage.until_state(request, "finished") for request in slow]
    assert any(record.moves for record in records), "w-1 was free"
    for number, record in enumerate(records):
        stage.check_answer(number, record)
        assert record.attempt == 1
        assert sum(one != next_ for one, next_ in pairwise(b.instance_id for b in record.blocks)) == record.moves
        assert sum(b.recompute_steps + b.cache_steps for b in record.blocks) == stage.served.steps[number]
        assert {block.recompute_steps for block in record.blocks} == {1}


async def leaves_a_draining_worker(stage: MovingStage) -> None:
    requests = [
        await stage.submit(stage.served.request(number, request_id=f"drained-{number}", threshold=0.9))
        for number in range(4)
    ]
    await until(lambda: stage.newest(requests[-1]), "the last one runs")
    theirs = await stage.holds("w-1")
    assert theirs, "it has some of them"
    process = stage.processes[1]
    process.signal(signal.SIGTERM)
    assert await process.exit_code(30) == 0
    records = [await stage.until_state(request, "finished") for request in requests]
    for number, record in enumerate(records):
        stage.check_answer(number, record)
        assert record.attempt == 1, "nothing was lost"
    moved = [record for record in records if record.request_id in theirs and record.moves]
    assert moved
    assert {record.holder for record in moved} == {"w-0"}
