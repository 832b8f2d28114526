"""A real worker on a real nats-server; the test is its scheduler."""

import asyncio
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from contracts import messages as m
from contracts import subjects
from services.denoiser import worker as worker_module
from services.denoiser.config import WorkerConfig
from services.denoiser.engine import Engine, StepResult
from services.denoiser.instance import build_engine
from services.profile import Profile, load_profile
from services.progress import write_record
from services.runtime import Runtime
from tests.conftest import NatsServer
from tests.integration.worker_stage import BLOCK, EPOCH, MAX_TOKENS, Served, Stage
from tests.waiting import until

pytestmark = pytest.mark.integration


# --- running ------------------------------------------------------------------------------------------------------


async def test_requests_run_to_their_answers_block_by_block(stage: Stage) -> None:
    await stage.worker("w-0")
    requests = [stage.served.request(number) for number in range(6)]
    for request in requests:
        assert await stage.assign("w-0", request) == m.Accepted()
    for number, request in enumerate(requests):
        record = await stage.until_state(request, "finished")
        stage.check_answer(number, record)
        assert (record.finish, record.holder, record.epoch, record.attempt) == ("length", "w-0", EPOCH, 1)
        assert [r.blocks_done for r in stage.history(request)] == [1, 2, 3, 4]
        assert [r.state for r in stage.history(request)] == ["running", "running", "running", "finished"]
        assert all(block.recompute_steps == 1 and block.cache_steps > 0 for block in record.blocks)
        assert all(block.mean_threshold == pytest.approx(0.9) for block in record.blocks)
        assert record.started_at is not None
        assert record.started_at <= record.written_at
    await until(lambda: not stage.statuses["w-0"].held, "all are forgotten")


async def test_reports_tell_how_far_requests_are(stage: Stage) -> None:
    await stage.worker("w-0")
    request = stage.served.request(0)
    await stage.assign("w-0", request)
    await stage.until_state(request, "finished")
    await until(lambda: any(entry.finished for report in stage.reports for entry in report.entries), "the last report")
    entries = [entry for report in stage.reports for entry in report.entries]
    assert {entry.request_id for entry in entries} == {request.request_id}
    committed = [entry.tokens_committed for entry in entries]
    assert committed == sorted(committed)
    assert committed[-1] == MAX_TOKENS
    assert {entry.block_index for entry in entries} >= {1, 2, 3, 4}, "each block's end is reported"
    steps = sum(block.recompute_steps + block.cache_steps for block in stage.history(request)[-1].blocks)
    assert entries[-1].steps == steps
    assert len(stage.reports) < steps, "not one for every step"


async def test_status_is_told_when_asked_and_by_itself(stage: Stage) -> None:
    await stage.worker("w-0", status_every_s=30)
    request = stage.served.request(0)
    await stage.assign("w-0", request)
    asked_at = time.monotonic()
    await stage.bus.publish(subjects.STATUS_ASK, m.StatusAsk())
    await until(lambda: stage.heard_at["w-0"] > asked_at, "it answers", 2)
    status = stage.statuses["w-0"]
    assert status.node_id == "node"
    assert (status.epoch, status.kv_tokens, status.max_requests, status.draining) == (EPOCH, 8192, 24, False)
    assert [held.canvas_tokens for held in status.held] == [request.canvas_tokens]


async def test_a_record_to_resume_from_leads_to_the_same_tokens(stage: Stage) -> None:
    await stage.worker("w-0")
    request = stage.served.request(1)
    await stage.assign("w-0", request)
    await stage.until_state(request, "finished")
    halfway = next(record for record in stage.history(request) if 0 < record.blocks_done < 4)  # some may share a write
    again = stage.served.request(1, request_id="again")
    lost = replace(halfway, request_id="again", attempt=2, state="released", holder="", reason="worker_lost", blocks=[])
    seq = await write_record(stage.bus, lost, after_seq=0, limit_s=5)
    assert await stage.assign("w-0", again, attempt=2, resume=(seq, lost)) == m.Accepted()
    record = await stage.until_state(again, "finished")
    assert record.token_ids == stage.served.answer(1)
    assert (record.attempt, record.moves, record.blocks_done) == (2, 0, 4)
    assert len(record.blocks) == 4 - halfway.blocks_done, "only what it did itself"


