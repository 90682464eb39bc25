"""The Ray cluster that commands join, and files to serve."""

from __future__ import annotations

from pathlib import Path

import pytest
import ray


@pytest.fixture(scope="module")
def cluster(ray_session: None) -> str:
    """Address of the session's cluster, which has no other feeds; for the commands it is a foreign cluster."""
    return str(ray.get_runtime_context().gcs_address)


@pytest.fixture
def write(tmp_path: Path):
    """A function that writes a YAML file and returns its path."""

    def written(text: str) -> Path:
        path = tmp_path / "feed.yaml"
        path.write_text(text)
        return path

    return written
