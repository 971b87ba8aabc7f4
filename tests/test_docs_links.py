"""Relative links of the documents lead to files, headings and names that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
DOCUMENTS = [
    *sorted((ROOT / ".github").glob("*.md")),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "cluster/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
_FENCED = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_NAMES = re.compile(r"\]\(([^)\s]+\.(?:py|c))\)\s+\(((?:`[^`]+`(?:,\s+)?)+)\)")  # [a file](a.py) (`name`, `name`)
_PATH = re.compile(r"`((?:serve_app|deployments|loadtest|tools|tests|cluster|docs)/[\w./-]+)`")
_IN_CODE = re.compile(r"(?<![\w/.-])(?:docs|cluster)/[\w./-]+\.(?:md|yaml|yml)\b")
_OWN_NAME = re.compile(r"`([A-Z]\w*[a-z]\w*(?:\.\w+)*|\w+\.py|[a-z]\w*_\w+)`")  # in a docstring
# Names of others, which no code here has.
_FOREIGN = {"ASGIDIReceiveProxy", "WorkerId", "modeling_qwen3_tts.py"}
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_what_a_document_names_exists(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert [target for target in relative_links(text) if not exists(document, target)] == []
    assert missing_names(document, text) == []
    assert [path for path in _PATH.findall(text) if not (ROOT / path).exists()] == []


def test_documents_and_files_of_the_cluster_that_code_names_exist() -> None:
    code = [file for name in ("serve_app", "deployments", "loadtest", "tools") for file in (ROOT / name).rglob("*.py")]
    named = {(path, file) for file in code for path in _IN_CODE.findall(file.read_text(encoding="utf-8"))}
    assert [pair for pair in named if not (ROOT / pair[0]).exists()] == []
    assert len(named) > 5


def missing_names(document: Path, text: str) -> list[str]:
    named = [(file, name) for file, names in _NAMES.findall(text) for name in re.findall(r"[\w.]+", names)]
    code = {file: _text(document.parent / file) for file, _ in named}
    return [f"{file}: {name}" for file, name in named if not stands_in(name, code[file])]


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/code-*.md")), ids=lambda page: page.stem)
def test_call_trees_name_functions_that_exist(page: Path) -> None:
    assert misplaced_names(page.read_text(encoding="utf-8"), code_by_name()) == []


@cache
def code_by_name() -> dict[str, list[Path]]:
    """Files of each class and function."""
    found = dict[str, list[Path]]()
    for file in (file for package in ("serve_app", "deployments") for file in (ROOT / package).rglob("*.py")):
        for name in re.findall(r"^ *(?:async def|def|class) (\w+)", file.read_text(encoding="utf-8"), re.MULTILINE):
            found.setdefault(name, []).append(file)
    return found


def misplaced_names(text: str, code: dict[str, list[Path]]) -> list[str]:
    """Names of call trees that are not defined, or, if private, not in a file of their caller's."""
    wrong, callers = list[str](), list[tuple[int, list[Path]]]()
    for indent, name in re.findall(r"^( *)([A-Za-z_][\w.]*)(?= {2}|$)", "\n".join(_FENCED.findall(text)), re.MULTILINE):
        *owner, last = name.split(".")
        callers = [each for each in callers if each[0] < len(indent)]
        files = [file for file in code.get(last, []) if not owner or file in code.get(owner[-1], [])]
        if callers and last.startswith("_") and not owner:
            files = [file for file in files if file in callers[-1][1]]
        callers.append((len(indent), files))
        wrong += [] if files else [name]
    return wrong


def test_a_misplaced_name_is_found() -> None:
    code = {"A": [Path("a.py")], "f": [Path("a.py")], "_g": [Path("b.py")], "h": [Path("b.py")]}
    tree = "```\nA.f    calls\n  _g\n  h\n    _g\n  A.h\n  missing\n```"
    assert misplaced_names(tree, code) == ["_g", "A.h", "missing"]


def _text(file: Path) -> str:
    """Empty for a file that was removed: all names of it are missing."""
    return file.read_text(encoding="utf-8") if file.exists() else ""


def stands_in(name: str, code: str) -> bool:
    """Whether the code has the name; of `A.f`, whether its class A has it."""
    *owners, last = name.split(".")
    for owner in owners:
        is_own = (node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef) and node.name == owner)
        code = "\n".join(ast.unparse(node) for node in is_own)
    return re.search(rf"\b{re.escape(last)}\b", code) is not None


def relative_links(text: str) -> list[str]:
    return [target for target in _LINK.findall(_FENCED.sub("", text)) if "://" not in target]


def exists(document: Path, target: str) -> bool:
    path, _, heading = target.partition("#")
    file = document.parent / path if path else document
    return file.exists() and (not heading or heading in anchors(file.read_text()))


def anchors(text: str) -> set[str]:
    names = (re.sub(r"[^\w\- ]", "", heading.lower()) for heading in _HEADING.findall(_FENCED.sub("", text)))
    return {name.replace(" ", "-") for name in names}


def test_names_in_docstrings_are_those_of_the_code() -> None:
    files = [file for name in ("serve_app", "deployments", "loadtest") for file in (ROOT / name).rglob("*.py")]
    trees = {file: ast.parse(file.read_text()) for file in files}
    known = _FOREIGN | {file.name for file in trees} | {name for tree in trees.values() for name in names_of(tree)}
    stale = [(file.name, name) for file, tree in trees.items() for name in stale_names(tree, known)]
    assert stale == []


def test_a_stale_name_in_a_docstring_is_found() -> None:
    tree = ast.parse('"""As `forward` and `Forwarder.go_on` do, see `gone.py` and `is_here`."""\nis_here = "Forward"')
    assert stale_names(tree, set(names_of(tree))) == ["Forwarder.go_on", "gone.py"]


def stale_names(tree: ast.AST, known: set[str]) -> list[str]:
    """Names in the docstrings that no code has: of classes, of files, and those of several words."""
    named = [name for text in docstrings(tree) for name in _OWN_NAME.findall(text)]
    return [name for name in named if name not in known and not set(name.split(".")) <= known]


def docstrings(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


def names_of(tree: ast.AST) -> Iterator[str]:
    """All names and all words of strings, but for those of docstrings."""
    texts = set(docstrings(tree))
    for node in ast.walk(tree):
        match node:
            case ast.ClassDef(name=name) | ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                yield name
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name):
                yield from name.split(".")
            case ast.Constant(value=str(text)) if text not in texts:
                yield from re.findall(r"\w+", text)


def test_a_broken_link_is_found() -> None:
    text = "[a](README.md) [b](docs/none.md) [c](https://example.org/)\n```\n[d](none.md)\n```\n"
    document = ROOT / "README.md"
    assert [target for target in relative_links(text) if not exists(document, target)] == ["docs/none.md"]


def test_headings_are_named_as_github_does() -> None:
    assert anchors("# How fast it is\n## Is it right?\n## What `a_b` does\n") == {
        "how-fast-it-is", "is-it-right", "what-a_b-does",
    }  # fmt: skip


def test_a_missing_name_is_found(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text("class Known: ...\n")
    text = "[this](code.py) (`Known`), [that](code.py) (`Known`, `Unknown`) and [a third](removed.py) (`Known`)"
    assert missing_names(tmp_path / "page.md", text) == ["code.py: Unknown", "removed.py: Known"]
