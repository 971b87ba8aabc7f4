"""Stored voices over HTTP: created, spoken with, listed and deleted, by their owner and nobody else."""

import asyncio
import base64
from pathlib import Path
from unittest.mock import Mock, call
from urllib.parse import quote, unquote

import httpx2
import numpy as np
import openai
import pytest
from httpx import AsyncClient, Response

from deployments.errors import NotFound, NotReady, StartError
from deployments.protocol import Reference
from deployments.recording_cache import Lookups
from serve_app.api.access.callers import EVERYBODY, VISITOR, FairShare, Visitor
from serve_app.api.responses.whole_audio import ByteQuota
from serve_app.audio import clone_prompts
from serve_app.audio.recordings import decode_file, decode_reference
from serve_app.config import ApiSettings
from serve_app.extensions.voices import library, voice_routes
from serve_app.extensions.voices.extension import open_voices
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.reference_doctor import decode_prepared
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import SentRecording, packed
from serve_app.extensions.voices.voice_store import Record, StoreFailed, VoiceStore
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Client
from tests.serve_app.extensions.voices.speakers import RATE, Server, files_in, speak_and_derive, spoken, store, wav
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api, refusal
from tools.suites.rows import SOCKETS, is_here

pytestmark = pytest.mark.anyio
SPEECH = "/v1/audio/speech"


def reference_of(server: Server) -> Reference:
    """The recording that the first request was sent with."""
    reference = server.synthesizer.requests[0].reference
    assert reference is not None
    return reference


async def test_an_export_holds_memory_until_it_is_sent(client: AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    room, held = FairShare(1 << 20), list[int]()
    monkeypatch.setattr(ByteQuota, "_room", room)
    count = Mock(side_effect=lambda part: held.append(room._held.total()) or part)
    monkeypatch.setattr(voice_routes, "packed", lambda *of: map(count, packed(*of)))
    told = await store(client, "Ada")
    assert (await client.get(f"/v1/audio/voices/{told['id']}/file")).status_code == 200
    assert min(held) > 1000
    assert not room._held


async def test_a_voice_speaks_by_id_and_by_name(server: Server, client: AsyncClient) -> None:
    told = await store(client, "Ada", ref_text="Hiss and\n hiss.", language="de")
    assert (told["object"], told["cloned_by"], told["success"]) == ("audio.voice", "transcript", True)
    for name in ("Ada", "ada", told["id"]):
        answer = await client.post(SPEECH, json={"input": "Hallo.", "voice": name, "response_format": "pcm"})
        assert answer.status_code == 200
        assert answer.headers["x-voice-take"] == "neutral (the first)"
        assert "x-ignored" not in answer.headers
    sent = [request.reference for request in server.synthesizer.requests]
    expected = decode_reference(base64.b64encode(wav()).decode(), RATE)
    for reference in sent:
        assert reference is not None
        assert (reference.text, reference.x_vector_only) == ("Hiss and hiss.", False)
        np.testing.assert_array_equal(reference.samples, expected)
    assert len({reference.key for reference in sent if reference}) == 1
    assert {request.language for request in server.synthesizer.requests} == {"german"}


# Each form of upload: its path, its fields, what it calls the recording.
UPLOADS = {
    "OpenAI": ("/v1/audio/voices", {"name": "ada", "ref_text": "Hello."}, "audio_sample"),
    "ElevenLabs": ("/v1/voices/add", {"name": "ada", "ref_text": "Hello."}, "files"),
    "Cartesia": ("/voices/clone", {"name": "ada", "transcript": "Hello."}, "clip"),
}
UPLOADS = {name: form for name, form in UPLOADS.items() if is_here(form[0])}


@pytest.mark.parametrize("prepare", [None, "auto", "none"])
@pytest.mark.parametrize("form", UPLOADS)
async def test_stored_audio_is_prepared(server: Server, client: AsyncClient, form: str, prepare: str | None) -> None:
    path, fields, field = UPLOADS[form]
    fields |= {} if prepare is None else {"prepare": prepare}
    told = (await client.post(path, data=fields, files={field: ("a.wav", spoken())})).json()
    assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})).status_code == 200
    reference = reference_of(server)
    [take] = told["takes"]
    assert [flaw["code"] for flaw in take["flaws"]] == ["transcript_short", "short"]
    assert "Send exactly the spoken words" in take["flaws"][0]["advice"]
    expected, rate = decode_file(spoken(), field)
    if prepare == "none":
        assert take["changes"] == []
    else:
        assert any("Appended 0.50 s of silence" in change for change in take["changes"])
        expected, rate = decode_prepared(spoken(), field)
        assert take["seconds"] < 6
    assert (take["seconds"], rate) == (round(expected.size / rate, 3), RATE)
    np.testing.assert_allclose(reference.samples, expected, atol=2**-23)


