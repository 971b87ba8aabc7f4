"""All settings. Production values are in `cluster/serve/production.yaml`. The comment at a setting is its description
in docs/settings.md (`python -m tools.reference`).
"""

import math
import re
from collections.abc import Sequence
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from deployments.config import CodecConfig, CodecPlacement, Strict, TalkerConfig
from deployments.errors import StartError, TalkrayError
from serve_app.extensions import BUILT_IN, load_extensions

POOLS = {"Talker": "talker", "Codec": "codec", "Ingress": "ingress", "Jobs": "jobs"}  # by deployment name

S = TypeVar("S", bound=Strict)
Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]

CLONE_ALIAS = "qwen3-tts-clone"  # selects any loaded Base checkpoint
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers omit these ports in an origin
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class ConfigError(TalkrayError):
    """A file of settings or API keys cannot be used. The message has the location and the reason."""


def _origin(text: str) -> str:
    """Normalize an origin to the form that browsers send. Raises ValueError."""
    if text in ("*", "null"):
        return text
    parts = urlsplit(text.strip())
    if not (parts.scheme and parts.netloc) or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{text!r} is not an origin: write https://app.example.com, with a port if necessary, without a path"
        )
    host = parts.netloc.lower()
    return f"{parts.scheme}://{host.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ' '))}"


def host_name(text: str) -> str:
    """Normalize a host name to the form used in requests. Raises ValueError."""
    name = text.strip().lower().strip("[]").removesuffix(".")
    try:
        return str(ip_address(name))
    except ValueError:
        if not name or set(name) & set("/:@ "):
            raise ValueError(
                f"{text!r} is not a host name: write tts.example.com, without a scheme, port or path"
            ) from None
    return name


class AccessSettings(Strict):
    """Access to the server. Without a key file, the server starts on a loopback address only."""

    keys_file: Path | None = None  # API keys (`talkray key create`). All nodes with an ingress replica need the file
    # Origins of web pages that may use the API, such as `https://app.example.com`. `*` allows all pages. The server's
    # own page is always allowed.
    allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    # Host names that clients may use for the server. If unset, all names are allowed with API keys, and only loopback
    # names without, because a web page could otherwise reach the server through DNS rebinding.
    allowed_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] | None = None

    def for_host(self, host: str | None) -> Self:
        """Apply these settings to a server bound to `host`. Without keys, the server only answers to loopback names or
        the listed names.

        Raises StartError if other hosts could connect without a key. The check uses the address that the server is
        bound to, because behind a proxy every client appears to be local.
        """
        if self.keys_file is None and not is_loopback(host):
            raise StartError(
                f"other machines can reach {host or 'every address'}, but API keys are not required: create one with "
                "`talkray key create NAME` and set api.access.keys_file to its file (`talkray serve --keys FILE`), "
                "or listen on 127.0.0.1"
            )
        if self.keys_file is None and self.allowed_hosts is None:
            return self.model_copy(update={"allowed_hosts": tuple(dict.fromkeys((*LOOPBACK_HOSTS, str(host))))})
        return self


def is_loopback(host: str | None) -> bool:
    """Return whether only this machine can reach a server bound to `host`. None stands for every address."""
    if host == "localhost":
        return True
    try:
        return host is not None and ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


class AdmissionSettings(Strict):
    """Limits of one ingress replica. Further requests get a 429 with `Retry-After`."""

    max_streams: Positive = 256  # maximum number of requests in progress or waiting for first audio
    # Maximum wait for a free replica, beyond the usual time to first audio. While the oldest request waits longer, new
    # requests are refused.
    max_line_s: PositiveSeconds = 0.25
    # Maximum total silence in a stream. Longer silence lowers the number of streams that the ingress and the codec
    # replicas accept. Models that share a codec pool use the largest value there.
    max_late_s: PositiveSeconds = 0.25
    min_streams: Positive = 4  # streams that are always accepted, even if audio is late
    max_wait_s: PositiveSeconds = 5.0  # maximum expected time to first audio. Later requests are refused
    start_wait_s: PositiveSeconds = 30.0  # the same limit while no talker is running. Later requests then get a 503
    client_streams: Positive | None = None  # maximum number of requests and open WebSockets from one address
    client_requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # rate limit and burst size of one address
    # Number of proxies that append an address to X-Forwarded-For: the bundled HAProxy, plus each proxy in front of it.
    # With 0 the header is ignored, and all clients have HAProxy's address.
    trusted_proxies: Annotated[int, Field(ge=0)] = 1


