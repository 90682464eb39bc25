"""The real commands work on a real cluster: serve, status while a trial runs, stop."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import ray
from commandline import (
    ENDS_WITHIN_S,
    PATIENCE_S,
    Running,
    call,
    mbaas,
    processes_with,
    running,
    shared_files,
    shared_files_left,
)
from pyarrow import parquet

from mbaas.cli.console import end_as_ctrl_c
from mbaas.cli.serve import serve
from mbaas.cli.status import to_json
from mbaas.errors import DatasetError, FeedRestartingError, ResourceError
from mbaas.ray_cluster import connection
from support.feeds import in_coordinator
from support.pages import ROOT, block_with
from support.waiting import wait_until

SAMPLES = 203
CONFIG = """
name: train
data: images
batch_size: 16
pipeline: [DecodeImage, RandomHorizontalFlip]
prep_workers: 1
staging_bytes: 4 MB
cache_bytes: 1 MB
on_bad_sample: skip
"""

TRIAL = """
import sys, mbaas
with mbaas.join("train", consumer="ann", format="numpy") as loader:
    for epoch in range(2):
        for batch in loader:
            pass
    print("two epochs", flush=True)
    sys.stdin.read()
"""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # Ray starts slowly on a busy machine


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of small images, including a broken one, and a feed file for it."""
    import cv2
    import numpy as np

    folder = tmp_path_factory.mktemp("served")
    for number in range(SAMPLES):
        path = folder / "images" / f"class-{number % 2}" / f"{number:03d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        cv2.imwrite(str(path), np.random.default_rng(number).integers(0, 255, (8, 8, 3), np.uint8))
    (folder / "images" / "class-1" / "broken.png").write_text("not an image")
    (folder / "feed.yaml").write_text(CONFIG)
    return folder / "feed.yaml"


def serving(config: Path, cluster: str, *arguments: str) -> list[str]:
    return [sys.executable, "-m", "mbaas", "serve", str(config), "--address", cluster, *arguments]


def form(text: str) -> str:
    """A text without what differs between runs: numbers with their units, paths, ids of nodes, line breaks."""
    text = re.sub(r"(?<= of )/\S+(?=;)", "PATH", " ".join(text.split()))
    return re.sub(r"\b[0-9a-f]{8}\b|\b\d[\d.,:]*( ?([kMG]?B|ms|s|min)\b)?", "#", text)


@pytest.fixture(scope="module")
def served(config: Path, cluster: str) -> Iterator[Running]:
    """A feed "train" run by `mbaas serve`."""
    with running(serving(config, cluster)) as process:
        first = process.wait_for("serves")
        assert first.startswith("feed 'train' serves 204 samples in 2 classes of ")
        joined, ends = [line for line in process.lines if line.startswith("mbaas: ")]
        assert joined.startswith(f"mbaas: joined the Ray cluster at {cluster}, named by RAY_ADDRESS (1 node, ")
        assert ends.startswith(f"mbaas: that cluster ends with process {os.getpid()} (")
        yield process


