"""A stored voice outlives every process, speaks from any ingress replica, and leaves nothing behind once deleted."""

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from ray import serve

from deployments.serving.handles import call_all_replicas
from serve_app.cli.serve.local_server import APP_NAME
from serve_app.config import AdmissionSettings, ApiSettings, AppConfig, PoolConfig
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import StoredVoice
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.e2e.test_two_ingresses import http_ports
from tests.serve_app.extensions.voices.speakers import wav
from tools.experiments.faults.polite import difference
from tools.suites.pools import Service, config, serving, tiny_model
from tools.suites.raw import SPEECH, ask

BODY = {"input": "Hello there.", "response_format": "pcm", "seed": 7, "max_new_tokens": 12, "ignore_eos": True}
SEEN_S = 5.0  # a change, by every ingress replica


def app(tmp_path: Path) -> AppConfig:
    pools = config(tiny_model(tmp_path / "base", "Base"))
    patient = AdmissionSettings(max_line_s=100, max_wait_s=100, max_late_s=100)
    voices = VoiceSettings(store=str(tmp_path / "voices"))
    ingress = PoolConfig(replicas=2, num_cpus=0.1, max_queued_requests=256)
    api = ApiSettings.model_validate({"admission": patient, "voices": voices})
    return pools.model_copy(update={"api": api, "ingress_pool": ingress})


def ports(service: Service) -> list[int]:
    """Of both ingress replicas, without the proxy."""
    listening = [http_ports([process])[0] for process in service.processes("Ingress")]
    assert len(listening) == 2
    return listening


def said(port: int, operation: str, sent: Mapping[str, object] | bytes | None = None, **headers: str) -> bytes:
    status, _, content = ask(port, sent, operation=operation, headers=headers)
    assert status == 200, content
    return content


def store(port: int, name: str) -> str:
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{field}"\r\n\r\n{value}\r\n'.encode()
        for field, value in (("name", name), ("ref_text", "Some hiss."))
    ]
    head = b'--x\r\ncontent-disposition: form-data; name="audio_sample"; filename="a.wav"\r\n\r\n'
    content = b"".join([*parts, head, wav(), b"\r\n--x--\r\n"])
    kind = {"Content-Type": "multipart/form-data; boundary=x"}
    return str(json.loads(said(port, "POST /v1/audio/voices", content, **kind))["id"])


def speak(port: int, voice: str) -> bytes:
    return said(port, f"POST {SPEECH}", {**BODY, "voice": voice})


async def held(*voices: StoredVoice, pools: Sequence[str] = ("Talker", "Codec")) -> list[dict[str, list[int]]]:
    """How many vectors, codes and states of each voice the replicas of a pool have; afterwards they have none."""
    handles = {pool: serve.get_deployment_handle(pool, APP_NAME) for pool in pools}
    counts = [
        {pool: await call_all_replicas(handle, "forget", (voice.key_prefix,)) for pool, handle in handles.items()}
        for voice in voices
    ]
    for handle in handles.values():
        await handle.shutdown_async()  # while its loop runs
    return counts


def record(place: Path, voice_id: str) -> StoredVoice:
    voice = VoiceStore(str(place)).read(f"voices/{voice_id}.json")
    assert isinstance(voice, StoredVoice)
    return voice


def test_a_voice_that_stays_and_one_that_goes(tmp_path: Path) -> None:
    settings, place = app(tmp_path), tmp_path / "voices"
    with serving(settings) as service:
        one, other = ports(service)
        stays = store(one, "ada")
        first = speak(other, "ada")
        assert len(first) > 0
        for port in (one, other):
            assert [difference(speak(port, voice), first) for voice in ("ada", stays)] == [None, None]
        until_s = time.monotonic() + 30
        while not list(place.rglob("*.npz")):  # what was derived is stored behind the answer
            assert time.monotonic() < until_s
            time.sleep(0.1)
    with asyncio.Runner() as loop, serving(settings) as service:
        one, other = ports(service)
        assert {difference(speak(port, stays), first) for port in (one, other) for _ in range(4)} == {None}
        goes, probe = store(other, "eve"), store(other, "grace")
        for voice in (goes, probe):
            speak(one, voice)
        gone, there = record(place, goes), record(place, probe)
        said(one, f"DELETE /v1/audio/voices/{goes}")
        time.sleep(SEEN_S)  # the bound that is promised
        for port in (one, other):
            listed = json.loads(said(port, "GET /v1/audio/voices"))["voices"]
            assert [voice["id"] for voice in listed] == [stays, probe]
        of_gone, of_there = loop.run(held(gone, there))
        assert of_gone == {"Talker": [0, 0], "Codec": [0, 0]}
        assert all(sum(replicas) > 0 for replicas in of_there.values())  # so these counts tell something
        public = int(service.url.rpartition(":")[2])
        assert len(json.loads(said(public, "GET /v1/audio/voices"))["uploaded_voices"]) == 2
    assert {file.stem for file in (place / "voices").iterdir()} == {stays, probe}
