"""A Ray cluster that nobody else uses, and files to serve."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from commandline import running

HEAD = """
import sys, ray
ray.init(num_cpus=4, include_dashboard=False, object_store_memory=256 << 20, _temp_dir=sys.argv[1],
         logging_level="ERROR", log_to_driver=False)
print(ray.get_runtime_context().gcs_address, flush=True)
sys.stdin.read()
ray.shutdown()
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Address of a small cluster that no other test uses."""
    with tempfile.TemporaryDirectory(prefix="cli", dir="/tmp", ignore_cleanup_errors=True) as folder:
        with running([sys.executable, "-c", HEAD, folder], stderr=subprocess.DEVNULL) as head:
            yield head.wait_for(":").strip()
            head.end()


@pytest.fixture
def write(tmp_path: Path):
    """Write a YAML file and return its path."""

    def written(text: str) -> Path:
        path = tmp_path / "feed.yaml"
        path.write_text(text)
        return path

    return written
