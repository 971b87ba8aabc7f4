"""Serve the web page at `/`, where users can try out speech. The page does not load anything from other hosts.

The page consists of `pages/index.html` and the scripts and stylesheets in the same folder, without a build step.
"""

import gzip
import re
from functools import cache
from hashlib import sha256
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from serve_app.api.docs_page import ICON, NO_SNIFFING, html_page
from serve_app.api.speech_service import SpeechService
from serve_app.distribution import version
from serve_app.extension import Charge, Dialect, Route
from serve_app.extensions.page.cluster_status import page_of

_FOLDER = Path(__file__).parent / "pages"
_TYPES = {".js": "text/javascript; charset=utf-8", ".css": "text/css; charset=utf-8"}
_FILES = {file.name: _TYPES[file.suffix] for file in _FOLDER.iterdir() if file.suffix in _TYPES}
_CLIENTS = "clients.json"
# Origin of the chat endpoint that the user entered. The content security policy allows requests to it.
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")
_NEEDS = re.compile(r' data-needs="(\w+) (\S+)"')  # extension and path that a part of the page needs


async def show_page(service: SpeechService, request: Request, chat: str = "") -> Response:
    """Serve the page to clients that accept HTML, such as browsers and curl. Return 404 to others."""
    accept = request.headers.get("accept", "").lower() or "*/*"
    if not any(kind in accept for kind in ("text/html", "text/*", "*/*")):
        raise HTTPException(404)
    connect = f"'self' {chat}" if _ORIGIN.fullmatch(chat) else "'self'"
    allowed = {"style-src": "'self'", "img-src": "data:", "media-src": "blob:", "connect-src": connect}
    paths = {path for dialect in page_of(service).dialects for path in dialect.paths}
    packed, *_ = _packed("index.html")
    page = _NEEDS.sub(lambda need: "" if need[2] in paths else f' inert data-needs="{need[1]}"', packed.decode())
    return html_page(page.replace("$version", version()).replace("$icon", ICON), allowed)


async def list_clients(service: SpeechService) -> list[dict[str, object]]:
    """Return the lines that configure each client for this server, as printed by `talkray check-client`."""
    dialects = page_of(service).dialects
    return [{"dialect": each.name, "clients": each.sample.clients} for each in dialects if each.sample is not None]


async def show_file(service: SpeechService, request: Request, name: str) -> Response:
    """Serve a script or stylesheet of the page."""
    if name not in _FILES:
        raise HTTPException(404)
    content, packed, tag = _packed(name)
    headers = {"etag": tag, "cache-control": "no-cache", "vary": "accept-encoding", **NO_SNIFFING}
    if request.headers.get("if-none-match") == tag:
        return Response(status_code=304, headers=headers)
    if "gzip" in request.headers.get("accept-encoding", ""):
        content, headers["content-encoding"] = packed, "gzip"
    return Response(content, media_type=_FILES[name], headers=headers)


@cache
def _packed(name: str) -> tuple[bytes, bytes, str]:
    """Return a file, its gzip-compressed content, and its ETag."""
    content = (_FOLDER / name).read_bytes()
    return content, gzip.compress(content, mtime=0), f'"{sha256(content).hexdigest()[:16]}"'


DIALECT = Dialect(
    "Page",
    routes=(
        Route("GET /", show_page, charge=Charge.NOTHING),
        Route(f"GET /page/{_CLIENTS}", list_clients, charge=Charge.NOTHING),
        Route("GET /page/{name}", show_file, charge=Charge.NOTHING),
    ),
    public_paths=("/", *(f"/page/{name}" for name in (*_FILES, _CLIENTS))),
)
