"""Sample requests and documented fields of each dialect, used by the contract suite and the fuzzers.

Each extension has a file of the same name here, with `ROWS`. A new path needs a row. Files of extensions outside
BUILT_IN are not read.
"""

from importlib import import_module
from pathlib import Path

from starlette.routing import compile_path

from serve_app.api.routing import dialects_of
from serve_app.extensions import BUILT_IN, load_extensions
from tools.suites.documented import Documented
from tools.suites.row import Issuing, Owned, PostRow, Rows, SocketRow

DIALECTS = dialects_of(load_extensions())
_FILES = {file.stem for file in Path(__file__).parent.glob("*.py")}
_ROWS: list[Rows] = [import_module(f"{__name__}.{name}").ROWS for name in ("core", *BUILT_IN) if name in _FILES]
SOCKETS: dict[str, SocketRow] = {name: row for rows in _ROWS for name, row in rows.sockets.items()}
POSTS: dict[str, PostRow] = {name: row for rows in _ROWS for name, row in rows.posts.items()}
DOCUMENTED: dict[str, Documented] = {name: row for rows in _ROWS for name, row in rows.documented.items()}
OWNED: dict[str, Owned] = {name: row for rows in _ROWS for name, row in rows.owned.items()}
STORING: list[str] = [path for rows in _ROWS for path in rows.storing]
ISSUING: dict[str, Issuing] = {path: row for rows in _ROWS for path, row in rows.issuing.items()}
_HERE = [compile_path(path)[0] for dialect in DIALECTS for path in dialect.paths]


def is_here(path: str) -> bool:
    """Return whether a dialect serves the path. Tests skip the rows of removed extensions."""
    return any(here.match(path.partition("?")[0]) for here in _HERE)


def here(*sockets: str) -> list[str]:
    """Return the sockets that are served."""
    return [name for name in sockets if name in SOCKETS]
