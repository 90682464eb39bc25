"""``mbaas bench``: the side-by-side benchmark as a command."""

from __future__ import annotations

import importlib.util
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from mbaas.cli.console import DECISIONS, AsJson, app, command, end_as_ctrl_c, err, line, write_result
from mbaas.errors import ConfigError, MbaasError
from mbaas.tools.bench import SAMPLES

NEEDED = {
    "images": {"skimage": "scikit-image"},
    "detection": {"skimage": "scikit-image"},
    "audio": {"soundfile": "soundfile", "soxr": "soxr"},
}
"""Modules of the bench extra that each task needs, and their package names."""


def check_installed(task: str = "images") -> None:
    """Raise MbaasError before the benchmark starts if the bench extra is not installed."""
    needed = NEEDED.get(task, {})  # `BenchSettings` rejects unknown tasks
    missing = [package for module, package in needed.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MbaasError(f"mbaas bench needs {' and '.join(missing)}: pip install {' '.join(missing)}")


def numbers(option: str, text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers with commas between, such as 1,4,8, got {text!r}") from None


@command(app, DECISIONS)
def bench(
    task: str = "images",
    trials: Annotated[str, typer.Option(metavar="N,N")] = "1,4,8",
    batch: Annotated[str, typer.Option(metavar="N,N")] = "64,256",
    pipelines: int = 1,
    rounds: int = 3,
    rows: Annotated[str | None, typer.Option(metavar="ROW,ROW")] = None,
    decoded: bool = True,
    peers: Annotated[bool, typer.Option("--peers")] = False,
    peers_python: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    gpu: Annotated[bool, typer.Option("--gpu")] = False,
    data: Annotated[Path | None, typer.Option(metavar="PATH")] = None,
    image_folder: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    samples: Annotated[int, typer.Option("--samples", "--images")] = SAMPLES,
    seconds: float = 8.0,
    cores: int | None = None,
    read: Annotated[str, typer.Option(metavar="pages|all")] = "pages",
    as_json: AsJson = False,
) -> None:
    """Compare mbaas on this machine with a PyTorch DataLoader per trial and DALI per trial.

    Each row runs N trials in separate processes. The task is images (random-resized-crop to 224 and flip), detection
    (images and boxes: random-IoU-crop to 300, flip and colour) or audio (log-mel spectrograms of a second, with
    SpecAugment). Every epoch of every trial is checked for missing and repeated samples. Needs the bench extra: pip
    install 'mbaas\\[bench]'

    Args:
        task: Task: images, detection or audio.
        trials: Trials at a time; a table for each number.
        batch: Samples in a minibatch.
        pipelines: Different pipelines, up to 8, that the trials have in turn; with images only.
        rounds: Repetitions of each row; results are medians.
        rows: Rows to run, from prep, prep-decoded, memory, dataloader, dali, mbaas, mbaas-decoded. Default: all.
        decoded: Run prep-decoded and mbaas-decoded, which cache decoded samples, as a feed does by default. All other
            rows use encoded samples.
        peers: Also run tensorsocket, tf-data (its service) and ray-data, which share samples between trials, too; with
            images only.
        peers_python: Python interpreter with mbaas\\[bench,peers], for peers that are not installed here.
        gpu: Prepare on the first GPU, in rows prep, dali and mbaas, and deliver there, in dataloader, too. With images
            only.
        data: Your own images or audio files, one folder per class, instead of generated ones; for detection a JSON file
            of COCO instances.
        image_folder: Image folder for that JSON file.
        samples: Number of photographs or audio files to generate, without --data.
        seconds: Minimum duration of each measurement.
        cores: CPUs that prep may use. Default: all.
        read: Part of each minibatch that trials read: one byte per page, or all.

    Examples:
        mbaas bench                                   [dim]takes about half an hour[/]
        mbaas bench --trials 8 --batch 64 --rows prep,mbaas
        mbaas bench --data ~/imagenet/val --json > bench.json
        mbaas bench --task detection --data instances_val2017.json --image-folder val2017
        mbaas bench --task audio
        mbaas bench --gpu
        mbaas bench --peers --peers-python ~/peers/bin/python
    """
    check_installed(task)
    from mbaas.tools.bench.peers import PEERS
    from mbaas.tools.bench.render import render
    from mbaas.tools.bench.rows import DECODED_ROWS, GPU_ROWS, PIPELINE_ROWS, USUAL_ROWS, BenchSettings, usable_cores
    from mbaas.tools.bench.runner import run

    usual = GPU_ROWS if gpu else USUAL_ROWS
    chosen = tuple(row.strip() for row in rows.split(",")) if rows is not None else usual
    chosen = chosen if pipelines == 1 or rows is not None else tuple(row for row in chosen if row in PIPELINE_ROWS)
    chosen = tuple(row for row in chosen if decoded or row not in DECODED_ROWS)
    settings = BenchSettings(
        task=task,
        data=data,
        image_folder=image_folder,
        samples=samples,
        trials=numbers("--trials", trials),
        batch=numbers("--batch", batch),
        rows=tuple(dict.fromkeys([*chosen, *(PEERS if peers else ())])),
        pipelines=pipelines,
        rounds=rounds,
        seconds=seconds,
        read=cast("Any", read),
        gpu=gpu,
        peers_python=peers_python,
        cores=usable_cores() if cores is None else cores,
    )
    with end_as_ctrl_c():
        report = run(settings, lambda text: line(err, text, style="dim"))
    write_result({**asdict(report), "is_sound": report.is_sound}, lambda: render(report), as_json=as_json)
    if not report.is_sound:
        raise MbaasError(
            "the benchmark is not sound: a row failed, or samples were missing, repeated or spilled; see above"
        )
