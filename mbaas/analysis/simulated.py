"""Simulation of measured rates: conversion to the simulator's system, and the simulated epoch time."""

from __future__ import annotations

from statistics import mean

from mbaas.analysis.simulator import Cores, System, simulate, system_of
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import form_plan, node_prep_rate

EPOCHS = 3
"""The first epoch fills caches; the others are the same."""

MOST_SAMPLES = 200_000
"""Maximum number of simulated samples. Larger datasets and their caches are scaled down; times are proportional."""


def system_for(
    rates: Rates, setup: Setup, *, name: str = "measured", epochs: int = EPOCHS, policies: tuple[str, ...] = ()
) -> System:
    """Return the simulator's system for measured rates and a setup; each node is one of its workers.

    The simulator spreads a trial's samples over all workers, while here a trial trains on one node at G. Each simulated
    worker therefore trains at G / nodes, which gives the same epoch time.
    """
    part = min(1.0, MOST_SAMPLES / rates.samples)
    workers = setup.workers_of(rates.cores)
    # Simulated storage reaches its full rate, here the fastest measured one, with a number of readers. A node has at
    # most as many reading threads as workers, so a larger number would never be reached.
    readers, storage = rates.storage.fastest
    return system_of(
        name,
        samples=round(rates.samples * part),
        sample_bytes=rates.sample_bytes,
        batch=rates.batch_size if setup.batch_size is None else setup.batch_size,
        train_samples_per_s=rates.step.value * setup.accelerator_factor / setup.nodes,
        prep_samples_per_s=node_prep_rate(rates, setup),
        storage_samples_per_s=storage.value * setup.storage_factor * (1 if setup.storage_shared else setup.nodes),
        storage_readers=min(round(readers), workers),
        prep_workers=workers,
        cache_samples_per_s=rates.cache.value / rates.sample_bytes,
        cache_bytes=setup.cache_bytes * part,
        disk_samples_per_s=rates.disk.value / rates.sample_bytes if rates.disk is not None else None,
        disk_bytes=setup.disk_bytes * part,
        network_bytes_per_s=setup.network_bytes_per_s,
        pixel_bytes=rates.pixel_bytes,
        decoded_bytes=rates.decoded_bytes if setup.decoded else None,
        decoded_speedup=node_prep_rate(rates, setup, decoded=1.0) / node_prep_rate(rates, setup),
        cores=Cores(
            count=(cores := setup.cores_of(rates.cores)),
            background=cores - rates.free_cores(cores),
            prep_cpu_s=rates.prepared_cpu_s.value,
            staging_cpu_s=rates.staging_cpu_s.value,
            delivery_cpu_s=rates.delivery_cpu_s.value,
            step_cpu_s=rates.step_cpu_s.value / setup.accelerator_factor,
            read_cpu_s=rates.read_cpu_s.value,
            decoded_cpu_s=rates.cpu_s(1.0).value,
        ),
        workers=setup.nodes,
        trials=setup.trials,
        epochs=epochs,
        policies=policies,
    )


def simulated_epoch_s(rates: Rates, setup: Setup) -> float:
    """Return the simulated seconds of a steady epoch.

    With a shared feed, the policy is mbaas; otherwise each trial has a private MinIO cache of encoded samples.
    """
    kept = "mbaas_decoded" if form_plan(rates, setup) is not None else "mbaas"
    policy = kept if setup.sharing else "minio"
    system = system_for(rates, setup, policies=(policy,))
    (outcome,) = simulate(system)
    return mean(outcome.epoch_s[1:]) * rates.samples / system.dataset.samples  # the dataset may be scaled down
