"""A hyper-parameter search whose trials share every minibatch.

    python examples/tune_digits.py                  the 1,797 handwritten digits of scikit-learn, as PNG files
    python examples/tune_digits.py --compare        also the same search with a DataLoader per trial
    python examples/tune_digits.py --data DIR       your images, one folder per class

The comments (1) to (3) mark the lines that mbaas adds to a Ray Tune script.
"""

from __future__ import annotations

import os

os.environ |= {  # set before Ray is imported: no boxes and warnings between progress lines; Ctrl-C stops fit()
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import ray
import torch
from ray import tune
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import mbaas
from mbaas import transforms as T
from mbaas.prep.engines import Batch, make_engine
from tune_integration import FeedCallback, get_loader

SIZE = 16
"""Height and width of the model's input in pixels."""

AT_ONCE = 4
"""Concurrent trials, with half a CPU each: a small model does not keep a core busy."""

SCALE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))
TRAIN = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(SIZE, scale=(0.8, 1.0), ratio=(0.9, 1.1)), SCALE])
VALIDATION = T.Pipeline([T.DecodeImage(), T.Resize((SIZE, SIZE)), SCALE])

console = Console(highlight=False, soft_wrap=True)


# ---- the search ----


def train(config: dict[str, Any]) -> None:
    """Train one trial."""
    loader = get_loader("train", batch_size=config["batch_size"])  # (1) minibatches come from the feed
    validation = get_loader("validation")
    for accuracy in learn(config, loader, validation, len(loader.class_names)):
        tune.report({"accuracy": accuracy})


def search_shared(args: argparse.Namespace, split: Split) -> Outcome:
    """Run the search on two feeds."""
    with (  # (2) one service prepares samples for all trials; it reserves its CPUs before Tune does
        mbaas.serve("train", split.train, TRAIN, batch_size=64, prep_workers=1) as feed,
        mbaas.serve("validation", split.validation, VALIDATION, batch_size=256, shuffle=False, prep_workers=1) as check,
    ):
        callback = FeedCallback("train", "validation")  # (3) reports to the service when trials start and end
        began = time.monotonic()
        results = search(train, args, "shared", [callback])
        seconds = time.monotonic() - began
        figures = [feed.status(), check.status()]
    return Outcome(
        results,
        seconds=seconds,
        prepared=sum(status.prepared_samples for status in figures),
        delivered=sum(status.delivered_samples for status in figures),
    )


def search(trainable: Any, args: argparse.Namespace, title: str, callbacks: list[tune.Callback]) -> tune.ResultGrid:
    """Search over learning rate, width and batch size with ASHA; the seed makes all runs try the same values."""
    space = {
        "learning_rate": tune.loguniform(1e-3, 1e-2),
        "width": tune.choice([16, 32]),
        "batch_size": tune.choice([32, 50, 64]),
        "epochs": args.epochs,
    }
    scheduler = tune.schedulers.ASHAScheduler(max_t=args.epochs, grace_period=min(3, args.epochs), reduction_factor=2)
    np.random.seed(0)
    with progress_bar(title, args.trials) as bar, tempfile.TemporaryDirectory(prefix="tune") as folder:
        return tune.Tuner(
            tune.with_resources(trainable, {"cpu": 0.5}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=args.trials,
                scheduler=scheduler,
                max_concurrent_trials=AT_ONCE,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[*callbacks, ShowProgress(bar)], verbose=0),
        ).fit()


def learn(config: dict[str, Any], loader: Any, validation: Any, classes: int) -> Iterator[float]:
    """Train a small network; yield the validation accuracy after each epoch."""
    torch.set_num_threads(1)  # trials share cores, so thread pools would only compete for them
    torch.manual_seed(0)
    model = network(config["width"], classes)
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    for _ in range(config["epochs"]):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"]).backward()
            optimizer.step()
        yield accuracy_of(model, validation)


