"""Numbers that are none, and texts that are cut within a character: the same in every dialect."""

import time

import httpx
import pytest

from tests.serve_app.extensions.client import talking
from tests.serve_app.fake import FakeSynthesizer, utterance
from tools.suites.documented import Json
from tools.suites.row import PostRow
from tools.suites.rows import POSTS, is_here

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("bit_rate", ["5", "257", "512"])
async def test_a_bit_rate_has_the_range_of_its_format(client: httpx.AsyncClient, bit_rate: str) -> None:
    answer = await client.post(f"/v1/text-to-speech/ryan?output_format=opus_48000_{bit_rate}", json={"text": "Hello."})
    assert answer.status_code == 400
    assert "For opus, use 6000 to 256000" in answer.json()["error"]["message"]
    allowed = await client.post("/v1/text-to-speech/ryan?output_format=opus_48000_256", json={"text": "Hello."})
    assert allowed.status_code == 200


async def test_too_many_values_are_refused_before_any_is_looked_at(client: httpx.AsyncClient) -> None:
    answer = await client.post("/v1/audio/speech", content='{"input": "x", "y": [' + "1," * (1 << 17) + "1]}")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")


async def test_a_long_input_is_refused_before_it_is_looked_at(client: httpx.AsyncClient) -> None:
    begun_s = time.thread_time()
    for path, field in (("/v1/audio/speech", "input"), ("/v1/speak", "text"), ("/tts/bytes", "transcript")):
        if not is_here(path):
            continue
        answer = await client.post(path, json={field: "<" + "a" * 200_000 + '{ "word"' * 20_000, "voice": "ryan"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "string_above_max_length")
    assert time.thread_time() - begun_s < 10  # of quadratic work: minutes


@pytest.mark.parametrize("field", ["voice", "x\ud83d", "input"])
async def test_other_halves_do_no_harm(field: str) -> None:
    for path in filter(is_here, ("/v1/audio/speech/ws", "/v1/audio/frames/ws", "/v1/realtime", "/api-ws/v1/realtime")):
        asked = {"input": "Hello.", "voice": "ryan", field: "So \ud83d"}
        update = {"type": "session.update", "session": {"voice": "So \ud83d", field: "So \ud83d"}}
        async with talking(FakeSynthesizer(script=utterance()), path) as client:
            client.send(update if "realtime" in path else {"type": "speak", **asked})
            told = await client.next()
            while isinstance(told, dict) and told.get("type") == "session.created":
                told = await client.next()
            assert isinstance(told, bytes) or "closed" not in told


@pytest.mark.parametrize(("row", "fields", "named"), [(row, *each) for row in POSTS.values() for each in row.wrong])
async def test_an_error_names_the_field_of_the_client(
    client: httpx.AsyncClient, row: PostRow, fields: Json, named: str
) -> None:
    answer = await client.post(row.path, json=row.body(**fields))
    told = answer.json()
    error = told.get("error") or told.get("detail") or told
    assert answer.status_code == 400
    assert named in (error.get("param"), error.get("loc")) or error.get("message", "").startswith(named), told
