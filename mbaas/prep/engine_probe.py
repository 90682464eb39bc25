"""Measures both engines on some of a feed's samples, before the feed chooses one.

It reads samples for at most `PROBE_READS_S`, and prepares them with each engine for about `MEASURED_S`: 1.5 s in total.
Loading DALI and opening the GPU is not included; each dali worker does that when it starts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import ExitStack

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
