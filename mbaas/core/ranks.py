"""Ranks of data-parallel trials: their nodes, the division of minibatches between them, and their common start.

Ranks do not communicate with each other. When all have reported their nodes, the coordinator fixes a plan for each
epoch (nodes and placement of samples) and returns it to every rank. The rest is arithmetic: a sample's rank depends
only on its id and the plan. Plans are persisted before they are used, so a rank that returns gets the same plans as the
others.

If a plan is lost, or an epoch's order would differ between ranks, the rank gets an error. Otherwise some samples would
be trained on twice and others never.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from mbaas.core.staging.consumers import Consumer
from mbaas.core.staging.streams import local_block
from mbaas.errors import StateError
from mbaas.samples.order import Shuffle
from mbaas.samples.placement import Placement
from mbaas.wire.ranks import RankGroup, RankOrders, RankPlan, RankReport

KEPT_EPOCHS = 4
"""Plans are kept for this many epochs behind the slowest rank, because blocks are delivered ahead of their use."""

KEPT_TRIALS = 100
"""Trials without an open session whose plans are kept: their ranks may return, each to its saved state."""


class KeptTrial(Struct, frozen=True):
    """Persisted state of a trial.

    Attributes:
        group: see `RankReport.group`.
        plans: epoch -> its plan; a trial without plans is forgotten.
        reached: rank -> its latest epoch.
    """

    group: RankGroup
    plans: Mapping[int, RankPlan]
    reached: Mapping[int, int]


@dataclass
class _Rank:
    """A rank of a trial with its newest session.

    Attributes:
        cursor: cursor of this session at the last `RankTable._look`.
        is_placed: whether its session's place in the stream is its own: it named the block, or has received a plan. A
            loader that joins first and loads its state later does neither with its first session.
        lease: end of its lease, which each of its calls extends.
        leases: rank -> end of its lease when this session started.
        began: assigned first block of this session, if the session floats.
        is_alone: whether that block was assigned without the other ranks, which had started there and were gone.
    """

    report: RankReport
    cursor: int
    is_placed: bool = False
    lease: float = 0.0
    leases: dict[int, float] = field(default_factory=dict)
    began: int | None = None
    is_alone: bool = False

    def guide(self, blocks_per_epoch: int) -> int | None:
        # The block where newcomers must start because this rank did. After its first epoch, a rank is no longer a
        # guide: newcomers must not skip that epoch. A rank that started alone remains one, because the newcomers' share
        # of its epoch is still unread.
        if self.began is not None and (self.is_alone or self.cursor < self.began + blocks_per_epoch):
            return self.began
        return None


@dataclass
class _Trial:
    """The ranks of one trial.

    Attributes:
        ranks: ranks with an open session, by number.
        plans: epoch, by its order -> its plan, which never changes.
        reached: rank -> epoch of the last block that it used, even if its session is over: it may return there. A side
            epoch counts as the epoch with the same order.
        is_written: whether the current plans are persisted.
        given: epoch -> rank -> the session that received the plan. When a rank returns in a new session, it starts the
            epoch again, and so must the others, which then no longer count.
        start: block at which floating ranks were last told to start.
    """

    ranks: dict[int, _Rank] = field(default_factory=dict)
    plans: dict[int, RankPlan] = field(default_factory=dict)
    reached: dict[int, int] = field(default_factory=dict)
    is_written: bool = True
    given: dict[int, dict[int, int]] = field(default_factory=dict)
    start: int | None = None

    def give(self, report: RankReport, epoch: int, shuffle: Shuffle | None) -> RankPlan:
        plan = self.plans[epoch]
        if plan.shuffle is None and shuffle is not None:
            self.add(epoch, replace(plan, shuffle=shuffle))
        elif plan.shuffle is not None and shuffle is not None and shuffle != plan.shuffle:
            raise StateError(
                f"rank {report.rank} of trial {report.name.trial!r} has epoch {epoch} of the feed shuffled as "
                f"{shuffle.text}, and other ranks had it as {plan.shuffle.text}: load a state of the same minibatch in "
                "all ranks, or restart the trial under another name"
            )
        given = self.given.setdefault(epoch, {})
        if given.get(report.rank, report.session) != report.session:
            given.clear()
        given[report.rank] = report.session
        self.ranks[report.rank].is_placed = True
        return self.plans[epoch]

    def owes(self, epoch: int, ranks: Iterable[int]) -> bool:
        given = self.given.get(epoch, {})
        return bool(given) and not given.keys() >= {*ranks}

    def add(self, epoch: int, plan: RankPlan) -> None:
        self.plans[epoch], self.is_written = plan, False

    def forget_plans(self, world_size: int) -> None:
        if len(self.reached) < world_size:  # a rank that is not placed yet may need any of them
            return
        oldest = min(self.reached.values()) - KEPT_EPOCHS
        self.plans = {epoch: plan for epoch, plan in self.plans.items() if epoch >= oldest}
        self.given = {epoch: ranks for epoch, ranks in self.given.items() if epoch in self.plans}


class RankTable:
    """Coordinates the ranks of trials. It never blocks: a rank that asks too early gets a list of the missing ranks.

    When a trial restarts, the sessions of its dead ranks stay open for a while. A rank may therefore start, and even
    finish its last epoch, before another one arrives, which must use the same plan.

    Args:
        blocks_per_epoch: blocks in an epoch, with the feed's pipeline.
        session_of: (consumer, session number) -> the consumer in that session; None if it is not open.
        written: state persisted by an earlier coordinator.
    """

    def __init__(
        self,
        blocks_per_epoch: int,
        session_of: Callable[[str, int], Consumer | None],
        written: Iterable[KeptTrial] = (),
    ) -> None:
        self._blocks_per_epoch, self._session_of = blocks_per_epoch, session_of
        self._trials = {kept.group: _Trial(plans={**kept.plans}, reached={**kept.reached}) for kept in written}
        self._forgotten: set[RankGroup] = set()

    def to_write(self) -> list[KeptTrial]:
        """Return the changes since the last call, to be persisted before any plan is returned to a rank."""
        groups = [group for group, trial in self._trials.items() if not trial.is_written]
        kept = [KeptTrial(group, {}, {}) for group in sorted(self._forgotten)]
        for group in groups:
            trial = self._trials[group]
            trial.is_written = True
            kept.append(KeptTrial(group, {**trial.plans}, {**trial.reached}))
        self._forgotten = set()
        return kept

    def write_again(self, trials: Iterable[KeptTrial]) -> None:
        """Mark trials whose state could not be persisted as changed."""
        for kept in trials:
            trial = self._trials.get(kept.group)
            if trial is None:
                self._forgotten.add(kept.group)
            else:
                trial.is_written = False

    def enlist(self, report: RankReport) -> None:
        """Register a rank that opened a session."""
        self._look()
        trial = self._trials.pop(report.group, _Trial())
        self._trials[report.group] = trial  # moved to the end: trials without ranks are forgotten from the front
        self._forgotten.discard(report.group)
        leases = {number: rank.lease for number, rank in trial.ranks.items()}
        trial.ranks[report.rank] = _Rank(report, report.cursor, is_placed=not report.floats, leases=leases)
        self._look()

    def trials(self) -> dict[str, Hashable]:
        """Return rank (by consumer name) -> a key shared by all ranks of its trial."""
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
        """Return the plan and the start of an epoch to a rank, or the ranks that are missing.

        The other ranks must be present only if the epoch's plan is not fixed yet. New plans use ``placement``.
        ``shuffle`` is the epoch's, if the rank has received one of its blocks. For ``caches``, see `RankOrders`.

        Raises:
            StateError: the rank and the other ranks have different shuffles for the epoch.
        """
        self._look()
        trial = self._trials.get(report.group, _Trial())
        # An old session of the requesting rank does not count: its node may be outdated.
        there = {n for n, rank in trial.ranks.items() if n != report.rank or rank.report.session == report.session}
        missing = tuple(rank for rank in range(report.name.world_size) if rank not in there)
        start: int | None = report.cursor
        if report.floats:
            if report.rank in there and (silent := self._await_signs(trial, report)):
                return RankOrders(None, report.cursor, silent, caches)
            # Only when all are present: a rank that starts alone would be an epoch ahead of one that joins a moment
            # later.
            if not missing:
                self._begin(trial, self._blocks_of(report))
            start = self._start_of(trial, report) if report.rank in there else None
            epoch = epoch if start is None else start // self._blocks_of(report)
        epoch -= report.aside
        # These ranks are past the epoch, whose plan was lost, unless they belong to an earlier run.
        sisters = () if report.floats else sorted(there - {report.rank})
        ahead = tuple(n for n in sisters if trial.reached.get(n, 0) > epoch)
        # Fixed once: if the placement changed in mid-epoch, a sample could be read twice or never.
        if not missing and not ahead and epoch not in trial.plans:
            nodes = tuple(trial.ranks[rank].report.node for rank in range(report.name.world_size))
            trial.add(epoch, RankPlan(nodes, placement))
        if report.rank in missing or start is None or epoch not in trial.plans:
            return RankOrders(None, report.cursor, missing, caches, self._others(report, missing), ahead)
        plan = trial.give(report, epoch, shuffle)
        trial.forget_plans(report.name.world_size)  # possibly including this plan: all ranks may be past the epoch
        return RankOrders(plan, start, (), caches)

    def _others(self, report: RankReport, missing: tuple[int, ...]) -> dict[int, str]:
        # Such loaders would wait for each other forever; the error names the cause.
        return {
            number: f"batch_size {batch_size}" if batch_size != report.batch_size else "another pipeline"
            for (*same, batch_size, pipeline), trial in self._trials.items()
            if same == [report.name.trial, report.name.world_size]
            and (batch_size, pipeline) != (report.batch_size, report.pipeline)
            for number in trial.ranks.keys() & {*missing}
        }

    def _blocks_of(self, report: RankReport) -> int:
        return report.blocks_per_epoch or self._blocks_per_epoch

    def _await_signs(self, trial: _Trial, report: RankReport) -> tuple[int, ...]:
        # A rank that returns between two epochs starts at its next epoch if other ranks of this run are alive: they
        # have passed or will reach that epoch. If their sessions are left over from an earlier run, all ranks return
        # and start a common epoch. Returns the ranks without a heartbeat so far, while it is unknown which case holds.
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

    def _begin(self, trial: _Trial, blocks_per_epoch: int) -> None:
        floating = [rank for rank in trial.ranks.values() if rank.report.floats]
        guides = [guide for rank in floating if (guide := rank.guide(blocks_per_epoch)) is not None]
        start = guides[0] if guides else max(rank.report.cursor for rank in floating)
        trial.start = start
        for rank in floating:
            rank.began = start if rank.began is None else rank.began

    def _start_of(self, trial: _Trial, report: RankReport) -> int | None:
        rank, start = trial.ranks[report.rank], trial.start
        if rank.began is None and start is not None and trial.owes(start // self._blocks_of(report), [report.rank]):
            rank.began, rank.is_alone = start, True
        return rank.began

    def _look(self) -> None:
        without = []
        for group, trial in self._trials.items():
            for number, rank in list(trial.ranks.items()):
                session = self._session_of(rank.report.consumer, rank.report.session)
                if session is None:
                    del trial.ranks[number]
                else:
                    rank.cursor, rank.lease = local_block(session.cursor), session.deadline
                    if rank.is_placed:
                        # Use ``done``, not the cursor: blocks delivered ahead may be unused.
                        used = max(0, local_block(session.done) - 1) // self._blocks_of(rank.report)
                        trial.reached[number] = used - rank.report.aside
            if not trial.ranks:
                without.append(group)
        with_plans = [group for group in without if self._trials[group].plans]
        self._forgotten.update(with_plans[:-KEPT_TRIALS])
        for group in {*without}.difference(with_plans[-KEPT_TRIALS:]):
            del self._trials[group]
