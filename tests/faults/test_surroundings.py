"""What a server may find around it: no home, IPv6, proxies and TLS in front, jumping clocks, full disks, many clients.

Real servers, by commands and sockets. Needs root, a C compiler and the openssl command.
"""

import base64
import io
import os
import resource
import shutil
import ssl
import struct
import subprocess
import tempfile
import time
import wave
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from websockets.sync.client import connect

from tests.e2e.black_box import HAPROXY, INGRESS, ServerCommand, as_user, create_key, refusal, serving
from tests.faults.front import certificate, tls_front
from tests.faults.test_hostile_clients import MIB, SHORT, resident
from tools.suites.pools import tiny_model
from tools.suites.raw import ask, connected

NOBODY = 54321  # no user of this machine has this number
PER_MINUTE = 20
CONFIG = """
api:
  admission:
    client_requests_per_minute: {per_minute}
    trusted_proxies: {trusted}
"""


def write_config(folder: Path, *, trusted: int, per_minute: int) -> Path:
    file = folder / "talkray.yaml"
    file.write_text(CONFIG.format(trusted=trusted, per_minute=per_minute))
    return file


def owned_folder(prefix: str) -> Path:
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir="/tmp"))
    os.chown(folder, NOBODY, NOBODY)
    return folder


@dataclass(frozen=True, slots=True)
class Public:
    """A server on every address, of a user without name and home, behind one proxy besides its own."""

    server: ServerCommand
    key: str
    pem: Path

    def ask(self, **where: str) -> int:
        headers = {"Authorization": f"Bearer {self.key}"}
        if forwarded := where.pop("forwarded", ""):
            headers["X-Forwarded-For"] = forwarded
        return ask(self.server.port, SHORT, headers=headers, **where)[0]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def public(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Public]:
    folder, own = tmp_path_factory.mktemp("public"), owned_folder("public")
    file = own / "keys.json"
    key = create_key(file, "ada")
    config = write_config(own, trusted=2, per_minute=PER_MINUTE)
    for each in (file, config):
        os.chown(each, NOBODY, NOBODY)
    options = ("--config", str(config), "--host", "::", "--keys", str(file))
    environment = {"HOME": None, "TALKRAY_CACHE": str(own / "cache")}
    with serving(folder, *options, through=as_user(NOBODY), environment=environment) as server:
        yield Public(server, key, certificate(folder))
    shutil.rmtree(own)


def test_nothing_of_it_needs_root(public: Public) -> None:
    statuses = [Path(f"/proc/{process}/status").read_text() for process in public.server.processes()]
    users = {int(status.partition("Uid:")[2].split()[0]) for status in statuses}
    assert users == {NOBODY}


def test_both_families_of_addresses_reach_it(public: Public) -> None:
    assert public.ask(host="127.0.0.1", source="127.0.0.21") == 200
    assert public.ask(host="::1", source="::1") == 200
    assert ask(public.server.port, SHORT, host="::1", source="::1")[0] == 401


def test_with_two_proxies_the_first_one_says_who_asks(public: Public) -> None:
    """What stands before its word was written by the client."""
    statuses = [public.ask(forwarded=f"10.9.9.{number}, 10.0.0.1") for number in range(PER_MINUTE + 5)]
    assert statuses[0] == 200
    assert 429 in statuses
    assert public.ask(forwarded="10.0.0.2") == 200


def test_tls_in_front(public: Public) -> None:
    """Speech and a WebSocket of the page's own origin, each client with its own allowance."""
    context = ssl.create_default_context(cafile=f"{public.pem}.crt")
    bearer = {"Authorization": f"Bearer {public.key}"}
    with tls_front(public.server.port, public.pem) as port:
        page = f"https://localhost:{port}"
        headers = {**bearer, "Origin": page}
        for source in ("127.0.0.71", "127.0.0.72"):
            for _ in range(3):
                assert ask(port, SHORT, host="localhost", source=source, headers=headers, tls=context)[0] == 200
        with connect(
            f"wss://localhost:{port}/v1/audio/speech/ws",
            ssl=context,
            origin=page,  # type: ignore[arg-type]
            additional_headers=bearer,
        ) as client:
            client.send('{"type": "speak", "input": "Hello.", "voice": "alloy", "max_new_tokens": 2}')
            assert '"started"' in str(client.recv(timeout=60))


IDLE = 3000
SILENT_S = 10.0  # for the head of a request


def test_thousands_of_idle_connections(public: Public) -> None:
    """Half of them say nothing, half have asked something and stay: others are spoken, and memory is bounded."""
    [proxy], [ingress] = public.server.find(HAPROXY), public.server.find(INGRESS)
    before = {process: resident(process) for process in (proxy, ingress)}
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        with ExitStack() as opened:
            for number in range(IDLE):
                source = f"127.0.0.{80 + number % 6}"
                raw = opened.enter_context(connected(public.server.port, source))
                if number % 2:
                    raw.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
                    assert raw.recv(4096).startswith(b"HTTP/1.1 200 ")
            assert public.ask(source="127.0.0.90", forwarded="10.0.0.9") == 200
            grown = {process: resident(process) - size for process, size in before.items()}
            assert max(grown.values()) < 200 * MIB, grown
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_who_says_nothing_is_closed(public: Public) -> None:
    with connected(public.server.port) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\n")
        assert raw.recv(4096).startswith(b"HTTP/1.1 408 ")


