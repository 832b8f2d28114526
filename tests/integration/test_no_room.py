"""A real worker without room refuses; the real scheduler keeps the request waiting, where an operator sees it."""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from prometheus_client.parser import text_string_to_metric_families

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from tests.conftest import NatsServer
from tests.integration import random_model
from tests.integration.worker_stage import Served, Stage, ended
from tests.processes import ServiceProcess, free_port
from tests.waiting import until

pytestmark = pytest.mark.integration

KV_TOKENS = random_model.MAX_CONTEXT_TOKENS  # one canvas of the longest output fits, two do not
LONGEST = random_model.MAX_OUTPUT_TOKENS


class TightStage(Stage):
    """A worker with a small pool, and a scheduler."""

    def __init__(self, bus: Bus, nats_url: str, folder: Path, served: Served) -> None:
        super().__init__(bus, nats_url, folder, served)
        self.profile = random_model.write_profile(folder / "tight", kv_tokens=KV_TOKENS)
        self.metrics_port = free_port()
        self.scheduler = ServiceProcess(
            "services.scheduler",
            folder / "scheduler.log",
            nats_url,
            profile=self.profile,
            metrics_port=self.metrics_port,
            instance_silent_s=60,
            gateway_silent_s=60,
        )

    async def metric(self, name: str, **labels: str) -> float:
        """Of the scheduler; 0 where it has none."""
        try:
            async with httpx.AsyncClient() as client:
                text = (await client.get(f"http://127.0.0.1:{self.metrics_port}/metrics")).text
        except httpx.HTTPError:  # it has only just started
            return 0.0
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
        return sum(s.value for s in samples if s.name == name and labels.items() <= s.labels.items())

    async def submit(self, request: m.GenerateRequest) -> None:
        """As a gateway does."""
        await self.bus.append(subjects.request(request.request_id), request)


@pytest_asyncio.fixture
async def stage(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[TightStage]:
    stage = TightStage(bus, nats_server.url, tmp_path, Served(tmp_path_factory.mktemp("profile")))
    await stage.begin()
    with ended(stage):
        yield stage
    stage.scheduler.kill()


async def test_a_request_refused_for_lack_of_room_waits_visibly_and_runs_when_there_is_some(stage: TightStage) -> None:
    # Seldom a status: the scheduler does not know what the worker holds besides, so it is the worker that refuses.
    worker = await stage.worker("w-0", profile=stage.profile, status_every_s=30)
    stage.scheduler.start()

    async def knows_the_worker() -> bool:
        return await stage.metric("tediserve_scheduler_instances") == 1

    await until(knows_the_worker, "the scheduler knows the worker", 60)
    besides = stage.served.request(0, max_tokens=LONGEST)
    assert await stage.assign("w-0", besides, epoch=1) == m.Accepted()
    request = stage.served.request(1, max_tokens=LONGEST, threshold=0.0)  # a step a block: it need not take long
    await stage.submit(request)

    async def waits() -> bool:
        refused = await stage.metric("tediserve_scheduler_assign_answers_total", answer="kv_full")
        waiting = await stage.metric("tediserve_scheduler_waiting_requests", reason="no_room")
        return refused >= 1 and waiting == 1

    await until(waits, "it was refused and waits", 60)
    needed, free = request.canvas_tokens, KV_TOKENS - besides.canvas_tokens
    assert f"refused: kv_full {needed} tokens needed, {free} free" in worker.log
    assert stage.newest(request) is None, "nothing has become of it"
    record = await stage.until_state(request, "finished")
    assert (record.attempt, record.holder, len(record.token_ids)) == (1, "w-0", LONGEST)
    assert (await stage.until_state(besides, "finished")).written_at < record.started_at
    assert worker.runs
