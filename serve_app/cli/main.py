"""`talkray` command line interface."""

import asyncio
import contextlib
import errno
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import Annotated, Self, TextIO
from urllib.parse import urlsplit

import typer
from pydantic import ValidationError
from rich.console import Console

from deployments.embedded_voice.checkpoint import EMBEDDED, PACKED
from deployments.errors import InvalidRequest, StartError, TalkrayError
from deployments.gpu.card import count_gpus
from deployments.weights.choice import resolve_auto
from deployments.weights.store import find, locate
from loadtest.command_app import CommandApp
from serve_app.api.access.keys import read_keys
from serve_app.api.request_record import Entry
from serve_app.cli import ray_settings
from serve_app.cli.doctor import examine, for_this_card, predict_memory
from serve_app.cli.key_commands import keys
from serve_app.cli.ray_settings import free_port
from serve_app.cli.say import (
    STANDARD_OUTPUT,
    SayRequest,
    announced,
    find_server,
    free_name,
    play_speech,
    running_server,
    show_text,
    write_speech,
)
from serve_app.cli.serve import request_log
from serve_app.cli.serve.local_server import Address, check_port, curl_command, first_page
from serve_app.cli.serve.run_folder import clear_dead
from serve_app.cli.serve.supervisor import running
from serve_app.cli.upgrade_check import upgrade_changes
from serve_app.config import AccessSettings, AppConfig, ConfigError
from serve_app.config_file import explain, read_config
from serve_app.distribution import pip_install, version
from serve_app.extensions import COMMANDS, command_group


class ProgressLine:
    """Progress display: one changing line with a spinner on a terminal, or one line per stage elsewhere."""

    def __init__(self, file: TextIO) -> None:
        self._console = Console(file=file, highlight=False)
        self._status = self._console.status("starting")
        self._started_s = time.monotonic()

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._status.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._status.stop()

    def report(self, stage: str) -> None:
        if self._console.is_terminal:
            self._status.update(stage)
            self._status.start()
        else:
            with contextlib.suppress(OSError):  # a full disk must not stop the server
                self._console.print(f"[{self._elapsed()}] {stage}", markup=False, soft_wrap=True)

    def done(self, message: str) -> None:
        self._status.stop()
        self._console.print(f"{message} (after {self._elapsed()})", markup=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return f"{time.monotonic() - self._started_s:.1f} s"


RUN, SPEAK, VOICES, MEASURE, OPERATE = PANELS = ("Run", "Speak", "Voices", "Measure", "Operate")
cli = CommandApp("Qwen3-TTS on Ray Serve.", panels=PANELS)


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"talkray {version()}")
        raise typer.Exit


