"""Every setting of the application, read once. Production values stand in `cluster/serve/production.yaml`."""

import copy
import math
import re
from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, get_args
from urllib.parse import urlsplit

import yaml
from pydantic import AfterValidator, Field, ModelWrapValidatorHandler, ValidationError, create_model, model_validator
from pydantic_core import ErrorDetails, InitErrorDetails, PydanticCustomError

from deployments.config import CodecConfig, CodecPlacement, Strict, TalkerConfig
from deployments.errors import StartError, TalkrayError
from serve_app.extensions import BUILT_IN, load_extensions

POOLS = {"Talker": "talker", "Codec": "codec", "Ingress": "ingress", "Jobs": "jobs"}  # by deployment

S = TypeVar("S", bound=Strict)
Positive = Annotated[int, Field(ge=1)]
PositiveSeconds = Annotated[float, Field(gt=0)]

CLONE_ALIAS = "qwen3-tts-clone"  # a Base checkpoint, whichever is loaded
_DEFAULT_PORTS = {"http": ":80", "https": ":443"}  # browsers leave them out of an origin
LEAST_SEGMENT_CHARS = 50
Markup = Literal["auto", "none", "ssml"]
LOOPBACK_HOSTS = ("localhost", "127.0.0.1", "::1")


class ConfigError(TalkrayError):
    """A file of settings or of API keys cannot be used. The message says where and why."""


def _origin(text: str) -> str:
    """The origin as browsers write it. Raises ValueError."""
    if text in ("*", "null"):
        return text
    parts = urlsplit(text.strip())
    if not (parts.scheme and parts.netloc) or parts.path not in ("", "/") or parts.query or parts.fragment:
        raise ValueError(
            f"{text!r} is no origin: write https://app.example.com, with a port where it has one, and no path"
        )
    host = parts.netloc.lower()
    return f"{parts.scheme}://{host.removesuffix(_DEFAULT_PORTS.get(parts.scheme, ' '))}"


