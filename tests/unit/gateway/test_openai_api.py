"""What the OpenAI API's bodies become, and what is refused."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from contracts import codec as wire
from contracts.messages import GenerateRequest
from services.gateway.keys import ANYONE, ApiKey
from services.gateway.openai_api import Api, ApiError, Arrival, Call, Facts
from services.gateway.text import TextCodec
from services.profile import Profile, Tier
from tests.integration.gateway_rig import BLOCK, MASK_ID, MODEL

CALL_ID = "0123456789abcdef" * 2
ARRIVAL = Arrival(CALL_ID, "gw-1", now=1000.0, random_seed=77, detached=False)
HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}
ABC = {"model": MODEL, "prompt": "abc"}


@pytest.fixture(scope="module")
def api(profile: Profile, codec: TextCodec) -> Api:
    return Api(profile, codec, max_choices=4, vocab_size=codec.vocab_size, mask_id=MASK_ID)


def chat(api: Api, **fields: Any) -> Call:
    return api.read("chat", json.dumps({**HELLO, **fields}).encode(), ARRIVAL)


def text(api: Api, **fields: Any) -> Call:
    return api.read("text", json.dumps({**ABC, **fields}).encode(), ARRIVAL)


def refusal(api: Api, kind: str, raw: bytes | dict[str, Any]) -> ApiError:
    body = raw if isinstance(raw, bytes) else json.dumps(raw).encode()
    with pytest.raises(ApiError) as caught:
        api.read(kind, body, ARRIVAL)  # type: ignore[arg-type]
    assert caught.value.message
    return caught.value


@pytest.mark.parametrize("threshold", [0.5, 0.75, 0.9])
def test_a_pin_lies_within_the_models_thresholds(api: Api, threshold: float) -> None:
    assert chat(api, threshold=threshold).requests[0].threshold == threshold


# --- what an API key allows --------------------------------------------------------------------------------------


def chat_with(api: Api, key: ApiKey, **fields: Any) -> Call:
    return api.read("chat", json.dumps({**HELLO, **fields}).encode(), ARRIVAL._replace(key=key))


@pytest.mark.parametrize(
    ("tiers", "asked", "got"),
    [
        (("flex",), None, "flex"),
        (("flex",), "auto", "flex"),
        (("default", "priority"), None, "default"),
        (("priority", "default"), None, "priority"),
        (("priority", "default"), "default", "default"),
    ],
)
def test_a_call_that_names_no_tier_gets_the_first_of_its_key(
    api: Api, tiers: tuple[Tier, ...], asked: str | None, got: str
) -> None:
    call = chat_with(api, structs.replace(ANYONE, name="alice", tiers=tiers), service_tier=asked)
    assert call.facts.tier == got
    assert call.requests[0].priority == {"flex": -1, "default": 0, "priority": 1}[got]


@pytest.mark.parametrize(
    ("fields", "param"), [({"service_tier": "priority"}, "service_tier"), ({"threshold": 0.7}, "threshold")]
)
def test_what_a_key_does_not_allow_is_forbidden_by_name(api: Api, fields: dict[str, Any], param: str) -> None:
    key = structs.replace(ANYONE, name="alice", tiers=("default", "flex"), pin=False)
    with pytest.raises(ApiError, match=param.replace("_", " ")) as caught:
        chat_with(api, key, **fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (403, param, "not_allowed")


def test_a_call_tells_whose_it_is(api: Api) -> None:
    call = chat_with(api, structs.replace(ANYONE, name="alice"))
    assert Facts.decode(call.requests[0].fingerprint) == call.facts
    assert (call.facts.owner, call.key.name) == ("alice", "alice")
    assert chat(api).facts.owner == ""


def test_a_server_may_take_shorter_prompts_than_the_profile(profile: Profile, codec: TextCodec) -> None:
    sizes: dict[str, Any] = {"max_choices": 4, "vocab_size": codec.vocab_size, "mask_id": MASK_ID}
    short = Api(profile, codec, max_prompt_tokens=3, **sizes)
    assert len(text(short, prompt=[5, 5, 5]).requests[0].prompt_ids) == 3
    error = refusal(short, "text", {**ABC, "prompt": [5, 5, 5, 5]})
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "4 tokens; this model takes at most 3 (a limit of this server)" in error.message
    wide = Api(profile, codec, max_prompt_tokens=10**6, **sizes)
    assert refusal(wide, "text", {**ABC, "prompt": [5] * 600}).code == "context_length_exceeded"


# --- defaults ----------------------------------------------------------------------------------------------------


def test_what_is_left_unsaid_comes_from_the_profile(api: Api, profile: Profile, codec: TextCodec) -> None:
    call = chat(api)
    (request,) = call.requests
    assert request == GenerateRequest(
        request_id=CALL_ID,
        gateway_id="gw-1",
        model=MODEL,
        prompt_ids=codec.encode_chat(HELLO["messages"]),  # type: ignore[arg-type]
        max_tokens=64,
        block_size=BLOCK,
        cache="dual",
        created_at=1000.0,
        expires_at=1060.0,
        temperature=0.0,
        seed=77,
        fingerprint=call.facts.encode(),
    )
    assert not call.stream


def test_a_request_says_how_far_ahead_its_model_sees(profile: Profile, codec: TextCodec) -> None:
    seeing = structs.replace(profile, decoding=structs.replace(profile.decoding, blocks_ahead=2))
    api = Api(seeing, codec, max_choices=4, vocab_size=codec.vocab_size, mask_id=MASK_ID)
    assert chat(api).requests[0].blocks_ahead == 2


def test_null_means_left_unsaid(api: Api) -> None:
    unset = dict.fromkeys(("max_tokens", "n", "seed", "stop", "temperature", "tools", "top_p", "logprobs", "user"))
    assert structs.replace(chat(api, **unset).requests[0], fingerprint="") == structs.replace(
        chat(api).requests[0], fingerprint=""
    )


def test_every_setting_reaches_the_request(api: Api) -> None:
    call = chat(
        api, max_completion_tokens=13, temperature=0.7, seed=-5, threshold=0.6, slo_ms=1500, service_tier="flex",
        ignore_eos=True, stop="x", logprobs=True,
    )  # fmt: skip
    request = call.requests[0]
    assert (request.max_tokens, request.temperature, request.seed, request.threshold) == (13, 0.7, -5, 0.6)
    assert (request.deadline_at, request.priority, request.ignore_eos) == (1001.5, -1, True)
    assert (call.facts.stop, call.facts.logprobs, call.facts.tier) == (("x",), True, "flex")


def test_the_tier_promises_what_the_profile_says(api: Api) -> None:
    assert chat(api, service_tier="priority").requests[0].deadline_at == 1060.0
    assert chat(api, service_tier="priority", slo_ms=10).requests[0].deadline_at == 1000.01
    assert chat(api, service_tier="auto").requests[0].deadline_at is None
    assert [chat(api, service_tier=tier).requests[0].floor for tier in ("flex", "default")] == [0.5, 0.0]


def test_choices_differ_in_id_and_seed(api: Api) -> None:
    requests = chat(api, n=3, seed=2**63 - 1).requests
    assert [r.request_id for r in requests] == [CALL_ID, f"{CALL_ID}-1", f"{CALL_ID}-2"]
    assert [r.seed for r in requests] == [2**63 - 1, -(2**63), -(2**63) + 1]


def test_several_prompts_make_choices_in_order(api: Api) -> None:
    call = text(api, prompt=["a", "bc"], n=2)
    assert [len(r.prompt_ids) for r in call.requests] == [1, 1, 2, 2]
    assert call.facts.prompt_tokens == 3


def test_token_ids_are_taken_as_they_are(api: Api) -> None:
    assert text(api, prompt=[7, 8]).requests[0].prompt_ids == [7, 8]
    assert [r.prompt_ids for r in text(api, prompt=[[7], [8, 9]]).requests] == [[7], [8, 9]]


def test_text_parts_are_joined(api: Api) -> None:
    parts = [{"type": "text", "text": "hel"}, {"type": "text", "text": "lo"}]
    assert (
        chat(api, messages=[{"role": "user", "content": parts}]).requests[0].prompt_ids
        == chat(api).requests[0].prompt_ids
    )


@pytest.mark.parametrize(
    "field",
    [
        {"top_p": 1}, {"top_p": 1.0}, {"presence_penalty": 0}, {"frequency_penalty": 0.0}, {"logit_bias": {}},
        {"tools": []}, {"tool_choice": "none"}, {"functions": []}, {"response_format": {"type": "text"}},
        {"modalities": ["text"]}, {"store": True}, {"store": False}, {"user": "u"}, {"metadata": {"a": "b"}},
        {"parallel_tool_calls": True}, {"prompt_cache_key": "k"}, {"safety_identifier": "s"}, {"n": 1},
        {"service_tier": "default"}, {"top_logprobs": 0}, {"logprobs": False}, {"stop": []}, {"seed": 0},
    ],
)  # fmt: skip
def test_neutral_and_inert_fields_are_accepted(api: Api, field: dict[str, Any]) -> None:
    assert chat(api, **field).requests


@pytest.mark.parametrize(
    "field",
    [
        {"best_of": 1}, {"echo": False}, {"suffix": ""}, {"suffix": None}, {"logprobs": 0}, {"logprobs": 1},
        {"logit_bias": {}},
    ],
)  # fmt: skip
def test_neutral_fields_of_completions_are_accepted(api: Api, field: dict[str, Any]) -> None:
    assert text(api, **field).requests


# --- refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "field",
    [
        {"top_p": 0.9}, {"presence_penalty": 1}, {"frequency_penalty": -1}, {"logit_bias": {"5": 10}},
        {"tools": [{"type": "function"}]}, {"tool_choice": "required"}, {"functions": [{"name": "f"}]},
        {"function_call": {"name": "f"}}, {"response_format": {"type": "json_object"}}, {"modalities": ["audio"]},
        {"audio": {"voice": "x"}}, {"prediction": {"type": "content"}}, {"web_search_options": {}},
        {"reasoning_effort": "high"}, {"verbosity": "low"},
    ],
)  # fmt: skip
def test_what_would_change_the_answer_is_refused_by_name(api: Api, field: dict[str, Any]) -> None:
    error = refusal(api, "chat", {**HELLO, **field})
    (name,) = field
    assert (error.status, error.param, error.code) == (400, name, "unsupported_parameter")
    assert name in error.message


@pytest.mark.parametrize("field", [{"best_of": 2}, {"echo": True}, {"suffix": "x"}])
def test_what_would_change_a_completion_is_refused_by_name(api: Api, field: dict[str, Any]) -> None:
    error = refusal(api, "text", {**ABC, **field})
    assert (error.status, [error.param], error.code) == (400, list(field), "unsupported_parameter")


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"max_tokens": -5}, "max_tokens", ">= 1, but got -5"),
        ({"max_tokens": 0}, "max_tokens", ">= 1"),
        ({"max_tokens": "9"}, "max_tokens", "Invalid 'max_tokens': expected an integer, but got \"9\"."),
        ({"max_tokens": 1.5}, "max_tokens", "expected an integer, but got 1.5."),
        ({"max_tokens": [1]}, "max_tokens", "expected an integer, but got an array."),
        ({"stream": "x"}, "stream", "expected a boolean, but got \"x\"."),
        ({"stop": 5}, "stop", "expected a string or an array, but got 5."),
        ({"model": None}, "model", "expected a string, but got null."),
        ({"max_tokens": 10, "max_completion_tokens": 11}, "max_tokens", "contradict"),
        ({"max_tokens": 129}, "max_tokens", "128"),
        ({"temperature": 2.1}, "temperature", "2.1"),
        ({"temperature": -1}, "temperature", "-1"),
        ({"n": 0}, "n", "0"),
        ({"n": 5}, "n", "4"),
        ({"seed": 2**63}, "seed", str(2**63)),
        ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "4"),
        ({"stop": ""}, "stop", "1 to"),
        ({"stop": ["a", 1]}, "stop[1]", "expected a string, but got an integer."),
        ({"service_tier": "scale"}, "service_tier", "scale"),
        ({"threshold": 1.5}, "threshold", "1.5 is not between 0.5 and 0.9"),
        ({"threshold": 0.49}, "threshold", "0.49 is not between 0.5 and 0.9"),
        ({"slo_ms": 0}, "slo_ms", "0"),
        ({"stream_options": {"include_usage": True}}, "stream_options", "stream"),
        ({"watch": True}, "watch", "stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x", "stream_options.x"),
        ({"messages": []}, "messages", "length"),
        ({"messages": "hi"}, "messages", "array"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].role", "tool"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
         "messages[0].content[0]", "image_url"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls", "tool_calls"),
        ({"messages": [{"role": "user", "content": "x", "extra": 1}]}, "messages[0].extra", "extra"),
        ({"logprobs": True, "top_logprobs": 2}, "top_logprobs", "alternatives"),
        ({"logprobs": True, "top_logprobs": 1, "temperature": 1}, "top_logprobs", "alternatives"),
        ({"top_logprobs": 1}, "top_logprobs", "logprobs"),
        ({"model": 5}, "model", "str"),
        ({"temprature": 1}, "temprature", "Unrecognized request argument supplied: temprature"),
        ({"model": "gpt-4"}, "model", MODEL),
    ],
)  # fmt: skip
def test_wrong_values_are_named(api: Api, fields: dict[str, Any], param: str, words: str) -> None:
    error = refusal(api, "chat", {**HELLO, **fields})
    assert (error.status, error.type, error.param) == (400, "invalid_request_error", param)
    assert words in error.message
    assert error.code  # what names a field is of a kind


@pytest.mark.parametrize(
    "prompt",
    [None, [], {}, 5, [[]], [["a"]], ["a", 1], [1, "a"], [[1], 2], [True], [[1.5]], "", [-1], [10**9], [MASK_ID]],
)
def test_prompts_that_are_none_are_refused(api: Api, prompt: Any) -> None:
    error = refusal(api, "text", {**ABC, "prompt": prompt})
    assert (error.param, error.code) == ("prompt", "invalid_value")


@pytest.mark.parametrize(
    "fields",
    [
        {"max_tokens": 129}, {"n": 5}, {"n": 0}, {"messages": []}, {"stop": list("abcde")}, {"top_logprobs": 1},
        {"stream_options": {}}, {"max_tokens": 10, "max_completion_tokens": 11},
    ],
)  # fmt: skip
def test_values_out_of_range_have_one_code(api: Api, fields: dict[str, Any]) -> None:
    assert refusal(api, "chat", {**HELLO, **fields}).code == "invalid_value"


def test_an_unknown_model_is_a_bad_request(api: Api) -> None:
    error = refusal(api, "text", {**ABC, "model": "gpt-4"})
    assert (error.status, error.code) == (400, "model_not_found")
    assert "gpt-4" in error.message


def test_an_over_long_prompt_names_both_lengths(api: Api, profile: Profile) -> None:
    error = refusal(api, "text", {**ABC, "prompt": "a" * 700})
    assert (error.status, error.code) == (400, "context_length_exceeded")
    assert "700" in error.message
    assert str(profile.max_prompt_tokens) in error.message


def test_a_length_that_does_not_fit_beside_the_prompt_names_the_room(api: Api) -> None:
    error = refusal(api, "text", {**ABC, "prompt": "a" * 450, "max_tokens": 60})
    assert (error.param, error.code) == ("max_tokens", "context_length_exceeded")
    assert "room for 56" in error.message


def test_a_length_left_unsaid_takes_the_room_that_there_is(api: Api) -> None:
    assert text(api, prompt="a" * 450).requests[0].max_tokens == 56
    assert text(api, prompt="a" * 504).requests[0].max_tokens == 8


@pytest.mark.parametrize(
    "raw", [b"", b"{", b"[]", b"5", b"null", b'"x"', b"\xff\xfe", b"[" * 50_000, b'{"a":NaN}', b'{"model":"\\ud800"}']
)
def test_what_is_no_json_object_is_refused(api: Api, raw: bytes) -> None:
    assert refusal(api, "chat", raw).status == 400


@pytest.mark.parametrize("lone", [r"\ud800", r"\\\ud800", r"\udc00x", r"\ud800\u0041", r"\uDBFFabcdefgh"])
def test_half_of_a_surrogate_pair_is_named(api: Api, lone: str) -> None:
    assert "invalid Unicode escape" in refusal(api, "chat", f'{{"model":"{lone}"}}'.encode()).message


@pytest.mark.parametrize("cut", [r"a", r"\ud83d\ude00", r"\\ud800", r"\ud83d"])
def test_a_text_that_is_cut_is_called_so(api: Api, cut: str) -> None:
    assert "truncated" in refusal(api, "chat", f'{{"model":"{cut}'.encode()).message


def test_the_envelope_is_openais(api: Api) -> None:
    assert refusal(api, "chat", {**HELLO, "n": 0}).envelope == {
        "error": {
            "message": "Invalid 'n': expected an integer >= 1, but got 0.",
            "type": "invalid_request_error",
            "param": "n",
            "code": "invalid_value",
        }
    }


# --- properties --------------------------------------------------------------------------------------------------


@given(prompt_tokens=st.integers(1, 600), wanted=st.none() | st.integers(1, 200))
def test_what_is_taken_fits_the_canvas(api: Api, profile: Profile, prompt_tokens: int, wanted: int | None) -> None:
    fields: dict[str, Any] = {"prompt": [7] * prompt_tokens, "max_tokens": wanted}
    blocks = -(-(wanted or 1) // BLOCK)
    fits = prompt_tokens + blocks * BLOCK <= profile.limits.max_context_tokens and (wanted or 1) <= 128
    if not fits:
        refusal(api, "text", {**ABC, **fields})
        return
    request = text(api, **fields).requests[0]
    assert request.canvas_tokens <= profile.limits.max_context_tokens
    assert wanted is None or request.max_tokens == wanted


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [*HELLO, "prompt", "max_tokens", "n", "stop", "stream_options", "logit_bias", "tools", "seed", "logprobs", "x"]


@given(fields=st.dictionaries(st.sampled_from(FIELDS), JSON, max_size=4), kind=st.sampled_from(["chat", "text"]))
def test_a_body_is_taken_or_refused_and_what_is_taken_can_travel(api: Api, fields: dict[str, Any], kind: Any) -> None:
    body = {**(HELLO if kind == "chat" else ABC), **fields}
    try:
        call = api.read(kind, json.dumps(body).encode(), ARRIVAL)
    except ApiError as error:
        json.dumps(error.envelope)
        return
    for request in call.requests:
        assert wire.decode(wire.encode(request), GenerateRequest) == request


# --- facts -------------------------------------------------------------------------------------------------------


def test_the_hash_is_of_what_the_answer_depends_on(api: Api) -> None:
    plain = chat(api).facts.body
    assert chat(api, stream=True, stream_options={"include_usage": True}).facts.body == plain
    assert chat(api, seed=1).facts.body != plain
    reordered = json.dumps({"messages": HELLO["messages"], "model": MODEL}).encode()
    assert api.read("chat", reordered, ARRIVAL).facts.body == plain


def test_facts_travel_as_a_string(api: Api) -> None:
    facts = chat(api, n=2, stop=["é", '"'], logprobs=True).facts
    assert Facts.decode(facts.encode()) == facts
    assert Facts.decode("somebody else's") is None
