"""What lines, stages, usage and spans of requests cost: one server, in which a switch turns all of them on and off.
`python -m tools.experiments.cost_of_records --seconds 150`.

A block has three turns of requests in random order: with all records, with none, and with none once more. The same
seeds are asked for in each turn. A turn counts as the median of its times to the first byte of the body, as the
processor time of the ingress for one of its requests, and as that of the thread that keeps the records. Printed are the
medians of two differences of the turns of a block, each with an interval of 95 %: all minus none is the cost, none
minus none is what this program finds where there is nothing to find. The processor time has what is done behind the
answer too. Other programs on the machine blur it less, and least that of the one thread; only the first byte decides
whether the cost is proven.

`--in-process` measures the application alone: no Ray, a synthesizer that answers at once, cold caches. There the first
byte takes 2 ms instead of 50 to 150, so that tenths of one show.
"""

import argparse
import asyncio
import http.client
import http.server
import json
import mmap
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from unittest import mock
from urllib.parse import urlsplit

from serve_app.cli import ray_settings

ray_settings.apply_local()

import numpy as np
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Scope

from serve_app import ingress
from serve_app.api import speech_service
from serve_app.api.records.record_keeper import HAND_ON_S, RecordKeeper, RecordSink, RequestLines
from serve_app.api.records.request_record import RequestRecord, start_marks
from serve_app.api.records.tracing import RequestSpans, otlp_exporter
from serve_app.api.records.usage_counts import UsageBook
from serve_app.cli.serve.run_folder import RunFolder
from serve_app.config import ApiSettings, AppConfig, RecordSettings, read_config
from serve_app.ingress import Ingress
from serve_app.replica_synthesizer import Deployed
from serve_app.voices.voice_store import VoiceStore
from tests.e2e.application import running
from tests.serve_app.fake import FakeSynthesizer, utterance
from tests.serve_app.one_model import one_api

LIMIT_MS = 0.2
_ALL, _NONE, _NULL = "all", "none", "null"
_TEXT = "Hi."
_FRAMES = 4  # the first byte is all that is timed
_RESAMPLES = 2000
_INGRESS = b":Ingress"
_SETTLED_S = HAND_ON_S + 0.1
_MEMORY = np.zeros(64 << 20, np.uint8)  # more than a cache holds
_SWITCH = "TALKRAY_COST_OF_RECORDS"


class Switch:
    """A byte that all processes of this machine see at once; behind it the number of records that were kept, and of the
    thread that keeps them.
    """

    NUM_BYTES = 24

    def __init__(self, file: Path) -> None:
        with file.open("r+b") as opened:
            self._bytes = mmap.mmap(opened.fileno(), self.NUM_BYTES)

    @property
    def is_on(self) -> bool:
        return self._bytes[0] == 1

    def turn(self, *, on: bool) -> None:
        self._bytes[0] = int(on)

    @property
    def num_kept(self) -> int:
        return int.from_bytes(self._bytes[8:16], "little")

    def count(self) -> None:
        """For the one process that keeps records."""
        self._bytes[8:16] = (self.num_kept + 1).to_bytes(8, "little")

    @property
    def thread(self) -> int:
        return int.from_bytes(self._bytes[16:], "little")

    def name_thread(self, number: int) -> None:
        self._bytes[16:] = number.to_bytes(8, "little")


class SwitchedKeeper(RecordKeeper):
    """Keeps the records of requests that end while the switch is on."""

    def __init__(self, switch: Switch, sinks: Sequence[RecordSink]) -> None:
        super().__init__(sinks)
        self._switch = switch
        assert self._thread.native_id is not None
        switch.name_thread(self._thread.native_id)

    def keep(self, record: RequestRecord) -> None:
        if self._switch.is_on:
            super().keep(record)
            self._switch.count()


def switch_stages(switch: Switch) -> None:
    """From now on this process records stages while the switch is on."""
    speech_service.start_marks = lambda utterance, received_ns: (
        start_marks(utterance, received_ns) if switch.is_on else utterance
    )


