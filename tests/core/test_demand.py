"""Demand, stalls and worker speed are computed correctly from the last seconds; docstrings give the arithmetic."""

from __future__ import annotations

import pytest

from mbaas.core.demand import WINDOW_S, DemandEstimator, Look
from mbaas.core.staging.consumers import ConsumerTable
from mbaas.core.staging.epochs import EpochTable
from mbaas.core.staging.events import TrialPace
from mbaas.core.staging.transitions import ConsumerState
from mbaas.core.story import Stories
from mbaas.wire.consumers import ConsumerReport
from tests.core.staging_feeds import one_stream

BOUNDS = {"workers": 2, "pending": 0, "reserved": 1, "most": 8}


def report(samples, *, wait_s, step_s, fetch_s=0.0, peers_s=0.0, loader="one"):
    return ConsumerReport(loader, samples, 0, wait_s, fetch_s, peers_s, step_s)


def consumers(*cohorts):
    """Table with one cohort for each list of names."""
    found = ConsumerTable(EpochTable(one_stream(4)), 3, Stories())
    for names in cohorts:
        cohort = found.new_cohort(0)
        for name in names:
            found.enter(name, 1, cohort, 0, 1e9, ConsumerState.BUSY)
    return found


def observed(before, after, members, *, samples=0, prep_s=0.0, **options):
    """Observation from two looks, one at each end of a window."""
    estimator = DemandEstimator()
    assert estimator.observe(Look(0.0, before, 0, 0.0), members, **BOUNDS) is None
    return estimator.observe(Look(WINDOW_S, after, samples, prep_s), members, **BOUNDS, **options)


def test_stalls_are_shares_of_the_trials_time():
    """In 8 s the trial waited 6 s: 2 s for bytes, then 1 s for others as well. Prep stall 4/8 or 3/8, fetch 2/8."""
    seen = observed({}, {"a": report(100, wait_s=6, fetch_s=2, step_s=2)}, consumers(["a"]))
    assert (seen.prep_stall, seen.fetch_stall, seen.peer_stall) == (0.5, 0.25, 0)
    seen = observed({}, {"a": report(100, wait_s=6, fetch_s=2, peers_s=1, step_s=2)}, consumers(["a"]))
    assert (seen.prep_stall, seen.fetch_stall, seen.peer_stall) == (0.375, 0.25, 0.125)


def test_only_what_came_since_the_first_look_counts():
    """100 more samples in 4 s of work are 25 a second; earlier samples do not count."""
    before, after = report(1000, wait_s=50, step_s=10), report(1100, wait_s=54, step_s=14)
    seen = observed({"a": before}, {"a": after}, consumers(["a"]))
    assert seen.demand_per_s == 25.0
    assert seen.prep_stall == 0.5


def test_members_of_a_cohort_share_and_cohorts_add_up():
    """One cohort's trials could take 100/4 = 25 and 100/2 = 50 a second: it demands 25. The other demands 10: 35."""
    reports = {
        "slow": report(100, wait_s=4, step_s=4),
        "fast": report(100, wait_s=6, step_s=2),
        "alone": report(10, wait_s=7, step_s=1),
    }
    seen = observed({}, reports, consumers(["slow", "fast"], ["alone"]))
    assert seen.demand_per_s == 35.0


def test_a_trial_that_left_wants_nothing():
    seen = observed({}, {"gone": report(100, wait_s=1, step_s=1)}, consumers(["other"]))
    assert seen.demand_per_s == 0.0


RANKS = {"trial[0]": "trial", "trial[1]": "trial"}


def test_the_ranks_of_a_trial_want_together_what_it_wants():
    """Ranks that each get 100 samples in 4 s of work demand 50 a second; the other trial demands 60: 50, not 25."""
    reports = {
        "trial[0]": report(100, wait_s=4, step_s=4),
        "trial[1]": report(100, wait_s=4, step_s=4),
        "alone": report(120, wait_s=6, step_s=2),
    }
    seen = observed({}, reports, consumers([*reports]), trial_of=RANKS)
    assert seen.demand_per_s == 50.0


def test_a_rank_that_waits_for_another_one_in_its_step_does_not_work_there():
    """Rank 1 waited 6 s for data, and so did rank 0: 1 s directly and 5 s in its steps.

    The trial could take 200 samples in 2 s, and waited for 6 of its 8 s. Another trial never waits in 8 s: 6 of 16 s.
    """
    reports = {
        "trial[0]": report(100, wait_s=1, step_s=7),
        "trial[1]": report(100, wait_s=6, step_s=2),
        "alone": report(1600, wait_s=0, step_s=8),
    }
    seen = observed({}, reports, consumers([*reports]), trial_of=RANKS)
    assert seen.demand_per_s == 100.0
    assert seen.prep_stall == 6 / 16


