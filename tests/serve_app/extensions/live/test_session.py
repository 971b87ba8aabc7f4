import asyncio
import gc
import logging
import tracemalloc
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest
from starlette.websockets import WebSocket, WebSocketDisconnect

from deployments.errors import InvalidRequest
from deployments.listener import Listener
from deployments.protocol import FinishReason, ModelInfo, PcmChunk, SynthesisRequest
from serve_app.api.access.callers import STRANGER, Caller
from serve_app.api.context import RequestState
from serve_app.api.parsing.speech_body import SpeechBody
from serve_app.api.request_record import RequestRecord
from serve_app.api.resolve.resolver import Resolver
from serve_app.api.resolve.speech_request import Delivery, SpeechRequest
from serve_app.api.voice_source import ChosenVoice
from serve_app.audio.formats import AudioFormat
from serve_app.config import ApiSettings
from serve_app.extensions.continuity import tails
from serve_app.extensions.continuity.tails import Continuation, TailStore
from serve_app.extensions.live.connection import IDLE_TIMEOUT_S, Connection
from serve_app.extensions.live.live_text import LiveTexts
from serve_app.extensions.live.session import MAX_UNSPOKEN_CHARS, Session
from serve_app.extensions.live.turns import Audio, Done, Event, Flushed, Started, Words
from serve_app.extensions.text.spoken_text import TextRules, read
from serve_app.extensions.word_times.word_times import Spoken
from serve_app.speech.segments import Utterance
from serve_app.speech.utterance_synthesizer import UtteranceSynthesizer
from tests.clock import Clock
from tests.serve_app import fake
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, chunk, utterance

pytestmark = pytest.mark.anyio

FRAME = fake.tone(CUSTOM_VOICE.frame_samples)
BODY = SpeechBody(input="", voice="ryan", any_language=True, seed=7)


@asynccontextmanager
async def open_session(
    synthesizer: FakeSynthesizer,
    delivery: Delivery | None = None,
    *,
    info: ModelInfo = CUSTOM_VOICE,
    body: SpeechBody = BODY,
    has_segments: bool = False,
) -> AsyncIterator[Session]:
    """With `has_segments` the speech says where its words are, as what stands in front of the pools does."""

    def speak(utterance: Utterance, info: ModelInfo) -> AsyncGenerator[PcmChunk, None]:
        if has_segments:
            return UtteranceSynthesizer(synthesizer).speak_utterance(utterance.changed(mailbox=None), info, Listener())
        return synthesizer.synthesize(utterance.synthesis, info)

    texts, handshake = LiveTexts(), RequestState(RequestRecord("talk", 0))
    spoken, delivery = read("", TextRules(spoken_form=info.spoken_form)), delivery or Delivery(AudioFormat.PCM)
    handshake.caller = Caller("test", visitor=STRANGER)
    session = Session(
        Resolver(SimpleNamespace(of=lambda utterance: SimpleNamespace(speak=speak)), ApiSettings()),
        SpeechRequest(info, body, delivery, {}, spoken, ChosenVoice(body.voice), word_times=body.word_timestamps),
        handshake=handshake,
        request_id="talk",
        continuation=Continuation(TailStore(joins=False)),
        live_texts=texts,
    )
    try:
        async with session:
            yield session
    finally:
        await texts.aclose()


async def events_of(session: Session) -> list[Event]:
    return [event async for event in session]


async def until_flushed(events: AsyncIterator[Event]) -> None:
    while not isinstance(await anext(events), Flushed):
        pass


async def until_word(events: AsyncIterator[Event], word: str) -> None:
    while not isinstance(event := await anext(events), Words) or event.words[-1].text != word:
        pass


async def spoken(session: Session, *texts: str) -> list[Event]:
    """All events of a session in which these texts are written, and no more."""
    for text in texts:
        session.append(text)
    session.close()
    return await events_of(session)


def audio_of(events: list[Event]) -> bytes:
    return b"".join(event.data for event in events if isinstance(event, Audio))


