"""`mbaas serve` with a Ray of its own ends with everything that it started, whoever ends it and however."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from commandline import PATIENCE_S, Running, processes_with, shared_files

from support.waiting import wait_until

SERVE = """
import sys
from pathlib import Path
from mbaas import runtime
from mbaas.cli.serve import serve

runtime.start_ray(2)  # else it would join the Ray of another test
serve(Path(sys.argv[1]), name=None, address=None, detach=False)
"""

CONFIG = "{name: train, data: images, batch_size: 16, pipeline: [DecodeImage], prep_workers: 1}"

ENDS_WITHIN_S = 30.0
"""10 s on a quiet machine; the minute for which Ray waits for a GCS that has ended is what must not be there."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # a Ray that starts on a busy machine takes its time


@pytest.fixture
def folder() -> Iterator[Path]:
    """Images, a file that serves them, and Ray's files, by whose path the processes of this Ray are known."""
    with tempfile.TemporaryDirectory(prefix="end", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for number in range(20):
            path = folder / "images" / "class" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.full((8, 8, 3), number, np.uint8))
        (folder / "feed.yaml").write_text(CONFIG)
        yield folder


@pytest.mark.parametrize(
    ("number", "whom"),
    [(signal.SIGTERM, os.kill), (signal.SIGINT, os.killpg), (signal.SIGTERM, os.killpg)],
    ids=["SIGTERM", "Ctrl-C to the group", "SIGTERM to the group"],
)
def test_it_ends_with_all_that_it_started(
    folder: Path, number: signal.Signals, whom: Callable[[int, int], None]
) -> None:
    """To the group, as terminals, `timeout` and systemd do it, the signal meets Ray's own processes, too.

    `test_feed_commands` has Ctrl-C to the command alone.
    """
    shared = shared_files()
    environment = {**os.environ, "RAY_TMPDIR": str(folder)}
    with subprocess.Popen(
        [sys.executable, "-c", SERVE, str(folder / "feed.yaml")],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            running = Running(process, [])
            running.wait_for("0 trials")
            whom(process.pid, number)
            output, _ = process.communicate(timeout=ENDS_WITHIN_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    assert (process.returncode, output.splitlines()[-1]) == (0, "feed 'train' ended: interrupted"), output
    wait_until(lambda: not processes_with(str(folder)), "nothing that it started runs", deadline_s=PATIENCE_S)
    assert shared_files() <= shared
