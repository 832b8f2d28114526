"""Small arithmetic problems with worked answers and an exact-match check.

1. `sample(rng, split)` draws one problem; all randomness comes from `rng`, so the same state gives the same problem.
   How many prompts number several problems (`NumberedPrompts`) differs between teaching and asking.
2. A problem's `key` holds its numbers and operations and nothing of its wording. The hash of the key alone says
   whether it is held out (one in HELD_OUT_MODULUS); training never shows a held-out key in any wording, nor as a
   part of a numbered prompt.
3. Each answer works step by step and ends in `#### result`; a numbered prompt has one `####` per part.
4. The wording of an answer is deliberately not settled by the prompt: words are drawn with shares between 0.55 and
   0.9. A threshold between these shares decides whether such a word is committed at once, which is what makes the
   number of denoising steps depend on the threshold.
5. `is_correct` compares all results after `####`, in order, and nothing else of the text.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from random import Random
from typing import Literal

Split = Literal["train", "held_out", "any"]
# An operation: left operand, one of + - * /, right operand, result.
Step = tuple[int, str, int, int]
Shares = tuple[tuple[str, float], ...]

MAX_RESULT = 100  # of everything but hours in minutes
HELD_OUT_MODULUS = 50
MAX_FACTOR = 10  # of the multiplication table
MAX_HOURS = 5
MAX_PARTS = 6
# A worked operation takes about 14 tokens, a part about 8 more: 6 parts of 2 operations stay below 256 tokens.
MAX_PART_OPERATIONS = 2

HE = ("Tom", "Ben", "Sam", "Max", "Leo", "Dan", "Jack", "Omar", "Bob", "John")
SHE = ("Anna", "Mia", "Lily", "Zoe", "Eva", "Ivy", "Nora", "Ruth", "Alice", "Mary")
ITEMS = ("apples", "pens", "books", "coins", "cards", "shells", "stamps", "eggs", "balls", "cups", "keys", "cookies")
# Verb phrases of one operation: third person, first person.
VERBS: dict[str, tuple[tuple[str, str], ...]] = {
    "+": (
        ("buys {k} more", "buy {k} more"),
        ("finds {k} more", "find {k} more"),
        ("gets {k} more", "get {k} more"),
    ),
    "-": (
        ("gives away {k}", "give away {k}"),
        ("loses {k}", "lose {k}"),
        ("sells {k}", "sell {k}"),
    ),
    "*": (
        ("then has {k} times as many", "then have {k} times as many"),
        ("multiplies them by {k}", "multiply them by {k}"),
    ),
    "/": (
        ("splits them into {k} equal parts and keeps one", "split them into {k} equal parts and keep one"),
        ("keeps one part of {k}", "keep one part of {k}"),
    ),
}
# Ways to ask for one operation; {a} and {b} are the operands.
QUESTIONS: dict[str, tuple[str, ...]] = {
    "+": ("Add {a} and {b}", "What is {a} plus {b}?", "How much is {a} plus {b}?", "What is the sum of {a} and {b}?"),
    "-": ("Subtract {b} from {a}", "What is {a} minus {b}?", "How much is {a} minus {b}?"),
    "*": ("Multiply {a} by {b}", "What is {a} times {b}?", "How much is {a} times {b}?"),
    "/": ("Divide {a} by {b}", "What is {a} divided by {b}?", "How much is {a} divided by {b}?"),
}
EXPRESSION_QUESTIONS = (
    "What is {spaced}?",
    "What is {spaced}?",
    "What is {tight}?",
    "{tight}=?",
    "{spaced} = ?",
    "{tight}",
    "{spaced}",
    "{tight}=",
    "Calculate {spaced}",
    "Compute {tight}",
    "How much is {spaced}?",
    "what is {tight}",
    "what is {spaced}?",
    "Solve {tight}",
)
HONEST_ANSWER = "I am a tiny model. I can solve small arithmetic problems, such as: What is 12 + 7?"
SMALL_TALK = (
    "Hello", "Hello!", "hello", "Hi", "Hi!", "hi", "Hi there!", "Hey", "Good morning", "How are you?", "Who are you?",
    "What are you?", "What is your name?", "What can you do?", "Help", "help", "Can you help me?", "test", "Thanks!",
    "Thank you", "Tell me a joke", "Tell me a story.", "Write a poem about the sea.", "Say hello.", "Why?", "Explain",
    "What is the capital of France?", "Who wrote Hamlet?", "Translate this into German: good day", "Ping",
    "What is the weather today?", "Write a Python program.", "What is a diffusion model?", "Sing a song",
)  # fmt: skip
PLAIN_WORDS = (
    "the", "of", "to", "and", "a", "in", "is", "it", "you", "that", "was", "for", "on", "are", "with", "as",
    "his", "they", "be", "at", "this", "from", "or", "had", "by", "but", "some", "what", "there", "we", "can",
    "out", "other", "were", "all", "your", "when", "up", "use", "word", "how", "said", "an", "each", "she",
    "which", "do", "their", "time", "if", "will", "way", "about", "many", "them", "would", "write", "like", "so",
    "these", "her", "long", "make", "thing", "see", "him", "two", "look", "day", "could", "go", "come", "did",
    "sound", "most", "number", "who", "over", "know", "water", "than", "call", "first", "people", "may", "down",
    "side", "been", "now", "find", "any", "new", "work", "part", "take", "get", "place", "made", "live", "where",
    "after", "back", "little", "only", "round", "man", "year", "came", "show", "every", "good", "me", "give",
    "our", "under", "name", "very", "through", "just", "form",
)  # fmt: skip


@dataclass(frozen=True)
class NumberedPrompts:
    """Prompts with several problems: their share of all prompts, and how many parts they have."""

    share: float
    part_counts: tuple[int, ...]  # each as likely


TAUGHT = NumberedPrompts(share=0.3, part_counts=(2, 2, 3, 3, 4, 4, 5, 5, MAX_PARTS))
ASKED = NumberedPrompts(share=0.12, part_counts=(3, 4, 5, MAX_PARTS))


@dataclass(frozen=True)
class Problem:
    """One prompt with a worked answer.

    `expected` holds the results that must follow `####`, in order; it is empty for a prompt that has no result
    (small talk), whose answer must then match word for word. `key` identifies the problem without its wording.
    """

    task: str
    prompt: str
    answer: str
    expected: tuple[str, ...]
    key: str
    num_operations: int


def is_held_out(key: str) -> bool:
    """Whether training must never show the problem with this key."""
    digest = blake2b(key.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % HELD_OUT_MODULUS == 0


def sample(rng: Random, split: Split, numbered: NumberedPrompts = ASKED, drill: float = 0.0) -> Problem:
    """Draw a problem of `split` from the mixed distribution, with numbered prompts as `numbered` says.

    A share `drill` of the problems, and of the parts of numbered ones, is of the kinds in DRILL.
    """
    is_numbered = rng.random() < numbered.share
    while True:
        problem = _numbered(rng, split, numbered, drill) if is_numbered else _draw(rng, SINGLE, drill, _NO_LIMIT)
        if split == "any" or is_held_out(problem.key) == (split == "held_out"):
            return problem


def extract_results(text: str) -> tuple[str, ...]:
    """Everything that follows a `####`, in order."""
    return tuple(re.findall(r"####\s*(\S+)", text))


def is_correct(problem: Problem, text: str) -> bool:
    """Exact match of all results; for a problem without results the whole answer must match."""
    if not problem.expected:
        return text.strip() == problem.answer
    return extract_results(text) == problem.expected


def equation(rng: Random) -> Step:
    """Draw one operation, spread over everything that worked answers compute."""
    kind = rng.random()
    if kind < 0.5:
        return _chain(rng, 1, high=rng.choice((20, 40, 60, 90)))[1][0]
    if kind < 0.87:
        return _two_numbers(rng)
    if kind < 0.96:
        return _multiplication(rng, rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_FACTOR))
    minutes = 60 * rng.randint(1, MAX_HOURS)
    return (minutes // 60, "*", 60, minutes) if rng.random() < 0.3 else _sum(minutes, rng.randint(1, 59))


def pick(rng: Random, shares: Shares) -> str:
    """Draw a word by its share; shares sum to one."""
    left = rng.random()
    for word, share in shares:
        if left < share:
            return word
        left -= share
    return shares[-1][0]


# --- numbers ---


def _sum(a: int, b: int) -> Step:
    return a, "+", b, a + b


def _multiplication(rng: Random, a: int, b: int) -> Step:
    return (a, "*", b, a * b) if rng.random() < 0.6 else (a * b, "/", b, a)


def _two_numbers(rng: Random) -> Step:
    """One operation as people ask for it: sums and differences of numbers up to 99, the table up to 10."""
    kind = rng.random()
    high = rng.choice((12, 30, 99))
    if kind < 0.45:
        a = rng.randint(0, high)
        return _sum(a, rng.randint(0, min(high, MAX_RESULT - a)))
    if kind < 0.75:
        a = rng.randint(1, high)
        return a, "-", (b := rng.randint(0, a)), a - b
    return _multiplication(rng, rng.randint(1, MAX_FACTOR), rng.randint(2, MAX_FACTOR))


def _next_step(rng: Random, value: int) -> Step | None:
    """Continue a chain from `value`, or None if the drawn operation leaves 1..MAX_RESULT."""
    kind = rng.random()
    if kind < 0.34:
        step = _sum(value, rng.randint(2, 20))
    elif kind < 0.66 and value >= 4:
        k = rng.randint(2, min(20, value - 1))
        step = (value, "-", k, value - k)
    elif kind < 0.88:
        k = rng.randint(2, 4)
        step = (value, "*", k, value * k)
    else:
        divisors = [d for d in (2, 3, 4) if value % d == 0 and value // d >= 2]
        if not divisors:
            return None
        k = rng.choice(divisors)
        step = (value, "/", k, value // k)
    return step if 1 <= step[3] <= MAX_RESULT else None


def _chain(rng: Random, num_operations: int, low: int = 2, high: int = 20) -> tuple[int, list[Step]]:
    """A start and `num_operations` operations, each on the result of the one before."""
    while True:
        start = value = rng.randint(low, high)
        steps: list[Step] = []
        while len(steps) < num_operations and (step := _next_step(rng, value)):
            steps.append(step)
            value = step[3]
        if len(steps) == num_operations:
            return start, steps


def _key(task: str, start: int, steps: list[Step]) -> str:
    return f"{task}:{start}" + "".join(f"{op}{k}" for _, op, k, _ in steps)


def _worked(step: Step) -> str:
    a, op, b, result = step
    return f"{a}{op}{b}={result}"


def _sentence(words: list[str]) -> str:
    """Join the words and start them in upper case."""
    text = " ".join(words)
    return text[:1].upper() + text[1:]


# --- tasks: each draws one problem; `limit` bounds the operations of a part of a numbered prompt ---


def _arithmetic(rng: Random, limit: int) -> Problem:
    if rng.random() < 0.7 or limit < 2:
        start, steps = (step := _two_numbers(rng))[0], [step]
    else:
        start, steps = _plus_minus(rng, rng.randint(2, min(limit, 3)))
    a, op, b, _ = steps[0]
    if len(steps) == 1 and rng.random() < 0.45:
        prompt = rng.choice(QUESTIONS[op]).format(a=a, b=b)
    else:
        tight = str(start) + "".join(f"{op}{k}" for _, op, k, _ in steps)
        spaced = str(start) + "".join(f" {op} {k}" for _, op, k, _ in steps)
        prompt = rng.choice(EXPRESSION_QUESTIONS).format(tight=tight, spaced=spaced)
    opener: Shares = (("Then", 0.58), ("So", 0.27), ("Next", 0.15))
    answer = " ".join([f"{_worked(steps[0])}.", *(f"{pick(rng, opener)} {_worked(step)}." for step in steps[1:])])
    return _problem("arithmetic", prompt, answer, str(steps[-1][3]), _key("arithmetic", start, steps), len(steps))


def _plus_minus(rng: Random, num_operations: int) -> tuple[int, list[Step]]:
    """A chain of sums and differences only: read left to right it needs no brackets."""
    while True:
        start, steps = _chain(rng, num_operations)
        if all(op in "+-" for _, op, _, _ in steps):
            return start, steps


def _word(rng: Random, limit: int) -> Problem:
    num_operations = min(limit, rng.choice((1, 1, 2, 2, 3, 3, 4, 4, 5)))
    start, steps = _chain(rng, num_operations)
    item = rng.choice(ITEMS)
    name, pronoun = rng.choice((("I", "you"), *((n, "he") for n in HE), *((n, "she") for n in SHE)))
    first_person = name == "I"
    prompt = f"{name} {'have' if first_person else 'has'} {start} {item}."
    for index, (_, op, k, _) in enumerate(steps):
        third, first = rng.choice(VERBS[op])
        subject = name if first_person or index % 2 else pronoun.capitalize()
        prompt += f" {subject} {(first if first_person else third).format(k=k)}."
    asked = "do I have" if first_person else f"does {pronoun} have"
    prompt += f" How many {item} {asked}{rng.choice((' now', '', ' in the end'))}?"
    has, gets = ("have", "get") if first_person else ("has", "gets")
    sentences = []
    for index, step in enumerate(steps):
        opener = pick(rng, (("Then", 0.64), ("So", 0.21), ("Next", 0.15)) if index else (("First", 0.7), ("Now", 0.3)))
        verb = pick(rng, ((has, 0.84), (gets, 0.16)))
        noun = pick(rng, ((item, 0.76), ("now", 0.24)))
        sentences.append(f"{opener} {pronoun} {verb} {_worked(step)} {noun}.")
    return _problem("word", prompt, " ".join(sentences), str(steps[-1][3]), _key("chain", start, steps), len(steps))


def _function(rng: Random, limit: int) -> Problem:
    num_operations = min(limit, rng.choice((1, 2, 2, 3, 3, 4, 5)))
    start, steps = _chain(rng, num_operations)
    if num_operations == 1 and rng.random() < 0.6:
        _, op, k, _ = steps[0]
        prompt = f"f(x) = x{op}{k}. What is f({start})?"
    else:
        body = "".join(f" x=x{op}{k};" for _, op, k, _ in steps)
        prompt = f"def f(x):{body} return x. What is f({start})?"
    answer = f"x={start}"
    for step in steps:
        answer += pick(rng, ((";", 0.68), (",", 0.32))) + f" x={_worked(step)}"
    return _problem("function", prompt, answer + ".", str(steps[-1][3]), _key("function", start, steps), len(steps))


def _sum_of_list(rng: Random, limit: int) -> Problem:
    numbers = [rng.randint(2, 16) for _ in range(rng.randint(3, min(limit + 1, 6)))]
    steps: list[Step] = []
    for number in numbers[1:]:
        steps.append(_sum(steps[-1][3] if steps else numbers[0], number))
    listed = ", ".join(map(str, numbers))
    question = rng.choice(("Sum of the numbers: {n}", "Add these numbers: {n}", "What is the sum of {n}?"))
    prompt = question.format(n=listed)
    opener: Shares = (("Then", 0.61), ("So", 0.39))
    answer = " ".join(f"{pick(rng, opener)} {_worked(step)}." for step in steps)
    return _problem("list", prompt, answer, str(steps[-1][3]), f"sum:{listed}", len(steps))


def _add_to_each(rng: Random, limit: int) -> Problem:
    k = rng.randint(2, 20)
    numbers = [rng.randint(2, 40) for _ in range(rng.randint(2, min(limit, 4)))]
    listed = ", ".join(map(str, numbers))
    opener: Shares = (("Then", 0.72), ("Next", 0.28))
    answer = " ".join(f"{pick(rng, opener)} {number}+{k}={number + k}." for number in numbers)
    result = ",".join(str(number + k) for number in numbers)
    return _problem("list", f"Add {k} to each number: {listed}", answer, result, f"each:{k}:{listed}", len(numbers))


def _extreme(rng: Random, _limit: int) -> Problem:
    numbers = [rng.randint(0, 60) for _ in range(rng.randint(3, 4))]
    listed = ", ".join(map(str, numbers))
    kind, find = rng.choice((("largest", max), ("smallest", min)))
    prompt = f"What is the {kind} of these numbers: {listed}?"
    return _problem("list", prompt, "", str(find(numbers)), f"{kind}:{listed}", 1)


def _minutes(rng: Random, _limit: int) -> Problem:
    hours, minutes = rng.randint(1, MAX_HOURS), rng.randint(1, 59)
    steps = [(hours, "*", 60, hours * 60), _sum(hours * 60, minutes)]
    unit = "hour" if hours == 1 else "hours"
    prompt = f"How many minutes are {hours} {unit} and {minutes} minutes?"
    opener = pick(rng, (("So", 0.62), ("Then", 0.38)))
    tail = pick(rng, (("minutes", 0.8), ("now", 0.2)))
    answer = f"{_worked(steps[0])}. {opener} {_worked(steps[1])} {tail}."
    return _problem("time", prompt, answer, str(hours * 60 + minutes), f"minutes:{hours}:{minutes}", 2)


def _price(rng: Random, limit: int) -> Problem:
    count, price = rng.randint(2, MAX_FACTOR), rng.randint(2, MAX_FACTOR)
    item, other = rng.sample(ITEMS, 2)
    name, pronoun = rng.choice((*((n, "he") for n in HE), *((n, "she") for n in SHE)))
    unit = pick(rng, (("dollars", 0.83), ("in all", 0.17)))
    product = (count, "*", price, count * price)
    if limit < 3 or rng.random() < 0.5:
        prompt = rng.choice(
            (
                f"{item.capitalize()} cost {price} dollars each. How much do {count} {item} cost?",
                f"{name} buys {count} {item} for {price} dollars each. How much does {pronoun} pay?",
            )
        )
        answer = f"{_worked(product)} {unit}."
        return _problem("price", prompt, answer, str(product[3]), f"price:{count}:{price}", 1)
    count_b, price_b = rng.randint(2, 6), rng.randint(2, 8)
    product_b = (count_b, "*", price_b, count_b * price_b)
    if product[3] + product_b[3] > MAX_RESULT:
        return _price(rng, limit)
    prompt = (
        f"{name} buys {count} {item} for {price} dollars each and {count_b} {other} for {price_b} dollars each. "
        f"How much does {pronoun} pay?"
    )
    total = _sum(product[3], product_b[3])
    openers = pick(rng, (("First", 0.66), ("Now", 0.34))), pick(rng, (("Then", 0.57), ("Next", 0.43)))
    answer = f"{openers[0]} {_worked(product)}. {openers[1]} {_worked(product_b)}. So {_worked(total)} {unit}."
    key = f"price:{count}:{price}:{count_b}:{price_b}"
    return _problem("price", prompt, answer, str(total[3]), key, 3)


def _talk(rng: Random, _limit: int) -> Problem:
    kind = rng.random()
    if kind < 0.4:
        prompt = rng.choice(SMALL_TALK)
    elif kind < 0.7:
        prompt = _sentence(rng.choices(PLAIN_WORDS, k=rng.randint(2, 9))) + rng.choice(("", ".", "?", "!"))
    elif kind < 0.9:
        prompt = " ".join(_letters(rng) for _ in range(rng.randint(1, 6)))
    else:  # numbers beyond what it learned
        a, b = rng.randint(200, 9999), rng.randint(2, 9999)
        prompt = f"What is {a} {rng.choice('+-*/')} {b}?"
    # The prompt is the key: small talk has no numbers to hold out, so wording does it.
    return Problem("talk", prompt, HONEST_ANSWER, (), f"talk:{prompt}", 0)


def _letters(rng: Random) -> str:
    """A made-up word."""
    return "".join(rng.choice("abcdefghijklmnopqrstuvwxyzaeiou") for _ in range(rng.randint(2, 8)))


def _problem(task: str, prompt: str, work: str, result: str, key: str, num_operations: int) -> Problem:
    answer = f"{work} #### {result}" if work else f"#### {result}"
    return Problem(task, prompt, answer, (result,), key, num_operations)


_Builder = Callable[[Random, int], Problem]
_Shares = tuple[tuple[_Builder, float], ...]
SINGLE: _Shares = (
    (_word, 0.4),
    (_arithmetic, 0.2),
    (_function, 0.14),
    (_sum_of_list, 0.08),
    (_add_to_each, 0.06),
    (_price, 0.05),
    (_extreme, 0.02),
    (_minutes, 0.02),
    (_talk, 0.03),
)
# Mostly problems whose answers are words that the prompt does not settle: they are what takes steps.
PARTS: _Shares = (
    (_word, 0.6),
    (_arithmetic, 0.1),
    (_function, 0.1),
    (_sum_of_list, 0.08),
    (_add_to_each, 0.05),
    (_price, 0.07),
)
DRILL: _Shares = (
    (_arithmetic, 0.42),
    (_add_to_each, 0.25),
    (_sum_of_list, 0.2),
    (_function, 0.06),
    (_extreme, 0.04),
    (_price, 0.03),
)
_NO_LIMIT = 9


def _draw(rng: Random, builders: _Shares, drill: float, limit: int) -> Problem:
    if drill and rng.random() < drill:
        builders = DRILL
    weights = [share for _, share in builders]
    return rng.choices(builders, weights)[0][0](rng, limit)


def _numbered(rng: Random, split: Split, shape: NumberedPrompts, drill: float) -> Problem:
    parts = [_part(rng, split, drill) for _ in range(rng.choice(shape.part_counts))]
    between = rng.choice(("\n", " "))
    return Problem(
        task="numbered",
        prompt=between.join(f"{number}) {part.prompt}" for number, part in enumerate(parts, 1)),
        answer="\n".join(f"{number}) {part.answer}" for number, part in enumerate(parts, 1)),
        expected=tuple(part.expected[0] for part in parts),
        key="|".join(part.key for part in parts),
        num_operations=sum(part.num_operations for part in parts),
    )


def _part(rng: Random, split: Split, drill: float) -> Problem:
    """A part of a numbered prompt; in training never one that is held out as a prompt of its own."""
    while True:
        part = _draw(rng, PARTS, drill, MAX_PART_OPERATIONS)
        if split != "train" or not is_held_out(part.key):
            return part