def network(width: int, classes: int) -> torch.nn.Module:
    """Build two convolutions and a linear layer, for images of `SIZE`."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(width, 2 * width, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width * (SIZE // 4) ** 2, classes),
    )


@torch.no_grad()
def accuracy_of(model: torch.nn.Module, validation: Any) -> float:
    """Return the share of images that the model classifies correctly."""
    model.eval()
    right = total = 0
    for batch in validation:
        right += int((model(batch["image"]).argmax(dim=1) == batch["label"]).sum())
        total += len(batch["label"])
    return right / total


# ---- the same search without sharing ----


def search_alone(args: argparse.Namespace, split: Split) -> Outcome:
    """Run the search with a DataLoader per trial."""
    began = time.monotonic()
    results = search(tune.with_parameters(train_alone, split=split), args, "without sharing", [])
    prepared = sum(result.metrics["samples"] for result in results)
    return Outcome(results, seconds=time.monotonic() - began, prepared=prepared, delivered=prepared)


def train_alone(config: dict[str, Any], split: Split) -> None:
    """Train one trial that prepares its own samples."""
    loader = OwnLoader(split.train, TRAIN, config["batch_size"], shuffle=True)
    validation = OwnLoader(split.validation, VALIDATION, 256, shuffle=False)
    began = time.perf_counter()
    for accuracy in learn(config, loader, validation, len(split.train.class_names)):
        stalled_s = loader.waited_s + validation.waited_s
        share = stalled_s / (time.perf_counter() - began)
        samples = loader.samples + validation.samples
        tune.report({"accuracy": accuracy, "samples": samples, "mbaas/stall_share": share})


class OwnLoader:
    """A torch DataLoader over the same files, with the same decoder and transforms as the feeds."""

    def __init__(self, data: mbaas.Dataset, pipeline: T.Pipeline, batch_size: int, *, shuffle: bool) -> None:
        self._images = Images(data, pipeline)
        self._loader = torch.utils.data.DataLoader(
            self._images, batch_size=batch_size, shuffle=shuffle, collate_fn=lambda batch: batch
        )
        self.samples, self.waited_s = 0, 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        self._images.epoch += 1
        asked = time.perf_counter()
        for batch in self._loader:
            self.waited_s += time.perf_counter() - asked
            self.samples += len(batch["label"])
            yield batch
            asked = time.perf_counter()


class Images(torch.utils.data.Dataset[Any]):
    """Whole minibatches, read and prepared in this process."""

    def __init__(self, data: mbaas.Dataset, pipeline: T.Pipeline) -> None:
        self._data, self._pipeline = data, pipeline
        self._reader, self._engine = data.reader(), make_engine("cpu", pipeline, seed=0)
        self.epoch = -1

    def __len__(self) -> int:
        return len(self._data)

    def __getitems__(self, indices: list[int]) -> dict[str, Any]:
        ids = np.array(indices, np.int64)
        raw = [np.empty(length, np.uint8) for length in self._data.lengths(ids)]
        for index, buffer in zip(indices, raw, strict=True):
            self._reader.read_into(index, buffer)
        pixels = np.empty((len(ids), SIZE, SIZE, 3), np.uint8)
        self._engine.prepare(Batch(raw, ids, self.epoch, {}), pixels)
        images = self._pipeline.normalize.apply_torch(torch.from_numpy(pixels).permute(0, 3, 1, 2))
        return {"image": images, "label": torch.from_numpy(self._data.labels(ids))}


# ---- data ----


@dataclass
class Split:
    """Training and validation images."""

    train: mbaas.Dataset
    validation: mbaas.Dataset


def write_digits(folder: Path) -> Path:
    """Write the scikit-learn digits as PNG files of 8 x 8 pixels, one folder per class."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        target = folder / str(label)
        target.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(target / f"{number:04d}.png"), (image * 255 / 16).astype(np.uint8))  # values are 0 to 16
    return folder


def split_images(source: Path, folder: Path) -> Split:
    """Use every fifth image of each class for validation. Images are not moved; ``folder`` gets links to them."""
    data = mbaas.read_images(source)
    seen = [0] * len(data.class_names)
    for sample, label in enumerate(data.labels(np.arange(len(data)))):
        part = "validation" if seen[label] % 5 == 1 else "train"
        link = folder / part / data.class_names[label] / f"{seen[label]}{Path(data.uri(sample)).suffix}"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(Path(data.uri(sample)).resolve())
        seen[label] += 1
    if min(seen) < 2:
        raise mbaas.DatasetError(f"each class in {source} needs at least 2 images, one has {min(seen)}")
    return Split(mbaas.read_images(folder / "train"), mbaas.read_images(folder / "validation"))


# ---- output ----


