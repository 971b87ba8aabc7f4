"""Numbers that are none, and texts that are cut within a character: the same in every dialect."""

import asyncio
import json
import time
from typing import Any

import httpx
import pytest

from tests.serve_app.dialects.client import Client, connect
from tests.serve_app.fake import FakeSynthesizer, utterance

pytestmark = pytest.mark.anyio

NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", "-1e400", "9" * 5000, "9" * 400]
REST = "/api/v1/services/aigc/multimodal-generation/generation"
BODIES = {
    ("/v1/audio/speech", "speed"): '{"input": "x", "voice": "ryan", "speed": ?}',
    ("/v1/audio/speech", "unknown"): '{"input": "x", "voice": "ryan", "unknown": [{"a": ?}]}',
    ("/tts/bytes", "bit_rate"): '{"transcript": "x", "output_format": {"container": "mp3", "bit_rate": ?}}',
    ("/v1/text-to-speech/ryan", "speed"): '{"text": "x", "voice_settings": {"speed": ?}}',
    (REST, "bit_rate"): '{"model": "q", "input": {"text": "x"}, "parameters": {"bit_rate": ?}}',
    ("/v1/audio/speech/batch", "top_k"): '{"items": [{"input": "x", "overrides": {"top_k": ?}}]}',
    ("/generate", "audio"): '{"text": "x", "audio": ?}',
}
QUERIES = {
    "/v1/speak?encoding=mp3&bit_rate=": "bit_rate",
    "/v1/speak?speed=": "speed",
    "/v1/speak?encoding=linear16&sample_rate=": "sample_rate",
    "/v1/text-to-speech/ryan?output_format=mp3_44100_": "output_format",
    "/v1/text-to-speech/ryan?output_format=pcm_": "output_format",
}
# A message, and how its dialect says that it is refused.
SOCKETS: dict[str, tuple[list[str], str]] = {
    "/v1/speak": (['{"type": "Speak", "text": "a", "x": ?}'], "Warning"),
    "/v2/speak": (
        [
            '{"type": "Interrupt", "playback_offset": {"type": "time_ms", "value": ?}}',
            '{"type": "Configure", "speed": ?}',
        ],
        "Warning",
    ),
    "/v1/text-to-speech/ryan/multi-stream-input": (['{"text": "a", "voice_settings": {"speed": ?}}'], "error"),
    "/tts/websocket": (['{"transcript": "a", "output_format": {"bit_rate": ?}}'], "error"),
    "/v1/realtime": (['{"type": "session.update", "session": {"speed": ?}}'], "error"),
    "/api-ws/v1/realtime": (
        ['{"type": "session.update", "session": {"bit_rate": ?}}', '{"type": "session.update", "session": {"any": ?}}'],
        "error",
    ),
    "/v1/audio/speech/stream": (['{"type": "session.config", "voice": "ryan", "seed": ?}'], "error"),
    "/v1/audio/speech/ws": (['{"type": "speak", "input": "a", "voice": "ryan", "from_frame": ?}'], "error"),
    "/v1/audio/frames/ws": (['{"type": "speak", "input": "a", "voice": "ryan", "top_k": ?}'], "error"),
}


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize(("path", "param"), BODIES)
async def test_a_number_of_a_body_is_refused_by_its_name(
    client: httpx.AsyncClient, path: str, param: str, number: str
) -> None:
    answer = await client.post(path, content=BODIES[path, param].replace("?", number))
    assert answer.status_code == 400, answer.text
    named = "a" if param == "unknown" else param
    assert answer.json()["error"]["param"] == named
    assert param in answer.json()["error"]["message"]


@pytest.mark.parametrize("number", [*NUMBERS[:-1], "9" * 100, "1e30", "²", "1__0"])
@pytest.mark.parametrize("path", QUERIES)
async def test_a_number_of_a_query_is_refused_by_its_name(client: httpx.AsyncClient, path: str, number: str) -> None:
    answer = await client.post(path + number, json={"text": "Hello."})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, QUERIES[path])


@pytest.mark.parametrize("bit_rate", ["5", "257", "512"])
async def test_a_bit_rate_has_the_range_of_its_format(client: httpx.AsyncClient, bit_rate: str) -> None:
    answer = await client.post(f"/v1/text-to-speech/ryan?output_format=opus_48000_{bit_rate}", json={"text": "Hello."})
    assert answer.status_code == 400
    assert "opus can have from 6000 to 256000" in answer.json()["error"]["message"]
    allowed = await client.post("/v1/text-to-speech/ryan?output_format=opus_48000_256", json={"text": "Hello."})
    assert allowed.status_code == 200


