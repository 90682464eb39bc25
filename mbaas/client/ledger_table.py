"""Ledgers as an Arrow table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

import pyarrow as pa

from mbaas.wire.samples import LedgerEntry

SCHEMA = pa.schema(
    [
        ("consumer", pa.string()),
        ("epoch", pa.int64()),
        ("feed_epoch", pa.int64()),
        ("begin", pa.int64()),
        ("shuffled", pa.string()),
        ("pipeline", pa.string()),
        ("samples", pa.int64()),
        ("expected_samples", pa.int64()),
        ("id_hash", pa.uint64()),
        ("expected_id_hash", pa.uint64()),
        ("exact", pa.bool_()),
        ("seconds", pa.float64()),
        ("arrived", pa.timestamp("ms", tz="UTC")),
    ]
)


def to_table(entries: Sequence[LedgerEntry]) -> pa.Table:
    """Return a row for each ledger; see `mbaas.Feed.ledger`."""
    rows = [
        {
            "consumer": entry.consumer,
            **asdict(entry.ledger),
            "exact": entry.ledger.exact,
            "arrived": int(1000 * entry.at),  # milliseconds
        }
        for entry in entries
    ]
    return pa.Table.from_pylist(rows, SCHEMA)
