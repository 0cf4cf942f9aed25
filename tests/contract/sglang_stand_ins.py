"""Stand-ins for packages that SGLang imports and a CPU cannot run: triton, sgl_kernel, torchvision.

`install_sglang.py` puts this module and a .pth file that imports it into SGLang's environment, so
that it is there in every process of the server. What the three packages would hold can be
imported, subclassed, used as a decorator and written into annotations. Their kernels cannot run:
calling a function of sgl_kernel raises.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

# SGLang and torch compare these with the least that they need.
VERSIONS = {"triton": "3.8.0", "sgl_kernel": "0.4.10", "torchvision": "0.28.0"}


class _Nothing(type):
    """Type of classes that stand for anything; attributes of them are more of the same."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, _make(f"{cls.__qualname__}.{name}"))
        return cls.__dict__[name]

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "__stands_in__" not in cls.__dict__:
            return super().__call__(*args, **kwargs)
        if cls.__qualname__.startswith("sgl_kernel"):
            raise NotImplementedError(f"{cls.__qualname__} does not run on this machine")
        # As a decorator it changes nothing; with settings it gives the decorator. A question, such
        # as triton's for its device, gets nothing that could pass for an answer.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else lambda x: x

    def __getitem__(cls, _: Any) -> Any:
        return cls


def _make(path: str) -> Any:
    return _Nothing(path.rpartition(".")[2], (), {"__stands_in__": True, "__qualname__": path})


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _make(f"{self.__name__}.{name}"))
        return self.__dict__[name]


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname.partition(".")[0] in VERSIONS:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        if module.__name__ in VERSIONS:
            module.__version__ = VERSIONS[module.__name__]  # pyright: ignore[reportAttributeAccessIssue]


sys.meta_path.insert(0, _Finder())
