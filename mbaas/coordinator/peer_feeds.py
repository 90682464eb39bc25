"""What the coordinators of a cluster's feeds say to each other."""

from __future__ import annotations

import asyncio
from typing import Any

from msgspec import Struct

from mbaas import runtime
from mbaas.allocation.lending import DemandReport
from mbaas.coordinator.asking import answer_or_none

ANSWER_S = 5.0
"""How long another coordinator may take to answer; it may have to tell a worker its dataset."""


class Offer(Struct, frozen=True):
    """A prep worker that is up and idle, and the feed that started it."""

    actor: Any
    owner: str


class Shared(Struct, frozen=True):
    """Which prep workers one feed has of another, and the other of it.

    Attributes:
        lent: actors of its own that it lent to the other.
        borrowed: actors of the other's that work for it.
    """

    lent: tuple[Any, ...]
    borrowed: tuple[Any, ...]


async def shared(own: str) -> dict[str, Shared]:
    """Ask the other feeds which workers they share with this one: feed -> what it says; some may not answer."""
    names = [name for name in await _apart(runtime.feed_names) if name != own]
    found = await asyncio.gather(*(_ask(name, "shared_with", own) for name in names))
    return {name: answer for name, answer in zip(names, found, strict=True) if answer is not None}


async def demand_reports(own: str) -> tuple[list[str], list[DemandReport]]:
    """Ask the other feeds for their demand reports; return all of their names, and the reports of those that answer."""
    names = [name for name in await _apart(runtime.feed_names) if name != own]
    found = await asyncio.gather(*(_ask(name, "demand_report") for name in names))
    return names, [report for report in found if report is not None]


async def offer(feed: str, worker: Offer) -> bool:
    """Hand a worker to another feed, and return whether it took it."""
    return bool(await _ask(feed, "take_on", worker))


async def report_lent_gone(owner: str, actor: Any) -> None:
    """Tell a feed that a worker which it lent is gone."""
    await _ask(owner, "lent_worker_gone", actor)


async def _ask(feed: str, method: str, *arguments: Any) -> Any:
    """Call a method of another feed's coordinator; return None if it does not answer in time."""
    coordinator = await _apart(runtime.find_coordinator, feed)
    if coordinator is None:
        return None
    return await answer_or_none(getattr(coordinator, method).remote(*arguments), ANSWER_S, is_reported=True)


async def _apart(function: Any, *arguments: Any) -> Any:
    """Run a call that waits for Ray in a thread, so that the event loop goes on."""
    return await asyncio.get_running_loop().run_in_executor(None, function, *arguments)
