"""A polite end of a foreground command."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_ENDING = (signal.SIGTERM, signal.SIGHUP)


@contextmanager
def end_as_ctrl_c() -> Iterator[None]:
    """Within, a supervisor's SIGTERM or a closed terminal's SIGHUP does what Ctrl-C does."""

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in _ENDING}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
