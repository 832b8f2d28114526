"""`profile`: measures passes of all sorts on this machine, fits what they cost and writes the profile's `latency.json`.

1. What is measured is `latency_plan.py`'s to say. Prompts are random: time depends on shapes alone.
2. Every pass is measured in several rounds, in another order each time, so that a slow minute of a shared machine falls
   on all of them. The first round only warms up. A pass counts with the median of its samples.
3. A recompute step is measured as the first of a request that has just come: what a new pass costs to lay out is its
   own. A cache step is measured once its pass is laid out.
"""

import contextlib
import os
import platform
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from services.costs import DegreeProfile, MeasuredPass, dump_latency
from services.denoiser.config import WorkerConfig
from services.denoiser.engine import CacheMode, Engine, EngineConfig, FixedSchedule, Job
from services.denoiser.instance import engine_config, load_profile_model, model_source, warm_up
from services.denoiser.latency_fit import errors_of, fit, relative_error
from services.denoiser.latency_plan import Mix, plan_mixes
from services.denoiser.models.base import Model
from services.denoiser.plan import RankFailed
from services.denoiser.progress_bar import ProgressBar
from services.denoiser.ranks import OtherRanks
from services.denoiser.spawn import start_ranks
from services.profile import Profile, load_profile
from services.settings import ConfigError

_STEPS_PER_BLOCK = 8  # about as many as at a high threshold: so are the rows whose logits are wanted
_SETTLING_STEPS = 2  # not measured: the first cache steps of a pass that has just been laid out
_QUICK_ROUNDS, _MIN_ROUNDS, _MAX_ROUNDS = 2, 3, 9


def profile_latency(
    folder: str | Path, *, tp_degrees: Sequence[int] = (), quick: bool = False, limit_s: float = 600.0
) -> Path:
    """Measures, writes `latency.json` into the profile's folder and returns its path. Raises ConfigError, RankFailed.

    `tp_degrees`: the profile's own if none is named. `limit_s`: about how long each may take, but not less than three
    rounds.
    """
    profile = load_profile(folder)
    if profile.decoding.block_size == 1:
        raise ConfigError(f"{folder}: blocks of one token have no cache steps to measure")
    degrees = sorted(set(tp_degrees)) or [profile.engine.tp_degree]
    measured = []
    for degree in degrees:
        measured.append(measure_degree(profile, degree, quick=quick, limit_s=limit_s))
        torch.cuda.empty_cache()  # what torch keeps for itself the next degree would find taken
    dump_latency(profile.latency_file, describe_hardware(profile), measured)
    return profile.latency_file


def measure_degree(profile: Profile, tp_degree: int, *, quick: bool, limit_s: float) -> DegreeProfile:
    """Measures at one TP degree and prints what was found. Raises ConfigError, RankFailed."""
    with planned_engine(profile, tp_degree, quick=quick) as (engine, mixes):
        warm_up(engine)
        what = f"profile, TP {tp_degree}"
        passes = measure(engine, mixes, profile.decoding.block_size, what=what, quick=quick, limit_s=limit_s)
    found = fitted(tp_degree, passes)
    report(found, mixes)
    return found


@contextlib.contextmanager
def planned_engine(profile: Profile, tp_degree: int, *, quick: bool) -> Iterator[tuple[Engine, list[Mix]]]:
    """An engine of as many ranks, and what to measure of it."""
    torch.set_num_threads(profile.engine.threads)

    def plan(model: Model, free_bytes: int | None = None) -> tuple[EngineConfig, list[Mix]]:
        config = engine_config(profile, model, free_bytes)
        longest = min(profile.limits.max_context_tokens, model.shape.max_positions)
        mixes = plan_mixes(profile.decoding.block_size, longest, config, quick=quick)
        return _roomy(config, mixes), mixes

    if tp_degree == 1:
        model = load_profile_model(profile)
        config, mixes = plan(model)
        yield Engine(model, config=config), mixes
        return
    with OtherRanks(start_ranks(tp_degree, name="profile"), limit_s=WorkerConfig().rank_limit_s) as others:
        try:
            model = load_profile_model(profile, others.join(model_source(profile)))
            config, mixes = plan(model, others.least_free_bytes(model))
            yield others.lead(model, config), mixes
        except (RuntimeError, RankFailed) as error:
            explained = others.explain(error)
            others.kill()
            if explained is error:
                raise
            raise explained from error


def _roomy(config: EngineConfig, mixes: Sequence[Mix]) -> EngineConfig:
    """An engine in which all requests of every mix ride in each pass, in the unmeasured ones too."""
    most = max(mix.canvas_tokens for mix in mixes)
    return msgspec.structs.replace(config, max_batch_tokens=most, max_recompute_tokens=most)


# --- measuring ----------------------------------------------------------------------------------------------------


