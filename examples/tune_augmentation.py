"""A search over augmentation: every trial has its own pipeline, and all share reads and decoding.

    python examples/tune_augmentation.py                    32 trials with ASHA
    python examples/tune_augmentation.py --scheduler pbt    Population Based Training, which changes pipelines
    python examples/tune_augmentation.py --compare          also with a feed, and with a DataLoader, for each trial

The photographs are cut from scikit-image's, and written as JPEG files first.
"""

from __future__ import annotations

import os

os.environ |= {  # set before Ray is imported: no boxes and warnings between the lines; Ctrl-C stops all searches
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

import argparse
import logging
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import ray
import torch
from comparing import OwnLoader
from ray import tune

import mbaas
from mbaas import transforms as T
from mbaas.tools.bench.cpu import TreeCpu
from tune_integration import FeedCallback, get_loader

SIZE = 48
"""Height and width of the model's input in pixels."""

PHOTO = (576, 768)
"""Height and width of the photographs."""

SMALL = 128
"""Height of the photographs before they are cropped. All pipelines begin with this, so the feed keeps them so."""

BATCH, AT_ONCE = 32, 4
"""Samples in a minibatch; trials at a time, with half a CPU each."""

SPACE = {
    "smallest": tune.uniform(0.1, 0.9),
    "flip": tune.uniform(0.0, 0.5),
    "degrees": tune.uniform(0.0, 40.0),
    "translate": tune.uniform(0.0, 0.3),
    "shear": tune.uniform(0.0, 20.0),
    "brightness": tune.uniform(0.0, 0.6),
    "contrast": tune.uniform(0.0, 0.6),
    "saturation": tune.uniform(0.0, 0.6),
    "grayscale": tune.uniform(0.0, 0.3),
    "solarize": tune.uniform(0.0, 0.3),
    "sharpness": tune.uniform(0.0, 0.5),
    "erasing": tune.uniform(0.0, 0.5),
    "learning_rate": tune.loguniform(1e-3, 1e-2),
}
"""Twelve parameters of augmentation, and the learning rate."""

PLAIN = T.Pipeline([T.DecodeImage(), T.Resize((SIZE, SIZE)), T.ToFloat()])
"""Pipeline of the evaluation."""

USUAL = dict.fromkeys(SPACE, 0.1)
"""Parameters of the feed's own pipeline."""


def augmentation(config: dict[str, Any]) -> T.Pipeline:
    """Return a trial's own pipeline."""
    # PBT multiplies parameters by 1.2, also beyond the space.
    config = {name: float(np.clip(config[name], domain.lower, domain.upper)) for name, domain in SPACE.items()}
    jitter = {name: config[name] for name in ("brightness", "contrast", "saturation")}
    return T.Pipeline(
        [
            T.DecodeImage(),
            T.Resize(SMALL),
            T.RandomResizedCrop(SIZE, scale=(config["smallest"], 1.0)),
            T.RandomHorizontalFlip(config["flip"]),
            T.RandomAffine(config["degrees"], translate=(config["translate"],) * 2, shear=config["shear"]),
            T.ColorJitter(**jitter),
            T.RandomGrayscale(config["grayscale"]),
            T.RandomSolarize(128, p=config["solarize"]),
            T.RandomAdjustSharpness(2.0, p=config["sharpness"]),
            T.RandomErasing(config["erasing"]),
            T.ToFloat(),
        ]
    )


# ---- trials ----


def train_shared(config: dict[str, Any]) -> None:
    """Train one trial, with its own pipeline over the feed's samples."""
    # A trial that PBT clones goes on at the position of its source, with its own augmentation.
    saved = restored()
    state = saved["loader"] if saved else None
    with get_loader("train", pipeline=augmentation(config), state=state) as loader, get_loader("validation") as check:
        learn(config, loader, check, saved, lambda: {"ledger": loader.ledger.exact})


def train_on_own_feeds(config: dict[str, Any], photos: Photos) -> None:
    """Train one trial that serves a feed of its own."""
    name = tune.get_context().get_trial_id()
    memory = {"cache_bytes": "512 MiB", "staging_bytes": "192 MiB"}  # otherwise the first feed takes it all
    options: dict[str, Any] = {"batch_size": BATCH, "prep_workers": 1, **memory}
    with (
        mbaas.serve(f"train-{name}", photos.train, augmentation(config), **options) as feed,
        mbaas.join(feed.name, name) as loader,
    ):
        check = OwnLoader(photos.validation, PLAIN, BATCH, shuffle=False)
        learn(config, loader, check, None, lambda: {"decoded": decoded(feed), "ledger": loader.ledger.exact})


def train_alone(config: dict[str, Any], photos: Photos) -> None:
    """Train one trial with a DataLoader."""
    loader = OwnLoader(photos.train, augmentation(config), BATCH, shuffle=True)
    check = OwnLoader(photos.validation, PLAIN, BATCH, shuffle=False)
    learn(config, loader, check, None, lambda: {"decoded": loader.samples, "ledger": True})


def learn(
    config: dict[str, Any],
    loader: Any,
    validation: Any,
    saved: dict[str, Any] | None,
    figures: Callable[[], dict[str, Any]],
) -> None:
    """Train a small network, and report accuracy and ``figures`` after each epoch."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network(len(loader.class_names))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    done = 0
    if saved:
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        done = saved["done"]
    trained = 0
    for epoch in range(done, config["epochs"]):
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
            optimizer.step()
            trained += len(batch["label"])
        metrics = {"accuracy": accuracy_of(model, validation), "trained": trained, **figures()}
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = None
            if config["saves"]:
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "done": epoch + 1}
                torch.save({**state, "loader": loader.state_dict()}, Path(folder) / "state.pt")
                checkpoint = tune.Checkpoint.from_directory(folder)
            tune.report(metrics, checkpoint=checkpoint)


def restored() -> dict[str, Any] | None:
    """Return the last checkpoint of the trial, or of the trial that it was cloned from."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        saved: dict[str, Any] = torch.load(Path(folder) / "state.pt")
    return saved


def network(classes: int) -> torch.nn.Module:
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 5, stride=4),
        torch.nn.ReLU(),
        torch.nn.Conv2d(8, 16, 3, stride=2),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LazyLinear(classes),
    )


