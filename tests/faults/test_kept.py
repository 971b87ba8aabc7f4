"""Two keys create, change and delete voices, consents and jobs while one kind of process is killed again and again.

`TALKRAY_KILLS` is how many kills of each kind; `TALKRAY_KILLED` is an expression for the kinds. Try a release with a
hundred kills of the ingress and of jobs, which write, and twenty of each other kind.
"""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.client import HTTPException
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from serve_app.cli.key_file import create_key
from serve_app.config import AccessSettings, AppConfig
from serve_app.extensions.voices.settings import VoiceSettings
from serve_app.extensions.voices.stored_voice import StoredVoice
from serve_app.extensions.voices.voice_store import VoiceStore
from tests.faults.hosts import Hosts, serving_on_hosts
from tests.faults.test_stored_voices import SEEN_S, held
from tests.serve_app.extensions.voices.speakers import wav
from tools.suites.pools import CODEC, ENGINE, TALKER, Service, config, serving, tiny_model
from tools.suites.raw import ask

KILLS = int(os.environ.get("TALKRAY_KILLS", "2"))
# How each kind is found among the processes, and the pool that is whole again before the next kill.
KINDS = {
    "ingress": ("Ingress", "Ingress"), "only ingress": ("Ingress", "Ingress"), "jobs": ("Jobs", "Jobs"),
    "talker": (TALKER, TALKER),
    "engine": (ENGINE, TALKER),
    "codec worker": ("deployments.codec.pool.worker_process", CODEC),
    "proxy": ("haproxy -db", "Ingress"), "raylet": ("", "Ingress"),
}  # fmt: skip
KILLED = [kind for kind in KINDS if re.search(os.environ.get("TALKRAY_KILLED", ""), kind)]
_BOUND_S = 240.0
_PAUSE_S = (0.2, 1.5)  # before the next kill, of a pool that is whole
VOICES, CONSENTS, JOBS = "/v1/audio/voices", "/v1/audio/voice_consents", "/v1/audio/jobs"


def num_replicas(kind: str) -> int:
    return 1 if kind in ("only ingress", "jobs") else 2


def app(kind: str, model: Path, store: str, keys: Path) -> AppConfig:
    pools = config(model)
    api = pools.api.model_copy(
        update={"voices": VoiceSettings(store=store), "access": AccessSettings(keys_file=keys), "page": False}
    )
    share = {"num_cpus": 0.3 if kind == "raylet" else 0.1}  # so that the head, with one core, has no room for all
    sized = {name: getattr(pools, name).model_copy(update=share) for name in ("talker_pool", "codec_pool")}
    ingress = pools.ingress_pool.model_copy(update={**share, "replicas": 1 if kind == "only ingress" else 2})
    workers = pools.codec.model_copy(update={"workers": 2})
    return pools.model_copy(update={"api": api, "codec": workers, "ingress_pool": ingress, **sized})


