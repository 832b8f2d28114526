"""Writing the record of a request, by whoever may: its worker, its gateway, the scheduler.

1. Every write continues from the sequence that its writer knows to be the last.
2. Refused: read it back. One's own record means that an acknowledgement was lost; anything else means that somebody
   else owns the request now (`Overtaken`): drop it.
3. No answer: try again until the limit. Writing twice is harmless, since only one of two equal writes can continue
   from the same sequence.
"""

import asyncio
import contextlib

from contracts import subjects
from contracts.codec import MalformedMessage
from contracts.messages import ProgressRecord
from services.bus import Bus, BusTimeout, SequenceConflict, Stored

_TRY_S = 2.0  # of one try, where the limit is not shorter
_LEAST_TRY_S = 0.1  # even where the limit has passed: it is tried once
_PAUSE_S = 0.1  # between tries


class Overtaken(Exception):
    """Another record stands. `found` is that record and its sequence, or None if the record has expired."""

    def __init__(self, found: Stored[ProgressRecord] | None) -> None:
        super().__init__(f"another record stands: {found.message.state if found else 'none'}")
        self.found = found


def subject_of(record: ProgressRecord) -> str:
    return subjects.progress(record.gateway_id, record.request_id)


async def write_record(bus: Bus, record: ProgressRecord, *, after_seq: int, limit_s: float) -> int:
    """Stores the record and returns its sequence. Raises Overtaken, or BusTimeout after `limit_s` seconds."""
    loop = asyncio.get_running_loop()
    give_up_at = loop.time() + limit_s
    while True:
        try_s = min(_TRY_S, max(give_up_at - loop.time(), _LEAST_TRY_S))
        with contextlib.suppress(BusTimeout, TimeoutError):
            try:
                return await bus.append(subject_of(record), record, after_seq=after_seq, limit_s=try_s)
            except SequenceConflict:
                return await _own(bus, record, try_s)
        if loop.time() + _PAUSE_S >= give_up_at:
            raise BusTimeout(f"record of {record.request_id} not stored within {limit_s:g} s")
        await asyncio.sleep(_PAUSE_S)


async def _own(bus: Bus, record: ProgressRecord, limit_s: float) -> int:
    """The sequence of the record, if it is the one that stands. Raises Overtaken, BusTimeout, TimeoutError."""
    try:
        async with asyncio.timeout(limit_s):
            found = await bus.last(subjects.PROGRESS, subject_of(record), ProgressRecord)
    except MalformedMessage:
        raise Overtaken(None) from None
    if found is None or found.message != record:
        raise Overtaken(found)
    return found.seq
