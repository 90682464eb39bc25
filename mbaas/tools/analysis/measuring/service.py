"""Measurements with training steps: G, speed, stalls and CPU costs of feeds, and prep on a GPU that also trains.

G is the rate of a step on synthetic minibatches that are on its device already. A step is a function of one minibatch
as the loader yields it: a dict with ``image``, ``label`` and ``sample_id``. A function without parameters is a maker.
It is called once in the trial's process and returns the step, so that the model and the optimizer are created there.
"""

from __future__ import annotations

import inspect
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray

import mbaas
from mbaas.base import units
from mbaas.base.imports import import_named
from mbaas.client.convert import Minibatch, collating, make_converter
from mbaas.core.layout import MIN_BLOCKS_STAGED, wanted_staging
from mbaas.dataset import Dataset
from mbaas.errors import ConfigError
from mbaas.memory.budgets import default_staging
from mbaas.model.quantity import Quantity, measured
from mbaas.model.rates import GpuRates, OnGpu, Rates
from mbaas.prep.engines import workers_per_gpu
from mbaas.ray_cluster import resources
from mbaas.samples.fields import SAMPLE_ID, Field, Packed
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring.effort import Effort, repeat
from mbaas.tools.analysis.measuring.prep import ANSWER_S, PrepProcessActor, PrepWindow, Raw, decode_samples, prep_rate
from mbaas.tools.analysis.measuring.storage import ColdDataset, drop, kept_cold, local_spans, scratch
from mbaas.tools.bench.cpu import TreeWatch
from mbaas.transforms import Normalize, Pipeline
from mbaas.wire.samples import SampleSpec

Step = Callable[[Minibatch], Any]

LEAST_STEPS = 2
"""Minimum number of steps of one measurement."""


@dataclass(frozen=True)
class StepRate:
    """G at one batch size in samples/s, and CPU seconds of a sample (0 if the work is done elsewhere)."""

    batch_size: int
    rate: Quantity
    cpu_s: Quantity


@dataclass(frozen=True)
class PacedStep:
    """Stand-in for training with a stated rate: sleeps as long as a step would take."""

    per_s: float

    def __post_init__(self) -> None:
        if not self.per_s > 0:
            raise ConfigError(f"the rate of a step must be above 0 samples/s, got {self.per_s}")

    def __call__(self, batch: Minibatch) -> None:
        time.sleep(len(batch[SAMPLE_ID.name]) / self.per_s)


def load_step(path: str) -> Callable[..., Any]:
    """Import the function named by "module:function", with the working directory on the search path."""
    return import_named(path, Path.cwd(), what="the step")


def ready_step(function: Callable[..., Any]) -> Step:
    """Return the step itself from a step or its maker; call it in the process that runs the step."""
    # Parameters with defaults and *args do not mark a step: a maker may have options.
    needed = [
        p for p in inspect.signature(function).parameters.values() if p.default is p.empty and p.kind < p.VAR_POSITIONAL
    ]
    if len(needed) == 1:
        return function
    if needed:
        raise ConfigError(
            f"a step must take one minibatch, or nothing if it makes the step, got {len(needed)} parameters"
        )
    step: Step = function()
    if not callable(step):
        raise ConfigError(f"a maker of a step must return a function of a minibatch, got {type(step).__name__}")
    return step


def synthetic_batch(
    spec: SampleSpec,
    batch_size: int,
    *,
    format: str = "torch",
    device: Any = None,
    normalize: Normalize | None = None,
    has_images: bool = True,
) -> Minibatch:
    """Return a minibatch of noise on the device, in the loader's format."""
    draw = np.random.default_rng(0)
    noise = spec.made.zeros(batch_size)
    values = noise.values if isinstance(noise, Packed) else noise
    values[:] = draw.integers(0, 256, values.shape) if values.dtype == np.uint8 else draw.random(values.shape)
    known = {field.name: field.zeros(batch_size) for field in spec.known}
    arrays = {spec.made.name: noise, **known, SAMPLE_ID.name: np.arange(batch_size)}
    converter = make_converter(format, device, normalize, has_images=has_images)
    converter = collating(converter, spec, "list", has_images=has_images)
    return converter.finish(converter.start(arrays))