async def test_further_recordings_are_prepared_too(client: AsyncClient) -> None:
    place, sample = f"/v1/audio/voices/{(await store(client, 'ada'))['id']}", {"audio_sample": ("a.wav", spoken())}
    for fields in ({"style": "calm"}, {"style": "raw", "prepare": "none"}):
        changed = await client.post(place, data=fields, files=sample)
    assert [bool(take["changes"]) for take in changed.json()["takes"]] == [False, True, False]
    edit = f"{place.replace('/audio', '')}/edit"
    edited = await client.post(edit, data={"name": "grace"}, files={"files": ("low.wav", spoken())})
    assert [take["style"] for take in edited.json()["takes"]] == ["low"]


@pytest.mark.parametrize("form", UPLOADS)
async def test_a_preparation_that_is_none_is_refused(client: AsyncClient, form: str) -> None:
    path, fields, field = UPLOADS[form]
    answer = await client.post(path, data={**fields, "prepare": "best"}, files={field: ("a.wav", spoken())})
    assert answer.status_code == 400
    assert "prepare: 'best' is unknown. Use one of: auto, none." in answer.text


@pytest.mark.parametrize("prepare", [None, "auto", "none"])
async def test_a_sent_recording_is_prepared_if_asked(server: Server, client: AsyncClient, prepare: str | None) -> None:
    body = {"input": "Hi.", "ref_audio": base64.b64encode(spoken()).decode(), "ref_text": "Hello."}
    answer = await client.post(SPEECH, json={**body, "prepare": prepare})
    assert "x-ignored" not in answer.headers
    reference = reference_of(server)
    expected, _ = (decode_prepared if prepare == "auto" else decode_file)(spoken(), "ref_audio")
    np.testing.assert_array_equal(reference.samples, expected)


async def test_a_request_cannot_prepare_a_stored_voice(client: AsyncClient) -> None:
    await store(client, "ada")
    answer = await client.post(SPEECH, json={"input": "Hi.", "voice": "ada", "prepare": "auto"})
    assert answer.headers["x-ignored"] == "prepare (only applies to recordings in the request)"


async def consented(client: AsyncClient, name: str, recording: bytes = wav()) -> Response:
    fields, files = {"name": name, "language": "en"}, {"recording": ("c.wav", recording)}
    return await client.post("/v1/audio/voice_consents", data=fields, files=files)


async def test_a_consent_is_kept_as_it_was_sent(server: Server, client: AsyncClient) -> None:
    await consented(client, "Ada agrees", spoken())
    VISITOR.set(EVERYBODY)
    [consent] = await server.voices.consents()
    assert (consent.take.seconds, consent.take.changes) == (6.0, ())


async def test_without_a_transcript_it_is_by_vector_and_says_so(server: Server, client: AsyncClient) -> None:
    assert (await store(client, "ada"))["cloned_by"] == "vector"
    answer = await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})
    assert answer.headers["x-voice-take"] == "neutral (the first, speaker vector only: the transcript is missing)"
    assert reference_of(server).x_vector_only


