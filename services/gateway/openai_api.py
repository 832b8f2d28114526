"""The OpenAI API's request bodies: what is valid, and what becomes of it. Pure.

1. The body is JSON of the right shape: else 400, naming the field, what is expected and what came.
2. A field that we do not know is refused by name. So is one that we know, lack, and that would change the answer;
   its neutral value is accepted, and so are fields that change nothing (`user`, `metadata`, ...).
3. The model is the one that is served; the prompt fits and is no empty one; the wanted length fits beside it.
4. What is left unsaid comes from the profile: also the promised latency, by service tier.
5. A pinned threshold lies within the profile's threshold set.
6. The caller's API key allows the service tier and the pin; else 403.

Token probabilities: we keep the confidence of each token at its commit and nothing of its alternatives. So
`logprobs` gives the token's own, and `top_logprobs: 1` (`logprobs: 1` of /v1/completions) the same again where the
token is certainly the likeliest one, at temperature 0; what would need more is refused by name.
"""

import hashlib
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args

import msgspec
from msgspec import Meta

from contracts.messages import GenerateRequest
from services.gateway.keys import ANYONE, ApiKey
from services.gateway.text import Message, TemplateError, TextCodec
from services.profile import Profile, Tier

Kind = Literal["chat", "text"]

MAX_STOPS = 4
MAX_STOP_CHARACTERS = 256


class ApiError(Exception):
    """A refusal as the client sees it: HTTP status and OpenAI's envelope."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        retry_helps: bool = True,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.type = type
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.retry_helps = retry_helps  # False: the SDKs would repeat a 409, 429 or 5xx by themselves, in vain

    @property
    def envelope(self) -> dict[str, Any]:
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers = {}
        if self.retry_after_s is not None:
            headers["retry-after"] = str(self.retry_after_s)
        if not self.retry_helps:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        return headers


def _invalid(message: str, param: str | None) -> ApiError:
    return ApiError(400, message, param=param, code="invalid_value")


def _forbidden(message: str, param: str) -> ApiError:
    return ApiError(403, message, type="permission_error", param=param, code="not_allowed")


# --- bodies -------------------------------------------------------------------------------------------------------

Temperature = Annotated[float, Meta(ge=0.0, le=2.0)]
Seed = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
Length = Annotated[int, Meta(ge=1)]
Choices = Annotated[int, Meta(ge=1, le=128)]
SloMs = Annotated[
    float,
    Meta(
        gt=0.0,
        le=1e9,
        description="Latency to keep, in milliseconds. Left out: what the profile promises the service tier.",
    ),
]
Pin = Annotated[
    float,
    Meta(
        description="Pins the confidence from which tokens are committed. Within the thresholds of the model's profile."
    ),
]
IgnoreEos = Annotated[bool, Meta(description="Writes on to `max_tokens`, past the end of the answer.")]
Watch = Annotated[
    bool,
    Meta(
        description="With `stream`: also sends each denoising step, in `tediserve` of chunks without choices. A step "
        "may be lost, or revised by a later attempt."
    ),
]
ROLES = ("system", "developer", "user", "assistant")
TIERS = ("flex", "default", "auto", "priority")
# enums of the schema alone: what else comes is refused in words of our own
Role = Annotated[str, Meta(extra_json_schema={"enum": ROLES})]
PartType = Annotated[str, Meta(extra_json_schema={"enum": ("text",)})]
ServiceTier = Annotated[
    str,
    Meta(
        description="`flex`, `default` (or `auto`) or `priority`: who waits for whom, and the promised latency.",
        extra_json_schema={"enum": TIERS},
    ),
]
_PROMPT_SCHEMA = {
    "oneOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}},
        {"type": "array", "items": {"type": "integer"}},
        {"type": "array", "items": {"type": "array", "items": {"type": "integer"}}},
    ]
}


class Body(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of what clients send. A field that may be null need not be there."""


class StreamOptions(Body, frozen=True, kw_only=True):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis, which we do not add


