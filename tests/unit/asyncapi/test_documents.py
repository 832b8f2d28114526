"""The documents of the contracts are current, whole, and say of real messages what is true."""

from typing import Any

import jsonschema
import msgspec
import pytest
import yaml

from contracts import codec
from contracts.subjects import CHANNELS
from tests.wire.builders import EXAMPLES, message_classes
from tools.asyncapi.__main__ import generated
from tools.asyncapi.document import all_messages, draft_07
from tools.asyncapi.source import Alias, Field, read

DOCUMENT, PAGE, _USERS = (path.read_text(encoding="utf-8") for path in generated())
PARSED: dict[str, Any] = yaml.safe_load(DOCUMENT)


@pytest.mark.parametrize(("path", "text"), generated().items(), ids=lambda value: getattr(value, "name", ""))
def test_what_is_committed_is_what_is_generated(path: Any, text: str) -> None:
    assert path.read_text(encoding="utf-8") == text, "run `make docs`"


def references(part: Any) -> list[str]:
    if isinstance(part, dict):
        return (
            [part["$ref"]] if isinstance(part.get("$ref"), str) else [r for v in part.values() for r in references(v)]
        )
    return [r for v in part for r in references(v)] if isinstance(part, list) else []


def test_every_reference_leads_somewhere() -> None:
    found = references(PARSED)
    assert len(found) > 100
    for reference in found:
        part = PARSED
        for step in reference.removeprefix("#/").split("/"):
            part = part[step]


def test_every_subject_is_a_channel_and_every_speaker_and_listener_has_an_operation() -> None:
    patterns = {"." if c["address"] is None else c["address"]: c for c in PARSED["channels"].values()}
    assert len(patterns) == len(CHANNELS) + 1  # the inbox
    assert patterns["prog.{gateway_id}.{request_id}"]["parameters"].keys() == {"gateway_id", "request_id"}
    assert patterns["$KV.CLUSTER.plan"]["messages"].keys() == {"ClusterPlan"}
    operations = PARSED["operations"]
    assert len(operations) == sum(len(c.said_by) + len(c.heard_by) for c in CHANNELS)
    asked = operations["scheduler_says_inst_assign"]
    assert asked["action"] == "send"
    assert [m["$ref"].split("/")[-1] for m in asked["reply"]["messages"]] == ["Accepted", "Refused"]
    assert operations["worker_hears_inst_assign"]["action"] == "receive"
    assert [c.pattern for c in CHANNELS if bool(c.replies) != (c.kind == "request")] == []


def schema_of(name: str) -> dict[str, Any]:
    return {"$ref": f"#/components/schemas/{name}", "components": PARSED["components"]}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_a_message_as_it_travels_is_what_the_schema_says(example: msgspec.Struct) -> None:
    """And one that lacks its first field, or has a wrong one, is not."""
    validator = jsonschema.Draft7Validator(schema_of(type(example).__name__))
    travels = msgspec.msgpack.decode(codec.encode(example))
    validator.validate(travels)
    wrong: list[Any]
    if isinstance(travels, list):
        wrong = [[None, *travels[1:]], travels[:1]]
    else:
        required = [name for name in travels if name != "type"][:1]
        wrong = [{**travels, "type": "Other"}, *({**travels, name: {}} for name in required)]
    for damaged in wrong:
        assert not validator.is_valid(damaged), damaged


def test_meanings_are_descriptions() -> None:
    schemas = PARSED["components"]["schemas"]
    assert schemas.keys() == {t.__name__ for t in all_messages()} == {t.__name__ for t in message_classes()}
    assert schemas["GenerateRequest"]["properties"]["threshold"]["description"] == "the client's pin"
    places = schemas["Report"]["items"]
    assert [place.get("title") for place in places] == [None, "instance_id", "sent_at", "entries", "latency_ratio"]
    assert places[4]["description"] == "measured over profiled step latency, running median"
    entry = {place["title"]: place for place in schemas["RequestReport"]["items"]}
    assert entry["steps"]["description"] == "run so far, on all instances"


def test_the_page_tells_of_every_message_with_its_fields() -> None:
    sections = {part.split("\n")[0]: part for part in PAGE.split("\n### ")[1:]}
    for message in all_messages():
        for field in msgspec.structs.fields(message):
            assert f"| `{field.name}` |" in sections[message.__name__]
    assert "| `threshold` | `Probability \\| None` | `None` | the client's pin |" in sections["GenerateRequest"]
    assert "| `'client_gone'` | the client hung up |" in sections["Reason"]
    assert "| `inst.{instance_id}.drain` | [Drain](#drain); answered by [Accepted](#accepted) |" in PAGE


SOURCE = '''
Id: TypeAlias = Annotated[str, Meta(pattern="x")]  # behind one line
Why: TypeAlias = Literal[
    # a heading is no meaning
    "late",  # it came too late
    "odd",
]


class Thing(Message, frozen=True):
    """A thing."""

    id: Id
    size: int | None = None  # in tokens, # 3
    pair: "Other" = (
        1
    )  # of both
'''


def test_the_source_is_read_as_it_is_written() -> None:
    source = read(SOURCE)
    assert source.fields == {
        "Thing": (
            Field("id", "Id", "", ""),
            Field("size", "int | None", "None", "in tokens, # 3"),
            Field("pair", "Other", "1", "of both"),
        )
    }
    assert source.aliases == {
        "Id": Alias("Id", "Annotated[str, Meta(pattern='x')]", ()),
        "Why": Alias("Why", "Literal['late', 'odd']", (("'late'", "it came too late"),)),
    }


def test_tuples_and_patterns_are_put_in_the_older_dialect() -> None:
    newer = {"prefixItems": [{"pattern": "^a\\Z"}], "items": False}
    assert draft_07({"x": newer}) == {"x": {"items": [{"pattern": "^a$"}], "additionalItems": False}}
