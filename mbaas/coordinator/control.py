"""Calls to the coordinator of a running feed, across its restarts.

Users see a few of these calls in `mbaas.Feed`. The others are for mbaas's own commands and for programs that start
trials, such as the Tune callback.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mbaas.calls import encoding
from mbaas.calls.client import CALL_TIMEOUT_S, call_patiently
from mbaas.coordinator import registry
from mbaas.core.cluster.events import FeedEnd
from mbaas.core.staging import calls
from mbaas.errors import ConfigError, FeedFailedError, FeedGoneError, FeedNotFoundError, shown
from mbaas.model.sharing import LoadingCosts
from mbaas.ray_cluster import actor_names, connection
from mbaas.wire.consumers import START_TIMEOUT_S, Claims, FeedInfo, Leave
from mbaas.wire.samples import LedgerEntry

if TYPE_CHECKING:
    from mbaas.dataset import Dataset
    from mbaas.status import FeedStatus
    from mbaas.transforms import Pipeline

STARTED_HERE = (
    'this program started the cluster: serve the feed in it, or call ray.init("auto") first to join the cluster of '
    "`mbaas serve`"
)
"""Advice if a program looks for a feed on an empty cluster of its own."""

CALL_S = START_TIMEOUT_S + CALL_TIMEOUT_S
"""Time limit for calls to the coordinator, which may be starting."""


class FeedControl:
    """Calls to a feed's coordinator.

    Each may raise a `WaitTimeoutError` if the coordinator does not answer in time, and a `FeedRestartingError`,
    `FeedGoneError` or `FeedFailedError` as described for `mbaas.Feed.status`.

    Attributes:
        name: the feed's.
        coordinator: its actor; another one after a feed restart.
    """

    def __init__(self, name: str, coordinator: Any) -> None:
        self.name = name
        self.coordinator = coordinator

    @classmethod
    def of(cls, name: str) -> FeedControl:
        """Find a running feed.

        Raises:
            ConfigError: ``name`` is not a string, or another version of mbaas serves the feed.
            FeedNotFoundError: no feed with this name runs; the message lists the running feeds.
        """
        coordinator = find(name)
        registry.check_version(name)
        return cls(name, coordinator)

    def status(self, *, timeout_s: float = CALL_S) -> FeedStatus:
        """Return the feed's state; see `mbaas.Feed.status`."""
        calls.number("timeout_s", timeout_s)
        return self._call("status", timeout_s=timeout_s)

    def costs(self, *, timeout_s: float = CALL_S) -> LoadingCosts:
        """Return the costs of loading so far; see `mbaas.Feed.costs`."""
        calls.number("timeout_s", timeout_s)
        return self._call("costs", timeout_s=timeout_s)

    def ledgers(self) -> list[LedgerEntry]:
        """Return the ledgers of all finished epochs, in order of arrival."""
        entries: list[LedgerEntry] = []
        for number in itertools.count():
            page: tuple[LedgerEntry, ...] = self._call("ledgers", number)
            if not page:
                break
            entries += page
        return entries

    def story(self, thing: str) -> list[str]:
        """Return the history of one consumer, worker, cache or block.

        Args:
            thing: a consumer or a prep worker, by its name in `status`; a node's cache, by the first eight or more
                digits of the node id, as in "cache 1a2b3c4d"; or a block, "block 17". Blocks are counted over all
                epochs: block b of epoch e is ``e * status().blocks_per_epoch + b``.

        Returns:
            A line for each change, with time, change and the event that caused it. The last lines are kept for
            everything that still runs, and for some hundreds of blocks, consumers, workers and caches that have ended.

        Raises:
            ConfigError: ``thing`` is not a string, or has no history; the message lists similar names.
        """
        return self._call("story", thing)

    def contents(self, *, timeout_s: float = CALL_S) -> tuple[FeedInfo, Dataset, Pipeline]:
        """Return the feed's constants, its dataset and its pipeline.

        Raises:
            ray.exceptions.RayError: this process cannot read the dataset or the pipeline.
        """
        info, dataset, pipeline = self._call("contents", timeout_s=timeout_s)
        return info, connection.get(dataset, timeout_s), pipeline

    def info(self) -> FeedInfo:
        """Return the constants of the feed: settings, order, shape of a sample."""
        return self._call("info")

    def announce(self, consumers: Sequence[str], *, others: int = 0) -> None:
        """Reserve positions for consumers that will join soon, so that they begin the same epoch.

        Args:
            consumers: names that the consumers will `join` under. All ranks of a data-parallel trial share one name.
            others: number of further consumers that will be announced shortly, whose names are not known yet. The same
                epoch waits for each one for up to ``timeouts.reservation_s``. It does not wait if recent consumers
                began immediately and others are present to begin with.

        Raises:
            ConfigError: an invalid value.
        """
        self._call("announce", checked_names(consumers, others=others), others)

    def expect(self, epoch_s: float) -> None:
        """Compare a predicted epoch time with the next epoch; `status` and the metrics report the error."""
        self._call("expect", epoch_s)

    def remove(self, consumer: str, *, successors: int = 0) -> None:
        """End a consumer's session, if it has one; for a data-parallel trial, the sessions of all ranks.

        Args:
            consumer: name under which it joined.
            successors: number of trials that are still to come. A reservation is held for one such trial for a while,
                unless there are already as many reservations.

        Raises:
            ConfigError: an invalid value.
        """
        calls.name(consumer)
        calls.whole("successors", successors)
        self._call("leave", encoding.encode(Leave(consumer, None, successors)))

    def release_reservations(self, most: int) -> None:
        """Release up to ``most`` reservations that are not tied to a name, because no trial will use them."""
        calls.whole("most", most)
        free = [consumer.name for consumer in self.status().consumers if consumer.is_unassigned]
        for name in free[:most]:
            self.remove(name)

    def _call(self, method: str, *arguments: Any, timeout_s: float = CALL_S) -> Any:
        """Call the coordinator, which may be starting or restarting, or its successor after a feed restart."""

        def ask() -> Any:
            return getattr(self.coordinator, method).remote(*arguments)

        what = f"the call {method!r} to feed {self.name!r}"
        try:
            return call_patiently(self.coordinator, ask, timeout_s, what)
        except FeedGoneError as error:
            found = successor(self.name, error)
            if found is None:
                raise
            self.coordinator = found
            return call_patiently(found, ask, timeout_s, what)


