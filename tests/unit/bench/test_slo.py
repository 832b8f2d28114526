"""The benchmark of policies under load: order and folder of its cells, its tables, and how it compares answers."""

import math
from pathlib import Path
from random import Random

import msgspec
import pytest

from services.profile import load_profile
from services.settings import ConfigError
from tools.bench.slo.__main__ import main
from tools.bench.slo.cells import Basis, Cell, Folder, Result, Row, check_same, in_order
from tools.bench.slo.measure import prompt_number, what_is_due
from tools.bench.slo.pairs import Pair, difference
from tools.bench.slo.policies import POLICIES, policy_of
from tools.bench.slo.report import accuracy, gained, report
from tools.bench.slo.work import Work, done_since, parse_work
from tools.loadgen.asks import Ask

BASIS = Basis(
    profile="profiles/x",
    workers=2,
    seconds=120.0,
    warmup_s=20.0,
    slo_factor=5.0,
    problems=30,
    machine="a machine",
    threshold=0.9,
    alone_ms=40.0,
    capacity_per_s=10.0,
    rates=[1.15, 0.7],
    seeds=[0, 1],
    policies=["fixed", "ours"],
)


def row(
    number: int, *, latency_ms: float = 100.0, met: bool = True, correct: bool | None = True, error: str = ""
) -> Row:
    return Row(number, 1000 + number, 0.1 * number, latency_ms, met, error, correct, 20, 8, 0.75, 0)


def result(rate: float, seed: int, policy: str, rows: list[Row], *reasons: str) -> Result:
    return Result(
        rate=rate,
        seed=seed,
        policy=policy,
        settings={},
        rate_per_s=11.5,
        slo_ms=200.0,
        lag_p99_ms=1.0,
        why_it_does_not_count=list(reasons),
        rows=rows,
    )


def table_rows(text: str) -> dict[tuple[str, str], list[list[str]]]:
    """The rows of all tables, by rate and policy."""
    found: dict[tuple[str, str], list[list[str]]] = {}
    for line in text.splitlines():
        if line.startswith("|"):
            rate, policy, *rest = (cell.strip() for cell in line.strip("|").split("|"))
            found.setdefault((rate, policy), []).append(rest)
    return found


# --- cells --------------------------------------------------------------------------------------------------------


def test_the_first_rate_comes_first_and_policies_take_turns() -> None:
    cells = list(in_order([1.15, 0.7], [0, 1, 2], ["a", "b"]))
    assert [cell.rate for cell in cells] == [1.15] * 6 + [0.7] * 6
    assert [(cell.seed, cell.policy) for cell in cells[:6]] == [
        (0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b"),
    ]  # fmt: skip


def test_a_finished_cell_is_found_again_and_a_half_written_one_is_none(tmp_path: Path) -> None:
    folder = Folder(tmp_path / "slo")
    assert folder.basis() is None
    folder.save_basis(BASIS)
    done = result(1.15, 3, "ours+plan=low_first", [row(0), row(1, error="timeout", met=False)])
    folder.save(done)
    (folder.path / Cell(0.7, 3, "fixed").file_name).with_suffix(".new").write_text("{")
    assert Folder(folder.path).basis() == BASIS
    assert folder.results() == [done]
    assert folder.is_done(done.cell)
    assert not folder.is_done(Cell(0.7, 3, "fixed"))


def test_a_run_that_would_not_compare_needs_another_folder() -> None:
    shared = {
        name: getattr(BASIS, name)
        for name in ("profile", "workers", "seconds", "warmup_s", "slo_factor", "problems", "tokens_each")
    }
    check_same(BASIS, **shared)
    with pytest.raises(ConfigError, match=r"seconds: this folder's cells have 120\.0, not 10\.0"):
        check_same(BASIS, **(shared | {"seconds": 10.0}))


def test_policies_are_settings_of_the_controller() -> None:
    assert policy_of("fixed").controller == {"deadline_control": False, "load_control": False}
    assert policy_of("ours+plan=low_first+risk=0.8").controller == {"plan": "low_first", "risk": 0.8}
    assert policy_of("load").controller == {"deadline_control": False}
    assert [name for name in POLICIES if policy_of(name).is_pinned] == ["fixed", "ordered"]
    assert [name for name in POLICIES if policy_of(name).scheduler] == ["fixed", "paper", "unordered"]
    assert policy_of("fixed+risk=0.1").is_pinned


def test_the_paper_s_policy_runs_without_what_is_ours_in_the_profile() -> None:
    mine = "profiles/tiny-cpu"
    assert [name for name in POLICIES if policy_of(name).profile_of(mine) != mine] == ["paper"]
    ours, plain = load_profile(mine), load_profile(policy_of("paper").profile_of(mine))
    same = msgspec.structs.replace(
        ours,
        weights=plain.weights,
        description=plain.description,
        folder=plain.folder,
        quality_floor={},
        decoding=msgspec.structs.replace(
            ours.decoding,
            opening_share=0.0,
            opening_from=0.0,
            thresholds=plain.decoding.thresholds,  # ours may have some below, without an opening
            steps_by_threshold=plain.decoding.steps_by_threshold,
        ),
    )
    assert same == plain
    assert plain.weights_folder.resolve() == ours.weights_folder.resolve()
    assert plain.latency_file.read_bytes() == ours.latency_file.read_bytes()


@pytest.mark.parametrize("name", ["best", "ours+speed=3", "ours+risk=2", "ours+risk", "paper+plan=low_first"])
def test_a_policy_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="policies: "):
        policy_of(name)


