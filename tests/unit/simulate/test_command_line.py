import json
import shutil
from pathlib import Path

import pytest

from tools.simulate.__main__ import main
from tools.simulate.systems import NAMES
from tools.traces.reader import Traces

SMALL = ["--seconds", "3", "--instances", "2", "--rate", "4", "--output-tokens", "64"]


def rows(text: str) -> dict[str, list[str]]:
    """Of the table: its first cell, the others."""
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    return {first: rest for first, *rest in cells}


def test_every_system_runs_on_the_built_in_profile(capsys: pytest.CaptureFixture[str]) -> None:
    main(["--systems", ",".join([*NAMES, "fixed-0.6"]), *SMALL])
    table = rows(capsys.readouterr().out)
    assert set(NAMES) < set(table)
    numbers = {name: table[name][0] for name in NAMES}
    assert len(set(numbers.values())) == 1  # all had the same requests
    thresholds = dict(zip(table["system"], table["fixed-0.6"], strict=True))
    assert (thresholds["threshold"], thresholds["in time"]) == ("0.600", "100.0%")


def test_two_runs_write_the_same_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("one", "two"):
        files = ["--csv", str(tmp_path / f"{name}.csv"), "--json", str(tmp_path / f"{name}.json")]
        main(["--systems", "tedi,llumnix", *SMALL, "--pass-noise", "0.1", *files])
    for suffix in (".tedi.csv", ".llumnix.csv", ".json"):
        assert (tmp_path / f"one{suffix}").read_bytes() == (tmp_path / f"two{suffix}").read_bytes()
    summary = json.loads((tmp_path / "one.json").read_text())["tedi"]
    assert summary["requests"] == summary["finished"] == len((tmp_path / "one.tedi.csv").read_text().splitlines()) - 1
    assert capsys.readouterr().out


def test_the_published_profile_and_step_counts(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    load = ["--rate", "3", "--seconds", "8", "--instances", "2", "--slo-ms", "9500"]
    where = ["--profile", "profiles/llada-8b-h100", "--workload", "gsm8k"]
    main(["--systems", "tedi", *where, *load, "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["tedi"]
    assert found["attainment"] == 1.0
    assert found["steps_mean"] == pytest.approx(86, rel=0.15)
    assert found["recompute_steps_mean"] == 8.0
    assert found["accuracy"] == pytest.approx(0.786)


def test_recorded_traces_with_their_own_endings(
    recording: Traces, random_profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    built_in = Path("profiles/tiny-cpu/latency.json").read_bytes()
    (random_profile / "latency.json").write_bytes(built_in)
    where = ["--profile", str(random_profile), "--workload", str(recording.folder), "--forecasts", "oracle"]
    main(["--systems", "tedi", *where, "--rate", "20", "--seconds", "2", "--json", str(tmp_path / "out.json")])
    found = json.loads((tmp_path / "out.json").read_text())["tedi"]
    runs = [run for run in recording.runs() if run.schedule == "0.3"]
    assert found["finished"] == found["requests"] > 20
    assert found["steps_mean"] == pytest.approx(sum(run.num_steps for run in runs) / len(runs), rel=0.2)
    assert found["accuracy"] == 0.0  # of a random model


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--systems", "magic"], "there is no system 'magic'; there are tedi, paper"),
        (["--systems", "fixed-2"], "there is no system 'fixed-2'"),
        (["--profile", "nowhere"], "no profile at nowhere"),
        (["--workload", "nowhere"], "nowhere holds no recording"),
        (["--workload", "gsm8k"], "at most 768 fit: shorter prompts"),
        (["--tp", "3"], "the latency profile holds TP degree 1, not 3"),
        (["--instances", "0"], "instances and tp must be at least 1"),
        (["--thresholds", "0.55"], "0.55 is none of the profile's"),
        (["--controller", "riks=1"], "--controller: Object contains unknown field `riks`"),
        (["--scheduler", "max_moves=many"], "--scheduler:"),
        (["--output-tokens", "100"], "100 tokens is no whole number of blocks"),
        (["--rate", "0.001", "--seconds", "1"], "there was no request"),
        (
            ["--profile", "profiles/llada-8b-h100", "--forecasts", "trees"],
            "no step predictor at profiles/llada-8b-h100/step_predictor.json",
        ),
    ],
)
def test_what_cannot_be_run_is_told(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--systems", "tedi", *words] if "--systems" not in words else words)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err


def test_a_recording_made_in_another_manner_is_refused(
    random_profile: Path, recording: Traces, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile = tmp_path / "profile"
    shutil.copytree(random_profile, profile)
    (profile / "latency.json").write_bytes(Path("profiles/tiny-cpu/latency.json").read_bytes())
    text = (profile / "profile.toml").read_text()
    (profile / "profile.toml").write_text(text.replace("opening_share = 0.0", "opening_share = 0.5\nblocks_ahead = 1"))
    with pytest.raises(SystemExit) as stopped:
        main(["--systems", "tedi", "--profile", str(profile), "--workload", str(recording.folder)])
    assert stopped.value.code == 2
    said = capsys.readouterr().err
    assert "was recorded with no opening and the whole canvas in sight, the profile serves with" in said
    assert "an opening of 0.5 at 0.3 and 1 blocks ahead in sight" in said
    assert f"--profile {profile}" in said


@pytest.mark.parametrize("words", [["--rate", "x"], ["--rate", "0"], ["--phases", "5"], ["--prompt-tokens", "9-3"]])
def test_words_that_are_no_numbers_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(words)
    assert stopped.value.code == 2
    assert words[0] in capsys.readouterr().err
