import asyncio
import base64
import gzip
import io
import json
import re
import wave
import zlib
from collections.abc import AsyncIterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
from fastapi import FastAPI
from starlette.requests import HTTPConnection

from deployments.errors import EngineError, NotReady, Overloaded, TalkerLost
from deployments.protocol import FinishReason, ModelInfo, Sampling
from serve_app.api.application import _answer_error
from serve_app.api.context import RequestState
from serve_app.api.parsing import client_input, uploads
from serve_app.api.request_record import RequestRecord
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, ApiSettings
from serve_app.extension import Node
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.model_state import ModelState, ModelStatus
from serve_app.speech.speech_models import always
from tests.serve_app import asgi, fake
from tests.serve_app.api.access.test_access_control import every_route
from tests.serve_app.audio.test_recordings import data_url, recording
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, Step, chunk, pcm_of, utterance
from tests.serve_app.one_model import client_for, client_of, one_api, posted
from tools.suites.rows import is_here

pytestmark = pytest.mark.anyio

SPEECH = "/v1/audio/speech"
BODY = {"model": "tts-1", "input": "Hello", "voice": "alloy"}
PCM = BODY | {"response_format": "pcm"}


async def test_an_error_of_a_websocket_is_recorded_too() -> None:
    record = RequestRecord("r", 0, method="WS", path="/")
    await _answer_error(HTTPConnection({"type": "websocket", "state": {"talkray": RequestState(record)}}), NotReady())
    assert record.error == "not_ready"


async def post(synthesizer: FakeSynthesizer, body: object, **headers: str) -> httpx.Response:
    async with client_for(synthesizer) as client:
        return await client.post(SPEECH, json=body, headers=headers)


def speaking(info: ModelInfo = CUSTOM_VOICE) -> FakeSynthesizer:
    return FakeSynthesizer(info, utterance())


