"""The prep workers as the staging core sees them: credit, tasks in order, deadlines."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from msgspec import Struct

from mbaas.core.story import InvariantError, Stories, Story
from mbaas.core.transitions import WORKER_CHANGES, WorkerState


class Task(Struct, frozen=True):
    """One part of a block that one worker is to make."""

    number: int
    worker: str
    block: int
    part: int = 0


class Death(NamedTuple):
    """A death for which a block is blamed: of which part it was, on which node, why, and when."""

    part: int
    node: str
    reason: str
    at: float


@dataclass(eq=False)
class Worker:
    """A prep worker.

    Attributes:
        name: the worker's.
        credit: how many tasks it may have in hand.
        node: where it runs.
        story: what happened to it.
        tasks: at most ``credit`` of them, oldest first; the first is the one being made.
        since: when the first task became the first.
        failures: how many of its tasks ended in an error, one after the other, up to now.
        state: changed by `transition` only.
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
        """Whether it gets no more tasks."""
        return self.state is WorkerState.LEAVING

    @property
    def has_credit(self) -> bool:
        """Whether it may get a task."""
        return len(self.tasks) < self.credit and self.state is WorkerState.UP

    def transition(self, to: WorkerState, *why: object) -> None:
        """Change the state.

        Raises:
            InvariantError: ``to`` may not follow, see `WORKER_CHANGES`.
        """
        self.story.change("", self.state, to, WORKER_CHANGES, *why)
        self.state = to


