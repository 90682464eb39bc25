"""Hiring, watching and replacing the prep workers of a feed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import ray

from mbaas import runtime
from mbaas.errors import ResourceError, WaitTimeoutError
from mbaas.messages import Assignment, EngineName, PrepConfig, Probe, SampleSpec, WorkerLocation
from mbaas.order import SampleOrder
from mbaas.prep.worker import PrepWorker
from mbaas.settings import FeedSettings

HIRE_TIMEOUT_S = 30.0
"""How long a worker may take to get its resources."""

BEGIN_S = 45.0
"""How much longer one may take that has them: Ray's workers are nice to other processes of a busy machine."""

ROLE, PREP = "mbaas.io/role", "prep"
"""Label of a node, and its value on nodes that are there for prep workers."""

ADOPT_S = 2.0
"""How long a worker may take to tell a new coordinator that it lives."""

PATIENT_HIRE_S = 900.0
"""How long a worker that is to be replaced or added may wait for a node to come."""

LOOK_S = 0.5
"""Period at which somebody who waits for a worker looks whether it is still wanted."""

THREADS_S = 5.0
"""How long a worker may take to change its threads, between two blocks."""

RETRY_S = 2.0
"""Pause between two tries to replace a worker."""


@dataclass(frozen=True)
class WorkerHandle:
    """A running prep worker.

    Attributes:
        name: within the feed.
        actor: its handle.
        pid, node: its process id, and the node where it runs.
        owner: the feed that hired it, if it is another's.
    """

    name: str
    actor: Any
    pid: int
    node: str
    owner: str | None = None


class _NotReadyError(Exception):
    """A worker did not answer in time.

    Attributes:
        waited_s: so long.
        pid: its process; None if it did not even get its CPU.
    """

    def __init__(self, waited_s: float, pid: int | None) -> None:
        super().__init__(waited_s, pid)
        self.waited_s, self.pid = waited_s, pid


class WorkerPool:
    """The prep worker actors of one feed.

    Attributes:
        dataset_ref: the samples, in the object store; to be set before anybody is hired.
        workers: by name, those that are up; a name is never used twice.
    """

    dataset_ref: Any

    def __init__(self, settings: FeedSettings, pipeline: Any, engine: EngineName) -> None:
        self._settings = settings
        self._config = PrepConfig(
            feed=settings.name,
            pipeline=pipeline,
            engine=engine,
            seed=settings.seed,
            threads=settings.threads.prep,
            on_bad_sample=settings.on_bad_sample,
            timeout_s=settings.timeouts.prep_s,
        )
        self._hired = 0
        self.workers: dict[str, WorkerHandle] = {}

    async def hire(
        self, slot: int, deadline_s: float = HIRE_TIMEOUT_S, give_up: Callable[[], bool] = lambda: False
    ) -> WorkerHandle:
        """Start the worker of ``slot``. While it waits for its CPU, Ray's autoscaler sees that one is missing.

        Raises:
            ResourceError: the cluster did not give its CPU (or GPU share) in time, or ``give_up`` said so, or its
                process does not begin.
        """
        name = f"prep-{slot}" if self._hired < self._settings.prep_workers else f"prep-{slot}.{self._hired}"
        self._hired += 1
        settings = self._settings
        gpus = settings.gpus_per_worker if self._config.engine == "dali" else 0.0
        options = {
            **runtime.child_options(settings.name, "prep", name),
            "num_cpus": 1,
            "num_gpus": gpus,
            "max_concurrency": 2,
            "scheduling_strategy": "SPREAD",
            **_placement(settings.scaling.prep_labels),
        }
        actor = PrepWorker.options(**options).remote(self._config)  # type: ignore[attr-defined]
        try:
            place = await _place_in_time(actor, deadline_s, give_up)
        except _NotReadyError as error:
            ray.kill(actor)
            raise ResourceError(self._why_no_worker(name, gpus, error)) from None
        return WorkerHandle(name, actor, place.pid, place.node)

    async def engage(self, actor: Any, owner: str | None) -> WorkerHandle:
        """Name a worker that another feed has let go; it works for this one as soon as it is configured."""
        place = await actor.place.remote()
        self._hired += 1
        return WorkerHandle(f"prep-{len(self.workers)}.{self._hired - 1}", actor, place.pid, place.node, owner)

    def _why_no_worker(self, name: str, gpus: float, error: _NotReadyError) -> str:
        who = f"{name} of feed {self._settings.name!r}"
        if error.pid is not None:
            return (
                f"{who} got its CPU, and its process {error.pid} was not ready within {error.waited_s:g} s: "
                "the machine may have too much to do"
            )
        free, total = ray.available_resources(), ray.cluster_resources()
        share = f" and {gpus:g} GPU" if gpus else ""
        return (
            f"{who} needs 1 CPU{share} and did not get it within {error.waited_s:g} s: "
            f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs are free; serve the feed before the search, "
            "lower prep_workers, or give trials less"
        )

    async def hire_all(self) -> list[WorkerHandle]:
        """Start every worker at once; all or none."""
        results = await asyncio.gather(
            *(self.hire(slot) for slot in range(self._settings.prep_workers)), return_exceptions=True
        )
        hired = [r for r in results if isinstance(r, WorkerHandle)]
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            for worker in hired:
                ray.kill(worker.actor)
            raise errors[0]
        return hired

    async def survivors(self) -> tuple[list[WorkerHandle], dict[str, list[Any]]]:
        """What an earlier coordinator of the feed left: workers that work for it, and feed -> workers lent to it.

        Workers of the feed that do not answer are ended.
        """
        feed = self._settings.name
        found = runtime.family("prep")
        self._hired = max([self._settings.prep_workers, *(_serial(name) + 1 for _, name in found)])
        places = await asyncio.gather(*(_place(actor) for actor in found.values()))
        hired, lent = [], defaultdict(list)
        for ((owner, name), actor), place in zip(found.items(), places, strict=True):
            if place is None and owner == feed:
                ray.kill(actor)
            elif place is not None and place.feed == feed:
                own = owner == feed
                hired.append(
                    WorkerHandle(
                        name if own else f"{owner}-{name}", actor, place.pid, place.node, None if own else owner
                    )
                )
            elif place is not None and owner == feed:
                lent[place.feed].append(actor)
        return hired, dict(lent)

    async def probe(self, worker: WorkerHandle) -> Probe:
        """Shape, dtype and cost of a prepared sample.

        Raises:
            BadSampleError: no sample can be prepared.
            WaitTimeoutError: the worker does not answer.
        """
        settings = self._settings
        try:
            probe: Probe = await asyncio.wait_for(
                _result(worker.actor.probe.remote(self.dataset_ref, self._config)), settings.timeouts.prep_s
            )
        except asyncio.TimeoutError:
            raise WaitTimeoutError(
                f"waited {settings.timeouts.prep_s:g} s for {worker.name} (process {worker.pid}) of feed "
                f"{settings.name!r} to read and prepare a first sample; its log says where it is, and timeouts.prep_s "
                "how long it may take"
            ) from None
        return probe

    async def configure(self, worker: WorkerHandle, order: SampleOrder, spec: SampleSpec) -> None:
        """Have a worker work for this feed, and take it in."""
        await worker.actor.engage.remote(self.dataset_ref, Assignment(self._config, order, spec))
        self.workers[worker.name] = worker

    def per_node(self) -> dict[str, int]:
        """Node id -> its workers."""
        return dict(Counter(worker.node for worker in self.workers.values()))

    async def set_threads(self, worker: WorkerHandle, threads: int) -> None:
        """Have a worker prepare with so many threads; one that is gone, or stuck, is somebody else's business."""
        with contextlib.suppress(ray.exceptions.RayError, asyncio.TimeoutError):
            await asyncio.wait_for(_result(worker.actor.set_threads.remote(threads)), THREADS_S)

    async def hire_at_last(self, slot: int, give_up: Callable[[], bool]) -> WorkerHandle | None:
        """Start the worker of ``slot``, trying until ``give_up`` says so."""
        while not give_up():
            began = time.monotonic()
            try:
                return await self.hire(slot, PATIENT_HIRE_S, give_up)
            except (ResourceError, ray.exceptions.RayError):
                await asyncio.sleep(max(0.0, RETRY_S - (time.monotonic() - began)))
        return None

    def release(self, name: str) -> WorkerHandle | None:
        """Forget a worker, which lives on."""
        return self.workers.pop(name, None)

    def dismiss(self, name: str) -> None:
        """Kill a worker and forget it."""
        worker = self.release(name)
        if worker is not None:
            ray.kill(worker.actor)

    def dismiss_all(self) -> None:
        for name in list(self.workers):
            self.dismiss(name)


