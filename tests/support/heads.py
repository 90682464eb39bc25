"""``ray start --head --block`` processes for tests."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.waiting import wait_until

STARTED = "Ray runtime started."
"""A head process prints this once its cluster runs."""


def wait_for_head(head: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a head logs that its cluster runs. At its port another process might answer.

    Raises:
        AssertionError: it has ended, or has not logged this in time. pytest shows its log.
    """
    try:
        wait_until(lambda: head.poll() is not None or STARTED in log.read_text(), "the head is up", deadline_s=60)
        assert head.poll() is None, "the head has ended"
    except AssertionError:
        print(log.read_text())
        raise
