"""Reads WebDataset shards: tar files whose members are located once, then read at random."""

from __future__ import annotations

import json
import os
import posixpath
import re
import tarfile
from collections.abc import Collection, Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, BinaryIO, NamedTuple

import pyarrow.fs

from mbaas.base.validation import knows_names
from mbaas.dataset.base import Dataset
from mbaas.dataset.readers.columns import checked_fields
from mbaas.dataset.readers.listing import Omission, ShardSample, indexed_once
from mbaas.dataset.storage.faults import message_of
from mbaas.errors import ConfigError, DatasetError, shown

IMAGE_ENDINGS = ("jpg", "jpeg", "png", "webp")
"""Default image endings of `read_webdataset`: all formats that the engines decode."""

_CLS, _JSON = "cls", "json"
_CLS_COLUMN = ".cls"  # differs from any JSON key, which may be "cls"


@knows_names
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
    images, known = _checked_endings(image_column), checked_fields(fields, "keys") or ()
    has_cls = label_column == _CLS
    keys = tuple(dict.fromkeys([*([] if has_cls or label_column is None else [label_column]), *known]))
    return indexed_once(
        path,
        filesystem,
        listing,
        writer="read_webdataset",
        options={"image_column": images, "label_column": label_column, "fields": known},
        label=_CLS_COLUMN if has_cls else label_column,
        fields=known,
        columns=(*([_CLS_COLUMN] if has_cls else []), *keys),
        find=partial(_samples_of, images=images, has_cls=has_cls, keys=keys),
    )


def _checked_endings(image: str | Sequence[str]) -> tuple[str, ...]:
    endings = (image,) if isinstance(image, str) else tuple(image)
    if not endings:
        raise ConfigError("image_column must name at least one ending, such as 'jpg', got none", option="image_column")
    for ending in endings:
        if not isinstance(ending, str) or not ending or ending.startswith(".") or "/" in ending:
            message = f"image_column must have endings without their first dot, such as 'jpg', got {shown(ending)}"
            raise ConfigError(message, option="image_column")
    return tuple(ending.lower() for ending in endings)


def _samples_of(
    file: BinaryIO, nbytes: int, shard: str, images: tuple[str, ...], has_cls: bool, keys: tuple[str, ...]
) -> Iterator[ShardSample | Omission]:
    """Yield samples with the label of the member .cls if ``has_cls``, and the values of ``keys`` of the JSON object."""
    read = (*([_CLS] if has_cls else []), *([_JSON] if keys else []))
    for sample in tar_samples(file, nbytes, shard=shard, images=images, read=read):
        if isinstance(sample, Omission):
            yield sample
            continue
        if len(sample.images) != 1:
            raise DatasetError(
                f"{shard}: the sample {sample.key!a} has {len(sample.images) or 'no'} images instead of one: its "
                f"members end in {_dotted(sample.endings)}, and images in {_dotted(images)}; "
                "name others with image_column="
            )
        for ending in read:
            if ending not in sample.contents:
                hint = "; label_column=None leaves labels out" if ending == _CLS else ""
                raise DatasetError(f"{shard}: the sample {sample.key!a} has no member that ends in .{ending}{hint}")
        values = {_CLS_COLUMN: _number_in(sample, shard)} if has_cls else {}
        values |= _values_of(sample, shard, keys) if keys else {}
        image = sample.images[0]
        # A member name is bytes, which may not be valid text.
        member = image.name.encode(errors="surrogateescape").decode(errors="replace")
        yield ShardSample(member, image.offset, image.length, values)


def _dotted(endings: Iterable[str]) -> str:
    return ", ".join(f".{ending}" for ending in endings)


def _number_in(sample: TarSample, shard: str) -> int:
    text = sample.contents[_CLS]
    try:
        return int(text)
    except ValueError:
        raise DatasetError(
            f"{shard}: the label in {sample.key + '.cls'!a} must be the text of an integer, got {shown(text)}"
        ) from None


