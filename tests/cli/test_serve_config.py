"""`mbaas serve` reads its file, and explains mistakes in it."""

from __future__ import annotations

import pickle
import re
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import yaml
from commandline import mbaas

import mbaas.transforms as T
from mbaas.cli.feed_file import load, schema
from mbaas.errors import ConfigError
from mbaas.settings import GROUPS, FeedOptions, Timeouts

GOOD = """\
name: train
data: images
batch_size: 64
pipeline:
  - DecodeImage
  - RandomResizedCrop: {size: 224, scale: [0.2, 1.0]}
  - Resize: [16, 24]
  - Normalize:
      mean: [0.5, 0.5, 0.5]
      std: [0.2, 0.2, 0.2]
cache_bytes: 1.5 GiB
staging_bytes: 500 MB
timeouts: {lease_s: 30}
drop_last: true
engine:
"""

OF_ARRAYS = {"AmplitudeToDB", "CropOrPad", "DecodeArray", "DecodeAudio", "MelSpectrogram", "RandomCrop", "SpecAugment"}
"""Transforms of data other than images, with documentation pages of their own."""

OF_OBJECTS = {"RandomIoUCrop", "RandomZoomOut"}
"""Transforms that depend on boxes, with a documentation page of their own."""

OF_LIBRARIES = {"Albumentations", "Torchvision"}
OF_AUGMENTATION = {
    *("AugMix", "AutoAugment", "GaussianBlur", "Pad", "RandAugment", "RandomAdjustSharpness", "RandomAffine"),
    *("RandomAutocontrast", "RandomEqualize", "RandomErasing", "RandomGrayscale", "RandomInvert", "RandomPerspective"),
    *("RandomPosterize", "RandomRotation", "RandomSolarize", "RandomVerticalFlip", "ScaleJitter", "ToFloat"),
    "TrivialAugmentWide",
}
"""Further transforms of images, with a documentation page of their own."""

STEPS = {name for name in T.__all__ if issubclass(getattr(T, name), T.Transform)} - {"Transform"}

Write = Callable[[str], Path]


def test_pipelines_of_sound_and_arrays_are_understood(write: Write) -> None:
    start = GOOD.partition("pipeline:")[0]
    sound = """\
pipeline:
  - DecodeAudio: {rate: 8000, max_s: 3}
  - RandomCrop: 4000
  - MelSpectrogram: {n_mels: 40, hop_length: 160}
  - AmplitudeToDB
  - SpecAugment: {n_time_masks: 1, time_mask_param: 9, n_freq_masks: 1, freq_mask_param: 5}
"""
    steps = [T.DecodeAudio(8000, max_s=3), T.RandomCrop(4000), T.MelSpectrogram(n_mels=40, hop_length=160)]
    assert load(write(start + sound)).pipeline == T.Pipeline([*steps, T.AmplitudeToDB(), T.SpecAugment(1, 9, 1, 5)])
    arrays = """\
pipeline:
  - DecodeArray: {format: raw, dtype: int16, shape: [null, 3, 4], longest: 50}
  - CropOrPad: [10, 3]
"""
    decode = T.DecodeArray("raw", None, "int16", (None, 3, 4), 50)
    assert load(write(start + arrays)).pipeline == T.Pipeline([decode, T.CropOrPad((10, 3))])
    for text in (sound, arrays):
        jsonschema.validate(yaml.safe_load(start + text), schema())
    line = len(start.splitlines()) + 2
    for wrong, sentence in {
        "  - DecodeAudio: {rate: 0}": f"{line}: DecodeAudio's rate must be a whole number in [1, 10,000,000], got 0",
        "  - DecodeAudio": f"{line - 1}: pipeline: samples of this pipeline may have any length: give DecodeAudio(",
        "  - SpecAugment: 1": f"{line}: SpecAugment needs n_time_masks, time_mask_param, n_freq_masks, freq_mask_param",
        "  - DecodeArray\n  - Resize: 8": f"{line - 1}: pipeline: Resize(size=8) is a transform of images, but ",
    }.items():
        with pytest.raises(ConfigError, match=re.escape(sentence)):
            load(write(f"{start}pipeline:\n{wrong}\n"))


