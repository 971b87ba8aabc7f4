"""ElevenLabs' HTTP API: speak a text or a dialogue, and respond with audio or JSON."""

import base64
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

from starlette.requests import Request
from starlette.responses import Response

from deployments.errors import InvalidRequest, NotFound
from serve_app.api.context import state_of
from serve_app.api.parsing import field_names
from serve_app.api.parsing.client_input import format_named, switch, text_of
from serve_app.api.request_record import Usage
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.responses.events import in_parts
from serve_app.api.responses.respond import respond
from serve_app.api.responses.speech_response import StreamedFormat, WholeFormat
from serve_app.api.responses.whole_audio import AUDIO_HERE, object_with
from serve_app.api.speech_service import SpeechService
from serve_app.audio.formats import AudioFormat
from serve_app.extension import Dialect, Route
from serve_app.extensions.continuity.dialogue import respond_in_parts
from serve_app.extensions.continuity.tails import PREVIOUS
from serve_app.extensions.voices.library import voices_of
from serve_app.extensions.voices.stored_voice import StoredLexicon
from serve_app.extensions.voices.voice_store import StoreFailed
from serve_app.speech.observers import Word, WordSource, marked
from serve_app.text.characters import is_ideograph, is_speakable

FORMATS = {
    "mp3": AudioFormat.MP3,
    "pcm": AudioFormat.PCM,
    "wav": AudioFormat.WAV,
    "ulaw": AudioFormat.MULAW,
    "alaw": AudioFormat.ALAW,
    "opus": AudioFormat.OPUS,
}
LOCATORS = "pronunciation_dictionary_locators"
DEFAULT_FORMAT = "mp3_44100_128"
_PREVIOUS = "previous_request_ids"
NAMES: field_names.Names = {
    "text": "input",
    "inputs": "input",
    "voice_id": "voice",
    "model_id": "model",
    "language_code": "language",
    "voice_settings.speed": "speed",
    "seed": "seed",
    "output_format": None,
    "enable_ssml_parsing": None,
    "apply_text_normalization": "text_normalization",
    LOCATORS: None,
    _PREVIOUS: None,
}
_LONGEST_NAME = 40  # maximum length of a format name
_MOST_LOCATORS = 3
_AROUND = ("previous_text", "next_text")
_ONLY_HTTP = "must be a list of IDs in an HTTP body"
_JSON, _LINES = "application/json", "application/x-ndjson"


def _speaking(
    *, stream: bool = False, timestamps: bool = False
) -> Callable[[SpeechService, Request], Awaitable[Response]]:
    async def speak(service: SpeechService, request: Request) -> Response:
        """Speak `text`, or the `inputs` of a dialogue. `output_format` defaults to MP3."""
        fields = await service.read_fields(request)
        voice = request.path_params.get("voice_id")
        speech = await speech_request(service, fields, request.query_params, voice=voice, words=timestamps)
        speech, parts = await _dialogue(service, speech, fields.get("inputs"))
        usage = state_of(request).record.usage
        timed = StreamedFormat(_LINES, partial(_lines, usage=usage)) if stream else WholeFormat(_JSON, _timed)
        own = timed if timestamps else None
        speaking = (
            respond_in_parts(service, request, speech, own, parts) if parts else respond(service, request, speech, own)
        )
        answer = await speaking
        answer.headers["request-id"] = state_of(request).record.request_id  # for `previous_request_ids`
        return answer

    return speak


def texts_around(sent: Iterable[str]) -> dict[str, str]:
    """Return the fields in `sent` that contain preceding or following text, and why they have no effect."""
    return {name: "needs its audio: over HTTP use previous_request_ids" for name in _AROUND if name in sent}


def beside_text(sent: Iterable[str]) -> dict[str, str]:
    """Return the ignored context fields of a WebSocket message, which always continues the previous message."""
    return texts_around(sent) | ({_PREVIOUS: _ONLY_HTTP} if _PREVIOUS in sent else {})


def _ways(path: str, summary: str) -> tuple[Route, ...]:
    return (
        Route(f"POST {path}", _speaking(), summary),
        Route(f"POST {path}/stream", _speaking(stream=True), f"{summary}, streamed"),
        Route(f"POST {path}/with-timestamps", _speaking(timestamps=True), f"{summary}, with times"),
        Route(
            f"POST {path}/stream/with-timestamps",
            _speaking(stream=True, timestamps=True),
            f"{summary}, streamed, with times",
        ),
    )


