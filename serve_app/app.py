"""Composition of the application: binds plain classes to Ray Serve deployments, which hold each other's handles."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pkgutil import resolve_name
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from deployments.codec.deployment import CodecReplica
from deployments.serving.handles import LeastBusy
from deployments.talker.deployment import TalkerReplica
from deployments.weights.choice import resolve_auto, speech_tokenizer_key
from deployments.weights.description import clones, speakers
from serve_app.api.catalogue import check_default
from serve_app.api.routing import dialects_of
from serve_app.config import AppConfig, PoolConfig
from serve_app.extension import DeploymentSpec
from serve_app.extensions import load_extensions
from serve_app.ingress import Ingress
from serve_app.scaling.policies import CodecPolicy, CodecScaling, TalkerPolicy, TalkerScaling
from serve_app.speech.replica_synthesizer import Deployed

# Seconds that a talker or codec replica is given, before removal, to finish streams that no other replica can continue.
# The longest utterance takes less time.
_DRAIN_S = 120.0
# Seconds that an ingress replica is given, before removal, to finish its streams, because no other replica can continue
# them. Speaking the longest text allowed in one request, 8,192 characters, takes about this long. Cluster timeouts are
# longer.
LONGEST_STREAM_S = 600.0
# Interval at which a replica that is being removed checks whether its streams have ended. Pools stop one after another.
_DRAIN_POLL_S = 0.5
# Interval at which the controller checks each replica. Serve replaces a replica after three failed checks, so a replica
# whose engine has died rejects requests for about six seconds. Large pools are checked less often, because each replica
# matters less.
_HEALTH_CHECK_S = 2.0
_HEALTH_CHECKS_PER_S = 200.0  # per pool
# A replica that does not answer a check within this time counts as hung. By then its streams have moved to other
# replicas.
_HEALTH_CHECK_TIMEOUT_S = 5.0

# Interval at which replicas and handles report their load. The controller reads the reports every 0.1 s in one thread,
# so replicas of a large pool report less often (docs/scaling.md).
_REPORT_S = 0.5
_REPORTS_PER_S = 500.0  # per pool

# Serve's access log has a line for each call between replicas. Serve writes a thousand lines at once in the event loop,
# which delays all streams of the replica by 80 ms. `talkray serve` and the records extension log requests instead.
_LOGGING = {"enable_access_log": False}

_ROUTING = {"request_router_config": RequestRouterConfig(request_router_class=LeastBusy)}


def build_app(config: AppConfig) -> Application:
    """Compose the application. Requests pass Ingress -> Codec -> Talker, or Ingress -> Talker. The Jobs deployment
    sends requests the same way as an ingress.

    `serve run` and `serve deploy` pass the `args` of their config file.

    If there are several models, each has its own talkers. Models with the same speech tokenizer share a codec pool.
    `single` is the configuration of a model as if it were the only one. Raises StartError for invalid settings.
    """
    configs = {name: _resolve_checkpoint(single) for name, single in config.by_model().items()}
    _check_default_voice(config, [single.model for single in configs.values()])
    models = tuple(_bind_models(config, configs))
    refusal = {"backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1)}
    drain = {"graceful_shutdown_timeout_s": LONGEST_STREAM_S}
    ingress_options = options(config.ingress_pool, config.ingress_requests) | refusal | drain
    ingress = serve.deployment(name="Ingress", **ingress_options)(serve.ingress()(Ingress))
    extensions = load_extensions(config.api.extensions)
    dialects_of(extensions)  # raises if two extensions share a route, before replicas start
    added = {each.name: _bind_extension(each.deploy(config, models)) for each in extensions if each.deploy is not None}
    return ingress.bind(config.api, models, added)


def _bind_extension(spec: DeploymentSpec) -> Application:
    deployed = serve.deployment(name=spec.name, **options(spec.pool, spec.max_ongoing_requests))
    return deployed(resolve_name(spec.replica)).bind(*spec.arguments)


def _resolve_checkpoint(single: AppConfig) -> AppConfig:
    """Replace `auto` with an actual checkpoint."""
    model = resolve_auto(single.model, models_dir=single.models_dir, gpu=single.talker_pool.num_gpus > 0).model
    return single.model_copy(update={"model": model})


def _check_default_voice(config: AppConfig, models: list[str]) -> None:
    """Check `api.default_voice` against the checkpoints, if all of them are on this node."""
    known = [speakers(model) for model in models]
    if all(voices is not None for voices in known):
        named = list(dict.fromkeys(voice for voices in known for voice in voices or ()))
        check_default(config.api, ", ".join(dict.fromkeys(models)), named, clones=any(map(clones, models)))


def _talker(config: AppConfig, name: str, single: AppConfig) -> Application:
    codecs = config.codec_scaling.max_replicas if config.codec_scaling else config.codec_pool.replicas
    talker_options = options(
        single.talker_pool,
        single.talker_requests,
        scaling=talker_scaling(single),
        callers=config.ingress_pool.replicas + codecs,
    )
    deployment = serve.deployment(name=_of_model("Talker", name), **talker_options, **_ROUTING)(TalkerReplica)
    return deployment.bind(single.model, single.talker, name, makes_audio=single.codec.placement != "pool")


def _bind_models(config: AppConfig, configs: Mapping[str, AppConfig]) -> Iterator[Deployed]:
    """Yield the models with their pools. If there are several codec pools, each is named after its first model."""
    talkers = {name: _talker(config, name, single) for name, single in configs.items()}
    tokenizers = {
        name: speech_tokenizer_key(single.model) if name else "" for name, single in configs.items()
    }  # may read files
    pools: dict[str, tuple[str, Application]] = {}
    for name, tokenizer in tokenizers.items():
        if tokenizer not in pools:
            shares = {other: configs[other] for other in configs if tokenizers[other] == tokenizer}
            pool = name if len(shares) < len(configs) else ""
            pools[tokenizer] = _of_model("Codec", pool), _codec(config, pool, shares, talkers)
    for name, single in configs.items():
        codec_name, codec = pools[tokenizers[name]]
        yield Deployed(
            name=name,
            checkpoint=single.model,
            config=single.talker,
            on_gpu=_on_gpu(single),
            admission=single.api.admission,
            deployments=(_of_model("Talker", name), codec_name),
            codec=codec,  # Serve replaces applications with handles
            inline_talker=talkers[name] if single.codec.placement == "inline" else None,
        )


def _codec(
    config: AppConfig, pool: str, configs: Mapping[str, AppConfig], talkers: Mapping[str, Application]
) -> Application:
    """Bind the codec pool of these models. The pool loads a Base checkpoint if there is one, because only Base models
    need the encoder for recordings. `pool`: name of the pool, or empty for a single pool.
    """
    codec_options = options(
        config.codec_pool,
        max(single.codec_requests for single in configs.values()),
        scaling=codec_scaling(config, configs.values()),
        callers=config.ingress_pool.replicas,
    )
    deployment = serve.deployment(name=_of_model("Codec", pool), **codec_options, **_ROUTING)(CodecReplica)
    placements = {model: single.codec.placement for model, single in configs.items()}
    for model, single in configs.items():
        if model and placements[model] == "hybrid" and not _on_gpu(single):
            placements[model] = "pool"
    source = next(
        (single.model for single in configs.values() if clones(single.model)), next(iter(configs.values())).model
    )
    decodes = next((placement for placement in placements.values() if placement != "inline"), "inline")
    settings = config.codec.model_copy(update={"placement": decodes})
    handles = {model: talkers[model] for model in configs}
    # The talkers of a single model report their placement. With several models, such a call would start pools at zero.
    known = {model: placement for model, placement in placements.items() if model}
    patience_s = max(single.api.admission.max_late_s for single in configs.values())
    return deployment.bind(source, settings, handles, known, patience_s, pool)


def _on_gpu(single: AppConfig) -> bool:
    return single.talker.device != "cpu" and single.talker_pool.num_gpus > 0


def _of_model(deployment: str, model: str) -> str:
    """Return a deployment's name, followed by the model's name if there are several models. `pool_watch.pool_of` parses
    the name.
    """
    return f"{deployment}-{model}" if model else deployment


def talker_scaling(config: AppConfig) -> TalkerScaling | None:
    """Return the talker policy's parameters, including the engine's batch size."""
    if config.talker_scaling is None:
        return None
    return TalkerScaling(**config.talker_scaling.model_dump(), sequences_per_replica=config.talker.max_num_seqs)


def codec_scaling(config: AppConfig, sharing: Iterable[AppConfig] | None = None) -> CodecScaling | None:
    """Return the codec policy's parameters, including how many streams the talker pools that share it can run at
    maximum size.
    """
    if config.codec_scaling is None:
        return None
    return CodecScaling(
        **config.codec_scaling.model_dump(), max_talker_streams=sum(map(_most_streams, sharing or (config,)))
    )


def _most_streams(single: AppConfig) -> float:
    talkers = single.talker_scaling.max_replicas if single.talker_scaling else single.talker_pool.replicas
    return float(talkers * single.talker.max_num_seqs)


def report_s(replicas: int, *, callers: int) -> float:
    """Return the seconds between load reports from a pool's replicas and callers. The interval grows with the number of
    both.
    """
    return max(_REPORT_S, (replicas + callers) / _REPORTS_PER_S)


def health_check_s(replicas: int) -> float:
    """Return the seconds between health checks of each replica. The interval grows with the number of replicas."""
    return max(_HEALTH_CHECK_S, replicas / _HEALTH_CHECKS_PER_S)


def options(
    pool: PoolConfig,
    max_ongoing_requests: int,
    *,
    scaling: TalkerScaling | CodecScaling | None = None,
    callers: int = 0,
) -> dict[str, Any]:
    """Return a pool's settings under Ray Serve's option names. `callers`: number of replicas that call this pool."""
    if scaling is None:
        size: dict[str, Any] = {"num_replicas": pool.replicas}
    else:
        size = {"autoscaling_config": _scaled(pool, scaling, callers)}
    return {
        **size,
        "max_ongoing_requests": max_ongoing_requests,
        "max_queued_requests": pool.max_queued_requests,
        "graceful_shutdown_timeout_s": _DRAIN_S,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "health_check_period_s": health_check_s(pool.replicas if scaling is None else scaling.max_replicas),
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_S,
        "logging_config": _LOGGING,
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            **({"label_selector": pool.label_selector} if pool.label_selector else {}),
        },
    }


def _scaled(pool: PoolConfig, scaling: TalkerScaling | CodecScaling, callers: int) -> AutoscalingConfig:
    """Return the autoscaling options. Serve's delays and factors are disabled, because the policy smooths the load."""
    policy = TalkerPolicy if isinstance(scaling, TalkerScaling) else CodecPolicy
    interval_s = report_s(scaling.max_replicas, callers=callers)
    # Policies read the bounds from Serve, so the bounds can change without a new policy.
    settings = {name: value for name, value in asdict(scaling).items() if name not in ("min_replicas", "max_replicas")}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
        max_replicas=scaling.max_replicas,
        metrics_interval_s=interval_s,
        look_back_period_s=2 * interval_s,  # Serve averages queues over this period, which must exceed the interval
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=settings),
    )
