"""What is stored obeys the limits of requests, also where it was stored before them or by two processes at once."""

import asyncio
import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from httpx import AsyncClient

from deployments.errors import Conflict, NotFound
from serve_app.api.access.callers import EVERYBODY, VISITOR
from serve_app.audio import recordings
from serve_app.extensions.voices import library, voice_store
from serve_app.extensions.voices.library import Voices
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import StoredConsent, StoredVoice, new_id, new_version, packed
from serve_app.extensions.voices.voice_store import Record, StoreFailed, VoiceStore
from tests.serve_app.extensions.voices.speakers import Server, files_in, speak_and_derive, store, wav
from tests.serve_app.fake import BASE
from tests.serve_app.one_model import refusal
from tools.suites.rows import is_here

pytestmark = pytest.mark.anyio
SPEECH = "/v1/audio/speech"
LONG = "word " * 200_000
# Each form with texts that are kept: its path, its other fields, what it calls the recording.
FORMS = {
    "OpenAI": ("/v1/audio/voices", {"name": "ada"}, "audio_sample"),
    "ElevenLabs": ("/v1/voices/add", {"name": "ada"}, "files"),
    "Cartesia": ("/voices/clone", {"name": "ada"}, "clip"),
    "consent": ("/v1/audio/voice_consents", {"name": "ada", "language": "en"}, "recording"),
}
FORMS = {name: form for name, form in FORMS.items() if is_here(form[0])}
FIELDS = [
    *(
        (form, field)
        for form in ("OpenAI", "ElevenLabs", "Cartesia")
        for field in ("description", "consent", "ref_text")
    ),
    *((form, field) for form in ("OpenAI", "Cartesia", "consent") for field in ("language", "name")),
    *((form, "reference_text") for form in ("OpenAI", "ElevenLabs", "Cartesia")),
    ("Cartesia", "transcript"),
    ("OpenAI", "speaker_description"),
    ("ElevenLabs", "labels"),
]


@pytest.fixture(autouse=True)
def everybody() -> None:
    VISITOR.set(EVERYBODY)


def stored_in(folder: Path) -> list[str]:
    return [file.name for file in files_in(folder)]


def rewritten(folder: Path, kind: str, record_id: object, **changes: object) -> None:
    """A record with texts that no route takes any more, as it was stored before the limits."""
    file = folder / kind / f"{record_id}.json"
    record = {**json.loads(file.read_text())["record"], **changes}
    digest = hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest()
    file.write_text(json.dumps({"sha256": digest, "record": record}))


@pytest.mark.parametrize(("form", "field"), [row for row in FIELDS if row[0] in FORMS])
async def test_a_text_that_is_too_long_is_refused(folder: Path, client: AsyncClient, form: str, field: str) -> None:
    path, fields, recording = FORMS[form]
    text = json.dumps({"language": LONG[:5000]}) if field == "labels" else LONG[:5000].strip()
    sent = {**fields, field: text}
    answer = await client.post(path, data=sent, files={recording: ("a.wav", wav(), "audio/wav")})
    assert answer.status_code == 400, answer.text
    assert len(answer.text) < 1000
    param = {"labels": "language", "speaker_description": "description"}.get(field, field)
    assert answer.json()["error"]["param"] == ("ref_text" if "text" in field or "transcript" in field else param)
    assert stored_in(folder) == []


@pytest.mark.parametrize("field", ["description", "name", "language", "consent"])
async def test_so_is_one_of_a_change_or_import(server: Server, client: AsyncClient, tmp_path: Path, field: str) -> None:
    most = {"ref_text": "t" * 4096, "description": "d" * 500, "consent": "c" * 1000}
    told = await store(client, "n" * 80, **most)
    if field != "consent":
        assert refusal(await client.post(f"/v1/audio/voices/{told['id']}", json={field: LONG})) == (400, field)
    voice = await server.voices.get("n" * 80)
    long = LONG if field != "consent" else {"statement": LONG}
    with pytest.raises(ValueError, match=field):
        StoredVoice.model_validate({**voice.model_dump(), field: long})