async def test_instructions_choose_a_take(server: Server, client: AsyncClient) -> None:
    told = await store(client, "ada", ref_text="Neutral.")
    sample = {"audio_sample": ("a.wav", wav(1), "audio/wav")}
    path = f"/v1/audio/voices/{told['id']}"
    changed = await client.post(path, data={"style": "cheerful", "ref_text": "Ha!"}, files=sample)
    assert [take["style"] for take in changed.json()["takes"]] == ["neutral", "cheerful"]
    assert (await client.post(path, data={"style": "Cheerful"}, files=sample)).status_code == 400
    body = {"input": "Hi.", "voice": "ada", "instructions": "Say it cheerfully."}
    answer = await client.post(SPEECH, json=body)
    assert answer.headers["x-voice-take"] == "cheerful (instructions)"
    assert "x-ignored" not in answer.headers
    other = await client.post(SPEECH, json={**body, "instructions": "Say it sadly."})
    assert other.headers["x-voice-take"] == "neutral (the first)"
    assert "instructions" in other.headers["x-ignored"]
    texts = [request.reference.text for request in server.synthesizer.requests if request.reference]
    assert texts == ["Ha!", "Neutral."]
    emotional = {"transcript": "Hi.", "voice": {"id": "ada"}, "generation_config": {"emotion": "cheerful"}}
    for path in filter(is_here, ["/tts/bytes"]):
        assert (await client.post(path, json=emotional)).headers["x-voice-take"] == "cheerful (instructions)"
        assert server.synthesizer.requests[-1].reference.text == "Ha!"  # type: ignore[union-attr]


async def with_a_take(client: AsyncClient, style: str) -> str:
    """A voice with a neutral recording and one in a style; returns its id."""
    told = await store(client, "ada", ref_text="Neutral.")
    sample = {"audio_sample": ("a.wav", wav(1), "audio/wav")}
    fields = {"style": style, "ref_text": "Ha!"}
    changed = await client.post(f"/v1/audio/voices/{told['id']}", data=fields, files=sample)
    assert changed.status_code == 200
    return str(told["id"])


@pytest.mark.parametrize(
    ("sent", "heard", "take"),
    [
        ("[whispering] Hello.", "Hello.", "whispering (tag)"),
        (" [Whispers softly]Hello.", "Hello.", "whispering (tag)"),
        ('<emotion value="whispering" /> Hello.', "Hello.", "whispering (tag)"),
        ("[laughing] Hello.", "Hello.", "neutral (the first)"),  # no take of its: it is left out, and named
        ('Hello. <emotion value="sad"/>There.', "Hello. There.", "neutral (the first)"),
    ],
)
async def test_a_tag_chooses_a_take(server: Server, client: AsyncClient, sent: str, heard: str, take: str) -> None:
    await with_a_take(client, "whispering")
    bodies: dict[str, dict[str, object]] = {
        SPEECH: {"input": sent, "voice": "ada"},
        "/v1/text-to-speech/ada": {"text": sent},
        "/tts/bytes": {"transcript": sent, "voice": {"id": "ada"}},
    }
    for path in (paths := [*filter(is_here, bodies)]):
        answer = await client.post(path, json=bodies[path])
        assert answer.headers["x-voice-take"] == take
        assert ("x-ignored" in answer.headers) == take.startswith("neutral")
    assert [request.text for request in server.synthesizer.requests] == [heard] * len(paths)
    texts = {request.reference.text for request in server.synthesizer.requests if request.reference}
    assert texts == {"Ha!" if take.startswith("whispering") else "Neutral."}


@pytest.mark.parametrize("text", ["囁き", "é" * 80, "囁" * 300, "x" * 300, "two\r\nlines"])
async def test_headers_carry_text_of_clients_and_owners(server: Server, client: AsyncClient, text: str) -> None:
    style = text.replace("\r\n", "")[:80]
    voice = await with_a_take(client, style)
    body = {"input": f"<{text}>Hi.</{text}> [{text}]", "voice": voice, "instructions": f"{style}.", text: 1}
    speech = await client.post(SPEECH, json=body, headers={"x-request-id": text.encode()})
    unknown = await client.post(SPEECH, json={"input": "Hi.", "voice": text})
    assert (speech.status_code, unknown.status_code) == (200, 400)
    assert unquote(speech.headers["x-voice-take"]) == f"{style} (instructions)"
    assert "not supported" in speech.headers["x-ignored"]
    sent = [*speech.headers.raw, *unknown.headers.raw]
    for path in filter(is_here, ["/v1/speak"]):
        query = f"model=aura&{quote(text)}=1&encoding={quote(text)}"
        async with asgi.websocket(server.api, f"{path}?{query}") as connection:
            start = await connection.next()
        assert start["status"] == 400
        assert any(name == b"dg-error" for name, _ in start["headers"])
        sent += start["headers"]
    assert all(len(value) < 1000 and value.decode("ascii").isprintable() for _, value in sent)


