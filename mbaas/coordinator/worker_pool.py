"""The prep worker actors of a feed: start, brief and end them. The supervisor decides how many are needed."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import ray
from msgspec import Struct

from mbaas.base import units
from mbaas.coordinator import lending
from mbaas.coordinator.background import answer_or_none
from mbaas.core.cluster.supervised import BEGIN_S
from mbaas.core.layout import Layout
from mbaas.dataset.storage.retry import retry_async
from mbaas.errors import MbaasError, ResourceError, WaitTimeoutError
from mbaas.model.lending import node_for_part
from mbaas.prep.worker import PrepWorkerActor
from mbaas.ray_cluster import actor_names, resources
from mbaas.samples.placement import Placement
from mbaas.settings import FeedSettings
from mbaas.wire.blocks import PrepConfig, WorkerBrief, WorkerLocation
from mbaas.wire.consumers import Claims
from mbaas.wire.samples import EngineName, PipelineReport, Probe

START_TIMEOUT_S = 30.0
"""Timeout for a worker to get its resources, in seconds."""

TAKE_IN_S = 20.0
"""Timeout for a worker released by another feed to report its location, in seconds."""

ROLE, PREP = "mbaas.io/role", "prep"
"""Label of a node, and its value on nodes meant for prep workers."""

NODE = "ray.io/node-id"
"""Ray's label for the node id."""

ADOPT_S = 2.0
"""Timeout for a worker to answer a new coordinator, in seconds."""

MOST_TRIES = 3
"""Workers that try a consumer's pipeline: one that kills them should not kill all."""

LOOK_S = 0.5
"""Period in seconds of the check that a starting worker is still needed."""


class WorkerHandle(Struct, frozen=True):
    """A running prep worker.

    Attributes:
        name: its name within the feed.
        pid, node: its process id and node id; 0 and "" if it did not answer.
        owner: the feed that started it, if another feed did.
    """

    name: str
    actor: Any
    pid: int
    node: str
    owner: str | None = None


class Survivors(Struct, frozen=True):
    """Workers found after a restart.

    Attributes:
        workers: workers that work for this feed.
        lent: borrowing feed -> this feed's workers there, by key.
        serial: first worker number above the numbers of all living workers.
    """

    workers: list[WorkerHandle]
    lent: dict[str, dict[str, Any]]
    serial: int


class _NotReadyError(Exception):
    """A worker did not answer in time; `pid` is None if it did not even get its CPU."""

    def __init__(self, waited_s: float, pid: int | None) -> None:
        super().__init__(waited_s, pid)
        self.waited_s, self.pid = waited_s, pid