def events_of(response: httpx.Response) -> list[dict[str, object]]:
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def error_of(response: httpx.Response) -> dict[str, str | None]:
    error: dict[str, str | None] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def test_pcm_is_what_was_synthesized(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    response = await client.post(SPEECH, json=PCM)
    assert (response.status_code, response.content) == (200, pcm_of(utterance()))
    headers = {"content-type": "audio/pcm;rate=24000;channels=1", "x-sample-rate": "24000"}
    assert response.headers.items() >= (headers | {"cache-control": "no-cache", "x-accel-buffering": "no"}).items()
    assert "content-length" not in response.headers
    assert synthesizer.closed.is_set()


@pytest.mark.parametrize("audio_format", AudioFormat)
async def test_events_carry_every_format_as_one_stream(audio_format: AudioFormat) -> None:
    body = BODY | {"response_format": audio_format}
    bare = await post(speaking(), body)
    response = await post(speaking(), body | {"stream_format": "sse", "seed": 7})
    assert response.headers["content-type"] == "text/event-stream"
    *deltas, last = events_of(response)
    assert {event["type"] for event in deltas} == {"speech.audio.delta"}
    audio = b"".join(base64.b64decode(str(event["audio"])) for event in deltas)
    assert len(audio) == len(bare.content)
    assert audio == bare.content or audio_format is AudioFormat.OPUS  # whose streams have a random serial number
    usage = {"input_tokens": fake.NUM_TEXT_TOKENS, "output_tokens": 4, "total_tokens": fake.NUM_TEXT_TOKENS + 4}
    told = {"seed": 7, "model": CUSTOM_VOICE.name, "voice": "vivian"}
    assert last == {"type": "speech.audio.done", "usage": usage, "finish_reason": "stop", **told}
    assert {name: response.headers[f"x-{name}"] for name in told} == {**told, "seed": "7"}


@pytest.mark.parametrize("reason", [FinishReason.STOP, FinishReason.EARLY, FinishReason.RUNAWAY])
async def test_an_answer_says_how_speech_ended(reason: FinishReason) -> None:
    """A redraw does not help here: each ends so."""
    script = [*utterance(2)[:2], chunk(b"", frames=0, finish_reason=reason)]
    whole = await post(FakeSynthesizer(script=script), PCM | {"stream": False})
    assert whole.headers["x-finish-reason"] == reason
    streamed = await post(FakeSynthesizer(script=script), PCM)
    assert "x-finish-reason" not in streamed.headers  # which are sent before
    events = events_of(await post(FakeSynthesizer(script=script), PCM | {"stream_format": "sse"}))
    assert events[-1]["finish_reason"] == reason


def twice(*again: Step) -> FakeSynthesizer:
    """Speech that ends badly after it has sounded, and then what is asked for again."""
    bad = [*utterance(3)[:3], chunk(b"", frames=0, finish_reason=FinishReason.EARLY)]
    return FakeSynthesizer(scripts=[bad, again])


async def test_a_whole_answer_that_ends_badly_is_made_again() -> None:
    synthesizer = twice(*utterance(2))
    answer = await post(synthesizer, PCM | {"stream": False})
    assert (answer.content, answer.headers["x-finish-reason"]) == (pcm_of(utterance(2)), "stop")
    assert answer.headers["x-vllm-omni-output-tokens"] == "2"  # of what is sent
    first, second = synthesizer.requests
    assert first.seed != second.seed == int(answer.headers["x-seed"])
    assert not synthesizer.scripts  # nor is it made a third time


@pytest.mark.parametrize("failure", [Overloaded("full", 1.0), TalkerLost("gone")])
async def test_its_first_draw_stays_where_no_other_can_be_made(failure: Exception) -> None:
    synthesizer = twice(failure)
    answer = await post(synthesizer, PCM | {"stream": False})
    assert (answer.content, answer.headers["x-finish-reason"]) == (pcm_of(utterance(3)[:3]), "early")
    assert len(synthesizer.requests) == 2


@pytest.mark.parametrize("fixed", [{"seed": 5}, {"ignore_eos": True}, {"stream": True}])
async def test_what_has_a_seed_or_was_sent_is_not_made_again(fixed: dict[str, object]) -> None:
    synthesizer = twice(*utterance(2))
    answer = await post(synthesizer, PCM | {"stream": False} | fixed)
    assert (answer.content, len(synthesizer.requests)) == (pcm_of(utterance(3)[:3]), 1)


async def test_only_events_carry_words_and_their_audio_is_the_same() -> None:
    asked = PCM | {"input": fake.FOLLOWED_TEXT, "word_timestamps": True}
    events = events_of(await post(FakeSynthesizer(fake.FOLLOWED, fake.followed()), asked | {"stream_format": "sse"}))
    assert "speech.audio.words" in [event["type"] for event in events]
    audio = b"".join(base64.b64decode(str(event["audio"])) for event in events if "audio" in event)
    synthesizer = FakeSynthesizer(fake.FOLLOWED, fake.followed())
    bare = await post(synthesizer, asked)
    assert not synthesizer.requests[0].word_times
    assert "x-word-times" not in bare.headers
    assert bare.headers["x-ignored"].startswith("word_timestamps (only events contain words")
    assert bare.content == audio == pcm_of(fake.followed())


async def test_a_whole_body_has_a_length_and_an_exact_wav_header() -> None:
    response = await post(speaking(), BODY | {"stream": False, "response_format": "wav"})
    assert int(response.headers["content-length"]) == len(response.content)
    with wave.open(io.BytesIO(response.content)) as file:
        assert file.readframes(file.getnframes()) == pcm_of(utterance())


async def test_the_plainest_request_leaves_everything_to_the_checkpoint() -> None:
    synthesizer = speaking()
    await post(synthesizer, BODY)
    await post(synthesizer, BODY | {"unknown": {"to": "us"}, "seed": None, "instructions": None})
    first, second = synthesizer.requests
    assert first.sampling == Sampling()
    assert (first.voice, first.language, first.instructions) == ("vivian", "auto", None)
    assert (first.non_streaming_mode, first.ignore_eos, first.leading_silence) == (None, False, False)
    assert first.reference is None
    assert first.seed != second.seed
    assert 0 <= first.seed < 2**64


async def test_every_option_reaches_the_synthesizer() -> None:
    synthesizer = speaking()
    talker = {"do_sample": True, "temperature": 0.5, "top_k": 0, "top_p": 1, "repetition_penalty": 1.1}
    predictor = {"dosample": False, "temperature": 2, "top_k": 5, "top_p": 0.25}
    sampling = {**talker, **{f"subtalker_{name}": predictor[name] for name in predictor}, "max_new_tokens": 1}
    others = {"seed": 2**64 - 1, "non_streaming_mode": True, "ignore_eos": True, "leading_silence": True}
    await post(synthesizer, BODY | sampling | others)
    [request] = synthesizer.requests
    assert request.sampling == Sampling(**sampling)
    assert {name: getattr(request, name) for name in others} == others


BAD: dict[str, tuple[object, ...]] = {
    "input": (5, "", " \u200b\n", None, "x" * 4097), "voice": ("nobody", 5, {}, {"id": 5}, ["alloy"]),
    "model": (5,), "instructions": (5, "x" * 4097), "response_format": ("midi", 5), "stream_format": ("xml",),
    "stream": ("no",), "speed": (0.2, 4.1, "4.1", True), "language": ("klingon", 5),
    "do_sample": (1,), "subtalker_dosample": ("yes",), "ignore_eos": ("no",), "leading_silence": (0,),
    "non_streaming_mode": (1,), "x_vector_only_mode": ("yes",), "prepare": ("best", True),
    "temperature": (0, -1, 1e-30, "hot", False), "subtalker_temperature": (0,), "repetition_penalty": (0,),
    "top_k": (-1, 1.5, True, 10**30), "subtalker_top_k": (-1,), "top_p": (0, 1.1), "subtalker_top_p": (0,),
    "max_new_tokens": (0, 2**31), "seed": (-1, 2**64, 1.0), "ref_audio": (data_url(b""), 5),
}  # fmt: skip


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
async def test_a_bad_value_is_a_400_that_names_the_field(field: str, value: object) -> None:
    synthesizer = speaking()
    response = await post(synthesizer, BODY | {field: value})
    assert (response.status_code, error_of(response)["param"]) == (400, field)
    assert synthesizer.requests == []


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"null", b'"x"', b"[" * 10000, b"\xff", b"\xff\xfe{", b"\xef\xbb\xbf"]
)
async def test_what_is_no_json_object_is_a_400(content: bytes) -> None:
    response = await posted(speaking(), SPEECH, content=content)
    assert (response.status_code, error_of(response)["code"]) == (400, "invalid_json")


