"""Which file is mapped at an address of this process: where values of a memory-mapped table lie on disk."""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path

_GONE = b" (deleted)"
"""What Linux puts behind the path of a file that was removed or replaced."""


@dataclass(frozen=True)
class Mapping:
    """Memory that is a part of a file.

    Attributes:
        start, end: addresses, the second behind the last byte.
        offset: of its first byte in the file.
        path: of the file.
    """

    start: int
    end: int
    offset: int
    path: str


class MappedFiles:
    """The files that are mapped in this process now. A file that was removed or replaced since is none of them."""

    def __init__(self) -> None:
        self._mappings = _mappings()
        self._starts = [mapping.start for mapping in self._mappings]

    def place(self, address: int, nbytes: int) -> tuple[str, int] | None:
        """Tell in which file, and at which of its bytes, memory lies; None if it is no part of a file."""
        number = bisect_right(self._starts, address) - 1
        if number < 0:
            return None
        found = self._mappings[number]
        return (found.path, found.offset + address - found.start) if address + nbytes <= found.end else None


def _mappings() -> list[Mapping]:
    """Read what Linux says of this process, in the order of addresses."""
    found = []
    for line in Path("/proc/self/maps").read_bytes().splitlines():
        # Such as "7fae67bd4000-7fae67bfa000 r--p 00000000 fe:00 2557732    /data/train.arrow".
        span, _, offset, _, _, *path = line.split(maxsplit=5)
        if not path or not path[0].startswith(b"/") or path[0].endswith(_GONE):
            continue
        start, end = (int(address, 16) for address in span.split(b"-"))
        found.append(Mapping(start, end, int(offset, 16), os.fsdecode(path[0])))
    return sorted(found, key=lambda mapping: mapping.start)
