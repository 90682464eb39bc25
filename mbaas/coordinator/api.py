"""What consumers call, on every coordinator of a feed."""

from __future__ import annotations

import abc

from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.stories import LaneStory, told_by
from mbaas.core import events as ev
from mbaas.messages import POLL_S, Admission, ConsumerReport, Delivery, PartLost


class ConsumerApi(abc.ABC):
    """The calls of consumers, which every coordinator of a feed takes."""

    @abc.abstractmethod
    async def _until_open(self) -> ConsumerService:
        """Wait until blocks are served here; who serves them.

        Raises:
            FeedFailedError: that is not so in time, or will never be.
        """

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        service = await self._until_open()
        return service.join(consumer, start, flexible)

    async def ask(
        self,
        consumer: str,
        session: int,
        cursor: int,
        released: int,
        done: int,
        want: int,
        poll_s: float = POLL_S,
        lost: tuple[PartLost, ...] = (),
    ) -> Delivery:
        """Wait until at least one block from ``cursor`` on is there, at most ``poll_s``.

        ``lost`` are parts of blocks that the consumer was given and could not read.
        """
        service = await self._until_open()
        for event in lost:
            service.send(event)
        return await service.ask(ev.Ask(consumer, session, cursor, released, done, want), poll_s)

    async def hand_back(self, consumer: str, session: int, cursor: int, released: int) -> None:
        """A consumer gives up what it was given from ``cursor`` on, until it asks again."""
        service = await self._until_open()
        service.send(ev.HandBack(consumer, session, cursor, released))

    async def is_given_up(self, block: int, parts: list[tuple[int, int]]) -> bool:
        """Whether one of the parts, given as (number, task that made it), is not what the block is made of any more."""
        service = await self._until_open()
        return not all(service.core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """A consumer is alive; False if its session is not open any more."""
        service = await self._until_open()
        self._take_report(consumer, report)
        answer = service.send(ev.Heartbeat(consumer, session, released, done))
        return not any(isinstance(i, ev.Refuse) and i.consumer == consumer for i in answer)

    async def leave(
        self,
        consumer: str,
        session: int | None,
        reserve: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """A consumer is done; with ``reserve`` its place is held for a successor."""
        service = await self._until_open()
        if report is not None:
            self._take_report(consumer, report)
        service.send(ev.Leave(consumer, session, reserve))

    async def lane_story(self, thing: str) -> LaneStory:
        """What this lane knows of a block, a consumer or a prep worker."""
        service = await self._until_open()
        return told_by(service.core, service.lane, thing)

    @abc.abstractmethod
    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """Enter what a consumer says of itself; only the first lane has a use for it."""
