"""The gateway over HTTP and a real nats-server; scheduler and worker are played by script."""

import asyncio
import contextlib
import json
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from contracts import subjects
from contracts.messages import GatewayStatus, GenerateRequest, Reason, StatusAsk
from services.bus import NatsSettings
from services.gateway.config import GatewayConfig
from services.gateway.http import build_app
from services.progress import write_record
from tests.builders import make_record
from tests.conftest import NatsServer
from tests.integration.gateway_rig import MODEL, Play, Rig, run_gateway, run_rig
from tests.waiting import until

pytestmark = pytest.mark.integration

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say it"}]}
TEXT = {"model": MODEL, "prompt": "say it"}

StartRig = Callable[..., Awaitable[Rig]]


@pytest_asyncio.fixture
async def start(nats_server: NatsServer, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[StartRig]:
    """Starts the rig with settings of the test's own. No handler may have raised by the test's end."""
    async with AsyncExitStack() as stack:

        async def start_rig(**settings: Any) -> Rig:
            return await stack.enter_async_context(run_rig(nats_server.url, tmp_path / "profile", **settings))

        yield start_rig
    assert "Traceback" not in caplog.text


@pytest_asyncio.fixture
async def rig(start: StartRig) -> Rig:
    return await start()


@pytest_asyncio.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=30) as client:
        yield client


def says(rig: Rig, text: str, **how: Any) -> None:
    """From now on the worker answers so."""
    ids = rig.ids(text)
    rig.cluster.script = lambda request: Play(ids, **how)


def events_of(body: str) -> list[Any]:
    """The stream's events: chunks, "[DONE]", pings as None. Fails on anything that is no well-formed event."""
    assert body.endswith("\n\n")
    events: list[Any] = []
    for block in body[:-2].split("\n\n"):
        assert "\n" not in block
        if block == ": ping":
            events.append(None)
            continue
        assert block.startswith("data: ")
        data = block.removeprefix("data: ")
        events.append(data if data == "[DONE]" else json.loads(data))
    return events


async def stream(client: httpx.AsyncClient, rig: Rig, **fields: Any) -> list[Any]:
    response = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "stream": True, **fields})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    return events_of(response.text)


def contents(events: list[Any], choice: int = 0) -> list[str]:
    parts = [c for e in events if isinstance(e, dict) for c in e["choices"] if c["index"] == choice]
    return [part["delta"]["content"] for part in parts if part["delta"].get("content")]


def request_id_of(events: list[Any]) -> str:
    request_id: str = events[0]["id"].removeprefix("chatcmpl-")
    return request_id


def check_error(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    return error


# --- shapes ------------------------------------------------------------------------------------------------------


async def test_a_stream_has_openais_shape(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefghijklmnopqrst", block_s=0.05)
    events = await stream(client, rig)
    *chunks, done = events
    assert done == "[DONE]"
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert contents(chunks) == ["abcdefgh", "ijklmnop", "qrst"]
    for chunk in chunks:
        assert chunk["object"] == "chat.completion.chunk"
        assert (chunk["id"], chunk["created"], chunk["model"]) == (chunks[0]["id"], chunks[0]["created"], MODEL)
        assert "usage" not in chunk
        assert "finish_reason" in chunk["choices"][0]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert chunks[-1]["choices"][0]["delta"] == {}
    assert [("tediserve" in c) for c in chunks] == [False] * (len(chunks) - 1) + [True]


async def test_usage_comes_once_in_a_last_chunk_without_choices(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefghijkl")
    *chunks, last, done = await stream(client, rig, stream_options={"include_usage": True})
    assert done == "[DONE]"
    assert last["choices"] == []
    prompt_tokens = len(rig.cluster.seen[request_id_of(chunks)].prompt_ids)
    assert last["usage"] == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 12,
        "total_tokens": prompt_tokens + 12,
    }
    assert all(chunk["usage"] is None for chunk in chunks)
    assert last["tediserve"]["steps"] == 8
    assert all("tediserve" not in chunk for chunk in chunks)


async def test_a_whole_answer_has_openais_shape(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "hello world", finish="length")
    response = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "slo_ms": 60_000})
    answer = response.json()
    assert answer["object"] == "chat.completion"
    assert answer["id"].startswith("chatcmpl-")
    assert answer["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "hello world", "refusal": None},
            "logprobs": None,
            "finish_reason": "length",
        }
    ]
    assert answer["usage"]["completion_tokens"] == 2
    extra = answer["tediserve"]
    assert (extra["deadline_met"], extra["steps"], extra["mean_threshold"], extra["moves"]) == (True, 4, 0.8, 0)
    assert 0 <= extra["queue_ms"] <= extra["total_ms"] < 10_000
    assert extra["attempts"] == 1


