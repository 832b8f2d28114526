"""Processes of our own that a test starts: their ports, their environment, their logs, whether they live."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil

from tests.waiting import until

ROOT = Path(__file__).parents[1]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def plain_environment(**more: str) -> dict[str, str]:
    """This process's environment without what configures a service."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TEDISERVE_")} | more


def is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


class ServiceProcess:
    """`python -m <command>`, e.g. `services.denoiser worker`. What it says is added to a log file."""

    def __init__(self, command: str, log_file: Path, nats_url: str, **settings: object) -> None:
        """`settings`: of its own table, which is named like the command's last word."""
        self._command = [sys.executable, "-m", *command.split()]
        table = command.replace(".", " ").split()[-1].upper()
        own = {f"TEDISERVE_{table}_{name.upper()}": str(value) for name, value in settings.items()}
        self._environment = plain_environment(
            TEDISERVE_NATS_URL=nats_url, TEDISERVE_LOG_LEVEL="DEBUG", OMP_NUM_THREADS="1", **own
        )
        self._log_file = log_file
        self._process: subprocess.Popen[bytes] | None = None

    def set(self, **variables: str) -> None:
        """More of its environment."""
        self._environment |= variables

    def start(self) -> None:
        """Again, too, once it has ended."""
        with self._log_file.open("ab") as log:
            self._process = subprocess.Popen(self._command, cwd=ROOT, env=self._environment, stdout=log, stderr=log)

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log(self) -> str:
        return self._log_file.read_text(errors="replace") if self._log_file.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """kill -9, if it runs: it is gone when this returns."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(10)

    async def exit_code(self, limit_s: float = 30.0) -> int:
        """Waits for its end."""
        await until(lambda: not self.runs, "the process ends", limit_s)
        assert self._process is not None
        return int(self._process.returncode)
