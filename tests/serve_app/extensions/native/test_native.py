import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import Mock

import pytest

from deployments.errors import NotReady
from deployments.protocol import FinishReason, ModelInfo
from serve_app.extensions.live import connection as connection_module
from tests.serve_app import fake
from tests.serve_app.audio.test_recordings import data_url, recording
from tests.serve_app.extensions.client import SPEAK, Json, Socket, code_of, connect, heard
from tests.serve_app.fake import utterance

pytestmark = pytest.mark.anyio

CANCEL = {"type": "cancel"}
FRAME = fake.tone(fake.CUSTOM_VOICE.frame_samples)


@asynccontextmanager
async def speech_socket(synthesizer: fake.FakeSynthesizer) -> AsyncIterator[Socket]:
    async with connect(synthesizer, "/v1/audio/speech/ws") as connection:
        yield await Socket(connection).accepted()


def speaking(info: ModelInfo = fake.CUSTOM_VOICE) -> fake.FakeSynthesizer:
    return fake.FakeSynthesizer(info, utterance())


def pausing() -> tuple[fake.FakeSynthesizer, asyncio.Event]:
    """Speech of two frames, and what lets the second come."""
    more = asyncio.Event()
    return fake.FakeSynthesizer(script=[fake.chunk(FRAME), more, fake.chunk(FRAME)]), more


