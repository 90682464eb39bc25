"""Prepares the first samples of an epoch in this process, without a feed; the result is what every trial would get.

A minibatch is a pure function of (dataset, pipeline, seed, epoch, index), so no feed has to run.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.bounded import bounded
from mbaas.dataset.storage.retry import PatientReader
from mbaas.errors import BadSampleError
from mbaas.prep.engines import Engine, make_engine
from mbaas.prep.probe import PROBE_SAMPLES, first_good
from mbaas.samples.fields import Arrays, Column, Field
from mbaas.samples.order import Ids, SampleOrder, Shuffle
from mbaas.transforms import Pipeline
from mbaas.wire.samples import BadSample

_READERS = 8
"""Number of read threads; they mostly wait for storage."""


@dataclass(frozen=True)
class Preview:
    """Samples as prepared by a feed.

    Attributes:
        sample_ids: int64[n], in the order of the epoch.
        samples: [n, *shape], or packed, the output of the cpu engine; for images uint8 [n, height, width, 3].
        known: the samples' dataset fields, with boxes moved along with the pixels.
        bad: samples of the same range that cannot be prepared; not included above.
    """

    sample_ids: Ids
    samples: Column
    known: Arrays
    bad: tuple[BadSample, ...]


def first_samples(
    dataset: Dataset, pipeline: Pipeline, *, count: int, seed: int = 0, shuffle: bool = True, epoch: int = 0
) -> Preview:
    """Prepare the first samples of an epoch that is shuffled as a whole.

    Args:
        dataset, pipeline, seed, shuffle: as for `mbaas.serve`.
        count: number of samples, at least 1; limited to the dataset's size.
        epoch: the feed's epoch, from 0.

    Raises:
        ConfigError: the dataset lacks a field that the pipeline needs, or the seed is out of range.
        BadSampleError: none of the samples can be prepared; names the first.
    """
    pipeline.known(dataset.fields)  # raises ConfigError for missing fields
    dataset = bounded(dataset)
    order = SampleOrder(len(dataset), seed, block_samples=count, shuffled=shuffle)
    ids = order.samples_at(Shuffle(epoch), 0, min(count, len(dataset)))
    engine = make_engine("cpu", pipeline, seed=seed)
    try:
        return _prepared(dataset, engine, ids, epoch)
    finally:
        engine.close()


def _prepared(dataset: Dataset, engine: Engine, ids: Ids, epoch: int) -> Preview:
    stored, stored_ids = dataset.stored, dataset.stored_ids(ids, epoch).tolist()
    reader = PatientReader(stored.reader())
    with ThreadPoolExecutor(_READERS, thread_name_prefix="mbaas-preview") as pool:
        read = [*pool.map(lambda stored_id: _read(stored, reader, stored_id), stored_ids)]
    encoded = [each for each in read if not isinstance(each, BadSample)]
    bad = [
        replace(each, sample_id=i) for each, i in zip(read, ids.tolist(), strict=True) if isinstance(each, BadSample)
    ]
    if encoded:
        is_read = [not isinstance(each, BadSample) for each in read]
        ids, uris = ids[is_read], [stored.uri(i) for i in np.array(stored_ids)[is_read].tolist()]
        rooms = _made(dataset, PatientReader(dataset.reader()), engine).empty(len(ids))
        prepared = engine.prepare(encoded, ids, epoch, dataset.values_in(epoch, ids), rooms)
        bad += [BadSample(int(ids[flaw.row]), uris[flaw.row], flaw.reason) for flaw in prepared.bad]
    if len(bad) == len(read):
        raise BadSampleError(bad[0].uri, bad[0].reason)
    good = np.setdiff1d(np.arange(len(ids)), [flaw.row for flaw in prepared.bad])
    return Preview(ids[good], prepared.made[good], prepared.known, tuple(bad))


def _read(dataset: Dataset, reader: SampleReader, sample_id: int) -> NDArray[np.uint8] | BadSample:
    encoded = np.empty(int(dataset.lengths(np.array([sample_id]))[0]), np.uint8)
    try:
        reader.read_into(sample_id, encoded)
    except BadSampleError as error:
        return BadSample(sample_id, dataset.uri(sample_id), error.reason)
    return encoded


def _made(dataset: Dataset, reader: SampleReader, engine: Engine) -> Field:
    """Return the prepared field, from the first of the dataset's samples that can be prepared, as a feed does."""

    def made(sample_id: int) -> Field:
        encoded = _read(dataset, reader, sample_id)
        if isinstance(encoded, BadSample):
            raise BadSampleError(encoded.uri, encoded.reason)
        return engine.field(encoded, dataset.uri(sample_id), dataset.values(np.array([sample_id])))

    return first_good(made, min(PROBE_SAMPLES, len(dataset)))
