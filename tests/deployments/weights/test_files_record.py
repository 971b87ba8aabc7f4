"""What is said of checkpoints: whole ones, damaged ones, ones of others, and those that a hub has."""

import errno
import json
import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from email.message import Message
from functools import partial
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.error import HTTPError, URLError

import pytest
import torch
from httpx2 import ReadError
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

from deployments.config import TalkerConfig
from deployments.embedded_voice import checkpoint as embedded
from deployments.errors import CheckpointError
from deployments.talker.model.model_config import ModelConfig
from deployments.weights import checkpoint, choice, description, hub, store
from tests.records import Record

Damage = Callable[[Path], object]


def edited(name: str, **changes: Any) -> Damage:
    """Set keys of a JSON file; "a.b" is b in a, and None removes it."""

    def edit(directory: Path) -> None:
        file = directory / name
        values = json.loads(file.read_text("utf-8")) if file.exists() else {}
        for key, value in changes.items():
            *path, last = key.split("__")
            place = values
            for each in path:
                place = place[each]
            place.pop(last, None) if value is None else place.update({last: value})
        file.write_text(json.dumps(values), "utf-8")

    return edit


def wrote(name: str, text: str) -> Damage:
    return lambda directory: (directory / name).write_text(text, "utf-8")


def tensors(name: str, change: Callable[[dict[str, torch.Tensor]], None]) -> Damage:
    def edit(directory: Path) -> None:
        loaded = load_file(directory / name)
        change(loaded)
        save_file(loaded, directory / name)

    return edit


def sharded(directory: Path) -> None:
    (directory / "model.safetensors").rename(directory / "shard-1.safetensors")
    names = dict.fromkeys(load_file(directory / "shard-1.safetensors"), "shard-1.safetensors")
    (directory / store.INDEX_FILE).write_text(json.dumps({"weight_map": names}))


CODEC, TOP, OPTIONS = "speech_tokenizer/config.json", "config.json", "generation_config.json"
DAMAGES: dict[str, Damage] = {
    "whole": lambda directory: None,
    **{f"no {name}": lambda directory, name=name: (directory / name).unlink() for name in (
        TOP, CODEC, "vocab.json", "merges.txt", "model.safetensors", "speech_tokenizer/model.safetensors")},
    "nothing": lambda directory: [shutil.rmtree(directory), directory.mkdir()],
    "sharded": sharded,
    "a shard is missing": lambda directory: [sharded(directory), (directory / "shard-1.safetensors").unlink()],
    "no index": lambda directory: [sharded(directory), (directory / store.INDEX_FILE).write_text("[]")],
    "adapter": lambda directory: [(directory / TOP).rename(directory / store.ADAPTER)],
    "adapter beside": wrote(store.ADAPTER, "{}"),
    "not JSON": wrote(TOP, "{"), "codec not JSON": wrote(CODEC, "no"), "a list": wrote(TOP, "[]"),
    "another family": edited(TOP, model_type="llama"),
    "codec of 25 Hz": edited(CODEC, model_type="qwen3_tts_tokenizer_25hz"),
    "quantized": edited(TOP, quantization_config={}), "another kind": edited(TOP, tts_model_type="other"),
    "small": edited(TOP, tts_model_size="0b6"), "no talker": edited(TOP, talker_config=None),
    "no groups": edited(TOP, talker_config__num_code_groups=None),
    "no speakers": edited(TOP, talker_config__spk_id=None),
    "speakers": edited(TOP, talker_config__spk_id={"Ann": 3, "BOB": None, "Eve": False, "囁き": 5}),
    "spoken form": edited(TOP, talkray={"spoken_form": "english"}),
    "german": edited(TOP, talkray={"spoken_form": "german"}),
    "instructed": edited(TOP, talkray={"spoken_form": "english", "follows_instructions": True,
        "max_segment_chars": 77}),
    "no segment": edited(TOP, talkray={"max_segment_chars": 0}),
    "head": edited(TOP, talkray={"alignment_head": [1, 2]}),
    "own facts": lambda directory: [
        edited(TOP, talkray={"max_segment_chars": 9, "alignment_head": [1, 2]})(directory),
        edited("talkray.json", max_segment_chars=5, clones_by_vector=True)(directory),
    ],
    "own facts not JSON": wrote("talkray.json", "5,"), "rate": edited(CODEC, output_sample_rate=12345),
    "frame": edited(CODEC, decode_upsample_rate=960),
    **{f"{key}={value}": edited(OPTIONS, **{key: value}) for key, value in (
        ("temperature", 0), ("top_k", -1), ("top_p", 1.5), ("top_p", 0), ("max_new_tokens", 0),
        ("repetition_penalty", 1e7), ("temperature", 1.3), ("subtalker_top_k", None), ("do_sample", False))},
    "another shape": tensors("model.safetensors",
        lambda each: each.update({"talker.model.norm.weight": torch.zeros(3)})),
    "a tensor too many": tensors("model.safetensors",
        lambda each: each.update({f"talker.extra.{number}": torch.zeros(2) for number in range(10)})),
    "a tensor too few": tensors("model.safetensors", lambda each: [each.pop(name) for name in [*each][:2]]),
    "unmerged": tensors("model.safetensors", lambda each: each.update({"talker.lora_A.weight": torch.zeros(2)})),
    "truncated": lambda directory: (directory / "model.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}"),
    "sharded and too many": lambda directory: [DAMAGES["a tensor too many"](directory), sharded(directory)],
}  # fmt: skip


