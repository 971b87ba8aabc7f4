"""Options shared by all commands that measure, and their validation."""

import inspect
import json
import math
from collections.abc import Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer

from loadtest.arrivals import Arrivals, Profile, SpeechLengths, Texts
from loadtest.dialects import DIALECTS
from loadtest.metrics import Limits
from loadtest.settings import Settings, Transport


def positive(value: float | None) -> float | None:
    """Validate that an option is unset or a finite number above 0."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter("must be a number above 0")
    return value


def number_list(value: str) -> tuple[float, ...]:
    """Parse the value of --rates: comma-separated numbers above 0."""
    try:
        numbers = tuple(float(part) for part in value.split(","))
    except ValueError:
        raise typer.BadParameter(f"{value!r} is not a list such as 1,10,20", param_hint="--rates") from None
    for number in numbers:
        positive(number)
    return numbers


def http_url(value: str | None) -> str | None:
    """Validate that an option is unset or an absolute HTTP URL."""
    parts = urlsplit(value or "")
    if value is not None and (parts.scheme not in ("http", "https") or not parts.hostname):
        raise typer.BadParameter(f"{value!r} is not a URL such as http://127.0.0.1:8000")
    return value


def extra_fields(value: str) -> dict[str, object]:
    """Parse the value of --extra: a JSON object of body fields that the load test does not set itself."""
    try:
        extra = json.loads(value)
    except ValueError as error:
        raise typer.BadParameter(f"not valid JSON: {error}", param_hint="--extra") from error
    if not isinstance(extra, dict):
        raise typer.BadParameter("""must be a JSON object such as '{"seed": 1}'""", param_hint="--extra")
    if reserved := {"input", "response_format"} & extra.keys():
        names = " and ".join(sorted(reserved))
        raise typer.BadParameter(f"{names}: remove the field, because the load test sets it", param_hint="--extra")
    return extra


def header(value: str) -> tuple[str, str]:
    name, colon, content = value.partition(":")
    if not colon or not name.strip() or {*"\r\n\0"} & {*value}:
        raise typer.BadParameter(
            f"{value!r} is not a header such as 'Authorization: Bearer KEY'", param_hint="--header"
        )
    return name.strip(), content.strip()


def settings_from_options(
    url: Annotated[str, typer.Option(callback=http_url, help="URL of the server, such as http://127.0.0.1:8000.")],
    seed: Annotated[int, typer.Option(min=0, help="Seed for times, texts and lengths.")] = 0,
    arrivals: Annotated[Arrivals, typer.Option(help="Random or equal intervals between requests.")] = Arrivals.POISSON,
    voice: Annotated[str, typer.Option(help="Voice of every request.")] = "alloy",
    model: Annotated[str, typer.Option(help="Model of every request.")] = "tts-1",
    transport: Annotated[
        Transport, typer.Option(help="websocket: /v1/audio/speech/ws. live: text word by word (Deepgram Flux).")
    ] = Transport.HTTP,
    dialect: Annotated[
        Literal[
            "talkray",
            "openai",
            "vllm-omni",
            "sglang-omni",
            "nari",
            "voxserve",
            "elevenlabs",
            "talkray-ws",
            "elevenlabs-ws",
            "deepgram-ws",
        ],
        typer.Option(help="Request format of the server. -ws opens a WebSocket for each text."),
    ] = "talkray",
    words: Annotated[float, typer.Option(callback=positive, help="Words per second of live text.")] = 30.0,
    interrupted: Annotated[
        float, typer.Option(min=0, max=1, help="Share of live turns that the client interrupts, chosen at random.")
    ] = 0.0,
    recording_s: Annotated[
        float, typer.Option(min=0, help="Seconds of noise that each request clones, for a Base model. 0: none.")
    ] = 0.0,
    recordings: Annotated[
        int, typer.Option(min=0, help="Number of different recordings. 0: a new one for each request.")
    ] = 0,
    speech_s: Annotated[
        float | None,
        typer.Option(
            callback=positive,
            help="Median seconds of speech, set by max_new_tokens and ignore_eos. Default: the model decides.",
        ),
    ] = None,
    speech_sigma: Annotated[float, typer.Option(min=0, help="Sigma of the log-normal lengths.")] = 0.35,
    extra: Annotated[str, typer.Option(metavar="JSON", help="Additional fields for each request.")] = "{}",
    headers: Annotated[list[str] | None, typer.Option("--header", help="Such as 'Authorization: Bearer KEY'.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Sequential requests before the measurement.")] = 0,
    timeout: Annotated[float, typer.Option(callback=positive, help="Maximum seconds for a complete response.")] = 120.0,
    max_ttfb: Annotated[float, typer.Option(callback=positive, help="Maximum TTFB of a good request, in ms.")] = 500.0,
    max_ttfa: Annotated[
        float | None, typer.Option(callback=positive, help="Maximum TTFA of a good request, in ms.")
    ] = None,
    max_stall: Annotated[float, typer.Option(min=0, help="Maximum total stall of a good request, in ms.")] = 100.0,
    texts: Annotated[Texts, typer.Option(help="Texts: all lengths, one sentence, or paragraphs.")] = Texts.MIXED,
    traffic: Annotated[
        Profile,
        typer.Option(help="mixed: also long texts, files, instructions, and clients that leave early or read slowly."),
    ] = Profile.ALIKE,
    processes: Annotated[int, typer.Option(min=1, help="Client processes. Use more if scheduling lag is high.")] = 1,
    replicas_url: Annotated[
        str | None,
        typer.Option(
            "--serve-status-url",
            "--metrics-url",
            callback=http_url,
            help="Source of replica counts: http://HOST:8265/api/serve/applications/ of Ray Serve, or "
            "http://HOST:8000/metrics of Talkray, which is up to ten seconds old.",
        ),
    ] = None,
) -> Settings:
    """Build the settings of a run from command-line options. The command adds the phases."""
    if transport is Transport.LIVE and (speech_s or extra_fields(extra)):
        raise typer.BadParameter("--transport live does not support --speech-s and --extra")
    if interrupted and transport is not Transport.LIVE:
        raise typer.BadParameter("--interrupted requires --transport live")
    if dialect != "talkray" and (transport is not Transport.HTTP or traffic is not Profile.ALIKE or speech_s):
        raise typer.BadParameter(f"--dialect {dialect} does not support --speech-s, --transport and --traffic")
    if recordings and not recording_s:
        raise typer.BadParameter("--recordings requires --recording-s")
    if recording_s and {"ref_audio", "ref_text"} & extra_fields(extra).keys():
        raise typer.BadParameter("--recording-s sets ref_audio and ref_text: remove them from --extra")
    if recording_s and (dialect != "talkray" or transport is not Transport.HTTP):
        raise typer.BadParameter("--recording-s requires --dialect talkray and --transport http")
    if traffic is Profile.MIXED and (transport is not Transport.HTTP or texts is not Texts.MIXED):
        raise typer.BadParameter("--traffic mixed sets texts and transport itself. Remove --texts and --transport")
    return Settings(
        url=url,
        arrivals=arrivals,
        seed=seed,
        transport=transport,
        dialect=dialect,
        options={"model": model, "voice": voice} | extra_fields(extra),
        headers=dict(header(value) for value in headers or ()),
        lengths=SpeechLengths(speech_s, speech_sigma) if speech_s else None,
        warmup=warmup,
        words_per_s=words,
        interrupted=interrupted,
        recording_s=recording_s,
        recordings=recordings,
        timeout_s=timeout,
        limits=Limits(max_ttfb / 1000, max_stall / 1000, max_ttfa and max_ttfa / 1000),
        processes=processes,
        texts=texts,
        profile=traffic,
        replicas_url=replicas_url,
    )


def of_side(values: list[str] | None, number: int, usual: str) -> str:
    """Return one server's value for a comparison option that is given either once for both servers or once for each."""
    if len(values or ()) > 2:
        raise typer.BadParameter(f"{', '.join(values or ())}: give at most two values, one per server")
    return (values or [usual])[min(number, len(values or [usual]) - 1)]


