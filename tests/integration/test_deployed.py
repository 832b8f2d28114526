"""What docker-compose.yml starts, started: each container's command with its environment, and what its image holds.

No container is built: a process stands for each, outside our folder, which can import what its image installs and
nothing else (tests/unit/deploy). Names of other containers become addresses here, and their ports ones that are free.
"""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from services.bus import Bus, BusTimeout, NatsSettings
from tests.conftest import nats_server_binary
from tests.processes import free_port, plain_environment
from tests.unit.deploy.distributions import environment_with_only
from tests.unit.deploy.files import SERVICES, compose
from tests.unit.deploy.test_compose import seconds, source_of
from tests.unit.deploy.test_images import extras_of
from tests.waiting import until, wait_until

pytestmark = pytest.mark.integration

LEASE_LOST = 3  # exit code (services/runtime.py)


class Containers:
    """Processes in the place of a stack's containers."""

    def __init__(self, stack: dict[str, Any], folder: Path) -> None:
        self.stack, self.folder = stack, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.ports: dict[tuple[str, int], int] = {}  # of a container -> here
        self._stopping = threading.Event()
        self._restarting = threading.Thread(target=self._restart, daemon=True)

    def port(self, name: str, number: int) -> int:
        return self.ports.setdefault((name, number), free_port())

    def start_nats(self, name: str) -> None:
        """A server with the command of that container, on ports that are free."""
        container = self.stack["services"][name]
        command = [self.here(word, name, container) for word in container["command"]]
        command[0] = nats_server_binary()
        if "--routes" in command:  # so does `http` in the file, and `listen` of the cluster
            command += ["-m", str(self.port(name, 8222)), "--cluster", f"nats://127.0.0.1:{self.port(name, 6222)}"]
        command += ["-p", str(self.port(name, 4222))]
        self._run(name, command, plain_environment())

    def start(self, name: str) -> None:
        """A service with the command and environment of its container, and what its image installs."""
        container = self.stack["services"][name]
        environment = {key: self.here(value, name, container) for key, value in container["environment"].items()}
        only = environment_with_only(extras_of(container["build"]["target"]), OMP_NUM_THREADS="1", **environment)
        self._run(name, [sys.executable, *container["command"][1:]], only)

    def restart_who_loses_its_lease(self) -> None:
        """From now on, as the containers' restart policy does: on a busy machine a lease of a second may be lost."""
        self._restarting.start()

    def _restart(self) -> None:
        while not self._stopping.wait(0.1):
            for service in SERVICES:
                if self.processes[service.name].poll() == LEASE_LOST:
                    self.start(service.name)

    def _stop_restarting(self) -> None:
        self._stopping.set()
        if self._restarting.is_alive():
            self._restarting.join(10)

    def await_health(self, name: str, limit_s: float) -> None:
        """Returns once the container's health check is content."""
        kind, program, *words = self._health_check(name)
        found = re.search(r"http://[\w.:]+[^'\s]*", words[-1])
        assert kind == "CMD"
        assert found is not None
        wait_until(lambda: self._answers(name, found[0]), f"{name} answers at {found[0]}", limit_s)
        if program == "python":  # nats-server's image has a wget, which may not be here
            checked = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=30)
            assert checked.returncode == 0, checked.stderr

    def _health_check(self, name: str) -> list[str]:
        container = self.stack["services"][name]
        return [self.here(word, name, container) for word in container["healthcheck"]["test"]]

    def _answers(self, name: str, url: str) -> bool:
        assert self.processes[name].poll() in (None, LEASE_LOST), self.log(name)
        try:
            return httpx.get(url, timeout=2).status_code == 200
        except httpx.HTTPError:
            return False

    def here(self, text: str, name: str, container: dict[str, Any]) -> str:
        """Paths, names and ports that a container means, as they are here."""
        if text == "/data":
            return str(self.folder / f"{name}-data")
        if text.startswith(("/etc/", "/profile")):
            return str(source_of(text, container, self.stack))
        text = re.sub(r"nats://(nats[\d-]*):(\d+)", lambda m: f"nats://127.0.0.1:{self.port(m[1], int(m[2]))}", text)
        text = re.sub(r"http://127\.0\.0\.1:(\d+)", lambda m: f"http://127.0.0.1:{self.port(name, int(m[1]))}", text)
        return str(self.port(name, int(text))) if re.fullmatch(r"8\d\d\d|9\d\d\d", text) else text

    def _run(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                command, cwd=self.folder, env=environment, stdout=log, stderr=log, start_new_session=True
            )

    def log(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def stop(self, name: str, limit_s: float) -> int:
        """SIGTERM, as compose sends it. Its exit code."""
        self._stop_restarting()
        self.processes[name].terminate()
        return self.processes[name].wait(limit_s)

    def kill(self) -> None:
        self._stop_restarting()
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)


