"""Each field that a dialect's vendor or server documents: it has an effect, or the answer names it."""

import asyncio
import base64
import copy
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlencode

import pytest
import yaml

from deployments.protocol import SAMPLING_DEFAULTS, ModelInfo
from serve_app.api.resolve import build_utterance as speech_request
from serve_app.config import ApiSettings
from serve_app.extensions.live.live_text import LiveTexts
from tests.serve_app import asgi
from tests.serve_app.extensions.client import Client, Json
from tests.serve_app.fake import CUSTOM_VOICE, FOLLOWED, FOLLOWED_TEXT, FakeSynthesizer, followed, utterance
from tests.serve_app.one_model import client_of, one_api
from tools.suites.rows import is_here

pytestmark = pytest.mark.anyio


@dataclass(frozen=True)
class Sent:
    """A value that differs from the default; `beside` are fields without which it would mean nothing."""

    value: object
    beside: Json = field(default_factory=dict)


@dataclass(frozen=True)
class Place:
    """Where fields stand: in the query, or in an object of a message or a body."""

    fields: Json
    message: int | None = 0  # None: the query
    inside: str = ""


@dataclass(frozen=True)
class Dialect:
    path: str
    messages: list[Json]  # the body over HTTP
    places: list[Place]
    query: Json = field(default_factory=dict)
    protocols: list[str] = field(default_factory=list)
    over: Json = field(default_factory=dict)  # the message with which a socket has answered all; none over HTTP


def fields(text: str) -> Json:
    """Fields as YAML writes them in a line."""
    read: Json = yaml.safe_load(f"{{{text}}}")
    return read


def messages(*texts: str) -> list[Json]:
    return [fields(text) for text in texts]