@dataclass(slots=True)
class Owner:
    """One key: what the server has confirmed to it."""

    url: str
    key: str
    place: VoiceStore
    there: dict[str, set[str]] = field(default_factory=dict)  # path: the descriptions that it may have; a job's voice
    gone: dict[str, float] = field(default_factory=dict)  # path: when its deletion was confirmed
    num_changed: int = 0
    versions: list[StoredVoice] = field(default_factory=list)  # of deleted voices
    faults: list[str] = field(default_factory=list)

    def ask(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> tuple[int, dict[str, object]]:
        """The status and the JSON of the answer; 0 where there is none."""
        address = urlsplit(self.url)
        headers = {"Authorization": f"Bearer {self.key}"} | ({"Content-Type": kind} if kind else {})
        where = {"host": address.hostname, "operation": f"{method} {path}", "headers": headers}
        try:
            status, _, told = ask(address.port or 80, body, **where)
            if status < 300:
                return status, json.loads(told)
            if status not in (404, 429, 503, 504):  # what the owner asks for is right, and may be asked again
                self.faults.append(f"{method} {path}: {status} {told[:300]!r}")
            return status, {}
        except (OSError, ValueError, HTTPException):  # refused, reset, or an answer that ends early
            return 0, {}

    def settled(self, method: str, path: str, wanted: tuple[int, ...], body: bytes | None = None) -> int:
        """The first wanted status, asked again and again."""
        until_s = time.monotonic() + _BOUND_S
        while (status := self.ask(method, path, body)[0]) not in wanted:
            if time.monotonic() > until_s:
                self.faults.append(f"{method} {path}: {status}, never one of {wanted}")
                return status
            time.sleep(0.2)
        return status

    def live(self, number: int) -> None:
        """One round: three things are created, one of them changed, and older ones deleted."""
        name = f"n{number}"
        recording = wav(number % 50)
        for path, files, more in ((CONSENTS, "recording", {"language": "en"}), (VOICES, "audio_sample", {})):
            status, told = self.ask("POST", path, *_form(files, recording, {"name": name, **more}))
            if status == 200:
                self.there[f"{path}/{told['id']}"] = {""}
        voices = [path for path in self.there if path.startswith(VOICES)]
        if voices:
            place, text = voices[-1], f"described {number}"
            self.there[place].add(text)
            body = json.dumps({"description": text}).encode()
            if self.ask("POST", place, body)[0] == 200:
                self.there[place] = {text}
                self.num_changed += 1
            inputs = [{"input": f"Part {part}."} for part in range(2)]
            job = {"inputs": inputs, "voice": place.rpartition("/")[2], "max_new_tokens": 2}
            status, told = self.ask("POST", JOBS, json.dumps(job).encode())
            if status in (200, 201):
                self.there[f"{JOBS}/{told['id']}"] = {place}
        for kind in (JOBS, VOICES, CONSENTS):
            for path in [each for each in self.there if each.startswith(kind)][:-3]:
                self.delete(path)

    def delete(self, path: str) -> None:
        del self.there[path]
        if path.startswith(VOICES):
            self.versions.append(self.record(path))
        status, _ = self.ask("DELETE", path)
        if status == 404:  # of the first attempt: a later one may follow a deletion whose answer was lost
            self.faults.append(f"{path} is lost before its deletion")
        elif status != 200:
            self.settled("DELETE", path, (200, 404))
        self.gone[path] = time.monotonic()

    def record(self, path: str) -> StoredVoice:
        record = self.place.read(f"voices/{path.rpartition('/')[2]}.json")
        assert isinstance(record, StoredVoice), f"{path} is lost in the store"
        return record

    @property
    def spoken(self) -> list[StoredVoice]:
        """Voices that are there and have spoken."""
        voices = {voice for path, (voice, *_) in self.there.items() if path.startswith(JOBS)}
        return [self.record(voice) for voice in voices & self.there.keys()]

    def check_gone(self) -> None:
        """What was deleted long enough ago has left nothing."""
        due = {path.rpartition("/")[2]: path for path, at_s in self.gone.items() if at_s < time.monotonic() - SEEN_S}
        for meta in self.place.listed("", unnamed=True):
            if path := next((path for each, path in due.items() if each in meta["path"]), ""):
                self.faults.append(f"{path} was deleted, and {meta['path']} is there")

    def check(self) -> None:
        """All that was confirmed is there as it was; nothing that was deleted has come back."""
        for path, texts in self.there.items():
            if self.settled("GET", path, (200, 404)) != 200:
                self.faults.append(f"{path} is lost")
            elif path.startswith(VOICES) and str(self.ask("GET", path)[1].get("description", "")) not in texts:
                self.faults.append(f"{path} has lost its change: none of {texts}")
        for path in self.gone:
            if self.settled("GET", path, (200, 404)) != 404:
                self.faults.append(f"{path} has returned")
        for path, (voice, *_) in [each for each in self.there.items() if each[0].startswith(JOBS)]:
            until_s = time.monotonic() + _BOUND_S
            while (state := self.ask("GET", path)[1].get("status")) not in ("completed", "failed"):
                if time.monotonic() > until_s:
                    break
                time.sleep(0.5)
            if state != "completed" and voice in self.there:
                self.faults.append(f"{path} is not completed: {state}")


def _form(files: str, recording: bytes, fields: dict[str, str]) -> tuple[bytes, str]:
    parts = [
        f'--x\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'.encode()
        for name, value in {**fields, "prepare": "none"}.items()
    ]
    head = f'--x\r\ncontent-disposition: form-data; name="{files}"; filename="a.wav"\r\n\r\n'.encode()
    return b"".join([*parts, head, recording, b"\r\n--x--\r\n"]), "multipart/form-data; boundary=x"


def kill_again_and_again(service: Service, kind: str, owners: list[Owner], *, kill: Callable[[], None]) -> None:
    """Each time once the pool is whole and both owners have deleted something more, which takes all kinds."""
    _, pool = KINDS[kind]
    for number in range(KILLS + 1):
        until_s, num_gone = time.monotonic() + _BOUND_S, [len(owner.gone) for owner in owners]
        service.wait_for(pool, num_replicas(kind))
        while any(len(owner.gone) == before for owner, before in zip(owners, num_gone, strict=True)):
            assert time.monotonic() < until_s, f"{kind}: no owner goes on after {number} kills"
            assert [fault for owner in owners for fault in owner.faults] == []
            time.sleep(0.1)
        if number < KILLS:
            time.sleep(random.uniform(*_PAUSE_S))
            kill()
            print(f"{time.strftime('%X')} {kind}: {number + 1} of {KILLS} killed", flush=True)


def live_while(loop: asyncio.Runner, owners: list[Owner], killing: Callable[[], None]) -> None:
    """Both keys create, change and delete until `killing` returns; then everything is looked at."""
    over = threading.Event()

    def work(owner: Owner) -> None:
        number = 0
        while not over.is_set():
            try:
                owner.live(number)
                owner.check_gone()
            except Exception as error:
                owner.faults.append(repr(error))
                raise
            number += 1

    threads = [threading.Thread(target=work, args=(owner,)) for owner in owners]
    for thread in threads:
        thread.start()
    try:
        killing()
    finally:
        over.set()
        for thread in threads:
            thread.join()
    for owner in owners:
        owner.check()
    time.sleep(SEEN_S)  # the bound that is promised
    versions = [version for owner in owners for version in owner.versions]
    for owner in owners:
        owner.check_gone()
    counts, spoken = (
        loop.run(held(*of, pools=("Talker", "Codec", "Jobs")))
        for of in (versions, [voice for owner in owners for voice in owner.spoken])
    )
    for owner in owners:
        print(f"{len(owner.there)} there, {owner.num_changed} times changed, {len(owner.gone)} gone")
    assert [fault for owner in owners for fault in owner.faults] == []
    assert [count for count in counts if any(map(sum, count.values()))] == []
    assert any(sum(count["Jobs"]) for count in spoken), "no replica holds any voice: the counts tell nothing"
    assert all(owner.there and owner.num_changed for owner in owners)


@contextlib.contextmanager
def served(kind: str, folder: Path, store: str) -> Iterator[tuple[Service, Callable[[], None]]]:
    """The application, and what kills one process of a kind."""
    settings = app(kind, tiny_model(folder / "base", "Base"), store, folder / "keys.json")
    if kind == "raylet":
        with serving_on_hosts(settings, hosts=1, cpus=4) as hosts:
            yield hosts.service, lambda: kill_raylet(hosts)
        return
    with serving(settings) as service:
        title, _ = KINDS[kind]

        def kill() -> None:
            found = service.processes(title) if title.isalpha() or title == ENGINE else service.processes_titled(title)
            service.kill(random.choice(found))

        yield service, kill


def kill_raylet(hosts: Hosts) -> None:
    """Of the second host, in whose place another one is."""
    [node] = hosts.nodes
    until_s = time.monotonic() + _BOUND_S
    while hosts.num_replicas(node) == 0:  # Ray notices late that the host before it is lost
        assert time.monotonic() < until_s, "there is nothing to lose"
        time.sleep(0.5)
    hosts.nodes.append(hosts.cluster.add_node(num_cpus=4))
    os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
    hosts.nodes.remove(node)
    hosts.cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """S3 as moto plays it: hosts share no folder."""
    import boto3
    from moto.moto_server.threaded_moto_server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    place = {"AWS_ENDPOINT_URL": f"http://{host}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1"}
    for name, value in {**place, "AWS_ACCESS_KEY_ID": "any", "AWS_SECRET_ACCESS_KEY": "any"}.items():
        monkeypatch.setenv(name, value)
    boto3.client("s3", endpoint_url=place["AWS_ENDPOINT_URL"], region_name="us-east-1").create_bucket(Bucket="voices")
    yield "s3://voices/of/talkray"
    server.stop()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("kind", KILLED)
def test_confirmed_stays_and_deleted_goes(tmp_path: Path, kind: str, request: pytest.FixtureRequest) -> None:
    store = request.getfixturevalue("bucket") if kind == "raylet" else str(tmp_path / "store")
    keys = [create_key(tmp_path / "keys.json", name) for name in ("ada", "eve")]
    with asyncio.Runner() as loop, served(kind, tmp_path, store) as (service, kill):
        owners = [Owner(service.url, key, VoiceStore(store)) for key in keys]
        live_while(loop, owners, lambda: kill_again_and_again(service, kind, owners, kill=kill))
