"""`POST /v1/audio/text`: what of a text is spoken."""

import re

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from deployments.embedded_voice.english import unspoken
from deployments.protocol import ModelInfo
from serve_app.api.openai_speech import SPEECH_DOCS
from serve_app.api.parsing.client_input import read_object
from serve_app.api.resolve import ignored_fields
from serve_app.api.resolve.build_utterance import segments_of
from serve_app.api.resolve.make_request import strict_request
from serve_app.api.speech_service import SpeechService
from serve_app.extension import Dialect, Route
from serve_app.extensions.text.spoken_text import ReadText
from serve_app.text.spoken import LEFT_OUT, SpokenText


async def show_text(service: SpeechService, request: Request) -> Response:
    """Takes the fields of `/v1/audio/speech`, and answers what would be spoken, what would not, and in which parts."""
    fields = await read_object(request)
    speech = await strict_request(service.offer, fields)
    spoken = speech.spoken
    assert isinstance(spoken, ReadText)
    answer = {
        "object": "audio.text",
        "model": speech.info.name,
        "markup": spoken.rules.markup,
        "sent": spoken.sent,
        "spoken": spoken.text,
        "left_out": [{"what": kind, "count": count} for kind, count in spoken.left_out.items()],
        "segments": [{"text": part.text, "pause_s": part.pause_s, "speed": part.speed} for part in segments_of(speech)],
        "changed": [
            {"written": piece.written.replace(LEFT_OUT, "").strip(), "spoken": piece.spoken.strip()}
            for piece in spoken.pieces()
            if piece.spoken.strip() and piece.spoken.split() != piece.written.replace(LEFT_OUT, "").split()
        ],
        "unspoken": _unspoken(spoken, speech.info),
        "ignored": ignored_fields.entries(speech.ignored),
    }
    return JSONResponse(answer, headers=ignored_fields.as_header(speech.ignored))


def _unspoken(spoken: SpokenText, info: ModelInfo) -> list[tuple[int, int]]:
    """Start and end, in code points of `sent`, of each run that is not read aloud."""

    def mark(run: re.Match[str]) -> str:
        word = run[0]
        return LEFT_OUT * len(word) if unspoken(word) == len(word) else word

    pieces = spoken.pieces()
    sent = "".join(each.written if each.spoken.strip() else re.sub(r"\S", LEFT_OUT, each.written) for each in pieces)
    marked = sent if info.spoken_form is None else re.sub(r"[^\W\d_]+", mark, sent)
    return [run.span() for run in re.finditer(f"{LEFT_OUT}+", marked)]


_DOCS = {"requestBody": SPEECH_DOCS["requestBody"]}
DIALECT = Dialect(
    "OpenAI",
    routes=(Route("POST /v1/audio/text", show_text, "Show what of a text is spoken", docs=_DOCS),),
    heading="Speech",
)