SAMPLING: Json = {
    name: not value if value is True else type(value)(value / 2) for name, value in SAMPLING_DEFAULTS.items()
}
QWEN: Json = SAMPLING | fields(
    "instructions: Softly., instruct: Softly., language: German, seed: 5, task_type: Base, "
    "ref_audio: AAAA, ref_text: Hi., x_vector_only_mode: true, non_streaming_mode: true"
)
OPENAI: Json = fields(
    "model: other, input: Bye., voice: ryan, instructions: Softly., response_format: wav, "
    "speed: 2.0, stream_format: sse"
)
OPENAI_SPEECH: Json = {
    **OPENAI,
    **QWEN,
    **fields(
        "text: Bye., speaker: ryan, sample_rate: 8000, stream: false, ignore_eos: true, "
        "leading_silence: true, instruction: Softly., lang_code: z, speaker_embedding: [0.5], "
        "initial_codec_chunk_frames: 1, extra_params: {x: 1}, references: [], volume_multiplier: 2, "
        "download_format: mp3, return_download_link: true, allow_voice_tags: true, voice_aliases: {}"
    ),
    "any_language": Sent(True, {"language": "fr"}),
    "word_timestamps": Sent(True, {"stream_format": "sse"}),
    "normalization_options": Sent({"normalize": True}, {"input": "3 kg", "language": "english"}),
    "text_normalization": Sent("on", {"input": "3 kg", "language": "english"}),
    "ssml": Sent(True, {"input": "*a*"}),
    "markup": Sent("none", {"input": "*a*"}),
    "lexicon": Sent({"a": "b"}, {"input": "a"}),
    "max_segment_chars": Sent(50, {"input": "A sentence that is thirty long. " * 2}),
}
TALKRAY_SOCKET: Json = {name: value for name, value in OPENAI_SPEECH.items() if name != "any_language"}
TALKRAY_SOCKET |= {"word_timestamps": True, "request_id": "mine", "from_frame": Sent(1, {"seed": 7})}
MISTRAL: Json = fields(
    "model: voxtral, voice_id: ryan, ref_audio: AAAA, response_format: pcm, "
    "stream: true, prompt_cache_key: a, metadata: {a: 1}"
)
KOKORO: Json = OPENAI_SPEECH | fields("word_timestamps: false, return_timestamps: false, return_timing: false")
FRAMES: Json = {**QWEN, "voice": "ryan", "stream": False}
OMNI_SOCKET: Json = QWEN | fields(
    "model: other, voice: ryan, speaker: ryan, response_format: pcm, speed: 2.0, speaker_embedding: [0.5], "
    "stream_audio: false, word_timestamps: true, split_granularity: clause, initial_codec_chunk_frames: 1"
)
NARI: Json = QWEN | fields(
    "model: other, voice: ryan, response_format: wav, stream: false, speed: 2.0, request_id: mine, "
    "skip_fixed_bootstrap_audio: false, stream_chunk_schedule: [1], stream_first_chunk_frames: 1, "
    "stream_steady_chunk_frames: 1, stream_chunk_frames: 1"
)
VOX_SERVE: Json = fields(
    "text: Bye., audio: AAAA, streaming: false, language: german, speaker: ryan, "
    "ref_text: Hi., instruct: Softly., x_vector_only_mode: true"
)
SPOKEN = {"input": "Hello.", "voice": "alloy"}
SPEAK = {**SPOKEN, "type": "speak"}
VOICE_SETTINGS: Json = fields("stability: 0.5, similarity_boost: 0.5, style: 0.5, use_speaker_boost: true, speed: 2.0")
ELEVEN_QUERY: Json = {"output_format": "pcm_8000", "enable_logging": "false", "optimize_streaming_latency": "1"}
ELEVEN_BODY: Json = {
    **fields(
        "text: Bye., model_id: eleven_v3, language_code: de, seed: 5, previous_text: A., next_text: B., "
        "previous_request_ids: [a], pronunciation_dictionary_locators: [{pronunciation_dictionary_id: a}]"
    ),
    "apply_text_normalization": Sent("on", {"text": "3 kg", "language_code": "en"}),
}
# These change no text without marks and figures: test_text_fields.py has enable_ssml_parsing, and what becomes figures.
ELEVEN_SOCKET: Json = fields(
    "model_id: eleven_v3, language_code: de, enable_logging: 'false', output_format: pcm_8000, "
    "inactivity_timeout: '5', sync_alignment: 'true', auto_mode: 'true', seed: '5'"
)
ELEVEN_PLACES = [
    Place(ELEVEN_SOCKET, None),
    Place(
        fields(
            "generation_config: {chunk_length_schedule: [50]}, xi_api_key: key, authorization: key, flush: true, "
            "pronunciation_dictionary_locators: [{pronunciation_dictionary_id: a}], try_trigger_generation: true"
        )
    ),
    Place(VOICE_SETTINGS, inside="voice_settings"),
]
CONTEXT = {"context_id": "one"}
CARTESIA: list[Place] = [
    Place(
        fields(
            "model_id: sonic-3, voice: nobody, language: de, add_timestamps: true, "
            "add_phoneme_timestamps: true, use_normalized_timestamps: true, "
            "pronunciation_dict_id: a, speed: fast, save: true"
        )
    ),
    Place({"id": "ryan", "mode": "embedding", "embedding": [0.5]}, inside="voice"),
    Place({"encoding": "pcm_mulaw", "sample_rate": 8000, "bit_rate": 32000}, inside="output_format"),
    Place({"speed": 2.0, "volume": 1.5, "emotion": "sad"}, inside="generation_config"),
]
CARTESIA_HTTP = [*CARTESIA, Place({"context_id": "a", "continue": True})]
CONTAINER = Place({"container": "wav"}, inside="output_format")
DASHSCOPE: Json = {
    **fields(
        "voice: ryan, response_format: mp3, sample_rate: 8000, language_type: German, speech_rate: 2.0, "
        "pitch_rate: 1.5, volume: 80, instructions: Softly., optimize_instructions: true, enable_tn: true"
    ),
    "bit_rate": Sent(64, {"response_format": "opus"}),
}
DEEPGRAM: Json = fields(
    "model: aura-2-ryan-en, encoding: mulaw, sample_rate: '8000', speed: '1.5', mip_opt_out: 'true', "
    "tag: a, expressivity: '1'"
)
DEEPGRAM_REST: Json = DEEPGRAM | fields("bit_rate: '32000', callback: 'http://a', callback_method: PUT")
DEEPGRAM_REST |= {"container": Sent("none", {"encoding": "linear16"})}
DEEPGRAM_SOCKET = [Place({**DEEPGRAM, "container": "wav"}, None)]
DEEPGRAM_SAYS = messages("type: Speak, text: Hello.", "type: Close")
REALTIME: Json = fields(
    "instructions: Be kind., output_modalities: [text], modalities: [text], voice: ryan, "
    "output_audio_format: g711_ulaw, input_audio_format: pcm16, input_audio_transcription: {}, "
    "turn_detection: {type: server_vad}, tools: [], tool_choice: auto, temperature: 0.8, "
    "max_output_tokens: 5, prompt: {id: a}, tracing: auto, truncation: auto, metadata: {a: b}"
)
ITEM = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello."}]}
DONE, CLOSED = {"type": "done"}, {"closed": 1000}

