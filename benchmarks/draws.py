"""Measures reads from storage for samples drawn by weight, with a cache that knows the weights and one that does not.

Images are generated in memory, so storage reads take no time. They are only counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.table import Table

import mbaas
from mbaas import transforms as T
from mbaas.base.units import count, percent
from mbaas.dataset import synthetic
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.ray_cluster import actor_names, connection
from mbaas.tools.bench.render import figure_table

FEED, BATCH, SIDE = "draws", 64, 32

RARE = 0.1
"""Share of the samples in the rare one of two classes that are balanced."""


class _HiddenWeights(WrappedDataset):
    """The same draws, with weights that are hidden from the cache."""

    def reader(self) -> SampleReader:
        return self.inner.reader()

    @property
    def stored_draws(self) -> None:
        return None


@dataclass(frozen=True)
class Reads:
    """Bytes read from storage in an epoch, as shares of the dataset.

    Attributes:
        weights: a description of the weights.
        cached: share of the samples that fits in the cache.
        by_arrival: with a cache that admits samples in their order of arrival.
        by_weight: with a cache that stores the samples with the most expected draws.
    """

    weights: str
    cached: float
    by_arrival: float
    by_weight: float


@dataclass(frozen=True)
class DrawFigures:
    """Results for a dataset of ``samples``; each epoch has as many draws."""

    samples: int
    reads: list[Reads]


def measure(*, samples: int, cached: Sequence[float], warm: int, epochs: int) -> DrawFigures:
    """Measure both caches for each share of the samples, after ``warm`` epochs and for ``epochs`` more."""
    rare = np.arange(samples) % round(1 / RARE) == 0
    weights = {
        "two classes of 90 % and 10 %, balanced": np.where(rare, 1 / RARE, 1 / (1 - RARE)),
        "weight 1 / rank": 1 / (1.0 + np.random.default_rng(0).permutation(samples)),
    }
    with connection.separate_ray():
        reads = [
            Reads(name, share, *(_read(given, share, warm, epochs, known=known) for known in (False, True)))
            for name, given in weights.items()
            for share in cached
        ]
    return DrawFigures(samples, reads)


def _read(weights: NDArray[np.float64], cached: float, warm: int, epochs: int, *, known: bool) -> float:
    stored = synthetic(len(weights), height=SIDE, width=SIDE)
    drawn = stored.resample(weights)
    options: dict[str, Any] = {"batch_size": BATCH, "prep_workers": 1, "cache_decoded": False}
    options["cache_bytes"] = int(cached * stored.total_bytes)
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
    with mbaas.serve(FEED, drawn if known else _HiddenWeights.around(drawn), pipeline, **options):
        with mbaas.join(FEED, format="numpy") as loader:
            for _ in range(warm + epochs):
                for _ in loader:
                    pass
        # By epoch: a total would include samples that were read ahead for later epochs.
        (cache,) = actor_names.children(FEED, "cache").values()
        counts = ray.get(cache.stats.remote()).epochs
        read = sum(counts[epoch].reads.nbytes for epoch in range(warm, warm + epochs))
        return float(read / epochs / stored.total_bytes)


def table(found: DrawFigures) -> Table:
    """Return a table of the results."""
    title = f"{count(found.samples)} samples and as many draws; read from storage in an epoch"
    shown = figure_table(title, ("weights", "cached", "by arrival", "by weight", "saved"), words=("weights",))
    for each in found.reads:
        saved = 1 - each.by_weight / each.by_arrival
        row = (each.cached, each.by_arrival, each.by_weight, saved)
        shown.add_row(each.weights, *map(percent, row))
    return shown
