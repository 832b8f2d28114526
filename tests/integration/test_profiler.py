"""`profile` and `plot` as a user runs them, over one rank and over two."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from services.costs import load_latency, read_latency_file, step_load
from tests.unit.denoiser import random_model

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[2]
PROFILE = """
model = "tiny"
[decoding]
block_size = 8
max_tokens = 32
[limits]
max_context_tokens = 64
max_output_tokens = 32
[engine]
dtype = "float32"
device = "cpu"
kv_tokens = 256
max_requests = 2
max_pass_tokens = 128
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model.write(tmp_path / "model")
    (tmp_path / "profile.toml").write_text(PROFILE)
    return tmp_path


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.denoiser", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)


def test_a_profile_is_measured_at_several_degrees_and_drawn(folder: Path) -> None:
    done = run("profile", "--profile", str(folder), "--quick", "--tp", "2,1")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == str(folder / "latency.json")
    latency = load_latency(folder / "latency.json")
    assert latency.degrees == [1, 2]
    load = step_load("cache", 8, 64)
    assert latency.step_ms(2, load) > latency.step_ms(1, load), "so small a model only waits for its ranks"
    degrees = read_latency_file(folder / "latency.json").degrees
    assert [len(degree.passes) for degree in degrees] == [len(degrees[0].passes)] * 2
    out = folder / "latency.svg"
    assert run("plot", "--profile", str(folder), "--out", str(out)).returncode == 0
    assert {"measured-1-cache", "measured-2-mixed"} <= set(re.findall(r'id="([\w-]+)"', out.read_text()))


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tp", "1,x"], "'1,x' is not like 1,2"),
        (["--tp", "0"], "'0' is not like 1,2"),
        (["--tp", "3"], "tensor parallelism over 3 ranks does not divide n_heads"),
    ],
)
def test_a_degree_that_cannot_be_is_refused(folder: Path, arguments: list[str], complaint: str) -> None:
    done = run("profile", "--profile", str(folder), "--quick", *arguments)
    assert done.returncode == 2
    assert complaint in done.stderr
    assert not (folder / "latency.json").exists()
