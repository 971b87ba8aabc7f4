"""Client's request for speech: model, voice, text, and the format of the audio."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote

from deployments.protocol import ModelInfo
from serve_app.api.headers import (
    CHOSEN_VOICE_HEADER,
    SAMPLE_RATE_HEADER,
    SOURCE_HEADER,
    TAKE_HEADER,
    UNBUFFERED_HEADERS,
    WORD_TIMES_HEADER,
)
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.resolve import ignored_fields
from serve_app.api.voice_source import ChosenVoice
from serve_app.audio.file_headers import SYNTHETIC
from serve_app.audio.formats import FORMATS, AudioFormat, AudioOptions, CompressedFormat, RawFormat, Rendering
from serve_app.text.spoken import SpokenText

EVENT_STREAM = "text/event-stream"
L16 = "audio/l16"

CONTENT_TYPES = {audio_format: row.content_type for audio_format, row in FORMATS.items()}
# Formats that have no container.
RAW = tuple(each for each, row in FORMATS.items() if isinstance(row, RawFormat) and not row.in_wav)
# Other types in an Accept header, such as */* and application/octet-stream, do not express a preference.
ACCEPTED = {content_type: audio_format for audio_format, content_type in CONTENT_TYPES.items()} | {L16: AudioFormat.PCM}


@dataclass(frozen=True, slots=True)
class Delivery(AudioOptions):
    """Audio format and transport of one response: `AudioOptions`, such as `whole` and `speed`, and these."""

    events: bool = False  # server-sent events instead of raw audio
    l16: bool = False  # PCM under its RTP name, audio/L16
    files: bool = False  # session option: send a separate file per turn instead of one stream

    @property
    def has_bit_rate(self) -> bool:
        """Whether clients may choose the bit rate of the format."""
        row = FORMATS[self.audio_format]
        return isinstance(row, CompressedFormat) and row.bit_rate is not None

    def rate(self, info: ModelInfo) -> int:
        """Return the sample rate of the response, in Hz."""
        return self.sample_rate or info.sample_rate

    def rendering(self, info: ModelInfo) -> Rendering:
        """Create the rendering that converts the model's audio to this format."""
        return Rendering(self, info.sample_rate, info.frame_samples)

    def content_type(self, sample_rate: int) -> str:
        if self.events:
            return EVENT_STREAM
        if self.in_wav:
            return CONTENT_TYPES[AudioFormat.WAV]
        if self.audio_format in RAW:
            name = "audio/L16" if self.l16 else CONTENT_TYPES[self.audio_format]
            return f"{name};rate={sample_rate};channels=1"
        return CONTENT_TYPES[self.audio_format]


@dataclass(frozen=True, slots=True)
class SpeechRequest:
    """Client's request in terms of Talkray's own fields. The text is in `body.input` or arrives later."""

    info: ModelInfo
    body: SpeechBody
    delivery: Delivery
    ignored: ignored_fields.Reasons
    spoken: SpokenText  # spoken form of `body.input`, and rules for text that arrives later
    voice: ChosenVoice
    instructions: str | None = None  # a style tag in the text takes precedence over those of the body
    is_tagged: bool = False  # whether a style tag in the text selected the recording
    word_times: bool = False  # whether the response contains word timestamps
    fields: Mapping[str, str] = field(default_factory=dict)  # client's names for fields named differently in Talkray

    @property
    def voice_take(self) -> str | None:
        """The stored voice's recording in use, and why it was chosen."""
        stored = self.voice.stored
        return None if stored is None else stored.describe_take(self.instructions, is_tagged=self.is_tagged)

    def headers(self) -> dict[str, str]:
        """Return headers for an HTTP response or a handshake. The headers report ignored fields, the recording in use,
        and how word timestamps are determined.
        """
        take = {} if self.voice_take is None else {TAKE_HEADER: quote(self.voice_take, safe=" (),:")}
        known = "exact" if self.info.word_times else "estimated"
        times = {WORD_TIMES_HEADER: known} if self.word_times else {}
        chosen = {} if self.voice.default is None else {CHOSEN_VOICE_HEADER: quote(self.voice.default)}
        notes = {**ignored_fields.as_header(self.ignored), **chosen, **take, **times}
        return {**notes, **disclosure(self.delivery.disclosed)}

    def notes(self) -> dict[str, object]:
        """Return WebSocket message fields that report ignored fields, the recording in use, and that the speech is
        synthetic.
        """
        take = {} if self.voice_take is None else {"voice_take": self.voice_take}
        source = {"digital_source_type": SYNTHETIC} if self.delivery.disclosed else {}
        chosen = {} if self.voice.default is None else {"voice": self.voice.default}
        return {**chosen, **take, **source, **ignored_fields.in_message(self.ignored)}


def negotiate(body: SpeechBody, accept: str, *, default: AudioFormat = AudioFormat.MP3) -> Delivery:
    """Choose the delivery from the body's fields, then from the Accept header, then from `default`."""
    wanted = preferred_type(accept)
    events = body.stream_format == "sse" or (body.stream_format is None and wanted == EVENT_STREAM)
    accepted = ACCEPTED.get(wanted or "", default)
    return Delivery(
        audio_format=body.response_format or accepted,
        events=events,
        whole=not body.stream,
        speed=body.speed,
        l16=body.response_format is None and wanted == L16,
        sample_rate=body.sample_rate,
    )


def preferred_type(accept: str) -> str | None:
    """Return the supported media type with the highest quality value in the header. The first one wins ties."""
    ranges = [_media_range(part) for part in accept.split(",")]
    known = [(quality, name) for name, quality in ranges if quality > 0 and (name in ACCEPTED or name == EVENT_STREAM)]
    return max(known, key=lambda entry: entry[0])[1] if known else None


def _media_range(part: str) -> tuple[str, float]:
    name, *parameters = (piece.strip().lower() for piece in part.split(";"))
    quality = next((value[2:] for value in parameters if value.startswith("q=")), "1")
    try:
        return name, float(quality)
    except ValueError:
        return name, 0.0


def disclosure(is_disclosed: bool) -> dict[str, str]:
    """Return the response or handshake header that marks the speech as synthetic."""
    return {SOURCE_HEADER: SYNTHETIC} if is_disclosed else {}


def speech_headers(delivery: Delivery, info: ModelInfo) -> Mapping[str, str]:
    """Return headers that disable proxy buffering and describe raw PCM."""
    return {
        "content-type": delivery.content_type(delivery.rate(info)),
        **UNBUFFERED_HEADERS,
        SAMPLE_RATE_HEADER: str(delivery.rate(info)),
    }
