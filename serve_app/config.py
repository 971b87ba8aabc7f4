"""Every setting of the application, read once. Production values stand in `cluster/serve/production.yaml`."""

import math
from ipaddress import ip_address
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, ValidationError, model_validator

from deployments.config import CodecConfig, Strict, TalkerConfig
from deployments.errors import StartError, TalkrayError

Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]

_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # which browsers leave out of an origin
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class ConfigError(TalkrayError):
    """A file of settings, or of API keys, cannot be used; the message says where and why."""


def _origin(text: str) -> str:
    """As browsers write it. Raises ValueError."""
    if text in ("*", "null"):
        return text
    parts = urlsplit(text.strip())
    if not (parts.scheme and parts.netloc) or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{text!r} is no origin: write https://app.example.com, with a port where it has one, and no path"
        )
    host = parts.netloc.lower()
    return f"{parts.scheme}://{host.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ' '))}"


def _host_name(text: str) -> str:
    """As the door reads it in a request. Raises ValueError."""
    name = text.strip().lower().strip("[]").removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        if not name or set(name) & set("/:@ "):
            raise ValueError(
                f"{text!r} is no host name: write tts.example.com, without a scheme, port or path"
            ) from None
    return name


class AccessSettings(Strict):
    """Clients that may use the surface. Without a key file only a server that listens on a loopback address starts."""

    keys_file: Path | None = None  # `talkray key create` writes it; must be on every node with an ingress replica
    # Web pages that may use the API, such as https://app.example.com; "*" is every page. None besides our own.
    allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    # Names under which clients reach the server. None: any, or without keys the loopback ones, so that no web page
    # gets here through a domain of its own that resolves to this machine.
    allowed_hosts: tuple[Annotated[str, AfterValidator(_host_name)], ...] | None = None

    def for_host(self, host: str | None) -> Self:
        """These settings for a server bound to `host`: without keys it answers to loopback names, or the listed ones.

        Raises StartError where others could speak without a key. The address that the server is bound to decides,
        never that of the peer: behind a proxy every client looks local.
        """
        if self.keys_file is None and not is_loopback(host):
            raise StartError(
                f"others can reach {host or 'every address'}, and no API keys are asked for: create one with "
                "`talkray key create NAME` and name its file in api.access.keys_file (`talkray serve --keys FILE`), "
                "or listen on 127.0.0.1"
            )
        if self.keys_file is None and self.allowed_hosts is None:
            return self.model_copy(update={"allowed_hosts": tuple(dict.fromkeys((*LOOPBACK_HOSTS, str(host))))})
        return self


def is_loopback(host: str | None) -> bool:
    """Whether only this machine can reach a server that is bound to `host`; None is every address."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AdmissionSettings(Strict):
    """The load that one ingress replica takes on. Further requests are refused with 429 and `Retry-After`."""

    max_streams: Positive = 256  # that are spoken or wait, half of the requests that it may have
    # Time in front of the pools, on top of the usual time to a first audio. While the oldest request waits longer, no
    # other may join.
    max_line_s: PositiveSeconds = 0.25
    # Where listeners hear more silence than this in all, too many streams are open: fewer are let in from then on.
    max_late_s: PositiveSeconds = 0.25
    min_streams: Positive = 4  # are let in, however late they come
    max_wait_s: PositiveSeconds = 5.0  # for the first audio; a request whose audio would come later is refused
    start_wait_s: PositiveSeconds = 30.0  # the same while no talker runs; then it is a 503
    client_streams: Positive | None = None  # open at once from one address
    client_requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # from one address, in bursts of as many
    # Proxies that add the address they see to X-Forwarded-For: HAProxy under `guarded-haproxy`, and each one in
    # front of that. With 0 the header is not believed, and all clients have HAProxy's own address.
    trusted_proxies: Annotated[int, Field(ge=0)] = 1


class VoiceSettings(Strict):
    """Voices that clients store."""

    # A folder or a bucket: /srv/voices, s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH. None: a folder of this
    # user's data (TALKRAY_DATA) on a single node, and no store on several nodes, which share no folder.
    store: str | None = None
    max_voices: Positive = 1000  # of each owner, with consent recordings
    max_bytes: Positive = 1 << 30  # of each owner's recordings, as FLAC
    require_consent: bool = False  # a voice is stored with a consent recording or a statement, or not at all


class ApiSettings(Strict):
    """Limits of a client's fields, and the names under which it may ask for the loaded model."""

    access: AccessSettings = AccessSettings()
    admission: AdmissionSettings = AdmissionSettings()
    voices: VoiceSettings = VoiceSettings()
    server_timing: bool = False  # responses say in a Server-Timing header how the time to first audio was spent
    max_input_chars: Positive = 4096  # each of input, instructions and ref_text
    # Speaks for voices of other services that are not here. None: the first of the checkpoint.
    default_voice: str | None = None
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts", "qwen-tts")


