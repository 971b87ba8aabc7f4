"""The composition: plain classes become deployments that hold each other's handles."""

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
from deployments.weights.description import clones, speakers, tokenizer_of
from deployments.weights.store import resolve_auto
from serve_app.api.catalogue import check_default
from serve_app.api.routing import dialects_of
from serve_app.config import AppConfig, PoolConfig
from serve_app.extension import DeploymentSpec
from serve_app.extensions import load_extensions
from serve_app.ingress import Ingress
from serve_app.scaling.policies import CodecPolicy, CodecScaling, TalkerPolicy, TalkerScaling
from serve_app.speech.replica_synthesizer import Deployed

# How long a talker or codec replica that is being removed may take to finish the streams that no other replica can
# continue. This is longer than the longest utterance takes.
_DRAIN_S = 120.0
# How long an ingress replica that is being removed may take to finish its streams, because no other replica can
# continue them. The longest text of one request, 8,192 characters, takes about this long to speak. Timeouts of a
# cluster are longer.
LONGEST_STREAM_S = 600.0
# How often such a replica checks whether its streams have ended. Pools stop one after the other.
_DRAIN_POLL_S = 0.5
# How often the controller checks each replica. Three failed checks replace a replica, so a replica whose engine has
# died refuses requests for about six seconds. A large pool is checked less often, as one replica matters less there.
_HEALTH_CHECK_S = 2.0
_HEALTH_CHECKS_PER_S = 200.0  # of one pool
# A replica that does not answer a check within this time counts as hung. Its streams have moved to other replicas by
# then.
_HEALTH_CHECK_TIMEOUT_S = 5.0

# How often replicas and handles report their load. The controller reads the reports every 0.1 s, in one thread, so each
# replica of a large pool reports less often (docs/scaling.md).
_REPORT_S = 0.5
_REPORTS_PER_S = 500.0  # of one pool

_ROUTING = {"request_router_config": RequestRouterConfig(request_router_class=LeastBusy)}


