from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError
from ray.serve._private.api import call_user_app_builder_with_args_if_necessary
from ray.serve.schema import DeploymentSchema, HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from deployments.errors import StartError
from serve_app import ingress
from serve_app.app import build_app
from serve_app.config import AccessSettings, ApiSettings, AppConfig, ConfigError, TalkerScalingConfig, is_loopback
from serve_app.config_file import read_config
from serve_app.ingress import Ingress

SERVE_CONFIGS = {path.name: path for path in sorted((Path(__file__).parents[2] / "cluster" / "serve").glob("*.yaml"))}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "talkray.yaml"


@pytest.mark.parametrize(
    ("text", "config"),
    [
        ("model: embedded\ntalker: {max_num_seqs: 3}\n", AppConfig(model="embedded", talker={"max_num_seqs": 3})),
        ("# nothing\n", AppConfig()),
        ("applications: [{name: talkray, args: {model: embedded}}]", AppConfig(model="embedded")),
    ],
)
def test_a_file_of_its_own_or_of_serve(file: Path, text: str, config: AppConfig) -> None:
    file.write_text(text, encoding="utf-8")
    assert read_config(file) == config


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("modell: embedded", ["modell", "model, models, models_dir"]),
        ("talker: {max_seqs: 3}", ["talker.max_seqs", "max_num_seqs"]),
        ("codec_pool: {replicas: 0}", ["codec_pool.replicas", "greater than or equal to 1"]),
        ("talker_scaling: {max_replica: 3}", ["talker_scaling.max_replica", "max_replicas, min_replicas"]),
        ("codec_scaling: {min_replicas: 9}", ["codec_scaling", "min_replicas must not exceed max_replicas"]),
        ("talker_scaling: {sequences_per_replica: 8}", ["talker_scaling.sequences_per_replica", "max_replicas, min"]),
        ("api: {admission: {max_line: 1}}", ["api.admission.max_line", "max_line_s"]),
        ("api: {acces: 1}", ["api.acces", "access, ", "jobs, "]),
        ("api: {jobs: {pol: 1}}", ["api.jobs.pol", "pool, "]),
        ("api: {extensions: [], jobs: {}}", ["api.jobs: this extension is not in api.extensions"]),
        ("{jobs_pool: {}, api: {text: {joints: 1}}}", ["write api.jobs.pool instead", "write api.continuity.joints"]),
        ("model: [", ["cannot be read"]),
        ("just words", ["valid dictionary"]),
        ("{model: embedded, models: [{name: a, model: b}]}", ["model and models cannot be combined"]),
        ("models: [{name: Ab, model: x}, {name: aB, model: y}]", ["the name 'aB' is already a model"]),
        ("models: [{name: tts-1, model: x}]", ["the name 'tts-1' is already a model"]),
        ("models: [{name: qwen3-tts-clone, model: x}]", ["the name 'qwen3-tts-clone' is already a model"]),
        ("models: [{name: a/b, model: x}]", ["models.0.name"]),
        ("models: [{name: a, model: x, talker: {seqs: 1}}]", ["models.0.talker.seqs"]),
        ("models: [{name: a, model: x, seqs: 1}]", ["valid keys: admission, model, name, placement"]),
    ],
)
def test_a_wrong_file_is_named_with_what_is_right(file: Path, text: str, named: list[str]) -> None:
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as refused:
        read_config(file)
    for part in (str(file), *named):
        assert part in str(refused.value)


@pytest.mark.parametrize(("name", "reason"), [
    ("talker.kv_block_size", "16 positions on a CPU"), ("talker.dtype", "bfloat16 on a GPU"),
    ("codec.chunk_frames", "follows from codec.workers"), ("codec.gpu_frames", "9 frames while the pool is idle"),
    ("codec.max_late_s", "codec replicas use api.admission.max_late_s"), ("api.records.stages", "always recorded"),
    ("api.records.lines", "each request has a line"), ("api.jobs.max_segments", "at most 32"),
])  # fmt: skip
def test_a_removed_setting_is_named_with_what_holds_instead(file: Path, name: str, reason: str) -> None:
    settings: Any = 1
    for part in reversed(name.split(".")):
        settings = {part: settings}
    for document in (settings, {"applications": [{"args": settings}]}):
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        with pytest.raises(ConfigError, match=f"{name}: delete this removed setting: .*{reason}"):
            read_config(file)
    with pytest.raises(ValidationError, match=f"delete this removed setting: .*{reason}"):
        call_user_app_builder_with_args_if_necessary(build_app, settings)
    file.write_text(yaml.safe_dump({"modell": "y", "models": [{"name": "a", "model": "x", **settings}]}))
    of_model = (
        f"{name}: delete this" if name.startswith("talker.") else f"{name.split('.')[0]}: Extra inputs.*admission"
    )
    with pytest.raises(ConfigError, match=rf"(?s)models\.0\.{of_model}.*modell: Extra inputs"):
        read_config(file)


