import re
from pathlib import Path
from statistics import fmean

import pytest
from msgspec.structs import replace

from services.settings import ConfigError
from tools.experiments import diurnal, diurnal_layouts, diurnal_report
from tools.experiments.__main__ import main
from tools.experiments.diurnal import VARIANTS, Period, Run, read_published
from tools.simulate.fleet import Change, Decision

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
        "extra_step_ms": diurnal.EXTRA_STEP_MS,
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

    def run(variant: diurnal.Variant, minutes: int, seed: int) -> Run:
        ran.append((variant.name, minutes, seed))
        return made(variant, minutes, seed)

    monkeypatch.setattr(diurnal, "run", run)
    path = tmp_path / "deep" / "runs.json"
    diurnal.run_missing(path, [INFAAS, LAYOUTS], 60, [0])
    diurnal.run_missing(path, [INFAAS, FIXED], 60, [0, 1])
    assert ran == [
        ("infaas-drop", 60, 0),
        ("tedi+layouts", 60, 0),
        ("tedi", 60, 0),
        ("infaas-drop", 60, 1),
        ("tedi", 60, 1),
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
    path.write_text('[{"variant": "tedi"}]')
    with pytest.raises(ConfigError, match=r"runs\.json holds other runs"):
        diurnal.read_runs(path)


def test_the_section_holds_ours_beside_the_published_and_what_is_gained(tmp_path: Path) -> None:
    worse = made(INFAAS, attainment=0.5, periods={name: period(0.5, 4.0) for name in ("all", "low", "high")})
    diurnal.write_runs(tmp_path / diurnal_report.RUNS, [made(LAYOUTS), made(FIXED, attainment=0.8), worse])
    text = diurnal_report.section(tmp_path)
    assert "| tedi+layouts | 60 | 0 | 90.0% | 96.6% | 100.0% | 99.5% | 90.0% | 95.5% | 2.00 | 2.00 |" in text
    assert "| infaas-drop | +40.0 | +22.2 | +21.1 | -50.0 % | -34.7 % |" in text
    assert "| infaas-drop | +30.0 | +22.2 | +21.1 | -50.0 % | -34.7 % |" in text  # over which `tedi` gains less
    diurnal_report.draw(tmp_path)
    assert (tmp_path / "diurnal.svg").read_text().count("published -->") == 5  # labels, as comments beside their glyphs
    assert diurnal_report.section(tmp_path / "nothing") == ""


def test_a_minute_of_the_real_thing() -> None:
    found = diurnal.run(INFAAS, 1, 0)
    assert found.periods["all"].requests == pytest.approx(60 * 5.75, rel=0.2)
    assert (found.periods["all"].attainment, len(found.bins), found.changes) == (1.0, 1, [])
    assert set(found.periods) == {"all", "low"}


def test_the_planner_takes_fewer_and_larger_instances_when_the_load_is_low(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    published = read_published()
    short = replace(published, arrivals_rps_at_peak_10=[2.0, 10.0], peaks={4: published.peaks[4][:2]})
    monkeypatch.setattr(diurnal, "read_published", lambda: short)
    path = tmp_path / "layouts.json"
    diurnal_layouts.run_missing(path)
    first, second = diurnal_layouts.read_windows(path)
    assert (first.arrivals_rps, second.arrivals_rps) == (0.8, 4.0)
    assert first.reason in ("latency_gain", "no_clear_gain")
    for window in (first, second):
        assert sum(degree * count for degree, count in window.layout.items()) == 16
    written = path.read_bytes()
    diurnal_layouts.run_missing(path)
    assert path.read_bytes() == written
    assert re.search(r"\| 4 \| \d+% \|", diurnal_report.section(tmp_path))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes", "121"], "minutes: 121 is not from 1 to 120"),
        (["--variants", "best"], "variants: 'best' is not of tedi+layouts, tedi"),
    ],
)
def test_what_cannot_be_run_is_told(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["diurnal", "--docs", str(tmp_path), *words])
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
