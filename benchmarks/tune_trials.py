"""Parts of Ray Tune trials that several benchmarks share: checkpoints of a position, and an end for HyperBand."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from ray import tune

_FILE = "state.json"


def restored_state() -> dict[str, Any] | None:
    """Return the state in the checkpoint that this trial resumes from, or None if it starts from scratch."""
    checkpoint = tune.get_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as folder:
        state: dict[str, Any] = json.loads((Path(folder) / _FILE).read_text())
        return state


def report_with_state(metrics: dict[str, Any], state: dict[str, Any]) -> None:
    """Report the metrics with a checkpoint that contains ``state``."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / _FILE).write_text(json.dumps(state))
        tune.report(metrics, checkpoint=tune.Checkpoint.from_directory(folder))


def stop_at(max_t: int) -> dict[str, int]:
    """Return the stop criterion that a search by `HyperBandScheduler` needs to end with Ray 2.60.

    Without it, the scheduler pauses a trial that reaches ``max_t`` before the other finalists of its bracket. When the
    last one gets there, `_Bracket.cleanup_full` (ray/tune/schedulers/hyperband.py) stops only trials whose status is
    PAUSED. A trial that is still saving its state (`Trial.is_saving`) is RUNNING until the save is done, becomes PAUSED
    afterwards, and is never resumed or stopped. The scheduler checks ``is_saving`` in all other places. The same
    happens if the last finalist ends on its own, because `HyperBandScheduler.on_trial_remove` does nothing for a
    finished bracket. With the criterion, Tune stops each trial at ``max_t`` before the scheduler can pause it.
    """
    return {"training_iteration": max_t}
