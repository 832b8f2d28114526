"""Whatever bytes arrive, they are a message or malformed: nothing else comes out of the codec."""

import contextlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contracts import codec, subjects
from contracts import messages as m
from contracts.codec import MalformedMessage
from tests.wire.builders import EXAMPLES


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_malformed(data: bytes) -> None:
    for example in EXAMPLES:
        with contextlib.suppress(MalformedMessage):
            assert isinstance(codec.decode(data, type(example)), type(example))


@given(
    example=st.sampled_from(EXAMPLES),
    changes=st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), max_size=4),
)
def test_a_damaged_message_is_a_message_or_malformed(example: msgspec.Struct, changes: list[tuple[int, int]]) -> None:
    data = bytearray(codec.encode(example))
    for place, value in changes:
        data[place % len(data)] = value
    with contextlib.suppress(MalformedMessage):
        assert isinstance(codec.decode(bytes(data), type(example)), type(example))


@pytest.mark.parametrize("value", ["", "a.b", "a b", "*", ">", "x" * 81, "ä", "a\n", "a\x00"])
def test_an_id_that_could_be_no_part_of_a_subject_is_malformed(value: str) -> None:
    """Else it would be found out only where the subject is made, deep in a service."""
    with pytest.raises(MalformedMessage):
        codec.decode(codec.encode({"type": "Cancel", "request_id": value}), m.Cancel)
    with pytest.raises(ValueError, match="cannot be part of a subject"):
        subjects.cancel(value)


@given(st.text(max_size=90))
def test_an_id_is_valid_exactly_if_its_subject_is(value: str) -> None:
    try:
        subjects.cancel(value)
    except ValueError:
        with pytest.raises(MalformedMessage):
            codec.decode(codec.encode({"type": "Cancel", "request_id": value}), m.Cancel)
    else:
        assert codec.decode(codec.encode({"type": "Cancel", "request_id": value}), m.Cancel).request_id == value


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 1e300])
@pytest.mark.parametrize(
    ("name", "field"),
    [("GenerateRequest", "expires_at"), ("GenerateRequest", "created_at"), ("InstanceStatus", "latency_ratio")],
)
def test_a_number_that_cannot_be_compared_is_malformed(name: str, field: str, value: float) -> None:
    example = next(example for example in EXAMPLES if type(example).__name__ == name)
    content = msgspec.msgpack.decode(codec.encode(example)) | {field: value}
    with pytest.raises(MalformedMessage, match=field):
        codec.decode(codec.encode(content), type(example))