def facts(directory: Path, shapes: dict[str, tuple[int, ...]], *, on_gpu: bool) -> dict[str, Callable[[], object]]:
    name, config, strict = str(directory), TalkerConfig(max_model_len=512), {"prefix": "talker.", "device": "cpu"}
    return {
        "find": lambda: store.find(name), "config": lambda: store.find_config_directory(name),
        "describe": lambda: description.describe(name, config, on_gpu=on_gpu),
        "speakers": lambda: description.speakers(name), "clones": lambda: description.clones(name),
        "encodes": lambda: description.encodes(directory), "load": lambda: ModelConfig.load(directory),
        "files": lambda: sorted({file.name for file in checkpoint.tensor_files(directory).values()}),
        "strict": lambda: len(checkpoint.read_strict(directory, shapes, **strict, ignore=("*.ignored",))),
    }  # fmt: skip


@pytest.mark.parametrize(("kind", "share"), [("CustomVoice", 0), ("VoiceDesign", 1), ("Base", 2)])
def test_folders(kind: str, share: int, tiny_checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    record = Record((re.escape(str(tmp_path)), "TMP"), (r"\b[0-9a-f]{32,64}\b", "HASH"), (r" at 0x\w+", ""))
    shapes, keys = checkpoint.read_shapes(tiny_checkpoint(kind), "talker."), {}
    for number, (name, damage) in enumerate(DAMAGES.items()):
        if number and number % 3 != share:
            continue
        directory = tmp_path / f"d{number}"
        shutil.copytree(tiny_checkpoint(kind), directory)
        damage(directory)
        record(f"-- {name}")
        for what, call in facts(directory, shapes, on_gpu=kind == "Base").items():
            record.attempt(what, call)
        try:
            keys.setdefault(choice.speech_tokenizer_key(str(directory)), []).append(name)
        except (CheckpointError, OSError, StopIteration) as error:
            record("key !", error)
        shutil.rmtree(directory)
    record.lines += [f"one codec: {names}" for names in keys.values()]
    record.check(f"folders-{kind.lower()}")


def test_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = Record(
        (re.escape(str(tmp_path)), "TMP"), (r"voice-[0-9a-f]{12}", "voice-HASH"), (r"'\S*/deployments", "'...")
    )
    monkeypatch.setenv("TALKRAY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download", record.fake("snapshot", lambda *_, **__: _raise(OSError("not cached")))
    )
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda name, file: record("cached?", name, file))
    monkeypatch.setattr(hub, "download", record.fake("download", lambda *_: _raise(CheckpointError("no network"))))
    for name in (
        "1.7B-CustomVoice", "0.6b-base", "Qwen3-TTS-12Hz-1.7B-Base", "Qwen/Qwen3-TTS-12Hz-1.7B-VoiceDesign",
        "other/1.7B-Base", "1.7B-Custom", "unknown/model",
        "囁き", "./gone", "/gone/away", "a/b/c", "~/gone", "embedded", "embedded-base", "auto", "", "Qwen/0.6B-Base",
    ):  # fmt: skip
        for what, call in (
            ("repository", store.repository), ("find", store.find), ("config", store.find_config_directory),
            ("clones", description.clones),
            ("speakers", description.speakers), ("key", choice.speech_tokenizer_key),
            ("locate", lambda name: name.startswith("embedded") or store.locate(name)),
        ):  # fmt: skip
            record.attempt(f"{what} {name!r}", lambda call=call, name=name: call(name))
    (tmp_path / "models/Qwen3-TTS-12Hz-0.6B-CustomVoice").mkdir(parents=True)
    for models_dir in (None, tmp_path / "models"):
        for name, gpu in (("auto", False), ("auto", True), ("x", True)):
            record.attempt(
                f"auto {name} {gpu}", lambda m=models_dir, n=name, g=gpu: choice.resolve_auto(n, models_dir=m, gpu=g)
            )
    (tmp_path / "models/Qwen3-TTS-12Hz-0.6B-CustomVoice/config.json").touch()
    record.attempt("auto", lambda: choice.resolve_auto("auto", models_dir=tmp_path / "models", gpu=True))
    (tmp_path / "cache").write_text("a file")
    record.attempt("no room", lambda: embedded.unpacked("embedded", tmp_path / "cache"))
    monkeypatch.delenv("TALKRAY_CACHE")
    monkeypatch.setattr(Path, "home", lambda: _raise(RuntimeError("no home")))
    record.attempt("no home", store.cache_directory)
    record.check("names")


