"""`python -m tools.bench.engine` runs and prints its tables, on a model small enough to be quick."""

import subprocess
import sys

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.integration

SIZES = ("--layers", "2", "--width", "128", "--vocabulary", "512", "--rank-widths", "128")
PARTS = ("--parts", "decode", "ranks", "--repeats", "1", "--formats", "float32", "--threads", "1")


def test_tables_are_printed() -> None:
    command = [sys.executable, "-m", "tools.bench.engine", *SIZES, *PARTS, "--caches", "prefix", "dual"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in done.stdout.splitlines() if "|" in line]
    speeds = [row for row in rows if row[-1] == "1"]  # repeats
    assert [row[:4] for row in speeds] == [
        ["prefix", "float32", "1", "1"],
        ["prefix", "float32", "1", "8"],
        ["dual", "float32", "1", "1"],
        ["dual", "float32", "1", "8"],
    ]
    assert {row[8] for row in speeds} == {"100%"}
    divided = {tuple(row[:5]) for row in rows if len(row) == 9}
    assert {("dual", "float32", "1", "1", "recompute"), ("dual", "float32", "1", "8", "cache")} <= divided
    ranks = [row[:4] for row in rows if len(row) == 7 and row[0] == "128"]
    assert ranks == [["128", "float32", "recompute", "384"], ["128", "float32", "cache", "32"]]
