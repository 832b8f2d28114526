"""Scores and choice rules: the reference's cases, and what is promised about the noise."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from services.denoiser.parallel import Ranks
from services.denoiser.sampler import (
    Noise,
    budget,
    choose_by_budget,
    choose_by_factor,
    choose_by_quota,
    choose_by_threshold,
    gumbel_max,
    negative_entropy,
    noise_keys,
    quota,
    score,
    share_of_time,
    uniforms,
)
from tests.conformance.cases import golden_dir
from tests.unit.denoiser import oracle
from tests.unit.denoiser.thread_ranks import on_ranks

UNUSED_ID = 7  # a token that the reference cases never predict, as our mask token


def unit_file(name: str) -> Path:
    folder = golden_dir()
    if folder is None or not (folder / "unit" / name).is_file():
        pytest.skip(f"no golden unit/{name}: GOLDEN_DIR is unset or lacks it")
    return folder / "unit" / name


def chosen_in(case: dict[str, Any], confidence: np.ndarray) -> np.ndarray:
    if case["factor"] is not None:
        return choose_by_factor(confidence, case["factor"])
    if case["threshold"] is not None:
        return choose_by_threshold(confidence, case["threshold"])
    return choose_by_quota(confidence, case["quota"])


@pytest.mark.conformance
def test_position_choice_is_the_reference_s() -> None:
    cases = json.loads(unit_file("transfer_cases.json").read_text())
    assert cases
    for case in cases:
        eligible = np.flatnonzero(case["masked"])
        if len(eligible) == 0:
            continue  # the engine never asks: such a block is done
        logits = torch.tensor(case["logits"])[eligible]
        token, confidence = score(logits, UNUSED_ID)
        assert token.tolist() == [case["x0"][p] for p in eligible], case["name"]
        chosen = eligible[chosen_in(case, confidence.double().numpy())]
        assert chosen.tolist() == case["selected_r1"], case["name"]


@pytest.mark.conformance
def test_gumbel_argmax_is_the_reference_s() -> None:
    cases = load_file(unit_file("gumbel.safetensors"))
    num_rows = len(cases["logits"])
    temperatures = [float(name.removeprefix("argmax_T")) for name in cases if name.startswith("argmax_T")]
    assert len(temperatures) > 1
    for temperature in temperatures:
        _, token = gumbel_max(
            cases["logits"], cases["uniform"].clone(), torch.full((num_rows,), temperature, dtype=torch.float64)
        )
        assert token.tolist() == cases[f"argmax_T{temperature}"].tolist()
        probability = cases["logits"].softmax(-1)[torch.arange(num_rows), token]
        torch.testing.assert_close(probability.double(), cases[f"conf_T{temperature}"], rtol=0, atol=1e-5)


@pytest.mark.conformance
def test_quotas_are_the_reference_s() -> None:
    cases = json.loads(unit_file("quotas.json").read_text())["num_transfer_tokens"]
    assert cases
    for num_masks, steps, expected in cases:
        assert [quota(num_masks, steps, step) for step in range(steps)] == expected


@given(num_masks=st.integers(1, 200), steps=st.integers(1, 200))
def test_quotas_add_up_to_the_block(num_masks: int, steps: int) -> None:
    assert sum(quota(num_masks, steps, step) for step in range(steps)) == num_masks


confidences = st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.75, 0.9, 1.0]), min_size=1, max_size=20).map(np.array)


@given(confidence=confidences, threshold=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]))
def test_threshold_commits_what_reaches_it_and_the_first_of_the_most_confident(
    confidence: np.ndarray, threshold: float
) -> None:
    chosen = choose_by_threshold(confidence, threshold)
    expected = {i for i, c in enumerate(confidence) if c >= threshold} | {confidence.tolist().index(confidence.max())}
    assert set(np.flatnonzero(chosen)) == expected


@given(confidence=confidences, factor=st.floats(0.0, 3.0))
def test_factor_commits_at_least_one_and_always_the_surest(confidence: np.ndarray, factor: float) -> None:
    chosen = choose_by_factor(confidence, factor)
    assert chosen.any()
    assert chosen.all() or confidence[chosen].min() >= confidence[~chosen].max()
    assert chosen.sum() <= choose_by_factor(confidence, factor + 0.5).sum()


@given(num_masks=st.integers(1, 60), steps=st.integers(1, 60))
def test_budgets_grow_by_the_quota_s_total_and_end_with_the_block(num_masks: int, steps: int) -> None:
    due = [budget(num_masks, steps, step) for step in range(steps + 2)]
    assert due == sorted(due)
    assert due[steps - 1 :] == [num_masks] * 3
    assert all(due[step] == num_masks * (step + 1) // steps for step in range(steps))


def test_a_budget_holds_back_what_reaches_the_threshold() -> None:
    sure = np.array([0.9, 0.95, 0.2, 0.99])
    assert np.flatnonzero(choose_by_budget(sure, 0.5, 2)).tolist() == [1, 3]
    assert np.flatnonzero(choose_by_budget(sure, 0.5, 9)).tolist() == [0, 1, 3]
    assert np.flatnonzero(choose_by_budget(sure, 1.0, 2)).tolist() == [3]


def test_a_share_of_time_is_what_time_takes_off_the_masks() -> None:
    """By hand, time running from 1 to 0.001: 1, 0.75025, 0.5005, 0.25075."""
    assert [share_of_time(32, 4, step) for step in range(4)] == [7, 10, 15, 32]
    assert share_of_time(5, 1, 0) == 5
    assert share_of_time(1, 4, 0) == 0  # a step may commit nothing
    assert share_of_time(3, 4, 9) == 3


def test_ties_go_to_the_lowest_position() -> None:
    tied = np.array([0.5, 0.9, 0.5, 0.9])
    assert np.flatnonzero(choose_by_threshold(tied, 1.0)).tolist() == [1]
    assert np.flatnonzero(choose_by_factor(tied, 0.0)).tolist() == [1]
    assert np.flatnonzero(choose_by_quota(tied, 3)).tolist() == [0, 1, 3]


def test_the_mask_token_is_never_predicted_and_takes_no_probability() -> None:
    token, confidence = score(torch.tensor([[1.0, 50.0, 1.0]]), mask_id=1)
    assert token.tolist() == [0]
    assert confidence.tolist() == pytest.approx([0.5])


@pytest.mark.parametrize("scale", [1.0, 80.0, 1e4])
def test_confidence_neither_overflows_nor_vanishes(scale: float) -> None:
    logits = torch.tensor([[scale, -scale, 0.0, 0.0], [-scale, -scale, -scale, 0.0]])
    expected = logits[:, :3].double().softmax(-1).max(-1)
    token, confidence = score(logits.clone(), mask_id=3)
    assert token.tolist() == expected.indices.tolist()
    torch.testing.assert_close(confidence.double(), expected.values)


def test_noise_touches_only_its_rows_and_never_the_confidence() -> None:
    logits = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    rows = np.array([1, 4])
    keys = noise_keys(np.array([3, 3]), np.array([10, 11]), np.array([0, 0]))
    token, confidence = score(logits.clone(), 7, Noise(rows, keys, np.array([0.9, 5.0])))
    plain, plain_confidence = score(logits.clone(), 7)
    cold = [0, 2, 3, 5]
    assert token[cold].tolist() == plain[cold].tolist()
    assert confidence[cold].tolist() == plain_confidence[cold].tolist()
    logits[:, 7] = -torch.inf
    expected = logits.double().softmax(-1)[torch.arange(6), token]
    torch.testing.assert_close(confidence.double(), expected, rtol=1e-5, atol=1e-7)
    assert token[4] != plain[4]  # at temperature 5 this draw is another


@given(
    seed=st.integers(-(2**63), 2**63 - 1),
    position=st.integers(0, 10_000),
    step=st.integers(0, 300),
    token=st.integers(0, 150_000),
)
@settings(max_examples=50)
def test_uniform_is_the_documented_function_of_seed_position_step_and_token(
    seed: int, position: int, step: int, token: int
) -> None:
    keys = torch.from_numpy(noise_keys(np.array([seed]), np.array([position]), np.array([step])))
    assert uniforms(keys, 1, first_id=token).item() == oracle.uniform(seed, position, step, token)


def test_uniform_numbers_of_a_vocabulary_slice_are_those_of_the_whole() -> None:
    keys = torch.from_numpy(noise_keys(np.arange(3), np.arange(3), np.arange(3)))
    whole = uniforms(keys, 100)
    assert torch.equal(uniforms(keys, 40, first_id=60), whole[:, 60:])


def test_uniform_numbers_are_uniform_and_unrelated() -> None:
    seeds, positions, steps = (g.ravel() for g in np.meshgrid(np.arange(8), np.arange(16), np.arange(8)))
    numbers = uniforms(torch.from_numpy(noise_keys(seeds, positions, steps)), 1000)  # about a million
    assert numbers.min() > 0.0
    assert numbers.max() < 1.0
    counts = torch.histc(numbers, bins=100, min=0.0, max=1.0)
    expected = numbers.numel() / 100
    chi_square = ((counts - expected) ** 2 / expected).sum().item()
    assert chi_square < 99 + 5 * (2 * 99) ** 0.5  # five standard deviations over the mean
    for rows in (numbers, numbers.T):  # along token ids, along (seed, position, step)
        centred = rows - 0.5
        neighbours = (centred[:, 1:] * centred[:, :-1]).mean().item() * 12
        assert abs(neighbours) < 5 / rows[:, 1:].numel() ** 0.5
    assert len(torch.unique(numbers)) == numbers.numel()


logits_rows = st.integers(0, 2**32 - 1).map(
    lambda seed: torch.randn(5, 24, generator=torch.Generator().manual_seed(seed)).mul_(4.0)
)


def of_rank(logits: torch.Tensor, rank: int, size: int) -> tuple[torch.Tensor, int]:
    """Its share of the vocabulary, and the first token id of that."""
    width = logits.shape[-1] // size
    return logits[:, rank * width : (rank + 1) * width].clone(), rank * width


@given(logits=logits_rows, size=st.sampled_from([2, 3, 4]), mask_id=st.integers(0, 23), hot=st.sets(st.integers(0, 4)))
@settings(max_examples=60, deadline=None)
def test_ranks_that_share_the_vocabulary_score_as_one(
    logits: torch.Tensor, size: int, mask_id: int, hot: set[int]
) -> None:
    rows = np.array(sorted(hot), dtype=np.int64)
    noise = Noise(rows, noise_keys(rows, rows, rows), np.full(len(rows), 2.0)) if hot else None
    token, confidence = score(logits.clone(), mask_id, noise)

    def score_share(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        share, first_id = of_rank(logits, ranks.rank, size)
        return score(share, mask_id, noise, first_id=first_id, ranks=ranks)

    scores = on_ranks(size, score_share)
    for other_token, other_confidence in scores:
        assert other_token.tolist() == token.tolist()
        torch.testing.assert_close(other_confidence.float(), confidence, rtol=1e-5, atol=1e-7)
        assert torch.equal(other_confidence, scores[0][1]), "the same bits on every rank"


@pytest.mark.parametrize("size", [1, 2, 4])
def test_ties_go_to_the_lowest_token_id_on_any_rank(size: int) -> None:
    logits = torch.zeros(4, 8)
    for row, best in enumerate([(3, 4), (5, 7), (0, 6), (2, 3, 4, 5)]):
        logits[row, list(best)] = 1.0

    def score_share(ranks: Ranks) -> list[int]:
        share, first_id = of_rank(logits, ranks.rank, size)
        return score(share, 1, first_id=first_id, ranks=ranks)[0].tolist()

    assert on_ranks(size, score_share) == [[3, 5, 0, 2]] * size


@given(logits=logits_rows, size=st.sampled_from([1, 2, 4]))
@settings(max_examples=20, deadline=None)
def test_negative_entropy_is_the_sum_of_p_ln_p_over_all_ranks(logits: torch.Tensor, size: int) -> None:
    def of_share(ranks: Ranks) -> torch.Tensor:
        share, first_id = of_rank(logits, ranks.rank, size)
        return negative_entropy(share, UNUSED_ID, first_id=first_id, ranks=ranks)

    kept = torch.cat((logits[:, :UNUSED_ID], logits[:, UNUSED_ID + 1 :]), dim=1).double().softmax(-1)
    for found in on_ranks(size, of_share):
        torch.testing.assert_close(found, (kept * kept.log()).sum(-1), rtol=1e-5, atol=1e-6)


def test_sampling_follows_the_tempered_softmax() -> None:
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, 0.5])
    draws, temperature = 20_000, 0.7
    keys = noise_keys(np.arange(draws), np.zeros(draws, dtype=np.int64), np.zeros(draws, dtype=np.int64))
    noise = Noise(np.arange(draws), keys, np.full(draws, temperature))
    token, _ = score(logits.repeat(draws, 1), 4, noise)
    logits[4] = -torch.inf
    expected = (logits / temperature).softmax(-1)
    found = torch.bincount(token, minlength=5) / draws
    torch.testing.assert_close(found, expected, rtol=0, atol=5 * 0.5 / draws**0.5)
