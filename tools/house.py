"""How large the house is, and which of its rules are broken: `python -m tools.house`. Budgets stand in pyproject.toml.

The table counts all lines of Python files; "all" is serving, load test and tools, without the experiments. A plain
request is HTTP on one GPU with `codec.placement: inline`. The routes to read first and the files that it crosses are
those that the code tour in docs/ links. Of a file to read first it also names functions and classes, whose lines count.
The three processes of a request import more: that counts imports in functions too. Settings are the fields of
`AppConfig` that hold no settings themselves.

The rules that it checks, beside the one of folders (`lint-imports`); CONTRIBUTING.md has all:
1. The name of a public class stands once in the tree.
2. A file has 60 to 450 lines. A smaller one needs two importers.
3. No keyword has a default that only tests set.
4. A folder keeps its budget of lines. A folder in it that has a budget of its own does not count.
5. The documents print how much there is to read first, and how many files a request crosses.
"""

import argparse
import ast
import dataclasses
import re
import sys
import tomllib
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SERVING = ("serve_app", "deployments")
PACKAGES = (*SERVING, "loadtest", "tools")
EXPERIMENTS = "tools/experiments"
SUITES = "tools/suites"  # what tests and experiments share
DOCUMENTS = ("docs/**/*.md", "README.md", "CONTRIBUTING.md", "cluster/README.md")
# The HTTP surface, the talker's replica and its engine, which the replica starts by name.
PROCESSES = ("serve_app.ingress", "deployments.talker.deployment", "deployments.talker.process.engine_process")
ARCHITECTURE = "docs/architecture.md"
TOUR = {name: f"docs/code-{name}.md" for name in ("surface", "engine", "kernels")}  # routes, in a request's order
MAP = "docs/code-map.md"  # the table of folders
_ROOMS = re.compile(r"^\| (`.*?) \|.*?\| ([\d,]+) \| ([\d,]+) \|$", re.MULTILINE)  # rooms, lines, lines crossed
_FILE = re.compile(r"\]\(\.\./((?:serve_app|deployments)/[\w/]+\.py)\)")
_STOP = re.compile(_FILE.pattern + r"\s+\(([^)]*)\)")  # of a route: a file, and in parentheses what of it is meant
# What documents say: "20 files, 1,000 of their 5,000 lines" to read first, "crosses 76 of the 208 files".
PRINTED = re.compile(
    r"(\d+)\s+files,\s+([\d,]+)\s+of\s+their\s+([\d,]+)\s+lines.*?crosses\s+(\d+)\s+of\s+(?:the\s+)?(\d+)\s+files",
    re.DOTALL,
)
PRINTED_IN = ("README.md", ARCHITECTURE)
ROUNDED = 0.05  # printed numbers of lines and of all files may differ by as much
SMALLEST, LARGEST = 60, 450
# A folder's face, a command, what Serve is given, a dialect: small files that one other file names.
EXEMPT_NAMES = ("__init__.py", "__main__.py", "deployment.py")
EXEMPT_FOLDERS = ("serve_app/extensions",)

Trees = Mapping[str, ast.Module]  # by path
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True, slots=True)
class Imported:
    """The files that the processes of one request import, and the classes in them."""

    files: tuple[Path, ...]
    num_classes: int


@dataclass(frozen=True, slots=True)
class Parameter:
    """A parameter with a default, and where a call puts it."""

    function: str
    name: str
    position: int | None  # behind `self`; None: by keyword only
    place: str


def trees(root: Path, *folders: str) -> Trees:
    files = sorted(file for folder in folders for file in (root / folder).rglob("*.py"))
    return {file.relative_to(root).as_posix(): ast.parse(file.read_text(encoding="utf-8")) for file in files}


def num_lines(file: Path) -> int:
    return len(file.read_text(encoding="utf-8").splitlines())


def size(root: Path, folder: str, without: str | None = None) -> tuple[int, int]:
    """Lines and files of Python below a folder, but those below another one."""
    files = [file for file in (root / folder).rglob("*.py") if not (without and file.is_relative_to(root / without))]
    return sum(map(num_lines, files)), len(files)


def num_words(root: Path) -> int:
    """Of the documents, counted as `wc -w` does."""
    return sum(len(file.read_text(encoding="utf-8").split()) for each in DOCUMENTS for file in root.glob(each))


