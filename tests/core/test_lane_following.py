"""The main coordinator and a further lane interpret each other's messages correctly, case by case.

`test_system_schedules` has the random schedules.
"""

from __future__ import annotations

import weakref

import pytest
from msgspec.structs import replace

from mbaas.core import cluster_events as cluster
from mbaas.core import events as ev
from mbaas.core.lane_following import KEPT_NAMES, KEPT_REASONS, KEPT_SERIALS, LaneFollower, LaneLeader
from mbaas.core.lane_messages import GivenUp, LaneReport, LaneUpdate, LaneWorker, NodeLoss
from mbaas.core.layout import StagingLimits
from mbaas.core.state import StagingState
from mbaas.core.supervised import WorkerPhase
from mbaas.core.supervisor import Supervisor
from mbaas.order import SampleOrder
from mbaas.placement import WHOLE, NodeWeight, Placement, PlacementHistory
from mbaas.settings import Timeouts

BLOCKS = 4
ORDER = SampleOrder(8 * BLOCKS, 0, 4)
UPDATE = LaneUpdate((7, 0), {}, frozenset(), {}, (), None, {}, frozenset(), None, ())


def staging(lane: int) -> StagingState:
    limits = StagingLimits(budget_bytes=80, ahead_blocks=3, timeouts=Timeouts(), max_deaths=3)
    return StagingState(limits, BLOCKS, lambda _: 10, lambda _, __: (WHOLE,), lane, lanes=2)


def placement(version: int) -> Placement:
    return Placement(version, (NodeWeight("a", 1000, 1.0),), (float("inf"),))


def working(*names: str, turn: int = 1, process: int = 0) -> dict[str, LaneWorker]:
    return {name: LaneWorker("a", turn, process) for name in names}


class FurtherLane:
    """A further lane: its staging core and its follower."""

    def __init__(self) -> None:
        self.core, self.placements = staging(1), PlacementHistory(ORDER)
        self.follower = LaneFollower(self.core, self.placements, credit=2, began=100)
        self.version = (7, 0)

    def send(self, events: list[ev.Event]) -> list[ev.Event]:
        for event in events:
            self.core.handle(event, 0.0)
            self.core.validate()
        return events

    def hear(self, **changes: object) -> list[ev.Event]:
        """Receive an update that differs from an empty one by `changes`."""
        self.version = (self.version[0], self.version[1] + 1)
        return self.send(self.follower.hear(replace(UPDATE, version=self.version, **changes)))  # type: ignore[arg-type]

    def give_up(self, event: cluster.WorkerDied | cluster.WorkerBehind | cluster.WorkerDone) -> list[ev.Event]:
        return self.send(self.follower.give_up(event))

    def report(self) -> LaneReport:
        return self.follower.report(detached={})


@pytest.fixture
def lane() -> FurtherLane:
    """A lane that uses prep-0 and holds no reservations."""
    lane = FurtherLane()
    assert lane.hear(workers=working("prep-0")) == [ev.WorkerUp("prep-0", 2, "a"), ev.HoldReservations(frozenset())]
    return lane


# ---- a further lane ----


def test_a_worker_that_is_listed_comes_up_once(lane):
    both = [ev.WorkerUp("prep-1", 2, "a")]
    assert lane.hear(workers=working("prep-0", "prep-1")) == both
    assert lane.hear(workers=working("prep-0", "prep-1")) == []
    assert lane.send(lane.follower.hear(None)) == []


def test_a_worker_that_leaves_gets_nothing_new_and_one_that_is_not_listed_is_gone(lane):
    lane.core.handle(ev.Join("me", 1, 0, False), 0.0)
    lane.core.handle(ev.Ask("me", 1, 0, 0, 0, 1), 0.0)  # the worker has a task
    assert lane.hear(leaving=frozenset({"prep-0"})) == [ev.WorkerLeaves("prep-0")]
    assert lane.hear(leaving=frozenset({"prep-0"})) == []
    assert lane.report().tasks == {"prep-0": 2}
    assert lane.hear() == [ev.WorkerDown("prep-0", "the main coordinator does not count on it", blame=False)]


