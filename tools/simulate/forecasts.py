"""Forecasts of steps left, of several kinds. When one is due the live predictor's policy says.

- `trees`: the profile's trained predictor, as it runs live.
- `remembered`: the same, but what was asked before is not computed again. Where requests denoise as recorded ones did,
  the same questions come often.
- `oracle`: what is truly left at each threshold. It looks at the request itself, not at the report.
- `blurred`: the oracle's number times a random factor of mean 1. Half of its variance is the request's own, the other
  half is drawn anew for each forecast. `error` is the mean of |forecast - truth| over the mean of the truth.
- `first`: what requests need on average, said once; afterwards it only counts down.
Upper bounds are those of the trees; of the blurred ones the 90 % quantile of the factor; else the mean itself.
"""

import math
from collections.abc import Callable, Sequence
from random import Random
from typing import Literal, Protocol, TypeAlias

from contracts.messages import RequestForecast, RequestReport
from services.step_predictor.model import StepModel
from tools.simulate.denoising import Behaviour, Course

ForecastKind: TypeAlias = Literal["trees", "remembered", "oracle", "blurred", "first", "none"]
_Q90 = 1.2816  # standard deviations
_MEAN_OF_NORMAL = math.sqrt(2 / math.pi)  # of its absolute value
_MAX_REMEMBERED = 200_000
_State: TypeAlias = tuple[object, ...]
_Forecast: TypeAlias = tuple[tuple[float, ...], tuple[float, ...], tuple[float, ...]]
CourseOf: TypeAlias = Callable[[str], Course]


class Forecaster(Protocol):
    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        """One for each."""


class Trees:
    """As the live service calls it."""

    def __init__(self, model: StepModel, thresholds: Sequence[float], upper_level: float) -> None:
        self._model, self._thresholds = model, thresholds
        self._level = model.card.upper.level_for(upper_level)

    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        return self._model.forecast(requests, self._thresholds, self._level)


class Remembered:
    """Asks another one only what was not asked before."""

    def __init__(self, trees: Forecaster) -> None:
        self._trees = trees
        self._known: dict[_State, _Forecast] = {}

    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        new = {state: r for r in requests if (state := _state(r)) not in self._known}
        if len(self._known) + len(new) > _MAX_REMEMBERED:
            self._known.clear()
            new = {_state(r): r for r in requests}
        for state, found in zip(new, self._trees.forecast(list(new.values())), strict=True):
            self._known[state] = found.steps_left, found.steps_left_upper, found.blocks_left
        return [RequestForecast(r.request_id, r.attempt, r.steps, *self._known[_state(r)]) for r in requests]


def _state(r: RequestReport) -> _State:
    """All that the features are made of."""
    return (
        *(r.block_index, r.num_blocks, r.steps, r.steps_in_block, r.tokens_committed, r.tokens_committed_in_block),
        *(r.threshold, r.confidence, r.prompt_tokens, r.tokens_left_in_block, r.ends_in_block),
    )


class Oracle:
    """`blur`: turns a request id and a true number into mean and upper bound."""

    def __init__(self, course_of: CourseOf, thresholds: Sequence[float], blur: "Blur | None" = None) -> None:
        self._course_of, self._thresholds, self._blur = course_of, thresholds, blur

    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        return [self._of(request) for request in requests]

    def _of(self, request: RequestReport) -> RequestForecast:
        course = self._course_of(request.request_id)
        left = [course.left(threshold) for threshold in self._thresholds]
        factor, upper = self._blur.draw(request.request_id) if self._blur else (1.0, 1.0)
        return RequestForecast(
            request.request_id,
            request.attempt,
            course.steps,
            tuple([factor * one.steps for one in left]),
            tuple([upper * one.steps for one in left]),
            tuple([one.blocks for one in left]),
        )


class Blur:
    """Random factors, log-normal, of mean 1."""

    def __init__(self, error: float, rng: Random) -> None:
        self._sigma, self._rng = error / _MEAN_OF_NORMAL, rng
        self._own: dict[str, float] = {}  # of each request, in standard deviations

    def draw(self, request_id: str) -> tuple[float, float]:
        """For the mean, and for the upper bound."""
        own = self._own.get(request_id)
        if own is None:
            own = self._own[request_id] = self._rng.gauss(0.0, 1.0)
        deviation = (own + self._rng.gauss(0.0, 1.0)) / math.sqrt(2)
        factor = math.exp(self._sigma * deviation - self._sigma**2 / 2)
        return factor, factor * math.exp(self._sigma * _Q90)


class First:
    """One for all requests (they are of one size); blocks as far as the mean has them left."""

    def __init__(self, behaviour: Behaviour, thresholds: Sequence[float]) -> None:
        self._means = [behaviour.mean(threshold) for threshold in thresholds]

    def forecast(self, requests: Sequence[RequestReport]) -> list[RequestForecast]:
        return [self._of(request) for request in requests]

    def _of(self, r: RequestReport) -> RequestForecast:
        begun = r.block_index + (r.steps_in_block > 0)
        steps = tuple([max(mean.steps - r.steps, 1.0) for mean in self._means])
        blocks = tuple([max(mean.blocks - begun, 0.0) for mean in self._means])
        return RequestForecast(r.request_id, r.attempt, r.steps, steps, steps, blocks)
