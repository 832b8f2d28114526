"""What an agent does about the workers of its node. Pure: no I/O, clock or randomness.

1. Each slot of the plan holds one worker. Each start is another instance.
2. A worker that exits is announced as lost at once, whatever the reason.
3. It is started anew: at once the first time, then after a pause that doubles with each further loss, up to a limit.
   Who was ready for `healthy_after_s` starts again with a clean record.
4. Asked to stop, it asks the workers to, kills after `stop_limit_s` those that are left, starts none, and finishes
   when all are gone.
"""

from typing import Literal, TypeAlias

import msgspec

from contracts import messages as m


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What to run and how patiently. Durations in seconds."""

    workers: int
    backoff_first_s: float = 0.5
    backoff_limit_s: float = 10.0
    healthy_after_s: float = 30.0
    stop_limit_s: float = 35.0


# --- events -------------------------------------------------------------------------------------------------------


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the events."""


class Began(Event, frozen=True, kw_only=True):
    """The agent runs."""


class Started(Event, frozen=True, kw_only=True):
    """A worker's process runs."""

    slot: int
    instance_id: str


class StartFailed(Event, frozen=True, kw_only=True):
    """It could not even be started."""

    slot: int
    detail: str


class Ready(Event, frozen=True, kw_only=True):
    """An instance has said how it is: it has loaded its model. May be another node's."""

    instance_id: str


class Exited(Event, frozen=True, kw_only=True):
    """A worker's process has ended."""

    slot: int
    instance_id: str
    detail: str


class Tick(Event, frozen=True, kw_only=True):
    """The time that was asked for by WakeAt has come, or any other."""


class StopAsked(Event, frozen=True, kw_only=True):
    """The process shall end."""


AgentEvent: TypeAlias = Began | Started | StartFailed | Ready | Exited | Tick | StopAsked


# --- commands -----------------------------------------------------------------------------------------------------


class Command(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the commands."""


class Start(Command, frozen=True, kw_only=True):
    """Start a worker under a fresh id; tell what came of it."""

    slot: int


class AnnounceLost(Command, frozen=True, kw_only=True):
    """Tell the scheduler that the instance is gone."""

    instance_id: str
    detail: str


class Terminate(Command, frozen=True, kw_only=True):
    """Ask the worker to drain and exit."""

    slot: int


class Kill(Command, frozen=True, kw_only=True):
    """End the worker's process."""

    slot: int


class WakeAt(Command, frozen=True, kw_only=True):
    """Send a Tick at this time."""

    at: float


class Finish(Command, frozen=True, kw_only=True):
    """All workers are gone: end the process."""


AgentCommand: TypeAlias = Start | AnnounceLost | Terminate | Kill | WakeAt | Finish

SlotState: TypeAlias = Literal["empty", "starting", "running", "backing_off", "stopping"]


class _Slot:
    def __init__(self, number: int) -> None:
        self.number = number
        self.state: SlotState = "empty"
        self.spawning = False  # a Start is under way
        self.instance_id = ""  # "": no process
        self.ready_since: float | None = None
        self.losses = 0  # in a row
        self.restarts = 0
        self.start_at = 0.0  # when backing off
        self.detail = ""  # of the last loss

    def start(self) -> Start:
        self.state, self.spawning = "starting", True
        return Start(slot=self.number)


class AgentPolicy:
    """The agent's decisions. One caller: `handle` an event, carry the commands out in order."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._slots = [_Slot(number) for number in range(plan.workers)]
        self._kill_at: float | None = None  # set: stopping

    def handle(self, event: AgentEvent, now: float) -> list[AgentCommand]:
        """What to do about the event."""
        match event:
            case Began():
                return [slot.start() for slot in self._slots]
            case Started():
                return self._note_started(self._slots[event.slot], event.instance_id, now)
            case StartFailed():
                self._slots[event.slot].spawning = False
                return self._lose(self._slots[event.slot], event.detail, now)
            case Ready():
                return self._note_ready(event.instance_id, now)
            case Exited():
                return self._note_exit(self._slots[event.slot], event, now)
            case Tick():
                return self._look_at_clock(now)
            case StopAsked():
                return self._stop(now)

    def status(self, node_id: str, wall: float) -> m.NodeStatus:
        """What runs on the node; `wall`: its own clock."""
        instances = [
            m.InstanceState(
                instance_id=slot.instance_id or f"{node_id}-{slot.number}",
                state=slot.state,
                restarts=slot.restarts,
                detail=slot.detail,
            )
            for slot in self._slots
            if slot.state != "empty"
        ]
        return m.NodeStatus(node_id=node_id, sent_at=wall, instances=instances)

    def _note_started(self, slot: _Slot, instance_id: str, now: float) -> list[AgentCommand]:
        slot.spawning = False
        slot.instance_id, slot.ready_since = instance_id, None
        if self._kill_at is None:
            return []
        slot.state = "stopping"
        return [Terminate(slot=slot.number)]

    def _note_ready(self, instance_id: str, now: float) -> list[AgentCommand]:
        for slot in self._slots:
            if slot.instance_id == instance_id and slot.state == "starting":
                slot.state, slot.ready_since = "running", now
        return []

    def _note_exit(self, slot: _Slot, event: Exited, now: float) -> list[AgentCommand]:
        lost = AnnounceLost(instance_id=event.instance_id, detail=event.detail)
        if slot.ready_since is not None and now - slot.ready_since >= self.plan.healthy_after_s:
            slot.losses = 0
        return [lost, *self._lose(slot, event.detail, now)]

    def _lose(self, slot: _Slot, detail: str, now: float) -> list[AgentCommand]:
        slot.instance_id, slot.ready_since, slot.detail = "", None, detail
        if self._kill_at is not None:
            slot.state = "empty"
            return self._finish_if_empty()
        slot.losses += 1
        slot.restarts += 1
        if slot.losses == 1:
            return [slot.start()]
        doublings = min(slot.losses - 2, 32)
        pause_s = min(self.plan.backoff_limit_s, self.plan.backoff_first_s * 2.0**doublings)
        slot.state, slot.start_at = "backing_off", now + pause_s
        return [WakeAt(at=slot.start_at)]

    def _look_at_clock(self, now: float) -> list[AgentCommand]:
        if self._kill_at is None:
            return [slot.start() for slot in self._slots if slot.state == "backing_off" and now >= slot.start_at]
        if now < self._kill_at:
            return []
        return [Kill(slot=slot.number) for slot in self._slots if slot.instance_id]

    def _stop(self, now: float) -> list[AgentCommand]:
        if self._kill_at is not None:
            return []
        self._kill_at = now + self.plan.stop_limit_s
        commands: list[AgentCommand] = []
        for slot in self._slots:
            if slot.instance_id:
                slot.state = "stopping"
                commands.append(Terminate(slot=slot.number))
            elif not slot.spawning:
                slot.state = "empty"
        return self._finish_if_empty() or [*commands, WakeAt(at=self._kill_at)]

    def _finish_if_empty(self) -> list[AgentCommand]:
        return [Finish()] if all(slot.state == "empty" for slot in self._slots) else []
