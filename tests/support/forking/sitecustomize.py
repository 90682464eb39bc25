"""A Ray that is started by a process with this folder on its PYTHONPATH forks its workers; see `support.forked_worker`.

Python imports this module when a process starts.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from functools import partialmethod
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

FORKED_WORKER = str(Path(__file__).parents[1] / "forked_worker.py")

PARAMETERS = "ray._private.parameter"
"""Ray's module with the parameters of a node."""


class Finder(importlib.abc.MetaPathFinder):
    """Changes Ray when it is imported, and not before, because examples first set variables that Ray reads then."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != PARAMETERS:
            return None
        sys.meta_path.remove(self)
        spec: Any = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            options = partialmethod(module.RayParams.__init__, worker_path=FORKED_WORKER)
            module.RayParams.__init__ = options

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Finder())
