"""Soak test: one feed whose consumers join and leave, and the growth of its processes.

Memory is the unique set size of a process, without shared pages of the object store. The first third of a run is left
out, because tables of bounded size fill up in that time.
"""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray
from rich.console import Group
from rich.table import Table
from rich.text import Text

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import MbaasError
from mbaas.ray_cluster import actor_names, connection

FEED = "soak"
COMERS = 3
"""Threads with short-lived consumers, in addition to the permanent one."""

MINIBATCHES = (0, 1, 7, 60)
"""Minibatches that consumers take before they leave, in turn: the last is more than an epoch."""

EVERY_S = 5.0
WARM_UP = 1 / 3


@dataclass(frozen=True)
class Use:
    """Resources of all processes of one kind."""

    nbytes: int
    descriptors: int
    threads: int


@dataclass(frozen=True)
class Look:
    """Resources at one moment.

    Attributes:
        elapsed_s: since the first look.
        sessions, minibatches: sessions begun and minibatches taken so far.
        use: kind of process -> its resources.
        shared_files: entries of /dev/shm.
    """

    elapsed_s: float
    sessions: int
    minibatches: int
    use: dict[str, Use]
    shared_files: int


@dataclass(frozen=True)
class Slope:
    """Growth of a resource, from a line fitted to all looks.

    Attributes:
        what: process and resource.
        first, last: values of the line at its ends.
        per_1000_sessions, per_100k_minibatches: the slope, by either count.
    """

    what: str
    first: float
    last: float
    per_1000_sessions: float
    per_100k_minibatches: float


def soak(minibatches: int, minutes: float, progress: Callable[[str], None]) -> list[Look]:
    """Serve a feed on a new local cluster until its consumers took that many minibatches, or time is up."""
    run = _Run(minibatches, minutes * 60)
    with connection.separate_ray(2):
        data = synthetic(400)
        pipeline = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])
        feed = mbaas.serve(FEED, data, pipeline, batch_size=8, prep_workers=1, engine="cpu")
        looks = run.watch(progress)
        feed.stop()
        return looks


