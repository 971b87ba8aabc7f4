import pytest

from serve_app.config import AdmissionSettings, ApiSettings
from tests.serve_app.extensions.client import Json, talking
from tests.serve_app.fake import FakeSynthesizer, pcm_of, utterance
from tests.serve_app.one_model import client_of, one_api

pytestmark = pytest.mark.anyio

PATH = "/v1/audio/speech/stream"
BATCH = "/v1/audio/speech/batch"
CONFIG = {"type": "session.config", "model": "tts-1", "voice": "ryan", "task_type": "CustomVoice", "stream_audio": True}
DONE, CLOSE = {"type": "input.done"}, {"type": "session.close"}


def write(text: str) -> Json:
    return {"type": "input.text", "text": text}


async def test_utterances_follow_each_other_as_files(synthesizer: FakeSynthesizer) -> None:
    async with talking(synthesizer, PATH) as client:
        client.send({**CONFIG, "split_granularity": "clause", "instructions": "Softly."})
        for index in range(2):
            client.send(write("Hello "), write("there."), DONE)
            messages, audio = await client.until(type="session.done")
            assert messages[0]["type"] == "audio.start"
            assert (messages[0]["format"], messages[0]["sample_rate"]) == ("wav", 24000)
            assert [each["field"] for each in messages[0]["ignored"]] == ["task_type", "split_granularity"]
            done = {"type": "audio.done", "utterance_index": index, "sentence_index": 0}
            assert messages[1] == {**done, "total_bytes": len(audio), "error": False}
            assert messages[2]["usage"] == {"input_tokens": 7, "output_tokens": 4}
            assert (audio[:4], audio[44:]) == (b"RIFF", pcm_of(utterance()))
        client.send(write("Last."), CLOSE)
        await client.until(type="session.done")
        await client.until(closed=1000)
        await client.connection.task
    assert synthesizer.texts == ["Hello there.", "Hello there.", "Last."]
    assert synthesizer.requests[0].instructions == "Softly."


async def test_a_message_that_meets_no_model_closes_the_socket() -> None:
    async with talking(FakeSynthesizer(None), PATH) as client:
        client.send(CONFIG)
        (error, _), _ = await client.until(closed=1011)
        assert error["code"] == "not_ready"
        await client.connection.task


async def test_each_item_counts_as_a_request(synthesizer: FakeSynthesizer) -> None:
    settings = ApiSettings(admission=AdmissionSettings(client_requests_per_minute=2))
    async with client_of(one_api(synthesizer, settings)) as client:
        answer = (await client.post(BATCH, json={"voice": "alloy", "items": [{"input": "Hi."}] * 3})).json()
    assert [result["status"] for result in answer["results"]] == ["success", "success", "error"]
