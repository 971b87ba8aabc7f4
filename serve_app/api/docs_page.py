"""API page at `/docs`, which lists all routes. All its files are served from this server."""

import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

DOCS_PATHS = frozenset({"/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"})
NO_SNIFFING = {"x-content-type-options": "nosniff"}
_FOLDER = Path(__file__).parent / "docs_files"
_ASSETS = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
_SWAGGER = {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:", "font-src": "data:", "media-src": "blob:"}
ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%230a5fc0'/%3E%3Cpath d='M4 6v4M8 3v10M12 5v6' stroke='%23fff' stroke-width='2'/%3E%3C/svg%3E"
)
_SETTINGS = "SwaggerUIBundle({"
# Swagger UI's player would request the URL again with a GET, so this plugin plays the response already received.
_PLAYS_THE_ANSWER = """plugins: [() => ({ wrapComponents: { responseBody: (Body, { React }) => (props) => {
  const { content, url } = props;
  const own = React.useMemo(() => content instanceof Blob ? URL.createObjectURL(content) : url, [content, url]);
  return React.createElement(Body, { ...props, url: own });
} } })],"""

_OPENS_TAGS = 'onComplete: () => %s.forEach((tag) => ui.layoutActions.show(["operations-tag", tag], true)),'


def docs_routes(title: str, *, open_tags: Sequence[str]) -> APIRouter:
    """Create the routes of `/docs` and its files. The page expands `open_tags` and collapses all other tags."""
    router = APIRouter(include_in_schema=False)

    @router.get("/docs")
    async def docs() -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url=ICON,
            swagger_ui_parameters={"validatorUrl": None, "docExpansion": "none"},  # the default validator is external
        )
        opens = _OPENS_TAGS % json.dumps(list(open_tags))
        own = f"{_SETTINGS}\n{_PLAYS_THE_ANSWER}\n{opens}"
        return html_page(bytes(page.body).decode().replace(_SETTINGS, own, 1), _SWAGGER)

    @router.get("/docs/{name}")
    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise HTTPException(404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=86400"}
        return Response(_read(f"{name}.gz"), media_type=_ASSETS[name], headers=headers)

    return router


@cache
def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def html_page(page: str, allowed: Mapping[str, str]) -> Response:
    """Return `page` with headers that allow only its own scripts and styles, and requests to this server only."""
    policy = {
        "default-src": "'none'",
        "script-src": " ".join(("'self'", *_hashes("script", page))),
        "style-src": " ".join(_hashes("style", page)),
        "connect-src": "'self'",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        **allowed,
    }
    rules = "; ".join(f"{name} {sources}" for name, sources in policy.items() if sources)
    headers = {"content-security-policy": rules, "vary": "accept", **NO_SNIFFING}
    return HTMLResponse(page, headers=headers | {"cache-control": "no-cache"})


def _hashes(tag: str, page: str) -> list[str]:
    """Return the hash of each `tag` element's content, in the syntax of Content-Security-Policy."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents]
