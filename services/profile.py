"""A profile: what is served and how. One folder, `profiles/<model>-<hardware>/`, with `profile.toml` in it.

Gateway, scheduler and workers read the same one. Unknown keys and wrong values are refused, with the key and the
reason.
"""

import tomllib
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from contracts.messages import CacheMode, Positive, Probability
from services.opening import NO_OPENING, Manner, Opening
from services.settings import ConfigError

Tier = Literal["flex", "default", "priority"]


_PRIORITIES: dict[Tier, int] = {"flex": -1, "default": 0, "priority": 1}


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the tables of a profile."""


class Decoding(Section, frozen=True, kw_only=True):
    """Defaults for requests that do not say. Table `[decoding]`."""

    block_size: Positive = 32
    cache: CacheMode = "dual"
    blocks_ahead: Annotated[int, Meta(ge=0)] | None = None  # that the model sees beyond the current one; none: all
    thresholds: tuple[Probability, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)  # the threshold set, ascending
    threshold: Probability = 0.9  # what a request starts with, and the highest it runs at without a pin
    opening_share: Probability = 0.0  # of each block's tokens: at `threshold` or more, but for pins; 1: of all
    opening_from: Probability = 0.0  # who runs at a threshold of the set below this has no opening: the last resort
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    max_tokens: Positive = 256  # where the client names no length: the canvas is sized by it, so it is the cost knob
    steps_per_block: Annotated[float, Meta(ge=1.0)] = 8.0  # mean at `threshold`; prices a request before it has run
    steps_by_threshold: tuple[Annotated[float, Meta(ge=1.0)], ...] = ()  # mean at each of `thresholds`; (): estimated

    @property
    def opening(self) -> Opening:
        """Of the blocks of requests without a pin."""
        if not self.opening_share:
            return NO_OPENING
        return Opening(share=self.opening_share, threshold=self.threshold, least=self.opening_from)

    @property
    def manner(self) -> Manner:
        """How blocks are decoded, beside thresholds."""
        return Manner(opening=self.opening, blocks_ahead=self.blocks_ahead)

    @property
    def mean_steps(self) -> tuple[float, ...]:
        """Steps per block, on average, at each of `thresholds`.

        Where they are not given, `steps_per_block` scaled as the total steps in the published runs of LLaDA-8B-Instruct
        on GSM8K (the TeDiServe paper's artifact, 653 requests at each threshold).
        """
        if self.steps_by_threshold:
            return self.steps_by_threshold
        at_default = _published_steps(self.threshold)
        return tuple(max(1.0, self.steps_per_block * _published_steps(t) / at_default) for t in self.thresholds)


_PUBLISHED_STEPS = ((0.5, 39.4), (0.6, 45.0), (0.7, 54.4), (0.8, 67.3), (0.9, 86.0))  # threshold, steps of a request


def _published_steps(threshold: float) -> float:
    """Between two published thresholds in proportion, and beyond them as at the nearest."""
    for (left, steps_left), (right, steps_right) in pairwise(_PUBLISHED_STEPS):
        if threshold <= right:
            share = max(0.0, threshold - left) / (right - left)
            return steps_left + share * (steps_right - steps_left)
    return _PUBLISHED_STEPS[-1][1]


class Limits(Section, frozen=True, kw_only=True):
    """What one request may ask for. Table `[limits]`."""

    max_context_tokens: Positive  # prompt and output area together
    max_output_tokens: Positive
    time_limit_s: Annotated[float, Meta(gt=0.0)] = 120.0  # from arrival; then the request fails as `expired`


class EngineSection(Section, frozen=True, kw_only=True):
    """How an instance runs the model. Table `[engine]`."""

    dtype: Literal["auto", "float32", "bfloat16"] = "auto"  # auto: bfloat16 on GPUs and where it is faster
    device: Literal["auto", "cpu", "cuda"] = "auto"
    kernels: Literal["auto", "torch", "vllm"] = "auto"  # auto: vLLM's on a GPU where it is installed, else torch's
    quantization: Literal["", "fp8"] = ""  # of the layers' matrices; "": none
    tp_degree: Positive = 1  # ranks of an instance: processes that share the model, each on a GPU or a core of its own
    threads: Positive = 1  # of each rank on CPU
    kv_tokens: Annotated[int, Meta(ge=0)] = 0  # size of the K/V pool; 0: from the memory that is free
    max_requests: Positive = 8  # held at once by an instance
    max_pass_tokens: Positive = 2048  # in one forward pass


class Profile(Section, frozen=True, kw_only=True, dict=True):
    """The whole of `profile.toml`. `folder` is where it lies."""

    model: Annotated[str, Meta(min_length=1)]  # the name that clients use
    weights: str = "model"  # the Hugging Face folder, relative to the profile's
    description: str = ""
    decoding: Decoding = Decoding()
    limits: Limits
    engine: EngineSection = EngineSection()
    slo_ms: dict[Tier, float] = {}  # default promise by service tier; none: best effort
    priorities: dict[Tier, int] = msgspec.field(default_factory=lambda: dict(_PRIORITIES))
    quality_floor: dict[Tier, Probability] = {}  # the lowest threshold by service tier; none: the set's lowest
    folder: str = ""

    @property
    def weights_folder(self) -> Path:
        return Path(self.folder) / self.weights

    @property
    def latency_file(self) -> Path:
        return Path(self.folder) / "latency.json"

    @cached_property
    def max_prompt_tokens(self) -> int:
        """The longest prompt, in tokens, that leaves room for one block of output."""
        return self.limits.max_context_tokens - self.decoding.block_size


def load_profile(folder: str | Path) -> Profile:
    """Reads `profile.toml` in the folder. Raises ConfigError."""
    path = Path(folder) / "profile.toml"
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise ConfigError(f"no profile at {path}: name a folder that holds profile.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from None
    try:
        profile = msgspec.convert({**table, "folder": str(folder)}, Profile)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{path}: {error}") from None
    _check(profile, path)
    return profile


def check_retention(profile: Profile, result_retention_s: float) -> None:
    """Raises ConfigError unless records are kept longer than a request may run."""
    if profile.limits.time_limit_s >= result_retention_s:
        raise ConfigError(
            f"limits.time_limit_s {profile.limits.time_limit_s:g} of the profile must be shorter than "
            f"result_retention_s {result_retention_s:g} in [nats]: the record of a running request must not expire"
        )


def _check(profile: Profile, path: Path) -> None:
    d, limits = profile.decoding, profile.limits
    if not d.thresholds or list(d.thresholds) != sorted(set(d.thresholds)):
        raise ConfigError(f"{path}: decoding.thresholds must be ascending and not empty, is {d.thresholds}")
    if d.threshold not in d.thresholds:
        raise ConfigError(
            f"{path}: decoding.threshold {d.threshold:g} is none of decoding.thresholds {d.thresholds}: it is the "
            "highest that a request runs at without a pin, so name one of them, or add it"
        )
    if d.opening_from > d.threshold:
        raise ConfigError(
            f"{path}: decoding.opening_from {d.opening_from:g} is above decoding.threshold {d.threshold:g}: nobody "
            "would have an opening"
        )
    if d.steps_by_threshold and len(d.steps_by_threshold) != len(d.thresholds):
        raise ConfigError(
            f"{path}: decoding.steps_by_threshold needs a number for each of decoding.thresholds: "
            f"{len(d.thresholds)}, not {len(d.steps_by_threshold)}"
        )
    if list(d.steps_by_threshold) != sorted(d.steps_by_threshold):
        raise ConfigError(
            f"{path}: decoding.steps_by_threshold must not fall: a higher threshold never needs fewer steps, "
            f"is {d.steps_by_threshold}"
        )
    for tier, floor in profile.quality_floor.items():
        if floor not in d.thresholds or floor > d.threshold:
            raise ConfigError(
                f"{path}: quality_floor.{tier} {floor:g} is none of decoding.thresholds {d.thresholds} up to "
                f"decoding.threshold {d.threshold:g}"
            )
    if limits.max_output_tokens % d.block_size:
        raise ConfigError(
            f"{path}: limits.max_output_tokens {limits.max_output_tokens} is no multiple of "
            f"decoding.block_size {d.block_size}"
        )
    if limits.max_output_tokens >= limits.max_context_tokens:
        raise ConfigError(
            f"{path}: limits.max_output_tokens {limits.max_output_tokens} leaves no room for a prompt in "
            f"limits.max_context_tokens {limits.max_context_tokens}"
        )
    if d.max_tokens > limits.max_output_tokens:
        raise ConfigError(f"{path}: decoding.max_tokens {d.max_tokens} exceeds limits.max_output_tokens")
    if limits.max_context_tokens > profile.engine.max_pass_tokens:
        raise ConfigError(
            f"{path}: engine.max_pass_tokens {profile.engine.max_pass_tokens} cannot hold a recompute step of "
            f"limits.max_context_tokens {limits.max_context_tokens}"
        )
