"""The first samples of an epoch without a feed. `tests/service/test_boxes_of_trials.py` compares them with a feed's."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
import soundfile

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import BadSampleError
from mbaas.pictures.samples import first_samples
from mbaas.samples.fields import Packed
from mbaas.samples.order import SampleOrder

PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomHorizontalFlip()])


def test_samples_come_in_the_order_of_the_epoch() -> None:
    data = synthetic(50)
    for epoch in (0, 3):
        found = first_samples(data, PIPELINE, count=7, seed=2, epoch=epoch)
        order = SampleOrder(50, seed=2, block_samples=50)
        assert found.sample_ids.tolist() == order.sample_ids(epoch)[:7].tolist()
        assert found.known["label"].tolist() == (found.sample_ids % 10).tolist()
    plain = first_samples(data, PIPELINE, count=80, shuffle=False, epoch=1)
    assert plain.sample_ids.tolist() == list(range(50))


def test_chance_follows_from_seed_and_epoch() -> None:
    data = synthetic(40)
    same, again, other = (
        first_samples(data, PIPELINE, count=40, shuffle=False, seed=seed).samples for seed in (1, 1, 2)
    )
    np.testing.assert_array_equal(same, again)
    assert not np.array_equal(same, other)
    assert not np.array_equal(same, first_samples(data, PIPELINE, count=40, shuffle=False, seed=1, epoch=1).samples)


@pytest.fixture
def flawed(tmp_path: Path) -> mbaas.Dataset:
    """Six images in one class: 2 is not an image, 4 is deleted, 5 has another size."""
    folder = tmp_path / "class"
    folder.mkdir()
    for number in range(6):
        side = 9 if number == 5 else 8
        cv2.imwrite(str(folder / f"{number}.png"), np.full((side, side, 3), number, np.uint8))
    (folder / "2.png").write_text("not an image")
    data = mbaas.read_images(tmp_path)
    (folder / "4.png").unlink()
    return data


def test_bad_samples_are_left_out_and_named(flawed: mbaas.Dataset) -> None:
    found = first_samples(flawed, PIPELINE, count=6, shuffle=False)
    assert found.sample_ids.tolist() == [0, 1, 3]
    assert len(found.samples) == len(found.known["label"]) == 3
    reasons = {bad.sample_id: bad.reason for bad in found.bad}
    assert reasons.keys() == {2, 4, 5}
    assert "it is not JPEG, PNG, WebP or BMP" in reasons[2]
    assert "is gone" in reasons[4]
    assert "the samples of this feed are uint8 [8, 8, 3]" in reasons[5]


def test_nothing_but_bad_samples_is_an_error_that_names_one(flawed: mbaas.Dataset) -> None:
    cut = T.Pipeline([T.DecodeImage(), T.CenterCrop(8)])  # fixed output shape: no sample is decoded to find it
    for pipeline in (PIPELINE, cut):
        with pytest.raises(BadSampleError, match=r"2\.png: it is not JPEG"):
            first_samples(flawed.select(np.array([2])), pipeline, count=1)
        with pytest.raises(BadSampleError, match=r"4\.png: .* is gone"):
            first_samples(flawed.select(np.array([4])), pipeline, count=1)


def test_boxes_that_there_are_not_are_refused() -> None:
    pipeline = T.Pipeline([T.DecodeImage()], boxes=T.Boxes("bboxes"))
    with pytest.raises(mbaas.ConfigError, match="Boxes names the field 'bboxes'"):
        first_samples(synthetic(3), pipeline, count=2)


def test_recordings_are_as_long_as_they_are(tmp_path: Path) -> None:
    for number in range(4):
        soundfile.write(tmp_path / f"{number}.wav", np.full(10 + number, 0.5), 8000)
    (tmp_path / "2.wav").write_text("no sound")
    pipeline = T.Pipeline([T.DecodeAudio(8000, max_s=1)])
    data = mbaas.read_audio(tmp_path, classes=False)
    found = first_samples(data, pipeline, count=4, shuffle=False)
    assert found.sample_ids.tolist() == [0, 1, 3]
    assert isinstance(found.samples, Packed)
    assert found.samples.lengths.tolist() == [10, 11, 13]
    assert (found.samples.own()[0] == 0.5).all()
    assert [bad.sample_id for bad in found.bad] == [2]
    assert "audio: sound" in pipeline._repr_html_()
