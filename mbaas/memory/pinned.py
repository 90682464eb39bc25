"""Calls of the CUDA driver: page-lock memory in place, and copy between it and GPUs.

A GPU copies from page-locked memory by DMA, at the speed of its bus; from other memory the CPU copies first. Memory
shared by several processes can be locked by each process, even if it is mapped read-only. DALI and torch offer neither
this nor copies to or from foreign memory, so the driver's library is called. Every machine with an NVIDIA GPU has it,
for any CUDA version.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

_log = logging.getLogger(__name__)

_PORTABLE, _READ_ONLY = 1, 8  # CU_MEMHOSTREGISTER_PORTABLE: for all of the process's GPUs; ..._READ_ONLY
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: does not wait for the default stream


class CudaError(RuntimeError):
    """The driver returned an error."""


class Gpu:
    """A GPU in this process. Thread-safe. Created by `gpu`."""

    def __init__(self, ordinal: int) -> None:
        self._driver = _driver()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._context = ctypes.c_void_p()  # shared with DALI and torch
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._stream = ctypes.c_void_p()
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def lock(self, pages: NDArray[np.uint8]) -> None:
        """Page-lock whole pages in place, for all GPUs; read-only pages for reading. Raises `CudaError` if that is
        impossible.
        """
        flags = _PORTABLE if pages.flags.writeable else _PORTABLE | _READ_ONLY
        with self._current():
            self._call(
                "cuMemHostRegister_v2",
                ctypes.c_void_p(pages.ctypes.data),
                ctypes.c_size_t(pages.nbytes),
                ctypes.c_uint(flags),
            )

    def unlock(self, pages: NDArray[np.uint8]) -> None:
        """Unlock pages locked by `lock`, after all GPU work of this process has finished."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuMemHostUnregister", ctypes.c_void_p(pages.ctypes.data))

    def copy_to_device(self, to: int, array: NDArray[Any], stream: int) -> None:
        """Copy a C-contiguous array to a GPU address in a stream; the array must live until the copy is done."""
        with self._current():
            self._call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(to),
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_void_p(stream),
            )

    def copy_to_host(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy from the GPU and wait: (host address, GPU address, bytes) of each piece."""
        with self._current():
            for to, source, nbytes in copies:
                self._call(
                    "cuMemcpyDtoHAsync_v2",
                    ctypes.c_void_p(to),
                    ctypes.c_uint64(source),
                    ctypes.c_size_t(nbytes),
                    self._stream,
                )
            self._call("cuStreamSynchronize", self._stream)

    @contextmanager
    def _current(self) -> Iterator[None]:
        # Push and pop, because a library must leave a thread's current context unchanged.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._driver, name, *arguments)


@functools.cache
def gpu(ordinal: int) -> Gpu:
    """Return a GPU by its number among those visible to this process. Raises `CudaError` without it, `OSError` without
    a driver.
    """
    return Gpu(ordinal)


@functools.cache
def _driver() -> Any:
    driver = ctypes.CDLL("libcuda.so.1")
    _check(driver, "cuInit", ctypes.c_uint(0))
    return driver


def _check(driver: Any, name: str, *arguments: Any) -> None:
    result = getattr(driver, name)(*arguments)
    if result:
        word = ctypes.c_char_p()
        driver.cuGetErrorName(result, ctypes.byref(word))
        raise CudaError(f"{name}: {word.value.decode() if word.value else f'error {result}'}")


class PageLocks:
    """Page-locked memory of this process; thread-safe. One instance, `page_locks`: memory cannot be locked twice."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locked: dict[int, tuple[NDArray[np.uint8], Gpu]] = {}
        self._given_up = False

    def take(self, memory: NDArray[np.uint8], on: Gpu) -> bool:
        """Lock whole pages until `let_go`, unless they are locked; return whether they are locked now.

        After the first refusal by the driver, no further pages are tried.
        """
        at = memory.ctypes.data
        with self._guard:
            if at not in self._locked and not self._given_up:
                try:
                    on.lock(memory)
                except CudaError as error:
                    self._given_up = True
                    _log.warning("minibatches are copied more slowly: no memory can be locked for the GPU: %s", error)
                else:
                    self._locked[at] = memory, on
            return at in self._locked

    def __contains__(self, memory: NDArray[np.uint8]) -> bool:
        with self._guard:
            return memory.ctypes.data in self._locked

    def let_go(self, is_over: Callable[[NDArray[np.uint8]], bool]) -> None:
        """Unlock memory that is no longer used, after the GPU has finished its copies."""
        with self._guard:
            for at, (memory, on) in list(self._locked.items()):
                if is_over(memory):
                    del self._locked[at]
                    on.unlock(memory)


page_locks = PageLocks()
