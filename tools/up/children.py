"""Child processes that never outlive this one. Linux does the work; elsewhere only an orderly end is clean.

1. A child gets a session of its own: Ctrl-C in the terminal reaches this process alone, which stops them in order.
2. If this process is killed, the kernel kills its children (PR_SET_PDEATHSIG).
3. Orphans of a child become children of this process (PR_SET_CHILD_SUBREAPER), which can so find and end them.
"""

import asyncio
import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable, Container
from pathlib import Path
from typing import IO

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ON_LINUX = sys.platform == "linux"
_libc = ctypes.CDLL(None, use_errno=True) if _ON_LINUX else None  # looked up here: not between fork and exec


def adopt_orphans() -> None:
    """From now on orphans among the descendants become children of this process."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def tied_to_this_process(number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` for Popen: the child gets the signal when this process (strictly, this thread of it) ends."""
    parent = os.getpid()

    def tie() -> None:
        if _libc is not None:
            _libc.prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
            if os.getppid() != parent:  # it died before the line above
                os._exit(1)

    return tie


async def start(command: tuple[str, ...], environment: dict[str, str], output: IO[bytes]) -> asyncio.subprocess.Process:
    """Starts it with `environment` beside this process's own, all its output in the file. Raises OSError."""
    return await asyncio.create_subprocess_exec(
        *command,
        env=os.environ | environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        start_new_session=True,
        preexec_fn=tied_to_this_process(),
    )


async def stop(child: asyncio.subprocess.Process, limit_s: float) -> bool:
    """Asks it to end, and kills its whole group after `limit_s` seconds. False: it had to be killed."""
    with contextlib.suppress(ProcessLookupError):
        child.terminate()
    try:
        await asyncio.wait_for(child.wait(), limit_s)
        return True
    except TimeoutError:
        return False
    finally:
        kill_group(child)
        await child.wait()


def kill_group(child: asyncio.subprocess.Process) -> None:
    """Kills it and what it has started in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)


def reap_orphans(known: Container[int]) -> None:
    """Takes notice of the dead among the adopted orphans, so that none stays a zombie."""
    for pid in _children_of(os.getpid()):
        if pid not in known:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)


def kill_all() -> None:
    """Kills all children of this process, and theirs as they become its own."""
    while left := _children_of(os.getpid()):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def _children_of(parent: int) -> list[int]:
    """Their process ids, by /proc; empty where there is none."""
    if not _ON_LINUX:
        return []
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            with contextlib.suppress(OSError):
                # "pid (name) state ppid ...", and a name may hold spaces and parentheses
                after_name = (folder / "stat").read_text(errors="replace").rpartition(")")[2]
                if int(after_name.split()[1]) == parent:
                    found.append(int(folder.name))
    return found
