"""Row "prep": P, the rate at which all cores prepare samples when nothing has to be moved anywhere.

One process per core goes through the dataset with the engine and the block size of an mbaas prep worker. Bytes are in
the process's own memory, and the output array is used again for every block. It is the most that any row can make of
these cores.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mbaas.bench.rows import IMAGE_SIZE, SAMPLE_BYTES, Minibatch, TrialSpec, pipeline, refuse_bad
from mbaas.core.layout import block_samples
from mbaas.order import SampleOrder
from mbaas.prep.engines import make_engine


class PrepRate:
    """Prepares blocks in this process. See `mbaas.bench.rows.EpochLoader`."""

    def __init__(self, spec: TrialSpec) -> None:
        self._files = spec.files
        self._raw = [np.fromfile(file, np.uint8) for file in self._files]
        self.samples = len(self._raw)
        self._order = SampleOrder(self.samples, spec.seed + spec.trial, _block_samples(spec, self.samples))
        self._engine = make_engine("cpu", pipeline(), seed=spec.seed)
        self._out = np.empty((self._order.block_samples, IMAGE_SIZE, IMAGE_SIZE, 3), np.uint8)
        self._epoch = 0

    def epoch(self) -> Iterator[Minibatch]:
        blocks = self._order.blocks_per_epoch
        first, epoch, self._epoch = self._epoch * blocks, self._epoch, self._epoch + 1
        for block in range(first, first + blocks):
            ids = self._order.sample_ids(block)
            out = self._out[: len(ids)]
            prepared = self._engine.prepare([self._raw[i] for i in ids], ids, epoch, {}, out)
            refuse_bad(prepared.bad, ids, self._files)
            yield out, ids

    def close(self) -> None:
        self._engine.close()


def _block_samples(spec: TrialSpec, samples: int) -> int:
    """Choose the block size that an mbaas feed with a roomy staging budget would have."""
    return block_samples(
        num_samples=samples,
        batch_size=spec.batch,
        sample_bytes=SAMPLE_BYTES,
        staging_bytes=max(2**30, 8 * spec.batch * SAMPLE_BYTES),
        workers=spec.cores,
        sample_s=0.0,
    )


def open_loader(spec: TrialSpec) -> PrepRate:
    """Open the loader of one of the P processes."""
    return PrepRate(spec)
