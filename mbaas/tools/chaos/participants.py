"""The processes of feeds on this machine, and the faults for processes: kill and pause."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mbaas.ray_cluster import actor_names
from mbaas.tools.chaos.plan import Target

PREFIXES: dict[Target, str] = {"worker": "prep:", "cache": "cache:", "relay": "relay:", "coordinator": "feed:"}
"""Prefixes of a feed's actor names. Any other actor counts as a trial."""

STOPPED_S = 1.0
"""Longest wait for a process to stop after SIGSTOP."""


@dataclass(frozen=True)
class Participant:
    """A process that takes part in a search; `node` is its Ray node id."""

    target: Target
    name: str
    pid: int
    node: str


def participants() -> list[Participant]:
    """Return all live actors of the cluster, for all feeds, sorted by name."""
    found = []
    for actor in actor_names.live_actors():
        if actor["Pid"]:
            name = actor["Name"]
            target: Target = next((each for each, prefix in PREFIXES.items() if name.startswith(prefix)), "trial")
            found.append(Participant(target, name, actor["Pid"], actor["Address"]["NodeID"]))
    return sorted(found, key=lambda each: (each.name, each.pid))


def kill(pid: int) -> None:
    """Kill a process abruptly (SIGKILL)."""
    os.kill(pid, signal.SIGKILL)


def pause(pid: int) -> None:
    """Pause a process (SIGSTOP). Returns when it has stopped, or after `STOPPED_S` on a busy machine."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + STOPPED_S
    while process_state(pid) not in "TtZX" and time.monotonic() < end:
        time.sleep(0.001)


def resume(pid: int) -> None:
    """Resume a paused process, if it still exists."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def paused(pid: int) -> Iterator[None]:
    """Pause a process inside the context."""
    pause(pid)
    try:
        yield
    finally:
        resume(pid)


def process_state(pid: int) -> str:
    """Return the Linux state letter of a process: "T" is stopped, "Z" a zombie; "X" if it does not exist."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def alive(pid: int) -> bool:
    """Return whether the process exists and is not a zombie."""
    return process_state(pid) not in "ZX"
