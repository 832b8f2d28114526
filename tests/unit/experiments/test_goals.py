"""What the rows were to show: each goal is met by rows that show it, and by no others."""

from collections.abc import Sequence

import pytest

from tests.unit.experiments.build import cell
from tools.experiments import goals
from tools.experiments.cells import Cell
from tools.experiments.goals import Finding
from tools.experiments.published import Figure, Figures

NOTHING = Figures(source="", rows=[])


def found(experiment: str, cells: Sequence[Cell], figures: Figures = NOTHING) -> list[Finding]:
    return [*goals.of_table(experiment, cells, figures), *goals.of_experiment(experiment, cells)]


@pytest.mark.parametrize(("infaas", "met"), [(0.3, True), (0.904, True), (0.92, False)])
def test_ours_is_in_time_no_less_often_than_a_baseline_at_any_rate(infaas: float, met: bool) -> None:
    cells = [cell(system, 1.5, attainment=0.95) for system in ("tedi", "infaas", "llumnix")]
    cells += [cell("tedi", attainment=0.9), cell("infaas", attainment=infaas)]
    (finding,) = found("rates", cells)
    assert finding.met is met
    assert finding.here.startswith(f"in {3 if met else 2} of 3 comparisons")
    assert finding.line.endswith("**Met.**" if met else "**Not met.**")


def test_a_gain_at_tight_promises_counts_from_three_times_the_time_alone_on() -> None:
    cells = [cell(system, slo_factor=2.0, attainment=share) for system, share in (("tedi", 0.9), ("infaas", 0.1))]
    assert found("slos", cells) == []
    cells += [cell(system, slo_factor=3.0, attainment=share) for system, share in (("tedi", 0.9), ("infaas", 0.66))]
    (finding,) = found("slos", cells)
    assert (finding.here, finding.met) == ("+24.0 at rate 1.875, SLO x 3", True)  # of 33.9, less ten


def test_a_part_without_which_more_is_in_time_is_told() -> None:
    cells = [
        cell("tedi", attainment=0.9),
        cell("no-load-control", attainment=0.85),
        cell("no-migration", attainment=0.93),
    ]
    (finding,) = found("ablations", cells)
    assert not finding.met
    assert "in 1 of 2 comparisons; least -3.0 points, to `no-migration`" in finding.here


def test_better_forecasts_are_to_be_worth_something() -> None:
    def of(oracle: float, trees: float, first: float) -> Finding:
        shares = {"oracle": oracle, "trees": trees, "first": first}
        (finding,) = found("forecasts", [cell(f"no-load-control:{k}", attainment=v) for k, v in shares.items()])
        return finding

    assert of(0.9, 0.85, 0.8).met
    assert of(0.9, 0.85, 0.8).here == "`oracle` over `trees` +5.0, `trees` over `first` +5.0 points"
    assert not of(0.9, 0.85, 0.88).met


def test_moving_has_to_shorten_mean_and_tail() -> None:
    stays = cell("infaas", latency_mean_s=2.0, latency_p99_s=10.0)
    (finding,) = found("migration", [stays, cell("llumnix", latency_mean_s=1.9, latency_p99_s=9.0)])
    assert (finding.met, finding.here) == (True, "5.0% and 10.0%")
    (finding,) = found("migration", [stays, cell("llumnix", latency_mean_s=1.9, latency_p99_s=9.9)])
    assert not finding.met


def test_rows_far_from_the_published_ones_are_counted() -> None:
    theirs = Figure(
        experiment="rates",
        setup="llada-gsm8k",
        systems=("infaas",),
        rate=1.875,
        slo_factor=5.0,
        attainment=0.35,
        accuracy=0.77,
    )
    figures = Figures(source="", rows=[theirs])
    (near,) = found("rates", [cell(attainment=0.40), cell(seed=1, attainment=0.48)], figures)
    assert (near.met, near.here) == (True, "1 of 1 rows; furthest `infaas` at 1.875, +9.0 points")
    (far,) = found("rates", [cell(attainment=0.50)], figures)
    assert not far.met


def test_lengths_are_judged_together_and_must_not_cost_accuracy() -> None:
    cells = [cell("tedi", setup=name, attainment=0.9, accuracy=0.775) for name in ("2-shot", "8-shot")]
    cells += [cell("infaas", setup="2-shot", attainment=0.5), cell("infaas", setup="8-shot", attainment=0.15)]
    (finding,) = found("lengths", cells)
    assert finding.here == "+75.0 (8 examples, 256 tokens out), for at most 0.5"
    assert finding.met  # of 81.0, less ten
    cells[0] = cell("tedi", setup="2-shot", attainment=0.9, accuracy=0.76)
    (finding,) = found("lengths", cells)
    assert not finding.met
