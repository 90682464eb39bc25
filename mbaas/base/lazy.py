"""Lazy import of a package's public names and their dependencies."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable, Mapping
from typing import Any


def imported_late(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, from public names to their modules (PEP 562)."""

    def attribute(name: str) -> Any:
        if name not in names:
            near = difflib.get_close_matches(name, names, n=1)
            hint = f"; did you mean {near[0]!r}?" if near else ""
            raise AttributeError(f"module {package!r} has no attribute {name!r}{hint}")
        return getattr(importlib.import_module(names[name]), name)

    return attribute
