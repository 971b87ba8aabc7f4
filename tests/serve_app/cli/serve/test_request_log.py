"""What the person who started the server sees of each request."""

import asyncio
import json
from pathlib import Path
from threading import Event

import pytest

from deployments.errors import EngineError
from serve_app.api.request_record import Entry, RequestRecord
from serve_app.cli.key_file import create_key
from serve_app.cli.serve import request_log
from serve_app.cli.serve.request_log import followed, line
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.extensions.records import record_keeper
from serve_app.extensions.records.record_keeper import RequestLines
from serve_app.extensions.records.request_lines import entry_of, story_of
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, utterance
from tests.serve_app.one_model import client_of, one_api

pytestmark = pytest.mark.anyio

SECRET = "Nobody may read this."
BODY = {"input": SECRET, "voice": "ryan", "response_format": "pcm"}
SECOND = 2 * CUSTOM_VOICE.sample_rate
BROKEN = EngineError("boom")


async def entries(
    *bodies: object, script: list[Step] | None = None, settings: ApiSettings | None = None, **headers: str
) -> list[Entry]:
    """What is kept of a request for each body."""
    kept: list[RequestRecord] = []
    synthesizer = FakeSynthesizer(script=utterance() if script is None else script)
    api = one_api(synthesizer, settings or ApiSettings(), on_end=kept.append)
    async with client_of(api, raises=False) as client:
        for body in bodies:
            await client.post("/v1/audio/speech", json=body, headers=headers)
    found = [entry_of(record) for record in kept]
    assert SECRET not in json.dumps(found)
    return found


@pytest.mark.parametrize(
    ("speed", "end", "outcome"), [(1, utterance(0), "stop"), (2, utterance(0), "stop"), (1, [BROKEN], "engine_error")]
)
async def test_what_was_spoken_for_whom(tmp_path: Path, speed: float, end: list[Step], outcome: str) -> None:
    key = create_key(tmp_path / "keys.json", "Ada's phone")
    headers = {"x-request-id": "mine", "x-forwarded-for": "192.0.2.7", "authorization": f"Bearer {key}"}
    settings = ApiSettings(access=AccessSettings(keys_file=tmp_path / "keys.json"))
    script = [chunk(bytes(SECOND)), *end]
    [entry] = await entries(BODY | {"speed": speed}, script=script, settings=settings, **headers)
    asked = {"id": "mine", "client": "192.0.2.7", "method": "POST", "path": "/v1/audio/speech", "key": "Ada's phone"}
    assert entry.items() >= {**asked, "voice": "ryan", "outcome": outcome}.items()
    assert 0 <= entry["ttfa_ms"] < 10_000
    assert entry["audio_s"] == 1 / speed
    assert key not in json.dumps(entry)


async def test_what_was_refused() -> None:
    refused = await entries(BODY | {"voice": "nobody"}, {}, [], BODY | {"model": "other"})
    outcomes = ("voice_not_found", "missing_required_parameter", "invalid_json", "model_not_found")
    told = [(entry["outcome"], entry["voice"], entry["ttfa_ms"]) for entry in refused]
    assert told == [(outcome, None, None) for outcome in outcomes]


async def test_who_was_not_let_in() -> None:
    [entry] = await entries(BODY, settings=ApiSettings(access=AccessSettings(allowed_hosts=("other",))))
    assert (entry["outcome"], entry["client"]) == ("forbidden", "127.0.0.1")
    once = ApiSettings(admission=AdmissionSettings(client_requests_per_minute=1))
    assert [entry["outcome"] for entry in await entries(BODY, BODY, settings=once)] == ["stop", "rate_limit_exceeded"]


async def test_a_probe_is_not_worth_a_line_and_a_wrong_path_is() -> None:
    kept: list[RequestRecord] = []
    async with client_of(one_api(FakeSynthesizer(info=None), ApiSettings(), on_end=kept.append)) as client:
        for path in ("/health", "/ready", "/v1/nothing"):
            await client.get(path)
        await client.post("/v1/audio/speech", json=BODY)
    assert [record.error for record in kept] == ["not_found", "not_ready"]


