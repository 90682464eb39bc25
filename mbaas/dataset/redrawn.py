"""A dataset that draws its samples again for each epoch."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mbaas.dataset.base import Dataset, Subset
from mbaas.dataset.resampling import Draws
from mbaas.errors import ConfigError
from mbaas.fields import Arrays, Field
from mbaas.order import Ids

SOURCE_ID = Field("source_id", (), "int64")
"""Id of the drawn sample in the dataset that was read."""


@dataclass(frozen=True, eq=False, repr=False)
class Redrawn(Subset):
    """Draws from another dataset, with the numbers of the draws as ids; each epoch draws other samples.

    Methods without an epoch refer to the draws of epoch 0. Preparation of an epoch uses `stored_ids`. All samples of
    ``inner`` have a positive weight in ``draws``.
    """

    draws: Draws

    @classmethod
    def of(cls, dataset: Dataset, draws: Draws) -> Redrawn:
        """Draw from a dataset.

        Raises:
            ConfigError: its samples are per-epoch draws already, or have a field ``source_id``.
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
        # Samples that are never drawn should not take part in cache planning.
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
        """Return the draws of epoch 0 as an ordinary dataset."""
        return Subset(self.root, self.class_names, self.fingerprint, inner=self.inner, ids=self.ids)

    def _part(self, ids: Ids, fingerprint: str) -> Dataset:  # noqa: ARG002
        raise ConfigError(
            f"the samples of {self.root} are drawn anew in each epoch: split, filter and limit before you draw, or "
            "draw with each_epoch=False"
        )
