"""``mbaas serve`` serves a feed in the foreground, or a detached one; ``mbaas stop`` ends either."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from rich.live import Live

from mbaas.cli import feed_file, feed_view, reading
from mbaas.cli.connection import connect, ended_on_purpose, is_named
from mbaas.cli.console import FAILED, end_as_ctrl_c, err, line, out, plain, say_error, write_json
from mbaas.client.patience import Patience
from mbaas.errors import ConfigError, FeedFailedError, FeedGoneError, FeedRestartingError, WaitTimeoutError, last_line
from mbaas.units import count, duration, seconds

if TYPE_CHECKING:
    from mbaas.dataset import Dataset
    from mbaas.feed import Feed
    from mbaas.status import FeedStatus

LOOK_S = 1.0
"""The period at which the feed is looked at. If another program ends it, this command notices within that time."""

LINE_S = 10.0
"""The period of the lines that are logged where nobody watches a terminal."""

ANSWER_TIMEOUT_S = 10.0
"""After this long without an answer the log says that the coordinator is silent."""

LOST_S = 10.0
"""After this long without an answer we check whether the feed's cluster has ended."""

LAST_WORD_S = 5.0
"""How long a failed feed stays, so that trials can still learn the reason from it."""

GONE_TIMEOUT_S = 30.0
GONE_LOOK_S = 0.05
"""How long `mbaas stop` waits until a feed is gone, and how often it looks."""


def serve(file: Path, *, name: str | None, address: str | None, detach: bool, local: bool = False) -> None:
    """Serve what ``file`` describes until Ctrl-C or until somebody stops the feed; with ``detach`` only start it.

    With ``local`` it has a cluster of its own, whatever runs here already.

    Raises:
        ConfigError: the file, or what it asks for, cannot work.
        DatasetError: the data is not there.
        FeedFailedError: the feed could not go on.
        ResourceError: it is to be detached and no cluster runs.
    """
    wanted = feed_file.load(file, name=name)  # before anything is started: most mistakes are in the file
    detach = detach or wanted.options.detached
    if local and (detach or address is not None):
        other = "a detached feed" if detach else f"--address {address}"
        raise ConfigError(f"--local starts a cluster that ends with this command, and {other} needs one that runs")
    with end_as_ctrl_c(lambda: _see_to_the_end(wanted.name)):
        if detach or (is_named(address) and not local):  # a cluster that is there is joined, or missed, in a moment
            _connect(address, detach=detach, local=local)
        dataset = reading.read(wanted.data)  # before a Ray is started: the data may not be there
        _connect(address, detach=detach, local=local)
        feed = _start(wanted, dataset, detach=detach)
        if detach:
            line(out, f"it is detached: it runs until `mbaas stop {feed.name}`, or until the cluster ends")
            return
        try:
            reason = _watch(feed)
        except _ClusterEndedError as error:
            _end_at_once(str(error))
        except KeyboardInterrupt:
            reason = "interrupted"
        finally:
            feed.stop()  # also after a failure: its name and its CPUs should be free again
    line(out, f"feed {wanted.name!r} ended: {reason}")


def print_schema() -> None:
    """Write the JSON schema of the file that `serve` reads."""
    write_json(json.dumps(feed_file.schema(), indent=2))


def _connect(address: str | None, *, detach: bool, local: bool) -> None:
    with _progress("connecting to Ray"):
        if local:
            from mbaas import runtime

            runtime.start_own_ray()
        elif detach and not is_named(address):
            from mbaas.serving import ensure_lasting_ray

            ensure_lasting_ray()  # its error says what a detached feed needs
        else:
            connect(address, start=not detach)


def _start(wanted: feed_file.FeedConfig, dataset: Dataset, *, detach: bool) -> Feed:
    import mbaas

    with _progress(f"starting feed {wanted.name!r}"):
        feed = mbaas.serve(wanted.name, dataset, wanted.pipeline, **{**wanted.options.given(), "detached": detach})
    classes = f" in {count(len(dataset.class_names))} classes" if dataset.class_names else ""
    samples = f"{count(len(dataset))} samples{classes} of {wanted.data.where}"
    line(out, f"feed {wanted.name!r} serves {samples}; trials join with mbaas.join({wanted.name!r})")
    return feed


def _see_to_the_end(name: str) -> None:
    from mbaas import runtime

    runtime.see_to_the_end()
    line(out, f"feed {name!r} ended: interrupted")
    sys.stdout.flush()
    os._exit(0)


@contextmanager
def _progress(what: str) -> Iterator[None]:
    """Show a spinner on a terminal, and nothing in a log."""
    with err.status(f"{plain(what)} ..."):
        yield


def _watch(feed: Feed) -> str:
    """Show the feed until somebody stops it.

    Only a feed that has ended ends this. One that does not answer, or answers with an internal error, is told of and
    looked at again.

    Raises:
        FeedFailedError: it failed, or ended with its coordinator or with its cluster.
    """
    from mbaas import runtime

    failed_at: float | None = None
    silence = _Silence(feed.name)
    with _display() as show:
        while True:
            began = time.monotonic()
            try:
                status = feed.status(timeout_s=ANSWER_TIMEOUT_S)
            except FeedGoneError:
                raise _how_gone(feed.name) from None
            except Exception as error:
                # Anything: Ray has no one class for what is said of a cluster that is in trouble.
                if isinstance(error, FeedFailedError) and ended_on_purpose(error):
                    return "stopped from elsewhere"
                if isinstance(error, FeedFailedError) and not isinstance(error, FeedRestartingError):
                    raise FeedFailedError(f"feed {feed.name!r} failed: {error}") from None
                silence.goes_on(began, error)
                if silence.lasts_s() >= LOST_S and (lost := runtime.lost_cluster()):
                    raise _ClusterEndedError(f"feed {feed.name!r} ended: {lost}") from None
            else:
                silence.is_over()
                show(status)
                if status.failed:  # shown and kept for a while before it ends here
                    failed_at = began if failed_at is None else failed_at
                    if began - failed_at >= LAST_WORD_S:
                        raise FeedFailedError(f"feed {feed.name!r} failed: {status.failed}")
            # From the beginning of one look to that of the next: a slow answer must not make the period longer.
            time.sleep(max(0.0, LOOK_S - (time.monotonic() - began)))


