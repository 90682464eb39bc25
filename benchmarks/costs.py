"""Measures what a whole ASHA search over photographs costs, with mbaas and with a DataLoader for each trial.

Photographs are those of `mbaas bench`, with a random-resized crop to 224 and a flip; each epoch ends with an evaluation
of others, resized and cropped in the middle. A step is a pause, as for a trial that computes on a GPU, so CPU seconds
are those of loading, of Ray and of Tune. Each search has a Ray cluster of its own, and the ways take turns.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import ray
from rich.table import Table

from benchmarks.searches import Plan, Search, SearchData, Way, median_of, search
from benchmarks.tree_cpu import TreeCpu
from mbaas import runtime
from mbaas import transforms as T
from mbaas.bench.photos import make_photos
from mbaas.bench.render import figure_table
from mbaas.bench.rows.dataloader import workers_for
from mbaas.bench.tasks.images import SIDE, Images
from mbaas.dataset import read_images

BATCH = 64
HELD_OUT_SHARE = 1 / 8
"""Photographs to evaluate with, for each to train on."""

WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "dataloader": ("dataloader", {}),
    "mbaas": ("now", {"decoded": False}),
    "mbaas-decoded": ("now", {}),
}
"""What is compared: how trials get their minibatches, and options of the feeds. "now" is the default in a trial,
and so is to keep samples decoded."""

NAMES = {"dataloader": "DataLoader", "mbaas": "mbaas", "mbaas-decoded": "mbaas, decoded"}


@dataclass(frozen=True)
class Cost:
    """What a search took; medians over rounds.

    Attributes:
        way: one of `WAYS`.
        search: what came of it.
        cpu_s: CPU seconds of all processes, Ray's daemons and Tune's among them, from before feeds are served until the
            search has ended.
    """

    way: str
    search: Search
    cpu_s: float


def measure(
    *, images: int, trials: int, slots: int, step_s: float, rounds: int, cores: int, tell: Callable[[str], None]
) -> list[Cost]:
    """Run the search ``rounds`` times in each way, with ``slots`` trials at a time, on ``images`` photographs."""
    data = photographs(images, workers_for(cores, slots), tell)
    plan = Plan("ASHA", trials, slots, step_s)
    found = []
    for number in range(1, rounds + 1):
        for way in WAYS:
            found.append(_measure(way, plan, data, cores))
            done = found[-1].search
            tell(f"round {number}/{rounds}, {NAMES[way]}: {done.epochs} epochs in {done.seconds:.0f} s")
    return [_median([each for each in found if each.way == way]) for way in WAYS]


def photographs(images: int, workers: int, tell: Callable[[str], None]) -> SearchData:
    """Make photographs to train on and to evaluate with, or find those that were made before."""
    made = Path(tempfile.gettempdir()) / "mbaas-bench"
    train = make_photos(made, images, report=tell)
    held_out = make_photos(made, max(1, round(images * HELD_OUT_SHARE)), seed=1, report=tell)
    plain = T.Pipeline([T.DecodeImage(), T.Resize(SIDE + 32), T.CenterCrop(SIDE)])
    return SearchData(read_images(train), read_images(held_out), Images().pipeline(), plain, SIDE, BATCH, workers)


def _measure(way: str, plan: Plan, data: SearchData, cores: int) -> Cost:
    how, options = WAYS[way]
    runtime.start_ray(plan.slots + cores + 2)
    try:
        with TreeCpu() as cpu:
            done = search(plan, how, data, prep_workers=cores, **options)
            return Cost(way, done, cpu.seconds())
    finally:
        ray.shutdown()


def _median(rounds: Sequence[Cost]) -> Cost:
    done, cpu_s = median_of([each.search for each in rounds]), median(each.cpu_s for each in rounds)
    return Cost(rounds[0].way, done, cpu_s)


def figures(results: Sequence[Cost]) -> list[dict[str, Any]]:
    """Return the figures for programs."""
    return [{**asdict(each.search), "way": each.way, "cpu_s": each.cpu_s} for each in results]


def table(results: Sequence[Cost]) -> Table:
    """Show what was measured."""
    headings = ("", "epochs", "s", "s/epoch", "CPU-h", "CPU-s/epoch", "prepared", "waited")
    shown = figure_table("An ASHA search over photographs", headings, words=("",))
    for each in results:
        done = each.search
        shown.add_row(
            NAMES[each.way],
            str(done.epochs),
            f"{done.seconds:.0f}",
            f"{done.seconds / done.epochs:.2f}",
            f"{each.cpu_s / 3600:.3f}",
            f"{each.cpu_s / done.epochs:.2f}",
            f"{done.prepared:,}",
            f"{done.waited:.0%}",
        )
    return shown