def _values_of(sample: TarSample, shard: str, keys: tuple[str, ...]) -> dict[str, Any]:
    member = f"{shard}: the member {sample.key + '.json'!a}"
    try:
        found = json.loads(sample.contents[_JSON])
    except (ValueError, RecursionError) as error:
        raise DatasetError(f"{member} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise DatasetError(f"{member} must be a JSON object, got {shown(found)}")
    for key in keys:
        if found.get(key) is None:
            raise DatasetError(
                f"{member} must have a value for {key!r}; it has {', '.join(map(repr, found)) or 'nothing'}"
            )
    return {key: found[key] for key in keys}


# ---- tar files ----

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""A member's name: its sample, up to the first dot of the base name, and its ending. Hidden members do not match."""

_ABOUT_SHARD = re.compile(r"__[^/]*__(/|$)")
"""Members with metadata of the shard, which belong to no sample, as in webdataset."""

_COMPRESSED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""First bytes of a compressed file -> format."""

_ENCODING, _ERRORS = "utf-8", "surrogateescape"
_CONTINUED = b"M"  # GNU tar type: rest of a member from another volume
_MOST_LINKS = 40  # followed in sequence, as in Linux; a cycle of links leads to no file


class Member(NamedTuple):
    """A file in a tar file: its name, and its bytes within the tar file."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class TarSample:
    """The requested members of one sample.

    Attributes:
        key: common part of its members' names.
        images: members with an image ending.
        contents: lower-case ending -> contents of the other requested members.
        endings: endings of all its members.
    """

    key: str
    images: list[Member] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)


def tar_samples(
    file: BinaryIO, nbytes: int, *, shard: str, images: Collection[str], read: Collection[str]
) -> Iterator[TarSample | Omission]:
    """Yield the samples of a tar file in order, with at most one member per ending.

    A sample is a run of members whose names are equal up to the first dot of the base name, as in the Python package
    webdataset. Hidden members, directories, devices, members without an ending, and names `__like this__` are skipped.
    A hard or symbolic link has the contents of its target. Concatenated tar files are all read, as by `tar
    --ignore-zeros`.

    Args:
        file, nbytes, shard: the file at its start, its size, and its name in messages.
        images: lower-case endings of images, without the dot.
        read: endings of members whose contents are requested.

    Raises:
        DatasetError: not a plain tar file, a truncated or damaged one, a sample with two members of one ending, or a
            requested member that is sparse or continues in another volume.
    """
    headers = _Headers(file, nbytes, shard)
    sample: TarSample | None = None
    for member in headers:
        if isinstance(member, Omission):
            yield member
            continue
        if member is None:  # a sample does not continue in the next archive
            if sample is not None:
                yield sample
            sample = None
            continue
        named = _NAME.fullmatch(member.name)
        if named is None or _ABOUT_SHARD.match(member.name):
            continue
        key, ending = named[1], named[2].lower()
        target: tarfile.TarInfo | None = member
        if member.islnk() or member.issym():
            if ending not in images and ending not in read:
                continue
            target = headers.target(member)
        if target is None:
            reason = f"is a link to {member.linkname!a}, which is not in the shard"
            yield Omission(f"{shard}: the member {member.name!a} {reason}")
            continue
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = TarSample(key)
        if ending in sample.endings:
            raise DatasetError(f"{shard}: the sample {key!a} has two members that end in .{ending}")
        sample.endings.append(ending)
        if target.issparse() and (ending in images or ending in read):
            raise DatasetError(f"{shard}: the member {target.name!a} is stored without its holes (a sparse file)")
        if ending in images:
            sample.images.append(Member(member.name, target.offset_data, target.size))
        if ending in read:
            file.seek(target.offset_data)
            sample.contents[ending] = file.read(target.size)


