"""States change only as their tables allow, and every object can report its history."""

from __future__ import annotations

import itertools

import pytest

from mbaas.core.layout import StagingLimits
from mbaas.core.staging import events as ev
from mbaas.core.staging import explain
from mbaas.core.staging.consumers import Cohort, Consumer
from mbaas.core.staging.state import StagingState
from mbaas.core.staging.streams import block_name, block_number
from mbaas.core.staging.tasks import Task, Worker
from mbaas.core.staging.transitions import (
    BLOCK_CHANGES,
    CONSUMER_CHANGES,
    PART_CHANGES,
    WORKER_CHANGES,
    BlockState,
    ConsumerState,
    PartState,
    WorkerState,
)
from mbaas.core.staging.window import StagedBlock, StagedPart
from mbaas.core.story import (
    ENTRIES,
    LONGEST_CAUSE,
    SHOWN_NAMES,
    InvariantError,
    Stories,
    names_meant,
    shown_name,
    unknown_thing,
)
from mbaas.samples.order import OwnEpoch
from mbaas.samples.placement import WHOLE


@pytest.fixture
def core():
    """Staging core with epochs of four blocks, one worker, and one consumer that waits for block 0."""
    core = StagingState(StagingLimits(budget_bytes=80, ahead_blocks=3), 4, lambda _: 10)
    core.handle(ev.WorkerUp("prep-0", 1, "n0"), 1.0)
    core.handle(ev.Join("ann", 1), 2.0)
    core.handle(ev.Ask("ann", 1, cursor=0, released=0, done=0), 3.0)
    return core


def things():
    """One object of each kind that has states; each story contains "told"."""
    stories = Stories()

    def story():
        begun = stories.begin("consumer", "it")
        begun.tell("told")
        return begun

    return {
        PartState: StagedPart(0, WHOLE, story()),
        BlockState: StagedBlock(0, 10, [WHOLE], story()),
        ConsumerState: Consumer("it", 1, 0, 0, 0, 9.0, 0, OwnEpoch(0, 4), story()),
        WorkerState: Worker("it", 1, "n0", story()),
    }


TABLES = {
    PartState: PART_CHANGES,
    BlockState: BLOCK_CHANGES,
    ConsumerState: CONSUMER_CHANGES,
    WorkerState: WORKER_CHANGES,
}


@pytest.mark.parametrize(
    ("old", "new"),
    [pair for states in TABLES for pair in itertools.product(states, states)],
    ids=lambda state: str(state),
)
def test_a_state_changes_as_its_table_says_or_raises_with_the_story(old, new):
    thing = things()[type(old)]
    thing.state = old
    if new in TABLES[type(old)][old]:
        thing.transition(new, "because of {}", 7)
        assert thing.state is new
    else:
        with pytest.raises(InvariantError, match=rf"(?s)cannot change from {old.name} to {new.name}.*told"):
            thing.transition(new)
        assert thing.state is old


@pytest.mark.parametrize("states", TABLES)
def test_every_state_has_its_line_in_the_table_and_says_what_it_means(states):
    assert set(TABLES[states]) == set(states)
    assert all(len(state.value) > 10 for state in states)


def test_the_reason_for_which_a_block_is_staged_is_told(core):
    assert explain.why_kept(core, 0) == "IN_PREPARATION: a worker prepares a part of it"
    core.handle(ev.TaskEnded(0), 4.0)
    assert explain.why_kept(core, 0) == "HELD: a consumer uses it"
    core.handle(ev.Leave("ann"), 5.0)
    assert explain.why_kept(core, 0) == "", "it is dropped"


def test_a_block_tells_its_life(core):
    core.handle(ev.TaskEnded(0), 4.0)
    core.handle(ev.Leave("ann"), 5.0)
    told = core.stories.lines("block 0")
    assert [line.split("  ")[:2] for line in told] == [
        ["3.000 s", "GRANTED: 10 bytes, 1 parts"],
        ["3.000 s", "part 0: OPEN -> MAKING: task 0 of prep-0"],
        ["4.000 s", "part 0: MAKING -> READY: on n0"],
        ["4.000 s", "GRANTED -> READY"],
        ["5.000 s", "READY -> DROPPED: no cohort wants it"],
    ]
    assert told[0].endswith(
        "<- Ask(consumer='ann', session=1, cursor=0, released=0, done=0, want=1, number=0, began=None, unheld=None)"
    )
    assert told[3].endswith("<- TaskEnded(task=0, error=None, lacks=False, work_s=None)")


def test_a_consumer_tells_where_it_began_what_it_got_and_how_it_ended(core):
    core.handle(ev.TaskEnded(0), 4.0)
    core.handle(ev.Tick(), 100.0)
    assert [line.split("  ")[1] for line in core.stories.lines("ann")] == [
        "BUSY: session 1, from block 0 on, in cohort 0",
        "BUSY -> WAITING",
        "WAITING -> BUSY: it is given blocks 0 to 0",
        "BUSY -> GONE: it was silent for 30 s",
    ]


