"""Batching of a machine's consumer calls to a coordinator: both ends, without Ray.

A Ray call costs the same with one consumer's request as with the requests of a whole machine. So the cache node of a
machine listens for the coordinator (`mbaas.cache.relay`), collects requests, and sends them in one call, an exchange.
An exchange returns answers to these and to earlier requests, as soon as there are any. At most one exchange waits for
answers, because the next one ends it.

Exchanges are numbered, because one may overtake another. The contents of requests and answers are not inspected here.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable
from typing import Generic, TypeVar

from msgspec import Struct

HANG_UP = b""
"""The answer to an invalid request: its sender is disconnected."""

ConsumerT = TypeVar("ConsumerT", bound=Hashable)


class Exchange(Struct, frozen=True):
    """One call to the coordinator.

    Attributes:
        number: counts the exchanges of one relay, from 1.
        requests: number of a request -> the consumer's message.
    """

    number: int
    requests: dict[int, bytes]


class NodeEnd(Generic[ConsumerT]):
    """Pending requests of a machine's consumers, and the decision when the next exchange is due.

    Attributes:
        consumers: consumers that sent a request and did not leave.
    """

    def __init__(self) -> None:
        self._numbers, self._exchanges = itertools.count(1), itertools.count(1)
        self.consumers: set[ConsumerT] = set()
        self._unsent: dict[int, bytes] = {}
        self._waiting: dict[int, ConsumerT] = {}  # by the numbers of unanswered requests
        self._under_way: set[int] = set()

    def request(self, consumer: ConsumerT, request: bytes) -> None:
        """Add a consumer's request."""
        number = next(self._numbers)
        self.consumers.add(consumer)
        self._waiting[number] = consumer
        self._unsent[number] = request

    def leave(self, consumer: ConsumerT) -> None:
        """Remove a consumer that is gone, and its requests."""
        self.consumers.discard(consumer)
        self._waiting = {number: other for number, other in self._waiting.items() if other != consumer}
        self._unsent = {number: request for number, request in self._unsent.items() if number in self._waiting}

    @property
    def is_due(self) -> bool:
        """True if an exchange must start: there are unsent requests, or unanswered ones without an open exchange."""
        return bool(self._unsent) or (bool(self._waiting) and not self._under_way)

    @property
    def is_complete(self) -> bool:
        """True if every consumer waits for an answer, so that no more requests can arrive before the next answers."""
        return self.consumers == set(self._waiting.values())

    def begin(self) -> Exchange:
        """Begin an exchange with all unsent requests."""
        exchange = Exchange(next(self._exchanges), self._unsent)
        self._unsent = {}
        self._under_way.add(exchange.number)
        return exchange

    def end(self, number: int, answers: dict[int, bytes]) -> list[tuple[ConsumerT, bytes]]:
        """End an exchange; return its answers for consumers that are still connected."""
        self._under_way.discard(number)
        return [(self._waiting.pop(request), answer) for request, answer in answers.items() if request in self._waiting]


class CoordinatorEnd:
    """Answers for one relay, until an exchange fetches them."""

    def __init__(self) -> None:
        self._newest = 0
        self._answers: dict[int, bytes] = {}

    def begin(self, exchange: int) -> None:
        """Record an exchange; older ones return empty at once."""
        self._newest = max(self._newest, exchange)

    def answer(self, request: int, answer: bytes) -> None:
        """Store an answer for the next `look` of an exchange."""
        self._answers[request] = answer

    def look(self, exchange: int) -> dict[int, bytes] | None:
        """Return the answers for an exchange; None if it must wait."""
        if exchange < self._newest:
            return {}
        answers, self._answers = self._answers, {}
        return answers or None