def checked_names(consumers: Sequence[str], *, others: int = 0) -> list[str]:
    """Check the arguments of `FeedControl.announce`, and return the names.

    Raises:
        ConfigError: an invalid value.
    """
    if isinstance(consumers, (str, bytes)) or not isinstance(consumers, Sequence):  # a str is a sequence, too
        raise ConfigError(f"consumers must be a list of names, as in ['trial-1'], got {shown(consumers)}")
    names = list(consumers)
    calls.announce(names, others)
    return names


def find(name: str) -> Any:
    """Return the coordinator of a running feed of this cluster.

    Raises:
        ConfigError: ``name`` is not a string.
        FeedNotFoundError: no feed with this name runs; the message lists the running feeds, or explains that this
            program started an empty cluster.
    """
    if not isinstance(name, str):
        raise ConfigError(f"a feed's name must be text, got {shown(name)}")
    connection.ensure_ray(start=False)
    coordinator = actor_names.find_coordinator(name)
    if coordinator is None:
        running = ", ".join(map(repr, actor_names.feed_names())) or "none"
        # Tune starts a cluster if the program has joined none, also next to one that `mbaas serve` started.
        hint = f"; {STARTED_HERE}" if running == "none" and connection.owns_ray() else ""
        raise FeedNotFoundError(f"no feed {name!r} runs on this cluster; running: {running}{hint}")
    return coordinator


def claims() -> dict[str, Claims]:
    """Return the cluster resources that each feed reserved about a second ago, without calls to their coordinators."""
    return {name: found for name in actor_names.feed_names() if (found := registry.claims_of(name)) is not None}


def successor(feed: str, error: FeedGoneError) -> Any | None:
    """Return the new coordinator of a feed whose coordinator is gone; None if it has not started yet.

    Raises:
        FeedFailedError: the feed was stopped, so it will not be restarted.
        FeedGoneError: its cluster has ended.
    """
    if lost := connection.lost_cluster():
        raise FeedGoneError(f"feed {feed!r} ended: {lost}") from error
    from mbaas.coordinator import recovery  # here, because it imports parts of a coordinator

    coordinator = actor_names.find_coordinator(feed)
    if coordinator is None and not recovery.is_kept(feed):
        raise FeedFailedError(FeedEnd.STOPPED.of(feed)) from error
    if coordinator is not None:
        registry.check_version(feed)
    return coordinator
