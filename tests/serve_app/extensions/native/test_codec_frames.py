import re
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import pytest

from deployments.errors import Overloaded
from serve_app.extensions.native.codec_frames import END_REASONS, HEADER, RECORD
from tests.serve_app.audio.test_recordings import data_url, recording
from tests.serve_app.extensions.client import heard, talking
from tests.serve_app.fake import BASE, CUSTOM_VOICE, FakeSynthesizer, chunk, followed, tone, utterance
from tests.serve_app.one_model import posted

pytestmark = pytest.mark.anyio

DOCUMENT = Path(__file__).parents[4] / "docs" / "codec-frames.md"
PATH, SOCKET = "/v1/audio/frames", "/v1/audio/frames/ws"
SIZE = CUSTOM_VOICE.frame_samples
SPEAK = {"type": "speak", "input": "Hello", "voice": "alloy"}


def records(stream: bytes) -> list[tuple[str, int]]:
    assert HEADER.unpack(stream[:16]) == (b"TRCF", 1, 16, 0, 24000, SIZE)
    at, found = 16, []
    while at < len(stream):
        kind, number = RECORD.unpack(stream[at : at + 8])
        found.append((chr(kind), number))
        at += 8 + (32 * number if chr(kind) == "f" else 0)
    return found


async def ask(synthesizer: FakeSynthesizer, **fields: object) -> httpx.Response:
    return await posted(synthesizer, PATH, json={"input": "Hello", "voice": "alloy", **fields})


async def test_frames_and_what_is_heard_of_them() -> None:
    codes = np.arange(16, dtype=np.int16)[None] + 2000
    quiet = replace(chunk(b"", frames=2), position=0)
    loud = replace(chunk(tone(SIZE)), codes=codes, position=3 * SIZE)
    end = utterance(0)[0]
    nothing = replace(quiet, codes=quiet.codes[:0])
    answer = await ask(FakeSynthesizer(script=[nothing, quiet, loud, end]))
    assert answer.headers["content-type"] == "application/x-talkray-frames"
    assert records(answer.content) == [("f", 2), ("f", 1), ("d", 2 * SIZE), ("p", SIZE), ("e", 0)]
    assert np.frombuffer(answer.content[16 + 8 + 64 + 8 :][:32], "<u2").tolist() == list(range(2000, 2016))


async def test_a_long_text_begins_anew_with_each_segment() -> None:
    synthesizer = FakeSynthesizer(replace(CUSTOM_VOICE, max_segment_chars=10), followed())
    answer = await ask(synthesizer, input="One two. Three.")
    kinds = "".join(kind for kind, _ in records(answer.content))
    assert kinds == "fp" * 11 + "r" + "fp" * 11 + "e"


async def test_text_without_anything_to_speak_is_silence() -> None:
    answer = await ask(FakeSynthesizer(script=utterance()), input="...")
    assert records(answer.content) == [("s", 2400), ("e", 0)]


AUDIO = dict.fromkeys(("response_format", "sample_rate", "speed", "stream_format", "word_timestamps"), "1")


@pytest.mark.parametrize(("field", "value"), [*AUDIO.items(), ("input", '<prosody rate="80%">a</prosody>')])
async def test_fields_of_audio_are_refused(field: str, value: str) -> None:
    answer = await ask(FakeSynthesizer(), **{field: value})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


async def test_speech_behind_a_recording_is_refused() -> None:
    asked = {"ref_audio": data_url(recording()), "ref_text": "x"}
    answer = await ask(FakeSynthesizer(BASE), **asked)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "ref_audio")
    for info, more in ((BASE, {"x_vector_only_mode": True}), (replace(BASE, clones_by_vector=True), {})):
        assert (await ask(FakeSynthesizer(info, followed()), **asked, **more)).status_code == 200


async def test_utterances_on_a_socket() -> None:
    synthesizer = FakeSynthesizer(script=followed())
    async with talking(synthesizer, SOCKET) as client:
        for number in (1, 2):
            client.send(SPEAK)
            (done,), stream = await client.until(type="done")
            spoke = {"seed": done["seed"], "model": CUSTOM_VOICE.name, "voice": "vivian"}
            assert done["seed"] == synthesizer.requests[number - 1].seed
            ended = {"request_id": f"conn-{number}", "finish_reason": "stop", "frames": 11}
            assert done == {"type": "done", **ended, **spoke}
            assert records(stream)[-1] == ("e", 0)
    assert [request.request_id for request in synthesizer.requests] == ["conn-1", "conn-2"]


async def test_a_failure_is_told() -> None:
    full = FakeSynthesizer(script=[Overloaded("full", 2.0)])
    (error,), _ = await heard(full, SOCKET, SPEAK, until={"type": "error"})
    assert (error["request_id"], error["error"]["code"]) == ("conn-1", "rate_limit_exceeded")


def test_the_document_lists_the_reasons_of_an_end_in_their_order() -> None:
    [line] = [line for line in DOCUMENT.read_text(encoding="utf-8").splitlines() if line.startswith("| `e` (0x65)")]
    assert re.findall(r"(\d) `(\w+)`", line) == [(str(number), reason) for number, reason in enumerate(END_REASONS)]