@torch.no_grad()
def accuracy_of(model: torch.nn.Module, validation: Any) -> float:
    """Return the share of images that the model classifies correctly."""
    right = total = 0
    for batch in validation:
        right += int((model(batch["image"]).argmax(dim=1) == batch["label"]).sum())
        total += len(batch["label"])
    return right / total


# ---- searches ----


@dataclass
class Outcome:
    """A search: its results and costs. ``decoded`` and ``trained`` are samples, summed over trials."""

    results: tune.ResultGrid
    seconds: float
    cpu_s: float
    decoded: int
    trained: int


def decoded(feed: mbaas.Feed) -> int:
    """Return how many samples a feed has decoded."""
    fetched = feed.status().fetched
    return fetched.all.samples - fetched.decoded.samples


def shared(args: argparse.Namespace, photos: Photos) -> Outcome:
    """Search with one feed for all trials."""
    with (
        TreeCpu() as cpu,
        mbaas.serve("train", photos.train, augmentation(USUAL), batch_size=BATCH, prep_workers=1) as feed,
        mbaas.serve("validation", photos.validation, PLAIN, batch_size=BATCH, shuffle=False, prep_workers=1),
    ):
        began = time.monotonic()
        results = search(train_shared, args, [FeedCallback("train", "validation")])
        return outcome(results, time.monotonic() - began, cpu, decoded(feed), feed.status().delivered_samples)


def apart(trainable: Any, args: argparse.Namespace, photos: Photos) -> Outcome:
    """Search with trials that share nothing."""
    with TreeCpu() as cpu:
        began = time.monotonic()
        results = search(tune.with_parameters(trainable, photos=photos), args, [])
        made, trained = (sum(each.metrics[name] for each in results) for name in ("decoded", "trained"))
        return outcome(results, time.monotonic() - began, cpu, made, trained)