async def test_a_tag_comes_before_instructions(client: AsyncClient) -> None:
    await with_a_take(client, "whispering")
    body = {"input": "[whispering] Hello.", "voice": "ada", "instructions": "Loudly."}
    answer = await client.post(SPEECH, json=body)
    assert answer.headers["x-voice-take"] == "whispering (tag)"
    assert answer.headers["x-ignored"] == "instructions (a style tag in the text selected the recording)"
    assert (await client.post(SPEECH, json={"input": "[whispering]", "voice": "ada"})).status_code == 200  # silence


async def test_a_stored_voice_may_be_the_default_one(server: Server, client: AsyncClient) -> None:
    await store(client, "ada", ref_text="Hiss.")
    settings = ApiSettings(voices=server.settings, default_voice="Ada")
    server.api = one_api(server.synthesizer, settings, opened={"voices": server.voices})
    async with server.client() as client:
        assert (await client.get("/ready")).status_code == 200
        replaced = "voice_id (unknown voice, used ada)"
        for path, ignored in ((SPEECH, None), ("/tts/bytes", None), ("/v1/text-to-speech/21m00Tcm4TlvDq8ik", replaced)):
            if is_here(path):
                name = {SPEECH: "input", "/tts/bytes": "transcript"}.get(path, "text")
                answer = await client.post(path, json={name: "Hi."})
                assert answer.headers.get("x-ignored") == ignored
                assert answer.headers["x-voice-take"] == "neutral (the first)"
        assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "nobody"})).status_code == 400
    assert {request.reference.text for request in server.synthesizer.requests if request.reference} == {"Hiss."}


async def test_defaults_of_a_voice_hold_where_a_request_says_nothing(server: Server, client: AsyncClient) -> None:
    told = await store(client, "ada", language="german")
    place = f"/v1/audio/voices/{told['id']}"
    for sampling in ({"temperature": 1, "do_sample": False}, {"temperature": 0.5, "top_k": 7}):
        assert (await client.post(place, json={"sampling": sampling})).json()["sampling"] == sampling
    for sampling in ({"top_p": 7}, {"top_p": True}, {"top_k": 1.5}, {"do_sample": 1}, {"heat": 1}):
        bad = await client.post(place, json={"sampling": sampling})
        assert (bad.status_code, bad.json()["error"]["param"]) == (400, "sampling"), sampling
    for more in ({}, {"language": "en", "top_k": 9}):
        await client.post(SPEECH, json={"input": "Hi.", "voice": "ada", **more})
    asked = [(each.language, each.sampling.temperature, each.sampling.top_k) for each in server.synthesizer.requests]
    assert asked == [("german", 0.5, 7), ("english", 0.5, 9)]


async def test_a_recording_in_the_request_comes_first(server: Server, client: AsyncClient) -> None:
    sent = base64.b64encode(wav(5)).decode()
    await store(client, "ada")
    body = {"input": "Hi.", "voice": "ada", "reference_audio": sent, "reference_text": "Other."}
    assert "voice" in (await client.post(SPEECH, json=body)).headers["x-ignored"]
    assert reference_of(server).text == "Other."


async def test_what_another_replica_stored_is_found_without_delay(folder: Path) -> None:
    one, other = Server(folder), Server(folder)
    async with one.client() as at_one, other.client() as at_other:
        assert (await at_other.get("/v1/audio/voices")).json()["uploaded_voices"] == []
        told = await store(at_one, "ada")
        assert (await at_other.post(SPEECH, json={"input": "Hi.", "voice": "ada"})).status_code == 200
        renamed = await at_other.post(f"/v1/audio/voices/{told['id']}", data={"name": "grace"})
        assert renamed.json()["name"] == "grace"
        assert (await at_one.post(SPEECH, json={"input": "Hi.", "voice": "grace"})).status_code == 200
        await one.voices.refresh()
        assert (await at_one.post(SPEECH, json={"input": "Hi.", "voice": "ada"})).status_code == 400


