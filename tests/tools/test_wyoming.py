"""Wyoming's own client against the sidecar, in front of a server without a model."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
from typer.testing import CliRunner
from wyoming.audio import AudioChunk, AudioStart, AudioStop
from wyoming.client import AsyncTcpClient
from wyoming.error import Error
from wyoming.event import Event
from wyoming.info import Describe, Info
from wyoming.tts import Synthesize, SynthesizeChunk, SynthesizeStart, SynthesizeStop, SynthesizeStopped, SynthesizeVoice

from deployments.errors import Overloaded, TalkrayError
from serve_app.cli.key_file import create_key
from serve_app.cli.main import cli
from serve_app.cli.ray_settings import free_port
from talkray_tools.wyoming import _Handler, serve
from tests.serve_app.cli.test_check_client import Server
from tests.serve_app.fake import Step, pcm_of, utterance

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def connected(script: list[Step], folder: Path) -> AsyncIterator[AsyncTcpClient]:
    """A client of the sidecar, which listens at `client.port`."""
    key = create_key(folder / "keys.json", "wyoming")
    with Server(script, folder / "keys.json") as server:
        port = free_port()
        serving = asyncio.create_task(serve(server.url, host="127.0.0.1", port=port, key=key))
        client = AsyncTcpClient("127.0.0.1", port)
        async with asyncio.timeout(30):
            while True:
                with suppress(ConnectionRefusedError):
                    await client.connect()
                    break
                assert not serving.done(), serving
                await asyncio.sleep(0.01)
        try:
            yield client
        finally:
            await client.disconnect()
            serving.cancel()
            await asyncio.wait((serving,))


async def until(client: AsyncTcpClient, last: str) -> list[Event]:
    events: list[Event] = []
    async with asyncio.timeout(30):
        while not events or events[-1].type != last:
            event = await client.read_event()
            assert event is not None, "the sidecar has closed the connection"
            events.append(event)
    return events


def audio_of(events: list[Event]) -> bytes:
    return b"".join(AudioChunk.from_event(event).audio for event in events if AudioChunk.is_type(event.type))


async def test_home_assistant_is_told_the_voices(tmp_path: Path) -> None:
    async with connected(list(utterance()), tmp_path) as client:
        await client.write_event(Describe().event())
        (event,) = await until(client, "info")
    [program] = Info.from_event(event).tts
    assert program.installed
    assert program.supports_synthesize_streaming
    assert all(voice.installed for voice in program.voices)
    languages = {voice.name: voice.languages for voice in program.voices}
    assert languages["ryan"] == ["en", "zh", "de"]


async def test_one_text(tmp_path: Path) -> None:
    async with connected(list(utterance()), tmp_path) as client:
        for _ in range(2):
            await client.write_event(Synthesize("Hello there.", voice=SynthesizeVoice(name="ryan")).event())
            events = await until(client, AudioStop().event().type)
            start = AudioStart.from_event(events[0])
            assert (start.rate, start.width, start.channels) == (24000, 2, 1)
            assert audio_of(events) == pcm_of(utterance())


async def test_text_while_it_is_written(tmp_path: Path) -> None:
    async with connected(list(utterance()), tmp_path) as client:
        for _ in range(2):
            await client.write_event(SynthesizeStart(voice=SynthesizeVoice(name="ryan")).event())
            for piece in ("Hello ", "there."):
                await client.write_event(SynthesizeChunk(piece).event())
            await client.write_event(Synthesize("Hello there.").event())  # Home Assistant repeats it all
            await client.write_event(SynthesizeStop().event())
            events = await until(client, SynthesizeStopped().event().type)
            assert audio_of(events) == pcm_of(utterance())
            assert [event.type for event in events].count("audio-start") == 1
            assert events[-2].type == "audio-stop"


async def test_a_failure_ends_in_the_same_way(tmp_path: Path) -> None:
    async with connected([Overloaded("full", 2.0)], tmp_path) as client:
        await client.write_event(SynthesizeStart().event())
        await client.write_event(SynthesizeChunk("Hello.").event())
        await client.write_event(SynthesizeStop().event())
        events = await until(client, SynthesizeStopped().event().type)
        [error] = [event for event in events if Error.is_type(event.type)]
        assert "full" in Error.from_event(error).text
        await client.write_event(Synthesize("Hello.").event())
        assert Error.is_type((await until(client, AudioStop().event().type))[-2].type)


async def test_a_stop_without_a_start_is_answered(tmp_path: Path) -> None:
    async with connected(list(utterance()), tmp_path) as client:
        await client.write_event(SynthesizeChunk("Hello.").event())
        await client.write_event(SynthesizeStop().event())
        assert [event.type for event in await until(client, SynthesizeStopped().event().type)] == ["synthesize-stopped"]


class Left(_Handler):
    """Of a client that reads no more."""

    def __init__(self) -> None:
        self._http, self._text, self._speaking = None, None, None  # type: ignore[assignment]

    async def write_event(self, event: Event) -> None:
        raise BrokenPipeError


async def test_a_client_that_has_left_ends_its_connection() -> None:
    handler = Left()
    assert await handler.handle_event(Synthesize("Hello.").event())
    assert handler._speaking is not None
    assert handler._speaking.exception() is None
    assert not await handler.handle_event(SynthesizeStop().event())
    assert handler._speaking is None


def test_where_no_server_answers() -> None:
    result = CliRunner().invoke(cli, ["wyoming", f"http://127.0.0.1:{free_port()}"])
    assert isinstance(result.exception, TalkrayError)
    assert "voices" in str(result.exception)
