"""The real scheduler process on a real nats-server, with workers that do what the test says."""

import asyncio
import signal
import time
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from contracts import messages as m
from contracts import subjects
from services.bus import Bus, new_trace_parent, trace_parent
from services.progress import Overtaken
from tests.builders import make_record, make_status
from tests.conftest import NatsServer
from tests.integration.scheduler_stage import FakeWorker, SchedulerProcess, Stage, make_request
from tests.processes import free_port
from tests.waiting import until

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def stage(nats_server: NatsServer, bus: Bus, tmp_path: Path) -> AsyncIterator[Stage]:
    stage = Stage(bus, nats_server.url, tmp_path)
    stage.gateway()
    yield stage
    await stage.end()
    for process in stage.schedulers:
        assert "Traceback" not in process.log, process.log


async def place_all(stage: Stage, request_ids: list[str]) -> None:
    for request_id in request_ids:
        await stage.submit(make_request(request_id))
    await until(lambda: sum(len(worker.held) for worker in stage.workers) == len(request_ids))


async def a_running_request(stage: Stage, worker: FakeWorker, request_id: str = "r1") -> None:
    """On the worker, with one block done."""
    await stage.submit(make_request(request_id))
    await until(lambda: request_id in worker.held)
    await worker.write(request_id, "running")


async def restarted(process: SchedulerProcess) -> None:
    """A fresh scheduler that has settled."""
    seen = process.log.count("epoch")
    process.start()
    await until(lambda: process.log.count("epoch") > seen)


async def test_requests_spread_over_two_workers(stage: Stage) -> None:
    a, b = await stage.worker("a"), await stage.worker("b")
    stage.scheduler()
    await place_all(stage, ["r1", "r2", "r3", "r4"])
    assert (len(a.held), len(b.held)) == (2, 2)
    assert {assign.attempt for assign in a.assigns + b.assigns} == {1}


async def test_a_finished_request_is_purged(stage: Stage) -> None:
    worker = await stage.worker("a")
    stage.scheduler()
    await a_running_request(stage, worker)
    await worker.write("r1", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("r1"))
    assert len(worker.assigns) == 1


async def test_a_killed_scheduler_adopts_what_runs(stage: Stage) -> None:
    """kill -9 with requests that have written, and one that has not yet."""
    a, b = await stage.worker("a"), await stage.worker("b")
    scheduler = stage.scheduler()
    request_ids = ["r1", "r2", "r3", "r4", "r5"]
    await place_all(stage, request_ids)
    for worker in (a, b):
        for request_id in list(worker.held)[1:]:
            await worker.write(request_id, "running")
    num_assigns = len(a.assigns) + len(b.assigns)
    scheduler.kill()
    await restarted(scheduler)
    await stage.submit(make_request("after"))  # placed after all others were decided
    await until(lambda: "after" in {**a.held, **b.held})
    assert len(a.assigns) + len(b.assigns) == num_assigns + 1
    for worker in (a, b):
        for request_id in list(worker.held):
            await worker.write(request_id, "finished", blocks_done=2)
    for request_id in [*request_ids, "after"]:
        await until(lambda request_id=request_id: stage.is_purged(request_id))


async def test_a_request_that_waits_while_there_is_no_scheduler_is_placed_by_the_next(stage: Stage) -> None:
    worker = await stage.worker("a")
    await stage.submit(make_request("r1"))
    stage.scheduler(adoption_grace_s=0.3)
    await until(lambda: "r1" in worker.held)


async def test_killed_between_final_record_and_purge_it_is_not_run_again(stage: Stage) -> None:
    worker = await stage.worker("a")
    scheduler = stage.scheduler()
    await a_running_request(stage, worker)
    scheduler.kill()
    await worker.write("r1", "finished", blocks_done=2)
    assert not await stage.is_purged("r1")
    await restarted(scheduler)
    await until(lambda: stage.is_purged("r1"))
    await stage.submit(make_request("after"))
    await until(lambda: "after" in worker.held)
    assert [assign.request.request_id for assign in worker.assigns] == ["r1", "after"]


