"""Memory for private minibatches is reused, but never while anything refers to it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from mbaas.client.batches import FREE_PIECES, LEAST_REUSED_BYTES, BatchCutter, BlockView, RecycledMemory, is_private
from mbaas.client.convert import make_converter
from mbaas.samples.fields import Packed

ROWS = LEAST_REUSED_BYTES // 1024 + 3


def address(array: Any) -> int:
    return int(torch.as_tensor(array).data_ptr())


def large(value: int, rows: int = ROWS) -> np.ndarray:
    return np.full((rows, 1024), value, np.uint8)


def test_memory_that_nothing_refers_to_is_used_again():
    memory = RecycledMemory()
    first = memory.copy(large(1))
    where = address(first)
    del first
    again = memory.copy(large(2, ROWS + 5))
    assert address(again) == where, "the second array is slightly larger, but fits"
    np.testing.assert_array_equal(again, large(2, ROWS + 5))
    assert is_private(again)


@pytest.mark.parametrize(
    "seen_by",
    [
        lambda array: array,
        lambda array: array[5:, ::2],
        lambda array: array.reshape(-1).view(np.int32)[3:],
        lambda array: torch.from_numpy(array).permute(1, 0)[:7],
        lambda array: torch.from_dlpack(array[1:]),
        lambda array: memoryview(array),
    ],
    ids=["itself", "a view", "a view of another type", "a tensor", "a tensor by DLPack", "a buffer"],
)
def test_what_somebody_still_sees_is_not_used_again(seen_by: Any):
    memory = RecycledMemory()
    first = memory.copy(large(1))
    seen, where = seen_by(first), address(first)
    del first
    others = [memory.copy(large(value)) for value in (2, 3, 4)]
    assert where not in map(address, others)
    assert set(np.asarray(seen).reshape(-1).view(np.uint8).tolist()) == {1}
    del seen
    assert address(memory.copy(large(5))) == where


def test_only_a_few_pieces_wait_to_be_used_again():
    memory = RecycledMemory()
    kept = [memory.empty((ROWS, 1024), np.uint8) for _ in range(FREE_PIECES + 3)]
    del kept
    assert len(memory._free) == FREE_PIECES


def test_what_is_too_small_is_let_go_and_small_arrays_are_left_to_numpy():
    memory = RecycledMemory()
    memory.empty((ROWS, 1024), np.uint8)
    assert memory.empty((4 * ROWS, 1024), np.uint8).shape == (4 * ROWS, 1024)
    assert len(memory._free) == 1, "the large one, in the place of the first"
    small = memory.copy(np.arange(5.0))
    assert small.tolist() == [0, 1, 2, 3, 4]
    assert small.base is None


@pytest.mark.parametrize("format", ["torch", "numpy"])
def test_minibatches_that_a_trial_keeps_stay_as_they_are(format: str):
    """Each minibatch is copied from its block before the block is overwritten. Every second one is kept."""
    memory = RecycledMemory()
    converter = make_converter(format, None, None, has_images=False, memory=memory)
    kept, wanted = [], []
    for value in range(4):
        part = {"array": large(value), "sample_id": np.arange(ROWS)}
        cutter = BatchCutter(memory)
        cutter.put(BlockView([part]))
        cutter.detach_copy()
        batch = converter.finish(converter.start(cutter.cut(ROWS)))
        part["array"].flags.writeable = True
        part["array"][:] = 99  # the block's memory is reused
        if value % 2:
            kept.append(batch["array"])
            wanted.append(value)
        del batch, cutter, part
    for array, value in zip(kept, wanted, strict=True):
        np.testing.assert_array_equal(np.asarray(array), large(value))


def test_values_of_different_lengths_are_copied_to_such_memory_too():
    memory = RecycledMemory()
    bounds = np.array([0, 7, ROWS])
    packed = Packed(large(3), bounds)
    packed.values.flags.writeable = False
    for _ in range(2):
        cutter = BatchCutter(memory)
        cutter.put(BlockView([{"array": packed, "sample_id": np.arange(2)}]))
        cutter.detach_copy()
        own = cutter.cut(2)["array"]
        np.testing.assert_array_equal(own.values, large(3))
        assert own.bounds.tolist() == bounds.tolist()
        del own, cutter
    assert len(memory._free) == 1
