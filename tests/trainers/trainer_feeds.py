"""Feed sizes, model and result helpers for tests of trainers, and the programs of docs/how-to/trainers.md."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

import mbaas
from support.pages import ROOT, block_with

SAMPLES, BATCH = 203, 16
STEPS = -(-SAMPLES // BATCH)
"""Minibatches per epoch: 203 = 12 x 16 + 11, so 13, the last one with 11 samples."""

SIDE, CLASSES = 8, 10
EVERY = list(range(SAMPLES))


def join(feed: mbaas.Feed, consumer: str, **options: Any) -> mbaas.Loader:
    return join_feed(feed.name, consumer, **options)


def join_feed(feed: str, consumer: str, **options: Any) -> mbaas.Loader:
    return mbaas.join(feed, consumer, wait_timeout_s=60, **options)


def ids_of(batch: dict[str, Any]) -> list[int]:
    return [int(number) for number in batch["sample_id"]]


def read(loader: Iterable[dict[str, Any]]) -> list[int]:
    """Sample ids of an epoch, or of the rest of one."""
    return [number for batch in loader for number in ids_of(batch)]


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * SIDE * SIDE, CLASSES))


def loss_of(model: torch.nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(model(batch["image"]), batch["label"])


def finished(feed: mbaas.Feed, consumer: str) -> list[tuple[int, bool]]:
    """(epoch, is exact) of each ledger of the consumer that the feed has."""
    table = feed.ledger()
    rows = zip(*(table[name].to_pylist() for name in ("consumer", "epoch", "exact")), strict=True)
    return [(epoch, exact) for name, epoch, exact in rows if name == consumer]


def run_block(text: str, names: dict[str, Any], changes: Mapping[str, str]) -> None:
    """Run the block of the page that contains ``text``, with its feeds and other pieces replaced."""
    block = block_with(ROOT / "docs" / "how-to" / "trainers.md", text)
    program = block.text
    for old, new in changes.items():
        assert old in program
        program = program.replace(old, new)
    replace(block, text=program).run(names)
