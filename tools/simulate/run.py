"""One simulation from its parts: what is asked for, made into a cluster, run, and summed up."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace

from contracts.messages import CacheMode
from services.costs import LatencyProfile, PassCost, load_latency, step_load
from services.profile import Profile, load_profile
from services.scheduler.config import SchedulerConfig
from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig
from tools.simulate.cluster import Cluster, Setting
from tools.simulate.denoising import Behaviour, Counted, interpolated, read_step_counts
from tools.simulate.forecasts import ForecastKind
from tools.simulate.results import Outcome, Summary, by_arrival, summarise
from tools.simulate.systems import Scene, system
from tools.simulate.workload import Phase, arrivals

PUBLISHED = Path(__file__).parent / "published"
GSM8K = PUBLISHED / "gsm8k-llada-8b.json"
_SLO_OVER_ALONE = 5.0
_MADE_UP_PROMPTS = (32, 128)  # tokens


class Job(NamedTuple):
    """What is to be simulated."""

    profile: Path
    system: str
    workload: str  # "profile", "gsm8k", or a folder of recorded traces
    phases: tuple[Phase, ...]
    tp_degrees: tuple[int, ...]
    most_requests: int | None = None
    slo_s: float | None = None  # None: five times a mean request alone, at the profile's threshold
    output_tokens: int | None = None
    prompt_tokens: tuple[int, int] | None = None
    kv_tokens: int | None = None
    thresholds: tuple[float, ...] | None = None  # instead of the profile's set
    forecasts: ForecastKind | None = None  # None: the profile's predictor for recorded traces, blurred ones else
    forecast_error: float = 0.19
    delay_s: float = 0.0005
    jitter_s: float = 0.0005
    step_overhead_s: float = 0.0005
    pass_noise: float = 0.0
    extra_pass_ms: float = 0.0  # on top of the latency profile, for policies as for instances: of a pass,
    extra_step_ms: float = 0.0  # and of each step in it
    seed: int = 0
    scheduler: SchedulerConfig = SchedulerConfig()
    controller: ThresholdControllerConfig = ThresholdControllerConfig()


class Result(NamedTuple):
    summary: Summary
    outcomes: list[Outcome]  # by arrival
    slo_s: float
    virtual_s: float
    load: float  # share of their time that instances spent in passes


def simulate(job: Job, on_progress: Callable[[Cluster], object] | None = None) -> Result:
    """Raises ConfigError where the parts do not fit together."""
    chosen = system(job.system)
    profile, latency = read_profile(job, chosen.cache)
    behaviour = read_behaviour(job.workload, profile, job.output_tokens, job.prompt_tokens)
    setting = make_setting(job, profile, latency, behaviour)
    check_fits(setting, behaviour)
    forecasts = job.forecasts or ("trees" if job.workload not in ("profile", "gsm8k") else "blurred")
    scene = Scene(setting, behaviour, forecasts, job.forecast_error, job.scheduler, job.controller)
    asked = arrivals(job.phases, behaviour.num_prompts, job.seed, most=job.most_requests)
    cluster = Cluster(setting, chosen.make(scene), behaviour, asked)
    outcomes = by_arrival(cluster.run(on_progress))
    busy_s = sum(instance.busy_s for instance in cluster.instances.values())
    assert setting.slo_s is not None
    return Result(
        summary=summarise(outcomes),
        outcomes=outcomes,
        slo_s=setting.slo_s,
        virtual_s=round(cluster.clock.now, 6),
        load=round(busy_s / (len(cluster.instances) * cluster.clock.now), 6),
    )


def read_profile(job: Job, cache: CacheMode | None) -> tuple[Profile, LatencyProfile]:
    """With the cache and the thresholds that are asked for. Raises ConfigError."""
    profile = load_profile(job.profile)
    decoding = profile.decoding
    if cache is not None:
        decoding = replace(decoding, cache=cache)
    if job.thresholds is not None:
        means = dict(zip(decoding.thresholds, decoding.mean_steps, strict=True))
        if unknown := [value for value in job.thresholds if value not in means]:
            raise ConfigError(f"thresholds: {unknown[0]:g} is none of the profile's, {decoding.thresholds}")
        chosen = tuple(sorted(set(job.thresholds)))
        decoding = replace(decoding, thresholds=chosen, steps_by_threshold=tuple(means[value] for value in chosen))
    latency = load_latency(profile.latency_file)
    if job.extra_pass_ms or job.extra_step_ms:
        latency = LatencyProfile(
            {degree: dearer(latency.cost(degree), job.extra_pass_ms, job.extra_step_ms) for degree in latency.degrees}
        )
    return replace(profile, decoding=decoding), latency


def dearer(cost: PassCost, pass_ms: float, step_ms: float) -> PassCost:
    """With so many milliseconds more for a pass, and for each step."""
    return replace(
        cost,
        curve=tuple((tokens, ms + pass_ms) for tokens, ms in cost.curve),
        recompute_step_ms=cost.recompute_step_ms + step_ms,
        cache_step_ms=cost.cache_step_ms + step_ms,
    )


def read_behaviour(
    workload: str, profile: Profile, output_tokens: int | None, prompt_tokens: tuple[int, int] | None
) -> Behaviour:
    """Raises ConfigError."""
    decoding = profile.decoding
    if workload == "gsm8k":
        return Counted(read_step_counts(GSM8K), output_tokens=output_tokens, prompt_tokens=prompt_tokens)
    if workload == "profile":
        counts = replace(read_step_counts(GSM8K), accuracy=(), block_size=decoding.block_size)
        means = [_mean_steps(profile, threshold) for threshold in counts.thresholds]
        return Counted(
            counts,
            output_tokens=output_tokens or decoding.max_tokens,
            mean_steps_per_block=means,
            prompt_tokens=prompt_tokens or _MADE_UP_PROMPTS,
        )
    if output_tokens or prompt_tokens:
        raise ConfigError("recorded traces have lengths of their own: leave the tokens of prompt and output out")
    from tools.simulate.recorded import Recorded
    from tools.traces.prompts import codec_of

    decode = codec_of(profile).decode if (profile.weights_folder / "tokenizer.json").exists() else None
    recorded = Recorded(Path(workload), decoding.cache, decode)
    if recorded.recording.block_size != decoding.block_size:
        raise ConfigError(
            f"{workload} was recorded with blocks of {recorded.recording.block_size}, "
            f"the profile has {decoding.block_size}"
        )
    return recorded


def _mean_steps(profile: Profile, threshold: float) -> float:
    return interpolated(profile.decoding.thresholds, profile.decoding.mean_steps, threshold)


def make_setting(job: Job, profile: Profile, latency: LatencyProfile, behaviour: Behaviour) -> Setting:
    """Raises ConfigError for a TP degree that was not measured."""
    for degree in job.tp_degrees:
        latency.cost(degree)
    setting = Setting(
        profile=profile,
        latency=latency,
        tp_degrees=job.tp_degrees,
        kv_tokens=job.kv_tokens or profile.engine.kv_tokens or 8 * profile.limits.max_context_tokens,
        delay_s=job.delay_s,
        jitter_s=job.jitter_s,
        step_overhead_s=job.step_overhead_s,
        pass_noise=job.pass_noise,
        seed=job.seed,
    )
    slo_s = job.slo_s or _SLO_OVER_ALONE * alone_s(setting, behaviour)
    return setting._replace(slo_s=slo_s)


def alone_s(setting: Setting, behaviour: Behaviour) -> float:
    """Seconds of a request of mean steps and mean prompt that runs alone at the profile's threshold, in passes."""
    decoding = setting.profile.decoding
    mean = behaviour.mean(decoding.threshold)
    lengths = [behaviour.prompt_tokens(prompt) for prompt in range(behaviour.num_prompts)]
    output = -(-behaviour.max_tokens(0) // decoding.block_size) * decoding.block_size
    canvas = sum(lengths) / len(lengths) + output
    window = {"none": canvas, "dual": decoding.block_size, "prefix": (output + decoding.block_size) / 2}[decoding.cache]
    cost = setting.latency.cost(setting.tp_degrees[0])
    recompute_ms = cost.ms(step_load("recompute", canvas, canvas))
    cache_ms = cost.ms(step_load("cache", window, canvas)) if decoding.cache != "none" else recompute_ms
    passes_ms = mean.blocks * recompute_ms + (mean.steps - mean.blocks) * cache_ms
    return passes_ms / 1e3 + mean.steps * setting.step_overhead_s


def check_fits(setting: Setting, behaviour: Behaviour) -> None:
    """Raises ConfigError for prompts that the profile or the K/V pool has no room for."""
    limits, block_size = setting.profile.limits, setting.profile.decoding.block_size
    longest = max(behaviour.prompt_tokens(p) for p in range(behaviour.num_prompts))
    output = -(-max(behaviour.max_tokens(p) for p in range(behaviour.num_prompts)) // block_size) * block_size
    most = min(limits.max_context_tokens, setting.kv_tokens)
    if longest + output > most:
        raise ConfigError(
            f"prompts of up to {longest} tokens and {output} of output make {longest + output}; at most {most} fit: "
            "shorter prompts, a profile of a larger context or more kv_tokens would do"
        )
