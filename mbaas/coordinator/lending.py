"""Lends prep workers to other feeds, and borrows theirs.

Lending is decentralized. Every coordinator collects the demand reports of the others, computes the same allocation
(`mbaas.model.lending`), and lends a worker if it has one too many. The worker finishes its current block, receives
the other feed's dataset and pipeline, and continues there; trials of neither feed are interrupted. A worker belongs to
the feed that started it. It returns when its borrower ends or needs it less, and ends with its owner.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

from msgspec import Struct

from mbaas.coordinator.background import answer_or_none
from mbaas.coordinator.counters import Counters
from mbaas.core.cluster import events as cluster
from mbaas.core.cluster.supervisor import Supervisor
from mbaas.dataset import Dataset
from mbaas.model.lending import DemandReport, Lender
from mbaas.model.scaling import Observation
from mbaas.ray_cluster import actor_names
from mbaas.settings import FeedSettings
from mbaas.transforms import Pipeline
from mbaas.wire.protocol import PROTOCOL

ANSWER_S = 5.0
"""Timeout for another coordinator to answer, in seconds. It may have to send a worker its dataset."""

ALONE_LOOKS = 5
"""Looks per search for other feeds while this feed is alone. Each search costs the cluster's head a little."""


# ---- calls between coordinators ----


class Offer(Struct, frozen=True):
    """An idle prep worker, the feed that started it, and the Unix time of the decision to move it."""

    actor: Any
    owner: str
    decided_at: float


class Shared(Struct, frozen=True):
    """Prep workers shared by two feeds: those that a feed has lent to the other, and those borrowed from it."""

    lent: tuple[Any, ...]
    borrowed: tuple[Any, ...]


async def shared(own: str) -> dict[str, Shared]:
    """Return the workers that each other feed shares with this one, by feed, for the feeds that answer."""
    answers = await _ask_all(own, "shared_with", own)
    return {name: answer for name, answer in answers.items() if answer is not None}


async def offer(feed: str, worker: Offer) -> bool:
    """Offer a worker to another feed. Return whether it was accepted."""
    return bool(await _ask(feed, "take_on", worker))


async def report_lent_gone(owner: str, actor: Any) -> None:
    """Notify a feed that a worker which it lent is gone."""
    await _ask(owner, "lent_worker_gone", actor)


async def _ask_all(own: str, method: str, *arguments: Any) -> dict[str, Any]:
    """Return the answer of each other feed, by feed; None without one."""
    # In a thread here and below: looking up names blocks on Ray.
    names = [name for name in await asyncio.to_thread(actor_names.feed_names) if name != own]
    return dict(zip(names, await asyncio.gather(*(_ask(name, method, *arguments) for name in names)), strict=True))


async def _ask(feed: str, method: str, *arguments: Any) -> Any:
    coordinator = await asyncio.to_thread(actor_names.find_coordinator, feed)
    if coordinator is None:
        return None
    return await answer_or_none(getattr(coordinator, method).remote(*arguments), ANSWER_S, is_reported=True)


# ---- one feed's side ----


def worker_kind(
    settings: FeedSettings, *, engine: str, pipeline: Pipeline, dataset: Dataset, job: str, runtime_env: str
) -> str:
    """Return a key shared by feeds whose workers can be exchanged.

    A process keeps its engine's libraries, its GPU and its node, and can import only the code of its own job. The
    functions of a `Map` and datasets from outside mbaas belong to their job.

    Args:
        settings, pipeline, dataset: those of the feed.
        engine: "cpu" or "dali".
        job: id of the Ray job that serves the feed.
        runtime_env: runtime environment of the job, as JSON.
    """
    has_own_code = bool(pipeline.maps) or not _is_ours(dataset)
    code = f"{PROTOCOL}, {runtime_env}, {job if has_own_code else ''}"
    return f"{engine}, {settings.gpus_per_worker} GPU, {dict(settings.scaling.prep_labels)}, {code}"


def _is_ours(dataset: Dataset) -> bool:
    found = [dataset]
    for each in found:  # grows meanwhile; a dataset may refer to itself
        values = [part for value in vars(each).values() for part in (value if isinstance(value, tuple) else (value,))]
        found += [part for part in values if isinstance(part, Dataset) and not any(part is known for known in found)]
    return all(type(each).__module__.startswith("mbaas.") for each in found)


class LendingClient:
    """One feed's side of lending and borrowing; ``kind`` is its `worker_kind`.

    ``supervisor`` has its workers, and ``handle`` passes it an event.
    """

    def __init__(
        self,
        settings: FeedSettings,
        *,
        kind: str,
        supervisor: Supervisor,
        handle: Callable[[cluster.Event], object],
        counters: Counters,
    ) -> None:
        self._feed, self._reserved = settings.name, settings.prep_workers
        self._kind = kind
        self._supervisor, self._handle, self._counters = supervisor, handle, counters
        self._options, self._lender = settings.lending, Lender(settings.name, settings.lending)
        self._looks = False
        self._looked = 0
        self._is_alone = False
        self._seen: Observation | None = None

    def demand_report(self) -> DemandReport | None:
        """Return this feed's demand for other feeds; None before the first observation."""
        state = self._supervisor
        if self._seen is None or state.ended is not None:
            return None
        return DemandReport(
            feed=self._feed,
            kind=self._kind,
            workers=state.staying,
            borrowed=state.borrowed,
            reserved=self._reserved,
            demand_per_s=self._seen.demand_per_s,
            loading=self._seen.loading if self._seen.worker_per_s else None,
            basis=self._seen.measured.basis,
            least=self._options.min_workers,
            max_borrowed=self._options.max_borrowed,
            weight=self._options.weight,
        )

    async def look(self, seen: Observation) -> None:
        """Compare demand with the other feeds, and lend or return a worker if it is due."""
        self._seen = seen
        self._looked += 1
        # Calls are not awaited, so the previous one may still be waiting for answers.
        if self._looks or (self._is_alone and self._looked % ALONE_LOOKS):
            return
        self._looks = True
        try:
            reports = await _ask_all(self._feed, "demand_report")
            self._is_alone = not reports
            for feed in self._supervisor.lent.keys() - reports.keys():
                self._handle(cluster.FeedGone(feed))
            others = [other for other in reports.values() if other is not None and other.kind == self._kind]
            if (mine := self.demand_report()) is not None:
                self._move([mine, *others])
        finally:
            self._looks = False

    def _move(self, reports: list[DemandReport]) -> None:
        move = self._lender.observe(reports, time.monotonic())
        if move is None:
            return
        self._counters.note(move.reason)
        self._handle(cluster.Lend(move.target, move.target if move.is_return else None))