async def test_a_voice_from_before_the_limits_stays(
    folder: Path, server: Server, client: AsyncClient, caplog: pytest.LogCaptureFixture
) -> None:
    """Listed, cut, deletable; its recording with a long transcript speaks no more, and says so."""
    told = await store(client, "ada", ref_text="Hiss.")
    sample = {"audio_sample": ("a.wav", wav(1))}
    await client.post(f"/v1/audio/voices/{told['id']}", data={"style": "calm", "ref_text": "Yes."}, files=sample)
    [take, calm] = (await server.voices.get("ada")).model_dump(mode="json")["takes"]
    consent = {"statement": LONG}
    takes = [{**take, "text": LONG}, calm]
    rewritten(folder, "voices", told["id"], description=LONG, language=LONG, consent=consent, takes=takes)
    shown = (await client.get(f"/v1/audio/voices/{told['id']}")).json()
    restarted = Server(folder)
    with caplog.at_level(logging.WARNING):
        async with restarted.client() as other:
            shown = (await other.get(f"/v1/audio/voices/{told['id']}")).json()
            listed = (await other.get("/v1/audio/voices")).json()["uploaded_voices"]
            spoken = await other.post(SPEECH, json={"input": "Hi.", "voice": "ada"})
            calmly = await other.post(SPEECH, json={"input": "Hi.", "voice": "ada", "instructions": "calm"})
            renamed = await other.post(f"/v1/audio/voices/{told['id']}", json={"name": "grace"})
            assert (await other.get(f"/v1/audio/voices/{told['id']}/file")).content[:2] == b"PK"
            deleted = await other.delete(f"/v1/audio/voices/{told['id']}")
    assert [len(shown[field]) for field in ("description", "language", "consent")] == [500, 80, 1000]
    assert [each["id"] for each in listed] == [told["id"]]
    assert len(listed[0]["description"]) == 500
    assert (spoken.status_code, spoken.json()["error"]["code"]) == (400, "recording_disabled")
    assert "1000000 characters" in spoken.json()["error"]["message"]
    assert "1000000 characters" in shown["takes"][0]["disabled"]
    assert "disabled" not in shown["takes"][1]
    assert [calmly.status_code, renamed.status_code, deleted.status_code] == [200, 200, 200]
    assert stored_in(folder) == []
    for field in ("description", "language", "consent.statement", "takes.0.text"):
        assert f"{told['id']}: {field} has 1000000 characters" in caplog.text


