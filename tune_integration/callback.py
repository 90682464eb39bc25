"""The search's side: a callback by which Tune tells feeds which trials come and go."""

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
from mbaas.errors import FeedRestartingError
from tune_integration.shortage import Node, why_none_starts

LOOK_S = 10.0
"""The period of the looks whether trials wait for a place; if one still does at the next look, the log says why."""

SILENT_S = 10.0
"""A feed that did not answer in time has this long to answer anything before it is asked for more."""

logger = logging.getLogger(__name__)


class FeedCallback(tune.Callback):
    """Announces each trial to feeds before it runs, and takes it off them when it does not run any more.

    Without it trials still get exact epochs. With it those that start together begin the same epoch together, however
    unequal the times are that their processes need to start. A trial that ends or pauses holds nobody up, and its place
    waits for the trial that takes over its slot.

    A feed that fails or is stopped during the search is logged once and left alone from then on: the search
    goes on, and the trials that read from that feed raise its error themselves. One that does not answer is logged
    once, too, and asked again at the next occasion.

    While no trial can start because prep workers of feeds hold the CPUs or GPUs that trials ask for, the log says
    so, once, with who holds how much: also feeds that the search does not use. So it does of a data-parallel trial that
    runs while its ranks have no place.

    Args:
        *feed_names: feeds that the trials use; they must run when ``fit()`` begins, on the same Ray cluster.

    Raises:
        ConfigError: no name, or something that is not a name.

    Note:
        Tune pickles its callbacks with the experiment's state; only the names go there.
    """

    def __init__(self, *feed_names: str) -> None:
        if not feed_names or not all(isinstance(name, str) for name in feed_names):
            raise mbaas.ConfigError(
                f"FeedCallback needs names of feeds, as in FeedCallback('train'), got {feed_names!r}"
            )
        self._names = feed_names
        self._begin()

    def _begin(self) -> None:
        self._feeds: dict[str, mbaas.Feed] = {}
        """Feeds by name; only those that have not ended."""
        self._troubled: set[str] = set()
        """Feeds that did not do what was asked last, because their programs died or for another reason."""
        self._silent: set[str] = set()
        """Those of them that did not answer in time."""
        self._running: set[str] = set()
        """Ids of trials that started and were not seen to stop running."""
        self._reserved = 0
        """Number of reservations that are held for trials to come; never more than are still to start."""
        self._total: int | None = None
        """How many trials the search will have, if Tune says so."""
        self._look_at = 0.0
        """When to look next whether trials wait for a place."""
        self._unplaced: set[str] = set()
        """Ids of the placement groups that had no place at the last look."""
        self._has_begun = False
        """Whether a step of the search has begun."""
        self._said_why = False
        """Whether it was said why they have none; False once all have one."""

    def __getstate__(self) -> dict[str, Any]:
        return {"names": self._names}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._names = state["names"]
        self._begin()

    def __repr__(self) -> str:
        return f"FeedCallback({', '.join(map(repr, self._names))})"

    # ---- hooks of Tune ----

    def setup(
        self,
        stop: Any = None,
        num_samples: int | None = None,
        total_num_samples: int | None = None,
        **info: Any,
    ) -> None:
        """Find the feeds.

        Raises:
            FeedNotFoundError: one does not run; the message names those that do.
        """
        self._begin()
        self._total = total_num_samples
        self._feeds = {name: mbaas.connect(name) for name in self._names}

    def on_step_begin(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Take trials off the feeds, at the first step, that run no more: of a search that is restored.

        The program that ran it before may have been killed, and its trials with it. The others would wait for them
        until their leases end.
        """
        if not self._has_begun:
            self._has_begun = True
            self._each(lambda feed: _take_off(feed, {trial.trial_id for trial in trials} - self._running))

    def on_trial_start(self, iteration: int, trials: list[Trial], trial: Trial, **info: Any) -> None:
        """Announce the trial. Tune calls this before the trial's function runs, and waits for it: a place is held
        when the trial joins, or the first of its ranks.

        With the first one those are announced that begin with it: Ray gave them their CPUs and GPUs, and starts their
        processes. They may need seconds more, in which a fast trial would be through epochs that they could share.
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
        self._end(trial, trials)  # it failed; when it is tried again, Tune calls on_trial_start once more

    def on_step_end(self, iteration: int, trials: list[Trial], **info: Any) -> None:
        """Notice pauses, within a step: Tune has no hook for them."""
        for trial in trials:
            if trial.trial_id in self._running and trial.status != Trial.RUNNING:
                self._end(trial, trials)
        with contextlib.suppress(mbaas.MbaasError, ray.exceptions.RayError):  # Ray in trouble: it is looked again later
            self._look_for_room(trials, time.monotonic())

    def on_experiment_end(self, trials: list[Trial], **info: Any) -> None:
        for trial_id in sorted(self._running):
            self._remove(trial_id)
        self._running.clear()
        # Nobody will come for these reservations. Held, they would keep other consumers of the feed waiting.
        if reservations := self._reserved:
            self._each(lambda feed: feed.release_reservations(reservations))
        self._reserved = 0

    # ---- what they do ----

    def _look_for_room(self, trials: Sequence[Trial], now: float) -> None:
        """Log why trials have no place, if feeds are why: Tune itself would wait without a word of them."""
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        wanted = _wanted(trial for trial in trials if trial.status == Trial.PENDING)
        # A trial that has its place, and whose process starts, is PENDING for Tune.
        is_running = any(trial.status == Trial.RUNNING for trial in trials) or any(
            bundles in wanted for bundles in _groups(Group.CREATED).values()
        )
        # While one trial runs, others may wait. But a data-parallel one runs, for Tune, before its ranks have a place.
        groups = _groups(Group.PENDING)
        unplaced = {group: bundles for group, bundles in groups.items() if (bundles in wanted) is not is_running}
        still = [bundles for group, bundles in unplaced.items() if group in self._unplaced]
        self._unplaced = set(unplaced)
        self._said_why = self._said_why and bool(unplaced)
        if not still or self._said_why:
            return
        what, asks = "no trial can start", "each trial asks"
        if is_running:
            what, asks = "a trial that runs has no place for its ranks", "they ask"
        if why := why_none_starts(still[0], _nodes(), _held(), asks=asks):
            logger.warning("%s: %s", what, why)
            self._said_why = True

    def _end(self, trial: Trial, trials: Sequence[Trial]) -> None:
        """End the trial's sessions, if it has any; hold its place if there is a trial to take it."""
        if trial.trial_id not in self._running:
            return
        self._running.remove(trial.trial_id)
        successors = self._still_to_start(trials)
        self._reserved = min(self._reserved + 1, successors)  # at most: that is the feed's decision
        self._remove(trial.trial_id, successors)

    def _still_to_start(self, trials: Sequence[Trial]) -> int:
        """Return how many trials will take the next free slots.

        PAUSED ones do not count: HyperBand resumes only some of them, and a reservation that nobody takes holds up
        the others for the whole reservation time. One that is resumed becomes PENDING first.
        """
        pending = sum(trial.status == Trial.PENDING for trial in trials)
        return pending + max(0, (self._total or 0) - len(trials))

    def _remove(self, trial_id: str, successors: int = 0) -> None:
        self._each(lambda feed: feed.remove(trial_id, successors=successors))

    def _each(self, act: Callable[[mbaas.Feed], None]) -> None:
        """Do something with each feed. One that has ended is named once and never asked again; all others are."""
        for name, feed in list(self._feeds.items()):
            try:
                if name in self._silent:
                    feed.status(timeout_s=SILENT_S)  # a search must not stand still at every trial for one of its feeds
                act(feed)
                self._troubled.discard(name)
                self._silent.discard(name)
            except mbaas.FeedGoneError as error:
                # Its loaders wait for it to be served again; a search must not leave it before they do.
                self._trouble(name, "feed %r is gone, its trials wait for it to be served again: %s", error)
            except (mbaas.WaitTimeoutError, FeedRestartingError) as error:
                self._silent.add(name)
                self._trouble(name, "feed %r does not answer, the search asks it again at the next occasion: %s", error)
            except mbaas.FeedFailedError as error:
                del self._feeds[name]
                logger.warning("feed %r left the search, trials that use it will raise its error: %s", name, error)
            except (mbaas.MbaasError, ray.exceptions.RayError) as error:
                self._trouble(name, "feed %r erred, the search asks it again at the next occasion: %s", error)

    def _trouble(self, name: str, sentence: str, error: Exception) -> None:
        """Log what is the matter with a feed, once until it has answered again."""
        if name not in self._troubled:
            logger.warning(sentence, name, error)
        self._troubled.add(name)


def _take_off(feed: mbaas.Feed, trials: Set[str]) -> None:
    """End the sessions of trials that are on a feed."""
    for trial in sorted({member.trial for member in feed.status(timeout_s=SILENT_S).members} & trials):
        feed.remove(trial)


Bundles = list[dict[str, float]]
"""What a trial, or its ranks, ask for; all of a bundle must be free on one node."""


def _beside(first: Trial, trials: Sequence[Trial]) -> int:
    """Return how many trials have a place beside the first one of a search, so that they will start in a moment."""
    waiting = [trial for trial in trials if trial is not first and trial.status == Trial.PENDING]
    wanted = _wanted([first, *waiting])
    placed = 0
    with contextlib.suppress(ray.exceptions.RayError):  # Ray in trouble: then each is announced when it starts
        placed = sum(bundles in wanted for bundles in _groups(Group.CREATED).values())
    return max(0, min(placed - 1, len(waiting)))


def _wanted(trials: Iterable[Trial]) -> list[Bundles]:
    """Return what trials ask for, each."""
    factories: list[Any] = [trial.placement_group_factory for trial in trials]
    return [list(factory.bundles) for factory in factories if factory is not None]


def _groups(state: int) -> dict[str, Bundles]:
    """Return what this program asked Ray for: id of a placement group -> its bundles.

    Args:
        state: ``PENDING`` for those that have no place yet, ``CREATED`` for those that have one.
    """
    # Ray's public table of them does not say whose they are, and another search may wait for something else.
    table = ray._private.state.state._connect_and_get_accessor().get_placement_group_table()
    own = ray.get_runtime_context().get_job_id()
    return {
        group.placement_group_id.hex(): [dict(bundle.unit_resources) for bundle in group.bundles]
        for group in map(Group.FromString, table)
        if group.state == state and group.creator_job_id.hex() == own
    }


def _held() -> dict[str, dict[str, float]]:
    """Feed -> what its prep workers reserve, of all feeds of the cluster."""
    held = {}
    for feed in mbaas.feeds():
        # not by its status: Tune must not stand still because a coordinator does
        if (claims := feed.claims()) is not None:
            held[feed.name] = {"CPU": claims.cpus, "GPU": claims.gpus}
    return held


def _nodes() -> list[Node]:
    """Return what the cluster's nodes have, and what of it is free."""
    # Ray tells what is free on each node in no public way; only the sum over all nodes is public.
    free = ray._private.state.available_resources_per_node()
    return [Node(each["Resources"], free.get(each["NodeID"], {})) for each in ray.nodes() if each["Alive"]]
