"""Fixtures of the tests with real workers. Those of other stages have a `stage` of their own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.bus import Bus
from tests.conftest import NatsServer
from tests.integration.worker_stage import Served, Stage, ended


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    return Served(tmp_path_factory.mktemp("profile"))


@pytest_asyncio.fixture
async def stage(bus: Bus, nats_server: NatsServer, tmp_path: Path, served: Served) -> AsyncIterator[Stage]:
    stage = Stage(bus, nats_server.url, tmp_path, served)
    await stage.begin()
    with ended(stage):
        yield stage