def build_app(config: AppConfig) -> Application:
    """Requests for speech pass Ingress -> Codec -> Talker, or Ingress -> Talker. Jobs sends them as an ingress does.

    `serve run` and `serve deploy` pass the `args` of their config file.

    If there are several models, each has its own talkers; those with the same speech tokenizer share a codec pool.
    Below, `own` is a model's configuration as if it were the only one. Raises StartError if a setting cannot be right.
    """
    configs = {name: _chosen(own) for name, own in config.by_model().items()}
    _check_default_voice(config, [own.model for own in configs.values()])
    models = tuple(_deployed(config, configs))
    refusal = {"backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1)}
    drain = {"graceful_shutdown_timeout_s": LONGEST_STREAM_S}
    ingress_options = options(config.ingress_pool, config.ingress_requests) | refusal | drain
    ingress = serve.deployment(name="Ingress", **ingress_options)(serve.ingress()(Ingress))
    extensions = load_extensions(config.api.extensions)
    dialects_of(extensions)  # a route of two extensions fails here, before any replica starts
    added = {each.name: _added(each.deploy(config, models)) for each in extensions if each.deploy is not None}
    return ingress.bind(config.api, models, added)


def _added(spec: DeploymentSpec) -> Application:
    deployed = serve.deployment(name=spec.name, **options(spec.pool, spec.max_ongoing_requests))
    return deployed(resolve_name(spec.replica)).bind(*spec.arguments)


def _chosen(own: AppConfig) -> AppConfig:
    """The configuration with a checkpoint in place of the model `auto`."""
    model = resolve_auto(own.model, models_dir=own.models_dir, gpu=own.talker_pool.num_gpus > 0).model
    return own.model_copy(update={"model": model})


def _check_default_voice(config: AppConfig, models: list[str]) -> None:
    """Check `api.default_voice` against the checkpoints, if all of them are on this node."""
    known = [speakers(model) for model in models]
    if all(voices is not None for voices in known):
        named = list(dict.fromkeys(voice for voices in known for voice in voices or ()))
        check_default(config.api, ", ".join(dict.fromkeys(models)), named, clones=any(map(clones, models)))


def _talker(config: AppConfig, name: str, own: AppConfig) -> Application:
    codecs = config.codec_scaling.max_replicas if config.codec_scaling else config.codec_pool.replicas
    talker_options = options(
        own.talker_pool,
        own.talker_requests,
        scaling=talker_scaling(own),
        callers=config.ingress_pool.replicas + codecs,
    )
    deployment = serve.deployment(name=_of_model("Talker", name), **talker_options, **_ROUTING)(TalkerReplica)
    return deployment.bind(own.model, own.talker, name, makes_audio=own.codec.placement != "pool")


def _deployed(config: AppConfig, configs: Mapping[str, AppConfig]) -> Iterator[Deployed]:
    """The models with their pools. If there are several codec pools, each is named for its first model."""
    talkers = {name: _talker(config, name, own) for name, own in configs.items()}
    tokenizers = {name: tokenizer_of(own.model) if name else "" for name, own in configs.items()}  # it may read files
    pools: dict[str, tuple[str, Application]] = {}
    for name, tokenizer in tokenizers.items():
        if tokenizer not in pools:
            shares = {other: configs[other] for other in configs if tokenizers[other] == tokenizer}
            pool = name if len(shares) < len(configs) else ""
            pools[tokenizer] = _of_model("Codec", pool), _codec(config, pool, shares, talkers)
    for name, own in configs.items():
        codec_name, codec = pools[tokenizers[name]]
        yield Deployed(
            name=name,
            checkpoint=own.model,
            config=own.talker,
            on_gpu=_on_gpu(own),
            admission=own.api.admission,
            deployments=(_of_model("Talker", name), codec_name),
            codec=codec,  # Serve replaces applications with handles
            inline_talker=talkers[name] if own.codec.placement == "inline" else None,
        )


def _codec(
    config: AppConfig, pool: str, configs: Mapping[str, AppConfig], talkers: Mapping[str, Application]
) -> Application:
    """A codec pool for these models, loaded from a Base checkpoint if there is one: the others' recordings to clone
    need no encoder. `pool`: its name if there are several.
    """
    codec_options = options(
        config.codec_pool,
        max(own.codec_requests for own in configs.values()),
        scaling=codec_scaling(config, configs.values()),
        callers=config.ingress_pool.replicas,
    )
    deployment = serve.deployment(name=_of_model("Codec", pool), **codec_options, **_ROUTING)(CodecReplica)
    placements = {model: own.codec.placement for model, own in configs.items()}
    for model, own in configs.items():
        if model and placements[model] == "hybrid" and not _on_gpu(own):
            placements[model] = "pool"
    source = next((own.model for own in configs.values() if clones(own.model)), next(iter(configs.values())).model)
    decodes = next((placement for placement in placements.values() if placement != "inline"), "inline")
    settings = config.codec.model_copy(update={"placement": decodes})
    handles = {model: talkers[model] for model in configs}
    # The talkers of a single model report where they run. With several models, a call would start pools that are at
    # zero.
    known = {model: placement for model, placement in placements.items() if model}
    patience_s = max(own.api.admission.max_late_s for own in configs.values())
    return deployment.bind(source, settings, handles, known, patience_s, pool)


def _on_gpu(own: AppConfig) -> bool:
    return own.talker.device != "cpu" and own.talker_pool.num_gpus > 0


def _of_model(deployment: str, model: str) -> str:
    """A deployment's name, with the model's if there are several, as `pool_watch.pool_of` reads it."""
    return f"{deployment}-{model}" if model else deployment


def talker_scaling(config: AppConfig) -> TalkerScaling | None:
    """The talker policy's parameters, with the sequences that an engine batches."""
    if config.talker_scaling is None:
        return None
    return TalkerScaling(**config.talker_scaling.model_dump(), sequences_per_replica=config.talker.max_num_seqs)


def codec_scaling(config: AppConfig, sharing: Iterable[AppConfig] | None = None) -> CodecScaling | None:
    """The codec policy's parameters, with the streams that the talker pools sharing it can run at full size."""
    if config.codec_scaling is None:
        return None
    return CodecScaling(
        **config.codec_scaling.model_dump(), max_talker_streams=sum(map(_most_streams, sharing or (config,)))
    )


def _most_streams(own: AppConfig) -> float:
    talkers = own.talker_scaling.max_replicas if own.talker_scaling else own.talker_pool.replicas
    return float(talkers * own.talker.max_num_seqs)


def report_s(replicas: int, *, callers: int) -> float:
    """Seconds between two reports of a pool's replicas and callers; they grow with the number of both."""
    return max(_REPORT_S, (replicas + callers) / _REPORTS_PER_S)


def health_check_s(replicas: int) -> float:
    """Seconds between two health checks of each replica of a pool; they grow with the number of replicas."""
    return max(_HEALTH_CHECK_S, replicas / _HEALTH_CHECKS_PER_S)


def options(
    pool: PoolConfig,
    max_ongoing_requests: int,
    *,
    scaling: TalkerScaling | CodecScaling | None = None,
    callers: int = 0,
) -> dict[str, Any]:
    """A pool's settings, keyed by Ray Serve's option names. `callers`: other pools' replicas that call it."""
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
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            **({"label_selector": pool.label_selector} if pool.label_selector else {}),
        },
    }


def _scaled(pool: PoolConfig, scaling: TalkerScaling | CodecScaling, callers: int) -> AutoscalingConfig:
    """Serve's own delays and factors are off: the policy does the smoothing."""
    policy = TalkerPolicy if isinstance(scaling, TalkerScaling) else CodecPolicy
    interval_s = report_s(scaling.max_replicas, callers=callers)
    # Policies take the bounds from Serve, so that the bounds can change without a new policy.
    settings = {name: value for name, value in asdict(scaling).items() if name not in ("min_replicas", "max_replicas")}
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
        max_replicas=scaling.max_replicas,
        metrics_interval_s=interval_s,
        look_back_period_s=2 * interval_s,  # Serve averages queues over it, and requires more than the interval
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=settings),
    )
