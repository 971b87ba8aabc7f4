import gc
import json
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from deployments.codec.config import SpeechTokenizerConfig
from deployments.config import TalkerConfig
from deployments.errors import EngineError
from deployments.protocol import GenerateRequest, Sampling, SynthesisRequest
from deployments.talker.fit import Fit, main, predict
from deployments.talker.loading import StartClock, load_engine
from deployments.talker.model.config import ModelConfig
from deployments.talker.model.talker import Talker
from talkray_tools.random_checkpoint import Options, write_checkpoint
from talkray_tools.released import SHAPES
from talkray_tools.unfolded_codec import DecoderNetwork

ONE_GPU = TalkerConfig(max_num_seqs=64, max_num_waiting=64)
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

    def write(name: str) -> Path:
        directory = tmp_path_factory.mktemp("shapes") / name
        (directory / "speech_tokenizer").mkdir(parents=True)
        shape = SHAPES[name]
        (directory / "config.json").write_text(json.dumps(shape.config), encoding="utf-8")
        (directory / "speech_tokenizer" / "config.json").write_text(json.dumps(shape.codec), encoding="utf-8")
        with torch.device("meta"):
            talker = Talker(ModelConfig.load(directory))
            codec = DecoderNetwork(SpeechTokenizerConfig.load(directory / "speech_tokenizer").decoder)
        write_headers(directory / "model.safetensors", talker, "talker.", 2)
        write_headers(directory / "speech_tokenizer" / "model.safetensors", codec, "decoder.", 4)
        return directory

    return write


@pytest.mark.parametrize(("name", "total"), WITHIN)
def test_released_shapes_fit_small_gpus(name: str, total: float, shaped: Callable[[str], Path]) -> None:
    fit = predict(shaped(name), ONE_GPU, int(total))
    assert fit.usual >= 4
    assert fit.longest >= 1
    assert fit.loaded + fit.kv < total


def test_what_does_not_fit_is_told_as_the_engine_tells_it(
    shaped: Callable[[str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    directory = shaped("1.7B-CustomVoice")
    with pytest.raises(
        EngineError, match=r"too little GPU memory: .* of 3\.7 GiB, the engine needs \d\.\d GiB"
    ) as error:
        predict(directory, ONE_GPU, int(4e9))
    arguments = [str(directory), str(int(4e9)), ONE_GPU.model_dump_json()]
    assert main(arguments) == 1
    assert capsys.readouterr().out == f"{error.value}\n"
    assert main([str(directory), str(int(12e9)), ONE_GPU.model_dump_json()]) == 0
    assert Fit(**json.loads(capsys.readouterr().out)["fit"]) == predict(directory, ONE_GPU, int(12e9))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize(("name", "most"), WITHIN)
def test_four_streams_speak_within_a_small_gpu(name: str, most: float, tmp_path: Path) -> None:
    """The share is capped, the start says what it takes, and it is what was predicted."""
    write_checkpoint(tmp_path / name, SHAPES[name], Options())
    gc.collect()  # engines of tests before
    torch.cuda.empty_cache()
    free_before, total = torch.cuda.mem_get_info()
    config = ONE_GPU.model_copy(update={"device": "cuda", "gpu_memory_fraction": most / total})
    fit = predict(tmp_path / name, config, total)
    engine = load_engine(tmp_path / name, config, StartClock())
    sampling, voice = Sampling(max_new_tokens=101), engine.info.voices[0]
    for number in range(4):
        request = SynthesisRequest("r", "Four of us.", voice=voice, sampling=sampling, ignore_eos=True, seed=number)
        engine.add(number, GenerateRequest(request, gpu_frames=100))
    frames = dict.fromkeys(range(4), 0)
    most_at_once = 0
    while not engine.is_idle:
        output = engine.step()
        assert output.failures == ()
        most_at_once = max(most_at_once, len(engine.scheduler.running))
        for number, chunk in output.chunks:
            frames[number] += len(chunk.codes)
    assert (most_at_once, frames) == (4, dict.fromkeys(range(4), 100))
    used = free_before - torch.cuda.mem_get_info()[0]
    granted = engine.runner.networks.cache.blocks.nbytes
    assert used < most
    assert abs(granted - fit.kv) < 0.75e9
