"""Who rides: budgets, fairness, determinism."""

from hypothesis import given
from hypothesis import strategies as st

from services.denoiser.batching import BatchLimits, Candidate, choose_riders


def make(arrival_no: int, kind: str, num_rows: int, passes_waited: int = 0) -> Candidate:
    return Candidate(arrival_no=arrival_no, kind=kind, num_rows=num_rows, passes_waited=passes_waited)  # type: ignore[arg-type]


def numbers(riders: list[Candidate]) -> list[int]:
    return [rider.arrival_no for rider in riders]


candidates = st.lists(
    st.tuples(st.sampled_from(["recompute", "cache"]), st.integers(1, 300), st.integers(0, 5)), min_size=1, max_size=12
).map(lambda rows: [make(number, *row) for number, row in enumerate(rows)])
limits = st.builds(BatchLimits, max_batch_tokens=st.integers(1, 800), max_recompute_tokens=st.integers(1, 600))


def test_all_ride_when_they_fit() -> None:
    mixed = [make(0, "recompute", 100), make(1, "cache", 32), make(2, "recompute", 50)]
    assert choose_riders(mixed, BatchLimits(max_batch_tokens=182, max_recompute_tokens=150)) == mixed


def test_recomputes_are_spread_while_cache_steps_run() -> None:
    mixed = [make(0, "recompute", 400), make(1, "recompute", 400), make(2, "cache", 32), make(3, "cache", 32)]
    assert numbers(choose_riders(mixed, BatchLimits(max_batch_tokens=2000, max_recompute_tokens=500))) == [0, 2, 3]


def test_an_oversized_step_rides_when_it_has_waited_most() -> None:
    limits = BatchLimits(max_batch_tokens=100, max_recompute_tokens=100)
    assert numbers(choose_riders([make(0, "cache", 32), make(1, "recompute", 900)], limits)) == [0]
    assert numbers(choose_riders([make(0, "cache", 32), make(1, "recompute", 900, 1)], limits)) == [1]


@given(candidates, limits)
def test_budgets_hold_but_for_a_first_rider_that_exceeds_them_alone(
    candidates: list[Candidate], limits: BatchLimits
) -> None:
    riders = choose_riders(candidates, limits)
    assert riders
    assert len(riders) == 1 or sum(rider.num_rows for rider in riders) <= limits.max_batch_tokens
    recomputes = [rider.num_rows for rider in riders if rider.kind == "recompute"]
    assert len(recomputes) <= 1 or sum(recomputes) <= limits.max_recompute_tokens


@given(candidates, limits, st.randoms(use_true_random=False))
def test_the_order_of_the_candidates_does_not_matter(candidates: list[Candidate], limits: BatchLimits, random) -> None:  # type: ignore[no-untyped-def]
    shuffled = random.sample(candidates, len(candidates))
    assert choose_riders(shuffled, limits) == choose_riders(candidates, limits)


@given(candidates, limits)
def test_no_one_who_fits_is_left_behind_for_nothing(candidates: list[Candidate], limits: BatchLimits) -> None:
    riders = choose_riders(candidates, limits)
    free = limits.max_batch_tokens - sum(rider.num_rows for rider in riders)
    left = [candidate for candidate in candidates if candidate not in riders]
    assert all(candidate.num_rows > free for candidate in left if candidate.kind == "cache")


@given(candidates, limits, st.lists(st.sampled_from(["recompute", "cache"]), min_size=1, max_size=7))
def test_among_n_everyone_rides_in_every_n_passes(
    candidates: list[Candidate], limits: BatchLimits, kinds: list[str]
) -> None:
    """Whatever kinds their next steps turn out to be."""
    waited = {candidate.arrival_no: 0 for candidate in candidates}
    rows = {candidate.arrival_no: candidate.num_rows for candidate in candidates}
    for number in range(5 * len(candidates)):
        waiting = [make(a, kinds[(number + a) % len(kinds)], rows[a], w) for a, w in waited.items()]
        riding = set(numbers(choose_riders(waiting, limits)))
        waited = {arrival_no: 0 if arrival_no in riding else w + 1 for arrival_no, w in waited.items()}
        assert max(waited.values()) < len(candidates)
