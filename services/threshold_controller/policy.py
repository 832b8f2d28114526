"""Which threshold each running request gets, and how high it may be at most.

The open requests are what REQUESTS holds, less those whose record is final. In the order the code applies them:

1. A fresh controller first reads both streams, then asks for statuses, and decides nothing before `settle_s` later.
2. A request is where the newest sign of it says: report, record, status. Newer is the higher attempt, then the more
   steps. What an instance reported or wrote last about a request that it gave back does not bring it back there.
   An instance that exited, or without a sign of life for `instance_silent_s`, holds nothing and is no capacity.
3. How many steps a request still needs under each threshold: `needs.py`. What they cost: `prices.py`.
4. Hopeless is a request whose deadline would pass even if it ran alone on the fastest instance at the lowest threshold,
   and needed as few steps as its forecast's spread allows; until it could make it with `rise_margin` of its slack to
   spare. It runs at the lowest, so that it is soon in nobody's way; how good its answer must be its floor says.
   `paper`: hopeless is whose slack is at most 0.7 times the mean steps at the lowest threshold, all of them recompute
   steps.
5. "The lowest threshold" is the lowest of the set that is not below the request's floor. `paper` knows no floor.
Load control, `load_every_s` after something changed:
6. Capacity is the time of all instances but those that drain: what these hold moves on at its next boundary, so it
   counts. As long as no instance is known, caps stay as they are. Nobody's cap is above the profile's
   `decoding.threshold`: who wants more pins it.
7. Requests with a deadline come first, then those without, for they can wait; in order of priority, then arrival, they
   share out the capacity (`load.py`); who can wait and has no instance yet is in nobody's way. Hopeless ones change
   nobody else's cap, and keep theirs.
   `paper`: all are one group; without any deadline nobody is limited.
   Before load control has seen a newcomer its cap is that of the last request which comes before it.
8. A cap falls at once, and rises only if it would with `rise_margin` of the capacity kept free (`steady.py`).
Deadline control, of a whole instance at once, when its batch, a forecast or a cap changed, with each report on a
request without a forecast, and each `repeat_s`:
9. A pin is never touched. Without a deadline a request runs at its cap, a hopeless one at the lowest.
10. Otherwise the plan for its rest counts, at steps between the forecast's mean and its upper bound, as `risk` says,
   and for an end `ahead_share` of its SLO before the deadline: what comes meanwhile slows it down. After an opening a
   low threshold costs little, so where blocks have one the end is to be `_AHEAD_AFTER_OPENING` times as early; but the
   thresholds without one (`decoding.opening_from`) cost much, and are only for whose end would be after the deadline.
   `flat`: the highest threshold, not above the cap, at which the rest ends in time; if none, the lowest.
   `low_first`: the cap, if at it the rest ends in time; else the lowest, until it does.
   `high_first`: the highest, not above the cap, at which the open block ends so early that the rest can still be made
   at the lowest.
   It falls at once, and rises only if it would with `rise_margin` of the slack kept free.
11. How often the others recompute depends on their thresholds, and these on it: from everybody at the cap down, until
   nothing changes or `_ROUNDS` are over. What was decided before bears on it only as rules 8 and 10 say.
12. An instance is told the thresholds of all that it holds when one changed, and each `repeat_s`.
"""

import heapq
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Literal, NamedTuple, TypeAlias

from contracts import messages as m
from contracts.messages import GenerateRequest, ProgressRecord
from services.costs import LatencyProfile, Resident
from services.profile import Profile
from services.threshold_controller.config import ThresholdControllerConfig
from services.threshold_controller.events import (
    AskStatus,
    CaughtUp,
    Command,
    Decision,
    Event,
    ForecastSeen,
    InstanceExited,
    Reason,
    Reconnected,
    RecordSeen,
    ReportSeen,
    RequestSeen,
    SendLoadState,
    SendThresholds,
    Settled,
    StatusSeen,
    Tick,
    WakeAt,
)
from services.threshold_controller.load import Claims, Works, claims_of, paper_caps, paper_horizon, walk
from services.threshold_controller.needs import Lengths, Need, Outlook, Shape, Standing
from services.threshold_controller.prices import (
    Fleet,
    StepPrices,
    Supply,
    alone_prices,
    mean_share,
    own_prices,
    paper_own_prices,
    shared_prices,
)
from services.threshold_controller.steady import Steady, between

