"""Every message that crosses the bus. Nothing here acts.

Rules for changing this file:
1. A message is a frozen Struct, tagged with its class name; readers ignore fields that they do not know.
2. A new field has a default, so old and new versions run side by side. A field is never renamed or re-typed.
3. Times on the wire are wall-clock seconds since the epoch (`_at`); durations carry their unit (`_s`, `_ms`).
4. Reports are arrays, not maps (`array_like`): they are the only messages of the hot loop. Append fields, never insert.
5. `tests/wire/` keeps an encoded sample of every released message and decodes it for ever.
"""

from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

# Ids become subject tokens, so they hold no dot, space or wildcard.
Id: TypeAlias = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,80}\Z")]
TokenId: TypeAlias = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Probability: TypeAlias = Annotated[float, Meta(ge=0.0, le=1.0)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Positive: TypeAlias = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Seconds: TypeAlias = Annotated[float, Meta(ge=0.0)]
# The bounds keep NaN and infinity out: nothing that is compared with them would come out right.
WallClock: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e11)]
Ratio: TypeAlias = Annotated[float, Meta(ge=0.0, le=1e9)]

CacheMode: TypeAlias = Literal["none", "prefix", "dual"]
State: TypeAlias = Literal["running", "released", "finished", "cancelled", "failed"]
Reason: TypeAlias = Literal[
    "",
    # cancelled
    "client_gone",  # the client hung up
    "client_deleted",  # DELETE /v1/results/{id}
    "stop_string",  # the gateway has seen a stop string: the answer is complete
    "gateway_lost",  # its gateway has been silent for too long
    "sibling_failed",  # another choice of the same call failed, so the call did
    # cancelled or failed
    "expired",  # its time limit has passed
    # failed
    "worker_lost",  # lost with its instance as often as a request may be
    "too_long",  # no instance could ever hold its canvas
    "unknown_model",  # no profile of that name is served
    "engine_error",  # the engine raised an error over it
    "overloaded",  # refused: with what is ahead of it, it cannot meet its deadline
    "slo_too_short",  # refused: it could not meet its deadline even alone
]


