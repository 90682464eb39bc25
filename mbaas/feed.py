"""Handles of feeds, and the functions that find and join them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import ray

from mbaas.base.notebook import sentence, table
from mbaas.base.validation import takes
from mbaas.calls.client import CALL_TIMEOUT_S, call
from mbaas.client.join import JoinOptions
from mbaas.coordinator.control import CALL_S, FeedControl, checked_names, find, successor
from mbaas.core.staging import calls
from mbaas.errors import ConfigError, MbaasError, last_line
from mbaas.loader import Loader
from mbaas.model.sharing import LoadingCosts
from mbaas.ray_cluster import actor_names, connection, leftovers
from mbaas.wire.consumers import ConsumerName
from mbaas.wire.samples import LedgerEntry

if TYPE_CHECKING:
    from mbaas.status import FeedStatus

SHOWN_WITHIN_S = 10.0
"""Time limit for the status that a notebook shows."""

SERVED: dict[str, Any] = {}
"""Coordinators of the feeds that this program serves. The references keep them alive even if their `Feed` is
dropped."""

LEDGER_COLUMNS = pa.schema(
    [
        ("consumer", pa.string()),
        ("epoch", pa.int64()),
        ("feed_epoch", pa.int64()),
        ("begin", pa.int64()),
        ("shuffled", pa.string()),
        ("pipeline", pa.string()),
        ("samples", pa.int64()),
        ("expected_samples", pa.int64()),
        ("id_hash", pa.uint64()),
        ("expected_id_hash", pa.uint64()),
        ("exact", pa.bool_()),
        ("seconds", pa.float64()),
        ("arrived", pa.timestamp("ms", tz="UTC")),
    ]
)
"""Columns of `Feed.ledger`."""


class Feed:
    """Handle of a running feed, returned by `serve`, `connect` and `feeds`.

    The feed ends with `stop`, or with the program that served it unless it is detached."""

    def __init__(self, name: str, coordinator: Any) -> None:
        self._control = FeedControl(name, coordinator)
        self._is_stopped = False

    @property
    def name(self) -> str:
        """Name under which consumers join the feed."""
        return self._control.name

    def status(self, *, timeout_s: float = CALL_S) -> FeedStatus:
        """Return the feed's state: consumers, workers, staged and cached bytes, rates, stalls and ledger totals.

        Args:
            timeout_s: time limit for the coordinator, which may be starting or restarting; at least 10 s are allowed.

        Raises:
            ConfigError: ``timeout_s`` is negative or not a number.
            WaitTimeoutError: the coordinator did not answer in time; it may still be running.
            FeedRestartingError: the coordinator did not come back in time.
            FeedGoneError: the feed ended with its program, or with the Ray cluster.
            FeedFailedError: the feed was stopped, or has failed.
        """
        return self._control.status(timeout_s=timeout_s)

    def costs(self, *, timeout_s: float = CALL_S) -> LoadingCosts:
        """Return the CPU time spent on loading so far, and an estimate for a DataLoader in each trial.

        The same as `status().costs`, for frequent calls: the values of caches are some seconds old.

        Args:
            timeout_s: as for `status`.

        Raises:
            ConfigError, WaitTimeoutError, FeedRestartingError, FeedGoneError, FeedFailedError: as for `status`.
        """
        return self._control.costs(timeout_s=timeout_s)

    def ledger(self) -> pa.Table:
        """Return the samples that each consumer received in each of its epochs, since the feed started.

        Returns:
            a row for each finished epoch of a consumer, in order of arrival. After 100,000 epochs the oldest rows are
            dropped. Columns:

            - ``consumer`` (string).
            - ``epoch``, ``feed_epoch``: the consumer's count and the feed's.
            - ``begin``, ``shuffled``: with the seed, these determine each minibatch (`mbaas.wire.samples.EpochLedger`).
            - ``pipeline``: fingerprint of the consumer's own pipeline; "" for the feed's.
            - ``samples``, ``id_hash``: received (int64, uint64).
            - ``expected_samples``, ``expected_id_hash``: the same for the complete epoch.
            - ``exact``: True if received and expected are equal.
            - ``seconds``: duration of the epoch.
            - ``arrived``: timestamp, UTC.

        Raises:
            FeedRestartingError, FeedGoneError, FeedFailedError: as for `status`.
        """
        return ledger_table(self._control.ledgers())

    def stop(self) -> None:
        """Stop the feed and free its resources; waiting consumers get a `FeedFailedError`. May be called twice."""
        SERVED.pop(self.name, None)
        # On a second call, the name may belong to another program's feed.
        if self._is_stopped or not ray.is_initialized() or connection.lost_cluster():
            return
        self._is_stopped = True
        from mbaas.coordinator import recovery  # here, because it imports parts of a coordinator

        coordinator = actor_names.find_coordinator(
            self.name
        )  # not the one of `_control`: the feed may have been restarted
        if coordinator is None:
            recovery.forget(self.name)  # its program died; loaders must not wait for a restart
            return
        # Ask first, so that waiting consumers get the reason; kill in any case, because it may hang.
        with contextlib.suppress(MbaasError):
            call(coordinator.stop.remote(), CALL_TIMEOUT_S, f"stopping feed {self.name!r}")
        ray.kill(coordinator)
        leftovers.end_children(self.name)  # after the coordinator, which would restart them
        recovery.forget(self.name)  # again: it may have hung

    def __enter__(self) -> Feed:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"Feed({self.name!r})"

    def _repr_html_(self) -> str:
        """Return the HTML for notebooks: a status table, and the first samples if they are images.

        The samples are prepared in this process, as by `mbaas show`.
        """
        try:
            status = self.status(timeout_s=SHOWN_WITHIN_S)
        except MbaasError as error:  # a notebook cell may end with a stopped feed
            return table(f"Feed {self.name}", {"state": str(error)})
        return f"<div>{status._repr_html_()}{first_images(self._control)}</div>"


def first_images(control: FeedControl) -> str:
    """Return a picture of a feed's first samples as HTML, or the reason for its absence; "" if they are not images."""
    from mbaas.pictures.samples import html_of  # here: most programs never draw

    try:
        info, dataset, pipeline = control.contents(timeout_s=SHOWN_WITHIN_S)
    except (MbaasError, ray.exceptions.RayError) as error:  # Ray's: a module of the dataset or pipeline is missing here
        return sentence(f"no picture of the first samples: {last_line(error)}")
    return html_of(dataset, pipeline, seed=info.settings.seed, shuffle=info.settings.shuffle)


