"""Detached feeds belong to the cluster and not to their program, and several searches share one."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from ray_heads import Head, ray_head

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.ray_cluster import actor_names, connection
from support.pages import ROOT, block_with
from support.waiting import wait_until

SAMPLES, EPOCHS, TRIALS = 3003, 2, 2
CONFIG = """
name: shared
data: {images}
batch_size: 16
pipeline: [DecodeImage, Map: prep_of_detached:darken]
prep_workers: 1
"""
PREP = "def darken(image, rng):\n    return image // 2\n"

SEARCH = """
# A search of two trials. Each trial joins, and begins when the trials of both searches have.
import json, os, sys, time
from pathlib import Path
import ray
from ray import tune
from tune_integration import FeedCallback, get_loader

folder, everybody, epochs = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])

def train(config):
    loader = get_loader("shared", batch_size=config["batch_size"])
    (folder / tune.get_context().get_trial_id()).touch()
    deadline = time.monotonic() + 60
    while len(list(folder.iterdir())) < everybody:
        assert time.monotonic() < deadline, "the other search did not begin"
        time.sleep(0.05)
    samples = sum(len(batch["label"]) for _ in range(epochs) for batch in loader)
    tune.report({"samples": samples, "exact": loader.ledger.exact})

ray.init(log_to_driver=False)
results = tune.Tuner(
    tune.with_resources(train, {"cpu": 0.5}),
    param_space={"batch_size": tune.grid_search([16, 25])},
    run_config=tune.RunConfig(storage_path=sys.argv[4], callbacks=[FeedCallback("shared")], verbose=0),
).fit()
print(json.dumps({
    "job": ray.get_runtime_context().get_job_id(),
    "trials": [(result.metrics["samples"], result.metrics["exact"]) for result in results],
}), flush=True)
"""

SERVE_TWO = """
import mbaas
from mbaas import transforms as T
from mbaas.ray_cluster import actor_names
from mbaas.dataset import synthetic
for name in ("brief", "lasting"):
    mbaas.serve(name, synthetic(20), T.Pipeline([T.DecodeImage()]), batch_size=4, prep_workers=1, cache_bytes=0,
                staging_bytes=100_000, detached=name == "lasting")
