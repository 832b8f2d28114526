import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.opening import Manner, Opening
from tests.unit.traces.builders import EOS, make_recording, make_run
from tools.traces.reader import Traces
from tools.traces.replay import DOUBT_KEPT, Behaviour, Replay, ReplayedStep, replay
from tools.traces.runs import RecordedRun

# One block of four, at 0.9: two tokens, then one that has become surer, then the last.
SLOW = make_run(
    [
        (0, 0.9, [(0, 50, 0.95, True), (1, 51, 0.7, False), (2, 52, 0.9, True), (3, 53, 0.4, False)]),
        (0, 0.9, [(1, 51, 0.92, True), (3, 63, 0.6, False)]),
        (0, 0.9, [(3, 73, 0.65, True)]),
    ],
    [50, 51, 52, 73],
)


@pytest.fixture(scope="module")
def dual_runs(traces: Traces) -> list[list[RecordedRun]]:
    """Of each prompt the runs with the dual cache."""
    return [list(runs.values()) for runs in traces.by_prompt("dual")]


def run_through(behaviour: Behaviour, thresholds: list[float]) -> tuple[Replay, list[ReplayedStep]]:
    """Steps with these thresholds, then with the last one until the end."""
    found, steps = behaviour.start(), list[ReplayedStep]()
    while found.finished is None:
        steps.append(found.step(thresholds[min(found.steps, len(thresholds) - 1)]))
    return found, steps


def committed(steps: list[ReplayedStep]) -> list[dict[int, int]]:
    return [dict(zip(step.positions, step.token_ids, strict=True)) for step in steps]


def steps_of(run: RecordedRun, block_size: int) -> list[dict[int, int]]:
    found = []
    for step in range(run.num_steps):
        entries = run.entries(step)
        chosen = run.committed_E[entries]
        positions = run.offset_E[entries][chosen] + run.block_S[step] * block_size
        found.append(dict(zip(positions.tolist(), run.token_E[entries][chosen].tolist(), strict=True)))
    return found


def test_a_run_replayed_with_its_own_thresholds_is_that_run_step_by_step(traces: Traces, dream_traces: Traces) -> None:
    runs = [(run, of.recording) for of in (traces, dream_traces) for run in of.runs()]
    for run, recording in runs:
        found, steps = run_through(Behaviour([run], recording), run.threshold_S.tolist())
        assert committed(steps) == steps_of(run, recording.block_size)
        assert [step.kind == "recompute" for step in steps] == run.recompute_S.tolist()
        assert [step.step_in_block for step in steps] == run.in_block_S.tolist()
        assert (found.steps, found.finished, found.output_ids) == (run.num_steps, run.finish, run.output_T.tolist())
        assert [step.finished for step in steps] == [None] * (run.num_steps - 1) + [run.finish]


def test_so_it_is_among_all_runs_of_its_prompt(traces: Traces) -> None:
    for runs in traces.by_prompt("dual"):
        for name, run in runs.items():
            schedule = traces.recording.schedule(name, run.prompt, run.planned_tokens)
            found = replay(list(runs.values()), schedule, traces.recording)
            assert (found.steps, found.output_ids) == (run.num_steps, run.output_T.tolist())


def test_another_threshold_commits_what_reached_it_in_the_recorded_step() -> None:
    found, steps = run_through(Behaviour([SLOW], make_recording()), [0.7])
    # 51 was not committed then, but the step saw it at 0.7; after that it is where the run was before its last step.
    assert committed(steps) == [{0: 50, 1: 51, 2: 52}, {3: 73}]
    assert steps[0].confidences == [0.95, 0.7, 0.9]
    assert found.output_ids == [50, 51, 52, 73]
    _, at_once = run_through(Behaviour([SLOW], make_recording()), [0.4])
    assert committed(at_once) == [{0: 50, 1: 51, 2: 52, 3: 53}]


def test_a_threshold_that_changes_applies_from_that_step_on() -> None:
    _, late = run_through(Behaviour([SLOW], make_recording()), [0.9, 0.6])
    assert committed(late) == [{0: 50, 2: 52}, {1: 51, 3: 63}]
    _, early = run_through(Behaviour([SLOW], make_recording()), [0.7, 0.9])
    assert committed(early) == [{0: 50, 1: 51, 2: 52}, {3: 73}]