def test_why_a_worker_is_gone_is_heard_with_the_blame(lane):
    down = ev.WorkerDown("prep-0", "its machine is gone", blame=False)
    assert lane.hear(gone={"prep-0": down}) == [down]


def test_an_update_that_was_overtaken_or_comes_twice_changes_nothing(lane):
    newest = replace(UPDATE, version=(7, 9), workers=working("prep-1"))
    lane.send(lane.follower.hear(newest))
    for late in (
        newest,
        replace(UPDATE, version=(7, 8), workers=working("prep-0"), reservations=frozenset({("a", 1)})),
    ):
        assert lane.follower.hear(late) == []
    assert lane.report().version == (7, 9)


@pytest.mark.parametrize(
    ("event", "down"),
    [
        (cluster.WorkerDied("prep-0", "it hung", blame=False), ev.WorkerDown("prep-0", "it hung", blame=False)),
        (
            cluster.WorkerBehind("prep-0"),
            ev.WorkerDown("prep-0", "it does not know the newest placement", blame=False),
        ),
    ],
)
def test_a_worker_that_is_given_up_stays_away_until_it_works_anew(lane, event, down):
    assert lane.give_up(event) == [down]
    assert lane.give_up(event) == [], "each of its calls says so"
    assert lane.hear(workers=working("prep-0")) == []
    assert lane.report().given_up == {"prep-0": GivenUp(1, event)}
    assert lane.hear(workers=working("prep-0", turn=2)) == [ev.WorkerUp("prep-0", 2, "a")]
    assert lane.report().given_up == {}


def test_what_a_worker_did_before_it_was_listed_is_not_held_against_it(lane):
    """A restarted main coordinator lists no workers at first, and a call from before the restart ends late."""
    lane.version = (8, 0)
    lane.hear()
    assert lane.give_up(cluster.WorkerBehind("prep-0")) == []
    assert lane.hear(workers=working("prep-0")) == [ev.WorkerUp("prep-0", 2, "a")]


def test_nothing_is_kept_of_workers_that_are_gone(lane):
    """A long-running feed accumulates such workers."""
    process = frozenset({"of prep-1"})
    known = weakref.ref(process)
    lane.hear(workers=working("prep-0", "prep-1", process=process))
    del process
    for _ in range(2):
        assert known() is not None
        lane.hear(workers=working("prep-0"))
    assert known() is None


def test_a_worker_that_is_given_up_while_it_leaves_is_told_of_until_it_is_gone(lane):
    died = cluster.WorkerDied("prep-0", "it hung")
    lane.give_up(died)
    lane.hear(leaving=frozenset({"prep-0"}))
    assert lane.report().given_up == {"prep-0": GivenUp(1, died)}
    lane.hear()
    assert lane.report().given_up == {}


def test_a_worker_that_has_finished_is_not_given_up(lane):
    assert lane.give_up(cluster.WorkerDone("prep-0")) == []
    assert lane.report().given_up == {}


def test_another_main_coordinator_may_give_a_name_anew(lane):
    """That worker died while no main coordinator ran; the lane's record against the name is dropped."""
    lane.version = (8, 0)
    assert lane.hear(workers=working("prep-0", process=1)) == [
        ev.WorkerDown("prep-0", "its process is gone, and another one has its name"),
        ev.WorkerUp("prep-0", 2, "a"),
    ]
    lane.give_up(cluster.WorkerBehind("prep-0"))
    lane.version = (9, 0)
    assert lane.hear(workers=working("prep-0", process=1)) == [ev.WorkerUp("prep-0", 2, "a")]
    assert lane.follower.hear(replace(UPDATE, version=(7, 50))) == [], "the dead one's last words come late"


def test_a_node_that_is_lost_twice_is_heard_of_twice(lane):
    first, second = NodeLoss(1, "b", "Ray says so"), NodeLoss(2, "b", "its cache is silent")
    assert lane.hear(lost=(first,), workers=working("prep-0")) == [ev.NodeDown("b", "Ray says so")]
    assert lane.hear(lost=(first, second), workers=working("prep-0")) == [ev.NodeDown("b", "its cache is silent")]
    assert lane.hear(lost=(first, second), workers=working("prep-0")) == []
    lane.version = (8, 0)
    assert lane.hear(lost=(first,), workers=working("prep-0")) == [ev.NodeDown("b", "Ray says so")]


