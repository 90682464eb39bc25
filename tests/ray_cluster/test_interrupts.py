"""Ctrl-C while Ray starts takes effect when Ray is up; a second one takes effect at once."""

from __future__ import annotations

import signal
import threading

import pytest

from mbaas.ray_cluster import connection


def interrupted(times: int) -> int:
    """Return how many of ``times`` interrupts a block survived; it ends by KeyboardInterrupt."""
    survived = 0

    def run() -> None:
        nonlocal survived
        with connection._deferred_interrupt():
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)
                survived += 1

    with pytest.raises(KeyboardInterrupt):
        run()
    return survived


def test_the_first_interrupt_waits_for_the_end_of_the_block(capfd: pytest.CaptureFixture[str]) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert interrupted(1) == 1
    assert signal.getsignal(signal.SIGINT) is handler
    assert "at once after another Ctrl-C" in capfd.readouterr().err


def test_the_second_interrupt_takes_effect_at_once() -> None:
    assert interrupted(3) == 1


def test_an_interrupt_takes_effect_also_after_an_error() -> None:
    """Without a cluster to join, `ray.init` raises, and the caller would start one."""

    def run() -> None:
        with connection._deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            raise ConnectionError

    with pytest.raises(KeyboardInterrupt):
        run()


def test_without_an_interrupt_nothing_happens_and_errors_pass() -> None:
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(ValueError, match="other"), connection._deferred_interrupt():
        raise ValueError("other")
    assert signal.getsignal(signal.SIGINT) is handler


def test_other_threads_leave_the_handler_alone() -> None:
    handlers = []

    def look() -> None:
        with connection._deferred_interrupt():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.getsignal(signal.SIGINT)]
