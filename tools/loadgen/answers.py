"""A file of all answers, one JSON object a line, as they come: for tools.judge, and to look at."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from services.settings import ConfigError
from tools.loadgen.tally import Outcome


@contextlib.contextmanager
def answers_file(path: Path | None) -> Iterator[Callable[[Outcome], None]]:
    """Takes outcomes; without a path it does nothing with them. Raises ConfigError."""
    if path is None:
        yield lambda outcome: None
        return
    try:
        file = path.open("wb")
    except OSError as error:
        raise ConfigError(f"cannot write the answers: {error}") from None

    def keep(outcome: Outcome) -> None:
        file.write(msgspec.json.encode(line_of(outcome)) + b"\n")

    with file:
        yield keep


def line_of(outcome: Outcome) -> dict[str, Any]:
    """What was asked and what came of it: `answer`, or `error`. What nobody knows is left out."""
    send = outcome.send
    told: dict[str, Any] = {"number": send.number, **send.ask.content}
    told |= {"error": outcome.error} if outcome.error else {"answer": outcome.answer}
    told |= {"reference": send.ask.reference, "is_correct": outcome.is_correct, "slo_ms": send.slo_ms}
    told |= {"tier": send.tier, "met": outcome.met, "latency_ms": round(1e3 * outcome.latency_s, 3)}
    told |= {"tokens": outcome.tokens or None, "steps": outcome.steps, "mean_threshold": outcome.mean_threshold}
    return {name: value for name, value in told.items() if value is not None}
