"""From a profile to an engine that is ready: ranks, device, threads, size of the K/V pool, first passes.

The pool holds what the profile names; where it names nothing, what `max_requests` of the longest canvases take, as far
as the free memory allows. Of several ranks each holds all tokens, and of their keys and values its heads' share.
"""

import torch

from services.denoiser.engine import Engine, EngineConfig, FixedSchedule, Job
from services.denoiser.kv_pool import kv_bytes_per_token
from services.denoiser.loader import choose_dtype
from services.denoiser.models.base import Model
from services.denoiser.parallel import Alone, Ranks
from services.denoiser.plan import ModelSource
from services.denoiser.ranks import OtherRanks, free_bytes, load_share
from services.denoiser.run import Instance
from services.profile import Profile
from services.settings import ConfigError

# Of the free memory; the rest is for activations, logits and, on a CPU, everybody else.
_POOL_SHARE = {"cuda": 0.8, "cpu": 0.25}
_MAX_RECOMPUTE_TOKENS = 2048  # of recompute steps in one pass, as long as one fits
_WARM_UP_LOADS = ((1, 256), (4, 64))  # requests and the canvas of each, as far as they fit
_WARM_UP_STEPS = 5


def build_engine(profile: Profile, others: OtherRanks | None = None) -> Engine:
    """Loads the profile's model and runs its first passes; `others`: the other ranks, which do the same.

    Raises ConfigError, and RankFailed.
    """
    torch.set_num_threads(profile.engine.threads)
    engine = _build_alone(profile) if others is None else _build_with(profile, others)
    warm_up(engine)
    return engine


def _build_alone(profile: Profile) -> Engine:
    model = load_profile_model(profile)
    return Engine(model, config=engine_config(profile, model))


def _build_with(profile: Profile, others: OtherRanks) -> Engine:
    group = others.join(model_source(profile))
    model = load_profile_model(profile, group)
    return others.lead(model, engine_config(profile, model, others.least_free_bytes(model)))


def model_source(profile: Profile) -> ModelSource:
    """What each rank loads. Raises ConfigError."""
    section = profile.engine
    device = choose_device(section.device)  # "cuda": of several GPUs the current one, or each rank its own
    return ModelSource(
        folder=str(profile.weights_folder),
        device=device,
        dtype=choose_dtype(section.dtype, device),
        threads=section.threads,
        kernels=section.kernels,
        quantization=section.quantization,
    )


def load_profile_model(profile: Profile, ranks: Ranks | None = None) -> Model:
    """The profile's model on its device, or this rank's share of it. Raises ConfigError."""
    return load_share(model_source(profile), ranks or Alone())


def choose_device(wanted: str) -> str:
    """The torch device for `auto`, `cpu` or `cuda`. Raises ConfigError."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise ConfigError('engine.device: "cuda" is not available here; use "auto" or "cpu"')
    if wanted == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return wanted


def engine_config(profile: Profile, model: Model, free: int | None = None) -> EngineConfig:
    """The engine's sizes, the same on all ranks. `free`: bytes of memory that each has; None: look at its device.

    Raises ConfigError where the pool does not fit, or not even one canvas into it.
    """
    section, per_token = profile.engine, _kv_bytes_per_token(model)
    free = free_bytes(model.device) if free is None else free
    affordable = int(free * _POOL_SHARE[model.device.type]) // per_token
    if section.kv_tokens * per_token > free:
        raise ConfigError(
            f"engine.kv_tokens = {section.kv_tokens} take {section.kv_tokens * per_token / 2**30:.2f} GiB of memory, "
            f"{free / 2**30:.2f} GiB are free: name at most {affordable}, or 0"
        )
    kv_tokens = section.kv_tokens or min(section.max_requests * profile.limits.max_context_tokens, affordable)
    longest = min(profile.limits.max_context_tokens, model.shape.max_positions)
    if kv_tokens < longest:
        raise ConfigError(f"a K/V pool of {kv_tokens} tokens does not hold one canvas of {longest}")
    return EngineConfig(
        kv_budget_tokens=kv_tokens,
        max_requests=section.max_requests,
        max_batch_tokens=section.max_pass_tokens,
        max_recompute_tokens=min(section.max_pass_tokens, _MAX_RECOMPUTE_TOKENS),
    )


def _kv_bytes_per_token(model: Model) -> int:
    """On each rank: its model has only its own heads."""
    shape = model.shape
    return kv_bytes_per_token(
        num_layers=shape.num_layers, num_kv_heads=shape.num_kv_heads, head_dim=shape.head_dim, dtype=model.dtype
    )


def warm_up(engine: Engine) -> None:
    """Passes of few and many rows, of one request and of four, so that the first requests find the kernels loaded.

    Raises ValueError if not even a canvas of 16 fits.
    """
    engine.admit(_warm_up_job(engine, "0", 16))
    _step_and_remove(engine, ["0"])
    longest = min(engine.model.shape.max_positions, engine.config.kv_budget_tokens)
    for num_requests, canvas_tokens in _WARM_UP_LOADS:
        jobs = [_warm_up_job(engine, str(number), min(canvas_tokens, longest)) for number in range(num_requests)]
        held = []
        for job in jobs:
            if engine.refusal(job) is None:
                engine.admit(job)
                held.append(job.request_id)
        _step_and_remove(engine, held)


def _warm_up_job(engine: Engine, request_id: str, canvas_tokens: int) -> Job:
    shape = engine.model.shape
    token_id = next(i for i in range(shape.vocab_size) if i != shape.mask_id)
    return Job(
        request_id=request_id,
        prompt_ids=[token_id] * (canvas_tokens - 8),
        max_tokens=8,
        block_size=8,
        choice=FixedSchedule(8),
        ignore_eos=True,
    )


def _step_and_remove(engine: Engine, request_ids: list[str]) -> None:
    """A recompute step and some cache steps of these, which are all that is held."""
    for _ in range(_WARM_UP_STEPS if request_ids else 0):
        engine.step()
    for request_id in request_ids:
        engine.remove(request_id)


def describe(engine: Engine, profile: Profile, *, instance_id: str, node_id: str, drain_limit_s: float) -> Instance:
    """What the worker's policy has to know of it."""
    shape = engine.model.shape
    return Instance(
        instance_id=instance_id,
        node_id=node_id,
        model=profile.model,
        kv_tokens=engine.config.kv_budget_tokens,
        max_requests=engine.config.max_requests,
        max_canvas_tokens=min(shape.max_positions, profile.limits.max_context_tokens),
        vocab_size=shape.vocab_size,
        mask_id=shape.mask_id,
        eos_ids=frozenset(shape.eos_ids),
        opening=profile.decoding.opening,
        tp_degree=profile.engine.tp_degree,
        drain_limit_s=drain_limit_s,
    )
