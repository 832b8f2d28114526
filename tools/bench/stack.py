"""A stack of its own for a measurement: `python -m tools.up` on free ports, with a data folder of its own."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import httpx

_READY_LIMIT_S = 90.0
_STOP_LIMIT_S = 60.0
_TRIES = 100


class Addresses(NamedTuple):
    """Where a stack is reached."""

    url: str  # of its gateway
    nats_url: str


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
        with (Path(data) / "up.out").open("w+b") as output:
            process = subprocess.Popen(
                [*command, "--port", str(http_port), "--nats-port", str(nats_port)],
                stdout=output,
                stderr=output,
                env={**os.environ, **(environment or {})},
            )
            try:
                url = f"http://127.0.0.1:{http_port}"
                _wait_until_ready(url, process, Path(output.name))
                yield Addresses(url, f"nats://127.0.0.1:{nats_port}")
            finally:
                process.send_signal(signal.SIGINT)
                process.wait(_STOP_LIMIT_S)


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
