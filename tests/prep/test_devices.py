"""Workers on one machine that reserve no GPU use different GPUs."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest
import ray

from mbaas.prep import process
from mbaas.ray_cluster import resources

CHOOSE = """
import sys
from mbaas.prep.process import choose_gpu
print(choose_gpu(2, mark=sys.argv[1]), flush=True)
input()
"""


@pytest.fixture
def mark(monkeypatch):
    """Prefix of socket names that no other test uses."""
    monkeypatch.setattr(process, "_marks", held := [])
    yield f"test-{uuid.uuid4().hex}"
    for holder in held:
        holder.close()


def test_workers_take_turns_with_gpus(mark, monkeypatch):
    monkeypatch.setattr(process, "MOST_EACH", 2)
    assert [process.choose_gpu(3, mark=mark) for _ in range(6)] == [0, 1, 2, 0, 1, 2]
    assert process.choose_gpu(3, mark=mark) == os.getpid() % 3, "beyond MOST_EACH the process id decides"


def test_the_gpu_of_a_worker_that_died_is_chosen_again(mark):
    other = subprocess.Popen([sys.executable, "-c", CHOOSE, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"0\n"
        assert process.choose_gpu(2, mark=mark) == 1
        other.kill()
        other.wait()
        assert process.choose_gpu(2, mark=mark) == 0


@pytest.mark.parametrize(
    ("gpus", "marker", "markable"),
    [
        ({"a": (2, "H100"), "b": (2, "H100"), "c": (3, "T4")}, {"accelerator_type:H100": 0.001}, 4),
        ({"a": (2, "H100"), "b": (2, "H100"), "c": (8, "T4")}, {"accelerator_type:T4": 0.001}, 8),
        ({"a": (0, "TPU"), "c": (1, "T4")}, {"accelerator_type:T4": 0.001}, 1),
        ({"a": (0, None), "b": (4, None)}, {}, 4),
    ],
)
def test_workers_are_brought_to_gpus_by_what_ray_says_of_them_without_taking_any(monkeypatch, gpus, marker, markable):
    """`gpus` gives each node's number of GPUs and the accelerator type that Ray detected."""
    nodes = [
        {
            "NodeID": node,
            "Alive": True,
            "Resources": {
                "CPU": 8.0,
                **({"GPU": n} if n else {}),
                **({f"accelerator_type:{kind}": 1.0} if kind else {}),
            },
        }
        for node, (n, kind) in gpus.items()
    ]
    monkeypatch.setattr(ray, "nodes", lambda: nodes)
    monkeypatch.setattr(ray, "cluster_resources", lambda: {"GPU": float(sum(n for n, _ in gpus.values()))})
    assert resources.gpu_marker() == marker
    assert resources.markable_gpus() == markable, "one worker for each markable GPU"
    most = max(n for n, _ in gpus.values())
    assert resources.cpus_per_gpu() == 8 / most, "on the node with the fewest CPUs per GPU"
    assert {node: resources.gpus_of(node) for node in gpus} == {node: n for node, (n, _) in gpus.items()}