async def test_choices_and_prompts_are_told_apart(rig: Rig, client: httpx.AsyncClient) -> None:
    rig.cluster.script = lambda request: Play(rig.ids(f"{len(request.prompt_ids)}"))
    body = {**TEXT, "prompt": ["a", "bb", "ccc"], "n": 2}
    answer = (await client.post(rig.url + "/v1/completions", json=body)).json()
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert [(c["index"], c["text"]) for c in answer["choices"]] == [(i, str(i // 2 + 1)) for i in range(6)]
    assert answer["usage"] == {"prompt_tokens": 6, "completion_tokens": 6, "total_tokens": 12}


async def test_completions_stream_text(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefghij", block_s=0.05)
    response = await client.post(rig.url + "/v1/completions", json={**TEXT, "stream": True, "logprobs": 1})
    *chunks, done = events_of(response.text)
    assert done == "[DONE]"
    assert [c["choices"][0]["text"] for c in chunks] == ["abcdefgh", "ij", ""]
    assert [c["choices"][0]["finish_reason"] for c in chunks] == [None, None, "stop"]
    logprobs = [c["choices"][0]["logprobs"] for c in chunks[:2]]
    assert [token for entry in logprobs for token in entry["tokens"]] == list("abcdefghij")
    assert logprobs[1]["text_offset"] == [8, 9]
    assert logprobs[1]["top_logprobs"] == [
        {"i": pytest.approx(-0.6931, abs=1e-4)},
        {"j": pytest.approx(-0.6931, abs=1e-4)},
    ]


async def test_logprobs_of_a_chat_are_the_confidences_at_commit(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "a é")
    body = {**CHAT, "logprobs": True, "top_logprobs": 1}
    entries = (await client.post(rig.url + "/v1/chat/completions", json=body)).json()["choices"][0]["logprobs"][
        "content"
    ]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"a", b" ", b"\xc3", b"\xa9"]
    for entry in entries:
        assert entry["logprob"] == pytest.approx(-0.6931, abs=1e-4)
        assert [top["token"] for top in entry["top_logprobs"]] == [entry["token"]]


async def test_max_tokens_reaches_the_worker_exactly(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefghijklmnop", finish="length")
    answer = (await client.post(rig.url + "/v1/completions", json={**TEXT, "max_tokens": 11})).json()
    assert answer["choices"][0]["text"] == "abcdefghijk"
    assert answer["usage"]["completion_tokens"] == 11
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_characters_that_straddle_blocks_arrive_whole(rig: Rig, client: httpx.AsyncClient) -> None:
    text = "7 byte😀 and näïve ﷽ ✓✓✓✓"
    says(rig, text, block_s=0.01)
    pieces = contents(await stream(client, rig))
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


# --- stop strings ------------------------------------------------------------------------------------------------


async def test_no_part_of_a_stop_string_leaks_and_the_rest_is_cancelled(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefSTOPghijklmnopqrstuvwxyz", block_s=0.05, forever=True)
    events = await stream(client, rig, stop=["STOP", "zzz"])
    assert "".join(contents(events)) == "abcdef"
    assert events[-2]["choices"][0]["finish_reason"] == "stop"
    request_id = request_id_of(events)
    await until(lambda: request_id in rig.cluster.final and request_id in rig.cluster.cancelled_at)
    record = rig.cluster.final[request_id]
    assert (record.state, record.reason) == ("cancelled", "stop_string")


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_stop_string_in_one_choice_leaves_the_other_running(
    rig: Rig, client: httpx.AsyncClient, streamed: bool
) -> None:
    ids = [rig.ids("ab#cdefghijkl"), rig.ids("hello world")]
    rig.cluster.script = lambda request: Play(ids[request.request_id.endswith("-1")], block_s=0.02)
    if streamed:
        events = await stream(client, rig, n=2, stop="#")
        texts = ["".join(contents(events, choice)) for choice in (0, 1)]
        finishes = [c["finish_reason"] for e in events[:-1] for c in e["choices"] if c["finish_reason"]]
        assert finishes == ["stop", "stop"]
    else:
        answer = (await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "n": 2, "stop": "#"})).json()
        texts = [choice["message"]["content"] for choice in answer["choices"]]
    assert texts == ["ab", "hello world"]


# --- failures ----------------------------------------------------------------------------------------------------

FAILURES = [
    ("worker_lost", 500, "worker_lost", "false"),
    ("engine_error", 500, "engine_error", "false"),
    ("too_long", 400, "context_length_exceeded", None),
    ("unknown_model", 400, "model_not_found", None),
    ("expired", 504, "expired", "false"),
]


@pytest.mark.parametrize(("reason", "status", "code", "retry"), FAILURES)
async def test_a_failed_request_is_an_error(
    rig: Rig, client: httpx.AsyncClient, reason: Any, status: int, code: str, retry: str | None
) -> None:
    says(rig, "hello", fail=reason)
    response = await client.post(rig.url + "/v1/chat/completions", json=CHAT)
    assert check_error(response, status)["code"] == code
    assert response.headers.get("x-should-retry") == retry


async def test_a_stream_that_fails_ends_with_an_error_and_without_done(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefghijkl", block_s=0.05, fail="worker_lost")
    events = await stream(client, rig)
    assert contents(events[:-1])[0] == "abcdefgh"
    assert events[-1]["error"]["code"] == "worker_lost"
    assert "[DONE]" not in events
    assert all(c["finish_reason"] is None for e in events[:-1] for c in e["choices"])


async def test_one_choice_that_fails_fails_the_call_and_cancels_the_other(rig: Rig, client: httpx.AsyncClient) -> None:
    def script(request: GenerateRequest) -> Play:
        if request.request_id.endswith("-1"):
            return Play(rig.ids("ab"), fail="engine_error", block_s=0.05)
        return Play(rig.ids("abcdefghijklmnop"), forever=True)

    rig.cluster.script = script
    check_error(await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "n": 2}), 500)
    await until(lambda: len(rig.cluster.final) == 2)
    assert {record.reason for record in rig.cluster.final.values()} == {"engine_error", "sibling_failed"}


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_request_past_its_time_limit_is_cancelled(
    start: StartRig, client: httpx.AsyncClient, streamed: bool
) -> None:
    rig = await start(time_limit_s=0.5)
    says(rig, "abcdefgh", forever=True)
    response = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "stream": streamed})
    if streamed:
        *_, last = events_of(response.text)
        assert last["error"]["code"] == "expired"
    else:
        assert check_error(response, 504)["code"] == "expired"
    await until(lambda: rig.cluster.final)
    (record,) = rig.cluster.final.values()
    assert (record.state, record.reason) == ("cancelled", "expired")


