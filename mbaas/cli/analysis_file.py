"""What ``mbaas what-if`` reads: saved measurements, changes, and a price list."""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

from mbaas import units
from mbaas.analysis.answers import PARAMETERS
from mbaas.analysis.changes import MachineType
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.cli import document
from mbaas.cli.pipelines import suggestion
from mbaas.errors import ConfigError


def load(file: Path) -> tuple[Rates, Setup]:
    """The rates and the setup of a saved analysis.

    Raises:
        ConfigError: it is none.
    """
    try:
        plain = json.loads(file.read_text())
        setup = {name: value for name, value in plain["setup"].items() if value is not None}
        return Rates.from_json(plain["rates"]), Setup(**setup)
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{file} must be what `mbaas analyze --save` wrote: {type(error).__name__}: {error}"
        ) from None


def changed(setup: Setup, changes: list[str]) -> Setup:
    """The setup with "name=value" changed.

    Raises:
        ConfigError: an unknown name, or a value that cannot be.
    """
    for change in changes:
        name, _, text = change.partition("=")
        known = [field.name for field in fields(Setup)]
        if name not in known:
            raise ConfigError(f"--set {change}: unknown name {name!r}; {suggestion(name, known)}")
        made: dict[str, Any] = {name: value(name, text)}
        setup = replace(setup, **made)
    return setup


def curve(text: str) -> tuple[str, list[float]]:
    """ "name=value,value,...".

    Raises:
        ConfigError: an unknown name, or values that are none.
    """
    name, _, values = text.partition("=")
    if name not in PARAMETERS:
        raise ConfigError(f"--curve {text}: unknown name {name!r}; {suggestion(name, PARAMETERS)}")
    return name, [value(name, part) for part in values.split(",")]


def value(name: str, text: str) -> Any:
    """The value of a field of `Setup`: sizes as people write them, on/off, whole numbers, numbers.

    Raises:
        ConfigError: it is none.
    """
    kind = next(str(field.type) for field in fields(Setup) if field.name == name)
    if kind == "bool":
        if text not in ("on", "off"):
            raise ConfigError(f"{name} must be on or off, got {text!r}")
        return text == "on"
    if "bytes" in name:
        size = units.parse_bytes(text)
        if size is None:
            raise ConfigError(f"{name} must be {units.WANTED_BYTES}, got {text!r}")
        return size
    try:
        return int(text) if kind.startswith("int") else float(text)
    except ValueError:
        wanted = "a whole number" if kind.startswith("int") else "a number"
        raise ConfigError(f"{name} must be {wanted}, got {text!r}") from None


def machines(file: Path) -> list[MachineType]:
    """A price list: YAML, a mapping from the name of a machine to the fields of `MachineType`.

    Raises:
        ConfigError: says in which line something is wrong.
    """
    listed = document.read(file).fields
    if not listed:
        raise ConfigError(f"{file} must name machines, each with price_per_h and cores")
    return [_machine(name, entry) for name, entry in listed.items()]


def _machine(name: str, entry: document.Located) -> MachineType:
    known = {field.name: field for field in fields(MachineType) if field.name != "name"}
    given: dict[str, Any] = {}
    for key, part in entry.fields.items():
        if key not in known:
            raise part.error(f"unknown key {key!r}; {suggestion(key, known)}")
        given[key] = _machine_value(key, part)
    if missing := [key for key, field in known.items() if field.default is MISSING and key not in given]:
        raise entry.error(f"machine {name!r} needs {' and '.join(missing)}")
    try:
        return MachineType(name=name, **given)
    except ConfigError as error:
        raise entry.error(str(error)) from None


def _machine_value(key: str, part: document.Located) -> Any:
    if "bytes" in key:
        size = units.parse_bytes(part.value)
        if size is None:
            raise part.error(f"{key} must be {units.WANTED_BYTES}, got {part.said}")
        return size
    if type(part.value) not in (int, float) or not math.isfinite(part.value):
        raise part.error(f"{key} must be a number, got {part.said}")
    return part.value
