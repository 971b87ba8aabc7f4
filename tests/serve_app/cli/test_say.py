import io
import json
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import numpy as np
import pytest
import soundfile
from typer.testing import CliRunner

from deployments.errors import InvalidRequest
from serve_app.cli import say
from serve_app.cli.main import cli
from serve_app.cli.ray_settings import free_port
from serve_app.cli.say import RefusedError, SayRequest, announced, find_server, play_speech, show_text, write_speech
from tests.loadtest.servers import QuietHandler, running


def wav_of(seconds: float) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(round(24000 * seconds), np.int16), 24000, format="WAV")
    return file.getvalue()


class Server:
    """Remembers what it was asked and answers with a scripted status."""

    def __init__(self) -> None:
        self.voices: list[dict[str, str]] = [{"id": "nora"}, {"id": "felix"}]
        self.asked: list[dict[str, object]] = []
        self.status, self.content = 200, wav_of(0.5)
        self.headers: dict[str, str] = {}
        self.url = ""


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()

    class Handler(QuietHandler, BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content, is_here = json.dumps({"voices": server.voices}), self.path == "/v1/audio/voices"
            self.answer(200 if is_here else 404, content.encode(), content_type="application/json")

        def do_POST(self) -> None:
            server.asked.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            is_here = self.path in ("/v1/audio/speech", "/v1/audio/text")
            self.answer(server.status if is_here else 404, server.content, **server.headers)

    with running(Handler) as url:
        server.url = f"{url}/"
        yield server


def test_the_file_gets_the_audio(server: Server, tmp_path: Path) -> None:
    file = tmp_path / "x.OGG"
    said = write_speech(server.url, SayRequest("hi"), file)
    assert file.read_bytes() == server.content
    assert said.startswith(f"wrote {file} (0.5 s, ")
    [asked] = server.asked
    assert (asked["input"], asked["response_format"], asked["voice"]) == ("hi", "opus", "nora")


def test_a_given_voice_is_asked_for_and_none_of_a_model_without_voices(server: Server, tmp_path: Path) -> None:
    write_speech(server.url, SayRequest("hi", voice="felix"), tmp_path / "x.wav")
    assert server.asked[0]["voice"] == "felix"
    server.voices = []
    assert write_speech(server.url, SayRequest("hi"), tmp_path / "x.wav").startswith("replaced")
    assert "voice" not in server.asked[1]


@pytest.mark.parametrize("status", [400, 404, 503])
def test_a_refusal_is_passed_on(server: Server, tmp_path: Path, status: int) -> None:
    server.status, server.content = status, b'{"error": {"message": "no such voice"}}'
    for ask in (partial(write_speech, file=tmp_path / "x.wav"), show_text):
        with pytest.raises(RefusedError, match=f"HTTP {status}: no such voice"):
            ask(server.url, SayRequest("hi", voice="felix", instructions="slowly"))
    assert server.asked[-1] == {"input": "hi", "voice": "felix", "instructions": "slowly"}
    server.content = b"[1]"
    with pytest.raises(RefusedError, match=rf"HTTP {status}\.$"):
        show_text(server.url, SayRequest("hi"))
    assert not (tmp_path / "x.wav").exists()


def test_an_unknown_ending_names_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match=r"\.wav"):
        write_speech("http://127.0.0.1:1", SayRequest("hi"), tmp_path / "x.txt")


def test_no_server_says_how_to_start_one(tmp_path: Path) -> None:
    for ask in (partial(write_speech, file=tmp_path / "x.wav"), show_text):
        with pytest.raises(RefusedError, match="talkray serve"):
            ask(f"http://127.0.0.1:{free_port()}", SayRequest("hi"))


def test_what_is_spoken_of_a_text_is_shown(server: Server) -> None:
    parts = {"left_out": [{"what": "emoji", "count": 2}], "changed": [{"written": "3", "spoken": "three"}]}
    segments = [{"text": "A.", "pause_s": 0}, {"text": "B.", "pause_s": 1.5, "style": "calm"}]
    server.headers = {"content_type": "application/json"}
    server.content = json.dumps({"sent": "s", "spoken": "t", **parts, "segments": segments}).encode()
    assert show_text(server.url, SayRequest("hi")).splitlines()[2:] == [
        *("left out: emoji (2)", "changed:  '3' as 'three'", "segments: 2", "  A."),
        "  1.5 s of silence, then: B. (style: calm)",
    ]


@pytest.mark.parametrize(
    ("path", "file", "content", "said"),
    [
        ("elsewhere", "x.wav", b"", "does not respond like a Talkray server"),
        ("", "missing/x.wav", wav_of(0.5), r"missing/x\.wav cannot be written: No such file or directory"),
        ("", "x.wav", b"<html>", "is not wav"),
    ],
)
def test_failures_are_told(server: Server, tmp_path: Path, path: str, file: str, content: bytes, said: str) -> None:
    server.content = content
    with pytest.raises(RefusedError, match=said):
        write_speech(f"{server.url}{path}", SayRequest("hi"), tmp_path / file)


def test_how_to_say_it_is_passed_on_and_what_the_server_ignored_is_told(server: Server, tmp_path: Path) -> None:
    server.headers = {"x-ignored": "instructions (not by this model)"}
    said = write_speech(server.url, SayRequest("hi", speed=1.5, instructions="slowly"), tmp_path / "x.wav")
    assert (server.asked[0]["speed"], server.asked[0]["instructions"]) == (1.5, "slowly")
    assert said.endswith("; the server ignored instructions (not by this model)")


