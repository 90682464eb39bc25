"""Timeout and log times of a consumer's wait for one block; no I/O, the time is an argument."""

from __future__ import annotations


class Patience:
    """One wait of a consumer. It ends when the feed has made no progress for ``timeout_s``.

    It is logged after ``first_word_s`` seconds, and again each time it has doubled.
    """

    def __init__(self, timeout_s: float, now: float, *, first_word_s: float) -> None:
        self.timeout_s = timeout_s
        self._began = self._since = now  # start of the wait, and of the time without progress
        self._progress: int | None = None
        self._word_s = first_word_s  # duration of the wait at its next log entry

    def saw(self, progress: int, now: float) -> None:
        """Record the feed's progress number; only a change is progress."""
        if progress != self._progress:
            self._progress, self._since = progress, now

    def waited_s(self, now: float) -> float:
        """Return the duration of the wait so far, in seconds."""
        return now - self._began

    def left_s(self, now: float) -> float:
        """Return the seconds until the timeout, unless the feed makes progress; 0 if it has passed."""
        return max(0.0, self._since + self.timeout_s - now)

    def until_word_s(self, now: float) -> float:
        """Return the seconds until the next log entry."""
        return max(0.0, self._began + self._word_s - now)

    def is_to_be_told(self, now: float) -> bool:
        """Return whether the wait is due to be logged now. True once per log entry."""
        if self.waited_s(now) < self._word_s:
            return False
        while self._word_s <= self.waited_s(now):
            self._word_s *= 2
        return True
