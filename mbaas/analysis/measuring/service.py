"""Real feeds with real trials: how fast they go, what they wait for, and what it costs."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import ray

import mbaas
from mbaas import runtime, units
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.portion import ColdDataset, drop, local_spans
from mbaas.analysis.measuring.steps import StepRate, ready_step, step_rate, synthetic_batch
from mbaas.analysis.measuring.storage import kept_cold, scratch
from mbaas.bench.cpu import TreeWatch
from mbaas.budgets import default_staging
from mbaas.core.layout import MIN_BLOCKS_STAGED, wanted_staging
from mbaas.dataset import Dataset
from mbaas.fields import SAMPLE_ID, Field
from mbaas.messages import SampleSpec
from mbaas.settings import FeedOptions
from mbaas.transforms import Normalize, Pipeline

EPOCH_S = 600.0
"""No epoch of a measurement takes longer."""

SETTLED_EPOCHS = 4
"""Epochs in which no further sample is kept decoded, after which a feed is taken to keep all that it will, and workers
to have mapped most of it: the first time that a worker reads a sample takes longer.
"""

MOST_WARM_UP = 16
"""Epochs after which one is not waited for any more."""

PREP_KIND = "PrepWorker"
"""What `TreeWatch` calls a feed's prep workers: the name of their actors' class."""


@dataclass(frozen=True)
class EpochRun:
    """One epoch of one trial.

    Attributes:
        samples: how many the trial got.
        seconds: from its beginning to its end.
        wait_s: seconds that the trial waited for data, as its loader says.
        fetch_stall_s: the part of these in which prep waited for bytes.
        peer_stall_s: the part of them in which prep was idle because trials waited for each other.
    """

    samples: int
    seconds: float
    wait_s: float
    fetch_stall_s: float
    peer_stall_s: float


@dataclass(frozen=True)
class ServiceRun:
    """What trials saw of a feed.

    Attributes:
        epochs: the epochs that counted, of each trial: [epoch][trial].
        cpu_s: CPU seconds in these epochs, by kind of process (`mbaas.bench.cpu.kind_of`): of the service and the
            trials.
        seconds: that these took.
        background: cores that each kind kept busy while no trial asked for anything; empty if nobody looked.
        decoded: the share of the samples that the feed kept decoded in memory.
    """

    epochs: tuple[tuple[EpochRun, ...], ...]
    cpu_s: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    background: Mapping[str, float] = field(default_factory=dict)
    decoded: float = 0.0

    @property
    def background_cores(self) -> float:
        """Return the cores that all processes kept busy while no trial asked for anything."""
        return sum(self.background.values())

    @property
    def trial_per_s(self) -> float:
        """Return the samples/s of a trial: their mean, in the time of the slowest."""
        # Not of each epoch: what is prepared ahead in one makes the next one shorter.
        trials = list(zip(*self.epochs, strict=True))
        return self.samples / len(trials) / max(sum(run.seconds for run in runs) for runs in trials)

    @property
    def samples(self) -> int:
        """Return how many samples were delivered in the epochs that counted, summed over trials."""
        return sum(run.samples for runs in self.epochs for run in runs)


def pooled(runs: Sequence[ServiceRun]) -> ServiceRun:
    """Join several runs of the same workload."""
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
    """What trials train on, and how.

    Attributes:
        dataset, pipeline: what a feed serves.
        step: the training step of every trial, or its maker (`steps`).
        options: those of the feed. Feeds keep samples of the disk tier in folders of their own there.
        device: where steps want their minibatches.
        gpus_per_trial: GPUs that Ray gives each trial.
    """

    dataset: Dataset
    pipeline: Pipeline
    step: Callable[..., Any]
    options: FeedOptions
    device: str | None = None
    gpus_per_trial: float = 0.0

    @property
    def known(self) -> tuple[Field, ...]:
        """What prepared samples have of the dataset's fields."""
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
    """Begin to measure G at each batch size, in a process like a trial's; give what it will have measured."""
    with _trials(workload, 1) as (trial,):
        ray.get(trial.__ray_ready__.remote(), timeout=EPOCH_S)
        yield trial.synthetic.remote(
            SampleSpec(made, workload.known),
            list(batch_sizes),
            effort,
            normalize=workload.pipeline.normalize,
            has_images=workload.pipeline.has_images,
        )


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
    """Serve the workload to a number of trials, and let them train.

    They go from one epoch into the next, as they would in a search, and staging is as large as it would be there.
    What is prepared ahead while they stop, before the epochs that count, is used up in one that does not.

    Args:
        sample_bytes: size of a prepared sample.
        cache_bytes: the feed's cache; None: as large as a feed makes it if nothing is said.
        disk_bytes: the feed's disk tier, which needs a disk in the workload's options.
        decoded: let the feed keep samples decoded.
        epochs: how many count.
        warm_up: epochs before these, at least 1; they fill the cache and the disk tier. Where samples are kept decoded
            there are more, until no further ones are.
        cold: keep what is read of the dataset's files, as far as they are local, and of the disk tier's out of the page
            cache.
        idle_s: for how long, at the end, nothing is asked for, to see what goes on all the same.
    """
    name = f"analyze-{uuid.uuid4().hex[:8]}"  # another analysis may run on the same cluster
    store_bytes = min(runtime.store_bytes().values())
    if cold:
        drop(local_spans(workload.dataset, range(len(workload.dataset))))
    with (
        _own_disk(workload, disk_bytes) as disk,
        kept_cold(disk.path) if cold and disk is not None else nullcontext(),
        mbaas.serve(
            name,
            ColdDataset.around(workload.dataset) if cold else workload.dataset,
            workload.pipeline,
            **{
                **workload.options.given(),
                "prep_workers": prep_workers,
                "cache_bytes": cache_bytes,
                "decoded": decoded,
                "staging_bytes": staged_bytes(workload, sample_bytes, prep_workers, store_bytes),
                "disk": disk,
                # predictions are for a number of workers, so a feed that starts or ends some would be another one
                "scaling": replace(workload.options.scaling, max_prep_workers=None),  # as many as are asked for
            },
        ) as feed,
        _trials(workload, trials) as actors,
        TreeWatch() as watch,
    ):
        consumers = [f"trial-{number}" for number in range(trials)]
        feed.announce(consumers)  # so that no epoch begins before all of them are there
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
        used.pop("host", None)  # this process, which drops files from the page cache and watches
        background = busy_while_idle(feed, watch, idle_s) if idle_s else {}
        status = feed.status()
        ray.get([trial.leave.remote() for trial in actors], timeout=EPOCH_S)  # before the feed ends under them
    # cores that were busy on average, times seconds
    seconds = ended.at_s - began.at_s
    cpu_s = {kind: cores * seconds for kind, cores in used.items()}
    return ServiceRun(runs, cpu_s, seconds, background, status.decoded.samples / status.samples)


