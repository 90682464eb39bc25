"""The first probe prepares a sample of a dataset with unreadable samples, and tries each sample once."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray

import mbaas
from mbaas import transforms as T
from mbaas.dataset import Dataset, SampleReader, synthetic
from mbaas.dataset.base import bounded
from mbaas.errors import BadSampleError, StorageError
from mbaas.prep.engines import Prepared, make_engine
from mbaas.prep.probe import PROBE_DECODED_S, PROBE_READS_S, PROBE_REPEATS, PROBE_SAMPLES, PROBE_TOGETHER_S, first_probe
from mbaas.tools.chaos.storage import Trouble, images, troubled
from mbaas.wire.samples import Probe

SAMPLES = PROBE_SAMPLES + 4


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return mbaas.read_images(str(images(tmp_path / "images", SAMPLES)), filesystem=troubled(tmp_path))


@pytest.fixture
def probe(data: Dataset) -> Callable[[], Probe]:
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage()]), seed=0)
    return lambda: first_probe(data, engine, engine, data.fields, 8)


def test_the_first_good_sample_is_enough(data: Dataset, probe: Callable[[], Probe]) -> None:
    Path(data.uri(0)).unlink()
    Path(data.uri(1)).write_bytes(b"another length")
    found = probe()
    assert (found.spec.made.shape, found.spec.made.dtype) == ((16, 16, 3), "uint8")
    assert found.sample_s > 0


def test_files_that_are_too_large_are_passed_over_and_named_if_there_is_nothing_else(data: Dataset) -> None:
    """Sparse files of 64 GiB, more than memory holds."""
    for number in range(3):
        os.truncate(data.uri(number), 64 << 30)
    listed = bounded(mbaas.read_images(data.root))
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage()]), seed=0)
    assert first_probe(listed, engine, engine, listed.fields, 8).spec.made.shape == (16, 16, 3)
    for number in range(3, SAMPLES):
        os.truncate(data.uri(number), 64 << 30)
    listed = bounded(mbaas.read_images(data.root))
    with pytest.raises(BadSampleError, match=r"68,719,476,736 bytes, over the limit of 1,073,741,824 bytes") as caught:
        first_probe(listed, engine, engine, listed.fields, 8)
    assert caught.value.uri == data.uri(0)


@pytest.mark.parametrize("action", ["err", "lose", "truncate"])
def test_storage_that_errs_is_told_from_a_dataset_that_is_bad(
    tmp_path: Path, data: Dataset, probe: Callable[[], Probe], action: str
) -> None:
    """Sample 0 is permanently bad: its length changed. If the probe detects this, the error names sample 1."""
    Path(data.uri(0)).write_bytes(b"another length")
    trouble = Trouble(tmp_path)
    trouble.begin(action)
    with pytest.raises(StorageError) as caught:
        probe()
    assert trouble.met == PROBE_SAMPLES
    assert caught.value.uri == data.uri(0 if action in ("err", "lose") else 1)
    trouble.end()
    assert probe().spec.made.dtype == "uint8"


def test_a_dataset_that_is_refused_for_good_is_said_to_be_so_at_once(data: Dataset, probe: Callable[[], Probe]) -> None:
    for number in range(SAMPLES):
        Path(data.uri(number)).unlink() if number else Path(data.uri(0)).write_bytes(b"another length")
    with pytest.raises(BadSampleError, match="the file has 14 bytes now") as caught:
        probe()
    assert caught.value.uri == data.uri(0)


class Slow(SampleReader):
    """Reader that takes ``seconds`` per read; reads of ``stuck`` return only when the test ends."""

    def __init__(self, inner: SampleReader, seconds: float, stuck: range, release: threading.Event) -> None:
        self._inner, self._seconds, self._stuck, self._release = inner, seconds, stuck, release

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        if sample_id in self._stuck:
            self._release.wait()
        time.sleep(self._seconds)
        self._inner.read_into(sample_id, buffer)


@pytest.mark.parametrize(
    ("threads", "seconds", "stuck", "least", "most"),
    [
        (8, 0.0, range(0), 0.0, 0.002),
        (8, 0.02, range(0), 0.0022, 0.01),  # one read per thread at a time
        (1, 0.02, range(0), 0.018, 0.04),
        (8, 0.0, range(1, 10_000), PROBE_READS_S / 2, PROBE_READS_S),  # only the first sample can be read
        (8, 0.0, range(500, 510), 0.0, 0.005),  # a stuck read blocks only one thread
    ],
)
def test_what_a_node_takes_to_read_a_sample_is_measured(
    threads: int, seconds: float, stuck: range, least: float, most: float
) -> None:
    data, release = synthetic(1000), threading.Event()
    slow = MagicMock(wraps=data, spec=Dataset)
    slow.__len__.return_value, slow.total_bytes, slow.stored = len(data), data.total_bytes, data
    slow.reader.side_effect = lambda: Slow(data.reader(), seconds, stuck, release)
    began = time.monotonic()
    try:
        engine = make_engine("cpu", T.Pipeline([T.DecodeImage()]), seed=0)
        found = first_probe(slow, engine, engine, slow.fields, threads)
    finally:
        release.set()
    assert least <= found.read_s <= most
    assert time.monotonic() - began < PROBE_READS_S + 2.0


def test_what_a_call_of_an_engine_takes_is_shared_by_its_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe prepares samples together, like the samples of a block."""
    data = synthetic(40)
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage()]), seed=0)
    prepare, call_s = engine.prepare, 0.1 * PROBE_TOGETHER_S

    def slow(*args: Any) -> Prepared:
        time.sleep(call_s)
        return prepare(*args)

    monkeypatch.setattr(engine, "prepare", slow)
    assert call_s / 10 < first_probe(data, engine, engine, data.fields, 2).sample_s < 0.9 * call_s


