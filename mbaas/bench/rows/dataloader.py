"""Row "dataloader": a PyTorch DataLoader of its own in every trial.

It is set up as somebody who knows it well would: the engine of mbaas decodes, so that decoders are not what is
compared; one ``__getitems__`` makes a whole minibatch; files are read into memory that is used again; pixels are made
in the shared memory in which they travel to the trial, by workers that persist over epochs.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, RandomSampler, Sampler, get_worker_info

from mbaas.bench.rows import IMAGE_SIZE, SAMPLE_BYTES, Minibatch, TrialSpec, pipeline, refuse_bad
from mbaas.prep.engine import Engine
from mbaas.prep.engines import make_engine

TorchMinibatch = tuple[torch.Tensor, torch.Tensor]
"""uint8[n, 224, 224, 3] and int64[n] sample ids."""


def workers_for(cores: int, trials: int) -> int:
    """Return the workers of each trial's DataLoader: the cores shared out, at least one.

    One worker a trial is also right where there are more trials than cores: with none, a trial would decode in its
    own process, between its training steps.
    """
    return max(1, cores // trials)


class Photos(Dataset[Any]):
    """Prepares whole minibatches.

    An index is epoch * samples + sample id, because persistent workers are not told the epoch.
    """

    def __init__(self, files: Sequence[Path], seed: int) -> None:
        self._files = files
        self._seed = seed
        self._largest_bytes = max(file.stat().st_size for file in files)
        self._encoded = np.empty(0, np.uint8)
        self._engine: Engine | None = None

    def __len__(self) -> int:
        return len(self._files)

    def __getitems__(self, indices: list[int]) -> TorchMinibatch:
        epoch, first = divmod(indices[0], len(self._files))
        ids = np.array(indices, np.int64) - (indices[0] - first)  # no minibatch reaches across an epoch's end
        raw = self._read(ids.tolist())
        if self._engine is None:  # made by the process that uses it
            self._engine = make_engine("cpu", pipeline(), seed=self._seed)
        out = _empty(len(ids))
        refuse_bad(self._engine.prepare(raw, ids, epoch, {}, out.numpy()).bad, ids, self._files)
        return out, torch.from_numpy(ids)

    def _read(self, ids: list[int]) -> list[NDArray[np.uint8]]:
        """Read files into one array, which the next call overwrites: fresh memory would cost a page fault a page."""
        if len(self._encoded) < len(ids) * self._largest_bytes:
            self._encoded = np.empty(len(ids) * self._largest_bytes, np.uint8)
        raw, start = [], 0
        for i in ids:
            with self._files[i].open("rb", buffering=0) as file:
                stop = start + file.readinto(self._encoded[start:].data)
            raw.append(self._encoded[start:stop])
            start = stop
        return raw


def _empty(n: int) -> torch.Tensor:
    """Make an empty uint8[n, 224, 224, 3]; in a worker it lies in shared memory, so that nothing is copied."""
    # the way of torch's own default_collate, which knows no public one either
    out = torch.empty(0, dtype=torch.uint8)
    if get_worker_info() is not None:
        storage = out._typed_storage()._new_shared(n * SAMPLE_BYTES, device=out.device)
        out = out.new(storage)
    return out.resize_(n, IMAGE_SIZE, IMAGE_SIZE, 3)


class _Indices(Sampler[int]):
    """Samples at random, with indices that say the epoch too."""

    def __init__(self, samples: int, seed: int) -> None:
        self._samples = samples
        self._random = RandomSampler(range(samples), generator=torch.Generator().manual_seed(seed))
        self._epoch = 0

    def __len__(self) -> int:
        return self._samples

    def __iter__(self) -> Iterator[int]:
        first, self._epoch = self._epoch * self._samples, self._epoch + 1
        return (first + index for index in self._random)


def _as_is(minibatch: Any) -> Any:
    """Collate nothing: `Photos` makes whole minibatches. A lambda would do, but cannot be pickled for workers."""
    return minibatch


class PerTrialLoader:
    """A DataLoader. See `mbaas.bench.rows.EpochLoader`."""

    def __init__(self, spec: TrialSpec) -> None:
        files = spec.files
        self.samples = len(files)
        with warnings.catch_warnings():
            # torch counts the workers of one trial against the cores; the benchmark counts all trials on purpose
            warnings.filterwarnings("ignore", message="This DataLoader will create")
            self._loader: DataLoader[TorchMinibatch] = DataLoader(
                Photos(files, spec.seed + spec.trial),
                batch_size=spec.batch,
                sampler=_Indices(self.samples, spec.seed + spec.trial),
                num_workers=spec.workers,
                persistent_workers=spec.workers > 0,
                prefetch_factor=2 if spec.workers else None,
                collate_fn=_as_is,
            )
        self._iterator: Iterator[TorchMinibatch] | None = None

    def epoch(self) -> Iterator[Minibatch]:
        self._iterator = iter(self._loader)
        for pixels, ids in self._iterator:
            yield pixels.numpy(), ids.numpy()

    def close(self) -> None:
        """Drop the loader; persistent workers are joined when their iterator goes, or end with the trial's process."""
        self._iterator = None
        del self._loader


def open_loader(spec: TrialSpec) -> PerTrialLoader:
    """Open the loader of one trial."""
    return PerTrialLoader(spec)
