"""Types used in `rows/`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from serve_app.extension import Sample
from serve_app.extensions import load_extensions
from tools.suites.documented import Documented, Json

VOICE = "ryan"


@dataclass(frozen=True, slots=True)
class WordTimesForm:
    """How a protocol reports word times."""

    in_field: str = ""  # field of a response with word times; empty if there are none
    asked_by: Json = field(default_factory=dict)  # fields of the first message or the body that request word times
    counts_from: Literal["beginning", "words", "audio"] = "beginning"  # time zero, in all audio or a message


@dataclass(frozen=True, slots=True)
class Stop:
    """Message that stops an utterance."""

    message: Json
    answer: Json | None = None  # fields of the response; None: no response


@dataclass(frozen=True, slots=True)
class Closing:
    """Behaviour of a socket at the end, with close codes. None means that the socket stays open."""

    stays_open: bool = True  # whether the socket stays open after an utterance, even after a cancelled one
    full: int | None = 1013  # close code if the server is at capacity
    failed: int | None = 1011  # close code if speech fails
    farewell: str = ""  # type of a message between the end of the last utterance and the close
    drain: Json | None = None  # message that closes the socket after the current speech, unless the sample sends it


@dataclass(frozen=True, slots=True)
class SocketRow:
    """One WebSocket. In messages, "$text" and "$voice" are placeholders, as in samples.

    The first field of an expected response identifies its type. Inner objects may have additional fields. The
    first four fields are required. Set another one if the socket differs from its default.
    """

    sample: Sample
    ends_with: Json  # fields of the message that ends an utterance
    # Invalid messages, with the field that the error names, or else words of the error. The socket stays open.
    invalid: Sequence[tuple[Json, str]]
    numbers: Sequence[str]  # message texts with "?" in place of a number
    more: Sequence[Json] = ()  # other messages of clients
    invalid_reply: Json = field(default_factory=lambda: {"type": "error"})  # fields of the reply to an invalid message
    failure_type: str | None = "error"  # type of the message that reports a failure of speech
    unspeakable: Json | None = None  # fields of the reply to a text that cannot be spoken; None: as `ends_with`
    busy: str = ""  # error code of an utterance during another one; "": it waits
    stop: Stop | None = None  # None: only a disconnect stops an utterance
    closing: Closing = field(default_factory=Closing)
    times: WordTimesForm = field(default_factory=WordTimesForm)
    next_utterance: Sequence[Mapping[str, object]] | None = None  # its messages; None: as in the sample
    split_utterance: Sequence[Mapping[str, object]] = ()  # if the text may continue in the next message: its messages
    is_live: bool = True  # whether a split utterance is spoken before its last message
    is_pcm: bool = True  # whether the audio is the synthesizer's unmodified output
    is_strict: bool = False  # whether a language that the model does not speak is an error
    is_continued: bool = True  # whether an utterance continues the one before (`api.continuity.joints`)
    queries: Sequence[str] = ()  # additional queries for the fuzzers
    aliases: Sequence[str] = ()  # other paths of this socket

    def speak(self, text: str, *, again: bool = False) -> list[Json]:
        messages = self.next_utterance if again and self.next_utterance is not None else self.sample.messages
        return _filled(messages, text)

    def speak_timed(self, text: str) -> list[Json]:
        first, *others = self.speak(text)
        return [{**first, **self.times.asked_by}, *others]

    @property
    def place(self) -> str:
        """Path as shown in documents."""
        return ", ".join([f"WS {_shown(self.sample)}", *self.sample.protocols])

    def speak_in_parts(self, *texts: str) -> list[Json]:
        place = next(index for index, message in enumerate(self.split_utterance) if "$text" in str(message))
        parts = [_filled(self.split_utterance, text) for text in texts]
        return [*parts[0][:place], *(part[place] for part in parts), *parts[0][place + 1 :]]

    def messages(self, text: str) -> list[Json]:
        """Return all kinds of messages that clients send."""
        return _filled([*self.sample.messages, *self.split_utterance, *self.more], text)

    def bad(self) -> list[tuple[Json, str]]:
        return [(_filled([message], "Hello.")[0], told) for message, told in self.invalid]

    @property
    def path(self) -> str:
        return self.sample.filled(voice=VOICE).path

    @property
    def paths(self) -> list[str]:
        """Return the path with each of its queries."""
        return [self.path, *(f"{self.path.partition('?')[0]}?{query}" for query in self.queries)]


@dataclass(frozen=True, slots=True)
class End:
    """Last line or event of a streamed response, which reports how speech ended."""

    of: Literal["lines", "events"]
    asked_by: Json = field(default_factory=dict)  # fields of the body that request it
    headers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class PostRow:
    """One `POST`. In `numbers`, `query_numbers` and `formats`, "?" is the placeholder of a number or format."""

    sample: Sample
    text: str = "text"  # required field with the text
    name: str = ""  # name in docs/clients.md for the handling of unknown voices
    numbers: Sequence[tuple[str, str]] = ()  # bodies, with the field that the error names
    query_numbers: Sequence[tuple[str, str]] = ()  # end of the query, with the field
    wrong: Sequence[tuple[Json, str]] = ()  # other invalid body fields, with the field that the error names
    formats: Sequence[tuple[str, Json, str]] = ()  # end of the query, body fields, name of a format
    has_results: bool = False  # whether each item's result contains its speech errors
    # Query and fields that request complete PCM audio in JSON, and the path of the audio in the response.
    whole: tuple[str, Json, Sequence[str]] | None = None
    end: End | None = None
    more: Json = field(default_factory=dict)  # additional fields for the fuzzers
    times: WordTimesForm = field(default_factory=WordTimesForm)

    @property
    def path(self) -> str:
        return self.sample.filled(voice=VOICE).path

    @property
    def place(self) -> str:
        """Path as shown in documents."""
        return f"POST {_shown(self.sample)}"

    def with_query(self, more: str) -> str:
        """Return the path with `more` appended to the query."""
        return f"{self.path}{'&' if '?' in self.path else '?'}{more}" if more else self.path

    def body(self, text: str = "Hello.", *, voice: str = VOICE, **more: object) -> Json:
        body = {**(self.sample.body or {}), **more}
        return dict(Sample("", body=body).filled(text=text, voice=voice).body or {})


@dataclass(frozen=True, slots=True)
class Owned:
    """`POST` that creates an object with an owner."""

    path: str
    fields: Json
    files: Sequence[str] = ()  # form parts with a recording; (): the fields are JSON


@dataclass(frozen=True, slots=True)
class Issuing:
    """`POST` that issues an access token."""

    fields: Json
    token: str  # field of the response with the token
    purpose: str  # name in PURPOSES (tokens.py)


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of one extension, or of the core."""

    sockets: Mapping[str, SocketRow] = field(default_factory=dict)
    posts: Mapping[str, PostRow] = field(default_factory=dict)
    documented: Mapping[str, Documented] = field(default_factory=dict)
    # Keyed by the path parameter that names the object.
    owned: Mapping[str, Owned] = field(default_factory=dict)
    storing: Sequence[str] = ()  # paths of every `POST` that does not return speech
    issuing: Mapping[str, Issuing] = field(default_factory=dict)  # keyed by path


def samples_of(extension: str) -> dict[str, Sample]:
    """Return the request samples of an extension's dialects, by name."""
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
