"""Which instance runs which request, and what becomes of a request whose instance is lost.

The open requests are what REQUESTS holds, less those whose record is final. In the order the code applies them:

1. The record in PROGRESS is the truth. Whoever it names as holder holds the request; a final one ends it: the holder is
   told (if somebody else ended it) and the request is purged. An unreadable record shuts its holder out: a loss.
2. A fresh scheduler first reads both streams, then asks for statuses, and places nothing before every holder has
   reported and no request waits, or `adoption_grace_s` has passed. A request that an instance reports at its current
   attempt is adopted from there.
3. An instance that its agent saw exit, or without a sign of life for `instance_silent_s`, is lost. So is a request that
   its instance has neither listed nor written about for that long, or whose assignment went unanswered for that long.
4. For a lost request the record `released` with attempt + 1 is written, which shuts the old holder out; once it stands,
   the request waits again. If its instance died, it goes only to one that has shown life since: those that died with
   the first must not cost it an attempt each. Lost `max_attempts` times, it fails as `worker_lost`.
5. A request whose time limit passed `expiry_margin_s` ago fails as `expired`. A gateway without a sign of life for
   `gateway_silent_s` loses its requests, the detached ones excepted: cancelled as `gateway_lost`.
   A record that got in between is built upon, unless it is final, or the record was to tell of a loss.
6. A request for another model than the profile's fails as `unknown_model`, one that no instance could ever hold as
   `too_long`; without any instance, all wait.
7. The others wait in one queue (`waiting.py`). The first that fits goes to the instance with room whose step latency
   with it added is lowest (`instances.py`); ties: fewest tokens held, since a flat latency profile would pile
   everything on one; then lowest id. Draining instances get nothing. Unless it is pinned it starts no higher than load
   control allows (`admission.py`), and one that has run no higher than it ran last.
8. Where somebody with an SLO is, an instance takes nobody with whom a request of as many steps as the last finished
   ones would take, at its step latency, more than `fill_share` of the shortest SLO there, the newcomer's included. Else
   all would be late together, of which most can be in time one after the other. An SLO of which a request alone takes
   more than that share cannot be kept so, and does not count. Moves do not ask for this.
   Who still waits when as many steps, at its lowest threshold and at the best step latency there is, would take longer
   than it has left is late, and goes behind the others (`waiting.py`).
9. Smaller requests may overtake one that fits nowhere now. After `max_overtakes` of them, the instance with most room
   among those that could hold it is kept for it.
10. An unanswered assignment is repeated to the same instance: it may have been accepted. Refused or certainly not
   delivered: the request may go elsewhere at the same attempt, and the instance gets nothing before its next status or
   `retry_s`. Refused as `stale_epoch`: another scheduler acts, so this one must stop.
11. With `admission = "reject"`, a newcomer that would be late even alone fails as `slo_too_short`, and one that finds
   no room and would be late after its wait as `overloaded` (`admission.py`).
Moves, whenever something changed and `move_every_s` has passed, of requests that have a boundary ahead: another block.
12. The holder is asked to release the request at its block's end, and the target keeps room for it. The record
   `released` hands it over, at the same attempt. If the target cannot take it any more, it goes wherever it fits. A
   release that is refused or unanswered is off; if it was heard all the same, the request waits as any other.
13. Off a draining instance a request moves to the cheapest one with room. Without room it finishes where it is.
14. While nobody waits, a request moves where its steps take `move_gain_share` less time, from the slowest instance on,
   the most urgent first. Each such move shortens the longer of two latencies, so they come to an end. An instance
   releases `max_moves` at once, and expects as many.
15. For each request that waits and can still be in time, one that runs and is late is released at its block's end, the
   least urgent first, and waits again. It has lost nothing: its next block recomputes anyway. `fill_share` 0: never.
"""

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import takewhile
from operator import itemgetter
from typing import Literal, TypeAlias

from msgspec.structs import replace

from contracts import messages as m
from contracts.messages import GenerateRequest, InstanceStatus, ProgressRecord
from services.costs import LatencyProfile, PassLoad, Resident, mean_pass
from services.profile import Profile
from services.scheduler.admission import cap_for, least_s, steps_at, wait_s
from services.scheduler.config import SchedulerConfig
from services.scheduler.events import (
    AskStatus,
    AssignAnswered,
    AssignReason,
    CaughtUp,
    Command,
    DrainAsked,
    Event,
    GatewaySeen,
    InstanceExited,
    LoadStateSeen,
    Purge,
    Reconnected,
    RecordSeen,
    RecordUnreadable,
    ReleaseAnswered,
    ReleaseReason,
    RequestSeen,
    SendAssign,
    SendCancel,
    SendRelease,
    StandDown,
    StatusSeen,
    Tick,
    Wait,
    WakeAt,
    WriteOvertaken,
    WriteReason,
    WriteRecord,
    WriteUnanswered,
    in_order,
)
from services.scheduler.instances import Instance, resident_of
from services.scheduler.waiting import Rank, WaitingQueue, rank_if_late, rank_of

_MAX_PAST = 4096  # records of requests that are not open, kept for those whose request arrives after them
_MAX_GONE = 4096  # ids of instances that exited, kept for statuses that arrive after the news
_MOST_STEPS = 256  # finished requests whose steps are remembered
_FEWEST_STEPS = 8  # that say something
_MAX_TARGETS = 4  # the fastest instances with room: where a request may move to without need