def kinds(events: list[Event]) -> list[str]:
    """Without how the audio is cut."""
    names = [type(event).__name__ for event in events]
    return [name for index, name in enumerate(names) if name != "Audio" or names[index - 1] != "Audio"]


async def test_its_end_tells_the_first_bad_end_of_any_turn_that_was_not_cleared() -> None:
    synthesizer = FakeSynthesizer()
    async with open_session(synthesizer) as session:
        events = aiter(session)
        for reason in (FinishReason.SILENCE, None, FinishReason.STOP, FinishReason.LOOP, FinishReason.EARLY):
            if reason is None:
                await session.clear()
                continue
            synthesizer.script = [chunk(FRAME), chunk(b"", frames=0, finish_reason=reason)]
            session.append("Hello there")
            turn = session.flush()
            await until_flushed(events)
            assert turn.finish_reason is reason
        session.close()
        rest = [event async for event in events]
    assert rest[-1] == Done(FinishReason.LOOP, turn.usage.answer)
    assert turn.usage.answer["seed"] == synthesizer.requests[-1].seed


async def test_a_turn_is_spoken_while_it_is_written() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with open_session(synthesizer) as session:
        events = aiter(session)
        for piece in ("Dr. Jo", "nes is he", "re. And"):
            session.append(piece)
        assert isinstance(await anext(events), Started)
        assert isinstance(await anext(events), Audio)
        session.append(" he stays")
        session.flush()
        await until_flushed(events)
    assert synthesizer.texts == ["Dr. Jones is here. And he stays"]
    (request,) = synthesizer.requests
    assert (request.request_id, request.seed) == ("talk-1", 7)


async def test_halves_of_a_surrogate_pair_meet_and_lone_ones_go() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with open_session(synthesizer) as session:
        for piece in ("a \ud83d", "", "\ude42 b \ude42 c \ud83d", "d \ud83d"):
            session.append(piece)
        session.flush()
        await spoken(session, "e")
    assert synthesizer.texts == ["a 🙂 b \ufffd c \ufffdd \ufffd", "e"]


async def test_a_text_that_is_all_there_is_asked_for_at_once() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with open_session(synthesizer) as session:
        await spoken(session, "Good ", "morning")
    (request,) = synthesizer.requests
    assert (request.text, request.mailbox) == ("Good morning", None)


@pytest.mark.parametrize("text", ["...", "🙂", "Привет"])
async def test_text_that_yields_no_speech_is_a_moment_of_silence(text: str) -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    english = replace(CUSTOM_VOICE, spoken_form="english")
    async with open_session(synthesizer, info=english) as session:
        events = await spoken(session, text)
    refused = ["InvalidRequest"] if text.isalpha() else []
    assert kinds(events) == [*refused, "Started", "Audio", "Flushed", "Done"]
    assert audio_of(events) == bytes(2 * 2400)
    assert synthesizer.requests == []


async def test_a_foreign_name_does_not_make_a_text_foreign() -> None:
    info, body = replace(CUSTOM_VOICE, languages=("english",)), BODY.model_copy(update={"any_language": False})
    async with open_session(FakeSynthesizer(info, utterance()), info=info, body=body) as session:
        session.append("Владимир Путин ")
        for _ in range(99):
            await asyncio.sleep(0)
        events = await spoken(session, "was the name of the man who came home late in the evening.")
    assert isinstance(events[-1], Done)


@pytest.mark.parametrize("text", ["", " ", "\n"])
async def test_blank_text_is_no_audio_at_all(text: str) -> None:
    async with open_session(FakeSynthesizer(script=utterance())) as session:
        session.append(text)
        session.flush()
        session.close()
        assert kinds(await events_of(session)) == ["Started", "Flushed", "Done"]


async def test_who_does_not_read_stops_the_decoding() -> None:
    made = 0

    class Counting(FakeSynthesizer):
        async def synthesize(self, request: SynthesisRequest, info: object = None):  # type: ignore[no-untyped-def]
            nonlocal made
            for _ in range(1000):
                made += 1
                yield chunk(FRAME)

    async with open_session(Counting()) as session:
        session.append("A long story.")
        session.flush()
        for _ in range(200):
            await asyncio.sleep(0)
    assert 0 < made < 12