def test_without_proxies_in_front_nobody_is_believed(tmp_path: Path) -> None:
    """`trusted_proxies: 0`: what X-Forwarded-For says means nothing, and all clients share one allowance."""
    config = write_config(tmp_path, trusted=0, per_minute=6)
    with serving(tmp_path, "--config", str(config)) as server:
        sent = [{"X-Forwarded-For": f"10.0.0.{number}"} for number in range(12)]
        statuses = [ask(server.port, SHORT, source=f"127.0.0.{2 + n}", headers=each)[0] for n, each in enumerate(sent)]
    assert statuses[:6] == [200] * 6
    assert 429 in statuses


UPLOADS = 50
UPLOAD_S = 29.0


def recording(seconds: float) -> str:
    """A WAV file as a data URL: about the largest that is taken."""
    file = io.BytesIO()
    with wave.open(file, "wb") as audio:
        audio.setnchannels(1)
        audio.setsampwidth(2)
        audio.setframerate(170_000)
        audio.writeframes(b"\0\0\0\x20" * int(85_000 * seconds))  # two samples
    return "data:audio/wav;base64," + base64.b64encode(file.getvalue()).decode()


def status_of(asked: "Future[tuple[int, dict[str, str], bytes]]") -> int | str:
    """Who is refused in the middle of an upload may not come to read why."""
    try:
        return asked.result()[0]
    except ConnectionError:
        return "closed"


def test_fifty_uploads_at_once(tmp_path: Path) -> None:
    """Of ten megabytes each: spoken or told to come back, within bounded memory, and a probe is answered meanwhile."""
    model = tiny_model(tmp_path / "base", "Base")
    fields = {"input": "Hello.", "ref_audio": recording(UPLOAD_S), "ref_text": "Tone.", "max_new_tokens": 2}
    with serving(tmp_path, "--model", str(model)) as server, ThreadPoolExecutor(UPLOADS) as clients:
        [ingress] = server.find(INGRESS)
        before, most, spoken = resident(ingress), [0, 0], 0
        for turn in range(len(most)):
            asked = [clients.submit(ask, server.port, fields, source=f"127.0.0.{100 + n}") for n in range(UPLOADS)]
            while not all(each.done() for each in asked):
                assert server.get("/health") == 200
                most[turn] = max(most[turn], resident(ingress) - before)
                time.sleep(0.1)
            statuses = Counter(status_of(each) for each in asked)
            print(f"{UPLOADS} uploads: {statuses}, {most[turn] / MIB:.0f} MiB at most in the ingress")
            assert set(statuses) <= {200, 429, "closed"}
            spoken += statuses[200]
            assert most[turn] < 400 * MIB
        assert spoken >= 12  # all come at once: whoever has waited for five seconds is told to come back
        assert ask(server.port, fields, source="127.0.0.99")[0] == 200


JUMPS = {"a day ahead": 86400, "a day back": -86400, "an hour back": -3600, "right": 0}


def test_the_clock_jumps(tmp_path: Path) -> None:
    """Streams go on, requests are spoken, it stays ready."""
    library, clock = tmp_path / "clock.so", tmp_path / "clock"
    source = Path(__file__).with_name("jumping_clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", str(library), str(source), "-ldl"], check=True)
    clock.write_bytes(struct.pack("l", 0))
    environment = {"LD_PRELOAD": str(library), "CLOCK_JUMP": str(clock)}
    with serving(tmp_path, environment=environment) as server, clock.open("r+b", buffering=0) as file:
        for ahead_s in JUMPS.values():
            with server.speaking() as heard:
                file.seek(0)
                file.write(struct.pack("l", ahead_s))
                until_s = time.monotonic() + 6
                while time.monotonic() < until_s:
                    assert heard.read1(65536)
            for _ in range(5):
                assert (server.speak(), server.get("/ready")) == (200, 200)
                time.sleep(1)


@contextmanager
def small_disk(size_mib: int, *, name: str = "") -> Iterator[Path]:
    """A file system of its own; its path is short enough for sockets below it."""
    folder = Path(f"/tmp/{name or os.getpid() % 10000:04}")
    folder.mkdir(mode=0o700)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size_mib}m,mode=700", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


def fill(folder: Path) -> None:
    with (folder / "fill").open("ab", buffering=0) as file:
        try:
            while file.write(bytes(4096)):
                pass
        except OSError:
            return


def test_its_disk_becomes_full(tmp_path: Path) -> None:
    """The one with its output, Ray's logs and its sockets: it speaks on, replaces what dies, and ends as ever."""
    with small_disk(512) as disk, serving(disk, environment={"RAY_TMPDIR": str(disk)}) as server:
        assert server.speak() == 200
        fill(disk)
        for _ in range(15):
            assert (server.speak(), server.get("/ready")) == (200, 200)
            time.sleep(1)
        (disk / "fill").unlink()
        assert server.speak(voice="nobody") == 400
        until_s = time.monotonic() + 30
        while "voice_not_found" not in server.output:  # it prints again
            assert time.monotonic() < until_s, server.output
            time.sleep(0.5)
        fill(disk)
        server.signal_process(15)
        server.leaves_nothing()
        assert server.wait(1) == 0


def test_a_disk_without_room_is_told_before_the_start() -> None:
    with small_disk(8) as disk:
        assert "RAY_TMPDIR" in refusal(environment={"RAY_TMPDIR": str(disk)})
        assert "TALKRAY_CACHE" in refusal(environment={"TALKRAY_CACHE": str(disk)})
        assert list(disk.iterdir()) == []
