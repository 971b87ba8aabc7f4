"""The rules that keep the house small: `python -m tools.rules` lists what breaks them. Budgets stand in pyproject.toml.

1. Who may import what: `lint-imports`.
2. The name of a public class stands once in the tree.
3. A file has 60 to 450 lines. A smaller one needs two importers.
4. No keyword has a default that only tests set.
5. A folder keeps its budget of lines.
"""

import ast
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("serve_app", "deployments", "loadtest", "tools")
SMALLEST, LARGEST = 60, 450
# A folder's face, a command, what Serve is given, a dialect: small files that one other file names.
EXEMPT_NAMES = ("__init__.py", "__main__.py", "deployment.py")
EXEMPT_FOLDERS = ("serve_app/dialects",)

Trees = Mapping[str, ast.Module]  # by path


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
        lines = len((root / path).read_text(encoding="utf-8").splitlines())
        module = path.removesuffix(".py").replace("/", ".").replace("tools.talkray_tools", "talkray_tools")
        if lines > LARGEST:
            faults.append(f"{path}: {lines} lines, at most {LARGEST}")
        exempt = path.rpartition("/")[2] in EXEMPT_NAMES or path.startswith(EXEMPT_FOLDERS) or module in named
        if lines < SMALLEST and not exempt and len(importers[module]) < 2:
            faults.append(f"{path}: {lines} lines and {len(importers[module])} importers")
    return faults


def imported(tree: ast.Module) -> Iterator[str]:
    """Modules, and names that may be modules."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


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
    for call in found.get(parameter.function, ()):
        if any(keyword.arg in (parameter.name, None) for keyword in call.keywords):
            return True
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return True
        if parameter.position is not None and len(call.args) > parameter.position:
            return True
    return False


def over_budget(root: Path, code: Trees, budgets: Mapping[str, int]) -> list[str]:
    """Folders with more lines of Python than pyproject.toml gives them."""
    faults = []
    for folder, budget in budgets.items():
        paths = [path for path in code if path.startswith(f"{folder}/")]
        lines = sum(len((root / path).read_text(encoding="utf-8").splitlines()) for path in paths)
        if lines > budget:
            faults.append(f"{folder}: {lines} lines, budget {budget}")
    return faults


def faults(root: Path) -> dict[str, list[str]]:
    """What breaks each rule, by its name in `[tool.talkray.faults]`."""
    code, tests = trees(root, *PACKAGES), trees(root, "tests")
    budgets = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["talkray"]["budgets"]
    return {
        "classes": classes_twice(code),
        "sizes": sizes(root, code),
        "keywords": set_by_tests_only(code, tests),
        "budgets": over_budget(root, code, budgets),
    }


def main() -> None:
    """Prints them; the exit status is 1 where there are more than pyproject.toml still allows."""
    root = Path(__file__).parents[1]
    allowed = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["talkray"]["faults"]
    too_many = False
    for rule, found in faults(root).items():
        print(f"{rule}: {len(found)}, allowed {allowed[rule]}", *found, sep="\n  ")
        too_many |= len(found) > allowed[rule]
    sys.exit(int(too_many))


if __name__ == "__main__":
    main()