async def test_a_stream_with_nothing_to_say_pings(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start(ping_every_s=0.1)
    says(rig, "hello", block_s=0.5)
    events = await stream(client, rig)
    assert events.count(None) >= 3
    assert contents([e for e in events if e]) == ["hello"]


# --- admission ---------------------------------------------------------------------------------------------------


async def test_a_full_queue_is_429_and_leaves_nothing_behind(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start(nats={"max_open_requests": 3})
    says(rig, "hello", forever=True)
    held = [asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json=CHAT)) for _ in range(2)]
    await until(lambda: len(rig.cluster.seen) == 2)
    response = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "n": 2})
    assert check_error(response, 429)["code"] == "too_many_requests"
    assert int(response.headers["retry-after"]) >= 1
    await until(lambda: len(rig.cluster.final) == 1)  # the choice that had been stored
    for task in held:
        task.cancel()
    await asyncio.gather(*held, return_exceptions=True)
    await until(lambda: len(rig.cluster.final) == 3)


async def test_a_gateway_takes_no_more_calls_than_it_bears(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start(max_open_calls=1)
    says(rig, "hello", forever=True)
    held = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json=CHAT))
    await until(lambda: rig.cluster.seen)
    response = await client.post(rig.url + "/v1/chat/completions", json=CHAT)
    assert check_error(response, 429)["code"] == "too_many_calls"
    assert b" 429 " in await answer_to_a_head(rig), "it does not wait for the body"
    held.cancel()
    await asyncio.gather(held, return_exceptions=True)


