"""Small real feeds on local nodes: for the costs of the model, and for checking it.

The check runs three cases that the calibration does not use.
"""

from __future__ import annotations

import itertools
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import psutil
import ray
from numpy.typing import NDArray

import mbaas
from benchmarks import ID_BYTES
from benchmarks.local_cluster import LocalCluster, actors_on, answers, local_cluster
from benchmarks.scale.model import simulate
from benchmarks.scale.system import Costs, System
from benchmarks.throttled import throttled
from mbaas.base.units import counted
from mbaas.calls import socket as local_socket
from mbaas.client.join import JoinOptions
from mbaas.core.layout import MIN_BLOCKS_IN_BUDGET
from mbaas.dataset import Dataset, synthetic
from mbaas.errors import FeedGoneError
from mbaas.loader import Loader
from mbaas.ray_cluster import actor_names
from mbaas.tools.bench.cpu import TreeWatch
from mbaas.tools.bench.rows import usable_cores
from mbaas.transforms import DecodeImage, Map, Pipeline
from mbaas.wire.consumers import ConsumerName

SIDE = 72
"""Pixels per side: a part of 8 samples exceeds 100 kB, the least size that Ray puts into the object store."""

SAMPLE_BYTES = SIDE * SIDE * 3
BLOCKS_AN_EPOCH = 64
STORE_BYTES = 300 << 20

ANSWER_S = 60.0
"""Timeout in seconds for answers of trials."""

WARM_S = 1.5
"""Seconds of training before the measurement."""

WARM_APART_S = 15.0
"""Warm-up with a relay actor: it starts only after two looks have shown that it pays."""

SLEEP_S = 0.01
"""Seconds of `slowly` for a sample: long compared with the delays on a busy machine."""


def slowly(image: NDArray[np.uint8], _: np.random.Generator) -> NDArray[np.uint8]:
    """Take `SLEEP_S` for a sample without using a core, as if prep ran on another machine."""
    time.sleep(SLEEP_S)
    return image


@dataclass(frozen=True, kw_only=True)
class FeedRun:
    """A feed to run: nodes with a prep worker each, and trials that are spread over them.

    Attributes:
        nodes, trials: their numbers.
        block_samples: samples in a block, and in a minibatch.
        block_step_s: seconds that a trial sleeps for each block.
        slow_prep: whether prep takes `SLEEP_S` a sample.
        storage_bytes_per_s: storage bandwidth of a node, without caching; None: cached samples and fast storage.
        are_relayed: whether trials may call over a socket; otherwise through Ray, as a single trial on a node does.
        is_apart: whether all trials are on a separate node where the feed prepares nothing.
        seconds: length of the measurement, after a warm-up.
    """

    nodes: int
    trials: int
    block_samples: int = 32
    block_step_s: float = 0.0
    slow_prep: bool = False
    storage_bytes_per_s: float | None = None
    are_relayed: bool = False
    is_apart: bool = False
    seconds: float = 3.0


@dataclass(frozen=True)
class Watched:
    """Measurements of a running feed.

    Attributes:
        run: the feed.
        seconds: length of the measurement.
        parts: number of prepared parts.
        blocks: number of blocks that trials took, summed over trials.
        blocks_per_s: rate of a trial, mean over trials, measured between ends of blocks.
        calls: number of the trials' calls for blocks through Ray.
        cpu_s: kind of process (see `mbaas.tools.bench.cpu.kind_of`) -> CPU seconds.
        raw_bytes: bytes of a raw sample.
        others_cores: mean number of cores used by other programs of this machine.
    """

    run: FeedRun
    seconds: float
    parts: int
    blocks: int
    blocks_per_s: float
    calls: int
    cpu_s: dict[str, float]
    raw_bytes: float
    others_cores: float

    @property
    def samples_per_s(self) -> float:
        """Mean samples/s of a trial."""
        return self.blocks_per_s * self.run.block_samples

    def cpu_of(self, *kinds: str) -> float:
        """Return the CPU seconds of all processes of some kinds."""
        return sum(self.cpu_s.get(kind, 0.0) for kind in kinds)