@cli.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Qwen3-TTS on Ray Serve."""


# Settings for machines with a GPU. cluster/serve has a copy, which `make cluster-check` compares.
ONE_GPU = Path(__file__).with_name("one-gpu.yaml")

Config = Annotated[Path | None, typer.Option("--config", help="A Serve config file such as cluster/serve/local.yaml.")]
_MODEL_HELP = "auto, embedded, a checkpoint directory or a Hugging Face name. Repeatable."
Model = Annotated[list[str] | None, typer.Option("--model", help=_MODEL_HELP)]


@cli.command(rich_help_panel=RUN)
def serve(
    config: Config = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    keys_file: Annotated[Path | None, typer.Option("--keys", help="Require API keys (`talkray key`).")] = None,
    allow_origin: Annotated[
        list[str] | None,
        typer.Option(help="Origin of a web page that may use the API, such as https://app.example.com. Repeatable."),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="Do not print requests.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print requests as JSON, the rest to stderr.")] = False,
) -> None:
    """Start a server on this machine. It runs until Ctrl-C and prints a line for each request."""
    report = sys.stderr if as_json else sys.stdout
    settings = _with_access(_settings(config, model, file=report), keys_file, allow_origin or [])
    address = Address(host.strip("[]"), port)
    clear_dead(partial(print, file=report))  # processes left by a dead server may hold the port
    _check(settings, address)
    with ExitStack() as stack:
        as_text: Callable[[Entry], str] = json.dumps if as_json else request_log.line
        show = None if quiet else lambda entry: print(as_text(entry), flush=True)
        progress = stack.enter_context(ProgressLine(report))
        for single in settings.by_model().values():
            _fetch(single.model, progress)
        if config is None and (fitted := for_this_card(settings, address)) != settings:
            settings = fitted
            talker = fitted.talker
            audio = "; CPUs decode the audio" if settings.codec.placement == "pool" else ""
            progress.done(f"this GPU can hold {talker.max_num_seqs} rows of {talker.max_model_len} positions{audio}")
        server = stack.enter_context(running(settings, address, progress.report, show=show))
        keyed = settings.api.access.keys_file is not None
        stack.enter_context(_found_by_say(server.url, keyed=keyed, file=report))
        progress.done(f"ready: open {first_page(server.url)} in a browser")
        if settings.model == EMBEDDED:
            print("This is the small English demo voice. Use --model to load a better model.", file=report)
        curl = curl_command(server.url, with_key=keyed)
        print(f"\nTry it:\n  {curl}\n\nPress Ctrl-C to stop.", file=report, flush=True)
        server.wait()


@cli.command(rich_help_panel=SPEAK)
def say(
    text: Annotated[str, typer.Argument(help="Text to synthesize. - reads standard input.")],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Audio file, replaced if it exists. Its extension sets the format. - writes WAV to standard output.",
        ),
    ] = None,
    play: Annotated[bool, typer.Option("--play", help="Play the speech instead of writing a file.")] = False,
    show: Annotated[bool, typer.Option("--show", help="Print the spoken text, without synthesis.")] = False,
    url: Annotated[str | None, typer.Option(help="Server URL. Default: your newest server, or a new one.")] = None,
    voice: Annotated[str | None, typer.Option(help="Voice, from /v1/audio/voices.")] = None,
    speed: Annotated[float, typer.Option(help="Speaking rate.", min=0.25, max=4)] = 1.0,
    instructions: Annotated[str | None, typer.Option(help="Style instructions, if the model supports them.")] = None,
    model: Annotated[str | None, typer.Option(help="Start a server with this model.")] = None,
) -> None:
    """Synthesize a text to a new file (speech.wav, speech-2.wav, ...) or to --output, or play it."""
    if sum((play, show, output is not None)) > 1:
        raise InvalidRequest("--play, --show and --output cannot be combined")
    if url is not None and model is not None:
        raise InvalidRequest("--url and --model cannot be combined, because a running server already has a model")
    spoken = sys.stdin.read() if text == "-" else text
    utterance = SayRequest(spoken, voice, speed=speed, instructions=instructions)
    file = output or free_name(Path("speech.wav"))
    speak = partial(play_speech, utterance=utterance) if play else partial(write_speech, utterance=utterance, file=file)
    if show:
        speak = partial(show_text, utterance=utterance)
    report = sys.stderr if output == STANDARD_OUTPUT else sys.stdout
    if url is not None:
        print(speak(url), file=report)
    elif model is None and (server_here := find_server()):
        print(f"{speak(server_here)}, spoken by {server_here}", file=report)
    else:
        settings = _settings(None, [model] if model else None, file=report)
        address = Address("127.0.0.1", free_port())
        _check(settings, address)
        with ProgressLine(report) as progress:
            _fetch(settings.model, progress)
            with running(for_this_card(settings, address), address, progress.report) as server:
                progress.report("speaking")
                remark = speak(server.url)
            progress.done(remark)


@cli.command("check-client", rich_help_panel=RUN)
def check_client(
    url: Annotated[str | None, typer.Argument(help="Server URL. Default: your newest server.")] = None,
) -> None:
    """Test a server with requests in other services' formats, and print the configuration for each client.

    Set TALKRAY_API_KEY if the server requires an API key.
    """
    from serve_app.cli.check_client import check  # imports all dialects, which takes a second

    server = running_server(url)

    async def ask() -> bool:
        all_ok = True
        async for tried in check(server, key=os.environ.get("TALKRAY_API_KEY")):
            print(*tried.lines(), sep="\n", flush=True)
            all_ok = all_ok and tried.problem is None
        return all_ok

    raise typer.Exit(code=not asyncio.run(ask()))


@cli.command(rich_help_panel=RUN)
def wyoming(
    url: Annotated[str | None, typer.Argument(help="Server URL. Default: your newest server.")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 10200,
) -> None:
    """Offer Home Assistant's Wyoming protocol in front of a running server, until Ctrl-C.

    Set TALKRAY_API_KEY if the server requires an API key. Wyoming does not support keys, so every host that reaches the
    port can use the server.
    """
    try:
        serve_wyoming = import_module("talkray_tools.wyoming").serve
    except ModuleNotFoundError as error:
        raise StartError(f"the wyoming package is missing: {pip_install('wyoming')}") from error
    server = running_server(url)
    print(f"wyoming://{host}:{port} forwards to {server}. Press Ctrl-C to stop.", flush=True)
    with suppress(KeyboardInterrupt):
        asyncio.run(serve_wyoming(server, host=host, port=port, key=os.environ.get("TALKRAY_API_KEY")))


@cli.command(rich_help_panel=RUN)
def doctor(
    config: Config = None,
    model: Model = None,
    port: Annotated[int | None, typer.Option(help="Port. Default: port of your newest server, or 8000.")] = None,
) -> None:
    """Check Python, Ray, torch, GPU, attention, weights and ports."""
    all_ok = True
    settings = _settings(config, model)
    running_here = urlsplit(find_server() or "") if port is None else urlsplit("")
    address = Address(running_here.hostname or "127.0.0.1", port or running_here.port or 8000)
    for finding in chain(examine(settings, address), predict_memory(settings, address, follows_card=config is None)):
        print(finding.line(), flush=True)
        all_ok = all_ok and finding.ok
    raise typer.Exit(code=not all_ok)


@cli.command("upgrade-check", rich_help_panel=OPERATE)
def upgrade_check(old: Path, new: Path) -> None:
    """List the pools whose replicas `serve deploy NEW` replaces while OLD runs, for each changed setting.

    The exit status is 1 if a file is invalid, and otherwise 0, even if a line warns against the change. The command
    knows the settings of its own version, so run the version that serves NEW.
    """
    changes = upgrade_changes(old, new)
    print("\n".join(change.line() for change in changes) or "no settings differ, so no replicas are replaced")


@cli.command(rich_help_panel=OPERATE)
def env() -> None:
    """Print the Ray settings as `export` lines, for nodes that you start by hand.

    Run this command on each node, because the number of connections depends on the node's limit of open files.
    """
    for name, value in ray_settings.for_a_node().items():
        print(f"export {name}={shlex.quote(value)}")


cli.add_typer(keys, name="key", rich_help_panel=OPERATE)
bench = CommandApp("Measure one part of Talkray, without Ray and HTTP.")
cli.add_typer(bench, name="bench", rich_help_panel=MEASURE)

# Commands in separate modules, which parse their own arguments. Commands without a panel belong to `bench`.
_MODULES = {
    "random-checkpoint": (MEASURE, "talkray_tools.random_checkpoint", "Write a checkpoint with random weights."),
    "verify": (MEASURE, "talkray_tools.verify", "Verify a checkpoint on this machine."),
    "usage": (OPERATE, "talkray_tools.usage", "Report usage by key, voice or model."),
    "logs": (OPERATE, "talkray_tools.logs", "Show the stages and replicas of a request."),
    "book": (SPEAK, "talkray_tools.book", "Make an audiobook from an EPUB, subtitles, Markdown or text."),
    "dataset": (SPEAK, "talkray_tools.dataset", "Synthesize the lines of a JSONL file."),
    "loadtest": (MEASURE, "loadtest", "Load-test a server."),
    "report": (MEASURE, "talkray_tools.report", "Report whether to serve a checkpoint."),
    "plan": (OPERATE, "talkray_tools.plan", "Compute nodes, cost and a configuration for a load."),
    "engine": ("", "talkray_tools.bench_engine", "Measure step time, prefill, memory and start-up."),
    "codec": ("", "talkray_tools.bench_codec", "Measure decode calls, on a CPU or a GPU."),
    "encoders": ("", "talkray_tools.bench_encoders", "Measure the cost of each audio format."),
}
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


def _run_module(context: typer.Context) -> None:
    """Run a module in another process, because the command line itself does not import torch."""
    _, module, _ = _MODULES[str(context.info_name)]
    typed = "talkray" if shutil.which("talkray") == sys.argv[0] else shlex.quote(sys.argv[0])
    known = {"TALKRAY_TYPED": f"{typed} {context.info_name}"} if Path(sys.argv[0]).name == "talkray" else {}
    sys.exit(subprocess.call([sys.executable, "-m", module, *context.args], env=os.environ | known))


def _run_group(context: typer.Context) -> None:
    """Run a command provided by an extension."""
    command_group(str(context.info_name))(args=context.args, prog_name=context.command_path)


for _name in COMMANDS:
    cli.command(_name, context_settings=_PASS_ON, help=COMMANDS[_name][0], rich_help_panel=VOICES)(_run_group)
for _name, (_panel, _, _help) in _MODULES.items():
    _group = cli if _panel else bench
    _group.command(_name, context_settings=_PASS_ON, help=_help, rich_help_panel=_panel or None)(_run_module)


def main() -> None:
    """Run the command line. Talkray's own errors print a message instead of a traceback."""
    try:
        cli()
    except TalkrayError as error:
        sys.exit(f"talkray: {error}")
    except OSError as error:
        if error.errno not in _NO_ROOM:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # discards buffered output
        sys.exit(f"talkray: cannot write to {error.filename or 'standard output'}: {error.strerror}")


