"""A feed as users hold it, and how they find and join one."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, get_args

import pyarrow as pa
import ray

from mbaas import runtime, units
from mbaas.client.collate import Collate
from mbaas.client.rpc import CALL_TIMEOUT_S, call, call_patiently
from mbaas.coordinator import kept_claims
from mbaas.coordinator.served_by import check_version
from mbaas.core import calls
from mbaas.core.cluster_events import FeedEnd
from mbaas.costs import LoadingCosts
from mbaas.errors import (
    ConfigError,
    FeedFailedError,
    FeedGoneError,
    FeedNotFoundError,
    MbaasError,
    shown,
)
from mbaas.ledger import to_table
from mbaas.loader import Loader
from mbaas.messages import START_TIMEOUT_S, Claims, ConsumerName, FeedInfo, JoinStart, LedgerEntry
from mbaas.notebook import some, table

if TYPE_CHECKING:
    from mbaas.status import FeedStatus

CALL_S = START_TIMEOUT_S + CALL_TIMEOUT_S
"""How long a coordinator may take for a call of a `Feed`: it may be starting."""

SHOWN_WITHIN_S = 10.0
"""How long a notebook waits for the status of a feed that it shows."""

SERVED: dict[str, Any] = {}
"""Coordinators of feeds that this program serves: they live as long as it does, also if their `Feed` is dropped."""


class Feed:
    """A running feed, as `serve`, `connect` and `feeds` return it.

    It ends with `stop`, or with the program that served it unless it is detached.

    Attributes:
        name: the name under which trials join it.
    """

    def __init__(self, name: str, coordinator: Any, draw: Callable[[], str] = str) -> None:
        self.name = name
        self._coordinator = coordinator
        self._is_stopped = False
        self._draw = draw

    def status(self, *, timeout_s: float = CALL_S) -> FeedStatus:
        """Tell how the feed is doing: who takes part and where, what is staged and cached, rates, stalls, ledgers.

        Args:
            timeout_s: how long the feed's coordinator, which may be starting or restarting, may take; at least 10 s.

        Raises:
            ConfigError: ``timeout_s`` is no number of 0 or more.
            WaitTimeoutError: it did not answer in time; it may be there all the same.
            FeedRestartingError: it did not come back in time.
            FeedGoneError: the feed ended with its program, or with the Ray cluster.
            FeedFailedError: it was stopped, or cannot go on.
        """
        calls.number("timeout_s", timeout_s)
        status: FeedStatus = self._call(
            lambda: self._coordinator.status.remote(), f"status of feed {self.name!r}", timeout_s
        )
        return status

    def costs(self, *, timeout_s: float = CALL_S) -> LoadingCosts:
        """Tell what it took so far to give trials their samples: CPU time, and what a DataLoader in each would take.

        It is `status().costs` for programs that ask often: caches are not asked, so theirs is as of some seconds ago.

        Args:
            timeout_s: as for `status`.

        Raises:
            ConfigError, WaitTimeoutError, FeedRestartingError, FeedGoneError, FeedFailedError: as for `status`.
        """
        calls.number("timeout_s", timeout_s)
        costs: LoadingCosts = self._call(
            lambda: self._coordinator.costs.remote(), f"costs of feed {self.name!r}", timeout_s
        )
        return costs

    def story(self, thing: str) -> list[str]:
        """Tell what happened to a thing, a line for each change: when, what, and the event that it followed from.

        Args:
            thing: a consumer or a prep worker, by its name in `status`; the cache node of a machine, by the first eight
                digits of the machine's id, or more, "cache 1a2b3c4d"; a further lane, "lane 1"; or a block,
                "block 17": blocks are counted over all epochs, so block b of epoch e is
                ``e * status().blocks_per_epoch + b``.

        Raises:
            ConfigError: it is no text, or nothing is known of it; the message lists the names near it. The last lines
                are kept for everything that still runs, and for some hundreds of blocks, consumers, workers and caches
                that have ended.
        """
        lines: list[str] = self._call(
            lambda: self._coordinator.story.remote(thing), f"story of {thing!r} in feed {self.name!r}"
        )
        return lines

    def ledger(self) -> pa.Table:
        """Tell what each consumer received in each of its epochs, for as long as the feed runs.

        Returns:
            a row for each epoch that a consumer finished, in the order in which they arrived: ``consumer`` (string);
            ``epoch`` and ``feed_epoch``, the consumer's own count and the feed's; ``begin`` and ``shuffled``, which
            say with the seed what each minibatch held (`mbaas.messages.EpochLedger`); ``samples`` and ``id_hash``,
            what it received, ``expected_samples`` and ``expected_id_hash``, what the epoch must hold (int64, uint64);
            ``exact``, whether these are equal; ``seconds``; ``arrived`` (timestamp, UTC). Of a run with more than
            100,000 epochs the oldest are not there any more.

        Raises:
            FeedRestartingError, FeedGoneError, FeedFailedError: as for `status`.
        """
        entries: list[LedgerEntry] = []
        for number in itertools.count():
            ask = partial(self._ledger_page, number)
            page: tuple[LedgerEntry, ...] = self._call(ask, f"ledgers of feed {self.name!r}")
            if not page:
                break
            entries += page
        return to_table(entries)

    def _ledger_page(self, number: int) -> Any:
        return self._coordinator.ledgers.remote(number)

    def info(self) -> FeedInfo:
        """Tell what does not change: settings, order, shape of a sample."""
        info: FeedInfo = self._call(lambda: self._coordinator.info.remote(), f"info of feed {self.name!r}")
        return info

    def claims(self) -> Claims | None:
        """Tell what the feed keeps of its cluster for itself, without asking its coordinator, which may not answer.

        Returns:
            What it kept a second ago or later; None if it has ended, or has just begun.
        """
        return kept_claims.claims_of(self.name)

    def announce(self, consumers: Sequence[str], *, others: int = 0) -> None:
        """Hold a reservation for each of some consumers that will join soon, so that they begin the same epoch.

        Args:
            consumers: their names, as they will `join`. That of a data-parallel trial stands for all of its ranks.
            others: how many more will be announced in a moment, whose names are not known yet. The same epoch waits for
                each of them, too, for ``timeouts.reservation_s``; not if consumers begin at once lately, and somebody
                else is there with whom these can begin.

        Raises:
            ConfigError: a value that cannot be.
        """
        if isinstance(consumers, (str, bytes)) or not isinstance(consumers, Sequence):  # a str is a list of letters
            raise ConfigError(f"consumers must be a list of names, as in ['trial-1'], got {shown(consumers)}")
        names = list(consumers)
        calls.announce(names, others)  # what cannot be is told before anybody is asked
        what = f"announcing consumers to feed {self.name!r}"
        self._call(lambda: self._coordinator.announce.remote(names, others), what)

    def expect(self, epoch_s: float) -> None:
        """Compare a prediction of an epoch with the next one; the error shows in `status` and as a metric."""
        self._call(lambda: self._coordinator.expect.remote(epoch_s), f"telling feed {self.name!r} a prediction")

    def remove(self, consumer: str, *, successors: int = 0) -> None:
        """End a consumer's session, if it has one; of a data-parallel trial those of all ranks.

        Args:
            consumer: its name, as it joined.
            successors: how many other trials are still to come. A reservation is held for one of them for a while,
                unless as many are held already.

        Raises:
            ConfigError: a value that cannot be.
        """
        calls.name(consumer)
        calls.whole("successors", successors)
        what = f"removing {consumer!r} from feed {self.name!r}"
        self._call(lambda: self._coordinator.leave.remote(consumer, None, successors), what)

    def release_reservations(self, most: int) -> None:
        """Give up at most ``most`` of the reservations that are held for successors, or others, that will not come."""
        calls.whole("most", most)
        free = [consumer.name for consumer in self.status().members if consumer.for_anyone]
        for name in free[:most]:
            self.remove(name)

    def _call(self, ask: Callable[[], Any], what: str, timeout_s: float = CALL_S) -> Any:
        """Call the coordinator, which may be starting or restarting; or the newer one of a feed served again."""
        try:
            return call_patiently(self._coordinator, ask, timeout_s, what)
        except FeedGoneError as error:
            successor = _successor(self.name, error)
            if successor is None:
                raise
            self._coordinator = successor
            return call_patiently(successor, ask, timeout_s, what)

    def stop(self) -> None:
        """End the feed and free what it used; trials that wait get a `FeedFailedError`. May be called twice."""
        SERVED.pop(self.name, None)
        # The second time its name may be that of another program's feed.
        if self._is_stopped or not ray.is_initialized() or runtime.lost_cluster():
            return
        self._is_stopped = True
        from mbaas.coordinator import recovery  # here: it imports parts of a coordinator

        coordinator = runtime.find_coordinator(self.name)  # not the one that was known: it may have been served again
        if coordinator is None:
            recovery.forget(self.name)  # its program died: loaders wait for another one, which will not come
            return
        # It is asked first, so that those who wait hear why; it is killed in any case, because it may hang.
        with contextlib.suppress(MbaasError):
            call(coordinator.stop.remote(), CALL_TIMEOUT_S, f"stopping feed {self.name!r}")
        ray.kill(coordinator)
        runtime.end_children(self.name)  # after it, or it would start them again
        recovery.forget(self.name)  # again: it may have hung

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_draw": str}  # not the dataset, of which it draws samples: it may be large

    def __repr__(self) -> str:
        return f"Feed({self.name!r})"

    def _repr_html_(self) -> str:
        """Return what notebooks show: a table of how the feed is doing now, and its first samples if they are images.

        The samples are prepared in this process, as `mbaas show` does, so the feed does not notice. Only the program
        that serves the feed has its dataset and pipeline: a feed that `connect` found shows the table alone.
        """
        title = f"Feed {self.name}"
        try:
            status = self.status(timeout_s=SHOWN_WITHIN_S)
        except MbaasError as error:  # a cell that ends with a feed that was stopped is no error
            return table(title, {"state": str(error)})
        return f"<div>{table(title, _facts(status))}{self._draw()}</div>"


def _facts(status: FeedStatus) -> dict[str, str]:
    """Say in a few lines how a feed is doing: name of a fact -> text."""
    trials = {member.trial for member in status.members if member.state != "reserved"}
    workers = units.counted(len(status.workers), "worker")
    times = units.number(status.delivered_samples / max(1, status.prepared_samples))
    hits = units.percent(status.hit_rate)
    return {
        "state": status.failed or "; ".join([status.state, *status.waits_for]),
        "samples": f"{units.count(status.samples)}, in minibatches of {units.count(status.batch_size)}",
        "trials": some(sorted(trials)) or "none",
        "prepared": f"{units.count(status.prepared_samples)} by {workers}, {status.engine} engine",
        "delivered": f"{units.count(status.delivered_samples)}, each sample {times} times",
        "staged": f"{units.size(status.staged_bytes)} of {units.size(status.staging_bytes)}",
        "cached": f"{units.size(status.cached_bytes)} of {units.size(status.cache_bytes)}, {hits} hits",
        "inexact epochs": units.count(status.inexact_epochs),
        "up": units.duration(status.uptime_s),
    }


def feeds() -> list[Feed]:
    """Find all feeds that run on this cluster, by name: also those that are starting, and other programs'.

    Raises:
        ResourceError: no cluster runs, or it does not answer.

    Example:
        >>> [feed.name for feed in mbaas.feeds()]
        ['train', 'validation']
    """
    runtime.ensure_ray(start=False)
    found = ((name, runtime.find_coordinator(name)) for name in runtime.feed_names())
    return [
        Feed(name, coordinator) for name, coordinator in found if coordinator is not None
    ]  # None: it has just ended


def connect(name: str) -> Feed:
    """Find a feed that runs on this cluster.

    Raises:
        ConfigError: ``name`` is no text, or another version of mbaas serves the feed.
        FeedNotFoundError: there is none of that name; the message lists those that run.
    """
    feed = _found(name)
    check_version(name)
    return feed


def _found(name: str) -> Feed:
    if not isinstance(name, str):
        raise ConfigError(f"a feed's name must be text, got {shown(name)}")
    runtime.ensure_ray(start=False)
    coordinator = runtime.find_coordinator(name)
    if coordinator is None:
        running = ", ".join(map(repr, runtime.feed_names())) or "none"
        raise FeedNotFoundError(f"no feed {name!r} runs on this cluster; running: {running}")
    return Feed(name, coordinator)


def join(
    name: str,
    consumer: str | None = None,
    *,
    batch_size: int | None = None,
    format: str = "torch",
    device: Any = None,
    collate: Collate = "list",
    start: JoinStart = "epoch",
    state: dict[str, Any] | None = None,
    rank: int | None = None,
    world_size: int | None = None,
    wait_timeout_s: float = 300.0,
) -> Loader:
    """Become a consumer of a feed, from any process of the Ray cluster.

    Args:
        name: the name of the feed.
        consumer: this consumer's name, unique among the feed's; default: host and process id.
        batch_size: samples in a minibatch (over all ranks); default: the feed's.
        format: "torch" (private tensors) or "numpy" (read-only arrays, no copy).
        device: torch device to which minibatches are copied.
        collate: how minibatches have fields whose values differ in length, such as boxes. "list": a list of arrays,
            one for each sample; "pad": one array with zeros behind what is shorter, and their lengths as
            ``NAME_length`` int64[n]; "packed": all values end to end, and ``NAME_bounds`` int64[n + 1], so that sample
            i has those from bounds[i] to bounds[i + 1]. Images that differ in size are padded with zeros to the right
            and below, and ``image_size`` int64[n, 2] is beside them, also when they are packed, as pixels [total, 3].
            Masks on them are treated likewise.
        start: "epoch" begins with the next epoch that others begin, and waits for it. "now" begins at once, in the
            middle of their epoch if need be, and still gets each sample once in each of its own epochs: while somebody
            is out of phase, epochs are shuffled within the segments that its beginning cuts (`mbaas.order.Shuffle`).
            In a feed with several lanes it is "epoch".
        state: what `Loader.state_dict` returned: begin exactly there, as after `Loader.load_state_dict`, but without
            joining elsewhere first, for which minibatches would be prepared that nobody uses. None for no state.
        rank, world_size: of a data-parallel trial: each rank gets its part of every minibatch (see `Loader`). All give
            the same ``consumer`` and ``world_size``; rank r is then listed as ``consumer[r]``. An epoch begins when all
            have joined.
        wait_timeout_s: a wait in which the feed makes no progress ends with an error after this long. So does the
            wait for a feed to be served again whose program is gone, but which was not stopped.

    Raises:
        ConfigError, FeedNotFoundError, FeedFailedError; StateError: ``state`` is none of this feed.
    """
    rank, world_size = _checked_rank(rank, world_size)
    if world_size > 1 and consumer is None:
        raise ConfigError(
            "the ranks of a trial find each other by their consumer's name, which must be the same for all "
            f"{world_size}, got consumer=None for rank {rank}"
        )
    if start not in get_args(JoinStart):
        raise ConfigError(f'start must be "epoch" or "now", got {shown(start)}')
    if collate not in get_args(Collate):
        raise ConfigError(f'collate must be "list", "pad" or "packed", got {shown(collate)}')
    if start == "now" and world_size > 1:
        raise ConfigError(f'start must be "epoch" for ranks, which begin together, got "now" for {world_size} ranks')
    own = calls.name(consumer if consumer is not None else f"{socket.gethostname()}:{os.getpid()}")
    calls.number("wait_timeout_s", wait_timeout_s)
    feed = connect(name)
    return Loader(
        feed._coordinator,
        ConsumerName(own, rank, world_size),
        find=partial(_successor, name),
        again=partial(
            join,
            name,
            consumer,
            batch_size=batch_size,
            format=format,
            device=device,
            collate=collate,
            start=start,
            rank=rank,
            world_size=world_size,
            wait_timeout_s=wait_timeout_s,
        ),
        batch_size=batch_size,
        format=format,
        device=device,
        collate=collate,
        start=start,
        wait_timeout_s=wait_timeout_s,
        state=state,
    )


def _successor(feed: str, error: FeedGoneError) -> Any | None:
    """Find the coordinator of a feed whose coordinator was gone; None if there is none yet.

    Raises:
        FeedFailedError: nobody will serve it again, because it was stopped.
        FeedGoneError: nor because its cluster has ended.
    """
    if lost := runtime.lost_cluster():
        raise FeedGoneError(f"feed {feed!r} ended: {lost}") from error
    from mbaas.coordinator import recovery  # here: it imports parts of a coordinator

    coordinator = runtime.find_coordinator(feed)
    if coordinator is None and not recovery.is_kept(feed):
        raise FeedFailedError(FeedEnd.STOPPED.of(feed)) from error
    if coordinator is not None:
        check_version(feed)
    return coordinator


def _checked_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    """Return the rank and the world size; 0 and 1 where neither is given."""
    if rank is None and world_size is None:
        return 0, 1
    if type(rank) is not int or type(world_size) is not int:
        raise ConfigError(
            f"rank and world_size must both be whole numbers, or both be left out, got rank={rank!r} and "
            f"world_size={world_size!r}"
        )
    if not 0 <= rank < world_size:
        raise ConfigError(f"rank must be in [0, world_size - 1], world_size was {world_size} and rank was {rank}")
    return rank, world_size


def stop(name: str) -> None:
    """End a feed by name.

    Raises:
        FeedNotFoundError: there is none of that name.
    """
    _found(name).stop()  # also one of another version
