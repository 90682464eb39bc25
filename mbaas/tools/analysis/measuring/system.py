"""Measurement of this machine's `Rates` for a workload, from all single measurements."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from mbaas.base import units
from mbaas.model.curves import MeasuredCurve, blended_rate
from mbaas.model.quantity import Quantity, measured, spanning, stated
from mbaas.model.rates import FREE, INSTANT, GpuRates, Rates, step_overhead
from mbaas.prep.engines import possible_engines, workers_per_gpu
from mbaas.tools.analysis.measuring import service
from mbaas.tools.analysis.measuring.effort import Effort, Progress, SavedStages
from mbaas.tools.analysis.measuring.prep import MachineSpeed, PrepRate, Raw, decode_samples, prep_rate, subset
from mbaas.tools.analysis.measuring.service import StepRate
from mbaas.tools.analysis.measuring.storage import (
    DROP_S,
    READERS,
    DiskRate,
    StorageRate,
    disk_rate,
    memory_rate,
    portion,
    storage_rate,
)
from mbaas.wire.samples import EngineName

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
class Measurements:
    """Measurements of the parts of the system, each in isolation.

    Attributes:
        rates: G, P, S, C and costs.
        prep_threads: P of one worker against its threads; None if only one thread was measured.
        notes: doubts about the figures, one sentence each.
        was_stopped: whether the user stopped the analysis when only the costs were missing (`NO_COSTS`).
    """

    rates: Rates
    prep_threads: MeasuredCurve | None
    notes: tuple[str, ...]
    was_stopped: bool = False


def cores_here() -> int:
    """Return the number of CPUs available to this process; a container may have fewer than the machine."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class Survey:
    """A measurement of this machine for a workload.

    Attributes:
        rate_per_s: stated G in samples/s; None to measure the workload's step.
        cores: cores available to prep.
        gpus: number of GPUs available to prep.
        saved: receives the result of each stage, and provides those of an interrupted analysis.
    """

    workload: service.Workload
    rate_per_s: float | None = None
    cores: int = field(default_factory=cores_here)
    gpus: int = 0
    effort: Effort = field(default_factory=Effort)
    saved: SavedStages = field(default_factory=SavedStages)

    @property
    def engine(self) -> EngineName:
        """The engine that P describes: that of a feed, or DALI if a feed may choose, to compare it with the CPUs."""
        return possible_engines(self.workload.options.engine, self.workload.pipeline, gpus=self.gpus)[-1]

    @property
    def crosses_to_gpu(self) -> bool:
        """Return whether samples may cross to a GPU at several stages, and a measurable step shows the cost of each."""
        is_possible = self.gpus > 0 and self.engine == "dali" and self.workload.pipeline.has_images
        return self.rate_per_s is None and is_possible

    @property
    def workers(self) -> int:
        """The number of prep workers of a feed on this machine: one per core, or as many as share its GPUs."""
        options = self.workload.options
        if not self.gpus or options.gpus_per_worker == 0 or self.engine != "dali":
            return self.cores
        # By default, a feed has one worker per GPU if workers reserve parts of GPUs.
        each = workers_per_gpu(self.workload.pipeline) if options.gpus_per_worker is None else 1
        return min(self.cores, self.gpus * each)

    @property
    def worker_counts(self) -> list[int]:
        """The numbers of workers to measure."""
        if not self.effort.is_whole:
            return sorted({1, self.workers})
        # Powers of two show where contention begins. Twice the workers show whether more would still help.
        return sorted({self.workers, 2 * self.workers, *(2**k for k in range(self.workers.bit_length()))})

    @property
    def thread_counts(self) -> list[int]:
        return sorted({1, 2, self.cores}) if self.effort.is_whole else [1]

    @property
    def reader_counts(self) -> Sequence[int]:
        return READERS if self.effort.is_whole else READERS[::2]

    def expected_s(self) -> dict[str, float]:
        """Return the approximate seconds of each phase of `measure`, in order; skipped phases take 0."""
        each_s, is_whole, counts = self.effort.budget_s, self.effort.is_whole, self.worker_counts
        start_s = each_s + (PROCESS_S if is_whole else 0.0)  # otherwise the same workers measure all numbers
        return {
            "storage": (DROP_S + each_s) * len(self.reader_counts),
            "memory": each_s / 2,
            "subset": 4.0 if is_whole else 1.0,
            "prep": start_s * (len(counts) + len(self.thread_counts) - 1) + PROCESS_S,
            "decoded": start_s * len(counts) + PROCESS_S,
            "disk": each_s if self.workload.options.disk else 0.0,
            "step": PROCESS_S + 2 * each_s if self.rate_per_s is None else 0.0,
            "gpu": 5 * each_s + 2 * FEED_S if is_whole and self.crosses_to_gpu else 0.0,
            "costs": 5 * ROUNDS * (FEED_S + IDLE_S + (EPOCHS + 2) * EPOCH_S) if is_whole else 0.0,
        }

    def measure(self, progress: Progress, speed: MachineSpeed | None) -> Measurements:
        """Measure G, P, S and C, and the costs of a feed. Requires Ray.

        If a KeyboardInterrupt arrives when only the costs are missing, the results suffice for predictions. They are
        returned with a note on the missing part.

        Args:
            speed: measures the machine's speed during prep, which becomes its usual speed, and between feeds. None if
                no feed is run, because the effort is not whole.
        """
        workload, effort, counts = self.workload, self.effort, self.worker_counts
        dataset, pipeline, options = workload.dataset, workload.pipeline, workload.options
        speeds: list[float] = []

        @cache
        def raw() -> Raw:
            progress.begin("subset", "reading a part of the dataset into memory")
            return subset(dataset, seed=options.seed)

        @cache
        def kept() -> Raw | None:
            return decode_samples(raw(), pipeline, engine=self.engine)

        def observe_speed() -> None:
            if speed is not None:
                speeds.append(speed.measure())

        def prepared(samples: Raw, threads: Sequence[int] = (1,)) -> PrepRate:
            return prep_rate(
                samples,
                pipeline,
                effort,
                workers=counts,
                threads=threads,
                engine=self.engine,
                gpus_per_worker=options.gpus_per_worker,
                gpus=self.gpus,
                dali_share=options.dali_share if self.engine == "dali" else 1.0,
                between=observe_speed,
            )

        def measure_decoded() -> PrepRate | None:
            samples = kept()
            return None if samples is None else prepared(samples)

        progress.begin("storage", f"S: random reads from cold storage with 1 to {self.reader_counts[-1]} readers")
        storage = self.saved.result(
            "storage", StorageRate, lambda: storage_rate(dataset, effort, readers=self.reader_counts, seed=options.seed)
        )
        progress.found(f"S: {_best(storage.curve, 'reader')}")
        progress.begin("memory", "C: memory")
        sample_bytes = dataset.total_bytes / len(dataset)
        memory = self.saved.result("memory", Quantity, lambda: memory_rate(round(sample_bytes), effort))
        progress.found(f"C: {units.rate(memory.value)}")
        if "prep" not in self.saved.stages:
            raw()
        observe_speed()
        progress.begin("prep", f"P: prep with 1 to {counts[-1]} workers, data in memory")
        prep = self.saved.result("prep", PrepRate, lambda: prepared(raw(), self.thread_counts))
        progress.found(f"P: {_best(prep.workers, 'prep worker')}")
        progress.begin("decoded", "P of decoded samples: the same, with samples that are decoded")
        decoded = self.saved.result("decoded", PrepRate | None, measure_decoded)
        if decoded is not None:
            progress.found(f"P of decoded samples: {_best(decoded.workers, 'prep worker')}")
        if speed is not None:
            speed.usual_per_s = self.saved.result("speed", float, lambda: sum(speeds) / len(speeds))
        disk = None
        if options.disk:
            path = options.disk[0].path
            progress.begin("disk", "the first disk of the disk tier: random reads of what it keeps, cold")
            disk = self.saved.result("disk", DiskRate, lambda: disk_rate(raw(), path, effort))
            progress.found(f"disk: {units.rate(disk.rate.value)}")
        crosses = effort.is_whole and self.crosses_to_gpu
        if not crosses:
            raw.cache_clear()  # up to 256 MB each, which a trial may need
            kept.cache_clear()
        steps: list[StepRate] = []
        if self.rate_per_s is None:
            progress.begin("step", "G: the training step on synthetic minibatches")
            # Two sizes, because only their difference shows the fixed part of a step.
            sizes = sorted({max(1, options.batch_size // 2), options.batch_size})
            steps = self.saved.result(
                "step", list[StepRate], lambda: service.measure_step(workload, prep.made, sizes, effort)
            )
            progress.found(f"G: {units.number(steps[-1].rate.value)} samples/s")
        rates = Rates(
            samples=len(dataset),
            sample_bytes=sample_bytes,
            pixel_bytes=float(prep.made.nbytes),
            cores=self.cores,
            batch_size=options.batch_size,
            step=steps[-1].rate if self.rate_per_s is None else stated(self.rate_per_s, unit="samples/s"),
            prep=prep.workers,
            storage=storage.curve,
            cache=memory,
            disk=disk.rate if disk is not None else None,
            decoded_bytes=decoded.sample_bytes if decoded is not None else None,
            decoded_prep=decoded.workers if decoded is not None else None,
            decoded_cpu_s=decoded.cpu_s if decoded is not None else None,
            prep_cpu_s=prep.cpu_s,
            read_cpu_s=storage.cpu_s,
            step_cpu_s=steps[-1].cpu_s if steps else FREE,
            step_overhead_s=(
                step_overhead([(step.batch_size, step.rate) for step in steps]) if len(steps) > 1 else INSTANT
            ),
        )
        notes, was_stopped = _notes(prep, storage, disk), False
        try:
            if crosses:
                progress.begin("gpu", "a worker and a training step side by side on a GPU, and the cpu engine")
                on_gpu = self.saved.result(
                    "gpu",
                    GpuRates,
                    lambda: service.gpu_rates(workload, rates, raw(), kept(), prep.made, effort, gpus=self.gpus),
                )
                assert on_gpu.decode is not None
                made, trained = (f"{units.number(each)}/s" for each in (on_gpu.decode.per_s, on_gpu.decode.step_per_s))
                progress.found(f"beside each other: {made} prepared, {trained} trained")
                raw.cache_clear()
                kept.cache_clear()
                rates = replace(rates, on_gpu=on_gpu)
            if speed is not None:
                trials = (
                    "trials that do nothing, on one worker, on all, four of them, with nothing decoded, with no cache"
                )
                progress.begin("costs", f"costs of a feed and of a trial: {trials}")
                rates = self.saved.result("costs", Rates, lambda: with_costs(rates, workload, self.workers, speed))
            else:
                notes = (*notes, QUICK_COSTS)
        except KeyboardInterrupt:  # all rates are there, so the predictions are worth having
            notes, was_stopped = (*notes, NO_COSTS), True
        return Measurements(rates=rates, prep_threads=prep.threads, notes=notes, was_stopped=was_stopped)


def _best(curve: MeasuredCurve, thing: str) -> str:
    count, rate = curve.fastest
    return f"{units.number(rate.value)} samples/s with {units.counted(int(count), thing)}"


def with_costs(rates: Rates, workload: service.Workload, workers: int, speed: MachineSpeed) -> Rates:
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
    costs. The remaining feed gives the cost of encoded samples. ``speed`` converts the costs to the speed of the
    other rates.
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
    rounds: list[dict[str, service.ServiceRun]] = []
    paces = [speed.relative()]
    # Whole rounds, so that a busy minute affects all feeds equally, whose costs are compared.
    for _ in range(ROUNDS):
        rounds.append({})
        for name, feed in feeds.items():
            rounds[-1][name] = _idle_feed(rates, workload, **feed)
            paces.append(speed.relative())
    return costs_of(rates, rounds, pace=sum(paces) / len(paces))


def costs_of(rates: Rates, rounds: Sequence[Mapping[str, service.ServiceRun]], *, pace: float) -> Rates:
    """Return ``rates`` with the costs of samples from rounds of the feeds in `with_costs`, by name.

    ``pace`` is the speed of the machine relative to the measurement of ``rates``.
    """
    runs = {name: service.merge_runs([found[name] for found in rounds]) for name in rounds[0]}
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
        serving_s=serving_seconds(alone_per_s, measured(served, unit="samples/s").scaled(1 / pace)),
        read_cpu_s=stated(max(rates.read_cpu_s.value, miss_s), unit="CPU-s"),
        delivery_cpu_s=stated(delivery_s, unit="CPU-s"),
        # A constant load costs less per sample the more samples there are, so it is a number of cores.
        background_cores=measured([found["one"].background_cores for found in rounds], unit="cores"),
        staging_cpu_s=stated(max(0.0, one_s - delivery_s), unit="CPU-s"),
    )


def serving_seconds(alone_per_s: float, served: Quantity) -> Quantity:
    """Return the extra seconds of a sample in a feed: 1 / served - 1 / alone, at least 0.

    The interval comes from ``served`` alone; predictions add it to P's interval.
    """
    ends = (1 / rate - 1 / alone_per_s for rate in (served.value, served.low, served.high))
    return spanning(*(max(0.0, end) for end in ends), unit="s")


def _idle_feed(
    rates: Rates,
    workload: service.Workload,
    *,
    prep_workers: int,
    trials: int = 1,
    decoded: bool = True,
    cached: bool = True,
) -> service.ServiceRun:
    """Run a feed whose trials do nothing, with all data in memory, or cold in storage."""
    part = trained_on(workload, rates, prep_workers=prep_workers)
    decoded = decoded and rates.decoded_prep is not None
    cache_bytes = part.dataset.total_bytes if cached else 0
    return service.run_service(
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


def trained_on(workload: service.Workload, rates: Rates, *, prep_workers: int) -> service.Workload:
    """Return the workload with a part of the dataset that ``prep_workers`` prepare in about `EPOCH_S`."""
    samples = max(LEAST_SAMPLES, round(rates.prep.rate(prep_workers) * EPOCH_S))
    return replace(workload, dataset=portion(workload.dataset, samples=samples, seed=workload.options.seed))


def cost_s(run: service.ServiceRun, trials: int, *, of_prep: bool) -> float:
    """Return the CPU seconds of a prepared sample, without the constant load, of prep workers or of all others."""
    kinds = [kind for kind in run.cpu_s if (kind == service.PREP_KIND) == of_prep]
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
