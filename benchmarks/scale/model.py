"""Simulation of a feed with the service's staging core, on virtual time.

The service's code makes the decisions: `mbaas.core.staging.state.StagingState` stages blocks,
`mbaas.client.position.Position` makes the requests of trials, and `mbaas.samples.placement.Placement` gives samples
their homes. This module models the
costs: CPU seconds of the coordinator, workers and trials, storage, and links.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from math import inf

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.clock import Clock, Cores, Links, Thread
from benchmarks.scale.system import Costs, System, ask_cost_s, cut_cost_s, part_cost_s
from mbaas.client.position import Position
from mbaas.core.layout import CREDIT, Layout, slack_blocks
from mbaas.core.staging import events as ev
from mbaas.core.staging.state import StagingState
from mbaas.samples.fields import IMAGE, LABEL, Field
from mbaas.samples.order import SampleOrder, Shuffle
from mbaas.samples.placement import BlockPart, NodeWeight, Placement
from mbaas.settings import FeedSettings, Timeouts
from mbaas.wire.samples import SampleSpec

SESSION = 1
"""Session number of every trial: each joins once."""

NEVER_S = 1e18
"""A duration that never passes, in seconds."""


@dataclass(frozen=True)
class Flow:
    """Result of a simulation.

    Attributes:
        samples_per_s: rate of each trial.
        busy: server -> fraction of the time that its busiest instance was busy, 0 to 1.
    """

    samples_per_s: float
    busy: dict[str, float]

    @property
    def full(self) -> str:
        """The busiest server: more of it would help."""
        return max(self.busy, key=lambda name: self.busy[name])


def simulate(system: System, costs: Costs, *, blocks: int = 60, warm_blocks: int = 12) -> Flow:
    """Run the feed until the slowest trial has consumed ``warm_blocks + blocks`` blocks; the last ``blocks`` count.

    The rate is the slope of a line fitted to all ends of blocks. Blocks arrive in groups, so the first and the last end
    alone are not enough.
    """
    feed = _Feed(system, costs)
    feed.run(warm_blocks)
    began_s, began = feed.clock.now, feed.busy_s()
    feed.run(warm_blocks + blocks)
    seconds = feed.clock.now - began_s
    busy = {name: float((s - began[name]).max()) / seconds for name, s in feed.busy_s().items()}
    ends = np.array(feed.ends_s[warm_blocks - 1 :])
    slope = np.polynomial.Polynomial.fit(ends, np.arange(len(ends)), 1).convert().coef[1]  # blocks per second
    return Flow(float(slope) * system.block_samples, busy)


def layout_of(system: System) -> tuple[Layout, FeedSettings]:
    """Return the layout that the service would have, and its settings."""
    spec = SampleSpec(Field(IMAGE, (round(system.sample_bytes),), "uint8"), (LABEL,))
    order = SampleOrder(system.samples, system.seed, system.block_samples)
    slack = slack_blocks(system.staged_blocks, system.ahead_blocks)
    layout = Layout(order, spec, system.ahead_blocks, readahead_bytes=0, slack_blocks=slack)
    settings = FeedSettings(
        name="model",
        batch_size=system.block_samples,
        cache_bytes=0,
        staging_bytes=system.staged_blocks * system.block_samples * spec.nbytes,
        prep_workers=system.nodes * system.workers,
        # there are no deaths and no timer events, so deadlines have no effect
        timeouts=Timeouts(lease_s=NEVER_S, patience_s=NEVER_S, prep_s=NEVER_S),
    )
    return layout, settings


@dataclass
class _Block:
    """A block that was cut, and its progress.

    Attributes:
        samples: float64[nodes], samples with their home on each node.
        stored_until: float64[nodes], the time when a node's missing bytes have arrived from storage.
        made: float64[nodes], prepared samples on each node, which need not be their home.
        parts: number of parts.
        pulled: node -> the time when all parts are there.
    """

    samples: NDArray[np.float64]
    stored_until: NDArray[np.float64]
    made: NDArray[np.float64]
    parts: int
    pulled: dict[int, float] = field(default_factory=dict)

    def is_remote(self, node: int) -> bool:
        """Return whether another node prepared a part."""
        return bool(self.made.sum() > self.made[node])


class _Feed:
    """One run: all processes, and the blocks that are staged or being made, by their number in the feed."""

    def __init__(self, system: System, costs: Costs) -> None:
        self.system, self.costs = system, costs
        self.layout, self.settings = layout_of(system)
        self.clock = clock = Clock()
        self.cores = cores = Cores(clock, system.cores, taken=system.taken_cores)
        self.daemons = Thread(clock, cores, servers=system.nodes)
        self.storage = Links(clock, system.nodes, system.storage_bytes_per_s)
        self.link_in = Links(clock, system.nodes, system.link_bytes_per_s)
        self.link_out = Links(clock, system.nodes, system.link_bytes_per_s)
        weights = tuple(NodeWeight(f"node-{i:04}", 1) for i in range(system.nodes))
        self.placement = Placement(1, weights, (inf,) * system.nodes)
        self.names = self.placement.nodes
        self.node = {name: number for number, name in enumerate(self.names)}
        self.blocks: dict[int, _Block] = {}
        self.workers = {
            f"{name}.{i}": _Worker(self, number) for name, number in self.node.items() for i in range(system.workers)
        }
        self.coordinator = _Coordinator(self)
        self.trials = [_Trial(self, number) for number in range(system.trials)]
        self.finished = [0] * system.trials
        self.ends_s: list[float] = []  # times when the slowest trial had consumed the first block, the second, ...
        for trial in self.trials:
            trial.start()

    def run(self, blocks: int) -> None:
        self.clock.run(lambda: len(self.ends_s) >= blocks)

    def used_up(self, trial: int) -> None:
        self.finished[trial] += 1
        if self.finished[trial] == len(self.ends_s) + 1 and min(self.finished) > len(self.ends_s):
            self.ends_s.append(self.clock.now)

    def cut(self, number: int) -> list[BlockPart]:
        """Find the homes of a block's samples, and read their missing bytes from storage.

        Reading starts immediately, as in a cache node, which reads ahead.
        """
        first, end = self.layout.order.span(number)
        nodes = self.system.nodes
        if self.system.even:
            samples = np.full(nodes, (end - first) / nodes)
        else:
            homes = self.placement.of(self.layout.order.sample_ids(number))
            samples = np.bincount(homes, minlength=nodes).astype(np.float64)
        stored_until = self.storage.carry(samples * (self.system.stored_share * self.system.raw_bytes))
        present = np.flatnonzero(samples).tolist()
        self.blocks[number] = _Block(samples, stored_until, np.zeros(nodes), len(present))
        return [BlockPart(self.names[home], self.placement.version) for home in present]

    def pull(self, number: int, node: int) -> float:
        """Return when all parts of a block are on a node; the first trial there that asks triggers the pull."""
        block = self.blocks[number]
        if node not in block.pulled:
            nbytes = block.made * self.system.sample_bytes
            nbytes[node] = 0.0
            ends = self.link_out.carry(nbytes)
            arrives = max(float(ends[nbytes > 0].max(initial=0.0)), self.link_in.carry_one(node, float(nbytes.sum())))
            waits_s = self.costs.pull_s if self.system.nodes > 1 else 0.0
            self.daemons.do((self.system.nodes - 1) * self.costs.daemon_pull_s, lambda: None)
            block.pulled[node] = max(arrives, self.clock.now + waits_s)
        return max(self.clock.now, block.pulled[node])

    def busy_s(self) -> dict[str, NDArray[np.float64]]:
        """Return the busy seconds of each instance, by kind of server."""
        found = {
            "coordinator": [self.coordinator.thread.busy_s()],
            "fetch": [worker.fetcher.busy_s() for worker in self.workers.values()],
            "prep": [worker.preparer.busy_s() for worker in self.workers.values()],
            "trial": [trial.thread.busy_s() for trial in self.trials],
            "cores": [self.cores.busy_s()],
        }
        links = {"storage": self.storage, "link in": self.link_in, "link out": self.link_out}
        return {name: np.array(s) for name, s in found.items()} | {name: one.busy_s() for name, one in links.items()}


class _Coordinator:
    """The staging core, and the thread that all calls to it share."""

    def __init__(self, feed: _Feed) -> None:
        self._feed = feed
        self.thread = Thread(feed.clock, feed.cores)
        self._cuts = 0
        self._part_s = part_cost_s(feed.system, feed.costs)
        self._ask_s = ask_cost_s(feed.system, feed.costs)
        self._cut_s = cut_cost_s(feed.system, feed.costs)
        self._core = StagingState(
            feed.layout.limits(feed.settings),
            feed.layout.order.blocks_per_epoch,
            feed.layout.block_bytes,
            self._cut,
            block_samples=feed.system.block_samples,
        )
        for name, worker in feed.workers.items():
            node = feed.names[worker.node]
            self._core.handle(ev.WorkerUp(name, CREDIT, node), feed.clock.now)

    def _cut(self, block: int, _shuffle: Shuffle) -> list[BlockPart]:
        self._cuts += 1
        return self._feed.cut(block)

    def join(self, consumer: str) -> ev.Admitted:
        """Return a trial's start. Joining is free here, because it happens once."""
        for instruction in self._core.handle(ev.Join(consumer, SESSION), self._feed.clock.now):
            if isinstance(instruction, ev.Admitted):
                return instruction
        raise AssertionError(f"{consumer} was not admitted")

    def ask(self, event: ev.Ask) -> None:
        self.thread.do(self._ask_s, partial(self._handle, event))

    def prepared(self, task: int) -> None:
        self.thread.do(self._part_s, partial(self._handle, ev.TaskEnded(task)))

    def _handle(self, event: ev.Ask | ev.TaskEnded) -> None:
        """Let the core decide, and carry out its instructions after the time of the cuts.

        The service computes cuts during the decision. Virtual time does not advance then, so their time is added later.
        """
        self._cuts = 0
        instructions = self._core.handle(event, self._feed.clock.now)
        if self._cuts and self._cut_s:
            self.thread.do(self._cuts * self._cut_s, partial(self._carry_out, instructions))
        else:
            self._carry_out(instructions)

    def _carry_out(self, instructions: list[ev.Instruction]) -> None:
        for instruction in instructions:
            match instruction:
                case ev.Prepare():
                    self._feed.workers[instruction.worker].make(instruction, self)
                case ev.Deliver():
                    self._deliver(instruction)
                case ev.DropBlock():
                    del self._feed.blocks[instruction.block]
                case _:
                    raise AssertionError(f"nobody dies in the model, but the core says {instruction}")

    def _deliver(self, delivery: ev.Deliver) -> None:
        costs, parts = self._feed.costs, sum(self._feed.blocks[b].parts for b in delivery.blocks)
        trial = self._feed.trials[int(delivery.consumer)]
        blocks = tuple(_Delivered(b, self._core.epochs.shuffle_of(b), delivery.as_copy) for b in delivery.blocks)
        cpu_s = len(blocks) * costs.delivery_s + parts * costs.ref_s
        self.thread.do(cpu_s, partial(trial.take, blocks))


