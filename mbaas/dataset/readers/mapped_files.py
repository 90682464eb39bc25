"""Maps addresses of this process to files: the position of a memory-mapped table's values on disk."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

_GONE = b" (deleted)"
"""Linux appends this to the path of a file that was deleted or replaced."""


@dataclass(frozen=True)
class Mapping:
    """Memory from address ``start`` to before ``end``, mapped from ``path`` at ``offset``."""

    start: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """The files mapped in this process at construction, without deleted or replaced ones."""

    def __init__(self) -> None:
        self._mappings = _mappings()
        self._starts = [mapping.start for mapping in self._mappings]

    def place(self, address: int, nbytes: int) -> tuple[str, int] | None:
        """Return the file and the offset in it of some memory; None if not mapped from one file."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        found = self._mappings[number]
        return (found.path, found.offset + address - found.start) if address + nbytes <= found.end else None


def _mappings() -> list[Mapping]:
    """Return the mappings of this process in ascending order of addresses."""
    found = []
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        # For example "7fae67bd4000-7fae67bfa000 r--p 00000000 fe:00 2557732    /data/train.arrow".
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if not path or not path[0].startswith(b"/") or path[0].endswith(_GONE):
            continue
        start, end = (int(address, 16) for address in span.split(b"-"))
        found.append(Mapping(start, end, int(offset, 16), os.fsdecode(path[0])))
    return sorted(found, key=lambda mapping: mapping.start)
