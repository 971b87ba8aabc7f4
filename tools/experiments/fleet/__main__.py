"""Run a fleet on this machine until Ctrl-C: `python -m tools.experiments.fleet`, as root. Prints the URLs of the
nodes."""

import argparse
import signal
import sys

from tools.experiments.fleet.fleet import CODEC, CODECS, INGRESS, TALKER, TALKERS, fleet, scaled_down
from tools.experiments.fleet.namespaces import why_impossible

_BODY = '{"model": "qwen3-tts", "input": "Hello from a fleet.", "voice": "alloy"}'


def main() -> None:
    """Start a head, a talker node and a codec node. Exits with 1 if namespaces are unavailable."""
    argparse.ArgumentParser(prog="python -m tools.experiments.fleet", description=__doc__).parse_args()
    obstacle = why_impossible()
    if obstacle is not None:
        sys.exit(f"no namespaces on this machine: {obstacle}")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    with fleet() as made:
        print("starting a head and two nodes: a minute or two", flush=True)
        made.start_head()
        for pool in (TALKERS, CODECS):
            made.add(f"{pool}1", pool)
        made.deploy(scaled_down(made))
        doors = made.open_doors([made.head, *made.workers])
        for machine, door in zip([made.head, *made.workers], doors, strict=True):
            here = [name for name in (TALKER, CODEC, INGRESS) for each in made.replicas(name) if each.node in door]
            print(f"{machine.name:8} {door}  {', '.join(here) or 'no replica'}")
        header = "-H 'Content-Type: application/json'"
        print(
            f"curl {doors[-1]}/v1/audio/speech -H 'Authorization: Bearer {made.key}' {header} -d '{_BODY}' -o hello.mp3"
        )
        print("Press Ctrl-C to stop.", flush=True)
        try:
            signal.pause()
        except KeyboardInterrupt:
            print("stopping", flush=True)


if __name__ == "__main__":
    main()
