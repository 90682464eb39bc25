"""Row "dataloader": a separate PyTorch DataLoader in every trial, set up as an expert would.

The engine of mbaas decodes, so that decoders are not compared. One ``__getitems__`` prepares a whole minibatch, and
files are read into reused memory. Persistent workers write pixels and spectrograms directly to shared memory. They are
copied to a GPU from pinned memory. Boxes travel as two small packed arrays, and the trial cuts them into a list: one
tensor per image would cost an open file and a mapping each.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info

from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.samples.fields import Field, Packed
from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec, known_of, listed, refuse_bad
from mbaas.tools.bench.tasks.base import Samples, Task
from mbaas.transforms import Pipeline

TorchMinibatch = tuple[torch.Tensor, torch.Tensor, list[Packed]]
"""[n, *shape], int64[n] sample ids, and fields of varying length."""


def workers_for(cores: int, trials: int) -> int:
    """Return the workers of each trial's DataLoader: the cores divided by the trials, at least one.

    With none, a trial would decode in its own process, between its training steps.
    """
    return max(1, cores // trials)


class Minibatches(Dataset[Any]):
    """Prepares whole minibatches; an index is epoch * samples + sample id, as workers do not get the epoch."""

    def __init__(self, samples: Samples, task: Task, pipeline: Pipeline, seed: int) -> None:
        self._samples, self._task, self._pipeline, self._seed = samples, task, pipeline, seed
        self._largest_bytes = max(file.stat().st_size for file in samples.files)
        self._encoded = np.empty(0, np.uint8)
        self._engine: Engine | None = None

    def __len__(self) -> int:
        return len(self._samples.files)

    def __getitems__(self, indices: list[int]) -> TorchMinibatch:
        epoch, first = divmod(indices[0], len(self))
        ids = np.array(indices, np.int64) - (indices[0] - first)  # no minibatch spans two epochs
        raw = self.read(ids.tolist())
        if self._engine is None:  # made in the worker process
            self._engine = make_engine("cpu", self._pipeline, seed=self._seed)
        out = _empty(len(ids), self._task.made)
        prepared = self._engine.prepare(Batch(raw, ids, epoch, known_of(self._samples, ids)), out.numpy())
        refuse_bad(prepared.bad, ids, self._samples.files)
        return out, torch.from_numpy(ids), [prepared.known[name] for name in self._task.beside]

    def read(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """Read the encoded samples. The arrays are valid until the next call."""
        # Into one array that the next call overwrites: new memory would cost a page fault per page.
        if len(self._encoded) < len(ids) * self._largest_bytes:
            self._encoded = np.empty(len(ids) * self._largest_bytes, np.uint8)
        raw, start = [], 0
        for i in ids:
            with self._samples.files[i].open("rb", buffering=0) as file:
                stop = start + file.readinto(self._encoded[start:].data)
            raw.append(self._encoded[start:stop])
            start = stop
        return raw


def _empty(n: int, made: Field) -> torch.Tensor:
    """Return an empty [n, *shape]; in a worker it is in shared memory, which avoids a copy."""
    shape = made.empty(0).shape[1:]
    # as in torch's default_collate; there is no public way
    out = torch.empty(0, dtype=getattr(torch, made.dtype))
    if get_worker_info() is not None:
        storage = out._typed_storage()._new_shared(n * math.prod(shape), device=out.device)
        out = out.new(storage)
    return out.resize_(n, *shape)


class EpochIndices(Sampler[int]):
    """Random sampler whose indices include the epoch: epoch * samples + sample id.

    Args:
        samples: number of samples.
        seed: of the order.
        rank, world_size: in a data-parallel trial, a rank gets every ``world_size``-th index of the common order.
        epoch: the first epoch.

    Attributes:
        samples: as given.
    """

    def __init__(self, samples: int, seed: int, *, rank: int = 0, world_size: int = 1, epoch: int = 0) -> None:
        self.samples, self._seed, self._epoch = samples, seed, epoch
        self._own = slice(rank, None, world_size)

    def __len__(self) -> int:
        return len(range(self.samples)[self._own])

    def __iter__(self) -> Iterator[int]:
        epoch, self._epoch = self._epoch, self._epoch + 1
        order = np.random.default_rng([self._seed, epoch]).permutation(self.samples)[self._own]
        return iter((epoch * self.samples + order).tolist())


def _as_is(minibatch: Any) -> Any:
    # `Minibatches` makes whole minibatches. Not a lambda, which cannot be pickled for workers.
    return minibatch


def make_loader(spec: RowSpec, workers: int, collate: Callable[[Any], Any] = _as_is) -> DataLoader[Any]:
    """Make a DataLoader of `Minibatches` with ``workers`` processes; ``collate`` is applied to each minibatch."""
    samples, seed = spec.samples(), spec.settings.seed + spec.trial
    minibatches = Minibatches(samples, spec.task, spec.pipeline(), seed)
    indices = EpochIndices(len(samples.files), seed)
    return loader_of(
        minibatches, indices, batch=spec.batch, workers=workers, pin_memory=spec.settings.gpu, collate=collate
    )


def loader_of(
    minibatches: Minibatches,
    indices: EpochIndices,
    *,
    batch: int,
    workers: int,
    pin_memory: bool = False,
    collate: Callable[[Any], Any] = _as_is,
) -> DataLoader[Any]:
    """Make a DataLoader of ``workers`` persistent processes, at least one."""
    with warnings.catch_warnings():
        # torch compares one trial's workers with the cores; the benchmark counts all trials
        warnings.filterwarnings("ignore", message="This DataLoader will create")
        return DataLoader(
            minibatches,
            batch_size=batch,
            sampler=indices,
            num_workers=workers,
            persistent_workers=True,
            pin_memory=pin_memory,
            collate_fn=collate,
        )


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Run a DataLoader in a trial; its persistent workers end with the trial's process."""
    workers = workers_for(spec.settings.cores, spec.trials)
    source: DataLoader[TorchMinibatch] = make_loader(spec, workers)

    def epoch() -> Iterator[Minibatch]:
        for made, ids, beside in source:
            values = made.to("cuda", non_blocking=True) if spec.settings.gpu else made.numpy()
            yield [values, *(value for column in beside for value in listed(column))], ids.numpy()

    yield epoch
