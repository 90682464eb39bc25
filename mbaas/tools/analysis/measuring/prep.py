"""Measurement of P, the prep rate without training: against workers and threads, and of decoded samples.

Samples are in memory. `MachineSpeed` compares the machine with the time when its rates were measured: it may be shared.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray

from mbaas.dataset import Dataset
from mbaas.dataset.base import bounded
from mbaas.dataset.storage.retry import PatientReader
from mbaas.errors import BadSampleError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import Quantity, measured
from mbaas.prep.decoded import DecodedRows
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.prep.probe import first_good
from mbaas.samples.fields import Arrays, Field
from mbaas.samples.order import in_share
from mbaas.tools.analysis.measuring.effort import Effort, repeat
from mbaas.transforms import Pipeline
from mbaas.wire.samples import EngineName

SUBSET_BYTES = 256 << 20
SUBSET_SAMPLES = 4096
"""Limits of the random part of the dataset that P is measured on."""

BLOCK_SAMPLES = 64
"""Samples that a worker prepares per call, into the same memory each time."""

START_S = 0.05
"""Delay before a window, so that all workers start together."""

ANSWER_S = 120.0
"""Timeout for starting a worker, and for each window in addition to its length."""


@dataclass(frozen=True)
class Raw:
    """Raw samples in memory, concatenated; prep workers read them in place.

    Attributes:
        sample_ids, uris, known: int64[n], URIs for messages, and the dataset's fields of the samples.
        content, ends: uint8[bytes], and the end offset of each sample: int64[n].
    """

    sample_ids: NDArray[np.int64]
    uris: tuple[str, ...]
    content: NDArray[np.uint8]
    ends: NDArray[np.int64]
    known: Arrays

    def rows(self) -> list[NDArray[np.uint8]]:
        starts = np.concatenate([[0], self.ends[:-1]])
        return [self.content[start:end] for start, end in zip(starts.tolist(), self.ends.tolist(), strict=True)]


@dataclass(frozen=True)
class PrepRate:
    """P and the CPU cost of a sample.

    Attributes:
        workers: samples/s against workers of one thread each.
        threads: samples/s of one worker against its threads; None if only one thread was measured.
        cpu_s: CPU seconds of a sample with a single worker.
        sample_bytes: mean size of a sample before prep.
        from_memory: whether no page was read from a disk meanwhile.
    """

    workers: MeasuredCurve
    threads: MeasuredCurve | None
    cpu_s: Quantity
    made: Field
    sample_bytes: float
    from_memory: bool


def subset(dataset: Dataset, *, samples: int = SUBSET_SAMPLES, seed: int = 0) -> Raw:
    """Read a random part of the dataset, at most ``samples``, into memory; unreadable samples are left out."""
    dataset = bounded(dataset)
    # Random, because neighbors in a listing often share a class, a camera or a size.
    order = np.random.default_rng(seed).permutation(len(dataset))[:samples]
    lengths = dataset.lengths(order)
    # at least one, whatever its size
    order = order[: max(1, int(np.searchsorted(np.cumsum(lengths), SUBSET_BYTES, side="right")))]
    reader, kept, ids, error = PatientReader(dataset.reader()), [], [], None
    for sample, length in zip(order.tolist(), dataset.lengths(order).tolist(), strict=True):
        raw = np.empty(length, np.uint8)
        try:
            reader.read_into(sample, raw)
        except BadSampleError as bad:
            error = error or bad
        else:
            kept.append(raw)
            ids.append(sample)
    if not kept:
        assert error is not None
        raise error
    uris = tuple(dataset.uri(sample) for sample in ids)
    known = dataset.values(np.array(ids))
    return Raw(np.array(ids), uris, np.concatenate(kept), np.cumsum([len(raw) for raw in kept]), known)


def prep_rate(
    raw: Raw,
    pipeline: Pipeline,
    effort: Effort,
    *,
    workers: Sequence[int],
    threads: Sequence[int] = (1,),
    engine: EngineName = "cpu",
    gpus_per_worker: float | None = None,
    gpus: int = 0,
    dali_share: float = 1.0,
    between: Callable[[], object] = lambda: None,
) -> PrepRate:
    """Measure each number of workers, and one worker with each number of threads; both ascend from 1. Requires Ray.

    Args:
        gpus_per_worker: GPUs that each worker reserves; None for dali workers that share all GPUs and reserve none.
        gpus: number of GPUs.
        dali_share: share of the samples that the dali engine prepares with DALI.
        between: called after each number of workers.
    """
    made, stored = prepared_field(raw, pipeline), ray.put(raw)  # one copy, mapped by all workers
    shared = gpus if engine == "dali" and gpus_per_worker is None else 0

    @contextmanager
    def started(count: int, threads: int = 1) -> Iterator[list[Any]]:
        start = PrepProcessActor.options(num_gpus=gpus_per_worker or 0.0).remote
        devices = [number % shared if shared else None for number in range(count)]
        actors = [
            start(stored, pipeline, engine, 0, made, dali_share, threads, number, device)
            for number, device in enumerate(devices)
        ]
        try:
            yield actors
        finally:
            for actor in actors:
                ray.kill(actor)

    found = []
    together: AbstractContextManager[list[Any]] = nullcontext([]) if effort.is_whole else started(workers[-1])
    with together as same:
        for count in workers:
            # New workers for each number, so that none has warmer caches than the others, unless that takes too long.
            with nullcontext(same[:count]) if same else started(count) as actors:
                found.append(_group_rate(actors, effort))
            between()
    for count in threads[1:]:
        with started(1, count) as actors:
            found.append(_group_rate(actors, effort))
    points = [(float(count), rate) for count, (rate, *_) in zip((*workers, *threads[1:]), found, strict=True)]
    return PrepRate(
        workers=MeasuredCurve(tuple(points[: len(workers)])),
        threads=MeasuredCurve((points[0], *points[len(workers) :])) if len(threads) > 1 else None,
        # Only of the first number, one worker: several contend for caches and memory, which P against workers shows.
        cpu_s=found[0][1],
        made=made,
        sample_bytes=len(raw.content) / len(raw.ends),
        from_memory=not any(faults for *_, faults in found),
    )


def _group_rate(actors: Sequence[Any], effort: Effort) -> tuple[Quantity, Quantity, int]:
    """Return samples/s of workers together, CPU seconds of a sample, and the number of pages read from a disk."""
    groups: list[list[PrepWindow]] = []

    def window() -> float:
        # A common start time: otherwise the first workers would run with too little contention.
        start = time.monotonic() + START_S
        asked = [actor.run.remote(start, effort.window_s) for actor in actors]
        groups.append(ray.get(asked, timeout=ANSWER_S + effort.window_s))
        # Each worker by its own seconds: one that finishes a block late has also prepared more.
        return sum(each.samples / each.seconds for each in groups[-1])

    rate = repeat(window, effort, unit="samples/s")
    counted = groups[1:]  # the first window warms up, as in `repeat`
    costs = [sum(each.cpu_s for each in group) / sum(each.samples for each in group) for group in counted]
    return rate, measured(costs, unit="CPU-s"), sum(each.faults for group in counted for each in group)


def prepared_field(raw: Raw, pipeline: Pipeline) -> Field:
    """Return the shape and dtype of a prepared sample."""
    # The shape does not depend on the engine or the seed, and this engine needs no GPU.
    engine, rows = make_engine("cpu", pipeline, seed=0), raw.rows()

    def made(number: int) -> Field:
        known = {name: column[number : number + 1] for name, column in raw.known.items()}
        return engine.field(rows[number], raw.uris[number], known)

    try:
        return first_good(made, len(rows))
    finally:
        engine.close()


@dataclass(frozen=True)
class PrepWindow:
    """A worker's window; ``faults`` are pages that were read from a disk."""

    samples: int
    seconds: float
    cpu_s: float
    faults: int