class _CountingHandle:
    """A coordinator's handle that counts calls for blocks."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self.calls = 0

    def __getattr__(self, name: str) -> Any:
        self.calls += name == "ask"
        return getattr(self._actor, name)


def _nobody(error: FeedGoneError) -> None:
    """Raise at once: a measurement does not wait for a feed restart."""
    raise error


@ray.remote(num_cpus=0)  # the only CPU of a node belongs to the prep worker
class WatchedTrial:
    """A trial that counts its blocks and calls."""

    def __init__(self, feed: str, consumer: str, run: FeedRun) -> None:
        if not run.are_relayed:
            patch.object(local_socket, "connect", side_effect=OSError).start()
        self._handle = _CountingHandle(actor_names.find_coordinator(feed))
        self._loader = Loader(
            self._handle,
            ConsumerName(consumer),
            find=_nobody,
            again=lambda state, pipeline: mbaas.join(feed, consumer, state=state, pipeline=pipeline),
            options=JoinOptions(format="numpy", wait_timeout_s=ANSWER_S),
        )
        self._batches: Iterator[Any] = itertools.chain.from_iterable(self._loader for _ in itertools.count())
        self._block_step_s = run.block_step_s

    def ready(self) -> None:
        """Return once the trial has joined."""

    def train(self, seconds: float) -> tuple[int, int, float]:
        """Train for some time; return the blocks taken, the calls made, and the seconds."""
        began, calls_before, blocks = time.monotonic(), self._handle.calls, 0
        while time.monotonic() < began + seconds:
            batch = next(self._batches)
            del batch
            if self._block_step_s:
                time.sleep(self._block_step_s)
            blocks += 1
        return blocks, self._handle.calls - calls_before, time.monotonic() - began


def watch(run: FeedRun, cluster: LocalCluster) -> Watched:
    """Run a feed on a cluster of one-CPU nodes, and measure it.

    Raises:
        MbaasError: the feed makes no progress.
    """
    options = _feed(run, cluster)
    with mbaas.serve(f"scale-{os.getpid()}", **options) as feed:
        where = [node.node for node in feed.status().nodes]  # nodes of the feed, perhaps not all nodes of the cluster
        if run.is_apart:
            where = [node for node in cluster.node_ids if node not in where][:1]
        names = [f"trial-{index}" for index in range(run.trials)]
        mbaas.announce(feed.name, names)  # all begin with the same epoch and share it
        with actors_on(where, WatchedTrial, [(feed.name, name, run) for name in names]) as trials:
            answers([trial.ready.remote() for trial in trials], ANSWER_S, "the trials to join")
            warm_s = WARM_APART_S if run.is_apart else WARM_S
            answers([trial.train.remote(warm_s) for trial in trials], ANSWER_S, "the trials to warm up")
            reader = TreeWatch()
            parts, before, all_before = feed.status().prepared_blocks, reader.cpu(), _busy_s()
            taken = answers([trial.train.remote(run.seconds) for trial in trials], ANSWER_S, "the trials to train")
            after, all_after = reader.cpu(), _busy_s()
            parts = feed.status().prepared_blocks - parts
    seconds = after.at_s - before.at_s
    cores = before.cores_until(after)
    return Watched(
        run=run,
        seconds=seconds,
        parts=parts,
        blocks=sum(blocks for blocks, _, _ in taken),
        blocks_per_s=sum(blocks / elapsed_s for blocks, _, elapsed_s in taken) / len(taken),
        calls=sum(calls for _, calls, _ in taken),
        cpu_s={kind: busy * seconds for kind, busy in cores.items()},
        raw_bytes=options["dataset"].total_bytes / len(options["dataset"]),
        others_cores=max(0.0, (all_after - all_before) / seconds - sum(cores.values())),
    )


def _busy_s() -> float:
    """Return the CPU seconds of all programs of this machine since boot."""
    times = psutil.cpu_times()
    return float(times.user + times.nice + times.system)


def _feed(run: FeedRun, cluster: LocalCluster) -> dict[str, Any]:
    """Return arguments of `mbaas.serve`: a block is one minibatch, because it is at most an eighth of the budget."""
    data: Dataset = synthetic(BLOCKS_AN_EPOCH * run.block_samples, height=SIDE, width=SIDE)
    cache_bytes = data.total_bytes
    if run.storage_bytes_per_s is not None:
        log = Path(tempfile.mkdtemp(dir=cluster.folder)) / "reads"
        data, cache_bytes = throttled(data, bytes_per_s=run.storage_bytes_per_s, log=log), 0
    steps = [DecodeImage(), Map(slowly)] if run.slow_prep else [DecodeImage()]
    return {
        "dataset": data,
        "pipeline": Pipeline(steps),
        "batch_size": run.block_samples,
        "prep_workers": run.nodes,
        "staging_bytes": MIN_BLOCKS_IN_BUDGET * run.block_samples * (SAMPLE_BYTES + ID_BYTES),
        "cache_bytes": cache_bytes,
        "engine": "cpu",
    }


@ray.remote(num_cpus=0)
class _Holder:
    """An actor that makes arrays on its node, and pulls arrays of other nodes."""

    def make(self, nbytes: int) -> NDArray[np.uint8]:
        return np.ones(nbytes, np.uint8)

    def pull(self, refs: list[Any]) -> float:
        began = time.perf_counter()
        ray.get(refs)
        return time.perf_counter() - began


def pull_s(cluster: LocalCluster, *, nbytes: int = 120_000, repeats: int = 20) -> float:
    """Return the median seconds to pull small arrays from all other nodes to a node."""
    with actors_on(cluster.node_ids, _Holder, [()] * len(cluster.node_ids)) as holders:
        times = []
        for _ in range(repeats):
            refs = [holder.make.remote(nbytes) for holder in holders[1:]]
            # made, but not pulled to this node: the pull is measured
            ray.wait(refs, num_returns=len(refs), timeout=ANSWER_S, fetch_local=False)
            times += answers([holders[0].pull.remote(refs)], ANSWER_S, "arrays of other nodes")
        return float(np.median(times))


# ---- the model against real feeds ----

STORAGE_BYTES_PER_S = 2e6
SECONDS = 5.0
"""Bandwidth of a node where storage is the bottleneck, and length of each measurement."""

TRIES = 3
QUIET_CORES = 0.3
"""A run is repeated if other programs used more cores than this; the least disturbed of `TRIES` counts."""


def cases(nodes: int) -> dict[str, FeedRun]:
    """Return the feeds for a number of nodes, by their bottleneck.

    Bottlenecks are prep (a trial on each node), storage (without caching), or the cores of this machine (small blocks,
    no other waits).
    """
    return {
        "prep": FeedRun(nodes=nodes, trials=nodes, block_samples=64, slow_prep=True, seconds=SECONDS),
        "storage": FeedRun(
            nodes=nodes, trials=1, block_samples=64, storage_bytes_per_s=STORAGE_BYTES_PER_S, seconds=SECONDS
        ),
        "cores": FeedRun(nodes=nodes, trials=3, block_samples=48, seconds=SECONDS),
    }


@dataclass(frozen=True)
class Checked:
    """One case on a number of nodes.

    Attributes:
        case: the intended bottleneck.
        nodes: number of nodes.
        real_samples_per_s, said_samples_per_s: rate of each trial, measured and modelled.
        full: the bottleneck of the model.
        others_cores: cores used by other programs meanwhile, an input of the model.
    """

    case: str
    nodes: int
    real_samples_per_s: float
    said_samples_per_s: float
    full: str
    others_cores: float

    @property
    def error(self) -> float:
        """Relative error of the model: above 0 if it is too fast."""
        return self.said_samples_per_s / self.real_samples_per_s - 1


def check(costs: Costs, nodes: Sequence[int], report: Callable[[str], None] = print) -> tuple[Checked, ...]:
    """Run every case on each number of nodes, and in the model."""
    found = []
    with local_cluster(max(nodes), store_bytes=STORE_BYTES) as cluster:
        for number in nodes:
            for case, run in cases(number).items():
                seen = _quiet_watch(run, cluster)
                flow = simulate(system_of(seen, costs), costs, blocks=100)
                found.append(
                    Checked(case, number, seen.samples_per_s, flow.samples_per_s, flow.full, seen.others_cores)
                )
                report(_described(found[-1]))
    return tuple(found)


def _quiet_watch(run: FeedRun, cluster: LocalCluster) -> Watched:
    best = watch(run, cluster)
    for _ in range(TRIES - 1):
        if best.others_cores <= QUIET_CORES:
            break
        best = min(best, watch(run, cluster), key=lambda seen: seen.others_cores)
    return best


def _described(one: Checked) -> str:
    return (
        f"{counted(one.nodes, 'node')}, {one.case}: {one.real_samples_per_s:,.0f} samples/s, the model says "
        f"{one.said_samples_per_s:,.0f} ({one.error:+.0%})"
    )


def system_of(seen: Watched, costs: Costs) -> System:
    """Describe the feed of a run to the model: nodes share this machine's cores, and links are its memory."""
    run = seen.run
    stored = run.storage_bytes_per_s is not None
    return System(
        nodes=run.nodes,
        trials=run.trials,
        block_samples=run.block_samples,
        prep_s=SLEEP_S if run.slow_prep else costs.prep_s,
        prep_sleeps=run.slow_prep,
        sample_bytes=SAMPLE_BYTES + ID_BYTES,
        raw_bytes=seen.raw_bytes,
        stored_share=1.0 if stored else 0.0,
        storage_bytes_per_s=run.storage_bytes_per_s if run.storage_bytes_per_s is not None else float("inf"),
        step_s=run.block_step_s / run.block_samples,
        cores=usable_cores(),
        taken_cores=seen.others_cores,
    )