class _Worker:
    """A prep worker: it fetches the bytes of one part while it prepares another."""

    def __init__(self, feed: _Feed, node: int) -> None:
        self._feed, self.node = feed, node
        self.fetcher = Thread(feed.clock, feed.cores)
        self.preparer = Thread(feed.clock, feed.cores)
        self._fetch_s = feed.costs.fetch_s + feed.costs.own_cuts * cut_cost_s(feed.system, feed.costs)

    def make(self, order: ev.Prepare, coordinator: _Coordinator) -> None:
        """Make a part as soon as its bytes are on the node; bytes of another home node cross the link first."""
        block = self._feed.blocks[order.block]
        home = self._feed.node[order.block_part.home]
        samples = float(block.samples[home])

        def cross() -> None:
            nbytes = samples * self._feed.system.raw_bytes
            ends = self._feed.link_out.carry_one(home, nbytes), self._feed.link_in.carry_one(self.node, nbytes)
            self._at(max(ends), fetch)

        def fetch() -> None:
            self.fetcher.do(self._fetch_s, prepare)

        def prepare() -> None:
            prep_s = samples * self._feed.system.prep_s
            cpu_s, idle_s = (0.0, prep_s) if self._feed.system.prep_sleeps else (prep_s, 0.0)
            self.preparer.do(cpu_s, made, idle_s=idle_s)

        def made() -> None:
            block.made[self.node] += samples
            self._feed.daemons.do(self._feed.costs.daemon_part_s, lambda: None)
            coordinator.prepared(order.task)

        self._at(float(block.stored_until[home]), fetch if home == self.node else cross)

    def _at(self, when_s: float, then: Callable[[], None]) -> None:
        if when_s > self._feed.clock.now:
            self._feed.clock.after(when_s - self._feed.clock.now, then)
        else:
            then()


