"""The ranks of data-parallel trials: where each runs, how they share minibatches, and where they begin together.

Ranks never talk to each other. Each tells the coordinator where it runs; when all are there, the coordinator fixes a
plan for each epoch, the ranks' nodes and the placement of samples, and gives every rank the same answer. From then on
everything is arithmetic: a sample's rank depends on its id and on that plan, not on where its pixels happened to be
made.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mbaas.messages import RankOrders, RankPlan, RankReport
from mbaas.placement import Placement

KEPT_EPOCHS = 4
"""Plans are kept for this many epochs behind the slowest rank, because blocks are handed out ahead of their use."""

MOST_PLANS = 1000
"""Plans of one trial that are kept at once: ranks tell of a few, and only of epochs which they are in."""

KEPT_TRIALS = 100
"""Trials without an open session whose plans are kept, because some of their ranks went by them and others did not."""


@dataclass
class _Rank:
    """A rank of a trial, as its newest session found it.

    Attributes:
        report: what it told.
        cursor: of this session, when `RankTable` last looked.
        began: the block at which this session was told to begin, if it floats.
        is_alone: whether it was told so without the others, who had begun there and were gone.
    """

    report: RankReport
    cursor: int
    began: int | None = None
    is_alone: bool = False

    def guide(self, blocks_per_epoch: int) -> int | None:
        """Return the block at which those who come now begin because this one did; None if they need not.

        One that is past its first epoch is no guide: they must not skip what it has seen. But if it began alone, they
        are the ones whose share of that epoch nobody else has.
        """
        if self.began is not None and (self.is_alone or self.cursor < self.began + blocks_per_epoch):
            return self.began
        return None


@dataclass
class _Trial:
    """The ranks of one trial.

    Attributes:
        ranks: by number, those whose session is open.
        plans: epoch -> its plan; once made it is never changed.
        given: epoch -> rank -> its session that was given the plan. A rank that comes anew begins anew, and so must the
            others: then they count as not given it.
        start: the block at which ranks that float were told to begin last.
    """

    ranks: dict[int, _Rank] = field(default_factory=dict)
    plans: dict[int, RankPlan] = field(default_factory=dict)
    given: dict[int, dict[int, int]] = field(default_factory=dict)
    start: int | None = None

    def give(self, report: RankReport, epoch: int) -> RankPlan:
        """Return the plan of an epoch, which a rank goes by from now on."""
        given = self.given.setdefault(epoch, {})
        if given.get(report.rank, report.session) != report.session:
            given.clear()
        given[report.rank] = report.session
        return self.plans[epoch]

    def owes(self, epoch: int, ranks: Iterable[int]) -> bool:
        """Whether one of ``ranks`` was not given an epoch's plan that others go by."""
        given = self.given.get(epoch, {})
        return bool(given) and not given.keys() >= {*ranks}

    def keep_plans(self, epochs: Iterable[int]) -> None:
        """Forget the plans of all other epochs."""
        self.plans = {epoch: self.plans[epoch] for epoch in epochs}
        self.given = {epoch: ranks for epoch, ranks in self.given.items() if epoch in self.plans}