class SwitchedIngress(Ingress):
    """Reads the switch for each request."""

    def __init__(self, settings: ApiSettings, models: Sequence[Deployed], jobs: DeploymentHandle) -> None:
        switch = Switch(Path(os.environ[_SWITCH]))
        switch_stages(switch)
        with mock.patch.object(ingress, "RecordKeeper", partial(SwitchedKeeper, switch)):
            super().__init__(settings, models, jobs)


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes spans and forgets them."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextmanager
def collecting() -> Iterator[str]:
    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def first_byte_ms(connection: http.client.HTTPConnection, seed: int) -> float:
    fields = {"model": "tts-1", "input": _TEXT, "voice": "alloy", "response_format": "pcm", "seed": seed}
    body = {**fields, "max_new_tokens": _FRAMES}
    began_s = time.perf_counter()
    connection.request("POST", "/v1/audio/speech", json.dumps(body), {"Content-Type": "application/json"})
    answer = connection.getresponse()
    first = answer.read(1)
    took_ms = (time.perf_counter() - began_s) * 1e3
    rest = answer.read()
    if answer.status != 200 or not first:
        raise SystemExit(f"a request was answered with {answer.status}: {(first + rest)[:200]!r}")
    return took_ms


class ProcessorTime:
    """Of the ingress of the server that this process runs. The others only note the time with a chunk."""

    def __init__(self, switch: Switch) -> None:
        self._switch = switch
        folder = RunFolder(Path(os.environ["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"]).parent)
        processes = [Path(f"/proc/{number}") for number in folder.processes()]
        self._processes = [each for each in processes if _INGRESS in (each / "cmdline").read_bytes()]

    def ms(self) -> tuple[float, float]:
        """Of all its threads, and of the one that keeps records."""
        tasks = (task for process in self._processes for task in process.glob("task/*/schedstat"))
        used_ms = {int(task.parent.name): int(task.read_text().split()[0]) / 1e6 for task in tasks}
        return sum(used_ms.values()), used_ms[self._switch.thread]


def first_byte_in_process_ms(api: ASGIApp, runner: asyncio.Runner, seed: int) -> float:
    """Of one request, behind memory that was written so that no cache has what it needs."""
    fields = {"model": "tts-1", "input": _TEXT, "voice": "ryan", "response_format": "pcm", "seed": seed}
    coming = [{"type": "http.request", "body": json.dumps(fields).encode(), "more_body": False}]
    first_s: list[float] = []

    async def receive() -> Message:
        if not coming:
            await asyncio.Event().wait()
        return coming.pop()

    async def send(message: Message) -> None:
        if message.get("body") and not first_s:
            first_s.append(time.perf_counter())

    _MEMORY.__iadd__(1)
    scope: Scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/audio/speech",
        "raw_path": b"/v1/audio/speech",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("127.0.0.1", 1),
    }
    began_s = 0.0

    async def ask() -> None:
        nonlocal began_s
        began_s = time.perf_counter()
        await api(scope, receive, send)

    runner.run(ask())
    return (first_s[0] - began_s) * 1e3


def in_process(options: argparse.Namespace, collector: str | None) -> list[dict[str, float]]:
    """The medians of all turns, by block."""
    blocks = []
    settings = RecordSettings(traces=collector)
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as runner:
        file = Path(folder) / "switch"
        file.write_bytes(bytes(Switch.NUM_BYTES))
        switch, store = Switch(file), VoiceStore(folder)
        sinks: list[RecordSink] = [RequestLines(Path(folder), "replica"), UsageBook(store, time.time)]
        if collector is not None:
            sinks.append(RequestSpans(otlp_exporter(collector), settings.trace_share, replica="replica"))
        keeper = SwitchedKeeper(switch, sinks)
        switch_stages(switch)
        api = one_api(FakeSynthesizer(script=utterance(_FRAMES)), ApiSettings(), keep=keeper.keep)
        until_s = time.monotonic() + options.seconds
        while time.monotonic() < until_s:
            taken = {}
            for turn in random.sample((_ALL, _NONE, _NULL), 3):
                switch.turn(on=turn == _ALL)
                first_ms = [first_byte_in_process_ms(api, runner, seed) for seed in range(options.turn)]
                taken[turn] = statistics.median(first_ms)
                time.sleep(_SETTLED_S)
            blocks.append(taken)
        check_kept(switch.num_kept, len(blocks) * options.turn)
        keeper.close()
    return blocks


def turn_ms(
    connection: http.client.HTTPConnection, switch: Switch, turn: str, seeds: Sequence[int], used: ProcessorTime
) -> tuple[float, float, float]:
    """The median to the first byte, behind a request that is not counted, and what a request used of the processor:
    of the ingress, of its thread that keeps records.
    """
    switch.turn(on=turn == _ALL)
    before = used.ms()
    first_byte_ms(connection, seeds[0])
    typical_ms = statistics.median(first_byte_ms(connection, seed) for seed in seeds)
    time.sleep(_SETTLED_S)  # the records of the turn are where they belong
    whole_ms, thread_ms = (
        (after_ms - before_ms) / (1 + len(seeds)) for after_ms, before_ms in zip(used.ms(), before, strict=True)
    )
    return typical_ms, whole_ms, thread_ms


