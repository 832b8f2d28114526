from pathlib import Path

import pytest

from services.settings import ConfigError
from tools.experiments import rates, report
from tools.experiments.__main__ import main
from tools.experiments.rates import MODELS, Cell, read_cells, read_published, write_cells


def cell(system: str = "infaas", rate: float = 1.875, seed: int = 0, **changes: object) -> Cell:
    fields: dict[str, object] = {
        "model": "LLaDA-8B",
        "system": system,
        "rate": rate,
        "seed": seed,
        "extra_pass_ms": 5.4,
        "extra_step_ms": 2.4,
        "requests": 1319,
        "attainment": 0.4,
        "accuracy": 0.78,
        "accuracy_of_met": None,
        "latency_mean_s": 7.0,
        "latency_p95_s": 9.0,
        "threshold_mean": 0.9,
        "steps_mean": 86.0,
        "moves_mean": 0.0,
    }
    return Cell(**(fields | changes))  # type: ignore[arg-type]


def test_what_is_written_is_read_again_in_order(tmp_path: Path) -> None:
    cells = [cell(seed=1), cell("tedi", 1.5), cell()]
    write_cells(tmp_path / "deep" / "rows.csv", cells)
    assert read_cells(tmp_path / "deep" / "rows.csv") == [cells[1], cells[2], cells[0]]
    assert read_cells(tmp_path / "none.csv") == []


def test_a_file_of_other_rows_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("model,system\nLLaDA-8B,tedi\n")
    with pytest.raises(ConfigError, match=r"rows\.csv holds other rows"):
        read_cells(tmp_path / "rows.csv")


def test_only_what_is_missing_is_run_and_the_document_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[tuple[str, str, float, int]] = []
    drawn: list[tuple[str, int]] = []

    def run_cell(model: rates.Model, system: str, rate: float, seed: int, requests: int) -> Cell:
        ran.append((model.name, system, rate, seed))
        return cell(system, rate, seed, requests=requests, extra_pass_ms=model.extra_pass_ms)

    monkeypatch.setattr(rates, "run_cell", run_cell)
    monkeypatch.setattr(report, "draw", lambda model, cells, published, path: drawn.append((path.name, len(cells))))
    command = [
        "rates",
        "--models",
        "llada",
        "--systems",
        "tedi,infaas",
        "--rates",
        "1.5,1.875",
        "--docs",
        str(tmp_path),
    ]
    main(command)
    assert ran == [("LLaDA-8B", system, rate, 0) for rate in (1.875, 1.5) for system in ("tedi", "infaas")]
    main([*command, "--seeds", "2"])
    assert [row[3] for row in ran] == [0] * 4 + [1] * 4
    assert "infaas at 1.5, seed 1: 40.0% in time" in capsys.readouterr().err
    text = (tmp_path / "RESULTS.md").read_bytes()
    main(["rates", "--report-only", "--docs", str(tmp_path)])
    assert (tmp_path / "RESULTS.md").read_bytes() == text
    assert drawn == [("gsm8k-rates-llada-8b.svg", count) for count in (4, 8, 8)]


def test_the_plot_shows_ours_and_the_published_lines(tmp_path: Path) -> None:
    report.draw(MODELS["llada"], [cell(), cell(rate=1.5, attainment=1.0)], read_published(), tmp_path / "plot.svg")
    assert (tmp_path / "plot.svg").read_text().count("published -->") == 3  # labels, as comments beside their glyphs


def test_a_row_holds_the_mean_over_seeds_beside_the_published_figures() -> None:
    cells = [cell(), cell(seed=1, attainment=0.5), cell("fixed-0.5", accuracy=None)]
    text = report.results_text(cells, read_published())
    assert "| infaas | 1.875 | 2 | 45.0% ± 7.1 | 34.3% | 78.0% ± 0.0 | 77.1% | 7.00 | 0.900 |" in text
    assert "| fixed-0.5 | 1.875 | 1 | 40.0% |  |  |  | 7.00 | 0.900 |" in text
    assert "Dream" not in text


def test_a_small_run_of_the_real_thing(tmp_path: Path) -> None:
    found = rates.run_cell(MODELS["llada"], "infaas", 1.0, 0, 40)
    assert (found.requests, found.attainment, found.extra_pass_ms) == (40, 1.0, 5.4)
    assert found.steps_mean == pytest.approx(86, rel=0.15)


@pytest.mark.parametrize(
    ("words", "message"),
    [(["--models", "gpt"], "'gpt' is not of llada, dream"), (["--report-only"], "there are no rows yet")],
)
def test_what_cannot_be_done_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["rates", "--docs", str(tmp_path), *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
