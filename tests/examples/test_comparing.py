"""The DataLoader that examples compare a feed with delivers the same minibatch contents as the feed."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import mbaas
from mbaas import transforms as T

EXAMPLES = Path(__file__).parents[2] / "examples"
SAMPLES = 13
BATCH = 4
"""13 = 3 x 4 + 1: the last minibatch has one sample."""


def imported(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of the examples, imported as their programs import it."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module(name)


def epoch_of(loader: Iterable[dict[str, Any]]) -> dict[int, dict[str, torch.Tensor]]:
    """Sample id -> field values in one epoch, after a check that each sample occurs once."""
    seen: dict[int, dict[str, torch.Tensor]] = {}
    for batch in loader:
        for row, sample in enumerate(batch["sample_id"].tolist()):
            assert sample not in seen
            spans = {
                name.removesuffix("_bounds"): slice(*bounds[row : row + 2].tolist())
                for name, bounds in batch.items()
                if name.endswith("_bounds")
            }
            values = {name: value for name, value in batch.items() if not name.endswith("_bounds")}
            seen[sample] = {name: value[spans.get(name, row)].clone() for name, value in values.items()}
    assert sorted(seen) == list(range(SAMPLES))
    return seen


def shapes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[mbaas.Dataset, T.Pipeline]:
    annotations = imported("shapes", monkeypatch).write_shapes(folder, SAMPLES)
    data = mbaas.read_coco(annotations, folder / "images", fields=["boxes", "labels"])
    resize = T.Resize((32, 32)), T.RandomHorizontalFlip(), T.Normalize((0.5, 0.5, 0.5), (0.2, 0.3, 0.4))
    return data, T.Pipeline([T.DecodeImage(), T.RandomIoUCrop(), *resize], boxes=T.Boxes(beside=("labels",)))


def sounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[mbaas.Dataset, T.Pipeline]:
    make = importlib.import_module("mbaas.tools.bench.tasks.audio").make_sounds
    data = mbaas.read_audio(make(folder, SAMPLES, report=lambda _: None))
    return data, T.Pipeline([T.DecodeAudio(8000), T.RandomCrop(4000), T.MelSpectrogram(n_fft=256, n_mels=16)])


@pytest.mark.parametrize("source", [shapes, sounds])
def test_a_loader_of_its_own_gives_a_trial_what_a_feed_gives(
    ray_clean: None, source: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names, shapes, dtypes and bytes are equal in both epochs, for the same random draws."""
    data, pipeline = source(tmp_path, monkeypatch)
    own = imported("comparing", monkeypatch).OwnLoader(data, pipeline, BATCH, shuffle=True)
    with mbaas.serve("own", data, pipeline, batch_size=BATCH, prep_workers=1, engine="cpu"):
        with mbaas.join("own", collate="packed") as loader:
            assert (len(own), own.class_names) == (len(loader), loader.class_names)
            for _ in range(2):
                wanted, got = epoch_of(loader), epoch_of(own)
                for sample, values in wanted.items():
                    assert got[sample].keys() == values.keys()
                    for name, value in values.items():
                        torch.testing.assert_close(got[sample][name], value, rtol=0, atol=0)
    assert own.samples == 2 * SAMPLES


def test_a_damaged_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, pipeline = shapes(tmp_path, monkeypatch)
    (tmp_path / "images" / "5.jpg").write_bytes(b"x" * (tmp_path / "images" / "5.jpg").stat().st_size)
    own = imported("comparing", monkeypatch).OwnLoader(data, pipeline, BATCH, shuffle=False)
    with pytest.raises(ValueError, match=r"5\.jpg: "):
        epoch_of(own)


@pytest.mark.parametrize(
    ("example", "arguments", "said"),
    [
        ("audio_classification", ["--data", "none"], "none"),
        ("object_detection", ["--data", "own.json", "--image-folder", "."], "own.json is no JSON of COCO's instances"),
        ("object_detection", ["--data", "own.json"], "--data, COCO's annotations, and --image-folder, of the images"),
    ],
)
def test_wrong_data_is_one_sentence(
    example: str,
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own.json").write_text("{}")
    monkeypatch.setattr(os, "environ", os.environ.copy())  # examples set variables for Ray, which is already imported
    monkeypatch.setattr(sys, "argv", [f"{example}.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        imported(example, monkeypatch).main()
    out, err = capsys.readouterr()
    assert (ended.value.code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"{example}.py: ")
    assert said in err