async def answer_to_a_head(rig: Rig) -> bytes:
    """The status line that a call gets whose body has not come yet."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n")
    try:
        return await asyncio.wait_for(reader.readline(), 10)
    finally:
        writer.close()


# --- deadlines ---------------------------------------------------------------------------------------------------


async def refuse(rig: Rig, reason: Reason, **fields: Any) -> None:
    """As the scheduler does, instead of placing the request."""
    (request,) = await until(lambda: list(rig.cluster.seen.values()))
    record = make_record(request, "failed", reason=reason, written_at=time.time(), **fields)
    await write_record(rig.cluster.bus, record, after_seq=0, limit_s=5)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_refused_call_is_429_streamed_or_not_and_tells_when_to_come_again(
    start: StartRig, client: httpx.AsyncClient, streamed: bool
) -> None:
    rig = await start(refusal_limit_s=20.0)
    says(rig, "hello", block_s=60)
    body = {**CHAT, "stream": streamed, "slo_ms": 1000}
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json=body))
    await refuse(rig, "overloaded", retry_after_s=2.1)
    response = await call
    assert check_error(response, 429)["code"] == "overloaded"
    assert response.headers["retry-after"] == "3"
    assert "x-should-retry" not in response.headers


async def test_where_the_slo_is_too_short_a_retry_is_of_no_use(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "hello", block_s=60)
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json={**CHAT, "slo_ms": 1}))
    await refuse(rig, "slo_too_short")
    response = await call
    error = check_error(response, 429)
    assert (error["code"], error["param"]) == ("slo_too_short", "slo_ms")
    assert response.headers["x-should-retry"] == "false"
    assert "retry-after" not in response.headers


async def test_a_stream_with_a_deadline_begins_though_nobody_refuses_it(
    start: StartRig, client: httpx.AsyncClient
) -> None:
    rig = await start(refusal_limit_s=0.05)
    says(rig, "abcdefghijkl", block_s=0.3)
    events = await stream(client, rig, slo_ms=60_000)
    assert contents(events) == ["abcdefgh", "ijkl"]
    assert events[-2]["tediserve"]["deadline_met"] is True


async def test_without_nats_it_is_503_and_live_but_not_ready(
    start: StartRig, client: httpx.AsyncClient, nats_server: NatsServer, caplog: pytest.LogCaptureFixture
) -> None:
    rig = await start(admit_limit_s=0.5)
    nats_server.kill()
    response = await client.post(rig.url + "/v1/chat/completions", json=CHAT)
    assert check_error(response, 503)["code"] == "bus_unavailable"
    assert response.headers["retry-after"]
    assert "a call is answered 503: NATS does not answer" in caplog.messages
    assert (await client.get(rig.url + "/health/live")).status_code == 200
    check_error(await client.get(rig.url + "/health/ready"), 503)
    check_error(await client.get(rig.url + "/v1/results/" + "0" * 32), 503)
    nats_server.start()


async def test_a_call_waits_out_a_short_absence_of_nats(
    start: StartRig, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    rig = await start(admit_limit_s=15)
    nats_server.kill()
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json=CHAT))
    await until(lambda: not rig.gateway.service.connected)
    nats_server.start()
    answer = (await call).json()
    assert answer["choices"][0]["message"]["content"] == "hello world"
    assert len(rig.cluster.seen) == 1


async def test_streams_live_through_a_restart_of_nats(
    rig: Rig, client: httpx.AsyncClient, nats_server: NatsServer
) -> None:
    text = "abcdefghijklmnopqrstuvwxyz"
    go_on = asyncio.Event()
    says(rig, text, block_s=0.2, ending=go_on.is_set)
    streams = [asyncio.create_task(stream(client, rig)) for _ in range(5)]
    await until(lambda: len(rig.cluster.seen) == 5)
    nats_server.kill()
    await until(lambda: not rig.gateway.service.connected)
    nats_server.start()
    go_on.set()
    for events in await asyncio.gather(*streams):
        assert "".join(contents([e for e in events[:-1] if e])) == text
        assert events[-1] == "[DONE]"


async def test_without_an_instance_for_long_it_is_503(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start(no_instance_limit_s=0.5)
    assert (await client.get(rig.url + "/health/ready")).status_code == 200
    rig.cluster.alive = False

    url = rig.url + "/v1/chat/completions"

    async def is_503() -> bool:
        return (await client.post(url, json=CHAT)).status_code == 503

    await until(is_503)
    response = await client.post(rig.url + "/v1/chat/completions", json=CHAT)
    assert check_error(response, 503)["code"] == "no_instance"
    assert response.headers["retry-after"]


# --- hang-ups ----------------------------------------------------------------------------------------------------


async def hang_up(rig: Rig, *, streamed: bool) -> None:
    """A client that asks and closes its connection once the worker has begun."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    body = json.dumps({**CHAT, "stream": streamed, "user": "hang-up"}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    known = set(rig.cluster.seen)
    writer.write(head.encode() + body)
    await writer.drain()
    await until(lambda: set(rig.cluster.seen) - known)
    if streamed:
        await reader.readuntil(b"assistant")
    writer.close()
    await writer.wait_closed()


async def test_who_hangs_up_cancels_streamed_or_not(rig: Rig) -> None:
    """50 clients, half of them streaming: from close to the worker hearing of it. Best of three on a busy machine."""
    says(rig, "hello", forever=True)
    for _ in range(3):
        took_ms = sorted([await time_to_cancel_ms(rig, streamed=number % 2 == 0) for number in range(50)])
        print(f"hang-up to cancel: p50 {took_ms[25]:.1f} ms, p95 {took_ms[47]:.1f} ms")
        assert {record.reason for record in rig.cluster.final.values()} == {"client_gone"}
        if took_ms[47] < 50:
            break
    else:
        pytest.fail(f"p95 of the last round: {took_ms[47]:.1f} ms")
    assert not rig.gateway.service._open


@pytest.mark.parametrize("streamed", [True, False])
async def test_the_log_tells_who_left_and_the_calls_id(
    rig: Rig, client: httpx.AsyncClient, caplog: pytest.LogCaptureFixture, streamed: bool
) -> None:
    caplog.set_level(logging.INFO, "services.gateway.http")
    response = await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "stream": streamed})
    answer = events_of(response.text)[0] if streamed else response.json()
    says(rig, "hello", forever=True)
    await hang_up(rig, streamed=streamed)
    await until(lambda: len(caplog.messages) == 2)
    first, second = caplog.messages
    assert re.fullmatch(rf"POST /v1/chat/completions 200 after \d+ ms, id [0-9a-f]{{32}}, call {answer['id']}", first)
    left = list(rig.cluster.seen)[-1]
    outcome = "200, client left" if streamed else "client left"
    assert second.startswith(f"POST /v1/chat/completions {outcome} after ")
    assert second.endswith(f", call chatcmpl-{left}")


