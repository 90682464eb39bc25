"""Decides which machines let prep workers go, so that nothing is lost that their caches keep.

A worker that is not needed can go at any time. With the last one on a machine its cache goes, too, because samples have
their homes where they are prepared. What is the machine worth? A sample that moves to another one crosses the network
once: a decoded photograph of 600 kB takes half a millisecond at 10 Gbit/s. One for which nobody has room is decoded
again in every epoch, for 4 ms of a CPU, or even read again. If a feed that makes 1,000 samples/s loses a quarter of
its decoded samples, that is a CPU more for as long as it runs: what the machine's worker could do. So a machine is
given back when the others have room for all that it keeps, which moves there first. Otherwise workers go from machines
that have several, and each machine keeps one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

SETTLED_S = 10.0
"""A cache that has not grown for so long keeps what it can."""

GROWTH = 0.01
"""It has grown if it keeps this share more of what it may."""


class Machine(Struct, frozen=True, kw_only=True):
    """A machine with prep workers.

    Attributes:
        node: its id.
        workers: how many stay there, at least one.
        own: those of them that may be let go; the others belong to other feeds.
        keeps_bytes: what its cache keeps, or is going to keep.
        room_bytes: what its cache could keep besides.
        is_of_use: False if nothing is prepared there while another one can; such machines are given back first.
    """

    node: str
    workers: int
    own: int
    keeps_bytes: float = 0.0
    room_bytes: float = 0.0
    is_of_use: bool = True


def to_let_go(machines: Sequence[Machine], count: int) -> list[str]:
    """Choose ``count`` workers to let go, or fewer if more would lose samples: the machine of each, in order.

    Machines are given back that have the fewest workers, as long as the rest has room for what they keep; then those
    give some that have the most. The last machine keeps a worker, and so does each that is not given back.
    """
    left = {machine.node: machine for machine in machines}
    chosen: list[str] = []
    moved_bytes = 0.0
    for machine in sorted(machines, key=lambda m: (m.is_of_use, m.workers, m.keeps_bytes, m.node)):
        room_bytes = sum(other.room_bytes for other in left.values()) - machine.room_bytes
        if len(left) > 1 and machine.own == machine.workers and moved_bytes + machine.keeps_bytes <= room_bytes:
            chosen += [machine.node] * machine.workers
            moved_bytes += machine.keeps_bytes
            del left[machine.node]
    here, own = ({node: getattr(machine, name) for node, machine in left.items()} for name in ("workers", "own"))
    while len(chosen) < count and (several := [node for node in left if here[node] > 1 and own[node]]):
        node = max(several, key=lambda node: (here[node], node))
        here[node], own[node] = here[node] - 1, own[node] - 1
        chosen.append(node)
    return chosen[:count]


class KeptBytes:
    """What the caches of machines keep, and what each is going to keep: while it grows, all that it may."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, float]] = {}  # what it keeps, and what it may
        self._grew: dict[str, tuple[float, float]] = {}  # when it had grown, and what it kept then

    def observe(self, kept: Mapping[str, tuple[float, float]], now: float) -> None:
        """Take in what each machine's cache keeps, and what it may; where a machine is missing, nothing is kept."""
        self._kept = dict(kept)
        self._grew = {node: grew for node, grew in self._grew.items() if node in kept}
        for node, (keeps, most) in kept.items():
            if node not in self._grew or abs(keeps - self._grew[node][1]) > GROWTH * most:
                self._grew[node] = now, keeps

    def of(self, node: str, now: float) -> tuple[float, float]:
        """Return the bytes that a machine's cache keeps or is going to keep, and those that it could keep besides."""
        if node not in self._kept:
            return 0.0, 0.0
        keeps, most = self._kept[node]
        if now - self._grew[node][0] < SETTLED_S:
            keeps = most
        return keeps, max(0.0, most - keeps)
