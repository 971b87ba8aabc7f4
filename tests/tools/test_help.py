"""Commands that run in a process of their own print their help as the other commands of `talkray` do."""

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("command", "usage"),
    [
        ("doctor", "[OPTIONS]"),
        ("verify", "[OPTIONS]"),
        ("random-checkpoint", "[OPTIONS] {out}"),
        ("book", "[OPTIONS] {file}"),
        ("dataset", "[OPTIONS] {file}"),
        ("loadtest", "[OPTIONS] COMMAND [ARGS]..."),
    ],
)
def test_help_has_one_style_and_the_name_that_was_typed(command: str, usage: str) -> None:
    start = "import sys; sys.argv[0] = 'talkray'; from serve_app.cli.main import main; main()"
    done = subprocess.run([sys.executable, "-c", start, command, "--help"], capture_output=True, text=True, check=True)
    assert f"Usage: talkray {command} {usage}" in done.stdout
    assert "╭─ Options" in done.stdout
