"""Imports by name: public names on their first use, and functions that files and command lines name."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from mbaas.errors import ConfigError


def imported_late(package: str, names: Mapping[str, str]) -> Callable[[str], Any]:
    """Return a ``__getattr__`` for a package, from public names to their modules (PEP 562)."""

    def attribute(name: str) -> Any:
        if name not in names:
            raise unknown_attribute(package, name, names)
        return getattr(importlib.import_module(names[name]), name)

    return attribute


def unknown_attribute(package: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return Python's error for an unknown name of a package, with the nearest of ``names``."""
    near = difflib.get_close_matches(name, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return AttributeError(f"module {package!r} has no attribute {name!r}{hint}")


def import_named(path: str, folder: Path, *, what: str) -> Callable[..., Any]:
    """Import the function named by "module:function"; ``what`` describes it in errors: "the step".

    ``folder`` is searched first. Other processes cannot import from there, so functions of that module are pickled by
    value. Raises ConfigError.
    """
    module_name, _, name = path.partition(":")
    if not module_name or not name or not all(part.isidentifier() for part in module_name.split(".")):
        raise ConfigError(f"{what} must be 'module:function', got {path!r}")
    cannot, place = f"cannot find {what} {path!r}", folder.resolve()
    sys.path.insert(0, str(place))  # first, so that the folder takes precedence over installed modules
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(f"{cannot}: there is no module {error.name!r} in {place}, nor an installed one") from None
        raise ConfigError(f"{cannot}: importing {module_name} failed: {error}") from None
    except Exception as error:  # any error: it is user code
        raise ConfigError(f"{cannot}: importing {module_name} failed: {type(error).__name__}: {error}") from None
    finally:
        sys.path.remove(str(place))  # otherwise its files would shadow later imports
    if module.__file__ is None:  # a namespace package, as Python makes of any folder
        found = ", ".join(map(str, module.__path__))
        wanted = f"{module_name.replace('.', '/')}.py"
        raise ConfigError(f"{cannot}: there is no {wanted} in {place}, and {found} is a folder without a program")
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, vars(module), n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ConfigError(f"{cannot}: {module.__file__} has no {name!r}{hint}")
    function: Callable[..., Any] = getattr(module, name)
    if not callable(function):
        raise ConfigError(f"{what} must be a function, and {path!r} is of type {type(function).__name__}")
    if Path(module.__file__).resolve().parent == place:
        from ray import cloudpickle

        cloudpickle.register_pickle_by_value(module)
    return function
