"""Pictures of a real feed for the documents: `mbaas status`, `mbaas top`, `mbaas show`, and the report's pipeline.

A small feed of photographs is served on a local cluster, and three trials read it until each has finished some epochs.
The files differ from run to run, as rates and times do.
"""

from __future__ import annotations

import io
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console, RenderableType

import mbaas
from benchmarks.charts import drawing
from benchmarks.charts.charts import FOLDER
from mbaas.cli import feed_view, top
from mbaas.coordinator.control import FeedControl
from mbaas.pictures import grid
from mbaas.pictures.samples import cells_of, first_samples
from mbaas.ray_cluster import connection
from mbaas.status import ConsumerStatus, FeedStatus
from mbaas.tools.analysis.report import charts
from mbaas.tools.analysis.report.studies import studies
from mbaas.tools.analysis.whole import Analysis, analyze_feed
from mbaas.tools.bench.tasks.base import Report
from mbaas.tools.bench.tasks.images import Images

FEED = "photos"

STEPS_MS = {"trial-1": 50, "trial-2": 52, "trial-3": 54}
"""Consumers, and the milliseconds that each sleeps over a minibatch."""

BATCH, IMAGES = 32, 600

STAGING = "192 MiB"
"""Room for several blocks of an epoch, so that progress is visible."""

EPOCHS = 10
"""Finished epochs of each trial before the pictures are taken."""

WINDOW_S = 4.0
"""Time over which `mbaas top` shows rates."""

LONGEST_S = 120.0

COLUMNS = 104
"""Characters in a line of the terminal."""

SHOWN, SHOWN_SIDE = 8, 128
"""Images of the grid, and the longer side of each in pixels."""

_FONTS = re.compile(r"@font-face \{\{.*?\}\}\s*", re.DOTALL)


def write(cache_dir: Path, *, folder: Path = FOLDER, report: Report = print) -> list[Path]:
    """Serve the feed, take the pictures, and return their files."""
    folder.mkdir(exist_ok=True)
    task = Images()
    data, pipeline = task.dataset(task.make(cache_dir, IMAGES, seed=0, report=report)), task.pipeline()
    found = first_samples(data, pipeline, count=SHOWN)
    title = [f"the first samples of epoch 0: {task.work}"]
    grid.draw(cells_of(data, pipeline, found), folder / "grid.png", title=title, most_side=SHOWN_SIDE)

    with connection.separate_ray():
        with mbaas.serve(FEED, data, pipeline, batch_size=BATCH, staging_bytes=STAGING, seed=0), _trials():
            report(f"waiting until each trial has finished {EPOCHS} epochs")
            before = _after_epochs()
            time.sleep(WINDOW_S)
            status, analysis = FeedControl.of(FEED).status(), analyze_feed(FEED)
    flow = feed_view.Flow.between(before, status)
    terminals = {
        "status": (feed_view.feed(status, flow), f"mbaas status {FEED}"),
        "top": (top.page({FEED: (status, before)}, lines=None), "mbaas top"),
    }
    drawn = {name: terminal(page, title=title) for name, (page, title) in terminals.items()}
    drawn["report-pipeline"] = _pipeline(analysis)
    for name, text in drawn.items():
        (folder / f"{name}.svg").write_text(text, encoding="utf-8")
    return [folder / "grid.png", *(folder / f"{name}.svg" for name in drawn)]


def terminal(page: RenderableType, *, title: str) -> str:
    """Return a page of the command line as an SVG that fetches no font."""
    console = Console(record=True, file=io.StringIO(), width=COLUMNS, force_terminal=True, color_system="truecolor")
    console.print(page)
    console.print()  # rich cuts the lower edge of the last line off
    return console.export_svg(
        title=title, code_format=_FONTS.sub("", CONSOLE_SVG_FORMAT), unique_id=title.replace(" ", "-")
    )


def _pipeline(analysis: Analysis) -> str:
    (chart,) = (each for each in charts.charts(analysis, studies(analysis)) if each.name == "pipeline")
    assert chart.narrow is not None
    return drawing.svg(chart.narrow, name="report-pipeline", said=chart.said, margin=drawing.MARGIN)


@contextmanager
def _trials() -> Iterator[None]:
    """Read the feed in one thread per consumer, with the steps in `STEPS_MS`."""
    ended = threading.Event()
    threads = [threading.Thread(target=_train, args=(name, step, ended)) for name, step in STEPS_MS.items()]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join()


def _train(consumer: str, step_ms: float, ended: threading.Event) -> None:
    with mbaas.join(FEED, consumer=consumer, format="numpy") as loader:
        while not ended.is_set():
            for _ in loader:
                if ended.wait(step_ms / 1000):
                    break


def _after_epochs() -> FeedStatus:
    """Wait until each trial has finished some epochs."""
    until = time.monotonic() + LONGEST_S
    while time.monotonic() < until:
        status = FeedControl.of(FEED).status()
        if len(status.consumers) == len(STEPS_MS) and all(_is_done(each) for each in status.consumers):
            return status
        time.sleep(0.2)
    raise TimeoutError(f"the trials did not finish {EPOCHS} epochs within {LONGEST_S:.0f} s")


def _is_done(consumer: ConsumerStatus) -> bool:
    return consumer.last_ledger is not None and consumer.report.samples >= EPOCHS * IMAGES
