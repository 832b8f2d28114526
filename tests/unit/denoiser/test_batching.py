"""Who rides: budgets, fairness, determinism."""

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from services.denoiser.batching import BatchLimits, StepKind, choose_riders, note_waits


@dataclass
class Request:
    arrival_no: int
    kind: StepKind
    num_rows: int
    passes_waited: int = 0


def numbers(riders: list[Request]) -> list[int]:
    return [rider.arrival_no for rider in riders]


candidates = st.lists(
    st.tuples(st.sampled_from(["recompute", "cache"]), st.integers(1, 300), st.integers(0, 5)), min_size=1, max_size=12
).map(lambda rows: [Request(number, *row) for number, row in enumerate(rows)])
limits = st.builds(BatchLimits, max_batch_tokens=st.integers(1, 800), max_recompute_tokens=st.integers(1, 600))


def test_all_ride_when_they_fit() -> None:
    mixed = [Request(0, "recompute", 100), Request(1, "cache", 32), Request(2, "recompute", 50)]
    assert choose_riders(mixed, BatchLimits(max_batch_tokens=182, max_recompute_tokens=150)) == mixed


def test_recomputes_are_spread_while_cache_steps_run() -> None:
    mixed = [
        Request(0, "recompute", 400),
        Request(1, "recompute", 400),
        Request(2, "cache", 32),
        Request(3, "cache", 32),
    ]
    assert numbers(choose_riders(mixed, BatchLimits(max_batch_tokens=2000, max_recompute_tokens=500))) == [0, 2, 3]


def test_an_oversized_step_rides_when_it_has_waited_most() -> None:
    limits = BatchLimits(max_batch_tokens=100, max_recompute_tokens=100)
    assert numbers(choose_riders([Request(0, "cache", 32), Request(1, "recompute", 900)], limits)) == [0]
    assert numbers(choose_riders([Request(0, "cache", 32), Request(1, "recompute", 900, 1)], limits)) == [1]


@given(candidates, limits)
def test_budgets_hold_but_for_a_first_rider_that_exceeds_them_alone(
    candidates: list[Request], limits: BatchLimits
) -> None:
    riders = choose_riders(candidates, limits)
    assert riders
    assert len(riders) == 1 or sum(rider.num_rows for rider in riders) <= limits.max_batch_tokens
    recomputes = [rider.num_rows for rider in riders if rider.kind == "recompute"]
    assert len(recomputes) <= 1 or sum(recomputes) <= limits.max_recompute_tokens


@given(candidates, limits, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(candidates: list[Request], limits: BatchLimits, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(candidates, len(candidates))
    assert choose_riders(shuffled, limits) == choose_riders(candidates, limits)


@given(candidates, limits)
def test_no_one_who_fits_is_left_behind_for_nothing(candidates: list[Request], limits: BatchLimits) -> None:
    riders = choose_riders(candidates, limits)
    free = limits.max_batch_tokens - sum(rider.num_rows for rider in riders)
    left = [candidate for candidate in candidates if candidate not in riders]
    assert all(candidate.num_rows > free for candidate in left if candidate.kind == "cache")


@given(candidates, limits, st.lists(st.sampled_from(["recompute", "cache"]), min_size=1, max_size=7))
def test_among_n_everyone_rides_in_every_n_passes(
    candidates: list[Request], limits: BatchLimits, kinds: list[StepKind]
) -> None:
    """Whatever kinds their next steps turn out to be."""
    for candidate in candidates:
        candidate.passes_waited = 0
    for number in range(5 * len(candidates)):
        for candidate in candidates:
            candidate.kind = kinds[(number + candidate.arrival_no) % len(kinds)]
        riders = choose_riders(candidates, limits)
        note_waits(candidates, riders)
        assert {c.arrival_no for c in candidates if c.passes_waited == 0} == set(numbers(riders))
        assert max(candidate.passes_waited for candidate in candidates) < len(candidates)
