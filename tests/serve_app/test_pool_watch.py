from typing import Any

from ray.core.generated.common_pb2 import ActorDeathCause, ActorDiedErrorContext, OomContext

from serve_app.pool_watch import deaths


def dead(name: str, reason: str | None = "WORKER_DIED") -> dict[str, Any]:
    if reason is None:
        return {"Name": name, "DeathCause": ActorDeathCause(oom_context=OomContext())}
    context = ActorDiedErrorContext(reason=ActorDiedErrorContext.Reason.Value(reason))
    return {"Name": name, "DeathCause": ActorDeathCause(actor_died_error_context=context)}


def test_who_died_is_counted_by_pool() -> None:
    actors = [
        dead("SERVE_REPLICA::talkray#Ingress#a1"),
        dead("SERVE_REPLICA::talkray#Talker#b2", "NODE_DIED"),
        dead("SERVE_REPLICA::talkray#Talker#c3", None),
        dead("SERVE_PROXY_ACTOR-0f"),
    ]
    assert deaths(actors, "talkray") == {"ingress": 1, "talker": 2, "proxy": 1}


def test_who_was_stopped_did_not_die() -> None:
    stopped = [dead("SERVE_REPLICA::talkray#Ingress#a1", reason) for reason in ("RAY_KILL", "OUT_OF_SCOPE")]
    assert not deaths(stopped, "talkray")


def test_other_actors_do_not_count() -> None:
    names = ("", "Listener", "SERVE_REPLICA::other#Talker#x", "SERVE_REPLICA::talkray#Else#x", "SERVE_CONTROLLER_ACTOR")
    assert not deaths(map(dead, names), "talkray")
