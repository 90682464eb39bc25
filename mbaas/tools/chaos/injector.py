"""Executes faults on a running cluster, and records their targets."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mbaas.base.units import counted, seconds
from mbaas.tools.chaos.network import Network
from mbaas.tools.chaos.nodes import Nodes
from mbaas.tools.chaos.participants import Participant, alive, kill, participants, pause, resume
from mbaas.tools.chaos.plan import Fault, Strike
from mbaas.tools.chaos.search import Server

FIND_S = 5.0
"""Longest wait of a fault for a target, which may still be recovering from an earlier fault."""

LEAVE_S = 1.0
"""Pause between checks of a temporary node that has not started yet."""

LOOK_S = 0.1
"""Interval between checks for targets and for due undo actions."""

CPUS = 2
"""CPUs of each node in Ray: enough for all workers of a feed."""

TRIES = 5
"""Attempts to start a node: on a busy machine, Ray gives up on nodes that start slowly."""

SLOW_MBIT_PER_S = 5
"""Bandwidth of a slow link, each way."""


@dataclass
class FaultOutcome:
    """The outcome of a fault.

    Attributes:
        at: seconds of the machine's monotonic clock.
        met, pids: descriptions of the targets hit, and their processes.
        happened: every strike hit a live process or a read.
    """

    at: float
    kind: str
    met: list[str] = field(default_factory=list)
    pids: set[int] = field(default_factory=set)
    happened: bool = True

    def __str__(self) -> str:
        return f"{self.kind}: {', '.join(self.met) or 'met nobody'}"


class Injector:
    """Executes faults, and undoes the temporary ones.

    `server` is the program that serves the default search; None if a user's command runs.
    """

    def __init__(self, nodes: Nodes, say: Callable[[str], None]) -> None:
        self._nodes, self._say = nodes, say
        self.server: Server | None = None
        self._due: list[tuple[float, int, Callable[[], Any]]] = []  # a heap of (time, unique number, undo)
        self._numbers = itertools.count()
        self._end_trouble: Callable[[], Any] = lambda: None
        # Processes that were paused. Recorded here, because a process on a busy machine takes time to stop, and its
        # state would still be "running".
        self._paused: set[int] = set()
        self._starter = ThreadPoolExecutor(1)  # nodes take seconds to start; faults continue meanwhile
        self._starting: list[Future[Any]] = []
        self.log: list[FaultOutcome] = []

    def inject(self, fault: Fault) -> FaultOutcome:
        outcome = FaultOutcome(time.monotonic(), fault.kind)
        # Find all targets before striking any: finding takes time, and the strikes must be simultaneous.
        strikes: list[Callable[[], Any]] = []
        taken: set[int] = set()
        for strike in fault.strikes:
            if (found := self._action_of(strike, taken, outcome, is_burst=len(fault.strikes) > 1)) is None:
                outcome.happened = False
            else:
                strikes.append(found)
        outcome.at = time.monotonic()  # after the search for targets
        for each in strikes:
            each()
        self.log.append(outcome)
        return outcome

    def _action_of(
        self, strike: Strike, taken: set[int], outcome: FaultOutcome, *, is_burst: bool
    ) -> Callable[[], Any] | None:
        if strike.target in ("storage", "driver") or strike.action == "add":
            others = {"storage": self._disturb, "driver": self._strike_driver}
            return partial(others.get(strike.target, self._add_for_a_while), strike, outcome)
        if strike.target in ("node", "nodes", "raylet", "link"):
            there = self._wait(lambda: [node for node in self._nodes.there if self._is_up(node)])
            if not there:
                return None
            node = there[int(strike.which * len(there))]
            if strike.target == "link":
                return partial(self._strike_link, strike, node, outcome)
            return partial(self._strike_nodes, strike, there if strike.target == "nodes" else [node], outcome)
        pool = self._wait(lambda: self._pool(strike, taken, is_burst=is_burst))
        if not pool:
            return None
        victim = pool[int(strike.which * len(pool))]
        taken.add(victim.pid)
        return partial(self._strike_process, strike, victim, outcome)

    def _wait(self, look: Callable[[], list[Any]]) -> list[Any]:
        end = time.monotonic() + FIND_S
        while not (found := look()) and time.monotonic() < end:
            self.undo_what_is_due()
            time.sleep(LOOK_S)
        return found

    # ---- strikes ----

    def _strike_process(self, strike: Strike, victim: Participant, outcome: FaultOutcome) -> None:
        label = f"{victim.name or victim.target} ({victim.pid})"
        try:
            (kill if strike.action == "kill" else pause)(victim.pid)
        except ProcessLookupError:  # ended since it was found
            outcome.happened = False
            return
        outcome.pids.add(victim.pid)
        if strike.action == "pause":
            label += f" for {seconds(strike.lasts_s)}"
            self._resume_later(strike, [victim.pid], partial(resume, victim.pid))
        outcome.met.append(label)

    def _strike_driver(self, strike: Strike, outcome: FaultOutcome) -> None:
        if self.server is None or not alive(pid := self.server.pid):  # still restarting
            outcome.happened = False
            return
        self.server.kill(strike.lasts_s)
        outcome.met.append(f"the program that serves ({pid}), back in {seconds(strike.lasts_s)}")

    def _strike_nodes(self, strike: Strike, chosen: list[Any], outcome: FaultOutcome) -> None:
        for node in chosen:
            pids = self._nodes.pids(node)
            outcome.pids.update(pids)
            label = f"node {node.node_id[:8]} ({len(pids)} processes)"
            if strike.action == "pause":
                label += f" for {seconds(strike.lasts_s)}"
                self._resume_later(strike, pids, self._nodes.pause(node))
            elif strike.action == "drain":
                label += f", {seconds(strike.lasts_s)} after notice"
                self._nodes.drain(node, strike.lasts_s)
                self._start_soon()  # like an autoscaler, which also receives the notice
                self._later(strike.lasts_s, partial(self._reclaim, node))
            else:
                ends = self._nodes.kill_raylet if strike.target == "raylet" else self._nodes.kill
                (self._nodes.remove if strike.action == "remove" else ends)(node)
                self._later(strike.lasts_s, self._start_soon)
            outcome.met.append(label)

    def _strike_link(self, strike: Strike, node: Any, outcome: FaultOutcome) -> None:
        assert isinstance(self._nodes, Network), "links are not in a plan where nodes have none of their own"
        mend = self._nodes.cut(node) if strike.action == "cut" else self._nodes.limit(node, SLOW_MBIT_PER_S)
        self._later(strike.lasts_s, mend)
        outcome.met.append(f"node {node.node_id[:8]} for {seconds(strike.lasts_s)}")

    def _reclaim(self, node: Any) -> None:
        if node in self._nodes.there:  # an idle node may have exited already
            self._nodes.kill(node)

    def _add_for_a_while(self, strike: Strike, outcome: FaultOutcome) -> None:
        outcome.met.append(f"a node for {seconds(strike.lasts_s)}")
        starting = self._start_soon()

        def leave() -> None:
            if not starting.done():
                self._later(LEAVE_S, leave)
                return
            node = starting.result()
            # Another fault may have hit the node. The last node stays, because it would not be replaced.
            if node in self._nodes.there and self._is_up(node) and len(self._nodes.there) > 1:
                self._nodes.remove(node)

        self._later(strike.lasts_s, leave)

    def _disturb(self, strike: Strike, outcome: FaultOutcome) -> None:
        if self.server is None:
            outcome.happened = False
            return
        self._end_trouble()  # one at a time: all processes share one switch
        trouble = self.server.trouble
        before, over = trouble.met, False
        trouble.begin(strike.action)
        outcome.met.append(f"for {seconds(strike.lasts_s)}")

        def end() -> None:
            nonlocal over
            if over:
                return
            over = True
            trouble.end()
            # Only known now: a disturbance without reads has no effect.
            reads = trouble.met - before
            outcome.happened = reads > 0
            outcome.met.append(counted(reads, "read"))

        self._end_trouble = end
        self._later(strike.lasts_s, end)

    # ---- undoing faults ----

    def _later(self, after_s: float, undo: Callable[[], Any]) -> None:
        heapq.heappush(self._due, (time.monotonic() + after_s, next(self._numbers), undo))

    def undo_what_is_due(self, *, all_of_it: bool = False) -> None:
        """End pauses and disturbances that are due, or all of them, and replace nodes that are gone."""
        while self._due and (all_of_it or self._due[0][0] <= time.monotonic()):
            heapq.heappop(self._due)[-1]()
        for node in list(self._nodes.there):
            if not alive(self._nodes.raylet(node)):  # paused until Ray declared it dead; it exited when it found out
                self._nodes.kill(node)
                self._start_soon()
        if self.server is not None:
            self.server.look_after(at_once=all_of_it)
        if all_of_it:
            for starting in self._starting:
                starting.result()
        self._starting = [starting for starting in self._starting if not starting.done()]

    def _start_soon(self) -> Future[Any]:
        self._starting.append(self._starter.submit(self._start_node))
        return self._starting[-1]

    def _start_node(self) -> Any:
        for _ in range(TRIES):
            try:
                return self._nodes.add(CPUS)
            except Exception as error:  # Ray has no specific exception for this
                self._say(f"another node is started: {error}")
        return None

    def _resume_later(self, strike: Strike, pids: list[int], resume: Callable[[], Any]) -> None:
        self._paused.update(pids)

        def undo() -> None:
            self._paused.difference_update(pids)
            resume()

        self._later(strike.lasts_s, undo)

    def _is_up(self, node: Any) -> bool:
        return self._is_running(self._nodes.raylet(node))

    def _is_running(self, pid: int) -> bool:
        return pid not in self._paused and alive(pid)

    def _pool(self, strike: Strike, taken: set[int], *, is_burst: bool) -> list[Participant]:
        """Return possible targets of a strike: all of its kind. In a burst, any process if none is left."""
        others = [each for each in participants() if each.pid not in taken and self._is_running(each.pid)]
        same = [each for each in others if each.target == strike.target]
        return same or (others if is_burst else [])
