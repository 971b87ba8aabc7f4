import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from torch import Tensor

from deployments.codec.backends.registry import load_decoder
from deployments.codec.decoder import CodecDecoder, to_pcm16
from deployments.codec.decoder_state import DecoderState
from deployments.codec.encoder import CodecEncoder
from deployments.codec.plain_slots import PlainSlots
from deployments.codec.slots import CODE_RING
from deployments.errors import EngineError, Overloaded
from deployments.protocol import ALL_FRAMES, ClonePrompt, Codes, Pcm, Reference
from deployments.recording_cache import VOICE_BYTES
from deployments.talker.audio import audio_stream, audio_streams
from deployments.talker.audio.audio_stream import AudioStream
from deployments.talker.audio.audio_streams import AudioStreams
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.startup import build_engine
from tests.clock import Clock
from tests.deployments.talker.conftest import CONFIG
from tests.deployments.talker.driving import Recordings, ask, chunks_of, resumed, speak

FRAME_S = 0.08


@pytest.fixture(scope="module")
def decoder(tiny_checkpoint: Callable[[str], Path]) -> CodecDecoder:
    return load_decoder(tiny_checkpoint("CustomVoice") / "speech_tokenizer")


@pytest.fixture
def audio(decoder: CodecDecoder) -> AudioStreams:
    return AudioStreams(lambda: PlainSlots(decoder, num_slots=4), num_slots=4, frame_s=FRAME_S)


def random_codes(frames: int, *, seed: int = 0) -> Codes:
    return np.random.default_rng(seed).integers(0, 2048, (frames, 16)).astype(np.int16)


def whole(decoder: CodecDecoder, codes: Codes) -> Pcm:
    audio, _ = decoder.decode(torch.from_numpy(codes).long()[None], [decoder.initial_state()])
    return to_pcm16(audio[0])


def assert_close(pcm: bytes, expected: Pcm) -> None:
    samples = np.frombuffer(pcm, np.int16)
    assert samples.shape == expected.shape
    assert np.abs(samples.astype(int) - expected).max(initial=0) <= 1


def feed(audio: AudioStreams, streams: dict[int, Codes]) -> dict[int, bytes]:
    """Frame after frame of all streams, then their ends: what was heard of each."""
    heard = dict.fromkeys(streams, b"")
    for frame in range(max(map(len, streams.values()))):
        going = [number for number, codes in streams.items() if frame < len(codes)]
        audio.add_frames(going, torch.from_numpy(np.stack([streams[number][frame] for number in going])))
        for number, pcm in audio.pop_pcm():
            heard[number] += pcm
    for number in streams:
        audio.finish(number)
    while not audio.is_idle:
        for number, pcm in audio.pop_pcm():
            heard[number] += pcm
    return heard


@pytest.mark.parametrize(("known", "heard"), [(6, None), (6, 6), (9, 4), (3, 0), (99, 98)])
def test_a_resumed_stream_goes_on(audio: AudioStreams, decoder: CodecDecoder, known: int, heard: int | None) -> None:
    codes, others = random_codes(104), random_codes(3, seed=1)
    audio.open(0, None, num_frames=1)  # it gets more frames than it wants
    audio.open(1, codes[:known], num_delivered=heard, num_frames=12)
    other_pcm, pcm = feed(audio, {0: others, 1: codes[known:]}).values()
    assert_close(other_pcm, whole(decoder, others[:1]))
    begin = known if heard is None else heard
    expected = whole(decoder, codes)[begin * decoder.frame_samples :][: 12 * decoder.frame_samples]
    assert_close(pcm, expected)


@dataclass
class PendingFlight:
    pcm: list[Pcm | EngineError]
    done: bool = False

    def result(self) -> list[Pcm | EngineError]:
        self.done = True
        return self.pcm