DIALECTS = {
    "OpenAI": Dialect("/v1/audio/speech", [SPOKEN], [Place(OPENAI_SPEECH)]),
    "Azure": Dialect("/openai/deployments/any/audio/speech", [SPOKEN], [Place(OPENAI)]),
    "Mistral": Dialect("/v1/audio/speech", [{"input": "Hello.", "voice_id": "serena"}], [Place(MISTRAL)]),
    "Kokoro-FastAPI": Dialect("/dev/captioned_speech", [{**SPOKEN, "response_format": "pcm"}], [Place(KOKORO)]),
    "codec frames": Dialect("/v1/audio/frames", [SPOKEN], [Place(FRAMES)]),
    "codec frames, WebSocket": Dialect("/v1/audio/frames/ws", [SPEAK], [Place(FRAMES)], over=DONE),
    "Talkray, WebSocket": Dialect("/v1/audio/speech/ws", [SPEAK], [Place(TALKRAY_SOCKET)], over=DONE),
    "vLLM-Omni, batch": Dialect(
        "/v1/audio/speech/batch", [{**SPOKEN, "items": [{"input": "Hello."}]}], [Place({**QWEN, "stream": True})]
    ),
    "vLLM-Omni, WebSocket": Dialect(
        "/v1/audio/speech/stream",
        messages("type: session.config, voice: alloy", "type: input.text, text: Hello.", "type: input.done"),
        [Place(OMNI_SOCKET)],
        over={"type": "session.done"},
    ),
    "nari": Dialect(
        "/v1/audio/speech/ws",
        messages("type: request.start, voice: alloy", "type: input_text.append, text: Hello.", "type: input_text.end"),
        [Place(NARI)],
        protocols=["nari.speech.v1"],
        over=CLOSED,
    ),
    "VoxServe": Dialect("/generate", [{"text": "Hello."}], [Place(VOX_SERVE)]),
    "Deepgram": Dialect(
        "/v1/speak", [{"text": "Hello."}], [Place(DEEPGRAM_REST, None), Place({"text": "Bye.", "model": "a", "x": 1})]
    ),
    "Deepgram, WebSocket": Dialect("/v1/speak", DEEPGRAM_SAYS, DEEPGRAM_SOCKET, over=CLOSED),
    "Flux": Dialect("/v2/speak", [{"text": "Hello."}], [Place(DEEPGRAM_REST, None)]),
    "Flux, WebSocket": Dialect("/v2/speak", DEEPGRAM_SAYS, DEEPGRAM_SOCKET, over=CLOSED),
    "ElevenLabs": Dialect(
        "/v1/text-to-speech/serena/stream/with-timestamps",
        [{"text": "Hello."}],
        [Place(ELEVEN_QUERY, None), Place(ELEVEN_BODY), Place(VOICE_SETTINGS, inside="voice_settings")],
    ),
    "ElevenLabs, dialogue": Dialect(
        "/v1/text-to-dialogue",
        [{"inputs": [{"text": "Hello.", "voice_id": "serena"}]}],
        [
            Place(ELEVEN_QUERY, None),
            Place({name: ELEVEN_BODY[name] for name in ("model_id", "language_code", "seed")}),
            Place({"settings": {"stability": 0.5}, "apply_text_normalization": "on"}),
            Place({"voice_id": "ryan", "new_turn": True}, inside="inputs"),
        ],
    ),
    "ElevenLabs, contexts": Dialect(
        "/v1/text-to-speech/serena/multi-stream-input",
        [
            {**CONTEXT, "text": f"{FOLLOWED_TEXT}. "},
            {**CONTEXT, "text": f"{FOLLOWED_TEXT}. ", "flush": True},
            {**CONTEXT, "text": "", "flush": True},
            {**CONTEXT, "close_context": True},
        ],
        ELEVEN_PLACES,
        over={"isFinal": True},
    ),
    "ElevenLabs, one text": Dialect(
        "/v1/text-to-speech/serena/stream-input",
        [{"text": f"{FOLLOWED_TEXT}. "}, {"text": f"{FOLLOWED_TEXT}. ", "flush": True}, {"text": ""}],
        ELEVEN_PLACES,
        over={"isFinal": True},
    ),
    "ElevenLabs, contexts of a dialogue": Dialect(
        "/v1/text-to-dialogue/multi-stream-input",
        [
            {**CONTEXT, "voices": ["serena"]},
            {**CONTEXT, "inputs": [{"text": "Hello. ", "voice_id": "serena"}]},
            {**CONTEXT, "inputs": [], "flush": True},
            {**CONTEXT, "close_context": True},
        ],
        [
            Place(ELEVEN_SOCKET, None),
            Place({"voices": ["ryan"]}),
            Place(VOICE_SETTINGS, inside="voice_settings"),
            Place(VOICE_SETTINGS, 1, "voice_settings"),
            Place({"voice_id": "ryan", "new_turn": True}, 1, "inputs"),
        ],
        over={"is_final": True},
    ),
    "Cartesia, bytes": Dialect("/tts/bytes", [{"transcript": "Hello."}], [CONTAINER, *CARTESIA_HTTP]),
    "Cartesia, events": Dialect("/tts/sse", [{"transcript": "Hello."}], CARTESIA_HTTP),
    "Cartesia, WebSocket": Dialect(
        "/tts/websocket",
        [{**CONTEXT, "transcript": "Hello. ", "continue": True}, {**CONTEXT, "transcript": "", "continue": False}],
        [*CARTESIA, CONTAINER, Place({"max_buffer_delay_ms": 5, "flush": True, "duration": 5, "continue": False})],
        over=DONE,
    ),
    "DashScope": Dialect(
        "/api/v1/services/aigc/multimodal-generation/generation",
        [{"model": "qwen3-tts", "input": {"text": "Hello."}}],
        [
            Place({"model": "qwen3-tts-flash", "task": "tts"}),
            Place({**DASHSCOPE, "text": "Bye."}, inside="input"),
            Place(DASHSCOPE, inside="parameters"),
        ],
    ),
    "DashScope, WebSocket": Dialect(
        "/api-ws/v1/realtime",
        messages(
            "type: session.update, session: {}",
            "type: input_text_buffer.append, text: Hello.",
            "type: session.finish",
        ),
        [Place({"model": "qwen3-tts-flash"}, None), Place({**DASHSCOPE, "mode": "commit"}, inside="session")],
        over=CLOSED,
    ),
    "Realtime": Dialect(
        "/v1/realtime",
        [
            {"type": "session.update", "session": {}},
            {"type": "conversation.item.create", "item": ITEM},
            {"type": "response.create", "response": {}},
        ],
        [
            Place({"model": "gpt-realtime"}, None),
            Place({**REALTIME, "model": "gpt-realtime"}, inside="session"),
            Place({"voice": "ryan", "speed": 1.5}, inside="session.audio.output"),
            Place({"type": "audio/pcmu", "rate": 48000}, inside="session.audio.output.format"),
            Place({"input": {"turn_detection": {"type": "server_vad"}}}, inside="session.audio"),
            Place({"previous_item_id": "a"}, 1),
            Place({"content": [{"type": "input_audio", "audio": ""}, ITEM["content"][0]]}, 1, "item"),
            Place(REALTIME, 2, "response"),
            Place({"input": [{**ITEM, "content": [{"type": "input_text", "text": "Bye."}]}]}, 2, "response"),
        ],
        over={"type": "response.done"},
    ),
}
DIALECTS = {name: described for name, described in DIALECTS.items() if is_here(described.path)}
WALK = [(dialect, index) for dialect, described in DIALECTS.items() for index in range(len(described.places))]