class _Silence:
    """Tells of a coordinator that gives no status: when it begins, whenever it has lasted twice as long, and its end.

    Args:
        name: the feed's.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._patience: Patience | None = None  # since the first look in a row that failed

    def goes_on(self, began: float, error: Exception) -> None:
        """Note a look that failed."""
        is_first = self._patience is None
        self._patience = self._patience or Patience(math.inf, began, first_word_s=ANSWER_TIMEOUT_S)
        if self._patience.is_to_be_told(time.monotonic()) or is_first:
            reason = last_line(error)
            self._tell(f"gives no status, for {duration(self.lasts_s())} now; it is asked again: {reason}")

    def is_over(self) -> None:
        """Note a look that did not fail."""
        if self._patience is not None:
            self._tell(f"gives its status again, after {duration(self.lasts_s())}")
        self._patience = None

    def lasts_s(self) -> float:
        """Return for how long there was no status."""
        return 0.0 if self._patience is None else self._patience.waited_s(time.monotonic())

    def _tell(self, what: str) -> None:
        line(out, f"{self._name}: {time.strftime('%H:%M:%S')} the coordinator {what}")


def _how_gone(name: str) -> FeedFailedError:
    """Return the error that says why a feed's coordinator is gone that nobody stopped.

    A cluster that ends takes it with it a little before its GCS goes, so that is waited for.
    """
    from mbaas import runtime

    deadline = time.monotonic() + LOST_S
    while (lost := runtime.lost_cluster()) is None:
        if time.monotonic() > deadline:
            return FeedFailedError(f"the coordinator of feed {name!r} died; Ray's logs may say why")
        time.sleep(GONE_LOOK_S)
    return _ClusterEndedError(f"feed {name!r} ended: {lost}")


class _ClusterEndedError(FeedFailedError):
    """The cluster of a feed ended, so that nothing can be asked of Ray any more."""


def _end_at_once(sentence: str) -> NoReturn:
    """End this process with an error: without its cluster Ray would take most of a minute to let go of it."""
    from mbaas import runtime

    runtime.kill_own_ray()
    say_error(sentence)
    sys.stdout.flush()
    os._exit(FAILED)


@contextmanager
def _display() -> Iterator[Callable[[FeedStatus], None]]:
    """Yield a function that shows a snapshot: in place on a terminal, as lines from time to time in a log."""
    if not out.is_terminal:
        yield _Log().show
        return
    rates = feed_view.RateWindow()
    # Drawn once a look: a thread that redraws in between would show the same figures again.
    with Live(console=out, auto_refresh=False, vertical_overflow="crop") as live:
        yield lambda status: live.update(feed_view.compact(status, rates.add(status)), refresh=True)


@dataclass
class _Log:
    """Lines for a log: the feed's notes as they come, and its figures every `LINE_S`.

    Attributes:
        noted: the notes of the last snapshot; all of them are written.
        next_at: when the next line is due, by the feed's own clock.
    """

    rates: feed_view.RateWindow = field(default_factory=feed_view.RateWindow)
    noted: tuple[str, ...] = ()
    next_at: float = 0.0

    def show(self, status: FeedStatus) -> None:
        rates = self.rates.add(status)
        for note in _newer(self.noted, status.notes):
            line(out, f"{status.name}: {note}")
        self.noted = status.notes
        if status.uptime_s >= self.next_at:
            line(out, feed_view.one_line(status, rates))
            self.next_at = status.uptime_s + LINE_S


def _newer(old: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return what ``new``, a sliding window like ``old`` but later, holds more."""
    # the longest end of the old window with which the new one begins
    kept = next(k for k in range(min(len(old), len(new)), -1, -1) if old[len(old) - k :] == new[:k])
    return new[kept:]


def stop(name: str, *, address: str | None) -> None:
    """End feed ``name``; its name is free when this returns.

    Raises:
        FeedNotFoundError: there is none of that name; the message lists those that run.
        WaitTimeoutError: it is still there after `GONE_TIMEOUT_S`.
    """
    with err.status("connecting to Ray ..."):
        connect(address, start=False)
    import mbaas

    with err.status(plain(f"stopping feed {name!r} ...")):
        mbaas.stop(name)
        _wait_until_gone(name)
    line(out, f"feed {name!r} is stopped")


def _wait_until_gone(name: str) -> None:
    from mbaas import runtime

    deadline = time.monotonic() + GONE_TIMEOUT_S
    while runtime.find_coordinator(name) is not None:
        if time.monotonic() > deadline:
            raise WaitTimeoutError(
                f"feed {name!r} was told to stop and is still there after {seconds(GONE_TIMEOUT_S)}; try again"
            )
        time.sleep(GONE_LOOK_S)
