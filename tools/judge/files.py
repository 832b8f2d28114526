"""The answers that are judged, and the file of scores that grows beside them.

1. A line of answers, as `python -m tools.loadgen --answers` writes it, is {"answer": text} with "prompt", "messages" or
   "question", and "reference" where a right answer is known; "is_correct" is taken along. Lines of requests that
   failed ("error") are counted and left out.
2. `key` names what the judge is asked: question, answer, reference, and which judge by which rubric. Lines with the
   same key get the same verdict, and it is asked for once.
3. Scores are one JSON object a line, written through as they come. A kill may leave a torn last line, which is cut off;
   the next run takes what is there as done. Two runs never write to one file.
"""

import contextlib
import fcntl
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from services.settings import ConfigError
from tools.judge.rubric import VERSION, Verdict
from tools.traces.prompts import ChatMessage

T = TypeVar("T")


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """A line of answers; what it holds besides is ignored."""

    prompt: str | None = None
    question: str | None = None
    messages: list[ChatMessage] | None = None
    answer: str | None = None
    reference: str | None = None
    is_correct: bool | None = None
    error: str = ""


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """An answer to judge."""

    number: int  # of its line, from 1
    key: str
    question: str
    answer: str
    reference: str | None
    is_correct: bool | None


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the scores. `question` and `answer` are there for who reads it."""

    number: int
    key: str
    score: float
    verdict: Verdict
    is_correct: bool | None = None
    question: str = ""
    answer: str = ""


def read_answers(path: Path, model: str) -> tuple[list[Answer], int]:
    """The answers for this judge, and how many lines had none. Raises ConfigError, naming the line."""
    answers, without = [], 0
    try:
        with path.open("rb") as file:
            for number, encoded in enumerate(file, start=1):
                if encoded.strip():
                    line = _decode(encoded, Line, f"{path}, line {number}")
                    if line.error:
                        without += 1
                    else:
                        answers.append(_answer(line, number, model, f"{path}, line {number}"))
    except OSError as error:
        raise ConfigError(f"cannot read the answers: {error}") from None
    if not answers:
        raise ConfigError(f"{path} holds no answers")
    return answers, without


def _answer(line: Line, number: int, model: str, place: str) -> Answer:
    asked: list[Any] = [what for what in (line.prompt, line.question, line.messages) if what is not None]
    if len(asked) != 1 or line.answer is None:
        raise ConfigError(f'{place}: it needs "answer" and one of "prompt", "question" and "messages"')
    question = asked[0] if isinstance(asked[0], str) else _conversation(asked[0])
    told = json.dumps([VERSION, model, question, line.answer, line.reference])
    return Answer(
        number=number,
        key=hashlib.blake2b(told.encode(errors="surrogatepass"), digest_size=12).hexdigest(),
        question=question,
        answer=line.answer,
        reference=line.reference,
        is_correct=line.is_correct,
    )


def _conversation(messages: list[ChatMessage]) -> str:
    """One message alone is its text."""
    if len(messages) == 1:
        return messages[0].content
    return "\n\n".join(f"{message.role}: {message.content}" for message in messages)


class Scores:
    """The file of scores; see `open_scores`."""

    def __init__(self, file: BinaryIO, found: list[Score]) -> None:
        self._file = file
        self.found = found  # all of it, what is added too

    def add(self, answer: Answer, verdict: Verdict) -> None:
        """Raises OSError."""
        score = Score(
            number=answer.number,
            key=answer.key,
            score=round(verdict.score, 3),
            verdict=verdict,
            is_correct=answer.is_correct,
            question=answer.question,
            answer=answer.answer,
        )
        self._file.write(msgspec.json.encode(score) + b"\n")
        self._file.flush()
        self.found.append(score)


@contextlib.contextmanager
def open_scores(path: Path) -> Iterator[Scores]:
    """Rule 3. Raises ConfigError."""
    try:
        file = path.open("a+b")
    except OSError as error:
        raise ConfigError(f"cannot write the scores: {error}") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"another run writes to {path}") from None
        file.seek(0)
        content = file.read()
        whole = content[: content.rfind(b"\n") + 1]
        file.truncate(len(whole))
        lines = enumerate(whole.splitlines(), start=1)
        yield Scores(file, [_decode(line, Score, f"{path}, line {number}") for number, line in lines])


def _decode(encoded: bytes, wanted: type[T], place: str) -> T:
    try:
        return msgspec.json.decode(encoded, type=wanted)
    except ValueError as error:  # msgspec's are, and so are those of bytes that are no UTF-8
        raise ConfigError(f"{place}: {error}") from None
