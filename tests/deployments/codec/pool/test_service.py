import asyncio
import threading
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Literal

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from deployments import protocol
from deployments.codec.backends.registry import load_decoder
from deployments.codec.batch import Decoded, DecodeTask
from deployments.codec.decoder import CodecDecoder, WarmUpResult, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.codec.encoder import CodecEncoder
from deployments.codec.pool import codec as pool_codec
from deployments.codec.pool.codec import Codec, load_codec
from deployments.codec.pool.service import CodecService
from deployments.config import CodecConfig
from deployments.errors import CheckpointError, EngineError, InvalidRequest, TalkerLost
from deployments.protocol import ClonePrompt, Codes, FinishReason, FrameChunk, PcmChunk, Reference, SynthesisRequest
from deployments.recording_cache import VOICE_BYTES

pytestmark = pytest.mark.anyio
Checkpoints = Callable[[str], Path]
OneShot = Callable[..., np.ndarray]
REQUEST = SynthesisRequest("test", "Hello there.", voice="ryan", leading_silence=True)


def make_service(model: Path) -> CodecService:
    """A service whose tasks go to the worker threads one by one."""

    async def decode(task: DecodeTask) -> Decoded:
        (outcome,) = await service.decode_batch([task])
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    service = CodecService(str(model), CodecConfig(), decode=decode)
    return service


class Talker:
    """Goes on after whatever prefix it is given; its stream breaks off before the frames numbered `dies_at`."""

    def __init__(self, codes: Codes, *, dies_at: tuple[int, ...] = ()) -> None:
        self._codes, self._dies_at = codes, list(dies_at)
        self.requests: list[SynthesisRequest] = []
        self.prefixes: list[int] = []
        self.closed = asyncio.Event()

    async def generate(self, request: SynthesisRequest) -> AsyncGenerator[FrameChunk, None]:
        self.requests.append(request)
        prefix = self._codes[:0] if request.prefix is None else request.prefix
        assert np.array_equal(prefix, self._codes[: len(prefix)])
        self.prefixes.append(len(prefix))
        end = self._dies_at.pop(0) if self._dies_at else len(self._codes)
        try:
            for frame in self._codes[len(prefix) : end]:
                await asyncio.sleep(0)
                yield FrameChunk(frame[None], 3)
            if end < len(self._codes):
                raise TalkerLost("gone")
            yield FrameChunk(self._codes[:0], 3, FinishReason.STOP)
        finally:
            self.closed.set()


async def collect(chunks: AsyncGenerator[PcmChunk, None]) -> list[PcmChunk]:
    async with aclosing(chunks):
        return [chunk async for chunk in chunks]


def joined_pcm(chunks: list[PcmChunk]) -> np.ndarray:
    return np.frombuffer(b"".join(chunk.pcm for chunk in chunks), np.int16)


def random_codes(seed: int, *, frames: int = 12) -> Codes:
    return np.random.default_rng(seed).integers(0, 2048, (frames, 16)).astype(np.int16)


def joined_codes(chunks: Sequence[FrameChunk | PcmChunk]) -> Codes:
    return np.concatenate([chunk.codes for chunk in chunks])


def assert_within_one_lsb(pcm: np.ndarray, expected: np.ndarray) -> None:
    assert pcm.shape == expected.shape
    assert np.abs(pcm.astype(int) - expected.astype(int)).max(initial=0) <= 1


def assert_same_audio(chunks: list[PcmChunk], expected: np.ndarray) -> None:
    assert expected.size
    assert_within_one_lsb(joined_pcm(chunks), expected)


@pytest.fixture(scope="module")
def custom_voice(tiny_checkpoint: Checkpoints) -> CodecService:
    return make_service(tiny_checkpoint("CustomVoice"))


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Checkpoints) -> CodecService:
    return make_service(tiny_checkpoint("Base"))


@pytest.fixture
def one_shot(tiny_checkpoint: Checkpoints) -> OneShot:
    def decode(codes: Codes, *, kind: str = "CustomVoice", after: Codes | None = None) -> np.ndarray:
        """Samples of `codes`, spoken after those of another recording."""
        decoder = load_decoder(tiny_checkpoint(kind) / "speech_tokenizer")
        whole = codes if after is None else np.concatenate([after, codes])
        audio, _ = decoder.decode(torch.from_numpy(whole).long()[None], [decoder.initial_state()])
        return to_pcm16(audio[0])[-len(codes) * decoder.frame_samples :]

    return decode


async def test_audio_is_that_of_the_codes(custom_voice: CodecService, one_shot: OneShot) -> None:
    talker = Talker(random_codes(1))
    chunks = await collect(custom_voice.decode_stream(REQUEST, talker.generate))
    assert_same_audio(chunks, one_shot(random_codes(1)))
    assert np.array_equal(np.concatenate([chunk.codes for chunk in chunks]), random_codes(1))
    assert talker.requests == [REQUEST]
    assert chunks[-1].finish_reason is FinishReason.STOP


