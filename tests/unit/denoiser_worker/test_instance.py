"""From a profile to an engine."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from services.denoiser import loader
from services.denoiser.engine import Engine, StepResult
from services.denoiser.instance import (
    build_engine,
    choose_device,
    describe,
    engine_config,
    load_profile_model,
    warm_up,
)
from services.denoiser.loader import choose_dtype
from services.denoiser.models.decoder import Decoder
from services.denoiser.parallel import Alone, Ranks
from services.profile import Profile, load_profile
from services.settings import ConfigError
from tests.unit.denoiser import random_model

PROFILE = """
model = "tiny"
[decoding]
block_size = 8
max_tokens = 32
[limits]
max_context_tokens = {context}
max_output_tokens = 64
[engine]
dtype = "float32"
device = "cpu"
kv_tokens = {kv_tokens}
max_requests = 4
max_pass_tokens = 256
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model.write(tmp_path / "model")
    return tmp_path


class _HalfOfTheHeads(Alone):
    """One of two ranks, as far as loading goes."""

    size = 2


def make_profile(folder: Path, *, kv_tokens: int = 600, context: int = 128) -> Profile:
    (folder / "profile.toml").write_text(PROFILE.format(kv_tokens=kv_tokens, context=context))
    return load_profile(folder)


def test_an_engine_of_the_profiles_sizes_that_holds_nothing_yet(folder: Path) -> None:
    profile = make_profile(folder)
    engine = build_engine(profile)
    assert (engine.config.kv_budget_tokens, engine.config.max_requests) == (600, 4)
    assert (engine.num_running, engine.free_kv_tokens) == (0, 600)
    instance = describe(engine, profile, instance_id="i", node_id="n", drain_limit_s=3.0)
    assert (instance.kv_tokens, instance.max_canvas_tokens, instance.vocab_size) == (600, 128, 64)
    assert instance.eos_ids == frozenset(random_model.EOS_IDS)
    assert instance.mask_id == random_model.MASK_ID


def passes_of_warm_up(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> set[tuple[str, int, int]]:
    """Kind, requests and rows of its passes; all must ride in each."""
    seen = set()

    def step(real: Callable[[], StepResult] = engine.step) -> StepResult:
        result = real()
        (kind,) = {request.kind for request in result.requests}
        assert len(result.requests) == engine.num_running
        seen.add((kind, len(result.requests), result.tokens_in_pass))
        return result

    monkeypatch.setattr(engine, "step", step)
    warm_up(engine)
    return seen


def test_the_first_passes_are_of_few_and_many_rows_and_of_several_requests(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(make_profile(folder))
    seen = passes_of_warm_up(engine, monkeypatch)
    longest = engine.model.shape.max_positions
    assert {("recompute", 1, longest), ("cache", 1, 8), ("recompute", 4, 256), ("cache", 4, 32)} <= seen
    assert (engine.num_running, engine.free_kv_tokens) == (0, 600)


def test_the_first_passes_are_as_large_as_a_small_pool_allows(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = build_engine(make_profile(folder, kv_tokens=130))
    seen = passes_of_warm_up(engine, monkeypatch)
    assert seen == {
        ("recompute", 1, 16),
        ("cache", 1, 8),
        ("recompute", 1, 130),
        ("recompute", 2, 128),
        ("cache", 2, 16),
    }
    assert engine.free_kv_tokens == 130


def test_an_unnamed_pool_takes_what_the_requests_can_need(folder: Path) -> None:
    assert build_engine(make_profile(folder, kv_tokens=0)).config.kv_budget_tokens == 4 * 128


BYTES_PER_TOKEN = 2 * 2 * 32 * 4  # layers, keys and values, width, bytes of a number


def kv_tokens_given(free: int, profile: Profile, ranks: Ranks | None = None) -> int:
    return engine_config(profile, load_profile_model(profile, ranks), free).kv_budget_tokens


def test_an_unnamed_pool_takes_no_more_memory_than_its_share(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("services.denoiser.instance.free_bytes", lambda _: 4 * BYTES_PER_TOKEN * 200)
    assert build_engine(make_profile(folder, kv_tokens=0)).config.kv_budget_tokens == 200


def test_each_of_two_ranks_holds_twice_the_tokens_in_the_same_memory(folder: Path) -> None:
    profile, free = make_profile(folder, kv_tokens=0), 4 * BYTES_PER_TOKEN * 200
    assert kv_tokens_given(free, profile) == 200
    assert kv_tokens_given(free, profile, _HalfOfTheHeads()) == 400


def test_a_pool_that_does_not_hold_one_canvas_is_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="K/V pool of 100 tokens"):
        build_engine(make_profile(folder, kv_tokens=100))
    with pytest.raises(ConfigError, match="K/V pool of 99 tokens"):
        kv_tokens_given(4 * BYTES_PER_TOKEN * 100 - 1, make_profile(folder, kv_tokens=0))


def test_a_named_pool_that_does_not_fit_into_memory_is_refused_with_what_would(folder: Path) -> None:
    profile = make_profile(folder, kv_tokens=600)
    assert kv_tokens_given(600 * BYTES_PER_TOKEN, profile) == 600
    with pytest.raises(ConfigError, match=r"engine.kv_tokens = 600 take .* are free: name at most 149, or 0"):
        kv_tokens_given(600 * BYTES_PER_TOKEN - 1, profile)


def test_a_missing_model_is_a_wrong_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot load the model"):
        build_engine(make_profile(tmp_path))


def test_a_device_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert choose_device("auto") == "cpu"
    with pytest.raises(ConfigError, match="cuda"):
        choose_device("cuda")


def test_auto_is_bfloat16_only_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    for gain, chosen in ((2.0, "bfloat16"), (1.05, "float32"), (0.5, "float32")):
        monkeypatch.setattr(loader, "bfloat16_gain", lambda gain=gain: gain)
        assert choose_dtype("auto", "cpu") == chosen
        assert choose_dtype("bfloat16", "cpu") == "bfloat16"
        assert choose_dtype("auto", "cuda") == "bfloat16"


def test_kernels_and_quantisation_are_the_profile_s(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = make_profile(folder)
    section = msgspec.structs.replace(profile.engine, quantization="fp8")
    model = load_profile_model(msgspec.structs.replace(profile, engine=section))
    assert isinstance(model, Decoder)
    assert (model.kernels.name, model.kernels.quantization) == ("torch", "fp8")
    monkeypatch.setitem(sys.modules, "vllm", None)  # importing it raises ImportError
    section = msgspec.structs.replace(profile.engine, kernels="vllm")
    with pytest.raises(ConfigError, match='cannot load the model: kernels = "vllm" cannot be used'):
        load_profile_model(msgspec.structs.replace(profile, engine=section))
