"""Prep workers that work for another feed than the one that hired them."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Collection
from typing import Any, Protocol

import ray

from mbaas.coordinator import peer_feeds
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.worker_pool import WorkerHandle, WorkerPool


class Employer(Protocol):
    """For whom the workers of a feed work, as far as loans must know.

    Attributes:
        workforce: all of them that are here.
        wanted: how many the feed is to have.
        ended: whether it has ended.
    """

    worker_pool: WorkerPool
    wanted: int
    ended: bool

    def dispensable(self) -> list[WorkerHandle]:
        """Workers that are here and stay."""

    async def employ(self, hired: WorkerHandle) -> None:
        """Give an engaged worker work."""

    def hire_more(self, workers: int) -> None:
        """Hire so many in addition."""


class Loans:
    """Of one feed: its workers that are elsewhere, and others' that are here.

    Args:
        feed: its name.
        production: the feed's.
        books: where it is noted that a worker was not taken, or comes back.

    Attributes:
        lent: feed -> handles of own workers that work for it.
    """

    def __init__(self, feed: str, supervisor: Employer, counters: Counters) -> None:
        self._feed, self._supervisor, self._counters = feed, supervisor, counters
        self.lent: dict[str, list[Any]] = {}

    @property
    def borrowed(self) -> dict[str, int]:
        """Feed -> workers of it that are here and stay."""
        staying = self._supervisor.dispensable()
        return dict(Counter(worker.owner for worker in staying if worker.owner is not None))

    async def hand_over(self, worker: WorkerHandle, target: str) -> None:
        """An idle worker goes to another feed; if that does not take it, back to work."""
        offer = peer_feeds.Offer(worker.actor, worker.owner or self._feed)
        if not await peer_feeds.offer(target, offer):
            self._counters.note(f"{target} did not take {worker.name}")
            await self.take_on(offer)
        elif worker.owner is None:
            self.lent.setdefault(target, []).append(worker.actor)

    async def take_on(self, offer: peer_feeds.Offer) -> bool:
        """Have an idle worker work here, a borrowed one or one that comes back; False if it cannot."""
        if self._supervisor.ended:
            return False
        owner = None if offer.owner == self._feed else offer.owner
        try:
            worker = await self._supervisor.worker_pool.engage(offer.actor, owner)
        except ray.exceptions.RayError:
            if owner is None:
                self.lost(offer.actor)
            return False
        self._strike(offer.actor)
        self._supervisor.wanted += 1
        await self._supervisor.employ(worker)
        return True

    async def fetch_back(self, gone: Collection[str]) -> None:
        """Have the workers back that were lent to feeds which are gone."""
        for feed in gone:
            for actor in self.lent[feed][:]:
                self._counters.note(f"{feed} is gone, and a worker that it had borrowed comes back")
                await self.take_on(peer_feeds.Offer(actor, self._feed))

    def lost(self, actor: Any) -> None:
        """An own worker that was lent is gone: hire another."""
        self._strike(actor)
        self._supervisor.hire_more(1)

    async def end(self) -> None:
        """The feed ends: what is borrowed goes home, what is lent ends."""
        worker_pool = self._supervisor.worker_pool
        borrowed = [worker for worker in worker_pool.workers.values() if worker.owner is not None]
        for worker in borrowed:
            worker_pool.release(worker.name)
        await asyncio.gather(*(_send_home(worker) for worker in borrowed))
        for actor in itertools.chain(*self.lent.values()):
            ray.kill(actor)

    def _strike(self, actor: Any) -> None:
        """A worker is not lent any more."""
        self.lent = {
            feed: left for feed, lent in self.lent.items() if (left := [other for other in lent if other != actor])
        }


async def _send_home(worker: WorkerHandle) -> None:
    assert worker.owner is not None
    if not await peer_feeds.offer(worker.owner, peer_feeds.Offer(worker.actor, worker.owner)):
        ray.kill(worker.actor)
