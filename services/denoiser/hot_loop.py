"""The hot loop: the one thread that touches the engine. It never waits for the bus.

Each turn, in this order: take in what was ordered since the last one (assignments, drops, thresholds, releases), run a
step of the engine, release what finished or left, put what was committed with the news. With nothing to run it sleeps
until something is ordered.

Orders come and news go through two deques, whose appends and pops are atomic. The other thread is woken
1. when a block ended and otherwise each `hand_over_every_s`, not for every step: a wake-up costs as much as a step's
   bookkeeping;
2. as the next forward pass begins, or before a sleep: it works beside kernels then, which do not need the interpreter.
   Woken between two passes it would take the interpreter first, or the core, and hold up the next pass.
"""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

from services.denoiser.engine import Engine, Job, StepResult, Threshold
from services.denoiser.worker_events import Admit, Drop, Left, LetGo, Rejected, Turn

Order: TypeAlias = Admit | Drop | Turn | LetGo


class Pass(NamedTuple):
    """One step of the engine."""

    result: StepResult
    left: frozenset[str]  # run ids that were let go at their block's end
    started: float  # monotonic seconds
    ended: float
    overhead_s: float | None  # of the turn, outside forward and commit; None for the first turn after a sleep


News: TypeAlias = Pass | Left | Rejected


class HotLoop:
    """`start` it, `tell` it orders, `take` its news when `on_news` is called. Any exception ends it: `on_failure`.

    The three callbacks are called on the loop's own thread.
    """

    def __init__(
        self,
        build_engine: Callable[[], Engine],
        *,
        on_ready: Callable[[Engine], None],
        on_news: Callable[[], None],
        on_failure: Callable[[BaseException], None],
        threads: int = 1,
        hand_over_every_s: float = 0.05,
    ) -> None:
        self._build_engine = build_engine
        self._on_ready, self._on_news, self._on_failure = on_ready, on_news, on_failure
        self._threads = threads
        self._hand_over_every_s = hand_over_every_s
        self._orders: deque[Order] = deque()
        self._news: deque[News] = deque()
        self._wake = threading.Event()
        self._stopping = False
        # A daemon: a process that is asked to stop while a large model loads need not wait for it.
        self._thread = threading.Thread(target=self._run, name="hot-loop", daemon=True)
        # the thread's own
        self._live: set[str] = set()  # run ids in the engine
        self._letting_go: set[str] = set()
        self._handed_over = 0.0
        self._news_due = False
        self._turn_ended: float | None = None

    def start(self) -> None:
        """Builds the engine and runs, in a thread of its own."""
        self._thread.start()

    def stop(self, limit_s: float) -> None:
        """Ends the loop after its current step; waits up to `limit_s` seconds."""
        self._stopping = True
        self._wake.set()
        self._thread.join(limit_s)

    def tell(self, order: Order) -> None:
        """Obeyed before the next step."""
        self._orders.append(order)
        self._wake.set()

    def take(self) -> list[News]:
        """What has happened since the last call, in order."""
        news = self._news
        return [news.popleft() for _ in range(len(news))]

    # --- on the loop's thread ---

    def _run(self) -> None:
        try:
            torch.set_num_threads(self._threads)
            engine = self._build_engine()
            engine.on_forward = self._say_news
            self._on_ready(engine)
            while not self._stopping:
                self._take_in(engine)
                if self._live:
                    self._step(engine)
                else:
                    self._sleep()
        except BaseException as error:
            self._on_failure(error)

    def _sleep(self) -> None:
        self._turn_ended = None
        self._say_news()
        if not self._orders:
            self._wake.wait()
        self._wake.clear()  # before the orders are read: one that comes now is read, or wakes us again

    def _take_in(self, engine: Engine) -> None:
        while self._orders:
            order = self._orders.popleft()
            match order:
                case Admit():
                    self._admit(engine, order)
                case Turn() if order.run_id in self._live:
                    engine.set_threshold(order.run_id, order.threshold)
                case Drop() if order.run_id in self._live:
                    self._remove(engine, order.run_id)
                case LetGo() if order.run_id in self._live:
                    self._let_go(engine, order.run_id)

    def _admit(self, engine: Engine, order: Admit) -> None:
        try:
            engine.admit(_job(order))
        except ValueError as error:
            self._hand_over(Rejected(run_id=order.run_id, detail=str(error)))
        else:
            self._live.add(order.run_id)

    def _let_go(self, engine: Engine, run_id: str) -> None:
        if engine.progress(run_id).step_in_block == 0:
            self._remove(engine, run_id)
            self._hand_over(Left(run_id=run_id))
        else:
            self._letting_go.add(run_id)

    def _remove(self, engine: Engine, run_id: str) -> None:
        engine.remove(run_id)
        self._live.discard(run_id)
        self._letting_go.discard(run_id)

    def _step(self, engine: Engine) -> None:
        started = time.monotonic()
        result = engine.step()
        self._note(engine, result, started, time.monotonic())

    def _note(self, engine: Engine, result: StepResult, started: float, ended: float) -> None:
        block_done = False
        left: list[str] = []
        for step in result.requests:
            if step.block_done:
                block_done = True
                if step.finished:
                    self._remove(engine, step.request_id)
                elif step.request_id in self._letting_go:
                    self._remove(engine, step.request_id)
                    left.append(step.request_id)
        overhead_s = None if self._turn_ended is None else ended - self._turn_ended - result.forward_s - result.commit_s
        self._turn_ended = ended
        self._news.append(Pass(result, frozenset(left), started, ended, overhead_s))
        if block_done or ended - self._handed_over >= self._hand_over_every_s:
            self._handed_over = ended
            self._news_due = True

    def _hand_over(self, news: News) -> None:
        self._news.append(news)
        self._news_due = True

    def _say_news(self) -> None:
        if self._news_due:
            self._news_due = False
            self._on_news()


def _job(order: Admit) -> Job:
    request = order.request
    return Job(
        request_id=order.run_id,
        prompt_ids=request.prompt_ids,
        max_tokens=request.max_tokens,
        block_size=request.block_size,
        cache=request.cache,
        blocks_ahead=request.blocks_ahead,
        choice=Threshold(order.threshold, order.opening),
        temperature=request.temperature,
        seed=request.seed,
        ignore_eos=request.ignore_eos,
        committed_ids=order.committed_ids,
        committed_confidences=order.committed_confidences,
    )
