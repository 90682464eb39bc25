"""A supervisor driven by tests."""

from __future__ import annotations

from typing import TypeVar

from mbaas.core.cluster import events as ev
from mbaas.core.cluster.supervisor import Supervisor

KindT = TypeVar("KindT")


class TimedSupervisor:
    """Started supervisor with a clock that tests set, and its last instructions."""

    def __init__(self, supervisor: Supervisor, **begin: object) -> None:
        self.supervisor, self.now = supervisor, 0.0
        self.said: list[ev.Instruction] = []
        self.send(ev.Begin(**begin))

    def send(self, event: ev.Event) -> list[ev.Instruction]:
        self.said = self.supervisor.handle(event, self.now)
        self.supervisor.validate()
        return self.said

    def advance(self, seconds: float) -> list[ev.Instruction]:
        """Let time pass, and let the supervisor check its deadlines."""
        self.now += seconds
        return self.send(ev.Tick())

    def kinds(self, kind: type[KindT]) -> list[KindT]:
        return [instruction for instruction in self.said if isinstance(instruction, kind)]
