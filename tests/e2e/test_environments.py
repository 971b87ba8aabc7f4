"""`talkray serve` in containers and on small hosts: it speaks, or ends early with one sentence."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.black_box import RAYLET, as_user, refusal, serving, users_environment

pytestmark = [pytest.mark.faults, pytest.mark.skipif(os.getuid() != 0, reason="needs root, for namespaces")]

USER = 54_321  # in no passwd
# A root that is read-only but for /tmp, and shared memory of 64 MiB as Docker's.
FROZEN = (
    "mount --make-rprivate / && mount --bind /tmp /tmp && mount -t tmpfs -o size=64m,mode=1777 tmpfs /dev/shm"
    " && mount -o remount,bind,ro / && umask 077"
)
LOOPBACK = "ip link set lo up"
# A network of IPv6 alone, with a route out.
IPV6 = (
    f"{LOOPBACK} && ip link add eth8 type veth peer name eth9 && ip link set eth8 up && ip link set eth9 up"
    " && ip -6 addr add fd00::9/64 dev eth9 nodad && ip -6 route add default via fd00::1 dev eth9"
)


def within(namespace: str, prepared: str) -> list[str]:
    return ["unshare", namespace, "sh", "-c", f'{prepared} && exec "$@"', "sh"]


@pytest.mark.parametrize(
    ("through", "host"),
    [
        ([*within("--mount", FROZEN), "taskset", "--cpu-list", "0", *as_user(USER)], "127.0.0.1"),
        (within("--net", IPV6), "::1"),
    ],
    ids=["read-only root, no passwd entry, no HOME, umask 077, 64 MiB of shared memory, one CPU", "IPv6 only"],
)
def test_it_speaks(through: list[str], host: str, tmp_path: Path) -> None:
    folder = tmp_path / f"a folder with spaces {80 * 'x'}"
    folder.mkdir()
    os.chown(folder, USER, USER)
    environment = {"HOME": None, "TMPDIR": str(folder), "TALKRAY_CACHE": str(folder), "TALKRAY_DATA": str(folder)}
    with serving(tmp_path, "--host", host, through=through, environment=environment) as server:
        [curl] = re.findall(r"^ *(curl .*) -o hello.mp3", server.output, re.MULTILINE)
        inside = ["nsenter", f"--target={server.pid}", "--net", "sh", "-c", f"{curl} --fail --silent"]
        assert subprocess.run(inside, capture_output=True, timeout=120, check=True).stdout


@pytest.mark.parametrize(("through", "environment", "said"), [
    (within("--mount", f"{FROZEN} && mount -o remount,bind,ro /tmp"), {}, "disk: cannot write to /tmp"),
    (as_user(USER), {"HOME": None}, "this user has no home folder: set HOME, or name a folder in TALKRAY_CACHE"),
    (as_user(USER), {"HOME": "/nowhere"}, "disk: cannot write to /;.*Set TALKRAY_CACHE to a writable folder"),
    ([], {"RAY_TMPDIR": f"/tmp/{80 * 'x'}"}, "is not a folder: set RAY_TMPDIR to an existing folder"),
    (within("--net", "true"), {}, r"loopback: 127.0.0.1 cannot be used \(Network is unreachable"),
    (within("--net", f"{LOOPBACK} && ip addr del 127.0.0.1/8 dev lo"), {}, "loopback: 127.0.0.1 cannot be used"),
])  # fmt: skip
def test_it_starts_only_where_it_could_speak(through: list[str], environment: dict[str, str | None], said: str) -> None:
    [line] = refusal(through=through, environment=environment).strip().splitlines()
    assert re.search(said, line)


def test_ray_requires_the_token_that_the_environment_names(tmp_path: Path) -> None:
    own = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")}
    [line] = re.findall(".*RAY_AUTH_TOKEN_PATH is set.*", refusal(environment=own))
    assert "file cannot be opened or is empty" in line
    (tmp_path / "token").write_text("right", encoding="utf-8")
    with serving(tmp_path, environment=own) as server:
        assert server.speak() == 200
        raylet = server.processes()[server.find(RAYLET)[0]]
        address = re.findall(r"--gcs-address=(\S+)", raylet)[0]  # its commands for workers repeat the option
        status = [sys.executable, "-m", "ray.scripts.scripts", "status", "--address", address]
        said = {}
        for token in ("right", "wrong"):
            environment = users_environment({**own, "RAY_AUTH_TOKEN": token, "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"})
            done = subprocess.run(status, env=environment, capture_output=True, text=True, timeout=120, check=False)
            said[token] = done.stdout + done.stderr
    assert "Resources" in said["right"]
    assert "Authentication token is missing or incorrect" in said["wrong"]
