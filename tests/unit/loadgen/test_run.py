"""The load generator against a server in this process that answers as it is told to."""

import asyncio
import io
import json
import re
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from services.settings import ConfigError
from tests.processes import ROOT, free_port
from tests.waiting import until
from tools.judge.files import read_answers
from tools.loadgen.__main__ import main, shown
from tools.loadgen.asks import Ask
from tools.loadgen.client import Failed, open_endpoint
from tools.loadgen.run import OpenLoop
from tools.loadgen.schedule import Send
from tools.loadgen.tally import NOT_SENT, Outcome, Tally

OURS = {"steps": 5, "mean_threshold": 0.8, "moves": 1}


class FakeServer:
    """Does what the prompt says: answer, slow, busy, cut, garbage, odd."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.url = ""

    async def models(self, _: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "first"}, {"id": "second"}]})

    async def complete(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        what = body["prompt"]
        if what == "slow":
            await asyncio.sleep(0.15)
        if what == "busy":
            return web.json_response({"error": {"code": "full", "type": "rate"}}, status=429)
        if what == "garbage":
            return web.Response(text="<html>", status=502)
        if what == "odd":
            return web.json_response({"choices": []})
        if what == "cut" and not body.get("stream"):
            assert request.transport is not None
            request.transport.abort()
        if body.get("stream"):
            return await self._stream(request, what)
        answer = {"choices": [{"text": "42"}], "usage": {"completion_tokens": 7}, "tediserve": OURS}
        return web.json_response(answer)

    async def _stream(self, request: web.Request, what: str) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        chunks: list[object] = [{"choices": [{"text": ""}]}, {"choices": [{"text": "4"}]}]
        if what == "failing":
            chunks.append({"error": {"code": "worker_lost"}})
        elif what != "cut":
            chunks += [
                {"choices": [{"text": "2"}]},
                {"choices": [], "usage": {"completion_tokens": 7}, "tediserve": OURS},
            ]
        for number, chunk in enumerate(chunks):
            await asyncio.sleep(0.3 if number == 2 else 0)
            await response.write(b": ping\n\ndata: " + json.dumps(chunk).encode() + b"\n\n")
        if what not in ("cut", "failing"):
            await response.write(b"data: [DONE]\n\n")
        return response


@pytest_asyncio.fixture
async def server() -> AsyncIterator[FakeServer]:
    fake = FakeServer()
    app = web.Application()
    app.router.add_get("/v1/models", fake.models)
    app.router.add_post("/v1/completions", fake.complete)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("")).rstrip("/")
        yield fake


def send(what: str, due_s: float = 0.0, slo_ms: float | None = None, tier: str | None = None) -> Send:
    return Send(0, due_s, Ask("/v1/completions", {"prompt": what}, lambda text: text == "42"), slo_ms, tier)


async def run(server: FakeServer, sends: list[Send], *, stream: bool = False, max_in_flight: int = 9) -> list[Outcome]:
    outcomes: list[Outcome] = []
    async with open_endpoint(server.url, max_in_flight=max_in_flight, timeout_s=10, stream=stream) as endpoint:
        loop = OpenLoop(endpoint, {"model": "first", "threshold": 0.7}, outcomes.append, max_in_flight=max_in_flight)
        await loop.run(sends)
    return outcomes


async def test_an_answer_and_what_it_was_asked_with(server: FakeServer) -> None:
    (outcome,) = await run(server, [send("answer", slo_ms=5000, tier="flex")])
    assert outcome[3:] == ("", None, 7, 5, 0.8, 1, True, "42")
    assert outcome.met
    assert server.bodies == [
        {"prompt": "answer", "model": "first", "threshold": 0.7, "slo_ms": 5000, "service_tier": "flex"}
    ]


async def test_a_stream_tells_when_its_first_text_came(server: FakeServer) -> None:
    (outcome,) = await run(server, [send("answer")], stream=True)
    assert outcome.error == ""
    assert (outcome.tokens, outcome.steps, outcome.is_correct) == (7, 5, True)
    assert outcome.first_text_s is not None
    assert outcome.lag_s <= outcome.first_text_s <= outcome.latency_s - 0.15  # 300 ms are between the two texts
    assert server.bodies[0]["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    ("what", "stream", "kind"),
    [
        ("busy", False, "429 full"),
        ("garbage", False, "502 without JSON"),
        ("odd", False, "200 in another form than OpenAI's"),
        ("cut", False, "connection lost"),
        ("cut", True, "stream cut"),
        ("failing", True, "stream worker_lost"),
        ("busy", True, "429 full"),
    ],
)
async def test_failures_are_told_apart_and_nothing_is_tried_twice(
    server: FakeServer, what: str, stream: bool, kind: str
) -> None:
    (outcome,) = await run(server, [send(what)], stream=stream)
    assert outcome.error == kind
    assert len(server.bodies) == 1


async def test_a_server_that_is_gone_and_one_that_takes_too_long() -> None:
    async with open_endpoint(f"http://127.0.0.1:{free_port()}", max_in_flight=1, timeout_s=1) as endpoint:
        with pytest.raises(Failed, match="not connected"):
            await endpoint.ask(send("answer").ask, {})
    with pytest.raises(ConfigError, match="url: 'nowhere' is not like"):
        async with open_endpoint("nowhere", max_in_flight=1, timeout_s=1):
            pass


async def test_a_request_has_a_time_limit(server: FakeServer) -> None:
    async with open_endpoint(server.url, max_in_flight=1, timeout_s=0.05) as endpoint:
        with pytest.raises(Failed, match="timeout"):
            await endpoint.ask(send("slow").ask, {})


async def test_the_clock_alone_decides_when_requests_go_out(server: FakeServer) -> None:
    """Each takes 150 ms, one is due every 20 ms: a loop that waited for answers would take 1.5 s."""
    outcomes = await run(server, [send("slow", 0.02 * number) for number in range(10)], max_in_flight=20)
    assert [outcome.error for outcome in outcomes] == [""] * 10
    assert max(o.send.due_s + o.latency_s for o in outcomes) < 1.0


async def test_what_would_be_too_many_in_flight_is_not_sent(server: FakeServer) -> None:
    outcomes = await run(server, [send("slow", 0.01 * number) for number in range(5)], max_in_flight=2)
    assert sorted(outcome.error for outcome in outcomes) == ["", "", *[NOT_SENT] * 3]
    assert len(server.bodies) == 2


async def test_latency_counts_from_when_a_request_was_due(server: FakeServer) -> None:
    outcomes: list[Outcome] = []

    def hold_up() -> None:
        time.sleep(0.4)  # as a client does that has no processor

    async with open_endpoint(server.url, max_in_flight=9, timeout_s=5) as endpoint:
        loop = OpenLoop(endpoint, {}, outcomes.append, max_in_flight=9)
        asyncio.get_running_loop().call_later(0.02, hold_up)
        await loop.run([send("answer", 0.2)])
    assert outcomes[0].lag_s > 0.1
    assert outcomes[0].latency_s > outcomes[0].lag_s


# --- the command --------------------------------------------------------------------------------------------------


async def command(*words: object) -> int:
    """In a thread, as it has an event loop of its own."""
    return await asyncio.to_thread(main, [str(word) for word in words])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ((), "give --rate for Poisson arrivals"),
        (("--rate", 2, "--model", "third"), "model: 'third' is not served at http"),
        (("--rate", 2, "--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--rate", 2, "--max-in-flight", 10**9), "more than this system allows"),
    ],
)
async def test_a_wrong_call_says_why(
    server: FakeServer, capsys: pytest.CaptureFixture[str], words: tuple[object, ...], complaint: str
) -> None:
    assert await command("--url", server.url, "--problems", 1, *words) == 2
    assert complaint in capsys.readouterr().err


async def test_an_endpoint_that_is_down_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert await command("--url", url, "--rate", 2, "--problems", 1) == 2
    assert f"loadgen: nothing answers at {url}" in capsys.readouterr().err


async def test_a_trace_that_ends_too_soon_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = tmp_path / "rate.csv"
    trace.write_text("start_s,total_rps\n0,5\n10,5\n")
    assert await command("--trace", trace, "--speed", 4, "--duration", 60, "--problems", 1) == 2
    assert "lasts 5.0 s at this speed; warm-up and duration are 65 s" in capsys.readouterr().err


async def test_all_answers_are_written_as_the_judge_reads_them(server: FakeServer, tmp_path: Path) -> None:
    prompts, answers, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl", tmp_path / "out.json"
    prompts.write_text('{"prompt": "answer", "expected": "42"}\n{"prompt": "busy", "expected": "42"}\n')
    options = ["--url", server.url, "--rate", 40, "--warmup", 0, "--duration", 1, "--slo-ms", 60_000]
    options += ["--prompts", prompts, "--max-lag-ms", 60_000, "--answers", answers, "--out", out]
    words = [sys.executable, "-m", "tools.loadgen", *map(str, options)]
    child = await asyncio.create_subprocess_exec(*words, cwd=ROOT, stdout=asyncio.subprocess.DEVNULL)
    assert await asyncio.wait_for(child.wait(), 60) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert len(lines) == json.loads(out.read_text())["report"]["due"] == len(server.bodies)
    for line in lines:
        assert (line["reference"], line["slo_ms"], line["latency_ms"] > 0) == ("42", 60_000, True)
    told = {line["prompt"]: (line.get("answer"), line.get("error"), line.get("is_correct")) for line in lines}
    assert told == {"answer": ("42", None, True), "busy": (None, "429 full", None)}
    judged, without_answer = read_answers(answers, "judge")
    assert len(judged) + without_answer == len(lines)
    assert {(answer.question, answer.answer, answer.reference) for answer in judged} == {("answer", "42", "42")}


async def test_ctrl_c_reports_what_there_is_and_that_it_does_not_count(server: FakeServer) -> None:
    words = ["--url", server.url, "--rate", "20", "--warmup", "0", "--duration", "100", "--prompts", "/dev/stdin"]
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.loadgen", *words),
        cwd=ROOT,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    child.stdin.write(b'{"prompt": "answer", "expected": "42"}')
    child.stdin.close()
    await until(lambda: len(server.bodies) >= 5, "five requests have come")
    child.send_signal(signal.SIGINT)
    told = (await asyncio.wait_for(child.stdout.read(), 30)).decode()
    assert await child.wait() == 1
    assert "THIS RUN DOES NOT COUNT: it was interrupted" in told
    assert re.search(r"\| correct +\| 100.0% of \d+ \|", told)


async def test_a_terminal_sees_how_far_it_is_and_nothing_else_does(server: FakeServer) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    terminal, file = Terminal(), io.StringIO()
    tally = Tally(0.0, 5.0, max_in_flight=9, max_lag_ms=50)
    async with open_endpoint(server.url, max_in_flight=9, timeout_s=5) as endpoint:
        loop = OpenLoop(endpoint, {}, tally.add, max_in_flight=9)
        async with shown(loop, tally, terminal), shown(loop, tally, file):
            await loop.run([send("answer", slo_ms=60_000), send("answer", 1.2, slo_ms=60_000)])
    assert re.search(r"measuring: [01] of 5 s, 1 due, 0 in flight, 1 measured, 100.0% in time", terminal.getvalue())
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert file.getvalue() == ""


@pytest.mark.parametrize("word", ["--rate=0", "--slo-ms=fast", "--duration=-1", "--max-in-flight=0", "--tier=a:0"])
def test_a_wrong_option_is_refused(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([word])
    assert end.value.code == 2
    assert word.split("=")[0] in capsys.readouterr().err