async def test_utterances_follow_each_other_on_one_socket() -> None:
    pcm, audio = fake.pcm_of(utterance()), {"channels": 1, "format": "pcm_s16le"}
    async with speech_socket(speaking()) as socket:
        for number in (1, 2):
            socket.send(SPEAK | {"seed": 0})
            began, started = {"type": "started", "request_id": f"conn-{number}", "seed": 0}, await socket.event()
            assert started == {**began, "sample_rate": fake.CUSTOM_VOICE.sample_rate, **audio}
            frames, done = await socket.frames()
            assert b"".join(frames) == pcm
            spoke = {"seed": 0, "model": fake.CUSTOM_VOICE.name, "voice": "vivian", "finish_reason": "stop"}
            counts = {"frames": 4, "samples": len(pcm) // 2, "input_tokens": fake.NUM_TEXT_TOKENS}
            assert done == {"type": "done", "request_id": f"conn-{number}", **spoke, **counts}


async def test_the_next_utterance_may_be_asked_for_as_soon_as_the_last_is_done() -> None:
    async with speech_socket(speaking()) as socket:
        for _ in range(8):
            await socket.speak(speed=1.5)  # a thread ends its encoding after `done`


@pytest.mark.parametrize("has", [3, 4])
async def test_an_utterance_goes_on_behind_the_frames_the_client_has(has: int) -> None:
    synthesizer, left = speaking(), fake.pcm_of(utterance())[has * fake.CUSTOM_VOICE.frame_samples * 2 :]
    async with speech_socket(synthesizer) as socket:
        socket.send({**SPEAK, "request_id": "earlier-1", "seed": 7, "from_frame": has})
        frames, end = await socket.utterance()
    assert b"".join(frames) == left
    assert (end["type"], end["request_id"], end["frames"], end["samples"]) == ("done", "earlier-1", 4, len(left) // 2)
    (request,) = synthesizer.requests
    assert (request.request_id, request.seed) == ("earlier-1", 7)


@pytest.mark.parametrize(
    ("fields", "param"),
    [({"from_frame": 3}, "seed"), ({"from_frame": -1, "seed": 1}, "from_frame"), ({"request_id": "a b"}, "request_id")],
)
async def test_what_cannot_be_gone_on_with_is_refused(fields: Json, param: str) -> None:
    synthesizer = speaking()
    async with speech_socket(synthesizer) as socket:
        socket.send({**SPEAK, **fields})
        error = (await socket.event())["error"]
    assert isinstance(error, dict)
    assert error["param"] == param
    assert synthesizer.requests == []


async def test_the_seed_that_was_drawn_survives_every_reader_of_json() -> None:
    async with speech_socket(speaking()) as socket:
        socket.send(SPEAK)
        seed = (await socket.event())["seed"]
    assert isinstance(seed, int)
    assert int(float(seed)) == seed


async def test_started_tells_the_seed_that_spoke() -> None:
    """The seed of the failed first attempt would not reproduce the speech."""
    synthesizer = fake.FakeSynthesizer(script=[fake.chunk(b"", frames=0, finish_reason=FinishReason.EARLY)])
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        seed = (await socket.event())["seed"]
    first, second = synthesizer.requests
    assert seed == second.seed != first.seed


async def test_binary_frames_are_small_and_of_whole_samples() -> None:
    pcm = fake.tone(10_001)
    async with speech_socket(fake.FakeSynthesizer(script=[fake.chunk(pcm, frames=5)])) as socket:
        socket.send(SPEAK)
        frames, done = await socket.utterance()
    assert [len(frame) for frame in frames] == [4096, 4096, 4096, 4096, 3618]
    assert b"".join(frames) == pcm
    assert (done["frames"], done["samples"]) == (5, 10_001)


async def test_the_answer_to_cancel_counts_what_was_sent() -> None:
    synthesizer, _ = pausing()
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        await synthesizer.waiting.wait()
        socket.send(CANCEL)
        frames, ended = await socket.utterance()
        assert frames == [FRAME]
        samples = fake.CUSTOM_VOICE.frame_samples
        assert ended == {"type": "cancelled", "request_id": "conn-1", "frames": 1, "samples": samples}


async def test_cancel_without_an_utterance_is_answered() -> None:
    async with speech_socket(speaking()) as socket:
        nothing = {"type": "cancelled", "request_id": None, "frames": 0, "samples": 0}
        socket.send(CANCEL)
        assert await socket.event() == nothing
        await socket.speak()
        socket.send(CANCEL)
        socket.send(CANCEL)
        assert (await socket.event(), await socket.event()) == (nothing, nothing)


async def test_messages_that_come_at_once_are_answered_in_their_order() -> None:
    synthesizer, _ = pausing()
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        await synthesizer.waiting.wait()
        socket.send({"type": "sing"}, SPEAK, CANCEL, SPEAK | {"voice": "unknown"}, CANCEL)
        (_, *told), _ = await socket.until(type="cancelled", request_id=None)
    assert [each["error"]["code"] if "error" in each else each["type"] for each in told] == [
        "invalid_value", "busy", "cancelled", "voice_not_found", "cancelled",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("message", "code", "param"),
    [
        *((message, "invalid_value", "type") for message in ({}, {"type": "sing"}, {"type": ["speak"]})),
        ({"type": "speak"}, "missing_required_parameter", "input"),
        (SPEAK | {"top_k": -1}, "invalid_value", "top_k"),
        (SPEAK | {"voice": "unknown"}, "voice_not_found", "voice"),
        (SPEAK | {"model": "other"}, "model_not_found", "model"),
        (SPEAK | {"response_format": "mp3"}, "invalid_value", "response_format"),
    ],
)
async def test_a_bad_message_is_an_error_and_the_socket_stays(message: Json, code: str, param: str) -> None:
    async with speech_socket(speaking()) as socket:
        socket.send(message)
        assert code_of(await socket.event()) == (code, param)
        await socket.speak()


async def test_a_failure_names_its_utterance() -> None:
    async with speech_socket(fake.FakeSynthesizer(script=[NotReady()])) as socket:
        socket.send(SPEAK)
        failure = await socket.event()
        assert (code_of(failure), failure["request_id"]) == (("not_ready", None), "conn-1")


async def test_only_reference_audio_may_make_a_message_large(monkeypatch: pytest.MonkeyPatch) -> None:
    synthesizer = speaking(fake.BASE)
    ref_audio = data_url(recording(5))
    monkeypatch.setattr(connection_module, "MAX_BODY_BYTES", len(ref_audio) + 1000)
    async with speech_socket(synthesizer) as socket:
        await socket.speak(ref_audio=ref_audio, ref_text="It says")
        socket.send(SPEAK | {"ref_audio": ref_audio, "ref_text": "x" * 1000})
        assert code_of(await socket.event()) == ("payload_too_large", None)


async def test_speed() -> None:
    async with speech_socket(fake.FakeSynthesizer(script=utterance(25))) as socket:
        socket.send(SPEAK | {"speed": 2})
        frames, done = await socket.utterance()
    assert done["samples"] == len(b"".join(frames)) // 2
    assert len(b"".join(frames)) == pytest.approx(len(fake.pcm_of(utterance(25))) / 2, rel=0.03)


@pytest.mark.parametrize("leaves", [True, False], ids=["leaves", "cancels"])
async def test_a_client_that_reads_nothing_can_end_its_utterance(leaves: bool) -> None:
    synthesizer = fake.FakeSynthesizer(script=utterance())
    async with speech_socket(synthesizer) as socket:
        socket.connection.stall()
        socket.send(SPEAK)
        await socket.connection.sending.wait()
        if leaves:
            socket.leave()
            await socket.connection.task
        else:
            socket.send(CANCEL)
        await asyncio.wait_for(synthesizer.closed.wait(), 10)


async def test_a_connection_that_breaks_in_send() -> None:
    synthesizer, more = pausing()
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        await synthesizer.waiting.wait()
        socket.connection.send_error = BrokenPipeError()
        more.set()
        await synthesizer.closed.wait()
        socket.leave()
        await socket.connection.task


async def test_a_server_that_cancels_the_handler() -> None:
    synthesizer = fake.FakeSynthesizer(script=[asyncio.Event()])
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        await synthesizer.waiting.wait()
        socket.connection.task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await socket.connection.task
        assert synthesizer.closed.is_set()


async def test_a_socket_that_speaks_is_not_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "IDLE_TIMEOUT_S", 0.01)
    synthesizer, more = pausing()
    async with speech_socket(synthesizer) as socket:
        socket.send(SPEAK)
        asyncio.get_running_loop().call_later(0.1, more.set)
        frames, done = await socket.utterance()
        assert (frames, done["type"]) == ([FRAME, FRAME], "done")
        assert await socket.connection.next() == {"type": "websocket.close", "code": 1000, "reason": "idle"}


LARGE = "A" * connection_module.MAX_MESSAGE_BYTES


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(SPEAK | {"ref_audio": "AAAA", "filler": LARGE}),
        json.dumps(SPEAK | {"filler": {"ref_audio": LARGE}}),
        json.dumps(SPEAK | {"filler": '"ref_audio": "' + LARGE}),
        json.dumps(SPEAK | {"filler": [{"ref_audio": LARGE}], "ref_audio": "AAAA"}),
        json.dumps(SPEAK | {"ref_audio": [LARGE]}),
        json.dumps(SPEAK | {"ref_audio": LARGE})[:-1],
    ],
)
async def test_only_a_recording_makes_a_message_larger(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what is too large without it is not parsed."""
    parse = Mock(wraps=connection_module.parse_object)
    monkeypatch.setattr(connection_module, "parse_object", parse)
    async with speech_socket(speaking(fake.BASE)) as socket:
        socket.send_text(text)
        assert code_of(await socket.event())[0] in ("payload_too_large", "invalid_json")
    assert not any(len(call.args[0]) > connection_module.MAX_MESSAGE_BYTES for call in parse.call_args_list)


@pytest.mark.parametrize("escaped", [False, True])
async def test_a_recording_may_stand_anywhere_among_the_fields(escaped: bool) -> None:
    audio = data_url(recording(5.0))
    assert len(audio) > connection_module.MAX_MESSAGE_BYTES
    sent = json.dumps({"x_vector_only_mode": True, "ref_audio": audio} | SPEAK)
    async with speech_socket(speaking(fake.BASE)) as socket:
        socket.send_text(sent.replace("/", "\\/") if escaped else sent)
        assert (await socket.utterance())[1]["type"] == "done"


async def test_sockets_without_recordings_take_none() -> None:
    update = {"type": "session.update", "session": {}, "ref_audio": LARGE}
    (_, error), _ = await heard(speaking(), "/v1/realtime", update, until={"type": "error"})
    assert error["error"]["code"] == "payload_too_large"
