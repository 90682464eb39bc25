"""What mbaas asks of CUDA's driver: to lock memory in place for GPUs, and to copy between it and them.

From pages that are locked a GPU copies by itself, at the speed of its bus; from all others the CPU copies first. Memory
that several processes share can be locked by each of them, also where a process may only read it. DALI and torch offer
neither that nor copies to or from memory that is not theirs, so the driver's own library is called. It is on every
machine with an NVIDIA GPU, for whichever version of CUDA they were built.
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
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: it does not wait for the default stream


class CudaError(RuntimeError):
    """The driver refused something."""


class Gpu:
    """A GPU as this process has it. Thread-safe. Made by `gpu`."""

    def __init__(self, ordinal: int) -> None:
        self._driver = _driver()
        device = ctypes.c_int()
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(ordinal))
        self._context = ctypes.c_void_p()  # the one that DALI and torch use, too
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._stream = ctypes.c_void_p()
        with self._current():
            self._call("cuStreamCreate", ctypes.byref(self._stream), ctypes.c_uint(_NON_BLOCKING))

    def lock(self, pages: NDArray[np.uint8]) -> None:
        """Lock whole pages in place, for all GPUs; to read from, if they are read-only.

        Raises:
            CudaError: the driver cannot, or they are locked.
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
        """Let pages go that `lock` has locked, once all that this process has the GPU do is done."""
        with self._current():
            self._call("cuCtxSynchronize")
            self._call("cuMemHostUnregister", ctypes.c_void_p(pages.ctypes.data))

    def copy_to_device(self, to: int, array: NDArray[Any], stream: int) -> None:
        """Copy a C-contiguous array to an address on the GPU, in a stream: it must live until the stream is there."""
        with self._current():
            self._call(
                "cuMemcpyHtoDAsync_v2",
                ctypes.c_uint64(to),
                ctypes.c_void_p(array.ctypes.data),
                ctypes.c_size_t(array.nbytes),
                ctypes.c_void_p(stream),
            )

    def copy_to_host(self, copies: Iterable[tuple[int, int, int]]) -> None:
        """Copy from the GPU, and wait until it is done: (address on the host, on the GPU, bytes) of each piece."""
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
        # Pushed and popped, because libraries leave a thread with the context that they found.
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        _check(self._driver, name, *arguments)


@functools.cache
def gpu(ordinal: int) -> Gpu:
    """Return a GPU, by its number among those that this process sees.

    Raises:
        CudaError: there is none of that number.
        OSError: the machine has no driver.
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
    """Memory of this process that is locked in place; thread-safe. A process has one, `page_locks`: no memory can be
    locked twice.
    """

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._locked: dict[int, tuple[NDArray[np.uint8], Gpu]] = {}
        self._given_up = False

    def take(self, memory: NDArray[np.uint8], on: Gpu) -> bool:
        """Lock whole pages of memory, if they are not locked yet; return whether they are now.

        They stay mapped until `let_go`. Once the driver has refused some, no others are tried.
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
        """Let memory go whose use is over, once the GPU has copied what it was told to."""
        with self._guard:
            for at, (memory, on) in list(self._locked.items()):
                if is_over(memory):
                    del self._locked[at]
                    on.unlock(memory)


page_locks = PageLocks()