async def test_reading_holds_no_listener_up(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    service, begun, go_on = make_service(tiny_checkpoint("Base")), threading.Event(), threading.Event()
    encode = CodecEncoder.encode

    def slow(encoder: CodecEncoder, audio: NDArray[np.float32]) -> Codes:
        begun.set()
        while not go_on.is_set():  # works: a thread that waits so long would count as one that hangs
            pass
        return encode(encoder, audio)

    monkeypatch.setattr(CodecEncoder, "encode", slow)
    clone = replace(REQUEST, voice=None, reference=Reference(np.zeros(24_000, np.float32), "Hm."))
    cloned = asyncio.create_task(collect(service.decode_stream(clone, Talker(random_codes(1)).generate)))
    assert await asyncio.to_thread(begun.wait, 30)
    try:
        async with asyncio.timeout(30):
            spoken = await collect(service.decode_stream(REQUEST, Talker(random_codes(2)).generate))
        assert not cloned.done()
    finally:
        go_on.set()
    assert spoken[-1].finish_reason is FinishReason.STOP
    assert (await cloned)[-1].finish_reason is FinishReason.STOP


async def test_reading_may_outlast_calls_of_gpus(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """The encoder of a pool is on the CPU, wherever it decodes."""
    codec = load_codec(str(tiny_checkpoint("Base")), CodecConfig(placement="inline"))
    with monkeypatch.context() as patched:
        patched.setattr("deployments.codec.pool.service.device_of", lambda config: "cuda")
        patched.setattr("deployments.codec.pool.service.load_codec", lambda model, config: codec)
        service = make_service(tiny_checkpoint("Base"))
    monkeypatch.setattr("deployments.codec.pool.workers._LONGEST_GPU_CALL_S", 0.1)

    def busy(reference: Reference) -> tuple[Codes, DecoderState]:
        until_s = time.monotonic() + 1.0
        while time.monotonic() < until_s:
            pass
        return random_codes(3), codec.decoder.initial_state()

    monkeypatch.setattr(Codec, "read", lambda codec, reference: busy(reference))
    clone = replace(REQUEST, voice=None, reference=Reference(np.zeros(24_000, np.float32), "Hm."))
    codes, _ = await service._begin(clone)
    assert np.array_equal(codes, random_codes(3))
    assert service.failure is None


async def test_streams_at_once_do_not_mix(custom_voice: CodecService, one_shot: OneShot) -> None:
    all_codes = [random_codes(seed, frames=5 + seed) for seed in range(4)]
    streams = await asyncio.gather(
        *(collect(custom_voice.decode_stream(REQUEST, Talker(codes).generate)) for codes in all_codes)
    )
    for codes, chunks in zip(all_codes, streams, strict=True):
        assert_same_audio(chunks, one_shot(codes))


async def test_a_clone_continues_it(
    base: CodecService, one_shot: OneShot, tiny_checkpoint: Checkpoints, fed: list[tuple[str, float, dict[str, str]]]
) -> None:
    audio = np.random.default_rng(0).uniform(-0.5, 0.5, 24000).astype(np.float32)
    talker = Talker(random_codes(3))
    request = replace(REQUEST, reference=Reference(audio, "What is said."))
    chunks = await collect(base.decode_stream(request, talker.generate))
    reference_codes = CodecEncoder.load(tiny_checkpoint("Base") / "speech_tokenizer").encode(audio)
    (asked,) = talker.requests
    assert ("reference_lookups_total", 1, {"wanted": "codes", "known": "no"}) in fed
    assert replace(asked, reference_codes=None) == request
    assert asked.reference_codes is not None
    assert np.array_equal(asked.reference_codes, reference_codes)
    assert_same_audio(chunks, one_shot(random_codes(3), kind="Base", after=reference_codes))


async def test_a_prompt_is_not_read(
    base: CodecService, tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither where its recording has been read nor at a replica that never heard it: the sound is the same."""
    audio = np.random.default_rng(1).uniform(-0.5, 0.5, 12000).astype(np.float32)
    samples = replace(REQUEST, reference=Reference(audio, "What is said."))
    talker = Talker(random_codes(3))
    whole = await collect(base.decode_stream(samples, talker.generate))
    prompt = ClonePrompt(np.zeros(4, np.float32), talker.requests[0].reference_codes)
    lean = replace(REQUEST, reference=Reference(None, "What is said.", prompt=prompt))
    for service in (base, make_service(tiny_checkpoint("Base"))):
        monkeypatch.setattr(CodecEncoder, "encode", None)
        for _ in range(2):
            chunks = await collect(service.decode_stream(lean, talker.generate))
            assert_same_audio(chunks, joined_pcm(whole))
            assert np.array_equal(talker.requests[-1].reference_codes, talker.requests[0].reference_codes)
        monkeypatch.setattr(service._readers, "run", None)
        assert (await service._begin(lean))[0] is not None  # waits for no other recording


async def test_a_stored_voice_is_forgotten(base: CodecService) -> None:
    """Its codes, and the state behind them; results that come late are not kept."""
    key = bytes(range(2 * VOICE_BYTES))
    samples = replace(REQUEST, reference=Reference(np.zeros(24000, np.float32), "What is said.", key=key))
    talker = Talker(random_codes(3))
    await collect(base.decode_stream(samples, talker.generate))
    assert base.forget((bytes(VOICE_BYTES),)) == 0
    assert base.forget((key[:VOICE_BYTES],)) == 2
    assert await collect(base.decode_stream(samples, talker.generate))
    assert base.forget((key[:VOICE_BYTES],)) == 0


async def test_a_clone_by_its_voice_begins_in_silence(base: CodecService, one_shot: OneShot) -> None:
    talker = Talker(random_codes(4))
    request = replace(REQUEST, reference=Reference(np.zeros(24000, np.float32), x_vector_only=True))
    chunks = await collect(base.decode_stream(request, talker.generate))
    assert talker.requests == [request]
    assert_same_audio(chunks, one_shot(random_codes(4), kind="Base"))


async def test_a_checkpoint_without_an_encoder_refuses_to_clone(custom_voice: CodecService) -> None:
    request = replace(REQUEST, reference=Reference(np.zeros(24000, np.float32), "text"))
    talker = Talker(random_codes(5))
    with pytest.raises(InvalidRequest) as caught:
        await collect(custom_voice.decode_stream(request, talker.generate))
    assert caught.value.param == "ref_audio"
    assert talker.requests == []


def test_a_model_without_a_codec_fails_with_the_missing_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="speech_tokenizer"):
        CodecService(str(tmp_path), CodecConfig(), decode=Decoded)  # type: ignore[arg-type]


@pytest.mark.parametrize(("device", "has_gpu", "used"), [
    ("auto", True, "cuda"), ("auto", False, "cpu"), ("cpu", True, "cpu"), ("cuda", False, "cuda"),
])  # fmt: skip
def test_a_replica_decodes_where_its_settings_say(
    device: Literal["auto", "cpu", "cuda"], has_gpu: bool, used: str,
    tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def refuse(_: Path, *, device: str) -> CodecDecoder:
        raise EngineError(device)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    monkeypatch.setattr("deployments.codec.pool.codec.load_decoder", refuse)
    with pytest.raises(EngineError, match=f"^{used}$"):
        load_codec(str(tiny_checkpoint("CustomVoice")), CodecConfig(device=device))


def test_a_ready_replica_has_made_every_call(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny, shapes = str(tiny_checkpoint("CustomVoice")), set()
    decode = CodecDecoder.decode

    def noting(decoder: CodecDecoder, codes: torch.Tensor, states: list[DecoderState]) -> object:
        shapes.add(tuple(codes.shape[:2]))
        return decode(decoder, codes, states)

    monkeypatch.setattr(CodecDecoder, "decode", noting)
    for name, value in (("MAX_BATCH_SIZE", 4), ("MAX_BATCH_FRAMES", 8)):
        monkeypatch.setattr(f"deployments.codec.decoder.{name}", value)
    monkeypatch.setattr("deployments.codec.pool.ramps.MAX_CALL_S", 60.0)
    monkeypatch.setattr("deployments.codec.pool.ramps.RAMP", (1, 4))
    config = CodecConfig(precision="float32")
    assert load_codec(tiny, config).warm_up_result.largest_batches == {1: 4, 4: 2}
    assert shapes == {(1, 1), (2, 1), (4, 1), (1, 4), (2, 4)}
    monkeypatch.setattr("deployments.codec.pool.ramps.MAX_CALL_S", 0.0)
    assert load_codec(tiny, config).warm_up_result.largest_batches == {1: 1, 4: 1}
    shapes.clear()
    loaded: list[Path] = []
    load = pool_codec.load_decoder
    monkeypatch.setattr(
        pool_codec, "load_decoder", lambda path, **options: loaded.append(path) or load(path, **options)
    )
    unused = load_codec(tiny, config.model_copy(update={"placement": "inline"}))
    assert unused.warm_up_result == WarmUpResult()
    assert (shapes, loaded) == (set(), [])
    assert unused.decoder is unused.decoder
    assert len(loaded) == 1


def test_a_new_replica_knows_its_capacity(tiny_checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the fewest, so that all that come next are its: what its core cannot decode in time is left to the GPU."""
    clock = count(step=0.05)
    monkeypatch.setattr("deployments.codec.decoder.time", SimpleNamespace(monotonic=lambda: next(clock)))
    service = make_service(tiny_checkpoint("CustomVoice"))
    service.placement.talker_on_gpu = True
    assert service.gate.capacity == pytest.approx(0.5 * 0.9 * 8 * 0.08 / (0.05 * 12 / 16))
    with ExitStack() as streams:
        asked = [streams.enter_context(service.placement.admit(service.gate.capacity)) for _ in range(12)]
    assert sum(frames < protocol.ALL_FRAMES for frames in asked) == 7
