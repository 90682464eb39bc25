"""Reading WebDataset shards: tar files whose members are samples, found once and then read by their places."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.shard_index import FoundSample, LeftOut, checked_names, indexed_once
from mbaas.dataset.tar_index import Member, TarSample, tar_samples
from mbaas.errors import ConfigError, DatasetError, shown

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Endings of the members that `read_webdataset` takes for images unless told otherwise: what the engines decode."""

_CLS, _JSON = "cls", "json"
_CLS_COLUMN = ".cls"  # a JSON object may have a key "cls"


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
    Hard and symbolic links are read as the members that they lead to, and tar files that were concatenated as one. A
    warning names links to files outside the shard, and bytes after the end mark that are not a tar file.
    A shard that has another size by then is not the one that was read, and its samples are bad.

    Args:
        shards: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several, such as
            ``train-{000000..000127}.tar`` or ``{a,b}.tar``; or a list of these. All are in one file system.
        image: endings of the names of images, in any case, without the first dot; each sample has one of them. For
            pipelines of sound or arrays, endings of these, such as ``"flac"`` or ``"npy"``.
        label: ``cls`` for the member of this ending, the text of an integer; else a key of the JSON object in the
            member that ends in ``.json``. If its values are text, the distinct ones, sorted, are the classes
            (`Dataset.class_names`), and labels int64 indices into them. None: minibatches have no ``label``.
        fields: further keys of the JSON object, with numbers, or with lists or texts as `read_manifest` takes them;
            minibatches have them under these names.
        filesystem: where the shards are, for credentials or file systems that a URI cannot express.
        listing: a Parquet file, by its path or URI, in which is kept what was found: written if it is not there, or
            if the size or time of a shard, or the list of them, has changed since; else read, which takes a second.

    Raises:
        ConfigError: a pattern, an ending or a field that cannot be.
        DatasetError: a shard is not there, is compressed, cut off or damaged; a sample has no image, or two, or lacks a
            label or a field; names the shard and the sample. Or ``listing`` cannot be read or written, is damaged, or
            is of other shards or options.
    """
    wanted = _Wanted(_checked_endings(image), label, checked_names(fields, "keys"))
    return indexed_once(
        shards,
        filesystem,
        listing,
        writer="read_webdataset",
        asked={"image": wanted.images, "label": label, "fields": wanted.fields},
        label=_CLS_COLUMN if label == _CLS else label,
        fields=wanted.fields,
        columns=wanted.columns,
        find=partial(_samples_of, wanted=wanted),
    )


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


def _samples_of(file: BinaryIO, nbytes: int, shard: str, wanted: _Wanted) -> Iterator[FoundSample | LeftOut]:
    for sample in tar_samples(file, nbytes, shard=shard, images=wanted.images, read=wanted.members):
        if isinstance(sample, LeftOut):
            yield sample
            continue
        image = _image_of(sample, shard, wanted.images)
        # A name is bytes, which may be no text at all.
        member = image.name.encode(errors="surrogateescape").decode(errors="replace")
        yield FoundSample(member, image.offset, image.length, _values_of(sample, shard, wanted))


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
