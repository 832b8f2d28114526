from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.traces.builders import Entry, assert_same, make_run
from tools.traces.reader import Traces
from tools.traces.runs import SCALE, RecordedRun, check_threshold, load_shard, quantise, save_shard

SCHEDULES = ["0.5", "0.9", "blocks"]
THRESHOLDS = st.integers(0, 10_000).map(lambda number: number / 10_000)


@st.composite
def runs(draw: st.DrawFn) -> RecordedRun:
    entries = st.tuples(st.integers(0, 500), st.integers(0, 200_000), st.floats(0, 1), st.booleans())
    chosen: st.SearchStrategy[list[Entry]] = st.lists(entries, min_size=1, max_size=6)
    steps = draw(st.lists(st.tuples(st.integers(0, 9), THRESHOLDS, chosen), min_size=1, max_size=5))
    summary = st.floats(0, 1, width=32)
    return make_run(
        steps,
        draw(st.lists(st.integers(0, 200_000))),
        prompt=draw(st.integers(0, 100_000)),
        cache=draw(st.sampled_from(["none", "prefix", "dual"])),
        schedule=draw(st.sampled_from(SCHEDULES)),
        prompt_tokens=draw(st.integers(1, 200_000)),
        planned_tokens=draw(st.integers(0, 200_000)),
        finish=draw(st.sampled_from(["eos", "length"])),
        correct=draw(st.sampled_from([None, True, False])),
        confidence_S5=np.array(draw(st.lists(summary, min_size=5, max_size=5)), dtype=np.float32)
        * np.ones((len(steps), 1), dtype=np.float32),
    )


@settings(max_examples=25)  # each syncs a file
@given(st.lists(runs(), max_size=4))
def test_a_shard_gives_back_what_was_saved(tmp_path_factory: pytest.TempPathFactory, saved: list[RecordedRun]) -> None:
    path = tmp_path_factory.mktemp("shard") / "shard-00000.npz"
    save_shard(path, saved, SCHEDULES)
    loaded = load_shard(path, SCHEDULES)
    assert len(loaded) == len(saved)
    for found, expected in zip(loaded, saved, strict=True):
        assert_same(found, expected)
    assert [child.name for child in path.parent.iterdir()] == [path.name]


def test_the_same_runs_are_the_same_bytes(traces: Traces, tmp_path: Path) -> None:
    (first, *_) = traces.shards
    loaded = load_shard(first, traces.recording.schedules)
    save_shard(tmp_path / "again.npz", loaded, traces.recording.schedules)
    assert (tmp_path / "again.npz").read_bytes() == first.read_bytes()


@given(st.floats(0, 1, width=32), THRESHOLDS)
def test_a_stored_confidence_decides_as_the_live_one(confidence: float, threshold: float) -> None:
    check_threshold(threshold)
    stored = int(quantise(confidence))
    assert (stored >= round(threshold * SCALE)) == (confidence >= threshold)
    assert (stored / SCALE >= threshold) == (confidence >= threshold)
    assert 0 <= confidence - stored / SCALE < 1.001 / SCALE


@given(THRESHOLDS, st.integers(-3, 3))
def test_so_do_the_neighbours_of_a_threshold(threshold: float, away: int) -> None:
    value = np.float32(threshold)
    for _ in range(abs(away)):
        value = np.nextafter(value, np.float32(np.sign(away)), dtype=np.float32)
    confidence = float(np.clip(value, 0, 1))
    assert (int(quantise(confidence)) >= round(threshold * SCALE)) == (confidence >= threshold)


def test_what_is_no_number_counts_as_zero_as_in_a_report() -> None:
    assert quantise([float("nan"), -1.0, 2.0, float("inf")]).tolist() == [0, 0, SCALE, SCALE]


@pytest.mark.parametrize(("value", "reason"), [(1.5, "not between"), (float("nan"), "not between"), (0.123456, "four")])
def test_a_threshold_that_cannot_be_kept_is_refused(value: float, reason: str) -> None:
    with pytest.raises(ValueError, match=f"threshold {value} .*{reason}"):
        check_threshold(value)


def test_a_run_tells_its_steps_entries() -> None:
    run = make_run(
        [
            (0, 0.9, [(0, 5, 0.95, True), (1, 6, 0.5, False), (2, 7, 0.91, True)]),
            (0, 0.9, [(1, 8, 0.6, True)]),
        ],
        [5, 8, 7],
    )
    assert run.num_steps == 2
    assert run.eligible_S.tolist() == [3, 1]
    assert run.committed_S.tolist() == [2, 1]
    assert run.token_E[run.entries(1)].tolist() == [8]


def test_a_file_that_is_no_shard_is_named(traces: Traces, tmp_path: Path) -> None:
    content = traces.shards[0].read_bytes()
    damaged = {"cut": content[: len(content) // 2], "text": b"no archive", "empty": b""}
    for name, data in damaged.items():
        (tmp_path / name).write_bytes(data)
        with pytest.raises(ValueError, match=f"{name} is no shard of traces"):
            load_shard(tmp_path / name, SCHEDULES)
    np.savez(tmp_path / "newer.npz", format_version=np.array(2))
    with pytest.raises(ValueError, match=r"newer\.npz is no shard of traces: format version 2; this program reads 1"):
        load_shard(tmp_path / "newer.npz", SCHEDULES)
    np.savez(tmp_path / "other.npz", something=np.array(2))
    with pytest.raises(ValueError, match=r"other\.npz is no shard"):
        load_shard(tmp_path / "other.npz", SCHEDULES)
