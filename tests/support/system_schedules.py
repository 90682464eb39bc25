"""Random schedules of a whole feed: supervisor, staging cores, placements and consumers, on virtual time.

`System` joins what decides, as it is, and plays all the rest: Ray, machines, actors (`support.cluster_schedules`), the
coordinators' shells, trials, and a network between trials and coordinators that delays, reorders, doubles and loses
calls. Trials follow `mbaas.client.lane_position`. Everybody may die, hang or be away at any time, alone and together,
the coordinator included; then all faults end. Always:

- a trial takes each block of its epochs exactly once, in order, with exactly the samples that it has;
- what a trial holds is counted in the staging budget, which is never exceeded;
- nobody counts on a worker, or a machine, that is gone, and none is given up that did not hang;
- the feed ends for no reason, and an error that a trial meets has one.

And when the faults have ended, everybody who lives goes on within `PEACE_S`.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import TypeAlias

from mbaas.client.lane_position import LanePosition
from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.layout import StagingLimits
from mbaas.core.state import WORKER_FAILURES, StagingState
from mbaas.core.transitions import ConsumerState
from mbaas.messages import Lane, Resumption, Start
from mbaas.order import ASIDE, Ids, OwnEpoch, Shuffle
from mbaas.placement import PartRequest
from mbaas.settings import Timeouts
from support import cluster_schedules
from support.cluster_schedules import BLOCK_SAMPLES, Cluster, Order
from support.garbage import kept_garbage

PEACE_S = 600.0
"""After the last fault, trials must go on, and all workers be there, within so many virtual seconds."""

TIMEOUTS = Timeouts(lease_s=18.0, reservation_s=10.0, patience_s=8.0, prep_s=40.0)
POLL_S = 20.0
BEAT_S = 8.0
CALL_S = 30.0
"""A call of which nothing is heard ends in an error."""

LOOK_S = 2.0
"""A trial that cannot read a block asks whether it is still there, and again after as long."""

READ_S = 30.0
"""A block that cannot be read for so long counts as unreadable."""

BAD = "a sample is bad"

KEEPING = 0.1
"""Share of schedules of a feed all of whose epochs are the same and kept."""

VALIDATE_EVERY = 20
"""Every so many events all invariants of a staging core are checked; illegal changes of state raise at once."""


# ---- what trials and coordinators say to each other ----


@dataclass(frozen=True)
class Part:
    """A part of a block in the object store.

    Attributes:
        node: where it lies.
        life: of the coordinator that owns it; with it the part is gone.
        ids: the samples that it has.
    """

    number: int
    task: int
    node: str
    life: int
    ids: Ids


@dataclass(frozen=True)
class Delivered:
    """A block as a trial gets it: its parts, or why it has none."""

    number: int
    shuffle: Shuffle
    parts: tuple[Part, ...]
    error: str | None = None
    as_copy: bool = False


@dataclass(frozen=True)
class Answer:
    """What comes of a call; one that brings nothing says that a poll is over.

    Attributes:
        restarting: the coordinator is gone, or was when the call came.
        lost: nothing was heard for `CALL_S`.
        expelled: the session is not open any more.
        admitted: (session, first block, where the trial's own epoch lies).
    """

    blocks: tuple[Delivered, ...] = ()
    restarting: bool = False
    lost: bool = False
    expelled: bool = False
    admitted: tuple[int, int, OwnEpoch] | None = None


Reply: TypeAlias = Callable[[Answer], None]


class Service:
    """One lane in one life of its coordinator: what `mbaas.coordinator.service` does around a staging core.

    Attributes:
        life: tells it from others; each life of a coordinator, and of a lane, has its own number.
    """

    def __init__(self, system: System, number: int) -> None:
        self._system, self._number, self.life = system, number, next(system.lives)
        self.lane = Lane(system.order.blocks_per_epoch, number, system.lane_count)
        self.core = StagingState(
            system.limits,
            self.lane.blocks_per_epoch,
            lambda own: system.block_bytes(self.lane.feed_block(own)),
            lambda own: system.placements.parts(self.lane.feed_block(own), self.core.epochs.shuffle_of(own)),
            number,
            keeps_all=system.keeps_all,
            block_samples=BLOCK_SAMPLES,
            is_shuffled=system.order.shuffled,
            lanes=system.lane_count,
        )
        self.core.next_epoch = system.epochs_begun if number == 0 else 0
        self._staged: dict[int, dict[int, Part]] = {}
        self._calls: dict[str, tuple[int, Reply]] = {}
        self._reservations_version = -1
        self._events = 0

    @property
    def workers(self) -> dict[str, str]:
        """See `cluster_schedules.Lane`."""
        return {worker.name: worker.node for worker in self.core.tasks.workers.values()}

    def tick(self) -> None:
        """See `cluster_schedules.Lane`."""
        self.tell(ev.Tick())
        if self._number == 0 and (paces := self._system.paces()) is not None:
            self.tell(paces)

    def tell(self, event: ev.Event) -> list[ev.Instruction]:
        """Give an event to the core, and do what it says."""
        self._system.story.append((self._system.now, self._number, event))
        done = self.core.handle(event, self._system.now)
        self._events += 1
        if self._events % VALIDATE_EVERY == 0:
            self.core.validate()
        for instruction in done:
            self._system.story.append((self._number, instruction))
            self._carry_out(instruction)
        if self._number == 0:
            self._system.first_lane_changed(self.core)
        return done

    def hold_reservations(self, reservations: frozenset[tuple[str, int]], version: int) -> None:
        """Hear of (consumer, epoch) what the first lane has; like a lane of a feed, it leaves out what is older."""
        if version > self._reservations_version:
            self._reservations_version = version
            blocks = self.lane.blocks_per_epoch
            self.tell(ev.HoldReservations(frozenset((name, epoch * blocks) for name, epoch in reservations)))

    # ---- what trials call ----

    def join(self, name: str, start: Start, reply: Reply) -> None:
        session = next(self._system.sessions)
        self._answer(name, Answer(expelled=True))  # as if it had joined elsewhere: its old call is over
        for instruction in self.tell(ev.Join(name, session, start.block, start.flexible, start.now, start.resumed)):
            if isinstance(instruction, ev.Admitted):
                reply(Answer(admitted=(session, instruction.cursor, instruction.own_epoch)))

    def ask(self, event: ev.Ask, unreadable: Iterable[ev.UnreadablePart], reply: Reply) -> None:
        for part in unreadable:
            self.tell(part)
        self._answer(event.consumer, Answer())
        call = self._calls[event.consumer] = event.session, reply
        self.tell(event)

        def poll_is_over() -> None:
            if self._system.is_alive(self.life) and self._calls.get(event.consumer) is call:
                self._answer(event.consumer, Answer())

        if self._calls.get(event.consumer) is call:
            self._system.later(poll_is_over, POLL_S, POLL_S)

    def heartbeat(self, event: ev.Heartbeat, reply: Reply) -> None:
        refused = any(isinstance(i, ev.Refuse) and i.consumer == event.consumer for i in self.tell(event))
        reply(Answer(expelled=refused))

    def is_given_up(self, block: Delivered, reply: Reply) -> None:
        """Answer with ``expelled`` if a part is not what the block is made of any more."""
        window = self.core.window
        reply(Answer(expelled=not all(window.has(block.number, part.number, part.task) for part in block.parts)))

    def _answer(self, name: str, answer: Answer) -> None:
        call = self._calls.pop(name, None)
        if call is not None:
            call[1](answer)

    # ---- instructions ----

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Prepare():
                self._make(instruction)
            case ev.Deliver():
                blocks = (replace(self._delivered(n), as_copy=instruction.as_copy) for n in instruction.blocks)
                self._answer(instruction.consumer, Answer(tuple(blocks)))
            case ev.DropBlock():
                self._system.check_dropped(self.core, self._number, instruction.block)
                self._staged.pop(instruction.block, None)
            case ev.ReplaceWorker():
                self._system.replace(instruction)
            case ev.ReleaseWorker():
                self._system.left(self._number, instruction.worker)
            case ev.Detached():
                self._system.detached(self._number, instruction.consumer)
            case ev.RemoveConsumer() | ev.Refuse():
                call = self._calls.get(instruction.consumer)
                if call is not None and call[0] == instruction.session:
                    self._answer(instruction.consumer, Answer(expelled=True))

    def _delivered(self, number: int) -> Delivered:
        staged_as = self.core.window.staged_as(number)
        block, parts = self.core.window.blocks[staged_as], self._staged.get(staged_as, {})
        shuffle = self.core.epochs.shuffle_of(number)
        if block.error is not None:
            return Delivered(number, shuffle, (), block.error)
        return Delivered(number, shuffle, tuple(part for _, part in sorted(parts.items())))

    def _make(self, order: ev.Prepare) -> None:
        block = self.lane.feed_block(order.block)

        def finish(node: str, ids: Ids) -> None:
            if not self._system.is_alive(self.life) or not self.core.tasks.has(order.task):
                return  # it died, or the worker was given up meanwhile
            if self._system.is_lane_silent(self._number):
                self._system.later(lambda: finish(node, ids), 1.0, 2.0)
                return
            if self._system.storage_away_until > self._system.now:
                self.tell(ev.PutOff(order.task, "storage is away"))
            elif self._system.meets_bug():
                self.tell(ev.TaskFailed(order.task, "a bug"))
            elif block % self.lane.feed_blocks in self._system.bad_blocks:
                self.tell(ev.TaskEnded(order.task, BAD))
            else:
                node = self.core.tasks.workers[order.worker].node
                part = Part(order.part, order.task, node, self.life, ids)
                self._staged.setdefault(order.block, {})[order.part] = part
                self.tell(ev.TaskEnded(order.task))

        self._system.prepare(order.worker, PartRequest(block, order.block_part, order.shuffle), finish)


# ---- trials ----


@dataclass(eq=False)
class Call:
    """A call for blocks, and what came of it."""

    answer: Answer | None = None


class End(LanePosition[Delivered]):
    """A trial's end of a lane.

    Attributes:
        session: number of the session.
        call: the one that is in flight, or whose answer nobody looked at yet.
        expelled: whether a heartbeat heard that the session has ended.
        are_remote: whether the blocks that came last lie on other nodes.
        holds: what was read in this session and is still looked at.
    """

    def __init__(self, lane: Lane, most: int) -> None:
        super().__init__(most)
        self.lane = lane
        self.session = 0
        self.call: Call | None = None
        self.expelled = self.are_remote = False
        self.holds: set[int] = set()


@dataclass
class Checkpoint:
    """What a trial's saved state holds, and what tells its past: the epochs that it had begun.

    Attributes:
        taken: blocks of its epoch that it had taken.
        epoch_end: end of the last epoch that it had begun.
        samples: what it had of each of these blocks; None of one of which it had an error.
        resumed: where it goes on, in a feed of one lane.
    """

    taken: tuple[int, ...] = ()
    epoch_end: int = 0
    samples: tuple[tuple[int, ...] | None, ...] = ()
    resumed: Resumption | None = None


@dataclass(eq=False)
class Trial:
    """A trial with its loader.

    Attributes:
        process: number of its process; what one that died was to do is not done.
        is_up: whether it lives.
        joined: whether it has sessions, and uses them.
        cursor: the next block of the feed that it needs; None before the first session.
        taken: blocks of the current epoch, in order.
        samples: what it had of each of them; None of one of which it had an error.
        own: where its own epoch lies.
        epoch_end: end of the last epoch that it began; it never sees any of that again.
        steps: blocks that it took.
        errors: blocks of which it had an error instead.
        step_s: it works so long on a block.
        keeps: blocks behind the newest that it goes on looking at.
        tests_s: it does something else for so long between two epochs.
        busy: whether it works on a block, or reads one.
        due: it ends when it has taken so many blocks.
    """

    system: System
    name: str
    node: str
    step_s: float
    keeps: int
    tests_s: float = 0.0
    process: int = 0
    is_up: bool = True
    joined: bool = False
    paused_until: float = 0.0
    cursor: int | None = None
    taken: list[int] = field(default_factory=list)
    samples: list[tuple[int, ...] | None] = field(default_factory=list)
    own: OwnEpoch = field(default_factory=lambda: OwnEpoch(0, 0))
    epoch_end: int = 0
    steps: int = 0
    errors: int = 0
    busy: bool = False
    due: float = math.inf
    saved: Checkpoint = field(default_factory=Checkpoint)
    ends: list[End] = field(default_factory=list)
    pinned: list[Callable[[], None]] = field(default_factory=list)

    # ---- its process ----

    def later(self, action: Callable[[], None], least_s: float, most_s: float, process: int | None = None) -> None:
        """Do something in this process, or another one, if it lives by then and when it is not paused."""
        process = self.process if process is None else process

        def act() -> None:
            if self.process != process or not self.is_up:
                return
            if self.paused_until > self.system.now:
                self.system.later(act, self.paused_until - self.system.now, self.paused_until - self.system.now)
            else:
                action()

        self.system.later(act, least_s, most_s)

    def begin(self, start: Start) -> None:
        """A process begins: it joins all lanes, the first one first."""
        blocks = 1 if self.system.lane_count > 1 else 4
        self.ends = [
            End(Lane(self.system.order.blocks_per_epoch, n, self.system.lane_count), blocks)
            for n in range(self.system.lane_count)
        ]
        self.joined = self.busy = False
        self.pinned = []
        self.cursor = start.block
        first = self.ends[0]

        def joined_first() -> None:
            if not start.is_exact or len(self.ends) == 1:
                self.cursor = first.lane.feed_block(first.cursor)
            assert self.cursor is not None
            self._join_others(1, flexible=not start.is_exact)

        self._join(first, start.of_lane(first.lane), then=joined_first)
        self.later(self._beat_forever, 0.0, BEAT_S)

    def _join_others(self, number: int, *, flexible: bool) -> None:
        if number == len(self.ends):
            self.joined = True
            self.go_on()
            return
        assert self.cursor is not None
        end = self.ends[number]
        start = Start(end.lane.first_from(self.cursor), flexible)
        self._join(end, start, then=lambda: self._join_others(number + 1, flexible=flexible))

    def _join(self, end: End, start: Start, *, then: Callable[[], None]) -> None:
        """Open a session in a lane, as often as it takes."""

        def take(answer: Answer) -> None:
            if answer.admitted is None:
                self.later(lambda: self._join(end, start, then=then), 0.1, 1.0)
                return
            end.session, cursor, own_epoch = answer.admitted
            end.enter(cursor, own_epoch, end.lane, BLOCK_SAMPLES)
            if start.resumed is not None and start.resumed.taken:
                by = cursor - start.resumed.start
                assert own_epoch == start.resumed.own_epoch.moved(by)
                end.resume(start.resumed, by)
                self._renumber(by)
            else:
                is_other = start.is_exact and start.resumed is None and cursor != start.block
                assert not is_other, f"{self.name} is at block {cursor}, not {start.block}"
            end.expelled, end.call, end.holds = False, None, set()
            then()

        self.system.call(self, end.lane.number, lambda s, reply: s.join(self.name, start, reply), take)

    def _renumber(self, by: int) -> None:
        """What `RankSharding.renumber` does."""
        self.taken = [block + by for block in self.taken]
        self.own = self.own.moved(by)

    def _beat_forever(self) -> None:
        if self.joined:
            for end in self.ends:
                self.beat(end)
        self.later(self._beat_forever, BEAT_S, BEAT_S)

    def beat(self, end: End) -> None:
        event, session = ev.Heartbeat(self.name, end.session, end.released(), end.done), end.session

        def hear(answer: Answer) -> None:
            if answer.expelled and end.session == session:
                end.expelled = True

        self.system.call(self, end.lane.number, lambda s, reply: s.heartbeat(event, reply), hear)

    # ---- asking for blocks: `mbaas.client.session` and `lane_stream` ----

    def _ask(self, end: End, unreadable: tuple[ev.UnreadablePart, ...] = ()) -> None:
        released, number = end.released(), end.next_call()
        event = ev.Ask(
            self.name, end.session, end.following, released, end.done, end.want, number, end.began, end.unheld()
        )
        call = end.call = Call()

        def take(answer: Answer) -> None:
            call.answer = answer
            if end.call is call and self.joined and not self.busy:
                self.go_on()

        self.system.call(self, end.lane.number, lambda s, reply: s.ask(event, unreadable, reply), take)

    def _ask_ahead(self, end: End) -> None:
        if end.runs_short(are_remote=end.are_remote) and end.call is None and not end.expelled:
            self._ask(end)

    def go_on(self) -> None:
        """Take the block at the cursor, if it is here; else see to it that it comes."""
        assert self.cursor is not None
        for end in self.ends:
            self._ask_ahead(end)
        (end,) = [end for end in self.ends if end.lane.has(self.cursor)]
        while not end.received:
            if end.call is None:
                self._ask(end)
            assert end.call is not None
            answer = end.call.answer
            if answer is None:
                return
            end.call = None
            if answer.restarting or answer.expelled:
                self._rejoin(end)
                return
            if answer.blocks:
                self._take_in(end, answer)
            else:
                self._tell_what_is_given_up(end)
                self._hand_back(end)
        self.busy = True
        self._read(end, end.received[0], self.system.now)

    def _rejoin(self, end: End) -> None:
        self.busy = True

        def then() -> None:
            self.busy = False
            if len(self.ends) == 1:  # it may go on in an epoch aside, or begin an epoch of its own elsewhere
                self.cursor = end.cursor
            self.go_on()

        self._join(end, end.start_at(end.following), then=then)

    def _take_in(self, end: End, answer: Answer) -> None:
        end.take_in(answer.blocks)
        end.are_remote = any(part.node != self.node for block in answer.blocks for part in block.parts)

    def _take_in_early(self, end: End) -> None:
        if not end.received and end.call is not None and end.call.answer is not None:
            blocks = end.call.answer.blocks
            if blocks and blocks[0].number == end.following:
                self._take_in(end, end.call.answer)
                end.call = None
                self._ask_ahead(end)

    def _hand_back(self, waits_for: End) -> None:
        """It waits in one lane: what it received ahead in the others is given up."""
        for end in self.ends:
            may_be_moved = end is self.ends[0] and end.cursor % end.lane.blocks_per_epoch == 0
            if end is not waits_for and not may_be_moved and (end.received or end.call is not None):
                end.call = None
                end.give_up_received()
                self._tell_what_is_given_up(end)

    # ---- using blocks ----

    def _read(self, end: End, block: Delivered, began: float) -> None:
        system = self.system
        if not all(system.is_alive(part.life) for part in block.parts):
            self._ask_again(end, block)  # who owned it is dead
        elif all(part.node in system.nodes for part in block.parts):
            self._use(end, block)
        elif system.now - began > READ_S:
            self._ask_again(end, block)
        else:

            def hear(answer: Answer) -> None:
                if answer.expelled or answer.restarting:
                    self._ask_again(end, block)
                else:
                    self._read(end, block, began)

            def look() -> None:
                system.call(self, end.lane.number, lambda s, reply: s.is_given_up(block, reply), hear)

            self.later(look, LOOK_S, LOOK_S)

    def _ask_again(self, end: End, block: Delivered) -> None:
        system = self.system
        unreadable = tuple(
            ev.UnreadablePart(block.number, part.number, part.task)
            for part in block.parts
            if not system.is_alive(part.life) or part.node not in system.nodes
        )
        end.go_back(block.number)
        self.busy = False
        self._ask(end, unreadable)
        self.go_on()

    def _use(self, end: End, block: Delivered) -> None:
        number = end.lane.feed_block(block.number)
        end.move_on()
        if block.error is None:
            self.system.check_samples(self, number, block)
            if block.as_copy:
                self.pinned.append(lambda: None)  # it looks at the copy now, and not at what came before
            else:
                self._pin(end, block.number)
        self._ask_ahead(end)
        if number != self.cursor:
            for other in self.ends[1:]:
                self._leap(other, number)
        self._count(number, block)
        self._take_in_early(end)
        self.later(lambda: self._step_is_over(number), 0.5 * self.step_s, 1.5 * self.step_s)

    def _pin(self, end: End, own: int) -> None:
        alive = [True]
        end.hold(own, lambda: bool(alive))
        end.holds.add(own)
        session = end.session

        def let_go() -> None:
            alive.clear()
            if end.session == session:
                end.holds.discard(own)

        self.pinned.append(let_go)

    def _count(self, number: int, block: Delivered) -> None:
        blocks, order = self.system.order.blocks_per_epoch, self.system.order
        if self.taken:
            assert number == self.taken[-1] + 1, f"{self.name} took block {number} after {self.taken}"
        else:
            in_phase = number % blocks == 0
            assert in_phase or self.system.lane_count == 1, f"{self.name} begins an epoch at block {number}"
            assert number >= self.epoch_end, f"{self.name} was before block {self.epoch_end}, and gets {number} again"
            self.own = OwnEpoch.at(number, blocks, BLOCK_SAMPLES)
            self.epoch_end = self.own.end
        if block.error is not None:
            self.system.check_error(self, number, block.error)
            self.errors += 1
        ids = None if block.error is not None else tuple(i for part in block.parts for i in part.ids.tolist())
        self.taken.append(number)
        self.samples.append(ids)
        self.steps += 1
        self.cursor = number + 1
        if self.cursor == self.own.end:
            if None not in self.samples:
                had = sorted(i for ids in self.samples if ids is not None for i in ids)
                assert had == [*range(order.num_samples)], f"{self.name} had samples {had} in epoch {self.own}"
            self._forget_epoch()

    def _forget_epoch(self) -> None:
        self.taken, self.samples = [], []

    def _step_is_over(self, number: int) -> None:
        system = self.system
        while len(self.pinned) > self.keeps:
            self.pinned.pop(0)()
        self.busy = False
        assert self.cursor == number + 1
        if self.steps >= self.due:
            self._leave()
            return
        if not self.taken:
            for end in self.ends:
                end.done = end.lane.first_from(self.cursor)
                self.beat(end)
            if self.tests_s:
                self._test()
                return
        elif not system.is_peaceful and system.rng.random() < 0.03:
            self._skip_epoch()
        if system.rng.random() < 0.2:
            resumed = None
            if self.taken and len(self.ends) == 1:
                resumed = self.ends[0].start_at(self.cursor).resumed
                assert resumed is not None
                resumed = resumed.moved(resumed.shuffle.epoch - resumed.epoch, system.order.blocks_per_epoch)
            self.saved = Checkpoint(tuple(self.taken), self.epoch_end, tuple(self.samples), resumed)
        self.go_on()

    def _test(self) -> None:
        """Do something else between two epochs."""
        self.busy = True

        def go_on() -> None:
            self.busy = False
            self.go_on()

        self.later(go_on, 0.5 * self.tests_s, 1.5 * self.tests_s)

    def _skip_epoch(self) -> None:
        """A loop is left half-way and a new one begins."""
        assert self.cursor is not None
        self._forget_epoch()
        self.cursor = self.own.end
        for end in self.ends:
            self._leap(end, self.cursor)

    def _leap(self, end: End, block: int) -> None:
        if end.leap(end.lane.first_from(block)):
            end.call = None
            self._tell_what_is_given_up(end)

    def _tell_what_is_given_up(self, end: End) -> None:
        if end.given_up is None:
            return
        self._tell(end, ev.HandBack(self.name, end.session, end.given_up, end.released(), end.next_call()))

    def _tell(self, end: End, event: ev.Event) -> None:
        """Say something to which no answer is awaited."""
        self.system.call(self, end.lane.number, lambda service, _: service.tell(event), lambda _: None)

    # ---- its end ----

    def _leave(self) -> None:
        """It has what it wanted."""
        for end in reversed(self.ends):
            self._tell(end, ev.Leave(self.name, end.session))
        self.joined = False

    def die(self) -> None:
        self.is_up, self.joined = False, False
        self.process += 1
        self.ends, self.pinned = [], []

    def restore(self) -> None:
        """A new process goes on where the last checkpoint was taken."""
        self.is_up, self.paused_until = True, 0.0
        self.process += 1
        self.taken, self.samples, self.epoch_end = (
            list(self.saved.taken),
            list(self.saved.samples),
            self.saved.epoch_end,
        )
        system, resumed = self.system, self.saved.resumed
        now = system.joins_now and system.rng.random() < 0.8
        if resumed is not None:
            self.own, by = resumed.own_epoch, resumed.start - 1 - self.taken[-1]
            self.taken = [block + by for block in self.taken]
            self.begin(Start(resumed.start, resumed=resumed))
        elif self.taken:
            self.own = OwnEpoch(self.taken[0], self.epoch_end)
            self.begin(Start(self.taken[-1] + 1))
        elif self.epoch_end:  # a state between two epochs: it begins whatever epoch others begin, also an earlier one
            blocks = system.order.blocks_per_epoch
            start, self.epoch_end = -(-self.epoch_end // blocks) * blocks % (ASIDE * blocks), 0
            self.begin(Start(start, flexible=True, now=now))
        else:
            self.begin(Start(now=now))


# ---- everything together ----


class System(Cluster):
    """One random schedule of a whole feed; see the module's docstring.

    Args:
        seed: everything follows from it.
        faults: moments at which something happens, each of one to three things.

    Attributes:
        trials: by name, those that live, or will again.
        keeps_all: whether all epochs are the same, and the blocks of one are kept.
        epochs_begun: what outlives the coordinator: how many epochs were begun, and one to spare.
        bugs: errors that workers met and lived; while `buggy_until` some of what they make ends in one.
        bad_blocks: numbers within an epoch of blocks that have a bad sample now.
        ever_bad: those that ever had.
    """

    def __init__(self, seed: int, faults: int = 4) -> None:
        super().__init__(seed, faults)
        rng = self.rng
        # Drawn by a generator of its own, so that other seeds give the schedules that they gave before.
        self.keeps_all = random.Random(f"keeps all {seed}").random() < KEEPING
        self.joins_now = self.lane_count == 1 and random.Random(f"joins now {seed}").random() < 0.6
        if self.keeps_all:
            self.order = Order(self.order.num_samples, 0, BLOCK_SAMPLES, shuffled=False)
        ahead_blocks = rng.randint(2, 6)
        if self.joins_now and not self.keeps_all:
            # An epoch that is longer than what is made ahead: only in the middle of such does anybody begin.
            blocks = random.Random(f"blocks {seed}").choice([6, 9])
            self.order, ahead_blocks = Order(blocks * BLOCK_SAMPLES - 1, 0, BLOCK_SAMPLES), 2
        self.limits = StagingLimits(
            budget_bytes=max(rng.choice([30, 40, 60, 100]), 10 * self.order.blocks_per_epoch * self.keeps_all),
            ahead_blocks=ahead_blocks,
            timeouts=TIMEOUTS,
        )
        self.sessions = itertools.count(1)
        self.epochs_begun = 0
        self.trials: dict[str, Trial] = {}
        self.storage_away_until = self.buggy_until = 0.0
        self.bugs = 0
        self.bad_blocks: set[int] = set()
        self.ever_bad: set[int] = set()
        self._network_is_bad = rng.random() < 0.6
        self._open_calls: list[tuple[int, Reply]] = []
        self.lives = itertools.count()
        self._names = itertools.count()
        self._reservations: frozenset[tuple[str, int]] = frozenset()
        self._updates = itertools.count()
        self._tells_paces = random.Random(f"paces {seed}")
        self._tells_often = self._tells_paces.choice([0.0, 0.5])

    def paces(self) -> ev.PacesMeasured | None:
        """What a coordinator measures now and then, if its trials say how fast they are: it is never quite the same."""
        if self._tells_paces.random() >= self._tells_often:
            return None
        steps_s = {name: trial.step_s * self._tells_paces.uniform(0.95, 1.05) for name, trial in self.trials.items()}
        paces = tuple(ev.TrialPace((name,), 1 / step_s) for name, step_s in steps_s.items())
        return ev.PacesMeasured(paces, self._tells_paces.choice([0.4, 2.0, 20.0]))

    def block_bytes(self, block: int) -> int:
        """Ten bytes; the last block of an epoch may be smaller."""
        first, end = self.order.span(block)
        return 10 * (end - first) // BLOCK_SAMPLES

    # ---- the network ----

    def call(
        self, trial: Trial, lane: int, request: Callable[[Service, Reply], object], take: Callable[[Answer], None]
    ) -> None:
        """A trial calls a coordinator; exactly one answer comes back, if the trial lives."""
        answered, process = False, trial.process

        def answer(what: Answer, least_s: float = 0.0, most_s: float = 0.2) -> None:
            def arrive() -> None:
                nonlocal answered
                if not answered:
                    answered = True
                    take(what)

            trial.later(arrive, least_s, most_s, process)

        def reach() -> None:
            if self.is_down or lane in self._lanes_down:
                answer(Answer(restarting=True), 0.1, 2.0)
            elif self.is_lane_silent(lane):
                self.later(reach, 1.0, 2.0)  # it is read when the lane goes on, or its successor does
            else:
                self._open_calls.append((lane, lambda what: None if answered else answer(what)))
                request(self.lanes[lane], answer)  # type: ignore[arg-type]

        luck = self.rng.random() if self._network_is_bad and not self.is_peaceful else 1.0
        if luck > 0.03:
            self.later(reach, 0.0, 0.1)
        if luck < 0.06:  # it is lost, or comes late; twice, if it came before
            self.later(reach, 1.0, 20.0) if luck > 0.01 else None
            answer(Answer(lost=True), CALL_S, CALL_S)

    # ---- the coordinators ----

    def open_lane(self, number: int) -> Service:
        """See `Cluster.open_lane`."""
        service = Service(self, number)
        if number:
            service.hold_reservations(self._reservations, next(self._updates))
        return service

    def kill_coordinator(self) -> None:
        super().kill_coordinator()
        for number in range(self.lane_count):
            self.end_lane(number)
        self._reservations = frozenset()

    def end_lane(self, number: int) -> None:
        """See `Cluster.end_lane`; whoever called it hears so."""
        calls = [reply for lane, reply in self._open_calls if lane == number]
        self._open_calls = [(lane, reply) for lane, reply in self._open_calls if lane != number]
        for reply in calls:
            reply(Answer(restarting=True))

    def is_alive(self, life: int) -> bool:
        """Whether a lane, or main coordinator, of this life is there."""
        return any(
            lane.life == life
            for number, lane in enumerate(self.lanes)
            if isinstance(lane, Service) and number not in self._lanes_down
        )

    def first_lane_changed(self, core: StagingState) -> None:
        """What the main coordinator keeps of itself, and tells the other lanes."""
        if core.next_epoch >= self.epochs_begun and core.next_epoch:
            begun = core.next_epoch + 1
            self.later(lambda: setattr(self, "epochs_begun", max(self.epochs_begun, begun)), 0.0, 0.25)
        if self.lane_count == 1:
            return
        blocks = core.blocks_per_epoch
        reservations = frozenset(
            (member.name, member.cursor // blocks)
            for member in core.consumers.by_name.values()
            if (member.state is ConsumerState.RESERVED or not member.asked) and member.cursor % blocks == 0
        )
        if reservations != self._reservations:
            self._reservations = reservations
            version = next(self._updates)
            self._tell_lanes(lambda lane: lane.hold_reservations(reservations, version))

    def detached(self, number: int, name: str) -> None:
        """A lane moved a trial out of step: the others hear of it."""
        self._tell_lanes(lambda lane: lane.tell(ev.DetachedElsewhere(name)), but=number)

    def _tell_lanes(self, tell: Callable[[Service], object], but: int = 0) -> None:
        """Tell the lanes something; what is told soon after may come before."""
        life = self.life

        def arrive() -> None:
            if self.life == life:
                for number, lane in enumerate(self.lanes):
                    if number != but and number not in self._lanes_down:
                        assert isinstance(lane, Service)
                        tell(lane)

        self.later(arrive, 0.0, 0.3)

    # ---- promises ----

    def check_samples(self, trial: Trial, number: int, block: Delivered) -> None:
        """The parts together have each sample of the block once."""
        ids = sorted(i for part in block.parts for i in part.ids.tolist())
        due = sorted(self.order.sample_ids(number, block.shuffle).tolist())
        assert ids == due, f"{trial.name} read samples {ids} of block {number}, which has {due}"

    def check_dropped(self, core: StagingState, lane: int, block: int) -> None:
        """What somebody looks at in its session is not dropped: its bytes would be granted twice.

        Not so if the node where it lay died, and it failed when it was made again: its bytes went with the node.
        """
        for trial in self.trials.values():
            if trial.joined:
                end, member = trial.ends[lane], core.consumers.by_name.get(trial.name)
                if member is not None and member.session == end.session and block in end.holds:
                    story = "\n".join(core.story(f"block {block}"))
                    _, _, since = story.partition("it lay on a node that is gone")
                    assert "-> FAILED" in since, f"block {block} is dropped, and {trial.name} looks at it"

    def check_error(self, trial: Trial, number: int, error: str) -> None:
        """An error has its reason: a bad sample, workers that died, or errors that they met."""
        if error == BAD:
            assert number % self.order.blocks_per_epoch in self.ever_bad, f"block {number} has no bad sample"
        elif "a bug" in error:
            assert self.bugs >= self.limits.max_deaths, f"{trial.name} hears of block {number}: {error}"
        else:
            assert self.worker_deaths >= self.limits.max_deaths, f"{trial.name} hears of block {number}: {error}"

    # ---- faults ----

    def add_trial(self) -> None:
        if len(self.trials) >= 3 or not self.nodes:
            return
        rng = self.rng
        name = f"trial-{next(self._names)}"
        trial = Trial(
            self, name, rng.choice(sorted(self.nodes)), step_s=rng.choice([0.5, 2.0, 4.0]), keeps=rng.choice([0, 0, 1])
        )
        others = random.Random(f"{name} of {self.seed}")  # so that these choices change no other
        trial.tests_s = others.choice([0.0, 0.0, 5.0, 20.0])
        if others.random() < 0.2:
            trial.keeps = 6
        self.trials[name] = trial
        if rng.random() < 0.3 and not self.is_down:
            self.lanes[0].tell(ev.Announce(name))
        luck, far = rng.random(), rng.randint(0, 2 * self.order.blocks_per_epoch)
        if luck < 0.2 and far:
            first = far - far % self.order.blocks_per_epoch
            if far == first:
                trial.saved = Checkpoint((), far)
            else:
                taken, end = tuple(range(first, far)), first + self.order.blocks_per_epoch
                shuffle = Shuffle(first // self.order.blocks_per_epoch)
                samples = tuple(tuple(self.order.sample_ids(block, shuffle).tolist()) for block in taken)
                resumed = (
                    Resumption(far, OwnEpoch(first, end), shuffle.epoch, shuffle) if self.lane_count == 1 else None
                )
                trial.saved = Checkpoint(taken, end, samples, resumed)
        self.later(trial.restore, 0.0, 5.0)

    def _some_trial(self) -> Trial | None:
        up = [trial for _, trial in sorted(self.trials.items()) if trial.is_up]
        return self.rng.choice(up) if up else None

    def kill_trial(self) -> None:
        """It comes back from its checkpoint, or never."""
        if (trial := self._some_trial()) is not None:
            trial.die()
            self._replace(trial)

    def _replace(self, trial: Trial) -> None:
        if self.rng.random() < 0.3:
            del self.trials[trial.name]
        else:
            process = trial.process
            self.later(lambda: trial.restore() if trial.process == process else None, 0.1, 30.0)

    def pause_trial(self) -> None:
        if (trial := self._some_trial()) is not None:
            trial.paused_until = self.now + self.rng.choice([3.0, 12.0, 40.0])

    def end_trial(self) -> None:
        """It leaves; Tune may hold its place for a successor."""
        if (trial := self._some_trial()) is not None and not self.is_down:
            del self.trials[trial.name]
            reserve, sessions = self.rng.random() < 0.5, [end.session for end in trial.ends]
            trial.die()
            for lane, session in zip(self.lanes, sessions, strict=False):
                lane.tell(ev.Leave(trial.name, session, reserve and lane is self.lanes[0]))

    def kill_node(self) -> None:
        before = set(self.nodes)
        super().kill_node()
        for node in before - self.nodes.keys():
            for _, trial in sorted(self.trials.items()):
                if trial.node == node and trial.is_up:
                    trial.die()
                    trial.node = min(self.nodes, default="node-0")
                    self._replace(trial)

    def cut_storage(self) -> None:
        self.storage_away_until = self.now + self.rng.choice([2.0, 20.0])

    def break_program(self) -> None:
        """For a while, half of what workers make ends in an error."""
        self.buggy_until = self.now + self.rng.choice([2.0, 20.0])

    def meets_bug(self) -> bool:
        """Whether a worker meets a bug now."""
        met = self.buggy_until > self.now and self.rng.random() < 0.5
        self.bugs += met
        return met

    def replace(self, instruction: ev.ReplaceWorker) -> None:
        """A lane has no use for a worker any more: it hangs, or meets one error after the other."""
        if instruction.blame:
            self.stuck(instruction.worker, instruction.reason)
        else:
            assert self.bugs >= WORKER_FAILURES, f"{instruction.worker} met no errors: {instruction.reason}"
            self._send_later(cluster.WorkerDied(instruction.worker, instruction.reason, blame=False))

    def break_sample(self) -> None:
        """It is mended after a while."""
        block = self.rng.randrange(self.order.blocks_per_epoch)
        self.bad_blocks.add(block)
        self.ever_bad.add(block)
        self.later(lambda: self.bad_blocks.discard(block), 1.0, 20.0)

    # ---- the schedule ----

    def run(self) -> None:
        """Play the schedule to its end."""
        try:
            self._begin(cluster.Begin())
            for _ in range(self.rng.randint(1, 2)):
                self.add_trial()
            self.advance(8.0)
            for _ in range(self.faults):
                for _ in range(self.rng.choice([1, 1, 2, 3])):
                    getattr(self, self.rng.choice(FAULTS))()
                self.advance(self.rng.choice([0.0, 0.1, 1.0, 4.0, 12.0]))
            self._check_progress()
        except AssertionError as error:
            lines = "\n".join(map(str, self.story))
            raise AssertionError(f"seed {self.seed} at {self.now:.1f} s: {error}\n{lines}") from error

    def _check_progress(self) -> None:
        self.make_peace()
        self.storage_away_until = self.buggy_until = 0.0
        for trial in self.trials.values():
            trial.due = trial.steps + self.rng.randint(1, self.order.blocks_per_epoch + 1)
        end = self.now + PEACE_S
        while self.now < end and (self._late() or not self.is_whole()):
            self.advance(5.0)
            self.look()
        assert not (late := self._late()), f"{late} stand still: {[self._why(name) for name in late]}"
        assert self.is_whole(), "workers are missing, have homes where there is no room, or run and are known to nobody"

    def _late(self) -> list[str]:
        return [name for name, trial in self.trials.items() if trial.steps < trial.due]

    def _why(self, name: str) -> str:
        trial = self.trials[name]
        told = [lane.core.explain_wait(name) for lane in self.lanes if isinstance(lane, Service)]
        return f"{name} at {trial.cursor}, up {trial.is_up}, joined {trial.joined}, busy {trial.busy}: {told}"


FAULTS: tuple[str, ...] = (
    *cluster_schedules.FAULTS,
    "add_trial",
    "add_trial",
    "kill_trial",
    "kill_trial",
    "pause_trial",
    "pause_trial",
    "end_trial",
    "cut_storage",
    "break_sample",
    "break_program",
)


def run_some(seeds: Iterable[int], faults: int = 4) -> None:
    """Run a schedule for each seed.

    Raises:
        AssertionError: a promise was broken; the first.
    """
    with kept_garbage():
        for seed in seeds:
            System(seed, faults).run()
