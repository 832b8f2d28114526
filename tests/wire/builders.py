"""One example of every message, with every field set: what `tests/wire/samples` holds, encoded."""

import inspect

import msgspec

from contracts import messages as m

REQUEST = m.GenerateRequest(
    request_id="0123456789abcdef0123456789abcdef",
    gateway_id="gw-00112233",
    model="tedi-tiny",
    prompt_ids=[1, 2, 300, 126335],
    max_tokens=77,
    block_size=32,
    cache="dual",
    blocks_ahead=2,
    created_at=1750000000.25,
    expires_at=1750000120.25,
    temperature=0.8,
    seed=-5,
    ignore_eos=True,
    threshold=0.75,
    floor=0.6,
    priority=-1,
    deadline_at=1750000002.5,
    detached=True,
    watch=True,
    fingerprint="body",
)
BLOCK = m.BlockCost(
    instance_id="node-0-aa", tp_degree=2, recompute_steps=1, cache_steps=9, mean_threshold=0.85, seconds=0.125
)
RECORD = m.ProgressRecord(
    request_id=REQUEST.request_id,
    gateway_id=REQUEST.gateway_id,
    attempt=2,
    state="cancelled",
    holder="node-0-aa",
    epoch=7,
    reason="stop_string",
    blocks_done=1,
    token_ids=[5, 6, 7],
    confidences=[1.0, 0.5, 0.25],
    blocks=[BLOCK],
    finish="length",
    moves=1,
    prompt_tokens=4,
    created_at=1750000000.25,
    deadline_at=1750000002.5,
    started_at=1750000000.5,
    written_at=1750000001.0,
    fingerprint="body",
    retry_after_s=1.5,
)
HELD = m.Held(
    request_id=REQUEST.request_id,
    attempt=2,
    canvas_tokens=100,
    block_size=32,
    cache="prefix",
    blocks_ahead=1,
    blocks_done=1,
)
THRESHOLD = m.ThresholdEntry(request_id=REQUEST.request_id, attempt=2, threshold=0.6)
REQUEST_REPORT = m.RequestReport(
    request_id=REQUEST.request_id,
    attempt=2,
    block_index=1,
    num_blocks=3,
    steps=12,
    steps_in_block=2,
    tokens_committed=40,
    tokens_committed_in_block=8,
    threshold=0.9,
    confidence=(0.5, 0.625, 0.75, 0.875, 1.0),
    next_recompute=False,
    finished=False,
    prompt_tokens=4,
    tokens_left_in_block=24,
    ends_in_block=True,
)
REQUEST_FORECAST = m.RequestForecast(
    request_id=REQUEST.request_id,
    attempt=2,
    steps=12,
    steps_left=(10.5, 16.25),
    steps_left_upper=(14.0, 21.5),
    blocks_left=(1.5, 1.75),
)
CAP = m.PriorityCap(priority=-1, threshold=0.7)
INSTANCE_STATE = m.InstanceState(
    instance_id="node-0-aa",
    state="backing_off",
    restarts=3,
    detail="exit code 1",
    slot_id="node-0",
    tp_degree=2,
    devices=[2, 3],
    profile="profiles/tiny-cpu",
)
WORKLOAD_CLASS = m.WorkloadClass(priority=1, prompt_tokens=300, output_tokens=64, rate_rps=2.5, requests=700, slo_s=1.5)
PLANNED = m.PlannedInstance(slot_id="node-0", tp_degree=2, devices=[2, 3], profile="profiles/tiny-cpu")
NODE_PLAN = m.NodePlan(node_id="node", instances=[PLANNED])
ROLLOUT = m.Rollout(
    target=[NODE_PLAN],
    reason="mean threshold 0.85 instead of 0.7",
    began_at=1750000000.5,
    launching="node-0",
    launch_began_at=1750000000.75,
    stopped=[PLANNED],
)

EXAMPLES: tuple[msgspec.Struct, ...] = (
    REQUEST,
    BLOCK,
    RECORD,
    m.Assign(epoch=7, attempt=2, request=REQUEST, threshold=0.75, resume=RECORD, from_seq=12),
    m.Release(epoch=7, attempt=2, request_id=REQUEST.request_id),
    m.Accepted(),
    m.Refused(reason="kv_full", detail="no room", epoch=7),
    m.Cancel(request_id=REQUEST.request_id),
    m.DrainNotice(instance_id="node-0-aa"),
    m.Drain(),
    THRESHOLD,
    m.Thresholds(entries=[THRESHOLD]),
    REQUEST_REPORT,
    m.Report(instance_id="node-0-aa", sent_at=1750000001.0, entries=[REQUEST_REPORT], latency_ratio=1.25),
    m.CanvasStep(
        request_id=REQUEST.request_id,
        attempt=2,
        instance_id="node-0-aa",
        tp_degree=2,
        kind="cache",
        block_index=1,
        step=12,
        threshold=0.9,
        positions=[32, 40],
        token_ids=[7, 126335],
        confidences=[0.9375, 1.0],
    ),
    REQUEST_FORECAST,
    m.Forecast(instance_id="node-0-aa", sent_at=1750000001.0, thresholds=(0.5, 0.9), entries=[REQUEST_FORECAST]),
    CAP,
    m.LoadState(
        sent_at=1750000001.0,
        horizon_s=2.5,
        demand_s=4.75,
        capacity_s=5.0,
        caps=[CAP],
        num_open=12,
        num_hopeless=1,
        floor_s=3.5,
    ),
    HELD,
    m.InstanceStatus(
        instance_id="node-0-aa",
        node_id="node",
        model="tedi-tiny",
        tp_degree=2,
        sent_at=1750000001.0,
        epoch=7,
        draining=True,
        max_requests=8,
        kv_tokens=4096,
        held=[HELD],
        latency_ratio=1.25,
    ),
    m.InstanceLost(instance_id="node-0-aa", detail="signal 9"),
    INSTANCE_STATE,
    m.NodeStatus(
        node_id="node",
        sent_at=1750000001.0,
        instances=[INSTANCE_STATE],
        devices=[0, 1, 2, 3],
        device_kind="cuda",
        planned=True,
        plan_revision=12,
    ),
    m.GatewayStatus(gateway_id="gw-00112233", sent_at=1750000001.0),
    m.StatusAsk(),
    m.SchedulerLease(holder="scheduler-1"),
    WORKLOAD_CLASS,
    m.WorkloadSnapshot(
        sent_at=1750000001.0, model="tedi-tiny", window_s=300.0, covered_s=120.0, classes=[WORKLOAD_CLASS]
    ),
    PLANNED,
    NODE_PLAN,
    ROLLOUT,
    m.ClusterPlan(
        revision=12,
        written_at=1750000001.0,
        nodes=[NODE_PLAN],
        reason="launches node-0",
        next_slot=5,
        rollout=ROLLOUT,
        failures=1,
        failed_at=1750000000.25,
    ),
)


def message_classes() -> set[type[msgspec.Struct]]:
    """All that `contracts.messages` defines, less the common base."""
    found = {c for _, c in inspect.getmembers(m, inspect.isclass) if c.__module__ == m.__name__}
    return {c for c in found if issubclass(c, msgspec.Struct)} - {m.Message}