def is_settled_after(kept: Sequence[int]) -> bool:
    """Tell whether no further samples are kept decoded, by how many there were after each epoch so far."""
    return len(kept) > MOST_WARM_UP or (len(kept) > SETTLED_EPOCHS and kept[-1] == kept[-1 - SETTLED_EPOCHS])


@contextmanager
def _own_disk(workload: Workload, disk_bytes: int) -> Iterator[mbaas.Disk | None]:
    """Make a disk tier that begins empty and is gone afterwards."""
    if not disk_bytes:
        yield None
        return
    assert workload.options.disk is not None
    # not the feed's own folder: what a feed kept there would be found, and what it keeps would stay
    with scratch(workload.options.disk.path) as folder:
        yield mbaas.Disk(path=str(folder), max_bytes=disk_bytes)


def staged_bytes(workload: Workload, sample_bytes: float, workers: int, store_bytes: int) -> int | None:
    """Return the staging memory of a feed that stands for the workload's, of which it may serve only a part.

    Args:
        sample_bytes: size of a prepared sample.
        workers: prep workers of the feed.
        store_bytes: of the smallest object store.

    Returns:
        What the workload's own feed would have; None: what `mbaas.serve` gives it.
    """
    options = workload.options
    if options.shuffle or workload.pipeline.is_random:
        return options.staging_bytes
    # Epochs that are all the same are prepared once if there is room for one, and the part that is run needs less room.
    each = sample_bytes + sum(field.nbytes for field in (*workload.known, SAMPLE_ID))
    epoch = int(each * max(MIN_BLOCKS_STAGED * options.batch_size, len(workload.dataset) - 1))
    return min(options.staging_bytes or default_staging(store_bytes, wanted_staging(workers)), epoch)


