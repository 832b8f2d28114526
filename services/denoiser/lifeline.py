"""Ties a process to another's life, a worker to its agent's and a rank to its worker's; and how a process ended."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


def tie_to_parent(parent_pid: int) -> None:
    """From now on this process is killed when its parent dies, even if it is stopped or hangs; at once if it has."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    else:
        threading.Thread(target=_watch, args=(parent_pid,), name="lifeline", daemon=True).start()
    leave_if_orphaned(parent_pid)  # it may have died before the kernel was asked


def tie_to(lives: Callable[[], bool], limit_s: float, *, name: str) -> None:
    """From now on this process ends once `lives` has said no for `limit_s` seconds on end."""
    threading.Thread(target=_end_without, args=(lives, limit_s), name=name, daemon=True).start()


def _end_without(lives: Callable[[], bool], limit_s: float) -> None:
    lived_at = time.monotonic()
    while True:
        if lives():
            lived_at = time.monotonic()
        elif time.monotonic() - lived_at >= limit_s:
            os._exit(1)
        time.sleep(_POLL_S)


def _watch(parent_pid: int) -> None:
    while True:
        time.sleep(_POLL_S)
        leave_if_orphaned(parent_pid)


def leave_if_orphaned(parent_pid: int) -> None:
    """Ends this process if that is not its parent, which so must have died."""
    if os.getppid() != parent_pid:
        os._exit(1)


def describe_exit(code: int) -> str:
    """Why a process ended, from its exit code; negative: the signal that killed it."""
    if code < 0:
        return f"killed by {signal.Signals(-code).name}"
    meaning = {0: "stopped", 1: "failed", 2: "wrong configuration"}.get(code)
    return f"exit code {code}" + (f" ({meaning})" if meaning else "")
