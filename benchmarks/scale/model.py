"""The simulation of a feed that `benchmarks.scale.system` describes."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from benchmarks.scale.clock import Clock, Cores, Links, Thread
from benchmarks.scale.system import Costs, System, ask_cost_s, cut_cost_s, part_cost_s


@dataclass(frozen=True)
class Flow:
    """What the model says of a system.

    Attributes:
        samples_per_s: that every trial gets.
        busy: server -> the share of the time that its busiest instance was at work, 0 to 1.
    """

    samples_per_s: float
    busy: dict[str, float]

    @property
    def full(self) -> str:
        """The server that is busiest: what more of would help."""
        return max(self.busy, key=lambda name: self.busy[name])


def simulate(system: System, costs: Costs, *, blocks: int | None = None, warm_blocks: int = 12) -> Flow:
    """Run the feed until the slowest trial has used up ``warm_blocks + blocks`` blocks; the last ``blocks`` count.

    By default these are 60, or 40 for each lane: lanes finish blocks out of turn, which blurs the ends of what counts.
    """
    feed = _Feed(system, costs)
    blocks = max(60, 40 * system.lanes) if blocks is None else blocks
    feed.run(warm_blocks)
    began_s, began = feed.clock.now, feed.busy_s()
    feed.run(warm_blocks + blocks)
    seconds = feed.clock.now - began_s
    busy = {name: float((s - began[name]).max()) / seconds for name, s in feed.busy_s().items()}
    return Flow(blocks * system.block_samples / seconds, busy)


class _Feed:
    """One run. Blocks are numbered from 0; ``index`` counts the blocks of a lane."""

    def __init__(self, system: System, costs: Costs) -> None:
        self.system, self.costs = system, costs
        self.clock = clock = Clock()
        self.cores = cores = Cores(clock, system.cores, taken=system.taken_cores)
        nodes = range(system.nodes)
        self.daemons = Thread(clock, cores, servers=system.nodes)
        self.fetchers = [Thread(clock, cores, system.workers) for _ in nodes]
        self.preparers = [Thread(clock, cores, system.workers) for _ in nodes]
        self.storage = Links(clock, system.nodes, system.storage_bytes_per_s)
        self.link_in = Links(clock, system.nodes, system.link_bytes_per_s)
        self.link_out = Links(clock, system.nodes, system.link_bytes_per_s)
        self.parts = _Cutter(system)
        self.pulled: dict[int, dict[int, float]] = defaultdict(dict)
        self.lanes = [_Lane(self, number) for number in range(system.lanes)]
        self.trials = [_Trial(self, number) for number in range(system.trials)]
        self.finished = [0] * system.trials
        self.least_finished = 0
        for lane in self.lanes:
            lane.grant()
        for trial in self.trials:
            trial.start()

    def run(self, blocks: int) -> None:
        """Until every trial has used up so many blocks."""
        self.clock.run(lambda: self.least_finished >= blocks)

    def used_up(self, trial: int) -> None:
        self.finished[trial] += 1
        if self.finished[trial] == self.least_finished + 1:
            self.least_finished = min(self.finished)
            for block in [b for b in self.pulled if b < self.least_finished]:
                del self.pulled[block]

    def pull(self, block: int, node: int) -> float:
        """When all parts of a block are on a node; the first trial there that asks has them pulled."""
        pulled = self.pulled[block]
        if node not in pulled:
            nbytes = self.parts.of(block) * self.system.sample_bytes
            nbytes[node] = 0.0
            ends = self.link_out.carry(nbytes)
            arrives = max(float(ends[nbytes > 0].max(initial=0.0)), self.link_in.carry_one(node, float(nbytes.sum())))
            waits_s = self.costs.pull_s if self.system.nodes > 1 else 0.0
            self.daemons.do((self.system.nodes - 1) * self.costs.daemon_pull_s, lambda: None)
            pulled[node] = max(arrives, self.clock.now + waits_s)
        return max(self.clock.now, pulled[node])

    def busy_s(self) -> dict[str, NDArray[np.float64]]:
        """Server -> seconds that each of its instances was busy so far."""
        found = {
            "coordinator": [lane.thread.busy_s() for lane in self.lanes],
            "fetch": [thread.busy_s() for thread in self.fetchers],
            "prep": [thread.busy_s() for thread in self.preparers],
            "trial": [trial.thread.busy_s() for trial in self.trials],
            "cores": [self.cores.busy_s()],
        }
        links = {"storage": self.storage, "link in": self.link_in, "link out": self.link_out}
        return {name: np.array(s) for name, s in found.items()} | {name: one.busy_s() for name, one in links.items()}


class _Cutter:
    """How many samples of each block have their home on each node."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._shares = np.full(system.nodes, 1 / system.nodes)

    def of(self, block: int) -> NDArray[np.float64]:
        """float64[nodes], the same whenever it is asked for."""
        if self._system.even:
            return self._shares * self._system.block_samples
        rng = np.random.default_rng([self._system.seed, block])
        return rng.multinomial(self._system.block_samples, self._shares).astype(np.float64)


