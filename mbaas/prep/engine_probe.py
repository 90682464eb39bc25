"""Measures both engines on some of a feed's samples, before the feed chooses one.

It reads samples for at most `PROBE_READS_S`, and prepares them with each engine for about `MEASURED_S`: 1.5 s in total.
Loading DALI and opening the GPU is not included; each dali worker does that when it starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from mbaas.dataset import Dataset
from mbaas.errors import BadSampleError, last_line
from mbaas.model.engine_choice import WorkerRates
from mbaas.prep.engines import Engine
from mbaas.prep.probe import PROBE_READS, PROBE_READS_S, ReadSample, batch_of, read_some
from mbaas.samples.fields import Field
from mbaas.wire.samples import EngineProbe

MEASURED_S = 0.5
"""Time for each engine, in seconds. The last call may exceed it."""

TOGETHER = 64
"""Samples in a call, if the time allows it. DALI needs large batches: with one sample it is slower than a CPU."""

GROWTH = 8
"""Factor between the numbers of samples in a call: 1, 8, 64. DALI builds a new graph for each."""

assert PROBE_READS_S + 2 * MEASURED_S < 2, "the probe's cost is documented as less than 2 s"


def probe_engines(
    dataset: Dataset, cpu: Callable[[], Engine], dali: Callable[[], Engine], fetch_threads: int
) -> EngineProbe:
    """Return the rates of one worker with each engine.

    A failure of DALI, such as a GPU that is not usable, is reported in the result; it is no error.

    Args:
        cpu, dali: construct the engines as a worker of the feed has them.
        fetch_threads: number of threads that read storage.
    """
    _, samples = read_some(dataset, dataset.reader(), fetch_threads, keep=PROBE_READS)
    samples.sort(key=lambda sample: sample[0])  # threads read them in any order
    engine = cpu()
    try:
        made = _field(engine, dataset, samples)
        if made is None:
            return EngineProbe(None)
        rows = [samples[row % len(samples)] for row in range(TOGETHER)]
        cpu_per_s = _per_s(engine, dataset, rows, made)
    finally:
        engine.close()
    try:
        engine = dali()
        try:
            dali_per_s = _per_s(engine, dataset, rows, made)
        finally:
            engine.close()
    except Exception as error:  # DALI raises RuntimeError for everything, and its import may fail in any way
        return EngineProbe(None, f"{type(error).__name__}: {last_line(error)}")
    return EngineProbe(WorkerRates(cpu_per_s, dali_per_s) if cpu_per_s or dali_per_s else None)


def _field(engine: Engine, dataset: Dataset, samples: list[ReadSample]) -> Field | None:
    for sample_id, encoded in samples:
        try:
            return engine.field(encoded, dataset.uri(sample_id), batch_of(dataset, [(sample_id, encoded)]).known)
        except BadSampleError:
            continue
    return None


def _per_s(engine: Engine, dataset: Dataset, rows: list[ReadSample], made: Field) -> float:
    """Return the good samples/s of the fastest call; 0 if no sample is good."""
    out = made.empty(len(rows))

    def once(count: int) -> float:
        batch = batch_of(dataset, rows[:count])
        began = time.perf_counter()
        prepared = engine.prepare(batch, out[:count])
        took_s, good = time.perf_counter() - began, count - len(prepared.bad)
        return took_s / good if good else math.inf

    count, best_s = 1, math.inf
    once(count)  # loads code, and builds DALI's graph
    end = time.perf_counter() + MEASURED_S
    while True:
        best_s = min(best_s, once(count))
        # Other programs may delay single calls, so the fastest counts.
        left_s, more = end - time.perf_counter(), min(GROWTH * count, len(rows))
        if more > count and 2 * more * best_s < left_s:
            count = more
            once(count)  # not counted: the graph is built again
        elif left_s < count * best_s or left_s <= 0 or not math.isfinite(best_s):
            return 1 / best_s if math.isfinite(best_s) else 0.0
