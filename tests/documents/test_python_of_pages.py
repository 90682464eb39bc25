"""The Python of each page runs from top to bottom, on small data with the names that the page uses."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import page_data
import pytest
import torch

import mbaas
from mbaas import transforms as T
from mbaas.pictures.samples import first_samples
from mbaas.ray_cluster import resources
from support.pages import PAGES, ROOT, Block, blocks_of

Names = dict[str, Any]
"""Namespace of a page's programs."""

ELSEWHERE = {
    ("README.md", "tune.Tuner("): "tests/examples/test_readme.py, on a machine of its own: a whole search",
    ("docs/tutorial.md", "HSV2BGR"): "tests/documents/test_tutorial.py, with the programs below",
    ("docs/tutorial.md", "class Photos"): "tests/documents/test_tutorial.py",
    ("docs/tutorial.md", "mbaas.serve("): "tests/documents/test_tutorial.py",
    ("docs/how-to/ranks.md", "TorchTrainer("): "tests/documents/test_page_of_ranks.py, marked long",
    ("docs/how-to/detached.md", "detached=True"): "tests/cluster/test_detached.py, marked long",
    ("docs/how-to/disks.md", "shared=True"): "tests/service/test_disk_tier.py, with folders for disks",
    ("docs/how-to/tune.md", "WandbLoggerCallback"): "tests/tune_integration/test_trackers.py",
    ("docs/how-to/trainers.md", "LightningDataModule"): "tests/trainers/lightning_processes.py",
    ("docs/how-to/trainers.md", "trainer.add_callback"): "tests/examples/test_trainers.py",
    ("docs/how-to/trainers.md", "trainer.hyperparameter_search"): "tests/trainers/test_trainer_searches.py",
    ("docs/how-to/trainers.md", "TuneReportCheckpointCallback"): "tests/trainers/test_trainer_searches.py",
    ("docs/how-to/trainers.md", "loader_eval"): "tests/trainers/test_plain_torch.py",
    ("docs/how-to/trainers.md", "last.ckpt"): "tests/trainers/test_lightning.py, which has such a checkpoint",
    ("docs/how-to/other-searches.md", "import optuna"): "tests/documents/test_libraries_of_pages.py",
    ("docs/migration.md", "v2.Compose("): "tests/documents/test_libraries_of_pages.py",
    ("docs/augmentation.md", "T.Torchvision("): "tests/transforms/test_libraries.py, where torchvision is installed",
}
"""(page, text in one of its blocks) -> test that runs that block."""


@dataclass(frozen=True)
class Page:
    """Data and checks for the programs of a page.

    Attributes:
        prepare: writes the data of the programs into an empty folder.
        checks: text in a block -> check to run after that block.
    """

    prepare: Callable[[Path], None] = lambda _: None
    checks: Mapping[str, Callable[[Names], None]] = field(default_factory=dict)


def a_table(names: Names) -> None:
    data = names["data"]
    assert (len(data), data.class_names) == (3, ("cat", "dog"))
    assert data.values(np.arange(3))["age"].tolist() == [1, 2, 3]


def pipeline_with_boxes(names: Names) -> None:
    assert names["pipeline"].boxes == T.Boxes("boxes", format="xywh", beside=("classes",))


def pipeline_of_cifar(names: Names) -> None:
    assert names["cifar"].output_shape == (32, 32, 3)


def shards(names: Names) -> None:
    """The first call stored the listing of 128 shards; the second one reads two shards."""
    data = names["data"]
    assert (len(data), data.class_names) == (2, ("cat",))
    again = mbaas.read_webdataset("bucket/train-{000000..000127}.tar", listing="shards.parquet")
    assert again.labels(np.arange(128)).tolist() == list(range(128))


def records(names: Names) -> None:
    """The first call stored the listing of eight files; the second one reads one file."""
    assert (names["data"].class_names, names["data"].values(np.arange(1))["wing"].tolist()) == (("wren",), [4.5])
    again = mbaas.read_tfrecord("bucket/train-{00000..00007}-of-00008.tfrecord", listing="records.parquet")
    assert again.labels(np.arange(8)).tolist() == list(range(8))


def parquet_files(names: Names) -> None:
    assert names["data"].labels(np.arange(8)).tolist() == list(range(8))
    assert Path("shared/train").is_dir()


def hugging_face(names: Names) -> None:
    data = names["data"]
    assert (data.labels(np.arange(3)).tolist(), data.class_names) == ([0, 1, 1], ("rust", "healthy"))


def a_reader(names: Names) -> None:
    assert names["data"].values(np.arange(1))["year"].tolist() == [2024]


