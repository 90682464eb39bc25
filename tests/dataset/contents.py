"""Helpers that read all samples and all field values of a dataset."""

from __future__ import annotations

from typing import Any

import numpy as np

from mbaas.dataset import Dataset


def content(data: Dataset) -> list[bytes]:
    reader, found = data.reader(), []
    for sample, length in enumerate(data.lengths(np.arange(len(data))).tolist()):
        buffer = np.empty(length, np.uint8)
        reader.read_into(sample, buffer)
        found.append(buffer.tobytes())
    return found


def values(data: Dataset) -> dict[str, list[Any]]:
    """Return the values of all fields, which must have fixed shapes."""
    return {name: array.tolist() for name, array in data.values(np.arange(len(data))).items()}