async def test_every_replica_sees_within_five_seconds_what_is_deleted(folder: Path) -> None:
    forgotten = asyncio.Event()

    async def forget(_: tuple[bytes, ...]) -> None:
        forgotten.set()

    one, other = Server(folder), Server(folder, forget=forget)
    async with one.client() as at_one, other.client() as at_other:
        told = await store(at_one, "ada")
        assert (await at_other.get("/v1/audio/voices")).json()["uploaded_voices"] != []
        await at_one.delete(f"/v1/audio/voices/{told['id']}")
        async with asyncio.timeout(5):
            await forgotten.wait()
        assert (await at_other.get("/v1/audio/voices")).json()["uploaded_voices"] == []


async def test_deleting_clears_what_is_derived(folder: Path) -> None:
    """Here, in the store and, by `forget`, on the replicas; what comes late is not kept either."""
    forgotten: list[bytes] = []

    async def forget(voices: tuple[bytes, ...]) -> None:
        if not forgotten:
            forgotten.append(b"")
            raise NotReady("a replica did not answer")
        forgotten.extend(voices)

    server = Server(folder, forget=forget)
    async with server.client() as client:
        told = await store(client, "ada", ref_text="Hiss.")
        reference = await speak_and_derive(server)
        await server.voices._keep_prompts()
        assert any(file.suffix == ".npz" for file in files_in(folder))
        await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})
        prompt = server.synthesizer.requests[1].reference.prompt  # type: ignore[union-attr]
        assert prompt is not None
        deleted = (await client.delete("/v1/audio/voices/ada")).json()
        assert (deleted["id"], deleted["deleted"]) == (told["id"], True)
        assert files_in(folder) == []
        assert clone_prompts.with_prompt(reference).prompt is None
        clone_prompts.store_clone_prompt(reference, prompt)
        assert clone_prompts.with_prompt(reference).prompt is None
        await server.voices._forget_gone()  # as the next look does
        assert forgotten == [b"", reference.key[:16]]
        assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})).status_code == 400


async def test_voices_that_are_deleted_while_replicas_do_not_answer_are_all_forgotten(folder: Path) -> None:
    are_away, forgotten = True, set[bytes]()

    async def forget(voices: tuple[bytes, ...]) -> None:
        if are_away:
            raise NotReady("not yet")
        forgotten.update(voices)

    server = Server(folder, forget=forget)
    async with server.client() as client:
        stored = [(await store(client, name, seed=seed))["id"] for seed, name in enumerate(("ada", "bob"))]
        voices = [server.voices.known(str(voice_id)) for voice_id in stored]
        for voice_id in stored:
            await client.delete(f"/v1/audio/voices/{voice_id}")
        are_away = False
        await server.voices._forget_gone()
        assert forgotten == {voice.key_prefix for voice in voices if voice}
        forgotten.clear()
        await server.voices._forget_gone()
        assert not forgotten


