"""Calls between the coordinators of a cluster's feeds."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from mbaas.coordinator.background import answer_or_none
from mbaas.model.lending import DemandReport
from mbaas.ray_cluster import actor_names

ANSWER_S = 5.0
"""Timeout for another coordinator to answer, in seconds. It may have to send a worker its dataset."""


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


async def demand_reports(own: str) -> tuple[list[str], list[DemandReport]]:
    """Return the names of all other feeds, and the demand reports received in time."""
    answers = await _ask_all(own, "demand_report")
    return [*answers], [report for report in answers.values() if report is not None]


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