async def test_what_a_silent_worker_holds_is_placed_anew_and_its_writes_are_refused(stage: Stage) -> None:
    a = await stage.worker("a")
    stage.scheduler(instance_silent_s=1.0)
    await a_running_request(stage, a)
    b = await stage.worker("b")
    a.silent = True
    await until(lambda: "r1" in b.held)
    assert (b.held["r1"].attempt, b.held["r1"].resume.blocks_done) == (2, 1)
    with pytest.raises(Overtaken):
        await a.write("r1", "running", blocks_done=2)
    await b.write("r1", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("r1"))


async def test_a_dead_instance_is_known_at_once(stage: Stage) -> None:
    a = await stage.worker("a")
    stage.scheduler(instance_silent_s=30.0)
    await a_running_request(stage, a)
    b = await stage.worker("b")
    await until(lambda: b.bus.connected)
    a.silent = True
    await stage.bus.publish(subjects.instance_lost("a"), m.InstanceLost(instance_id="a", detail="test"))
    await until(lambda: "r1" in b.held)
    assert b.held["r1"].attempt == 2


async def test_lost_three_times_a_request_fails(stage: Stage) -> None:
    scheduler = stage.scheduler(instance_silent_s=30.0)
    await stage.submit(make_request("r1"))
    for attempt, instance_id in enumerate(("a", "b", "c"), start=1):
        worker = await stage.worker(instance_id)
        await until(lambda worker=worker: "r1" in worker.held)
        assert worker.held["r1"].attempt == attempt
        worker.silent = True
        await stage.bus.publish(subjects.instance_lost(instance_id), m.InstanceLost(instance_id=instance_id))
    record = await stage.record_in_state("r1", "failed")
    assert (record.reason, record.attempt) == ("worker_lost", 3)
    await until(lambda: stage.is_purged("r1"))
    assert scheduler.runs


async def test_a_second_scheduler_stands_by_and_takes_over(stage: Stage) -> None:
    worker = await stage.worker("a")
    first = stage.scheduler()
    await a_running_request(stage, worker)
    second = stage.scheduler()
    await until(lambda: first.log.count("waiting for the lease") == 2)  # they share a log
    first.kill()
    killed_at = time.monotonic()
    await stage.submit(make_request("r2"))
    await until(lambda: "r2" in worker.held)
    assert time.monotonic() - killed_at < 8  # time to live, one try more, the grace for the one that waits
    assert worker.held["r2"].epoch > worker.held["r1"].epoch
    assert len(worker.assigns) == 2
    assert second.runs


async def test_a_scheduler_asked_to_stop_hands_over_without_delay(stage: Stage) -> None:
    worker = await stage.worker("a")
    first = stage.scheduler()
    await a_running_request(stage, worker)
    stage.scheduler()
    await until(lambda: first.log.count("waiting for the lease") == 2)
    first.signal(signal.SIGTERM)
    assert await first.exit_code() == 0
    await stage.submit(make_request("r2"))
    await until(lambda: "r2" in worker.held)


async def test_one_asked_to_stop_while_it_stands_by_does(stage: Stage) -> None:
    first = stage.scheduler()
    await until(lambda: "acting" in first.log)
    second = stage.scheduler()
    await until(lambda: first.log.count("waiting for the lease") == 2)
    second.signal(signal.SIGTERM)
    assert await second.exit_code() == 0


async def test_a_scheduler_that_stood_still_ends_once_it_finds_its_lease_lost(stage: Stage) -> None:
    """SIGSTOP for longer than the lease lives; nothing that it held is taken for lost."""
    worker = await stage.worker("a")
    scheduler = stage.scheduler(instance_silent_s=1.0)
    await a_running_request(stage, worker)
    scheduler.signal(signal.SIGSTOP)
    await asyncio.sleep(2.5)
    scheduler.signal(signal.SIGCONT)
    assert await scheduler.exit_code() == 3
    record = await stage.record_in_state("r1", "running")
    assert record.attempt == 1


