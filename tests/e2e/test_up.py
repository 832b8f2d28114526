"""`make up`: from nothing to a first answer, and to nothing again."""

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import httpx
import psutil
import pytest

from tests.integration.stack import Stack, running_stack
from tests.processes import ROOT, free_port, is_gone, plain_environment
from tests.waiting import wait_until
from tools.up.__main__ import SAMPLE_ANSWER, SAMPLE_PROBLEM

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(180)]

BUILT_IN_MODEL = "tedi-tiny"


def run_up(*arguments: object) -> subprocess.CompletedProcess[str]:
    """A start that is expected to end by itself."""
    command = [sys.executable, "-m", "tools.up", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=60)


def is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def everything_of(stack: Stack) -> list[int]:
    """All processes: tools.up, the services, the workers."""
    assert stack.process is not None
    root = psutil.Process(stack.process.pid)
    return [root.pid, *(process.pid for process in root.children(recursive=True))]


# --- a life -------------------------------------------------------------------------------------------------------


def test_from_nothing_to_the_printed_calls_answer_and_to_nothing_again(tmp_path: Path, profile: Path) -> None:
    started_at = time.monotonic()
    with running_stack(tmp_path, profile) as stack:
        call = next(line.strip() for line in stack.console.read_text().splitlines() if line.strip().startswith("curl"))
        answer = json.loads(subprocess.run(shlex.split(call), capture_output=True, check=True, timeout=60).stdout)
        print(f"from the start to the first answer: {time.monotonic() - started_at:.1f} s")
        text = answer["choices"][0]["message"]["content"]
        assert text
        if answer["model"] == BUILT_IN_MODEL:
            assert re.findall(r"\d+", text)[-1] == SAMPLE_ANSWER

        processes = everything_of(stack)
        assert len(processes) == 1 + len(stack.status()["services"]) + stack.workers
        assert stack.process is not None
        stack.process.send_signal(signal.SIGINT)
        assert stack.process.wait(60) == 0
        assert not any(psutil.pid_exists(pid) for pid in processes)
        assert is_free(stack.port)
        assert is_free(stack.nats_port)
        assert stack.status() == {}
        assert "Traceback" not in stack.console.read_text() + stack.logs()


def test_what_a_secured_stack_prints_works_as_it_stands(stack: Stack) -> None:
    """The call, with key and certificate, and the command line's settings; without them neither gets anywhere."""
    lines = [line.strip() for line in stack.console.read_text().splitlines()]
    [call] = [line for line in lines if line.startswith("curl")]
    [export] = re.findall(r"export .*", "\n".join(lines))
    tediserve = f"{sys.executable} -m tools.cli"

    def shell(line: str) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in plain_environment().items() if name != "SSL_CERT_FILE"}
        return subprocess.run(line, shell=True, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=90)

    assert json.loads(shell(call).stdout)["choices"][0]["message"]["content"]
    assert stack.secrets.api_key.read_text().strip() not in stack.console.read_text() + stack.logs()
    without_key = re.sub(r'-H "Authorization: [^"]*"', "", call)
    assert json.loads(shell(without_key).stdout)["error"]["code"] == "invalid_api_key"
    assert shell(re.sub(r"--cacert \S+", "", call)).returncode == 60  # curl's: not trusted
    status = json.loads(shell(f"{export}; {tediserve} status --json").stdout)
    assert len(status["instances"]) == stack.workers
    refused = shell(f"TEDISERVE_NATS_URL={stack.nats_url} {tediserve} status")
    assert refused.returncode == 2
    assert "its certificate is not trusted" in refused.stderr


def test_what_is_killed_takes_everything_along(tmp_path: Path, profile: Path) -> None:
    with running_stack(tmp_path, profile, workers=1) as stack:
        processes = everything_of(stack)
        assert stack.process is not None
        stack.process.kill()
        stack.process.wait(10)
        wait_until(lambda: all(map(is_gone, processes)), "all processes are gone", limit_s=10)

        stack.start()  # and what it left behind is no hindrance
        assert run_up("--down", "--data", stack.data).returncode == 0
        assert stack.process.wait(10) == 0
        assert "nothing runs" in run_up("--down", "--data", stack.data).stdout


def test_a_child_that_hangs_is_killed(tmp_path: Path, profile: Path) -> None:
    with running_stack(tmp_path, profile, workers=1) as stack:
        processes = everything_of(stack)
        os.kill(stack.pid("scheduler"), signal.SIGSTOP)
        assert stack.process is not None
        stack.process.terminate()
        assert stack.process.wait(60) == 0
        assert not any(psutil.pid_exists(pid) for pid in processes)
        assert "scheduler | had to be killed" in stack.console.read_text()


# --- a second one -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("busy", ["port", "nats_port"])
def test_a_second_one_on_a_busy_port_says_so(stack: Stack, tmp_path: Path, profile: Path, busy: str) -> None:
    ports = {"port": free_port(), "nats_port": free_port()} | {busy: getattr(stack, busy)}
    before = everything_of(stack)
    second = run_up(
        *("--port", ports["port"], "--nats-port", ports["nats_port"]),
        *("--data", tmp_path, "--profile", profile),
    )
    assert second.returncode != 0
    assert f"port {ports[busy]}" in second.stderr
    assert f"{busy.upper()}=" in second.stderr  # what to do
    assert "Traceback" not in second.stderr
    assert everything_of(stack) == before
    assert httpx.get(f"{stack.url}/health/ready").status_code == 200


def test_a_second_one_in_the_same_folder_says_so(stack: Stack, profile: Path) -> None:
    before = stack.status()
    second = run_up(
        *("--port", free_port(), "--nats-port", free_port()),
        *("--data", stack.data, "--profile", profile),
    )
    assert second.returncode != 0
    assert str(stack.port) in second.stderr
    assert "make down" in second.stderr
    assert stack.status() == before
    assert httpx.get(f"{stack.url}/health/ready").status_code == 200


# --- what cannot work ---------------------------------------------------------------------------------------------


def test_a_profile_that_is_not_there_is_named(tmp_path: Path) -> None:
    failed = run_up("--profile", tmp_path / "nowhere", "--data", tmp_path)
    assert failed.returncode == 2
    assert "nowhere" in failed.stderr
    assert "Traceback" not in failed.stderr


def test_a_model_that_cannot_be_loaded_ends_the_start_and_leaves_nothing(tmp_path: Path) -> None:
    broken = tmp_path / "profile"
    broken.mkdir()
    limits = "[limits]\nmax_context_tokens = 512\nmax_output_tokens = 256\n"
    (broken / "profile.toml").write_text(f'model = "broken"\n{limits}')
    port, nats_port = free_port(), free_port()
    failed = run_up(
        *("--port", port, "--nats-port", nats_port),
        *("--data", tmp_path / "var", "--profile", broken),
    )
    assert failed.returncode == 2
    assert str(broken) in failed.stdout + failed.stderr
    assert is_free(port)
    assert is_free(nats_port)


@pytest.mark.parametrize(("option", "value"), [("--port", "0"), ("--workers", "many"), ("--nats-port", "70000")])
def test_wrong_options_are_named(tmp_path: Path, option: str, value: str) -> None:
    failed = run_up(option, value, "--data", tmp_path)
    assert failed.returncode == 2
    assert option.removeprefix("--").replace("-", "_") in failed.stderr


# --- words --------------------------------------------------------------------------------------------------------


def test_the_readme_tries_the_sample_problem() -> None:
    assert SAMPLE_PROBLEM in (ROOT / "README.md").read_text(encoding="utf-8")
