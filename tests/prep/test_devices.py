"""Workers of a machine that reserve no GPU take different ones."""

from __future__ import annotations

import os
import subprocess
import sys
import uuid

import pytest

from mbaas.prep import devices

CHOOSE = """
import sys
from mbaas.prep.devices import choose_gpu
print(choose_gpu(2, mark=sys.argv[1]), flush=True)
input()
"""


@pytest.fixture
def mark(monkeypatch):
    """Marks that no other test sees."""
    monkeypatch.setattr(devices, "_marks", held := [])
    yield f"test-{uuid.uuid4().hex}"
    for holder in held:
        holder.close()


def test_each_worker_has_a_gpu_of_its_own_until_there_are_more_workers(mark):
    assert [devices.choose_gpu(2, mark=mark) for _ in range(4)] == [0, 1, os.getpid() % 2, os.getpid() % 2]


def test_the_gpu_of_a_worker_that_died_is_chosen_again(mark):
    """Another process has GPU 0; when it is killed, nothing of it is in the way."""
    other = subprocess.Popen([sys.executable, "-c", CHOOSE, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with other:
        assert other.stdout is not None
        assert other.stdout.readline() == b"0\n"
        assert devices.choose_gpu(2, mark=mark) == 1
        other.kill()
        other.wait()
        assert devices.choose_gpu(2, mark=mark) == 0
