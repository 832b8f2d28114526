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
from tests.predictors import write_predictor
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
        self.process = self.another("threshold-controller.log")

    def another(self, log: str) -> ServiceProcess:
        """Not started yet."""
        process = ServiceProcess(
            "services.threshold_controller",
            self.stage.folder / log,
            self.stage.nats_url,
            profile=self.stage.served.folder,
            instance_silent_s=30,  # tests stop the worker for a while
        )
        self.stage.processes.append(process)
        return process

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
    assert await stage.assign("w-0", late, threshold=0.6) == m.Accepted()
    assert await stage.assign("w-0", pinned) == m.Accepted()
    record = await stage.until_state(late, "finished")
    thresholds = [block.mean_threshold for block in record.blocks[2:]]
    assert thresholds == pytest.approx([LOWEST] * len(thresholds)), (
        "it is late whatever is done, and soon out of the way"
    )
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


async def test_of_two_controllers_one_decides_and_the_other_takes_over(stage: Stage, control: Control) -> None:
    await stage.worker("w-0")
    await control.start()
    standby = control.another("standby.log")
    standby.start()
    await until(lambda: "waiting for the lease" in standby.log, "it stands by")
    request = await control.open(0, slo_s=None)
    assert await stage.assign("w-0", request, threshold=0.8) == m.Accepted()
    await until(lambda: HIGHEST in reported(stage, request), "it is turned up")
    assert "ready: " not in standby.log, "nobody but the holder of the lease decides"
    control.process.signal(signal.SIGTERM)
    assert await control.process.exit_code() == 0
    await until(lambda: "ready: " in standby.log, "the other one decides")
    said = len(control.loads)
    await until(lambda: len(control.loads) > said, "and says so", 2.0)


async def test_without_predictor_and_controller_requests_go_on_and_both_resume(stage: Stage, control: Control) -> None:
    write_predictor(stage.served.folder, model=random_model.MODEL, block_size=BLOCK)
    forecasts: list[m.Forecast] = []
    await stage.bus.subscribe("forecast.*", m.Forecast, forecasts.append)
    log = stage.folder / "predictor.log"
    predictor = ServiceProcess("services.step_predictor", log, stage.nats_url, profile=stage.served.folder)
    stage.processes.append(predictor)
    predictor.start()
    await stage.worker("w-0", report_every_ms=5)
    await control.start()
    await until(lambda: "ready: " in predictor.log, "the predictor is ready", 60)
    requests = [await control.open(n, slo_s=60.0) for n in range(2)]
    for request in requests:
        assert await stage.assign("w-0", request, threshold=0.8) == m.Accepted()
    await until(lambda: forecasts and all(HIGHEST in reported(stage, r) for r in requests), "both work")
    for process in (predictor, control.process):
        process.kill()
        done = [len(reported(stage, request)) for request in requests]
        await until(lambda: [len(reported(stage, r)) for r in requests] > done, "the requests go on")  # noqa: B023
    for number, request in enumerate(requests):
        record = await stage.until_state(request, "finished")
        assert len(record.token_ids) == LONG, number
    predictor.start()
    await control.start()
    late = await control.open(2, slo_s=60.0)  # only now, or a fast machine ends it while the old lease runs out
    assert await stage.assign("w-0", late, threshold=0.8) == m.Accepted()
    await until(lambda: control.told(late), "control resumes", 1.0)
    heard = len(forecasts)
    await until(lambda: len(forecasts) > heard or stage.newest(late), "the predictor too, or the request has ended")
    await stage.until_state(late, "finished")


async def test_what_is_no_request_of_ours_and_what_has_ended_is_not_counted(stage: Stage, control: Control) -> None:
    ended = await control.open(0, slo_s=5.0)
    final = replace(ended.first_record, state="cancelled", reason="client_gone")
    await stage.bus.append(subject_of(final), final)
    await control.open(1, slo_s=5.0, model="another")
    await control.open(2, slo_s=None)
    await control.start()
    await until(lambda: control.loads, "its first load state")
    assert control.loads[-1].num_open == 1
