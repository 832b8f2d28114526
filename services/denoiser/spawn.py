"""Starts the processes of ranks 1 and up. Imports no torch: they load it while their parent does."""

import os
import socket
import subprocess
import sys
from typing import NamedTuple


class RankProcess(NamedTuple):
    """A child process that runs a rank."""

    rank: int
    process: "subprocess.Popen[bytes]"
    line: socket.socket  # our end


def start_ranks(size: int, *, name: str) -> list[RankProcess]:
    """Ranks 1 to `size` - 1 of an instance; `name`: its name in their logs. Raises OSError.

    They end with this process, on Linux already with the thread that calls this.
    """
    return [_start(rank, f"{name} rank {rank}") for rank in range(1, size)]


def _start(rank: int, name: str) -> RankProcess:
    ours, theirs = socket.socketpair()
    with theirs:
        command = [sys.executable, "-m", "services.denoiser", "rank", "--name", name]
        command += ["--line", str(theirs.fileno()), "--parent", str(os.getpid())]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()])
    return RankProcess(rank, process, ours)
