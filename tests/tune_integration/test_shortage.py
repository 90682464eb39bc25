"""A warning blames feeds only if they keep a search's trials from starting."""

from __future__ import annotations

import pytest

from tune_integration.shortage import Node, why_none_starts

ADVICE = "serve the feeds with fewer prep workers, or reduce the resources of each trial"


def node(cpus: float, free: float, **more: float) -> Node:
    """A node with its CPUs; ``more`` gives `gpus` and `free_gpus`."""
    return Node(
        {"CPU": cpus, "GPU": more.get("gpus", 0), "memory": 1e9}, {"CPU": free, "GPU": more.get("free_gpus", 0)}
    )


def test_feeds_that_hold_every_cpu_are_named_with_what_they_hold() -> None:
    held = {"validation": {"CPU": 1.0, "GPU": 0.0}, "train": {"CPU": 1.0, "GPU": 0.0}}
    assert why_none_starts([{"CPU": 1}], [node(2, 0)], held) == (
        "each trial requests 1 CPU, 0 of 2 are free, and prep workers of feeds hold 'train' 1 and 'validation' 1: "
        + ADVICE
    )


def test_a_gpu_of_which_a_feed_holds_a_part_is_no_whole_one() -> None:
    nodes = [node(8, 6, gpus=1, free_gpus=0.8)]
    assert why_none_starts([{"CPU": 1, "GPU": 1}], nodes, {"train": {"CPU": 2.0, "GPU": 0.2}}) == (
        "each trial requests 1 GPU, 0.8 of 1 are free, and prep workers of feeds hold 'train' 0.2: " + ADVICE
    )


def test_what_is_free_on_many_nodes_is_free_on_none() -> None:
    """A trial needs 4 CPUs on one node; each of two nodes has 3 of 4 free."""
    told = why_none_starts([{"CPU": 4}], [node(4, 3), node(4, 3)], {"train": {"CPU": 2.0}})
    assert told is not None
    assert "6 of 8 are free, at most 3 on one node" in told


@pytest.mark.parametrize(
    ("asked", "free", "held"),
    [
        (1, 1, 1.0),  # it is free
        (0.1 + 0.2, 0.3, 1.0),  # also free: the difference is a rounding error
        (8, 0, 4.0),  # more than the cluster has: Ray Tune warns itself
        (1, 0, 0.0),  # other programs hold it
    ],
)
def test_feeds_are_not_blamed_for_what_is_not_theirs(asked: float, free: float, held: float) -> None:
    assert why_none_starts([{"CPU": asked}], [node(4, free)], {"train": {"CPU": held}}) is None


def test_a_cpu_is_missed_where_the_gpu_is_though_others_are_free() -> None:
    """The feed holds the only CPU of the node with the GPU. Three CPUs are free on a node without a GPU."""
    nodes = [node(1, 0, gpus=1, free_gpus=1), node(4, 3)]
    assert why_none_starts([{"CPU": 1, "GPU": 1}], nodes, {"train": {"CPU": 2.0, "GPU": 0.0}}) == (
        "each trial requests 1 CPU, 3 of 5 are free, at most 0 on one node with 1 GPU, and prep workers of feeds hold "
        "'train' 2: " + ADVICE
    )


def test_bundles_are_missed_that_each_and_together_would_fit_but_not_side_by_side() -> None:
    """A node with 4 free CPUs has room for one of two bundles of 3 CPUs; a node with 2 free CPUs has no room."""
    nodes, held = [node(4, 4), node(4, 2)], {"train": {"CPU": 2.0}}
    assert why_none_starts([{"CPU": 3}, {"CPU": 3}], nodes, held, asks="they request") == (
        "they request 6 CPU in 2 bundles of at most 3, 6 of 8 are free, at most 4 on one node, and prep workers of "
        "feeds hold 'train' 2: " + ADVICE
    )
    assert why_none_starts([{"CPU": 3}] * 3, nodes, held) is None, "not even without the feed"
    assert why_none_starts([{"CPU": 2}] * 3, nodes, held) is None, "all three have a place"


@pytest.mark.parametrize(
    ("bundles", "nodes"),
    [
        ([{"CPU": 1}, {"CPU": 1, "GPU": 1}], [node(1, 1, gpus=1, free_gpus=1), node(2, 1)]),
        ([{"CPU": 2}, {"CPU": 2}, {"CPU": 3}], [node(9, 4), node(9, 3)]),
        ([{"CPU": 4}, {"CPU": 1, "GPU": 1}], [node(9, 4, gpus=1, free_gpus=1), node(9, 1, gpus=1, free_gpus=1)]),
    ],
    ids=["one needs no GPU", "the largest first", "each where it leaves least"],
)
def test_bundles_that_have_a_place_side_by_side_are_not_missed(
    bundles: list[dict[str, float]], nodes: list[Node]
) -> None:
    """One way to place them leaves no room for the last bundle; a feed must not be blamed for that."""
    assert why_none_starts(bundles, nodes, {"train": {"CPU": 1.0}}) is None


def test_both_are_named_where_feeds_hold_both() -> None:
    told = why_none_starts([{"CPU": 2, "GPU": 1}], [node(2, 1, gpus=1)], {"train": {"CPU": 1.0, "GPU": 1.0}})
    assert told is not None
    assert "2 CPU, 1 of 2 are free, and prep workers of feeds hold 'train' 1; each trial requests 1 GPU, 0 of 1" in told


def test_feeds_are_not_blamed_for_another_resource() -> None:
    nodes = [Node({"CPU": 4, "license": 1}, {"CPU": 1, "license": 0})]
    assert why_none_starts([{"CPU": 1, "license": 1}], nodes, {"train": {"CPU": 3.0}}) is None
    assert why_none_starts([{"CPU": 2, "license": 1}], nodes, {"train": {"CPU": 3.0}}) is None
