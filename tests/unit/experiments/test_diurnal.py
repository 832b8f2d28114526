from pathlib import Path
from statistics import fmean

import pytest
from msgspec.structs import replace

from services.costs import step_load
from services.settings import ConfigError
from tools.experiments import diurnal, diurnal_command, diurnal_layouts, diurnal_report
from tools.experiments.__main__ import main
from tools.experiments.diurnal import VARIANTS, Errand, Period, Run, read_published
from tools.experiments.sweep import run_all
from tools.simulate.fleet import Change, Decision
from tools.simulate.run import read_profile

LAYOUTS, FIXED, INFAAS = (
    next(v for v in VARIANTS if v.name == name) for name in ("tedi+layouts", "tedi", "infaas-drop")
)


def period(attainment: float = 0.9, latency_s: float | None = 2.0) -> Period:
    return Period(
        requests=100,
        finished=90,
        attainment=attainment,
        latency_mean_s=latency_s,
        latency_p95_s=latency_s,
        threshold_mean=0.85,
        accuracy=0.77,
    )


def made(variant: diurnal.Variant, minutes: int = 60, seed: int = 0, attainment: float = 0.9, **changes: object) -> Run:
    fields: dict[str, object] = {
        "variant": variant.name,
        "minutes": minutes,
        "seed": seed,
        "code": "now",
        "periods": {"all": period(attainment), "low": period(1.0), "high": period(attainment)},
        "bins": [period(attainment)] * (minutes // 3),
        "changes": [Change(0.0, {1: 16}), Change(300.0, {1: 8, 4: 2})] if variant.reconfigures else [],
        "decisions": [Decision(298.0, "latency_gain", {1: 8, 4: 2})] if variant.reconfigures else [],
    }
    return Run(**(fields | changes))  # type: ignore[arg-type]


def test_the_published_trace_is_the_papers() -> None:
    published = read_published()
    assert len(published.arrivals_rps) == 120
    assert 60 * sum(published.arrivals_rps) == pytest.approx(63_736, rel=1e-3)
    assert published.attainment("TeDiServe", 0, 120) - published.attainment("INFaaS", 0, 120) == pytest.approx(
        0.207, abs=0.005
    )
    assert published.attainment("Llumnix", 0, 45) == pytest.approx(0.9916, abs=0.001)
    assert all(len(layouts) == len(published.arrivals_rps_at_peak_10) for layouts in published.peaks.values())


def test_made_up_lengths_have_the_published_means_and_fit() -> None:
    lengths = diurnal.made_up_lengths()
    assert fmean(one.prompt_tokens for one in lengths) == pytest.approx(161, rel=0.15)
    assert fmean(one.output_tokens for one in lengths) == pytest.approx(338, rel=0.1)
    assert all(one.output_tokens % 32 == 0 and sum(one) <= 4096 for one in lengths)
    assert lengths == diurnal.made_up_lengths()
    assert lengths != diurnal.made_up_lengths(seed=1)


def test_runs_are_written_in_order_and_only_what_is_missing_is_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int, int]] = []

    def run(errand: Errand, code: str) -> Run:
        ran.append(errand.key)
        return made(*errand, code=code)

    def follow(variants: list[diurnal.Variant], seeds: int) -> None:
        run_all(diurnal_command.trace_works(tmp_path, 60, variants, seeds), 1)

    monkeypatch.setattr(diurnal, "run", run)
    monkeypatch.setattr(diurnal_command, "code_digest", lambda layouts: "now")
    path = tmp_path / "results" / diurnal_report.RUNS
    follow([INFAAS, LAYOUTS], 1)
    follow([INFAAS, FIXED], 2)
    assert sorted(ran) == [
        ("infaas-drop", 60, 0),
        ("infaas-drop", 60, 1),
        ("tedi", 60, 0),
        ("tedi", 60, 1),
        ("tedi+layouts", 60, 0),
    ]
    found = diurnal.read_runs(path)
    assert [(run.variant, run.seed) for run in found] == [
        ("tedi+layouts", 0),
        ("tedi", 0),
        ("tedi", 1),
        ("infaas-drop", 0),
        ("infaas-drop", 1),
    ]
    assert found[0] == made(LAYOUTS)
    diurnal.write_runs(path, [made(LAYOUTS, code="before"), *found[1:]])
    follow([INFAAS, FIXED], 2)
    assert len(ran) == 5
    assert [run.variant for run in diurnal.read_runs(path)] == ["tedi", "tedi", "infaas-drop", "infaas-drop"]
    follow([LAYOUTS], 1)
    assert ran[5:] == [("tedi+layouts", 60, 0)]
    path.write_text('[{"variant": "tedi"}]')
    with pytest.raises(ConfigError, match=r"diurnal\.json holds other runs"):
        diurnal.read_runs(path)


