"""Apply random mutants to the code and find tests that detect them: `make mutants SEED=1 COUNT=40`.

cosmic-ray creates the mutants. Sampling is uniform over the lines of all files, then over the positions of a file, then
over the operators of a position. Each mutant is applied in a copy of the tree. The test file of the mutated module runs
first, then the rest of its folder for at most _FOLDER_S seconds. Tests that also fail without the mutant do not count.
The report lists surviving mutants with their diffs. Some of them do not change observable behaviour.
"""

import argparse
import ast
import difflib
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MUTATED = (
    "serve_app/api", "serve_app/speech", "serve_app/extensions/jobs", "serve_app/extensions/voices",
    "serve_app/scaling", "serve_app/app.py", "serve_app/config.py", "deployments/serving", "deployments/codec",
    "deployments/talker/engine", "deployments/talker/state", "deployments/talker/audio", "deployments/talker/process",
)  # fmt: skip
_GPU_ONLY = re.compile("triton|graphs")  # files that unit tests do not run
_LEFT_OUT = ("RemoveDecorator", "NumberReplacer")  # operators that fail at import or change tuned constants
_TWIN_S, _FOLDER_S = 90.0, 60.0
_MOST_ALWAYS_RED = 5  # limit per stage for tests that also fail without the mutant
_FAILED = re.compile(r"^(?:FAILED|ERROR) ([^\s].*?)(?: - .*)?$", re.MULTILINE)
_HANGS = "the tests take too long"
_UNDECIDED = "undecided: the tests take too long"
_MARKS = "not e2e and not gpu and not scale and not prometheus and not faults and not fleet and not docs and not fuzz"


@dataclass(frozen=True, slots=True)
class Mutant:
    """One changed file."""

    path: str  # relative to the root
    line: int
    source: str  # content of the whole file

    def diff(self) -> str:
        before = (ROOT / self.path).read_text(encoding="utf-8").splitlines()
        lines = difflib.unified_diff(before, self.source.splitlines(), self.path, self.path, lineterm="", n=2)
        return "\n".join(lines)


