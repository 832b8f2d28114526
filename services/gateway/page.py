"""The page at `/`: three files beside this one, read once, sent with headers that let them load nothing else."""

from pathlib import Path
from typing import Any

from litestar import Response, get
from litestar.handlers import HTTPRouteHandler

_FOLDER = Path(__file__).parent / "page"
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript"}
PUBLIC = {"public": True}  # marks a route that wants no API key
_HEADERS = {
    "cache-control": "no-cache",
    "content-security-policy": "default-src 'self'; img-src data:; base-uri 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}


def page_routes() -> list[HTTPRouteHandler]:
    """A route for each file of the page; `index.html` is at `/`."""
    return [_route(path) for path in sorted(_FOLDER.iterdir()) if path.suffix in _TYPES]


def _route(path: Path) -> HTTPRouteHandler:
    content = path.read_bytes()
    media_type = f"{_TYPES[path.suffix]}; charset=utf-8"

    @get("/" if path.name == "index.html" else f"/{path.name}", include_in_schema=False, name=path.name, opt=PUBLIC)
    async def send() -> Response[Any]:
        return Response(content, headers=_HEADERS, media_type=media_type)

    return send
