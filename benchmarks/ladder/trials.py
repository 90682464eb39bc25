"""Trials: sources of minibatches, the training loop, and processes that run it.

Importing this module imports torch, as a real trial does, whatever its source.
"""

from __future__ import annotations

import contextlib
import multiprocessing as mp
import os
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import ray
from numpy.typing import NDArray

import mbaas
from benchmarks.ladder.cells import Step, Workload
from benchmarks.ladder.metered import MeteredMinibatches
from benchmarks.local_cluster import LocalCluster, actors_on, answers
from mbaas.errors import MbaasError
from mbaas.tools.bench.host import TrialFailure, kill_tree, received, touch
from mbaas.tools.bench.rows import Epoch, Minibatch
from mbaas.tools.bench.rows.dataloader import EpochIndices, loader_of
from mbaas.tools.bench.tasks.base import Data
from mbaas.tools.bench.tasks.images import Images

FEED = "ladder"

LOADER_STEPS: tuple[Step, ...] = ("dataloader", "minio")
FEED_STEPS: tuple[Step, ...] = ("fetch", "prep-page-cache", "prep", "decoded")

TRIALS_S = 1800.0
"""Time limit for the epochs of all trials together."""

STOP_S = 30.0
"""Time that a trial may take to leave before it is killed."""

EpochCounts = NDArray[np.int64]
"""Deliveries of each sample in each epoch: [epochs, samples]."""


@dataclass(frozen=True)
class TrialSpec:
    """Everything that the process of a trial, or of one of its ranks, needs; picklable.

    Attributes:
        step: source of its minibatches.
        workload: sizes and rates.
        folder: the photographs.
        socket: path of its node's storage; "" for a feed, which reads itself.
        workers: worker processes of its DataLoader.
        ray_address: the cluster of its feed; "" if the process is already connected.
        trial: its number; with "fetch", its pipeline has the same.
        rank, world_size: in a data-parallel trial.
    """

    step: Step
    workload: Workload
    folder: Path
    socket: str = ""
    workers: int = 1
    ray_address: str = ""
    trial: int = 0
    rank: int = 0
    world_size: int = 1

    @property
    def consumer(self) -> str:
        return f"trial-{self.trial}"

    @property
    def seed(self) -> int:
        """Seed of the trial's own order and transforms, if it has a DataLoader."""
        return self.workload.seed + 1000 * self.trial

    @property
    def pipeline(self) -> mbaas.Pipeline | None:
        """The trial's own pipeline with "fetch"; None: the feed's."""
        return Images().pipeline(self.trial) if self.step == "fetch" else None


def faults(counts: EpochCounts) -> tuple[int, int]:
    """Return the samples that were absent from an epoch, and the deliveries after the first, summed over epochs."""
    return int((counts == 0).sum()), int(np.maximum(counts - 1, 0).sum())


class Training:
    """A training loop whose step takes as long as its samples at `Workload.samples_per_s`."""

    def __init__(self, epoch: Epoch, workload: Workload) -> None:
        self._epoch, self._workload = epoch, workload

    def run(self, epochs: int) -> EpochCounts:
        """Train, and return the deliveries."""
        counts = np.zeros((epochs, self._workload.images), np.int64)
        for row in counts:
            for values, sample_ids in self._epoch():
                for array in values:
                    touch(array)
                np.add.at(row, sample_ids, 1)  # not `+= 1`, which would count a repeated id once
                step_s = len(sample_ids) / self._workload.samples_per_s
                del values, sample_ids  # holding a minibatch while taking the next one occupies staging
                time.sleep(step_s)
        return counts


def local_source(spec: TrialSpec, epoch: int = 0) -> Epoch:
    """Return the minibatches of a trial without a feed: of its DataLoader, or only their ids. Begins at ``epoch``."""
    order = EpochIndices(spec.workload.images, spec.seed, rank=spec.rank, world_size=spec.world_size, epoch=epoch)
    batch = spec.workload.batch // spec.world_size
    if spec.step == "compute":
        return lambda: _ids_of(order, batch)
    task = Images()
    minibatches = MeteredMinibatches(
        task.samples(Data(spec.folder)), task, task.pipeline(), spec.seed, socket=spec.socket
    )
    source = loader_of(minibatches, order, batch=batch, workers=spec.workers)

    def made() -> Iterator[Minibatch]:
        for images, sample_ids, _ in source:
            yield [images.numpy()], sample_ids.numpy()

    return made


def _ids_of(order: EpochIndices, batch: int) -> Iterator[Minibatch]:
    ids = np.array(list(order)) % order.samples
    for start in range(0, len(ids), batch):
        yield [], ids[start : start + batch]


