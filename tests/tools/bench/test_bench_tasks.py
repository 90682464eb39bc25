"""Rows of a task do the same work, deliver each sample once, and reject invalid data with a clear message."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

import mbaas
from mbaas.dataset import AUDIO_EXTENSIONS, IMAGE_EXTENSIONS
from mbaas.errors import DatasetError, MbaasError
from mbaas.prep.decoded import is_decoded
from mbaas.prep.engines import make_engine
from mbaas.tools.bench.host import run_row
from mbaas.tools.bench.rows import BenchSettings, Epoch, RowSpec, dali, dataloader, feed, prep
from mbaas.tools.bench.runner import find_data, row_spec
from mbaas.tools.bench.tasks import TASKS, audio, images
from mbaas.tools.bench.tasks.audio import CLASSES, make_sounds
from mbaas.tools.bench.tasks.base import Data, made_once
from mbaas.tools.bench.tasks.detection import make_annotations

Array = NDArray[Any]

SAMPLES = 27
BATCH = 8
"""Leaves a remainder of three."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder for generated data, shared by all tests."""
    return tmp_path_factory.mktemp("tasks")


def data_of(task: str, folder: Path) -> Data:
    return TASKS[task].make(folder, SAMPLES, seed=0, report=lambda _: None)


def spec_of(task: str, folder: Path, row: str = "") -> RowSpec:
    data = data_of(task, folder)
    return RowSpec(BenchSettings(task=task, cores=1, seed=5), row, 1, data, BATCH)


def epoch_of(epoch: Epoch, beside: int, most: int = BATCH) -> dict[int, list[Array]]:
    """Arrays of each sample in an epoch, by sample id. Fails if a sample is missing or repeated.

    Minibatches have ``most`` samples, but those of prep may be larger.
    """
    seen: dict[int, list[Array]] = {}
    for (made, *others), ids in epoch():
        assert len(made) == len(ids) <= most
        assert len(others) == beside * len(ids)
        for row, sample in enumerate(ids.tolist()):
            assert sample not in seen
            seen[sample] = [made[row].copy(), *(each.copy() for each in others[row :: len(ids)])]
    assert sorted(seen) == list(range(SAMPLES))
    return seen


@pytest.mark.parametrize("task", TASKS)
def test_p_from_decoded_samples_makes_the_same_bytes(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_of(task, folder, "prep")
    with prep.loader(spec) as own:
        wanted = epoch_of(own, len(spec.task.beside), SAMPLES)
    with prep.service(replace(spec, row="prep-decoded")) as address:
        again = replace(spec, row="prep-decoded", address=address)
        decoded = mock.Mock(wraps=prep._decoded)
        monkeypatch.setattr(prep, "_decoded", decoded)
        with prep.loader(again) as loader:
            decoded.assert_called_once_with(address, SAMPLES)
            assert all(is_decoded(each.data) for each in prep._decoded(address, SAMPLES))
            got = epoch_of(loader, len(spec.task.beside), SAMPLES)
    for sample, arrays in wanted.items():
        for mine, same in zip(arrays, got[sample], strict=True):
            np.testing.assert_array_equal(mine, same, strict=True)


def test_decoded_samples_are_written_in_order() -> None:
    containers = np.frombuffer(b"bbbaacccc", np.uint8)
    found = prep._by_row(np.array([1, 0, 2]), np.array([3, 2, 4]), containers)
    assert [each.tobytes() for each in found] == [b"aa", b"bbb", b"cccc"]


def test_without_room_for_what_is_decoded_there_is_no_p_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prep, "MOST_BYTES", 1_500_000)  # room for two photographs
    with pytest.raises(MbaasError, match=r"\.jpg cannot be kept decoded, so there is no P' with this data"):
        with prep.service(spec_of("images", folder, "prep-decoded")):
            pass


@pytest.mark.parametrize("task", TASKS)
def test_what_is_made_is_what_the_engine_makes(task: str, folder: Path) -> None:
    made = TASKS[task]
    samples = made.samples(data_of(task, folder))
    known = {name: column[:1] for name, column in samples.known.items()}
    engine = make_engine("cpu", made.pipeline(), seed=0)
    assert engine.field(samples.files[0].read_bytes(), "", known) == made.made
    engine.close()


