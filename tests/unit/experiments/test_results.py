"""The experiments: their points and files, what is run and what is kept, and the document that is made of them."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from services.settings import ConfigError
from tests.unit.experiments.build import cell
from tools.experiments import recordings, report, setups, sweep
from tools.experiments.__main__ import main
from tools.experiments.cells import Cell, kept, path_of, read_cells, run, write_cells
from tools.experiments.compare import verdict
from tools.experiments.plan import BY_NAME, EXPERIMENTS, Point
from tools.experiments.published import read_figures
from tools.experiments.setups import SETUPS, base_s, capacity, steps_scale

# --- what there is ------------------------------------------------------------------------------------------------


def test_no_experiment_has_a_point_twice_and_all_are_of_known_setups() -> None:
    for experiment in EXPERIMENTS:
        points = experiment.points()
        assert len({point[1:] for point in points}) == len(points)
        assert {point.setup for point in points} <= set(SETUPS)


def test_published_points_that_we_compare_with_have_points_of_ours() -> None:
    figures = read_figures()
    ours = [point for experiment in EXPERIMENTS for point in experiment.points() if point.seed == 0]
    found = [figure for point in ours if (figure := figures.find(*point[:-1]))]
    assert {figure.setup for figure in found} == {"llada-gsm8k", "llada-mmlu", "llada-mbpp", "gh200", "gh200-all"}
    assert len(found) >= 60


@pytest.mark.parametrize("name", [name for name, setup in SETUPS.items() if not setup.is_measured])
def test_what_is_made_up_takes_the_published_time_alone(name: str) -> None:
    assert base_s(SETUPS[name]) == SETUPS[name].base_s
    assert 0.5 < steps_scale(SETUPS[name]) < 2.0


def test_a_capacity_is_near_what_the_prices_let_expect() -> None:
    setup = SETUPS["out-64"]._replace(requests=300)
    assert capacity(setup) == pytest.approx(setups._look(setup, 1.0).expected_capacity, rel=0.15)


# --- rows ---------------------------------------------------------------------------------------------------------


def test_what_is_written_is_read_again_in_order(tmp_path: Path) -> None:
    cells = [cell(seed=1), cell("tedi", 1.5, accuracy=None), cell()]
    write_cells(tmp_path / "deep" / "rows.csv", cells)
    assert read_cells(tmp_path / "deep" / "rows.csv") == [cells[1], cells[2], cells[0]]
    assert read_cells(tmp_path / "none.csv") == []


def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("model,system\nLLaDA-8B,tedi\n")
    with pytest.raises(ConfigError, match=r"rows\.csv holds other rows"):
        read_cells(tmp_path / "rows.csv")


def test_rows_of_other_code_other_points_or_shorter_runs_are_not_kept() -> None:
    points = BY_NAME["rates"].points()
    good = cell()
    others = [cell(code="before"), cell(rate=7.0), cell(requests=100), cell("nobody")]
    assert kept([good, *others], points, None, "now") == [good]
    assert kept([good, others[2]], points, 100, "now") == [others[2]]


def test_right_in_time_is_of_all_requests() -> None:
    assert cell().right_in_time == pytest.approx(0.3)
    assert cell(attainment=0.0, accuracy_of_met=None).right_in_time == 0.0
    assert cell(accuracy_of_met=None).right_in_time is None


@pytest.mark.parametrize(
    ("system", "profile", "runs"),
    [
        ("tedi", "tiny-cpu", "tedi"),
        ("no-migration", "tiny-cpu", "no-migration"),
        ("paper", "tiny-cpu-plain", "paper"),
        ("infaas", "tiny-cpu-plain", "infaas"),
        ("no-opening", "tiny-cpu-plain", "tedi"),
        ("flex", "tiny-cpu", "tedi"),
    ],
)
def test_openings_are_ours_alone(system: str, profile: str, runs: str) -> None:
    job = setups.job_of(SETUPS["builtin-eos"], system)
    assert job.tier == ("flex" if system == "flex" else "default")
    assert (job.profile.name, job.system) == (profile, runs)
    assert job.workload == str(recordings.folder_of("eos", f"profiles/{profile}"))
    assert setups.job_of(SETUPS["llada-gsm8k"], system).profile.name == "llada-8b-h100"


def test_a_small_run_of_the_real_thing() -> None:
    found = run(Point("rates", "llada-gsm8k", "infaas", 1.0, 5.0, 0), 40, "now")
    assert (found.requests, found.attainment, found.rate_rps, found.slo_s) == (40, 1.0, 8.0, 9.5)
    assert found.steps_mean == pytest.approx(86, rel=0.15)
    forecast = run(Point("forecasts", "gh200-all", "no-load-control:oracle", 1.0, 5.0, 0), 10, "now")
    assert forecast.system == "no-load-control:oracle"


# --- the command --------------------------------------------------------------------------------------------------


def test_only_what_is_missing_is_run_and_the_document_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[Point] = []

    def fake(point: Point, requests: int | None, code: str) -> Cell:
        ran.append(point)
        return cell(point.system, point.rate, point.seed, slo_factor=point.slo_factor, code=code)

    monkeypatch.setattr(sweep, "run", fake)
    monkeypatch.setattr(report, "draw", lambda *_: None)
    path = path_of(tmp_path / "results", "rates")
    command = ["rates", "--setups", "llada-gsm8k", "--systems", "tedi,infaas", "--processes", "1"]
    command += ["--docs", str(tmp_path)]
    main([*command, "--seeds", "1"])
    assert {(p.system, p.rate, p.seed) for p in ran} == {
        (system, rate, 0) for rate in (1.5, 1.625, 1.6874, 1.75, 1.875) for system in ("tedi", "infaas")
    }
    assert "llada-gsm8k at 1.5, SLO x 5, seed 0: infaas 40.0% in time" in capsys.readouterr().err
    main([*command, "--seeds", "2"])
    assert [point.seed for point in ran] == [0] * 10 + [1] * 4
    write_cells(path, [cell(code="before"), *(row for row in read_cells(path) if row.key != cell().key)])
    main([*command, "--seeds", "2"])
    assert ran[14:] == [Point("rates", "llada-gsm8k", "infaas", 1.875, 5.0, 0)]
    text = (tmp_path / "RESULTS.md").read_bytes()
    main(["report", "--docs", str(tmp_path)])
    assert (tmp_path / "RESULTS.md").read_bytes() == text
    main([*command, "--seeds", "1", "--anew"])
    assert len(ran) == 25
    assert len(read_cells(path)) == 14


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["rates", "--setups", "gpt"], "setups: 'gpt' is not of llada-gsm8k"),
        (["rates", "--systems", "best"], "systems: 'best' is not of"),
        (["rates", "--seeds", "0"], "seeds: 0 is not positive"),
        (["report"], "holds no rows yet"),
        (["validate", "nowhere"], "nowhere holds no cell of a live run"),
    ],
)
def test_what_cannot_be_done_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([*words, "--docs", str(tmp_path)])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


# --- the document -------------------------------------------------------------------------------------------------


def text_of(**found: Sequence[Cell]) -> str:
    return report.results_text({name: list(cells) for name, cells in found.items()}, read_figures(), None)


def test_a_row_holds_the_mean_over_seeds_beside_the_published_figures() -> None:
    text = text_of(rates=[cell(), cell(seed=1, attainment=0.5), cell("fixed-0.5", accuracy=None)])
    assert "| infaas | 1.875 | x 5 | 2 | 45.0% ± 7.1 | 34.3% | 78.0% ± 0.0 | 77.1% | 33.8% ± 5.3 | 7 |" in text
    assert "| fixed-0.5 | 1.875 | x 5 | 1 | 40.0% |  |  |  | 30.0% |" in text
    assert "### GSM8K, Dream-7B" not in text


def test_made_up_workloads_are_labelled_and_not_compared() -> None:
    text = text_of(rates=[cell(name, setup="dream-gsm8k", rate=1.1) for name in ("tedi", "paper")])
    assert "### GSM8K, Dream-7B\n\n**Made up: counts for nothing.**" in text
    assert "| GSM8K, Dream-7B |" not in text


def test_ours_is_compared_with_the_papers_rules_run_by_run() -> None:
    cells = [cell("tedi", seed=n, attainment=0.9 + n / 100, accuracy=0.75) for n in range(2)]
    cells += [cell("paper", seed=n, attainment=0.8, accuracy=0.75) for n in range(2)]
    text = text_of(rates=cells)
    assert (
        "| GSM8K, LLaDA-8B | tedi | 1.875 a GPU | x 5 | 2 | +10.5 ± 0.7 | +0.0 ± 0.0 | +7.9 ± 0.5 | **better** |"
        in text
    )


def seeds(system: str, attainment: Sequence[float], accuracy: float = 0.75, **changes: object) -> list[Cell]:
    return [
        cell(system, seed=number, attainment=share, accuracy=accuracy, **changes)
        for number, share in enumerate(attainment)
    ]


def test_the_margin_of_a_workload_is_over_points_of_five_seeds_with_its_spread() -> None:
    theirs = [0.80] * 5
    cells = seeds("tedi", [0.80, 0.82, 0.84, 0.86, 0.88]) + seeds("paper", theirs)
    cells += seeds("tedi", [0.84] * 5, 0.76, rate=1.6874) + seeds("paper", theirs, rate=1.6874)
    cells += seeds("tedi", [0.1], rate=1.5) + seeds("paper", [0.9], rate=1.5)  # a single seed
    text = text_of(rates=cells)
    margin = "| GSM8K, LLaDA-8B | tedi | 2 | +4.0 ± 1.6 | +0.5 ± 0.0 |"
    assert f"{margin} +3.0 ± 1.2 | 2 | 0 | 0 | 0 | met |" in text
    assert "**Met, by one of ours, on 1 of 1 workloads.**" in text
    worse = seeds("tedi", [0.7] * 5, slo_factor=3.0) + seeds("paper", theirs, slo_factor=3.0)
    text = text_of(rates=cells, slos=worse)
    assert "| 2 | 0 | 0 | 1 | **not met** |" in text
    assert "**Met, by one of ours, on 0 of 1 workloads.**" in text


@pytest.mark.parametrize(
    ("attainment", "accuracy", "said"),
    [(3.0, 0.0, "better"), (0.0, 2.0, "better"), (3.0, -1.0, "trade"), (-1.0, 0.2, "worse"), (0.3, -0.3, "equal")],
)
def test_better_is_what_loses_nothing(attainment: float, accuracy: float, said: str) -> None:
    assert verdict(attainment, accuracy) == said


def test_the_largest_difference_stands_beside_the_papers() -> None:
    cells = [cell("tedi", rate, attainment=0.9, accuracy=0.76) for rate in (1.5, 1.875)]
    cells += [cell("llumnix", 1.5, attainment=0.95, accuracy=0.78), cell("llumnix", attainment=0.5, accuracy=0.78)]
    text = text_of(rates=cells)
    assert "| ours over Llumnix, rates | +56.6 | -0.9 | +40.0 | -2.0 | 1.875 | yes | **no** |" in text
    assert "**Direction: 1 of 1. Size: 0 of 1.**" in text


def test_the_plot_shows_ours_and_the_published_lines(tmp_path: Path) -> None:
    cells = [cell(rate=rate, attainment=share) for rate, share in ((1.5, 1.0), (1.875, 0.4))]
    report.draw(BY_NAME["rates"], cells, read_figures(), tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert "<!-- infaas, published -->" in drawn
    report.draw(BY_NAME["rates"], cells, read_figures(), tmp_path / "again.svg")
    assert (tmp_path / "again.svg").read_text() == drawn
