"""An agent: keeps the workers of its node running, and tells when one dies.

The workers die with it, however it ends (`lifeline.py`), and they run in sessions of their own: an interrupt typed at
the terminal reaches the agent alone, which then asks them to drain.
"""

import asyncio
import logging
import os
import signal
import sys
import time
from typing import assert_never

from prometheus_client import Counter

from contracts import messages as m
from contracts import subjects
from services.denoiser.agent_policy import (
    AgentCommand,
    AgentEvent,
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Finish,
    Kill,
    Plan,
    Ready,
    Start,
    Started,
    StartFailed,
    StopAsked,
    Terminate,
    Tick,
    WakeAt,
)
from services.denoiser.config import AgentConfig, WorkerConfig, default_node_id, fresh_instance_id
from services.denoiser.lifeline import describe_exit
from services.runtime import Runtime, every
from services.settings import PREFIX, load_section

logger = logging.getLogger(__name__)

LOSSES = Counter("tediserve_agent_worker_exits", "Workers that exited")
AGENT_PID = f"{PREFIX}AGENT_PID"  # environment variable: whose death ends the worker


async def serve(runtime: Runtime, config: AgentConfig) -> None:
    """Keeps the workers running until asked to stop and all are gone."""
    await Agent(runtime, config).run()


class Agent:
    """The I/O around the policy."""

    def __init__(self, runtime: Runtime, config: AgentConfig) -> None:
        self._runtime, self._bus, self._config = runtime, runtime.bus, config
        self._node_id = config.node_id or default_node_id()
        self._policy = AgentPolicy(
            Plan(
                workers=config.workers,
                backoff_first_s=config.backoff_first_s,
                backoff_limit_s=config.backoff_limit_s,
                healthy_after_s=config.healthy_after_s,
                stop_limit_s=config.stop_limit_s,
            )
        )
        self._metrics_port = load_section(WorkerConfig, "worker").metrics_port  # of slot 0; the others' follow
        self._processes: dict[int, asyncio.subprocess.Process] = {}  # by slot
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Until asked to stop and all workers are gone."""
        try:
            await self._bus.subscribe(subjects.STATUS_ASK, m.StatusAsk, self._on_status_ask)
            await self._bus.subscribe("status.instance.*", m.InstanceStatus, self._on_instance_status)
            await self._bus.flush()
            self._handle(Began())
            self._runtime.spawn(every(self._config.status_every_s, self._publish_status), name="status")
            await self._runtime.until_stopped()
            self._handle(StopAsked())
            await self._finished.wait()
        finally:
            for slot in list(self._processes):
                self._signal(slot, signal.SIGKILL)

    def _handle(self, event: AgentEvent) -> None:
        for command in self._policy.handle(event, time.monotonic()):
            self._carry_out(command)

    def _on_status_ask(self, _: m.StatusAsk) -> None:
        self._runtime.spawn(self._publish_status(), name="status asked for")

    def _on_instance_status(self, status: m.InstanceStatus) -> None:
        self._handle(Ready(instance_id=status.instance_id))

    async def _publish_status(self) -> None:
        await self._bus.publish(subjects.node_status(self._node_id), self._policy.status(self._node_id, time.time()))

    # --- commands -------------------------------------------------------------------------------------------------

    def _carry_out(self, command: AgentCommand) -> None:
        match command:
            case Start():
                self._runtime.spawn(self._run_worker(command.slot), name=f"worker {command.slot}")
            case AnnounceLost():
                self._runtime.spawn(self._announce(command), name="worker lost")
            case Terminate():
                self._signal(command.slot, signal.SIGTERM)
            case Kill():
                logger.warning("worker %d has not stopped in time: killed", command.slot)
                self._signal(command.slot, signal.SIGKILL)
            case WakeAt():
                self._runtime.spawn(self._wake_at(command.at), name="wake")
            case Finish():
                self._finished.set()
            case _:
                assert_never(command)

    async def _run_worker(self, slot: int) -> None:
        instance_id = fresh_instance_id(self._node_id, slot)
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.denoiser",
                "worker",
                env=self._environment(slot, instance_id),
                start_new_session=True,
            )
        except OSError as error:
            logger.error("worker %d could not be started: %s", slot, error)
            self._handle(StartFailed(slot=slot, detail=str(error)))
            return
        self._processes[slot] = process
        self._handle(Started(slot=slot, instance_id=instance_id))
        logger.info("worker %d started as %s, process %d", slot, instance_id, process.pid)
        code = await process.wait()
        del self._processes[slot]
        LOSSES.inc()
        detail = describe_exit(code)
        logger.log(logging.INFO if code == 0 else logging.ERROR, "worker %d, %s: %s", slot, instance_id, detail)
        self._handle(Exited(slot=slot, instance_id=instance_id, detail=detail))

    def _environment(self, slot: int, instance_id: str) -> dict[str, str]:
        prefix = f"{PREFIX}WORKER_"
        return {
            **os.environ,
            AGENT_PID: str(os.getpid()),
            f"{prefix}PROFILE": self._config.profile,
            f"{prefix}INSTANCE_ID": instance_id,
            f"{prefix}NODE_ID": self._node_id,
            f"{prefix}METRICS_PORT": str(self._metrics_port and self._metrics_port + slot),
        }

    async def _announce(self, lost: AnnounceLost) -> None:
        message = m.InstanceLost(instance_id=lost.instance_id, detail=lost.detail)
        await self._bus.publish(subjects.instance_lost(lost.instance_id), message)
        await self._publish_status()

    def _signal(self, slot: int, number: signal.Signals) -> None:
        process = self._processes.get(slot)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def _wake_at(self, at: float) -> None:
        await asyncio.sleep(at - time.monotonic())
        self._handle(Tick())
