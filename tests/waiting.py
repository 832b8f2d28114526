"""Waiting for what other processes and tasks do. A condition is polled, with a deadline: nothing waits for luck."""

import asyncio
import time
from collections.abc import Callable
from typing import Any


async def until(condition: Callable[[], Any], what: str = "what it waits for", limit_s: float = 30.0) -> Any:
    """The first true value of the condition, which may be a coroutine function. Fails after `limit_s` seconds."""
    give_up_at = time.monotonic() + limit_s
    while True:
        value = condition()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < give_up_at, f"after {limit_s:g} s still not: {what}"
        await asyncio.sleep(0.01)


def wait_until(condition: Callable[[], Any], what: str = "what it waits for", limit_s: float = 30.0) -> None:
    """As `until`, for tests that block."""
    give_up_at = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < give_up_at, f"after {limit_s:g} s still not: {what}"
        time.sleep(0.01)
