"""The fetch stall in a wait matches a model of two workers."""

from __future__ import annotations

import pytest

from mbaas.client.stalls import REMEMBERED_BLOCKS, MinibatchWaits, StallAttribution
from mbaas.model.waits import wait_class
from mbaas.wire.consumers import MOST_WANTED


@pytest.mark.parametrize(
    ("step_s", "prep_s", "fetch_s", "fetch_stall_s"),
    [
        (0.030, 0.040, 0.060, 0.020),  # a block takes 50 ms, prep alone 20: all waiting is for bytes
        (0.030, 0.064, 0.036, 0.018),  # prep alone takes 32 ms: 2 ms of waiting would remain
        (0.010, 0.100, 0.000, 0.000),
        (0.010, 0.080, 0.020, 0.010),  # a block takes 50 ms, and 40 without fetching
    ],
)
def test_two_workers(step_s: float, prep_s: float, fetch_s: float, fetch_stall_s: float) -> None:
    """Both workers are always busy: a block takes (prep + fetch) / 2, and prep / 2 without fetching."""
    attribution, elapsed_s = StallAttribution(), (prep_s + fetch_s) / 2
    found = [
        attribution.fetch_stall_s(elapsed_s - step_s, elapsed_s=elapsed_s, fetch_s=fetch_s, prep_s=prep_s)
        for _ in range(9)
    ]
    assert found == pytest.approx([fetch_stall_s] * 9)


def test_blocks_that_come_together() -> None:
    """Four blocks arrive every 200 ms; 36 of 100 ms are fetching. Steps of 30 ms leave 80 ms of waiting for the first.

    Without fetching they would arrive every 128 ms, so 72 ms are fetch stall. At most 36 ms are charged for the first
    block and 10.8 ms for each other one, 68.4 ms in total. The first four are charged 36 ms, as no block precedes them.
    """
    attribution, total_s = StallAttribution(), 0.0
    for _ in range(10):
        for number in range(4):
            waited_s = 0.080 if number == 0 else 0.0
            total_s += attribution.fetch_stall_s(waited_s, elapsed_s=0.030 + waited_s, fetch_s=0.036, prep_s=0.064)
    assert total_s == pytest.approx(0.036 + 9 * 0.0684)


def test_what_was_masked_long_ago_is_forgotten() -> None:
    """1,000 timely blocks hide 10 ms of fetching each. Then prep alone is slow: at most 16 x 10 ms are fetch stall."""
    attribution = StallAttribution()
    assert sum(attribution.fetch_stall_s(0.0, elapsed_s=0.02, fetch_s=0.01, prep_s=0.01) for _ in range(1000)) == 0
    later_s = sum(attribution.fetch_stall_s(0.05, elapsed_s=0.06, fetch_s=0.0, prep_s=0.1) for _ in range(1000))
    assert 0 < later_s <= REMEMBERED_BLOCKS * 0.01


def test_a_pause_is_no_fetching() -> None:
    """A trial requests nothing for a minute, then waits 1 s for a block whose bytes took 0.1 s."""
    assert StallAttribution().fetch_stall_s(1.0, elapsed_s=61.0, fetch_s=0.1, prep_s=0.1) == pytest.approx(0.1)


def handed_out(waits: MinibatchWaits, *steps: tuple[float, float]) -> None:
    """Hand out a minibatch at the end of each step: seconds waited, and seconds of the step."""
    wait_s = now = 0.0
    for step, (waited_s, lasted_s) in enumerate(steps, 1):
        wait_s, now = wait_s + waited_s, now + lasted_s
        waits.hand_out(wait_s, now, step=step)


def test_a_wait_counts_in_its_class_and_as_a_share_of_its_step() -> None:
    waits = MinibatchWaits(now=0.0)
    handed_out(waits, (2.0, 2.0), (0.0, 0.5), (0.05, 0.2))
    assert {at: number for at, number in enumerate(waits.counts.counts) if number} == {
        wait_class(0.0): 1,
        wait_class(0.05): 1,
        wait_class(2.0): 1,
    }
    assert waits.unreported() == (0, ((1, 100), (2, 0), (3, 25)))


def test_steps_are_reported_until_they_are_acknowledged() -> None:
    waits = MinibatchWaits(now=0.0)
    handed_out(waits, *[(0.0, 1.0)] * 5)
    waits.acknowledge(2)
    waits.acknowledge(1)  # an answer that comes late
    assert waits.unreported() == (2, ((3, 0), (4, 0), (5, 0)))
    waits.acknowledge(5)
    assert waits.unreported() == (5, ())


def test_without_answers_the_last_steps_are_kept() -> None:
    waits = MinibatchWaits(now=0.0)
    handed_out(waits, *[(0.0, 1.0)] * (MOST_WANTED + 3))
    first, steps = waits.unreported()
    assert (first, len(steps), steps[0]) == (3, MOST_WANTED, (4, 0))
    waits.acknowledge(4)
    assert waits.unreported()[1][0] == (5, 0)


def test_a_single_consumer_reports_no_steps() -> None:
    waits = MinibatchWaits(now=0.0)
    waits.hand_out(0.2, 1.0, step=None)
    assert waits.unreported() == (0, ())
    assert waits.counts.total == 1
