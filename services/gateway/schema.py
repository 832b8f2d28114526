"""The OpenAPI description of our bodies and answers, for Litestar to put into `/schema`.

Handlers read their bodies themselves, so that errors are in OpenAI's words; what they read is told here.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec
from litestar import Request, Router
from litestar.openapi.config import OpenAPIConfig
from litestar.openapi.plugins import JsonRenderPlugin
from litestar.openapi.spec import Link, OpenAPIMediaType, OpenAPIResponse, Operation, Reference, RequestBody
from litestar.types import AfterRequestHookHandler

from services.gateway.openai_api import NEUTRAL, ChatBody, TextBody
from services.gateway.page import PUBLIC
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
_EVENT = {
    "type": "object",
    "description": "One event of the stream.",
    "required": ["data"],
    "properties": {
        "data": {
            "type": "string",
            "description": "A chunk or an error, as JSON; at the end of a whole answer `[DONE]`.",
        }
    },
}
_BODIES = ("ChatBody", "TextBody")
_EXAMPLES: dict[str, dict[str, Any]] = {
    "ChatBody": {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "max_tokens": 32, "stream": False},
    "TextBody": {"prompt": "12 + 30 =", "max_tokens": 32, "stream": False},
}


def _schemas(model: str) -> dict[str, Any]:
    return {**_STRUCTS, **{name: _body(name, model) for name in _BODIES}, "Error": _ERROR, "Answer": _ANSWER}


def _body(name: str, model: str) -> dict[str, Any]:
    """The struct's schema, the model's name and the only values of what this server lacks put in."""
    properties = {field: _property(field, found) for field, found in _STRUCTS[name]["properties"].items()}
    properties["model"] = {"type": "string", "enum": [model]}
    return {**_STRUCTS[name], "properties": properties, "examples": [{"model": model, **_EXAMPLES[name]}]}


def _property(field: str, found: dict[str, Any]) -> dict[str, Any]:
    if field not in NEUTRAL:
        return found
    return {"enum": [None, *NEUTRAL[field]], "description": "Not supported: other values are refused."}


def _content(name: str, media_type: str = "application/json") -> dict[str, OpenAPIMediaType]:
    reference: Any = {"$ref": _REF.format(name=name)}  # passes through Litestar as it is
    return {media_type: OpenAPIMediaType(schema=reference)}


# What each status but 200 means; a route lists those that it may answer with.
_MEANINGS = {
    400: "The request is not valid; `param` names the field.",
    401: "An API key is missing or wrong.",
    403: "The API key does not allow this.",
    404: "There is no such thing.",
    408: "The request's body did not come in time.",
    409: "The request was cancelled.",
    413: "The request's body is too large.",
    415: "The request's body is not plain JSON.",
    422: "The `Idempotency-Key` came before, with another body.",
    429: "Too much is going on, or a limit of the API key is reached. `Retry-After` tells when to try again.",
    500: "The server failed.",
    503: "The server cannot do this now.",
    504: "The request did not finish within its time limit.",
}
_CALL = (400, 401, 403, 408, 409, 413, 415, 422, 429, 500, 503, 504)
_RESULT = (400, 401, 404, 429, 500, 503)
_OBJECT = (400, 401, 404, 500, 503)


def _responses(answer: OpenAPIResponse, statuses: Sequence[int]) -> dict[str, Any]:
    errors = {str(s): OpenAPIResponse(description=_MEANINGS[s], content=_content("Error")) for s in statuses}
    return {"200": answer, **errors}


# of a whole answer
_LINKS: dict[str, Link | Reference] = {
    method: Link(
        operation_ref=f"#/paths/~1v1~1results~1{{result_id}}/{method}", parameters={"result_id": "$response.body#/id"}
    )
    for method in ("get", "delete")
}


@dataclass
class CallOperation(Operation):
    """Base of the two that take a body."""

    body: ClassVar[str]

    def __post_init__(self) -> None:
        event: Any = _EVENT
        streamed = {"text/event-stream": OpenAPIMediaType(schema=event)}  # if `stream` is true
        self.request_body = RequestBody(content=_content(self.body), required=True)
        answer = OpenAPIResponse(description="The answer.", content=_content("Answer") | streamed, links=_LINKS)
        self.responses = _responses(answer, _CALL)


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
        answer = OpenAPIResponse(description="What there is of the answer.", content=_content("Answer"))
        self.responses = _responses(answer, _RESULT)


@dataclass
class ObjectOperation(Operation):
    """GET of what needs no closer description."""

    def __post_init__(self) -> None:
        anything: Any = {"type": "object"}
        content = {"application/json": OpenAPIMediaType(schema=anything)}
        self.responses = _responses(OpenAPIResponse(description="What was asked for.", content=content), _OBJECT)


_KEY: dict[str, list[str]] = {"ApiKey": []}
_KEY_SCHEME = {"type": "http", "scheme": "bearer", "description": "`Authorization: Bearer KEY`"}


class _Renderer(JsonRenderPlugin):
    """Adds our schemas, which Litestar would replace by those that it finds in signatures, and what wants a key."""

    def __init__(self, *, model: str, needs_key: bool) -> None:
        super().__init__()
        self._schemas = _schemas(model)
        self._security = [_KEY] if needs_key else [{}, _KEY]  # a key that nobody wants is no fault

    def render(self, request: Request[Any, Any, Any], openapi_schema: dict[str, Any]) -> bytes:
        components = {"schemas": self._schemas, "securitySchemes": {"ApiKey": _KEY_SCHEME}}
        for path, operations in openapi_schema["paths"].items():
            if path.startswith("/v1/"):
                for operation in operations.values():
                    operation["security"] = self._security
        return super().render(request, openapi_schema | {"components": components})


def openapi_config(version: str, not_found: AfterRequestHookHandler, *, model: str, needs_key: bool) -> OpenAPIConfig:
    """`/schema` and `/schema/openapi.json`. `not_found` replaces Litestar's page for other paths under it."""
    return OpenAPIConfig(
        title="TeDiServe",
        version=version,
        description="OpenAI-compatible serving of diffusion language models.",
        render_plugins=[_Renderer(model=model, needs_key=needs_key)],
        openapi_router=Router(
            "/schema", route_handlers=[], include_in_schema=False, after_request=not_found, opt=PUBLIC
        ),
    )
