"""A bounded look at a folder: its tree of names, and the beginnings of a few files of each kind."""

from __future__ import annotations

import io
import json
import os
import re
import stat
import tarfile
import zipfile
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from mbaas.dataset import ARRAY_EXTENSIONS, AUDIO_EXTENSIONS, IMAGE_EXTENSIONS
from mbaas.errors import DatasetError

MOST_FOLDERS, MOST_ENTRIES = 2000, 200
"""Folders that are listed, and entries of each. They bound the time on a tree of millions of files.

Shards have no such limit, because a feed file names all of them."""

MOST_DEPTH = 6
"""Levels of folders below the first one."""

PEEKS = 8
"""Files of each kind and folder whose beginning is read, spread over the names."""

HEAD_BYTES = 1 << 20
"""Bytes that are read of a text table, and at a time of a JSON file."""

SNIFFED_BYTES = 64 << 20
"""Bytes of a JSON file that are searched for COCO keys. Larger images and JSON arrays are not read."""

MOST_MEMBERS = 1000
"""Members of a tar file that are listed to find its first sample."""

ROWS = 200
"""Rows of a table that are looked at."""


@dataclass(frozen=True)
class Tree:
    """A folder, with paths relative to it, separated by /.

    Attributes:
        files: files by folder, "" for the folder itself; sorted, and at most `MOST_ENTRIES` of each besides shards.
        is_whole: whether all entries were listed.
        has_all_folders: whether all folders were listed, and therefore all shards.
        unreadable: folders that may not be listed.
    """

    files: dict[str, tuple[str, ...]]
    is_whole: bool = True
    unreadable: tuple[str, ...] = ()
    has_all_folders: bool = True

    def below(self, folder: str) -> Tree:
        """Return the tree of a folder, with paths relative to it."""
        start = f"{folder}/"
        inner = {"": self.files.get(folder, ())}
        inner |= {name.removeprefix(start): files for name, files in self.files.items() if name.startswith(start)}
        return Tree(
            {name: tuple(each.removeprefix(start) for each in files) for name, files in inner.items()},
            self.is_whole,
            has_all_folders=self.has_all_folders,
        )

    @property
    def folders(self) -> list[str]:
        """The folders directly below, sorted."""
        return sorted({name.partition("/")[0] for name in self.files if name})

    @property
    def all_files(self) -> list[str]:
        """The listed files at any depth, sorted by folder."""
        return [file for folder in sorted(self.files) for file in self.files[folder]]

    def within(self, folder: str) -> list[str]:
        """Return the listed files of a folder directly below, at any depth."""
        start = f"{folder}/"
        return [file for name in sorted(self.files) if f"{name}/".startswith(start) for file in self.files[name]]


