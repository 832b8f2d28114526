"""The hot loop obeys before each step, hands over at block ends, sleeps when idle, and tells when the engine fails."""

import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from services.denoiser.engine import Engine, EngineConfig, Job, StepResult
from services.denoiser.hot_loop import HotLoop, News, Pass
from services.denoiser.loader import load_model
from services.denoiser.worker_events import Admit, Drop, Left, LetGo, Rejected, Turn
from tests.unit.denoiser import random_model
from tests.unit.denoiser_worker.builders import make_request


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return random_model.write(tmp_path_factory.mktemp("hot") / "model")


class Stepwise(Engine):
    """Each step waits for the test's permission, so the test knows what comes between two of them."""

    permits: "queue.Queue[None]"

    def step(self) -> StepResult:
        self.permits.get(timeout=30)
        return super().step()


class Bench:
    def __init__(self, folder: Path, *, stepwise: bool) -> None:
        self.ready = threading.Event()
        self.called = threading.Semaphore(0)
        self.failure: BaseException | None = None
        self.failed = threading.Event()
        self.permits: queue.Queue[None] = queue.Queue()
        self.news: list[News] = []
        self.engine: Engine

        def build() -> Engine:
            kind = Stepwise if stepwise else Engine
            self.engine = kind(load_model(folder), config=EngineConfig(kv_budget_tokens=160, max_requests=4))
            if isinstance(self.engine, Stepwise):
                self.engine.permits = self.permits
            return self.engine

        self.loop = HotLoop(
            build,
            on_ready=lambda _: self.ready.set(),
            on_news=self.called.release,
            on_failure=self._on_failure,
            hand_over_every_s=3600,
        )
        self.loop.start()
        assert self.ready.wait(30)

    def _on_failure(self, error: BaseException) -> None:
        self.failure = error
        self.failed.set()

    def take(self) -> list[News]:
        self.news += self.loop.take()
        return self.news

    def until(self, condition: Callable[[], bool]) -> None:
        give_up_at = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < give_up_at
            time.sleep(0.001)

    def passes(self) -> list[Pass]:
        return [news for news in self.take() if isinstance(news, Pass)]

    def step(self, count: int = 1) -> None:
        """Lets it step so often and waits until it has."""
        before = len(self.passes())
        for _ in range(count):
            self.permits.put(None)
        self.until(lambda: len(self.passes()) >= before + count)

    def end(self) -> None:
        for _ in range(100):
            self.permits.put(None)
        self.loop.stop(30)


@pytest.fixture
def bench(model_folder: Path) -> Iterator[Bench]:
    bench = Bench(model_folder, stepwise=True)
    yield bench
    bench.end()
    assert bench.failure is None


def admit(run_id: str = "run", threshold: float = 1.0, **changes: object) -> Admit:
    """Four blocks of eight; at threshold 1 one token a step."""
    request = make_request(run_id, max_tokens=32, block_size=8, ignore_eos=True, **changes)
    return Admit(run_id=run_id, request=request, threshold=threshold, committed_ids=[], committed_confidences=[])


def test_a_run_is_stepped_to_its_end_and_then_leaves_the_engine(model_folder: Path) -> None:
    bench = Bench(model_folder, stepwise=False)
    bench.loop.tell(admit())
    bench.until(lambda: any(step.finished for p in bench.passes() for step in p.result.requests))
    bench.until(lambda: bench.engine.num_running == 0)
    steps = [step for p in bench.passes() for step in p.result.requests]
    assert [step.block_index for step in steps if step.block_done] == [0, 1, 2, 3]
    assert all(p.started <= p.ended for p in bench.passes())
    # woken for the first step (nothing was handed over for an hour) and at block ends, not for each step
    assert 4 <= bench.called._value <= 5 < len(steps)
    bench.end()


def test_news_are_told_as_the_next_pass_begins_and_before_a_sleep(bench: Bench) -> None:
    told = bench.called
    bench.loop.tell(admit(threshold=0.0))  # a block a step
    for steps in range(4):
        assert told._value == max(0, steps - 1), "the next step waits for its permission: its pass has not begun"
        bench.step()
        assert bench.passes()[-1].result.requests[0].block_done
    bench.until(lambda: told._value == 4)