@pytest.fixture
def containers(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Containers]:
    found = Containers(compose(*getattr(request, "param", ()), WORKERS="1"), tmp_path)
    yield found
    found.kill()


def in_order_of_stopping(stack: dict[str, Any]) -> list[str]:
    """Who depends on others stops before they do."""
    left = {service.name: set(stack["services"][service.name]["depends_on"]) for service in SERVICES}
    order: list[str] = []
    while left:
        free = sorted(name for name in left if not any(name in after for after in left.values()))
        order += free
        left = {name: after for name, after in left.items() if name not in free}
    return order


@pytest.mark.timeout(240)
def test_the_composed_stack_answers_offers_its_metrics_and_stops_in_order(containers: Containers) -> None:
    containers.start_nats("nats")
    containers.await_health("nats", limit_s=30)
    for service in SERVICES:
        containers.start(service.name)
    containers.restart_who_loses_its_lease()
    for service in SERVICES:
        containers.await_health(service.name, limit_s=150)
    url = f"http://127.0.0.1:{containers.port('gateway', 8000)}"
    call = {"model": "tedi-tiny", "messages": [{"role": "user", "content": "What is 12 + 7?"}]}
    answer = httpx.post(f"{url}/v1/chat/completions", json=call, timeout=60)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] > 0

    for name, port, metric in (
        ("gateway", 8000, "tediserve_http_requests_total"),
        ("scheduler", 9100, "tediserve_scheduler_placements_total"),
        ("agent", 9101, "tediserve_worker_tokens_committed_total"),
    ):
        read = httpx.get(f"http://127.0.0.1:{containers.port(name, port)}/metrics").text
        assert re.search(rf"^{metric}(\{{.*\}})? [1-9]", read, re.MULTILINE), metric

    for name in in_order_of_stopping(containers.stack):
        limit_s = seconds(containers.stack["services"][name]["stop_grace_period"])
        assert containers.stop(name, limit_s) in (0, LEASE_LOST), containers.log(name)


@pytest.mark.parametrize("containers", [("nats-cluster.yml",)], indirect=True)
async def test_the_nats_cluster_keeps_what_is_stored_when_a_server_dies(containers: Containers) -> None:
    names = [name for name in containers.stack["services"] if name.startswith("nats")]
    assert len(names) == 3
    for name in names:
        containers.start_nats(name)
    scheduler = containers.stack["services"]["scheduler"]
    variables = scheduler["environment"]
    settings = NatsSettings(
        url=containers.here(variables["TEDISERVE_NATS_URL"].replace(",", ", "), "scheduler", scheduler),
        replicas=int(variables["TEDISERVE_NATS_REPLICAS"]),
    )
    bus = await Bus.connect(settings, "test")

    try:
        await bus.ensure_streams()
        info = await bus._js.stream_info("REQUESTS")
        assert info.config.num_replicas == 3
        assert info.cluster is not None
        victim = str(info.cluster.leader)
        assert victim in names
        seq = await bus.append("req.a", {"text": "kept"})
        containers.processes[victim].kill()
        kept = await until(lambda: _last(bus), "another server leads", limit_s=60)
        assert kept.seq == seq
    finally:
        await asyncio.wait_for(bus.close(drain=False), 10)


async def _last(bus: Bus) -> Any:
    try:
        return await bus.last("REQUESTS", "req.a", dict)
    except BusTimeout:
        return None