def test_whole_blocks_are_made_for_a_rank_that_is_in_a_cohort_of_its_own():
    """Each of two cohorts needs 50 samples a second, and its rank takes half."""
    reports = {name: report(100, wait_s=4, step_s=4) for name in RANKS}
    seen = observed({}, reports, consumers(["trial[0]"], ["trial[1]"]), trial_of=RANKS)
    assert seen.demand_per_s == 100.0


def test_workers_are_idle_for_the_rest_of_their_time():
    """Two workers had 16 s and were busy for 4 s: 75 % idle. 200 samples in 4 s of work are 50 a second per worker."""
    seen = observed({}, {}, consumers(["a"]), samples=200, prep_s=4.0)
    assert seen.idle == 0.75
    assert seen.worker_per_s == 50.0


def test_the_rate_of_a_worker_is_remembered_while_there_is_nothing_to_prepare():
    estimator, members = DemandEstimator(), consumers(["a"])
    estimator.observe(Look(0.0, {}, 0, 0.0), members, **BOUNDS)
    estimator.observe(Look(WINDOW_S, {}, 200, 4.0), members, **BOUNDS)
    for step in range(2, 6):
        seen = estimator.observe(Look(step * WINDOW_S, {}, 200, 4.0), members, **BOUNDS)
    assert seen.worker_per_s == 50.0
    assert seen.idle == 1.0


def test_another_loader_of_the_same_name_begins_anew():
    before = report(1000, wait_s=50, step_s=10)
    after = report(30, wait_s=1, step_s=1, loader="two")
    assert observed({"a": before}, {"a": after}, consumers(["a"])).demand_per_s == pytest.approx(30.0)


def test_differences_are_over_a_whole_window_and_none_are_told_before_half_of_one():
    """There is a look every second. Each is compared with the one `WINDOW_S` earlier, so the first seconds drop out."""
    estimator, seen = DemandEstimator(), {}
    for second in range(int(2 * WINDOW_S) + 1):
        look = Look(
            float(second), {"ann": report(10.0 * second, wait_s=0.0, step_s=float(second))}, 5.0 * second, 1.0 * second
        )
        seen[second] = estimator.observe(look, consumers(["ann"]), workers=2, pending=1, reserved=1, most=4)
    assert seen[int(WINDOW_S / 2) - 1] is None
    assert seen[int(WINDOW_S / 2)] is not None
    last = seen[int(2 * WINDOW_S)]
    assert (last.demand_per_s, last.worker_per_s, last.idle) == (10.0, 5.0, 0.5)
    assert (last.workers, last.pending, last.reserved, last.most) == (2, 1, 1, 4)


def test_a_trial_that_took_nothing_wants_nothing_and_a_pause_does_not_make_workers_slow():
    estimator = DemandEstimator()
    at = {"ann": report(0, wait_s=1, step_s=1)}
    for now, made, busy in ((0.0, 0.0, 0.0), (WINDOW_S, 50.0, 5.0), (2 * WINDOW_S, 50.0, 6.0)):
        seen = estimator.observe(
            Look(now, at, made, busy), consumers(["ann"]), workers=1, pending=0, reserved=1, most=1
        )
    assert (seen.demand_per_s, seen.worker_per_s) == (0.0, 10.0)


def test_a_trial_that_takes_nothing_holds_up_nobody():
    """The other members evaluate, have not begun, or took their first samples; one trial takes 100 in 4 s."""
    reports = {
        "takes": report(100, wait_s=4, step_s=4),
        "evaluates": report(0, wait_s=0, step_s=8),
        "has not begun": report(0, wait_s=8, step_s=0),
        "took its first": report(50, wait_s=8, step_s=0),
    }
    assert observed({}, reports, consumers([*reports])).demand_per_s == 25.0


def test_shares_are_between_none_and_all():
    """Process clocks differ: more fetch stall than total stall means no prep stall, and idle time is never negative."""
    after = {"a": report(100, wait_s=2, fetch_s=3, step_s=2)}
    seen = observed({}, after, consumers(["a"]), samples=100, prep_s=3 * WINDOW_S)
    assert (seen.prep_stall, seen.fetch_stall, seen.idle) == (0.0, 0.75, 0.0)


def test_where_nothing_happened_nothing_is_known():
    estimator, members = DemandEstimator(), consumers(["a"])
    estimator.observe(Look(0.0, {}, 0, 0.0), members, **BOUNDS)
    seen = estimator.observe(Look(WINDOW_S, {}, 0, 0.0), members, **{**BOUNDS, "workers": 0})
    assert (seen.prep_stall, seen.fetch_stall, seen.demand_per_s, seen.worker_per_s, seen.idle) == (0, 0, 0, 0, 0)


