"""A call that is being answered: what its records mean for its client. Pure.

1. Only records count. Each shows more tokens of one choice than the one before; the new ones become text.
2. Text goes out in whole characters, and never a part of a stop string. A stop string ends its choice: `stop`, and
   the rest of the request is cancelled.
3. A choice whose request has finished ends: `stop` at the model's end token, `length` at its last token.
4. A request that failed or was cancelled by others fails the whole call, and its siblings are cancelled. So do a
   client that hangs up (unless the call is detached: then it goes on unseen) and the call's time limit.
5. Steps of a choice that is watched are shown as they come, beside the text; none after the choice's end.
6. A call ends once: with `EndCall` after all its choices ended, with `FailCall`, or in silence when nobody listens.
"""

import math
from collections.abc import Mapping
from typing import Literal, NamedTuple, TypeAlias

import msgspec
from msgspec import structs

from contracts.messages import CanvasStep, ProgressRecord, Reason
from services.gateway.openai_api import Facts
from services.gateway.stops import StopScanner
from services.gateway.text import Detokenizer, TextCodec

Finish: TypeAlias = Literal["stop", "length"]


class RecordSeen(NamedTuple):
    """A choice's newest record, and its sequence in the stream. Those between it and the last one may be missing."""

    choice: int
    record: ProgressRecord
    seq: int


class StepSeen(NamedTuple):
    """A worker has told a step of a choice that is watched."""

    choice: int
    step: CanvasStep


class ClientGone(NamedTuple):
    """The client has hung up."""


class TimeIsUp(NamedTuple):
    """The call's time limit has passed."""


class ShuttingDown(NamedTuple):
    """This gateway stops and cannot wait for the call's end."""


Event: TypeAlias = RecordSeen | StepSeen | ClientGone | TimeIsUp | ShuttingDown


class Token(NamedTuple):
    """A token of the answer. `text` is empty where it only began a character that a later token completed."""

    id: int
    text: str
    confidence: float
    text_start: int  # in the choice's text, in characters

    @property
    def logprob(self) -> float:
        return max(math.log(self.confidence), -9999.0) if self.confidence > 0 else -9999.0


class SendText(NamedTuple):
    """More text of a choice, and the tokens that it completes."""

    choice: int
    text: str
    tokens: tuple[Token, ...]


class ShowStep(NamedTuple):
    """A step of a choice, for who looks on. Not final: a later attempt may revise it."""

    choice: int
    step: CanvasStep


class EndChoice(NamedTuple):
    """All of the choice's text has been sent."""

    choice: int
    finish: Finish


class EndCall(NamedTuple):
    """All choices have ended."""


class FailCall(NamedTuple):
    """The call failed: nothing more will be sent."""

    reason: Reason
    record: ProgressRecord | None = None  # the one that says so


class WriteCancelled(NamedTuple):
    """Write the choice's final record, continuing from what is known."""

    choice: int
    reason: Reason
    record: ProgressRecord | None
    seq: int


Command: TypeAlias = SendText | ShowStep | EndChoice | EndCall | FailCall | WriteCancelled


class Choice:
    """One choice: from its records to its text."""

    def __init__(self, index: int, codec: TextCodec, stops: tuple[str, ...]) -> None:
        self._index = index
        self._detokenizer = Detokenizer(codec)
        self._scanner = StopScanner(stops)
        self._unsent: list[Token] = []
        self._decoded = 0  # characters that the tokens so far made, sent or held back
        self.record: ProgressRecord | None = None
        self.seq = 0
        self.num_tokens = 0  # taken from the records; after a stop string, up to the token that completed it
        self.text = ""
        self.tokens: list[Token] = []
        self.finish: Finish | None = None
        self.ended_at = 0.0  # wall clock

    @property
    def is_open(self) -> bool:
        """Its request may still be running."""
        return self.finish is None and (self.record is None or not self.record.is_final)

    def take(self, record: ProgressRecord, seq: int, now: float) -> SendText | None:
        """The newer record's news as text; sets `finish` where the text ends."""
        self.record, self.seq = record, seq
        fresh = ""
        for token_id, confidence in _pairs(record, self.num_tokens):
            fresh += self._push(token_id, confidence)
            if self._scanner.stopped:
                self.finish, self.ended_at = "stop", now
                return self._send(fresh, last=True)
        if is_answer(record):
            self.finish = "length" if record.finish == "length" else "stop"
            self.ended_at = record.written_at or now
            fresh += self._flush()
            return self._send(fresh, last=True)
        return self._send(fresh, last=False)

    def _push(self, token_id: int, confidence: float) -> str:
        piece = self._detokenizer.push(token_id)
        self._unsent.append(Token(token_id, piece, confidence, self._decoded))
        self._decoded += len(piece)
        self.num_tokens += 1
        return self._scanner.push(piece)

    def _flush(self) -> str:
        """What was held back. A stop string can still be complete only now, with a broken character at its end."""
        tail = self._scanner.push(self._detokenizer.finish())
        return tail + self._scanner.finish()

    def _send(self, fresh: str, *, last: bool) -> SendText | None:
        if not fresh and not last:
            return None
        self.text += fresh
        if last:  # a stop string may begin inside a token
            tokens = [t for t in self._unsent if t.text_start < len(self.text) or not self._scanner.stopped]
            self._unsent = []
        else:
            tokens = [t for t in self._unsent if t.text_start + len(t.text) <= len(self.text)]
            self._unsent = self._unsent[len(tokens) :]
        self.tokens += tokens
        return SendText(self._index, fresh, tuple(tokens)) if fresh or tokens else None


