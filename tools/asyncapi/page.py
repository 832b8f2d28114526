"""The contracts as a page to be read: subjects, messages with the meaning of each field, and the types with a name."""

import inspect
from collections.abc import Sequence

import msgspec

from contracts.subjects import CHANNELS, Channel
from tools.asyncapi.document import address, all_messages, source
from tools.asyncapi.source import Alias, Field

_INTRODUCTION = """\
# Contracts

Everything that the services say to each other over NATS. Made by `make docs` from [contracts/](../contracts), where it
is to be changed; the same for machines: [asyncapi.yaml](asyncapi.yaml).

Messages are msgpack: maps, tagged with their name in `type`, or where it is said arrays in the order of the fields.
Readers ignore fields that they do not know, and a new field has a default, so that versions run side by side. The
header `traceparent` carries the trace that a message belongs to.
"""
_KINDS = {"stream": "JetStream", "publish": "core NATS", "request": "request-reply"}


def render() -> str:
    """Markdown."""
    parts = [_INTRODUCTION, "## Subjects\n", _subjects(), "## Messages\n"]
    parts += [_message(message) for message in all_messages()]
    parts += ["## Types\n", _types()]
    return "\n".join(parts)


def _subjects() -> str:
    rows = [
        (
            f"`{address(channel)}`",
            _link(channel.message) + _answers(channel),
            _KINDS[channel.kind],
            ", ".join(channel.said_by) or "nobody yet",
            ", ".join(channel.heard_by) or "nobody yet",
        )
        for channel in CHANNELS
    ]
    return _table(("subject", "message", "by", "said by", "heard by"), rows)


def _answers(channel: Channel) -> str:
    return f"; answered by {' or '.join(map(_link, channel.replies))}" if channel.replies else ""


def _link(message: type) -> str:
    return f"[{message.__name__}](#{message.__name__.lower()})"


def _message(message: type[msgspec.Struct]) -> str:
    text = [f"### {message.__name__}\n", inspect.getdoc(message) or "", ""]
    if message.__struct_config__.array_like:
        text += ["Travels as an array.", ""]
    fields = source().fields[message.__name__]
    rows = [(f"`{field.name}`", _code(field.type), _default(field), field.meaning) for field in fields]
    return "\n".join([*text, _table(("field", "type", "default", "meaning"), rows) if rows else "No fields.\n"])


def _default(field: Field) -> str:
    return _code(field.default) if field.default else "required"


def _types() -> str:
    aliases = source().aliases.values()
    rows = [(f"`{alias.name}`", _code(_short(alias))) for alias in aliases]
    valued = [alias for alias in aliases if alias.values]
    return "\n".join([_table(("type", "is"), rows), *map(_values, valued)])


def _short(alias: Alias) -> str:
    return "Literal[...]" if alias.values else alias.definition


def _values(alias: Alias) -> str:
    rows = [(_code(value), meaning) for value, meaning in alias.values]
    return f"### {alias.name}\n\n" + _table(("value", "meaning"), rows)


def _code(text: str) -> str:
    return "`" + text.replace("|", "\\|") + "`"


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "".join("| " + " | ".join(cells) + " |\n" for cells in lines)
