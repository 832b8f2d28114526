from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.settings import ConfigError
from tests.unit.simulate.build import COUNTS, STEPS, THRESHOLDS
from tools.simulate.denoising import Counted, Course, StepCounts, read_step_counts
from tools.simulate.run import GSM8K

# Published beside the step counts: mean steps and accuracy with a share of the steps at 0.9, the others at 0.6
# (github.com/tauChang/TeDiServe, plot/accuracy_vs_latency_tradeoff/plot_dynamic.py@02ceb170).
MIXTURES = {
    0.1: (42.14, 0.726), 0.2: (44.27, 0.730), 0.3: (46.6, 0.732), 0.4: (49.285, 0.737), 0.5: (52.18, 0.743),
    0.6: (56.04, 0.757), 0.7: (59.84, 0.759), 0.8: (64.92, 0.763), 0.9: (71.15, 0.777),
}  # fmt: skip
MEANS = {0.6: 40.16, 0.9: 78.63}  # of the same runs


def run_through(course: Course, thresholds: Sequence[float]) -> int:
    """These thresholds in turn, then the last one. Returns the steps."""
    while not course.finish:
        course.step(thresholds[min(course.steps, len(thresholds) - 1)])
    return course.steps


@pytest.mark.parametrize("prompt", range(3))
@pytest.mark.parametrize("index", range(3))
def test_at_a_fixed_threshold_a_request_takes_the_counted_steps(prompt: int, index: int) -> None:
    course = Counted(COUNTS).start(prompt)
    ends = []
    while not course.finish:
        if course.step(THRESHOLDS[index]):
            ends.append(course.steps)
    assert course.steps == STEPS[prompt][index]
    assert len(ends) == 4
    assert course.finish == "length"
    assert ends == [-(-block * STEPS[prompt][index] // 4) for block in (1, 2, 3, 4)]


def test_a_threshold_that_changes_on_the_way_has_its_share() -> None:
    # half of the request in 20 steps at 0.9, the other half in 8 at 0.5
    assert run_through(Counted(COUNTS).start(0), [0.9] * 20 + [0.5]) == 28
    assert run_through(Counted(COUNTS).start(0), [0.5] * 8 + [0.9]) == 28
    # between two thresholds in proportion: 32 steps at 0.8
    assert run_through(Counted(COUNTS).start(0), [0.8]) == 32


@settings(max_examples=40)
@given(st.lists(st.sampled_from([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]), min_size=1, max_size=60), st.integers(0, 2))
def test_what_is_left_is_what_it_then_takes(thresholds: list[float], prompt: int) -> None:
    behaviour = Counted(COUNTS)
    course, other = behaviour.start(prompt), behaviour.start(prompt)
    for threshold in thresholds[:-1]:
        if not course.finish:
            course.step(threshold)
            other.step(threshold)
    left, before, begun = course.left(thresholds[-1]), course.steps, 0
    while not other.finish:
        begun += other.steps_in_block == 0
        other.step(thresholds[-1])
    assert (left.steps, left.blocks) == (other.steps - before, begun)


@settings(max_examples=25)
@given(st.lists(st.sampled_from(THRESHOLDS), min_size=1, max_size=60), st.integers(0, 2))
def test_signs_are_those_of_a_request_that_commits_a_token_a_step_at_least(values: list[float], prompt: int) -> None:
    course = Counted(COUNTS).start(prompt)
    committed = 0
    for threshold in values:
        if course.finish:
            break
        course.step(threshold)
        signs = course.signs()
        assert signs.tokens_committed == 32 * course.block_index + signs.tokens_committed_in_block
        assert committed < signs.tokens_committed <= 128
        assert signs.tokens_committed_in_block >= course.steps_in_block
        assert signs.tokens_left_in_block == (0 if course.finish else 32 - signs.tokens_committed_in_block)
        committed = signs.tokens_committed


def test_expected_correctness_counts_the_tokens_committed_at_each_threshold() -> None:
    behaviour = Counted(COUNTS)
    course = behaviour.start(0)
    run_through(course, [0.9] * 20 + [0.5])
    assert course.correctness() == pytest.approx((0.8 + 0.5) / 2)
    unknown = Counted(
        StepCounts(**{name: getattr(COUNTS, name) for name in COUNTS.__struct_fields__} | {"accuracy": ()})
    )
    course = unknown.start(0)
    run_through(course, [0.9])
    assert course.correctness() is None


def test_steps_are_in_proportion_to_the_output_and_to_the_means_that_are_asked_for() -> None:
    assert run_through(Counted(COUNTS, output_tokens=256).start(0), [0.9]) == 80
    scaled = Counted(COUNTS, mean_steps_per_block=(2.0, 3.0, 7.0))
    taken = [run_through(scaled.start(prompt), [0.9]) for prompt in range(3)]
    assert sum(taken) / 3 == pytest.approx(4 * 7.0, abs=1)
    assert scaled.mean(0.9).steps == pytest.approx(28.0)
    with pytest.raises(ConfigError, match="100 tokens is no whole number of blocks of 32"):
        Counted(COUNTS, output_tokens=100)


def test_a_block_takes_a_step_at_least() -> None:
    short = Counted(COUNTS, mean_steps_per_block=(0.5, 0.6, 0.7))
    assert run_through(short.start(0), [0.5]) == 4


def test_published_mixtures_of_two_thresholds_come_out() -> None:
    counts = read_step_counts(GSM8K)
    means = dict(zip(counts.thresholds, counts.means, strict=True))
    scale = {threshold: MEANS[threshold] / means[threshold] for threshold in MEANS}  # to the runs with mixtures
    behaviour = Counted(counts)
    for share, (steps, accuracy) in MIXTURES.items():
        taken, correct = [], []
        for prompt in range(0, behaviour.num_prompts, 5):
            course = behaviour.start(prompt)
            while not course.finish:  # so that at any time the share is as near as it can be
                tenths = round(10 * share)
                high = course.steps * tenths % 10 + tenths >= 10
                course.step(0.9 if high else 0.6)
            taken.append(course.steps)
            correct.append(course.correctness())
        expected = share * scale[0.9] + (1 - share) * scale[0.6]
        assert sum(taken) / len(taken) * expected == pytest.approx(steps, rel=0.03), share
        assert sum(filter(None, correct)) / len(correct) == pytest.approx(accuracy, abs=0.012), share


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"thresholds": (0.9, 0.5, 0.7)}, "thresholds must be ascending"),
        ({"steps": ((1, 2),)}, r"steps\[0\] has 2 numbers for 3 thresholds"),
        ({"accuracy": (0.5,)}, "accuracy has 1 numbers for 3 thresholds"),
        ({"prompt_tokens": (9, 8)}, "prompt_tokens: 9 is more than 8"),
    ],
)
def test_step_counts_that_do_not_fit_are_refused(changes: dict[str, object], message: str) -> None:
    fields = {name: getattr(COUNTS, name) for name in COUNTS.__struct_fields__}
    with pytest.raises(ValueError, match=message):
        StepCounts(**(fields | changes))


@given(
    st.lists(st.sampled_from(THRESHOLDS), min_size=1, max_size=40),
    st.lists(st.sampled_from(THRESHOLDS), min_size=1, max_size=10),
    st.integers(0, 2),
    st.integers(0, 3),
)
def test_who_goes_back_is_as_it_was_at_that_block_s_end(
    before: list[float], lost: list[float], prompt: int, blocks: int
) -> None:
    there, other = Counted(COUNTS).start(prompt), Counted(COUNTS).start(prompt)
    for course in (there, other):
        while course.block_index < blocks:
            course.step(before[course.steps % len(before)])
    for threshold in lost:
        if not there.finish:
            there.step(threshold)
    there.go_back(blocks)
    assert (there.steps, there.steps_in_block, there.signs()) == (other.steps, 0, other.signs())
    assert run_through(there, [0.7]) == run_through(other, [0.7])
    assert there.correctness() == pytest.approx(other.correctness())