def test_a_lane_that_was_just_started_hears_of_nobody_who_is_gone():
    assert FurtherLane().hear(lost=(NodeLoss(1, "b", "gone"),), detached={"a": 3}) == [ev.HoldReservations(frozenset())]


def test_who_was_moved_out_of_step_is_moved_here_as_often_as_that_happens(lane):
    workers = working("prep-0")
    assert lane.hear(detached={"a": 1}, workers=workers) == [ev.DetachedElsewhere("a")]
    assert lane.hear(detached={"a": 1, "b": 1}, workers=workers) == [ev.DetachedElsewhere("b")]
    assert lane.hear(detached={"a": 2, "b": 1}, workers=workers) == [ev.DetachedElsewhere("a")]


def test_reservations_are_those_of_the_first_lane_counted_in_blocks_of_this_one(lane):
    held = [ev.HoldReservations(frozenset({("a", 3 * BLOCKS)}))]
    assert lane.hear(reservations=frozenset({("a", 3)}), workers=working("prep-0")) == held
    assert lane.hear(reservations=frozenset({("a", 3)}), workers=working("prep-0")) == []


def test_blocks_are_cut_by_the_newest_placement_that_was_heard_of(lane):
    for version in (5, 4):
        lane.hear(placement=placement(version), workers=working("prep-0"))
        assert lane.placements.newest.version == 5
    assert [each.version for each in lane.report().placements] == [5]


def test_after_the_end_nothing_follows(lane):
    assert lane.hear(failed="it was stopped") == []
    assert lane.follower.update.failed == "it was stopped"


def test_a_report_says_which_update_it_follows_and_which_report_it_is(lane):
    assert LaneFollower(staging(1), PlacementHistory(ORDER), credit=1, began=1).report(detached={}) == LaneReport()
    lane.core.handle(ev.Join("me", 1, 2, False), 0.0)
    lane.core.handle(ev.Ask("me", 1, 3, 2, 2, 1), 0.0)
    report = lane.follower.report(notes=["told"], internal_errors=2, detached={"me": 1}, in_full=True)
    assert (report.version, report.serial) == ((7, 1), (100, 1))
    assert (report.notes, report.internal_errors, report.detached, report.held) == (("told",), 2, {"me": 1}, {"me": 1})
    assert (report.tasks, report.staged_blocks, report.staged_bytes) == ({"prep-0": 2}, 2, 20)
    assert lane.report().serial == (100, 2)
    assert lane.report().held == {}


# ---- the main coordinator ----


class Main:
    """Main coordinator of a feed with two lanes and three working prep workers."""

    def __init__(self, began: int = 50) -> None:
        self.supervisor = Supervisor(own=3, credit=2, lanes=2)
        self.core, self.placements = staging(0), PlacementHistory(ORDER)
        self.gone_processes: set[str] = set()
        self.send(cluster.Begin({f"prep-{n}": cluster.FoundWorker("a") for n in range(3)}, {("a", 1): True}, serial=3))
        self.send(cluster.PlacementMoved(self.supervisor.homes.version, frozenset(self.supervisor.workers)))
        self.placements.add(placement(1))
        self.leader = LaneLeader(
            2,
            supervisor=self.supervisor,
            core=self.core,
            placements=self.placements,
            process_of=lambda name: (
                None if name in self.gone_processes else (f"process of {name}", f"handle of {name}")
            ),
            began=began,
        )

    def send(self, event: cluster.Event) -> None:
        self.supervisor.handle(event, 0.0)

    def look(self, **detached: int) -> bool:
        return self.leader.look(detached)

    def report(self, serial: int, **changes: object) -> LaneReport:
        """Report of a lane that follows the newest update and has no tasks."""
        return replace(LaneReport(self.leader.update.version, (100, serial)), **changes)  # type: ignore[arg-type]

    def hear(self, report: LaneReport) -> list[cluster.Event]:
        """Events for the supervisor, except that the lane answered."""
        answered, *others = self.leader.hear(1, report).for_supervisor
        assert answered == cluster.LaneAnswered(1)
        return others


