"""The composition: three plain classes become three deployments that hold each other's handles."""

from dataclasses import asdict
from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy, BackpressureConfig

from deployments.codec.deployment import CodecReplica
from deployments.model_store import choose
from deployments.talker.deployment import TalkerReplica
from serve_app.autoscaling import Bounds, CodecPolicy, CodecScaling, TalkerPolicy, TalkerScaling
from serve_app.config import AppConfig, PoolConfig
from serve_app.ingress import Ingress

# Above the longest utterance: a talker or a codec replica that is taken away finishes what it speaks, if no other one
# goes on with it.
_DRAIN_S = 120.0
# Of a whole response: 8,192 characters, the most that one request is spoken in, are about as long. Nobody goes on
# with a stream for an ingress replica: one that is taken away finishes. Time-outs of a cluster are longer.
LONGEST_STREAM_S = 600.0
# How often it looks whether it has finished; pools stop one after the other.
_DRAIN_POLL_S = 0.5
# Three failures replace a replica: one whose engine has died refuses requests for about six seconds.
_HEALTH_CHECK_S = 2.0
# One that answers no health check hangs; its streams have left it long before.
_HEALTH_CHECK_TIMEOUT_S = 5.0


# How often replicas and handles report: the controller looks at the reports every 0.1 s.
_REPORT_S = 0.5
# Serve averages queues over this time, and wants it to be more than the interval.
_LOOK_BACK_S = 1.0


def build_app(config: AppConfig) -> Application:
    """Ingress -> CodecDecoder -> Talker. `serve run` and `serve deploy` pass the `args` of their config file."""
    model = choose(config.model, models_dir=config.models_dir, gpu=config.talker_pool.num_gpus > 0).model
    talker_options = options(
        config.talker_pool, config.talker_requests, policy=TalkerPolicy, scaling=talker_scaling(config)
    )
    codec_options = options(config.codec_pool, config.codec_requests, policy=CodecPolicy, scaling=codec_scaling(config))
    talker = serve.deployment(name="Talker", **talker_options)(TalkerReplica).bind(model, config.talker)
    codec = serve.deployment(name="CodecDecoder", **codec_options)(CodecReplica)
    decoder = codec.bind(model, config.codec, talker)
    refusal = {"backpressure_config": BackpressureConfig(status_code=429, retry_after_s=1)}
    drain = {"graceful_shutdown_timeout_s": LONGEST_STREAM_S}
    ingress_options = options(config.ingress_pool, config.ingress_requests) | refusal | drain
    ingress = serve.deployment(name="Ingress", **ingress_options)(serve.ingress()(Ingress))
    # Audio that the talker's GPU makes to the end takes no way round by the codec pool.
    return ingress.bind(config.api, decoder, talker if config.codec.placement == "inline" else None)


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


def options(
    pool: PoolConfig,
    max_ongoing_requests: int,
    *,
    policy: type[TalkerPolicy] | type[CodecPolicy] | None = None,
    scaling: Bounds | None = None,
) -> dict[str, Any]:
    """A pool's settings under the names that Serve gives them."""
    return {
        **(
            {"num_replicas": pool.replicas}
            if scaling is None
            else {"autoscaling_config": _scaled(pool, policy, scaling)}
        ),
        "max_ongoing_requests": max_ongoing_requests,
        "max_queued_requests": pool.max_queued_requests,
        "graceful_shutdown_timeout_s": _DRAIN_S,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "health_check_period_s": _HEALTH_CHECK_S,
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_S,
        "ray_actor_options": {
            "num_cpus": pool.num_cpus,
            "num_gpus": pool.num_gpus,
            **({"label_selector": pool.label_selector} if pool.label_selector else {}),
        },
    }


def _scaled(pool: PoolConfig, policy: type[Any] | None, scaling: Bounds) -> AutoscalingConfig:
    """Serve adds no delay and no factor of its own: the policy is the one that waits."""
    return AutoscalingConfig(
        min_replicas=scaling.min_replicas,
        initial_replicas=min(max(pool.replicas, scaling.min_replicas), scaling.max_replicas),
        max_replicas=scaling.max_replicas,
        metrics_interval_s=_REPORT_S,
        look_back_period_s=_LOOK_BACK_S,
        upscale_delay_s=0,
        downscale_delay_s=0,
        policy=AutoscalingPolicy(policy_function=policy, policy_kwargs=asdict(scaling)),
    )
