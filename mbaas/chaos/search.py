"""The search that runs under faults unless a command is named: a few trials that share a feed and write down all."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import ray

from mbaas import transforms as T
from mbaas.chaos import records
from mbaas.chaos.checker import Row, by_epoch
from mbaas.chaos.storage import images, troubled
from mbaas.dataset import Dataset, read_images
from mbaas.errors import MbaasError
from mbaas.feed import Feed, join
from mbaas.loader import Loader
from mbaas.serving import serve
from mbaas.settings import Staging, Timeouts

FEED = "chaos"
SAMPLES = 2003
BATCH_SIZE = 32
TRIALS = 3
LANES = 2
WORKERS = 2

STEP_S = (0.0, 0.16)
"""How long a trial works on a minibatch, from and to: an epoch of 63 takes about 5 s."""

CACHED = 0.25
"""Share of the dataset that a node keeps, so that storage is read in every epoch."""

STAGED = 16
"""Minibatches that staging has room for."""

WAIT_S = 120.0
"""A wait of a trial in which the feed makes no progress ends with an error after this long."""

AGAIN_S = 0.5
"""Pause before a trial joins anew after an error."""

LOOK_S = 0.1
"""Pause between two looks whether trials that were told to end have."""

STOP = "stop"
"""The file by which trials are told to end with the epoch that they are in."""


def serve_search(data: Dataset) -> Feed:
    """Serve the feed of the search, whose patience is short against the faults."""
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(16), T.RandomHorizontalFlip()])
    return serve(
        FEED,
        data,
        pipeline,
        batch_size=BATCH_SIZE,
        cache_bytes=int(CACHED * data.total_bytes),
        staging_bytes=STAGED * BATCH_SIZE * (16 * 16 * 3 + 16),
        prep_workers=WORKERS,
        timeouts=Timeouts(lease_s=6.0, reservation_s=5.0, patience_s=4.0, prep_s=8.0),
        staging=Staging(lanes=LANES),
    )


def dataset(folder: Path) -> Dataset:
    """List the images below a folder through the storage that a `Trouble` with it disturbs; make them if need be."""
    root = folder / "images"
    if not root.exists():
        images(root, SAMPLES)
    return read_images(str(root), filesystem=troubled(folder))


class Trials:
    """Trials in processes of their own, which Ray starts again, wherever there is room, when they die.

    Args:
        folder: where they write down what they get.
        trials: how many.
    """

    def __init__(self, folder: Path, trials: int = TRIALS) -> None:
        self._folder = folder
        names = [f"trial-{number}" for number in range(trials)]
        self._actors = [_TrialActor.options(name=name).remote() for name in names]
        self._running = [actor.train.remote(name, str(folder)) for actor, name in zip(self._actors, names, strict=True)]

    def stop(self, timeout_s: float, meanwhile: Callable[[], None]) -> int:
        """Have them end with the epoch that they are in; return how many had to be killed because they did not.

        Args:
            timeout_s: until they are.
            meanwhile: is called again and again until they have ended.
        """
        (self._folder / STOP).touch()
        end, left = time.monotonic() + timeout_s, self._running
        while left and time.monotonic() < end:
            _, left = ray.wait(self._running, num_returns=len(self._running), timeout=LOOK_S)
            meanwhile()
        for actor in self._actors:
            ray.kill(actor)
        done = [each for each in self._running if each not in left]
        ray.get(done)  # raises what only a bug can have raised: trials write errors of the service down
        return len(left)


class _Trial:
    def train(self, name: str, folder: str) -> None:
        """Train epoch after epoch until told to stop, from where an earlier process of this trial stood."""
        writer = records.Writer.open(Path(folder), name)
        stop = Path(folder, STOP)
        chance = random.Random(name)  # trials that took the same steps would never be out of step
        while True:
            try:
                with _joined(name, writer.state) as loader:
                    # Of an epoch whose last minibatch was written down nothing is left: the first loop has none.
                    is_at_end = writer.state is not None and writer.state["position"] == SAMPLES
                    while not stop.exists() or _is_amid(writer.state):
                        got_any = False
                        for _ in _written(loader, writer):
                            got_any = True
                            time.sleep(chance.uniform(*STEP_S))
                        if not got_any and not is_at_end:
                            writer.nothing(loader.state_dict())
                        is_at_end = False
                    writer.close()
                    return
            except MbaasError as error:
                writer.error(error)
                time.sleep(AGAIN_S)


# Ray restarts it and repeats its call on any node, as a search restarts a failed trial.
_TrialActor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Trial)


def _is_amid(state: Mapping[str, Any] | None) -> bool:
    return state is not None and 0 < state["position"] < SAMPLES


def _joined(name: str, state: Mapping[str, Any] | None) -> Loader:
    loader = join(FEED, name, format="numpy", wait_timeout_s=WAIT_S)
    try:
        if state is not None:
            loader.load_state_dict(dict(state))
    except BaseException:  # whatever it is: a loader that nobody reads would hold up the other trials
        loader.close()
        raise
    return loader


def _written(loader: Loader, writer: records.Writer) -> Iterable[None]:
    """Go through the rest of an epoch, and write each minibatch down."""
    asked_at = time.monotonic()
    for batch in loader:
        writer.step(batch, loader.state_dict(), asked_at=asked_at, got_at=time.monotonic())
        del batch  # its arrays are views of the object store, and would hold the block while the trial sleeps
        yield
        asked_at = time.monotonic()


def reference(folder: Path, data: Dataset, epochs: int) -> dict[int, list[Row]]:
    """Get the first epochs from a feed without faults, on the cluster that this program is connected to.

    They go through files, and so through the same digests, as those of the trials do.
    """
    folder.mkdir()
    writer = records.Writer.open(folder, "reference")
    with serve_search(data), join(FEED, "reference", format="numpy") as loader:
        for _ in range(epochs):
            for _ in _written(loader, writer):
                pass
    writer.close()
    steps = records.history(records.read(folder)["reference"])
    return by_epoch([step.delivery for step in steps])
