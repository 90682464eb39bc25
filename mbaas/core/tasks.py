"""The prep workers as the staging core sees them: credit, tasks in order, deadlines."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Task:
    """One order to make one part of a block."""

    number: int
    worker: str
    block: int
    part: int = 0


@dataclass
class Worker:
    """A prep worker.

    Attributes:
        node: where it runs.
        tasks: at most ``credit`` of them, oldest first; the first is the one being made.
        since: when the first task became the first.
        leaving: whether it gets no more tasks.
    """

    name: str
    credit: int
    node: str = ""
    tasks: list[Task] = field(default_factory=list)
    since: float = 0.0
    leaving: bool = False


class TaskTable:
    """All prep workers that are up.

    Args:
        turn: which of equally busy workers comes first; different for lanes, so that they begin with different workers.

    Attributes:
        workers: by name; a worker that went down is not here.
        deaths: block -> how many workers went down while they were making it.
    """

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn
        self.workers: dict[str, Worker] = {}
        self.deaths: dict[int, int] = {}
        self._tasks: dict[int, Task] = {}
        self._next_task = 0

    def up(self, name: str, credit: int, node: str) -> None:
        self.workers[name] = Worker(name, credit, node)

    def down(self, name: str, *, blame: bool) -> list[Task]:
        """Forget a worker; its unfinished tasks, oldest first. With ``blame`` the oldest task's block is charged with
        the death.
        """
        worker = self.workers.pop(name, None)
        if worker is None:
            return []
        for task in worker.tasks:
            del self._tasks[task.number]
        if worker.tasks and blame:
            block = worker.tasks[0].block
            self.deaths[block] = self.deaths.get(block, 0) + 1
        return worker.tasks

    def free(self) -> list[Worker]:
        """The workers that have credit left, least busy first."""
        free = [w for w in self.workers.values() if len(w.tasks) < w.credit and not w.leaving]
        first = self._turn % len(free) if free else 0
        return sorted(free[first:] + free[:first], key=lambda w: len(w.tasks))

    def nodes(self) -> set[str]:
        """The nodes that have workers which stay."""
        return {worker.node for worker in self.workers.values() if not worker.leaving}

    def gone_idle(self) -> list[Worker]:
        """The workers that are leaving and have finished."""
        return [worker for worker in self.workers.values() if worker.leaving and not worker.tasks]

    def assign(self, worker: Worker, block: int, part: int, now: float) -> Task:
        task = Task(self._next_task, worker.name, block, part)
        self._next_task += 1
        self._tasks[task.number] = task
        if not worker.tasks:
            worker.since = now
        worker.tasks.append(task)
        return task

    def finish(self, number: int, now: float) -> Task | None:
        """Take a task off its worker's list; None if it is unknown (a late word of a worker that was given
        up).
        """
        task = self._tasks.pop(number, None)
        if task is None:
            return None
        worker = self.workers[task.worker]
        if worker.tasks[0] is task:
            worker.since = now
        worker.tasks.remove(task)
        self.deaths.pop(task.block, None)
        return task

    def overdue(self, now: float, timeout_s: float) -> list[Worker]:
        """Workers whose running task is older than ``timeout_s``."""
        return [w for w in self.workers.values() if w.tasks and now - w.since > timeout_s]

    def has(self, number: int) -> bool:
        """Whether the task is still somebody's; late words of workers that were given up are not."""
        return number in self._tasks

    def makers(self, block: int) -> list[str]:
        """The workers that are making parts of the block, or have them queued."""
        return sorted({task.worker for task in self._tasks.values() if task.block == block})

    @property
    def making(self) -> set[tuple[int, int]]:
        """(block, part) of every task."""
        return {(task.block, task.part) for task in self._tasks.values()}

    def validate(self) -> None:
        listed = [task for worker in self.workers.values() for task in worker.tasks]
        assert {t.number for t in listed} == set(self._tasks), "a task is on no worker's list, or on two"
        assert len(listed) == len(self._tasks)
        for worker in self.workers.values():
            assert len(worker.tasks) <= worker.credit, f"{worker.name} has more tasks than credit"
            assert all(t.worker == worker.name for t in worker.tasks)
