"""Status snapshots without a running feed, for tests of views."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from mbaas.memory.budgets import MemoryClaim
from mbaas.model.sharing import LoadingCosts, Repeats
from mbaas.status import ConsumerStatus, FeedStatus
from mbaas.wire.consumers import Claims, ConsumerReport
from mbaas.wire.samples import Amount, FetchCounts

LISTS = (
    "consumers",
    "pipelines",
    "workers",
    "waits_for",
    "skipped",
    "notes",
    "ledgers",
    "nodes",
    "worker_changes",
    "moves_s",
    "rank_steps",
)
NOTHING = ("prediction_error", "failed", "decoded_costs", "lending", "engine_choice")
OTHERS = ("name", "engine", "claims", "decoded", "decoded_on_disk", "fetched", "costs", "repeats", *NOTHING)


def feed_status(**given: Any) -> FeedStatus:
    """A feed with one busy worker and no events; all numbers are 1 by default."""
    numbers = {field.name: 1 for field in fields(FeedStatus) if field.name not in (*LISTS, *OTHERS)}
    values: dict[str, Any] = {**numbers, **dict.fromkeys(LISTS, ())}
    claims = Claims(memory=MemoryClaim(0, 1), cpus=1.0, gpus=0.0)
    values |= {"name": "train", "engine": "cpu", "claims": claims, "fetched": FetchCounts(), "costs": LoadingCosts()}
    values |= {"decoded": Amount(), "decoded_on_disk": Amount(), "repeats": Repeats(), "samples_ahead": 0}
    return FeedStatus(**{**values, **dict.fromkeys(NOTHING), **given})


def consumer(name: str, *, trial: str = "", state: str = "busy", **given: Any) -> ConsumerStatus:
    """A consumer; by default it is a trial without ranks at the start of the first epoch."""
    values: dict[str, Any] = {
        "is_unassigned": False, "epoch": 0, "block": 0, "blocks_per_epoch": 8, "pipeline": "", "difference": "",
        "held_blocks": 0, "cohort": 0, "apart": "", "waits_for": "", "report": ConsumerReport(), "last_ledger": None,
    }  # fmt: skip
    return ConsumerStatus(name=name, state=state, trial=trial or name, **{**values, **given})