def _raise(error: Exception) -> Any:
    raise error


def answered(status: int) -> OSError:
    error = OSError(f"status {status}\nand a page")
    error.response = SimpleNamespace(status_code=status)  # type: ignore[attr-defined]
    return error


def test_a_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    record = Record((re.escape(str(tmp_path)), "TMP"), (re.escape(constants.HF_HUB_CACHE), "CACHE"))
    whole = [TOP, "vocab.json", "merges.txt", "model.safetensors", CODEC, "speech_tokenizer/model.safetensors"]
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_tts"}')
    (tmp_path / "codec").write_text('{"model_type": "qwen3_tts_tokenizer_12hz"}')
    (tmp_path / "other").write_text('{"model_type": "bert"}')
    reset = ReadError("reset by peer.")
    cases: dict[str, dict[str, Any]] = {
        "whole": {}, "missing": {"names": whole[:3]}, "adapter": {"names": [store.ADAPTER]},
        "adapter beside": {"names": [*whole, store.ADAPTER]},
        "another family": {"top": "other"},
        "resets": {"resets": [reset] * 4}, "too many resets": {"resets": [reset] * 5},
        "corrupt": {"wrong": ["vocab.json", "x"]},
        "full": {"resets": [OSError(errno.ENOSPC, "full")]}, "quota": {"resets": [OSError(errno.EDQUOT, "full")]},
        "empty": {"resets": [OSError("")]},
        **{str(status): {"info": answered(status)} for status in (401, 403, 404, 500)},
    }  # fmt: skip
    monkeypatch.setattr(constants, "ENDPOINT", "https://hub")
    monkeypatch.setattr(hub.time, "sleep", record.fake("sleep"))
    for name, case in cases.items():
        record(f"-- {name}")
        resets = [*case.get("resets", [])]

        class Api:
            def model_info(self, name: str, case: dict[str, Any] = case) -> Any:
                files = [SimpleNamespace(rfilename=each) for each in case.get("names", whole)]
                return _raise(case["info"]) if "info" in case else SimpleNamespace(siblings=files, sha="5ha")

            def verify_repo_checksums(self, name: str, revision: str, case: dict[str, Any] = case) -> Any:
                record("verify", name, revision)
                for each in case.get("wrong", []):
                    (tmp_path / each).write_text("")
                told = {"algorithm": "sha256", "actual": "a1", "expected": "b2"}
                wrong = [{"path": each, **told} for each in case.get("wrong", [])]
                return SimpleNamespace(mismatches=wrong)

        def snapshot(name: str, tqdm_class: type, resets: list[Exception] = resets) -> str:
            record("snapshot", name, tqdm_class.__name__)
            return str(tmp_path) if not resets else _raise(resets.pop())

        def one(name: str, file: str, revision: str, top: str = case.get("top", "config.json")) -> str:
            record("one file", name, file, revision)
            return str(tmp_path / (top if file == "config.json" else "codec"))

        monkeypatch.setattr("huggingface_hub.HfApi", Api)
        monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
        monkeypatch.setattr("huggingface_hub.hf_hub_download", one)
        asked = "Qwen/Qwen3-TTS-12Hz-1.7B-Basic" if name in ("404", "full") else "someone/voice"
        record.attempt("download", lambda asked=asked: hub.download(asked, record.fake("report")))
        record("left", sorted(each.name for each in tmp_path.iterdir()))

    def opened(request: Any, timeout: float) -> Any:
        record("  asks", request.full_url, request.headers, timeout)
        kinds = {
            "no": HTTPError(request.full_url, 404, "Not Found", Message(), BytesIO()),
            "away": URLError("no route"),
        }
        name = request.full_url.rpartition("/")[2]
        return _raise(kinds[name]) if name in kinds else nullcontext()

    monkeypatch.setattr(hub.urllib.request, "urlopen", opened)
    asks = (("ok", None, False), ("ok", "hf_x", False), ("no", "", False), ("away", "", False), ("ok", None, True))
    for name, token, offline in asks:
        monkeypatch.setattr("huggingface_hub.get_token", lambda token=token: token)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
        record.attempt(f"ask {name}", partial(hub.ask_hub, name))
    record.check("hub")
