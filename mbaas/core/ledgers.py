"""The ledgers of a feed: what each consumer received in each of its epochs, for as long as the feed runs.

A ledger takes some hundred bytes, whatever the size of the dataset. They are kept in pages, so that few of them have to
be written down again when one is added, and a coordinator that is restarted reads them all.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict

from mbaas.messages import EpochLedger, LedgerEntry

PAGE = 200
"""Ledgers on a page: about 60 kB when written down."""

MOST_PAGES = 500
"""The most pages that are kept; the oldest of a longer run are given up."""

KNOWN_CONSUMERS = 10_000
"""The most consumers whose last ledgers are known by their names."""

MOST_SENT_AGAIN = 8
"""How many ledgers of each consumer are remembered, to recognise those that a loader sends again because it heard no
answer.
"""


class LedgerBook:
    """All ledgers of a feed, oldest first.

    Attributes:
        inexact: how many did not hold each sample of their epoch exactly once; stays 0 or mbaas has a bug.
    """

    def __init__(self) -> None:
        self.inexact = 0
        self._pages: dict[int, list[LedgerEntry]] = {}
        self._changed: set[int] = set()
        self._last: dict[str, deque[LedgerEntry]] = {}

    def add(self, entry: LedgerEntry) -> bool:
        """Enter a ledger; return whether it is new, and was not sent before."""
        # Its number does not tell: a trial that loads an older state has an epoch twice, and takes another time for it.
        if any(_is_same(entry, last) for last in self._last.get(entry.consumer, ())):
            return False
        number = max(self._pages, default=0)
        if len(self._pages.get(number, ())) >= PAGE:
            number += 1
        self._pages.setdefault(number, []).append(entry)
        self._changed.add(number)
        self._note(entry)
        if len(self._pages) > MOST_PAGES:
            self._changed.add(given_up := min(self._pages))
            del self._pages[given_up]
        return True

    def _note(self, entry: LedgerEntry) -> None:
        self.inexact += not entry.ledger.exact
        last = self._last.pop(entry.consumer, None) or deque(maxlen=MOST_SENT_AGAIN)
        last.append(entry)
        self._last[entry.consumer] = last  # the consumer that was heard of last is at the end
        if len(self._last) > KNOWN_CONSUMERS:
            del self._last[next(iter(self._last))]

    def take_changed(self) -> dict[int, bytes | None]:
        """Return the pages that are to be written down, by number; None for one that is given up."""
        changed, self._changed = self._changed, set()
        return {number: written(self._pages[number]) if number in self._pages else None for number in sorted(changed)}

    def keep_again(self, numbers: Iterable[int]) -> None:
        """Note that pages which `take_changed` returned could not be written down."""
        self._changed.update(numbers)

    def go_on(self, pages: Mapping[int, bytes]) -> None:
        """Enter what a predecessor wrote down, before anything else."""
        for number in sorted(pages):
            self._pages[number] = read(pages[number])
            for entry in self._pages[number]:
                self._note(entry)

    def page(self, number: int) -> tuple[LedgerEntry, ...]:
        """Return the page that is the given number from the oldest one; () if there is none."""
        pages = list(self._pages.values())
        return tuple(pages[number]) if number < len(pages) else ()

    def last_of(self, consumer: str) -> EpochLedger | None:
        """Return the ledger of a consumer that came last; None if there is none."""
        last = self._last.get(consumer)
        return last[-1].ledger if last else None

    def newest(self, most: int) -> list[LedgerEntry]:
        """Return the newest ledgers, oldest first."""
        found: list[LedgerEntry] = []
        for number in sorted(self._pages, reverse=True):
            found[:0] = self._pages[number]
            if len(found) >= most:
                break
        return found[-most:]


def _is_same(one: LedgerEntry, other: LedgerEntry) -> bool:
    return (one.loader, one.ledger, one.ledger.seconds) == (other.loader, other.ledger, other.ledger.seconds)


def written(entries: Sequence[LedgerEntry]) -> bytes:
    """Write entries down as JSON."""
    return json.dumps([[e.consumer, e.loader, e.at, asdict(e.ledger)] for e in entries]).encode()


def read(page: bytes) -> list[LedgerEntry]:
    """Read what `written` wrote."""
    return [
        LedgerEntry(consumer, loader, at, EpochLedger(**ledger)) for consumer, loader, at, ledger in json.loads(page)
    ]
