"""How long a consumer waits for one block, and when it says in its log that it does: pure, the time is an argument."""

from __future__ import annotations


class Patience:
    """One wait of a consumer. It ends when the feed has made no progress for ``timeout_s``, whatever else happens.

    Args:
        timeout_s: the consumer's ``wait_timeout_s``.
        now: when the wait begins, in seconds.
        first_word_s: a wait that has lasted this long is told to the log, and again whenever it has doubled.
    """

    def __init__(self, timeout_s: float, now: float, *, first_word_s: float) -> None:
        self.timeout_s = timeout_s
        self._began = self._since = now  # the beginning of the wait, and of the time without progress
        self._progress: int | None = None
        self._word_s = first_word_s  # how long the wait will have lasted when it is told next

    def saw(self, progress: int, now: float) -> None:
        """Note how far the feed said that it is; only a change of that is progress."""
        if progress != self._progress:
            self._progress, self._since = progress, now

    def waited_s(self, now: float) -> float:
        """Return how long the wait has lasted."""
        return now - self._began

    def left_s(self, now: float) -> float:
        """Return after how many seconds it ends, unless the feed makes progress; 0 if it is over."""
        return max(0.0, self._since + self.timeout_s - now)

    def until_word_s(self, now: float) -> float:
        """Return after how many seconds it is to be told to the log next."""
        return max(0.0, self._began + self._word_s - now)

    def is_to_be_told(self, now: float) -> bool:
        """Return whether it is to be told to the log now; each time only once."""
        if self.waited_s(now) < self._word_s:
            return False
        while self._word_s <= self.waited_s(now):
            self._word_s *= 2
        return True
