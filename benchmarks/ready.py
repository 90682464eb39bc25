"""Cost of a loader to a trial that never waits: its epochs against a loop over one minibatch in memory.

The trial's step is a fixed amount of work that takes longer than preparing a minibatch, as in training that does not
need mbaas. One core is left to the trial; the others prepare the next epoch meanwhile. Loops over memory and epochs of
the loader alternate.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from rich.table import Table

import mbaas
from benchmarks import ID_BYTES
from mbaas.ray_cluster import connection
from mbaas.tools.bench.host import touch
from mbaas.tools.bench.render import figure_table
from mbaas.tools.bench.tasks.images import Images

FEED = "ready"
VECTOR = 65_536
"""Numbers in a unit of work, their square roots: one thread of NumPy, within a core's cache."""

WARM_UP_EPOCHS = 2
"""Uncounted epochs, in which processes touch memory and fill caches for the first time."""


@dataclass(frozen=True)
class Readiness:
    """Results of one format.

    Attributes:
        array: "numpy" (read-only views) or "torch" (private tensors).
        batch: samples in a minibatch.
        step_s: seconds of a step over the minibatch in memory, median over rounds.
        losses: for each round, the additional time of a step over the loader's minibatches, as a fraction.
    """

    array: str
    batch: int
    step_s: float
    losses: tuple[float, ...]

    @property
    def loss(self) -> float:
        """Median of the losses."""
        return median(self.losses)


def measure(
    folder: Path, *, batch: int = 64, cores: int = 2, rounds: int = 7, step_s: float = 0.1, seed: int = 0
) -> list[Readiness]:
    """Serve ``folder`` on ``cores - 1`` prep workers and train on it with steps of ``step_s`` seconds."""
    data = mbaas.read_images(folder)
    ahead_bytes = (
        2 * len(data) * (Images.made.nbytes + ID_BYTES)
    )  # two epochs, so that the next one is prepared during this one
    with connection.separate_ray(cores):
        with mbaas.serve(
            FEED,
            data,
            Images().pipeline(),
            batch_size=batch,
            seed=seed,
            prep_workers=max(1, cores - 1),
            engine="cpu",
            staging_bytes=ahead_bytes,
        ):
            work = _work(step_s)
            return [_measure_format("numpy", batch, rounds, work), _measure_format("torch", batch, rounds, work)]


def _measure_format(array: Literal["torch", "numpy"], batch: int, rounds: int, work: Callable[[], None]) -> Readiness:
    step_times, losses = [], []
    with mbaas.join(FEED, consumer=array, format=array) as loader:

        def epoch() -> Iterable[NDArray[np.uint8]]:
            for minibatch in loader:
                pixels = minibatch["image"]
                if array == "torch":  # NumPy sees the same memory, without a copy
                    pixels = pixels.permute(0, 2, 3, 1).numpy()
                yield pixels
                del minibatch, pixels

        for _ in range(WARM_UP_EPOCHS):
            _step_s(epoch(), work)
        memory: NDArray[np.uint8] = np.ones((batch, Images.made.nbytes), np.uint8)
        for _ in range(rounds):
            from_memory = _step_s((memory for _ in range(len(loader))), work)
            losses.append(_step_s(epoch(), work) / from_memory - 1.0)
            step_times.append(from_memory)
        return Readiness(array, batch, median(step_times), tuple(losses))


def _step_s(minibatches: Iterable[NDArray[np.uint8]], work: Callable[[], None]) -> float:
    """Return the seconds of a step, including all time between two minibatches."""
    began, steps = time.perf_counter(), 0
    for pixels in minibatches:
        touch(pixels)  # as a training step does: views cost nothing until they are read
        del pixels
        work()
        steps += 1
    return (time.perf_counter() - began) / steps


def _work(step_s: float) -> Callable[[], None]:
    """Return work of about ``step_s`` on one core: a number of square roots measured on this machine."""
    vector = np.ones(VECTOR, np.float32)

    def seconds(times: int) -> float:
        began = time.perf_counter()
        for _ in range(times):
            np.sqrt(vector, out=vector)
        return time.perf_counter() - began

    seconds(500)  # warms up
    times = max(1, round(step_s / median(seconds(100) / 100 for _ in range(20))))

    def work() -> None:
        seconds(times)

    return work


def table(results: list[Readiness]) -> Table:
    """Return a table with a row for each format."""
    title = "a trial whose data is always ready, against a loop over memory"
    shown = figure_table(title, ("format", "batch", "step", "loss", "least", "most"))
    for result in results:
        losses = (f"{loss:.1%}" for loss in (result.loss, min(result.losses), max(result.losses)))
        shown.add_row(result.array, str(result.batch), f"{1e3 * result.step_s:.0f} ms", *losses)
    return shown
