"""The model matches hand calculations, and its recurrence equals the paper's, sample by sample."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.tools.simulator import catalog
from mbaas.tools.simulator.system import StagingClass, StorageClass
from mbaas.tools.simulator.world import StepTimeline, Tiers, fetch_seconds


def slow_recurrence(
    reads_s: np.ndarray, compute_s: np.ndarray, ahead: int, prep_s: np.ndarray | None
) -> tuple[list[float], float]:
    """Start of each step and the end, computed one by one from the docstring of `mbaas.tools.simulator.world`."""
    fetched = [0.0] * reads_s.shape[1]
    avail = [0.0] * reads_s.shape[1]
    begins: list[float] = []
    end = 0.0
    for step, row in enumerate(reads_s):
        gate = begins[step - ahead] if step >= ahead else 0.0
        fetched = [max(before, gate) + read for before, read in zip(fetched, row, strict=True)]
        preps = prep_s[step] if prep_s is not None else [0.0] * len(row)
        avail = [max(before, own) + prep for before, own, prep in zip(avail, fetched, preps, strict=True)]
        begins.append(max(end, *avail))
        end = begins[-1] + compute_s[step]
    return begins, end


def run_in_parts(
    reads_s: np.ndarray, compute_s: np.ndarray, ahead: int, prep_s: np.ndarray | None, cut: int
) -> tuple[list[float], float]:
    """Start of each step and the end, computed by `StepTimeline` in two parts."""
    timeline = StepTimeline(workers=reads_s.shape[1], ahead=ahead)
    begins: list[float] = []
    end = 0.0
    for part in (slice(0, cut), slice(cut, None)):
        steps = timeline.run(reads_s[part], compute_s[part], prep_s=prep_s[part] if prep_s is not None else None)
        for wait_s, length_s in zip(steps.waits_s, compute_s[part], strict=True):
            begins.append(end + wait_s)
            end = begins[-1] + length_s
        assert steps.end_s == pytest.approx(end)
    return begins, end


def test_the_papers_recurrence_by_hand() -> None:
    """One worker, one sample a step, reads of 3, 1, 1, 4 s, training of 2 s each, unlimited read-ahead.

    avail = 3, 4, 5, 9; t = 3, max(4, 5) = 5, max(5, 7) = 7, max(9, 9) = 9. The end is 9 + 2 = 11, after 3 s of waiting.
    """
    steps = StepTimeline(workers=1, ahead=4).run(np.array([[3.0], [1], [1], [4]]), np.full(4, 2.0))
    assert steps.waits_s.tolist() == [3, 0, 0, 0]
    assert steps.end_s == 11


def test_a_staging_buffer_of_one_minibatch_by_hand() -> None:
    """The same, but reading for step h begins when step h - 1 does: t = 3, avail = 3 + 1 = 4.

    t_1 = max(4, 3 + 2) = 5, t_2 = max(5 + 1, 7) = 7, t_3 = max(7 + 4, 9) = 11. The end is 13, after 3 and 2 s of
    waiting.
    """
    steps = StepTimeline(workers=1, ahead=1).run(np.array([[3.0], [1], [1], [4]]), np.full(4, 2.0))
    assert steps.waits_s.tolist() == [3, 0, 0, 2]
    assert steps.end_s == 13


def test_workers_wait_for_the_slowest() -> None:
    """Reads of 1 and 3 s, then 3 and 1 s: both workers have read 4 s by step 1, but step 0 waits until 3.

    Training takes 0.5 s, so step 1 could begin at 3.5 but waits until 4: 3 + 0.5 s of waiting.
    """
    steps = StepTimeline(workers=2, ahead=9).run(np.array([[1.0, 3], [3, 1]]), np.full(2, 0.5))
    assert steps.waits_s.tolist() == [3, 0.5]
    assert steps.slowest[0] == 1


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**31),
    steps=st.integers(1, 40),
    workers=st.integers(1, 4),
    ahead=st.integers(1, 45),
    load=st.floats(0.1, 3),
    overlaps=st.booleans(),
)
def test_vectorised_and_slow_recurrence_agree(
    seed: int, steps: int, workers: int, ahead: int, load: float, overlaps: bool
) -> None:
    chance = np.random.default_rng(seed)
    reads_s, compute_s = load * chance.random((steps, workers)) ** 3, chance.random(steps)
    prep_s = chance.random((steps, workers)) if overlaps else None
    fast, fast_end = run_in_parts(reads_s, compute_s, ahead, prep_s, cut=steps // 3)
    slow, slow_end = slow_recurrence(reads_s, compute_s, ahead, prep_s)
    assert fast == pytest.approx(slow)
    assert fast_end == pytest.approx(slow_end)


def test_fetching_beside_prep_by_hand() -> None:
    """Fetching takes 3, 1, 1, 1 s, prep on other threads 2 s each, training no time.

    fetched = 3, 4, 5, 6; avail = 5, 7, 9, 11. Prep waited for bytes only in the first minibatch.
    """
    steps = StepTimeline(workers=1, ahead=9).run(
        np.array([[3.0], [1], [1], [1]]), np.zeros(4), prep_s=np.full((4, 1), 2.0)
    )
    assert steps.waits_s.tolist() == [5, 2, 2, 2]
    assert steps.late_fetch.tolist() == [True, False, False, False]


def test_the_pfs_is_full_but_not_more_than_full() -> None:
    """One worker with 8 threads reads 8 bytes. The PFS delivers 1 byte/s to one reader, and 4 bytes/s at most.

    With 4 thread-seconds of other work, 8 + 4 would end after 1.5 s, but the PFS needs 2 s. The result is 16
    thread-seconds, with 12 at the PFS. With 40 thread-seconds of other work, 8 + 40 take 6 s, and the PFS is not full.
    """
    machine = catalog.load("mnist").machine
    narrow = type(machine)(**{**vars(machine), "storage": ThroughputCurve.through({1: 1, 4: 4})})
    nbytes = np.zeros((1, 1, 7))
    nbytes[..., 4] = 8
    tiers = Tiers(narrow, readers=8)
    assert fetch_seconds(nbytes, tiers=tiers, other_s=4).sum() == pytest.approx(12)
    assert fetch_seconds(nbytes, tiers=tiers, other_s=40).sum() == pytest.approx(8)
    assert fetch_seconds(nbytes, tiers=tiers).sum() == pytest.approx(16)


def test_a_fixed_share_of_the_pfs_does_not_depend_on_other_work() -> None:
    """8 threads get 4 / 8 bytes/s each: 8 bytes take 16 thread-seconds, however long threads work elsewhere."""
    machine = catalog.load("mnist").machine
    narrow = type(machine)(**{**vars(machine), "storage": ThroughputCurve.through({1: 1, 4: 4})})
    nbytes = np.zeros((1, 1, 7))
    nbytes[..., 4] = 8
    tiers = Tiers(narrow, readers=8, fixed_share=True)
    for other_s in (0, 4, 40):
        assert fetch_seconds(nbytes, tiers=tiers, other_s=other_s).sum() == pytest.approx(16)


def test_rates_of_the_reference_machine() -> None:
    """In MB/s per thread: ram 85,000 / 4 = 21,250, ssd 4,000 / 2 = 2,000; remote the same, below b_c = 24,000.

    The PFS delivers at most 1,540 / 4 = 385 to a reader. It saturates at 2,870, so 32 readers get 89.6875 each. Three
    readers are on the line from 730 at 2 to 1,540 at 4: 1,135. Prep at 200 is slower than writing at 111,000 / 8.
    """
    machine = catalog.load("imagenet-1k").machine
    mb_per_s = [1e-6 / cost for cost in Tiers(machine, readers=32).fetch_s_per_byte()[:5]]
    assert mb_per_s == pytest.approx([21_250, 2_000, 21_250, 2_000, 385])
    assert 1e-6 / machine.pfs_s_per_byte(32) == pytest.approx(89.6875)
    assert machine.write_s_per_byte() == pytest.approx(1 / 200e6)
    assert 3e-6 / machine.pfs_s_per_byte(3) == pytest.approx(1135)


def test_a_class_slower_than_the_pfs_is_not_read_from() -> None:
    """A reader gets 330 MB/s from the PFS: more than over a network of 100, less than from any class here."""
    machine = catalog.load("imagenet-1k").machine
    assert Tiers(machine, readers=1).fastest().tolist() == [0, 1, 2, 3, 4, 5, 6]
    slow_network = type(machine)(**{**vars(machine), "network_bytes_per_s": 100e6})
    assert Tiers(slow_network, readers=1).fastest().tolist() == [0, 1, 4, 4, 4, 5, 6]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"prep_bytes_per_s": 0}, "prep_bytes_per_s must be above 0, got 0"),
        ({"network_bytes_per_s": math.nan}, "network_bytes_per_s must be above 0, got nan"),
        ({"classes": catalog.load("mnist").machine.classes[:1] * 2}, "must have different names, got ram, ram"),
    ],
)
def test_machines_that_cannot_be(change: dict, sentence: str) -> None:
    machine = catalog.load("mnist").machine
    with pytest.raises(ConfigError, match=sentence):
        type(machine)(**{**vars(machine), **change})


def storage_class(name: str, capacity: int, read: float, *, threads: int = 1) -> StorageClass:
    return StorageClass(name=name, capacity_bytes=capacity, read=ThroughputCurve.flat(read), threads=threads)


def test_a_thread_gets_an_even_share_of_its_class() -> None:
    """The machine of the NoPFS paper: RAM 85,000 / 4 = 21,250 MB/s, SSD 4,000 / 2 = 2,000, staging 111,000 / 8."""
    ram, ssd = storage_class("RAM", 120, 85_000, threads=4), storage_class("SSD", 900, 4_000, threads=2)
    staging = StagingClass(capacity_bytes=5, write=ThroughputCurve.flat(111_000), threads=8)
    assert [each.thread_bytes_per_s for each in (ram, ssd, staging)] == [21_250, 2_000, 13_875]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: storage_class("SSD", -1, 5), "capacity_bytes of SSD must be 0 or more, got -1"),
        (lambda: storage_class("SSD", 1, 5, threads=0), "threads of SSD must be at least 1, got 0"),
        (lambda: storage_class("remote", 1, 5), "may not be called compute, staging, remote, pfs, got 'remote'"),
        (lambda: StagingClass(capacity_bytes=1, threads=0), "threads of staging must be at least 1, got 0"),
    ],
)
def test_classes_that_cannot_be(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()
