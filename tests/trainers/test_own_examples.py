"""Examples and checks of Ray Tune, Lightning and accelerate train on feeds: only their DataLoaders are replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray import tune

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from tune_integration import FeedCallback, get_loader

SAMPLES, TRIALS, EPOCHS = 203, 2, 2

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # trials run without this folder on their path


def pair(batch: dict[str, Any]) -> tuple[Any, Any]:
    """Return images of one channel, and labels. The example calls ``view``, which refuses channels-last memory."""
    return batch["image"][:, :1].contiguous(), batch["label"]


def train(config: dict[str, Any]) -> None:
    try:
        import torchvision  # noqa: F401
    except ImportError:  # the example imports it for the DataLoaders that are replaced
        sys.modules["torchvision"] = stub = ModuleType("torchvision")
        stub.__dict__.update(datasets=None, transforms=None)
    from ray.tune.examples import mnist_pytorch as example

    def get_data_loaders() -> tuple[mbaas.Loader, mbaas.Loader]:
        return get_loader("digits", start="epoch", batch_fn=pair), get_loader("test-digits", batch_fn=pair)

    example.get_data_loaders = get_data_loaders
    example.train_mnist(config)


@pytest.mark.slow
def test_the_mnist_example_of_tune(ray_clean: None, tmp_path: Path) -> None:
    scale = T.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    data, options = synthetic(SAMPLES, height=28, width=28), {"batch_size": 64, "prep_workers": 1}
    training = mbaas.serve("digits", data, T.Pipeline([T.DecodeImage(), T.RandomCrop(28), scale]), **options)
    testing = mbaas.serve("test-digits", data, T.Pipeline([T.DecodeImage(), scale]), shuffle=False, **options)
    with training as feed, testing:
        results = tune.Tuner(
            tune.with_resources(train, {"cpu": 0.25}),
            param_space={"lr": tune.grid_search([0.001, 0.01]), "momentum": 0.5},
            run_config=tune.RunConfig(
                storage_path=str(tmp_path),
                stop={"training_iteration": EPOCHS},
                callbacks=[FeedCallback("digits", "test-digits")],
                verbose=0,
            ),
        ).fit()
        assert results.num_errors == 0
        assert [0 <= result.metrics["mean_accuracy"] <= 1 for result in results] == [True] * TRIALS
        loaded = [result.metrics["mbaas"]["digits"] for result in results]
        assert [each["delivered_samples"] for each in loaded] == [EPOCHS * SAMPLES] * TRIALS
        assert sum(each["prepared_samples"] for each in loaded) == EPOCHS * SAMPLES
        rows = feed.ledger().to_pylist()
        assert rows
        assert all(row["exact"] and row["samples"] == SAMPLES for row in rows)


def train_boring(config: dict[str, Any]) -> None:
    """Lightning's own model for bug reports: a linear layer of 32 numbers, here the first pixels of an image."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.demos.boring_classes import BoringModel
    from ray.tune.integration.pytorch_lightning import TuneReportCheckpointCallback

    def first_pixels(batch: dict[str, Any]) -> torch.Tensor:
        return batch["image"].flatten(1)[:, :32]

    class Model(BoringModel):  # the original reports nothing that Tune could read
        def training_step(self, batch: torch.Tensor, number: int) -> Any:
            self.log("loss", (out := super().training_step(batch, number))["loss"])
            return out

    report = TuneReportCheckpointCallback(["loss"], on="train_epoch_end", save_checkpoints=False)
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_model_summary", "limit_val_batches"), False)
    trainer = Trainer(max_epochs=EPOCHS, accelerator="cpu", callbacks=[report], **quiet)
    trainer.fit(Model(), get_loader("boring", start="epoch", batch_fn=first_pixels))


@pytest.mark.slow
def test_the_boring_model_of_lightning_in_trials_of_tune(ray_clean: None, tmp_path: Path) -> None:
    pipeline = T.Pipeline([T.DecodeImage(), T.ToFloat()])
    with mbaas.serve("boring", synthetic(SAMPLES), pipeline, batch_size=64, prep_workers=1) as feed:
        results = tune.Tuner(
            tune.with_resources(train_boring, {"cpu": 0.25}),
            tune_config=tune.TuneConfig(num_samples=TRIALS),
            run_config=tune.RunConfig(storage_path=str(tmp_path), callbacks=[FeedCallback("boring")], verbose=0),
        ).fit()
        assert results.num_errors == 0
        assert [result.metrics["training_iteration"] for result in results] == [EPOCHS] * TRIALS
        rows = feed.ledger().to_pylist()
        assert len(rows) == EPOCHS * TRIALS
        assert all(row["exact"] and row["samples"] == SAMPLES for row in rows)


@pytest.mark.slow
def test_the_check_of_training_of_accelerate(
    ray_clean: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trains without accelerate and then with it, in 32 and 16 bits, and compares the models.

    All of its DataLoaders become loaders of one feed. Its order does not change between epochs, so each sees the same.
    """
    from accelerate import Accelerator
    from accelerate.test_utils.scripts import test_script as script
    from accelerate.test_utils.training import RegressionDataset

    points = RegressionDataset(length=32, seed=42)
    for number, point in enumerate(zip(points.x, points.y, strict=True)):
        np.save(tmp_path / f"{number:02}.npy", np.array(point, np.float32))
    loaders: list[mbaas.Loader] = []

    def on_a_feed(data: Any, generator: Any, batch_size: int, use_seedable_sampler: bool = False) -> mbaas.Loader:
        def pair(batch: dict[str, Any]) -> dict[str, torch.Tensor]:
            return {"x": batch["array"][:, 0], "y": batch["array"][:, 1]}

        loaders.append(mbaas.join("points", f"run-{len(loaders)}", batch_size=batch_size, batch_fn=pair, start="now"))
        return loaders[-1]

    monkeypatch.setattr(script, "generate_baseline_dataloader", on_a_feed)
    data, pipeline = mbaas.read_arrays(tmp_path, classes=False), T.Pipeline([T.DecodeArray("npy")])
    with mbaas.serve("points", data, pipeline, batch_size=8, prep_workers=1, shuffle=False) as feed:
        try:
            Accelerator(cpu=True)  # the script does so before its checks
            script.training_check()
            assert [loader.epoch for loader in loaders] == [3] * len(loaders)
        finally:
            for loader in loaders:
                loader.close()
        rows = feed.ledger().to_pylist()
        assert len(rows) == 3 * len(loaders)
        assert all(row["exact"] and row["samples"] == len(points) for row in rows)
    assert "Training yielded the same results on one CPU" in capsys.readouterr().out
