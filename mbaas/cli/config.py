"""The file that `mbaas serve` reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType, NoneType
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from mbaas import files, units
from mbaas.errors import ConfigError
from mbaas.files import Located
from mbaas.validation import instead

if TYPE_CHECKING:
    from mbaas.transforms import Pipeline

REQUIRED = ("name", "data", "batch_size", "pipeline")


@dataclass(frozen=True)
class FeedConfig:
    """A feed as a file describes it.

    Attributes:
        name: of the feed.
        data: a URI, or an absolute path: a relative one in the file is relative to the file.
        pipeline: what is done to each sample.
        options: keyword arguments for `mbaas.serve` that the file sets, ``batch_size`` among them; sizes in bytes.
    """

    name: str
    data: str
    pipeline: Pipeline
    options: Mapping[str, Any]


def load(file: Path, *, name: str | None = None) -> FeedConfig:
    """Read and check a file; neither Ray nor the data is touched.

    Args:
        file: YAML.
        name: of the feed, instead of the file's.

    Raises:
        ConfigError: says the file, the line, what is there and what must be.
    """
    from mbaas.cli.pipelines import pipeline_of

    top = files.read(file)
    entries = {key: entry for key, entry in top.fields.items() if entry.value is not None}
    for key, entry in top.fields.items():
        if key not in {*REQUIRED, *_option_types()}:
            raise entry.error(f"unknown key {key!r}; {instead(key, [*REQUIRED, *_option_types()])}")
    missing = [key for key in REQUIRED if key not in entries and not (key == "name" and name)]
    if missing:
        raise ConfigError(f"{file}: {missing[0]!r} is missing; a feed needs {', '.join(REQUIRED)}")
    options = {key: _checked(key, entry) for key, entry in entries.items() if key in _option_types()}
    feed_name = name if name is not None else _text("name", entries["name"])
    _check_ranges(file, feed_name, options, entries)
    return FeedConfig(
        feed_name, _location(entries["data"]), pipeline_of(entries["pipeline"]), MappingProxyType(options)
    )


@cache
def _option_types() -> dict[str, type]:
    """The options of a feed and their types: the fields of `FeedSettings`, so that none is forgotten."""
    from mbaas.settings import FeedSettings

    hints = get_type_hints(FeedSettings)
    return {key: next((t for t in get_args(h) if t is not NoneType), h) for key, h in hints.items() if key != "name"}


def _checked(key: str, entry: Located) -> Any:
    """The value of an option, if its type is right."""
    value, wanted = entry.value, _option_types()[key]
    if key.endswith("_bytes"):
        size_bytes = units.parse_bytes(value)
        if size_bytes is None:
            raise entry.error(f"{key} must be {units.WANTED_BYTES}, got {entry.said}")
        return size_bytes
    if key == "prep_labels":
        return _labels(entry)
    if is_dataclass(wanted):
        return _nested(key, entry, wanted)
    if wanted is float and type(value) in (int, float):
        return float(value)
    if type(value) is not wanted:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise entry.error(f"{key} must be {words[wanted]}, got {entry.said}")
    return value


def _labels(entry: Located) -> dict[str, str]:
    value = entry.value
    if not isinstance(value, dict) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise entry.error(f"prep_labels must be labels and their values, as text, got {entry.said}")
    return value


def _nested(key: str, entry: Located, kind: Any) -> Any:
    """A mapping whose keys are the fields of a dataclass."""
    names = [field.name for field in fields(kind)]
    if not isinstance(entry.value, dict) or not set(entry.value) <= set(names):
        raise entry.error(f"{key} must be some of {', '.join(names)}, got {entry.said}")
    try:
        return kind(**entry.value)
    except (ConfigError, TypeError) as error:
        raise entry.error(f"{key}: {error}") from None


def _text(key: str, entry: Located) -> str:
    if not isinstance(entry.value, str):
        raise entry.error(f"{key} must be text, got {entry.said}")
    return entry.value


def _location(entry: Located) -> str:
    data = _text("data", entry)
    return data if "://" in data else str(entry.file.resolve().parent / Path(data).expanduser())


def _check_ranges(file: Path, name: str, options: dict[str, Any], entries: dict[str, Located]) -> None:
    """Let `FeedSettings` check the values before anything is started, and say in which line the wrong one is."""
    from mbaas.settings import FeedSettings

    unset = {"cache_bytes": 0, "staging_bytes": 1, "prep_workers": 1}
    try:
        FeedSettings(name=name, **(unset | options))
    except ConfigError as error:
        words = re.findall(r"\w+", str(error))
        named = next((entries[word] for word in words if word in entries), None)
        raise (named.error(str(error)) if named is not None else ConfigError(f"{file}: {error}")) from None
