"""The OpenAPI description of our bodies and answers, for Litestar to put into `/schema`.

Handlers read their bodies themselves, so that errors are in OpenAI's words; what they read is told here.
"""

from dataclasses import dataclass, field
from typing import Any

import msgspec
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Components, OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody

from services.gateway.openai_api import ChatBody, TextBody

_REF = "#/components/schemas/{name}"
_, _BODIES = msgspec.json.schema_components([ChatBody, TextBody], ref_template=_REF)
_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}
_ANSWER = {
    "type": "object",
    "required": ["id", "object", "choices"],
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": {"type": "integer"},
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": ["object", "null"]},
        "tediserve": {"type": "object"},
    },
}
_SCHEMAS: dict[str, Any] = {**_BODIES, "Error": _ERROR, "Answer": _ANSWER}


def _content(name: str, media_type: str = "application/json") -> dict[str, OpenAPIMediaType]:
    reference: Any = {"$ref": _REF.format(name=name)}  # passes through Litestar as it is
    return {media_type: OpenAPIMediaType(schema=reference)}


def _responses(answer: str, *, streamed: bool = False) -> dict[str, Any]:
    content = _content(answer)
    if streamed:
        text: Any = {"type": "string"}
        content["text/event-stream"] = OpenAPIMediaType(schema=text)
    return {
        "200": OpenAPIResponse(description="The answer; server-sent events if `stream` is true.", content=content),
        "default": OpenAPIResponse(description="An error.", content=_content("Error")),
    }


@dataclass
class ChatOperation(Operation):
    """POST /v1/chat/completions."""

    def __post_init__(self) -> None:
        self.summary = "Answer a conversation"
        self.request_body = RequestBody(content=_content("ChatBody"), required=True)
        self.responses = _responses("Answer", streamed=True)


@dataclass
class TextOperation(Operation):
    """POST /v1/completions."""

    def __post_init__(self) -> None:
        self.summary = "Complete a text"
        self.request_body = RequestBody(content=_content("TextBody"), required=True)
        self.responses = _responses("Answer", streamed=True)


@dataclass
class ResultOperation(Operation):
    """GET and DELETE /v1/results/{id}."""

    summary: str | None = field(default="What became of a call")

    def __post_init__(self) -> None:
        self.responses = _responses("Answer")


def openapi_config(version: str) -> OpenAPIConfig:
    """`/schema` and `/schema/openapi.json`."""
    return OpenAPIConfig(
        title="TeDiServe",
        version=version,
        description="OpenAI-compatible serving of diffusion language models.",
        components=Components(schemas=_SCHEMAS),
        render_plugins=[JsonRenderPlugin()],
        path="/schema",
    )
