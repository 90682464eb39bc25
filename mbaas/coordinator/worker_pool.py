"""The prep workers of a feed, as actors: starting, telling and ending them. Others decide how many are needed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray
from msgspec import Struct

from mbaas import runtime, units
from mbaas.allocation.headroom import node_for_part
from mbaas.coordinator import peer_feeds
from mbaas.coordinator.asking import answer, answer_or_none
from mbaas.core.layout import Layout
from mbaas.core.supervised import BEGIN_S, MACHINE_S
from mbaas.dataset.retry import ask_for
from mbaas.errors import ResourceError, WaitTimeoutError
from mbaas.messages import Claims, EngineName, PrepConfig, Probe, WorkerBrief, WorkerLocation
from mbaas.placement import Placement
from mbaas.prep.worker import PrepWorkerActor
from mbaas.settings import FeedSettings

START_TIMEOUT_S = 30.0
"""How long a worker may take to get its resources."""

TAKE_IN_S = 20.0
"""How long a worker that another feed lets go may take to say where it runs."""

ROLE, PREP = "mbaas.io/role", "prep"
"""Label of a node, and its value on nodes that are there for prep workers."""

NODE = "ray.io/node-id"
"""Ray's own label of a node."""

ADOPT_S = 2.0
"""How long a worker may take to tell a new coordinator that it lives."""

LOOK_S = 0.5
"""Period at which somebody who waits for a worker looks whether it is still wanted."""

THREADS_S = 5.0
"""How long a worker may take to change its threads, between two blocks."""


class WorkerHandle(Struct, frozen=True):
    """A running prep worker.

    Attributes:
        name: within the feed.
        actor: its handle.
        pid, node: its process id, and the node where it runs; 0 and "" if it did not tell.
        owner: the feed that started it, if it is another's.
    """

    name: str
    actor: Any
    pid: int
    node: str
    owner: str | None = None


class Survivors(Struct, frozen=True):
    """What an earlier coordinator of a feed left.

    Attributes:
        workers: that work for the feed.
        silent: the names of those that do not answer.
        lent: feed -> its workers of ours, by key.
        serial: the first number that the name of no worker has that lives.
    """

    workers: list[WorkerHandle]
    silent: set[str]
    lent: dict[str, dict[str, Any]]
    serial: int


class _NotReadyError(Exception):
    """A worker did not answer in time.

    Attributes:
        waited_s: how long it was waited for.
        pid: its process; None if it did not even get its CPU.
    """

    def __init__(self, waited_s: float, pid: int | None) -> None:
        super().__init__(waited_s, pid)
        self.waited_s, self.pid = waited_s, pid


