"""Calls of one machine's consumers that are taken to a coordinator many at a time: both ends, without Ray.

Ray takes as long over a call with one consumer's request as over one with those of a whole machine. So the cache node
of a machine listens in a coordinator's place (`mbaas.cache.relay`), gathers what consumers send, and takes it to the
coordinator in one call, an exchange, which brings answers back: to these requests and to those of earlier exchanges,
as soon as there are any. At most one exchange waits for answers, for the next one ends it.

Exchanges are numbered, because one may overtake another. What a request or an answer says is not looked at here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

HANG_UP = b""
"""The answer to what is no request: who sent it is cut off."""

ConsumerT = TypeVar("ConsumerT", bound=Hashable)


class Exchange(Struct, frozen=True):
    """One call to the coordinator.

    Attributes:
        number: counts the exchanges of one relay, from 1.
        requests: number of a request -> what the consumer sent.
    """

    number: int
    requests: dict[int, bytes]


class NodeEnd(Generic[ConsumerT]):
    """Requests of a machine's consumers until they are answered, and when the next exchange is due.

    Attributes:
        consumers: who sent a request and did not leave.
    """

    def __init__(self) -> None:
        self._numbers, self._exchanges = itertools.count(1), itertools.count(1)
        self.consumers: set[ConsumerT] = set()
        self._unsent: dict[int, bytes] = {}
        self._waiting: dict[int, ConsumerT] = {}  # by the numbers of requests that have no answer yet
        self._under_way: set[int] = set()

    def request(self, consumer: ConsumerT, request: bytes) -> None:
        """Take in what a consumer sent."""
        number = next(self._numbers)
        self.consumers.add(consumer)
        self._waiting[number] = consumer
        self._unsent[number] = request

    def leave(self, consumer: ConsumerT) -> None:
        """Forget a consumer that is gone: what it sent needs no answer, nor to be sent."""
        self.consumers.discard(consumer)
        self._waiting = {number: other for number, other in self._waiting.items() if other != consumer}
        self._unsent = {number: request for number, request in self._unsent.items() if number in self._waiting}

    @property
    def is_due(self) -> bool:
        """Whether an exchange is to be made: there is something to send, or nothing that would bring answers."""
        return bool(self._unsent) or (bool(self._waiting) and not self._under_way)

    @property
    def is_complete(self) -> bool:
        """Whether no more requests are to be expected before the next answers: every consumer waits for one."""
        return self.consumers == set(self._waiting.values())

    def begin(self) -> Exchange:
        """Begin an exchange with all that is to be sent."""
        exchange = Exchange(next(self._exchanges), self._unsent)
        self._unsent = {}
        self._under_way.add(exchange.number)
        return exchange

    def end(self, number: int, answers: dict[int, bytes]) -> list[tuple[ConsumerT, bytes]]:
        """Take in what an exchange brought; return the answers of consumers that are still there."""
        self._under_way.discard(number)
        return [(self._waiting.pop(request), answer) for request, answer in answers.items() if request in self._waiting]


class CoordinatorEnd:
    """Answers for one relay until an exchange takes them there."""

    def __init__(self) -> None:
        self._newest = 0
        self._answers: dict[int, bytes] = {}

    def begin(self, exchange: int) -> None:
        """Take in that an exchange came; those before it are not to wait any more."""
        self._newest = max(self._newest, exchange)

    def answer(self, request: int, answer: bytes) -> None:
        """Keep an answer for the next look of an exchange."""
        self._answers[request] = answer

    def look(self, exchange: int) -> dict[int, bytes] | None:
        """Return what an exchange brings back; None if it is to wait for answers."""
        if exchange < self._newest:
            return {}
        answers, self._answers = self._answers, {}
        return answers or None
