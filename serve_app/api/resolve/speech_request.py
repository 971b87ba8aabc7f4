"""A client's request for speech: model, voice and text, and the form in which its audio is delivered."""

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
from serve_app.api.voice_source import KeptVoice
from serve_app.audio.file_headers import SYNTHETIC
from serve_app.audio.formats import FORMATS, AudioForm, AudioFormat, CompressedFormat, RawFormat, Rendering
from serve_app.text.spoken import SpokenText

EVENT_STREAM = "text/event-stream"
L16 = "audio/l16"

CONTENT_TYPES = {audio_format: row.content_type for audio_format, row in FORMATS.items()}
# Without a container.
RAW = tuple(each for each, row in FORMATS.items() if isinstance(row, RawFormat) and not row.in_wav)
# Anything else in an Accept header, such as the */* and application/octet-stream of every client, is no preference.
ACCEPTED = {content_type: audio_format for audio_format, content_type in CONTENT_TYPES.items()} | {L16: AudioFormat.PCM}


@dataclass(frozen=True, slots=True)
class Delivery(AudioForm):
    """The form of one response: its audio, and what carries it."""

    events: bool = False  # server-sent events instead of bare audio
    l16: bool = False  # PCM under its RTP name
    files: bool = False  # of a session: the audio of each turn is a file of its own, else all of it is one stream

    @property
    def has_bit_rate(self) -> bool:
        """Whether the bit rate of the format may be chosen."""
        row = FORMATS[self.audio_format]
        return isinstance(row, CompressedFormat) and row.bit_rate is not None

    def rate(self, info: ModelInfo) -> int:
        """Samples a second of the answer."""
        return self.sample_rate or info.sample_rate

    def rendering(self, info: ModelInfo) -> Rendering:
        """The rendering that turns the model's audio into its bytes."""
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
    """A client's request in our own fields; the text is `body.input`, or comes later."""

    info: ModelInfo
    body: SpeechBody
    delivery: Delivery
    ignored: ignored_fields.Reasons
    spoken: SpokenText  # what is spoken of `body.input`, and the rules for text that comes later
    stored: KeptVoice | None = None  # that speaks
    is_tagged: bool = False  # whether a tag of the text chose its recording
    chosen_voice: str | None = None  # that speaks because the request names none
    fields: Mapping[str, str] = field(default_factory=dict)  # the client's names, of fields that have others than ours

    @property
    def voice_id(self) -> str | None:
        """Of a stored voice that speaks."""
        return None if self.stored is None else self.stored.id

    @property
    def voice_take(self) -> str | None:
        """Which recording of a stored voice speaks, and what chose it."""
        if self.stored is None:
            return None
        return self.stored.take_note(self.body.instructions, is_tagged=self.is_tagged)

    def headers(self) -> dict[str, str]:
        """Headers of an HTTP response or a handshake. They say what was ignored, which recording speaks, and how the
        times of words are known.
        """
        take = {} if self.voice_take is None else {TAKE_HEADER: quote(self.voice_take, safe=" (),:")}
        known = "exact" if self.info.word_times else "estimated"
        times = {WORD_TIMES_HEADER: known} if self.body.word_timestamps else {}
        chosen = {} if self.chosen_voice is None else {CHOSEN_VOICE_HEADER: quote(self.chosen_voice)}
        notes = {**ignored_fields.as_header(self.ignored), **chosen, **take, **times}
        return {**notes, **disclosure(self.delivery.disclosed)}

    def notes(self) -> dict[str, object]:
        """Fields of a socket's message that say what was ignored, which recording speaks, and that a machine does."""
        take = {} if self.voice_take is None else {"voice_take": self.voice_take}
        source = {"digital_source_type": SYNTHETIC} if self.delivery.disclosed else {}
        chosen = {} if self.chosen_voice is None else {"voice": self.chosen_voice}
        return {**chosen, **take, **source, **ignored_fields.in_message(self.ignored)}


def negotiate(body: SpeechBody, accept: str, *, default: AudioFormat = AudioFormat.MP3) -> Delivery:
    """The body's fields decide; the Accept header only if they say nothing, and the `default` after both."""
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
    """The known media type that the header likes best, the first of equals."""
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
    """The header of an answer or a handshake that says that the speech is synthetic."""
    return {SOURCE_HEADER: SYNTHETIC} if is_disclosed else {}


def speech_headers(delivery: Delivery, info: ModelInfo) -> Mapping[str, str]:
    """Headers that keep proxies from buffering and describe raw PCM."""
    return {
        "content-type": delivery.content_type(delivery.rate(info)),
        **UNBUFFERED_HEADERS,
        SAMPLE_RATE_HEADER: str(delivery.rate(info)),
    }