class _Run:
    """The consumers and their counts."""

    def __init__(self, minibatches: int, seconds: float) -> None:
        self._wanted, self._seconds = minibatches, seconds
        self._sessions, self._minibatches = itertools.count(), itertools.count()
        self._over = threading.Event()
        self._errors: list[BaseException] = []
        self.sessions = self.minibatches = 0

    def watch(self, progress: Callable[[str], None]) -> list[Look]:
        """Run the consumers, and look at the processes until enough minibatches were taken."""
        works = [self._stay, *[self._come_and_go] * COMERS]
        threads = [threading.Thread(target=self._guarded, args=(work, n)) for n, work in enumerate(works)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        looks = []
        try:
            while not self._over.wait(EVERY_S):
                looks.append(self._look(time.monotonic() - began))
                if len(looks) % 12 == 0:
                    held = looks[-1].use["coordinator"].nbytes / 1e6
                    counts = f"{self.sessions:,} sessions, {self.minibatches:,} minibatches"
                    progress(f"{looks[-1].elapsed_s:.0f} s: {counts}, coordinator {held:.1f} MB")
                if self.minibatches >= self._wanted or looks[-1].elapsed_s >= self._seconds:
                    self._over.set()
        finally:
            self._over.set()
            for thread in threads:
                thread.join()
        if self._errors:
            raise MbaasError(f"a consumer of the soak ended: {self._errors[0]!r}") from self._errors[0]
        return looks

    def _guarded(self, work: Callable[[int], None], number: int) -> None:
        try:
            work(number)
        except BaseException as error:
            self._errors.append(error)
            self._over.set()

    def _stay(self, _: int) -> None:
        with mbaas.join(FEED, consumer="stays", format="numpy") as loader:
            while not self._over.is_set():
                self._take(loader, 1000)

    def _come_and_go(self, number: int) -> None:
        for most in itertools.cycle(MINIBATCHES):
            if self._over.is_set():
                return
            self.sessions = next(self._sessions) + 1
            with mbaas.join(FEED, consumer=f"trial-{number}-{self.sessions}", format="numpy") as loader:
                self._take(loader, most)

    def _take(self, loader: mbaas.Loader, most: int) -> None:
        for _ in itertools.islice(loader, most):
            self.minibatches = next(self._minibatches) + 1
            if self._over.is_set():
                return

    def _look(self, elapsed_s: float) -> Look:
        shared = sum(1 for _ in Path("/dev/shm").iterdir())
        return Look(elapsed_s, self.sessions, self.minibatches, _uses(), shared)


def _uses() -> dict[str, Use]:
    kinds = {
        "coordinator": actor_names.actor_name(FEED),
        "prep worker": f"prep:{FEED}:",
        "cache node": f"cache:{FEED}:",
    }
    actors = actor_names.live_actors()
    pids = {kind: [a["Pid"] for a in actors if a["Name"].startswith(name)] for kind, name in kinds.items()}
    own = psutil.Process()
    return {"driver": _use([own])} | {kind: _use([psutil.Process(pid) for pid in of]) for kind, of in pids.items()}


def _use(processes: Sequence[psutil.Process]) -> Use:
    held = [(p.memory_full_info().uss, p.num_fds(), p.num_threads()) for p in processes]
    nbytes, descriptors, threads = (sum(column) for column in zip(*held, strict=True)) if held else (0, 0, 0)
    return Use(nbytes, descriptors, threads)


def slopes(looks: Sequence[Look]) -> list[Slope]:
    """Fit a line to every resource."""
    kept = looks[int(len(looks) * WARM_UP) :]
    if len(kept) < 3:
        raise MbaasError(f"a slope needs at least 3 looks, one every {EVERY_S:g} s after the warm-up, got {len(kept)}")
    found = []
    for kind in kept[-1].use:
        for what, unit in (("nbytes", " MB"), ("descriptors", " descriptors"), ("threads", " threads")):
            scale = 1e6 if what == "nbytes" else 1.0
            found.append(_slope(f"{kind}:{unit}", [getattr(look.use[kind], what) / scale for look in kept], kept))
    return [*found, _slope("/dev/shm: entries", [look.shared_files for look in kept], kept)]


def _slope(what: str, values: Sequence[float], looks: Sequence[Look]) -> Slope:
    def fitted(counts: Sequence[int]) -> tuple[float, float, float]:
        growth, start = np.polyfit(np.asarray(counts, float), np.asarray(values, float), 1)
        return float(growth), float(start + growth * counts[0]), float(start + growth * counts[-1])

    by_session, first, last = fitted([look.sessions for look in looks])
    by_minibatch, *_ = fitted([look.minibatches for look in looks])
    return Slope(what, first, last, by_session * 1e3, by_minibatch * 1e5)


def figures(looks: Sequence[Look]) -> dict[str, Any]:
    """Return the slopes and the last look as plain values."""
    return {"slopes": [asdict(each) for each in slopes(looks)], "last": asdict(looks[-1])}


def table(looks: Sequence[Look]) -> Group:
    """Return a table of the slopes, with the size of the run."""
    end = looks[-1]
    shown = Table("", "first", "last", "per 1,000 sessions", "per 10^5 minibatches")
    for each in slopes(looks):
        grows = (f"{each.per_1000_sessions:+.3f}", f"{each.per_100k_minibatches:+.3f}")
        shown.add_row(each.what, f"{each.first:.1f}", f"{each.last:.1f}", *grows)
    counts = f"{end.sessions:,} sessions and {end.minibatches:,} minibatches in {end.elapsed_s:.0f} s"
    where = f"{os.cpu_count()} cores, Ray {ray.__version__}; the first third is left out"
    return Group(Text(f"{counts}; {where}"), shown)
