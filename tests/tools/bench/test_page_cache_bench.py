"""The benchmark of the page cache: its memory cgroup, its reader and its table."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.page_cache import memory_limit as limits
from benchmarks.page_cache.measure import PageCacheFigures, PageCacheRun, figures, measure, table
from benchmarks.page_cache.reader import Task
from mbaas.errors import MbaasError

V1 = """\
tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
"""
V2 = "cgroup2 /sys/fs/cgroup cgroup2 rw,nosuid 0 0\n"


def can_limit_memory() -> bool:
    try:
        with limits.memory_limit():
            return True
    except (MbaasError, OSError):
        return False


@pytest.mark.parametrize(
    ("mounts", "cgroups", "expected"),
    [
        (V1, "4:memory:/box/7\n1:cpu:/\n0::/\n", [("/sys/fs/cgroup/memory/box/7", 1), ("/sys/fs/cgroup/memory", 1)]),
        (V1, "4:memory:/\n", [("/sys/fs/cgroup/memory", 1)]),
        (V2, "0::/user/shell\n", [("/sys/fs/cgroup/user", 2), ("/sys/fs/cgroup", 2)]),
        (V2, "0::/\n", [("/sys/fs/cgroup", 2)]),
        ("tmpfs / tmpfs rw 0 0\n", "", []),
    ],
)
def test_folders_for_a_cgroup(mounts: str, cgroups: str, expected: list[tuple[str, int]]) -> None:
    assert limits.parents(mounts, cgroups) == [(Path(folder), version) for folder, version in expected]


@pytest.mark.parametrize("version", [1, 2])
def test_memory_of_a_cgroup(tmp_path: Path, version: int) -> None:
    """Shared memory is part of `cache`, but not of the lists of files."""
    usage = "memory.current" if version == 2 else "memory.usage_in_bytes"
    (tmp_path / usage).write_text("1000\n")
    (tmp_path / "memory.stat").write_text("cache 700\nactive_file 200\ninactive_file 400\n")
    assert limits.MemoryLimit(tmp_path, version=version).use() == limits.MemoryUse(600, 200, 400)


def test_without_a_writable_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that does not exist cannot hold a cgroup."""
    monkeypatch.setattr(limits, "parents", lambda *_: [(tmp_path / "none", 1)])
    with pytest.raises(MbaasError, match=r"needs a memory cgroup that it may write.*none/mbaas-page-cache.*No such"):
        measure(samples=1, shares=[1], threads=[1], trials=[1], epochs=4, folder=tmp_path, seed=0, tell=print)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("is_packed", [False, True])
def test_reader_takes_each_sample_of_the_order_once(tmp_path: Path, is_packed: bool) -> None:
    sizes, offsets = [3, 5, 4], [0, 3, 8] if is_packed else [0, 0, 0]
    paths = [tmp_path / str(number) for number in range(1 if is_packed else 3)]
    for path, nbytes in zip(paths, [12] if is_packed else sizes, strict=True):
        path.write_bytes(bytes(nbytes))
    task = Task([str(path) for path in paths], offsets, sizes, is_random=is_packed, threads=1)
    order: Iterator[int] = iter([2, 0, 1, 1])
    task.read(order)
    assert next(order, None) is None
    paths[-1].write_bytes(bytes(2))
    with pytest.raises(OSError, match="sample 2 has fewer than 4 bytes"):
        task.read(iter([2]))


@pytest.mark.slow
@pytest.mark.skipif(not can_limit_memory(), reason="no memory cgroup can be written")
def test_measuring_a_small_dataset(tmp_path: Path) -> None:
    """Half of 100 samples, 11 MB, is cached. Fewer reads hit, and the model is near the measurement."""
    told: list[str] = []
    found = measure(
        samples=100, shares=[0.5], threads=[2], trials=[1, 2], epochs=7, folder=tmp_path, seed=3, tell=told.append
    )
    assert [(run.layout, run.trials) for run in found.runs] == [
        ("files", 1),
        ("files", 2),
        ("packed", 1),
        ("packed_random", 1),
    ]
    assert told[0] == "files, 2 threads, 1 trial, 50 % cached"
    for run in found.runs:
        assert run.cached_share == pytest.approx(0.5, abs=0.06)
        if run.layout != "packed":
            assert run.mean_hits < run.cached_share
            assert run.mean_hits == pytest.approx(run.mean_model_hits, abs=0.12)
    assert not any(tmp_path.iterdir())


def test_table_and_figures() -> None:
    run = PageCacheRun("files", 4, 1, 0.5, 300, 8, 0.5, 0.2, [0, 0.1, 0.2, 0.2, 0.3], [0, 0.15, 0.2, 0.22, 0.24])
    found = PageCacheFigures("6.18", 128, 4000, 440_000_000, [run])
    out = io.StringIO()
    Console(file=out, width=80).print(table(found))
    assert "read-ahead 128 KiB" in out.getvalue()
    assert "25 %  20 to 30   23 %     22 %" in out.getvalue()
    plain = figures(found)
    assert plain["runs"][0]["mean_hits"] == pytest.approx(0.25)
    assert plain["runs"][0]["formula_hits"] == pytest.approx(0.2227, abs=1e-4)


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="cgroups are of Linux")
