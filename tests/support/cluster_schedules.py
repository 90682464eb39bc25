"""A simulated cluster in virtual time: nodes, prep workers, cache nodes and the shell around the supervisor.

`Cluster` plays Ray, the nodes, the actors and the coordinator's shell. Replies arrive late, twice or never. Workers,
cache nodes, nodes and the coordinator die, one by one or together, until none is left. After an actor is killed, its
name stays taken for a while. Samples get the home nodes that `mbaas.samples.placement` assigns. Everything that cuts
blocks into parts, or prepares a part, has its own `PlacementHistory`.

`support.system_schedules` adds the staging core and the consumers.
"""

from __future__ import annotations

import abc
import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervised import WorkerPhase
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.core.layout import CREDIT
from mbaas.core.staging import events as staging
from mbaas.errors import PlacementUnknownError
from mbaas.samples.order import Ids
from mbaas.samples.placement import NodeWeight, PartRequest, Placement, PlacementHistory
from support.orders import Order

TICK_S = 8.0
"""Period of the supervisor's ticks. The real coordinator ticks far more often; nothing depends on it."""

START_S = 30.0
"""Short enough that a start without a report fails within a schedule."""

TAKE_IN_S = 20.0
"""A worker that returns, or comes from another feed, is given up after this long without an answer."""

ORDERED_S = 20.0
"""An order reaches a node that is briefly cut off within this time, if its sender stays alive."""

BLOCK_SAMPLES = 4

STAGING_BYTES, SMALL_ROOM_BYTES = 100, 30
"""Staging budget, and the capacity of nodes with small object stores."""


class Homes(Placement, frozen=True):
    """A placement with memory for all samples, computed once for all schedules."""

    def homes_and_kept(self, sample_ids: Ids) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        return _homes(self.node_weights, tuple(sample_ids.tolist()))


@lru_cache(maxsize=50_000)
def _homes(node_weights: tuple[NodeWeight, ...], ids: tuple[int, ...]) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    return Placement(0, node_weights, (math.inf,) * len(node_weights)).homes_and_kept(np.array(ids, np.int64))


class Staging(Protocol):
    """The staging core in one life of the coordinator."""

    @property
    def workers(self) -> dict[str, str]:
        """Name -> node of the workers in use."""

    def tell(self, event: staging.Event) -> object:
        """Handle an event."""

    def tick(self) -> None:
        """Handle the passing of time."""


@dataclass
class Actor:
    """A process: a worker or a cache node.

    Attributes:
        node: its node; "" while it waits for a CPU.
        hangs_until: virtual time until which it answers nothing.
        is_ours: True if this feed started it; otherwise it ends with its owner.
        origin: name of a borrowed worker after a restart of the coordinator.
        placements: placements that a worker received.
    """

    node: str = ""
    hangs_until: float = 0.0
    is_ours: bool = True
    origin: str = ""
    placements: PlacementHistory | None = None