class WorkerPool:
    """The prep worker actors of one feed.

    Args:
        settings: of the feed.
        pipeline: what is done to samples.
        engine: "cpu" or "dali".

    Attributes:
        engine: the same.
        workers: by name, those that answered and were not ended.
        needs: what each reserves, and where it may run, for people: "1 CPU and 0.5 GPU".
    """

    def __init__(self, settings: FeedSettings, pipeline: Any, engine: EngineName) -> None:
        self._settings, self.engine = settings, engine
        self._config = PrepConfig(
            feed=settings.name,
            pipeline=pipeline,
            engine=engine,
            seed=settings.seed,
            threads=settings.threads.prep,
            shares_gpu=shares_gpu(settings, engine),
            dali_share=settings.dali_share,
            on_bad_sample=settings.on_bad_sample,
            prep_s=settings.timeouts.prep_s,
        )
        self._starting: dict[str, Any] = {}
        self.workers: dict[str, WorkerHandle] = {}
        self.needs = f"{_reserved(settings, engine)}{_where(settings, engine)}"

    # ---- beginning ----

    def launch(self, name: str, coordinator: str) -> Any:
        """Have Ray start a worker's actor, whose process takes its time.

        Args:
            name: the worker's.
            coordinator: actor id of the feed's coordinator.

        Raises:
            ValueError: an actor of that name lives.
        """
        settings, engine = self._settings, self._config.engine
        part = settings.cpus_per_worker % 1
        options = {
            **runtime.child_options(settings.name, "prep", name),
            **worker_options(
                settings,
                engine,
                gpu_marker=runtime.gpu_marker() if self._config.shares_gpu else {},
                node=node_for_part(part, runtime.free_cpus()) if part else None,
            ),
        }
        return PrepWorkerActor.options(**options).remote(self._config, coordinator)

    async def start(
        self,
        name: str,
        deadline_s: float = START_TIMEOUT_S,
        give_up: Callable[[], bool] = lambda: False,
        launched: Any = None,
    ) -> WorkerHandle:
        """Start a worker. While it waits for its CPU, Ray's autoscaler sees that one is missing.

        Args:
            name: the worker's.
            deadline_s: how long to wait for its CPU.
            give_up: says whether nobody wants it any more.
            launched: its actor, if that was launched already.

        Raises:
            ResourceError: the cluster did not give its CPU (or GPU share) in time, or ``give_up`` said so, or its
                process does not begin.
            ValueError: an actor of that name lives.
            RayError: the worker died.
        """
        actor = launched or self.launch(name, ray.get_runtime_context().get_actor_id() or "")
        self._starting[name] = actor
        try:
            where = await _location_in_time(actor, deadline_s, give_up)
        except _NotReadyError as error:
            ray.kill(actor)
            raise ResourceError(self._why_no_worker(name, error)) from None
        finally:
            self._starting.pop(name, None)
        worker = self.workers[name] = WorkerHandle(name, actor, where.pid, where.node)
        return worker

    async def start_patiently(self, name: str, give_up: Callable[[], bool]) -> WorkerHandle:
        """Start a worker as `start` does; it may wait for a machine to come."""
        return await self.start(name, MACHINE_S, give_up)

    async def start_all(self, launched: Mapping[str, Any]) -> list[WorkerHandle]:
        """Wait for workers that were launched, by name; all or none."""
        # Errors are collected first: a worker that is still starting when another fails must be ended, too.
        starts = [self.start(name, launched=actor) for name, actor in launched.items()]
        results = await asyncio.gather(*starts, return_exceptions=True)
        errors = [result for result in results if isinstance(result, BaseException)]
        if errors:
            self.end_all()
            raise errors[0]
        return [self.workers[name] for name in launched]

    def _why_no_worker(self, name: str, error: _NotReadyError) -> str:
        who = f"{name} of feed {self._settings.name!r}"
        if error.pid is not None:
            return (
                f"{who} got its CPU, but its process {error.pid} was not ready within {units.seconds(error.waited_s)}: "
                "the machine may have too much to do"
            )
        free, total = ray.available_resources(), ray.cluster_resources()
        needs = _reserved(self._settings, self._config.engine)
        return (
            f"{who} needs {needs} and did not get it within {units.seconds(error.waited_s)}: "
            f"{units.exact(free.get('CPU', 0))} of {units.exact(total.get('CPU', 0))} CPUs are free; "
            "serve the feed before the search, lower prep_workers, or give trials less"
        )

    async def take_in(self, name: str, actor: Any, owner: str | None) -> WorkerHandle:
        """Name a worker that another feed has let go; it works for this one as soon as it is briefed.

        Raises:
            asyncio.TimeoutError, RayError: it does not answer. One of our own is ended then: nobody else would do so.
        """
        try:
            where: WorkerLocation = await answer(actor.location.remote(), TAKE_IN_S)
        except (asyncio.TimeoutError, ray.exceptions.RayError):
            if owner is None:
                ray.kill(actor)
            raise
        worker = self.workers[name] = WorkerHandle(name, actor, where.pid, where.node, owner)
        return worker

    async def survivors(self) -> Survivors:
        """Find what an earlier coordinator of the feed left, who does not answer included."""
        feed = self._settings.name
        found = runtime.family("prep")
        locations = await asyncio.gather(
            *(answer_or_none(actor.location.remote(), ADOPT_S) for actor in found.values())
        )
        # Who does not tell for whom it works may be another feed's, or lent to one: these know, if anybody does.
        peers = await peer_feeds.shared(feed) if None in locations else {}
        left = Survivors([], set(), {}, 1 + max([_serial(name) for _, name in found], default=-1))
        for ((owner, name), actor), where in zip(found.items(), locations, strict=True):
            works_for = where.feed if where is not None else _said_to_work_for(actor, owner, feed, peers)
            own = owner == feed
            if works_for == feed:
                pid, node = (0, "") if where is None else (where.pid, where.node)
                worker = WorkerHandle(name if own else f"{owner}-{name}", actor, pid, node, None if own else owner)
                left.workers.append(worker)
                self.workers[worker.name] = worker
                if where is None:
                    left.silent.add(worker.name)
            elif own:
                left.lent.setdefault(works_for, {})[actor._actor_id.hex()] = actor
        return left

    # ---- what workers are told and asked ----

    async def probe(self, worker: WorkerHandle, dataset_ref: Any) -> Probe:
        """Find shape, dtype and costs of a sample. Storage that errs is asked again, as for every other sample.

        Args:
            worker: who is to prepare it.
            dataset_ref: the samples, in the object store.

        Raises:
            BadSampleError: no sample can be prepared.
            WaitTimeoutError: the worker does not answer.
        """
        return await ask_for(self._settings.timeouts.storage_s, lambda: self._probe_once(worker, dataset_ref))

    async def _probe_once(self, worker: WorkerHandle, dataset_ref: Any) -> Probe:
        settings = self._settings
        try:
            asked = worker.actor.probe.remote(dataset_ref, self._config, settings.threads.first_fetch)
            probe: Probe = await answer(asked, settings.timeouts.prep_s)
        except asyncio.TimeoutError:
            raise WaitTimeoutError(
                f"waited {units.seconds(settings.timeouts.prep_s)} for {worker.name} (process {worker.pid}) of feed "
                f"{settings.name!r} to read and prepare a first sample; its log says where it is, and timeouts.prep_s "
                "how long it may take"
            ) from None
        return probe

    async def brief(
        self,
        worker: WorkerHandle,
        dataset_ref: Any,
        layout: Layout,
        placements: tuple[Placement, ...],
        caches: Mapping[str, Any],
    ) -> None:
        """Have a worker work for this feed, and tell it all placements by which blocks may be cut.

        Raises:
            RayError: it is gone, or cannot.
        """
        brief = WorkerBrief(self._config, layout.order, layout.spec)
        await worker.actor.engage.remote(dataset_ref, brief)
        await worker.actor.update_placement.remote(placements, dict(caches))

    def per_node(self) -> dict[str, int]:
        """Node id -> its workers."""
        return dict(Counter(worker.node for worker in self.workers.values()))

    async def set_threads(self, worker: WorkerHandle, threads: int) -> None:
        """Have a worker prepare with ``threads`` threads; if it is gone or stuck, the supervisor sees to that."""
        await answer_or_none(worker.actor.set_threads.remote(threads), THREADS_S)

    # ---- end ----

    def release(self, name: str) -> None:
        """Forget a worker, which lives on elsewhere."""
        self.workers.pop(name, None)

    def end(self, name: str) -> None:
        """Kill a worker, also one that is still starting."""
        worker, starting = self.workers.pop(name, None), self._starting.pop(name, None)
        for actor in (worker.actor if worker is not None else None, starting):
            if actor is not None:
                ray.kill(actor)

    def end_all(self) -> None:
        """Kill all workers, also those that are still starting."""
        for name in [*self.workers, *self._starting]:
            self.end(name)