_MAX_PAST = 4096  # ids of requests that ended, kept for those that are seen after their record
_MAX_GONE = 4096  # ids of instances that exited, kept for statuses that arrive after the news
_MAX_PRICES = 4096  # kinds of requests whose prices are kept
_RATIO_BOUNDS = (0.5, 4.0)
_RATIO_CHANGE = 0.1  # of itself; a latency ratio that changes less changes no price
_MOST_STALE = 256  # requests whose work is computed anew in one run of load control, where only prices have changed
_ROUNDS = 3
_PAPER_HOPELESS = 0.7
_AHEAD_AFTER_OPENING = 2.0
_LEAST_HORIZON_S = 1e-3  # of an SLO that had passed before the request came
_FORGET_S = 60.0  # after its time limit, a request whose end was never heard of


_START = Standing()
_UNKNOWN = Supply(tp_degree=1, max_requests=1, kv_tokens=1, latency_ratio=1.0)


# --- state --------------------------------------------------------------------------------------------------------


@dataclass(slots=True, eq=False)
class _Open:
    """An open request. `instance_id`: who holds it, as far as anybody knows; "": it waits."""

    id: str
    rank: tuple[int, int]  # most urgent first, then by arrival
    pin: float | None
    floor: int  # index into the threshold set: its lowest threshold
    deadline: float | None
    horizon_s: float  # its SLO; without a deadline, its time limit
    expires_at: float
    canvas_tokens: int
    block_size: int
    blocks_ahead: int | None
    shape: Shape
    cap: int  # index into the threshold set
    chosen: Steady
    is_new: bool = True  # load control has not seen it: its cap is a guess
    attempt: int = 1
    record_seq: int = 0
    instance_id: str = ""
    given_back_by: str = ""  # who held it before it waited
    ended: bool = False  # its last step has run; its record follows
    standing: Standing = _START
    outlook: Outlook = field(default_factory=Outlook)
    hopeless: bool = False  # as load control saw it last
    decision: Decision | None = None
    means: list[Need] | None = None  # that it still needs, by threshold; None: to be computed anew
    planned: list[Need] | None = None  # the same, at the steps that deadline control plans for
    works: Works = ()  # what that costs all; empty: to be computed anew
    share: float = 0.0  # of an instance: its place beside others, with `works`
    late_at: float | None = None  # from then on its `hopeless` is another (rule 4); None: to be computed anew
    is_stale: bool = False  # these three are at old prices

    @property
    def resident(self) -> Resident:
        alike = self.shape.cache != "prefix" and self.blocks_ahead is None  # in all blocks
        tokens_left = self.block_size * (1 if alike else max(1, self.shape.num_blocks - self.standing.blocks_done))
        return Resident(self.canvas_tokens, self.block_size, self.shape.cache, tokens_left, self.blocks_ahead)

    def change(self) -> None:
        """What it still needs is another thing now."""
        self.means = self.planned = self.late_at = None
        self.works = ()


@dataclass(slots=True, eq=False)
class _Instance:
    """It exists from the first sign of it; it counts once its status is known (`heard`)."""

    id: str
    seen_at: float
    heard: bool = False
    draining: bool = False
    supply: Supply = _UNKNOWN
    residents: dict[str, _Open] = field(default_factory=dict)
    told: frozenset[tuple[str, int, float]] = frozenset()  # ids, attempts and thresholds
    repeat_at: float = 0.0


class _Prices(NamedTuple):
    shared: StepPrices
    alone: StepPrices
    share: float  # of an instance, for each of those that fill it


_Alarm: TypeAlias = Literal["instance", "load", "load_state", "repeat", "settle"]


