"""The page in Chromium and in Firefox, against a real server with the embedded voice: `make page`."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch

from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.e2e.black_box import serving
from tests.serve_app.extensions.page.browsers import FIREFOX, IS_READY, ROOT, seen_in

pytestmark = [pytest.mark.page, pytest.mark.usefixtures("loudspeaker")]

both = pytest.mark.parametrize("browser", ["chromium", "firefox"])
HEADER_BYTES, SAMPLE_BYTES, RATE = 44, 2, 24_000
SILENT_WITHIN_MS = 150


@pytest.fixture(autouse=True, scope="module")
def _browsers() -> None:
    assert IS_READY, "puppeteer-core or Chromium is missing: make page installs them"
    assert FIREFOX is not None, "Firefox is missing: make page installs it"


@both
def test_speech_is_heard_seen_saved_and_heard_again(server: str, browser: str) -> None:
    seen = seen_in(browser, "speak", f"{server}/")
    first, again = seen["soundMs"]
    sys.stdout.write(f"{browser}: key press to sound {first:.0f} ms, of a player that is awake {again:.0f} ms\n")
    assert seen["loudest"] > 0.05
    sound, of_server, network, playback, length_s, underruns = seen["figures"]
    assert sound == pytest.approx(of_server + network + playback, abs=3)
    assert of_server > 0
    assert (seen["lit"] > 0, underruns >= 0) == (True, True)
    (wav_bytes, wav), (mp3_bytes, mp3) = (file for file in seen["files"] if file[1] != "")
    assert (wav, mp3) == ("audio/wav", "audio/mpeg")
    assert wav_bytes == pytest.approx(HEADER_BYTES + length_s * RATE * SAMPLE_BYTES, rel=0.02)
    assert mp3_bytes > 1000
    assert seen["history"] == 2


@both
def test_stop_is_silent_at_once_and_keeps_what_has_come(server: str, browser: str) -> None:
    seen = seen_in(browser, "stop", f"{server}/")
    assert seen["silentAfterMs"] < SILENT_WITHIN_MS
    assert re.fullmatch(r"Stopped\. \d+\.\d s can be saved\.", seen["state"])
    assert seen["files"][0][0] > HEADER_BYTES
    assert not seen["disabled"]


@both
def test_text_is_spoken_while_it_is_written_until_it_is_interrupted(server: str, browser: str) -> None:
    seen = seen_in(browser, "converse", f"{server}/")
    heard, not_heard = re.findall("“(.*?)”", seen["heard"])
    assert heard.startswith("This text")
    assert not_heard
    assert len(set(seen["colors"])) == 2
    assert seen["silentAfterMs"] < SILENT_WITHIN_MS
    assert all(figure > 0 for figure in seen["figures"])


def test_a_chat_of_the_users_own_is_spoken_and_knows_what_was_heard(server: str) -> None:
    seen = seen_in("chromium", "chat", f"{server}/")
    (asked,) = seen["asked"]
    assert (asked["key"], asked["model"], asked["stream"]) == ("Bearer of-the-chat", "any", True)
    assert seen["log"][0] == "How are you?"
    assert seen["log"][1].endswith(seen["cut"])
    assert len(set(seen["colors"])) == 2


@both
def test_the_clusters_status_and_a_load_of_its_own(server: str, browser: str) -> None:
    seen = seen_in(browser, "status", f"{server}/")
    assert set(seen["pools"][1:]) == {"Pool: talker", "Pool: codec", "Pool: jobs", "Pool: ingress"}
    assert re.search(r"in parallel without a gap|a single stream had a gap of \d+ ms", seen["state"])
    assert 1 <= seen["rows"] <= 2


@pytest.fixture(scope="module")
def several(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of tiny checkpoints that clone and design."""
    folder = tmp_path_factory.mktemp("several")
    for kind in ("Base", "VoiceDesign"):
        write_checkpoint(folder / kind, SHAPES[f"tiny-{kind}"], Options(dtype=torch.float32))
    models = [argument for kind in ("Base", "VoiceDesign") for argument in ("--model", str(folder / kind))]
    own = {"TALKRAY_VOICES": str(folder / "voices"), "TALKRAY_DATA": str(folder / "data")}
    with serving(folder, *models, environment=own) as server:
        yield server.url


@both
def test_a_voice_is_cloned_from_the_microphone(several: str, browser: str, tmp_path: Path) -> None:
    recording = tmp_path / "voice.wav"
    command = ["ffmpeg", "-loglevel", "error", "-i", str(ROOT / "docs" / "demo-voice.mp3"), str(recording)]
    subprocess.run(command, check=True)
    seen = seen_in(browser, "clone", f"{several}/", recording=str(recording))
    assert re.match(r"neutral: \d\.\d s, cloned with its transcript", seen["findings"][0])
    assert any(line.startswith("Recording") for line in seen["findings"])
    assert any(line.startswith("Prepared:") for line in seen["findings"])
    assert "Consent: agreed in writing" in seen["findings"]
    assert httpx.get(f"{several}/v1/audio/voices").json()["uploaded_voices"] == []


def test_one_of_three_designs_is_kept(several: str) -> None:
    seen = seen_in("chromium", "design", f"{several}/")
    assert (seen["candidates"], seen["listed"]) == (3, 1)
