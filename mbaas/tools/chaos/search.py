"""The default search under faults: a few trials share a feed and record their samples."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from mbaas import transforms as T
from mbaas.dataset import Dataset, read_images
from mbaas.errors import MbaasError
from mbaas.feed import Feed, join
from mbaas.loader import Loader
from mbaas.serving import serve
from mbaas.settings import Timeouts
from mbaas.tools.chaos import records
from mbaas.tools.chaos.checker import Row, agreed
from mbaas.tools.chaos.participants import kill
from mbaas.tools.chaos.storage import Trouble, images, troubled

FEED = "chaos"
SAMPLES = 2003
BATCH_SIZE = 32
TRIALS = 3
WORKERS = 2

STEP_S = (0.0, 0.16)
"""Training time per minibatch, from and to; an epoch of 63 minibatches takes about 5 s."""

RANK_PACES = (0.3, 1.0, 2.0)
"""Factors of `STEP_S` for ranks. Each process draws one, so the ranks of a trial differ in speed."""

CACHED = 0.25
"""Fraction of the dataset cached per node; below 1, so storage is read in every epoch."""

STAGED = 16
"""Capacity of staging in minibatches."""

WAIT_S = 120.0
"""Longest wait of a trial without progress of the feed; then an error is raised."""

AGAIN_S = 0.5
"""Pause before a trial rejoins after an error."""

LOOK_S = 0.1
"""Interval between checks for the end of trials."""

SERVES = "serves"
"""Output of the program when its feed is open."""

SERVER_END_S = 20.0
"""Longest wait for the program to end; then it is killed."""

STOP = "stop"
"""File that ends trials: each finishes its current epoch; ranks finish all epochs up to the number in the file."""


@dataclass(frozen=True)
class Reader:
    """A process that reads the feed.

    Attributes:
        name: name in the records, and of its actor.
        rank, world_size: rank within a data-parallel trial, and number of ranks.
        is_newcomer: joins mid-epoch, leaves after one epoch of its own, and returns as another consumer. The orders of
            the surrounding epochs therefore have cuts.
        pipelines: numbers in `PIPELINES`, one for each of its epochs, again and again.
    """

    name: str
    rank: int = 0
    world_size: int = 1
    is_newcomer: bool = False
    pipelines: tuple[int, ...] = (0,)


PIPELINES = (
    T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(16), T.RandomHorizontalFlip()]),
    T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(24), T.RandomVerticalFlip()]),
    T.Pipeline([T.DecodeImage(), T.Resize(20), T.RandomCrop(16), T.ColorJitter(0.3)]),
)
"""The feed's own pipeline, and those that readers bring."""


def readers(ranks: int = 0, *, with_pipelines: bool = False) -> list[Reader]:
    """Return the readers: three trials, or with ranks two trials, a data-parallel trial and a newcomer.

    With pipelines, the first trial has the feed's own, the second one changes its pipeline with each epoch, and all
    others have one of their own.
    """
    own = ((0,), (0, 1, 2), (2,)) if with_pipelines else ((0,),) * TRIALS
    if not ranks:
        return [Reader(f"trial-{number}", pipelines=own[number]) for number in range(TRIALS)]
    return [
        *(Reader(f"trial-{number}", pipelines=own[number]) for number in range(TRIALS - 1)),
        *(Reader(f"ranks[{rank}]", rank, ranks, pipelines=(1,) if with_pipelines else (0,)) for rank in range(ranks)),
        Reader("newcomer", is_newcomer=True, pipelines=own[-1]),
    ]


def serve_search(data: Dataset, pipeline: int = 0) -> Feed:
    return serve(
        FEED,
        data,
        PIPELINES[pipeline],
        batch_size=BATCH_SIZE,
        cache_bytes=int(CACHED * data.total_bytes),
        staging_bytes=STAGED * BATCH_SIZE * (16 * 16 * 3 + 16),
        prep_workers=WORKERS,
        timeouts=Timeouts(lease_s=6.0, reservation_s=5.0, patience_s=4.0, prep_s=8.0),
    )