def test_a_worker_tells_what_it_had_in_hand(core):
    core.handle(ev.TaskEnded(0), 4.0)
    core.handle(ev.WorkerLeaves("prep-0"), 5.0)
    core.handle(ev.WorkerDown("prep-0", "killed"), 6.0)
    told = core.stories.lines("prep-0")
    assert [line.split("  ")[1] for line in told] == [
        "UP on node n0, credit 1",
        "task 0: part 0 of block 0",
        "task 0 ended",
        "task 1: part 0 of block 1",
        "UP -> LEAVING",
        "LEAVING -> GONE: with 1 unfinished tasks",
    ]
    assert told[-1].endswith("<- WorkerDown(worker='prep-0', reason='killed', blame=True)")


def test_times_are_written_as_the_shell_wants_them(core):
    assert core.stories.lines("ann", lambda now: f"minute {now / 60:.2f}")[0].startswith("minute 0.03  BUSY")


def test_one_that_comes_back_goes_on_with_its_story(core):
    core.handle(ev.Leave("ann"), 5.0)
    core.handle(ev.Join("ann", 2), 6.0)
    states = [line.split("  ")[1] for line in core.stories.lines("ann")]
    assert states[2:] == ["WAITING -> GONE: it left", "BUSY: session 2, from block 4 on, in cohort 1"]


def test_a_reason_that_looks_like_a_format_is_only_text(core):
    core.handle(ev.TaskEnded(0, "cannot prepare {x}.jpg: {}"), 4.0)
    assert any("GRANTED -> FAILED: cannot prepare {x}.jpg: {}" in line for line in core.stories.lines("block 0"))


def test_an_unknown_thing_is_answered_with_the_names_near_it(core):
    error = str(unknown_thing("prep-9", core.stories.names()))
    assert "nothing is known of 'prep-9'; near it: prep-0;" in error
    assert "prep-0, ann, block 0" in error


@pytest.mark.parametrize(("blocks", "end"), [(SHOWN_NAMES, ""), (SHOWN_NAMES + 1, " and 1 more")])
def test_of_many_names_some_are_listed_and_the_others_counted(blocks, end):
    names = [f"block {number}" for number in range(blocks)]
    assert str(unknown_thing("nothing like it", names)).endswith(f": {', '.join(names[:SHOWN_NAMES])}{end}")


def test_a_long_event_is_shortened(core):
    core.handle(ev.WorkerDown("prep-0", "a" * 1000), 5.0)
    told = core.stories.lines("prep-0")[-1].partition("  <- ")[2]
    assert len(told) == LONGEST_CAUSE
    assert told.startswith("WorkerDown(worker='prep-0', reason='aaaa")
    assert told.endswith("aaa...")


def test_nothing_told_yet_is_said_so():
    assert "there are none yet" in str(unknown_thing("block 0", ()))


# ---- bounds ----


def test_of_a_thing_the_last_lines_are_kept():
    """One consumer has so many asks and deliveries that its join is forgotten."""
    core = StagingState(StagingLimits(budget_bytes=80, ahead_blocks=3), 4, lambda _: 10)
    core.handle(ev.WorkerUp("w", 1), 0.0)
    core.handle(ev.Join("ann", 1), 0.0)
    for block in range(ENTRIES):
        core.handle(ev.Ask("ann", 1, block, block, block), float(block))
        core.handle(ev.TaskEnded(block), float(block))
    told = core.stories.lines("ann")
    assert len(told) == ENTRIES
    assert told[-1].startswith(f"{ENTRIES - 1}.000 s")
    assert "session 1" not in told[0]


def test_of_things_that_are_over_the_last_are_kept():
    stories = Stories(entries=4, past=3)
    lives = stories.begin("block", "block 99")
    for number in range(10):
        stories.end(stories.begin("block", f"block {number}"))
    assert stories.names() == ["block 99", "block 9", "block 8", "block 7"]
    lives.tell("here")
    assert stories.lines("block 99") == ["0.000 s  here"]


def test_blocks_do_not_push_out_consumers():
    stories = Stories(past=2)
    stories.end(stories.begin("consumer", "ann"))
    for number in range(10):
        stories.end(stories.begin("block", f"block {number}"))
    assert "ann" in stories.names()


@pytest.mark.parametrize(
    ("name", "number"), [("block 17", 17), ("block", None), ("block 1x", None), ("my block 17", None)]
)
def test_a_block_is_known_by_its_name(name, number):
    assert block_number(name) == number
    assert number is None or block_name(number) == name


# ---- invariants ----


def drop_a_task(core):
    core.tasks.workers["prep-0"].tasks.clear()


