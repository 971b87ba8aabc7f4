import pytest

from tests.serve_app.extensions.client import Client, Json, connect, talking
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer, pcm_of, utterance

pytestmark = pytest.mark.anyio

PATH = "/v1/audio/speech/ws"
START = {"type": "request.start", "model": "tts-1", "voice": "aiden", "language": "auto", "instruct": "Softly."}
END = {"type": "input_text.end", "sequence": 2}


def append(text: str, sequence: int) -> Json:
    return {"type": "input_text.append", "sequence": sequence, "text": text}


async def created(connection: object) -> Client:
    client = await Client(connection).accepted()  # type: ignore[arg-type]
    (hello,), _ = await client.until(type="session.created")
    assert hello["protocol"] == "nari.speech.v1"
    assert hello["audio"] == {"encoding": "pcm_s16le", "sample_rate": 24000, "channels": 1}
    return client


async def test_one_utterance_a_socket() -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    async with connect(synthesizer, PATH, subprotocols=["nari.speech.v1"]) as connection:
        client = await created(connection)
        client.send({**START, "stream_chunk_schedule": [1, 2]}, append("Hello ", 0), append("there.", 1), END)
        messages, audio = await client.until(closed=1000)
        await connection.task
    kinds = [message.get("type") for message in messages]
    assert kinds[0] == "request.configured"
    assert messages[0]["ignored"] == [{"field": "stream_chunk_schedule", "reason": "not supported"}]
    acks = [message for message in messages if message.get("type") == "input_text.ack"]
    assert [(ack["event"], ack["sequence"]) for ack in acks] == [
        ("input_text.append", 0),
        ("input_text.append", 1),
        ("input_text.end", 2),
    ]
    assert len({message["request_id"] for message in messages if "request_id" in message}) == 1
    assert messages[-2] == {
        "type": "response.done",
        "request_id": acks[0]["request_id"],
        "stop_reason": "stop",
        "audio_chunks": 4,
        "seed": synthesizer.requests[0].seed,
        "model": CUSTOM_VOICE.name,
        "voice": "aiden",
    }
    assert audio == pcm_of(utterance())
    assert synthesizer.texts == ["Hello there."]
    assert (synthesizer.requests[0].voice, synthesizer.requests[0].instructions) == ("aiden", "Softly.")


async def test_without_the_subprotocol_it_is_the_native_socket() -> None:
    async with talking(FakeSynthesizer(script=utterance()), PATH, subprotocols=["other"]) as client:
        client.send({"type": "speak", "input": "Hello", "voice": "alloy"})
        await client.until(type="done")


async def test_pieces_are_numbered() -> None:
    async with connect(FakeSynthesizer(script=utterance()), PATH, subprotocols=["nari.speech.v1"]) as connection:
        client = await created(connection)
        client.send(START, append("Hello", 5), append("Hello", 5))
        (*_, error), _ = await client.until(type="error")
        assert error["error"]["param"] == "sequence"
        client.send({"type": "response.cancel"})
        messages, _ = await client.until(closed=1000)
        assert messages[-2]["stop_reason"] == "cancelled"