def host_name(text: str) -> str:
    """The host name as it is read from a request. Raises ValueError."""
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
    # Web pages that may use the API, such as https://app.example.com; "*" means every page. The server's own page may
    # always use it.
    allowed_origins: tuple[Annotated[str, AfterValidator(_origin)], ...] = ()
    # Names under which clients reach the server. None: any, or without keys the loopback ones, so that no web page
    # gets here through a domain of its own that resolves to this machine.
    allowed_hosts: tuple[Annotated[str, AfterValidator(host_name)], ...] | None = None

    def for_host(self, host: str | None) -> Self:
        """These settings for a server bound to `host`: without keys it answers to loopback names, or the listed ones.

        Raises StartError where others could speak without a key. The address that the server is bound to decides,
        never the peer's address: behind a proxy every client looks local.
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

    max_streams: Positive = 256  # streams that are spoken or wait: half of the requests that the replica may have
    # How long a request may wait in front of the pools, beyond the usual time to a first audio. While the oldest
    # request waits longer, new requests are refused.
    max_line_s: PositiveSeconds = 0.25
    # Too many streams are open where a listener hears more silence than this in all. Fewer are let in after that, here
    # and in codec replicas. Of models that share a codec pool the largest value holds there.
    max_late_s: PositiveSeconds = 0.25
    min_streams: Positive = 4  # this many are let in, however late their audio comes
    max_wait_s: PositiveSeconds = 5.0  # for the first audio; a request whose audio would come later is refused
    start_wait_s: PositiveSeconds = 30.0  # the same while no talker runs; the refusal is then a 503
    client_streams: Positive | None = None  # open at once from one address
    client_requests_per_minute: Annotated[float, Field(gt=0)] | None = None  # from one address, in bursts of as many
    # How many proxies add the address that they see to X-Forwarded-For: HAProxy under `guarded-haproxy`, and each proxy
    # in front of it. With 0 the header is ignored, and all clients have HAProxy's own address.
    trusted_proxies: Annotated[int, Field(ge=0)] = 1


class ApiSettings(Strict, extra="allow"):
    """Limits of a client's fields, and the names under which it may ask for the loaded model. Extensions have settings
    of their own under their names, such as `api.voices`.
    """

    access: AccessSettings = AccessSettings()
    admission: AdmissionSettings = AdmissionSettings()
    # Every answer says in a Server-Timing header how the time to first audio was spent. False: those that ask for it.
    server_timing: bool = False
    # Answers say that a machine speaks: in a header, in messages of sockets, and in the tags of files that have a place
    # for it (docs/security.md). False, because some clients of WAV skip 44 bytes whatever stands there.
    disclose_synthetic: bool = False
    # Which extensions run: names of built-in ones, `default` for all of these, `package.module:EXTENSION` for one of
    # your own. None: all built-in ones. What an extension adds has a 404 without it (docs/extensions.md).
    extensions: tuple[str, ...] | None = None
    max_input_chars: Positive = 4096  # each of input, instructions and ref_text
    # The voice that speaks where a client names a voice of another service. None: the checkpoint's first voice.
    default_voice: str | None = None
    model_aliases: tuple[str, ...] = ("tts-1", "tts-1-hd", "gpt-4o-mini-tts", "qwen3-tts", "qwen-tts")

    @model_validator(mode="after")
    def _extensions_know_the_rest(self) -> Self:
        if added := self.model_extra:
            kinds: dict[str, Any] = {name: (kind, kind()) for name, kind in settings_kinds(self.extensions).items()}
            checked = create_model("extensions", __base__=Strict, **kinds).model_validate(added)
            added |= {name: getattr(checked, name) for name in added}
        return self

    def of(self, kind: type[S]) -> S:
        """The settings of the extension whose `settings` are of this kind."""
        found = (value for value in (self.model_extra or {}).values() if isinstance(value, kind))
        return next(found, None) or kind()


def settings_kinds(selected: Sequence[str] | None) -> dict[str, type[Strict]]:
    """The kinds of settings of the selected extensions, by their names. Raises ValueError as `load_extensions` does."""
    try:
        return {each.name: each.settings for each in load_extensions(selected) if each.settings is not Strict}
    except StartError as error:
        raise ValueError(str(error).removeprefix("api.extensions: ")) from None


class PoolConfig(Strict):
    """Replicas of one deployment, and their resources. The load of a replica follows from other settings."""

    replicas: Annotated[int, Field(ge=1)] = 1  # at the start, and always where the pool does not scale
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_queued_requests: Annotated[int, Field(ge=0)] = 64  # waiting at each caller for a replica with room
    label_selector: dict[str, str] = Field(default_factory=dict)  # labels of nodes that its replicas may run on


class ScalingConfig(Strict):
    """How a pool follows its load; the rest of its policy is constant (serve_app/scaling/policies.py)."""

    min_replicas: Annotated[int, Field(ge=0)] = 1  # 0: none without requests, and the next request waits for a start
    max_replicas: Positive = 4
    target_use: Annotated[float, Field(gt=0)] = 0.75  # of the load that all replicas can take
    # A replica is removed when it was not needed during this whole window. The next removal is a tenth of it later.
    scale_down_window_s: Annotated[float, Field(ge=0)] = 120.0
    scale_to_zero_after_s: Annotated[float, Field(ge=0)] = 600.0  # without a single request
    # What segments of jobs do to the number of replicas. wake: they start the first one, and keep it. hold: they keep
    # the last one. neither: a pool goes to zero under them. None of these adds a second replica.
    jobs: Literal["wake", "hold", "neither"] = "hold"

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError("min_replicas <= max_replicas must hold")
        return self


class TalkerScalingConfig(ScalingConfig):
    """How the talker pool scales. A replica can take `talker.max_num_seqs` sequences."""

    # The policy expects the queue to go on growing for this time, which is about what a replica takes to start.
    trend_horizon_s: Annotated[float, Field(ge=0)] = 5.0


class CodecScalingConfig(ScalingConfig):
    """How the codec pool scales."""

    streams_per_replica: Annotated[float, Field(gt=0)] = 16.0  # streams that a replica decodes in real time


# Part of the names of deployments and of metrics.
_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._]*(?:-[A-Za-z0-9._]+)*")


def _model_name(text: str) -> str:
    """Raises ValueError."""
    if not _MODEL_NAME.fullmatch(text) or len(text) > 64:
        raise ValueError(
            f"{text!r} is no name of a model: up to 64 letters, digits, dots, and single dashes between them"
        )
    return text


class ServedModel(Strict):
    """One of several models. What it leaves out is as the application has it."""

    name: Annotated[
        str, AfterValidator(_model_name)
    ]  # clients may ask for it, metrics and deployments are named for it
    model: str  # as AppConfig.model
    talker: TalkerConfig | None = None
    placement: CodecPlacement | None = None  # in place of codec.placement
    talker_pool: PoolConfig | None = None  # its num_gpus is the share of a GPU that Ray counts
    talker_scaling: TalkerScalingConfig | None = None
    admission: AdmissionSettings | None = None  # of this model alone, in place of api.admission


class AppConfig(Strict):
    """The application that `build_app` composes. The defaults fit two cores without a GPU."""

    model: str = "auto"
    # Several models in one application, in place of `model`; the first is the default (docs/models.md). Models with the
    # same speech tokenizer share a codec pool, and `codec`, `codec_pool` and `codec_scaling` hold for each such pool.
    models: tuple[ServedModel, ...] = ()
    models_dir: Path | None = None  # a folder of checkpoint directories that `auto` looks into first
    api: ApiSettings = ApiSettings()
    talker: TalkerConfig = TalkerConfig()
    codec: CodecConfig = CodecConfig()
    ingress_pool: PoolConfig = PoolConfig(num_cpus=0.2, max_queued_requests=256)
    codec_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    talker_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_queued_requests=32)
    # None: the pool does not scale. The ingress never scales, because a change of its replicas reloads the proxy and
    # can cut streams.
    talker_scaling: TalkerScalingConfig | None = None
    codec_scaling: CodecScalingConfig | None = None

    @model_validator(mode="wrap")
    @classmethod
    def _explain_removed(cls, data: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        """Here and not in `explain`, because Serve validates the `args` of `serve deploy`."""
        try:
            return handler(data)
        except ValidationError as error:
            raise ValidationError.from_exception_data(error.title, list(map(_with_reason, error.errors()))) from None

    @model_validator(mode="after")
    def _models_told_apart(self) -> Self:
        if self.models and self.model != "auto":
            raise ValueError("model and models exclude each other: move the model into models, with a name")
        taken = {alias.lower() for alias in (*self.api.model_aliases, CLONE_ALIAS)}
        for name in (served.name for served in self.models):
            if name.lower() in taken:
                raise ValueError(f"models: the name {name!r} is taken, by another model or by an alias of the default")
            taken.add(name.lower())
        return self

    def by_model(self) -> dict[str, "AppConfig"]:
        """The configuration of each model as if it were the only one, by its name; that of a single `model` is ""."""
        return {served.name: self._with(served) for served in self.models} or {"": self}

    def _with(self, served: ServedModel) -> "AppConfig":
        own = {name: value for name, value in served if value is not None and name in AppConfig.model_fields}
        placed = {} if served.placement is None else {"placement": served.placement}
        admitted = {} if served.admission is None else {"admission": served.admission}
        api, codec = self.api.model_copy(update=admitted), self.codec.model_copy(update=placed)
        return self.model_copy(update={**own, "models": (), "api": api, "codec": codec})

    @property
    def num_gpus(self) -> float:
        """GPUs that all pools ask for at the start; of several codec pools it counts one."""
        talkers = [(config.talker_pool, config.talker_scaling) for config in self.by_model().values()]
        pools = (*talkers, (self.codec_pool, self.codec_scaling))
        return sum(pool.num_gpus * (scaling.min_replicas if scaling else pool.replicas) for pool, scaling in pools)

    @property
    def ingress_requests(self) -> int:
        """Requests that an ingress replica may have, with open sockets and requests about to be refused."""
        return 2 * sum(config.api.admission.max_streams for config in self.by_model().values())

    @property
    def talker_requests(self) -> int:
        """Requests that a talker replica may have: a quarter more than its engine takes, and as many segments of jobs
        as have rows beside others.

        So the router tries another replica first, and the engine's own refusals say how long its line is.
        """
        talker = self.talker
        return math.ceil(1.25 * (talker.max_num_seqs + talker.max_num_waiting)) + talker.max_num_seqs // 2

    @property
    def codec_requests(self) -> int:
        """Requests that a codec replica may have. It learns by itself how many of them it can decode at once."""
        if self.codec.placement == "inline":
            return self.talker_requests
        return math.ceil(3 * (self.codec_scaling or CodecScalingConfig()).streams_per_replica)


def read_config(file: Path) -> AppConfig:
    """The application's settings from a Serve config file (`applications[0]`: its `args`, and the sizes and bounds
    under `deployments`) or from a file of their own.

    Raises ConfigError that names the wrong keys and the right ones.
    """
    try:
        document = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{file} cannot be read: {error}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    try:
        return AppConfig.model_validate(_with_sizes(applications[0]) if applications else document)
    except ValidationError as error:
        raise ConfigError(f"{file}: {explain(error)}") from None


def _with_sizes(application: Mapping[str, Any]) -> dict[str, Any]:
    """`args` with the sizes, bounds and policies that Serve reads under `deployments`. Raises ConfigError."""
    args = copy.deepcopy(application.get("args") or {})
    for entry in application.get("deployments") or ():
        kind, _, model = str(entry.get("name")).partition("-")
        served = next((served for served in args.get("models") or () if served.get("name") == model), None)
        if kind not in POOLS or (model and (kind != "Talker" or served is None)):
            raise ConfigError(f"deployments: {entry.get('name')!r} is no pool with a size of its own")
        own: dict[str, Any] = args if served is None else served
        scaling = entry.get("autoscaling_config")
        size = entry.get("num_replicas") if scaling is None else scaling.get("initial_replicas")
        if size and kind == "Jobs":
            jobs = args.setdefault("api", {}).setdefault("jobs", {})
            jobs["pool"] = {**(jobs.get("pool") or {}), "replicas": size}
        elif size:
            pool = f"{POOLS[kind]}_pool"
            own[pool] = {**(args.get(pool) or {}), **(own.get(pool) or {}), "replicas": size}
        if scaling is not None:
            own[f"{POOLS[kind]}_scaling"] = {**(own.get(f"{POOLS[kind]}_scaling") or {}), **_bounds(scaling)}
    return args


def _bounds(scaling: Mapping[str, Any]) -> dict[str, Any]:
    """An `autoscaling_config` under our names; its policy's other arguments follow from other settings."""
    policy = (scaling.get("policy") or {}).get("policy_kwargs") or {}
    own = {name: value for name, value in policy.items() if name not in ("sequences_per_replica", "max_talker_streams")}
    return {**own, "min_replicas": scaling.get("min_replicas", 1), "max_replicas": scaling.get("max_replicas", 1)}


