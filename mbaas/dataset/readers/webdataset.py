"""Reads WebDataset shards: tar files whose members are located once, then read at random."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, BinaryIO

import pyarrow.fs

from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.shards import FoundSample, LeftOut, indexed_once
from mbaas.dataset.readers.tar_index import Member, TarSample, tar_samples
from mbaas.errors import ConfigError, DatasetError, shown

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Default image endings of `read_webdataset`: all formats that the engines decode."""

_CLS, _JSON = "cls", "json"
_CLS_COLUMN = ".cls"  # differs from any JSON key, which may be "cls"


def read_webdataset(
    path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    image_column: str | Sequence[str] = IMAGE_ENDINGS,
    label_column: str | None = _CLS,
    fields: Sequence[str] = (),
    filesystem: pyarrow.fs.FileSystem | None = None,
    listing: str | os.PathLike[str] | None = None,
) -> Dataset:
    """List the samples in WebDataset shards, without reading their images.

    A shard is an uncompressed tar file. The members of a sample are adjacent, and their names are equal up to the first
    dot of the base name: ``cat/001.jpg``, ``cat/001.cls``. All member headers are read once, together with the small
    members for labels and fields. Images are read later, in any order. Hard and symbolic links are resolved within the
    shard, and concatenated tar files are read as one. A warning names links to files outside the shard, and trailing
    bytes that are not a tar file. If a shard's size changes later, its samples are bad.

    Args:
        path: a local path, or a URI that `pyarrow.fs` opens; a pattern with braces for several shards, such as
            ``train-{000000..000127}.tar`` or ``{a,b}.tar``; or a list of both. All are in one file system.
        image_column: endings of image names without the first dot; case does not matter. Each sample has exactly one
            image. For audio and array pipelines, their endings, such as ``"flac"`` or ``"npy"``.
        label_column: ``cls`` for the member with this ending, an integer as text; otherwise a key of the JSON object in
            the member that ends in ``.json``. Distinct strings, sorted, become the classes (`Dataset.class_names`), and
            labels are int64 indices into them. None: minibatches have no ``label``.
        fields: further keys of the JSON object that become fields of minibatches, with values that `read_manifest`
            accepts.
        filesystem: file system of the shards, for credentials or file systems that a URI cannot express.
        listing: path or URI of a Parquet file that caches the result. It is written if it does not exist, or if the
            list of shards or the size or time of one changed. Otherwise it is read, which takes a second.

    Raises:
        ConfigError: an invalid pattern, ending or field.
        DatasetError: a shard does not exist, is compressed, truncated or damaged; or a sample has no image or several,
            or lacks a label or field. The message names the shard and the sample. Also if ``listing`` cannot be read or
            written, is damaged, or belongs to other shards or options.
    """
    wanted = _Wanted(_checked_endings(image_column), label_column, checked_fields(fields, "keys") or ())
    return indexed_once(
        path,
        filesystem,
        listing,
        writer="read_webdataset",
        asked={"image_column": wanted.images, "label_column": label_column, "fields": wanted.fields},
        label=_CLS_COLUMN if label_column == _CLS else label_column,
        fields=wanted.fields,
        columns=wanted.columns,
        find=partial(_samples_of, wanted=wanted),
    )


@dataclass(frozen=True)
class _Wanted:
    """The requested contents of each sample; see `read_webdataset`.

    Attributes:
        images: endings in lower case.
        label, fields: arguments of `read_webdataset`.
    """

    images: tuple[str, ...]
    label: str | None
    fields: tuple[str, ...]

    @property
    def keys(self) -> tuple[str, ...]:
        """Required keys of the JSON object, without duplicates."""
        label = [self.label] if self.label is not None and self.label != _CLS else []
        return tuple(dict.fromkeys([*label, *self.fields]))

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the values that `_values_of` returns."""
        return (*([_CLS_COLUMN] if self.label == _CLS else []), *self.keys)

    @property
    def members(self) -> tuple[str, ...]:
        """Endings of the members to read."""
        return (*([_CLS] if self.label == _CLS else []), *([_JSON] if self.keys else []))


def _checked_endings(image: str | Sequence[str]) -> tuple[str, ...]:
    endings = (image,) if isinstance(image, str) else tuple(image)
    if not endings:
        raise ConfigError("image_column must name at least one ending, such as 'jpg', got none", option="image_column")
    for ending in endings:
        if not isinstance(ending, str) or not ending or ending.startswith(".") or "/" in ending:
            message = f"image_column must have endings without their first dot, such as 'jpg', got {shown(ending)}"
            raise ConfigError(message, option="image_column")
    return tuple(ending.lower() for ending in endings)


def _samples_of(file: BinaryIO, nbytes: int, shard: str, wanted: _Wanted) -> Iterator[FoundSample | LeftOut]:
    for sample in tar_samples(file, nbytes, shard=shard, images=wanted.images, read=wanted.members):
        if isinstance(sample, LeftOut):
            yield sample
            continue
        image = _image_of(sample, shard, wanted.images)
        # A member name is bytes, which may not be valid text.
        member = image.name.encode(errors="surrogateescape").decode(errors="replace")
        yield FoundSample(member, image.offset, image.length, _values_of(sample, shard, wanted))


def _image_of(sample: TarSample, shard: str, images: tuple[str, ...]) -> Member:
    if len(sample.images) == 1:
        return sample.images[0]
    there = ", ".join(f".{ending}" for ending in sample.endings)
    has = f"has {len(sample.images) or 'no'} images instead of one"
    raise DatasetError(
        f"{shard}: the sample {sample.key!a} {has}: its members end in {there}, and images in "
        f"{', '.join(f'.{ending}' for ending in images)}; name others with image_column="
    )


def _values_of(sample: TarSample, shard: str, wanted: _Wanted) -> dict[str, Any]:
    for ending in wanted.members:
        if ending not in sample.contents:
            hint = "; label_column=None leaves labels out" if ending == _CLS else ""
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