async def test_voice_design_needs_instructions_and_no_voice() -> None:
    synthesizer = speaking(fake.VOICE_DESIGN)
    for fields in ({}, {"instructions": ""}, {"instructions": " \n"}):
        assert error_of(await post(synthesizer, BODY | fields))["param"] == "instructions"
    assert (await post(synthesizer, BODY | {"instructions": "An old sailor"})).status_code == 200
    [request] = synthesizer.requests
    assert (request.voice, request.instructions) == (None, "An old sailor")


async def test_a_recording_for_a_model_that_does_not_clone_is_refused_before_a_voice_is_missed() -> None:
    sent = {"input": "Hello", "ref_audio": data_url(recording())}
    for info in (CUSTOM_VOICE, fake.VOICE_DESIGN):
        error = error_of(await post(speaking(info), sent))
        assert error["param"] == "ref_audio"
        assert "does not clone voices: load a Base checkpoint" in (error["message"] or "")


async def test_base_needs_a_recording_and_what_it_says() -> None:
    synthesizer, ref_audio = speaking(fake.BASE), data_url(recording())
    for fields, missed in (
        ({}, "ref_audio"),
        ({"ref_audio": ref_audio}, "ref_text"),
        ({"ref_audio": "http://x/a.wav", "ref_text": "x"}, "ref_audio"),
    ):
        assert error_of(await post(synthesizer, BODY | fields))["param"] == missed
    for more in ({"ref_text": " It says. "}, {"x_vector_only_mode": True}):
        assert (await post(synthesizer, BODY | {"ref_audio": ref_audio} | more)).status_code == 200
    spoken, embedded = (request.reference for request in synthesizer.requests)
    assert spoken is not None
    assert (spoken.audio.size, spoken.text, spoken.x_vector_only) == (fake.BASE.sample_rate, "It says.", False)
    assert embedded is not None
    assert (embedded.text, embedded.x_vector_only) == (None, True)
    by_vector = speaking(replace(fake.BASE, clones_by_vector=True))
    assert (await post(by_vector, BODY | {"ref_audio": ref_audio})).status_code == 200
    [request] = by_vector.requests
    assert request.reference is not None
    assert request.reference.x_vector_only


