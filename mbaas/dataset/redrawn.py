"""A dataset of which each epoch draws its samples anew."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mbaas.dataset.base import Dataset, Subset
from mbaas.dataset.resampling import Draws
from mbaas.errors import ConfigError
from mbaas.fields import Arrays, Field
from mbaas.order import Ids

SOURCE_ID = Field("source_id", (), "int64")
"""Which sample was drawn: its id in the dataset that was read."""


@dataclass(frozen=True, eq=False, repr=False)
class Redrawn(Subset):
    """Draws from another dataset, under the numbers of the draws: in each epoch they are of other samples.

    As a list, without an epoch, it has what epoch 0 draws. Whoever prepares an epoch asks for its `stored_ids`.

    Attributes:
        draws: from ``inner``, all of whose samples have a weight.
    """

    draws: Draws

    @classmethod
    def of(cls, dataset: Dataset, draws: Draws) -> Redrawn:
        """Draw from a dataset.

        Raises:
            ConfigError: its samples are draws already, or have a field of the name by which draws tell what they are.
        """
        if dataset.stored is not dataset:
            raise ConfigError(
                f"the samples of {dataset.root} are drawn anew in each epoch already; draw once, by one set of weights"
            )
        if SOURCE_ID.name in [field.name for field in dataset.fields]:
            raise ConfigError(
                f"the samples of {dataset.root} have a field {SOURCE_ID.name!r}, by which draws tell which "
                "sample they are; read it under another name, or draw with each_epoch=False"
            )
        there = np.flatnonzero(draws.weights > 0)
        fingerprint, draws = draws.fingerprint(dataset.fingerprint), draws.among(there)
        # What never comes is not in any cache's plan.
        inner = dataset if len(there) == len(dataset) else dataset.select(there)
        return cls(dataset.root, dataset.class_names, fingerprint, inner=inner, ids=draws.of_epoch(0), draws=draws)

    @property
    def fields(self) -> tuple[Field, ...]:
        return (*self.inner.fields, SOURCE_ID)

    def values(self, sample_ids: Ids) -> Arrays:
        return self.values_in(0, sample_ids)

    @property
    def stored(self) -> Dataset:
        return self.inner

    def stored_ids(self, sample_ids: Ids, epoch: int) -> Ids:
        return self.draws.of_epoch(epoch)[sample_ids]

    def values_in(self, epoch: int, sample_ids: Ids) -> Arrays:
        drawn = self.stored_ids(sample_ids, epoch)
        return {**self.inner.values(drawn), SOURCE_ID.name: self.inner.source_ids(drawn)}

    @property
    def total_bytes(self) -> int:
        return self.inner.total_bytes

    def in_epoch_0(self) -> Dataset:
        """Return what epoch 0 draws, as a dataset like any other."""
        return Subset(self.root, self.class_names, self.fingerprint, inner=self.inner, ids=self.ids)

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:  # noqa: ARG002
        raise ConfigError(
            f"the samples of {self.root} are drawn anew in each epoch: split, filter and take before you draw, or draw "
            "with each_epoch=False"
        )
