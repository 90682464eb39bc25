"""Progress of long work, such as the listing of a dataset.

Readers of datasets report progress without an argument for it: the observer is a context variable of the thread or
task. In a notebook without an observer, long work shows a bar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

from mbaas.base import notebook

_T = TypeVar("_T")


Watch = Callable[[str, int, int], None]
"""Called with the kind of items, in the plural ("classes", "shards", "files"), the number done, and their total."""

_watch: ContextVar[Watch | None] = ContextVar("mbaas_progress", default=None)


@contextmanager
def watched(tell: Watch) -> Iterator[None]:
    """Call ``tell`` with each step of the work tracked in this context."""
    token = _watch.set(tell)
    try:
        yield
    finally:
        _watch.reset(token)


def track(items: Iterable[_T], things: str, total: int, *, amount: Callable[[Any], int] = lambda _: 1) -> Iterator[_T]:
    """Yield items, and report their number to the observer or the notebook; an item stands for ``amount`` things.

    For results of a thread pool, iterate in the observing thread.
    """
    tell, done = _watch.get(), 0
    if tell is None and notebook.is_running():
        tell = notebook.Bar().show
    if tell is None:
        yield from items
        return
    tell(things, done, total)
    for item in items:
        done += amount(item)
        tell(things, done, total)
        yield item