def test_file_is_understood(write: Write) -> None:
    config = load(write(GOOD))
    assert config.name == "train"
    assert config.data.where == str(write(GOOD).parent / "images")
    assert config.pipeline == T.Pipeline(
        [
            T.DecodeImage(),
            T.RandomResizedCrop(224, scale=(0.2, 1.0)),
            T.Resize((16, 24)),
            T.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)),
        ]
    )
    assert config.options == FeedOptions(
        batch_size=64,
        cache_bytes=3 << 29,
        staging_bytes=500_000_000,
        timeouts=Timeouts(lease_s=30.0),
        drop_last=True,
    )


def test_name_on_the_command_line_wins(write: Write) -> None:
    assert load(write(GOOD), name="val").name == "val"
    assert load(write(GOOD.replace("name: train\n", "")), name="val").name == "val"


def test_uri_stays_as_it_is(write: Write) -> None:
    assert load(write(GOOD.replace("data: images", "data: s3://bucket/train"))).data.where == "s3://bucket/train"


def test_example_is_valid() -> None:
    example = Path(__file__).parents[2] / "examples" / "feed.yaml"
    assert load(example).data.where == str(example.parent / "images")


def test_example_is_valid_with_all_that_is_commented_out(write: Write, tmp_path: Path) -> None:
    """Each option in the example exists, and no option is missing."""
    (tmp_path / "my_prep.py").write_text("def sharpen(image, rng): return image\n")
    example = (Path(__file__).parents[2] / "examples" / "feed.yaml").read_text()
    shown = re.sub(r"^( *)# (?=( *- |   )?( *)[A-Za-z_]+:)", r"\1", example, flags=re.MULTILINE)
    given = yaml.safe_load(shown)
    for options, section in [(FeedOptions, given), *((kind, given[group]) for group, kind in GROUPS.items())]:
        assert {field.name for field in fields(options)} <= set(section)
    with pytest.raises(ConfigError, match=r"Map.* may move pixels in any way, and masks"):
        load(write(shown))
    config = load(write(re.sub("^masks:.*", "", shown, flags=re.MULTILINE)))
    assert (config.options.timeouts.patience_s, config.options.staging.readahead_bytes) == (30.0, 64 << 20)
    assert {
        type(t).__name__ for t in config.pipeline.transforms
    } == STEPS - OF_ARRAYS - OF_OBJECTS - OF_AUGMENTATION - OF_LIBRARIES


def test_the_page_about_augmentation_names_all_and_each_can_stand_in_a_file(write: Write) -> None:
    text = (Path(__file__).parents[2] / "docs" / "augmentation.md").read_text()
    assert set(re.findall(r"`(\w+)`", text)) >= OF_AUGMENTATION
    start = GOOD.partition("pipeline:")[0]
    given = {"GaussianBlur": 3, "Pad": 1, "RandomAdjustSharpness": 2, "RandomAffine": 9, "RandomPosterize": 4}
    given |= {"RandomRotation": {"degrees": [-9, 9], "interpolation": "bilinear", "fill": [1, 2, 3]}}
    given |= {"RandomSolarize": 128, "ScaleJitter": {"target_size": [32, 32]}}
    last = {"ToFloat"}
    steps = [{name: given[name]} if name in given else name for name in sorted(OF_AUGMENTATION - last)]
    steps = ["DecodeImage", *steps, {"RandomCrop": {"size": 16, "padding": 4}}, *last]
    config = load(write(start + yaml.safe_dump({"pipeline": steps})))
    assert {type(t).__name__ for t in config.pipeline.transforms} == OF_AUGMENTATION | {"DecodeImage", "RandomCrop"}


