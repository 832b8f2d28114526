"""What an instance holds, and what one request more would cost it. Pure.

1. The scheduler's own view counts: what it has assigned and not seen end. What a status lists beyond that (an old
   holder that has not noticed yet) takes room too, until the next status.
2. An instance holds at most `max_requests` requests and `kv_tokens` tokens of canvas. A request on its way from one to
   another takes room on both.
3. The price is the mean step latency of the batch as it stands, with those that come and without those that leave,
   times the instance's measured over profiled latency, kept between 0.5 and 4. A TP degree that was not measured costs
   what the next lower measured one does.
"""

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import NamedTuple

from contracts.messages import GenerateRequest, Held, InstanceStatus
from services.costs import LatencyProfile, PassCost, PassLoad, Resident, mean_pass

_LATENCY_RATIO_BOUNDS = (0.5, 4.0)


def resident_of(request: GenerateRequest | Held, blocks_done: int, num_blocks: int) -> Resident:
    """How a request weighs after `blocks_done` blocks."""
    return Resident(
        canvas_tokens=request.canvas_tokens,
        block_size=request.block_size,
        cache=request.cache,
        output_tokens_left=max(1, num_blocks - blocks_done) * request.block_size,
        blocks_ahead=request.blocks_ahead,
    )


def clamp_ratio(ratio: float) -> float:
    low, high = _LATENCY_RATIO_BOUNDS
    return min(max(ratio, low), high)


class _Prices(NamedTuple):
    """Of what an instance holds, by the profile: computed once for all requests that may come."""

    cost: PassCost
    load: PassLoad  # mean_pass of all that stay
    ms: float  # of a pass
    alone_ms: float  # of a pass with one of them alone
    one_more_ms: float  # with one more of them
    slos_s: list[float]  # ascending


class Instance:
    """One instance. It exists from the first sign of it; it can be given work once its status is known (`heard`)."""

    def __init__(self, instance_id: str, now: float, latency: LatencyProfile, steps_per_block: float) -> None:
        self._latency, self._steps_per_block = latency, steps_per_block
        self.id = instance_id
        self.seen_at = now  # last sign of life
        self.heard = False
        self.draining = False
        self.closed_until = 0.0  # it refused or did not get an assignment: nothing new before then
        self.latency_ratio = 1.0
        self.model = ""
        self.tp_degree = 1
        self.max_requests = 0
        self.kv_tokens = 0
        self.residents: dict[str, Resident] = {}  # by request id: the scheduler's own view
        self._slos_s: dict[str, float] = {}  # of those residents that have one
        self.leaving: set[str] = set()  # of the residents: asked to be released at their block's end
        self.coming: set[str] = set()  # of the residents: another instance still holds them
        self.foreign: list[Resident] = []  # listed by the last status, but not ours
        self.tokens = 0  # canvas tokens of both
        self._prices: _Prices | None = None  # None: to be computed anew

    def note_status(self, status: InstanceStatus) -> None:
        self.heard = True
        self.draining = self.draining or status.draining  # nobody comes back from draining
        self.closed_until = 0.0
        self.latency_ratio = clamp_ratio(status.latency_ratio)
        self.model = status.model
        if status.tp_degree != self.tp_degree:
            self.tp_degree, self._prices = status.tp_degree, None
        self.max_requests = status.max_requests
        self.kv_tokens = status.kv_tokens

    def hold(self, request_id: str, resident: Resident, slo_s: float = math.inf) -> None:
        """Adds the request, or notes how far it is. `slo_s`: infinite where it has no SLO."""
        self.tokens += resident.canvas_tokens - self._tokens_of(request_id)
        self.residents[request_id] = resident
        if slo_s < math.inf:
            self._slos_s[request_id] = slo_s
        self._prices = None

    def drop(self, request_id: str) -> None:
        self.tokens -= self._tokens_of(request_id)
        self.residents.pop(request_id, None)
        self._slos_s.pop(request_id, None)
        self.leaving.discard(request_id)
        self.coming.discard(request_id)
        self._prices = None

    def expect(self, request_id: str, resident: Resident, slo_s: float = math.inf) -> None:
        """Keeps room for a request that another instance is to release."""
        self.hold(request_id, resident, slo_s)
        self.coming.add(request_id)

    def let_go(self, request_id: str) -> None:
        """It was asked to release the request."""
        self.leaving.add(request_id)
        self._prices = None

    def keep(self, request_id: str) -> None:
        """It will not release the request after all, or was not asked."""
        self.leaving.discard(request_id)
        self._prices = None

    def set_foreign(self, foreign: list[Resident]) -> None:
        if foreign != self.foreign:
            self.tokens += _canvas_tokens(foreign) - _canvas_tokens(self.foreign)
            self.foreign = foreign
            self._prices = None

    def _tokens_of(self, request_id: str) -> int:
        resident = self.residents.get(request_id)
        return resident.canvas_tokens if resident else 0

    def room(self, now: float) -> int:
        """The largest canvas, in tokens, that it can take now; 0 for none."""
        if not self.heard or self.draining or now < self.closed_until:
            return 0
        if len(self.residents) + len(self.foreign) >= self.max_requests:
            return 0
        return max(0, self.kv_tokens - self.tokens)

    @property
    def step_ms(self) -> float:
        """Mean step latency, in milliseconds (rule 3)."""
        return self.latency_ratio * (self._prices or self._priced()).ms

    def step_ms_with(self, load: PassLoad) -> float:
        """The same with a request of that `mean_pass` added."""
        prices = self._prices or self._priced()
        return self.latency_ratio * prices.cost.ms(prices.load.plus(load))

    @property
    def step_ms_with_one_more(self) -> float:
        """The same with one more like those that it holds."""
        return self.latency_ratio * (self._prices or self._priced()).one_more_ms

    @property
    def alone_ms(self) -> float:
        """Milliseconds of a step of one of those that it holds, alone."""
        return self.latency_ratio * (self._prices or self._priced()).alone_ms

    def shortest_slo_s(self, least_s: float) -> float:
        """The shortest SLO there that is not below `least_s`, in seconds; infinite: none."""
        slos_s = (self._prices or self._priced()).slos_s
        index = bisect_left(slos_s, least_s)
        return slos_s[index] if index < len(slos_s) else math.inf

    def _priced(self) -> _Prices:
        staying = [resident for id_, resident in self.residents.items() if id_ not in self.leaving]
        load = mean_pass([*staying, *self.foreign], self._steps_per_block)
        count = max(1, len(staying) + len(self.foreign))
        one = PassLoad(*[part / count for part in load])
        cost = self._latency.cost(self._latency.nearest_degree(self.tp_degree))
        self._prices = _Prices(
            cost=cost,
            load=load,
            ms=cost.ms(load),
            alone_ms=cost.ms(one),
            one_more_ms=cost.ms(load.plus(one)),
            slos_s=sorted(self._slos_s.values()),
        )
        return self._prices

    def check_invariants(self) -> None:
        assert self.tokens == _canvas_tokens(self.residents.values()) + _canvas_tokens(self.foreign)
        assert self.leaving | self.coming <= self.residents.keys()
        assert not self.leaving & self.coming
        assert self._slos_s.keys() <= self.residents.keys()


def _canvas_tokens(residents: Iterable[Resident]) -> int:
    return sum(resident.canvas_tokens for resident in residents)
