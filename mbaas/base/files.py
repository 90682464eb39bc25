"""Read YAML and JSON files as values with line numbers, validated by pydantic.

`read(file).to(kind)` reads a file as a dataclass or a pydantic model. An invalid value raises a `ConfigError` such as
"feed.yaml:12: timeouts.lease_s must be above 0 seconds, got 0 (a whole number)". A key without a value counts as
missing. `read_value` reads a value of the command line in the same way.

YAML is version 1.1 with two corrections: 1e-3 is a number, and a date is a string.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import select
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails

from mbaas.base import units, validation
from mbaas.errors import ConfigError, shown

Read = TypeVar("Read")

Keys = tuple[int | str, ...]
"""Keys and list indices that lead to a value."""

MOST_BYTES = 64 << 20
"""Upper bound on the bytes of a file, far above any file written by people or mbaas."""

_MOST_VALUES = 100_000
_MOST_DEEP = 100
_TOO_DEEP = f"values must lie in at most {_MOST_DEEP} others, and lie deeper"
PIPE_S = 10.0
"""Time limit for silence on a pipe, in seconds."""

_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}
"""Names of types for YAML authors who may not know Python."""


_MERGE = "tag:yaml.org,2002:merge"
_MOST_SHOWN = 80
"""Characters of a value in an error."""


_OPTION = re.compile(r"(?<![\w.?&/(])(?<!, )([a-z_]{2,})=(?!=)(None|True|False|\.\.\.|(?=[\w'\[({-]))?")
"""An option in an error, in Python syntax; not the parameters of a transform that is shown whole."""

_CONSTANTS = {"None": "null", "True": "true", "False": "false", None: "..."}


_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3 and 2.5e3, which YAML 1.1 reads as strings."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Codes and times of day, which YAML 1.1 reads as numbers of base 8 or 60: 010 as 8, 12:30 as 750."""


class _Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with exponents as numbers and dates as strings."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's name)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


_Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


class Section(BaseModel):
    """Base class of models of a part of a file."""

    model_config = ConfigDict(**validation.STRICT, frozen=True)


