"""Checks that the ranks of a data-parallel trial together completed an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from support.trials import EpochRecord


def union_flaws(records: Sequence[EpochRecord], due: Iterable[int], *, batch_size: int) -> list[str]:
    """Describe deviations of all ranks' records from one exact epoch over the samples ``due``; empty if none.

    Every sample must be with one rank, and every rank must make the same number of steps. Each step must have
    ``batch_size`` samples over all ranks, except for the last, divided evenly. Every rank's ledger must be exact.
    """
    flaws = [
        f"the ledger of rank {rank} is {record.ledger}"
        for rank, record in enumerate(records)
        if record.ledger is None or not record.ledger.exact
    ]
    wanted = np.unique(np.fromiter(due, np.int64))
    got, times = np.unique(np.concatenate([record.sample_ids for record in records]), return_counts=True)
    found = {
        "missing": np.setdiff1d(wanted, got),
        "not due": np.setdiff1d(got, wanted),
        "more than once": got[times > 1],
    }
    flaws += [f"{len(ids)} samples {what}: {ids[:10].tolist()}" for what, ids in found.items() if len(ids)]
    steps = [len(record.sizes) for record in records]
    if len(set(steps)) > 1:
        return [*flaws, f"ranks made {steps} steps"]
    sizes = np.array([record.sizes for record in records], np.int64).reshape(len(records), -1)
    uneven = np.flatnonzero(np.ptp(sizes, axis=0) > 1)
    other = np.flatnonzero(sizes.sum(axis=0)[:-1] != batch_size)
    flaws += [f"step {step} has {sizes[:, step].tolist()} samples" for step in (*uneven.tolist(), *other.tolist())]
    return flaws
