"""An agent: makes its node run what it should (`agent_policy.py`), and tells when a worker dies.

The plan is read before anything is started, and followed from then on: a plan that is seen again changes nothing.
With a `run_folder` its workers outlive it, unless it is asked to stop, and the next agent adopts them (`adoption.py`);
without one they die with it, however it ends (`lifeline.py`). They run in sessions of their own: an interrupt typed at
the terminal reaches the agent alone, which then asks them to drain.
"""

import asyncio
import contextlib
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias, assert_never

import msgspec
from prometheus_client import Counter

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services.bus import BusTimeout, NoResponder
from services.denoiser import adoption
from services.denoiser.adoption import Lifeline, Origin, Survivor
from services.denoiser.agent_policy import (
    AgentCommand,
    AgentEvent,
    AgentPolicy,
    AnnounceLost,
    Began,
    Exited,
    Finish,
    Found,
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

_DRAIN_ASK_LIMIT_S = 1.0
_INSTANCE_ID, _METRICS_PORT = f"{PREFIX}WORKER_INSTANCE_ID", f"{PREFIX}WORKER_METRICS_PORT"

_Process: TypeAlias = asyncio.subprocess.Process | Survivor


def lock_file_of(config: AgentConfig) -> Path | None:
    """What an agent of this node locks while it lives; None: its workers end with it."""
    if not config.run_folder:
        return None
    if not adoption.IS_POSSIBLE:
        logger.warning("[agent] run_folder: workers end with their agent, they can outlive it on Linux alone")
        return None
    return Path(config.run_folder).absolute() / f"agent-{config.node_id or default_node_id()}.lock"


async def serve(runtime: Runtime, config: AgentConfig, lock_file: Path | None) -> None:
    """Keeps the workers running until asked to stop and all are gone. `lock_file`: locked, or none."""
    await Agent(runtime, config, lock_file).run()


class Agent:
    """The I/O around the policy."""

    def __init__(self, runtime: Runtime, config: AgentConfig, lock_file: Path | None) -> None:
        """Raises ConfigError."""
        self._runtime, self._bus, self._config = runtime, runtime.bus, config
        self._lock_file = lock_file
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
        self._processes: dict[str, _Process] = {}  # by slot id
        self._began = False
        self._finished = asyncio.Event()

    async def run(self) -> None:
        """Until asked to stop and all workers are gone. Raises BusTimeout."""
        try:
            if self._lock_file is not None:
                self._adopt(str(self._lock_file))
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
            if self._lock_file is None:  # else the next agent adopts them
                for slot_id in list(self._processes):
                    self._signal(slot_id, signal.SIGKILL)

    def _adopt(self, lock_file: str) -> None:
        """What the last agent of this node has left running."""
        for survivor in adoption.find_survivors(lock_file):
            origin = survivor.origin
            slot_id = origin.wanted.slot_id
            assert slot_id not in self._processes, "a slot has one process, whoever started it"
            self._processes[slot_id], self._numbers[slot_id] = survivor, origin.number
            expected = _settings_in(self._environment(origin.wanted, origin.instance_id))
            outdated = _settings_in(survivor.environ) != expected or origin.lifelines != self._lifelines()
            logger.info("%s adopted, process %d%s", origin.instance_id, survivor.pid, ": outdated" if outdated else "")
            self._handle(Found(wanted=origin.wanted, instance_id=origin.instance_id, outdated=outdated))
            self._runtime.spawn(self._watch(slot_id, origin.instance_id, survivor), name=f"worker {slot_id}")

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
                self._runtime.spawn(self._ask_to_drain(command.slot_id), name="drain")
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
        await self._watch(slot_id, instance_id, process)

    async def _watch(self, slot_id: str, instance_id: str, process: _Process) -> None:
        code = await process.wait()
        del self._processes[slot_id], self._numbers[slot_id]
        LOSSES.inc()
        detail = "ended; it was adopted, and how is not known" if code is None else describe_exit(code)
        logger.log(logging.INFO if code in (0, None) else logging.ERROR, "%s: %s", instance_id, detail)
        self._handle(Exited(slot_id=slot_id, instance_id=instance_id, detail=detail, wrong_config=code == 2))

    def _environment(self, wanted: m.PlannedInstance, instance_id: str) -> dict[str, str]:
        prefix = f"{PREFIX}WORKER_"
        tp_degree = {f"{prefix}TP_DEGREE": str(wanted.tp_degree)} if wanted.tp_degree else {}
        number = self._numbers[wanted.slot_id]
        origin = Origin(
            agent_pid=os.getpid(),
            wanted=wanted,
            instance_id=instance_id,
            number=number,
            lock_file=str(self._lock_file or ""),
            lifelines=self._lifelines(),
        )
        return {
            **os.environ,
            **(environment_of(self._devices.kind, wanted.devices) if self._devices else {}),
            **tp_degree,
            adoption.ORIGIN: msgspec.json.encode(origin).decode(),
            f"{prefix}PROFILE": wanted.profile or self._config.profile,
            f"{prefix}NODE_ID": self._node_id,
            _INSTANCE_ID: instance_id,
            _METRICS_PORT: str(self._metrics_port and self._metrics_port + number),
        }

    def _lifelines(self) -> tuple[Lifeline, ...]:
        if self._lock_file is None:
            return ()
        own = Lifeline(str(self._lock_file), self._config.orphan_limit_s)
        return (own, Lifeline(self._config.lifeline)) if self._config.lifeline else (own,)

    async def _ask_to_drain(self, slot_id: str) -> None:
        process = self._processes.get(slot_id)
        if isinstance(process, Survivor):  # the last agent may have asked it too, and a second SIGTERM ends it at once
            drain = subjects.drain(process.origin.instance_id)
            with contextlib.suppress(BusTimeout, NoResponder, MalformedMessage):
                await self._bus.request(drain, m.Drain(), m.Accepted, limit_s=_DRAIN_ASK_LIMIT_S)
                return
        self._signal(slot_id, signal.SIGTERM)

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


def _settings_in(environ: Mapping[str, str]) -> dict[str, str]:
    """What a worker's environment says of how it is to work, of whatever start."""
    other = (f"{PREFIX}AGENT_", _INSTANCE_ID, _METRICS_PORT)
    return {name: value for name, value in environ.items() if name.startswith(PREFIX) and not name.startswith(other)}


def _configured(config: AgentConfig, node_id: str, devices: Devices | None) -> list[m.PlannedInstance]:
    """What to run without a plan. Raises ConfigError."""
    if devices is None:
        return share(node_id, config.workers)
    instances = divide(node_id, config.workers, load_profile(config.profile).engine.tp_degree, devices.numbers)
    if len(instances) < config.workers:
        logger.warning("%d of %d workers: there are devices for no more", len(instances), config.workers)
    return instances
