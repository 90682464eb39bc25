"""A search as a Ray job; submit.sh submits it. It runs on the cluster's head, its trials wherever there is room.

    python search.py --data s3://bucket/train       images that every node can read, one folder per class
    python search.py --feed train                   on a feed that runs already, which other jobs may use as well
    python search.py                                without files: computed noise, from which nothing can be learned

Own code for prep, my_prep.py, reaches every node with this folder, the job's working directory.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import ray
import torch
from my_prep import erase
from ray import tune

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from tune_integration import FeedCallback, get_loader

SIZE = 16
"""Pixels of an image, height and width."""

PIPELINE = T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(SIZE), T.Map(erase)])


def train(config: dict[str, Any]) -> None:
    """Train one trial: a linear model, which takes its shape from the first minibatch."""
    torch.set_num_threads(1)
    with get_loader(config["feed"], batch_size=config["batch_size"], device=config["device"]) as loader:
        model = torch.nn.LazyLinear(len(loader.class_names), device=config["device"])
        optimizer = None
        for _ in range(config["epochs"]):
            for batch in loader:
                scores = model(batch["image"].flatten(start_dim=1) / 255)
                optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=config["learning_rate"])
                loss = torch.nn.functional.cross_entropy(scores, batch["label"])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
            tune.report({"loss": loss.item(), "exact": loader.ledger.exact})


def search(feed: mbaas.Feed, args: argparse.Namespace) -> tune.ResultGrid:
    """Search at random over learning rate and batch size; each trial reports its last loss and its data stall."""
    space = {
        "feed": feed.name,
        "learning_rate": tune.loguniform(1e-3, 1e-1),
        "batch_size": tune.choice([32, 50, 64]),
        "epochs": args.epochs,
        "device": "cuda" if args.gpus else "cpu",
    }
    with tempfile.TemporaryDirectory(prefix="tune") as folder:
        return tune.Tuner(
            tune.with_resources(train, {"cpu": args.cpus, "gpu": args.gpus}),
            param_space=space,
            tune_config=tune.TuneConfig(metric="loss", mode="min", num_samples=args.trials),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[FeedCallback(feed.name)], verbose=0),
        ).fit()


@contextmanager
def feed_of(args: argparse.Namespace) -> Iterator[mbaas.Feed]:
    """Yield the feed that runs already, or one that runs as long as this job."""
    if args.feed:
        yield mbaas.connect(args.feed)
        return
    data = mbaas.read_images(args.data) if args.data else synthetic(args.samples, height=SIZE, width=SIZE)
    with mbaas.serve("search", data, PIPELINE, batch_size=64, prep_workers=args.prep_workers) as feed:
        yield feed


def main() -> None:
    parser = argparse.ArgumentParser(description="A hyper-parameter search as a Ray job.")
    parser.add_argument("--data", help="folder or URI that every node can read")
    parser.add_argument("--feed", help="name of a feed that runs already, instead of serving one")
    parser.add_argument("--samples", type=int, default=2003, help="computed images, without --data")
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--cpus", type=float, default=1, help="of each trial")
    parser.add_argument("--gpus", type=float, default=0, help="of each trial")
    parser.add_argument("--prep-workers", type=int, default=None, help="default: half of the CPUs that are left")
    args = parser.parse_args()
    ray.init(log_to_driver=False)  # the cluster that runs this job
    with feed_of(args) as feed:
        results = search(feed, args)
        status = feed.status()
    if results.num_errors:
        raise SystemExit(f"{results.num_errors} of {len(results)} trials failed: {results.errors[0]}")
    best = results.get_best_result()
    print(f"best loss {best.metrics['loss']:.3f} with learning rate {best.config['learning_rate']:.4f}")
    print(f"{len(results)} trials, exact: {all(result.metrics['exact'] for result in results)}")
    print(f"{status.prepared_samples} samples prepared, {status.delivered_samples} delivered")


if __name__ == "__main__":
    main()