async def test_each_utterance_of_a_socket() -> None:
    kept: list[RequestRecord] = []
    api = one_api(FakeSynthesizer(script=utterance()), ApiSettings(), on_end=kept.append)
    async with asgi.websocket(api, "/v1/audio/speech/ws", headers={"x-request-id": "ws"}) as connection:
        await connection.next()
        for fields in ({"voice": "ryan"}, {"voice": "nobody"}, {"type": "sing"}):
            message = {"type": "speak", "input": SECRET, **fields}
            connection.receive({"type": "websocket.receive", "text": json.dumps(message)})
            while '"done"' not in (sent := (await connection.next()).get("text") or "") and '"error"' not in sent:
                pass
        connection.receive({"type": "websocket.disconnect", "code": 1000})
        await connection.task
    found = [entry_of(record) for record in kept]
    assert [(entry["id"], entry["voice"], entry["outcome"]) for entry in found] == [
        ("ws-1", "ryan", "stop"),
        ("ws-2", None, "voice_not_found"),
        ("ws", None, "invalid_value"),
    ]
    assert {(entry["method"], entry["path"]) for entry in found} == {("WS", "/v1/audio/speech/ws")}
    assert SECRET not in json.dumps(found)


def test_a_line_is_for_people() -> None:
    entry: Entry = {"time": "2026-01-02T03:04:05+0000", "id": "a1", "client": "::1", "voice": "nora"}
    entry |= {"method": "POST", "path": "/v1/audio/speech", "key": None}
    spoken = entry | {"audio_s": 2.34, "ttfa_ms": 120, "outcome": "stop"}
    asked = "2026-01-02 03:04:05  POST /v1/audio/speech  a1  ::1"
    assert line(spoken) == f"{asked}  nora  2.3 s of audio, the first after 120 ms  stop"
    refused = entry | {"key": "Ada's phone", "voice": None, "audio_s": 0.0, "ttfa_ms": None, "outcome": "forbidden"}
    assert line(refused) == f"{asked}  key Ada's phone  forbidden"


async def test_a_stream_whose_request_is_cancelled_has_a_line() -> None:
    kept: list[RequestRecord] = []
    api = one_api(FakeSynthesizer(script=[chunk(bytes(SECOND)), asyncio.Event()]), ApiSettings(), on_end=kept.append)
    async with asgi.http(api, "POST", "/v1/audio/speech", body=BODY) as connection:
        while not (await connection.next()).get("body"):
            pass
    assert [entry_of(record)["outcome"] for record in kept] == ["client left"]


def test_a_client_writes_no_line_of_its_own() -> None:
    record = RequestRecord("id", 0, error="x", client="1.2.3.4\n\x1b[2J" + "x" * 1000)
    assert entry_of(record)["client"] == "1.2.3.4??" + "?2J" + "x" * 52


