"""Rows "prep" and "prep-decoded": P and P', the rates at which all cores prepare samples without any transport.

One process per core goes through the dataset with the engine and the block size of an mbaas prep worker. On a GPU there
are as many processes as a feed has, with the dali engine and page-locked output arrays. Encoded bytes are in the
process's own memory, decoded samples in shared memory. The output array is reused for every block. P (encoded) and P'
(decoded) are upper limits for any row on these cores or GPU.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, count, pairwise
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from mbaas.core.layout import block_samples, wanted_staging
from mbaas.errors import MbaasError
from mbaas.memory import pinned
from mbaas.prep.decoded import DecodedBuffer, DecodedRows
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.order import SampleOrder
from mbaas.tools.bench.rows import Epoch, Minibatch, RowSpec, in_shared_memory, known_of, listed, refuse_bad
from mbaas.wire.samples import EngineName

TOGETHER = 16
"""Samples decoded per call."""

MOST_BYTES = 1 << 30
"""Maximum bytes of their decoded forms; untouched memory costs nothing."""


@in_shared_memory
def service(spec: RowSpec, file: BinaryIO) -> None:
    """Write all samples, decoded: the lengths of their containers, int64[n], and the containers from `_start` on."""
    samples, memory = spec.samples(), DecodedBuffer()
    engine = make_engine("cpu", spec.task.pipeline(), seed=spec.settings.seed, threads=spec.settings.cores)
    lengths = np.empty(len(samples.files), np.int64)
    out = spec.task.made.empty(TOGETHER)
    file.seek(_start(len(lengths)))
    for first in range(0, len(lengths), TOGETHER):
        ids = np.arange(first, min(first + TOGETHER, len(lengths)))
        raw = [np.fromfile(samples.files[i], np.uint8) for i in ids.tolist()]
        keep = DecodedRows(range(len(ids)), MOST_BYTES, memory)
        prepared = engine.prepare(Batch(raw, ids, 0, known_of(samples, ids)), out[: len(ids)], keep=keep)
        refuse_bad(prepared.bad, ids, samples.files)
        rows, sizes, containers = keep.taken()
        if len(rows) < len(ids):
            missing = samples.files[ids[min({*range(len(ids))} - {*rows.tolist()})]]
            raise MbaasError(f"{missing} cannot be kept decoded, so there is no P' with this data")
        file.writelines(each.data for each in _by_row(rows, sizes, containers))
        lengths[ids[rows]] = sizes
    file.seek(0)
    file.write(lengths.data)
    engine.close()


def _by_row(
    rows: NDArray[np.int64], sizes: NDArray[np.int64], containers: NDArray[np.uint8]
) -> list[NDArray[np.uint8]]:
    # An engine's threads keep samples in any order.
    views = np.split(containers, np.cumsum(sizes)[:-1])
    return [views[index] for index in np.argsort(rows)]


def _start(samples: int) -> int:
    """Return the next multiple of 64 after the lengths."""
    return -(-8 * samples // 64) * 64


def _decoded(path: str, samples: int) -> list[NDArray[np.uint8]]:
    memory = np.memmap(path, np.uint8, "r")
    bounds = [
        start := _start(samples),
        *(start + end for end in accumulate(memory[: 8 * samples].view(np.int64).tolist())),
    ]
    return [memory[start:stop] for start, stop in pairwise(bounds)]


@contextmanager
def loader(spec: RowSpec) -> Iterator[Epoch]:
    """Prepare blocks in this process."""
    samples, settings = spec.samples(), spec.settings
    raw: Sequence[NDArray[np.uint8]]
    if spec.row == "prep-decoded":
        raw = _decoded(spec.address, len(samples.files))
    else:
        raw = [np.fromfile(file, np.uint8) for file in samples.files]
    order = SampleOrder(len(raw), settings.seed + spec.trial, _block_samples(spec, len(raw)))
    kind: EngineName = "dali" if settings.gpu else "cpu"
    # Each epoch with another pipeline, if trials have different ones.
    engines = [
        make_engine(kind, spec.pipeline(number), seed=settings.seed, device_id=0 if settings.gpu else None)
        for number in range(settings.pipelines)
    ]
    room = spec.task.made.empty(order.block_samples)
    if settings.gpu:
        room = locked_like(room)
    epochs, blocks = count(), order.blocks_per_epoch

    def epoch() -> Iterator[Minibatch]:
        number = next(epochs)
        engine = engines[number % len(engines)]
        for block in range(number * blocks, (number + 1) * blocks):
            ids = order.sample_ids(block)
            out = room[: len(ids)]
            prepared = engine.prepare(Batch([raw[i] for i in ids], ids, number, known_of(samples, ids)), out)
            refuse_bad(prepared.bad, ids, samples.files)
            yield [out, *(value for name in spec.task.beside for value in listed(prepared.known[name]))], ids

    try:
        yield epoch
    finally:
        for engine in engines:
            engine.close()


def locked_like(like: NDArray[Any]) -> NDArray[Any]:
    """Return an array of the same shape in pages that the GPU can copy from and to directly."""
    pages = np.frombuffer(mmap.mmap(-1, -(-like.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE), np.uint8)
    pinned.gpu(0).lock(pages)
    return pages[: like.nbytes].view(like.dtype).reshape(like.shape)


def _block_samples(spec: RowSpec, samples: int) -> int:
    """Return the block size of an mbaas feed with an ample staging budget."""
    sample_bytes = spec.task.made.nbytes
    return block_samples(
        num_samples=samples,
        batch_size=spec.batch,
        sample_bytes=sample_bytes,
        staging_bytes=max(wanted_staging(spec.trials), 8 * spec.batch * sample_bytes),
        workers=spec.trials,
        most_workers=spec.trials,
        sample_s=0.0,
    )