def measure(
    engine: Engine, mixes: Sequence[Mix], block_size: int, *, what: str, quick: bool, limit_s: float
) -> list[MeasuredPass]:
    """Each mix's pass, in as many rounds as fit into the limit (rule 2)."""
    started = time.monotonic()
    for mix in mixes:
        pass_seconds(engine, mix, block_size)
    round_s = time.monotonic() - started
    rounds = _QUICK_ROUNDS if quick else min(_MAX_ROUNDS, max(_MIN_ROUNDS, int(limit_s / round_s)))
    samples: list[list[float]] = [[] for _ in mixes]
    shuffled = random.Random(0)
    bar = ProgressBar(what, rounds * len(mixes))
    for number in range(rounds):
        bar.say(f"round {number + 1} of {rounds}, {len(mixes)} passes, {round_s:.0f} s")
        for index in shuffled.sample(range(len(mixes)), len(mixes)):
            samples[index] += pass_seconds(engine, mixes[index], block_size)
            bar.advance()
    bar.close()
    return [_measured(mix, seconds) for mix, seconds in zip(mixes, samples, strict=True)]


def pass_seconds(engine: Engine, mix: Mix, block_size: int) -> list[float]:
    """Times of a few passes of this mix."""
    steps = min(_STEPS_PER_BLOCK, block_size)
    settling = min(_SETTLING_STEPS, steps - 2)
    cached = [_job(engine, f"cached {i}", mix.cached_canvas, mix.window, block_size, steps) for i in range(mix.cached)]
    _admit(engine, cached)
    for _ in range(1 + settling if cached else 0):
        engine.step()
    seconds = []
    for _ in range(steps - settling - 1):
        fresh = [
            _job(engine, f"new {i}", mix.recompute_canvas, block_size, block_size, steps) for i in range(mix.recomputes)
        ]
        _admit(engine, fresh)
        result = engine.step()
        kinds = [step.kind for step in result.requests]
        assert (result.tokens_in_pass, kinds.count("recompute")) == (mix.load.tokens, mix.recomputes), "all have ridden"
        seconds.append(result.total_s)
        _remove(engine, fresh)
    _remove(engine, cached)
    return seconds


def _admit(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        engine.admit(job)


def _remove(engine: Engine, jobs: Sequence[Job]) -> None:
    for job in jobs:
        engine.remove(job.request_id)


def _job(engine: Engine, request_id: str, canvas: int, window: int, block_size: int, steps: int) -> Job:
    """A request whose cache steps have `window` rows, with `steps` steps a block."""
    shape = engine.model.shape
    ids = np.random.default_rng(canvas).integers(shape.vocab_size, size=canvas - window)
    ids[ids == shape.mask_id] = shape.mask_id - 1 if shape.mask_id else 1
    cache: CacheMode = "dual" if window == block_size else "prefix"
    return Job(
        request_id=request_id,
        prompt_ids=ids.tolist(),
        max_tokens=window,
        block_size=block_size,
        cache=cache,
        choice=FixedSchedule(steps * (window // block_size)),
        ignore_eos=True,
    )


def _measured(mix: Mix, seconds: Sequence[float]) -> MeasuredPass:
    low, _, high = statistics.quantiles(seconds, n=4, method="inclusive")
    return MeasuredPass(
        load=mix.load,
        ms=round(1e3 * statistics.median(seconds), 4),
        low_ms=round(1e3 * low, 4),
        high_ms=round(1e3 * high, 4),
        samples=len(seconds),
    )


# --- what was found -----------------------------------------------------------------------------------------------


def fitted(tp_degree: int, passes: Sequence[MeasuredPass]) -> DegreeProfile:
    cost = fit(passes)
    return DegreeProfile(tp_degree=tp_degree, cost=cost, errors=tuple(errors_of(cost, passes)), passes=tuple(passes))


def report(found: DegreeProfile, mixes: Sequence[Mix]) -> None:
    """Prints each pass, and how good the fit is."""
    print(f"TP {found.tp_degree}: {'pass':28} {'rows':>6} {'ms':>9} {'quartiles':>19} {'fitted':>9}")
    for mix, measured in zip(mixes, found.passes, strict=True):
        quartiles = f"{measured.low_ms:.2f} to {measured.high_ms:.2f}"
        print(
            f"TP {found.tp_degree}: {mix!s:28} {mix.load.tokens:6.0f} {measured.ms:9.2f} {quartiles:>19} "
            f"{found.cost.ms(measured.load):9.2f} {relative_error(found.cost, measured):+7.1%}"
        )
    spread = statistics.median((measured.high_ms - measured.low_ms) / 2 / measured.ms for measured in found.passes)
    print(f"TP {found.tp_degree}: samples of a pass lie within {spread:.1%} of their median, half of them (median)")
    print(f"TP {found.tp_degree}: error of the fit: median and 95th percentile; the same for passes it has not seen")
    for error in found.errors:
        print(
            f"TP {found.tp_degree}: {error.kind:9} {error.passes:3} passes: {error.median:6.1%} {error.p95:6.1%}; "
            f"{error.unseen_median:6.1%} {error.unseen_p95:6.1%}"
        )


def describe_hardware(profile: Profile) -> str:
    """What was measured on, for `latency.json`."""
    source = model_source(profile)
    if source.device == "cuda":
        return f"{torch.cuda.get_device_name()}, {source.dtype}"
    return f"{_cpu_name()}, {source.threads} of {os.cpu_count()} threads, {source.dtype}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
