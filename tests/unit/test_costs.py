"""Prices of steps: exact where they are stated, never falling with more work, and read from latency.json."""

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.costs import (
    DegreeProfile,
    FitError,
    LatencyProfile,
    MeasuredPass,
    PassCost,
    PassLoad,
    Resident,
    dump_latency,
    load_latency,
    mean_pass,
    read_latency_file,
    step_load,
)
from services.settings import ConfigError

CURVE = ((100.0, 10.0), (200.0, 30.0), (400.0, 30.0), (500.0, 40.0))
COST = PassCost(curve=CURVE, recompute_step_ms=2.0, cache_step_ms=0.5, key_ms=0.01, pair_ms=0.0001)

amounts = st.floats(0.0, 20_000.0)
loads = st.builds(PassLoad, amounts, amounts, amounts, amounts, amounts)
times = st.floats(0.0, 500.0)


@st.composite
def costs(draw: st.DrawFn) -> PassCost:
    tokens = sorted(draw(st.sets(st.integers(1, 8192), min_size=1, max_size=10)))
    ms = sorted(draw(st.lists(times, min_size=len(tokens), max_size=len(tokens))))
    step, cache_step, key, pair = (draw(times) for _ in range(4))
    return PassCost(
        curve=tuple(zip(map(float, tokens), ms, strict=True)),
        recompute_step_ms=step,
        cache_step_ms=cache_step,
        key_ms=key,
        pair_ms=pair,
    )


@given(costs(), loads, loads)
def test_more_work_of_any_sort_never_costs_less(cost: PassCost, load: PassLoad, more: PassLoad) -> None:
    assert cost.ms(load) <= cost.ms(load.plus(more)) * (1 + 1e-9)


@given(costs(), st.floats(1.0, 8192.0))
def test_between_two_points_of_the_curve_a_pass_costs_between_what_they_do(cost: PassCost, tokens: float) -> None:
    ms = cost.ms(PassLoad(tokens))
    below = [point_ms for point, point_ms in cost.curve if point <= tokens]
    above = [point_ms for point, point_ms in cost.curve if point >= tokens]
    assert ms >= (below[-1] if below else cost.curve[0][1]) * (1 - 1e-9)
    if above:
        assert ms <= above[0] * (1 + 1e-9)


def test_the_curve_goes_through_its_points_between_them_and_beyond() -> None:
    cost = PassCost(curve=CURVE)
    assert [cost.ms(PassLoad(tokens)) for tokens in (0, 1, 100, 150, 200, 300, 400, 450, 500, 600)] == [
        0.0,  # nothing in the pass
        10.0,  # flat below the first point
        10.0,
        20.0,
        30.0,
        30.0,
        30.0,
        35.0,
        40.0,
        50.0,  # the last slope goes on
    ]
    assert PassCost(curve=((64.0, 5.0),)).ms(PassLoad(1000.0)) == 5.0


def test_steps_keys_and_pairs_cost_beside_the_rows() -> None:
    recompute, cache = step_load("recompute", 150, 150), step_load("cache", 10, 150, steps=5)
    assert (recompute.kind, cache.kind, recompute.plus(cache).kind) == ("recompute", "cache", "mixed")
    assert COST.ms(recompute) == pytest.approx(20.0 + 2.0 + 0.01 * 150 + 0.0001 * 150 * 150)
    assert COST.ms(cache) == pytest.approx(10.0 + 5 * 0.5 + 0.01 * 750 + 0.0001 * 50 * 150)


def test_all_rows_of_a_mixed_pass_share_the_curve() -> None:
    mixed = step_load("recompute", 150, 150).plus(step_load("cache", 10, 150, steps=5))
    assert COST.ms(mixed) == pytest.approx(30.0 + 2.0 + 5 * 0.5 + 0.01 * 900 + 0.0001 * 200 * 150)


def test_a_degree_that_was_not_measured_is_refused_by_name() -> None:
    latency = LatencyProfile({4: COST, 1: COST})
    assert latency.step_ms(4, PassLoad(100.0)) == 10.0
    with pytest.raises(ConfigError, match=r"TP degree 1,4, not 2: .*denoiser profile` with --tp 1,4,2"):
        latency.step_ms(2, PassLoad(100.0))
    assert [latency.nearest_degree(degree) for degree in (1, 2, 4, 8)] == [1, 1, 4, 4]
    assert LatencyProfile({4: COST}).nearest_degree(2) == 4