def parts(names: Names) -> None:
    train, validation, small, both = (names[name] for name in ("train", "validation", "small", "both"))
    kinds = {train.class_names[label] for label in train.labels(np.arange(len(train))).tolist()}
    ages = train.values(np.arange(len(train)))["age"]
    assert (kinds, int(ages.min())) == ({"cat", "dog"}, 18)
    assert len(train) == pytest.approx(0.8 * (len(train) + len(validation)), abs=2)
    assert (len(small), len(both)) == (1000, len(train) + 3)


def draws(names: Names) -> None:
    labels = names["even"].labels(np.arange(len(names["even"])))
    counts = np.bincount(labels)[np.unique(labels)]
    assert counts.max() - counts.min() <= 1
    assert len(names["drawn"]) == 50_000


def a_map(names: Names) -> None:
    """The pipeline hides tokens when samples are prepared as in a prep worker."""
    page_data.write_image(Path("a.png"))
    Path("text.jsonl").write_text(json.dumps({"uri": "a.png", "tokens": [7] * 200}))
    found = first_samples(mbaas.read_manifest("text.jsonl"), names["pipeline"], count=1)
    hidden = int((np.asarray(found.known["tokens"]) == 0).sum())
    assert 10 < hidden < 60  # 15 % of 200 is 30


def three_epochs(names: Names) -> None:
    assert (names["epoch"], len(names["batch"]["image"])) == (2, 4)
    assert mbaas.connect("train").status().inexact_epochs == 0


def annotations(names: Names) -> None:
    data = names["data"]
    assert (len(data), data.class_names) == (12, ("cat",))
    assert Path("train.parquet").exists()
    page = (ROOT / "docs" / "detection.md").read_text()
    told = re.findall(r"^\| (`\w+`.*?) \|", page, re.MULTILINE)
    listed = [name for cell in told for name in re.findall(r"`(\w+)`", cell)]
    there = [name for name in listed if name not in ("keypoints", "segmentation")]
    assert [field.name for field in data.fields] == there


def served(names: Names) -> None:
    assert names["pipeline"].output_shape == (512, 512, 3)
    assert mbaas.connect("train").status().samples == len(names["train"])


def objects(names: Names) -> None:
    image, batch, targets = names["image"], names["batch"], names["targets"]
    assert torch.bincount(image, minlength=len(batch["image"])).tolist() == batch["boxes_bounds"].diff().tolist()
    assert all(len(target["boxes"]) == len(target["labels"]) for target in targets)


def masks(names: Names) -> None:
    known = names["pipeline"].known(names["data"].fields)
    assert [(field.name, field.shape) for field in known][2] == ("masks", (None, 256, 256))


def first_of(feed: str, **options: Any) -> dict[str, Any]:
    with mbaas.join(feed, format="numpy", **options) as loader:
        return {name: np.array(values) for name, values in next(iter(loader)).items()}


def sounds(names: Names) -> None:
    for feed, samples in (("train", 18), ("validation", 2)):
        batch = first_of(feed)
        assert (batch["audio"].shape, batch["audio"].dtype) == ((samples, 101, 64), np.float32)


def utterances(names: Names) -> None:
    with names["loader"] as loader:
        batch = next(iter(loader))
    assert batch["audio"].shape == (16, int(batch["audio_length"].max()), 80)


def scans(names: Names) -> None:
    assert first_of("scans")["array"].shape == (2, 64, 64, 64)


def volumes(names: Names) -> None:
    batch = first_of("cosmo")
    assert (batch["volume"].dtype, batch["volume"].shape) == (np.int16, (4, 32, 32, 32, 4))
    assert batch["parameters"].shape == (4, 4)


def clouds(names: Names) -> None:
    with names["batches"] as loader:
        batch = next(iter(loader))
    assert (batch["points"].shape, batch["points_bounds"].diff().sort().values.tolist()) == ((11, 3), [5, 6])


def steps(names: Names) -> None:
    seen: list[int] = []
    assert 0 < names["seconds_per_step"](seen.append, iter(range(50))) < 0.1
    assert seen == list(range(50))


def the_rest(names: Names) -> None:
    """12 samples in minibatches of 4: two were read before the state was saved."""
    assert names["rest"] == 4


def as_torchvision(names: Names) -> None:
    assert names["image"].shape[1:] == (3, 64, 64)
    assert names["image"].dtype == torch.float32


def feed_has(names: Names) -> None:
    assert names["run_config"].callbacks[0]._names == ("train", "validation")


