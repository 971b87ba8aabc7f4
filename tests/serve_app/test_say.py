import asyncio
import io
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import soundfile
from aiohttp import web

from deployments.errors import InvalidRequest
from serve_app.ports import free_port
from serve_app.say import RefusedError, Utterance, speak


def wav_of(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(24000 * seconds), np.int16), 24000, format="WAV")
    return file.getvalue()


class Server:
    """Remembers what it was asked and answers with a scripted status."""

    def __init__(self) -> None:
        self.voices: list[dict[str, str]] = [{"id": "nora"}]
        self.asked: list[dict[str, object]] = []
        self.status, self.content = 200, wav_of(0.5)
        self.url = ""

    async def list_voices(self, _: web.Request) -> web.Response:
        return web.json_response({"voices": self.voices})

    async def speech(self, request: web.Request) -> web.Response:
        self.asked.append(await request.json())
        return web.Response(status=self.status, body=self.content)


@pytest.fixture
def server() -> Iterator[Server]:
    server, loop, port = Server(), asyncio.new_event_loop(), free_port()
    application = web.Application()
    application.router.add_get("/v1/audio/voices", server.list_voices)
    application.router.add_post("/v1/audio/speech", server.speech)
    runner = web.AppRunner(application)
    loop.run_until_complete(runner.setup())
    loop.run_until_complete(web.TCPSite(runner, "127.0.0.1", port).start())
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    server.url = f"http://127.0.0.1:{port}/"
    yield server
    asyncio.run_coroutine_threadsafe(runner.cleanup(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_the_file_gets_the_audio(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "x.OGG"
    said = speak(server.url, Utterance("hi", file))
    assert file.read_bytes() == server.content
    assert f"{file} (0.5 s, " in said
    [asked] = server.asked
    assert (asked["input"], asked["response_format"], asked["voice"]) == ("hi", "opus", "nora")


def test_a_given_voice_is_asked_for(server: Server, tmp_path: Path) -> None:
    speak(server.url, Utterance("hi", tmp_path / "x.wav", voice="felix"))
    assert server.asked[0]["voice"] == "felix"


def test_a_model_without_voices_is_asked_for_none(server: Server, tmp_path: Path) -> None:
    server.voices = []
    speak(server.url, Utterance("hi", tmp_path / "x.wav"))
    assert "voice" not in server.asked[0]


def test_a_refusal_is_passed_on(server: Server, tmp_path: Path) -> None:
    server.status, server.content = 400, b'{"error": {"message": "no such voice"}}'
    with pytest.raises(RefusedError, match="HTTP 400: no such voice"):
        speak(server.url, Utterance("hi", tmp_path / "x.wav"))
    assert not (tmp_path / "x.wav").exists()


def test_an_unknown_ending_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\.wav"):
        speak("http://127.0.0.1:1", Utterance("hi", tmp_path / "x.txt"))


def test_no_server_says_how_to_start_one(tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="talkray serve"):
        speak(f"http://127.0.0.1:{free_port()}", Utterance("hi", tmp_path / "x.wav"))


def test_another_server_is_no_talkray(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match="does not answer as a Talkray server"):
        speak(f"{server.url}elsewhere", Utterance("hi", tmp_path / "x.wav"))


def test_a_file_that_cannot_be_written_is_named(server: Server, tmp_path: Path) -> None:
    with pytest.raises(RefusedError, match=r"missing/x\.wav cannot be written: No such file or directory"):
        speak(server.url, Utterance("hi", tmp_path / "missing" / "x.wav"))


def test_an_answer_that_is_no_audio_is_told(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>"
    with pytest.raises(RefusedError, match="is no wav"):
        speak(server.url, Utterance("hi", tmp_path / "x.wav"))
