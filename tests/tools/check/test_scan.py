"""A check of a dataset finds each bad sample, with the reason that a feed gives, whatever its process does."""

from __future__ import annotations

import multiprocessing
from functools import partial
from pathlib import Path

import cv2
import numpy as np
import pytest
from process_work import DeadStorage, FailingStorage, crash, crop, dies, fails, ready, staged, stuck

import mbaas
from mbaas.errors import BadSampleError, ResourceError, StorageError
from mbaas.pictures.samples import first_samples
from mbaas.samples.fields import Field
from mbaas.tools.check.pool import Lost, Pool
from mbaas.tools.check.samples import Job
from mbaas.tools.check.scan import MOST_NAMED, Totals, chosen_ids, pieces_of, prepared_field, scan
from support import readers

pytestmark = pytest.mark.slow  # a check starts processes, which import mbaas


def field_of(dataset: mbaas.Dataset) -> Field:
    return prepared_field(Job(dataset, crop, 0, 0.0, 60.0))


def checked(dataset: mbaas.Dataset) -> Totals:
    totals = Totals()
    for _ in scan(Job(dataset, crop, 0, 0.0, 60.0), field_of(dataset), np.arange(len(dataset)), totals, processes=1):
        pass
    return totals


def test_bad_samples_have_the_reasons_of_a_feed(tmp_path: Path) -> None:
    dataset = readers.folders(tmp_path, readers.images(), None)
    totals = checked(dataset)
    found = first_samples(dataset, crop(), count=len(dataset))
    assert totals.bad == list(found.bad)
    assert (totals.samples, totals.nbytes, totals.ids.tolist()) == (31, dataset.total_bytes, [readers.BAD])
    assert totals.sizes == {(10, 8): 30}


def test_damage_that_a_crop_does_not_reach_is_found(tmp_path: Path) -> None:
    """With crops of 1 %, a feed decodes the upper rows only, in most epochs."""
    (tmp_path / "a").mkdir()
    noise = np.random.default_rng(0).integers(0, 255, (400, 400, 3), np.uint8)
    for number in range(4):
        cv2.imwrite(str(tmp_path / "a" / f"{number}.jpg"), noise)
    file = tmp_path / "a" / "2.jpg"
    content = file.read_bytes()
    file.write_bytes(content[:-20_000] + content[-2:])  # without the last rows, but with the end marker
    dataset = mbaas.read_images(tmp_path)
    assert first_samples(dataset, crop(), count=4, epoch=0).bad == ()
    totals = checked(dataset)
    assert [bad.sample_id for bad in totals.bad] == [2]
    assert totals.bad[0].reason.startswith("corrupt JPEG")


