"""The further lanes of a feed, as its main coordinator sees them; in most feeds there are none."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections import Counter, deque
from collections.abc import Callable, Coroutine
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from mbaas import runtime
from mbaas.errors import FeedFailedError
from mbaas.staging import events as ev
from mbaas.staging.books import Books
from mbaas.staging.branch import Branch
from mbaas.staging.cohort import MemberState
from mbaas.staging.desk import Desk
from mbaas.staging.production import Production
from mbaas.staging.protocol import TICK_S
from mbaas.staging.settings import FeedSettings
from mbaas.staging.standing import Charter, Filing, Standing
from mbaas.staging.workforce import Hired

BEGIN_S = 60.0
"""A lane's coordinator begins within so long."""

TOLD_S = 2.0
"""How long a call may wait until all lanes know what it changed."""

RETRY_S = 0.1
"""Pause before a lane's coordinator that is being restarted is called again."""

KEPT_REASONS = 100
"""Workers and nodes that are gone, of which lanes are told why."""


class _Branch:
    """One further lane.

    Attributes:
        filing: its last one.
        news: set when the standing has changed.
    """

    def __init__(self, number: int, actor: Any) -> None:
        self.number, self.actor = number, actor
        self.filing = Filing()
        self.news = asyncio.Event()


class Branches:
    """Further lanes, and whatever the first lane's desk must do with them in mind.

    Args:
        settings: of the feed.
        production: its workers.
        books: where what lanes file is entered.
        spawn: runs a coroutine in the background.
        fail: ends the feed, for a reason.

    Attributes:
        actors: coordinators of the lanes from 1 on; none before `begin`.
    """

    def __init__(
        self,
        settings: FeedSettings,
        *,
        production: Production,
        books: Books,
        spawn: Callable[[Coroutine[Any, Any, Any]], None],
        fail: Callable[[str], None],
    ) -> None:
        self._settings, self._production, self._books = settings, production, books
        self._spawn, self._fail = spawn, fail
        self._branches: list[_Branch] = []
        self._gone: deque[tuple[str, str]] = deque(maxlen=KEPT_REASONS)
        self._dead: deque[tuple[str, str]] = deque(maxlen=KEPT_REASONS)
        self._free: set[str] = set()  # workers that leave, with which the first lane is done
        self._began, self._count = time.time_ns(), itertools.count()
        self._standing: Standing | None = None

    @property
    def actors(self) -> tuple[Any, ...]:
        """Coordinators of the lanes from 1 on."""
        return tuple(branch.actor for branch in self._branches)

    # ---- beginning and end ----

    def begin(self) -> None:
        """Start the coordinators, or find those that an earlier main coordinator left."""
        for number in range(1, self._settings.lanes):
            options = {
                **runtime.child_options(self._settings.name, "lane", str(number)),
                "get_if_exists": True,
                "max_concurrency": 10_000,
                "max_restarts": -1,
                "scheduling_strategy": NodeAffinitySchedulingStrategy(
                    ray.get_runtime_context().get_node_id(), soft=False
                ),
            }
            actor = Branch.options(**options).remote(self._settings, number)  # type: ignore[attr-defined]
            self._branches.append(_Branch(number, actor))

    async def open(self, charter: Charter, desk: Desk) -> None:
        """Have all lanes serve, and keep them informed from now on.

        Raises:
            FeedFailedError: one does not begin.
        """
        self._charter, self._desk = charter, desk
        self.tell()
        for branch in self._branches:
            self._spawn(self._attend_forever(branch))
        if not await self.told(BEGIN_S):
            late = [str(branch.number) for branch in self._branches if not self._knows(branch)]
            raise FeedFailedError(
                f"lane {', '.join(late)} of feed {self._settings.name!r} did not begin within {BEGIN_S:g} s"
            )

    async def end(self) -> None:
        """After the feed failed or was stopped: lanes have told their callers why, and are gone when this returns."""
        if self._standing is not None:
            await self.told()
        for branch in self._branches:
            ray.kill(branch.actor)
        self._branches.clear()

    # ---- how things stand ----

    def tell(self) -> None:
        """Things may have changed: tell the lanes."""
        if not self._branches or not hasattr(self, "_desk"):
            return
        old, new = self._standing, self._compose()
        if old is None or _content(new) != _content(old):
            self._standing = new
            for branch in self._branches:
                branch.news.set()

    def _compose(self) -> Standing:
        crew, leaving = self._desk.core.crew.workers, self._production.leaving
        workforce = self._production.workforce.workers
        blocks = self._desk.core.blocks_per_epoch
        return Standing(
            version=(self._began, next(self._count)),
            workers=tuple(worker for name, worker in workforce.items() if name in crew and name not in leaving),
            leaving=frozenset(leaving),
            gone=dict(self._gone),
            dead=dict(self._dead),
            detached=self._detached(),
            homes=self._production.territory.atlas.newest,
            seats=frozenset(
                (member.name, member.cursor // blocks)
                for member in self._desk.core.roster.members.values()
                if (member.state is MemberState.SEAT or not member.asked) and member.cursor % blocks == 0
            ),
            failed=self._desk.core.failed,
        )

    def _detached(self) -> Counter[str]:
        """Consumer -> how often it was moved out of step, in all lanes together."""
        lanes = (self._desk.detached, *(branch.filing.detached for branch in self._branches))
        return sum(map(Counter, lanes), Counter[str]())

    async def told(self, within_s: float = TOLD_S) -> bool:
        """Wait until all lanes know how things stand; whether they do."""
        end = time.monotonic() + within_s
        while not (known := all(self._knows(branch) for branch in self._branches)) and time.monotonic() < end:
            await asyncio.sleep(0.005)
        return known

    def _knows(self, branch: _Branch) -> bool:
        return self._standing is not None and branch.filing.version == self._standing.version

    async def _attend_forever(self, branch: _Branch) -> None:
        while branch in self._branches:
            if await self._attend(branch) is None:
                await asyncio.sleep(RETRY_S)
            elif self._knows(branch):
                with contextlib.suppress(asyncio.TimeoutError):
                    await asyncio.wait_for(branch.news.wait(), TICK_S)
            branch.news.clear()

    async def _attend(self, branch: _Branch, *, in_full: bool = False) -> Filing | None:
        """Compare notes with a lane; None if it does not answer."""
        news = None if self._knows(branch) else self._standing
        charter = self._charter if branch.filing.version is None else None
        try:
            filing: Filing = await branch.actor.attend.remote(news, charter, in_full=in_full)
        except ray.exceptions.RayTaskError as error:
            self._give_up(f"an internal error in lane {branch.number}: {error.cause}")
            return None
        except ray.exceptions.RayError:
            branch.filing = Filing()
            return None
        self._take_in(branch, filing)
        return filing

    def _take_in(self, branch: _Branch, filing: Filing) -> None:
        before, branch.filing = branch.filing, filing
        for worker, meta in filing.made:
            self._books.finished(worker, meta, self._charter.info.sweep)
        for text in filing.notes:
            self._books.note(text)
        for worker, reason in filing.given_up.items():
            self._spawn(self.lost(worker, reason))
        if filing.failed is not None:
            self._give_up(filing.failed)
        self._dismiss_free()
        for consumer, times in filing.detached.items():
            if times > before.detached.get(consumer, 0):
                self._desk.send(ev.Detach(consumer))
                self.tell()

    def _give_up(self, reason: str) -> None:
        if self._desk.core.failed is None:
            self._fail(reason)

    async def filings(self) -> list[Filing]:
        """What each lane tells of itself now, in full; without those that do not answer in time."""
        if not self._branches:
            return []
        asked = [asyncio.ensure_future(self._attend(branch, in_full=True)) for branch in self._branches]
        done, _ = await asyncio.wait(asked, timeout=TOLD_S)
        return [filing for task in done if (filing := task.result()) is not None]

    @property
    def staged_bytes(self) -> int:
        """Bytes that the further lanes have staged, or have made, as far as they told."""
        return sum(branch.filing.staged_bytes for branch in self._branches)

    async def leave(self, consumer: str) -> None:
        """Somebody says that a consumer is done: end its session in the further lanes, too."""
        await self.told()  # seats that are held for its successor come first
        for branch in self._branches:
            branch.actor.leave.remote(consumer, None)

    # ---- workers, for the first lane's desk ----

    def worker(self, name: str) -> Hired | None:
        """A worker that is up, or None."""
        return self._production.worker(name)

    async def lost(self, name: str, reason: str) -> None:
        """A worker is gone, or is to be replaced."""
        await self._production.lost(name, reason)

    def retire(self, name: str, reason: str) -> None:
        """A worker is stuck: end it, and hire another."""
        self._gone.append((name, reason))
        self._production.retire(name)
        self.tell()

    def dismiss(self, name: str) -> None:
        """The first lane is done with a worker that leaves; it goes when all lanes are."""
        self._free.add(name)
        self._dismiss_free()

    def _dismiss_free(self) -> None:
        for name in list(self._free):
            if name not in self._production.leaving:
                self._free.remove(name)
            elif all(self._knows(branch) and name not in branch.filing.tasks for branch in self._branches):
                self._free.remove(name)
                self._production.dismiss(name)

    def heard(self, event: ev.Event) -> None:
        """The first lane's core was told something about workers or nodes."""
        match event:
            case ev.WorkerDown():
                self._gone.append((event.worker, event.reason))
            case ev.NodeDown():
                self._dead.append((event.node, event.reason))
        self.tell()


def _content(standing: Standing) -> tuple[Any, ...]:
    """What makes two standings different."""
    homes = standing.homes.version if standing.homes is not None else None
    names = tuple(worker.name for worker in standing.workers)
    told = standing.leaving, standing.gone, standing.dead, standing.detached, standing.seats, standing.failed
    return names, homes, told