@pytest.mark.slow
@pytest.mark.parametrize("task", ["detection", "audio"])
def test_rows_do_the_same_work(task: str, folder: Path) -> None:
    """P and a DataLoader make the same bytes. DALI has different operators, so only shapes and kinds agree."""
    spec = spec_of(task, folder)
    beside = len(spec.task.beside)
    with prep.loader(spec) as one, dataloader.loader(spec) as other:
        wanted, got = epoch_of(one, beside, SAMPLES), epoch_of(other, beside)
        again = epoch_of(other, beside)
    with dali.loader(spec) as third:
        theirs = [epoch_of(third, beside) for _ in range(2)][1]
    for sample, arrays in wanted.items():
        for mine, same, later in zip(arrays, got[sample], again[sample], strict=True):
            np.testing.assert_array_equal(mine, same, strict=True)
            assert later.dtype == mine.dtype
        for mine, like in zip(arrays, theirs[sample], strict=True):
            assert mine.shape[1:] == like.shape[1:]
            assert mine.dtype.kind == like.dtype.kind
    assert any((wanted[sample][0] != again[sample][0]).any() for sample in wanted), "epochs have other random numbers"


def test_dali_hears_what_the_others_hear(folder: Path) -> None:
    """Time windows and masks differ, but the typical decibels of each band do not."""

    def bands(decibels: Array) -> Array:
        """Median of each band over time; NaN under a mask."""
        is_masked = decibels.std(axis=0) < 1e-3
        return np.where(is_masked, np.nan, np.median(decibels, axis=0))

    spec = spec_of("audio", folder)
    with prep.loader(spec) as one, dali.loader(spec) as other:
        ours, theirs = epoch_of(one, 0, SAMPLES), epoch_of(other, 0)
    errors = np.concatenate([bands(ours[sample][0]) - bands(theirs[sample][0]) for sample in range(SAMPLES)])
    assert np.nanmedian(np.abs(errors)) < 3
    for seen in (ours, theirs):
        decibels = np.stack([seen[sample][0] for sample in range(SAMPLES)])
        masked = (decibels.std(axis=axis) < 1e-3 for axis in (1, 2))
        # two masks of bands, on average (0 to 8) / 2 of 64 wide each, and two of frames, (0 to 20) / 2 of 101
        for share, expected in zip(masked, (2 * 4 / 64, 2 * 10 / 101), strict=True):
            assert expected / 2 < share.mean() < 1.5 * expected


def test_dali_sees_the_boxes_that_the_others_see(folder: Path) -> None:
    """Windows differ, but boxes are within the image, and a sample without boxes gets none."""
    spec = spec_of("detection", folder)
    lengths = spec.samples().known["boxes"].lengths
    with dali.loader(spec) as loader:
        for sample, (pixels, boxes, labels) in epoch_of(loader, 2).items():
            assert pixels.shape == spec.task.made.shape
            assert len(boxes) == len(labels) <= lengths[sample]
            assert boxes.min(initial=0) >= -1e-3
            assert boxes.max(initial=0) <= 300 + 1e-3


