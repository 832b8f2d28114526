"""What an agent does about the instances of its node. Pure: no I/O, clock or randomness.

1. What is wanted: what the last plan says that lists this node; until there is one, what the agent was configured to
   run. An agent that follows no plan stays with the latter.
2. Each wanted instance has a slot. A slot's process runs under an instance id of its own, another one at each start.
3. A slot that is not wanted any more, or otherwise, is asked to drain and exit, and killed after `stop_limit_s`.
4. A slot is started once its devices are free: no other slot has a process on them. So no device is used twice,
   whatever the plans say. One that names devices that the node does not have, that an earlier one of the plan has, or
   whose number is not its TP degree, is not started, and says so.
5. A process that exits is announced as lost at once, whatever the reason.
6. One that exits by itself is started anew: at once the first time, then after a pause that doubles with each further
   loss, up to a limit. Who was ready for `healthy_after_s` starts again with a clean record. A wrong configuration does
   not mend itself: it waits as long as the limit says at once.
7. What a last agent has left running is in its slot from the start: it runs on if it is wanted, and is asked to drain
   if it is not, or was started with other settings.
8. Asked to stop, it wants nothing any more, and finishes when all are gone.
"""

from collections.abc import Iterable, Sequence
from typing import Literal, TypeAlias

import msgspec

from contracts import messages as m


class Patience(msgspec.Struct, frozen=True, kw_only=True):
    """How long it waits. Seconds."""

    backoff_first_s: float = 0.5
    backoff_limit_s: float = 10.0
    healthy_after_s: float = 30.0
    stop_limit_s: float = 35.0


