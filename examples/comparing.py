"""Support for `--compare`: a DataLoader per trial, and a table of both searches.

The DataLoader has the same samples as the feed, and reads, decodes and transforms them with the same code. It runs in
the trial's process: if there are as many trials as cores, worker processes would only compete for the cores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from ray import tune

import mbaas
from mbaas import transforms as T
from mbaas.dataset import Packed
from mbaas.prep.engines import Batch, make_engine


class OwnLoader:
    """A torch DataLoader with the minibatch format of a feed's loader with collate="packed"."""

    def __init__(self, data: mbaas.Dataset, pipeline: T.Pipeline, batch_size: int, *, shuffle: bool) -> None:
        self.class_names = data.class_names
        self.samples = 0
        """Samples prepared so far."""
        self._minibatches = _Minibatches(data, pipeline)
        self._loader = torch.utils.data.DataLoader(
            self._minibatches, batch_size=batch_size, shuffle=shuffle, collate_fn=lambda batch: batch
        )

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        self._minibatches.epoch += 1
        for batch in self._loader:
            self.samples += len(batch["sample_id"])
            yield batch


class _Minibatches(torch.utils.data.Dataset[Any]):
    """Whole minibatches, read and prepared in this process."""

    def __init__(self, data: mbaas.Dataset, pipeline: T.Pipeline) -> None:
        self._data, self._pipeline = data, pipeline
        self._reader, self._engine = data.reader(), make_engine("cpu", pipeline, seed=0)
        first = np.zeros(1, np.int64)
        self._made = self._engine.field(self._read(first)[0], data.uri(0), data.values(first))
        self.epoch = -1

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> dict[str, torch.Tensor]:
        ids = np.array(indices, np.int64)
        made = self._made.empty(len(ids))
        prepared = self._engine.prepare(Batch(self._read(ids), ids, self.epoch, self._data.values(ids)), made)
        if prepared.bad:
            raise ValueError(f"{self._data.uri(indices[prepared.bad[0].row])}: {prepared.bad[0].reason}")
        batch = {"sample_id": ids, self._made.name: made}
        for name, column in prepared.known.items():
            if isinstance(column, Packed):  # boxes: their number differs between samples
                batch[name], batch[f"{name}_bounds"] = column.own()
            else:
                batch[name] = column
        tensors = {name: torch.from_numpy(array) for name, array in batch.items()}
        if "image" in tensors:
            tensors["image"] = tensors["image"].permute(0, 3, 1, 2)
        if self._pipeline.normalize:
            tensors["image"] = self._pipeline.normalize.apply_torch(tensors["image"])
        return tensors

    def _read(self, ids: np.ndarray) -> list[np.ndarray]:
        raw = [np.empty(length, np.uint8) for length in self._data.lengths(ids)]
        for sample, buffer in zip(ids.tolist(), raw, strict=True):
            self._reader.read_into(sample, buffer)
        return raw


@dataclass
class Outcome:
    """Result of a search; counts are training samples, summed over all trials."""

    results: tune.ResultGrid
    seconds: float
    prepared: int
    delivered: int


def of_own_loaders(results: tune.ResultGrid, seconds: float) -> Outcome:
    """Return the outcome of a search whose trials reported their loaders' ``samples``."""
    prepared = sum(result.metrics["samples"] for result in results)
    return Outcome(results, seconds, prepared, prepared)


def show(metric: str, outcomes: dict[str, Outcome]) -> None:
    print(f"{'':24}{metric:>10}{'prepared':>12}{'delivered':>12}{'seconds':>10}")
    for title, each in outcomes.items():
        best = each.results.get_best_result().metrics[metric]
        print(f"{title:24}{best:>10.1%}{each.prepared:>12,}{each.delivered:>12,}{each.seconds:>10.1f}")
