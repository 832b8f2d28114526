"""A benchmark that is told to end, or is killed, leaves no process behind, and only killed a folder."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.integration import random_model
from tests.processes import ROOT, is_gone, plain_environment
from tests.waiting import wait_until

pytestmark = [pytest.mark.integration, pytest.mark.timeout(180)]

BENCHMARKS = {
    "slo": "tools.bench.slo --folder {folder}/cells --profile {profile} --workers 1 --policies fixed",
    "telemetry": "tools.bench.telemetry --profile {profile}",
    "cluster": "tools.bench.cluster --instances 8 --services scheduler",
}
PROCESSES = {"slo": 7, "telemetry": 7, "cluster": 3}  # at least, once all has been started


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("slo", signal.SIGTERM),
        ("slo", signal.SIGINT),
        ("slo", signal.SIGKILL),
        ("telemetry", signal.SIGTERM),
        ("cluster", signal.SIGTERM),
    ],
)
def test_its_processes_end_with_it(name: str, number: signal.Signals, tmp_path: Path) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    profile = random_model.write_profile(tmp_path / "profile")
    command = BENCHMARKS[name].format(folder=tmp_path, profile=profile)
    with (tmp_path / "said").open("wb") as said:
        benchmark = psutil.Popen(
            [sys.executable, "-m", *command.split()],
            cwd=ROOT,
            env=plain_environment(TMPDIR=str(temporary), OMP_NUM_THREADS="1"),
            stdout=said,
            stderr=subprocess.STDOUT,
        )
    started: list[psutil.Process] = []
    try:
        wait_until(lambda: list(temporary.glob("tediserve-bench-*")), limit_s=90)
        wait_until(lambda: len(benchmark.children(recursive=True)) >= PROCESSES[name], limit_s=90)
        started = benchmark.children(recursive=True)
        os.kill(benchmark.pid, number)
        code = benchmark.wait(60)
        assert code == {"slo": 130}.get(name, -signal.SIGINT) if number != signal.SIGKILL else -signal.SIGKILL
        wait_until(lambda: all(is_gone(process.pid) for process in started), limit_s=60)
        assert number == signal.SIGKILL or not list(temporary.glob("tediserve-bench-*"))
    finally:
        for process in [benchmark, *started]:
            if not is_gone(process.pid):
                process.kill()