@pytest.fixture(scope="module")
def trial(served: Running, cluster: str) -> Iterator[dict[str, object]]:
    """The feed's status as JSON after a trial "ann" has finished two epochs, while it is still there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster)
        with running([sys.executable, "-c", TRIAL]) as process:
            process.wait_for("two epochs")
            watch = [sys.executable, "-m", "mbaas", "status", "train", "--watch", "--every", "0.2", "--json"]
            with running(watch, stderr=subprocess.DEVNULL) as looking:
                status = json.loads(looking.wait_for('"exact": true'))
                looking.process.send_signal(signal.SIGINT)
                assert looking.end() == 0
            yield status
            assert process.end() == 0


def test_status_as_json(trial: dict[str, object]) -> None:
    assert (trial["name"], trial["state"], trial["samples"]) == ("train", "serving", 204)
    (member,) = trial["consumers"]
    assert (member["name"], member["exact"]) == ("ann", True)
    assert 0 <= member["stall_share"] <= 1
    assert trial["skipped"][0]["uri"].endswith("broken.png")
    assert trial["delivered_samples"] >= SAMPLES


def test_a_feed_that_starts_has_the_same_keys(trial: dict[str, object]) -> None:
    starting = to_json("train", FeedRestartingError("it starts"))
    assert starting.keys() == trial.keys()
    assert (starting["name"], starting["state"], starting["samples"], starting["consumers"]) == (
        "train", "starting", None, []
    )  # fmt: skip
    assert starting["waits_for"] == ["it starts"]
    unknown = [key for key, value in trial.items() if isinstance(value, list) and key != "waits_for"]
    assert all(starting[key] == [] for key in unknown)


def test_a_data_folder_that_is_not_there_starts_no_ray(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "feed.yaml").write_text(CONFIG)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(connection, "ensure_ray", lambda **_: pytest.fail("Ray was asked for"))
    with pytest.raises(DatasetError, match=r"images does not exist"):
        serve(tmp_path / "feed.yaml", name=None, address=None, detach=False)


def test_a_ray_that_does_not_come_up_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The message of Ray 2.60 after 30 s on an overloaded machine."""

    def slow(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup. This could happen because ...\nand much more")

    monkeypatch.setattr(ray, "init", slow)
    with pytest.raises(
        ResourceError, match=r"^Ray did not start on this machine: The current .*; if the machine is busy"
    ):
        connection.start_ray()


@pytest.mark.parametrize("start", [False, True])
def test_an_address_of_local_asks_for_a_ray_of_its_own(monkeypatch: pytest.MonkeyPatch, start: bool) -> None:
    """As in `ray.init`. mbaas does not search for a cluster, so it reports none as "joined"."""
    started: list[str] = []
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    monkeypatch.setattr(connection, "start_own_ray", lambda: started.append("its own"))
    monkeypatch.setattr(ray, "init", lambda *_, **__: pytest.fail("it looked for a cluster"))
    if start:
        connection.ensure_ray(start=True)
    else:
        with pytest.raises(ResourceError, match=r'^RAY_ADDRESS is "local", which names no cluster'):
            connection.ensure_ray(start=False)
    assert started == ["its own"] * start


@pytest.mark.parametrize("columns", [80, 120])
def test_status_of_a_feed(trial: dict[str, object], cluster: str, columns: int) -> None:
    done = call("status", "train", "--address", cluster, columns=columns)
    assert done.exit_code == 0, done.stderr
    for text in (
        "train serving · 204 samples",
        "ann",
        "exact",
        "prep-0",
        "bad samples",
        "broken.png",
        "hits",
        "of 4 MB in",
    ):
        assert text in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= columns


def test_status_of_all_feeds(trial: dict[str, object], cluster: str) -> None:
    done = mbaas("status", RAY_ADDRESS=cluster)
    assert done.returncode == 0
    heading, _, row = done.stdout.splitlines()[:3]
    assert heading.split()[:3] == ["feed", "state", "trials"]
    assert row.split()[:3] == ["train", "serving", "1"]
    (feed,) = json.loads(call("status", "--json", "--address", cluster).stdout)
    assert feed["name"] == "train"


def test_top_where_nobody_watches_shows_all_feeds_once(trial: dict[str, object], cluster: str) -> None:
    done = call("top", "--address", cluster)
    assert done.exit_code == 0, done.stderr
    assert "train serving · 204 samples" in done.stdout
    assert re.search(r"^ann +\w+ +\d+ ", done.stdout, re.MULTILINE)
    assert done.stdout.count("serving") == 1


def test_top_on_a_terminal_looks_again_until_ctrl_c(trial: dict[str, object], cluster: str) -> None:
    near, far = pty.openpty()
    command = [sys.executable, "-m", "mbaas", "top", "train", "--address", cluster]
    size = {"COLUMNS": "120", "LINES": "40"}
    with subprocess.Popen(
        command, env={**os.environ, **size}, stdin=far, stdout=far, stderr=subprocess.DEVNULL
    ) as process:
        os.close(far)
        watchdog = threading.Timer(PATIENCE_S, process.kill)
        watchdog.start()
        seen = b""
        while b"last 2 s" not in seen:  # the third refresh
            seen += os.read(near, 1 << 16)
        process.send_signal(signal.SIGINT)
        with suppress(OSError):  # EIO: the other end of the terminal is closed
            while os.read(near, 1 << 16):
                pass
        assert process.wait() == 0
        watchdog.cancel()
        watchdog.join()
    os.close(near)
    assert b"ann" in seen
    assert b"Traceback" not in seen


def test_the_ledger_of_a_feed(trial: dict[str, object], cluster: str, tmp_path: Path) -> None:
    shown = call("ledger", "train", "--address", cluster, columns=100)
    assert re.search(rf"ann +2 +{2 * SAMPLES} .*all match", shown.stdout), shown.output
    assert " 0 s " not in shown.stdout  # an epoch takes milliseconds
    path = tmp_path / "ledgers.parquet"
    written = call("ledger", "train", "ann", "--address", cluster, "--parquet", path)
    assert (written.exit_code, written.stdout) == (0, ""), written.output
    assert f"2 ledgers in {path}" in written.stderr
    rows = parquet.read_table(path).to_pylist()
    assert [(row["consumer"], row["epoch"], row["samples"], row["exact"]) for row in rows] == [
        ("ann", 0, SAMPLES, True),
        ("ann", 1, SAMPLES, True),
    ]
    assert all(row["shuffled"] == str(row["feed_epoch"]) and row["begin"] == 0 for row in rows)
    assert rows[0]["id_hash"] == rows[0]["expected_id_hash"] == rows[1]["id_hash"]


def test_the_ledger_of_a_trial_that_is_not_there_names_those_that_are(trial: dict[str, object], cluster: str) -> None:
    done = call("ledger", "train", "bob", "--address", cluster)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == "error: no ledger of 'bob'; consumers that have finished an epoch: ann\n"


def test_the_story_of_a_consumer_a_worker_and_a_block(trial: dict[str, object], cluster: str) -> None:
    asked = ("ann",), ("prep-0",), ("block 0",), ("block 0", "--json")
    told = [call("status", "train", "--address", cluster, "--story", *words) for words in asked]
    assert [done.exit_code for done in told] == [0, 0, 0, 0], [done.stderr for done in told]
    ann, worker, block, _ = (done.stdout.splitlines() for done in told)
    assert any("WAITING -> BUSY: it is given blocks" in line and "<- TaskEnded" in line for line in ann)
    assert worker[0] == "as the supervisor saw it:"
    assert any("BRIEFING -> WORKING" in line for line in worker)
    assert any("UP on node" in line for line in worker)
    assert "GRANTED: " in block[0]
    assert "READY -> DROPPED" in block[-1]
    assert json.loads(told[3].stdout) == block


def test_the_story_of_an_unknown_thing_names_those_near_it(trial: dict[str, object], cluster: str) -> None:
    done = call("status", "train", "--story", "ana", "--address", cluster)
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: nothing is known of 'ana'; near it: ann")
    assert "prep-0" in done.stderr


def test_a_story_needs_a_feed() -> None:
    done = call("status", "--story", "ann")
    assert done.exit_code == 2
    assert "mbaas status NAME --story THING" in " ".join(done.stderr.split())


def test_name_is_taken(served: Running, config: Path, cluster: str) -> None:
    done = mbaas("serve", config, "--address", cluster)
    assert done.returncode == 1
    assert "a feed 'train' is already running" in done.stderr


@pytest.mark.parametrize("command", ["status", "stop"])
def test_unknown_feed(served: Running, cluster: str, command: str) -> None:
    done = call(command, "trian", "--address", cluster)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr == "error: no feed 'trian' runs on this cluster; running: 'train'\n"


def test_stop_from_elsewhere(served: Running, cluster: str) -> None:
    """The last test that uses the feed; the name is free immediately."""
    done = mbaas("stop", "train", "--address", cluster)
    assert (done.returncode, done.stdout) == (0, "feed 'train' is stopped\n"), done.stderr
    assert call("status", "--address", cluster).stdout.strip() == "no feed runs on this cluster"
    assert served.end() == 0
    assert served.lines[-1] == "feed 'train' ended: stopped from elsewhere\n"
    on_page = form(block_with(ROOT / "docs" / "how-to" / "serve.md", "$ mbaas serve feed.yaml").text)
    for text in ("serves", "samples are cached", "train: 0 trials"):
        line = next(line for line in served.lines if text in line)
        assert form(line.replace("train", "photos")) in on_page


@pytest.mark.meets_bugs
def test_an_internal_error_does_not_end_the_feed_and_ctrl_c_does(config: Path, cluster: str) -> None:
    def fail_three_times(coordinator: Any) -> None:
        asked, whole = [], coordinator._until_running

        async def until_running(*within_s: float) -> Any:
            asked.append(0)
            if len(asked) <= 3:
                raise KeyError("a bug")
            return await whole(*within_s)

        coordinator._until_running = until_running

    with running(serving(config, cluster, "--name", "short")) as process:
        process.wait_for("0 trials")
        in_coordinator("short", fail_three_times)
        told = process.wait_for("has not answered")
        assert re.fullmatch(
            r"short: ..:..:.. the coordinator has not answered for 0 s, retrying: KeyError: 'a bug'\n",
            told,
        )
        process.wait_for("the coordinator answers again after ")
        process.process.send_signal(signal.SIGINT)
        assert process.end(ENDS_WITHIN_S) == 0
        assert process.lines[-1] == "feed 'short' ended: interrupted\n"
    assert call("status", "short", "--address", cluster).exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_supervisors_and_closed_terminals_end_it_like_ctrl_c(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with pytest.raises(KeyboardInterrupt), end_as_ctrl_c():
        signal.raise_signal(number)
    assert signal.getsignal(number) is before


def test_a_cluster_of_its_own_beside_one_that_runs_ends_with_all_that_it_started(
    config: Path, cluster: str, tmp_path: Path
) -> None:
    """RAY_ADDRESS names the other cluster, where no feed starts."""
    shared = shared_files()
    with tempfile.TemporaryDirectory(prefix="own", dir="/tmp") as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster)
        patch.setenv("RAY_TMPDIR", folder)
        command = [sys.executable, "-m", "mbaas", "serve", str(config), "--local", "--name", "own"]
        with (tmp_path / "stderr").open("w") as stderr, running(command, stderr=stderr) as process:
            process.wait_for("feed 'own' serves")
            said = (tmp_path / "stderr").read_text()
            assert said.startswith("mbaas: started a Ray cluster of its own on this")
            patch.delenv("RAY_TMPDIR")
            assert call("status", "own", "--address", cluster).exit_code == 1
            deadline = time.monotonic() + ENDS_WITHIN_S
            process.process.send_signal(signal.SIGINT)
            assert process.end(ENDS_WITHIN_S) == 0
        assert process.lines[-1] == "feed 'own' ended: interrupted\n"
        assert (tmp_path / "stderr").read_text() == said, "no warning of Ray's, which would look like a failure"
        assert said.count("\n") == 1, said
        left_s = deadline - time.monotonic()
        wait_until(lambda: not processes_with(folder), "nothing that it started runs", deadline_s=left_s)
    assert not shared_files_left(shared)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (
            ["--detach"],
            "--local starts a cluster that ends with this command, and a detached feed needs one that is",
        ),
        (["--address", "10.0.0.1:1"], "and --address 10.0.0.1:1 needs one that is"),
    ],
)
def test_a_cluster_of_its_own_is_no_other_one(config: Path, arguments: list[str], sentence: str) -> None:
    done = call("serve", config, "--local", *arguments)
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.split())


def test_data_that_is_not_there(config: Path, cluster: str, tmp_path: Path) -> None:
    (tmp_path / "feed.yaml").write_text(CONFIG)
    done = call("serve", tmp_path / "feed.yaml", "--address", cluster)
    assert (done.exit_code, done.stdout) == (1, "")
    assert done.stderr.startswith(f"error: {tmp_path}/images does not exist; expected a folder")


def test_no_cluster_at_the_address(config: Path) -> None:
    """Within seconds: Ray would try for twenty."""
    for command in (["status"], ["stop", "train"], ["serve", config]):
        done = call(*command, "--address", "127.0.0.1:1")
        assert (done.exit_code, done.stdout) == (1, "")
        assert done.stderr.startswith("error: no Ray cluster answers at 127.0.0.1:1; check --address")
