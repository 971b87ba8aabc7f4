"""Against real engine processes. One of them serves most tests, on one event loop as in a replica."""

import asyncio
import math
import shutil
import signal
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from deployments.config import TalkerConfig
from deployments.errors import CheckpointError, Overloaded, TalkerLost
from deployments.gpu import asleep
from deployments.protocol import FrameChunk, Mailbox, SynthesisRequest
from deployments.serving import mailbox
from deployments.talker.deployment import TalkerReplica
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from deployments.talker.process import channel
from deployments.talker.process.engine_client import EngineClient
from serve_app.extensions.live.mailbox_server import MailboxServer, WrittenText
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import Spoken, ask, speak

pytestmark = pytest.mark.anyio
Calls = list[tuple[str, int]]
SMALL = CONFIG.model_copy(update={"max_num_seqs": 2, "max_num_waiting": 2})
ENDLESS = ask("Hello there. " * 10, frames=300, ignore_eos=True)


async def listen(client: EngineClient, request: SynthesisRequest) -> list[FrameChunk]:
    async with aclosing(client.stream_frames(request)) as chunks:
        return [chunk async for chunk in chunks]


@pytest.fixture(scope="module")
def model(tiny_checkpoint: Callable[[str], Path]) -> str:
    return str(tiny_checkpoint("CustomVoice"))


@pytest.fixture(scope="module")
async def client(model: str) -> AsyncIterator[EngineClient]:
    client = EngineClient(model, SMALL)
    yield client
    client.stop()
    assert not client.is_alive


@pytest.fixture(scope="module")
def in_process(model: str) -> Engine:
    return build_engine(Path(model), SMALL)


async def test_it_knows_the_model_once_it_is_constructed(client: EngineClient, in_process: Engine, model: str) -> None:
    assert client.is_alive
    assert client.info == replace(in_process.info, name=model)


async def test_frames_are_those_of_the_engine(client: EngineClient, in_process: Engine) -> None:
    requests = [ask("Hello there.", seed=seed, frames=12 + seed) for seed in range(4)]
    streams = await asyncio.gather(*(listen(client, request) for request in requests))
    for request, chunks in zip(requests, streams, strict=True):
        spoken, expected = Spoken.join(chunks), speak(in_process, request)
        assert np.array_equal(spoken.codes, expected.codes)
        assert (spoken.reason, spoken.num_text_tokens) == (expected.reason, expected.num_text_tokens)
    assert (client.load.num_running, client.load.num_waiting) == (0, 0)


async def test_a_slow_reader_gets_what_has_arrived_in_one_chunk(client: EngineClient) -> None:
    request = ask(frames=15, ignore_eos=True)
    async with aclosing(client.stream_frames(request)) as chunks:
        first = await anext(chunks)
        await listen(client, ask(frames=30, ignore_eos=True))  # ends later than the first one
        rest = await anext(chunks)
    assert len(first.codes) + len(rest.codes) == 15
    assert rest.finish_reason is not None


@pytest.mark.parametrize("by_cancelling", [False, True])
async def test_leaving_a_stream_aborts_it(client: EngineClient, by_cancelling: bool) -> None:
    first_frame = asyncio.Event()

    async def read() -> None:
        async with aclosing(client.stream_frames(ENDLESS)) as chunks:
            async for _ in chunks:
                first_frame.set()
                if not by_cancelling:
                    return

    reader = asyncio.create_task(read())
    await first_frame.wait()
    if by_cancelling:
        reader.cancel()
    await asyncio.wait((reader,))
    await listen(client, ask(frames=5))  # after it in the pipe: what is reported now is the state after the abort
    assert (client.load.num_running, client.load.num_waiting) == (0, 0)


