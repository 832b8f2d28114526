"""One request's trace over the real bus: what each service says of it hangs together, whoever sends it."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from services import telemetry
from services.bus import Bus, NatsSettings, trace_parent
from services.progress import subject_of, write_record
from services.telemetry import TelemetrySettings
from tests.builders import make_cost, make_record, make_request
from tests.conftest import NatsServer
from tests.otlp_receiver import Receiver, receiver

pytestmark = pytest.mark.integration


@pytest.fixture
def collector() -> Iterator[Receiver]:
    with receiver() as collector:
        telemetry.set_up("test", TelemetrySettings(endpoint=collector.url, send_every_s=0.05))
        yield collector
        telemetry.shut_down()


@pytest_asyncio.fixture
async def other(nats_server: NatsServer) -> AsyncIterator[Bus]:
    """A second connection: the worker's."""
    connected = await Bus.connect(NatsSettings(url=nats_server.url), "other")
    yield connected
    await asyncio.wait_for(connected.close(), 10)


async def test_a_requests_spans_are_one_tree_across_the_bus(bus: Bus, other: Bus, collector: Receiver) -> None:
    """Gateway, scheduler and worker in small: a stored request, an assignment, a block, a stored record."""
    request = make_request("r1")
    finished: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    await play_worker(other)
    await play_scheduler(bus)
    await bus.follow(
        subjects.PROGRESS, "prog.*.*", m.ProgressRecord, lambda _, __: finished.set_result(trace_parent.get())
    )
    call = telemetry.begin("chat test-model", parent="", kind="server")
    with call:
        with telemetry.begin(telemetry.ADMISSION):
            await bus.append(subjects.request("r1"), request, after_seq=0)
        heard_in = await asyncio.wait_for(finished, 20)
    telemetry.shut_down()

    names = [telemetry.ADMISSION, telemetry.QUEUE, telemetry.BLOCK, telemetry.RESULT]
    root = collector.only("chat test-model")
    admission, queue, block, result = (collector.only(name) for name in names)
    assert len(collector.spans) == 5
    assert {span.trace_id for span in collector.spans} == {root.trace_id}
    assert root.parent_id == ""
    assert admission.parent_id == root.span_id
    assert queue.parent_id == admission.span_id, "the request travelled in the admission's name"
    assert block.parent_id == queue.span_id, "the assignment travelled in the queue's name"
    assert result.parent_id == queue.span_id
    assert heard_in.split("-")[1:3] == [result.trace_id, result.span_id], "the record travelled in the result's name"
    assert queue.attributes == {"tediserve.request.id": "r1", "tediserve.attempt": 1}
    assert block.attributes["tediserve.steps.cache"] == 3
    assert block.ended_at - block.began_at == pytest.approx(0.1, abs=1e-6)
    for earlier, later in zip([admission, queue, block], [queue, block, result], strict=True):
        assert earlier.began_at <= later.began_at


async def play_scheduler(bus: Bus) -> None:
    """Hands the request over in the name of its wait."""
    tasks: list[asyncio.Task[None]] = []

    async def place(request: m.GenerateRequest, parent: str) -> None:
        wait = telemetry.begin(telemetry.QUEUE, parent=parent, attributes={telemetry.REQUEST_ID: request.request_id})
        with wait:
            assign = m.Assign(epoch=1, attempt=1, request=request, threshold=0.9)
            await bus.request(subjects.assign("a"), assign, m.Accepted, limit_s=10)
            wait.set({telemetry.ATTEMPT: 1})

    def on_request(request: m.GenerateRequest, _: int) -> None:
        tasks.append(asyncio.create_task(place(request, trace_parent.get())))

    await bus.follow(subjects.REQUESTS, "req.*", m.GenerateRequest, on_request)


async def play_worker(bus: Bus) -> None:
    """Records the block that it has done, and writes the record in the name of the result."""
    tasks: list[asyncio.Task[None]] = []

    async def work(assign: m.Assign) -> None:
        cost, ended_at = make_cost(), time.time() + 0.1
        telemetry.record(
            telemetry.BLOCK,
            began_at=ended_at - cost.seconds,
            ended_at=ended_at,
            attributes={telemetry.CACHE_STEPS: cost.cache_steps, telemetry.BLOCK_INDEX: 0},
        )
        record = make_record(assign.request, "finished", blocks_done=1, blocks=[cost])
        with telemetry.begin(telemetry.RESULT):
            assert subject_of(record) == "prog.gw.r1"
            await write_record(bus, record, after_seq=0, limit_s=5)

    async def on_assign(assign: m.Assign) -> m.Accepted:
        tasks.append(asyncio.create_task(work(assign)))
        return m.Accepted()

    await bus.respond(subjects.assign("a"), m.Assign, on_assign)
    await bus.flush()
