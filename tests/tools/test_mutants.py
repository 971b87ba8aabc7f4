"""What counts as a mutant, and which tests run for it. Making them needs cosmic-ray: `make mutants`."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from tools import mutants

SOURCE = '@dataclass(slots=True)\nclass A:\n    """A."""\n\n    x: int | None = 1\n\n    def f(self, y: int) -> int:\n'
SOURCE += '        logger.info("%d", y + 1)\n        return y + 1\n'


@pytest.mark.parametrize(("old", "new", "counts"), [
    ("return y + 1", "return y - 1", True), ("= 1", "= 2", True), ("int | None", "int & None", False),
    ("slots=True", "slots=False", False), ('"%d", y + 1', '"%d", y - 1', False), ("A.", "B.", False),
])  # fmt: skip
def test_what_nothing_can_observe_is_no_mutant(old: str, new: str, counts: bool) -> None:
    assert (mutants.essence(SOURCE.replace(old, new)) != mutants.essence(SOURCE)) is counts


def test_the_twin_comes_first_and_then_importers_and_the_folder() -> None:
    (first, first_s), (others, others_s) = mutants.stages("serve_app/extensions/jobs/webhooks.py")
    assert first == ["tests/serve_app/extensions/jobs/test_webhooks.py"]
    assert {"tests/serve_app/extensions/jobs", *first} <= set(others)
    assert first_s > others_s
    (importers, _), _ = mutants.stages("serve_app/extensions/jobs/segment_maker.py")
    assert importers == ["tests/serve_app/extensions/jobs/test_jobs.py"], "it has no twin"


def test_a_test_that_fails_without_the_mutant_kills_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    changed = mutants.Mutant("code.py", 1, "x = 2\n")
    red = {"x = 1\n": {"tests/a::always"}, "x = 2\n": {"tests/a::always", "tests/folder::test_x"}}

    def failed(copy: Path, tests: list[str], within_s: float, *, without: Sequence[str]) -> str | None:
        found = red[(copy / "code.py").read_text()] - set(without)
        return next((each for each in sorted(found) for asked in tests if each.startswith(asked)), None)

    monkeypatch.setattr(mutants, "failed", failed)
    for folder, killer in (("tests/folder", "tests/folder::test_x"), ("tests/a", None)):
        monkeypatch.setattr(mutants, "stages", lambda path, folder=folder: [(["tests/a"], 1), ([folder], 1)])
        assert mutants.killer(tmp_path, changed) == killer
        assert (tmp_path / "code.py").read_text() == "x = 1\n"


@pytest.mark.parametrize("slow", ["tests", "tests/folder"])
def test_what_is_slow_without_a_mutant_is_undecided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    (tmp_path / "code.py").write_text("x = 1\n")
    monkeypatch.setattr(mutants, "failed", lambda _, tests, *__, **___: mutants._HANGS if tests == [slow] else None)
    monkeypatch.setattr(mutants, "stages", lambda path: [(["tests"], 1), (["tests/folder"], 1)])
    assert mutants.killer(tmp_path, mutants.Mutant("code.py", 1, "x = 2\n")) == mutants._UNDECIDED