# --- what can be asked again ----------------------------------------------------------------------------------------


def test_what_a_cell_asks_follows_from_its_seed_and_rate() -> None:
    asks = [Ask("/v1/chat/completions", {"messages": [str(number)]}, None) for number in range(30)]
    due = what_is_due(BASIS, 1, 2.0, asks)
    assert due == what_is_due(BASIS, 1, 2.0, asks)
    assert due != what_is_due(BASIS, 2, 2.0, asks)
    assert due[-1].due_s < BASIS.warmup_s + BASIS.seconds
    assert {send.slo_ms for send in due} == {BASIS.slo_ms}
    assert len({prompt_number(ask) for ask in asks}) == len(asks)


METRICS = """# HELP tediserve_worker_step_seconds One step
tediserve_worker_step_seconds_bucket{le="0.005"} 10.0
tediserve_worker_step_seconds_count 40.0
tediserve_worker_step_seconds_sum 1.5
tediserve_worker_profiled_seconds_total 1.2
tediserve_worker_between_steps_seconds_total 0.03
"""


def test_what_workers_have_run_is_read_from_their_metrics() -> None:
    work = parse_work(METRICS, "http://a")
    assert work == Work(passes=40, measured_s=1.5, profiled_s=1.2, between_s=0.03)
    with pytest.raises(ValueError, match="tediserve_worker_step_seconds_count: is it a worker's"):
        parse_work("up 1\n", "http://a")


def test_work_is_told_of_instances_that_were_there_all_the_time() -> None:
    early, late = parse_work(METRICS, ""), Work(passes=50, measured_s=2.0, profiled_s=1.5, between_s=0.05)
    (work,) = done_since([early], [late])
    assert (work.passes, work.measured_s) == (10, 0.5)
    assert done_since([late], [early]) == done_since([], [late]) == []


# --- pairs --------------------------------------------------------------------------------------------------------


def pairs_of(better: int, worse: int, same: int) -> list[Pair]:
    told = [(True, False)] * better + [(False, True)] * worse + [(True, True)] * same
    return [Pair(number, here, there) for number, (here, there) in enumerate(told)]


def test_the_difference_is_that_of_the_shares_and_its_interval_near_the_textbooks() -> None:
    found = difference(pairs_of(better=30, worse=60, same=1910))
    assert found is not None
    assert (found.pairs, found.points) == (2000, -1.5)
    error = 100 * math.sqrt((30 + 60 + 1) - 30**2 / 2002) / 2002  # Wald+2 of Agresti and Min
    assert (found.high - found.low) / 2 == pytest.approx(1.96 * error, rel=0.02)
    assert (found.high + found.low) / 2 == pytest.approx(-1.5, abs=0.01)


def test_no_difference_among_few_is_no_certainty() -> None:
    few, many = difference(pairs_of(0, 0, 50)), difference(pairs_of(0, 0, 5000))
    assert few is not None
    assert many is not None
    assert few.low < -2 < 2 < few.high
    assert -0.1 < many.low < 0 < many.high < 0.1
    assert difference([]) is None


def test_the_same_prompt_again_is_little_news() -> None:
    pairs = pairs_of(better=20, worse=30, same=350)
    once = difference(pairs)
    again = difference(pairs * 4)
    assert once is not None
    assert again is not None
    assert again.points == once.points
    assert again.high - again.low == pytest.approx(once.high - once.low, rel=0.05)


def test_the_interval_holds_the_truth_19_times_in_20() -> None:
    rng = Random(7)
    held = 0
    for _ in range(400):
        pairs = []
        for prompt in range(60):
            chance = rng.random()  # of this prompt's answers; the other policy has 10 points less
            worse = max(0.0, chance - 0.1)
            pairs += [Pair(prompt, rng.random() < chance, rng.random() < worse) for _ in range(5)]
        found = difference(pairs)
        assert found is not None
        held += found.low <= 9.5 <= found.high  # the chance is below 0.1 one time in ten
    assert 0.92 <= held / 400 <= 0.98


