"""From which part of a block, and by which way, a rank's rows come."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.client.part_fetch import FetchPlan, plan_fetch
from mbaas.messages import BlockMeta, DeliveredBlock, DeliveredPart, FetchCounts
from mbaas.order import SampleOrder
from mbaas.placement import WHOLE, BlockPart, NodeWeight, Placement

SWEEP = SampleOrder(250, 1, 100)
IDS = SWEEP.sample_ids(1)
HOMES = Placement(3, tuple(NodeWeight(node, 0) for node in "abc"), (np.inf,) * 3)
home_of = np.array(list("abc"))[HOMES.of(IDS)]


def part(number: int, node: str, samples: int, block_part: BlockPart) -> DeliveredPart:
    meta = BlockMeta(1, samples, (), 0.0, 0.0, FetchCounts(), 0)
    return DeliveredPart(meta, ["a reference"], number, 0, node, block_part)


def block(version: int = 3, **lies_on: str) -> DeliveredBlock:
    """Parts for homes a, b, c, each on its home unless ``lies_on`` says another node."""
    parts = [
        part(i, lies_on.get(home, home), int((home_of == home).sum()), BlockPart(home, version))
        for i, home in enumerate("abc")
    ]
    return DeliveredBlock(1, tuple(parts))


def route(
    delivered: DeliveredBlock, rows: np.ndarray, *, placement: Placement | None = HOMES, helpers: str = "abc"
) -> FetchPlan:
    return plan_fetch(delivered, rows, IDS[rows], placement=placement, node="a", helpers=helpers)


def numbers(parts: list[DeliveredPart]) -> list[int]:
    return [one.number for one in parts]


def test_rows_elsewhere_are_asked_for_and_parts_without_any_are_left_alone():
    """Every third row, but none of c."""
    rows = np.array([row for row in range(0, 100, 3) if home_of[row] != "c"])
    found = route(block(), rows)
    assert numbers(found.own) == [0]
    assert found.pulled == []
    assert {node: (numbers(wish.parts), wish.rows.tolist()) for node, wish in found.wishes.items()} == {
        "b": ([1], rows[home_of[rows] == "b"].tolist())
    }


def test_a_part_of_which_most_is_needed_is_pulled_whole():
    rows = np.flatnonzero(home_of != "c")
    found = route(block(), rows[2:])
    assert (numbers(found.own), numbers(found.pulled), found.wishes) == ([0], [1], {})


def test_a_part_on_a_node_that_hands_out_no_rows_is_pulled_whole():
    found = route(block(), np.arange(0, 100, 5), helpers="b")
    assert (numbers(found.own), numbers(found.pulled), [*found.wishes]) == ([0], [2], ["b"])


def test_parts_that_were_made_elsewhere_than_at_home():
    """The part of a was made on b, that of c on a: one wish to b for two parts."""
    rows = np.arange(0, 100, 5)
    found = route(block(a="b", c="a"), rows)
    assert numbers(found.own) == [2]
    assert numbers(found.wishes["b"].parts) == [0, 1]
    assert found.wishes["b"].rows.tolist() == rows[home_of[rows] != "c"].tolist()


@pytest.mark.parametrize(("version", "placement"), [(4, HOMES), (3, None)])
def test_parts_that_were_cut_by_other_homes_may_have_any_row(version, placement):
    rows = np.arange(0, 100, 5)
    found = route(block(version), rows, placement=placement)
    assert (numbers(found.own), found.pulled) == ([0], [])
    assert [wish.rows.tolist() for wish in found.wishes.values()] == [rows.tolist()] * 2


@pytest.mark.parametrize(("count", "is_pulled"), [(50, False), (90, True)])
def test_a_block_in_one_part(count, is_pulled):
    """It lies on b; nobody needs to know homes for it."""
    whole = DeliveredBlock(1, (part(0, "b", 100, WHOLE),))
    found = route(whole, np.arange(count), placement=None)
    assert numbers(found.pulled) == [0] * is_pulled
    assert [wish.rows.tolist() for wish in found.wishes.values()] == [list(range(count))] * (not is_pulled)
