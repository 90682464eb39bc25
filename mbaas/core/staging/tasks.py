"""Prep workers as seen by the staging core: credit, queued tasks, deadlines."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from mbaas.core.staging.streams import block_name
from mbaas.core.staging.transitions import WORKER_CHANGES, WorkerState
from mbaas.core.story import InvariantError, Stories, Story


class Task(Struct, frozen=True):
    """A part of a block, assigned to a worker."""

    number: int
    worker: str
    block: int
    part: int = 0


class Death(NamedTuple):
    """A worker death counted against a block: its part, node, reason and time."""

    part: int
    node: str
    reason: str
    at: float


@dataclass(eq=False)
class Worker:
    """A prep worker.

    Attributes:
        credit: largest number of tasks assigned to it at a time.
        tasks: oldest first; the first is in progress.
        since: start of the first task.
        failures: number of consecutive tasks that failed.
    """

    name: str
    credit: int
    node: str
    story: Story = field(repr=False)
    tasks: list[Task] = field(default_factory=list)
    since: float = 0.0
    failures: int = 0
    state: WorkerState = WorkerState.UP

    @property
    def leaving(self) -> bool:
        """True if it finishes its tasks and is released then."""
        return self.state is WorkerState.LEAVING

    @property
    def has_credit(self) -> bool:
        """True if it may get a task."""
        return len(self.tasks) < self.credit and self.state is WorkerState.UP

    def transition(self, to: WorkerState, *why: object) -> None:
        """Change the state; raise InvariantError if the transition is not in `WORKER_CHANGES`."""
        self.story.change("", self.state, to, WORKER_CHANGES, *why)
        self.state = to


class TaskTable:
    """All running prep workers and their tasks.

    Args:
        stories: where the workers' stories are stored.

    Attributes:
        workers: by name; none is GONE.
        deaths: staged block -> deaths of workers that were preparing a part of it, oldest first. Cleared when that part
            is prepared, when the block is dropped, or when the node turns out to have died.
        failures: staged block -> number of failed tasks. Cleared when a part is prepared, or when the block fails or is
            dropped.
    """

    def __init__(self, stories: Stories) -> None:
        self._stories = stories
        self.workers: dict[str, Worker] = {}
        self._by_node: dict[str, dict[str, Worker]] = {}  # the same workers; no empty entries
        self.deaths: dict[int, list[Death]] = {}
        self.failures: dict[int, int] = {}
        self._tasks: dict[int, Task] = {}
        self._next_task = 0

    def number(self) -> int:
        """Return a new, unique task number."""
        number, self._next_task = self._next_task, self._next_task + 1
        return number

    # ---- workers ----

    def worker_up(self, name: str, credit: int, node: str) -> None:
        """Register a worker; raise InvariantError if the name is taken."""
        if name in self.workers:
            raise InvariantError(f"worker {name} came up a second time", self.workers[name].story)
        story = self._stories.begin("worker", name)
        story.tell("UP on node {}, credit {}", node, credit)
        self.workers[name] = Worker(name, credit, node, story)
        self._by_node.setdefault(node, {})[name] = self.workers[name]

    def worker_leaves(self, name: str) -> None:
        """Stop assigning tasks to a worker; no effect on one that is leaving or gone."""
        worker = self.workers.get(name)
        if worker is not None and worker.state is WorkerState.UP:
            worker.transition(WorkerState.LEAVING)

    def worker_failed(self, name: str, why: str) -> None:
        """Stop assigning tasks to a worker that is about to be replaced."""
        worker = self.workers[name]
        if worker.state is not WorkerState.FAILED:
            worker.transition(WorkerState.FAILED, "{}", why)

    def worker_down(self, name: str) -> list[Task]:
        """Remove a worker, and return its unfinished tasks, oldest first; no effect if it is unknown."""
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        here = self._by_node[worker.node]
        del here[name]
        if not here:
            del self._by_node[worker.node]
        for task in worker.tasks:  # late reports find no task, and are ignored
            del self._tasks[task.number]
        worker.transition(WorkerState.GONE, "with {} unfinished tasks", len(worker.tasks))
        self._stories.end(worker.story)
        return worker.tasks

    def charge(self, task: Task, node: str, reason: str, now: float) -> None:
        """Count the death of a worker against its block; without a limit, a deadly block would be retried forever."""
        self.deaths.setdefault(task.block, []).append(Death(task.part, node, reason, now))

    def forgive(self, node: str) -> list[int]:
        """Clear the deaths of workers on a node that died itself; return the blocks that they were counted against."""
        blamed = [block for block, deaths in self.deaths.items() if any(death.node == node for death in deaths)]
        for block in blamed:
            self._clear(block, lambda death: death.node == node)
        return blamed

    def _clear(self, block: int, of: Callable[[Death], bool]) -> None:
        self.deaths[block] = [death for death in self.deaths[block] if not of(death)]
        if not self.deaths[block]:
            del self.deaths[block]

    def forget(self, block: int) -> None:
        """Clear the deaths and failures of a dropped block: if prepared again, it has all of its tries."""
        self.deaths.pop(block, None)
        self.failures.pop(block, None)

    def with_credit(self, node: str) -> list[Worker]:
        """Return the node's workers that may get a task, least busy first."""
        # Every worker gets a task before any gets its second one.
        able = [worker for worker in self._by_node.get(node, {}).values() if worker.has_credit]
        return sorted(able, key=lambda worker: len(worker.tasks))

    def any_credit(self) -> bool:
        """Return whether any worker may get a task."""
        return any(worker.has_credit for worker in self.workers.values())

    def idle(self) -> Worker | None:
        """Return a worker that may get a task and has none, or None."""
        return next((worker for worker in self.workers.values() if worker.has_credit and not worker.tasks), None)

    def nodes(self) -> list[str]:
        """Return the nodes with workers that stay, in order of arrival."""
        # If all workers of a node leave, it starts no new tasks, so other nodes take over its parts.
        return [node for node, here in self._by_node.items() if any(w.state is WorkerState.UP for w in here.values())]

    def done_leaving(self) -> list[Worker]:
        """Return the leaving workers without remaining tasks."""
        return [worker for worker in self.workers.values() if not worker.tasks and worker.leaving]

    def overdue(self, now: float, timeout_s: float) -> list[Worker]:
        """Return the workers whose running task is older than ``timeout_s``."""
        # Only the first task runs; queued ones cannot be late.
        return [w for w in self.workers.values() if w.tasks and now - w.since > timeout_s]

    # ---- tasks ----

    def assign(self, worker: Worker, block: int, part: int, now: float) -> Task:
        """Append a part to a worker's queue."""
        task = Task(self.number(), worker.name, block, part)
        # Numbers are unique, so a report of a replaced worker cannot end another worker's task.
        self._tasks[task.number] = task
        if not worker.tasks:  # starts now; a queued task's deadline does not run
            worker.since = now
        worker.tasks.append(task)
        worker.story.tell("task {}: part {} of {}", task.number, part, block_name(block))
        return task

    def finish(self, number: int, now: float) -> Task | None:
        """Remove a finished task from its worker and return it; None for a late report of a removed worker."""
        task = self._take_off(number, now, "ended")
        if task is not None:
            self.workers[task.worker].failures = 0
        return task

    def fail(self, number: int, now: float) -> Task | None:
        """Remove a failed task like `finish`, and count the failure against its worker and its block."""
        task = self._take_off(number, now, "ended in an error")
        if task is not None:
            self.workers[task.worker].failures += 1
            self.failures[task.block] = self.failures.get(task.block, 0) + 1
        return task

    def _take_off(self, number: int, now: float, how: str) -> Task | None:
        task = self._tasks.pop(number, None)
        if task is None:
            return None
        worker = self.workers[task.worker]
        if worker.tasks[0] is task:  # the next one starts now
            worker.since = now
        worker.tasks.remove(task)
        worker.story.tell("task {} {}", number, how)
        if task.block in self.deaths:  # a worker survived this part, so it did not cause the deaths
            self._clear(task.block, lambda death: death.part == task.part)
        return task

    def has(self, number: int) -> bool:
        """Return whether a worker still has the task."""
        return number in self._tasks

    def since(self, number: int) -> float:
        """Return when the worker of a task started its oldest task; 0 if no worker has the task."""
        task = self._tasks.get(number)
        return 0.0 if task is None else self.workers[task.worker].since

    def makers(self, block: int) -> list[str]:
        """Return the workers that are preparing parts of the block, or have them queued."""
        return sorted({task.worker for task in self._tasks.values() if task.block == block})

    def in_hand(self) -> set[tuple[int, int]]:
        """Return (block, part) of every task."""
        return {(task.block, task.part) for task in self._tasks.values()}

    def validate(self) -> None:
        """Check that every task is in exactly one queue, and no queue exceeds the credit."""
        listed = sorted(task.number for worker in self.workers.values() for task in worker.tasks)
        if listed != sorted(self._tasks):
            stories = [worker.story for worker in self.workers.values()]
            raise InvariantError(f"tasks {sorted(self._tasks)} are open, {listed} on workers' lists", *stories)
        here = {worker.name: worker for on_node in self._by_node.values() for worker in on_node.values()}
        if here != self.workers or not all(self._by_node.values()):
            stories = [worker.story for worker in {**self.workers, **here}.values()]
            raise InvariantError(f"workers {sorted(self.workers)} are up, on nodes {sorted(here)}", *stories)
        for worker in self.workers.values():
            if len(worker.tasks) > worker.credit:
                raise InvariantError(f"{worker.name} has more tasks than credit, {worker.credit}", worker.story)
            if worker.state is WorkerState.GONE or any(task.worker != worker.name for task in worker.tasks):
                raise InvariantError(f"{worker.name} is {worker.state.name} with {worker.tasks}", worker.story)