def routes(root: Path) -> dict[str, dict[str, list[str]]]:
    """The files of each route to read first, in its order, and which functions and classes of each are meant."""
    return {
        name: {
            file: re.findall(r"`([\w.]+)`", names)
            for file, names in _STOP.findall(_text(root / page))
            if (root / file).exists()
        }
        for name, page in TOUR.items()
    }


def route_lines(root: Path, route: Mapping[str, list[str]]) -> int:
    """Lines of what is meant. Raises LookupError for a name that a file does not define, or defines twice."""
    return sum(_num_own_lines(root / file, name) for file, names in route.items() for name in names)


def _num_own_lines(file: Path, name: str) -> int:
    """Of a function or class: `f` is one of the file itself, `A.f` is what the class A defines."""
    found: list[Any] = [ast.parse(file.read_text(encoding="utf-8"))]
    for part in name.split("."):
        inside = [node for outer in found for node in outer.body]
        found = [node for node in inside if isinstance(node, _DEFINITIONS) and node.name == part]
    if len(found) != 1:
        raise LookupError(f"{file} defines {name} {len(found)} times: bring docs/code-*.md up to date")
    return int(found[0].end_lineno - found[0].lineno + 1)


def crossed(root: Path) -> set[str]:
    """The files that carry a plain request."""
    return {file for page in TOUR.values() for file in _linked(root, page) if (root / file).exists()}


def _linked(root: Path, page: str) -> list[str]:
    return _FILE.findall(_text(root / page))


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8") if page.exists() else ""


def misprinted(root: Path) -> list[str]:
    """Documents that print other numbers than are counted, and code tours that link to a removed file."""
    to_read = routes(root).values()
    lines, everything = sum(route_lines(root, each) for each in to_read), sum(size(root, name)[1] for name in SERVING)
    first = {file for route in to_read for file in route}
    whole = sum(num_lines(root / file) for file in first)
    exact, rounded = [len(first), len(crossed(root))], [lines, whole, everything]
    counted = f"{exact[0]} files, {lines} of their {whole} lines; crosses {exact[1]} of {everything} files"
    wrong = [f"{name}: it is {counted}" for name in PRINTED_IN if not _prints(root / name, exact, rounded)]
    links = [(page, file) for page in TOUR.values() for file in _linked(root, page)]
    gone = [f"{page} links to {file}, which was removed" for page, file in links if not (root / file).exists()]
    return gone + wrong + misprinted_rooms(root)


def misprinted_rooms(root: Path) -> list[str]:
    """Rows of the table of rooms that print other numbers than are counted."""
    wrong, passed = list[str](), {root / file for file in crossed(root)}
    for names, *printed in _ROOMS.findall(_text(root / MAP)):
        rooms, _, left_out = names.partition(" without ")
        files = {file for room in re.findall(r"`(.+?)`", rooms) for file in (root / room).rglob("*.py")}
        files -= {file for room in re.findall(r"`(.+?)`", left_out) for file in (root / room).rglob("*.py")}
        counts = [sum(map(num_lines, files)), sum(map(num_lines, files & passed))]
        said = [int(number.replace(",", "")) for number in printed]
        if any(abs(number - count) > ROUNDED * count for number, count in zip(said, counts, strict=True)):
            wrong.append(f"{MAP}, {names}: it is {counts[0]} lines, {counts[1]} crossed")
    return wrong


def _prints(document: Path, exact: list[int], rounded: list[int]) -> bool:
    found = PRINTED.search(document.read_text(encoding="utf-8"))
    if found is None:
        return False
    num_first, *lines, num_crossed, num_all = (int(number.replace(",", "")) for number in found.groups())
    near = zip((*lines, num_all), rounded, strict=True)
    return [num_first, num_crossed] == exact and all(abs(said - is_so) <= ROUNDED * is_so for said, is_so in near)


def way_of_a_request(root: Path) -> Imported:
    """The modules of the three processes and all they import of ours, without files that only say what a folder is."""
    found: dict[Path, ast.Module] = {}
    waiting = list(PROCESSES)
    while waiting:
        file = _file(root, waiting.pop())
        if file is not None and file not in found:
            found[file] = ast.parse(file.read_text(encoding="utf-8"))
            waiting += imported(found[file])
    files = tuple(sorted(file for file, tree in found.items() if len(tree.body) > (file.name == "__init__.py")))
    return Imported(files, sum(isinstance(node, ast.ClassDef) for file in files for node in ast.walk(found[file])))


