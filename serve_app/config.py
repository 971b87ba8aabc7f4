"""Every setting of the application, read once. Production values stand in `cluster/serve/production.yaml`."""

from dataclasses import fields, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Self, get_args

import yaml
from pydantic import Field, ValidationError, model_validator

from deployments.config import CodecConfig, Strict, TalkerConfig
from deployments.errors import TalkrayError
from serve_app.api_settings import ApiSettings
from serve_app.autoscaling import CodecScaling, TalkerScaling


class ConfigError(TalkrayError):
    """A config file is not one; the message says where."""


class PoolConfig(Strict):
    """Replicas of one deployment, what each is given, and how much it takes on."""

    replicas: Annotated[int, Field(ge=1)] = 1  # where the pool does not scale; where it does, at the start
    num_cpus: Annotated[float, Field(ge=0)] = 1.0
    num_gpus: Annotated[float, Field(ge=0)] = 0.0
    max_ongoing_requests: Annotated[int, Field(ge=1)] = 64
    max_queued_requests: Annotated[int, Field(ge=0)] = 64  # waiting at each caller for a replica with room


class AppConfig(Strict):
    """The application: what `build_app` composes. The defaults fit two cores without a GPU."""

    model: str = "auto"
    models_dir: Path | None = None  # a folder of checkpoint directories that `auto` looks into first
    api: ApiSettings = ApiSettings()
    talker: TalkerConfig = TalkerConfig()
    codec: CodecConfig = CodecConfig()
    ingress_pool: PoolConfig = PoolConfig(num_cpus=0.2, max_ongoing_requests=512, max_queued_requests=256)
    codec_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_ongoing_requests=64, max_queued_requests=32)
    # A little above the engine's own batch, so that the router tries another replica first.
    talker_pool: PoolConfig = PoolConfig(num_cpus=0.5, max_ongoing_requests=32, max_queued_requests=32)
    # None: as many replicas as the pool's `replicas`, always. The number of the ingress is fixed anyway: a change of it
    # reloads the proxy and can cut streams.
    talker_scaling: TalkerScaling | None = None
    codec_scaling: CodecScaling | None = None

    @model_validator(mode="after")
    def _scaling_fits_the_engine(self) -> Self:
        if self.talker_scaling and self.talker_scaling.sequences_per_replica > self.talker.max_num_seqs:
            raise ValueError(
                f"talker_scaling.sequences_per_replica is {self.talker_scaling.sequences_per_replica:g}, "
                f"but talker.max_num_seqs only {self.talker.max_num_seqs}"
            )
        return self


def one_gpu() -> AppConfig:
    """Defaults for one machine whose GPU makes codes and audio; `cluster/serve/one-gpu.yaml` says the same."""
    return AppConfig(
        talker=TalkerConfig(max_num_seqs=64, max_num_waiting=64, gpu_memory_fraction=0.85),
        codec=CodecConfig(placement="inline"),
        talker_pool=PoolConfig(num_gpus=1.0, max_ongoing_requests=160, max_queued_requests=64),
        codec_pool=PoolConfig(max_ongoing_requests=160, max_queued_requests=64),
    )


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
    """What is wrong with the settings, one line a problem, with the valid keys where one is unknown."""
    lines = []
    for problem in error.errors(include_url=False):
        where = ".".join(str(part) for part in problem["loc"])
        hint = (
            f"; valid keys: {', '.join(_valid_keys(problem['loc'][:-1]))}"
            if problem["type"] in ("extra_forbidden", "unexpected_keyword_argument")
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
    return sorted(field.name for field in fields(model)) if is_dataclass(model) else sorted(model.model_fields)