def epochs_of(actors: Sequence[Any], count: int) -> Iterator[tuple[EpochRun, ...]]:
    """Have all trials go through so many epochs without a pause; give each when the last of them has ended it.

    Raises:
        TimeoutError: an epoch took longer than `EPOCH_S`.
    """
    streams = [trial.epochs.remote(count) for trial in actors]
    for number in range(count):
        _, late = ray.wait(streams, num_returns=len(streams), timeout=EPOCH_S)
        if late:
            trials = units.counted(len(late), "trial")
            raise TimeoutError(f"{trials} did not end epoch {number + 1} of {count} within {units.seconds(EPOCH_S)}")
        yield tuple(ray.get([next(stream) for stream in streams], timeout=EPOCH_S))


def busy_while_idle(feed: mbaas.Feed, watch: TreeWatch, idle_s: float) -> dict[str, float]:
    """Find the cores that each kind of process keeps busy when nobody asks for anything and nothing is prepared."""
    deadline, before = time.monotonic() + EPOCH_S, -1
    # what is prepared ahead is made first: that ends when staging is full
    while (made := feed.status().prepared_blocks) != before and time.monotonic() < deadline:
        before, idle = made, watch.cpu()
        time.sleep(idle_s)
        background = idle.cores_until(watch.cpu())
    background.pop("host", None)
    return background


@contextmanager
def _trials(workload: Workload, count: int) -> Iterator[list[Any]]:
    step = ray.put(workload.step)
    # One OpenMP thread each: otherwise the tensors of every trial would take all cores, which they share with prep.
    options = {"num_gpus": workload.gpus_per_trial, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    made = [
        _TrialActor.options(**options).remote(step, workload.options.batch_size, workload.device) for _ in range(count)
    ]
    try:
        yield made
    finally:
        for actor in made:
            ray.kill(actor)


class _Trial:
    """A trial: an actor that trains on a feed."""

    def __init__(self, step: Callable[..., Any], batch_size: int, device: str | None) -> None:
        # a maker is called here, in the process where the step runs, so that the model and the optimizer live there
        self._step, self._batch_size, self._device = ready_step(step), batch_size, device

    def synthetic(
        self,
        spec: SampleSpec,
        batch_sizes: Sequence[int],
        effort: Effort,
        *,
        normalize: Normalize | None,
        has_images: bool,
    ) -> list[StepRate]:
        batches = (
            synthetic_batch(spec, size, device=self._device, normalize=normalize, has_images=has_images)
            for size in batch_sizes
        )
        return [step_rate(self._step, batch, effort) for batch in batches]

    def join(self, feed: str, consumer: str) -> None:
        self._loader = mbaas.join(feed, consumer=consumer, batch_size=self._batch_size, device=self._device)

    def epochs(self, count: int) -> Iterator[EpochRun]:
        """Train for so many epochs, one right after the other; tell of each when it has ended."""
        for _ in range(count):
            before, began = self._loader.report(), time.monotonic()
            for batch in self._loader:
                self._step(batch)
                del batch  # let go before the next is asked for, as the loader does of its own references
            seconds, after = time.monotonic() - began, self._loader.report()
            yield EpochRun(
                samples=after.samples - before.samples,
                seconds=seconds,
                wait_s=after.wait_s - before.wait_s,
                fetch_stall_s=after.fetch_stall_s - before.fetch_stall_s,
                peer_stall_s=after.peer_stall_s - before.peer_stall_s,
            )

    def leave(self) -> None:
        self._loader.close()


# No CPU is reserved: each prep worker reserves one, and on a small machine none would be left for trials.
_TrialActor: Any = ray.remote(num_cpus=0)(_Trial)
