"""Real feeds with real trials: how fast they go, what they wait for, and what it costs."""

from __future__ import annotations

import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import ray

import mbaas
from mbaas.analysis.measuring.effort import Effort
from mbaas.analysis.measuring.portion import Span, drop, local_spans
from mbaas.analysis.measuring.steps import StepRate, ready_step, step_rate, synthetic_batch
from mbaas.analysis.measuring.storage import scratch, spans_of
from mbaas.bench.cpu import TreeWatch
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

AHEAD_S = 0.5
"""In this time what is prepared ahead for trials that ask for nothing more is done."""

EPOCH_DIVISOR = 8
"""Staging holds an epoch divided by this: what is prepared ahead must not carry a trial over a whole epoch."""

PREP_KIND = "PrepWorker"
"""What `TreeWatch` calls a feed's prep workers: the name of their actors' class."""

STAGED_BATCHES = 8
"""Staging holds at least this many minibatches."""


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
    def trial_per_s(self) -> list[float]:
        """Return the samples/s of a trial, the mean of all, for each epoch."""
        # an epoch ends when the slowest trial ends: the others have as long for it
        return [sum(run.samples for run in runs) / len(runs) / max(run.seconds for run in runs) for runs in self.epochs]

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

    Args:
        sample_bytes: size of a prepared sample.
        cache_bytes: the feed's cache; None: as large as a feed makes it if nothing is said.
        disk_bytes: the feed's disk tier, which needs a disk in the workload's options.
        decoded: let the feed keep samples decoded.
        epochs: how many count.
        warm_up: epochs before these; they fill the cache and the disk tier. Where samples are kept decoded it may be
            more, until no further ones are.
        cold: drop the dataset's files, as far as they are local, and those of the disk tier from the page cache before
            every epoch.
        idle_s: for how long, at the end, nothing is asked for, to see what goes on all the same.
    """
    name = f"analyze-{uuid.uuid4().hex[:8]}"  # another analysis may run on the same cluster
    spans = local_spans(workload.dataset, range(len(workload.dataset))) if cold else []
    with (
        _own_disk(workload, disk_bytes) as disk,
        mbaas.serve(
            name,
            workload.dataset,
            workload.pipeline,
            **{
                **workload.options.given(),
                "prep_workers": prep_workers,
                "cache_bytes": cache_bytes,
                "decoded": decoded,
                "staging_bytes": workload.options.staging_bytes or _staging_bytes(workload, sample_bytes),
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
        while len(kept) < warm_up or (decoded and not is_settled_after(kept)):
            _drop(spans, disk, cold=cold)
            _epoch(actors)
            status = feed.status()
            kept.append(status.decoded.samples + status.decoded_on_disk.samples)
            share = status.decoded.samples / status.samples
        began = watch.cpu()
        runs = []
        for _ in range(epochs):
            _drop(spans, disk, cold=cold)
            runs.append(_epoch(actors))
        used = began.cores_until(ended := watch.cpu())
        used.pop("host", None)  # this process, which drops files from the page cache and watches
        background: dict[str, float] = {}
        if idle_s:
            time.sleep(AHEAD_S)
            idle = watch.cpu()
            time.sleep(idle_s)
            background = idle.cores_until(watch.cpu())
            background.pop("host", None)
        ray.get([trial.leave.remote() for trial in actors], timeout=EPOCH_S)  # before the feed ends under them
    # cores that were busy on average, times seconds
    seconds = ended.at_s - began.at_s
    cpu_s = {kind: cores * seconds for kind, cores in used.items()}
    return ServiceRun(tuple(runs), cpu_s, seconds, background, share)


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


def _drop(spans: list[Span], disk: mbaas.Disk | None, *, cold: bool) -> None:
    """Drop the dataset's files, and what the disk tier keeps, from the page cache."""
    drop(spans)
    # looked for each time: the disk tier writes new files while it fills
    if cold and disk is not None:
        drop(spans_of(Path(disk.path)))


def _staging_bytes(workload: Workload, sample_bytes: float) -> int:
    # by the samples, not by the machine's memory, as `mbaas.serve` would: the part that is run is small
    samples = max(STAGED_BATCHES * workload.options.batch_size, len(workload.dataset) // EPOCH_DIVISOR)
    return int(samples * (sample_bytes + sum(field.nbytes for field in (*workload.known, SAMPLE_ID))))


def _epoch(actors: Sequence[Any]) -> tuple[EpochRun, ...]:
    return tuple(ray.get([trial.epoch.remote() for trial in actors], timeout=EPOCH_S))


@contextmanager
def _trials(workload: Workload, count: int) -> Iterator[list[Any]]:
    step = ray.put(workload.step)
    # One OpenMP thread each: otherwise the tensors of every trial would take all cores, which they share with prep.
    options = {"num_gpus": workload.gpus_per_trial, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": "1"}}}
    made = [
        _Trial.options(**options).remote(step, workload.options.batch_size, workload.device)  # type: ignore[attr-defined]
        for _ in range(count)
    ]
    try:
        yield made
    finally:
        for actor in made:
            ray.kill(actor)


# No CPU is reserved: trials share the cores with prep, which reserves one for each worker, and on a small machine there
# would be none left for them.
@ray.remote(num_cpus=0)
class _Trial:
    """A trial: an actor that trains on a feed, one epoch at a time."""

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

    def epoch(self) -> EpochRun:
        before, began = self._loader.report(), time.monotonic()
        for batch in self._loader:
            self._step(batch)
            del batch  # let go before the next is asked for, as the loader does of its own references
        seconds, after = time.monotonic() - began, self._loader.report()
        return EpochRun(
            samples=after.samples - before.samples,
            seconds=seconds,
            wait_s=after.wait_s - before.wait_s,
            fetch_stall_s=after.fetch_stall_s - before.fetch_stall_s,
            peer_stall_s=after.peer_stall_s - before.peer_stall_s,
        )

    def leave(self) -> None:
        self._loader.close()
