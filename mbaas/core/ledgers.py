"""Ledgers of a feed: the samples that each consumer received in each of its epochs, kept as long as the feed runs.

Ledgers are stored in pages of compressed JSON, about 50 bytes per ledger. Pages are persisted in this form for a later
coordinator. Only the newest page is kept as objects, and only that page is rewritten for a new ledger.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TypeVar

from msgspec import json

from mbaas.wire.samples import EpochLedger, LedgerEntry

Value = TypeVar("Value")

PAGE = 200
"""Ledgers per page; a page has about 10 kB when persisted."""

MOST_PAGES = 500
"""Largest number of pages; the oldest ones are dropped."""

KNOWN_CONSUMERS = 1_000
"""Largest number of consumers whose last ledgers can be looked up by name, and of loaders that are remembered."""


class LedgerBook:
    """All ledgers of a feed, oldest first.

    Attributes:
        inexact: number of ledgers that did not contain each sample of their epoch exactly once; above 0 only after a
            bug in mbaas.
    """

    def __init__(self) -> None:
        self.inexact = 0
        self._full: dict[int, bytes] = {}  # full pages by number, as compressed JSON
        self._newest: list[LedgerEntry] = []  # the newest page, not full
        self._number = 0  # number of the newest page
        self._changed: set[int] = set()
        self._last: dict[str, EpochLedger] = {}  # by consumer
        self._number_of: dict[str, int] = {}  # loader -> number of its last ledger; loaders send them in order

    def add(self, entry: LedgerEntry) -> bool:
        """Add a ledger; return False if it is known. A loader repeats its ledgers when an answer was lost."""
        if entry.number <= self._number_of.get(entry.loader, -1):
            return False
        self._newest.append(entry)
        self._changed.add(self._number)
        self._note(entry)
        if len(self._newest) == PAGE:
            self._full[self._number] = _page(self._newest)
            self._newest, self._number = [], self._number + 1
            if len(self._full) > MOST_PAGES:
                self._changed.add(given_up := min(self._full))
                del self._full[given_up]
        return True

    def _note(self, entry: LedgerEntry) -> None:
        self.inexact += not entry.ledger.exact
        _put_last(self._last, entry.consumer, entry.ledger)
        _put_last(self._number_of, entry.loader, entry.number)

    def take_changed(self) -> dict[int, bytes | None]:
        """Return the pages to persist, by number; None for a page to delete."""
        changed, self._changed = self._changed, set()
        return {n: _page(self._newest) if n == self._number else self._full.get(n) for n in sorted(changed)}

    def keep_again(self, numbers: Iterable[int]) -> None:
        """Mark pages from `take_changed` that could not be persisted as changed."""
        self._changed.update(numbers)

    def go_on(self, pages: Mapping[int, bytes]) -> None:
        """Load the pages of a predecessor; call this before `add`."""
        entries: tuple[LedgerEntry, ...] = ()
        for number in sorted(pages):
            entries = read(pages[number])
            for entry in entries:
                self._note(entry)
            self._full[number], self._number = pages[number], number + 1
        if entries and len(entries) < PAGE:
            self._number -= 1
            self._newest = list(entries)
            del self._full[self._number]

    def page(self, number: int) -> tuple[LedgerEntry, ...]:
        """Return page ``number``, counted from the oldest; () if there is none."""
        full = list(self._full.values())
        if number < len(full):
            return read(full[number])
        return tuple(self._newest) if number == len(full) else ()

    def last_of(self, consumer: str) -> EpochLedger | None:
        """Return the newest ledger of a consumer, or None."""
        return self._last.get(consumer)

    def newest(self, most: int) -> list[LedgerEntry]:
        """Return the newest ledgers, at most ``most``, oldest first."""
        found = list(self._newest)
        for number in sorted(self._full, reverse=True):
            if len(found) >= most:
                break
            found[:0] = read(self._full[number])
        return found[-most:]


def _put_last(known: dict[str, Value], name: str, value: Value) -> None:
    known.pop(name, None)
    known[name] = value
    if len(known) > KNOWN_CONSUMERS:
        del known[next(iter(known))]


def _page(entries: Iterable[LedgerEntry]) -> bytes:
    rows = [(each.consumer, each.loader, each.number, each.at, each.ledger) for each in entries]
    return zlib.compress(json.encode(rows))


@lru_cache(maxsize=8)  # a page takes 1 ms, and each status shows the newest ones
def read(page: bytes) -> tuple[LedgerEntry, ...]:
    """Return the entries of a page."""
    rows = json.decode(zlib.decompress(page), type=list[tuple[str, str, int, float, EpochLedger]])
    return tuple(LedgerEntry(*row) for row in rows)
