"""Consumers of a feed, the reservations held for trials, and the cohorts that they form.

A cohort is a set of consumers that read the stream together: its blocks are prepared once, and fast members wait for
slow ones within the window. Normally there is one cohort. A consumer that lags too long, or is restored far from the
others, has a separate cohort until it reaches another cohort's window. Trials of different paces are in different
cohorts if that increases the total throughput (`mbaas.core.staging.pace`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.pace import Group
from mbaas.core.staging.streams import Stream, shown_block
from mbaas.core.staging.transitions import CONSUMER_CHANGES, ConsumerState
from mbaas.core.story import InvariantError, Stories, Story
from mbaas.samples.order import OwnEpoch


@dataclass(eq=False)
class Consumer:
    """One consumer, or a reservation held for one.

    Attributes:
        name: name of the consumer, or of the trial that the reservation is for; "reservation N" if unassigned.
        session: calls of other sessions are refused; 0 for a reservation.
        cursor: next block to deliver; all blocks below were delivered or skipped.
        released: the memory of blocks below is released; at most ``cursor``.
        done: blocks below are finished; at most ``cursor``.
        deadline: end of the lease; while RESERVED, end of the reservation time.
        own_epoch: the consumer's current epoch, or the one that it just finished.
        is_unassigned: whether this is an unassigned reservation, which any newcomer may take.
        expects_cohort_mate: whether an unassigned reservation is for a trial that starts together with another one, and
            not for the successor of a finished trial.
        is_announced: whether its trial was announced, before or after it joined.
        is_passive: whether this is a reservation for a trial that starts immediately, so that others do not wait.
        want: while WAITING, largest number of blocks that the call accepts.
        since: WAITING: start of the wait. BUSY: time of the join or last delivery. RESERVED: start of the reservation.
        longest_s: longest time between a delivery and the next request within the current epoch, in seconds.
        asked: whether this session has requested a block; a cohort without such a member causes no work.
        exact: block at which it must continue, so it may not be moved; None if any epoch will do.
        skipped: ascending, disjoint ranges below ``cursor`` that it does not hold: skipped, given up, or reported as
            read.
        heard: number of this session's newest call about its cursor.
        given: end of the blocks delivered since that call; above ``cursor`` only after a repeated call moved it back.
        trial: trial of this rank; for other consumers their name.
        world_size: number of ranks of the trial; 1 for a single consumer.
        node: id of its node; "" if unknown, as for reservations.
        born: creation time of its loader, Unix time in nanoseconds.
        blocks_per_s: last measured pace of its trial with data always ready; 0 if unknown.
        apart: reason why it was split from its cohort; "" once it shares a cohort again.
        is_visitor: whether it is expected to leave at the end of its first epoch.
        has_gone_on: whether it has requested a block of its second epoch.
        peer_idle_mark: (cohort, its ``peer_idle_s``) at the last delivery; cohort -1 before its first request.
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
    is_unassigned: bool = False
    expects_cohort_mate: bool = False
    is_announced: bool = False
    is_passive: bool = False
    want: int = 1
    since: float = 0.0
    longest_s: float = 0.0
    asked: bool = False
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
        """True if it may start an epoch elsewhere than its last one ended. Ranks may not: they would diverge."""
        return self.trial == self.name

    @property
    def rests(self) -> bool:
        """True if it does not block others: it pauses between epochs, or is a reservation with ``is_passive``."""
        return self.state is ConsumerState.RESTING or self.is_passive

    @property
    def waiting(self) -> bool:
        """True if one of its calls waits for a block."""
        return self.state is ConsumerState.WAITING

    def transition(self, to: ConsumerState, *why: object) -> None:
        """Change the state; raise InvariantError if the transition is not in `CONSUMER_CHANGES`."""
        self.story.change("", self.state, to, CONSUMER_CHANGES, *why)
        self.state = to

    def was_overtaken(self, number: int) -> bool:
        """Record the number of a call about the cursor; return whether a later call arrived before it."""
        # If an old call moved the cursor, blocks delivered since would count as skipped. They would be dropped while
        # the trial still reads them.
        if 0 < number < self.heard:
            return True
        self.heard = max(self.heard, number)
        return False

    @property
    def group(self) -> Group | None:
        """Its trial and pace; None if the pace is unknown."""
        return Group(1, self.blocks_per_s) if self.blocks_per_s else None

    @property
    def is_between_epochs(self) -> bool:
        """True if it has received all blocks of its epoch, or none yet."""
        return self.cursor in (self.own_epoch.first, self.own_epoch.end)

    def held(self) -> list[range]:
        """Return the ranges that were delivered and not released, lowest first; the last one ends at the cursor."""
        ends = [(gap.start, gap.stop) for gap in self.skipped]
        starts = [self.released, *[stop for _, stop in ends]]
        return list(map(range, starts, [*[start for start, _ in ends], max(self.cursor, self.given)]))

    def holds(self, block: int) -> bool:
        """Return whether the block was delivered and not released."""
        return self.released <= block < max(self.cursor, self.given) and not any(block in gap for gap in self.skipped)

    def go_to(self, cursor: int, *, again: bool = False) -> None:
        """Move the cursor to the block that the consumer requests, usually the current one.

        ``again`` marks a repeated call. Its first answer may have arrived, so the blocks delivered then may be held
        although they are delivered a second time.
        """
        # A loop that is left early continues with the next epoch. The skipped blocks are between ``released`` and
        # ``cursor``; counted as held, they would keep bytes from blocks that are needed.
        end = max(self.cursor, self.given)
        if cursor > end:
            self.skipped = (*self.skipped, range(end, cursor))
        else:
            self.skipped = tuple(range(gap.start, min(gap.stop, cursor)) for gap in self.skipped if gap.start < cursor)
        self.cursor = cursor
        if not again:
            self.given = cursor

    def let_go_between(self, first: int, end: int) -> None:
        """Record that it holds none of the blocks from ``first`` to ``end``, which are between blocks that it holds."""
        end = min(end, self.cursor)
        before = [range(gap.start, min(gap.stop, first)) for gap in self.skipped if gap.start < first]
        behind = [range(max(gap.start, end), gap.stop) for gap in self.skipped if gap.stop > end]
        self.skipped = (*before, range(first, end), *behind) if first < end else self.skipped

    def let_go(self, released: int, done: int) -> bool:
        """Record released and finished blocks, which never decrease; return whether more memory is released than
        before.
        """
        before = self.released
        self.released = max(before, min(released, self.cursor))
        self.done = max(self.done, min(done, self.cursor))
        if self.skipped:
            self.skipped = tuple(gap for gap in self.skipped if gap.stop > self.released)
        return self.released > before


