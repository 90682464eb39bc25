"""Chooses a GPU of its machine for a prep worker that reserves none, so that trials can reserve whole GPUs."""

from __future__ import annotations

import itertools
import os
import socket

_marks: list[socket.socket] = []
"""Sockets that this process holds so that others see which GPU it chose."""


MOST_EACH = 64
"""Workers that are counted on each GPU; any more choose one at random."""


def choose_gpu(count: int, *, mark: str = "mbaas-prep-gpu") -> int:
    """Choose one of a machine's GPUs: one that fewest other prep workers chose.

    Args:
        count: number of GPUs; the result is in [0, count).
        mark: beginning of the names by which processes of a machine see each other's choice.
    """
    for others, gpu in itertools.product(range(MOST_EACH), range(count)):
        # A name of Linux's own, without a file: the kernel gives it to one process, and takes it back when that ends.
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0{mark}-{gpu}-{others}")
        except OSError:
            holder.close()
        else:
            _marks.append(holder)
            return gpu
    return os.getpid() % count
