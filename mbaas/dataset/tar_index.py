"""Finding the samples of a tar file by its headers, without reading what lies between them."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any, BinaryIO, NamedTuple

from mbaas.dataset.faults import said
from mbaas.errors import DatasetError

_NAME = re.compile(r"((?:.*/)?[^./]+)\.([^/]*)", re.DOTALL)
"""The name of a member: its sample, up to the first dot of the base name, and what it is of that sample. Hidden members
have no part before the dot."""

_ABOUT_SHARD = re.compile(r"__[^/]*__(/|$)")
"""Names of members that tell of the shard and belong to no sample, as webdataset has them."""

_COMPRESSED = {
    b"\x1f\x8b": "gzip",
    b"BZh": "bzip2",
    b"\xfd7zXZ\0": "xz",
    b"\x28\xb5\x2f\xfd": "zstd",
}
"""How a compressed file begins -> by what it was compressed."""


class Member(NamedTuple):
    """A file in a tar file: its name, and which bytes of the tar file are its own."""

    name: str
    offset: int
    length: int


@dataclass(frozen=True)
class TarSample:
    """The members of one sample, as far as they were asked for.

    Attributes:
        key: what the names of its members have in common.
        images: those that can be the image.
        contents: of others that were asked for, by the ending of the name, which is in lower case.
        endings: of all its members.
    """

    key: str
    images: list[Member] = field(default_factory=list)
    contents: dict[str, bytes] = field(default_factory=dict)
    endings: list[str] = field(default_factory=list)


def tar_samples(
    file: BinaryIO, nbytes: int, *, shard: str, images: Collection[str], read: Collection[str]
) -> Iterator[TarSample]:
    """Yield the samples of a tar file in order, with at most one member for each ending.

    A sample is a run of members whose names are the same up to the first dot of the base name, as in the Python package
    webdataset. Left out is what is no file, hidden, without an ending, or named `__like this__`.

    Args:
        file: at its beginning; it is read at the headers, and at the members to be read.
        nbytes: its size.
        shard: what messages call it.
        images: endings of members that are images, in lower case, without the dot.
        read: endings of members whose content is wanted.

    Raises:
        DatasetError: it is no plain tar file, it is cut off or damaged, or a sample has two members of one ending.
    """
    sample: TarSample | None = None
    for member in _files(file, nbytes, shard):
        named = _NAME.fullmatch(member.name)
        if named is None or _ABOUT_SHARD.match(member.name):
            continue
        key, ending = named[1], named[2].lower()
        if sample is None or key != sample.key:
            if sample is not None:
                yield sample
            sample = TarSample(key)
        if ending in sample.endings:
            raise DatasetError(f"{shard}: the sample {key!a} has two members that end in .{ending}")
        sample.endings.append(ending)
        if ending in images:
            sample.images.append(member)
        if ending in read:
            file.seek(member.offset)
            sample.contents[ending] = file.read(member.length)
    if sample is not None:
        yield sample


def _files(file: BinaryIO, nbytes: int, shard: str) -> Iterator[Member]:
    """Yield the regular files of a tar file, each of which is there as a whole."""
    start = file.read(6)
    file.seek(0)
    for signature, how in _COMPRESSED.items():
        if start.startswith(signature):
            wanted = "must be a plain tar file, of which single members can be read: decompress it"
            raise DatasetError(f"{shard} is compressed by {how}, but {wanted}")
    try:
        tar: Any = tarfile.TarFile(fileobj=file)
        at = 0
        while (found := tar.next()) is not None:
            tar.members = []  # which it would keep
            if found.size < 0 or not at < tar.offset <= nbytes:
                what = f"the member {found.name!a} at byte {found.offset:,} would end at byte {tar.offset:,}"
                raise DatasetError(f"{shard} is cut off or damaged: {what}, and the file has {nbytes:,} bytes")
            at = tar.offset
            if found.issparse():
                raise DatasetError(f"{shard}: the member {found.name!a} is stored without its holes (a sparse file)")
            if found.isreg():
                yield Member(found.name, found.offset_data, found.size)
    except (DatasetError, OSError):
        raise
    except Exception as error:  # beside its own, tarfile raises a number of others for headers that make no sense
        raise DatasetError(f"{shard} is no tar file, or it is damaged: {said(error)}") from error
    # tarfile also ends at a header that makes no sense, as those who extract files by hand want it.
    file.seek(tar.offset)
    block = file.read(tarfile.BLOCKSIZE)
    if block != bytes(tarfile.BLOCKSIZE):
        there = "no header of a member" if block else "nothing"
        raise DatasetError(
            f"{shard} is cut off or damaged: at byte {tar.offset:,}, where a member or the mark of the end must be, is "
            f"{there}"
        )
