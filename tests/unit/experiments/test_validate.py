"""The simulator against a live benchmark: the cells here are made, the prompts are recorded with the built-in model."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.settings import ConfigError
from tools.bench.slo.cells import Basis, Folder, Result, Row
from tools.bench.slo.measure import prompt_number, what_is_due
from tools.bench.slo.policies import policy_of
from tools.bench.slo.work import Work
from tools.experiments.validate import Row as Compared
from tools.experiments.validate import Validation, crossing, crossings, table, validate
from tools.loadgen.asks import built_in

WORK = [Work(passes=100, measured_s=0.6, profiled_s=0.4, between_s=0.03)] * 2
BASIS = Basis(
    profile="profiles/tiny-cpu",
    workers=2,
    seconds=4.0,
    warmup_s=1.0,
    slo_factor=5.0,
    problems=2,
    machine="a machine",
    threshold=0.9,
    alone_ms=200.0,
    capacity_per_s=10.0,
    rates=[0.5],
    seeds=[0],
    policies=["fixed", "ours"],
    alone_work=WORK,
    full_work=WORK,
)


def a_cell(policy: str, work: list[Work]) -> Result:
    due = what_is_due(BASIS, 0, 5.0, built_in(BASIS.problems, seed=0))
    rows = [
        Row(send.number, prompt_number(send.ask), round(send.due_s, 4), 300.0, True, "", True, 20, 8, 0.9, 0)
        for send in due
        if send.due_s >= BASIS.warmup_s
    ]
    return Result(
        rate=0.5,
        seed=0,
        policy=policy,
        settings=policy_of(policy).controller,
        rate_per_s=5.0,
        slo_ms=BASIS.slo_ms,
        lag_p99_ms=1.0,
        why_it_does_not_count=[],
        rows=rows,
        work=work,
    )


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Folder(tmp_path_factory.mktemp("slo"))
    folder.save_basis(BASIS)
    for policy in BASIS.policies:
        folder.save(a_cell(policy, WORK))
    return folder.path


def test_each_cell_is_simulated_on_its_own_arrivals_with_its_own_passes(live: Path, tmp_path: Path) -> None:
    found = validate(live, tmp_path / "recording", processes=1)
    assert [(row.policy, row.seeds) for row in found.rows] == [("fixed", 1), ("ours", 1)]
    for row in found.rows:
        assert (row.requests, row.live, row.live_p95_ms) == (len(a_cell("fixed", WORK).rows), (1.0, 1.0, 1.0), 300.0)
        assert row.simulated == (1.0, 1.0, 1.0)  # an SLO of a second, and hardly any load
        assert row.latency_ratio == pytest.approx(1.5)
        # What is beside the passes was chosen for 200 ms alone, in the median; these two prompts are not alone.
        assert 100 < row.simulated_p95_ms < 600
    assert 50 < found.beside_passes_ms < 200
    cells = Folder(live)
    other = a_cell("fixed", WORK)
    cells.save(replace(other, rows=[*other.rows[:-1], replace(other.rows[-1], prompt=1)]))
    with pytest.raises(ConfigError, match="had another prompt or time"):
        validate(live, tmp_path / "recording", processes=1)
    cells.save(a_cell("fixed", []))
    with pytest.raises(ConfigError, match="do not tell what passes took"):
        validate(live, tmp_path / "recording", processes=1)


# --- side by side -------------------------------------------------------------------------------------------------


def compared(rate: float, live: float, simulated: float, p95_ms: float = 300.0) -> Compared:
    return Compared(
        rate=rate,
        policy="ours",
        seeds=2,
        requests=100,
        live=(live - 0.01, live, live + 0.01),
        simulated=(simulated, simulated, simulated),
        live_p95_ms=300.0,
        simulated_p95_ms=p95_ms,
        live_correct=0.8,
        simulated_correct=0.8,
        latency_ratio=1.5,
    )


def a_validation(*rows: Compared) -> Validation:
    return Validation(
        machine="a machine",
        workers=2,
        alone_ms=60.0,
        slo_ms=300.0,
        capacity_per_s=20.0,
        beside_passes_ms=5.0,
        rows=list(rows),
    )


def test_the_rate_where_attainment_falls_through_a_level_lies_between_two_rates() -> None:
    assert crossing([(1.0, 0.8), (0.5, 1.0)]) == pytest.approx(0.75)
    assert crossing([(0.5, 1.0), (1.0, 0.95)]) is None
    assert crossing([(0.5, 0.7), (1.0, 0.6)]) is None


def test_the_table_says_where_both_agree() -> None:
    rows = [compared(0.5, 0.98, 0.99), compared(0.6, 0.94, 0.87, 360.0), compared(0.7, 0.5, 0.4)]
    found = a_validation(*rows)
    ((policy, live, simulated),) = crossings(found)
    assert (policy, live, simulated) == ("ours", pytest.approx(0.6091, abs=1e-3), pytest.approx(0.575))
    text = table(found)
    assert "| 0.5 | ours | 2 | 98.0 % (97.0 to 99.0) | 99.0 % (99.0 to 99.0) | yes | 300 | 300 | +0 % |" in text
    assert "| 0.6 | ours | 2 | 94.0 % (93.0 to 95.0) | 87.0 % (87.0 to 87.0) | NO | 300 | 360 | +20 % |" in text
    assert "| ours | 0.61 | 0.57 | -6 % |" in text
    assert "live range ± 5 points. Here: 1 of 2 rows. **Not met.**" in text
    assert "95th percentile within 15%. Here: 1 of 2 rows. **Not met.**" in text
    assert "within 10%. Here: 1 of 1 policies that have one live. **Met.**" in text
    assert "Here: 0 of 0 rows. **Not met.**" in table(a_validation(rows[2])), "of nothing nothing is known"
