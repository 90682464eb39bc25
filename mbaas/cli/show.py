"""``mbaas show`` draws the first samples of an epoch as trials will get them, without Ray."""

from __future__ import annotations

from pathlib import Path

from mbaas.cli import feed_data, feed_file
from mbaas.cli.console import err, line, out, plain, say_note
from mbaas.errors import ConfigError
from mbaas.messages import BadSample
from mbaas.pictures import grid
from mbaas.pictures.preview import first_samples
from mbaas.pictures.samples import cells_of
from mbaas.units import counted

COUNT = 32
"""Default number of samples drawn."""

NAMED = 5
"""Number of bad samples listed by name; all are counted."""


def show(file: Path, *, to: Path, epoch: int, count: int | None) -> None:
    """Draw the first ``count`` samples of an epoch (default: a minibatch, at most `COUNT`) into a PNG file.

    Raises:
        ConfigError: an invalid file, or samples that are not images.
        DatasetError: the data are missing.
        BadSampleError: none of the samples can be prepared.
    """
    wanted = feed_file.load(file)
    if not wanted.pipeline.has_images:
        raise ConfigError(f"only images can be drawn, but {wanted.pipeline.decoder!r} makes none")
    grid.check_path(to)
    options = wanted.options
    dataset = feed_data.listed(wanted.data)
    most = count if count is not None else min(COUNT, options.batch_size)
    with err.status(plain(f"preparing {counted(most, 'sample')} ...")):
        found = first_samples(
            dataset, wanted.pipeline, count=most, seed=options.seed, shuffle=options.shuffle, epoch=epoch
        )
        drawn = counted(len(found.samples), "sample")
        title = [
            f"{wanted.name}: the first {drawn} of epoch {epoch}, seed {options.seed}",
            *map(repr, wanted.pipeline.transforms),
        ]
        grid.draw(cells_of(dataset, wanted.pipeline, found), to, title=title)
    _tell_bad(found.bad, on_bad_sample=options.on_bad_sample)
    line(out, f"{to}: the first {drawn} of epoch {epoch} of feed {wanted.name!r}, as every trial gets them")


def _tell_bad(bad: tuple[BadSample, ...], *, on_bad_sample: str) -> None:
    for sample in bad[:NAMED]:
        say_note(f"{sample.uri} cannot be prepared: {sample.reason}")
    if bad:
        then = "is left out" if on_bad_sample == "skip" else "is an error in each trial, unless on_bad_sample is skip"
        say_note(f"{counted(len(bad), 'bad sample')} among the first of this epoch; each {then}")
