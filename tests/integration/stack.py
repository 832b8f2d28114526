"""The whole stack as real processes, started by `python -m tools.up`, for tests that break parts of it.

`running_stack` starts it; `Stack` knows its processes and can hurt them; `stream` and `ask` are clients that keep all
they are told; `Proxy` stands between one service and NATS and can cut the line.
"""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

from contracts import subjects
from contracts.messages import InstanceStatus, NodeStatus, StatusAsk
from services.bus import Bus, NatsSettings
from tests.processes import ROOT, free_port, plain_environment
from tools.secrets.store import Secrets

# --- the stack ----------------------------------------------------------------------------------------------------


class Stack:
    """A stack in a folder of its own, on ports of its own."""

    def __init__(
        self, folder: Path, profile: Path, workers: int = 2, *, secure: bool = False, **environment: str
    ) -> None:
        """`environment`: settings of its services, as in TEDISERVE_AGENT_DEVICES."""
        self.environment = environment
        self.secure = secure
        self.data = folder / "var"
        self.profile = profile
        self.workers = workers
        self.port, self.nats_port = free_port(), free_port()
        self.url = f"{'https' if secure else 'http'}://127.0.0.1:{self.port}"
        self.nats_url = f"{'tls' if secure else 'nats'}://127.0.0.1:{self.nats_port}"
        self.secrets = Secrets(self.data / "secrets", {})  # of a secure one
        self.console = folder / "console.txt"
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, limit_s: float = 90.0) -> None:
        """Returns once the stack says that it is ready."""
        command = [sys.executable, "-m", "tools.up", "--port", str(self.port), "--nats-port", str(self.nats_port)]
        command += ["--profile", str(self.profile), "--workers", str(self.workers), "--data", str(self.data)]
        command += ["--secure"] if self.secure else []
        with self.console.open("ab") as console:
            environment = plain_environment(**self.environment)
            self.process = subprocess.Popen(command, cwd=ROOT, stdout=console, stderr=console, env=environment)
        give_up_at = time.monotonic() + limit_s
        # a stack that was killed leaves its status behind, so the file must be this one's
        while not ((status := self.status()).get("ready") and status["pid"] == self.process.pid):
            assert self.process.poll() is None, f"the stack has ended:\n{self.console.read_text()}"
            assert time.monotonic() < give_up_at, f"the stack is not ready:\n{self.console.read_text()}"
            time.sleep(0.05)

    def stop(self) -> None:
        """Ends it as Ctrl-C does, and whatever may be left of it."""
        if self.process is None:
            return
        everything = [self.process.pid, *(process.pid for process in self._descendants())]
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(60)
        finally:
            left = [pid for pid in everything if psutil.pid_exists(pid)]
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.wait(10)
        assert not left, f"processes are left: {left}"

    def status(self) -> dict[str, Any]:
        """The status file of tools.up; empty if there is none."""
        try:
            found: dict[str, Any] = json.loads((self.data / "up.json").read_text())
        except FileNotFoundError:
            return {}
        return found

    def logs(self) -> str:
        return "\n".join(path.read_text(errors="replace") for path in sorted((self.data / "log").glob("*.log")))

    # --- its processes ---

    def pid(self, service: str) -> int:
        """Of nats, scheduler, gateway or agent."""
        return int(self.status()["services"][service])

    def worker_pids(self) -> dict[str, int]:
        """By instance id: the agent's children, and those that it has adopted."""
        found = {}
        for process in self._descendants():
            with contextlib.suppress(psutil.Error):  # one that has just ended
                if process.cmdline()[-1:] == ["worker"]:
                    found[process.environ()["TEDISERVE_WORKER_INSTANCE_ID"]] = process.pid
        return found

    async def busiest_worker(self, at_least: int) -> int:
        """The process that holds the most requests, once it holds `at_least` so many."""
        async with self.bus() as bus:
            held: dict[str, int] = {}
            await bus.subscribe(
                "status.instance.*", InstanceStatus, lambda status: held.update({status.instance_id: len(status.held)})
            )
            give_up_at = time.monotonic() + 10
            while not held or max(held.values()) < at_least:
                assert time.monotonic() < give_up_at, f"held by the instances: {held}"
                await bus.publish(subjects.STATUS_ASK, StatusAsk())
                await asyncio.sleep(0.05)
        return self.worker_pids()[max(held, key=lambda instance_id: held[instance_id])]

    def kill(self, service: str) -> int:
        """kill -9. Returns the process id that it had."""
        pid = self.pid(service)
        os.kill(pid, signal.SIGKILL)
        return pid

    def _descendants(self) -> list[psutil.Process]:
        assert self.process is not None
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    async def until_whole(self, limit_s: float = 60.0) -> None:
        """Waits until everything runs again: all services, and all workers of the plan with their models loaded."""
        async with self.bus() as bus:
            loaded: set[str] = set()
            running: set[str] = set()

            def on_node(status: NodeStatus) -> None:
                running.clear()
                running.update(i.instance_id for i in status.instances if i.state == "running")

            await bus.subscribe("status.instance.*", InstanceStatus, lambda status: loaded.add(status.instance_id))
            await bus.subscribe("status.node.*", NodeStatus, on_node)
            give_up_at = time.monotonic() + limit_s
            while not (len(running) == self.workers and running <= loaded and await self._answers()):
                assert time.monotonic() < give_up_at, f"the stack is not whole:\n{self.logs()}"
                loaded.clear()
                await bus.publish(subjects.STATUS_ASK, StatusAsk())
                await asyncio.sleep(0.2)

    async def _answers(self) -> bool:
        services = self.status().get("services", {})
        if not {"nats", "scheduler", "gateway", "agent"} <= services.keys():
            return False
        try:
            async with httpx.AsyncClient(timeout=5) as client:
                return (await client.get(f"{self.url}/health/ready")).status_code == 200
        except httpx.HTTPError:
            return False

    @contextlib.asynccontextmanager
    async def bus(self) -> AsyncIterator[Bus]:
        """A connection of the test's own."""
        connected = await Bus.connect(NatsSettings(url=self.nats_url), "test")
        try:
            yield connected
        finally:
            await asyncio.wait_for(connected.close(), 10)