def test_an_order_is_obeyed_before_the_next_step(bench: Bench) -> None:
    bench.loop.tell(admit("a"))
    bench.step()
    bench.loop.tell(admit("b"))
    bench.step(2)  # the step that was waiting for its permission already, then one that knows of it
    assert [[step.request_id for step in p.result.requests] for p in bench.passes()][-1] == ["a", "b"]
    bench.loop.tell(Drop(run_id="a", reason="cancelled"))
    bench.step(2)
    assert [step.request_id for step in bench.passes()[-1].result.requests] == ["b"]
    assert bench.engine.running == ["b"]


def test_a_threshold_is_turned_for_the_next_step(bench: Bench) -> None:
    bench.loop.tell(admit())
    bench.step()
    bench.loop.tell(Turn(run_id="run", threshold=0.0))
    bench.step(2)
    last = bench.passes()[-1].result.requests[0]
    assert (last.threshold, last.block_done) == (0.0, True)


def test_a_run_is_let_go_at_the_end_of_its_block(bench: Bench) -> None:
    bench.loop.tell(admit("a"))
    bench.loop.tell(admit("b"))
    bench.step(3)
    bench.loop.tell(LetGo(run_id="a"))
    while not any(step.block_done for p in bench.passes() for step in p.result.requests if step.request_id == "a"):
        bench.step()
    assert [p.left for p in bench.passes() if p.left] == [frozenset({"a"})]
    bench.step()
    assert bench.engine.running == ["b"]


def test_a_run_between_two_blocks_is_let_go_without_another_step(bench: Bench) -> None:
    bench.loop.tell(admit())
    bench.loop.tell(LetGo(run_id="run"))
    bench.until(lambda: bench.take() == [Left(run_id="run")])
    assert bench.engine.num_running == 0


def test_orders_about_what_is_gone_are_ignored(bench: Bench) -> None:
    for order in (
        Drop(run_id="x", reason="cancelled"),
        Turn(run_id="x", threshold=0.5),
        LetGo(run_id="x"),
        admit(),
    ):
        bench.loop.tell(order)
    bench.step()
    assert bench.engine.running == ["run"]


def test_what_the_engine_refuses_is_told_and_the_rest_goes_on(bench: Bench) -> None:
    bench.loop.tell(admit("bad", prompt_ids=[random_model.MASK_ID]))
    bench.loop.tell(admit("good"))
    bench.step()
    rejected = bench.take()[0]
    assert isinstance(rejected, Rejected)
    assert rejected.run_id == "bad"
    assert bench.engine.running == ["good"]


def test_the_loop_wakes_for_an_order_however_they_fall(model_folder: Path) -> None:
    """Each run ends before the next is ordered: the loop is about to sleep, or asleep, or awake."""
    bench = Bench(model_folder, stepwise=False)
    for number in range(200):
        run_id = f"r{number}"
        bench.loop.tell(admit(run_id, threshold=0.0))
        bench.until(lambda run_id=run_id: _has_finished(bench, run_id))  # type: ignore[misc]
    bench.end()


def _has_finished(bench: Bench, run_id: str) -> bool:
    return any(step.finished and step.request_id == run_id for p in bench.passes()[-8:] for step in p.result.requests)


def test_an_error_of_the_engine_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> StepResult:
        raise RuntimeError("poison")

    monkeypatch.setattr(bench.engine, "step", fail)
    bench.loop.tell(admit())
    assert bench.failed.wait(30)
    assert isinstance(bench.failure, RuntimeError)
    bench.failure = None


def test_a_model_that_cannot_be_loaded_is_told() -> None:
    failed: queue.Queue[BaseException] = queue.Queue()

    def build() -> Engine:
        raise ValueError("no such model")

    loop = HotLoop(build, on_ready=lambda _: None, on_news=lambda: None, on_failure=failed.put)
    loop.start()
    assert str(failed.get(timeout=30)) == "no such model"
    loop.stop(30)


def test_the_engine_of_the_unit_is_as_the_loop_expects(model_folder: Path) -> None:
    """A job that the loop makes has the request's every field that changes tokens."""
    from services.denoiser.hot_loop import _job

    order = admit(temperature=0.7, seed=5, cache="prefix", blocks_ahead=3)
    job = _job(order)
    assert isinstance(job, Job)
    request = order.request
    fields = ("prompt_ids", "max_tokens", "block_size", "cache", "blocks_ahead", "temperature", "seed", "ignore_eos")
    for name in fields:
        assert getattr(job, name) == getattr(request, name)
