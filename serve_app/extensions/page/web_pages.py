"""Pages for browsers: one that speaks, and the documentation. Neither loads anything from elsewhere.

The page is `pages/index.html` and the scripts and styles beside it, which are served as they are.
"""

import gzip
import json
import re
from base64 import b64encode
from collections.abc import Mapping, Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path

from fastapi import APIRouter, Request, Response
from fastapi.openapi.docs import get_swagger_ui_html
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse

from serve_app.distribution import version

Clients = Mapping[str, Sequence[str]]  # by dialect: how each of its clients is configured

_FOLDER = Path(__file__).parent / "pages"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_FILES = {file.name: _TYPES[file.suffix] for file in _FOLDER.iterdir() if file.suffix in _TYPES}
_CLIENTS = "clients.json"
_DOCS = {"/docs", "/docs/swagger-ui-bundle.js", "/docs/swagger-ui.css", "/openapi.json"}
PATHS = frozenset({"/", *_DOCS, *(f"/page/{name}" for name in (*_FILES, _CLIENTS))})

# The origin of the chat endpoint that the browser's user has named, which the page may then ask.
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_ASSETS = {"swagger-ui-bundle.js": "text/javascript; charset=utf-8", "swagger-ui.css": "text/css; charset=utf-8"}
_SWAGGER = {"style-src": "'self' 'unsafe-inline'", "img-src": "'self' data:", "font-src": "data:", "media-src": "blob:"}
_NO_SNIFFING = {"x-content-type-options": "nosniff"}
_ICON = (
    "data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 16 16'%3E%3Crect width='16' height='16' "
    "rx='4' fill='%230a5fc0'/%3E%3Cpath d='M4 6v4M8 3v10M12 5v6' stroke='%23fff' stroke-width='2'/%3E%3C/svg%3E"
)
_SETTINGS = "SwaggerUIBundle({"
# Its own player would ask for the address once more, with a GET; the answer is there already.
_PLAYS_THE_ANSWER = """plugins: [() => ({ wrapComponents: { responseBody: (Body, { React }) => (props) => {
  const { content, url } = props;
  const own = React.useMemo(() => content instanceof Blob ? URL.createObjectURL(content) : url, [content, url]);
  return React.createElement(Body, { ...props, url: own });
} } })],"""

_OPENS_TAGS = 'onComplete: () => %s.forEach((tag) => ui.layoutActions.show(["operations-tag", tag], true)),'


def page_routes(title: str, clients: Clients | None, *, open_tags: Sequence[str] = ()) -> APIRouter:
    """`GET /` for browsers and what it loads, `/docs` and its files. Without `clients` there is no page. `/docs` shows
    the routes of `open_tags`, and only the names of other tags.
    """
    router = APIRouter(include_in_schema=False)
    if clients is not None:
        _add_page(router, clients)

    @router.get("/docs")
    async def docs() -> Response:
        page = get_swagger_ui_html(
            openapi_url="openapi.json",
            title=title,
            swagger_js_url="docs/swagger-ui-bundle.js",
            swagger_css_url="docs/swagger-ui.css",
            swagger_favicon_url=_ICON,
            swagger_ui_parameters={"validatorUrl": None, "docExpansion": "none"},  # the default validator is elsewhere
        )
        opens = _OPENS_TAGS % json.dumps(list(open_tags))
        own = f"{_SETTINGS}\n{_PLAYS_THE_ANSWER}\n{opens}"
        return _page(bytes(page.body).decode().replace(_SETTINGS, own, 1), _SWAGGER)

    @router.get("/docs/{name}")
    async def asset(name: str) -> Response:
        if name not in _ASSETS:
            raise HTTPException(404)
        headers = {"content-encoding": "gzip", "cache-control": "max-age=86400"}
        return Response(_read(f"{name}.gz"), media_type=_ASSETS[name], headers=headers)

    return router


def _add_page(router: APIRouter, clients: Clients) -> None:
    @router.get("/")
    async def page(request: Request, chat: str = "") -> Response:
        """For clients that take HTML, as browsers and curl do; others get a 404."""
        accept = request.headers.get("accept", "").lower() or "*/*"
        if not any(kind in accept for kind in ("text/html", "text/*", "*/*")):
            raise HTTPException(404)
        connect = f"'self' {chat}" if _ORIGIN.fullmatch(chat) else "'self'"
        allowed = {"style-src": "'self'", "img-src": "data:", "media-src": "blob:", "connect-src": connect}
        return _page(_read("index.html").decode().replace("$version", version()).replace("$icon", _ICON), allowed)

    @router.get(f"/page/{_CLIENTS}")
    async def known_clients() -> list[dict[str, object]]:
        """How each client is pointed to this server, as `talkray check-client` prints it."""
        return [{"dialect": dialect, "clients": lines} for dialect, lines in clients.items()]

    @router.get("/page/{name}")
    async def part(name: str, request: Request) -> Response:
        if name not in _FILES:
            raise HTTPException(404)
        content, packed, tag = _packed(name)
        headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding", **_NO_SNIFFING}
        if request.headers.get("if-none-match") == tag:
            return Response(status_code=304, headers=headers)
        if "gzip" in request.headers.get("accept-encoding", ""):
            content, headers["content-encoding"] = packed, "gzip"
        return Response(content, media_type=_FILES[name], headers=headers)


@cache
def _packed(name: str) -> tuple[bytes, bytes, str]:
    """The file, the same compressed, and its tag."""
    content = _read(name)
    return content, gzip.compress(content, mtime=0), f'"{sha256(content).hexdigest()[:16]}"'


@cache
def _read(name: str) -> bytes:
    return (_FOLDER / name).read_bytes()


def _page(page: str, allowed: Mapping[str, str]) -> Response:
    """`page` with headers by which only its own scripts and styles run, and only this server is asked."""
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
    headers = {"content-security-policy": rules, "vary": "accept", **_NO_SNIFFING}
    return HTMLResponse(page, headers=headers | {"cache-control": "no-cache"})


def _hashes(tag: str, page: str) -> list[str]:
    """Hashes of the contents of each such element, as the policy wants them."""
    contents = re.findall(rf"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
    return [f"'sha256-{b64encode(sha256(content.encode()).digest()).decode()}'" for content in contents]
