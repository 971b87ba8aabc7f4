"""Pages for browsers: one that speaks, and the documentation. Neither loads anything from elsewhere."""

import re
from base64 import b64encode
from collections.abc import Mapping
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

PATHS = frozenset({"/", "/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"})

_FOLDER = Path(__file__).parent / "pages"
_ASSETS = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
_SWAGGER = {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:", "font-src": "data:", "media-src": "blob:"}
_NO_ICON = "data:,"
_SETTINGS = "SwaggerUIBundle({"
# Its own player would ask for the address once more, with a GET; the answer is there already.
_PLAYS_THE_ANSWER = """plugins: [() => ({ wrapComponents: { responseBody: (Body, { React }) => (props) => {
  const { content, url } = props;
  const own = React.useMemo(() => content instanceof Blob ? URL.createObjectURL(content) : url, [content, url]);
  return React.createElement(Body, { ...props, url: own });
} } })],"""


def page_routes(title: str) -> APIRouter:
    """`GET /` for browsers, `/docs` and its files."""
    router = APIRouter(include_in_schema=False)

    @router.get("/")
    async def playground(request: Request) -> Response:
        """For clients that ask for HTML, as browsers do; others get a 404."""
        if "text/html" not in request.headers.get("accept", ""):
            raise HTTPException(404)
        return _page(_read("playground.html").decode(), {"img-src": "data:"})

    @router.get("/docs")
    async def docs() -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url=_NO_ICON,
            swagger_ui_parameters={"validatorUrl": None},  # the default one is elsewhere
        )
        return _page(bytes(page.body).decode().replace(_SETTINGS, f"{_SETTINGS}\n{_PLAYS_THE_ANSWER}", 1), _SWAGGER)

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


def _page(page: str, allowed: Mapping[str, str]) -> Response:
    """`page`, whose own scripts and styles alone may run, and which talks to this server only."""
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
    headers = {"content-security-policy": rules, "x-content-type-options": "nosniff", "vary": "accept"}
    return HTMLResponse(page, headers=headers | {"cache-control": "no-cache"})


def _hashes(tag: str, page: str) -> list[str]:
    """Of the contents of each such element, as the policy wants them."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents]