async def test_a_store_that_fails_keeps_the_voices_and_is_told_once(
    server: Server, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked = asyncio.Event()
    failures, marks = ["away", "away", "gone", "", "gone"], VoiceStore.marks

    def failing(files: VoiceStore) -> dict[str, str]:
        if failures and (failure := failures.pop(0)):
            raise StoreFailed(failure)
        if not failures:
            loop.call_soon_threadsafe(looked.set)
        return marks(files)

    await store(client, "ada")
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(library, "POLL_S", 0.001)
    monkeypatch.setattr(VoiceStore, "marks", failing)
    following = asyncio.create_task(server.voices._look_again())
    await looked.wait()
    following.cancel()
    kept = [record.getMessage() for record in caplog.records if "the voices of the last read" in record.message]
    assert [line.rpartition(": ")[2] for line in kept] == ["away", "gone", "gone"]
    assert server.voices.known("ada") is not None


async def test_what_was_derived_outlives_a_restart(
    folder: Path, server: Server, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.metrics, "record_recording_lookups", looked := Mock())
    await store(client, "ada", ref_text="Hiss.")
    await speak_and_derive(server)
    await server.voices._keep_prompts()
    clone_prompts.PROMPTS.forget([])  # the process that comes next has nothing
    clone_prompts.PROMPTS._results.clear()
    restarted = Server(folder)
    async with restarted.client() as client:
        await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})
    prompt = reference_of(restarted).prompt
    assert prompt is not None
    np.testing.assert_array_equal(prompt.speaker, np.ones(8))
    assert looked.call_args_list == [call("prompt", Lookups(misses=1)), call("prompt", Lookups(hits=1))]


@pytest.mark.parametrize("name", SOCKETS)
async def test_sockets_tell_which_recording_speaks(server: Server, client: AsyncClient, name: str) -> None:
    """A tag chooses the recording of its span."""
    voice, row = await with_a_take(client, "cheerful"), SOCKETS[name]
    sample = row.sample.filled(text="Oh. [cheerfully] Hi. [neutral] Bye.", voice=voice)
    async with asgi.websocket(server.api, sample.path, subprotocols=sample.protocols) as connection:
        client_of = await Client(connection).accepted()
        client_of.send(*map(dict, sample.messages))
        told, in_handshake = "", client_of.headers.get("x-voice-take")
        async with asyncio.timeout(10):
            while not told:
                message = await client_of.next()
                told = message.get("voice_take", "") if isinstance(message, dict) else ""
            while len(server.synthesizer.requests) < 3:
                await client_of.next()
    assert [request.reference.text for request in server.synthesizer.requests if request.reference] == [
        "Neutral.", "Ha!", "Neutral.",
    ]  # fmt: skip
    await server.texts.aclose()
    assert told == "neutral (the first)"
    assert in_handshake == (told if "$voice" in row.sample.path else None)


@pytest.mark.parametrize("name", ["x" * 81, "two\nlines"])
async def test_a_consent_has_a_name_that_can_be_kept(client: AsyncClient, name: str) -> None:
    place = f"/v1/audio/voice_consents/{(await consented(client, 'c')).json()['id']}"
    for refused in (await consented(client, name), await client.post(place, data={"name": name})):
        assert refusal(refused) == (400, "name")
    assert (await client.get(place)).json()["name"] == "c"


async def test_recordings_that_are_added_at_once_all_stay(client: AsyncClient) -> None:
    told = await store(client, "ada")

    async def add(style: str) -> int:
        files = {"audio_sample": ("a.wav", wav())}
        answer = await client.post(f"/v1/audio/voices/{told['id']}", data={"style": style}, files=files)
        return answer.status_code

    assert await asyncio.gather(*map(add, ("calm", "loud", "sad"))) == [200, 200, 200]
    shown = (await client.get(f"/v1/audio/voices/{told['id']}")).json()
    assert {take["style"] for take in shown["takes"]} == {"neutral", "calm", "loud", "sad"}


async def test_a_name_is_taken_once_also_of_those_that_are_stored_at_once(client: AsyncClient) -> None:
    async def add() -> int:
        files = {"audio_sample": ("a.wav", wav())}
        return (await client.post("/v1/audio/voices", data={"name": "ada"}, files=files)).status_code

    assert sorted(await asyncio.gather(add(), add(), add())) == [200, 409, 409]
    with pytest.raises(AssertionError, match="is already named"):
        await store(client, "ADA")
    assert [each["name"] for each in (await client.get("/v1/audio/voices")).json()["voices"]] == ["ada"]


async def named(voices: Voices, name: str) -> list[str]:
    """The ids of the voices in the store that have the name."""
    await voices.refresh()
    return [each.id for each in await voices.voices() if each.name == name]


