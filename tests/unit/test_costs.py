"""Prices of steps: curves are monotone, exact at the profiled points, and a pass is launched once."""

import itertools
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.costs import Curve, LatencyProfile, Resident, dump_latency, load_latency, mean_pass_tokens
from services.settings import ConfigError

points = st.lists(
    st.tuples(st.integers(1, 8192), st.floats(0.1, 500.0)), min_size=1, max_size=12, unique_by=lambda p: p[0]
)


@given(points, st.lists(st.floats(0.0, 20_000.0), min_size=2, max_size=20))
def test_more_tokens_never_cost_less(measured: list[tuple[int, float]], tokens: list[float]) -> None:
    curve = Curve.through(measured)
    costs = [curve.at(t) for t in sorted(tokens)]
    assert all(left <= right + 1e-9 for left, right in itertools.pairwise(costs))


@given(points)
def test_a_curve_is_never_below_a_measured_point(measured: list[tuple[int, float]]) -> None:
    curve = Curve.through(measured)
    assert all(curve.at(tokens) >= ms - 1e-9 for tokens, ms in measured)


def test_a_curve_goes_through_its_points_between_them_and_beyond() -> None:
    curve = Curve.through([(100, 10.0), (200, 30.0), (400, 20.0), (500, 40.0)])
    assert [curve.at(t) for t in (0, 1, 100, 150, 200, 300, 400, 450, 500, 600)] == [
        0.0,  # nothing in the pass
        10.0,  # flat below the first point
        10.0,
        20.0,
        30.0,
        30.0,  # the dip at 400 is noise
        30.0,
        35.0,
        40.0,
        50.0,  # the last slope goes on
    ]


def test_a_mixed_pass_is_launched_once() -> None:
    profile = LatencyProfile(
        {
            (1, "recompute"): Curve.through([(100, 10.0), (200, 20.0)]),
            (1, "cache"): Curve.through([(10, 4.0), (20, 8.0)]),
        }
    )
    assert profile.step_ms(1, 200, 0) == 20.0
    assert profile.step_ms(1, 0, 20) == 8.0
    assert profile.step_ms(1, 200, 20) == 20.0 + 8.0 - 4.0
    with pytest.raises(KeyError):
        profile.step_ms(2, 1, 1)


def test_a_resident_weighs_by_its_cache_mode() -> None:
    def weight(cache: str) -> tuple[float, float]:
        resident = Resident(canvas_tokens=300, block_size=32, cache=cache, output_tokens_left=128)  # type: ignore[arg-type]
        return mean_pass_tokens([resident], steps_per_block=4.0)

    assert weight("none") == (300.0, 0.0)
    assert weight("dual") == (75.0, 24.0)
    assert weight("prefix") == (75.0, 96.0)


def test_a_latency_file_comes_back_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "latency.json"
    dump_latency(path, "a machine", {(1, "recompute"): [(100, 10.0)], (1, "cache"): [(10, 4.0)]})
    profile = load_latency(path)
    assert profile.degrees == [1]
    assert (profile.step_ms(1, 50, 0), profile.step_ms(1, 0, 5)) == (10.0, 4.0)


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ("{", "latency.json"),
        ('{"hardware": "x", "measured": []}', "no curve"),
        ('{"hardware": "x", "measured": [{"tp_degree": 1, "kind": "cache", "points": [[1, 2]]}]}', "lacks"),
        ('{"hardware": "x", "measured": [{"tp_degree": 1, "kind": "cache", "points": []}]}', "at least one point"),
        ('{"hardware": "x", "measured": [{"tp_degree": 1, "kind": "warm", "points": []}]}', "kind"),
    ],
)
def test_a_wrong_latency_file_is_refused(tmp_path: Path, content: str, complaint: str) -> None:
    (tmp_path / "latency.json").write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        load_latency(tmp_path / "latency.json")


def test_a_missing_latency_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"python -m services\.denoiser profile"):
        load_latency(tmp_path / "latency.json")
