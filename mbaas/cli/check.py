"""``mbaas check`` reads and decodes all samples of a feed file once, and lists the bad ones."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Column
from rich.text import Text

from mbaas.base.units import count, counted, duration, number, percent, rate, size
from mbaas.cli import console
from mbaas.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from mbaas.cli.feed_data import FeedData
    from mbaas.cli.feed_file import FeedConfig
    from mbaas.dataset import Dataset
    from mbaas.samples.fields import Field
    from mbaas.samples.order import Ids
    from mbaas.tools.check.samples import Job
    from mbaas.tools.check.scan import Totals
    from mbaas.transforms import Pipeline
    from mbaas.wire.samples import BadSample

SHOWN = 20
"""Bad samples on the page; all are counted, and --json has up to 10,000."""

SHOWN_SIZES = 3
"""Image sizes on the page."""

LINE_S = 10.0
"""Period of progress lines if stderr is not a terminal."""


@console.command(console.app, console.FIRST)
def check(
    config: Annotated[Path, typer.Argument(metavar="FEED.yaml")],
    limit: Annotated[int | None, typer.Option(min=1, metavar="N")] = None,
    exclude: Annotated[Path | None, typer.Option(metavar="FILE.txt")] = None,
    processes: Annotated[int | None, typer.Option(min=1)] = None,
    as_json: console.AsJson = False,
) -> None:
    """Read and prepare each sample once, in parallel, and list the bad ones with the reason.

    The checks and reasons are the same as in a feed, and images and sound are decoded whole. A sample that crashes or
    blocks its process is also found. No cluster is needed. Ctrl-C ends it and shows the results so far. The exit code
    is 1 if a sample is bad, or if storage did not return it.

    Args:
        config: The file that `mbaas serve` reads.
        limit: Check only N samples, spread over the data.
        exclude: Write the bad samples to a file for the key exclude of the feed file, which leaves them out. A check of
            some samples only does not replace such a file.
        processes: Number of processes. Default: the CPUs of this process.

    Examples:
        mbaas check feed.yaml
        mbaas check feed.yaml --limit 1000             [dim]a quick look[/]
        mbaas check feed.yaml --exclude bad.txt        [dim]then add to feed.yaml: exclude: bad.txt[/]
        mbaas check feed.yaml --json | jq -r '.bad_samples\\[].uri'
    """
    from mbaas.cli import feed_data, feed_file
    from mbaas.dataset.base import bounded
    from mbaas.prep.engines import check_packages
    from mbaas.tools.check.samples import Job
    from mbaas.tools.check.scan import Totals, chosen_ids, prepared_field

    console.check_folders(exclude)
    wanted = feed_file.load(config)
    whole, listed = feed_data.whole_and_listed(wanted.data)
    check_packages(wanted.pipeline)
    wanted.pipeline.known(listed.fields)  # raises for unknown fields
    dataset = bounded(listed)
    ids, totals, began = chosen_ids(len(dataset), limit), Totals(), time.monotonic()
    was_stopped = False
    with console.end_as_ctrl_c():
        try:
            limits = wanted.options.timeouts
            pipeline = partial(_pipeline_of, config)
            job = Job(dataset, pipeline, wanted.options.seed, limits.storage_s, limits.prep_s)
            with console.doing("preparing the first sample"):
                made = prepared_field(job)
            with console.progress_bar(f"checking {wanted.data.where}") as show:
                _scan(job, made, ids, totals, processes or len(os.sched_getaffinity(0)), show)
        except KeyboardInterrupt:
            was_stopped = True
    found = _Report(wanted, dataset, ids, totals, time.monotonic() - began, was_stopped)
    is_written = exclude is not None and _write_excluded(exclude, wanted.data, whole, listed, found)
    console.write_result(found.to_json(), found.page, as_json=as_json)
    if was_stopped:
        console.say_note(f"interrupted: {count(len(ids) - totals.samples)} samples were not checked")
        raise typer.Exit(console.CUT_OFF)
    if totals.bad:
        _advise(exclude if is_written else None, wanted)
    if totals.unread_count:
        console.say_note(
            f"storage did not return {counted(totals.unread_count, 'sample')}, which may be good; check again later"
        )
    if totals.bad or totals.unread_count:
        raise typer.Exit(console.FAILED)


def _pipeline_of(config: Path) -> Pipeline:
    # Each process reads the file again, because functions in modules next to it cannot be pickled by name.
    from mbaas.cli import feed_file

    return feed_file.load(config).pipeline


def _scan(
    job: Job, made: Field, ids: Ids, totals: Totals, processes: int, show: Callable[[int, int, str], float | None]
) -> None:
    """Check the samples, and show the progress: a bar on a terminal, lines elsewhere."""
    from mbaas.tools.check.scan import scan

    shown_at = time.monotonic()
    with closing(scan(job, made, ids, totals, processes=processes)) as pieces:
        for _ in pieces:
            done = f"{count(totals.samples)} of {count(len(ids))} samples, {count(len(totals.bad_ids))} bad"
            left_s = show(totals.samples, len(ids), done)
            if not console.err.is_terminal and time.monotonic() - shown_at >= LINE_S:
                shown_at = time.monotonic()
                console.line(console.err, done if left_s is None else f"{done}, {duration(left_s)} left")


# ---- results ----


@dataclass(frozen=True)
class _Report:
    wanted: FeedConfig
    dataset: Dataset
    ids: Ids
    totals: Totals
    took_s: float
    was_stopped: bool

    @property
    def is_complete(self) -> bool:
        """True if each sample of the feed is known to be good or bad."""
        return not self.was_stopped and self.totals.samples - self.totals.unread_count == len(self.dataset)

    def _classes(self) -> tuple[NDArray[np.int64], NDArray[np.int64]] | None:
        """Return the number of checked and of bad samples by class; None without classes."""
        from mbaas.tools.check.scan import class_counts

        counts = class_counts(self.dataset, self.ids)
        bad = class_counts(self.dataset, self.totals.ids)
        return None if counts is None or bad is None else (counts, bad)

    def to_json(self) -> dict[str, Any]:
        from mbaas.tools.check.scan import most_frequent

        totals = self.totals
        classes = self._classes()
        names = self.dataset.class_names
        return {
            "name": self.wanted.name,
            "data": self.wanted.data.where,
            "samples": len(self.dataset),
            "checked": totals.samples,
            "bytes": totals.nbytes,
            "bad": len(totals.bad_ids),
            "bad_samples": [asdict(each) for each in sorted(totals.bad, key=lambda each: each.sample_id)],
            "unread": totals.unread_count,
            "unread_samples": [asdict(each) for each in sorted(totals.unread, key=lambda each: each.sample_id)],
            "image_sizes": [
                {"width": width, "height": height, "images": images}
                for (width, height), images in most_frequent(totals.sizes, SHOWN)
            ],
            "classes": None
            if classes is None
            else {
                name: {"samples": samples, "bad": bad}
                for name, samples, bad in zip(names, classes[0].tolist(), classes[1].tolist(), strict=True)
            },
            "seconds": round(self.took_s, 3),
            "was_stopped": self.was_stopped,
        }

    def page(self) -> RenderableType:
        totals, bad = self.totals, len(self.totals.bad_ids)
        unread = totals.unread_count
        good = totals.samples - bad - unread
        of = f" of {count(len(self.dataset))}" if totals.samples < len(self.dataset) else ""
        per_s = totals.samples / max(self.took_s, 1e-9)
        lost = f", {count(unread)} not returned by storage" if unread else ""
        rows = [("samples", f"{count(totals.samples)}{of} checked, {count(good)} good, {count(bad)} bad{lost}")]
        if totals.samples:
            each = f"{size(totals.nbytes / totals.samples)} each"
            speed = f"in {duration(self.took_s)}, {number(per_s)} samples/s, {rate(totals.nbytes / self.took_s)}"
            rows += [("bytes", f"{size(totals.nbytes)}, {each}"), ("time", speed)]
        rows += self._sizes_row() + self._classes_row()
        table = console.facts(((name, Text(text)) for name, text in rows), Column(overflow="fold"))
        return Group(*self._bad_lines(), *self._unread_lines(), table)

    def _unread_lines(self) -> list[RenderableType]:
        if not self.totals.unread:
            return []
        lines: list[RenderableType] = ["not returned by storage:", _listed(self.totals.unread)]
        if (more := self.totals.unread_count - SHOWN) > 0:
            lines.append(Text(f"  and {counted(more, 'more sample')}"))
        return [*lines, ""]

    def _bad_lines(self) -> list[RenderableType]:
        if not self.totals.bad:
            return []
        lines = [_listed(self.totals.bad)]
        if (more := len(self.totals.bad_ids) - SHOWN) > 0:
            frequent = self.totals.reasons.most_common(1)[0]
            with_reason = f"{count(frequent[1])} with: {frequent[0]}"
            lines.append(Text(f"  and {counted(more, 'more bad sample')}, listed by --json; {with_reason}"))
        return [*lines, ""]

    def _sizes_row(self) -> list[tuple[str, str]]:
        from mbaas.tools.check.scan import MOST_SIZES, most_frequent

        totals = self.totals
        if totals.smallest is None or totals.largest is None:
            return []
        images = totals.samples - len(totals.bad_ids) - totals.unread_count
        frequent = [
            f"{width}x{height} ({percent(times / images)})"
            for (width, height), times in most_frequent(totals.sizes, SHOWN_SIZES)
        ]
        if len(totals.sizes) == 1:
            return [("sizes", f"all {totals.smallest[0]}x{totals.smallest[1]} pixels")]
        least, most = (f"{width}x{height}" for width, height in (totals.smallest, totals.largest))
        distinct = count(len(totals.sizes)) + (" or more" if len(totals.sizes) == MOST_SIZES else "")
        return [("sizes", f"{distinct}, from {least} to {most} pixels; most often {', '.join(frequent)}")]

    def _classes_row(self) -> list[tuple[str, str]]:
        found = self._classes()
        if found is None:
            return []
        names, (counts, bad) = self.dataset.class_names, found
        least, most = int(counts.argmin()), int(counts.argmax())
        text = f"{count(len(names))}, with {count(counts[least])} ({names[least]}) to {count(counts[most])} samples"
        text += f" ({names[most]})"
        if counts[least] == counts[most]:
            text = f"{count(len(names))}, with {counted(int(counts[most]), 'sample')} each"
        if lost := [name for name, checked, flawed in zip(names, counts, bad, strict=True) if checked == flawed > 0]:
            text += f"; without a good sample: {', '.join(lost[:SHOWN])}"
        return [("classes", text)]


def _listed(samples: Iterable[BadSample]) -> RenderableType:
    """Return a line for each of the first samples, in the order of their ids."""
    shown = sorted(samples, key=lambda each: each.sample_id)[:SHOWN]
    rows = [(Text(str(each.sample_id)), Text(f"{each.uri}: {each.reason}")) for each in shown]
    return console.facts(rows, Column(overflow="fold"))


def _write_excluded(file: Path, data: FeedData, whole: Dataset, listed: Dataset, found: _Report) -> bool:
    """Write the bad samples of the ``whole`` data; return False if an earlier list is kept instead."""
    import numpy as np

    from mbaas.cli import excluded

    if not found.is_complete and file.is_file():
        console.say_note(f"{file} was not replaced, because not all samples were checked")
        return False
    # with the samples that the feed file already leaves out
    ids = np.union1d(listed.source_ids(found.totals.ids), data.excluded_ids(whole))
    try:
        excluded.write(file, whole, ids)
    except OSError as error:
        raise ConfigError(f"cannot write {file}: {error.strerror}") from None
    return True


def _advise(exclude: Path | None, wanted: FeedConfig) -> None:
    file = wanted.data.top.file
    if exclude is not None:
        named = os.path.relpath(exclude, file.resolve().parent)
        console.say_note(f"to leave them out, add this line to {file}: exclude: {json.dumps(named)}")
    elif wanted.options.on_bad_sample == "raise":
        console.say_note(
            f"each is an error in trials; repair or remove the files, add on_bad_sample: skip to {file}, or list them "
            f"for its key exclude: mbaas check {file} --exclude bad.txt"
        )
    sys.stderr.flush()