def test_work_of_which_no_time_was_told_says_nothing_of_the_speed_and_neither_does_time_without_work():
    """The rate stays at 50 a second: first samples arrive without seconds, then seconds without samples."""
    estimator, members = DemandEstimator(), consumers(["a"])
    seen = []
    for step, (samples, prep_s) in enumerate([(0, 0.0), (200, 4.0), (300, 4.0), (300, 6.0)]):
        seen.append(estimator.observe(Look(step * WINDOW_S, {}, samples, prep_s), members, **BOUNDS))
    assert [observation.worker_per_s for observation in seen[1:]] == [50.0, 50.0, 50.0]


def test_of_each_figure_only_what_came_since_counts():
    """In 16 s it waited 8 s, 4 s for bytes: both stalls are a quarter. 100 samples in 8 s are 12.5 a second."""
    before = report(1000, wait_s=100, fetch_s=90, step_s=7)
    after = report(1100, wait_s=108, fetch_s=94, step_s=15)
    seen = observed({"a": before}, {"a": after}, consumers(["a"]))
    assert (seen.prep_stall, seen.fetch_stall, seen.demand_per_s) == (0.25, 0.25, 12.5)


def test_looks_that_are_not_regular_are_compared_over_a_window_at_least():
    """Looks at 0, 6, 10 and 18 s report 0, 60, 120 and 280 samples in total; the window is 8 s.

    At 18 s, the look at 10 s is one window back: 160 samples in 8 s are 20 a second. At 10 s, only the look at 0 s is
    far enough back: 120 in 10 s are 12.
    """
    estimator, members, seen = DemandEstimator(), consumers(["a"]), []
    for now, samples in ((0.0, 0), (6.0, 60), (10.0, 120), (18.0, 280)):
        seen.append(estimator.observe(Look(now, {}, samples, now), members, **BOUNDS))
    assert [observation.worker_per_s for observation in seen[1:]] == [10.0, 12.0, 20.0]


def test_a_single_sample_counts():
    """One sample in 0.25 s of work after 0.25 s of waiting; its preparation took a worker 0.5 s."""
    seen = observed({}, {"a": report(1, wait_s=0.25, step_s=0.25)}, consumers(["a"]), samples=1, prep_s=0.5)
    assert (seen.prep_stall, seen.demand_per_s, seen.worker_per_s) == (0.5, 4.0, 2.0)


def paces(reports, ranks=None, *, block_samples=10, scales=False, **bounds):
    """Paces of trials after a whole window with 200 samples prepared in 4 s."""
    estimator, members, bounds = DemandEstimator(), consumers([*reports]), {**BOUNDS, **bounds}
    estimator.observe(Look(0.0, {}, 0, 0.0), members, **bounds)
    look = Look(WINDOW_S, reports, 200, 4.0)
    seen = estimator.observe(look, members, **bounds, trial_of=ranks or {})
    return estimator.paces(look, seen, ranks or {}, scales=scales, block_samples=block_samples)


def test_a_trials_pace_is_what_it_takes_while_it_works():
    told = paces({"a": report(100, wait_s=4, step_s=2), "b": report(30, wait_s=0, step_s=6)})
    assert told.trials == (TrialPace(("a",), 5.0), TrialPace(("b",), 0.5))


def test_ranks_of_a_trial_have_one_pace_and_go_together():
    reports = {"a/0": report(40, wait_s=1, step_s=2), "a/1": report(60, wait_s=2, step_s=2)}
    assert paces(reports, {"a/0": "a", "a/1": "a"}).trials == (TrialPace(("a/0", "a/1"), 5.0),)


def test_who_has_ended_no_step_yet_has_no_pace_and_who_ends_none_for_a_while_keeps_his():
    estimator, members = DemandEstimator(), consumers(["a", "new"])
    estimator.observe(Look(0.0, {}, 0, 0.0), members, **BOUNDS)
    new, told = report(0, wait_s=8, step_s=0), []
    for look in range(1, 4):
        now = Look(look * WINDOW_S, {"a": report(100, wait_s=0, step_s=2), "new": new}, 0, 0.0)
        seen = estimator.observe(now, members, **BOUNDS)
        told.append(estimator.paces(now, seen, {}, scales=False, block_samples=10).trials)
    assert told == [(TrialPace(("a",), 5.0),)] * 3


