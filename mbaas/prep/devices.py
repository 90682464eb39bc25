"""Chooses a GPU for a prep worker that reserves none, so that trials can reserve whole GPUs."""

from __future__ import annotations

import itertools
import os
import socket

_marks: list[socket.socket] = []
"""Sockets held by this process, by which others see its choice."""


MOST_EACH = 64
"""Maximum number of workers counted per GPU; further workers choose one at random."""


def choose_gpu(count: int, *, mark: str = "mbaas-prep-gpu") -> int:
    """Return the GPU in [0, count) of this machine that the fewest prep workers have chosen.

    ``mark`` is the prefix of the socket names by which a machine's processes see each other's choices.
    """
    for others, gpu in itertools.product(range(MOST_EACH), range(count)):
        # An abstract socket name (Linux, no file): one process holds it, and the kernel releases it when the process
        # ends.
        holder = socket.socket(socket.AF_UNIX)
        try:
            holder.bind(f"\0{mark}-{gpu}-{others}")
        except OSError:
            holder.close()
        else:
            _marks.append(holder)
            return gpu
    return os.getpid() % count
