"""Datasets and DataLoaders that read from the storage of their node (`benchmarks.ladder.storage`)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import ray
from numpy.typing import NDArray

from benchmarks.ladder.storage import StorageClient
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.tools.analysis.measuring.storage import WatchedReader
from mbaas.tools.bench.rows.dataloader import Minibatches
from mbaas.tools.bench.tasks.base import Samples, Task
from mbaas.transforms import Pipeline

ANY_NODE = ""

Sockets = Mapping[str, str]
"""Paths of the storage servers' sockets, by Ray's node id, or `ANY_NODE` if there is one for all processes."""


@dataclass(frozen=True, eq=False, repr=False)
class MeteredDataset(WrappedDataset):
    """A dataset whose samples arrive when the storage of the reader's node delivers them."""

    sockets: Sockets

    def reader(self) -> SampleReader:
        path = self.sockets.get(ANY_NODE) or self.sockets[ray.get_runtime_context().get_node_id()]
        storage = StorageClient(path)
        return WatchedReader(self.inner.reader(), before=lambda sample, nbytes: storage.wait_for([(sample, nbytes)]))


class MeteredMinibatches(Minibatches):
    """Minibatches of a DataLoader whose files arrive when the storage delivers them.

    A worker makes one request per minibatch, so the model takes little CPU time.
    """

    def __init__(self, samples: Samples, task: Task, pipeline: Pipeline, seed: int, *, socket: str) -> None:
        super().__init__(samples, task, pipeline, seed)
        self._lengths = [file.stat().st_size for file in samples.files]
        self._storage = StorageClient(socket)

    def read(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        self._storage.wait_for([(i, self._lengths[i]) for i in ids])
        return super().read(ids)
