"""Serves the feed of the search from a program of its own, which can be killed, and comes again."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

from mbaas.chaos.participants import kill
from mbaas.chaos.search import LANES, dataset, serve_search
from mbaas.errors import MbaasError

SERVES = "serves"
"""What the program prints when its feed is open."""

END_S = 20.0
"""Longest time that it takes to end when it is told to; then it is killed."""


class Server:
    """A context manager of the program that serves; it starts it again when it has ended, as a service manager would.

    Args:
        folder: of the run, with the images.
        address: of the cluster, host:port.
        lanes: of the feed.
    """

    def __init__(self, folder: Path, address: str, *, lanes: int = LANES) -> None:
        self._folder, self._address, self._lanes = folder, address, lanes
        self._back_at = 0.0

    def _start(self) -> None:
        log = self._folder / "server.log"
        with log.open("a") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "mbaas.chaos.server", str(self._folder), str(self._lanes)],
                env={**os.environ, "RAY_ADDRESS": self._address},
                # It ends when this end is closed, so it cannot outlive the run, however that ends.
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run, which ends this program itself
            )

    def __enter__(self) -> Server:
        self._start()
        assert self._process.stdout is not None
        try:
            if SERVES not in self._process.stdout.readline():  # serving has deadlines of its own
                raise MbaasError(f"the search did not begin: {(self._folder / 'server.log').read_text()}")
        except BaseException:  # Ctrl-C, too: nobody else would end the program
            self._end()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def kill(self, back_in_s: float) -> None:
        """Kill it; after ``back_in_s`` seconds `look_after` starts it again."""
        self._back_at = time.monotonic() + back_in_s
        kill(self.pid)
        self._process.wait()

    def look_after(self, *, at_once: bool = False) -> None:
        """Start it again if it has ended and it is time for that, or in any case ``at_once``."""
        if self._process.poll() is not None and (at_once or time.monotonic() >= self._back_at):
            self._close()
            self._start()

    def _end(self) -> None:
        """Have it stop the feed; kill it if that takes too long."""
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


def main(folder: Path, lanes: int) -> None:
    """Serve until the one who started this program closes its end of stdin, or dies."""
    with serve_search(dataset(folder), lanes=lanes):
        print(SERVES, flush=True)
        sys.stdin.read()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