class ThresholdController:
    """Event in, commands out."""

    def __init__(self, config: ThresholdControllerConfig, profile: Profile, latency: LatencyProfile) -> None:
        self.config = config
        self.thresholds = profile.decoding.thresholds
        self._profile = profile
        self._latency = latency
        self._means = profile.decoding.mean_steps
        self._is_paper = config.policy == "paper"
        self._risk = 0.0 if self._is_paper else config.risk
        self._top = self.thresholds.index(profile.decoding.threshold)
        self._rise_margin = 0.0 if self._is_paper else config.rise_margin
        self._ahead_share = 0.0 if self._is_paper else config.ahead_share
        opening = profile.decoding.opening
        if opening.share:
            self._ahead_share = min(_AHEAD_AFTER_OPENING * self._ahead_share, 1.0)
        self._opened = bisect_left(self.thresholds, opening.least)  # the lowest threshold with an opening, if any has
        self._open: dict[str, _Open] = {}
        self._ranked: list[_Open] = []  # no two ranks are equal
        self._instances: dict[str, _Instance] = {}
        self._past: OrderedDict[str, None] = OrderedDict()
        self._gone: OrderedDict[str, None] = OrderedDict()
        self._lengths = Lengths()
        self._fleet = Fleet()  # the instances that are capacity
        self._known = Fleet()  # and those that drain beside them
        self._prices: dict[Resident, _Prices] = {}
        self._settled = False
        self._load_changed = False
        self._load_is_due = False  # its alarm is set
        self._load_at = 0.0  # load control runs not before
        self._load_state: m.LoadState | None = None
        self._horizon_s = 0.0  # the last one, where no request has a deadline
        self._undecided: set[str] = set()  # instances to be decided anew at the end of this `handle`
        self._alarms: list[tuple[float, _Alarm, str]] = []  # a heap; what they are for is checked when they ring
        self._wake_at: float | None = None
        self._decided: Counter[Reason] = Counter()
        self._commands: list[Command] = []

    # --- what is asked about it ---

    @property
    def num_open(self) -> int:
        return len(self._open)

    @property
    def load_state(self) -> m.LoadState | None:
        """The last one; None before load control has run."""
        return self._load_state

    def take_decided(self) -> Counter[Reason]:
        """Decisions since the last call, by reason: of each request the first, and each other than the one before."""
        decided, self._decided = self._decided, Counter()
        return decided

    def num_decided(self) -> dict[Reason, int]:
        """Requests that instances hold, by the reason for their threshold."""
        counts: Counter[Reason] = Counter({"pin": 0, "slack": 0, "cap": 0, "deadline": 0, "hopeless": 0})
        counts.update(open_.decision.reason for open_ in self._open.values() if open_.decision is not None)
        return dict(counts)

    # --- events ---------------------------------------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Command]:
        return self.handle_all((event,), now)

    def handle_all(self, events: Iterable[Event], now: float) -> list[Command]:
        """In this order, at one time: what follows from all of them is decided once."""
        for event in events:
            self._apply(event, now)
        if self._settled:
            self._decide(now)
            self._plan_load_control(now)
        self._wake_for_alarms()
        commands, self._commands = self._commands, []
        return commands

    def _apply(self, event: Event, now: float) -> None:
        match event:
            case ReportSeen():
                self._note_report(event.report, now)
            case ForecastSeen():
                self._note_forecast(event.forecast)
            case RecordSeen():
                self._note_record(event, now)
            case RequestSeen():
                self._note_request(event)
            case StatusSeen():
                self._note_status(event.status, now)
            case Tick():
                self._ring_alarms(now)
            case InstanceExited():
                _remember(self._gone, event.instance_id, _MAX_GONE)
                self._lose_instance(event.instance_id)
            case CaughtUp():
                self._commands.append(AskStatus())
                self._set_alarm(now + self.config.settle_s, "settle", "")
                self._restart_silence(now)
            case Reconnected():
                self._restart_silence(now)

    # --- requests -------------------------------------------------------------------------------------------------

    def _note_request(self, event: RequestSeen) -> None:
        request = event.request
        if request.request_id in self._open or request.request_id in self._past:
            return
        if request.model != self._profile.model:
            return
        floor = 0 if self._is_paper else min(bisect_left(self.thresholds, request.floor), self._top)
        open_ = _Open(
            id=request.request_id,
            rank=(-request.priority, event.seq),
            pin=request.threshold,
            floor=floor,
            deadline=event.deadline,
            horizon_s=_seconds_until(request, request.deadline_at),
            expires_at=event.expires_at,
            canvas_tokens=request.canvas_tokens,
            block_size=request.block_size,
            blocks_ahead=request.blocks_ahead,
            shape=Shape(request.num_blocks, request.cache, request.ignore_eos),
            cap=max(floor, self._first_cap(request.priority)),
            chosen=Steady(self._top),
        )
        self._open[open_.id] = open_
        insort(self._ranked, open_, key=_rank_of)
        self._load_changed = True

    def _first_cap(self, priority: int) -> int:
        """Of a newcomer, until load control has walked by it: as the last of those that come before it."""
        caps = self._load_state.caps if self._load_state is not None else []
        before = [cap.threshold for cap in caps if cap.priority >= priority]  # most urgent first
        return self.thresholds.index(before[-1]) if before else self._top

    def _note_record(self, event: RecordSeen, now: float) -> None:
        record = event.record
        open_ = self._open.get(record.request_id)
        if record.is_final:
            if record.state == "finished" and record.blocks_done:
                self._lengths.note(record.blocks_done)
            _remember(self._past, record.request_id, _MAX_PAST)
            if open_ is not None:
                self._close(open_)
            return
        if open_ is None or event.seq <= open_.record_seq or record.attempt < open_.attempt:
            return
        open_.record_seq = event.seq
        standing = Standing(steps=_steps_of(record), blocks_done=record.blocks_done)
        if record.attempt == open_.attempt and standing.steps < open_.standing.steps:
            return  # told by its reports already
        self._advance(open_, record.attempt, standing)
        if record.state == "released" or not record.holder:
            open_.given_back_by = record.holder or open_.instance_id
            self._detach(open_)
        elif record.holder not in self._gone:
            self._attach(open_, record.holder, now)

    def _close(self, open_: _Open) -> None:
        self._detach(open_)
        del self._open[open_.id]
        del self._ranked[bisect_left(self._ranked, open_.rank, key=_rank_of)]
        self._load_changed = True

    def _advance(self, open_: _Open, attempt: int, standing: Standing) -> None:
        """It is so far now."""
        if attempt > open_.attempt:
            open_.attempt = attempt
            open_.outlook.reset()
        open_.standing = standing
        open_.outlook.note_standing(standing)
        open_.ended = False
        open_.change()
        self._load_changed = True
        if not open_.outlook.usable(standing):
            self._undecided.add(open_.instance_id)

    # --- instances ------------------------------------------------------------------------------------------------

    def _note_report(self, report: m.Report, now: float) -> None:
        if report.instance_id in self._gone:
            return
        instance = self._instance(report.instance_id, now)
        self._note_ratio(instance, report.latency_ratio)
        for entry in report.entries:
            open_ = self._open.get(entry.request_id)
            if open_ is None or (entry.attempt, entry.steps) < (open_.attempt, open_.standing.steps):
                continue
            is_news = (entry.attempt, entry.steps) > (open_.attempt, open_.standing.steps)
            if not is_news and open_.instance_id != instance.id:
                continue  # what was known of it before it left this instance
            self._advance(open_, entry.attempt, _standing_of(entry, open_.block_size))
            self._attach(open_, instance.id, now)
            if entry.finished:
                open_.ended = True
                self._undecided.add(instance.id)

    def _note_status(self, status: m.InstanceStatus, now: float) -> None:
        if status.instance_id in self._gone or status.model != self._profile.model:
            return
        instance = self._instance(status.instance_id, now)
        supply = Supply(status.tp_degree, status.max_requests, status.kv_tokens, instance.supply.latency_ratio)
        if (True, supply, status.draining) != (instance.heard, instance.supply, instance.draining):
            instance.heard, instance.supply, instance.draining = True, supply, status.draining
            self._note_fleet(instance)
        self._note_ratio(instance, status.latency_ratio)
        for held in status.held:
            open_ = self._open.get(held.request_id)
            if open_ is None or held.attempt < open_.attempt:
                continue
            if held.attempt > open_.attempt:
                self._advance(open_, held.attempt, Standing(blocks_done=held.blocks_done))
                self._attach(open_, instance.id, now)
            elif not open_.instance_id and open_.given_back_by != instance.id:
                self._attach(open_, instance.id, now)

    def _note_ratio(self, instance: _Instance, ratio: float) -> None:
        low, high = _RATIO_BOUNDS
        ratio = min(max(ratio, low), high)
        if abs(ratio - instance.supply.latency_ratio) > _RATIO_CHANGE * instance.supply.latency_ratio:
            instance.supply = instance.supply._replace(latency_ratio=ratio)
            self._note_fleet(instance)

    def _note_fleet(self, instance: _Instance) -> None:
        """What instances there are has changed: so have all prices."""
        self._undecided.add(instance.id)
        heard = [other for other in self._instances.values() if other.heard]
        self._known = Fleet(other.supply for other in heard)
        self._fleet = Fleet(other.supply for other in heard if not other.draining)
        self._prices.clear()
        for open_ in self._open.values():
            open_.is_stale = True
        self._load_changed = True

    def _instance(self, instance_id: str, now: float) -> _Instance:
        """With a sign of life."""
        instance = self._instances.get(instance_id)
        if instance is None:
            instance = self._instances[instance_id] = _Instance(instance_id, now)
            self._set_alarm(now + self.config.instance_silent_s, "instance", instance_id)
            instance.repeat_at = now + self.config.repeat_s
            self._set_alarm(instance.repeat_at, "repeat", instance_id)
        instance.seen_at = now
        return instance

    def _lose_instance(self, instance_id: str) -> None:
        instance = self._instances.pop(instance_id, None)
        if instance is None:
            return
        for open_ in list(instance.residents.values()):
            self._detach(open_)
        self._note_fleet(instance)

    def _restart_silence(self, now: float) -> None:
        for instance in self._instances.values():
            instance.seen_at = now

    def _attach(self, open_: _Open, instance_id: str, now: float) -> None:
        if open_.instance_id == instance_id:
            return
        self._detach(open_)
        instance = self._instances.get(instance_id) or self._instance(instance_id, now)
        open_.instance_id = instance_id
        instance.residents[open_.id] = open_
        self._undecided.add(instance_id)

    def _detach(self, open_: _Open) -> None:
        instance = self._instances.get(open_.instance_id)
        if instance is not None:
            del instance.residents[open_.id]
            self._undecided.add(instance.id)
        open_.instance_id = ""
        open_.decision = None

    def _note_forecast(self, forecast: m.Forecast) -> None:
        if forecast.thresholds != self.thresholds:
            return
        count = len(self.thresholds)
        for entry in forecast.entries:
            open_ = self._open.get(entry.request_id)
            if open_ is None or entry.attempt != open_.attempt:
                continue
            if {len(entry.steps_left), len(entry.steps_left_upper), len(entry.blocks_left)} != {count}:
                continue
            if open_.outlook.note_forecast(entry):
                open_.change()
                self._undecided.add(open_.instance_id)
                self._load_changed = True

    # --- rule 4: who is hopeless ----------------------------------------------------------------------------------

    def _prices_of(self, resident: Resident) -> _Prices:
        found = self._prices.get(resident)
        if found is None:
            if len(self._prices) >= _MAX_PRICES:
                self._prices.clear()
            ends = self._means[0], self._means[self._top]
            found = self._prices[resident] = _Prices(
                shared_prices(self._latency, self._fleet, resident, ends, self.config.policy),
                alone_prices(self._latency, self._known, resident),
                mean_share(self._fleet, resident),
            )
        return found

    def _needs(self, open_: _Open, risk: float) -> list[Need]:
        """By threshold, up to the highest that requests run at; all alike if the request is pinned.

        Those below its floor are as its floor.
        """
        if open_.pin is not None:
            needs = self._needs_below(open_, risk, len(self.thresholds))
            return [_at(open_.pin, self.thresholds, needs)] * (self._top + 1)
        needs = self._needs_below(open_, risk, self._top + 1)
        return [needs[open_.floor]] * open_.floor + needs[open_.floor :]

    def _least_need(self, open_: _Open) -> Need:
        """At its lowest threshold, or at its pin, with as few steps as the forecast's spread allows."""
        if open_.pin is not None:
            return self._needs(open_, -1.0)[0]
        return self._needs_below(open_, -1.0, open_.floor + 1)[-1]

    def _needs_below(self, open_: _Open, risk: float, count: int) -> list[Need]:
        return open_.outlook.needs(open_.standing, open_.shape, self._means, self._lengths, risk, count)

    def _mean_needs(self, open_: _Open) -> list[Need]:
        if open_.means is None:
            open_.means = self._needs(open_, 0.0)
        return open_.means

    def _weigh(self, open_: _Open) -> None:
        """Fills in what the request costs all."""
        if open_.is_stale:
            open_.is_stale, open_.late_at = False, None
        prices = self._prices_of(open_.resident)
        recompute_s, cache_s = prices.shared
        open_.share = prices.share
        open_.works = tuple([n.recompute * recompute_s + n.cache * cache_s for n in self._mean_needs(open_)])

    def _is_hopeless(self, open_: _Open, now: float) -> bool:
        """Rule 4."""
        if open_.late_at is None:
            open_.late_at = self._late_at(open_)
        return now > open_.late_at

    def _late_at(self, open_: _Open) -> float:
        """The time from which on it is hopeless, or still is where it was (rule 4)."""
        if open_.deadline is None:
            return inf
        alone = self._prices_of(open_.resident).alone
        if self._is_paper:
            need = self._mean_needs(open_)[0]
            least_s = _PAPER_HOPELESS * (need.recompute + need.cache) * alone.recompute
        else:
            need = self._least_need(open_)
            least_s = need.recompute * alone.recompute + need.cache * alone.cache
        return open_.deadline - self.config.margin_s - least_s / (1 - self._rise_margin * open_.hopeless)

    # --- rules 6 to 8: load control ------------------------------------------------------------------------------

    def _plan_load_control(self, now: float) -> None:
        if self._load_changed and not self._load_is_due:
            self._load_is_due = True
            self._set_alarm(max(now, self._load_at), "load", "")

    def _control_load(self, now: float, *, say: bool = False) -> None:
        """`say`: even where nothing has changed."""
        self._load_changed = self._load_is_due = False
        self._load_at = now + self.config.load_every_s
        timed: list[_Open] = []
        patient: list[_Open] = []
        hopeless: list[_Open] = []
        num_stale = 0
        for open_ in self._ranked:
            if open_.ended:
                continue
            if not open_.works or (open_.is_stale and num_stale < _MOST_STALE):
                num_stale += bool(open_.works)
                self._weigh(open_)
            if self._is_hopeless(open_, now) != open_.hopeless:
                open_.hopeless = not open_.hopeless
                open_.late_at = None
                self._undecided.add(open_.instance_id)
            (hopeless if open_.hopeless else patient if open_.deadline is None else timed).append(open_)
        self._load_changed = num_stale == _MOST_STALE  # there may be more
        share_out = self._share_out_as_the_paper if self._is_paper else self._share_out
        horizon_s, demand_s = share_out(timed, patient, hopeless)
        self._horizon_s = horizon_s or self._horizon_s
        state = m.LoadState(
            sent_at=0.0,
            horizon_s=self._horizon_s,
            demand_s=demand_s,
            capacity_s=self._horizon_s * self._fleet.size,
            caps=self._caps_by_priority(patient + timed),
            num_open=len(timed) + len(patient) + len(hopeless),
            num_hopeless=len(hopeless),
            floor_s=sum([o.works[0] for o in timed + patient + hopeless]),
        )
        before, self._load_state = self._load_state, state
        if say or before is None or (before.caps, before.num_hopeless) != (state.caps, state.num_hopeless):
            self._commands.append(SendLoadState(state))

    def _share_out(self, timed: list[_Open], patient: list[_Open], hopeless: list[_Open]) -> tuple[float, float]:
        """Rules 6 to 8: gives everybody a cap. The horizon that is claimed most, and what is claimed of it."""
        counted = timed + patient
        claims = self._claims(counted)
        if not self.config.load_control:
            self._cap_all(counted + hopeless, self._top)
        elif self._known.size:
            reserve = self._fleet.size * self._rise_margin
            low, high = walk(claims, self._fleet.size - reserve), walk(claims, self._fleet.size)
            self._cap_between(low, high, counted)
        fullest = max(claims, key=lambda c: c.floor_s / c.length_s, default=None)
        return (0.0, 0.0) if fullest is None else (fullest.length_s, fullest.demand_s([o.cap for o in counted]))

    def _claims(self, counted: list[_Open]) -> list[Claims]:
        """By horizon, ascending. Who can wait and has no instance yet takes no place on one (rule 7)."""
        shares = [o.share if o.deadline is not None or o.instance_id else 0.0 for o in counted]
        return claims_of([o.works for o in counted], [o.horizon_s for o in counted], shares)

    def _cap_between(self, low: list[int], high: list[int], counted: list[_Open]) -> None:
        """Between what the walk gives with the reserve kept and what it gives without (`steady.py`)."""
        for open_, least, most in zip(counted, low, high, strict=True):
            if open_.pin is None:
                if not least == most == open_.cap:
                    self._cap(open_, most if open_.is_new else between(open_.cap, least, most))
                open_.is_new = False

    def _share_out_as_the_paper(
        self, timed: list[_Open], patient: list[_Open], hopeless: list[_Open]
    ) -> tuple[float, float]:
        """All are one group, and its horizon is their mean SLO."""
        counted = sorted(timed + patient + hopeless, key=_rank_of)
        works = [o.works for o in counted]
        horizon_s = paper_horizon((o.horizon_s, o.works[0]) for o in counted if o.deadline is not None)
        if horizon_s is None or not self.config.load_control:
            self._cap_all(counted, self._top)
        elif self._known.size:
            for open_, cap in zip(counted, paper_caps(works, horizon_s * self._fleet.size), strict=True):
                if open_.pin is None:
                    self._cap(open_, cap)
        return horizon_s or 0.0, sum([o.works[o.cap] for o in counted])

    def _cap_all(self, requests: list[_Open], cap: int) -> None:
        for open_ in requests:
            if cap != open_.cap and open_.pin is None:
                self._cap(open_, cap)

    def _cap(self, open_: _Open, cap: int) -> None:
        cap = max(cap, open_.floor)
        if cap != open_.cap:
            open_.cap = cap
            self._undecided.add(open_.instance_id)

    def _caps_by_priority(self, last_counts: list[_Open]) -> list[m.PriorityCap]:
        """Of the last request of each priority; of one with a deadline, if there is any."""
        caps = {open_.rank[0]: open_.cap for open_ in last_counts if open_.pin is None}
        return [m.PriorityCap(priority=-rank, threshold=self.thresholds[caps[rank]]) for rank in sorted(caps)]

    # --- rules 9 to 11: deadline control --------------------------------------------------------------------------

    def _decide(self, now: float) -> None:
        for instance_id in sorted(self._undecided):
            instance = self._instances.get(instance_id)
            if instance is not None and instance.heard:
                self._decide_instance(instance, now)
                self._tell(instance)
        self._undecided.clear()

    def _decide_instance(self, instance: _Instance, now: float) -> None:
        batch = [open_ for _, open_ in sorted(instance.residents.items()) if not open_.ended]
        choices = [self._choose_untimed(open_, now) for open_ in batch]
        timed = [i for i, choice in enumerate(choices) if choice is None]
        chosen = [
            (open_.cap, _reason_at(open_.cap, self._top)) if c is None else c
            for open_, c in zip(batch, choices, strict=True)
        ]
        for _ in range(_ROUNDS if timed else 0):
            prices = self._batch_prices(instance, batch, [index for index, _ in chosen], timed)
            before = list(chosen)
            for i in timed:
                chosen[i] = self._choose_timed(batch[i], prices[i], now)
            if chosen == before:
                break
        for open_, (index, reason) in zip(batch, chosen, strict=True):
            threshold = self.thresholds[index] if open_.pin is None else open_.pin
            open_.chosen.choose(index, now)
            decision = Decision(open_.id, open_.attempt, threshold, reason)
            self._decided[reason] += decision != open_.decision
            open_.decision = decision

    def _choose_untimed(self, open_: _Open, now: float) -> tuple[int, Reason] | None:
        """Rule 9; None: rule 10 counts. Index into the threshold set, and why."""
        if open_.pin is not None:
            return 0, "pin"
        if open_.deadline is None or not self.config.deadline_control:
            return open_.cap, _reason_at(open_.cap, self._top)
        if self._is_hopeless(open_, now):
            return open_.floor, "hopeless"
        return None

    def _choose_timed(self, open_: _Open, prices: StepPrices, now: float) -> tuple[int, Reason]:
        """Rule 10."""
        assert open_.deadline is not None
        until = open_.deadline - self.config.margin_s - now
        index = self._highest_in_time(open_, prices, until, 1.0)
        before = open_.chosen.before(now)
        if before < index:
            index = between(before, self._highest_in_time(open_, prices, until, 1 - self._rise_margin), index)
        return index, "deadline" if index < open_.cap else _reason_at(open_.cap, self._top)

    def _batch_prices(
        self, instance: _Instance, batch: Sequence[_Open], chosen: Sequence[int], wanted: Sequence[int]
    ) -> dict[int, StepPrices]:
        """What a step costs those of the batch, if everybody runs at the chosen thresholds."""
        residents = [open_.resident for open_ in batch]
        if self._is_paper:
            return dict.fromkeys(wanted, paper_own_prices(self._latency, instance.supply, residents))
        needs = [self._mean_needs(open_)[index] for open_, index in zip(batch, chosen, strict=True)]
        shares = [need.recompute / (need.recompute + need.cache) for need in needs]
        return own_prices(self._latency, instance.supply, residents, shares, wanted)

    def _highest_in_time(self, open_: _Open, prices: StepPrices, until: float, share: float) -> int:
        """Rule 10, with that share of the slack. `until`: the deadline, in seconds from now."""
        if open_.planned is None:
            open_.planned = self._needs(open_, self._risk)
        planned, cap = open_.planned, open_.cap
        slack = share * (until - self._ahead_share * open_.horizon_s)
        if _seconds(planned[cap], prices) <= slack:
            return cap  # whatever the plan
        lowest = max(open_.floor, min(cap, self._opened))
        if _seconds(planned[lowest], prices) > share * until:
            lowest = open_.floor  # without an opening
        if self.config.plan == "low_first":
            return lowest
        for index in range(cap, lowest, -1):
            end = _seconds(planned[index], prices)
            if self.config.plan == "high_first":
                end = _seconds(planned[0], prices)
                end += _block_s(open_, planned[index], prices) - _block_s(open_, planned[0], prices)
            if end <= slack:
                return index
        return lowest

    # --- rule 12: telling --------------------------------------------------------------------------------------------

    def _tell(self, instance: _Instance, *, again: bool = False) -> None:
        held = [open_ for _, open_ in sorted(instance.residents.items()) if not open_.ended]
        decisions = [open_.decision for open_ in held if open_.decision is not None]
        told = frozenset((d.request_id, d.attempt, d.threshold) for d in decisions)
        if again or not told <= instance.told:
            self._commands.append(SendThresholds(instance.id, tuple(decisions), "repeated" if again else "changed"))
        instance.told = told

    # --- time -----------------------------------------------------------------------------------------------------

    def _set_alarm(self, at: float, alarm: _Alarm, key: str) -> None:
        heapq.heappush(self._alarms, (at, alarm, key))

    def _wake_for_alarms(self) -> None:
        if self._alarms and (self._wake_at is None or self._alarms[0][0] < self._wake_at):
            self._wake_at = self._alarms[0][0]
            self._commands.append(WakeAt(self._wake_at))

    def _ring_alarms(self, now: float) -> None:
        self._wake_at = None
        while self._alarms and self._alarms[0][0] <= now:
            at, alarm, key = heapq.heappop(self._alarms)
            match alarm:
                case "load":
                    self._control_load(now)
                case "repeat":
                    self._repeat(key, now, at)
                case "instance":
                    self._check_instance(key, now)
                case "settle":
                    self._settled = True
                    self._undecided.update(self._instances)
                    self._load_changed = True
                    self._commands.append(Settled())
                    self._set_alarm(now + self.config.repeat_s, "load_state", "")
                case "load_state":
                    self._forget_overdue(now)
                    self._control_load(now, say=True)  # time has passed: some may be hopeless now
                    self._set_alarm(now + self.config.repeat_s, "load_state", "")

    def _repeat(self, instance_id: str, now: float, alarm_at: float) -> None:
        instance = self._instances.get(instance_id)
        if instance is None or instance.repeat_at != alarm_at:  # an earlier instance's of that id
            return
        instance.repeat_at = now + self.config.repeat_s
        self._set_alarm(instance.repeat_at, "repeat", instance_id)
        if self._settled and instance.heard and instance.residents:
            self._decide_instance(instance, now)
            self._tell(instance, again=True)

    def _forget_overdue(self, now: float) -> None:
        for open_ in [o for o in self._open.values() if now > o.expires_at + _FORGET_S]:
            self._close(open_)

    def _check_instance(self, instance_id: str, now: float) -> None:
        instance = self._instances.get(instance_id)
        if instance is None:
            return
        lost_at = instance.seen_at + self.config.instance_silent_s
        if lost_at > now:
            self._set_alarm(lost_at, "instance", instance_id)
        else:
            self._lose_instance(instance_id)

    # --- for tests ------------------------------------------------------------------------------------------------

    def check_invariants(self) -> None:
        assert self._ranked == sorted(self._open.values(), key=_rank_of)
        for instance in self._instances.values():
            for request_id, open_ in instance.residents.items():
                assert self._open[request_id] is open_
                assert open_.instance_id == instance.id
        for open_ in self._open.values():
            assert not open_.instance_id or open_.id in self._instances[open_.instance_id].residents
            assert open_.decision is None or open_.instance_id
            if open_.decision is not None and open_.pin is None and not open_.ended:
                assert open_.decision.threshold <= self.thresholds[open_.cap]
        assert not self._commands


