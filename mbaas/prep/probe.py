"""What the samples of a feed cost, before it is laid out: one is prepared, some are read as a cache node would, and of
these a few are prepared together, as in a block, and from both forms, encoded and decoded.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.faults import may_pass
from mbaas.errors import BadSampleError
from mbaas.fields import Arrays, Field
from mbaas.messages import DecodedCosts, Probe, SampleSpec
from mbaas.prep.decoded import KeptMemory, KeptRows
from mbaas.prep.engine import Engine

_T = TypeVar("_T")

PROBE_SAMPLES = 16
"""How many samples are tried until one can be prepared."""

PROBE_REPEATS = 2
"""How often preparing is timed; the fastest counts: another program may have taken the CPU."""

PROBE_TOGETHER_S = 0.05
"""How many samples are prepared together: as many as take about so long."""

PROBE_READS = 64
"""How many samples are read to learn how long that takes, at most, and at most a quarter of the dataset."""

PROBE_READS_S = 0.5
"""How long these reads may take together: what has come by then is enough to know that storage is slow."""


PROBE_DECODED = 8
"""How many of the samples that were read are prepared from both of their forms, at most."""

PROBE_DECODED_S = 0.05
"""After how much time no further one of these is decoded. To measure them then takes about four times as long."""

CONFIDENCE = 1.96
"""Standard errors between a mean and the upper end of its 95 % confidence interval."""

_MOST_DECODED_BYTES = 1 << 28
"""The most bytes of a decoded sample that is measured. Of this memory only what is written is ever there."""


def first_probe(
    dataset: Dataset, engine: Engine, keeping: Engine, known: tuple[Field, ...], fetch_threads: int
) -> Probe:
    """Probe the first sample that can be read and prepared, reading, and decoded samples. The first ones are tried once
    each: the caller may come again.

    Args:
        dataset: the samples.
        engine: prepares the sample.
        keeping: the engine whose samples are kept decoded, which may be the same.
        known: what prepared samples have of the dataset's fields.
        fetch_threads: how many threads read on a node at the beginning.

    Raises:
        StorageError: none of the first `PROBE_SAMPLES` can be read now, but storage may give this one later.
        BadSampleError: none of them can ever be prepared; names the first.
    """
    reader = dataset.reader()

    def probed(sample_id: int) -> tuple[Field, float, tuple[int, NDArray[np.uint8]]]:
        encoded = np.empty(int(dataset.lengths(np.array([sample_id]))[0]), np.uint8)
        reader.read_into(sample_id, encoded)
        return *_probe_one(engine, encoded, sample_id, dataset), (sample_id, encoded)

    made, alone_s, first = first_good(probed, min(PROBE_SAMPLES, len(dataset)))
    read_s, samples = _read_some(dataset, reader, fetch_threads)
    together = [first, *(sample for sample in samples if sample[0] != first[0])][: int(PROBE_TOGETHER_S / alone_s)]
    sample_s = _time_together(engine, dataset, made, together) if len(together) > 1 else alone_s
    # Storage may be so slow that no other has come: the one that is there says as much as there is to know.
    decoded = _decoded_costs(keeping, dataset, made, samples or [first])
    return Probe(SampleSpec(made, known), sample_s, read_s, decoded)


def first_good(make: Callable[[int], _T], samples: int) -> _T:
    """Return what ``make`` makes of the first sample, from 0, that is not bad.

    Raises:
        StorageError: all of so many samples are bad, but storage may give this one later.
        BadSampleError: all are; names the first.
    """
    errors = []
    for number in range(samples):
        try:
            return make(number)
        except BadSampleError as error:
            errors.append(error)
    raise next((error for error in errors if may_pass(error)), errors[0])


def _probe_one(engine: Engine, encoded: NDArray[np.uint8], sample_id: int, dataset: Dataset) -> tuple[Field, float]:
    """Return what is made of a sample, and the seconds that one takes."""
    ids = np.array([sample_id])
    known = dataset.values(ids)
    made = engine.field(encoded, dataset.uri(sample_id), known)
    out = made.empty(1)
    if flaws := engine.prepare([encoded], ids, 0, known, out).bad:
        raise BadSampleError(dataset.uri(sample_id), flaws[0].reason)
    return made, _sample_s(engine, [encoded], ids, known, out)


def _time_together(
    engine: Engine, dataset: Dataset, made: Field, samples: Sequence[tuple[int, NDArray[np.uint8]]]
) -> float:
    """Return the seconds that one of these samples, (id, bytes), takes where they are prepared together.

    One alone says little: it may be larger than most, and it bears what every call of an engine takes.
    """
    numbers, encoded = zip(*samples, strict=True)
    ids = np.array(numbers)
    return _sample_s(engine, encoded, ids, dataset.values(ids), made.empty(len(ids)))


def _sample_s(
    engine: Engine, encoded: Sequence[NDArray[np.uint8]], ids: NDArray[np.int64], known: Arrays, out: NDArray[Any]
) -> float:
    """Prepare samples a few times; return the seconds of the fastest try for each that is good."""
    tries = []
    for _ in range(PROBE_REPEATS):
        began = time.perf_counter()
        prepared = engine.prepare(encoded, ids, 0, known, out)
        good = len(ids) - len(prepared.bad)
        tries.append((time.perf_counter() - began) / max(1, good))  # a user's function may fail the second time
    return min(tries)


def _decoded_costs(
    engine: Engine, dataset: Dataset, made: Field, samples: Sequence[tuple[int, NDArray[np.uint8]]]
) -> DecodedCosts | None:
    """Return what it costs to prepare these samples, (id, bytes), from both of their forms, on average.

    They are prepared together, as in a block, and in two epochs: how much of a sample is looked at may be a matter of
    chance. Of two tries the faster one counts.
    """
    memory, end = KeptMemory(), time.perf_counter() + PROBE_DECODED_S
    kept: list[tuple[int, NDArray[np.uint8], NDArray[np.uint8]]] = []
    for sample_id, encoded in samples:
        ids, keep = np.array([sample_id]), KeptRows([0], _MOST_DECODED_BYTES, memory)
        engine.prepare([encoded], ids, 0, dataset.values(ids), made.empty(1), keep)
        _, lengths, container = keep.taken()
        if len(lengths):
            kept.append((sample_id, encoded, container.copy()))
        if time.perf_counter() > end:
            break
    if not kept:
        return None
    numbers, *forms = zip(*kept, strict=True)
    ids, out = np.array(numbers), made.empty(len(kept))
    known = dataset.values(ids)
    # Whether other processes are busy, too, is no matter of this feed; but a GPU works while this process waits.
    clock = time.process_time if engine.name == "cpu" else time.perf_counter

    def seconds(form: tuple[NDArray[np.uint8], ...], epoch: int) -> float:
        began = clock()
        engine.prepare(form, ids, epoch, known, out)
        return (clock() - began) / len(ids)

    encoded_s, decoded_s = (
        sum(min(seconds(form, epoch) for _ in range(2)) for epoch in range(2)) / 2 for form in forms
    )
    encoded_bytes, decoded_bytes = (np.array([len(sample) for sample in form], np.float64) for form in forms)
    return DecodedCosts(
        float(decoded_bytes.mean()), encoded_s, decoded_s, _upper_total(encoded_bytes, decoded_bytes, dataset)
    )


def _upper_total(encoded: NDArray[np.float64], decoded: NDArray[np.float64], dataset: Dataset) -> float:
    """Estimate the bytes of all samples decoded, at the upper end of a 95 % confidence interval.

    Photographs grow by a similar factor whatever their size; samples that are resized first all have one size. So both
    the factor and the size are estimated, and the lower bound of the two counts.

    Args:
        encoded, decoded: float64[n], the bytes of some samples in each form.
    """
    # after one sample nothing is known of how much samples differ
    bounds = [
        total * (values.mean() + CONFIDENCE * values.std(ddof=1) / math.sqrt(len(values)))
        if len(values) > 1
        else total * values.mean() * math.sqrt(PROBE_DECODED)
        for total, values in ((dataset.total_bytes, decoded / encoded), (len(dataset.stored), decoded))
    ]
    return float(min(bounds))


def _read_some(
    dataset: Dataset, reader: SampleReader, threads: int
) -> tuple[float, list[tuple[int, NDArray[np.uint8]]]]:
    """Read samples as a node does, with ``threads`` threads at once.

    Samples from everywhere in the dataset are read: neighbours may lie in one archive, or in one page of the disk. One
    that cannot be read is none; a read that does not come back is left behind, in a thread that keeps nobody waiting.

    Returns:
        The seconds that a node needs for each sample; and some of them, up to `PROBE_DECODED`: (id, bytes).
    """
    ids = np.linspace(0, len(dataset) - 1, min(PROBE_READS, max(1, len(dataset) // 4))).astype(np.int64)
    waiting: SimpleQueue[tuple[int, int]] = SimpleQueue()
    for sample in zip(ids.tolist(), dataset.lengths(ids).tolist(), strict=True):
        waiting.put(sample)
    end = time.perf_counter() + PROBE_READS_S
    busy_s, came = [0.0] * min(threads, len(ids)), [0] * min(threads, len(ids))  # of each thread
    looked_at = {*ids[np.linspace(0, len(ids) - 1, min(PROBE_DECODED, len(ids))).astype(np.intp)].tolist()}
    samples: list[tuple[int, NDArray[np.uint8]]] = []

    def read(thread: int) -> None:
        with contextlib.suppress(Empty):
            while (began := time.perf_counter()) < end:
                sample_id, length = waiting.get_nowait()
                busy_s[thread] += end - began  # as long as it does not come back
                with contextlib.suppress(BadSampleError):
                    encoded = np.empty(length, np.uint8)
                    reader.read_into(sample_id, encoded)
                    came[thread] += 1
                    if sample_id in looked_at:
                        samples.append((sample_id, encoded))
                busy_s[thread] -= max(0.0, end - time.perf_counter())  # it came back before the end

    readers = [threading.Thread(target=read, args=(n,), name="mbaas-probe", daemon=True) for n in range(len(came))]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(max(0.0, end - time.perf_counter()))
    # A copy: a thread that is left behind may add to it.
    return sum(busy_s) / max(1, sum(came)) / threads, [*samples]
