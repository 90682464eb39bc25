"""A program that started Ray leaves nothing behind, however it is ended: `mbaas serve`, `mbaas analyze` or a script.

A feed on a foreign cluster ends when its `mbaas serve` is killed.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import cv2
import numpy as np
import pytest
from commandline import ENDS_WITHIN_S, Running, processes_with, running, shared_files, shared_files_left

from support.waiting import wait_until

CONFIG = "{name: train, data: images, batch_size: 16, pipeline: [DecodeImage], prep_workers: 1}"

PROGRAM = """
import sys, time
import mbaas
from mbaas.ray_cluster import actor_names, connection
from mbaas import transforms as T
connection.start_own_ray()  # as `serve` does where none runs
data = mbaas.read_images(sys.argv[1] + "/images")
with mbaas.serve("train", data, T.Pipeline([T.DecodeImage()]), batch_size=16, prep_workers=1):
    with mbaas.join("train", format="numpy") as loader:
        while True:
            for batch in loader:
                time.sleep(0.01)
            print("an epoch", flush=True)
"""
"""The README's example, reading epochs without end."""

LOOK = """
import time
from mbaas.ray_cluster import actor_names, connection
connection.ensure_ray(start=False)
for how, is_there in (("there", True), ("gone", False)):
    while bool(actor_names.feed_names() or any(map(actor_names.family, actor_names.CHILDREN))) is not is_there:
        time.sleep(0.05)
    print("it is", how, flush=True)
"""
"""Prints when a feed or any of its actors is on the cluster, and when all are gone."""

RAYS_AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]  # 300 s, because Ray starts slowly on a busy machine

Command = subprocess.Popen[str]

WAYS = {
    "SIGTERM": (signal.SIGTERM, os.kill),
    "Ctrl-C to the group": (signal.SIGINT, os.killpg),
    "SIGTERM to the group": (signal.SIGTERM, os.killpg),
}
KILLED, SCRIPT = "SIGKILL", "a program"


