"""Writing the record of a request, by whoever may: its worker, its gateway, the scheduler.

1. Every write continues from the sequence that its writer knows to be the last.
2. Refused: read it back. One's own record means that an acknowledgement was lost; anything else means that somebody
   else owns the request now (`Overtaken`): drop it.
3. No answer: try again until the limit. Writing twice is harmless, since only one of two equal writes can continue
   from the same sequence.
"""

import asyncio

from contracts import subjects
from contracts.codec import MalformedMessage
from contracts.messages import ProgressRecord
from services.bus import Bus, BusTimeout, SequenceConflict, Stored


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
        try:
            return await bus.append(subject_of(record), record, after_seq=after_seq)
        except SequenceConflict:
            try:
                found = await bus.last(subjects.PROGRESS, subject_of(record), ProgressRecord)
            except MalformedMessage:
                raise Overtaken(None) from None
            except BusTimeout:
                found = None
            else:
                if found is not None and found.message == record:
                    return found.seq
                raise Overtaken(found)
        except BusTimeout:
            pass
        if loop.time() >= give_up_at:
            raise BusTimeout(f"record of {record.request_id} not stored within {limit_s:g} s")
        await asyncio.sleep(0.1)
