"""Measures the costs of a feed's samples before the feed is laid out, and both engines before it chooses one.

One sample is prepared alone, and some are read as a cache node would read them. A few of the latter are prepared
together, as in a block, from encoded and from decoded form.

Engines are measured for about `MEASURED_S` each, after at most `PROBE_READS_S` of reading: 1.5 s in total. Loading DALI
and opening the GPU is not included; each dali worker does that when it starts.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from queue import Empty, SimpleQueue
from typing import TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset import Dataset, SampleReader
from mbaas.dataset.base import read_encoded
from mbaas.dataset.storage.faults import may_pass
from mbaas.errors import BadSampleError, last_line
from mbaas.model.engine_choice import WorkerRates
from mbaas.prep.decoded import DecodedBuffer, DecodedRows
from mbaas.prep.engines import Batch, Engine
from mbaas.samples.fields import Field
from mbaas.wire.samples import DecodedCosts, EngineProbe, Probe, SampleSpec

_T = TypeVar("_T")
ReadSample: TypeAlias = tuple[int, NDArray[np.uint8]]
"""Id and encoded bytes of a sample."""

PROBE_SAMPLES = 16
"""Samples to try until one can be prepared."""

PROBE_REPEATS = 2
"""Timed repetitions; the fastest counts, because other programs may take the CPU."""

PROBE_TOGETHER_S = 0.05
"""Seconds of work that are prepared together; this determines the number of samples."""

PROBE_READS = 64
"""Maximum number of samples read to measure read times; also limited to a quarter of the dataset."""

PROBE_READS_S = 0.5
"""Time limit for all PROBE_READS; the samples read by then are enough to recognize slow storage."""


PROBE_DECODED = 8
"""Maximum number of read samples that are prepared from both forms."""

PROBE_DECODED_S = 0.05
"""Seconds after which no further sample is decoded. Measuring these samples then takes about four times as long."""

STUDENT_T = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36)
"""Standard errors from a mean to the upper end of its 95 % confidence interval, for 2 to `PROBE_DECODED` samples."""

_MOST_DECODED_BYTES = 1 << 28
"""Maximum size of a decoded sample that is measured. Pages of this memory that are not written take no RAM."""


def first_probe(
    dataset: Dataset, engine: Engine, keeping: Engine, known: tuple[Field, ...], fetch_threads: int
) -> Probe:
    """Measure the costs of preparing, reading and decoded forms, from the first sample that can be prepared on.

    Each of the first samples is tried once; the caller may retry.

    Args:
        keeping: the engine whose decoded samples are cached; may be the same.
        known: dataset fields that remain in prepared samples.
        fetch_threads: read threads of a node.

    Raises:
        StorageError: none of the first `PROBE_SAMPLES` samples can be read now, but storage may deliver this one later.
        BadSampleError: all are permanently bad; names the first.
    """
    reader = dataset.reader()

    def probed(sample_id: int) -> tuple[Field, float, ReadSample]:
        encoded = read_encoded(dataset, reader, sample_id)
        batch = batch_of(dataset, [(sample_id, encoded)])
        made = prepared_alone(engine, batch, dataset.uri(sample_id))
        return made, _sample_s(engine, batch, made), (sample_id, encoded)

    made, sample_s, first = first_good(probed, min(PROBE_SAMPLES, len(dataset)))
    read_s, samples = read_some(dataset, reader, fetch_threads)
    # A single sample is not representative: it may be larger than most, and bears the fixed cost of an engine call.
    together = [first, *(sample for sample in samples if sample[0] != first[0])][: int(PROBE_TOGETHER_S / sample_s)]
    if len(together) > 1:
        sample_s = _sample_s(engine, batch_of(dataset, together), made)
    # If storage was too slow to deliver any other sample, measure the first one.
    decoded = tuple(_decoded_costs(keeping, dataset, made, samples or [first]))
    return Probe(SampleSpec(made, known), sample_s, read_s, decoded)


def batch_of(dataset: Dataset, samples: Sequence[ReadSample]) -> Batch:
    ids = np.array([sample_id for sample_id, _ in samples])
    return Batch([encoded for _, encoded in samples], ids, 0, dataset.values(ids))


def prepared_alone(engine: Engine, batch: Batch, uri: str) -> Field:
    """Prepare a batch of one sample, and return its shape; raise BadSampleError, which names ``uri``, if it is bad."""
    made = engine.field(batch.encoded[0], uri, batch.known)
    if flaws := engine.prepare(batch, made.empty(1)).bad:
        raise BadSampleError(uri, flaws[0].reason)
    return made


def first_good(make: Callable[[int], _T], samples: int) -> _T:
    """Return ``make(number)`` for the first good sample below ``samples``.

    Raises:
        StorageError: all are bad, but storage may deliver this one later.
        BadSampleError: all are permanently bad; names the first.
    """
    errors = []
    for number in range(samples):
        try:
            return make(number)
        except BadSampleError as error:
            errors.append(error)
    raise next((error for error in errors if may_pass(error)), errors[0])


def _sample_s(engine: Engine, batch: Batch, made: Field) -> float:
    """Return the seconds per good sample, from the fastest of a few tries."""
    tries, out = [], made.empty(len(batch))
    for _ in range(PROBE_REPEATS):
        began = time.perf_counter()
        prepared = engine.prepare(batch, out)
        good = len(batch) - len(prepared.bad)
        tries.append((time.perf_counter() - began) / max(1, good))  # a user's function may fail in a later try
    return min(tries)


def _decoded_costs(engine: Engine, dataset: Dataset, made: Field, samples: Sequence[ReadSample]) -> list[DecodedCosts]:
    # Together, as in a block, and in two epochs, because the amount of a sample that is read may be random. The faster
    # of two tries counts.
    memory, end = DecodedBuffer(), time.perf_counter() + PROBE_DECODED_S
    pairs: dict[int, list[tuple[ReadSample, ReadSample]]] = {form: [] for form in engine.forms}  # encoded, decoded
    for sample in samples:
        for form, applied in engine.forms.items():
            keep = DecodedRows([0], _MOST_DECODED_BYTES, memory, applied)
            engine.prepare(batch_of(dataset, [sample]), made.empty(1), keep)
            _, lengths, container = keep.taken()
            if len(lengths):
                pairs[form].append((sample, (sample[0], container.copy())))
        if time.perf_counter() > end:
            break
    kept = {form: found for form, found in pairs.items() if found}
    if not kept:
        return []
    # CPU time ignores the load of other processes; but a GPU works while this process waits, which needs wall time.
    clock = time.process_time if engine.name == "cpu" else time.perf_counter

    def seconds(form: Sequence[ReadSample]) -> float:
        batch, out = batch_of(dataset, form), made.empty(len(form))

        def once(epoch: int) -> float:
            began = clock()
            engine.prepare(replace(batch, epoch=epoch), out)
            return (clock() - began) / len(batch)

        return sum(min(once(epoch) for _ in range(2)) for epoch in range(2)) / 2

    encoded_s = seconds([sample for sample, _ in max(kept.values(), key=len)])
    costs = []
    for form, found in kept.items():
        sizes = np.array([[len(sample) for _, sample in pair] for pair in found], np.float64)
        rest_s, nbytes = seconds([sample for _, sample in found]), float(sizes[:, 1].mean())
        costs.append(DecodedCosts(nbytes, encoded_s, rest_s, _upper_total(sizes, dataset), form))
    return costs


def _upper_total(sizes: NDArray[np.float64], dataset: Dataset) -> float:
    # Photographs grow by a similar factor whatever their size, while samples that are resized first all have the same
    # size. So estimate from the factor and from the size, and take the smaller upper bound (95 % confidence).
    encoded, decoded = sizes.T
    if len(decoded) < 2:
        return math.inf  # a single sample gives no variance
    errors = STUDENT_T[len(decoded) - 2] / math.sqrt(len(decoded))
    bounds = [
        total * (values.mean() + errors * values.std(ddof=1))
        for total, values in ((dataset.total_bytes, decoded / encoded), (len(dataset.stored), decoded))
    ]
    return float(min(bounds))


def read_some(
    dataset: Dataset, reader: SampleReader, threads: int, *, keep: int = PROBE_DECODED
) -> tuple[float, list[ReadSample]]:
    """Read samples in ``threads`` threads for at most `PROBE_READS_S`.

    Return the seconds of one node per sample, and up to ``keep`` samples. Samples are spread over the whole dataset,
    since neighbours may share an archive or a disk page. Unreadable samples are not counted; a read that hangs is
    abandoned in its daemon thread.
    """
    ids = np.linspace(0, len(dataset) - 1, min(PROBE_READS, max(1, len(dataset) // 4))).astype(np.int64)
    waiting: SimpleQueue[tuple[int, int]] = SimpleQueue()
    for sample in zip(ids.tolist(), dataset.lengths(ids).tolist(), strict=True):
        waiting.put(sample)
    end = time.perf_counter() + PROBE_READS_S
    busy_s, came = [0.0] * min(threads, len(ids)), [0] * min(threads, len(ids))  # per thread
    looked_at = {*ids[np.linspace(0, len(ids) - 1, min(keep, len(ids))).astype(np.intp)].tolist()}
    samples: list[ReadSample] = []

    def read(thread: int) -> None:
        with suppress(Empty):
            while (began := time.perf_counter()) < end:
                sample_id, length = waiting.get_nowait()
                busy_s[thread] += end - began  # provisional, in case the read hangs
                with suppress(BadSampleError):
                    encoded = np.empty(length, np.uint8)
                    reader.read_into(sample_id, encoded)
                    came[thread] += 1
                    if sample_id in looked_at:
                        samples.append((sample_id, encoded))
                busy_s[thread] -= max(0.0, end - time.perf_counter())  # correct it after the read

    readers = [threading.Thread(target=read, args=(n,), name="mbaas-probe", daemon=True) for n in range(len(came))]
    for thread in readers:
        thread.start()
    for thread in readers:
        thread.join(max(0.0, end - time.perf_counter()))
    # Copy, because an abandoned thread may still append.
    return sum(busy_s) / max(1, sum(came)) / threads, [*samples]


# ---- engines ----

MEASURED_S = 0.5
"""Time for each engine, in seconds. The last call may exceed it."""

TOGETHER = 64
"""Samples in a call, if the time allows it. DALI needs large batches: with one sample it is slower than a CPU."""

GROWTH = 8
"""Factor between the numbers of samples in a call: 1, 8, 64. DALI builds a new graph for each."""

assert PROBE_READS_S + 2 * MEASURED_S < 2, "the probe's cost is documented as less than 2 s"


def probe_engines(
    dataset: Dataset, cpu: Callable[[], Engine], dali: Callable[[], Engine], fetch_threads: int, threads: int = 1
) -> EngineProbe:
    """Return the rates of one worker with each engine.

    A failure of DALI, such as an unusable GPU, is part of the result and raises nothing.

    Args:
        cpu, dali: construct the engines as a worker of the feed has them.
        fetch_threads: number of threads that read storage.
        threads: number of threads of the cpu engine.
    """
    _, samples = read_some(dataset, dataset.reader(), fetch_threads, keep=PROBE_READS)
    samples.sort(key=lambda sample: sample[0])  # threads read them in any order
    with ExitStack() as opened:
        engine = cpu()
        opened.callback(engine.close)
        made = _field(engine, dataset, samples)
        if made is None:
            return EngineProbe(None)
        rows = [samples[row % len(samples)] for row in range(TOGETHER)]
        on_cpu = _Measurement(engine, dataset, rows, made, threads)
        try:
            engine = dali()
            opened.callback(engine.close)
            with_dali = _Measurement(engine, dataset, rows, made)
            # In turns, because other programs should delay both engines equally.
            while unfinished := [each for each in (on_cpu, with_dali) if not each.is_over]:
                min(unfinished, key=lambda each: each.spent_s).run()
        except Exception as error:  # DALI raises RuntimeError for everything, and its import may fail in any way
            return EngineProbe(None, f"{type(error).__name__}: {last_line(error)}")
    rates = WorkerRates(on_cpu.per_s, with_dali.per_s)
    return EngineProbe(rates if rates.cpu_per_s or rates.dali_per_s else None)


def _field(engine: Engine, dataset: Dataset, samples: list[ReadSample]) -> Field | None:
    for sample_id, encoded in samples:
        try:
            return engine.field(encoded, dataset.uri(sample_id), batch_of(dataset, [(sample_id, encoded)]).known)
        except BadSampleError:
            continue
    return None


class _Measurement:
    """Measures one engine with ``rows``, in larger and larger batches while `MEASURED_S` allows it.

    Args:
        threads: threads of the cpu engine. Its CPU time counts, because workers reserve CPUs, so the current load of
            other programs does not matter. 0 for DALI: elapsed time counts, because this process waits for a GPU.

    Attributes:
        spent_s: time of the calls after the first one, which loads code and builds DALI's graph.
        is_over: whether another call would exceed `MEASURED_S`.
    """

    def __init__(self, engine: Engine, dataset: Dataset, rows: list[ReadSample], made: Field, threads: int = 0) -> None:
        self._engine, self._dataset, self._rows, self._threads = engine, dataset, rows, threads
        self._out = made.empty(len(rows))
        self._count, self._best_s = 1, math.inf
        self.spent_s, self.is_over, self._took_s = 0.0, False, 0.0
        self._call()
        self.spent_s = 0.0

    @property
    def per_s(self) -> float:
        """Good samples/s of the fastest call; 0 if no sample is good."""
        return 1 / self._best_s if math.isfinite(self._best_s) else 0.0

    def run(self) -> None:
        """Measure one call, and decide about the next one."""
        # Other programs may delay single calls, so the fastest counts.
        self._best_s = min(self._best_s, self._call())
        left_s, more = MEASURED_S - self.spent_s, min(GROWTH * self._count, len(self._rows))
        each_s = self._took_s / self._count
        if more > self._count and 2 * more * each_s < left_s:
            self._count = more
            self._call()  # not measured: the graph is built again
        else:
            self.is_over = left_s < self._took_s or left_s <= 0

    def _call(self) -> float:
        batch = batch_of(self._dataset, self._rows[: self._count])
        began, cpu_s = time.perf_counter(), time.process_time()
        prepared = self._engine.prepare(batch, self._out[: self._count])
        took_s, good = time.perf_counter() - began, self._count - len(prepared.bad)
        self.spent_s += took_s
        self._took_s = took_s
        if self._threads:
            took_s = (time.process_time() - cpu_s) / self._threads
        return took_s / good if good else math.inf