async def time_to_cancel_ms(rig: Rig, *, streamed: bool) -> float:
    known = set(rig.cluster.seen)
    await hang_up(rig, streamed=streamed)
    closed_at = time.monotonic()
    (request_id,) = set(rig.cluster.seen) - known
    await until(lambda: request_id in rig.cluster.cancelled_at and request_id in rig.cluster.final)
    return (rig.cluster.cancelled_at[request_id] - closed_at) * 1000


@pytest.mark.parametrize("streamed", [True, False])
async def test_a_client_that_reads_nothing_is_given_up(start: StartRig, streamed: bool) -> None:
    """Over ASGI itself: the buffers of a real connection would swallow all that a short answer has."""
    rig = await start(send_limit_s=1.0)
    says(rig, "abcdefghijklmnop", forever=streamed, block_s=0.05)
    body = json.dumps({**CHAT, "stream": streamed}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    stuck = asyncio.Event()

    async def receive() -> Any:
        if incoming:
            return incoming.pop()
        return await asyncio.Event().wait()

    async def send(message: Any) -> None:
        if message.get("body"):
            stuck.set()
            await asyncio.Event().wait()

    scope: Any = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")], "client": ("x", 1), "server": ("x", 2),
        "state": {},
    }  # fmt: skip
    answering = asyncio.create_task(build_app(rig.gateway, "0")(scope, receive, send))
    await asyncio.wait_for(stuck.wait(), 10)
    await asyncio.wait_for(answering, 10)
    await until(lambda: rig.cluster.final)
    (record,) = rig.cluster.final.values()
    assert record.reason == ("client_gone" if streamed else "")
    assert not rig.gateway.service._open


async def test_who_connects_must_ask_in_time(start: StartRig) -> None:
    """Silent, or with a head that trickles in: the connection is closed."""
    rig = await start(body_limit_s=0.4)
    port = int(rig.url.rsplit(":", 1)[1])
    silent, silent_end = await asyncio.open_connection("127.0.0.1", port)
    assert await asyncio.wait_for(silent.read(), 5) == b""
    slow, slow_end = await asyncio.open_connection("127.0.0.1", port)
    closed = asyncio.create_task(slow.read())
    for byte in b"GET / HTTP/1.1\r\nhost: x":
        if closed.done():
            break
        slow_end.write(bytes([byte]))
        await asyncio.sleep(0.05)
    assert await asyncio.wait_for(closed, 5) == b""
    for writer in (silent_end, slow_end):
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()


async def test_what_is_no_http_gets_the_envelope(rig: Rig) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"nonsense\r\n\r\n")
    head, _, body = (await asyncio.wait_for(reader.read(), 5)).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert b"x-request-id: " in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
    writer.close()
    await writer.wait_closed()


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"nonsense\r\n\r\n",
        b"GET /nowhere HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade, close\r\n\r\n",
    ],
)
async def test_a_clients_fault_is_no_warning(rig: Rig, caplog: pytest.LogCaptureFixture, request_bytes: bytes) -> None:
    caplog.set_level(logging.DEBUG, "services.gateway")
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(request_bytes)
    assert (await asyncio.wait_for(reader.read(), 5)).startswith(b"HTTP/1.1 40")
    assert not [record for record in caplog.records if record.levelno >= logging.INFO]
    assert any(record.name == "services.gateway.protocol" for record in caplog.records)
    writer.close()
    await writer.wait_closed()


