"""Which requests need a new forecast. Pure.

For each request in a report, in this order:
1. One of an earlier attempt than is known is ignored: its worker has been shut out. One that has finished is forgotten.
2. A report without a prompt length is ignored: it comes from a worker of a version that does not say enough.
3. A forecast is due for a request that is not known, or has gone back (a new attempt, fewer tokens): `new`;
4. and for one that has committed `refresh_tokens` more tokens than at its last forecast: `progress`. In between a
   forecast counts down by one a step, which is its readers' doing: it says how many steps had been run.
5. After `StatusAsk` all requests count as not known: whoever asks has heard none of their forecasts.
6. A request that nobody has reported for `forget_after_s`, or that is one too many, is forgotten.
"""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

from contracts import messages as m
from services.step_predictor.config import StepPredictorConfig

Reason: TypeAlias = Literal["new", "progress"]
Event: TypeAlias = m.Report | m.StatusAsk


@dataclass(frozen=True, slots=True)
class Predict:
    """Forecast this request, as it stands, and tell who follows that instance."""

    instance_id: str
    request: m.RequestReport
    reason: Reason


class _Known(NamedTuple):
    """A request at its last forecast."""

    attempt: int
    tokens: int  # committed; -1: a forecast is due whatever is committed
    heard: float  # its last report, monotonic seconds


class StepPredictor:
    """The decisions. `handle` an event, carry the commands out in order."""

    def __init__(self, config: StepPredictorConfig, refresh_tokens: int) -> None:
        """`refresh_tokens`: what the model was measured to bear; the configuration's, where set, wins."""
        self._config = config
        self.refresh_tokens = config.refresh_tokens or refresh_tokens
        self._known: OrderedDict[str, _Known] = OrderedDict()  # by request id, longest silent first

    @property
    def num_known(self) -> int:
        """Requests that are followed."""
        return len(self._known)

    def handle(self, event: Event, now: float) -> list[Predict]:
        """`now`: monotonic seconds."""
        match event:
            case m.Report():
                commands = [
                    Predict(event.instance_id, request, reason)
                    for request in event.entries
                    if (reason := self._judge(request, now))
                ]
                self._forget(now)
                return commands
            case m.StatusAsk():
                for request_id, known in self._known.items():
                    self._known[request_id] = known._replace(tokens=-1)
                return []

    def _judge(self, request: m.RequestReport, now: float) -> Reason | None:
        """Takes the report in. None: no forecast is due."""
        known = self._known.get(request.request_id)
        if known is not None and request.attempt < known.attempt:
            return None
        if request.finished:
            self._known.pop(request.request_id, None)
            return None
        if not request.prompt_tokens:
            return None
        reason = self._due(request, known)
        tokens = request.tokens_committed if reason or known is None else known.tokens
        self._known[request.request_id] = _Known(request.attempt, tokens, now)
        self._known.move_to_end(request.request_id)
        return reason

    def _due(self, request: m.RequestReport, known: _Known | None) -> Reason | None:
        if known is None or known.tokens < 0 or request.attempt > known.attempt:
            return "new"
        if request.tokens_committed < known.tokens:
            return "new"
        return "progress" if request.tokens_committed - known.tokens >= self.refresh_tokens else None

    def _forget(self, now: float) -> None:
        while self._known:
            oldest = next(iter(self._known))
            silent_s = now - self._known[oldest].heard
            if silent_s < self._config.forget_after_s and len(self._known) <= self._config.max_requests:
                return
            del self._known[oldest]

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        heard = [known.heard for known in self._known.values()]
        assert heard == sorted(heard), "longest silent first"
        assert len(self._known) <= self._config.max_requests
