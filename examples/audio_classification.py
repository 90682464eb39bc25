"""A hyper-parameter search on sound: trials share the decoding, the resampling and the spectrograms.

    python examples/audio_classification.py                short tones and chirps with noise, as WAV and FLAC files
    python examples/audio_classification.py --compare      also the same search with a DataLoader per trial
    python examples/audio_classification.py --data DIR     your audio files, one folder per class

Needs soundfile and soxr: pip install "mbaas[audio]", or the extra "examples".
"""

from __future__ import annotations

import os

os.environ |= {  # set before Ray is imported, so that it prints no boxes and warnings
    "RAY_AIR_NEW_OUTPUT": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "TUNE_DISABLE_SIGINT_HANDLER": "1",
}

import argparse
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import ray
import soundfile
import torch
from comparing import Outcome, OwnLoader, of_own_loaders, show
from ray import tune

import mbaas
from mbaas import transforms as T
from tune_integration import FeedCallback, get_loader

RATE = 8000
"""Audio samples per second that the model receives; files with another rate are resampled."""

MELS = 32

Parts = tuple[mbaas.Dataset, mbaas.Dataset]
"""Training and validation data."""

AT_ONCE = 4
"""Concurrent trials, with half a CPU each."""

SPECTROGRAM = [T.MelSpectrogram(n_fft=256, hop_length=100, n_mels=MELS), T.AmplitudeToDB(top_db=60)]
DECODE = T.DecodeAudio(RATE)
TRAIN = T.Pipeline([DECODE, T.RandomCrop(RATE // 2), *SPECTROGRAM, T.SpecAugment(1, 8, 1, 6)])
VALIDATION = T.Pipeline([DECODE, T.CropOrPad(RATE // 2), *SPECTROGRAM])


# ---- a trial ----


def train(config: dict[str, Any]) -> None:
    """Train one trial on the feeds."""
    loader = get_loader("train", batch_size=config["batch_size"])
    for accuracy in learn(config, loader, get_loader("validation")):
        tune.report({"accuracy": accuracy, "exact": loader.ledger.exact})


def train_alone(config: dict[str, Any], parts: Parts) -> None:
    """Train one trial that prepares its own samples."""
    loader = OwnLoader(parts[0], TRAIN, config["batch_size"], shuffle=True)
    for accuracy in learn(config, loader, OwnLoader(parts[1], VALIDATION, 64, shuffle=False)):
        tune.report({"accuracy": accuracy, "samples": loader.samples})


def learn(config: dict[str, Any], loader: Any, validation: Any) -> Iterator[float]:
    """Train a small network; yield the validation accuracy after each epoch."""
    torch.set_num_threads(1)  # trials share cores
    torch.manual_seed(0)
    model = network(config["width"], len(loader.class_names))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["learning_rate"])
    for _ in range(config["epochs"]):
        model.train()
        for batch in loader:  # batch["audio"]: float32 [n, frames, mels]; time is the first axis of a sample
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(batch["audio"]), batch["label"]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            right = torch.cat([model(batch["audio"]).argmax(dim=1) == batch["label"] for batch in validation])
        yield right.float().mean().item()


class FromDecibels(torch.nn.Module):
    """Turn spectrograms in decibels into one-channel images with values around 0."""

    def forward(self, decibels: torch.Tensor) -> torch.Tensor:
        return (decibels.unsqueeze(1) + 20) / 20


def network(width: int, classes: int) -> torch.nn.Module:
    """Build two convolutions, and a linear layer on their means over quarters of the time axis."""
    return torch.nn.Sequential(
        FromDecibels(),
        torch.nn.Conv2d(1, width, 5, padding=2),
        torch.nn.BatchNorm2d(width),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(width, 2 * width, 5, padding=2),
        torch.nn.BatchNorm2d(2 * width),
        torch.nn.ReLU(),
        torch.nn.AdaptiveAvgPool2d((4, MELS // 4)),
        torch.nn.Flatten(),
        torch.nn.Linear(2 * width * MELS, classes),
    )


# ---- audio files ----


def tone(time: np.ndarray, pitch: float) -> np.ndarray:
    return np.sin(2 * np.pi * pitch * time)


def harmonics(time: np.ndarray, pitch: float) -> np.ndarray:
    return sum(np.sin(2 * np.pi * pitch * k * time) / k for k in range(1, 7)) / 2


def rising(time: np.ndarray, pitch: float) -> np.ndarray:
    return np.sin(2 * np.pi * (pitch * time + pitch * time**2))


def falling(time: np.ndarray, pitch: float) -> np.ndarray:
    return np.sin(2 * np.pi * (3 * pitch * time - pitch * time**2))


def trembling(time: np.ndarray, pitch: float) -> np.ndarray:
    return np.sin(2 * np.pi * pitch * time) * (0.5 + 0.5 * np.sin(2 * np.pi * 12 * time))


KINDS: tuple[Callable[[np.ndarray, float], np.ndarray], ...] = (tone, harmonics, rising, falling, trembling)


def write_sounds(folder: Path, count: int) -> Path:
    """Write noisy sounds of different pitch, loudness, length, rate, number of channels and format."""
    rng = np.random.default_rng(0)
    for number in range(count):
        kind = KINDS[number % len(KINDS)]
        rate = (8000, 16_000, 22_050)[number // 2 % 3]
        time = np.arange(round(rng.uniform(0.4, 1.0) * rate)) / rate
        sound = rng.uniform(0.1, 0.5) * kind(time, rng.uniform(300, 600)) + 0.03 * rng.standard_normal(len(time))
        target = folder / kind.__name__
        target.mkdir(parents=True, exist_ok=True)
        channels = sound if number % 3 else np.stack([sound, sound], axis=1)
        soundfile.write(target / f"{number:04d}.{('wav', 'flac')[number % 2]}", np.clip(channels, -1, 1), rate)
    return folder


# ---- the search ----


def search(trainable: Any, args: argparse.Namespace, *callbacks: tune.Callback) -> tune.ResultGrid:
    """Search over learning rate, width and batch size with ASHA."""
    space = {
        "learning_rate": tune.loguniform(1e-3, 1e-2),
        "width": tune.choice([8, 16]),
        "batch_size": tune.choice([8, 16]),
        "epochs": args.epochs,
    }
    scheduler = tune.schedulers.ASHAScheduler(max_t=args.epochs, grace_period=min(3, args.epochs), reduction_factor=2)
    np.random.seed(0)  # for Tune's choices
    with tempfile.TemporaryDirectory(prefix="tune") as folder:
        return tune.Tuner(
            tune.with_resources(trainable, {"cpu": 0.5}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=args.trials,
                max_concurrent_trials=AT_ONCE,
                scheduler=scheduler,
                reuse_actors=True,
            ),
            run_config=tune.RunConfig(storage_path=folder, callbacks=[*callbacks], verbose=0),
        ).fit()


def search_shared(args: argparse.Namespace, parts: Parts) -> Outcome:
    """Run the search on two feeds."""
    began = time.monotonic()
    with (
        mbaas.serve("train", parts[0], TRAIN, batch_size=32, prep_workers=1) as feed,
        mbaas.serve("validation", parts[1], VALIDATION, batch_size=64, shuffle=False, prep_workers=1),
    ):
        results = search(train, args, FeedCallback("train", "validation"))
        status = feed.status()
    return Outcome(results, time.monotonic() - began, status.prepared_samples, status.delivered_samples)


def search_alone(args: argparse.Namespace, parts: Parts) -> Outcome:
    """Run the search with a DataLoader per trial."""
    began = time.monotonic()
    results = search(tune.with_parameters(train_alone, parts=parts), args)
    return of_own_loaders(results, time.monotonic() - began)


@contextmanager
def recordings(data: Path | None, count: int) -> Iterator[Parts]:
    """Yield training and validation data."""
    with tempfile.TemporaryDirectory(prefix="sounds") as folder:
        found = mbaas.read_audio(data or write_sounds(Path(folder), count))
        yield found.split(0.8, stratify="label")


def run(args: argparse.Namespace) -> None:
    with recordings(args.data, args.recordings) as parts:
        print(f"{len(parts[0])} recordings to train on, {len(parts[1])} to validate with")
        # one CPU for each of the two prep workers, and two for the four trials; Ray's CPUs need not be cores
        ray.init(num_cpus=2 + AT_ONCE // 2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
        logging.getLogger("ray.tune").setLevel(logging.ERROR)
        outcomes = {"one feed": search_shared(args, parts)}
        if args.compare:
            outcomes["a DataLoader per trial"] = search_alone(args, parts)
    for each in outcomes.values():
        if each.results.num_errors:
            raise SystemExit(f"{each.results.num_errors} trials failed: {each.results.errors[0]}")
    shared = outcomes["one feed"]
    best = shared.results.get_best_result()
    chosen = ", ".join(f"{name} {best.config[name]:.4g}" for name in ("learning_rate", "width", "batch_size"))
    print(f"best trial: {best.metrics['accuracy']:.1%} validation accuracy with {chosen}")
    print(f"{len(shared.results)} trials, exact: {all(result.metrics['exact'] for result in shared.results)}")
    print(f"{shared.prepared:,} samples prepared, {shared.delivered:,} delivered")
    if args.compare:
        show("accuracy", outcomes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, metavar="DIR", help="recordings, one folder per class")
    parser.add_argument("--recordings", type=int, default=400, help="to write, without --data (default: 400)")
    parser.add_argument("--trials", type=int, default=6, help="configurations to try (default: 6)")
    parser.add_argument("--epochs", type=int, default=8, help="of the longest trial (default: 8)")
    parser.add_argument("--compare", action="store_true", help="search again without sharing, and show both")
    args = parser.parse_args()
    try:
        run(args)
    except KeyboardInterrupt:
        parser.exit(130, "interrupted: feeds are stopped, temporary files are gone\n")
    except mbaas.MbaasError as error:
        parser.exit(2, f"{parser.prog}: {error}\n")


if __name__ == "__main__":
    main()