class TaskTable:
    """All prep workers that are up, and what each has in hand.

    Args:
        stories: where the stories of workers are kept.
        turn: which of equally busy workers comes first; different for lanes, so that they begin with different workers.

    Attributes:
        workers: by name; none is GONE.
        deaths: staged block -> deaths of workers that were making a part of it, oldest first; forgotten when that part
            is made, the block is dropped, or it turns out that the node died.
        failures: staged block -> how often the making of it ended in an error; forgotten when a part of it is made, or
            when the block is given up or dropped.
    """

    def __init__(self, stories: Stories, turn: int = 0) -> None:
        self._stories, self._turn = stories, turn
        self.workers: dict[str, Worker] = {}
        self._by_node: dict[str, dict[str, Worker]] = {}  # the same workers; no node without any
        self.deaths: dict[int, list[Death]] = {}
        self.failures: dict[int, int] = {}
        self._tasks: dict[int, Task] = {}
        self._next_task = 0

    def number(self) -> int:
        """Return a number that no other task has or will have."""
        number, self._next_task = self._next_task, self._next_task + 1
        return number

    # ---- workers ----

    def worker_up(self, name: str, credit: int, node: str) -> None:
        """Take in a worker.

        Raises:
            InvariantError: one of that name is up; its tasks would be forgotten.
        """
        if name in self.workers:
            raise InvariantError(f"worker {name} came up a second time", self.workers[name].story)
        story = self._stories.begin("worker", name)
        story.tell("UP on node {}, credit {}", node, credit)
        self.workers[name] = Worker(name, credit, node, story)
        self._by_node.setdefault(node, {})[name] = self.workers[name]

    def worker_leaves(self, name: str) -> None:
        """Give a worker nothing new; one that is leaving or gone already is left alone."""
        worker = self.workers.get(name)
        if worker is not None and worker.state is WorkerState.UP:
            worker.transition(WorkerState.LEAVING)

    def worker_down(self, name: str) -> list[Task]:
        """Forget a worker, and return its unfinished tasks, oldest first.

        One that is not there is no error, because two may notice one death.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        here = self._by_node[worker.node]
        del here[name]
        if not here:
            del self._by_node[worker.node]
        for task in worker.tasks:  # a report of them that is still under way finds no task, and is ignored
            del self._tasks[task.number]
        worker.transition(WorkerState.GONE, "with {} tasks in hand", len(worker.tasks))
        self._stories.end(worker.story)
        return worker.tasks

    def charge(self, task: Task, node: str, reason: str, now: float) -> None:
        """Charge a block with the death of the worker that was making a part of it.

        A block that kills every worker which makes it would else go on for ever.
        """
        self.deaths.setdefault(task.block, []).append(Death(task.part, node, reason, now))

    def forgive(self, node: str) -> list[int]:
        """Forget deaths of workers of this node, which died itself, and return the blocks that were blamed for them."""
        blamed = [block for block, deaths in self.deaths.items() if any(death.node == node for death in deaths)]
        for block in blamed:
            self._clear(block, lambda death: death.node == node)
        return blamed

    def _clear(self, block: int, of: Callable[[Death], bool]) -> None:
        """Clear a block of some of the deaths with which it is charged."""
        self.deaths[block] = [death for death in self.deaths[block] if not of(death)]
        if not self.deaths[block]:
            del self.deaths[block]

    def forget(self, block: int) -> None:
        """Forget who died and what failed over a block that is dropped: made again, it has all of its tries."""
        self.deaths.pop(block, None)
        self.failures.pop(block, None)

    def with_credit(self, node: str) -> list[Worker]:
        """The node's workers that may get a task, least busy first."""
        # So every worker has something before any has its second task. Among equals each lane begins with another one:
        # the lanes do not know of each other's tasks.
        able = deque(worker for worker in self._by_node.get(node, {}).values() if worker.has_credit)
        able.rotate(-self._turn)
        return sorted(able, key=lambda worker: len(worker.tasks))

    def any_credit(self) -> bool:
        """Whether any worker may get a task."""
        return any(worker.has_credit for worker in self.workers.values())

    def idle(self) -> Worker | None:
        """A worker that may get a task and has nothing in hand, if there is one."""
        return next((worker for worker in self.workers.values() if worker.has_credit and not worker.tasks), None)

    def nodes(self) -> list[str]:
        """The nodes that have workers which stay, in the order in which they came."""
        # A node whose workers all leave begins nothing more, so its parts are anybody's.
        return [node for node, here in self._by_node.items() if any(not worker.leaving for worker in here.values())]

    def done_leaving(self) -> list[Worker]:
        """The workers that are leaving and have nothing in hand any more."""
        return [worker for worker in self.workers.values() if not worker.tasks and worker.leaving]

    def overdue(self, now: float, timeout_s: float) -> list[Worker]:
        """Find the workers whose running task is older than ``timeout_s``."""
        # Only the first task runs; those behind it have not begun and cannot be late.
        return [w for w in self.workers.values() if w.tasks and now - w.since > timeout_s]

    # ---- tasks ----

    def assign(self, worker: Worker, block: int, part: int, now: float) -> Task:
        """Put a part at the end of a worker's list."""
        task = Task(self.number(), worker.name, block, part)
        # Numbers are never used again, so a report of a worker that was given up cannot end another worker's task.
        self._tasks[task.number] = task
        if not worker.tasks:  # it begins at once; behind another task its deadline does not run yet
            worker.since = now
        worker.tasks.append(task)
        worker.story.tell("task {}: part {} of block {}", task.number, part, block)
        return task

    def finish(self, number: int, now: float) -> Task | None:
        """Take a task off its worker's list and return it; None for a late report of a worker that was given up."""
        task = self._take_off(number, now, "ended")
        if task is not None:
            self.workers[task.worker].failures = 0
        return task

    def fail(self, number: int, now: float) -> Task | None:
        """Do as `finish` does, and count that the task ended in an error: against its worker, and against its block."""
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
        if worker.tasks[0] is task:  # the next one begins now; its deadline counts from here
            worker.since = now
        worker.tasks.remove(task)
        worker.story.tell("task {} {}", number, how)
        if task.block in self.deaths:  # somebody survived this part: the deaths before were not its fault
            self._clear(task.block, lambda death: death.part == task.part)
        return task

    def has(self, number: int) -> bool:
        """Whether a worker still has the task; one that was given up has not."""
        return number in self._tasks

    def makers(self, block: int) -> list[str]:
        """The workers that are making parts of the block, or have them queued."""
        return sorted({task.worker for task in self._tasks.values() if task.block == block})

    def in_hand(self) -> set[tuple[int, int]]:
        """(block, part) of every task."""
        return {(task.block, task.part) for task in self._tasks.values()}

    def validate(self) -> None:
        """Check that every task is on exactly one list, and no list is too long."""
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