async def test_a_request_with_two_lengths_is_refused_and_hung_up_on(rig: Rig) -> None:
    """Also as the second of a connection; what follows in its body is no request."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(
        b"GET /health/live HTTP/1.1\r\nhost: x\r\n\r\n"
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n"
        b"0\r\n\r\nGET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    answers = await asyncio.wait_for(reader.read(), 5)
    assert re.findall(rb"HTTP/1\.1 (\d+)", answers) == [b"200", b"400"]
    assert json.loads(answers.rpartition(b"\r\n\r\n")[2])["error"]["code"] == "invalid_http"
    writer.close()
    await writer.wait_closed()


async def test_garbage_after_an_early_answer_is_hung_up_on(start: StartRig) -> None:
    rig = await start(max_body_bytes=1024)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
    writer.write(b"800\r\n" + b"x" * 2048 + b"\r\n")
    assert (await asyncio.wait_for(reader.readuntil(b"}}"), 5)).startswith(b"HTTP/1.1 413")
    writer.write(b"this is no chunk\r\n")
    assert await asyncio.wait_for(reader.read(), 5) == b""
    writer.close()
    await writer.wait_closed()


# --- idempotency -------------------------------------------------------------------------------------------------


async def test_a_repeat_attaches_to_the_running_request(rig: Rig, client: httpx.AsyncClient) -> None:
    done = asyncio.Event()
    says(rig, "abcdefghijkl", ending=done.is_set)
    url, key = rig.url + "/v1/chat/completions", {"idempotency-key": "k1"}
    first = asyncio.create_task(client.post(url, json=CHAT, headers=key))
    await until(lambda: rig.cluster.seen)
    second = asyncio.create_task(client.post(url, json={**CHAT, "stream": True}, headers=key))
    other = asyncio.create_task(client.post(url, json=CHAT, headers={**key, "authorization": "Bearer other"}))
    await until(lambda: len(rig.cluster.seen) == 2)
    done.set()
    whole, streamed = (await first).json(), events_of((await second).text)
    await other
    assert len(rig.cluster.seen) == 2
    assert "".join(contents(streamed)) == whole["choices"][0]["message"]["content"] == "abcdefghijkl"
    assert streamed[0]["id"] == whole["id"]
    assert streamed[0]["created"] == whole["created"]


async def test_a_call_with_a_key_outlives_its_client(rig: Rig, client: httpx.AsyncClient) -> None:
    done = asyncio.Event()
    says(rig, "abcdefghijkl", ending=done.is_set)
    url, key = rig.url + "/v1/chat/completions", {"idempotency-key": "k2"}
    first = asyncio.create_task(client.post(url, json=CHAT, headers=key))
    await until(lambda: rig.cluster.seen)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    done.set()
    await until(lambda: rig.cluster.final)
    (record,) = rig.cluster.final.values()
    assert record.state == "finished"
    await until(lambda: not rig.gateway.service._open)
    again = await client.post(url, json=CHAT, headers=key)
    assert again.json()["choices"][0]["message"]["content"] == "abcdefghijkl"
    assert len(rig.cluster.seen) == 1


async def test_a_stop_string_ends_a_detached_call_that_nobody_listens_to(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefgh#jklmnopqrstuvw", block_s=0.1, forever=True)
    url, key = rig.url + "/v1/chat/completions", {"idempotency-key": "k3"}
    body = {**CHAT, "stop": "#", "stream": True}
    async with client.stream("POST", url, json=body, headers=key) as response:
        assert response.status_code == 200
    await until(lambda: rig.cluster.final)
    (record,) = rig.cluster.final.values()
    assert record.reason == "stop_string"
    again = events_of((await client.post(url, json=body, headers=key)).text)
    assert "".join(contents(again)) == "abcdefgh"
    assert again[-2]["choices"][0]["finish_reason"] == "stop"


async def test_a_key_stands_for_one_body_only(rig: Rig, client: httpx.AsyncClient) -> None:
    url, key = rig.url + "/v1/chat/completions", {"idempotency-key": "k4"}
    assert (await client.post(url, json=CHAT, headers=key)).status_code == 200
    response = await client.post(url, json={**CHAT, "seed": 1}, headers=key)
    assert check_error(response, 422)["code"] == "idempotency_key_reused"
    response = await client.post(url, json=CHAT, headers={"idempotency-key": "x" * 300})
    check_error(response, 400)


async def test_a_repeat_at_another_gateway_attaches_too(
    rig: Rig, client: httpx.AsyncClient, nats_server: NatsServer, tmp_path: Path
) -> None:
    done = asyncio.Event()
    says(rig, "abcdefghijkl", ending=done.is_set)
    path, key = "/v1/chat/completions", {"idempotency-key": "k5"}
    first = asyncio.create_task(client.post(rig.url + path, json={**CHAT, "n": 2}, headers=key))
    await until(lambda: len(rig.cluster.seen) == 2)
    config = GatewayConfig(port=0, profile=str(tmp_path / "profile"))
    async with run_gateway(NatsSettings(url=nats_server.url), config) as (url, _):
        second = asyncio.create_task(client.post(url + path, json={**CHAT, "n": 2}, headers=key))
        await asyncio.sleep(0)
        done.set()
        a, b = (await first).json(), (await second).json()
    assert a["choices"] == b["choices"]
    assert a["usage"] == b["usage"]
    assert len(rig.cluster.seen) == 2


# --- results -----------------------------------------------------------------------------------------------------


async def until_it_says(client: httpx.AsyncClient, url: str, text: str) -> None:
    """The result's first choice."""

    async def says_so() -> bool:
        return bool((await client.get(url)).json()["choices"][0]["message"]["content"] == text)

    await until(says_so, text)


