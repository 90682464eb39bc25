"""Partial results of an analysis that was stopped."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from mbaas import units
from mbaas.analysis.measuring.service import Workload
from mbaas.model.quantity import Quantity, plain, stated
from mbaas.model.rates import Rates

Points = list[tuple[float, Quantity]]
"""Pairs (number of readers or workers, measured rate)."""


@dataclass(frozen=True)
class Row:
    name: str
    rate: Quantity
    how: str


@dataclass(kw_only=True)
class SoFar:
    """Rates of a workload, filled in while they are measured, so that a stopped analysis keeps its results.

    Attributes:
        samples, sample_bytes, cores, batch_size: as in `Rates`; known before any measurement.
        readers, workers: planned numbers of readers for S and workers for P.
        has_disk: whether a disk tier's disk is to be measured.
        step: G, stated or measured.
        storage, prep, decoded_prep: measured points of S, P, and P for decoded samples, in samples/s.
        pixel_bytes: size of a prepared sample; None until prep is completely measured.
        decoded_bytes: size of a decoded sample; None until it is known.
        has_decoded: whether samples can be cached decoded; True until known.
        cache, disk: bytes/s of memory and of the disk tier's disk.
    """

    samples: int
    sample_bytes: float
    cores: int
    batch_size: int
    readers: tuple[int, ...]
    workers: tuple[int, ...]
    has_disk: bool
    step: Quantity | None = None
    storage: Points = field(default_factory=list)
    prep: Points = field(default_factory=list)
    pixel_bytes: float | None = None
    decoded_bytes: float | None = None
    decoded_prep: Points = field(default_factory=list)
    has_decoded: bool = True
    cache: Quantity | None = None
    disk: Quantity | None = None

    @classmethod
    def of(
        cls, workload: Workload, *, cores: int, readers: Sequence[int], workers: Sequence[int], rate_per_s: float | None
    ) -> SoFar:
        """Return the state before any measurement; ``rate_per_s`` is the stated G, if any."""
        return cls(
            samples=len(workload.dataset),
            sample_bytes=workload.dataset.total_bytes / len(workload.dataset),
            cores=cores,
            batch_size=workload.options.batch_size,
            readers=tuple(readers),
            workers=tuple(workers),
            has_disk=workload.options.disk is not None,
            step=None if rate_per_s is None else stated(rate_per_s, unit="samples/s"),
        )

    @property
    def is_empty(self) -> bool:
        """True if nothing was measured."""
        return not self.storage and not self.prep and self.cache is None and self.disk is None

    @property
    def missing(self) -> tuple[str, ...]:
        """Missing measurements, in words, in the order of measuring."""
        return (
            *_lacking(self.storage, self.readers, "S (storage)", "reader"),
            *(["C (memory)"] if self.cache is None else []),
            *(_lacking(self.prep, self.workers, "P (prep)", "worker") or self._lacking_of_prep()),
            *(["the rate of the disk tier's disk"] if self.has_disk and self.disk is None else []),
            *(["G (the training step)"] if self.step is None else []),
        )

    @property
    def rows(self) -> list[Row]:
        """Existing measurements as rows of a table, in samples/s."""
        found = []
        if self.step is not None:
            found.append(Row("G", self.step, "one trial trains, its data always ready"))
        for name, points, thing, what in (
            ("P", self.prep, "prep worker", "from memory"),
            ("", self.decoded_prep, "prep worker", "decoded samples from memory"),
            ("S", self.storage, "reader", "from cold storage, at random"),
        ):
            found += [Row(name, rate, f"{units.counted(round(count), thing)}, {what}") for count, rate in points]
        for name, rate, what in (("C", self.cache, "memory"), ("disk", self.disk, "the disk tier's disk")):
            if rate is not None:
                each = rate.scaled(1 / self.sample_bytes, unit="samples/s")
                found.append(Row(name, each, f"{what}, {units.rate(rate.value)}"))
        return found

    def _lacking_of_prep(self) -> list[str]:
        if self.pixel_bytes is None:
            return ["P (prep) with several threads"]
        return _lacking(self.decoded_prep, self.workers, "P of decoded samples", "worker") if self.has_decoded else []

    def to_json(self) -> dict[str, Any]:
        """Return the existing measurements under their names in `Rates`."""
        names = {each.name for each in fields(Rates)}
        found = {each.name: getattr(self, each.name) for each in fields(self) if each.name in names}
        return {name: plain(value) for name, value in found.items() if value is not None and value != []}


def _lacking(points: Points, counts: Sequence[int], name: str, thing: str) -> list[str]:
    if len(points) == len(counts):
        return []
    if not points:
        return [name]
    return [f"{name} with more than {units.counted(round(points[-1][0]), thing)}"]