@pytest.mark.parametrize(("page", "steps"), [("sound.md", 5), ("arrays.md", 2)])
def test_the_pages_about_sound_and_arrays_show_files_that_are_valid(page: str, steps: int, write: Write) -> None:
    text = (Path(__file__).parents[2] / "docs" / page).read_text()
    (shown,) = re.findall(r"^```yaml\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    config = load(write(f"name: train\nbatch_size: 8\n{shown}"))
    assert len(config.pipeline.transforms) == steps
    named = set(re.findall(r"`(\w+)[`(]", text))
    assert named & STEPS >= OF_ARRAYS - ({"DecodeArray"} if page == "sound.md" else {"DecodeAudio", "MelSpectrogram"})


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ("batch_size: 64", "batch_size: sixty", "3: batch_size must be a whole number, got 'sixty' (text)"),
        ("batch_size: 64", "batch_size: 64.0", "3: batch_size must be a whole number, got 64.0 (a number)"),
        ("batch_size: 64", "batch_size: true", "3: batch_size must be a whole number, got true (true or false)"),
        ("batch_size: 64", "batch_size: 0", "3: batch_size must be at least 1, got 0 (a whole number)"),
        ("batch_size: 64", "batchsize: 64", "3: unknown key 'batchsize'; did you mean 'batch_size'?"),
        ("batch_size: 64\n", "", "1: the file lacks 'batch_size'"),
        ("batch_size: 64", "name: other", "3: 'name' is given twice, first in line 1"),
        ("data: images", "data: [images]", "2: data must be text, got [images] (a list)"),
        ("name: train", "name: 7", "1: name must be text, got 7 (a whole number)"),
        ("name: train", "name: a/b", "1: name: a feed's name must be non-empty, without slashes"),
        ("1.5 GiB", "much", "11: cache_bytes must be a size such as '2 GiB' or '500 MB', or a whole number of bytes"),
        ("1.5 GiB", "-1", "11: cache_bytes must be a size such as"),
        ("drop_last: true", "drop_last: 1", "14: drop_last must be true or false, got 1 (a whole number)"),
        (
            "lease_s: 30",
            "lease_s: soon",
            "13: timeouts.lease_s must be a time such as '30 s', '1.6 ms' or '2 min', or a",
        ),
        ("lease_s: 30", "lease_s: 0", "13: timeouts.lease_s must be above 0 seconds, got 0 (a whole number)"),
        ("lease_s: 30", "lease: 30", "13: unknown key 'lease'; did you mean 'lease_s'?"),
        ("{lease_s: 30}", "30", "13: timeouts must be 'key: value' lines, got 30 (a whole number)"),
        ("timeouts: {lease_s: 30}", "lease_s: 30", "13: unknown key 'lease_s'; it is 'timeouts.lease_s'"),
        ("timeouts: {lease_s: 30}", "threads: 4", "13: threads must be 'key: value' lines, got 4 (a whole number)"),
        ("timeouts: {lease_s: 30}", "ahead_blocks: 2", "13: unknown key 'ahead_blocks'; it is 'staging.ahead_blocks'"),
        ("timeouts: {lease_s: 30}", "disk: {path: /x}", "13: disk lacks 'max_bytes'"),
        ("timeouts: {lease_s: 30}", "scaling: {stall_low: 0.2}", "13: scaling.stall_low must be below"),
        ("engine:", "engine: gpu", "15: engine must be one of 'auto', 'cpu', 'dali', got 'gpu' (text)"),
        ("- DecodeImage", "- DecodeJpeg", "5: unknown transform 'DecodeJpeg'; did you mean 'DecodeImage'?"),
        (
            "- DecodeImage",
            "- Blur",
            "5: unknown transform 'Blur'; known are Albumentations, AmplitudeToDB, AugMix",
        ),
        (
            "- DecodeImage",
            "- DecodeImage: big",
            "5: DecodeImage's max_pixels must be a whole number in [1, 100,000,000]",
        ),
        ("- DecodeImage", "- 3", "5: a transform must be a name, or 'name: parameters', got 3 (a whole number)"),
        (
            "  - DecodeImage\n",
            "",
            "4: pipeline: a pipeline's first transform must be DecodeImage, DecodeAudio or DecodeArray, got Random",
        ),
        ("{size: 224,", "{sise: 224,", "6: RandomResizedCrop has no parameter 'sise'; did you mean 'size'?"),
        ("{size: 224, ", "{", "6: RandomResizedCrop needs size, got scale"),
        (
            "{size: 224,",
            "{size: -1,",
            "6: RandomResizedCrop's size must be a whole number of pixels in [1, 65,535], got -1",
        ),
        (
            "- DecodeImage",
            "- DecodeImage\n  - ColorJitter:\n      brightness: 0.2\n      hue: 0.7",
            "8: ColorJitter's hue must be in [0, 0.5]",
        ),
        ("- DecodeImage", "- DecodeImage\n  - Resize:\n\n      size: [1, 2, 3]", "8: Resize's size, unless it is one"),
        ("- DecodeImage", "- DecodeImage\n  - Map:\n      fn: my:nothing", "7: cannot find Map's fn 'my:nothing'"),
        (
            "- DecodeImage",
            "- DecodeImage\n  - Map:\n      fn: 3",
            "7: Map's fn must be a function fn(image, rng), got 3",
        ),
        ("- DecodeImage", "- DecodeImage\n  - Torchvision", "6: Torchvision needs transform, got no parameter"),
        ("- DecodeImage", "- DecodeImage\n  - Torchvision: my:nothing", "6: cannot find Torchvision's transform 'my:"),
        ("- DecodeImage", "- DecodeImage\n  - Map: my:nothing", "6: cannot find Map's fn 'my:nothing'"),
        ("- DecodeImage", "- DecodeImage\n  - Map: sharpen", "6: Map's fn must be 'module:function', got 'sharpen'"),
        ("- DecodeImage", "- [DecodeImage", "not valid YAML"),
    ],
)
def test_mistakes_are_named(write: Write, before: str, after: str, sentence: str) -> None:
    assert before in GOOD
    path = write(GOOD.replace(before, after, 1))
    with pytest.raises(ConfigError) as caught:
        load(path)
    message = str(caught.value)
    assert message.startswith(f"{path}:")
    assert sentence in message
    assert "\n" not in message