@dataclass
class Outcome:
    """Result of a search; sample counts are sums over all trials, training and validation."""

    results: tune.ResultGrid
    seconds: float
    prepared: int
    delivered: int

    @property
    def stall_share(self) -> float:
        """Share of time that trials waited for data, averaged over trials."""
        return float(np.mean([result.metrics["mbaas/stall_share"] for result in self.results]))


@contextmanager
def progress_bar(title: str, trials: int) -> Iterator[Progress]:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task(f"{title}: trials", total=trials)
        yield bar


class ShowProgress(tune.Callback):
    """Prints a line for each completed trial; the bar counts trials and shows the best accuracy so far."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._best = 0.0

    def __getstate__(self) -> dict[str, Any]:
        return {}  # Tune pickles callbacks with the experiment, and a terminal cannot be pickled

    def on_trial_result(self, *, result: dict[str, Any], **_: Any) -> None:
        self._best = max(self._best, result["accuracy"])
        self._bar.update(self._bar.task_ids[0], description=f"best accuracy {self._best:.1%}, trials")

    def on_trial_complete(self, *, trial: Any, **_: Any) -> None:
        last = trial.last_result
        self._bar.advance(self._bar.task_ids[0])
        self._bar.console.print(
            f"  {trial.trial_id}  {describe(trial.config):<44} {last['training_iteration']:>3} epochs"
            f"  accuracy {last['accuracy']:.1%}  data stall {last['mbaas/stall_share']:.0%}"
        )


def describe(config: dict[str, Any]) -> str:
    return f"lr {config['learning_rate']:.4f}, width {config['width']}, batches of {config['batch_size']}"


def show(outcome: Outcome) -> None:
    best = outcome.results.get_best_result()
    console.print(f"best trial: {best.metrics['accuracy']:.1%} validation accuracy with {describe(best.config)}")
    console.print(
        f"samples: {outcome.prepared:,} prepared, {outcome.delivered:,} delivered to {len(outcome.results)} trials: "
        f"each served {outcome.delivered / outcome.prepared:.1f} times; data stall {outcome.stall_share:.0%}"
    )


def show_comparison(outcomes: dict[str, Outcome]) -> None:
    table = Table("search", "accuracy", "prepared", "delivered", "data stall", "seconds")
    for title, o in outcomes.items():
        best = o.results.get_best_result().metrics["accuracy"]
        counts = f"{o.prepared:,}", f"{o.delivered:,}"
        table.add_row(title, f"{best:.1%}", *counts, f"{o.stall_share:.0%}", f"{o.seconds:.1f}")
    console.print(table)


# ---- the command ----


class OneSentence(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(2, f"{self.prog}: {message}\n")


def at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, got {text!r}")
    return int(text)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = OneSentence(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="images, one folder per class (default: digits)")
    parser.add_argument("--trials", type=at_least_one, default=8, help="configurations to try (default: 8)")
    parser.add_argument("--epochs", type=at_least_one, default=10, help="of the longest trial (default: 10)")
    parser.add_argument("--compare", action="store_true", help="search again without sharing, and show both")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> None:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="mb", ignore_cleanup_errors=True)))
        split = split_images(args.data or write_digits(folder / "digits"), folder)
        console.print(f"{len(split.train):,} images to train on, {len(split.validation):,} to validate with")
        start_ray(folder)
        stack.callback(ray.shutdown)
        outcomes = {"shared": search_shared(args, split)}
        show(outcomes["shared"])
        if args.compare:
            outcomes["without sharing"] = search_alone(args, split)
            show_comparison(outcomes)


def start_ray(folder: Path) -> None:
    """Start a local Ray: one CPU for each of the two prep workers, and two CPUs for the four trials.

    Ray's CPUs are logical, so this works on any machine. On a large one, trials could have more.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)  # importing torch creates this folder, by default in /tmp
    cpus = 2 + AT_ONCE // 2
    ray.init(num_cpus=cpus, include_dashboard=False, log_to_driver=False, logging_level="ERROR", _temp_dir=str(folder))
    logging.getLogger("ray.tune").setLevel(logging.ERROR)


def main(arguments: list[str]) -> int:
    args = parse(arguments)
    try:
        run(args)
    except KeyboardInterrupt:
        console.print("interrupted: feeds are stopped, temporary files are gone")
        return 130
    except mbaas.MbaasError as error:
        print(f"tune_digits.py: {error}", file=sys.stderr)
        return 2 if isinstance(error, mbaas.DatasetError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