async def test_overload_arrives_before_the_first_frame(client: EngineClient) -> None:
    async with aclosing(client.stream_frames(ENDLESS)) as one, aclosing(client.stream_frames(ENDLESS)) as two:
        await asyncio.gather(anext(one), anext(two))
        waiting = [asyncio.create_task(listen(client, ask(frames=3))) for _ in range(3)]
        done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        (refused,) = done
        assert isinstance(refused.exception(), Overloaded)
        assert refused is waiting[-1]
    await asyncio.gather(*waiting[:2])
    assert client.load.num_running == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_process_that_dies_or_stands_still_ends_every_stream(model: str, number: int) -> None:
    talker = TalkerReplica(model, SMALL, "", makes_audio=True)
    streams = [await talker.generate(ENDLESS) for _ in range(3)]  # the third one waits for a row
    await asyncio.gather(*(_first_frame(stream) for stream in streams[:2]))
    third = asyncio.create_task(_first_frame(streams[2]))
    assert (await talker.describe()).name == model
    talker._engine.load = channel.EngineLoad(2, 1, 0.5, num_background=3)
    assert talker.record_autoscaling_stats() == {"running": 2, "waiting": 1, "kv_used_ratio": 0.5, "background": 3}
    await talker.check_health()
    talker._engine._process.send_signal(number)
    forgetting = asyncio.create_task(talker.forget((b"v" * 16,)))
    for stream in streams[:2]:
        with pytest.raises(TalkerLost):
            async for _ in stream:
                pass
    for failing in (third, forgetting, anext(await talker.generate(ENDLESS)), talker.check_health()):
        with pytest.raises(TalkerLost):
            await asyncio.wait_for(failing, 20)
    talker._engine._process.wait()


async def _first_frame(stream: AsyncIterator[FrameChunk]) -> FrameChunk:
    return await anext(chunk async for chunk in stream if len(chunk.codes))


def test_a_checkpoint_that_does_not_load_fails_the_constructor(model: str, tmp_path: Path) -> None:
    copy = shutil.copytree(model, tmp_path / "copy")
    tensors = load_file(copy / "model.safetensors")
    del tensors["talker.codec_head.weight"]
    save_file(tensors, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"talker\.codec_head\.weight is missing"):
        EngineClient(str(copy), SMALL)


async def test_stopping_ends_the_process_and_its_streams(model: str) -> None:
    client = EngineClient(model, SMALL)
    async with aclosing(client.stream_frames(ENDLESS)) as chunks:
        await anext(chunks)
        client.stop()
        assert client._process.returncode == 0  # it ended by itself
        with pytest.raises(TalkerLost):
            async for _ in chunks:
                pass
    assert not client.is_alive


def test_it_can_be_stopped_once_its_event_loop_is_gone(model: str) -> None:
    client = EngineClient(model, SMALL)
    asyncio.run(listen(client, ask(frames=2)))
    client.stop()
    assert client._process.returncode == 0


async def test_text_is_spoken_as_it_is_written(client: EngineClient, in_process: Engine) -> None:
    server, text = MailboxServer("127.0.0.1"), WrittenText()
    await server.start()
    at_once = ask("Hello there, you!", frames=30, ignore_eos=True, non_streaming_mode=False)
    live = replace(at_once, text="", mailbox=server.share("token", text))
    chunks, heard = [], asyncio.Event()

    async def hear() -> None:
        async with aclosing(client.stream_frames(live)) as stream:
            async for chunk in stream:
                chunks.append(chunk)
                heard.set()

    hearing = asyncio.create_task(hear())
    text.append("Hello th")
    await heard.wait()
    text.append("ere, you!")
    text.finish()
    await hearing
    await server.aclose()
    assert np.array_equal(Spoken.join(chunks).codes, speak(in_process, at_once).codes)


@pytest.mark.parametrize("breaks", [False, True])
async def test_reading_ends_with_a_stream(client: EngineClient, monkeypatch: pytest.MonkeyPatch, breaks: bool) -> None:
    """Reading the live text ends if the stream's reader leaves, and if reading raises an unexpected error."""
    go_on, closed = asyncio.Event(), asyncio.Event()

    async def read(mailed: Mailbox) -> AsyncGenerator[str, None]:
        try:
            yield "Hello there, you"
            await go_on.wait()
            raise ValueError("no text")
        finally:
            closed.set()

    monkeypatch.setattr(mailbox, "read", read)
    live = replace(ask(""), mailbox=Mailbox("", 1, ""))
    async with asyncio.timeout(20), aclosing(client.stream_frames(live)) as chunks:
        await anext(chunks)
        if breaks:
            go_on.set()
            with pytest.raises(ValueError, match="no text"):
                [chunk async for chunk in chunks]
    async with asyncio.timeout(10):
        await closed.wait()


