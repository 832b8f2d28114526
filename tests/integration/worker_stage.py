"""A stage for real worker and agent processes: a profile with random weights, and a test that plays the scheduler."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from services.denoiser.engine import Engine, Job, Threshold
from services.denoiser.instance import build_engine
from services.gateway.text import load_codec
from services.profile import load_profile
from tests.builders import make_request
from tests.integration import random_model
from tests.processes import ServiceProcess
from tests.waiting import until

BLOCK = random_model.BLOCK_SIZE
MAX_TOKENS = 4 * BLOCK
EPOCH = 3


class Served:
    """A profile, its prompts and the answers to them, made by an engine in this process."""

    def __init__(self, folder: Path) -> None:
        torch.set_num_threads(1)
        self.folder = random_model.write_profile(folder)
        profile = load_profile(self.folder)
        codec = load_codec(profile.weights_folder)
        self.prompts = [
            codec.encode_chat([{"role": "user", "content": random_model.prompt(number)}])
            for number in random_model.STABLE_PROMPTS
        ]
        self._engine: Engine | None = None
        self._answers: dict[int, list[int]] = {}
        self.steps: dict[int, int] = {}  # that each answer took

    def request(self, number: int, *, limit_s: float = 90.0, **changes: Any) -> m.GenerateRequest:
        """A request for the answer to that prompt."""
        now = time.time()
        values = {
            "request_id": f"request-{number}",
            "model": random_model.MODEL,
            "prompt_ids": self.prompts[number],
            "max_tokens": MAX_TOKENS,
            "block_size": BLOCK,
            "created_at": now,
            "expires_at": now + limit_s,
        } | changes
        return make_request(**values)

    def answer(self, number: int) -> list[int]:
        """What must come out, alone or in a batch, moved or not."""
        if number not in self._answers:
            self._engine = self._engine or build_engine(load_profile(self.folder))
            job = Job(
                request_id="only",
                prompt_ids=self.prompts[number],
                max_tokens=MAX_TOKENS,
                block_size=BLOCK,
                choice=Threshold(0.9),
            )
            self._engine.admit(job)
            self.steps[number] = 0
            while self._engine.progress("only").finished is None:
                self._engine.step()
                self.steps[number] += 1
            self._answers[number] = self._engine.output_ids("only")
            self._engine.remove("only")
        return self._answers[number]


class Stage:
    """What the test hears, and what it says as the scheduler. Ends the processes that it started."""

    def __init__(self, bus: Bus, nats_url: str, folder: Path, served: Served) -> None:
        self.bus, self.nats_url, self.folder, self.served = bus, nats_url, folder, served
        self.records: dict[str, list[tuple[int, m.ProgressRecord]]] = {}  # by request: sequence and record, in order
        self.statuses: dict[str, m.InstanceStatus] = {}  # the newest
        self.heard_at: dict[str, float] = {}
        self.nodes: dict[str, m.NodeStatus] = {}
        self.lost: list[m.InstanceLost] = []
        self.reports: list[m.Report] = []
        self.processes: list[ServiceProcess] = []

    async def begin(self) -> None:
        follower = await self.bus.follow(subjects.PROGRESS, "prog.*.*", m.ProgressRecord, self._on_record)
        await self.bus.subscribe("status.instance.*", m.InstanceStatus, self._on_status)
        await self.bus.subscribe("status.node.*", m.NodeStatus, lambda s: self.nodes.update({s.node_id: s}))
        await self.bus.subscribe("status.lost.*", m.InstanceLost, self.lost.append)
        await self.bus.subscribe("report.*", m.Report, self.reports.append)
        await follower.caught_up()

    def _on_record(self, record: m.ProgressRecord, seq: int) -> None:
        self.records.setdefault(record.request_id, []).append((seq, record))

    def _on_status(self, status: m.InstanceStatus) -> None:
        self.statuses[status.instance_id] = status
        self.heard_at[status.instance_id] = time.monotonic()

    # --- processes ---

    def start(self, command: str, **settings: object) -> ServiceProcess:
        """`worker` or `agent`, with these settings of its own table."""
        log_file = self.folder / f"{command}-{len(self.processes)}.log"
        values = {"profile": self.served.folder, **settings}
        process = ServiceProcess(f"services.denoiser {command}", log_file, self.nats_url, **values)
        process.start()
        self.processes.append(process)
        return process

    async def worker(self, instance_id: str, **settings: object) -> ServiceProcess:
        """A worker that is ready."""
        process = self.start("worker", instance_id=instance_id, node_id="node", **settings)
        await until(lambda: instance_id in self.statuses or not process.runs, "it is ready", 60)
        assert process.runs, process.log
        return process

    def end(self) -> None:
        for process in self.processes:
            process.kill()
        for process in self.processes:
            assert "Traceback" not in process.log, process.log

    # --- as the scheduler ---

    async def assign(
        self,
        instance_id: str,
        request: m.GenerateRequest,
        *,
        attempt: int = 1,
        epoch: int = EPOCH,
        threshold: float = 0.9,
        resume: tuple[int, m.ProgressRecord] | None = None,
    ) -> m.Accepted | m.Refused:
        seq, record = resume or (0, None)
        assign = m.Assign(
            epoch=epoch, attempt=attempt, request=request, threshold=threshold, resume=record, from_seq=seq
        )
        return await self.bus.request(
            subjects.assign(instance_id),
            assign,
            m.Accepted | m.Refused,  # type: ignore[arg-type]
            limit_s=5,
        )

    async def release(self, instance_id: str, request_id: str, *, epoch: int = EPOCH) -> m.Accepted | m.Refused:
        release = m.Release(epoch=epoch, attempt=1, request_id=request_id)
        return await self.bus.request(
            subjects.release(instance_id),
            release,
            m.Accepted | m.Refused,  # type: ignore[arg-type]
            limit_s=5,
        )

    # --- what has become of a request ---

    def history(self, request: m.GenerateRequest) -> list[m.ProgressRecord]:
        return [record for _, record in self.records.get(request.request_id, [])]

    def newest(self, request: m.GenerateRequest) -> m.ProgressRecord | None:
        history = self.history(request)
        return history[-1] if history else None

    async def until_state(self, request: m.GenerateRequest, state: m.State, limit_s: float = 60.0) -> m.ProgressRecord:
        def reached() -> m.ProgressRecord | None:
            record = self.newest(request)
            return record if record is not None and record.state == state else None

        found: m.ProgressRecord = await until(reached, f"{request.request_id} is {state}", limit_s)
        return found

    async def until_blocks(self, request: m.GenerateRequest, count: int, limit_s: float = 60.0) -> None:
        def reached() -> bool:
            record = self.newest(request)
            return record is not None and record.blocks_done >= count

        await until(reached, f"{request.request_id} has {count} blocks", limit_s)

    def check_answer(self, number: int, record: m.ProgressRecord) -> None:
        """The record is the whole answer, and no earlier one contradicts it."""
        assert record.state == "finished"
        assert record.token_ids == self.served.answer(number)
        assert len(record.confidences) == len(record.token_ids)
        for earlier in self.history(self.served.request(number)):
            assert record.token_ids[: len(earlier.token_ids)] == earlier.token_ids

    def held_by(self, instance_id: str) -> set[str]:
        return {held.request_id for held in self.statuses[instance_id].held}


@contextmanager
def ended(stage: Stage) -> Iterator[Stage]:
    """Whatever the test does, its processes end."""
    try:
        yield stage
    finally:
        stage.end()