class _Headers:
    """Iterates over files and links, with None at the end of each concatenated archive.

    Raises DatasetError if the tar file is compressed, truncated or damaged.
    """

    def __init__(self, file: BinaryIO, nbytes: int, shard: str) -> None:
        self._file, self._nbytes, self._shard = file, nbytes, shard

    def __iter__(self) -> Iterator[tarfile.TarInfo | Omission | None]:
        self._file.seek(0)
        begins = self._file.read(6)
        if how := next((how for signature, how in _COMPRESSED.items() if begins.startswith(signature)), None):
            wanted = "must be a plain tar file, so that single members can be read: decompress it"
            raise DatasetError(f"{self._shard} is compressed by {how}, but {wanted}")
        start = 0
        while True:
            end = yield from self._of_archive(start)
            yield None
            if (following := self._next_archive(end)) is None:
                return
            start = following
            self._file.seek(start)
            try:
                tarfile.TarInfo.frombuf(self._file.read(tarfile.BLOCKSIZE), _ENCODING, _ERRORS)
            except tarfile.HeaderError:
                what = "which is neither zeros nor another tar file"
                yield Omission(f"{self._shard}: all after the end mark, from byte {start:,} on, {what}")
                return

    def target(self, link: tarfile.TarInfo) -> tarfile.TarInfo | None:
        # Like `tarfile`: a hard link leads to the last earlier member with its target name, because names may
        # repeat. A symbolic link leads to the last such member of all. None if the target is not in the tar file.
        for _ in range(_MOST_LINKS):
            name, before = link.linkname, link.offset
            if link.issym():
                name, before = posixpath.join(posixpath.dirname(link.name), name), self._nbytes
            found = [info for info in self._by_name.get(posixpath.normpath(name), ()) if info.offset < before]
            if not found:
                return None
            link = found[-1]
            if link.isreg():
                return link
        return None

    @cached_property
    def _by_name(self) -> dict[str, list[tarfile.TarInfo]]:
        # Only needed for a shard with links, because they may lead to later members.
        found: dict[str, list[tarfile.TarInfo]] = {}
        for info in self:
            if isinstance(info, tarfile.TarInfo):
                found.setdefault(posixpath.normpath(info.name), []).append(info)
        return found

    def _of_archive(self, start: int) -> Generator[tarfile.TarInfo, None, int]:
        """Yield the members of one archive; return the position of its end mark."""
        shard, nbytes = self._shard, self._nbytes
        try:
            self._file.seek(start)
            # the same names in every locale
            tar: Any = tarfile.TarFile(fileobj=self._file, encoding=_ENCODING, errors=_ERRORS)
            at = start
            # Without any member, Python 3.10 would seek to a negative position.
            for found in () if tar.firstmember is None else iter(tar.next, None):
                tar.members = []  # it would keep all members
                if found.size < 0 or not at < tar.offset <= nbytes:
                    what = f"the member {found.name!a} at byte {found.offset:,} would end at byte {tar.offset:,}"
                    raise DatasetError(f"{shard} is cut off or damaged: {what}, and the file has {nbytes:,} bytes")
                at = tar.offset
                if found.type == _CONTINUED:
                    raise DatasetError(f"{shard}: the member {found.name!a} begins in another volume of the tar file")
                if found.isreg() or found.islnk() or found.issym():
                    yield found
        except (DatasetError, OSError):
            raise
        except Exception as error:  # invalid headers also raise exceptions other than tarfile's
            raise DatasetError(f"{shard} is not a tar file, or it is damaged: {message_of(error)}") from error
        # tarfile also ends at an invalid header, without an error.
        self._file.seek(tar.offset)
        block = self._file.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            there = "no header of a member" if block else "nothing"
            where = f"at byte {tar.offset:,}, where a member or the mark of the end must be"
            raise DatasetError(f"{shard} is cut off or damaged: {where}, is {there}")
        end: int = tar.offset
        return end

    def _next_archive(self, end: int) -> int | None:
        """Return the position of the next block that is not all zeros; None at the end of the file."""
        self._file.seek(end)
        at = end
        while block := self._file.read(tarfile.RECORDSIZE):
            if rest := block.lstrip(b"\0"):
                return at + (len(block) - len(rest)) // tarfile.BLOCKSIZE * tarfile.BLOCKSIZE
            at += len(block)
        return None
