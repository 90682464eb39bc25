"""A YAML file whose every value knows its line."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from mbaas.errors import ConfigError

_KINDS = {
    str: "text",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list",
    dict: "a mapping",
}


@dataclass(frozen=True)
class Located:
    """A value of a file.

    Attributes:
        value: as plain Python: dict, list, str, int, float, bool, None.
        file: where it stands; for messages.
        line: from 1.
        items: of a list.
        fields: of a mapping; each is located at its key.
    """

    value: Any
    file: Path
    line: int
    items: tuple[Located, ...] = ()
    fields: dict[str, Located] = field(default_factory=dict)

    def error(self, sentence: str) -> ConfigError:
        """An error that says where."""
        return ConfigError(f"{self.file}:{self.line}: {sentence}")

    @property
    def said(self) -> str:
        """What the file says here, for messages: "'abc' (text)"."""
        if self.value is None:
            return "nothing"
        shown = str(self.value).lower() if isinstance(self.value, bool) else repr(self.value)
        return f"{shown} ({_KINDS.get(type(self.value), type(self.value).__name__)})"


def read(file: Path) -> Located:
    """Read a YAML file that holds one mapping.

    Raises:
        ConfigError: the file is missing, unreadable, not YAML or not a mapping, or says a key twice.
    """
    try:
        loader = yaml.SafeLoader(file.read_text(encoding="utf-8"))
        node = loader.get_single_node()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"cannot read {file}: it is not UTF-8 text") from None
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{file}:{mark.line + 1}" if mark else str(file)
        raise ConfigError(f"{where}: not valid YAML: {error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}: not valid YAML: {error}") from None
    found = _located(loader, node, file, 1) if node is not None else Located(None, file, 1)
    if not isinstance(found.value, dict):
        raise found.error(f"the file must hold 'key: value' lines, got {found.said}")
    return found


def _located(loader: yaml.SafeLoader, node: yaml.Node, file: Path, line: int) -> Located:
    if isinstance(node, yaml.SequenceNode):
        items = tuple(_located(loader, item, file, item.start_mark.line + 1) for item in node.value)
        return Located([item.value for item in items], file, line, items)
    if isinstance(node, yaml.MappingNode):
        fields = _fields(loader, node, file)
        return Located({key: field.value for key, field in fields.items()}, file, line, fields=fields)
    try:
        return Located(loader.construct_object(node), file, line)
    except yaml.YAMLError as error:
        raise ConfigError(f"{file}:{line}: not valid YAML: {getattr(error, 'problem', None) or error}") from None
    except ValueError as error:  # 2026-02-31
        raise ConfigError(f"{file}:{line}: {error}") from None


def _fields(loader: yaml.SafeLoader, node: yaml.MappingNode, file: Path) -> dict[str, Located]:
    fields: dict[str, Located] = {}
    for key_node, value_node in node.value:
        line = key_node.start_mark.line + 1
        key = _located(loader, key_node, file, line)
        if not isinstance(key.value, str):
            raise key.error(f"a key must be text, got {key.said}")
        if key.value in fields:
            raise key.error(f"{key.value!r} is said twice, first in line {fields[key.value].line}")
        fields[key.value] = _located(loader, value_node, file, line)
    return fields