def step_rate(step: Step, batch: Minibatch, effort: Effort) -> StepRate:
    """Measure G on this minibatch repeatedly; each measurement waits for the device to finish."""
    size, costs, steps = len(batch[SAMPLE_ID.name]), [], LEAST_STEPS

    def rate() -> float:
        nonlocal steps
        began, cpu = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step(batch)
        _finish(batch)  # steps on a GPU return before they have run
        seconds = time.perf_counter() - began
        costs.append((time.process_time() - cpu) / (steps * size))
        found = steps * size / seconds
        steps = max(LEAST_STEPS, round(effort.window_s * found / size))
        return found

    found = repeat(rate, effort, unit="samples/s")
    return StepRate(size, found, measured(costs[1:], unit="CPU-s"))  # the first one warmed up, as in `repeat`


def _finish(batch: Minibatch) -> None:
    device = getattr(batch[SAMPLE_ID.name], "device", None)
    if getattr(device, "type", "cpu") == "cuda":
        import torch

        torch.cuda.synchronize(device)


EPOCH_S = 600.0
"""Timeout of an epoch of a measurement."""

SETTLED_EPOCHS = 4
"""Epochs without a new decoded sample after which a feed counts as settled. By then, workers have also mapped most
cached samples; a worker's first read of a sample is slower."""

MOST_WARM_UP = 16
"""Largest number of warm-up epochs while waiting for a feed to settle."""

PREP_KIND = "PrepWorker"
"""Process kind of a feed's prep workers in `TreeWatch`: the class name of their actors."""


@dataclass(frozen=True)
class EpochRun:
    """One epoch of one trial.

    ``wait_s`` is the time that the trial waited for data, according to its loader. Prep waited for bytes in the part
    ``fetch_stall_s``, and was idle in ``peer_stall_s``, because trials waited for each other.
    """

    samples: int
    seconds: float
    wait_s: float
    fetch_stall_s: float
    peer_stall_s: float


@dataclass(frozen=True)
class ServiceRun:
    """A measured run of a feed with its trials.

    Attributes:
        epochs: the epochs that count, by trial: [epoch][trial].
        cpu_s, seconds: CPU seconds of the service and the trials in these epochs, by kind of process
            (`mbaas.tools.bench.cpu.kind_of`), and their length.
        background: cores kept busy by each kind of process while trials request nothing; empty if not measured.
        decoded: share of the samples that the feed cached decoded in memory.
    """

    epochs: tuple[tuple[EpochRun, ...], ...]
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    background: Mapping[str, float] = field(default_factory=dict)
    decoded: float = 0.0

    @property
    def background_cores(self) -> float:
        return sum(self.background.values())

    @property
    def trial_per_s(self) -> float:
        """Mean samples/s of a trial, over the time of the slowest trial."""
        # Not by epoch: prefetching in one epoch shortens the next.
        trials = list(zip(*self.epochs, strict=True))
        return self.samples / len(trials) / max(sum(run.seconds for run in runs) for runs in trials)

    @property
    def samples(self) -> int:
        """Samples delivered in the epochs that count, summed over trials."""
        return sum(run.samples for runs in self.epochs for run in runs)


def merge_runs(runs: Sequence[ServiceRun]) -> ServiceRun:
    seconds = sum(run.seconds for run in runs)
    cpu_s, background = Counter[str](), Counter[str]()
    for run in runs:
        cpu_s.update(run.cpu_s)
        background.update({kind: cores * run.seconds / seconds for kind, cores in run.background.items()})
    return ServiceRun(
        tuple(epoch for run in runs for epoch in run.epochs),
        cpu_s,
        seconds,
        background,
        sum(run.decoded for run in runs) / len(runs),
    )


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A training workload: data, step and options.

    Attributes:
        step: training step of every trial, or its maker (`steps`).
        options: feed options. Measured feeds use separate folders on the disk tier's disk.
        device: device of the steps' minibatches.
        gpus_per_trial: GPUs that Ray reserves for each trial.
    """

    dataset: Dataset
    pipeline: Pipeline
    step: Callable[..., Any]
    options: FeedOptions
    device: str | None = None
    gpus_per_trial: float = 0.0

    @property
    def known(self) -> tuple[Field, ...]:
        """Dataset fields that prepared samples keep."""
        return self.pipeline.known(self.dataset.fields)


def measure_step(workload: Workload, made: Field, batch_sizes: Sequence[int], effort: Effort) -> list[StepRate]:
    """Measure G at each batch size, in a process like a trial's."""
    with training(workload, made, batch_sizes, effort) as ended:
        found: list[StepRate] = ray.get(ended, timeout=EPOCH_S)
    return found


