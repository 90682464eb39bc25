"""Who is on a feed: the consumers, the reservations held for some, and the cohorts they form.

A cohort is a set of consumers that go through the stream of blocks together: each block is made once for all of them,
the fast wait for the slow within the window. Normally there is one. A consumer that lags too long, or that was restored
from a checkpoint far from the others, is a cohort of its own until its cursor meets another cohort's window again.
Trials whose paces differ are in different cohorts if all together are given more that way (`mbaas.core.pace`).

Within its cohort a consumer is called a member.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mbaas.core.epochs import EpochTable
from mbaas.core.pace import Group, may_unite
from mbaas.core.story import InvariantError, Stories, Story
from mbaas.core.transitions import CONSUMER_CHANGES, ConsumerState
from mbaas.order import OwnEpoch


@dataclass(eq=False)
class Consumer:
    """One consumer, or a reservation held for one.

    Attributes:
        name: the consumer's, or of the one that a reservation is held for; "reservation N" if that is anybody.
        session: number of the registration; calls of other sessions are refused. 0 for a reservation.
        cursor: the next block to hand out; everything below was handed out or skipped.
        released: the memory of blocks below is let go; never above ``cursor``.
        done: blocks below are used up; never above ``cursor``.
        deadline: when the lease (or, while RESERVED, the reservation time) ends.
        cohort: number of the one cohort that it is a member of.
        own_epoch: where its own epoch lies: the one that it is in, or has just ended.
        story: what happened to it.
        state: changed by `transition` only.
        for_anyone: whether it is a reservation that any newcomer may take.
        is_beside: whether that is for one that begins with another trial, not for the successor of one that ended.
        holds_up_nobody: whether it is a reservation for one that begins at once: others do not wait for it.
        want: while WAITING, how many blocks the call takes at most.
        since: when it began to wait, if it is WAITING; if it is BUSY, when it joined or was given blocks last; if it
            is RESERVED, since when it is held.
        longest_s: the longest that it took, within an epoch of its own, from being given blocks to asking for more.
        asked: whether this session has asked for a block; nothing is made for a cohort before one of its members did.
        place_kept: while RESTING, whether the blocks from its cursor on stay as long as nobody needs their room.
        exact: the block at which it asked to go on, and from which nobody may move it; None if any epoch will do.
        skipped: ranges below ``cursor`` of which it holds nothing: they were never handed out, because it went on
            behind them, or were given up, or it read them and says so. Ascending, and apart from each other.
        heard: number of the newest call of this session about its cursor.
        given: one past the last block that was handed out since that call; above ``cursor`` only after a call that came
            twice moved it back.
        trial: whose rank it is, or its own name.
        world_size: ranks of the trial; 1 if it is one consumer.
        node: id of the node where it runs; "" if that is not known, as of a reservation.
        born: when its loader was made, Unix time in nanoseconds.
        blocks_per_s: what its trial takes if its data is always ready, as measured last; 0 while that is not known.
        apart: why it was parted from others of its cohort; "" once it goes on with others again.
        is_visitor: whether it is expected to leave when its first epoch ends.
        has_gone_on: whether it has asked for a block of a second epoch of its own.
        peer_idle_mark: (cohort, its ``peer_idle_s``) when it was given blocks last; cohort -1 before it has asked for
            any. See `mbaas.core.peer_idle`.
    """

    name: str
    session: int
    cursor: int
    released: int
    done: int
    deadline: float
    cohort: int
    own_epoch: OwnEpoch
    story: Story = field(repr=False)
    state: ConsumerState = ConsumerState.BUSY
    for_anyone: bool = False
    is_beside: bool = False
    holds_up_nobody: bool = False
    want: int = 1
    since: float = 0.0
    longest_s: float = 0.0
    asked: bool = False
    place_kept: bool = False
    exact: int | None = None
    skipped: tuple[range, ...] = ()
    heard: int = 0
    given: int = 0
    trial: str = ""
    world_size: int = 1
    node: str = ""
    born: int = 0
    blocks_per_s: float = 0.0
    apart: str = ""
    is_visitor: bool = False
    has_gone_on: bool = False
    peer_idle_mark: tuple[int, float] = (-1, 0.0)

    @property
    def moves(self) -> bool:
        """Whether it may begin an epoch elsewhere than where its last one ended. Ranks may not, or they would part.

        One that may also returns to the epochs of the others after an epoch aside (`mbaas.core.epochs`).
        """
        return self.trial == self.name

    @property
    def rests(self) -> bool:
        """Whether it holds up nobody: it is between epochs, or its place is held only as long as that costs nothing."""
        return self.state is ConsumerState.RESTING or self.holds_up_nobody

    @property
    def waiting(self) -> bool:
        """Whether a call of it waits for a block."""
        return self.state is ConsumerState.WAITING

    def transition(self, to: ConsumerState, *why: object) -> None:
        """Change the state.

        Raises:
            InvariantError: ``to`` may not follow, see `CONSUMER_CHANGES`.
        """
        self.story.change("", self.state, to, CONSUMER_CHANGES, *why)
        self.state = to

    def was_overtaken(self, number: int) -> bool:
        """Note the number of a call about the cursor, and return whether a later call was heard before it."""
        # If an old call moved the cursor, blocks that were handed out since then would count as skipped, and would be
        # dropped while the trial still reads them.
        if 0 < number < self.heard:
            return True
        self.heard = max(self.heard, number)
        return False

    @property
    def group(self) -> Group | None:
        """Its trial and pace; None while that is not known."""
        return Group(1, self.blocks_per_s) if self.blocks_per_s else None

    @property
    def is_between_epochs(self) -> bool:
        """Whether it has been given all of its own epoch, or nothing of it so far."""
        return self.cursor in (self.own_epoch.first, self.own_epoch.end)

    def held(self) -> list[range]:
        """Return the ranges that were handed out and are not let go, lowest first; the last one ends at its cursor."""
        ends = [(gap.start, gap.stop) for gap in self.skipped]
        starts = [self.released, *[stop for _, stop in ends]]
        return list(map(range, starts, [*[start for start, _ in ends], max(self.cursor, self.given)]))

    def holds(self, block: int) -> bool:
        """Whether the block was handed out and is not let go."""
        return self.released <= block < max(self.cursor, self.given) and not any(block in gap for gap in self.skipped)

    def go_to(self, cursor: int, *, again: bool = False) -> None:
        """Move the cursor to where the consumer asks next: usually where it is, else further on or back.

        Args:
            cursor: the block.
            again: whether the same call was heard before. Whether its answer arrived is not known, so the consumer may
                hold what was handed out then, and still it is handed out once more.
        """
        # A loop that is left half-way goes on with the next epoch. What it skipped it does not hold, although it lies
        # between ``released`` and ``cursor``; counted as held it would keep its bytes from the blocks that are needed.
        end = max(self.cursor, self.given)
        if cursor > end:
            self.skipped = (*self.skipped, range(end, cursor))
        else:
            self.skipped = tuple(range(gap.start, min(gap.stop, cursor)) for gap in self.skipped if gap.start < cursor)
        self.cursor = cursor
        if not again:
            self.given = cursor

    def let_go_between(self, first: int, end: int) -> None:
        """Note that it holds nothing of blocks that lie between those that it holds."""
        end = min(end, self.cursor)
        before = [range(gap.start, min(gap.stop, first)) for gap in self.skipped if gap.start < first]
        behind = [range(max(gap.start, end), gap.stop) for gap in self.skipped if gap.stop > end]
        self.skipped = (*before, range(first, end), *behind) if first < end else self.skipped

    def let_go(self, released: int, done: int) -> bool:
        """Note that blocks below ``released`` are let go, and those below ``done`` are used up.

        Neither ever goes back: calls may overtake each other.

        Returns:
            whether more is let go than before.
        """
        before = self.released
        self.released = max(before, min(released, self.cursor))
        self.done = max(self.done, min(done, self.cursor))
        if self.skipped:
            self.skipped = tuple(gap for gap in self.skipped if gap.stop > self.released)
        return self.released > before


@dataclass(eq=False)
class Cohort:
    """Consumers that go through the stream of blocks together.

    Members that rest bound nothing: neither how far the others may go, nor what is kept for the cohort. If all rest,
    the cohort is where the one is that is furthest.

    Attributes:
        number: the cohort's, never used again.
        blocks_per_epoch: blocks in one epoch.
        ahead_blocks: how far blocks may be made ahead of the furthest member.
        slack_blocks: how much further they may be made ahead of the slowest.
        members: never empty after an event.
        active: those of them that do not rest.
        begun: one past the highest block that was ever begun for this cohort.
        boundary: beginning of the epoch that the slowest member is in.
        join_start: ``boundary`` while all blocks from there on are still staged, so that a newcomer can begin there;
            else None.
        keep_from: the lowest block that must stay staged; never above what a member holds.
        held_up: (cursor, since): the slowest cursor while others wait for it, and since when; None while nobody waits.
        uneven: (trials, since): those that it should go on without because of their pace, and since when; None if all
            should stay together.
        peer_idle_s: seconds in which a worker was idle because members wait for each other, or other cohorts have the
            room; without those that go on.
        peer_idle_since: since when one is; None while none is.
    """

    number: int
    blocks_per_epoch: int
    ahead_blocks: int
    slack_blocks: int = 0
    members: list[Consumer] = field(default_factory=list)
    active: list[Consumer] = field(default_factory=list)
    begun: int = 0
    boundary: int = 0
    join_start: int | None = None
    keep_from: int = 0
    held_up: tuple[int, float] | None = None
    uneven: tuple[frozenset[str], float] | None = None
    peer_idle_s: float = 0.0
    peer_idle_since: float | None = None

    def add(self, consumer: Consumer) -> None:
        """Take in a member that does not rest."""
        consumer.cohort = self.number
        self.members.append(consumer)
        self.active.append(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Take out a member; without any the cohort must end."""
        self.members.remove(consumer)
        if consumer in self.active:
            self.active.remove(consumer)

    @property
    def slowest(self) -> int:
        """The cursor of the slowest member that does not rest."""
        if not self.active:
            return max([m.cursor for m in self.members])
        return min([m.cursor for m in self.active])  # a list is faster than a generator

    @property
    def furthest(self) -> int:
        """The cursor of the furthest member that reads; that of the slowest if none does."""
        return max([self.slowest, *[m.cursor for m in self.active if m.asked]])

    @property
    def is_held_back(self) -> bool:
        """Whether less is made ahead of the furthest member than would be if it were alone."""
        return self.furthest > self.slowest + self.slack_blocks

    @property
    def _front(self) -> int:
        """The cursor of the furthest member that is not resting; 0 if all rest."""
        return max([m.cursor for m in self.active], default=0)

    def may_go_on_at(self, block: int) -> bool:
        """Whether a consumer that did not take part may go on at ``block``: it is still kept, and nobody is held up."""
        return self.keep_from <= block and self._front <= block + self.ahead_blocks + self.slack_blocks

    @property
    def lowest_held(self) -> int:
        """The lowest block of those that lie before the cursors of members, and that one of them has not let go of."""
        bounding = self.active or [max(self.members, key=lambda member: member.cursor)]
        return min([m.skipped[-1].stop if m.skipped else m.released for m in bounding])

    def held_apart(self) -> list[range]:
        """Return the blocks that only single members hold: from before a rest, or from before what they skipped."""
        if len(self.active) == len(self.members) and not any(m.skipped for m in self.members):
            return []
        return [blocks for m in self.members for blocks in (m.held() if m.rests else m.held()[:-1]) if blocks]

    @property
    def horizon(self) -> int:
        """One past the highest block that may be made now; not beyond the next epoch of the furthest member that reads.

        Otherwise a small dataset would be prepared for several epochs that no trial may ever begin.
        """
        slowest, furthest = self.slowest, self.furthest
        if self.active and all(m.is_visitor for m in self.active):
            end = max([m.own_epoch.end for m in self.active])
        else:
            # The whole next epoch may be made while it is at its last block, so an epoch's end costs no wait; where
            # epochs have one block, two of them.
            end = max(self.next_boundary(furthest) + self.blocks_per_epoch, furthest + 2)
        return min(min(slowest + self.slack_blocks, furthest) + self.ahead_blocks, end)

    def next_boundary(self, block: int) -> int:
        """The first block of the epoch that begins at ``block`` or next after it."""
        return -(-block // self.blocks_per_epoch) * self.blocks_per_epoch

    @property
    def wanted(self) -> list[range]:
        """The blocks that must stay: a member holds them or is still to get them, or they are kept for newcomers."""
        # Below, the last cursor has passed and let go. Ahead of the slowest, all that was begun is kept: it will be
        # needed. A member that is in front, or that came back from there, may lie beyond the horizon.
        end = max(self.begun, self.horizon, *[m.cursor for m in self.members])
        return [range(self.keep_from, end), *self.held_apart()]

    @property
    def useful(self) -> range:
        """The blocks that a member will need soon: made for others, they need not be made again.

        They stay as long as nobody needs their room: those of its own epoch, and others as far as trials may be apart.
        """
        slowest = self.slowest
        return range(slowest, max([slowest + self.slack_blocks, *[m.own_epoch.end for m in self.active]]))

    def paces(self) -> dict[str, float]:
        """Return the trials whose pace is known, the fastest first: blocks/s that each takes."""
        found = {m.trial: m.blocks_per_s for m in self.active if m.blocks_per_s}
        return dict(sorted(found.items(), key=lambda pace: (-pace[1], pace[0])))

    @property
    def group(self) -> Group | None:
        """Its trials and the pace of the slowest; None while no pace is known."""
        paces = [*self.paces().values()]
        return Group(len(paces), paces[-1]) if paces else None

    def advance(self) -> None:
        """Bring ``boundary``, ``join_start`` and ``keep_from`` up to date after the members moved."""
        slowest = self.slowest
        boundary = slowest - slowest % self.blocks_per_epoch
        if boundary != self.boundary:
            # The slowest begins a new epoch: newcomers can begin it too, as long as nothing of it was dropped.
            self.join_start = boundary if self.keep_from <= boundary else None
            self.boundary = boundary
        self.keep_from = self.lowest_held if self.join_start is None else min(self.join_start, self.lowest_held)
        if len(self.active) < len(self.members):
            self.keep_from = min([self.keep_from, *[m.cursor for m in self.members if m.place_kept]])

    def give_up_places(self) -> bool:
        """Give up the blocks that are kept for newcomers and for those who rest; return whether that frees any."""
        if self.keep_from >= self.lowest_held:
            return False
        if self.join_start is not None and self.join_start < self.lowest_held:
            self.join_start = None
        for member in self.members:
            member.place_kept = member.place_kept and member.cursor >= self.lowest_held
        self.keep_from = self.lowest_held
        return True

    def can_merge(self, other: Cohort) -> bool:
        """Whether two cohorts overlap so far that one can serve both without making a block again."""
        behind, front = sorted((self, other), key=lambda cohort: cohort.slowest)
        return front.keep_from <= behind.slowest and front.slowest <= behind.horizon

    def __str__(self) -> str:
        return ", ".join(m.name for m in self.members) or "nobody"


class ConsumerTable:
    """Consumers and cohorts of one feed.

    Args:
        epochs: how the stream's epochs are shuffled.
        ahead_blocks: how far blocks may be made ahead of a cohort's furthest member.
        stories: where the stories of consumers are kept.
        leads: whether it is decided here where newcomers begin, and who moves to another's epoch.
        keeps_all: whether all blocks of an epoch are kept, for all epochs. Everybody is a cohort alone then: nobody
            has to stay near others for a block to be made only once.
        slack_blocks: how much further they may be made ahead of its slowest.

    Attributes:
        by_name: every consumer and reservation, none GONE; each is a member of exactly one cohort.
        cohorts: by number; none is empty between two events.
        prep_per_s: blocks/s that prep makes at most, as measured last; 0 while that is not known.
        expects_visitors: whether the last consumer that ended its first epoch left then, as a loader does that is
            opened anew for each evaluation. For newcomers nothing beyond their first epoch is made then, until one
            goes on.
    """

    def __init__(
        self,
        epochs: EpochTable,
        ahead_blocks: int,
        stories: Stories,
        *,
        leads: bool = True,
        keeps_all: bool = False,
        slack_blocks: int = 0,
    ) -> None:
        self.epochs, self.blocks_per_epoch = epochs, epochs.blocks_per_epoch
        self.ahead_blocks, self.slack_blocks = ahead_blocks, slack_blocks
        self.leads, self.keeps_all = leads, keeps_all
        self.by_name: dict[str, Consumer] = {}
        self.cohorts: dict[int, Cohort] = {}
        self.prep_per_s = 0.0
        self.expects_visitors = False
        self._stories = stories
        self._next_cohort = 0
        self._numbers = itertools.count()  # of reservations

    # ---- consumers ----

    def enter(
        self,
        name: str,
        session: int,
        cohort: Cohort,
        cursor: int,
        deadline: float,
        state: ConsumerState,
        own_epoch: OwnEpoch | None = None,
        trial: str | None = None,
    ) -> Consumer:
        """Put a consumer, or a reservation, into a cohort; it has used up all before ``cursor``.

        Its own epochs are those of the stream unless ``own_epoch`` says where they lie. It is a trial by itself unless
        ``trial`` says whose rank it is.
        """
        own = self.epochs.around(cursor) if own_epoch is None else own_epoch
        story = self._stories.begin("consumer", name)
        story.tell("{}: session {}, from block {} on, in cohort {}", state.name, session, cursor, cohort.number)
        consumer = Consumer(name, session, cursor, cursor, cursor, deadline, cohort.number, own, story, state)
        consumer.trial = name if trial is None else trial
        consumer.is_visitor = self.expects_visitors
        self.by_name[name] = consumer
        cohort.add(consumer)
        return consumer

    def exit(self, consumer: Consumer, why: str) -> None:
        """Take a consumer out; a cohort ends with its last member."""
        del self.by_name[consumer.name]
        cohort = self.cohorts[consumer.cohort]
        cohort.remove(consumer)
        if not cohort.members:  # what was staged for it is wanted by nobody now, and dropped with the next follow-up
            del self.cohorts[cohort.number]
        consumer.transition(ConsumerState.GONE, "{}", why)
        self._stories.end(consumer.story)

    def note_leaving(self, consumer: Consumer) -> None:
        """Note that a consumer leaves of its own accord: whether it was a visitor, newcomers are expected to be."""
        if not consumer.has_gone_on and consumer.cursor >= consumer.own_epoch.end:
            self.expects_visitors = True

    def session(self, name: str, session: int) -> Consumer | None:
        """The consumer, if this is its open session."""
        consumer = self.by_name.get(name)
        # A reservation has session 0: no call may come for it.
        return consumer if consumer is not None and session > 0 and consumer.session == session else None

    def why_unknown(self, name: str, session: int) -> str:
        """One clause that says why `session` found nobody."""
        consumer = self.by_name.get(name)
        if consumer is None or consumer.session == 0:
            return f"the service has no session {session} of consumer {name!r}: it left or was removed"
        return f"consumer {name!r} is now in session {consumer.session}, this call is from session {session}"

    @property
    def nodes(self) -> frozenset[str]:
        """The nodes where consumers run."""
        return frozenset(consumer.node for consumer in self.by_name.values() if consumer.node)

    def on_node(self, node: str) -> int:
        """How many consumers run on a node."""
        return sum(consumer.node == node for consumer in self.by_name.values())

    def of_trial(self, trial: str) -> list[Consumer]:
        """Return a trial's consumers: itself or its ranks, or the reservation that is held for it."""
        return [consumer for consumer in self.by_name.values() if consumer.trial == trial]

    def own_epochs(self) -> list[OwnEpoch]:
        """Where the epochs of all consumers lie."""
        return [consumer.own_epoch for consumer in self.by_name.values()]

    # ---- reservations ----

    def reserve(
        self, name: str, cohort: Cohort, cursor: int, now: float, deadline: float, *, at_once: bool
    ) -> Consumer:
        """Hold a reservation for a trial: it begins at ``cursor``, if it comes before the deadline.

        Args:
            name: the trial's.
            cohort: with whom.
            cursor: the block.
            now: the time.
            deadline: when the reservation ends.
            at_once: it begins wherever the others are by then, so they do not wait for it. What is staged from
                ``cursor`` on stays for it as long as nobody needs the room.
        """
        # Session 0: sessions of consumers begin above it, so no call can speak for a reservation.
        reserved = self.enter(name, 0, cohort, cursor, deadline, ConsumerState.RESERVED)
        reserved.since = now
        if at_once:
            reserved.holds_up_nobody = True
            cohort.active.remove(reserved)
        return reserved

    def reserve_for_successor(self, consumer: Consumer, now: float, deadline: float, *, at_once: bool) -> None:
        """Reserve for any successor of a leaving consumer: where that ended, or at the beginning of the next epoch.

        Args:
            consumer: it leaves.
            now: the time.
            deadline: when the reservation ends.
            at_once: whether the successor begins at once, in the middle of an epoch if need be.
        """
        cohort = self.cohorts[consumer.cohort]
        start = consumer.done if at_once else cohort.next_boundary(consumer.done)
        self.reserve_for_anyone(cohort, start, now, deadline, at_once=at_once)

    def reserve_for_anyone(
        self, cohort: Cohort, cursor: int, now: float, deadline: float, *, at_once: bool
    ) -> Consumer:
        """Hold a reservation for whichever trial is announced next; the arguments are those of `reserve`."""
        # A consumer may be called so, too: its name is its own affair.
        name = next(name for number in self._numbers if (name := f"reservation {number}") not in self.by_name)
        reserved = self.reserve(name, cohort, cursor, now, deadline, at_once=at_once)
        reserved.for_anyone = True
        return reserved

    def place_of(self, trial: str) -> Consumer | None:
        """Find the reservation that is held for a trial, which its first rank takes for all of them."""
        found = self.by_name.get(trial)
        return found if found is not None and found.state is ConsumerState.RESERVED else None

    def free_reservations(self) -> list[Consumer]:
        """Find the reservations that any newcomer may take; first the one furthest behind, which holds up most."""
        free = [consumer for consumer in self.by_name.values() if consumer.for_anyone]
        return sorted(free, key=lambda consumer: consumer.cursor)

    def hold_reservations(self, reservations: frozenset[tuple[str, int]]) -> None:
        """Hold exactly these reservations, (name, block). They have no deadline: the first lane says when they end."""
        for consumer in [c for c in self.by_name.values() if c.state is ConsumerState.RESERVED]:
            if (consumer.name, consumer.cursor) not in reservations:
                self.exit(consumer, "the first lane holds it no more")
        for name, start in sorted(reservations):
            if name not in self.by_name:  # it may have joined here before the first lane told of it
                self.enter(name, 0, self.cohort_towards(start), start, math.inf, ConsumerState.RESERVED)

    # ---- where to begin ----

    def entrance(self, cohort: Cohort, least: int = 0) -> int:
        """The block at which a newcomer to ``cohort`` begins: that of its join window, or of the next epoch."""
        if cohort.join_start is not None and cohort.join_start >= least:
            return cohort.join_start
        return cohort.next_boundary(cohort.slowest)

    def shared_start(self, otherwise: int, trial: str | None = None, least: int = 0) -> tuple[Cohort, int]:
        """Find where a newcomer begins with the least wait: cohort and block; at ``otherwise`` if nobody is here.

        It had the epochs before ``least``, so it does not begin there whoever does.

        Of the other ranks of its ``trial``, those that have not begun wait for it, and it begins with them. Those that
        have begun are of an earlier run of the trial, whose leases have not ended: nobody is there to share with.
        """
        for rank in self.of_trial(trial) if trial is not None else ():
            if not rank.asked and rank.cursor >= least:
                return self.cohorts[rank.cohort], rank.cursor
        open_ones = [each for each in self._open_to_newcomers(trial) if self.entrance(each, least) >= least]
        if not open_ones:
            return self.new_cohort(otherwise), otherwise

        # The least wait; of equal ones the largest cohort, because there a block is shared by most.
        def wait(cohort: Cohort) -> tuple[int, int]:
            return self.entrance(cohort, least) - cohort.slowest, -len(cohort.members)

        cohort = min(open_ones, key=wait)
        return cohort, self.entrance(cohort, least)

    def _open_to_newcomers(self, trial: str | None = None) -> list[Cohort]:
        """The cohorts that a newcomer may join: none where everybody is alone, and none that goes through epochs aside.

        For a rank of ``trial`` also none whose members are all ranks of it that have begun; see `shared_start`.
        """
        if self.keeps_all:
            return []
        return [
            cohort
            for cohort in self.cohorts.values()
            if not self.epochs.is_aside(cohort.slowest)
            and not all(member.trial == trial and member.asked for member in cohort.members)
        ]

    def start_now(self, otherwise: int, is_ready: Callable[[int], bool], least: int | None) -> tuple[Cohort, int]:
        """Find where a newcomer begins at once, in the middle of an epoch if need be: cohort and block.

        Args:
            otherwise: the block at which it begins if nobody is here.
            is_ready: whether a block can be handed out.
            least: where its last epoch ended; it begins there, or where others are who have that behind them.
        """
        if least is None:
            found = self._find_now(is_ready)
        else:
            cohort = self._find_cohort_ahead(least)
            found = self._find_now(is_ready, least) if cohort is None else (cohort, least)
        return (self.new_cohort(otherwise), otherwise) if found is None else found

    def _find_now(self, is_ready: Callable[[int], bool], least: int = 0) -> tuple[Cohort, int] | None:
        """Find the cohort, and its block from ``least`` on, at which a consumer begins at once."""
        found = [(cohort, self._block_now(cohort, is_ready)) for cohort in self._open_to_newcomers()]
        # One that has a block for it at once; of these the largest, because there a block is shared by most.
        return min(
            (each for each in found if each[1] >= least),
            key=lambda each: (not is_ready(each[1]), -len(each[0].members)),
            default=None,
        )

    def _block_now(self, cohort: Cohort, is_ready: Callable[[int], bool]) -> int:
        """Find the block of a cohort at which a newcomer begins at once without holding up anybody."""
        slowest = cohort.slowest
        if cohort.join_start is not None and slowest <= cohort.join_start + 1:
            return cohort.join_start  # the epoch has hardly begun
        # The slowest member holds the block before its cursor, so the newcomer need not wait even if the next one is
        # still being made.
        block = next((b for b in range(slowest, max(cohort.keep_from, slowest - 2) - 1, -1) if is_ready(b)), slowest)
        # What is made ahead may reach into the next epoch already. Then that is begun, and blocks of it are there.
        return block if self.epochs.can_begin(block) else self.epochs.next_boundary(block)

    def _near_start(self, cohort: Cohort, is_ready: Callable[[int], bool]) -> int:
        """Find the block of a cohort at which others can begin soon: with an epoch if that is near, else at once."""
        entrance = self.entrance(cohort)
        return entrance if entrance <= cohort.horizon else self._block_now(cohort, is_ready)

    def cohort_at(self, start: int) -> Cohort:
        """Find the cohort whose window holds ``start``, or make a new one."""
        for cohort in [] if self.keeps_all else self.cohorts.values():
            if cohort.keep_from <= start <= cohort.horizon:
                return cohort
        return self.new_cohort(start)

    def _find_cohort_ahead(self, start: int) -> Cohort | None:
        """Find a cohort that still has ``start`` ahead and is not held up by a consumer that goes on there."""
        open_ones = [] if self.keeps_all else self.cohorts.values()
        return next((each for each in open_ones if each.may_go_on_at(start) and start <= each.horizon), None)

    def cohort_towards(self, start: int) -> Cohort:
        """Find the cohort that begins an epoch at ``start``, now or next, or make a new one."""
        met = [c for c in self.cohorts.values() if start in (c.join_start, c.next_boundary(c.slowest))]
        if self.keeps_all or not met:
            return self.cohort_at(start)
        return max(met, key=lambda cohort: len(cohort.members))

    def new_cohort(self, start: int) -> Cohort:
        """Make a cohort without members yet; blocks are made for it from ``start`` on."""
        boundary = start - start % self.blocks_per_epoch
        join_start = start if start == boundary else None  # what lies before ``start`` is not staged for it
        cohort = Cohort(self._next_cohort, self.blocks_per_epoch, self.ahead_blocks, self.slack_blocks)
        cohort.begun, cohort.boundary, cohort.join_start, cohort.keep_from = start, boundary, join_start, start
        self._next_cohort += 1
        self.cohorts[cohort.number] = cohort
        return cohort

    # ---- cohorts that meet and part ----

    def merge(self, consumer: Consumer, is_ready: Callable[[int], bool]) -> str | None:
        """Unite a consumer's cohort with one that its cursor has reached, or have it begin its epoch with others ahead.

        Only a consumer that is behind unites cohorts, by asking. Those ahead must not pull a laggard back in before it
        moves.

        Args:
            consumer: it asks.
            is_ready: whether a block can be handed out.

        Returns:
            a line for the log if that happened.
        """
        own = self.cohorts[consumer.cohort]
        others = [] if self.keeps_all else [each for each in self.cohorts.values() if each is not own]
        for other in others:
            # One that was restored, or fell behind, has caught up.
            if (
                consumer.cursor == own.slowest <= other.slowest
                and own.can_merge(other)
                and self._suits(own.group, other, own)
            ):
                return self._unite(other, own)
        return self._begin_ahead(consumer, others, is_ready) if self.leads and self._may_move(consumer) else None

    def _begin_ahead(self, consumer: Consumer, others: Sequence[Cohort], is_ready: Callable[[int], bool]) -> str | None:
        """Have a consumer that begins an epoch begin it where another cohort is, if that is ahead of it.

        Any epoch has every sample once. And two cohorts that go equally fast would never meet, so all of their blocks
        would be made twice: once each member behind has begun an epoch with those ahead, there is one.
        """
        own = self.cohorts[consumer.cohort]
        is_alone = len(own.members) == 1
        # One that asks first has just been told where it begins, and with whom. Of several lanes, others would see
        # those who move one by one in another order.
        if not is_alone and (self.epochs.lanes > 1 or not consumer.asked):
            return None
        blocks = {other.number: self._near_start(other, is_ready) for other in others}
        ahead = [
            other
            for other in others
            if consumer.cursor < blocks[other.number] <= other.horizon  # further on it would wait until they come
            and not self.epochs.is_aside(other.slowest)
        ]
        suiting = [other for other in ahead if self._suits(consumer.group, other, own)]
        # One that is alone goes there also if they go faster: what is made for them stays for it while there is room.
        found = next(iter(suiting or (ahead if is_alone else ())), None)
        if found is None:
            return None
        # Its trial may still work on the last block of the epoch before: that stays counted as held until it lets go.
        self.begin_at(consumer, blocks[found.number])
        consumer.story.tell("moved on to block {}, where others are", consumer.cursor)
        if not suiting:
            return None
        if is_alone:
            return self._unite(found, own)
        own.remove(consumer)
        found.add(consumer)
        found.held_up = found.uneven = None
        consumer.apart = ""
        return f"{consumer.name} joined the cohort of {', '.join(m.name for m in found.members if m is not consumer)}"

    def groups(self, *but: Cohort) -> list[Group]:
        """Return the paces of all cohorts but these, as far as they are known."""
        return [cohort.group for cohort in self.cohorts.values() if cohort not in but and cohort.group is not None]

    def _suits(self, group: Group | None, cohort: Cohort, *own: Cohort) -> bool:
        """Whether trials do not lose by going on with a cohort, as far as paces are known.

        Args:
            group: the trials.
            cohort: the cohort.
            own: that of the trials, if they have one to themselves.
        """
        if group is None or cohort.group is None or not self.prep_per_s:
            return True
        return may_unite(group, cohort.group, self.groups(cohort, *own), self.prep_per_s)

    def _may_move(self, consumer: Consumer) -> bool:
        """Whether a consumer begins an epoch, and may do so elsewhere."""
        begins = consumer.cursor == consumer.own_epoch.first and consumer.cursor != consumer.exact
        return begins and consumer.moves

    def begin_at(self, consumer: Consumer, block: int) -> None:
        """Have a consumer begin its own epoch at a block."""
        consumer.go_to(block)
        consumer.own_epoch = self.epochs.own_epoch(block)

    def update_own_epoch(self, consumer: Consumer, began: int | None) -> bool:
        """Note in which epoch of its own a consumer is; past the end of one, the next begins there.

        If that would lack samples, because the epoch after this one is begun already and not shuffled within its
        segments, it begins where the stream's next epoch does: what it skips is of an epoch that it has not begun.

        Args:
            consumer: its cursor is where it asks.
            began: the first block of that epoch, as the consumer sees it. It may have had another answer than the one
                that was given last. None if it has no own view.

        Returns:
            whether it will get each sample of that epoch once.
        """
        own = before = consumer.own_epoch
        if consumer.cursor >= before.end:
            consumer.has_gone_on = True
            consumer.is_visitor = self.expects_visitors = False
        if began is None:
            if consumer.cursor < own.first:
                own = self.epochs.around(consumer.cursor)
            while consumer.cursor >= own.end:
                own = self.epochs.own_epoch(own.end)
        elif began != own.first:
            own = self.epochs.own_epoch(began)
        consumer.own_epoch = own
        if consumer.cursor != own.first:
            return own is before or self.epochs.keeps(own)
        if not self.epochs.can_begin(consumer.cursor):
            self.begin_at(consumer, self.epochs.next_boundary(consumer.cursor))
        return True

    # ---- between epochs ----

    def rest(self, consumer: Consumer) -> None:
        """Have a consumer that is between two epochs of its own hold up nobody until it asks again."""
        consumer.transition(ConsumerState.RESTING, "it has not asked for its next epoch")
        consumer.place_kept = True
        self.cohorts[consumer.cohort].active.remove(consumer)

    def go_on(self, consumer: Consumer, is_ready: Callable[[int], bool]) -> None:
        """Have a consumer that asks take part again after it rested, or after its cohort left its place.

        It goes on at its cursor while what lies there is kept, and the others are no further than prep may be ahead of
        it. Else it begins its next epoch at once where others are, or goes on apart from them if it may not.

        Args:
            consumer: its state changes with its call.
            is_ready: whether a block can be handed out.
        """
        cohort = self.cohorts[consumer.cohort]
        cohort.remove(consumer)
        consumer.place_kept = False
        if cohort.members and not cohort.may_go_on_at(consumer.cursor):
            found = self._find_now(is_ready, consumer.cursor) if self._may_move(consumer) else None
            if found is None:
                cohort = self._find_cohort_ahead(consumer.cursor) or self.new_cohort(consumer.cursor)
            else:
                cohort, block = found
                self.begin_at(consumer, block)
                if not self._suits(consumer.group, cohort):
                    cohort = self.new_cohort(block)  # what others have there it has, too, as long as it is kept
            consumer.apart = "" if cohort.members else consumer.apart
            consumer.story.tell("goes on at block {} in cohort {}", consumer.cursor, cohort.number)
        cohort.add(consumer)

    def _unite(self, keep: Cohort, gone: Cohort) -> str:
        text = f"{gone} joined the cohort of {keep}"
        behind = min(keep, gone, key=lambda cohort: cohort.slowest)  # its epoch is the one that newcomers can begin
        keep.begun = max(keep.begun, gone.begun)
        keep.boundary, keep.join_start = behind.boundary, behind.join_start
        keep.keep_from = min(keep.keep_from, gone.keep_from)
        keep.held_up = keep.uneven = None
        for member in [*keep.members, *gone.members]:
            member.apart = ""
        for member in gone.members:
            member.cohort = keep.number
            member.story.tell("in cohort {} now, with {} others", keep.number, len(keep.members))
        keep.members += gone.members
        keep.active += gone.active
        del self.cohorts[gone.number]
        return text

    def detach(self, consumers: Sequence[Consumer], why: str) -> Cohort:
        """Move consumers of one cohort to a new one: they go on at their cursors."""
        old = self.cohorts[consumers[0].cohort]
        cohort = self.new_cohort(min(consumer.cursor for consumer in consumers))
        # What their old cohort keeps staged may still serve them, so nothing of that is dropped on their account.
        cohort.keep_from = min([old.keep_from, *[consumer.released for consumer in consumers]])
        cohort.join_start, old.uneven = old.join_start, None
        for consumer in consumers:
            old.remove(consumer)
            cohort.add(consumer)
            consumer.apart = why
            consumer.story.tell("in cohort {} now, apart from cohort {}: {}", cohort.number, old.number, why)
        return cohort

    def advance(self) -> None:
        """Bring all cohorts up to date after their members moved."""
        for cohort in self.cohorts.values():
            cohort.advance()

    def useful(self) -> list[range]:
        """Return the ranges of blocks that stay as long as nobody needs their room; see `Cohort.useful`."""
        return [cohort.useful for cohort in self.cohorts.values()]

    def needs_anew(self, place: int, given_as: int) -> bool:
        """Return whether a kept block that lacks samples is to be made anew, because they may be there by now.

        That is so when a consumer comes near it in a later epoch, or waits for blocks up to it, and no trial is in the
        middle of it: it is given as one thing or the other to all ranks of a trial, and to a consumer that reads it a
        second time.

        Args:
            place: the block's place in an epoch.
            given_as: the number under which it was handed out first.
        """
        length, is_near = self.blocks_per_epoch, False
        due: dict[str, int] = {}
        for consumer in self.by_name.values():
            if consumer.state is ConsumerState.RESERVED:
                continue
            first = consumer.released + (place - consumer.released) % length
            if any(consumer.holds(number) for number in range(first, max(consumer.cursor, consumer.given), length)):
                return False
            needed = consumer.cursor + (place - consumer.cursor) % length
            if due.setdefault(consumer.trial, needed) != needed:
                return False  # one of its ranks has had the block, another has not
            is_later = needed // length > given_as // length
            horizon = self.cohorts[consumer.cohort].horizon
            if consumer.waiting:
                horizon = max(horizon, consumer.cursor + consumer.want)
            is_near = is_near or (consumer.asked and is_later and needed < horizon)
        return is_near

    def wanted(self) -> list[range]:
        """Return the ranges of blocks that cohorts want, or of all that are kept for everybody."""
        if self.keeps_all:
            return [range(self.blocks_per_epoch)]
        return [blocks for cohort in self.cohorts.values() for blocks in cohort.wanted]

    def validate(self) -> None:
        """Check that everybody is in one cohort, and that no cohort gives up what a member holds."""
        listed = [m.name for c in self.cohorts.values() for m in c.members]
        if sorted(listed) != sorted(self.by_name):
            stories = [consumer.story for consumer in self.by_name.values()]
            raise InvariantError(f"members of cohorts are {listed}, consumers {[*self.by_name]}", *stories)
        for number, cohort in self.cohorts.items():
            stories = [member.story for member in cohort.members]
            if not cohort.members or any(member.cohort != number for member in cohort.members):
                raise InvariantError(f"cohort {number} is empty, or a member counts itself to another", *stories)
            active = [m.name for m in cohort.members if not m.rests]
            if sorted(m.name for m in cohort.active) != sorted(active):
                raise InvariantError(f"of cohort {number}, {active} do not rest: it has {cohort.active}", *stories)
            if cohort.keep_from > cohort.lowest_held:
                raise InvariantError(
                    f"cohort {number} keeps blocks from {cohort.keep_from} on, a member holds {cohort.lowest_held}",
                    *stories,
                )
        for consumer in self.by_name.values():
            if max(consumer.released, consumer.done) > consumer.cursor:
                raise InvariantError(
                    f"{consumer.name} let go of blocks that it was not given: {consumer}", consumer.story
                )
            if consumer.state is ConsumerState.GONE:
                raise InvariantError(f"{consumer.name} is GONE and still counted", consumer.story)