async def test_a_record_that_is_too_large_is_damaged(
    folder: Path, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    told = await store(client, "ada")
    await store(client, "grace", seed=1)
    rewritten(folder, "voices", told["id"], description=LONG)
    monkeypatch.setattr(voice_store, "_MOST_RECORD_BYTES", 500_000)
    async with Server(folder).client() as other:
        listed = (await other.get("/v1/audio/voices")).json()["uploaded_voices"]
    assert [each["name"] for each in listed] == ["grace"]
    assert f"{told['id']}.json is damaged: the file has 10" in caplog.text


async def test_records_count_in_the_quota_and_who_has_too_much_keeps_it(folder: Path, client: AsyncClient) -> None:
    first = await store(client, "ada", description="d" * 500)
    lexicon = {"name": "x", "rules": [{"string_to_replace": "a", "type": "alias", "alias": "b"}]}
    assert (await client.post("/v1/pronunciation-dictionaries/add-from-rules", json=lexicon)).status_code == 200
    num_bytes = sum(len(file.read_bytes()) for file in files_in(folder))
    roomy, full = (Server(folder, voices=VoiceSettings(max_bytes=num_bytes + more)) for more in (2000, -1))
    async with roomy.client() as client:
        dictionary = (await client.get("/v1/pronunciation-dictionaries")).json()["pronunciation_dictionaries"][0]["id"]
        rules = [{"string_to_replace": f"w{n}", "type": "alias", "alias": "b" * 150} for n in range(20)]
        added = await client.post(f"/v1/pronunciation-dictionaries/{dictionary}/add-rules", json={"rules": rules})
        assert added.json()["error"]["code"] == "quota_exceeded"
        assert (await client.post(f"/v1/audio/voices/{first['id']}", json={"name": "ada again"})).status_code == 200
    voice = await roomy.voices.get("ada again")
    for server in (full, Server(folder, voices=VoiceSettings(max_voices=1))):
        assert await server.voices.keep(voice, {}) == voice  # imported again, before the first read of the store
        async with server.client() as client:
            assert len((await client.get("/v1/audio/voices")).json()["uploaded_voices"]) == 1
            with pytest.raises(AssertionError, match="quota_exceeded"):
                await store(client, "grace")
            assert (await client.post(f"/v1/audio/voices/{first['id']}", json={"name": "eve"})).status_code == 200
            assert (await client.post(SPEECH, json={"input": "Hi.", "voice": "eve"})).status_code == 200


async def test_what_is_stored_at_once_fills_the_quota_and_no_more(folder: Path) -> None:
    async def make(number: int) -> int:
        files = {"audio_sample": ("a.wav", wav(number))}
        return (await client.post("/v1/audio/voices", data={"name": f"one {number}"}, files=files)).status_code

    async with Server(folder, voices=VoiceSettings(max_voices=3)).client() as client:
        assert sorted(await asyncio.gather(*map(make, range(8)))) == [200] * 3 + [409] * 5


@pytest.mark.parametrize("moment", ["before the write", "after it"])
@pytest.mark.parametrize("late", ["voice", "consent"])
async def test_a_consent_goes_meanwhile(folder: Path, monkeypatch: pytest.MonkeyPatch, moment: str, late: str) -> None:
    """In another process: one of both is taken back, whichever is late."""
    server, other = Server(folder), Server(folder)
    async with server.client() as client:
        path, fields, recording = FORMS["consent"]
        told = (await client.post(path, data=fields, files={recording: ("a.wav", wav())})).json()
    consent = await other.voices.get_other(StoredConsent, told["id"])
    name, loop = ("write" if late == "voice" else "delete"), asyncio.get_running_loop()
    original: Callable[..., None] = getattr(VoiceStore, name)

    def beside(place: VoiceStore, record: Record, *args: object) -> None:
        monkeypatch.setattr(VoiceStore, name, original)
        if moment == "after it":
            original(place, record, *args)
        work = other.voices.remove(consent) if late == "voice" else add(other.voices)
        asyncio.run_coroutine_threadsafe(work, loop).result(30)
        if moment == "before the write":
            original(place, record, *args)
        asyncio.run_coroutine_threadsafe(other.voices._forget_gone(), loop).result(30)

    async def add(voices: Voices) -> None:
        async with (server if voices is server.voices else other).client() as client:
            await store(client, "ada", consent=told["id"])

    monkeypatch.setattr(VoiceStore, name, beside)
    with pytest.raises((Conflict, NotFound, AssertionError)):  # the late one, or the one beside it
        await (add(server.voices) if late == "voice" else server.voices.remove(consent))
    fresh = Server(folder).voices
    named = [voice.consent.recording for voice in await fresh.voices()]
    kept = {each.id: each for each in await fresh.consents()}
    assert set(named) <= set(kept)
    for voices in (server.voices, other.voices):
        await voices._forget_gone()
        assert all([await voices.recording(each, each.take) for each in kept.values()])


async def test_a_store_that_was_away_loses_nothing(
    folder: Path, server: Server, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unmounted, its folder lists as empty; it is back while files are cleared."""
    clear = VoiceStore.clear
    await store(client, "ada")

    def clearing(*args: Any, **options: Any) -> None:
        folder.rmdir()
        away.rename(folder)
        clear(*args, **options)

    away = folder.rename(folder.with_name("away"))  # noqa: ASYNC240
    folder.mkdir()  # noqa: ASYNC240
    monkeypatch.setattr(VoiceStore, "clear", clearing)
    await server.voices._forget_gone()
    [voice] = await server.voices.all_of(StoredVoice)
    assert await server.voices.recording(voice, voice.takes[0])


async def test_a_file_that_cannot_be_removed_delays_nothing_else(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten, clear = list[bytes](), VoiceStore.clear

    async def forget(versions: tuple[bytes, ...]) -> None:
        forgotten.extend(versions)

    def refusing(place: VoiceStore, record: Record, **options: Any) -> None:
        if record.name == "first":
            raise StoreFailed("not this one")
        clear(place, record, **options)

    server = Server(folder, forget=forget)
    async with server.client() as client:
        told = [str((await store(client, name))["id"]) for name in ("first", "second")]
    server.voices.files().delete(*(f"voices/{each}.json" for each in told))  # a deletion that ends here
    monkeypatch.setattr(VoiceStore, "clear", refusing)
    await server.voices._forget_gone()
    assert len(forgotten) == 2
    assert [file.parent.name for file in files_in(folder)] == told[:1]


def derived_in(folder: Path) -> list[str]:
    return [name for name in stored_in(folder) if name.endswith(".npz")]


async def test_what_was_derived_of_a_version_goes_with_it(folder: Path, server: Server, client: AsyncClient) -> None:
    told = await store(client, "ada", ref_text="Hiss.")
    for number in range(3):
        await speak_and_derive(server)
        await server.voices._keep_prompts()
        assert len(derived_in(folder)) == 1
        changed = await client.post(f"/v1/audio/voices/{told['id']}", json={"description": f"{number}"})
        assert changed.status_code == 200
        assert derived_in(folder) == []


@pytest.mark.parametrize("end", ["deleted", "changed"])
async def test_nothing_is_derived_of_a_voice_that_left(folder: Path, monkeypatch: pytest.MonkeyPatch, end: str) -> None:
    """Elsewhere, while the vector is being written."""
    server, other = Server(folder), Server(folder)
    async with server.client() as client:
        told = await store(client, "ada", ref_text="Hiss.")
    await speak_and_derive(server)
    put, loop, voice = VoiceStore.put, asyncio.get_running_loop(), await other.voices.get(str(told["id"]))

    def late(place: VoiceStore, path: str, content: bytes) -> None:
        if path.endswith(".npz"):
            monkeypatch.setattr(VoiceStore, "put", put)
            work = other.voices.remove(voice) if end == "deleted" else other.voices.change_voice(voice, {"name": "eve"})
            asyncio.run_coroutine_threadsafe(work, loop).result(30)
        put(place, path, content)

    monkeypatch.setattr(VoiceStore, "put", late)
    await server.voices._keep_prompts()
    assert derived_in(folder) == []
    assert bool(stored_in(folder)) is (end == "changed")


async def test_what_a_killed_deletion_left_is_removed_by_the_others(folder: Path) -> None:
    server, other = Server(folder), Server(folder)
    async with server.client() as client:
        told = await store(client, "ada", ref_text="Hiss.")
        await speak_and_derive(server)
        await server.voices._keep_prompts()
        stays = await store(client, "grace")
        exported = await server.voices.get(str(stays["id"]))
        recording = await server.voices.recording(exported, exported.takes[0])
    for name in ("ada", "grace"):
        await other.voices.get(name)
    (folder / "voices" / f"{told['id']}.json").unlink()  # a deletion that ends here
    (folder / "voices" / f"{stays['id']}.json").unlink()
    later_s = time.time() + 5
    [file] = (folder / "audio" / str(stays["id"])).iterdir()
    os.utime(file, (later_s, later_s))  # it is being stored again, under its own id
    await other.voices._forget_gone()
    assert stored_in(folder) == [file.name]
    await other.voices.keep(exported, {exported.takes[0].sha256: recording})


async def test_cancelled_first_streams_make_room_for_others(
    folder: Path, server: Server, client: AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_MOST_UNDERIVED", 2)
    await store(client, "ada", ref_text="Hiss.")
    voice = await server.voices.get("ada")
    for _ in range(3):  # whose prompts never come
        copy = voice.model_copy(update={"version": new_version()})
        await server.voices.reference(copy, copy.takes[0].style, BASE, x_vector_only=False)
    await speak_and_derive(server)
    await server.voices._keep_prompts()
    assert len(derived_in(folder)) == 1


async def test_unknown_names_share_looks_at_the_store(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(folder)
    looks = Mock(side_effect=server.voices.files().marks)
    monkeypatch.setattr(VoiceStore, "marks", looks)
    await server.voices.refresh()
    began_s = time.monotonic()
    for number in range(10):
        assert await server.voices.find(f"nobody {number}") is None
    assert looks.call_count <= 4 + (time.monotonic() - began_s) / 0.1


async def test_a_failed_look_fails_for_all_who_share_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VoiceStore, "marks", Mock(side_effect=StoreFailed("away")))
    voices = Server(folder).voices
    looks = await asyncio.gather(*(voices.refresh() for _ in range(3)), return_exceptions=True)
    assert [type(each) for each in looks] == [StoreFailed] * 3
    with pytest.raises(StoreFailed):
        await voices.consents()
    assert (await voices.voices(), (await voices.lexicon_for_all()).words) == ([], {})  # models speak without them


@pytest.mark.parametrize(
    ("path", "items", "key", "limit", "after", "more"),
    [row for row in (
        ("/v1/audio/voices", "voices", "id", "limit", "after", "has_more"),
        ("/v1/voices", "voices", "voice_id", "page_size", "next_page_token", "next_page_token"),
        ("/v2/voices", "voices", "voice_id", "page_size", "next_page_token", "next_page_token"),
        ("/voices", "data", "id", "limit", "starting_after", "next_page"),
        ("/v1/audio/voice_consents", "data", "id", "limit", "after", "last_id"),
        ("/v1/pronunciation-dictionaries", "pronunciation_dictionaries", "id", "page_size", "cursor", "next_cursor"),
        ("/pronunciation-dicts", "data", "id", "limit", "starting_after", "has_more"),
    ) if is_here(row[0])],
)  # fmt: skip
async def test_list_pages(folder: Path, path: str, items: str, key: str, limit: str, after: str, more: str) -> None:
    async with Server(folder, voices=VoiceSettings(max_voices=20)).client() as client:
        for number in range(5):
            await store(client, f"v{number}", seed=number)
            sample = {"recording": ("a.wav", wav(number))}
            await client.post("/v1/audio/voice_consents", data={"name": f"{number}", "language": "en"}, files=sample)
            rules: dict[str, object] = {"name": f"d{number}", "rules": []}
            await client.post("/v1/pronunciation-dictionaries/add-from-rules", json=rules)
        whole = [each[key] for each in (await client.get(path)).json()[items]]
        assert len(whole) >= 5
        paged: list[str] = []
        while True:
            sent = {limit: "2", **({after: paged[-1]} if paged else {})}
            answer = (await client.get(path, params=sent)).json()
            paged += [each[key] for each in answer[items]]
            assert bool(answer["has_more"]) is (len(paged) < len(whole))
            if not answer["has_more"]:
                break
            assert answer[more] in (True, paged[-1])
        assert paged == whole
        for name, bad in ((limit, "0"), (limit, "x"), (limit, "99999"), (limit, "1.5"), (after, "nothing")):
            assert refusal(await client.get(path, params={name: bad})) == (400, name)


@pytest.mark.parametrize("fault", ["read", "missing", "damaged"])
async def test_a_client_learns_no_place_of_the_store(
    folder: Path, client: AsyncClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, fault: str
) -> None:
    await store(client, "ada", ref_text="Hiss.")
    [file] = (folder / "audio").rglob("*.flac")
    if fault == "read":
        file.unlink()
        file.mkdir()
    elif fault == "missing":
        file.unlink()
    else:
        file.write_bytes(b"fLaC")
    recordings._DECODED._results.clear()
    for answer in (await client.post(SPEECH, json={"input": "Hi.", "voice": "ada"}), await client.get(ARCHIVE)):
        assert answer.status_code >= 500
        assert not any(part in answer.text for part in (str(folder), "audio/", ".flac", "store/"))
    assert str(folder) in caplog.text


ARCHIVE = "/v1/audio/voices/ada/file"


async def test_a_deleted_voice_is_told_so(server: Server, client: AsyncClient) -> None:
    await store(client, "ada")
    voice = await server.voices.get("ada")
    server.voices.files().remove(voice)
    with pytest.raises(NotFound, match=r"'ada' .* was deleted"):
        await server.voices.recording(voice, voice.takes[0])


def test_an_archive_holds_one_recording_at_a_time() -> None:
    size, read = 1 << 20, list[str]()
    content = [os.urandom(size) for _ in range(3)]
    takes = [
        {"style": f"s{n}", "sha256": hashlib.sha256(each).hexdigest(), "seconds": 1.0, "num_bytes": size}
        for n, each in enumerate(content)
    ]
    voice = StoredVoice.made(id=new_id("voice"), name="ada", created_at=0, version=new_version(), takes=takes)
    by_digest = {take["sha256"]: each for take, each in zip(takes, content, strict=True)}

    def recording(take: object) -> bytes:
        read.append(take.style)  # type: ignore[attr-defined]
        return by_digest[take.sha256]  # type: ignore[attr-defined]

    sent = 0
    for part in packed(voice, recording):
        sent += len(part)
        assert len(part) < 200_000
        assert len(read) <= sent // size + 1
    assert sent > 3 * size
