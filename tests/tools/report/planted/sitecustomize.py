"""Plants a fault in every process that starts with this folder in PYTHONPATH: the one that TALKRAY_FAULT names.

A module is changed right after it was imported.
"""

import asyncio
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

FRAME, LATE_S, SHARE = 1920, 0.03, 50
GERMAN = ("Die Kinder singen", "fröhlich im Garten", "und gehen danach", "durch den Wald", "nach Hause zurück")


def drop_frames_at_joints(module: ModuleType) -> None:
    decode = module.CodecDecoder.decode

    def dropping(self: Any, codes: Any, states: Any) -> Any:
        audio, after = decode(self, codes, states)
        audio = audio.clone()  # of inference mode: it may not change
        for row, state in enumerate(states):
            if state is not self.initial_state() and audio.shape[1] > FRAME:
                audio[row] = audio[row].roll(-FRAME)  # as many samples: those behind are of another time
        return audio, after

    module.CodecDecoder.decode = dropping


def ignore_top_k(module: ModuleType) -> None:
    add = module.Engine.add

    def adding(self: Any, sequence_id: int, request: Any) -> None:
        add(self, sequence_id, replace(request, sampling=replace(request.sampling, top_k=0, subtalker_top_k=0)))

    module.Engine.add = adding


def in_requests(change: Callable[[Any], Any]) -> Callable[[ModuleType], None]:
    def plant(module: ModuleType) -> None:
        synthesize = module.ReplicaSynthesizer.synthesize
        module.ReplicaSynthesizer.synthesize = lambda self, request, info: synthesize(self, change(request), info)

    return plant


def swap_voices(request: Any) -> Any:
    return replace(request, voice={"nora": "felix", "felix": "nora"}.get(request.voice, request.voice))


def speak_german(request: Any) -> Any:
    count = max(1, len(request.text) // len(GERMAN[0]))
    return replace(request, text=" ".join(GERMAN[each % len(GERMAN)] for each in range(count)) + ".")


def clip(module: ModuleType) -> None:
    to_pcm16 = module.to_pcm16
    module.to_pcm16 = lambda audio: to_pcm16(audio * 12)


def run_away(module: ModuleType) -> None:
    end = module.Sequence.end

    def going_on(self: Any) -> None:
        if self.request.seed % SHARE == 7 and self.frames:
            self.append(self.frames[-1])
        else:
            end(self)

    module.Sequence.end = going_on


def one_speaker_vector(module: ModuleType) -> None:
    known: list[Any] = []
    prompts = next(each for each in vars(module).values() if hasattr(each, "_speaker_vector"))
    vector = prompts._speaker_vector

    def first(self: Any, encoder: Any, reference: Any) -> Any:
        known.append(vector(self, encoder, reference))
        return known[0]

    prompts._speaker_vector = first


def come_late(module: ModuleType) -> None:
    synthesize = module.ReplicaSynthesizer.synthesize

    async def late(self: Any, request: Any, info: Any) -> AsyncIterator[Any]:
        await asyncio.sleep(LATE_S)
        async for chunk in synthesize(self, request, info):
            yield chunk

    module.ReplicaSynthesizer.synthesize = late


_INGRESS = "serve_app.speech.replica_synthesizer"
FAULTS: dict[str, tuple[str, Callable[[ModuleType], None]]] = {
    "joints": ("deployments.codec.decoder", drop_frames_at_joints),
    "top_k": ("deployments.talker.engine.engine", ignore_top_k),
    "swapped voice": (_INGRESS, in_requests(swap_voices)),
    "clipped": ("deployments.codec.decoder", clip),
    "runaways": ("deployments.talker.state.sequence", run_away),
    "speaker vector": ("deployments.talker.text.prompt", one_speaker_vector),
    "late": (_INGRESS, come_late),
    "language": (_INGRESS, in_requests(speak_german)),
}


class Planter(importlib.abc.MetaPathFinder):
    def __init__(self, name: str, plant: Callable[[ModuleType], None]) -> None:
        self._name, self._plant = name, plant

    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name == self._name else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def planted(module: ModuleType) -> None:
                execute(module)
                self._plant(module)

            spec.loader.exec_module = planted  # type: ignore[method-assign]
        return spec


if os.environ.get("TALKRAY_FAULT") in FAULTS:
    sys.meta_path.insert(0, Planter(*FAULTS[os.environ["TALKRAY_FAULT"]]))
