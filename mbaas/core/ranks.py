"""The ranks of data-parallel trials: where each runs, how they share minibatches, and where they begin together.

Ranks never talk to each other. Each tells the coordinator where it runs; when all are there, the coordinator fixes a
plan for each epoch, the ranks' nodes and the placement of samples, and gives every rank the same answer. From then on
everything is arithmetic: a sample's rank depends on its id and on that plan, not on where its pixels happened to be
made.

Plans are written down before they are given, so a rank that comes back finds those by which its sisters went on. Where
a plan is lost all the same, or an epoch would be in another order than its sisters had it, the rank gets an error:
else some samples would be trained on twice, and others never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from msgspec import Struct
from msgspec.structs import replace

from mbaas.errors import StateError
from mbaas.messages import RankOrders, RankPlan, RankReport
from mbaas.order import Shuffle
from mbaas.placement import Placement

KEPT_EPOCHS = 4
"""Plans are kept for this many epochs behind the slowest rank, because blocks are handed out ahead of their use."""

KEPT_TRIALS = 100
"""Trials without an open session whose plans are kept: their ranks may come back, each to where its state was saved."""


class KeptTrial(Struct, frozen=True):
    """What is written down of a trial.

    Attributes:
        group: see `RankReport.group`.
        plans: epoch -> its plan; without any the trial is forgotten.
        reached: rank -> the epoch that it was in last.
    """

    group: tuple[str, int, int]
    plans: Mapping[int, RankPlan]
    reached: Mapping[int, int]


class Session(Protocol):
    """What is looked at of a consumer's session; see `mbaas.core.consumers.Consumer`."""

    cursor: int
    done: int
    deadline: float


@dataclass
class _Rank:
    """A rank of a trial, as its newest session found it.

    Attributes:
        report: what it told.
        cursor: of this session, when `RankTable` last looked.
        epoch: that of the last block that it used, by its order: an epoch aside counts as the one whose order it has.
        lease: until when its lease is: each of its calls extends it.
        leases: rank -> until when the lease of that one was, when this session began.
        began: the block at which this session was told to begin, if it floats.
        is_alone: whether it was told so without the others, who had begun there and were gone.
    """

    report: RankReport
    cursor: int
    epoch: int = 0
    lease: float = 0.0
    leases: dict[int, float] = field(default_factory=dict)
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
        plans: epoch, by its order -> its plan; once made it is never changed.
        reached: rank -> the epoch that it was in last, also of one whose session is over: it may come back there.
        is_written: whether its plans are written down as they are.
        given: epoch -> rank -> its session that was given the plan. A rank that comes anew begins anew, and so must the
            others: then they count as not given it.
        start: the block at which ranks that float were told to begin last.
    """

    ranks: dict[int, _Rank] = field(default_factory=dict)
    plans: dict[int, RankPlan] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    is_written: bool = True
    given: dict[int, dict[int, int]] = field(default_factory=dict)
    start: int | None = None

    def give(self, report: RankReport, epoch: int, shuffle: Shuffle | None) -> RankPlan:
        """Return the plan of an epoch, which a rank goes by from now on.

        Raises:
            StateError: the epoch is shuffled in another way than its sisters found it.
        """
        plan = self.plans[epoch]
        if plan.shuffle is None and shuffle is not None:
            self.add(epoch, replace(plan, shuffle=shuffle))
        elif plan.shuffle is not None and shuffle is not None and shuffle != plan.shuffle:
            raise StateError(
                f"rank {report.rank} of trial {report.name.trial!r} has epoch {epoch} of the feed shuffled as "
                f"{shuffle.text}, and other ranks had it as {plan.shuffle.text}: load a state of the same minibatch in "
                "all ranks, or begin the trial anew under another name"
            )
        given = self.given.setdefault(epoch, {})
        if given.get(report.rank, report.session) != report.session:
            given.clear()
        given[report.rank] = report.session
        return self.plans[epoch]

    def owes(self, epoch: int, ranks: Iterable[int]) -> bool:
        """Whether one of ``ranks`` was not given an epoch's plan that others go by."""
        given = self.given.get(epoch, {})
        return bool(given) and not given.keys() >= {*ranks}

    def add(self, epoch: int, plan: RankPlan) -> None:
        """Add the plan of an epoch, or what it lacked."""
        self.plans[epoch], self.is_written = plan, False

    def forget_plans(self) -> None:
        """Forget the plans of epochs that all ranks have behind them."""
        oldest = min(self.reached.values()) - KEPT_EPOCHS
        self.plans = {epoch: plan for epoch, plan in self.plans.items() if epoch >= oldest}
        self.given = {epoch: ranks for epoch, ranks in self.given.items() if epoch in self.plans}