@pytest.mark.parametrize("text", ["", "just text", "- a\n- list", "\tname: x", "name: 2026-02-31"])
def test_other_files_are_refused(write: Write, text: str) -> None:
    with pytest.raises(ConfigError, match=r"feed\.yaml"):
        load(write(text))


@pytest.mark.parametrize(
    ("step", "code", "made"),
    [
        ("Map", "def change(image, rng):\n    return 255 - image\n", np.full((12, 16, 3), 255)),
        ("Torchvision", "def change(image):\n    return image.resize((8, 6))\n", np.zeros((6, 8, 3))),
    ],
)
def test_function_beside_the_file_reaches_workers_by_value(
    write: Write, tmp_path: Path, step: str, code: str, made: Any
) -> None:
    (tmp_path / "beside_me.py").write_text(code)
    config = load(write(GOOD.replace("- DecodeImage", f"- DecodeImage\n  - {step}: beside_me:change")))
    from ray import cloudpickle

    shipped = cloudpickle.dumps(config.pipeline)
    del sys.modules["beside_me"]  # a worker does not have the file's folder on its path
    fn = pickle.loads(shipped).transforms[1].fn
    np.testing.assert_array_equal(fn(np.zeros((12, 16, 3), np.uint8), np.random.default_rng(0)), made)


@pytest.mark.slow
def test_command_ends_with_2(write: Write, tmp_path: Path) -> None:
    """The file is checked before Ray is contacted, and one sentence is all the output."""
    path = write(GOOD.replace("batch_size: 64", "batch_size: sixty"))
    done = mbaas("serve", path, RAY_ADDRESS="127.0.0.1:1")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"error: {path}:3: batch_size must be a whole number, got 'sixty' (text)\n"
    missing = mbaas("serve", tmp_path / "none.yaml")
    assert missing.returncode == 2
    assert missing.stderr == f"error: cannot read {tmp_path / 'none.yaml'}: No such file or directory\n"
    folder = mbaas("serve", tmp_path)
    assert folder.returncode == missing.returncode
    assert f"{tmp_path} is a folder; mbaas init {tmp_path} writes a feed file" in " ".join(folder.stderr.split())
