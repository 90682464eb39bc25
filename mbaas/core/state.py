"""The staging core: who is where in the stream, which blocks to make next, which to hand out, keep and drop.

A feed is an endless stream of blocks (see `mbaas.order.SampleOrder`); a consumer is a cursor on it. This module turns
events into instructions and does nothing else: no clock, thread, randomness, file or Ray call. The promises:

- every consumer is handed each block of its epoch exactly once, in order, whatever happens to workers and others;
- a block is made once for all members of a cohort, unless a worker dies, the budget forces an undelivered block out,
  or a consumer was moved out of step;
- bytes granted never exceed the budget;
- a waiting consumer that lacks a block makes progress as long as any worker lives and not all bytes are held by
  others.

Coordinated prep is CoorDL's (VLDB 2021, section 5.3); cursors instead of use counts are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from mbaas import units
from mbaas.core import events as ev
from mbaas.core import explain, pace
from mbaas.core.consumers import Cohort, Consumer, ConsumerTable
from mbaas.core.epochs import EpochTable
from mbaas.core.holding import Holding
from mbaas.core.layout import StagingLimits
from mbaas.core.moving import PartMoves
from mbaas.core.peer_idle import PeerIdle
from mbaas.core.reservations import ReservationTime
from mbaas.core.scheduling import Assignment, Scheduler
from mbaas.core.story import Clock, Stories, Story, seconds, unknown_thing
from mbaas.core.supervisor import PROBE_S
from mbaas.core.tasks import TaskTable
from mbaas.core.transitions import BlockState, ConsumerState, PartState
from mbaas.core.window import Window
from mbaas.messages import Resumption
from mbaas.order import ASIDE, OwnEpoch, Shuffle
from mbaas.placement import WHOLE, BlockPart

Cut = Callable[[int, Shuffle], Sequence[BlockPart]]
"""(block number, how its epoch is shuffled) -> the parts into which it is cut, at least one."""

PUT_OFF_S = 1.0
"""Pause of a part that storage does not give. The cache node has longer pauses, and answers at once during them."""

VERDICT_S = PROBE_S + 2.0
"""How long a block waits over which too many workers died: whether it was their node that died is known only when the
cache beside them was asked, which takes up to `PROBE_S`.
"""

WORKER_FAILURES = 2
"""A worker is replaced after this many tasks in a row that end in an error. It may be broken for good (an error of a
GPU stays, and so does what a bug left half-done), and would take blocks from others only to fail them. A single error
costs no process: the block may be the cause, or the error may have passed.
"""


MOST_AHEAD_EPOCHS = 1 << 20
"""Nobody may be this many epochs beyond all that were begun; a consumer that is begins where the others are."""

REST_AFTER_S = 1.0
"""A consumer between two epochs of its own that does not ask for this long, or for twice as long as it ever worked on
what it was given, holds up nobody any more. Within that time trials of similar pace begin their next epochs together.
"""


class StagingState:
    """State of one feed's staging; see the module's docstring.

    Args:
        limits: the bounds.
        blocks_per_epoch: blocks in one epoch, at least 1.
        block_bytes: block number -> bytes it takes when staged; never above ``limits.budget_bytes``.
        block_samples: samples in a block, of which only an epoch's last may have fewer.
        is_shuffled: whether epochs are shuffled; else all have the dataset's order.
        cut: gives the parts of a block that different nodes make; by default it is made as a whole.
        lane: number of the lane whose blocks these are. Further lanes than the first decide neither where newcomers
            begin nor who moves to another's epoch: they put everybody where the first lane did.
        lanes: number of the feed's lanes. With several, consumers begin only where epochs of the feed do.
        keeps_all: whether all epochs are the same and all blocks of one fit the budget. Then each is made once and
            kept for everybody, so that no consumer waits for another.
        written: epoch -> how it is shuffled, as an earlier coordinator of the feed wrote it down; None if nobody does.

    Attributes:
        epochs: how each epoch is shuffled.
        consumers: consumers, reservations and cohorts.
        tasks: the workers that are up, and their tasks.
        window: blocks that are being made or are staged.
        stories: what happened to each block, consumer and worker.
        next_epoch: the first epoch that was never begun; a feed that nobody is on starts there.
        failed: why the feed cannot go on; nothing changes any more then.
    """

    def __init__(
        self,
        limits: StagingLimits,
        blocks_per_epoch: int,
        block_bytes: Callable[[int], int],
        cut: Cut = lambda _block, _shuffle: (WHOLE,),
        lane: int = 0,
        *,
        keeps_all: bool = False,
        block_samples: int = 1,
        is_shuffled: bool = True,
        lanes: int = 1,
        written: Mapping[int, Shuffle] | None = None,
    ) -> None:
        self.limits = limits
        self.blocks_per_epoch = blocks_per_epoch
        self.stories = Stories()
        self.epochs = EpochTable(blocks_per_epoch, block_samples, is_shuffled=is_shuffled, lanes=lanes, written=written)
        self.consumers = ConsumerTable(
            self.epochs,
            limits.ahead_blocks,
            self.stories,
            leads=lane == 0,
            keeps_all=keeps_all,
            slack_blocks=limits.slack_blocks,
        )
        self.tasks = TaskTable(self.stories, lane)
        self.window = Window(limits.budget_bytes, self.stories, period=blocks_per_epoch if keeps_all else 0)
        self.next_epoch = max([number + 1 for number in written or () if number < ASIDE], default=0)
        self.failed: str | None = None
        self._block_bytes, self._cut, self._lanes = block_bytes, cut, lanes
        self._scheduler = Scheduler(
            self.consumers, self.tasks, self.window, cut=self._begin_block, block_bytes=block_bytes, drop=self._drop
        )
        self._moves = PartMoves(self.window, self.tasks)
        first_s = limits.timeouts.reservation_s
        self._starts = ReservationTime(first_s)  # from the announcement of a trial until it joins
        # From a reservation for anyone until a trial is announced: for a successor, or for one that begins with others.
        self._successions, self._besides = ReservationTime(first_s), ReservationTime(first_s)
        self._peer_idle = PeerIdle(self.consumers, self._scheduler.has_room, block_bytes)
        self._out: list[ev.Instruction] = []
        self._changed_nothing: bool  # whether the event changed nothing that anything follows from

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event, and return what must be done about it, in order.

        Raises:
            InvariantError: a bug: a state would change in a way that is not allowed.
        """
        self._changed_nothing = False
        self._out = []  # a list of its own for each event: the shell may still go through the last one
        self.stories.now, self.stories.cause = now, event
        if self.failed is None:
            self._dispatch(event, now)
            # Most events of a large feed are heartbeats and ticks that change nothing.
            if self.failed is None and not self._changed_nothing:
                self._follow_up(now)
        elif isinstance(event, ev.Join | ev.Ask):  # who waits must learn why; all else has become pointless
            self._refuse(event, self.failed)
        return self._out

    @property
    def instructions(self) -> list[ev.Instruction]:
        """What the newest event has led to so far: all that is left of it, if it met a bug."""
        return self._out

    def _dispatch(self, event: ev.Event, now: float) -> None:
        match event:
            case ev.WorkerUp():
                self.tasks.worker_up(event.worker, event.credit, event.node)
            case ev.WorkerDown():
                self._worker_down(event.worker, event.reason, now, blame=event.blame)
            case ev.WorkerLeaves():
                self.tasks.worker_leaves(event.worker)
            case ev.NodeDown():
                self._node_down(event.node, event.reason)
            case ev.NodeLeaves():
                self._moves.leaving.add(event.node)
            case ev.NodeStays():
                self._moves.node_stays(event.node)
            case ev.PartMoved():
                self._part_moved(event.move)
            case ev.PartStays():
                self._moves.end(event.move, is_there=False)
            case ev.UnreadablePart():
                self._part_unreadable(event)
            case ev.TaskEnded():
                self._task_ended(event, now)
            case ev.PutOff():
                self._put_off(event, now)
            case ev.TaskFailed():
                self._task_failed(event, now)
            case ev.Announce():
                self._announce(event, now)
            case ev.HoldReservations():
                self.consumers.hold_reservations(event.reservations)
            case ev.Join():
                self._join(event, now)
            case ev.Ask():
                self._ask(event, now)
            case ev.HandBack():
                self._hand_back(event)
            case ev.Heartbeat():
                self._heartbeat(event, now)
            case ev.DetachedElsewhere():
                self._detach(event.consumer)
            case ev.PacesMeasured():
                self._part_by_pace(event, now)
                self._changed_nothing = not self._out
            case ev.Leave():
                self._leave(event, now)
            case ev.EpochsWritten():
                self.epochs.note_written(event.epochs)
            case ev.Stop():
                self._stop(event.reason)
            case ev.Tick():
                self._tick(now)

    def _stop(self, reason: str) -> None:
        """Freeze the state for good, and tell those who wait why."""
        self.failed = reason
        consumers, workers, blocks = self.consumers.by_name, self.tasks.workers, self.window.blocks
        stories: list[Story] = [thing.story for table in (consumers, workers, blocks) for thing in table.values()]
        for story in stories:
            story.tell("the feed ended: {}", reason)
        for consumer in self.consumers.by_name.values():
            if consumer.waiting:
                self._out.append(ev.Refuse(consumer.name, consumer.session, reason))

    # ---- consumers ----

    def _announce(self, event: ev.Announce, now: float) -> None:
        if not self.consumers.of_trial(event.consumer):  # told twice, or after it joined, nothing changes for it
            self._reserve(event.consumer, now)
        # Processes of trials that begin together come up one after the other. Without places for those that are still
        # to be announced, the first would be through its epochs before the last is there.
        lacking = range(event.others - len(self.consumers.free_reservations()))
        hold_s = self._hold_for_others_s(event.consumer) if lacking else 0.0
        for number in lacking:
            if hold_s:
                cohort, cursor = self.consumers.shared_start(self._fresh_start())
                self.consumers.reserve_for_anyone(cohort, cursor, now, now + hold_s, at_once=False).is_beside = True
            else:
                self._besides.give_up(f"{event.consumer}, other {number}", now)

    def _reserve(self, name: str, now: float) -> None:
        """Hold a reservation for a trial: one that is held for anyone, or a new one."""
        free = next(iter(self.consumers.free_reservations()), None)
        hold_s = self._reservation_s(free is None)
        if free is not None:
            if free.is_beside:
                hold_s = self._as_allowed(hold_s)
            self._times_of(free).came(now - free.since)
        else:
            (self._besides if self._besides.has_given_up else self._successions).came_late(now)
        if not hold_s:
            self._starts.give_up(name, now)
        elif free is not None:  # one that somebody left comes first
            cohort = self.consumers.cohorts[free.cohort]
            self.consumers.reserve(name, cohort, free.cursor, now, now + hold_s, at_once=free.holds_up_nobody)
        else:
            cohort, cursor = self.consumers.shared_start(self._fresh_start())
            self.consumers.reserve(name, cohort, cursor, now, now + hold_s, at_once=False)
        if free is not None:
            self.consumers.exit(free, f"{name} comes for it")

    def _reservation_s(self, is_new: bool) -> float:
        """How long a reservation is held for a trial from when it is announced; 0 if none is.

        Args:
            is_new: whether it does not go on where another trial ended, so that nothing is staged for it.
        """
        # Of several lanes each would need to know where trials begin that begin at once.
        if self._starts.at_once and (is_new or self._lanes > 1):
            return 0.0
        return self._starts.hold_s(self._epoch_s)

    def _times_of(self, reservation: Consumer) -> ReservationTime:
        """Return the times of reservations like this one."""
        if not reservation.for_anyone:
            return self._starts
        return self._besides if reservation.is_beside else self._successions

    def _hold_for_successor_s(self) -> float:
        """How long a reservation is held until it is known for whom; from then on for as long as that one needs."""
        return self._successions.hold_s(self._epoch_s) if self._reservation_s(is_new=False) else 0.0

    def _hold_for_others_s(self, trial: str) -> float:
        """How long reservations are held for those that begin with a trial that was announced; 0 if none are."""
        # Those that begin at once begin where others are, if anybody is here.
        here = [c for c in self.consumers.by_name.values() if c.trial != trial and not c.rests]
        if self._starts.at_once and here:
            return 0.0
        return self._as_allowed(self._besides.hold_s(self._epoch_s) if self._reservation_s(is_new=False) else 0.0)

    def _as_allowed(self, hold_s: float) -> float:
        """For how long to hold the place of one that begins with others; 0 if ``hold_s`` is."""
        # It has a place to run, so it will come: it would be in vain to wait for less than the user allows.
        return max(hold_s, self.limits.timeouts.reservation_s) if hold_s else 0.0

    @property
    def _epoch_s(self) -> float:
        """How long prep takes for an epoch; 0 while that is not known."""
        blocks = self.blocks_per_epoch * self._lanes
        return blocks / self.consumers.prep_per_s if self.consumers.prep_per_s else 0.0

    @property
    def has_all(self) -> bool:
        """Whether every block that consumers will ever ask for is kept and ready: prep has nothing to do."""
        blocks = self.window.blocks.values()
        return self.consumers.keeps_all and len(blocks) == self.blocks_per_epoch and all(b.is_ready for b in blocks)

    @property
    def out_of_reach(self) -> range:
        """The blocks at which no consumer may be: far beyond the stream, and below the epochs aside."""
        # A further lane does not decide where consumers begin, and one that was restarted begins to count anew.
        if not self.consumers.leads:
            return range(0)
        first = self.next_epoch + MOST_AHEAD_EPOCHS + 1
        return range(first * self.blocks_per_epoch, ASIDE * self.blocks_per_epoch)

    def _fresh_start(self) -> int:
        """First block of the first epoch that was never begun: of an earlier one somebody may have seen a part."""
        return self.next_epoch * self.blocks_per_epoch

    def _join(self, event: ev.Join, now: float) -> None:
        old = self.consumers.by_name.get(event.consumer)
        # Sessions are numbered by the shell in the order of joins: a smaller one comes from a call that was overtaken.
        if old is not None and old.session >= event.session:
            self._refuse(event, f"session {old.session} of {event.consumer!r} is newer")
            return
        if not self._ends_other_groups(event):
            return
        place = self.consumers.place_of(event.trial or event.consumer)
        at_once = None if event.resumed is not None or event.is_exact else event.now
        if place is not None:
            self._starts.came(now - place.since, at_once)
        else:
            self._starts.joined(event.trial or event.consumer, now, at_once)
        for before in (old, place):
            if before is not None and before.state is not ConsumerState.GONE:  # both may be one, or be ended just now
                self.consumers.exit(before, f"session {event.session} of {event.consumer} takes its place")
        cohort, cursor, own_epoch = self._beginning(event, place)
        lease = now + self.limits.timeouts.lease_s
        joined = self.consumers.enter(
            event.consumer, event.session, cohort, cursor, lease, ConsumerState.BUSY, own_epoch, event.trial
        )
        joined.exact, joined.since = event.start if event.is_exact else None, now
        joined.world_size, joined.node, joined.born = event.world_size, event.node, event.born
        self._out.append(ev.Admitted(event.consumer, event.session, cursor, own_epoch))

    def _ends_other_groups(self, event: ev.Join) -> bool:
        """End what is left of an earlier run of a trial, which had another number of ranks.

        Nobody else would: its ranks are none of the new ones' names, and until their leases end they would hold up the
        trial that goes on. Refuse the consumer if it is what is left itself.
        """
        others = [
            consumer
            for consumer in self.consumers.of_trial(event.trial or event.consumer)
            if consumer.session and consumer.world_size != event.world_size
        ]
        younger = next((consumer for consumer in others if consumer.born > event.born), None)
        if younger is not None:
            self._refuse(event, f"trial {younger.trial!r} was started again later, with {_ranks(younger.world_size)}")
            return False
        for consumer in others:
            reason = f"trial {consumer.trial!r} goes on with {_ranks(event.world_size)}"
            self._remove(consumer, reason)
        return True

    def _remove(self, consumer: Consumer, reason: str) -> None:
        """End a consumer's session against its will."""
        self._out.append(ev.RemoveConsumer(consumer.name, consumer.session, reason))
        self.consumers.exit(consumer, reason)

    def _beginning(self, event: ev.Join, place: Consumer | None) -> tuple[Cohort, int, OwnEpoch]:
        """Choose cohort and first block of a new session, and where its own epoch lies."""
        if event.resumed is not None:
            return self._resumption(event.resumed)
        cohort, cursor = self._first_block(event, place)
        # One that names a block in the middle of an epoch has had what comes before it.
        return cohort, cursor, self.epochs.around(cursor) if event.is_exact else self.epochs.own_epoch(cursor)

    def _resumption(self, resumed: Resumption) -> tuple[Cohort, int, OwnEpoch]:
        """Have a consumer go on in the middle of its own epoch, with the samples that it lacks and no others."""
        others = self.consumers.own_epochs()
        if not self.epochs.adopt(resumed, others):
            if not resumed.taken:
                start = self.epochs.next_boundary(resumed.start)
                return self.consumers.cohort_at(start), start, self.epochs.own_epoch(start)
            # That epoch is shuffled in another way here: nobody else needs the rest of it as this consumer does.
            resumed = self.epochs.put_aside(resumed, others)
        return self.consumers.cohort_at(resumed.start), resumed.start, resumed.own_epoch

    def _first_block(self, event: ev.Join, place: Consumer | None) -> tuple[Cohort, int]:
        """Choose cohort and first block of a new session: its reservation, an exact block, or an epoch to share."""
        # All lanes must agree where a consumer begins, so one of them decides: the first.
        if not self.consumers.leads:
            assert event.start is not None, "the first lane decides where a consumer begins"
            find = self.consumers.cohort_towards if event.flexible else self.consumers.cohort_at
            return find(event.start), event.start
        if place is not None and (found := self._at_place(event, place)) is not None:
            return found
        otherwise = self._fresh_start() if event.start is None else event.start
        if event.is_exact:
            return self.consumers.cohort_at(otherwise), otherwise
        if event.now:
            if place is not None and event.start is None:  # with nobody else here it goes on where another one ended
                can_begin = self.epochs.can_begin(place.cursor)
                otherwise = place.cursor if can_begin else self.epochs.next_boundary(place.cursor)
            return self.consumers.start_now(otherwise, self.window.is_ready, event.start)
        return self.consumers.shared_start(otherwise, event.trial, event.start or 0)

    def _at_place(self, event: ev.Join, place: Consumer) -> tuple[Cohort, int] | None:
        """Find cohort and block of the reservation that was held for a consumer; None if it does not begin there."""
        # A restored trial that names an exact block gets that block. A place that was held as for a trial that begins
        # at once may lie inside of an epoch.
        if event.is_exact or place.cursor % self.blocks_per_epoch or place.cursor < (event.start or 0):
            return None
        cohort = self.consumers.cohorts.get(place.cohort)
        if event.now:
            waited = cohort is not None and not place.holds_up_nobody and place.cursor <= cohort.slowest
            if not waited or event.start is not None:
                return None
        # If it was the last of its cohort, that cohort ended with the reservation.
        cohort = cohort or self.consumers.new_cohort(place.cursor)
        return (cohort, place.cursor) if cohort.keep_from <= place.cursor else None  # else it was passed by

    def _ask(self, event: ev.Ask, now: float) -> None:
        consumer = self._open_session(event)
        if consumer is None:
            return
        again = 0 < event.number == consumer.heard  # it came twice; whether its first answer arrived is not known
        if consumer.was_overtaken(event.number):
            return
        if again and event.cursor < max(consumer.released, consumer.done):
            return  # the answer to the first did arrive: since then a heartbeat has said that the block is used up
        if event.cursor < consumer.released:  # its blocks may be dropped, and others would be handed out in their place
            reason = f"it asked for block {event.cursor} after it let go of all blocks below {consumer.released}"
            self._refuse(event, reason)
            return
        if event.began is not None and not 0 <= event.cursor - event.began <= self.blocks_per_epoch:
            reason = f"it asked for block {event.cursor} in an epoch of its own that began with block {event.began}"
            self._refuse(event, reason)
            return
        consumer.deadline = now + self.limits.timeouts.lease_s
        consumer.go_to(event.cursor, again=again)
        consumer.let_go(event.released, event.done)
        if event.unheld is not None:
            consumer.let_go_between(*event.unheld)
        ends = consumer.cursor >= consumer.own_epoch.end
        if ends and consumer.moves and self.epochs.is_aside(consumer.cursor):
            self._refuse(event, "what it lacked of its epoch it has, and goes on with the others")
            self.consumers.exit(consumer, "it has the rest of its epoch, and joins the others")
            return
        if not self.consumers.update_own_epoch(consumer, event.began):
            self._refuse(event, "the rest of its epoch is made for it alone: it was not known where that began")
            self.consumers.exit(consumer, "it goes on in an epoch aside")
            return
        rested = consumer.state is ConsumerState.RESTING
        if rested or consumer.cursor < self.consumers.cohorts[consumer.cohort].keep_from:
            self.consumers.go_on(consumer, self.window.is_ready)
        self._try_anew(consumer)
        if consumer.state is ConsumerState.BUSY:
            # Between its epochs a trial may do something else.
            within = consumer.asked and consumer.cursor > consumer.own_epoch.first
            consumer.longest_s = max(consumer.longest_s, now - consumer.since) if within else 0.0
        if not consumer.waiting:  # a call that is repeated goes on waiting: its turn is not lost
            consumer.transition(ConsumerState.WAITING)
            consumer.since = now
        consumer.want = event.want
        self._peer_idle.asked(consumer, now)
        met = self.consumers.merge(consumer, self.window.is_ready)
        consumer.asked = True
        if met is not None:
            self._out.append(ev.Note(met))

    def _hand_back(self, event: ev.HandBack) -> None:
        consumer = self._open_session(event)
        if consumer is not None and not consumer.was_overtaken(event.number):
            # What it used up cannot be given back: its trial has trained on it.
            consumer.let_go(min(event.released, event.cursor), consumer.done)
            consumer.go_to(max(event.cursor, consumer.released, consumer.done))
            if consumer.waiting:
                consumer.transition(ConsumerState.BUSY, "it gave up its call")

    def _heartbeat(self, event: ev.Heartbeat, now: float) -> None:
        consumer = self._open_session(event)
        if consumer is not None:
            consumer.deadline = now + self.limits.timeouts.lease_s
        self._changed_nothing = consumer is None or not consumer.let_go(event.released, event.done)

    def _leave(self, event: ev.Leave, now: float) -> None:
        if event.session is None:  # Tune, or a user, says that a trial is done: so are all of its ranks
            leaving = self.consumers.of_trial(event.consumer)
        else:
            consumer = self.consumers.session(event.consumer, event.session)
            leaving = [] if consumer is None else [consumer]
        # Before it leaves: its cohort, and what is staged for it, would end with it.
        if leaving and event.successors > len(self.consumers.free_reservations()):
            last = min(leaving, key=lambda consumer: consumer.done)
            hold_s = self._hold_for_successor_s()
            # One that begins at once begins where others are, if anybody is here.
            in_vain = self._starts.at_once and not all(c.rests or c in leaving for c in self.consumers.by_name.values())
            if hold_s and not in_vain:
                self.consumers.reserve_for_successor(last, now, now + hold_s, at_once=self._starts.at_once)
            else:
                self._successions.give_up(last.name, now)
        for consumer in leaving:
            self.consumers.note_leaving(consumer)
            self.consumers.exit(consumer, "it left")

    def _open_session(self, event: ev.Ask | ev.HandBack | ev.Heartbeat) -> Consumer | None:
        consumer = self.consumers.session(event.consumer, event.session)
        if consumer is None:
            self._refuse(event, self.consumers.why_unknown(event.consumer, event.session))
        return consumer

    def _refuse(self, event: ev.Join | ev.Ask | ev.HandBack | ev.Heartbeat, reason: str) -> None:
        self._out.append(ev.Refuse(event.consumer, event.session, reason))

    # ---- workers and what they make ----

    def _worker_down(self, name: str, reason: str, now: float, *, blame: bool) -> None:
        """Have others make what a worker had in hand. `mbaas.core.supervisor` decides whether it is replaced."""
        worker = self.tasks.workers.get(name)
        if worker is None:
            return  # two may notice one death
        tasks = self.tasks.worker_down(name)
        if blame and tasks:  # the oldest is the one that it was making
            self.tasks.charge(tasks[0], worker.node, reason, now)
        for task in tasks:
            self._out.append(ev.Note(f"{name} is gone ({reason}): block {task.block} will be made again"))
            block = self.window.blocks[task.block]
            if self._is_deadly(task.block):
                block.put_off(task.part, now + VERDICT_S, "too many prep workers died over it")
            else:
                block.reopen(task.part, f"{name} is gone: {reason}")

    def _is_deadly(self, number: int) -> bool:
        """Whether too many workers died over a block."""
        return len(self.tasks.deaths.get(number, ())) >= self.limits.max_deaths

    def _condemn(self, now: float) -> None:
        """Give up blocks over which too many workers died, and no node.

        Such a block is bad data, or bad code: its consumers are told, and the feed goes on.
        """
        for number, deaths in self.tasks.deaths.items():
            is_due = self._is_deadly(number) and now >= deaths[self.limits.max_deaths - 1].at + VERDICT_S
            if is_due and self.window.blocks[number].state is not BlockState.FAILED:
                why = f"{units.counted(len(deaths), 'prep worker')} died over it; the last one: {deaths[-1].reason}"
                # Another try would cost another worker. But what is kept for all epochs would stay bad in all of them.
                self.window.fail(number, why, may_mend=self.consumers.keeps_all)

    def _node_down(self, node: str, reason: str) -> None:
        # The node's death is no block's fault, so blocks are cleared of the deaths of its workers. Workers come first:
        # parts in their hands are MAKING, parts that lie on the node are READY, and both must become OPEN.
        for worker in [w for w in self.tasks.workers.values() if w.node == node]:
            for task in self.tasks.worker_down(worker.name):
                self.window.blocks[task.block].reopen(task.part, f"{worker.name} is gone: {reason}")
        for number in self.tasks.forgive(node):
            if not self._is_deadly(number):
                self.window.blocks[number].resume(math.inf)
        self._moves.node_gone(node)
        blocks = len(self.window.reopen_node(node))
        again = f"its parts of {units.counted(blocks, 'staged block')} will be made again"
        self._out.append(ev.Note(f"node {node} is gone ({reason}): {again}"))
        # Now, not when their leases end: until then the others would wait for them. One that lives after all, on a
        # node that was cut off, joins again where it was.
        for consumer in [consumer for consumer in self.consumers.by_name.values() if consumer.node == node]:
            self._remove(consumer, f"its node is gone: {reason}")

    def _part_moved(self, number: int) -> None:
        """Use the copy of a part, if the part is still what it was when it was copied."""
        move = self._moves.end(number, is_there=True)
        if move is None:
            return
        # By another task's number: a consumer that was given the original, and cannot read it when its node is gone,
        # must not have the copy thrown away by its complaint.
        task = self.tasks.number()
        self.window.blocks[move.block].lies_elsewhere(move.part, move.target, task)
        self._out.append(ev.UsePart(number, move.block, move.part, task))

    def _part_unreadable(self, event: ev.UnreadablePart) -> None:
        block = self.window.find(event.block)
        if block is None or event.part >= len(block.parts) or block.parts[event.part].task != event.task:
            return  # it was dropped, or made again, since the consumer got it
        # MAKING, OPEN or PUT_OFF: somebody else noticed first, and it is on its way already.
        if block.parts[event.part].state is PartState.READY:
            block.reopen(event.part, "a consumer could not read it")
            self._out.append(ev.Note(f"a part of block {event.block} cannot be read any more: it will be made again"))

    def _task_ended(self, event: ev.TaskEnded, now: float) -> None:
        task = self.tasks.finish(event.task, now)
        if task is None:
            return  # its worker was given up; the part is another's by now
        block = self.window.blocks[task.block]
        if event.error is None:
            self.tasks.failures.pop(task.block, None)
            if event.lacks:
                self.window.leave_out(task.block)
            block.finish(task.part, self.tasks.workers[task.worker].node)
            return
        # Only with on_bad_sample="raise". The block fails as a whole: a minibatch may take samples from all parts.
        block.reopen(task.part, "a sample is bad")
        if block.state is not BlockState.FAILED:
            self.window.fail(task.block, event.error, may_mend=True)

    def _put_off(self, event: ev.PutOff, now: float) -> None:
        task = self.tasks.finish(event.task, now)
        if task is not None:
            self.window.blocks[task.block].put_off(task.part, now + PUT_OFF_S, event.reason)

    def _task_failed(self, event: ev.TaskFailed, now: float) -> None:
        """Try a part again over which a worker met a bug; after as many errors as deaths may be, its block is bad."""
        task = self.tasks.fail(event.task, now)
        if task is None:
            return  # its worker was given up; the part is another's by now
        block, worker = self.window.blocks[task.block], self.tasks.workers[task.worker]
        self._out.append(ev.Note(f"{task.worker} met an error over block {task.block}: {event.reason}"))
        # The part waits for a moment: what was wrong may pass, and other workers may be free by then.
        block.put_off(task.part, now + PUT_OFF_S, f"it is tried again after an error: {event.reason}")
        failures = self.tasks.failures[task.block]
        if failures >= self.limits.max_deaths and block.state is not BlockState.FAILED:
            del self.tasks.failures[task.block]
            # Another try costs nobody anything, so a consumer that asks again for the block has it.
            why = f"{failures} tries to prepare it ended in an error; the last one: {event.reason}"
            self.window.fail(task.block, why, may_mend=True)
            worker.failures = 0  # the block is to blame, not the worker
        if worker.failures >= WORKER_FAILURES:
            reason = f"{worker.failures} of its tasks in a row ended in an error; the last one: {event.reason}"
            self._out.append(ev.ReplaceWorker(worker.name, reason, blame=False))
            self._worker_down(worker.name, reason, now, blame=False)

    def _try_anew(self, consumer: Consumer) -> None:
        """Drop failed blocks whose error this consumer had and which it asks for again: the data may be repaired.

        Not for a consumer that asks for the first time: it would wait for another failure instead of getting the error.
        """
        for number in [n for n in self.window.failed if n >= self.window.staged_as(consumer.cursor)]:
            block = self.window.blocks[number]
            if block.may_mend and not block.is_in_hand and consumer.name in block.told:
                self._drop(number, f"{consumer.name} had its error, and asks again")

    # ---- time ----

    def _tick(self, now: float) -> None:
        if not self.consumers.by_name:  # who comes next comes for another reason than that one has left
            for times in (self._successions, self._besides):
                times.forget_given_up()
        rested = False
        for consumer in list(self.consumers.by_name.values()):
            if now >= consumer.deadline:
                self._expire(consumer)
            elif self._is_to_rest(consumer, now):
                self.consumers.rest(consumer)
                rested = True
        # The core has no clock, so deadlines pass only here: with the ticks that the shell sends.
        # A worker that hangs cannot be told from one that is slow, so it has a deadline; its node and the others go on.
        for worker in self.tasks.overdue(now, self.limits.timeouts.prep_s):
            reason = f"it made block {worker.tasks[0].block} for more than {units.seconds(self.limits.timeouts.prep_s)}"
            self._out.append(ev.ReplaceWorker(worker.name, reason))
            self._worker_down(worker.name, reason, now, blame=True)
        for cohort in list(self.consumers.cohorts.values()):
            self._watch(cohort, now)
        self._condemn(now)  # then the pause of its part is over, too
        resumed = [block.resume(now) for block in self.window.blocks.values()]
        self._changed_nothing = not (self._out or any(resumed) or rested)

    def _is_to_rest(self, consumer: Consumer, now: float) -> bool:
        """Whether a consumer is between two epochs of its own, and does not ask for longer than it used to."""
        if consumer.state is not ConsumerState.BUSY or not consumer.is_between_epochs or self._lanes > 1:
            return False
        # One that named its block, or may not begin elsewhere, has its place kept until it asks for the first time.
        is_free = consumer.asked or (consumer.moves and consumer.exact is None)
        return is_free and now - consumer.since >= max(REST_AFTER_S, 2 * consumer.longest_s)

    def _expire(self, consumer: Consumer) -> None:
        if consumer.state is not ConsumerState.RESERVED:
            self._remove(consumer, f"it was silent for {units.seconds(self.limits.timeouts.lease_s)}")
            return
        self._times_of(consumer).give_up(consumer.name, consumer.since)
        held = units.seconds(consumer.deadline - consumer.since)
        reason = f"{consumer.name} did not come within {held}: reservation given up"
        self._out.append(ev.Note(reason))
        self.consumers.exit(consumer, reason)

    def _watch(self, cohort: Cohort, now: float) -> None:
        """Notice who keeps the others of a cohort waiting, and detach it when their patience is over."""
        if not self._limited_by_slowest(cohort):
            cohort.held_up = None
            return
        # Patience begins anew with every step of the slowest: slow is allowed, standing still is not.
        if cohort.held_up is None or cohort.held_up[0] != cohort.slowest:
            cohort.held_up = (cohort.slowest, now)
        slowest, since = cohort.held_up
        limits, waited_s = self.limits.timeouts, now - since
        for member in [m for m in cohort.active if m.cursor == slowest]:
            # A loader that nobody reads lives, too. It is waited for as long as a consumer that was announced.
            never_began = not member.asked and now - member.since >= limits.reservation_s
            if waited_s < limits.patience_s and not never_began:
                continue
            others = ", ".join(other.name for other in cohort.members if other is not member)
            kept = f"kept {others} waiting at block {member.cursor} for {units.seconds(waited_s)}"
            self.consumers.detach([member], f"it {kept}")
            self._out.append(ev.Detached(member.name))
            why = ", and has asked for nothing since it joined" if never_began else ""
            self._out.append(ev.Note(f"{member.name} {kept}{why}: it goes on in a cohort of its own"))

    def _limited_by_slowest(self, cohort: Cohort) -> bool:
        """Whether the slowest members alone are to blame: others wait for a block that nobody makes meanwhile."""
        slowest = cohort.slowest
        # A slowest one that waits is not to blame, prep is. One whose block is in a worker's hand will get it soon.
        slowest_busy = all(m.state is ConsumerState.BUSY for m in cohort.active if m.cursor == slowest)
        waiting = [m.cursor for m in cohort.active if m.waiting and self.epochs.is_written(m.cursor)]
        return slowest_busy and not all(map(self.window.is_on_its_way, waiting))

    def _detach(self, name: str) -> None:
        # One that is alone here, or not here yet, keeps nobody waiting in this lane.
        consumer = self.consumers.by_name.get(name)
        if consumer is not None and len(self.consumers.cohorts[consumer.cohort].members) > 1:
            self.consumers.detach([consumer], "it kept others waiting for their blocks in another lane")

    def _part_by_pace(self, event: ev.PacesMeasured, now: float) -> None:
        """Take in how fast prep and trials would go, and part cohorts of too different paces."""
        if self.consumers.keeps_all:
            return
        self.consumers.prep_per_s = event.prep_per_s
        # In lanes of their own, cohorts would part at different times, and ranks might get apart.
        if self._lanes > 1:
            return
        for trial in event.trials:
            for consumer in map(self.consumers.by_name.get, trial.consumers):
                if consumer is not None:
                    consumer.blocks_per_s = trial.blocks_per_s
        for cohort in list(self.consumers.cohorts.values()):
            apart = self._part(cohort, now, pace.SPLIT_AFTER_S)
            while apart is not None:  # those that go apart may be of several paces; of these no more is to be learnt
                apart = self._part(apart, now, 0.0)

    def _part(self, cohort: Cohort, now: float, after_s: float) -> Cohort | None:
        """Part a cohort by pace if that was worth it for long enough; return the new cohort of the slower ones."""
        paces = cohort.paces()
        others, prep_per_s = self.consumers.groups(cohort), self.consumers.prep_per_s
        split = pace.best_split([*paces.values()], others, prep_per_s) if len(paces) > 1 and prep_per_s else None
        if split is None:
            cohort.uneven = None
            return None
        slow = frozenset([*paces][split.faster :])
        if cohort.uneven is None or cohort.uneven[0] != slow:
            cohort.uneven = slow, now
        if now - cohort.uneven[1] < after_s:
            return None
        faster, slower = pace.parted([*paces.values()], split.faster)
        why = (
            f"the pace is {units.number(slower.blocks_per_s)} blocks/s, "
            f"that of the others {units.number(faster.blocks_per_s)}: "
            f"apart, all together are given {units.percent(split.gain)} more"
        )
        apart = self.consumers.detach([m for m in cohort.active if m.trial in slow], why)
        verb = "goes" if len(apart.members) == 1 else "go"
        self._out.append(ev.Note(f"{apart} {verb} on apart from {cohort}: {why}"))
        return apart

    # ---- what follows from every event ----

    def _follow_up(self, now: float) -> None:
        # The order matters: delivering moves cursors, cursors decide what is dropped, and only then are the bytes known
        # that new work may take.
        if self.consumers.keeps_all:
            self._drop_lacking()  # one that takes many blocks at once would be given it before it came near
        self._deliver(now)
        self.consumers.advance()
        self._scheduler.drop_unwanted()
        if self.consumers.keeps_all:
            self._drop_lacking()
        for worker in self.tasks.done_leaving():
            self.tasks.worker_down(worker.name)
            self._out.append(ev.ReleaseWorker(worker.name))
        for assignment in self._scheduler.assignments():
            self._assign(assignment, now)
        for number, move in self._moves.begin(self._scheduler.lead):
            self._out.append(ev.MovePart(number, move.block, move.part, move.target))
        self._out += [ev.WriteEpochs(page, shuffles) for page, shuffles in self.epochs.take_changed().items()]
        self._peer_idle.look(now, is_idle=self._scheduler.leaves_idle)

    def _deliver(self, now: float) -> None:
        holding: Holding | None = None
        for consumer in self.consumers.by_name.values():
            if not consumer.waiting:
                continue
            # All that is ready at once, so that a loader that lags makes few calls; never with a gap.
            end = consumer.cursor
            most = consumer.want
            if self._lanes == 1:  # when its own epoch ends, it may rest, and go on elsewhere
                most = min(most, consumer.own_epoch.end - consumer.cursor)
            while end - consumer.cursor < most and self.window.is_ready(end) and self.epochs.is_written(end):
                end += 1
            if end > consumer.cursor:
                if holding is None:  # the first block of an epoch is a full one
                    holding = Holding(self.consumers, self.limits.budget_bytes // self._block_bytes(0))
                holdable = holding.holdable(consumer, end - consumer.cursor)
                end = consumer.cursor + max(1, holdable)
                blocks = tuple(range(consumer.cursor, end))
                for number in self.window.failed.intersection(map(self.window.staged_as, blocks)):
                    self.window.blocks[number].told.add(consumer.name)
                idle_s = self._peer_idle.given(consumer, now)
                new = self.window.hand_out(blocks)
                self._out.append(ev.Deliver(consumer.name, consumer.session, blocks, idle_s, holdable < 1, new))
                consumer.transition(ConsumerState.BUSY, "it is given blocks {} to {}", consumer.cursor, end - 1)
                consumer.cursor, consumer.since = end, now
                consumer.given = max(consumer.given, end)

    def _begin_block(self, number: int) -> Sequence[BlockPart]:
        """Fix how the block's epoch is shuffled, if it is the first of it, and cut the block."""
        if not self.epochs.has_begun(number):
            self.epochs.fix(number, self.consumers.own_epochs())
            self._tell_shuffle(number)
            # A block in a worker's hand stays although nobody wants it: a newcomer then gets it as it was begun.
            held = (consumer.released for consumer in self.consumers.by_name.values())
            self.epochs.forget([number, *self.window.blocks, *held])
        return self._cut(number, self.epochs.shuffle_of(number))

    def _tell_shuffle(self, block: int) -> None:
        """Write a line for the log where the stream's epochs begin to be shuffled in another way than before."""
        shuffle, before = self.epochs.shuffle_of(block), self.epochs.shuffle_of(block - self.blocks_per_epoch)
        if shuffle.cuts != before.cuts and not self.epochs.is_aside(block):
            cuts = ", ".join(map(str, shuffle.cuts))
            how = f"within segments cut at {cuts}" if cuts else "all together again"
            self._out.append(ev.Note(f"from epoch {shuffle.epoch} on, samples are shuffled {how}"))

    def _drop_lacking(self) -> None:
        """Drop kept blocks that lack samples, each once an epoch: where epochs differ, each makes its own anyway.

        Nobody waits for that, as a rule: it is done when a consumer comes near, and before it asks.
        """
        for number in sorted(self.window.lacking):
            block = self.window.blocks[number]
            if block.state is not BlockState.READY or block.given_as is None:
                continue
            if self.consumers.needs_anew(number, block.given_as):
                self._drop(number, "it lacks samples, which may be there in the next epoch", anew=True)

    def _drop(self, block: int, why: str, *, anew: bool = False) -> None:
        self.window.drop(block, why)
        self.tasks.forget(block)
        self._out.append(ev.DropBlock(block, anew))

    def _assign(self, assignment: Assignment, now: float) -> None:
        worker, number, part = assignment
        # From its first block on an epoch counts as begun: a consumer that comes when all have left gets the next one.
        if not self.epochs.is_aside(number):
            self.next_epoch = max(self.next_epoch, number // self.blocks_per_epoch + 1)
        task = self.tasks.assign(worker, number, part, now)
        block = self.window.blocks[number]
        block.begin(part, task.number, worker.name)
        shuffle = self.epochs.shuffle_of(number)
        self._out.append(ev.Prepare(task.number, worker.name, number, part, block.parts[part].block_part, shuffle))

    # ---- for people and tests ----

    def explain_wait(self, name: str, awaited: Sequence[str] = ()) -> str:
        """One clause that says what a waiting consumer waits for; see `explain.wait`."""

        def has_room(block: int) -> bool:
            return self._scheduler.has_room(self._block_bytes(block))

        return explain.wait(name, self.epochs, self.consumers, self.tasks, self.window, has_room, awaited)

    def story(self, thing: str, clock: Clock = seconds) -> list[str]:
        """Return what happened to a thing, oldest line first.

        Args:
            thing: "block 17", or the name of a consumer or a worker.
            clock: writes the times that `handle` was given.

        Raises:
            ConfigError: nothing is known of it; the message lists what there is.
        """
        lines = self.stories.lines(thing, clock)
        if not lines:
            raise unknown_thing(thing, self.stories.names())
        return lines

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one does not hold; the message has the stories of what is concerned.
        """
        self.window.validate()
        self.tasks.validate()
        self.consumers.validate()
        self.epochs.validate()
        explain.check_links(self.epochs, self.consumers, self.tasks, self.window, is_served=self.failed is None)


def _ranks(world_size: int) -> str:
    return "one process" if world_size == 1 else f"{world_size} ranks"