SHOWN = {
    "README.md": Page(),
    "docs/loading.md": Page(checks={"seconds_per_step": steps}),
    "docs/tutorial.md": Page(),
    "docs/migration.md": Page(page_data.for_classes, {"mbaas.join(": as_torchvision}),
    "docs/how-to/serve.md": Page(page_data.for_classes),
    "docs/how-to/disks.md": Page(),
    "docs/how-to/images.md": Page(
        page_data.for_images, {'read_manifest("s3': a_table, "T.Boxes(": pipeline_with_boxes}
    ),
    "docs/how-to/shards.md": Page(
        page_data.for_shards,
        {
            "read_webdataset(": shards,
            "read_tfrecord(": records,
            "read_parquet(": parquet_files,
            "read_huggingface(": hugging_face,
        },
    ),
    "docs/how-to/subsets.md": Page(page_data.for_subsets, {"adults": parts, "balance(": draws}),
    "docs/how-to/own-data.md": Page(page_data.for_own_data, {"read_zip(": a_reader}),
    "docs/how-to/own-transforms.md": Page(checks={"mask_tokens": a_map}),
    "docs/how-to/loader.md": Page(page_data.with_feed, {'consumer="me"': three_epochs}),
    "docs/how-to/resume.md": Page(page_data.with_feed, {"json.loads": the_rest}),
    "docs/how-to/tune.md": Page(checks={'FeedCallback("train", "validation")': feed_has}),
    "docs/how-to/other-searches.md": Page(page_data.with_feed),
    "docs/how-to/ranks.md": Page(),
    "docs/how-to/trainers.md": Page(),
    "docs/how-to/detached.md": Page(),
    "docs/detection.md": Page(
        page_data.for_detection,
        {
            "instances_train2017": annotations,
            "RandomZoomOut": served,
            "repeat_interleave": objects,
            "T.Masks()": masks,
        },
    ),
    "docs/sound.md": Page(page_data.for_sound, {'"commands/"': sounds, "utterances": utterances}),
    "docs/augmentation.md": Page(checks={"cifar": pipeline_of_cifar}),
    "docs/arrays.md": Page(page_data.for_arrays, {'"scans"': scans, '"cosmo"': volumes, "packed": clouds}),
}
"""All pages with Python."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty working directory on a simulated machine with two CPUs; all feeds are stopped after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(resources, "cpus", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["pasted.py"])
    monkeypatch.syspath_prepend(ROOT / "examples")
    yield tmp_path
    for feed in mbaas.feeds():
        feed.stop()


@pytest.mark.parametrize("name", SHOWN)
def test_the_python_of_a_page_runs(name: str, ray_clean: None, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = SHOWN[name]
    page.prepare(here)
    if name == "docs/how-to/shards.md":  # tests cannot reach the Hugging Face hub: a saved copy replaces it
        hub = datasets.load_from_disk("bucket/beans")
        monkeypatch.setattr(datasets, "load_dataset", {"AI-Lab-Makerere/beans": hub}.get)
    names: Names = {"__name__": "pasted"}
    left = dict(page.checks)
    for block in here_only(name):
        adapted(block).run(names)
        for text in [text for text in left if text in block.text]:
            left.pop(text)(names)
    assert not left, "no code block contains these"
    names.clear()  # functions keep this namespace alive, and it keeps minibatches alive


def here_only(name: str) -> list[Block]:
    """The Python blocks of a page that no other test runs."""
    others = [text for page, text in ELSEWHERE if page == name]
    return [each for each in blocks_of(ROOT / name, "python") if not any(text in each.text for text in others)]


def adapted(block: Block) -> Block:
    """The block with the replacements of `page_data.INSTEAD`."""
    text = block.text
    for absent, present in page_data.INSTEAD.items():
        text = text.replace(absent, present)
    return Block(block.page, block.line, block.language, text)


def test_all_python_that_is_shown_runs_here_or_elsewhere() -> None:
    assert {page.relative_to(ROOT).as_posix() for page in PAGES if blocks_of(page, "python")} == set(SHOWN)
    for page, text in ELSEWHERE:
        assert sum(text in block.text for block in blocks_of(ROOT / page, "python")) == 1, (page, text)
    for reason in ELSEWHERE.values():
        assert (ROOT / reason.split(",")[0]).is_file()


def test_the_pairs_of_points_of_people_are_left_and_right() -> None:
    """The order of the key points is COCO's."""
    sides = ["eye", "ear", "shoulder", "elbow", "wrist", "hip", "knee", "ankle"]
    points = ["nose", *(f"{side} {part}" for part in sides for side in ("left", "right"))]
    (swaps,) = re.findall(r"`swaps=(\[.*?\])`", (ROOT / "docs" / "detection.md").read_text())
    pairs = T.Keypoints(swaps=json.loads(swaps.replace("(", "[").replace(")", "]"))).swaps
    told = [(points[one], points[other]) for one, other in pairs]
    assert told == [(f"left {part}", f"right {part}") for part in sides]
