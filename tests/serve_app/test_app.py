import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import serve
from ray.serve import Application
from ray.serve._private.build_app import BuiltApplication
from ray.serve._private.build_app import build_app as build
from ray.serve.config import AutoscalingConfig

from deployments.config import CodecConfig, CodecPlacement, TalkerConfig
from deployments.errors import StartError
from deployments.serving import ray_metrics, ray_private
from serve_app import ingress
from serve_app.app import LONGEST_STREAM_S, build_app, codec_scaling, health_check_s, report_s, talker_scaling
from serve_app.cli.ray_settings import CLUSTER, TUNED
from serve_app.config import (
    AdmissionSettings,
    ApiSettings,
    AppConfig,
    CodecScalingConfig,
    PoolConfig,
    ServedModel,
    TalkerScalingConfig,
)
from serve_app.extensions.jobs import extension


def built(config: AppConfig) -> BuiltApplication:
    application = build_app(config)
    assert isinstance(application, Application)
    return build(application, name="talkray")


def test_the_deployments_behind_the_ingress() -> None:
    application = built(AppConfig(model="embedded"))
    assert {deployment.name for deployment in application.deployments} == {"Ingress", "Codec", "Talker", "Jobs"}
    assert application.ingress_deployment_name == "Ingress"
    others = [deployment for deployment in application.deployments if deployment.name != "Ingress"]
    assert all(callable(deployment.func_or_class.forget) for deployment in others), "as deleting a voice asks of all"


@pytest.mark.parametrize("config", [lambda: AppConfig(model="embedded"), lambda: several()], ids=["one", "several"])
def test_what_is_deployed_again_unchanged_is_the_same(config: Callable[[], AppConfig]) -> None:
    """Serve replaces replicas whose arguments differ."""
    one, other = (
        [repr((item.name, item.init_args, item.init_kwargs)) for item in built(config()).deployments] for _ in range(2)
    )
    assert one == other


def test_a_default_voice_that_the_checkpoint_does_not_have_is_found_at_the_start() -> None:
    for voice in ("hugo", "Nora", "alloy"):
        build_app(AppConfig(model="embedded", api=ApiSettings(default_voice=voice)))
    unknown = ApiSettings(default_voice="vivian")
    with pytest.raises(
        StartError, match=r"api.default_voice: 'vivian' is not a voice of embedded; set one of nora, felix"
    ):
        build_app(AppConfig(model="embedded", api=unknown))
    build_app(AppConfig(model="/no/such/folder", api=unknown))  # on other nodes; /ready says it there


def test_a_talker_has_a_codec_decoder_where_a_stream_may_ask_it_for_audio() -> None:
    one, many = {}, {}
    for placement in ("inline", "hybrid", "pool"):
        config = AppConfig(model="embedded", codec=CodecConfig(placement=placement))
        one[placement] = talkers(config)["Talker"]
        models = tuple(ServedModel(name=name, model="embedded", placement=own) for name, own in PLACED.items())
        many[placement] = talkers(AppConfig(models=models, codec=config.codec))
    assert one == {"inline": True, "hybrid": True, "pool": False}
    told = {"Talker-inline": True, "Talker-hybrid": True, "Talker-pool": False}
    assert many == {own: {**told, "Talker-else": makes_audio} for own, makes_audio in one.items()}


PLACED: dict[str, CodecPlacement | None] = {"inline": "inline", "hybrid": "hybrid", "pool": "pool", "else": None}


def talkers(config: AppConfig) -> dict[str, bool]:
    """Which deployments of talkers are told to make audio."""
    found = (item for item in built(config).deployments if item.name.startswith("Talker"))
    return {item.name: item.init_kwargs["makes_audio"] for item in found}


