"""The example of short runs on a detached feed: its program has ended, and the runs train."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from ray_heads import ray_head

from support.pages import ROOT

EXAMPLE = ROOT / "examples" / "short_runs.py"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_runs_join_a_feed_whose_program_has_ended(tmp_path: Path) -> None:
    with ray_head() as head:
        served = head.run(sys.executable, EXAMPLE, "--serve", tmp_path / "digits")
        assert served.returncode == 0, served.stdout
        for hidden in (32, 64):
            ran = head.run(sys.executable, EXAMPLE, "--rate", "0.01", "--hidden", hidden, "--epochs", "1")
            assert ran.returncode == 0, ran.stdout
            line = ran.stdout.splitlines()[-1]
            assert line.startswith(f"rate 0.01   hidden {hidden}")
            assert line.endswith("exact: True")
        for feed in ("train", "validation"):
            assert f"feed '{feed}' is stopped" in head.run(sys.executable, "-m", "mbaas", "stop", feed).stdout
