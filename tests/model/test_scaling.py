"""The autoscaler requests the right number of workers within its limits, and does not flap on load curves."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from load_curves import PERIOD_S, WORKER_PER_S, Load, diurnal, noisy, on_and_off, play, sampled, sawtooth, spikes, step

from mbaas.model.scaling import Decision, Hold, Observation, Scaler
from mbaas.settings import Scaling

AT_ONCE = Scaling(grow_hold_s=0, idle_hold_s=0, cooldown_s=0)


def seen(**changes: float) -> Observation:
    """Four workers of 100 samples/s each, with trials that could consume 700 samples/s and stall on prep."""
    usual = {
        "prep_stall": 0.4,
        "fetch_stall": 0.02,
        "demand_per_s": 700.0,
        "worker_per_s": 100.0,
        "workers": 4,
        "idle": 0.0,
        "reserved": 2,
        "most": 10,
    }
    return Observation(**{**usual, **changes})  # type: ignore[arg-type]


IDLE = {"prep_stall": 0.0, "fetch_stall": 0.0, "demand_per_s": 240.0, "idle": 0.4}
"""Changes to `seen` that leave 2.4 of four workers used."""


def test_a_prep_stall_asks_for_what_the_model_says() -> None:
    """700 / 100 = 7 workers."""
    assert Scaler(AT_ONCE).observe(seen(), 0) == Decision(
        7,
        3,
        "grow from 4 to 7: trials stall 40 % on prep and 2.0 % on fetch after 0 s, and training, at 700 samples/s, "
        "within [2, 10] needs 7 (by the rate of one worker)",
    )


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({"demand_per_s": 701.0}, 8),
        ({"demand_per_s": 5000.0}, 10),  # the maximum
        ({"fetch_per_s": 550.0}, 6),  # fetch delivers no more than 5.5 workers prepare
        ({"fetch_per_s": 400.0}, 4),  # the current workers keep up with fetch
        ({"demand_per_s": 390.0}, 4),  # training is the bottleneck despite the stall
        ({"fetch_stall": 0.5}, 4),  # fetch is the larger stall
        ({"prep_stall": 0.09}, 4),
        ({"worker_per_s": 0.0}, 4),  # unknown
    ],
)
def test_no_more_than_another_bottleneck_allows(changes: dict[str, float], wanted: int) -> None:
    assert Scaler(AT_ONCE).observe(seen(**changes), 0).workers == wanted


def test_a_fetch_stall_asks_for_nothing_and_says_so() -> None:
    decision = Scaler(AT_ONCE).observe(seen(prep_stall=0.1, fetch_stall=0.5), 0)
    assert decision.change == 0
    assert decision.reason == "keep 4: trials wait for bytes, not for prep: trials stall 10 % on prep and 50 % on fetch"


def test_trials_that_wait_for_each_other_ask_for_nothing_and_it_is_said() -> None:
    waiting = seen(prep_stall=0.02, fetch_stall=0.1, peer_stall=0.6)
    assert Scaler(AT_ONCE).observe(waiting, 0) == Decision(
        4,
        0,
        "keep 4: trials wait for each other, not for prep: trials stall 2.0 % on prep and 10 % on fetch, and wait "
        "60 % for each other",
    )


def test_workers_that_would_not_help_are_explained() -> None:
    decision = Scaler(AT_ONCE).observe(seen(fetch_per_s=400.0), 0)
    assert decision.reason == (
        "keep 4: trials stall 40 % on prep and 2.0 % on fetch, but fetch, at 400 samples/s, within [2, 10] needs no "
        "more than 4 (by the rate of one worker)"
    )


def test_idle_workers_are_retired_down_to_what_is_needed() -> None:
    """240 / 100 = 2.4, so 3."""
    assert Scaler(AT_ONCE).observe(seen(**IDLE), 0).workers == 3


@pytest.mark.parametrize(("changes", "wanted"), [({"demand_per_s": 0.0}, 2), ({"idle": 0.29}, 4), ({"reserved": 4}, 4)])
def test_never_below_what_is_reserved(changes: dict[str, float], wanted: int) -> None:
    assert Scaler(AT_ONCE).observe(seen(**{**IDLE, **changes}), 0).workers == wanted


def test_bounds_are_kept_at_once() -> None:
    scaler = Scaler(Scaling())
    assert scaler.observe(seen(**IDLE), 0).change == 0
    assert scaler.observe(seen(**IDLE, reserved=6), 1).workers == 6
    assert scaler.observe(seen(**IDLE, most=3), 2).workers == 3


def test_pending_workers_were_asked_for_already() -> None:
    """A restarted coordinator finds four workers up and three pending."""
    decision = Scaler(AT_ONCE).observe(seen(pending=3), 0)
    assert (decision.workers, decision.change) == (7, 0)
    assert decision.reason.endswith("needs no more than 7, 3 are on their way (by the rate of one worker)")


@pytest.mark.parametrize(
    ("changes", "needed"),
    [
        ({}, 7),
        ({"demand_per_s": 100.0}, 2),
        ({"demand_per_s": 2000.0}, 10),
        ({"fetch_per_s": 320.0}, 4),
        ({"demand_per_s": 0.0, "worker_per_s": 0.0}, 2),
        ({"worker_per_s": 0.0}, None),
    ],
)
def test_the_model(changes: dict[str, float], needed: int | None) -> None:
    """min(demand, fetch) / rate of a worker, rounded up, within [2, 10]; unknown without a rate."""
    assert seen(**changes).needed == needed


def test_a_worker_that_dies_is_still_wanted() -> None:
    scaler = Scaler(AT_ONCE)
    scaler.observe(seen(demand_per_s=400.0), 0)
    assert scaler.observe(seen(demand_per_s=400.0, workers=3), 1).workers == 4


def test_workers_that_went_elsewhere_are_asked_for_again_when_they_are_needed() -> None:
    """Seven are wanted, three are borrowed. After their return, the next stall requests seven again."""
    scaler = Scaler(AT_ONCE)
    scaler.observe(seen(), 0)
    assert scaler.observe(seen(), 1).change == 0
    scaler.moved(4)
    assert scaler.observe(seen(), 2).change == 3


def test_a_stall_has_to_hold() -> None:
    """15 s, from the first observation above 10 %. A stall of 5 % in between does not end it, 2 % does."""
    scaler = Scaler(Scaling(grow_hold_s=15))
    stalls = {0: 0.4, 5: 0.02, 10: 0.4, 15: 0.05, 20: 0.4, 25: 0.4}
    wanted = {now: scaler.observe(seen(prep_stall=stall), now).workers for now, stall in stalls.items()}
    assert wanted == {0: 4, 5: 4, 10: 4, 15: 4, 20: 4, 25: 7}


def test_a_stall_that_waits_says_for_what() -> None:
    scaler = Scaler(Scaling(grow_hold_s=15))
    scaler.observe(seen(), 0)
    assert scaler.observe(seen(), 5).reason == (
        "keep 4: trials stall 40 % on prep and 2.0 % on fetch; 7 would help, if this holds for 15 s (so far 5 s)"
    )


def test_a_stall_of_a_demand_that_was_low_before_waits_for_the_median() -> None:
    """4, 4 and 7 were needed: the lower median is the current number."""
    scaler = Scaler(Scaling(grow_hold_s=10))
    decisions = [scaler.observe(seen(demand_per_s=d), 5 * i) for i, d in enumerate((400.0, 400.0, 700.0))]
    assert decisions[-1].reason.endswith("7 would help now, but 4 were enough most of the 10 s")


def test_a_spike_of_the_demand_does_not_decide() -> None:
    """7, 7 and 10 were needed while trials stalled: the median is 7."""
    scaler = Scaler(Scaling(grow_hold_s=10))
    decisions = [scaler.observe(seen(demand_per_s=d), 5 * i) for i, d in enumerate((700.0, 700.0, 1000.0))]
    assert [decision.workers for decision in decisions] == [4, 4, 7]
    assert decisions[-1].reason.endswith("needs 10, 7 most of that time (by the rate of one worker)")


def test_idleness_has_to_hold_and_the_most_that_was_needed_stays() -> None:
    """Idle from 0 s on; 3.1 workers were needed once."""
    scaler = Scaler(Scaling(grow_hold_s=5, idle_hold_s=20))
    demands = (100.0, 310.0, 100.0, 100.0, 100.0, 100.0)
    idle = [seen(**{**IDLE, "demand_per_s": demand, "workers": 8}) for demand in demands]
    assert [scaler.observe(observation, 5 * i).workers for i, observation in enumerate(idle)] == [8, 8, 8, 8, 4, 4]


def test_after_a_change_there_is_a_pause() -> None:
    """Grown at 0 s; a stall at 10 s takes effect at 30 s."""
    scaler = Scaler(Scaling(grow_hold_s=0, idle_hold_s=0, cooldown_s=30))
    assert scaler.observe(seen(), 0).workers == 7
    decision = scaler.observe(seen(demand_per_s=900.0), 10)
    assert (decision.workers, "after a pause of 20 s since the last change" in decision.reason) == (7, True)
    assert scaler.observe(seen(demand_per_s=900.0), 30).workers == 9


def test_after_a_change_a_signal_has_to_hold_anew() -> None:
    """Grown at 10 s while demand grows further; the next stall has held for 10 s at 25 s."""
    scaler = Scaler(Scaling(grow_hold_s=10, cooldown_s=0))
    wanted = [scaler.observe(seen(demand_per_s=700.0 if now < 15 else 900.0), now).workers for now in range(0, 30, 5)]
    assert wanted == [4, 4, 7, 7, 7, 9]


def test_workers_that_idle_while_trials_stall_are_not_idle() -> None:
    """Prep is needed in bursts: the 20 s begin when the stall ends, at 25 s."""
    scaler = Scaler(Scaling(idle_hold_s=20))
    for now in range(0, 25, 5):
        scaler.observe(seen(**{**IDLE, "prep_stall": 0.4}), now)
    assert [scaler.observe(seen(**IDLE), now).workers for now in range(25, 50, 5)] == [4, 4, 4, 4, 3]


def test_a_signal_begins_high_and_ends_low() -> None:
    hold, states = Hold(high=0.5, low=0.2), []
    for now, share in enumerate([0.4, 0.5, 0.2, 0.19, 0.3, 0.6]):
        hold.watch(share, now)
        states.append(hold.since)
    assert states == [None, 1, 1, None, None, 5]


class Naive(Scaler):
    """One threshold, no hold, no pause: requests the workers needed by the last observation."""

    def observe(self, seen: Observation, now: float) -> Decision:
        wanted = seen.needed or seen.reserved
        change, self.wanted = wanted - (self.wanted or seen.workers), wanted
        return Decision(wanted, change, "needed now")


LOADS = {
    "step": (step(), 2),
    "short sawtooth": (sawtooth(240), 4),
    "long sawtooth": (sawtooth(3600), 16),
    "noise around 3 workers": (noisy(300, scatter=0.1), 2),
    "noise around the stall threshold": (noisy(333, scatter=0.1), 2),
    "strong noise": (noisy(500, scatter=0.4), 3),
    "fast on and off": (on_and_off(240), 1),
    "slow on and off": (on_and_off(2400), 6),
    "spikes": (spikes(), 2),
    "three days": (diurnal(), 3 * 20),
}
"""Load curves and their maximum numbers of reasonable changes."""

NAMES = [pytest.param(name, marks=pytest.mark.slow if name == "three days" else ()) for name in LOADS]


@pytest.mark.parametrize("name", NAMES)
def test_load_curves_do_not_make_it_flap(name: str) -> None:
    """Few changes, pauses between them, and on a restless curve far fewer than a scaler without hysteresis makes."""
    load, most_changes = LOADS[name]
    settings = Scaling()
    recording = play(Scaler(settings), load)
    assert len(recording.changes) <= most_changes, recording.changes
    naive = play(Naive(settings), load)
    if len(naive.changes) > 2 * most_changes:
        assert len(recording.changes) * 5 < len(naive.changes), (recording.changes, len(naive.changes))
    for (before, one), (after, other) in pairwise(recording.changes):
        assert after - before >= settings.cooldown_s
        if one > 0 > other:
            assert after - before >= settings.idle_hold_s


def test_a_step_brings_workers_and_sends_them_home() -> None:
    """Up at 1,200 s: 15 s of stall and 60 s of boot, so 8 workers at 1,275 s. Down at 2,400 s: idle for 300 s."""
    recording = play(Scaler(Scaling()), step())
    assert recording.changes == [(1215.0, 7), (2700.0, -7)]
    assert (recording.workers(1270), recording.workers(1275)) == (1, 8)
    stalls = [observation.prep_stall for observation in recording.observations]
    assert max(stalls[int(1275 / PERIOD_S) :]) == 0


def filling(now: float) -> float:
    """Prep rate of a worker as ever more samples are cached decoded: 100 to 500 samples/s from 600 s to 900 s."""
    return 500 / (5 - 4 * min(1.0, max(0.0, (now - 600) / 300)))


def test_workers_go_soon_after_each_has_become_faster() -> None:
    """Trials constantly demand 750 samples/s. 8 workers shrink to 2 within 75 s after the rate has reached its maximum.

    The number needed in the 300 s before does not count.
    """
    recording = play(Scaler(Scaling()), sampled(lambda now: 750.0, seconds=1200), worker_per_s=filling)
    grown, *retired = recording.changes
    assert grown == (15.0, 7)
    assert sum(change for _, change in retired) == -6
    assert retired[-1][0] <= 900 + 75
    assert recording.workers(1195) == 2
    assert all(seen.prep_stall == 0 for seen in recording.observations[15 + 1 :])
    (why,) = {decision.reason for decision in recording.decisions if decision.change and decision.workers == 2}
    assert "% idle after 60 s, because each prepares 469 samples/s by now, and no more were needed" in why


def test_workers_that_became_faster_wait_for_a_load_that_comes_and_goes() -> None:
    """They reach their full rate at 900 s; the load switches on and off every 240 s."""
    recording = play(Scaler(Scaling()), on_and_off(480, seconds=1800), worker_per_s=filling)
    assert all(decision.workers >= 2 for decision in recording.decisions[int(900 / PERIOD_S) :])
    assert all(seen.prep_stall == 0 for seen in recording.observations[int(120 / PERIOD_S) :])


def test_workers_are_asked_for_again_when_samples_lose_their_decoded_form() -> None:
    """Nodes and therefore home nodes change: from 1,500 s on, a worker prepares 100 samples/s again."""
    recording = play(
        Scaler(Scaling()),
        sampled(lambda now: 750.0, seconds=2400),
        worker_per_s=lambda now: filling(now) if now < 1500 else WORKER_PER_S,
    )
    assert recording.changes[-1] == (1515.0, 6)
    assert recording.workers(1580) == 8


def test_a_rate_that_scatters_does_not_make_it_flap() -> None:
    """On average 3 of 8 workers are idle, but at moments all are as slow as before."""
    scatter = np.random.default_rng(3).uniform(0.9, 1.9, 1000)
    recording = play(
        Scaler(Scaling()),
        sampled(lambda now: 750.0, seconds=4000),
        worker_per_s=lambda now: WORKER_PER_S * float(scatter[int(now / PERIOD_S)]),
    )
    assert recording.reversals <= 1, recording.changes


def test_a_day_is_followed() -> None:
    """Over three days, trials lose less than 3 % of their time with two thirds of the peak's workers."""
    recording = play(Scaler(Scaling()), diurnal())
    served = lost = 0.0
    for observation in recording.observations:
        served += observation.demand_per_s
        lost += observation.demand_per_s * observation.prep_stall
    workers = sum(observation.workers for observation in recording.observations) / len(recording.observations)
    assert lost / served < 0.03
    assert workers < 2 / 3 * 11


