"""Random schedules for the staging core: consumers, workers and time, from one seeded generator.

`Simulation` plays the shell. It carries out instructions with random delays, losses and deaths, and keeps the ledger
that the core promises. It raises AssertionError at the first broken promise, with the seed and the last events.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import partial

from msgspec.structs import replace as replace_struct

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import STREAM_BITS, Stream, in_core, local_block
from mbaas.samples.order import ASIDE, OwnEpoch, SampleOrder, Shuffle
from mbaas.samples.placement import BlockPart
from mbaas.settings import Timeouts
from mbaas.wire.consumers import Resumption

BLOCK_SAMPLES = 3
"""An epoch's last block may have one sample less."""


@dataclass
class FakeConsumer:
    """A loader as the core sees it.

    Attributes:
        stream: the stream that it reads; its block numbers count from 0 in that stream.
        order: the order of samples in the stream's blocks.
        cursor: next block that it needs; None before admission.
        holds: blocks received and not yet released.
        own: bounds of its own epoch.
        epoch_blocks: blocks taken in its current epoch, in order.
        samples: sample ids taken from each block of ``epoch_blocks``.
        known: the stream's epoch, and its shuffle, for each block of ``epoch_blocks``.
        last: the same for the last block of its previous epoch.
        finished: completed epochs, as lists of sample ids.
    """

    name: str
    session: int
    stream: Stream
    order: SampleOrder
    cursor: int | None = None
    asking: bool = False
    holds: deque[int] = field(default_factory=deque)
    own: OwnEpoch = field(default_factory=lambda: OwnEpoch(0, 0))
    epoch_blocks: list[int] = field(default_factory=list)
    samples: list[list[int]] = field(default_factory=list)
    known: list[tuple[int, Shuffle]] = field(default_factory=list)
    last: tuple[int, Shuffle] | None = None
    finished: list[list[int]] = field(default_factory=list)

    @property
    def began(self) -> int | None:
        """First block of the epoch that it reads."""
        return self.own.first if self.epoch_blocks else self.cursor

    def begin_epoch(self) -> None:
        """Clear the record of taken blocks."""
        self.last = self.known[-1] if self.known else self.last
        self.epoch_blocks, self.samples, self.known = [], [], []

    def go_back(self) -> None:
        """Undo taking the newest block."""
        self.cursor = self.holds.pop()
        assert self.epoch_blocks.pop() == self.cursor
        self.samples.pop(), self.known.pop()

    def resumption(self) -> Resumption:
        """State to resume from in the middle of its epoch."""
        assert self.cursor is not None
        return Resumption(self.cursor, self.own, *self.known[-1])


def drawn_slack(seed: int) -> int:
    """Draw `StagingLimits.slack_blocks`, which may be more than fits.

    A separate generator leaves all other draws of a seed as they were.
    """
    return random.Random(f"slack {seed}").choice([0, 0, 3, 20])