@pytest.fixture
def main() -> Main:
    return Main()


def test_lanes_are_told_of_the_workers_that_work_and_of_those_that_leave(main):
    everybody = {f"prep-{n}": LaneWorker("a", 1, f"process of prep-{n}", f"handle of prep-{n}") for n in range(3)}
    assert main.leader.update.workers == everybody
    assert main.leader.update.workers["prep-0"].handle == "handle of prep-0"
    main.send(cluster.WorkerBehind("prep-0"))
    main.send(cluster.Scale(1))
    main.gone_processes.add("prep-2")
    assert main.look()
    leaving = main.supervisor.in_phase(WorkerPhase.LEAVING).keys()
    assert main.leader.update.leaving == leaving
    assert main.leader.update.workers.keys() == {"prep-1", "prep-2"} - leaving - {"prep-2"}


def test_what_is_no_news_is_not_told_and_what_is_has_a_newer_version(main):
    version = main.leader.update.version
    assert not main.look()
    assert main.look(me=1)
    assert main.leader.update.version > version
    assert not main.look(me=1)


def test_a_lane_is_told_all_until_it_says_that_it_knows(main):
    assert main.leader.message(1) == (main.leader.update, True)
    assert main.leader.reports == {1: LaneReport()}, "the first lane is the main coordinator's own"
    main.leader.hear(1, LaneReport())
    assert main.leader.message(1) == (main.leader.update, True)
    main.hear(main.report(1))
    assert main.leader.message(1) == (None, False)
    main.look(me=1)
    assert main.leader.message(1) == (main.leader.update, False)
    main.leader.lose(1)
    assert main.leader.message(1) == (main.leader.update, True)


def test_the_last_ends_of_workers_and_nodes_are_told(main):
    for number in range(KEPT_REASONS + 1):
        main.leader.note(ev.NodeDown("b", f"time {number}"))
        main.leader.note(ev.WorkerDown(f"old-{number}", "it died"))
    main.leader.note(ev.Tick())
    assert main.look()
    assert [loss.number for loss in main.leader.update.lost] == [*range(2, KEPT_REASONS + 2)]
    assert main.leader.update.lost[-1] == NodeLoss(KEPT_REASONS + 1, "b", f"time {KEPT_REASONS}")
    assert main.leader.update.gone.keys() == {f"old-{number}" for number in range(1, KEPT_REASONS + 1)}


def test_who_is_expected_at_the_beginning_of_an_epoch_is_told(main):
    main.core.handle(ev.Announce("expected"), 0.0)
    main.core.handle(ev.Join("new", 1, 4, False), 0.0)
    main.core.handle(ev.Join("inside", 2, 5, False), 0.0)
    main.core.handle(ev.Join("asked", 3, 8, False), 0.0)
    main.core.handle(ev.Ask("asked", 3, 8, 8, 8, 1), 0.0)
    assert main.look()
    assert main.leader.update.reservations == {("expected", 0), ("new", 1)}


def test_a_lane_that_just_started_has_not_answered_yet(main):
    heard = main.leader.hear(1, LaneReport())
    assert (heard.is_new, heard.for_supervisor, heard.for_first_lane) == (True, (), ())


def test_what_happened_counts_once_whenever_it_arrives(main):
    second, first = main.report(2, staged_bytes=20), main.report(1, staged_bytes=10)
    assert main.leader.hear(1, second).is_new
    late = main.leader.hear(1, first)
    assert late.is_new, "what it tells happened"
    assert late.for_supervisor == ()
    assert main.leader.reports[1].staged_bytes == 20, "how the lane stands is told by the later one"
    for again in (first, second):
        twice = main.leader.hear(1, again)
        assert (twice.is_new, twice.for_supervisor) == (False, ())
    for serial in range(3, KEPT_SERIALS + 2):
        main.hear(main.report(serial))
    assert not main.leader.hear(1, second).is_new
    main.hear(main.report(KEPT_SERIALS + 2))
    assert main.leader.hear(1, first).is_new, "not all can be remembered"


