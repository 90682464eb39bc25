"""The trainer examples run as users run them, and each one resumes after a stop in the middle of an epoch.

One example runs in every test run, the others with ``-m long``. `tests/trainers` tests resuming in detail.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator

import pytest

from support.programs import FORKING, ROOT, run_program

EXAMPLES = ROOT / "examples"
LIMIT_S, LONG_LIMIT_S = 110, 240
EXACT = [str(epoch) for epoch in range(5)]


SMALL = """
import sys, ray
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=256 << 20, _temp_dir=sys.argv[1],
         logging_level="ERROR", log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a cluster of two CPUs that all examples share: starting Ray for each would take 6 s of CPU."""
    with tempfile.TemporaryDirectory(prefix="ex", dir="/tmp", ignore_cleanup_errors=True) as folder:
        command = [sys.executable, "-c", SMALL, folder]
        with subprocess.Popen(
            command, env=os.environ | FORKING, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as head:
            assert head.stdin is not None
            assert head.stdout is not None
            yield head.stdout.readline().strip()
            head.stdin.close()
            assert head.wait(30) == 0


def run(name: str, cluster: str = "local", limit_s: float = LIMIT_S) -> str:
    """Run an example on a cluster, or with its own Ray, and return its output."""
    return run_program(EXAMPLES / name, limit_s=limit_s, ray_address=cluster).stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", ["train_torch.py", pytest.param("train_accelerate.py", marks=pytest.mark.long)])
def test_own_loops_go_on_after_a_stop(cluster: str, name: str) -> None:
    out = run(name, cluster)
    assert re.findall(r"^epoch (\d): .*, exact: True$", out, re.MULTILINE) == EXACT
    assert out.index("epoch 1") < out.index("stopped, and on") < out.index("epoch 2")


@pytest.mark.long
def test_lightning_resumes(cluster: str) -> None:
    ends = re.findall(r"epoch (\d): ([\d.]+)% right, loader.ledger.exact=True", run("train_lightning.py", cluster))
    assert [epoch for epoch, _ in ends] == ["3", "5"]
    assert float(ends[-1][1]) > 90


@pytest.mark.long
@pytest.mark.timeout(LONG_LIMIT_S + 10)
def test_lightning_in_ray_train_resumes() -> None:
    """Slow, because each of its two runs starts two processes that import all of Lightning."""
    out = run("train_ray_lightning.py", limit_s=LONG_LIMIT_S)
    ends = re.findall(r"after (\d) epochs: ([\d.]+)% right, epochs that were not exact: 0$", out, re.MULTILINE)
    assert [epochs for epochs, _ in ends] == ["3", "5"]
    assert float(ends[-1][1]) > 90


@pytest.mark.long
def test_the_trainer_of_hugging_face_resumes(cluster: str) -> None:
    """An epoch is 45 steps. The first run stops after 100; the third epoch ends 35 steps later, at 3 x 45 = 135."""
    out = run("train_transformers.py", cluster)
    found = re.findall(r"'eval_loss': '([\d.]+)'.*?'epoch': '(\d)'", out)
    assert [epoch for _, epoch in found] == ["1", "2", "3", "4", "5"]
    assert float(found[-1][0]) < float(found[0][0]) / 2, "the model learns"
    assert len(re.findall(r"'train_runtime'", out)) == 2


def test_each_is_short() -> None:
    lines = {path.name: len(path.read_text().splitlines()) for path in EXAMPLES.glob("train_*.py")}
    assert len(lines) == 5
    assert max(lines.values()) <= 48
