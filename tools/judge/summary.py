"""What the scores come to. Pure."""

import math
from collections.abc import Sequence
from statistics import fmean, median, stdev

import msgspec

from tools.judge.files import Score
from tools.judge.rubric import CRITERIA


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """Of points from 0 to 10."""

    mean: float
    half_width: float  # of the mean's 95 % confidence interval (normal approximation)
    deviation: float  # standard deviation of the answers
    lowest: float
    median: float
    highest: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """Of one run's answers."""

    answers: int
    judged: int
    without_answer: int  # lines of requests that had failed
    criteria: dict[str, Spread]  # "score" and each criterion; empty if nothing is judged
    correct: Spread | None  # scores of answers that the exact check found right
    wrong: Spread | None


def summarise(scores: Sequence[Score], answers: int, without_answer: int) -> Summary:
    """Of `answers` answers, those in `scores` are judged."""
    columns = {"score": [found.score for found in scores]}
    columns |= {name: [getattr(found.verdict, name) for found in scores] for name in CRITERIA}
    return Summary(
        answers=answers,
        judged=len(scores),
        without_answer=without_answer,
        criteria={name: _spread(points) for name, points in columns.items()} if scores else {},
        correct=_where(scores, True),
        wrong=_where(scores, False),
    )


def _where(scores: Sequence[Score], is_correct: bool) -> Spread | None:
    points = [found.score for found in scores if found.is_correct is is_correct]
    return _spread(points) if points else None


def _spread(points: Sequence[float]) -> Spread:
    deviation = stdev(points) if len(points) > 1 else 0.0
    return Spread(
        mean=round(fmean(points), 4),
        half_width=round(1.96 * deviation / math.sqrt(len(points)), 4),
        deviation=round(deviation, 4),
        lowest=min(points),
        median=median(points),
        highest=max(points),
    )


def describe(summary: Summary) -> str:
    """A Markdown table."""
    rows = dict(summary.criteria)
    rows |= {"score, exact check right": summary.correct} if summary.correct else {}
    rows |= {"score, exact check wrong": summary.wrong} if summary.wrong else {}
    lines = ["| points, 0 to 10 | mean | deviation | lowest | median | highest |", "|---|---|---|---|---|---|"]
    lines += [
        f"| {name} | {spread.mean:.2f} ± {spread.half_width:.2f} | {spread.deviation:.2f} | {spread.lowest:g} "
        f"| {spread.median:g} | {spread.highest:g} |"
        for name, spread in rows.items()
    ]
    told = f"{summary.judged} of {summary.answers} answers judged"
    if summary.without_answer:
        told += f"; {summary.without_answer} requests had failed and have none"
    return "\n".join([*(lines if rows else []), "", told + "."])
