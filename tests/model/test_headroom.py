"""Feeds with default options leave room for trials, for any number of feeds."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mbaas.model.lending import GpuRoom, PrepResources, default_prep, node_for_part


def in_turn(cpus: int, feeds: int) -> list[PrepResources]:
    """The resources of consecutive feeds."""
    found: list[PrepResources] = []
    for _ in range(feeds):
        found.append(default_prep(cpus=cpus, claimed_cpus=sum(resources.cpus for resources in found)))
    return found


@pytest.mark.parametrize(
    ("cpus", "training", "validation"),
    [
        (1, (1, 0.0), (1, 0.0)),
        (2, (1, 0.5), (1, 0.25)),
        (3, (1, 1.0), (1, 0.5)),
        (4, (2, 1.0), (1, 0.5)),
        (8, (4, 1.0), (2, 1.0)),
        (64, (32, 1.0), (16, 1.0)),
    ],
)
def test_training_and_validation_leave_room_for_a_trial(
    cpus: int, training: tuple[int, float], validation: tuple[int, float]
) -> None:
    first, second = in_turn(cpus, 2)
    assert (first, second) == (PrepResources(*training), PrepResources(*validation))
    assert cpus - first.cpus - second.cpus >= 1


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])  # the machine may be busy
@given(st.integers(1, 1024), st.lists(st.none() | st.integers(1, 64), max_size=12))
def test_whoever_was_there_before_a_default_leaves_a_free_cpu_free(cpus: int, feeds: list[int | None]) -> None:
    """Feeds with user-defined numbers of workers, mixed with default feeds (None)."""
    claimed = 0.0
    for given_workers in feeds:
        resources = (
            default_prep(cpus=cpus, claimed_cpus=claimed) if given_workers is None else PrepResources(given_workers)
        )
        assert resources.workers >= 1
        assert resources.cpus_per_worker == 1.0 or (resources.workers == 1 and 0 <= resources.cpus_per_worker < 1)
        if given_workers is None:
            assert cpus - claimed - resources.cpus >= min(1, cpus - claimed)
        claimed += resources.cpus


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.integers(3, 1024))
def test_a_single_feed_has_half_of_the_cpus(cpus: int) -> None:
    assert default_prep(cpus=cpus) == PrepResources(cpus // 2)


@pytest.mark.parametrize(("cpus", "claimed"), [(2, 0.0), (2, 0.5), (3, 1.0), (7, 5.7)])
def test_a_part_of_a_cpu_is_one_that_ray_can_count(cpus: int, claimed: float) -> None:
    resources = default_prep(cpus=cpus, claimed_cpus=claimed)
    assert resources.workers == 1
    assert 0 < resources.cpus_per_worker < 1
    assert round(resources.cpus_per_worker * 10_000) == pytest.approx(resources.cpus_per_worker * 10_000, abs=1e-9)


@pytest.mark.parametrize(
    ("cpus", "count", "per_gpu", "room", "workers"),
    [
        (64, 4, 1, 16, 4),
        (64, 1, 1, 64, 1),
        (64, 4, 2, 16, 8),
        (4, 8, 1, 0.5, 2),
        (2, 8, 1, 0.25, 1),
        (16, 0, 1, 16, 1),
        (64, 4, 4, 4, 8),  # GPU nodes keep half of their CPUs
        (136, 1, 2, 2, 1),  # one node of 2 CPUs has the GPU
    ],
)
def test_gpus_have_no_more_workers_than_may_share_them(
    cpus: int, count: int, per_gpu: int, room: float, workers: int
) -> None:
    assert default_prep(cpus=cpus, gpus=GpuRoom(count=count, workers=per_gpu, cpus=room)).workers == workers


@pytest.mark.parametrize(
    ("cpus", "count", "per_gpu", "room", "expected"),
    [
        (16, 1, 1, 16, PrepResources(1, 8, threads=8)),
        (16, 4, 1, 4, PrepResources(4, 2, threads=2)),
        (64, 5, 1, 12.8, PrepResources(5, 6, threads=6)),
        (4, 8, 1, 0.5, PrepResources(2, 1)),
        (2, 1, 1, 2, PrepResources(1, 0.5)),
        (136, 1, 1, 8, PrepResources(1, 4, threads=4)),  # four nodes have 32 CPUs and no GPU
        (136, 1, 2, 8, PrepResources(2, 2, threads=2)),
        (64, 2, 2, 32, PrepResources(4, 8, threads=8)),
    ],
)
def test_workers_on_gpus_that_prepare_on_cpus_too_share_out_those_of_their_nodes(
    cpus: int, count: int, per_gpu: int, room: float, expected: PrepResources
) -> None:
    gpus = GpuRoom(count=count, workers=per_gpu, cpus=room)
    resources = default_prep(cpus=cpus, gpus=gpus, also_on_cpus=True)
    assert resources == expected
    assert resources.cpus <= default_prep(cpus=cpus).cpus
    assert resources.cpus <= max(resources.workers, count * room / 2)


@pytest.mark.parametrize(
    ("part", "free", "node"),
    [
        (0.25, {"a": 0.5, "b": 1.0}, "a"),
        (0.25, {"a": 0.5, "b": 3.25}, "b"),
        (0.5, {"a": 0.4999, "b": 2.0}, None),
        (0.1, {"a": 0.1 + 0.2 - 0.2, "b": 4.0}, "a"),
        (0.5, {"a": 2.0, "b": 2.0}, None),
        (0.0, {"a": 0.5}, None),
        (0.5, {}, None),
    ],
)
def test_a_worker_with_a_part_of_a_cpu_goes_where_one_is_shared_already(
    part: float, free: dict[str, float], node: str | None
) -> None:
    assert node_for_part(part, free) == node