def shares_gpu(settings: FeedSettings, engine: EngineName) -> bool:
    """Whether workers prepare on GPUs of which they reserve nothing, so that trials can have whole ones."""
    return engine == "dali" and settings.gpus_per_worker is None


def claims(settings: FeedSettings, engine: EngineName, workers: int) -> Claims:
    """What a feed with ``workers`` workers of its own keeps of its cluster for itself."""
    return Claims(
        memory=settings.memory,
        cpus=workers * settings.cpus_per_worker,
        gpus=workers * _gpus_per_worker(settings, engine),
    )


def worker_options(
    settings: FeedSettings, engine: EngineName, *, gpu_marker: Mapping[str, float], node: str | None
) -> dict[str, Any]:
    """What Ray is asked for a worker.

    Args:
        settings: of the feed.
        engine: "cpu" or "dali".
        gpu_marker: resources that bring a worker which shares a GPU to a node that has one.
        node: the best one for a worker that reserves a part of a CPU; None if none is better than others.
    """
    return {
        "num_cpus": settings.cpus_per_worker,
        "num_gpus": _gpus_per_worker(settings, engine),
        "max_concurrency": 2,  # the next block is fetched while one is prepared
        "scheduling_strategy": "SPREAD",  # each node brings a cache, a network link and a disk
        "resources": dict(gpu_marker) if shares_gpu(settings, engine) else {},
        **_node_options(settings.scaling.prep_labels, node),
    }


