"""The judge against a server in this process that answers as judges do, good and bad ones."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web
from aiohttp.test_utils import TestServer

from tests.processes import ROOT, free_port, plain_environment
from tests.waiting import until
from tools.judge.__main__ import main
from tools.judge.rubric import CRITERIA

Reply = str | int | tuple[int, dict[str, str]] | dict[str, Any]


class FakeJudge:
    """`reply` tells what an answer gets, the n-th time that it is asked about: points, a text, or a refusal."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.times: dict[str, int] = {}
        self.keys: set[str | None] = set()
        self.reply: Callable[[str, int], Reply] = lambda answer, time: 10
        self.formats = {"json_schema", "json_object"}
        self.hold: asyncio.Event | None = None  # replies wait for it
        self.under_way = self.most_under_way = 0
        self.url = ""

    async def complete(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        wanted = body.get("response_format", {}).get("type")
        if wanted is not None and wanted not in self.formats:
            return web.json_response({"error": {"message": f"response_format {wanted}?"}}, status=400)
        self.bodies.append(body)
        answer = json.loads(body["messages"][1]["content"])["answer"]
        self.times[answer] = self.times.get(answer, 0) + 1
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            if self.hold is not None:
                await self.hold.wait()
            await asyncio.sleep(0)
        finally:
            self.under_way -= 1
        match self.reply(answer, self.times[answer]):
            case int(points):
                text = json.dumps({"reason": "so", **dict.fromkeys(CRITERIA, points)})
            case (status, headers):
                return web.json_response({"error": {"message": "no"}}, status=status, headers=headers)
            case dict() as content:
                return web.json_response(content)
            case text:
                pass
        return web.json_response({"choices": [{"message": {"role": "assistant", "content": text}}]})


@pytest_asyncio.fixture
async def judge() -> AsyncIterator[FakeJudge]:
    fake = FakeJudge()
    app = web.Application()
    app.router.add_post("/v1/chat/completions", fake.complete)
    async with TestServer(app) as running:
        fake.url = str(running.make_url("/v1"))
        yield fake


@pytest.fixture
def answers(tmp_path: Path) -> Path:
    """Five lines: two of them the same, one of a request that failed."""
    path = tmp_path / "answers.jsonl"
    asked = {"messages": [{"role": "user", "content": "What is 1 + 1?"}]}
    lines: list[dict[str, Any]] = [
        {**asked, "answer": "2", "reference": "#### 2", "is_correct": True, "latency_ms": 12.5},
        {"prompt": "1 + 1 =", "answer": "3", "reference": "2", "is_correct": False},
        {**asked, "error": "429 full"},
        {**asked, "answer": "2", "reference": "#### 2", "is_correct": True},
        {"question": "Why?", "answer": "Because."},
    ]
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return path


def words(judge: FakeJudge, answers: Path, *more: object) -> list[str]:
    out = answers.with_name("scores.jsonl")
    return [str(word) for word in (answers, "--url", judge.url, "--model", "strict", "--out", out, *more)]


async def command(judge: FakeJudge, answers: Path, *more: object) -> int:
    """In a thread, as it has an event loop of its own."""
    return await asyncio.to_thread(main, words(judge, answers, "--max-backoff-s", 0.02, *more))


def scores_of(answers: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in answers.with_name("scores.jsonl").read_text().splitlines()]


def summary_of(answers: Path) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads(answers.with_name("scores.summary.json").read_text())["summary"]
    return summary


async def test_every_answer_gets_a_score_and_the_same_one_is_asked_about_once(
    judge: FakeJudge, answers: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge")
    judge.reply = lambda answer, time: {"2": 10, "3": 2, "Because.": 6}[answer]
    assert await command(judge, answers) == 0
    assert judge.times == {"2": 1, "3": 1, "Because.": 1}
    assert judge.keys == {"Bearer sk-judge"}
    found = {score["number"]: score for score in scores_of(answers)}
    assert {number: score["score"] for number, score in found.items()} == {1: 10, 2: 2, 4: 10, 5: 6}
    assert found[2]["verdict"]["reason"] == "so"
    assert (found[2]["question"], found[2]["answer"], found[2]["is_correct"]) == ("1 + 1 =", "3", False)
    for body in judge.bodies:
        assert (body["model"], body["temperature"]) == ("strict", 0)
        assert body["response_format"]["json_schema"]["strict"] is True
    summary = summary_of(answers)
    assert (summary["answers"], summary["judged"], summary["without_answer"]) == (4, 4, 1)
    assert summary["criteria"]["score"]["mean"] == 7
    assert summary["correct"]["mean"] == 10
    assert summary["wrong"]["mean"] == 2
    assert "| score | 7.00 ± " in capsys.readouterr().out


async def test_what_is_judged_is_not_asked_again_but_by_another_judge(judge: FakeJudge, answers: Path) -> None:
    assert await command(judge, answers) == 0
    assert await command(judge, answers) == 0
    assert len(judge.bodies) == 3
    assert len(scores_of(answers)) == 4
    judge.reply = lambda answer, time: 4
    assert await command(judge, answers, "--model", "other") == 0
    assert len(judge.bodies) == 6
    assert summary_of(answers)["criteria"]["score"]["mean"] == 4
    assert await command(judge, answers) == 0
    assert summary_of(answers)["criteria"]["score"]["mean"] == 10
    assert len(judge.bodies) == 6


async def test_a_malformed_reply_is_asked_for_again_with_a_reminder(judge: FakeJudge, answers: Path) -> None:
    judge.reply = lambda answer, time: "I would say 8 out of 10." if time == 1 else 8
    assert await command(judge, answers, "--concurrency", 1) == 0
    first, second = judge.bodies[:2]
    assert second["messages"][:2] == first["messages"]
    assert second["messages"][2] == {"role": "assistant", "content": "I would say 8 out of 10."}
    assert "not the JSON object" in second["messages"][3]["content"]
    assert set(judge.times.values()) == {2}


@pytest.mark.parametrize(
    "failure",
    [(429, {"retry-after": "0"}), (429, {"retry-after": "Mon, 30 Nov 2026 21:00:00 GMT"}), (503, {}), {"choices": []}],
)
async def test_what_may_pass_is_tried_again(judge: FakeJudge, answers: Path, failure: Reply) -> None:
    judge.reply = lambda answer, time: failure if time < 3 else 5
    assert await command(judge, answers) == 0
    assert set(judge.times.values()) == {3}
    assert all(len(body["messages"]) == 2 for body in judge.bodies)


async def test_tries_end_and_the_others_are_judged_all_the_same(
    judge: FakeJudge, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.reply = lambda answer, time: {"2": 9, "3": (429, {"retry-after": "3600"}), "Because.": (400, {})}[answer]
    assert await command(judge, answers, "--attempts", 3) == 1
    assert judge.times == {"2": 1, "3": 3, "Because.": 1}  # a 400 is of the question, and stays
    told = capsys.readouterr()
    assert "line 2: no verdict in 3 attempts, the last was 429" in told.err
    assert "line 5: 400" in told.err
    assert "2 of 4 answers judged" in told.out
    judge.reply = lambda answer, time: 9
    assert await command(judge, answers) == 0
    assert judge.times == {"2": 1, "3": 4, "Because.": 2}


@pytest.mark.parametrize(
    ("formats", "sent"), [({"json_object"}, {"type": "json_object"}), (set(), None), ({"json_schema"}, None)]
)
async def test_an_endpoint_gets_the_strictest_format_that_it_takes(
    judge: FakeJudge, answers: Path, formats: set[str], sent: dict[str, str] | None
) -> None:
    """The last case: it is told to use none."""
    judge.formats = formats
    assert await command(judge, answers, *(["--response-format", "none"] if formats == {"json_schema"} else [])) == 0
    assert [body.get("response_format") for body in judge.bodies] == [sent] * 3


async def test_no_more_are_under_way_than_allowed(judge: FakeJudge, tmp_path: Path) -> None:
    answers = tmp_path / "many.jsonl"
    answers.write_text("".join(json.dumps({"prompt": "?", "answer": str(n)}) + "\n" for n in range(40)))
    judge.hold = asyncio.Event()
    running = asyncio.create_task(command(judge, answers, "--concurrency", 4))
    await until(lambda: judge.under_way == 4, "four are under way")
    judge.hold.set()
    assert await running == 0
    assert judge.most_under_way == 4
    assert len(judge.bodies) == 40


async def test_killed_in_the_middle_it_goes_on_where_it_was(judge: FakeJudge, tmp_path: Path) -> None:
    """Killed while half of the answers are judged and others are under way; a torn line is left behind."""
    answers, half = tmp_path / "answers.jsonl", 10
    answers.write_text("".join(json.dumps({"prompt": "?", "answer": str(n)}) + "\n" for n in range(2 * half)))
    scores = tmp_path / "scores.jsonl"

    def reply(answer: str, time: int) -> Reply:
        if len(judge.bodies) >= half:
            assert judge.hold is not None
            judge.hold.clear()  # what comes from now on waits
        return 7

    judge.reply, judge.hold = reply, asyncio.Event()
    judge.hold.set()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.judge", *words(judge, answers, "--concurrency", 2)),
        cwd=ROOT,
        env=plain_environment(),
    )
    try:
        await until(lambda: judge.under_way == 2 and not judge.hold.is_set(), "the run waits in the middle", 60)
        assert await command(judge, answers) == 2  # another run writes to the file
    finally:
        child.send_signal(signal.SIGKILL)
        await child.wait()
    before = scores.read_bytes()
    judged = before.count(b"\n")
    assert half - 2 <= judged < 2 * half
    with scores.open("ab") as file:
        file.write(b'{"number":20,"key":"ab')
    asked = len(judge.bodies)
    judge.reply = lambda answer, time: 7
    judge.hold.set()
    assert await command(judge, answers) == 0
    assert scores.read_bytes().startswith(before)
    assert sorted(score["number"] for score in scores_of(answers)) == list(range(1, 2 * half + 1))
    assert len(judge.bodies) - asked == 2 * half - judged


async def test_ctrl_c_tells_how_far_it_came(judge: FakeJudge, answers: Path) -> None:
    judge.reply = lambda answer, time: 7
    judge.hold = asyncio.Event()
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tools.judge", *words(judge, answers)),
        cwd=ROOT,
        env=plain_environment(),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    await until(lambda: judge.under_way == 3, "all are under way", 60)
    child.send_signal(signal.SIGINT)
    out, err = await asyncio.wait_for(child.communicate(), 30)
    assert child.returncode == 1
    assert b"the same command goes on from here" in err
    assert b"0 of 4 answers judged" in out
    judge.hold.set()


@pytest.mark.parametrize("status", [401, 403, 404])
async def test_a_judge_that_refuses_us_ends_the_run(
    judge: FakeJudge, answers: Path, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    judge.reply = lambda answer, time: (status, {})
    assert await command(judge, answers, "--concurrency", 1) == 2
    assert f"judge: the judge refuses to answer, {status}" in capsys.readouterr().err
    assert len(judge.bodies) == 1


async def test_a_judge_that_is_down_is_said(
    judge: FakeJudge, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judge.url = f"http://127.0.0.1:{free_port()}/v1"
    assert await command(judge, answers, "--attempts", 2) == 1
    assert "the last was ClientConnectorError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ('{"prompt": "?"}', 'line 1: it needs "answer" and one of'),
        ('{"prompt": "?", "question": "?", "answer": "!"}', 'line 1: it needs "answer" and one of'),
        ('{"prompt": 3, "answer": "!"}', "line 1: Expected `str"),
        ("nonsense", "line 1: JSON is malformed"),
        ("", "holds no answers"),
    ],
)
async def test_wrong_answers_are_named(
    judge: FakeJudge, tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, complaint: str
) -> None:
    answers = tmp_path / "answers.jsonl"
    answers.write_text(line + "\n")
    assert await command(judge, answers) == 2
    assert complaint in capsys.readouterr().err


async def test_a_file_of_something_else_is_not_added_to(
    judge: FakeJudge, answers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scores = answers.with_name("scores.jsonl")
    scores.write_text('{"other": 1}\n')
    assert await command(judge, answers) == 2
    assert "scores.jsonl, line 1" in capsys.readouterr().err
    assert scores.read_text() == '{"other": 1}\n'