class PoolConfig(Strict):
    """Replicas of one deployment, and their resources. The load of a replica follows from other settings."""

    replicas: Annotated[int, Field(ge=1)] = 1  # where the pool does not scale; where it does, at the start
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_queued_requests: Annotated[int, Field(ge=0)] = 64  # waiting at each caller for a replica with room
    label_selector: dict[str, str] = Field(default_factory=dict)  # labels of nodes that its replicas may run on


class ScalingConfig(Strict):
    """How a pool follows its load; the rest of its policy is constant (serve_app/scaling/policies.py)."""

    min_replicas: Annotated[int, Field(ge=0)] = 1  # 0: none without requests, and the next request waits for a start
    max_replicas: Positive = 4
    target_use: Annotated[float, Field(gt=0)] = 0.75  # of the load that all replicas can take
    # A replica goes when the whole window did not need it; a tenth of the window lies between two removals.
    scale_down_window_s: Annotated[float, Field(ge=0)] = 120.0
    scale_to_zero_after_s: Annotated[float, Field(ge=0)] = 600.0  # without a single request

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas <= max_replicas must hold")
        return self


class TalkerScalingConfig(ScalingConfig):
    """Of the talker pool. A replica can take `talker.max_num_seqs` sequences."""

    # The growth of the queue over this time is expected. It is about the time that a replica takes to start.
    trend_horizon_s: Annotated[float, Field(ge=0)] = 5.0


class CodecScalingConfig(ScalingConfig):
    """Of the codec pool."""

    streams_per_replica: Annotated[float, Field(gt=0)] = 16.0  # that a replica decodes in real time


class AppConfig(Strict):
    """The application that `build_app` composes. The defaults fit two cores without a GPU."""

    model: str = "auto"
    models_dir: Path | None = None  # a folder of checkpoint directories that `auto` looks into first
    api: ApiSettings = ApiSettings()
    talker: TalkerConfig = TalkerConfig()
    codec: CodecConfig = CodecConfig()
    ingress_pool: PoolConfig = PoolConfig(num_cpus=0.2, max_queued_requests=256)
    codec_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    talker_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    # None: as many replicas as the pool's `replicas`, always. The number of the ingress is fixed anyway: a change of it
    # reloads the proxy and can cut streams.
    talker_scaling: TalkerScalingConfig | None = None
    codec_scaling: CodecScalingConfig | None = None

    @property
    def num_gpus(self) -> float:
        """GPUs that all pools ask for at the start."""
        pools = ((self.talker_pool, self.talker_scaling), (self.codec_pool, self.codec_scaling))
        return sum(pool.num_gpus * (scaling.min_replicas if scaling else pool.replicas) for pool, scaling in pools)

    @property
    def ingress_requests(self) -> int:
        """Requests that an ingress replica may have, with open sockets and requests about to be refused."""
        return 2 * self.api.admission.max_streams

    @property
    def talker_requests(self) -> int:
        """Requests that a talker replica may have: a quarter more than its engine takes.

        So the router tries another replica first, and the engine's own refusals say how long its line is.
        """
        return math.ceil(1.25 * (self.talker.max_num_seqs + self.talker.max_num_waiting))

    @property
    def codec_requests(self) -> int:
        """Requests that a codec replica may have; how many of them it decodes at once it learns."""
        if self.codec.placement == "inline":
            return self.talker_requests
        return math.ceil(3 * (self.codec_scaling or CodecScalingConfig()).streams_per_replica)


def read_config(file: Path) -> AppConfig:
    """The application's settings from a Serve config file (`applications[0].args`) or from a file of their own.

    Raises ConfigError that names the wrong keys and the right ones.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    try:
        return AppConfig.model_validate(applications[0].get("args") or {} if applications else document)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error)}") from None


def explain(error: ValidationError) -> str:
    """One line for each problem of the settings, with the valid keys where a key is unknown."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        hint = (
            f"; valid keys: {', '.join(_valid_keys(problem['loc'][:-1]))}"
            if problem["type"] == "extra_forbidden"
            else ""
        )
        lines.append(f"{where}: {problem['msg']}{hint}")
    return "\n".join(lines)


def _valid_keys(path: tuple[int | str, ...]) -> list[str]:
    model: Any = AppConfig
    for part in path:
        model = model.model_fields[part].annotation
    if isinstance(model, UnionType):  # optional settings
        model = next(member for member in get_args(model) if member is not NoneType)
    return sorted(model.model_fields)