@contextmanager
def training(
    workload: Workload, made: Field, batch_sizes: Sequence[int], effort: Effort
) -> Iterator[ray.ObjectRef[list[StepRate]]]:
    """Start measuring G at each batch size, in a process like a trial's; yield a reference to the results."""
    with _trials(workload, 1) as (trial,):
        ray.get(trial.__ray_ready__.remote(), timeout=EPOCH_S)
        spec = SampleSpec(made, workload.known)
        yield trial.synthetic.remote(spec, workload.pipeline, list(batch_sizes), effort)


def run_service(
    workload: Workload,
    *,
    sample_bytes: float,
    trials: int,
    prep_workers: int,
    cache_bytes: int | None,
    disk_bytes: int = 0,
    decoded: bool = False,
    epochs: int = 3,
    warm_up: int = 1,
    cold: bool = False,
    idle_s: float = 0.0,
) -> ServiceRun:
    """Serve the workload to a number of trials and let them train.

    Trials continue from one epoch into the next, as in a search, and staging has the same size as there. Blocks
    prepared ahead while trials stop, before the epochs that count, are used up in an extra epoch.

    Args:
        sample_bytes: size of a prepared sample.
        cache_bytes: the feed's cache; None for the feed's default.
        disk_bytes: the feed's disk tier, which requires a disk in the workload's options.
        decoded: whether the feed may cache decoded samples.
        epochs: number of epochs that count.
        warm_up: epochs before these, at least 1; they fill the cache and the disk tier. With decoded samples, warm-up
            continues until no more samples are added.
        cold: keep reads of local dataset files and of the disk tier out of the page cache.
        idle_s: time at the end without requests, for measuring background work.
    """
    name = f"analyze-{uuid.uuid4().hex[:8]}"  # another analysis may use the same cluster
    store_bytes = min(resources.store_bytes().values())
    if cold:
        drop(local_spans(workload.dataset, range(len(workload.dataset))))
    tier = workload.options.disk[0] if disk_bytes else None
    with (
        # A separate folder: the feed's would already hold samples, and these would stay there.
        scratch(tier.path) if tier is not None else nullcontext() as folder,
        kept_cold(folder) if cold and folder is not None else nullcontext(),
        mbaas.serve(
            name,
            ColdDataset.around(workload.dataset) if cold else workload.dataset,
            workload.pipeline,
            **{
                **workload.options.given(),
                "prep_workers": prep_workers,
                "cache_bytes": cache_bytes,
                "cache_decoded": decoded,
                "staging_bytes": staged_bytes(workload, sample_bytes, prep_workers, store_bytes),
                "disk": mbaas.Disk(path=str(folder), max_bytes=disk_bytes) if folder is not None else None,
                # Predictions are for a fixed number of workers, so the feed must not scale.
                "scaling": replace(workload.options.scaling, max_prep_workers=None),  # the requested number
            },
        ) as feed,
        _trials(workload, trials) as actors,
        TreeWatch() as watch,
    ):
        consumers = [f"trial-{number}" for number in range(trials)]
        mbaas.announce(feed.name, consumers)  # so that no epoch starts before all of them have joined
        ray.get([trial.join.remote(name, c) for trial, c in zip(actors, consumers, strict=True)], timeout=EPOCH_S)
        kept: list[int] = []
        while len(kept) < warm_up - 1 or (decoded and not is_settled_after(kept)):
            next(epochs_of(actors, 1))
            status = feed.status()
            kept.append(status.decoded.samples + status.decoded_on_disk.samples)
        whole = epochs_of(actors, 1 + epochs)
        next(whole)
        began = watch.cpu()
        runs = tuple(whole)
        used = began.cores_until(ended := watch.cpu())
        used.pop("host", None)  # this process drops files from the page cache and runs the watch
        background = busy_while_idle(feed, watch, idle_s) if idle_s else {}
        status = feed.status()
        ray.get([trial.leave.remote() for trial in actors], timeout=EPOCH_S)  # before the feed shuts down
    # average busy cores times seconds
    seconds = ended.at_s - began.at_s
    cpu_s = {kind: cores * seconds for kind, cores in used.items()}
    return ServiceRun(runs, cpu_s, seconds, background, status.decoded.samples / status.samples)


