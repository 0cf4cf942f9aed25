"""What an import costs, and which module may import which."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import copc_jax

PACKAGE = Path(copc_jax.__file__).parent
PURE = ("types", "returns", "losses", "methods", "analysis", "model", "sharding", "staging")
HEAVY = (
    "aiohttp",
    "grain",
    "httpx",
    "optax",
    "orbax",
    "safetensors",
    "sglang",
    "tokenizers",
    "torch",
    "transformers",
)
# Standard modules without input or output.
STANDARD = {
    "__future__",
    "abc",
    "bisect",
    "collections",
    "dataclasses",
    "enum",
    "fractions",
    "functools",
    "heapq",
    "itertools",
    "math",
    "operator",
    "types",
    "typing",
    "zlib",
}
ARRAYS = ("jax", "numpy", "jaxtyping", "flax.struct")


def imports(path):
    """List the modules that a file imports anywhere, `from a import b` as a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name} has a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def within(name, packages):
    return any(name == package or name.startswith(package + ".") for package in packages)


def test_importing_the_mathematics_loads_nothing_heavy():
    program = (
        "import copc_jax.losses, copc_jax.returns, copc_jax.methods, sys; "
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=200
    )
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_import_arrays_and_each_other(module):
    allowed = (*STANDARD, *ARRAYS, *(f"copc_jax.{name}" for name in PURE))
    path = PACKAGE / f"{module}.py"
    foreign = sorted(name for name in imports(path) if not within(name, allowed))
    assert foreign == []


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_read_and_write_nothing(module):
    calls = {
        node.func.id
        for node in ast.walk(ast.parse((PACKAGE / f"{module}.py").read_text()))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    }
    assert not calls & {"open", "print", "input", "exec", "eval", "__import__"}


def test_nothing_imports_another_framework():
    for path in PACKAGE.rglob("*.py"):
        others = [x for x in imports(path) if within(x, ("sglang", "torch", "transformers"))]
        assert others == [], path.name


def test_mathematics_is_not_compiled_for_the_caller():
    """A jit decorator hides types from checkers, and pins static arguments for everybody."""
    for module in ("returns", "losses"):
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert functions and all(node.decorator_list == [] for node in functions)