async def test_after_clear_nothing_of_the_old_turns_follows() -> None:
    synthesizer = FakeSynthesizer(script=[*utterance(200)])
    async with open_session(synthesizer) as session:
        events = aiter(session)
        session.append("The old story. It is long.")
        session.flush()
        session.append("More of it")
        assert isinstance(await anext(events), Started)
        assert isinstance(await anext(events), Audio)
        cleared = await session.clear()
        assert [turn.number for turn in cleared.turns] == [1, 2]
        assert synthesizer.closed.is_set()
        synthesizer.script = utterance(1)
        session.append("New")
        session.close()
        rest = [event async for event in events]
    assert kinds(rest) == ["Cleared", "Started", "Audio", "Flushed", "Done"]
    assert rest[0] == cleared
    assert all(event.turn.number == 3 for event in rest if isinstance(event, Audio | Flushed))
    assert synthesizer.texts[-1] == "New"


@pytest.mark.parametrize("error", [WebSocketDisconnect(), RuntimeError(), KeyError()])
async def test_turns_that_are_not_spoken_say_why(error: Exception) -> None:
    records, outcome = list[RequestRecord](), "cancelled" if isinstance(error, KeyError) else "client left"
    with suppress(type(error)):
        async with open_session(FakeSynthesizer(script=[asyncio.Event()])) as session:
            session._handshake.record.on_end = records.append
            session.append("Hello")
            session.flush()
            raise error
    assert [(record.error, record.characters) for record in records] == [(outcome, 5)]


async def test_audio_is_of_whole_samples() -> None:
    script = [chunk(fake.tone(5001)), *utterance()]
    for audio_format, size in ((AudioFormat.PCM, 2), (AudioFormat.FLOAT, 4)):
        async with open_session(FakeSynthesizer(script=script), Delivery(audio_format)) as session:
            sizes = {len(event.data) % size for event in await spoken(session, "Hello") if isinstance(event, Audio)}
        assert sizes == {0}


async def test_too_much_that_waits_is_refused() -> None:
    synthesizer = FakeSynthesizer(script=[asyncio.Event()])
    async with open_session(synthesizer) as session:
        session.append("x" * MAX_UNSPOKEN_CHARS)
        with pytest.raises(InvalidRequest, match="characters wait"):
            session.append("x")
        session.flush()
        await synthesizer.waiting.wait()
        session.append("x" * MAX_UNSPOKEN_CHARS)  # the first turn is being spoken
        for _ in range(255):  # beside the first turn
            session.flush()
        with pytest.raises(InvalidRequest, match="256 turns"):
            session.flush()


async def test_chinese_clauses_come_together_without_spaces() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with open_session(synthesizer) as session:
        for clause in ("你好， ", "世界 ", "再见 ", "and more "):
            session.append(clause)
            await asyncio.sleep(0)
        session.close()
        assert isinstance((await events_of(session))[-1], Done)
    assert synthesizer.texts == ["你好，世界再见 and more"]
    assert synthesizer.requests[0].mailbox is not None


async def test_an_empty_stream_is_a_moment_of_silence() -> None:
    script: list[PcmChunk] = [utterance(0)[-1]]
    async with open_session(FakeSynthesizer(script=script)) as session:
        assert audio_of(await spoken(session, "Hm")) == bytes(2 * 2400)


@asynccontextmanager
async def followed_session(script: list[fake.Step], *, speed: float = 1.0) -> AsyncIterator[Session]:
    body = BODY.model_copy(update={"word_timestamps": True, "speed": speed})
    delivery = Delivery(AudioFormat.PCM, speed=speed)
    synthesizer = FakeSynthesizer(fake.FOLLOWED, script)
    async with open_session(synthesizer, delivery, info=fake.FOLLOWED, body=body, has_segments=True) as session:
        yield session


