"""A stage for the real scheduler process: its profile, fake workers that do what the test says, and a fake gateway."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services.bus import Bus, NatsSettings, Stored, trace_parent
from services.costs import DegreeProfile, PassCost, dump_latency
from services.progress import write_record
from tests import builders
from tests.builders import BLOCK, MODEL
from tests.processes import ServiceProcess
from tests.waiting import until

PROFILE = f"""
model = "{MODEL}"
[decoding]
block_size = {BLOCK}
[limits]
max_context_tokens = 768
max_output_tokens = 256
[engine]
kv_tokens = 4096
max_requests = 4
"""


def make_request(request_id: str, **fields: Any) -> m.GenerateRequest:
    """Of the gateway that the stage plays."""
    now = time.time()
    return builders.make_request(
        request_id, **({"gateway_id": "gw-1", "created_at": now, "expires_at": now + 60} | fields)
    )


class SchedulerProcess(ServiceProcess):
    """`python -m services.scheduler` with a profile in the folder. All that are made in it share a log."""

    def __init__(self, folder: Path, nats_url: str, **settings: object) -> None:
        profile = folder / "profile"
        profile.mkdir(exist_ok=True)
        (profile / "profile.toml").write_text(PROFILE)
        cost = PassCost(curve=((1.0, 1.0), (1000.0, 11.0)))
        dump_latency(profile / "latency.json", "test", [DegreeProfile(tp_degree=1, cost=cost)])
        super().__init__("services.scheduler", folder / "scheduler.log", nats_url, profile=profile, **settings)


class FakeWorker:
    """An instance that accepts what it is told to, and writes records when the test says so."""

    def __init__(
        self, bus: Bus, instance_id: str, max_requests: int = 4, kv_tokens: int = 4096, model: str = MODEL
    ) -> None:
        self.bus = bus
        self.id = instance_id
        self.model = model
        self.max_requests = max_requests
        self.kv_tokens = kv_tokens
        self.held: dict[str, m.Assign] = {}
        self.seqs: dict[str, int] = {}  # PROGRESS sequence that the next write continues from
        self.assigns: list[m.Assign] = []  # all that came, in order
        self.traces: list[str] = []  # the trace parents that they came with
        self.cancels: list[str] = []
        self.answer: Callable[[m.Assign], object] = lambda assign: m.Accepted()
        self.draining = False
        self.silent = False
        self._beat: asyncio.Task[None] | None = None

    async def start(self) -> None:
        await self.bus.respond(subjects.assign(self.id), m.Assign, self._on_assign)
        await self.bus.subscribe("cancel.*", m.Cancel, self._on_cancel)
        await self.bus.subscribe(subjects.STATUS_ASK, m.StatusAsk, self._on_ask)
        await self.bus.flush()
        self._beat = asyncio.create_task(self._say_status())

    async def stop(self) -> None:
        if self._beat is not None:
            self._beat.cancel()
            await asyncio.gather(self._beat, return_exceptions=True)

    async def _on_assign(self, assign: m.Assign) -> object:
        if self.silent:
            await asyncio.sleep(3600)
        self.assigns.append(assign)
        self.traces.append(trace_parent.get())
        answer = self.answer(assign)
        if isinstance(answer, m.Accepted):
            self.held[assign.request.request_id] = assign
            self.seqs[assign.request.request_id] = assign.from_seq
        return answer

    def _on_cancel(self, cancel: m.Cancel) -> None:
        self.cancels.append(cancel.request_id)
        self.held.pop(cancel.request_id, None)

    def _on_ask(self, _: m.StatusAsk) -> None:
        self._ask = asyncio.create_task(self.publish_status())

    async def _say_status(self) -> None:
        while True:
            await self.publish_status()
            await asyncio.sleep(0.25)

    async def publish_status(self) -> None:
        if not self.silent:
            await self.bus.publish(subjects.instance_status(self.id), self.status())

    def status(self) -> m.InstanceStatus:
        return builders.make_status(
            self.id,
            [builders.make_held(assign.request, assign.attempt) for assign in self.held.values()],
            sent_at=time.time(),
            model=self.model,
            epoch=max((assign.epoch for assign in self.assigns), default=0),
            draining=self.draining,
            max_requests=self.max_requests,
            kv_tokens=self.kv_tokens,
        )

    async def write(self, request_id: str, state: m.State, blocks_done: int = 1, **fields: Any) -> int:
        """Writes the record after the last one it knows. Raises Overtaken."""
        assign = self.held[request_id]
        record = builders.make_record(
            assign.request,
            state,
            attempt=assign.attempt,
            holder=self.id,
            epoch=assign.epoch,
            blocks_done=blocks_done,
            token_ids=[7] * (blocks_done * BLOCK),
            written_at=time.time(),
        )
        seq = await write_record(self.bus, replace(record, **fields), after_seq=self.seqs[request_id], limit_s=5.0)
        self.seqs[request_id] = seq
        if state != "running":
            del self.held[request_id]
        return seq


class Stage:
    """Everything of one test: `bus` is the test's own connection."""

    def __init__(self, bus: Bus, nats_url: str, folder: Path) -> None:
        self.bus = bus
        self.nats_url = nats_url
        self.folder = folder
        self.schedulers: list[SchedulerProcess] = []
        self.workers: list[FakeWorker] = []
        self._buses: list[Bus] = []
        self._gateway: asyncio.Task[None] | None = None

    def scheduler(self, **settings: object) -> SchedulerProcess:
        process = SchedulerProcess(self.folder, self.nats_url, **settings)
        self.schedulers.append(process)
        process.start()
        return process

    async def worker(self, instance_id: str, **fields: Any) -> FakeWorker:
        """With a connection of its own, so that it can fall silent alone."""
        bus = await Bus.connect(NatsSettings(url=self.nats_url), instance_id)
        self._buses.append(bus)
        worker = FakeWorker(bus, instance_id, **fields)
        self.workers.append(worker)
        await worker.start()
        return worker

    def gateway(self, gateway_id: str = "gw-1") -> None:
        """Says each quarter second that the gateway lives, until `gateway_dies`."""

        async def beat() -> None:
            while True:
                status = m.GatewayStatus(gateway_id=gateway_id, sent_at=time.time())
                await self.bus.publish(subjects.gateway_status(gateway_id), status)
                await asyncio.sleep(0.25)

        self._gateway = asyncio.create_task(beat())

    async def gateway_dies(self) -> None:
        if self._gateway is not None:
            self._gateway.cancel()
            await asyncio.gather(self._gateway, return_exceptions=True)

    async def submit(self, request: m.GenerateRequest) -> None:
        await self.bus.append(subjects.request(request.request_id), request, after_seq=0)

    async def record(self, request_id: str) -> Stored[m.ProgressRecord] | None:
        return await self.bus.last(subjects.PROGRESS, subjects.progress_of_request(request_id), m.ProgressRecord)

    async def record_in_state(self, request_id: str, state: m.State) -> m.ProgressRecord:
        async def found() -> m.ProgressRecord | None:
            stored = await self.record(request_id)
            return stored.message if stored and stored.message.state == state else None

        record: m.ProgressRecord = await until(found)
        return record

    async def is_purged(self, request_id: str) -> bool:
        subject = subjects.request(request_id)
        try:
            return await self.bus.last(subjects.REQUESTS, subject, m.GenerateRequest) is None
        except MalformedMessage:
            return False

    async def end(self) -> None:
        await self.gateway_dies()
        for worker in self.workers:
            await worker.stop()
        for process in self.schedulers:
            process.kill()
        for bus in self._buses:
            await asyncio.wait_for(bus.close(), 10)