async def test_a_checkpoint_that_cannot_follow_instructions_speaks_without() -> None:
    synthesizer = speaking(fake.BASE)
    body = BODY | {"ref_audio": data_url(recording()), "x_vector_only_mode": True, "instructions": "Softly " * 1000}
    assert (await post(synthesizer, body)).status_code == 200
    assert synthesizer.requests[0].instructions is None


@pytest.mark.parametrize("error", [EngineError("secret"), ZeroDivisionError("secret")])
async def test_failures_are_logged_and_told_without_details(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    response = await post(FakeSynthesizer(script=[error]), BODY, **{"x-request-id": "my-id"})
    assert response.status_code == 500
    assert "secret" not in response.text
    [record] = [record for record in caplog.records if record.name.startswith("serve_app")]
    assert "my-id" in record.getMessage()
    assert record.exc_info is not None
    assert record.exc_info[1] is error


async def test_silence_before_an_error_does_not_begin_the_answer() -> None:
    script: list[fake.Step] = [chunk(b""), chunk(b""), Overloaded("full")]
    for stream_format in ("audio", "sse"):
        response = await post(FakeSynthesizer(script=script), BODY | {"stream_format": stream_format})
        assert response.status_code == 429


async def test_an_utterance_without_audio_is_a_valid_empty_file() -> None:
    silent: list[fake.Step] = [chunk(b"", frames=0)]
    assert (await post(FakeSynthesizer(script=silent), PCM)).content == b""
    assert len((await post(FakeSynthesizer(script=silent), BODY | {"response_format": "wav"})).content) == 44
    for audio_format in (AudioFormat.MP3, AudioFormat.OPUS, AudioFormat.AAC, AudioFormat.FLAC):
        response = await post(FakeSynthesizer(script=silent), BODY | {"response_format": audio_format})
        assert response.status_code == 200
    events = events_of(await post(FakeSynthesizer(script=silent), PCM | {"stream_format": "sse"}))
    assert [event["type"] for event in events] == ["speech.audio.done"]


async def test_a_body_over_the_limit_is_a_413_with_and_without_a_length(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_input, "MAX_BODY_BYTES", 1000)

    async def parts() -> AsyncIterator[bytes]:
        for _ in range(100):
            yield b" " * 100

    synthesizer = speaking()
    async with client_for(synthesizer) as client:
        for content in (b" " * 1001, parts()):
            response = await client.post(SPEECH, content=content)
            assert (response.status_code, error_of(response)["code"]) == (413, "payload_too_large")
        assert (await client.post(SPEECH, content=json.dumps(BODY).ljust(1000))).status_code == 200


async def test_few_large_bodies_are_taken_in_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "MAX_UPLOADS", 1)
    large = json.dumps(BODY).encode().ljust(250_000)
    has_begun, unfinished = asyncio.Event(), asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield large[:249_000]
        has_begun.set()
        await unfinished.wait()
        yield large[249_000:]

    async with client_for(speaking()) as client:
        first = asyncio.create_task(client.post(SPEECH, content=slow()))
        await has_begun.wait()
        second = asyncio.create_task(client.post(SPEECH, content=large))
        assert (await client.post(SPEECH, json=BODY)).status_code == 200
        assert not second.done()
        unfinished.set()
        assert ((await first).status_code, (await second).status_code) == (200, 200)
        for content in (b"[".ljust(250_000), large):  # one that is refused leaves its place
            response = await client.post(SPEECH, content=content)
        assert response.status_code == 200


