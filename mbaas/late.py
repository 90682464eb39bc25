"""Names of a package that are imported when they are first used, and with them what they need."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def imported_late(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return the ``__getattr__`` of a package: Python calls it for each name that is not there (PEP 562).

    Args:
        package: its name.
        names: public name -> the module that has it.
    """

    def attribute(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(importlib.import_module(names[name]), name)

    return attribute
