"""The command line's side of the bus. It reads, and says nothing but `status.ask` and what an operator orders."""

import asyncio
import time

from contracts import messages as m
from contracts import subjects
from contracts.codec import MalformedMessage
from services.bus import Bus, BusTimeout, NoResponder
from tools.cli.view import Cluster, PlanView, RequestRow, Status, UnknownInstance

LISTEN_S = 1.2  # everybody has spoken by then: statuses come each second, and when asked for
_READ_LIMIT_S = 20.0
_READS_AT_ONCE = 32
_DRAIN_LIMIT_S = 2.0
_LOOK_EVERY_S = 0.1
_LEASES = (subjects.LEASE_KEY, subjects.RECONFIGURATOR_LEASE_KEY, subjects.CONTROLLER_LEASE_KEY)


class NotDrained(Exception):
    """The instance still runs at the time limit."""


class Listener:
    """`start` it, then ask. All may raise BusTimeout."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._cluster = Cluster()

    async def start(self, listen_s: float = LISTEN_S) -> None:
        """Returns when everybody that lives has spoken."""
        for pattern, wanted in (
            ("status.instance.*", m.InstanceStatus),
            ("status.node.*", m.NodeStatus),
            ("status.gateway.*", m.GatewayStatus),
            ("status.lost.*", m.InstanceLost),
            (subjects.LOAD_STATE, m.LoadState),
        ):
            await self._bus.subscribe(pattern, wanted, lambda message: self._cluster.note(message, time.monotonic()))
        await self._bus.flush()
        await self._bus.publish(subjects.STATUS_ASK, m.StatusAsk())
        await asyncio.sleep(listen_s)

    async def status(self) -> Status:
        open_subjects = await self._bus.stored_subjects(subjects.REQUESTS, "req.*")
        leases = {key: await self._holder(key) for key in _LEASES}
        return self._cluster.status(
            leases=leases,
            open_ids=[subject.partition(".")[2] for subject in open_subjects],
            now=time.monotonic(),
            wall=time.time(),
        )

    async def _holder(self, key: str) -> str:
        try:
            found = await self._bus.last(subjects.CLUSTER_STREAM, subjects.cluster_key(key), m.SchedulerLease)
        except MalformedMessage:
            return ""
        return found.message.holder if found else ""

    async def requests(self) -> list[RequestRow]:
        """In order of their arrival."""
        found: list[m.GenerateRequest] = []
        follower = await self._bus.follow(
            subjects.REQUESTS, "req.*", m.GenerateRequest, lambda request, _: found.append(request)
        )
        try:
            async with asyncio.timeout(_READ_LIMIT_S):
                await follower.caught_up(_READ_LIMIT_S)
                await follower.stop()
                records = await self._records(found)
        except TimeoutError:
            raise BusTimeout(f"the open requests could not be read within {_READ_LIMIT_S:g} s") from None
        return self._cluster.requests(found, records, now=time.monotonic(), wall=time.time())

    async def _records(self, requests: list[m.GenerateRequest]) -> dict[str, m.ProgressRecord]:
        few = asyncio.Semaphore(_READS_AT_ONCE)
        found: dict[str, m.ProgressRecord] = {}

        async def read(request: m.GenerateRequest) -> None:
            subject = subjects.progress(request.gateway_id, request.request_id)
            try:
                async with few:
                    stored = await self._bus.last(subjects.PROGRESS, subject, m.ProgressRecord)
            except MalformedMessage:
                return
            if stored:
                found[request.request_id] = stored.message

        await asyncio.gather(*map(read, requests))
        return found

    async def plan(self) -> PlanView:
        """Raises MalformedMessage where the plan is of a later version."""
        stored = await self._bus.last(subjects.CLUSTER_STREAM, subjects.PLAN, m.ClusterPlan)
        return self._cluster.plan(stored.message if stored else None, time.monotonic())

    # --- draining ---

    async def order_drain(self, name: str) -> str:
        """The id of the instance, which now drains. Raises UnknownInstance."""
        instance_id = self._cluster.find_instance(name, time.monotonic())
        try:
            await self._bus.request(subjects.drain(instance_id), m.Drain(), m.Accepted, limit_s=_DRAIN_LIMIT_S)
        except NoResponder:
            raise UnknownInstance(f"{instance_id} has just gone, or is of a version that cannot be told") from None
        return instance_id

    def num_held(self, instance_id: str) -> int | None:
        """Requests that it holds; None: it is gone."""
        status = self._cluster.instance(instance_id, time.monotonic())
        return None if status is None else len(status.held)

    async def until_gone(self, instance_id: str, limit_s: float) -> None:
        """Raises NotDrained."""
        give_up_at = time.monotonic() + limit_s
        while (held := self.num_held(instance_id)) is not None:
            if time.monotonic() >= give_up_at:
                raise NotDrained(f"{instance_id} still holds {held} requests after {limit_s:g} s; it goes on draining")
            await asyncio.sleep(_LOOK_EVERY_S)
