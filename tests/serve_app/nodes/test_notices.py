"""Notices of clouds become drains: against a metadata server on loopback."""

import json
from collections.abc import Iterator
from contextlib import nullcontext
from http.client import BadStatusLine
from pathlib import Path
from subprocess import CalledProcessError
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from serve_app import app
from serve_app.nodes import notices
from serve_app.nodes.notices import Aws, Gcp, MetadataUnreachable, NotDrained, Notice, cloud, raylet_options
from tests.clock import Clock
from tests.serve_app.nodes.metadata import ACTION, MAINTENANCE, PREEMPTED, REBALANCE, Metadata, interruption, serving


@pytest.fixture
def metadata() -> Iterator[Metadata]:
    with serving() as server:
        yield server


def aws(metadata: Metadata) -> Aws:
    made = cloud("aws", {"AWS_EC2_METADATA_SERVICE_ENDPOINT": f"http://{metadata.host}/"})
    assert isinstance(made, Aws)
    return made


def gcp(metadata: Metadata) -> Gcp:
    made = cloud("gcp", {"GCE_METADATA_HOST": metadata.host})
    assert isinstance(made, Gcp)
    return made


def test_nothing_is_announced(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    amazon, clock, tokens = aws(metadata), Clock(), list[int]()
    monkeypatch.setattr(notices, "time", SimpleNamespace(monotonic=clock))
    for clock.now_s in (0.0, 0.4 * notices._TOKEN_S, 0.6 * notices._TOKEN_S):
        assert (amazon.notice(), gcp(metadata).notice()) == (None, None)
        tokens.append(metadata.tokens)
    assert tokens == [1, 1, 2]  # renewed before its end
    metadata.tokens += 1  # and is ended by the server
    with pytest.raises(MetadataUnreachable, match="401"):
        amazon.notice()


RECOMMENDED = json.dumps({"noticeTime": "2026-11-22T05:00:00Z"})


def test_an_interruption_says_when_and_a_recommendation_leaves_time(metadata: Metadata) -> None:
    metadata.answers |= {ACTION: interruption(120), REBALANCE: RECOMMENDED}
    notice = aws(metadata).notice()
    assert notice is not None
    assert 110 < notice.left_s <= 121
    assert "terminate" in notice.reason
    metadata.answers[ACTION] = interruption(-30)
    assert (late := aws(metadata).notice()) is not None
    assert late.left_s == 0
    del metadata.answers[ACTION]
    recommended = aws(metadata).notice()
    assert recommended is not None
    assert recommended.left_s == 600


@pytest.mark.parametrize(
    ("answers", "left_s"),
    [
        ({PREEMPTED: "TRUE\n"}, 30),
        ({MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}, 3600),
        ({MAINTENANCE: "MIGRATE_ON_HOST_MAINTENANCE"}, None),  # goes on elsewhere as it is
    ],
)
def test_google_says_what_happens(metadata: Metadata, answers: dict[str, str], left_s: float | None) -> None:
    metadata.answers |= answers
    notice = gcp(metadata).notice()
    assert (notice.left_s if notice else None) == left_s


def test_no_metadata_is_no_notice(metadata: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    unreachable = Aws("http://127.0.0.1:1")
    with pytest.raises(MetadataUnreachable, match=r"127\.0\.0\.1:1/latest/api/token"):
        unreachable.notice()
    monkeypatch.setattr(notices, "open_direct", Mock(side_effect=BadStatusLine("nonsense")))
    with pytest.raises(MetadataUnreachable, match="nonsense"):
        unreachable.notice()


@pytest.mark.parametrize(("arguments", "watched"), [
    (["aws"], Aws), (["gcp"], Gcp), (["AWS"], None), (["azure"], None), ([], None),
])  # fmt: skip
def test_other_clouds_are_refused(arguments: list[str], watched: type | None, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[type] = []
    monkeypatch.setattr("sys.argv", ["notices", *arguments])
    monkeypatch.setattr(notices, "watch", lambda metadata, drain: seen.append(type(metadata)))
    with nullcontext() if watched else pytest.raises(SystemExit, match="2"):
        notices.main()
    assert seen == ([watched] if watched else [])


def test_replicas_stop_before_the_end() -> None:
    """Serve stops them `graceful_shutdown_timeout_s` before the deadline that it is told."""
    assert notices._SHUTDOWN_S == app._DRAIN_S
    notice = Notice("spot instance", 120.0)
    assert 0 < 120.0 - (notice.deadline_s - app._DRAIN_S) < 60


def test_the_raylet_names_node_and_control_store(tmp_path: Path) -> None:
    for number, words in {
        "1": ["bash"],
        "20": ["/ray/core/src/ray/raylet/raylet", "--node_id=ab12", "--x", "--gcs-address=10.0.0.2:6379", ""],
    }.items():
        (tmp_path / number).mkdir()
        (tmp_path / number / "cmdline").write_bytes("\0".join(words).encode())
    assert raylet_options(tmp_path) == {"node_id": "ab12", "gcs-address": "10.0.0.2:6379"}


def test_without_a_raylet_it_says_where_to_run(tmp_path: Path) -> None:
    (tmp_path / "1/cmdline").mkdir(parents=True)  # a process that cannot be read any more
    (tmp_path / "2").mkdir()
    (tmp_path / "2/cmdline").write_bytes(b"/opt/raylet/python\0--node_id=cd34\0")
    with pytest.raises(NotDrained, match="next to `ray start`"):
        raylet_options(tmp_path)


def test_ray_is_told_which_node_ends_when_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    orders, failure = list[list[str]](), CalledProcessError(1, "ray", stderr="no such node")
    told = {"gcs-address": "10.0.0.2:6379", "node_id": "ab12"}
    monkeypatch.setattr(notices, "raylet_options", lambda _: told)
    monkeypatch.setattr(notices.subprocess, "run", lambda order, **_: orders.append(order))
    notices.drain_node(Notice("spot instance", 120.0))
    assert dict(zip(orders[0][4::2], orders[0][5::2], strict=True)) == {
        "--address": "10.0.0.2:6379", "--node-id": "ab12", "--reason": "DRAIN_NODE_REASON_PREEMPTION",
        "--reason-message": "spot instance", "--deadline-remaining-seconds": "225",
    }  # fmt: skip
    monkeypatch.setattr(notices.subprocess, "run", Mock(side_effect=failure))
    with pytest.raises(NotDrained, match="no such node"):
        notices.drain_node(Notice("spot instance", 120.0))
