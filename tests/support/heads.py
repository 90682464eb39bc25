"""Programs ``ray start --head --block`` that tests start."""

from __future__ import annotations

import subprocess
from pathlib import Path

from support.waiting import wait_until

STARTED = "Ray runtime started."
"""What such a program writes when its cluster runs."""


def wait_for_head(head: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a head writes to its log that the cluster runs: at its port somebody else might answer.

    Raises:
        AssertionError: it has ended, or writes nothing of that. pytest shows what it wrote.
    """
    try:
        wait_until(lambda: head.poll() is not None or STARTED in log.read_text(), "the head is up", deadline_s=60)
        assert head.poll() is None, "the head has ended"
    except AssertionError:
        print(log.read_text())
        raise
