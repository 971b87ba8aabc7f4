"""Commands that run in a process of their own print their help as the other commands of `talkray` do."""

import os
import subprocess
import sys

import pytest


@pytest.mark.parametrize(("command", "usage"), [
    ("doctor", "[OPTIONS]"), ("voice add", "[OPTIONS] {name} {file}"), ("verify", "[OPTIONS]"),
    ("random-checkpoint", "[OPTIONS] {out}"), ("book", "[OPTIONS] {file}"), ("dataset", "[OPTIONS] {file}"),
    ("loadtest", "[OPTIONS] COMMAND [ARGS]..."), ("bench encoders", "[OPTIONS]"),
])  # fmt: skip
def test_help_has_one_style_and_the_name_that_was_typed(command: str, usage: str) -> None:
    start = "import sys; sys.argv[0] = 'talkray'; from serve_app.cli.main import main; main()"
    run = [sys.executable, "-c", start, *command.split(), "-h"]
    done = subprocess.run(run, env=os.environ | {"COLUMNS": "80"}, capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    assert lines[1].strip() == f"Usage: talkray {command} {usage}"
    assert any(line.startswith("╭─ Options") for line in lines)
    assert "<bool>" not in done.stdout
    assert max(map(len, lines)) <= 80
