import asyncio
import socket
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Self

import pytest
import uvicorn
from typer.testing import CliRunner

from deployments.errors import Overloaded, TalkrayError
from deployments.protocol import ModelInfo
from serve_app.api.application import create_api
from serve_app.cli.check_client import CheckResult
from serve_app.cli.key_file import create_key
from serve_app.cli.main import cli
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.extension import Sample
from serve_app.extensions.live.live_text import LiveTexts
from tests.loadtest.servers import QuietHandler, running
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, utterance
from tools.suites.rows import DIALECTS

SAMPLES = {dialect.name: dialect.sample for dialect in DIALECTS if dialect.sample is not None}


class Server:
    """The API on a port of its own, whatever its synthesizer does."""

    def __init__(
        self,
        script: list[Step] | Mapping[str, tuple[FakeSynthesizer, AdmissionSettings]],
        keys: Path | None = None,
        info: ModelInfo = CUSTOM_VOICE,
    ) -> None:
        """What the one synthesizer does, or several of them."""
        settings = ApiSettings(access=AccessSettings(keys_file=keys))
        several = script if isinstance(script, Mapping) else None
        self.synthesizer = FakeSynthesizer(info, script=[] if isinstance(script, Mapping) else script)
        only = {"": (self.synthesizer, settings.admission)}
        self._texts = LiveTexts()
        api = create_api(several or only, settings, opened={"live": self._texts})
        self._server = uvicorn.Server(uvicorn.Config(api, log_level="error", ws="websockets-sansio", lifespan="off"))
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))

    async def _serve(self) -> None:
        await self._server.serve([self._socket])
        await self._texts.aclose()

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._socket.close()


@pytest.fixture
def key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    file = tmp_path / "keys.json"
    monkeypatch.setenv("TALKRAY_API_KEY", create_key(file, "check"))
    return file


def test_every_dialect_is_asked_and_its_clients_are_told(key: Path) -> None:
    with Server(list(utterance()), key) as server:
        result = CliRunner().invoke(cli, ["check-client", f"{server.url}/"])
    assert result.exit_code == 0, result.output
    words = {"voice": "serena", "url": server.url, "sockets": server.url.replace("http", "ws")}
    for dialect, sample in SAMPLES.items():
        assert f"ok      {dialect}: first audio" in result.output
        assert all(line in result.output for line in sample.filled(**words).clients)
    assert "$" not in result.output


def test_what_fails_is_said(key: Path) -> None:
    with Server([Overloaded("full", 2.0)], key) as server:
        result = CliRunner().invoke(cli, ["check-client", server.url])
    assert result.exit_code == 1
    assert ["full" in line for line in result.output.splitlines() if "FAILED" in line] == [True] * len(SAMPLES)
    assert "deepgram.TTS(" not in result.output


def test_where_nothing_answers() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    result = CliRunner().invoke(cli, ["check-client", f"http://127.0.0.1:{port}"])
    assert isinstance(result.exception, TalkrayError)
    assert f"127.0.0.1:{port}" in str(result.exception)
    handler = type(
        "Handler", (QuietHandler,), {"do_GET": lambda self: self.answer(200, b"{}", content_type="application/json")}
    )
    with running(handler) as url:
        result = CliRunner().invoke(cli, ["check-client", url])
    assert f"no Talkray server responds at {url}" in str(result.exception)


def test_the_time_to_audio_is_told_in_milliseconds() -> None:
    [line] = CheckResult("Ours", Sample("/"), None, first_audio_s=0.25).lines()
    assert line == "ok      Ours: first audio after 250 ms"
