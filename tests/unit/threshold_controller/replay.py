"""A small cluster on a virtual clock around the controller, to see what its decisions come to over minutes. Pure.

1. Requests wait in order of deadline, then arrival; each goes to the instance that holds the fewest.
2. An instance runs pass after pass over all that it holds; a pass lasts as the latency profile says.
3. A block takes steps as the profile's means say, times luck of the request and of the block; a threshold that is
   turned in mid-block changes how much each further step brings. A text ends with the block that was drawn for it.
4. Each pass is reported, and answered by a forecast: what is left in truth, times an error of the request that stays,
   and one that is new each time.
"""

import heapq
from dataclasses import dataclass, field
from itertools import count, pairwise
from random import Random

from contracts import messages as m
from services.costs import LatencyProfile, PassLoad, step_load
from services.profile import Profile
from services.threshold_controller import events as e
from services.threshold_controller.policy import ThresholdController
from tests import builders

_REQUEST_LUCK, _BLOCK_LUCK, _FORECAST_BIAS, _FORECAST_NOISE = 0.2, 0.2, 0.15, 0.1  # sigmas of lognormal factors


@dataclass(slots=True)
class Kind:
    """A kind of request: how many a second, and the SLO in seconds."""

    per_s: float
    slo_s: float | None
    blocks: int = 4
    priority: int = 0


@dataclass(slots=True)
class Run:
    """A request on its way, and what was told about it."""

    request: m.GenerateRequest
    kind: int
    deadline: float | None
    lucks: list[float]  # of each block that it will write
    bias: float
    threshold: float
    block: int = 0
    done: float = 0.0  # of the open block
    steps: int = 0
    steps_in_block: int = 0
    told: list[float] = field(default_factory=list)  # thresholds, each other than the one before
    used: list[float] = field(default_factory=list)  # by step
    ended: float = 0.0

    @property
    def in_time(self) -> bool:
        return self.deadline is None or self.ended <= self.deadline

    @property
    def flaps(self) -> int:
        """How often its threshold turned round: up after down, or down after up."""
        ups = [later > earlier for earlier, later in pairwise(self.told)]
        return sum(a != b for a, b in pairwise(ups))

    @property
    def changes(self) -> int:
        return max(0, len(self.told) - 1)