def test_an_ingress_replica_outlasts_its_streams() -> None:
    deployments = built(AppConfig(model="embedded")).deployments
    drains = {item.name: item._deployment_config.graceful_shutdown_timeout_s for item in deployments}
    assert drains["Ingress"] == LONGEST_STREAM_S
    assert drains["Codec"] == drains["Talker"] < LONGEST_STREAM_S
    drain_s = float(CLUSTER["RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S"])
    assert LONGEST_STREAM_S < drain_s < float(TUNED["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"])


SCALED = AppConfig(
    model="embedded",
    talker=TalkerConfig(max_num_seqs=16),
    talker_pool=PoolConfig(replicas=9),
    talker_scaling=TalkerScalingConfig(min_replicas=2, max_replicas=5),
    codec_scaling=CodecScalingConfig(max_replicas=7),
)


def policy_of(scaling: AutoscalingConfig) -> object:
    """The policy as the controller makes it, from what is sent there."""
    policy = pickle.loads(pickle.dumps(scaling)).policy
    return policy.get_policy()(**policy.policy_kwargs)


def test_the_controller_hears_no_more_of_a_larger_pool() -> None:
    small, large, larger = (report_s(size, callers=size) for size in (20, 1000, 2000))
    assert small == 0.5
    assert 1000 / large == pytest.approx(2000 / larger)
    assert health_check_s(20) == 2.0
    assert 1000 / health_check_s(1000) == pytest.approx(2000 / health_check_s(2000))


def test_callers_count_for_how_often_a_pool_reports() -> None:
    pools = {"codec_scaling": CodecScalingConfig(max_replicas=2000), "talker_scaling": TalkerScalingConfig()}
    found = {item.name: item for item in built(AppConfig(model="embedded", **pools)).deployments}
    for name, replicas in (("Talker", 4), ("Codec", 2000)):
        config = found[name]._deployment_config
        callers = 2001 if name == "Talker" else 1
        assert config.autoscaling_config is not None
        assert config.autoscaling_config.metrics_interval_s == pytest.approx(report_s(replicas, callers=callers))
        assert config.autoscaling_config.look_back_period_s > config.autoscaling_config.metrics_interval_s
        assert config.health_check_period_s == pytest.approx(health_check_s(replicas))


def test_pools_know_how_many_streams_and_sequences_the_talkers_can_run() -> None:
    codec, talker = codec_scaling(SCALED), talker_scaling(SCALED)
    assert codec is not None
    assert talker is not None
    assert (codec.max_talker_streams, talker.sequences_per_replica) == (5 * 16, 16)
    assert codec_scaling(AppConfig()) is talker_scaling(AppConfig()) is None


@pytest.mark.parametrize(("jobs", "waking"), [({}, ()), ({"jobs": "neither"}, ()), ({"jobs": "wake"}, ("nora",))])
def test_a_job_starts_talkers_only_of_models_that_say_so(jobs: dict[str, str], waking: tuple[str, ...]) -> None:
    scaling = {"min_replicas": 0, **jobs}
    models = [{"name": "nora", "model": "embedded", "talker_scaling": scaling}, {"name": "otto", "model": "embedded"}]
    assert extension.deploy(AppConfig.model_validate({"models": models}), ()).arguments[2] == (*waking, "otto")


TORCH = "torch transformers"


@pytest.mark.parametrize(
    ("code", "foreign"),
    [
        ("import serve_app.ingress", TORCH),
        ("import serve_app.cli.serve.local_server", TORCH),
        # Composing too, not only importing.
        ("import serve_app.app as app, serve_app.config; app.build_app(serve_app.config.AppConfig())", TORCH),
        # The command line applies its settings before Ray is imported.
        ("import serve_app.cli.main", f"{TORCH} ray"),
        # Policies need nothing but the standard library: they are sent by value.
        ("import serve_app.scaling.policies", "torch numpy pydantic ray"),
    ],
)
def test_what_imports_leave_out(code: str, foreign: str) -> None:
    check = f"{code}; import sys; assert not {{*{foreign.split()}}} & {{*sys.modules}}"
    subprocess.run([sys.executable, "-c", check], check=True)