async def test_an_assignment_repeated_runs_once(stage: Stage) -> None:
    await stage.worker("w-0")
    request = stage.served.request(2)
    answers = await asyncio.gather(*(stage.assign("w-0", request) for _ in range(5)))
    assert answers == [m.Accepted()] * 5
    stage.check_answer(2, await stage.until_state(request, "finished"))
    assert await stage.assign("w-0", request) == m.Accepted(), "late, after its end"
    await stage.bus.publish(subjects.STATUS_ASK, m.StatusAsk())
    await until(lambda: not stage.statuses["w-0"].held, "nothing runs")
    assert [r.blocks_done for r in stage.history(request)] == [1, 2, 3, 4]


async def test_a_stale_epoch_is_refused(stage: Stage) -> None:
    await stage.worker("w-0")
    await stage.assign("w-0", stage.served.request(0), epoch=7)
    answer = await stage.assign("w-0", stage.served.request(1), epoch=6)
    assert isinstance(answer, m.Refused)
    assert (answer.reason, answer.epoch) == ("stale_epoch", 7)
    answer = await stage.release("w-0", "request-0", epoch=6)
    assert isinstance(answer, m.Refused)


async def test_what_can_not_run_is_refused_at_once(stage: Stage) -> None:
    await stage.worker("w-0")
    long = stage.served.request(0, prompt_ids=[10] * 500)
    answer = await stage.assign("w-0", long)
    assert isinstance(answer, m.Refused)
    assert answer.reason == "too_long"
    answer = await stage.assign("w-0", stage.served.request(0, prompt_ids=[79, 80]))
    assert isinstance(answer, m.Refused)
    assert answer.reason == "bad_request"
    answers = [await stage.assign("w-0", stage.served.request(0, request_id=f"r{i}")) for i in range(25)]
    assert [type(answer) for answer in answers] == [m.Accepted] * 24 + [m.Refused]


async def test_a_released_request_goes_on_elsewhere_with_the_same_tokens(stage: Stage) -> None:
    await stage.worker("w-0")
    await stage.worker("w-1")
    others = [stage.served.request(number) for number in (5, 6, 7)]
    request = stage.served.request(3)
    for one in (request, *others):
        await stage.assign("w-0", one)
    await stage.until_blocks(request, 1)
    assert await stage.release("w-0", request.request_id) == m.Accepted()
    released = await stage.until_state(request, "released")
    assert released.holder == "w-0"
    assert len(released.token_ids) == released.blocks_done * BLOCK
    assert await stage.assign("w-1", request, resume=stage.records[request.request_id][-1]) == m.Accepted()
    record = await stage.until_state(request, "finished")
    stage.check_answer(3, record)
    assert (record.holder, record.moves, record.attempt) == ("w-1", 1, 1)
    assert {block.instance_id for block in record.blocks} == {"w-0", "w-1"}
    for number, other in zip((5, 6, 7), others, strict=True):
        stage.check_answer(number, await stage.until_state(other, "finished"))


async def test_a_threshold_turned_while_it_runs_saves_steps(stage: Stage) -> None:
    await stage.worker("w-0")
    request, pinned = stage.served.request(4), stage.served.request(5, threshold=0.9)
    for one in (request, pinned):
        await stage.assign("w-0", one)
    await stage.until_blocks(request, 1)
    entries = [m.ThresholdEntry(request_id=one.request_id, attempt=1, threshold=0.05) for one in (request, pinned)]
    await stage.bus.publish(subjects.thresholds("w-0"), m.Thresholds(entries=entries))
    turned = (await stage.until_state(request, "finished")).blocks
    assert turned[-1].mean_threshold == pytest.approx(0.05)
    assert turned[-1].recompute_steps + turned[-1].cache_steps < 4, "almost all is committed at once"
    stage.check_answer(5, await stage.until_state(pinned, "finished"))


async def test_a_cancelled_request_leaves_at_the_next_step(stage: Stage) -> None:
    await stage.worker("w-0")
    delays = []
    for round_ in range(8):
        requests = [stage.served.request(0, request_id=f"c{round_}-{i}") for i in range(24)]
        for request in requests:
            assert await stage.assign("w-0", request) == m.Accepted()
        spare = stage.served.request(1, request_id=f"spare-{round_}")
        assert isinstance(await stage.assign("w-0", spare), m.Refused), "it is full"
        started = time.monotonic()
        await stage.bus.publish(subjects.cancel(requests[0].request_id), m.Cancel(request_id=requests[0].request_id))
        while await stage.assign("w-0", spare) != m.Accepted():
            pass
        delays.append(time.monotonic() - started)
        for request in (*requests, spare):
            await stage.bus.publish(subjects.cancel(request.request_id), m.Cancel(request_id=request.request_id))
    assert sorted(delays)[-1] < 0.5, "well under what 24 requests take"
    await stage.bus.publish(subjects.STATUS_ASK, m.StatusAsk())
    await until(lambda: not stage.statuses["w-0"].held, "all have left")


