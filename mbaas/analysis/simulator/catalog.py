"""The systems that ship with mbaas: NoPFS's reference machine, and its six datasets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from mbaas.analysis.simulator.files import system_from
from mbaas.analysis.simulator.system import System
from mbaas.errors import ConfigError

_FOLDER = Path(__file__).parent / "presets"


def names() -> list[str]:
    """The names of all presets, the smallest dataset first."""
    return sorted(_named(_FOLDER), key=lambda name: load(name).dataset.nbytes)


def text(name: str) -> str:
    """The YAML of a preset or of a machine, to start one's own from.

    Raises:
        ConfigError: there is neither of that name.
    """
    return _text(_FOLDER / "machines" if name in _named(_FOLDER / "machines") else _FOLDER, name, "preset")


def about(name: str) -> str:
    """One line that says what a preset is."""
    return str(yaml.safe_load(text(name))["about"])


def load(name: str) -> System:
    """A preset.

    Raises:
        ConfigError: there is no preset of that name.
    """
    return system_from(yaml.safe_load(text(name)), machines=machine)


def machine(name: str) -> Any:
    """The parsed description of a machine that files may call by name.

    Raises:
        ConfigError: there is no machine of that name.
    """
    return yaml.safe_load(_text(_FOLDER / "machines", name, "machine"))


def _named(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _text(folder: Path, name: str, kind: str) -> str:
    if name not in _named(folder):
        raise ConfigError(f"there is no {kind} {name!r}; known are {', '.join(_named(folder))}")
    return (folder / f"{name}.yaml").read_text(encoding="utf-8")