def count_too_few_bytes(core):
    core.window.used_bytes -= 1


def overbook(core):
    core.window.budget_bytes = 5


def count_a_ready_block_as_granted(core):
    core.window.blocks[0].state, core.window.blocks[0].is_ready = BlockState.READY, True


def put_a_part_on_a_node_before_it_is_made(core):
    core.window.blocks[0].parts[0].node = "n0"


def forget_a_part_that_is_made(core):
    core.window.blocks[0].parts[0].state = PartState.OPEN


def give_a_block_an_error_and_no_state(core):
    core.window.blocks[0].error = "bad"


def take_a_member_out_of_its_cohort(core):
    core.consumers.cohorts[0].members.clear()


def have_two_cohorts_for_one(core):
    core.consumers.cohorts[1] = Cohort(1, core.streams[0], 3)


def let_go_of_what_was_not_given(core):
    core.consumers.by_name["ann"].done = 5


def give_one_more_task_than_credit(core):
    worker = core.tasks.workers["prep-0"]
    worker.tasks.append(Task(1, "prep-0", 0))
    core.tasks._tasks[1] = worker.tasks[-1]


def assign_behind_the_blocks_back(core):
    core.tasks.assign(core.tasks.workers["prep-0"], 0, 5, 1.0)
    core.tasks.workers["prep-0"].credit = 2


@pytest.mark.parametrize(
    ("damage", "whose"),
    [
        (drop_a_task, "worker 'prep-0'"),
        (count_too_few_bytes, "block 'block 0'"),
        (overbook, "block 'block 0'"),
        (count_a_ready_block_as_granted, "block 'block 0'"),
        (put_a_part_on_a_node_before_it_is_made, "block 'block 0'"),
        (forget_a_part_that_is_made, "block 'block 0'"),
        (give_a_block_an_error_and_no_state, "block 'block 0'"),
        (take_a_member_out_of_its_cohort, "consumer 'ann'"),
        (let_go_of_what_was_not_given, "consumer 'ann'"),
        (give_one_more_task_than_credit, "worker 'prep-0'"),
        (assign_behind_the_blocks_back, "block 'block 0'"),
    ],
)
def test_a_broken_invariant_prints_the_story_of_what_is_concerned(core, damage, whose):
    core.validate()
    damage(core)
    with pytest.raises(InvariantError, match=f"the story of {whose}:\n"):
        core.validate()


def test_an_empty_cohort_is_noticed(core):
    have_two_cohorts_for_one(core)
    with pytest.raises(InvariantError, match="cohort 1 is empty"):
        core.validate()


def test_one_who_waits_for_a_ready_block_is_noticed_with_both_stories(core):
    core.handle(ev.TaskEnded(0), 4.0)
    core.consumers.by_name["ann"].transition(ConsumerState.WAITING)
    core.consumers.by_name["ann"].cursor = 0
    with pytest.raises(
        InvariantError, match=r"(?s)ann waits for block 0.*story of consumer 'ann'.*story of block 'block 0'"
    ):
        core.validate()


def test_a_block_that_nobody_wants_is_noticed(core):
    core.handle(ev.TaskEnded(0), 4.0)
    consumer = core.consumers.by_name["ann"]
    consumer.cursor = consumer.given = consumer.released = 5  # in the next epoch
    with pytest.raises(InvariantError, match=r"(?s)block 0 is kept without a reason.*GRANTED -> READY"):
        core.validate()


def test_a_worker_that_comes_up_twice_raises_instead_of_losing_its_tasks(core):
    with pytest.raises(InvariantError, match=r"(?s)prep-0 came up a second time.*task 0: part 0 of block 0"):
        core.handle(ev.WorkerUp("prep-0", 1), 4.0)


@pytest.mark.parametrize(
    ("thing", "meant"),
    [
        ("prep-1", ["prep-1"]),
        ("prep", []),
        ("cache 12345678", ["cache 12345678aa", "cache 12345678bb"]),
        ("12345678", ["12345678", "cache 12345678aa", "cache 12345678bb"]),
        ("12345678b", ["cache 12345678bb"]),
        ("cache 12345678aa", ["cache 12345678aa"]),
        ("1234567", []),
        ("cache 1234567", []),
    ],
)
def test_of_a_machine_the_first_digits_are_enough(thing, meant):
    assert names_meant(thing, ["prep-1", "12345678", "cache 12345678aa", "cache 12345678bb"]) == meant


def test_people_see_the_first_digits_of_a_machine():
    assert shown_name("cache 12345678aa") == "cache 12345678"
    assert shown_name("a trial of a very long name") == "a trial of a very long name"


def test_three_names_are_near():
    said = str(unknown_thing("prep-9", [f"prep-{number}" for number in range(5)]))
    assert said.split(";")[1].count("prep-") == 3