class Blocks:
    """Prepares the same samples repeatedly, from sample ``first``, a block at a time in the same memory."""

    def __init__(self, raw: Raw, engine: Engine, made: Field, *, first: int = 0) -> None:
        self._rows, self._ids, self._known = raw.rows(), raw.sample_ids, raw.known
        self._engine = engine
        self._at = first
        self._epoch = 0
        self._out = made.empty(min(BLOCK_SAMPLES, len(self._rows)))

    def prepare(self) -> int:
        """Prepare the next block; return its number of samples."""
        if self._at >= len(self._rows):
            self._at, self._epoch = 0, self._epoch + 1  # a new epoch has new random crops, as in a feed
        rows = slice(self._at, self._at + len(self._out))
        raw, known = self._rows[rows], {name: column[rows] for name, column in self._known.items()}
        self._engine.prepare(Batch(raw, self._ids[rows], self._epoch, known), self._out[: len(raw)])
        self._at = rows.stop
        return len(raw)


class PrepProcess:
    """Actor that prepares the same samples repeatedly, like a prep worker, without delivering them."""

    def __init__(
        self,
        raw: Raw,
        pipeline: Pipeline,
        engine: EngineName,
        seed: int,
        made: Field,
        dali_share: float,
        threads: int,
        number: int,
        gpu: int | None,
    ) -> None:
        # Ray shows an actor only its own GPUs, numbered from 0, but all GPUs if it reserved none.
        device = 0 if ray.get_gpu_ids() else gpu
        self._gpu = device
        self._gpu_bytes_before = self.free_gpu_bytes()
        made_by = make_engine(
            engine,
            pipeline,
            seed=seed,
            threads=threads,
            device_id=device,
            for_dali=None if dali_share == 1 else lambda sample_ids, _: in_share(sample_ids, dali_share),
        )
        # Workers start at different samples, as in a feed.
        self._blocks = Blocks(raw, made_by, made, first=number * BLOCK_SAMPLES)

    def free_gpu_bytes(self) -> int:
        """Return the free memory of the worker's GPU in bytes; 0 without a GPU."""
        if self._gpu is None:
            return 0
        import torch  # imported here because only GPU workers need it

        free, _ = torch.cuda.mem_get_info(self._gpu)
        return int(free)

    def taken_gpu_bytes(self) -> int:
        """Return the GPU bytes taken since the worker started; its own if no other process allocates meanwhile."""
        return max(0, self._gpu_bytes_before - self.free_gpu_bytes())

    def run(self, start: float, seconds: float) -> PrepWindow:
        """Prepare whole blocks for about ``seconds``, from time ``start`` of ``time.monotonic``."""
        # The clock counts from boot, so all processes of a machine share it.
        while (early := start - time.monotonic()) > 0:
            time.sleep(early)
        samples, cpu, faults = 0, time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        began = time.monotonic()
        while (elapsed := time.monotonic() - began) < seconds:
            samples += self._blocks.prepare()
        used = time.process_time() - cpu
        return PrepWindow(samples, elapsed, used, resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults)