async def request_in_voice(resolver: Resolver, speech: SpeechRequest, voice: str) -> SpeechRequest:
    """Copy a lenient request for another voice. The copy's `ignored` covers only that voice."""
    chosen = await resolver.choose_voice(voice, speech.body, speech.info, lenient=True)
    spoken, _ = await resolver.read_text(speech.body, speech.info, chosen.stored)
    chosen = replace(chosen, default=None)
    return replace(speech, ignored=chosen.ignored, spoken=spoken, voice=chosen, is_tagged=False)


async def speech_request(
    service: SpeechService,
    fields: Mapping[str, object],
    query: Mapping[str, str],
    *,
    voice: str | None,
    words: bool,
    names: field_names.Names = NAMES,
) -> SpeechRequest:
    """Create a request from a body and a query. `words` enables word times. The request for a dialogue contains the
    text of all inputs and the voice of the first input. Raises InvalidRequest.
    """
    audio_format, sample_rate, bit_rate = output(query.get("output_format", DEFAULT_FORMAT))
    sent: dict[str, object] = {**query, **field_names.flat(fields, names)}
    reasons = {"output_format": "send it in the query instead"} if "output_format" in fields else {}
    if "inputs" in fields:
        text, voice = dialogue(fields["inputs"])
        reasons |= unknown(fields["inputs"])
    else:
        text = text_of(fields)
        sent["voice_id"] = voice
    overrides: dict[str, object] = {"input": text, "voice": voice, "sample_rate": sample_rate, "word_timestamps": words}
    if switch(sent, "enable_ssml_parsing"):
        overrides["markup"] = "ssml"
    if sent.get("apply_text_normalization") == "auto":
        overrides["text_normalization"] = "off"  # the model normalizes text itself
    if LOCATORS in sent:
        overrides["lexicon"] = await located(service, sent[LOCATORS], reasons)
    match sent.get(_PREVIOUS):
        case [*_, str(previous)]:
            overrides[PREVIOUS] = previous
        case None:
            pass
        case _:
            reasons[_PREVIOUS] = _ONLY_HTTP
    reasons |= texts_around(sent)
    delivery = Delivery(audio_format, bit_rate=bit_rate)
    resolver = service.resolver
    speech = await resolver.lenient_request(sent, names, delivery=delivery, overrides=overrides, reasons=reasons)
    return replace(speech, fields={**speech.fields, PREVIOUS: _PREVIOUS})


async def located(service: SpeechService, locators: object, reasons: dict[str, str]) -> dict[str, str]:
    """Return the words in the pronunciation dictionaries. The first dictionary takes precedence. Add the errors for
    missing dictionaries to `reasons`. Raises InvalidRequest if `locators` is not a list of up to three objects.
    """
    named = locators if isinstance(locators, list) else [None]
    if len(named) > _MOST_LOCATORS or not all(isinstance(locator, dict) for locator in named):
        raise InvalidRequest(f"{LOCATORS} must be a list of up to {_MOST_LOCATORS} objects.", LOCATORS)
    words: dict[str, str] = {}
    for locator in reversed(named):
        try:
            named_id = str(locator.get("pronunciation_dictionary_id"))
            lexicon = await voices_of(service).get_other(StoredLexicon, named_id)
        except (NotFound, StoreFailed) as error:
            reasons[LOCATORS] = str(error)
            continue
        words |= lexicon.words
        if locator.get("version_id") not in (None, lexicon.version):
            reasons[LOCATORS] = f"only the newest version of {lexicon.id} exists"
    return words


def output(name: str) -> tuple[AudioFormat, int, int | None]:
    """Parse format, rate in Hz and bits per second from a name such as mp3_22050_32. Raises InvalidRequest."""
    kind, *numbers = name[:_LONGEST_NAME].strip().split("_")
    audio_format = format_named("output_format", kind, FORMATS)
    if not 1 <= len(numbers) <= 2 or not all(
        number.isascii() and number.isdigit() and len(number) < 8 for number in numbers
    ):
        raise InvalidRequest(
            f"output_format: {name[:_LONGEST_NAME]!r} is invalid. Use the form mp3_44100_128.", "output_format"
        )
    return audio_format, int(numbers[0]), int(numbers[1]) * 1000 if len(numbers) > 1 else None


