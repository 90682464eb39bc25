"""Read samples with several threads, one epoch for each line of standard input; run as a script.

The script imports only the standard library, so the memory limit of its cgroup is left to the page cache. Its first
line of input is a `Task` in JSON. Each further line is the order of an epoch, a JSON list of samples. The answer is the
number of bytes that the kernel read from the disk.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Task:
    """Samples to read.

    Attributes:
        paths: file of each sample, or a single file with all samples.
        offsets, sizes: bytes of each sample in its file.
        is_random: advise the kernel that reads are random (POSIX_FADV_RANDOM), which turns its read-ahead off.
        threads: number of threads, which take the next sample of the order in turn, as workers of a DataLoader do.
    """

    paths: list[str]
    offsets: list[int]
    sizes: list[int]
    is_random: bool
    threads: int

    def read(self, order: Iterator[int]) -> None:
        """Read samples until the order ends. Each file is opened for each sample unless there is only one."""
        buffer = bytearray(max(self.sizes))
        packed = self._opened(self.paths[0]) if len(self.paths) == 1 else None
        for sample in order:
            file = self._opened(self.paths[sample]) if packed is None else packed
            size = self.sizes[sample]
            if os.preadv(file, [memoryview(buffer)[:size]], self.offsets[sample]) != size:
                raise OSError(f"sample {sample} has fewer than {size} bytes")
            if packed is None:
                os.close(file)
        if packed is not None:
            os.close(packed)

    def _opened(self, path: str) -> int:
        file = os.open(path, os.O_RDONLY)
        if self.is_random:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_RANDOM)
        return file


def disk_bytes() -> int:
    """Return the bytes that the block layer has read for this process."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"])


def main() -> None:
    task = Task(**json.loads(sys.stdin.readline()))
    with ThreadPoolExecutor(task.threads) as pool:
        for line in sys.stdin:
            # Iterators of lists may be shared by threads: each element is taken once.
            order = iter(json.loads(line))
            before = disk_bytes()
            for done in [pool.submit(task.read, order) for _ in range(task.threads)]:
                done.result()
            print(disk_bytes() - before, flush=True)


if __name__ == "__main__":
    main()