def is_answer(record: ProgressRecord) -> bool:
    """It is final and all went well; cancelled at a stop string counts, whichever gateway saw it."""
    return record.state == "finished" or (record.state == "cancelled" and record.reason == "stop_string")


def kept_deadline(record: ProgressRecord) -> bool | None:
    """Whether the request of a final record kept its deadline; what failed has not.

    None: there was none, or the request was cancelled before it had answered.
    """
    if record.deadline_at is None or (record.state == "cancelled" and not is_answer(record)):
        return None
    return is_answer(record) and record.written_at <= record.deadline_at


def _pairs(record: ProgressRecord, done: int) -> list[tuple[int, float]]:
    """Tokens of the record that are not taken yet, with confidences; 0 where a writer left them out."""
    tokens = record.token_ids[done:]
    confidences = record.confidences[done : done + len(tokens)]
    return list(zip(tokens, confidences + [0.0] * (len(tokens) - len(confidences)), strict=True))


class CallState:
    """The state of one call. `handle` takes what happened and returns what to do."""

    def __init__(self, facts: Facts, codec: TextCodec, *, detached: bool) -> None:
        self.facts = facts
        self.choices = [Choice(index, codec, facts.stop) for index in range(facts.n)]
        self.ended = False
        self._detached = detached

    def handle(self, event: Event, now: float) -> list[Command]:
        """`now`: wall clock, seconds. After the call's end everything is ignored."""
        if self.ended:
            return []
        match event:
            case RecordSeen():
                return self._take(event, now)
            case StepSeen(index, step):
                return [ShowStep(index, step)] if self.choices[index].finish is None else []
            case ClientGone() | ShuttingDown() if self._detached:
                return []
            case ClientGone():
                return self._stop("client_gone")
            case ShuttingDown():
                return [*self._stop("gateway_lost"), FailCall("gateway_lost")]
            case TimeIsUp():
                return [*self._stop("expired"), FailCall("expired")]

    def _take(self, event: RecordSeen, now: float) -> list[Command]:
        choice = self.choices[event.choice]
        if choice.finish is not None or event.seq <= choice.seq:
            return []
        sent = choice.take(event.record, event.seq, now)
        commands: list[Command] = [sent] if sent is not None else []
        if choice.finish is not None:
            commands += self._end_choice(event.choice, choice, event.record)
        elif event.record.is_final:
            commands += [*self._stop("sibling_failed"), FailCall(event.record.reason, event.record)]
        return commands

    def _end_choice(self, index: int, choice: Choice, record: ProgressRecord) -> list[Command]:
        assert choice.finish is not None
        commands: list[Command] = [EndChoice(index, choice.finish)]
        if not record.is_final:
            commands.append(WriteCancelled(index, "stop_string", record, choice.seq))
        if all(other.finish is not None for other in self.choices):
            self.ended = True
            commands.append(EndCall())
        return commands

    def _stop(self, reason: Reason) -> list[Command]:
        """Cancels what may still run, and ends the call."""
        self.ended = True
        return [
            WriteCancelled(index, reason, choice.record, choice.seq)
            for index, choice in enumerate(self.choices)
            if choice.is_open
        ]


def cancelled_record(base: ProgressRecord, reason: Reason, now: float) -> ProgressRecord:
    """The final record of a request that is cancelled at `base`: it keeps what was reached."""
    return structs.replace(base, state="cancelled", reason=reason, holder="", written_at=now)


class TediserveInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The `tediserve` object of an answer: what its choices took.

    Times, in milliseconds, are those of the slowest choice; moves and steps are sums, attempts is the most that one
    choice needed.
    """

    deadline_met: bool | None  # None: there is none, or it may still be met
    steps: int
    mean_threshold: float | None  # over all steps; None before any
    moves: int  # placements on another instance without a loss
    attempts: int
    queue_ms: float  # from arrival to the first accepted assignment
    run_ms: float
    total_ms: float


def summary(records: Mapping[int, ProgressRecord], ended_at: float, *, ended: bool = True) -> TediserveInfo:
    """`ended_at`: wall clock of the last choice's end, or so far (then `ended` is False)."""
    blocks = [block for record in records.values() for block in record.blocks]
    steps = sum(block.recompute_steps + block.cache_steps for block in blocks)
    weighted = sum((block.recompute_steps + block.cache_steps) * block.mean_threshold for block in blocks)
    deadlines = [record.deadline_at for record in records.values() if record.deadline_at is not None]
    created_at = min((record.created_at for record in records.values()), default=ended_at)
    started = [record.started_at for record in records.values() if record.started_at is not None]
    started_at = max(started, default=ended_at)
    return TediserveInfo(
        deadline_met=_deadline_met(records, min(deadlines), ended_at, ended) if deadlines else None,
        steps=steps,
        mean_threshold=round(weighted / steps, 4) if steps else None,
        moves=sum(record.moves for record in records.values()),
        attempts=max((record.attempt for record in records.values()), default=0),
        queue_ms=_ms(started_at - created_at),
        run_ms=_ms(ended_at - started_at),
        total_ms=_ms(ended_at - created_at),
    )


def _deadline_met(records: Mapping[int, ProgressRecord], deadline: float, ended_at: float, ended: bool) -> bool | None:
    """What failed or was cancelled has met nothing."""
    if ended_at > deadline or any(record.is_final and not is_answer(record) for record in records.values()):
        return False
    return True if ended else None


def _ms(seconds: float) -> float:
    return round(1000 * max(seconds, 0.0), 1)
