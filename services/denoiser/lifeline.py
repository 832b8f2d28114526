"""Ties a process to the life of its parent, a worker to its agent and a rank to its worker; and how a process ended."""

import ctypes
import os
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def tie_to_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent dies, even if it is stopped or hangs; at once if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    _leave_if_orphaned(parent_pid)  # it may have died before the kernel was asked


def _watch(parent_pid: int) -> None:
    while True:
        time.sleep(_POLL_S)
        _leave_if_orphaned(parent_pid)


def _leave_if_orphaned(parent_pid: int) -> None:
    if os.getppid() != parent_pid:
        os._exit(1)


def describe_exit(code: int) -> str:
    """Why a process ended, from its exit code; negative: the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    meaning = {0: "stopped", 1: "failed", 2: "wrong configuration"}.get(code)
    return f"exit code {code}" + (f" ({meaning})" if meaning else "")
