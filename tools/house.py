"""How large the house is and what one request crosses: `.venv/bin/python tools/house.py [CHECKOUT]`.

Lines are all lines of Python files. Serving is `serve_app` and `deployments`, without what no replica runs, which stood
among them before it moved to `tools/`. The way of one request is HTTP on one GPU with `codec.placement: inline`: all
files that the modules of its three processes import, in functions too, with the classes in them. Settings are the
fields of `AppConfig` that hold no settings themselves. Generators are listed by name: no syntax tells which of them a
request passes.
"""

import argparse
import ast
import dataclasses
import sys
import typing
from collections import defaultdict
from collections.abc import Iterable, Iterator
from fnmatch import fnmatch
from importlib import import_module
from pathlib import Path

SERVING = ("serve_app", "deployments")
PACKAGES = (*SERVING, "loadtest", "tools")
# The HTTP surface, the talker's replica and its engine. The replica starts its engine by name.
# The last is its name before it moved.
PROCESSES = (
    "serve_app.ingress",
    "deployments.talker.deployment",
    "deployments.talker.process",
    "deployments.talker.engine_process",
)
MOVED_TO_TOOLS = (
    "deployments/demo_voice/*",
    "deployments/byte_tokenizer.py",
    "deployments/codec/bench.py",
    "deployments/codec/random_init.py",
    "deployments/talker/bench.py",
    "deployments/talker/breakdown.py",
    "deployments/talker/kernels/bench*.py",
    "deployments/talker/kernels/sweep.py",
    "deployments/official.py",
    "deployments/random_checkpoint.py",
    "deployments/released.py",
    "deployments/verify.py",
)
# Between the socket and the engine, as file and function: today, and at bea4fcc.
GENERATORS = (
    (
        ("serve_app/api/response.py", "audio_body"),
        ("serve_app/speech/admission.py", "Admission.synthesize"),
        ("deployments/serving/failover.py", "persist"),
        ("deployments/serving/calls.py", "stream"),
        ("deployments/serving/replica.py", "Replica.stream"),
        ("deployments/talker/client.py", "EngineClient.generate"),
    ),
    (
        ("serve_app/speech_stream.py", "audio_body"),
        ("serve_app/long_text.py", "LongText.synthesize"),
        ("serve_app/metering.py", "MeteredSynthesizer.synthesize"),
        ("serve_app/admission.py", "Admission.synthesize"),
        ("serve_app/ingress.py", "HandleSynthesizer.synthesize"),
        ("deployments/forward.py", "forward"),
        ("deployments/codec/frames.py", "all_frames"),
        ("deployments/failover.py", "persist"),
        ("deployments/handles.py", "stream"),
        ("deployments/talker/deployment.py", "Talker.generate"),
        ("deployments/handles.py", "with_beats"),
        ("deployments/talker/engine_client.py", "EngineClient.generate"),
    ),
    (
        ("serve_app/speech_response.py", "audio_body"),
        ("serve_app/admission.py", "Admission.synthesize"),
        ("deployments/failover.py", "persist"),
        ("deployments/handles.py", "stream"),
        ("deployments/replica.py", "Replica.stream"),
        ("deployments/talker/engine_client.py", "EngineClient.generate"),
    ),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Way:
    """The files of one request and the classes in them."""

    files: tuple[Path, ...]
    num_classes: int


def python_files(root: Path, package: str) -> list[Path]:
    """Sorted, without what `root` holds besides its sources."""
    return sorted(file for file in (root / package).rglob("*.py") if "__pycache__" not in file.parts)


def num_lines(files: Iterable[Path]) -> int:
    return sum(len(file.read_text().splitlines()) for file in files)


def serving_files(root: Path) -> list[Path]:
    """What replicas run, and the application around them."""
    files = [file for package in SERVING for file in python_files(root, package)]
    return [file for file in files if not any(fnmatch(str(file.relative_to(root)), moved) for moved in MOVED_TO_TOOLS)]


def way_of_a_request(root: Path) -> Way:
    """The modules of the three processes and all they import of ours, without files that only say what a folder is."""
    found: dict[Path, ast.Module] = {}
    waiting = list(PROCESSES)
    while waiting:
        file = _file(root, waiting.pop())
        if file is not None and file not in found:
            found[file] = ast.parse(file.read_text())
            waiting += _imports(found[file])
    files = tuple(sorted(file for file, tree in found.items() if len(tree.body) > (file.name == "__init__.py")))
    return Way(files, sum(isinstance(node, ast.ClassDef) for file in files for node in ast.walk(found[file])))


def double_names(files: Iterable[Path]) -> list[str]:
    """Classes of different files that have the same name."""
    homes: defaultdict[str, set[Path]] = defaultdict(set)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name].add(file)
    return sorted(name for name, found in homes.items() if len(found) > 1)


