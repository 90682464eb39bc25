"""A seed always gives the same plan of faults, and each kind is equally likely."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mbaas.errors import ConfigError
from mbaas.tools.chaos.plan import BY_NAME_ONLY, KINDS, PARTICIPANTS, chosen_kinds, plan
from mbaas.tools.chaos.runner import ChaosSettings


@given(seed=st.integers(0, 2**32), faults=st.integers(1, 80), every_s=st.floats(0.5, 60))
def test_a_plan_follows_from_its_seed_and_deals_with_all_kinds_alike(seed: int, faults: int, every_s: float) -> None:
    drawn = plan(seed, faults=faults, every_s=every_s)
    assert drawn == plan(seed, faults=faults, every_s=every_s)
    assert len(drawn) == faults
    counts = Counter(fault.kind for fault in drawn)
    assert max(counts.values()) - min(counts[kind] for kind in KINDS) <= 1
    times = [fault.at_s for fault in drawn]
    assert times == sorted(times)
    assert all(abs(at_s - (number + 1) * every_s) < every_s / 2 for number, at_s in enumerate(times))
    for fault in drawn:
        assert fault.strikes
        assert all(0 <= strike.which < 1 <= 10 > strike.lasts_s >= 0 for strike in fault.strikes)


def test_another_seed_gives_another_plan() -> None:
    assert len({plan(seed, faults=5, every_s=6) for seed in range(20)}) == 20


def test_a_longer_plan_begins_like_a_shorter_one() -> None:
    assert plan(3, faults=50, every_s=6)[:20] == plan(3, faults=20, every_s=6)


def test_bursts_strike_any_participants_several_at_a_time() -> None:
    three = plan(0, faults=60, every_s=6, kinds=["kill-three"])
    assert {len(fault.strikes) for fault in three} == {3}
    assert {strike.target for fault in three for strike in fault.strikes} == set(PARTICIPANTS)
    assert {strike.action for fault in three for strike in fault.strikes} == {"kill"}


def test_patterns_choose_kinds() -> None:
    assert chosen_kinds(["pause-c*", "kill-trial"]) == ("kill-trial", "pause-cache", "pause-coordinator")
    with pytest.raises(ConfigError, match="'kill-trail', which is no kind of fault; did you mean"):
        chosen_kinds(["kill-trail"])


def test_a_seed_draws_the_same_faults_in_each_version() -> None:
    """Draws of November 2026, after kinds of several coordinators were removed: later kinds must not change them."""

    def of(seed: int, patterns: str) -> list[str]:
        return [fault.kind for fault in plan(seed, faults=4, every_s=6, kinds=chosen_kinds(patterns.split(",")))]

    assert of(0, "*") == ["lose-storage", "add-node", "slow-link", "pause-three"]
    longest_run = "kill-*,pause-*,*-node,*-storage"
    assert of(13, longest_run) == ["pause-three", "kill-worker", "pause-cache", "slow-storage"]
    assert plan(0, faults=4, every_s=6) == plan(0, faults=4, every_s=6, kinds=chosen_kinds(["*"]))


def test_a_long_pause_happens_only_where_it_is_named() -> None:
    """20 to 60 s, of any participant. No pattern matches it, because that would change the plans of old commands."""
    assert not set(chosen_kinds(["*", "pause-*", "pause-*o*"])) & set(BY_NAME_ONLY)
    assert chosen_kinds(["pause-long", "kill-cache"]) == ("kill-cache", "pause-long")
    with pytest.raises(ConfigError, match="'pause-lo', which is no kind of fault; did you mean 'pause-long'"):
        chosen_kinds(["pause-lo"])
    strikes = [strike for fault in plan(1, faults=60, every_s=40, kinds=["pause-long"]) for strike in fault.strikes]
    assert len(strikes) == 60
    assert {strike.target for strike in strikes} == set(PARTICIPANTS)
    assert {strike.action for strike in strikes} == {"pause"}
    assert 20 <= min(strike.lasts_s for strike in strikes) < 30 < 50 < max(strike.lasts_s for strike in strikes) <= 60


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"faults": 0}, "--faults must be at least 1, got 0"),
        ({"every_s": 0.0}, "--every must be above 0 seconds, got 0"),
        ({"kinds": ()}, "--kinds must name at least one"),
    ],
)
def test_what_cannot_be_planned_is_refused(wrong: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(0, **{"faults": 5, "every_s": 6.0, **wrong})


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"ranks": 1}, "--ranks must be 0 or at least 2, got 1"),
        ({"ranks": 2, "command": ("true",)}, "--ranks 2 is for the search that runs without a command"),
    ],
)
def test_options_of_ranks_that_cannot_work_are_refused(options: dict, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        ChaosSettings(**options).plan()