def check_kept(num_kept: int, num_with_all: int) -> None:
    """Raises SystemExit where the ingress did not follow the switch: nothing would have been compared."""
    if num_kept != num_with_all:
        raise SystemExit(f"the ingress kept {num_kept} records of {num_with_all} requests of the turns with all")


def interval(differences: Sequence[float]) -> tuple[float, float]:
    """Of the median, by resampling."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(differences, k=len(differences))) for _ in range(_RESAMPLES))
    return medians[_RESAMPLES // 40], medians[-_RESAMPLES // 40]


def verdict(blocks: Sequence[dict[str, float]], what: str = "to the first byte") -> tuple[list[str], bool]:
    """What the turns of all blocks say, in lines; whether the cost is proven to be under LIMIT_MS."""
    typical = {name: statistics.median(each[name] for each in blocks) for name in (_ALL, _NONE, _NULL)}
    lines = [f"{what}, {name}: {took_ms:.2f} ms" for name, took_ms in typical.items()]
    bounds = {}
    for name in (_ALL, _NULL):
        differences = [each[name] - each[_NONE] for each in blocks]
        bounds[name] = low, high = interval(differences)
        middle = statistics.median(differences)
        lines.append(f"{name} minus none, {len(blocks)} blocks: {middle:+.3f} ms ({low:+.3f} to {high:+.3f})")
    is_fair = bounds[_NULL][0] <= 0 <= bounds[_NULL][1]
    is_proven = is_fair and bounds[_ALL][1] < LIMIT_MS
    if not is_fair:
        lines.append("not comparable: the two turns with none differ")
    lines.append(f"{'proven' if is_proven else 'NOT proven'} to be under {LIMIT_MS:g} ms")
    return lines, is_proven


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150, help="of measurement, without the start")
    parser.add_argument("--turn", type=int, default=8, help="requests of a turn")
    parser.add_argument("--config", type=Path, help="a Serve config file; without: a CPU")
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--without-spans", action="store_true", help="the extra `tracing` is not installed")
    parser.add_argument("--in-process", action="store_true", help="no server")
    options = parser.parse_args()
    with ExitStack() as stack:
        collector = None if options.without_spans else stack.enter_context(collecting())
        if options.in_process:
            lines, is_proven = verdict(in_process(options, collector))
            print("\n".join(lines))
            return 0 if is_proven else 1
        config = AppConfig() if options.config is None else read_config(options.config)
        api = config.api.model_copy(update={"records": RecordSettings(traces=collector)})
        one = config.ingress_pool.model_copy(update={"replicas": 1})  # all turns are one process's
        config = config.model_copy(update={"model": options.model, "api": api, "ingress_pool": one})
        file = Path(stack.enter_context(tempfile.TemporaryDirectory())) / "switch"
        file.write_bytes(bytes(Switch.NUM_BYTES))
        switch = Switch(file)
        stack.enter_context(mock.patch.dict(os.environ, {_SWITCH: str(file)}))
        stack.enter_context(mock.patch("serve_app.app.Ingress", SwitchedIngress))
        url = urlsplit(stack.enter_context(running(config)))
        connection = http.client.HTTPConnection(url.hostname or "", url.port)
        draw, used = random.Random(0), ProcessorTime(switch)
        waits, works, keeps = list[dict[str, float]](), list[dict[str, float]](), list[dict[str, float]]()
        for seed in range(20):
            first_byte_ms(connection, seed)
        until_s = time.monotonic() + options.seconds
        while time.monotonic() < until_s:
            seeds = [draw.randrange(1 << 31) for _ in range(options.turn)]
            order = draw.sample((_ALL, _NONE, _NULL), 3)
            taken = {turn: turn_ms(connection, switch, turn, seeds, used) for turn in order}
            for place, blocks in enumerate((waits, works, keeps)):
                blocks.append({turn: taken[turn][place] for turn in (_ALL, _NONE, _NULL)})
        check_kept(switch.num_kept, len(waits) * (options.turn + 1))
    lines, is_proven = verdict(waits)
    kept_lines, _ = verdict(keeps, "processor time of the thread that keeps records")
    print("\n".join((*kept_lines, *verdict(works, "processor time of a request")[0], *lines)))
    return 0 if is_proven else 1


if __name__ == "__main__":
    sys.exit(main())
