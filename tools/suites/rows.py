"""How each dialect is asked: the contract suite and the fuzzers go through these rows. A new path needs one."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from starlette.routing import compile_path

from serve_app.api.routing import dialects_of
from serve_app.extension import Sample
from serve_app.extensions import load_extensions

Json = dict[str, Any]

VOICE = "ryan"
DIALECTS = dialects_of(load_extensions())


class _Samples(dict[str, Sample]):
    def __missing__(self, dialect: str) -> Sample:
        """Of an extension that was removed: its rows go too."""
        return Sample("", messages=({}, {}, {}))


SAMPLES = _Samples((dialect.name, dialect.sample) for dialect in DIALECTS if dialect.sample is not None)


@dataclass(frozen=True, slots=True)
class WordTimesForm:
    """How a protocol tells when words are heard."""

    in_field: str = ""  # the field of an answer that has them; "": no answer has
    asked_by: Json = field(default_factory=dict)  # fields of the first message, or of the body
    counts_from: Literal["beginning", "words", "audio"] = "beginning"  # of all audio, or a message's words or audio


@dataclass(frozen=True, slots=True)
class Stop:
    """What stops an utterance."""

    message: Json
    answer: Json | None = None  # its fields; None: there is none


@dataclass(frozen=True, slots=True)
class Closing:
    """When the socket is closed, and how. None: it stays open."""

    goes_on: bool = True  # whether it stays open behind an utterance, also one that was cancelled
    full: int | None = 1013  # when the server has no room
    failed: int | None = 1011  # when speech fails
    drain: Json | None = None  # the message that closes it behind what is being spoken, where the sample does not


@dataclass(frozen=True, slots=True)
class SocketRow:
    """One WebSocket. In messages "$text" and "$voice" stand for any, as in its sample.

    Of the fields of an answer the first one tells which answer it is; inner objects may have more fields than here.
    """

    sample: Sample
    over: Json  # fields of the message that ends an utterance
    # Bad messages, and the field that the answer names, or words of an answer without such a field; the socket stays
    # open.
    refused: Sequence[tuple[Json, str]]
    numbers: Sequence[str]  # texts of messages, with "?" where a number belongs
    more: Sequence[Json] = ()  # what else its clients send
    stop: Stop | None = None  # None: leaving stops an utterance
    closing: Closing = field(default_factory=Closing)
    times: WordTimesForm = field(default_factory=WordTimesForm)
    again: Sequence[Mapping[str, object]] | None = None  # speak once more; None: as in the sample
    cut: Sequence[Mapping[str, object]] = ()  # an utterance whose text may go on in the next message; (): none may
    is_pcm: bool = True  # whether its audio is the synthesizer's, byte by byte
    error: str | None = "error"  # the type of the message that says how speech failed
    refusal: Json = field(default_factory=lambda: {"type": "error"})  # fields of the answer to each bad message
    queries: Sequence[str] = ()  # others than the sample's, for the fuzzers

    def speak(self, text: str, *, again: bool = False) -> list[Json]:
        messages = self.again if again and self.again is not None else self.sample.messages
        return _filled(messages, text)

    def speak_timed(self, text: str) -> list[Json]:
        first, *others = self.speak(text)
        return [{**first, **self.times.asked_by}, *others]

    @property
    def place(self) -> str:
        """As documents have it."""
        return ", ".join([f"WS {_shown(self.sample)}", *self.sample.protocols])

    def speak_in_parts(self, *texts: str) -> list[Json]:
        place = next(index for index, message in enumerate(self.cut) if "$text" in str(message))
        parts = [_filled(self.cut, text) for text in texts]
        return [*parts[0][:place], *(part[place] for part in parts), *parts[0][place + 1 :]]

    def messages(self, text: str) -> list[Json]:
        """Any that its clients send."""
        return _filled([*self.sample.messages, *self.cut, *self.more], text)

    def bad(self) -> list[tuple[Json, str]]:
        return [(_filled([message], "Hello.")[0], told) for message, told in self.refused]

    @property
    def path(self) -> str:
        return self.sample.filled(voice=VOICE).path

    @property
    def paths(self) -> list[str]:
        """With each of its queries."""
        return [self.path, *(f"{self.path.partition('?')[0]}?{query}" for query in self.queries)]


@dataclass(frozen=True, slots=True)
class PostRow:
    """One `POST`; `numbers` are bodies with "?" where a number belongs, and the field that a refusal names."""

    sample: Sample
    text: str = "text"  # the field that a body without its text misses
    numbers: Sequence[tuple[str, str]] = ()
    query_numbers: Sequence[tuple[str, str]] = ()  # the end of a query, the field
    has_results: bool = False  # whether what is wrong with speech stands in a result of each item
    more: Json = field(default_factory=dict)  # fields for the fuzzers
    times: WordTimesForm = field(default_factory=WordTimesForm)

    @property
    def path(self) -> str:
        return self.sample.filled(voice=VOICE).path

    @property
    def place(self) -> str:
        """As documents have it."""
        return f"POST {_shown(self.sample)}"

    def body(self, text: str = "Hello.", **more: object) -> Json:
        body = {**(self.sample.body or {}), **more}
        return dict(Sample("", body=body).filled(text=text, voice=VOICE).body or {})


def _shown(sample: Sample) -> str:
    return sample.path.partition("?")[0].replace("$voice", "{voice}").replace("/any/", "/{deployment}/")


def _filled(messages: Sequence[Mapping[str, object]], text: str) -> list[Json]:
    return [dict(message) for message in Sample("", tuple(messages)).filled(text=text, voice=VOICE).messages]


def context(**fields: Any) -> Json:
    return {"context_id": "check", **fields}


def update(**session: object) -> Json:
    return {"type": "session.update", "session": session}


def response(status: str) -> Json:
    return {"type": "response.done", "response": {"status": status}}


def item(text: str = "$text") -> Json:
    return {"type": "message", "role": "user", "content": [{"type": "input_text", "text": text}]}


NATIVE: tuple[Json, ...] = ({"type": "speak", "input": "$text", "voice": "$voice"},)
DIALOGUE = context(inputs=[{"text": "$text ", "voice_id": "$voice"}])
COMMITTED: tuple[Json, ...] = (
    update(mode="commit", voice="$voice"),
    {"type": "input_text_buffer.append", "text": "$text"},
    {"type": "input_text_buffer.commit"},
)
CARTESIA = dict(SAMPLES["Cartesia"].messages[0])
FLOATS = {"container": "raw", "encoding": "pcm_f32le", "sample_rate": 44100}
CALM = {"speed": 1.1, "emotion": "calm"}
CHERRY: Json = {"voice": "Cherry", "mode": "commit", "language_type": "English"}
OFFSET = {"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": 50}}
ASH = {"format": {"type": "audio/pcm", "rate": 24000}, "voice": "ash", "speed": 1.1}

SOCKETS = {
    "native": SocketRow(
        Sample("/v1/audio/speech/ws", NATIVE),
        over={"type": "done"},
        refused=[({"type": "sing"}, "type"), ({"type": "speak"}, "input"), ({**NATIVE[0], "voice": "nobody"}, "voice")],
        numbers=['{"type": "speak", "input": "a", "voice": "ryan", "from_frame": ?}'],
        stop=Stop({"type": "cancel"}, {"type": "cancelled"}),
        closing=Closing(failed=None),
        times=WordTimesForm("words", asked_by={"word_timestamps": True}),
    ),
    "frames": SocketRow(
        Sample("/v1/audio/frames/ws", NATIVE),
        over={"type": "done"},
        refused=[({"type": "x"}, "type"), ({**NATIVE[0], "speed": 2}, "speed"), ({**NATIVE[0], "voice": "x"}, "voice")],
        numbers=['{"type": "speak", "input": "a", "voice": "ryan", "top_k": ?}'],
        more=[{"type": "speak", "input": "$text", "voice": "ash", "seed": 5}],
        stop=Stop({"type": "cancel"}, {"type": "cancelled"}),
        is_pcm=False,
        closing=Closing(full=None, failed=None),
    ),
    "deepgram": SocketRow(
        SAMPLES["Deepgram"],
        error="Error",
        over={"type": "Flushed"},
        refused=[({"type": "Sing"}, "type must be Speak"), ({"type": "Speak"}, "text is required")],
        refusal={"type": "Warning"},
        closing=Closing(drain={"type": "Close"}),
        numbers=['{"type": "Speak", "text": "a", "x": ?}'],
        more=[{"type": "Clear"}, {"type": "Close"}],
        cut=SAMPLES["Deepgram"].messages,
        stop=Stop({"type": "Clear"}, {"type": "Cleared"}),
        queries=["model=aura-2-ryan-en&encoding=linear16&sample_rate=24000&speed=1.1", "encoding=mulaw"],
    ),
    "flux": SocketRow(
        SAMPLES["Deepgram Flux"],
        error="Error",
        over={"type": "SpeechMetadata"},
        refused=[({"type": "Sing"}, "type must be Speak"), ({"type": "Speak"}, "text is required")],
        refusal={"type": "Warning", "code": "MESSAGE-0000"},
        closing=Closing(drain={"type": "Close"}),
        queries=["model=flux-ryan-en&encoding=mulaw&sample_rate=8000"],
        numbers=[json.dumps(OFFSET).replace("50", "?"), '{"type": "Configure", "speed": ?}'],
        more=[OFFSET, {"type": "Configure", "speed": 1.1}, {"type": "Close"}],
        cut=SAMPLES["Deepgram Flux"].messages,
        stop=Stop({"type": "Interrupt"}, {"type": "SpeechInterrupted"}),
        times=WordTimesForm("text_spoken"),
    ),
    "elevenlabs": SocketRow(
        SAMPLES["ElevenLabs"],
        over={"isFinal": True},
        error=None,
        refused=[
            (context(text=5), "text must be a string"),
            ({"text": "x", "context_id": 5}, "context_id must be a string"),
        ],
        refusal={"contextId": None},
        numbers=['{"text": "a", "voice_settings": {"speed": ?}}'],
        more=[context(text="$text", voice_settings={"speed": 1.1}, flush=True), {"close_socket": True}],
        cut=[context(text="$text"), *SAMPLES["ElevenLabs"].messages[2:]],
        stop=Stop(context(close_context=True), {"isFinal": True}),
        closing=Closing(full=None, failed=None),
        queries=["output_format=pcm_24000&sync_alignment=true", "output_format=mp3_44100_128"],
        times=WordTimesForm("alignment", counts_from="words"),
    ),
    "elevenlabs-text": SocketRow(
        Sample(
            "/v1/text-to-speech/$voice/stream-input?output_format=pcm_24000",
            ({"text": " ", "voice_settings": None}, {"text": "$text "}, {"text": ""}),
        ),
        over={"isFinal": True},
        error=None,
        refused=[({"text": 5}, "text must be a string")],
        refusal={"contextId": None},
        queries=["output_format=pcm_16000", "output_format=ulaw_8000"],
        numbers=['{"text": "a", "voice_settings": {"speed": ?}}'],
        more=[context(text="$text", flush=True)],
        cut=[{"text": "$text"}, {"text": ""}],
        closing=Closing(goes_on=False, full=1000, failed=1000),
        times=WordTimesForm("alignment", counts_from="words"),
    ),
    "elevenlabs-dialogue": SocketRow(
        Sample(
            "/v1/text-to-dialogue/multi-stream-input?output_format=pcm_24000",
            (
                context(voices=["$voice"]),
                DIALOGUE,
                context(inputs=[{"text": "", "voice_id": "$voice"}], flush=True),
                context(close_context=True),
            ),
        ),
        over={"is_final": True},
        error=None,
        refused=[
            ({**DIALOGUE, "context_id": 5}, "context_id must be a string"),
            (context(inputs=[{"text": 5}]), "inputs must be a list"),
        ],
        refusal={"context_id": None},
        numbers=['{"inputs": [{"text": "a"}], "voice_settings": {"speed": ?}}'],
        more=[{**DIALOGUE, "flush": True}],
        stop=Stop(context(close_context=True), {"is_final": True}),
        closing=Closing(full=None, failed=None),
        times=WordTimesForm("alignment", counts_from="audio"),
    ),
    "cartesia": SocketRow(
        SAMPLES["Cartesia"],
        over={"type": "done"},
        refused=[
            ({**CARTESIA, "transcript": 5}, "transcript is required"),
            ({**CARTESIA, "output_format": {"container": "raw", "encoding": "pcm_s24"}}, "output_format.encoding"),
        ],
        refusal={"type": "error", "done": True},
        numbers=['{"transcript": "a", "output_format": {"bit_rate": ?}}'],
        more=[
            {**CARTESIA, "continue": True, "output_format": FLOATS, "generation_config": CALM},
            {**CARTESIA, "add_timestamps": True, "flush": True},
            context(transcript="", flush=True, **{"continue": False}),
            context(cancel=True),
        ],
        cut=[{**CARTESIA, "continue": True}, context(transcript="", **{"continue": False})],
        stop=Stop(context(cancel=True)),
        closing=Closing(full=None, failed=None),
        times=WordTimesForm("word_timestamps", asked_by={"add_timestamps": True}),
    ),
    "realtime": SocketRow(
        SAMPLES["OpenAI Realtime"],
        over=response("completed"),
        refused=[
            ({"type": "input_audio_buffer.append", "audio": ""}, "type"),
            ({"type": "session.update"}, "session"),
            (update(output_audio_format="mp3"), "format"),
            ({"type": "response.create", "response": {"input": "Hello"}}, "response.input"),
            ({"type": "response.create", "response": {"input": [{"content": "Hello"}]}}, "response.input"),
            ({"type": "conversation.item.create", "item": []}, "item"),
            ({"type": "response.cancel"}, "type"),
        ],
        numbers=['{"type": "session.update", "session": {"speed": ?}}'],
        more=[
            {**update(output_audio_format="g711_ulaw", audio={"output": ASH}), "event_id": "mine"},
            {"type": "conversation.item.create", "item": item()},
            {"type": "response.create", "response": {"input": [item()], "audio": {"output": {"voice": {"id": "ash"}}}}},
            {"type": "response.create"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
        closing=Closing(full=None, failed=None),
    ),
    "dashscope": SocketRow(
        SAMPLES["DashScope"],
        over=response("completed"),
        refused=[
            ({"type": "nonsense"}, "type"),
            ({"type": "session.update"}, "session"),
            (update(mode="eager"), "session"),
            (update(response_format="flac"), "response_format"),
            (update(sample_rate=5), "sample_rate"),
            ({"type": "input_text_buffer.append", "text": 5}, "text"),
        ],
        numbers=[
            '{"type": "session.update", "session": {"bit_rate": ?}}',
            '{"type": "session.update", "session": {"any": ?}}',
        ],
        more=[
            update(**CHERRY, response_format="wav", sample_rate=24000, speech_rate=1.1, bit_rate=64),
            {"type": "input_text_buffer.commit"},
            {"type": "input_text_buffer.clear"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
        closing=Closing(goes_on=False),
        cut=SAMPLES["DashScope"].messages,
    ),
    "dashscope-commit": SocketRow(
        Sample(SAMPLES["DashScope"].path, COMMITTED),
        over=response("completed"),
        refused=[(update(mode="eager"), "session")],
        numbers=['{"type": "session.update", "session": {"speech_rate": ?}}'],
        more=[{"type": "session.finish"}],
        again=COMMITTED[1:],
        cut=[*COMMITTED[:2], {"type": "session.finish"}],
        stop=Stop({"type": "response.cancel"}, response("cancelled")),
    ),
    "vllm-omni": SocketRow(
        SAMPLES["vLLM-Omni"],
        over={"type": "session.done"},
        refused=[
            ({"type": "input.text", "text": "x"}, "session.config comes first"),
            ({"type": "input.done"}, "session.config comes first"),
            ({"type": "input.text"}, "text is required"),
            ({"type": "session.config", "voice": "nobody"}, "Unknown voice 'nobody'"),
            ({"type": "x"}, "type must be session.config"),
            ({"speed": 1}, "type must be session.config"),
        ],
        refusal={"type": "error", "action": "discard", "partial_audio": False},
        closing=Closing(drain={"type": "session.close"}),
        numbers=['{"type": "session.config", "voice": "ryan", "seed": ?}'],
        more=[{"type": "session.config", "voice": "ryan", "speed": 1.1, "seed": 5}, {"type": "session.close"}],
        again=SAMPLES["vLLM-Omni"].messages[1:],
        cut=SAMPLES["vLLM-Omni"].messages,
    ),
    "nari": SocketRow(
        SAMPLES["nari"],
        over={"type": "response.done", "stop_reason": "stop"},
        refused=[
            ({"type": "input_text.append", "text": "Hello", "sequence": 0}, "type"),
            ({"type": "request.start", "voice": "nobody"}, "voice"),
            ({"type": "request.start", "voice": "ryan", "speed": 9}, "speed"),
            ({"type": "nonsense"}, "type"),
        ],
        numbers=['{"type": "request.start", "voice": "ryan", "top_k": ?}'],
        more=[
            {"type": "request.start", "voice": "ryan", "language": "auto", "instruct": "Softly.", "top_k": 50},
            {"type": "input_text.append", "text": "$text"},
            {"type": "response.cancel"},
        ],
        stop=Stop({"type": "response.cancel"}, {"type": "response.done", "stop_reason": "cancelled"}),
        closing=Closing(goes_on=False),
        cut=[SAMPLES["nari"].messages[0], {"type": "input_text.append", "text": "$text"}, {"type": "input_text.end"}],
    ),
}

SPEECH: Json = {"input": "$text", "voice": "$voice"}
TEXT: Json = {"text": "$text"}
EVENTS: Json = {"word_timestamps": True, "stream_format": "sse"}
REST = "/api/v1/services/aigc/multimodal-generation/generation"
ELEVENLABS = [
    f"{base}{way}"
    for base in ("/v1/text-to-speech/$voice", "/v1/text-to-dialogue")
    for way in ("", "/stream", "/with-timestamps", "/stream/with-timestamps")
]
POSTS = {
    row.sample.path: row
    for row in (
        PostRow(
            SAMPLES["OpenAI"],
            "input",
            [
                ('{"input": "x", "voice": "ryan", "speed": ?}', "speed"),
                ('{"input": "x", "voice": "ryan", "unknown": [{"a": ?}]}', "unknown.a"),
            ],
            more={"voice_id": VOICE, "response_format": "pcm", "stream": True},
            times=WordTimesForm("words", asked_by=EVENTS),
        ),
        PostRow(Sample("/openai/v1/audio/speech", body=SPEECH), "input", times=WordTimesForm("words", EVENTS)),
        PostRow(
            Sample("/openai/deployments/any/audio/speech", body=SPEECH),
            "input",
            more={"model": "tts-1-hd-zh", "lang_code": "a"},
            times=WordTimesForm("words", asked_by=EVENTS),
        ),
        PostRow(
            Sample("/v1/speak", body=TEXT),
            query_numbers=[
                ("encoding=mp3&bit_rate=", "bit_rate"),
                ("speed=", "speed"),
                ("encoding=linear16&sample_rate=", "sample_rate"),
            ],
        ),
        PostRow(Sample("/v2/speak", body=TEXT), query_numbers=[("speed=", "speed")]),
        *(
            PostRow(
                Sample(path, body=TEXT if "speech" in path else {"inputs": [{"text": "$text", "voice_id": "$voice"}]}),
                "text",
                [('{"text": "x", "voice_settings": {"speed": ?}}', "speed")],
                [("output_format=mp3_44100_", "output_format"), ("output_format=pcm_", "output_format")],
                more={"voice_settings": {"speed": 1.1}, "language_code": "en", "seed": 5},
                times=WordTimesForm("alignment" if "with-timestamps" in path else ""),
            )
            for path in ELEVENLABS
        ),
        PostRow(
            Sample("/tts/bytes", body={"transcript": "$text", "voice": {"id": "$voice"}}),
            "transcript",
            [('{"transcript": "x", "output_format": {"container": "mp3", "bit_rate": ?}}', "bit_rate")],
            more={"output_format": {"container": "wav"}},
        ),
        PostRow(
            Sample("/tts/sse", body={"transcript": "$text", "voice": "$voice"}),
            "transcript",
            more={"language": None, "add_timestamps": True},
            times=WordTimesForm("word_timestamps", asked_by={"add_timestamps": True}),
        ),
        PostRow(
            Sample(REST, body={"model": "qwen-tts", "input": {"text": "$text", "voice": "$voice"}}),
            "input",
            [('{"model": "q", "input": {"text": "x"}, "parameters": {"bit_rate": ?}}', "bit_rate")],
            more={"parameters": {"speech_rate": 1.1}},
        ),
        PostRow(
            Sample("/v1/audio/speech/batch", body={"voice": "$voice", "items": 2 * [{"input": "$text"}]}),
            "items",
            [('{"items": [{"input": "x", "overrides": {"top_k": ?}}]}', "top_k")],
            has_results=True,
            more={"items": [{"input": "$text", "overrides": {"speed": 1.1}}]},
        ),
        PostRow(
            SAMPLES["VoxServe"],
            "text",
            [('{"text": "x", "audio": ?}', "audio")],
            more={"streaming": "true", "x_vector_only_mode": False, "speaker": VOICE},
        ),
        PostRow(
            SAMPLES["Kokoro-FastAPI"], "input", more={"stream": False, "speed": 1.1}, times=WordTimesForm("timestamps")
        ),
        PostRow(Sample("/v1/audio/frames", body=SPEECH), "input", more={"seed": 5}),
    )
}
_HERE = [compile_path(path)[0] for dialect in DIALECTS for path in dialect.paths]


def is_here(path: str) -> bool:
    """Whether a dialect has it. Tests leave out the rows of extensions that were removed."""
    return any(here.match(path.partition("?")[0]) for here in _HERE)


SOCKETS = {name: row for name, row in SOCKETS.items() if row.sample.path}
POSTS = {path: row for path, row in POSTS.items() if is_here(path)}
