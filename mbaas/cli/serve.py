"""``mbaas serve`` runs a feed in the foreground or detached; ``mbaas stop`` ends either."""

from __future__ import annotations

import math
import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from mbaas.base.units import count, duration, seconds
from mbaas.cli import console, feed_view
from mbaas.errors import ConfigError, FeedFailedError, FeedGoneError, FeedRestartingError, WaitTimeoutError, last_line

if TYPE_CHECKING:
    from mbaas.cli.feed_file import FeedConfig
    from mbaas.client.stalls import Patience
    from mbaas.dataset import Dataset
    from mbaas.feed import Feed
    from mbaas.status import FeedStatus

POLL_S = 1.0
"""Period of status requests, within which this command notices the end of a feed."""

LINE_S = 10.0
"""Period of log lines when stdout is not a terminal."""

ANSWER_TIMEOUT_S = 10.0
"""Time without an answer after which the log reports a silent coordinator."""

LOST_S = 10.0
"""Time without an answer after which the command checks whether the feed's cluster has ended."""

REASON_KEPT_S = 5.0
"""Time that a failed feed is kept, so that consumers can still get the reason."""

GONE_TIMEOUT_S = 30.0
GONE_POLL_S = 0.05
"""Time limit and polling period of `mbaas stop` for the end of a feed."""


@console.command(console.app, console.FEEDS)
def serve(
    config: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml")] = None,
    name: str | None = None,
    detach: Annotated[bool, typer.Option("--detach", "-d")] = False,
    local: Annotated[bool, typer.Option("--local")] = False,
    schema: Annotated[bool, typer.Option("--schema")] = False,
    address: console.Address = None,
) -> None:
    """Serve a feed in the foreground, until Ctrl-C or [bold]mbaas stop[/].

    Joins the Ray cluster of this machine, or starts one for the lifetime of the feed, and prints which. With
    [bold]--detach[/] the feed belongs to the cluster, which must already be running: every job finds it by its name.

    Args:
        config: YAML: name, data, pipeline, batch_size, options.
        name: Name of the feed, instead of the one in the file.
        detach: Return once the feed is running; it runs until [bold]mbaas stop[/].
        local: Start a Ray cluster for this feed alone, even if another one is running here.
        schema: Print the JSON schema of the file and exit.

    Examples:
        mbaas serve feed.yaml
        mbaas serve feed.yaml --name val --address 10.0.0.1:6379
        nohup mbaas serve feed.yaml > feed.log &    [dim]in the background, until mbaas stop[/]
        mbaas serve feed.yaml --detach              [dim]for several jobs, on a running cluster[/]
        mbaas serve --schema > feed.schema.json     [dim]for YAML completion and checks in editors[/]
    """
    from mbaas.cli import feed_data, feed_file

    if schema:
        console.write_json(feed_file.schema(), indent=2)
        return
    if config is None:
        raise ConfigError("mbaas serve needs a file that describes a feed; examples/feed.yaml shows all keys")
    wanted = feed_file.load(config, name=name)  # before anything starts: most mistakes are in the file
    detach = detach or wanted.options.detached
    if local and (detach or address is not None):
        other = "a detached feed" if detach else f"--address {address}"
        raise ConfigError(
            f"--local starts a cluster that ends with this command, and {other} needs one that is already running"
        )
    with console.end_as_ctrl_c(lambda: _exit_by_force(wanted.name)):
        if detach or (console.is_named(address) and not local):  # joining an existing cluster succeeds or fails quickly
            _connect(address, detach=detach, local=local)
        dataset = feed_data.listed(wanted.data)  # before starting Ray: the data may be missing
        _connect(address, detach=detach, local=local)
        feed = _start(wanted, dataset, detach=detach)
        if detach:
            console.line(
                console.out, f"it is detached and runs until `mbaas stop {feed.name}`, or until the cluster ends"
            )
            return
        try:
            reason = _watch(feed)
        except _ClusterEndedError as error:
            _end_at_once(str(error))
        except KeyboardInterrupt:
            reason = "interrupted"
        finally:
            feed.stop()  # also after a failure, to free its name and CPUs
    console.line(console.out, f"feed {wanted.name!r} ended: {reason}")


def _connect(address: str | None, *, detach: bool, local: bool) -> None:
    with console.doing("connecting to Ray"):
        if local:
            from mbaas.ray_cluster import connection

            connection.start_own_ray()
        elif detach and not console.is_named(address):
            from mbaas.serving import ensure_lasting_ray

            ensure_lasting_ray()  # its error lists the requirements of a detached feed
        else:
            console.connect(address, start=not detach)


def _start(wanted: FeedConfig, dataset: Dataset, *, detach: bool) -> Feed:
    import mbaas

    with console.doing(f"starting feed {wanted.name!r}"):
        feed = mbaas.serve(wanted.name, dataset, wanted.pipeline, **{**wanted.options.given(), "detached": detach})
    classes = f" in {count(len(dataset.class_names))} classes" if dataset.class_names else ""
    samples = f"{count(len(dataset))} samples{classes} of {wanted.data.where}"
    console.line(console.out, f"feed {wanted.name!r} serves {samples}; join it with mbaas.join({wanted.name!r})")
    return feed


def _exit_by_force(name: str) -> None:
    from mbaas.ray_cluster import connection

    connection.see_to_the_end()
    console.line(console.out, f"feed {name!r} ended: interrupted")
    sys.stdout.flush()
    os._exit(0)


