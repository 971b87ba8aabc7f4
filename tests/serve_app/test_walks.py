"""Records of random walks through parts that have no server around them."""

import json
import random
from dataclasses import replace
from types import SimpleNamespace

import pytest

from deployments.autoscaling_records import CodecRecord, TalkerRecord
from deployments.serving import metrics
from deployments.serving.ray_private import PROXY, Pool
from deployments.serving.reports import Start, start_key
from serve_app.nodes import notices
from serve_app.scaling import pool_watch
from serve_app.scaling.policies import CodecPolicy, TalkerPolicy
from serve_app.scaling.pool_watch import KnownPools, PoolSnapshot
from tests.clock import Clock
from tests.records import FOLDER, Record

BOUNDS = {"target_use": 0.7, "scale_down_window_s": 20.0, "scale_to_zero_after_s": 31.0}
POLICIES = {
    "talkers": (TalkerPolicy(sequences_per_replica=5.0, trend_horizon_s=4.0, jobs="neither", **BOUNDS), TalkerRecord),
    "codecs": (CodecPolicy(streams_per_replica=7.0, max_talker_streams=40.0, **BOUNDS), CodecRecord),
}


@pytest.mark.parametrize("name", POLICIES)
def test_policies_follow_their_load(name: str) -> None:
    """Load that comes and goes for ten minutes, as Serve's controller shows it; replicas start six seconds late."""
    policy, kind = POLICIES[name]
    record, draw = Record(), random.Random(41)
    running = wanted = 2
    load, due = 0.0, dict[float, int]()
    with record.logs("ray.serve"):
        for tick in range(1500):
            now_s = 50 + tick * 0.4
            if tick % 40 == 0:
                load = draw.choice([0, 0, 0, 1, 3, 9, 14.5, 31, 55])
                jobs = draw.choice([0, 0, 4])
            running = min(running, wanted) if wanted < running else due.pop(now_s, running)
            share = load * draw.uniform(0.9, 1.1) / max(1, running)
            values = {
                "running": min(share, 5), "waiting": max(0, share - 5), "kv_used_ratio": min(1, share / 8),
                "streams": share, "starting": share / 4, "cores": 4, "busy_cores": min(4, share / 3),
                "backlog_s": max(0, share - 9), "background": jobs / max(1, running),
            }  # fmt: skip
            samples = {
                field: {number: [SimpleNamespace(value=values[field])] for number in range(running - tick % 2)}
                | {99: []}
                for field in kind.__dataclass_fields__
            }
            queued = max(0.0, load - 6 * running) / 3 - (tick % 7 == 0)
            context = SimpleNamespace(
                capacity_adjusted_min_replicas=int(tick > 1200), capacity_adjusted_max_replicas=6 if tick < 900 else 4,
                raw_metrics=samples, current_time=now_s, target_num_replicas=wanted, current_num_replicas=running,
                total_queued_requests=queued, total_num_requests=load + jobs + queued,
            )  # fmt: skip
            before, (wanted, rest) = wanted, policy(context)
            if wanted != before or rest:
                record(f"{now_s:.1f} s: load {load:g}, jobs {jobs}, running {running} -> wanted {wanted}")
            if wanted > running and not due:
                due = {50 + (tick + 15) * 0.4: wanted}
    record.check(f"serve-walk-{name}")


def test_pools_as_replicas_know_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers of the controller, notes of others, deaths and starts of three models in random order."""
    record, draw, clock = Record((r'"at_ns": \d+', '"at_ns": 0')), random.Random(7), Clock(100.0)
    monkeypatch.setattr(pool_watch, "time", SimpleNamespace(time=clock, time_ns=lambda: int(clock() * 1e9)))
    for instrument in (metrics.WANTED, metrics.RUNNING, metrics.DIED):
        monkeypatch.setattr(instrument, "record", record.fake(instrument.name))
    models = {"big": ("Talker-big", "Codec"), "small": ("Talker-small", "Codec-small")}
    pools, notes, last = KnownPools("app", models), dict[str, bytes](), None
    names = ("talker big", "talker small", "codec", "codec small", "ingress")
    for step in range(90):
        clock.now_s += draw.choice([0.2, 2.0, 11.0])
        match draw.randrange(5):
            case 0 | 1:
                found = {
                    name: Pool(
                        draw.choice([0, 1, 2, 18]), tuple(f"{name}{n}" for n in range(draw.choice([0, 1, 2, 17])))
                    )
                    for name in names[: draw.randrange(3, 6)]
                }
                seen = PoolSnapshot(
                    found, {name: draw.randrange(1, 4) for name in (*names[:2], PROXY) if draw.random() < 0.2}
                )
                last = draw.choice([seen.note(), last, None])
                record(f"step {step}: note", asks=pools.receive_note(last))
            case 2:
                dead = draw.sample(names, 2)
                record(f"step {step}: dead are the replicas of {dead}")
                pools.update_liveness(lambda actor, dead=dead: not actor.startswith(tuple(dead)))
            case _:
                model = draw.choice(list(models))
                start = Start(
                    clock() - draw.choice([1, 8, 40]),
                    draw.choice(["compiling", "reading weights"]),
                    usual_s=draw.choice([None, 12.5]),
                )
                start = draw.choice(
                    [
                        start,
                        start.ended(clock()),
                        replace(start, failed="no memory"),
                        replace(start.ended(clock()), is_asleep=True),
                    ]
                )
                notes[start_key("app", f"Talker-{model}")] = start.note()
                record(f"step {step}: start of {model}", start)
                for running in (True, False):
                    pools.read_starts(notes.get, running=running)
        told = {
            name: (pools.is_running(name), pools.state(name).as_json(), pools.state(name).ready_in_s) for name in models
        }
        record("  so", ready=pools.is_ready(), sizes=pools.sizes(), **told)
    record.check("serve-walk-pools")


class _Over(Exception):
    pass


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_notices_of_clouds(cloud: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight looks at the metadata: refused, away, quiet, and two notices, of which the first drain fails."""
    record, clock = Record(), Clock(20_000.0)
    answers = json.loads((FOLDER / "notices.json").read_text())[cloud]  # of each look, by the end of the path

    def asked(url: str, headers: dict[str, str], *, method: str = "GET") -> str | None:
        record(f"  {method} {url}", headers)
        answer = answers[min(looks, len(answers) - 1)].get(url.rpartition("/")[2])
        if answer == "away":
            raise notices.MetadataUnreachable(answer)
        return answer

    def drain(notice: notices.Notice) -> None:
        record("  drain", notice, notice.deadline_s)
        if looks == 3:
            raise notices.NotDrained("the control store is away")

    looks = 0

    def sleep(seconds: float) -> None:
        nonlocal looks
        looks += 1
        clock.now_s += seconds if looks != 5 else 11_000
        record(f"look {looks} after {seconds:g} s")
        if looks == len(answers):
            raise _Over

    monkeypatch.setattr(notices, "_ask", asked)
    monkeypatch.setattr(notices, "time", SimpleNamespace(sleep=sleep, monotonic=clock, time=clock))
    environment = {"AWS_EC2_METADATA_SERVICE_ENDPOINT": "http://metadata/", "GCE_METADATA_HOST": "metadata"}
    with record.logs("serve_app.nodes"), pytest.raises(_Over):
        notices.watch(notices.cloud(cloud, environment), drain)
    record.check(f"serve-notices-{cloud}")
