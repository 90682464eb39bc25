"""With Ray's autoscaler (v2), rising load starts nodes and removes the stall, and its end removes nodes."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from support.heads import wait_for_head
from support.ports import free_ports
from support.waiting import wait_until

SAMPLE_S = 0.004
"""Time to prepare a sample: one worker prepares 250 per second, on any machine."""

LABELS = {"mbaas.io/role": "prep"}
SAMPLES = 1000


def dawdle(image, _generator):
    time.sleep(SAMPLE_S)
    return image


@pytest.fixture
def autoscaled(no_ray: None) -> Iterator[None]:
    """A cluster of a head without prep nodes, whose autoscaler may start three."""
    with tempfile.TemporaryDirectory(prefix="mb", dir="/tmp", ignore_cleanup_errors=True) as folder:
        (port,), log = free_ports(1), Path(folder) / "head.log"
        with log.open("w") as out:
            head = subprocess.Popen(
                command(folder, port), env=environment(), start_new_session=True, stdout=out, stderr=out
            )
        try:
            wait_for_head(head, log)
            ray.init(address=f"{address()}:{port}", namespace="mbaas", log_to_driver=False)
            yield
        finally:
            ray.shutdown()
            head.terminate()
            head.wait(30)
            end_leftovers(folder)


def address() -> str:
    return ray._private.services.get_node_ip_address()


def command(folder: str, port: int) -> list[str]:
    config = Path(folder) / "autoscaling.json"
    config.write_text(json.dumps(autoscaling(port)))
    ray_program = Path(sys.executable).parent / "ray"
    return [
        *(str(ray_program), "start", "--head", "--block", "--num-cpus=2", f"--port={port}"),
        *(f"--autoscaling-config={config}", f"--temp-dir={folder}", "--include-dashboard=false"),
        *("--disable-usage-stats", "--dashboard-agent-listen-port=0", f"--object-store-memory={200 << 20}"),
    ]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), os.environ["PYTHONPATH"]]),
        "RAY_FAKE_CLUSTER": "1",
        "AUTOSCALER_UPDATE_INTERVAL_S": "1",
        "RAY_enable_autoscaler_v2": "1",
        "RAY_CLOUD_INSTANCE_ID": FAKE_HEAD_NODE_ID,
        "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    }


def autoscaling(port: int) -> dict[str, object]:
    prep = {"CPU": 1, "object_store_memory": 200 << 20}
    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    return {
        "cluster_name": "test",
        "max_workers": 3,
        "upscaling_speed": 10.0,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": "local_provider.LocalProvider",
            "use_node_id_as_ip": True,
            "launch_multiple": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "gcs_address": f"{address()}:{port}",
            "head_node_id": FAKE_HEAD_NODE_ID,
        },
        "available_node_types": {
            "ray.head.default": {"resources": {"CPU": 2}, "node_config": {}, "max_workers": 0},
            "prep": {"resources": prep, "labels": LABELS, "node_config": {}, "min_workers": 0, "max_workers": 3},
        },
        "head_node_type": "ray.head.default",
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
    }


def end_leftovers(folder: str) -> None:
    """End the processes of nodes started by the provider."""
    for process in psutil.process_iter(["cmdline"]):
        if any(folder in part for part in process.info["cmdline"] or ()):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


class Trial:
    """A consumer thread that could take 600 samples/s, more than two workers prepare."""

    def __init__(self, feed: str) -> None:
        self._feed, self._stop = feed, threading.Event()
        self.exact: list[bool] = []
        self.waits: list[float] = []
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        with mbaas.join(self._feed, consumer="trial", format="numpy") as loader:
            while not self._stop.is_set():
                began = time.monotonic()
                for batch in loader:
                    self.waits.append(time.monotonic() - began)
                    time.sleep(len(batch["sample_id"]) / 600)
                    began = time.monotonic()
                    if self._stop.is_set():
                        return
                self.exact.append(loader.ledger.exact)

    def end(self) -> None:
        self._stop.set()
        self._thread.join(30)


def prep_nodes() -> int:
    return sum(node["Alive"] and node["Labels"].get("mbaas.io/role") == "prep" for node in ray.nodes())


def served(feed_name: str, most: int, **seconds: float) -> mbaas.Feed:
    """A feed with at most ``most`` workers. It begins with one, on a node started for that worker."""
    scaling = mbaas.Scaling(max_prep_workers=most, prep_labels=LABELS, **seconds)
    options = {"batch_size": 50, "staging_bytes": 300_000, "scaling": scaling}
    pipeline = T.Pipeline([T.DecodeImage(), T.Map(dawdle)])
    return mbaas.serve(feed_name, synthetic(SAMPLES), pipeline, prep_workers=1, **options)


def await_rest(feed: mbaas.Feed, *, changes: int) -> None:
    """Wait until one worker and one node are left, after ``changes`` changes of their number."""
    wait_until(lambda: len(feed.status().workers) == 1, "idle workers are retired", deadline_s=60.0)
    wait_until(lambda: prep_nodes() == 1, "their nodes are gone", deadline_s=60.0)
    told = [note for note in feed.status().notes if "prep workers instead of" in note]
    assert len(told) == changes, told


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_node_comes_for_a_trial_that_stalls_and_goes_after_it(autoscaled, feed_name):
    with served(feed_name, 2, grow_hold_s=1.0, idle_hold_s=2.0, cooldown_s=1.0) as feed:
        trial = Trial(feed_name)
        try:
            wait_until(lambda: len(feed.status().workers) == 2, "another worker is up", deadline_s=90.0)
            assert prep_nodes() == 2
            wait_until(lambda: trial.exact, "it trains", deadline_s=60.0)
            assert all(trial.exact)
        finally:
            trial.end()
        await_rest(feed, changes=2)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_nodes_come_when_trials_stall_on_prep_and_go_when_the_load_ends(autoscaled, feed_name):
    with served(feed_name, 3, grow_hold_s=3.0, idle_hold_s=8.0, cooldown_s=4.0) as feed:
        assert prep_nodes() == 1, "the reserved worker had its node started"
        trial = Trial(feed_name)
        try:
            wait_until(lambda: len(feed.status().workers) == 3, "two more workers are up", deadline_s=90.0)
            assert prep_nodes() == 3
            before = len(trial.waits)
            wait_until(lambda: len(trial.exact) >= 2 and len(trial.waits) > before + 80, "it trains", deadline_s=60.0)
            assert sum(trial.waits[-40:]) < 0.5 * sum(trial.waits[20:60]), "the stall fell"
            assert all(trial.exact)
        finally:
            trial.end()
        await_rest(feed, changes=2)
