"""The plain implementation that the engine is measured against decodes as the reference does."""

import functools
from pathlib import Path

import pytest

from tests.conformance.cases import Case, cases_matching, golden_dir
from tools.bench.reference import PlainModel, decode, load_plain

pytestmark = [
    pytest.mark.conformance,
    pytest.mark.skipif(
        golden_dir() is None, reason="no golden cases: GOLDEN_DIR is unset, ../shared/golden is missing"
    ),
]

CASES = [
    case
    for case in cases_matching("llada_none_*", "llada_prefix_*", "llada_dual_*", "llada_gsai_*")
    if not case.inputs.cfg_scale
]


@functools.cache
def plain_model(folder: Path) -> PlainModel:
    return load_plain(folder)


def test_there_are_cases() -> None:
    assert CASES, f"no llada_* cases in {golden_dir()}"


@pytest.mark.parametrize("case", CASES, ids=[case.inputs.case for case in CASES])
def test_plain_reference_decodes_as_expected(case: Case) -> None:
    job, prompt = case.job(), len(case.inputs.prompt_ids)
    decoded = decode(
        plain_model(case.model_folder),
        job.prompt_ids,
        max_tokens=job.max_tokens,
        block_size=job.block_size,
        cache=job.cache,
        choice=job.choice,
    )
    assert decoded.output_ids == case.expected.generated_ids
    assert len(decoded.steps) == case.expected.nfe
    for number, (step, expected) in enumerate(zip(decoded.steps, case.expected.steps, strict=True)):
        wanted = sorted((c.pos - prompt, c.token, c.conf) for c in expected.commits)
        assert [c[:2] for c in step.commits] == [c[:2] for c in wanted], f"step {number}"
        assert [c.confidence for c in step.commits] == pytest.approx([c[2] for c in wanted], abs=2e-4), f"step {number}"
        assert step.num_rows == expected.query_end - expected.query_start, f"step {number}"