_REMOVED = {  # settings of earlier versions: why, and what holds instead
    "api.jobs.max_segments": "refusals of the pools set the number of segments made at once, which is 32 at most",
    "api.records.lines": "each request has a line in the log folder of Ray Serve, because `talkray logs` reads it",
    "api.records.stages": "stages are always recorded, because `talkray logs`, metrics and spans need them",
    "api.page": "the page is an extension: list the others in api.extensions to leave it out (docs/extensions.md)",
    "codec.chunk_frames": "the length of chunks follows from codec.workers and the speed of a core",
    "codec.gpu_frames": "the load of the pool sets it: 9 frames while the pool is idle, more while it is busy",
    "codec.max_late_s": "codec replicas use api.admission.max_late_s, so that one limit holds everywhere",
    "talker.dtype": "the device sets it: bfloat16 on a GPU, float16 on a GPU before Ampere, float32 on a CPU",
    "talker.kv_block_size": "the device sets it: 16 positions on a CPU, 64 on a GPU, 256 with flash-attn",
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


def explain(error: ValidationError) -> str:
    """One line for each problem of the settings, with the valid keys where a key is unknown."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        keys = _valid_keys(problem["loc"][:-1]) if problem["type"] == "extra_forbidden" else ()
        hint = f"; valid keys: {', '.join(keys)}" if keys else ""
        lines.append(f"{where}: {problem['msg']}{hint}")
    return "\n".join(lines)


def _valid_keys(path: tuple[int | str, ...]) -> list[str]:
    model: Any = AppConfig
    for part in path:
        if not isinstance(part, str):
            model = get_args(model)[0]  # of a list
        elif part in model.model_fields:
            model = model.model_fields[part].annotation
        else:
            model = settings_kinds(None)[part]
        if isinstance(model, UnionType):  # optional settings
            model = next(member for member in get_args(model) if member is not NoneType)
    return sorted((*model.model_fields, *(settings_kinds(None) if model is ApiSettings else ())))