class RankTable:
    """Brings the ranks of trials together. It waits for nobody: a rank that asks too early is told who is missing.

    A trial is forgotten when none of its ranks has an open session, but for plans that only some of its ranks were
    given. When a trial starts again, the sessions of its dead are open for a while: so a rank may begin, and be done
    with its last epoch, before another one comes, which must go by the same plan.

    Args:
        blocks_per_epoch: the first lane's blocks in an epoch.
        cursor_of: (consumer, session) -> its cursor; None if that session is not open.
    """

    def __init__(self, blocks_per_epoch: int, cursor_of: Callable[[str, int], int | None]) -> None:
        self._blocks_per_epoch, self._cursor_of = blocks_per_epoch, cursor_of
        self._trials: dict[tuple[str, int, int], _Trial] = {}

    def enlist(self, report: RankReport) -> None:
        """Take in a rank that opened a session."""
        self._look()
        trial = self._trials.pop(report.group, _Trial())
        self._trials[report.group] = trial  # the last one now: of those without ranks the first are forgotten
        trial.ranks[report.rank] = _Rank(report, report.cursor)
        for epoch, plan in report.plans.items():  # a coordinator that was restarted learns the plans from the ranks
            if len(trial.plans) < MOST_PLANS:
                trial.plans.setdefault(epoch, plan)

    def trials(self) -> dict[str, Hashable]:
        """Return for each rank, by its name as a consumer, a key that all ranks of its trial share."""
        self._look()
        return {rank.report.consumer: group for group, trial in self._trials.items() for rank in trial.ranks.values()}

    def orders(
        self, report: RankReport, epoch: int, placement: Placement | None, caches: Mapping[str, Any]
    ) -> RankOrders:
        """Tell a rank what it must know to go through an epoch.

        The other ranks must be there only if the epoch's plan was not fixed before.

        Args:
            report: the rank that asks.
            epoch: the feed's epoch.
            placement: the newest; plans that are made now follow it.
            caches: see `RankOrders`.
        """
        self._look()
        trial = self._trials.get(report.group, _Trial())
        # An old session of the rank that asks does not count: it would go by a node where it no longer is.
        there = {n for n, rank in trial.ranks.items() if n != report.rank or rank.report.session == report.session}
        missing = tuple(rank for rank in range(report.name.world_size) if rank not in there)
        start: int | None = report.cursor
        if report.floats:
            # Only when all are there: a rank that begins alone would be an epoch ahead of one that joins a moment
            # later.
            if not missing:
                self._begin(trial)
            start = self._start_of(trial, report) if report.rank in there else None
            epoch = epoch if start is None else start // self._blocks_per_epoch
        # Fixed once and kept: if the placement changed in mid-epoch, ranks would take a sample twice or never.
        if not missing and epoch not in trial.plans:
            nodes = tuple(trial.ranks[rank].report.node for rank in range(report.name.world_size))
            trial.plans[epoch] = RankPlan(nodes, placement)
        if report.rank in missing or start is None or epoch not in trial.plans:
            return RankOrders(None, report.cursor, missing, caches, self._others(report, missing))
        plan = trial.give(report, epoch)
        self._forget_plans(trial)  # perhaps this one, too: a rank may ask for an epoch that all have behind them
        return RankOrders(plan, start, (), caches)

    def _others(self, report: RankReport, missing: tuple[int, ...]) -> dict[int, int]:
        """Find the missing ranks that joined with another batch size: rank -> that size."""
        # Two loaders of one trial with other sizes would wait for each other for ever; the error can say why.
        return {
            number: batch_size
            for (*same, batch_size), trial in self._trials.items()
            if same == [report.name.trial, report.name.world_size] and batch_size != report.batch_size
            for number in trial.ranks.keys() & {*missing}
        }

    def _begin(self, trial: _Trial) -> None:
        """Set where ranks begin: with one that has begun, if it is a guide, else where the furthest of them would."""
        floating = [rank for rank in trial.ranks.values() if rank.report.floats]
        guides = [guide for rank in floating if (guide := rank.guide(self._blocks_per_epoch)) is not None]
        start = guides[0] if guides else max(rank.report.cursor for rank in floating)
        trial.start = start
        for rank in floating:
            rank.began = start if rank.began is None else rank.began

    def _start_of(self, trial: _Trial, report: RankReport) -> int | None:
        """Return the block at which a rank that floats begins; None if it must wait for others."""
        rank, start = trial.ranks[report.rank], trial.start
        if rank.began is None and start is not None and trial.owes(start // self._blocks_per_epoch, [report.rank]):
            rank.began, rank.is_alone = start, True
        return rank.began

    def _forget_plans(self, trial: _Trial) -> None:
        """Forget the plans of epochs that all ranks have behind them."""
        oldest = min(rank.cursor for rank in trial.ranks.values()) // self._blocks_per_epoch - KEPT_EPOCHS
        trial.keep_plans([epoch for epoch in trial.plans if epoch >= oldest])

    def _look(self) -> None:
        """Update where ranks are; forget ranks whose session is over, and trials without ranks and debts."""
        without = []
        for group, trial in list(self._trials.items()):
            _, world_size, _ = group
            for number, rank in list(trial.ranks.items()):
                cursor = self._cursor_of(rank.report.consumer, rank.report.session)
                if cursor is None:
                    del trial.ranks[number]
                else:
                    rank.cursor = cursor
            if trial.ranks:
                continue
            trial.keep_plans([epoch for epoch in trial.plans if trial.owes(epoch, range(world_size))])
            if trial.plans:
                without.append(group)
            else:
                del self._trials[group]
        for group in without[:-KEPT_TRIALS]:
            del self._trials[group]
