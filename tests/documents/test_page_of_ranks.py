"""The search of data-parallel trials runs as a reader runs it, after the program that serves a feed."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import page_data
import pytest

from support.pages import ROOT, block_with

LIMIT_S = 300

ON_8_CPUS = """
import ray
ray.init(num_cpus=8, include_dashboard=False, object_store_memory=512 << 20, log_to_driver=False)
"""
"""Four of the eight CPUs are the feed's. A trial of two ranks takes three: one for itself, one per rank."""

WHAT_IT_DID = """
rows = feed.ledger().to_pylist()
print("ranks", len({row["consumer"] for row in rows}), "epochs", len(rows), "exact", all(row["exact"] for row in rows))
"""


@pytest.mark.long
@pytest.mark.timeout(LIMIT_S)
def test_two_trials_of_two_ranks_each_see_every_sample_once(tmp_path: Path) -> None:
    page_data.write_classes(tmp_path / "train")
    guides = ROOT / "docs" / "how-to"
    served = block_with(guides / "serve.md", "feed = mbaas.serve(").text
    parts = [served, block_with(guides / "ranks.md", "TorchTrainer(").text, WHAT_IT_DID]
    (tmp_path / "pasted.py").write_text("\n".join([ON_8_CPUS, *parts]))
    with tempfile.TemporaryDirectory(prefix="dp", dir="/tmp", ignore_cleanup_errors=True) as folder:
        ended = subprocess.run(
            [sys.executable, "pasted.py"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": folder, "HOME": folder},
            capture_output=True,
            text=True,
            timeout=LIMIT_S - 20,
        )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.strip().splitlines()[-1] == "ranks 4 epochs 12 exact True", ended.stdout
