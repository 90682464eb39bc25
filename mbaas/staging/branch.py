"""The coordinator of a further lane of a feed.

It serves the blocks of its lane as the feed's main coordinator, which has the first lane, serves its own. Workers,
homes and seats are decided there; this one is told how things stand, and tells what it did.
"""

from __future__ import annotations

import asyncio
from collections import deque

import ray

from mbaas import runtime
from mbaas.cache.atlas import Atlas
from mbaas.errors import FeedFailedError
from mbaas.order import Sweep
from mbaas.prep.worker import BlockMeta
from mbaas.staging import events as ev
from mbaas.staging.books import Books
from mbaas.staging.desk import Desk
from mbaas.staging.jobs import Jobs
from mbaas.staging.layout import credit
from mbaas.staging.protocol import START_TIMEOUT_S, TICK_S
from mbaas.staging.reception import Reception
from mbaas.staging.settings import FeedSettings
from mbaas.staging.standing import Charter, Filing, Standing
from mbaas.staging.workforce import Hired

KEPT_ENTRIES = 10_000
"""Entries that wait for a coordinator which is being restarted; what is older is not counted."""


class _Daybook(Books):
    """Books whose entries are also kept to be filed.

    Attributes:
        made, news: entries and notes that were not filed yet.
    """

    def __init__(self) -> None:
        super().__init__()
        self.made: deque[tuple[str, BlockMeta]] = deque(maxlen=KEPT_ENTRIES)
        self.news: deque[str] = deque(maxlen=KEPT_ENTRIES)

    def note(self, text: str) -> None:
        self.news.append(text)

    def finished(self, worker: str, meta: BlockMeta, sweep: Sweep) -> None:
        super().finished(worker, meta, sweep)
        self.made.append((worker, meta))


@ray.remote(num_cpus=0)
class Branch(Reception):
    """Runs one further lane of a feed.

    Args:
        settings: of the feed.
        number: of the lane, from 1.
    """

    def __init__(self, settings: FeedSettings, number: int) -> None:
        self._settings, self._number = settings, number
        self._books = _Daybook()
        self._jobs = Jobs(self._fail)
        self._standing: Standing | None = None
        self._workers: dict[str, Hired] = {}
        self._given_up: dict[str, str] = {}
        self._failed: str | None = None
        self._opened = asyncio.Event()
        runtime.end_with(settings.name)

    # ---- life ----

    def _open(self, charter: Charter) -> None:
        self._atlas = Atlas(charter.layout.sweep)
        self._desk = Desk(
            charter.info,
            charter.layout,
            charter.layout.lane(self._number, self._settings),
            atlas=self._atlas,
            makers=self,
            books=self._books,
            spawn=self._jobs.spawn,
            fail=self._fail,
        )
        self._jobs.spawn(self._tick_forever())

    async def _until_open(self) -> None:
        try:
            await asyncio.wait_for(self._opened.wait(), START_TIMEOUT_S)
        except asyncio.TimeoutError:
            who = f"lane {self._number} of feed {self._settings.name!r}"
            raise FeedFailedError(f"{who} was not told to begin within {START_TIMEOUT_S:g} s") from None

    async def _tick_forever(self) -> None:
        while self._failed is None:
            await asyncio.sleep(TICK_S)
            self._desk.send(ev.Tick())

    def _fail(self, reason: str) -> None:
        self._failed = self._failed or reason
        if hasattr(self, "_desk"):
            self._desk.fail(reason)

    # ---- what the main coordinator calls ----

    async def attend(self, standing: Standing | None, charter: Charter | None, *, in_full: bool) -> Filing:
        """Hear how things stand, where that is news, and tell what was done.

        Args:
            standing: None if it is as it was told last.
            charter: for a lane that may not have been told yet.
            in_full: whether to tell what consumers hold.
        """
        if charter is not None and not hasattr(self, "_desk"):
            self._open(charter)
        before = self._standing
        if standing is not None and (before is None or standing.version > before.version):
            self._standing = standing
        if hasattr(self, "_desk") and self._standing is not None:
            self._follow(self._standing, before)
            self._opened.set()
        return self._filing(in_full)

    def _follow(self, standing: Standing, before: Standing | None) -> None:
        if standing.failed is not None:
            self._fail(standing.failed)
            return
        newest = self._atlas.newest
        if standing.homes is not None and (newest is None or newest.version < standing.homes.version):
            self._atlas.add(standing.homes)
        if before is not None:
            for node in standing.dead.keys() - before.dead.keys():
                self._desk.send(ev.NodeDown(node, standing.dead[node]))
            for consumer, times in standing.detached.items():
                if times != before.detached.get(consumer):
                    self._desk.send(ev.Detach(consumer))
        self._follow_workers(standing)
        if before is None or standing.seats != before.seats:
            blocks = self._desk.lane.blocks_per_epoch
            self._desk.send(ev.HoldSeats(frozenset((name, epoch * blocks) for name, epoch in standing.seats)))

    def _follow_workers(self, standing: Standing) -> None:
        crew = self._desk.core.crew
        self._workers = {worker.name: worker for worker in standing.workers}
        listed = self._workers.keys() | standing.leaving
        self._given_up = {name: reason for name, reason in self._given_up.items() if name in listed}
        for name, worker in list(crew.workers.items()):
            if name in standing.leaving:
                if not worker.leaving:
                    self._desk.send(ev.WorkerLeaves(name))
            elif name not in self._workers:
                self._desk.send(ev.WorkerDown(name, standing.gone.get(name, "it was ended")))
        for hired in standing.workers:
            if hired.name not in crew.workers and hired.name not in self._given_up:
                self._desk.send(ev.WorkerUp(hired.name, credit(self._settings.lanes), hired.node))

    def _filing(self, in_full: bool) -> Filing:
        if self._standing is None or not hasattr(self, "_desk"):
            return Filing(failed=self._failed)
        core, books = self._desk.core, self._books
        filing = Filing(
            version=self._standing.version,
            made=tuple(books.made),
            notes=tuple(books.news),
            given_up=dict(self._given_up),
            tasks={worker.name: len(worker.tasks) for worker in core.crew.workers.values()},
            staged_blocks=len(core.window.blocks),
            staged_bytes=core.window.used_bytes,
            held={m.name: m.cursor - m.released for m in core.roster.members.values()} if in_full else {},
            detached=dict(self._desk.detached),
            failed=self._failed,
        )
        books.made.clear()
        books.news.clear()
        return filing

    # ---- workers, for the desk ----

    def worker(self, name: str) -> Hired | None:
        """A worker that is up, or None."""
        return self._workers.get(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone: do without it, whatever the main coordinator makes of that."""
        if name in self._desk.core.crew.workers:
            self._given_up[name] = reason
            self._desk.send(ev.WorkerDown(name, reason))

    def retire(self, name: str, reason: str) -> None:
        """A worker is stuck: the main coordinator will end it."""
        self._given_up[name] = reason

    def dismiss(self, name: str) -> None:
        """A worker that leaves is free, as far as this lane is concerned: the next filing says so."""