def dataset(folder: Path) -> Dataset:
    """Return the images below ``folder``, created if missing, on storage that the folder's `Trouble` can disturb."""
    root = folder / "images"
    if not root.exists():
        images(root, SAMPLES)
    return read_images(str(root), filesystem=troubled(folder))


# ---- the program that serves ----


class Server:
    """A context manager that runs the program that serves the feed, and restarts it like a service manager.

    `trouble` disturbs the feed's storage.
    """

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address, self.trouble = folder, address, Trouble(folder)
        self._back_at = 0.0

    def _start(self) -> None:
        log = self._folder / "server.log"
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mbaas.tools.chaos.search", str(self._folder)],
                env={**os.environ, "RAY_ADDRESS": self._address},
                # The program ends when this pipe is closed, so it cannot outlive the run.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C only goes to the run, which ends this program itself
            )

    def __enter__(self) -> Server:
        self._start()
        assert self._process.stdout is not None
        try:
            if SERVES not in self._process.stdout.readline():  # serving has its own deadlines
                raise MbaasError(f"the search did not begin: {(self._folder / 'server.log').read_text()}")
        except BaseException:  # including Ctrl-C: otherwise the program would keep running
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, back_in_s: float) -> None:
        """Kill the program; `look_after` restarts it after ``back_in_s`` seconds."""
        self._back_at = time.monotonic() + back_in_s
        kill(self.pid)
        self._process.wait()

    def look_after(self, *, at_once: bool = False) -> None:
        """Restart the program if it has ended and its delay is over, or regardless of the delay if ``at_once``."""
        if self._process.poll() is not None and (at_once or time.monotonic() >= self._back_at):
            self._close()
            self._start()

    def _end(self) -> None:
        self._close()
        try:
            self._process.wait(SERVER_END_S)
        except subprocess.TimeoutExpired:
            kill(self.pid)
            self._process.wait()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main(folder: Path) -> None:
    """Serve until the parent closes stdin or dies."""
    with serve_search(dataset(folder)):
        print(SERVES, flush=True)
        sys.stdin.read()


# ---- trials ----


class Trials:
    """Readers in separate processes, which Ray restarts on any node with free resources."""

    def __init__(self, folder: Path, readers: list[Reader]) -> None:
        self._folder = folder
        self._actors = [_TrialActor.options(name=reader.name).remote() for reader in readers]
        self._running = [
            actor.train.remote(reader, str(folder)) for actor, reader in zip(self._actors, readers, strict=True)
        ]

    def stop(self, timeout_s: float, meanwhile: Callable[[], None]) -> int:
        """End the readers after their current epoch. Return the number that had to be killed after ``timeout_s``.

        ``meanwhile`` is called repeatedly until they have ended.
        """
        # Ranks must end with the same epoch. One may be about to start the epoch after the last recorded one.
        found = [each for trial in records.read(self._folder).values() for each in trial if each.steps]
        reached = [each.steps[-1].delivery.epoch for each in found]
        partial = self._folder / f"{STOP}.part"
        partial.write_text(str(max(reached, default=0) + 1))
        partial.rename(self._folder / STOP)
        end, left = time.monotonic() + timeout_s, self._running
        while left and time.monotonic() < end:
            _, left = ray.wait(self._running, num_returns=len(self._running), timeout=LOOK_S)
            meanwhile()
        for actor in self._actors:
            ray.kill(actor)
        done = [each for each in self._running if each not in left]
        ray.get(done)  # raises only after a bug: trials record service errors
        return len(left)


