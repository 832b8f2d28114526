"""The I/O around the policy: what arrives together is decided once, and nothing old is said after something new."""

import asyncio
from collections.abc import Coroutine
from typing import Any

from contracts import messages as m
from contracts import subjects
from services.threshold_controller import events as e
from services.threshold_controller.service import ThresholdControllerService
from tests.unit.threshold_controller.build import entry, held, make_controller, report, seen, status


class SlowBus:
    """Notes what is published; `open` lets it go out."""

    def __init__(self) -> None:
        self.open = asyncio.Event()
        self.said: list[tuple[str, object]] = []

    async def publish(self, subject: str, message: object) -> bool:
        await self.open.wait()
        self.said.append((subject, message))
        return True

    def thresholds(self) -> list[list[m.ThresholdEntry]]:
        return [message.entries for _, message in self.said if isinstance(message, m.Thresholds)]


class Runtime:
    def __init__(self, bus: SlowBus) -> None:
        self.bus, self.tasks = bus, list[asyncio.Task[Any]]()

    def spawn(self, work: Coroutine[Any, Any, Any], *, name: str) -> None:
        self.tasks.append(asyncio.create_task(work, name=name))


async def round_trips(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


def make_service(bus: SlowBus) -> ThresholdControllerService:
    controller = make_controller("a", load_control=False)
    return ThresholdControllerService(Runtime(bus), controller)  # type: ignore[arg-type]


async def test_what_arrives_together_is_decided_once() -> None:
    bus = SlowBus()
    bus.open.set()
    service = make_service(bus)
    for event in (
        seen("r1"),
        seen("r2", 2),
        status("a", held("r1"), held("r2")),
        report("a", entry("r1"), entry("r2")),
    ):
        service._handle(event)
    assert not bus.said
    await round_trips()
    assert [[one.request_id for one in entries] for entries in bus.thresholds()] == [["r1", "r2"]]


async def test_of_what_could_not_be_sent_only_the_newest_goes_out() -> None:
    bus = SlowBus()
    service = make_service(bus)
    for number, event in enumerate((seen("r1"), seen("r2", 2), seen("r3", 3))):
        service._handle(event)
        service._handle(report("a", *(entry(f"r{n}") for n in range(1, number + 2))))
        await round_trips()
    bus.open.set()
    await round_trips()
    told = [[one.request_id for one in entries] for entries in bus.thresholds()]
    assert told == [["r1"], ["r1", "r2", "r3"]], "the first was on its way already"
    assert {subject for subject, _ in bus.said} <= {subjects.thresholds("a"), subjects.LOAD_STATE}


async def test_one_that_has_stopped_says_nothing() -> None:
    bus = SlowBus()
    bus.open.set()
    service = make_service(bus)
    service._handle(seen("r1"))
    service._handle(status("a", held("r1")))
    service.stop()
    await round_trips()
    service._handle(e.Tick())
    await round_trips()
    assert not bus.said
