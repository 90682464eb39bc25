"""The YAML of each page is accepted by its reader, and the data and pipelines in it work."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import page_data
import pytest
import yaml

import mbaas
from mbaas import transforms as T
from mbaas.base import files
from mbaas.cli import feed_file
from mbaas.cli.what_if import read_machines
from mbaas.model.gpu_stages import GpuRates, OnGpu
from mbaas.pictures.samples import Preview, first_samples
from mbaas.tools.simulator import catalog
from support.pages import PAGES, ROOT, Block, blocks_of

Text = str


def a_feed(text: Text, here: Path) -> tuple[feed_file.FeedConfig, Preview]:
    """Read a feed file, list its data and prepare two samples; options that the page omits are added."""
    said = yaml.safe_load(text)
    rest = {"name": "train", "batch_size": 2, "pipeline": ["DecodeImage"]}
    lines = [f"{key}: {value}" for key, value in rest.items() if key not in said]
    (here / "feed.yaml").write_text("\n".join([text, *lines]))
    config = feed_file.load(here / "feed.yaml")
    found = first_samples(config.data.read(), config.pipeline, count=2)
    assert (len(found.samples), found.bad) == (2, ())
    return config, found


def of_tutorial(text: Text, here: Path) -> None:
    page_data.for_tutorial(here)
    config, found = a_feed(text, here)
    assert (config.name, np.shape(found.samples)) == ("photos", (2, 64, 64, 3))


def of_disks(text: Text, here: Path) -> None:
    page_data.for_disks(here)
    config, _ = a_feed(text, here)
    assert config.options.disk == (mbaas.Disk(path="/scratch/mbaas", max_bytes=200 * 10**9),)


def of_subsets(text: Text, here: Path) -> None:
    page_data.for_subsets(here)
    config, found = a_feed(text, here)
    assert (len(config.data.read()), set(found.known)) == (1000, {"label", "age", "weight"})


def of_detection(text: Text, here: Path) -> None:
    page_data.for_detection(here)
    config, found = a_feed(text, here)
    assert np.shape(found.samples) == (2, 512, 512, 3)
    assert config.pipeline.boxes == T.Boxes(beside=("labels", "area", "iscrowd"))


def of_sound(text: Text, here: Path) -> None:
    page_data.for_sound(here)
    _, found = a_feed(text, here)
    assert np.shape(found.samples) == (2, 101, 64)


def of_arrays(text: Text, here: Path) -> None:
    page_data.for_arrays(here)
    shutil.copy(here / "scans" / "1.raw", here / "scans" / "2.raw")
    _, found = a_feed(text, here)
    assert np.shape(found.samples) == (2, 64, 64, 64)


def prices(text: Text, here: Path, *gpus: Text) -> None:
    """The first block is a price list, the second one contains measurements of a GPU."""
    (here / "prices.yaml").write_text(text)
    assert [(machine.name, machine.cores) for machine in read_machines(here / "prices.yaml")] == [
        ("small", 8), ("large", 32)
    ]  # fmt: skip
    for gpu in gpus:
        (here / "gpu.yaml").write_text(gpu)
        assert files.read(here / "gpu.yaml").to(GpuRates).decode == OnGpu(
            per_s=3200, step_per_s=900, cpu_s=0.0002, memory_bytes=3 * 10**9
        )


def systems(text: Text, here: Path, *cores: Text) -> None:
    """The first block is a whole file, the second one a part of its ``machine`` section."""
    whole: dict[str, Any] = yaml.safe_load(text)
    for part in cores:
        whole["machine"] |= yaml.safe_load(part)
    (here / "my.yaml").write_text(text if not cores else yaml.safe_dump(whole))
    assert (catalog.read(here / "my.yaml").machine.cores is not None) == bool(cores)


READ: dict[str, Callable[..., None]] = {
    "docs/tutorial.md": of_tutorial,
    "docs/how-to/subsets.md": of_subsets,
    "docs/how-to/disks.md": of_disks,
    "docs/detection.md": of_detection,
    "docs/sound.md": of_sound,
    "docs/arrays.md": of_arrays,
    "docs/analyze.md": prices,
    "docs/simulate.md": systems,
}
"""All pages with YAML -> reader of the page's first block, with its other blocks as further arguments."""


@pytest.mark.parametrize("name", READ)
def test_yaml_is_read(name: str, tmp_path: Path) -> None:
    first, *others = (block.text for block in blocks_of(ROOT / name, "yaml"))
    READ[name](first, tmp_path)
    if others:
        READ[name](first, tmp_path, *others)


def test_all_yaml_that_is_shown_is_read() -> None:
    shown: list[Block] = [block for page in PAGES for block in blocks_of(page, "yaml")]
    assert {block.page for block in shown} == set(READ)
