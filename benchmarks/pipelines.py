"""Trials with their own pipelines on one feed: storage reads, equal pipelines, and an expensive pipeline.

Images are generated in memory, so storage reads take no time. They are only counted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from rich.table import Table

import mbaas
from benchmarks.local_cluster import answers
from mbaas import transforms as T
from mbaas.base.units import count, counted, percent
from mbaas.dataset import synthetic
from mbaas.ray_cluster import connection
from mbaas.tools.bench.render import figure_table

FEED, BATCH, SIDE, SIZE = "pipelines", 64, 64, 56

SAMPLE_S = 0.0002
"""Extra CPU time for a sample of `slow(1)`; `slow(n)` takes n times as much."""

STEP_S = 0.06
"""Time of a training step in the runs with an expensive pipeline."""

LIMIT_S = 600.0


@dataclass(frozen=True)
class PipelineFigures:
    """Results; rates are samples/s.

    Attributes:
        samples, cached: size of the dataset, and the share of it that fits in the cache.
        staged: staging memory, as a share of a prepared epoch.
        reads: number of pipelines -> share of the dataset read from storage in an epoch, after the first.
        rates: number of pipelines -> rate of all trials together, in all epochs.
        prepared_alone, prepared_equal: samples prepared for a pipeline that one trial uses, and that four share.
        rate_beside, rate_alone: rate of seven trials that share a pipeline, with and without an eighth trial whose
            pipeline takes ten times as long.
    """

    samples: int
    cached: float
    staged: float
    reads: dict[int, float]
    rates: dict[int, float]
    prepared_alone: int
    prepared_equal: int
    rate_beside: float
    rate_alone: float


def flipped(number: int) -> T.Pipeline:
    """Return a pipeline with a flip probability of ``number`` percent."""
    return T.Pipeline([T.DecodeImage(), T.RandomCrop(SIZE), T.RandomHorizontalFlip(number / 100)])


def slow(times: int) -> T.Pipeline:
    """Return a pipeline whose samples take ``times`` x `SAMPLE_S` longer."""

    def spin(image: NDArray[np.uint8], rng: np.random.Generator) -> NDArray[np.uint8]:  # noqa: ARG001
        end = time.thread_time() + times * SAMPLE_S
        while time.thread_time() < end:
            pass
        return image

    return T.Pipeline([T.DecodeImage(), T.RandomCrop(SIZE), T.Map(spin)])


class _Trial:
    def read(self, name: str, pipeline: T.Pipeline, *, samples: int, step_s: float = 0.0) -> float:
        """Read this many samples from the others' position, as in a search, and return the rate."""
        with mbaas.join(FEED, name, pipeline=pipeline, start="now", format="numpy") as loader:
            began, received = time.perf_counter(), 0
            while True:
                for batch in loader:
                    received += len(batch["label"])
                    time.sleep(step_s)
                    if received >= samples:
                        return received / (time.perf_counter() - began)


_TrialActor: Any = ray.remote(num_cpus=0)(_Trial)


def measure(*, samples: int, cached: float, staged: float, pipelines: Sequence[int], epochs: int) -> PipelineFigures:
    """Measure reads with each number of pipelines, then equal pipelines, then an expensive one."""
    data = synthetic(samples, height=SIDE, width=SIDE)
    staging_bytes = int(staged * samples * SIZE * SIZE * 3)
    with connection.separate_ray():
        reads, rates = {}, {}
        for number in pipelines:
            options = {"cache_bytes": int(cached * data.total_bytes), "cache_decoded": False}
            with _served(data, staging_bytes, **options) as feed:
                found = _run([flipped(each) for each in range(1, number + 1)], samples=epochs * samples)
                read = sum(node.storage_bytes for node in feed.status().nodes) / data.total_bytes
                reads[number], rates[number] = (read - 1) / (epochs - 1), sum(found)
        with _served(data, staging_bytes) as feed:
            _run([flipped(1)] * 4 + [flipped(each) for each in range(2, 6)], samples=2 * samples)
            prepared = sorted((len(each.trials), each.samples) for each in feed.status().pipelines if each.pipeline)
        with _served(data, staging_bytes, batch_size=BATCH // 2):
            steady: dict[str, Any] = {"samples": 300 * BATCH // 2, "step_s": STEP_S}
            _run([slow(1)] * 7, **steady)  # fills the cache
            without = sum(_run([slow(1)] * 7, **steady))
            beside = sum(_run([*[slow(1)] * 7, slow(10)], **steady)[:7])
    return PipelineFigures(samples, cached, staged, reads, rates, prepared[0][1], prepared[-1][1], beside, without)


def _served(data: mbaas.Dataset, staging_bytes: int, **options: Any) -> mbaas.Feed:
    given: dict[str, Any] = {"batch_size": BATCH, "prep_workers": 2, "staging_bytes": staging_bytes, **options}
    return mbaas.serve(FEED, data, flipped(0), **given)


def _run(pipelines: Sequence[T.Pipeline], **options: Any) -> list[float]:
    """Run one trial per pipeline, all at once, and return their rates."""
    trials = [_TrialActor.remote() for _ in pipelines]
    try:
        calls = [
            trial.read.remote(f"trial-{number}", pipeline, **options)
            for number, (trial, pipeline) in enumerate(zip(trials, pipelines, strict=True))
        ]
        return answers(calls, LIMIT_S, "trials with pipelines of their own")
    finally:
        for trial in trials:
            ray.kill(trial)


def table(found: PipelineFigures) -> Table:
    """Return a table of the results."""
    title = (
        f"{count(found.samples)} images, {percent(found.cached)} of them cached for the reads, "
        f"staging for {percent(found.staged)} of an epoch"
    )
    shown = figure_table(title, ("what", "result"), words=("what",))
    for number, share in found.reads.items():
        shown.add_row(f"read in an epoch, {counted(number, 'pipeline')}", percent(share))
        shown.add_row(f"samples/s, {counted(number, 'pipeline')}", count(found.rates[number]))
    shown.add_row("prepared for one trial", count(found.prepared_alone))
    shown.add_row("prepared for four with equal pipelines", count(found.prepared_equal))
    shown.add_row("seven trials, beside an expensive one", percent(found.rate_beside / found.rate_alone))
    return shown
