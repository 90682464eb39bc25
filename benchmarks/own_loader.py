"""A PyTorch DataLoader for a single trial, as a baseline for a shared feed. It decodes with the engine of mbaas."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mbaas import transforms as T
from mbaas.dataset import Dataset
from mbaas.dataset.base import SampleReader
from mbaas.prep.engines import Batch, Engine, make_engine


class OwnLoader:
    """Minibatches of uint8[n, side, side, 3] from worker processes that live as long as the loader.

    Attributes:
        epoch: number of finished epochs, including those in ``state``.
    """

    def __init__(
        self,
        data: Dataset,
        pipeline: T.Pipeline,
        *,
        side: int,
        batch: int,
        shuffle: bool,
        workers: int = 1,
        state: Any = None,
    ) -> None:
        self.epoch: int = 0 if state is None else state["epoch"]
        with warnings.catch_warnings():
            # torch compares the workers of this loader with the cores; those of all trials exceed them on purpose
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader = torch.utils.data.DataLoader(
                _Minibatches(data, pipeline, side),
                batch_size=batch,
                shuffle=shuffle,
                num_workers=workers,
                persistent_workers=True,
                collate_fn=_as_is,
            )

    def __iter__(self) -> Iterator[NDArray[np.uint8]]:
        for pixels in self._loader:
            yield pixels.numpy()
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the number of finished epochs."""
        return {"epoch": self.epoch}


class _Minibatches(torch.utils.data.Dataset[Any]):
    """Prepares whole minibatches, because collating single samples in torch is slow."""

    def __init__(self, data: Dataset, pipeline: T.Pipeline, side: int) -> None:
        self._data, self._pipeline, self._side = data, pipeline, side
        self._tools: tuple[SampleReader, Engine] | None = None
        self._made = 0

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> torch.Tensor:
        if self._tools is None:  # created in the process that uses them
            self._tools = self._data.reader(), make_engine("cpu", self._pipeline, seed=0)
        reader, engine = self._tools
        ids = np.array(indices, np.int64)
        raw = [np.empty(length, np.uint8) for length in self._data.lengths(ids)]
        for index, buffer in zip(indices, raw, strict=True):
            reader.read_into(index, buffer)
        pixels = np.empty((len(ids), self._side, self._side, 3), np.uint8)
        self._made += 1
        # `_made` instead of the epoch, which a persistent worker does not get.
        engine.prepare(Batch(raw, ids, self._made, {}), pixels)
        return torch.from_numpy(pixels)


def _as_is(minibatch: Any) -> Any:
    return minibatch