@pytest.mark.parametrize("renames", [False, True])
async def test_a_name_taken_elsewhere_is_undone(folder: Path, monkeypatch: pytest.MonkeyPatch, renames: bool) -> None:
    write, loop = VoiceStore.write, asyncio.get_running_loop()
    late, early = Server(folder), Server(folder)
    async with late.client() as client, early.client() as other:
        before = await store(client, "grace")
        version = [voice.version for voice in await late.voices.voices()]
        first: list[str] = []

        def after_another(place: VoiceStore, record: Record, recordings: dict[str, bytes]) -> None:
            monkeypatch.setattr(VoiceStore, "write", write)
            told = asyncio.run_coroutine_threadsafe(store(other, "Ada"), loop).result(30)
            first.append(str(told["id"]))
            write(place, record, recordings)

        monkeypatch.setattr(VoiceStore, "write", after_another)
        if renames:
            answer = await client.post(f"/v1/voices/{before['id']}/edit", data={"name": "ada"})
        else:
            sample = {"audio_sample": ("a.wav", wav())}
            answer = await client.post("/v1/audio/voices", data={"name": "ada"}, files=sample)
        assert (answer.status_code, answer.json()["error"]["param"]) == (409, "name")
        for replica in (late, early):
            assert await named(replica.voices, "Ada") == first
            assert await named(replica.voices, "ada") == []
            assert await named(replica.voices, "grace") == [before["id"]]
        [grace] = [voice for voice in await late.voices.voices() if voice.name == "grace"]
        assert (grace.version in version) is not renames  # caches have forgotten it


async def test_a_change_brings_no_deleted_voice_back(server: Server, client: AsyncClient) -> None:
    told = await store(client, "ada")
    VISITOR.set(EVERYBODY)
    known = await server.voices.get("ada")  # as a change does, which then checks its recording for seconds
    assert (await client.delete(f"/v1/audio/voices/{told['id']}")).status_code == 200
    with pytest.raises(NotFound, match="'ada' was deleted during"):
        await server.voices.change_voice(known, {"name": "grace"})
    assert (await client.get(f"/v1/audio/voices/{told['id']}")).status_code == 404


async def test_the_consent_of_another_is_unknown(folder: Path) -> None:
    server = Server(folder, "ada", "eve")
    async with server.client("ada") as ada, server.client("eve") as eve:
        agreed = (await consented(ada, "c")).json()["id"]
        assert (await store(ada, "own", consent=agreed))["voice"]["consent"] == agreed
        with pytest.raises(AssertionError, match="unknown or belongs"):
            await store(eve, "borrowed", consent=agreed)


async def test_the_owner_is_the_name_of_a_key(folder: Path) -> None:
    """So that a key that takes another's place keeps its voices."""
    server = Server(folder, "ada")
    async with server.client("ada") as client:
        await store(client, "mine")
    restarted = Server(folder, "ada")
    assert restarted.keys["ada"] != server.keys["ada"]
    async with restarted.client("ada") as client:
        assert [each["name"] for each in (await client.get("/v1/audio/voices")).json()["voices"]] == ["mine"]


@pytest.mark.parametrize(
    ("limits", "told"), [(VoiceSettings(max_voices=1), "max_voices"), (VoiceSettings(max_bytes=60_000), "max_bytes")]
)
async def test_quotas(folder: Path, limits: VoiceSettings, told: str) -> None:
    server = Server(folder, "ada", "eve", voices=limits)
    async with server.client("ada") as client:
        await store(client, "one")
        with pytest.raises(AssertionError, match=told):
            await store(client, "two")
    async with server.client("eve") as client:
        await store(client, "hers")


async def test_where_consent_is_required(folder: Path) -> None:
    async with Server(folder, voices=VoiceSettings(require_consent=True)).client() as client:
        with pytest.raises(AssertionError, match="consent is required"):
            await store(client, "ada")
        assert (await store(client, "ada", consent="by letter of 2026-11-01"))["consent"] == "by letter of 2026-11-01"
        clone = await client.post("/voices/clone", data={"name": "c"}, files={"clip": ("c.wav", wav())})
        assert clone.json()["error"]["param"] == "consent"


