import io

import httpx
import numpy as np
import pytest
import soundfile

from tests.serve_app.audio.test_recordings import recording
from tests.serve_app.fake import BASE, FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import posted

pytestmark = pytest.mark.anyio

PATH = "/generate"


async def test_a_form_is_answered_with_wav(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    form = {"text": "Hello.", "speaker": "Ryan", "language": "German", "instruct": "Softly.", "streaming": "true"}
    for answer in (
        await client.post(PATH, data=form),
        await client.post(PATH, files={name: (None, value) for name, value in form.items()}),
        await client.post(PATH, json=form),
    ):
        assert (answer.status_code, answer.headers["content-type"]) == (200, "audio/wav")
        assert answer.content[44:] == pcm_of(utterance())
        assert int.from_bytes(answer.content[40:44], "little") == 0xFFFFFFFF
        assert "x-ignored" not in answer.headers
    for request in synthesizer.requests:
        assert (request.voice, request.language, request.instructions) == ("ryan", "german", "Softly.")


async def test_a_whole_file(client: httpx.AsyncClient) -> None:
    answer = await client.post(PATH, files={"text": (None, "Hello."), "streaming": (None, "false")})
    assert int.from_bytes(answer.content[40:44], "little") == len(pcm_of(utterance()))


async def test_a_recording_is_cloned() -> None:
    synthesizer = FakeSynthesizer(BASE, utterance())
    form = {"text": "Hello.", "ref_text": "La."}
    answer = await posted(synthesizer, PATH, data=form, files={"audio": ("reference.wav", recording(), "audio/wav")})
    assert answer.status_code == 200
    reference = synthesizer.requests[0].reference
    assert reference is not None
    assert reference.text == "La."
    expected, _ = soundfile.read(io.BytesIO(recording()), dtype="float32")
    np.testing.assert_allclose(reference.audio, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "kind", "param"),
    [
        (b"{}", "application/json", "text"),
        (b"text=Hello&x_vector_only_mode=perhaps", "application/x-www-form-urlencoded", "x_vector_only_mode"),
        (b"&".join([b"text=a"] * 40), "application/x-www-form-urlencoded", None),
        (b"--x\r\nnonsense", "multipart/form-data; boundary=x", "text"),
        (b"--x\r\n", "multipart/form-data", None),
        (b"\xff", "text/plain", None),
    ],
)
async def test_what_is_refused(client: httpx.AsyncClient, content: bytes, kind: str, param: str | None) -> None:
    answer = await client.post(PATH, content=content, headers={"content-type": kind})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
