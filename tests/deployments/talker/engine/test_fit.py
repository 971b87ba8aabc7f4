import gc
import json
import multiprocessing
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from deployments.codec.backends.registry import choose_decoders
from deployments.codec.codec_config import SpeechTokenizerConfig
from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.protocol import Sampling, SynthesisRequest
from deployments.talker.engine.engine import Engine
from deployments.talker.engine.fit import Fit, choose, main, predict
from deployments.talker.engine.startup import StartClock, load_engine
from deployments.talker.model.model_config import ModelConfig
from deployments.talker.model.talker import Talker
from deployments.talker.state.kv_cache import CONTEXT_BYTES
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from talkray_tools.unfolded_codec import DecoderNetwork

ONE_GPU = TalkerConfig(max_num_seqs=64, max_num_waiting=64)
INSTALLED = TalkerConfig(max_num_seqs=256, max_num_waiting=128, gpu_memory_fraction=0.85)  # one-gpu.yaml
ENCODER_FLOATS, SPEAKER_FLOATS = 50_000_000, 8_000_000
WITHIN = [("0.6B-CustomVoice", 8e9), ("1.7B-CustomVoice", 12e9)]


def write_headers(file: Path, module: nn.Module, prefix: str, itemsize: int) -> None:
    """A file of the right size that holds the tensors' names and shapes, and a hole."""
    header, end = {}, 0
    for name, tensor in module.state_dict().items():
        begin, end = end, end + tensor.numel() * itemsize
        kind = "BF16" if itemsize == 2 else "F32"
        header[prefix + name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        out.truncate(8 + len(text) + end)


@pytest.fixture(scope="module")
def shaped(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint of a released shape without a single weight."""

    @cache
    def write(name: str) -> Path:
        directory = tmp_path_factory.mktemp("shapes") / name
        (directory / "speech_tokenizer").mkdir(parents=True)
        shape = SHAPES[name]
        (directory / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
        (directory / "speech_tokenizer" / "config.json").write_text(json.dumps(shape.codec), encoding="utf-8")
        with torch.device("meta"):
            talker = Talker(ModelConfig.load(directory))
            codec = DecoderNetwork(SpeechTokenizerConfig.load(directory / "speech_tokenizer").decoder)
            encoder = nn.Linear(1000, ENCODER_FLOATS // 1000, bias=False)
            speaker = nn.Linear(1000, SPEAKER_FLOATS // 1000, bias=False)
        of_kind = {"talker": talker} | ({"speaker_encoder": speaker} if name.endswith("Base") else {})
        write_headers(directory / "model.safetensors", nn.ModuleDict(of_kind), "", 2)
        both = nn.ModuleDict({"decoder": codec, "encoder": encoder})
        write_headers(directory / "speech_tokenizer" / "model.safetensors", both, "", 4)
        return directory

    return write


@pytest.mark.parametrize(("name", "total"), WITHIN)
def test_released_shapes_fit_small_gpus(name: str, total: float, shaped: Callable[[str], Path]) -> None:
    fit = predict(shaped(name), ONE_GPU, int(total), int(total))
    assert fit.usual >= 4
    assert fit.longest >= 1
    assert fit.loaded + fit.kv < total


def test_all_that_a_gpu_loads_is_counted(shaped: Callable[[str], Path]) -> None:
    """The talker in bfloat16, with projected text in place of its embedding; the decoder; what only clones need."""
    (custom, base), memory = (shaped(f"0.6B-{kind}") for kind in ("CustomVoice", "Base")), (int(12e9), int(12e9))
    config, codec = ModelConfig.load(custom), SpeechTokenizerConfig.load(custom / "speech_tokenizer").decoder
    with torch.device("meta"):
        talker, decoder = Talker(config), DecoderNetwork(codec)
    floats = sum(tensor.numel() for tensor in talker.state_dict().values())
    floats += (config.text_vocab_size + 1) * config.talker.hidden_size - talker.model.text_embedding.weight.numel()
    weights = sum(tensor.numel() for tensor in decoder.state_dict().values())
    slots = choose_decoders(SpeechTokenizerConfig.load(custom / "speech_tokenizer"), torch.device("cuda")).slots
    rows = 2 * ONE_GPU.max_num_seqs
    decoding = slots.gpu_bytes(codec, num_weights=weights, num_slots=rows, within_reach=memory[0] - CONTEXT_BYTES)
    cloning = 4 * (ENCODER_FLOATS + SPEAKER_FLOATS) + rows // 4 * slots.state_bytes(codec) + (700 << 20)
    assert predict(custom, ONE_GPU, *memory, makes_audio=False).loaded == int(1.1 * 2 * floats)
    assert predict(custom, ONE_GPU, *memory).loaded == 2 * floats + decoding
    assert predict(base, ONE_GPU, *memory).loaded == 2 * floats + decoding + cloning


def test_what_is_left_for_keys_and_values(shaped: Callable[[str], Path]) -> None:
    """As much as is set, or else what neither the engine nor others use."""
    sized = ONE_GPU.model_copy(update={"kv_cache_bytes": 1 << 30})
    assert predict(shaped("0.6B-CustomVoice"), sized, 80 << 30, 79 << 30).kv == 1 << 30
    crowded = predict(shaped("0.6B-CustomVoice"), ONE_GPU, 80 << 30, 8 << 30)
    assert crowded.loaded + crowded.kv + crowded.beside == 8 << 30


def test_what_does_not_fit_is_told_alike(shaped: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    directory = shaped("1.7B-CustomVoice")
    message = r"too little GPU memory: .* of 3\.7 GiB, the engine needs \d\.\d GiB"
    with pytest.raises(EngineError, match=message) as said:
        predict(directory, ONE_GPU, int(4e9), int(4e9))
    arguments = [str(directory), *[str(int(4e9))] * 2, ONE_GPU.model_dump_json()]
    assert main(arguments) == 1
    assert capsys.readouterr().out == f"{said.value}\n"
    assert main([str(directory), *[str(int(12e9))] * 2, ONE_GPU.model_dump_json()]) == 0
    assert Fit(**json.loads(capsys.readouterr().out)["fit"]) == predict(directory, ONE_GPU, int(12e9), int(12e9))


@pytest.mark.parametrize(
    ("name", "gib", "rows", "usual"),
    [("0.6B-CustomVoice", 6, 16, 16), ("0.6B-CustomVoice", 8, 64, 58), ("1.7B-CustomVoice", 8, 16, 16)],
)
def test_settings_follow_a_small_gpu(
    name: str, gib: int, rows: int, usual: int, shaped: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    total, free = gib << 30, int((gib - 0.25) * (1 << 30))
    chosen = choose(directory := shaped(name), INSTALLED, total, free)
    fit = predict(directory, chosen, total, free)
    assert chosen.max_num_seqs >= rows
    assert fit.usual >= usual
    assert fit.longest >= 1
    assert fit.loaded + fit.kv + fit.beside <= free
    assert main([str(directory), str(total), str(free), INSTALLED.model_dump_json(), "--choose"]) == 0
    assert TalkerConfig.model_validate(json.loads(capsys.readouterr().out)["talker"]) == chosen


@pytest.mark.parametrize(
    ("name", "free", "rows", "length"),
    [("0.6B-CustomVoice", 3.87, 16, 4096), ("0.6B-CustomVoice", 3.5, 8, 2048), ("1.7B-CustomVoice", 5.8, 4, 2048)],
)
def test_cpus_make_the_audio_where_the_codec_does_not_fit(
    name: str, free: float, rows: int, length: int, shaped: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    total, left = (int(gib * (1 << 30)) for gib in (free * 30 / 29, free))
    with pytest.raises(EngineError, match=r"codec\.placement: pool"):
        choose(directory := shaped(name), INSTALLED, total, left)
    chosen = choose(directory, INSTALLED, total, left, makes_audio=False)
    fit = predict(directory, chosen, total, left, makes_audio=False)
    assert (chosen.max_num_seqs >= rows, chosen.max_model_len) == (True, length)
    assert fit.usual >= rows
    assert fit.loaded + fit.kv + fit.beside <= left - (128 << 20)
    arguments = [str(directory), str(total), str(left), INSTALLED.model_dump_json(), "--choose"]
    assert (main(arguments), main([*arguments, "--no-audio"])) == (1, 0)
    assert Fit(**json.loads(capsys.readouterr().out.splitlines()[1])["fit"]) == fit


def test_a_large_gpu_keeps_its_settings_if_it_is_free(shaped: Callable[[str], Path]) -> None:
    assert choose(shaped("1.7B-CustomVoice"), INSTALLED, 80 << 30, 79 << 30) == INSTALLED
    assert choose(shaped("1.7B-CustomVoice"), INSTALLED, 80 << 30, 8 << 30).max_num_seqs < INSTALLED.max_num_seqs


def test_a_model_that_is_too_large_in_any_settings(shaped: Callable[[str], Path]) -> None:
    with pytest.raises(EngineError, match=r"too little GPU memory"):
        choose(shaped("1.7B-CustomVoice"), INSTALLED, 4 << 30, int(3.8 * (1 << 30)))


def speak(engine: Engine, num_streams: int, *, makes_audio: bool = True) -> tuple[int, int]:
    """The most streams at once, and the frames of all; each has 100."""
    sampling, voice = Sampling(max_new_tokens=101), engine.info.voices[0]
    for number in range(num_streams):
        request = SynthesisRequest("r", "Few of us.", voice=voice, sampling=sampling, ignore_eos=True, seed=number)
        engine.add(number, replace(request, gpu_frames=100 if makes_audio else 0))
    frames = most_at_once = 0
    while not engine.is_idle:
        output = engine.step()
        assert output.failures == ()
        most_at_once = max(most_at_once, len(engine.scheduler.running))
        frames += sum(len(chunk.codes) for _, chunk in output.chunks)
    return most_at_once, frames


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "most"), WITHIN)
def test_four_streams_speak_within_a_small_gpu(name: str, most: float, tmp_path: Path) -> None:
    """The share is capped, the start says what it takes, and it is what was predicted."""
    write_checkpoint(tmp_path / name, SHAPES[name], Options())
    gc.collect()  # engines of tests before
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    config = ONE_GPU.model_copy(update={"device": "cuda", "gpu_memory_fraction": most / total})
    fit = predict(tmp_path / name, config, total, free_before)
    engine = load_engine(tmp_path / name, config, StartClock())
    assert speak(engine, 4) == (4, 400)
    used = free_before - torch.cuda.mem_get_info()[0]
    granted = engine.runner.networks.cache.blocks.nbytes
    assert used < most
    assert abs(granted - fit.kv) < 0.75e9


_HOLD = """
import sys, torch
free, total = torch.cuda.mem_get_info()
held = torch.empty(free - int(sys.argv[1]), dtype=torch.uint8, device="cuda")
print(torch.cuda.mem_get_info()[0], total, flush=True)
sys.stdin.read()
"""


@contextmanager
def all_but(left: int) -> Iterator[tuple[int, int]]:
    """Another process holds the GPU's memory but for `left` bytes: what is then free, and the GPU's whole memory."""
    command = [sys.executable, "-c", _HOLD, str(left)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        free, total = map(int, holder.stdout.readline().split())
        yield free, total
        holder.kill()


def speak_apart(directory: Path, config: TalkerConfig, num_streams: int, makes_audio: bool) -> tuple[int, int]:
    """In a process of its own, on what is left of the GPU."""
    engine = load_engine(directory, config, StartClock(report=print), makes_audio=makes_audio)
    spoken = speak(engine, num_streams, makes_audio=makes_audio)
    sys.stdout.write(f"left of the GPU at the end: {torch.cuda.mem_get_info()[0] >> 20} MiB\n")
    return spoken


@pytest.mark.gpu
@pytest.mark.whole_gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "gib", "makes_audio"), [
    ("1.7B-CustomVoice", 8, True), ("0.6B-CustomVoice", 6, True), ("1.7B-CustomVoice", 6, False),
    ("0.6B-CustomVoice", 4, False),
])  # fmt: skip
def test_a_start_on_what_others_leave_of_a_gpu(name: str, gib: float, makes_audio: bool, tmp_path: Path) -> None:
    """A card of so many GiB, of which the driver keeps a thirtieth, holds the settings that are chosen for it."""
    write_checkpoint(tmp_path / name, SHAPES[name], Options())
    gc.collect()
    torch.cuda.empty_cache()
    with all_but(int(gib * 29 / 30 * (1 << 30))) as (free, total):
        chosen = choose(tmp_path / name, INSTALLED, total, free, makes_audio=makes_audio)
        config = chosen.model_copy(update={"device": "cuda"})
        sys.stdout.write(f"{name} in {gib} GiB: {config.max_num_seqs} rows of {config.max_model_len}, {makes_audio=}\n")
        fit = predict(tmp_path / name, config, total, free, makes_audio=makes_audio)
        num_streams = min(config.max_num_seqs, fit.usual)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
            spoken = other.submit(speak_apart, tmp_path / name, config, num_streams, makes_audio).result()
        assert spoken == (num_streams, 100 * num_streams)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_a_gpu_of_before_ampere_would_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Float16 in plain PyTorch, talker and codec: the way of a Turing GPU, on another one."""
    write_checkpoint(tmp_path, SHAPES["0.6B-CustomVoice"], Options())
    monkeypatch.setattr("torch.cuda.get_device_capability", lambda _=None: (7, 5))
    config = ONE_GPU.model_copy(update={"device": "cuda", "max_num_seqs": 4, "max_model_len": 1024})
    engine = load_engine(tmp_path, config, StartClock())
    assert engine.runner.networks.name.startswith("plain")
    assert engine.runner.state.hidden.dtype == torch.float16
    request = SynthesisRequest("r", "Hello.", voice=engine.info.voices[0], sampling=Sampling(max_new_tokens=21))
    engine.add(0, replace(request, ignore_eos=True, gpu_frames=20))
    audio = b""
    while not engine.is_idle:
        output = engine.step()
        assert output.failures == ()
        audio += b"".join(chunk.pcm or b"" for _, chunk in output.chunks)
    assert len(audio) > 2 * 19 * 1920