def words_of(events: list[Event]) -> list[tuple[str, int, int]]:
    """Each with its beginning and its end in milliseconds."""
    words = [word for event in events if isinstance(event, Words) for word in event.words]
    return [(word.text, round(1000 * word.start_s), round(1000 * word.end_s)) for word in words]


@pytest.mark.parametrize("speed", [1, 1.25])
async def test_words_are_told_beside_the_audio_which_is_the_same(speed: float) -> None:
    async with open_session(FakeSynthesizer(script=utterance(11)), Delivery(AudioFormat.PCM, speed=speed)) as session:
        session.configure(speed=speed)
        plain = await spoken(session, fake.FOLLOWED_TEXT)
    async with followed_session([*fake.followed()], speed=speed) as session:
        events = await spoken(session, fake.FOLLOWED_TEXT)
    begins = [round(begin / speed) for begin in (*fake.FOLLOWED_MS, 880)]
    assert words_of(events) == list(zip(fake.FOLLOWED_TEXT.split(), begins[:-1], begins[1:], strict=True))
    assert audio_of(events) == audio_of(plain)
    assert [event for event in plain if isinstance(event, Words)] == []


@pytest.mark.parametrize(("speed", "patience_s"), [(1, 3.0), (2, 1.0)])
async def test_a_fast_listener_waits_less(monkeypatch: pytest.MonkeyPatch, speed: float, patience_s: float) -> None:
    """Of four seconds of audio, one is kept in hand."""
    monkeypatch.setattr(tails, "time", Clock())
    body, delivery = BODY.model_copy(update={"speed": speed}), Delivery(AudioFormat.PCM, speed=speed)
    async with open_session(FakeSynthesizer(script=utterance(50)), delivery, body=body) as session:
        await spoken(session, "Hello")
        assert session._continuation.patience_s == pytest.approx(patience_s)
        await session.clear()
        assert session._continuation.patience_s == 0


async def test_a_word_is_told_no_later_than_the_next_one_sounds() -> None:
    async with followed_session([*fake.followed()]) as session:
        events = await spoken(session, fake.FOLLOWED_TEXT)
    before_ms = 0.0
    for event in events:
        if isinstance(event, Audio):
            before_ms += len(event.data) / 48
        if isinstance(event, Words):
            assert before_ms <= max(1000 * word.end_s for word in event.words)


async def test_an_interruption_of_a_text_that_is_being_written() -> None:
    async with followed_session([*fake.followed(10), asyncio.Event()]) as session:
        events = aiter(session)
        session.append("Hello there all of ")
        await until_word(events, "there")
        session.append("you and")
        cleared = await session.clear(0.5)
        assert cleared.spoken == Spoken("Hello there", " all of you and", "there")


async def test_a_turn_is_heard_behind_its_end_and_a_clear_begins_a_new_count() -> None:
    async with followed_session([*fake.followed()]) as session:
        events = aiter(session)
        for round_ in (1, 2):
            for _ in range(2):
                session.append(fake.FOLLOWED_TEXT)
                marked = session.flush()
                while await anext(events) != Flushed(marked):
                    pass
            cleared = await session.clear(0.88 + 0.6)
            assert await anext(events) == cleared
            assert cleared.turns == ()
            assert cleared.heard is not None
            assert cleared.heard.number == marked.number == 2 * round_
            assert (cleared.heard.text, cleared.heard.usage) == (marked.text, marked.usage)
            assert cleared.spoken == Spoken("Hello there", " all of you", "there")
        session.append("More")
        session.append(" of it")
        assert (await session.clear(0.0)).spoken == Spoken("", "More of it", None)


async def test_nothing_is_claimed_where_no_word_is_known() -> None:
    async with open_session(FakeSynthesizer(script=[*utterance(3)[:3], asyncio.Event()])) as session:
        session.append(fake.FOLLOWED_TEXT)
        session.flush()
        events = aiter(session)
        while not isinstance(await anext(events), Audio):
            pass
        assert (await session.clear(0.1)).spoken is None