@dataclass(frozen=True)
class Located:
    """A value of a file, in its ``file`` and ``line`` (from 1), with its ``items`` or ``fields``.

    ``path`` are keys and list indices that lead here; ``written`` is the source text, shortened, for messages.
    """

    value: Any
    file: Path
    line: int
    path: Keys = ()
    items: tuple[Located, ...] = ()
    fields: dict[str, Located] = field(default_factory=dict)
    written: str = ""

    def error(self, sentence: str) -> ConfigError:
        return ConfigError(f"{self.file}:{self.line}: {sentence}")

    @property
    def said(self) -> str:
        """The value for messages: "'abc' (text)"."""
        if self.value is None:
            return self.written or "nothing"
        shown = repr(self.value) if isinstance(self.value, str) else self.written
        return f"{shown} ({_KINDS.get(type(self.value), type(self.value).__name__)})"

    @property
    def name(self) -> str:
        """The path for messages: "filter[0]"."""
        return _dotted(self.path)

    @property
    def quoting(self) -> str:
        """End of a message about a value that must be text: "; quote it: 'no'"."""
        meant = isinstance(self.value, (bool, int, float))
        return f"; quote it if it is text: '{self.written}'" if meant else ""

    def made(self, make: Callable[[], Read]) -> Read:
        """Return the result of ``make``; a `ConfigError` gets the line of the option that it names."""
        try:
            return make()
        except ConfigError as error:
            raise self.fields.get(error.option, self).error(_about(in_yaml(str(error)), self.path)) from None

    def to(self, kind: type[Read], *, elsewhere: Mapping[str, tuple[str, ...]] | None = None, **given: Any) -> Read:
        """Read this value as a dataclass or a model, with ``given`` further fields that are not in the file.

        ``elsewhere`` are keys that belong to a group, and their full names. Raises ConfigError, with the line, the key,
        the value and the expected value.
        """
        value = _given(self)
        if given and isinstance(value, dict):
            value = {**value, **given}
        reader = validation.adapter_of(kind)
        try:
            # As JSON: for Python values, strict mode would reject lists as tuples, and mappings as models.
            return reader.validate_json(json.dumps(value, default=str), strict=True)
        except ValidationError as error:
            raise self._located(error.errors(include_url=False), reader.json_schema(), elsewhere) from None

    def _located(
        self, found: Sequence[ErrorDetails], schema: Mapping[str, Any], elsewhere: Mapping[str, tuple[str, ...]] | None
    ) -> ConfigError:
        """Return pydantic's first relevant error with its line; the others may be consequences."""
        details = validation.worst(found)
        value = self._at(details["loc"])
        here, name = _dotted(value.path), str(value.path[-1]) if value.path else ""
        if details["type"] in validation.UNKNOWN:
            known = _keys_at(schema, value.path[len(self.path) : -1])
            return value.error(f"unknown key {name!r}; {validation.instead(name, known, elsewhere)}")
        if details["type"] in validation.LACKING:
            if isinstance(last := details["loc"][-1], int):  # a tuple is too short
                return value.error(f"{here} must hold at least {last + 1} values, got {value.said}")
            # all keys missing at the same level, so that users need not fix them one by one
            same = (each["loc"] for each in found if each["type"] == details["type"])
            lacking = " and ".join(repr(loc[-1]) for loc in same if loc[:-1] == details["loc"][:-1])
            within = self._at(details["loc"][:-1])  # the key may be present without a value
            return within.error(f"{_dotted(within.path) or 'the file'} lacks {lacking}")
        if (cause := validation.own(details)) is not None:
            return value.fields.get(cause.option, value).error(_about(str(cause), value.path))
        quoting = value.quoting if details["type"] == "string_type" else ""
        return value.error(f"{here or 'the file'} {validation.wrong(details, name)}, got {value.said}{quoting}")

    def _at(self, where: Keys) -> Located:
        """Return the value at a path, or its nearest ancestor in the file.

        Paths may contain missing keys, and pydantic's tags of alternatives.
        """
        value = self
        for part in where:
            inner = dict(enumerate(value.items)).get(part) if isinstance(part, int) else value.fields.get(part)
            value = inner or value
        return value


def read(file: Path) -> Located:
    """Read a YAML file that contains one mapping.

    Raises ConfigError if it is missing, unreadable, not YAML or not a mapping, or has a duplicate key.
    """
    return parse(_text_of(file), file)


def read_json(file: Path) -> dict[str, Any]:
    """Read a JSON file that contains one object. Raises ConfigError."""
    text = _text_of(file)
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{file}:{error.lineno}: not valid JSON: {error.msg} at column {error.colno}") from None
    except ValueError as error:  # an integer with thousands of digits
        raise ConfigError(f"{file}: not valid JSON: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: {_TOO_DEEP}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{file}: the file must hold a JSON object, got {_KINDS.get(type(found), 'null')}")
    return found


def read_value(kind: Any, text: str, *, name: str) -> Any:
    """Parse a value of the command line, such as "20 GB", "4" or "off", by the annotation of its field.

    Raises ConfigError, with the expected value.
    """
    try:
        # YAML parses numbers, on and off; a field with a unit parses the string
        value = _Loader(text).get_single_data()
        if isinstance(value, int) and value.bit_length() > validation.MOST_BITS:
            raise ConfigError(f"{name} must have at most {validation.MOST_BITS:,} bits, got {value.bit_length():,}")
        if not isinstance(value, str) and _OTHER_BASE.fullmatch(text):
            raise ConfigError(f"{name} must be a decimal number, got {shown(text)}")
        return TypeAdapter(kind).validate_python(value, strict=True)
    except ConfigError:  # a ValueError, too
        raise
    except ValidationError as error:
        must = validation.wrong(error.errors(include_url=False)[0], name)
        raise ConfigError(f"{name} {must}, got {shown(text)}") from None
    except (ValueError, yaml.YAMLError, LookupError, AttributeError, RecursionError):
        # PyYAML raises one of these if a value does not fit its tag: 2026-02-31, !!bool 3
        raise ConfigError(f"{name} must be a value, got {shown(text)}") from None


