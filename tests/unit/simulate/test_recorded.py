from pathlib import Path

import numpy as np
import pytest

from services.profile import load_profile
from services.settings import ConfigError
from tools.simulate.recorded import Recorded
from tools.traces.prompts import codec_of
from tools.traces.reader import Traces
from tools.traces.replay import Behaviour
from tools.traces.runs import RecordedRun

THRESHOLDS = (0.2, 0.3, 0.45)


def runs_of(recording: Traces) -> list[dict[str, RecordedRun]]:
    return list(recording.by_prompt("dual"))


def test_at_a_recorded_threshold_a_request_is_the_recorded_run(recording: Traces) -> None:
    behaviour = Recorded(recording.folder, "dual")
    for prompt, runs in enumerate(runs_of(recording)):
        for threshold in THRESHOLDS:
            run, course = runs[f"{threshold:g}"], behaviour.start(prompt)
            for step in range(run.num_steps):
                assert (course.block_index, course.steps_in_block) == (run.block_S[step], run.in_block_S[step])
                course.step(threshold)
                if not course.finish:  # what a worker then said
                    signs = course.signs()
                    assert signs.tokens_committed == run.tokens_committed_S[step]
                    assert signs.confidence == pytest.approx(run.confidence_S5[step], abs=1e-4)
            assert (course.steps, course.finish) == (run.num_steps, run.finish)
            assert course.block_index == run.block_S[-1] + 1


def test_a_threshold_that_changes_on_the_way_gives_the_replay_of_that(recording: Traces) -> None:
    behaviour = Recorded(recording.folder, "dual")
    rng = np.random.default_rng(5)
    for prompt, runs in enumerate(runs_of(recording)):
        replay, course = Behaviour(list(runs.values()), recording.recording).start(), behaviour.start(prompt)
        while not course.finish:
            threshold = float(rng.choice(THRESHOLDS))
            step = replay.step(threshold)
            assert course.step(threshold) == step.block_done
            assert course.signs().tokens_left_in_block == replay.tokens_left_in_block
        assert course.finish == replay.finished
        assert course.steps == replay.steps


def test_requests_of_one_prompt_do_not_disturb_each_other(recording: Traces) -> None:
    behaviour = Recorded(recording.folder, "dual")
    courses = {threshold: behaviour.start(0) for threshold in THRESHOLDS}
    again = behaviour.start(0)
    while not all(course.finish for course in courses.values()):
        for threshold, course in courses.items():
            if not course.finish:
                course.step(threshold)
    while not again.finish:
        again.step(THRESHOLDS[0])
    runs = runs_of(recording)[0]
    assert {t: course.steps for t, course in courses.items()} == {t: runs[f"{t:g}"].num_steps for t in THRESHOLDS}
    assert again.steps == courses[THRESHOLDS[0]].steps


def test_without_room_to_remember_the_steps_are_the_same(recording: Traces) -> None:
    forgetful = Recorded(recording.folder, "dual", max_steps=0)
    course = forgetful.start(1)
    while not course.finish:
        course.step(0.3)
    assert course.steps == runs_of(recording)[1]["0.3"].num_steps
    assert course.signs().tokens_left_in_block == 0


def test_what_is_left_is_what_it_then_takes(recording: Traces) -> None:
    behaviour = Recorded(recording.folder, "dual")
    for prompt in range(behaviour.num_prompts):
        course = behaviour.start(prompt)
        for _ in range(3):
            if not course.finish:
                course.step(0.45)
        left, before, begun = course.left(0.2), course.steps, 0
        while not course.finish:
            begun += course.steps_in_block == 0
            course.step(0.2)
        assert (left.steps, left.blocks) == (course.steps - before, begun)


def test_means_and_accuracy_are_those_of_the_recorded_runs(recording: Traces, random_profile: Path) -> None:
    behaviour = Recorded(recording.folder, "dual", codec_of(load_profile(random_profile)).decode)
    runs = runs_of(recording)
    assert behaviour.mean(0.3).steps == pytest.approx(sum(of["0.3"].num_steps for of in runs) / len(runs))
    assert behaviour.mean(0.25).steps == pytest.approx((behaviour.mean(0.2).steps + behaviour.mean(0.3).steps) / 2)
    assert behaviour.accuracy(0.3) == sum(bool(of["0.3"].correct) for of in runs) / len(runs)
    course = behaviour.start(0)
    while not course.finish:
        course.step(0.3)
    assert course.correctness() == float(bool(runs[0]["0.3"].correct))


def test_a_cache_that_was_not_recorded_is_named(recording: Traces) -> None:
    with pytest.raises(ConfigError, match="no run with cache 'none', but dual"):
        Recorded(recording.folder, "none")


def test_who_goes_back_is_as_it_was_at_that_block_s_end(recording: Traces) -> None:
    behaviour = Recorded(recording.folder, "dual")
    tried = 0
    for prompt in range(behaviour.num_prompts):
        course, other = behaviour.start(prompt), behaviour.start(prompt)
        for one in (course, other):
            while one.block_index < 1:
                one.step(0.3)
        if other.finish:
            continue
        tried += 1
        while not course.finish:
            course.step(0.2)
        course.go_back(1)
        assert (course.steps, course.block_index, course.steps_in_block, course.finish) == (other.steps, 1, 0, "")
        assert course.signs() == other.signs()
        course.go_back(0)
        assert (course.steps, course.signs()) == (0, behaviour.start(prompt).signs())
    assert tried
