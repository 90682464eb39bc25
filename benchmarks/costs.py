"""Cost of a whole ASHA search over photographs, with mbaas and with a DataLoader for each trial.

It uses the photographs of `mbaas bench`, with a random-resized crop to 224 and a flip. Each epoch ends with an
evaluation on other photographs, resized and center-cropped. A step is a pause, as for a trial on a GPU, so CPU time is
spent on loading, Ray and Tune. Each search has a new Ray cluster, and the ways alternate.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.table import Table

from benchmarks import rows
from benchmarks.searches import Plan, Search, SearchData, Way, median_of, search
from mbaas import transforms as T
from mbaas.dataset import read_images
from mbaas.ray_cluster import connection
from mbaas.tools.bench.cpu import TreeCpu
from mbaas.tools.bench.rows.dataloader import workers_for
from mbaas.tools.bench.tasks.images import SIDE, Images, make_photos

BATCH = 64
HELD_OUT_SHARE = 1 / 8
"""Number of photographs for evaluation per photograph for training."""

WAYS: dict[str, tuple[Way, dict[str, Any]]] = {
    "dataloader": ("dataloader", {}),
    "mbaas": ("now", {"cache_decoded": False}),
    "mbaas-decoded": ("now", {}),
}
"""Compared ways: source of minibatches, and options of the feeds. "now" and decoded samples are the defaults in a
trial.
"""

NAMES = {"dataloader": "DataLoader", "mbaas": "mbaas", "mbaas-decoded": "mbaas, decoded"}


@dataclass(frozen=True)
class Cost:
    """Cost of a search; medians over rounds.

    Attributes:
        way: one of `WAYS`.
        search: its results.
        cpu_s: CPU seconds of all processes, including Ray's daemons and Tune, from before feeds are served until the
            search has ended.
    """

    way: str
    search: Search
    cpu_s: float


def measure(
    *, images: int, trials: int, slots: int, step_s: float, rounds: int, cores: int, tell: Callable[[str], None]
) -> list[Cost]:
    """Run the search ``rounds`` times in each way, with ``slots`` concurrent trials, on ``images`` photographs."""
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
    """Generate photographs for training and for evaluation, or find existing ones."""
    made = Path(tempfile.gettempdir()) / "mbaas-bench"
    train = make_photos(made, images, report=tell)
    held_out = make_photos(made, max(1, round(images * HELD_OUT_SHARE)), seed=1, report=tell)
    plain = T.Pipeline([T.DecodeImage(), T.Resize(SIDE + 32), T.CenterCrop(SIDE)])
    return SearchData(read_images(train), read_images(held_out), Images().pipeline(), plain, SIDE, BATCH, workers)


def _measure(way: str, plan: Plan, data: SearchData, cores: int) -> Cost:
    how, options = WAYS[way]
    with connection.separate_ray(plan.slots + cores + 2):
        with TreeCpu() as cpu:
            done = search(plan, how, data, prep_workers=cores, **options)
            return Cost(way, done, cpu.seconds())


def _median(rounds: Sequence[Cost]) -> Cost:
    done, cpu_s = median_of([each.search for each in rounds]), median(each.cpu_s for each in rounds)
    return Cost(rounds[0].way, done, cpu_s)


def figures(results: Sequence[Cost]) -> list[dict[str, Any]]:
    """Return the results as plain values."""
    return [{**asdict(each.search), "way": each.way, "cpu_s": each.cpu_s} for each in results]


def table(results: Sequence[Cost]) -> Table:
    """Return a table with a row for each way."""
    columns: dict[str, Callable[[Cost], str]] = {
        "": lambda each: NAMES[each.way],
        "epochs": lambda each: str(each.search.epochs),
        "s": lambda each: f"{each.search.seconds:.0f}",
        "s/epoch": lambda each: f"{each.search.seconds / each.search.epochs:.2f}",
        "CPU-s": lambda each: f"{each.cpu_s:.0f}",
        "CPU-s/epoch": lambda each: f"{each.cpu_s / each.search.epochs:.2f}",
        "prepared": lambda each: f"{each.search.prepared:,}",
        "waited": lambda each: f"{each.search.waited:.0%}",
    }
    return rows("An ASHA search over photographs", results, columns, words=("",))