def test_a_lane_that_was_lost_is_told_all_also_if_the_dead_process_seems_to_know(main):
    late = main.report(2)
    main.hear(main.report(1))
    main.leader.lose(1)
    main.hear(late)
    assert main.leader.message(1) == (None, False)
    main.leader.hear(1, LaneReport())
    assert main.leader.message(1) == (main.leader.update, True)


def test_a_lane_whose_clock_was_put_back_before_it_was_started_anew_is_heard(main):
    main.hear(main.report(9))
    main.leader.lose(1)
    main.hear(replace(main.report(1), serial=(99, 1)))
    assert main.leader.knows(1)


def test_that_a_worker_died_is_told_until_the_supervisor_knows(main):
    died = cluster.WorkerDied("prep-0", "it hung")
    report = main.report(1, given_up={"prep-0": GivenUp(1, died), "prep-9": GivenUp(1, died)})
    assert main.hear(report) == [died]
    assert main.hear(replace(report, serial=(100, 2))) == [died]
    main.send(died)
    assert main.hear(replace(report, serial=(100, 3))) == []


def test_that_a_worker_was_behind_is_no_news_when_it_works_again(main):
    behind = cluster.WorkerBehind("prep-0")
    report = main.report(1, given_up={"prep-0": GivenUp(1, behind)})
    assert main.hear(report) == [behind]
    main.send(behind)
    main.send(cluster.WorkerBriefed("prep-0", main.supervisor.homes.version))
    assert main.supervisor.workers["prep-0"].turns == 2
    assert main.hear(replace(report, serial=(100, 2))) == []


def test_a_lane_is_done_with_a_worker_that_leaves_when_it_knows_so_and_has_nothing_of_it_in_hand(main):
    old = main.report(1)
    main.send(cluster.Scale(2))
    main.look()
    (leaves,) = main.leader.update.leaving
    assert main.hear(old) == [], "it may be given something yet"
    assert main.hear(main.report(2, tasks={leaves: 1})) == []
    assert main.hear(main.report(3, tasks={"prep-9": 1})) == [cluster.WorkerDone(leaves, 1)]


def test_what_a_lane_says_of_another_main_coordinators_workers_is_not_heard(main):
    given_up = {"prep-0": GivenUp(1, cluster.WorkerDied("prep-0", "it hung"))}
    assert main.hear(LaneReport((49, 9), (100, 1), given_up=given_up)) == []


def test_a_coordinator_whose_clock_was_put_back_speaks_louder_than_its_predecessor(main):
    assert (
        main.hear(LaneReport((99, 9), (100, 1), given_up={"prep-0": GivenUp(1, cluster.WorkerBehind("prep-0"))})) == []
    )
    assert main.leader.update.version > (99, 9)
    assert main.leader.message(1) == (main.leader.update, False)
    version = main.leader.update.version
    main.look(me=1)
    assert main.leader.update.version > version


def test_who_a_lane_moved_out_of_step_is_told_to_all_once(main):
    moved = main.leader.hear(1, main.report(1, detached={"a": 1, "b": 2})).for_first_lane
    assert moved == (ev.DetachedElsewhere("a"), ev.DetachedElsewhere("b"))
    main.look(a=1)
    assert main.leader.update.detached == {"a": 2, "b": 2}
    main.leader.lose(1)
    assert main.leader.hear(1, main.report(2, detached={"a": 1, "b": 3})).for_first_lane == (ev.DetachedElsewhere("b"),)
    # The lane's next process counts from zero.
    restarted = replace(main.report(1, detached={"b": 1}), serial=(200, 1))
    assert main.leader.hear(1, restarted).for_first_lane == (ev.DetachedElsewhere("b"),)
    main.look(a=1)
    assert main.leader.update.detached == {"a": 2, "b": 4}


def test_only_the_last_who_were_moved_out_of_step_are_remembered(main):
    main.look(**{f"c{number}": 1 for number in range(KEPT_NAMES + 1)})
    assert main.leader.update.detached.keys() == {f"c{number}" for number in range(1, KEPT_NAMES + 1)}


def test_placements_by_which_lanes_cut_are_known_to_the_main_coordinator(main):
    main.hear(main.report(1, placements=(placement(0),)))
    assert [each.version for each in main.placements.all] == [0, 1]
    assert main.placements.newest.version == 1
