"""Compare the message rates at Serve's controller and Ray's control store for fixed intervals and for our intervals.

    python -m tools.experiments.controller_load --talkers 100 --codecs 1600 --ingresses 200

Codec replicas call the talkers, and ingresses call the codec. With fixed intervals, each ingress polls separately.
"""

import argparse
from dataclasses import dataclass

from serve_app.app import health_check_s, report_s
from serve_app.scaling import pool_watch

LOOK_S, LIVES_PER_S = 2.0, 5.0  # per ingress: polls of all details, and liveness checks per pool
REPORT_S, HEALTH_CHECK_S = 0.5, 2.0


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages per second in the whole cluster."""

    at_controller: float
    at_store: float


def with_fixed_intervals(talkers: int, codecs: int, ingresses: int) -> Messages:
    health_checks = (talkers + codecs + ingresses) / HEALTH_CHECK_S
    of_replicas, of_callers = (talkers + codecs) / REPORT_S, (codecs + ingresses) / REPORT_S
    return Messages(health_checks + of_replicas + of_callers + ingresses / LOOK_S, ingresses * 3 * LIVES_PER_S)


def as_set(talkers: int, codecs: int, ingresses: int) -> Messages:
    """Return the rates for the intervals of `serve_app.app`. One ingress polls, and the others read its notes."""
    talker_s = report_s(talkers, callers=codecs + ingresses)
    codec_s = report_s(codecs, callers=ingresses)
    replicas = talkers + codecs + ingresses
    look_s = pool_watch._TURN_S * pool_watch.turns_per_look(replicas, is_running=True)
    num_small = sum(size <= pool_watch._LARGEST_ASKED for size in (talkers, codecs))
    health_checks = sum(size / health_check_s(size) for size in (talkers, codecs, ingresses))
    of_replicas, of_callers = talkers / talker_s + codecs / codec_s, codecs / talker_s + ingresses / codec_s
    return Messages(
        health_checks + of_replicas + of_callers + 1 / look_s,
        ingresses * num_small * LIVES_PER_S + ingresses / look_s,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in (("talkers", 100), ("codecs", 1600), ("ingresses", 200)):
        parser.add_argument(f"--{name}", type=int, default=size)
    options = parser.parse_args()
    sizes = options.talkers, options.codecs, options.ingresses
    before, now = with_fixed_intervals(*sizes), as_set(*sizes)
    print("| {} talkers, {} codec replicas, {} ingresses | without that | with it |\n|---|---|---|".format(*sizes))
    for title, name in (("at the controller", "at_controller"), ("at the control store", "at_store")):
        print(f"| {title} | {getattr(before, name):,.0f} | {getattr(now, name):,.0f} |")


if __name__ == "__main__":
    main()
