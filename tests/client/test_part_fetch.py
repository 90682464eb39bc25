"""Each of a rank's rows is read locally, copied with its whole part, or requested from its node."""

from __future__ import annotations

import numpy as np
import pytest

from mbaas.client.part_fetch import FetchPlan, plan_fetch
from mbaas.memory.part_memory import PartAddress, StoredObject
from mbaas.memory.slots import Slot
from mbaas.samples.order import SampleOrder, Shuffle
from mbaas.samples.placement import WHOLE, BlockPart, NodeWeight, Placement
from mbaas.wire.blocks import DeliveredBlock, DeliveredPart, PartMeta

ORDER = SampleOrder(250, 1, 100)
IDS = ORDER.sample_ids(1)
PLACEMENT = Placement(3, tuple(NodeWeight(node, 0) for node in "abc"), (np.inf,) * 3)
home_of = np.array(list("abc"))[PLACEMENT.of(IDS)]


IN_STORE = StoredObject(b"id", b"owner", b"status")


def part(number: int, node: str, samples: int, block_part: BlockPart, address: PartAddress = IN_STORE) -> DeliveredPart:
    meta = PartMeta(samples, (), 0.0, 0.0, 0)
    return DeliveredPart(meta, address, number, 0, node, block_part)


def block(version: int = 3, **lies_on: str) -> DeliveredBlock:
    """One part for each home node a, b and c, made there unless ``lies_on`` names another node."""
    parts = [
        part(i, lies_on.get(home, home), int((home_of == home).sum()), BlockPart(home, version))
        for i, home in enumerate("abc")
    ]
    return DeliveredBlock(1, Shuffle(0), tuple(parts))


def planned(
    delivered: DeliveredBlock, rows: np.ndarray, *, placement: Placement | None = PLACEMENT, helpers: str = "abc"
) -> FetchPlan:
    return plan_fetch(delivered, rows, IDS[rows], placement=placement, node="a", helpers=helpers)


def numbers(parts: list[DeliveredPart]) -> list[int]:
    return [one.number for one in parts]


def test_rows_elsewhere_are_asked_for_and_parts_without_any_are_left_alone():
    """Every third row is needed, but none of c."""
    rows = np.array([row for row in range(0, 100, 3) if home_of[row] != "c"])
    found = planned(block(), rows)
    assert numbers(found.own) == [0]
    assert found.copied == []
    assert {node: (numbers(asked.parts), asked.rows.tolist()) for node, asked in found.asked.items()} == {
        "b": ([1], rows[home_of[rows] == "b"].tolist())
    }


def test_a_part_of_which_most_is_needed_is_copied_whole():
    rows = np.flatnonzero(home_of != "c")
    found = planned(block(), rows[2:])
    assert (numbers(found.own), numbers(found.copied), found.asked) == ([0], [1], {})


def test_a_part_on_a_node_that_hands_out_no_rows_is_copied_whole():
    found = planned(block(), np.arange(0, 100, 5), helpers="b")
    assert (numbers(found.own), numbers(found.copied), [*found.asked]) == ([0], [2], ["b"])


def test_a_part_in_a_slot_of_another_node_is_not_asked_for():
    """Reading it fails at once, and the stream requests it again; by then blocks are objects that nodes can copy."""
    whole = DeliveredBlock(1, Shuffle(0), (part(0, "b", 100, WHOLE, Slot("", b"", 0, 0, 0, 0, ())),))
    found = planned(whole, np.arange(10), placement=None)
    assert (numbers(found.copied), found.asked) == ([0], {})


def test_parts_that_were_made_elsewhere_than_at_home():
    """The part of a was made on b, and the part of c on a. One call to b requests two parts."""
    rows = np.arange(0, 100, 5)
    found = planned(block(a="b", c="a"), rows)
    assert numbers(found.own) == [2]
    assert numbers(found.asked["b"].parts) == [0, 1]
    assert found.asked["b"].rows.tolist() == rows[home_of[rows] != "c"].tolist()


@pytest.mark.parametrize(("version", "placement"), [(4, PLACEMENT), (3, None)])
def test_parts_that_were_cut_by_another_placement_may_have_any_row(version, placement):
    rows = np.arange(0, 100, 5)
    found = planned(block(version), rows, placement=placement)
    assert (numbers(found.own), found.copied) == ([0], [])
    assert [asked.rows.tolist() for asked in found.asked.values()] == [rows.tolist()] * 2


@pytest.mark.parametrize(("count", "is_copied"), [(50, False), (90, True)])
def test_a_block_in_one_part(count, is_copied):
    """The block is on b and needs no placement."""
    whole = DeliveredBlock(1, Shuffle(0), (part(0, "b", 100, WHOLE),))
    found = planned(whole, np.arange(count), placement=None)
    assert numbers(found.copied) == [0] * is_copied
    assert [asked.rows.tolist() for asked in found.asked.values()] == [list(range(count))] * (not is_copied)
