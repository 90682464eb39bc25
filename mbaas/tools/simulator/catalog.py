"""Systems in YAML: the presets shipped with mbaas, and user files.

Sizes are strings such as "120 GB", rates such as "330 MB/s", times such as "1.6 ms" (`mbaas.base.units`). The folder
`presets` has NoPFS's six datasets and figures 8 and 9 (SC 2021) and, in `machines`, its reference machine.
docs/simulate.md explains every key.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from mbaas.base import files
from mbaas.errors import ConfigError
from mbaas.tools.simulator.policies import POLICIES
from mbaas.tools.simulator.system import DatasetShape, Machine, Model, System, Training

_PRESETS = Path(__file__).parent / "presets"
_MACHINES = _PRESETS / "machines"


def names() -> list[str]:
    """Return the names of all presets, smallest dataset first."""
    return sorted(_named(_PRESETS), key=lambda name: load(name).dataset.nbytes)


def text(name: str) -> str:
    """Return the YAML of a preset or a machine, as a template."""
    file = _file(_MACHINES, name, "machine") if name in _named(_MACHINES) else _file(_PRESETS, name, "preset")
    return file.read_text(encoding="utf-8")


def about(name: str) -> str:
    """Return a one-line description of a preset."""
    return str(files.read(_file(_PRESETS, name, "preset")).value["about"])


def load(name: str) -> System:
    return read(_file(_PRESETS, name, "preset"))


def read(file: Path) -> System:
    return system_from(files.read(file))


def system_from(top: files.Located) -> System:
    """Return the system described by a parsed file; see `read`."""
    said = top.to(SystemSection)
    machine = said.machine
    if isinstance(machine, str):  # a separate file, so errors in it have its own line numbers
        machine = files.read(top.fields["machine"].made(partial(_file, _MACHINES, machine, "machine"))).to(Machine)
    return System(
        name=said.name,
        machine=machine,
        dataset=said.dataset,
        training=said.training,
        policies=said.policies,
        model=said.model,
    )


def _named(folder: Path) -> list[str]:
    return sorted(file.stem for file in folder.glob("*.yaml"))


def _file(folder: Path, name: str, kind: str) -> Path:
    if name not in _named(folder):
        raise ConfigError(f"there is no {kind} {name!r}; known are {', '.join(_named(folder))}")
    return folder / f"{name}.yaml"


class SystemSection(files.Section):
    """A whole system file."""

    name: str
    about: str = ""
    machine: Annotated[Annotated[str, Tag("value")] | Annotated[Machine, Tag("mapping")], Discriminator(files.shape)]
    dataset: DatasetShape
    training: Training = Training()
    model: Model = "extended"
    # a Literal of all names: the file reader's error then lists them, with the line
    policies: tuple[Literal[tuple(POLICIES)], ...] = ()  # type: ignore[valid-type]
