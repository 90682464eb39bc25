"""`mbaas ledger` works for a feed without ledgers, before a trial has finished an epoch."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from pyarrow import parquet
from typer.testing import CliRunner

import mbaas
from mbaas.cli import app, ledger
from mbaas.feed import ledger_table


def test_a_feed_without_ledgers_is_shown_and_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "join_cluster", lambda _: None)
    monkeypatch.setattr(mbaas, "connect", lambda name: SimpleNamespace(ledger=lambda: ledger_table([])))

    def shown(*options: str) -> str:
        done = CliRunner().invoke(app, ["ledger", "train", *options], catch_exceptions=False)
        return done.stdout.strip()

    assert shown() == "no consumer has finished an epoch yet"
    assert shown("--inexact") == "no consumer has finished an epoch yet"
    assert shown("--json") == "[]"
    shown("--parquet", str(tmp_path / "ledgers.parquet"))
    assert parquet.read_table(tmp_path / "ledgers.parquet").num_rows == 0
