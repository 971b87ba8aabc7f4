"""What the person who started the server sees of each request."""

import asyncio
import json
import os
import tempfile
from pathlib import Path

import httpx
import pytest

from deployments.errors import EngineError
from deployments.protocol import FinishReason, SynthesisRequest
from deployments.serving import reports
from serve_app.api.access.keys import create_key
from serve_app.api.records.request_log import line, shown
from serve_app.api.records.request_record import Entry, RequestRecord
from serve_app.config import AccessSettings, AdmissionSettings, ApiSettings
from serve_app.speech.segments import Utterance
from tests.serve_app import asgi
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, utterance
from tests.serve_app.one_model import client_for, client_of, one_api

pytestmark = pytest.mark.anyio

SECRET = "Nobody may read this."
BODY = {"input": SECRET, "voice": "ryan", "response_format": "pcm"}
SECOND = 2 * CUSTOM_VOICE.sample_rate


async def entries(
    *bodies: object, script: list[Step] | None = None, settings: ApiSettings | None = None, **headers: str
) -> list[Entry]:
    """What is shown of a request for each body."""
    found: list[Entry] = []
    synthesizer = FakeSynthesizer(script=utterance() if script is None else script)
    transport = httpx.ASGITransport(one_api(synthesizer, settings or ApiSettings()), raise_app_exceptions=False)
    with tempfile.TemporaryDirectory() as folder, shown(found.append, Path(folder)):
        async with httpx.AsyncClient(transport=transport, base_url="http://talkray") as client:
            for body in bodies:
                await client.post("/v1/audio/speech", json=body, headers=headers)
    assert SECRET not in json.dumps(found)
    return found


async def test_what_was_spoken() -> None:
    headers = {"x-request-id": "mine", "x-forwarded-for": "192.0.2.7"}
    [entry] = await entries(BODY, script=[chunk(bytes(SECOND)), *utterance(0)], **headers)
    assert entry.items() >= {"id": "mine", "client": "192.0.2.7", "voice": "ryan", "audio_s": 1.0}.items()
    assert 0 <= entry["ttfa_ms"] < 10_000
    assert entry["outcome"] == "stop"


async def test_seconds_are_those_that_are_heard() -> None:
    [entry] = await entries(BODY | {"speed": 2}, script=[chunk(bytes(SECOND)), *utterance(0)])
    assert entry["audio_s"] == 0.5


async def test_what_was_refused() -> None:
    refused = await entries(BODY | {"voice": "nobody"}, {}, [], BODY | {"model": "other"})
    outcomes = ("voice_not_found", "missing_required_parameter", "invalid_json", "model_not_found")
    told = [(entry["outcome"], entry["voice"], entry["ttfa_ms"]) for entry in refused]
    assert told == [(outcome, None, None) for outcome in outcomes]


async def test_who_was_not_let_in() -> None:
    [entry] = await entries(BODY, settings=ApiSettings(access=AccessSettings(allowed_hosts=("other",))))
    assert (entry["outcome"], entry["client"]) == ("forbidden", "127.0.0.1")


async def test_what_the_door_counts() -> None:
    once = ApiSettings(admission=AdmissionSettings(client_requests_per_minute=1))
    assert [entry["outcome"] for entry in await entries(BODY, BODY, settings=once)] == ["stop", "rate_limit_exceeded"]


async def test_what_broke() -> None:
    [entry] = await entries(BODY, script=[chunk(bytes(SECOND)), EngineError("boom")])
    assert (entry["outcome"], entry["ttfa_ms"] is None) == ("engine_error", False)


async def test_a_probe_is_not_worth_a_line_and_a_wrong_path_is(tmp_path: Path) -> None:
    found: list[Entry] = []
    with shown(found.append, tmp_path):
        async with client_for(FakeSynthesizer(info=None)) as client:
            for path in ("/health", "/ready", "/v1/nothing"):
                await client.get(path)
            await client.post("/v1/audio/speech", json=BODY)
    assert [entry["outcome"] for entry in found] == ["not_found", "not_ready"]


async def test_each_utterance_of_a_socket(tmp_path: Path) -> None:
    found: list[Entry] = []
    api = one_api(FakeSynthesizer(script=utterance()), ApiSettings())
    with shown(found.append, tmp_path):
        async with asgi.websocket(api, "/v1/audio/speech/ws", headers={"x-request-id": "ws"}) as connection:
            await connection.next()
            for fields in ({"voice": "ryan"}, {"voice": "nobody"}, {"type": "sing"}):
                message = {"type": "speak", "input": SECRET, **fields}
                connection.receive({"type": "websocket.receive", "text": json.dumps(message)})
                while '"done"' not in (sent := (await connection.next()).get("text") or "") and '"error"' not in sent:
                    pass
            connection.receive({"type": "websocket.disconnect", "code": 1000})
            await connection.task
    assert [(entry["id"], entry["voice"], entry["outcome"]) for entry in found] == [
        ("ws-1", "ryan", "stop"),
        ("ws-2", None, "voice_not_found"),
        ("ws", None, "invalid_value"),
    ]
    assert {(entry["method"], entry["path"]) for entry in found} == {("WS", "/v1/audio/speech/ws")}
    assert SECRET not in json.dumps(found)


