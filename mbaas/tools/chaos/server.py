"""Serves the search's feed from a separate program that can be killed and restarted."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from mbaas.errors import MbaasError
from mbaas.tools.chaos.participants import kill
from mbaas.tools.chaos.search import dataset, serve_search

SERVES = "serves"
"""Output of the program when its feed is open."""

END_S = 20.0
"""Longest wait for the program to end; then it is killed."""


class Server:
    """A context manager that runs the program that serves the feed, and restarts it like a service manager."""

    def __init__(self, folder: Path, address: str) -> None:
        self._folder, self._address = folder, address
        self._back_at = 0.0

    def _start(self) -> None:
        log = self._folder / "server.log"
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mbaas.tools.chaos.server", str(self._folder)],
                env={**os.environ, "RAY_ADDRESS": self._address},
                # The program ends when this pipe is closed, so it cannot outlive the run.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C only goes to the run, which ends this program itself
            )

    def __enter__(self) -> Server:
        self._start()
        assert self._process.stdout is not None
        try:
            if SERVES not in self._process.stdout.readline():  # serving has its own deadlines
                raise MbaasError(f"the search did not begin: {(self._folder / 'server.log').read_text()}")
        except BaseException:  # including Ctrl-C: otherwise the program would keep running
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def kill(self, back_in_s: float) -> None:
        """Kill the program; `look_after` restarts it after ``back_in_s`` seconds."""
        self._back_at = time.monotonic() + back_in_s
        kill(self.pid)
        self._process.wait()

    def look_after(self, *, at_once: bool = False) -> None:
        """Restart the program if it has ended and its delay is over, or regardless of the delay if ``at_once``."""
        if self._process.poll() is not None and (at_once or time.monotonic() >= self._back_at):
            self._close()
            self._start()

    def _end(self) -> None:
        self._close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_S)
        if self._process.poll() is None:
            kill(self.pid)
            self._process.wait()

    def _close(self) -> None:
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()


def main(folder: Path) -> None:
    """Serve until the parent closes stdin or dies."""
    with serve_search(dataset(folder)):
        print(SERVES, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