def _gpus_per_worker(settings: FeedSettings, engine: EngineName) -> float:
    return (settings.gpus_per_worker or 0.0) if engine == "dali" else 0.0


def _reserved(settings: FeedSettings, engine: EngineName) -> str:
    """What a worker reserves: "1 CPU and 0.5 GPU"."""
    gpus = _gpus_per_worker(settings, engine)
    return f"{units.exact(settings.cpus_per_worker)} CPU" + (f" and {units.exact(gpus)} GPU" if gpus else "")


def _where(settings: FeedSettings, engine: EngineName) -> str:
    """Where a worker may run, if not everywhere."""
    labels = [f"{label}={value}" for label, value in sorted(settings.scaling.prep_labels.items())]
    places = [*labels, *(["a GPU"] if shares_gpu(settings, engine) else [])]
    return f" on a node with {' and '.join(places)}" if places else ""


def _node_options(labels: Mapping[str, str], node: str | None) -> dict[str, Any]:
    """Return Ray options for where a worker may run: by default on nodes for prep, elsewhere if these are full.

    Args:
        labels: what the user asks of the nodes.
        node: the best one of those, if it is one.
    """
    wanted: list[dict[str, str]] = [dict(labels)] if labels else [{ROLE: PREP}, {ROLE: f"!in({PREP})"}]
    if node is not None:
        wanted = [choice for each in wanted for choice in ({**each, NODE: node}, each)]
    first, *others = ({"label_selector": each} for each in wanted)
    return {**first, "fallback_strategy": others} if others else first


def _said_to_work_for(actor: Any, owner: str, feed: str, peers: Mapping[str, peer_feeds.Shared]) -> str:
    """Return the feed for which a worker works that does not answer, as other feeds say; else the one that started it.

    Args:
        actor: the worker.
        owner: the feed that started it.
        feed: the one that asks.
        peers: what the others say.
    """
    if owner == feed:
        return next((peer for peer, shared in peers.items() if actor in shared.borrowed), feed)
    return feed if owner in peers and actor in peers[owner].lent else owner


def _serial(name: str) -> int:
    """Return the number in a worker's name, as the supervisor gave it."""
    return int(name.removeprefix("prep-"))


async def _location_in_time(actor: Any, deadline_s: float, give_up: Callable[[], bool]) -> WorkerLocation:
    """Return where a new worker runs. It may take longer than ``deadline_s`` if it got its CPU and has only to begin.

    Raises:
        _NotReadyError: it took too long, or ``give_up`` said so.
    """
    located = asyncio.ensure_future(actor.location.remote())
    if not await _done(located, deadline_s, give_up):
        pid = await asyncio.get_running_loop().run_in_executor(None, runtime.pid_of, actor)
        if pid is None or not await _done(located, BEGIN_S, give_up):
            located.cancel()
            raise _NotReadyError(deadline_s if pid is None else deadline_s + BEGIN_S, pid)
    where: WorkerLocation = located.result()
    return where


async def _done(future: asyncio.Future[Any], within_s: float, give_up: Callable[[], bool]) -> bool:
    """Wait for a future, and return whether it was done in time and before ``give_up`` said that nobody wants it."""
    end = asyncio.get_running_loop().time() + within_s
    while not future.done() and asyncio.get_running_loop().time() < end and not give_up():
        await asyncio.wait([future], timeout=min(LOOK_S, within_s))
    return future.done()
