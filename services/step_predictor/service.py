"""The step-predictor's I/O: reports in, forecasts out.

All that is due when the event loop comes round is predicted at once, over requests and thresholds, and goes out as one
message for each instance. Of a request only its newest report counts, so what waits is bounded by the requests known.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from prometheus_client import Counter, Gauge, Histogram

from contracts import messages as m
from contracts import subjects
from services.profile import load_profile
from services.runtime import Runtime
from services.step_predictor.config import StepPredictorConfig
from services.step_predictor.hindsight import Hindsight
from services.step_predictor.model import StepModel
from services.step_predictor.policy import Event, Predict, StepPredictor

logger = logging.getLogger(__name__)

FORECASTS = Counter("tediserve_step_predictor_forecasts", "Forecasts of requests, by what made them due", ["reason"])
KNOWN = Gauge("tediserve_step_predictor_known_requests", "Requests that are followed")
BATCH = Histogram(
    "tediserve_step_predictor_batch_requests", "Requests predicted at once", buckets=(1, 2, 4, 8, 16, 32, 64, 128, 256)
)
ERROR = Histogram(
    "tediserve_step_predictor_error_ratio",
    "Of each forecast, once its request has ended: how far off it was, as a share of the steps that did follow",
    ["progress", "threshold"],
    buckets=(0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.0, 5.0),
)
PREDICT_S = Histogram(
    "tediserve_step_predictor_seconds",
    "Time that one batch took",
    buckets=(1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1),
)

_MAX_BATCH = 256  # requests; then others have their turn on the event loop


def make_serve(config: StepPredictorConfig) -> Callable[[Runtime], Awaitable[None]]:
    """The service with its profile and model read. Raises ConfigError."""
    profile = load_profile(Path(config.profile))
    model = StepModel.of(profile)
    level = model.card.upper.level_for(config.upper_level)

    async def serve(runtime: Runtime) -> None:
        policy = StepPredictor(config, model.card.refresh_tokens)
        hindsight = Hindsight(profile.decoding.thresholds, config.max_requests)
        service = StepPredictorService(runtime, policy, hindsight, model, profile.decoding.thresholds, level)
        await service.start()
        logger.info("ready: %s, a forecast each %d tokens", profile.model, policy.refresh_tokens)
        await runtime.until_stopped()

    return serve


class StepPredictorService:
    """Feeds one policy object and one model."""

    def __init__(
        self,
        runtime: Runtime,
        policy: StepPredictor,
        hindsight: Hindsight,
        model: StepModel,
        thresholds: tuple[float, ...],
        level: int,
    ) -> None:
        self._runtime, self._bus = runtime, runtime.bus
        self._policy, self._hindsight, self._model = policy, hindsight, model
        self._thresholds, self._level = thresholds, level
        self._loop = asyncio.get_running_loop()
        self._due: dict[str, Predict] = {}  # by request id
        self._predicting = False

    async def start(self) -> None:
        """Returns once nothing that is said from now on is missed."""
        KNOWN.set_function(lambda: self._policy.num_known)
        await self._bus.subscribe("report.*", m.Report, self._handle)
        await self._bus.subscribe(subjects.STATUS_ASK, m.StatusAsk, self._handle)
        await self._bus.flush()

    def _handle(self, event: Event) -> None:
        if isinstance(event, m.Report):
            self._look_back(event)
        for command in self._policy.handle(event, self._loop.time()):
            FORECASTS.labels(command.reason).inc()
            self._due[command.request.request_id] = command
        if self._due and not self._predicting:
            self._predicting = True
            self._runtime.spawn(self._predict(), name="predict")

    def _look_back(self, report: m.Report) -> None:
        for entry in report.entries:
            for judged in self._hindsight.note_report(entry):
                ERROR.labels(judged.progress, judged.threshold).observe(judged.error)

    async def _predict(self) -> None:
        while self._due:
            batch = [self._due.pop(request_id) for request_id in list(self._due)[:_MAX_BATCH]]
            started = time.perf_counter()
            requests = [command.request for command in batch]
            forecasts = self._model.forecast(requests, self._thresholds, self._level)
            PREDICT_S.observe(time.perf_counter() - started)
            BATCH.observe(len(batch))
            by_instance: dict[str, list[m.RequestForecast]] = {}
            for command, forecast in zip(batch, forecasts, strict=True):
                self._hindsight.note_forecast(command.request, forecast)
                by_instance.setdefault(command.instance_id, []).append(forecast)
            for instance_id, entries in by_instance.items():
                message = m.Forecast(instance_id, time.time(), self._thresholds, entries)
                await self._bus.publish(subjects.forecast(instance_id), message)
            await asyncio.sleep(0)
        self._predicting = False