def test_an_opening_holds_until_its_share_of_the_block_is_committed() -> None:
    half = make_recording(manner=Manner(opening=Opening(share=0.5, threshold=0.9)))
    # At 0.5 alone the first step would commit all four; with two of four committed the opening is over.
    _, steps = run_through(Behaviour([SLOW], half), [0.5])
    assert committed(steps) == [{0: 50, 2: 52}, {1: 51, 3: 63}]
    assert committed(run_through(Behaviour([SLOW], make_recording()), [0.5])[1])[0].keys() > {0, 2}
    more = make_recording(manner=Manner(opening=Opening(share=0.75, threshold=0.9)))
    assert committed(run_through(Behaviour([SLOW], more), [0.5])[1]) == steps_of(SLOW, 4)


def test_confidences_that_are_used_again_have_less_doubt() -> None:
    quick = make_run(
        [(0, 0.5, [(n, 50 + n, confidence, True) for n, confidence in enumerate((0.95, 0.8, 0.6, 0.5))])], []
    )
    _, steps = run_through(Behaviour([quick], make_recording()), [0.9])
    # Alone: 0.95; then 0.8 with 0.8 of its doubt is 0.84, the best; then 0.6 and 0.5 have grown twice and three times.
    assert committed(steps) == [{0: 50}, {1: 51}, {2: 52}, {3: 53}]
    assert [step.confidences[0] for step in steps] == pytest.approx(
        [0.95, 1 - 0.2 * DOUBT_KEPT, 1 - 0.4 * DOUBT_KEPT**2, 1 - 0.5 * DOUBT_KEPT**3]
    )
    _, steps = run_through(Behaviour([quick], make_recording()), [0.82])
    assert committed(steps) == [{0: 50}, {1: 51}, {2: 52}, {3: 53}]
    _, steps = run_through(Behaviour([quick], make_recording()), [0.74])
    assert committed(steps) == [{0: 50, 1: 51}, {2: 52}, {3: 53}]
    assert 1 - 0.5 * DOUBT_KEPT**2 < 0.74


def test_of_several_runs_the_one_at_the_threshold_is_followed() -> None:
    quick = make_run([(0, 0.5, [(n, 80 + n, 0.55, True) for n in range(4)])], [80, 81, 82, 83])
    both = Behaviour([SLOW, quick], make_recording())
    assert committed(run_through(both, [0.5])[1]) == [{0: 80, 1: 81, 2: 82, 3: 83}]
    assert committed(run_through(both, [0.9])[1]) == steps_of(SLOW, 4)


def test_an_eos_ends_the_request_and_what_follows_it_is_not_decoded() -> None:
    run = make_run(
        [
            (0, 0.9, [(0, 50, 0.3, False), (1, 51, 0.6, False), (2, EOS, 0.95, True), (3, 53, 0.2, False)]),
            (0, 0.9, [(0, 60, 0.5, False), (1, 51, 0.91, True)]),
            (0, 0.9, [(0, 70, 0.6, True)]),
        ],
        [70, 51],
        finish="eos",
    )
    found, steps = run_through(Behaviour([run], make_recording()), [0.6])
    assert committed(steps) == [{1: 51, 2: EOS}, {0: 70}]
    assert (found.finished, found.output_ids) == ("eos", [70, 51])
    found, steps = run_through(Behaviour([run], make_recording(ignore_eos=True)), [0.6])
    assert [sorted(step.positions) for step in steps] == [[1, 2], [0], [3]]
    assert (found.finished, found.output_ids) == ("length", [70, 51, EOS, 53])


def test_where_no_run_has_been_the_request_ends() -> None:
    ended = make_run(
        [
            (0, 0.9, [(0, 50, 0.8, True), (1, EOS, 0.7, False), (2, 52, 0.6, False), (3, 53, 0.6, False)]),
            (0, 0.9, [(1, 60, 0.75, False), (2, 62, 0.8, True), (3, 63, 0.6, False)]),
            (0, 0.9, [(1, EOS, 0.7, True), (3, 73, 0.6, False)]),
        ],
        [50],
        finish="eos",
    )
    recording = make_recording(max_tokens=12)
    found, steps = run_through(Behaviour([ended], recording), [0.9, 0.6])
    assert committed(steps) == [{0: 50}, {1: 60, 2: 62, 3: 63}]  # no EOS, so it would go on
    assert (found.finished, found.output_ids) == ("eos", [50, 60, 62, 63])


