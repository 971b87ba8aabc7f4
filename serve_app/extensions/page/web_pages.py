"""The web page at `/`, which can speak. It loads nothing from other hosts.

It consists of `pages/index.html` and the scripts and styles next to it, served unchanged.
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
# The origin of the chat endpoint that the user entered; the page may then send requests to it.
_ORIGIN = re.compile(r"https?://[A-Za-z0-9.-]+(:[0-9]{1,5})?")


async def show_page(service: SpeechService, request: Request, chat: str = "") -> Response:
    """For clients that take HTML, as browsers and curl do; others get a 404."""
    accept = request.headers.get("accept", "").lower() or "*/*"
    if not any(kind in accept for kind in ("text/html", "text/*", "*/*")):
        raise HTTPException(404)
    connect = f"'self' {chat}" if _ORIGIN.fullmatch(chat) else "'self'"
    allowed = {"style-src": "'self'", "img-src": "data:", "media-src": "blob:", "connect-src": connect}
    page, *_ = _packed("index.html")
    return html_page(page.decode().replace("$version", version()).replace("$icon", ICON), allowed)


async def list_clients(service: SpeechService) -> list[dict[str, object]]:
    """How each client is pointed to this server, as `talkray check-client` prints it."""
    clients = page_of(service).clients
    return [{"dialect": dialect, "clients": lines} for dialect, lines in clients.items()]


async def show_file(service: SpeechService, request: Request, name: str) -> Response:
    """A script or a style of the page."""
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
    """The file, its compressed form, and its ETag."""
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
