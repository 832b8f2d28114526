"""What a predictor learns from: states as a worker reports them, and what was left."""

from pathlib import Path

import pytest
from msgspec.structs import replace

from services.denoiser.engine import Engine, Job, Threshold
from services.denoiser.instance import engine_config, load_profile_model
from services.profile import load_profile
from tests.unit.traces.builders import EOS, make_recording, make_run
from tools.predictor.rows import Row, fixed_rows, kept_rows, reports, training_rows
from tools.traces.denoise import _bookkeeping, _stepped
from tools.traces.prompts import codec_of, tasks
from tools.traces.reader import Traces
from tools.traces.schedules import fixed_threshold, name_of

HIGH = [(0, 20, 0.95, True)]


def test_rows_count_down_what_a_run_took() -> None:
    # two blocks of four: three steps, then two; the second ends the answer
    steps = [
        (0, 0.9, [(0, 20, 0.95, True), (1, 21, 0.4, False), (2, 22, 0.3, False), (3, 23, 0.2, False)]),
        (0, 0.9, [(1, 21, 0.95, True), (2, 22, 0.95, True), (3, 23, 0.2, False)]),
        (0, 0.9, [(3, 23, 0.5, True)]),
        (1, 0.9, [(0, 24, 0.4, False), (1, 25, 0.2, False), (2, EOS, 0.95, True), (3, 26, 0.95, True)]),
        (1, 0.9, [(0, 24, 0.95, True), (1, 25, 0.95, True)]),
    ]
    run = make_run(steps, [20, 21, 22, 23, 24, 25], finish="eos")
    recording = make_recording(max_tokens=12)
    found = [
        (r.steps, r.block_index, r.steps_in_block, r.tokens_committed_in_block, r.tokens_left_in_block, r.ends_in_block)
        for r in reports(run, recording)
    ]
    assert found == [
        (0, 0, 0, 0, 4, False),
        (1, 0, 1, 1, 3, False),
        (2, 0, 2, 3, 1, False),
        (3, 1, 0, 0, 4, False),
        (4, 1, 1, 2, 2, True),
    ]
    assert {r.num_blocks for r in reports(run, recording)} == {3}


def test_what_is_left_after_a_turn_is_what_a_replay_takes(traces: Traces) -> None:
    rows = training_rows(traces)
    kinds = {kind: [row for row in rows if row.kind == kind] for kind in ("fixed", "turned", "short")}
    runs = list(traces.runs())
    own = [run for run in runs if fixed_threshold(run.schedule) is not None]
    assert len(kinds["fixed"]) == sum(run.num_steps for run in own)
    assert len(kinds["turned"]) > 0.8 * sum(run.num_steps - 1 for run in runs)
    assert all(row.request.steps > 0 for row in kinds["turned"]), "before the first step nothing can turn"
    assert training_rows(traces) == rows, "a function of the recording"
    for row in kinds["short"]:
        assert row.request.num_blocks < 3
        assert row.blocks_left <= row.request.num_blocks - row.request.block_index


def test_rows_that_are_short_stop_where_their_blocks_do(traces: Traces) -> None:
    full: dict[tuple[int, float, int], Row] = {}
    for row in fixed_rows(traces):
        full[row.prompt, row.threshold, row.request.steps] = row
    compared = 0
    for row in training_rows(traces):
        if row.kind == "short" and row.request.steps == 0:
            whole = full[row.prompt, row.threshold, 0]
            assert replace(row.request, num_blocks=whole.request.num_blocks) == whole.request
            assert row.steps_left <= whole.steps_left
            assert row.blocks_left == min(row.request.num_blocks, whole.blocks_left)
            compared += 1
    assert compared > 10


def test_kept_rows_follow_a_change_and_weigh_what_stays_rarely() -> None:
    steps = [(0, 0.5, HIGH), (1, 0.9, HIGH), (2, 0.9, HIGH), (2, 0.9, HIGH)]
    run = make_run(steps, [20, 20, 20], schedule="blocks")

    class OneRun:
        recording = make_recording(max_tokens=12, thresholds=[0.5, 0.9], changing=["blocks"])

        def runs(self) -> list[object]:
            return [run, make_run([(0, 0.9, HIGH), (1, 0.9, HIGH)], [20, 20], schedule="blocks")]

    rows = kept_rows(OneRun())  # type: ignore[arg-type]
    # before the second block the threshold stays for two blocks: one chance in two
    assert [(row.request.steps, row.threshold, row.steps_left, row.weight) for row in rows] == [
        (1, 0.9, 3, 2.0),
        (2, 0.9, 2, 1.0),
        (3, 0.9, 1, 1.0),
    ]


def test_a_worker_reports_what_rows_say(traces: Traces, profile: Path) -> None:
    """Prompts are denoised again: the worker's own bookkeeping says the same as the rows of the recording."""
    served, recording = load_profile(profile), traces.recording
    loaded = load_profile_model(served)
    engine = Engine(loaded, config=engine_config(served, loaded), keep_scores=True)
    asked = tasks(recording.num_prompts, "train", recording.seed, codec_of(served))
    compared = ended = 0
    for run in traces.runs():
        if run.schedule != name_of(recording.thresholds[-1]):
            continue
        threshold = float(run.threshold_S[0])
        job = Job(
            request_id="r",
            prompt_ids=asked[run.prompt].ids,
            max_tokens=recording.max_tokens,
            block_size=recording.block_size,
            cache=run.cache,
            choice=Threshold(threshold),
            seed=recording.seed + run.prompt,
        )
        engine.admit(job)
        book = _bookkeeping(job, recording.model, frozenset(engine.model.shape.eos_ids))
        book.threshold = threshold
        for expected in reports(run, recording)[1:]:
            (step,) = engine.step().requests
            book.note(_stepped(step))
            told = replace(book.report(), request_id=str(run.prompt))
            assert expected.confidence == pytest.approx(told.confidence, abs=1e-5)
            assert replace(expected, confidence=told.confidence) == told
            compared, ended = compared + 1, ended + told.ends_in_block
        engine.remove("r")
    assert compared > 100
    assert ended > 0, "some blocks are seen to be the last"