def dialogue(inputs: object) -> tuple[str, str | None]:
    """Return the text of all inputs, and the voice of the first input. Raises InvalidRequest."""
    parts = inputs if isinstance(inputs, list) else []
    if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in parts) or not parts:
        raise InvalidRequest("inputs must be a list of objects with a text.", "inputs")
    voice = parts[0].get("voice_id")
    return " ".join(part["text"] for part in parts), voice if isinstance(voice, str) else None


def unknown(inputs: object) -> dict[str, str]:
    """Return the unknown fields in a dialogue's inputs, and why they are ignored."""
    parts = [part for part in inputs if isinstance(part, Mapping)] if isinstance(inputs, list) else []
    names = (name for part in parts for name in part if name not in ("text", "voice_id"))
    return {f"inputs.{name}": "not supported" for name in names}


async def _dialogue(
    service: SpeechService, speech: SpeechRequest, inputs: object
) -> tuple[SpeechRequest, list[SpeechRequest]]:
    """Split a dialogue into parts. Consecutive inputs with the same voice form one part.

    Return the request for the complete dialogue, which also lists unknown voices, and one for each part. Return no
    parts if there is only one voice.
    """
    spoken = inputs if isinstance(inputs, list) else []
    runs = [
        (voice, [part["text"] for part in run]) for voice, run in groupby(spoken, lambda part: part.get("voice_id"))
    ]
    if len(runs) < 2:
        return speech, []
    parts = []
    ignored, unread = dict(speech.ignored), Counter[str]()
    for voice, texts in runs:
        own = replace(speech, body=speech.body.model_copy(update={"input": " ".join(texts)}))
        part = await request_in_voice(
            service.resolver, own, voice if isinstance(voice, str) else speech.voice.name or ""
        )
        if "voice" in part.ignored:
            ignored["inputs.voice_id"] = part.ignored["voice"]
        unread += part.spoken.left_out
        if is_speakable(part.spoken.text):
            parts.append(part)
    ignored = {name: why for name, why in ignored.items() if why != ignored_fields.left_out(speech.spoken.left_out)}
    ignored |= {"inputs": ignored_fields.left_out(unread)} if unread else {}
    return replace(speech, ignored=ignored), parts


def encoded(audio: bytes) -> str:
    return base64.b64encode(audio).decode()


def characters(words: Sequence[Word]) -> tuple[list[str], list[float], list[float]]:
    """Return all characters with their starts and ends in seconds. Divide each word's time evenly among its characters.

    Add a space after each word, unless the word ends with an ideograph. The space tells clients where a word ends.
    """
    chars: list[str] = []
    starts_s: list[float] = []
    ends_s: list[float] = []
    for word in words:
        step_s = (word.end_s - word.start_s) / len(word.text)
        chars += word.text
        starts_s += [word.start_s + number * step_s for number in range(len(word.text))]
        ends_s += [word.start_s + (number + 1) * step_s for number in range(len(word.text))]
        if not is_ideograph(word.text[-1]):
            chars, starts_s, ends_s = [*chars, " "], [*starts_s, word.end_s], [*ends_s, word.end_s]
    return chars, starts_s, ends_s


def _timed(audio: bytes, times: WordSource | None, **more: object) -> Iterator[bytes]:
    """Yield a JSON object with audio, new word times, and `more` fields."""
    alignment = None
    words = [] if times is None else times.take()
    if words:
        chars, starts_s, ends_s = characters(words)
        alignment = {
            "characters": chars,
            "character_start_times_seconds": [round(start_s, 3) for start_s in starts_s],
            "character_end_times_seconds": [round(end_s, 3) for end_s in ends_s],
        }
    fields = {"audio_base64": AUDIO_HERE, "alignment": alignment, "normalized_alignment": alignment, **marked(words)}
    return object_with({**fields, **more}, audio)


def _lines(
    audio: AsyncGenerator[bytes, None], times: WordSource | None, *, usage: Usage
) -> AsyncGenerator[bytes, None]:
    """Yield a line for each part of at most one second, because some clients limit the line length. The last line
    contains only the finish reason.
    """

    def line(part: bytes, **more: object) -> bytes:
        return b"".join((*_timed(part, times, **more), b"\n"))

    return in_parts(audio, line, lambda: line(b"", finish_reason=usage.finish_reason))


DIALECT = Dialect(
    "ElevenLabs",
    routes=(
        *_ways("/v1/text-to-speech/{voice_id}", "Speak a text (ElevenLabs)"),
        *_ways("/v1/text-to-dialogue", "Speak a dialogue (ElevenLabs)"),
    ),
    key_headers=("xi-api-key",),
)
