"""Install SGLang for a machine without GPU into an environment of its own, and print its Python.

    python tests/contract/install_sglang.py [FOLDER]

The server is the real one: no file of it is changed. Packages that only a GPU can run are replaced
by stand-ins that can be imported (`sglang_stand_ins.py`). A folder that is complete is left as it
is; one that is not is made anew. It takes about 1.6 GB.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "requirements.txt"
STAND_INS = HERE / "sglang_stand_ins.py"
DEFAULT = Path(".cache/copc_jax/sglang")
# Of the interpreter that SGLang's wheels and the pinned ones were tried with.
PYTHON = (3, 11)


def install(folder: Path) -> Path:
    """Make SGLang's environment if it is not there, and return its interpreter.

    Raises:
        SystemExit: with what failed and what would help.
    """

    def fill(python: Path) -> None:
        install_requirements(pip_install(python), REQUIREMENTS)
        site = python.parents[1] / f"lib/python{PYTHON[0]}.{PYTHON[1]}/site-packages"
        shutil.copy(STAND_INS, site)
        (site / "sglang_stand_ins.pth").write_text("import sglang_stand_ins\n")
        # A torch for CUDA names its version, or does not even load without CUDA's libraries.
        asked = "import torch; assert torch.version.cuda is None"
        if subprocess.run([str(python), "-c", asked], capture_output=True, check=False).returncode:
            raise SystemExit(
                "pip found no CPU build of torch, only one for CUDA; name an index that has CPU "
                "builds, such as PyTorch's own, in PIP_EXTRA_INDEX_URL, and run this again"
            )
        say("compiling to bytecode")
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}
        # Some packages ship templates that are no Python; the rest counts.
        subprocess.run(
            [str(python), "-m", "compileall", "-q", str(site)],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )

    return make_environment(folder, [REQUIREMENTS, STAND_INS], fill)


def make_environment(folder: Path, files: list[Path], fill: Callable[[Path], None]) -> Path:
    """Make an environment, unless one that was completed with the same files is there.

    Args:
        folder: where; what is there and not complete is replaced.
        files: what the environment is made from.
        fill: installs into it, given its interpreter.

    Returns:
        The interpreter.
    """
    folder = folder.resolve()
    python = folder / "bin" / "python"
    stamp = folder / "complete"
    contents = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if stamp.exists() and stamp.read_text() == contents:
        return python
    started = time.monotonic()
    say(f"making {folder}")
    stamp.unlink(missing_ok=True)
    subprocess.run([_interpreter(), "-m", "venv", "--clear", str(folder)], check=True)
    fill(python)
    size = sum(p.stat().st_size for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    stamp.write_text(contents)
    say(f"{time.monotonic() - started:.0f} s, {size / 1e6:.0f} MB")
    return python


def pip_install(python: Path) -> list[str]:
    """Return the command that installs with an environment's own pip."""
    pip = [str(python), "-m", "pip", "--disable-pip-version-check"]
    return [*pip, "install", "--progress-bar", "off"]


def install_requirements(install: list[str], requirements: Path) -> None:
    """Install pinned packages without their dependencies, and say how far it is.

    Args:
        install: the command that installs.
        requirements: the packages, one a line.

    Raises:
        SystemExit: with the end of what pip said.
    """
    lines = requirements.read_text().splitlines()
    count = sum(not line.startswith("#") for line in lines)
    command = [*install, "--no-deps", "-r", str(requirements)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = []
        done = 0
        for line in process.stdout:
            said.append(line)
            # The second of files that lie on this machine.
            if line.startswith(("Collecting ", "Processing ")):
                done += 1
                say(f"[{done}/{count}] {line.split()[1].rpartition('/')[2]}")
            elif line.startswith("Installing "):
                say("installing them")
    if process.returncode:
        raise SystemExit("".join(said[-20:]) + f"pip could not install {requirements.name}")


def _interpreter() -> str:
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    name = f"python{PYTHON[0]}.{PYTHON[1]}"
    found = shutil.which(name)
    if found is None:
        raise SystemExit(f"the environment needs {name}, which is not on PATH")
    return found


def say(text: str) -> None:
    """Report progress; standard output is for the path alone."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    print(install(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
