"""The check of a whole dataset in pieces of similar size, with totals in bounded memory."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset import Dataset
from mbaas.dataset.subsets import id_batches
from mbaas.errors import BadSampleError, StorageError
from mbaas.prep.probe import PROBE_SAMPLES
from mbaas.samples.fields import LABEL, Field
from mbaas.samples.order import Ids
from mbaas.tools.check.pool import Lost, Pool
from mbaas.tools.check.samples import Job, Outcome, SampleChecks
from mbaas.wire.samples import BadSample

PIECE_SAMPLES, PIECE_BYTES = 32, 32 << 20
"""Limits of the samples that a process checks together; a larger sample is checked alone."""

MOST_NAMED, MOST_SIZES = 10_000, 1000
"""Upper bounds: bad samples with their reason, and distinct image sizes."""

TRIED_FOR_FIRST = 256
"""Samples that are tried, spread over the dataset, until one is good."""

MOST_UNREAD = 3
"""Samples that storage does not return until it counts as out of order at the start."""


@dataclass
class Totals:
    """The result so far.

    Attributes:
        samples, nbytes: number of samples that were checked, and their bytes.
        bad: the first bad samples that were found.
        bad_ids: ids of all bad samples.
        unread, unread_count: the first samples that storage did not return now, and the number of all.
        reasons: reason -> number of samples, for the first `MOST_NAMED` reasons.
        sizes: (width, height) -> number of images, for the first `MOST_SIZES` sizes.
        smallest, largest: image sizes with the fewest and the most pixels; None without images.
    """

    samples: int = 0
    nbytes: int = 0
    bad: list[BadSample] = field(default_factory=list)
    bad_ids: array[int] = field(default_factory=lambda: array("q"))
    unread: list[BadSample] = field(default_factory=list)
    unread_count: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    sizes: Counter[tuple[int, int]] = field(default_factory=Counter)
    smallest: tuple[int, int] | None = None
    largest: tuple[int, int] | None = None

    def add(self, found: Outcome, uri: Callable[[int], str]) -> None:
        """Add a result; ``uri`` gives the location of a sample."""
        self.samples += found.samples
        self.nbytes += found.nbytes
        for number, reason in found.bad.items():
            self.bad_ids.append(number)
            _count(self.reasons, reason, 1, MOST_NAMED)
            if len(self.bad) < MOST_NAMED:
                self.bad.append(BadSample(number, uri(number), reason))
        self.unread_count += len(found.unread)
        for number, reason in found.unread.items():
            if len(self.unread) < MOST_NAMED:
                self.unread.append(BadSample(number, uri(number), reason))
        for size, count in found.sizes.items():
            _count(self.sizes, size, count, MOST_SIZES)
            self.smallest = min(self.smallest or size, size, key=_pixels)
            self.largest = max(self.largest or size, size, key=_pixels)

    @property
    def ids(self) -> Ids:
        """int64[k], ids of the bad samples, ascending."""
        return np.sort(np.frombuffer(self.bad_ids, np.int64)) if self.bad_ids else np.zeros(0, np.int64)


def _count(counter: Counter[Any], key: Any, count: int, most: int) -> None:
    if key in counter or len(counter) < most:
        counter[key] += count


def _pixels(size: tuple[int, int]) -> tuple[int, tuple[int, int]]:
    return size[0] * size[1], size


def chosen_ids(samples: int, limit: int | None) -> Ids:
    """Return the ids to check: all, or ``limit`` evenly spaced ones."""
    if limit is None or limit >= samples:
        return np.arange(samples)
    return np.linspace(0, samples - 1, limit).round().astype(np.int64)


def pieces_of(ids: Ids, lengths: Callable[[Ids], NDArray[np.int64]], made_bytes: int) -> Iterator[tuple[int, ...]]:
    """Divide ids into pieces.

    Args:
        lengths: returns encoded sizes in bytes.
        made_bytes: size of a prepared sample.
    """
    for batch in id_batches(len(ids)):
        piece: list[int] = []
        room = PIECE_BYTES
        part = ids[batch]
        for number, length in zip(part.tolist(), lengths(part).tolist(), strict=True):
            cost = length + made_bytes
            if piece and (cost > room or len(piece) == PIECE_SAMPLES):
                yield tuple(piece)
                piece, room = [], PIECE_BYTES
            piece.append(number)
            room -= cost
        if piece:
            yield tuple(piece)


def prepared_field(job: Job) -> Field:
    """Return the shape of prepared samples, from the first good one, as a feed does.

    A feed tries only the first `PROBE_SAMPLES`. This tries others too, so that data whose first samples are bad can be
    checked. Another process prepares them, which a sample may crash or block.

    Raises:
        BadSampleError: none of the samples that were tried is good, or storage did not return `MOST_UNREAD` of them;
            names the first.
    """
    dataset = job.dataset
    first = np.arange(min(PROBE_SAMPLES, len(dataset)))
    tried = list(dict.fromkeys(np.concatenate([first, chosen_ids(len(dataset), TRIED_FOR_FIRST)]).tolist()))
    pool: Pool[int, Field | BadSampleError] = Pool(job.prepares, 1, job.prep_s)
    bad: list[BadSampleError] = []
    unread: list[BadSampleError] = []
    try:
        for number, found in pool.run(tried):
            if isinstance(found, Field):
                return found
            error = found
            if isinstance(error, Lost):
                kind = StorageError if error.in_storage else BadSampleError
                error = kind(dataset.uri(number), error.reason)
            (unread if isinstance(error, StorageError) else bad).append(error)
            if len(unread) == MOST_UNREAD:
                break
    finally:
        pool.close()
    raise (unread or bad)[0]


def scan(job: Job, made: Field, ids: Ids, totals: Totals, *, processes: int) -> Generator[None, None, None]:
    """Check samples in several processes, and add the results to ``totals``; yields after each piece.

    ``made`` is the shape of the feed's prepared samples (`prepared_field`). There are at most as many processes as
    pieces.

    A piece whose process dies or takes longer than the limits of ``job`` is repeated sample by sample, to find the one
    that causes it. A sample is bad if its process died twice, because the first may have died before it began. Closing
    the generator ends the processes.
    """
    processes = max(1, min(processes, len(ids) // PIECE_SAMPLES))
    pool: Pool[tuple[int, ...], Outcome] = Pool(partial(SampleChecks, job, made), processes, job.prep_s)
    repeated: set[int] = set()
    try:
        for piece, found in pool.run(pieces_of(ids, job.dataset.lengths, made.nbytes)):
            if isinstance(found, Lost) and len(piece) > 1:
                pool.add((number,) for number in piece)
                continue
            if isinstance(found, Lost) and found.has_ended and piece[0] not in repeated:
                repeated.add(piece[0])
                pool.add([piece])
                continue
            if isinstance(found, Lost):
                lost = {piece[0]: found.reason}
                found = Outcome(samples=1, unread=lost) if found.in_storage else Outcome(samples=1, bad=lost)
            totals.add(found, job.dataset.uri)
            yield
    finally:
        pool.close()


def class_counts(dataset: Dataset, ids: Ids) -> NDArray[np.int64] | None:
    """Count these samples by class: int64[classes]; None without classes."""
    if not dataset.class_names or LABEL.name not in {each.name for each in dataset.fields}:
        return None
    counts = np.zeros(len(dataset.class_names), np.int64)
    for batch in id_batches(len(ids)):
        counts += np.bincount(dataset.labels(ids[batch]), minlength=len(counts))
    return counts


def most_frequent(sizes: Counter[tuple[int, int]], count: int) -> Sequence[tuple[tuple[int, int], int]]:
    """Return the most frequent sizes, with their number."""
    return sorted(sizes.items(), key=lambda each: (-each[1], each[0]))[:count]
