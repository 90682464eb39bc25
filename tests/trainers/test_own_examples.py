"""Ray Tune's own example of PyTorch trains on two feeds: only the function that makes its DataLoaders is replaced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import ray
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
