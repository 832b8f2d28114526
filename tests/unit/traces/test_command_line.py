import re
from pathlib import Path

import pytest

from services.opening import Manner, Opening
from tools.traces.__main__ import main
from tools.traces.reader import Traces, open_traces
from tools.traces.summary import describe, describe_replays


def rows(table: str) -> dict[tuple[str, str], list[str]]:
    """The cells of each row, by the first two."""
    found = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return {(first, second): rest for first, second, *rest in found}


def test_record_then_show(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "traces"
    words = ["record", "--profile", f"{profile}", "--out", f"{out}", "--prompts", "3", "--split", "held_out"]
    main(
        [
            *words,
            "--thresholds",
            "0.2,0.45",
            "--schedules",
            "lh,steps",
            "--caches",
            "dual,none",
            "--seed",
            "5",
            "--opening-share",
            "0.25",
            "--blocks-ahead",
            "1",
        ]
    )
    shown = capsys.readouterr()
    assert "100%, 1 of 1 shards of 128 runs" in shown.err
    recording = open_traces(out).recording
    assert (recording.seed, recording.thresholds, recording.changing) == (5, [0.2, 0.45], ["lh", "steps"])
    assert recording.manner == Manner(opening=Opening(share=0.25, threshold=0.3), blocks_ahead=1)
    assert (recording.source, recording.caches) == ("built-in tasks, held_out", ["dual", "none"])

    main(["show", f"{out}", "--replay", "2", "--profile", f"{profile}"])
    shown = capsys.readouterr()
    table = rows(shown.out)
    assert table["dual", "lh"][0] == table["none", "0.2"][0] == "3"
    assert table["0.45", "0.45"][2:6] == ["+0.0%", "0.0%", "100%", "100%"]
    assert "Replays, cache none, 2 prompts" in shown.out


def test_the_table_says_what_the_runs_say(traces: Traces) -> None:
    text = describe(traces)
    runs = [run for run in traces.runs() if (run.cache, run.schedule) == ("prefix", "hml")]
    steps = sum(run.num_steps for run in runs)
    cells = rows(text)["prefix", "hml"]
    assert cells[0] == "8"
    assert cells[1] == f"{steps / 8:.2f}"
    assert cells[4] == f"{sum(int(run.recompute_S.sum()) for run in runs) / 8:.2f}"
    assert cells[6] == f"{sum(run.threshold_S.sum() for run in runs) / steps:.3f}"
    assert cells[8] == f"{sum(bool(run.correct) for run in runs) / 8:.1%}"
    all_steps = sum(run.num_steps for run in traces.runs())
    assert f"2 of 2 shards, 168 runs, {all_steps} steps" in text
    assert re.search(rf"{traces.num_bytes / 1e6:.2f} MB: {traces.num_bytes / all_steps:.1f} bytes a step", text)


def test_replays_of_what_they_are_made_from_are_exact_and_others_are_measured(traces: Traces) -> None:
    table = rows(describe_replays(traces, 8))
    assert table["0.2", "0.2"][2:6] == ["+0.0%", "0.0%", "100%", "100%"]
    recorded, predicted, bias, error, *_ = table["0.2", "0.45"]
    assert float(predicted) / float(recorded) - 1 == pytest.approx(float(bias[:-1]) / 100, abs=0.01)
    assert float(error[:-1]) >= abs(float(bias[:-1])) > 0
    assert table["the set", "lmh"][6:] == ["unknown", "unknown"]  # without a tokenizer
    assert ("the others", "0.3") in table


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["record", "--caches", "some,dual", "--prompts", "1"], "caches: some is not of none, prefix, dual"),
        (["record", "--prompts", "-1"], "num_prompts -1 must be at least 1"),
        (["record", "--prompts", "1", "--blocks-ahead", "-1"], "blocks_ahead -1 must not be negative"),
        (["record", "--prompts", "1", "--opening-share", "1.5"], "opening_share 1.5 is not between 0 and 1"),
        (["show"], "holds no recording: there is no recording.json"),
    ],
)
def test_what_is_wrong_is_said_without_a_traceback(
    words: list[str], reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--out", f"{tmp_path}"] if words[0] == "record" else [f"{tmp_path}"]
    with pytest.raises(SystemExit) as ended:
        main([*words, *place])
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err
