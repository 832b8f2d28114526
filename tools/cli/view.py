"""What the command line tells of a cluster, made of what its services say. Pure.

1. Who has said nothing for `SILENT_S` is not there any more.
2. An instance that its agent runs and that has not spoken yet is told of by its agent's words.
3. A request is held by the instance whose status says so. Else it waits, unless its record is final: then it is about
   to be removed.
4. The plan is what the bucket holds; what runs is what the agents say. A node that the plan does not list runs what it
   is configured to.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Generic, Literal, TypeAlias, TypeVar

import msgspec

from contracts import messages as m

SILENT_S = 3.0

InstancePhase: TypeAlias = Literal["serving", "draining", "starting", "running", "backing_off", "stopping"]
RequestPhase: TypeAlias = Literal["running", "waiting", "finished", "cancelled", "failed"]
S = TypeVar("S", m.InstanceStatus, m.NodeStatus, m.GatewayStatus, m.LoadState)


class UnknownInstance(ValueError):
    """No instance, or more than one, has that name; says which there are."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what is shown; also what `--json` prints."""


class InstanceRow(Row, frozen=True, kw_only=True):
    instance_id: str
    node_id: str
    state: InstancePhase
    model: str = ""
    tp_degree: int = 0  # 0: not known yet
    requests: int = 0
    max_requests: int = 0
    tokens: int = 0  # of the K/V pool, taken by the canvases that it holds
    kv_tokens: int = 0  # size of the pool
    kv_use: float = 0.0  # share of it
    latency_ratio: float = 1.0  # measured over profiled step latency
    detail: str = ""


class Status(Row, frozen=True, kw_only=True):
    """The cluster at a moment."""

    at: float  # wall clock
    scheduler: str  # who holds the lease; "": nobody
    reconfigurator: str
    threshold_controller: str
    epoch: int  # the scheduler's term, as the instances know it
    open_requests: int
    waiting_requests: int
    instances: list[InstanceRow]
    gateways: list[str]
    nodes: list[m.NodeStatus]
    load: m.LoadState | None


class RequestRow(Row, frozen=True, kw_only=True):
    request_id: str
    state: RequestPhase
    instance_id: str  # "": nobody holds it
    attempt: int
    moves: int
    blocks_done: int
    num_blocks: int
    priority: int
    age_s: float
    slo_s: float | None  # from its creation to its deadline
    deadline_at: float | None
    slack_s: float | None  # to its deadline


class SlotRow(Row, frozen=True, kw_only=True):
    """An instance that the plan wants, that runs, or both."""

    node_id: str
    slot_id: str
    wanted: bool
    tp_degree: int
    devices: list[int]
    profile: str
    state: str  # "": nothing runs
    instance_id: str = ""
    detail: str = ""


class PlanView(Row, frozen=True, kw_only=True):
    plan: m.ClusterPlan | None
    slots: list[SlotRow]


class _Newest(Generic[S]):
    """The last message of each sender, as long as it is not too old."""

    def __init__(self) -> None:
        self._found: dict[str, tuple[float, S]] = {}

    def note(self, sender: str, message: S, now: float) -> None:
        self._found[sender] = (now, message)

    def forget(self, sender: str) -> None:
        self._found.pop(sender, None)

    def at(self, now: float) -> dict[str, S]:
        """By sender, in order of their ids."""
        self._found = {key: found for key, found in self._found.items() if now - found[0] < SILENT_S}
        return {key: self._found[key][1] for key in sorted(self._found)}


