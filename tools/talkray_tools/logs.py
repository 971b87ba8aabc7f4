"""`talkray logs`: print a request's outcome from the ingress replicas' log files."""

import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Annotated

import typer

from deployments.errors import TalkrayError
from serve_app.api.request_record import LINES, Entry
from serve_app.cli.serve.request_log import line
from serve_app.cli.serve.run_folder import log_folders
from talkray_tools.arguments import run_program

_MOST_NODES = 10_000  # the limit of Ray's dashboard


def logs(
    request_id: Annotated[str, typer.Argument(help="The `x-request-id` of a response.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print the lines of the log files unchanged.")] = False,
    here: Annotated[bool, typer.Option("--here", help="Search this node only.")] = False,
) -> None:
    """Print the log line, stages and replicas of a request.

    The command searches the logs of this node, then those of other nodes through Ray's dashboard.
    """
    found = list(matching(request_id, lines_here())) or ([] if here else list(matching(request_id, _lines_there())))
    if not found:
        raise TalkrayError(
            f"request {request_id} is not in the logs of Ray Serve. Each ingress replica keeps its last "
            "300,000 requests until its node stops, or until `talkray serve` stops"
        )
    for entry in found:
        print(json.dumps(entry) if as_json else "\n  ".join(_story(entry)))


def matching(request_id: str, lines: Iterable[str]) -> Iterator[Entry]:
    """Yield the entries for a request, a socket's turns (ID-2), and a batch's parts (ID.2)."""
    wanted, own_id = re.compile(rf"{re.escape(request_id)}([-.]\d+)*"), f'"{request_id}'
    for each in lines:
        if own_id in each and wanted.fullmatch((entry := json.loads(each))["id"]):
            yield entry


def lines_here() -> Iterator[str]:
    for folder in log_folders():
        for file in sorted(folder.glob(f"{LINES}*")):
            with file.open(encoding="utf-8") as lines:
                yield from lines


def _lines_there() -> Iterator[str]:
    """Yield log lines from all nodes of this node's cluster. Raises `TalkrayError`."""
    from ray._private.authentication.authentication_token_setup import ensure_token_if_auth_enabled
    from ray.exceptions import AuthenticationError, RayError
    from ray.util.state import get_log, list_logs, list_nodes
    from ray.util.state.exception import RayStateApiException

    try:
        ensure_token_if_auth_enabled(create_token_if_missing=False)  # Ray would abort this process
        for node in list_nodes(filters=[("state", "=", "ALIVE")], limit=_MOST_NODES):
            names = chain.from_iterable(list_logs(node_id=node.node_id, glob_filter=f"serve/{LINES}*").values())
            for name in names:
                yield from "".join(get_log(node_id=node.node_id, filename=name)).splitlines()
    except AuthenticationError as error:
        raise TalkrayError(
            "the request is not in the logs of this node, and Ray does not accept this command's token. Set "
            "RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH as on the cluster's nodes"
        ) from error
    except (OSError, ValueError, RayError, RayStateApiException) as error:
        reason = str(error).rstrip(".")
        raise TalkrayError(
            f"the request is not in the logs of this node, and Ray's dashboard is unavailable: {reason}. "
            "Run the command on a node of a cluster whose head runs the dashboard"
        ) from error


def _story(entry: Entry) -> Iterator[str]:
    yield line(entry)
    if entry["model"] is None:
        return
    asked = f"{entry['model']}, seed {entry['seed']}, {entry['dialect']}: {entry['characters']} characters"
    yield f"{asked}, {entry['codes']} codes, {entry['took_ms']} ms in total"
    if entry["stages_ms"]:
        yield "ms to first audio: " + ", ".join(f"{name} {spent}" for name, spent in entry["stages_ms"].items())
    yield "made by " + " > ".join([entry["ingress"], *entry["replicas"]])
    if entry["trace_id"]:
        yield f"trace {entry['trace_id']}"


if __name__ == "__main__":
    run_program(logs, "talkray logs")
