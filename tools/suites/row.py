"""What `rows/` has of each extension."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve_app.extension import Sample
from serve_app.extensions import load_extensions
from tools.suites.documented import Documented, Json

VOICE = "ryan"


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
class End:
    """What tells how speech ended: the last line or event of a streamed answer."""

    of: Literal["lines", "events"]
    asked_by: Json = field(default_factory=dict)  # fields of the body
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostRow:
    """One `POST`. In `numbers`, `query_numbers` and `formats` a "?" stands where a number or a format belongs."""

    sample: Sample
    text: str = "text"  # the field that a body without its text misses
    name: str = ""  # in docs/clients.md, where it says what an unknown voice gets
    numbers: Sequence[tuple[str, str]] = ()  # bodies, and the field that a refusal names
    query_numbers: Sequence[tuple[str, str]] = ()  # the end of a query, the field
    wrong: Sequence[tuple[Json, str]] = ()  # other values that are refused: fields of a body, and the one named
    formats: Sequence[tuple[str, Json, str]] = ()  # the end of a query, fields of a body, the name of a format
    has_results: bool = False  # whether errors of speech are in the result of each item
    # The end of a query and fields that ask for whole audio in JSON, as PCM; its place in the answer.
    whole: tuple[str, Json, Sequence[str]] | None = None
    end: End | None = None
    more: Json = field(default_factory=dict)  # fields for the fuzzers
    times: WordTimesForm = field(default_factory=WordTimesForm)

    @property
    def path(self) -> str:
        return self.sample.filled(voice=VOICE).path

    @property
    def place(self) -> str:
        """As documents have it."""
        return f"POST {_shown(self.sample)}"

    def with_query(self, more: str) -> str:
        """Its path, with this at the end of the query."""
        return f"{self.path}{'&' if '?' in self.path else '?'}{more}" if more else self.path

    def body(self, text: str = "Hello.", *, voice: str = VOICE, **more: object) -> Json:
        body = {**(self.sample.body or {}), **more}
        return dict(Sample("", body=body).filled(text=text, voice=voice).body or {})


@dataclass(frozen=True, slots=True)
class Owned:
    """The `POST` that makes an object of one owner."""

    path: str
    fields: Json
    files: Sequence[str] = ()  # parts of a form that hold a recording; (): the fields are JSON


@dataclass(frozen=True, slots=True)
class Issuing:
    """The `POST` that issues an access token."""

    fields: Json
    token: str  # the field of the answer that has it
    purpose: str  # its name in PURPOSES (tokens.py)


@dataclass(frozen=True, slots=True)
class Rows:
    """Of one extension, or of the core."""

    sockets: Mapping[str, SocketRow] = field(default_factory=dict)
    posts: Mapping[str, PostRow] = field(default_factory=dict)
    documented: Mapping[str, Documented] = field(default_factory=dict)
    # By the parameter of paths that names it.
    owned: Mapping[str, Owned] = field(default_factory=dict)
    issuing: Mapping[str, Issuing] = field(default_factory=dict)  # by path


def samples_of(extension: str) -> dict[str, Sample]:
    """What the dialects of an extension are asked, by their names."""
    [found] = [each for each in load_extensions() if each.name == extension]
    return {dialect.name: dialect.sample for dialect in found.dialects if dialect.sample is not None}


def by_path(*rows: PostRow) -> dict[str, PostRow]:
    return {row.sample.path.partition("?")[0]: row for row in rows}


def _shown(sample: Sample) -> str:
    return sample.path.partition("?")[0].replace("$voice", "{voice}").replace("/any/", "/{deployment}/")


def _filled(messages: Sequence[Mapping[str, object]], text: str) -> list[Json]:
    return [dict(message) for message in Sample("", tuple(messages)).filled(text=text, voice=VOICE).messages]


def context(**fields: object) -> Json:
    return {"context_id": "check", **fields}


def update(**session: object) -> Json:
    return {"type": "session.update", "session": session}


def response(status: str) -> Json:
    return {"type": "response.done", "response": {"status": status}}
