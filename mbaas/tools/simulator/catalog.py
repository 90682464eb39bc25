"""Systems in YAML: the presets shipped with mbaas, and user files.

Sizes are strings such as "120 GB", rates such as "330 MB/s", times such as "1.6 ms" (`mbaas.base.units`). The folder
`presets` has NoPFS's six datasets and figures 8 and 9 (SC 2021) and, in `machines`, its reference machine.
docs/simulate.md explains every key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Discriminator, Tag

from mbaas.base import files
from mbaas.base.units import Bytes, BytesPerS
from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.model.tiers import StagingClass, StorageClass
from mbaas.tools.simulator.policies import POLICIES
from mbaas.tools.simulator.system import Cores, DatasetShape, Machine, Model, System, Training

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
    return System(
        name=said.name,
        machine=_machine(top.fields["machine"]),
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


def _machine(entry: files.Located) -> Machine:
    if isinstance(entry.value, str):  # a separate file, so errors in it have its own line numbers
        return _machine(files.read(entry.made(lambda: _file(_MACHINES, entry.value, "machine"))))
    said = entry.to(MachineSection)
    classes = entry.fields["classes"].items if said.classes else ()
    # Each part is created separately, so that an error names the line of the part.
    staging = entry.fields["staging"].made(said.staging.staging)
    pfs = entry.fields["pfs"].made(lambda: _curve(said.pfs, alone=1))
    kept = tuple(given.made(each.storage_class) for given, each in zip(classes, said.classes, strict=True))
    return entry.made(
        lambda: Machine(
            compute_bytes_per_s=said.compute,
            prep_bytes_per_s=said.prep,
            network_bytes_per_s=said.network,
            storage=pfs,
            staging=staging,
            classes=kept,
            cores=said.cores,
        )
    )


class RatesByReaders(files.Section):
    """Total rates of shared storage for several numbers of readers."""

    readers: tuple[int, ...]
    rates: tuple[BytesPerS, ...]


class RatesByThreads(files.Section):
    """Total rates for several numbers of threads that read or write."""

    threads: tuple[int, ...]
    rates: tuple[BytesPerS, ...]


# The discriminator picks the variant by shape first. For a plain union, pydantic would report the errors of both.
ThreadRates = Annotated[
    Annotated[BytesPerS, Tag("value")] | Annotated[RatesByThreads, Tag("mapping")], Discriminator(files.shape)
]
"""One rate of all threads together, or a rate for each of several numbers."""


def _curve(said: float | RatesByReaders | RatesByThreads, *, alone: int) -> ThroughputCurve:
    """Return a curve; a single rate applies to ``alone`` and more, and fewer are slower in proportion."""
    if not isinstance(said, files.Section):
        return ThroughputCurve.through({alone: said})
    (counted, counts), (_, rates) = said
    if len(counts) != len(rates):
        raise ConfigError(f"needs a rate for each number, got {len(counts)} {counted} and {len(rates)} rates")
    return ThroughputCurve.through(dict(zip(counts, rates, strict=True)))


class StagingSection(files.Section):
    capacity: Bytes
    threads: int = 1
    write: ThreadRates | None = None

    def staging(self) -> StagingClass:
        """Return the simulator's staging buffer."""
        write = _curve(self.write, alone=self.threads) if self.write is not None else None
        return StagingClass(capacity_bytes=self.capacity, threads=self.threads, write=write)


class ClassSection(files.Section):
    """A cache of a machine."""

    name: str
    capacity: Bytes
    threads: int = 1
    read: ThreadRates

    def storage_class(self) -> StorageClass:
        # 0 threads are rejected by the class, with a better message than the curve's.
        read = _curve(self.read, alone=max(self.threads, 1))
        return StorageClass(name=self.name, capacity_bytes=self.capacity, threads=self.threads, read=read)


class MachineSection(files.Section):
    """A worker's machine."""

    compute: BytesPerS
    prep: BytesPerS
    network: BytesPerS
    pfs: Annotated[
        Annotated[BytesPerS, Tag("value")] | Annotated[RatesByReaders, Tag("mapping")], Discriminator(files.shape)
    ]
    staging: StagingSection
    classes: tuple[ClassSection, ...] = ()
    cores: Cores | None = None


class SystemSection(files.Section):
    """A whole system file."""

    name: str
    about: str = ""
    machine: Annotated[
        Annotated[str, Tag("value")] | Annotated[MachineSection, Tag("mapping")], Discriminator(files.shape)
    ]
    dataset: DatasetShape
    training: Training = Training()
    model: Model = "extended"
    # a Literal of all names: the file reader's error then lists them, with the line
    policies: tuple[Literal[tuple(POLICIES)], ...] = ()  # type: ignore[valid-type]