def is_settled_after(kept: Sequence[int]) -> bool:
    """Return whether the decoded samples have stopped growing, given their number after each epoch so far."""
    return len(kept) > MOST_WARM_UP or (len(kept) > SETTLED_EPOCHS and kept[-1] == kept[-1 - SETTLED_EPOCHS])


def staged_bytes(workload: Workload, sample_bytes: float, workers: int, store_bytes: int) -> int | None:
    """Return the staging budget of a measured feed, which may serve only a part of the workload's dataset.

    It is the budget of the workload's real feed; None for the default of `mbaas.serve`. ``sample_bytes`` is the size of
    a prepared sample, and ``store_bytes`` the size of the smallest object store.
    """
    options = workload.options
    if options.shuffle or workload.pipeline.is_random:
        return options.staging_bytes
    # Identical epochs are prepared only once if an epoch fits into staging. The part needs less room than the dataset.
    each = sample_bytes + sum(field.nbytes for field in (*workload.known, SAMPLE_ID))
    epoch = int(each * max(MIN_BLOCKS_STAGED * options.batch_size, len(workload.dataset) - 1))
    return min(options.staging_bytes or default_staging(store_bytes, wanted_staging(workers)), epoch)


def epochs_of(actors: Sequence[Any], count: int) -> Iterator[tuple[EpochRun, ...]]:
    """Run ``count`` epochs on all trials without a pause; yield each when the last trial has finished it."""
    streams = [trial.epochs.remote(count) for trial in actors]
    for number in range(count):
        _, late = ray.wait(streams, num_returns=len(streams), timeout=EPOCH_S)
        if late:
            trials = units.counted(len(late), "trial")
            raise TimeoutError(f"{trials} did not end epoch {number + 1} of {count} within {units.seconds(EPOCH_S)}")
        yield tuple(ray.get([next(stream) for stream in streams], timeout=EPOCH_S))


def busy_while_idle(feed: mbaas.Feed, watch: TreeWatch, idle_s: float) -> dict[str, float]:
    """Return the cores kept busy by each kind of process when nothing is requested and nothing is prepared."""
    deadline, before = time.monotonic() + EPOCH_S, -1
    # Prefetching continues until staging is full.
    while (made := feed.status().prepared_blocks) != before and time.monotonic() < deadline:
        before, idle = made, watch.cpu()
        time.sleep(idle_s)
        background = idle.cores_until(watch.cpu())
    background.pop("host", None)
    return background