async def test_a_result_can_be_read_while_it_runs_and_after(rig: Rig, client: httpx.AsyncClient) -> None:
    done = asyncio.Event()
    says(rig, "abcdef#hijklmnop", ending=done.is_set)
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json={**CHAT, "stop": "#i"}))
    await until(lambda: rig.cluster.seen)
    (call_id,) = rig.cluster.seen
    url = f"{rig.url}/v1/results/chatcmpl-{call_id}"

    await until_it_says(client, url, "abcdef#h")
    running = (await client.get(url)).json()
    assert (running["state"], running["choices"][0]["finish_reason"], running["error"]) == ("running", None, None)
    done.set()
    answer = (await call).json()
    finished = (await client.get(url)).json()
    assert finished == answer | {"state": "finished", "error": None}
    assert finished["choices"][0]["message"]["content"] == "abcdef#hijklmnop"


async def test_no_part_of_a_stop_string_is_in_a_result(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abc#defghijk")
    answer = (await client.post(rig.url + "/v1/chat/completions", json={**CHAT, "stop": "#"})).json()
    result = (await client.get(f"{rig.url}/v1/results/{answer['id']}")).json()
    assert result["choices"][0] == answer["choices"][0]


async def test_delete_cancels_all_choices(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefgh", forever=True)
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json={**CHAT, "n": 2}))
    await until(lambda: len(rig.cluster.seen) == 2)
    call_id = min(rig.cluster.seen, key=len)
    deleted = (await client.delete(f"{rig.url}/v1/results/chatcmpl-{call_id}")).json()
    assert (deleted["state"], deleted["error"]["code"]) == ("cancelled", "cancelled")
    error = check_error(await call, 409)
    assert error["code"] == "cancelled"
    await until(lambda: len(rig.cluster.final) == 2)
    reasons = {record.reason for record in rig.cluster.final.values()}
    assert reasons <= {"client_deleted", "sibling_failed"}
    assert "client_deleted" in reasons


async def test_a_result_tells_the_cause_and_all_text(rig: Rig, client: httpx.AsyncClient) -> None:
    """Of a call whose second choice failed."""
    go_on = asyncio.Event()

    def script(request: GenerateRequest) -> Play:
        if request.request_id.endswith("-1"):
            return Play(rig.ids("ab"), fail="engine_error", ending=go_on.is_set)
        return Play(rig.ids("abcdefghijklmnop"), forever=True)

    rig.cluster.script = script
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json={**CHAT, "n": 2}))
    await until(lambda: len(rig.cluster.seen) == 2)
    call_id = min(rig.cluster.seen, key=len)

    url = f"{rig.url}/v1/results/{call_id}"
    await until_it_says(client, url, "abcdefghijklmnop")
    go_on.set()
    check_error(await call, 500)
    await until(lambda: len(rig.cluster.final) == 2)
    result = (await client.get(url)).json()
    assert (result["state"], result["error"]["code"]) == ("failed", "engine_error")
    assert [choice["message"]["content"] for choice in result["choices"]] == ["abcdefghijklmnop", "ab"]


async def test_a_waiting_call_is_queued(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "abcdefgh", block_s=30)
    call = asyncio.create_task(client.post(rig.url + "/v1/completions", json=TEXT))
    await until(lambda: rig.cluster.seen)
    (call_id,) = rig.cluster.seen
    result = (await client.get(f"{rig.url}/v1/results/cmpl-{call_id}")).json()
    assert (result["state"], result["choices"][0]["text"]) == ("queued", "")
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)


@pytest.mark.parametrize("result_id", ["0" * 32, "chatcmpl-" + "f" * 32, "nonsense", "0" * 33, "%00", "a.b", "*", ">"])
async def test_an_unknown_result_is_404(rig: Rig, client: httpx.AsyncClient, result_id: str) -> None:
    url = f"{rig.url}/v1/results/{result_id}"
    assert check_error(await client.get(url), 404)["code"] == "result_not_found"
    check_error(await client.delete(url), 404)


# --- HTTP --------------------------------------------------------------------------------------------------------


async def test_every_answer_has_a_request_id(rig: Rig, client: httpx.AsyncClient) -> None:
    for path in ("/health/live", "/nowhere", "/v1/models", "/metrics"):
        assert re.fullmatch("[0-9a-f]{32}", (await client.get(rig.url + path)).headers["x-request-id"])
    mine = await client.get(rig.url + "/health/live", headers={"x-request-id": "mine-1"})
    assert mine.headers["x-request-id"] == "mine-1"
    insane = await client.get(rig.url + "/health/live", headers={"x-request-id": "a b\tc"})
    assert insane.headers["x-request-id"] != "a b\tc"


