"""No ledger is lost or counted twice, even when a coordinator dies, and their number is bounded."""

from __future__ import annotations

import itertools

import pytest

from mbaas.core import ledgers
from mbaas.core.ledgers import PAGE, LedgerBook, read
from mbaas.wire.samples import EpochLedger, LedgerEntry


def entry(consumer: str, epoch: int, *, loader: str = "", number: int | None = None, exact: bool = True) -> LedgerEntry:
    """Entry of a consumer's only loader, numbered by epoch, unless arguments differ."""
    got = 10 if exact else 9
    ledger = EpochLedger(epoch, epoch + 3, got, 2**64 - 1, 10, 2**64 - 1, seconds=1.5, begin=4, shuffled="3")
    return LedgerEntry(consumer, loader or f"of {consumer}", epoch if number is None else number, 1e9 + epoch, ledger)


def all_of(book: LedgerBook) -> list[LedgerEntry]:
    pages = itertools.takewhile(bool, map(book.page, itertools.count()))
    return [entry for page in pages for entry in page]


def test_what_is_written_down_is_read_as_it_was() -> None:
    book, entries = LedgerBook(), [entry("ann", 0), entry("bob é", 1, exact=False)]
    for each in entries:
        book.add(each)
    page = book.take_changed()[0]
    assert page is not None
    assert read(page) == tuple(entries)
    assert [(e.ledger.begin, e.ledger.shuffled, e.ledger.seconds) for e in read(page)] == [(4, "3", 1.5)] * 2


def test_a_ledger_that_is_sent_again_is_one() -> None:
    book = LedgerBook()
    assert [book.add(entry("ann", epoch)) for epoch in (0, 1, 1, 0, 2)] == [True, True, False, False, True]
    assert book.last_of("ann") == entry("ann", 2).ledger
    assert book.add(entry("ann", 0, loader="another")), "a new loader counts from 0"
    assert [e.ledger.epoch for e in all_of(book)] == [0, 1, 2, 0]
    assert book.add(entry("ann", 0, number=3)), "a trial that loads an older state has an epoch twice"
    assert book.last_of("bob") is None


def test_of_any_number_of_ledgers_that_are_sent_again_none_is_entered_twice() -> None:
    """The loader got no answer and finished another epoch meanwhile; another loader's entry came in between."""
    book = LedgerBook()
    assert [book.add(entry("ann", epoch)) for epoch in range(50)] == [True] * 50
    book.add(entry("ann", 0, loader="another"))
    assert [book.add(entry("ann", epoch)) for epoch in range(51)] == [False] * 50 + [True]


def test_a_successor_has_all_that_was_kept_and_goes_on_with_it() -> None:
    book, kept = LedgerBook(), dict[int, bytes | None]()
    for epoch in range(2 * PAGE + 10):
        book.add(entry("ann", epoch, exact=epoch != 5))
        if epoch % 7 == 0:
            kept |= book.take_changed()
    kept |= book.take_changed()
    assert book.take_changed() == {}
    successor = LedgerBook()
    successor.go_on({number: page for number, page in kept.items() if page is not None})
    assert all_of(successor) == all_of(book)
    assert successor.inexact == 1
    assert [successor.add(entry("ann", 2 * PAGE + n)) for n in range(10)] == [False] * 10, "it received no answer"
    assert successor.add(entry("ann", 2 * PAGE + 10))
    assert list(successor.take_changed()) == [2], "only the last page is written again"


@pytest.mark.parametrize("count", [0, PAGE])
def test_a_successor_begins_a_page_behind_those_that_are_full(count: int) -> None:
    book, successor = LedgerBook(), LedgerBook()
    for epoch in range(count):
        book.add(entry("ann", epoch))
    successor.go_on({number: page for number, page in book.take_changed().items() if page is not None})
    successor.add(entry("ann", count))
    assert {number: read(page) for number, page in successor.take_changed().items() if page is not None} == {
        count // PAGE: (entry("ann", count),)
    }
    assert len(all_of(successor)) == count + 1


def test_what_could_not_be_kept_is_kept_with_the_next() -> None:
    book = LedgerBook()
    for epoch in range(PAGE):
        book.add(entry("ann", epoch))
    book.keep_again(book.take_changed())
    book.add(entry("ann", PAGE))
    entries = {number: len(read(page)) for number, page in book.take_changed().items() if page is not None}
    assert entries == {0: PAGE, 1: 1}


def test_of_a_long_run_the_oldest_pages_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledgers, "MOST_PAGES", 3)
    monkeypatch.setattr(ledgers, "KNOWN_CONSUMERS", 5)
    book, kept = LedgerBook(), dict[int, bytes | None]()
    for number in range(4 * PAGE):
        book.add(entry(f"trial-{number}", 0, exact=number > 0))
        kept |= book.take_changed()
    assert [e.consumer for e in all_of(book)] == [f"trial-{number}" for number in range(PAGE, 4 * PAGE)]
    assert [number for number, page in kept.items() if page is None] == [0]
    assert book.inexact == 1, "it is not forgotten that one did not match"
    assert book.last_of(f"trial-{4 * PAGE - 5}") is not None
    assert book.last_of(f"trial-{4 * PAGE - 6}") is None
    assert [e.consumer for e in book.newest(3)] == [f"trial-{4 * PAGE - n}" for n in (3, 2, 1)]
    assert len(book.newest(10**6)) == 3 * PAGE
