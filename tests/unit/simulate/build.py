"""Small clusters whose times can be worked out by hand: a pass takes 1 ms and 0.01 ms a token, messages take none."""

from collections.abc import Sequence
from typing import Any

from services.costs import LatencyProfile, PassCost
from services.profile import Decoding, EngineSection, Limits, Profile
from services.scheduler.config import SchedulerConfig
from services.scheduler.policy import Scheduler
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.policy import ThresholdController
from tools.simulate.cluster import Cluster, Policies, Setting
from tools.simulate.denoising import Counted, StepCounts
from tools.simulate.forecasts import Oracle
from tools.simulate.workload import Arrival

THRESHOLDS = (0.5, 0.7, 0.9)
STEPS = ((16, 24, 40), (16, 30, 40), (20, 18, 60))  # of three requests, over 4 blocks
COUNTS = StepCounts(
    source="made up",
    output_tokens=128,
    block_size=32,
    prompt_tokens=(72, 72),
    prompt_tokens_source="made up",
    thresholds=THRESHOLDS,
    accuracy=(0.5, 0.7, 0.8),
    steps=STEPS,
)
LATENCY = LatencyProfile({1: PassCost(curve=((0.0, 1.0), (1000.0, 11.0)))})
CANVAS = 72 + 128
RECOMPUTE_S, CACHE_S = 0.003, 0.00132  # of one request alone


def make_profile(**decoding: Any) -> Profile:
    return Profile(
        model="made-up",
        decoding=Decoding(thresholds=THRESHOLDS, steps_by_threshold=(4.3, 6.0, 11.7), **decoding),
        limits=Limits(max_context_tokens=512, max_output_tokens=128, time_limit_s=30.0),
        engine=EngineSection(kv_tokens=4 * CANVAS, max_requests=8, max_pass_tokens=2048),
    )


def make_setting(instances: int = 1, **changes: Any) -> Setting:
    nothing = {"delay_s": 0.0, "jitter_s": 0.0, "gateway_s": 0.0, "step_overhead_s": 0.0, "predict_s": 0.0}
    setting = Setting(make_profile(), LATENCY, (1,) * instances, kv_tokens=4 * CANVAS, slo_s=0.5)
    return setting._replace(**(nothing | changes))


def live(setting: Setting, *, controlled: bool = True, fill_share: float = 0.5, **controller: Any) -> Policies:
    """The live policies, with an oracle; or the scheduler alone."""
    scheduler = Scheduler(SchedulerConfig(fill_share=fill_share), setting.profile, setting.latency, epoch=1)
    if not controlled:
        return Policies(scheduler)
    settings = ThresholdControllerConfig(**controller)
    return Policies(
        scheduler,
        ThresholdController(settings, setting.profile, setting.latency),
        lambda course_of: Oracle(course_of, THRESHOLDS),
    )


def make_cluster(
    setting: Setting, policies: Policies, at: Sequence[float], prompts: Sequence[int] | None = None
) -> Cluster:
    """Requests that arrive at these times; each asks the first prompt, or that of its place."""
    asked = prompts or [0] * len(at)
    arrivals = [Arrival(time, prompt, n) for n, (time, prompt) in enumerate(zip(at, asked, strict=True))]
    return Cluster(setting, policies, Counted(COUNTS), arrivals)
