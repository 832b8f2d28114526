"""The bus, the lease and the writing of records against a real nats-server, which is killed on the way."""

import asyncio
import logging
import time

import nats
import pytest
from prometheus_client import REGISTRY

from contracts import subjects
from contracts.messages import Accepted, Cancel, GatewayStatus, GenerateRequest, ProgressRecord, StatusAsk
from services.bus import Bus, BusTimeout, NatsSettings, NoResponder, SequenceConflict, StreamFull, trace_parent
from services.lease import LEASE_TTL_S, Lease, LeaseLost
from services.progress import Overtaken, subject_of, write_record
from tests.conftest import NatsServer
from tests.integration.stack import until

pytestmark = pytest.mark.integration


def request(number: int) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"r{number}",
        gateway_id="gw",
        model="m",
        prompt_ids=[1],
        max_tokens=8,
        block_size=8,
        cache="dual",
        created_at=0.0,
        expires_at=1.0,
    )


def record(state: str = "running", blocks: int = 1) -> ProgressRecord:
    return ProgressRecord(request_id="r1", gateway_id="gw", attempt=1, state=state, blocks_done=blocks)  # type: ignore[arg-type]


async def store(bus: Bus, number: int) -> int:
    """Stores request `number`, however long the server is away."""
    while True:
        try:
            return await bus.append(subjects.request(f"r{number}"), request(number))
        except BusTimeout:
            await asyncio.sleep(0.05)


