"""Names that a Triton kernel's parameters cannot have. Neither the interpreter nor the compiler refuses them."""

import ast
from pathlib import Path

import deployments

# Of `triton.runtime.jit.create_function_from_signature`, whose text has the parameters' names in it.
RESERVED = {"options", "params", "specialization", "specialize_impl", "backend", "JITCallable"}


def kernels() -> dict[str, set[str]]:
    """Parameters of each function under `@triton.jit`, by file and name."""
    root = Path(deployments.__file__).parent
    by_name = {}
    for path in root.rglob("*.py"):
        for each in ast.walk(ast.parse(path.read_text())):
            if isinstance(each, ast.FunctionDef) and any("triton.jit" in ast.unparse(d) for d in each.decorator_list):
                by_name[f"{path.relative_to(root)}:{each.name}"] = {argument.arg for argument in each.args.args}
    return by_name


def test_kernels_can_be_launched() -> None:
    names = kernels()
    assert len(names) > 20
    assert {kernel: used & RESERVED for kernel, used in names.items() if used & RESERVED} == {}
