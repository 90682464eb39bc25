"""Samples that storage does not return are retried on schedule, then count as bad, and are logged."""

from __future__ import annotations

import pytest

from mbaas.cache.read_pool import FIRST_PAUSE_S, FORGET_S, HOLD_S, MAX_PAUSE_S, SHORT_RETRY_S, Retries
from mbaas.cache.slab import TemporaryReason
from mbaas.errors import StorageError

ERRS = StorageError("file:7", "reading failed: [Errno 5] Input/output error")
MISSING = StorageError("file:7", "the file is gone since the dataset was listed", is_missing=True)


def given_up_after(
    retries: Retries, error: StorageError = ERRS, *, since: float = 100.0, sample: int = 7
) -> tuple[float, str]:
    """Retry a sample whenever due; return the seconds until it counts as bad, and the reason."""
    now, reason = since, retries.failed(sample, error, since)
    while isinstance(reason, TemporaryReason):
        assert retries.failing([sample, 0]) == {sample: error.reason}
        now += retries.pause_s([sample], now)
        reason = retries.failed(sample, error, now)
    assert retries.failing([sample]) == {}
    return now - since, reason


@pytest.mark.parametrize("chance", [0.0001, 0.5, 0.999])
def test_a_sample_is_asked_for_until_its_patience_is_over_to_the_second(chance: float) -> None:
    """For any random draw, the last attempt is made after exactly 120 s. Its reason gives the attempts and the time."""
    waited_s, reason = given_up_after(Retries(120.0, lambda: chance))
    assert waited_s == pytest.approx(120.0)
    assert reason.startswith("reading failed: [Errno 5] Input/output error (")
    assert reason.endswith(" attempts in 2 min)")


def test_pauses_grow_up_to_a_bound() -> None:
    """With maximum draws: 0.2, 0.4, ..., 6.4, and 10 from there on."""
    retries, now, pauses = Retries(1000.0, lambda: 1.0), 0.0, []
    for _ in range(9):
        retries.failed(7, ERRS, now)
        pauses.append(retries.pause_s([7], now))
        now += pauses[-1]
    assert pauses == pytest.approx([min(FIRST_PAUSE_S * 2**i, MAX_PAUSE_S) for i in range(9)])


def test_the_first_file_that_is_missing_has_the_whole_patience_and_the_next_ones_a_short_time() -> None:
    """A thousand files deleted, one after the other, cost the full patience once."""
    retries, now = Retries(120.0, lambda: 0.5), 0.0
    for sample in range(1, 1001):
        waited_s, _ = given_up_after(retries, MISSING, since=now, sample=sample)
        assert waited_s == pytest.approx(120.0 if sample == 1 else SHORT_RETRY_S)
        now += waited_s
    assert now == pytest.approx(120.0 + 999 * SHORT_RETRY_S)
    assert given_up_after(retries, ERRS, since=now, sample=1001)[0] == pytest.approx(120.0), "the file is not missing"


def test_missing_files_that_wait_when_the_first_one_is_given_up_are_bad_when_they_are_due() -> None:
    """Nine were first requested a minute after the first; none has its own two minutes."""
    retries = Retries(120.0, lambda: 0.99)
    due = {1: 100.0} | {sample: 160.0 + sample for sample in range(2, 11)}
    bad_at: dict[int, float] = {}
    while due:
        sample = min(due, key=due.__getitem__)
        now = due.pop(sample)
        if isinstance(retries.failed(sample, MISSING, now), TemporaryReason):
            due[sample] = now + retries.pause_s([sample], now)
        else:
            bad_at[sample] = now
    assert bad_at[1] == pytest.approx(220.0)
    assert len(bad_at) == 10
    assert max(bad_at.values()) <= 220.0 + MAX_PAUSE_S


