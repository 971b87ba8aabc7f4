"""Request and response formats that different vendors' servers use to stream the same text."""

from collections.abc import Mapping
from dataclasses import dataclass, field

_SPEECH = "/v1/audio/speech"
_OPENAI = {"text": "input", "voice": "voice", "model": "model"}


@dataclass(frozen=True, slots=True)
class SocketForm:
    """A vendor's WebSocket messages, except the text message. The default sample rate is 24 kHz."""

    over: tuple[str, object]  # field and value of the final message
    before: tuple[Mapping[str, object], ...] = ()
    after: tuple[Mapping[str, object], ...] = ()
    audio: str | None = None  # field with base64 samples; None: samples arrive in binary messages


@dataclass(frozen=True, slots=True)
class RequestForm:
    """One vendor's request for streamed raw 16-bit mono audio, over HTTP or on one WebSocket per text."""

    name: str
    path: str = _SPEECH  # appended to the server's URL; may contain {voice} and {model}
    names: Mapping[str, str] = field(default_factory=lambda: _OPENAI)  # of the `text`, `voice` and `model` fields
    always: Mapping[str, object] = field(default_factory=lambda: {"response_format": "pcm"})
    is_form: bool = False  # multipart form instead of JSON
    answers_wav: bool = False  # streams a WAV file, whose header does not count as audio
    has_lengths: bool = False  # supports `max_new_tokens` and `ignore_eos`
    socket: SocketForm | None = None

    def url(self, base: str, options: Mapping[str, object]) -> str:
        return base.rstrip("/").removesuffix("/v1") + self.path.format(**{"voice": "", "model": "", **options})

    def body(self, text: str, options: Mapping[str, object]) -> dict[str, object]:
        """Build a request body. `options` are `voice`, `model` and any fields under the vendor's own names."""
        known = {"text": text} | {name: options[name] for name in ("model", "voice") if name in options}
        said = {self.names[name]: value for name, value in known.items() if name in self.names}
        return {**{name: value for name, value in options.items() if name not in known}, **said, **self.always}


TALKRAY_WS = "talkray-ws"
_STREAMED = {"response_format": "pcm", "stream": True}
DIALECTS = {
    each.name: each
    for each in (
        RequestForm("talkray", has_lengths=True),
        RequestForm("openai"),
        RequestForm("vllm-omni", always={**_STREAMED, "stream_format": "audio"}),
        RequestForm("sglang-omni", always=_STREAMED),
        RequestForm("nari", always={**_STREAMED, "non_streaming_mode": False}),
        RequestForm(
            "voxserve", "/generate", {"text": "text", "voice": "speaker"}, {"streaming": "true"},
            is_form=True, answers_wav=True,
        ),
        RequestForm(
            "elevenlabs", "/v1/text-to-speech/{voice}/stream?output_format=pcm_24000",
            {"text": "text", "model": "model_id"}, {},
        ),
        RequestForm(
            TALKRAY_WS, f"{_SPEECH}/ws", always={"type": "speak", "response_format": "pcm"}, has_lengths=True,
            socket=SocketForm(over=("type", "done")),
        ),
        RequestForm(
            "elevenlabs-ws", "/v1/text-to-speech/{voice}/stream-input?output_format=pcm_24000&model_id={model}",
            {"text": "text"}, {},
            socket=SocketForm(
                over=("isFinal", True), before=({"text": " "},), after=({"text": " "}, {"text": ""}), audio="audio",
            ),
        ),
        RequestForm(
            "deepgram-ws", "/v1/speak?model={voice}&encoding=linear16&sample_rate=24000",
            {"text": "text"}, {"type": "Speak"},
            socket=SocketForm(over=("type", "Flushed"), after=({"type": "Flush"},)),
        ),
    )
}  # fmt: skip
