"""Policy that caches samples encoded, or decoded if the time saved is worth the room."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from mbaas import units
from mbaas.analysis.simulator.model import Floats, Load, write_seconds
from mbaas.analysis.simulator.policies.partitioned import Mbaas
from mbaas.analysis.simulator.system import Sizes
from mbaas.analysis.simulator.world import NOWHERE, Codes, Traffic, World
from mbaas.model.forms import TOLERANCE, FormPlan, SampleCosts, plan_forms

Flags = NDArray[np.bool_]


class MbaasDecoded(Mbaas):
    name = "mbaas_decoded"
    about = (
        "As mbaas, but the first two classes of a home keep samples decoded or encoded, in the shares with which an "
        "epoch is shortest (a linear programme); what is kept decoded is only transformed."
    )

    def traffic(self, world: World) -> Iterator[Traffic]:
        plan = planned(world)
        if plan is None or not plan.decoded:
            yield from super().traffic(world)
            return
        held, decoded = classes_by_form(world, plan)
        for epoch in world.epochs:
            samples = world.dealt(epoch)
            homes = world.homes[samples]
            if epoch == 0:
                yield world.from_pfs(samples, workers=homes)
            else:
                # The PFS has no decoded samples, so they are read from the cache even if the PFS is faster.
                tiers = np.where(decoded, held, world.own_tiers(held))
                yield world.traffic(samples, tiers[samples], workers=homes, decoded=decoded[samples])

    def moved_bytes(self, world: World, traffic: Traffic) -> Floats:
        if traffic.decoded is None:
            return traffic.nbytes
        moved = traffic.nbytes - traffic.decoded
        moved[..., 1:] += traffic.decoded[..., 1:] * _times_as_large(world)
        return moved  # prep reads decoded samples in memory, the first class, without moving them

    def prep_s(self, world: World, traffic: Traffic) -> Floats:
        machine = world.system.machine
        if traffic.decoded is None:
            return write_seconds(traffic.nbytes, machine=machine)
        encoded_s = write_seconds(traffic.nbytes - traffic.decoded, machine=machine)
        decoded_s: Floats = traffic.decoded.sum(axis=-1) * decoded_s_per_byte(world)
        return encoded_s + decoded_s

    def cores_s(self, world: World, load: Load, traffic: Traffic) -> Floats:
        seconds = super().cores_s(world, load, traffic)
        if traffic.decoded is None:
            return seconds
        speedup = world.system.dataset.decoded_speedup
        return seconds - self.passes(world) * load.saved_s(traffic.decoded.sum(axis=-1), speedup=speedup)

    def remark(self, world: World) -> str | None:
        plan = planned(world)
        if plan is None:
            return "nothing is said about decoded samples, so none are kept"
        if not plan.decoded:
            return "; ".join(plan.told) or "no room is worth decoded samples"
        return f"{units.percent(plan.decoded)} of the samples are kept decoded"


def planned(world: World) -> FormPlan | None:
    """Return the plan for each worker's cache; None without a cache, or if the size of decoded samples is unknown.

    The first storage class is the plan's memory, the second its disk.
    """
    dataset, machine, threads = world.system.dataset, world.system.machine, world.system.machine.staging.threads
    if dataset.decoded_bytes is None or not world.classes:
        return None
    memory, *slower = world.classes
    disk = slower[0] if slower else None
    costs = SampleCosts(
        encoded_bytes=dataset.sample_bytes,
        decoded_bytes=dataset.decoded_bytes,
        encoded_s=dataset.sample_bytes * machine.write_s_per_byte,
        decoded_s=dataset.sample_bytes * decoded_s_per_byte(world),
        # with all threads of all workers reading
        storage_s=dataset.sample_bytes * machine.pfs_s_per_byte(world.tiers.readers) / threads,
        # by all threads of this worker
        disk_bytes_per_s=threads / float(world.tiers.fetch_s_per_byte()[1]) if disk is not None else None,
    )
    return plan_forms(
        costs,
        samples=world.samples / world.workers,
        threads=threads,
        memory_bytes=memory.capacity_bytes,
        disk_bytes=disk.capacity_bytes if disk is not None else 0.0,
    )


def decoded_s_per_byte(world: World) -> float:
    """Return the thread-seconds to prepare and stage a sample cached decoded, per raw byte."""
    machine = world.system.machine
    faster = machine.prep_bytes_per_s * world.system.dataset.decoded_speedup
    return 1 / min(faster, machine.staging.thread_bytes_per_s)  # as `Machine.write_s_per_byte`


def classes_by_form(world: World, plan: FormPlan) -> tuple[Codes, Flags]:
    """Return each sample's class on its home, and whether it is decoded: int8[F + 1], bool[F + 1]."""
    held, decoded = np.full(world.samples + 1, NOWHERE, dtype=np.int8), np.zeros(world.samples + 1, dtype=np.bool_)
    for home in range(world.workers):
        mine = slice(home, world.samples, world.workers)
        held[mine], decoded[mine] = _filled(world, plan, world.sizes[mine])
    return held, decoded


def _filled(world: World, plan: FormPlan, sizes: Sizes) -> tuple[Codes, Flags]:
    """Fill one home's classes in order with samples of the given sizes."""
    held, decoded = np.full(len(sizes), NOWHERE, dtype=np.int8), np.zeros(len(sizes), dtype=np.bool_)
    encoded_bytes, ends, start = world.system.dataset.sample_bytes, np.cumsum(sizes, dtype=np.float64), 0
    for number, is_decoded, share in (
        (0, True, plan.memory_decoded),
        (0, False, plan.memory_encoded),
        (1, True, plan.disk_decoded),
        (1, False, plan.disk_encoded),
    ):
        # The plan assumes equally many samples of mean size on each worker. Samples of other sizes fill the same bytes.
        until = (ends[start - 1] if start else 0.0) + share * world.samples / world.workers * encoded_bytes
        stop = int(np.searchsorted(ends, until * (1 + TOLERANCE), side="right"))
        held[start:stop], decoded[start:stop] = number, is_decoded
        start = max(start, stop)
    # Classes after the second cache the rest encoded.
    rest = world.admitted(sizes[start:], world.classes[2:])
    held[start:] = np.where(rest == NOWHERE, NOWHERE, rest + np.int8(2))
    return held, decoded


def _times_as_large(world: World) -> float:
    """Return the ratio of decoded to raw bytes."""
    dataset = world.system.dataset
    return (dataset.decoded_bytes or dataset.sample_bytes) / dataset.sample_bytes