def _text_of(file: Path) -> str:
    try:
        return _bytes_of(file).decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {file}: it is not UTF-8 text") from None


def _bytes_of(file: Path) -> bytes:
    """Read a file or a pipe, such as a shell's <(...), up to `MOST_BYTES`."""
    # Non-blocking: a pipe without a writer is empty, and a silent writer has PIPE_S.
    descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    content, deadline = bytearray(), time.monotonic() + PIPE_S
    try:
        while True:
            left_ms = max(0.0, deadline - time.monotonic()) * 1000
            poll = select.poll()
            poll.register(descriptor, select.POLLIN)
            if not poll.poll(left_ms):
                raise ConfigError(f"cannot read {file}: it sent nothing for {units.seconds(PIPE_S)}")
            if not (piece := os.read(descriptor, 1 << 20)):
                return bytes(content)
            content += piece
            if len(content) > MOST_BYTES:
                raise ConfigError(f"cannot read {file}: it must have at most {MOST_BYTES:,} bytes, and has more")
    finally:
        os.close(descriptor)


def parse(text: str, file: Path) -> Located:
    """Parse a YAML string, as `read` does for a file; ``file`` is for messages."""
    # the node tree, not `yaml.safe_load`: nodes have lines, and show duplicate keys
    nothing = Located(None, file, 1)
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        found = _Reading(loader, text, file).located(node, nothing.line, ()) if node is not None else nothing
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        problem = error.problem or error.context or ""
        is_tab = mark is not None and text[mark.index : mark.index + 1] == "\t"
        hint = "; indent with spaces, not with a tab" if is_tab else ""
        raise ConfigError(f"{where}: not valid YAML: {problem}{hint}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{file}: {_TOO_DEEP}") from None
    if not isinstance(found.value, dict):
        raise found.error(f"the file must hold 'key: value' lines, got {found.said}")
    return found