@pytest.fixture
def only_player(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The path of a program that is the only one, to be written by the test."""
    monkeypatch.setenv("PATH", f"{tmp_path}/programs")
    (tmp_path / "programs").mkdir()
    return tmp_path / "programs" / "mpv"


def write_program(file: Path, code: str) -> None:
    file.write_text(f"#!{sys.executable}\n{code}", encoding="utf-8")
    file.chmod(0o755)


def test_a_player_gets_a_stream(server: Server, only_player: Path, tmp_path: Path) -> None:
    heard = tmp_path / "heard.wav"
    write_program(only_player, f"import sys; open({str(heard)!r}, 'wb').write(sys.stdin.buffer.read())")
    assert play_speech(server.url, SayRequest("hi")) == "played with mpv"
    assert heard.read_bytes() == server.content
    assert (server.asked[0]["response_format"], server.asked[0]["stream"]) == ("wav", True)


READ = "import os, sys; sys.stdin.buffer.read(); "


@pytest.mark.parametrize("player", ["aplay", "ffplay", "mpv", "play"])
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("raise SystemExit(3)", "failed with status 3"),
        (f"{READ} sys.exit('main:830: audio open error: No such file')", "failed with status 1: main:830: audio open"),
        (f"{READ} os.kill(os.getpid(), 9)", "was killed by SIGKILL"),
        (
            f"{READ} sys.stderr.write('No more combinations to try, audio open failed\\n')",
            "did not play all .*open failed",
        ),
        (f"{READ} sys.stderr.write('Could not open/initialize audio device -> no sound.\\n')", "did not play all"),
        ("pass", "did not play all of the audio"),
    ],
)
def test_a_player_that_fails_is_told(server: Server, only_player: Path, player: str, code: str, said: str) -> None:
    server.content = wav_of(10)  # more than a pipe holds
    write_program(only_player.with_name(player), code)
    with pytest.raises(RefusedError, match=f"^{player} {said}.*Write a file with -o"):
        play_speech(server.url, SayRequest("hi"))


@pytest.mark.parametrize(
    "said", ["play WARN alsa: can't encode 0-bit", "ALSA lib pcm.c: cannot find card '0'", "underrun!!!"]
)
def test_a_complaint_is_fine(server: Server, only_player: Path, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    write_program(only_player, f"{READ} sys.stderr.write({said!r})")
    assert play_speech(server.url, SayRequest("hi")) == "played with mpv"
    assert said in capsys.readouterr().err


def test_unnamed_speech_overwrites_nothing(server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("speech.wav", "speech-2.wav", "speech-3.wav"):
        assert f"wrote {name} " in CliRunner().invoke(cli, ["say", "hi", "--url", server.url]).output
    assert len([*tmp_path.iterdir()]) == 3


def test_of_a_refusal_no_player_hears(server: Server, only_player: Path) -> None:
    server.status, server.content = 401, b'{"error": {"message": "An API key is required."}}'
    write_program(only_player, "raise SystemExit(3)")
    remedy = "Set TALKRAY_API_KEY to an API key, or select another server with --url."
    said = f"{server.url.rstrip('/')}: HTTP 401: An API key is required. {remedy}"
    with pytest.raises(RefusedError, match=f"^{re.escape(said)}$"):
        play_speech(server.url, SayRequest("hi"))


def test_without_a_player_nobody_is_asked(server: Server, only_player: Path) -> None:
    with pytest.raises(RefusedError, match="Install one of aplay, ffplay, mpv, play"):
        play_speech(server.url, SayRequest("hi"))
    assert server.asked == []


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path))
    return tmp_path


def test_a_server_is_found_while_it_runs(cache: Path) -> None:
    assert find_server() is None
    with announced("http://127.0.0.1:8001"):
        assert find_server() == "http://127.0.0.1:8001"
        assert stat.S_IMODE((cache / "servers").stat().st_mode) == 0o700
    assert find_server() is None


def test_a_server_that_was_killed_is_not_found_and_cleared(cache: Path) -> None:
    code = "from serve_app.cli.say import announced\nwith announced('http://x'): print('up', flush=True); input()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"up\n"
        assert find_server() == "http://x"
        process.kill()
        process.wait()
        assert find_server() is None
        assert [*(cache / "servers").iterdir()] != []
    with announced("http://y"):
        assert find_server() == "http://y"
        assert len([*(cache / "servers").iterdir()]) == 1


def test_without_a_key_a_server_that_asks_for_none_is_found_first(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TALKRAY_API_KEY", raising=False)
    with announced("http://alone", keyed=True):
        assert find_server() == "http://alone"
    with announced("http://open"):
        os.utime(cache / "servers" / str(os.getpid()), (1, 1))
        monkeypatch.setattr(say.os, "getpid", lambda: 4_000_000)
        with announced("http://keyed", keyed=True):
            assert find_server() == "http://open"
            monkeypatch.setenv("TALKRAY_API_KEY", "mine")
            assert find_server() == "http://keyed"


def test_git_ignores_what_it_writes(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parents[3] / ".gitignore", tmp_path)
    subprocess.run(["git", "init", "--quiet", tmp_path], check=True)
    names = ["speech.wav", *(f"hello{ending}" for ending in say.FORMATS)]
    ignored = subprocess.check_output(["git", "check-ignore", *names], cwd=tmp_path, text=True).splitlines()
    assert ignored == names
    assert subprocess.run(["git", "check-ignore", "docs/demo-voice.mp3"], cwd=tmp_path, check=False).returncode == 1