class ApiSettings(Strict, extra="allow"):
    """The HTTP and WebSocket APIs. Each extension has its settings under its own name: `api.NAME`."""

    access: AccessSettings = AccessSettings()
    admission: AdmissionSettings = AdmissionSettings()
    # Adds a Server-Timing header with the stages before first audio to each response. Otherwise only requests with the
    # header `x-server-timing` get it.
    server_timing: bool = False
    # Marks audio as synthetic in a header, in WebSocket messages and in file tags. Off by default, because some clients
    # expect WAV samples after exactly 44 bytes.
    disclose_synthetic: bool = False
    # Extensions to load: built-in names, `default` for all of them, and `package.module:EXTENSION` for your own. Unset
    # loads all built-in ones. Routes of other extensions return 404.
    extensions: tuple[str, ...] | None = None
    max_input_chars: Positive = 4096  # maximum length of each of `input`, `instructions` and `ref_text`
    # Voice for requests that name no voice or a voice of another service. By default, this is the model's first voice.
    default_voice: str | None = None
    # Other names under which requests may select the default model.
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts", "qwen-tts")

    @model_validator(mode="after")
    def _extensions_know_the_rest(self) -> Self:
        if added := self.model_extra:
            kinds: dict[str, Any] = {name: (kind, kind()) for name, kind in settings_kinds(self.extensions).items()}
            checked = create_model("extensions", __base__=Strict, **kinds).model_validate(added)
            added |= {name: getattr(checked, name) for name in added}
        return self

    def of(self, kind: type[S]) -> S:
        """Return the settings of the extension whose `settings` class is `kind`."""
        found = (value for value in (self.model_extra or {}).values() if isinstance(value, kind))
        return next(found, None) or kind()


def settings_kinds(selected: Sequence[str] | None) -> dict[str, type[Strict]]:
    """Return the settings classes of the selected extensions, by extension name. Raises ValueError for unknown
    extensions.
    """
    try:
        return {each.name: each.settings for each in load_extensions(selected) if each.settings is not Strict}
    except StartError as error:
        raise ValueError(str(error).removeprefix("api.extensions: ")) from None


class PoolConfig(Strict):
    """Replicas of one pool, and the resources of each."""

    replicas: Annotated[int, Field(ge=1)] = 1  # replicas at start, and of a pool that does not scale
    num_cpus: Annotated[float, Field(ge=0)] = 1.0  # CPUs that Ray reserves for each replica
    num_gpus: Annotated[float, Field(ge=0)] = 0.0  # GPUs, or a share of one, that Ray reserves for each replica
    max_queued_requests: Annotated[int, Field(ge=0)] = 64  # maximum queue length in each caller for a replica
    label_selector: dict[str, str] = Field(default_factory=dict)  # labels of the nodes that may run its replicas


class ScalingConfig(Strict):
    """Autoscaling of a pool. Other parameters of the policy are constants (serve_app/scaling/policies.py)."""

    min_replicas: Annotated[int, Field(ge=0)] = 1  # with 0, an idle pool stops, and the next request waits for a start
    max_replicas: Positive = 4  # maximum number of replicas
    target_use: Annotated[float, Field(gt=0)] = 0.75  # target load, relative to the load that all replicas can take
    # A replica is removed after being unnecessary for this time. The next removal can follow after a tenth of it.
    scale_down_window_s: Annotated[float, Field(ge=0)] = 120.0
    scale_to_zero_after_s: Annotated[float, Field(ge=0)] = 600.0  # idle time before the last replica is removed
    # Effect of jobs on the first replica. `wake` starts and keeps it, `hold` keeps it, `neither` lets the pool scale to
    # zero while jobs run. Jobs never add a second replica.
    jobs: Literal["wake", "hold", "neither"] = "hold"

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas must not exceed max_replicas")
        return self