def test_a_missing_file_is_named(file: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_config(file)


@pytest.mark.parametrize("path", SERVE_CONFIGS.values(), ids=SERVE_CONFIGS)
def test_shipped_configs_have_only_keys_that_serve_knows(path: Path) -> None:
    """Serve itself ignores those it does not know."""
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    ServeDeploySchema.model_validate(document)
    assert document.keys() <= ServeDeploySchema.model_fields.keys()
    assert document.get("http_options", {}).keys() <= HTTPOptionsSchema.model_fields.keys()
    for application in document["applications"]:
        assert application.keys() <= ServeApplicationSchema.model_fields.keys()
        for deployment in application.get("deployments", []):
            assert deployment.keys() <= DeploymentSchema.model_fields.keys()
            assert deployment["name"].partition("-")[0] in {"Ingress", "Codec", "Talker", "Jobs"}
        AppConfig.model_validate(application["args"])


def test_production_has_bounds_everywhere() -> None:
    config = read_config(SERVE_CONFIGS["production.yaml"])
    assert config.talker_scaling
    assert config.codec_scaling
    assert config.api.admission.max_streams < config.ingress_requests
    assert config.talker_requests > config.talker.max_num_seqs + config.talker.max_num_waiting
    assert config.codec.workers <= config.codec_pool.num_cpus
    assert config.talker_scaling.min_replicas <= config.talker_pool.replicas <= config.talker_scaling.max_replicas
    assert config.codec_scaling.min_replicas <= config.codec_pool.replicas <= config.codec_scaling.max_replicas


def test_sizes_and_bounds_are_read_where_serve_reads_them() -> None:
    production = read_config(SERVE_CONFIGS["production.yaml"])
    assert production.talker_scaling
    assert production.codec_scaling
    assert (production.ingress_pool.replicas, production.talker_pool.replicas) == (2, 2)
    assert (production.talker_scaling.max_replicas, production.talker_scaling.trend_horizon_s) == (16, 20)
    assert (production.codec_scaling.min_replicas, production.codec_scaling.streams_per_replica) == (8, 4)
    assert read_config(SERVE_CONFIGS["four-gpus.yaml"]).talker_pool.replicas == 4
    voices, clones, designs = read_config(SERVE_CONFIGS["three-models.yaml"]).by_model().values()
    assert voices.talker_scaling is clones.talker_scaling is None
    assert designs.talker_scaling == TalkerScalingConfig(min_replicas=0, max_replicas=1)
    assert designs.talker_pool == voices.talker_pool


def test_the_file_for_one_machine_holds_the_defaults() -> None:
    assert read_config(SERVE_CONFIGS["local.yaml"]) == AppConfig()


LOOPBACK = ["127.0.0.1", "localhost", "::1", "[::1]", "127.8.9.10"]
OPEN = ["0.0.0.0", "::", "192.0.2.7", "tts.example.com", "", None]
WITH_KEYS = AccessSettings(keys_file=Path("keys.json"))


@pytest.mark.parametrize("host", LOOPBACK)
def test_keys_are_optional_on_a_loopback_address(host: str) -> None:
    assert is_loopback(host)
    AccessSettings().for_host(host)


@pytest.mark.parametrize("host", OPEN)
def test_others_need_keys(host: str | None) -> None:
    assert not is_loopback(host)
    for names in (None, (), ("tts.example.com",)):  # a name proves nothing
        with pytest.raises(StartError, match=r"talkray key create NAME.*--keys"):
            AccessSettings(allowed_hosts=names).for_host(host)
    WITH_KEYS.for_host(host)


def test_without_keys_only_loopback_names_are_answered_to_unless_names_are_configured() -> None:
    access = AccessSettings().for_host("127.8.9.10")
    assert access.allowed_hosts == ("localhost", "127.0.0.1", "::1", "127.8.9.10")
    for own in (WITH_KEYS, *(AccessSettings(allowed_hosts=names) for names in (("a.b",), ()))):
        assert own.for_host("127.0.0.1") == own


@pytest.mark.parametrize("host", ["0.0.0.0", None])
def test_an_ingress_replica_asks_where_serve_listens(monkeypatch: pytest.MonkeyPatch, host: str | None) -> None:
    monkeypatch.setattr(ingress.ray_private, "proxy_host", lambda: host)
    with pytest.raises(StartError):
        Ingress(ApiSettings(), (), {})