async def test_missing_routes_and_methods_answer_in_the_envelope(client: httpx.AsyncClient) -> None:
    assert error_of(await client.get("/v1/nothing"))["code"] == "not_found"
    response = await client.get(SPEECH)
    assert (response.status_code, error_of(response)["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


async def test_a_request_keeps_a_sane_id_or_gets_one(client: httpx.AsyncClient, synthesizer: FakeSynthesizer) -> None:
    for offered in ("abc-123", "x" * 129, "two words", ""):
        response = await client.post(SPEECH, json=BODY, headers={"x-request-id": offered})
        assert response.headers.get_list("x-request-id") == [synthesizer.requests[-1].request_id]
        assert (response.headers["x-request-id"] == offered) == (offered == "abc-123")
    assert len({request.request_id for request in synthesizer.requests}) == 4
    assert (await client.get("/v1/nothing")).headers["x-request-id"]


async def test_a_server_in_front_may_echo_the_id() -> None:
    api = one_api(speaking(), ApiSettings(), echo_request_id=False)
    async with client_of(api) as client:
        assert "x-request-id" not in (await client.get("/health")).headers


async def test_head_is_answered_as_get(tmp_path: Path) -> None:
    node = Node(is_running=lambda _: True, is_ready=lambda: True, scrape=lambda: b"")
    api = one_api(speaking(), ApiSettings(voices=VoiceSettings(store=str(tmp_path))), node=node)
    served = [route.path for route in every_route(api.routes) if "GET" in (getattr(route, "methods", None) or ())]
    assert len(served) > 20
    async with client_of(api) as client:
        for path in (*served, *(f"{path}?limit=0&page_size=0" for path in served)):
            answer, head = await client.get(path), await client.head(path)
            assert (path, head.status_code, head.content) == (path, answer.status_code, b"")
            assert head.headers["content-type"] == answer.headers["content-type"]
            assert {*answer.headers} == {*head.headers}


COMPRESSED = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "GZIP": gzip.compress,
    "deflate": zlib.compress,
    " deflate": lambda raw: zlib.compress(raw)[2:-4],  # as some clients send it
    "identity": bytes,
    " ": bytes,
}


@pytest.mark.parametrize("encoding", COMPRESSED)
async def test_a_compressed_body_is_served_within_the_limit(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    large = {**PCM, "input": "Hello. " * 100, "unused": " " * 300_000}
    headers = {"content-encoding": encoding}
    for limit, status in ((1 << 20, 200), (300_000, 413), (1000, 413)):
        monkeypatch.setattr(client_input, "MAX_BODY_BYTES", limit)
        content = COMPRESSED[encoding](json.dumps(large).encode())

        async def followed(num_parts: int, content: bytes = content) -> AsyncIterator[bytes]:
            yield content
            for _ in range(num_parts):
                yield bytes(1000)

        async with client_for(speaking()) as client:
            assert (await client.post(SPEECH, content=content, headers=headers)).status_code == status
            rest = followed(limit // 1000 + 1)
            assert (await client.post(SPEECH, content=rest, headers=headers)).status_code == 413
            if encoding.strip() not in ("", "identity"):
                for broken in (content[:-9], content + b"xxxxxxxxxx", b"x" * 20):
                    assert (await client.post(SPEECH, content=broken, headers=headers)).status_code in (400, 413)


@pytest.mark.parametrize(
    ("kind", "encoding"),
    [("application/json", each) for each in ("br", "zstd", "gzip, gzip", "compress")]
    + [(each, "identity") for each in ("application/x-www-form-urlencoded", "multipart/form-data; boundary=x")],
)
@pytest.mark.parametrize("path", [*filter(is_here, (SPEECH, "/v1/speak", "/tts/bytes", "/v1/audio/text"))])
async def test_what_is_no_json_is_a_415_that_says_what_to_send(path: str, kind: str, encoding: str) -> None:
    headers = {"content-type": kind, "content-encoding": encoding}
    async with client_for(speaking()) as client:
        answer = await client.post(path, content=b"input=Hello&voice=ash", headers=headers)
        assert (answer.status_code, error_of(answer)["code"]) == (415, "unsupported_media_type")
        assert "Send JSON" in str(error_of(answer)["message"])
        typeless = await client.post(SPEECH, json=BODY, headers={"content-type": kind})
    assert typeless.status_code == 200  # curl's default for a JSON body


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32"])
async def test_a_byte_order_mark_and_what_it_means(encoding: str) -> None:
    synthesizer = speaking()
    content = json.dumps({**BODY, "input": "Füße"}, ensure_ascii=False).encode(encoding)
    answer = await posted(synthesizer, SPEECH, content=content)
    assert (answer.status_code, synthesizer.texts) == (200, ["Füße"])


async def test_health_and_readiness() -> None:
    synthesizer = FakeSynthesizer(None)
    async with client_for(synthesizer) as client:
        for path in ("/health", "/v1", "/v1/"):
            assert (await client.get(path)).status_code == 200
        for response in (await client.get("/ready"), await client.post(SPEECH, json=BODY)):
            assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")
            assert response.headers["retry-after"] == "1"
        assert (await client.head("/ready")).status_code == 503
        synthesizer.info = CUSTOM_VOICE
        assert (await client.get("/ready")).json() == {"status": "ready", "model": CUSTOM_VOICE.name}
        for path in ("/health", "/ready"):
            assert (await client.head(path)).status_code == 200


async def test_what_is_loaded_is_not_ready_without_replicas() -> None:
    node = Node(is_running=lambda model: False, is_ready=lambda: False, scrape=bytes)
    async with client_of(one_api(FakeSynthesizer(), ApiSettings(), node=node)) as client:
        response = await client.get("/ready")
        assert (response.status_code, error_of(response)["code"]) == (503, "not_ready")


async def test_a_model_off_its_gpu_is_asleep_and_listed_so() -> None:
    state = ModelState(ModelStatus.ASLEEP)
    node = Node(is_running=lambda _: True, is_ready=lambda: True, scrape=bytes, state=lambda _: state)
    async with client_of(one_api(FakeSynthesizer(), ApiSettings(), node=node)) as client:
        response = await client.get("/ready")
        assert (response.status_code, response.json()["status"]) == (200, "asleep")
        assert (await client.get("/v1/models")).json()["data"][0]["state"] == "asleep"


async def test_a_default_voice_that_is_not_loaded_is_not_ready_and_says_why() -> None:
    async with client_for(FakeSynthesizer(), ApiSettings(default_voice="nora")) as client:
        error = error_of(response := await client.get("/ready"))
    assert (response.status_code, error["code"]) == (503, "not_ready")
    assert error["message"].startswith("api.default_voice: 'nora' is not a voice of Qwen/")


async def test_the_schema_is_served(client: httpx.AsyncClient, api: FastAPI) -> None:
    schema = (await client.get("/openapi.json")).json()
    content = schema["paths"][SPEECH]["post"]["requestBody"]["content"]
    assert {"input", "voice", "seed"} <= set(content["application/json"]["schema"]["properties"])
    assert "$defs" not in json.dumps(content)  # such references would lead nowhere inside this document
    assert (await client.get("/redoc")).status_code == 404  # it would need a CDN


def test_every_operation_of_the_documentation_has_a_tag_and_a_summary_of_its_own() -> None:
    node = Node(is_running=lambda model: True, is_ready=always, scrape=bytes)
    paths = one_api(FakeSynthesizer(), ApiSettings(), node=node).openapi()["paths"]
    operations = [operation for path in paths.values() for operation in path.values()]
    summaries = [operation["summary"] for operation in operations]
    assert sorted({each for each in summaries if summaries.count(each) > 1}) == []
    assert all(len(operation["tags"]) == 1 for operation in operations)
    assert len({operation["tags"][0] for operation in operations}) >= 10


async def test_what_the_documentation_would_send_is_spoken(client: httpx.AsyncClient) -> None:
    """Its page sends the example, and plays the answer: that is a blob to it."""
    operation = (await client.get("/openapi.json")).json()["paths"][SPEECH]["post"]
    answer = await client.post(SPEECH, json=operation["requestBody"]["content"]["application/json"]["example"])
    assert answer.status_code == 200
    assert answer.headers["content-type"] in operation["responses"]["200"]["content"]
    page = await client.get("/docs")
    assert "wrapComponents" in page.text
    assert "media-src blob:" in page.headers["content-security-policy"]


async def test_pages_run_their_own_scripts_only(client: httpx.AsyncClient) -> None:
    for path in ("/docs", *filter(is_here, ("/",))):
        page = await client.get(path, headers={"accept": "text/html"})
        policy = page.headers["content-security-policy"]
        for script in re.findall(r"<script>(.*?)</script>", page.text, re.DOTALL):
            assert f"'sha256-{base64.b64encode(sha256(script.encode()).digest()).decode()}'" in policy
        assert "default-src 'none'" in policy
        assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert (await client.get("/docs/..%2Findex.html")).status_code == 404


async def test_the_documentation_asks_for_a_key_where_there_are_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.json"
    create_key(file, "ada")
    for keys_file, schemes in ((None, []), (file, [{"HTTPBearer": []}])):
        settings = ApiSettings(access=AccessSettings(keys_file=keys_file))
        schema = one_api(FakeSynthesizer(), settings).openapi()
        assert schema["paths"][SPEECH]["post"].get("security", []) == schemes


async def test_a_body_that_does_not_arrive(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_input, "BODY_TIMEOUT_S", 0.01)
    api = one_api(FakeSynthesizer(), ApiSettings())
    async with asgi.http(api, "POST", "/v1/audio/speech") as connection:
        connection.receive({"type": "http.request", "body": b"{", "more_body": True})
        assert (await connection.next())["status"] == 408
        assert json.loads((await connection.next())["body"])["error"]["code"] == "request_timeout"


SYNTHETIC = "http://cv.iptc.org/newscodes/digitalsourcetype/trainedAlgorithmicMedia"


@pytest.mark.parametrize("discloses", [True, False])
async def test_answers_say_that_a_machine_speaks_where_the_settings_want_it(discloses: bool) -> None:
    api = one_api(speaking(), ApiSettings(disclose_synthetic=discloses))
    async with client_of(api) as client:
        for more in ({"stream": False}, {"response_format": "pcm"}, {"stream_format": "sse"}):
            response = await client.post(SPEECH, json=BODY | more)
            assert response.headers.get("x-digital-source-type") == (SYNTHETIC if discloses else None)
        flac = await client.post(SPEECH, json=BODY | {"response_format": "flac"})
        assert (SYNTHETIC.encode() in flac.content) == discloses
    paths = ("/v1/audio/speech/ws", "/v1/realtime", "/v1/speak", "/v1/text-to-speech/alloy/stream-input")
    for path in filter(is_here, paths):
        async with asgi.websocket(api, path) as socket:
            accepted = await socket.next()
            assert ((b"x-digital-source-type", SYNTHETIC.encode()) in accepted["headers"]) == discloses
    for path in filter(is_here, paths[:1]):
        async with asgi.websocket(api, path) as socket:
            await socket.next()
            socket.receive({"type": "websocket.receive", "text": json.dumps(BODY | {"type": "speak"})})
            started = json.loads((await socket.next())["text"])
            assert started.get("digital_source_type") == (SYNTHETIC if discloses else None)


def test_an_extension_that_is_not_selected_has_no_state() -> None:
    service = SpeechService(SimpleNamespace(models=None, settings=None), {"jobs": 7})  # type: ignore[arg-type]
    assert (service.opened_by("jobs"), service.opened_by("designs")) == (7, None)
