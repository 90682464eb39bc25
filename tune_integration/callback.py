"""The Tune callback that announces and removes trials at feeds."""

# ruff: noqa: ARG002 - the signatures are Tune's

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Sequence, Set
from typing import Any

import ray
from ray import tune
from ray.core.generated.gcs_pb2 import PlacementGroupTableData as Group  # type: ignore[attr-defined]
from ray.tune.experiment import Trial

import mbaas
from mbaas.coordinator.control import FeedControl, claims
from tune_integration.shortage import Node, why_none_starts

LOOK_S = 10.0
"""Period of the checks for trials without resources; the log gives the reason at the second check in a row."""

SILENT_S = 10.0
"""Time limit for the status of a feed that did not answer in time before, ahead of any other call."""

logger = logging.getLogger(__name__)


class FeedCallback(tune.Callback):
    """Announces each trial to feeds before it runs, and removes it when it stops running.

    Without it, trials still get exact epochs. With it, trials that start together begin the same epoch together, even
    if their processes take different times to start. A trial that ends or pauses does not delay others, and its
    position is reserved for the trial that takes over its slot.

    A feed that fails or is stopped during the search is logged once and then ignored: the search continues, and the
    trials that read from that feed raise its error. A feed that does not answer is also logged once, and called again
    at the next event.

    If no trial can start because prep workers hold the CPUs or GPUs, the log reports it once, with the amounts held by
    each feed, including feeds that the search does not use. The same applies to a running data-parallel trial whose
    ranks have no resources.

    Args:
        *feed_names: feeds that the trials use; they must be running on the same Ray cluster when ``fit()`` begins.

    Raises:
        ConfigError: no name, or a value that is not a string.

    Note:
        Tune pickles its callbacks with the experiment's state; only the names are pickled.
    """

    def __init__(self, *feed_names: str) -> None:
        if not feed_names or not all(isinstance(name, str) for name in feed_names):
            raise mbaas.ConfigError(
                f"FeedCallback needs names of feeds, as in FeedCallback('train'), got {feed_names!r}"
            )
        self._names = feed_names
        self._begin()

    def _begin(self) -> None:
        self._feeds: dict[str, FeedControl] = {}
        """Running feeds, by name."""
        self._troubled: set[str] = set()
        """Feeds whose last call failed, because their program died or for another reason."""
        self._silent: set[str] = set()
        """The subset that did not answer in time."""
        self._running: set[str] = set()
        """Ids of trials that started and have not stopped, if known."""
        self._reserved = 0
        """Number of reservations held for future trials; at most the number of trials still to start."""
        self._total: int | None = None
        """Number of trials of the search, if Tune provides it."""
        self._look_at = 0.0
        """Time of the next check for trials without resources."""
        self._unplaced: set[str] = set()
        """Ids of the placement groups without resources at the last check."""
        self._has_begun = False
        """True after the first step of the search."""
        self._said_why = False
        """True once the reason was logged; False when all have resources."""

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._names = state["names"]
        self._begin()

    def __repr__(self) -> str:
        return f"FeedCallback({', '.join(map(repr, self._names))})"

    # ---- Tune hooks ----

    def setup(
        self,
        stop: Any = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Find the feeds.

        Raises:
            FeedNotFoundError: a feed does not run; the message lists the running ones.
        """
        self._begin()
        self._total = total_num_samples
        self._feeds = {name: FeedControl.of(name) for name in self._names}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Remove trials of a restored search that no longer run from the feeds, at the first step.

        The program that ran the search before may have been killed, and its trials with it. Other trials would wait for
        them until their leases end.
        """
        if not self._has_begun:
            self._has_begun = True
            self._each(lambda feed: _take_off(feed, {trial.trial_id for trial in trials} - self._running))

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Announce the trial. Tune calls this before the trial's function runs, so its reservation exists when it, or
        its first rank, joins.

        The first trial is announced together with the trials that start at the same time: Ray has given them resources
        and starts their processes. Starting may take seconds, in which a fast trial could finish epochs that they
        should share.
        """
        others = 0 if self._running else _beside(trial, trials)
        self._running.add(trial.trial_id)
        self._reserved = max(0, self._reserved - 1, others)
        self._each(lambda feed: feed.announce([trial.trial_id], others=others))

    def on_trial_complete(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._end(trial, trials)

    def on_trial_error(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._end(trial, trials)

    def on_trial_recover(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        self._end(trial, trials)  # it failed; before a retry, Tune calls on_trial_start again

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Detect pauses of trials, for which Tune has no hook."""
        for trial in trials:
            if trial.trial_id in self._running and trial.status != Trial.RUNNING:
                self._end(trial, trials)
        with contextlib.suppress(mbaas.MbaasError, ray.exceptions.RayError):  # Ray is failing: check again later
            self._look_for_room(trials, time.monotonic())

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        for trial_id in sorted(self._running):
            self._remove(trial_id)
        self._running.clear()
        # No trial will use these reservations, and other consumers would wait for them.
        if reservations := self._reserved:
            self._each(lambda feed: feed.release_reservations(reservations))
        self._reserved = 0

    # ---- implementation ----

    def _look_for_room(self, trials: Sequence[Trial], now: float) -> None:
        # Logs why trials have no resources, if feeds hold them: Tune waits without a message.
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        wanted = _wanted(trial for trial in trials if trial.status == Trial.PENDING)
        # Tune lists a trial that has its resources and is starting as PENDING.
        is_running = any(trial.status == Trial.RUNNING for trial in trials) or any(
            bundles in wanted for bundles in _groups(Group.CREATED).values()
        )
        # While one trial runs, others may wait. But Tune lists a data-parallel trial as RUNNING before its ranks have
        # resources.
        groups = _groups(Group.PENDING)
        unplaced = {group: bundles for group, bundles in groups.items() if (bundles in wanted) is not is_running}
        still = [bundles for group, bundles in unplaced.items() if group in self._unplaced]
        self._unplaced = set(unplaced)
        self._said_why = self._said_why and bool(unplaced)
        if not still or self._said_why:
            return
        what, asks = "no trial can start", "each trial requests"
        if is_running:
            what, asks = "the ranks of a running trial cannot start", "they request"
        if why := why_none_starts(still[0], _nodes(), _held(), asks=asks):
            logger.warning("%s: %s", what, why)
            self._said_why = True

    def _end(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """End the trial's sessions; reserve its position if another trial can take it."""
        if trial.trial_id not in self._running:
            return
        self._running.remove(trial.trial_id)
        successors = self._still_to_start(trials)
        self._reserved = min(self._reserved + 1, successors)  # upper bound: the feed decides
        self._remove(trial.trial_id, successors)

    def _still_to_start(self, trials: Sequence[Trial]) -> int:
        """Return the number of trials that will take the next free slots.

        PAUSED trials do not count: HyperBand resumes only some of them, and an unused reservation delays the others for
        the whole reservation time. A resumed trial becomes PENDING first.
        """
        pending = sum(trial.status == Trial.PENDING for trial in trials)
        return pending + max(0, (self._total or 0) - len(trials))

    def _remove(self, trial_id: str, successors: int = 0) -> None:
        self._each(lambda feed: feed.remove(trial_id, successors=successors))

    def _each(self, act: Callable[[FeedControl], None]) -> None:
        # A feed that has ended is logged once and not called again. All other feeds are.
        for name, feed in list(self._feeds.items()):
            try:
                if name in self._silent:
                    feed.status(timeout_s=SILENT_S)  # one feed must not delay the search at every trial
                act(feed)
                self._troubled.discard(name)
                self._silent.discard(name)
            except mbaas.FeedGoneError as error:
                # Its loaders wait for a feed restart; the search must not give up before they do.
                self._trouble(name, "feed %r is gone; its trials wait for a feed restart: %s", error)
            except (mbaas.WaitTimeoutError, mbaas.FeedRestartingError) as error:
                self._silent.add(name)
                self._trouble(
                    name,
                    "feed %r does not answer; the search continues and calls it again at the next event: %s",
                    error,
                )
            except mbaas.FeedFailedError as error:
                del self._feeds[name]
                logger.warning("feed %r has ended; trials that use it will raise its error: %s", name, error)
            except (mbaas.MbaasError, ray.exceptions.RayError) as error:
                self._trouble(
                    name,
                    "the call to feed %r failed; the search continues and calls it again at the next event: %s",
                    error,
                )

    def _trouble(self, name: str, sentence: str, error: Exception) -> None:
        # Logs once until the feed has answered again.
        if name not in self._troubled:
            logger.warning(sentence, name, error)
        self._troubled.add(name)


def _take_off(feed: FeedControl, trials: Set[str]) -> None:
    for trial in sorted({consumer.trial for consumer in feed.status(timeout_s=SILENT_S).consumers} & trials):
        feed.remove(trial)


Bundles = list[dict[str, float]]
"""Resources requested by a trial or its ranks; all of a bundle must be free on one node."""


def _beside(first: Trial, trials: Sequence[Trial]) -> int:
    """Return the number of trials that have resources besides the first one, and so will start shortly."""
    waiting = [trial for trial in trials if trial is not first and trial.status == Trial.PENDING]
    wanted = _wanted([first, *waiting])
    placed = 0
    with contextlib.suppress(ray.exceptions.RayError):  # Ray is failing: each is then announced at its start
        placed = sum(bundles in wanted for bundles in _groups(Group.CREATED).values())
    return max(0, min(placed - 1, len(waiting)))


def _wanted(trials: Iterable[Trial]) -> list[Bundles]:
    factories: list[Any] = [trial.placement_group_factory for trial in trials]
    return [list(factory.bundles) for factory in factories if factory is not None]


def _groups(state: int) -> dict[str, Bundles]:
    """Return this program's placement groups in a state: id -> bundles.

    Args:
        state: ``PENDING`` for groups without resources, ``CREATED`` for placed ones.
    """
    # Ray's public table does not contain the owner, and another search may wait for other resources.
    table = ray._private.state.state._connect_and_get_accessor().get_placement_group_table()
    own = ray.get_runtime_context().get_job_id()
    return {
        group.placement_group_id.hex(): [dict(bundle.unit_resources) for bundle in group.bundles]
        for group in map(Group.FromString, table)
        if group.state == state and group.creator_job_id.hex() == own
    }


def _held() -> dict[str, dict[str, float]]:
    # not from their status: a silent coordinator must not block Tune
    return {name: {"CPU": each.cpus, "GPU": each.gpus} for name, each in claims().items()}


def _nodes() -> list[Node]:
    # Only the sum of free resources over all nodes is public.
    free = ray._private.state.available_resources_per_node()
    return [Node(each["Resources"], free.get(each["NodeID"], {})) for each in ray.nodes() if each["Alive"]]
