"""Voices from descriptions: three candidates to hear, and one that is locked and stays."""

import asyncio
import base64
import io
import time
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
import soundfile
from httpx import AsyncClient

from deployments.errors import Overloaded
from deployments.protocol import FinishReason
from serve_app.api.application import create_api
from serve_app.cli.key_file import create_key
from serve_app.config import AdmissionSettings, ApiSettings
from serve_app.extensions.designs import designs
from serve_app.extensions.voices import stored_voice
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.serve_app import asgi
from tests.serve_app.extensions.voices.speakers import RATE, Server
from tests.serve_app.fake import BASE, CUSTOM_VOICE, VOICE_DESIGN, FakeSynthesizer, chunk, pcm_of, tone, utterance
from tests.serve_app.one_model import client_of, refusal

pytestmark = pytest.mark.anyio
SPEECH, DESIGN, VOICES = "/v1/audio/speech", "/v1/audio/voices/design", "/v1/audio/voices"
SCRIPT = utterance(10)  # 0.8 seconds
ASKED = {"instructions": "A calm old man.", "text": "So it is.", "response_format": "wav"}


@pytest.fixture
def server(folder: Path) -> Server:
    return designer(folder)


def recordings_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.flac"))


def designer(folder: Path, *names: str, **options: object) -> Server:
    synthesizer = FakeSynthesizer(VOICE_DESIGN, script=SCRIPT)
    return Server(folder, *names, synthesizer=synthesizer, **options)  # type: ignore[arg-type]


async def designed(client: AsyncClient, **more: object) -> list[dict[str, object]]:
    answer = await client.post(DESIGN, json={**ASKED, **more})
    assert answer.status_code == 200, answer.text
    told = answer.json()
    assert told["left_out"] == []
    candidates: list[dict[str, object]] = told["candidates"]
    assert len(candidates) == 3
    return candidates


async def test_three_candidates_to_hear(server: Server, client: AsyncClient) -> None:
    heard = await designed(client, seed=2**64 - 2, temperature=0.5, max_new_tokens=9000)
    assert [each["seed"] for each in heard] == [2**64 - 2, 2**64 - 1, 0]
    assert len({each["id"] for each in heard}) == 3
    for each in heard:
        samples, rate = soundfile.read(io.BytesIO(base64.b64decode(str(each["audio"]))), dtype="int16")
        assert (rate, each["seconds"], each["media_type"]) == (RATE, 0.8, "audio/wav")
        assert samples.tobytes() == pcm_of(SCRIPT)
    assert [each["id"] for each in (await client.get(VOICES)).json()["uploaded_voices"]] == []
    for request in server.synthesizer.requests:
        assert (request.text, request.instructions) == ("So it is.", "A calm old man.")
        assert request.sampling.temperature == 0.5
        assert request.sampling.max_new_tokens == 351  # 28 seconds, and the end


async def test_without_a_text_one_is_said_in_the_language(server: Server, client: AsyncClient) -> None:
    answers = [
        await client.post(DESIGN, json={"description": "Calm.", "language": language})
        for language in ("auto", "de", "zh")
    ]
    starts = [answer.json()["text"][:5] for answer in answers]
    assert starts == ["Hello", "Hallo", "你好，很高"]
    assert [answer.json()["candidates"][0]["media_type"] for answer in answers] == ["audio/mpeg"] * 3
    assert server.synthesizer.requests[-1].language == "chinese"
    assert len({request.seed for request in server.synthesizer.requests}) == 9
    assert {request.sampling.max_new_tokens for request in server.synthesizer.requests} == {351}


async def test_a_locked_one_is_spoken_with_on_another_replica_that_clones(folder: Path) -> None:
    one, other = designer(folder), Server(folder)
    async with one.client() as at_one, other.client() as at_other:
        heard = (await designed(at_one, language="de"))[1]
        own = await at_other.post(VOICES, json={"design": heard["id"], "name": "English", "language": "english"})
        assert own.json()["language"] == "english"
        locked = await at_other.post(VOICES, json={"design": str(heard["id"]).upper(), "name": "Grandpa"})
        assert locked.status_code == 200, locked.text
        told = locked.json()
        assert told["provenance"] == f"design: design, seed {heard['seed']}"
        assert (told["description"], told["language"], told["cloned_by"]) == ("A calm old man.", "german", "transcript")
        assert "without a recording of a person" in told["consent"]
        restarted = Server(folder)
        async with restarted.client() as client:
            answer = await client.post(SPEECH, json={"input": "Hi.", "voice": "grandpa"})
            assert answer.status_code == 200, answer.text
        reference = restarted.synthesizer.requests[0].reference
        assert reference is not None
        assert (reference.text, reference.x_vector_only) == ("So it is.", False)
        np.testing.assert_allclose(reference.samples, np.frombuffer(pcm_of(SCRIPT), "<i2") / 32768, atol=1e-6)


