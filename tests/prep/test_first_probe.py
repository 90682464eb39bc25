"""The first sample that is prepared, of a dataset of which some cannot be read: each is tried once."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import mbaas
from mbaas import transforms as T
from mbaas.chaos.storage import Trouble, images, troubled
from mbaas.dataset import Dataset
from mbaas.errors import BadSampleError, StorageError
from mbaas.messages import Probe
from mbaas.prep.engines import make_engine
from mbaas.prep.worker import PROBE_SAMPLES, first_probe

SAMPLES = PROBE_SAMPLES + 4


@pytest.fixture
def data(tmp_path: Path) -> Dataset:
    return mbaas.read_images(str(images(tmp_path / "images", SAMPLES)), filesystem=troubled(tmp_path))


@pytest.fixture
def probe(data: Dataset) -> Callable[[], Probe]:
    engine = make_engine("cpu", T.Pipeline([T.DecodeImage()]), seed=0)
    return lambda: first_probe(data, engine)


def test_the_first_good_sample_is_enough(data: Dataset, probe: Callable[[], Probe]) -> None:
    Path(data.uri(0)).unlink()
    Path(data.uri(1)).write_bytes(b"another length")
    found = probe()
    assert (found.spec.shape, found.spec.dtype) == ((16, 16, 3), "uint8")
    assert found.sample_s > 0


@pytest.mark.parametrize("action", ["err", "lose", "truncate"])
def test_storage_that_errs_is_told_from_a_dataset_that_is_bad(
    tmp_path: Path, data: Dataset, probe: Callable[[], Probe], action: str
) -> None:
    """The first has another length by now, which no time can mend: where that shows, the second is named."""
    Path(data.uri(0)).write_bytes(b"another length")
    trouble = Trouble(tmp_path)
    trouble.begin(action)
    with pytest.raises(StorageError) as caught:
        probe()
    assert trouble.met == PROBE_SAMPLES
    assert caught.value.uri == data.uri(0 if action in ("err", "lose") else 1)
    trouble.end()
    assert probe().spec.dtype == "uint8"


def test_a_dataset_that_is_refused_for_good_is_said_to_be_so_at_once(data: Dataset, probe: Callable[[], Probe]) -> None:
    for number in range(SAMPLES):
        Path(data.uri(number)).unlink() if number else Path(data.uri(0)).write_bytes(b"another length")
    with pytest.raises(BadSampleError, match="the file has 14 bytes now") as caught:
        probe()
    assert caught.value.uri == data.uri(0)
