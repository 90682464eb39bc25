"""Row "prep": P, the rate at which all cores prepare samples when nothing has to be moved anywhere.

One process per core goes through the dataset with the engine and the block size of an mbaas prep worker. Bytes are in
the process's own memory, and the output array is used again for every block. It is the most that any row can make of
these cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.bench.rows import Minibatch, TrialSpec, known_of, listed, refuse_bad
from mbaas.core.layout import block_samples
from mbaas.order import SampleOrder
from mbaas.prep.engines import make_engine


class PrepRate:
    """Prepares blocks in this process. See `mbaas.bench.rows.EpochLoader`."""

    def __init__(self, spec: TrialSpec) -> None:
        self._all = spec.samples()
        self._beside = spec.task.beside
        self._raw = [np.fromfile(file, np.uint8) for file in self._all.files]
        self.samples = len(self._raw)
        self._order = SampleOrder(self.samples, spec.seed + spec.trial, _block_samples(spec, self.samples))
        self._engine = make_engine("cpu", spec.task.pipeline(), seed=spec.seed)
        self._out = spec.task.made.empty(self._order.block_samples)
        self._epoch = 0

    def epoch(self) -> Iterator[Minibatch]:
        blocks = self._order.blocks_per_epoch
        first, epoch, self._epoch = self._epoch * blocks, self._epoch, self._epoch + 1
        for block in range(first, first + blocks):
            ids = self._order.sample_ids(block)
            out = self._out[: len(ids)]
            raw, known = [self._raw[i] for i in ids], known_of(self._all, ids)
            prepared = self._engine.prepare(raw, ids, epoch, known, out)
            refuse_bad(prepared.bad, ids, self._all.files)
            yield [out, *(value for name in self._beside for value in listed(prepared.known[name]))], ids

    def close(self) -> None:
        self._engine.close()


def _block_samples(spec: TrialSpec, samples: int) -> int:
    """Choose the block size that an mbaas feed with a roomy staging budget would have."""
    sample_bytes = spec.task.made.nbytes
    return block_samples(
        num_samples=samples,
        batch_size=spec.batch,
        sample_bytes=sample_bytes,
        staging_bytes=max(2**30, 8 * spec.batch * sample_bytes),
        workers=spec.cores,
        sample_s=0.0,
    )


def open_loader(spec: TrialSpec) -> PrepRate:
    """Open the loader of one of the P processes."""
    return PrepRate(spec)
