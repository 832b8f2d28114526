"""The OpenAPI description of our bodies and answers, for Litestar to put into `/schema`.

Handlers read their bodies themselves, so that errors are in OpenAI's words; what they read is told here.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from litestar import Request, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import OpenAPIMediaType, OpenAPIResponse, Operation, RequestBody
from litestar.types import AfterRequestHookHandler

from services.gateway.openai_api import ChatBody, TextBody
from services.gateway.policy import TediserveInfo

_REF = "#/components/schemas/{name}"
_, _STRUCTS = msgspec.json.schema_components([ChatBody, TextBody, TediserveInfo], ref_template=_REF)
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
        "tediserve": {"$ref": _REF.format(name="TediserveInfo")},
    },
}
_SCHEMAS: dict[str, Any] = {**_STRUCTS, "Error": _ERROR, "Answer": _ANSWER}


def _content(name: str, media_type: str = "application/json") -> dict[str, OpenAPIMediaType]:
    reference: Any = {"$ref": _REF.format(name=name)}  # passes through Litestar as it is
    return {media_type: OpenAPIMediaType(schema=reference)}


def _responses(answer: dict[str, OpenAPIMediaType]) -> dict[str, Any]:
    return {
        "200": OpenAPIResponse(description="The answer.", content=answer),
        "default": OpenAPIResponse(description="An error.", content=_content("Error")),
    }


@dataclass
class CallOperation(Operation):
    """Base of the two that take a body."""

    body: ClassVar[str]

    def __post_init__(self) -> None:
        text: Any = {"type": "string"}
        streamed = {"text/event-stream": OpenAPIMediaType(schema=text)}  # if `stream` is true
        self.request_body = RequestBody(content=_content(self.body), required=True)
        self.responses = _responses(_content("Answer") | streamed)


@dataclass
class ChatOperation(CallOperation):
    """POST /v1/chat/completions."""

    body = "ChatBody"


@dataclass
class TextOperation(CallOperation):
    """POST /v1/completions."""

    body = "TextBody"


@dataclass
class ResultOperation(Operation):
    """GET and DELETE /v1/results/{id}."""

    def __post_init__(self) -> None:
        self.responses = _responses(_content("Answer"))


@dataclass
class ObjectOperation(Operation):
    """GET of what needs no closer description."""

    def __post_init__(self) -> None:
        anything: Any = {"type": "object"}
        self.responses = _responses({"application/json": OpenAPIMediaType(schema=anything)})


class _Renderer(JsonRenderPlugin):
    """Adds our schemas, which Litestar would replace by those that it finds in signatures."""

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        return super().render(request, openapi_schema | {"components": {"schemas": _SCHEMAS}})


def openapi_config(version: str, not_found: AfterRequestHookHandler) -> OpenAPIConfig:
    """`/schema` and `/schema/openapi.json`. `not_found` replaces Litestar's page for other paths under it."""
    return OpenAPIConfig(
        title="TeDiServe",
        version=version,
        description="OpenAI-compatible serving of diffusion language models.",
        render_plugins=[_Renderer()],
        openapi_router=Router("/schema", route_handlers=[], include_in_schema=False, after_request=not_found),
    )
