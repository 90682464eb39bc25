"""Waits for a condition, with a deadline and a description."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

PERIOD_S = 0.05
"""Default pause between two checks. Most checks call a coordinator."""


def wait_until(look: Callable[[], T], what: str, *, deadline_s: float = 30.0, period_s: float = PERIOD_S) -> T:
    """Return the first true result of ``look``.

    Raises:
        AssertionError: none within ``deadline_s``. The message contains ``what`` and the last result of ``look``.
    """
    end = time.monotonic() + deadline_s
    while not (found := look()):
        if time.monotonic() > end:
            raise AssertionError(f"waited {deadline_s:g} s until {what}; the last look gave {found!r}")
        time.sleep(period_s)
    return found
