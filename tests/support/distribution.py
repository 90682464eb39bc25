"""Divides test files among processes (``pytest -n``): those that start Ray, and those that only compute."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadFileScheduling

LEAST_PROCESSES = 3
"""From so many on, the last of them only computes."""

NICENESS = 5
"""It gets less of a busy CPU than the others, whose tests measure seconds."""

_WITH_RAY = "files-with-ray"


class Distribution(LoadFileScheduling):
    """Gives each process whole files, in the order in which they were collected.

    Tests with Ray mostly wait, for processes to start or for somebody to be given up. So two processes leave much of
    two cores idle, and three at a time would make each other miss their times. The third therefore gets files without
    Ray only, which are in no hurry, and is done when there are no more of them.

    Args:
        config, log: as pytest-xdist gives them.
        folder: where the processes have noted which files need Ray (`note_files_with_ray`).
    """

    def __init__(self, config: pytest.Config, log: Any, folder: Path) -> None:
        super().__init__(config, log)
        self._folder = folder

    def _assign_work_unit(self, node: Any) -> None:
        if _only_computes(node.gateway.id, self.numnodes):
            with_ray = (self._folder / _WITH_RAY).read_text().splitlines()
            found = next((file for file in self.workqueue if file not in with_ray), None)
            if found is None:
                node.shutdown()
                return
            self.workqueue.move_to_end(found, last=False)
        super()._assign_work_unit(node)


def note_files_with_ray(folder: Path, files: Collection[str]) -> None:
    """Write down for the process that divides the files, which collects no tests itself, which of them need Ray."""
    written = folder / f"{_WITH_RAY}-{os.getpid()}"
    written.write_text("\n".join(files))
    written.replace(folder / _WITH_RAY)  # all processes write the same


def lower_priority(worker: str, processes: int) -> None:
    """Have this process and all that it starts give way to others, if it is the one that only computes."""
    if _only_computes(worker, processes):
        os.nice(NICENESS)


def _only_computes(worker: str, processes: int) -> bool:
    return processes >= LEAST_PROCESSES and worker == f"gw{processes - 1}"
