import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from loadtest.__main__ import app


def invoke(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["run", *arguments])
    return result.exit_code, " ".join(result.output.split())


def options(out: Path, **changes: str) -> list[str]:
    values = {"url": "http://127.0.0.1:9", "rate": "1", "duration": "9", "out": str(out)} | changes
    return [item for name, value in values.items() for item in (f"--{name}", value)]


@pytest.mark.parametrize(
    ("option", "value", "complaint"),
    [
        ("rate", "0", "number above 0"),
        ("duration", "nan", "number above 0"),
        ("url", "127.0.0.1:8000", "is not a URL"),
        ("extra", "[1]", "must be a JSON object"),
        ("extra", "{", "not valid JSON"),
        ("extra", '{"input": "x"}', "sets this itself"),
        ("rate", "0.000001", "not one request"),
    ],
)
def test_wrong_use_is_explained(tmp_path: Path, option: str, value: str, complaint: str) -> None:
    exit_code, output = invoke(*options(tmp_path / "run", **{option: value}))
    assert exit_code == 2
    assert complaint in output
    assert not (tmp_path / "run").exists()


def test_a_server_that_is_not_there_is_said_before_anything_is_written(tmp_path: Path) -> None:
    exit_code, output = invoke(*options(tmp_path / "run"))
    assert exit_code == 1
    assert "Nothing answers at http://127.0.0.1:9" in output
    assert "Start the server" in output
    assert not (tmp_path / "run").exists()


def test_results_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"mine": 1}))
    exit_code, output = invoke(*options(tmp_path))
    assert exit_code == 2
    assert "already holds a run" in output
    assert json.loads((tmp_path / "run.json").read_text()) == {"mine": 1}