_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


def _settings(config: Path | None, models: list[str] | None, file: TextIO | None = None) -> AppConfig:
    """Read the settings from the command's file or the defaults for this machine, and apply the command's models."""
    gpus = count_gpus()
    config = config or (ONE_GPU if gpus else None)
    settings = read_config(config) if config else AppConfig()
    if models and len(models) > 1:
        settings = _several(settings, models, gpus=gpus)
    elif models:
        settings = settings.model_copy(update={"model": models[0], "models": ()})
    served = {
        name: resolve_auto(single.model, models_dir=single.models_dir, gpu=gpus > 0)
        for name, single in settings.by_model().items()
    }
    for name, found in served.items():
        print(f"model{name and f' {name}'}: {found.model} ({found.reason})", file=file, flush=True)
    if "" in served:
        return settings.model_copy(update={"model": served[""].model})
    resolved = [each.model_copy(update={"model": served[each.name].model}) for each in settings.models]
    return settings.model_copy(update={"models": tuple(resolved)})


_SHARED = 0.9  # share of a GPU's memory for all engines on it
_FAMILY = "Qwen3-TTS-12Hz-"


def _several(settings: AppConfig, models: list[str], *, gpus: int) -> AppConfig:
    """Set several models; the first is the default. Raises ConfigError.

    If there are enough GPUs, each model has its own. Otherwise, models on the same GPU share it equally.
    """
    if settings.models:
        raise InvalidRequest("several --model options and `models` in the file cannot be combined")
    most = -(-len(models) // gpus) if gpus else 1  # models per GPU
    entries = [{"name": _called(model), "model": model, **_share(settings, most if gpus else 0)} for model in models]
    try:
        return AppConfig.model_validate({**settings.model_dump(), "model": "auto", "models": entries})
    except ValidationError as error:
        raise ConfigError(f"--model: {explain(error)}") from None


def _called(model: str) -> str:
    """Return the short name of a model: 1.7B-Base for Qwen/Qwen3-TTS-12Hz-1.7B-Base, or a path's last component."""
    last = Path(model.rstrip("/")).name.removeprefix(_FAMILY)
    return re.sub(r"[^A-Za-z0-9._]+", "-", last).strip("-._")


def _share(settings: AppConfig, most: int) -> dict[str, object]:
    """Return the memory share for each of `most` models on a GPU, or {} for a model that does not share its GPU."""
    if most < 2:
        return {}
    memory = {"gpu_memory_fraction": round(_SHARED / most, 3), "kv_cache_bytes": None}
    talker = settings.talker.model_dump() | memory
    pool = settings.talker_pool.model_dump() | {"num_gpus": round(1 / most, 3)}
    return {"talker": talker, "talker_pool": pool}


def _fetch(model: str, progress: ProgressLine) -> None:
    """Download a missing checkpoint in this process, to show the progress. The replicas then find the checkpoint."""
    if model not in PACKED and find(model) is None:
        # The hub's client handles Ctrl-C only after its current files are complete, so this handler ends the process
        # immediately.
        handler = signal.signal(signal.SIGINT, lambda *_: os._exit(128 + signal.SIGINT))
        try:
            progress.done(f"weights: {locate(model, report=progress.report)}")
        finally:
            signal.signal(signal.SIGINT, handler)


def _with_access(settings: AppConfig, keys_file: Path | None, origins: list[str]) -> AppConfig:
    """Add the command's keys file and allowed origins. The file is checked before the start, and its path becomes
    absolute because replicas run in other folders.
    """
    access = settings.api.access
    keys_file = keys_file or access.keys_file
    if keys_file is not None:
        read_keys(keys_file)
        keys_file = keys_file.resolve()
    allowed = {"keys_file": keys_file, "allowed_origins": (*access.allowed_origins, *origins)}
    try:
        access = AccessSettings.model_validate(access.model_dump() | allowed)
    except ValidationError as error:
        raise ConfigError(f"--allow-origin: {explain(error)}") from None
    return settings.model_copy(update={"api": settings.api.model_copy(update={"access": access})})


@contextmanager
def _found_by_say(url: str, *, keyed: bool, file: TextIO) -> Iterator[None]:
    """Announce the server to `talkray say`. Failing to do so is not fatal."""
    with ExitStack() as stack:
        try:
            stack.enter_context(announced(url, keyed=keyed))
        except (OSError, StartError) as error:
            print(f"`talkray say` will need --url: {error}", file=file, flush=True)
        yield


def _check(settings: AppConfig, address: Address) -> None:
    """Raise StartError listing the failures that `talkray doctor` finds; otherwise they would appear much later."""
    failed = [f"{finding.topic}: {finding.text}" for finding in examine(settings, address) if not finding.ok]
    if failed:
        raise StartError("\n".join(failed))
    check_port(address)