def test_prep_is_as_fast_as_all_workers_that_can_come():
    """Each worker prepares 5 blocks a second; two are up, three are reserved, and nine may be started."""
    a = {"a": report(100, wait_s=4, step_s=2)}
    bounds = {"workers": 2, "reserved": 3, "most": 9}
    assert paces(a, **bounds).prep_per_s == 15.0, "no more are started"
    assert paces(a, **bounds, scales=True).prep_per_s == 45.0
    assert paces(a, **bounds, scales=True, pending=1).prep_per_s == 15.0, "the requested worker may never start"


def test_a_trial_that_left_and_comes_back_has_no_pace_until_it_ends_a_step():
    """It may have another model by then."""
    estimator, members, told = DemandEstimator(), consumers(["a"]), []
    for now, reports in (
        (0.0, {}),
        (WINDOW_S, {"a": report(100, wait_s=0, step_s=2)}),
        (2 * WINDOW_S, {}),
        (3 * WINDOW_S, {"a": report(0, wait_s=8, step_s=0, loader="two")}),
    ):
        look = Look(now, reports, 0, 0.0)
        if (seen := estimator.observe(look, members, **BOUNDS)) is not None:
            told.append(estimator.paces(look, seen, {}, scales=False, block_samples=10).trials)
    assert told == [(TrialPace(("a",), 5.0),), (), ()]


def test_trials_that_all_rest_are_expected_to_go_on():
    """Between epochs they request nothing; prep still needs its workers a moment later."""
    members = consumers(["a"])
    members.rest(members.by_name["a"])
    assert observed({}, {"a": report(100, wait_s=4, step_s=4)}, members).demand_per_s == 25.0


def test_a_client_whose_sums_fall_back_is_not_stalled():
    before = report(100, wait_s=6, fetch_s=5, step_s=2)
    seen = observed({"a": before}, {"a": report(200, wait_s=9, fetch_s=1, step_s=4)}, consumers(["a"]))
    assert seen.fetch_stall == 0.0


def measured(*windows):
    """Observations of windows, each (workers, machines, samples/s, worker-seconds of waiting) with busy workers."""
    estimator, members = DemandEstimator(), consumers(["a"])
    samples = prep_s = fetch_s = 0.0
    estimator.observe(Look(0.0, {}, 0.0, 0.0), members, **BOUNDS)
    seen = []
    for number, (workers, machines, per_s, waited_s) in enumerate(windows, 1):
        samples, prep_s, fetch_s = samples + per_s * WINDOW_S, prep_s + workers * WINDOW_S, fetch_s + waited_s
        look = Look(number * WINDOW_S, {}, samples, prep_s, fetch_s)
        seen.append(estimator.observe(look, members, **{**BOUNDS, "workers": workers}, machines=machines))
    return seen


def test_the_curve_of_prep_is_unknown_before_a_worker_was_measured():
    assert measured((0, 0, 0.0, 0.0))[-1].prep is None
    curve = measured((2, 1, 20.0, 0.0))[-1].prep
    assert [curve.curve.rate(workers) for workers in (1, 4)] == [10.0, 40.0], "10 a second for each worker"


def test_the_curve_of_prep_bends_as_measured_numbers_of_workers_do():
    """2 workers prepare 20 samples a second, and 4 prepare 30: 5 more for each further one.

    A window in which the number changed is not counted, so each number has two.
    """
    prep = measured((2, 1, 20.0, 0.0), (2, 1, 20.0, 0.0), (4, 1, 30.0, 0.0), (4, 1, 30.0, 0.0))[-1].prep
    assert (prep.counts, prep.curve.rate(4), prep.curve.rate(6)) == (2, 30.0, 40.0)


def test_as_many_workers_on_each_machine_are_the_same_number_on_more_machines():
    prep = measured((2, 1, 20.0, 0.0), (2, 1, 20.0, 0.0), (4, 2, 40.0, 0.0), (4, 2, 40.0, 0.0))[-1].prep
    assert prep.counts == measured((2, 1, 20.0, 0.0))[-1].prep.counts
    assert prep.curve.rate(8) == 80.0


def test_the_curve_of_prep_is_known_while_no_worker_is_up():
    prep = measured((2, 1, 20.0, 0.0), (2, 1, 20.0, 0.0), (0, 0, 0.0, 0.0))[-1].prep
    assert prep.curve.rate(2) == 20.0


def test_fetch_is_as_fast_as_workers_that_wait_in_the_last_window():
    """2 workers prepare for 8 s each and then wait 16 s in total: 2 x 160 samples / 32 s."""
    assert measured((2, 1, 20.0, 50.0), (2, 1, 20.0, 16.0))[-1].fetch_per_s == 10.0