@dataclass(frozen=True)
class Peek:
    """The beginning of a file.

    Attributes:
        kind: "image", "audio", "array", "table", "parquet", "coco", "tar", "tfrecord", "huggingface" or "splits".
        size: width and height of an image, in pixels.
        rate, seconds: of sound; 0 if soundfile is not installed.
        arrays: name ("" in npy files) -> dtype and shape.
        columns: column of a table -> some of its values; of a Parquet file or a record also bytes.
        members: endings of the files of the first sample of a tar file.
        splits: names of the parts of a saved dataset.
        features: column -> type of a saved dataset, as written by Hugging Face datasets.
        roots: column of a table or of COCO annotations that names files -> the folder below which they are, relative to
            the folder that is looked at; "://" if the names are absolute or URIs.
    """

    kind: str
    size: tuple[int, int] | None = None
    rate: int = 0
    seconds: float = 0.0
    arrays: dict[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    columns: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    members: tuple[str, ...] = ()
    splits: tuple[str, ...] = ()
    features: dict[str, str] = field(default_factory=dict)
    roots: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Sight:
    """The known contents of a folder: its tree, and file -> peek."""

    tree: Tree
    peeks: dict[str, Peek]

    def below(self, folder: str) -> Sight:
        """Return the names and peeks of a folder, with paths relative to that folder, and nothing outside."""
        start = f"{folder}/"

        def moved(peek: Peek) -> Peek:
            roots = {column: root for column, root in peek.roots.items() if f"{root}/".startswith((start, "://"))}
            return replace(
                peek, roots={column: root[len(start) :] if root != "://" else root for column, root in roots.items()}
            )

        peeks = {name.removeprefix(start): moved(peek) for name, peek in self.peeks.items() if name.startswith(start)}
        return Sight(self.tree.below(folder), peeks)


def look_at(folder: Path) -> Sight:
    """Look at a folder.

    Raises:
        DatasetError: it does not exist, is not a folder, or may not be listed.
    """
    try:
        is_folder = stat.S_ISDIR(folder.stat().st_mode)
    except OSError as error:
        why = "does not exist" if isinstance(error, FileNotFoundError) else f"cannot be opened: {error.strerror}"
        raise DatasetError(f"{folder} {why}") from None
    if not is_folder:
        raise DatasetError(f"{folder} is a file; name its folder")
    tree = _tree_of(folder)
    if tree.unreadable == ("",):
        raise DatasetError(f"{folder} may not be listed: permission denied")
    peeks = {}
    for name in _to_peek(tree):
        with suppress(Exception):  # any: each format has errors of its own for damaged files
            peek = _peek(folder / name)
            if peek is not None:
                peeks[name] = replace(peek, roots=_roots(folder, name, peek, tree))
    return Sight(tree, peeks)


def _tree_of(top: Path) -> Tree:
    files: dict[str, tuple[str, ...]] = {}
    ahead, is_whole, has_all_folders, unreadable = [("", 0)], True, True, []
    for folder, depth in ahead:  # level by level, so that all classes are seen before any is searched
        entries: list[os.DirEntry[str]] = []
        is_media = True
        try:
            with os.scandir(top / folder) as found:
                for entry in found:
                    if len(entries) >= MOST_ENTRIES and not (
                        is_shard(entry.name) or (entry.is_dir() and len(ahead) < MOST_FOLDERS)
                    ):
                        is_whole = False
                        has_all_folders = has_all_folders and not entry.is_dir()
                        if is_media:
                            break  # files that are one sample each: no shards are among them
                        continue
                    if not entry.name.startswith("."):
                        entries.append(entry)
                        is_media = is_media and ending(entry.name) in MEDIA
        except PermissionError:
            unreadable.append(folder)
            continue
        except OSError:
            continue
        names = sorted(entries, key=lambda entry: entry.name)
        path = {entry.name: f"{folder}/{entry.name}".lstrip("/") for entry in names}
        files[folder] = tuple(path[entry.name] for entry in names if entry.is_file())
        for entry in names:
            if not entry.is_dir():
                continue
            if len(ahead) < MOST_FOLDERS and depth < MOST_DEPTH:
                ahead.append((path[entry.name], depth + 1))
            else:
                is_whole = has_all_folders = False
    return Tree(files, is_whole, tuple(unreadable), has_all_folders and not unreadable)


def _to_peek(tree: Tree) -> list[str]:
    """Return files to peek at: some of each ending in each top folder, so that train and val are both known.

    Of shards, some of each set, whose names differ in numbers.
    """
    groups: dict[tuple[str, str, str], list[str]] = {}
    for file in tree.all_files:
        top = file.split("/")[0] if "/" in file else ""
        kind = ending(file)
        name = numberless(name) if is_shard(name := file.rpartition("/")[2]) else ""
        groups.setdefault((top, numberless(kind) if name else kind, name), []).append(file)
    found: list[str] = []
    media = 0
    names: Counter[tuple[str, str]] = Counter()
    for (top, kind, _), files in groups.items():
        names[top, kind] += 1
        if kind in MEDIA:  # a thousand class folders need not all be looked into
            media += 1
            files = files[:: max(1, len(files) // PEEKS)][: PEEKS if media <= PEEKS else 1]
            files = files if media <= 8 * PEEKS else []
        elif names[top, kind] > 8 * PEEKS:
            continue
        else:
            files = files[:PEEKS] + files[-1:]
        found += files
    return list(dict.fromkeys(found))


def ending(file: str) -> str:
    """Return the ending of a name, in lower case with its dot."""
    return os.path.splitext(file)[1].lower()  # noqa: PTH122 (names, not paths)


def numberless(file: str) -> str:
    """Return a name with # for each number, which is the same for all shards of a set."""
    return re.sub(r"\d+", "#", file)


def is_shard(name: str) -> bool:
    """Return whether a file of this name may be one of many that a pattern names together."""
    kind = ending(name)
    return kind in (".tar", ".parquet") or (kind not in (*MEDIA, *TABLES) and _may_be_records(name))


def _may_be_records(name: str) -> bool:
    return "tfrecord" in name or "-of-" in name


MEDIA = {
    **dict.fromkeys(IMAGE_EXTENSIONS, "image"),
    **dict.fromkeys(AUDIO_EXTENSIONS, "audio"),
    **dict.fromkeys(ARRAY_EXTENSIONS, "array"),
}
"""Ending -> kind of a file that is one sample."""

TABLES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet")


def _peek(file: Path) -> Peek | None:
    if file.name == "dataset_dict.json":
        return Peek("splits", splits=tuple(_json(file).get("splits", ())))
    if file.name == "dataset_info.json" and (file.parent / "state.json").is_file():
        return Peek("huggingface", features=_features(_json(file).get("features") or {}))
    kind = ending(file.name)
    if kind in MEDIA:
        return {"image": _image, "audio": _audio, "array": _array}[MEDIA[kind]](file)
    if kind == ".tar":
        return _tar(file)
    if kind == ".json" and (found := _coco(file)) is not None:
        return found
    if kind == ".parquet":
        return _parquet(file)
    if kind in TABLES:
        return _table(file)
    if _may_be_records(file.name):
        return _tfrecord(file)
    return None


def _roots(top: Path, table: str, peek: Peek, tree: Tree) -> dict[str, str]:
    """Return the folder of the files that each column names, if it names files."""
    if peek.kind not in ("table", "parquet", "coco"):
        return {}
    own = table.rpartition("/")[0]
    folders = [own, *(folder for folder in sorted(tree.files, key=lambda each: each.count("/")) if folder != own)]
    found = {}
    for column, values in peek.columns.items():
        names = [value for value in values if isinstance(value, str)][:PEEKS]
        if not names or not all(ending(name) in MEDIA for name in names):
            continue
        if any("://" in name or name.startswith("/") for name in names):
            found[column] = "://"
            continue
        for folder in folders[:MOST_FOLDERS]:
            if any((top / folder / name).is_file() for name in names):
                found[column] = folder
                break
    return found


def _json(file: Path) -> dict[str, Any]:
    found = json.loads(file.read_text())
    return found if isinstance(found, dict) else {}


def _features(features: dict[str, Any]) -> dict[str, str]:
    return {name: str(each.get("_type", "")) if isinstance(each, dict) else "" for name, each in features.items()}


def _head(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(HEAD_BYTES)


def _image(file: Path) -> Peek:
    return Peek("image", size=image_size(file.read_bytes()) if file.stat().st_size < SNIFFED_BYTES else None)


def image_size(content: bytes) -> tuple[int, int] | None:
    """Return width and height of a complete image; None if it is not one."""
    from mbaas.prep.engines import DEFAULT_MAX_PIXELS
    from mbaas.prep.header import UndecodableError, peek

    try:
        height, width = peek(memoryview(content), DEFAULT_MAX_PIXELS).size
    except UndecodableError:
        return None
    return width, height


def _audio(file: Path) -> Peek:
    try:
        import soundfile
    except (ImportError, OSError):  # the library of the operating system may be missing
        return Peek("audio")
    try:
        info = soundfile.info(str(file))
    except RuntimeError:  # LibsndfileError
        return Peek("audio")
    return Peek("audio", rate=int(info.samplerate), seconds=float(info.duration))


def _array(file: Path) -> Peek:
    if ending(file.name) == ".npy":
        mapped = np.load(file, mmap_mode="r", allow_pickle=False)
        return Peek("array", arrays={"": (mapped.dtype.name, mapped.shape)})
    with zipfile.ZipFile(file) as archive:
        return Peek("array", arrays={name.removesuffix(".npy"): _npy(archive, name) for name in archive.namelist()})


def _npy(archive: zipfile.ZipFile, name: str) -> tuple[str, tuple[int, ...]]:
    """Read the dtype and shape of an array from its header, without its numbers."""
    with archive.open(name) as opened:
        version = np.lib.format.read_magic(opened)
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, _, dtype = read(opened)
    if dtype.hasobject:
        raise ValueError(f"{name} holds Python objects")
    return dtype.name, shape


def _tar(file: Path) -> Peek:
    endings: list[str] = []
    contents: dict[str, tuple[Any, ...]] = {}
    key: str | None = None
    with tarfile.open(file, "r:") as archive:
        for member in islice(archive, MOST_MEMBERS):
            folder, _, name = member.name.rpartition("/")
            start, _, rest = name.partition(".")
            if not member.isfile() or not rest:
                continue
            if key is not None and f"{folder}/{start}" != key:
                break
            key = f"{folder}/{start}"
            endings.append(rest.lower())
            if rest.lower() == "json" and member.size <= HEAD_BYTES:
                contents = _json_member(archive, member)
    return Peek("tar", members=tuple(endings), columns=contents)


def _json_member(archive: tarfile.TarFile, member: tarfile.TarInfo) -> dict[str, tuple[Any, ...]]:
    opened = archive.extractfile(member)
    try:
        found = json.loads(opened.read()) if opened is not None else {}
    except ValueError:
        return {}
    return {name: (value,) for name, value in found.items()} if isinstance(found, dict) else {}


def _coco(file: Path) -> Peek | None:
    with file.open("rb") as opened:
        found = b""
        seen: set[bytes] = set()
        for _ in range(SNIFFED_BYTES // HEAD_BYTES):
            part = opened.read(HEAD_BYTES)
            found = found[-64:] + part
            seen |= {key for key in (b'"images"', b'"annotations"', b'"keypoints"', b'"file_name"') if key in found}
            if not part or {b'"images"', b'"annotations"', b'"file_name"'} <= seen:
                break
        opened.seek(0)
        if opened.read(HEAD_BYTES).lstrip()[:1] != b"{" or not {b'"images"', b'"annotations"'} <= seen:
            return None
        opened.seek(0)
        head = opened.read(4 * HEAD_BYTES)
    names = [_string_after_key(part) for part in head.split(b'"file_name"')[1 : PEEKS + 1]]
    return Peek("coco", columns={"file_name": tuple(name for name in names if name)})


def _string_after_key(part: bytes) -> str:
    start = part.find(b'"')
    end = part.find(b'"', start + 1)
    try:
        return str(json.loads(part[start : end + 1])) if 0 <= start < end else ""
    except ValueError:
        return ""


def _table(file: Path) -> Peek | None:
    kind = ending(file.name)
    if kind in (".csv", ".tsv"):
        import csv

        text = _head(file).decode("utf-8-sig", errors="replace")
        lines = text.splitlines()[: ROWS + 1]
        rows = [*csv.DictReader(io.StringIO("\n".join(lines)), delimiter="\t" if kind == ".tsv" else ",")]
    else:
        rows = _json_rows(file)
    rows = [row for row in rows if isinstance(row, dict)]
    return Peek("table", columns=_by_column(rows)) if rows else None


def _json_rows(file: Path) -> list[Any]:
    head = _head(file)
    if ending(file.name) == ".json" and file.stat().st_size <= SNIFFED_BYTES:
        with suppress(ValueError):  # otherwise one object per line
            found = msgspec.json.decode(file.read_bytes())
            return found[:ROWS] if isinstance(found, list) else [found]
    if head.lstrip()[:1] == b"[":
        return []
    lines = head.splitlines()
    lines = lines[:-1] if len(head) == HEAD_BYTES else lines
    return [msgspec.json.decode(line) for line in lines[:ROWS] if line.strip()]


def _by_column(rows: Iterable[dict[Any, Any]]) -> dict[str, tuple[Any, ...]]:
    found: dict[str, list[Any]] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(name, str):
                found.setdefault(name, []).append(value)
    return {name: tuple(values) for name, values in found.items()}


def _parquet(file: Path) -> Peek:
    from pyarrow import parquet

    with parquet.ParquetFile(file) as opened:
        batch = next(opened.iter_batches(ROWS), None)
        rows = batch.slice(0, PEEKS).to_pylist() if batch is not None else []
        text = (
            {}
            if batch is None
            else {
                name: tuple(column.to_pylist())
                for name, column in zip(batch.schema.names, batch.columns, strict=True)
                if str(column.type) in ("string", "large_string")
            }
        )
    return Peek("parquet", columns=_by_column(rows) | text)


def _tfrecord(file: Path) -> Peek:
    from mbaas.dataset.readers.tfrecord import first_example

    with file.open("rb") as opened:
        found = first_example(opened, file.stat().st_size, str(file))
    return Peek("tfrecord", columns={name: tuple(values) for name, values in found.items()})