def test_missing_files_have_the_whole_patience_again_once_one_of_them_is_back() -> None:
    retries = Retries(120.0, lambda: 0.5)
    given_up_after(retries, MISSING, sample=1)
    assert given_up_after(retries, MISSING, sample=2, since=1000.0)[0] == pytest.approx(SHORT_RETRY_S)
    retries.failed(3, ERRS, 2000.0)
    retries.resolved([3])
    assert given_up_after(retries, MISSING, sample=4, since=3000.0)[0] == pytest.approx(SHORT_RETRY_S), "it had erred"
    retries.resolved([2])
    assert given_up_after(retries, MISSING, sample=5, since=4000.0)[0] == pytest.approx(120.0)
    assert given_up_after(retries, MISSING, sample=6, since=5000.0)[0] == pytest.approx(SHORT_RETRY_S)


def test_no_patience_is_longer_than_the_option_says() -> None:
    retries = Retries(2.0, lambda: 0.5)
    assert given_up_after(retries, MISSING, sample=1)[0] == pytest.approx(2.0)
    assert given_up_after(retries, MISSING, sample=2)[0] == pytest.approx(2.0)


def test_a_sample_that_was_given_up_is_tried_anew_but_not_for_as_long_until_it_was_read() -> None:
    retries = Retries(120.0, lambda: 0.5)
    assert given_up_after(retries)[0] == pytest.approx(120.0)
    assert given_up_after(retries, since=1000.0)[0] == pytest.approx(SHORT_RETRY_S)
    retries.resolved([7])
    assert given_up_after(retries, since=2000.0)[0] == pytest.approx(120.0)


def test_who_reads_a_sample_right_after_it_was_given_up_gets_the_verdict_and_no_new_wait() -> None:
    """A fetch retries failing samples alone, then reads everything. Otherwise it would be refused forever."""
    retries = Retries(120.0, lambda: 0.5)
    waited_s, reason = given_up_after(retries)
    assert retries.failed(7, ERRS, 100.0 + waited_s + FORGET_S / 2) == reason
    assert retries.failing([7]) == {}


def test_without_patience_a_sample_is_bad_at_once() -> None:
    assert given_up_after(Retries(0.0, lambda: 0.5)) == (0.0, f"{ERRS.reason} (1 attempt in 0 s)")


def test_a_sample_that_nobody_asked_for_meanwhile_begins_anew() -> None:
    """It failed once, an hour ago, which does not make it bad now."""
    retries = Retries(120.0, lambda: 0.5)
    retries.failed(7, ERRS, 0.0)
    assert given_up_after(retries, since=3600.0)[0] == pytest.approx(120.0)


def test_who_waits_is_sent_away_when_the_trouble_is_not_new_any_more() -> None:
    """A fetch waits within HOLD_S of a sample's first error. 8 fails later than 7."""
    retries = Retries(120.0, lambda: 1.0)
    retries.failed(7, ERRS, 0.0)
    assert retries.are_new([7])
    retries.failed(7, ERRS, HOLD_S - 0.3)
    retries.failed(8, ERRS, HOLD_S - 0.3)
    assert not retries.are_new([7, 8])
    assert retries.are_new([8])


def test_the_log_tells_when_trouble_begins_when_samples_are_given_up_and_when_it_ends() -> None:
    def log() -> list[str]:
        return retries.log("s3://b/{}".format, now)

    retries, now = Retries(60.0, lambda: 1.0), 0.0
    retries.failed(7, ERRS, now)
    assert log() == [], "it may pass in a moment"
    for now in (1.0, 3.0):
        retries.failed(7, ERRS, now)
        retries.failed(9, ERRS, now)
    assert log() == [
        f"storage does not give 2 samples, for instance s3://b/7: {ERRS.reason}; asked again for up to 60 s"
    ]
    assert log() == []
    for now in (20.0, 40.0):
        retries.failed(7, ERRS, now)
        retries.failed(9, ERRS, now)
    now = 62.0
    retries.failed(9, ERRS, now)
    assert log() == ["gave up 1 sample that storage did not give"]
    retries.resolved([7])
    assert log() == ["storage works again, after 62 s"]
    retries.failed(5, ERRS, now)
    now += 5 * FORGET_S
    assert log() == [], "it is no longer requested"
