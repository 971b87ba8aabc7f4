"""Every setting of the application, read once. Production values stand in `cluster/serve/production.yaml`."""

from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError

from deployments.config import CodecConfig, Strict, TalkerConfig
from deployments.errors import TalkrayError
from serve_app.api_settings import ApiSettings


class ConfigError(TalkrayError):
    """A config file is not one; the message says where."""


class PoolConfig(Strict):
    """Replicas of one deployment, what each is given, and how much it takes on."""

    replicas: Annotated[int, Field(ge=1)] = 1
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


def one_gpu() -> AppConfig:
    """Defaults for one machine whose GPU makes codes and audio; `cluster/serve/one-gpu.yaml` says the same."""
    return AppConfig(
        talker=TalkerConfig(max_num_seqs=64, max_num_waiting=64, kv_cache_bytes=8 << 30),
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
            if problem["type"] == "extra_forbidden"
            else ""
        )
        lines.append(f"{where}: {problem['msg']}{hint}")
    return "\n".join(lines)


def _valid_keys(path: tuple[int | str, ...]) -> list[str]:
    model: Any = AppConfig
    for part in path:
        model = model.model_fields[part].annotation
    return sorted(model.model_fields)
