"""The engine commits the reference's tokens, step by step, alone and in a mixed batch, over one rank and over several.

Cases with guidance (`*_cfg*`) are left out: the engine has none.
"""

import itertools
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from services.denoiser.attention import PackedAttention, Place
from services.denoiser.kv_pool import KVPool
from services.denoiser.loader import read_spec
from services.denoiser.models import Batch, Model
from tests.conformance.cases import Case, Ran, cases_matching, golden_dir, model_of, run
from tests.unit.denoiser.thread_ranks import on_ranks

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(
        golden_dir() is None, reason="no golden cases: GOLDEN_DIR is unset, ../shared/golden is missing"
    ),
]

LOGITS_TOLERANCE = 1e-3
CONFIDENCE_TOLERANCE = 2e-4

CASES = [case for case in cases_matching("*") if not case.inputs.cfg_scale]
BY_MODEL = {
    folder: list(group)
    for folder, group in itertools.groupby(
        sorted(CASES, key=lambda case: case.model_folder), key=lambda case: case.model_folder
    )
}
each_case = pytest.mark.parametrize("case", CASES, ids=[case.inputs.case for case in CASES])
each_model = pytest.mark.parametrize("folder", list(BY_MODEL), ids=[folder.name for folder in BY_MODEL])

TIGHT = {"max_batch_tokens": 100, "max_recompute_tokens": 70, "max_logits_bytes": 4096 * 5}
KINDS = {"full": "recompute", "full_cache": "recompute", "prefix_window": "cache", "dual_block": "cache"}


def assert_as_expected(case: Case, ran: Ran) -> None:
    prompt = len(case.inputs.prompt_ids)
    assert len(ran.steps) == case.expected.nfe
    for number, (step, expected) in enumerate(zip(ran.steps, case.expected.steps, strict=True)):
        found = dict(zip(step.commits.positions, step.commits.token_ids, strict=True))
        assert found == {c.pos - prompt: c.token for c in expected.commits}, f"step {number}"
        assert step.commits.positions == sorted(found)
        assert step.kind == KINDS[expected.kind], f"step {number}"
        assert step.num_rows == expected.query_end - expected.query_start, f"step {number}"
        for commit in expected.commits:
            confidence = step.commits.confidences[step.commits.positions.index(commit.pos - prompt)]
            assert confidence == pytest.approx(commit.conf, abs=CONFIDENCE_TOLERANCE), f"step {number}"
    assert ran.output_ids == case.expected.generated_ids


def assert_logits_agree(case: Case, ran: Ran) -> None:
    done: set[int] = set()
    stored = case.step_logits()
    start, size = len(case.inputs.prompt_ids), case.block_size
    for number, step in enumerate(ran.steps):
        if number in stored:
            logits, window_start = stored[number]
            block = range(start + step.block_index * size, start + (step.block_index + 1) * size)
            asked = [p for p in block if p not in done]
            if case.shifted and step.kind == "recompute" and case.inputs.cache_mode != "none":
                asked = asked[:1]
            rows = [p - case.shifted - window_start for p in asked]
            torch.testing.assert_close(
                without_mask(ran.logits[number], case), without_mask(logits[rows], case), rtol=0, atol=LOGITS_TOLERANCE
            )
        done.update(start + p for p in step.commits.positions)


def without_mask(logits: torch.Tensor, case: Case) -> torch.Tensor:
    """Our engine never predicts the mask token, so its column is free."""
    mask_id = model_of(case.model_folder).shape.mask_id
    return torch.cat((logits[:, :mask_id], logits[:, mask_id + 1 :]), dim=1)


def test_there_are_cases() -> None:
    assert CASES, f"no cases in {golden_dir()}"


@each_case
def test_alone(case: Case) -> None:
    ran = run([case])[case.inputs.case]
    assert_as_expected(case, ran)
    assert_logits_agree(case, ran)


@each_model
@pytest.mark.parametrize("passes_between_starts", [0, 1, 3])
def test_all_cases_in_one_batch(folder: Path, passes_between_starts: int) -> None:
    cases = BY_MODEL[folder]
    ran = run(cases, passes_between_starts=passes_between_starts)
    for case in cases:
        assert_as_expected(case, ran[case.inputs.case])
        assert_logits_agree(case, ran[case.inputs.case])


@each_model
def test_all_cases_in_tight_batches(folder: Path) -> None:
    """Requests wait for each other, so that their phases mix in every way; logits are scored in several parts."""
    cases = BY_MODEL[folder]
    ran = run(cases, **TIGHT)
    for case in cases:
        assert_as_expected(case, ran[case.inputs.case])


@each_model
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("config", [{}, TIGHT], ids=["roomy", "tight"])
def test_several_ranks_commit_the_same(folder: Path, size: int, config: dict[str, int]) -> None:
    if size not in read_spec(folder).degrees():
        pytest.skip(f"{folder.name} cannot be divided over {size} ranks")
    cases = BY_MODEL[folder]
    by_rank = on_ranks(size, lambda ranks: run(cases, passes_between_starts=1, ranks=ranks, **config))
    for case in cases:
        first, *others = (ran[case.inputs.case] for ran in by_rank)
        assert_as_expected(case, first)
        assert all(other.steps == first.steps for other in others), "every rank decides from the same bits"


def full_forward(model: Model, ids: torch.Tensor) -> torch.Tensor:
    """Logits of every row of one canvas."""
    shape = model.shape
    pool = KVPool(
        capacity=len(ids),
        num_layers=shape.num_layers,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        dtype=model.dtype,
        device=model.device,
    )
    pool.allocate("canvas", len(ids))
    rows = torch.arange(len(ids))
    batch = Batch(
        token_ids_T=ids,
        rotary_T=model.rotary([(0, len(rows))]),
        row_counts=[len(ids)],
        wanted_M=rows,
        wanted_counts=[len(ids)],
        attention=PackedAttention(pool, [Place("canvas", (0, len(ids)), len(ids))]),
    )
    return model.logits(model.hidden(batch))


@each_model
def test_plain_forward_logits(folder: Path) -> None:
    path = folder / "logits.safetensors"
    if not path.is_file():
        pytest.skip(f"{path} is missing: no logits stored for this model")
    stored = load_file(path)
    for key in [key for key in stored if key.startswith("logits_")]:
        logits = full_forward(model_of(folder), stored[key.replace("logits", "input_ids")])
        torch.testing.assert_close(logits, stored[key], rtol=0, atol=LOGITS_TOLERANCE)
