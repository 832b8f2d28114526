"""Messages and events as the tests need them: everything has a default that makes sense."""

from typing import Any

from contracts import messages as m
from services.denoiser.run import Instance
from services.denoiser.worker_events import Assigned, Stepped
from tests import builders
from tests.builders import MODEL

ME = "node-0-aaaa"
OTHER = "node-1-bbbb"
EOS, MASK = 2, 7
WALL = 1_000_000.0  # wall-clock time at monotonic 0


def make_instance(**changes: Any) -> Instance:
    return Instance(
        **{
            "instance_id": ME,
            "node_id": "node",
            "model": MODEL,
            "kv_tokens": 100,
            "max_requests": 4,
            "max_canvas_tokens": 60,
            "vocab_size": 50,
            "mask_id": MASK,
            "eos_ids": frozenset({EOS}),
        }
        | changes
    )


def make_request(request_id: str = "r1", **changes: Any) -> m.GenerateRequest:
    """Prompt of 4, two blocks of 4, room for all: a canvas of 12."""
    defaults = {
        "prompt_ids": [10, 11, 12, 13],
        "max_tokens": 8,
        "block_size": 4,
        "created_at": WALL - 1,
        "expires_at": WALL + 60,
        "fingerprint": "print",
    }
    return builders.make_request(request_id, **(defaults | changes))


def make_assigned(
    request: m.GenerateRequest | None = None,
    *,
    now: float = 0.0,
    epoch: int = 5,
    attempt: int = 1,
    threshold: float = 0.9,
    resume: m.ProgressRecord | None = None,
    from_seq: int = 0,
) -> Assigned:
    assign = m.Assign(
        epoch=epoch,
        attempt=attempt,
        request=request or make_request(),
        threshold=threshold,
        resume=resume,
        from_seq=from_seq,
    )
    return Assigned(assign=assign, wall=WALL + now, trace="trace")


def make_release(request_id: str = "r1", *, epoch: int = 5, attempt: int = 1) -> m.Release:
    return m.Release(epoch=epoch, attempt=attempt, request_id=request_id)


def make_record(request: m.GenerateRequest | None = None, **changes: Any) -> m.ProgressRecord:
    """One block done, released by another instance."""
    defaults = {
        "state": "released",
        "holder": OTHER,
        "epoch": 5,
        "blocks_done": 1,
        "token_ids": [20, 21, 22, 23],
        "confidences": [0.5, 0.6, 0.7, 0.8],
        "blocks": [builders.make_cost(instance_id=OTHER, cache_steps=2, seconds=0.5)],
        "moves": 1,
        "started_at": WALL - 0.5,
    }
    return builders.make_record(request or make_request(), **(defaults | changes))


def make_step(run_id: str = "r1.1", **changes: Any) -> Stepped:
    """One step that commits the whole first block; the pass took 0.1 s and ended at 1.0."""
    values = {
        "run_id": run_id,
        "kind": "recompute",
        "block_index": 0,
        "threshold": 0.9,
        "positions": [0, 1, 2, 3],
        "token_ids": [20, 21, 22, 23],
        "confidences": [0.5, 0.6, 0.7, 0.8],
        "block_done": True,
        "finish": "",
        "left": False,
        "started": 0.9,
        "ended": 1.0,
    } | changes
    return Stepped(**values)


def last_step(run_id: str = "r1.1", **changes: Any) -> Stepped:
    """One step that commits the whole second block."""
    values = {
        "block_index": 1,
        "positions": [4, 5, 6, 7],
        "token_ids": [24, 25, 26, 27],
        "finish": "length",
        "started": 1.1,
        "ended": 1.2,
    } | changes
    return make_step(run_id, **values)
