"""How workers outlive their agent, and how the next agent finds them. Linux alone.

1. What a worker was started as is in its environment, which `/proc` shows: no record of it can be stale or be lost.
2. An agent holds a lock for as long as it lives. So a node has one agent for each `run_folder`, and workers know
   whether they have one.
3. A worker whose agent dies while it starts ends at once (`lifeline.py`): whoever holds the lock then finds all others.
"""

import asyncio
import contextlib
import fcntl
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import msgspec

from contracts import messages as m
from services.settings import PREFIX, ConfigError

ORIGIN = f"{PREFIX}AGENT_ORIGIN"  # environment variable of a worker: its Origin, as JSON
IS_POSSIBLE = sys.platform == "linux"

_LOCK_LIMIT_S = 2.0  # workers that look whether the file is locked lock it for a moment
_RETRY_S = 0.02


class Lifeline(msgspec.Struct, frozen=True):
    """A file: the worker ends once nobody has held a lock on it for `limit_s` seconds."""

    file: str
    limit_s: float = 0.0


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker was started as, and by whom."""

    agent_pid: int
    wanted: m.PlannedInstance
    instance_id: str
    number: int  # among the node's workers
    lock_file: str = ""  # the agent's; "": the worker ends with the agent
    lifelines: tuple[Lifeline, ...] = ()


def origin_of(environ: Mapping[str, str]) -> Origin | None:
    """None: no agent has started this process."""
    return msgspec.json.decode(environ[ORIGIN], type=Origin) if ORIGIN in environ else None


def take_lock(path: Path) -> None:
    """For as long as this process lives. Raises ConfigError where it cannot be had."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT)  # stays open; no child inherits it
    except OSError as error:
        raise ConfigError(f"[agent] run_folder: {path} cannot be written: {error.strerror}") from None
    give_up_at = time.monotonic() + _LOCK_LIMIT_S
    while not _try_lock(descriptor, fcntl.LOCK_EX):
        if time.monotonic() > give_up_at:
            raise ConfigError(f"[agent] run_folder: an agent of this node runs already: it has locked {path}")
        time.sleep(_RETRY_S)


def is_locked(path: str) -> bool:
    """Whether somebody holds a lock on it. A file that is not there, nobody does."""
    try:
        descriptor = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        return not _try_lock(descriptor, fcntl.LOCK_SH)
    finally:
        os.close(descriptor)  # and with it our own lock


def _try_lock(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class Survivor:
    """A worker that has outlived its agent. It is not our child: its exit code is its new parent's to know."""

    def __init__(self, pid: int, origin: Origin, environ: Mapping[str, str]) -> None:
        """Raises ProcessLookupError where it has ended."""
        self.pid, self.origin, self.environ = pid, origin, environ
        self.returncode: int | None = None  # never known
        self._descriptor = os.pidfd_open(pid)  # stands for this process, whoever gets its number after it

    async def wait(self) -> None:
        """Until it has ended."""
        ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._descriptor, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(self._descriptor)

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing where it has ended."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._descriptor, number)


def find_survivors(lock_file: str) -> list[Survivor]:
    """The workers whose agents have held this lock, by process id."""
    found = []
    for pid in sorted(int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdecimal()):
        environ = _environ_of_worker(pid)
        origin = origin_of(environ)
        if origin is None or origin.lock_file != lock_file:
            continue
        with contextlib.suppress(ProcessLookupError):
            survivor = Survivor(pid, origin, environ)
            if _environ_of_worker(pid) == environ:  # so it is whose environment was read that is held now
                found.append(survivor)
    return found


def _environ_of_worker(pid: int) -> dict[str, str]:
    """Empty where it is no worker, none that we may look at, or has ended. Other ranks have their worker's."""
    try:
        if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[-2:-1] != [b"worker"]:
            return {}
        entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return {}
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs if name}