@dataclass(frozen=True)
class _Reading:
    loader: _Loader
    text: str
    file: Path
    count: Iterator[int] = field(default_factory=itertools.count)

    def located(self, node: yaml.Node, line: int, path: Keys) -> Located:
        # With aliases, a few lines can expand to billions of values, or to infinitely many.
        if len(path) > _MOST_DEEP:
            raise ConfigError(f"{self.file}:{line}: {_TOO_DEEP}")
        if next(self.count) >= _MOST_VALUES:
            raise ConfigError(f"{self.file}:{line}: the file must hold at most {_MOST_VALUES:,} values, and holds more")
        if isinstance(node, yaml.SequenceNode):
            items = tuple(
                self.located(item, item.start_mark.line + 1, (*path, index)) for index, item in enumerate(node.value)
            )
            return Located([item.value for item in items], self.file, line, path, items, written=self._written(node))
        if isinstance(node, yaml.MappingNode):
            fields = self._fields(node, path)
            values = {key: field.value for key, field in fields.items()}
            return Located(values, self.file, line, path, fields=fields, written=self._written(node))
        try:
            value = self.loader.construct_object(node)
            most = validation.MOST_BITS
            if isinstance(value, int) and value.bit_length() > most:
                raise ValueError(f"a whole number must have at most {most} bits, got {value.bit_length():,}")
            found = Located(value, self.file, line, path, written=self._written(node))
            is_plain = isinstance(node, yaml.ScalarNode) and node.style is None
            if is_plain and not isinstance(value, str) and _OTHER_BASE.fullmatch(node.value):
                meant = f"write {value}, or with quotes '{node.value}' if it is text"
                raise found.error(f"{found.name}: {node.value} is {value} in YAML: {meant}")
            return found
        except yaml.YAMLError as error:
            problem = getattr(error, "problem", None) or error
            raise ConfigError(f"{self.file}:{line}: not valid YAML: {problem}") from None
        except ConfigError:  # a ValueError, too
            raise
        except ValueError as error:  # !!timestamp 2026-02-31
            raise ConfigError(f"{self.file}:{line}: {error}") from None
        except (
            LookupError,
            AttributeError,
            OverflowError,
        ):  # PyYAML raises these if a value does not fit its tag: !!bool 3
            raise ConfigError(f"{self.file}:{line}: {node.value!r} is no {node.tag.rpartition(':')[2]}") from None

    def _fields(self, node: yaml.MappingNode, path: Keys) -> dict[str, Located]:
        fields: dict[str, Located] = {}
        merged: list[yaml.Node] = []
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == _MERGE:
                merged += value_node.value if isinstance(value_node, yaml.SequenceNode) else [value_node]
                continue
            key = self.located(key_node, line, path)
            if not isinstance(key.value, str):
                raise key.error(f"a key must be text, got {key.said}{key.quoting}")
            if key.value in fields:
                raise key.error(f"{key.value!r} is given twice, first in line {fields[key.value].line}")
            fields[key.value] = self.located(value_node, line, (*path, key.value))
        for each in merged:  # a mapping's own keys take precedence, then the first mapping with a key
            if not isinstance(each, yaml.MappingNode):
                line, written = node.start_mark.line + 1, self._written(each)
                raise ConfigError(f"{self.file}:{line}: << must name a mapping, or a list of mappings, got {written}")
            for name, located in self._fields(each, path).items():
                fields.setdefault(name, located)
        return fields

    def _written(self, node: yaml.Node) -> str:
        # a value may be as long as the file, and nested in a hundred others
        text = self.text[node.start_mark.index : min(node.end_mark.index, node.start_mark.index + 4 * _MOST_SHOWN)]
        return textwrap.shorten(text, _MOST_SHOWN, placeholder=" ...")


def shape(value: Any) -> str:
    """Return "mapping", "list" or "value", for pydantic's `Discriminator`."""
    return "mapping" if isinstance(value, dict) else "list" if isinstance(value, list) else "value"


def in_yaml(sentence: str) -> str:
    """Return an error with its options in YAML syntax: "label: null" for "label=None"."""
    return _OPTION.sub(lambda found: f"{found[1]}: {_CONSTANTS.get(found[2], found[2])}", sentence)


def _given(at: Located) -> Any:
    """Return a value without keys that have no value in the file, not even null."""
    if isinstance(at.value, dict):
        return {key: _given(part) for key, part in at.fields.items() if part.value is not None or part.written}
    return [_given(part) for part in at.items] if isinstance(at.value, list) else at.value


def _about(sentence: str, path: Keys) -> str:
    here = _dotted(path)
    return sentence if sentence.startswith(here) else f"{here}: {sentence}"


def _dotted(path: Keys) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def _keys_at(schema: Mapping[str, Any], path: Keys) -> list[str]:
    # The schema has one form for models, dataclasses and unions, whose fields are stored differently.
    part: Any = schema
    for step in (*path, None):
        while "$ref" in part or "anyOf" in part or "oneOf" in part:
            if "$ref" in part:
                part = schema["$defs"][part["$ref"].rpartition("/")[2]]
            else:  # of several alternatives, the one with keys
                forms = part.get("anyOf") or part["oneOf"]
                part = next((form for form in forms if "$ref" in form), forms[0])
        if step is None:
            break
        inner = part.get("properties", {}).get(step, part.get("additionalProperties"))
        part = inner if isinstance(step, str) else part.get("items", {})
        if not isinstance(part, dict):
            return []
    return list(part.get("properties", {}))
