"""The bus, the lease and the writing of records on a real nats-server, which is killed where it hurts."""

import asyncio
import gc
import logging
import signal
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
import pytest
import pytest_asyncio
from prometheus_client import REGISTRY

from contracts import codec, subjects
from contracts import messages as m
from services import bus as bus_module
from services.bus import Bus, BusTimeout, NatsSettings, NoResponder, SequenceConflict, StreamFull, trace_parent
from services.lease import LEASE_TTL_S, Lease, LeaseLost
from services.progress import Overtaken, subject_of, write_record
from tests.builders import make_record, make_request
from tests.conftest import NatsServer
from tests.waiting import until

pytestmark = pytest.mark.integration


@pytest_asyncio.fixture
async def other(nats_server: NatsServer, bus: Bus) -> AsyncIterator[Bus]:
    """A second connection."""
    connected = await Bus.connect(NatsSettings(url=nats_server.url), "other")
    yield connected
    await asyncio.wait_for(connected.close(), 10)


async def fill(bus: Bus, first: int, last: int) -> None:
    for number in range(first, last):
        await bus.append(subjects.request(f"r{number}"), make_request(f"r{number}"), after_seq=0)


class Heard:
    """A handler of `follow` that remembers."""

    def __init__(self) -> None:
        self.ids: list[str] = []
        self.seqs: list[int] = []

    def __call__(self, request: m.GenerateRequest, seq: int) -> None:
        self.ids.append(request.request_id)
        self.seqs.append(seq)


async def follow_requests(
    bus: Bus, heard: Callable[[m.GenerateRequest, int], None], **more: Any
) -> bus_module.Follower:
    return await bus.follow(subjects.REQUESTS, "req.*", m.GenerateRequest, heard, **more)


def count_of(counter: Any, *labels: str) -> float:
    return float((counter.labels(*labels) if labels else counter)._value.get())


# --- ephemeral ----------------------------------------------------------------------------------------------------


async def test_a_published_message_is_heard_with_its_trace(bus: Bus, other: Bus) -> None:
    heard: list[tuple[m.GatewayStatus, str]] = []
    await other.subscribe("status.gateway.*", m.GatewayStatus, lambda msg: heard.append((msg, trace_parent.get())))
    await other.flush()
    message = m.GatewayStatus(gateway_id="gw", sent_at=1.0)
    parent = bus_module.new_trace_parent()
    trace_parent.set(parent)
    assert await bus.publish(subjects.gateway_status("gw"), message)
    await until(lambda: heard)
    assert heard == [(message, parent)]


async def test_a_request_gets_its_answer(bus: Bus, other: Bus) -> None:
    async def answer(notice: m.DrainNotice) -> m.Refused:
        return m.Refused(reason="not_held", detail=notice.instance_id)

    await other.respond(subjects.DRAIN, m.DrainNotice, answer)
    await other.flush()
    reply: Any = await bus.request(
        subjects.DRAIN,
        m.DrainNotice(instance_id="a"),
        m.Accepted | m.Refused,  # type: ignore[arg-type]
        limit_s=2.0,
    )
    assert reply == m.Refused(reason="not_held", detail="a")


async def test_without_a_listener_a_request_says_so_at_once(bus: Bus) -> None:
    started = time.monotonic()
    with pytest.raises(NoResponder):
        await bus.request(subjects.DRAIN, m.DrainNotice(instance_id="a"), m.Accepted, limit_s=5.0)
    assert time.monotonic() - started < 2


async def test_after_a_flush_the_server_knows_the_subscription(bus: Bus, other: Bus) -> None:
    async def accept(_: m.DrainNotice) -> m.Accepted:
        return m.Accepted()

    for number in range(100):
        subject = subjects.assign(f"i{number}")
        await other.respond(subject, m.DrainNotice, accept)
        await other.flush()
        await bus.request(subject, m.DrainNotice(instance_id="a"), m.Accepted, limit_s=5.0)


