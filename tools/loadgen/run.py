"""Sends what is due when it is due, and waits for what comes of it.

1. Open loop: when a request goes out depends on the clock alone, never on answers.
2. What is due while `max_in_flight` are in flight is not sent, and that is an outcome too. Nothing queues up here.
3. It ends when all have ended; the endpoint's time limit bounds that.
"""

import asyncio
from collections.abc import Callable, Iterable
from typing import Any

from tools.loadgen.client import Endpoint, Failed
from tools.loadgen.schedule import Send
from tools.loadgen.tally import NOT_SENT, Outcome

OnOutcome = Callable[[Outcome], None]


class OpenLoop:
    """One run. `options`: of every request's body, beside what its Send says."""

    def __init__(
        self, endpoint: Endpoint, options: dict[str, Any], on_outcome: OnOutcome, *, max_in_flight: int
    ) -> None:
        self._endpoint = endpoint
        self._options = options
        self._on_outcome = on_outcome
        self._max_in_flight = max_in_flight
        self._clock = asyncio.get_running_loop().time
        self._started_at = self._clock()
        self.in_flight = self.most_in_flight = self.due = 0

    @property
    def ran_s(self) -> float:
        """Since it was started."""
        return self._clock() - self._started_at

    async def run(self, sends: Iterable[Send]) -> None:
        self._started_at = self._clock()
        async with asyncio.TaskGroup() as tasks:
            for send in sends:
                await asyncio.sleep(max(0.0, send.due_s - self.ran_s))
                self.due += 1
                if self.in_flight < self._max_in_flight:
                    self.in_flight += 1
                    self.most_in_flight = max(self.most_in_flight, self.in_flight)
                    tasks.create_task(self._ask(send))
                else:
                    lag_s = self.ran_s - send.due_s
                    self._on_outcome(Outcome(send, lag_s, lag_s, NOT_SENT))

    async def _ask(self, send: Send) -> None:
        lag_s = self.ran_s - send.due_s
        try:
            answer = await self._endpoint.ask(send.ask, self._options | _options_of(send))
        except Failed as failed:
            self._on_outcome(Outcome(send, lag_s, self.ran_s - send.due_s, failed.kind))
        else:
            self._on_outcome(
                Outcome(
                    send,
                    lag_s,
                    latency_s=self.ran_s - send.due_s,
                    first_text_s=None if answer.first_text_s is None else lag_s + answer.first_text_s,
                    tokens=answer.tokens,
                    steps=answer.steps,
                    mean_threshold=answer.mean_threshold,
                    moves=answer.moves,
                    is_correct=send.ask.is_correct(answer.text) if send.ask.is_correct else None,
                    answer=answer.text,
                )
            )
        finally:
            self.in_flight -= 1


def _options_of(send: Send) -> dict[str, Any]:
    told = {"slo_ms": send.slo_ms, "service_tier": send.tier}
    return {name: value for name, value in told.items() if value is not None}