async def test_only_its_owner_may_lock_it(folder: Path) -> None:
    server = designer(folder, "ada", "eve", admins=("root",))
    async with server.client("ada") as ada, server.client("eve") as eve, server.client("root") as root:
        made = (await designed(ada))[0]["id"]
        for path, body in (
            (VOICES, {"design": made, "name": "stolen"}),
            ("/v1/text-to-voice", {"generated_voice_id": made, "voice_name": "stolen", "voice_description": "mine"}),
        ):
            assert refusal(await eve.post(path, json=body), "code") == (404, "design_not_found")
        assert (await eve.get(f"/v1/text-to-voice/{made}/stream")).status_code == 404
        assert (await root.post(VOICES, json={"design": made, "name": "found"})).status_code == 200
        assert (await ada.post(VOICES, json={"design": made, "name": "kept"})).status_code == 200
        assert [each["name"] for each in (await ada.get(VOICES)).json()["uploaded_voices"]] == ["kept"]
    async with server.client() as stranger:
        assert (await stranger.post(DESIGN, json=ASKED)).status_code == 401


async def test_an_owner_has_so_many_and_the_oldest_go_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(designs, "MOST_KEPT", 4)
    server = designer(folder, "ada", "eve")
    async with server.client("ada") as ada, server.client("eve") as eve:
        hers = [str(each["id"]) for each in await designed(eve)]
        seen: list[str] = []
        for later_s in range(2):
            monkeypatch.setattr(designs, "now", lambda later_s=later_s: int(time.time()) + later_s)
            seen += [str(each["id"]) for each in await designed(ada)]
        store = VoiceStore(str(folder))
        there = {Path(path).stem for path in store.marks()}
        assert {*hers, *seen[-3:]} <= there
        assert len(there & set(seen)) == 4
        gone = next(each for each in seen if each not in there)
        assert refusal(await ada.post(VOICES, json={"design": gone, "name": "late"})) == (404, "design")
        assert len(recordings_in(folder)) == 7


