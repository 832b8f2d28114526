"""One simulation from its parts: what is asked for, made into a cluster, run, and summed up."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from msgspec.structs import replace

from contracts.messages import CacheMode
from services.costs import LatencyProfile, PassCost, load_latency, step_load
from services.profile import Profile, Tier, load_profile
from services.scheduler.config import SchedulerConfig
from services.settings import ConfigError
from services.threshold_controller.config import ThresholdControllerConfig
from tools.simulate.cluster import Cluster, Setting
from tools.simulate.denoising import Behaviour, Counted, Lengths, interpolated, read_step_counts
from tools.simulate.fleet import Change, Decision, FleetSetting
from tools.simulate.forecasts import ForecastKind
from tools.simulate.results import Outcome, Summary, by_arrival, summarise
from tools.simulate.systems import Scene, mean_lengths, system
from tools.simulate.workload import Arrival, Phase, arrivals

if TYPE_CHECKING:
    from tools.simulate.recorded import Recorded

PUBLISHED = Path(__file__).parent / "published"
GSM8K = PUBLISHED / "gsm8k-llada-8b.json"
_SLO_OVER_ALONE = 5.0
_MADE_UP_PROMPTS = (32, 128)  # tokens


class Job(NamedTuple):
    """What is to be simulated."""

    profile: Path
    system: str
    workload: str  # "profile", "gsm8k", or a folder of recorded traces
    phases: tuple[Phase, ...]  # of random arrivals
    tp_degrees: tuple[int, ...]
    most_requests: int | None = None
    tier: Tier = "default"  # of all requests: its quality floor is theirs
    slo_s: float | None = None  # None: five times a mean request alone, at the profile's threshold
    output_tokens: int | None = None
    prompt_tokens: tuple[int, int] | None = None
    lengths: tuple[Lengths, ...] | None = None  # of each prompt, instead of these two; not of recorded ones
    steps_scale: float = 1.0  # of counted requests: so many times the steps; of their accuracy nothing is known then
    kv_tokens: int | None = None
    thresholds: tuple[float, ...] | None = None  # instead of the profile's set
    forecasts: ForecastKind | None = None  # None: the profile's predictor for recorded traces, blurred ones else
    forecast_error: float = 0.19
    delay_s: float = 0.0005
    jitter_s: float = 0.0005
    step_overhead_s: float = 0.0005
    pass_noise: float = 0.0
    latency_ratio: float = 1.0  # what passes take over what the profile says; instances say so
    gateway_s: float = 0.0023  # from a call to its request
    extra_pass_ms: float = 0.0  # on top of the latency profile, for policies as for instances: of a pass,
    extra_step_ms: float = 0.0  # and of each step in it
    tp_effect: tuple[tuple[int, float], ...] = ()  # TP degree, its passes' time over TP-1's; instead of its own profile
    seed: int = 0
    fleet: FleetSetting | None = None  # None: the instances are there from beginning to end
    asked: tuple[Arrival, ...] | None = None  # instead of random arrivals
    scheduler: SchedulerConfig = SchedulerConfig()
    controller: ThresholdControllerConfig = ThresholdControllerConfig()


class Result(NamedTuple):
    summary: Summary
    outcomes: list[Outcome]  # by arrival
    slo_s: float
    virtual_s: float
    load: float  # share of their time that devices spent in passes
    changes: list[Change]  # of the layout, where there is a fleet
    decisions: list[Decision]  # of the reconfigurator


def simulate(job: Job, on_progress: Callable[[Cluster], object] | None = None) -> Result:
    """Raises ConfigError where the parts do not fit together."""
    chosen = system(job.system)
    if job.fleet is not None and not chosen.follows:
        raise ConfigError(
            f"{job.system} does not know that instances come and go: leave reconfiguration and losses out"
        )
    profile, latency = read_profile(job, chosen.cache)
    behaviour = read_behaviour(job, profile)
    setting = make_setting(job, profile, latency, behaviour)
    check_fits(setting, behaviour)
    forecasts = job.forecasts or ("trees" if job.workload not in ("profile", "gsm8k") else "blurred")
    scene = Scene(setting, behaviour, forecasts, job.forecast_error, job.scheduler, job.controller)
    asked = job.asked or arrivals(job.phases, behaviour.num_prompts, job.seed, most=job.most_requests)
    cluster = Cluster(setting, chosen.make(scene), behaviour, asked)
    outcomes = by_arrival(cluster.run(on_progress))
    busy_s = sum(instance.busy_s * instance.settings.tp_degree for instance in cluster.all_instances)
    assert setting.slo_s is not None
    return Result(
        summary=summarise(outcomes),
        outcomes=outcomes,
        slo_s=setting.slo_s,
        virtual_s=round(cluster.clock.now, 6),
        load=round(busy_s / (setting.num_devices * cluster.clock.now), 6),
        changes=[] if cluster.fleet is None else cluster.fleet.changes,
        decisions=[] if cluster.fleet is None else cluster.fleet.decisions,
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
    latency = supposed(load_latency(profile.latency_file), job.extra_pass_ms, job.extra_step_ms, job.tp_effect)
    return replace(profile, decoding=decoding), latency


def supposed(
    latency: LatencyProfile, extra_pass_ms: float, extra_step_ms: float, tp_effect: Sequence[tuple[int, float]] = ()
) -> LatencyProfile:
    """The profile with what a `Job` supposes beyond it."""
    costs = {degree: _dearer(latency.cost(degree), extra_pass_ms, extra_step_ms) for degree in latency.degrees}
    return LatencyProfile(costs | {degree: _scaled(costs[1], share) for degree, share in tp_effect})


def _scaled(cost: PassCost, share: float) -> PassCost:
    return PassCost(
        curve=tuple((tokens, share * ms) for tokens, ms in cost.curve),
        recompute_step_ms=share * cost.recompute_step_ms,
        cache_step_ms=share * cost.cache_step_ms,
        key_ms=share * cost.key_ms,
        pair_ms=share * cost.pair_ms,
    )


def _dearer(cost: PassCost, pass_ms: float, step_ms: float) -> PassCost:
    """With so many milliseconds more for a pass, and for each step."""
    return replace(
        cost,
        curve=tuple((tokens, ms + pass_ms) for tokens, ms in cost.curve),
        recompute_step_ms=cost.recompute_step_ms + step_ms,
        cache_step_ms=cost.cache_step_ms + step_ms,
    )


def read_behaviour(job: Job, profile: Profile) -> Behaviour:
    """Raises ConfigError."""
    decoding, workload = profile.decoding, job.workload
    output_tokens, prompt_tokens, lengths = job.output_tokens, job.prompt_tokens, job.lengths
    if workload == "gsm8k":
        counts = read_step_counts(GSM8K)
        if job.steps_scale != 1:
            steps = tuple(tuple(max(1, round(job.steps_scale * count)) for count in row) for row in counts.steps)
            counts = replace(counts, steps=steps, accuracy=())
        return Counted(counts, output_tokens=output_tokens, prompt_tokens=prompt_tokens, lengths=lengths)
    if workload == "profile":
        counts = replace(read_step_counts(GSM8K), accuracy=(), block_size=decoding.block_size)
        means = [_mean_steps(profile, threshold) for threshold in counts.thresholds]
        return Counted(
            counts,
            output_tokens=output_tokens or decoding.max_tokens,
            mean_steps_per_block=means,
            prompt_tokens=prompt_tokens or _MADE_UP_PROMPTS,
            lengths=lengths,
        )
    if output_tokens or prompt_tokens or lengths:
        raise ConfigError("recorded traces have lengths of their own: leave the tokens of prompt and output out")
    recorded = _recorded(Path(workload), job.profile, decoding.cache)
    if recorded.recording.block_size != decoding.block_size:
        raise ConfigError(
            f"{workload} was recorded with blocks of {recorded.recording.block_size}, "
            f"the profile has {decoding.block_size}"
        )
    if recorded.recording.manner != decoding.manner:
        raise ConfigError(
            f"{workload} was recorded with {recorded.recording.manner.words}, the profile serves with"
            f" {decoding.manner.words}: name a recording that was made with --profile {job.profile}"
        )
    return recorded


@lru_cache(maxsize=4)
def _recorded(folder: Path, profile_folder: Path, cache: CacheMode) -> "Recorded":
    """Shared by the runs of this process: what one has computed of a recording, the next one knows."""
    from tools.simulate.recorded import Recorded
    from tools.traces.prompts import codec_of

    profile = load_profile(profile_folder)
    decode = codec_of(profile).decode if (profile.weights_folder / "tokenizer.json").exists() else None
    return Recorded(folder, cache, decode)


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
        tier=job.tier,
        kv_tokens=job.kv_tokens or profile.engine.kv_tokens or 8 * profile.limits.max_context_tokens,
        delay_s=job.delay_s,
        jitter_s=job.jitter_s,
        step_overhead_s=job.step_overhead_s,
        pass_noise=job.pass_noise,
        latency_ratio=job.latency_ratio,
        gateway_s=job.gateway_s,
        seed=job.seed,
        fleet=job.fleet,
    )
    slo_s = job.slo_s or _SLO_OVER_ALONE * alone_s(setting, behaviour)
    return setting._replace(slo_s=slo_s)


def alone_s(setting: Setting, behaviour: Behaviour) -> float:
    """Seconds of a request of mean steps and mean prompt that runs alone at the profile's threshold, in passes."""
    decoding = setting.profile.decoding
    mean = behaviour.mean(decoding.threshold)
    prompt_tokens, output = mean_lengths(behaviour, decoding.block_size)
    canvas = prompt_tokens + output
    window = {"none": canvas, "dual": decoding.block_size, "prefix": (output + decoding.block_size) / 2}[decoding.cache]
    cost = setting.latency.cost(setting.tp_degrees[0])
    recompute_ms = cost.ms(step_load("recompute", canvas, canvas))
    cache_ms = cost.ms(step_load("cache", window, canvas)) if decoding.cache != "none" else recompute_ms
    passes_ms = mean.blocks * recompute_ms + (mean.steps - mean.blocks) * cache_ms
    return passes_ms / 1e3 + mean.steps * setting.step_overhead_s


def check_fits(setting: Setting, behaviour: Behaviour) -> None:
    """Raises ConfigError for prompts that the profile or the K/V pool has no room for."""
    limits, block_size = setting.profile.limits, setting.profile.decoding.block_size
    prompts = range(behaviour.num_prompts)
    lengths = [(behaviour.prompt_tokens(p), -(-behaviour.max_tokens(p) // block_size) * block_size) for p in prompts]
    prompt_tokens, output = max(lengths, key=sum)
    most = min(limits.max_context_tokens, setting.kv_tokens)
    if prompt_tokens + output > most:
        raise ConfigError(
            f"prompts of up to {prompt_tokens} tokens and {output} of output make {prompt_tokens + output}; at most "
            f"{most} fit: shorter prompts, a profile of a larger context or more kv_tokens would do"
        )
