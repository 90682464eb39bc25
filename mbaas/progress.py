"""How far long work is: whoever does it counts, and whoever waits for it may watch.

Readers of datasets count what they list and look into. Nobody has to watch, and nothing is passed through their
arguments for it: who watches is known within the thread, or the task, that watches. In a notebook, where nobody does,
work that takes long shows a bar by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from mbaas import notebook

_T = TypeVar("_T")


@dataclass(frozen=True)
class Progress:
    """How far a piece of work is.

    Attributes:
        things: what is worked through, in the plural: "classes", "shards", "files".
        done, total: how many of them.
    """

    things: str
    done: int
    total: int


Watch = Callable[[Progress], None]

_watch: ContextVar[Watch | None] = ContextVar("mbaas_progress", default=None)


@contextmanager
def watched(tell: Watch) -> Iterator[None]:
    """Call ``tell`` with each step of what is tracked within."""
    token = _watch.set(tell)
    try:
        yield
    finally:
        _watch.reset(token)


def track(items: Iterable[_T], things: str, total: int, *, amount: Callable[[Any], int] = lambda _: 1) -> Iterator[_T]:
    """Pass items on, and tell whoever watches, or a notebook, how many have come.

    Args:
        items: results, as they come; those of a pool of threads are taken by the thread that watches.
        things: what they are, in the plural.
        total: how many will come.
        amount: for how many things an item stands.
    """
    tell, done = _watch.get() or _in_notebook(), 0
    if tell is None:
        yield from items
        return
    tell(Progress(things, done, total))
    for item in items:
        done += amount(item)
        tell(Progress(things, done, total))
        yield item


def _in_notebook() -> Watch | None:
    """Return what shows progress in a notebook; None elsewhere."""
    if not notebook.is_running():
        return None
    bar = notebook.Bar()
    return lambda progress: bar.show(progress.things, progress.done, progress.total)
