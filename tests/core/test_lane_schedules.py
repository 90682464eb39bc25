"""Consumers that take blocks from several lanes in turn get every block in order and never get stuck."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from mbaas.core import events as ev
from mbaas.core.layout import StagingLimits
from mbaas.core.state import StagingState
from mbaas.messages import Lane
from mbaas.settings import Timeouts
from support.schedules import drawn_slack

pytestmark = pytest.mark.timeout(900)  # pure arithmetic, slow on a busy machine

WANT = 4
EPOCHS = 3


@dataclass
class Line:
    """A consumer's end of one lane: the next block to receive, blocks not taken yet, and which blocks are copies."""

    session: int
    received: int
    queue: list[int] = field(default_factory=list)
    asked: bool = False
    copied: set[int] = field(default_factory=set)


@dataclass
class Consumer:
    """Loader of a feed with lanes, like `mbaas.client.lane_stream`; it pins the block that it took last."""

    name: str
    cursor: int
    lines: list[Line]
    pinned: tuple[int, int] | None = None
    taken: list[int] = field(default_factory=list)


class LaneSimulation:
    """One random schedule without deaths: some consumers are out of step, and memory is short.

    Args:
        seed: determines the whole schedule.
        crowded: two lanes, eight consumers that are all out of step, and 3 or 4 blocks of memory per lane; no pins.
        hands_back: whether consumers that wait in one lane give up blocks received ahead in others.
    """

    def __init__(self, seed: int, *, crowded: bool = False, hands_back: bool = True) -> None:
        rng = self.rng = random.Random(seed)
        self.crowded, self.hands_back, self.now, self.session = crowded, hands_back, 0.0, 0
        blocks = 16 if crowded else rng.randint(2, 9)
        count = 2 if crowded else rng.randint(2, min(4, blocks))
        self.lanes = [Lane(blocks, number, count) for number in range(count)]
        limits = StagingLimits(
            budget_bytes=10 * rng.choice([3, 4] if crowded else [3, 4, 5, 6]),
            ahead_blocks=rng.choice([2, 3, 6]),
            timeouts=Timeouts(lease_s=1e9, patience_s=rng.choice([5.0, 1e9])),
            slack_blocks=drawn_slack(seed),
        )
        self.cores = [
            StagingState(limits, lane.blocks_per_epoch, lambda _: 10, lane=lane.number, lanes=count)
            for lane in self.lanes
        ]
        self.tasks: list[tuple[int, int]] = []
        self.made: Counter[int] = Counter()
        self.consumers: dict[str, Consumer] = {}
        for lane in self.lanes:
            for worker in range(rng.randint(1, 2)):
                self.send(lane.number, ev.WorkerUp(f"w{worker}", 1))

    def send(self, lane: int, event: ev.Event) -> list[ev.Instruction]:
        done = self.cores[lane].handle(event, self.now)
        self.cores[lane].validate()
        for instruction in done:
            match instruction:
                case ev.Prepare():
                    self.tasks.append((lane, instruction.task))
                    self.made[self.lanes[lane].feed_block(instruction.block)] += 1
                case ev.Deliver():
                    self.receive(lane, instruction)
                case ev.Refuse() | ev.RemoveConsumer():
                    raise AssertionError(f"{instruction}")
        return done

    def receive(self, lane: int, delivery: ev.Deliver) -> None:
        line = self.consumers[delivery.consumer].lines[lane]
        if not line.asked:  # the answer to a call that was given up
            return
        assert lane == 0 or delivery.blocks[0] == line.received, "only the first lane moves anybody"
        line.asked = False
        line.queue += delivery.blocks
        line.copied = {*line.copied, *delivery.blocks} if delivery.as_copy else line.copied - {*delivery.blocks}
        line.received = delivery.blocks[-1] + 1

    # ---- consumers ----

    def join(self, name: str, start: int | None) -> None:
        """Join the first lane, which chooses the start, and then the others at the same position."""
        first = self.lanes[0]
        own = None if start is None else first.first_from(start)
        opened = self.open(0, name, own, flexible=False)
        cursor = first.feed_block(opened.received) if start is None else start
        others = [
            self.open(lane.number, name, lane.first_from(cursor), flexible=start is None) for lane in self.lanes[1:]
        ]
        self.consumers[name] = Consumer(name, cursor, [opened, *others])

    def open(self, lane: int, name: str, start: int | None, *, flexible: bool) -> Line:
        self.session += 1
        (reservation,) = [
            i for i in self.send(lane, ev.Join(name, self.session, start, flexible)) if isinstance(i, ev.Admitted)
        ]
        assert start is None or reservation.cursor == start
        return Line(reservation.session, reservation.cursor)

    def released(self, consumer: Consumer, lane: int) -> int:
        line = consumer.lines[lane]
        if consumer.pinned is not None and consumer.pinned[0] == lane:
            return consumer.pinned[1]
        return line.queue[0] if line.queue else line.received

    def ask_ahead(self, consumer: Consumer, lane: int) -> None:
        line = consumer.lines[lane]
        if not line.queue and not line.asked:
            line.asked = True
            want = 1 if line.received % self.lanes[lane].blocks_per_epoch == 0 else WANT
            released = self.released(consumer, lane)
            self.send(lane, ev.Ask(consumer.name, line.session, line.received, released, 0, want))

    def step(self, consumer: Consumer) -> bool:
        """Return whether the next block was taken; if it is missing, hand back blocks received ahead in other lanes."""
        for lane in self.lanes:
            self.ask_ahead(consumer, lane.number)
        (mine,) = [lane for lane in self.lanes if lane.has(consumer.cursor)]
        line = consumer.lines[mine.number]
        if not line.queue:
            if self.hands_back:
                self.hand_back(consumer, mine)
            return False
        own = line.queue.pop(0)
        block = mine.feed_block(own)
        if block != consumer.cursor:
            self.move(consumer, block)
        consumer.taken.append(block)
        pins_none = self.crowded or own in line.copied
        consumer.cursor, consumer.pinned = block + 1, None if pins_none else (mine.number, own)
        return True

    def hand_back(self, consumer: Consumer, waits_for: Lane) -> None:
        for lane in self.lanes:
            line = consumer.lines[lane.number]
            cursor = lane.first_from(consumer.cursor)
            may_be_moved = lane.number == 0 and cursor % lane.blocks_per_epoch == 0
            if lane != waits_for and not may_be_moved and (line.queue or line.asked):
                line.received = cursor
                line.queue, line.asked = [], False
                released = self.released(consumer, lane.number)
                self.send(lane.number, ev.HandBack(consumer.name, line.session, line.received, released))

    def move(self, consumer: Consumer, block: int) -> None:
        assert block % self.lanes[0].feed_blocks == consumer.cursor % self.lanes[0].feed_blocks == 0
        assert block > consumer.cursor
        for lane in self.lanes[1:]:
            line = consumer.lines[lane.number]
            line.queue = [own for own in line.queue if own >= lane.first_from(block)]
            if not line.queue and line.received < lane.first_from(block):
                line.received, line.asked = lane.first_from(block), False

    # ---- the schedule ----

    def run(self) -> None:
        rng, blocks = self.rng, self.lanes[0].feed_blocks
        for number in range(8 if self.crowded else rng.randint(1, 4)):
            far = 100 * number + 1 if self.crowded else rng.choice([None, rng.randint(0, 3 * blocks)])
            self.join(f"c{number}", far)
            for _ in range(rng.randint(0, 30)):
                self.advance()
        idle = 0
        while any(len(consumer.taken) < EPOCHS * blocks for consumer in self.consumers.values()):
            idle = 0 if self.advance() else idle + 1
            assert idle < 2000, "everybody waits: " + ", ".join(map(self.where, self.consumers.values()))
        for consumer in self.consumers.values():
            self.check(consumer)

    def advance(self) -> bool:
        self.now += 0.1
        if self.tasks and self.rng.random() < 0.6:
            lane, task = self.tasks.pop(self.rng.randrange(len(self.tasks)))
            self.send(lane, ev.TaskEnded(task))
        for lane in self.lanes:
            self.send(lane.number, ev.Tick())
        if self.rng.random() < 0.1:
            self.beat(self.rng.choice(list(self.consumers.values())))
        return self.step(self.rng.choice(list(self.consumers.values())))

    def beat(self, consumer: Consumer) -> None:
        for number, line in enumerate(consumer.lines):
            self.send(number, ev.Heartbeat(consumer.name, line.session, self.released(consumer, number), 0))

    def where(self, consumer: Consumer) -> str:
        (lane,) = [lane.number for lane in self.lanes if lane.has(consumer.cursor)]
        return f"{consumer.name} at {consumer.cursor}: {self.cores[lane].explain_wait(consumer.name)}"

    def check(self, consumer: Consumer) -> None:
        """Assert that blocks are consecutive; only an epoch's start may skip ahead."""
        blocks = self.lanes[0].feed_blocks
        for before, after in zip(consumer.taken, consumer.taken[1:], strict=False):
            assert after == before + 1 or (after > before and after % blocks == 0 and (before + 1) % blocks == 0)


def test_consumers_of_several_lanes_take_every_block_in_order_and_none_starves():
    for seed in range(100):
        try:
            LaneSimulation(seed).run()
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from error


CROWD = 89
"""Seed of a schedule whose waits for memory form a cycle."""


@pytest.mark.parametrize("seed", [21, 85, 86, CROWD])
def test_consumers_that_are_out_of_step_do_not_wait_for_each_other_in_a_ring(seed):
    LaneSimulation(seed, crowded=True).run()


def test_they_would_if_they_handed_nothing_back():
    with pytest.raises(AssertionError, match=r"everybody waits: .* the staging budget of .* B is held by"):
        LaneSimulation(CROWD, crowded=True, hands_back=False).run()
