"""A real step-predictor beside a real worker: reports in, forecasts out."""

import itertools
import signal
from pathlib import Path

import pytest

from contracts import messages as m
from contracts import subjects
from services.bus import Bus
from services.digest import weights_digest
from tests.conftest import NatsServer
from tests.integration import random_model
from tests.integration.worker_stage import BLOCK, MAX_TOKENS, Served, Stage
from tests.predictors import write_predictor
from tests.processes import ServiceProcess
from tests.unit.step_predictor.builders import make_report, make_state
from tests.waiting import until

pytestmark = pytest.mark.integration

THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Served:
    served = Served(tmp_path_factory.mktemp("profile"))
    write_predictor(served.folder, model=random_model.MODEL, block_size=BLOCK)
    return served


class Listener:
    """What the test hears of a predictor that it starts."""

    def __init__(self, bus: Bus, nats_url: str, profile: Path, log_file: Path) -> None:
        self.bus = bus
        self.forecasts: list[m.Forecast] = []
        self.process = ServiceProcess("services.step_predictor", log_file, nats_url, profile=profile)

    async def start(self) -> None:
        """Returns when it is ready."""
        await self.bus.subscribe("forecast.*", m.Forecast, self.forecasts.append)
        await self.bus.flush()
        self.process.start()
        await until(lambda: "ready: " in self.process.log or not self.process.runs, "it is ready", 60)
        assert self.process.runs, self.process.log

    def entries(self) -> list[m.RequestForecast]:
        return [entry for forecast in self.forecasts for entry in forecast.entries]


async def test_a_workers_reports_become_forecasts(
    stage: Stage, bus: Bus, nats_server: NatsServer, tmp_path: Path
) -> None:
    listener = Listener(bus, nats_server.url, stage.served.folder, tmp_path / "predictor.log")
    await listener.start()
    try:
        await stage.worker("w-0", report_every_ms=1)
        requests = [stage.served.request(number) for number in range(3)]
        for request in requests:
            await stage.assign("w-0", request)
        for request in requests:
            await stage.until_state(request, "finished")
        await until(lambda: {e.request_id for e in listener.entries()} == {r.request_id for r in requests}, "forecasts")
        await bus.flush()
    finally:
        listener.process.kill()
    assert {(f.instance_id, f.thresholds) for f in listener.forecasts} == {("w-0", THRESHOLDS)}
    states = {(e.request_id, e.steps): e for report in stage.reports for e in report.entries}
    for entry in listener.entries():
        state = states[entry.request_id, entry.steps]  # of a report, and only of one
        masked = MAX_TOKENS - state.tokens_committed
        # the rule that its trees have learnt, within what is certain
        assert entry.steps_left[0] == pytest.approx(max(0.5 * masked, entry.blocks_left[0] + 1), rel=0.3, abs=2)
        assert len(entry.steps_left) == len(entry.steps_left_upper) == len(entry.blocks_left) == len(THRESHOLDS)
        assert all(left < upper for left, upper in zip(entry.steps_left, entry.steps_left_upper, strict=True))
    for request in requests:
        mine = [entry for entry in listener.entries() if entry.request_id == request.request_id]
        tokens = [states[entry.request_id, entry.steps].tokens_committed for entry in mine]
        assert all(later - earlier >= 4 for earlier, later in itertools.pairwise(tokens)), "each 4 tokens"
        assert len(tokens) > 4


async def test_many_reports_at_once_are_answered_and_whoever_asks_gets_forecasts_again(
    bus: Bus, nats_server: NatsServer, tmp_path: Path, served: Served
) -> None:
    listener = Listener(bus, nats_server.url, served.folder, tmp_path / "predictor.log")
    await listener.start()
    try:
        states = [make_state(f"r{number}", tokens_committed=number % 60) for number in range(1000)]
        for start in range(0, 1000, 8):
            instance_id = f"w-{start}"
            report = make_report(*states[start : start + 8], instance_id=instance_id)
            await bus.publish(subjects.report(instance_id), report)
        await until(lambda: len(listener.entries()) >= 1000, "a forecast of each")
        assert sorted(e.request_id for e in listener.entries()) == sorted(state.request_id for state in states)
        by_instance = {f.instance_id: {e.request_id for e in f.entries} for f in listener.forecasts}
        assert by_instance["w-16"] == {f"r{number}" for number in range(16, 24)}

        again = make_report(states[0])
        await bus.publish(subjects.report("w-0"), again)  # nothing new
        await bus.publish(subjects.STATUS_ASK, m.StatusAsk())
        await until(lambda: repeated(listener, bus, again), "a forecast after the question")
        assert [e.request_id for e in listener.entries()[1000:]][:1] == ["r0"]
    finally:
        listener.process.kill()


async def repeated(listener: Listener, bus: Bus, report: m.Report) -> bool:
    """Two subscriptions have no order, so the report is said until it is heard after the question."""
    await bus.publish(subjects.report("w-0"), report)
    return len(listener.entries()) > 1000


async def test_without_a_model_it_says_so_and_exits(nats_server: NatsServer, tmp_path: Path) -> None:
    profile = random_model.write_profile(tmp_path / "bare")
    process = ServiceProcess("services.step_predictor", tmp_path / "log", nats_server.url, profile=profile)
    process.start()
    assert await process.exit_code(60) == 2
    assert "step-predictor: no step predictor at" in process.log
    assert "python -m tools.predictor train" in process.log
    assert "Traceback" not in process.log


async def test_for_other_weights_it_names_both_and_exits(nats_server: NatsServer, tmp_path: Path) -> None:
    """With the exit code that tells its supervisor not to start it again."""
    profile = random_model.write_profile(tmp_path / "bare")
    write_predictor(profile, model=random_model.MODEL, block_size=BLOCK, weights="d0d0caca00000000")
    process = ServiceProcess("services.step_predictor", tmp_path / "log", nats_server.url, profile=profile)
    process.start()
    assert await process.exit_code(60) == 2
    assert "was trained for the weights d0d0caca00000000, those in" in process.log
    assert weights_digest(profile / "model") in process.log
    assert "Traceback" not in process.log


async def test_it_stops_when_it_is_asked_to(bus: Bus, nats_server: NatsServer, tmp_path: Path, served: Served) -> None:
    listener = Listener(bus, nats_server.url, served.folder, tmp_path / "predictor.log")
    await listener.start()
    listener.process.signal(signal.SIGTERM)
    assert await listener.process.exit_code() == 0
