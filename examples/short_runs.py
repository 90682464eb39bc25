"""Many short runs, each a program of its own, on feeds that stay open: python examples/short_runs.py

An agent, or a person at a prompt, tries one setting after another in runs of seconds. Each run joins feeds whose data
are listed, cached and prepared already, and trains at once. The digits are those of scikit-learn.

On a cluster that stays up, serve once, and run as often as you like:

    ray start --head
    python examples/short_runs.py --serve digits       # a detached feed: it stays when this program ends
    python examples/short_runs.py --rate 0.01
    python examples/short_runs.py --rate 0.1 --hidden 128
    mbaas stop train; mbaas stop validation
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch  # first, so that the time to the first minibatch is without it

BEGAN = time.perf_counter()

import ray  # noqa: E402
from torch.nn.functional import cross_entropy  # noqa: E402

import mbaas  # noqa: E402
from mbaas import transforms as T  # noqa: E402

SCALE = T.Normalize(mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5))


def serve(folder: Path, *, detached: bool) -> list[mbaas.Feed]:
    """Write the digits as PNG files, a folder for each class, and serve them; every fifth one is for validation."""
    import cv2
    from sklearn.datasets import load_digits

    digits = load_digits()
    for number, (image, label) in enumerate(zip(digits.images, digits.target, strict=True)):
        path = folder.resolve() / ("train" if number % 5 else "validation") / str(label) / f"{number}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), (15 * image).astype("uint8"))
    train, validation = (mbaas.read_images(folder.resolve() / name) for name in ("train", "validation"))
    return [
        mbaas.serve(
            "train",
            train,
            T.Pipeline([T.DecodeImage(), T.ColorJitter(brightness=0.2), SCALE]),
            batch_size=64,
            prep_workers=1,
            detached=detached,
        ),
        mbaas.serve(
            "validation",
            validation,
            T.Pipeline([T.DecodeImage(), SCALE]),
            batch_size=128,
            shuffle=False,
            prep_workers=1,
            detached=detached,
        ),
    ]


def run(rate: float, hidden: int, epochs: int) -> None:
    """Train for some epochs, and print the result on one line."""
    name = f"run-{os.getpid()}"
    with (
        mbaas.join("train", consumer=name, start="now") as loader,  # not at the next epoch of other runs
        mbaas.join("validation", consumer=name, start="now") as validation,
    ):
        loader.peek()
        first_s = time.perf_counter() - BEGAN
        torch.manual_seed(0)
        torch.set_num_threads(1)  # other runs and prep workers need the other cores
        size = loader.peek()["image"][0].numel()
        model = torch.nn.Sequential(
            torch.nn.Flatten(), torch.nn.Linear(size, hidden), torch.nn.ReLU(), torch.nn.Linear(hidden, 10)
        )
        optimizer = torch.optim.Adam(model.parameters(), lr=rate)
        for _ in range(epochs):
            for batch in loader:
                optimizer.zero_grad()
                cross_entropy(model(batch["image"]), batch["label"]).backward()
                optimizer.step()
        with torch.no_grad():
            right = torch.cat([model(batch["image"]).argmax(1) == batch["label"] for batch in validation])
        exact = loader.ledger is not None and loader.ledger.exact
    print(
        f"rate {rate:<6g} hidden {hidden:<4} {right.float().mean():6.1%} right, first minibatch after {first_s:.2f} s, "
        f"all after {time.perf_counter() - BEGAN:.2f} s, exact: {exact}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--serve", type=Path, metavar="FOLDER", help="serve detached feeds of digits written there")
    parser.add_argument("--rate", type=float, help="one run with this learning rate")
    parser.add_argument("--hidden", type=int, default=64, help="hidden units (default: 64)")
    parser.add_argument("--epochs", type=int, default=3, help="of each run (default: 3)")
    args = parser.parse_args()
    if args.serve is not None:
        serve(args.serve, detached=True)
    elif args.rate is not None:
        run(args.rate, args.hidden, args.epochs)
    else:
        with tempfile.TemporaryDirectory() as folder:
            feeds = serve(Path(folder), detached=False)
            os.environ["RAY_ADDRESS"] = ray.get_runtime_context().gcs_address
            for rate in (0.003, 0.01, 0.03):
                subprocess.run(
                    [sys.executable, __file__, "--rate", str(rate), "--epochs", str(args.epochs)], check=True
                )
            for feed in feeds:
                feed.stop()


if __name__ == "__main__":
    main()
