"""Parts of a file whose keys are the parameters of a function or class: names, types, defaults and descriptions."""

from __future__ import annotations

import functools
import inspect
import operator
import os
import re
import types
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from types import SimpleNamespace
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import Discriminator, Field, Tag, TypeAdapter

from mbaas.validation import options

NOT_IN_FILES = ("filesystem",)
"""Parameters whose values are Python objects."""

RELATIVE = "Relative paths begin at the folder of this file."


def parameters_of(call: Callable[..., Any]) -> dict[str, Any]:
    """Return the parameters that a file may contain, and their types."""
    found = inspect.signature(call).parameters
    annotations = {name: each.annotation for name, each in found.items() if name not in NOT_IN_FILES}
    # not of the function itself: types of the others are imported for type checkers only
    return get_type_hints(SimpleNamespace(__annotations__=annotations), vars(inspect.getmodule(call)), None, True)


def path_parameters(call: Callable[..., Any]) -> tuple[str, ...]:
    """Return the parameters that are paths or URIs; the first one names the data."""
    first, *others = parameters_of(call).items()
    return (first[0], *(name for name, kind in others if os.PathLike in map(_plain, _alternatives(kind))))


def section(call: Callable[..., Any], *, within: str) -> type:
    """Return a class for the parameters of ``call`` as a section of a file.

    Args:
        call: a reader of datasets, or a class. Its docstring describes the parameters.
        within: path of the section, for errors.
    """
    paths = path_parameters(call) if inspect.isfunction(call) else ()
    descriptions, defaults = described(call), inspect.signature(call).parameters
    members: dict[str, Any] = {"__doc__": summary(call), "__annotations__": {}, "__module__": __name__}
    for name, kind in parameters_of(call).items():
        known = f"{descriptions.get(name, '')} {RELATIVE}" if name in paths else descriptions.get(name)
        annotation = str if paths and name == paths[0] else _in_file(kind)
        members["__annotations__"][name] = Annotated[annotation, Field(description=known)]
        if defaults[name].default is not inspect.Parameter.empty:
            members[name] = defaults[name].default
    return options(within=within)(type(call.__name__, (), members))


def reader_key(read: Callable[..., Any]) -> Any:
    """Return the type of a reader's key: a path or a section, and only a section if the reader needs more."""
    kind = section(read, within=f"data.{read.__name__}")
    required = [each for each in kind.__dataclass_fields__.values() if each.default is MISSING]  # type: ignore[attr-defined]
    if len(required) > 1:
        return Annotated[kind | None, Field(description=f"{summary(read)} Its options.")]
    either: Any = Annotated[Annotated[str, Tag("value")] | Annotated[kind, Tag("mapping")], Discriminator(form)]
    return Annotated[either | None, Field(description=f"{summary(read)} Its path, or its options.")]


def form(said: Any) -> str:
    """Return "mapping" for options, or "value"."""
    return "mapping" if isinstance(said, dict) else "value"


def schema_of(step: type) -> dict[str, Any]:
    """Return the JSON schema of a transform's parameters: the first one alone, or all by name."""
    descriptions, defaults = described(step), inspect.signature(step).parameters
    parts = {
        name: {**_schema(kind), "description": descriptions.get(name, "")} for name, kind in parameters_of(step).items()
    }
    if not parts:
        return {"type": "null"}
    whole = {
        "type": "object",
        "properties": parts,
        "required": [name for name in parts if defaults[name].default is inspect.Parameter.empty],
        "additionalProperties": False,
    }
    return {"anyOf": [next(iter(parts.values())), whole, {"type": "null"}]}


def _schema(kind: Any) -> dict[str, Any]:
    if get_origin(kind) is Callable or kind is Any:
        return {"type": "string"}
    return TypeAdapter(_in_file(kind)).json_schema()


def described(call: Callable[..., Any]) -> dict[str, str]:
    """Return the descriptions of parameters in the section "Args" of a docstring.

    ``path, listing: as for `read_images`.`` stands for the descriptions of that function.
    """
    text = (inspect.getdoc(call) or "").partition("Args:")[2].partition("\n\n")[0]
    found: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w+(?:, \w+)*): ((?:.|\n {5})*)", text, re.MULTILINE):
        other = re.fullmatch(r"as for `(\w+)`\.", words.strip())
        meant = described(getattr(inspect.getmodule(call), other[1])) if other is not None else {}
        found.update((name, meant.get(name) or " ".join(words.split())) for name in names.split(", "))
    return found


def summary(call: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring."""
    return " ".join((inspect.getdoc(call) or "").partition("\n\n")[0].split())


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)


def _plain(kind: Any) -> Any:
    return get_origin(kind) or kind


def _in_file(kind: Any) -> Any:
    """Return a type as files have it: paths are strings, and lists are tuples."""
    kept = [each for each in _alternatives(kind) if _plain(each) is not os.PathLike]
    if len(kept) > 1 or kept[0] is not kind:
        return functools.reduce(operator.or_, map(_in_file, kept))
    if _plain(kind) is Sequence:
        return tuple[(_in_file(get_args(kind)[0]), ...)]  # type: ignore[misc]
    return kind