async def test_head_tells_what_get_would(rig: Rig, client: httpx.AsyncClient) -> None:
    told = {"content-type", "content-length"}
    for path in ("/health/live", "/health/ready", "/v1/models", f"/v1/models/{MODEL}"):
        got, head = await client.get(rig.url + path), await client.head(rig.url + path)
        assert (head.status_code, head.content) == (200, b"")
        assert {name: head.headers[name] for name in told} == {name: got.headers[name] for name in told}
        assert head.headers["x-request-id"]
    assert (await client.head(rig.url + "/v1/chat/completions")).status_code == 405
    assert (await client.head(rig.url + "/nowhere")).status_code == 404


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/chat/completions", {"POST", "OPTIONS"}),
        ("/v1/models", {"GET", "HEAD", "OPTIONS"}),
        ("/v1/results/0", {"GET", "HEAD", "DELETE", "OPTIONS"}),
        ("/metrics", {"GET", "HEAD", "OPTIONS"}),
    ],
)
async def test_allow_names_what_a_path_answers(
    rig: Rig, client: httpx.AsyncClient, path: str, methods: set[str]
) -> None:
    for method in ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"):
        response = await client.request(method, rig.url + path)
        assert (response.status_code == 405) == (method not in methods)
        if response.status_code == 405 or method == "OPTIONS":
            assert set(response.headers["allow"].split(", ")) == methods


async def test_one_envelope_for_every_error(start: StartRig, client: httpx.AsyncClient) -> None:
    rig = await start(max_body_bytes=2048)
    url = rig.url + "/v1/chat/completions"
    assert check_error(await client.get(rig.url + "/v1/nothing"), 404)["code"] == "unknown_url"
    response = await client.get(url)
    assert check_error(response, 405)["code"] == "method_not_allowed"
    assert "POST" in response.headers["allow"]
    too_large = {**CHAT, "user": "x" * 4000}
    assert check_error(await client.post(url, json=too_large), 413)["code"] == "request_too_large"
    check_error(await client.post(url, content=b"{"), 400)
    check_error(await client.post(url, data={"a": "b"}), 415)
    check_error(await client.post(url, json=CHAT, headers={"content-encoding": "gzip"}), 415)
    check_error(await client.get(rig.url + "/schema/nothing"), 404)


async def test_a_body_that_does_not_come_is_408(start: StartRig) -> None:
    rig = await start(body_limit_s=0.3)
    reader, writer = await asyncio.open_connection("127.0.0.1", int(rig.url.rsplit(":", 1)[1]))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{")
    answer = await asyncio.wait_for(reader.readuntil(b"}}"), 10)
    assert answer.startswith(b"HTTP/1.1 408")
    writer.close()
    await writer.wait_closed()


async def test_models_and_schema(rig: Rig, client: httpx.AsyncClient) -> None:
    (model,) = (await client.get(rig.url + "/v1/models")).json()["data"]
    assert (model["id"], model["object"]) == (MODEL, "model")
    assert (await client.get(f"{rig.url}/v1/models/{MODEL}")).json() == model
    assert check_error(await client.get(rig.url + "/v1/models/a/b"), 404)["code"] == "model_not_found"
    schema = (await client.get(rig.url + "/schema")).json()
    bodies = schema["components"]["schemas"]
    assert bodies["ChatBody"]["properties"]["messages"]
    assert "milliseconds" in str(bodies["ChatBody"]["properties"]["slo_ms"])
    told = bodies["Answer"]["properties"]["tediserve"]["$ref"].rsplit("/", 1)[1]
    assert {"deadline_met", "steps", "mean_threshold", "moves", "attempts", "queue_ms", "total_ms"} <= set(
        bodies[told]["properties"]
    )
    assert schema["paths"]["/v1/chat/completions"]["post"]["requestBody"]


async def test_metrics_count_what_was_served(rig: Rig, client: httpx.AsyncClient) -> None:
    await client.post(rig.url + "/v1/chat/completions", json=CHAT)
    text = (await client.get(rig.url + "/metrics")).text
    assert 'tediserve_http_requests_total{route="/v1/chat/completions",status="200"}' in text
    assert "tediserve_gateway_first_block_seconds_count" in text


async def test_a_gateway_tells_that_it_lives_each_second_and_when_asked(rig: Rig) -> None:
    heard: list[GatewayStatus] = []
    await rig.cluster.bus.subscribe("status.gateway.*", GatewayStatus, heard.append)
    await rig.cluster.bus.flush()
    await until(lambda: len(heard) >= 2, limit_s=5)
    count = len(heard)
    await rig.cluster.bus.publish(subjects.STATUS_ASK, StatusAsk())
    await until(lambda: len(heard) > count, limit_s=0.9)
    assert {status.gateway_id for status in heard} == {rig.gateway.service.gateway_id}


async def test_malformed_records_are_ignored(rig: Rig, client: httpx.AsyncClient) -> None:
    says(rig, "hello world", block_s=0.2)
    call = asyncio.create_task(client.post(rig.url + "/v1/chat/completions", json=CHAT))
    await until(lambda: rig.cluster.seen)
    gateway_id = rig.gateway.service.gateway_id
    bus = rig.cluster.bus
    await bus.append(subjects.progress(gateway_id, "other"), {"no": "record"})
    await bus.append(
        subjects.progress(gateway_id, "liar"),
        make_record(next(iter(rig.cluster.seen.values())), "failed"),
    )
    assert (await call).json()["choices"][0]["message"]["content"] == "hello world"
