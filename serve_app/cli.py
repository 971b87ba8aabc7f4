"""The `talkray` command."""

import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer

from deployments.errors import TalkrayError
from serve_app import ray_settings
from serve_app.auth import read_keys
from serve_app.config import AppConfig, one_gpu, read_config
from serve_app.doctor import examine
from serve_app.gpus import count_gpus
from serve_app.key_commands import keys
from serve_app.local_server import Address, running, wait_for_stop
from serve_app.model_choice import choose
from serve_app.ports import free_port
from serve_app.progress import Progress
from serve_app.say import Utterance, speak

cli = typer.Typer(
    help="Qwen3-TTS on Ray Serve.", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)

cli.add_typer(keys, name="key")

Config = Annotated[Path | None, typer.Option("--config", help="A Serve config file such as cluster/serve/local.yaml.")]
Model = Annotated[
    str | None, typer.Option("--model", help="auto, embedded, a checkpoint directory, or a Hugging Face name.")
]


@cli.command()
def serve(
    config: Config = None,
    model: Model = None,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on.", min=1, max=65535)] = 8000,
    keys_file: Annotated[
        Path | None, typer.Option("--keys", help="Ask for the API keys of this file (see `talkray key`).")
    ] = None,
) -> None:
    """Serve speech on this machine until Ctrl-C."""
    settings = _asking_for_keys(_settings(config, model), keys_file)
    with Progress() as progress, running(settings, Address(host, port), progress.report) as url:
        progress.done(f"ready: {url}")
        print(f"\nHear it:\n  {_curl(url, with_key=settings.api.access.keys_file is not None)}", flush=True)
        print("\nCtrl-C stops.", flush=True)
        wait_for_stop()


@cli.command()
def say(
    text: Annotated[str, typer.Argument(help="What to say.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Audio file; its ending names the format.")] = Path(
        "speech.wav"
    ),
    url: Annotated[str | None, typer.Option(help="A running server; without one a server is started for this.")] = None,
    voice: Annotated[str | None, typer.Option(help="A voice of /v1/audio/voices.")] = None,
    model: Model = None,
) -> None:
    """Write speech to a file."""
    utterance = Utterance(text, output, voice)
    if url is not None:
        print(speak(url, utterance))
        return
    with Progress() as progress:
        with running(_settings(None, model), Address("127.0.0.1", free_port()), progress.report) as local_url:
            progress.report("speaking")
            said = speak(local_url, utterance)
        progress.done(said)


@cli.command()
def doctor(
    config: Config = None,
    model: Model = None,
    port: Annotated[int, typer.Option(help="The port that `serve` would use.")] = 8000,
) -> None:
    """Check Python, Ray, torch, GPU, attention, weights and ports."""
    findings = list(examine(_settings(config, model), port))
    for finding in findings:
        print(finding.line())
    raise typer.Exit(code=any(not finding.ok for finding in findings))


@cli.command()
def env() -> None:
    """Print the tuned Ray settings as `export` lines, for nodes that are started by hand."""
    for name, value in ray_settings.TUNED.items():
        print(f"export {name}={value}")


_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


@cli.command("random-checkpoint", context_settings=_PASS_ON, help="Write a checkpoint with random weights.")
def random_checkpoint(context: typer.Context) -> None:
    """`python -m deployments.random_checkpoint`."""
    _run_module("deployments.random_checkpoint", context)


@cli.command(
    context_settings=_PASS_ON, help="Compare a checkpoint with the official package, and check that speech ends."
)
def verify(context: typer.Context) -> None:
    """`python -m deployments.verify`."""
    _run_module("deployments.verify", context)


@cli.command(context_settings=_PASS_ON, help="Measure a running server under load.")
def loadtest(context: typer.Context) -> None:
    """`python -m loadtest`."""
    _run_module("loadtest", context)


def main() -> None:
    """Run the command line; what goes wrong on purpose is a message, not a traceback."""
    try:
        cli()
    except TalkrayError as error:
        sys.exit(f"talkray: {error}")


def _settings(config: Path | None, model: str | None) -> AppConfig:
    """The settings of a command: its file or the defaults for this machine, and its model."""
    gpus = count_gpus()
    defaults = one_gpu() if gpus else AppConfig()
    settings = defaults if config is None else read_config(config)
    choice = choose(model or settings.model, models_dir=settings.models_dir, gpu=gpus > 0)
    print(f"model: {choice.model} ({choice.reason})", flush=True)
    return settings.model_copy(update={"model": choice.model})


def _asking_for_keys(settings: AppConfig, keys_file: Path | None) -> AppConfig:
    """The file must be one before anything is started; replicas run in other folders, hence its whole path."""
    keys_file = keys_file or settings.api.access.keys_file
    if keys_file is None:
        return settings
    read_keys(keys_file)
    access = settings.api.access.model_copy(update={"keys_file": keys_file.resolve()})
    return settings.model_copy(update={"api": settings.api.model_copy(update={"access": access})})


def _curl(url: str, *, with_key: bool) -> str:
    key = ' -H "Authorization: Bearer $TALKRAY_API_KEY"' if with_key else ""
    body = '{"model": "qwen3-tts", "input": "Hello from Talkray.", "voice": "alloy", "response_format": "wav"}'
    return f"curl {url}/v1/audio/speech -H 'Content-Type: application/json'{key} -d '{body}' -o hello.wav"


def _run_module(module: str, context: typer.Context) -> None:
    """Another process: the command line itself imports no torch."""
    sys.exit(subprocess.call([sys.executable, "-m", module, *context.args]))


if __name__ == "__main__":
    main()
