"""The AsyncAPI 3.0 document of all contracts, as nested dicts.

1. Every subject is a channel; who says it has an operation that sends it, who hears it one that receives it. Replies go
   to a channel without an address: the requester's inbox.
2. Schemas are msgspec's, put in the dialect of AsyncAPI (draft 07): tuples are `items` with a list, patterns end in
   `$`. They hold of the messages as msgpack decodes them.
3. What a field means is its description. A place in an array is titled with the field that it holds.
"""

import inspect
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from contracts import messages as m
from contracts import subjects
from contracts.subjects import CHANNELS, Channel
from tools.asyncapi.source import Source, read

VERSION = "3.0.0"
_SCHEMAS = "#/components/schemas/"
_INBOX = "inbox"
_MESSAGES = "#/components/messages/"
_KINDS = {
    "stream": "Durable: kept by JetStream, the last message of each subject.",
    "publish": "Core NATS: whoever does not listen misses it.",
    "request": "Core NATS, request and reply.",
}


def source() -> Source:
    """What the source of the messages says about them."""
    return read(inspect.getsource(m))


def all_messages() -> tuple[type[msgspec.Struct], ...]:
    """Everything that `contracts.messages` defines, less the common base, in the order of the file."""
    found = [value for value in vars(m).values() if inspect.isclass(value) and value.__module__ == m.__name__]
    return tuple(c for c in found if issubclass(c, msgspec.Struct) and c is not m.Message)


def summary(message: type) -> str:
    """The first paragraph of its docstring."""
    return (inspect.getdoc(message) or "").split("\n\n")[0].replace("\n", " ")


def address(channel: Channel) -> str:
    """The subject with names for its wildcards, from the function in `subjects` that makes it: `req.{request_id}`."""
    for names, made in _subjects_made():
        tokens = made.split(".")
        if ".".join("*" if token in names else token for token in tokens) == channel.pattern:
            return ".".join(f"{{{token}}}" if token in names else token for token in tokens)
    assert "*" not in channel.pattern, f"no function of contracts.subjects makes {channel.pattern}"
    return channel.pattern


def _subjects_made() -> Iterator[tuple[list[str], str]]:
    """What each function of `subjects` makes of the names of its parameters, and these."""
    for _, function in inspect.getmembers(subjects, inspect.isfunction):
        parameters = inspect.signature(function).parameters.values()
        if parameters and all(parameter.annotation is str for parameter in parameters):
            names = [parameter.name for parameter in parameters]
            yield names, str(function(*names))


def build(version: str) -> dict[str, Any]:
    """The whole document; `version`: of the software."""
    carried = {t for channel in CHANNELS for t in (channel.message, *channel.replies)}
    return {
        "asyncapi": VERSION,
        "info": {
            "title": "TeDiServe",
            "version": version,
            "description": "What the services of TeDiServe say to each other over NATS.",
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/msgpack",
        "servers": {"nats": {"host": "127.0.0.1:4222", "protocol": "nats", "description": "`url` in `[nats]`."}},
        "channels": {_key(channel): _channel(channel) for channel in CHANNELS} | {_INBOX: _inbox()},
        "operations": {name: operation for channel in CHANNELS for name, operation in _operations(channel)},
        "components": {
            "messages": {t.__name__: _message(t) for t in all_messages() if t in carried},
            "schemas": _schemas(),
        },
    }


def _key(channel: Channel) -> str:
    """The subject as the key of a map, which takes no dots or braces: `inst_assign`."""
    return "_".join(token for token in channel.pattern.removeprefix("$").split(".") if token != "*")


def _channel(channel: Channel) -> dict[str, Any]:
    parameters = {
        token[1:-1]: {"description": "1 to 80 of A-Z a-z 0-9 _ -"}
        for token in address(channel).split(".")
        if token.startswith("{")
    }
    return {
        "address": address(channel),
        "description": _KINDS[channel.kind],
        **({"parameters": parameters} if parameters else {}),
        "messages": _references([channel.message]),
    }


def _inbox() -> dict[str, Any]:
    replies = {t.__name__: t for channel in CHANNELS for t in channel.replies}
    return {
        "address": None,
        "description": "The inbox of who asked: each request names its own.",
        "messages": _references(replies.values()),
    }


def _references(messages: Iterable[type]) -> dict[str, Any]:
    return {t.__name__: {"$ref": _MESSAGES + t.__name__} for t in messages}


def _operations(channel: Channel) -> list[tuple[str, dict[str, Any]]]:
    there = f"#/channels/{_key(channel)}"
    reply = {
        "channel": {"$ref": f"#/channels/{_INBOX}"},
        "messages": [{"$ref": f"#/channels/{_INBOX}/messages/{t.__name__}"} for t in channel.replies],
    }
    return [
        (
            f"{service}_{verb}_{_key(channel)}",
            {
                "action": action,
                "channel": {"$ref": there},
                "tags": [{"name": service}],
                "messages": [{"$ref": f"{there}/messages/{channel.message.__name__}"}],
                **({"reply": reply} if channel.replies else {}),
            },
        )
        for action, verb, services in (("send", "says", channel.said_by), ("receive", "hears", channel.heard_by))
        for service in services
    ]


def _message(message: type) -> dict[str, Any]:
    return {
        "name": message.__name__,
        "title": message.__name__,
        "summary": summary(message),
        "headers": {
            "type": "object",
            "properties": {"traceparent": {"type": "string", "description": "W3C trace context, if there is a trace."}},
        },
        "payload": {"$ref": _SCHEMAS + message.__name__},
    }


# --- schemas ------------------------------------------------------------------------------------------------------


def _schemas() -> dict[str, Any]:
    _, schemas = msgspec.json.schema_components(all_messages(), ref_template=_SCHEMAS + "{name}")
    meanings = source().fields
    return {t.__name__: _explained(t, draft_07(schemas[t.__name__]), meanings) for t in all_messages()}


def draft_07(schema: Any) -> Any:
    """The same in the older dialect."""
    if isinstance(schema, list):
        return [draft_07(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    found = {key: draft_07(value) for key, value in schema.items()}
    if isinstance(found.get("pattern"), str):
        found["pattern"] = found["pattern"].replace("\\Z", "$")
    if "prefixItems" in found:
        if "items" in found:
            found["additionalItems"] = found.pop("items")
        found["items"] = found.pop("prefixItems")
    return found


def _explained(message: type[msgspec.Struct], schema: dict[str, Any], meanings: dict[str, Any]) -> dict[str, Any]:
    """With the fields' meanings, where the dialect allows a word beside them."""
    fields = meanings[message.__name__]
    if schema["type"] == "object":
        places = [schema["properties"][field.name] for field in fields]
    else:
        places = schema["items"][-len(fields) :]  # behind the tag, if there is one
        for place, field in zip(places, fields, strict=True):
            if "$ref" not in place:
                place["title"] = field.name
    for place, field in zip(places, fields, strict=True):
        if field.meaning and "$ref" not in place:
            place["description"] = field.meaning
    return schema