print(actor_names.feed_names())
"""

LEFT = """
import json, ray
from support.leaks import alive_actors, store_use
ray.init(log_to_driver=False)
print(json.dumps([sorted(alive_actors()), store_use().primary_bytes]))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head() as head:
        yield head


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A feed file for small images, with a function in a module next to it.

    So many images that their table, an argument of the coordinator, goes through the serving program's object store.
    """
    folder = tmp_path_factory.mktemp("detached")
    for number in range(SAMPLES):
        image = folder / "images" / f"class-{number % 2}" / f"{number:05d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(image), np.full((8, 8, 3), number % 256, np.uint8))
    (folder / "prep_of_detached.py").write_text(PREP)
    (folder / "feed.yaml").write_text(CONFIG.format(images=folder / "images"))
    return folder / "feed.yaml"


def command(*arguments: object) -> list[object]:
    return [sys.executable, "-m", "mbaas", *arguments]


def left_on(head: Head) -> tuple[list[str], int]:
    """Live actors of the cluster, and bytes in its object store."""
    done = head.run(sys.executable, "-c", LEFT)
    actors, primary_bytes = json.loads(done.stdout.splitlines()[-1])
    return actors, primary_bytes


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_searches_share_a_feed_whose_server_is_gone(head: Head, config: Path, tmp_path: Path) -> None:
    """Four trials of two jobs, two epochs each: everything is prepared once and delivered four times."""
    assert left_on(head) == ([], 0)
    served = head.run(*command("serve", config, "--detach"))
    assert served.returncode == 0, served.stdout
    assert f"feed 'shared' serves {SAMPLES:,} samples" in served.stdout
    assert "it is detached and runs until `mbaas stop shared`" in served.stdout

    met = tmp_path / "met"
    met.mkdir()
    arguments = [str(met), str(2 * TRIALS), str(EPOCHS)]
    searches = [head.start(SEARCH, *arguments, str(tmp_path / f"search-{number}")) for number in range(2)]
    found = [finish(search) for search in searches]
    assert found[0]["job"] != found[1]["job"]
    assert [search["trials"] for search in found] == [[[EPOCHS * SAMPLES, True]] * TRIALS] * 2

    status = json.loads(head.run(*command("status", "shared", "--json")).stdout.splitlines()[-1])
    assert status["delivered_samples"] == 2 * TRIALS * EPOCHS * SAMPLES
    ahead = 8 * status["block_samples"]  # prep runs ahead of trials that may continue
    assert EPOCHS * SAMPLES <= status["prepared_samples"] <= EPOCHS * SAMPLES + ahead
    assert (status["remade_blocks"], status["inexact_epochs"]) == (0, 0)
    again = head.run(*command("serve", config, "--detach"))
    assert again.returncode == 1
    assert "a feed 'shared' is already running" in again.stdout

    stopped = head.run(*command("stop", "shared"))
    assert (stopped.returncode, stopped.stdout) == (0, "feed 'shared' is stopped\n")
    assert wait_until(lambda: left_on(head) == ([], 0), "the actors and bytes of the feed are gone")


def finish(search: subprocess.Popen[str]) -> dict[str, object]:
    """The output of a finished search."""
    with search:
        out, _ = search.communicate(timeout=90)
    assert search.returncode == 0
    found: dict[str, object] = json.loads(out.splitlines()[-1])
    return found


@pytest.mark.long
def test_without_detach_a_feed_ends_with_its_program(head: Head) -> None:
    """The counterpart of a detached feed."""
    done = head.run(sys.executable, "-c", SERVE_TWO)
    assert done.returncode == 0, done.stdout
    joined, feeds = done.stdout.splitlines()
    assert joined.startswith("mbaas: joined the Ray cluster at ")
    assert feeds == "['brief', 'lasting']"
    wait_until(lambda: names_on(head) == ["lasting"], "the other feed is gone")
    assert head.run(*command("stop", "lasting")).returncode == 0


@pytest.mark.long
def test_what_the_page_shows_serves_a_detached_feed(head: Head, tmp_path: Path) -> None:
    """With a local folder instead of the shared disk."""
    for number in range(12):
        image = tmp_path / "train" / f"class-{number % 2}" / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(image), np.zeros((24, 30, 3), np.uint8))
    shown = block_with(ROOT / "docs" / "how-to" / "detached.md", "detached=True").text
    done = head.run(sys.executable, "-c", shown.replace("/shared/train", str(tmp_path / "train")))
    assert done.returncode == 0, done.stdout
    status = json.loads(head.run(*command("status", "train", "--json")).stdout.splitlines()[-1])
    assert (status["samples"], status["batch_size"]) == (12, 256)
    assert head.run(*command("stop", "train")).returncode == 0


def names_on(head: Head) -> list[str]:
    feeds = json.loads(head.run(*command("status", "--json")).stdout.splitlines()[-1])
    return [feed["name"] for feed in feeds]


def test_a_cluster_of_this_program_cannot_keep_it(ray_clean: None, feed_name: str) -> None:
    with pytest.raises(mbaas.ResourceError, match="started by this program; start one with `ray start --head`"):
        mbaas.serve(feed_name, synthetic(20), T.Pipeline([T.DecodeImage()]), batch_size=4, detached=True)
    assert feed_name not in actor_names.feed_names()


def test_without_a_cluster_it_says_how_to_start_one(monkeypatch: pytest.MonkeyPatch, config: Path) -> None:
    """Neither the function nor the command starts a cluster."""

    def connect(address: str, **options: object) -> None:
        assert address == "auto"
        raise ConnectionError("Could not find any running Ray instance.")

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "_connect", connect)
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    sentence = (
        "needs a Ray cluster that outlives the program that serves the feed, but none is running here; start one with"
    )
    with pytest.raises(mbaas.ResourceError, match=sentence):
        mbaas.serve("none", synthetic(20), T.Pipeline([T.DecodeImage()]), batch_size=4, detached=True)

    from typer.testing import CliRunner

    from mbaas.cli import app

    done = CliRunner().invoke(app, ["serve", str(config), "--detach"])
    assert (done.exit_code, done.stdout) == (1, "")
    assert sentence in done.stderr
    assert "`ray start --head`" in done.stderr