class _Trial:
    def train(self, reader: Reader, folder: str) -> None:
        """Train for epochs until the stop file exists, continuing an earlier process of this reader."""
        stop = Path(folder, STOP)
        if not reader.is_newcomer:
            self._train(reader, records.Writer.open(Path(folder), reader.name), stop)
        while reader.is_newcomer and not stop.exists():
            newest = records.newest(Path(folder), reader.name)
            self._train(reader, records.Writer.open(Path(folder), f"{reader.name}.{newest}"), stop)

    def _train(self, reader: Reader, writer: records.Writer, stop: Path) -> None:
        # Different steps per process: readers with the same steps would never get out of step.
        chance = random.Random(f"{reader.name} {os.getpid()}")
        pace = chance.choice(RANK_PACES) if reader.world_size > 1 else 1.0
        if writer.state is None:
            writer.pipeline = reader.pipelines[0]
        while not _may_end(reader, writer.state, stop):
            try:
                with _joined(reader, writer) as loader:
                    # If an epoch's last minibatch was recorded, the first loop yields nothing.
                    is_first, is_at_end = True, _is_at_end(writer.state)
                    while not _may_end(reader, writer.state, stop):
                        if len(reader.pipelines) > 1 and not is_first:
                            after = reader.pipelines.index(writer.pipeline) + 1
                            following = reader.pipelines[after % len(reader.pipelines)]
                            loader.set_pipeline(PIPELINES[following])
                            writer.pipeline = following
                        is_first, got_any = False, False
                        for _ in _written(loader, writer):
                            got_any = True
                            time.sleep(pace * chance.uniform(*STEP_S))
                        if not got_any and not is_at_end:
                            writer.nothing(loader.state_dict())
                        is_at_end = False
            except MbaasError as error:
                writer.error(error)
                time.sleep(AGAIN_S)
        writer.close()


# Ray restarts it and repeats the call on any node, like a search that restarts a failed trial.
_TrialActor: Any = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1)(_Trial)


def _is_at_end(state: Mapping[str, Any] | None) -> bool:
    return state is not None and state["position"] == SAMPLES


def _may_end(reader: Reader, state: Mapping[str, Any] | None, stop: Path) -> bool:
    """Return whether a reader may end: only between epochs, and a rank only together with all others."""
    if reader.is_newcomer and _is_at_end(state):
        return True
    if not stop.exists():
        return False
    if reader.world_size > 1:
        return state is not None and _is_at_end(state) and state["feed_epoch"] >= int(stop.read_text())
    return state is None or not state["position"] or _is_at_end(state)


def _joined(reader: Reader, writer: records.Writer) -> Loader:
    options: dict[str, Any] = {"format": "numpy", "wait_timeout_s": WAIT_S}
    if writer.pipeline or len(reader.pipelines) > 1:
        options["pipeline"] = PIPELINES[writer.pipeline]
    if reader.world_size > 1:
        loader = join(FEED, "ranks", rank=reader.rank, world_size=reader.world_size, **options)
    else:
        loader = join(FEED, writer.trial, start="now" if reader.is_newcomer else "epoch", **options)
    try:
        if writer.state is not None:
            loader.load_state_dict(dict(writer.state))
    except BaseException:  # a loader that is never read would delay the other trials
        loader.close()
        raise
    return loader


def _written(loader: Loader, writer: records.Writer) -> Iterable[None]:
    asked_at = time.monotonic()
    for batch in loader:
        writer.step(batch, loader.state_dict(), asked_at=asked_at, got_at=time.monotonic())
        del batch  # its arrays are views into the object store, and would hold the block during the sleep
        yield
        asked_at = time.monotonic()


def reference(folder: Path, data: Dataset, epochs: int, pipeline: int = 0) -> dict[int, list[Row]]:
    """Return the first epochs of a feed without faults, on the connected cluster, digested like the trials' epochs.

    The feed has only this pipeline.
    """
    folder.mkdir()
    writer = records.Writer.open(folder, "reference")
    with serve_search(data, pipeline), join(FEED, "reference", format="numpy") as loader:
        for _ in range(epochs):
            for _ in _written(loader, writer):
                pass
    writer.close()
    steps = records.history(records.read(folder)["reference"])
    return agreed([[step.delivery for step in steps]], SAMPLES)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