async def test_an_idle_worker_uses_no_cpu_and_wakes_at_once(stage: Stage) -> None:
    process = await stage.worker("w-0")
    await stage.assign("w-0", stage.served.request(0))
    await stage.until_state(stage.served.request(0), "finished")
    before = psutil.Process(process.pid).cpu_times()
    await asyncio.sleep(2)
    after = psutil.Process(process.pid).cpu_times()
    assert after.user + after.system - before.user - before.system < 0.3, "a spinning thread would use 2 s"
    stage.reports.clear()
    await stage.assign("w-0", stage.served.request(1))
    await until(lambda: stage.reports, "its first report", 5)


# --- faults -------------------------------------------------------------------------------------------------------


async def test_nats_killed_and_started_again(stage: Stage, nats_server: NatsServer) -> None:
    await stage.worker("w-0")
    requests = [stage.served.request(number) for number in range(12)]
    for request in requests:
        await stage.assign("w-0", request)
    await stage.until_blocks(requests[0], 1)
    nats_server.kill()
    await asyncio.sleep(1.5)  # long enough for some to finish unheard
    nats_server.start()
    for number, request in enumerate(requests):
        stage.check_answer(number, await stage.until_state(request, "finished"))
    await until(lambda: not stage.statuses["w-0"].held, "all are forgotten")


async def test_a_worker_that_was_stopped_finds_itself_shut_out(stage: Stage) -> None:
    process = await stage.worker("w-0")
    request, other = stage.served.request(0), stage.served.request(1)
    for one in (request, other):
        await stage.assign("w-0", one)
    await stage.until_blocks(request, 1)
    process.signal(signal.SIGSTOP)
    stored = await stage.bus.last(subjects.PROGRESS, subjects.progress_of_request(request.request_id), m.ProgressRecord)
    assert stored is not None
    lost = replace(stored.message, attempt=2, state="released", holder="", reason="worker_lost")
    await write_record(stage.bus, lost, after_seq=stored.seq, limit_s=5)
    process.signal(signal.SIGCONT)
    stage.check_answer(1, await stage.until_state(other, "finished"))
    await until(lambda: not stage.held_by("w-0"), "it has dropped the request")
    assert stage.newest(request) == lost
    assert "overtaken" in process.log


async def test_a_higher_attempt_of_what_it_runs_replaces_it(stage: Stage) -> None:
    await stage.worker("w-0")
    request = stage.served.request(0)
    await stage.assign("w-0", request)
    await stage.until_blocks(request, 2)
    seq, record = stage.records[request.request_id][-1]
    lost = replace(record, attempt=2, state="released", holder="", reason="worker_lost")
    seq = await write_record(stage.bus, lost, after_seq=seq, limit_s=5)
    assert await stage.assign("w-0", request, attempt=2, resume=(seq, lost)) == m.Accepted()
    record = await stage.until_state(request, "finished")
    stage.check_answer(0, record)
    assert record.attempt == 2


async def test_an_expired_request_is_failed(stage: Stage) -> None:
    await stage.worker("w-0")
    request = stage.served.request(0, expires_at=time.time() - 1.9, max_tokens=256)
    await stage.assign("w-0", request)
    record = await stage.until_state(request, "failed", 10)
    assert record.reason == "expired"


async def test_garbage_on_its_subjects_is_ignored(stage: Stage) -> None:
    process = await stage.worker("w-0")
    garbage = [b"", b"\xff\xff", b"\x80", b"\x00" * 1000, b"{}", b"\x81\xa4type\xa6Assign", b"\x93\x01\x02\x03"]
    for subject in ("inst.w-0.assign", "inst.w-0.release", "inst.w-0.thresholds", "cancel.x", "status.ask"):
        for data in garbage:
            await stage.bus._client.publish(subject, data, reply="nobody.hears")
    strange = stage.served.request(0, request_id="strange", prompt_ids=[])
    await stage.assign("w-0", strange)
    request = stage.served.request(0)
    assert await stage.assign("w-0", request) == m.Accepted()
    stage.check_answer(0, await stage.until_state(request, "finished"))
    assert process.log.count("malformed message on inst.w-0.assign") == 1, "said once"


class _Poisoned(Engine):
    def step(self) -> StepResult:
        raise RuntimeError("poison")


