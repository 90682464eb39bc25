"""A search small enough for a test, and checks of its effects on a feed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray
from ray import tune

import mbaas
from mbaas.status import FeedStatus
from tune_integration import FeedCallback

SAMPLES = 203
"""Samples of the test dataset; no batch size divides this number."""

DEADLINE_S = 60.0


@ray.remote(num_cpus=0)
class Gate:
    """Opens for good when all parties have arrived."""

    def __init__(self, parties: int) -> None:
        self._missing = parties

    def arrive(self) -> None:
        self._missing -= 1

    def open(self) -> bool:
        return self._missing <= 0


def pass_gate(gate: Any) -> None:
    """Wait until all trials have arrived, so results do not depend on start times."""
    ray.get(gate.arrive.remote())
    wait_at(gate)


def wait_at(gate: Any) -> None:
    """Wait until the gate opens, without arriving."""
    deadline = time.monotonic() + DEADLINE_S
    while not ray.get(gate.open.remote()):
        assert time.monotonic() < deadline, f"not all trials came within {DEADLINE_S:g} s"
        time.sleep(0.01)


def save(state: dict[str, Any]) -> tune.Checkpoint:
    """A checkpoint that contains ``state``; Tune copies it immediately."""
    import json

    folder = Path(tempfile.mkdtemp(dir=Path.cwd()))
    (folder / "state.json").write_text(json.dumps(state))
    return tune.Checkpoint.from_directory(str(folder))


def restored() -> dict[str, Any] | None:
    """The state in the checkpoint that this trial continues."""
    import json

    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = json.loads((Path(folder) / "state.json").read_text())
    return state


class Watch(tune.Callback):
    """Records the statuses of each trial in order, and training_iteration of each result."""

    def __init__(self) -> None:
        self.statuses: dict[str, list[str]] = {}
        self.iterations: dict[str, list[int]] = {}

    def on_step_end(self, iteration: int, trials: list[Any], **info: Any) -> None:
        for trial in trials:
            seen = self.statuses.setdefault(trial.trial_id, [])
            if seen[-1:] != [trial.status]:
                seen.append(trial.status)

    def resumed(self, trial_id: str) -> bool:
        seen = self.statuses[trial_id]
        return "PAUSED" in seen and "RUNNING" in seen[seen.index("PAUSED") :]

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        self.iterations.setdefault(trial.trial_id, []).append(result["training_iteration"])


def search(
    train: Callable[[dict[str, Any]], None] | type[tune.Trainable],
    *feeds: str,
    space: dict[str, Any],
    samples: int = 1,
    scheduler: Any = None,
    slots: int = 4,
    cpus: int = 1,
    reuse_actors: bool = False,
    max_failures: int = 0,
    watch: Watch | None = None,
    callbacks: Sequence[tune.Callback] = (),
) -> tune.ResultGrid:
    """Run a search that maximizes ``score``."""
    with tempfile.TemporaryDirectory() as folder:
        return tune.Tuner(
            tune.with_resources(train, {"cpu": cpus}),
            param_space=space,
            tune_config=tune.TuneConfig(
                metric="score",
                mode="max",
                num_samples=samples,
                scheduler=scheduler,
                max_concurrent_trials=slots,
                reuse_actors=reuse_actors,
            ),
            run_config=tune.RunConfig(
                storage_path=folder,
                callbacks=[FeedCallback(*feeds), watch or Watch(), *callbacks],
                failure_config=tune.FailureConfig(max_failures=max_failures),
                verbose=0,
            ),
        ).fit()


class OneOfMany:
    """A feed shared by consecutive searches; its counters start at zero for each.

    Attributes:
        name: of the feed.
    """

    def __init__(self, feed: mbaas.Feed) -> None:
        self.name = feed.name
        self._feed, self._before = feed, feed.status()

    def status(self) -> FeedStatus:
        """The feed's status, with counters since this object's creation."""
        now, before = self._feed.status(), self._before
        counters = "prepared_blocks", "prepared_samples", "remade_blocks", "delivered_samples", "inexact_epochs"
        return replace(
            now,
            notes=tuple(note for note in now.notes if note not in before.notes),
            ledgers=now.ledgers[len(before.ledgers) :],
            **{name: getattr(now, name) - getattr(before, name) for name in counters},
        )


def final_status(feed: mbaas.Feed | OneOfMany) -> FeedStatus:
    """The feed's status after all consumers have left; fails if a consumer or a reservation remains."""
    deadline = time.monotonic() + 5.0
    while (status := feed.status()).consumers and time.monotonic() < deadline:
        time.sleep(0.02)
    assert status.consumers == (), status.consumers
    return status


def check_ledgers(status: FeedStatus, finished_epochs: int) -> None:
    """Each finished epoch of a trial contained every sample exactly once, and no reservation lapsed."""
    assert status.inexact_epochs == 0
    assert all(ledger.exact for _, ledger in status.ledgers)
    assert len(status.ledgers) == finished_epochs, [(name, ledger.epoch) for name, ledger in status.ledgers]
    assert not [note for note in status.notes if "reservation given up" in note], status.notes
