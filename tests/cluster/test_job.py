"""The example job runs on a cluster that requires tokens, and a detached feed outlives its job."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest
from ray_heads import ROOT, Head, ray_head

from support.waiting import wait_until

SUBMIT = ROOT / "examples" / "job" / "submit.sh"
TOKEN = "the-token-of-this-cluster-0123456789"
SMALL = ("--trials", 2, "--epochs", 2, "--cpus", 0.5)
SAMPLES = 203
CONFIG = """
name: from-a-job
data: {images}
batch_size: 16
pipeline: [DecodeImage, Map: my_prep:darken]
prep_workers: 1
"""
READ = """
import mbaas

with mbaas.join("from-a-job", format="numpy") as loader:
    batches = [(len(batch["label"]), batch["image"].max()) for batch in loader]
    sizes, brightness = zip(*batches)
    print(f"{sum(sizes)} samples, brightness {max(brightness)}, exact: {loader.ledger.exact}")
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    """A cluster that accepts jobs only with its token."""
    with ray_head(dashboard=True, token=TOKEN) as head:
        wait_until(lambda: answers(head.dashboard), "the dashboard answers", deadline_s=60)
        yield head


def answers(dashboard: str) -> bool:
    try:
        urllib.request.urlopen(f"{dashboard}/api/version", timeout=5).close()
    except urllib.error.HTTPError:  # it requires a token
        return True
    except OSError:
        return False
    return True


def from_outside(head: Head, *command: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command as from another machine, with only the dashboard's address."""
    outside = {"RAY_ADDRESS": "", "RAY_API_SERVER_ADDRESS": head.dashboard}
    return head.run(*command, **(outside | environment))


@pytest.mark.long
def test_the_example_runs_as_a_job(head: Head) -> None:
    """With its working directory, whose my_prep.py the prep workers need, and its runtime environment."""
    done = from_outside(head, SUBMIT, *SMALL, "--samples", SAMPLES, "--prep-workers", 1)
    assert done.returncode == 0, done.stdout
    assert "2 trials, exact: True" in done.stdout
    figures = re.search(r"(\d+) samples prepared, (\d+) delivered", done.stdout)
    assert figures, done.stdout
    assert int(figures[2]) == 2 * 2 * SAMPLES


@pytest.mark.long
def test_a_failed_search_fails_the_job(head: Head) -> None:
    done = from_outside(head, SUBMIT, "--feed", "nothing")
    assert done.returncode != 0
    assert "no feed 'nothing' runs on this cluster; running: none" in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HOME": "/nowhere"}, "Ray couldn't find an authentication token"),
        ({"RAY_AUTH_TOKEN": "another-token-0123456789"}, "the authentication token is invalid or incorrect"),
        ({"RAY_AUTH_MODE": "disabled"}, "RAY_AUTH_MODE is currently 'disabled'"),
    ],
    ids=["missing", "wrong", "disabled"],
)
def test_without_the_right_token_nothing_runs(head: Head, environment: dict[str, str], sentence: str) -> None:
    done = from_outside(head, SUBMIT, **environment)
    assert done.returncode != 0
    assert "AuthenticationError" in done.stdout
    assert sentence in done.stdout


@pytest.mark.long
@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({"HOME": "/nowhere"}, "RAY_AUTH_MODE is token, and this program has no token"),
        ({"RAY_AUTH_TOKEN": "another-token-0123456789"}, "it wants a token, and this program has none or another one"),
        ({"RAY_AUTH_MODE": "disabled"}, "it wants a token, and this program has none or another one"),
    ],
    ids=["missing", "wrong", "disabled"],
)
def test_our_commands_say_what_a_cluster_with_tokens_wants(
    head: Head, environment: dict[str, str], sentence: str
) -> None:
    """One sentence. Ray ends a program without a token, and reports a wrong one only as a failed connection."""
    done = head.run(sys.executable, "-m", "mbaas", "status", **environment)
    assert done.returncode == 1
    last = done.stdout.splitlines()[-1]
    assert last.startswith("error: ")
    assert sentence in last
    assert last.endswith("wants RAY_AUTH_MODE=token, and its token in RAY_AUTH_TOKEN or ~/.ray/auth_token")


def test_a_job_leaves_a_feed_to_the_next(head: Head, tmp_path: Path) -> None:
    """The first job's function is in its working directory, which is not on the second job's path."""
    served, reading = tmp_path / "served", tmp_path / "reading"
    for number in range(SAMPLES):
        image = tmp_path / "images" / f"class-{number % 2}" / f"{number:03d}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(image), np.full((8, 8, 3), 200, np.uint8))
    served.mkdir()
    (served / "my_prep.py").write_text("def darken(image, rng):\n    return image // 2\n")
    (served / "feed.yaml").write_text(CONFIG.format(images=tmp_path / "images"))
    submit = ["ray", "job", "submit", "--working-dir", served, "--", "mbaas", "serve", "feed.yaml", "--detach"]
    first = from_outside(head, *submit)
    assert first.returncode == 0, first.stdout
    assert "it is detached and runs until `mbaas stop from-a-job`" in first.stdout

    reading.mkdir()
    (reading / "read.py").write_text(READ)
    second = from_outside(head, "ray", "job", "submit", "--working-dir", reading, "--", "python", "read.py")
    assert second.returncode == 0, second.stdout
    assert f"{SAMPLES} samples, brightness 100, exact: True" in second.stdout
    mbaas = [sys.executable, "-m", "mbaas"]
    (feed,) = json.loads(head.run(*mbaas, "status", "--json").stdout.splitlines()[-1])
    assert (feed["name"], feed["delivered_samples"], feed["inexact_epochs"]) == ("from-a-job", SAMPLES, 0)
    assert head.run(*mbaas, "stop", "from-a-job").returncode == 0
