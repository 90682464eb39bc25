"""Who works where: one state machine for a feed's prep workers, cache nodes and lanes, and the homes of its samples.

It takes events and answers with instructions, and does nothing else: no clock, thread or Ray call. All decisions of
recovery are made here, so a feed goes on after any loss: a worker or cache that is missing is started again for as long
as it is wanted, even if none is left. The short list of reasons for which a feed ends is `FeedEnd`.

When to scale and to lend is decided elsewhere, by `mbaas.allocation.scaling` and `mbaas.allocation.lending`, which are
pure, too. What they decide comes here as `Scale` and `Lend`; which workers come and go for it is decided here.

What happens to a worker (see `WorkerPhase`)::

    StartWorker / TakeIn ──► STARTING ──WorkerStarted──► BRIEFING ──told the placement──► WORKING
                                 ▲                          ▲  ▲                          │    │
                           StartFailed: after a pause       │  └──── WorkerBehind ────────┘    │ Scale, Lend
                           another is started       Begin, Offered                             ▼
                                                                  HANDED_OVER ◄──WorkerDone── LEAVING ──► ended

    and from every state to GONE: it died, it is stuck, its machine is gone, it cannot be told the placement.

What happens to a cache node (`CachePhase`)::

    StartCache ──► STARTING ──► UP ◄──► DOUBTED (a worker died beside it: does it still answer?)
                                 │ ▲
                   no home there │ │ a worker came back
                                 ▼ │
                              VACATING ──► DOUBTED, or ended

    and from every state to GONE: it does not come up, it does not answer, its machine is gone.

What happens to a further lane (`LanePhase`; the first one is the main coordinator's own)::

    Begin ──► BRIEFING ──LaneAnswered──► SERVING ◄──LaneAnswered──► SILENT (nothing was heard for 5 s)
                 ▲                          │                          │
                 └─────────LaneLost─────────┴──after 30 s, RestartLane─┘

A machine whose cache does not answer, or of which Ray says that it is dead, is given up with all that runs on it.

Homes follow the workers: samples have their homes on the machines that have a worker and a cache. A new placement is
found and told in one instruction (`MovePlacement`), one at a time, and lanes cut blocks by it only once it was told.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator

from mbaas.allocation.giving_back import KeptBytes, Machine, to_let_go
from mbaas.core import cluster_events as ev
from mbaas.core import events as staging
from mbaas.core.homes import MOVE_S, Homes, HomeWeights
from mbaas.core.lanes import Lanes
from mbaas.core.story import InvariantError, Stories
from mbaas.core.supervised import (
    BEGIN_S,
    CACHE_START_S,
    MACHINE_S,
    RETRY_S,
    CachePhase,
    SupervisedCache,
    SupervisedWorker,
    WorkerPhase,
)
from mbaas.core.waits import WaitTable, awaited
from mbaas.units import counted, percent, seconds, size

START_S = MACHINE_S + BEGIN_S + 15.0
"""After this long a worker that did not come up is asked for anew: it may wait for a machine, and then for its process.
The shell that starts it gives up sooner, and can say why.
"""

BRIEFING_S = 30.0
"""Longest time in which a worker must have been told the placement."""

BRIEFINGS = 3
"""Failed briefings in a row after which a worker is ended and another one started."""

PROBE_S = 10.0
"""Longest wait for the answer of a doubted cache node; the shell, which asks it, gives up sooner."""

VACATE_S = 120.0
"""Longest time until the others say how much they have fetched of what a machine keeps that is not needed any more."""

HAND_OVER_S = 30.0
"""Longest wait for another feed to say whether it takes a worker."""

KEPT_DEAD = 1000
"""Machines that are gone are remembered so that late reports from them are recognised; Ray takes none back."""


class Supervisor:
    """See the module's docstring.

    Args:
        own: workers that the feed was promised.
        credit: tasks that a lane gives to a worker at a time.
        lanes: how many the feed has.
        start_s: seconds that a worker may take from when it is asked for until it answers.
        staging_bytes: the most that may be staged of the feed; see `mbaas.core.homes` for machines without that room.
        needs: the resources that each worker reserves, for people: "1 CPU".

    Attributes:
        own: workers of its own that the feed is to have, here or lent. Borrowed ones come in addition: a worker is
            replaced by its owner, so each is counted by one feed only.
        workers: by name, those that were asked for and are not gone; a coordinator uses a name once.
        caches: by machine; at most one each.
        lent: feed -> keys of our workers that work for it.
        homes: where samples have their homes.
        lanes: the further lanes.
        stories: what happened to each worker, cache node and further lane.
        dead: machines of which Ray says that they are gone.
        draining: machines of which Ray says that they will be gone soon, with workers or a cache of ours.
        ended: why the feed ended; nothing is started any more then.
    """

    def __init__(
        self,
        *,
        own: int,
        credit: int,
        lanes: int = 1,
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
        self.lanes = Lanes(self.stories)
        self._credit, self._lane_count = credit, lanes
        self._start_s, self._staging_bytes, self._needs = start_s, staging_bytes, needs
        self._waits = WaitTable()
        self._kept = KeptBytes()
        self._held_back = 0  # workers that are not needed and stay for what their machines keep, as was said last
        self._begun = False
        self._numbers: Iterator[int]  # the numbers of workers that will come; from `Begin` on
        self._generation = 0
        self._start_after = -math.inf
        self._open_after: dict[str, float] = {}
        self._last_failure = ""
        self._now: float  # of the event that is handled
        self._out: list[ev.Instruction] = []

    def handle(self, event: ev.Event, now: float) -> list[ev.Instruction]:
        """Take one event, and return what must be done about it, in order."""
        self._now, self._out = now, []
        self.stories.now, self.stories.cause = now, event
        if self.ended is not None:
            self._after_the_end(event)
            return self._out
        self._take(event)
        # After every event, whichever it was: what is missing is compared with what there is, so no event needs to know
        # what follows from it, and one that got lost is made good for by the next.
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
        """What the newest event has led to so far: all that is left of it, if it met a bug."""
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
                self._done(event.worker, event.lane)
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
            case ev.LaneAnswered():
                self.lanes.answered(event.lane, self._now)
            case ev.LaneLost():
                self.lanes.lost(event.lane, self._now)
            case ev.Stop():
                self._stop(event.reason)
            case ev.Tick():
                self._tick()

    # ---- beginning and end ----

    def _begin(self, event: ev.Begin) -> None:
        """Take in what is there already.

        Workers are BRIEFING, whatever they were told before: a restarted coordinator does not know what they know.
        """
        self._begun = True
        self.lanes.begin(self._lane_count, self._now)
        self.homes.version, self._numbers = event.version, itertools.count(event.serial)
        self.lent = {feed: list(keys) for feed, keys in event.lent.items() if keys}
        for name, found in event.workers.items():
            story = self.stories.begin("worker", name)
            story.tell("it was there when the coordinator began, on node {}", found.node)
            self.workers[name] = SupervisedWorker(name, story, found.owner, found.node, WorkerPhase.BRIEFING)
        if event.is_restart:
            self.own = max(self.own, self._own_present())  # more, if the predecessor had asked for more
        self._end_silent(name for name, found in event.workers.items() if not found.answers)
        self._take_over_caches(event)
        if event.is_restart:
            self._note(
                f"the coordinator was restarted; {counted(len(self.workers), 'prep worker')} and "
                f"{counted(len(self.caches), 'cache node')} go on"
            )

    def _end_silent(self, workers: Iterable[str]) -> None:
        """End workers that do not answer a coordinator which begins; who lent one hears of it, and starts another."""
        for name in workers:
            self._worker_gone(self.workers[name], "it does not answer the coordinator that was restarted")

    def _take_over_caches(self, event: ev.Begin) -> None:
        youngest = dict(sorted(event.caches))
        for (node, generation), answers in event.caches.items():
            self._generation = max(self._generation, generation)
            if generation < youngest[node]:  # it was given up, and the order to end it did not reach it
                self._out.append(ev.EndCache(node, generation))
                continue
            cache = self.caches[node] = self._new_cache(node, generation)
            cache.transition(CachePhase.UP, "it was there when the coordinator began")
            self._take_in_room(cache, event.rooms.get(node, math.inf))
            if not answers:
                self._doubt(cache)

    def _stop(self, reason: str) -> None:
        self.ended = reason
        self._out += [ev.EndLane(number) for number in self.lanes.end(reason)]
        for worker in self.workers.values():
            if worker.owner is not None and worker.phase is not WorkerPhase.STARTING:
                self._out.append(ev.HandOver(worker.name, worker.owner))  # it goes home, or ends with its owner
            else:
                self._out.append(ev.EndWorker(worker.name))
        self._out += [ev.EndLent(key) for keys in self.lent.values() for key in keys]
        for worker in list(self.workers.values()):
            self._forget(worker, reason)
        for cache in list(self.caches.values()):
            self._end_cache(cache, reason)
        self.lent.clear()

    def _after_the_end(self, event: ev.Event) -> None:
        """Send away workers and caches that come late; nothing else happens any more."""
        match event:
            case ev.WorkerStarted() | ev.HandedOver(taken=False):
                self._out.append(ev.EndWorker(event.worker))
            case ev.Offered():
                self._out.append(ev.RefuseOffer(event.key))
            case ev.CacheStarted():
                self._out.append(ev.EndCache(event.node, event.generation))

    # ---- workers that come ----

    def _match_worker_count(self) -> None:
        """Have as many workers as the feed is to have: start more, or let some go, those first that are not up yet.

        At least one is up or starting, except in the pause after a start that failed. That holds also while all of its
        own are lent: they may be gone before they come back.
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
        """Workers that should be started; below 0 if there are too many."""
        return max(self.own - self._own_present(), 1 - self.staying - self.starting)

    def _let_some_go(self, count: int) -> None:
        # Those with a key come from another feed or back from one: they run already, and answer in a moment.
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
        """Choose workers of its own to let go: not more than can go without losing what their machines keep."""
        staying = self.dispensable()
        own = [worker for worker in staying if worker.owner is None]
        here, ours = Counter(worker.node for worker in staying), Counter(worker.node for worker in own)
        if len(here) == 1:  # it stays, or somebody comes back who is up already
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
        """Note how many workers stay although they are not needed, if that is news."""
        if workers and workers != self._held_back:
            stay = f"{counted(workers, 'prep worker')} {'stays' if workers == 1 else 'stay'} though fewer would do"
            self._note(f"{stay}: other machines have no room for the samples that theirs keep")
        self._held_back = workers

    def _own_present(self) -> int:
        """Workers of its own that the feed has, or has asked for, here or lent.

        Without those that leave to end, and those on draining machines: others are started in their place now.
        """
        here = sum(
            worker.owner is None
            and (worker.phase is not WorkerPhase.LEAVING or worker.target is not None)
            and worker.node not in self.draining
            for worker in self.workers.values()
        )
        return here + sum(map(len, self.lent.values()))

    def _scale(self, workers: int) -> None:
        """Have this many workers here: if that is fewer than now, borrowed ones go home first."""
        borrowed = [worker for worker in self.dispensable() if worker.owner is not None]
        for worker in borrowed[: max(0, self.staying + self.starting - workers)]:
            self._let_go(worker, worker.owner)
        away = sum(map(len, self.lent.values())) + sum(
            worker.owner is None and worker.target is not None for worker in self.workers.values()
        )
        self.own = max(1, workers - sum(self.borrowed.values())) + away

    def _new_worker(self, owner: str | None) -> SupervisedWorker:
        name = f"prep-{next(self._numbers)}"  # one that Ray may still hold is not asked for again
        worker = self.workers[name] = SupervisedWorker(name, self.stories.begin("worker", name), owner)
        worker.story.tell("asked for")
        return worker

    def _take_in(self, key: Hashable, owner: str | None) -> None:
        """Take a worker that another feed offers, or that comes back."""
        self._end_lending(key)
        worker = self._new_worker(owner)
        worker.key, worker.deadline = key, self._now + BRIEFING_S
        self._out.append(ev.TakeIn(worker.name, key, owner))

    def _worker_started(self, event: ev.WorkerStarted) -> None:
        worker = self.workers.get(event.worker)
        if worker is None:  # it was given up while it started
            self._out.append(ev.EndWorker(event.worker))
        elif worker.phase is WorkerPhase.STARTING:
            worker.node = event.node
            # Its answer may have been on the way when Ray reported the machine's death.
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
        # One pause for all: what kept this one from starting, most often a lack of CPUs, keeps others, too.
        self._start_after = self._now + RETRY_S

    def _brief(self) -> None:
        """Tell workers the placement that are up, on machines that it includes."""
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
            worker.turns += 1
            self._last_failure = ""
            self._tell(staging.WorkerUp(name, self._credit, worker.node))

    def _briefing_failed(self, event: ev.BriefingFailed) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is not WorkerPhase.BRIEFING:
            return
        worker.deadline = None  # so that it is told again, with the next event
        worker.failures += 1
        if worker.failures >= BRIEFINGS:
            self._worker_gone(worker, f"it could not be told the placement: {event.reason}")

    def _behind(self, name: str) -> None:
        """Brief a worker that lacks a placement: its tasks go to others, and it is not blamed for them."""
        worker = self.workers.get(name)
        if worker is not None and worker.phase is WorkerPhase.WORKING:
            self._take_off_work(worker, "it does not know the newest placement")

    def _take_off_work(self, worker: SupervisedWorker, why: str) -> None:
        worker.transition(WorkerPhase.BRIEFING)
        worker.version = 0  # it may lack any of the placements that blocks were cut by, not just the newest
        self._tell(staging.WorkerDown(worker.name, why, blame=False))

    # ---- workers that go ----

    def _died(self, event: ev.WorkerDied) -> None:
        worker = self.workers.get(event.worker)
        if worker is None or worker.phase is WorkerPhase.STARTING:
            return  # the shell that starts it reports that; this is a late report of a lane
        cache = self.caches.get(worker.node)
        self._worker_gone(worker, event.reason, blame=event.blame)
        if cache is not None and cache.phase in (CachePhase.UP, CachePhase.VACATING):
            self._doubt(cache)  # perhaps its machine is gone, and Ray does not know yet

    def _worker_gone(self, worker: SupervisedWorker, reason: str, *, blame: bool = True) -> None:
        """End what is left of a worker that is gone, or must be. If it is missed, another one is started."""
        had_tasks = worker.phase in (WorkerPhase.WORKING, WorkerPhase.LEAVING)
        self._forget(worker, reason)
        if worker.owner is not None:
            self._out.append(ev.ReportLentGone(worker.name, worker.owner))
        # Killed in any case: one that was only stuck, or cut off, would hold its CPU and write what nobody reads.
        self._out.append(ev.EndWorker(worker.name))
        if had_tasks:
            self._tell(staging.WorkerDown(worker.name, reason, blame=blame))

    def _forget(self, worker: SupervisedWorker, why: str = "it is not needed, or works elsewhere") -> None:
        worker.transition(WorkerPhase.GONE, "{}", why)
        self.stories.end(worker.story)
        del self.workers[worker.name]

    def _let_go(self, worker: SupervisedWorker, target: str | None) -> None:
        """Give a worker nothing more to do. When it has finished it goes to the feed ``target``, or ends."""
        was_working = worker.phase is WorkerPhase.WORKING
        worker.transition(WorkerPhase.LEAVING)
        worker.target = target
        if was_working:
            self._tell(staging.WorkerLeaves(worker.name))
        else:
            self._depart(worker)

    def _done(self, name: str, lane: int) -> None:
        """Note that a lane is done with a worker; it departs when all lanes are."""
        worker = self.workers.get(name)
        if worker is None or worker.phase is not WorkerPhase.LEAVING:
            return
        worker.done_in.add(lane)
        if len(worker.done_in) == self._lane_count:
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
        if worker is not None and self.staying > 1:  # the last one stays: trials that ask again would wait for a start
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
            self._out.append(ev.EndWorker(worker.name))  # its owner does not answer; it starts another when it does

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

    # ---- cache nodes and machines ----

    def _open_caches(self) -> None:
        """Start a cache node on every machine that has a worker and no cache, and will not be gone soon."""
        for node in sorted({worker.node for worker in self.workers.values() if worker.stays} - self.draining.keys()):
            cache = self.caches.get(node)
            if cache is None and self._now >= self._open_after.get(node, -math.inf):
                # A new number for each, over all machines: its name is then one that Ray cannot still hold.
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
        if cache is None:  # it was given up while it started
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
        self._open_after = {each: at for each, at in self._open_after.items() if at > self._now}  # nodes come and go
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
        for node in sorted(nodes - self.dead.keys()):  # sorted: the same events must give the same instructions
            self.dead[node] = None
            if len(self.dead) > KEPT_DEAD:
                del self.dead[next(iter(self.dead))]
            if node in ours:
                self._node_gone(node, "Ray says that it is dead")
            else:  # only consumers ran there
                self._tell(staging.NodeDown(node, "Ray says that it is dead"))

    def _nodes_draining(self, nodes: frozenset[str]) -> None:
        """Take in which machines will be gone soon; what follows from it is decided after this event and all others."""
        ours = {*self.caches, *(worker.node for worker in self.workers.values())}
        for node in sorted((nodes & ours) - self.draining.keys() - self.dead.keys()):
            self.draining[node] = None
            self._note(f"node {_short(node)} will be gone soon: what runs and lies there is moved to others")
        for node in [node for node in self.draining if node not in nodes]:
            del self.draining[node]
            if node not in self.dead:
                self._note(f"node {_short(node)} stays after all")
                self._tell(staging.NodeStays(node))

    def _leave_draining(self) -> None:
        """Let the workers go that are on draining machines, as soon as others can work in their place.

        Until then they work: a feed that stands still would gain nothing from it.
        """
        if any(w.phase is WorkerPhase.WORKING and w.node not in self.draining for w in self.workers.values()):
            for worker in [w for w in self.workers.values() if w.stays and w.node in self.draining]:
                self._let_go(worker, worker.owner)

    def _node_gone(self, node: str, reason: str) -> None:
        """Give up a machine with all that runs on it, and the parts of blocks that lie there."""
        self.draining.pop(node, None)
        cache = self.caches.get(node)
        if cache is not None:
            self._end_cache(cache, reason)
            self._open_later(node)
        for worker in [worker for worker in self.workers.values() if worker.node == node]:
            # A machine that dies is no block's fault: with the third such death the block would fail.
            self._worker_gone(worker, f"node {_short(node)} is gone: {reason}", blame=False)
        self._tell(staging.NodeDown(node, reason))

    def _vacate(self) -> None:
        """Free the machines that have neither workers nor homes any more."""
        # A worker that is leaving still counts: it fetches from the cache beside it until its last part is made.
        used = {*self.homes.used, *(worker.node for worker in self.workers.values())}
        if not self.homes.current.weights:
            return  # nobody has a home yet: what the caches keep is all that there is
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
            # A large cache takes minutes. As long as something comes, that is better than to read it from storage.
            self._move_out(cache)
        else:
            self._end_cache(cache, "it is not needed any more")
            self._note(f"node {_short(event.node)} is not needed any more")

    # ---- homes ----

    def _move_homes(self) -> None:
        """Move homes to the machines that have workers and caches, in proportion to their speed."""
        move = self.homes.next_move(self._now)
        if move is not None:
            if move.reason:
                self._note(move.reason)
            self._out.append(ev.MovePlacement(move.version, move.weights, move.workers))

    def _moved(self, event: ev.PlacementMoved) -> None:
        if not self.homes.use(event.version):
            return  # a late report of a move that was given up
        placement = self.homes.current
        self._out.append(ev.UsePlacement(placement.version))
        self._note(f"samples have homes on {counted(len(placement.weights), 'node')}: {self._described(placement)}")
        for worker in list(self.workers.values()):
            if worker.phase is WorkerPhase.WORKING and worker.node in self.draining:
                self._let_go(worker, worker.owner)  # it finishes what it has in hand, and its cache is still there
            elif worker.phase is WorkerPhase.WORKING and worker.node not in placement.weights:
                # Lanes would else give it parts of machines that lag, and what it makes would lie on its own.
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
        self._note(f"samples could not be given new homes, it is tried again: {reason}")

    # ---- time ----

    def _tick(self) -> None:
        for worker in list(self.workers.values()):
            if worker.deadline is not None and self._now >= worker.deadline:
                self._overdue(worker)
        for cache in list(self.caches.values()):
            if cache.deadline is not None and self._now >= cache.deadline:
                self._overdue_cache(cache)
        for number in self.lanes.overdue(self._now):
            self._out.append(ev.RestartLane(number))
            self._note(f"lane {number} does not answer, and is started anew")
        if self.homes.is_overdue(self._now):
            self._move_failed(f"nothing was heard for {seconds(MOVE_S)}")

    def _overdue(self, worker: SupervisedWorker) -> None:
        match worker.phase:
            case WorkerPhase.STARTING:
                self._out.append(ev.EndWorker(worker.name))
                self._start_failed(ev.StartFailed(worker.name, "nothing was heard of it"))
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

    # ---- what others ask ----

    @property
    def staying(self) -> int:
        """Workers that are up and not leaving, on machines that will stay."""
        return sum(worker.stays and worker.node not in self.draining for worker in self.workers.values())

    @property
    def starting(self) -> int:
        """Workers that were asked for and are not up yet."""
        return sum(worker.phase is WorkerPhase.STARTING for worker in self.workers.values())

    @property
    def wanted(self) -> int:
        """Workers that are to be up here and stay, with those that are borrowed."""
        away = self._own_present() - sum(
            worker.owner is None
            and (worker.stays or worker.phase is WorkerPhase.STARTING)
            and worker.node not in self.draining
            for worker in self.workers.values()
        )
        return max(1, self.own - away + sum(self.borrowed.values()))

    @property
    def borrowed(self) -> dict[str, int]:
        """Feed -> workers of it that are here and stay."""
        owners = (worker.owner for worker in self.workers.values() if worker.stays)
        return dict(Counter(owner for owner in owners if owner is not None))

    def workers_on(self, node: str) -> int:
        """Workers that are up on a machine and stay."""
        return sum(worker.stays and worker.node == node for worker in self.workers.values())

    def in_phase(self, phase: WorkerPhase) -> dict[str, SupervisedWorker]:
        """The workers in a phase, by name."""
        return {name: worker for name, worker in self.workers.items() if worker.phase is phase}

    def dispensable(self) -> list[SupervisedWorker]:
        """The workers that stay, in the order in which they can be spared one by one: first those whose machine lacks
        room, then those on machines with the fewest workers, so that machines become free; last those on machines that
        keep what no other has room for, and of these first on machines with the most.
        """
        staying = [worker for worker in self.workers.values() if worker.stays and worker.node not in self.draining]
        kept = {node: self._kept.of(node, self._now) for node in {worker.node for worker in staying}}
        room = sum(room for _, room in kept.values())

        def place(worker: SupervisedWorker) -> tuple[bool, bool, int, str]:
            keeps, own_room = kept[worker.node]
            is_lost, workers = keeps > room - own_room, self.workers_on(worker.node)
            return self.homes.has_room(worker.node), is_lost, -workers if is_lost else workers, worker.node

        return sorted(staying, key=place)

    @property
    def waits_for(self) -> tuple[str, ...]:
        """The workers, cache nodes and lanes that are awaited, each in words, without the time of the wait."""
        return self._waits.awaited

    def told_waits(self, now: float) -> tuple[str, ...]:
        """What is awaited, in sentences that say for how long so far."""
        return self._waits.sentences(now)

    def _awaited(self) -> dict[str, str]:
        if not self._begun or self.ended is not None:
            return {}
        return awaited(
            self.workers,
            self.caches,
            self.homes,
            self.lanes.by_number,
            missing=self._missing(),
            needs=self._needs,
            last_failure=self._last_failure,
        )

    # ---- for all of the above ----

    def _tell(self, event: ev.ForLanes) -> None:
        self._out.append(ev.TellLanes(event))

    def _note(self, text: str) -> None:
        self._out.append(ev.Note(text))

    def validate(self) -> None:
        """Check every invariant.

        Raises:
            InvariantError: one does not hold; it tells the stories of what is concerned.
        """
        for broken, things in self._contradictions():
            raise InvariantError(broken, *(thing.story for thing in things))

    def _contradictions(self) -> Iterator[tuple[str, Iterable[SupervisedWorker | SupervisedCache]]]:
        """Yield what does not hold, and who is concerned."""
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
                yield "nobody is left, and nobody is started", self.workers.values()
            if self._own_present() < self.own:
                yield "a worker is missing, and nobody starts one", self.workers.values()


def _short(node: str) -> str:
    return node[:8]