class _Lane:
    """A coordinator: every ``lanes``-th block, from ``number`` on."""

    def __init__(self, feed: _Feed, number: int) -> None:
        system = feed.system
        self._feed, self._number = feed, number
        self.thread = Thread(feed.clock, feed.cores)
        self._ahead = max(2, -(-system.ahead_blocks // system.lanes))
        self._staged = max(3, system.staged_blocks // system.lanes)
        self._granted = 0
        self._delivered, self._released = _Slowest(system.trials), _Slowest(system.trials)
        self._open: dict[int, int] = {}  # index -> parts that are not made yet
        self._ready: set[int] = set()
        self._parked: dict[int, list[_Trial]] = defaultdict(list)
        self._queues: list[deque[tuple[int, float]]] = [deque() for _ in range(system.nodes)]
        self._credit = [max(1, system.credit * system.workers // system.lanes)] * system.nodes
        self._part_s, self._ask_s = part_cost_s(system, feed.costs), ask_cost_s(system, feed.costs)
        self._delivery_s = feed.costs.delivery_s + system.nodes * feed.costs.ref_s

    def block(self, index: int) -> int:
        return index * self._feed.system.lanes + self._number

    # ---- making ----

    def grant(self) -> None:
        """Begin all blocks that may be begun."""
        while self._granted < min(self._delivered.least + self._ahead, self._released.least + self._staged):
            index, self._granted = self._granted, self._granted + 1
            self.thread.do(cut_cost_s(self._feed.system, self._feed.costs), partial(self._cut, index))

    def _cut(self, index: int) -> None:
        samples = self._feed.parts.of(self.block(index))
        system = self._feed.system
        arrives = self._feed.storage.carry(samples * (system.stored_share * system.raw_bytes))
        nodes = np.flatnonzero(samples).tolist()
        self._open[index] = len(nodes)
        for node in nodes:
            there = partial(self._there, index, node, float(samples[node]))
            if system.stored_share:
                self._feed.clock.after(float(arrives[node]) - self._feed.clock.now, there)
            else:
                there()

    def _there(self, index: int, node: int, samples: float) -> None:
        """A part's bytes are on its node."""
        self._queues[node].append((index, samples))
        self._send(node)

    def _send(self, node: int) -> None:
        """The next part of a node goes out, if its worker has credit."""
        if not self._credit[node] or not self._queues[node]:
            return
        self._credit[node] -= 1
        index, samples = self._queues[node].popleft()
        feed = self._feed
        fetch_s = feed.costs.fetch_s + feed.costs.own_cuts * cut_cost_s(feed.system, feed.costs)
        prep_s = samples * feed.system.prep_s
        cpu_s, idle_s = (0.0, prep_s) if feed.system.prep_sleeps else (prep_s, 0.0)

        def prepare() -> None:
            feed.preparers[node].do(cpu_s, partial(self._prepared, index, node), idle_s=idle_s)

        feed.fetchers[node].do(fetch_s, prepare)

    def _prepared(self, index: int, node: int) -> None:
        self._feed.daemons.do(self._feed.costs.daemon_part_s, lambda: None)
        self.thread.do(self._part_s, partial(self._heard, index, node))

    def _heard(self, index: int, node: int) -> None:
        self._credit[node] += 1
        self._send(node)
        self._open[index] -= 1
        if self._open[index] == 0:
            del self._open[index]
            self._ready.add(index)
            for trial in self._parked.pop(index, []):
                self._deliver(trial, index)

    # ---- handing out ----

    def ask(self, trial: _Trial, index: int, released: int) -> None:
        """A call of a trial arrives: it wants blocks from ``index`` on, and has let go of all below ``released``."""
        self.thread.do(self._ask_s, partial(self._answer, trial, index, released))

    def _answer(self, trial: _Trial, index: int, released: int) -> None:
        self._released.advance(trial.number, released)
        if index in self._ready:
            self._deliver(trial, index)
        else:
            self._parked[index].append(trial)
        self.grant()

    def _deliver(self, trial: _Trial, first: int) -> None:
        end = first
        while end - first < self._feed.system.want and end in self._ready:
            end += 1
        self._delivered.advance(trial.number, end)
        self.thread.do((end - first) * self._delivery_s, partial(self._delivered_to, trial, first, end))

    def _delivered_to(self, trial: _Trial, first: int, end: int) -> None:
        self._ready = {index for index in self._ready if index >= self._delivered.least}
        trial.take(self._number, first, end)
        self.grant()


class _Slowest:
    """The least of many numbers that only grow."""

    def __init__(self, number: int) -> None:
        self._values = [0] * number
        self._behind = number
        self.least = 0

    def advance(self, who: int, value: int) -> None:
        before, self._values[who] = self._values[who], max(value, self._values[who])
        if before == self.least < self._values[who]:
            self._behind -= 1
            if not self._behind:
                self.least = min(self._values)
                self._behind = self._values.count(self.least)


class _Trial:
    """A consumer with a call in flight ahead in each lane; it waits, pulls, works."""

    def __init__(self, feed: _Feed, number: int) -> None:
        self._feed, self.number = feed, number
        self._node = number % feed.system.nodes
        self.thread = Thread(feed.clock, feed.cores)
        lanes = feed.system.lanes
        self._received = [0] * lanes
        self._held = [0] * lanes  # delivered and not yet opened
        self._in_flight = [False] * lanes
        self._next = 0
        self._waits = False

    def start(self) -> None:
        for lane in range(self._feed.system.lanes):
            self._ask(lane)
        self._go_on()

    def _ask(self, lane: int) -> None:
        self._in_flight[lane] = True
        released = max(0, -(-(self._next - lane) // self._feed.system.lanes))
        self._feed.lanes[lane].ask(self, self._received[lane], released)

    def take(self, lane: int, first: int, end: int) -> None:
        """Blocks come in."""
        self._in_flight[lane] = False
        self._received[lane] = end
        self._held[lane] += end - first
        if self._waits:
            self._go_on()

    def _go_on(self) -> None:
        lane = self._next % self._feed.system.lanes
        self._waits = not self._held[lane]
        if not self._waits:
            arrives = self._feed.pull(self._next, self._node)
            self._feed.clock.after(arrives - self._feed.clock.now, self._open)

    def _open(self) -> None:
        system, costs = self._feed.system, self._feed.costs
        lane = self._next % system.lanes
        self._held[lane] -= 1
        if not self._held[lane] and not self._in_flight[lane]:
            self._ask(lane)
        cpu_s = costs.open_s + system.nodes * costs.open_part_s
        self.thread.do(cpu_s, self._used_up, idle_s=system.block_samples * system.step_s)

    def _used_up(self) -> None:
        self._next += 1
        self._feed.used_up(self.number)
        self._go_on()
