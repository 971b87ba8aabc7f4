"""The driver without Ray: what it tells its supervisor, and what it leaves behind it."""

import json
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.serving import ray_start
from serve_app.cli.serve import driver
from serve_app.config import AppConfig

DRIVER = """
from deployments.errors import StartError
from serve_app.cli.serve import driver, local_server

def start(config, address, folder, report):
    print("a library's own words", flush=True)
    report("loading")
    if config.model == "broken":
        raise StartError("no weights")

driver.watch, local_server.start = lambda supervisor: None, start
driver.main()
"""


@pytest.mark.parametrize(
    ("model", "last"), [("embedded", ["ready", "http://127.0.0.1:8001"]), ("broken", ["failed", "no weights"])]
)
def test_a_driver_outlives_its_supervisor_only_to_clear_up(model: str, last: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "talkray-1"
    (folder / "ray").mkdir(parents=True)
    config = AppConfig(model=model).model_dump(mode="json")
    order = {"config": config, "host": "127.0.0.1", "port": 8001, "folder": str(folder)}
    command, pipes = [sys.executable, "-c", DRIVER], dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
    with subprocess.Popen(command, **pipes, stderr=subprocess.DEVNULL, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(order), file=process.stdin, flush=True)
        assert [json.loads(process.stdout.readline()) for _ in range(2)] == [["stage", "loading"], last]
        assert process.poll() is None
        rest, _ = process.communicate()  # closes its standard input, as the end of a supervisor does
    assert (rest, process.returncode) == ("", 1)
    assert [path.name for path in tmp_path.iterdir()] == ["talkray-1.failed"], "with the logs"


def test_a_part_of_ray_that_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_start, "ended_part", Mock(side_effect=[None, "Ray's raylet was killed"]))
    monkeypatch.setattr(driver, "_POLL_S", 0.0)
    supervisor = Mock()
    driver.watch(supervisor)
    supervisor.say.assert_called_once_with("lost", "Ray's raylet was killed")


def test_nobody_hears_of_a_supervisor_that_has_ended() -> None:
    gone = Mock(flush=Mock(side_effect=BrokenPipeError))
    driver.SupervisorLink(gone).say("stage", "loading")
    gone.flush.assert_called_once()
