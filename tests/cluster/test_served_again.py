"""A program that serves a feed is killed: another one serves it again at once, and nobody sees an epoch twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest
from ray_heads import Head, ray_head

from mbaas.chaos.participants import kill

SERVE = """
import sys, time
import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
options = {"batch_size": 20, "prep_workers": 2, "cache_bytes": 100_000, "staging_bytes": 300_000}
try:
    feed = mbaas.serve("again", synthetic(200), T.Pipeline([T.DecodeImage()]), **options)
except mbaas.MbaasError as error:
    sys.exit(f"{type(error).__name__}: {error}")
with mbaas.join("again", consumer="trial", format="numpy") as loader:
    for _ in range(2):
        for batch in loader:
            pass
        print(loader.ledger.feed_epoch, loader.ledger.exact, flush=True)
sys.stdin.readline()
feed.stop()
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as head:
        yield head


def epochs_of(program: subprocess.Popen[str]) -> list[int]:
    """The feed's numbers of the two epochs that a program went through."""
    assert program.stdout is not None
    told = [program.stdout.readline().split() for _ in range(2)]
    assert [exact for _, exact in told] == ["True", "True"]
    return [int(epoch) for epoch, _ in told]


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_feed_whose_program_was_killed_is_served_again_at_once_with_the_epochs_that_come_next(head: Head) -> None:
    with head.start(SERVE) as first:
        assert epochs_of(first) == [0, 1]
        other = head.run(sys.executable, "-c", SERVE)
        assert other.returncode == 1
        assert "FeedExistsError: a feed 'again' runs already" in other.stdout, "the one that runs was left alone"
        kill(first.pid)
    with head.start(SERVE) as second:  # its two epochs say that it was served, whatever was left of the first
        begun, following = epochs_of(second)
        assert begun > 1
        assert following == begun + 1
        second.communicate("end\n")
    with head.start(SERVE) as third:
        assert epochs_of(third) == [0, 1], "a feed that was stopped left nothing to go on with"
        third.communicate("end\n")
