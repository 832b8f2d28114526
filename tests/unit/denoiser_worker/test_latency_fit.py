"""The fit finds what a machine is made of, cannot promise negative times, and says honestly how far it is off."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from services.costs import MeasuredPass, PassCost, PassLoad, step_load
from services.denoiser.engine import EngineConfig
from services.denoiser.latency_fit import errors_of, fit, nonnegative_least_squares, relative_error
from services.denoiser.latency_plan import plan_mixes

MACHINE = PassCost(
    curve=((32.0, 4.0), (64.0, 4.5), (128.0, 5.5), (256.0, 9.0), (512.0, 15.0), (1024.0, 27.0), (2048.0, 54.0)),
    recompute_step_ms=0.5,
    cache_step_ms=0.2,
    key_ms=0.002,
    pair_ms=0.00004,
)
CONFIG = EngineConfig(kv_budget_tokens=16384, max_requests=16, max_batch_tokens=2048)
PLAN = plan_mixes(32, 768, CONFIG, quick=False)


def make_pass(load: PassLoad, ms: float) -> MeasuredPass:
    return MeasuredPass(load=load, ms=ms, low_ms=ms, high_ms=ms, samples=1)


def measured_on(machine: PassCost, *, noise: float = 0.0, mixed: float = 1.0) -> list[MeasuredPass]:
    """The profiler's plan on this machine; `mixed` is how much longer mixed passes take than the cost says."""
    rng = random.Random(5)
    return [
        make_pass(
            mix.load, machine.ms(mix.load) * rng.lognormvariate(0.0, noise) * (mixed if mix.load.kind == "mixed" else 1)
        )
        for mix in PLAN
    ]


def passes_to_come() -> list[PassLoad]:
    """What an engine with eight requests does, at row counts that were never measured."""
    rng = random.Random(6)
    loads = []
    for _ in range(200):
        load = step_load("cache", 32, rng.randint(100, 700), rng.randint(0, 7))
        if rng.random() < 0.4 or not load.tokens:
            canvas = rng.randint(100, 700)
            load = load.plus(step_load("recompute", canvas, canvas))
        loads.append(load)
    return loads


def test_a_machine_is_found_as_it_is() -> None:
    found = fit(measured_on(MACHINE))
    assert [found.ms(load) for load in passes_to_come()] == pytest.approx(
        [MACHINE.ms(load) for load in passes_to_come()], rel=0.005
    )
    assert found.recompute_step_ms == pytest.approx(0.5, rel=0.05)
    assert found.cache_step_ms == pytest.approx(0.2, rel=0.05)
    assert found.key_ms == pytest.approx(0.002, rel=0.05)
    assert found.pair_ms == pytest.approx(0.00004, rel=0.05)


def test_noise_moves_what_is_found_by_less_than_itself() -> None:
    passes = measured_on(MACHINE, noise=0.04)
    found = fit(passes)
    errors = [abs(found.ms(load) / MACHINE.ms(load) - 1) for load in passes_to_come()]
    assert np.median(errors) < 0.02
    assert max(errors) < 0.06
    for error in errors_of(found, passes):
        assert 0.01 < error.unseen_median < 0.06, "the noise of the unseen passes themselves"
        assert error.unseen_median < error.unseen_p95 < 0.15


def test_the_error_of_mixed_passes_is_told_by_passes_of_one_kind() -> None:
    """Here they take a quarter longer than what they are made of says."""
    passes = measured_on(MACHINE, mixed=1.25)
    recompute, cache, mixed = errors_of(fit(passes), passes)
    assert [recompute.kind, cache.kind, mixed.kind] == ["recompute", "cache", "mixed"]
    assert recompute.passes + cache.passes + mixed.passes == len(PLAN)
    assert mixed.unseen_median == pytest.approx(0.2, abs=0.005)
    assert mixed.median < mixed.unseen_median, "having seen them it gives way a little"
    blind = [measured for measured in passes if measured.load.kind != "mixed"]
    assert all(error.p95 < 0.02 for error in errors_of(fit(blind), blind))


def test_passes_of_which_only_the_rows_are_known_give_a_curve_alone() -> None:
    """As in profiles that others have published: raw samples that go down now and then."""
    rng = random.Random(7)
    rows = range(32, 4097, 32)
    found = fit([make_pass(PassLoad(n), (12.0 + 0.03 * n) * rng.uniform(0.95, 1.05)) for n in map(float, rows)])
    assert (found.recompute_step_ms, found.cache_step_ms, found.key_ms, found.pair_ms) == (0.0, 0.0, 0.0, 0.0)
    assert found.curve[0][0] == 32
    assert found.curve[-1][0] == 4096
    assert [found.ms(PassLoad(n)) for n in (100.0, 1000.0, 4000.0)] == pytest.approx([15.0, 42.0, 132.0], rel=0.03)


def test_one_pass_is_a_flat_curve_and_none_is_refused() -> None:
    load = step_load("cache", 32, 100)
    assert fit([make_pass(load, 7.0)]).ms(load) == pytest.approx(7.0)
    with pytest.raises(ValueError, match="nothing to fit"):
        fit([])


def test_an_error_is_relative_and_positive_where_the_fit_is_too_slow() -> None:
    cost = PassCost(curve=((10.0, 5.0),))
    assert relative_error(cost, make_pass(PassLoad(10.0), 4.0)) == pytest.approx(0.25)


counts = st.integers(0, 20)
some_loads = st.builds(
    lambda recomputes, canvas, cached, window: step_load("recompute", canvas, canvas, recomputes).plus(
        step_load("cache", window, canvas, cached)
    ),
    counts,
    st.integers(1, 4000),
    counts,
    st.integers(1, 64),
).filter(lambda load: load.tokens > 0)


@settings(deadline=None)
@given(st.lists(st.builds(make_pass, some_loads, st.floats(0.01, 1e4)), min_size=1, max_size=12))
def test_whatever_was_measured_more_work_never_costs_less(passes: list[MeasuredPass]) -> None:
    cost = fit(passes)  # a PassCost: it takes neither negative times nor a curve that falls
    by_rows = sorted(passes, key=lambda measured: measured.load.tokens)
    times = [cost.ms(PassLoad(measured.load.tokens)) for measured in by_rows]
    assert all(left <= right * (1 + 1e-9) for left, right in itertools.pairwise(times))
    assert all(error.p95 >= error.median >= 0 for error in errors_of(cost, passes))


@settings(deadline=None)
@given(
    arrays.arrays(np.float64, (6, 4), elements=st.integers(-3, 3).map(float)),
    arrays.arrays(np.float64, 6, elements=st.integers(-5, 5).map(float)),
)
def test_no_choice_of_variables_held_at_zero_is_nearer(columns: np.ndarray, wanted: np.ndarray) -> None:
    x = nonnegative_least_squares(columns, wanted)
    assert (x >= 0).all()
    nearest = float(np.linalg.norm(wanted))
    for count in range(1, 5):
        for chosen in itertools.combinations(range(4), count):
            part = np.linalg.lstsq(columns[:, chosen], wanted, rcond=None)[0]
            if (part >= -1e-9).all():
                nearest = min(nearest, float(np.linalg.norm(columns[:, chosen] @ part - wanted)))
    assert np.linalg.norm(columns @ x - wanted) <= nearest + 1e-7