@dataclass(eq=False)
class Cohort:
    """Consumers that read the stream of blocks together.

    Resting members limit neither the other members nor the blocks kept for the cohort. If all rest, the cohort is at
    the cursor of the furthest.

    Attributes:
        stream: the blocks that it reads.
        ahead_blocks: largest lead of prepared blocks over the furthest member. If 0, a block is prepared only while a
            member waits for it.
        slack_blocks: blocks by which that lead may be larger over the slowest member.
        room_blocks: blocks that fit its part of the staging budget; only set if consumers use several streams.
        members: never empty after an event.
        active: members that do not rest.
        held_up: (slowest cursor, since) while others wait for the slowest member; otherwise None.
        uneven: (trials, since): trials that should be split off because of their pace; None if all should stay.
        peer_idle_s: seconds during which a worker was idle because members wait for each other, or other cohorts use
            the room. Excludes the current idle period.
        peer_idle_since: start of the current idle period; None outside one.
    """

    number: int
    stream: Stream
    ahead_blocks: int
    slack_blocks: int = 0
    room_blocks: int = 0
    members: list[Consumer] = field(default_factory=list)
    active: list[Consumer] = field(default_factory=list)
    held_up: tuple[int, float] | None = None
    uneven: tuple[frozenset[str], float] | None = None
    peer_idle_s: float = 0.0
    peer_idle_since: float | None = None

    def add(self, consumer: Consumer) -> None:
        """Add a member that does not rest."""
        consumer.cohort = self.number
        self.members.append(consumer)
        self.active.append(consumer)

    def remove(self, consumer: Consumer) -> None:
        """Remove a member. The caller must end an empty cohort."""
        self.members.remove(consumer)
        if consumer in self.active:
            self.active.remove(consumer)

    @property
    def slowest(self) -> int:
        """Cursor of the slowest active member."""
        if not self.active:
            return max([m.cursor for m in self.members])
        return min([m.cursor for m in self.active])  # a list is faster than a generator

    def _furthest(self, slowest: int) -> int:
        # The cursor of the furthest member that has requested a block, or `slowest`, which is passed because every
        # event reads positions of each cohort several times.
        return max([slowest, *[m.cursor for m in self.active if m.asked]])

    @property
    def is_held_back(self) -> bool:
        """True if the slowest member limits how far blocks are prepared ahead of the furthest."""
        slowest = self.slowest
        return self._furthest(slowest) > slowest + self.slack_blocks

    @property
    def front(self) -> int:
        """Cursor of the furthest active member; 0 if all rest."""
        return max([m.cursor for m in self.active], default=0)

    @property
    def lowest_held(self) -> int:
        """Lowest block below the members' cursors that is still held, without the ranges in `held_apart`."""
        bounding = self.active or [max(self.members, key=lambda member: member.cursor)]
        return min([m.skipped[-1].stop if m.skipped else m.released for m in bounding])

    def held_apart(self) -> list[range]:
        """Return the blocks that only single members hold: from before a rest, or from before a skipped range."""
        if len(self.active) == len(self.members) and not any(m.skipped for m in self.members):
            return []
        return [blocks for m in self.members for blocks in (m.held() if m.rests else m.held()[:-1]) if blocks]

    @property
    def horizon(self) -> int:
        """End of the blocks that may be prepared now; at most the next epoch of the furthest member that reads."""
        slowest = self.slowest
        furthest = self._furthest(slowest)
        if not self.ahead_blocks:
            return slowest + any(m.waiting and m.cursor == slowest for m in self.active)
        if self.active and all(m.is_visitor for m in self.active):
            end = max([m.own_epoch.end for m in self.active])
        else:
            # The whole next epoch may be prepared during the last block of this one, so an epoch's end causes no wait.
            # With one block per epoch, allow two. Without a limit, a small dataset would be prepared for epochs that no
            # trial may ever start.
            end = max(self.next_boundary(furthest) + self.stream.blocks_per_epoch, furthest + 2)
        return min(min(slowest + self.slack_blocks, furthest) + self.ahead_blocks, end)

    def next_boundary(self, block: int) -> int:
        """Return the first block of the epoch that starts at ``block`` or next after it."""
        return block + -self.stream.local(block) % self.stream.blocks_per_epoch

    @property
    def ahead_end(self) -> int:
        """End of the blocks that are kept for members once they are prepared."""
        # The horizon falls when a slower consumer joins. Blocks that were started before that stay.
        return max(self.horizon, self.front + self.ahead_blocks)

    @property
    def useful(self) -> range:
        """Blocks that members reach in their epochs or the next ones; kept while there is room."""
        slowest, lead = self.slowest, self.slack_blocks + self.ahead_blocks
        epoch = self.stream.blocks_per_epoch
        return range(slowest, max([slowest + lead, *[m.own_epoch.end + epoch for m in self.members]]))

    def paces(self) -> dict[str, float]:
        """Return the known paces, fastest first: trial -> blocks/s."""
        found = {m.trial: m.blocks_per_s for m in self.active if m.blocks_per_s}
        return dict(sorted(found.items(), key=lambda pace: (-pace[1], pace[0])))

    @property
    def group(self) -> Group | None:
        """Its trials and the slowest pace; None if no pace is known."""
        paces = [*self.paces().values()]
        return Group(len(paces), paces[-1]) if paces else None

    def __str__(self) -> str:
        return ", ".join(m.name for m in self.members) or "nobody"