@pytest.mark.parametrize("name", NAMES)
def test_fetch_bound_curves_get_no_more_than_fetch_feeds(name: str) -> None:
    """Storage delivers 250 samples/s: three workers suffice on any curve."""
    recording = play(Scaler(Scaling()), LOADS[name][0], fetch_per_s=250)
    assert max(decision.workers for decision in recording.decisions) <= 3


def test_workers_that_never_come_are_not_asked_for_twice() -> None:
    recording = play(Scaler(Scaling()), step(), boot_s=math.inf)
    assert recording.changes == [(1215.0, 7), (2700.0, -7)]


def test_a_cluster_that_is_slow_to_grow_does_not_make_it_flap() -> None:
    recording = play(Scaler(Scaling()), noisy(750, scatter=0.1, seed=5), boot_s=600)
    assert len(recording.changes) <= 5
    assert recording.reversals <= 1


loads = st.lists(st.tuples(st.floats(0, 2000), st.integers(1, 60)), min_size=1, max_size=12).map(
    lambda parts: [level for level, times in parts for _ in range(times)]
)


@given(
    load=loads,
    fetch_per_s=st.sampled_from([150.0, 620.0, math.inf]),
    boot_s=st.sampled_from([0.0, 20.0, 90.0]),
    bounds=st.tuples(st.integers(0, 4), st.integers(4, 12)),
    settings=st.sampled_from([Scaling(), Scaling(grow_hold_s=5, idle_hold_s=30, cooldown_s=10), AT_ONCE]),
)
def test_what_is_always_true(
    load: Load, fetch_per_s: float, boot_s: float, bounds: tuple[int, int], settings: Scaling
) -> None:
    reserved, most = bounds
    recording = play(
        Scaler(settings), load, fetch_per_s=fetch_per_s, boot_s=boot_s, workers=reserved, reserved=reserved, most=most
    )
    for observation, decision in zip(recording.observations, recording.decisions, strict=True):
        assert reserved <= decision.workers <= most
        assert decision.reason
        if decision.change > 0:
            useful = math.ceil(min(observation.demand_per_s, fetch_per_s) / WORKER_PER_S * (1 - 1e-9))
            assert decision.workers <= useful
            assert observation.prep_stall >= settings.stall_low
            assert observation.prep_stall >= observation.fetch_stall
        if decision.change < 0:
            assert decision.workers >= min(most, min(observation.demand_per_s, fetch_per_s) / WORKER_PER_S * (1 - 1e-9))
            assert (
                1 - observation.workers * (1 - observation.idle) / (decision.workers - decision.change)
                >= settings.idle_low
            )
    for (before, _), (after, _) in pairwise(recording.changes):
        assert after - before >= settings.cooldown_s
