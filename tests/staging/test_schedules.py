"""Ten thousand random schedules: the ledger is exact, bytes are bounded, nobody starves."""

import pytest

from mbaas.staging.core import StagingCore
from mbaas.staging.dispatch import Dispatcher
from mbaas.testing.schedules import Simulation

CHUNK = 1000


@pytest.mark.parametrize("first", range(0, 10_000, CHUNK))
def test_every_consumer_gets_its_epochs_exactly_whatever_happens(first):
    for seed in range(first, first + CHUNK):
        Simulation(seed).run()


@pytest.mark.parametrize("first", range(0, 2_000, CHUNK))
def test_each_block_is_made_once_while_nobody_dies_or_falls_out_of_step(first):
    for seed in range(first, first + CHUNK):
        Simulation(seed, calm=True).run()


def test_long_schedules_hold_too():
    for seed in range(100_000, 100_020):
        Simulation(seed, steps=2_000).run()


def _schedules_until_caught(seeds=300):
    for seed in range(seeds):
        try:
            Simulation(seed).run()
        except AssertionError as error:
            return str(error)
    return None


@pytest.mark.parametrize(
    ("owner", "method", "broken"),
    [
        (StagingCore, "_worker_down", lambda self, name, reason: self.crew.down(name, blame=True)),
        (StagingCore, "_node_down", lambda self, node, reason: None),
        (StagingCore, "_lost", lambda self, event: None),
        (StagingCore, "_expire", lambda self, member: None),
        (StagingCore, "_watch", lambda self, cohort, now: None),
        (Dispatcher, "drop_unwanted", lambda self: None),
        (Dispatcher, "_make_room", lambda self, nbytes, urgent: False),
    ],
)
def test_the_schedules_catch_a_broken_core(monkeypatch, owner, method, broken):
    monkeypatch.setattr(owner, method, broken)
    assert _schedules_until_caught() is not None
