"""The real controller on a real nats-server: its thresholds reach a real worker, and it finds its way back in."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from msgspec.structs import replace

from contracts import messages as m
from contracts import subjects
from services.progress import subject_of, write_record
from tests.integration import random_model
from tests.integration.worker_stage import BLOCK, Stage
from tests.processes import ServiceProcess
from tests.waiting import until

pytestmark = pytest.mark.integration

LONG = random_model.MAX_OUTPUT_TOKENS
LOWEST, HIGHEST = 0.5, 0.9


class Control:
    """The controller's process, and what it says."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.thresholds: list[m.Thresholds] = []  # to any instance, in order
        self.loads: list[m.LoadState] = []
        log_file = stage.folder / "threshold-controller.log"
        self.process = ServiceProcess(
            "services.threshold_controller",
            log_file,
            stage.nats_url,
            profile=stage.served.folder,
            instance_silent_s=30,  # tests stop the worker for a while
        )
        stage.processes.append(self.process)

    async def hear(self) -> None:
        await self.stage.bus.subscribe("inst.*.thresholds", m.Thresholds, self.thresholds.append)
        await self.stage.bus.subscribe(subjects.LOAD_STATE, m.LoadState, self.loads.append)
        await self.stage.bus.flush()

    async def start(self) -> None:
        """Returns once it decides."""
        ready = self.process.log.count("ready: ")
        self.process.start()
        await until(lambda: self.process.log.count("ready: ") > ready or not self.process.runs, "it is ready")
        assert self.process.runs, self.process.log

    def told(self, request: m.GenerateRequest) -> list[float]:
        """The request's thresholds, in order."""
        entries = [entry for message in self.thresholds for entry in message.entries]
        return [entry.threshold for entry in entries if entry.request_id == request.request_id]

    def last_told(self, request: m.GenerateRequest) -> float | None:
        told = self.told(request)
        return told[-1] if told else None

    async def open(self, number: int, slo_s: float | None, **changes: Any) -> m.GenerateRequest:
        """A request in REQUESTS, of sixteen blocks, whose deadline is `slo_s` seconds from now."""
        deadline_at = None if slo_s is None else time.time() + slo_s
        values = {"max_tokens": LONG, "ignore_eos": True, "deadline_at": deadline_at} | changes
        request = self.stage.served.request(number, **values)
        await self.stage.bus.append(subjects.request(request.request_id), request)
        return request


@pytest_asyncio.fixture
async def control(stage: Stage) -> AsyncIterator[Control]:
    control = Control(stage)
    await control.hear()
    yield control


def reported(stage: Stage, request: m.GenerateRequest) -> list[float]:
    """The thresholds that the worker says it ran the request at."""
    entries = [entry for report in stage.reports for entry in report.entries]
    return [entry.threshold for entry in entries if entry.request_id == request.request_id]


async def test_thresholds_reach_a_running_request_and_fall_as_its_deadline_nears(
    stage: Stage, control: Control
) -> None:
    worker = await stage.worker("w-0")
    await control.start()
    request = await control.open(0, slo_s=4.0)
    assert await stage.assign("w-0", request, threshold=0.8) == m.Accepted()
    await until(lambda: HIGHEST in reported(stage, request), "there is time enough: it is turned up")
    worker.signal(signal.SIGSTOP)  # its time passes, and nothing is done
    try:
        await until(lambda: (control.last_told(request) or HIGHEST) < HIGHEST, "the controller turns it down")
    finally:
        worker.signal(signal.SIGCONT)
    await until(lambda: reported(stage, request)[-1] < HIGHEST, "the worker obeys")
    assert set(reported(stage, request)) <= {0.8, *control.told(request)}


async def test_one_step_after_it_is_placed_a_request_has_its_threshold(stage: Stage, control: Control) -> None:
    """Nobody has told the controller of the placement but the worker's first report."""
    await stage.worker("w-0")
    await control.start()
    late = await control.open(0, slo_s=0.0, max_tokens=4 * BLOCK)
    pinned = await control.open(1, slo_s=0.0, max_tokens=4 * BLOCK, threshold=0.75)
    for request in (late, pinned):
        assert await stage.assign("w-0", request) == m.Accepted()
    record = await stage.until_state(late, "finished")
    assert {block.mean_threshold for block in record.blocks[2:]} == {LOWEST}
    record = await stage.until_state(pinned, "finished")
    assert {block.mean_threshold for block in record.blocks} == {0.75}


async def test_a_crowd_lowers_all_caps_and_its_going_lifts_them(stage: Stage, control: Control) -> None:
    worker = await stage.worker("w-0")
    await control.start()
    running = await control.open(0, slo_s=20.0, priority=-1)
    assert await stage.assign("w-0", running) == m.Accepted()
    await until(lambda: control.last_told(running) == HIGHEST, "alone it has the highest")
    worker.signal(signal.SIGSTOP)  # it is still running when the crowd has come and gone
    try:
        crowd = [await control.open(0, slo_s=20.0, request_id=f"crowd-{n}") for n in range(45)]
        await until(lambda: control.last_told(running) == LOWEST, "the others come first")
        await until(lambda: control.loads[-1].num_open == 46, "all are counted")
        state = control.loads[-1]
        assert state.capacity_s == pytest.approx(20.0, rel=0.01)
        assert state.demand_s >= state.floor_s > 0
        assert [cap.threshold for cap in state.caps if cap.priority == -1] == [LOWEST]
        for request in crowd:
            final = replace(request.first_record, state="cancelled", reason="client_gone")
            await write_record(stage.bus, final, after_seq=0, limit_s=5)
        await until(lambda: control.last_told(running) == HIGHEST, "it has the highest again")
        await until(lambda: control.loads[-1].num_open == 1, "it is alone again")
    finally:
        worker.signal(signal.SIGCONT)


async def test_a_controller_that_dies_leaves_requests_running_and_its_successor_knows_them(
    stage: Stage, control: Control
) -> None:
    worker = await stage.worker("w-0")
    await control.start()
    request = await control.open(0, slo_s=None)
    assert await stage.assign("w-0", request, threshold=0.8) == m.Accepted()
    await until(lambda: HIGHEST in reported(stage, request), "it is turned up")
    control.process.kill()
    done = len(reported(stage, request))
    await until(lambda: len(reported(stage, request)) > done + 1, "it goes on without a controller")
    assert set(reported(stage, request)[done:]) == {HIGHEST}, "at the threshold that it had"
    worker.signal(signal.SIGSTOP)  # nothing is reported: the successor learns where it is from a status
    try:
        said = len(control.told(request))
        starting = asyncio.create_task(control.start())
        await until(lambda: "asked" in control.process.log or starting.done(), "it has asked or is ready")
    finally:
        worker.signal(signal.SIGCONT)
    await starting
    await until(lambda: len(control.told(request)) > said, "it is told again", 1.0)
    assert control.last_told(request) == HIGHEST


async def test_what_is_no_request_of_ours_and_what_has_ended_is_not_counted(stage: Stage, control: Control) -> None:
    ended = await control.open(0, slo_s=5.0)
    final = replace(ended.first_record, state="cancelled", reason="client_gone")
    await stage.bus.append(subject_of(final), final)
    await control.open(1, slo_s=5.0, model="another")
    await control.open(2, slo_s=None)
    await control.start()
    await until(lambda: control.loads, "its first load state")
    assert control.loads[-1].num_open == 1
