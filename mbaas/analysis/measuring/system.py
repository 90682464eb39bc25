"""Measurement of this machine's `Rates` for a workload, from all single measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mbaas import units
from mbaas.analysis.measuring.decoded import decoded
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.gpu import gpu_rates
from mbaas.analysis.measuring.pace import Pace
from mbaas.analysis.measuring.portion import portion
from mbaas.analysis.measuring.prep import PrepRate, prep_rate, subset
from mbaas.analysis.measuring.progress import Progress
from mbaas.analysis.measuring.service import PREP_KIND, ServiceRun, Workload, measure_step, pooled, run_service
from mbaas.analysis.measuring.so_far import Points, SoFar
from mbaas.analysis.measuring.steps import StepRate
from mbaas.analysis.measuring.storage import (
    DROP_S,
    READERS,
    DiskRate,
    StorageRate,
    disk_rate,
    memory_rate,
    storage_rate,
)
from mbaas.model.curves import MeasuredCurve, blended_rate
from mbaas.model.quantity import Quantity, measured, spanning, stated
from mbaas.model.rates import FREE, INSTANT, Rates, step_overhead
from mbaas.prep.engines import resolve_engine, workers_per_gpu

EPOCH_S = 2.0
"""Feeds run on a part of the dataset that all cores prepare in about this time."""

LEAST_SAMPLES = 256
"""Smallest part of the dataset for a feed."""

IDLE_S = 2.0
"""Observation time of an idle feed's processes."""

EPOCHS = 4
"""Epochs of a feed that count."""

DECODED_EPOCHS = 12
"""The same with decoded samples, whose epochs are much shorter."""

LEAST_DECODED = 0.5
"""Smallest decoded share of a feed that determines the cost of decoded samples."""

TRIALS = 4
"""Number of trials in the feed with several: more give a more accurate cost per trial."""

FEED_S = 6.0
"""Approximate time to start and stop a feed and its trials."""

PROCESS_S = 3.0
"""Approximate start time of workers without a feed."""

ROUNDS = 2
"""Runs of each feed, interleaved with the others, because the speed of a shared machine varies."""

_TAKEN_AS_NOTHING = "predictions take serving to cost nothing, and may be too fast"

NO_COSTS = f"the analysis was stopped before the costs of a feed and a trial were measured: {_TAKEN_AS_NOTHING}"
QUICK_COSTS = f"a quick analysis does not measure the costs of a feed and a trial: {_TAKEN_AS_NOTHING}"
"""Notes in place of the costs."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """All measurements of the parts of the system, each in isolation.

    Attributes:
        rates: G, P, S, C and costs.
        prep, storage: P and S in detail.
        steps: G at each batch size; empty if it was stated.
        notes: doubts about the figures, one sentence each.
        was_stopped: whether the user stopped the analysis when only the costs were missing (`NO_COSTS`).
    """

    rates: Rates
    prep: PrepRate
    storage: StorageRate
    steps: tuple[StepRate, ...]
    notes: tuple[str, ...]
    was_stopped: bool = False


def cores_here() -> int:
    """Return the number of CPUs available to this process; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0))


