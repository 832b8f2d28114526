"""An agent: makes its node run what it should (`agent_policy.py`), and tells when a worker dies.

The plan is read before anything is started, and followed from then on: a plan that is seen again changes nothing.
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
from services.bus import BusTimeout
from services.denoiser.agent_policy import (
    AgentCommand,
    AgentEvent,
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Finish,
    Kill,
    Patience,
    PlanSeen,
    Ready,
    Start,
    Started,
    StartFailed,
    StopAsked,
    Terminate,
    Tick,
    WakeAt,
    divide,
    share,
)
from services.denoiser.config import AgentConfig, WorkerConfig, default_node_id, fresh_instance_id
from services.denoiser.devices import Devices, environment_of, find_devices, pin
from services.denoiser.lifeline import describe_exit
from services.profile import load_profile
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
        """Raises ConfigError."""
        self._runtime, self._bus, self._config = runtime, runtime.bus, config
        self._node_id = config.node_id or default_node_id()
        self._devices = find_devices(config.devices, os.environ) if config.planned else None
        self._policy = AgentPolicy(
            Patience(
                backoff_first_s=config.backoff_first_s,
                backoff_limit_s=config.backoff_limit_s,
                healthy_after_s=config.healthy_after_s,
                stop_limit_s=config.stop_limit_s,
            ),
            _configured(config, self._node_id, self._devices),
            node_id=self._node_id,
            devices=self._devices.numbers if self._devices else (),
            device_kind=self._devices.kind if self._devices else "",
            planned=config.planned,
        )
        self._metrics_port = load_section(WorkerConfig, "worker").metrics_port  # of number 0; the others' follow
        self._numbers: dict[str, int] = {}  # by slot id, of those with a process: the lowest that was free
        self._processes: dict[str, asyncio.subprocess.Process] = {}  # by slot id
        self._began = False
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Until asked to stop and all workers are gone. Raises BusTimeout."""
        try:
            await self._bus.subscribe(subjects.STATUS_ASK, m.StatusAsk, self._on_status_ask)
            await self._bus.subscribe("status.instance.*", m.InstanceStatus, self._on_instance_status)
            await self._bus.flush()
            if self._config.planned:
                await self._read_plan()
            self._handle(Began())
            self._began = True
            self._runtime.spawn(every(self._config.status_every_s, self._publish_status), name="status")
            await self._runtime.until_stopped()
            self._handle(StopAsked())
            await self._finished.wait()
        finally:
            for slot_id in list(self._processes):
                self._signal(slot_id, signal.SIGKILL)

    async def _read_plan(self) -> None:
        follower = await self._bus.follow(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan, self._on_plan)
        try:
            await follower.caught_up()
        except TimeoutError:
            raise BusTimeout("the plan could not be read") from None

    def _on_plan(self, plan: m.ClusterPlan, _: int) -> None:
        logger.info("plan %d: %s", plan.revision, plan.reason)
        self._handle(PlanSeen(plan=plan))
        self._runtime.spawn(self._publish_status(), name="status of a new plan")

    def _handle(self, event: AgentEvent) -> None:
        for command in self._policy.handle(event, time.monotonic()):
            self._carry_out(command)

    def _on_status_ask(self, _: m.StatusAsk) -> None:
        self._runtime.spawn(self._publish_status(), name="status asked for")

    def _on_instance_status(self, status: m.InstanceStatus) -> None:
        self._handle(Ready(instance_id=status.instance_id))

    async def _publish_status(self) -> None:
        if not self._began:
            return  # who heard that nothing runs might take it for what is wanted
        await self._bus.publish(subjects.node_status(self._node_id), self._policy.status(time.time()))

    # --- commands -------------------------------------------------------------------------------------------------

    def _carry_out(self, command: AgentCommand) -> None:
        match command:
            case Start():
                self._runtime.spawn(self._run_worker(command.wanted), name=f"worker {command.wanted.slot_id}")
            case AnnounceLost():
                self._runtime.spawn(self._announce(command), name="worker lost")
            case Terminate():
                logger.info("%s is not wanted any more: it drains", command.slot_id)
                self._signal(command.slot_id, signal.SIGTERM)
            case Kill():
                logger.warning("%s has not stopped in time: killed", command.slot_id)
                self._signal(command.slot_id, signal.SIGKILL)
            case WakeAt():
                self._runtime.spawn(self._wake_at(command.at), name="wake")
            case Finish():
                self._finished.set()
            case _:
                assert_never(command)

    async def _run_worker(self, wanted: m.PlannedInstance) -> None:
        slot_id, instance_id = wanted.slot_id, fresh_instance_id(wanted.slot_id)
        self._numbers[slot_id] = min(set(range(len(self._numbers) + 1)) - set(self._numbers.values()))
        try:
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "services.denoiser",
                "worker",
                env=self._environment(wanted, instance_id),
                start_new_session=True,
            )
        except OSError as error:
            logger.error("%s could not be started: %s", slot_id, error)
            del self._numbers[slot_id]
            self._handle(StartFailed(slot_id=slot_id, detail=str(error)))
            return
        if self._devices and self._devices.kind == "cpu" and wanted.devices:
            pin(process.pid, wanted.devices)
        self._processes[slot_id] = process
        self._handle(Started(slot_id=slot_id, instance_id=instance_id))
        logger.info("%s started, process %d, devices %s", instance_id, process.pid, wanted.devices or "shared")
        code = await process.wait()
        del self._processes[slot_id], self._numbers[slot_id]
        LOSSES.inc()
        detail = describe_exit(code)
        logger.log(logging.INFO if code == 0 else logging.ERROR, "%s: %s", instance_id, detail)
        self._handle(Exited(slot_id=slot_id, instance_id=instance_id, detail=detail, wrong_config=code == 2))

    def _environment(self, wanted: m.PlannedInstance, instance_id: str) -> dict[str, str]:
        prefix = f"{PREFIX}WORKER_"
        tp_degree = {f"{prefix}TP_DEGREE": str(wanted.tp_degree)} if wanted.tp_degree else {}
        return {
            **os.environ,
            **(environment_of(self._devices.kind, wanted.devices) if self._devices else {}),
            **tp_degree,
            AGENT_PID: str(os.getpid()),
            f"{prefix}PROFILE": wanted.profile or self._config.profile,
            f"{prefix}INSTANCE_ID": instance_id,
            f"{prefix}NODE_ID": self._node_id,
            f"{prefix}METRICS_PORT": str(self._metrics_port and self._metrics_port + self._numbers[wanted.slot_id]),
        }

    async def _announce(self, lost: AnnounceLost) -> None:
        message = m.InstanceLost(instance_id=lost.instance_id, detail=lost.detail)
        await self._bus.publish(subjects.instance_lost(lost.instance_id), message)
        await self._publish_status()

    def _signal(self, slot_id: str, number: signal.Signals) -> None:
        process = self._processes.get(slot_id)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def _wake_at(self, at: float) -> None:
        await asyncio.sleep(at - time.monotonic())
        self._handle(Tick())


def _configured(config: AgentConfig, node_id: str, devices: Devices | None) -> list[m.PlannedInstance]:
    """What to run without a plan. Raises ConfigError."""
    if devices is None:
        return share(node_id, config.workers)
    instances = divide(node_id, config.workers, load_profile(config.profile).engine.tp_degree, devices.numbers)
    if len(instances) < config.workers:
        logger.warning("%d of %d workers: there are devices for no more", len(instances), config.workers)
    return instances
