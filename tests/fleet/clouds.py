"""An AWS that is not there: moto, which Ray's own client speaks to."""

import contextlib
import json
import os
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import yaml

from serve_app.cli.ray_settings import free_port

ROOT = Path(__file__).parents[2]
REGION = "us-west-2"
_ACCOUNT = {"AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "testing", "AWS_DEFAULT_REGION": REGION}

# `ray up` logs in by these two; every argument is kept, and docker says that the container runs.
_FAKE_SSH = """#!/bin/sh
printf '%s\\n' "$*" >> {log}
case "$*" in
  *"State.Running"*) echo true ;;
  *"json .Config.Env"*) echo '["HOME=/home/talkray"]' ;;
  *"json .Mounts"*) echo '[]' ;;
  *"Config.Image"*) echo '{image}' ;;
  *"command -v docker"*) echo /usr/bin/docker ;;
  *"docker info"*) echo '{{"runc": {{}}}}' ;;
esac
exit 0
"""
_FAKE_RSYNC = """#!/bin/sh
printf 'rsync %s\\n' "$*" >> {log}
for argument; do
  case "$argument" in
    /*ray-bootstrap-*|/tmp/*bootstrap*) [ -f "$argument" ] && cp "$argument" {caught} ;;
  esac
done
exit 0
"""


@dataclass(slots=True)
class Aws:
    """moto, as a process that speaks EC2 and IAM."""

    address: str
    home: Path  # Ray writes a key into ~/.ssh
    refuse_spot: Path  # while it exists, no request for spot is met
    requests: Path  # of RunInstances, a JSON line each

    @property
    def environment(self) -> dict[str, str]:
        return {
            **_ACCOUNT, "AWS_ENDPOINT_URL": f"http://{self.address}", "AWS_EC2_METADATA_DISABLED": "true",
            "HOME": str(self.home),
        }  # fmt: skip

    def client(self) -> Any:
        return boto3.client(
            "ec2", region_name=REGION, endpoint_url=f"http://{self.address}", aws_access_key_id="testing",
            aws_secret_access_key="testing",
        )  # fmt: skip

    def instances(self) -> list[dict[str, Any]]:
        reservations = self.client().describe_instances()["Reservations"]
        found = [instance for each in reservations for instance in each["Instances"]]
        return [each for each in found if each["State"]["Name"] == "running"]

    def launches(self) -> list[dict[str, Any]]:
        """What RunInstances was asked for: type, count, market, and whether it was refused."""
        return [json.loads(line) for line in self.requests.read_text().splitlines()] if self.requests.exists() else []


def tags(instance: Mapping[str, Any]) -> dict[str, str]:
    return {each["Key"]: each["Value"] for each in instance["Tags"]}


@contextlib.contextmanager
def aws(folder: Path, host: str = "127.0.0.1") -> Iterator[Aws]:
    """The cloud, with images and a network as an account has them."""
    home = folder / "home"
    home.mkdir()
    cloud = Aws(f"{host}:{free_port()}", home, folder / "refuse-spot", folder / "requests")
    command = [
        sys.executable, "-m", "tests.fleet.moto_server", cloud.address, str(cloud.refuse_spot),
        str(cloud.requests),
    ]  # fmt: skip
    # The roles that Amazon manages: Ray gives its head two of them.
    environment = {**os.environ, **cloud.environment, "MOTO_IAM_LOAD_MANAGED_POLICIES": "true", "PYTHONPATH": str(ROOT)}
    with (
        (folder / "moto.log").open("w") as log,
        subprocess.Popen(command, stdout=log, stderr=log, env=environment, cwd=ROOT) as process,
    ):
        try:
            _await(lambda: _answers(cloud), "moto", process)
            yield cloud
        finally:
            process.kill()


def _answers(cloud: Aws) -> bool:
    with contextlib.suppress(Exception):
        return bool(cloud.client().describe_vpcs()["Vpcs"])
    return False


def _await(condition: Callable[[], bool], what: str, process: "subprocess.Popen[bytes]") -> None:
    deadline_s = time.monotonic() + 120
    while not condition():
        assert process.poll() is None, f"{what} has ended with {process.returncode}"
        assert time.monotonic() < deadline_s, f"{what} does not answer"
        time.sleep(0.2)


def for_this_cloud(cloud: Aws, folder: Path, **changes: Any) -> Path:
    """`cluster/aws.yaml` with what an operator fills in, and top-level `changes`."""
    client = cloud.client()
    image = client.describe_images(Owners=["amazon"])["Images"][0]["ImageId"]
    group = client.create_security_group(GroupName="talkray", Description="closed")["GroupId"]
    text = (ROOT / "cluster/aws.yaml").read_text().replace("ami-REPLACE", image).replace("sg-REPLACE", group)
    config = yaml.safe_load(text)
    config.pop("metadata", None)
    secrets = folder / "secrets"
    secrets.mkdir(exist_ok=True)
    config["file_mounts"] = {target: str(secrets) for target in config["file_mounts"]}
    file = folder / "aws.yaml"
    file.write_text(yaml.safe_dump(config | changes, sort_keys=False))
    return file


@dataclass(slots=True)
class Login:
    log: Path
    bootstrap: Path

    @property
    def path(self) -> dict[str, str]:
        """For the environment of whoever shall log in so."""
        return {"PATH": f"{self.log.parent}:{os.environ['PATH']}"}

    @property
    def commands(self) -> list[str]:
        return self.log.read_text().splitlines()


def fake_login(folder: Path, image: str) -> Login:
    """Programs named ssh and rsync in `folder`, which belongs first into PATH."""
    login = Login(folder / "login.log", folder / "bootstrap.yaml")
    login.log.touch()
    for name, script in (("ssh", _FAKE_SSH), ("rsync", _FAKE_RSYNC)):
        program = folder / name
        program.write_text(script.format(log=login.log, caught=login.bootstrap, image=image))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
    return login


def ray_up(cloud: Aws, login: Login, file: Path) -> None:
    environment = {**os.environ, **cloud.environment, **login.path, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "ray.scripts.scripts", "up", "--yes", "--no-config-cache", str(file)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
