"""How right forecasts were, once their requests have ended. Pure.

1. Of each forecast is kept what it said for the threshold that its request had; between two thresholds, in proportion.
2. The last report of the request judges them all: the error is the difference to the steps that did follow, as a share
   of these. What was forecast early and what late is told apart by the quarter of the steps that were run by then.
3. `kept`: no later report had another threshold. `turned`: one had, so the error is not the predictor's alone.
4. Another attempt, or fewer steps than before, means that steps were lost: earlier forecasts are forgotten.
5. Of one request too many that which was silent for longest is forgotten; of one forecast too many, the oldest.
"""

from bisect import bisect_left
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

from contracts import messages as m

Quarter: TypeAlias = Literal["0-25", "25-50", "50-75", "75-100"]
QUARTERS: tuple[Quarter, ...] = ("0-25", "25-50", "50-75", "75-100")

_MAX_FORECASTS = 64  # kept of one request


class Judged(NamedTuple):
    """How far off one forecast was."""

    error: float  # 0.1: a tenth more, or less, than the steps that did follow
    progress: Quarter  # of its request's steps, those that were run by then
    threshold: Literal["kept", "turned"]


class _Said(NamedTuple):
    steps: int  # that were run by then
    steps_left: float


@dataclass(slots=True)
class _Followed:
    attempt: int
    steps: int = 0
    said: deque[_Said] = field(default_factory=lambda: deque(maxlen=_MAX_FORECASTS))
    turned_at: int = -1  # steps that were run when the threshold was last seen to have changed
    threshold: float = -1.0


class Hindsight:
    """Told of every report and every forecast, in their order."""

    def __init__(self, thresholds: Sequence[float], max_requests: int) -> None:
        """`thresholds`: those of every forecast, ascending."""
        self._thresholds = thresholds
        self._max_requests = max_requests
        self._followed: OrderedDict[str, _Followed] = OrderedDict()  # by request id, longest silent first

    @property
    def num_followed(self) -> int:
        return len(self._followed)

    def note_report(self, report: m.RequestReport) -> list[Judged]:
        """What the forecasts of a request that has ended were worth; nothing while it goes on."""
        followed = self._followed.pop(report.request_id, None)
        if followed is not None and report.attempt < followed.attempt:
            self._followed[report.request_id] = followed  # its worker has been shut out
            return []
        if followed is None or report.attempt > followed.attempt or report.steps < followed.steps:
            followed = _Followed(report.attempt)
        if report.finished:
            return [
                _judge(said, report.steps, followed.turned_at) for said in followed.said if said.steps < report.steps
            ]
        if report.threshold != followed.threshold:
            followed.threshold, followed.turned_at = report.threshold, report.steps
        followed.steps = report.steps
        self._followed[report.request_id] = followed
        if len(self._followed) > self._max_requests:
            self._followed.popitem(last=False)
        return []

    def note_forecast(self, report: m.RequestReport, forecast: m.RequestForecast) -> None:
        """What was made of that report. The request may have ended meanwhile."""
        followed = self._followed.get(report.request_id)
        if followed is not None and followed.attempt == report.attempt and report.steps <= followed.steps:
            said = _at(report.threshold, self._thresholds, forecast.steps_left)
            followed.said.append(_Said(report.steps, said))


def _judge(said: _Said, steps: int, turned_at: int) -> Judged:
    followed = steps - said.steps
    return Judged(
        error=abs(said.steps_left - followed) / followed,
        progress=QUARTERS[4 * said.steps // steps],
        threshold="turned" if turned_at > said.steps else "kept",
    )


def _at(threshold: float, thresholds: Sequence[float], values: Sequence[float]) -> float:
    """The value at that threshold; beyond the first and the last one theirs."""
    above = bisect_left(thresholds, threshold)
    if above in (0, len(thresholds)):
        return values[min(above, len(thresholds) - 1)]
    (low, high), (value_low, value_high) = thresholds[above - 1 : above + 1], values[above - 1 : above + 1]
    return value_low + (value_high - value_low) * (threshold - low) / (high - low)
