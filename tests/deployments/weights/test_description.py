"""A checkpoint described from its files is the one that an engine describes once it is loaded."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deployments.config import TalkerConfig
from deployments.talker.engine.startup import build_engine
from deployments.weights.choice import speech_tokenizer_key
from deployments.weights.description import clones, describe
from deployments.weights.store import locate

CPU = TalkerConfig(device="cpu", max_num_seqs=1)


@pytest.mark.parametrize("kind", ["Base", "CustomVoice", "VoiceDesign"])
def test_files_tell_what_the_engine_tells(tiny_checkpoint: Callable[[str], Path], kind: str) -> None:
    directory = tiny_checkpoint(kind)
    of_engine = build_engine(directory, CPU).info
    of_files = describe(str(directory), CPU, on_gpu=False)
    assert of_files == replace(of_engine, name=str(directory))
    assert of_files.route == ""  # as the only model
    assert clones(str(directory)) == (kind == "Base")


def test_the_embedded_voice_is_described_without_being_written() -> None:
    info = describe("embedded", CPU, on_gpu=False)
    assert info is not None
    assert info.voices == ("nora", "felix", "iris", "hugo", "otto", "miles", "lily", "edith")
    assert info.languages == ("english",)
    assert info == replace(build_engine(locate("embedded"), CPU).info, name="embedded")
    assert info.word_times
    on_gpu = describe("embedded", CPU, on_gpu=True)
    assert on_gpu is not None
    assert (on_gpu.word_times, on_gpu.talker_on_gpu) == (True, True)


def test_codes_follow_from_the_seed_on_a_cpu_and_on_a_gpu_that_is_told_to() -> None:
    plain, exact = TalkerConfig(kernels="plain"), TalkerConfig(deterministic=True)
    infos = [describe("embedded", each, on_gpu=on_gpu) for each in (CPU, plain, exact) for on_gpu in (False, True)]
    assert [info is not None and info.deterministic for info in infos] == [True, False, False, False, True, True]


def test_a_speech_tokenizer_is_known_by_its_files(tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    base, custom = (str(tiny_checkpoint(kind)) for kind in ("Base", "CustomVoice"))
    assert speech_tokenizer_key(base) == speech_tokenizer_key(custom)
    assert speech_tokenizer_key("embedded") != speech_tokenizer_key(base)
    assert speech_tokenizer_key("Qwen/Qwen3-TTS-12Hz-1.7B-Base") == speech_tokenizer_key("0.6B-CustomVoice")
    assert speech_tokenizer_key("/no/such/folder") == "/no/such/folder"
    other = shutil.copytree(base, tmp_path / "other")
    config = other / "speech_tokenizer" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "note": 1}), encoding="utf-8")
    assert speech_tokenizer_key(str(other)) != speech_tokenizer_key(base)
