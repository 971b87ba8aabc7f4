"""A change of a public surface is noticed."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tools import contracts


def test_a_changed_surface_is_told_and_written_when_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lines() -> Iterator[str]:
        yield from ("GET /health", "GET /ready")

    monkeypatch.setattr(contracts, "SURFACES", {"http": lines})
    assert contracts.stale(tmp_path, write=False)[-2:] == ["+GET /health", "+GET /ready"]
    assert contracts.stale(tmp_path, write=True) == []
    file = tmp_path / contracts.FOLDER / "http.txt"
    file.write_text(file.read_text().replace("/health", "/healthy"))
    told = contracts.stale(tmp_path, write=False)
    assert [line for line in told if line[1:].startswith("GET")] == ["-GET /healthy", "+GET /health"]


@pytest.mark.parametrize(("surface", "line"), [
    ("http", "POST /v1/audio/speech"), ("http", "GET /metrics"), ("http", "GET /v1/audio/jobs/{job_id}"),
    ("http", "error 429 rate_limit_error rate_limit_exceeded"), ("http", "header x-seed"),
    ("sockets", "WS /v1/audio/speech/ws"), ("settings", "api.jobs.pool.num_cpus = 0.1"),
    ("command-line", "talkray loadtest run"), ("metrics", "talkray_ttfb_seconds histogram model"),
    ("extension", "RequestHooks.discard(utterance)"), ("stores", "StoredVoice.takes.text: str | None = None"),
])  # fmt: skip
def test_each_contract_has_what_users_rely_on(surface: str, line: str) -> None:
    text = (contracts.ROOT / contracts.FOLDER / f"{surface}.txt").read_text(encoding="utf-8")
    assert line in text.splitlines()
    assert " object at 0x" not in text


def test_the_page_names_every_contract() -> None:
    page = (contracts.ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"contracts/([\w-]+)\.txt", page)) == {*contracts.SURFACES}
