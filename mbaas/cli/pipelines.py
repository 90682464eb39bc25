"""A pipeline from a file: transforms by name, with their parameters.

::

    pipeline:
      - DecodeImage
      - RandomResizedCrop: 224                        # one value is the first parameter
      - ColorJitter: {brightness: 0.2, contrast: 0.2}
      - Map: my_prep:sharpen                          # a function of a module beside the file, or of an installed one
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from mbaas import transforms
from mbaas.errors import ConfigError
from mbaas.files import Located
from mbaas.transforms import Pipeline, Transform
from mbaas.validation import instead

KNOWN: dict[str, type[Transform]] = {
    name: kind
    for name, kind in vars(transforms).items()
    if isinstance(kind, type) and issubclass(kind, Transform) and kind is not Transform
}


def pipeline_of(entry: Located) -> Pipeline:
    """The pipeline that a list in a file describes.

    Raises:
        ConfigError: an unknown transform or parameter, a wrong value or a wrong order; says in which line.
    """
    if not entry.items:
        raise entry.error(f"pipeline must be a list of transforms that begins with DecodeImage, got {entry.said}")
    made = [_transform(item) for item in entry.items]
    try:
        return Pipeline(made)
    except ConfigError as error:
        raise entry.error(str(error)) from None


def _transform(item: Located) -> Transform:
    name, given = _name_and_parameters(item)
    if name not in KNOWN:
        raise item.error(f"unknown transform {name!r}; {instead(name, KNOWN)}")
    parameters = _keywords(name, given) if given is not None else {}
    if name == "Map" and isinstance(parameters.get("fn"), str):
        parameters["fn"] = _function(item, parameters["fn"])
    try:
        return KNOWN[name](**parameters)
    except ConfigError as error:
        raise item.error(str(error)) from None
    except TypeError:
        wanted = ", ".join(f.name for f in fields(KNOWN[name]) if f.default is MISSING)  # type: ignore[arg-type]
        raise item.error(f"{name} needs {wanted}, got {', '.join(parameters) or 'no parameter'}") from None


def _name_and_parameters(item: Located) -> tuple[str, Located | None]:
    if isinstance(item.value, str):
        return item.value, None
    if len(item.fields) != 1:
        raise item.error(f"a transform must be a name, or 'name: parameters', got {item.said}")
    (name, parameters), *_ = item.fields.items()
    return name, parameters if parameters.value is not None else None


def _keywords(name: str, given: Located) -> dict[str, Any]:
    known = [f.name for f in fields(KNOWN[name])]  # type: ignore[arg-type]
    if not known:
        raise given.error(f"{name} takes no parameters, got {given.said}")
    if not given.fields:
        return {known[0]: given.value}
    for key, field in given.fields.items():
        if key not in known:
            raise field.error(f"{name} has no parameter {key!r}; {instead(key, known)}")
    return {key: field.value for key, field in given.fields.items()}


def _function(item: Located, path: str) -> Callable[..., Any]:
    """The function that "module:function" names."""
    module_name, _, name = path.partition(":")
    if not module_name or not name:
        raise item.error(f"Map's fn must be 'module:function', got {path!r}")
    folder = str(item.file.resolve().parent)
    sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
        function: Callable[..., Any] = getattr(module, name)
    except (ImportError, AttributeError) as error:
        raise item.error(f"cannot find Map's fn {path!r}: {error}") from None
    finally:
        sys.path.remove(folder)
    if Path(module.__file__ or "").resolve().parent == Path(folder):
        _ship(module)
    return function


def _ship(module: Any) -> None:
    """Prep workers cannot import what lies beside the file: they get its functions by value."""
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(module)
