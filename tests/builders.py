"""Messages as tests need them: everything has a default that makes sense, so a test names only what it is about."""

from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from contracts import messages as m

MODEL = "test-model"
BLOCK = 32


def make_request(request_id: str = "r1", **changes: Any) -> m.GenerateRequest:
    """A prompt of one block's length, and two blocks to write."""
    defaults: dict[str, Any] = {
        "gateway_id": "gw",
        "model": MODEL,
        "prompt_ids": [1] * BLOCK,
        "max_tokens": 2 * BLOCK,
        "block_size": BLOCK,
        "cache": "dual",
        "created_at": 1000.0,
        "expires_at": 1100.0,
    }
    return m.GenerateRequest(request_id=request_id, **(defaults | changes))


def make_record(
    request: m.GenerateRequest | str = "r1", state: m.State = "running", **changes: Any
) -> m.ProgressRecord:
    """Of that request, or of the default one with that id."""
    if isinstance(request, str):
        request = make_request(request)
    return replace(request.first_record, state=state, **changes)


def make_cost(**changes: Any) -> m.BlockCost:
    defaults: dict[str, Any] = {
        "instance_id": "a",
        "tp_degree": 1,
        "recompute_steps": 1,
        "cache_steps": 3,
        "mean_threshold": 0.8,
        "seconds": 0.1,
    }
    return m.BlockCost(**(defaults | changes))


def make_held(request: m.GenerateRequest, attempt: int = 1, blocks_done: int = 0) -> m.Held:
    return m.Held(
        request_id=request.request_id,
        attempt=attempt,
        canvas_tokens=request.canvas_tokens,
        block_size=request.block_size,
        cache=request.cache,
        blocks_done=blocks_done,
    )


def make_status(instance_id: str, held: Iterable[m.Held] = (), **changes: Any) -> m.InstanceStatus:
    defaults: dict[str, Any] = {
        "node_id": "node",
        "model": MODEL,
        "tp_degree": 1,
        "sent_at": 0.0,
        "epoch": 0,
        "draining": False,
        "max_requests": 4,
        "kv_tokens": 2048,
    }
    return m.InstanceStatus(instance_id=instance_id, held=list(held), **(defaults | changes))
