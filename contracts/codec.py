"""msgpack encoding of the messages.

1. Encoding never fails for a message built from `contracts.messages`.
2. Decoding checks types and ranges, ignores unknown fields, and raises `MalformedMessage` for everything else.
"""

from functools import cache
from typing import Any, TypeVar

import msgspec

T = TypeVar("T")

_encoder = msgspec.msgpack.Encoder()


class MalformedMessage(ValueError):
    """Bytes that are no message of the expected type; says what is wrong and where."""


@cache
def _decoder(wanted: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(wanted)


def encode(message: object) -> bytes:
    """The message as msgpack bytes."""
    return _encoder.encode(message)


def decode(data: bytes, wanted: type[T]) -> T:
    """The message of type (or union) `wanted` in `data`.

    Raises MalformedMessage when the bytes are not msgpack, are another message, or break a range.
    """
    try:
        message: T = _decoder(wanted).decode(data)  # type: ignore[arg-type]  # mypy does not see that types hash
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MalformedMessage(str(error)) from None
    return message