def test_dreams_blocks_begin_with_a_step_for_one_position(dream_traces: Traces) -> None:
    runs = list(dream_traces.runs())
    assert {int(run.eligible_S[0]) for run in runs if run.cache == "dual"} == {1}
    assert {int(run.eligible_S[0]) for run in runs if run.cache == "none"} == {8}


def test_dreams_first_step_of_a_block_commits_its_first_position_alone() -> None:
    run = make_run(
        [
            (0, 0.9, [(0, 50, 0.3, True)]),
            (0, 0.9, [(1, 51, 0.7, False), (2, 52, 0.95, True), (3, 53, 0.8, False)]),
            (0, 0.9, [(1, 61, 0.9, True), (3, 63, 0.9, True)]),
        ],
        [50, 61, 52, 63],
    )
    assert committed(run_through(Behaviour([run], make_recording()), [0.9])[1]) == steps_of(run, 4)
    _, steps = run_through(Behaviour([run], make_recording()), [0.7])
    assert committed(steps) == [{0: 50}, {1: 51, 2: 52, 3: 53}]


def test_equal_when_stored_is_decided_as_recorded() -> None:
    run = make_run(
        [
            (0, 0.9, [(0, 50, 0.700001, False), (1, 51, 0.700002, True), (2, 52, 0.1, False)]),
            (0, 0.9, [(0, 60, 0.95, True), (2, 62, 0.95, True)]),
        ],
        [60, 51, 62],
    )
    assert run.confidence_E[0] == run.confidence_E[1]
    assert committed(run_through(Behaviour([run], make_recording(max_tokens=3)), [0.9])[1]) == steps_of(run, 4)


def test_runs_of_different_prompts_are_no_behaviour() -> None:
    other = make_run([(0, 0.9, [(0, 5, 0.5, True)])], [5], prompt=1)
    for runs in ([SLOW, other], []):
        with pytest.raises(ValueError, match="runs of one prompt with one cache are needed"):
            Behaviour(runs, make_recording())


@given(st.integers(0, 7), st.lists(st.floats(0, 1), min_size=1, max_size=30), st.sets(st.integers(0, 6), min_size=1))
def test_whatever_the_thresholds_every_step_commits_and_the_request_ends(
    traces: Traces, dual_runs: list[list[RecordedRun]], prompt: int, thresholds: list[float], kept: set[int]
) -> None:
    recording, runs = traces.recording, dual_runs[prompt]
    found, steps = run_through(Behaviour([runs[index] for index in sorted(kept)], recording), thresholds)
    positions = [position for step in steps for position in step.positions]
    assert len(set(positions)) == len(positions) <= recording.max_tokens
    assert all(step.positions for step in steps)
    assert len(steps) == found.steps <= recording.max_tokens
    assert len(found.output_ids) <= recording.max_tokens
    assert sum(step.kind == "recompute" for step in steps) == len({step.block_index for step in steps})
    assert all(np.diff([step.block_index for step in steps]) >= 0)


def test_a_copy_goes_its_own_way() -> None:
    quick = make_run([(0, 0.5, [(n, 80 + n, 0.55, True) for n in range(4)])], [80, 81, 82, 83])
    original = Behaviour([SLOW, quick], make_recording()).start()
    original.step(0.9)
    other = original.copy()
    other.step(0.1)
    assert (other.finished, other.tokens_left_in_block) == ("length", 0)
    assert (original.finished, original.tokens_left_in_block, original.output_ids) == (None, 2, [])
    original.step(0.9)
    original.step(0.9)
    assert original.output_ids == SLOW.output_T.tolist()


def test_nothing_behind_an_eos_is_left_in_its_block() -> None:
    run = make_run(
        [
            (0, 0.9, [(0, 50, 0.3, False), (1, 51, 0.6, False), (2, EOS, 0.95, True), (3, 53, 0.2, False)]),
            (0, 0.9, [(0, 60, 0.95, True), (1, 51, 0.91, True)]),
        ],
        [60, 51],
        finish="eos",
    )
    found = Behaviour([run], make_recording()).start()
    assert (found.tokens_left_in_block, found.ends_in_block) == (4, False)
    found.step(0.9)
    assert (found.tokens_left_in_block, found.ends_in_block) == (2, True)
