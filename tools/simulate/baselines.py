"""Schedulers to compare with, in the place of the live one: what they hear and say is the same.

All give a request the threshold it keeps to its end, know an instance's load as the tokens of all canvases that it has
or will get, and break ties by the lowest id.
1. `INFaaS`: a request goes to the least loaded instance on its arrival, and waits there until it fits: first in,
   first out, by instance.
2. `Llumnix`: requests wait in one queue, first in, first out; the first goes to the least loaded instance on which it
   fits, once there is one. At each block's end the request is offered to the least loaded instance on which it fits: it
   moves at its next block's end if even with it that one has less than its own has now. One request at a time moves
   away from an instance, and one to it.
3. Where `drop_late` is set, the first in a queue whose deadline has passed is dropped: failed, as `expired`.
4. Thresholds: `Fixed`, one for all; `Proteus`: a mixture that is chosen anew each period for the rate of arrivals.
Nothing is ever lost in the simulator, so silence and attempts are not judged; and an instance that has room says yes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement
from typing import Literal, NamedTuple, Protocol

from msgspec.structs import replace

from contracts import messages as m
from contracts.messages import GenerateRequest, ProgressRecord
from services.scheduler import events as e

_EPOCH = 1
_RATE_WINDOW_S = 10.0


# --- thresholds ---------------------------------------------------------------------------------------------------


class Thresholds(Protocol):
    def choose(self, now: float) -> float:
        """For a request that arrives now."""


class Fixed:
    """The same for all."""

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold

    def choose(self, now: float) -> float:
        return self._threshold


class Variant(NamedTuple):
    """A threshold as Proteus knows it, from a profile made before."""

    threshold: float
    accuracy: float
    work_s: float  # instance-seconds that a request takes


class Proteus:
    """The most accurate mixture whose work, at the rate of the last `window_s` times `headroom`, the instances can do.

    The best mixture has two thresholds at most (two constraints), so pairs are tried. If none can do it: the cheapest.
    Requests get them in turn, so that the shares are kept as closely as whole requests allow.
    """

    def __init__(
        self, variants: Sequence[Variant], num_instances: int, *, period_s: float = 1.0, headroom: float = 1.05
    ) -> None:
        self._variants, self._num_instances = variants, num_instances
        self._period_s, self._headroom = period_s, headroom
        self._arrivals: deque[float] = deque()  # of the last window
        self._first_at: float | None = None
        self._chosen_at = -period_s
        self._shares: dict[float, float] = {}  # by threshold
        self._owed: dict[float, float] = {}  # requests, by threshold

    def choose(self, now: float) -> float:
        self._arrivals.append(now)
        self._first_at = now if self._first_at is None else self._first_at
        while self._arrivals[0] <= now - _RATE_WINDOW_S:
            self._arrivals.popleft()
        if now >= self._chosen_at + self._period_s:
            self._chosen_at = now
            self._shares = self.mixture(self.rate(now))
        for threshold, share in self._shares.items():
            self._owed[threshold] = self._owed.get(threshold, 0.0) + share
        chosen = max(self._shares, key=lambda threshold: (self._owed[threshold], threshold))
        self._owed[chosen] -= 1.0
        return chosen

    def rate(self, now: float) -> float:
        """Requests per second. In the beginning over the time since the first."""
        assert self._first_at is not None
        return len(self._arrivals) / min(_RATE_WINDOW_S, max(now - self._first_at, 1.0))

    def mixture(self, rate: float) -> dict[float, float]:
        """Shares of thresholds, for requests that come at this rate."""
        affordable_s = self._num_instances / (rate * self._headroom)  # of each request
        best: tuple[float, dict[float, float]] | None = None
        for first, second in combinations_with_replacement(sorted(self._variants, key=lambda v: v.work_s), 2):
            if first.work_s > affordable_s:
                continue
            share = 1.0  # of the costlier one
            if second.work_s > affordable_s:
                share = (affordable_s - first.work_s) / (second.work_s - first.work_s)
            accuracy = first.accuracy + share * (second.accuracy - first.accuracy)
            if best is None or accuracy > best[0]:
                shares = {first.threshold: 1 - share, second.threshold: share}
                best = (
                    accuracy,
                    {threshold: part for threshold, part in shares.items() if part > 0} or {second.threshold: 1.0},
                )
        return best[1] if best else {min(self._variants, key=lambda v: v.work_s).threshold: 1.0}


# --- placement ----------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """An open request. `instance`: where it is, or will be."""

    request: GenerateRequest
    canvas_tokens: int
    threshold: float
    deadline: float | None = None
    phase: Literal["waiting", "assigning", "running", "moving", "dropped"] = "waiting"
    instance: "_Instance | None" = None
    target: "_Instance | None" = None  # moving: where to
    record: ProgressRecord | None = None
    record_seq: int = 0

    @property
    def id(self) -> str:
        return self.request.request_id


class _Instance:
    """An instance, as far as it bears on its load."""

    def __init__(self, status: m.InstanceStatus) -> None:
        self.id, self.max_requests, self.kv_tokens = status.instance_id, status.max_requests, status.kv_tokens
        self.queue: deque[_Open] = deque()  # bound to it
        self.holds: dict[str, _Open] = {}  # those that move here among them
        self.held_tokens = self.queued_tokens = 0
        self.moves_away = self.moves_here = False

    @property
    def tokens(self) -> int:
        """Of all that it has or will get."""
        return self.held_tokens + self.queued_tokens

    def enqueue(self, open_: _Open) -> None:
        self.queue.append(open_)
        self.queued_tokens += open_.canvas_tokens

    def dequeue(self) -> _Open:
        open_ = self.queue.popleft()
        self.queued_tokens -= open_.canvas_tokens
        return open_

    def hold(self, open_: _Open) -> None:
        if open_.id not in self.holds:
            self.holds[open_.id] = open_
            self.held_tokens += open_.canvas_tokens

    def drop(self, open_: _Open) -> None:
        if self.holds.pop(open_.id, None) is not None:
            self.held_tokens -= open_.canvas_tokens

    def fits(self, open_: _Open) -> bool:
        return len(self.holds) < self.max_requests and self.held_tokens + open_.canvas_tokens <= self.kv_tokens


class LeastLoaded:
    """INFaaS (`binds`) and Llumnix (not `binds`; `migrate`): event in, commands out."""

    def __init__(self, thresholds: Thresholds, *, binds: bool, migrate: bool, drop_late: bool = False) -> None:
        self._thresholds, self._binds, self._migrate, self._drop_late = thresholds, binds, migrate, drop_late
        self._open: dict[str, _Open] = {}
        self._instances: dict[str, _Instance] = {}
        self._queue: deque[_Open] = deque()  # of who is bound to no instance
        self._commands: list[e.Command] = []

    def handle(self, event: e.Event, now: float) -> list[e.Command]:
        match event:
            case e.RequestSeen():
                self._note_request(event, now)
            case e.RecordSeen():
                self._note_record(event)
            case e.StatusSeen(status=status):
                if status.instance_id not in self._instances:
                    self._instances[status.instance_id] = _Instance(status)
            case e.AssignAnswered():
                self._note_assigned(event)
            case e.ReleaseAnswered(answer=m.Refused()):
                self._stop_moving(self._open.get(event.request_id))
            case _:
                return []  # it bears on nothing here
        self._place(now)
        commands, self._commands = self._commands, []
        return commands

    def _note_request(self, event: e.RequestSeen, now: float) -> None:
        request = event.request
        if request.request_id in self._open:
            return
        pin = request.threshold
        threshold = self._thresholds.choose(now) if pin is None else pin
        open_ = _Open(request, request.canvas_tokens, threshold, event.deadline)
        self._open[open_.id] = open_
        self._queue.append(open_)

    # --- the queues -----------------------------------------------------------------------------------------------

    def _place(self, now: float) -> None:
        if self._binds and self._instances:
            while self._queue:
                self._least_loaded().enqueue(self._queue.popleft())
        for instance in self._instances.values():
            while instance.queue and self._is_late(instance.queue[0], now):
                self._drop(instance.dequeue())
            while instance.queue and instance.fits(instance.queue[0]):
                self._assign(instance.dequeue(), instance)
        while self._queue and self._is_late(self._queue[0], now):
            self._drop(self._queue.popleft())
        while self._queue and (target := self._least_loaded_with_room(self._queue[0])):
            self._assign(self._queue.popleft(), target)

    def _is_late(self, open_: _Open, now: float) -> bool:
        return self._drop_late and open_.deadline is not None and now > open_.deadline

    def _drop(self, open_: _Open) -> None:
        """Rule 3."""
        open_.phase = "dropped"
        record = replace(
            open_.record or open_.request.first_record, state="failed", holder="", epoch=_EPOCH, reason="expired"
        )
        self._commands.append(e.WriteRecord(record, open_.record_seq, "expired"))

    def _least_loaded(self) -> _Instance:
        return min(self._instances.values(), key=lambda i: (i.tokens, i.id))

    def _least_loaded_with_room(self, open_: _Open) -> _Instance | None:
        fitting = [instance for instance in self._instances.values() if instance.fits(open_)]
        return min(fitting, key=lambda i: (i.tokens, i.id), default=None)

    def _assign(self, open_: _Open, instance: _Instance) -> None:
        open_.phase, open_.instance, open_.target = "assigning", instance, None
        instance.hold(open_)
        assign = m.Assign(
            epoch=_EPOCH,
            attempt=1,
            request=open_.request,
            threshold=open_.threshold,
            resume=open_.record,
            from_seq=open_.record_seq,
        )
        self._commands.append(e.SendAssign(instance.id, assign, "new" if open_.record is None else "moved"))

    def _note_assigned(self, event: e.AssignAnswered) -> None:
        open_ = self._open.get(event.request_id)
        if open_ is None or open_.phase != "assigning" or open_.instance is None:
            return
        if isinstance(event.answer, m.Accepted):
            open_.phase = "running"
        else:
            raise RuntimeError(f"{event.instance_id} refused what fits: {event.answer}")

    # --- records and moves ----------------------------------------------------------------------------------------

    def _note_record(self, event: e.RecordSeen) -> None:
        record = event.record
        open_ = self._open.get(record.request_id)
        if open_ is None or event.seq <= open_.record_seq:
            return
        open_.record, open_.record_seq = record, event.seq
        if record.is_final:
            self._stop_moving(open_)
            self._detach(open_)
            del self._open[open_.id]
            assert record.state in ("finished", "cancelled", "failed")
            self._commands.append(e.Purge(open_.id, record.state))
        elif record.state == "released":
            self._move_on(open_)
        elif open_.phase == "running" and self._migrate:
            self._offer(open_)

    def _offer(self, open_: _Open) -> None:
        """At its block's end: whether it should leave at the next one's."""
        here = open_.instance
        assert here is not None
        if here.moves_away:
            return
        there = self._least_loaded_with_room(open_)
        if there is None or there is here or there.moves_here or there.tokens + open_.canvas_tokens >= here.tokens:
            return
        open_.phase, open_.target = "moving", there
        there.hold(open_)
        there.moves_here = here.moves_away = True
        release = m.Release(epoch=_EPOCH, attempt=1, request_id=open_.id)
        self._commands.append(e.SendRelease(here.id, release, "faster"))

    def _move_on(self, open_: _Open) -> None:
        target = open_.target
        assert target is not None, "only who is to move is released"
        self._stop_moving(open_)
        self._detach(open_)
        self._assign(open_, target)

    def _stop_moving(self, open_: _Open | None) -> None:
        """What it has promised there, and keeps others from here."""
        if open_ is None or open_.phase != "moving":
            return
        assert open_.instance is not None
        assert open_.target is not None
        open_.instance.moves_away = open_.target.moves_here = False
        open_.target.drop(open_)
        open_.phase, open_.target = "running", None

    def _detach(self, open_: _Open) -> None:
        if open_.instance is not None:
            open_.instance.drop(open_)
            open_.instance = None
            return
        for instance in self._instances.values():
            if open_ in instance.queue:
                instance.queue.remove(open_)
                instance.queued_tokens -= open_.canvas_tokens
        if open_ in self._queue:
            self._queue.remove(open_)

    def check_invariants(self) -> None:
        """Raises AssertionError if the books do not balance (for tests)."""
        for instance in self._instances.values():
            holds = instance.holds.values()
            assert sum(open_.canvas_tokens for open_ in holds) == instance.held_tokens <= instance.kv_tokens
            assert sum(open_.canvas_tokens for open_ in instance.queue) == instance.queued_tokens
            assert len(holds) <= instance.max_requests
            assert all(instance in (open_.instance, open_.target) for open_ in holds)
            assert sum(open_.instance is instance and open_.phase == "moving" for open_ in holds) == instance.moves_away
            assert sum(open_.target is instance for open_ in holds) == instance.moves_here
        assert not self._commands