def several(**more: Any) -> AppConfig:
    """Two released models, whose files need not be here, and the embedded voice."""
    models = [{"name": kind, "model": f"Qwen/Qwen3-TTS-12Hz-1.7B-{kind}"} for kind in ("CustomVoice", "Base")]
    return AppConfig.model_validate({"models": [*models, {"name": "nora", "model": "embedded"}], **more})


def test_models_with_the_same_speech_tokenizer_share_a_codec_pool() -> None:
    application = built(several())
    by_name = {item.name: item for item in application.deployments}
    talkers, codecs = {"Talker-CustomVoice", "Talker-Base", "Talker-nora"}, {"Codec-CustomVoice", "Codec-nora"}
    assert set(by_name) == {"Ingress", "Jobs"} | talkers | codecs
    source, _, handles, placements, _, pool = by_name["Codec-CustomVoice"].init_args
    assert pool == "CustomVoice"
    assert source == "Qwen/Qwen3-TTS-12Hz-1.7B-Base"  # which alone has the encoder of recordings
    names = {name: handle.deployment_name for name, handle in handles.items()}
    assert names == {"CustomVoice": "Talker-CustomVoice", "Base": "Talker-Base"}
    assert placements == dict.fromkeys(("CustomVoice", "Base"), "pool")  # their talkers have no GPU to share
    on_gpu = {item.name: item for item in built(several(talker_pool={"num_gpus": 0.5})).deployments}
    assert set(on_gpu["Codec-CustomVoice"].init_args[3].values()) == {"hybrid"}
    first, second, other = several().models
    for first_gpus, of_all in ((0.0, 0.5), (0.5, 0.0)):
        own = first.model_copy(update={"talker_pool": PoolConfig(num_gpus=first_gpus)})
        mixed = several(talker_pool={"num_gpus": of_all}).model_copy(update={"models": (own, second, other)})
        mixed_by_name = {item.name: item for item in built(mixed).deployments}
        placed = mixed_by_name["Codec-CustomVoice"].init_args[3].values()
        on_gpus = [each.on_gpu for each in mixed_by_name["Ingress"].init_args[1][:2]]
        assert on_gpus == [placement == "hybrid" for placement in placed] == [first_gpus > 0, of_all > 0]
    on_cpu = built(several(talker_pool={"num_gpus": 0.5}, talker={"device": "cpu"})).deployments
    [models] = [item.init_args[1] for item in on_cpu if item.name == "Ingress"]
    assert not any(each.on_gpu for each in models)
    _, models, _ = by_name["Ingress"].init_args
    assert [(each.name, each.codec.deployment_name, each.inline_talker) for each in models] == [
        ("CustomVoice", "Codec-CustomVoice", None),
        ("Base", "Codec-CustomVoice", None),
        ("nora", "Codec-nora", None),
    ]


def test_one_of_several_codec_pools_has_its_name_in_its_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SimpleNamespace(
        _deployment_config=SimpleNamespace(max_ongoing_requests=256), deployment="Codec", replica_tag="1"
    )
    monkeypatch.setattr(serve, "get_replica_context", lambda: settings)
    monkeypatch.setattr(ray_private, "this_replica", lambda: None)
    named: list[str] = []
    monkeypatch.setattr(ray_metrics, "install", lambda name, pool: named.append(f"{name} {pool}"))
    [pool] = [item for item in built(several()).deployments if item.name == "Codec-nora"]
    pool.func_or_class(*pool.init_args)
    assert named == ["nora codec"]