@dataclass(frozen=True)
class _Delivered:
    """A delivered block."""

    number: int
    shuffle: Shuffle
    as_copy: bool


class _Trial(Position[_Delivered]):
    """A consumer: it waits, pulls and works, and meanwhile has the next block pulled.

    `Position` decides its requests and their time. Like a loader, a trial processes answers when it needs a block. If
    blocks come from other nodes, a loader also does so between minibatches, which are short: a trial does so at once.

    Attributes:
        asks: whether a call is in flight, or its answer has not been processed.
        answer: the delivered blocks.
        are_remote: whether the blocks processed last have parts on other nodes.
    """

    def __init__(self, feed: _Feed, number: int) -> None:
        super().__init__(feed.system.want)
        self._feed, self._name = feed, str(number)
        self._number, self._node = number, number % feed.system.nodes
        self.thread = Thread(feed.clock, feed.cores)
        self.asks = self.are_remote = self._waits = self._works = False
        self.answer: tuple[_Delivered, ...] = ()

    def start(self) -> None:
        """Join, and take the first block."""
        admitted, system = self._feed.coordinator.join(self._name), self._feed.system
        self.enter(admitted.cursor, admitted.own_epoch, self._feed.layout.order.blocks_per_epoch, system.block_samples)
        self._go_on()

    def _ask(self) -> None:
        self.asks = True
        released, number = self.released(), self.next_call()
        self._feed.coordinator.ask(
            ev.Ask(
                self._name, SESSION, self.following, released, self.done, self.want, number, self.began, self.unheld()
            )
        )

    def _ask_ahead(self) -> None:
        if not self.asks and self.runs_short(are_remote=self.are_remote):
            self._ask()

    def take(self, blocks: tuple[_Delivered, ...]) -> None:
        self.answer = blocks
        if self._waits:
            self._go_on()
        elif self._works:
            self._look_ahead()

    def _take_answer(self) -> None:
        if self.answer and not self.received:
            self.take_in(self.answer)
            self.are_remote = any(self._feed.blocks[block.number].is_remote(self._node) for block in self.answer)
            self.asks, self.answer = False, ()

    def _go_on(self) -> None:
        self._ask_ahead()
        self._take_answer()
        self._waits = not self.received
        if not self._waits:
            arrives = self._feed.pull(self.cursor, self._node)
            self._feed.clock.after(arrives - self._feed.clock.now, self._open)
        elif not self.asks:
            self._ask()

    def _open(self) -> None:
        """Open the block and work on it; release all blocks before it."""
        feed, delivered = self._feed, self.received[0]
        number, block = delivered.number, feed.blocks[delivered.number]
        if not delivered.as_copy:
            self.hold(number, lambda: self._works and self.cursor == number + 1)
        self._works = True
        self.move_on()
        self._ask_ahead()
        self._look_ahead()
        cpu_s = feed.costs.open_s + block.parts * feed.costs.open_part_s
        first, last = feed.layout.order.span(number)
        self.thread.do(cpu_s, self._used_up, idle_s=(last - first) * feed.system.step_s)

    def _look_ahead(self) -> None:
        """Start pulling the next block, if it is known and on other nodes."""
        if not self.are_remote:
            return
        if self.answer and not self.received:
            self._take_answer()
            self._ask_ahead()
        if self.received:
            self._feed.pull(self.cursor, self._node)

    def _used_up(self) -> None:
        self._works = False
        if self.cursor % self._feed.layout.order.blocks_per_epoch == 0:
            self.done = self.cursor
        self._feed.used_up(self._number)
        self._go_on()
