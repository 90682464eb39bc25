"""`mbaas doctor` on this machine: without a cluster, on one, and with data."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import ray
from commandline import call, mbaas

from mbaas.cli import console
from mbaas.tools.doctor import collect
from support import readers


def verdicts(text: str) -> dict[str, str]:
    return {each["check"]: each["verdict"] for each in json.loads(text)["findings"]}


def no_cluster(_: object) -> None:
    raise console.NoClusterError("no Ray cluster is running on this machine")


def test_without_a_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each line of a machine; a real look for a cluster could find one of another program."""
    monkeypatch.setattr(console, "join_cluster", no_cluster)
    readers.images(bad=None).in_folders(tmp_path / "data")
    said = call("doctor", tmp_path / "data", "--json")
    found = verdicts(said.stdout)
    assert {"cluster", "versions", "shared memory", "CPUs", "open files", "GPU and DALI", "storage"} <= found.keys()
    assert (found["cluster"], found["storage"], found["versions"]) == ("ok", "ok", "ok")
    assert "feeds" not in found
    assert said.exit_code == ("problem" in found.values())


def test_a_cluster_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    said = mbaas("doctor", "--address", "127.0.0.1:9", columns=300, RAY_TMPDIR=str(tmp_path / "ray"))
    assert said.returncode == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in said.stdout
    assert "shared memory" in said.stdout  # this machine is looked at all the same


def test_each_node_of_a_cluster_is_looked_at_by_a_task(cluster: str) -> None:
    said = call("doctor", "--json", "--address", cluster)
    found = json.loads(said.stdout)["findings"]
    nodes = {each["node"] for each in found if each["check"] == "object store"}
    assert len(nodes) == len(ray.nodes())
    assert f"joined the one at {cluster}" in found[0]["found"]
    (store,) = [each["found"] for each in found if each["check"] == "object store"]
    assert store.split(" ")[0] == f"{ray.nodes()[0]['Resources']['object_store_memory'] / 1e6:.0f}"
    assert verdicts(said.stdout)["feeds"] == "ok"


def test_data_that_cannot_be_read_are_a_problem(tmp_path: Path) -> None:
    assert "does not exist" in collect.storage_of_path(str(tmp_path / "none")).error
    (tmp_path / "empty").mkdir()
    assert collect.storage_of_path(str(tmp_path / "empty")).files == 0
    assert "cannot open" in collect.storage_of_path("nosuch://bucket").error


def test_reads_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(100):
        (tmp_path / f"{number}.bin").write_bytes(np.zeros(1000, np.uint8).tobytes())
    facts = collect.storage_of_path(str(tmp_path))
    assert (facts.files, facts.read_bytes, facts.error) == (64, 64_000, "")
    monkeypatch.setattr(collect, "READ_S", 0.05)
    (tmp_path / "pipe").mkdir()
    slow = collect._timed(facts, [lambda: __import__("time").sleep(9) or 1])
    assert slow.error == "no read ended within 0 s"


def test_a_feed_file_with_a_mistake_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "feed.yaml").write_text("name: a\n")
    said = call("doctor", tmp_path / "feed.yaml")
    assert (said.exit_code, "feed.yaml" in said.stderr) == (2, True)
