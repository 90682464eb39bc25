"""Choice of the machines whose prep workers are released without losing cached samples.

When the last worker of a machine is released, its cache goes too, because samples have their homes where they are
prepared. A sample that moves to another machine crosses the network once: a decoded photo of 600 kB takes half a
millisecond at 10 Gbit/s. A sample that fits nowhere is decoded again in every epoch, for 4 ms of CPU time, or even read
again. A feed that prepares 1,000 samples/s and loses a quarter of its decoded samples needs one more CPU from then on,
as much as the machine's worker provided. So a machine is released only if the others have room for its whole cache,
which moves there first.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from msgspec import Struct

SETTLED_S = 10.0
"""A cache that has not grown for this many seconds is taken to be complete."""

GROWTH = 0.01
"""Growth counts from this share of the cache's limit."""


class Machine(Struct, frozen=True, kw_only=True):
    """A machine with prep workers.

    Attributes:
        workers: workers that stay there, at least one.
        own: workers among these that may be released; the others belong to other feeds.
        keeps_bytes, room_bytes: bytes that its cache holds or is going to hold, and its free bytes.
        is_of_use: False if nothing is prepared there while another machine is available; such machines are released
            first.
    """

    node: str
    workers: int
    own: int
    keeps_bytes: float = 0.0
    room_bytes: float = 0.0
    is_of_use: bool = True


def to_let_go(machines: Sequence[Machine], count: int) -> list[str]:
    """Choose ``count`` workers to release, or fewer if more would lose samples; return the node of each, in order.

    Machines with the fewest workers are released whole while the rest has room for their caches. Further workers come
    from the machines with the most. The last machine, and each one that is not released, keeps a worker.
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
    """Cached bytes of machines, present and expected. A cache that is still growing is expected to reach its limit."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[float, float]] = {}  # node -> (cached bytes, limit)
        self._grew: dict[str, tuple[float, float]] = {}  # node -> (time of last growth, cached bytes then)

    def observe(self, kept: Mapping[str, tuple[float, float]], now: float) -> None:
        """Record (cached bytes, limit) of each machine's cache; missing machines have none."""
        self._kept = dict(kept)
        self._grew = {node: grew for node, grew in self._grew.items() if node in kept}
        for node, (keeps, most) in kept.items():
            if node not in self._grew or abs(keeps - self._grew[node][1]) > GROWTH * most:
                self._grew[node] = now, keeps

    def of(self, node: str, now: float) -> tuple[float, float]:
        """Return the present or expected bytes of a machine's cache, and its remaining room."""
        if node not in self._kept:
            return 0.0, 0.0
        keeps, most = self._kept[node]
        if now - self._grew[node][0] < SETTLED_S:
            keeps = most
        return keeps, max(0.0, most - keeps)
