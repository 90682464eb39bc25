"""The DALI engine and the cpu engine prepare their shares of a block's samples at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from mbaas import transforms as T
from mbaas.prep.decoded import read_decoded
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.prep.engines.cpu import CpuEngine
from mbaas.prep.engines.dali_runs import GraphRuns
from mbaas.samples.fields import Packed
from mbaas.samples.order import in_share
from support.decoded import check_any_mix

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=[pytest.mark.gpu, NO_GPU])]
every_device = pytest.mark.parametrize("device_id", DEVICES)

CROP = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(96), T.RandomHorizontalFlip()])
ANY_SIZE = T.Pipeline([T.DecodeImage(max_pixels=200_000), T.RandomResizedCrop(96), T.Resize(80)])
SHARE = 0.6


def for_dali(sample_ids: NDArray[np.int64], epoch: int) -> NDArray[np.bool_]:
    return in_share(sample_ids, SHARE)


def shared(pipeline: T.Pipeline = CROP, **options: Any) -> Engine:
    return make_engine("dali", pipeline, seed=4, for_dali=for_dali, **options)


def prepare(engine: Engine, raw: list[bytes], ids: NDArray[np.int64], epoch: int = 1) -> tuple[list[Any], list[Any]]:
    """Return the value of each sample and the bad samples."""
    field = engine.field(raw[0], "first", {})
    out = np.full_like(field.empty(len(raw)), 77)
    made = engine.prepare(Batch(raw, ids, epoch, {}), out)
    engine.close()
    column = made.made
    values = [column.value(row) if isinstance(column, Packed) else column[row] for row in range(len(raw))]
    return [value.copy() for value in values], made.bad


@every_device
@pytest.mark.parametrize("pipeline", [CROP, ANY_SIZE], ids=["one size", "any size"])
def test_each_sample_is_what_its_engine_makes_of_it(jpegs, odd_files, pipeline, device_id):
    """The engines differ by grey levels in nearly every photograph, which shows the engine of each sample."""
    raw = [*jpegs * 6, *(raw for raw, _ in odd_files.values())]
    ids = np.arange(len(raw)) * 5 + 2
    options = {"threads": 3, "device_id": device_id}
    by_dali, _ = prepare(make_engine("dali", pipeline, seed=4, **options), raw, ids)
    by_cpu, _ = prepare(make_engine("cpu", pipeline, seed=4), raw, ids)
    made, bad = prepare(shared(pipeline, **options), raw, ids)
    assert bad == []
    dalis = for_dali(ids, 1)
    differ = [not np.array_equal(*pair) for pair in zip(by_dali[:30], by_cpu[:30], strict=True)]
    assert min(np.sum(differ & dalis[:30]), np.sum(differ & ~dalis[:30])) >= 5
    for row, sample in enumerate(made):
        np.testing.assert_array_equal(sample, by_dali[row] if dalis[row] else by_cpu[row], f"row {row}")


@every_device
def test_neither_company_nor_threads_nor_what_is_kept_matters_and_of_dalis_none_is_kept(jpegs, bad_files, device_id):
    """Samples that DALI refuses are prepared and cached by the cpu engine."""
    raw = [*jpegs * 4, *(raw for raw, _ in bad_files.values())]
    kept = check_any_mix(lambda threads: shared(threads=threads, device_id=device_id), raw)
    assert {read_decoded(memoryview(container)).made_by for container in kept.values()} == {"cpu"}
    expected = np.flatnonzero(~for_dali(np.arange(20) * 7 + 3, 0)).tolist()  # ids as in check_any_mix
    assert [row for row in kept if row < 20] == expected


@every_device
def test_bad_samples_of_both_are_found(jpegs, bad_files, device_id):
    raw = [each for name in bad_files for each in (jpegs[0], bad_files[name][0])]
    ids = np.arange(len(raw))
    assert {*for_dali(ids[1::2], 1).tolist()} == {False, True}
    made, bad = prepare(shared(device_id=device_id), raw, ids)
    _, all_bad = prepare(make_engine("cpu", CROP, seed=4), raw, ids)
    assert bad == all_bad
    assert all(not made[each.row].any() for each in bad)


def test_both_prepare_at_the_same_time(jpegs, monkeypatch):
    """Each engine waits for the other to start."""
    begun = {"cpu": threading.Event(), "dali": threading.Event()}

    def meeting(own: str, other: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def waiting(*arguments: Any) -> Any:
            begun[own].set()
            assert begun[other].wait(20), f"{other} never began while {own} worked"
            return work(*arguments)

        return waiting

    monkeypatch.setattr(CpuEngine, "_make", meeting("cpu", "dali", CpuEngine._make))
    monkeypatch.setattr(GraphRuns, "_feed", meeting("dali", "cpu", GraphRuns._feed))
    made, bad = prepare(shared(), jpegs * 4, np.arange(20))
    assert (len(made), bad) == (20, [])


@pytest.mark.parametrize("broken", [(CpuEngine, "_sample"), (GraphRuns, "_feed")], ids=["cpu", "dali"])
def test_a_bug_in_either_is_raised_when_both_are_done(jpegs, monkeypatch, broken):
    """By then the memory is reused, and an engine still at work would overwrite it."""
    done, make = [], CpuEngine._make

    def noted(*arguments: Any) -> None:
        try:
            make(*arguments)
        finally:
            done.append("cpu")

    def fails(*_: Any) -> None:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(CpuEngine, "_make", noted)
    monkeypatch.setattr(*broken, fails)
    engine, out = shared(threads=2), np.zeros((20, 96, 96, 3), np.uint8)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        engine.prepare(Batch(jpegs * 4, np.arange(20), 0, {}), out)
    assert done == ["cpu"]
    engine.close()


def test_both_use_all_threads(jpegs):
    """A pool starts no thread while one is idle; 200 samples keep each thread busy until all have started."""
    made = []
    for threads in (1, 3):
        engine, out = shared(threads=threads), np.zeros((200, 96, 96, 3), np.uint8)
        engine.prepare(Batch(jpegs * 40, np.arange(200), 0, {}), out)
        made.append(out)
        prep = [each.name for each in threading.enumerate() if each.name.startswith("prep_")]
        assert len(prep) == (threads if threads > 1 else 0)
        engine.close()
    np.testing.assert_array_equal(*made)
