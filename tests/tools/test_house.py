"""What is counted of the house, and what breaks its rules."""

import ast
import shutil
import sys
import tomllib
from pathlib import Path
from types import FrameType

import pytest
from httpx import ASGITransport, AsyncClient

from serve_app.api.request_record import RequestRecord
from serve_app.config import ApiSettings
from serve_app.extensions.voices.settings import VoiceSettings
from tests.serve_app.fake import CUSTOM_VOICE, FakeSynthesizer
from tests.serve_app.one_model import one_api
from tools import house

ROOT = Path(__file__).parents[2]
ALLOWED = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["talkray"]["faults"]


def test_a_request_crosses_the_modules_of_its_processes_and_what_they_import() -> None:
    names = {str(file.relative_to(ROOT)) for file in house.way_of_a_request(ROOT).files}
    assert {"serve_app/api/application.py", "deployments/talker/engine/scheduler.py"} <= names
    assert not {"serve_app/cli/main.py", "deployments/codec/deployment.py", "deployments/__init__.py"} & names


def test_the_routes_and_the_files_that_a_request_crosses_are_those_of_the_document() -> None:
    found = house.routes(ROOT)
    assert list(found) == ["surface", "engine", "kernels"]
    assert all(files for files in found.values())
    assert {file for files in found.values() for file in files} <= house.crossed(ROOT)


def test_of_a_file_to_read_the_named_functions_count(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text(
        "x = 1\n\n\nclass A:\n    def f(self):\n        def g():\n            return 1\n\n        return g\n\n\n"
        "def f():\n    return 2\n\n\n"
        "class B:\n    def f(self):\n        return 3\n\n    def f(self):\n        return 4\n"
    )
    assert house.route_lines(tmp_path, {"a.py": ["A", "A.f", "f"]}) == 6 + 5 + 2
    for name in ("B.f", "g", "A.g", "gone"):  # two of that name, and none at that place
        with pytest.raises(LookupError, match=f"defines {name} "):
            house.route_lines(tmp_path, {"a.py": [name]})


@pytest.mark.anyio
async def test_a_plain_request_calls_no_file_of_the_ingress_that_the_table_leaves_out(tmp_path: Path) -> None:
    settings = ApiSettings(voices=VoiceSettings(store=str(tmp_path)))  # without what other tests have stored
    # `on_end` as an ingress gives it, because the default is a function of the file that only builds the application.
    api, called = one_api(FakeSynthesizer(CUSTOM_VOICE), settings, on_end=list[RequestRecord]().append), set[str]()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT / "serve_app")):
            called.add(str(Path(frame.f_code.co_filename).relative_to(ROOT)))

    body = {"model": "tts-1", "input": "Hello there.", "voice": "alloy", "response_format": "pcm"}
    async with AsyncClient(transport=ASGITransport(api), base_url="http://127.0.0.1") as client:
        await client.post("/v1/audio/speech", json=body)  # imports what is imported late
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            answer = await client.post("/v1/audio/speech", json=body)
        finally:
            sys.setprofile(before)
    assert answer.status_code == 200
    assert called - house.crossed(ROOT) == set()
    assert len(called) > 20


@pytest.mark.parametrize(("printed", "is_true"), [
    ("2 files, 20 of their 90 lines. It crosses 1 of the 4 files", True),
    ("2 files, 21 of their 90 lines. It crosses\n1 of 4 files", True),
    ("2 files, 22 of their 90 lines. It crosses 1 of 4 files", False),
    ("3 files, 20 of their 90 lines. It crosses 1 of 4 files", False),
    ("2 files, 20 of their 90 lines. It crosses 2 of 4 files", False),
    ("2 files, 20 of their 90 lines. It crosses 1 of 5 files", False),
    ("2 files, 20 of their 80 lines. It crosses 1 of 4 files", False),
    ("nothing", False),
])  # fmt: skip
def test_a_document_that_prints_other_numbers_is_found(tmp_path: Path, printed: str, is_true: bool) -> None:
    document = tmp_path / "README.md"
    document.write_text(printed)
    assert house._prints(document, [2, 1], [20, 90, 4]) is is_true


@pytest.mark.parametrize(
    ("printed", "is_true"), [("103 | 60", True), ("100 | 59", True), ("90 | 60", False), ("100 | 0", False)]
)
def test_a_room_of_another_size_is_found(tmp_path: Path, printed: str, is_true: bool) -> None:
    for name, lines in (("serve_app/api/a", 60), ("serve_app/api/b", 40), ("serve_app/api/pool/c", 30)):
        file = tmp_path / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines * "pass\n")
    (tmp_path / "docs").mkdir()
    rooms = f"| `serve_app/api` without `serve_app/api/pool` | are for requests | {printed} |"
    crossed = "Read [`a`](../serve_app/api/a.py)."
    (tmp_path / house.MAP).write_text(f"{rooms}\n")
    (tmp_path / house.TOUR["surface"]).write_text(f"{crossed}\n")
    assert (house.misprinted_rooms(tmp_path) == []) is is_true


def test_a_link_to_a_removed_file_is_found(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / house.ARCHITECTURE).write_text("0 files, 0 of their 0 lines. It crosses 0 of 0 files")
    (tmp_path / house.TOUR["engine"]).write_text("[`a`](../serve_app/a.py) (`run`)")
    assert house.misprinted(tmp_path) == [f"{house.TOUR['engine']} links to serve_app/a.py, which is missing"]


