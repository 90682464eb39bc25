"""Watches a cluster's feeds during faults: which feeds have ended, and how exact their ledgers are."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from pathlib import Path

from mbaas.errors import FeedFailedError, FeedNotFoundError, FeedRestartingError, MbaasError
from mbaas.feed import connect
from mbaas.ray_cluster import actor_names

PERIOD_S = 5.0
"""Pause between polls; a poll may take longer while a coordinator is away."""


class FeedWatch:
    """A thread that polls all feeds and writes their notes to the file ``log``.

    `inexact` is feed -> epochs that were not exact according to the loaders' ledgers.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._noted: dict[str, None] = {}
        self._failed: dict[str, str] = {}
        self._away: dict[str, str] = {}  # feeds that did not answer the last poll; they may restart
        self.inexact: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mbaas-chaos-watch", daemon=True)

    @property
    def ended(self) -> tuple[str, ...]:
        """A message for each feed that failed, or was missing at the last poll."""
        return tuple((self._away | self._failed).values())

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def stop(self) -> None:
        """Stop polling; a hanging poll is abandoned."""
        self._stop.set()
        self._thread.join(PERIOD_S)

    def look(self, name: str) -> None:
        """Poll a feed that is expected to exist."""
        try:
            status = connect(name).status()
        except FeedRestartingError:
            return
        except (FeedNotFoundError, FeedFailedError) as error:
            self._away[name] = f"feed {name!r}: {error}"
            return
        self._away.pop(name, None)
        self._write(f"{name}: {note}" for note in status.notes)
        if status.failed:
            self._failed[name] = f"feed {name!r}: {status.failed}"
        self.inexact[name] = max(self.inexact.get(name, 0), status.inexact_epochs)

    def _write(self, notes: Iterable[str]) -> None:
        new = [note for note in notes if note not in self._noted]
        self._noted.update(dict.fromkeys(new))
        with self._log.open("a") as log:
            log.writelines(f"{note}\n" for note in new)

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            # Any exception: Ray may be shut down under this thread, and has no specific class for that.
            with contextlib.suppress(Exception):
                for name in actor_names.feed_names():
                    with contextlib.suppress(MbaasError):
                        self.look(name)