@pytest.mark.parametrize("task", [pytest.param("images", marks=pytest.mark.long), "detection", "audio"])
def test_a_feed_gives_a_trial_the_same(
    ray_clean: None, task: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(task, folder, "mbaas")
    monkeypatch.setattr(feed.ray, "shutdown", lambda: None)  # keeps the cluster of all tests running
    monkeypatch.setenv("RAY_ADDRESS", "")
    with prep.loader(spec) as own:
        wanted = epoch_of(own, len(spec.task.beside), SAMPLES)
    options = {"batch_size": BATCH, "seed": spec.settings.seed, "prep_workers": 1, "engine": "cpu"}
    with mbaas.serve(feed.FEED, spec.task.dataset(spec.data), spec.task.pipeline(), **options):
        with feed.loader(spec) as loader:
            got = epoch_of(loader, len(spec.task.beside))
    for sample, arrays in wanted.items():
        for mine, same in zip(arrays, got[sample], strict=True):
            np.testing.assert_array_equal(mine, same, strict=True)


@pytest.mark.parametrize("task", ["detection", "audio"])
def test_what_a_worker_of_a_dataloader_sends(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prepared arrays are in shared memory, whatever their type; boxes and labels are part of the message."""
    monkeypatch.setattr(dataloader, "get_worker_info", object)
    spec = spec_of(task, folder)
    made, ids, beside = dataloader.Minibatches(
        spec.samples(), spec.task, spec.pipeline(), spec.settings.seed
    ).__getitems__([3, 1, 2])
    assert made.is_shared()
    assert (tuple(made.shape), str(made.dtype)) == ((3, *spec.task.made.shape), f"torch.{spec.task.made.dtype}")
    assert ids.tolist() == [3, 1, 2]
    for column, again in zip(beside, ForkingPickler.loads(ForkingPickler.dumps(beside)), strict=True):
        assert len(again) == 3
        np.testing.assert_array_equal(again.bounds, column.bounds)
        np.testing.assert_array_equal(again.values, column.values, strict=True)
    assert len(beside) == len(spec.task.beside)


@pytest.mark.long
@pytest.mark.parametrize("row", ["dataloader", "mbaas"])
@pytest.mark.parametrize("task", ["detection", "audio"])
def test_a_row_for_real(task: str, row: str, folder: Path) -> None:
    settings = BenchSettings(task=task, epochs=1, cores=2, timeout_s=100.0)
    result = run_row(row_spec(settings, data_of(task, folder), row, 2, BATCH))
    assert result.error == ""
    assert (result.epochs, result.missing, result.repeated, result.spilled_bytes) == (4, 0, 0, 0)


def check_against_read_coco(data: Data) -> None:
    task = TASKS["detection"]
    samples, dataset = task.samples(data), task.dataset(data)
    assert [str(file) for file in samples.files] == [dataset.uri(sample) for sample in range(SAMPLES)]
    theirs = dataset.values(np.arange(SAMPLES))
    for name in task.beside:
        np.testing.assert_array_equal(samples.known[name].bounds, theirs[name].bounds)
        np.testing.assert_array_equal(samples.known[name].values, theirs[name].values, strict=True)


def test_boxes_are_those_that_read_coco_reads(folder: Path) -> None:
    check_against_read_coco(data_of("detection", folder))


def test_own_annotations_may_have_any_ids(folder: Path, tmp_path: Path) -> None:
    """Image ids do not start at 0 or ascend, category ids have gaps and no order, and one image has no objects."""
    data = data_of("detection", folder)
    assert data.annotations is not None
    said = json.loads(data.annotations.read_text())
    new = {image["id"]: 900_000 - 7 * image["id"] for image in said["images"]}
    for image in said["images"]:
        image["id"] = new[image["id"]]
    said["annotations"] = [each for each in said["annotations"] if each["image_id"] != 3]
    for each in said["annotations"]:
        each |= {"image_id": new[each["image_id"]], "category_id": 3 * each["category_id"]}
    said["categories"] = [{**each, "id": 3 * each["id"]} for each in reversed(said["categories"])]
    (tmp_path / "own.json").write_text(json.dumps(said))
    settings = BenchSettings(task="detection", data=tmp_path / "own.json", image_folder=data.folder)
    spec = RowSpec(replace(settings, cores=1, seed=5), "", 1, find_data(settings), BATCH)
    assert spec.samples().known["boxes"].lengths[3] == 0
    check_against_read_coco(spec.data)
    for row in (dataloader, dali):
        with row.loader(spec) as loader:
            seen = epoch_of(loader, 2)
        assert len(seen[3][1]) == 0
        assert any(len(boxes) for _, boxes, _ in seen.values())


def test_own_recordings_may_be_short_and_have_two_channels(tmp_path: Path) -> None:
    """A quarter of a second fills a quarter of the frames, with silence around it."""
    rng = np.random.default_rng(0)
    (tmp_path / "noise").mkdir()
    for number in range(SAMPLES):
        rate, seconds = ((8000, 0.25), (48_000, 1.5))[number % 2]
        sound = 0.1 * rng.standard_normal((round(rate * seconds), 1 + number % 3 % 2))
        soundfile.write(tmp_path / "noise" / f"{number:02d}.{('wav', 'flac', 'ogg')[number % 3]}", sound, rate)
    data = find_data(BenchSettings(task="audio", data=tmp_path))
    spec = RowSpec(BenchSettings(task="audio", cores=1, seed=5), "", 1, data, BATCH)
    for row in (prep, dali):
        with row.loader(spec) as loader:
            seen = epoch_of(loader, 0, SAMPLES if row is prep else BATCH)
        decibels = np.stack([seen[sample][0] for sample in range(SAMPLES)])
        is_loud = (decibels > -30) & (decibels != 0.0)  # DALI masks with 0.0
        loud = np.median(is_loud.mean(axis=1), axis=1)  # fraction of loud frames in a band
        assert np.median(loud[0::2]) == pytest.approx(0.25, abs=0.06)
        assert np.median(loud[1::2]) > 0.7


@pytest.mark.parametrize(
    ("task", "data", "image_folder", "said"),
    [
        (
            "audio",
            "none",
            None,
            "none does not exist; data must be a folder with a folder of recordings for each class",
        ),
        ("audio", "file.json", None, "file.json is no folder; data must be a folder with a folder of recordings"),
        ("audio", "folder", None, "no WAV, FLAC or other files of sound below the class folders of "),
        ("detection", "none", "folder", "none does not exist; data must be a JSON file of COCO's instances"),
        ("detection", "folder", "folder", "folder is a folder; data must be a JSON file of COCO's instances"),
        ("detection", "file.json", "none", "none does not exist; image_folder must be the folder of the images"),
        ("detection", "file.json", "folder", "file.json is no JSON of COCO's instances or key points: "),
        ("detection", "coco.json", "folder", "a.jpg"),
    ],
)
def test_wrong_data_gets_a_sentence(task: str, data: str, image_folder: str | None, said: str, tmp_path: Path) -> None:
    (tmp_path / "folder" / "class").mkdir(parents=True)
    (tmp_path / "file.json").write_text("[1, 2]")
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 3, 4]}
    (tmp_path / "coco.json").write_text(
        json.dumps(
            {"images": [{"id": 1, "file_name": "a.jpg"}], "annotations": [box], "categories": [{"id": 1, "name": "a"}]}
        )
    )
    images_in = None if image_folder is None else tmp_path / image_folder
    with pytest.raises(DatasetError) as raised:
        find_data(BenchSettings(task=task, data=tmp_path / data, image_folder=images_in))
    assert said in str(raised.value)


def test_the_extensions_are_those_of_the_readers() -> None:
    assert (images.EXTENSIONS, audio.EXTENSIONS) == (IMAGE_EXTENSIONS, AUDIO_EXTENSIONS)


def test_sounds_are_the_same_each_time_and_made_once(tmp_path: Path) -> None:
    told: list[str] = []

    def contents(root: str, seed: int) -> dict[str, bytes]:
        top = make_sounds(tmp_path / root, 12, seed=seed, report=told.append)
        return {path.relative_to(top).as_posix(): path.read_bytes() for path in sorted(top.rglob("*.*"))}

    first, again, other = contents("a", 1), contents("b", 1), contents("a", 2)
    assert first == again
    assert not set(first.values()) & set(other.values())
    assert {name.split("/")[0] for name in first} == set(CLASSES)
    assert {Path(name).suffix for name in first} == {".wav", ".flac"}
    assert len(told) == 3
    assert contents("a", 1) == first
    assert len(told) == 3
    for name in first:
        sound, rate = soundfile.read(tmp_path / "a" / "sounds-v1-n12-s1" / name)
        assert rate == 44_100
        assert 2 <= len(sound) / rate <= 4
        assert 0.02 < np.abs(sound).max() < 1
    wav, flac = (np.mean([len(first[name]) for name in first if name.endswith(end)]) for end in (".wav", ".flac"))
    assert 0.4 < flac / wav < 0.9, "the sound compresses like natural recordings"


@pytest.mark.parametrize("is_folder", [True, False])
def test_what_is_interrupted_leaves_nothing(is_folder: bool, tmp_path: Path) -> None:
    def write(path: Path) -> None:
        if is_folder:
            path.mkdir()
        (path / "a" if is_folder else path).write_text("half of it")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made_once(tmp_path / "data", write, "data", lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_without_soundfile_the_error_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soundfile", None)
    with pytest.raises(DatasetError, match="pip install soundfile"):
        make_sounds(tmp_path, 3, report=lambda _: None)
    assert list(tmp_path.iterdir()) == []


def test_objects_are_about_as_many_and_as_large_as_those_of_coco(folder: Path) -> None:
    data = data_of("detection", folder)
    assert make_annotations(data.folder, report=pytest.fail) == data.annotations
    spread = [
        TASKS["detection"].samples(Data(data.folder, make_annotations(data.folder, seed=seed, report=lambda _: None)))
        for seed in range(8)
    ]
    counts = np.concatenate([each.known["boxes"].lengths for each in spread])
    boxes = np.concatenate([each.known["boxes"].values for each in spread])
    assert 6 < counts.mean() < 8.5
    assert 0 in counts
    sides = np.sqrt((boxes[:, 2:] - boxes[:, :2]).prod(axis=1))
    assert all(0.2 < share < 0.45 for share in np.histogram(sides, [0, 32, 96, 500])[0] / len(sides))
    assert (boxes[:, :2] >= 0).all()
    assert (boxes[:, 2:] <= 600).all()
