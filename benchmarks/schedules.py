"""Random schedules of a whole feed on virtual time, as many as one likes; see `tests/support/system_schedules.py`."""

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

from mbaas.bench.render import figure_table
from mbaas.cli.console import stack
from mbaas.units import duration

PIECE = 200
"""Schedules that a process plays at a time."""

SHOWN = 3
"""Broken promises that are told in full."""


@dataclass
class Result:
    """What came of the schedules.

    Attributes:
        schedules: that were played.
        seconds: that it took.
        broken: seed -> the promise that was broken, and what had happened.
    """

    schedules: int
    seconds: float = 0.0
    broken: dict[int, str] = field(default_factory=dict)


def play(seeds: range) -> dict[int, str]:
    """Play some schedules; the broken promises."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))  # pytest finds `support` there by itself
    from support.garbage import kept_garbage
    from support.system_schedules import System

    broken = {}
    with kept_garbage():
        for seed in seeds:
            try:
                System(seed).run()
            except AssertionError as error:
                broken[seed] = str(error)
    return broken


def run(seeds: range, *, processes: int, tell: Callable[[str], None]) -> Result:
    """Play a schedule for each seed, in a number of processes; ``tell`` hears how it goes."""
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
    """Draw a line with the figures, and the first broken promises with what had happened before."""
    shown = figure_table("random schedules of a whole feed", ("schedules", "time", "a schedule", "broken promises"))
    each_s = result.seconds / max(1, result.schedules)
    shown.add_row(f"{result.schedules:,}", duration(result.seconds), f"{1e3 * each_s:.1f} ms", str(len(result.broken)))
    return stack([shown, *(Text(result.broken[seed]) for seed in sorted(result.broken)[:SHOWN])])