def _placement(labels: Mapping[str, str]) -> dict[str, Any]:
    """Where a worker may run: on nodes with ``labels``; by default on nodes for prep, or elsewhere if they are full."""
    if labels:
        return {"label_selector": dict(labels)}
    return {"label_selector": {ROLE: PREP}, "fallback_strategy": [{"label_selector": {ROLE: f"!in({PREP})"}}]}


def _serial(name: str) -> int:
    """The last number in a worker's name."""
    return int(name.removeprefix("prep-").split(".")[-1])


async def _place(actor: Any) -> WorkerLocation | None:
    """Where a worker runs and for whom; None if it does not answer."""
    try:
        place: WorkerLocation = await asyncio.wait_for(_result(actor.place.remote()), ADOPT_S)
    except (asyncio.TimeoutError, ray.exceptions.RayError):
        return None
    return place


async def _result(ref: Any) -> Any:
    return await ref


async def _place_in_time(actor: Any, deadline_s: float, give_up: Callable[[], bool]) -> WorkerLocation:
    """Where a new worker runs. It may take longer than ``deadline_s`` if it got its CPU and has only to begin.

    Raises:
        _NotReadyError: it took too long, or ``give_up`` said so.
    """
    placed = asyncio.ensure_future(_result(actor.place.remote()))
    if not await _done(placed, deadline_s, give_up):
        pid = await asyncio.get_running_loop().run_in_executor(None, runtime.pid_of, actor)
        if pid is None or not await _done(placed, BEGIN_S, give_up):
            placed.cancel()
            raise _NotReadyError(deadline_s if pid is None else deadline_s + BEGIN_S, pid)
    place: WorkerLocation = placed.result()
    return place


async def _done(future: asyncio.Future[Any], within_s: float, give_up: Callable[[], bool]) -> bool:
    """Whether a future is done in time, and before ``give_up`` says that nobody wants it."""
    end = asyncio.get_running_loop().time() + within_s
    while not future.done() and asyncio.get_running_loop().time() < end and not give_up():
        await asyncio.wait([future], timeout=min(LOOK_S, within_s))
    return future.done()
