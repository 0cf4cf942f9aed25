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
    "flax",
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


# What runs code that is hidden in a file, by module, and by function where the module has more.
RUNS_WHAT_IT_READS = (
    *("pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "dbm"),
    *("codeop", "imp", "runpy", "torch.load", "yaml.load", "yaml.unsafe_load"),
    *("yaml.full_load", "pandas.read_pickle", "os.system", "os.popen", "subprocess.getoutput"),
)
BUILT_IN = ("eval", "exec", "compile", "__import__", "execfile")
# The program of the sandbox, which has given up every right before it runs any code.
SANDBOX = "tools/python_fork_server.py"


def dotted(node):
    """The full name of a call's function, such as np.load; "" for anything but names."""
    if isinstance(node, ast.Attribute):
        owner = dotted(node.value)
        return f"{owner}.{node.attr}" if owner else ""
    return node.id if isinstance(node, ast.Name) else ""


def dangers(path):
    """List what in a file could run data, each with its line."""
    tree = ast.parse(path.read_text())
    found = [(0, name) for name in imports(path) if within(name, RUNS_WHAT_IT_READS)]
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        if within(name, RUNS_WHAT_IT_READS) or name in BUILT_IN:
            found.append((node.lineno, name))
        for word in node.keywords:
            value = word.value
            if word.arg in ("allow_pickle", "shell", "trust_remote_code") and not (
                isinstance(value, ast.Constant) and value.value is False
            ):
                found.append((node.lineno, word.arg))
    return found


@pytest.mark.parametrize("folder", ["copc_jax", "experiments", "benchmarks"])
def test_no_file_that_is_read_can_run_code(folder):
    paths = sorted((PACKAGE.parent / folder).rglob("*.py"))
    assert paths
    for path in paths:
        if path.as_posix().endswith(SANDBOX):
            # Nothing but what runs the policy's own program, and the check of its syntax.
            assert {name for _, name in dangers(path)} == {"eval", "exec", "compile"}
        else:
            assert dangers(path) == [], path.name


def test_the_search_for_dangers_finds_them(tmp_path):
    path = tmp_path / "bad.py"
    path.write_text(
        "import pickle\nfrom torch import load\nimport numpy as np\nimport yaml\n"
        "np.load('x', allow_pickle=True)\nyaml.load('x')\neval('1')\n"
        "np.load('x', allow_pickle=f())\nnp.load('x', allow_pickle=False)\n"
        "yaml.safe_load('x')\nmodel.eval()\nre.compile('x')\n"
    )
    found = sorted(dangers(path))
    assert found == [
        *((0, "pickle"), (0, "torch.load"), (5, "allow_pickle"), (6, "yaml.load")),
        *((7, "eval"), (8, "allow_pickle")),
    ]


def test_mathematics_is_not_compiled_for_the_caller():
    """A jit decorator hides types from checkers, and pins static arguments for everybody."""
    for module in ("returns", "losses"):
        tree = ast.parse((PACKAGE / f"{module}.py").read_text())
        functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        assert functions and all(node.decorator_list == [] for node in functions)