def metric(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_an_answer_comes_back_and_where_nobody_listens_it_is_said_at_once(bus: Bus) -> None:
    async def answer(_: StatusAsk) -> Accepted:
        return Accepted()

    await bus.respond("status.ask", StatusAsk, answer)
    assert await bus.request("status.ask", StatusAsk(), Accepted, limit_s=5) == Accepted()
    with pytest.raises(NoResponder):
        await bus.request("sched.drain", StatusAsk(), Accepted, limit_s=5)


async def test_who_does_not_answer_in_time_is_told_of(bus: Bus) -> None:
    async def never(_: StatusAsk) -> Accepted:
        await asyncio.sleep(60)
        return Accepted()

    await bus.respond("status.ask", StatusAsk, never)
    with pytest.raises(BusTimeout, match=r"no answer within 0\.1 s"):
        await bus.request("status.ask", StatusAsk(), Accepted, limit_s=0.1)


async def test_the_trace_travels_with_the_message(bus: Bus) -> None:
    seen: list[str] = []
    await bus.subscribe("cancel.*", Cancel, lambda _: seen.append(trace_parent.get()))
    token = trace_parent.set("00-" + "ab" * 16 + "-" + "cd" * 8 + "-01")
    await bus.publish("cancel.a", Cancel(request_id="a"))
    trace_parent.reset(token)
    await until(lambda: len(seen) == 1, "the message")
    assert seen == ["00-" + "ab" * 16 + "-" + "cd" * 8 + "-01"]


async def test_a_compare_and_set_append_succeeds_for_one_only(bus: Bus) -> None:
    first = await bus.append("prog.gw.r1", record(), after_seq=0)
    with pytest.raises(SequenceConflict):
        await bus.append("prog.gw.r1", record(), after_seq=0)
    second = await bus.append("prog.gw.r1", record(blocks=2), after_seq=first)
    found = await bus.last(subjects.PROGRESS, "prog.*.r1", ProgressRecord)
    assert found is not None
    assert (found.seq, found.message.blocks_done) == (second, 2)


async def test_the_set_of_open_requests_has_a_bound(nats_server: NatsServer) -> None:
    bus = await Bus.connect(NatsSettings(url=nats_server.url, max_open_requests=2), "test")
    await bus.ensure_streams()
    await store(bus, 1)
    await store(bus, 2)
    with pytest.raises(StreamFull):
        await bus.append(subjects.request("r3"), request(3), after_seq=0)
    await bus.purge(subjects.REQUESTS, subjects.request("r1"))
    await bus.append(subjects.request("r3"), request(3), after_seq=0)
    await bus.close()


async def test_a_follower_gets_everything_once_and_in_order_though_the_server_is_killed(
    bus: Bus, nats_server: NatsServer
) -> None:
    seen: list[tuple[str, int]] = []
    for number in range(50):
        await store(bus, number)
    follower = await bus.follow(
        subjects.REQUESTS, "req.*", GenerateRequest, lambda r, seq: seen.append((r.request_id, seq))
    )
    await follower.caught_up(10)
    assert [r for r, _ in seen] == [f"r{n}" for n in range(50)]

    nats_server.kill()
    await until(lambda: not bus.connected, "the cut is noticed")
    assert await bus.publish("cancel.a", Cancel(request_id="a")) is False
    nats_server.start()
    for number in range(50, 100):
        await store(bus, number)
    await until(lambda: len(seen) >= 100, "the follower goes on")
    assert [r for r, _ in seen] == [f"r{n}" for n in range(100)]
    assert [seq for _, seq in seen] == sorted({seq for _, seq in seen})


async def test_an_empty_stream_is_caught_up_with_at_once(bus: Bus) -> None:
    follower = await bus.follow(subjects.PROGRESS, "prog.*.*", ProgressRecord, lambda *_: None)
    await follower.caught_up(5)


async def test_malformed_messages_are_counted_and_logged_once(bus: Bus, caplog: pytest.LogCaptureFixture) -> None:
    seen: list[GatewayStatus] = []
    raw = await nats.connect(bus._settings.url)
    await bus.subscribe("status.gateway.*", GatewayStatus, seen.append)
    before = metric("tediserve_bus_malformed_messages_total", subject="status.gateway.*")
    with caplog.at_level(logging.WARNING):
        for number in range(20):
            await raw.publish(f"status.gateway.g{number}", b"\xc1")
        await raw.flush()
        await bus.publish("status.gateway.g", GatewayStatus(gateway_id="g", sent_at=1.0))
        await until(lambda: len(seen) == 1, "the well-formed one")
    await raw.close()
    assert metric("tediserve_bus_malformed_messages_total", subject="status.gateway.*") == before + 20
    assert [r.message for r in caplog.records if "malformed" in r.message] == [
        "malformed message on status.gateway.g0 ignored (logged once): MessagePack data is malformed: "
        r"invalid opcode '\xc1' (byte 0)"
    ]


async def test_a_message_on_the_subject_of_another_is_malformed_too(bus: Bus) -> None:
    seen: list[str] = []
    malformed: list[tuple[str, int]] = []
    await bus.append("req.r1", request(2))
    follower = await bus.follow(
        subjects.REQUESTS,
        "req.*",
        GenerateRequest,
        lambda r, _: seen.append(r.request_id),
        on_malformed=lambda subject, seq: malformed.append((subject, seq)),
        subject_of=lambda r: subjects.request(r.request_id),
    )
    await follower.caught_up(10)
    assert (seen, malformed) == ([], [("req.r1", 1)])


async def test_a_record_whose_acknowledgement_was_lost_is_recognised(bus: Bus) -> None:
    seq = await write_record(bus, record(), after_seq=0, limit_s=5)
    assert await write_record(bus, record(), after_seq=0, limit_s=5) == seq


async def test_a_record_that_another_overtook_is_refused_with_what_stands(bus: Bus) -> None:
    standing = record("cancelled")
    seq = await bus.append(subject_of(standing), standing, after_seq=0)
    with pytest.raises(Overtaken) as overtaken:
        await write_record(bus, record(blocks=2), after_seq=0, limit_s=5)
    assert overtaken.value.found == (standing, seq)


async def test_a_record_is_stored_once_the_server_is_back(bus: Bus, nats_server: NatsServer) -> None:
    nats_server.kill()
    writing = asyncio.create_task(write_record(bus, record(), after_seq=0, limit_s=30))
    await until(lambda: not bus.connected, "the cut is noticed")
    nats_server.start()
    assert await asyncio.wait_for(writing, 30) == 1


async def test_one_scheduler_holds_the_lease_and_the_next_has_a_higher_epoch(bus: Bus) -> None:
    first, second = Lease(bus, "a"), Lease(bus, "b")
    epoch = await asyncio.wait_for(first.acquire(), 10)
    keeping = asyncio.create_task(first.keep())
    standing_by = asyncio.create_task(second.acquire())
    done, _ = await asyncio.wait({standing_by, keeping}, timeout=3 * LEASE_TTL_S)
    assert not done
    keeping.cancel()
    stopped_at = time.monotonic()
    assert await asyncio.wait_for(standing_by, 10) > epoch
    assert time.monotonic() - stopped_at < 5


async def test_a_lease_that_is_given_up_is_free_at_once(bus: Bus) -> None:
    first = Lease(bus, "a")
    epoch = await first.acquire()
    await first.give_up()
    assert await asyncio.wait_for(Lease(bus, "b").acquire(), 10) > epoch


async def test_a_lease_that_cannot_be_renewed_is_lost(bus: Bus, nats_server: NatsServer) -> None:
    lease = Lease(bus, "a")
    await lease.acquire()
    keeping = asyncio.create_task(lease.keep())
    nats_server.kill()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 10)


async def test_without_a_server_connecting_fails_within_its_limit() -> None:
    with pytest.raises(BusTimeout, match=r"no NATS at nats://127\.0\.0\.1:1 within 0\.5 s"):
        await Bus.connect(NatsSettings(url="nats://127.0.0.1:1", connect_limit_s=0.5), "test")