def _file(root: Path, module: str) -> Path | None:
    """Of a module of ours; None for others, and for names that are no modules."""
    if module.partition(".")[0] not in SERVING:
        return None
    path = root.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def _imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def generators(root: Path) -> list[str]:
    """`file:line name` of the first list that this checkout has; raises LookupError where it has none of them."""
    for names in GENERATORS:
        lines = [_generator_line(root / file, name) for file, name in names]
        if all(lines):
            return [f"{file}:{line} {name}" for (file, name), line in zip(names, lines, strict=True)]
    raise LookupError(f"{root} has another way than those in GENERATORS: bring tools/house.py up to date")


def _generator_line(file: Path, name: str) -> int | None:
    """Where an async generator begins; None where there is none of that name."""
    *owner, function = name.split(".")
    if not file.exists():
        return None
    nodes: list[ast.AST] = [ast.parse(file.read_text())]
    for part in owner:
        nodes = [n for node in nodes for n in ast.walk(node) if isinstance(n, ast.ClassDef) and n.name == part]
    inside = [inner for outer in nodes for inner in ast.walk(outer)]
    for node in (inner for inner in inside if isinstance(inner, ast.AsyncFunctionDef) and inner.name == function):
        if any(isinstance(inner, ast.Yield) for inner in ast.walk(node)):
            return node.lineno
    return None


def settings(root: Path) -> list[str]:
    """Dotted names of all settings of a checkout; its own modules are imported, so this process can do it once."""
    sys.path.insert(0, str(root))
    config = import_module("serve_app.config")
    assert Path(config.__file__ or "").is_relative_to(root), config.__file__
    return list(_leaves(config.AppConfig))


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


def main() -> None:
    parser = argparse.ArgumentParser(description="lines, files, classes, generators and settings of a checkout")
    parser.add_argument("checkout", type=Path, nargs="?", default=Path(__file__).parents[1])
    parser.add_argument("--names", action="store_true", help="list files, settings and double names as well")
    arguments = parser.parse_args()
    root = arguments.checkout.resolve()

    by_package = {package: python_files(root, package) for package in PACKAGES}
    for package, files in by_package.items():
        print(f"{package:28}{num_lines(files):7} lines {len(files):4} files")
    serving, way, known = serving_files(root), way_of_a_request(root), settings(root)
    print(f"{'all':28}{sum(map(num_lines, by_package.values())):7} lines")
    print(f"{'serving':28}{num_lines(serving):7} lines {len(serving):4} files")
    print(
        f"{'one inline request':28}{num_lines(way.files):7} lines {len(way.files):4} files {way.num_classes:4} classes"
    )
    double = double_names(file for files in by_package.values() for file in files)
    print(f"{'class names used twice':28}{len(double):7}")
    print(f"{'settings':28}{len(known):7}")
    passed = generators(root)
    print(f"{'async generators':28}{len(passed):7}")
    print(*(f"  {line}" for line in passed), sep="\n")
    if arguments.names:
        print(*(file.relative_to(root) for file in way.files), *known, *double, sep="\n")


if __name__ == "__main__":
    main()