class TalkerScalingConfig(ScalingConfig):
    """Autoscaling of the talker pool. A replica can take `talker.max_num_seqs` sequences."""

    # How far ahead the policy extrapolates the growth of the queue: about the time that a replica takes to start.
    trend_horizon_s: Annotated[float, Field(ge=0)] = 5.0


class CodecScalingConfig(ScalingConfig):
    """Autoscaling of the codec pool."""

    streams_per_replica: Annotated[float, Field(gt=0)] = 16.0  # streams that one replica decodes in real time


# Model names appear in deployment and metric names.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*(?:-[A-Za-z0-9._]+)*")


def _model_name(text: str) -> str:
    """Validate a model name. Raises ValueError."""
    if not _MODEL_NAME.fullmatch(text) or len(text) > 64:
        raise ValueError(
            f"{text!r} is not a model name: use at most 64 letters, digits and dots, with single dashes between them"
        )
    return text


class ServedModel(Strict):
    """One of several models. Settings that it omits take the application's values."""

    # Name of the model in requests, metrics and deployments.
    name: Annotated[str, AfterValidator(_model_name)]
    model: str  # as the application's `model`
    talker: TalkerConfig | None = None  # instead of the application's `talker`
    placement: CodecPlacement | None = None  # instead of `codec.placement`
    talker_pool: PoolConfig | None = None  # instead of the application's `talker_pool`
    talker_scaling: TalkerScalingConfig | None = None  # instead of the application's `talker_scaling`
    admission: AdmissionSettings | None = None  # limits of this model, instead of `api.admission`


