"""What cannot meet its deadline is refused: the OpenAI SDK, the real gateway, the real scheduler, a full instance."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI, RateLimitError

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from services.costs import DegreeProfile, PassCost, dump_latency
from tests.conftest import NatsServer
from tests.integration.gateway_rig import MODEL, GatewayProcess, write_profile
from tests.integration.scheduler_stage import FakeWorker
from tests.processes import ServiceProcess
from tests.waiting import until

pytestmark = pytest.mark.integration

ASKED: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "say it"}]}


@asynccontextmanager
async def load_told(bus: Bus) -> AsyncIterator[None]:
    """Each quarter second, as the controller would say it: one instance, and the one open request takes it 20 s."""

    async def tell() -> None:
        while True:
            load = m.LoadState(
                sent_at=time.time(),
                horizon_s=10.0,
                demand_s=20.0,
                capacity_s=10.0,
                caps=[m.PriorityCap(priority=0, threshold=0.6)],
                num_open=1,
                num_hopeless=0,
                floor_s=20.0,
            )
            await bus.publish(subjects.LOAD_STATE, load)
            await asyncio.sleep(0.25)

    telling = asyncio.create_task(tell())
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


async def test_the_sdk_gets_429_with_retry_after_or_is_told_not_to_try_again(
    nats_server: NatsServer, bus: Bus, tmp_path: Path
) -> None:
    profile = write_profile(tmp_path / "profile")
    cost = PassCost(curve=((1.0, 1.0), (1000.0, 11.0)))
    dump_latency(profile / "latency.json", "test", [DegreeProfile(tp_degree=1, cost=cost)])
    worker = FakeWorker(bus, "a", max_requests=1, model=MODEL)
    gateway = GatewayProcess(tmp_path, nats_server.url, profile=profile, refusal_limit_s=10)
    scheduler = ServiceProcess(
        "services.scheduler", tmp_path / "scheduler.log", nats_server.url, profile=profile, admission="reject"
    )
    client = AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=0)
    await worker.start()
    scheduler.start()
    gateway.start()
    try:
        async with load_told(bus), client:
            await gateway.until_ready()
            await until(lambda: "acting" in scheduler.log, "the scheduler acts")
            first = asyncio.create_task(client.chat.completions.create(**ASKED))
            await until(lambda: worker.held, "the instance is full")
            (assign,) = worker.assigns
            assert assign.threshold == 0.6, "the cap"
            for streamed in (False, True):
                with pytest.raises(RateLimitError) as refused:
                    await client.chat.completions.create(**ASKED, stream=streamed, extra_body={"slo_ms": 5000})
                assert refused.value.code == "overloaded"
                # the wait of 20 s is 15 more than it has, and it takes a moment itself
                assert refused.value.response.headers["retry-after"] == "16"
            await until(lambda: gateway.log.count(" 429 ") == 2, "both are logged")
            insisting = client.with_options(max_retries=3)
            with pytest.raises(RateLimitError) as hopeless:
                await insisting.chat.completions.create(**ASKED, extra_body={"slo_ms": 0.5})
            assert hopeless.value.code == "slo_too_short"
            assert hopeless.value.response.headers["x-should-retry"] == "false"
            await until(lambda: gateway.log.count(" 429 ") == 3, "it is logged")
            await worker.write(assign.request.request_id, "finished", 1, token_ids=[10], finish="eos")
            assert (await first).choices[0].finish_reason == "stop"
            assert gateway.log.count(" 429 ") == 3, "the SDK did not try again"
    finally:
        await worker.stop()
        for process in (gateway, scheduler):
            process.kill()
    for process in (gateway, scheduler):
        assert "Traceback" not in process.log, process.log