def test_settings_are_the_leaves_of_the_configuration() -> None:
    assert {"model", "talker.max_num_seqs", "api.admission.max_streams"} <= set(house.settings())
    assert not {"talker", "api", "api.admission"} & set(house.settings())


def test_all_lines_count_but_those_of_a_folder_that_counts_beside(tmp_path: Path) -> None:
    (tmp_path / "tools/experiments").mkdir(parents=True)
    for name in ("tools/a.py", "tools/experiments/b.py"):
        (tmp_path / name).write_text('"""Says."""\n\nx = 1\n')
    assert house.size(tmp_path, "tools") == (6, 2)
    assert house.size(tmp_path, "tools", without="tools/experiments") == (3, 1)


def test_words_of_documents_count(tmp_path: Path) -> None:
    (tmp_path / "docs/decisions").mkdir(parents=True)
    for name in ("README.md", "docs/decisions/a.md", "other.md"):
        (tmp_path / name).write_text("# Two words\n")
    (tmp_path / "docs/made.md").write_text(
        "One\n<!-- Generated by python -m tools.reference: x -->\nno\n<!-- End of it -->\n"
        "<!-- make sbom -->\nno\n<!-- end -->\n"
    )
    assert house.num_words(tmp_path) == 7


def parsed(**files: str) -> dict[str, ast.Module]:
    return {f"{name}.py": ast.parse(text) for name, text in files.items()}


def test_every_rule_is_counted(tmp_path: Path) -> None:
    """`make lint` counts the breaches of this checkout."""
    (tmp_path / "docs").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / house.ARCHITECTURE).write_text("")
    assert house.faults(tmp_path).keys() == ALLOWED.keys()


def test_a_public_name_of_two_classes_is_found() -> None:
    code = parsed(a="class Twice: ...\nclass _Own: ...", b="class Twice: ...\nclass _Own: ...")
    assert house.classes_twice(code) == ["Twice: a.py, b.py"]


def test_a_large_file_and_a_small_one_with_one_importer_are_found(tmp_path: Path) -> None:
    (tmp_path / "cluster").mkdir()
    (tmp_path / "cluster" / "a.yaml").write_text("module: named.Nodes\n")
    sources = {
        "large": "x = 1\n" * 451, "lonely": "x = 1\n", "shared": "x = 1\n", "named": "x = 1\n",
        "one": "import shared, lonely\n" * 60, "two": "from shared import x\n" * 60,
    }  # fmt: skip
    for name, text in sources.items():
        (tmp_path / f"{name}.py").write_text(text)
    assert house.sizes(tmp_path, parsed(**sources)) == [
        "large.py: 451 lines, at most 450",
        "lonely.py: 1 lines and 1 importers",
    ]


DEFAULT = "def f(x, seed=0): ..."
CONSTRUCTOR = "class f:\n    def __init__(self, x, *, seed=0): ..."


@pytest.mark.parametrize(("defined", "caller", "by_tests", "found"), [
    (DEFAULT, "f(1)", "f(1, seed=3)", ["a.py:1: f(seed=)"]), (DEFAULT, "f(1)", "f(1)", []),
    *((DEFAULT, f"f(1, {given})", "f(1, seed=3)", []) for given in ("2", "seed=2", "*both", "**all")),
    (DEFAULT, "partial(f, 1, 2)", "f(1, seed=3)", []), (DEFAULT, "thing.f(1, 2)", "f(1, seed=3)", []),
    (CONSTRUCTOR, "f(1)", "f(1, seed=3)", ["a.py:2: f(seed=)"]),
    (f"@cli.command()\n{DEFAULT}", "", "f(1, seed=3)", []),  # people set the options of a command
])  # fmt: skip
def test_a_default_that_only_tests_replace_is_found(defined: str, caller: str, by_tests: str, found: list[str]) -> None:
    assert house.set_by_tests_only(parsed(a=defined, b=caller), parsed(t=by_tests)) == found


def test_a_folder_over_its_budget_is_found(tmp_path: Path) -> None:
    (tmp_path / "room").mkdir()
    (tmp_path / "room" / "a.py").write_text("x = 1\n" * 11)
    assert house.over_budget(tmp_path, {"room": 10}) == ["room: 11 lines, budget 10"]
    assert house.over_budget(tmp_path, {"room": 11}) == []
    (tmp_path / "room/inner").mkdir()
    (tmp_path / "room/inner/b.py").write_text(5 * "pass\n")
    assert house.over_budget(tmp_path, {"room": 11}) == ["room: 16 lines, budget 11"]
    assert house.over_budget(tmp_path, {"room": 11, "room/inner": 4}) == ["room/inner: 5 lines, budget 4"]


def test_the_command_fails_where_more_are(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(house, "faults", lambda root: {"classes": ["Twice: a.py, b.py"] * 1000, "budgets": ["room"]})
    with pytest.raises(SystemExit, match="1"):
        house.main()
    printed = capsys.readouterr().out
    assert "Twice: a.py, b.py" in printed
    assert "budgets: 1, allowed 0: remove lines, or raise the budget" in printed
    assert "all but experiments, tests" in printed


def test_nothing_outside_tests_imports_them() -> None:
    code = house.trees(ROOT, *house.PACKAGES)
    assert not [path for path, tree in code.items() if any(name.startswith("tests.") for name in house.imported(tree))]
