"""Random schedules for the supervisor: a small cluster with Ray's habits, and lanes that work on it.

`Cluster` plays Ray, the machines, the actors, the coordinator's shell and the consumers. Replies come late, twice or
never; workers, cache nodes, machines and the coordinator itself die, alone and together, until nobody is left; a name
stays taken for a while after its actor was killed. Then all faults end, and work must go on. It raises AssertionError,
with the seed and what happened, at the first broken promise.
"""

from __future__ import annotations

import heapq
import itertools
import operator
import random
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mbaas.core import cluster_events as ev
from mbaas.core import events as staging
from mbaas.core.homes import Placed
from mbaas.core.layout import StagingLimits
from mbaas.core.state import StagingState
from mbaas.core.supervised import WorkerPhase
from mbaas.core.supervisor import Supervisor
from mbaas.placement import BlockPart
from mbaas.settings import Timeouts

LIMITS = StagingLimits(
    budget_bytes=60,
    ahead_blocks=4,
    timeouts=Timeouts(lease_s=1e9, reservation_s=1e9, patience_s=1e9, prep_s=40.0),
    max_deaths=10**6,
)
BLOCKS_PER_EPOCH = 5
TICK_S = 6.0
"""The coordinator looks at its deadlines far more often; nothing depends on it."""

START_S = 60.0
"""A start of which nothing is heard ends within a schedule."""

PEACE_S = 600.0
"""After the last fault, consumers must get their blocks within so many simulated seconds."""


@dataclass
class Actor:
    """A process: a worker or a cache node.

    Attributes:
        node: where it runs; "" while it waits for a CPU.
        knows: the newest placement that a worker was told, with all before it that this coordinator made.
        hangs_until: it answers nothing before.
        feed: for whom it works, "" if for nobody.
    """

    node: str = ""
    knows: int = 0
    hangs_until: float = 0.0
    feed: str = "own"


