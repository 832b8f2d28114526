"""python -m tools.judge: scores answers by a language model; prints a table, writes JSON Lines. Can be resumed.

Exit codes: 0 all are judged, 1 some are not (run it again), 2 wrong options, a wrong file, or a judge that refuses.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from services.settings import ConfigError
from tools.judge.endpoint import Judge, NoVerdict, Policy, open_judge
from tools.judge.files import Answer, Scores, open_scores, read_answers
from tools.judge.rubric import RESPONSE_FORMATS, VERSION
from tools.judge.summary import describe, summarise

_SHOWN_FAILURES = 5


def main(words: Sequence[str] | None = None) -> int:
    options = _parse(words)
    try:
        answers, without = read_answers(options.answers, options.model)
        with open_scores(options.out) as scores:
            try:
                asyncio.run(_run(options, answers, scores))
            except KeyboardInterrupt:
                print("judge: stopped; the same command goes on from here", file=sys.stderr)
            wanted = {(answer.number, answer.key) for answer in answers}
            found = {(s.number, s.key): s for s in scores.found if (s.number, s.key) in wanted}
        summary = summarise(list(found.values()), len(answers), without)
        document = {"judge": options.model, "rubric": VERSION, "answers_file": str(options.answers), "summary": summary}
        encoded = msgspec.json.format(msgspec.json.encode(document))
        options.out.with_suffix(".summary.json").write_bytes(encoded + b"\n")
    except (ConfigError, OSError) as error:
        print(f"judge: {error}", file=sys.stderr)
        return 2
    print(describe(summary))
    return 0 if summary.judged == summary.answers else 1


def _parse(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.judge",
        description="Scores answers from 0 to 10 by a language model. OPENAI_API_KEY is sent as its key.",
    )
    add = parser.add_argument
    add("answers", type=Path, help="JSONL, as `python -m tools.loadgen --answers` writes it")
    add("--url", required=True, help="of the judge, up to /v1: https://api.openai.com/v1")
    add("--model", required=True, help="the judge's name there")
    add("--out", type=Path, required=True, help="JSONL of scores; what is in it is not asked again")
    add("--concurrency", type=_count, default=8, help="verdicts that are asked for at a time (default: 8)")
    add("--attempts", type=_count, default=6, help="for each verdict (default: 6)")
    add("--max-backoff-s", type=float, default=30.0, help="longest wait between them (default: 30)")
    add("--timeout-s", type=float, default=120.0, help="of one attempt (default: 120)")
    add(
        "--response-format",
        choices=["auto", *RESPONSE_FORMATS],
        default="auto",
        help="auto: the strictest that the endpoint takes",
    )
    return parser.parse_args(words)


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return int(text)


async def _run(options: argparse.Namespace, answers: list[Answer], scores: Scores) -> None:
    """Judges what is not judged yet. Raises ConfigError where the judge refuses altogether."""
    policy = Policy(options.attempts, max_backoff_s=options.max_backoff_s, timeout_s=options.timeout_s)
    groups = _groups(answers, scores)
    async with open_judge(
        options.url,
        options.model,
        policy,
        concurrency=options.concurrency,
        api_key=os.environ.get("OPENAI_API_KEY", ""),
        response_format=options.response_format,
    ) as judge:
        run = _Run(judge, scores, groups)
        try:
            async with asyncio.TaskGroup() as tasks:
                for _ in range(min(options.concurrency, len(groups))):
                    tasks.create_task(run.work())
        except* ConfigError as errors:
            raise errors.exceptions[0] from None


def _groups(answers: list[Answer], scores: Scores) -> list[list[Answer]]:
    """The answers that want a verdict, together where it is the same one. Those whose verdict is known get it here."""
    known = {score.key: score.verdict for score in scores.found}
    done = {(score.number, score.key) for score in scores.found}
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        if (answer.number, answer.key) in done:
            continue
        if answer.key in known:
            scores.add(answer, known[answer.key])
        else:
            groups.setdefault(answer.key, []).append(answer)
    return list(groups.values())


class _Run:
    """As many `work` as are to be under way at a time take groups from one iterator."""

    def __init__(self, judge: Judge, scores: Scores, groups: list[list[Answer]]) -> None:
        self._judge = judge
        self._scores = scores
        self._waiting: Iterator[list[Answer]] = iter(groups)
        self._total = len(groups)
        self._done = self._failed = 0

    async def work(self) -> None:
        for group in self._waiting:
            first = group[0]
            try:
                verdict = await self._judge.ask(first.question, first.answer, first.reference)
            except NoVerdict as error:
                self._failed += 1
                if self._failed <= _SHOWN_FAILURES:
                    print(f"judge: line {first.number}: {error}", file=sys.stderr)
            else:
                for answer in group:
                    self._scores.add(answer, verdict)
            self._done += 1
            self._show()

    def _show(self) -> None:
        """One line that is written over; on a terminal only."""
        if sys.stderr.isatty():
            end = "\n" if self._done == self._total else ""
            told = f"{self._done} of {self._total} asked, {self._failed} without verdict, {self._judge.retries} retries"
            print(f"\r{told}\x1b[K", end=end, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
