"""How a client wants its audio: container, framing, speed, at once or as it comes."""

from dataclasses import dataclass

from serve_app.audio import AudioFormat
from serve_app.schemas import SpeechBody

EVENT_STREAM = "text/event-stream"
L16 = "audio/l16"

CONTENT_TYPES = {
    AudioFormat.MP3: "audio/mpeg",
    AudioFormat.OPUS: "audio/ogg",
    AudioFormat.AAC: "audio/aac",
    AudioFormat.FLAC: "audio/flac",
    AudioFormat.WAV: "audio/wav",
    AudioFormat.PCM: "audio/pcm",
}
# Anything else in an Accept header, such as the */* and application/octet-stream of every client, is no preference.
ACCEPTED = {content_type: audio_format for audio_format, content_type in CONTENT_TYPES.items()} | {L16: AudioFormat.PCM}


@dataclass(frozen=True, slots=True)
class Delivery:
    """The form of one response."""

    audio_format: AudioFormat
    events: bool = False  # server-sent events instead of bare audio
    whole: bool = False  # one body of known length instead of a stream
    speed: float = 1.0
    l16: bool = False  # PCM under its RTP name

    def content_type(self, sample_rate: int) -> str:
        """Value of the Content-Type header."""
        if self.events:
            return EVENT_STREAM
        if self.audio_format is AudioFormat.PCM:
            return f"audio/{'L16' if self.l16 else 'pcm'};rate={sample_rate};channels=1"
        return CONTENT_TYPES[self.audio_format]


def negotiate(body: SpeechBody, accept: str) -> Delivery:
    """The body's fields decide; the Accept header only where they say nothing."""
    wanted = preferred_type(accept)
    events = body.stream_format == "sse" or (body.stream_format is None and wanted == EVENT_STREAM)
    accepted = ACCEPTED.get(wanted or "", AudioFormat.MP3)
    return Delivery(
        audio_format=body.response_format or accepted,
        events=events,
        whole=not body.stream,
        speed=body.speed,
        l16=body.response_format is None and wanted == L16,
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
