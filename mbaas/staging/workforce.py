"""Hiring, watching and replacing the prep workers of a feed."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ray

from mbaas.errors import ResourceError
from mbaas.order import Sweep
from mbaas.prep.engine import SampleSpec
from mbaas.prep.worker import PrepWorker, Probe
from mbaas.staging.settings import FeedSettings

HIRE_TIMEOUT_S = 30.0
"""How long a worker may take to get its resources and start."""

RETRY_S = 2.0
"""Pause between two tries to replace a worker."""


@dataclass(frozen=True)
class Hired:
    """A running prep worker: its actor, process id, and the node where it runs."""

    name: str
    actor: Any
    pid: int
    node: str


class Workforce:
    """The prep worker actors of one feed.

    Attributes:
        workers: by name, those that are up; a name is never used twice.
    """

    def __init__(self, settings: FeedSettings, dataset_ref: Any, pipeline: Any, engine: str) -> None:
        self._settings = settings
        self._pipeline, self._engine = pipeline, engine
        self._dataset_ref = dataset_ref
        self._hired = 0
        self.workers: dict[str, Hired] = {}

    async def hire(self, slot: int, deadline_s: float = HIRE_TIMEOUT_S) -> Hired:
        """Start the worker of ``slot``.

        Raises:
            ResourceError: the cluster did not give its CPU (or GPU share) in time.
        """
        name = f"prep-{slot}" if self._hired < self._settings.prep_workers else f"prep-{slot}.{self._hired}"
        self._hired += 1
        settings = self._settings
        gpus = settings.gpus_per_worker if self._engine == "dali" else 0.0
        options = {
            "num_cpus": 1,
            "num_gpus": gpus,
            "max_concurrency": 2,
            "enable_task_events": False,
            "scheduling_strategy": "SPREAD",
        }
        actor = PrepWorker.options(**options).remote(  # type: ignore[attr-defined]
            self._dataset_ref,
            self._pipeline,
            engine=self._engine,
            seed=settings.seed,
            threads=settings.threads,
            on_bad_sample=settings.on_bad_sample,
        )
        try:
            pid, node = await asyncio.wait_for(_result(actor.place.remote()), deadline_s)
        except asyncio.TimeoutError:
            ray.kill(actor)
            raise ResourceError(self._why_no_worker(name, gpus, deadline_s)) from None
        return Hired(name, actor, pid, node)

    def _why_no_worker(self, name: str, gpus: float, waited_s: float) -> str:
        free, total = ray.available_resources(), ray.cluster_resources()
        share = f" and {gpus:g} GPU" if gpus else ""
        return (
            f"{name} of feed {self._settings.name!r} needs 1 CPU{share} and did not get it within {waited_s:g} s: "
            f"{free.get('CPU', 0):g} of {total.get('CPU', 0):g} CPUs are free; serve the feed before the search, "
            "lower prep_workers, or give trials less"
        )

    async def hire_all(self) -> list[Hired]:
        """Start every worker at once; all or none."""
        results = await asyncio.gather(
            *(self.hire(slot) for slot in range(self._settings.prep_workers)), return_exceptions=True
        )
        hired = [r for r in results if isinstance(r, Hired)]
        errors = [r for r in results if isinstance(r, BaseException)]
        if errors:
            for worker in hired:
                ray.kill(worker.actor)
            raise errors[0]
        return hired

    async def probe(self, worker: Hired) -> Probe:
        """Shape, dtype and cost of a prepared sample."""
        probe: Probe = await worker.actor.probe.remote()
        return probe

    async def configure(self, worker: Hired, sweep: Sweep, spec: SampleSpec) -> None:
        """Tell a worker what it must know and take it in."""
        await worker.actor.configure.remote(sweep, spec)
        self.workers[worker.name] = worker

    def per_node(self) -> dict[str, int]:
        """Node id -> its workers."""
        return dict(Counter(worker.node for worker in self.workers.values()))

    async def replace(self, name: str, give_up: Callable[[], bool]) -> Hired | None:
        """Start a worker in the place of one that is gone, trying until ``give_up`` says so."""
        slot = int(name.removeprefix("prep-").split(".")[0])
        while not give_up():
            began = time.monotonic()
            try:
                return await self.hire(slot)
            except (ResourceError, ray.exceptions.RayError):
                await asyncio.sleep(max(0.0, RETRY_S - (time.monotonic() - began)))
        return None

    def dismiss(self, name: str) -> None:
        """Kill a worker and forget it."""
        worker = self.workers.pop(name, None)
        if worker is not None:
            ray.kill(worker.actor)

    def dismiss_all(self) -> None:
        for name in list(self.workers):
            self.dismiss(name)


async def _result(ref: Any) -> Any:
    return await ref