class Replay:
    """`run` it; then `runs` holds all requests that have ended."""

    def __init__(
        self, controller: ThresholdController, profile: Profile, latency: LatencyProfile, instances: int, seed: int
    ) -> None:
        self._controller, self._profile, self._latency = controller, profile, latency
        self._means = dict(zip(profile.decoding.thresholds, profile.decoding.mean_steps, strict=True))
        self._rng = Random(seed)
        self._heap: list[tuple[float, int, str, object]] = []
        self._order = count()
        self._held: dict[str, dict[str, Run]] = {f"i{n}": {} for n in range(instances)}
        self._waiting: list[Run] = []
        self._by_id: dict[str, Run] = {}
        self.runs: list[Run] = []
        self.caps: dict[str, list[int]] = {}

    def run(self, kinds: list[Kind], seconds: float) -> list[Run]:
        for number, kind in enumerate(kinds):
            at = self._rng.expovariate(kind.per_s)
            while at < seconds:
                self._push(1.0 + at, "arrival", (number, kind))
                at += self._rng.expovariate(kind.per_s)
        self._hear(e.CaughtUp(), 0.0)
        for instance_id in self._held:
            self._push(0.0, "status", instance_id)
        while self._heap and (self._by_id or len(self._heap) > len(self._held) + 1):
            now, _, what, about = heapq.heappop(self._heap)
            getattr(self, f"_{what}")(about, now)
            if now > seconds + 60:
                break
        return self.runs

    def _push(self, at: float, what: str, about: object) -> None:
        heapq.heappush(self._heap, (at, next(self._order), what, about))

    def _hear(self, event: e.Event, now: float) -> None:
        for command in self._controller.handle(event, now):
            match command:
                case e.WakeAt():
                    self._push(max(command.at, now), "tick", None)
                case e.SendThresholds():
                    for decision in command.decisions:
                        self._turn(decision)

    def _turn(self, decision: e.Decision) -> None:
        run = self._by_id.get(decision.request_id)
        if run is not None:
            run.threshold = decision.threshold
            if not run.told or run.told[-1] != decision.threshold:
                run.told.append(decision.threshold)

    def _tick(self, _: object, now: float) -> None:
        self._hear(e.Tick(), now)

    def _status(self, instance_id: str, now: float) -> None:
        engine = self._profile.engine
        status = builders.make_status(
            instance_id,
            [builders.make_held(run.request) for run in self._held[instance_id].values()],
            model=self._profile.model,
            max_requests=engine.max_requests,
            kv_tokens=engine.kv_tokens,
        )
        self._hear(e.StatusSeen(status), now)
        self._push(now + 1.0, "status", instance_id)

    def _arrival(self, about: tuple[int, Kind], now: float) -> None:
        number, kind = about
        rng, decoding = self._rng, self._profile.decoding
        request = builders.make_request(
            f"r{len(self.runs) + len(self._by_id)}",
            model=self._profile.model,
            prompt_ids=[1] * rng.randrange(30, 200),
            max_tokens=decoding.max_tokens,
            priority=kind.priority,
            deadline_at=None if kind.slo_s is None else 1000.0 + kind.slo_s,
        )
        luck = rng.lognormvariate(0, _REQUEST_LUCK)
        blocks = 1 + min(request.num_blocks - 1, int(rng.expovariate(1 / kind.blocks)))
        lucks = [luck * rng.lognormvariate(0, _BLOCK_LUCK) for _ in range(blocks)]
        deadline = None if kind.slo_s is None else now + kind.slo_s
        bias = rng.lognormvariate(0, _FORECAST_BIAS)
        run = Run(request, number, deadline, lucks, bias, decoding.threshold)
        self._by_id[request.request_id] = run
        self._hear(e.RequestSeen(request, len(self.runs) + len(self._by_id), now + 120, deadline), now)
        self._waiting.append(run)
        self._place(now)

    def _place(self, now: float) -> None:
        self._waiting.sort(key=lambda run: (-run.request.priority, run.deadline or 1e9))
        while self._waiting:
            instance_id = min(self._held, key=lambda name: (len(self._held[name]), name))
            held = self._held[instance_id]
            if len(held) >= self._profile.engine.max_requests:
                return
            run = self._waiting.pop(0)
            held[run.request.request_id] = run
            if len(held) == 1:
                self._push(now, "begin", instance_id)

    def _begin(self, instance_id: str, now: float) -> None:
        load, held = PassLoad(), self._held[instance_id]
        for run in held.values():
            canvas = run.request.canvas_tokens
            if run.steps_in_block:
                load = load.plus(step_load("cache", run.request.block_size, canvas))
            else:
                load = load.plus(step_load("recompute", canvas, canvas))
        if held:
            self._push(now + self._latency.step_ms(1, load) / 1000, "end", (instance_id, list(held.values())))

    def _end(self, about: tuple[str, list[Run]], now: float) -> None:
        instance_id, batch = about
        for run in batch:
            self._advance(run)
        entries = [self._entry(run) for run in batch]
        self._hear(e.ReportSeen(m.Report(instance_id, 0.0, entries)), now)
        forecasts = [self._forecast(run) for run in batch if not self._is_done(run)]
        if forecasts:
            self._hear(e.ForecastSeen(m.Forecast(instance_id, 0.0, self._controller.thresholds, forecasts)), now)
        for run in [run for run in batch if self._is_done(run)]:
            run.ended = now
            del self._held[instance_id][run.request.request_id], self._by_id[run.request.request_id]
            self.runs.append(run)
            record = builders.make_record(run.request, "finished", blocks_done=len(run.lucks))
            self._hear(e.RecordSeen(record, 10**6 + len(self.runs)), now)
        self._place(now)
        if self._held[instance_id] and not any(
            what == "begin" and about == instance_id for _, _, what, about in self._heap
        ):
            self._begin(instance_id, now)

    def _advance(self, run: Run) -> None:
        run.used.append(run.threshold)
        run.steps += 1
        run.steps_in_block += 1
        run.done += 1 / max(1.0, self._means[run.threshold] * run.lucks[run.block])
        if run.done >= 1 - 1e-9:
            run.block, run.done, run.steps_in_block = run.block + 1, 0.0, 0

    @staticmethod
    def _is_done(run: Run) -> bool:
        return run.block >= len(run.lucks)

    def _entry(self, run: Run) -> m.RequestReport:
        block_size = run.request.block_size
        committed = min(int(run.done * block_size), block_size - 1)
        return m.RequestReport(
            request_id=run.request.request_id,
            attempt=1,
            block_index=run.block,
            num_blocks=run.request.num_blocks,
            steps=run.steps,
            steps_in_block=run.steps_in_block,
            tokens_committed=run.block * block_size + committed,
            tokens_committed_in_block=committed,
            threshold=run.threshold,
            confidence=(0.5, 0.6, 0.7, 0.8, 0.9),
            next_recompute=not run.steps_in_block,
            finished=self._is_done(run),
            prompt_tokens=len(run.request.prompt_ids),
            tokens_left_in_block=block_size - committed,
        )

    def _forecast(self, run: Run) -> m.RequestForecast:
        error = run.bias * self._rng.lognormvariate(0, _FORECAST_NOISE)
        to_begin = len(run.lucks) - run.block - (run.steps_in_block > 0)
        steps = []
        for mean in self._means.values():
            open_block = max(1.0, mean * run.lucks[run.block]) * (1 - run.done) if run.steps_in_block else 0.0
            behind = sum(max(1.0, mean * luck) for luck in run.lucks[len(run.lucks) - to_begin :]) if to_begin else 0.0
            steps.append(error * (open_block + behind))
        return m.RequestForecast(
            run.request.request_id,
            1,
            run.steps,
            tuple(steps),
            tuple(1.3 * left for left in steps),
            (min(error * to_begin, run.request.num_blocks - run.block - (run.steps_in_block > 0)),) * len(steps),
        )
