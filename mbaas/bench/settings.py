"""What the side-by-side benchmark is asked to do."""

from __future__ import annotations

import os
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from mbaas.errors import ConfigError

ROWS = ("prep", "dataloader", "dali", "mbaas")
"""All rows, in the order in which they are run and shown; "prep" is P, which the others are compared with."""


def usable_cores() -> int:
    """CPUs that this process may run on."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Options of `mbaas.bench.runner.run`.

    Attributes:
        data: a folder of JPEG or PNG files; None makes `photos` photographs (see `mbaas.bench.photos`).
        cache_dir: where photographs that were made are kept for the next time.
        photos: how many photographs to make.
        rows: which of `ROWS` to run. "prep" has to be one of them for the share of N x P.
        trials: numbers of trials N, each tried with each batch size.
        batches: samples in a minibatch.
        rounds: how often everything is run; the rows of a round run one after the other, results are medians over
            rounds.
        seconds: least length of each trial's timed window, which is whole epochs after a warm-up of the same length: by
            then every process has touched the memory that it uses again and again.
        epochs: exactly so many epochs in the window instead, or None.
        cores: CPUs that prep may use: prep workers of P and mbaas, threads of DALI, workers of the DataLoaders.
        dataloader_workers: worker processes of each trial's DataLoader; None: see `mbaas.bench.dataloader.workers_for`.
        array: what an mbaas trial asks for: "numpy" are read-only views of shared memory, "torch" are private copies.
        seed: of order and transforms.
        timeout_s: a row that takes longer is stopped and reported as failed.

    Raises:
        ConfigError: an option out of range.
    """

    data: Path | None = None
    cache_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "mbaas-bench")
    photos: int = 2000
    rows: tuple[str, ...] = ROWS
    trials: tuple[int, ...] = (1, 4, 8)
    batches: tuple[int, ...] = (64, 256)
    rounds: int = 3
    seconds: float = 8.0
    epochs: int | None = None
    cores: int = field(default_factory=usable_cores)
    dataloader_workers: int | None = None
    array: Literal["torch", "numpy"] = "numpy"
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        counts: dict[str, tuple[int, ...]] = {
            "photos": (self.photos,),
            "rounds": (self.rounds,),
            "cores": (self.cores,),
            "epochs": (1 if self.epochs is None else self.epochs,),
            "trials": self.trials,
            "batches": self.batches,
        }
        for name, values in counts.items():
            if not values or min(values) < 1:
                raise ConfigError(f"{name} must be at least 1, got {', '.join(map(str, values)) or 'nothing'}")
        if self.seconds < 0 or self.timeout_s <= 0:
            raise ConfigError(f"seconds must be >= 0 and timeout_s > 0, got {self.seconds} and {self.timeout_s}")
        if self.dataloader_workers is not None and self.dataloader_workers < 0:
            raise ConfigError(f"dataloader_workers must be 0 or more, got {self.dataloader_workers}")

    def _check_choices(self) -> None:
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not self.rows:
            raise ConfigError(f"rows must be among {', '.join(ROWS)}, got {', '.join(unknown) or 'none'}")
        if self.array not in ("torch", "numpy"):
            raise ConfigError(f"array must be 'torch' or 'numpy', got {self.array!r}")