def test_what_cannot_be_prepared_takes_no_time_from_the_others(data: Dataset) -> None:
    def slow(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        time.sleep(map_s)
        return image

    map_s = 0.1 * PROBE_TOGETHER_S
    for number in range(1, SAMPLES):
        path = Path(data.uri(number))
        path.write_bytes(bytes(path.stat().st_size))
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage(), T.Map(slow, deterministic=True)]), seed=0)
    assert first_probe(data, engine, engine, data.fields, 8).sample_s > map_s


def test_what_decoded_samples_take_and_save_is_measured() -> None:
    """A container has 64x64 pixels. The time saved includes a slow deterministic function."""

    def busy(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        end = time.process_time() + 0.002
        while time.process_time() < end:
            pass
        return image

    data = synthetic(40, height=64, width=64)
    steps = [T.DecodeImage(), T.Map(busy, deterministic=True), T.RandomResizedCrop(16)]
    engine = make_engine("cpu", T.Pipeline(steps), seed=0, threads=2)
    decoded, found = first_probe(data, engine, engine, data.fields, 2).decoded
    assert [decoded.form, found.form] == [*engine.forms]
    assert decoded.sample_bytes == found.sample_bytes == 64 * 64 * 3 + 128
    assert found.dataset_bytes == 40 * found.sample_bytes, "all have one size"
    assert found.sample_s > 0.002
    assert 0 < found.rest_s < 0.001
    assert decoded.rest_s > 0.002, "the function is still to be called"


def test_the_size_of_all_decoded_samples_is_estimated_from_above(tmp_path: Path) -> None:
    """Sides differ by a factor of 3, so the ratio of decoded to encoded bytes gives the better estimate."""
    chance = np.random.default_rng(0)
    sides = chance.integers(40, 120, 60)
    (tmp_path / "a").mkdir()
    for number, side in enumerate(sides):
        noise = chance.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        cv2.imwrite(str(tmp_path / "a" / f"{number}.jpg"), cv2.resize(noise, (int(side), int(side))))
    data = mbaas.read_images(str(tmp_path))
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(16)]), seed=0)
    (found,) = first_probe(data, engine, engine, data.fields, 2).decoded
    actual = float((sides**2 * 3 + 128).sum())
    assert 0.9 * actual < found.dataset_bytes < 2 * actual


def test_where_storage_gives_no_other_sample_in_time_the_first_one_tells_what_decoding_saves() -> None:
    data, release = synthetic(1000), threading.Event()
    slow = MagicMock(wraps=data, spec=Dataset)
    slow.__len__.return_value, slow.total_bytes, slow.stored = len(data), data.total_bytes, data
    slow.reader.side_effect = lambda: Slow(data.reader(), PROBE_READS_S + 0.1, range(0), release)
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()]), seed=0)
    assert first_probe(slow, engine, engine, slow.fields, 2).decoded


def test_no_more_samples_are_decoded_than_there_is_time_for() -> None:
    def slow(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
        calls.append(len(image))
        time.sleep(2 * PROBE_DECODED_S)
        return image

    calls: list[int] = []
    data = synthetic(40)
    pipeline = T.Pipeline([T.DecodeImage(max_pixels=1 << 20), T.Map(slow, deterministic=True)])
    engine = make_engine("cpu", pipeline, seed=0)
    assert len(first_probe(data, engine, engine, data.fields, 2).decoded) == 2
    kept, timed = 2, 4 + 4
    assert len(calls) == 1 + 1 + PROBE_REPEATS + kept + timed, "field, first, timed; two forms; two epochs twice"


def test_a_form_that_cannot_be_kept_has_no_costs() -> None:
    masked = T.Map(lambda image: np.ma.masked_less(image, 9), deterministic=True)
    data = synthetic(40)
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage(), T.Resize((9, 9)), masked]), seed=0)
    found = first_probe(data, engine, engine, data.fields, 2)
    assert [each.form for each in found.decoded] == [*engine.forms][:2]
    assert found.sample_s > 0