def test_a_dataset_without_a_good_sample_names_the_first(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(3):
        (tmp_path / "a" / f"{number}.png").write_bytes(b"no")
    with pytest.raises(BadSampleError, match=r"0\.png: it is not JPEG"):
        field_of(mbaas.read_images(tmp_path))


def test_a_later_good_sample_gives_the_shape(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    for number in range(40):
        content = readers.images(1, bad=None).encoded[0] if number > 20 else b"no"
        (tmp_path / "a" / f"{number:02}.png").write_bytes(content)
    assert field_of(mbaas.read_images(tmp_path)).shape == (8, 8, 3)


# ---- processes ----


def test_a_crash_and_a_hang_cost_only_their_piece() -> None:
    pool: Pool[list[int], list[int]] = Pool(partial(ready, 3, 6), 2, limit_s=2.0)
    try:
        found = {tuple(piece): result for piece, result in pool.run([[number] for number in range(8)])}
    finally:
        pool.close()
    assert {piece for piece, result in found.items() if isinstance(result, Lost)} == {(3,), (6,)}
    assert found[3,] == Lost("the process that prepared it was ended by SIGSEGV", has_ended=True)
    assert found[6,] == Lost("it was not prepared within 2 s (timeouts.prep_s)")
    assert found[7,] == [14]


def test_a_process_that_cannot_start_is_an_error() -> None:
    for make, sentence in ((dies, "ended with code 3 while it started"), (fails, "no room")):
        pool: Pool[int, int] = Pool(make, 1, limit_s=9.0)
        with pytest.raises(ResourceError, match=sentence):
            list(pool.run([1]))
        pool.close()


# ---- arithmetic ----


def test_pieces_are_bounded_in_samples_and_bytes() -> None:
    lengths = np.full(100, 1000)
    lengths[50] = 1 << 30
    pieces = [*pieces_of(np.arange(100), lambda ids: lengths[ids], 0)]
    assert [number for piece in pieces for number in piece] == [*range(100)]
    assert max(map(len, pieces)) == 32
    assert (50,) in pieces
    assert all(len(piece) <= 4 for piece in pieces_of(np.arange(100), lambda ids: lengths[ids], 8 << 20))


def test_a_limit_is_spread_over_the_data() -> None:
    assert chosen_ids(5, None).tolist() == chosen_ids(5, 9).tolist() == [0, 1, 2, 3, 4]
    assert chosen_ids(1001, 3).tolist() == [0, 500, 1000]


def test_totals_stay_small() -> None:
    from mbaas.tools.check.samples import Outcome

    totals = Totals()
    for start in range(0, 3 * MOST_NAMED, 1000):
        sizes = {(start + number + 1, 1): 1 for number in range(1000)}
        bad = {start + number: f"reason {start + number}" for number in range(1000)}
        found = Outcome(samples=1000, bad=bad)
        found.sizes.update(sizes)
        totals.add(found, str)
    assert (len(totals.bad), len(totals.reasons), len(totals.sizes)) == (MOST_NAMED, MOST_NAMED, 1000)
    assert len(totals.ids) == totals.samples == 3 * MOST_NAMED
    assert (totals.smallest, totals.largest) == ((1, 1), (3 * MOST_NAMED, 1))


def test_a_process_that_hangs_while_it_starts_is_an_error() -> None:
    pool: Pool[int, int] = Pool(stuck, 1, limit_s=9.0, start_s=2.0)  # type: ignore[arg-type]
    with pytest.raises(ResourceError, match="did not start within 2 s"):
        list(pool.run([1]))
    pool.close()


def test_each_stage_has_its_own_limit() -> None:
    pool: Pool[int, int] = Pool(staged, 1, limit_s=1.0)
    found = dict(pool.run([1, 8, 9]))
    pool.close()
    assert found == {1: 1, 8: Lost("the second stage"), 9: Lost("the second stage", in_storage=True)}


def test_a_process_that_died_while_it_was_idle_costs_no_sample(tmp_path: Path) -> None:
    dataset = readers.folders(tmp_path, readers.images(3, bad=None), None)
    totals, job = Totals(), Job(dataset, crop, 0, 0.0, 60.0)
    done = scan(job, field_of(dataset), np.arange(len(dataset)), totals, processes=1)
    monkey = pytest.MonkeyPatch()
    monkey.setattr("mbaas.tools.check.scan.PIECE_SAMPLES", 1)
    next(done)
    (worker,) = multiprocessing.active_children()
    worker.kill()
    worker.join()
    list(done)
    monkey.undo()
    assert (totals.samples, totals.bad) == (3, [])


# ---- storage ----


@pytest.mark.parametrize("storage_s", [0.0, 0.5])
def test_samples_that_storage_may_return_later_are_not_bad(tmp_path: Path, storage_s: float) -> None:
    dataset = FailingStorage.around(readers.folders(tmp_path, readers.images(9, bad=None), None))
    totals, job = Totals(), Job(dataset, crop, 0, storage_s, 60.0)
    list(scan(job, field_of(dataset), np.arange(9), totals, processes=1))
    assert (totals.samples, totals.ids.tolist()) == (9, [6])
    assert [each.sample_id for each in totals.unread] == [2, 4]
    assert totals.unread_count == 2


def test_storage_out_of_order_at_the_start_is_said_at_once(tmp_path: Path) -> None:
    dataset = DeadStorage.around(readers.folders(tmp_path, readers.images(), None))
    with pytest.raises(StorageError, match="connection reset"):
        field_of(dataset)


# ---- the first sample ----


def test_a_first_sample_that_crashes_or_hangs_does_not_end_the_check(tmp_path: Path) -> None:
    dataset = readers.folders(tmp_path, readers.images(4, bad=None), None)
    assert prepared_field(Job(dataset, crash, 0, 0.0, 2.0)).shape == (8, 10, 3)
