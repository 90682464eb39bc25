"""Waiting for something to become true, with a deadline and a name."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PERIOD_S = 0.05
"""Pause between two looks, most of which ask a coordinator."""


def wait_until(look: Callable[[], T], what: str, *, deadline_s: float = 30.0) -> T:
    """The first result of ``look`` that is true.

    Raises:
        AssertionError: there was none within ``deadline_s``; says ``what`` was awaited and what ``look`` gave last.
    """
    end = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s until {what}; the last look gave {found!r}")
        time.sleep(PERIOD_S)
    return found
