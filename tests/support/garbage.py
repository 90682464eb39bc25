"""Runs pure code without the garbage collector."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_garbage() -> Iterator[None]:
    """Keep garbage until the end: a schedule leaves 150 kB, and searching it takes a quarter of the time."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect()