def test_a_resident_weighs_by_its_cache_mode() -> None:
    def weight(cache: str) -> PassLoad:
        resident = Resident(canvas_tokens=300, block_size=32, cache=cache, output_tokens_left=128)  # type: ignore[arg-type]
        return mean_pass([resident], steps_per_block=4.0)

    assert weight("none") == PassLoad(300.0, 1.0, 0.0, 300.0, 90_000.0)
    assert weight("dual") == PassLoad(75.0 + 24.0, 0.25, 0.75, 300.0, 99.0 * 300)
    assert weight("prefix") == PassLoad(75.0 + 96.0, 0.25, 0.75, 300.0, 171.0 * 300)


@pytest.mark.parametrize(("left", "blocks_ahead", "seen"), [(128, 1, 64), (128, 0, 32), (32, 1, 32), (128, 9, 128)])
def test_a_resident_weighs_by_what_the_model_sees_of_its_canvas(left: int, blocks_ahead: int, seen: int) -> None:
    canvas_seen = 300 - left + seen
    for cache, window in (("none", canvas_seen), ("dual", 32), ("prefix", seen)):
        resident = Resident(300, 32, cache, left, blocks_ahead)  # type: ignore[arg-type]
        recompute = 1.0 if cache == "none" else 0.25
        rows = recompute * canvas_seen + (1 - recompute) * window
        expected = PassLoad(rows, recompute, 1 - recompute, canvas_seen, rows * canvas_seen)
        assert mean_pass([resident], steps_per_block=4.0) == pytest.approx(expected)


def test_what_residents_put_into_a_pass_adds_up() -> None:
    one = Resident(canvas_tokens=300, block_size=32, cache="dual", output_tokens_left=128)
    other = Resident(canvas_tokens=100, block_size=32, cache="none", output_tokens_left=64)
    assert mean_pass([one, other], 8.0) == pytest.approx(mean_pass([one], 8.0).plus(mean_pass([other], 8.0)))
    assert mean_pass([], 8.0) == PassLoad()


def test_a_look_up_costs_a_few_microseconds() -> None:
    latency = LatencyProfile({1: COST})
    load = step_load("recompute", 300, 300)
    latency.step_ms(1, load)
    started = time.thread_time()
    for _ in range(1000):
        latency.step_ms(1, load)
    assert (time.thread_time() - started) / 1000 < 20e-6, "a scheduler prices thousands of passes a second"


# --- latency.json -------------------------------------------------------------------------------------------------


def test_a_latency_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    measured = MeasuredPass(load=PassLoad(64.0, 1.0, 0.0, 64.0, 4096.0), ms=5.5, low_ms=5.25, high_ms=6.0, samples=9)
    error = FitError(kind="recompute", passes=1, median=0.01, p95=0.02, unseen_median=0.03, unseen_p95=0.04)
    degrees = (
        DegreeProfile(tp_degree=1, cost=COST, errors=(error,), passes=(measured, measured)),
        DegreeProfile(tp_degree=2, cost=PassCost(curve=((32.0, 7.0),))),
    )
    dump_latency(path, "a machine", degrees)
    assert len(path.read_text().splitlines()) >= 8, "for people to read"
    found = read_latency_file(path)
    assert (found.hardware, found.degrees) == ("a machine", degrees)
    latency = load_latency(path)
    assert (latency.degrees, latency.step_ms(2, PassLoad(50.0))) == ([1, 2], 7.0)


def one_degree(cost: str) -> str:
    return f'{{"format": 2, "hardware": "x", "degrees": [{{"tp_degree": 1, "cost": {cost}}}]}}'


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "latency.json"),
        ('{"hardware": "x", "measured": []}', "format 1, not 2: measure it anew, .*denoiser profile"),
        ('{"format": 2, "hardware": "x", "degrees": []}', "length >= 1"),
        (one_degree('{"curve": []}'), "at least one point"),
        (one_degree('{"curve": [[10, 5], [20, 4]]}'), "goes up: 4 ms at 20 tokens after 5 at 10"),
        (one_degree('{"curve": [[10, 5], [10, 6]]}'), "goes up"),
        (one_degree('{"curve": [[10, 5]], "pair_ms": -1}'), "pair_ms"),
        (one_degree('{"curve": [[10, 5]], "row_ms": 1}'), "row_ms"),
    ],
)
def test_a_wrong_latency_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "latency.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load_latency(tmp_path / "latency.json")


def test_a_missing_latency_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m services\.denoiser profile"):
        load_latency(tmp_path / "latency.json")