class WorkerPool:
    """The prep worker actors of one feed.

    Attributes:
        workers: workers that have answered and were not ended, by name.
        needs: the resources that each reserves and the nodes where it may run, for messages: "1 CPU and 0.5 GPU".
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

    # ---- start ----

    def launch(self, name: str, coordinator: str) -> Any:
        """Have Ray start a worker's actor, without waiting for its process.

        Raises:
            ValueError: an actor with that name is alive.
        """
        settings, engine = self._settings, self._config.engine
        part = settings.cpus_per_worker % 1
        options = {
            **actor_names.child_options(settings.name, "prep", name),
            **worker_options(
                settings,
                engine,
                gpu_marker=resources.gpu_marker() if self._config.shares_gpu else {},
                node=node_for_part(part, resources.free_cpus()) if part else None,
            ),
        }
        return PrepWorkerActor.options(**options).remote(self._config, coordinator)

    async def start(
        self,
        name: str,
        deadline_s: float,
        give_up: Callable[[], bool] = lambda: False,
        launched: Any = None,
    ) -> WorkerHandle:
        """Start a worker. While it waits for its CPU, Ray's autoscaler sees the demand.

        Args:
            deadline_s: longest wait for its CPU, in seconds.
            give_up: returns True once the worker is no longer needed.
            launched: its actor, if already launched.

        Raises:
            ResourceError: it got no CPU (or GPU share) in time, ``give_up`` returned True, or its process does not
                start.
            ValueError: an actor with that name is alive.
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

    async def start_all(self, launched: Mapping[str, Any]) -> list[WorkerHandle]:
        """Wait for launched workers. If one fails, end all and raise its error."""
        # Collect errors first: workers still starting when another fails must be ended too.
        starts = [self.start(name, START_TIMEOUT_S, launched=actor) for name, actor in launched.items()]
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
        """Take in a worker that another feed has released. It works for this feed once it is briefed.

        Raises:
            asyncio.TimeoutError, RayError: it does not answer. Our own worker is then killed, because no other feed
                does so.
        """
        try:
            where: WorkerLocation = await asyncio.wait_for(actor.location.remote(), TAKE_IN_S)
        except (asyncio.TimeoutError, ray.exceptions.RayError):
            if owner is None:
                ray.kill(actor)
            raise
        worker = self.workers[name] = WorkerHandle(name, actor, where.pid, where.node, owner)
        return worker

    async def survivors(self) -> Survivors:
        """Return the workers of an earlier coordinator, including silent ones."""
        feed = self._settings.name
        found = actor_names.family("prep")
        locations = await asyncio.gather(
            *(answer_or_none(actor.location.remote(), ADOPT_S) for actor in found.values())
        )
        # A worker that does not answer may belong to another feed or be lent to one; ask the other feeds.
        peers = await lending.shared(feed) if None in locations else {}
        left = Survivors([], {}, 1 + max([_serial(name) for _, name in found], default=-1))
        for ((owner, name), actor), where in zip(found.items(), locations, strict=True):
            works_for = where.feed if where is not None else _said_to_work_for(actor, owner, feed, peers)
            own = owner == feed
            if works_for == feed:
                pid, node = (0, "") if where is None else (where.pid, where.node)
                worker = WorkerHandle(name if own else f"{owner}-{name}", actor, pid, node, None if own else owner)
                left.workers.append(worker)
                self.workers[worker.name] = worker
            elif own:
                left.lent.setdefault(works_for, {})[actor_names.id_of(actor)] = actor
        return left

    # ---- calls to workers ----

    async def probe(self, worker: WorkerHandle, dataset_ref: Any) -> Probe:
        """Measure shape, dtype and costs of a sample. Storage errors are retried, as for every other sample.

        Raises:
            BadSampleError: no sample can be prepared.
            WaitTimeoutError: the worker does not answer.
        """
        return await retry_async(self._settings.timeouts.storage_s, lambda: self._probe_once(worker, dataset_ref))

    async def _probe_once(self, worker: WorkerHandle, dataset_ref: Any) -> Probe:
        settings = self._settings
        try:
            asked = worker.actor.probe.remote(dataset_ref, self._config, settings.threads.fetch)
            return await asyncio.wait_for(asked, settings.timeouts.prep_s)
        except asyncio.TimeoutError:
            raise WaitTimeoutError(
                f"waited {units.seconds(settings.timeouts.prep_s)} for {worker.name} (process {worker.pid}) of feed "
                f"{settings.name!r} to read and prepare a first sample; its log shows its stack; timeouts.prep_s sets "
                "how long it may take"
            ) from None

    async def look_at(self, dataset_ref: Any, payload: bytes) -> PipelineReport:
        """Have a worker prepare some samples with a pipeline that a consumer brought.

        Raises:
            ConfigError: it does not suit the feed's samples or engine.
            BadSampleError: no sample can be prepared with it.
            ResourceError: no worker is up, or each one that was asked died.
            WaitTimeoutError: the worker does not answer.
        """
        settings = self._settings
        workers = [*self.workers.values()]
        for worker in random.sample(workers, min(MOST_TRIES, len(workers))):
            asked = worker.actor.look_at.remote(dataset_ref, self._config, payload, settings.threads.fetch)
            try:
                return await asyncio.wait_for(asked, settings.timeouts.prep_s)
            except asyncio.TimeoutError:
                raise WaitTimeoutError(
                    f"waited {units.seconds(settings.timeouts.prep_s)} for {worker.name} (process {worker.pid}) of "
                    f"feed {settings.name!r} to prepare first samples with a consumer's pipeline"
                ) from None
            except ray.exceptions.RayTaskError as error:
                if isinstance(error.cause, MbaasError):
                    raise error.cause from None
                raise
            except ray.exceptions.RayActorError:
                continue
        raise ResourceError(
            f"feed {settings.name!r} has no prep worker that could try the consumer's pipeline: {len(self.workers)} "
            "are up; join again"
        )

    async def brief(
        self,
        worker: WorkerHandle,
        dataset_ref: Any,
        layout: Layout,
        placements: tuple[Placement, ...],
        caches: Mapping[str, Any],
    ) -> None:
        """Assign a worker to this feed, and send it all placements that may cut blocks.

        Raises:
            RayError: it is gone, or failed.
        """
        brief = WorkerBrief(self._config, layout.order, layout.spec)
        await worker.actor.engage.remote(dataset_ref, brief)
        await worker.actor.update_placement.remote(placements, dict(caches))

    def per_node(self) -> dict[str, int]:
        """Return the number of workers on each node, by node id."""
        return dict(Counter(worker.node for worker in self.workers.values()))

    # ---- end ----

    def release(self, name: str) -> None:
        """Remove a worker that now works for another feed."""
        self.workers.pop(name, None)

    def end(self, name: str) -> None:
        """Kill a worker, including one that is still starting."""
        worker, starting = self.workers.pop(name, None), self._starting.pop(name, None)
        for actor in (worker.actor if worker is not None else None, starting):
            if actor is not None:
                ray.kill(actor)

    def end_all(self) -> None:
        """Kill all workers, including starting ones."""
        for name in [*self.workers, *self._starting]:
            self.end(name)


