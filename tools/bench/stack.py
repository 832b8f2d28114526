"""A measurement's own processes, which end with it: a whole stack (`python -m tools.up`), or single services.

However it ends, by itself, by an error, by Ctrl-C or SIGTERM: what was started last is asked to end first, and is
killed where it does not, or where the wish is repeated. If the measurement is killed the kernel asks them to end.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import IO, NamedTuple, Protocol

import httpx

from tools.up.__main__ import IMPATIENT_S
from tools.up.children import tied_to_this_process

_READY_LIMIT_S = 90.0
_STOP_LIMIT_S = 60.0
_TRIES = 100


class Addresses(NamedTuple):
    """Where a stack is reached."""

    url: str  # of its gateway
    nats_url: str


class Start(Protocol):
    """Starts a process, in a session of its own: Ctrl-C reaches the measurement alone. Raises OSError."""

    def __call__(
        self, command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
    ) -> "subprocess.Popen[bytes]": ...


@contextlib.contextmanager
def own_processes() -> Iterator[Start]:
    """Yields what starts them."""
    with sigterm_as_ctrl_c(), contextlib.ExitStack() as started:

        def start(
            command: Sequence[str], output: IO[bytes], environment: Mapping[str, str]
        ) -> "subprocess.Popen[bytes]":
            process = subprocess.Popen(
                command,
                env=environment,
                stdout=output,
                stderr=output,
                start_new_session=True,
                preexec_fn=tied_to_this_process(signal.SIGTERM),
            )
            started.callback(_end, process)
            return process

        yield start


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_STOP_LIMIT_S)
    finally:  # it has ended, or is late, or the wait was interrupted
        process.kill()
        process.wait()


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """SIGTERM raises KeyboardInterrupt meanwhile: what is open is closed. Twice at once is once, as in tools.up."""
    told_at = -IMPATIENT_S

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        nonlocal told_at
        before, told_at = told_at, time.monotonic()
        if told_at - before >= IMPATIENT_S:
            raise KeyboardInterrupt

    restored = signal.signal(signal.SIGTERM, on_signal)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, restored)


@contextlib.contextmanager
def running_stack(
    profile: str, workers: int, folder: Path | None = None, environment: Mapping[str, str] | None = None
) -> Iterator[Addresses]:
    """Yields its addresses once the stack is ready. Raises RuntimeError with its output if it ends before.

    `folder`: of its data, and it stays; by default one that is removed. `environment`: settings of its services.
    """
    with contextlib.nullcontext(folder) if folder else tempfile.TemporaryDirectory(prefix="tediserve-bench-") as data:
        command = [sys.executable, "-m", "tools.up", "--profile", profile, "--workers", str(workers)]
        command += ["--data", str(data)]
        http_port, nats_port = free_ports(2)
        command += ["--port", str(http_port), "--nats-port", str(nats_port)]
        with (Path(data) / "up.out").open("w+b") as output, own_processes() as start:
            process = start(command, output, os.environ | dict(environment or {}))
            url = f"http://127.0.0.1:{http_port}"
            _wait_until_ready(url, process, Path(output.name))
            yield Addresses(url, f"nats://127.0.0.1:{nats_port}")


def free_ports(count: int) -> list[int]:
    """TCP ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        probes = [stack.enter_context(socket.socket()) for _ in range(count)]
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [int(probe.getsockname()[1]) for probe in probes]


def ports_in_a_row(count: int) -> range:
    """Ports that follow each other, and that nobody listens on now. Raises RuntimeError where there are none."""
    for _ in range(_TRIES):
        (first,) = free_ports(1)
        try:
            with contextlib.ExitStack() as stack:
                for port in range(first, first + count):
                    stack.enter_context(socket.socket()).bind(("127.0.0.1", port))
        except (OSError, OverflowError):  # taken, or beyond the last port
            continue
        return range(first, first + count)
    raise RuntimeError(f"no {count} free ports in a row were found")


def _wait_until_ready(url: str, process: subprocess.Popen[bytes], output: Path) -> None:
    deadline = time.monotonic() + _READY_LIMIT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the stack ended before it was ready:\n{output.read_text(errors='replace')}")
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health/ready", timeout=2).status_code == 200:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the stack was not ready within {_READY_LIMIT_S:g} s:\n{output.read_text(errors='replace')}")
