"""Reads and prepares samples as a feed does, but decodes them whole where a feed decodes only a part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import seconds
from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.base import read_encoded
from mbaas.dataset.storage.faults import may_pass, message_of
from mbaas.dataset.storage.retry import PatientReader, retrying
from mbaas.errors import BadSampleError, MbaasError, StorageError
from mbaas.prep.decode import decode
from mbaas.prep.decoded import DecodedBuffer, DecodedRows
from mbaas.prep.engines import DEFAULT_MAX_BYTES, DEFAULT_MAX_PIXELS, Engine, make_engine
from mbaas.prep.header import peek
from mbaas.prep.pixels import Scratch
from mbaas.prep.probe import batch_of, prepared_alone
from mbaas.prep.sound import SoundDecoder
from mbaas.samples.fields import Field
from mbaas.tools.check import pool
from mbaas.transforms import DecodeAudio, Pipeline
from mbaas.transforms.arrays import UnfitError

DECODED_BYTES = 256 << 20
"""Memory of one process for whole decoded samples; pages that are not written take no RAM."""

READ_S = 30.0
"""Time for a read besides its repetitions: the last attempt may begin at their end."""


@dataclass
class Outcome:
    """The result for some samples.

    Attributes:
        samples, nbytes: number of samples, and bytes that were read.
        bad: id -> reason.
        unread: id -> reason, of samples that storage did not return now, but may return later.
        sizes: (width, height) of the images -> their number.
    """

    samples: int = 0
    nbytes: int = 0
    bad: dict[int, str] = field(default_factory=dict)
    unread: dict[int, str] = field(default_factory=dict)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Job:
    """The samples to check, and the limits of the processes.

    Attributes:
        pipeline: makes the pipeline, whose functions may not be picklable.
        retry_s: seconds during which a read is repeated after a transient storage error.
        prep_s: time limit in seconds for preparing.
    """

    dataset: Dataset
    pipeline: Callable[[], Pipeline]
    seed: int
    retry_s: float
    prep_s: float

    def reader(self) -> SampleReader:
        return PatientReader(self.dataset.reader(), retrying(total_s=self.retry_s))

    def read(self, reader: SampleReader, number: int) -> NDArray[np.uint8]:
        """Read a sample, as a stage of the current piece."""
        limit_s = self.retry_s + READ_S
        reason = f"storage did not return it within {seconds(limit_s)}"
        pool.begin(pool.Stage(limit_s, reason, in_storage=True))
        return read_encoded(self.dataset, reader, number)

    def prepares(self) -> Callable[[int], Field | BadSampleError]:
        """Return the function of a process that prepares one sample: its shape, or why it is bad."""
        return partial(self._prepared, make_engine("cpu", self.pipeline(), seed=self.seed), self.reader())

    def _prepared(self, engine: Engine, reader: SampleReader, number: int) -> Field | BadSampleError:
        uri = self.dataset.uri(number)
        try:
            batch = batch_of(self.dataset, [(number, self.read(reader, number))])
            pool.begin(pool.not_prepared(self.prep_s))
            return prepared_alone(engine, batch, uri)
        except BadSampleError as error:
            # Its cause does not cross processes.
            return StorageError(uri, error.reason) if _is_passing(error) else BadSampleError(uri, error.reason)
        except OSError as error:
            if may_pass(error):
                return StorageError(uri, message_of(error))
            raise


def _is_passing(error: BadSampleError) -> bool:
    """Return whether storage may return the sample later; retries hide the storage error behind another one."""
    return may_pass(error) or (isinstance(error.__cause__, StorageError) and may_pass(error.__cause__))


class SampleChecks:
    """Checks samples in one process; ``made`` is the shape of the feed's prepared samples."""

    def __init__(self, job: Job, made: Field) -> None:
        self._job, self._pipeline, self._made = job, job.pipeline(), made
        self._reader = job.reader()
        pipeline = self._pipeline
        self._engine: Engine = make_engine("cpu", pipeline, seed=job.seed)
        self._memory = DecodedBuffer()
        # A random window directly after the decoder may leave damage unread, which another epoch would reach.
        reads_a_part = pipeline.prefix == 1 and len(pipeline.transforms) > 1
        self._whole = _whole_decoder(pipeline) if reads_a_part else None

    def __call__(self, ids: Sequence[int]) -> Outcome:
        """Check samples by their ids, in one epoch."""
        found = Outcome(samples=len(ids))
        encoded = []
        for number in ids:
            try:
                encoded.append((number, self._job.read(self._reader, number)))
            except BadSampleError as error:
                (found.unread if _is_passing(error) else found.bad)[number] = error.reason
            except OSError as error:  # of a third-party reader
                if not may_pass(error):
                    raise
                found.unread[number] = message_of(error)
        found.nbytes = sum(len(content) for _, content in encoded)
        self._prepare(encoded, found)
        if self._pipeline.has_images:
            for number, content in encoded:
                if number not in found.bad:
                    height, width = peek(content.data, DEFAULT_MAX_PIXELS).size
                    found.sizes[width, height] += 1
        return found

    def _prepare(self, encoded: list[tuple[int, NDArray[np.uint8]]], found: Outcome) -> None:
        if not encoded:
            return
        pool.begin(pool.not_prepared(self._job.prep_s))
        batch, rows = batch_of(self._job.dataset, encoded), range(len(encoded))
        keep = None
        if self._whole is not None:
            keep = DecodedRows(rows, DECODED_BYTES, self._memory, applied=1)
        try:
            bad = {
                flaw.row: flaw.reason for flaw in self._engine.prepare(batch, self._made.empty(len(batch)), keep).bad
            }
        except MbaasError as error:  # a field does not suit an image, which the error does not name
            if len(encoded) == 1:
                found.bad[encoded[0][0]] = str(error)
                return
            for one in encoded:
                self._prepare([one], found)
            return
        if keep is not None and self._whole is not None:
            # The engine does not keep damaged samples. Only these are decoded a second time, for the reason.
            for row in {*rows} - {*keep.taken()[0].tolist()} - {*bad}:
                try:
                    self._whole(encoded[row][1].data)
                except UnfitError as error:
                    bad[row] = str(error)
        found.bad.update({encoded[row][0]: reason for row, reason in bad.items()})


def _whole_decoder(pipeline: Pipeline) -> Callable[[memoryview], object] | None:
    """Return a function that decodes a whole file, or raises UnfitError; None for arrays, always read whole."""
    if isinstance(pipeline.decoder, DecodeAudio):
        decoder = SoundDecoder(pipeline.decoder, DEFAULT_MAX_BYTES)
        return lambda content: decoder(content, np.zeros(0))
    if pipeline.has_images:
        scratch = Scratch()
        return lambda content: decode(content, peek(content, DEFAULT_MAX_PIXELS), scratch)
    return None
