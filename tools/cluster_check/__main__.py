"""Print file and line of every fault in `cluster/`; end with status 1 if there is one."""

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.cluster_check import flavours, hosts, kubernetes, machines, monitoring, serve, timeouts
from tools.cluster_check.document import Fault, Unreadable

Check = Callable[[Path], Iterator[Fault]]
CHECKS: dict[str, Check] = {
    "Serve's configuration": serve.check,
    "virtual machines": machines.check,
    "Kubernetes": kubernetes.check,
    "one host": hosts.check,
    "monitoring": monitoring.check,
    "equal numbers": flavours.check,
    "order of time-outs": timeouts.check,
}
_OPTIONAL = ("promtool", "systemd-analyze")


def faults(root: Path, check: Check) -> list[Fault]:
    """Of one check, each once; a file that cannot be read ends it."""
    found: set[Fault] = set()
    try:
        found.update(check(root))
    except Unreadable as error:
        found.add(error.fault)
    return sorted(found)


def main(root: Path) -> int:
    count = 0
    for name, check in CHECKS.items():
        found = faults(root, check)
        print(f"{name}: {f'{len(found)} faults' if found else 'ok'}", flush=True)
        for fault in found:
            print(f"  {fault}")
        count += len(found)
    for tool in _OPTIONAL:
        if shutil.which(tool) is None:
            print(f"{tool} is not installed here: without its opinion")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path()))
