"""The composition: three plain classes become three deployments that hold each other's handles."""

from typing import Any

from ray import serve
from ray.serve import Application

from deployments.codec.deployment import CodecDecoder
from deployments.talker.deployment import Talker
from serve_app.config import AppConfig, PoolConfig
from serve_app.ingress import Ingress
from serve_app.model_choice import choose

# Above the longest utterance: a replica that is taken away finishes what it speaks.
_DRAIN_S = 120.0
# How often it looks whether it has finished; pools stop one after the other.
_DRAIN_POLL_S = 0.5
# Three failures replace a replica: one whose engine has died refuses requests for about six seconds.
_HEALTH_CHECK_S = 2.0
# One that answers no health check hangs; its streams have left it long before.
_HEALTH_CHECK_TIMEOUT_S = 5.0


def build_app(config: AppConfig) -> Application:
    """Ingress -> CodecDecoder -> Talker. `serve run` and `serve deploy` pass the `args` of their config file."""
    model = choose(config.model, models_dir=config.models_dir, gpu=config.talker_pool.num_gpus > 0).model
    talker = serve.deployment(name="Talker", **options(config.talker_pool))(Talker).bind(model, config.talker)
    codec = serve.deployment(name="CodecDecoder", **options(config.codec_pool))(CodecDecoder)
    decoder = codec.bind(model, config.codec, talker)
    ingress = serve.deployment(name="Ingress", **options(config.ingress_pool))(serve.ingress()(Ingress))
    return ingress.bind(config.api, decoder)


def options(pool: PoolConfig) -> dict[str, Any]:
    """A pool's settings under the names that Serve gives them."""
    return {
        "num_replicas": pool.replicas,
        "max_ongoing_requests": pool.max_ongoing_requests,
        "max_queued_requests": pool.max_queued_requests,
        "graceful_shutdown_timeout_s": _DRAIN_S,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
        "health_check_period_s": _HEALTH_CHECK_S,
        "health_check_timeout_s": _HEALTH_CHECK_TIMEOUT_S,
        "ray_actor_options": {"num_cpus": pool.num_cpus, "num_gpus": pool.num_gpus},
    }
