"""A lease: of several schedulers, or several reconfigurators, one acts.

1. The lease is one message that vanishes `ttl_s` after its last renewal. Creating it succeeds for one only.
2. The sequence that created it is the holder's epoch: every later holder has a higher one.
3. Who cannot renew within the time to live, counted from the start of the last successful renewal, has lost it.
4. A renewal that is refused is read back: one's own lease means that an acknowledgement was lost.
"""

import asyncio

from prometheus_client import Gauge

from contracts import subjects
from contracts.messages import SchedulerLease
from services.bus import Bus, BusTimeout, SequenceConflict
from services.runtime import Stop

LEASE_TTL_S = 1  # the scheduler's
_RENEW_SHARE = 0.3  # of the time to live, from one renewal to the next
_ASK_EVERY_S = 0.3  # who stands by

HELD = Gauge("tediserve_lease_held", "1 while this process holds the lease, 0 while it stands by", ["lease"])


class LeaseLost(Exception):
    """Somebody else may hold the lease by now."""


class Lease:
    """`acquire` it, then run `keep` beside the work; when `keep` raises, stop acting at once."""

    def __init__(self, bus: Bus, holder: str, key: str = subjects.LEASE_KEY, ttl_s: int = LEASE_TTL_S) -> None:
        self._bus, self._subject, self._ttl_s = bus, subjects.cluster_key(key), ttl_s
        self._value = SchedulerLease(holder=holder)
        self._seq = 0
        self._held = HELD.labels(key)
        self._held.set(0)
        self.epoch = 0

    async def acquire(self) -> int:
        """Waits, without limit: standing by is a normal state. Returns the epoch."""
        while True:
            try:
                self._seq = await self._bus.append(
                    self._subject, self._value, after_seq=0, ttl_s=self._ttl_s, limit_s=self._ttl_s
                )
            except (SequenceConflict, BusTimeout):
                await asyncio.sleep(_ASK_EVERY_S)
            else:
                self.epoch = self._seq
                self._held.set(1)
                return self.epoch

    async def acquire_unless(self, stopping: asyncio.Event) -> bool:
        """As `acquire`. False: asked to stop while standing by."""
        acquiring, stopped = asyncio.create_task(self.acquire()), asyncio.create_task(stopping.wait())
        try:
            await asyncio.wait({acquiring, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if not acquiring.done():
                return False
            acquiring.result()
            return True
        finally:
            acquiring.cancel()
            stopped.cancel()

    async def keep_or_stop(self) -> None:
        """Renews for ever. Raises Stop, with exit code 3, when it is lost."""
        try:
            await self.keep()
        except LeaseLost as error:
            raise Stop(3, f"lease lost: {error}") from None

    async def keep(self) -> None:
        """Renews for ever. Raises LeaseLost."""
        try:
            await self._renew()
        finally:
            self._held.set(0)

    async def _renew(self) -> None:
        loop = asyncio.get_running_loop()
        renewed_at = tried_at = loop.time()
        while True:
            await asyncio.sleep(_RENEW_SHARE * self._ttl_s)
            started_at = loop.time()
            left_s = renewed_at + self._ttl_s - started_at
            if left_s <= 0:
                raise LeaseLost("not renewed in time")
            try:
                self._seq = await self._bus.append(
                    self._subject, self._value, after_seq=self._seq, ttl_s=self._ttl_s, limit_s=left_s
                )
                renewed_at = tried_at = started_at
            except SequenceConflict:
                self._seq = await self._stored_seq()
                renewed_at = tried_at  # whichever try was stored, it began no earlier
            except BusTimeout:
                tried_at = started_at if tried_at == renewed_at else tried_at

    async def _stored_seq(self) -> int:
        """The sequence of the lease, if it is ours. Raises LeaseLost otherwise."""
        try:
            found = await self._bus.last(subjects.CLUSTER_STREAM, self._subject, SchedulerLease)
        except BusTimeout:
            found = None
        if found is None or found.message != self._value:
            raise LeaseLost("it expired, or another one holds it")
        return found.seq

    async def give_up(self) -> None:
        """Lets one that stands by take over without waiting for the time to live."""
        try:
            await self._bus.purge(subjects.CLUSTER_STREAM, self._subject)
        except BusTimeout:
            return
