"""docs/architecture.md shows one request in each of its forms: these are the values that it really has."""

import json
import re
from collections.abc import AsyncGenerator
from dataclasses import MISSING, fields, is_dataclass, replace
from enum import StrEnum
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient

from deployments.errors import InvalidRequest
from deployments.protocol import ALL_FRAMES, FrameChunk, ModelInfo, PcmChunk, SynthesisRequest
from deployments.serving.failover import with_failover
from deployments.serving.replica_streams import TalkerAudio
from deployments.talker.engine.engine import Engine
from serve_app.api import openai, speech_service
from serve_app.api.resolve.speech_request import SpeechRequest
from serve_app.api.speech_service import SpeechService
from serve_app.config import ApiSettings
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.speech.segments import Utterance
from serve_app.speech.speech_models import SpeechModel
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer
from tests.serve_app.one_model import one_api
from tools.experiments.one_request import STOPS

pytestmark = pytest.mark.anyio

PAGE = Path(__file__).parents[3] / "docs" / "architecture.md"
ROW = re.compile(r"^\| (\w+|`\w+`) \| [^|]+ \| `(.+)` \|$", re.MULTILINE)
PRINTED_STOP = re.compile(r"^stop +(\d+)  (\S+)$", re.MULTILINE)
TOUR_ROW = re.compile(r"^\| (\d+) \| (.+) \| .+ \|$", re.MULTILINE)
OF_A_CPU = {11, 13}  # it has other classes there


def test_the_output_in_the_document_has_the_stops_of_the_command() -> None:
    printed = [(int(at), name) for at, name in PRINTED_STOP.findall(PAGE.read_text(encoding="utf-8"))]
    assert sorted(printed) == sorted((at, stop.__qualname__) for stop, at in STOPS.items())


def test_the_table_of_the_document_names_the_stops_of_the_command() -> None:
    first_tour = PAGE.read_text(encoding="utf-8").partition("## The code of that request")[0]
    rows = {int(row[1]): row[0] for row in TOUR_ROW.finditer(first_tour)}
    assert sorted(rows) == list(range(1, 14))
    named = {at: stop.__qualname__ for stop, at in STOPS.items() if at not in OF_A_CPU}
    assert {at: name for at, name in named.items() if f"`{name}`" not in rows[at]} == {}


async def test_a_request_has_documented_forms(tmp_path: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {name.strip("`"): values for name, values in ROW.findall(PAGE.read_text(encoding="utf-8"))}
    speech, utterance, asked = await forms_at_the_ingress(shown["JSON"], tmp_path, monkeypatch)
    for_talker = await form_for_a_talker(asked)
    sequence = engine.input_processor.build_sequence(1, for_talker)
    assert sequence is not None, "a text that is whole is a sequence at once"
    body = {name: value for name, value in speech.body if value != type(speech.body).model_fields[name].default}
    assert shown == {
        "JSON": json.dumps(json.loads(shown["JSON"])), "SpeechBody": listed(body),
        "SpeechRequest": listed(
            {
                "info.name": speech.info.name, "voice.name": speech.voice.name, **told(speech.delivery, "delivery."),
                "spoken.text": speech.spoken.text, "ignored": speech.ignored,
            },
        ),
        "Utterance": listed(
            {name: value for name, value in told(utterance).items() if not name.startswith("synthesis.")},
        ),
        "SynthesisRequest": listed(told(for_talker)),
        "Sequence": listed(
            {
                "prompt.num_text_tokens": sequence.prompt.num_text_tokens,
                "sampling.top_k": sequence.sampling.top_k,
                "sampling.temperature": sequence.sampling.temperature,
            },
        ),
    }  # fmt: skip
    assert for_talker == replace(asked, gpu_frames=ALL_FRAMES)


async def forms_at_the_ingress(
    sent: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[SpeechRequest, Utterance, SynthesisRequest]:
    speeches, respond = list[SpeechRequest](), openai.respond
    utterances, speak = list[Utterance](), SpeechModel.speak

    def speaking(model: SpeechModel, utterance: Utterance, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        utterances.append(utterance)
        return speak(model, utterance, info)

    async def noting(service: SpeechService, request: object, speech: SpeechRequest) -> object:
        speeches.append(speech)
        return await respond(service, request, speech)  # type: ignore[arg-type]

    monkeypatch.setattr(openai, "respond", noting)
    monkeypatch.setattr(SpeechModel, "speak", speaking)
    synthesizer = FakeSynthesizer(CUSTOM_VOICE)
    monkeypatch.setattr(speech_service, "start_marks", lambda utterance, _: utterance)  # each run has other times
    api = one_api(synthesizer, ApiSettings(voices=VoiceSettings(store=str(folder))))
    async with AsyncClient(transport=ASGITransport(api), base_url="http://127.0.0.1") as client:
        answer = await client.post("/v1/audio/speech", content=sent, headers={"X-Request-ID": "one"})
    assert answer.status_code == 200
    return speeches[0], utterances[0], synthesizer.requests[0]


async def form_for_a_talker(request: SynthesisRequest) -> SynthesisRequest:
    asked = list[SynthesisRequest]()

    async def generate(request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        asked.append(request)
        raise InvalidRequest("that is all")
        yield

    with pytest.raises(InvalidRequest, match="that is all"):
        await anext(with_failover(TalkerAudio(request, generate, CUSTOM_VOICE)))
    return asked[0]


def told(value: object, prefix: str = "") -> dict[str, object]:
    """The fields that have no default value, by dotted name."""
    found: dict[str, object] = {}
    for field in fields(value):  # type: ignore[arg-type]
        each = getattr(value, field.name)
        default = field.default_factory() if field.default_factory is not MISSING else field.default
        if each != default:
            name = prefix + field.name
            found |= told(each, f"{name}.") if is_dataclass(each) else {name: each}
    return found


def listed(values: dict[str, object]) -> str:
    shown = {name: str(each) if isinstance(each, StrEnum) else each for name, each in values.items()}
    return ", ".join(f"{name}={value!r}" for name, value in shown.items())