@pytest.fixture(autouse=True)
def one_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speech_request, "draw_seed", lambda: 7)


def placed(described: Dialect, place: Place, fields: Json) -> Dialect:
    """The dialect with more fields in that place."""
    if place.message is None:
        return replace(described, query={**described.query, **fields})
    messages = copy.deepcopy(described.messages)
    inner: Any = messages[place.message]
    for name in place.inside.split(".") if place.inside else ():
        inner = inner.setdefault(name, {})
    if isinstance(inner, list):  # of a dialogue's inputs: in a second one, behind the first
        inner.append({"text": "Bye. ", "voice_id": "serena", **fields})
    else:
        inner.update(fields)
    return replace(described, messages=messages)


@dataclass(frozen=True)
class Outcome:
    told: object  # all that could be heard or read, without ids
    ignored: dict[str, str]  # reasons by name
    refusal: str  # the error, if there is one


def scrubbed(value: Any) -> Any:
    """Without what differs each time, and without what is named as ignored."""
    if isinstance(value, dict):
        return {
            name: scrubbed(inner)
            for name, inner in value.items()
            if name not in ("event_id", "item_id", "id", "ignored", "previous_item_id", "usage")
        }
    return [scrubbed(inner) for inner in value] if isinstance(value, list) else value


def of_header(headers: Mapping[str, str]) -> dict[str, str]:
    entries = [entry for entry in headers.get("x-ignored", "").removesuffix(")").split("); ") if entry]
    return dict(entry.split(" (", 1) for entry in entries)  # type: ignore[arg-type,misc]