def ledger_table(entries: Sequence[LedgerEntry]) -> pa.Table:
    """Return a row for each ledger; see `Feed.ledger`."""
    rows = [
        {
            "consumer": entry.consumer,
            **asdict(entry.ledger),
            "exact": entry.ledger.exact,
            "arrived": int(1000 * entry.at),  # milliseconds
        }
        for entry in entries
    ]
    return pa.Table.from_pylist(rows, LEDGER_COLUMNS)


def feeds() -> list[Feed]:
    """Return all feeds on this cluster, sorted by name, including starting ones and feeds of other programs.

    Raises:
        ResourceError: no cluster runs, or it does not answer.

    Example:
        >>> [feed.name for feed in mbaas.feeds()]
        ['train', 'validation']
    """
    connection.ensure_ray(start=False)
    found = ((name, actor_names.find_coordinator(name)) for name in actor_names.feed_names())
    return [Feed(name, coordinator) for name, coordinator in found if coordinator is not None]  # None: just ended


def connect(name: str) -> Feed:
    """Return a running feed of this cluster.

    Raises:
        ConfigError: ``name`` is not a string, or another version of mbaas serves the feed.
        FeedNotFoundError: no feed with this name runs; the message lists the running feeds.
    """
    return Feed(name, FeedControl.of(name).coordinator)


def announce(name: str, consumers: Sequence[str]) -> None:
    """Reserve positions for consumers that will join a feed soon, so that they begin the same epoch.

    Tune's trials are announced by `tune_integration.FeedCallback`.

    Args:
        name: name of the feed.
        consumers: names that the consumers will `join` under. All ranks of a data-parallel trial share one name.

    Raises:
        ConfigError: ``consumers`` is not a list of names.
        FeedNotFoundError, FeedFailedError: no such feed, or a failed one.
    """
    names = checked_names(consumers)  # before the cluster is contacted
    FeedControl.of(name).announce(names)


@dataclass(frozen=True, kw_only=True)
class JoinRequest(JoinOptions):
    """The arguments of `join`."""

    name: str = field(kw_only=False)
    """Name of the feed."""

    consumer: str | None = field(default=None, kw_only=False)
    """This consumer's name, unique within the feed. Default: host and process id; in a Ray Tune trial,
    `tune_integration.get_loader` uses the trial's id."""


@takes(JoinRequest)
def join(asked: JoinRequest) -> Loader:
    """Join a feed as a consumer, from any process of the Ray cluster.

    It takes the options of `mbaas.client.join.JoinOptions` as keywords, such as
    ``mbaas.join("train", batch_size=128, format="numpy")``.

    Raises:
        ConfigError, FeedNotFoundError, FeedFailedError: invalid arguments, no such feed, or a failed one.
        StateError: ``state`` belongs to another feed.
    """
    rank, world_size = asked.ranks
    if world_size > 1 and asked.consumer is None:
        raise ConfigError(
            "the ranks of a trial find each other by their consumer's name, which must be the same for all "
            f"{world_size}, got consumer=None for rank {rank}"
        )
    name = calls.name(asked.consumer if asked.consumer is not None else f"{socket.gethostname()}:{os.getpid()}")
    return Loader(
        FeedControl.of(asked.name).coordinator,
        ConsumerName(name, rank, world_size),
        options=asked,
        find=partial(successor, asked.name),
        again=partial(_join_again, replace(asked, state=None)),
    )


def _join_again(asked: JoinRequest, state: dict[str, Any], pipeline: Any) -> Loader:
    return join(**vars(replace(asked, state=state, pipeline=pipeline)))


def stop(name: str) -> None:
    """Stop a feed by name.

    Raises:
        FeedNotFoundError: no feed with this name runs.
    """
    Feed(name, find(name)).stop()  # of any version