async def test_an_error_in_the_engine_ends_the_worker(
    stage: Stage, served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which request is to blame is unknown: the scheduler places them anew, each at its next attempt."""

    def build_poisoned(profile: Profile) -> Engine:
        engine = build_engine(profile)
        engine.__class__ = _Poisoned
        return engine

    monkeypatch.setattr(worker_module, "build_engine", build_poisoned)
    runtime = Runtime("test", stage.bus)
    profile, config = load_profile(served.folder), WorkerConfig(instance_id="w-0")
    serving = asyncio.create_task(worker_module.serve(runtime, config, profile))
    await until(lambda: "w-0" in stage.statuses, "it is ready")
    await stage.assign("w-0", served.request(0))
    with pytest.raises(RuntimeError, match="poison"):
        await asyncio.wait_for(serving, 10)
    await runtime.cancel_tasks()


async def test_a_wrong_profile_ends_it_with_the_reason(stage: Stage, tmp_path: Path) -> None:
    process = stage.start("worker", profile=tmp_path / "nowhere")
    assert await process.exit_code() == 2
    assert "nowhere" in process.log


async def test_missing_weights_end_it_with_the_reason(stage: Stage, tmp_path: Path) -> None:
    folder = tmp_path / "profile"
    shutil.copytree(stage.served.folder, folder)
    (folder / "model" / "model.safetensors").unlink()
    process = stage.start("worker", profile=folder)
    assert await process.exit_code() == 2
    assert "model.safetensors is missing" in process.log


# --- draining -----------------------------------------------------------------------------------------------------


async def test_a_drained_worker_hands_its_requests_back(stage: Stage) -> None:
    notices: list[m.DrainNotice] = []

    async def agree(notice: m.DrainNotice) -> m.Accepted:
        notices.append(notice)
        return m.Accepted()

    await stage.bus.respond(subjects.DRAIN, m.DrainNotice, agree)
    process = await stage.worker("w-0", drain_limit_s=60)
    requests = [stage.served.request(number) for number in range(4)]
    for request in requests:
        await stage.assign("w-0", request)
    await stage.until_blocks(requests[0], 1)
    process.signal(signal.SIGTERM)
    await until(lambda: stage.statuses["w-0"].draining, "it says that it drains")
    answer = await stage.assign("w-0", stage.served.request(9))
    assert isinstance(answer, m.Refused)
    assert answer.reason == "draining"
    await until(lambda: notices, "it tells the scheduler")
    for request in requests[:2]:
        await stage.release("w-0", request.request_id)
    for request in requests:
        await until(
            lambda request=request: stage.history(request)[-1:] and stage.newest(request).state != "running", ""
        )  # type: ignore[union-attr]
    assert await process.exit_code() == 0
    assert notices == [m.DrainNotice(instance_id="w-0")]
    await stage.worker("w-1")
    for number, request in enumerate(requests):
        record = stage.newest(request)
        assert record is not None
        if record.state == "released":
            await stage.assign("w-1", request, resume=stage.records[request.request_id][-1])
        stage.check_answer(number, await stage.until_state(request, "finished"))
    assert any(stage.newest(request).moves for request in requests), "some were handed back"  # type: ignore[union-attr]


def _let_go(record: m.ProgressRecord | None) -> bool:
    return record is not None and record.state != "running"


async def test_a_draining_worker_that_nobody_answers_finishes_first(stage: Stage) -> None:
    process = await stage.worker("w-0")
    request = stage.served.request(0)
    await stage.assign("w-0", request)
    process.signal(signal.SIGTERM)
    stage.check_answer(0, await stage.until_state(request, "finished"))
    assert await process.exit_code() == 0


async def test_draining_ends_at_its_limit(stage: Stage) -> None:
    process = await stage.worker("w-0", drain_limit_s=0.5)
    requests = [stage.served.request(0, request_id=f"r{i}", max_tokens=256) for i in range(20)]
    for request in requests:
        await stage.assign("w-0", request)
    process.signal(signal.SIGTERM)
    assert await process.exit_code(10) == 0
    assert "drain_limit" in process.log


async def test_an_idle_worker_stops_at_once(stage: Stage) -> None:
    process = await stage.worker("w-0")
    process.signal(signal.SIGTERM)
    assert await process.exit_code(10) == 0


async def test_a_worker_can_be_stopped_while_it_loads(stage: Stage) -> None:
    process = stage.start("worker", instance_id="w-0")
    await until(lambda: "loading" in process.log, "it loads")
    process.signal(signal.SIGTERM)
    assert await process.exit_code(30) == 0
