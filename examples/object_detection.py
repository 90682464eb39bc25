"""A search for an object detector whose trials share every minibatch.

    python examples/object_detection.py              coloured shapes on photographs, written with COCO annotations
    python examples/object_detection.py --compare    also the same search with a DataLoader per trial
    python examples/object_detection.py --data FILE.json --image-folder DIR    your images, with COCO annotations

Each trial trains a small detector without anchors (after Zhou et al., Objects as Points, 2019). For each cell of 8x8
pixels, the network predicts a score for the centre of an object, the exact position of the centre, and the object's
size and class.
"""

from __future__ import annotations

import os

os.environ |= {
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

import argparse
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from comparing import Outcome, OwnLoader, of_own_loaders, show
from ray import tune
from shapes import SIDE, write_shapes
from torch.nn.functional import cross_entropy, l1_loss, max_pool2d

import mbaas
from mbaas import transforms as T
from tune_integration import FeedCallback, get_loader

Parts = tuple[mbaas.Dataset, mbaas.Dataset]
"""Training and validation data."""

CELL = 8
BOXES = T.Boxes(beside=("labels",), min_size=4)
SCALE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
TRAIN = T.Pipeline(
    [
        T.DecodeImage(),
        T.RandomIoUCrop(min_scale=0.5),
        T.Resize((SIDE, SIDE)),
        T.RandomHorizontalFlip(),
        T.ColorJitter(0.3, 0.3, 0.3),
        SCALE,
    ],
    boxes=BOXES,
)
VALIDATION = T.Pipeline([T.DecodeImage(), T.Resize((SIDE, SIDE)), SCALE], boxes=BOXES)


def train(config: dict[str, Any]) -> None:
    """Train one trial on the feeds."""
    # All boxes of a minibatch in one array, and the bounds of each image in it.
    loader = get_loader("train", batch_size=config["batch_size"], collate="packed")
    for found in learn(config, loader, get_loader("validation", collate="packed")):
        tune.report({"found": found})


def train_alone(config: dict[str, Any], parts: Parts) -> None:
    """Train one trial that prepares its own samples."""
    loader = OwnLoader(parts[0], TRAIN, config["batch_size"], shuffle=True)
    for found in learn(config, loader, OwnLoader(parts[1], VALIDATION, 50, shuffle=False)):
        tune.report({"found": found, "samples": loader.samples})


def learn(config: dict[str, Any], loader: Any, validation: Any) -> Iterator[float]:
    """Train a detector; after each epoch, yield the share of objects that it finds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = network(config["width"], len(loader.class_names))
    optimizer = torch.optim.AdamW(model.parameters(), lr=config["learning_rate"])
    steps = config["epochs"] * len(loader)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, config["learning_rate"], total_steps=steps)
    for _ in range(config["epochs"]):
        model.train()
        for batch in loader:
            optimizer.zero_grad()
            loss_of(model(batch["image"]), batch).backward()
            optimizer.step()
            schedule.step()
        yield found_share(model.eval(), validation)


def network(width: int, classes: int) -> torch.nn.Module:
    """Build a network with the output [n, 5 + classes, height / CELL, width / CELL]: score, box and class."""
    layers: list[torch.nn.Module] = []
    channels = 3
    for out, stride in ((width, 2), (2 * width, 2), (4 * width, 2), (4 * width, 1), (4 * width, 1)):
        layers += [torch.nn.Conv2d(channels, out, 3, stride, padding=1), torch.nn.BatchNorm2d(out), torch.nn.ReLU()]
        channels = out
    head = torch.nn.Conv2d(channels, 5 + classes, 1)
    torch.nn.init.constant_(head.bias[0], -4.0)  # objects are rare
    return torch.nn.Sequential(*layers, head)


def placed(batch: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """Return for each object: image index, label, column and row of its cell, and its box in cells."""
    bounds, boxes = batch["boxes_bounds"], batch["boxes"] / CELL
    image = torch.repeat_interleave(torch.arange(len(bounds) - 1), bounds.diff())
    centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    x, y = centres.long().clamp(0, SIDE // CELL - 1).T
    return image, batch["labels"], x, y, torch.cat([centres - torch.stack([x, y], 1), sizes.log()], 1)


def loss_of(output: torch.Tensor, batch: dict[str, Any]) -> torch.Tensor:
    """Add the focal loss of the centres, which tolerates neighbouring cells, and the errors of labels and boxes."""
    image, label, x, y, box = placed(batch)
    scores = output[:, 0].sigmoid().clamp(1e-4, 1 - 1e-4)
    at = torch.arange(SIDE // CELL)
    near = torch.exp(-((at[:, None] - y[:, None, None]) ** 2) - (at - x[:, None, None]) ** 2)
    wanted = torch.zeros(scores.shape).flatten(1)
    rows = image[:, None].expand(-1, wanted.shape[1])
    wanted = wanted.scatter_reduce(0, rows, near.flatten(1), "amax").view(scores.shape)
    misses = (1 - wanted) ** 4 * scores**2 * (1 - scores).log()
    focal = torch.where(wanted == 1, (1 - scores) ** 2 * scores.log(), misses)
    there = output[image, :, y, x]
    errors = cross_entropy(there[:, 5:], label, reduction="sum") + l1_loss(there[:, 1:5], box, reduction="sum")
    return (errors - focal.sum()) / max(1, len(image))


@torch.no_grad()
def found_share(model: torch.nn.Module, validation: Any) -> float:
    """Return the share of objects that are found.

    An image with k objects has k guesses. An object is found if a guess has its class and an intersection over union
    of at least a half.
    """
    found = total = 0
    for batch in validation:
        output = model(batch["image"])
        scores = output[:, 0].sigmoid()
        scores = scores * (scores == max_pool2d(scores, 3, 1, padding=1))  # keep local maxima only
        for row, (start, stop) in enumerate(pairwise(batch["boxes_bounds"].tolist())):
            best = scores[row].flatten().topk(stop - start).indices
            y, x = torch.unravel_index(best, scores[row].shape)
            there = output[row, :, y, x].T
            centre, size = torch.stack([x, y], 1) + there[:, 1:3], there[:, 3:5].exp()
            guessed = torch.cat([centre - size / 2, centre + size / 2], 1) * CELL
            right = there[:, 5:].argmax(1)[:, None] == batch["labels"][start:stop]
            found += int((right & (overlaps(guessed, batch["boxes"][start:stop]) >= 0.5)).any(0).sum())
            total += stop - start
    return found / max(1, total)


def overlaps(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """Return the intersection over union of all pairs of boxes: [k, 4] and [m, 4] give [k, m]."""
    corner, end = torch.maximum(one[:, None, :2], other[:, :2]), torch.minimum(one[:, None, 2:], other[:, 2:])
    shared = (end - corner).clamp(min=0).prod(2)
    areas = [(boxes[:, 2:] - boxes[:, :2]).prod(1) for boxes in (one, other)]
    return shared / (areas[0][:, None] + areas[1] - shared)


def search(trainable: Any, args: argparse.Namespace, *callbacks: tune.Callback) -> tune.ResultGrid:
    """Run a random search over learning rate, network width and batch size."""
    space = {
        "learning_rate": tune.loguniform(2e-3, 1e-2),
        "width": tune.choice([8, 12]),
        "batch_size": tune.choice([16, 32]),
        "epochs": args.epochs,
    }
    np.random.seed(0)  # for Tune's choices
    with tempfile.TemporaryDirectory() as folder:
        return tune.Tuner(
            tune.with_resources(trainable, {"cpu": 0.25}),
            param_space=space,
            tune_config=tune.TuneConfig(metric="found", mode="max", num_samples=args.trials, max_concurrent_trials=4),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[*callbacks], verbose=0),
        ).fit()


def search_shared(args: argparse.Namespace, parts: Parts) -> Outcome:
    """Run the search on two feeds."""
    began = time.monotonic()
    with (
        mbaas.serve("train", parts[0], TRAIN, batch_size=32, prep_workers=1) as feed,
        mbaas.serve("validation", parts[1], VALIDATION, batch_size=50, shuffle=False, prep_workers=1),
    ):
        results = search(train, args, FeedCallback("train", "validation"))
        status = feed.status()
    return Outcome(results, time.monotonic() - began, status.prepared_samples, status.delivered_samples)


def search_alone(args: argparse.Namespace, parts: Parts) -> Outcome:
    """Run the search with a DataLoader per trial."""
    began = time.monotonic()
    results = search(tune.with_parameters(train_alone, parts=parts), args)
    return of_own_loaders(results, time.monotonic() - began)


def run(args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        annotations = args.data or write_shapes(Path(folder, "data"), args.images)
        images = args.image_folder or Path(folder, "data/images")
        parts = mbaas.read_coco(annotations, images, fields=["boxes", "labels"]).split(0.8)
        ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        outcomes = {"one feed": search_shared(args, parts)}
        if args.compare:
            outcomes["a DataLoader per trial"] = search_alone(args, parts)
        ray.shutdown()
    best = outcomes["one feed"].results.get_best_result()
    print(f"best trial: {best.metrics['found']:.1%} of the objects found with {best.config}")
    shared = outcomes["one feed"]
    print(f"{shared.prepared:,} training images prepared, {shared.delivered:,} delivered")
    if args.compare:
        show("found", outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="FILE", help="COCO's annotations of your images")
    parser.add_argument("--image-folder", type=Path, metavar="DIR", help="where these images are")
    parser.add_argument("--images", type=int, default=500, help="to write, without --data (default: 500)")
    parser.add_argument("--trials", type=int, default=4, help="configurations to try (default: 4)")
    parser.add_argument("--epochs", type=int, default=6, help="of each trial (default: 6)")
    parser.add_argument("--compare", action="store_true", help="search again without sharing, and show both")
    args = parser.parse_args()
    if (args.data is None) != (args.image_folder is None):
        parser.exit(2, f"{parser.prog}: --data, COCO's annotations, and --image-folder, of the images, go together\n")
    try:
        run(args)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted: feeds are stopped, temporary files are gone\n")
    except mbaas.MbaasError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