async def test_what_was_spoken_of_spaced_ideographs() -> None:
    async with followed_session([*fake.followed(8), asyncio.Event()]) as session:
        session.append("你好， 世 界 and more of it")
        session.flush()
        await until_word(aiter(session), "and")
        assert (await session.clear(0.4)).spoken == Spoken("你好， 世 界 and", " more of it", "and")


async def test_every_clear_is_answered_also_while_nobody_reads() -> None:
    async with open_session(FakeSynthesizer(script=utterance(200))) as session:
        session.append("Nobody listens")
        session.flush()
        for _ in range(100):
            await asyncio.sleep(0)
        cleared = [await session.clear() for _ in range(3)]
        events = aiter(session)
        assert [await anext(events) for _ in range(3)] == cleared


@pytest.mark.parametrize("word_timestamps", [False, True])
async def test_of_a_spoken_turn_little_is_kept(word_timestamps: bool) -> None:
    """What `clear` may ask for, and `Done`: not the text as it was written and read, and not the request."""
    turns, text = 50, "The quick brown fox jumps over the lazy dog and runs away. "
    body = BODY.model_copy(update={"word_timestamps": word_timestamps})
    synthesizer = FakeSynthesizer(script=utterance())
    async with open_session(synthesizer, body=body) as session:
        events = aiter(session)

        async def speak() -> None:
            for word in text.split():
                session.append(f"{word} ")
                await asyncio.sleep(0)
            session.flush()
            await until_flushed(events)
            synthesizer.requests.clear()

        await speak()
        gc.collect()
        tracemalloc.start()
        try:
            for _ in range(turns):
                await speak()
            gc.collect()
            kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert kept / turns < 5 << 10, "bytes a turn"
        cleared = await session.clear(0.0)
    assert cleared.heard is not None
    assert (cleared.heard.number, cleared.heard.text) == (1, text)


class Quiet(Connection):
    """A socket whose client sends nothing."""

    async def obey(self, fields: dict[str, object]) -> None:
        raise AssertionError


def quiet() -> Quiet:
    scope = {"type": "websocket", "state": {"talkray": RequestState(RequestRecord("talk", 0))}}
    return Quiet(WebSocket(scope, *[None] * 2), None)  # type: ignore[arg-type]


async def test_what_the_server_sends_keeps_a_socket_from_being_idle() -> None:
    """A conversation is not busy between turns: its time begins anew with each event, and only then."""
    socket, remaining_s = quiet(), list[float]()

    async def say(event: Event) -> None:
        remaining_s.append(socket._remaining_s())
        assert socket.owes_speech, "the server may not close the socket before the last event is sent"
        socket._active_s -= 500.0  # so much time passes

    async with open_session(FakeSynthesizer(script=utterance(2))) as session:
        session.append("Hello.")
        session.close()
        await socket.pass_on(session, say)
    assert len(remaining_s) > 3
    assert all(left_s > IDLE_TIMEOUT_S - 60.0 for left_s in (*remaining_s, socket._remaining_s()))
    assert (socket.owes_speech, socket._sessions) == (False, set())
    socket.socket.receive = AsyncMock(return_value={"type": "websocket.receive"})  # type: ignore[method-assign]
    before = len(asyncio.all_tasks())
    for _ in range(9):
        await socket._receive()
    assert len(asyncio.all_tasks()) <= before + 1, "tasks of messages that were read"


async def test_a_bug_closes_its_socket_which_may_be_closed_already() -> None:
    async def fail() -> None:
        raise KeyError

    socket = quiet()
    socket.socket.close = AsyncMock(side_effect=RuntimeError)  # type: ignore[method-assign]
    await socket.start(fail())
    socket.socket.close.assert_called_once_with(1011, "")


@pytest.mark.parametrize("error", [WebSocketDisconnect(), RuntimeError("once a close message has been sent")])
async def test_speech_for_a_closed_socket_ends(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise error

    socket = quiet()
    socket.socket.close = AsyncMock()  # type: ignore[method-assign]
    await socket.start(fail())
    socket.socket.close.assert_not_called()
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
