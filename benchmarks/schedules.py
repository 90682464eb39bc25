"""Random schedules of a whole feed on virtual time, for many seeds; see `tests/support/system_schedules.py`."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from mbaas.base.units import duration
from mbaas.cli.console import stack
from mbaas.tools.bench.render import figure_table

PIECE = 200
"""Schedules per task of a process."""

SHOWN = 3
"""Number of violations shown in full."""


@dataclass
class Result:
    """Results of the schedules.

    Attributes:
        schedules: number of schedules.
        seconds: duration of the run.
        broken: seed -> the violated promise, and the events before.
    """

    schedules: int
    seconds: float = 0.0
    broken: dict[int, str] = field(default_factory=dict)


def play(seeds: range) -> dict[int, str]:
    """Run some schedules; return the violations by seed."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # pytest adds this folder, other programs do not
    from support.system_schedules import System

    broken = {}
    for seed in seeds:
        try:
            System(seed).run()
        except AssertionError as error:
            broken[seed] = str(error)
    return broken


def run(seeds: range, *, processes: int, tell: Callable[[str], None]) -> Result:
    """Run a schedule for each seed in ``processes`` processes; ``tell`` is called with progress messages."""
    result, began = Result(len(seeds)), time.monotonic()
    pieces = [seeds[first : first + PIECE] for first in range(0, len(seeds), PIECE)]
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        for done, piece in enumerate(as_completed([pool.submit(play, piece) for piece in pieces]), 1):
            result.broken |= piece.result()
            if done % max(1, len(pieces) // 20) == 0:
                seeds_told = f": seeds {', '.join(map(str, sorted(result.broken)))}" if result.broken else ""
                tell(f"{done} of {len(pieces)} pieces, {len(result.broken)} promises broken{seeds_told}")
    result.seconds = time.monotonic() - began
    return result


def table(result: Result) -> RenderableType:
    """Return a table of the figures, and the first violations with the events before them."""
    shown = figure_table("random schedules of a whole feed", ("schedules", "time", "a schedule", "broken promises"))
    each_s = result.seconds / max(1, result.schedules)
    shown.add_row(f"{result.schedules:,}", duration(result.seconds), f"{1e3 * each_s:.1f} ms", str(len(result.broken)))
    return stack([shown, *(Text(result.broken[seed]) for seed in sorted(result.broken)[:SHOWN])])
