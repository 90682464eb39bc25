"""Lobster's eviction (ICPP 2022) matches a plain one, read by read, and keeps within the capacities."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_systems import machine, preset, run, system, systems

from mbaas.tools.simulator.chance import belady_hits
from mbaas.tools.simulator.policies.clairvoyant import Contents, lobster_contents, nearest
from mbaas.tools.simulator.system import System
from mbaas.tools.simulator.world import NOWHERE, World


def contents_of(world: World) -> list[tuple[Contents, Contents]]:
    """Contents that stay for each epoch but the last, and those after it."""
    found, held = [], Contents.empty(world)
    for epoch in world.epochs[:-1]:
        stays, held = lobster_contents(world, held, epoch)
        found.append((stays, held))
    return found


@given(
    arrivals=st.lists(st.tuples(st.integers(1, 5), st.integers(0, 4)), min_size=1, max_size=30),
    room=st.integers(0, 12),
    seed=st.integers(0, 99),
)
def test_the_furthest_next_read_leaves(arrivals: list[tuple[int, int]], room: int, seed: int) -> None:
    """Arrivals are (bytes, bytes that others have left since the one before)."""
    sizes, freed = (np.array(each) for each in zip(*arrivals, strict=True))
    rooms = room + np.cumsum(freed)
    next_reads = np.random.default_rng(seed).permutation(len(sizes))
    held: list[int] = []
    for number in range(len(sizes)):
        held.append(number)
        while sizes[held].sum() > rooms[number]:
            held.remove(max(held, key=lambda each: next_reads[each]))
    found = nearest(next_reads, sizes.astype(np.float64), rooms=rooms.astype(np.float64))
    assert np.flatnonzero(found).tolist() == held


@pytest.mark.parametrize("room", [0, 1, 11, 30, 31])
def test_one_worker_hits_as_much_as_belady(room: int) -> None:
    """A single worker reads every sample in every epoch, so all next reads are its own and less than 2 I - h away."""
    given = system(machine(ram_bytes=room), samples=31, batch=2, epochs=4)
    hits = belady_hits(World(given).orders, room=room, samples=31, epochs=4)
    assert run(given, "lobster").samples["ram"] == sum(hits)


def test_samples_leave_during_an_epoch() -> None:
    """One worker, with room for two of five samples; epochs read 0 1 2 3 4, then 4 1 0 3 2, then 0 1 2 3 4.

    Reads of 0 and 1 come back second and third. 2 and 3 come back later and are not kept. 4 comes back first, so 0
    leaves. In the next epoch the worker still holds 1 for later when it reads 4, so there is room for 4 alone. It comes
    back last, and leaves when 1 and 0 are there, which come back earlier.
    """
    world = World(system(machine(ram_bytes=2), samples=5, epochs=3))
    orders = np.array([[0, 1, 2, 3, 4], [4, 1, 0, 3, 2], [0, 1, 2, 3, 4]], dtype=np.int32)
    world.orders = lambda epoch: orders[epoch]  # type: ignore[assignment,method-assign]
    (_, first), (_, second) = contents_of(world)
    assert np.flatnonzero(first.classes == 0).tolist() == [1, 4]
    assert np.flatnonzero(second.classes == 0).tolist() == [0, 1]


def test_the_nearest_are_in_the_fastest_class() -> None:
    """One worker with room for two of three samples; epochs read 0 1 2, then 2 1 0: 2 is in ram, 1 in the ssd."""
    world = World(system(machine(ram_bytes=1, ssd_bytes=1), samples=3, epochs=2))
    orders = np.array([[0, 1, 2], [2, 1, 0]], dtype=np.int32)
    world.orders = lambda epoch: orders[epoch]  # type: ignore[assignment,method-assign]
    ((_, after),) = contents_of(world)
    assert after.classes.tolist() == [NOWHERE, 1, 0, NOWHERE]


def test_last_copies_stay_where_they_are_until_their_reader_keeps_them() -> None:
    """Two workers with much room. Each sample is held once: by its reader if that reads it again, else where it was."""
    world = World(system(machine(ram_bytes=99), samples=23, workers=2, batch=2, epochs=4))
    before = Contents.empty(world)
    for epoch, (stays, after) in enumerate(contents_of(world)):
        reader, next_reader = world.readers(epoch)[:-1], world.readers(epoch + 1)[:-1]
        was_held = before.classes[:-1] != NOWHERE
        expected = np.where((reader == next_reader) | ~was_held, reader, before.holders[:-1])
        assert (after.classes[:-1] != NOWHERE).all()
        assert after.holders[:-1].tolist() == expected.tolist()
        assert after.reused[:-1].tolist() == (reader == next_reader).tolist()
        assert (stays.classes == before.classes).all()
        before = after


@settings(max_examples=60, deadline=None)
@given(given=systems())
def test_classes_hold_no_more_than_their_capacity(given: System) -> None:
    """Before and after each epoch, each sample on one worker; and what is reused is read by its holder."""
    world = World(replace(given, training=replace(given.training, epochs=4)))
    before, largest = Contents.empty(world), float(world.sizes.max())
    for epoch, (stays, after) in enumerate(contents_of(world)):
        assert ((stays.classes == before.classes) | ~before.reused).all()  # only last copies are dropped
        for held in (stays, after):
            for worker in range(world.workers):
                nbytes = [
                    world.sizes[(held.classes == number) & (held.holders == worker)].sum(dtype=float)
                    for number in range(len(world.classes))
                ]
                rooms = [each.capacity_bytes for each in world.classes]
                assert sum(nbytes) <= sum(rooms) * (1 + 1e-6) + 1e-6
                # The sample at the boundary of two classes counts in both.
                assert all(has <= room * (1 + 1e-6) + largest for has, room in zip(nbytes, rooms, strict=True))
        reused = np.flatnonzero(after.reused & (after.classes != NOWHERE))
        assert (world.readers(epoch + 1)[reused] == after.holders[reused]).all()
        assert after.classes[-1] == NOWHERE  # padding
        before = after


@pytest.mark.parametrize(("room_share", "most"), [(0.05, 0.2), (0.1, 0.4), (0.25, 1.0)])
def test_hits_come_close_to_what_all_workers_hold(room_share: float, most: float) -> None:
    """Four workers, each with room for a share of the samples: together they hold four times as many."""
    samples = 4001
    given = preset("imagenet-1k", samples=samples, sample_bytes=100e3, epochs=6)
    given = replace(given, dataset=replace(given.dataset, sigma_bytes=0.0))
    ram = replace(given.machine.classes[0], capacity_bytes=room_share * samples * 100e3)
    given = replace(given, machine=replace(given.machine, classes=(ram,)))
    found = run(given, "lobster").samples
    hits = (found["ram"] + found["remote"]) / (5 * samples)
    assert 0.93 * most < hits <= most