def of_messages(messages: list[Json]) -> dict[str, str]:
    entries = [entry for message in messages for entry in message.get("ignored", ())]
    return {entry["field"]: entry["reason"] for entry in entries}


class Server:
    """The surface over one synthesizer, asked again and again."""

    def __init__(self, info: ModelInfo) -> None:
        self.synthesizer = FakeSynthesizer(info, followed() if info.word_times else utterance())
        self.texts = LiveTexts()
        self.api = one_api(self.synthesizer, ApiSettings(), opened={"live": self.texts})

    async def outcome(self, described: Dialect) -> Outcome:
        self.synthesizer.requests, self.synthesizer.texts = [], []
        async with asyncio.timeout(20):
            return await (self._of_socket if described.over else self._of_request)(described)

    def _asked(self) -> object:
        ours = [repr(replace(request, request_id="", mailbox=None, marks=())) for request in self.synthesizer.requests]
        return ours, self.synthesizer.texts

    async def _of_request(self, described: Dialect) -> Outcome:
        async with client_of(self.api) as client:
            answer = await client.post(described.path, params=described.query, json=described.messages[0])
        names = ("content-type", "content-length", "x-sample-rate")
        headers = [answer.headers.get(name) for name in names if name != "content-length" or answer.status_code == 200]
        content: object = answer.content
        ignored = of_header(answer.headers)
        if answer.headers["content-type"].startswith("application/json") and answer.status_code == 200:
            told = answer.json()
            ignored |= of_messages(told.get("results", []))
            content = scrubbed({name: value for name, value in told.items() if name != "request_id"})
            headers = [header for header in headers if header is None or not header.isdigit()]
        if described.path == "/tts/sse":
            content = [line for line in answer.text.split('"') if len(line) != 16]  # the context's own id
        refusal = "" if answer.is_success else answer.text
        return Outcome((headers, content, self._asked()), ignored, refusal)

    async def _of_socket(self, described: Dialect) -> Outcome:
        connection = asgi.websocket(self.api, described.path, headers={"x-request-id": "conn"})
        connection._scope["query_string"] = urlencode(described.query).encode()
        connection._scope["subprotocols"] = described.protocols
        async with connection:
            client = await Client(connection).accepted()
            client.send(*described.messages)
            over = [described.over, {"type": "error"}, {"type": "Error"}]
            messages: list[Json] = []
            audio = bytearray()
            while not any(message.items() >= end.items() for message in messages[-1:] for end in over):
                got = await client.next()
                if isinstance(got, bytes):
                    audio += got
                    continue
                messages.append(got)
                for name in ("data", "audio", "delta"):
                    if isinstance(got.get(name), str):
                        audio += base64.b64decode(got.pop(name))
        ignored = of_header(client.headers) | of_messages(messages)
        shown = sorted({json.dumps(scrubbed(message), sort_keys=True) for message in messages})
        refusal = messages[-1] if messages[-1].get("type") in ("error", "Error") else None
        return Outcome((shown, bytes(audio), self._asked()), ignored, json.dumps(refusal) if refusal else "")


