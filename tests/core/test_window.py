"""A staged block passes through its states correctly, and the bytes of all blocks are counted exactly."""

import pytest

from mbaas.core.staging.transitions import BlockState
from mbaas.core.staging.window import Window
from mbaas.core.story import Stories
from mbaas.samples.placement import BlockPart
from tests.core.staging_feeds import one_stream


@pytest.fixture
def window():
    return Window(100, Stories(), one_stream(4))


def granted(window, number=0, nbytes=10, parts=3):
    return window.grant(number, nbytes, [BlockPart(f"home {part}", 1) for part in range(parts)])


def make(block, number, node="n0", task=0):
    block.begin(number, task, "w0")
    block.finish(number, node)


def open_numbers(block):
    found = [number for number, _ in block.open_parts()]
    assert block.has_open_parts == bool(found)
    return found


def test_parts_are_open_in_hand_put_off_or_made_and_the_block_is_ready_when_all_are_made(window):
    block = granted(window)
    seen = []

    def look():
        block.validate()
        seen.append((open_numbers(block), block.is_in_hand, block.is_put_off, block.is_ready))

    look()
    block.begin(0, 5, "w0")
    look()
    block.begin(1, 6, "w1")
    block.put_off(1, 4.0, "slow down")
    look()
    block.finish(0, "n0")
    make(block, 2)
    look()
    assert not block.resume(3.9)
    assert block.resume(4.0)
    assert not block.resume(5.0), "there was none"
    look()
    make(block, 1)
    look()
    block.reopen(2, "lost")
    look()
    make(block, 2)
    look()
    assert seen == [
        ([0, 1, 2], False, False, False),
        ([1, 2], True, False, False),
        ([2], True, True, False),
        ([], False, True, False),
        ([1], False, False, False),
        ([], False, False, True),
        ([2], False, False, False),
        ([], False, False, True),
    ]


def test_a_part_knows_its_samples_its_task_and_where_it_lies(window):
    block = granted(window)
    make(block, 1, "n3", task=8)
    part = block.parts[1]
    assert (part.block_part.home, part.task, part.node) == ("home 1", 8, "n3")
    block.reopen(1, "lost")
    assert (part.task, part.node) == (8, None), "reports from its last task are still recognized"


def test_parts_that_were_put_off_come_back_each_in_its_time(window):
    block = granted(window)
    for number, until in ((0, 1.0), (1, 2.0), (2, 3.0)):
        block.begin(number, number, "w0")
        block.put_off(number, until, f"file {number}")
    assert block.waits_for == "file 2"
    found = []
    for now in (0.5, 1.0, 2.5, 3.0):
        resumed = block.resume(now)
        found.append((resumed, open_numbers(block), block.is_put_off))
    assert found == [(False, [], True), (True, [0], True), (True, [0, 1], True), (True, [0, 1, 2], False)]


def test_a_block_that_failed_stays_so_and_has_nothing_to_be_made(window):
    """One part was in progress when another part had a bad sample."""
    block = granted(window, parts=2)
    block.begin(0, 0, "w0")
    block.begin(1, 1, "w1")
    block.reopen(0, "a sample is bad")
    window.fail(0, "bad", may_mend=True)
    assert (block.error, block.nbytes, block.is_ready, block.may_mend) == ("bad", 0, True, True)
    assert open_numbers(block) == []
    block.finish(1, "n0")
    assert (block.state, block.is_ready) == (BlockState.FAILED, True)
    window.validate()


def test_a_block_whose_parts_all_come_in_after_it_failed_stays_failed(window):
    block = granted(window, parts=1)
    block.begin(0, 0, "w0")
    window.fail(0, "three workers died over it", may_mend=False)
    block.finish(0, "n0")
    assert block.state is BlockState.FAILED
    window.validate()


def test_bytes_are_taken_when_a_block_is_granted_and_given_back_when_it_fails_or_is_dropped(window):
    granted(window, 0, nbytes=60)
    assert window.fits(40)
    assert not window.fits(41)
    granted(window, 1, nbytes=40)
    assert (window.used_bytes, window.fits(0), window.fits(1)) == (100, True, False)
    window.fail(0, "bad", may_mend=True)
    assert (window.used_bytes, window.failed) == (40, {0})
    window.drop(1, "nobody wants it")
    assert (window.used_bytes, [*window.blocks]) == (0, [0])
    window.drop(0, "its error was told")
    assert (window.used_bytes, window.failed, window.blocks) == (0, set(), {})
    window.validate()


def test_a_part_lies_in_memory_as_the_task_that_is_asked_for_made_it(window):
    block = granted(window, 4, parts=2)
    make(block, 0, task=3)
    block.begin(1, 9, "w0")
    assert window.has(4, 0, 3)
    assert not window.has(4, 0, 2), "another task made it"
    assert not window.has(4, 1, 9), "it is being made"
    assert not window.has(4, 2, 3), "block 4 has only two parts"
    assert not window.has(5, 0, 3), "block 5 does not exist"


def test_a_block_is_on_its_way_while_a_worker_or_storage_has_a_part_of_it(window):
    block = granted(window)
    found = [window.is_on_its_way(0)]
    block.begin(0, 0, "w0")
    found.append(window.is_on_its_way(0))
    block.put_off(0, 1.0, "slow down")
    found.append(window.is_on_its_way(0))
    block.resume(1.0)
    found.append(window.is_on_its_way(0))
    assert found == [False, True, True, False]
    assert not window.is_on_its_way(1)
    assert not window.is_ready(1)
    assert not window.is_ready(0)


def test_with_a_node_only_the_parts_are_lost_that_lay_there(window):
    for number, nodes in enumerate((("a", "b", "a"), ("b", "b", "b"), ("b", "b", "a"))):
        block = granted(window, number)
        for part, node in enumerate(nodes):
            make(block, part, node)
    assert window.reopen_node("a") == [0, 2]
    assert [open_numbers(block) for block in window.blocks.values()] == [[0, 2], [], [2]]
    assert [window.is_ready(number) for number in range(3)] == [False, True, False]
    window.validate()


def test_the_story_of_a_block_that_was_dropped_is_kept_for_a_while():
    stories = Stories(past=1)
    window = Window(100, stories, one_stream(4))
    for number in (1, 2):
        granted(window, number)
        window.drop(number, "nobody wants it")
    assert stories.names() == ["block 2"]
    assert stories.lines("block 2")[-1].endswith("GRANTED -> DROPPED: nobody wants it")
