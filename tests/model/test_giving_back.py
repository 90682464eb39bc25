"""Nodes give back workers without losing cached samples."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from mbaas.model.scaling import SETTLED_S, KeptBytes, Machine, to_let_go


def machine(node: str, workers: int = 1, keeps: float = 0, room: float = 0, **more: int) -> Machine:
    given_more = {"own": workers, **more}
    return Machine(node=node, workers=workers, keeps_bytes=keeps, room_bytes=room, **given_more)


def test_the_smallest_machine_goes_if_the_others_have_room_for_what_it_keeps() -> None:
    a, c = machine("a", 2, keeps=10, room=10), machine("c", 3, keeps=10, room=5)
    fits, crowded = machine("b", 1, keeps=15, room=5), machine("b", 1, keeps=16, room=5)
    assert to_let_go([a, fits, c], 3) == ["b", "c", "c"], "b's samples fill all room: a and c keep a worker each"
    assert to_let_go([a, fits, c], 9) == ["b", "c", "c", "a"]
    assert to_let_go([a, crowded, c], 3) == ["a", "a", "c"], "b has too many samples; a's fit next to b's and c's"


def test_machines_that_keep_all_they_can_keep_a_worker_each() -> None:
    full = [machine(node, workers, keeps=100) for node, workers in (("a", 3), ("b", 1), ("c", 2))]
    assert to_let_go(full, 2) == ["a", "c"]
    assert to_let_go(full, 9) == ["a", "c", "a"]


def test_where_nothing_is_prepared_machines_go_first() -> None:
    """Their object stores have no room for prepared samples, so nothing is cached there."""
    machines = [machine("a", 1), Machine(node="b", workers=3, own=3, is_of_use=False), machine("c", 2)]
    assert to_let_go(machines, 4) == ["b", "b", "b", "a"]


def test_workers_of_other_feeds_are_not_let_go_and_keep_their_machine() -> None:
    machines = [machine("a", 2, own=1), machine("b", 3, own=0), machine("c", 1)]
    assert to_let_go(machines, 9) == ["c", "a"]


def lost(machines: Sequence[Machine], gone: Sequence[str]) -> bool:
    """Return whether the remaining machines lack room for the samples cached on the others."""
    left = Counter({m.node: m.workers for m in machines})
    left.subtract(gone)
    room = sum(m.room_bytes for m in machines if left[m.node])
    return sum(m.keeps_bytes for m in machines if not left[m.node]) > room


def best(machines: Sequence[Machine], count: int) -> int:
    """The most workers, up to ``count``, that can go without a loss, by exhaustive search."""
    whole, most = sum(m.workers for m in machines), 0
    for way in itertools.product(*(range(m.own + 1) for m in machines)):
        gone = [m.node for m, taken in zip(machines, way, strict=True) for _ in range(taken)]
        if len(gone) <= min(count, whole - 1) and not lost(machines, gone):
            most = max(most, len(gone))
    return most


MACHINES = st.lists(st.tuples(st.integers(1, 3), st.integers(0, 10), st.integers(0, 2)), min_size=1, max_size=4)


@settings(max_examples=150)
@given(MACHINES, st.integers(0, 8), st.booleans())
def test_nothing_is_lost_and_as_many_go_as_can(drawn: list[tuple[int, int, int]], count: int, is_even: bool) -> None:
    """The maximum if all caches have one size; otherwise at least as many as if each machine kept a worker."""
    machines = []
    for number, (workers, keeps, others) in enumerate(drawn):
        room = 10 - keeps if is_even else keeps
        machines.append(machine(f"m{number}", workers, keeps=keeps, room=room, own=max(1, workers - others)))
    gone = to_let_go(machines, count)
    assert not lost(machines, gone)
    assert all(taken <= m.own for m in machines if (taken := gone.count(m.node)))
    assert len(gone) <= min(count, sum(m.workers for m in machines) - 1)
    thinned = min(count, sum(min(m.own, m.workers - 1) for m in machines))
    assert len(gone) >= (best(machines, count) if is_even else thinned)


def test_a_cache_that_grows_is_taken_to_become_full() -> None:
    kept = KeptBytes()
    assert kept.of("a", 0.0) == (0.0, 0.0)
    kept.observe({"a": (10.0, 100.0), "b": (0.0, 50.0)}, 0.0)
    kept.observe({"a": (60.0, 100.0), "b": (0.3, 50.0)}, 20.0)
    assert kept.of("a", SETTLED_S) == (100.0, 0.0)
    assert kept.of("b", SETTLED_S) == (0.3, 49.7), "it has not grown by a hundredth of its capacity"
    assert kept.of("a", 20.0 + SETTLED_S) == (60.0, 40.0)
    kept.observe({"b": (0.3, 50.0)}, 60.0)
    assert kept.of("a", 60.0) == (0.0, 0.0)
