"""Expands patterns of shard names and looks up the files."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import pyarrow.fs
from pyarrow.fs import FileType

from mbaas.dataset.storage.file_infos import file_infos
from mbaas.dataset.storage.location import IN_SHARD, Location, as_utf8, join, locate, without_secrets
from mbaas.errors import ConfigError, DatasetError

_MOST_SHARDS = 1_000_000
_BRACES = re.compile(r"(\{[^{}]*\})")
_RANGE = re.compile(r"(\d+)\.\.(\d+)")


def locate_shards(
    shards: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], filesystem: pyarrow.fs.FileSystem | None
) -> tuple[Location, list[str]]:
    """Return the folder that contains all shards, and their names below it.

    Args:
        shards: a local path or a URI; a pattern with braces for several shards, such as ``{000..127}.tar`` or
            ``{a,b}.tar``; or a list of paths and patterns.
        filesystem: file system of the shards; None: determined by the URI.

    Raises:
        ConfigError: no shards, too many, or an invalid pattern.
        DatasetError: several file systems, a duplicate shard, or an invalid name.
    """
    given = [shards] if isinstance(shards, (str, os.PathLike)) else shards
    texts = [text for each in given for text in _expanded(os.fspath(each))]
    if not texts:
        raise ConfigError("path must name at least one shard, got none", option="path")
    if filesystem is None:
        # Absolute, because names below the current folder may be mixed with others.
        texts = [text if "://" in text else os.path.abspath(os.path.expanduser(text)) for text in texts]  # noqa: PTH100, PTH111
    # In a URI, options of the file system follow a question mark.
    starts = [len(text.partition("?")[0]) if "://" in text else len(text) for text in texts]
    paths = [text[:at] for text, at in zip(texts, starts, strict=True)]
    options = {text[at:] for text, at in zip(texts, starts, strict=True)}
    common = os.path.commonprefix(paths)  # noqa: RUF071 (also URIs; cut at the last slash)
    folder = common[: common.rfind("/") + 1]
    if len(options) > 1 or folder.endswith("://") or any(("://" in text) != ("://" in folder) for text in texts):
        first, last = (without_secrets(text) if "://" in text else text for text in (min(texts), max(texts)))
        raise DatasetError(f"all shards must be in one file system, got {first} and {last}")
    where = locate(folder + options.pop(), filesystem)
    names = [path.removeprefix(folder) for path in paths]
    if isinstance(where.filesystem, pyarrow.fs.LocalFileSystem):
        names = [*map(as_utf8, names)]
    twice, times = Counter(names).most_common(1)[0]
    if times > 1:
        raise DatasetError(f"each shard must be named once, got {join(where.root, twice)} {times} times")
    if odd := next((name for name in names if IN_SHARD in name), None):
        raise DatasetError(f"the name of a shard must not have {IN_SHARD!r} in it, got {join(where.root, odd)}")
    return where, names


def look_up(where: Location, names: list[str]) -> list[list[Any]]:
    """Return name, size in bytes, and modification time in ns since 1970 (if known) of each shard.

    Raises:
        DatasetError: a shard does not exist or is not a regular file.
    """
    files = []
    for name, info in zip(names, file_infos(where, names), strict=True):
        if info.type != FileType.File or info.size is None:
            what = "is not there" if info.type == FileType.NotFound else "is no file"
            raise DatasetError(f"the shard {join(where.root, name)} {what}")
        files.append([name, info.size, info.mtime_ns])
    return files


def _expanded(pattern: str) -> Iterator[str]:
    # Like a shell, but without nested braces.
    *parts, rest = _BRACES.split(pattern)
    texts, choices = [*parts[::2], rest], [_choices(pattern, part[1:-1]) for part in parts[1::2]]
    count = 1
    for each in choices:
        count *= len(each)
    if count > _MOST_SHARDS:
        raise ConfigError(f"a pattern must name at most {_MOST_SHARDS:,} shards, got {pattern!r}", option="path")
    for chosen in product(*choices):
        yield texts[0] + "".join(part + text for part, text in zip(map(str, chosen), texts[1:], strict=True))


def _choices(pattern: str, inside: str) -> Sequence[str]:
    if bounds := _RANGE.fullmatch(inside):
        first, last = bounds.groups()
        width = max(len(first), len(last)) if re.match("0.", first) or re.match("0.", last) else 0
        count = abs(int(last) - int(first)) + 1
        if count > _MOST_SHARDS:
            raise ConfigError(f"a pattern must name at most {_MOST_SHARDS:,} shards, got {pattern!r}", option="path")
        step = 1 if int(last) >= int(first) else -1
        return [f"{number:0{width}}" for number in range(int(first), int(last) + step, step)]
    if "," in inside:
        return inside.split(",")
    wanted = "braces must hold a range such as {000..127} or a list such as {a,b}"
    raise ConfigError(f"{wanted}, got {{{inside}}} in {pattern!r}", option="path")