def feed_source(loader: mbaas.Loader) -> Epoch:
    """Return the minibatches of a feed."""

    def delivered() -> Iterator[Minibatch]:
        for batch in loader:
            values, sample_ids = [batch["image"]], batch["sample_id"]
            del batch
            yield values, sample_ids
            del values, sample_ids

    return delivered


@contextmanager
def source(spec: TrialSpec) -> Iterator[Epoch]:
    """Open the source of a trial's minibatches."""
    if spec.step not in FEED_STEPS:
        yield local_source(spec)
        return
    if spec.ray_address:
        os.environ["RAY_ADDRESS"] = spec.ray_address
    ranks: Any = {"rank": spec.rank, "world_size": spec.world_size} if spec.world_size > 1 else {}
    with mbaas.join(FEED, spec.consumer, format="numpy", pipeline=spec.pipeline, **ranks) as loader:
        yield feed_source(loader)


class Trials(Protocol):
    """Concurrent trials, or the ranks of one."""

    def train(self, epochs: int) -> list[EpochCounts]:
        """Train all for this many epochs, beginning together; return the deliveries of each process."""


# ---- as processes ----


@contextmanager
def processes(specs: Sequence[TrialSpec]) -> Iterator[Trials]:
    """Run each spec in its own process."""
    context = mp.get_context("spawn")  # forking a process with threads, such as a Ray driver, may hang
    connections, children = [], []
    try:
        for spec in specs:
            ours, theirs = context.Pipe()
            children.append(context.Process(target=_run_trial, args=(spec, theirs)))
            children[-1].start()
            theirs.close()  # so that the trial's end closes the connection
            connections.append(ours)
        trials = _ProcessTrials(connections)
        trials.answers()  # each has its source
        yield trials
        for connection in connections:
            connection.send(0)
        for child in children:
            child.join(STOP_S)
    finally:
        for child in children:
            if child.pid is not None:
                kill_tree(child.pid)
                child.join()


class _ProcessTrials:
    def __init__(self, connections: Sequence[Connection[Any, Any]]) -> None:
        self._connections = connections

    def train(self, epochs: int) -> list[EpochCounts]:
        for connection in self._connections:
            connection.send(epochs)
        return self.answers()

    def answers(self) -> list[Any]:
        """Return one answer of each trial, in order.

        Raises:
            RuntimeError: a trial failed, or its process ended.
            MbaasError: a trial took too long.
        """
        found, end = dict[Any, Any](), time.monotonic() + TRIALS_S
        while len(found) < len(self._connections):
            awaited = [each for each in self._connections if each not in found]
            ready_ones = wait(awaited, max(0.0, end - time.monotonic()))
            if not ready_ones:
                raise MbaasError(f"{len(awaited)} of {len(self._connections)} trials took longer than {TRIALS_S:g} s")
            found.update((ready, received(ready)) for ready in ready_ones)
        return [found[connection] for connection in self._connections]


def _run_trial(spec: TrialSpec, parent: Connection[Any, Any]) -> None:
    try:
        with source(spec) as epoch:
            training = Training(epoch, spec.workload)
            parent.send(None)
            with contextlib.suppress(EOFError):
                while epochs := parent.recv():
                    parent.send(training.run(epochs))
    except Exception:  # from any library: without a message, the parent would wait
        parent.send(TrialFailure(traceback.format_exc()))
    finally:
        if spec.ray_address:
            ray.shutdown()


# ---- as actors, on several nodes ----


@ray.remote(num_cpus=0)
class _RankActor:
    def __init__(self, spec: TrialSpec) -> None:
        self._source = source(spec)
        self._training = Training(self._source.__enter__(), spec.workload)

    def train(self, epochs: int) -> EpochCounts:
        return self._training.run(epochs)

    def close(self) -> None:
        self._source.__exit__(None, None, None)


class _ActorTrials:
    def __init__(self, actors: Sequence[Any]) -> None:
        self._actors = actors

    def train(self, epochs: int) -> list[EpochCounts]:
        return answers([actor.train.remote(epochs) for actor in self._actors], TRIALS_S, "the epochs of the ranks")


@contextmanager
def ranks(spec: TrialSpec, cluster: LocalCluster) -> Iterator[Trials]:
    """Run the ranks of a data-parallel trial, one on each node of the connected cluster."""
    world_size = len(cluster.node_ids)
    specs = [(replace(spec, rank=rank, world_size=world_size),) for rank in range(world_size)]
    with actors_on(cluster.node_ids, _RankActor, specs) as actors:
        yield _ActorTrials(actors)
        answers([actor.close.remote() for actor in actors], TRIALS_S, "the ranks to leave")