@dataclass
class FakeSlots:
    """Notes its calls, which are under way until a test lets them land."""

    num_slots: int
    reach: int = 588
    calls: list[tuple[list[int], int]] = field(default_factory=list)
    decode_calls: list[PendingFlight] = field(default_factory=list)
    begun: list[DecoderState | None] = field(default_factory=list)
    num_preceded: int = 0
    level: int = 9000  # of all samples

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """Streams and frames of each call."""
        return [(len(called), frames) for called, frames in self.calls]

    def largest_batch(self, frames: int) -> int:
        return 8

    def start_slot(self, slot: int, state: DecoderState | None = None) -> None:
        self.begun.append(state)

    def state(self, slot: int) -> DecoderState:
        return DecoderState(sum(frames for called, frames in self.calls if slot in called), ())

    def write(self, slots: list[int], positions: list[int], codes: Tensor) -> None:
        assert len(slots) == len(positions) == len(codes)
        for slot, position in zip(slots, positions, strict=True):
            assert position - sum(frames for called, frames in self.calls if slot in called) < CODE_RING

    def decode(self, slots: list[int], frames: int) -> PendingFlight:
        self.calls.append((list(slots), frames))
        self.decode_calls.append(PendingFlight([np.full(frames, self.level, np.int16) for _ in slots]))
        return self.decode_calls[-1]

    def recall(self, slot: int, frames: int) -> None:
        self.calls.append(([slot], frames))

    def barrier(self) -> None:
        self.num_preceded += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(audio_streams, "time", clock)
    return clock


@pytest.fixture
def slots(clock: Clock, request: pytest.FixtureRequest) -> FakeSlots:
    """A test may ask for another number of slots."""
    return FakeSlots(getattr(request, "param", 64))


@pytest.fixture
def faked(slots: FakeSlots) -> AudioStreams:
    return AudioStreams(lambda: slots, num_slots=slots.num_slots, frame_s=FRAME_S)


def frames_of(count: int) -> Tensor:
    return torch.zeros((count, 16), dtype=torch.int16)


def land(slots: FakeSlots, audio: AudioStreams) -> list[int]:
    """End the calls that were made so far; whose audio they brought."""
    for decode_call in slots.decode_calls:
        decode_call.done = True
    return [number for number, _ in audio.pop_pcm()]


def test_the_first_frame_starts_at_once_and_later_ones_share_calls(slots: FakeSlots, faked: AudioStreams) -> None:
    for number in range(6):
        faked.open(number, None, num_frames=ALL_FRAMES)
        faked.add_frames([number], frames_of(1))
    assert [len(called) for called, _ in slots.calls] == [1, 1]  # one runs, one waits behind it
    slots.decode_calls[0].done = True
    assert [number for number, _ in faked.pop_pcm()] == [0]
    assert [len(called) for called, _ in slots.calls] == [1, 1, 4]


def test_under_load_chunks_are_wider(slots: FakeSlots, faked: AudioStreams) -> None:
    for number in range(40):
        faked.open(number, None, num_frames=ALL_FRAMES)
    for _ in range(30):
        faked.add_frames(range(40), frames_of(40))
        land(slots, faked)
    sizes = [frames for called, frames in slots.calls if 0 in called]
    assert sizes[0] == 1
    assert 2 not in sizes


def playing(slots: FakeSlots, streams: int, frames: int = 15) -> AudioStreams:
    """Streams whose listeners have so many frames in hand, while no further ones exist."""
    audio = AudioStreams(lambda: slots, num_slots=slots.num_slots, frame_s=FRAME_S)
    for number in range(streams):
        audio.open(number, None, num_frames=ALL_FRAMES)
    for _ in range(frames):
        audio.add_frames(range(streams), frames_of(streams))
        while land(slots, audio):
            pass
    assert audio.is_idle
    slots.calls.clear()
    return audio


def test_a_resumed_stream_is_due_when_its_player_runs_dry(slots: FakeSlots, faked: AudioStreams, clock: Clock) -> None:
    faked.open(0, None, num_frames=ALL_FRAMES, due_s=clock.now_s + 5.0)
    faked.open(1, None, num_frames=ALL_FRAMES)
    faked.add_frames([0, 1], frames_of(2))
    assert [called for called, _ in slots.calls] == [[1, 0]]  # the listener of 1 has nothing


def add_frames(audio: AudioStreams, stream: int, frames: int) -> None:
    for _ in range(frames):
        audio.add_frames([stream], frames_of(1))


def test_streams_with_time_wait_for_each_other(slots: FakeSlots) -> None:
    audio = playing(slots, 12)
    add_frames(audio, 0, 12)
    add_frames(audio, 2, 5)
    assert audio.finish(2)  # it wants a shorter call
    assert slots.calls == []
    add_frames(audio, 1, 12)
    assert slots.shapes == [(2, 12)]


