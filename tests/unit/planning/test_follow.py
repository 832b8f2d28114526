"""Over a day the layout follows the load, and does not go back and forth."""

import math
import random
from pathlib import Path

import pytest
from msgspec.structs import replace

from services.reconfigurator.policy import Verdict
from services.reconfigurator.problem import Planning
from services.settings import ConfigError
from tests.unit.reconfigurator.build import paper_example
from tools.planning.draw import draw, table
from tools.planning.follow import Rate, Window, changes, follow, read_curve, reversals, scaled_to


def day(points: int = 48, noise: float = 0.08) -> list[Rate]:
    """Quiet at night, busy at noon; each point off by up to that share."""
    rng = random.Random(5)
    shape = (0.55 - 0.45 * math.cos(2 * math.pi * i / points) for i in range(points))
    return [Rate(1800.0 * i, rate * (1 + rng.uniform(-noise, noise))) for i, rate in enumerate(shape)]


@pytest.fixture(scope="module")
def windows() -> list[Window]:
    problem = paper_example(1.0, planning=Planning(solver="highs", headroom=1.1))
    return list(follow(problem, scaled_to(day(), 1.7)))


def test_night_is_for_the_high_degree_and_noon_for_the_low_one(windows: list[Window]) -> None:
    assert windows[0].layout == windows[-1].layout == {4: 2}
    assert windows[24].layout == {1: 8}
    for window in windows:
        assert window.figures is not None, "what runs keeps the promises"


def test_the_layout_does_not_flap(windows: list[Window]) -> None:
    assert 2 <= len(changes(windows)) <= 4
    assert reversals(windows) == 0


def test_the_table_has_a_row_for_each_change(windows: list[Window], tmp_path: Path) -> None:
    rows = table(windows).splitlines()
    assert len(rows) == 2 + 1 + len(changes(windows)) + 2
    assert rows[2] == "| 0.0 | 0.17 | 2 x TP-4 | nothing_runs | 0.900 | 2.00 |"
    draw(windows, tmp_path / "day.svg")
    assert (tmp_path / "day.svg").read_text().count("TP-") >= 2


def test_a_return_within_the_hour_is_a_reversal() -> None:
    verdict = Verdict(change=True, reason="latency_gain", because="")
    layouts = [{4: 2}, {1: 8}, {4: 2}, {4: 2}, {4: 2}, {1: 8}]
    windows = [Window(1800.0 * i, 1.0, verdict, layout, None) for i, layout in enumerate(layouts)]
    assert reversals(windows) == 1


def test_a_curve_is_read_by_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "curve.csv"
    path.write_text("start_s,total_rps,other\n0,5,1\n600,10,1\n1200,20,1\n")
    assert read_curve(path, 600, 600) == [Rate(0.0, 10.0)]
    assert scaled_to(read_curve(path, 0, 9e9), 2.0) == [Rate(0.0, 0.5), Rate(600.0, 1.0), Rate(1200.0, 2.0)]
    with pytest.raises(ConfigError, match="no row from 9000 s on"):
        read_curve(path, 9000, 600)
    path.write_text("time,rate\n0,5\n")
    with pytest.raises(ConfigError, match="columns start_s and total_rps"):
        read_curve(path, 0, 600)


def test_a_problem_without_requests_has_no_proportions() -> None:
    with pytest.raises(ConfigError, match="rate_per_s above 0"):
        next(follow(replace(paper_example(1.0), classes=()), day()))
