"""The ranks of data-parallel trials: where each runs, how they share minibatches, and where they begin together.

Ranks never talk to each other. Each tells the coordinator where it runs; when all are there, the coordinator fixes a
plan for each epoch, the ranks' nodes and the placement of samples, and gives every rank the same answer. From then on
everything is arithmetic: a sample's rank depends on its id and on that plan, not on where its pixels happened to be
made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mbaas.messages import RankOrders, RankPlace, RankPlan
from mbaas.placement import Placement

KEPT_EPOCHS = 4
"""Plans are kept for so many epochs behind the slowest rank: blocks are handed out ahead of their use."""


@dataclass
class _Trial:
    """The ranks of one trial.

    Attributes:
        places: rank -> its newest place.
        plans: epoch -> its plan; once made it is never changed.
        began: session -> the block at which that floating session was told to begin.
    """

    places: dict[int, RankPlace] = field(default_factory=dict)
    plans: dict[int, RankPlan] = field(default_factory=dict)
    began: dict[int, int] = field(default_factory=dict)


class RankTable:
    """Brings the ranks of trials together. It waits for nobody: who asks too early is told who is missing.

    A trial is forgotten when none of its ranks has an open session.

    Args:
        blocks_per_epoch: the first lane's blocks in an epoch.
        cursor_of: (consumer, session) -> its cursor; None if that session is not open.
    """

    def __init__(self, blocks_per_epoch: int, cursor_of: Callable[[str, int], int | None]) -> None:
        self._blocks_per_epoch, self._cursor_of = blocks_per_epoch, cursor_of
        self._trials: dict[tuple[str, int, int], _Trial] = {}

    def enlist(self, place: RankPlace) -> None:
        """Take in a rank that opened a session."""
        self._forget_ended()
        trial = self._trials.setdefault(place.group, _Trial())
        old = trial.places.pop(place.rank, None)
        if old is not None:
            trial.began.pop(old.session, None)
        trial.places[place.rank] = place
        for epoch, plan in place.plans.items():  # a coordinator that was restarted learns the plans from the ranks
            trial.plans.setdefault(epoch, plan)

    def trials(self) -> dict[str, Hashable]:
        """Each rank's name as a consumer -> what it has in common with the other ranks of its trial, and no others."""
        self._forget_ended()
        return {place.consumer: group for group, trial in self._trials.items() for place in trial.places.values()}

    def orders(
        self, place: RankPlace, epoch: int, placement: Placement | None, caches: Mapping[str, Any]
    ) -> RankOrders:
        """What a rank must know to go through an epoch. Others must be there only if its plan was not fixed before.

        Args:
            place: the rank that asks.
            epoch: the feed's epoch.
            placement: the newest; plans that are made now follow it.
            caches: see `RankOrders`.
        """
        self._forget_ended()
        trial = self._trials.get(place.group, _Trial())
        # An old session of the rank that asks does not count: it would go by a place where it no longer is.
        there = {rank for rank, other in trial.places.items() if rank != place.rank or other.session == place.session}
        missing = tuple(rank for rank in range(place.name.world_size) if rank not in there)
        # Only when all are there: whoever begins alone would be an epoch ahead of one that joins a moment later.
        if not missing and place.floats:
            self._begin(trial)
        start = trial.began.get(place.session) if place.floats else place.cursor
        if place.floats and start is not None:
            epoch = start // self._blocks_per_epoch
        # Fixed once and kept: if the placement changed in mid-epoch, ranks would take a sample twice or never.
        if not missing and epoch not in trial.plans:
            nodes = tuple(trial.places[rank].node for rank in range(place.name.world_size))
            trial.plans[epoch] = RankPlan(nodes, placement)
        if place.rank in missing or start is None or epoch not in trial.plans:
            return RankOrders(None, place.cursor, missing, caches, self._others(place, missing))
        self._forget_plans(trial)
        return RankOrders(trial.plans[epoch], start, (), caches)

    def _others(self, place: RankPlace, missing: tuple[int, ...]) -> dict[int, int]:
        """Which of the missing ranks have minibatches of another size, and which."""
        # Two loaders of one trial with other sizes would wait for each other for ever; the error can say why.
        alike = [other for trial in self._trials.values() for other in trial.places.values() if other.rank in missing]
        return {
            other.rank: other.batch_size
            for other in alike
            if other.group != place.group and other.group[:2] == place.group[:2]  # the same trial and world size
        }

    def _begin(self, trial: _Trial) -> None:
        """Tell ranks where to begin: with one that is in its first epoch, else where the last of them would."""
        floating = [place for place in trial.places.values() if place.floats]
        # One that is past its first epoch is no guide: those who come now must not skip what it has seen.
        begun = [trial.began[place.session] for place in floating if self._is_at_its_start(trial, place)]
        start = begun[0] if begun else max(place.cursor for place in floating)
        for place in floating:
            trial.began.setdefault(place.session, start)

    def _is_at_its_start(self, trial: _Trial, place: RankPlace) -> bool:
        """Whether a rank is in the first epoch of its session."""
        start, cursor = trial.began.get(place.session), self._cursor_of(place.consumer, place.session)
        return start is not None and cursor is not None and cursor < start + self._blocks_per_epoch

    def _forget_plans(self, trial: _Trial) -> None:
        """Forget the plans of epochs that all ranks have behind them."""
        # A rank whose session has just ended counts as being at the beginning: better to keep a plan too long.
        cursors = [self._cursor_of(place.consumer, place.session) or 0 for place in trial.places.values()]
        oldest = min(cursors) // self._blocks_per_epoch - KEPT_EPOCHS
        for epoch in [epoch for epoch in trial.plans if epoch < oldest]:
            del trial.plans[epoch]

    def _forget_ended(self) -> None:
        """Forget ranks whose session is over, and trials without ranks."""
        for key, trial in list(self._trials.items()):
            for rank, place in list(trial.places.items()):
                if self._cursor_of(place.consumer, place.session) is None:
                    del trial.places[rank]
                    trial.began.pop(place.session, None)
            if not trial.places:
                del self._trials[key]