def measure(
    workload: Workload,
    *,
    rate_per_s: float | None = None,
    cores: int | None = None,
    readers: Sequence[int] | None = None,
    gpus: int = 0,
    effort: Effort | None = None,
    progress: Progress,
    pace: Pace | None,
    so_far: SoFar | None = None,
) -> Measured:
    """Measure G, P, S and C, and the costs of a feed. Requires Ray.

    If a KeyboardInterrupt arrives when only the costs are missing, the results suffice for predictions. They are
    returned with a note on the missing part.

    Args:
        rate_per_s: stated G in samples/s; None to measure the workload's step.
        cores: cores available to prep; None for all cores of this process.
        readers: numbers of readers for S; None for the effort's defaults.
        gpus: number of GPUs available to prep.
        pace: measures the machine's speed during prep, which becomes its usual pace, and between feeds. None if no feed
            is run, because the effort is not whole.
        so_far: receives every rate as soon as it is measured.

    Raises:
        KeyboardInterrupt: the user stopped it earlier.
    """
    effort, cores = effort or Effort(), cores or cores_here()
    dataset, pipeline = workload.dataset, workload.pipeline
    workers = workers_here(workload, cores=cores, gpus=gpus)
    counts, threads = _worker_counts(workers, effort), _thread_counts(cores, effort)
    readers = _reader_counts(effort) if readers is None else readers
    if so_far is None:
        so_far = begun(workload, effort, rate_per_s=rate_per_s, cores=cores, gpus=gpus, readers=readers)
    # The engine that a feed would choose, because P describes a feed.
    engine = resolve_engine(workload.options.engine, pipeline, gpus=gpus)
    progress.begin("storage", f"S: random reads from cold storage with 1 to {readers[-1]} readers")
    storage = storage_rate(
        dataset,
        effort,
        readers=readers,
        seed=workload.options.seed,
        found=lambda *point: so_far.storage.append(point),
    )
    progress.found(f"S: {_best(storage.curve, 'reader')}")
    progress.begin("memory", "C: memory")
    cache = so_far.cache = memory_rate(round(so_far.sample_bytes), effort)
    progress.found(f"C: {units.rate(cache.value)}")
    progress.begin("subset", "reading a part of the dataset into memory")
    raw = subset(dataset, seed=workload.options.seed)
    looks = [pace.look()] if pace is not None else []

    def found(points: Points, *point: Any) -> None:
        points.append(point)
        if pace is not None:
            looks.append(pace.look())

    progress.begin("prep", f"P: prep with 1 to {counts[-1]} workers, data in memory")
    prep = prep_rate(
        raw,
        pipeline,
        effort,
        workers=counts,
        threads=threads,
        engine=engine,
        gpus_per_worker=workload.options.gpus_per_worker,
        gpus=gpus,
        dali_share=workload.options.dali_share if engine == "dali" else 1.0,
        found=lambda *point: found(so_far.prep, *point),
    )
    so_far.pixel_bytes = float(prep.made.nbytes)
    progress.found(f"P: {_best(prep.workers, 'prep worker')}")
    progress.begin("decoded", "P of decoded samples: the same, with samples that are decoded")
    kept = decoded(raw, pipeline, engine=engine, seed=workload.options.seed)
    of_kept = None
    so_far.has_decoded = kept is not None
    if kept is not None:
        so_far.decoded_bytes = float(len(kept.content) / len(kept.ends))
        of_kept = prep_rate(
            kept,
            pipeline,
            effort,
            workers=counts,
            engine=engine,
            gpus_per_worker=workload.options.gpus_per_worker,
            gpus=gpus,
            dali_share=workload.options.dali_share if engine == "dali" else 1.0,
            found=lambda *point: found(so_far.decoded_prep, *point),
        )
        progress.found(f"P of decoded samples: {_best(of_kept.workers, 'prep worker')}")
    if pace is not None:
        pace.usual_per_s = sum(looks) / len(looks)
    disk = None
    if workload.options.disk is not None:
        progress.begin("disk", "the disk tier's disk: random reads of what it keeps, cold")
        disk = disk_rate(raw, workload.options.disk.path, effort)
        so_far.disk = disk.rate
        progress.found(f"disk: {units.rate(disk.rate.value)}")
    if not crosses_to_gpu(workload, rate_per_s, gpus):
        del raw, kept  # up to 256 MB each, which a trial may need
    steps: list[StepRate] = []
    if rate_per_s is None:
        progress.begin("step", "G: the training step on synthetic minibatches")
        # Two sizes, because only their difference shows the fixed part of a step.
        sizes = sorted({max(1, workload.options.batch_size // 2), workload.options.batch_size})
        steps = measure_step(workload, prep.made, sizes, effort)
        so_far.step = steps[-1].rate  # sizes ascend, so the last one is the workload's
        progress.found(f"G: {units.number(so_far.step.value)} samples/s")
    assert so_far.step is not None, "G is stated where it is not measured"
    rates = Rates(
        samples=so_far.samples,
        sample_bytes=so_far.sample_bytes,
        pixel_bytes=so_far.pixel_bytes,
        cores=cores,
        batch_size=workload.options.batch_size,
        step=so_far.step,
        prep=prep.workers,
        storage=storage.curve,
        cache=cache,
        disk=disk.rate if disk is not None else None,
        decoded_bytes=so_far.decoded_bytes,
        decoded_prep=of_kept.workers if of_kept is not None else None,
        decoded_cpu_s=of_kept.cpu_s if of_kept is not None else None,
        prep_cpu_s=prep.cpu_s,
        read_cpu_s=storage.cpu_s,
        step_cpu_s=steps[-1].cpu_s if steps else FREE,
        step_overhead_s=(
            step_overhead([(step.batch_size, step.rate) for step in steps]) if len(steps) > 1 else INSTANT
        ),
    )
    trials = "trials that do nothing, on one worker, on all, four of them, with nothing decoded, with no cache"
    notes, was_stopped = _notes(prep, storage, disk), False
    try:
        if effort.is_whole and crosses_to_gpu(workload, rate_per_s, gpus):
            progress.begin("gpu", "a worker and a training step side by side on a GPU, and the cpu engine")
            on_gpu = gpu_rates(workload, rates, raw, kept, prep.made, effort, gpus=gpus)
            rates = replace(rates, on_gpu=on_gpu)
            assert on_gpu.decode is not None
            made, trained = (f"{units.number(each)}/s" for each in (on_gpu.decode.per_s, on_gpu.decode.step_per_s))
            progress.found(f"beside each other: {made} prepared, {trained} trained")
            del raw, kept
        if pace is not None:
            progress.begin("costs", f"costs of a feed and of a trial: {trials}")
            rates = with_costs(rates, workload, workers, pace)
        else:
            notes = (*notes, QUICK_COSTS)
    except KeyboardInterrupt:  # all rates are there, so the predictions are worth having
        notes, was_stopped = (*notes, NO_COSTS), True
    return Measured(rates=rates, prep=prep, storage=storage, steps=tuple(steps), notes=notes, was_stopped=was_stopped)


def crosses_to_gpu(workload: Workload, rate_per_s: float | None, gpus: int) -> bool:
    """Return whether samples may cross to a GPU at several stages and a measurable step shows the cost of each."""
    asked, pipeline = workload.options.engine, workload.pipeline
    return (
        rate_per_s is None and pipeline.has_images and resolve_engine(asked, pipeline, gpus=gpus) == "dali" and gpus > 0
    )


def workers_here(workload: Workload, *, cores: int, gpus: int) -> int:
    """Return the number of prep workers of a feed on this machine: one per core, or as many as share its GPUs."""
    options, pipeline = workload.options, workload.pipeline
    if not gpus or options.gpus_per_worker == 0 or resolve_engine(options.engine, pipeline, gpus=gpus) != "dali":
        return cores
    # By default, a feed has one worker per GPU if workers reserve parts of GPUs.
    return min(cores, gpus * (workers_per_gpu(pipeline) if options.gpus_per_worker is None else 1))


def begun(
    workload: Workload,
    effort: Effort | None = None,
    *,
    rate_per_s: float | None,
    cores: int,
    gpus: int = 0,
    readers: Sequence[int] | None = None,
) -> SoFar:
    """Return the state of `measure` before the first measurement, as its ``so_far``."""
    effort = effort or Effort()
    counts = _worker_counts(workers_here(workload, cores=cores, gpus=gpus), effort)
    readers = _reader_counts(effort) if readers is None else readers
    return SoFar.of(workload, cores=cores, readers=readers, workers=counts, rate_per_s=rate_per_s)


def expected_s(
    workload: Workload,
    effort: Effort,
    *,
    cores: int,
    rate_per_s: float | None,
    gpus: int,
) -> dict[str, float]:
    """Return the approximate seconds of each phase of `measure`, in order; skipped phases take 0."""
    each_s, crosses = effort.budget_s, effort.is_whole and crosses_to_gpu(workload, rate_per_s, gpus)
    counts = _worker_counts(workers_here(workload, cores=cores, gpus=gpus), effort)
    start_s = each_s + (PROCESS_S if effort.is_whole else 0.0)  # otherwise the same workers measure all numbers
    has_disk = workload.options.disk is not None
    return {
        "storage": (DROP_S + each_s) * len(_reader_counts(effort)),
        "memory": each_s / 2,
        "subset": 4.0 if effort.is_whole else 1.0,
        "prep": start_s * (len(counts) + len(_thread_counts(cores, effort)) - 1) + PROCESS_S,
        "decoded": start_s * len(counts) + PROCESS_S,
        "disk": each_s if has_disk else 0.0,
        "step": PROCESS_S + 2 * each_s if rate_per_s is None else 0.0,
        "gpu": 5 * each_s + 2 * FEED_S if crosses else 0.0,
        "costs": 5 * ROUNDS * (FEED_S + IDLE_S + (EPOCHS + 2) * EPOCH_S) if effort.is_whole else 0.0,
    }


def _best(curve: MeasuredCurve, thing: str) -> str:
    count, rate = max(curve.points, key=lambda point: point[1].value)
    return f"{units.number(rate.value)} samples/s with {units.counted(int(count), thing)}"


def _reader_counts(effort: Effort) -> Sequence[int]:
    return READERS if effort.is_whole else READERS[::2]


def _worker_counts(workers: int, effort: Effort) -> list[int]:
    """Return the numbers of workers to measure, given the ``workers`` of a feed."""
    if not effort.is_whole:
        return sorted({1, workers})
    # Powers of two show where contention begins. Twice the workers show whether more would still help.
    return sorted({workers, 2 * workers, *(2**k for k in range(workers.bit_length()))})


def _thread_counts(cores: int, effort: Effort) -> list[int]:
    return sorted({1, 2, cores}) if effort.is_whole else [1]


def with_costs(rates: Rates, workload: Workload, workers: int, pace: Pace) -> Rates:
    """Replace the isolated costs of a sample by its costs in feeds, whose trials do nothing.

    All costs come from feeds that keep every core busy. There each cost is higher than in isolation, because cores
    share caches, memory and power. CPU time is attributed to prep workers and others by process.

    - A feed of T trials delivers each prepared sample T times. Comparing one trial with `TRIALS` separates delivery
      from staging.
    - With data in memory, a single worker waits only for its own CPU. Its slowdown relative to isolation is the cost of
      serving.
    - A feed without caches gives the cost of a sample that has to be read. It exceeds reading alone, because the sample
      also travels to the worker through shared memory. If storage is slower than prep, cores would mostly idle, which
      costs CPU time too; the cost of reading alone is used then.

    If samples can be cached decoded, all feeds but one do so: the less time prep takes, the more accurate the other
    costs. The remaining feed gives the cost of encoded samples. ``pace`` converts the costs to the speed of the other
    rates.
    """
    feeds: dict[str, dict[str, Any]] = {
        "few": {"prep_workers": 1},
        "one": {"prep_workers": workers},
        "many": {"prep_workers": workers, "trials": TRIALS},
        "encoded": {"prep_workers": workers, "decoded": False},
    }
    if rates.decoded_prep is None:
        del feeds["encoded"]  # the feed with one trial covers this case
    if rates.storage.best_rate(rates.storage.most) > rates.prep.rate(workers):
        feeds["cold"] = {"prep_workers": workers, "decoded": False, "cached": False}
    rounds: list[dict[str, ServiceRun]] = []
    paces = [pace.now()]
    # Whole rounds, so that a busy minute affects all feeds equally, whose costs are compared.
    for _ in range(ROUNDS):
        rounds.append({})
        for name, feed in feeds.items():
            rounds[-1][name] = _idle_feed(rates, workload, **feed)
            paces.append(pace.now())
    return costs_of(rates, rounds, pace=sum(paces) / len(paces))


def costs_of(rates: Rates, rounds: Sequence[Mapping[str, ServiceRun]], *, pace: float) -> Rates:
    """Return ``rates`` with the costs of samples from rounds of the feeds in `with_costs`, by name.

    ``pace`` is the speed of the machine relative to the measurement of ``rates``.
    """
    runs = {name: pooled([found[name] for found in rounds]) for name in rounds[0]}
    encoded = "encoded" if "encoded" in runs else "one"
    made_s = [cost_s(found[encoded], 1, of_prep=True) * pace for found in rounds]
    decoded_cpu_s = rates.decoded_cpu_s
    if (share := runs["one"].decoded) >= LEAST_DECODED:
        mixed_s = [cost_s(found["one"], 1, of_prep=True) * pace for found in rounds]
        of_decoded = [max(0.0, (both - (1 - share) * one) / share) for both, one in zip(mixed_s, made_s, strict=True)]
        decoded_cpu_s = measured(of_decoded, unit="CPU-s")
    # Differences of noisy costs may be negative; the cost is then negligible.
    one_s = cost_s(runs["one"], 1, of_prep=False) * pace
    delivery_s = max(0.0, cost_s(runs["many"], TRIALS, of_prep=False) * pace - one_s) / (TRIALS - 1)
    miss_s = 0.0
    if "cold" in runs:
        cold, cached = (sum(cost_s(runs[n], 1, of_prep=of) for of in (True, False)) for n in ("cold", encoded))
        miss_s = (cold - cached) * pace
    alone_per_s = rates.prep.rate(1)
    if rates.decoded_prep is not None:
        alone_per_s = blended_rate(alone_per_s, rates.decoded_prep.rate(1), runs["few"].decoded)
    served = [found["few"].trial_per_s for found in rounds]
    return replace(
        rates,
        prep_cpu_s=measured(made_s, unit="CPU-s"),
        decoded_cpu_s=decoded_cpu_s,
        serving_s=slower_s(alone_per_s, measured(served, unit="samples/s").scaled(1 / pace)),
        read_cpu_s=stated(max(rates.read_cpu_s.value, miss_s), unit="CPU-s"),
        delivery_cpu_s=stated(delivery_s, unit="CPU-s"),
        # A constant load costs less per sample the more samples there are, so it is a number of cores.
        background_cores=measured([found["one"].background_cores for found in rounds], unit="cores"),
        staging_cpu_s=stated(max(0.0, one_s - delivery_s), unit="CPU-s"),
    )


def slower_s(alone_per_s: float, served: Quantity) -> Quantity:
    """Return the extra seconds of a sample in a feed: 1 / served - 1 / alone, at least 0.

    The interval comes from ``served`` alone; predictions add it to P's interval.
    """
    ends = (1 / rate - 1 / alone_per_s for rate in (served.value, served.low, served.high))
    return spanning(*(max(0.0, end) for end in ends), unit="s")


def _idle_feed(
    rates: Rates,
    workload: Workload,
    *,
    prep_workers: int,
    trials: int = 1,
    decoded: bool = True,
    cached: bool = True,
) -> ServiceRun:
    """Run a feed whose trials do nothing, with all data in memory, or cold in storage."""
    part = trained_on(workload, rates, prep_workers=prep_workers)
    decoded = decoded and rates.decoded_prep is not None
    cache_bytes = part.dataset.total_bytes if cached else 0
    return run_service(
        replace(part, step=_nothing),
        sample_bytes=rates.pixel_bytes,
        trials=trials,
        prep_workers=prep_workers,
        # for decoded samples, as many as this machine has room for
        cache_bytes=None if decoded else cache_bytes,
        decoded=decoded,
        epochs=DECODED_EPOCHS if decoded else EPOCHS,
        warm_up=2,
        cold=not cached,
        idle_s=IDLE_S,
    )


def trained_on(workload: Workload, rates: Rates, *, prep_workers: int) -> Workload:
    """Return the workload with a part of the dataset that ``prep_workers`` prepare in about `EPOCH_S`."""
    samples = max(LEAST_SAMPLES, round(rates.prep.rate(prep_workers) * EPOCH_S))
    return replace(workload, dataset=portion(workload.dataset, samples=samples, seed=workload.options.seed))


def cost_s(run: ServiceRun, trials: int, *, of_prep: bool) -> float:
    """Return the CPU seconds of a prepared sample, without the constant load, of prep workers or of all others."""
    kinds = [kind for kind in run.cpu_s if (kind == PREP_KIND) == of_prep]
    used_s = sum(run.cpu_s[kind] - run.background.get(kind, 0.0) * run.seconds for kind in kinds)
    # Each trial takes every sample, so a sample prepared once is delivered ``trials`` times.
    return max(0.0, used_s) * trials / run.samples


def _nothing(batch: Any) -> None:
    """Discard a minibatch."""


def _notes(prep: PrepRate, storage: StorageRate, disk: DiskRate | None) -> tuple[str, ...]:
    notes = [] if prep.from_memory else ["pages were read from a disk while prep was measured: P may be too low"]
    if prep.workers.fit.r_squared < 0.8:  # below this, the lines are hardly better than the mean (`Fit`)
        r_squared = units.number(prep.workers.fit.r_squared)
        notes.append(f"P against workers fits three straight lines badly (R^2 {r_squared})")
    doubts = (storage.note, disk.note if disk is not None else None)
    return (*notes, *(note for note in doubts if note))
