"""A simulated instance: the live worker with its policy, its messages and a connection of its own. Only the engine is
replaced, and the hot loop's thread by timers, so that a process holds many.
"""

import asyncio
import time
from typing import cast

from services.bus import Bus, NatsSettings
from services.costs import PassCost
from services.denoiser.config import WorkerConfig
from services.denoiser.engine import Engine, EngineConfig
from services.denoiser.hot_loop import HotLoop, Order
from services.denoiser.worker import Worker
from services.profile import Profile
from services.runtime import Runtime
from tools.fleet.engine import SleepingEngine
from tools.simulate.denoising import Counted

_MAX_RECOMPUTE_TOKENS = 2048  # as services/denoiser/instance.py has it


class SleepingLoop(HotLoop):
    """The hot loop on the event loop's own thread: a pass is a timer."""

    _engine: SleepingEngine
    _timer: asyncio.Handle | None = None  # of the pass under way, or of the turn that is to begin
    _began = 0.0

    def start(self) -> None:
        """Builds the engine."""
        engine = self._build_engine()
        self._engine = cast(SleepingEngine, engine)
        self._on_ready(engine)

    def stop(self, limit_s: float) -> None:
        """Ends the loop at once."""
        self._stopping = True
        if self._timer is not None:
            self._timer.cancel()

    def tell(self, order: Order) -> None:
        """Obeyed before the next step."""
        self._orders.append(order)
        if self._timer is None and not self._stopping:
            self._timer = asyncio.get_running_loop().call_soon(self._turn)

    def _turn(self) -> None:
        """Ends the pass under way, if there is one, and begins the next."""
        try:
            engine = cast(Engine, self._engine)
            if self._began:
                ended = time.monotonic()
                self._note(engine, self._engine.step(ended - self._began), self._began, ended)
            self._take_in(engine)
            self._say_news()
            self._timer, self._began = None, 0.0
            if self._live:
                self._began = time.monotonic()
                self._timer = asyncio.get_running_loop().call_later(self._engine.begin_pass(), self._turn)
            else:
                self._turn_ended = None
        except Exception as error:
            self._on_failure(error)


class SleepingWorker(Worker):
    """The worker of a simulated instance."""

    hot_loop_type = SleepingLoop

    def __init__(
        self, runtime: Runtime, config: WorkerConfig, profile: Profile, cost: PassCost, behaviour: Counted
    ) -> None:
        super().__init__(runtime, config, profile)
        self._cost, self._behaviour = cost, behaviour

    def _build_engine(self) -> Engine:
        section, longest = self._profile.engine, self._profile.limits.max_context_tokens
        config = EngineConfig(
            kv_budget_tokens=section.kv_tokens or section.max_requests * longest,
            max_requests=section.max_requests,
            max_batch_tokens=section.max_pass_tokens,
            max_recompute_tokens=min(section.max_pass_tokens, _MAX_RECOMPUTE_TOKENS),
        )
        return cast(Engine, SleepingEngine(config, longest, self._cost, self._behaviour))


class SimulatedInstance:
    """One instance. `begin` it; `kill` it, or `stop` it in order."""

    def __init__(self, config: WorkerConfig, profile: Profile, cost: PassCost, behaviour: Counted) -> None:
        """`config`: with an instance id. `behaviour` may be shared."""
        self.id = config.instance_id
        self._config, self._profile, self._cost, self._behaviour = config, profile, cost, behaviour
        self._runtime: Runtime | None = None
        self._work: asyncio.Task[None] | None = None

    async def begin(self, settings: NatsSettings) -> None:
        """Connects, and works from then on. Raises what `Bus.connect` raises."""
        self._runtime = Runtime("worker", await Bus.connect(settings, f"worker {self.id}"))
        worker = SleepingWorker(self._runtime, self._config, self._profile, self._cost, self._behaviour)
        self._work = asyncio.create_task(worker.run(), name=self.id)

    @property
    def work(self) -> "asyncio.Task[None]":
        """Until it ends. Raises what the worker raised."""
        assert self._work is not None, "it has not begun"
        return self._work

    async def kill(self) -> None:
        """As if its process were killed: it falls silent in the middle of whatever it does."""
        await self._leave(drain=False)

    async def stop(self) -> None:
        """It drains first, as after SIGTERM."""
        assert self._runtime is not None
        self._runtime.stopping.set()
        await asyncio.wait({self.work})
        await self._leave(drain=True)

    async def _leave(self, *, drain: bool) -> None:
        assert self._runtime is not None
        self.work.cancel()
        await asyncio.gather(self.work, return_exceptions=True)
        await self._runtime.cancel_tasks()
        await self._runtime.bus.close(drain)
