"""If a consumer dies or hangs, others continue within a known time; one that resumes misses nothing."""

from __future__ import annotations

import pytest

import mbaas
from mbaas.coordinator.control import FeedControl
from mbaas.tools.chaos.participants import kill, paused
from support.trials import Trials, result
from support.waiting import wait_until

pytestmark = pytest.mark.chaos

SAMPLES = 1010
OTHERS = ("one", "two")


def start(feed, trials):
    """Two trials that train for two epochs, and a third that holds its second minibatch."""
    mbaas.announce(feed.name, [*OTHERS, "victim"])
    victim = trials.join("victim")
    others = [trials.join(name) for name in OTHERS]
    assert all(trial.pid for trial in (victim, *others)), "reservations may end before a busy machine has started all"
    result(victim.take(2))
    return victim, [other.epochs(2) for other in others]


def member_names(feed):
    return {member.name for member in feed.status().consumers}


def assert_exact(running):
    for epochs in result(running):
        assert [record.flaws(range(SAMPLES)) for record in epochs] == [[], []]


def test_a_killed_consumer_is_removed_within_its_lease_and_its_bytes_are_given_back(serve_small):
    with (
        serve_small(SAMPLES, prep_workers=1, timeouts=mbaas.Timeouts(lease_s=3.0)) as feed,
        Trials(feed.name) as trials,
    ):
        victim, running = start(feed, trials)
        wait_until(lambda: any(m.waits_for for m in feed.status().consumers), "the others wait for the victim")
        kill(victim.pid)
        wait_until(lambda: "victim" not in member_names(feed), "the victim is removed", deadline_s=3.0 + 5.0)
        assert any("victim was removed: it was silent for 3 s" in note for note in feed.status().notes)
        assert_exact(running)
        assert feed.status().inexact_epochs == 0
        for name in OTHERS:
            FeedControl.of(feed.name).remove(name)
        wait_until(lambda: feed.status().staged_bytes == 0, "all staged bytes are given back")


def test_a_consumer_that_stood_still_beyond_its_lease_comes_back_and_goes_on_exactly(serve_small):
    with (
        serve_small(SAMPLES, prep_workers=1, timeouts=mbaas.Timeouts(lease_s=3.0)) as feed,
        Trials(feed.name) as trials,
    ):
        victim, running = start(feed, trials)
        with paused(victim.pid):
            wait_until(lambda: "victim" not in member_names(feed), "the victim is removed", deadline_s=3.0 + 5.0)
            assert_exact(running)
        for name in OTHERS:
            FeedControl.of(feed.name).remove(name)
        assert result(victim.rest()).flaws(range(SAMPLES)) == []
        assert result(victim.rest()).flaws(range(SAMPLES)) == []


def test_a_consumer_that_stands_still_keeps_others_waiting_once_for_their_patience(serve_small):
    """Its lease stays valid, so it remains a consumer in its own cohort, and continues there when it resumes."""
    with (
        serve_small(SAMPLES, prep_workers=1, timeouts=mbaas.Timeouts(lease_s=60.0, patience_s=1.5)) as feed,
        Trials(feed.name) as trials,
    ):
        victim, running = start(feed, trials)
        with paused(victim.pid):
            assert_exact(running)
            notes = feed.status().notes
            assert len([note for note in notes if "victim kept" in note]) == 1, notes
            assert "victim" in member_names(feed)
        assert result(victim.rest()).flaws(range(SAMPLES)) == []
        assert result(victim.rest()).flaws(range(SAMPLES)) == []
        assert feed.status().inexact_epochs == 0
