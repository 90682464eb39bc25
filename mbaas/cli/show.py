"""``mbaas show`` draws the first samples of an epoch as trials will get them, without Ray."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mbaas.base.units import counted
from mbaas.cli.console import FEEDS, app, command, doing, line, out, say_note
from mbaas.errors import ConfigError

if TYPE_CHECKING:
    from mbaas.wire.samples import BadSample

COUNT = 32
"""Default number of samples drawn."""

NAMED = 5
"""Number of bad samples listed by name; all are counted."""


@command(app, FEEDS)
def show(
    config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml")],
    to: Annotated[Path, typer.Option("--out", metavar="FILE.png")] = Path("grid.png"),
    epoch: Annotated[int, typer.Option(min=0)] = 0,
    count: Annotated[int | None, typer.Option(min=1)] = None,
) -> None:
    """Draw the first samples of an epoch as a grid, with their classes, boxes, masks and key points.

    They are exactly the samples that trials will get, before [bold]Normalize[/], which runs in the trial. A minibatch
    is determined by the data, the pipeline and the seed, so neither a feed nor Ray is needed. The cpu engine prepares
    the samples; dali's pixels differ by a few grey levels.

    Args:
        config: The file that `mbaas serve` reads.
        to: The picture to write.
        epoch: Epoch of the feed.
        count: Number of samples. Default: a minibatch, 32 at most.

    Examples:
        mbaas show feed.yaml --out grid.png
        mbaas show feed.yaml --out later.png --epoch 7 --count 64
    """
    from mbaas.cli import feed_data, feed_file
    from mbaas.pictures import grid
    from mbaas.pictures.samples import cells_of, first_samples

    wanted = feed_file.load(config)
    if not wanted.pipeline.has_images:
        raise ConfigError(f"only images can be drawn, but {wanted.pipeline.decoder!r} makes none")
    grid.check_path(to)
    options = wanted.options
    dataset = feed_data.listed(wanted.data)
    most = count if count is not None else min(COUNT, options.batch_size)
    with doing(f"preparing {counted(most, 'sample')}"):
        found = first_samples(
            dataset, wanted.pipeline, count=most, seed=options.seed, shuffle=options.shuffle, epoch=epoch
        )
        drawn = counted(len(found.samples), "sample")
        title = [
            f"{wanted.name}: the first {drawn} of epoch {epoch}, seed {options.seed}",
            *map(repr, wanted.pipeline.transforms),
        ]
        grid.draw(cells_of(dataset, wanted.pipeline, found), to, title=title)
    _note_bad_samples(found.bad, on_bad_sample=options.on_bad_sample)
    line(out, f"{to}: the first {drawn} of epoch {epoch} of feed {wanted.name!r}, as every trial gets them")


def _note_bad_samples(bad: tuple[BadSample, ...], *, on_bad_sample: str) -> None:
    for sample in bad[:NAMED]:
        say_note(f"{sample.uri} cannot be prepared: {sample.reason}")
    if bad:
        then = "is left out" if on_bad_sample == "skip" else "is an error in each trial, unless on_bad_sample is skip"
        say_note(f"{counted(len(bad), 'bad sample')} among the first of this epoch; each {then}")