# --- state --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """An open request. It takes room on `instance_id` from its assignment on."""

    request: GenerateRequest
    rank: Rank
    expires_at: float
    deadline: float | None  # None also where it is late
    slo_s: float  # infinite where it has none
    arrived_at: float
    canvas_tokens: int
    load: PassLoad  # mean_pass of it
    phase: Literal["waiting", "assigning", "running", "writing"] = "waiting"
    attempt: int = 1
    record: ProgressRecord | None = None
    record_seq: int = 0
    instance_id: str = ""
    moving_to: str = ""  # running: the instance that keeps room for it, once its holder has released it
    assigned_at: float = 0.0
    maybe_held: bool = False  # assigning: a try of this assignment went unanswered
    lost_at: float = -math.inf  # when its instance died: only one seen alive since may have it
    evidence_at: float = 0.0  # running: when its instance last showed that it holds it
    pending: WriteRecord | None = None  # writing: the write under way
    overtaken: int = 0  # waiting: placements of later ones while it was the first that did not fit
    refused_by: set[str] = field(default_factory=set)  # instances that can never hold it

    @property
    def id(self) -> str:
        return self.request.request_id

    @property
    def resident(self) -> Resident:
        blocks_done = self.record.blocks_done if self.record else 0
        return resident_of(self.request, blocks_done, self.request.num_blocks)

    @property
    def has_boundary_ahead(self) -> bool:
        """Another block follows the one that it runs: until then a release comes in time."""
        blocks_done = self.record.blocks_done if self.record else 0
        return blocks_done + 1 < self.request.num_blocks

    @property
    def is_ending(self) -> bool:
        return self.phase == "writing" and self.pending is not None and self.pending.record.is_final


_Alarm: TypeAlias = Literal["assign", "expiry", "gateway", "instance", "moves", "room", "settle", "write"]
_OF_REQUESTS = ("assign", "expiry", "write")  # they are for nothing once the request has ended


