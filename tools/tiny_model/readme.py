"""Fill the measured parts of the profile's README: nothing in it that was measured is typed by hand.

A part lies between `<!-- name -->` and `<!-- /name -->`. `evaluation` comes from evaluation.json, `training` from
loss.csv (the training's log.csv), `examples` from the model itself; a part whose file is missing says so.
"""

import csv
import json
import re
from pathlib import Path

from services.profile import load_profile
from tools.tiny_model.evaluate import Decoder, EvaluationJob, Setting, markdown
from tools.tiny_model.plot import plot_loss
from tools.tiny_model.tasks import Problem

EXAMPLES = (
    "What is 12 + 7?",
    "Tom has 12 apples. He buys 7 more. How many apples does he have?",
    "Mia has 9 books. She gets 6 more. Mia multiplies them by 3. She loses 11. How many books does she have now?",
    "def f(x): x=x+4; x=x*3; return x. What is f(5)?",
    "Sum of the numbers: 3, 8, 12",
    "Add 5 to each number: 12, 30, 7",
    "What is the largest of these numbers: 31, 4, 17?",
    "How many minutes are 2 hours and 35 minutes?",
    "Ben buys 3 pens for 4 dollars each and 2 cups for 5 dollars each. How much does he pay?",
    "1) What is 12 + 7? 2) Tom has 15 pens. He loses 4. How many pens does he have? 3) Sum of the numbers: 4, 9, 6",
    "1) Eva has 8 pens. She buys 5 more. How many pens does she have? 2) Ben has 20 eggs. He sells 6. He then has 3 "
    "times as many. How many eggs does he have now? 3) Add 4 to each number: 15, 23 4) Mia has 18 cups. She keeps one "
    "part of 3. How many cups does she have in the end?",
    "What is the capital of France?",
)
NOT_MEASURED = "Not measured yet."


def fill_readme(profile: Path) -> None:
    """Rewrite the measured parts of `profile`/README.md and draw loss.svg."""
    readme = profile / "README.md"
    text = readme.read_text()
    for name, content in (
        ("evaluation", _evaluation(profile)),
        ("training", _training(profile)),
        ("examples", _examples(profile)),
    ):
        text = replace_part(text, name, content)
    readme.write_text(text)


def replace_part(text: str, name: str, content: str) -> str:
    """`text` with `content` between the markers of `name`. Raises ValueError if they are missing."""
    pattern = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
    if not pattern.search(text):
        raise ValueError(f"the README has no part {name!r}")
    return pattern.sub(lambda found: f"{found[1]}{content.strip()}\n{found[2]}", text)


def _evaluation(profile: Path) -> str:
    path = profile / "evaluation.json"
    return markdown(json.loads(path.read_text())) if path.exists() else NOT_MEASURED


def _training(profile: Path) -> str:
    log = profile / "loss.csv"
    if not log.exists():
        return NOT_MEASURED
    plot_loss(log, profile / "loss.svg")
    with log.open() as file:
        last = list(csv.DictReader(file))[-1]
    cpu_min = float(last["cpu_s"]) / 60
    return (
        "![Loss of answers and of equations over the steps](loss.svg)\n\n"
        f"{int(last['step']):,} steps, {int(last['tokens']) / 1e6:.0f} million tokens (padding included), "
        f"{cpu_min:.0f} minutes of CPU time in two processes of one thread. This run's steps took "
        f"{float(last['wall_s']) / 60:.0f} minutes, on machines busy with other work."
    )


def _examples(profile: Path) -> str:
    if not (profile / "model" / "model.safetensors").exists():
        return NOT_MEASURED
    setting = Setting("dual", 0.9)
    problems = [Problem("example", prompt, "", (), prompt, 0) for prompt in EXAMPLES]
    blocks_ahead = load_profile(profile).decoding.blocks_ahead
    outcomes = Decoder(EvaluationJob(profile / "model", (setting,), blocks_ahead=blocks_ahead)).outcomes(
        problems, setting
    )
    lines = ["| prompt | answer at threshold 0.9, as it gave it | steps |", "|---|---|---|"]
    lines += [
        f"| {_cell(problem.prompt)} | {_cell(outcome.text)} | {outcome.num_steps} |"
        for problem, outcome in zip(problems, outcomes, strict=True)
    ]
    return "\n".join(lines)


def _cell(text: str) -> str:
    """Text as a table's cell shows it literally."""
    return re.sub(r"([*|#<_])", r"\\\1", text).replace("\n", "<br>")
