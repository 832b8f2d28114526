"""What is asked: problems of the built-in tasks, or prompts of a JSONL file; and whether an answer is right.

1. Built-in problems are held-out ones, and their own check tells what is correct.
2. A line of a file is {"prompt": text} (for /v1/completions), {"messages": [...]} or {"question": text} (for
   /v1/chat/completions); "expected", or "answer" as GSM8K has it, is what to find.
3. An answer matches if what follows its last `####` is what is expected, or without `####` if all of it is. Commas in
   numbers and white space at the ends do not count.
"""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import msgspec

from services.settings import ConfigError
from tools.tiny_model import tasks
from tools.traces.prompts import ChatMessage

_LONGEST = 256  # output tokens of the built-in profile


class Ask(NamedTuple):
    """A prompt, as one endpoint takes it."""

    path: str
    content: dict[str, Any]  # the part of the request's body that holds the prompt, and how long its answer may be
    is_correct: Callable[[str], bool] | None  # None: nobody knows
    reference: str | None = None  # a right answer, where one is known


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the JSONL file; what it holds besides is ignored."""

    prompt: str | None = None
    messages: list[ChatMessage] | None = None
    question: str | None = None
    expected: str | None = None
    answer: str | None = None


def built_in(count: int, seed: int, *, tokens_each: int = 0) -> list[Ask]:
    """Rule 1. Takes about 2 ms of processor time for each, as few problems are held out: do it before a run.

    `tokens_each`: so many output tokens are asked for, for each problem that a prompt numbers; 0: the profile's.
    """
    rng = Random(f"loadgen/problems/{seed}")
    return [of_problem(tasks.sample(rng, "held_out"), tokens_each) for _ in range(count)]


def read_asks(path: Path) -> list[Ask]:
    """Rule 2. Raises ConfigError, naming the line."""
    asks = []
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    asks.append(_ask(line, f"{path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"cannot read the prompts: {error}") from None
    if not asks:
        raise ConfigError(f"{path} holds no prompts")
    return asks


def matches(expected: str, text: str) -> bool:
    """Rule 3."""
    return _result(text) == _result(expected)


def _ask(encoded: bytes, place: str) -> Ask:
    try:
        line = msgspec.json.decode(encoded, type=Line)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"{place}: {error}") from None
    if [line.prompt, line.messages, line.question].count(None) != 2:
        raise ConfigError(f'{place}: it needs one of "prompt", "messages" and "question"')
    expected = line.answer if line.expected is None else line.expected
    is_correct = None if expected is None else partial(matches, expected)
    if line.prompt is not None:
        return Ask("/v1/completions", {"prompt": line.prompt}, is_correct, expected)
    messages = line.messages or [ChatMessage("user", line.question or "")]
    return _chat(msgspec.to_builtins(messages), is_correct, expected)


def of_problem(problem: tasks.Problem, tokens_each: int = 0) -> Ask:
    """A chat of one message."""
    ask = _chat([{"role": "user", "content": problem.prompt}], partial(tasks.is_correct, problem), problem.answer)
    if tokens_each:
        parts = max(1, problem.answer.count("####"))
        ask.content["max_tokens"] = min(tokens_each * parts, _LONGEST)
    return ask


def _chat(messages: list[dict[str, str]], is_correct: Callable[[str], bool] | None, reference: str | None) -> Ask:
    return Ask("/v1/chat/completions", {"messages": messages}, is_correct, reference)


def _result(text: str) -> str:
    return re.sub(r"(?<=\d),(?=\d)", "", text.rpartition("####")[2].strip())