class Scheduler:
    """Event in, commands out. `epoch` is this scheduler's term."""

    def __init__(self, config: SchedulerConfig, profile: Profile, latency: LatencyProfile, epoch: int) -> None:
        self.config = config
        self.epoch = epoch
        self._profile = profile
        self._latency = latency
        self._open: dict[str, _Open] = {}
        self._queue = WaitingQueue()
        self._instances: dict[str, Instance] = {}
        self._gateways: dict[str, float] = {}  # by id: last sign of life
        self._of_gateway: dict[str, dict[str, _Open]] = {}
        self._past: OrderedDict[str, RecordSeen] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._caught_up = False
        self._settled = False  # rule 2 is done with
        self._steps: deque[int] = deque(maxlen=_MOST_STEPS)  # of each of the last finished requests
        self._mean_steps = 0.0  # of them; 0: too few
        self._kept: tuple[str, str] | None = None  # rule 9: request, instance
        self._room_changed = False  # something may fit that did not
        self._joined: list[str] = []  # to the queue, in this `handle`
        self._handed_over: list[tuple[str, str]] = []  # in this `handle`: request, and the instance that it moves to
        self._balance_changed = False  # somebody may want to move who did not
        self._moves_at = 0.0  # not before it is looked for moves again
        self._moves_are_due = False  # their alarm is set
        self._load: m.LoadState | None = None
        self._load_at = -math.inf  # when it was heard
        self._alarms: list[tuple[float, _Alarm, str]] = []  # a heap; what they are for is checked when they ring
        self._lateness: list[tuple[float, Literal["deadline", "late"], str]] = []  # likewise; it matters to who waits
        self._wake_at: float | None = None
        self._commands: list[Command] = []

    @property
    def num_open(self) -> int:
        return len(self._open)

    def num_waiting(self) -> dict[str, int]:
        """Requests in the queue, by what they wait for."""
        counts = {"starting": 0, "no_instance": 0, "no_room": 0}
        reason = "starting" if not self._settled else "no_room" if self._serving() else "no_instance"
        counts[reason] = len(self._queue)
        return counts

    def num_instances(self) -> int:
        """Those that can be given requests, the draining ones included."""
        return len(self._serving())

    def handle(self, event: Event, now: float) -> list[Command]:
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """Events of one moment: the order in which they are given does not matter."""
        self._note_lateness(now)
        for event in in_order(events):
            self._apply(event, now)
        self._settle_if_due()
        if self._settled:
            self._place_handed_over(now)
            self._place_waiting(now)
            self._refuse_the_late(now)
            self._look_for_moves(now)
            self._tell_who_waits()
        self._wake_for_alarms()
        commands, self._commands = self._commands, []
        return commands

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case RecordSeen():
                self._note_record(event, now)
            case RequestSeen():
                self._note_request(event, now)
            case AssignAnswered():
                self._note_answer(event, now)
            case StatusSeen():
                self._note_status(event.status, now)
            case Tick():
                self._ring_alarms(now)
            case GatewaySeen():
                self._note_gateway(event.gateway_id, now)
            case InstanceExited():
                self._note_exit(event.instance_id, now)
            case ReleaseAnswered():
                self._note_release_answer(event, now)
            case LoadStateSeen():
                self._load, self._load_at = event.load, now
            case DrainAsked():
                if event.instance_id in self._instances:
                    self._instances[event.instance_id].draining = True
                    self._balance_changed = True
            case RecordUnreadable():
                self._note_unreadable(event, now)
            case WriteOvertaken():
                self._note_overtaken(event, now)
            case WriteUnanswered():
                self._note_write_unanswered(event)
            case CaughtUp():
                self._note_caught_up(now)
            case Reconnected():
                self._restart_silence(now)

    def _do(self, command: Command) -> None:
        self._commands.append(command)

    # --- requests and their records -------------------------------------------------------------------------------

    def _note_request(self, event: RequestSeen, now: float) -> None:
        request = event.request
        if request.request_id in self._open:
            return
        arrived_at = min(event.arrived_at, now)
        rank = rank_of(
            priority=request.priority,
            arrived_at=arrived_at,
            deadline=event.deadline,
            seq=event.seq,
            ageing_s=self.config.ageing_s,
        )
        slo_s = math.inf if event.deadline is None else event.deadline - event.arrived_at
        resident = resident_of(request, 0, request.num_blocks)
        load = mean_pass([resident], self._profile.decoding.steps_per_block)
        open_ = _Open(request, rank, event.expires_at, event.deadline, slo_s, arrived_at, request.canvas_tokens, load)
        self._open[open_.id] = open_
        self._of_gateway.setdefault(request.gateway_id, {})[open_.id] = open_
        self._note_gateway(request.gateway_id, now)
        self._set_alarm(event.expires_at + self.config.expiry_margin_s, "expiry", open_.id)
        if event.deadline is not None:
            heapq.heappush(self._lateness, (event.deadline, "deadline", open_.id))
            heapq.heappush(self._lateness, (event.deadline - self.config.fill_share * slo_s, "late", open_.id))
        self._enqueue(open_)
        past = self._past.get(open_.id)
        if past is not None:
            self._note_record(past, now)
        elif self._settled:
            self._refuse_if_hopeless(open_)

    def _note_record(self, event: RecordSeen, now: float) -> None:
        record = event.record
        open_ = self._open.get(record.request_id)
        if open_ is None:
            self._remember_past(event)
            return
        if record.gateway_id != open_.request.gateway_id or event.seq <= open_.record_seq:
            return
        open_.record, open_.record_seq = record, event.seq
        if record.is_final:
            self._close(open_, event)
            return
        ending = open_.pending
        self._follow_record(open_, record, now)
        if ending is not None and ending.record.is_final and ending.reason != "worker_lost":
            self._write(open_, ending.record.state, ending.reason)  # rule 5: built upon what got in between

    def _follow_record(self, open_: _Open, record: ProgressRecord, now: float) -> None:
        """Rule 1: the request stands where its record, which is not final, says."""
        open_.attempt = record.attempt
        if record.state == "released" or not record.holder:
            if open_.moving_to:
                self._handed_over.append((open_.id, open_.moving_to))
            self._detach(open_)
            self._enqueue(open_)
        elif record.holder in self._gone:
            self._lose(open_)
        else:
            self._attach(open_, record.holder, now)
            self._instances[record.holder].seen_at = now

    def _close(self, open_: _Open, final: RecordSeen) -> None:
        record = final.record
        assert record.state in ("finished", "cancelled", "failed")
        if open_.instance_id and record.holder != open_.instance_id:
            self._do(SendCancel(open_.id, "ended_elsewhere"))
        self._detach(open_)
        self._leave_queue(open_)
        del self._open[open_.id]
        of_gateway = self._of_gateway[open_.request.gateway_id]
        del of_gateway[open_.id]
        if not of_gateway:
            del self._of_gateway[open_.request.gateway_id]
        self._remember_past(final)
        self._room_changed = True  # also where it only waited: an instance may have been kept for it
        self._do(Purge(open_.id, record.state))

    def _remember_past(self, event: RecordSeen) -> None:
        """For a request that comes after its record. Of a final record nobody will want the tokens."""
        if event.record.state == "finished" and event.record.blocks:
            self._steps.append(sum(block.recompute_steps + block.cache_steps for block in event.record.blocks))
            enough = len(self._steps) >= _FEWEST_STEPS
            self._mean_steps = sum(self._steps) / len(self._steps) if enough else 0.0
        if event.record.is_final:
            event = RecordSeen(replace(event.record, token_ids=[], confidences=[], blocks=[]), event.seq)
        _remember(self._past, event.record.request_id, event, _MAX_PAST)

    def _note_unreadable(self, event: RecordUnreadable, now: float) -> None:
        open_ = self._open.get(event.request_id)
        if open_ is None or event.gateway_id != open_.request.gateway_id or event.seq <= open_.record_seq:
            return
        open_.record_seq = event.seq
        if open_.phase == "writing":
            self._write_again(open_)
        elif open_.phase != "waiting":
            self._lose(open_)

    # --- writing records ------------------------------------------------------------------------------------------

    def _lose(self, open_: _Open) -> None:
        """Rule 4."""
        self._detach(open_)
        if open_.attempt < self.config.max_attempts:
            self._write(open_, "released", "worker_lost", attempt=open_.attempt + 1)
        else:
            self._write(open_, "failed", "worker_lost")

    def _write(
        self,
        open_: _Open,
        state: m.State,
        reason: WriteReason,
        *,
        attempt: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """Writes on top of the last record, keeping what was achieved."""
        record = replace(
            open_.record or open_.request.first_record,
            attempt=attempt or open_.attempt,
            state=state,
            holder="",
            epoch=self.epoch,
            reason=reason,
            written_at=0.0,
            retry_after_s=retry_after_s,
        )
        self._leave_queue(open_)
        open_.phase = "writing"
        open_.pending = WriteRecord(record, open_.record_seq, reason)
        self._do(open_.pending)

    def _write_again(self, open_: _Open) -> None:
        assert open_.pending is not None
        record, reason = open_.pending.record, open_.pending.reason
        self._write(open_, record.state, reason, attempt=record.attempt, retry_after_s=record.retry_after_s)

    def _note_overtaken(self, event: WriteOvertaken, now: float) -> None:
        if event.found is not None:
            self._note_record(event.found, now)
        open_ = self._open.get(event.request_id)
        if open_ is None or open_.phase != "writing" or open_.record_seq != event.after_seq:
            return
        # what stands could not be read, or an older copy was: try again once the stream may have told
        if event.found is None:
            open_.record_seq = 0
        self._set_alarm(now + self.config.assign_limit_s, "write", open_.id)

    def _note_write_unanswered(self, event: WriteUnanswered) -> None:
        open_ = self._open.get(event.request_id)
        if open_ is not None and open_.pending is not None and open_.pending.after_seq == event.after_seq:
            self._write_again(open_)

    # --- instances ------------------------------------------------------------------------------------------------

    def _note_status(self, status: InstanceStatus, now: float) -> None:
        if status.epoch > self.epoch:
            self._do(StandDown())
            return
        if status.instance_id in self._gone:
            return
        instance = self._instance(status.instance_id, now)
        is_news = not instance.heard or instance.kv_tokens != status.kv_tokens
        instance.seen_at = now
        instance.note_status(status)
        self._compare_held(instance, status, now)
        self._room_changed = self._balance_changed = True
        if is_news and self._settled:
            self._refuse_hopeless()

    def _compare_held(self, instance: Instance, status: InstanceStatus, now: float) -> None:
        """What the instance lists against what this scheduler believes (rules 2 and 3)."""
        foreign = []
        for held in status.held:
            open_ = self._open.get(held.request_id)
            if open_ is None:
                if self._caught_up:
                    self._do(SendCancel(held.request_id, "still_listed"))
            elif open_.instance_id == instance.id:
                self._note_held(open_, held, now)
            elif self._may_adopt(open_, held, instance):
                self._attach(open_, instance.id, now)
            else:  # an old holder; the record shuts it out at its next write
                foreign.append(resident_of(held, held.blocks_done, held.blocks_done + 1))
        instance.set_foreign(foreign)
        overdue_at = now - self.config.instance_silent_s
        for open_ in self._held_by(instance):
            if open_.phase == "running" and open_.evidence_at < overdue_at:
                self._lose(open_)

    def _note_held(self, open_: _Open, held: m.Held, now: float) -> None:
        if held.attempt == open_.attempt and open_.phase in ("assigning", "running"):
            open_.phase = "running"
            open_.evidence_at = now

    def _may_adopt(self, open_: _Open, held: m.Held, instance: Instance) -> bool:
        """Assigned by an earlier scheduler, and not what the instance has just given back."""
        if open_.phase != "waiting" or held.attempt != open_.attempt:
            return False
        return open_.record is None or open_.record.holder != instance.id

    def _note_exit(self, instance_id: str, now: float) -> None:
        _remember(self._gone, instance_id, None, _MAX_GONE)
        self._lose_instance(instance_id, now)

    def _lose_instance(self, instance_id: str, now: float) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        for request_id in instance.coming:
            self._open[request_id].moving_to = ""
        holds = self._held_by(instance)
        for open_ in holds:
            if open_.phase == "writing":
                self._detach(open_)
            else:
                open_.lost_at = now
                self._lose(open_)
        if holds:
            self._do(AskStatus())  # who lives?

    def _held_by(self, instance: Instance) -> list[_Open]:
        """By arrival; without those that are on their way to it."""
        held = [self._open[request_id] for request_id in instance.residents.keys() - instance.coming]
        return sorted(held, key=lambda o: o.rank.seq)

    def _instance(self, instance_id: str, now: float) -> Instance:
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = self._instances[instance_id] = Instance(
                instance_id, now, self._latency, self._profile.decoding.steps_per_block
            )
            self._set_alarm(now + self.config.instance_silent_s, "instance", instance_id)
        return instance

    def _attach(self, open_: _Open, instance_id: str, now: float) -> None:
        """The instance holds the request, as far as anybody knows."""
        if open_.instance_id != instance_id:
            self._detach(open_)
        self._leave_queue(open_)
        open_.phase = "running"
        open_.pending = None
        open_.instance_id = instance_id
        open_.evidence_at = now
        self._instance(instance_id, now).hold(open_.id, open_.resident, open_.slo_s)

    def _detach(self, open_: _Open) -> None:
        """No instance holds it, nor keeps room for it."""
        for instance_id in (open_.instance_id, open_.moving_to):
            instance = self._instances.get(instance_id)
            if instance is not None:
                instance.drop(open_.id)
                self._room_changed = self._balance_changed = True
        open_.instance_id = open_.moving_to = ""

    # --- the queue and placement ----------------------------------------------------------------------------------

    def _enqueue(self, open_: _Open) -> None:
        self._leave_queue(open_)
        open_.phase = "waiting"
        open_.pending = None
        self._queue.add(open_.rank, open_.id)
        self._joined.append(open_.id)
        self._room_changed = True

    def _leave_queue(self, open_: _Open) -> None:
        if self._queue.holds(open_.rank, open_.id):
            self._queue.remove(open_.rank, open_.id)
            self._balance_changed = True

    def _tell_who_waits(self) -> None:
        for request_id in self._joined:
            open_ = self._open.get(request_id)
            if open_ is not None and open_.phase == "waiting":
                self._do(Wait(request_id, "no_room" if self._serving() else "no_instance"))
        self._joined.clear()

    def _refuse_hopeless(self) -> None:
        for request_id in list(self._queue):
            self._refuse_if_hopeless(self._open[request_id])

    def _refuse_if_hopeless(self, open_: _Open) -> None:
        """Rule 6."""
        if open_.request.model != self._profile.model:
            self._write(open_, "failed", "unknown_model")
            return
        if self._is_slo_too_short(open_):
            self._write(open_, "failed", "slo_too_short")
            return
        largest_kv = max((i.kv_tokens for i in self._serving() if i.id not in open_.refused_by), default=0)
        most = min(self._profile.limits.max_context_tokens, self._profile.engine.kv_tokens or largest_kv)
        if any(self._serving()) and (not largest_kv or open_.canvas_tokens > most):
            self._write(open_, "failed", "too_long")

    def _serving(self) -> list[Instance]:
        return [i for i in self._instances.values() if i.heard and i.model == self._profile.model]

    def _place_waiting(self, now: float) -> None:
        """Rules 7 and 8."""
        if not self._room_changed:
            return
        self._room_changed = False
        if not len(self._queue):
            return
        self._place_kept(now)
        first_blocked: _Open | None = None
        place = 0  # in the queue: who is assigned leaves it, so that the next one comes to the same place
        room: int | None = None  # the largest; None: to be looked for
        while place < len(self._queue):
            room = self._largest_room(now) if room is None else room
            if not room:
                break
            open_ = self._open[self._queue.at(place)]
            expired = now >= open_.expires_at
            instance = self._cheapest(open_, now) if open_.canvas_tokens <= room and not expired else None
            if instance is None:
                first_blocked = first_blocked or (None if expired else open_)
                place += 1
                continue
            self._assign(open_, instance, now)
            if first_blocked is not None:
                self._count_overtaking(first_blocked)
            room = None
        self._make_way(now)

    def _place_handed_over(self, now: float) -> None:
        """Rule 12: to the instance that has kept room for it."""
        for request_id, instance_id in self._handed_over:
            open_ = self._open.get(request_id)
            if open_ is not None and open_.phase == "waiting" and now < open_.expires_at:
                target = [i for i in self._fitting(open_, now) if i.id == instance_id]
                if target:
                    self._assign(open_, target[0], now, moved=True)
        self._handed_over.clear()

    def _place_kept(self, now: float) -> None:
        """The request that an instance is kept for comes first, wherever it fits."""
        if self._kept is None:
            return
        open_, instance = self._open.get(self._kept[0]), self._instances.get(self._kept[1])
        if open_ is None or open_.phase != "waiting" or now >= open_.expires_at:
            self._kept = None
            return
        if instance is None or instance.draining or instance.id in open_.refused_by:
            self._kept = None
        cheapest = self._cheapest(open_, now)
        if cheapest is not None:
            self._kept = None
            self._assign(open_, cheapest, now)

    def _count_overtaking(self, blocked: _Open) -> None:
        if self._kept is not None:
            return
        blocked.overtaken += 1
        if blocked.overtaken < self.config.max_overtakes:
            return
        could_hold = [
            i
            for i in self._serving()
            if i.kv_tokens >= blocked.canvas_tokens and not i.draining and i.id not in blocked.refused_by
        ]
        if could_hold:
            self._kept = blocked.id, min(could_hold, key=lambda i: (i.tokens - i.kv_tokens, i.id)).id

    def _open_to(self, request_id: str) -> list[Instance]:
        """The instances that are not kept for another request."""
        if self._kept is None or self._kept[0] == request_id:
            return self._serving()
        return [instance for instance in self._serving() if instance.id != self._kept[1]]

    def _largest_room(self, now: float) -> int:
        """The largest canvas, in tokens, that fits somewhere now."""
        largest = 0
        for instance in self._open_to(""):
            room = instance.room(now)
            if room > largest and self._has_time(instance, instance.step_ms_with_one_more):
                largest = room
        return largest

    def _cheapest(self, open_: _Open, now: float) -> Instance | None:
        """Where its steps would be shortest (rules 7 and 8)."""
        return self._fastest(open_, self._fitting(open_, now), lambda i, ms: self._has_time(i, ms, open_.slo_s))

    def _fastest(
        self,
        open_: _Open,
        among: Iterable[Instance],
        is_good: Callable[[Instance, float], bool] = lambda instance, step_ms: True,
    ) -> Instance | None:
        """Rule 7. `is_good`: whether an instance will do with steps of so many milliseconds."""
        best, best_rank = None, (math.inf, 0, "")
        # No request makes steps shorter: from where they are longer without it than elsewhere with it, none is better.
        for step_ms, instance in sorted(((i.step_ms, i) for i in among), key=itemgetter(0)):
            if step_ms > best_rank[0]:
                break
            rank = (instance.step_ms_with(open_.load), instance.tokens, instance.id)
            if rank < best_rank and is_good(instance, rank[0]):
                best, best_rank = instance, rank
        return best

    def _has_time(self, instance: Instance, step_ms: float, slo_s: float = math.inf) -> bool:
        """Rule 8: whether steps may be that long there, with one more that has this SLO."""
        fill_share = self.config.fill_share
        if not fill_share or not instance.residents:
            return True
        mean_run_s = self._mean_steps / 1000  # times milliseconds a step
        least_slo_s = mean_run_s * instance.alone_ms / fill_share
        shortest_s = instance.shortest_slo_s(least_slo_s)
        if shortest_s == math.inf:
            return True
        if slo_s >= least_slo_s:
            shortest_s = min(shortest_s, slo_s)
        return mean_run_s * step_ms <= fill_share * shortest_s

    def _fitting(self, open_: _Open, now: float, among: Iterable[Instance] | None = None) -> list[Instance]:
        """Other instances than its own that can take it now."""
        return [
            instance
            for instance in (self._open_to(open_.id) if among is None else among)
            if instance.room(now) >= open_.canvas_tokens
            and instance.id not in open_.refused_by
            and instance.id != open_.instance_id
            and instance.seen_at > open_.lost_at
        ]

    def _assign(self, open_: _Open, instance: Instance, now: float, *, moved: bool = False) -> None:
        self._leave_queue(open_)
        open_.phase = "assigning"
        open_.instance_id = instance.id
        open_.assigned_at = now
        open_.maybe_held = False
        open_.overtaken = 0
        instance.hold(open_.id, open_.resident, open_.slo_s)
        if open_.record is None:
            self._send_assign(open_, "new", now)
        elif moved:
            self._send_assign(open_, "moved", now)
        else:
            self._send_assign(open_, "worker_lost" if open_.record.reason == "worker_lost" else "released", now)

    def _send_assign(self, open_: _Open, reason: AssignReason, now: float) -> None:
        assign = m.Assign(
            epoch=self.epoch,
            attempt=open_.attempt,
            request=open_.request,
            threshold=self._first_threshold(open_, now),
            resume=open_.record,
            from_seq=open_.record_seq,
        )
        self._do(SendAssign(open_.instance_id, assign, reason))

    def _first_threshold(self, open_: _Open, now: float) -> float:
        """Until the controller says otherwise (rule 7)."""
        if open_.request.threshold is not None:
            return open_.request.threshold
        threshold = self._profile.decoding.threshold
        load = self._load_now(now)
        if load is not None:
            threshold = min(threshold, cap_for(load, open_.request.priority, threshold))
        if open_.record is not None and open_.record.blocks:
            threshold = min(threshold, open_.record.blocks[-1].mean_threshold)
        return threshold

    def _load_now(self, now: float) -> m.LoadState | None:
        """None: the last one is too old."""
        return self._load if now - self._load_at <= self.config.load_silent_s else None

    def _note_answer(self, event: AssignAnswered, now: float) -> None:
        """Rule 10."""
        open_ = self._open.get(event.request_id)
        if open_ is None:
            if isinstance(event.answer, m.Accepted):
                self._do(SendCancel(event.request_id, "accepted_too_late"))
            return
        is_current = (open_.instance_id, open_.attempt) == (event.instance_id, event.attempt)
        instance = self._instances.get(event.instance_id)
        if instance is None or open_.phase != "assigning" or not is_current:
            return
        match event.answer:
            case m.Accepted():
                instance.seen_at = now
                open_.phase = "running"
                open_.evidence_at = now
            case m.Refused(reason=reason):
                instance.seen_at = now
                self._note_refusal(open_, instance, reason, now)
            case "undelivered" if not open_.maybe_held:
                self._take_back(open_, instance, now)
            case "undelivered":  # an earlier try may have been accepted; this one came back at once
                self._set_alarm(now + self.config.assign_limit_s, "assign", open_.id)
            case "unanswered":
                open_.maybe_held = True
                self._repeat_assign(open_, now)

    def _note_refusal(self, open_: _Open, instance: Instance, reason: str, now: float) -> None:
        match reason:
            case "stale_epoch":
                self._do(StandDown())
            case "bad_request":
                self._detach(open_)
                self._write(open_, "failed", "engine_error")
            case "too_long":
                open_.refused_by.add(instance.id)
                self._detach(open_)
                self._enqueue(open_)
                self._refuse_if_hopeless(open_)
            case "draining":
                instance.draining = True
                self._take_back(open_, instance, now)
            case _:
                self._take_back(open_, instance, now)

    def _take_back(self, open_: _Open, instance: Instance, now: float) -> None:
        """Certainly not accepted: it may go elsewhere, and the instance gets nothing for a moment."""
        self._detach(open_)
        instance.closed_until = now + self.config.retry_s
        self._set_alarm(instance.closed_until, "room", instance.id)
        self._enqueue(open_)

    def _repeat_assign(self, open_: _Open, now: float) -> None:
        if now - open_.assigned_at > self.config.instance_silent_s:
            open_.lost_at = now
            self._lose(open_)
            self._do(AskStatus())
        else:
            self._send_assign(open_, "unanswered", now)

    # --- admission ------------------------------------------------------------------------------------------------

    def _refuse_the_late(self, now: float) -> None:
        """Rule 11, of those that have just joined the queue and found no room."""
        if self.config.admission != "reject" or not self._serving():
            return
        load = self._load_now(now)
        for request_id in self._joined:
            open_ = self._open.get(request_id)
            if open_ is not None and open_.phase == "waiting" and open_.record is None and open_.deadline is not None:
                wait = 0.0 if load is None else wait_s(load, self._queue.place_of(open_.rank, request_id))
                late_s = now + wait + self._least_s(open_) - open_.deadline
                if late_s > 0:
                    self._write(open_, "failed", "overloaded", retry_after_s=late_s)

    def _is_slo_too_short(self, open_: _Open) -> bool:
        """Rule 11: from its arrival on it would have had too little time, even alone."""
        request = open_.request
        if self.config.admission != "reject" or request.deadline_at is None or open_.record is not None:
            return False
        return request.deadline_at - request.created_at < self._least_s(open_)

    def _least_s(self, open_: _Open) -> float:
        return least_s(open_.request, self._profile.decoding, self._latency, self._serving())

    # --- moves ----------------------------------------------------------------------------------------------------

    def _look_for_moves(self, now: float) -> None:
        if not self._balance_changed:
            return
        if now < self._moves_at:
            if not self._moves_are_due:
                self._moves_are_due = True
                self._set_alarm(self._moves_at, "moves", "")
            return
        self._balance_changed = self._moves_are_due = False
        serving = self._serving()
        if len(serving) < 2:
            return
        self._moves_at = now + self.config.move_every_s
        for instance in sorted(serving, key=lambda i: i.id):
            if instance.draining:
                self._empty(instance, now)
        if not len(self._queue):
            self._even_out(now)

    def _empty(self, instance: Instance, now: float) -> None:
        """Rule 13."""
        for open_ in self._movable(instance, now):
            target = self._fastest(open_, self._fitting(open_, now))
            if target is not None:
                self._move(open_, instance, target, "drain")

    def _even_out(self, now: float) -> None:
        """Rule 14."""
        slowest_first = sorted(self._serving(), key=lambda i: (-i.step_ms, i.id))
        targets = self._targets(now)
        for instance in slowest_first:
            if not targets or self._too_slow(targets[0].step_ms, instance):
                return  # nobody gains by moving, here or on the faster ones
            for open_ in self._movable(instance, now) if not instance.draining else ():
                if len(instance.leaving) >= self.config.max_moves:
                    break
                target = self._fastest(open_, self._fitting(open_, now, targets))
                if target is not None and not self._too_slow(target.step_ms_with(open_.load), instance):
                    self._move(open_, instance, target, "faster")
                    targets = self._targets(now)

    def _make_way(self, now: float) -> None:
        """Rule 15."""
        in_time = takewhile(lambda open_: open_.deadline is not None, map(self._open.__getitem__, self._queue))
        wanted = sum(1 for _ in in_time) if self.config.fill_share else 0
        if not wanted:
            return
        serving = self._serving()
        wanted -= sum(len(instance.leaving) for instance in serving)
        if wanted <= 0:
            return
        late = [
            open_
            for open_ in self._open.values()
            if open_.deadline is None and open_.slo_s < math.inf and _is_movable(open_, now)
        ]
        by_id = {instance.id: instance for instance in serving}
        late = [o for o in late if o.instance_id in by_id and o.id not in by_id[o.instance_id].leaving]
        for open_ in sorted(late, key=lambda o: o.rank, reverse=True)[:wanted]:
            self._release(open_, self._instances[open_.instance_id], "late")

    def _too_slow(self, step_ms: float, instance: Instance) -> bool:
        """Steps of that length are no reason to leave the instance."""
        return step_ms >= (1 - self.config.move_gain_share) * instance.step_ms

    def _targets(self, now: float) -> list[Instance]:
        """The fastest instances with room."""
        able = [i for i in self._open_to("") if i.room(now) > 0 and len(i.coming) < self.config.max_moves]
        return sorted(able, key=lambda i: (i.step_ms, i.tokens, i.id))[:_MAX_TARGETS]

    def _movable(self, instance: Instance, now: float) -> list[_Open]:
        """Of those that it holds, the most urgent first."""
        return sorted((o for o in self._held_by(instance) if _is_movable(o, now)), key=lambda o: o.rank)

    def _move(self, open_: _Open, source: Instance, target: Instance, reason: ReleaseReason) -> None:
        """Rule 12."""
        open_.moving_to = target.id
        target.expect(open_.id, open_.resident, open_.slo_s)
        self._release(open_, source, reason)

    def _release(self, open_: _Open, source: Instance, reason: ReleaseReason) -> None:
        source.let_go(open_.id)
        release = m.Release(epoch=self.epoch, attempt=open_.attempt, request_id=open_.id)
        self._do(SendRelease(source.id, release, reason))

    def _note_release_answer(self, event: ReleaseAnswered, now: float) -> None:
        """Rule 12."""
        open_, instance = self._open.get(event.request_id), self._instances.get(event.instance_id)
        if instance is not None and not isinstance(event.answer, str):
            instance.seen_at = now
        match event.answer:
            case m.Accepted():
                return
            case m.Refused(reason="stale_epoch"):
                self._do(StandDown())
                return
        is_current = open_ is not None and (open_.instance_id, open_.attempt) == (event.instance_id, event.attempt)
        if open_ is not None and instance is not None and is_current:
            self._stay(open_, instance)

    def _stay(self, open_: _Open, instance: Instance) -> None:
        """It does not move after all."""
        instance.keep(open_.id)
        if open_.moving_to:
            self._instances[open_.moving_to].drop(open_.id)
            open_.moving_to = ""
        self._room_changed = self._balance_changed = True

    # --- start, time and silence ----------------------------------------------------------------------------------

    def _note_caught_up(self, now: float) -> None:
        self._caught_up = True
        self._restart_silence(now)
        self._do(AskStatus())
        self._settle_if_due()
        if not self._settled:
            self._set_alarm(now + self.config.adoption_grace_s, "settle", "")

    def _settle_if_due(self) -> None:
        """Rule 2, where nobody is missing. The alarm `settle` does it else."""
        if self._settled or not self._caught_up or len(self._queue):
            return
        if all(instance.heard for instance in self._instances.values() if instance.residents):
            self._settle()

    def _settle(self) -> None:
        if not self._settled:
            self._settled = True
            self._room_changed = True
            self._refuse_hopeless()

    def _restart_silence(self, now: float) -> None:
        for instance in self._instances.values():
            instance.seen_at = now
        for gateway_id in self._gateways:
            self._gateways[gateway_id] = now
        for open_ in self._open.values():
            open_.evidence_at = now

    def _note_gateway(self, gateway_id: str, now: float) -> None:
        if gateway_id not in self._gateways:
            self._set_alarm(now + self.config.gateway_silent_s, "gateway", gateway_id)
        self._gateways[gateway_id] = now

    def _set_alarm(self, at: float, alarm: _Alarm, key: str) -> None:
        heapq.heappush(self._alarms, (at, alarm, key))

    def _wake_for_alarms(self) -> None:
        if not self._caught_up:
            return
        while self._alarms and self._alarms[0][1] in _OF_REQUESTS and self._alarms[0][2] not in self._open:
            heapq.heappop(self._alarms)
        heaps = (self._alarms, self._lateness) if len(self._queue) else (self._alarms,)
        wake_at = min([heap[0][0] for heap in heaps if heap], default=math.inf)
        if wake_at < (math.inf if self._wake_at is None else self._wake_at):
            self._wake_at = wake_at
            self._do(WakeAt(wake_at))

    def _note_lateness(self, now: float) -> None:
        """Rule 8. Where nobody waits, nobody needs to know before the next event."""
        while self._caught_up and self._lateness and self._lateness[0][0] <= now:
            _, what, request_id = heapq.heappop(self._lateness)
            open_ = self._open.get(request_id)
            if open_ is not None and what == "deadline":
                self._forget_deadline(open_)
            elif open_ is not None:
                self._check_late(open_, now)

    def _ring_alarms(self, now: float) -> None:
        if not self._caught_up:  # rule 2: what is known so far is no ground to act on
            return
        self._wake_at = None
        while self._alarms and self._alarms[0][0] <= now:
            _, alarm, key = heapq.heappop(self._alarms)
            match alarm:
                case "instance":
                    self._check_instance(key, now)
                case "gateway":
                    self._check_gateway(key, now)
                case "settle":
                    self._settle()
                case "room":
                    self._room_changed = True
                case "moves":
                    self._moves_are_due = False  # `handle` looks for them
                case "assign" | "expiry" | "write":
                    if key in self._open:
                        self._check_request(self._open[key], alarm, now)

    def _check_instance(self, instance_id: str, now: float) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        lost_at = instance.seen_at + self.config.instance_silent_s
        if lost_at > now:
            self._set_alarm(lost_at, "instance", instance_id)
        else:
            self._lose_instance(instance_id, now)

    def _check_gateway(self, gateway_id: str, now: float) -> None:
        lost_at = self._gateways[gateway_id] + self.config.gateway_silent_s
        if lost_at > now:
            self._set_alarm(lost_at, "gateway", gateway_id)
            return
        del self._gateways[gateway_id]
        theirs = self._of_gateway.get(gateway_id, {}).values()
        for open_ in sorted(theirs, key=lambda o: o.rank.seq):
            if not open_.request.detached and not open_.is_ending:
                self._write(open_, "cancelled", "gateway_lost")

    def _check_request(self, open_: _Open, alarm: Literal["assign", "expiry", "write"], now: float) -> None:
        if alarm == "expiry" and not open_.is_ending:
            self._write(open_, "failed", "expired")
        elif alarm == "assign" and open_.phase == "assigning":
            self._repeat_assign(open_, now)
        elif alarm == "write" and open_.phase == "writing":
            self._write_again(open_)

    def _check_late(self, open_: _Open, now: float) -> None:
        """Rule 8, of one that waits."""
        if open_.phase != "waiting" or open_.deadline is None:
            return
        decoding = self._profile.decoding
        fewest = steps_at(open_.request.threshold or open_.request.floor, decoding) / steps_at(
            decoding.threshold, decoding
        )
        step_ms = min((i.step_ms_with(open_.load) for i in self._serving() if not i.draining), default=0.0)
        late_at = open_.deadline - fewest * self._mean_steps * step_ms / 1000
        if late_at <= now:
            self._forget_deadline(open_)
        else:
            heapq.heappush(self._lateness, (late_at, "late", open_.id))

    def _forget_deadline(self, open_: _Open) -> None:
        """It has passed, or is certain to pass: `waiting.py`, rule 3."""
        if open_.deadline is None:
            return
        is_waiting = self._queue.holds(open_.rank, open_.id)
        self._leave_queue(open_)
        open_.deadline = None
        open_.rank = rank_if_late(
            open_.rank, arrived_at=open_.arrived_at, expires_at=open_.expires_at, ageing_s=self.config.ageing_s
        )
        if is_waiting:
            self._queue.add(open_.rank, open_.id)
            self._room_changed = True  # others are before it now

    # --- for tests ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        self._queue.check_invariants()
        waiting = {id_ for id_, o in self._open.items() if o.phase == "waiting"}
        assert set(self._queue) == waiting
        for open_ in self._open.values():
            assert (open_.pending is not None) == (open_.phase == "writing")
            assert open_.phase in ("waiting", "writing") or open_.instance_id
            assert not open_.instance_id or open_.id in self._instances[open_.instance_id].residents
            assert open_.phase != "waiting" or not open_.instance_id
            assert not open_.moving_to or open_.id in self._instances[open_.moving_to].coming
            assert not open_.moving_to or open_.moving_to != open_.instance_id
        for instance in self._instances.values():
            instance.check_invariants()
            assert all(open_.instance_id == instance.id for open_ in self._held_by(instance))
            assert all(self._open[id_].moving_to == instance.id for id_ in instance.coming)
        assert not self._commands


def _is_movable(open_: _Open, now: float) -> bool:
    return open_.phase == "running" and not open_.moving_to and open_.has_boundary_ahead and now < open_.expires_at


def _remember(kept: OrderedDict, key: str, value: object, most: int) -> None:  # type: ignore[type-arg]
    kept[key] = value
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
