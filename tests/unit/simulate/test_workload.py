from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from tools.simulate.workload import Phase, arrivals


def test_arrivals_are_a_poisson_process_of_that_rate() -> None:
    times = [arrival.at for arrival in arrivals([Phase(20.0, 500.0)], 10, seed=1)]
    gaps = [later - earlier for earlier, later in pairwise(times)]
    assert len(times) == pytest.approx(10_000, rel=0.04)
    assert fmean(gaps) == pytest.approx(0.05, rel=0.04)
    assert pstdev(gaps) / fmean(gaps) == pytest.approx(1.0, abs=0.05)


def test_phases_follow_one_another() -> None:
    times = [a.at for a in arrivals([Phase(5.0, 100.0), Phase(0.0, 50.0), Phase(50.0, 100.0)], 10, seed=2)]
    by_phase = [
        sum(start <= at < start + length for at in times) for start, length in ((0, 100), (100, 50), (150, 100))
    ]
    assert by_phase == [pytest.approx(500, rel=0.15), 0, pytest.approx(5000, rel=0.06)]
    assert times == sorted(times)


def test_each_prompt_is_asked_as_often_as_any_other() -> None:
    asked = [arrival.prompt for arrival in arrivals([Phase(100.0, 100.0)], 7, seed=3, most=21)]
    assert sorted(asked) == sorted(list(range(7)) * 3)
    assert sorted(asked[:7]) == list(range(7))
    assert asked[:7] != asked[7:14]


def test_a_seed_gives_the_same_arrivals_and_another_one_others() -> None:
    def made(seed: int) -> list[tuple[float, int]]:
        return [(a.at, a.prompt) for a in arrivals([Phase(10.0, 10.0)], 5, seed=seed)]

    assert made(1) == made(1)
    assert made(1) != made(2)