class Simulation:
    """A random schedule of the staging core.

    Half of the schedules let consumers begin mid-epoch.

    Args:
        seed: determines everything.
        steps: number of events to draw.
        calm: no deaths, departures or detached consumers. Each block must then be prepared exactly once.
        keeps_all: all epochs are identical and one epoch's blocks stay staged.
        pipelines: pipelines that consumers use, which differ in the size of their blocks.
    """

    def __init__(
        self, seed: int, steps: int = 80, *, calm: bool = False, keeps_all: bool = False, pipelines: int = 1
    ) -> None:
        self.rng = random.Random(seed)
        self.paces: dict[str, float] = {}
        self.seed, self.steps, self.calm, self.keeps_all = seed, steps, calm, keeps_all
        rng = self.rng
        self.blocks_per_epoch = rng.choice([1, 2, 3, 5, 8])
        ahead_blocks = rng.randint(1, 8)
        self.joins_now = rng.random() < 0.5
        if self.joins_now and rng.random() < 0.8:
            # A consumer begins mid-epoch only if an epoch is longer than the blocks prepared ahead.
            self.blocks_per_epoch, ahead_blocks = rng.choice([5, 8, 12]), rng.randint(1, 2)
        limits = StagingLimits(
            budget_bytes=max(
                rng.choice([10, 20, 30, 45, 80]),
                10 * self.blocks_per_epoch * keeps_all,
                30 * (keeps_all and pipelines > 1),  # the layout sees to three blocks of each pipeline
                100 * pipelines * (calm and pipelines > 1),  # with less, blocks may be dropped to make room for others
            ),
            ahead_blocks=ahead_blocks,
            timeouts=Timeouts(
                lease_s=1e9 if calm else 20.0,
                reservation_s=8.0,
                patience_s=1e9 if calm else 5.0,
                prep_s=1e9 if calm else 12.0,
            ),
            max_deaths=10_000,
            slack_blocks=drawn_slack(seed),
        )
        self.nodes = [f"n{i}" for i in range(rng.randint(1, 3))]
        samples = self.blocks_per_epoch * BLOCK_SAMPLES - rng.choice([0, 1])
        self.order = SampleOrder(samples, 0, BLOCK_SAMPLES, shuffled=not keeps_all)
        self.core = StagingState(
            limits,
            self.blocks_per_epoch,
            self.block_bytes,
            self.split,
            keeps_all=keeps_all,
            block_samples=BLOCK_SAMPLES,
            is_shuffled=not keeps_all,
        )
        self.streams, self.orders = self._streams(pipelines)
        self.states: list[tuple[Resumption, FakeConsumer]] = []
        self.now = 0.0
        self.consumers: dict[str, FakeConsumer] = {}
        self.tasks: dict[int, ev.Prepare] = {}
        self.dead_tasks: list[int] = []
        self.workers: set[str] = set()
        self.made: Counter[tuple[int, int]] = Counter()
        self.made_at: dict[int, str] = {}
        self.unreadable: set[int] = set()
        self.leaving: set[str] = set()
        self.history: list[tuple[float, ev.Event] | ev.Instruction] = []
        self._validate_every = 1 if seed % 10 == 0 else 5  # validating at every event takes half of the run time
        self._names = 0
        self._session = 0

    def _streams(self, pipelines: int) -> tuple[list[Stream], list[SampleOrder]]:
        """Return the streams and their orders; blocks of later ones have 1 to 4 samples, of 2 or 3 bytes."""
        streams, orders = [self.core.streams[0]], [self.order]
        drawn = random.Random(f"streams {self.seed}")
        for number in range(1, pipelines):
            order = replace_struct(self.order, block_samples=drawn.randint(1, 4))
            nbytes = min(10, order.block_samples * drawn.randint(2, 3))
            streams.append(Stream(number, order.blocks_per_epoch, order.block_samples, partial(_as_always, nbytes)))
            orders.append(order)
        return streams, orders

    def block_bytes(self, block: int) -> int:
        """Ten bytes; seven for an epoch's last block."""
        return 7 if block % self.blocks_per_epoch == self.blocks_per_epoch - 1 else 10

    def split(self, _: int, _shuffle: Shuffle) -> list[BlockPart]:
        """Cut a block into parts with random homes, some on nodes that are gone or have no worker."""
        return [BlockPart(home, 1) for home in self.rng.sample(self.nodes, self.rng.randint(1, len(self.nodes)))]

    # ---- the coordinator's shell ----

    def send(self, event: ev.Event) -> None:
        self.history.append((self.now, event))
        done = self.core.handle(event, self.now)
        for instruction in done:
            self.history.append(instruction)
            self._carry_out(instruction)
        for order in [each for each in done if isinstance(each, ev.ReplaceWorker)]:  # as the supervisor does
            self.send(ev.WorkerDown(order.worker, order.reason, blame=order.blame))
        if len(self.history) % self._validate_every == 0:
            self.core.validate()

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.Admitted():
                consumer = self.consumers.get(instruction.consumer)
                if consumer is not None and consumer.session == instruction.session:
                    self._admitted(consumer, instruction)
            case ev.Deliver():
                self._receive(instruction)
            case ev.Prepare():
                assert instruction.worker in self.workers, f"task for {instruction.worker}, which is down"
                assert instruction.worker not in self.leaving, f"task for {instruction.worker}, which is leaving"
                assert (
                    instruction.block_part
                    == self.core.window.blocks[instruction.block].parts[instruction.part].block_part
                )
                self.tasks[instruction.task] = instruction
            case ev.ReplaceWorker():
                self._worker_gone(instruction.worker)
            case ev.ReleaseWorker():
                assert not [t for t in self.tasks.values() if t.worker == instruction.worker], "it still has tasks"
                self.workers.remove(instruction.worker)
                self.leaving.remove(instruction.worker)
            case ev.RemoveConsumer() | ev.Refuse():
                self._rejoin_if_alive(instruction.consumer, instruction.session)

    def _admitted(self, consumer: FakeConsumer, admitted: ev.Admitted) -> None:
        stream, length = consumer.stream, consumer.order.blocks_per_epoch
        cursor, own_epoch = stream.local(admitted.cursor), admitted.own_epoch.moved(-stream.first)
        if consumer.epoch_blocks:  # it resumes, perhaps in a side epoch
            by = cursor - (consumer.cursor or 0)
            assert by % length == 0
            assert own_epoch == consumer.own.moved(by)
            consumer.epoch_blocks = [block + by for block in consumer.epoch_blocks]
            consumer.known = [(epoch + by // length, how) for epoch, how in consumer.known]
        consumer.cursor, consumer.own = cursor, own_epoch

    def _take(self, consumer: FakeConsumer, block: int) -> None:
        """Record the samples that a consumer takes from a block."""
        if block >= consumer.own.end or not consumer.epoch_blocks:
            assert not consumer.epoch_blocks, f"{consumer.name} was moved in mid-epoch"
            consumer.own = _own_epoch(block, consumer.order)
        order = consumer.order
        shuffle = self.core.epochs.shuffle_of(consumer.stream.first + block)
        first, _ = order.span(block)
        ids = order.sample_ids(block, shuffle).tolist()
        own = consumer.own
        if block == own.first:
            ids = ids[max(0, own.begin - first) :]
        elif block == own.end - 1 and own.begin % order.block_samples:
            ids = ids[: own.begin - first]
        consumer.epoch_blocks.append(block)
        consumer.samples.append(ids)
        consumer.known.append((order.epoch_of(block), shuffle))
        if block == own.end - 1:
            assert consumer.epoch_blocks == [*range(own.first, own.end)], f"{consumer.name}: {consumer.epoch_blocks}"
            consumer.finished.append([i for ids in consumer.samples for i in ids])
            consumer.begin_epoch()
        elif len(self.states) < 20:  # as a checkpoint does
            taken = replace(consumer, samples=[*consumer.samples], known=[*consumer.known])
            self.states.append((Resumption(block + 1, own, *consumer.known[-1]), taken))

    def _receive(self, delivery: ev.Deliver) -> None:
        consumer = self.consumers.get(delivery.consumer)
        if consumer is None or consumer.session != delivery.session:
            return
        assert consumer.asking, f"{consumer.name} was given blocks that it did not ask for"
        consumer.asking = False
        delivered = [*map(local_block, delivery.blocks)]
        first = delivered[0]
        if first != consumer.cursor:
            assert not consumer.epoch_blocks, f"{consumer.name} was moved in mid-epoch"
            assert first > (consumer.cursor or 0), f"{consumer.name} was moved back"
        assert delivered == [*range(first, first + len(delivered))]
        assert [*delivery.blocks] == [block + consumer.stream.first for block in delivered]
        for block in delivered:
            self._check_readable(consumer.stream.first + block)
            if not delivery.as_copy:
                consumer.holds.append(block)
            self._take(consumer, block)
        consumer.cursor = delivered[-1] + 1

    def _check_readable(self, number: int) -> None:
        assert self.core.window.is_ready(number), f"block {number} was handed out before it was made"
        block = self.core.window.find(number)
        assert block is not None
        gone = self.unreadable.intersection(part.task for part in block.parts)
        # A failed block is delivered as an error: none of its parts is read.
        assert block.error or not gone, f"block {number} was handed out, but what task {gone} made cannot be read"

    def _worker_gone(self, worker: str) -> None:
        self.workers.discard(worker)
        self.leaving.discard(worker)
        self.dead_tasks += [t.task for t in self.tasks.values() if t.worker == worker]
        self.tasks = {n: t for n, t in self.tasks.items() if t.worker != worker}

    def _rejoin_if_alive(self, name: str, session: int) -> None:
        consumer = self.consumers.get(name)
        if consumer is not None and consumer.session == session:
            consumer.asking = False
            consumer.holds.clear()
            self._later.append(ev.OpenStream(consumer.stream))  # a loader makes its pipeline known again
            self._session += 1
            consumer.session = self._session
            self._later.append(in_core(self._again(consumer), consumer.stream))

    def _again(self, consumer: FakeConsumer) -> ev.Join:
        """Return the event with which a consumer rejoins, as `Position.start_at` decides."""
        cursor, length = consumer.cursor, consumer.order.blocks_per_epoch
        join = ev.Join(consumer.name, consumer.session, cursor, stream=consumer.stream.number)
        if cursor is None:
            return replace_struct(join, now=True)
        if consumer.epoch_blocks:
            return replace_struct(join, resumed=consumer.resumption())
        if cursor >= ASIDE * length and consumer.last is not None:
            return replace_struct(join, start=(consumer.last[1].epoch + 1) * length)
        if cursor % length and consumer.last is not None:
            own = _own_epoch(cursor, consumer.order)
            return replace_struct(join, resumed=Resumption(cursor, own, *consumer.last, taken=False))
        if consumer.last is not None:
            return replace_struct(join, now=True)
        return replace_struct(join, start=None, now=True) if consumer.own.begin else replace_struct(join, flexible=True)

    # ---- random events ----

    def run(self) -> None:
        """Draw the whole schedule, then check that every living consumer can finish an epoch."""
        self._later: list[ev.Event] = []
        try:
            for worker in range(self.rng.randint(1, 3)):
                self._worker_up(f"w{worker}")
            for _ in range(self.steps):
                self._step()
            self._finish()
            self._check_ledger()
        except AssertionError as error:
            history = "\n".join(map(_told, self.history[-60:]))
            raise AssertionError(f"seed {self.seed}: {error}\n{history}") from error

    def _flush(self) -> None:
        while self._later:
            self.send(self._later.pop(0))

    def _step(self) -> None:
        self.now += self.rng.choice([0.0, 0.01, 0.1, 0.5, 1.0])
        moves = [
            (4, self._join), (30, self._ask), (30, self._complete), (10, self._release), (6, self._tick),
            (2, self._announce), (6, self._heartbeats), (3, self._duplicate),
        ]  # fmt: skip
        if not self.calm:
            moves += [
                (3, self._leave), (2, self._crash), (2, self._kill_worker), (3, self._replace_worker),
                (1, self._skip_epoch), (1, self._late_word), (1, self._node_gone), (2, self._find_unreadable),
                (1, self._retire_worker), (3, self._put_off), (2, self._meet_bad_sample), (2, self._try_failed_anew),
                (2, self._meet_bug), (4, self._tell_paces),
            ]  # fmt: skip
            if len(self.streams) > 1:
                moves.append((4, self._change_pipeline))
        weights = [weight for weight, _ in moves]
        self.rng.choices([move for _, move in moves], weights)[0]()
        self._flush()

    def _worker_up(self, name: str) -> None:
        self.workers.add(name)
        self.send(ev.WorkerUp(name, self.rng.randint(1, 2), self.rng.choice(self.nodes)))

    def _pick(self) -> FakeConsumer | None:
        return self.rng.choice(list(self.consumers.values())) if self.consumers else None

    def _join(self) -> None:
        if len(self.consumers) >= 5:
            return
        self._names, self._session = self._names + 1, self._session + 1
        name = f"c{self._names}"
        number = self.rng.randrange(len(self.streams)) if len(self.streams) > 1 else 0
        stream, order = self.streams[number], self.orders[number]
        self.consumers[name] = consumer = FakeConsumer(name, self._session, stream, order)
        join = ev.Join(name, self._session, stream=number)
        if number:
            self.send(ev.OpenStream(stream))
        luck = self.rng.random()
        if luck < 0.25 and not self.calm and (self._states_of(stream) or order.blocks_per_epoch > 1):
            self._restore(consumer)
        elif luck < 0.45 and not self.calm:
            start = self.rng.randint(0, 3) * order.blocks_per_epoch
            self._tell(consumer, replace_struct(join, start=start, flexible=self.rng.random() < 0.5))
        else:
            self._tell(consumer, replace_struct(join, now=luck > 0.5 and self.joins_now))
        if self.calm and consumer.cursor is not None:
            self._ask_for(consumer)  # a consumer that requests nothing for long is detached

    def _tell(self, consumer: FakeConsumer, call: ev.Join | ev.Ask | ev.Heartbeat | ev.UnreadablePart) -> None:
        """Send a consumer's call, as the coordinator's shell does."""
        self.send(in_core(call, consumer.stream))

    def _change_pipeline(self) -> None:
        """A consumer between two epochs continues with another pipeline, at the start of its next epoch."""
        consumer = self._pick()
        if consumer is None or consumer.cursor is None or consumer.epoch_blocks or consumer.asking:
            return
        number = self.rng.randrange(len(self.streams))
        last = consumer.last[1].epoch if consumer.last is not None else -1
        consumer.stream, consumer.order = self.streams[number], self.orders[number]
        consumer.holds.clear()
        consumer.cursor = consumer.last = None
        self._session += 1
        consumer.session = self._session
        self.send(ev.OpenStream(consumer.stream))
        start = (last + 1) * consumer.order.blocks_per_epoch
        is_now = self.joins_now and self.rng.random() < 0.5
        join = ev.Join(consumer.name, consumer.session, start, stream=number)
        self._tell(consumer, replace_struct(join, flexible=not is_now, now=is_now))

    def _states_of(self, stream: Stream) -> list[tuple[Resumption, FakeConsumer]]:
        return [each for each in self.states if each[1].stream is stream]

    def _restore(self, consumer: FakeConsumer) -> None:
        """Resume from the state of another consumer, of this feed or another."""
        states = self._states_of(consumer.stream)
        if states and (consumer.order.blocks_per_epoch == 1 or self.rng.random() < 0.7):
            resumed, taken = self.rng.choice(states)
            consumer.samples, consumer.known = [*taken.samples], [*taken.known]
            consumer.epoch_blocks = [*range(resumed.start - len(taken.samples), resumed.start)]
        else:
            resumed, consumer.samples, consumer.known = self._foreign(consumer.order)
            consumer.epoch_blocks = [*range(resumed.own_epoch.first, resumed.start)]
        consumer.cursor, consumer.own = resumed.start, resumed.own_epoch
        number = consumer.stream.number
        self._tell(consumer, ev.Join(consumer.name, consumer.session, resumed.start, resumed=resumed, stream=number))

    def _foreign(self, order: SampleOrder) -> tuple[Resumption, list[list[int]], list[tuple[int, Shuffle]]]:
        """A state from another feed, perhaps with other block bounds, and the samples and shuffles taken before."""
        blocks, rng = order.blocks_per_epoch, self.rng
        begin = rng.choice([0, rng.randrange(order.num_samples)])
        epoch = rng.randint(1, 4)
        first = epoch * blocks + begin // order.block_samples
        own = OwnEpoch(first, first + blocks + bool(begin % order.block_samples), begin)
        if own.end - own.first == 1:  # a single block has no middle
            return self._foreign(order)
        start = rng.randint(own.first + 1, own.end - 1)
        here = Shuffle(epoch, (begin,), Shuffle(epoch - 1)) if begin and rng.random() < 0.5 else Shuffle(epoch)
        then = here.after(epoch + 1, [begin] if begin else [])
        taken, known = [], []
        for block in range(own.first, start):
            (low, _), number = order.span(block), block // blocks
            shuffle = here if number == epoch else then
            ids = order.sample_ids(block, shuffle).tolist()
            taken.append(ids[max(0, begin - low) :] if block == own.first else ids)
            known.append((number, shuffle))
        return Resumption(start, own, *known[-1]), taken, known

    def _announce(self) -> None:
        name = f"c{self._names + 1}"
        self.send(ev.Announce(name, random.Random(f"{name} of {self.seed}").choice((0, 0, 1, 3))))

    def _ask(self) -> None:
        consumer = self._pick()
        if consumer is not None and not consumer.asking and consumer.cursor is not None:
            self._ask_for(consumer)

    def _ask_for(self, consumer: FakeConsumer) -> None:
        assert consumer.cursor is not None
        consumer.asking = True
        released = consumer.holds[0] if consumer.holds else consumer.cursor
        want, began = self.rng.randint(1, 3), consumer.began
        cursor = consumer.cursor
        self._tell(consumer, ev.Ask(consumer.name, consumer.session, cursor, released, released, want, began=began))

    def _release(self) -> None:
        consumer = self._pick()
        if consumer is not None and consumer.holds:
            consumer.holds.popleft()
            self._beat(consumer)

    def _beat(self, consumer: FakeConsumer) -> None:
        if consumer.cursor is not None:
            released = consumer.holds[0] if consumer.holds else consumer.cursor
            self._tell(consumer, ev.Heartbeat(consumer.name, consumer.session, released, released))

    def _heartbeats(self) -> None:
        for consumer in list(self.consumers.values()):
            self._beat(consumer)

    def _complete(self) -> None:
        if self.tasks:
            number = self.rng.choice(list(self.tasks))
            self._finish_task(number)

    def _finish_task(self, number: int) -> None:
        task = self.tasks.pop(number)
        self.made_at[number] = self.core.tasks.workers[task.worker].node
        self.made[task.block, task.part] += 1
        # With `keeps_all`, blocks that lack samples are prepared again; in a calm schedule each is prepared once.
        lacks = self.keeps_all and not self.calm and (self.seed + number) % 4 == 0
        self.send(ev.TaskEnded(number, lacks=lacks))

    def _put_off(self) -> None:
        """Storage does not return a sample. The worker becomes free, and the part is retried."""
        if self.tasks:
            number = self.rng.choice(list(self.tasks))
            del self.tasks[number]
            self.send(ev.PutOff(number, "storage is away"))

    def _meet_bug(self) -> None:
        """The code that prepares a part raises an error; its worker lives on."""
        if self.tasks:
            number = self.rng.choice(list(self.tasks))
            del self.tasks[number]
            self.send(ev.TaskFailed(number, "a bug"))

    def _meet_bad_sample(self) -> None:
        if self.tasks:
            number = self.rng.choice(list(self.tasks))
            del self.tasks[number]
            self.send(ev.TaskEnded(number, "a bad sample"))

    def _try_failed_anew(self) -> None:
        """A consumer that received an error for its newest block requests the block again."""
        consumer = self._pick()
        if consumer is None or consumer.asking or not (_holds_newest(consumer) and consumer.epoch_blocks):
            return
        block = self.core.window.find(consumer.stream.first + consumer.holds[-1])
        if block is not None and block.error is not None:
            consumer.go_back()
            # A consumer that got the block before it was lost and failed on retry gets the error first.
            stays = block.is_in_hand or consumer.name not in block.told
            self._ask_for(consumer)
            again = self.core.window.blocks.get(block.number)
            assert (again is block) == stays, "a failed block is prepared again for a consumer that requests it again"

    def _late_word(self) -> None:
        if self.dead_tasks:
            self.send(ev.TaskEnded(self.rng.choice(self.dead_tasks)))

    def _kill_worker(self) -> None:
        if self.workers:
            worker = self.rng.choice(sorted(self.workers))
            self._worker_gone(worker)
            self.send(ev.WorkerDown(worker, "killed"))

    def _node_gone(self) -> None:
        """A node dies with its workers and prepared parts; a new node replaces it."""
        node = self.rng.choice(self.nodes)
        for worker in [w.name for w in self.core.tasks.workers.values() if w.node == node]:
            self._worker_gone(worker)
        self.unreadable.update(task for task, where in self.made_at.items() if where == node)
        self._names += 1
        self.nodes[self.nodes.index(node)] = f"n{self._names}"
        self.send(ev.NodeDown(node, "killed"))

    def _find_unreadable(self) -> None:
        """A consumer cannot read one of its blocks and requests it again."""
        consumer = self._pick()
        if consumer is None or consumer.asking or consumer.cursor is None:
            return
        unread = min(self.rng.randint(0, len(consumer.holds)), len(consumer.epoch_blocks), _held_in_a_row(consumer))
        for _ in range(unread):
            consumer.go_back()
        block = self.core.window.find(consumer.stream.first + consumer.cursor) if unread else None
        if block is not None:
            number = self.rng.randrange(len(block.parts))
            task = block.parts[number].task
            if task not in self.tasks:  # otherwise it is already being prepared again
                self.unreadable.add(task)
            self._tell(consumer, ev.UnreadablePart(consumer.cursor, number, task))
            self._tell(consumer, ev.UnreadablePart(consumer.cursor, number, -1))  # late report of an earlier loss
        self._ask_for(consumer)

    def _retire_worker(self) -> None:
        staying = sorted(self.workers - self.leaving)
        if len(staying) > 1:
            worker = self.rng.choice(staying)
            self.leaving.add(worker)
            self.send(ev.WorkerLeaves(worker))

    def _replace_worker(self) -> None:
        if len(self.workers) < 3:
            self._names += 1
            self._worker_up(f"new{self._names}")

    def _leave(self) -> None:
        consumer = self._pick()
        if consumer is not None:
            del self.consumers[consumer.name]
            successors = self.rng.choice((0, 0, 1, 3))
            self.send(ev.Leave(consumer.name, consumer.session, successors))

    def _crash(self) -> None:
        consumer = self._pick()
        if consumer is not None:
            del self.consumers[consumer.name]

    def _duplicate(self) -> None:
        """The same request arrives twice; the second replaces the first."""
        consumer = self._pick()
        if consumer is not None and consumer.asking and consumer.cursor is not None:
            released = consumer.holds[0] if consumer.holds else consumer.cursor
            began = consumer.began
            cursor = consumer.cursor
            self._tell(consumer, ev.Ask(consumer.name, consumer.session, cursor, released, released, began=began))

    def _skip_epoch(self) -> None:
        """The consumer leaves its loop midway and starts the next epoch."""
        consumer = self._pick()
        if consumer is not None and consumer.epoch_blocks and not consumer.asking and consumer.cursor is not None:
            consumer.begin_epoch()
            consumer.cursor = consumer.own.end

    def _tick(self) -> None:
        self.send(ev.Tick())

    def _tell_paces(self) -> None:
        """Report paces. A trial keeps its pace for a while; prep may be faster or slower than all trials together."""
        self.paces = {name: self.paces.get(name) or self.rng.choice([0.5, 1.0, 1.02, 5.0]) for name in self.consumers}
        if self.paces and self.rng.random() < 0.2:
            del self.paces[self.rng.choice(list(self.paces))]
        paces = tuple(ev.TrialPace((name,), per_s) for name, per_s in self.paces.items())
        self.send(ev.PacesMeasured(paces, self.rng.choice([0.0, 1.0, 5.0, 100.0])))

    # ---- the end ----

    def _finish(self) -> None:
        """With one worker up, each active consumer finishes two more epochs in bounded time.

        One of several may be stuck: alive, holding nothing and requesting nothing.
        """
        if not self.workers - self.leaving:
            self._worker_up("last")
        stuck = self.rng.choice([None, *self.consumers]) if len(self.consumers) > 1 and not self.calm else None
        goals = {name: len(c.finished) + 2 for name, c in self.consumers.items() if name != stuck}
        longest = max(order.blocks_per_epoch for order in self.orders)
        # A pipeline whose parts took seconds gives way to the others for as long, and their parts take no time here.
        patience = 60 if len(self.streams) == 1 else 1_500
        for _ in range(patience * longest * (len(goals) + 2)):
            starved = [c for c in self.consumers.values() if len(c.finished) < goals.get(c.name, 0)]
            if not starved:
                return
            self.now += 0.3
            for consumer in list(self.consumers.values()):
                self._go_on(consumer, asks=consumer.name != stuck)
            for number in list(self.tasks):
                if number in self.tasks:
                    self._finish_task(number)
            self._tick()
            self._flush()
            if not self.workers - self.leaving:
                self._worker_up(f"again{self.now}")
        raise AssertionError(
            f"somebody starved: {[(c.name, c.cursor, explain.wait(self.core, c.name)) for c in starved]}"
        )

    def _go_on(self, consumer: FakeConsumer, *, asks: bool) -> None:
        consumer.holds.clear()
        if asks and not consumer.asking:
            consumer.asking = True
            assert consumer.cursor is not None
            cursor, began = consumer.cursor, consumer.began
            self._tell(consumer, ev.Ask(consumer.name, consumer.session, cursor, cursor, cursor, want=2, began=began))
        else:
            self._beat(consumer)
        self._flush()

    def _check_ledger(self) -> None:
        for consumer in self.consumers.values():
            for samples in consumer.finished:
                assert sorted(samples) == [*range(self.order.num_samples)], f"{consumer.name} took {samples}"
        own = {block for block, _ in self.made if block < 1 << STREAM_BITS}
        later = {block for block in own if self.keeps_all and block >= self.blocks_per_epoch}
        assert not later, f"made for a later epoch, although all are the same: {later}"
        if self.calm:
            twice = {part: n for part, n in self.made.items() if n > 1}
            assert not twice, f"made more than once without need: {twice}"


def _held_in_a_row(consumer: FakeConsumer) -> int:
    """Return how many of the newest blocks are held, without a copy between them."""
    cursor = consumer.cursor or 0
    return next((n for n, block in enumerate(reversed(consumer.holds)) if block != cursor - 1 - n), len(consumer.holds))


def _holds_newest(consumer: FakeConsumer) -> bool:
    """Return whether the newest block is still held, and was not a copy."""
    return consumer.cursor is not None and bool(consumer.holds) and consumer.holds[-1] == consumer.cursor - 1


def _as_always(nbytes: int, _: int) -> int:
    return nbytes


def _own_epoch(first: int, order: SampleOrder) -> OwnEpoch:
    """Return the epoch of a consumer that begins it at block ``first``."""
    return OwnEpoch.at(first, order.blocks_per_epoch, order.block_samples)


def run_some(
    seeds: Iterable[int], steps: int = 80, *, calm: bool = False, keeps_all: bool = False, pipelines: int = 1
) -> None:
    """Run a `Simulation` for each seed.

    Raises:
        AssertionError: at the first broken promise.
    """
    for seed in seeds:
        Simulation(seed, steps, calm=calm, keeps_all=keeps_all, pipelines=pipelines).run()


def _told(scene: tuple[float, ev.Event] | ev.Instruction) -> str:
    """Format an event with its time, or an instruction."""
    return f"{scene[0]:7.2f} {scene[1]}" if isinstance(scene, tuple) else f"            -> {scene}"