@pytest.mark.parametrize(("streams", "shared"), [(100, 8), (160, 16)])
def test_beside_many_streams_calls_are_longer(slots: FakeSlots, streams: int, shared: int) -> None:
    slots.num_slots = streams
    audio = playing(slots, streams, frames=13)
    for number in range(shared):
        assert slots.calls == []
        add_frames(audio, number, 12)
    assert slots.shapes == [(shared, 12)]


def test_a_stream_with_time_waits_no_longer_than_bearable(slots: FakeSlots, clock: Clock) -> None:
    audio = playing(slots, 12)
    add_frames(audio, 0, 12)
    clock.now_s += 0.09
    assert audio.pop_pcm() == []
    assert slots.calls == []
    clock.now_s += 0.02
    audio.pop_pcm()
    assert slots.shapes == [(1, 12)]
    land(slots, audio)
    add_frames(audio, 0, 12)
    assert slots.shapes == [(1, 12)]  # it waits again


def test_a_stream_that_has_waited_goes_however_busy_the_device_is(slots: FakeSlots, clock: Clock) -> None:
    audio = playing(slots, 12)
    add_frames(audio, 0, 12)
    add_frames(audio, 1, 12)
    add_frames(audio, 2, 12)
    assert slots.shapes == [(2, 12)]  # it has not ended
    clock.now_s += 0.11
    audio.pop_pcm()
    assert slots.shapes == [(2, 12), (1, 12)]


def test_a_stream_alone_does_not_wait(slots: FakeSlots) -> None:
    audio = playing(slots, 1)
    add_frames(audio, 0, 12)
    assert slots.shapes == [(1, 12)]


def test_a_first_frame_finds_one_shared_call_before_it_at_most(slots: FakeSlots) -> None:
    audio = playing(slots, 12)
    for stream in range(4):
        add_frames(audio, stream, 12)
    assert slots.shapes == [(2, 12)]
    audio.open(12, None, num_frames=ALL_FRAMES)
    add_frames(audio, 12, 1)
    assert slots.shapes == [(2, 12), (1, 1)]


def test_a_stream_whose_listener_has_little_left_goes_at_once(slots: FakeSlots, clock: Clock) -> None:
    audio = playing(slots, 12)
    clock.now_s = 15 * FRAME_S - 0.3
    add_frames(audio, 0, 12)
    assert slots.shapes == [(1, 12)]


def test_a_stream_that_plays_lets_a_new_one_go_first(slots: FakeSlots, clock: Clock) -> None:
    audio = playing(slots, 3)
    clock.now_s = 15 * FRAME_S - 0.3
    for number in (1, 2, 0):  # the calls of 1 and 2 are under way
        add_frames(audio, number, 12)
    audio.open(3, None, num_frames=ALL_FRAMES)
    add_frames(audio, 3, 1)
    num_calls = len(slots.calls)
    land(slots, audio)
    assert [len(slots.shapes), slots.shapes[num_calls]] == [num_calls + 2, (1, 1)]


@pytest.mark.parametrize("slots", [8], indirect=True)
def test_a_known_recording_is_not_heard_again(slots: FakeSlots, faked: AudioStreams) -> None:

    def clone(recording: Codes) -> DecoderState | None:
        """The first frame of one; what its slot began with."""
        slots.calls.clear()
        faked.open(0, None, num_frames=ALL_FRAMES, recording=recording)
        add_frames(faked, 0, 1)
        while not land(slots, faked):
            pass
        faked.close(0)
        return slots.begun[-1]

    one, two, three = (random_codes(30, seed=seed) for seed in range(3))
    assert clone(one) is None
    assert [frames for _, frames in slots.calls] == [30, 1]
    state = clone(one)
    assert state is not None
    assert state.position == 30
    assert [frames for _, frames in slots.calls] == [1]
    assert clone(two) is None
    assert clone(one) is not None
    assert clone(three) is None  # a quarter as many as slots are kept
    assert clone(one) is not None
    assert clone(two) is None


