from collections import Counter
from itertools import islice, pairwise
from pathlib import Path
from random import Random

import pytest

from services.settings import ConfigError
from tools.loadgen.arrivals import poisson
from tools.loadgen.asks import Ask, built_in, matches, read_asks
from tools.loadgen.schedule import Mix, parse_mix, sends
from tools.tiny_model.tasks import is_held_out, sample

ASKS = [Ask("/v1/completions", {"prompt": str(number)}, None) for number in range(100)]
GSM8K = '{"question": "How many?", "answer": "9 * 2 = <<9*2=18>>18 and so on.\\n#### 1,018"}'


def written(folder: Path, *lines: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines))
    return path


def test_all_that_is_due_comes_in_order_and_ends_in_time() -> None:
    due = list(sends(poisson(50), seed=4, until_s=20, asks=ASKS))
    assert [send.number for send in due] == list(range(len(due)))
    assert len(due) == pytest.approx(1000, abs=100)
    assert all(0 < earlier.due_s <= later.due_s < 20 for earlier, later in pairwise(due))


def test_another_slo_changes_neither_arrivals_nor_prompts_and_another_seed_both() -> None:
    def asked(**more: object) -> list[tuple[float, object]]:
        return [(s.due_s, s.ask.content) for s in sends(poisson(5), until_s=10, asks=ASKS, **({"seed": 1} | more))]  # type: ignore[arg-type]

    assert asked() == asked(slo_ms=Mix((100.0, 900.0), (1, 1)), tiers=Mix(("flex", "default"), (1, 3)))
    assert [content for _, content in asked()][:20] != [content for _, content in asked(seed=2)][:20]
    assert not {due_s for due_s, _ in asked()} & {due_s for due_s, _ in asked(seed=2)}


def test_a_mix_is_drawn_by_its_shares() -> None:
    slos, tiers = parse_mix("300:0.7,2000:0.3", float), parse_mix("flex:1,default:3", str)
    due = list(sends(poisson(100), seed=1, until_s=40, asks=ASKS, slo_ms=slos, tiers=tiers))
    counts = Counter((send.slo_ms, send.tier) for send in due)
    shares = {key: count / len(due) for key, count in counts.items()}
    expected = {(300, "flex"): 0.175, (300, "default"): 0.525, (2000, "flex"): 0.075, (2000, "default"): 0.225}
    assert shares == pytest.approx(expected, abs=0.03)


@pytest.mark.parametrize("text", ["", "fast", "1:x", "1:0", "1:-1,2:3", "1:inf"])
def test_a_mix_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse_mix(text, float)


def test_built_in_prompts_are_held_out_and_know_their_answer() -> None:
    rng = Random("loadgen/problems/9")
    asks = built_in(20, seed=9)
    for ask in asks:
        problem = sample(rng, "held_out")
        assert is_held_out(problem.key)
        assert ask.content == {"messages": [{"role": "user", "content": problem.prompt}]}
        assert ask.is_correct is not None
        assert ask.is_correct(problem.answer)
        assert not ask.is_correct("#### no")
    assert [ask.content for ask in built_in(3, seed=9)] == [ask.content for ask in asks[:3]]
    assert built_in(3, seed=8)[0].content != asks[0].content


def test_prompts_of_a_file_go_where_they_belong(tmp_path: Path) -> None:
    message = '{"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hi"}]}'
    path = written(tmp_path, '{"prompt": "1+1=", "expected": "2"}', "", message, GSM8K)
    plain, chat, question = read_asks(path)
    assert plain[:2] == ("/v1/completions", {"prompt": "1+1="})
    assert plain.is_correct is not None
    assert (plain.is_correct(" 2\n"), plain.is_correct("3")) == (True, False)
    assert (chat.path, len(chat.content["messages"]), chat.is_correct) == ("/v1/chat/completions", 2, None)
    assert question.content == {"messages": [{"role": "user", "content": "How many?"}]}
    assert question.is_correct is not None
    assert (question.is_correct("It is 1018. #### 1018"), question.is_correct("#### 18")) == (True, False)


def test_prompts_are_drawn_from_all_of_them() -> None:
    due = islice(sends(poisson(10), seed=1, until_s=60, asks=ASKS[:5]), 200)
    assert {send.ask.content["prompt"] for send in due} == set("01234")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("{", "line 2"),
        ("[]", "line 2: Expected `object`"),
        ("{}", 'line 2: it needs one of "prompt"'),
        ('{"prompt": "a", "question": "b"}', 'line 2: it needs one of "prompt"'),
        ('{"prompt": 7}', r"line 2: Expected `str \| null`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        read_asks(written(tmp_path, '{"prompt": "fine"}', line))


def test_a_file_without_prompts_or_none_at_all_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompts"):
        read_asks(written(tmp_path, ""))
    with pytest.raises(ConfigError, match="nowhere"):
        read_asks(tmp_path / "nowhere")


@pytest.mark.parametrize(
    ("expected", "text", "right"),
    [
        ("18", "She makes 18 dollars. #### 18", True),
        ("18", "#### 17 #### 18 ", True),
        ("18", "18", True),
        ("18", "She makes 18", False),
        ("#### 1,018", "#### 1018", True),
        ("a, b", "a, b", True),
        ("18", "#### 180", False),
    ],
)
def test_what_matches(expected: str, text: str, right: bool) -> None:
    assert matches(expected, text) is right


def test_a_client_may_ask_for_as_many_tokens_as_its_problems_need() -> None:
    asks = built_in(60, 3, tokens_each=64)
    assert [ask.content["messages"] for ask in asks] == [ask.content["messages"] for ask in built_in(60, 3)]
    for ask in asks:
        prompt = ask.content["messages"][0]["content"]
        parts = sum(f"{number}) " in prompt for number in range(1, 7)) or 1
        assert ask.content["max_tokens"] == min(256, 64 * parts)
    assert {64, 256} <= {ask.content["max_tokens"] for ask in asks}
    assert all("max_tokens" not in ask.content for ask in built_in(5, 3))