def _watch(feed: Feed) -> str:
    """Show the feed until it is stopped.

    Only the end of the feed ends this. If it does not answer, or answers with an internal error, that is logged and the
    status is requested again.

    Raises:
        FeedFailedError: it failed, or ended with its coordinator or with its cluster.
    """
    from mbaas.ray_cluster import connection

    failed_at: float | None = None
    silence = _Silence(feed.name)
    rates, log = feed_view.RateWindow(), _Log()
    with console.updated_page(live=True) as show:
        while True:
            began = time.monotonic()
            try:
                status = feed.status(timeout_s=ANSWER_TIMEOUT_S)
            except FeedGoneError:
                raise _end_of(feed.name) from None
            except Exception as error:
                # Any error: Ray has no common class for errors of a failing cluster.
                if isinstance(error, FeedFailedError) and _was_stopped(error):
                    return "stopped from elsewhere"
                if isinstance(error, FeedFailedError) and not isinstance(error, FeedRestartingError):
                    raise FeedFailedError(f"feed {feed.name!r} failed: {error}") from None
                silence.add_failure(began, error)
                if silence.duration_s() >= LOST_S and (lost := connection.lost_cluster()):
                    raise _ClusterEndedError(f"feed {feed.name!r} ended: {lost}") from None
            else:
                silence.end()
                flow = rates.add(status)
                if console.out.is_terminal:
                    show(feed_view.compact(status, flow))
                else:
                    log.show(status, flow)
                if status.failed:  # show it for a while before this command ends
                    failed_at = began if failed_at is None else failed_at
                    if began - failed_at >= REASON_KEPT_S:
                        raise FeedFailedError(f"feed {feed.name!r} failed: {status.failed}")
            # From start to start, so that a slow answer does not lengthen the period.
            time.sleep(max(0.0, POLL_S - (time.monotonic() - began)))


class _Silence:
    """Logs a coordinator without a status: at the first failure, whenever the time doubles, and at the end."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._patience: Patience | None = None  # since the first of consecutive failures

    def add_failure(self, began: float, error: Exception) -> None:
        from mbaas.client.stalls import Patience

        is_first = self._patience is None
        self._patience = self._patience or Patience(math.inf, began, first_word_s=ANSWER_TIMEOUT_S)
        if self._patience.is_to_be_told(time.monotonic()) or is_first:
            reason = last_line(error)
            self._log(f"has not answered for {duration(self.duration_s())}, retrying: {reason}")

    def end(self) -> None:
        if self._patience is not None:
            self._log(f"answers again after {duration(self.duration_s())}")
        self._patience = None

    def duration_s(self) -> float:
        return 0.0 if self._patience is None else self._patience.waited_s(time.monotonic())

    def _log(self, what: str) -> None:
        console.line(console.out, f"{self._name}: {time.strftime('%H:%M:%S')} the coordinator {what}")


def _was_stopped(error: FeedFailedError) -> bool:
    """Return whether a feed was stopped, and did not die with its coordinator."""
    return not isinstance(error, FeedGoneError) and isinstance(error.__cause__, FeedGoneError)


def _end_of(name: str) -> FeedFailedError:
    """Return the error for a coordinator that is gone although the feed was not stopped.

    A cluster that is ending kills the coordinator slightly before its GCS, so this waits for the GCS.
    """
    from mbaas.ray_cluster import connection

    deadline = time.monotonic() + LOST_S
    while (lost := connection.lost_cluster()) is None:
        if time.monotonic() > deadline:
            return FeedFailedError(f"the coordinator of feed {name!r} died; Ray's logs may contain the reason")
        time.sleep(GONE_POLL_S)
    return _ClusterEndedError(f"feed {name!r} ended: {lost}")


class _ClusterEndedError(FeedFailedError):
    """The feed's cluster ended, so Ray can no longer be called."""


def _end_at_once(sentence: str) -> NoReturn:
    """Exit this process with an error: without its cluster, Ray would delay the exit by most of a minute."""
    from mbaas.ray_cluster import connection

    connection.kill_own_ray()
    console.say_error(sentence)
    sys.stdout.flush()
    os._exit(console.FAILED)


@dataclass
class _Log:
    """Lines for a log: the feed's notes as they occur, and its figures every `LINE_S`.

    Attributes:
        noted: the notes of the last snapshot, which have been written.
        next_at: time of the next line, by the feed's uptime.
    """

    noted: tuple[str, ...] = ()
    next_at: float = 0.0

    def show(self, status: FeedStatus, flow: feed_view.Flow) -> None:
        for note in _newer(self.noted, status.notes):
            console.line(console.out, f"{status.name}: {note}")
        self.noted = status.notes
        if status.uptime_s >= self.next_at:
            console.line(console.out, feed_view.one_line(status, flow))
            self.next_at = status.uptime_s + LINE_S


def _newer(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return the new entries of ``new``, a later state of the sliding window ``old``."""
    # length of the longest suffix of the old window that is a prefix of the new one
    kept = next(k for k in range(min(len(old), len(new)), -1, -1) if old[len(old) - k :] == new[:k])
    return new[kept:]


@console.command(console.app, console.FEEDS)
def stop(name: Annotated[str, typer.Argument()], address: console.Address = None) -> None:
    """End a feed, wherever it was started, and wait until it is gone.

    Trials that still use it get an error with this reason.

    Args:
        name: Name of the feed.

    Examples:
        mbaas stop train
    """
    console.join_cluster(address)
    import mbaas

    with console.doing(f"stopping feed {name!r}"):
        mbaas.stop(name)
        _wait_until_gone(name)
    console.line(console.out, f"feed {name!r} is stopped")


def _wait_until_gone(name: str) -> None:
    from mbaas.ray_cluster import actor_names

    deadline = time.monotonic() + GONE_TIMEOUT_S
    while actor_names.find_coordinator(name) is not None:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"feed {name!r} has not ended within {seconds(GONE_TIMEOUT_S)} of the request to stop; try again"
            )
        time.sleep(GONE_POLL_S)
