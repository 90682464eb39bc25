"""A consumer's wait ends once the feed has made no progress for the timeout, and never earlier."""

from __future__ import annotations

import pytest

from mbaas.client.stalls import Patience


def test_it_ends_when_it_was_said_to_end_whoever_is_silent_meanwhile() -> None:
    patience = Patience(300.0, 1000.0, first_word_s=10.0)
    assert [patience.left_s(now) for now in (1000.0, 1090.0, 1299.0, 1300.0, 1400.0)] == [300.0, 210.0, 1.0, 0.0, 0.0]
    assert patience.waited_s(1299.0) == 299.0


def test_progress_renews_it_and_what_is_said_twice_is_none() -> None:
    patience = Patience(30.0, 0.0, first_word_s=10.0)
    patience.saw(7, 1.0)
    assert patience.left_s(20.0) == 11.0
    patience.saw(7, 20.0)
    assert patience.left_s(20.0) == 11.0
    patience.saw(0, 20.0)  # a restarted coordinator counts from 0 again
    assert patience.left_s(20.0) == 30.0
    assert patience.waited_s(20.0) == 20.0


def test_it_is_told_when_it_has_lasted_for_a_while_and_whenever_that_has_doubled() -> None:
    patience = Patience(1000.0, 0.0, first_word_s=10.0)
    assert [now for now in range(200) if patience.is_to_be_told(now)] == [10, 20, 40, 80, 160]
    late = Patience(1000.0, 0.0, first_word_s=10.0)
    assert late.until_word_s(4.0) == 6.0
    assert late.is_to_be_told(35.0), "it was not read before"
    assert not late.is_to_be_told(39.0)
    assert late.until_word_s(39.0) == pytest.approx(1.0)
    assert late.until_word_s(50.0) == 0.0