class ContentPart(msgspec.Struct, frozen=True, kw_only=True):
    """A part of a message. Only text parts are taken; others are refused by their type's name."""

    type: PartType
    text: str | None = None


class ChatMessage(Body, frozen=True, kw_only=True):
    role: Role
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[Any] | None = None
    tool_call_id: str | None = None
    function_call: dict[str, Any] | None = None
    audio: dict[str, Any] | None = None


class CommonBody(Body, frozen=True, kw_only=True):
    """Fields of both kinds of call."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Length | None = None
    n: Choices | None = None
    seed: Seed | None = None
    stop: str | list[str] | None = None
    temperature: Temperature | None = None
    service_tier: ServiceTier | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    # refused unless neutral
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    # ours
    slo_ms: SloMs | None = None
    threshold: Pin | None = None
    ignore_eos: IgnoreEos | None = None
    watch: Watch | None = None


class ChatBody(CommonBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Meta(min_length=1)]
    max_completion_tokens: Length | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    # change nothing here
    store: bool | None = None
    parallel_tool_calls: bool | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None
    # refused unless neutral
    audio: Any = None
    function_call: Any = None
    functions: Any = None
    modalities: Any = None
    moderation: Any = None
    prediction: Any = None
    reasoning_effort: Any = None
    response_format: Any = None
    tool_choice: Any = None
    tools: Any = None
    verbosity: Any = None
    web_search_options: Any = None


class TextBody(CommonBody, frozen=True, kw_only=True):
    """POST /v1/completions."""

    prompt: Annotated[Any, Meta(extra_json_schema=_PROMPT_SCHEMA)]
    logprobs: Annotated[int, Meta(ge=0, le=5)] | None = None
    # refused unless neutral
    best_of: int | None = None
    echo: bool | None = None
    suffix: str | None = None


# Fields that we lack: what they may say all the same, as it changes nothing. Of logit_bias, zeros are neutral too.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "audio": (),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "reasoning_effort": ("none",),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
}


def _is_neutral(name: str, value: Any) -> bool:
    return value in NEUTRAL[name] or (name == "logit_bias" and not any(value.values()))


# --- what becomes of them -----------------------------------------------------------------------------------------


class Facts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What answering a call again needs, beside its records. Travels in them as their `fingerprint`."""

    body: str  # hash of the canonical body
    kind: Kind = "chat"
    n: int = 1  # choices of the call
    prompt_tokens: int = 0  # of all its prompts; a prompt of several choices counts once
    stop: tuple[str, ...] = ()
    logprobs: bool = False
    top_logprobs: bool = False
    tier: Tier = "default"
    owner: str = ""  # name of the API key that asked; "": nobody had one

    def encode(self) -> str:
        return msgspec.json.encode(self).decode()

    @classmethod
    def decode(cls, fingerprint: str) -> "Facts | None":
        """None: written by somebody else."""
        try:
            return msgspec.json.decode(fingerprint, type=cls)
        except msgspec.DecodeError:
            return None


class Call(NamedTuple):
    """A valid call: its requests, one a choice, and how its answer is to look."""

    call_id: str
    facts: Facts
    requests: tuple[GenerateRequest, ...]
    stream: bool
    include_usage: bool
    key: ApiKey = ANYONE


class Arrival(NamedTuple):
    """How the call came in, beside its body."""

    call_id: str  # 32 hex digits
    gateway_id: str
    now: float  # wall clock, seconds
    random_seed: int  # for a call without `seed`
    detached: bool  # has an Idempotency-Key
    key: ApiKey = ANYONE


def choice_id(call_id: str, index: int) -> str:
    """The request id of a call's choice."""
    return call_id if index == 0 else f"{call_id}-{index}"


