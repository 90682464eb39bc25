"""State machine for a feed's prep workers and cache nodes, and for the home nodes of its samples.

It turns events into instructions and uses no clock, threads or Ray calls. All recovery decisions are made here, so a
feed continues after any loss: a missing worker or cache is restarted as long as it is wanted. `FeedEnd` lists the few
reasons that end a feed.

`mbaas.model.scaling` and `mbaas.model.lending`, which are also pure, decide when to scale and lend. Their
decisions arrive here as `Scale` and `Lend`; this module chooses the workers.

Phases of a worker (`WorkerPhase`)::

    StartWorker / TakeIn ──► STARTING ──WorkerStarted──► BRIEFING ──placement received──► WORKING
                                 ▲                          ▲  ▲                          │    │
                           StartFailed: after a pause       │  └──── WorkerBehind ────────┘    │ Scale, Lend
                           another is started       Begin, Offered                             ▼
                                                                  HANDED_OVER ◄──WorkerDone── LEAVING ──► ended

    and from every state to GONE: it died, hangs, lost its node, or could not receive the placement.

Phases of a cache node (`CachePhase`)::

    StartCache ──► STARTING ──► UP ◄──► DOUBTED (a worker died on its node; it is being probed)
                                 │ ▲
                   no home there │ │ a worker came back
                                 ▼ │
                              VACATING ──► DOUBTED, or ended

    and from every state to GONE: it did not start, does not answer, or its node is gone.

A node whose cache does not answer, or that Ray reports as dead, is given up with all processes on it.

Homes follow the workers: samples have their homes on nodes with a worker and a cache. One instruction (`MovePlacement`)
computes and distributes a new placement. Only one runs at a time, and blocks are cut by the new placement only after
it was distributed.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from mbaas.base.units import counted, percent, seconds, size
from mbaas.core.cluster import events as ev
from mbaas.core.cluster.homes import MOVE_S, Homes, HomeWeights
from mbaas.core.cluster.supervised import (
    BEGIN_S,
    CACHE_START_S,
    MACHINE_S,
    RETRY_S,
    CachePhase,
    SupervisedCache,
    SupervisedWorker,
    WorkerPhase,
)
from mbaas.core.cluster.waits import WaitTable, awaited
from mbaas.core.staging import events as staging
from mbaas.core.story import InvariantError, Stories
from mbaas.model.scaling import KeptBytes, Machine, to_let_go

START_S = MACHINE_S + BEGIN_S + 15.0
"""A worker that is not up after this time is requested again: it may wait for a node and then for its process. The
shell gives up a little earlier, and can report the reason.
"""

BRIEFING_S = 30.0
"""Longest time for a worker to receive the placement."""

BRIEFINGS = 3
"""Consecutive failed briefings after which a worker is replaced."""

PROBE_S = 10.0
"""Longest wait for the answer of a doubted cache node; the shell that probes it gives up earlier."""

VACATE_S = 120.0
"""Longest wait for a report of how much the other caches have copied from a node that is no longer needed."""

HAND_OVER_S = 30.0
"""Longest wait for another feed to accept or reject a worker."""

KEPT_DEAD = 1000
"""Dead nodes that are remembered, to recognise late reports from them; Ray never reuses a node id."""


class Supervisor:
    """See the module docstring.

    Args:
        own: workers that the feed was promised.
        credit: tasks assigned to a worker at a time.
        start_s: seconds from the request for a worker to its first answer.
        staging_bytes: largest staged size of the feed; see `mbaas.core.cluster.homes` for nodes without that room.
        needs: resources that each worker reserves, as text: "1 CPU".

    Attributes:
        own: workers started by this feed that it should have, here or lent; borrowed ones come in addition. Each worker
            is counted only by its owner, which replaces it.
        workers: by name, those requested and not gone; a coordinator uses each name once.
        caches: by node; at most one each.
        lent: feed -> keys of workers lent to it.
        dead: nodes that Ray reports as dead.
        draining: nodes with workers or a cache of this feed that Ray will remove soon.
        ended: reason why the feed ended; nothing is started afterwards.
    """

    def __init__(
        self,
        *,
        own: int,
        credit: int,
        start_s: float = START_S,
        staging_bytes: int = 0,
        needs: str = "1 CPU",
    ) -> None:
        self.own = own
        self.workers: dict[str, SupervisedWorker] = {}
        self.caches: dict[str, SupervisedCache] = {}
        self.lent: dict[str, list[Hashable]] = {}
        self.draining: dict[str, None] = {}
        self.homes = Homes(self.workers, self.caches, staging_bytes, self.draining)
        self.stories = Stories()
        self.dead: dict[str, None] = {}
        self.ended: str | None = None
        self._credit = credit
        self._start_s, self._staging_bytes, self._needs = start_s, staging_bytes, needs
        self._waits = WaitTable()
        self._kept = KeptBytes()
        self._held_back = 0  # idle workers kept for their nodes' caches, as last logged
        self._begun = False
        self._numbers: Iterator[int]  # numbers of future workers; set by `Begin`
        self._generation = 0
        self._start_after = -math.inf
        self._open_after: dict[str, float] = {}
        self._last_failure = ""
        self._now: float  # time of the current event
        self._out: list[ev.Instruction] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Process one event and return the resulting instructions, in order."""
        self._now, self._out = now, []
        self.stories.now, self.stories.cause = now, event
        if self.ended is not None:
            self._after_the_end(event)
            return self._out
        self._take(event)
        # Compare the actual with the wanted state after every event. No event needs to know its consequences, and the
        # next event repairs the effects of a lost one.
        if self._begun and self.ended is None:
            self._match_worker_count()
            self._open_caches()
            self._move_homes()
            self._brief()
            self._leave_draining()
            self._vacate()
        for wait in self._waits.look(self._awaited(), now):
            self._note(f"the feed waits: {wait}")
        return self._out

    @property
    def instructions(self) -> list[ev.Instruction]:
        """Instructions of the current event so far. After a bug, these must still be carried out."""
        return self._out

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Begin():
                self._begin(event)
            case ev.WorkerStarted():
                self._worker_started(event)
            case ev.StartFailed():
                self._start_failed(event)
            case ev.WorkerBriefed():
                self._briefed(event.worker, event.version)
            case ev.BriefingFailed():
                self._briefing_failed(event)
            case ev.WorkerBehind():
                self._behind(event.worker)
            case ev.WorkerDied():
                self._died(event)
            case ev.WorkerDone():
                self._done(event.worker)
            case ev.WorkMeasured():
                self.homes.measured(event.work, self._now)
            case ev.CachesMeasured():
                self._kept.observe(event.kept, self._now)
            case ev.Scale():
                self._scale(event.workers)
            case ev.Lend():
                self._lend(event)
            case ev.HandedOver():
                self._handed_over(event)
            case ev.Offered():
                self._take_in(event.key, event.owner)
            case ev.LentGone():
                self._lent_gone(event.key)
            case ev.FeedGone():
                self._fetch_back(event.feed)
            case ev.CacheStarted():
                self._cache_started(event)
            case ev.CacheFailed():
                self._cache_failed(event)
            case ev.CacheProbed():
                self._cache_probed(event)
            case ev.NodesDead():
                self._nodes_dead(event.nodes)
            case ev.NodesDraining():
                self._nodes_draining(event.nodes)
            case ev.PlacementMoved():
                self._moved(event)
            case ev.PlacementFailed():
                if self.homes.is_moving(event.version):
                    self._move_failed(event.reason)
            case ev.NodeVacated():
                self._vacated(event)
            case ev.Stop():
                self._stop(event.reason)
            case ev.Tick():
                self._tick()

    # ---- beginning and end ----

    def _begin(self, event: ev.Begin) -> None:
        # Workers start in BRIEFING: a restarted coordinator does not know which placement they have.
        self._begun = True
        self.homes.version, self._numbers = event.version, itertools.count(event.serial)
        self.lent = {feed: list(keys) for feed, keys in event.lent.items() if keys}
        for name, found in event.workers.items():
            story = self.stories.begin("worker", name)
            story.tell("it was there when the coordinator began, on node {}", found.node)
            self.workers[name] = SupervisedWorker(name, story, found.owner, found.node, WorkerPhase.BRIEFING)
        if event.is_restart:
            self.own = max(self.own, self._own_present())  # more if the predecessor had requested more
        self._end_silent(name for name, found in event.workers.items() if not found.node)
        self._take_over_caches(event)
        if event.is_restart:
            self._note(
                f"the coordinator was restarted; {counted(len(self.workers), 'prep worker')} and "
                f"{counted(len(self.caches), 'cache node')} go on"
            )

    def _end_silent(self, workers: Iterable[str]) -> None:
        # The owner of a borrowed worker gets a report and replaces it.
        for name in workers:
            self._worker_gone(self.workers[name], "it does not answer the coordinator that was restarted")

    def _take_over_caches(self, event: ev.Begin) -> None:
        youngest = dict(sorted(event.caches))
        for (node, generation), answers in event.caches.items():
            self._generation = max(self._generation, generation)
            if generation < youngest[node]:  # it was given up, and the instruction to end it was lost
                self._out.append(ev.EndCache(node, generation))
                continue
            cache = self.caches[node] = self._new_cache(node, generation)
            cache.transition(CachePhase.UP, "it was there when the coordinator began")
            self._take_in_room(cache, event.rooms.get(node, math.inf))
            if not answers:
                self._doubt(cache)

    def _stop(self, reason: str) -> None:
        self.ended = reason
        for worker in self.workers.values():
            if worker.owner is not None and worker.phase is not WorkerPhase.STARTING:
                self._out.append(ev.HandOver(worker.name, worker.owner))  # it returns to its owner, or ends with it
            else:
                self._out.append(ev.EndWorker(worker.name))
        self._out += [ev.EndLent(key) for keys in self.lent.values() for key in keys]
        for worker in list(self.workers.values()):
            self._forget(worker, reason)
        for cache in list(self.caches.values()):
            self._end_cache(cache, reason)
        self.lent.clear()

    def _after_the_end(self, event: ev.Event) -> None:
        match event:
            case ev.WorkerStarted() | ev.HandedOver(taken=False):
                self._out.append(ev.EndWorker(event.worker))
            case ev.Offered():
                self._out.append(ev.RefuseOffer(event.key))
            case ev.CacheStarted():
                self._out.append(ev.EndCache(event.node, event.generation))

    # ---- workers that come ----

    def _match_worker_count(self) -> None:
        """Start missing workers, or end surplus ones, those not up yet first.

        At least one worker is up or starting, except in the pause after a failed start. Lent workers do not count: they
        may die before they return.
        """
        missing = self._missing()
        if missing >= 0:
            self._held_back = 0
        if self._now >= self._start_after:
            for _ in range(missing):
                worker = self._new_worker(None)
                worker.deadline = self._now + self._start_s
                self._out.append(ev.StartWorker(worker.name))
        if missing < 0:
            self._let_some_go(-missing)

    def _missing(self) -> int:
        return max(self.own - self._own_present(), 1 - self.staying - self.starting)

    def _let_some_go(self, count: int) -> None:
        # Workers with a key come from another feed or return from one: they already run, and answer in a moment.
        waiting = [w for w in self.workers.values() if w.phase is WorkerPhase.STARTING and w.key is None]
        for worker in list(reversed(waiting))[:count]:
            self._forget(worker)
            self._out.append(ev.EndWorker(worker.name))
        count -= min(count, len(waiting))
        spared = self._spared(count)
        for worker in spared:
            self._let_go(worker, None)
        self._hold_back(count - len(spared))

    def _spared(self, count: int) -> list[SupervisedWorker]:
        staying = self.dispensable()
        own = [worker for worker in staying if worker.owner is None]
        here, ours = Counter(worker.node for worker in staying), Counter(worker.node for worker in own)
        if len(here) == 1:  # the node stays in use, or a running worker returns to it
            return own[:count]
        machines = []
        for node, workers in here.items():
            keeps, room = self._kept.of(node, self._now)
            machines.append(
                Machine(
                    node=node,
                    workers=workers,
                    own=ours[node],
                    keeps_bytes=keeps,
                    room_bytes=room,
                    is_of_use=self.homes.has_room(node),
                )
            )
        chosen = []
        for node in to_let_go(machines, count):
            chosen.append(next(worker for worker in own if worker.node == node and worker not in chosen))
        return chosen

    def _hold_back(self, workers: int) -> None:
        if workers and workers != self._held_back:
            idle = counted(workers, "idle prep worker")
            self._note(f"keeping {idle}: no other node has room for the samples cached on theirs")
        self._held_back = workers

    def _own_present(self) -> int:
        # Includes lent workers; excludes workers that are about to end or on draining nodes, which are replaced now.
        here = sum(
            worker.owner is None
            and (worker.phase is not WorkerPhase.LEAVING or worker.target is not None)
            and worker.node not in self.draining
            for worker in self.workers.values()
        )
        return here + sum(map(len, self.lent.values()))

    def _scale(self, workers: int) -> None:
        # On a decrease, borrowed workers return first.
        borrowed = [worker for worker in self.dispensable() if worker.owner is not None]
        for worker in borrowed[: max(0, self.staying + self.starting - workers)]:
            self._let_go(worker, worker.owner)
        away = sum(map(len, self.lent.values())) + sum(
            worker.owner is None and worker.target is not None for worker in self.workers.values()
        )
        self.own = max(1, workers - sum(self.borrowed.values())) + away

    def _new_worker(self, owner: str | None) -> SupervisedWorker:
        name = f"prep-{next(self._numbers)}"  # never reuse a name that Ray may still hold
        worker = self.workers[name] = SupervisedWorker(name, self.stories.begin("worker", name), owner)
        worker.story.tell("asked for")
        return worker

    def _take_in(self, key: Hashable, owner: str | None) -> None:
        self._end_lending(key)
        worker = self._new_worker(owner)
        worker.key, worker.deadline = key, self._now + BRIEFING_S
        self._out.append(ev.TakeIn(worker.name, key, owner))

    def _worker_started(self, event: ev.WorkerStarted) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:  # given up during its start
            self._out.append(ev.EndWorker(event.worker))
        elif worker.phase is WorkerPhase.STARTING:
            worker.node = event.node
            # Its answer may have been sent before Ray reported the node's death.
            if event.node in self.dead:
                self._worker_gone(worker, "its machine is gone")
            else:
                worker.transition(WorkerPhase.BRIEFING)

    def _start_failed(self, event: ev.StartFailed) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is not WorkerPhase.STARTING:
            return
        self._forget(worker, event.reason)
        if event.reason != self._last_failure:
            self._note(f"{worker.name} did not start, another one is tried: {event.reason}")
        self._last_failure = event.reason
        # One pause for all: the cause, usually a lack of CPUs, affects the others too.
        self._start_after = self._now + RETRY_S

    def _brief(self) -> None:
        for worker in self.workers.values():
            cache = self.caches.get(worker.node)
            has_homes = worker.node in self.homes.current.weights and cache is not None and cache.answers
            is_told = self.homes.move is not None and worker.name in self.homes.move.workers
            if worker.phase is WorkerPhase.BRIEFING and worker.deadline is None and has_homes and not is_told:
                worker.deadline = self._now + BRIEFING_S
                self._out.append(ev.BriefWorker(worker.name, self.homes.current.version))

    def _briefed(self, name: str, version: int) -> None:
        worker = self.workers.get(name)
        if worker is None or worker.phase is not WorkerPhase.BRIEFING:
            return
        worker.deadline, worker.failures = None, 0
        worker.version = max(worker.version, version)
        if worker.version >= self.homes.current.version and worker.node in self.homes.current.weights:
            worker.transition(WorkerPhase.WORKING)
            self._last_failure = ""
            self._tell(staging.WorkerUp(name, self._credit, worker.node))

    def _briefing_failed(self, event: ev.BriefingFailed) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is not WorkerPhase.BRIEFING:
            return
        worker.deadline = None  # briefed again with the next event
        worker.failures += 1
        if worker.failures >= BRIEFINGS:
            self._worker_gone(worker, f"it did not get the placement: {event.reason}")

    def _behind(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.phase is WorkerPhase.WORKING:
            self._take_off_work(worker, "it does not know the newest placement")

    def _take_off_work(self, worker: SupervisedWorker, why: str) -> None:
        worker.transition(WorkerPhase.BRIEFING)
        worker.version = 0  # it may lack any placement in use, not only the newest
        self._tell(staging.WorkerDown(worker.name, why, blame=False))

    # ---- workers that go ----

    def _died(self, event: ev.WorkerDied) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is WorkerPhase.STARTING:
            return  # the shell that starts it reports failures
        cache = self.caches.get(worker.node)
        self._worker_gone(worker, event.reason, blame=event.blame)
        if cache is not None and cache.phase in (CachePhase.UP, CachePhase.VACATING):
            self._doubt(cache)  # its node may be gone before Ray has noticed

    def _worker_gone(self, worker: SupervisedWorker, reason: str, *, blame: bool = True) -> None:
        # `_match_worker_count` replaces it if needed.
        had_tasks = worker.phase in (WorkerPhase.WORKING, WorkerPhase.LEAVING)
        self._forget(worker, reason)
        if worker.owner is not None:
            self._out.append(ev.ReportLentGone(worker.name, worker.owner))
        # Kill it in any case: if it only hangs or is disconnected, it would keep its CPU and write useless data.
        self._out.append(ev.EndWorker(worker.name))
        if had_tasks:
            self._tell(staging.WorkerDown(worker.name, reason, blame=blame))

    def _forget(self, worker: SupervisedWorker, why: str = "it is not needed, or works elsewhere") -> None:
        worker.transition(WorkerPhase.GONE, "{}", why)
        self.stories.end(worker.story)
        del self.workers[worker.name]

    def _let_go(self, worker: SupervisedWorker, target: str | None) -> None:
        was_working = worker.phase is WorkerPhase.WORKING
        worker.transition(WorkerPhase.LEAVING)
        worker.target, worker.left_s = target, self._now
        if was_working:
            self._tell(staging.WorkerLeaves(worker.name))
        else:
            self._depart(worker)

    def _done(self, name: str) -> None:
        worker = self.workers.get(name)
        if worker is not None and worker.phase is WorkerPhase.LEAVING:
            self._depart(worker)

    def _depart(self, worker: SupervisedWorker) -> None:
        if worker.target is None:
            self._forget(worker)
            self._out.append(ev.EndWorker(worker.name))
        else:
            worker.transition(WorkerPhase.HANDED_OVER)
            worker.deadline = self._now + HAND_OVER_S
            self._out.append(ev.HandOver(worker.name, worker.target))

    # ---- workers of other feeds ----

    def _lend(self, event: ev.Lend) -> None:
        worker = next((worker for worker in self.dispensable() if worker.owner == event.owner), None)
        if worker is not None and self.staying > 1:  # keep the last one: trials would wait for a start
            self._let_go(worker, event.target)

    def _handed_over(self, event: ev.HandedOver) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is not WorkerPhase.HANDED_OVER:
            return
        assert worker.target is not None
        self._forget(worker)
        if event.taken and worker.owner is None:
            self.lent.setdefault(worker.target, []).append(worker.name)
        elif not event.taken and worker.owner is None:
            self._note(f"{worker.target} did not take {worker.name}")
            self._take_in(worker.name, None)
        elif not event.taken:
            self._out.append(ev.EndWorker(worker.name))  # its owner replaces it once it answers

    def _lent_gone(self, key: Hashable) -> None:
        self._end_lending(key)
        worker = self.workers.get(key) if isinstance(key, str) else None
        if worker is not None and worker.phase is WorkerPhase.HANDED_OVER:
            self._forget(worker, "it was gone before the feed that took it could say so")

    def _fetch_back(self, feed: str) -> None:
        for worker in [w for w in self.workers.values() if w.phase is WorkerPhase.HANDED_OVER and w.target == feed]:
            self._handed_over(ev.HandedOver(worker.name, taken=False))
        for key in self.lent.pop(feed, []):
            self._note(f"{feed} is gone, and a worker that it had borrowed comes back")
            self._take_in(key, None)

    def _end_lending(self, key: Hashable) -> None:
        self.lent = {feed: left for feed, keys in self.lent.items() if (left := [k for k in keys if k != key])}

    # ---- cache nodes and cluster nodes ----

    def _open_caches(self) -> None:
        for node in sorted({worker.node for worker in self.workers.values() if worker.stays} - self.draining.keys()):
            cache = self.caches.get(node)
            if cache is None and self._now >= self._open_after.get(node, -math.inf):
                # Generations are unique over all nodes, so Ray cannot still hold the name.
                self._generation += 1
                cache = self.caches[node] = self._new_cache(node, self._generation)
                cache.deadline = self._now + CACHE_START_S
                self._out.append(ev.StartCache(node, cache.generation))
            elif cache is not None and cache.phase is CachePhase.VACATING:
                cache.transition(CachePhase.UP)

    def _new_cache(self, node: str, generation: int) -> SupervisedCache:
        story = self.stories.begin("cache node", f"cache {node}")
        story.tell("asked for, generation {}", generation)
        return SupervisedCache(node, generation, self._now, story)

    def _cache(self, node: str, generation: int) -> SupervisedCache | None:
        cache = self.caches.get(node)
        return cache if cache is not None and cache.generation == generation else None

    def _cache_started(self, event: ev.CacheStarted) -> None:
        cache = self._cache(event.node, event.generation)
        if cache is None:  # given up during its start
            self._out.append(ev.EndCache(event.node, event.generation))
        elif cache.phase is CachePhase.STARTING:
            cache.transition(CachePhase.UP)
            self._take_in_room(cache, event.room_bytes)

    def _take_in_room(self, cache: SupervisedCache, room_bytes: float) -> None:
        cache.room_bytes = room_bytes
        if not self.homes.has_room(cache.node):
            self._note(
                f"node {_short(cache.node)} gets no parts of blocks while others can have them: its object store has "
                f"room for {size(room_bytes)} of prepared samples, and up to {size(self._staging_bytes)} may be staged"
            )

    def _cache_failed(self, event: ev.CacheFailed) -> None:
        cache = self._cache(event.node, event.generation)
        if cache is not None and cache.phase is CachePhase.STARTING:
            self._end_cache(cache, event.reason)
            self._open_later(event.node)
            self._note(f"the cache of node {_short(event.node)} did not start, it is tried again: {event.reason}")

    def _open_later(self, node: str) -> None:
        self._open_after = {each: at for each, at in self._open_after.items() if at > self._now}  # drop expired entries
        self._open_after[node] = self._now + RETRY_S

    def _doubt(self, cache: SupervisedCache) -> None:
        cache.transition(CachePhase.DOUBTED)
        cache.deadline = self._now + PROBE_S
        self._out.append(ev.ProbeCache(cache.node, cache.generation))

    def _cache_probed(self, event: ev.CacheProbed) -> None:
        cache = self._cache(event.node, event.generation)
        if cache is None or cache.phase is not CachePhase.DOUBTED:
            return
        if event.answers:
            cache.transition(CachePhase.UP)
        else:
            self._node_gone(event.node, "its cache does not answer")

    def _end_cache(self, cache: SupervisedCache, why: str) -> None:
        cache.transition(CachePhase.GONE, "{}", why)
        self.stories.end(cache.story)
        del self.caches[cache.node]
        self._out.append(ev.EndCache(cache.node, cache.generation))

    def _nodes_dead(self, nodes: frozenset[str]) -> None:
        ours = {*self.caches, *(worker.node for worker in self.workers.values())}
        for node in sorted(nodes - self.dead.keys()):  # sorted: instructions must be deterministic
            self.dead[node] = None
            if len(self.dead) > KEPT_DEAD:
                del self.dead[next(iter(self.dead))]
            if node in ours:
                self._node_gone(node, "Ray says that it is dead")
            else:  # only consumers ran there
                self._tell(staging.NodeDown(node, "Ray says that it is dead"))

    def _nodes_draining(self, nodes: frozenset[str]) -> None:
        # The steps after every event act on the draining nodes.
        ours = {*self.caches, *(worker.node for worker in self.workers.values())}
        for node in sorted((nodes & ours) - self.draining.keys() - self.dead.keys()):
            self.draining[node] = None
            self._note(f"node {_short(node)} will be gone soon: its workers and samples move to other nodes")
        for node in [node for node in self.draining if node not in nodes]:
            del self.draining[node]
            if node not in self.dead:
                self._note(f"node {_short(node)} is no longer draining")
                self._tell(staging.NodeStays(node))

    def _leave_draining(self) -> None:
        # Workers on draining nodes continue until another node has a working one: the feed would stall otherwise.
        if any(w.phase is WorkerPhase.WORKING and w.node not in self.draining for w in self.workers.values()):
            for worker in [w for w in self.workers.values() if w.stays and w.node in self.draining]:
                self._let_go(worker, worker.owner)

    def _node_gone(self, node: str, reason: str) -> None:
        self.draining.pop(node, None)
        cache = self.caches.get(node)
        if cache is not None:
            self._end_cache(cache, reason)
            self._open_later(node)
        for worker in [worker for worker in self.workers.values() if worker.node == node]:
            # A node's death is not a block's fault: after three such deaths the block would fail.
            self._worker_gone(worker, f"node {_short(node)} is gone: {reason}", blame=False)
        self._tell(staging.NodeDown(node, reason))

    def _vacate(self) -> None:
        # A leaving worker still counts: it reads from the local cache until its last part is prepared.
        used = {*self.homes.used, *(worker.node for worker in self.workers.values())}
        if not self.homes.current.weights:
            return  # no homes yet: the caches hold the only copies
        for cache in self.caches.values():
            if cache.phase is CachePhase.UP and cache.node not in used:
                cache.transition(CachePhase.VACATING)
                self._move_out(cache)
                if cache.node in self.draining:
                    self._tell(staging.NodeLeaves(cache.node))

    def _move_out(self, cache: SupervisedCache) -> None:
        cache.deadline = self._now + VACATE_S
        self._out.append(ev.VacateNode(cache.node))

    def _vacated(self, event: ev.NodeVacated) -> None:
        cache = self.caches.get(event.node)
        if cache is None or cache.phase is not CachePhase.VACATING:
            return
        if event.samples and event.left:
            # Copying a large cache takes minutes. As long as samples arrive, that is better than reading storage.
            self._move_out(cache)
        else:
            self._end_cache(cache, "it is not needed any more")
            self._note(f"node {_short(event.node)} is not needed any more")

    # ---- homes ----

    def _move_homes(self) -> None:
        move = self.homes.next_move(self._now)
        if move is not None:
            if move.reason:
                self._note(move.reason)
            self._out.append(ev.MovePlacement(move.version, move.weights, move.workers))

    def _moved(self, event: ev.PlacementMoved) -> None:
        if not self.homes.use(event.version):
            return  # a late report of a failed move
        placement = self.homes.current
        self._out.append(ev.UsePlacement(placement.version))
        where = counted(len(placement.weights), "node")
        self._note(f"samples are cached and prepared on {where}: {self._described(placement)}")
        for worker in list(self.workers.values()):
            if worker.phase is WorkerPhase.WORKING and worker.node in self.draining:
                self._let_go(worker, worker.owner)  # it finishes its tasks; its cache is still there
            elif worker.phase is WorkerPhase.WORKING and worker.node not in placement.weights:
                # Otherwise it would get parts of other nodes, and the results would be staged on its own.
                self._take_off_work(worker, "its node has no homes any more")
            elif worker.name in event.told:
                worker.version = max(worker.version, placement.version)
                self._briefed(worker.name, placement.version)
            elif worker.phase is WorkerPhase.WORKING:
                self._behind(worker.name)

    def _described(self, placement: HomeWeights) -> str:
        total = sum(placement.weights.values())
        return ", ".join(
            f"{_short(node)} ({counted(self.workers_on(node), 'prep worker')}, {percent(weight / total)})"
            for node, weight in sorted(placement.weights.items())
        )

    def _move_failed(self, reason: str) -> None:
        self.homes.give_up(self._now)
        self._note(f"placement update failed, retrying: {reason}")

    # ---- time ----

    def _tick(self) -> None:
        for worker in list(self.workers.values()):
            if worker.deadline is not None and self._now >= worker.deadline:
                self._overdue(worker)
        for cache in list(self.caches.values()):
            if cache.deadline is not None and self._now >= cache.deadline:
                self._overdue_cache(cache)
        if self.homes.is_overdue(self._now):
            self._move_failed(f"no answer for {seconds(MOVE_S)}")

    def _overdue(self, worker: SupervisedWorker) -> None:
        match worker.phase:
            case WorkerPhase.STARTING:
                self._out.append(ev.EndWorker(worker.name))
                self._start_failed(ev.StartFailed(worker.name, "it did not answer"))
            case WorkerPhase.BRIEFING:
                self._briefing_failed(ev.BriefingFailed(worker.name, f"it did not answer for {seconds(BRIEFING_S)}"))
            case WorkerPhase.HANDED_OVER:
                self._handed_over(ev.HandedOver(worker.name, taken=False))

    def _overdue_cache(self, cache: SupervisedCache) -> None:
        match cache.phase:
            case CachePhase.STARTING:
                reason = f"it did not answer for {seconds(CACHE_START_S)}"
                self._cache_failed(ev.CacheFailed(cache.node, cache.generation, reason))
            case CachePhase.DOUBTED:
                self._cache_probed(ev.CacheProbed(cache.node, cache.generation, answers=False))
            case CachePhase.VACATING:
                self._vacated(ev.NodeVacated(cache.node))

    # ---- queries ----

    @property
    def staying(self) -> int:
        """Number of workers that are up, not leaving, and not on draining nodes."""
        return sum(worker.stays and worker.node not in self.draining for worker in self.workers.values())

    @property
    def starting(self) -> int:
        """Number of workers that were requested and are not up yet."""
        return sum(worker.phase is WorkerPhase.STARTING for worker in self.workers.values())

    @property
    def wanted(self) -> int:
        """Number of workers that should be up here and stay, including borrowed ones."""
        away = self._own_present() - sum(
            worker.owner is None
            and (worker.stays or worker.phase is WorkerPhase.STARTING)
            and worker.node not in self.draining
            for worker in self.workers.values()
        )
        return max(1, self.own - away + sum(self.borrowed.values()))

    @property
    def away(self) -> int:
        """Number of own workers that are at other feeds, or on their way there or back."""
        moving = sum(
            worker.owner is None
            and (worker.target is not None or (worker.key is not None and worker.phase is WorkerPhase.STARTING))
            for worker in self.workers.values()
        )
        return moving + sum(map(len, self.lent.values()))

    @property
    def borrowed(self) -> dict[str, int]:
        """Owner feed -> number of its workers that are here and stay."""
        owners = (worker.owner for worker in self.workers.values() if worker.stays)
        return dict(Counter(owner for owner in owners if owner is not None))

    @property
    def machines(self) -> frozenset[str]:
        """The nodes of workers that are up and stay."""
        return frozenset(worker.node for worker in self.workers.values() if worker.stays)

    def workers_on(self, node: str) -> int:
        """Return the number of workers that are up on a node and stay."""
        return sum(worker.stays and worker.node == node for worker in self.workers.values())

    def in_phase(self, phase: WorkerPhase) -> dict[str, SupervisedWorker]:
        """Return the workers in a phase, by name."""
        return {name: worker for name, worker in self.workers.items() if worker.phase is phase}

    def dispensable(self) -> list[SupervisedWorker]:
        """Return the workers that stay, the most dispensable first.

        Workers on nodes without room for staged blocks come first, then workers on nodes with the fewest workers, so
        that nodes become free. Nodes whose cached samples fit on no other node come last, in descending number of
        workers.
        """
        staying = [worker for worker in self.workers.values() if worker.stays and worker.node not in self.draining]
        kept = {node: self._kept.of(node, self._now) for node in {worker.node for worker in staying}}
        room = sum(room for _, room in kept.values())

        def place(worker: SupervisedWorker) -> tuple[bool, bool, int, str]:
            keeps, own_room = kept[worker.node]
            is_lost, workers = keeps > room - own_room, self.workers_on(worker.node)
            return self.homes.has_room(worker.node), is_lost, -workers if is_lost else workers, worker.node

        return sorted(staying, key=place)

    def told_waits(self, now: float) -> tuple[str, ...]:
        """Return a sentence for each current wait, with its duration."""
        return self._waits.sentences(now)

    def _awaited(self) -> dict[str, str]:
        if not self._begun or self.ended is not None:
            return {}
        return awaited(
            self.workers,
            self.caches,
            self.homes,
            missing=self._missing(),
            needs=self._needs,
            last_failure=self._last_failure,
        )

    # ---- helpers ----

    def _tell(self, event: staging.Event) -> None:
        self._out.append(ev.Forward(event))

    def _note(self, text: str) -> None:
        self._out.append(ev.Note(text))

    def validate(self) -> None:
        """Check every invariant; raise InvariantError with the stories concerned."""
        for broken, things in self._contradictions():
            raise InvariantError(broken, *(thing.story for thing in things))

    def _contradictions(self) -> Iterator[tuple[str, Iterable[SupervisedWorker | SupervisedCache]]]:
        for worker in self.workers.values():
            if worker.node in self.dead:
                yield f"{worker.name} is on a machine that is gone", [worker]
            if (worker.phase is WorkerPhase.STARTING) != (worker.node == ""):
                yield f"{worker.name} runs on {worker.node!r} while it is {worker.phase.name}", [worker]
            if worker.phase is WorkerPhase.WORKING and not worker.version >= self.homes.current.version > 0:
                yield f"{worker.name} works without the newest placement", [worker]
            if worker.phase in (WorkerPhase.STARTING, WorkerPhase.HANDED_OVER) and worker.deadline is None:
                yield f"{worker.name} is awaited for ever", [worker]
        for node, cache in self.caches.items():
            if node in self.dead:
                yield f"the cache of {node} is on a machine that is gone", [cache]
            if (cache.phase is CachePhase.UP) == (cache.deadline is not None):
                yield f"the cache of {node} is awaited for ever, or for nothing", [cache]
        if self._begun and self.ended is None and self._now >= self._start_after:
            if self.staying + self.starting < 1:
                yield "no worker is left or starting", self.workers.values()
            if self._own_present() < self.own:
                yield "a worker is missing, and none is starting", self.workers.values()


def _short(node: str) -> str:
    return node[:8]