class ConsumerTable:
    """Consumers and cohorts of one feed.

    Args:
        epochs: shuffles of the epochs.
        ahead_blocks, slack_blocks: see `Cohort`.
        stories: where the consumers' stories are stored.

    Attributes:
        by_name: all consumers and reservations, none GONE; each is a member of exactly one cohort.
        cohorts: by number; none is empty between two events.
        prep_per_s: last measured maximum speed of prep in blocks/s; 0 if unknown.
        expects_visitors: whether newcomers are expected to leave after one epoch, as loaders opened for each evaluation
            do. Set when a consumer leaves after its first epoch, cleared when one continues.
    """

    def __init__(
        self,
        epochs: EpochTable,
        ahead_blocks: int,
        stories: Stories,
        *,
        slack_blocks: int = 0,
    ) -> None:
        self.epochs, self.streams = epochs, epochs.streams
        self.ahead_blocks, self.slack_blocks = ahead_blocks, slack_blocks
        self.by_name: dict[str, Consumer] = {}
        self.cohorts: dict[int, Cohort] = {}
        self.prep_per_s = 0.0
        self.expects_visitors = False
        self._stories = stories
        self._next_cohort = 0

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
        """Add a consumer or a reservation to a cohort; blocks below ``cursor`` count as finished.

        ``own_epoch`` defaults to the stream's epoch around ``cursor``, and ``trial`` to ``name``.
        """
        own = self.epochs.around(cursor) if own_epoch is None else own_epoch
        story = self._stories.begin("consumer", name)
        begin = shown_block(cursor)
        story.tell("{}: session {}, from block {} on, in cohort {}", state.name, session, begin, cohort.number)
        consumer = Consumer(name, session, cursor, cursor, cursor, deadline, cohort.number, own, story, state)
        consumer.trial = name if trial is None else trial
        consumer.is_visitor = self.expects_visitors
        self.by_name[name] = consumer
        cohort.add(consumer)
        return consumer

    def exit(self, consumer: Consumer, why: str) -> None:
        """Remove a consumer; a cohort ends with its last member."""
        del self.by_name[consumer.name]
        cohort = self.cohorts[consumer.cohort]
        cohort.remove(consumer)
        if not cohort.members:  # the next follow-up drops the blocks staged for it
            del self.cohorts[cohort.number]
        consumer.transition(ConsumerState.GONE, "{}", why)
        self._stories.end(consumer.story)

    def note_leaving(self, consumer: Consumer) -> None:
        """Record that a consumer leaves voluntarily. After a visitor left, newcomers are expected to be visitors."""
        if not consumer.has_gone_on and consumer.cursor >= consumer.own_epoch.end:
            self.expects_visitors = True

    def session(self, name: str, session: int) -> Consumer | None:
        """Return the consumer if this is its current session, else None."""
        consumer = self.by_name.get(name)
        # A reservation has session 0: no call can match it.
        return consumer if consumer is not None and session > 0 and consumer.session == session else None

    def why_unknown(self, name: str, session: int) -> str:
        """Return one clause on why `session` found no consumer."""
        consumer = self.by_name.get(name)
        if consumer is None or consumer.session == 0:
            return f"the service has no session {session} of consumer {name!r}: it left or was removed"
        return f"consumer {name!r} is now in session {consumer.session}, this call is from session {session}"

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes where consumers run."""
        return frozenset(consumer.node for consumer in self.by_name.values() if consumer.node)

    def on_node(self, node: str) -> int:
        """Return the number of consumers on a node."""
        return sum(consumer.node == node for consumer in self.by_name.values())

    def of_trial(self, trial: str) -> list[Consumer]:
        """Return a trial's consumers: the trial itself, its ranks, or the reservation held for it."""
        return [consumer for consumer in self.by_name.values() if consumer.trial == trial]

    def trials_in(self, stream: int) -> int:
        """Return the number of trials that read a stream, at least 1."""
        cohorts = [cohort for cohort in self.cohorts.values() if cohort.stream.number == stream]
        return max(1, len({member.trial for cohort in cohorts for member in cohort.active}))

    def own_epochs(self) -> list[OwnEpoch]:
        """Return the current epochs of all consumers."""
        return [consumer.own_epoch for consumer in self.by_name.values()]

    # ---- cohorts ----

    def new_cohort(self, block: int) -> Cohort:
        """Return a new cohort without members in the stream of ``block``."""
        cohort = Cohort(self._next_cohort, self.streams.of(block), self.ahead_blocks, self.slack_blocks)
        self._next_cohort += 1
        self.cohorts[cohort.number] = cohort
        return cohort

    def cohorts_of(self, stream: int) -> list[Cohort]:
        """Return the cohorts of a stream where consumers may meet: none if it keeps all blocks of an epoch.

        Every consumer then has a separate cohort, because blocks are prepared only once anyway.
        """
        if self.streams[stream].keeps_all:
            return []
        return [cohort for cohort in self.cohorts.values() if cohort.stream.number == stream]

    def begin_at(self, consumer: Consumer, block: int) -> None:
        """Start a consumer's epoch at a block."""
        consumer.go_to(block)
        consumer.own_epoch = self.epochs.own_epoch(block)

    def update_own_epoch(self, consumer: Consumer, began: int | None) -> bool:
        """Update the consumer's epoch to its cursor; return whether it will get each of the epoch's samples exactly
        once.

        After the end of an epoch, the next starts at the cursor. It would lack samples there if the stream's next epoch
        has already started without the needed segments; it then starts with that next epoch instead. ``began`` is the
        epoch's first block according to the consumer, which may have missed the last answer; None if it does not track
        epochs.
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
        """Exclude a consumer between two epochs from its cohort's limits until its next request."""
        consumer.transition(ConsumerState.RESTING, "it has not asked for its next epoch")
        self.cohorts[consumer.cohort].active.remove(consumer)

    def detach(self, consumers: Sequence[Consumer], why: str) -> Cohort:
        """Move consumers of one cohort to a new one, with unchanged cursors."""
        old = self.cohorts[consumers[0].cohort]
        cohort = self.new_cohort(consumers[0].cursor)
        old.uneven = None
        for consumer in consumers:
            old.remove(consumer)
            cohort.add(consumer)
            consumer.apart = why
            consumer.story.tell("moved to cohort {}, split from cohort {}: {}", cohort.number, old.number, why)
        return cohort

    def needs_anew(self, place: int, given_as: int) -> bool:
        """Return whether a kept block that lacks samples should be prepared again: they may be available by now.

        ``place`` is the block in the stream's first epoch, ``given_as`` the number under which it was first delivered.
        It is due when a consumer comes near it in a later epoch, or waits for blocks up to it. It stays while a trial
        is halfway through it: all ranks, and a consumer that re-reads the block, must get the same version.
        """
        stream, is_near = self.streams.of(place), False
        length = stream.blocks_per_epoch
        due: dict[str, int] = {}
        for consumer in self.by_name.values():
            cohort = self.cohorts[consumer.cohort]
            if consumer.state is ConsumerState.RESERVED or cohort.stream.number != stream.number:
                continue
            first = consumer.released + (place - consumer.released) % length
            if any(consumer.holds(number) for number in range(first, max(consumer.cursor, consumer.given), length)):
                return False
            needed = consumer.cursor + (place - consumer.cursor) % length
            if due.setdefault(consumer.trial, needed) != needed:
                return False  # one rank has received the block, another has not
            is_later = stream.epoch_of(needed) > stream.epoch_of(given_as)
            horizon = cohort.horizon
            if consumer.waiting:
                horizon = max(horizon, consumer.cursor + consumer.want)
            is_near = is_near or (consumer.asked and is_later and needed < horizon)
        return is_near

    def validate(self) -> None:
        """Check that each consumer is in one cohort, and releases no more blocks than it received."""
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
        for consumer in self.by_name.values():
            if max(consumer.released, consumer.done) > consumer.cursor:
                raise InvariantError(
                    f"{consumer.name} let go of blocks that it was not given: {consumer}", consumer.story
                )
            if self.streams.of(consumer.cursor) is not self.cohorts[consumer.cohort].stream:
                raise InvariantError(f"{consumer.name} is in a cohort of another pipeline", consumer.story)
            if consumer.state is ConsumerState.GONE:
                raise InvariantError(f"{consumer.name} is GONE and still counted", consumer.story)
