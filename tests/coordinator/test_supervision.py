"""Bugs in the shell around the supervisor are reported and the feed continues. No Ray is started."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from mbaas.coordinator import supervision as supervision_module
from mbaas.coordinator.background import BackgroundTasks, Driver, InternalErrors
from mbaas.coordinator.counters import Counters
from mbaas.coordinator.supervision import Supervision
from mbaas.core.cluster import events as ev
from mbaas.ray_cluster import resources
from mbaas.settings import FeedSettings

SETTINGS = FeedSettings(name="train", batch_size=20, cache_bytes=0, staging_bytes=10**6, prep_workers=1)
WAIT_S = 10.0


class Scripted:
    """Stand-in for the supervisor: answers the first event with instructions and records all events."""

    def __init__(self, *instructions: ev.Instruction) -> None:
        self.instructions, self.heard, self.ended = list(instructions), [], None
        self.caches: dict[str, Any] = {"far": None}
        self.workers: dict[str, Any] = {}
        self.draining: dict[str, None] = {}
        self.came = asyncio.Event()

    def handle(self, event: ev.Event, _: float) -> list[ev.Instruction]:
        self.heard.append(event)
        self.came.set()
        instructions, self.instructions = self.instructions, []
        return instructions

    def validate(self) -> None: ...


class Shell(Supervision):
    """A supervision of a feed with one worker and a scripted supervisor.

    Args:
        instructions: answers to the first event.
    """

    def __init__(self, *instructions: ev.Instruction) -> None:
        self.counters = Counters()
        errors = InternalErrors(self.counters)
        worker = SimpleNamespace(name="prep-0", owner=None, actor="the actor of prep-0")
        workers = SimpleNamespace(needs="1 CPU", workers={"prep-0": worker}, ended=[])
        workers.end, workers.end_all, workers.release = workers.ended.append, lambda: None, lambda _: None
        opening: Any = SimpleNamespace(
            settings=SETTINGS, workers=workers, caches=None, layout=None, begin=ev.Begin(), lent={}
        )
        super().__init__(opening, counters=self.counters, errors=errors, spawn=BackgroundTasks(errors).spawn)
        self.state: Any = Scripted(*instructions)
        self.handle = Driver(self.state, self._carry_out, errors).send


def test_a_bug_over_one_instruction_costs_that_one_alone():
    async def carry_out() -> Shell:
        shell = Shell(ev.EndCache("a", 1), ev.EndWorker("prep-0"), ev.Note("the last one"))
        shell.handle(ev.Tick())  # without caches the first instruction raises
        return shell

    shell = asyncio.run(carry_out())
    assert shell.workers.ended == ["prep-0"]
    assert shell.counters.internal_errors == 1
    assert shell.counters.notes[-1].endswith("the last one")


def test_a_bug_while_a_worker_is_handed_over_is_reported_and_the_feed_can_end(monkeypatch):
    async def offer(*_: Any) -> bool:
        raise RuntimeError("provoked while it is handed over")

    async def hand_over() -> Shell:
        shell = Shell(ev.HandOver("prep-0", "other"))
        shell.handle(ev.Tick())
        await asyncio.wait_for(shell.end("it was stopped"), WAIT_S)
        return shell

    monkeypatch.setattr(supervision_module.lending, "offer", offer)
    shell = asyncio.run(hand_over())
    assert shell.counters.internal_errors == 1
    assert "RuntimeError: provoked while it is handed over" in shell.counters.notes[-1]


def test_a_worker_that_meets_a_bug_while_it_is_told_the_placement_is_no_silent_failure():
    async def brief(*_: Any) -> None:
        raise ray.exceptions.RayTaskError("engage", "Traceback", KeyError("provoked")).as_instanceof_cause()

    async def tell() -> Shell:
        shell = Shell(ev.BriefWorker("prep-0", 1))
        shell.caches: Any = SimpleNamespace(dataset_ref=None, told=(), actors={})
        shell.workers.brief = brief
        shell.handle(ev.Tick())
        shell.state.came.clear()
        await asyncio.wait_for(shell.state.came.wait(), WAIT_S)
        return shell

    shell = asyncio.run(tell())
    assert isinstance(shell.state.heard[-1], ev.BriefingFailed)
    assert shell.counters.internal_errors == 1
    assert "in prep-0, while sending the placement" in shell.counters.notes[-1]


def test_a_lent_worker_that_is_gone_already_can_be_ended():
    async def end() -> Shell:
        shell = Shell(ev.EndLent("prep-7"))
        shell.handle(ev.Tick())
        return shell

    assert asyncio.run(end()).counters.internal_errors == 0


@pytest.mark.parametrize("raises", [RuntimeError("provoked"), ray.exceptions.RaySystemError("the head is away")])
def test_dead_nodes_are_noticed_also_after_ray_once_did_not_say_which_there_are(monkeypatch, raises):
    answers = [raises, [{"NodeID": "far", "Alive": False}, {"NodeID": "other", "Alive": False}]]

    def nodes() -> Any:
        answer = answers.pop(0) if len(answers) > 1 else answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def watch() -> Shell:
        shell = Shell()
        shell.handle(ev.Tick())
        shell.state.came.clear()
        watching = asyncio.ensure_future(shell._watch_nodes(frozenset))
        await asyncio.wait_for(shell.state.came.wait(), WAIT_S)
        shell.state.ended = "it was stopped"
        await asyncio.wait_for(watching, WAIT_S)
        return shell

    monkeypatch.setattr(supervision_module, "NODES_PERIOD_S", 0.001)
    monkeypatch.setattr(ray, "nodes", nodes)
    monkeypatch.setattr(resources, "draining_nodes", frozenset)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "here"))
    shell = asyncio.run(watch())
    assert shell.state.heard[-1] == ev.NodesDead(frozenset({"far"}))
    assert shell.counters.internal_errors == 1