async def test_the_newest_streams_get_their_chunks_first_and_the_others_in_later_turns() -> None:
    client, chunk = EngineClient.__new__(EngineClient), FrameChunk(np.zeros((1, 16), np.int16), 3)
    client.load, client._streams = channel.EngineLoad(), {number: asyncio.Queue() for number in range(10)}
    got = list[list[int]]()
    handling = asyncio.create_task(
        client._handle_event(channel.Produced(tuple((n, chunk) for n in range(10)), 0.0, client.load))
    )
    while not handling.done():
        await asyncio.sleep(0)
        got.append([number for number, queue in client._streams.items() if not queue.empty()])
        client._streams.pop(1, None)  # its listener leaves
    await handling
    assert got[:3] == [[6, 7, 8, 9], [2, 3, 4, 5, 6, 7, 8, 9], [0, 2, 3, 4, 5, 6, 7, 8, 9]]


@pytest.fixture
async def sleeper(client: EngineClient, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Calls]:
    """What was asked of the driver, which is played. The client leaves its GPU from `falls_asleep` on."""
    calls: Calls = []
    monkeypatch.setattr(asleep, "send_to_sleep", lambda process: calls.append(("sleep", process)))
    monkeypatch.setattr(asleep, "wake", lambda process: calls.append(("wake", process)))
    await client.connect()
    yield calls
    client._keep_alive_s = None
    async with client._changing:  # a change that is under way would set it again
        client._asleep = False


async def falls_asleep(client: EngineClient) -> None:
    slept, loop = asyncio.Event(), asyncio.get_running_loop()
    client.on_sleep = lambda is_asleep: loop.call_soon_threadsafe(slept.set) if is_asleep else None
    client._keep_alive_s = client._keep_alive_s or 0.2
    async with asyncio.timeout(20):
        if not client._asleep:  # a busy machine may have let the whole time pass before this
            await slept.wait()


async def test_an_idle_engine_sleeps_until_a_request(client: EngineClient, in_process: Engine, sleeper: Calls) -> None:
    await falls_asleep(client)
    assert client.is_alive
    both = await asyncio.gather(*(listen(client, ask("Hello.", frames=3)) for _ in range(2)))
    process = client._process.pid
    assert sleeper[:2] == [("sleep", process), ("wake", process)]
    expected = speak(in_process, ask("Hello.", frames=3)).codes
    assert all(np.array_equal(Spoken.join(chunks).codes, expected) for chunks in both)
    await falls_asleep(client)
    assert await client.forget((b"v" * 16,)) == 0
    assert sleeper[2:4] == [("sleep", process), ("wake", process)]


async def test_leaving_ends_no_wake_up(client: EngineClient, sleeper: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    await falls_asleep(client)
    begun, go_on, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    def wake(process: int) -> None:
        assert not begun.is_set(), "the driver restores a process once"
        loop.call_soon_threadsafe(begun.set)
        assert go_on.wait(20)
        sleeper.append(("wake", process))

    monkeypatch.setattr(asleep, "wake", wake)
    leaver = asyncio.create_task(listen(client, ask("Hello.", frames=3)))
    await begun.wait()
    leaver.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaver
    stayer = asyncio.create_task(listen(client, ask("Hello.", frames=3)))
    await asyncio.sleep(0)
    go_on.set()
    assert len(await stayer) > 0
    assert sleeper[:2] == [("sleep", client._process.pid), ("wake", client._process.pid)]


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
async def test_a_gpu_is_free_while_its_engine_sleeps(tmp_path: Path) -> None:
    """A real one, and the driver's checkpoints: codes are the same after it, and the first audio comes within 4 s."""
    write_checkpoint(tmp_path, SHAPES["0.6B-CustomVoice"], Options())
    before, total = torch.cuda.mem_get_info()
    config = TalkerConfig(max_num_seqs=8, gpu_memory_fraction=8e9 / total, keep_alive_s=2.0)
    engine = EngineClient(str(tmp_path), config)
    request = ask("Hello.", frames=20, ignore_eos=True, voice=engine.info.voices[0])
    awake = Spoken.join(await listen(engine, request))
    used = before - torch.cuda.mem_get_info()[0]
    for _ in range(2):
        await falls_asleep(engine)
        assert before - torch.cuda.mem_get_info()[0] < 0.1 * used
        asked_s = time.monotonic()
        heard, first_s = [], math.inf
        async with aclosing(engine.stream_frames(replace(request, gpu_frames=20))) as chunks:
            async for chunk in chunks:
                heard.append(chunk)
                first_s = min(first_s, time.monotonic() - asked_s if chunk.pcm else math.inf)
        assert first_s < 4
        assert np.array_equal(Spoken.join(heard).codes, awake.codes)
    engine.stop()
