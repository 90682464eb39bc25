"""The version of the messages, computed from their types."""

from __future__ import annotations

import inspect
from typing import get_args
from zlib import crc32

from mbaas.memory.part_memory import PartAddress
from mbaas.memory.slots import SlotColumn
from mbaas.wire import blocks, consumers, ranks, samples


def _protocol() -> str:
    # Changes with the messages, their fields and the fields' types.
    rooms = (samples, blocks, consumers, ranks)
    messages = [
        each for room in rooms for each in vars(room).values() if getattr(each, "__module__", "") == room.__name__
    ]
    kinds = [*(each for each in messages if isinstance(each, type)), *get_args(PartAddress), SlotColumn]
    described = sorted((kind.__name__, [*inspect.get_annotations(kind).items()]) for kind in kinds)
    return f"{crc32(repr(described).encode()):08x}"


PROTOCOL = _protocol()
"""Hash of the message types, 8 hex digits. Programs can communicate only if their values are equal; it differs between
versions of mbaas."""
