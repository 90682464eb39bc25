"""Measured rates: what they rest on, how long they may take, and whether they know what came from memory."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbaas.cache.measure import MeasuredRates, measure_rates, try_out
from mbaas.cache.tiers import Rate
from mbaas.dataset import Dataset, SampleReader, read_images, synthetic
from mbaas.errors import BadSampleError, ConfigError, DatasetError


class Paced(SampleReader):
    """Serves samples at a fixed pace for each thread; notes how often each was read, and by how many at once."""

    def __init__(self, read_s: float, *, broken: bool = False) -> None:
        self.read_s = read_s
        self.broken = broken
        self.reads: list[int] = []
        self.threads: set[str] = set()

    def read_into(self, sample_id: int, buffer: Any) -> None:
        self.reads.append(sample_id)
        self.threads.add(f"{threading.get_ident()}")
        time.sleep(self.read_s)
        if self.broken:
            raise BadSampleError(f"test://{sample_id}", "no route to host")


class PacedData(Dataset):
    """Samples of 1,000 bytes."""

    def __init__(self, source: SampleReader, samples: int) -> None:
        super().__init__("test://paced", ("one",), "0" * 32)
        object.__setattr__(self, "source", source)
        object.__setattr__(self, "samples", samples)

    source: SampleReader
    samples: int

    def __len__(self) -> int:
        return self.samples

    def labels(self, sample_ids: Any) -> Any:
        return np.zeros(len(sample_ids), np.int64)

    def lengths(self, sample_ids: Any) -> Any:
        return np.full(len(sample_ids), 1_000)

    @property
    def total_bytes(self) -> int:
        return 1_000 * self.samples

    def uri(self, sample_id: int) -> str:
        return f"test://{sample_id}"

    def reader(self) -> SampleReader:
        return self.source


def test_storage_is_measured_with_each_number_of_threads() -> None:
    """A read of 1,000 bytes takes 10 ms: at most 100 kB/s for a thread and 400 kB/s for four."""
    source = Paced(0.01)
    found = measure_rates(PacedData(source, 5_000), threads=(1, 4), budget_s=0.6)
    one, four = found.storage.at(1), found.storage.at(4)
    assert 40e3 < one <= 100e3
    assert 1.5 * one < four <= 400e3
    assert len(source.reads) == len(set(source.reads))
    assert found.storage_cached is None
    assert found.disk_write is found.disk_read is found.disk_cached is None


def test_the_time_is_kept_even_by_storage_that_is_slow() -> None:
    """A read takes longer than the whole budget; each thread does one, and it counts."""
    source = Paced(0.3)
    found = measure_rates(PacedData(source, 5_000), threads=(1, 2), budget_s=0.05)
    assert len(source.reads) == 3
    assert found.storage.at(1) == pytest.approx(1_000 / 0.3, rel=0.3)
    assert found.elapsed_s < 3


def test_a_dataset_that_is_smaller_than_the_threads_gives_fewer_points() -> None:
    assert measure_rates(PacedData(Paced(0.0), 1), threads=(1, 4), budget_s=0.05).storage.threads == (1,)


def test_samples_are_chosen_by_the_seed() -> None:
    chosen = []
    for seed in (1, 1, 2):
        source = Paced(0.05)
        measure_rates(PacedData(source, 5_000), threads=(1,), budget_s=0.2, seed=seed)
        chosen.append(source.reads[:2])
    assert chosen[0] == chosen[1] != chosen[2]


def test_storage_that_gives_nothing_is_an_error_that_says_why() -> None:
    with pytest.raises(DatasetError, match=r"test://paced: no bytes came from any of 9 samples; .*no route to host"):
        measure_rates(PacedData(Paced(0.0, broken=True), 9), threads=(1,), budget_s=0.05)


def test_a_disk_is_measured_and_left_empty(tmp_path: Path) -> None:
    begun = time.monotonic()
    found = measure_rates(synthetic(1_000), disk_path=tmp_path / "tier", threads=(1, 2), budget_s=0.4)
    assert found.elapsed_s <= time.monotonic() - begun
    assert isinstance(found.disk_write, Rate)
    assert isinstance(found.disk_read, Rate)
    assert found.disk_cached is None or found.disk_cached < 0.5, "what was written was not driven out of memory"
    assert list((tmp_path / "tier").iterdir()) == []
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("mbaas-measure")]


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    for name in ("ant", "bee"):
        (tmp_path / "data" / name).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "data" / name / f"{i}.jpg").write_bytes(bytes(9_000))
    return tmp_path / "data"


def test_files_that_were_just_written_are_told_to_be_in_memory(photos: Path) -> None:
    """None where the file system does not say."""
    found: MeasuredRates = measure_rates(read_images(photos), threads=(1,), budget_s=0.1)
    assert found.storage_cached in (1.0, None)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget_s": 0}, "budget_s must be above 0, got 0"),
        ({"threads": ()}, r"at least 1, got \(\)"),
        ({"threads": (0, 2)}, r"at least 1, got \(0, 2\)"),
    ],
)
def test_settings_that_cannot_work_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure_rates(synthetic(10), **options)


def test_a_disk_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"needs a folder that it may write to, got .*file"):
        measure_rates(synthetic(10), disk_path=tmp_path / "file", budget_s=0.05)


def test_a_node_is_tried_out_without_a_look_at_storage(tmp_path: Path) -> None:
    memory, disk = try_out(disk_path=tmp_path / "tier", disk_bytes=9 << 20, threads=3)
    assert memory > 1e8
    assert disk is not None
    assert disk > 1e5
    assert list((tmp_path / "tier").iterdir()) == []
    assert try_out(disk_path=tmp_path, disk_bytes=1 << 20, threads=3)[1] is None, "there is no room for a piece"
    assert try_out(disk_path=None, disk_bytes=0, threads=3)[1] is None
