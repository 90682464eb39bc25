"""A GPU reads and writes page-locked host memory in place."""

from __future__ import annotations

import gc
import mmap
import os

import numpy as np
import pytest
import torch

from mbaas.client.convert import make_converter
from mbaas.memory import pinned, slots
from mbaas.memory.pinned import CudaError, PageLocks
from mbaas.memory.slots import SlotMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]

NBYTES = 1 << 20


def shared(access: int) -> np.ndarray:
    """Memory that other processes could map, too."""
    memory = os.memfd_create("test")
    os.ftruncate(memory, NBYTES)
    os.pwrite(memory, bytes(range(256)) * (NBYTES // 256), 0)
    mapped = np.frombuffer(mmap.mmap(memory, NBYTES, prot=access), np.uint8)
    os.close(memory)
    return mapped


@pytest.mark.parametrize("access", [mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE], ids=["read-only", "writable"])
def test_memory_is_locked_once_and_copied_from(access: int) -> None:
    gpu, memory = pinned.gpu(0), shared(access)
    gpu.lock(memory)
    with pytest.raises(CudaError, match="CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED"):
        gpu.lock(memory)
    tensor, stream = torch.empty(NBYTES, dtype=torch.uint8, device="cuda:0"), torch.cuda.Stream()
    gpu.copy_to_device(tensor.data_ptr(), memory, stream.cuda_stream)
    stream.synchronize()
    np.testing.assert_array_equal(tensor.cpu(), memory)
    gpu.unlock(memory)
    gpu.lock(memory)
    gpu.unlock(memory)


def test_pieces_are_copied_to_the_host_whether_it_is_locked_or_not() -> None:
    gpu, known = pinned.gpu(0), torch.arange(NBYTES, device="cuda:0").to(torch.uint8)
    torch.cuda.synchronize()
    locked, plain = shared(mmap.PROT_READ | mmap.PROT_WRITE), np.empty(NBYTES, np.uint8)
    gpu.lock(locked)
    for memory in (locked, plain):
        memory[:] = 77
        pieces = [(0, 1000), (4096, 9), (NBYTES - 5, 5)]
        gpu.copy_to_host((memory.ctypes.data + at, known.data_ptr() + at, nbytes) for at, nbytes in pieces)
        wanted = np.full(NBYTES, 77, np.uint8)
        for at, nbytes in pieces:
            wanted[at : at + nbytes] = known.cpu().numpy()[at : at + nbytes]
        np.testing.assert_array_equal(memory, wanted)
    gpu.unlock(locked)


def test_locks_are_let_go_by_what_is_over() -> None:
    gpu, locks = pinned.gpu(0), PageLocks()
    first, second = shared(mmap.PROT_READ), shared(mmap.PROT_READ)
    assert locks.take(first, gpu)
    assert locks.take(first, gpu)
    assert locks.take(second, gpu)
    locks.let_go(lambda memory: memory.ctypes.data == first.ctypes.data)
    assert first not in locks
    assert second in locks
    gpu.lock(first)
    gpu.unlock(first)
    locks.let_go(lambda _: True)
    assert second not in locks


def test_what_cannot_be_locked_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    gpu, locks = pinned.gpu(0), PageLocks()
    memory = shared(mmap.PROT_READ)
    gpu.lock(memory)
    assert not locks.take(memory, gpu)
    assert not locks.take(memory, gpu)
    assert not locks.take(shared(mmap.PROT_READ), gpu)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" in caplog.text
    gpu.unlock(memory)


def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_DEVICE"):
        pinned.gpu(99)


def test_minibatches_are_copied_from_slots_which_are_held_until_that_is_done() -> None:
    """Slot memory is page-locked, other arrays are not; no slot is held after an epoch."""
    memory = SlotMemory(1 << 21)
    pinned.page_locks.let_go(lambda _: True)
    epochs, images = 2, np.random.default_rng(0).integers(0, 255, (4, 300, 300, 3), np.uint8)
    for _ in range(epochs):
        converter, started, given = make_converter("torch", "cuda", None), [], []
        for number in range(3):
            place = memory.take(4)
            assert place is not None
            own = place.samples(images)
            own[:] = images + number
            written = place.hand_out({"image": own, "sample_id": np.arange(4)})
            assert written is not None
            held = written.staged()
            assert held is not None
            arrays = held.read()
            del held
            assert arrays is not None
            room = slots.room_of(arrays["image"])
            assert room is not None
            started.append(converter.start(arrays))
            assert room in pinned.page_locks
            del arrays
            if number:
                given.append(converter.finish(started.pop(0)))
        given.append(converter.finish(started.pop(0)))
        gc.collect()
        for number, batch in enumerate(given):
            found = batch["image"].permute(0, 2, 3, 1).cpu().numpy()
            np.testing.assert_array_equal(found, images + number)
            assert batch["sample_id"].tolist() == [0, 1, 2, 3]
        staged = []
        for _ in range(4):
            place = memory.take(4)
            assert place is not None, "no slot is held after an epoch"
            written = place.hand_out({"sample_id": np.arange(4)})
            assert written is not None
            staged.append(written.staged())
        assert memory.take(4) is None
        del staged
    pinned.page_locks.let_go(lambda _: True)


def test_private_arrays_and_small_ones_are_copied_through_pinned_memory() -> None:
    pinned.page_locks.let_go(lambda _: True)
    converter = make_converter("torch", "cuda", None)
    arrays = {"image": np.arange(4 * 300 * 300 * 3, dtype=np.uint8).reshape(4, 300, 300, 3), "sample_id": np.arange(4)}
    batch = converter.finish(converter.start(arrays))
    np.testing.assert_array_equal(batch["image"].permute(0, 2, 3, 1).cpu(), arrays["image"])
    assert batch["sample_id"].tolist() == [0, 1, 2, 3]