@contextmanager
def folder_of_images() -> Iterator[Path]:
    """Images, a feed file, and Ray's files, whose path identifies the processes of this Ray."""
    with tempfile.TemporaryDirectory(prefix="end", dir="/tmp", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        for number in range(20):
            path = folder / "images" / "class" / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            cv2.imwrite(str(path), np.full((8, 8, 3), number, np.uint8))
        (folder / "feed.yaml").write_text(CONFIG)
        yield folder


@contextmanager
def started(folder: Path, *command: str) -> Iterator[Command]:
    """A command (default: `mbaas serve`) with its own Ray and session; leftover processes are killed."""
    command = command or ("-m", "mbaas", "serve", str(folder / "feed.yaml"), "--local")
    with subprocess.Popen(
        [sys.executable, *command],
        env={**os.environ, "RAY_TMPDIR": str(folder), "XDG_CACHE_HOME": str(folder)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def serving() -> Iterator[dict[str, tuple[Path, Command]]]:
    """One serving command for each way to end it, and a program, started together to keep all cores busy.

    After all have ended, shared memory contains none of their files.
    """
    shared = shared_files()
    with ExitStack() as stack:
        found = {}
        for way in (*WAYS, KILLED, SCRIPT):
            folder = stack.enter_context(folder_of_images())
            command = ("-c", PROGRAM, str(folder)) if way == SCRIPT else ()
            found[way] = folder, stack.enter_context(started(folder, *command))
        for way, (_, process) in found.items():
            Running(process, []).wait_for("an epoch" if way == SCRIPT else "0 trials")
        yield found
    assert not shared_files_left(shared)


def await_the_end_of_all(folder: Path, began: float) -> None:
    """Wait until all processes of the Ray in ``folder``, signaled at ``began``, have ended."""
    deadline_s = began + ENDS_WITHIN_S - time.monotonic()
    wait_until(lambda: not processes_with(str(folder)), "nothing that it started runs", deadline_s=deadline_s)


def end_with_sigterm(folder: Path, process: Command, code: int) -> None:
    """End a program that started Ray, and check its exit code and that everything ends in time.

    The GCS is in the group, and stopping a feed after its end would wait a minute for it.
    """
    wait_until(lambda: any("ray::CacheNode" in line for line in processes_with(str(folder))), "a feed serves")
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGTERM)
    output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert process.returncode == code, output
    await_the_end_of_all(folder, began)


def test_commands_start_a_ray_each(cluster: str, serving: dict[str, tuple[Path, Command]]) -> None:
    """Also next to a Ray that runs. The other tests measure seconds alone, and need all of these started."""
    for folder, process in serving.values():
        assert process.poll() is None
        (gcs,) = (line for line in processes_with(str(folder)) if "gcs_server" in line)
        assert cluster.rpartition(":")[2] not in gcs


@pytest.mark.alone
def test_sigterm_to_the_group_ends_a_program_that_started_a_ray(serving: dict[str, tuple[Path, Command]]) -> None:
    folder, process = serving[SCRIPT]
    end_with_sigterm(folder, process, signal.SIGTERM)


@pytest.mark.alone
@pytest.mark.parametrize("way", WAYS)
def test_it_ends_with_all_that_it_started(serving: dict[str, tuple[Path, Command]], way: str) -> None:
    """Sent to the group, as terminals, `timeout` and systemd do, the signal also reaches Ray's processes.

    `test_feed_commands` sends Ctrl-C to the command alone. The command's own lines are the only output: Ray would
    answer SIGTERM with a stack trace.
    """
    folder, process = serving[way]
    number, whom = WAYS[way]
    began = time.monotonic()
    whom(process.pid, number)
    output, _ = process.communicate(timeout=ENDS_WITHIN_S)
    assert (process.returncode, output.splitlines()[-1]) == (0, "feed 'train' ended: interrupted"), output
    foreign = [line for line in output.splitlines() if not line.startswith(("train: ", "feed 'train' "))]
    assert foreign == []
    await_the_end_of_all(folder, began)


@pytest.mark.alone
def test_what_it_started_ends_when_it_is_killed(serving: dict[str, tuple[Path, Command]]) -> None:
    """Except two small Ray processes, which report their node's end to the GCS and wait a minute for it."""
    folder, process = serving[KILLED]

    def left() -> list[str]:
        return [line for line in processes_with(str(folder)) if not line.startswith(RAYS_AGENTS)]

    process.kill()
    process.wait()
    wait_until(lambda: not left(), "nothing that it started runs", deadline_s=ENDS_WITHIN_S)


@pytest.mark.alone
@pytest.mark.long
def test_sigterm_to_the_group_ends_an_analysis() -> None:
    """Measurements made before the signal are saved."""
    shared = shared_files()
    with folder_of_images() as folder:
        command = "-m", "mbaas", "analyze", str(folder / "feed.yaml"), "--rate", "100"
        with started(folder, *command) as process:
            Running(process, []).wait_for("costs of a feed and of a trial")
            end_with_sigterm(folder, process, 130)
            (saved,) = (folder / "mbaas").glob("analyze-*.json")
            assert json.loads(saved.read_text())["stages"]["prep"]["workers"]["points"], "the next run continues"
    assert not shared_files_left(shared)


@pytest.mark.alone
def test_a_feed_on_another_ray_ends_with_the_command_that_is_killed(cluster: str) -> None:
    """No process is left to stop it: its actors detect that themselves."""
    with folder_of_images() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_ADDRESS", cluster)
        command = [sys.executable, "-m", "mbaas", "serve", str(folder / "feed.yaml"), "--address", cluster]
        with running([sys.executable, "-c", LOOK]) as looking, running(command) as serving:
            serving.wait_for("0 trials")
            looking.wait_for("it is there")
            serving.process.kill()
            assert looking.end(ENDS_WITHIN_S) == 0, "nothing of the feed is left"
            assert looking.lines[-1] == "it is gone\n"
