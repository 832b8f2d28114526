"""Short ways to make what the controller's tests need. Times are small numbers on the policy's own clock."""

from typing import Any

from msgspec.structs import replace

from contracts import messages as m
from services.costs import LatencyProfile, PassCost
from services.profile import Decoding, EngineSection, Limits, Profile
from services.threshold_controller import events as e
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from tests import builders
from tests.builders import BLOCK, MODEL

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
PROFILE = Profile(
    model=MODEL,
    decoding=Decoding(block_size=BLOCK, thresholds=THRESHOLDS, steps_by_threshold=(4.0, 5.0, 6.0, 7.0, 8.0)),
    limits=Limits(max_context_tokens=1024, max_output_tokens=256),
    engine=EngineSection(),
)
LATENCY = LatencyProfile({1: PassCost(curve=((0.0, 1.0), (1000.0, 101.0)))})  # 1 ms and 0.1 ms a token


def opened(least: float) -> Profile:
    """Half of each block is an opening, for those that run at `least` or more."""
    return replace(PROFILE, decoding=replace(PROFILE.decoding, opening_share=0.5, opening_from=least))


def make_fresh(profile: Profile = PROFILE, latency: LatencyProfile = LATENCY, **config: Any) -> ThresholdController:
    """One that has heard nothing yet. No margins, and plans for the mean."""
    settings = ThresholdControllerConfig(
        **({"margin_s": 0.0, "ahead_share": 0.0, "rise_margin": 0.0, "risk": 0.0, "settle_s": 0.0} | config)
    )
    return ThresholdController(settings, profile, latency)


def make_controller(*instance_ids: str, **settings: Any) -> ThresholdController:
    """One that decides, at time 0, with these instances and no request. `settings`: of `make_fresh`."""
    controller = make_fresh(**settings)
    controller.handle(e.CaughtUp(), 0.0)
    for instance_id in instance_ids:
        controller.handle(status(instance_id), 0.0)
    controller.handle(e.Tick(), 0.0)
    return controller


def seen(
    request: m.GenerateRequest | str = "r1",
    seq: int = 1,
    deadline: float | None = None,
    *,
    slo_s: float = 1.0,
    expires_at: float = 100.0,
    **fields: Any,
) -> e.RequestSeen:
    """`fields`: of the request, which writes two blocks after a prompt of one."""
    if isinstance(request, str):
        at = None if deadline is None else 1000.0 + slo_s
        request = builders.make_request(request, **({"deadline_at": at} | fields))
    return e.RequestSeen(request, seq, expires_at, deadline)


def status(instance_id: str = "a", *holds: m.Held, **fields: Any) -> e.StatusSeen:
    return e.StatusSeen(builders.make_status(instance_id, holds, **({"kv_tokens": 96 * 4} | fields)))


def held(request_id: str = "r1", attempt: int = 1, blocks_done: int = 0) -> m.Held:
    return builders.make_held(builders.make_request(request_id), attempt, blocks_done)


def entry(request_id: str = "r1", steps: int = 1, **fields: Any) -> m.RequestReport:
    """One that has run `steps` steps of its first block."""
    defaults: dict[str, Any] = {
        "attempt": 1,
        "block_index": 0,
        "num_blocks": 2,
        "steps_in_block": steps,
        "tokens_committed": 0,
        "tokens_committed_in_block": 0,
        "threshold": 0.9,
        "confidence": (0.0, 0.0, 0.0, 0.0, 0.0),
        "next_recompute": False,
        "finished": False,
    }
    return m.RequestReport(request_id=request_id, steps=steps, **(defaults | fields))


def report(instance_id: str = "a", *entries: m.RequestReport, ratio: float = 1.0) -> e.ReportSeen:
    return e.ReportSeen(m.Report(instance_id=instance_id, sent_at=0.0, entries=list(entries), latency_ratio=ratio))


def forecast(
    request_id: str = "r1",
    steps_left: tuple[float, ...] = (4.0, 6.0, 8.0, 10.0, 12.0),
    *,
    spread: float = 0.0,
    blocks_left: float = 2.0,
    steps: int = 0,
    attempt: int = 1,
    instance_id: str = "a",
    thresholds: tuple[float, ...] = THRESHOLDS,
) -> e.ForecastSeen:
    """`spread`: of the upper bound above the mean, in parts of it."""
    made = m.RequestForecast(
        request_id=request_id,
        attempt=attempt,
        steps=steps,
        steps_left=steps_left,
        steps_left_upper=tuple(left * (1 + spread) for left in steps_left),
        blocks_left=(blocks_left,) * len(steps_left),
    )
    return e.ForecastSeen(m.Forecast(instance_id=instance_id, sent_at=0.0, thresholds=thresholds, entries=[made]))


def record(
    request_id: str = "r1", state: m.State = "running", holder: str = "a", seq: int = 1, **fields: Any
) -> e.RecordSeen:
    return e.RecordSeen(builders.make_record(request_id, state, holder=holder, **fields), seq)


def told(commands: list[e.Command]) -> dict[str, tuple[float, str]]:
    """Threshold and reason by request, of the messages to instances among the commands."""
    sent = [command for command in commands if isinstance(command, e.SendThresholds)]
    return {d.request_id: (d.threshold, d.reason) for command in sent for d in command.decisions}


def decisions(controller: ThresholdController) -> dict[str, tuple[float, str]]:
    """Threshold and reason of all requests that instances hold."""
    found = {}
    for request_id, open_ in controller._open.items():
        if open_.decision is not None:
            found[request_id] = (open_.decision.threshold, open_.decision.reason)
    return found


def caps(controller: ThresholdController) -> dict[str, float]:
    return {request_id: controller.thresholds[open_.cap] for request_id, open_ in controller._open.items()}
