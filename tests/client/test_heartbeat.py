"""Heartbeats are regular, follow an epoch's end soon, and are fewer than many short epochs."""

from __future__ import annotations

from itertools import pairwise
from random import Random

import pytest

from mbaas.client.heartbeat import FIRST_PAUSE_S, GATHER_S, LINGER_S, Pulse


def test_the_first_signs_of_life_come_soon_and_the_others_in_each_period() -> None:
    pulse, now, pauses = Pulse(100.0, 3.0), 100.0, []
    for _ in range(6):
        pauses.append(pulse.due - now)
        now = pulse.due
        pulse.sent(now)
    assert pauses == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S, 8 * FIRST_PAUSE_S, 3.0, 3.0]
    assert Pulse(0.0, 0.1).due == 0.1


def beating(now: float) -> Pulse:
    """A pulse with full-length pauses, last sent at ``now``."""
    pulse = Pulse(now - 100.0, 3.0)
    for _ in range(10):
        pulse.sent(now)
    return pulse


def test_the_end_of_an_epoch_is_told_soon_if_no_other_one_begins() -> None:
    pulse = beating(100.0)
    pulse.epoch_ends(100.5)
    assert pulse.due == 100.5 + LINGER_S


def test_the_end_of_a_long_epoch_is_told_at_once() -> None:
    pulse = beating(100.0)
    pulse.epoch_ends(99.9 + GATHER_S)
    assert pulse.due == 100.0 + GATHER_S, "the end of a step almost that long is not delayed further"
    pulse.epoch_ends(100.5 + GATHER_S)
    pulse.goes_on()
    assert pulse.due <= 100.5 + GATHER_S


def test_whose_next_epoch_begins_tells_of_the_last_one_when_it_was_silent_for_a_while() -> None:
    pulse = beating(100.0)
    pulse.epoch_ends(100.5)
    pulse.goes_on()
    assert pulse.due == 100.0 + GATHER_S
    pulse.epoch_ends(101.0)
    assert pulse.due == 101.0 + LINGER_S, "this one may be the last"
    pulse.goes_on()
    assert pulse.due == 100.0 + GATHER_S
    pulse.epoch_ends(99.9 + GATHER_S)
    assert pulse.due == 100.0 + GATHER_S, "no later than for the one before"
    pulse.sent(100.0 + GATHER_S)
    pulse.goes_on()
    assert pulse.due == 103.0 + GATHER_S, "there is nothing to report"


def test_of_two_ends_the_first_is_not_kept_back_for_longer() -> None:
    pulse = beating(100.0)
    pulse.epoch_ends(100.1)
    pulse.epoch_ends(100.2)
    assert pulse.due == 100.1 + LINGER_S


@pytest.mark.parametrize("seed", range(100))
def test_no_epoch_is_kept_back_for_long_and_signs_of_life_are_rarer_than_short_epochs(seed: int) -> None:
    chances = Random(seed)
    now, period_s = 0.0, chances.choice([0.5, 3.0])
    pulse, unreported, ended, told = Pulse(now, period_s), 0, 0.0, []
    epoch_s, idle = chances.choice([0.01, 0.3, 2.0]), chances.choice([0.0, 0.01, 0.5])
    until = 20.0

    def pass_time(end: float) -> None:
        nonlocal now, unreported
        while pulse.due <= end:
            now = max(now, pulse.due)
            if unreported:
                assert now - ended <= GATHER_S + 1e-9, "the oldest unreported one"
            pulse.sent(now)
            told.append(now)
            unreported = 0
        now = end

    while now < until:
        pass_time(now + epoch_s)
        ended = ended if unreported else now
        unreported += 1
        pulse.epoch_ends(now)
        pass_time(now + idle)
        pulse.goes_on()
    pass_time(until + 3.0)
    assert not unreported
    assert max(later - earlier for earlier, later in pairwise(told)) <= period_s + 1e-9
    if epoch_s < 0.1 and idle < LINGER_S:
        assert len(told) <= 23.0 / min(period_s, GATHER_S) + 3