@pytest.fixture
def logs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of Serve's logs below Ray's folder `tmp_path`, looked at without waiting."""
    monkeypatch.setattr(request_log, "_POLL_S", 0.001)
    monkeypatch.setattr(request_log, "HAND_ON_S", 0.0)
    return tmp_path / "session_2026-11-29/logs/serve"


@pytest.mark.parametrize("file_bytes", [1 << 20, 1], ids=["one file", "a file for each line"])
@pytest.mark.parametrize("is_broken", [False, True], ids=["", "our output is closed"])
def test_the_lines_of_ingress_replicas_are_shown_once(
    logs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, file_bytes: int, is_broken: bool
) -> None:
    monkeypatch.setattr(record_keeper, "_FILE_BYTES", file_bytes)
    found, three_came = list[Entry](), Event()

    def show(entry: Entry) -> None:
        found.append(entry)
        if len(found) == 3:
            three_came.set()
        if is_broken:
            raise BrokenPipeError

    with followed(tmp_path, show):
        replicas = [RequestLines(logs, name) for name in ("Ingress#a", "Ingress#b", "Jobs#c")]
        for replica in replicas:
            for number in range(2):
                replica.receive(RequestRecord(f"{replica._ingress['ingress']} {number}", 0, error="x"))
        assert three_came.wait(30), "while the server runs"
        replicas[0].receive(RequestRecord("at the end", 0, error="x"))
        for replica in replicas:
            replica.flush(is_last=True)
    ids = [entry["id"] for entry in found]
    assert sorted(ids) == ["Ingress#a 0", "Ingress#a 1", "Ingress#b 0", "Ingress#b 1", "at the end"]
    assert ids.index("Ingress#a 0") < ids.index("Ingress#a 1")


def test_without_requests_the_end_waits_for_no_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(request_log.time, "sleep", slept.append)
    with followed(tmp_path, lambda entry: None):
        pass
    assert slept == []


def test_a_line_is_shown_when_it_is_whole_also_in_a_new_file_with_the_inode_of_another(logs: Path) -> None:
    logs.mkdir(parents=True)
    file, ray, places = logs / "talkray_requests_Ingress_a.jsonl", logs.parents[2], dict[int, int]()
    told = []
    for content in ("", "one\ntw", "one\ntwo\n", "one\ntwo\n", "6\n"):
        file.write_text(content)
        told.append(list(request_log._new_lines(ray, places)))
    assert told == [[], [b"one"], [b"two"], [], [b"6"]]


@pytest.mark.parametrize("opened_first", range(5))
def test_files_renamed_meanwhile_keep_order(logs: Path, monkeypatch: pytest.MonkeyPatch, opened_first: int) -> None:
    monkeypatch.setattr(record_keeper, "_FILE_BYTES", 1)  # a file for each line
    lines, opens, open_file = RequestLines(logs, "Ingress#a"), iter(range(100)), Path.open
    lines.receive(RequestRecord("first", 0, error="x"))
    lines.receive(RequestRecord("second", 0, error="x"))

    def open_after_a_rename(path: Path, mode: str) -> object:
        if next(opens) == opened_first:
            lines.receive(RequestRecord("third", 0, error="x"))
        return open_file(path, mode)

    monkeypatch.setattr(Path, "open", open_after_a_rename)
    places = dict[int, int]()
    found = [json.loads(each)["id"] for _ in range(2) for each in request_log._new_lines(logs.parents[2], places)]
    assert found == ["first", "second", "third"]
    lines.flush(is_last=True)


async def test_a_record_has_its_dialect_also_where_the_door_refuses_it(tmp_path: Path) -> None:
    kept: list[RequestRecord] = []
    create_key(tmp_path / "keys.json", "ada")
    access = AccessSettings(keys_file=tmp_path / "keys.json")
    for settings in (ApiSettings(), ApiSettings(access=access)):
        async with client_of(one_api(FakeSynthesizer(script=utterance()), settings, on_end=kept.append)) as client:
            await client.post("/v1/audio/speech", json=BODY, headers={"traceparent": "00-1-2-01"})
            await client.post("/v1/audio/speech", json={"input": SECRET, "voice_id": "ryan"})
            await client.post("/v1/text-to-speech/ryan", json={"text": SECRET})
            await client.post("/nowhere")
    told = [(record.dialect, record.error) for record in kept]
    assert told[:4] == [("OpenAI", None), ("Mistral", None), ("ElevenLabs", None), ("", "not_found")]
    assert told[4:] == [*[("OpenAI", "invalid_api_key")] * 2, *[("", "invalid_api_key")] * 2]
    assert [stage for stage, _ in kept[0].usage.marks] == []  # a synthesizer that is none leaves no marks
    assert (kept[0].characters, kept[0].usage.model, kept[0].usage.voice) == (21, CUSTOM_VOICE.name, "ryan")
    assert kept[0].trace == {"traceparent": "00-1-2-01"}
    assert story_of(kept[0])["trace_id"] is None
