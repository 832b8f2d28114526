"""Locks by which processes know of one another, and workers that are found by what they were started as."""

import asyncio
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from contracts import messages as m
from services.denoiser import adoption
from services.denoiser.adoption import Origin, find_survivors, is_locked, take_lock
from services.settings import ConfigError
from tests.processes import ROOT

pytestmark = pytest.mark.skipif(not adoption.IS_POSSIBLE, reason="Linux alone")

SLEEPER = "import sys; print('up', flush=True); sys.stdin.read()"
TIED = f"""
from services.denoiser.adoption import is_locked
from services.denoiser.lifeline import tie_to
import sys
tie_to(lambda: is_locked(sys.argv[1]), 0.0, name="test")
{SLEEPER}
"""


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Path]:
    """A locked file."""
    path = tmp_path / "agent.lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield path


def run(code: str, *arguments: str, **environment: str) -> subprocess.Popen[bytes]:
    """A process that says that it is up, and lives until its input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    return process


def test_a_lock_tells_whether_its_holder_lives(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_locked(str(lock))
    assert is_locked(str(lock)), "who looks does not take it"
    assert not is_locked(str(lock.with_name("nowhere")))
    monkeypatch.setattr(adoption, "_LOCK_LIMIT_S", 0.05)
    with pytest.raises(ConfigError, match="runs already"):
        take_lock(lock)
    with pytest.raises(ConfigError, match="cannot be written"):
        take_lock(lock / "below")


def test_who_is_tied_to_a_lock_ends_when_it_is_given_up(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        process = run(TIED, str(path))
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1.2)  # it has looked more than once
    with process:
        assert process.wait(20) == 1


async def test_workers_are_found_by_the_lock_of_their_agent_watched_and_signalled(lock: Path) -> None:
    def origin(lock_file: Path) -> str:
        wanted = m.PlannedInstance(slot_id="n-3", tp_degree=1, devices=[0])
        made = Origin(agent_pid=1, wanted=wanted, instance_id="n-3-a", number=3, lock_file=str(lock_file))
        return msgspec.json.encode(made).decode()

    worker, rank, other = (
        run(SLEEPER, role, **{adoption.ORIGIN: origin(lock_file)})
        for role, lock_file in (("worker", lock), ("rank", lock), ("worker", lock.with_name("other.lock")))
    )
    with worker, rank, other:
        (found,) = find_survivors(str(lock))
        assert (found.pid, found.origin.wanted.slot_id, found.origin.number) == (worker.pid, "n-3", 3)
        waiting = asyncio.create_task(found.wait())
        await asyncio.sleep(0)
        assert not waiting.done()
        found.send_signal(signal.SIGKILL)
        await asyncio.wait_for(waiting, 20)
        assert worker.wait(20) == -signal.SIGKILL
        found.send_signal(signal.SIGKILL)  # it is gone: nothing happens
        assert find_survivors(str(lock)) == []