async def test_without_an_answer_a_request_ends_at_its_limit(bus: Bus, other: Bus) -> None:
    async def never(_: m.DrainNotice) -> m.Accepted:
        await asyncio.sleep(3600)
        return m.Accepted()

    await other.respond(subjects.DRAIN, m.DrainNotice, never)
    await other.flush()
    with pytest.raises(BusTimeout):
        await bus.request(subjects.DRAIN, m.DrainNotice(instance_id="a"), m.Accepted, limit_s=0.2)


async def test_a_reply_that_is_no_reply_is_malformed(bus: Bus, other: Bus) -> None:
    async def nonsense(_: m.DrainNotice) -> list[int]:
        return [1]

    await other.respond(subjects.DRAIN, m.DrainNotice, nonsense)
    await other.flush()
    with pytest.raises(codec.MalformedMessage):
        await bus.request(subjects.DRAIN, m.DrainNotice(instance_id="a"), m.Accepted, limit_s=2.0)


async def test_malformed_messages_are_counted_and_logged_once(
    bus: Bus, other: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[m.GatewayStatus] = []
    await other.subscribe("status.gateway.*", m.GatewayStatus, heard.append)
    await other.flush()
    before = count_of(bus_module.MALFORMED, "status.gateway.*")
    for garbage in ("text", 7, {"type": "GatewayStatus"}, m.DrainNotice(instance_id="a")):
        await bus.publish("status.gateway.gw", garbage)
    await bus._client.publish("status.gateway.gw", b"\xc1")
    good = m.GatewayStatus(gateway_id="gw", sent_at=1.0)
    await bus.publish("status.gateway.gw", good)
    await until(lambda: heard)
    assert heard == [good]
    assert count_of(bus_module.MALFORMED, "status.gateway.*") == before + 5
    assert sum("malformed" in message for message in caplog.messages) == 1


async def test_a_handler_that_fails_is_logged_and_hears_the_next(
    bus: Bus, other: Bus, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[float] = []

    def handler(status: m.GatewayStatus) -> None:
        heard.append(status.sent_at)
        if status.sent_at == 1.0:
            raise KeyError("a bug")

    await other.subscribe("status.gateway.*", m.GatewayStatus, handler)
    await other.flush()
    for sent_at in (1.0, 2.0):
        await bus.publish("status.gateway.gw", m.GatewayStatus(gateway_id="gw", sent_at=sent_at))
    await until(lambda: heard == [1.0, 2.0])
    assert "error in a handler" in caplog.messages


async def test_a_subscriber_that_lags_loses_messages_which_is_counted(
    bus: Bus, other: Bus, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(bus_module, "_PENDING_MESSAGES", 5)
    before = count_of(bus_module.SLOW, "status.gateway.*")
    heard: list[m.GatewayStatus] = []
    await other.subscribe("status.gateway.*", m.GatewayStatus, heard.append)
    await other.flush()
    await asyncio.gather(
        *(bus.publish("status.gateway.gw", m.GatewayStatus(gateway_id="gw", sent_at=n)) for n in range(500))
    )
    await bus.flush()
    await until(lambda: count_of(bus_module.SLOW, "status.gateway.*") > before)
    assert len(heard) < 500
    assert any("slow consumer" in message for message in caplog.messages)


async def test_after_the_servers_death_everything_works_again(nats_server: NatsServer, bus: Bus, other: Bus) -> None:
    heard: list[m.GatewayStatus] = []
    reconnected: list[bool] = []
    bus.on_reconnected(lambda: reconnected.append(bus.connected))
    await other.subscribe("status.gateway.*", m.GatewayStatus, heard.append)
    await other.flush()
    message = m.GatewayStatus(gateway_id="gw", sent_at=1.0)
    nats_server.kill()
    await until(lambda: not bus.connected and not other.connected)
    assert not await bus.publish("status.gateway.gw", message)
    nats_server.start()
    await until(lambda: bus.connected and other.connected)

    async def comes_through() -> bool:
        await bus.publish("status.gateway.gw", message)
        return bool(heard)

    await until(comes_through)
    assert reconnected == [True]


async def test_closing_without_a_server_takes_no_time_and_raises_nothing(nats_server: NatsServer) -> None:
    bus = await Bus.connect(NatsSettings(url=nats_server.url), "short")
    nats_server.kill()
    await asyncio.wait_for(bus.close(), 7)
    with pytest.raises(BusTimeout):
        await Bus.connect(NatsSettings(url=nats_server.url, connect_limit_s=0.5), "late")


# --- durable ------------------------------------------------------------------------------------------------------


async def test_a_write_that_continues_from_another_message_is_refused(bus: Bus) -> None:
    subject = subjects.request("r1")
    first = await bus.append(subject, make_request("r1"), after_seq=0)
    with pytest.raises(SequenceConflict):
        await bus.append(subject, make_request("r1"), after_seq=0)
    with pytest.raises(SequenceConflict):
        await bus.append(subject, make_request("r1"), after_seq=first + 1)
    second = await bus.append(subject, make_request("r1"), after_seq=first)
    assert second > first
    found = await bus.last(subjects.REQUESTS, subject, m.GenerateRequest)
    assert found is not None
    assert found.seq == second


async def test_of_two_writers_one_wins(bus: Bus, other: Bus) -> None:
    subject = subjects.request("r1")
    results = await asyncio.gather(
        *(b.append(subject, make_request("r1"), after_seq=0) for b in (bus, other) for _ in range(5)),
        return_exceptions=True,
    )
    assert sum(isinstance(result, int) for result in results) == 1
    assert sum(isinstance(result, SequenceConflict) for result in results) == 9


async def test_a_full_stream_refuses_until_there_is_room(nats_server: NatsServer) -> None:
    bus = await Bus.connect(NatsSettings(url=nats_server.url, max_open_requests=3), "small")
    await bus.ensure_streams()
    await fill(bus, 0, 3)
    with pytest.raises(StreamFull):
        await fill(bus, 3, 4)
    await bus.purge(subjects.REQUESTS, subjects.request("r1"))
    await fill(bus, 3, 4)
    assert await bus.last(subjects.REQUESTS, subjects.request("r1"), m.GenerateRequest) is None
    await bus.close()


async def test_all_below_a_sequence_go_at_once(bus: Bus) -> None:
    await fill(bus, 0, 5)
    found = await bus.last(subjects.REQUESTS, subjects.request("r3"), m.GenerateRequest)
    assert found is not None
    await bus.purge_below(subjects.REQUESTS, found.seq)
    assert await bus.stored_subjects(subjects.REQUESTS, "req.*") == ["req.r3", "req.r4"]


async def test_another_bound_is_applied_to_the_stream_that_exists(nats_server: NatsServer, bus: Bus) -> None:
    await fill(bus, 0, 2)
    smaller = await Bus.connect(NatsSettings(url=nats_server.url, max_open_requests=2), "smaller")
    await smaller.ensure_streams()
    with pytest.raises(StreamFull):
        await fill(smaller, 2, 3)
    await smaller.close()


async def test_nothing_stored_is_found_as_none_and_garbage_as_malformed(bus: Bus) -> None:
    assert await bus.last(subjects.PROGRESS, "prog.*.r1", m.ProgressRecord) is None
    await bus.append("prog.gw.r1", "garbage")
    with pytest.raises(codec.MalformedMessage):
        await bus.last(subjects.PROGRESS, "prog.*.r1", m.ProgressRecord)


async def test_what_was_stored_is_heard_in_order_then_what_comes(bus: Bus, other: Bus) -> None:
    await fill(other, 0, 50)
    await bus.purge(subjects.REQUESTS, subjects.request("r7"))
    heard = Heard()
    follower = await follow_requests(bus, heard)
    await follower.caught_up(10)
    expected = [f"r{n}" for n in range(50) if n != 7]
    assert heard.ids == expected
    await fill(other, 50, 60)
    await until(lambda: len(heard.ids) == 59)
    assert heard.ids == expected + [f"r{n}" for n in range(50, 60)]
    assert heard.seqs == sorted(set(heard.seqs))
    await follower.stop()
    await fill(other, 60, 61)
    await bus.flush()
    assert len(heard.ids) == 59


async def test_on_an_empty_stream_a_follower_has_caught_up(bus: Bus) -> None:
    follower = await follow_requests(bus, Heard())
    await follower.caught_up(5)


async def test_a_follower_of_one_gateway_hears_only_its_records(bus: Bus) -> None:
    heard: list[str] = []
    for gateway_id in ("gw-1", "gw-2"):
        await bus.append(subjects.progress(gateway_id, "r1"), make_record(gateway_id=gateway_id))
    follower = await bus.follow(
        subjects.PROGRESS,
        subjects.progress_of_gateway("gw-1"),
        m.ProgressRecord,
        lambda record, seq: heard.append(record.gateway_id),
    )
    await follower.caught_up(5)
    assert heard == ["gw-1"]


async def test_malformed_stored_messages_are_told_by_subject_and_do_not_stop_the_rest(bus: Bus) -> None:
    await bus.append("req.garbage", "garbage")
    await bus.append("req.elsewhere", make_request("r1"))  # a good message on a wrong subject
    await fill(bus, 2, 3)
    await bus.append("req.last", [1, 2])
    heard, malformed = Heard(), []
    follower = await follow_requests(
        bus,
        heard,
        on_malformed=lambda subject, seq: malformed.append((subject, seq)),
        subject_of=lambda request: subjects.request(request.request_id),
    )
    await follower.caught_up(5)
    assert heard.ids == ["r2"]
    assert malformed == [("req.garbage", 1), ("req.elsewhere", 2), ("req.last", 4)]


async def test_a_follower_goes_on_through_server_deaths_without_loss_or_repeats(
    nats_server: NatsServer, bus: Bus, other: Bus
) -> None:
    heard = Heard()
    await fill(other, 0, 20)
    follower = await follow_requests(bus, heard)
    await follower.caught_up(10)
    for round_ in (1, 2):
        nats_server.kill()
        nats_server.start()
        await until(lambda: other.connected)
        await append_all(other, 20 * round_, 20 * round_ + 20)  # some before the follower is back
        await until(lambda round_=round_: len(heard.ids) == 20 * round_ + 20, limit_s=30)
    assert heard.ids == [f"r{n}" for n in range(60)]


async def append_all(bus: Bus, first: int, last: int) -> None:
    """As a gateway does: again, where no answer came; already there is good."""
    for number in range(first, last):
        while True:
            try:
                await fill(bus, number, number + 1)
            except BusTimeout:
                continue
            except SequenceConflict:
                pass
            break


async def test_a_follower_reads_thousands_at_once(bus: Bus, other: Bus) -> None:
    """More than core subscriptions hold back; nothing of it is dropped."""
    for first in range(0, 3000, 100):
        await asyncio.gather(*(fill(other, n, n + 1) for n in range(first, first + 100)))
    heard = Heard()
    follower = await follow_requests(bus, heard)
    await follower.caught_up(30)
    assert len(set(heard.ids)) == len(heard.ids) == 3000
    assert heard.seqs == sorted(heard.seqs)


async def test_streams_keep_what_they_hold_when_a_service_starts_again(nats_server: NatsServer, bus: Bus) -> None:
    await fill(bus, 0, 3)
    nats_server.kill()
    nats_server.start()
    again = await Bus.connect(NatsSettings(url=nats_server.url), "again")
    await again.ensure_streams()
    heard = Heard()
    await (await follow_requests(again, heard)).caught_up(10)
    assert heard.ids == ["r0", "r1", "r2"]
    await again.close()


# --- records ------------------------------------------------------------------------------------------------------


async def test_a_record_is_written_after_the_one_it_continues_from(bus: Bus) -> None:
    first = await write_record(bus, make_record(), after_seq=0, limit_s=2.0)
    second = await write_record(bus, make_record(state="finished"), after_seq=first, limit_s=2.0)
    assert second > first


async def test_a_record_overtaken_by_anothers_shows_that_one(bus: Bus) -> None:
    theirs = make_record(holder="b")
    seq = await write_record(bus, theirs, after_seq=0, limit_s=2.0)
    with pytest.raises(Overtaken) as overtaken:
        await write_record(bus, make_record(), after_seq=0, limit_s=2.0)
    assert overtaken.value.found == (theirs, seq)


async def test_a_record_whose_acknowledgement_was_lost_is_found_to_stand(bus: Bus) -> None:
    ours = make_record(blocks_done=1)
    seq = await write_record(bus, ours, after_seq=0, limit_s=2.0)
    assert await write_record(bus, ours, after_seq=0, limit_s=2.0) == seq


async def test_a_record_overtaken_by_garbage_or_by_nothing_shows_none(bus: Bus) -> None:
    seq = await bus.append(subject_of(make_record()), "garbage")
    with pytest.raises(Overtaken) as overtaken:
        await write_record(bus, make_record(), after_seq=0, limit_s=2.0)
    assert overtaken.value.found is None
    await bus.purge(subjects.PROGRESS, subject_of(make_record()))
    with pytest.raises(Overtaken) as overtaken:
        await write_record(bus, make_record(), after_seq=seq, limit_s=2.0)
    assert overtaken.value.found is None


async def test_a_record_is_written_once_the_server_is_back(nats_server: NatsServer, bus: Bus) -> None:
    seq = await write_record(bus, make_record(), after_seq=0, limit_s=2.0)
    nats_server.kill()
    writing = asyncio.create_task(write_record(bus, make_record(blocks_done=1), after_seq=seq, limit_s=30.0))
    await until(lambda: not bus.connected)
    nats_server.start()
    assert await writing > seq
    found = await bus.last(subjects.PROGRESS, "prog.*.r1", m.ProgressRecord)
    assert found is not None
    assert found.message.blocks_done == 1


async def test_without_a_server_a_record_is_given_up_at_the_limit(nats_server: NatsServer, bus: Bus) -> None:
    nats_server.kill()
    started = time.monotonic()
    with pytest.raises(BusTimeout):
        await write_record(bus, make_record(), after_seq=0, limit_s=0.5)
    assert time.monotonic() - started < 1.9, "a try waits no longer than the limit"


# --- the lease ----------------------------------------------------------------------------------------------------


async def test_of_two_one_holds_the_lease_until_it_gives_up(bus: Bus, other: Bus) -> None:
    first, second = Lease(bus, "first"), Lease(other, "second")
    epoch = await first.acquire()
    keeping = asyncio.create_task(first.keep())
    waiting = asyncio.create_task(second.acquire())
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(asyncio.shield(waiting), 2 * LEASE_TTL_S + 0.5)
    assert not keeping.done()
    keeping.cancel()
    await first.give_up()
    assert await asyncio.wait_for(waiting, 5) > epoch


async def test_a_holder_that_does_not_renew_is_followed_by_another(bus: Bus, other: Bus) -> None:
    epoch = await Lease(bus, "first").acquire()
    acquired_at = time.monotonic()
    assert await asyncio.wait_for(Lease(other, "second").acquire(), 10) > epoch
    assert time.monotonic() - acquired_at > LEASE_TTL_S - 0.2  # not before its time


async def test_a_holder_that_was_replaced_notices(bus: Bus, other: Bus) -> None:
    first = Lease(bus, "first")
    await first.acquire()
    await Lease(other, "second").acquire()  # once the first has expired
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(first.keep(), 5)


async def test_a_renewal_whose_acknowledgement_is_lost_keeps_the_lease(
    bus: Bus, other: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    lease, append, calls = Lease(bus, "first"), bus.append, 0

    async def lose_the_first_answer(*args: Any, **options: Any) -> int:
        nonlocal calls
        calls += 1
        seq = await append(*args, **options)
        if calls == 1:
            raise BusTimeout("lost")
        return seq

    epoch = await lease.acquire()
    monkeypatch.setattr(bus, "append", lose_the_first_answer)
    keeping = asyncio.create_task(lease.keep())
    standing_by = asyncio.create_task(Lease(other, "second").acquire())
    await until(lambda: calls >= 6, limit_s=10)  # well past the time to live
    assert not keeping.done()
    assert not standing_by.done()
    assert lease.epoch == epoch
    keeping.cancel()
    standing_by.cancel()


async def test_a_holder_without_a_server_has_lost_the_lease_in_time(nats_server: NatsServer, bus: Bus) -> None:
    def told() -> float | None:
        return REGISTRY.get_sample_value("tediserve_lease_held", {"lease": subjects.LEASE_KEY})

    lease = Lease(bus, "first")
    assert told() == 0
    await lease.acquire()
    assert told() == 1
    keeping = asyncio.create_task(lease.keep())
    nats_server.kill()
    started = time.monotonic()
    with pytest.raises(LeaseLost):
        await asyncio.wait_for(keeping, 10)
    assert time.monotonic() - started < LEASE_TTL_S + 1.0
    assert told() == 0


async def test_standing_by_goes_on_through_a_server_death(nats_server: NatsServer, bus: Bus, other: Bus) -> None:
    await Lease(bus, "first").acquire()
    waiting = asyncio.create_task(Lease(other, "second").acquire())
    nats_server.kill()
    nats_server.start()
    assert await asyncio.wait_for(waiting, 20) > 1


# --- settings -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "value"),
    [("storage", "tape"), ("replicas", 2), ("max_open_requests", 0)],
    ids=["storage", "replicas", "bound"],
)
def test_a_wrong_setting_is_refused_with_its_name(key: str, value: object) -> None:
    with pytest.raises((ValueError, msgspec.ValidationError), match=key):
        NatsSettings(**{key: value})


async def test_streams_kept_in_memory_are_gone_with_the_server(nats_server: NatsServer) -> None:
    bus = await Bus.connect(NatsSettings(url=nats_server.url, storage="memory"), "test")
    await bus.ensure_streams()
    await fill(bus, 0, 1)
    nats_server.kill()
    await until(lambda: not bus.connected)
    nats_server.start()
    await until(lambda: bus.connected)
    await bus.ensure_streams()
    assert await bus.last(subjects.REQUESTS, "req.*", m.GenerateRequest) is None
    await bus.close()


async def test_why_a_stream_cannot_be_made_is_said_once(
    nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    bus = await Bus.connect(NatsSettings(url=nats_server.url, replicas=3, connect_limit_s=1.0), "test")
    with caplog.at_level(logging.WARNING), pytest.raises(BusTimeout, match="no streams within 1 s"):
        await bus.ensure_streams()
    assert [r.message for r in caplog.records if "cannot be made" in r.message] == [
        "stream REQUESTS cannot be made: replicas > 1 not supported in non-clustered mode"
    ]
    await bus.close()


async def test_closing_at_once_does_not_wait_for_a_server_that_stands_still(nats_server: NatsServer) -> None:
    complaints: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
    bus = await Bus.connect(NatsSettings(url=nats_server.url), "test")
    await bus.ensure_streams()
    await bus.subscribe("status.gateway.*", m.GatewayStatus, lambda _: None)
    await follow_requests(bus, Heard())
    assert nats_server.process is not None
    nats_server.process.send_signal(signal.SIGSTOP)
    await bus.publish(subjects.gateway_status("gw"), m.GatewayStatus(gateway_id="gw", sent_at=1.0))
    started = time.monotonic()
    await bus.close(drain=False)
    assert time.monotonic() - started < 2
    assert not bus.connected
    gc.collect()
    await asyncio.sleep(0)
    assert complaints == [], "what was never retrieved is told to the loop"
