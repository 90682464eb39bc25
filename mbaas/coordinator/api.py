"""What consumers call, on every coordinator of a feed."""

from __future__ import annotations

from mbaas.coordinator.service import ConsumerService
from mbaas.coordinator.stories import LaneStory, told_by
from mbaas.core import events as ev
from mbaas.messages import POLL_S, Admission, ConsumerReport, Delivery, PartLost


class ConsumerApi:
    """The calls of consumers, which every coordinator of a feed takes; each has a desk once it is open."""

    _service: ConsumerService

    async def _until_open(self) -> None:
        """Wait until there is a desk.

        Raises:
            FeedFailedError: there is none in time, or there will be none.
        """
        raise NotImplementedError

    async def join(self, consumer: str, start: int | None, flexible: bool) -> Admission:
        """Open a session.

        Raises:
            FeedFailedError: the feed cannot go on.
        """
        await self._until_open()
        return self._service.join(consumer, start, flexible)

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
        await self._until_open()
        for event in lost:
            self._service.send(event)
        return await self._service.ask(ev.Ask(consumer, session, cursor, released, done, want), poll_s)

    async def hand_back(self, consumer: str, session: int, cursor: int, released: int) -> None:
        """A consumer gives up what it was given from ``cursor`` on, until it asks again."""
        await self._until_open()
        self._service.send(ev.HandBack(consumer, session, cursor, released))

    async def is_given_up(self, block: int, parts: list[tuple[int, int]]) -> bool:
        """Whether one of the parts, given as (number, task that made it), is not what the block is made of any more."""
        await self._until_open()
        return not all(self._service.core.window.has(block, part, task) for part, task in parts)

    async def heartbeat(self, consumer: str, session: int, released: int, done: int, report: ConsumerReport) -> bool:
        """A consumer is alive; False if its session is not open any more."""
        await self._until_open()
        self._take_report(consumer, report)
        answer = self._service.send(ev.Heartbeat(consumer, session, released, done))
        return not any(isinstance(i, ev.Refuse) and i.consumer == consumer for i in answer)

    async def leave(
        self,
        consumer: str,
        session: int | None,
        reserve: bool = False,
        report: ConsumerReport | None = None,
    ) -> None:
        """A consumer is done; with ``reserve`` its place is held for a successor."""
        await self._until_open()
        if report is not None:
            self._take_report(consumer, report)
        self._service.send(ev.Leave(consumer, session, reserve))

    async def lane_story(self, thing: str) -> LaneStory:
        """What this lane knows of a block, a consumer or a prep worker."""
        await self._until_open()
        return told_by(self._service.core, self._service.lane, thing)

    def _take_report(self, consumer: str, report: ConsumerReport) -> None:
        """What a consumer says of itself; only the first lane has a use for it."""