async def test_a_stale_scheduler_ends(stage: Stage) -> None:
    worker = await stage.worker("a")
    worker.answer = lambda assign: m.Refused(reason="stale_epoch", epoch=assign.epoch + 1)
    scheduler = stage.scheduler()
    await stage.submit(make_request("r1"))
    assert await scheduler.exit_code() == 3


async def test_an_expired_request_fails_and_its_holder_is_told(stage: Stage) -> None:
    worker = await stage.worker("a")
    stage.scheduler(expiry_margin_s=0.2)
    await until(lambda: "acting" in stage.schedulers[0].log)
    await stage.submit(make_request("r1", expires_at=time.time() + 1.0))
    record = await stage.record_in_state("r1", "failed")
    assert record.reason == "expired"
    await until(lambda: stage.is_purged("r1"))
    await until(lambda: not worker.assigns or "r1" in worker.cancels)


async def test_requests_of_a_silent_gateway_are_cancelled_but_not_the_detached(stage: Stage) -> None:
    worker = await stage.worker("a")
    stage.scheduler(gateway_silent_s=1.0)
    await a_running_request(stage, worker, "r1")
    await stage.submit(make_request("kept", detached=True))
    await until(lambda: "kept" in worker.held)
    await stage.gateway_dies()
    record = await stage.record_in_state("r1", "cancelled")
    assert (record.reason, record.blocks_done) == ("gateway_lost", 1)
    await until(lambda: "r1" in worker.cancels)
    await until(lambda: stage.is_purged("r1"))
    await worker.write("kept", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("kept"))


async def test_a_request_cancelled_by_its_gateway_is_purged(stage: Stage) -> None:
    worker = await stage.worker("a", max_requests=1)
    stage.scheduler()
    await a_running_request(stage, worker, "r1")
    await stage.submit(make_request("r2"))
    cancelled = make_record("r1", "cancelled", gateway_id="gw-1", reason="client_gone")
    seq = worker.seqs["r1"]
    await stage.bus.append(subjects.progress("gw-1", "r1"), cancelled, after_seq=seq)
    await stage.bus.publish(subjects.cancel("r1"), m.Cancel(request_id="r1"))
    await until(lambda: stage.is_purged("r1"))
    await until(lambda: "r2" in worker.held)


async def test_a_worker_without_room_is_asked_again_until_it_has(stage: Stage) -> None:
    worker = await stage.worker("a")
    worker.answer = lambda assign: m.Refused(reason="kv_full")
    stage.scheduler()
    await stage.submit(make_request("r1"))
    await until(lambda: len(worker.assigns) >= 3)
    worker.answer = lambda assign: m.Accepted()
    await until(lambda: "r1" in worker.held)
    assert {assign.attempt for assign in worker.assigns} == {1}


async def test_a_draining_worker_hands_its_requests_over_at_the_same_attempt(stage: Stage) -> None:
    a = await stage.worker("a")
    stage.scheduler()
    await a_running_request(stage, a)
    b = await stage.worker("b")
    a.draining = True
    notice = m.DrainNotice(instance_id="a")
    assert await stage.bus.request(subjects.DRAIN, notice, m.Accepted, limit_s=2.0) == m.Accepted()
    seq = await a.write("r1", "released", blocks_done=1)
    await until(lambda: "r1" in b.held)
    assert (b.held["r1"].attempt, b.held["r1"].from_seq) == (1, seq)
    await stage.submit(make_request("r2"))
    await until(lambda: "r2" in b.held)


async def test_malformed_messages_everywhere_change_nothing(stage: Stage) -> None:
    worker = await stage.worker("a")
    scheduler = stage.scheduler()
    await a_running_request(stage, worker, "r1")
    for subject in ("status.instance.x", "report.x", "status.lost.x", "status.gateway.x", subjects.DRAIN):
        for _ in range(3):
            await stage.bus.publish(subject, {"neither": "this", "nor": "that"})
    await stage.bus.append("req.garbage", "no request")
    await stage.bus.append("prog.gw-1.garbage", "no record")
    await until(lambda: stage.is_purged("garbage"))
    await worker.write("r1", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("r1"))
    assert scheduler.log.count("malformed message on status.instance.x") == 1