# No CPU is reserved: up to twice as many workers as cores are measured at the same time.
PrepProcessActor: Any = ray.remote(num_cpus=0)(PrepProcess)


def decode_samples(
    raw: Raw, pipeline: Pipeline, *, engine: EngineName = "cpu", most_bytes: int = SUBSET_BYTES
) -> Raw | None:
    """Decode samples through the pipeline's deterministic prefix; return None if no sample can be cached decoded.

    Samples that cannot be prepared are left out.

    Args:
        engine: engine that continues with them; decoded samples are specific to an engine. Decoding runs on the CPU.
        most_bytes: limit for all decoded samples; the first ones that fit are taken.
    """
    out, encoded = prepared_field(raw, pipeline).empty(BLOCK_SAMPLES), raw.rows()
    decoding = make_engine(engine, pipeline, seed=0)  # decoded samples do not depend on random draws
    kept, lengths, parts, left = [], [], [], most_bytes
    try:
        for start in range(0, len(encoded), BLOCK_SAMPLES):
            block = slice(start, min(start + BLOCK_SAMPLES, len(encoded)))
            keep = DecodedRows(range(block.stop - start), left)
            known = {name: column[block] for name, column in raw.known.items()}
            decoding.prepare(Batch(encoded[block], raw.sample_ids[block], 0, known), out[: block.stop - start], keep)
            rows, sizes, packed = keep.taken()
            kept.append(start + rows)
            lengths.append(sizes)
            parts.append(packed)
            left -= len(packed)
            if not len(rows):  # none can be cached, or the limit is reached
                break
    finally:
        decoding.close()
    rows = np.concatenate(kept)
    if not len(rows):
        return None
    return Raw(
        raw.sample_ids[rows],
        tuple(raw.uris[row] for row in rows.tolist()),
        np.concatenate(parts),
        np.cumsum(np.concatenate(lengths)),
        {name: column[rows] for name, column in raw.known.items()},
    )


MOST_SAMPLES = 512
"""Largest number of samples: a small random subset could be slower than the dataset's mean."""

WARM_S = 0.2
"""Warm-up that does not count: after a pause, a core is a few percent slower."""

WINDOW_S = 1.0
"""Approximate time that counts in each measurement."""


class MachineSpeed:
    """Prepares samples from memory with the cpu engine on all cores, until it is closed.

    It uses all cores because the predicted feeds keep them busy, and one core's speed does not predict theirs. On a
    virtual machine with two cores, P with two workers was 1.6 to 2.3 times P with one (three analyses on 27 November
    2026). ``usual_per_s`` is the reference in samples/s, the first measurement until it is set.
    """

    def __init__(
        self, dataset: Dataset, pipeline: Pipeline, cores: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._clock = clock
        raw = subset(dataset, samples=MOST_SAMPLES)
        self._engine = make_engine("cpu", pipeline, seed=0, threads=cores)
        self._blocks = Blocks(raw, self._engine, prepared_field(raw, pipeline))
        self.measure()  # loads code and touches memory
        self.usual_per_s = self.measure()

    def close(self) -> None:
        self._engine.close()

    def measure(self) -> float:
        self._prepare(WARM_S)
        return self._prepare(WINDOW_S)

    def relative(self) -> float:
        """Measure relative to ``usual_per_s``."""
        return self.measure() / self.usual_per_s

    def _prepare(self, seconds: float) -> float:
        done, began = 0, self._clock()
        while self._clock() < began + seconds:
            done += self._blocks.prepare()
        return done / (self._clock() - began)
