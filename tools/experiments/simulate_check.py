"""`make simulate-check`: the simulator against a real server on this machine, with the embedded checkpoint.

It takes about ten minutes, and nothing else should run meanwhile. Results go to the folder given as the argument.
"""

import json
import subprocess
import sys
from pathlib import Path

from serve_app.config import AppConfig
from tools.suites.application import running

REQUESTS = ("--speech-s", "1", "--max-ttfb", "400")  # short answers: more of them fit into the time


def loadtest(*arguments: str) -> int:
    """`python -m loadtest` in a process of its own."""
    return subprocess.call([sys.executable, "-m", "loadtest", *arguments])


def main() -> int:
    """The exit code of `loadtest check-simulation`."""
    out = Path(sys.argv[1])
    config = AppConfig(model="embedded")
    with running(config) as url:
        rising = ("--from", "1", "--factor", "1.5", "--duration", "15", "--settle", "3", "--warmup", "3")
        loadtest("sweep", "--url", url, "--out", str(out / "sweep"), *rising, *REQUESTS)
        capacity = json.loads((out / "sweep" / "sweep.json").read_text(encoding="utf-8"))["capacity_per_s"]
        if capacity is None:
            sys.exit("not even 1 request/s was held: is the machine busy with something else?")
        slots = ("--slots", str(config.talker.max_num_seqs))
        target = ("--url", url, "--rate", str(capacity), "--out", str(out / "check"))
        return loadtest("check-simulation", *target, *slots, *REQUESTS)


if __name__ == "__main__":
    sys.exit(main())