def test_a_single_codec_pool_keeps_its_name_and_follows_all_talkers() -> None:
    config = several(codec_scaling={}, talker={"max_num_seqs": 4})
    first, second, _ = config.models
    own: dict[str, Any] = {"placement": "inline", "talker_scaling": TalkerScalingConfig(max_replicas=3)}
    own |= {"admission": AdmissionSettings(max_late_s=0.5), "talker": TalkerConfig(max_num_seqs=2)}
    second = second.model_copy(update=own)
    by_name = {item.name: item for item in built(config.model_copy(update={"models": (first, second)})).deployments}
    assert set(by_name) == {"Ingress", "Talker-CustomVoice", "Talker-Base", "Codec", "Jobs"}
    assert by_name["Codec"].init_args[4:] == (0.5, "")  # it is as patient as the most patient model
    assert by_name["Codec"].max_ongoing_requests == 3 * 16, "of the model that it decodes"
    scaling = by_name["Codec"]._deployment_config.autoscaling_config
    assert policy_of(scaling)._settings.max_talker_streams == 4 * 1 + 2 * 3  # type: ignore[attr-defined]
    _, models, _ = by_name["Ingress"].init_args
    assert models[0].inline_talker is None
    assert models[1].inline_talker.deployment_name == "Talker-Base"  # the ingress asks it itself
    assert [(each.admission.max_late_s, each.config.max_num_seqs) for each in models] == [(0.25, 4), (0.5, 2)]
    assert [by_name[f"Talker-{each.name}"].init_args[1] for each in models] == [each.config for each in models]
    swapped = built(config.model_copy(update={"models": (second, first)})).deployments
    [placement] = [item.init_args[1].placement for item in swapped if item.name == "Codec"]
    assert placement == "pool", "of the one that it decodes, whichever comes first"


@pytest.mark.parametrize("num_gpus", [0.0, 0.5])
def test_auto_looks_for_a_model_for_its_device(num_gpus: float, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, object]] = []
    found = SimpleNamespace(model="embedded")
    monkeypatch.setattr("serve_app.app.resolve_auto", lambda model, **where: asked.append(where) or found)
    build_app(AppConfig(models_dir=Path("mine"), talker_pool=PoolConfig(num_gpus=num_gpus)))
    assert asked[0] == {"models_dir": Path("mine"), "gpu": num_gpus > 0}


def test_the_default_voice_may_be_any_models() -> None:
    """Checked once all checkpoints are here: /ready says it on the other nodes."""
    here = [{"name": "nora", "model": "embedded"}, {"name": "other", "model": "embedded"}]
    partly = [*here, {"name": "away", "model": "/no/such/folder"}]
    build_app(AppConfig.model_validate({"models": partly, "api": {"default_voice": "ghost"}}))
    build_app(AppConfig.model_validate({"models": here, "api": {"default_voice": "hugo"}}))
    with pytest.raises(StartError, match="'ghost' is not a voice of embedded; set one of") as refused:
        build_app(AppConfig.model_validate({"models": here, "api": {"default_voice": "ghost"}}))
    assert str(refused.value).count("nora") == 1, "voices of two models are listed once"


@pytest.mark.anyio
async def test_ingress_and_jobs_tell_the_pools_what_to_forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each replica of these two follows the store by itself."""
    told: list[str] = []

    async def ask(handle: str, method: str, voices: tuple[bytes, ...]) -> None:
        told.append(f"{handle} {method} {voices}")

    running = SimpleNamespace(running=1)
    pools = dict.fromkeys(("Ingress", "Jobs", "Talker", "Codec"), running) | {"Asleep": SimpleNamespace(running=0)}
    monkeypatch.setattr(ingress.ray_private, "pools", lambda _: pools)
    monkeypatch.setattr(ingress.serve, "get_replica_context", lambda: SimpleNamespace(deployment="Jobs"))
    monkeypatch.setattr(ingress.serve, "get_deployment_handle", lambda name, _: name)
    monkeypatch.setattr(ingress, "call_all_replicas", ask)
    await ingress.forget_everywhere("app", (b"gone",))
    assert told == ["Talker forget (b'gone',)", "Codec forget (b'gone',)"]