def _file(root: Path, module: str) -> Path | None:
    """Of a module of ours; None for others, and for names that are no modules."""
    if module.partition(".")[0] not in SERVING:
        return None
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules, and names that may be modules, but those that are imported for types only."""
    types = {id(node) for each in ast.walk(tree) if _is_for_types(each) for node in ast.walk(each)}
    for node in ast.walk(tree):
        if id(node) in types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def settings() -> list[str]:
    """Dotted names of all settings."""
    config = import_module("serve_app.config")
    of_extensions = config.settings_kinds(None).items()
    own = [leaf for name, kind in of_extensions for leaf in _leaves(kind, f"api.{name}.")]
    return [*_leaves(config.AppConfig), *own]


def _leaves(model: type, prefix: str = "") -> Iterator[str]:
    for name, annotation in _fields(model).items():
        nested = _models(annotation)
        if not nested:
            yield prefix + name
        for inner in nested:
            yield from _leaves(inner, f"{prefix}{name}.")


def _fields(model: type) -> dict[str, object]:
    fields = getattr(model, "model_fields", None)  # of pydantic
    if fields is not None:
        return {name: field.annotation for name, field in fields.items()}
    types = typing.get_type_hints(model)
    return {field.name: types[field.name] for field in dataclasses.fields(model)}


def _models(annotation: object) -> list[type]:
    if isinstance(annotation, type) and (hasattr(annotation, "model_fields") or dataclasses.is_dataclass(annotation)):
        return [annotation]
    return [model for inner in typing.get_args(annotation) for model in _models(inner)]


def table(root: Path) -> Iterator[str]:
    """The numbers, a line each."""
    sizes_of = {package: size(root, package, without=EXPERIMENTS) for package in PACKAGES}
    serving, everything = (sum(sizes_of[name][0] for name in names) for names in (SERVING, PACKAGES))
    rows = [*sizes_of.items(), ("experiments", size(root, EXPERIMENTS)), ("tests", size(root, "tests"))]
    for name, (lines, files) in rows:
        yield f"{name:28}{lines:7} lines {files:4} files"
    yield f"{'serving':28}{serving:7} lines"
    yield f"{'all but experiments, tests':28}{everything:7} lines"
    yield f"{'documents':28}{num_words(root):7} words"
    way = way_of_a_request(root)
    lines = sum(map(num_lines, way.files))
    yield f"{'imported for one request':28}{lines:7} lines {len(way.files):4} files {way.num_classes:4} classes"
    named = crossed(root)
    yield f"{'crossed by it':28}{sum(num_lines(root / file) for file in named):7} lines {len(named):4} files"
    for name, route in routes(root).items():
        yield f"{f'read first: {name}':28}{route_lines(root, route):7} lines {len(route):4} files"
    yield f"{'settings':28}{len(settings()):7}"


def classes_twice(code: Trees) -> list[str]:
    """Public classes of one name in several files."""
    homes: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in code.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].add(path)
    return [f"{name}: {', '.join(sorted(found))}" for name, found in sorted(homes.items()) if len(found) > 1]


def sizes(root: Path, code: Trees) -> list[str]:
    """Files that are too large, or small with one importer or none."""
    importers: defaultdict[str, set[str]] = defaultdict(set)
    for path, tree in code.items():
        for module in imported(tree):
            importers[module].add(path)
    named = "".join(file.read_text(encoding="utf-8") for file in (root / "cluster").rglob("*.yaml"))
    faults = []
    for path in code:
        lines = num_lines(root / path)
        module = path.removesuffix(".py").replace("/", ".").replace("tools.talkray_tools", "talkray_tools")
        if lines > LARGEST:
            faults.append(f"{path}: {lines} lines, at most {LARGEST}")
        exempt = path.rpartition("/")[2] in EXEMPT_NAMES or path.startswith(EXEMPT_FOLDERS) or module in named
        if lines < SMALLEST and not exempt and len(importers[module]) < 2:
            faults.append(f"{path}: {lines} lines and {len(importers[module])} importers")
    return faults


def set_by_tests_only(code: Trees, tests: Trees) -> list[str]:
    """Parameters whose default is replaced in tests and nowhere else. A call counts for all functions of its name."""
    ours, theirs = calls(code), calls(tests)
    return [
        f"{each.place}: {each.function}({each.name}=)"
        for each in defaults(code)
        if is_set(each, theirs) and not is_set(each, ours)
    ]


def defaults(code: Trees) -> Iterator[Parameter]:
    """Every parameter that has a default; those of a constructor under the name of its class."""
    for path, tree in code.items():
        owners = {
            id(child): node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef) for child in node.body
        }
        for node in ast.walk(tree):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            if any(isinstance(each, ast.Call) and last_name(each.func) == "command" for each in node.decorator_list):
                continue  # a person sets its options
            owner, place = owners.get(id(node)), f"{path}:{node.lineno}"
            name = owner if owner and node.name == "__init__" else node.name
            bare = any(isinstance(each, ast.Name) and each.id == "staticmethod" for each in node.decorator_list)
            arguments = [*node.args.posonlyargs, *node.args.args][1 if owner and not bare else 0 :]
            first = len(arguments) - len(node.args.defaults)
            for position, argument in enumerate(arguments):
                if position >= first:
                    yield Parameter(name, argument.arg, position, place)
            for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True):
                if default is not None:
                    yield Parameter(name, argument.arg, None, place)


def calls(code: Trees) -> dict[str, list[ast.Call]]:
    """Calls by the last part of what is called; `partial(f, x)` is one of f."""
    found: defaultdict[str, list[ast.Call]] = defaultdict(list)
    for tree in code.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = last_name(node.func)
                if name == "partial" and node.args:
                    name, node = last_name(node.args[0]), ast.Call(node.func, node.args[1:], node.keywords)
                found[name].append(node)
    return found


def last_name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def is_set(parameter: Parameter, found: Mapping[str, list[ast.Call]]) -> bool:
    """Whether a call says it: by name, by its place, or in `*` or `**`, which may hold it."""
    return any(
        any(keyword.arg in (parameter.name, None) for keyword in call.keywords)
        or any(isinstance(argument, ast.Starred) for argument in call.args)
        or (parameter.position is not None and len(call.args) > parameter.position)
        for call in found.get(parameter.function, ())
    )


def over_budget(root: Path, budgets: Mapping[str, int]) -> list[str]:
    """Folders with more lines of Python than pyproject.toml gives them."""
    whole = {folder: size(root, folder)[0] for folder in budgets}
    found = {
        outer: lines - sum(whole[inner] for inner in budgets if inner.startswith(f"{outer}/"))
        for outer, lines in whole.items()
    }
    return [f"{name}: {found[name]} lines, budget {budget}" for name, budget in budgets.items() if found[name] > budget]


def faults(root: Path) -> dict[str, list[str]]:
    """What breaks each rule, by its name in `[tool.talkray.faults]`."""
    code, tests = trees(root, *PACKAGES), trees(root, "tests", SUITES)
    code = {path: tree for path, tree in code.items() if path not in tests}
    return {
        "classes": classes_twice(code),
        "sizes": sizes(root, code),
        "keywords": set_by_tests_only(code, tests),
        "budgets": over_budget(root, _numbers(root)["budgets"]),
        "printed": misprinted(root),
    }


def _numbers(root: Path) -> dict[str, dict[str, int]]:
    text = (root / "pyproject.toml").read_text(encoding="utf-8")
    numbers: dict[str, dict[str, int]] = tomllib.loads(text)["tool"]["talkray"]
    return numbers


def main() -> None:
    """The table, then the breaches; the exit status is 1 where there are more than pyproject.toml still allows."""
    parser = argparse.ArgumentParser(prog="python -m tools.house", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--names", action="store_true", help="list the files that are imported for a request, and the settings"
    )
    arguments = parser.parse_args()
    root = Path(__file__).parents[1]
    print(*table(root), sep="\n")
    if arguments.names:
        print(*(file.relative_to(root) for file in way_of_a_request(root).files), *settings(), sep="\n")
    allowed = _numbers(root)["faults"]
    too_many = False
    for rule, found in faults(root).items():
        print(f"{rule}: {len(found)}, allowed {allowed[rule]}", *found, sep="\n  ")
        too_many |= len(found) > allowed[rule]
    sys.exit(int(too_many))


if __name__ == "__main__":
    main()
