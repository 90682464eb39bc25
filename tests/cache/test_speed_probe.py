"""A node measures rates before it decides where to keep bytes."""

from __future__ import annotations

import subprocess
import threading
import time
from pathlib import Path

import pytest

from mbaas.cache import tuner
from mbaas.cache.tuner import probe_disk
from mbaas.errors import ConfigError
from mbaas.tools.analysis.measuring.storage import Span, resident_share

PIECE = 4 << 20


def test_memory_and_disk_are_tried_out_and_the_disk_is_left_empty(tmp_path: Path) -> None:
    began = time.monotonic()
    memory, disk = tuner._memory(), probe_disk(tmp_path / "tier", disk_bytes=2 * PIECE, threads=3)
    assert time.monotonic() - began < 5
    assert memory > 1e8
    assert disk is not None
    assert disk > 1e5
    assert list((tmp_path / "tier").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mbaas-measure")]


def test_without_room_for_a_piece_stored_samples_are_read_and_without_these_nothing_is_known(tmp_path: Path) -> None:
    assert probe_disk(tmp_path, disk_bytes=PIECE - 1, threads=3) is None
    (tmp_path / "print").mkdir()
    segment = tmp_path / "print" / "segment-000001.bin"
    segment.write_bytes(bytes(PIECE - 1))
    assert probe_disk(tmp_path, disk_bytes=PIECE - 1, threads=3) is None
    content = b"sample" * (PIECE // 6 + 1)
    segment.write_bytes(content)
    rate = probe_disk(tmp_path, disk_bytes=PIECE - 1, threads=3)
    assert rate is not None
    assert rate > 1e5
    assert segment.read_bytes() == content


@pytest.mark.parametrize("threads", [1, 4])
def test_a_slow_disk_is_found_slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int) -> None:
    """A read of 128 KiB takes at least 20 ms in each thread: at most 6.6 MB/s per thread, for any number of threads.

    A sleep takes longer on a busy machine, so the rate is compared with the reads as they were. Between reads, threads
    may also wait for a core, so the best of five probes counts.
    """
    pread, reads, took_s, ratios = tuner.os.pread, [], [], []

    def slow(file: int, nbytes: int, start: int) -> bytes:
        reads.append(start)
        began = time.perf_counter()
        time.sleep(0.02)
        content = pread(file, nbytes, start)
        took_s.append(time.perf_counter() - began)
        return content

    monkeypatch.setattr(tuner.os, "pread", slow)
    for _ in range(5):
        reads.clear()
        took_s.clear()
        disk = probe_disk(tmp_path, disk_bytes=PIECE, threads=threads)
        assert disk is not None
        assert disk <= 131_072 / 0.02
        assert len(reads) == len(set(reads)), "a second read of a piece would come from memory"
        ratios.append(disk * sum(took_s) / (131_072 * len(took_s)))
        if ratios[-1] > 0.3:
            break
    assert max(ratios) > 0.3


def test_what_is_read_was_driven_out_of_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", tmp_path], capture_output=True, text=True, check=True)
    if kind.stdout.strip() == "tmpfs":
        pytest.skip("files live in memory here: they cannot be driven out of it")
    pread, resident = tuner.os.pread, []

    def looked(file: int, nbytes: int, start: int) -> bytes:
        resident.append(resident_share([Span(f"/proc/self/fd/{file}", 0, PIECE)]))
        monkeypatch.setattr(tuner.os, "pread", pread)
        return pread(file, nbytes, start)

    monkeypatch.setattr(tuner.os, "pread", looked)
    probe_disk(tmp_path, disk_bytes=PIECE, threads=1)
    assert resident[0] is not None
    assert resident[0] < 0.5


def test_a_disk_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"needs a folder that it may write to, got .*file"):
        probe_disk(tmp_path / "file", disk_bytes=PIECE, threads=1)