class CountingLane:
    """A lane that gives every worker one part after the other, without blocks: cheap enough for thousands of schedules.

    Attributes:
        workers: name -> node, of those that it counts on.
        made: parts that were made.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self.workers: dict[str, str] = {}
        self.made = 0
        self._leaving: set[str] = set()
        self._busy: dict[str, tuple[int, float]] = {}  # worker -> number of its part, and when it began
        self._parts = itertools.count()

    def tell(self, event: staging.Event) -> None:
        match event:
            case staging.WorkerUp():
                assert event.worker not in self.workers, f"{event.worker} is up twice"
                self.workers[event.worker] = event.node
                self._give(event.worker)
            case staging.WorkerDown():
                self.workers.pop(event.worker, None)
            case staging.WorkerLeaves():
                self._leaving.add(event.worker)
            case staging.NodeDown():
                self.workers = {name: node for name, node in self.workers.items() if node != event.node}

    def tick(self) -> None:
        """Who takes too long for a part is stuck."""
        for name in [name for name in self.workers if self._cluster.now - self._busy[name][1] > LIMITS.timeouts.prep_s]:
            del self.workers[name]
            self._cluster.stuck(name, "it takes too long")

    def _give(self, worker: str) -> None:
        part = next(self._parts)
        self._busy[worker] = part, self._cluster.now
        self._cluster.prepare(worker, self._cluster.placement.version, lambda: self._made(worker, part))

    def _made(self, worker: str, part: int) -> None:
        if worker not in self.workers or self._busy[worker][0] != part:
            return
        self.made += 1
        if worker in self._leaving:
            del self.workers[worker]
            self._cluster.left(self, worker)
        else:
            self._give(worker)


@dataclass
class FakeConsumer:
    """A loader: its name, session, the next block that it needs, and how many it got."""

    name: str
    session: int = 0
    cursor: int = 0
    got: int = 0


class StagingLane:
    """A lane with the real staging state, and two consumers that go through its blocks.

    Attributes:
        consumers: what they got counts across restarts of the coordinator.
    """

    def __init__(self, cluster: Cluster, number: int) -> None:
        self._cluster = cluster
        self.state = StagingState(LIMITS, BLOCKS_PER_EPOCH, lambda _: 10, self._split, number)
        self.consumers = cluster.consumers.setdefault(number, [FakeConsumer("trial-0"), FakeConsumer("trial-1")])

    def begin(self) -> None:
        """The consumers join where they stand."""
        for consumer in self.consumers:
            consumer.session = next(self._cluster.sessions)
            self.tell(staging.Join(consumer.name, consumer.session, consumer.cursor))
            self._ask(consumer)

    @property
    def workers(self) -> dict[str, str]:
        """Name -> node of those that it counts on."""
        return {worker.name: worker.node for worker in self.state.tasks.workers.values()}

    @property
    def made(self) -> int:
        """Blocks that every consumer got."""
        return min(consumer.got for consumer in self.consumers)

    def _split(self, block: int) -> list[BlockPart]:
        placement = self._cluster.placement
        nodes = sorted(placement.weights) or [""]
        some = [node for number, node in enumerate(nodes) if len(nodes) < 3 or (block + number) % 3]
        return [BlockPart(node, placement.version) for node in some]

    def tell(self, event: staging.Event) -> None:
        for instruction in self.state.handle(event, self._cluster.now):
            self._carry_out(instruction)
        self.state.validate()

    def tick(self) -> None:
        self.tell(staging.Tick())

    def _carry_out(self, instruction: staging.Instruction) -> None:
        match instruction:
            case staging.Prepare():
                task = instruction.task
                self._cluster.prepare(
                    instruction.worker, instruction.block_part.version, lambda: self.tell(staging.TaskEnded(task))
                )
            case staging.Deliver():
                self._deliver(instruction)
            case staging.ReplaceWorker():
                self._cluster.stuck(instruction.worker, instruction.reason)
            case staging.ReleaseWorker():
                self._cluster.left(self, instruction.worker)

    def _ask(self, consumer: FakeConsumer) -> None:
        cursor = consumer.cursor
        self.tell(staging.Ask(consumer.name, consumer.session, cursor, cursor, cursor, 2))

    def _deliver(self, delivery: staging.Deliver) -> None:
        consumer = next(consumer for consumer in self.consumers if consumer.name == delivery.consumer)
        if consumer.session != delivery.session:
            return
        first, count = delivery.blocks[0], len(delivery.blocks)
        is_moved_on = first > consumer.cursor and consumer.cursor % BLOCKS_PER_EPOCH == first % BLOCKS_PER_EPOCH == 0
        assert first == consumer.cursor or is_moved_on, f"{consumer.name} got block {first}, not {consumer.cursor}"
        assert list(delivery.blocks) == list(range(first, first + count)), f"{delivery} leaves blocks out"
        consumer.cursor = first + count
        consumer.got += count
        session = consumer.session
        self._cluster.later(lambda: self._ask(consumer) if consumer.session == session else None, 0.1, 2.0)


class Cluster:
    """One random schedule.

    Args:
        seed: everything follows from it.
        faults: to draw.
        lanes: how many.
        lane: what each is.
    """

    def __init__(
        self, seed: int, faults: int = 25, *, lanes: int = 2, lane: type[CountingLane | StagingLane] = CountingLane
    ) -> None:
        self.rng = random.Random(seed)
        self.seed, self.faults, self._lanes, self._lane = seed, faults, lanes, lane
        self.now = 0.0
        self.story: deque[object] = deque(maxlen=400)
        self.nodes = {f"node-{i}": self.rng.randint(1, 3) for i in range(self.rng.randint(1, 3))}  # -> CPUs
        self.dead_nodes: set[str] = set()
        self.workers: dict[str, Actor] = {}
        self.caches: dict[tuple[str, int], Actor] = {}
        self.lent: dict[object, Actor] = {}
        self.offered: dict[object, Actor] = {}
        self.taken_names: dict[str, float] = {}
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._versions = 0
        self._life = 0  # of the coordinator; a dead one's messages go nowhere
        self._peaceful = False
        self.sessions = itertools.count(1)
        self.consumers: dict[int, list[FakeConsumer]] = {}
        self._wanted = self.rng.randint(1, 4)
        self._begin(ev.Begin(version=self._versions))

    # ---- the shell's part ----

    def _begin(self, event: ev.Begin) -> None:
        self._life += 1
        self.supervisor = Supervisor(own=self._wanted, credit=2, lanes=self._lanes, start_s=START_S)
        self.lanes = [self._lane(self, number) for number in range(self._lanes)]
        self._asked: dict[int, Mapping[str, float]] = {}  # version of a placement -> its weights
        self.placement = Placed(0)
        self.send(event)
        for lane in self.lanes:
            if isinstance(lane, StagingLane):
                lane.begin()

    def send(self, event: ev.Event) -> None:
        if not isinstance(event, ev.Tick):
            self.story.append((round(self.now, 2), event))
        for instruction in self.supervisor.handle(event, self.now):
            self.story.append(instruction)
            self._carry_out(instruction)
        self.check()

    def later(self, action: Callable[[], None], least_s: float = 0.01, most_s: float = 1.0) -> None:
        heapq.heappush(self._queue, (self.now + self.rng.uniform(least_s, most_s), next(self._count), action))

    def _reply(self, event: ev.Event, most_s: float = 1.0) -> None:
        """Report to the coordinator of this life: soon, late, twice or never."""
        life, luck = self._life, self.rng.random()

        def tell() -> None:
            if self._life == life:
                self.send(event)

        if self._peaceful or luck > 0.15:
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
            case ev.Engage():
                self._engage(instruction)
            case ev.EndWorker():
                refused = self.offered.pop(instruction.worker, None)
                if self.workers.pop(instruction.worker, refused) is not None:
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
                self.caches.pop((instruction.node, instruction.generation), None)
            case ev.MovePlacement():
                self._move(instruction)
            case ev.UsePlacement():
                self.placement = Placed(instruction.version, self._asked[instruction.version])
            case ev.VacateNode():
                self._reply(ev.NodeVacated(instruction.node), 30.0)
            case ev.TellLanes():
                for lane in self.lanes:
                    lane.tell(instruction.event)
            case ev.EndLent():
                self.lent.pop(instruction.key, None)
            case ev.RefuseOffer() | ev.ReportLost() | ev.Note():
                pass

    def _start_worker(self, name: str) -> None:
        if self.taken_names.get(name, -1.0) > self.now or name in self.workers:
            self._reply(ev.StartFailed(name, "its name is still taken"))
            return
        self.workers[name] = Actor()
        self.later(lambda: self._get_cpu(name), 0.1, 3.0)

    def _get_cpu(self, name: str) -> None:
        """Ray gives the worker a CPU as soon as there is one."""
        actor = self.workers.get(name)
        if actor is None:
            return
        used = [other.node for other in (*self.workers.values(), *self.lent.values(), *self.offered.values())]
        free = [node for node, cpus in sorted(self.nodes.items()) if used.count(node) < cpus]
        if not free:
            self.later(lambda: self._get_cpu(name), 0.5, 3.0)
        else:
            actor.node = self.rng.choice(free)
            self._reply(ev.WorkerStarted(name, actor.node))

    def _engage(self, instruction: ev.Engage) -> None:
        actor = self.offered.pop(instruction.key, None) or self.lent.pop(instruction.key, None)
        if actor is None:
            self._reply(ev.StartFailed(instruction.worker, "it is gone"))
        else:
            actor.feed, actor.knows = "own", 0
            self.workers[instruction.worker] = actor
            self._reply(ev.WorkerStarted(instruction.worker, actor.node))

    def _answers(self, actor: Actor | None) -> bool:
        return actor is not None and actor.node in self.nodes and actor.hangs_until <= self.now

    def _brief(self, instruction: ev.BriefWorker) -> None:
        actor = self.workers.get(instruction.worker)
        if actor is not None and self._answers(actor):
            actor.knows = max(actor.knows, instruction.version)
            self._reply(ev.WorkerBriefed(instruction.worker, instruction.version))
        else:
            self._reply(ev.BriefingFailed(instruction.worker, "it does not answer"), 10.0)

    def _hand_over(self, instruction: ev.HandOver) -> None:
        actor = self.workers.pop(instruction.worker, None)
        if actor is None:
            self._reply(ev.HandedOver(instruction.worker, taken=False))
            return
        taken = self.rng.random() < 0.6
        (self.lent if taken else self.offered)[instruction.worker] = actor
        self._reply(ev.HandedOver(instruction.worker, taken))

    def _start_cache(self, instruction: ev.StartCache) -> None:
        node, generation = instruction.node, instruction.generation
        assert (node, generation) not in self.caches, "a name is used twice"
        if node not in self.nodes or (not self._peaceful and self.rng.random() < 0.1):
            self._reply(ev.CacheFailed(node, generation, "it does not come up"), 40.0)
        else:
            self.caches[node, generation] = Actor(node)
            self._reply(ev.CacheStarted(node, generation), 3.0)

    def _probe(self, instruction: ev.ProbeCache) -> None:
        actor = self.caches.get((instruction.node, instruction.generation))
        self._reply(ev.CacheProbed(instruction.node, instruction.generation, self._answers(actor)), 5.0)

    def _move(self, instruction: ev.MovePlacement) -> None:
        self._versions = max(self._versions, instruction.version)
        self._asked[instruction.version] = instruction.weights
        if not self._peaceful and self.rng.random() < 0.1:
            self._reply(ev.PlacementFailed(instruction.version, "a cache does not answer"), 30.0)
            return
        told = set()
        for name in sorted(instruction.workers):
            actor = self.workers.get(name)
            if actor is not None and self._answers(actor) and (self._peaceful or self.rng.random() < 0.9):
                actor.knows = max(actor.knows, instruction.version)
                told.add(name)
        self._reply(ev.PlacementMoved(instruction.version, frozenset(told)), 10.0)

    # ---- lanes ----

    def prepare(self, worker: str, version: int, finish: Callable[[], None], least_s: float = 0.1) -> None:
        """A lane has a part made that was cut by a placement: the worker does so, or is found dead, or behind."""
        life = self._life

        def end() -> None:
            actor = self.workers.get(worker)
            if self._life != life:
                return
            if actor is None or actor.node not in self.nodes:
                self.send(ev.WorkerDied(worker, "its process died"))
            elif actor.hangs_until > self.now:
                self.prepare(worker, version, finish, 4.0)
            elif version > actor.knows:
                self.send(ev.WorkerBehind(worker))
            else:
                finish()

        self.later(end, least_s, least_s + 4.0)

    def left(self, lane: CountingLane | StagingLane, worker: str) -> None:
        """A lane is done with a worker that leaves, and may say so twice."""
        for _ in range(self.rng.randint(1, 2)):
            self._send_later(ev.WorkerDone(worker, self.lanes.index(lane)))

    def stuck(self, worker: str, reason: str) -> None:
        """A lane waited too long for a worker."""
        self._send_later(ev.WorkerDied(worker, reason))

    def _send_later(self, event: ev.Event) -> None:
        life = self._life
        self.later(lambda: self.send(event) if self._life == life else None, 0.0)

    # ---- faults ----

    def run(self) -> None:
        """Play the schedule to its end."""
        try:
            self._advance(30.0)
            for _ in range(self.faults):
                for _ in range(self.rng.choice([1, 1, 2, 3])):
                    self.rng.choice(FAULTS)(self)
                self._advance(self.rng.choice([0.0, 0.1, 1.0, 10.0, 60.0]))
            self._peaceful = True
            self._make_peace()
            self._check_progress()
        except AssertionError as error:
            lines = "\n".join(map(str, self.story))
            raise AssertionError(f"seed {self.seed} at {self.now:.1f} s: {error}\n{lines}") from error

    def _advance(self, seconds: float) -> None:
        end = self.now + seconds
        tick = self.now + TICK_S
        while self.now < end:
            at = self._queue[0][0] if self._queue else end
            self.now = max(self.now, min(at, tick, end))
            if self._queue and at <= self.now:
                heapq.heappop(self._queue)[2]()
            if self.now >= tick:
                tick = self.now + TICK_S
                self.send(ev.Tick())
                for lane in self.lanes:
                    lane.tick()

    def _make_peace(self) -> None:
        """One machine with a CPU and no more faults; what hangs may stay as it is, and be given up."""
        if not self.nodes:
            self.add_node()
        for key in [key for key, actor in self.offered.items() if actor.feed != "own"]:
            del self.offered[key]
        self._say_who_is_dead()
        self.send(ev.FeedGone("other"))  # else it may have the only CPU

    def _check_progress(self) -> None:
        due = [lane.made + 3 for lane in self.lanes]
        end = self.now + PEACE_S
        while self.now < end and not (self._is_whole() and all(map(operator.ge, self._made(), due))):
            self._advance(10.0)
            if self.supervisor.lent:
                self.send(ev.FeedGone("other"))  # the coordinator says so at every look
        assert all(map(operator.ge, self._made(), due)), f"lanes made {self._made()} parts, not {due}"
        assert self._is_whole(), "workers are missing, or run and are known to nobody"

    def _made(self) -> list[int]:
        return [lane.made for lane in self.lanes]

    def _is_whole(self) -> bool:
        """Whether all workers are there that fit, and no process lives that the supervisor does not know."""
        workers = {name for name, actor in self.workers.items() if actor.node in self.nodes}
        caches = {key for key, actor in self.caches.items() if actor.node in self.nodes}
        known = {(cache.node, cache.generation) for cache in self.supervisor.caches.values()}
        elsewhere = [actor for actor in (*self.lent.values(), *self.offered.values()) if actor.node in self.nodes]
        working = self.supervisor.in_phase(WorkerPhase.WORKING)
        borrowed = sum(worker.owner is not None for worker in working.values())
        due = max(1, self.supervisor.own - len(self.lent)) + borrowed
        fit = min(due, sum(self.nodes.values()) - len(elsewhere))
        return workers <= self.supervisor.workers.keys() and caches <= known and len(working) >= fit

    def kill_worker(self) -> None:
        self._kill(self.workers)

    def kill_cache(self) -> None:
        """Ray restarts a cache node in its place; it is silent for a while."""
        if self.caches:
            self.caches[self.rng.choice(sorted(self.caches))].hangs_until = self.now + self.rng.choice([1.0, 8.0])

    def hang_cache(self) -> None:
        if self.caches:
            self.caches[self.rng.choice(sorted(self.caches))].hangs_until = self.now + self.rng.choice([6.0, 1e9])

    def hang_worker(self) -> None:
        if self.workers:
            self.workers[self.rng.choice(sorted(self.workers))].hangs_until = self.now + self.rng.choice([5.0, 1e9])

    def _kill(self, actors: dict[str, Actor]) -> None:
        if actors:
            name = self.rng.choice(sorted(actors))
            actor = actors.pop(name)
            self.taken_names[name] = self.now + 10.0
            if actor.node and self.rng.random() < 0.7:
                self._reply(ev.WorkerDied(name, "its process died"))

    def kill_node(self) -> None:
        if self.nodes:
            node = self.rng.choice(sorted(self.nodes))
            del self.nodes[node]
            self.dead_nodes.add(node)
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

    def restart_coordinator(self) -> None:
        """It adopts who answers, and ends workers that do not."""
        for key in [key for key, actor in self.offered.items() if actor.feed == "own"]:
            self.workers[str(key)] = self.offered.pop(key)
        workers = {}
        for name, actor in list(self.workers.items()):
            if actor.node in self.nodes and self._answers(actor):
                workers[name] = ev.FoundWorker(actor.node)
                actor.knows = 0
            else:
                del self.workers[name]
        newest: dict[str, tuple[int, bool]] = {}
        for (node, generation), actor in sorted(self.caches.items()):
            newest[node] = generation, self._answers(actor)
        for node, generation in list(self.caches):
            if newest[node][0] != generation:
                del self.caches[node, generation]
        lent: dict[str, tuple[object, ...]] = {"other": tuple(self.lent)} if self.lent else {}
        self._versions += 1000
        names = [str(name) for name in (*self.workers, *self.lent) if isinstance(name, str)]
        serial = 1 + max([int(name.removeprefix("prep-")) for name in names], default=-1)
        self._begin(ev.Begin(workers, newest, lent, self._versions, serial, is_restart=True))

    def scale(self) -> None:
        self.send(ev.Scale(self.rng.randint(1, 4)))

    def lend(self) -> None:
        self.send(ev.Lend("other"))

    def give_back(self) -> None:
        if self.lent and self.rng.random() < 0.5:
            self.send(ev.Offered(self.rng.choice(sorted(self.lent, key=str))))
        else:
            self.send(ev.FeedGone("other"))

    def lose_lent(self) -> None:
        if self.lent:
            key = self.rng.choice(sorted(self.lent, key=str))
            del self.lent[key]
            self.send(ev.LentLost(key))

    def offer(self) -> None:
        """Another feed offers a worker of its own."""
        if self.nodes:
            key = ("foreign", next(self._count))
            self.offered[key] = Actor(self.rng.choice(sorted(self.nodes)), feed="other")
            self.send(ev.Offered(key, "other"))

    def measure(self) -> None:
        self.send(
            ev.WorkMeasured(
                {name: (self.rng.uniform(0, 1000), self.rng.uniform(0, 100)) for name in sorted(self.workers)}
            )
        )

    # ---- promises ----

    def check(self) -> None:
        """What holds after every event."""
        self.supervisor.validate()
        working = self.supervisor.in_phase(WorkerPhase.WORKING).keys()
        leaving = self.supervisor.workers.keys() - working
        for lane in self.lanes:
            for name, node in lane.workers.items():
                assert name in working or name in leaving, f"{name} is gone, and lanes count on it"
                assert node not in self.supervisor.dead, f"{name} is on a machine that is gone"


FAULTS = (
    Cluster.kill_worker,
    Cluster.kill_worker,
    Cluster.kill_all_workers,
    Cluster.hang_worker,
    Cluster.kill_cache,
    Cluster.hang_cache,
    Cluster.kill_node,
    Cluster.kill_node,
    Cluster.kill_all_nodes,
    Cluster.add_node,
    Cluster.add_node,
    Cluster.restart_coordinator,
    Cluster.restart_coordinator,
    Cluster.scale,
    Cluster.lend,
    Cluster.give_back,
    Cluster.lose_lent,
    Cluster.offer,
    Cluster.measure,
)


def run_some(seeds: list[int], **options: object) -> None:
    """Run a schedule for each seed, in a process of a pool."""
    for seed in seeds:
        Cluster(seed, **options).run()  # type: ignore[arg-type]
