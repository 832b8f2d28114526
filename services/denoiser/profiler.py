"""`profile`: measures step latency over tokens in the pass on this machine and writes the profile's `latency.json`.

Recompute steps are those of requests without a cache, whose every step is one; cache steps those of requests with the
dual cache. Random prompts do: time depends on shapes alone. Each point is the median of several steps.
"""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from services.costs import StepKind, dump_latency
from services.denoiser.engine import CacheMode, Engine, EngineConfig, FixedSchedule, Job
from services.denoiser.instance import choose_device, load_profile_model, warm_up
from services.profile import Profile, load_profile
from services.settings import ConfigError

_RECOMPUTE_TOKENS = (64, 128, 256, 512, 1024, 1536, 2048, 4096, 8192)
_CONTEXT_TOKENS = 256  # of the canvases that cache steps attend to; a context axis comes with the full profiler
_SETTLING_STEPS = 2  # not counted: a new set of riders is laid out anew


class Load(NamedTuple):
    """Requests of one kind that ride together, and the pass that they make."""

    kind: StepKind
    num_requests: int
    canvas_tokens: int  # of each
    tokens: int  # in the pass


def profile_latency(folder: str | Path, *, quick: bool = False) -> Path:
    """Measures, writes `latency.json` into the profile's folder and returns its path. Raises ConfigError."""
    profile = load_profile(folder)
    if profile.decoding.block_size == 1:
        raise ConfigError(f"{folder}: blocks of one token have no cache steps to measure")
    torch.set_num_threads(profile.engine.threads)
    model = load_profile_model(profile)
    loads = list(plan_loads(profile, quick=quick))
    engine = Engine(model, config=_roomy(loads))
    warm_up(engine)
    points: dict[StepKind, list[tuple[float, float]]] = {"recompute": [], "cache": []}
    for load in loads:
        milliseconds = 1e3 * measure(engine, load, profile.decoding.block_size, repeats=8 if quick else 25)
        points[load.kind].append((load.tokens, round(milliseconds, 4)))
        print(f"{load.kind:9} {load.tokens:5d} tokens, {load.num_requests:2d} requests: {milliseconds:8.2f} ms")
    dump_latency(profile.latency_file, describe_hardware(profile), {(1, kind): points[kind] for kind in points})
    return profile.latency_file


def plan_loads(profile: Profile, *, quick: bool) -> Iterator[Load]:
    """What to measure: passes of up to `max_pass_tokens`."""
    block, limits, section = profile.decoding.block_size, profile.limits, profile.engine
    for tokens in _RECOMPUTE_TOKENS[:: 2 if quick else 1]:
        num_requests = -(-tokens // limits.max_context_tokens)
        canvas_tokens = tokens // num_requests
        if block < canvas_tokens and tokens <= section.max_pass_tokens:
            yield Load("recompute", num_requests, canvas_tokens, num_requests * canvas_tokens)
    canvas_tokens = min(_CONTEXT_TOKENS, limits.max_context_tokens)
    num_requests = 1
    while num_requests <= section.max_requests and num_requests * block <= section.max_pass_tokens:
        yield Load("cache", num_requests, canvas_tokens, num_requests * block)
        num_requests *= 4 if quick else 2


def measure(engine: Engine, load: Load, block_size: int, *, repeats: int) -> float:
    """Median seconds of a step of this load."""
    seconds: list[float] = []
    while len(seconds) < repeats:
        jobs = [_job(engine, load, block_size, number) for number in range(load.num_requests)]
        for job in jobs:
            engine.admit(job)
        seconds += _step_seconds(engine, load, block_size)
        for job in jobs:
            engine.remove(job.request_id)
    return statistics.median(seconds[:repeats])


def _step_seconds(engine: Engine, load: Load, block_size: int) -> list[float]:
    """Of the block's steps: as many as it has tokens."""
    seconds = []
    for number in range(block_size):
        result = engine.step()
        if number >= min(_SETTLING_STEPS, block_size - 1) and all(step.kind == load.kind for step in result.requests):
            assert result.tokens_in_pass == load.tokens, "all ride in every pass"
            seconds.append(result.total_s)
    return seconds


def _job(engine: Engine, load: Load, block_size: int, number: int) -> Job:
    shape = engine.model.shape
    usable = [i for i in range(shape.vocab_size) if i != shape.mask_id]
    prompt = np.random.default_rng(number).choice(usable, size=load.canvas_tokens - block_size)
    cache: CacheMode = "none" if load.kind == "recompute" else "dual"
    return Job(
        request_id=str(number),
        prompt_ids=prompt.tolist(),
        max_tokens=block_size,
        block_size=block_size,
        cache=cache,
        choice=FixedSchedule(block_size),
        ignore_eos=True,
    )


def _roomy(loads: Sequence[Load]) -> EngineConfig:
    """An engine that puts all requests of every load into one pass."""
    canvases = max(load.num_requests * load.canvas_tokens for load in loads)
    return EngineConfig(
        kv_budget_tokens=canvases,
        max_requests=max(load.num_requests for load in loads),
        max_batch_tokens=canvases,
        max_recompute_tokens=canvases,
    )


def describe_hardware(profile: Profile) -> str:
    """What was measured on, for `latency.json`."""
    if choose_device(profile.engine.device) == "cuda":
        return f"{torch.cuda.get_device_name()}, {profile.engine.dtype}"
    return f"{_cpu_name()}, {profile.engine.threads} of {os.cpu_count()} threads, {profile.engine.dtype}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