class RankTable:
    """Brings the ranks of trials together. It waits for nobody: a rank that asks too early is told who is missing.

    When a trial starts again, the sessions of its dead are open for a while: so a rank may begin, and be done with its
    last epoch, before another one comes, which must go by the same plan.

    Args:
        blocks_per_epoch: the first lane's blocks in an epoch.
        session_of: finds a consumer's session by its name and number; None if that is not open.
        written: what an earlier coordinator wrote down.
    """

    def __init__(
        self,
        blocks_per_epoch: int,
        session_of: Callable[[str, int], Session | None],
        written: Iterable[KeptTrial] = (),
    ) -> None:
        self._blocks_per_epoch, self._session_of = blocks_per_epoch, session_of
        self._trials = {kept.group: _Trial(plans={**kept.plans}, reached={**kept.reached}) for kept in written}
        self._forgotten: set[tuple[str, int, int]] = set()

    def to_write(self) -> list[KeptTrial]:
        """Return what is to be written down since the last call, before anybody is told of a plan."""
        groups = [group for group, trial in self._trials.items() if not trial.is_written]
        kept = [KeptTrial(group, {}, {}) for group in sorted(self._forgotten)]
        for group in groups:
            trial = self._trials[group]
            trial.is_written = True
            kept.append(KeptTrial(group, {**trial.plans}, {**trial.reached}))
        self._forgotten = set()
        return kept

    def write_again(self, trials: Iterable[KeptTrial]) -> None:
        """Note that these could not be written down."""
        for kept in trials:
            trial = self._trials.get(kept.group)
            if trial is None:
                self._forgotten.add(kept.group)
            else:
                trial.is_written = False

    def enlist(self, report: RankReport) -> None:
        """Take in a rank that opened a session."""
        self._look()
        trial = self._trials.pop(report.group, _Trial())
        self._trials[report.group] = trial  # the last one now: of those without ranks the first are forgotten
        self._forgotten.discard(report.group)
        leases = {number: rank.lease for number, rank in trial.ranks.items() if number != report.rank}
        trial.ranks[report.rank] = _Rank(report, report.cursor, leases=leases)
        self._look()

    def trials(self) -> dict[str, Hashable]:
        """Return for each rank, by its name as a consumer, a key that all ranks of its trial share."""
        self._look()
        return {rank.report.consumer: group for group, trial in self._trials.items() for rank in trial.ranks.values()}

    def orders(
        self,
        report: RankReport,
        epoch: int,
        placement: Placement | None,
        caches: Mapping[str, Any],
        shuffle: Shuffle | None = None,
    ) -> RankOrders:
        """Tell a rank what it must know to go through an epoch.

        The other ranks must be there only if the epoch's plan was not fixed before.

        Args:
            report: the rank that asks.
            epoch: the number of the epoch in the stream.
            placement: the newest; plans that are made now follow it.
            caches: see `RankOrders`.
            shuffle: of the epoch, if the rank has a block of it.

        Raises:
            StateError: the epoch is shuffled in another way than other ranks of the trial had it.
        """
        self._look()
        trial = self._trials.get(report.group, _Trial())
        # An old session of the rank that asks does not count: it would go by a node where it no longer is.
        there = {n for n, rank in trial.ranks.items() if n != report.rank or rank.report.session == report.session}
        missing = tuple(rank for rank in range(report.name.world_size) if rank not in there)
        start: int | None = report.cursor
        if report.floats:
            if report.rank in there and (silent := self._await_signs(trial, report)):
                return RankOrders(None, report.cursor, silent, caches)
            # Only when all are there: a rank that begins alone would be an epoch ahead of one that joins a moment
            # later.
            if not missing:
                self._begin(trial)
            start = self._start_of(trial, report) if report.rank in there else None
            epoch = epoch if start is None else start // self._blocks_per_epoch
        epoch -= report.aside
        # Those went through the epoch by a plan that was lost, unless they are what is left of an earlier run.
        sisters = () if report.floats else sorted(there - {report.rank})
        ahead = tuple(n for n in sisters if trial.ranks[n].epoch > epoch)
        # Fixed once and kept: if the placement changed in mid-epoch, ranks would take a sample twice or never.
        if not missing and not ahead and epoch not in trial.plans:
            nodes = tuple(trial.ranks[rank].report.node for rank in range(report.name.world_size))
            trial.add(epoch, RankPlan(nodes, placement))
        if report.rank in missing or start is None or epoch not in trial.plans:
            return RankOrders(None, report.cursor, missing, caches, self._others(report, missing), ahead)
        plan = trial.give(report, epoch, shuffle)
        trial.forget_plans()  # perhaps this one, too: a rank may ask for an epoch that all have behind them
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

    def _await_signs(self, trial: _Trial, report: RankReport) -> tuple[int, ...]:
        """Have a rank that comes back between two epochs go on with the next one, if sisters of it live.

        They come through that, or did, and cannot go elsewhere. But if they are what is left of an earlier run they
        come back, too, and all begin an epoch with other trials.

        Returns:
            those sisters of whom nothing was heard since: which of both holds is not known yet.
        """
        rank, due = trial.ranks[report.rank], report.due
        if rank.began is not None or due is None:
            return ()
        others = {
            number: other
            for number, other in sorted(trial.ranks.items())
            if number != report.rank and not (other.report.floats and other.began is None)
        }
        if any(other.lease > rank.leases.get(number, -math.inf) for number, other in others.items()):
            rank.began, rank.is_alone = due, True
            return ()
        return tuple(others)

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

    def _look(self) -> None:
        """Update where ranks are; forget ranks whose session is over, and of trials without ranks all but the last."""
        without = []
        for group, trial in self._trials.items():
            for number, rank in list(trial.ranks.items()):
                session = self._session_of(rank.report.consumer, rank.report.session)
                if session is None:
                    del trial.ranks[number]
                else:
                    rank.cursor, rank.lease = session.cursor, session.deadline
                    # Not of its cursor: what it was given ahead it need not have begun. And of several lanes the first
                    # may have no more blocks of the epoch in which it comes back.
                    rank.epoch = max(0, session.done - 1) // self._blocks_per_epoch - rank.report.aside
                    trial.reached[number] = rank.epoch
            if not trial.ranks:
                without.append(group)
        with_plans = [group for group in without if self._trials[group].plans]
        self._forgotten.update(with_plans[:-KEPT_TRIALS])
        for group in {*without}.difference(with_plans[-KEPT_TRIALS:]):
            del self._trials[group]
