"""Print every error in `cluster/`. Exit with status 1 if there are any."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from tools.cluster_check import fleet, hosts, kubernetes, machines, serve
from tools.cluster_check.document import Unreadable

Check = Callable[[Path], Iterator[str]]
CHECKS: dict[str, Check] = {
    "Serve's configuration": serve.check,
    "virtual machines": machines.check,
    "Kubernetes": kubernetes.check,
    "hosts and monitoring": hosts.check,
    "equal numbers": fleet.check,
}


def faults(root: Path, check: Check) -> list[str]:
    """Return the distinct errors of one check. An unreadable file ends the check."""
    found: set[str] = set()
    try:
        found.update(check(root))
    except Unreadable as error:
        found.add(str(error))
    return sorted(found)


def main(root: Path) -> int:
    count = 0
    for name, check in CHECKS.items():
        found = faults(root, check)
        print(f"{name}: {f'{len(found)} errors' if found else 'ok'}", *found, sep="\n  ", flush=True)
        count += len(found)
    for tool in sorted(hosts.missing()):
        print(f"{tool} is not installed here: its checks were skipped")
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path()))
