"""Install clients that others wrote into an environment of their own, and print its Python.

    python tests/contract/install_clients.py [FOLDER]

SGLang's frontend and benchmark (0.5.9, the last that import without torch) and lm-eval pin packages
that this project has in other versions. uv installs them where there is one, pip otherwise. A
folder that is complete is left as it is. It takes about 0.8 GB.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from install_sglang import HERE, install_requirements, make_environment, pip_install

REQUIREMENTS = HERE / "client_requirements.txt"
DEFAULT = Path(".cache/copc_jax/clients")


def install(folder: Path) -> Path:
    """Make the environment if it is not there, and return its interpreter.

    Raises:
        SystemExit: with what failed.
    """

    def fill(python: Path) -> None:
        uv = shutil.which("uv")
        by_uv = [str(uv), "pip", "install", "--python", str(python)]
        install_requirements(by_uv if uv else pip_install(python), REQUIREMENTS)

    return make_environment(folder, [REQUIREMENTS], fill)


if __name__ == "__main__":
    print(install(Path(sys.argv[1]) if len(sys.argv) > 1 else DEFAULT))