async def test_too_many_values_are_refused_before_any_is_looked_at(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/audio/speech", content='{"input": "x", "y": [' + "1," * (1 << 17) + "1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_long_input_is_refused_before_it_is_looked_at(client: httpx.AsyncClient) -> None:
    begun_s = time.thread_time()
    for path, field in (("/v1/audio/speech", "input"), ("/v1/speak", "text"), ("/tts/bytes", "transcript")):
        answer = await client.post(path, json={field: "<" + "a" * 200_000 + '{ "word"' * 20_000, "voice": "ryan"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "string_above_max_length")
    assert time.thread_time() - begun_s < 10  # of quadratic work: minutes


@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("path", SOCKETS)
async def test_a_number_of_a_message_is_told_and_the_socket_stays(path: str, number: str) -> None:
    messages, kind = SOCKETS[path]
    async with connect(FakeSynthesizer(script=utterance()), path) as connection:
        client = await Client(connection).accepted()
        for message in messages:
            for _ in range(2):  # the second answer shows that the first one did not end it
                connection.receive({"type": "websocket.receive", "text": message.replace("?", number)})
                told = await _refusal(client, kind)
                assert "NaN" not in json.dumps(told)


async def _refusal(client: Client, kind: str) -> dict[str, Any]:
    while True:
        message = await client.connection.next()
        assert message["type"] == "websocket.send", message
        told: dict[str, Any] = json.loads(message.get("text") or "{}")
        if kind in (told.get("type"), *told) or told.get("error"):
            return told


PARTS = ["So \ud83d", "\ude42 it \ud83d is"]
# The messages before a text, the message with it, and those behind it.
HALVES: dict[str, tuple[list[Any], dict[str, Any], list[Any]]] = {
    "/v1/speak": ([], {"type": "Speak", "text": "?"}, [{"type": "Flush"}, {"type": "Close"}]),
    "/v2/speak": ([], {"type": "Speak", "text": "?"}, [{"type": "Flush"}, {"type": "Close"}]),
    "/v1/text-to-speech/ryan/multi-stream-input": (
        [],
        {"text": "?", "context_id": "one"},
        [{"text": "", "context_id": "one", "flush": True}, {"context_id": "one", "close_context": True}],
    ),
    "/v1/text-to-speech/ryan/stream-input": ([], {"text": "?"}, [{"text": ""}]),
    "/tts/websocket": (
        [],
        {"transcript": "?", "context_id": "one", "continue": True, "voice": "ryan"},
        [{"transcript": "", "context_id": "one", "continue": False}],
    ),
    "/api-ws/v1/realtime": ([], {"type": "input_text_buffer.append", "text": "?"}, [{"type": "session.finish"}]),
    "/api-ws/v1/realtime?commit": (
        [{"type": "session.update", "session": {"mode": "commit"}}],
        {"type": "input_text_buffer.append", "text": "?"},
        [{"type": "session.finish"}],
    ),
    "/v1/audio/speech/stream": (
        [{"type": "session.config", "voice": "ryan"}],
        {"type": "input.text", "text": "?"},
        [{"type": "input.done"}, {"type": "session.close"}],
    ),
    "/v1/audio/speech/ws": (
        [{"type": "request.start", "voice": "ryan"}],
        {"type": "input_text.append", "text": "?"},
        [{"type": "input_text.end"}],
    ),
}


@pytest.mark.parametrize("path", HALVES)
async def test_halves_of_a_character_meet_in_the_next_message(path: str) -> None:
    synthesizer = FakeSynthesizer(script=utterance())
    before, message, behind = HALVES[path]
    texts = [{**message, next(key for key in message if message[key] == "?"): part} for part in PARTS]
    protocols = ["nari.speech.v1"] if path.endswith("speech/ws") else []
    async with connect(synthesizer, path, subprotocols=protocols) as connection:
        client = await Client(connection).accepted()
        client.send(*before, *texts, *behind)  # `json.dumps` writes halves as JavaScript does
        async with asyncio.timeout(10):
            while synthesizer.texts != ["So 🙂 it \ufffd is"]:  # noqa: ASYNC110, it says nothing when it changes
                await asyncio.sleep(0)


@pytest.mark.parametrize("field", ["voice", "x\ud83d", "input"])
async def test_other_halves_do_no_harm(field: str) -> None:
    for path in ("/v1/audio/speech/ws", "/v1/audio/frames/ws", "/v1/realtime", "/api-ws/v1/realtime"):
        asked = {"input": "Hello.", "voice": "ryan", field: "So \ud83d"}
        update = {"type": "session.update", "session": {"voice": "So \ud83d", field: "So \ud83d"}}
        async with connect(FakeSynthesizer(script=utterance()), path) as connection:
            client = await Client(connection).accepted()
            client.send(update if "realtime" in path else {"type": "speak", **asked})
            told = await client.next()
            while isinstance(told, dict) and told.get("type") == "session.created":
                told = await client.next()
            assert isinstance(told, bytes) or "closed" not in told
