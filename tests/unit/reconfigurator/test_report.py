"""`python -m services.reconfigurator plan`: what it prints, and what it refuses."""

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from services.reconfigurator.planning import plan
from services.reconfigurator.policy import judge
from services.reconfigurator.problem import Problem
from services.reconfigurator.report import explain, load_problem
from services.settings import ConfigError
from tests.unit.reconfigurator.build import make_class, make_instances, paper_example

EXAMPLE = Path(__file__).parents[3] / "docs" / "planning-example.json"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "services.reconfigurator", "plan", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
    )


@pytest.fixture
def problem() -> Problem:
    hopeless = make_class("hopeless", slo_s=0.01, rate_per_s=0.1)
    return paper_example(0.5, classes=(make_class(rate_per_s=0.4), hopeless), today=make_instances((0,), (1,)))


@pytest.fixture
def path(problem: Problem, tmp_path: Path) -> Path:
    path = tmp_path / "problem.json"
    path.write_bytes(msgspec.json.encode(problem))
    return path


def test_a_page_says_what_why_and_what_else(path: Path) -> None:
    done = command(str(path))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].startswith("Change (today_infeasible)")
    assert lines[1].startswith("Plan:  2 x TP-4; ")
    assert lines[1].endswith("planned without: hopeless")
    assert lines[2] == "Today: 2 x TP-1"
    rows = {line.split("  ")[0]: line.split() for line in lines}
    assert rows["plan"][-3:] == ["0.900", "2.00", "50%"]
    assert rows["all TP-1"][-3:] == ["0.900", "3.60", "22%"]
    assert "breaks a promise" in " ".join(rows["today"])
    assert lines[-1] == "  n0: stop n0-0, n0-1; start TP-4 on 0,1,2,3, TP-4 on 4,5,6,7"


def test_json_is_json_and_nothing_else(path: Path) -> None:
    done = command(str(path), "--json")
    told = json.loads(done.stdout)
    assert told["verdict"]["change"] is True
    assert told["plan"]["layout"] == {"4": 2}
    assert told["plan"]["softened"] == ["hopeless"]
    assert told["stopped"] == ["n0-0", "n0-1"]
    assert [one["name"] for one in told["alternatives"]] == ["today", "all TP-1", "all TP-4"]


def test_what_is_wrong_is_told_with_its_place(path: Path) -> None:
    path.write_text(path.read_text().replace('"rate_per_s":0.4', '"rate_per_s":-1'))
    done = command(str(path))
    assert done.returncode == 2
    assert done.stderr.startswith(f"plan: {path}: ")
    assert "`$.classes[0].rate_per_s`" in done.stderr
    with pytest.raises(ConfigError, match="No such file"):
        load_problem(path.with_name("missing.json"))


def test_the_log_line_says_it_all(problem: Problem) -> None:
    made = plan(problem)
    assert explain(problem, made, judge(problem, made)) == (
        "change to 2 x TP-4 (today 2 x TP-1), today_infeasible: today's layout cannot keep the promises or carry the "
        "load; promises that cannot be kept even alone, planned without: hopeless"
    )


def test_the_example_in_the_docs_is_a_problem() -> None:
    example = load_problem(EXAMPLE)
    assert example.layout_today == {1: 16}
    assert [one.name for one in example.classes] == ["short", "chat", "long"]
