"""Measurement of the rates, and runs of the predicted setups on local clusters with modelled storage and networks.

Storage is the one of the ladder (`benchmarks.ladder.storage`): reads take as long as a disk of the stated rate, below a
page cache of the stated size. Networks are limited by the kernel, between nodes in namespaces of their own.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np
import ray

import mbaas
from benchmarks.ladder.metered import ANY_NODE, MeteredDataset, Sockets
from benchmarks.ladder.storage import Policy, StorageSettings, served_storage
from benchmarks.local_cluster import LocalCluster, actors_on, answers, local_cluster
from benchmarks.predictions.points import (
    BATCH,
    STEP_OVERHEAD_S,
    STEP_PER_S,
    STORAGE_BYTES_PER_S,
    Point,
    PredictionsReport,
    points,
)
from mbaas import transforms as T
from mbaas.base import units
from mbaas.client.convert import Minibatch
from mbaas.model.pace import predict
from mbaas.model.quantity import measured, stated
from mbaas.model.rates import Rates, Setup
from mbaas.ray_cluster import connection
from mbaas.samples.fields import SAMPLE_ID
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring.effort import Effort, Progress
from mbaas.tools.analysis.measuring.prep import MachineSpeed
from mbaas.tools.analysis.measuring.service import ServiceRun, TrialActor, Workload, epochs_of
from mbaas.tools.analysis.measuring.system import Survey, cores_here
from mbaas.tools.bench.report import Machine
from mbaas.tools.bench.tasks.images import SIDE, make_photos

FEED = "predictions"

STORE_BYTES = 400 << 20
STAGING_BYTES = 96 << 20
"""Object store of a local node, and staging memory of a feed there: all nodes share the memory of this machine."""

WARM_UP = 3
"""Epochs until all caches are full and the feed is as far ahead as it will be."""

PAGE_CACHE_WARM_UP = 8
"""The same, until both lists of a page cache have settled."""

RUN_S, LEAST_EPOCHS = 6.0, 3
"""Shortest measured window, in predicted seconds and in epochs."""

LIMIT_S = 300.0


@dataclass(frozen=True)
class TimedStep:
    """A training step that sleeps ``overhead_s``, and ``sample_s`` for each sample."""

    overhead_s: float
    sample_s: float

    def __call__(self, batch: Minibatch) -> None:
        time.sleep(self.overhead_s + self.sample_s * len(batch[SAMPLE_ID.name]))


def run(*, images: int, rounds: int, seed: int, cache_dir: Path, report: Callable[[str], None]) -> PredictionsReport:
    """Measure the rates once, and then run each setup ``rounds`` times, interleaved.

    Raises:
        DatasetError: photographs cannot be generated.
        ResourceError: network namespaces are not available (they need root rights).
    """
    data = mbaas.read_images(make_photos(cache_dir, images, seed=seed, report=report))
    with closing(MachineSpeed(data, _pipeline(), cores_here())) as speed:
        rates = _measure(data, seed, speed, report)
        chosen = list(points(rates))
        runs: list[list[float]] = [[] for _ in chosen]
        paces: list[list[float]] = [[] for _ in chosen]
        for number, index in product(range(rounds), range(len(chosen))):
            varied, setup = chosen[index]
            before = speed.relative()
            runs[index].append(_run(data, rates, setup, seed))
            paces[index].append((before + speed.relative()) / 2)
            point = _point(varied, setup, rates, runs[index], paces[index])
            report(
                f"round {number + 1}, {varied}: {point.as_text()}: predicted {units.count(point.predicted.value)}, "
                f"found {units.count(runs[index][-1])} samples/s, pace {point.pace:.2f}"
            )
    found = (_point(varied, setup, rates, *each) for (varied, setup), *each in zip(chosen, runs, paces, strict=True))
    return PredictionsReport(Machine(), rates, tuple(found))


def _measure(data: mbaas.Dataset, seed: int, speed: MachineSpeed, report: Callable[[str], None]) -> Rates:
    """Measure the rates as `mbaas analyze` does, with a stated step, from storage without a cache."""
    with _storage(Setup(), data, [ANY_NODE]) as sockets, connection.separate_ray(cores_here()):
        workload = Workload(
            dataset=MeteredDataset.around(data, sockets=sockets),
            pipeline=_pipeline(),
            step=_nothing,
            options=FeedOptions(batch_size=BATCH, seed=seed, engine="cpu"),
        )
        survey = Survey(workload=workload, rate_per_s=STEP_PER_S, effort=Effort())
        rates = survey.measure(Progress(survey.expected_s(), report), speed).rates
    return replace(rates, step_overhead_s=stated(STEP_OVERHEAD_S, unit="s"))


def _pipeline(number: int = 0) -> T.Pipeline:
    """Return one of several different pipelines that take the same time."""
    flip = T.RandomHorizontalFlip(0.5 - 0.01 * number)
    return T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(SIDE), flip])


def _nothing(batch: Minibatch) -> None:
    """Take no time: the rate of the step is stated."""


def _point(varied: str, setup: Setup, rates: Rates, runs: Sequence[float], paces: Sequence[float]) -> Point:
    pace = sum(paces) / len(paces)
    epoch = predict(rates.at_pace(pace), setup).steady
    found = measured(runs, unit="samples/s")
    return Point(varied, setup, epoch.trial_per_s, epoch.limit, found, pace)


@contextmanager
def _storage(setup: Setup, data: mbaas.Dataset, nodes: Sequence[str]) -> Iterator[Sockets]:
    """Run the storage of the nodes; yield the socket of each, which may be the same for all."""
    with ExitStack() as stack:
        # Sockets need short paths.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mbaas-", dir="/tmp")))
        policy: Policy = "page_cache" if setup.dram_bytes else "minio"
        settings = StorageSettings(
            bytes_per_s=STORAGE_BYTES_PER_S * setup.storage_factor,
            policy=policy,
            cache_bytes=int(setup.dram_bytes),
            sizes=tuple(data.lengths(np.arange(len(data))).tolist()),
        )
        number = 1 if setup.storage_shared else len(nodes)
        servers = [stack.enter_context(served_storage(folder, f"{index}", settings)) for index in range(number)]
        yield {node: servers[index % number] for index, node in enumerate(nodes)}


@contextmanager
def _cluster(setup: Setup) -> Iterator[tuple[str, ...]]:
    """Run Ray for a setup; yield the ids of its nodes."""
    if setup.nodes == 1:
        with connection.separate_ray(cores_here()):
            yield (str(ray.get_runtime_context().get_node_id()),)
        return
    limit = setup.network_bytes_per_s
    mbit_per_s = None if limit == float("inf") else round(limit * 8 / 1e6)
    cluster: LocalCluster
    with local_cluster(setup.nodes, store_bytes=STORE_BYTES, mbit_per_s=mbit_per_s) as cluster:
        yield cluster.node_ids


def _run(data: mbaas.Dataset, rates: Rates, setup: Setup, seed: int) -> float:
    """Run a setup; return the samples/s of each trial."""
    with ExitStack() as stack:
        nodes = stack.enter_context(_cluster(setup))
        sockets = stack.enter_context(_storage(setup, data, nodes))
        # On one node the default, as in the feeds whose costs were measured.
        options: Any = {"staging_bytes": STAGING_BYTES} if setup.nodes > 1 else {}
        stack.enter_context(
            mbaas.serve(
                FEED,
                MeteredDataset.around(data, sockets=sockets),
                _pipeline(),
                batch_size=setup.batch_of(BATCH),
                seed=seed,
                prep_workers=setup.workers_of(rates.cores) * setup.nodes,
                cache_bytes=int(setup.cache_bytes),
                cache_decoded=setup.decoded,
                engine="cpu",
                **options,
            )
        )
        return _train(stack, rates, setup, nodes)


def _train(stack: ExitStack, rates: Rates, setup: Setup, nodes: Sequence[str]) -> float:
    world = setup.nodes if setup.data_parallel else 1
    sample_s = (1 / STEP_PER_S - STEP_OVERHEAD_S / BATCH) / setup.accelerator_factor
    step = TimedStep(STEP_OVERHEAD_S / setup.accelerator_factor, world * sample_s)
    batch, steady = setup.batch_of(BATCH), predict(rates, setup).steady
    epochs = max(LEAST_EPOCHS, round(RUN_S / steady.epoch_s.value))
    # Ranks of a trial are on different nodes, and so are trials.
    ranks = list(product(range(setup.trials), range(world)))
    actors = stack.enter_context(actors_on(nodes, TrialActor, [(step, batch, None)] * len(ranks)))
    mbaas.announce(FEED, [f"trial-{trial}" for trial in range(setup.trials)])
    joining = []
    for actor, (trial, rank) in zip(actors, ranks, strict=True):
        options: dict[str, Any] = {"rank": rank, "world_size": world} if world > 1 else {}
        if setup.times_made > 1:
            options["pipeline"] = _pipeline(trial % setup.pipelines)
        joining.append(actor.join.remote(FEED, f"trial-{trial}", **options))
    answers(joining, LIMIT_S, "the trials to join")
    warm_up = PAGE_CACHE_WARM_UP if setup.dram_bytes else WARM_UP
    # Without a pause between the epochs, in which the feed would prepare ahead.
    counted = tuple(islice(epochs_of(actors, warm_up + epochs), warm_up, None))
    answers([actor.leave.remote() for actor in actors], LIMIT_S, "the trials to leave")
    return ServiceRun(counted).trial_per_s * world