class _Essence(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_log = ast.unparse(node).startswith("logger.")
        return None if is_log or isinstance(node.value, ast.Constant) else self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        node.annotation = ast.Constant(None)
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_ClassDef(self, node: ast.ClassDef) -> ast.AST:
        node.decorator_list = []  # slots
        return self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    visit_AsyncFunctionDef = visit_FunctionDef  # noqa: N815


def essence(source: str) -> str:
    """Return the source without annotations, docstrings and log lines, whose mutants are ignored."""
    return ast.dump(_Essence().visit(ast.parse(source)))


def twin(path: str) -> str | None:
    """Return the test file of a module."""
    file = Path(path)
    name = f"tests/{file.parent}/test_{file.name}"
    return name if (ROOT / name).exists() else None


def stages(path: str) -> Iterator[tuple[list[str], float]]:
    """Yield groups of tests with time limits: the module's test file or the tests that import it, then the folder."""
    module = path.removesuffix(".py").replace("/", ".")
    tests = sorted((ROOT / "tests").rglob("test_*.py"))
    importers = [str(test.relative_to(ROOT)) for test in tests if module in test.read_text(encoding="utf-8")]
    own, folder = twin(path), ROOT / "tests" / Path(path).parent
    yield ([own] if own else importers[:3]) or [f"tests/{Path(path).parts[0]}"], _TWIN_S
    while not folder.is_dir():
        folder = folder.parent
    yield [*importers, str(folder.relative_to(ROOT))], _FOLDER_S


def drawn(rng: random.Random) -> Iterator[Mutant]:
    """Yield an endless sequence of random mutants."""
    places = [ROOT / place for place in MUTATED]
    files = sorted(file for place in places for file in (place.rglob("*.py") if place.is_dir() else [place]))
    files = [file for file in files if not _GPU_ONLY.search(file.name)]
    weights = [len(file.read_text(encoding="utf-8").splitlines()) for file in files]
    while True:
        file = rng.choices(files, weights)[0]
        if (mutant := _mutant(file, rng)) is not None:
            yield mutant


@cache
def _positions(file: Path) -> dict[tuple[int, int], list[tuple[str, int]]]:
    """Return the operators at each position, with their index among the operator's positions."""
    from cosmic_ray import plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    nodes = list(ast_nodes(get_ast(file.read_text(encoding="utf-8"))))
    found = defaultdict(list)
    for name in plugins.operator_names():
        kind = plugins.get_operator(name)
        if kind.arguments() or any(left_out in name for left_out in _LEFT_OUT):
            continue
        operator = kind()
        positions = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        for number, start in enumerate(positions):
            found[start].append((name, number))
    return found


def _mutant(file: Path, rng: random.Random) -> Mutant | None:
    from cosmic_ray import plugins
    from cosmic_ray.mutating import mutate_code

    if not (positions := _positions(file)):
        return None
    line, column = rng.choice(sorted(positions))
    name, number = rng.choice(positions[line, column])
    before = file.read_text(encoding="utf-8")
    source = mutate_code(before, plugins.get_operator(name)(), number)
    try:
        is_other = source is not None and essence(source) != essence(before)
    except SyntaxError:
        return None
    return Mutant(str(file.relative_to(ROOT)), line, source) if is_other else None


def copied(folder: Path) -> Path:
    """Copy the tree, including compiled files."""
    listed = subprocess.check_output(["git", "ls-files", "-z"], cwd=ROOT, text=True).split("\0")
    compiled = (str(file.relative_to(ROOT)) for file in (ROOT / "deployments").rglob("*.so"))
    for name in filter(None, (*listed, *compiled)):
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    return folder


def failed(copy: Path, tests: list[str], within_s: float, *, without: Sequence[str] = ()) -> str | None:
    """Return the first failing test outside `without`, or a message if the tests take too long."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-rfE", "-p", "no:cacheprovider", "-m", _MARKS, *tests]
    command += [f"--deselect={name}" for name in without]
    with subprocess.Popen(
        command, cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    ) as running:  # fmt: skip
        try:
            output, _ = running.communicate(timeout=within_s)
        except subprocess.TimeoutExpired:
            os.killpg(running.pid, 9)
            return _HANGS
    if running.returncode in (0, 5):  # pytest returns 5 if it collects no tests
        return None
    return match[1] if (match := _FAILED.search(output)) else "the tests did not start"


def killer(copy: Path, mutant: Mutant) -> str | None:
    """Return a test that fails only with the mutant, None for a survivor, or _UNDECIDED on a busy machine."""
    file = copy / mutant.path
    before = file.read_text(encoding="utf-8")

    def red(tests: list[str], within_s: float, *, mutated: bool, without: Sequence[str] = ()) -> str | None:
        file.write_text(mutant.source if mutated else before, encoding="utf-8")
        return failed(copy, tests, within_s, without=without)

    try:
        for number, (tests, within_s) in enumerate(stages(mutant.path)):
            always_red: list[str] = []
            while (found := red(tests, within_s, mutated=True, without=always_red)) is not None:
                if number and found is _HANGS:  # without the mutant, the folder's tests may also take too long
                    return _UNDECIDED
                again = [found] if "::" in found else tests
                without_it = red(again, within_s, mutated=False)
                if without_it is None:
                    return found
                if without_it is _HANGS:
                    return _UNDECIDED
                if "::" not in found or len(always_red) == _MOST_ALWAYS_RED:
                    break
                always_red.append(found)
        return None
    finally:
        file.write_text(before, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=40)
    options = parser.parse_args()
    mutants = drawn(random.Random(options.seed))
    workers, began_s = os.cpu_count() or 1, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="talkray-mutants-") as folder, ThreadPoolExecutor(workers) as pool:
        copies = queue.SimpleQueue[Path]()
        for number in range(workers):
            copies.put(copied(Path(folder) / str(number)))

        def judge(mutant: Mutant) -> str | None:
            copy = copies.get()
            try:
                found = killer(copy, mutant)
            finally:
                copies.put(copy)
            print(f"{mutant.path}:{mutant.line}: {found or 'SURVIVED'}", flush=True)
            return found

        sample = [next(mutants) for _ in range(options.count)]
        verdicts = list(pool.map(judge, sample))
    for mutant, found in zip(sample, verdicts, strict=True):
        if found is None:
            print(f"\n{mutant.path}:{mutant.line}\n{mutant.diff()}")
    survived, undecided = verdicts.count(None), verdicts.count(_UNDECIDED)
    killed = f"{options.count - survived - undecided} of {options.count} killed, {undecided} undecided"
    print(f"\nseed {options.seed}: {killed}, in {time.monotonic() - began_s:.0f} s")


if __name__ == "__main__":
    main()
