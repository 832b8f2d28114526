"""A call's own span: what was asked for, and what came of it. Names are `services/telemetry.py`'s. No text of it."""

from typing import Any

from services import telemetry as t
from services.gateway.answers import PREFIXES, extra_of, usage
from services.gateway.openai_api import Call
from services.gateway.policy import CallState

_OPERATIONS = {"chat": "chat", "text": "text_completion"}


def begin_call(call: Call, parent: str) -> t.Span:
    """The span of a valid call. `parent`: the caller's traceparent, or ""."""
    request = call.requests[0]
    operation = _OPERATIONS[call.facts.kind]
    return t.begin(
        f"{operation} {request.model}",
        parent=parent,
        kind="server",
        began_at=request.created_at,
        attributes=_asked(call, operation) if t.is_on() else None,
    )


def _asked(call: Call, operation: str) -> t.Attributes:
    request, facts = call.requests[0], call.facts
    asked: dict[str, Any] = {
        t.GEN_AI_OPERATION: operation,
        t.GEN_AI_PROVIDER: t.PROVIDER,
        t.GEN_AI_REQUEST_MODEL: request.model,
        t.GEN_AI_REQUEST_MAX_TOKENS: request.max_tokens,
        t.GEN_AI_REQUEST_TEMPERATURE: request.temperature,
        t.GEN_AI_REQUEST_SEED: request.seed,
        t.GEN_AI_REQUEST_CHOICES: facts.n,
        t.GEN_AI_REQUEST_STREAM: call.stream,
        t.GEN_AI_RESPONSE_ID: PREFIXES[facts.kind] + call.call_id,
        t.PRIORITY: request.priority,
    }
    return asked if request.deadline_at is None else asked | {t.SLO_S: request.deadline_at - request.created_at}


def refuse_call(span: t.Span, status: int, code: str | None) -> None:
    """No request of it was taken."""
    span.set({t.HTTP_STATUS: status})
    span.end(error=code or str(status))


def end_call(span: t.Span, call: Call, state: CallState, *, status: int, error: str) -> None:
    """It was answered with that HTTP status. `error`: a word for what went wrong, before or after the status."""
    if t.is_on():
        span.set({t.HTTP_STATUS: status, t.GEN_AI_RESPONSE_MODEL: call.requests[0].model, **_told(state)})
    span.end(error=error)


def _told(state: CallState) -> t.Attributes:
    used, extra = usage(state), extra_of(state)
    told: dict[str, Any] = {
        t.GEN_AI_INPUT_TOKENS: used["prompt_tokens"],
        t.GEN_AI_OUTPUT_TOKENS: used["completion_tokens"],
        t.GEN_AI_FINISH_REASONS: [choice.finish or "error" for choice in state.choices],
        t.DEADLINE_MET: extra.deadline_met,
        t.MEAN_THRESHOLD: extra.mean_threshold,
        t.MOVES: extra.moves,
        t.ATTEMPT: extra.attempts,
    }
    return {name: value for name, value in told.items() if value is not None}
