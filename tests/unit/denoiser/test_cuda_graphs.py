"""Passes in buckets do what passes as they are do: here without graphs, on a CPU, over the same buffers."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from services.denoiser.cuda_graphs import BUCKETS, Bucket, Forward, PaddedPasses, forward_of, smallest_bucket
from services.denoiser.engine import Engine, EngineConfig, Job, Threshold
from services.denoiser.kv_pool import KVPool
from services.denoiser.loader import load_model
from services.denoiser.models import Model
from tests.unit.denoiser import random_model
from tests.unit.denoiser.oracle import OracleModel, decode
from tests.unit.denoiser.reference_varlen import reference_varlen
from tests.unit.denoiser.test_engine_against_oracle import SAFE_MARGIN, assert_same, jobs, run

SMALL = (Bucket(4, 1), Bucket(16, 2), Bucket(24, 4), Bucket(60, 4))


class Counted:
    """Records nothing: runs the pass each time, and counts."""

    def __init__(self) -> None:
        self.rows: list[int] = []  # of each pass in a bucket

    def record(self, forward: Forward) -> Forward:
        def counted() -> torch.Tensor:
            hidden = forward()
            self.rows.append(len(hidden))
            return hidden

        forward()
        return counted


@pytest.fixture(scope="module", params=["llada", "dream"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write(tmp_path_factory.mktemp("model") / request.param, dream=request.param == "dream")


@pytest.fixture(scope="module")
def model(folder: Path) -> Model:
    model = load_model(folder)
    model.varlen = reference_varlen
    return model


@pytest.fixture(scope="module")
def oracle(folder: Path) -> OracleModel:
    return OracleModel(folder)


def in_buckets(model: Model, counted: Counted, kv_tokens: int = 1000, buckets: Sequence[Bucket] = SMALL) -> Engine:
    engine = Engine(model, config=EngineConfig(kv_budget_tokens=kv_tokens))
    for layer in range(model.shape.num_layers):
        for half in engine.pool.all_keys_values(layer):
            half.fill_(torch.nan)  # nothing is read that was not written
    engine.forward = PaddedPasses(model, engine.pool, reference_varlen, buckets, counted.record).hidden
    return engine


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(drawn=st.lists(st.tuples(jobs(), st.integers(0, 6)), min_size=1, max_size=5), kv_tokens=st.integers(80, 300))
def test_requests_in_buckets_get_the_oracle_s_tokens(
    model: Model, oracle: OracleModel, drawn: list[tuple[Job, int]], kv_tokens: int
) -> None:
    """Whatever the windows, the gaps between requests, and the passes that the buffers held before."""
    taken = [msgspec.structs.replace(job, request_id=str(number)) for number, (job, _) in enumerate(drawn)]
    expected = {job.request_id: decode(oracle, job) for job in taken}
    assume(all(decoded.margin > SAFE_MARGIN for decoded in expected.values()))
    steps, outputs = run(in_buckets(model, Counted(), kv_tokens), taken, [start for _, start in drawn])
    for name, decoded in expected.items():
        assert_same(steps[name], outputs[name], decoded)


def make_job(request_id: str, prompt_tokens: int = 40) -> Job:
    return Job(
        request_id=request_id,
        prompt_ids=[3] * prompt_tokens,
        max_tokens=8,
        block_size=8,
        choice=Threshold(1.0),
        ignore_eos=True,
    )


def test_few_rows_run_in_the_smallest_bucket_and_many_as_they_are(model: Model) -> None:
    counted = Counted()
    engine = in_buckets(model, counted)
    engine.admit(make_job("a"))
    engine.admit(make_job("b"))
    assert engine.step().tokens_in_pass == 96
    assert counted.rows == []
    assert engine.step().tokens_in_pass == 16
    assert counted.rows == [16]
    engine.admit(make_job("c", prompt_tokens=30))
    assert engine.step().tokens_in_pass == 54
    assert counted.rows == [16, 60]
    assert engine.step().tokens_in_pass == 24
    assert counted.rows == [16, 60, 24]


def test_padding_writes_to_the_spare_slot_alone(model: Model) -> None:
    engine = in_buckets(model, Counted())
    engine.admit(make_job("a", prompt_tokens=10))
    engine.step()
    engine.step()
    for layer in range(model.shape.num_layers):
        written = ~torch.cat(engine.pool.all_keys_values(layer), dim=1).isnan().all(-1).all(-1)
        assert written.nonzero().flatten().tolist() == [*range(18), engine.pool.spare_slot]


# --- which bucket -----------------------------------------------------------------------------------------------------


@given(rows=st.integers(1, 600), requests=st.integers(1, 80))
def test_the_smallest_bucket_that_holds_a_pass(rows: int, requests: int) -> None:
    fitting = [b for b in BUCKETS if b.num_rows >= rows and b.num_requests >= requests]
    assert smallest_bucket(BUCKETS, rows, requests) == (min(fitting) if fitting else None)


def test_buckets_ascend_and_hold_a_block_of_eight_for_every_request() -> None:
    assert list(BUCKETS) == sorted(BUCKETS)
    for rows in (32, 96, 256, 512):
        bucket = smallest_bucket(BUCKETS, rows, rows // 8)
        assert bucket is not None
        assert bucket.num_rows == rows
    assert smallest_bucket(BUCKETS, 513, 1) is None


def test_without_a_gpu_passes_run_as_they_are(model: Model) -> None:
    pool = KVPool(capacity=8, num_layers=1, num_kv_heads=1, head_dim=2, dtype=model.dtype, device=model.device)
    assert forward_of(model, pool) == model.hidden