def test_a_slot_never_holds_more_codes_than_fit(slots: FakeSlots, faked: AudioStreams) -> None:
    """Neither of frames as they are made, nor of those that exist when it begins."""
    faked.open(0, None, num_frames=ALL_FRAMES)
    for _ in range(2 * CODE_RING):
        faked.add_frames([0], frames_of(1))
    faked.open(1, random_codes(2 * CODE_RING), num_delivered=CODE_RING, num_frames=ALL_FRAMES)


@pytest.fixture(scope="module")
def base(tiny_checkpoint: Callable[[str], Path]) -> Path:
    return tiny_checkpoint("Base")


@pytest.fixture
def cloning(engine_of: Callable[[str], Engine], base: Path, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """A talker that reads recordings by itself, as on a GPU."""
    engine, codec = engine_of("Base"), CodecEncoder.load(base / "speech_tokenizer")
    speaker = engine.prompts.speaker_encoder
    assert speaker is not None

    def encode(reference: Reference) -> ClonePrompt:
        vector = speaker.embed(torch.from_numpy(reference.samples)).numpy()
        return ClonePrompt(vector, codec.encode(reference.samples))

    monkeypatch.setattr(engine.prompts, "recordings", Recordings(encode))
    return engine


RECORDING = np.random.default_rng(5).uniform(-0.5, 0.5, 20000).astype(np.float32)


@pytest.mark.parametrize("behind", [0, 3])
def test_a_clone_continues_its_recording(cloning: Engine, base: Path, behind: int) -> None:
    decoder = load_decoder(base / "speech_tokenizer")
    request = ask(frames=14, voice=None, ignore_eos=True, reference=Reference(RECORDING, "Said."))
    recorded = CodecEncoder.load(base / "speech_tokenizer").encode(RECORDING)
    codes = speak(cloning, replace(request, reference_codes=recorded)).codes
    if behind:
        request = resumed(request, codes[:behind], samples=behind * decoder.frame_samples)
    expected = whole(decoder, np.concatenate([recorded, codes]))[(len(recorded) + behind) * decoder.frame_samples :]
    for _ in range(2):  # the second time the recording is known
        chunks = chunks_of(cloning, replace(request, gpu_frames=ALL_FRAMES))
        assert np.array_equal(np.concatenate([chunk.codes for chunk in chunks]), codes[behind:])
        assert_close(b"".join(chunk.pcm for chunk in chunks), expected)


def test_an_engine_forgets_a_stored_voice(base: Path) -> None:
    """Its vector, and the state of the decoder behind its recording; a stream that goes on brings neither back."""
    engine, key = build_engine(base, CONFIG), bytes(range(2 * VOICE_BYTES))
    recorded = CodecEncoder.load(base / "speech_tokenizer").encode(RECORDING[:9600])
    reference = Reference(RECORDING[:9600], "Said.", key=key)
    request = ask(frames=14, voice=None, ignore_eos=True, reference=reference)
    request = replace(request, reference_codes=recorded, gpu_frames=ALL_FRAMES)
    chunks_of(engine, request)
    assert engine.prompts.speakers.find(key) is not None
    assert engine.forget((bytes(VOICE_BYTES),)) == 0
    assert engine.forget((key[:VOICE_BYTES],)) == 2
    assert engine.prompts.speakers.find(key) is None
    assert chunks_of(engine, request)
    assert engine.forget((key[:VOICE_BYTES],)) == 0


@pytest.mark.parametrize("slots", [8], indirect=True)
def test_jobs_are_decoded_where_no_other_stream_wants_to(slots: FakeSlots, faked: AudioStreams, clock: Clock) -> None:
    for number in range(4):
        faked.open(number, None, num_frames=ALL_FRAMES, background=True)
        faked.add_frames([number], frames_of(1))
    clock.now_s += 0.2  # longer than the frame of a listener waits to share a call
    faked.pop_pcm()
    assert [len(called) for called, _ in slots.calls] == [1], "no second call waits behind one of a job"
    with pytest.raises(Overloaded):
        faked.open(4, None, num_frames=ALL_FRAMES, background=True)  # half of the slots are for others
    faked.open(10, None, num_frames=ALL_FRAMES)
    slots.decode_calls[-1].done = True
    faked.pop_pcm()
    assert len(slots.calls) == 1, "a listener waits for a first sound"
    faked.add_frames([10], frames_of(1))
    assert faked._streams[10].slot in slots.calls[1][0]
    for number in range(4):
        faked.add_frames([number], frames_of(1))
    clock.now_s += 1  # in which the listener's player runs dry: it has begun
    for _ in range(20):
        slots.decode_calls[-1].done = slots.decode_calls[-2].done = True
        faked.pop_pcm()
    assert {slot for called, _ in slots.calls for slot in called} == {0, 1, 2, 3, 4}


def test_a_listener_without_text_holds_no_job_up(slots: FakeSlots, faked: AudioStreams, clock: Clock) -> None:
    faked.open(0, None, num_frames=ALL_FRAMES)
    faked.open(1, None, num_frames=ALL_FRAMES, background=True)
    faked.add_frames([1], frames_of(1))
    assert not slots.calls
    clock.now_s += 0.2
    faked.pop_pcm()
    assert len(slots.calls) == 1


def test_a_job_whose_slot_is_full_is_decoded_whatever_others_want(slots: FakeSlots, faked: AudioStreams) -> None:
    faked.open(0, None, num_frames=ALL_FRAMES, background=True)
    for number in range(1, 9):
        faked.open(number, None, num_frames=ALL_FRAMES)
    for _ in range(CODE_RING):
        faked.add_frames(range(9), frames_of(9))
    assert faked._streams[0].num_waiting < CODE_RING // 2


def test_a_stream_that_is_not_looked_at_wants_no_call(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    slots, sizes, rng = FakeSlots(64), list[bool](), random.Random(1)
    audio = AudioStreams(lambda: slots, num_slots=slots.num_slots, frame_s=FRAME_S)

    def candidates(streams: Collection[AudioStream], now_s: float) -> list[audio_stream._Candidate]:
        for stream in streams:
            if stream.num_waiting and stream.call_size(now_s, 0):
                sizes.append(stream.earliest_call_s <= now_s)
        return original(streams, now_s)

    original = audio_stream._candidates
    monkeypatch.setattr(audio_stream, "_candidates", candidates)
    number, going = 0, list[int]()
    for _ in range(1500):
        clock.now_s += rng.choice((0.001, 0.01, 0.05))
        if len(going) < 12 and rng.random() < 0.3:
            number += 1
            prefix = np.zeros((rng.randrange(1, 40), 16), np.int16) if rng.random() < 0.3 else None
            audio.open(number, prefix, num_frames=ALL_FRAMES, background=rng.random() < 0.2)
            going.append(number)
        spoken = [each for each in going if rng.random() < 0.8]
        audio.add_frames(spoken, frames_of(len(spoken)))
        if going and rng.random() < 0.1:
            audio.finish(going.pop(rng.randrange(len(going))))
        for decode_call in slots.decode_calls:
            decode_call.done = decode_call.done or rng.random() < 0.5
        audio.pop_pcm()
    assert len(sizes) > 1000
    assert all(sizes)


def test_no_decoder_is_loaded_while_nobody_wants_audio() -> None:
    """Where others make the audio there may be no memory for it."""
    audio = AudioStreams(Mock(side_effect=AssertionError("the decoder was loaded")), num_slots=1, frame_s=FRAME_S)
    audio.open(1, None, num_frames=0)
    audio.add_frames([1], frames_of(1))
    assert audio.pop_pcm() == []
    assert not audio.finish(1)
    assert audio.is_idle


def test_undecodable_streams_fail_alone(slots: FakeSlots, faked: AudioStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a call, or in the recall of its recording. Who has left is not told."""
    error = EngineError("not finite")
    for number in (0, 1):
        faked.open(number, None, num_frames=ALL_FRAMES)
    faked.add_frames([0, 1], frames_of(2))
    slots.decode_calls[0].pcm[0] = error
    assert land(slots, faked) == [1]
    monkeypatch.setattr(slots, "recall", Mock(side_effect=error))
    for number in (2, 3):
        faked.open(number, None, num_frames=ALL_FRAMES, recording=random_codes(30))
    faked.close(3)
    assert (faked.has_audio, faked.is_idle, faked.is_pending(0)) == (True, False, True)
    assert faked.take_failures() == [(0, error), (2, error)]
    faked.add_frames([0, 1, 2], frames_of(3))
    assert [faked.is_pending(number) for number in range(3)] == [False, True, False]
    assert faked.take_failures() == []
    assert not faked.has_audio
    faked.check_integrity()