def divide(node_id: str, workers: int, tp_degree: int, devices: Sequence[int]) -> list[m.PlannedInstance]:
    """As many instances as there are devices for, at most `workers`, each with its own."""
    return [
        m.PlannedInstance(
            slot_id=f"{node_id}-{number}",
            tp_degree=tp_degree,
            devices=list(devices[number * tp_degree : (number + 1) * tp_degree]),
        )
        for number in range(min(workers, len(devices) // tp_degree))
    ]


def share(node_id: str, workers: int) -> list[m.PlannedInstance]:
    """That many instances which share the node, with the TP degree of their profile."""
    return [m.PlannedInstance(slot_id=f"{node_id}-{number}") for number in range(workers)]


# --- events -------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the events."""


class Began(Event, frozen=True, kw_only=True):
    """The agent runs, and has seen the plan, if there is one."""


class Found(Event, frozen=True, kw_only=True):
    """A last agent has left this running. Before Began."""

    wanted: m.PlannedInstance  # as what it was started
    instance_id: str
    outdated: bool = False  # it would be started with other settings now


class PlanSeen(Event, frozen=True, kw_only=True):
    """The plan of the cluster has changed."""

    plan: m.ClusterPlan


class Started(Event, frozen=True, kw_only=True):
    """A slot's process runs."""

    slot_id: str
    instance_id: str


class StartFailed(Event, frozen=True, kw_only=True):
    """It could not even be started."""

    slot_id: str
    detail: str


class Ready(Event, frozen=True, kw_only=True):
    """An instance has said how it is: it has loaded its model. May be another node's."""

    instance_id: str


class Exited(Event, frozen=True, kw_only=True):
    """A slot's process has ended."""

    slot_id: str
    instance_id: str
    detail: str
    wrong_config: bool = False


class Tick(Event, frozen=True, kw_only=True):
    """The time that was asked for by WakeAt has come, or any other."""


class StopAsked(Event, frozen=True, kw_only=True):
    """The process shall end."""


AgentEvent: TypeAlias = Began | Found | PlanSeen | Started | StartFailed | Ready | Exited | Tick | StopAsked


# --- commands -----------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the commands."""


class Start(Command, frozen=True, kw_only=True):
    """Start the slot's process under a fresh id; tell what came of it."""

    wanted: m.PlannedInstance


class AnnounceLost(Command, frozen=True, kw_only=True):
    """Tell the scheduler that the instance is gone."""

    instance_id: str
    detail: str


class Terminate(Command, frozen=True, kw_only=True):
    """Ask the slot's process to drain and exit."""

    slot_id: str


class Kill(Command, frozen=True, kw_only=True):
    """End the slot's process."""

    slot_id: str


class WakeAt(Command, frozen=True, kw_only=True):
    """Send a Tick at this time."""

    at: float


class Finish(Command, frozen=True, kw_only=True):
    """All are gone: end the process."""


AgentCommand: TypeAlias = Start | AnnounceLost | Terminate | Kill | WakeAt | Finish

SlotState: TypeAlias = Literal["waiting", "starting", "running", "backing_off", "stopping"]


class _Slot:
    def __init__(self, wanted: m.PlannedInstance) -> None:
        self.wanted = wanted
        self.state: SlotState = "waiting"
        self.spawning = False  # a Start is under way
        self.outdated = False  # its process was started with other settings
        self.instance_id = ""  # "": no process
        self.ready_since: float | None = None
        self.losses = 0  # in a row
        self.restarts = 0
        self.start_at = 0.0  # when backing off
        self.kill_at = 0.0  # when stopping; 0: it has been told to
        self.loss = ""  # why the last process ended
        self.hindrance = ""  # why it cannot be started now

    @property
    def id(self) -> str:
        return self.wanted.slot_id

    @property
    def has_process(self) -> bool:
        return self.spawning or bool(self.instance_id)

    def report(self) -> m.InstanceState:
        return m.InstanceState(
            instance_id=self.instance_id or self.id,
            state="starting" if self.state == "waiting" else self.state,
            restarts=self.restarts,
            detail=self.hindrance or self.loss,
            slot_id=self.id,
            tp_degree=self.wanted.tp_degree,
            devices=self.wanted.devices,
            profile=self.wanted.profile,
        )


class AgentPolicy:
    """The agent's decisions. One caller: `handle` an event, carry the commands out in order."""

    def __init__(
        self,
        patience: Patience,
        configured: Iterable[m.PlannedInstance],
        *,
        node_id: str = "node",
        devices: Sequence[int] = (),
        device_kind: Literal["", "cpu", "cuda"] = "",
        planned: bool = False,
    ) -> None:
        """`configured`: to be run while no plan lists the node; `planned`: whether plans count."""
        self._patience = patience
        self._node_id, self._devices, self._device_kind, self._planned = node_id, list(devices), device_kind, planned
        self._wanted = {wanted.slot_id: wanted for wanted in configured}
        self._revision = 0
        self._slots: dict[str, _Slot] = {}
        self._began = self._stopping = self._finished = False

    def handle(self, event: AgentEvent, now: float) -> list[AgentCommand]:
        """What to do about the event."""
        commands: list[AgentCommand] = []
        match event:
            case Began():
                self._began = True
            case Found():
                self._note_found(event)
            case PlanSeen():
                self._note_plan(event.plan)
            case Started():
                self._note_started(self._slots[event.slot_id], event.instance_id)
            case StartFailed():
                commands += self._lose(self._slots[event.slot_id], event.detail, now)
            case Ready():
                self._note_ready(event.instance_id, now)
            case Exited():
                commands.append(AnnounceLost(instance_id=event.instance_id, detail=event.detail))
                commands += self._note_exit(self._slots[event.slot_id], event, now)
            case Tick():
                pass
            case StopAsked():
                self._stopping, self._wanted = True, {}
        if self._began:
            commands += self._converge(now)
        return commands

    def status(self, wall: float) -> m.NodeStatus:
        """What runs on the node; `wall`: its own clock."""
        return m.NodeStatus(
            node_id=self._node_id,
            sent_at=wall,
            instances=[slot.report() for slot in self._slots.values()],
            devices=self._devices,
            device_kind=self._device_kind,
            planned=self._planned,
            plan_revision=self._revision,
        )

    # --- what happens ---------------------------------------------------------------------------------------------

    def _note_plan(self, plan: m.ClusterPlan) -> None:
        mine = next((node for node in plan.nodes if node.node_id == self._node_id), None)
        if mine is None or not self._planned or self._stopping:
            return
        self._revision = plan.revision
        self._wanted = {wanted.slot_id: wanted for wanted in mine.instances}

    def _note_found(self, event: Found) -> None:
        assert not self._began
        slot = self._slots[event.wanted.slot_id] = _Slot(event.wanted)
        slot.state, slot.instance_id, slot.outdated = "starting", event.instance_id, event.outdated

    def _note_started(self, slot: _Slot, instance_id: str) -> None:
        slot.spawning, slot.instance_id, slot.ready_since = False, instance_id, None

    def _note_ready(self, instance_id: str, now: float) -> None:
        for slot in self._slots.values():
            if slot.instance_id == instance_id and slot.state == "starting":
                slot.state, slot.ready_since = "running", now

    def _note_exit(self, slot: _Slot, event: Exited, now: float) -> list[AgentCommand]:
        if slot.ready_since is not None and now - slot.ready_since >= self._patience.healthy_after_s:
            slot.losses = 0
        return self._lose(slot, event.detail, now, wrong_config=event.wrong_config)

    def _lose(self, slot: _Slot, detail: str, now: float, *, wrong_config: bool = False) -> list[AgentCommand]:
        slot.spawning, slot.instance_id, slot.ready_since, slot.outdated = False, "", None, False
        if slot.state == "stopping":
            del self._slots[slot.id]
            return []
        slot.losses += 1
        slot.restarts += 1
        slot.loss = detail
        pause_s = self._pause_s(slot.losses)
        if wrong_config:
            pause_s = self._patience.backoff_limit_s
            slot.loss += f": its log says what is wrong; it is tried again every {pause_s:g} s"
        if not pause_s or self._wanted.get(slot.id) != slot.wanted:
            slot.state = "waiting"
            return []
        slot.state, slot.start_at = "backing_off", now + pause_s
        return [WakeAt(at=slot.start_at)]

    def _pause_s(self, losses: int) -> float:
        if losses == 1:
            return 0.0
        doublings = min(losses - 2, 32)
        return min(self._patience.backoff_limit_s, self._patience.backoff_first_s * 2.0**doublings)

    # --- what follows ---------------------------------------------------------------------------------------------

    def _converge(self, now: float) -> list[AgentCommand]:
        commands: list[AgentCommand] = []
        for slot in list(self._slots.values()):
            commands += self._keep_or_stop(slot, now)
        taken: dict[int, str] = {}  # by the plan
        for wanted in self._wanted.values():
            slot = self._slots.setdefault(wanted.slot_id, _Slot(wanted))
            if slot.state in ("waiting", "backing_off"):
                commands += self._start_if_possible(slot, self._complaint(wanted, taken), now)
            for device in wanted.devices:
                taken.setdefault(device, wanted.slot_id)
        if any(isinstance(command, Terminate) for command in commands):
            commands.append(WakeAt(at=now + self._patience.stop_limit_s))
        if self._stopping and not self._slots and not self._finished:
            self._finished = True
            commands.append(Finish())
        return commands

    def _keep_or_stop(self, slot: _Slot, now: float) -> list[AgentCommand]:
        """Rule 3."""
        if slot.state == "stopping":
            if slot.kill_at and slot.instance_id and now >= slot.kill_at:
                slot.kill_at = 0.0
                return [Kill(slot_id=slot.id)]
            return []
        if self._wanted.get(slot.id) == slot.wanted and not slot.outdated:
            return []
        if not slot.has_process:
            del self._slots[slot.id]
        if not slot.instance_id:
            return []  # one that is just being started is stopped when it is
        slot.state, slot.kill_at = "stopping", now + self._patience.stop_limit_s
        return [Terminate(slot_id=slot.id)]

    def _start_if_possible(self, slot: _Slot, complaint: str, now: float) -> list[AgentCommand]:
        slot.hindrance = complaint or self._wait_for_devices(slot)
        if complaint:
            slot.state, slot.start_at = "backing_off", now  # until there is another plan
        elif slot.hindrance:
            slot.state = "waiting" if now >= slot.start_at else slot.state
        elif slot.state == "waiting" or now >= slot.start_at:
            slot.state, slot.spawning = "starting", True
            return [Start(wanted=slot.wanted)]
        return []

    def _wait_for_devices(self, slot: _Slot) -> str:
        """Whose devices; "": they are free."""
        devices = set(slot.wanted.devices)
        holders = [
            other.id
            for other in self._slots.values()
            if other is not slot and other.has_process and not devices.isdisjoint(other.wanted.devices)
        ]
        return f"waits for the devices of {', '.join(holders)}" if holders else ""

    def _complaint(self, wanted: m.PlannedInstance, taken: dict[int, str]) -> str:
        """Why it is not started; "": no reason (rule 4)."""
        for device in wanted.devices:
            if device not in self._devices:
                return f"the plan gives it device {device}, the node has {self._devices}"
            if device in taken:
                return f"the plan gives it device {device}, which is {taken[device]}'s"
        if wanted.devices and not wanted.tp_degree == len(set(wanted.devices)) == len(wanted.devices):
            return f"the plan gives it devices {wanted.devices} for TP degree {wanted.tp_degree}"
        return ""

    def check_invariants(self) -> None:
        """Raises AssertionError if a device has two processes (for tests)."""
        used = [device for slot in self._slots.values() if slot.has_process for device in slot.wanted.devices]
        assert len(used) == len(set(used)), f"devices in use: {used}"