def shares_gpu(settings: FeedSettings, engine: EngineName) -> bool:
    """Return whether workers use GPUs without reserving a share, so that trials can have whole GPUs."""
    return engine == "dali" and settings.gpus_per_worker is None


def claims(settings: FeedSettings, engine: EngineName, workers: int) -> Claims:
    """Return the resources that a feed with ``workers`` workers of its own reserves in the cluster."""
    return Claims(
        memory=settings.memory,
        cpus=workers * settings.cpus_per_worker,
        gpus=workers * _gpus_per_worker(settings, engine),
    )


def worker_options(
    settings: FeedSettings, engine: EngineName, *, gpu_marker: Mapping[str, float], node: str | None
) -> dict[str, Any]:
    """Return the Ray actor options of a worker.

    Args:
        gpu_marker: resources that place a worker which shares a GPU on a node that has one.
        node: best node for a worker that reserves a fraction of a CPU, or None.
    """
    return {
        "num_cpus": settings.cpus_per_worker,
        "num_gpus": _gpus_per_worker(settings, engine),
        "max_concurrency": 2,  # the next block is fetched while one is prepared
        "scheduling_strategy": "SPREAD",  # each node adds a cache, a network link and a disk
        "resources": dict(gpu_marker) if shares_gpu(settings, engine) else {},
        **node_options(settings.scaling.prep_labels, node),
    }


def _gpus_per_worker(settings: FeedSettings, engine: EngineName) -> float:
    return (settings.gpus_per_worker or 0.0) if engine == "dali" else 0.0


def _reserved(settings: FeedSettings, engine: EngineName) -> str:
    gpus = _gpus_per_worker(settings, engine)
    return f"{units.exact(settings.cpus_per_worker)} CPU" + (f" and {units.exact(gpus)} GPU" if gpus else "")


def _where(settings: FeedSettings, engine: EngineName) -> str:
    labels = [f"{label}={value}" for label, value in sorted(settings.scaling.prep_labels.items())]
    places = [*labels, *(["a GPU"] if shares_gpu(settings, engine) else [])]
    return f" on a node with {' and '.join(places)}" if places else ""


def node_options(labels: Mapping[str, str], node: str | None) -> dict[str, Any]:
    """Return the Ray options for the nodes of a worker: those with ``labels``, and ``node`` if possible."""
    # by default nodes for prep, or others if these are full
    wanted: list[dict[str, str]] = [dict(labels)] if labels else [{ROLE: PREP}, {ROLE: f"!in({PREP})"}]
    if node is not None:
        wanted = [choice for each in wanted for choice in ({**each, NODE: node}, each)]
    first, *others = ({"label_selector": each} for each in wanted)
    return {**first, "fallback_strategy": others} if others else first


def _said_to_work_for(actor: Any, owner: str, feed: str, peers: Mapping[str, lending.Shared]) -> str:
    # Find the feed that a silent worker works for: as other feeds report, by default the feed that started it.
    if owner == feed:
        return next((peer for peer, shared in peers.items() if actor in shared.borrowed), feed)
    return feed if owner in peers and actor in peers[owner].lent else owner


def _serial(name: str) -> int:
    return int(name.removeprefix("prep-"))


async def _location_in_time(actor: Any, deadline_s: float, give_up: Callable[[], bool]) -> WorkerLocation:
    """Return the location of a new worker. After ``deadline_s`` it gets `BEGIN_S` more if its process has started."""
    located = asyncio.ensure_future(actor.location.remote())
    if not await _done(located, deadline_s, give_up):
        pid = await asyncio.to_thread(actor_names.pid_of, actor)
        if pid is None or not await _done(located, BEGIN_S, give_up):
            located.cancel()
            raise _NotReadyError(deadline_s if pid is None else deadline_s + BEGIN_S, pid)
    return located.result()


async def _done(future: asyncio.Future[Any], within_s: float, give_up: Callable[[], bool]) -> bool:
    end = asyncio.get_running_loop().time() + within_s
    while not future.done() and asyncio.get_running_loop().time() < end and not give_up():
        await asyncio.wait([future], timeout=min(LOOK_S, within_s))
    return future.done()
