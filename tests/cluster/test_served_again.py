"""A killed program's feed can be restarted at once: no consumer reads an epoch twice, and surviving trials continue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path

import cv2
import numpy as np
import pytest
import ray
from ray_heads import Head, ray_head

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.tools.chaos.participants import kill
from support.trials import record_epoch
from support.waiting import wait_until

SERVE = """
import sys, time
import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
options = {"batch_size": 20, "prep_workers": 1, "cache_bytes": 100_000, "staging_bytes": 300_000}
feed = mbaas.serve("again", synthetic(200), T.Pipeline([T.DecodeImage()]), **options)
with mbaas.join("again", consumer="trial", format="numpy") as loader:
    for _ in range(2):
        for batch in loader:
            pass
        print(loader.ledger.feed_epoch, loader.ledger.exact, flush=True)
sys.stdin.readline()
feed.stop()
"""

SAMPLES = 200


def serve() -> mbaas.Feed:
    """Serve the feed of the program `SERVE` from this one."""
    options = {"batch_size": 20, "prep_workers": 1, "cache_bytes": 100_000, "staging_bytes": 300_000}
    return mbaas.serve("again", synthetic(SAMPLES), T.Pipeline([T.DecodeImage()]), **options)


GO_ON = """
import sys, threading, time
import mbaas

def tell(*words):  # in one piece, or lines of several threads get mixed up
    sys.stdout.write(" ".join(map(str, words)) + "\\n")
    sys.stdout.flush()

def go_on(**who):
    loader = mbaas.join("again", format="numpy", **who)
    try:
        while True:
            for batch in loader:
                time.sleep(0.02)
            tell(loader.ledger.feed_epoch, loader.ledger.exact, *who.values())
    except mbaas.MbaasError as error:
        tell(f"{type(error).__name__}:", error)

whose = [{"consumer": "single"}, *({"consumer": "ranks", "rank": rank, "world_size": 2} for rank in range(2))]
threads = [threading.Thread(target=go_on, kwargs=who) for who in whose]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
"""
"""A trial and one of two ranks, which read epochs until an error."""


@pytest.fixture
def head(ray_session: None) -> Head:
    """The session's cluster, which is a foreign cluster for the programs."""
    address = ray.get_runtime_context().gcs_address
    return Head(address, "", os.environ | {"RAY_ADDRESS": address})


def epochs_of(program: subprocess.Popen[str]) -> list[int]:
    """The feed's epoch numbers of the two epochs that a program read."""
    assert program.stdout is not None
    told = [program.stdout.readline().split() for _ in range(2)]
    assert [exact for _, exact in told] == ["True", "True"]
    return [int(epoch) for epoch, _ in told]


class Told:
    """The output of a program, line by line."""

    def __init__(self, program: subprocess.Popen[str]) -> None:
        self.lines: list[str] = []
        self._program = program
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        assert self._program.stdout is not None
        self.lines.extend(line.strip() for line in self._program.stdout)

    def join(self) -> None:
        """Wait until the output of the ended program is read completely."""
        self._thread.join()

    def epochs(self) -> dict[str, list[int]]:
        """Consumer -> the feed's epoch numbers of the epochs that it read."""
        found: dict[str, list[int]] = {}
        for line in self.lines:
            epoch, exact, who = line.split(maxsplit=2)
            assert exact == "True", line
            found.setdefault(who, []).append(int(epoch))
        return found

    def await_epochs(self, number: int) -> dict[str, list[int]]:
        """Wait until each of the three consumers has read ``number`` more epochs."""
        before = {who: len(epochs) for who, epochs in self.epochs().items()}

        def have_gone_on() -> bool:
            now = self.epochs()
            return len(now) == 3 and all(len(epochs) >= before.get(who, 0) + number for who, epochs in now.items())

        wait_until(have_gone_on, f"three consumers go through {number} epochs", deadline_s=60)
        return self.epochs()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_feed_whose_program_was_killed_is_served_again_at_once_with_the_epochs_that_come_next(head: Head) -> None:
    with head.start(SERVE) as first:
        assert epochs_of(first) == [0, 1]
        with pytest.raises(mbaas.FeedExistsError, match="a feed 'again' is already running"):
            serve()  # the one that runs is left alone
        trials = head.start(GO_ON)
        told = Told(trials)
        told.await_epochs(1)
        kill(first.pid)
    with head.start(SERVE) as second, trials:  # its two epochs show that it was served, despite leftovers of the first
        begun, following = epochs_of(second)
        assert begun > 1
        assert following == begun + 1
        for who, epochs in told.await_epochs(2).items():
            assert epochs == list(range(epochs[0], epochs[0] + len(epochs))), f"{who} continues where it stopped"
        second.communicate("end\n")
        assert trials.wait(60) == 0
        told.join()
        assert sorted(told.lines)[-3:] == ["FeedFailedError: feed 'again' was stopped"] * 3
    with serve(), mbaas.join("again", consumer="trial", format="numpy") as loader:
        assert record_epoch(loader).flaws(range(SAMPLES)) == []
        assert loader.ledger is not None
        assert loader.ledger.feed_epoch == 0, "a stopped feed leaves nothing to resume from"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_feed_says_that_the_cluster_ended_which_it_had_joined(tmp_path: Path) -> None:
    """It ends long before Ray would end it, after a minute and with a message about a GCS."""
    (tmp_path / "images" / "class").mkdir(parents=True)
    for number in range(20):
        cv2.imwrite(str(tmp_path / "images" / "class" / f"{number}.png"), np.full((8, 8, 3), number, np.uint8))
    (tmp_path / "feed.yaml").write_text(
        "{name: train, data: images, batch_size: 16, pipeline: [DecodeImage], prep_workers: 1}"
    )
    with ExitStack() as cluster:
        head = cluster.enter_context(ray_head())
        command = [sys.executable, "-m", "mbaas", "serve", str(tmp_path / "feed.yaml"), "--address", head.address]
        with subprocess.Popen(command, env=head.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as feed:
            assert feed.stdout is not None
            try:
                assert any(b"0 trials" in line for line in feed.stdout), "it serves"
                cluster.close()
                rest, _ = feed.communicate(timeout=50)
            finally:
                feed.kill()
    *told, last = rest.decode().splitlines()
    address = re.escape(head.address.partition(":")[2])
    assert re.fullmatch(
        rf"error: feed 'train' ended: the Ray cluster at \S+:{address}, which this program joined and did not start, "
        "has ended",
        last,
    ), rest
    assert all(line.startswith("train: ") for line in told), rest
    assert feed.returncode == 1