def _rank_of(open_: _Open) -> tuple[int, int]:
    return open_.rank


def _reason_at(cap: int, top: int) -> Reason:
    """Why a request runs at its cap."""
    return "slack" if cap == top else "cap"


def _seconds(need: Need, prices: StepPrices) -> float:
    """For the rest of a request."""
    return need.recompute * prices.recompute + need.cache * prices.cache


def _block_s(open_: _Open, need: Need, prices: StepPrices) -> float:
    """Of that, for its open block alone; at a block's end, for the next."""
    blocks = need.recompute if open_.shape.cache != "none" else open_.shape.num_blocks - open_.standing.begun
    further = blocks if open_.standing.steps_in_block else max(blocks - 1.0, 0.0)
    return _seconds(need, prices) / (1.0 + further)


def _seconds_until(request: GenerateRequest, time: float | None) -> float:
    """From its arrival to that time, or to its time limit."""
    until = request.expires_at if time is None else time
    return max(_LEAST_HORIZON_S, until - request.created_at)


def _standing_of(entry: m.RequestReport, block_size: int) -> Standing:
    left = entry.tokens_left_in_block if entry.prompt_tokens else block_size - entry.tokens_committed_in_block
    is_last = entry.ends_in_block and entry.steps_in_block > 0
    return Standing(entry.steps, entry.block_index, entry.steps_in_block, max(0.0, left / block_size), is_last)


def _steps_of(record: ProgressRecord) -> int:
    return sum(block.recompute_steps + block.cache_steps for block in record.blocks)


def _at(pin: float, thresholds: Sequence[float], needs: Sequence[Need]) -> Need:
    """What is needed at a threshold that may be none of the set: in proportion, beyond the ends as at the end."""
    right = bisect_left(thresholds, pin)
    if right == 0:
        return needs[0]
    if right == len(thresholds):
        return needs[-1]
    share = (pin - thresholds[right - 1]) / (thresholds[right] - thresholds[right - 1])
    low, high = needs[right - 1], needs[right]
    return Need(low.recompute + share * (high.recompute - low.recompute), low.cache + share * (high.cache - low.cache))


def _remember(kept: OrderedDict[str, None], key: str, most: int) -> None:
    kept[key] = None
    kept.move_to_end(key)
    if len(kept) > most:
        kept.popitem(last=False)