class AppConfig(Strict):
    """The application that `build_app` composes. The defaults suit two cores without a GPU."""

    model: str = "auto"  # `auto`, `embedded`, `embedded-base`, a checkpoint directory or a Hugging Face name
    # Several models in one application, instead of `model`. The first is the default. Models with the same speech
    # tokenizer share a codec pool. `codec`, `codec_pool` and `codec_scaling` apply to each such pool.
    models: tuple[ServedModel, ...] = ()
    models_dir: Path | None = None  # folder of checkpoint directories that `auto` searches first
    api: ApiSettings = ApiSettings()
    talker: TalkerConfig = TalkerConfig()
    codec: CodecConfig = CodecConfig()
    # This pool does not scale, because a change of its size reloads the proxy and can cut streams.
    ingress_pool: PoolConfig = PoolConfig(num_cpus=0.2, max_queued_requests=256)
    codec_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    talker_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    talker_scaling: TalkerScalingConfig | None = None  # unset keeps the number of replicas constant
    codec_scaling: CodecScalingConfig | None = None  # unset keeps the number of replicas constant

    @model_validator(mode="wrap")
    @classmethod
    def _explain_removed(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Explain removed settings during validation, because when Serve validates the `args` of `serve deploy`, it
        does not call `explain` (config_file.py).
        """
        try:
            return handler(data)
        except ValidationError as error:
            raise ValidationError.from_exception_data(error.title, list(map(_with_reason, error.errors()))) from None

    @model_validator(mode="after")
    def _models_told_apart(self) -> Self:
        if self.models and self.model != "auto":
            raise ValueError("model and models cannot be combined: move the model into models, with a name")
        taken = {alias.lower() for alias in (*self.api.model_aliases, CLONE_ALIAS)}
        for name in (served.name for served in self.models):
            if name.lower() in taken:
                raise ValueError(f"models: the name {name!r} is already a model or an alias of the default")
            taken.add(name.lower())
        return self

    def by_model(self) -> dict[str, "AppConfig"]:
        """Return the configuration of each model as if it were the only model, by name. The name of a single `model` is
        "".
        """
        return {served.name: self._with(served) for served in self.models} or {"": self}

    def _with(self, served: ServedModel) -> "AppConfig":
        own = {name: value for name, value in served if value is not None and name in AppConfig.model_fields}
        placed = {} if served.placement is None else {"placement": served.placement}
        admitted = {} if served.admission is None else {"admission": served.admission}
        api, codec = self.api.model_copy(update=admitted), self.codec.model_copy(update=placed)
        return self.model_copy(update={**own, "models": (), "api": api, "codec": codec})

    @property
    def num_gpus(self) -> float:
        """GPUs that all pools request at start. Only one of several codec pools is counted."""
        talkers = [(config.talker_pool, config.talker_scaling) for config in self.by_model().values()]
        pools = (*talkers, (self.codec_pool, self.codec_scaling))
        return sum(pool.num_gpus * (scaling.min_replicas if scaling else pool.replicas) for pool, scaling in pools)

    @property
    def ingress_requests(self) -> int:
        """Maximum requests of an ingress replica, including open sockets and requests that will be refused."""
        return 2 * sum(config.api.admission.max_streams for config in self.by_model().values())

    @property
    def talker_requests(self) -> int:
        """Maximum requests of a talker replica: a quarter more than its engine accepts, plus segments of jobs for half
        of its rows.

        With this margin, the router tries another replica first, and the engine's own refusals report the queue length.
        """
        talker = self.talker
        return math.ceil(1.25 * (talker.max_num_seqs + talker.max_num_waiting)) + talker.max_num_seqs // 2

    @property
    def codec_requests(self) -> int:
        """Maximum requests of a codec replica, which decides for itself how many it can decode at once."""
        if self.codec.placement == "inline":
            return self.talker_requests
        return math.ceil(3 * (self.codec_scaling or CodecScalingConfig()).streams_per_replica)


_REMOVED = {  # settings of earlier versions, with the reason or the replacement
    "api.jobs.max_segments": "the number of concurrent segments, at most 32, follows the refusals of the pools",
    "api.records.lines": "each request has a line in the log folder of Ray Serve, because `talkray logs` reads it",
    "api.records.stages": "stages are always recorded, because `talkray logs`, metrics and spans need them",
    "api.page": "the page is an extension: to disable it, list all others in api.extensions (docs/extensions.md)",
    "codec.chunk_frames": "the length of chunks follows from codec.workers and the speed of a core",
    "codec.gpu_frames": "the length follows the load: 9 frames while the pool is idle, more while it is busy",
    "codec.max_late_s": "codec replicas use api.admission.max_late_s, so one limit applies everywhere",
    "talker.dtype": "the type follows the device: bfloat16 on a GPU, float16 on a GPU before Ampere, float32 on a CPU",
    "talker.kv_block_size": "the size follows the device: 16 positions on a CPU, 64 on a GPU, 256 with flash-attn",
}


_MOVED = {"api.text.joints": "api.continuity.joints", "jobs_pool": "api.jobs.pool"}


def _with_reason(problem: ErrorDetails) -> InitErrorDetails:
    kind: str | PydanticCustomError = problem["type"]
    name = ".".join(part for part in problem["loc"] if isinstance(part, str)).removeprefix("models.")
    if kind == "extra_forbidden" and name in _REMOVED:
        kind = PydanticCustomError("removed", "delete this removed setting: {reason}", {"reason": _REMOVED[name]})
    elif kind == "extra_forbidden" and name in _MOVED:
        kind = PydanticCustomError("moved", "write {place} instead", {"place": _MOVED[name]})
    elif kind == "extra_forbidden" and name.removeprefix("api.") in BUILT_IN:
        kind = PydanticCustomError("not_selected", "this extension is not in api.extensions, or it has no settings")
    return InitErrorDetails(type=kind, loc=problem["loc"], input=problem["input"], ctx=problem.get("ctx", {}))