def side_settings(
    said: str, *, voice: str, model: str, extra: str, headers: list[str], speech_s: float | None, **shared: Any
) -> Settings:
    """Parse DIALECT=URL, or the URL of a Talkray server, into the settings of one compared server."""
    dialect, equals, url = said.partition("=")
    if not equals or "/" in dialect:
        dialect, url = "talkray", said
    if dialect not in DIALECTS:
        raise typer.BadParameter(f"{dialect!r} is not a dialect: use {', '.join(DIALECTS)}", param_hint="A or B")
    lengths = SpeechLengths(speech_s, 0.35) if speech_s and DIALECTS[dialect].has_lengths else None
    options = {"model": model, "voice": voice} | extra_fields(extra)
    named = dict(header(value) for value in headers)
    return Settings(str(http_url(url)), dialect=dialect, options=options, headers=named, lengths=lengths, **shared)


def with_settings(command: Callable[..., None]) -> Callable[..., None]:
    """Replace the command's first parameter, `settings`, with the options of `settings_from_options`.

    Typer reads options from signatures, so each command would otherwise have to repeat them.
    """
    shared = inspect.signature(settings_from_options).parameters
    own = [parameter for name, parameter in inspect.signature(command).parameters.items() if name != "settings"]

    def run(**values: Any) -> None:
        settings = settings_from_options(**{name: values.pop(name) for name in shared})
        command(settings, **values)

    parameters = [
        parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY) for parameter in (shared["url"], *own, *shared.values())
    ]
    unique = {parameter.name: parameter for parameter in parameters}
    run.__signature__ = inspect.Signature(list(unique.values()))  # type: ignore[attr-defined]
    run.__annotations__ = {name: parameter.annotation for name, parameter in unique.items()}
    run.__name__, run.__doc__ = command.__name__, command.__doc__
    return run