# --- tables -------------------------------------------------------------------------------------------------------


def test_a_report_of_a_folder_with_missing_cells() -> None:
    fixed = [
        row(0, latency_ms=500, met=False),
        row(1, latency_ms=100),
        row(2, error="timeout", met=False, correct=None),
    ]
    ours = [row(0, latency_ms=150), row(1, latency_ms=90, correct=False), row(2, latency_ms=190)]
    text = report(BASIS, [result(1.15, 0, "fixed", fixed), result(1.15, 0, "ours", ours)])
    rows = table_rows(text)
    assert rows["1.15", "fixed"] == [
        ["1 of 2", "33.3 % (33.3 to 33.3)", "100", "500", "500", "8.0", "0.750", "100.0 %", "3", "1"]
    ]
    whole, against_fixed = rows["1.15", "ours"]
    assert whole[:2] == ["1 of 2", "100.0 % (100.0 to 100.0)"]
    assert against_fixed[:3] == ["+66.7", "2", "-50.00"]  # the third request has no answer under fixed
    assert rows["0.7", "fixed"] == [["0 of 2", *["-"] * 9]]
    assert rows["0.7", "ours"] == [["0 of 2", *["-"] * 9], ["-", "-", "-", "-"]]
    assert "SLO 200.0 ms (5 times that)" in text
    assert "30 points more than fixed in every seed: yes so far (1 seeds, 3 are wanted)" in text
    assert "loss of accuracy is under 2 points: NO so far" in text
    assert report(BASIS, []).count("0 of 2") == 4


def test_seeds_are_pooled_for_accuracy_and_kept_apart_for_gains() -> None:
    results = [
        result(1.0, 0, "fixed", [row(0, met=False), row(1, met=False)]),
        result(1.0, 1, "fixed", [row(0), row(1, correct=False)]),
        result(1.0, 2, "fixed", [row(0)]),  # its partner is missing
        result(1.0, 0, "ours", [row(0), row(1, met=False)]),
        result(1.0, 1, "ours", [row(0, met=False), row(1)]),
    ]
    assert gained(results, 1.0, "ours", "fixed") == [50, -50]
    found = accuracy(results, 1.0, "ours", "fixed")
    assert found is not None
    assert (found.pairs, found.points) == (4, 25)
    assert gained(results, 0.7, "ours", "fixed") == []
    assert accuracy(results, 0.7, "ours", "fixed") is None


def test_what_disappoints_is_said_and_late_cells_are_marked() -> None:
    ours = result(1.15, 0, "ours", [row(0, met=False)], "the client was late")
    text = report(BASIS, [result(1.15, 0, "fixed", [row(0)]), ours])
    assert "in every seed: NO so far" in text
    assert table_rows(text)["1.15", "ours"][0][1] == "0.0 % (0.0 to 0.0) (late)"
    assert "Does not count: 1.15 x C, seed 0, ours: the client was late" in text


def test_the_command_reports_what_there_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "--folder", str(tmp_path)]) == 2
    assert "holds no benchmark" in capsys.readouterr().err
    folder = Folder(tmp_path)
    folder.save_basis(BASIS)
    folder.save(result(0.7, 1, "ours", [row(0)]))
    assert main(["report", "--folder", str(tmp_path)]) == 0
    assert table_rows(capsys.readouterr().out)["0.7", "ours"][0][0] == "1 of 2"
    (tmp_path / "rate-9.json").write_text("{}")
    assert main(["report", "--folder", str(tmp_path)]) == 2
    assert "rate-9.json" in capsys.readouterr().err


def test_what_is_finished_is_not_run_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its profile does not exist, so a stack could not even start."""
    folder = Folder(tmp_path)
    folder.save_basis(BASIS)
    for policy in ("fixed", "ours"):
        folder.save(result(1.15, 0, policy, [row(0)]))
    words = ["--folder", str(tmp_path), "--profile", "profiles/x", "--problems", "30", "--policies", "fixed,ours"]
    assert main([*words, "--rates", "1.15", "--seeds", "0"]) == 0
    assert table_rows(capsys.readouterr().out)["1.15", "ours"][0][0] == "1 of 2"
    assert main([*words, "--seconds", "60"]) == 2
    assert "seconds: this folder's cells have 120.0, not 60.0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["--policies", "fixed,worst"], "'worst' is not one of fixed, ordered"),
        (["--rates", "1,-1"], "rates"),
        (["--seconds", "0"], "seconds"),
    ],
)
def test_a_wrong_run_starts_nothing(
    tmp_path: Path, words: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--folder", str(tmp_path / "new"), *words]) == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
