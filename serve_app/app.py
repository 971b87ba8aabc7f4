"""The composition: three plain classes become three deployments that hold each other's handles."""

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig, RequestRouterConfig

from deployments.codec.deployment import CodecReplica
from deployments.serving.routing import LeastBusy
from deployments.talker.deployment import TalkerReplica
from deployments.weights.store import choose, speakers
from serve_app.api.catalogue import check_default
from serve_app.config import AppConfig, PoolConfig
from serve_app.ingress import Ingress
from serve_app.scaling.policies import Bounds, CodecPolicy, CodecScaling, TalkerPolicy, TalkerScaling

# How long a talker or a codec replica that is taken away may finish the streams that no other replica continues. It is
# more than the longest utterance takes.
_DRAIN_S = 120.0
# How long an ingress replica that is taken away may finish its streams, because no other replica can continue them. The
# longest text of one request, 8,192 characters, takes about as long to speak. Time-outs of a cluster are longer.
LONGEST_STREAM_S = 600.0
# How often such a replica looks whether its streams have ended. Pools stop one after the other.
_DRAIN_POLL_S = 0.5
# How often the controller checks each replica. Three failed checks replace a replica, so a replica whose engine has
# died refuses requests for about six seconds. A large pool is checked less often, as one replica matters less there.
_HEALTH_CHECK_S = 2.0
_HEALTH_CHECKS_PER_S = 200.0  # of one pool
# A replica that does not answer a check in this time hangs. Its streams have moved to other replicas before.
_HEALTH_CHECK_TIMEOUT_S = 5.0

# How often replicas and handles report their load. The controller reads the reports every 0.1 s, in one thread, so each
# replica of a large pool reports less often (docs/scaling.md).
_REPORT_S = 0.5
_REPORTS_PER_S = 500.0  # of one pool


def build_app(config: AppConfig) -> Application:
    """Ingress -> Codec -> Talker. `serve run` and `serve deploy` pass the `args` of their config file.

    Raises StartError where a setting cannot be right.
    """
    model = choose(config.model, models_dir=config.models_dir, gpu=config.talker_pool.num_gpus > 0).model
    if (known := speakers(model)) is not None:
        check_default(config.api, model, known)
    ingresses = config.ingress_pool.replicas
    talker_options = options(
        config.talker_pool,
        config.talker_requests,
        policy=TalkerPolicy,
        scaling=talker_scaling(config),
        callers=ingresses + (config.codec_scaling.max_replicas if config.codec_scaling else config.codec_pool.replicas),
    )
    codec_options = options(
        config.codec_pool, config.codec_requests, policy=CodecPolicy, scaling=codec_scaling(config), callers=ingresses
    )
    routing = {"request_router_config": RequestRouterConfig(request_router_class=LeastBusy)}
    talker = serve.deployment(name="Talker", **talker_options, **routing)(TalkerReplica).bind(model, config.talker)
    codec = serve.deployment(name="Codec", **codec_options, **routing)(CodecReplica)
    decoder = codec.bind(model, config.codec, talker)
    refusal = {"backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1)}
    drain = {"graceful_shutdown_timeout_s": LONGEST_STREAM_S}
    ingress_options = options(config.ingress_pool, config.ingress_requests) | refusal | drain
    ingress = serve.deployment(name="Ingress", **ingress_options)(serve.ingress()(Ingress))
    # With `inline` the talker's GPU makes all audio, so the ingress asks the talker itself.
    talker_beside = talker if config.codec.placement == "inline" else None
    return ingress.bind(config.api, decoder, talker_beside)


def talker_scaling(config: AppConfig) -> TalkerScaling | None:
    """The talker policy's parameters, with the sequences that an engine batches."""
    if config.talker_scaling is None:
        return None
    return TalkerScaling(**config.talker_scaling.model_dump(), sequences_per_replica=config.talker.max_num_seqs)


def codec_scaling(config: AppConfig) -> CodecScaling | None:
    """The codec policy's parameters, with the streams that the talker pool can run at its largest."""
    if config.codec_scaling is None:
        return None
    talkers = config.talker_scaling.max_replicas if config.talker_scaling else config.talker_pool.replicas
    most = float(talkers * config.talker.max_num_seqs)
    return CodecScaling(**config.codec_scaling.model_dump(), max_talker_streams=most)


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
    policy: type[TalkerPolicy] | type[CodecPolicy] | None = None,
    scaling: Bounds | None = None,
    callers: int = 0,
) -> dict[str, Any]:
    """A pool's settings under Serve's names. `callers`: how many replicas of other pools call this one."""
    return {
        **(
            {"num_replicas": pool.replicas}
            if scaling is None
            else {"autoscaling_config": _scaled(pool, policy, scaling, callers)}
        ),
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


def _scaled(pool: PoolConfig, policy: type[Any] | None, scaling: Bounds, callers: int) -> AutoscalingConfig:
    """Serve adds no delay and no factor of its own: the policy is the one that waits."""
    interval_s = report_s(scaling.max_replicas, callers=callers)
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
        max_replicas=scaling.max_replicas,
        metrics_interval_s=interval_s,
        look_back_period_s=2 * interval_s,  # Serve averages queues over it, and wants it to be more than the interval
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=asdict(scaling)),
    )