def record(**fields: object) -> RequestRecord:
    return RequestRecord("id", 0, error="x", **fields)  # type: ignore[arg-type]


def test_a_line_is_for_people() -> None:
    entry: Entry = {"time": "2026-01-02T03:04:05+0000", "id": "a1", "client": "::1", "voice": "nora"}
    entry |= {"method": "POST", "path": "/v1/audio/speech", "key": None}
    spoken = entry | {"audio_s": 2.34, "ttfa_ms": 120, "outcome": "stop"}
    asked = "2026-01-02 03:04:05  POST /v1/audio/speech  a1  ::1"
    assert line(spoken) == f"{asked}  nora  2.3 s of audio, the first after 120 ms  stop"
    refused = entry | {"key": "Ada's phone", "voice": None, "audio_s": 0.0, "ttfa_ms": None, "outcome": "forbidden"}
    assert line(refused) == f"{asked}  key Ada's phone  forbidden"


async def test_who_asked_for_what(tmp_path: Path) -> None:
    key = create_key(tmp_path / "keys.json", "Ada's phone")
    settings = ApiSettings(access=AccessSettings(keys_file=tmp_path / "keys.json"))
    [entry] = await entries(BODY, settings=settings, authorization=f"Bearer {key}")
    assert (entry["method"], entry["path"], entry["key"]) == ("POST", "/v1/audio/speech", "Ada's phone")
    assert key not in json.dumps(entry)


def test_what_a_stopped_server_cut_off_has_a_line(tmp_path: Path) -> None:
    found: list[Entry] = []
    with shown(found.append, tmp_path):
        for name in ("cut", "whole"):
            spoken = RequestRecord(name, 0, method="POST", path="/v1/audio/speech")
            spoken.note_speech(Utterance(SynthesisRequest(name, "", voice="ryan")), CUSTOM_VOICE, None, speed=1)
        spoken.usage.finish_reason = FinishReason.STOP
        spoken.publish()
    told = [(entry["id"], entry["voice"], entry["outcome"]) for entry in found]
    assert told == [("whole", "ryan", "stop"), ("cut", "ryan", "server stopped")]


async def test_a_stream_whose_request_is_cancelled_has_a_line(tmp_path: Path) -> None:
    found: list[Entry] = []
    api = one_api(FakeSynthesizer(script=[chunk(bytes(SECOND)), asyncio.Event()]), ApiSettings())
    with shown(found.append, tmp_path):
        async with asgi.http(api, "POST", "/v1/audio/speech", body=BODY) as connection:
            while not (await connection.next()).get("body"):
                pass
    assert [entry["outcome"] for entry in found] == ["client left"]


def test_a_client_writes_no_line_of_its_own() -> None:
    assert record(client="1.2.3.4\n\x1b[2J" + "x" * 1000).entry()["client"] == "1.2.3.4??" + "?2J" + "x" * 52


def test_an_output_that_nobody_reads_any_more_stops_nothing(tmp_path: Path) -> None:
    asked: list[Entry] = []

    def show(entry: Entry) -> None:
        asked.append(entry)
        raise BrokenPipeError

    with shown(show, tmp_path):
        record().publish()
        record().publish()
    assert len(asked) == 2


def test_stages_of_a_start_go_the_same_way(tmp_path: Path) -> None:
    stages, found = list[str](), list[Entry]()
    with shown(found.append, tmp_path, report=stages.append):
        reports.report_stage("loading")
        record().publish()
        reports.report_stage("warm")
    assert (stages, [entry["id"] for entry in found]) == (["loading", "warm"], ["id"])


def test_replicas_are_told_of_the_pipe_while_it_is_read(tmp_path: Path) -> None:
    with shown(lambda _: None, tmp_path):
        assert Path(os.environ[reports.VARIABLE]).parent == tmp_path
    assert reports.VARIABLE not in os.environ


def test_a_replica_does_not_wait_for_a_reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setenv(reports.VARIABLE, str(tmp_path / "pipe"))
    record().publish()  # nobody reads
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    for _ in range(10_000):  # more than there is room for
        record().publish()
    os.close(reader)
    monkeypatch.setenv(reports.VARIABLE, str(tmp_path / "gone"))
    record().publish()
    assert not (tmp_path / "gone").exists()


async def test_a_record_has_its_dialect_also_where_the_door_refuses_it(tmp_path: Path) -> None:
    kept: list[RequestRecord] = []
    create_key(tmp_path / "keys.json", "ada")
    access = AccessSettings(keys_file=tmp_path / "keys.json")
    for settings in (ApiSettings(), ApiSettings(access=access)):
        async with client_of(one_api(FakeSynthesizer(script=utterance()), settings, keep=kept.append)) as client:
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
    assert kept[0].story()["trace_id"] is None
