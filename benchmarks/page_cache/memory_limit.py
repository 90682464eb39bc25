"""A memory cgroup that limits one process and its page cache, on cgroup v1 or v2."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mbaas.errors import MbaasError

NAME = "mbaas-page-cache"


@dataclass(frozen=True)
class MemoryUse:
    """Memory of a cgroup in bytes.

    Attributes:
        file_bytes: page cache, the sum of both lists.
        active_bytes: part of the page cache in the active list.
        other_bytes: all other memory of the cgroup: anonymous memory of processes, and the kernel's for inodes and page
            tables.
    """

    file_bytes: int
    active_bytes: int
    other_bytes: int


class MemoryLimit:
    """A memory cgroup below `folder`, of version 1 or 2."""

    def __init__(self, folder: Path, *, version: int) -> None:
        self.folder = folder
        self._version = version

    def set(self, limit_bytes: int) -> None:
        (self.folder / ("memory.max" if self._version == 2 else "memory.limit_in_bytes")).write_text(str(limit_bytes))

    def add(self, pid: int) -> None:
        (self.folder / "cgroup.procs").write_text(str(pid))

    def use(self) -> MemoryUse:
        stat = {name: int(value) for name, value in map(str.split, self._read("memory.stat").splitlines())}
        # Shared memory counts as cache but is in the anonymous lists, so the lists of files are added up.
        file_bytes = stat["active_file"] + stat["inactive_file"]
        usage = int(self._read("memory.current" if self._version == 2 else "memory.usage_in_bytes"))
        return MemoryUse(file_bytes, stat["active_file"], usage - file_bytes)

    def _read(self, name: str) -> str:
        return (self.folder / name).read_text()


@contextlib.contextmanager
def memory_limit() -> Iterator[MemoryLimit]:
    """Create a memory cgroup without a limit; remove it, once its processes have ended, at exit.

    Raises MbaasError if no memory cgroup can be written.
    """
    failures = []
    for parent, version in parents(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()):
        folder = parent / f"{NAME}-{os.getpid()}"
        created = MemoryLimit(folder, version=version)
        try:
            folder.mkdir()
            created.set(2**50)
        except OSError as error:
            failures.append(f"{folder}: {error.strerror}")
            with contextlib.suppress(OSError):
                folder.rmdir()
            continue
        try:
            yield created
        finally:
            _remove(folder)
        return
    reasons = "; ".join(failures) or "no cgroups are mounted"
    raise MbaasError(f"this benchmark needs a memory cgroup that it may write, for instance as root: {reasons}")


def parents(mounts: str, cgroups: str) -> list[tuple[Path, int]]:
    """Return candidates for the parent of a new memory cgroup, and their cgroup version.

    The first ones are near the cgroup of this process, the last ones at the root.
    ``mounts`` and ``cgroups`` are the contents of /proc/self/mounts and /proc/self/cgroup.
    """
    paths = {}
    for line in cgroups.splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path.lstrip("/")))
    found: list[tuple[Path, int]] = []
    for line in mounts.splitlines():
        _, mount, kind, options, *_ = line.split()
        root = Path(mount)
        if kind == "cgroup" and "memory" in options.split(","):
            found += [(root / paths.get("memory", ""), 1), (root, 1)]
        elif kind == "cgroup2":
            # A cgroup with processes cannot have limited children, so the new one is next to the process's cgroup.
            path = paths.get("", "")
            found += [((root / path).parent, 2)] if path else []
            found.append((root, 2))
    return list(dict.fromkeys(found))


def _remove(folder: Path) -> None:
    # The processes of a cgroup leave it shortly after they were waited for.
    deadline = time.monotonic() + 10
    while True:
        try:
            folder.rmdir()
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.05)
        else:
            return
