"""Ray Train runs of two workers, started from a separate process, and a register of the data their ranks read."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray import train
from ray.train.torch import TorchTrainer

RANKS = 2


@ray.remote(num_cpus=0)
class Register:
    """Collects the data read by every rank of every trial, as `EpochRecord`s or in a test's own form."""

    def __init__(self) -> None:
        self._seen: dict[str, dict[int, list[Any]]] = {}

    def add(self, trial: str, rank: int, record: Any) -> None:
        self._seen.setdefault(trial, {}).setdefault(rank, []).append(record)

    def seen(self) -> dict[str, dict[int, list[Any]]]:
        return self._seen


@ray.remote(num_cpus=0)
class Driver:
    """A process that starts runs, and holds their controllers and Ctrl-C handler until it ends."""

    def fit(self, *args: Any, **run: Any) -> None:
        fit(*args, **run)


def fit(
    work: Callable[[dict[str, Any]], None], config: dict[str, Any], folder: str, name: str, cpus: int = 1, **run: Any
) -> None:
    """Run Ray Train with 2 workers."""
    workers = train.ScalingConfig(num_workers=RANKS, resources_per_worker={"CPU": cpus})
    run_config = train.RunConfig(name=name, storage_path=folder, **run)
    TorchTrainer(work, train_loop_config=config, scaling_config=workers, run_config=run_config).fit()