def outcome(results: tune.ResultGrid, seconds: float, cpu: TreeCpu, decoded: int, trained: int) -> Outcome:
    if inexact := [each.path for each in results if not each.metrics["ledger"]]:
        raise mbaas.MbaasError(f"trials missed samples, or got some twice: {inexact}")
    return Outcome(results, seconds, cpu.seconds(), decoded, trained)


def search(trainable: Any, args: argparse.Namespace, callbacks: list[tune.Callback]) -> tune.ResultGrid:
    schedulers = {
        "asha": lambda: tune.schedulers.ASHAScheduler(max_t=args.epochs, grace_period=2, reduction_factor=2),
        "pbt": lambda: tune.schedulers.PopulationBasedTraining(
            perturbation_interval=2, hyperparam_mutations=SPACE, time_attr="training_iteration"
        ),
    }
    np.random.seed(0)
    with tempfile.TemporaryDirectory(prefix="tune") as folder:
        return tune.Tuner(
            tune.with_resources(trainable, {"cpu": 0.5}),
            param_space={**SPACE, "epochs": args.epochs, "saves": args.scheduler == "pbt"},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=args.trials,
                scheduler=schedulers[args.scheduler](),
                max_concurrent_trials=AT_ONCE,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=callbacks, verbose=0),
        ).fit()


# ---- data and output ----


@dataclass
class Photos:
    train: mbaas.Dataset
    validation: mbaas.Dataset


def write_photos(folder: Path, count: int, seed: int) -> mbaas.Dataset:
    """Write ``count`` photographs, random parts of those in scikit-image; each source is a class."""
    from skimage import data

    names = ("astronaut", "chelsea", "coffee", "hubble_deep_field", "immunohistochemistry")
    sources, rng = {name: getattr(data, name)() for name in names}, np.random.default_rng(seed)
    for number in range(count):
        name = names[number % len(names)]
        source = sources[name]
        share = rng.uniform(0.3, 0.9)
        height, width = (int(share * length) for length in source.shape[:2])
        top, left = rng.integers(0, source.shape[0] - height), rng.integers(0, source.shape[1] - width)
        photo = cv2.resize(source[top : top + height, left : left + width], PHOTO[::-1], interpolation=cv2.INTER_CUBIC)
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / f"{number:05d}.jpg"), photo[:, :, ::-1], [cv2.IMWRITE_JPEG_QUALITY, 92])
    return mbaas.read_images(folder)


def show(outcomes: dict[str, Outcome]) -> None:
    print(f"{'':26}{'accuracy':>10}{'seconds':>10}{'CPU-s':>11}{'trained':>10}{'decoded for each':>18}")
    for title, each in outcomes.items():
        best = each.results.get_best_result().metrics["accuracy"]
        per = each.decoded / max(1, each.trained)
        print(f"{title:26}{best:>10.1%}{each.seconds:>10.1f}{each.cpu_s:>11.1f}{each.trained:>10,}{per:>18.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=32, help="configurations to try (default: 32)")
    parser.add_argument("--epochs", type=int, default=8, help="of the longest trial (default: 8)")
    parser.add_argument("--photos", type=int, default=800, help="to train on (default: 800)")
    parser.add_argument("--scheduler", choices=("asha", "pbt"), default="asha")
    parser.add_argument("--compare", action="store_true", help="search again without sharing, and show all")
    args = parser.parse_args()
    if args.compare and args.scheduler == "pbt":
        parser.error("--compare is for asha: trials with loaders of their own continue no other trial's state here")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mb", ignore_cleanup_errors=True)))
        photos = Photos(
            write_photos(folder / "train", args.photos, 0), write_photos(folder / "check", args.photos // 5, 1)
        )
        print(f"{len(photos.train)} photographs to train on, {len(photos.validation)} to validate with")
        ray.init(
            num_cpus=2 + AT_ONCE, include_dashboard=False, log_to_driver=False, logging_level="ERROR",
            _temp_dir=str(folder),
        )  # fmt: skip
        stack.callback(ray.shutdown)
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
        outcomes = {"one feed": shared(args, photos)}
        if args.compare:
            outcomes["a feed for each trial"] = apart(train_on_own_feeds, args, photos)
            outcomes["a DataLoader for each"] = apart(train_alone, args, photos)
        show(outcomes)


if __name__ == "__main__":
    main()
