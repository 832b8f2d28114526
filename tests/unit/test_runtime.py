"""The command line of services: what they do not know is refused before anything is begun."""

import asyncio
import contextlib
import subprocess
import sys

import pytest

from services import runtime as runtime_module
from tests.processes import ROOT, plain_environment

SERVICES = sorted(path.parent.name for path in (ROOT / "services").glob("*/__main__.py"))


@pytest.mark.parametrize("service", SERVICES)
def test_a_service_refuses_an_argument_that_it_does_not_know_and_shows_those_that_it_does(service: str) -> None:
    code, _, said = run(service, "--bogus")
    assert code == 2
    assert said.startswith(f"usage: python -m services.{service} [-")


def test_a_service_without_options_says_where_its_settings_are() -> None:
    code, told, _ = run("workload_monitor", "--help")
    assert code == 0
    assert "[workload_monitor] in tediserve.toml, or TEDISERVE_WORKLOAD_MONITOR_<SETTING>" in told
    code, _, said = run("workload_monitor", "now")
    assert code == 2
    assert said.splitlines()[-1] == "python -m services.workload_monitor: error: unrecognized arguments: now"


def run(service: str, *words: str) -> tuple[int, str, str]:
    """Its exit code, and what it wrote to stdout and stderr."""
    command = [sys.executable, "-m", f"services.{service}", *words]
    done = subprocess.run(command, cwd=ROOT, env=plain_environment(), capture_output=True, text=True, timeout=60)
    return done.returncode, done.stdout, done.stderr


async def test_a_task_that_forgets_that_it_was_cancelled_is_cancelled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runtime_module, "_INSIST_S", 0.01)
    runtime = runtime_module.Runtime("test", None)  # type: ignore[arg-type]

    async def forgetful() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)
        await asyncio.sleep(60)

    runtime.spawn(forgetful(), name="forgetful")
    await asyncio.sleep(0)
    await asyncio.wait_for(runtime.cancel_tasks(), 5)


async def test_a_task_that_does_not_end_ends_the_process(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Left(Exception):
        pass

    def leave(code: int) -> None:
        raise Left(code)

    monkeypatch.setattr(runtime_module, "_INSIST_S", 0.01)
    monkeypatch.setattr(runtime_module, "_GIVE_UP_S", 0.05)
    monkeypatch.setattr(runtime_module.os, "_exit", leave)
    runtime = runtime_module.Runtime("test", None)  # type: ignore[arg-type]
    ends = asyncio.Event()

    async def stubborn() -> None:
        while not ends.is_set():
            with contextlib.suppress(asyncio.CancelledError):
                await ends.wait()

    runtime.spawn(stubborn(), name="stubborn")
    await asyncio.sleep(0)
    with pytest.raises(Left, match="1"):
        await asyncio.wait_for(runtime.cancel_tasks(), 5)
    assert "cancelled, and still there: stubborn" in caplog.text
    ends.set()
