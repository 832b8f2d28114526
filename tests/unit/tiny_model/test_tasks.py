import re
from collections import Counter
from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.tiny_model import tasks
from tools.tiny_model.tasks import (
    ASKED,
    HONEST_ANSWER,
    MAX_RESULT,
    TAUGHT,
    NumberedPrompts,
    Problem,
    extract_results,
    is_correct,
    is_held_out,
    sample,
)

EQUATION = re.compile(r"(\d+)([-+*/])(\d+)=(\d+)")
seeds = st.integers(min_value=0, max_value=2**32)


def problems(count: int, seed: int = 1, split: tasks.Split = "any") -> list[Problem]:
    rng = Random(seed)
    return [sample(rng, split, TAUGHT) for _ in range(count)]


def compute(a: int, op: str, b: int) -> int:
    if op == "/":
        assert a % b == 0
        return a // b
    return {"+": a + b, "-": a - b, "*": a * b}[op]


@given(seeds)
def test_every_equation_of_an_answer_is_true(seed: int) -> None:
    problem = sample(Random(seed), "any")
    for a, op, b, result in EQUATION.findall(problem.answer):
        assert compute(int(a), op, int(b)) == int(result)


@given(seeds)
def test_every_equation_follows_from_what_is_known(seed: int) -> None:
    """Operands are numbers of the prompt or earlier results: nothing comes from nowhere."""
    problem = sample(Random(seed), "any", replace(ASKED, share=0.0))
    known = {int(number) for number in re.findall(r"\d+", problem.prompt)} | {60}
    for a, _, b, result in EQUATION.findall(problem.answer):
        assert {int(a), int(b)} <= known
        known.add(int(result))


@given(seeds)
def test_an_answer_is_correct_and_one_with_another_result_is_not(seed: int) -> None:
    problem = sample(Random(seed), "any")
    assert is_correct(problem, problem.answer)
    assert not is_correct(problem, problem.answer + " #### 1")
    assert not is_correct(problem, problem.answer.replace("####", "")) or not problem.expected
    if problem.expected:
        assert not is_correct(replace(problem, expected=(*problem.expected[:-1], "x")), problem.answer)
        assert not is_correct(problem, "")


def test_the_wording_of_an_answer_does_not_count() -> None:
    problem = Problem("word", "?", "Then he has 12+7=19 apples. #### 19", ("19",), "k", 1)
    assert is_correct(problem, "So he gets 12+7=19 now.\n####  19 ")
    assert not is_correct(problem, "Then he has 12+7=19 apples. #### 190")
    assert not is_correct(problem, "19")


def test_results_are_found_in_order() -> None:
    assert extract_results("1) 1+1=2. #### 2\n2) #### 3,4\n3) #### 4:05") == ("2", "3,4", "4:05")


def test_small_talk_gets_the_honest_answer() -> None:
    talk = [problem for problem in problems(3_000) if problem.task == "talk"]
    assert talk
    assert {problem.answer for problem in talk} == {HONEST_ANSWER}
    assert is_correct(talk[0], f" {HONEST_ANSWER}\n")
    assert not is_correct(talk[0], "#### 3")


@given(seeds)
def test_the_same_random_state_gives_the_same_problem(seed: int) -> None:
    assert sample(Random(seed), "held_out") == sample(Random(seed), "held_out")


@pytest.mark.parametrize(("split", "expected"), [("train", False), ("held_out", True)])
def test_a_split_holds_only_its_own_keys(split: tasks.Split, expected: bool) -> None:
    assert {is_held_out(problem.key) for problem in problems(1_000, split=split)} == {expected}


def test_training_never_shows_a_held_out_problem_as_a_part() -> None:
    numbered = [problem for problem in problems(2_000, split="train") if problem.task == "numbered"]
    assert len(numbered) > 300
    assert not any(is_held_out(part) for problem in numbered for part in problem.key.split("|"))


def test_one_key_in_fifty_is_held_out() -> None:
    keys = {problem.key for problem in problems(20_000) if problem.task != "talk"}
    assert 1 / 70 < sum(map(is_held_out, keys)) / len(keys) < 1 / 36


def test_a_key_says_nothing_about_the_wording() -> None:
    """The same problem asked in another way has the same key, or holding it out would not hide it."""
    prompts: dict[str, set[str]] = {}
    for problem in problems(20_000):
        if problem.task == "arithmetic":
            prompts.setdefault(problem.key, set()).add(problem.prompt)
    assert sum(len(ways) > 2 for ways in prompts.values()) > 100
    for key, ways in prompts.items():
        numbers = re.findall(r"\d+", key)
        assert {tuple(sorted(re.findall(r"\d+", way))) for way in ways} == {tuple(sorted(numbers))}


def test_the_wording_of_answers_is_not_settled_by_the_prompt() -> None:
    openers = Counter(
        word
        for problem in problems(3_000)
        if problem.task == "word"
        for word in problem.answer.split()
        if word.isalpha()
    )
    first, second, third = openers["Then"], openers["So"], openers["Next"]
    assert 0.5 < first / (first + second + third) < 0.8
    assert third > 100


def test_results_stay_in_the_range_that_is_taught() -> None:
    for problem in problems(5_000):
        if problem.task in {"word", "arithmetic", "function", "price"}:
            assert 0 <= int(problem.expected[0]) <= MAX_RESULT


def test_numbered_prompts_have_two_to_six_parts_with_a_result_each() -> None:
    numbered = [problem for problem in problems(3_000) if problem.task == "numbered"]
    assert {len(problem.expected) for problem in numbered} == {2, 3, 4, 5, 6}
    for problem in numbered:
        count = len(problem.expected)
        assert [int(n) for n in re.findall(r"^(\d)\) ", problem.answer, re.MULTILINE)] == list(range(1, count + 1))
        assert problem.num_operations <= tasks.MAX_PART_OPERATIONS * count


def test_we_ask_for_more_parts_than_we_teach() -> None:
    def mean_parts(numbered: NumberedPrompts) -> float:
        drawn = [sample(Random(seed), "any", replace(numbered, share=1.0)) for seed in range(300)]
        return sum(len(problem.expected) for problem in drawn) / len(drawn)

    assert mean_parts(TAUGHT) < 4 < mean_parts(ASKED)


def test_a_drill_is_of_the_kinds_that_are_learned_last() -> None:
    def share(drill: float) -> float:
        drawn = [sample(Random(seed), "train", replace(TAUGHT, share=0.0), drill) for seed in range(600)]
        return sum(problem.task in {"arithmetic", "list"} for problem in drawn) / len(drawn)

    assert share(0.0) == pytest.approx(0.36, abs=0.06)
    assert share(1.0) == pytest.approx(0.91, abs=0.05)


def test_equations_for_training_are_true() -> None:
    rng = Random(3)
    for _ in range(3_000):
        a, op, b, result = tasks.equation(rng)
        assert compute(a, op, b) == result
