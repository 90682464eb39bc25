"""A prep worker requests the right resources from Ray, and its feed claims the same. No Ray is started."""

from __future__ import annotations

from typing import Any

import pytest

from mbaas import transforms as T
from mbaas.coordinator.worker_pool import WorkerPool, claims, worker_options
from mbaas.settings import FeedSettings, Scaling

MARKER = {"accelerator_type:H100": 0.001}
PREP_FIRST = [{"mbaas.io/role": "prep"}, {"mbaas.io/role": "!in(prep)"}]


def settings(**given: Any) -> FeedSettings:
    return FeedSettings(name="train", batch_size=8, cache_bytes=0, staging_bytes=1 << 20, prep_workers=3, **given)


def test_a_worker_of_the_cpu_engine_reserves_cpus_alone_whatever_is_said_of_gpus() -> None:
    options = worker_options(settings(gpus_per_worker=0.5), "cpu", gpu_marker=MARKER, node=None)
    assert (options["num_cpus"], options["num_gpus"], options["resources"]) == (1.0, 0.0, {})
    assert options["max_concurrency"] == 2, "the next block is fetched while one is prepared"


def test_a_worker_that_shares_a_gpu_comes_to_a_node_with_one_and_reserves_nothing_of_it() -> None:
    options = worker_options(settings(), "dali", gpu_marker=MARKER, node=None)
    assert (options["num_gpus"], options["resources"]) == (0.0, MARKER)


@pytest.mark.parametrize("gpus", [0, 0.25])
def test_a_worker_that_is_told_what_to_reserve_of_a_gpu_reserves_that_and_no_marker(gpus: float) -> None:
    """Ray finds a GPU node by the reserved fraction. With 0 the engine runs on the CPU of any node."""
    options = worker_options(settings(gpus_per_worker=gpus), "dali", gpu_marker=MARKER, node=None)
    assert (options["num_gpus"], options["resources"]) == (gpus, {})


def test_workers_go_to_nodes_for_prep_first_and_a_part_of_a_cpu_to_the_node_that_it_fills_best() -> None:
    first, *others = ({"label_selector": labels} for labels in PREP_FIRST)
    options = worker_options(settings(), "cpu", gpu_marker={}, node=None)
    assert options.items() >= {**first, "fallback_strategy": others, "scheduling_strategy": "SPREAD"}.items()
    part = worker_options(settings(cpus_per_worker=0.25), "cpu", gpu_marker={}, node="a")
    assert part["num_cpus"] == 0.25
    assert part["label_selector"] == {**PREP_FIRST[0], "ray.io/node-id": "a"}
    wanted = [PREP_FIRST[0], {**PREP_FIRST[1], "ray.io/node-id": "a"}, PREP_FIRST[1]]
    assert part["fallback_strategy"] == [{"label_selector": labels} for labels in wanted]


def test_a_feed_claims_what_its_workers_reserve_and_no_gpu_that_they_share() -> None:
    assert claims(settings(), "dali", 3).gpus == 0
    assert claims(settings(gpus_per_worker=0), "dali", 3).gpus == 0
    assert claims(settings(gpus_per_worker=0.5), "cpu", 3).gpus == 0
    half = claims(settings(gpus_per_worker=0.5, cpus_per_worker=0.25), "dali", 3)
    assert (half.cpus, half.gpus, half.memory) == (0.75, 1.5, settings().memory)


@pytest.mark.parametrize(
    ("engine", "given", "needs"),
    [
        ("cpu", {}, "1 CPU"),
        ("dali", {"gpus_per_worker": 0.5}, "1 CPU and 0.5 GPU"),
        ("dali", {}, "1 CPU on a node with a GPU"),
        ("cpu", {"scaling": Scaling(prep_labels={"zone": "a", "disk": "x"})}, "1 CPU on a node with disk=x and zone=a"),
    ],
)
def test_what_a_worker_needs_is_said_in_words(engine: Any, given: dict[str, Any], needs: str) -> None:
    assert WorkerPool(settings(**given), T.Pipeline([T.DecodeImage()]), engine).needs == needs