async def test_after_an_hour_it_is_swept(folder: Path, client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, _ = await designed(client)
    kept = await client.post(VOICES, json={"design": second["id"], "name": "kept"})
    later_s = time.time() + stored_voice.DESIGN_S + 1
    monkeypatch.setattr(designs, "now", lambda: int(later_s))
    answer = await client.post(VOICES, json={"design": first["id"], "name": "late"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "design_not_found")
    store = VoiceStore(str(folder))
    assert store.sweep(later_s - 60) == 0
    assert store.sweep(later_s) == 6  # records and recordings
    assert list(store.marks()) == [f"voices/{kept.json()['id']}.json"]
    assert len(recordings_in(folder)) == 1


async def test_candidates_take_no_place_of_voices_but_a_locked_one_does(folder: Path) -> None:
    server = designer(folder, voices=VoiceSettings(max_voices=1))
    async with server.client() as client:
        first, second, _ = await designed(client)
        assert (await client.post(VOICES, json={"design": first["id"], "name": "one"})).status_code == 200
        full = await client.post(VOICES, json={"design": second["id"], "name": "two"})
        assert (full.status_code, full.json()["error"]["code"]) == (409, "quota_exceeded")


async def test_of_several_models_the_one_that_designs_speaks(folder: Path) -> None:
    speaking = {
        name: FakeSynthesizer(replace(info, name=name, checkpoint=name), script=SCRIPT)
        for name, info in (("named", CUSTOM_VOICE), ("clones", BASE), ("designs", VOICE_DESIGN))
    }
    settings = ApiSettings(voices=VoiceSettings(store=str(folder)))
    api = create_api({name: (each, AdmissionSettings()) for name, each in speaking.items()}, settings, opened={})
    async with client_of(api) as client:
        answer = await client.post(DESIGN, json={**ASKED, "model": "tts-1"})
        assert answer.status_code == 200, answer.text
        assert "x-ignored" not in answer.headers
        made = answer.json()["candidates"][0]["id"]
        assert (await client.post(VOICES, json={"design": made, "name": "grandpa"})).status_code == 200
        assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "grandpa"})).status_code == 200
        assert refusal(await client.post(DESIGN, json={**ASKED, "model": "clones"})) == (400, "model")
        assert refusal(await client.post(DESIGN, json={**ASKED, "model": "gpt-9"})) == (404, "model")
    assert {name: len(each.requests) for name, each in speaking.items()} == {"named": 0, "clones": 1, "designs": 3}


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (utterance(2), "shorter than 0.5 s"),
        ([*SCRIPT[:-1], chunk(b"", frames=0, finish_reason=FinishReason.LENGTH)], "longer than 28 s"),
        ([*SCRIPT[:-1], chunk(b"", frames=0, finish_reason=FinishReason.RUNAWAY)], "the speech did not end"),
        ([chunk(tone(RATE)), chunk(b"", frames=0, finish_reason=FinishReason.EARLY)], "the speech ended too early"),
    ],
)
async def test_what_is_no_recording_to_clone_is_left_out(
    folder: Path, server: Server, client: AsyncClient, script: list[object], reason: str
) -> None:
    server.synthesizer.script = script  # type: ignore[assignment]
    answer = await client.post(DESIGN, json=ASKED)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"], error["code"]) == (400, "text", "design_failed")
    assert reason in error["message"]
    assert recordings_in(folder) == []
    asked = await client.post(DESIGN, json={**ASKED, "max_new_tokens": 20})
    assert (asked.status_code == 200) is reason.startswith("longer"), (
        "only speech that reaches the requested max_new_tokens is accepted"
    )
    assert (await client.post(DESIGN, json={**ASKED, "max_new_tokens": 2048})).status_code == 400, (
        "longer than any design"
    )


async def test_a_store_that_is_out_of_reach_is_told_before_anything_is_spoken(tmp_path: Path) -> None:
    server = designer(tmp_path / "store")
    server.voices.store = None
    async with server.client() as client:
        assert (await client.post(DESIGN, json=ASKED)).status_code == 503
    assert server.synthesizer.requests == []


class Stage(asyncio.Event):
    """Knows how many wait for it."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.is_full = 0, asyncio.Event()

    async def wait(self) -> Literal[True]:
        self.inside += 1
        if self.inside == 3:
            self.is_full.set()
        try:
            return await super().wait()
        finally:
            self.inside -= 1


async def test_who_leaves_ends_all_three(folder: Path, server: Server) -> None:
    stage = Stage()
    server.synthesizer.script = [chunk(tone(RATE)), stage]
    async with asyncio.timeout(30), asgi.http(server.api, "POST", DESIGN, body=ASKED) as connection:
        await stage.is_full.wait()
        connection.receive({"type": "http.disconnect"})
        await asyncio.wait((connection.task,))
    assert stage.inside == 0
    assert recordings_in(folder) == []


async def test_one_that_fails_ends_the_others(server: Server, client: AsyncClient) -> None:
    stage = Stage()

    class Failing(asyncio.Event):
        async def wait(self) -> Literal[True]:
            if len(server.synthesizer.requests) == 3:
                raise Overloaded("full", 2.0)
            return await stage.wait()

    server.synthesizer.script = [Failing()]
    answer = await client.post(DESIGN, json=ASKED)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "2")
    assert stage.inside == 0


async def test_it_counts_as_three_requests(folder: Path) -> None:
    server = designer(folder, "ada")
    assert server.file is not None
    for most, statuses in ((2, [429]), (3, [200, 429])):
        server.keys["eve"] = create_key(server.file, f"eve {most}", requests_per_minute=most)
        async with server.client("eve") as client:
            assert [(await client.post(DESIGN, json=ASKED)).status_code for _ in statuses] == statuses
        assert len(server.synthesizer.requests) == 3 * statuses.count(200)