@pytest.mark.parametrize(
    ("fields", "files", "param"),
    [
        ({}, {"audio_sample": wav()}, "name"),
        ({"name": "a"}, {}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": b"nothing"}, "audio_sample"),
        ({"name": "a"}, {"audio_sample": wav(seconds=0.2)}, "audio_sample"),
        ({"name": "a" * 81}, {"audio_sample": wav()}, "name"),
        ({"name": "voice_0123456789abcdef01234567"}, {"audio_sample": wav()}, "name"),
        ({"name": "a", "type": "prompt", "prompt": "deep"}, {}, None),  # no model designs voices
        ({"name": "a", "speaker_embedding": "[1, 2]"}, {}, "speaker_embedding"),
        ({"name": "a", "consent": "cons_0123456789abcdef01234567"}, {"audio_sample": wav()}, "consent"),
    ],
)
async def test_what_is_refused(
    folder: Path, client: AsyncClient, fields: dict[str, str], files: dict[str, bytes], param: str | None
) -> None:
    sent = {name: (f"{name}.wav", data) for name, data in files.items()}
    answer = await client.post("/v1/audio/voices", data=fields, files=sent or None)
    assert 400 <= answer.status_code < 500
    assert answer.json()["error"]["param"] == param
    assert files_in(folder) == []


async def test_unknown_fields_are_named(client: AsyncClient) -> None:
    files = {"audio_sample": ("a.wav", wav()), "portrait": ("a.png", b"PNG")}
    answer = await client.post("/v1/audio/voices", data={"name": "a", "colour": "red"}, files=files)
    assert answer.headers["x-ignored"] == "colour (not supported); portrait (not supported)"
    changed = await client.post("/v1/audio/voices/a", json={"description": "calm", "style": "calm"})
    assert changed.headers["x-ignored"] == "style (requires an audio_sample)"


async def test_a_model_with_named_voices_says_what_is_missing(folder: Path) -> None:
    server = Server(folder, synthesizer=FakeSynthesizer(CUSTOM_VOICE, script=utterance()))
    async with server.client() as client:
        await store(client, "ada")
        answer = await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"})
        assert answer.status_code == 400
        assert "load a Base checkpoint" in answer.json()["error"]["message"]
        for path in filter(is_here, ["/v1/text-to-speech/ada"]):
            other = await client.post(path, json={"text": "Hi."})
            assert "load a Base checkpoint" in other.headers["x-ignored"]


async def test_openais_sdk(server: Server) -> None:
    http = httpx2.AsyncClient(transport=httpx2.ASGITransport(server.api))
    async with openai.AsyncOpenAI(base_url="http://talkray/v1", api_key="any", http_client=http) as client:
        consents = client.audio.voice_consents
        consent = await consents.create(name="Ada agrees", language="en-US", recording=("c.wav", wav(1)))
        assert consent.id.startswith("cons_")
        assert [each.id async for each in consents.list()] == [consent.id]
        assert (await consents.retrieve(consent.id)).name == "Ada agrees"
        assert (await consents.update(consent.id, name="Agreed")).name == "Agreed"
        voices = client.audio.voices
        voice = await voices.create(name="ada", audio_sample=("a.wav", wav()), consent=consent.id)
        assert voice.type == "audio_sample"
        speech = await client.audio.speech.create(model="tts-1", voice=voice.id, input="Hi.", response_format="pcm")
        assert speech.content
        with pytest.raises(openai.ConflictError, match="Delete these voices first"):
            await consents.delete(consent.id)
        for deleted, wanted in ((await voices.delete("ADA"), voice.id), (await consents.delete("agreed"), consent.id)):
            assert (deleted.deleted, deleted.id) == (True, wanted)


async def test_a_folder_on_several_nodes_is_refused(folder: Path) -> None:
    with pytest.raises(StartError, match="2 nodes"):
        open_voices(VoiceSettings(store=str(folder)), num_nodes=2)
    unset = open_voices(VoiceSettings(), num_nodes=2)
    VISITOR.set(Visitor(""))
    assert await unset.voices() == []
    with pytest.raises(Exception, match=r"api\.voices\.store"):
        await unset.add_consent("a", "en", SentRecording(wav()), field="recording")