class Message(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Base of all messages: frozen, tagged with the class name, fields by name."""


# --- durable: REQUESTS and PROGRESS -------------------------------------------------------------------------------


class GenerateRequest(Message, frozen=True, kw_only=True):
    """One canvas to denoise. A chat call with n=2 is two of these. Stream REQUESTS, subject `req.<request_id>`."""

    request_id: Id
    gateway_id: Id
    model: str
    prompt_ids: list[TokenId]
    max_tokens: Positive  # exact number of output tokens; the canvas rounds it up to whole blocks
    block_size: Positive
    cache: CacheMode
    blocks_ahead: Count | None = None  # that the model sees beyond the current one; None: all
    created_at: WallClock
    expires_at: WallClock
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 0.0
    seed: int = 0
    ignore_eos: bool = False
    threshold: Probability | None = None  # the client's pin
    floor: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.0  # its threshold is not turned down below that
    priority: int = 0  # higher is more urgent
    deadline_at: WallClock | None = None
    watch: bool = False  # somebody looks on: each of its steps is told on `canvas.<request_id>`
    detached: bool = False  # runs on without its client and its gateway (Idempotency-Key)
    fingerprint: str = ""  # what answering the call again needs, its body's hash among it; for gateways alone

    @property
    def num_blocks(self) -> int:
        """Blocks of the canvas's output area."""
        return -(-self.max_tokens // self.block_size)

    @property
    def canvas_tokens(self) -> int:
        """Length of prompt and output area, in tokens: what the KV pool keeps room for."""
        return len(self.prompt_ids) + self.num_blocks * self.block_size

    @property
    def first_record(self) -> "ProgressRecord":
        """Where it stands before anybody has written a record: nothing yet."""
        return ProgressRecord(
            request_id=self.request_id,
            gateway_id=self.gateway_id,
            attempt=1,
            state="running",
            prompt_tokens=len(self.prompt_ids),
            created_at=self.created_at,
            deadline_at=self.deadline_at,
            fingerprint=self.fingerprint,
        )


class BlockCost(Message, frozen=True, kw_only=True):
    """What one finished block took."""

    instance_id: Id
    tp_degree: Positive
    recompute_steps: Count
    cache_steps: Count
    mean_threshold: Probability  # over its steps, as applied: in a block's opening perhaps more than was set
    seconds: Seconds  # from the block's first pass to its last, on that instance


class ProgressRecord(Message, frozen=True, kw_only=True):
    """Where a request stands. Stream PROGRESS, subject `prog.<gateway_id>.<request_id>`; the last one counts.

    The first final state stands. Each write names the stream sequence that it continues from, so two writers can
    never both believe that they own a request.
    """

    request_id: Id
    gateway_id: Id
    attempt: Positive  # placements, counted anew after each loss
    state: State
    holder: str = ""  # the instance that wrote it, or holds it; "" when scheduler or gateway wrote it
    epoch: Count = 0  # the scheduler's term under which it was placed
    reason: Reason = ""
    blocks_done: Count = 0
    token_ids: list[TokenId] = []  # all committed tokens of whole blocks; cut before EOS and at max_tokens at the end
    confidences: list[Probability] = []  # of token_ids, at their commit
    blocks: list[BlockCost] = []
    finish: Literal["", "eos", "length"] = ""
    moves: Count = 0  # placements on another instance without a loss
    prompt_tokens: Count = 0
    created_at: WallClock = 0.0
    deadline_at: WallClock | None = None
    started_at: WallClock | None = None  # first accepted assignment
    written_at: WallClock = 0.0
    fingerprint: str = ""
    retry_after_s: Ratio | None = None  # failed as `overloaded`: from when on trying again may help

    @property
    def is_final(self) -> bool:
        """No later record may follow this one."""
        return self.state in ("finished", "cancelled", "failed")


# --- ephemeral: the scheduler and its workers ---------------------------------------------------------------------


class Assign(Message, frozen=True, kw_only=True):
    """Run this request. Request-reply on `inst.<instance_id>.assign`; idempotent by (request_id, attempt)."""

    epoch: Positive
    attempt: Positive
    request: GenerateRequest
    threshold: Probability
    resume: ProgressRecord | None = None  # continue after its blocks; None: from the start
    from_seq: Count = 0  # PROGRESS sequence that the first write continues from


class Release(Message, frozen=True, kw_only=True):
    """Give the request back at the end of its block. Request-reply on `inst.<instance_id>.release`."""

    epoch: Positive
    attempt: Positive
    request_id: Id


class Accepted(Message, frozen=True, kw_only=True):
    """The worker holds it, or will release it; also where it already did."""


class Refused(Message, frozen=True, kw_only=True):
    """The worker will not, and why: `stale_epoch`, `kv_full`, `too_long`, `draining`, `not_held`, `bad_request`."""

    reason: Literal["stale_epoch", "kv_full", "too_long", "draining", "not_held", "bad_request"]
    detail: str = ""
    epoch: Count = 0  # the highest epoch the worker has seen


class Cancel(Message, frozen=True, kw_only=True):
    """A hint that the request's final record is written: drop it now. `cancel.<request_id>`."""

    request_id: Id


class DrainNotice(Message, frozen=True, kw_only=True):
    """A worker asks the scheduler to take its requests over. Request-reply on `sched.drain`; reply: Accepted."""

    instance_id: Id


class Drain(Message, frozen=True, kw_only=True):
    """An operator wants the instance to hand its requests over and end. Request-reply on `inst.<instance_id>.drain`."""


class ThresholdEntry(Message, frozen=True, kw_only=True):
    request_id: Id
    attempt: Positive
    threshold: Probability


class Thresholds(Message, frozen=True, kw_only=True):
    """The thresholds of all requests of one instance. `inst.<instance_id>.thresholds`."""

    entries: list[ThresholdEntry]


# --- ephemeral: reports and status --------------------------------------------------------------------------------


class RequestReport(msgspec.Struct, frozen=True, array_like=True):
    """How far one request is, inside a Report."""

    request_id: Id
    attempt: Positive
    block_index: Count
    num_blocks: Positive
    steps: Count  # run so far, on all instances
    steps_in_block: Count
    tokens_committed: Count
    tokens_committed_in_block: Count
    threshold: Probability
    confidence: tuple[Probability, Probability, Probability, Probability, Probability]  # min, quartiles, max of commits
    next_recompute: bool  # its next step is a recompute step
    finished: bool
    prompt_tokens: Count = 0  # 0: the worker is of a version that did not say yet, so the next two say nothing either
    tokens_left_in_block: Count = 0  # still to commit in the current block; nothing behind its first EOS is
    ends_in_block: bool = False  # the current block holds an EOS, so it is the last one


class Report(msgspec.Struct, frozen=True, array_like=True, tag="Report"):
    """What one instance has done since its last report. `report.<instance_id>`."""

    instance_id: Id
    sent_at: WallClock
    entries: list[RequestReport]
    latency_ratio: Ratio = 1.0  # measured over profiled step latency, running median


class CanvasStep(Message, frozen=True, kw_only=True):
    """What one step of a watched request committed. `canvas.<request_id>`. May be lost; an attempt may revise it."""

    request_id: Id
    attempt: Positive
    instance_id: Id
    tp_degree: Positive
    kind: Literal["recompute", "cache"]
    block_index: Count
    step: Count  # of the request, from 1, on all instances
    threshold: Probability
    positions: list[Count]  # in the output area; parallel with the next two
    token_ids: list[TokenId]
    confidences: list[Probability]


class Held(Message, frozen=True, kw_only=True):
    """A request that an instance holds."""

    request_id: Id
    attempt: Positive
    canvas_tokens: Positive
    block_size: Positive
    cache: CacheMode
    blocks_ahead: Count | None = None
    blocks_done: Count


class InstanceStatus(Message, frozen=True, kw_only=True):
    """What an instance is and holds; every second and when asked. `status.instance.<instance_id>`."""

    instance_id: Id
    node_id: Id
    model: str
    tp_degree: Positive
    sent_at: WallClock
    epoch: Count  # the highest that it has seen
    draining: bool
    max_requests: Positive
    kv_tokens: Positive  # size of its KV pool
    held: list[Held]
    latency_ratio: Ratio = 1.0


class InstanceLost(Message, frozen=True, kw_only=True):
    """An agent saw the process of an instance exit. `status.lost.<instance_id>`."""

    instance_id: Id
    detail: str = ""


class InstanceState(Message, frozen=True, kw_only=True):
    """An instance of a node, inside a NodeStatus."""

    instance_id: Id
    state: Literal["starting", "running", "backing_off", "stopping"]
    restarts: Count = 0
    detail: str = ""  # why it was lost, what it waits for, why it cannot run
    slot_id: str = ""  # which of the plan's instances it is
    tp_degree: Count = 0  # 0: as its profile says
    devices: list[Count] = []
    profile: str = ""


class NodeStatus(Message, frozen=True, kw_only=True):
    """What an agent runs on its node; every second and when asked. `status.node.<node_id>`."""

    node_id: Id
    sent_at: WallClock
    instances: list[InstanceState]
    devices: list[Count] = []  # that instances may be placed on
    device_kind: Literal["", "cpu", "cuda"] = ""
    planned: bool = False  # it converges on the plan in the CLUSTER bucket; else it runs what it was configured to
    plan_revision: Count = 0  # the plan's that it converges on; 0: it has seen none with this node in it


class GatewayStatus(Message, frozen=True, kw_only=True):
    """A gateway is alive; every second and when asked. `status.gateway.<gateway_id>`."""

    gateway_id: Id
    sent_at: WallClock


class StatusAsk(Message, frozen=True, kw_only=True):
    """Everybody, say how you are. `status.ask`."""


# --- ephemeral: forecasts and load --------------------------------------------------------------------------------


class RequestForecast(msgspec.Struct, frozen=True, array_like=True):
    """What a request still needs, inside a Forecast: a number for each of its thresholds."""

    request_id: Id
    attempt: Positive
    steps: Count  # that it had run, as the report said that this is made from: counts down from there
    steps_left: tuple[Ratio, ...]  # mean, all steps
    steps_left_upper: tuple[Ratio, ...]  # upper bound (quantile or conformal), all steps
    blocks_left: tuple[Ratio, ...]  # mean, blocks still to begin: with a cache, the recompute steps among them


class Forecast(msgspec.Struct, frozen=True, array_like=True, tag="Forecast"):
    """The forecasts for requests of one instance that are new since its last one. `forecast.<instance_id>`."""

    instance_id: Id
    sent_at: WallClock
    thresholds: tuple[Probability, ...]  # ascending
    entries: list[RequestForecast]


class PriorityCap(Message, frozen=True, kw_only=True):
    """The highest threshold that load control allows the last request of a priority, and so a newcomer."""

    priority: int
    threshold: Probability


class LoadState(Message, frozen=True, kw_only=True):
    """How the work of all open requests compares with what the instances can do. `load.state`."""

    sent_at: WallClock
    horizon_s: Seconds  # over which demand and capacity are compared
    demand_s: Seconds  # instance-seconds, every request at its cap
    capacity_s: Seconds  # instance-seconds
    caps: list[PriorityCap]  # most urgent first; none: no request is open
    num_open: Count
    num_hopeless: Count  # of them, requests that cannot make their deadline at any threshold
    floor_s: Seconds = 0.0  # the demand if every request that is not pinned ran at the lowest threshold


# --- CLUSTER bucket -----------------------------------------------------------------------------------------------


class SchedulerLease(Message, frozen=True, kw_only=True):
    """Who acts. Key `scheduler`, and `reconfigurator` for that one's; the revision that created it is the epoch."""

    holder: str


class WorkloadClass(Message, frozen=True, kw_only=True):
    """Requests of about the same size and of one priority. Sizes are means."""

    priority: int
    prompt_tokens: Positive
    output_tokens: Positive
    rate_rps: Ratio  # arrivals a second
    requests: Count  # in the window, unweighted
    slo_s: Seconds | None = None  # mean, of those that have one


class WorkloadSnapshot(Message, frozen=True, kw_only=True):
    """What has been asked for lately. Key `workload`."""

    sent_at: WallClock
    model: str
    window_s: Seconds
    covered_s: Seconds  # of the window: how far back what is known goes
    classes: list[WorkloadClass]  # most frequent first


class PlannedInstance(Message, frozen=True, kw_only=True):
    """An instance as the plan wants it. Each process that runs it has an id of its own, which begins with this one."""

    slot_id: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,73}\Z")]  # leaves room for the suffix of an Id
    tp_degree: Count = 0  # 0: as its profile says
    devices: list[Count] = []  # one for each rank, its own alone; none: it shares the node's
    profile: str = ""  # folder; "": the agent's


class NodePlan(Message, frozen=True, kw_only=True):
    """What one node shall run."""

    node_id: Id
    instances: list[PlannedInstance]


class Rollout(Message, frozen=True, kw_only=True):
    """How far a change of layout has come, inside a ClusterPlan."""

    target: list[NodePlan]
    reason: str
    began_at: WallClock
    launching: str = ""  # slot id of the launch under way; "": none is
    launch_began_at: WallClock = 0.0
    stopped: list[PlannedInstance] = []  # for that launch, on its node: wanted again if it fails


class ClusterPlan(Message, frozen=True, kw_only=True):
    """What the nodes shall run now; each agent converges on its part. Key `plan`, changed by compare-and-set alone.

    A node that is not listed runs what it is configured to. A rollout in progress is a part of the plan, so that both
    change in one write.
    """

    revision: Positive  # one more with each write
    written_at: WallClock
    nodes: list[NodePlan]
    reason: str = ""  # of this write
    next_slot: Count = 0  # number that the next new slot id gets: none is ever used twice
    rollout: Rollout | None = None  # None: the layout is as it shall be
    failures: Count = 0  # rollouts in a row that were given up
    failed_at: WallClock = 0.0