def test_the_section_holds_ours_beside_the_published_and_what_is_gained(tmp_path: Path) -> None:
    worse = made(INFAAS, attainment=0.5, periods={name: period(0.5, 4.0) for name in ("all", "low", "high")})
    diurnal.write_runs(tmp_path / diurnal_report.RUNS, [made(LAYOUTS), made(FIXED, attainment=0.8), worse])
    text = diurnal_report.section(tmp_path)
    assert "Goal: over `infaas-drop` +22.2 points in time, as published of these minutes. Here: +40.0. **Met.**" in text
    assert "(high load), as published of all 120 minutes. Here: -50.0 %. **Met.**" in text
    assert "| tedi+layouts | 60 | 0 | 90.0% | 96.6% | 100.0% | 99.5% | 90.0% | 95.5% | 2.00 | 2.00 |" in text
    assert "| infaas-drop | +40.0 | +22.2 | +21.1 | -50.0 % | -34.7 % |" in text
    assert "| infaas-drop | +30.0 | +22.2 | +21.1 | -50.0 % | -34.7 % |" in text  # over which `tedi` gains less
    diurnal_report.draw(tmp_path)
    assert (tmp_path / "diurnal.svg").read_text().count("published -->") == 5  # labels, as comments beside their glyphs
    assert diurnal_report.section(tmp_path / "nothing") == ""


def test_a_minute_of_the_real_thing() -> None:
    found = diurnal.run(Errand(INFAAS, 1, 0), "now")
    assert found.periods["all"].requests == pytest.approx(0.5 * 60 * 5.75, rel=0.2)
    assert (found.periods["all"].attainment, len(found.bins), found.changes) == (1.0, 1, [])
    assert set(found.periods) == {"all", "low"}


def test_higher_degrees_take_their_published_share_of_the_time() -> None:
    _, latency = read_profile(diurnal.job_of(LAYOUTS, 1, 0), None)
    times = [latency.step_ms(degree, step_load("cache", 32, 512)) for degree in (1, 2, 4)]
    assert times[0] == pytest.approx(12.125 + diurnal.EXTRA_STEP_MS)
    assert [one / times[0] for one in times] == pytest.approx([1.0, 0.8548, 0.6994])


def test_a_low_load_has_the_highest_degree_and_a_high_one_tp_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    published = read_published()
    short = replace(published, arrivals_rps_at_peak_10=[1.0, 12.5], peaks={8: published.peaks[8][:2]})
    monkeypatch.setattr(diurnal, "read_published", lambda: short)
    run_all(diurnal_command.layouts_works(tmp_path), 1)
    path = tmp_path / "results" / diurnal_report.LAYOUTS
    first, second = diurnal_layouts.read_windows(path)
    assert (first.arrivals_rps, second.arrivals_rps) == (0.8, 10.0)
    assert (first.layout, second.layout) == ({4: 4}, {1: 16})
    assert (first.reason, second.reason) == ("latency_gain", "today_infeasible")
    assert diurnal_command.layouts_works(tmp_path) == []
    text = diurnal_report.section(tmp_path / "results")
    assert "| 8 | 50% | 0% | 50% | 61% |" in text
    assert "Goal: the higher the peak, the more GPUs at TP-1. Here: 50%. **Met.**" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "121"], "minutes: 121 is not from 1 to 120"),
        (["--variants", "best"], "variants: 'best' is not of tedi+layouts, paper+layouts"),
    ],
)
def test_what_cannot_be_run_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diurnal", "--docs", str(tmp_path), *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