@contextlib.contextmanager
def running_stack(
    folder: Path, profile: Path, workers: int = 2, *, secure: bool = False, **environment: str
) -> Iterator[Stack]:
    stack = Stack(folder, profile, workers, secure=secure, **environment)
    try:
        stack.start()
        yield stack
    finally:
        stack.stop()


# --- clients ------------------------------------------------------------------------------------------------------


@dataclass
class Streamed:
    """All that one streamed chat call was told."""

    id: str = ""
    texts: list[str] = field(default_factory=list)  # of the chunks that had any
    finishes: list[str] = field(default_factory=list)  # of the chunks where finish_reason was set
    errors: list[dict[str, Any]] = field(default_factory=list)
    num_done: int = 0  # of [DONE]
    after_done: int = 0  # events that came behind it

    @property
    def text(self) -> str:
        return "".join(self.texts)

    @property
    def began(self) -> bool:
        """Some text has come, but not the end."""
        return bool(self.texts) and not self.ended

    @property
    def ended(self) -> bool:
        return bool(self.finishes or self.errors or self.num_done)

    def take(self, line: str) -> None:
        """A line of the event stream."""
        if not line or line.startswith(":"):
            return
        assert line.startswith("data: "), f"not an event: {line!r}"
        self.after_done += self.num_done
        data = line.removeprefix("data: ")
        if data == "[DONE]":
            self.num_done += 1
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        self.id = self.id or chunk["id"]
        assert chunk["id"] == self.id
        for choice in chunk["choices"]:
            if text := choice["delta"].get("content"):
                self.texts.append(text)
            if choice["finish_reason"] is not None:
                self.finishes.append(choice["finish_reason"])


def chat_body(model: str, prompt: str, **more: object) -> dict[str, object]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **more}


async def stream(client: httpx.AsyncClient, body: dict[str, object], into: Streamed) -> Streamed:
    """Streams a chat call to its end. `into` can be watched meanwhile."""
    async with client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            into.take(line)
    return into


def open_client(url: str) -> httpx.AsyncClient:
    """One that lets 100 calls run and waits for a minute."""
    limits = httpx.Limits(max_connections=200, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=url, timeout=httpx.Timeout(90, pool=90), limits=limits)


# --- the line to NATS ---------------------------------------------------------------------------------------------


class Proxy:
    """A TCP line to the nats-server that can be cut, or go dead without being cut."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._server: asyncio.Server | None = None
        self._open: set[asyncio.StreamWriter] = set()
        self._passes = asyncio.Event()
        self._passes.set()
        self.port = 0
        self.connections = 0  # so far

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self._passes.set()
        self.cut()
        await self._server.wait_closed()

    def cut(self) -> None:
        """Breaks all connections, both ways."""
        for writer in self._open:
            writer.transport.abort()

    def go_dead(self) -> None:
        """Nothing passes any more, and nobody is told."""
        self._passes.clear()

    def revive(self) -> None:
        """New connections pass again; old ones are broken."""
        self.cut()
        self._passes.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        self._open |= {writer, there_writer}
        try:
            await asyncio.gather(self._pass(reader, there_writer), self._pass(there_reader, writer))
        finally:
            self._open -= {writer, there_writer}
            for end in (writer, there_writer):
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._passes.wait()
                writer.write(data)
                await writer.drain()
        writer.transport.abort()