class Cluster(abc.ABC):
    """A random schedule of a cluster; subclasses implement staging.

    Args:
        seed: determines everything.
        faults: number of faults to draw.

    Attributes:
        now: virtual time in seconds.
        life: number of the coordinator's process. Messages to a dead process are lost.
        is_down: True while the coordinator is dead and not yet restarted.
        is_peaceful: True once all faults are over.
        service: staging in this life of the coordinator.
        placements: placements used to cut blocks.
        worker_deaths: workers that died or hung so far.
    """

    supervisor: Supervisor
    placements: PlacementHistory
    service: Staging

    def __init__(self, seed: int, faults: int) -> None:
        self.rng = random.Random(seed)
        self.seed, self.faults = seed, faults
        self.now = 0.0
        self.story: deque[object] = deque(maxlen=400)
        blocks = self.rng.choice([1, 2, 3, 4, 8])
        self.order = Order(blocks * BLOCK_SAMPLES - self.rng.choice([0, 1, 3]), 0, BLOCK_SAMPLES)
        self.nodes = {f"node-{i}": self.rng.randint(1, 3) for i in range(self.rng.randint(1, 3))}  # -> CPUs
        self.dead_nodes: set[str] = set()
        self.draining: set[str] = set()
        self.workers: dict[str, Actor] = {}
        self.caches: dict[tuple[str, int], Actor] = {}
        self.lent: dict[object, Actor] = {}
        self.offered: dict[object, Actor] = {}
        self.reported_gone: set[str] = set()
        self._silent_lent: dict[str, Actor] = {}  # lent workers; neither they nor their borrower answer
        self._ended_caches: list[tuple[float, tuple[str, int], Actor]] = []
        self.taken_names: dict[str, float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._versions = 0
        self._tick_at = TICK_S
        self.worker_deaths = 0
        self.life = 0
        self.is_down = self.is_peaceful = False
        self._wanted = self.rng.randint(1, 4)
        # Drawn by name and from a separate generator, so that existing seeds keep their schedules.
        self._small_share = random.Random(f"stores {seed}").choice([0.0, 0.0, 0.0, 0.3, 1.0])
        self._draws = random.Random(f"caches {seed}")
        self._kept: dict[str, tuple[float, float]] = {}  # node -> bytes that its cache holds, and its capacity

    # ---- the coordinator's shell ----

    def _begin(self, event: ev.Begin) -> None:
        self.life += 1
        self.is_down = False
        self.supervisor = Supervisor(own=self._wanted, credit=CREDIT, start_s=START_S, staging_bytes=STAGING_BYTES)
        self.placements = PlacementHistory(self.order)
        self._asked: dict[int, Placement] = {}  # version -> placement; workers may have received it or not
        self.service = self.open_service()
        self.send(event)

    @abc.abstractmethod
    def open_service(self) -> Staging:
        """Open staging for this life of the coordinator."""

    def send(self, event: ev.Event) -> None:
        """Pass an event to the supervisor and carry out its instructions. A dead coordinator ignores events."""
        if self.is_down:
            return
        if not isinstance(event, ev.Tick):
            self.story.append((round(self.now, 2), event))
        for instruction in self.supervisor.handle(event, self.now):
            self.story.append(instruction)
            self._carry_out(instruction)
        self.check()

    def later(self, action: Callable[[], None], least_s: float = 0.01, most_s: float = 1.0) -> None:
        heapq.heappush(self._queue, (self.now + self.rng.uniform(least_s, most_s), next(self._count), action))

    def _reply(self, event: ev.Event, most_s: float = 1.0) -> None:
        """Report to this life's coordinator: soon, late, twice or never."""
        life, luck = self.life, self.rng.random()

        def tell() -> None:
            if self.life == life:
                self.send(event)

        if self.is_peaceful or luck > 0.15:
            self.later(tell, most_s=most_s)
        elif luck > 0.10:
            self.later(tell, 20.0, 200.0)
        elif luck > 0.05:
            self.later(tell)
            self.later(tell, 0.01, 100.0)

    def _carry_out(self, instruction: ev.Instruction) -> None:
        match instruction:
            case ev.StartWorker():
                self._start_worker(instruction.worker)
            case ev.TakeIn():
                self._take_in(instruction)
            case ev.EndWorker():
                # Also kill a worker that another feed is about to take: the outcome is not yet known here.
                places = (self.workers, self.offered, self.lent, self._silent_lent)
                if any(place.pop(instruction.worker, None) for place in places):
                    self.taken_names[instruction.worker] = self.now + self.rng.choice([0.0, 5.0])
            case ev.BriefWorker():
                self._brief(instruction)
            case ev.HandOver():
                self._hand_over(instruction)
            case ev.StartCache():
                self._start_cache(instruction)
            case ev.ProbeCache():
                self._probe(instruction)
            case ev.EndCache():
                ended = instruction.node, instruction.generation
                if (cache := self.caches.pop(ended, None)) is not None:
                    self._ended_caches.append((self.now, ended, cache))
            case ev.MovePlacement():
                self._move(instruction)
            case ev.UsePlacement():
                self.placements.add(self._asked[instruction.version])
            case ev.VacateNode():
                self._reply(ev.NodeVacated(instruction.node, *self.rng.choice([(0, 0), (9, 0), (9, 9), (0, 9)])), 30.0)
            case ev.Forward():
                self.service.tell(instruction.event)
            case ev.EndLent():
                self.lent.pop(instruction.key, None)
            case ev.ReportLentGone():
                self.reported_gone.add(instruction.worker)
            case ev.RefuseOffer() | ev.Note():
                pass

    def _start_worker(self, name: str) -> None:
        if self.taken_names.get(name, -1.0) > self.now or name in self.workers:
            self._reply(ev.StartFailed(name, "its name is still taken"))
            return
        self.workers[name] = Actor()
        self.later(lambda: self._get_cpu(name), 0.1, 3.0)

    def _get_cpu(self, name: str) -> None:
        """Give the worker a CPU as soon as one is free."""
        actor = self.workers.get(name)
        if actor is None:
            return
        used = [other.node for other in (*self.workers.values(), *self.lent.values(), *self.offered.values())]
        there = [(node, cpus) for node, cpus in sorted(self.nodes.items()) if node not in self.draining]
        free = [node for node, cpus in there if used.count(node) < cpus]
        if not free:
            self.later(lambda: self._get_cpu(name), 0.5, 3.0)
        else:
            actor.node = self.rng.choice(free)
            self._reply(ev.WorkerStarted(name, actor.node))

    def _take_in(self, instruction: ev.TakeIn) -> None:
        actor = self.offered.pop(instruction.key, None) or self.lent.pop(instruction.key, None)
        if actor is None or actor.hangs_until > self.now + TAKE_IN_S:
            self._reply(ev.StartFailed(instruction.worker, "it is gone, or is ended because it does not answer"))
        else:
            actor.placements = None
            self.workers[instruction.worker] = actor
            self._reply(ev.WorkerStarted(instruction.worker, actor.node))

    def _answers(self, actor: Actor | None) -> bool:
        return actor is not None and actor.node in self.nodes and actor.hangs_until <= self.now

    def _brief(self, instruction: ev.BriefWorker) -> None:
        actor = self.workers.get(instruction.worker)
        if actor is not None and self._answers(actor):
            self._tell_placements(actor)
            self._reply(ev.WorkerBriefed(instruction.worker, instruction.version))
        else:
            self._reply(ev.BriefingFailed(instruction.worker, "it does not answer"), 10.0)

    def _tell_placements(self, actor: Actor) -> None:
        """Send a worker all placements that may cut blocks, including the newest, which is not used yet."""
        if actor.placements is None:
            actor.placements = PlacementHistory(self.order)
        for placement in (*self.placements.all, *list(self._asked.values())[-1:]):
            actor.placements.add(placement)

    def _hand_over(self, instruction: ev.HandOver) -> None:
        actor = self.workers.pop(instruction.worker, None)
        if actor is None or (self.is_peaceful and not actor.is_ours):  # a borrowed worker ends with its owner
            self._reply(ev.HandedOver(instruction.worker, taken=False))
            return
        taken = self.rng.random() < 0.6
        (self.lent if taken else self.offered)[instruction.worker] = actor
        self._reply(ev.HandedOver(instruction.worker, taken))

    def _start_cache(self, instruction: ev.StartCache) -> None:
        node, generation = instruction.node, instruction.generation
        assert (node, generation) not in self.caches, "a name is used twice"
        if node not in self.nodes or node in self.draining or (not self.is_peaceful and self.rng.random() < 0.1):
            self._reply(ev.CacheFailed(node, generation, "it does not come up"), 40.0)
        else:
            self.caches[node, generation] = Actor(node)
            self._reply(ev.CacheStarted(node, generation, self.room_bytes(node)), 3.0)

    def room_bytes(self, node: str) -> float:
        """Capacity of a node's object store."""
        is_small = random.Random(f"{self.seed} {node}").random() < self._small_share
        return SMALL_ROOM_BYTES if is_small else math.inf

    def _probe(self, instruction: ev.ProbeCache) -> None:
        actor = self.caches.get((instruction.node, instruction.generation))
        self._reply(ev.CacheProbed(instruction.node, instruction.generation, self._answers(actor)), 5.0)

    def _move(self, instruction: ev.MovePlacement) -> None:
        self._versions = max(self._versions, instruction.version)
        weights = tuple(NodeWeight(node, 0, weight) for node, weight in sorted(instruction.weights.items()))
        self._asked[instruction.version] = Homes(instruction.version, weights, (math.inf,) * len(weights))
        if not self.is_peaceful and self.rng.random() < 0.1:
            self._reply(ev.PlacementFailed(instruction.version, "a cache does not answer"), 30.0)
            return
        told = set()
        for name in sorted(instruction.workers):
            actor = self.workers.get(name)
            if actor is not None and self._answers(actor) and (self.is_peaceful or self.rng.random() < 0.9):
                self._tell_placements(actor)
                told.add(name)
        self._reply(ev.PlacementMoved(instruction.version, frozenset(told)), 10.0)

    # ---- staging ----

    def prepare(
        self,
        worker: str,
        request: PartRequest,
        finish: Callable[[str, Ids], None],
        fail: Callable[[ev.WorkerDied | ev.WorkerBehind], None],
    ) -> None:
        """Have a worker prepare a part. The worker may turn out dead or behind.

        Args:
            worker: name of the worker.
            request: the part.
            finish: called with the part's node and its sample ids.
            fail: called with the worker's failure, unless another worker has its name by then.
        """
        called = self.workers.get(worker)

        def end() -> None:
            actor = self.workers.get(worker)
            if actor is not called:
                if actor is None:
                    fail(ev.WorkerDied(worker, "its process died"))
            elif actor is None or actor.node not in self.nodes:
                fail(ev.WorkerDied(worker, "its process died"))
            elif actor.hangs_until > self.now:
                begin(4.0)
            else:
                try:
                    ids = (actor.placements or PlacementHistory(self.order)).ids(request)
                except PlacementUnknownError:
                    fail(ev.WorkerBehind(worker))
                else:
                    finish(actor.node, ids)

        def begin(least_s: float) -> None:
            self.later(end, least_s, least_s + self.rng.choice([0.4, 4.0]))

        begin(0.1)

    def check_stuck(self, worker: str, reason: str) -> None:
        """Check that an overdue worker hung, or is gone."""
        actor = self.workers.get(worker)
        assert actor is None or actor.hangs_until or actor.node not in self.nodes, f"{worker} did not hang: {reason}"

    def send_later(self, event: ev.Event) -> None:
        """Send the supervisor an event, unless the coordinator dies first."""
        life = self.life
        self.later(lambda: self.send(event) if self.life == life else None, 0.0)

    # ---- faults ----

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end:
            at = self._queue[0][0] if self._queue else end
            self.now = max(self.now, min(at, self._tick_at, end))
            if self._queue and at <= self.now:
                heapq.heappop(self._queue)[2]()
            if self.now >= self._tick_at:
                self._tick_at = self.now + TICK_S
                self.send(ev.Tick())
                if self.draining or self.supervisor.draining:
                    self.send(ev.NodesDraining(frozenset(self.draining)))
                if not self.is_down:
                    self.service.tick()

    def make_peace(self) -> None:
        """End all faults and leave at least one node. Hanging processes may keep hanging and be given up."""
        self.is_peaceful = True
        self.draining.clear()  # draining nodes stay
        if not self.nodes:
            self.add_node()
        for elsewhere in (self.offered, self.lent):  # the other feed is gone
            for key in [key for key, actor in elsewhere.items() if not actor.is_ours]:
                del elsewhere[key]
        self._say_who_is_dead()
        self.send(ev.FeedGone("other"))  # it may otherwise hold the only CPU

    def look(self) -> None:
        """Report a borrowing feed as gone, as the coordinator's periodic check does."""
        if not self.is_down and self.supervisor.lent:
            self.send(ev.FeedGone("other"))

    def is_whole(self) -> bool:
        """Return whether all workers that fit are up, homes are only on nodes with room, and no process is unknown."""
        if self.is_down:
            return False
        workers = {name for name, actor in self.workers.items() if actor.node in self.nodes}
        caches = {key for key, actor in self.caches.items() if actor.node in self.nodes}
        known = {(cache.node, cache.generation) for cache in self.supervisor.caches.values()}
        elsewhere = [actor for actor in (*self.lent.values(), *self.offered.values()) if actor.node in self.nodes]
        working = self.supervisor.in_phase(WorkerPhase.WORKING)
        borrowed = sum(worker.owner is not None for worker in working.values())
        due = max(1, self.supervisor.own - len(self.lent)) + borrowed
        fit = min(due, sum(self.nodes.values()) - len(elsewhere))
        # If another node has room, workers on a node without room are up but idle.
        homes, briefing = self.supervisor.homes, self.supervisor.in_phase(WorkerPhase.BRIEFING).values()
        spare = [w for w in briefing if not homes.has_room(w.node) and any(map(homes.has_room, homes.current.weights))]
        if workers - self.supervisor.workers.keys() or caches - known or len(working) + len(spare) < fit:
            return False
        # Moving homes takes time and may fail. In the end none remain on nodes where prepared parts would spill.
        with_homes = {worker.node for worker in working.values()} & homes.current.weights.keys()
        spills = {node for node in homes.current.weights if self.room_bytes(node) < STAGING_BYTES}
        return not spills or with_homes <= spills

    def kill_worker(self) -> None:
        self._kill(self.workers)

    def kill_cache(self) -> None:
        """Ray restarts the cache node; it is silent for a while."""
        if self.caches:
            self.caches[self.rng.choice(sorted(self.caches))].hangs_until = self.now + self.rng.choice([1.0, 8.0])

    def hang_cache(self) -> None:
        if self.caches:
            self.caches[self.rng.choice(sorted(self.caches))].hangs_until = self.now + self.rng.choice([6.0, 1e9])

    def hang_worker(self) -> None:
        """Hang a worker of this feed, a borrowed one, or a lent one."""
        workers = [*self.workers.values(), *self.lent.values()]
        if workers:
            self.worker_deaths += 1  # counts as dead
            self.rng.choice(workers).hangs_until = self.now + self.rng.choice([5.0, 1e9])

    def _kill(self, actors: dict[str, Actor]) -> None:
        if actors:
            name = self.rng.choice(sorted(actors))
            actor = actors.pop(name)
            self.worker_deaths += 1
            self.taken_names[name] = self.now + 10.0
            if actor.node and self.rng.random() < 0.7:
                self._reply(ev.WorkerDied(name, "its process died"))

    def drain_node(self) -> None:
        """A node starts draining. Later it dies, or stops draining."""
        staying = sorted(self.nodes.keys() - self.draining)
        if staying:
            node = self.rng.choice(staying)
            self.draining.add(node)
            self.later(lambda: self._end_notice(node), 2.0, 90.0)

    def _end_notice(self, node: str) -> None:
        if node in self.draining:
            self.draining.discard(node)
            if not self.is_peaceful and self.rng.random() < 0.8:
                self.kill_node(node)

    def kill_node(self, node: str | None = None) -> None:
        if self.nodes:
            node = node or self.rng.choice(sorted(self.nodes))
            self.draining.discard(node)
            del self.nodes[node]
            self.dead_nodes.add(node)
            self.worker_deaths += sum(actor.node == node for actor in self.workers.values())
            self.workers = {name: actor for name, actor in self.workers.items() if actor.node != node}
            self.lent = {key: actor for key, actor in self.lent.items() if actor.node != node}
            self.offered = {key: actor for key, actor in self.offered.items() if actor.node != node}
            self.caches = {key: actor for key, actor in self.caches.items() if actor.node != node}
            self.later(self._say_who_is_dead, 0.1, 20.0)

    def _say_who_is_dead(self) -> None:
        self.send(ev.NodesDead(frozenset(self.dead_nodes)))

    def kill_all_nodes(self) -> None:
        while self.nodes:
            self.kill_node()

    def add_node(self) -> None:
        self.nodes[f"node-{len(self.nodes) + len(self.dead_nodes)}"] = self.rng.randint(1, 3)

    def kill_all_workers(self) -> None:
        while self.workers:
            self._kill(self.workers)

    def kill_coordinator(self) -> None:
        """Ray restarts the coordinator a little later."""
        if not self.is_down:
            self.is_down = True
            self._lose_orders()
            self.life += 1  # messages to and from the dead process are lost
            life = self.life
            self.later(lambda: self.adopt() if self.life == life else None, 0.2, self.rng.choice([1.0, 8.0]))

    def _lose_orders(self) -> None:
        """Revive some caches that were ended shortly before: the order to end them was lost."""
        for at, key, cache in self._ended_caches:
            if self.now - at < ORDERED_S and key[0] in self.nodes and self.rng.random() < 0.5:
                self.caches[key] = cache
        self._ended_caches.clear()

    def adopt(self) -> None:
        """Restart the coordinator, which asks each worker for its feed, and other feeds for silent workers.

        A lent worker that is silent counts as working here if its borrower does not answer either.
        """
        for key in [key for key, actor in self.offered.items() if actor.is_ours]:
            self.workers[str(key)] = self.offered.pop(key)
        self.workers = {(actor.origin or name): actor for name, actor in self.workers.items()}
        for key in [key for key, actor in self.lent.items() if actor.is_ours and not self._answers(actor)]:
            if self.rng.random() < 0.5:
                self._silent_lent[str(key)] = self.lent.pop(key)
        workers = {
            name: ev.FoundWorker(actor.node if self._answers(actor) else "", None if actor.is_ours else "other")
            for name, actor in {**self.workers, **self._silent_lent}.items()
        }
        caches = {key: self._answers(actor) for key, actor in self.caches.items()}
        lent: dict[str, tuple[object, ...]] = {"other": tuple(key for key, actor in self.lent.items() if actor.is_ours)}
        self._versions += 1000
        names = [str(name) for name in (*workers, *self.lent)]
        serial = 1 + max([int(name.rpartition("-")[2]) for name in names], default=-1)
        rooms = {node: self.room_bytes(node) for node, _ in caches}
        self._begin(ev.Begin(workers, caches, lent, self._versions, serial, is_restart=True, rooms=rooms))
        for name, found in workers.items():
            assert found.node or name not in self.workers, f"{name} is silent, and was not ended"
            assert found.node or found.owner is None or name in self.reported_gone, f"{name}'s owner got no report"
        assert len({node for node, _ in self.caches}) == len(self.caches), "an older cache node of a machine lives on"
        assert not self._silent_lent, "a silent lent worker lives on unnoticed"

    def scale(self) -> None:
        """Rescale. Nodes lose their last worker only if other nodes have room for their cached samples."""
        self.send(ev.CachesMeasured(self._kept))
        before, workers = self._staying(), self.rng.randint(1, 4)
        borrowed = self.supervisor.borrowed  # these go home in any case
        self.send(ev.Scale(workers))
        after = self._staying()
        if not (self.draining or borrowed or self.is_down):
            moving = sum(self._kept.get(node, (0.0, 0.0))[0] for node in before - after)
            room = sum(most - keeps for keeps, most in (self._kept.get(node, (0.0, 0.0)) for node in after))
            assert moving <= room, f"what {before - after} keep is lost for want of room"

    def _staying(self) -> set[str]:
        return {worker.node for worker in self.supervisor.workers.values() if worker.stays}

    def lend(self) -> None:
        self.send(ev.Lend("other"))

    def give_back(self) -> None:
        if self.lent and self.rng.random() < 0.5:
            self.send(ev.Offered(self.rng.choice(sorted(self.lent, key=str))))
        else:
            self.send(ev.FeedGone("other"))

    def kill_lent(self) -> None:
        if self.lent:
            key = self.rng.choice(sorted(self.lent, key=str))
            del self.lent[key]
            self.send(ev.LentGone(key))

    def offer(self) -> None:
        """Another feed offers one of its workers."""
        if self.nodes:
            number = next(self._count)
            key = ("foreign", number)
            node = self.rng.choice(sorted(self.nodes))
            self.offered[key] = Actor(node, is_ours=False, origin=f"other-prep-{number}")
            self.send(ev.Offered(key, "other"))

    def measure(self) -> None:
        self.send(
            ev.WorkMeasured(
                {name: (self.rng.uniform(0, 1000), self.rng.uniform(0, 100)) for name in sorted(self.workers)}
            )
        )
        # some nodes report nothing
        known = [node for node in self.nodes if self._draws.random() < 0.8]
        self._kept = {node: (self._draws.choice([0.0, 50.0, 100.0]), 100.0) for node in known}
        self.send(ev.CachesMeasured(self._kept))

    # ---- promises ----

    def check(self) -> None:
        """Check the invariants that hold after every event of the supervisor."""
        self.supervisor.validate()
        working = self.supervisor.in_phase(WorkerPhase.WORKING)
        leaving = self.supervisor.workers.keys() - working.keys()
        homes = self.supervisor.homes
        for name, node in self.service.workers.items():
            assert name in working or name in leaving, f"{name} is gone, and still in use"
            assert node not in self.supervisor.dead, f"{name} is on a machine that is gone"
            has_homes = name not in working or node in homes.current.weights
            assert has_homes, f"{name} works on a machine without homes, where its output may spill"


FAULTS: tuple[str, ...] = (
    "kill_worker",
    "kill_worker",
    "kill_all_workers",
    "hang_worker",
    "kill_cache",
    "hang_cache",
    "kill_node",
    "kill_node",
    "kill_all_nodes",
    "drain_node",
    "drain_node",
    "add_node",
    "add_node",
    "kill_coordinator",
    "kill_coordinator",
    "scale",
    "lend",
    "give_back",
    "kill_lent",
    "offer",
    "measure",
)
"""Method names of the faults; likely ones appear more than once."""
