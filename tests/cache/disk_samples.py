"""Samples of known content for the disk tier's tests, and the files that hold them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from mbaas.cache.disk.store import ROW, DiskStore
from mbaas.cache.slab import pack

SAMPLES = 300
PRINT = "0123456789abcdef0123456789abcdef"
OTHER = "fedcba9876543210fedcba9876543210"
LENGTHS = np.random.default_rng(7).integers(1, 400, SAMPLES)
EVERYTHING = int(LENGTHS.sum()) + ROW.itemsize * SAMPLES


def content(sample_id: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng([seed, sample_id]).integers(0, 256, LENGTHS[sample_id], np.uint8)


def open_tier(path: Path, *, budget: int = EVERYTHING, fingerprint: str = PRINT, **options: Any) -> DiskStore:
    options = {"num_samples": SAMPLES, "segment_bytes": 5_000, "lock_wait_s": 0.0} | options
    return DiskStore(path, budget, fingerprint, **options)


def put(tier: DiskStore, ids: Iterable[int], *, seed: int = 0) -> list[int]:
    """Store samples in one call; return the ids of the stored ones."""
    chosen = np.array([*ids], np.int64)
    data = np.concatenate([np.zeros(0, np.uint8), *(content(i, seed) for i in chosen.tolist())])
    return chosen[tier.put(chosen, LENGTHS[chosen], data)].tolist()


def get(tier: DiskStore, ids: Iterable[int], *, seed: int = 0) -> list[int]:
    """Get samples in one call, with a gap before each. Check every byte and return those found."""
    chosen = np.array([*ids], np.int64)
    lengths = LENGTHS[chosen]
    offsets = pack(lengths + 3) + 3
    buffer = np.full(int((lengths + 3).sum()) + 1, 170, np.uint8)
    found = tier.get(chosen, lengths, buffer=buffer, offsets=offsets)
    untouched = np.ones(len(buffer), np.bool_)
    for sample_id, offset, length, came in zip(chosen.tolist(), offsets, lengths, found, strict=True):
        untouched[offset : offset + length] = False
        if came:
            assert (buffer[offset : offset + length] == content(sample_id, seed)).all(), f"sample {sample_id}"
    assert (buffer[untouched] == 170).all()
    return chosen[found].tolist()


def folder(path: Path, fingerprint: str = PRINT) -> Path:
    return path / fingerprint


def disk_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*.bin"))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x10
    path.write_bytes(data)
