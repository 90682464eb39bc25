"""The ledgers of a feed: what each consumer received in each of its epochs, for as long as the feed runs.

They are kept in pages, as they are written down for a coordinator that comes after this one: JSON, compressed, some
fifty bytes for a ledger. Only the newest page is kept as objects, and only it is written again when a ledger comes.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import TypeVar

from mbaas.messages import EpochLedger, LedgerEntry

Value = TypeVar("Value")

PAGE = 200
"""Ledgers on a page: about 10 kB when written down."""

MOST_PAGES = 500
"""The most pages that are kept; the oldest of a longer run are given up."""

KNOWN_CONSUMERS = 1_000
"""The most consumers whose last ledgers are known by their names, and the most loaders that are known."""


class LedgerBook:
    """All ledgers of a feed, oldest first.

    Attributes:
        inexact: how many did not hold each sample of their epoch exactly once; stays 0 or mbaas has a bug.
    """

    def __init__(self) -> None:
        self.inexact = 0
        self._full: dict[int, bytes] = {}  # pages by number, as `written` writes them
        self._newest: list[LedgerEntry] = []  # the page after them, which is not full
        self._lines: list[str] = []  # the same, each as it is written down: the page is written whenever one comes
        self._number = 0  # of that page
        self._changed: set[int] = set()
        self._last: dict[str, EpochLedger] = {}  # by consumer
        self._number_of: dict[str, int] = {}  # loader -> of its last ledger; a loader sends its ledgers in order

    def add(self, entry: LedgerEntry) -> bool:
        """Enter a ledger; return whether it is new. A loader that heard no answer sends its ledgers again."""
        if entry.number <= self._number_of.get(entry.loader, -1):
            return False
        self._newest.append(entry)
        self._lines.append(_line(entry))
        self._changed.add(self._number)
        self._note(entry)
        if len(self._newest) == PAGE:
            self._full[self._number] = _page(self._lines)
            self._newest, self._lines, self._number = [], [], self._number + 1
            if len(self._full) > MOST_PAGES:
                self._changed.add(given_up := min(self._full))
                del self._full[given_up]
        return True

    def _note(self, entry: LedgerEntry) -> None:
        self.inexact += not entry.ledger.exact
        _put_last(self._last, entry.consumer, entry.ledger)
        _put_last(self._number_of, entry.loader, entry.number)

    def take_changed(self) -> dict[int, bytes | None]:
        """Return the pages that are to be written down, by number; None for one that is given up."""
        changed, self._changed = self._changed, set()
        return {n: _page(self._lines) if n == self._number else self._full.get(n) for n in sorted(changed)}

    def keep_again(self, numbers: Iterable[int]) -> None:
        """Note that pages which `take_changed` returned could not be written down."""
        self._changed.update(numbers)

    def go_on(self, pages: Mapping[int, bytes]) -> None:
        """Enter what a predecessor wrote down, before anything else."""
        entries: tuple[LedgerEntry, ...] = ()
        for number in sorted(pages):
            entries = read(pages[number])
            for entry in entries:
                self._note(entry)
            self._full[number], self._number = pages[number], number + 1
        if entries and len(entries) < PAGE:
            self._number -= 1
            self._newest, self._lines = list(entries), [*map(_line, entries)]
            del self._full[self._number]

    def page(self, number: int) -> tuple[LedgerEntry, ...]:
        """Return the page that is the given number from the oldest one; () if there is none."""
        full = list(self._full.values())
        if number < len(full):
            return read(full[number])
        return tuple(self._newest) if number == len(full) else ()

    def last_of(self, consumer: str) -> EpochLedger | None:
        """Return the ledger of a consumer that came last; None if there is none."""
        return self._last.get(consumer)

    def newest(self, most: int) -> list[LedgerEntry]:
        """Return the newest ledgers, oldest first."""
        found = list(self._newest)
        for number in sorted(self._full, reverse=True):
            if len(found) >= most:
                break
            found[:0] = read(self._full[number])
        return found[-most:]


def _put_last(known: dict[str, Value], name: str, value: Value) -> None:
    """Note what belongs to a name; of too many, who was heard of least lately is forgotten."""
    known.pop(name, None)
    known[name] = value
    if len(known) > KNOWN_CONSUMERS:
        del known[next(iter(known))]


def written(entries: Iterable[LedgerEntry]) -> bytes:
    """Write entries down: compressed JSON."""
    return _page(map(_line, entries))


def _line(entry: LedgerEntry) -> str:
    return json.dumps([entry.consumer, entry.loader, entry.number, entry.at, asdict(entry.ledger)])


def _page(lines: Iterable[str]) -> bytes:
    return zlib.compress(f"[{', '.join(lines)}]".encode())


@lru_cache(maxsize=8)  # a page takes a millisecond, and each status shows the last ones
def read(page: bytes) -> tuple[LedgerEntry, ...]:
    """Read what `written` wrote."""
    return tuple(
        LedgerEntry(consumer, loader, number, at, EpochLedger(**ledger))
        for consumer, loader, number, at, ledger in json.loads(zlib.decompress(page))
    )