class Cluster:
    """What has been heard. `now`: monotonic seconds; `wall`: the wall clock."""

    def __init__(self) -> None:
        self._instances: _Newest[m.InstanceStatus] = _Newest()
        self._nodes: _Newest[m.NodeStatus] = _Newest()
        self._gateways: _Newest[m.GatewayStatus] = _Newest()
        self._load: _Newest[m.LoadState] = _Newest()

    def note(self, message: m.Message, now: float) -> None:
        """A status, a load state or a loss."""
        match message:
            case m.InstanceStatus():
                self._instances.note(message.instance_id, message, now)
            case m.NodeStatus():
                self._nodes.note(message.node_id, message, now)
            case m.GatewayStatus():
                self._gateways.note(message.gateway_id, message, now)
            case m.LoadState():
                self._load.note("", message, now)
            case m.InstanceLost():
                self._instances.forget(message.instance_id)

    def instance(self, instance_id: str, now: float) -> m.InstanceStatus | None:
        """What it says; None: it is gone."""
        return self._instances.at(now).get(instance_id)

    def find_instance(self, name: str, now: float) -> str:
        """The instance with that id, or the only one whose id begins so. Raises UnknownInstance."""
        ids = list(self._instances.at(now))
        found = [name] if name in ids else [instance_id for instance_id in ids if instance_id.startswith(name)]
        if len(found) == 1:
            return found[0]
        there = f"there are {', '.join(ids)}" if ids else "no instance has spoken"
        raise UnknownInstance(f"{len(found) or 'no'} instances are named {name}; {there}")

    def status(self, *, leases: Mapping[str, str], open_ids: Iterable[str], now: float, wall: float) -> Status:
        """`leases`: who holds which, by key; `open_ids`: of all open requests."""
        statuses = self._instances.at(now)
        held = {held.request_id for status in statuses.values() for held in status.held}
        open_ids = set(open_ids)
        return Status(
            at=wall,
            scheduler=leases.get("scheduler", ""),
            reconfigurator=leases.get("reconfigurator", ""),
            threshold_controller=leases.get("threshold-controller", ""),
            epoch=max((status.epoch for status in statuses.values()), default=0),
            open_requests=len(open_ids),
            waiting_requests=len(open_ids - held),
            instances=self._instance_rows(now),
            gateways=list(self._gateways.at(now)),
            nodes=list(self._nodes.at(now).values()),
            load=self._load.at(now).get(""),
        )

    def _instance_rows(self, now: float) -> list[InstanceRow]:
        statuses = self._instances.at(now)
        silent = [
            InstanceRow(
                instance_id=state.instance_id,
                node_id=node.node_id,
                state=state.state,
                tp_degree=state.tp_degree,
                detail=state.detail,
            )
            for node in self._nodes.at(now).values()
            for state in node.instances
            if state.instance_id not in statuses
        ]
        rows = [*map(_instance_row, statuses.values()), *silent]
        return sorted(rows, key=lambda row: (row.node_id, row.instance_id))

    def requests(
        self,
        open_requests: Sequence[m.GenerateRequest],
        records: Mapping[str, m.ProgressRecord],
        *,
        now: float,
        wall: float,
    ) -> list[RequestRow]:
        """In the order given. `records`: by request id, where there is one."""
        held = {held.request_id: (i, held) for i, status in self._instances.at(now).items() for held in status.held}
        nobody: tuple[str, m.Held | None] = ("", None)
        return [_request_row(r, records.get(r.request_id), held.get(r.request_id, nobody), wall) for r in open_requests]

    def plan(self, plan: m.ClusterPlan | None, now: float) -> PlanView:
        """The plan beside what runs."""
        wanted = {(node.node_id, i.slot_id): i for node in plan.nodes for i in node.instances} if plan else {}
        running = {
            (node.node_id, state.slot_id or state.instance_id): state
            for node in self._nodes.at(now).values()
            for state in node.instances
        }
        planned = {node.node_id for node in plan.nodes} if plan else set()
        return PlanView(
            plan=plan,
            slots=[
                _slot_row(key, wanted.get(key), running.get(key), configured=key[0] not in planned)
                for key in sorted(wanted.keys() | running.keys())
            ],
        )


def _instance_row(status: m.InstanceStatus) -> InstanceRow:
    tokens = sum(held.canvas_tokens for held in status.held)
    return InstanceRow(
        instance_id=status.instance_id,
        node_id=status.node_id,
        state="draining" if status.draining else "serving",
        model=status.model,
        tp_degree=status.tp_degree,
        requests=len(status.held),
        max_requests=status.max_requests,
        tokens=tokens,
        kv_tokens=status.kv_tokens,
        kv_use=tokens / status.kv_tokens,
        latency_ratio=status.latency_ratio,
    )


def _request_row(
    request: m.GenerateRequest, record: m.ProgressRecord | None, holder: tuple[str, m.Held | None], wall: float
) -> RequestRow:
    instance_id, held = holder
    record = record or request.first_record
    deadline_at = request.deadline_at
    return RequestRow(
        request_id=request.request_id,
        state=_phase(record, held),
        instance_id=instance_id,
        attempt=max(record.attempt, held.attempt if held else 0),
        moves=record.moves,
        blocks_done=max(record.blocks_done, held.blocks_done if held else 0),
        num_blocks=request.num_blocks,
        priority=request.priority,
        age_s=wall - request.created_at,
        slo_s=None if deadline_at is None else deadline_at - request.created_at,
        deadline_at=deadline_at,
        slack_s=None if deadline_at is None else deadline_at - wall,
    )


def _phase(record: m.ProgressRecord, held: m.Held | None) -> RequestPhase:
    match record.state:
        case "finished" | "cancelled" | "failed":
            return record.state
    return "running" if held else "waiting"


def _slot_row(
    key: tuple[str, str], wanted: m.PlannedInstance | None, runs: m.InstanceState | None, *, configured: bool
) -> SlotRow:
    """`configured`: the plan does not list the node, so what runs is wanted."""
    node_id, slot_id = key
    what = wanted or runs
    assert what is not None
    return SlotRow(
        node_id=node_id,
        slot_id=slot_id,
        wanted=wanted is not None or configured,
        tp_degree=what.tp_degree,
        devices=what.devices,
        profile=what.profile,
        state=runs.state if runs else "",
        instance_id=runs.instance_id if runs else "",
        detail=runs.detail if runs else "",
    )
