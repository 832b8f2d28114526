"""The OpenAI API's answers: whole, in chunks, and errors. Pure.

1. A chunk holds new text only, never text that was sent before.
2. `finish_reason` is in every chunk, null until the choice's last one, which has no text.
3. `usage` is in a stream only where asked for: null in every chunk, and told once, in a last chunk without choices.
4. The `tediserve` object is in a whole answer, and in the last chunk of a stream. Where the canvas is watched, it also
   comes in chunks without choices: first the canvas's size, then each step.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from contracts.messages import CanvasStep, ProgressRecord, Reason
from services.gateway.openai_api import ApiError, Facts
from services.gateway.policy import CallState, Choice, Finish, TediserveInfo, Token, summary
from services.gateway.text import TextCodec

PREFIXES = {"chat": "chatcmpl-", "text": "cmpl-"}
DONE = b"data: [DONE]\n\n"
PING = b": ping\n\n"


class Answer:
    """Writes the answer of one call."""

    def __init__(
        self, call_id: str, facts: Facts, codec: TextCodec, *, model: str, created_at: float, include_usage: bool
    ) -> None:
        self.id = PREFIXES[facts.kind] + call_id
        self._facts = facts
        self._codec = codec
        self._model = model
        self._created = int(created_at)
        self._include_usage = include_usage

    # --- in chunks -------------------------------------------------------------------------------------------------

    def opening(self) -> bytes:
        """The first chunk of each choice: whose words these are. Completions have none."""
        if self._facts.kind == "text":
            return b""
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([self._part(index, delta, (), None)]) for index in range(self._facts.n))

    def canvas(self, tokens: int, block_size: int) -> bytes:
        """Before the first step of a watched canvas: its output area, in tokens."""
        return self._chunk([], tediserve={"canvas": {"tokens": tokens, "block_size": block_size}})

    def step(self, index: int, step: CanvasStep) -> bytes:
        """What a step of a watched canvas committed."""
        commits = [
            {"position": position, "text": self._text_of(token_id), "confidence": round(confidence, 4)}
            for position, token_id, confidence in zip(step.positions, step.token_ids, step.confidences, strict=False)
        ]
        shown = {
            "choice": index,
            "attempt": step.attempt,
            "step": step.step,
            "kind": step.kind,
            "block_index": step.block_index,
            "threshold": step.threshold,
            "instance_id": step.instance_id,
            "tp_degree": step.tp_degree,
            "commits": commits,
        }
        return self._chunk([], tediserve={"step": shown})

    def text(self, index: int, text: str, tokens: Sequence[Token]) -> bytes:
        return self._chunk([self._part(index, {"content": text}, tokens, None)])

    def ending(self, index: int, finish: Finish, extra: TediserveInfo | None) -> bytes:
        """A choice's last chunk. `extra`: the `tediserve` object, where no usage chunk will follow to bear it."""
        part = self._part(index, {}, (), finish)
        return self._chunk([part], **({"tediserve": extra} if extra is not None else {}))

    def usage(self, state: CallState, extra: TediserveInfo) -> bytes:
        return self._chunk([], usage=usage(state), tediserve=extra)

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        kind = "chat.completion.chunk" if self._facts.kind == "chat" else "text_completion"
        chunk = self._head(kind) | {"choices": choices}
        if self._include_usage:
            chunk["usage"] = None
        return event(chunk | more)

    def _part(
        self, index: int, delta: dict[str, str], tokens: Sequence[Token], finish: Finish | None
    ) -> dict[str, Any]:
        logprobs = self._logprobs(tokens) if self._facts.logprobs and tokens else None
        body: dict[str, Any] = {"delta": delta} if self._facts.kind == "chat" else {"text": delta.get("content", "")}
        return {"index": index, **body, "logprobs": logprobs, "finish_reason": finish}

    # --- whole -----------------------------------------------------------------------------------------------------

    def whole(self, state: CallState) -> dict[str, Any]:
        """The whole answer; of a call that still runs, what there is of it."""
        kind = "chat.completion" if self._facts.kind == "chat" else "text_completion"
        choices = [self._whole_choice(index, choice) for index, choice in enumerate(state.choices)]
        return self._head(kind) | {"choices": choices, "usage": usage(state), "tediserve": extra_of(state)}

    def _whole_choice(self, index: int, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs(choice.tokens) if self._facts.logprobs else None
        if self._facts.kind == "text":
            return {"index": index, "text": choice.text, "logprobs": logprobs, "finish_reason": choice.finish}
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish}

    # --- both ------------------------------------------------------------------------------------------------------

    def _head(self, kind: str) -> dict[str, Any]:
        head = {"id": self.id, "object": kind, "created": self._created, "model": self._model}
        if self._facts.kind == "chat":
            head["service_tier"] = self._facts.tier
        return head | {"system_fingerprint": None}

    def _logprobs(self, tokens: Sequence[Token]) -> dict[str, Any]:
        shown = [(self._show(token), token) for token in tokens]
        if self._facts.kind == "chat":
            return {"content": [self._chat_logprob(name, token) for name, token in shown], "refusal": None}
        alternatives = [{name: token.logprob} for name, token in shown] if self._facts.top_logprobs else None
        return {
            "tokens": [name for name, _ in shown],
            "token_logprobs": [token.logprob for _, token in shown],
            "top_logprobs": alternatives,
            "text_offset": [token.text_start for _, token in shown],
        }

    def _chat_logprob(self, name: str, token: Token) -> dict[str, Any]:
        entry = {"token": name, "logprob": token.logprob, "bytes": list(self._codec.token_bytes(token.id))}
        return entry | {"top_logprobs": [entry] if self._facts.top_logprobs else []}

    def _show(self, token: Token) -> str:
        return self._text_of(token.id)

    def _text_of(self, token_id: int) -> str:
        return self._codec.token_bytes(token_id).decode(errors="replace")


