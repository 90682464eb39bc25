"""Reading WebDataset shards: tar files whose members are samples, found once and then read by their places."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.columns import gathered
from mbaas.dataset.faults import s3_attempts, said
from mbaas.dataset.file_infos import S3_ATTEMPTS
from mbaas.dataset.kept_listing import Listing, listed_once
from mbaas.dataset.location import Location, join
from mbaas.dataset.shard_names import locate_shards, look_up
from mbaas.dataset.table import IN_SHARD, PLACE, fingerprint_of, table_of
from mbaas.dataset.tar_index import Member, TarSample, tar_samples
from mbaas.errors import ConfigError, DatasetError, shown
from mbaas.fields import LABEL
from mbaas.progress import track

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that `read_webdataset` takes for images unless told otherwise: what the engines decode."""

_WRITER = "read_webdataset"
_CLS, _JSON = "cls", "json"
_CLS_COLUMN = ".cls"  # a JSON object may have a key "cls"

_REMOTE_THREADS = 32  # each waits for one header after the other
_LOCAL_THREADS = 4
_BUFFER_BYTES = 16 << 10
"""How much is read at a header: small images are then read with it, and cost no request of their own."""


def read_webdataset(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    image: str | Sequence[str] = IMAGE_ENDINGS,
    label: str | None = _CLS,
    fields: Sequence[str] = (),
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """Find the samples in WebDataset shards; read none of their images.

    A shard is a tar file that is not compressed. The members of a sample follow one another, and their names are the
    same up to the first dot of the base name: ``cat/001.jpg``, ``cat/001.cls``. The headers of all members are read
    once, and the small members that labels and fields come from; later each image is read by its place, in any order.
    A shard that has another size by then is not the one that was read, and its samples are bad.

    Args:
        shards: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several, such as
            ``train-{000000..000127}.tar`` or ``{a,b}.tar``; or a list of these. All are in one file system.
        image: endings of the names of images, in any case, without the first dot; each sample has one of them. For
            pipelines of sound or arrays, endings of these, such as ``"flac"`` or ``"npy"``.
        label: ``cls`` for the member of this ending, the text of an integer; else a key of the JSON object in the
            member that ends in ``.json``. If its values are text, the distinct ones, sorted, are the classes
            (`Dataset.class_names`), and labels int64 indices into them. None: minibatches have no ``label``.
        fields: further keys of the JSON object, with numbers, or with lists as `read_manifest` takes them; minibatches
            have them under these names.
        filesystem: where the shards are, for credentials or file systems that a URI cannot express.
        listing: a Parquet file, by its path or URI, in which is kept what was found: written if it is not there, or
            if the size or time of a shard, or the list of them, has changed since; else read, which takes a second.

    Raises:
        ConfigError: a pattern, an ending or a field that cannot be.
        DatasetError: a shard is not there, is compressed, cut off or damaged; a sample has no image, or two, or lacks a
            label or a field; names the shard and the sample. Or ``listing`` cannot be read or written, is damaged, or
            is of other shards or options.
    """
    wanted = _Wanted(_checked_endings(image), label, _checked_fields(fields))
    where, names = locate_shards(shards, filesystem)
    files = look_up(where, names)
    asked = {"image": wanted.images, "label": label, "fields": wanted.fields}
    known = [*([LABEL.name] if label is not None else []), *wanted.fields]

    def make() -> Listing:
        class_names, table = _indexed(where, files, wanted)
        return Listing(_WRITER, where.root, asked, class_names, fingerprint_of(table, class_names), table, files)

    found = listed_once(
        listing,
        make,
        writer=_WRITER,
        root=where.root,
        options=asked,
        fields=known,
        is_current=lambda kept: bool(kept.files == files),
    )
    return found.dataset(where, {name: nbytes for name, nbytes, _ in files})


@dataclass(frozen=True)
class _Wanted:
    """What is wanted of each sample; see `read_webdataset`.

    Attributes:
        images: endings in lower case.
        label, fields: as given.
    """

    images: tuple[str, ...]
    label: str | None
    fields: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the JSON object that are needed, each once."""
        label = [self.label] if self.label is not None and self.label != _CLS else []
        return tuple(dict.fromkeys([*label, *self.fields]))

    @property
    def columns(self) -> tuple[str, ...]:
        """What `_values_of` finds of each sample."""
        return (*([_CLS_COLUMN] if self.label == _CLS else []), *self.keys)

    @property
    def members(self) -> tuple[str, ...]:
        """Endings of the members that must be read."""
        return (*([_CLS] if self.label == _CLS else []), *([_JSON] if self.keys else []))


def _checked_endings(image: str | Sequence[str]) -> tuple[str, ...]:
    endings = (image,) if isinstance(image, str) else tuple(image)
    if not endings:
        raise ConfigError("image must name at least one ending, such as 'jpg', got none", option="image")
    for ending in endings:
        if not isinstance(ending, str) or not ending or ending.startswith(".") or "/" in ending:
            raise ConfigError(f"image must have endings without their first dot, such as 'jpg', got {shown(ending)}")
    return tuple(ending.lower() for ending in endings)


def _checked_fields(fields: Sequence[str]) -> tuple[str, ...]:
    if isinstance(fields, str):
        raise ConfigError(f"fields must be a list of keys, such as [{fields!r}], got {fields!r}", option="fields")
    return tuple(fields)


def _indexed(where: Location, files: list[list[Any]], wanted: _Wanted) -> tuple[tuple[str, ...], pa.Table]:
    """Find all samples: the names of classes, and a table as a `TableDataset` has it."""
    filesystem = s3_attempts(where.filesystem, S3_ATTEMPTS)
    is_local = isinstance(filesystem, pyarrow.fs.LocalFileSystem)

    def index(file: list[Any]) -> tuple[pa.Table, pa.Table]:
        name, nbytes, _ = file
        return _indexed_shard(where, filesystem, name, nbytes, wanted)

    threads = min(_LOCAL_THREADS if is_local else _REMOTE_THREADS, len(files))
    with ThreadPoolExecutor(threads, thread_name_prefix="mbaas-listing") as pool:
        found = [*track(pool.map(index, files), "shards", len(files))]
    places, columns = gathered(where.root, found)
    label = _CLS_COLUMN if wanted.label == _CLS else wanted.label
    class_names, known = columns.fields(label, wanted.fields)
    return class_names, table_of(places, known)


def _indexed_shard(
    where: Location, filesystem: pyarrow.fs.FileSystem, name: str, nbytes: int, wanted: _Wanted
) -> tuple[pa.Table, pa.Table]:
    """Find the samples of one shard: where they lie, as in `PLACE`, and the values that labels and fields come from."""
    shard = join(where.root, name)
    uris: list[str] = []
    spans: list[tuple[int, int]] = []
    values: dict[str, list[Any]] = {key: [] for key in wanted.columns}
    try:
        with filesystem.open_input_file(join(where.base, name)) as raw:
            file = io.BufferedReader(raw, _BUFFER_BYTES)
            for sample in tar_samples(file, nbytes, shard=shard, images=wanted.images, read=wanted.members):
                image = _image_of(sample, shard, wanted.images)
                # A name is bytes, which may be no text at all.
                member = image.name.encode(errors="surrogateescape").decode(errors="replace")
                uris.append(f"{name}{IN_SHARD}{member}")
                spans.append((image.offset, image.length))
                for key, value in _values_of(sample, shard, wanted).items():
                    values[key].append(value)
    except DatasetError:
        raise
    except Exception as error:  # a file system of somebody else's raises what it likes
        raise DatasetError(f"cannot read {shard}: {said(error)}") from error
    offsets, lengths = zip(*spans, strict=True) if spans else ((), ())
    columns = [pa.array(column, each.type) for column, each in zip((uris, offsets, lengths), PLACE, strict=True)]
    places = pa.Table.from_arrays(columns, schema=PLACE)
    return places, pa.table({key: _array_of(shard, key, column) for key, column in values.items()})


def _image_of(sample: TarSample, shard: str, images: tuple[str, ...]) -> Member:
    if len(sample.images) == 1:
        return sample.images[0]
    there = ", ".join(f".{ending}" for ending in sample.endings)
    has = f"has {len(sample.images) or 'no'} images instead of one"
    raise DatasetError(
        f"{shard}: the sample {sample.key!a} {has}: its members end in {there}, and images in "
        f"{', '.join(f'.{ending}' for ending in images)}; name others with image="
    )


def _values_of(sample: TarSample, shard: str, wanted: _Wanted) -> dict[str, Any]:
    """Read what is known of a sample from its members."""
    for ending in wanted.members:
        if ending not in sample.contents:
            hint = "; label=None leaves labels out" if ending == _CLS else ""
            raise DatasetError(f"{shard}: the sample {sample.key!a} has no member that ends in .{ending}{hint}")
    found: dict[str, Any] = {}
    if _CLS in wanted.members:
        text = sample.contents[_CLS]
        try:
            found[_CLS_COLUMN] = int(text)
        except ValueError:
            raise DatasetError(
                f"{shard}: the label in {sample.key + '.cls'!a} must be the text of an integer, got {shown(text)}"
            ) from None
    if wanted.keys:
        known = _object_of(sample.contents[_JSON], f"{shard}: the member {sample.key + '.json'!a}")
        for key in wanted.keys:
            if known.get(key) is None:
                there = ", ".join(map(repr, known)) or "nothing"
                raise DatasetError(
                    f"{shard}: the member {sample.key + '.json'!a} must have a value for {key!r}; it has {there}"
                )
            found[key] = known[key]
    return found


def _object_of(content: bytes, member: str) -> dict[str, Any]:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{member} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DatasetError(f"{member} must be a JSON object, got {shown(found)}")
    return found


def _array_of(shard: str, key: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise DatasetError(f"{shard}: the values of {key!r} cannot be one column: {said(error)}") from None