def sent(value: object) -> Sent:
    return value if isinstance(value, Sent) else Sent(value)


def reported(place: Place, name: str) -> str:
    """As the answer calls it: by its path, without the object that is all of a message."""
    inside = place.inside.removeprefix("session").removeprefix("response").removeprefix(".")
    return f"{inside}.{name}" if inside else name


@pytest.fixture(scope="module")
async def server() -> AsyncIterator[Server]:
    server = Server(FOLLOWED)
    yield server
    await server.texts.aclose()


@pytest.mark.parametrize(("dialect", "index"), WALK)
async def test_each_has_an_effect_or_is_named(server: Server, dialect: str, index: int) -> None:
    described = DIALECTS[dialect]
    place = described.places[index]
    without: dict[str, Outcome] = {}
    silent = []
    for name in place.fields:
        given = sent(place.fields[name])
        if (key := repr(given.beside)) not in without:
            without[key] = await server.outcome(placed(described, place, given.beside))
        with_it = await server.outcome(placed(described, place, {**given.beside, name: given.value}))
        is_named = reported(place, name) in with_it.ignored
        is_refused = name in with_it.refusal or "does not clone voices" in with_it.refusal
        has_effect = not with_it.refusal and with_it.told != without[key].told
        if not (is_named or is_refused or has_effect):
            silent.append(name)
    assert silent == []


@pytest.mark.parametrize("dialect", DIALECTS)
async def test_the_same_is_told_each_time(server: Server, dialect: str) -> None:
    """Else any field would seem to have an effect."""
    first = await server.outcome(DIALECTS[dialect])
    assert first.refusal == ""
    assert (await server.outcome(DIALECTS[dialect])).told == first.told


STYLES = {
    "OpenAI": ("instructions", "instruct", "instruction"), "vLLM-Omni, WebSocket": ("instruct",),
    "nari": ("instruct",), "VoxServe": ("instruct",), "Cartesia, bytes": ("emotion",),
    "Cartesia, WebSocket": ("emotion",), "DashScope": ("instructions",), "DashScope, WebSocket": ("instructions",),
}  # fmt: skip


@pytest.mark.parametrize("dialect", [name for name in STYLES if name in DIALECTS])
async def test_a_style_that_the_model_does_not_follow_is_named(server: Server, dialect: str) -> None:
    described = DIALECTS[dialect]
    server.synthesizer.info = replace(CUSTOM_VOICE, supports_instructions=False)
    for name in STYLES[dialect]:
        for place in (place for place in described.places if name in place.fields):
            got = await server.outcome(placed(described, place, {name: "Softly."}))
            assert got.ignored == {reported(place, name): "the loaded voice follows none"}


LANGUAGES = {
    "OpenAI": "language", "nari": "language", "VoxServe": "language", "ElevenLabs": "language_code",
    "ElevenLabs, contexts": "language_code", "Cartesia, WebSocket": "language", "DashScope": "language_type",
}  # fmt: skip


@pytest.mark.parametrize("dialect", [name for name in LANGUAGES if name in DIALECTS])
async def test_a_region_that_is_dropped_is_named(server: Server, dialect: str) -> None:
    described, name = DIALECTS[dialect], LANGUAGES[dialect]
    server.synthesizer.info = CUSTOM_VOICE
    place = next(place for place in described.places if name in place.fields)
    for language, is_named in (("de-AT", True), ("zh-Hans", True), ("en_GB", True), ("de", False), ("DEU", False)):
        got = await server.outcome(placed(described, place, {name: language}))
        assert (reported(place, name) in got.ignored) is is_named


async def test_a_language_that_the_voice_has_not_learnt_is_named(server: Server) -> None:
    described = DIALECTS["VoxServe"]
    got = await server.outcome(placed(described, described.places[0], {"language": "es-MX"}))
    reason = "not of the loaded voice, which speaks chinese, english, german: tried as auto"
    assert got.ignored == {"language": reason}


async def test_the_regions_of_kokoros_codes_are_named_by_kokoros_name(server: Server) -> None:
    got = await server.outcome(placed(DIALECTS["OpenAI"], DIALECTS["OpenAI"].places[0], {"lang_code": "b"}))
    assert got.ignored == {"lang_code": "spoken as english: regions and scripts are not told apart"}
