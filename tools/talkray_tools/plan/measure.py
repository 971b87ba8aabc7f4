"""`talkray plan --measure`: ramp up the load on a server on this machine for two minutes, and write a table."""

import asyncio
import contextlib
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType

from rich.console import Console

from deployments.errors import InvalidRequest, StartError
from loadtest.arrivals import SpeechLengths, Texts
from loadtest.measured import row
from loadtest.metrics import Limits
from loadtest.settings import Settings
from loadtest.sweep import Plan, Sweep, sweep
from loadtest.terminal import Screen
from loadtest.traces import TraceFolder
from serve_app.cli.main import ONE_GPU
from serve_app.cli.ray_settings import free_port
from serve_app.cli.say import first_voice
from serve_app.config import AppConfig
from serve_app.config_file import read_config
from serve_app.direct import open_direct
from serve_app.distribution import version
from talkray_tools.plan.tables import CPU, MeasuredTable

_RATES = Plan(first_rate=1.0, max_rate=512.0, factor=2.0, duration_s=10.0, settle_s=2.0, refinements=2, min_requests=5)
LOAD_PROCESSES = max(1, min(4, (os.cpu_count() or 1) // 4))  # load-test clients; enough not to limit the load
_START_S = 600
_STALL_S = 0.1


def gpu_names() -> list[str]:
    """Return the GPU names that the driver reports; empty without a driver."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    done = subprocess.run([program, "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    return [line.strip() for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []


def host_name(gpu: str) -> str:
    """Describe the host for a table: what kind of machine it is, not its host name."""
    cpu = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    return f"{'' if gpu == CPU else gpu + ', '}{os.cpu_count()} cores of {cpu}"


def commit() -> str:
    """Return the commit of the checkout, or the installed version outside a checkout."""
    root = Path(__file__).parents[3]
    with contextlib.suppress(OSError):
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
        )
        if done.returncode == 0:
            return done.stdout.strip()
    return f"of version {version()}"


def measure_table(
    file: Path, *, model: str, gpu: str, url: str | None, speech_s: float, p95_ms: float
) -> MeasuredTable:
    """Load the running server, or a server started for the measurement, and write the table.

    Raises `InvalidRequest` if the file exists, `StartError` if the server does not start, and `LoadTestError`.
    """
    if file.exists():
        raise InvalidRequest(f"--measure {file}: the file already exists. Pass it with --table, or name a new file")
    with contextlib.ExitStack() as stack:
        name = model if model == "embedded" else f"Qwen/Qwen3-TTS-12Hz-{model}"
        found = url or stack.enter_context(serving(name))
        scratch = stack.enter_context(tempfile.TemporaryDirectory())
        settings = Settings(
            url=found,
            texts=Texts.PARAGRAPHS,
            options={"model": "tts-1", "voice": first_voice(found)},
            lengths=SpeechLengths(speech_s, 0.35),
            warmup=3,
            limits=Limits(ttfb_s=2 * p95_ms / 1000, stall_s=_STALL_S),
            processes=LOAD_PROCESSES,
        )
        swept = asyncio.run(_sweep(settings, TraceFolder(Path(scratch) / "sweep")))
    table = table_of(swept, model=model, gpu=gpu, command="talkray plan --measure", note="")
    table.write(file)
    return table


def _usual_settings(gpu: str) -> AppConfig:
    """Return `talkray serve`'s default settings for this kind of machine."""
    return AppConfig() if gpu == CPU else read_config(ONE_GPU)


def table_of(swept: Sweep, *, model: str, gpu: str, command: str, note: str) -> MeasuredTable:
    """Build a table from the sweep of one replica, with this machine and commit. Raises `NoRunError`."""
    return MeasuredTable(
        model=model,
        gpu=gpu,
        cores=os.cpu_count() or 1,
        max_num_seqs=_usual_settings(gpu).talker.max_num_seqs,
        host=host_name(gpu),
        date=datetime.now(UTC).date().isoformat(),
        commit=commit(),
        command=command,
        weights="as served",
        note=note,
        rows=tuple(row(step) for step in swept.steps),
    )


async def _sweep(settings: Settings, folder: TraceFolder) -> Sweep:
    screen = Screen(Console(stderr=True))
    async with screen.shown():
        swept, is_complete = await sweep(settings, _RATES, folder=folder, show=screen.show, done=screen.done)
    if not is_complete:
        raise InvalidRequest("the measurement was interrupted, so there is no plan. Run the command again")
    return swept


@contextlib.contextmanager
def serving(model: str, variables: Mapping[str, str] = MappingProxyType({})) -> Iterator[str]:
    """Within this context, run `talkray serve` with these environment variables. Yield its URL. Raises `StartError`."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "-m", "serve_app", "serve", "--model", model, "--port", str(port), "--quiet"]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, **variables})
        try:
            _wait_ready(url, process)
            yield url
        except StartError as error:
            log.seek(0)
            raise StartError(f"{error}:\n{log.read()[-2000:]}") from error
        finally:
            process.terminate()
            process.wait()


def _wait_ready(url: str, process: "subprocess.Popen[bytes]") -> None:
    """Wait until the server is ready. Raises `StartError`."""
    ends_s = time.monotonic() + _START_S
    while time.monotonic() < ends_s and process.poll() is None:
        with contextlib.suppress(urllib.error.URLError, OSError), open_direct(f"{url}/ready", timeout_s=5):
            return
        time.sleep(0.5)
    raise StartError("the server for the measurement did not start")
