"""`python -m tools.loadgen` against the running stack."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

pytestmark = pytest.mark.e2e


def test_a_few_seconds_of_load(base_url: str, client_environment: dict[str, str], tmp_path: Path) -> None:
    """Two requests a second for 4 s; this machine may be too busy for its own bound on lag, which is so left open."""
    out = tmp_path / "load.json"
    words = ["--url", base_url, "--rate", "2", "--duration", "4", "--warmup", "1", "--seed", "3", "--problems", "20"]
    words += ["--slo-ms", "60000:1,0.001:1", "--tier", "priority", "--max-tokens", "32", "--stream"]
    words += ["--api-key", client_environment["OPENAI_API_KEY"]]
    command = [sys.executable, "-m", "tools.loadgen", *words, "--max-lag-ms", "5000", "--out", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=client_environment, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""  # no progress line where there is no terminal
    document = json.loads(out.read_bytes())
    report = document["report"]
    assert document["counts"]
    assert document["options"]["seed"] == 3
    assert report["due"] == report["finished"] >= 3
    assert report["errors"] == {}
    met = {kind["slo_ms"]: kind["met"] for kind in report["classes"]}
    due = {kind["slo_ms"]: kind["due"] for kind in report["classes"]}
    assert met == {0.001: 0, 60000: due[60000]}
    assert report["slo_attainment"] == due[60000] / report["due"]
    assert 0 < report["first_text_ms"]["p50"] <= report["latency_ms"]["p50"]
    assert report["tokens_per_s"] > 0
    assert report["mean_steps"] >= 1
    assert 0.5 <= report["mean_threshold"] <= 0.9 + 1e-9  # a mean of floats
    assert re.search(r"\| requests due +\| \d+ \(", done.stdout)
    assert "this run counts" in done.stdout
