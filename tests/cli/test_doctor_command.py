"""`mbaas doctor` on this machine: without a cluster, on one, and with data."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import ray
from commandline import call, mbaas

from mbaas.cli import console
from mbaas.tools.doctor import checks, collect
from mbaas.tools.doctor.facts import StorageFacts
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


@pytest.mark.slow
def test_a_cluster_that_does_not_answer_is_a_problem(tmp_path: Path) -> None:
    said = mbaas("doctor", "--address", "127.0.0.1:9", columns=300, RAY_TMPDIR=str(tmp_path / "ray"))
    assert said.returncode == 1
    assert "no Ray cluster answers at 127.0.0.1:9" in said.stdout
    assert "shared memory" in said.stdout  # this machine is looked at all the same


@pytest.mark.slow
def test_a_separate_cluster_per_program_is_no_problem() -> None:
    assert verdicts(mbaas("doctor", "--json", RAY_ADDRESS="local").stdout)["cluster"] == "ok"


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


def test_a_server_that_does_not_answer_is_named_although_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of three mounted servers is dead: two reads from it do not end."""
    monkeypatch.setattr(collect, "READ_S", 0.05)
    ended = threading.Event()
    dead = [(f"/mnt/dead/{number}.png", lambda: ended.wait(30)) for number in range(2)]
    alive = [(f"/mnt/{name}/0.png", lambda: 1000) for name in ("one", "two")]
    try:
        facts = collect._timed(StorageFacts(where="/mnt"), [*dead, *alive])
        (late,) = checks.storage(facts)
        assert late.verdict is checks.Verdict.PROBLEM
        assert late.found.startswith("/mnt: 2 of 4 reads did not end within 1")
        assert late.found.endswith(" ms, such as /mnt/dead/1.png"), "one file of each folder"
        (late,) = checks.storage(collect._timed(StorageFacts(where="/mnt"), dead[:1]))
        assert "1 of 1 read did not end" in late.found
    finally:
        ended.set()


def test_reads_are_bounded(tmp_path: Path) -> None:
    for number in range(100):
        (tmp_path / f"{number}.bin").write_bytes(np.zeros(1000, np.uint8).tobytes())
    facts = collect.storage_of_path(str(tmp_path))
    assert (facts.files, facts.read_bytes, facts.error) == (64, 64_000, "")


def test_a_listing_that_does_not_end_and_a_large_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(50):
        (tmp_path / f"{number}.bin").write_bytes(b"1")
    monkeypatch.setattr(collect, "ENTRIES", 20)
    assert collect.storage_of_path(str(tmp_path)).files == 20
    monkeypatch.setattr(collect, "LIST_TIMEOUT_S", 0.1)
    monkeypatch.setattr(collect, "_files_of", lambda path: time.sleep(9))
    began = time.monotonic()
    assert collect.storage_of_path(str(tmp_path)).error == "it was not listed within 100 ms"
    assert time.monotonic() - began < 5


def test_a_driver_that_does_not_answer_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console, "join_cluster", no_cluster)
    monkeypatch.setattr(collect, "NODE_TIMEOUT_S", 0.5)
    monkeypatch.setattr(collect, "_cuda", lambda: time.sleep(9))
    began = time.monotonic()
    said = call("doctor")
    assert time.monotonic() - began < 5
    assert said.exit_code == 1
    assert "it did not answer within" in " ".join(said.stdout.split())


def test_a_server_that_cannot_be_recalled_is_a_note_of_its_feed(monkeypatch: pytest.MonkeyPatch) -> None:
    from mbaas.coordinator import registry

    def broken(name: str) -> None:
        raise ValueError(f"no server of {name}")

    monkeypatch.setattr(registry, "server_of", broken)
    monkeypatch.setattr("mbaas.feeds", lambda: [SimpleNamespace(name="a")])
    (feed,) = collect._feeds()
    assert (feed.name, "no server of a" in feed.error) == ("a", True)


def test_a_feed_file_with_a_mistake_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "feed.yaml").write_text("name: a\n")
    said = call("doctor", tmp_path / "feed.yaml")
    assert (said.exit_code, "feed.yaml" in said.stderr) == (2, True)
