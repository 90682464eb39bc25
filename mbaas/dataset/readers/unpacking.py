"""Writes images end to end into plain files, so that each can be read at random."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Iterable, Mapping

import numpy as np
import pyarrow as pa

from mbaas.dataset.storage.location import IN_SHARD, Location, file_infos, join, written_whole
from mbaas.dataset.table import PLACE, string_bounds

LISTING = "listing.parquet"
"""Listing file of a folder of unpacked images."""

ENDING = ".images"
"""Suffix of files with unpacked images."""


def listing_in(folder: str | os.PathLike[str]) -> str:
    """Return the path or URI of the listing in a folder; a URI may have options after a question mark."""
    text = os.fspath(folder)
    path, *options = text.partition("?") if "://" in text else (text,)
    return f"{path.rstrip('/')}/{LISTING}" + "".join(options)


def unpack(images: Iterable[pa.Array], target: Location, name: str) -> tuple[pa.Table, int]:
    """Write batches of images (binary or large_binary without nulls) into a file, atomically.

    The folder ``target`` is created if it does not exist. ``name`` lacks `ENDING`. Return the images' locations, as in
    `PLACE`, and the size of the file.
    """
    path, lengths = join(target.base, name + ENDING), [np.zeros(0, np.int64)]
    target.filesystem.create_dir(posixpath.dirname(path), recursive=True)
    with written_whole(target.filesystem, path) as partial:
        with target.filesystem.open_output_stream(partial) as out:
            for encoded in images:
                bounds, content = string_bounds(encoded)
                out.write(content[bounds[0] : bounds[-1]])
                lengths.append(np.diff(bounds).astype(np.int64))
    length = np.concatenate(lengths)
    uris = [f"{name}{ENDING}{IN_SHARD}{row}" for row in range(len(length))]
    columns = [pa.array(uris, pa.large_string()), pa.array(np.cumsum(length) - length), pa.array(length)]
    return pa.Table.from_arrays(columns, schema=PLACE), int(length.sum())


def is_there(target: Location, sizes: Mapping[str, int]) -> bool:
    """Return whether a folder has files with these names and sizes."""
    return [info.size for info in file_infos(target, [*sizes])] == [*sizes.values()]
