"""Schedulers whose invariants are checked after each test."""

from collections.abc import Iterator
from typing import Any

import pytest

from services.scheduler.policy import Scheduler
from tests.unit.scheduler.build import Make, make_acting, make_scheduler


@pytest.fixture
def make() -> Iterator[Make]:
    """Makes schedulers whose invariants are checked after the test, whatever it was about."""
    made: list[Scheduler] = []

    def make_one(fresh: bool = False, **settings: Any) -> Scheduler:
        made.append(make_scheduler(**settings) if fresh else make_acting(**settings))
        return made[-1]

    yield make_one
    for scheduler in made:
        scheduler.check_invariants()
