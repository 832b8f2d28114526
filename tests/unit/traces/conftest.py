"""A profile whose model is small and random, and a recording made with it."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.unit.denoiser import random_model
from tools.traces.reader import Traces, open_traces
from tools.traces.recorder import RecordJob, record

ROOT = Path(__file__).parents[3]
TOKENIZER = ROOT / "profiles/tiny-cpu/model"
PROFILE = """
model = "random"
[decoding]
block_size = 8
cache = "dual"
thresholds = [0.2, 0.3, 0.45]
threshold = 0.3
max_tokens = 20
[limits]
max_context_tokens = 160
max_output_tokens = 32
[engine]
dtype = "float32"
device = "cpu"
kv_tokens = 1000
max_requests = 6
max_pass_tokens = 512
"""


def write_profile(folder: Path, *, dream: bool = False, opening_share: float = 0.0) -> Path:
    """The tokenizer and template are the built-in model's; blocks of 8, 20 output tokens, thresholds 0.2, 0.3, 0.45."""
    special = json.loads((TOKENIZER / "config.json").read_text())
    vocab_size = special["vocab_size"]
    sizes = {"vocab_size": vocab_size} if dream else {"vocab_size": vocab_size, "embedding_size": vocab_size}
    random_model.write(
        folder / "model",
        seed=3,
        dream=dream,
        mask_token_id=special["mask_token_id"],
        # one token in 36 ends an answer, so that some do
        eos_token_id=list(range(special["eos_token_id"], vocab_size, 36)),
        **sizes,
    )
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, folder / "model" / name)
    decoding = f"[decoding]\nopening_share = {opening_share}"
    (folder / "profile.toml").write_text(PROFILE.replace("[decoding]", decoding))
    return folder


@pytest.fixture(scope="session")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_profile(tmp_path_factory.mktemp("profile"))


@pytest.fixture
def make_job(profile: Path, tmp_path: Path) -> Callable[..., RecordJob]:
    """A small job; 5 prompts in shards of 2."""

    def make(**changes: object) -> RecordJob:
        values = {"profile": profile, "out": tmp_path / "traces", "num_prompts": 5, "prompts_per_shard": 2}
        return RecordJob(**(values | changes))  # type: ignore[arg-type]

    return make


@pytest.fixture(scope="session")
def traces(profile: Path, tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """8 prompts, all caches, all thresholds and schedules."""
    out = tmp_path_factory.mktemp("traces")
    record(RecordJob(profile=profile, out=out, num_prompts=8, prompts_per_shard=4, caches=("dual", "prefix", "none")))
    return open_traces(out)


@pytest.fixture(scope="session")
def dream_traces(tmp_path_factory: pytest.TempPathFactory) -> Traces:
    """2 prompts on a model of the other architecture, half of each block an opening."""
    profile = write_profile(tmp_path_factory.mktemp("dream"), dream=True, opening_share=0.5)
    out = tmp_path_factory.mktemp("dream_traces")
    record(RecordJob(profile=profile, out=out, num_prompts=2, caches=("dual", "none")))
    return open_traces(out)
