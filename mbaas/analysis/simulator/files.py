"""A system as a YAML file describes it, already parsed into plain Python.

Sizes are texts such as "120 GB", rates such as "330 MB/s", times such as "1.6 ms"; see
`mbaas/analysis/simulator/presets` for whole files.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from mbaas.allocation.bandwidth import Staging, StorageClass
from mbaas.allocation.throughput import ThroughputCurve
from mbaas.analysis.simulator.policies import POLICIES
from mbaas.analysis.simulator.system import CORE_COSTS, Cores, DatasetShape, Machine, System, Training
from mbaas.analysis.simulator.units import (
    WANTED_RATE,
    WANTED_SECONDS,
    WANTED_SIZE,
    parse_rate,
    parse_seconds,
    parse_size,
)
from mbaas.errors import ConfigError

Path = tuple[str | int, ...]
"""Keys and list indices that lead to a value."""

Machines = Callable[[str], Any]
"""The parsed file of a machine that is known by name; raises `ConfigError` where there is none."""

Made = TypeVar("Made")


class EntryError(ConfigError):
    """A value of a file that cannot be.

    Attributes:
        path: where it stands.
        sentence: what is there and what must be.
    """

    def __init__(self, path: Path, sentence: str) -> None:
        where = "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).lstrip(".")
        super().__init__(f"{where}: {sentence}" if where else sentence)
        self.path = path
        self.sentence = sentence


@dataclass(frozen=True)
class Entry:
    """A value of a file, and where it stands."""

    value: Any
    path: Path = ()

    def error(self, sentence: str) -> EntryError:
        return EntryError(self.path, sentence)

    def fields(self, *, needed: Iterable[str], known: Iterable[str] = ()) -> dict[str, Entry]:
        """The entries of a mapping.

        Args:
            needed: keys that must be there.
            known: further keys that may be.
        """
        names = [*needed, *known]
        if not isinstance(self.value, Mapping):
            raise self.error(f"must be a mapping of {', '.join(names)}, got {self.value!r}")
        for key in self.value:
            if key not in names:
                close = difflib.get_close_matches(str(key), names, n=1)
                hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(names)}"
                raise EntryError((*self.path, key), f"unknown key {key!r}; {hint}")
        missing = [name for name in needed if self.value.get(name) is None]
        if missing:
            raise self.error(f"{missing[0]!r} is missing; needed are {', '.join(needed)}")
        return {key: Entry(value, (*self.path, key)) for key, value in self.value.items() if value is not None}

    def items(self) -> list[Entry]:
        if not isinstance(self.value, list):
            raise self.error(f"must be a list, got {self.value!r}")
        return [Entry(value, (*self.path, number)) for number, value in enumerate(self.value)]

    def text(self) -> str:
        if not isinstance(self.value, str):
            raise self.error(f"must be text, got {self.value!r}")
        return self.value

    def count(self) -> int:
        if type(self.value) is not int:
            raise self.error(f"must be a whole number, got {self.value!r}")
        return self.value

    def size(self) -> float:
        return self._parsed(parse_size, WANTED_SIZE)

    def rate(self) -> float:
        return self._parsed(parse_rate, WANTED_RATE)

    def seconds(self) -> float:
        return self._parsed(parse_seconds, WANTED_SECONDS)

    def table(self, counted: str, *, count: int = 1) -> ThroughputCurve:
        """Rates by number of readers or threads.

        Args:
            counted: key of the list of numbers, beside the list of ``rates``.
            count: the number that a single rate is of; one of fewer is in proportion.
        """
        if not isinstance(self.value, Mapping):
            return self.made(ThroughputCurve.through, {count: self.rate()})
        fields = self.fields(needed=(counted, "rates"))
        counts = [entry.count() for entry in fields[counted].items()]
        rates = [entry.rate() for entry in fields["rates"].items()]
        if len(counts) != len(rates):
            raise self.error(f"needs a rate for each number, got {len(counts)} {counted} and {len(rates)} rates")
        return self.made(ThroughputCurve.through, dict(zip(counts, rates, strict=True)))

    def made(self, make: Callable[..., Made], *arguments: Any, **options: Any) -> Made:
        """What ``make`` returns, its errors as errors of this entry."""
        try:
            return make(*arguments, **options)
        except EntryError:
            raise
        except ConfigError as error:
            raise self.error(str(error)) from None

    def _parsed(self, parse: Callable[[object], float | None], wanted: str) -> float:
        number = parse(self.value)
        if number is None:
            raise self.error(f"must be {wanted}, got {self.value!r}")
        return number


def system_from(tree: Any, *, machines: Machines) -> System:
    """The system that a parsed file describes.

    Args:
        tree: a mapping with name, machine, dataset, training and policies.
        machines: knows the machines that files may call by name.

    Raises:
        EntryError: says where, what is there and what must be.
    """
    top = Entry(tree).fields(needed=("name", "machine", "dataset"), known=("about", "training", "policies"))
    return System(
        name=top["name"].text(),
        machine=_machine(top["machine"], machines),
        dataset=_dataset(top["dataset"]),
        training=_training(top["training"]) if "training" in top else Training(),
        policies=tuple(map(_policy, top["policies"].items())) if "policies" in top else (),
    )


def _machine(entry: Entry, machines: Machines) -> Machine:
    if isinstance(entry.value, str):
        return _machine(Entry(entry.made(machines, entry.value), entry.path), machines)
    rates = ("compute", "prep", "network")
    fields = entry.fields(needed=(*rates, "pfs", "staging"), known=("classes", "cores"))
    return entry.made(
        Machine,
        **{f"{name}_bytes_per_s": fields[name].rate() for name in rates},
        storage=fields["pfs"].table("readers"),
        staging=_staging(fields["staging"]),
        classes=tuple(map(_storage_class, fields["classes"].items())) if "classes" in fields else (),
        cores=_cores(fields["cores"]) if "cores" in fields else None,
    )


def _cores(entry: Entry) -> Cores:
    costs = {name.removesuffix("_cpu_s"): name for name in CORE_COSTS}
    fields = entry.fields(needed=("count",), known=costs)
    given = {costs[key]: field.seconds() for key, field in fields.items() if key in costs}
    return entry.made(Cores, count=fields["count"].count(), **given)


def _staging(entry: Entry) -> Staging:
    fields = entry.fields(needed=("capacity",), known=("threads", "write"))
    threads = fields["threads"].count() if "threads" in fields else 1
    return entry.made(
        Staging,
        capacity_bytes=fields["capacity"].size(),
        threads=threads,
        write=fields["write"].table("threads", count=threads) if "write" in fields else None,
    )


def _storage_class(entry: Entry) -> StorageClass:
    fields = entry.fields(needed=("name", "capacity", "read"), known=("threads",))
    threads = fields["threads"].count() if "threads" in fields else 1
    return entry.made(
        StorageClass,
        name=fields["name"].text(),
        capacity_bytes=fields["capacity"].size(),
        threads=threads,
        read=fields["read"].table("threads", count=threads),
    )


def _dataset(entry: Entry) -> DatasetShape:
    fields = entry.fields(needed=("samples", "sample"), known=("sigma", "pixels"))
    return entry.made(
        DatasetShape,
        samples=fields["samples"].count(),
        sample_bytes=fields["sample"].size(),
        sigma_bytes=fields["sigma"].size() if "sigma" in fields else 0.0,
        pixel_bytes=fields["pixels"].size() if "pixels" in fields else None,
    )


def _training(entry: Entry) -> Training:
    fields = entry.fields(needed=(), known=("workers", "batch", "epochs", "trials", "seed"))
    return entry.made(Training, **{name: field.count() for name, field in fields.items()})


def _policy(entry: Entry) -> str:
    if entry.value not in POLICIES:
        raise entry.error(f"a policy must be one of {', '.join(POLICIES)}, got {entry.value!r}")
    return entry.text()
