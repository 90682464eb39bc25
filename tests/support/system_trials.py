"""Trials and their loaders in virtual time, driven by the real `mbaas.client.position`.

`support.system_schedules` plays the feed that they call, and checks its promises.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from mbaas.client.position import Position
from mbaas.client.stream import WANTED_BLOCKS
from mbaas.core.staging import events as ev
from mbaas.samples.order import ASIDE, Ids, OwnEpoch, Shuffle
from mbaas.wire.consumers import Resumption, Start
from support.cluster_schedules import BLOCK_SAMPLES

if TYPE_CHECKING:
    from support.system_schedules import System

BEAT_S = 8.0

LOOK_S = 2.0
"""Interval at which a trial asks whether an unreadable block is still staged."""

READ_S = 30.0
"""A block that cannot be read for this long counts as unreadable."""


# ---- messages between trials and coordinators ----


@dataclass(frozen=True)
class Part:
    """A part of a block in the object store.

    Attributes:
        node: node that stores it.
        life: life of the coordinator that owns it; the part dies with it.
        ids: its sample ids.
    """

    number: int
    task: int
    node: str
    life: int
    ids: Ids


@dataclass(frozen=True)
class Delivered:
    """A block as delivered to a trial: its parts, or an error."""

    number: int
    shuffle: Shuffle
    parts: tuple[Part, ...]
    error: str | None = None
    as_copy: bool = False


@dataclass(frozen=True)
class Answer:
    """The result of a call; an empty one means that the poll timed out.

    Attributes:
        restarting: the coordinator is gone, or was when the call arrived.
        lost: no answer within `CALL_S`.
        expelled: the session is closed.
        admitted: (session, first block, bounds of the trial's own epoch).
    """

    blocks: tuple[Delivered, ...] = ()
    restarting: bool = False
    lost: bool = False
    expelled: bool = False
    admitted: tuple[int, int, OwnEpoch] | None = None


Reply: TypeAlias = Callable[[Answer], None]


# ---- trials ----


@dataclass(eq=False)
class Call:
    """A call for blocks and its answer."""

    answer: Answer | None = None


class End(Position[Delivered]):
    """A trial's session.

    Attributes:
        session: session number.
        call: the call in flight, or one with an unprocessed answer.
        expelled: True if a heartbeat reported that the session has ended.
        are_remote: True if the newest blocks are on other nodes.
        holds: blocks read in this session and still in use.
    """

    def __init__(self) -> None:
        super().__init__(WANTED_BLOCKS)
        self.session = 0
        self.call: Call | None = None
        self.expelled = self.are_remote = False
        self.holds: set[int] = set()


@dataclass
class Checkpoint:
    """A trial's saved state, with its past epochs for checks.

    Attributes:
        taken: blocks taken in its epoch.
        epoch_end: end of the last epoch that it began.
        samples: sample ids of each taken block; None for a failed block.
        resumed: position at which it resumes.
    """

    taken: tuple[int, ...] = ()
    epoch_end: int = 0
    samples: tuple[tuple[int, ...] | None, ...] = ()
    resumed: Resumption | None = None


@dataclass(eq=False)
class Trial:
    """A trial with its loader.

    Attributes:
        process: number of its process; actions of a dead process are dropped.
        is_up: True while it lives.
        joined: True while it has a session and uses it.
        cursor: next block that it needs; None before the first session.
        taken: blocks of the current epoch, in order.
        samples: sample ids of each taken block; None for a failed block.
        own: bounds of its own epoch.
        epoch_end: end of the last epoch that it began; it never gets an earlier block again.
        steps: blocks taken, including failed ones.
        errors: blocks that failed.
        step_s: work time per block.
        keeps: older blocks that it keeps using.
        tests_s: pause between two epochs.
        busy: True while it works on a block or reads one.
        due: number of steps after which it ends.
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
    end: End = field(default_factory=End)
    pinned: list[Callable[[], None]] = field(default_factory=list)

    # ---- its process ----

    def later(self, action: Callable[[], None], least_s: float, most_s: float, process: int | None = None) -> None:
        """Run an action in this process, or a given one, if it still lives. A paused process runs it later."""
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
        """Start a process, which joins."""
        self.end = End()
        self.joined = self.busy = False
        self.pinned = []
        self.cursor = start.block

        def joined() -> None:
            self.cursor = self.end.cursor
            self.joined = True
            self.go_on()

        self._join(self.end, start, then=joined)
        self.later(self._beat_forever, 0.0, BEAT_S)

    def _join(self, end: End, start: Start, *, then: Callable[[], None]) -> None:
        """Open a session; retry until it succeeds."""

        def take(answer: Answer) -> None:
            if answer.admitted is None:
                self.later(lambda: self._join(end, start, then=then), 0.1, 1.0)
                return
            end.session, cursor, own_epoch = answer.admitted
            end.enter(cursor, own_epoch, self.system.order.blocks_per_epoch, BLOCK_SAMPLES, requested=start.block)
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

        self.system.call(self, lambda s, reply: s.join(self.name, start, reply), take)

    def _renumber(self, by: int) -> None:
        """Mirror `RankSharding.renumber`."""
        self.taken = [block + by for block in self.taken]
        self.own = self.own.moved(by)

    def _beat_forever(self) -> None:
        if self.joined:
            self.beat(self.end)
        self.later(self._beat_forever, BEAT_S, BEAT_S)

    def beat(self, end: End) -> None:
        event, session = ev.Heartbeat(self.name, end.session, end.released(), end.done), end.session

        def hear(answer: Answer) -> None:
            if answer.expelled and end.session == session:
                end.expelled = True

        self.system.call(self, lambda s, reply: s.heartbeat(event, reply), hear)

    # ---- requesting blocks: `mbaas.client.stream` ----

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

        self.system.call(self, lambda s, reply: s.ask(event, unreadable, reply), take)

    def _ask_ahead(self, end: End) -> None:
        if end.runs_short(are_remote=end.are_remote) and end.call is None and not end.expelled:
            self._ask(end)

    def go_on(self) -> None:
        """Take the block at the cursor if it has arrived; otherwise request it."""
        end = self.end
        self._ask_ahead(end)
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
        self.busy = True
        self._read(end, end.received[0], self.system.now)

    def _rejoin(self, end: End) -> None:
        self.busy = True

        def then() -> None:
            self.busy = False
            self.cursor = end.cursor  # it may resume in a side epoch, or begin its own epoch elsewhere
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

    # ---- using blocks ----

    def _read(self, end: End, block: Delivered, began: float) -> None:
        system = self.system
        if not all(system.is_alive(part.life) for part in block.parts):
            self._ask_again(end, block)  # its owner is dead
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
                system.call(self, lambda s, reply: s.is_given_up(block, reply), hear)

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
        number = block.number
        end.move_on()
        if block.error is None:
            self.system.check_samples(self, number, block)
            if block.as_copy:
                self.pinned.append(lambda: None)  # it uses the copy, and no longer the previous block
            else:
                self._pin(end, block.number)
        self._ask_ahead(end)
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
            self.end.done = self.cursor
            self.beat(self.end)
            if self.tests_s:
                self._test()
                return
        elif not system.is_peaceful and system.rng.random() < 0.03:
            self._skip_epoch()
        if system.rng.random() < 0.2:
            resumed = None
            if self.taken:
                resumed = self.end.start_at(self.cursor).resumed
                assert resumed is not None
                resumed = resumed.moved(resumed.shuffle.epoch - resumed.epoch, system.order.blocks_per_epoch)
            self.saved = Checkpoint(tuple(self.taken), self.epoch_end, tuple(self.samples), resumed)
        self.go_on()

    def _test(self) -> None:
        """Pause between two epochs."""
        self.busy = True

        def go_on() -> None:
            self.busy = False
            self.go_on()

        self.later(go_on, 0.5 * self.tests_s, 1.5 * self.tests_s)

    def _skip_epoch(self) -> None:
        """Leave the loop midway and start the next epoch."""
        assert self.cursor is not None
        self._forget_epoch()
        self.cursor = self.own.end
        self._leap(self.end, self.cursor)

    def _leap(self, end: End, block: int) -> None:
        if end.leap(block):
            end.call = None
            self._tell_what_is_given_up(end)

    def _tell_what_is_given_up(self, end: End) -> None:
        if end.given_up is None:
            return
        self._tell(end, ev.HandBack(self.name, end.session, end.given_up, end.released(), end.next_call()))

    def _tell(self, end: End, event: ev.Event) -> None:
        """Send an event without waiting for an answer."""
        self.system.call(self, lambda service, _: service.tell(event), lambda _: None)

    # ---- its end ----

    def _leave(self) -> None:
        self._tell(self.end, ev.Leave(self.name, self.end.session))
        self.joined = False

    def die(self) -> None:
        self.is_up, self.joined = False, False
        self.process += 1
        self.end, self.pinned = End(), []

    def restore(self) -> None:
        """Start a new process from the last checkpoint."""
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
        elif self.epoch_end:  # saved between two epochs: it starts an epoch with others, never one that it had
            blocks = system.order.blocks_per_epoch
            start = self.epoch_end = -(-self.epoch_end // blocks) * blocks % (ASIDE * blocks)
            self.begin(Start(start, flexible=True, now=now))
        else:
            self.begin(Start(now=now))
