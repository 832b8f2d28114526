"""Old and new versions run side by side: what was ever encoded decodes for ever.

`samples/<Message>.<n>.msgpack` is never changed or removed. A changed message gets one more:
`python -m tests.wire.add_samples`.
"""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from contracts import codec
from contracts import messages as m
from tests.wire.builders import EXAMPLES, message_classes

SAMPLES = Path(__file__).parent / "samples"


def samples() -> list[Path]:
    return sorted(SAMPLES.glob("*.msgpack"))


def class_of(sample: Path) -> type[msgspec.Struct]:
    found: type[msgspec.Struct] = getattr(m, sample.name.split(".")[0])
    return found


def as_map(message: msgspec.Struct) -> dict[str, Any]:
    """By field, whether it travels as a map or as an array."""
    fields = {name: getattr(message, name) for name in message.__struct_fields__}
    found: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(fields))
    return found


def still_says(found: Any, expected: Any) -> bool:
    """Whether `found` holds all of `expected`; messages inside it may have gained fields since."""
    if isinstance(expected, dict):
        return all(name in found and still_says(found[name], value) for name, value in expected.items())
    if isinstance(expected, list):
        return len(found) >= len(expected) and all(map(still_says, found, expected))
    return bool(found == expected)


@pytest.mark.parametrize("sample", samples(), ids=lambda path: path.stem)
def test_what_was_once_encoded_means_the_same_today(sample: Path) -> None:
    message = codec.decode(sample.read_bytes(), class_of(sample))
    assert still_says(as_map(message), msgspec.json.decode(sample.with_suffix(".json").read_bytes()))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_what_is_encoded_today_is_on_record(example: msgspec.Struct) -> None:
    encoded = codec.encode(example)
    on_record = [path.read_bytes() for path in SAMPLES.glob(f"{type(example).__name__}.*.msgpack")]
    assert encoded in on_record, "the encoding has changed: run `python -m tests.wire.add_samples`"
    assert codec.decode(encoded, type(example)) == example


def test_every_message_has_an_example_in_which_every_field_is_set() -> None:
    assert {type(example) for example in EXAMPLES} == message_classes()
    for example in EXAMPLES:
        fields = msgspec.structs.fields(type(example))
        unset = [f.name for f in fields if not f.required and getattr(example, f.name) == f.default]
        assert not unset, f"{type(example).__name__}: {unset} stand at their defaults"


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_fields_from_the_future_are_ignored(example: msgspec.Struct) -> None:
    content = msgspec.msgpack.decode(codec.encode(example))
    content = [*content, "new"] if isinstance(content, list) else content | {"added_later": {"x": [1]}}
    assert codec.decode(codec.encode(content), type(example)) == example


@pytest.mark.parametrize("example", [e for e in EXAMPLES if isinstance(e, m.Message)], ids=lambda e: type(e).__name__)
def test_fields_that_older_senders_do_not_know_have_defaults(example: m.Message) -> None:
    optional = {f.encode_name for f in msgspec.structs.fields(type(example)) if not f.required}
    content = msgspec.msgpack.decode(codec.encode(example))
    older = {name: value for name, value in content.items() if name not in optional}
    message = codec.decode(codec.encode(older), type(example))
    assert {name: getattr(message, name) for name in older if name != "type"} == {
        name: getattr(example, name) for name in older if name != "type"
    }


@pytest.mark.parametrize(
    ("wanted", "content", "complaint"),
    [
        (m.Cancel, {"type": "Cancel", "request_id": "a.b"}, "request_id"),
        (m.Cancel, {"type": "Cancel", "request_id": "a*"}, "request_id"),
        (m.Cancel, {"type": "Cancel", "request_id": ""}, "request_id"),
        (m.Cancel, {"type": "Release", "request_id": "a"}, "Invalid value"),
        (m.ThresholdEntry, {"type": "ThresholdEntry", "request_id": "a", "attempt": 1, "threshold": 1.5}, "threshold"),
        (m.ThresholdEntry, {"type": "ThresholdEntry", "request_id": "a", "attempt": 0, "threshold": 0.5}, "attempt"),
        (m.GatewayStatus, {"type": "GatewayStatus", "gateway_id": "g"}, "sent_at"),
        (m.GatewayStatus, {"type": "GatewayStatus", "gateway_id": "g", "sent_at": "now"}, "sent_at"),
    ],
)
def test_a_wrong_message_is_refused_and_the_complaint_says_where(
    wanted: type[m.Message], content: dict[str, object], complaint: str
) -> None:
    with pytest.raises(codec.MalformedMessage, match=complaint):
        codec.decode(codec.encode(content), wanted)


@pytest.mark.parametrize("data", [b"", b"\xc1", b"{}", b"\x91" * 100_000, b"\xff" * 50])
def test_bytes_that_are_no_message_are_refused(data: bytes) -> None:
    with pytest.raises(codec.MalformedMessage):
        codec.decode(data, m.Cancel)