class Api:
    """Bodies to calls, for one profile and its tokenizer."""

    def __init__(
        self,
        profile: Profile,
        codec: TextCodec,
        *,
        max_choices: int,
        vocab_size: int,
        mask_id: int | None,
        max_prompt_tokens: int = 0,
    ) -> None:
        """`max_prompt_tokens` 0: as many as the profile allows."""
        self._profile = profile
        self._codec = codec
        self._max_choices = max_choices
        self._max_prompt_tokens = min(profile.max_prompt_tokens, max_prompt_tokens or profile.max_prompt_tokens)
        self._vocab_size = vocab_size
        self._mask_id = mask_id

    def read(self, kind: Kind, raw: bytes, arrival: Arrival) -> Call:
        """The valid call in a request's body. Raises ApiError."""
        content = _parse(raw)
        if kind == "chat":
            chat = _convert(content, ChatBody)
            return self._chat(chat, content, arrival)
        return self._text(_convert(content, TextBody), content, arrival)

    def check_model(self, name: str) -> None:
        """Raises ApiError unless that model is served."""
        if name != self._profile.model:
            raise ApiError(
                400,
                f"The model '{name[:200]}' does not exist. This server has '{self._profile.model}'.",
                param="model",
                code="model_not_found",
            )

    def _chat(self, body: ChatBody, content: dict[str, Any], arrival: Arrival) -> Call:
        self._check_common(body, content, arrival.key)
        if body.top_logprobs and not body.logprobs:
            raise _invalid("'top_logprobs' needs 'logprobs' to be true.", param="top_logprobs")
        messages = [_message(message, index) for index, message in enumerate(body.messages)]
        try:
            prompt = self._codec.encode_chat(messages)
        except TemplateError as error:
            raise _invalid(f"Invalid 'messages': {error}.", param="messages") from None
        max_tokens, name = body.max_tokens, "max_tokens"
        if body.max_completion_tokens is not None:
            if max_tokens not in (None, body.max_completion_tokens):
                raise _invalid(
                    f"'max_tokens' ({max_tokens}) and 'max_completion_tokens' ({body.max_completion_tokens}) "
                    "contradict each other: give one of them.",
                    param="max_tokens",
                )
            max_tokens, name = body.max_completion_tokens, "max_completion_tokens"
        alternatives = body.top_logprobs or 0
        self._check_alternatives(body, alternatives, "top_logprobs")
        return self._call(
            body, content, arrival, "chat", [prompt], max_tokens, name, bool(body.logprobs), alternatives > 0
        )

    def _text(self, body: TextBody, content: dict[str, Any], arrival: Arrival) -> Call:
        self._check_common(body, content, arrival.key)
        alternatives = body.logprobs or 0
        self._check_alternatives(body, alternatives, "logprobs")
        prompts = [self._prompt_ids(prompt) for prompt in _prompts(body.prompt, self._max_choices)]
        with_logprobs = body.logprobs is not None
        return self._call(
            body, content, arrival, "text", prompts, body.max_tokens, "max_tokens", with_logprobs, alternatives > 0
        )

    def _check_common(self, body: CommonBody, content: dict[str, Any], key: ApiKey) -> None:
        for name in filter(NEUTRAL.__contains__, content):
            value = getattr(body, name)
            if value is not None and not _is_neutral(name, value):
                raise ApiError(
                    400,
                    f"'{name}' is not supported by this server: leave it out.",
                    param=name,
                    code="unsupported_parameter",
                )
        self.check_model(body.model)
        self._check_pin(body.threshold, key)
        if body.stream_options is not None and not body.stream:
            raise _invalid("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
        if body.watch and not body.stream:
            raise _invalid("'watch' is only allowed when 'stream' is true.", param="watch")

    def _check_pin(self, threshold: float | None, key: ApiKey) -> None:
        if threshold is not None and not key.pin:
            raise _forbidden("This API key may not pin the threshold: leave 'threshold' out.", param="threshold")
        lowest, highest = self._profile.decoding.thresholds[0], self._profile.decoding.thresholds[-1]
        if threshold is not None and not lowest <= threshold <= highest:
            raise _invalid(
                f"Invalid 'threshold': {threshold:g} is not between {lowest:g} and {highest:g}, the thresholds of this "
                "model.",
                param="threshold",
            )

    def _check_alternatives(self, body: CommonBody, wanted: int, name: str) -> None:
        temperature = self._temperature(body)
        if wanted > 1 or (wanted == 1 and temperature > 0):
            raise ApiError(
                400,
                f"'{name}' above {0 if temperature > 0 else 1} is not supported by this server: it keeps the "
                "probability of the tokens that it chose, and nothing of their alternatives.",
                param=name,
                code="unsupported_value",
            )

    def _temperature(self, body: CommonBody) -> float:
        return self._profile.decoding.temperature if body.temperature is None else body.temperature

    def _prompt_ids(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            return self._codec.encode_prompt(prompt)
        for token in prompt:
            if not 0 <= token < self._vocab_size:
                raise _invalid(
                    f"Invalid 'prompt': token {token} is not in the vocabulary, which has {self._vocab_size} tokens.",
                    param="prompt",
                )
            if token == self._mask_id:
                raise _invalid(
                    f"Invalid 'prompt': token {token} is the mask, which the model fills in.", param="prompt"
                )
        return prompt

    def _call(
        self,
        body: CommonBody,
        content: dict[str, Any],
        arrival: Arrival,
        kind: Kind,
        prompts: Sequence[list[int]],
        max_tokens: int | None,
        max_tokens_name: str,
        logprobs: bool,
        top_logprobs: bool,
    ) -> Call:
        profile, n = self._profile, body.n or 1
        if len(prompts) * n > self._max_choices:
            raise _invalid(
                f"This call asks for {len(prompts)} prompts x {n} choices; one call may have {self._max_choices}.",
                param="n" if n > 1 else "prompt",
            )
        tier = _tier(body.service_tier, arrival.key)
        facts = Facts(
            body=_hash(kind, content),
            kind=kind,
            n=len(prompts) * n,
            prompt_tokens=sum(map(len, prompts)),
            stop=_stops(body.stop),
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            tier=tier,
            owner=arrival.key.name,
        )
        slo_ms = profile.slo_ms.get(tier) if body.slo_ms is None else body.slo_ms
        seed = arrival.random_seed if body.seed is None else body.seed
        requests = []
        for index in range(facts.n):
            prompt = prompts[index // n]
            requests.append(
                GenerateRequest(
                    request_id=choice_id(arrival.call_id, index),
                    gateway_id=arrival.gateway_id,
                    model=profile.model,
                    prompt_ids=prompt,
                    max_tokens=self._output_tokens(kind, len(prompt), max_tokens, max_tokens_name),
                    block_size=profile.decoding.block_size,
                    cache=profile.decoding.cache,
                    blocks_ahead=profile.decoding.blocks_ahead,
                    created_at=arrival.now,
                    expires_at=arrival.now + profile.limits.time_limit_s,
                    temperature=self._temperature(body),
                    seed=_wrap(seed + index % n),
                    ignore_eos=bool(body.ignore_eos),
                    threshold=body.threshold,
                    floor=profile.quality_floor.get(tier, 0.0),
                    priority=profile.priorities.get(tier, 0),
                    deadline_at=None if slo_ms is None else arrival.now + slo_ms / 1000,
                    watch=bool(body.watch),
                    detached=arrival.detached,
                    fingerprint=facts.encode(),
                )
            )
        usage = body.stream_options is not None and bool(body.stream_options.include_usage)
        return Call(arrival.call_id, facts, tuple(requests), bool(body.stream), usage, arrival.key)

    def _output_tokens(self, kind: Kind, prompt_tokens: int, wanted: int | None, name: str) -> int:
        """The output length; the canvas holds prompt and whole blocks of output. Raises ApiError."""
        limits, block = self._profile.limits, self._profile.decoding.block_size
        prompt_name = "messages" if kind == "chat" else "prompt"
        if prompt_tokens == 0:
            raise _invalid("The prompt is empty: give at least one token of text.", param=prompt_name)
        if prompt_tokens > self._max_prompt_tokens:
            why = f"a context of {limits.max_context_tokens}, of which {block} are left for the answer"
            if self._max_prompt_tokens < self._profile.max_prompt_tokens:
                why = "a limit of this server"
            raise ApiError(
                400,
                f"The prompt has {prompt_tokens} tokens; this model takes at most {self._max_prompt_tokens} ({why}).",
                param=prompt_name,
                code="context_length_exceeded",
            )
        room = min((limits.max_context_tokens - prompt_tokens) // block * block, limits.max_output_tokens)
        if wanted is None:
            return min(self._profile.decoding.max_tokens, room)
        if wanted > limits.max_output_tokens:
            raise _invalid(
                f"'{name}' is {wanted}; this model writes at most {limits.max_output_tokens} tokens in one answer.",
                param=name,
            )
        if wanted > room:
            raise ApiError(
                400,
                f"'{name}' is {wanted}, but the prompt's {prompt_tokens} tokens leave room for {room} of this model's "
                f"context of {limits.max_context_tokens} tokens.",
                param=name,
                code="context_length_exceeded",
            )
        return wanted


def _parse(raw: bytes) -> dict[str, Any]:
    try:
        content = msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ApiError(400, f"The request's body is not valid JSON: {_fault(error, raw)}.") from None
    if not isinstance(content, dict):
        raise ApiError(400, "The request's body must be a JSON object.")
    return content


_LONE_SURROGATE = re.compile(rb"(?<!\\)(?:\\\\)*\\u[dD][89abAB][0-9a-fA-F]{2}[^\\]")


def _fault(error: Exception, raw: bytes) -> str:
    """What is wrong with the JSON. msgspec takes half a surrogate pair near the end for a text that was cut."""
    told = str(error)
    if "surrogate" in told or ("truncated" in told and _LONE_SURROGATE.search(raw)):
        return "a string holds an invalid Unicode escape, half of a surrogate pair"
    return told


B = TypeVar("B", bound=Body)


def _convert(content: dict[str, Any], wanted: type[B]) -> B:
    try:
        return msgspec.convert(content, wanted)
    except RecursionError:
        raise ApiError(400, "The request's body is nested too deeply.") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), content) from None


_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`(?: - at `\$\.?(.*)`)?$", re.DOTALL)
_WRONG = re.compile(r"(.*?)(?:, got `(.*?)`)?(?: - at `\$\.?(.*)`)?$", re.DOTALL)


def _explain(problem: str, content: dict[str, Any]) -> ApiError:
    """What msgspec says, in the words of OpenAI's API."""
    if match := _UNKNOWN.match(problem):
        name = f"{match[2]}.{match[1]}" if match[2] else match[1]
        return ApiError(
            400, f"Unrecognized request argument supplied: {name[:200]}", param=name[:200], code="unknown_parameter"
        )
    if match := _MISSING.match(problem):
        name = f"{match[2]}.{match[1]}" if match[2] else match[1]
        return ApiError(400, f"Missing required parameter: '{name}'.", param=name, code="missing_required_parameter")
    match = _WRONG.match(problem)
    assert match is not None
    path = match[3] or ""
    value = content.get(path)
    got = _show(value) if isinstance(value, (int, float, str, bool)) else match[2] and _plain(match[2])
    expected = _QUOTED.sub(lambda quoted: _plain(quoted[1]), match[1][:1].lower() + match[1][1:])
    but = f", but got {got}" if got else ""
    return _invalid(f"Invalid '{path}': {expected}{but}.", param=path or None)


_QUOTED = re.compile("`(.*?)`")
_PLAIN = {
    "int": "an integer",
    "float": "a number",
    "str": "a string",
    "bool": "a boolean",
    "array": "an array",
    "object": "an object",
}


def _plain(types: str) -> str:
    """msgspec's `str | array | null` in words. That a field may be null is not told: it may as well be left out."""
    names = [name for name in types.split(" | ") if name != "null"]
    return " or ".join(_PLAIN.get(name, name) for name in names) or "null"


def _show(value: object) -> str:
    text = msgspec.json.encode(value).decode()
    return text if len(text) <= 60 else text[:60] + "..."


def _message(message: ChatMessage, index: int) -> Message:
    """The message as the chat template takes it. Raises ApiError."""
    where = f"messages[{index}]"
    if message.role not in ROLES:
        raise _invalid(
            f"Invalid '{where}.role': {_show(message.role)} is not supported by this server; it takes system, "
            "developer, user and assistant.",
            param=f"{where}.role",
        )
    for name in ("tool_calls", "tool_call_id", "function_call", "audio"):
        if getattr(message, name):
            raise ApiError(
                400,
                f"'{where}.{name}' is not supported by this server: leave it out.",
                param=f"{where}.{name}",
                code="unsupported_parameter",
            )
    rendered = {"role": message.role, "content": _content(message, where)}
    return rendered | {"name": message.name} if message.name is not None else rendered


def _content(message: ChatMessage, where: str) -> str:
    if isinstance(message.content, str):
        return message.content
    if message.content is None:
        raise ApiError(
            400,
            f"Missing required parameter: '{where}.content'.",
            param=f"{where}.content",
            code="missing_required_parameter",
        )
    texts = []
    for index, part in enumerate(message.content):
        if part.type != "text" or part.text is None:
            raise ApiError(
                400,
                f"'{where}.content[{index}]' is of type {_show(part.type)}; this server takes parts of type "
                "\"text\" that have a 'text'.",
                param=f"{where}.content[{index}]",
                code="unsupported_content_type",
            )
        texts.append(part.text)
    return "".join(texts)


def _prompts(prompt: Any, most: int) -> list[str] | list[list[int]]:
    """A string, strings, token ids, or lists of token ids: as a list of prompts. Raises ApiError."""
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(type(item) is int for item in prompt):
            return [prompt]
        if len(prompt) > most:
            raise _invalid(f"'prompt' holds {len(prompt)} prompts; one call may have {most}.", param="prompt")
        if all(isinstance(item, str) for item in prompt):
            return prompt
        if all(isinstance(item, list) and all(type(token) is int for token in item) for item in prompt):
            return prompt
    raise _invalid(
        "Invalid 'prompt': expected a string, a list of strings, a list of token ids or a list of such lists.",
        param="prompt",
    )


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise _invalid(f"'stop' holds {len(stops)} strings; at most {MAX_STOPS} are allowed.", param="stop")
    for text in stops:
        if not 1 <= len(text) <= MAX_STOP_CHARACTERS:
            raise _invalid(
                f"Invalid 'stop': each string must have 1 to {MAX_STOP_CHARACTERS} characters, one has {len(text)}.",
                param="stop",
            )
    return stops


def _tier(name: str | None, key: ApiKey) -> Tier:
    """The wanted tier; unasked the first that the key allows. Raises ApiError."""
    if name in (None, "auto"):
        return key.tiers[0]
    if name not in get_args(Tier):
        raise _invalid(
            f"Invalid 'service_tier': {_show(name)} is not one of auto, default, flex, priority.", param="service_tier"
        )
    if name not in key.tiers:
        raise _forbidden(
            f"This API key may not use the service tier '{name}'; it may use {', '.join(key.tiers)}.",
            param="service_tier",
        )
    return name


def _wrap(seed: int) -> int:
    """Seeds of later choices stay 64-bit integers."""
    return (seed + 2**63) % 2**64 - 2**63


def _hash(kind: Kind, content: dict[str, Any]) -> str:
    """Of what the answer depends on. How it is delivered does not count: a repeat may ask for a stream instead."""
    told = {name: value for name, value in content.items() if name not in ("stream", "stream_options")}
    canonical = msgspec.json.encode([kind, told], order="deterministic")
    return hashlib.blake2b(canonical, digest_size=16).hexdigest()