async def test_garbage_in_a_records_place_costs_an_attempt_but_not_the_request(stage: Stage) -> None:
    worker = await stage.worker("a")
    stage.scheduler()
    await a_running_request(stage, worker, "r1")
    await stage.bus.append("prog.gw-1.r1", "no record")
    await until(lambda: worker.assigns[-1].attempt == 2)
    await worker.write("r1", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("r1"))


async def test_an_assignment_carries_the_trace_of_its_request(stage: Stage) -> None:
    """Also where another event than the request's arrival places it."""
    stage.scheduler()
    await until(lambda: "acting" in stage.schedulers[0].log)
    parents = [new_trace_parent() for _ in range(3)]
    for number, parent in enumerate(parents):
        trace_parent.set(parent)
        await stage.submit(make_request(f"r{number}"))
    trace_parent.set("")
    worker = await stage.worker("a")
    await until(lambda: len(worker.held) == 3)
    assert dict(zip(worker.held, worker.traces, strict=True)) == {f"r{n}": parent for n, parent in enumerate(parents)}


async def test_what_it_does_is_in_its_metrics(stage: Stage) -> None:
    port = free_port()
    worker = await stage.worker("a", max_requests=1)
    stage.scheduler(metrics_port=port)
    await a_running_request(stage, worker, "r1")
    await stage.submit(make_request("r2"))

    async def shows(*lines: str) -> bool:
        async with httpx.AsyncClient() as client:
            text = (await client.get(f"http://127.0.0.1:{port}/metrics")).text
        return all(f"\n{line}\n" in text for line in lines)

    await until(
        lambda: shows(
            "tediserve_scheduler_open_requests 2.0",
            'tediserve_scheduler_waiting_requests{reason="no_room"} 1.0',
            "tediserve_scheduler_instances 1.0",
            'tediserve_scheduler_placements_total{attempt="1"} 1.0',
            'tediserve_scheduler_commands_total{command="SendAssign",reason="new"} 1.0',
        )
    )


async def test_a_clock_is_warned_about_and_late_messages_are_not(stage: Stage) -> None:
    scheduler = stage.scheduler()

    async def say(instance_id: str, ages_s: list[float]) -> None:
        for age_s in ages_s:
            status = make_status(instance_id, sent_at=time.time() - age_s)
            await stage.bus.publish(subjects.instance_status(instance_id), status)

    async def warned() -> bool:
        await say("late", [0.3, 0.02, -0.06, -0.14, -0.22])  # one is on time, even where all take 0.2 s
        await say("slow", [0.3])
        return "clock of slow differs by -" in scheduler.log

    await until(warned)
    assert "clock of late" not in scheduler.log


async def test_a_wrong_setting_is_refused_with_its_name(stage: Stage) -> None:
    scheduler = stage.scheduler(ageing_s=-1)
    assert await scheduler.exit_code() == 2
    assert "ageing_s: -1.0 is not positive" in scheduler.log


async def test_requests_survive_the_death_of_nats(stage: Stage, nats_server: NatsServer) -> None:
    """The scheduler loses its lease with the server; its successor adopts what runs."""
    worker = await stage.worker("a")
    scheduler = stage.scheduler()
    await a_running_request(stage, worker, "r1")
    nats_server.kill()
    assert await scheduler.exit_code() == 3
    nats_server.start()
    await until(lambda: worker.bus.connected and stage.bus.connected)
    await restarted(scheduler)
    await stage.submit(make_request("after"))
    await until(lambda: "after" in worker.held)
    assert len(worker.assigns) == 2
    await worker.write("r1", "finished", blocks_done=2)
    await until(lambda: stage.is_purged("r1"))