def event(content: object) -> bytes:
    """A server-sent event."""
    return b"data: " + msgspec.json.encode(content) + b"\n\n"


def usage(state: CallState) -> dict[str, int]:
    """Tokens read and written. Several choices of one prompt count it once, as in OpenAI's API."""
    prompts = state.facts.prompt_tokens
    written = sum(choice.num_tokens for choice in state.choices)
    return {"prompt_tokens": prompts, "completion_tokens": written, "total_tokens": prompts + written}


def extra_of(state: CallState) -> TediserveInfo:
    """The `tediserve` object."""
    records = {index: choice.record for index, choice in enumerate(state.choices) if choice.record is not None}
    ended_at = max((choice.ended_at for choice in state.choices), default=0.0)
    last = max((record.written_at for record in records.values()), default=0.0)
    return summary(records, ended_at or last, ended=all(choice.finish is not None for choice in state.choices))


def failure(reason: Reason, record: ProgressRecord | None) -> ApiError:
    """How a call that failed for this reason is answered."""
    match reason:
        case "expired":
            return ApiError(
                504,
                "The request did not finish within its time limit.",
                type="timeout",
                code="expired",
                retry_helps=False,
            )
        case "too_long":
            return ApiError(
                400,
                "No instance of this model can hold prompt and answer of this length.",
                code="context_length_exceeded",
            )
        case "unknown_model":
            return ApiError(400, "The model is not served.", param="model", code="model_not_found")
        case "overloaded":
            later_s = max(1, math.ceil(record.retry_after_s or 0.0)) if record else 1
            return ApiError(
                429,
                "The server has too much ahead of this request to meet its deadline. "
                f"Try again in {later_s} s, or give it more time ('slo_ms').",
                type="rate_limit_error",
                code="overloaded",
                retry_after_s=later_s,
            )
        case "slo_too_short":
            return ApiError(
                429,
                "The deadline of this request ('slo_ms') is shorter than it would take on an idle server: give it more "
                "time.",
                type="rate_limit_error",
                param="slo_ms",
                code="slo_too_short",
                retry_helps=False,
            )
        case "client_deleted":
            return ApiError(409, "The request was cancelled by DELETE.", code="cancelled", retry_helps=False)
        case "client_gone":
            return ApiError(409, "The request was cancelled by its client.", code="cancelled", retry_helps=False)
        case "sibling_failed":
            return ApiError(
                500,
                "Another choice of this call failed.",
                type="server_error",
                code="sibling_failed",
                retry_helps=False,
            )
        case "gateway_lost":
            return ApiError(
                503,
                "The server lost touch with this request and cancelled it.",
                type="server_error",
                code="gateway_lost",
                retry_after_s=1,
            )
        case "worker_lost":
            return ApiError(
                500,
                f"The request was lost with its worker {record.attempt if record else 3} times.",
                type="server_error",
                code="worker_lost",
                retry_helps=False,
            )
        case _:
            return ApiError(
                500,
                "The model failed on this request.",
                type="server_error",
                code=reason or "engine_error",
                retry_helps=False,
            )