@contextmanager
def _trials(workload: Workload, count: int) -> Iterator[list[Any]]:
    step = ray.put(workload.step)
    # One OpenMP thread each: otherwise every trial's tensors would use all cores, which they share with prep.
    options = {"num_gpus": workload.gpus_per_trial, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    made = [
        TrialActor.options(**options).remote(step, workload.options.batch_size, workload.device) for _ in range(count)
    ]
    try:
        yield made
    finally:
        for actor in made:
            ray.kill(actor)


class _Trial:
    def __init__(self, step: Callable[..., Any], batch_size: int, device: str | None) -> None:
        # A maker is called in the process that runs the step, so that the model and the optimizer are created there.
        self._step, self._batch_size, self._device = ready_step(step), batch_size, device

    def synthetic(
        self, spec: SampleSpec, pipeline: Pipeline, batch_sizes: Sequence[int], effort: Effort
    ) -> list[StepRate]:
        made = partial(synthetic_batch, spec, normalize=pipeline.normalize, has_images=pipeline.has_images)
        return [step_rate(self._step, made(size, device=self._device), effort) for size in batch_sizes]

    def join(self, feed: str, consumer: str, **options: Any) -> None:
        self._loader = mbaas.join(feed, consumer=consumer, batch_size=self._batch_size, device=self._device, **options)

    def epochs(self, count: int) -> Iterator[EpochRun]:
        """Train for ``count`` epochs without a pause; yield each when it has finished."""
        for _ in range(count):
            before, began = self._loader.report(), time.monotonic()
            for batch in self._loader:
                self._step(batch)
                del batch  # release it before the next request, as the loader does with its own references
            seconds, done = time.monotonic() - began, self._loader.report().since(before)
            yield EpochRun(done.samples, seconds, done.wait_s, done.fetch_stall_s, done.peer_stall_s)

    def leave(self) -> None:
        self._loader.close()


# No CPU is reserved: prep workers reserve one each, and a small machine would have none left for trials.
TrialActor: Any = ray.remote(num_cpus=0)(_Trial)


def gpu_rates(
    workload: Workload,
    rates: Rates,
    raw: Raw,
    kept: Raw | None,
    made: Field,
    effort: Effort,
    *,
    gpus: int,
    gpu: int | None = 0,
) -> GpuRates:
    """Measure the GPU rates of this machine on one of its GPUs. Requires Ray.

    Args:
        rates: rates measured without prep on a GPU.
        raw, kept: samples in memory, and decoded for the dali engine (None if it caches none).
        made: field of a prepared sample.
        gpus: number of GPUs.
        gpu: index of the GPU to measure; None for CPUs, to test this module.
    """
    decode, left = beside_training(workload, rates, raw, made, effort, gpu=gpu)
    resize = None if kept is None else beside_training(workload, rates, kept, made, effort, gpu=gpu)[0]
    cpu_s, decoded_cpu_s = (
        None if samples is None else prep_rate(samples, workload.pipeline, effort, workers=[1]).cpu_s.value
        for samples in (raw, decode_samples(raw, workload.pipeline))
    )
    return GpuRates(
        gpus=gpus,
        memory_bytes=None if gpu is None else left,
        decode=decode,
        resize=resize,
        cpu_s=cpu_s,
        decoded_cpu_s=decoded_cpu_s,
    )


def beside_training(
    workload: Workload, rates: Rates, raw: Raw, made: Field, effort: Effort, *, gpu: int | None
) -> tuple[OnGpu, int]:
    """Measure one worker of the dali engine while a trial trains on synthetic minibatches.

    Returns the rates of both, and the GPU memory that training leaves free, including the worker's.
    """
    seed, threads = workload.options.seed, workload.options.threads.prep
    worker = PrepProcessActor.options(num_gpus=0).remote(
        ray.put(raw), workload.pipeline, "dali", seed, made, 1.0, threads, 0, gpu
    )
    seen: list[PrepWindow] = []

    def prepare() -> None:
        asked = worker.run.remote(time.monotonic(), effort.window_s)
        seen.append(ray.get(asked, timeout=ANSWER_S + effort.window_s))

    try:
        prepare()  # builds the graph; without training, the GPU memory taken is the worker's alone
        memory_bytes: int = ray.get(worker.taken_gpu_bytes.remote(), timeout=ANSWER_S)
        with training(workload, made, [workload.options.batch_size], effort) as ended:
            while not ray.wait([ended], timeout=0)[0]:
                prepare()
            left: int = ray.get(worker.free_gpu_bytes.remote(), timeout=ANSWER_S)
            (step,) = ray.get(ended, timeout=EPOCH_S)
    finally:
        ray.kill(worker)
    # The first steps warm up, and training has ended before the end of the last window.
    beside = seen[len(seen) // 2 : -1] or seen[-1:]
    samples = sum(window.samples for window in beside)
    found = OnGpu(
        per_s=sum(window.samples / window.seconds for window in beside) / len(beside),
        # A step that shares the GPU is not faster: more is noise.
        step_per_s=min(step.rate.value, rates.step.value),
        cpu_s=sum(window.cpu_s for window in beside) / samples,
        memory_bytes=memory_bytes * workers_per_gpu(workload.pipeline),
    )
    return found, left + memory_bytes
