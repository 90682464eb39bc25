"""The disk tier's folders belong to one dataset and one process, and only stale ones are removed."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from disk_samples import EVERYTHING, OTHER, PRINT, SAMPLES, disk_bytes, folder, get, open_tier, put

from mbaas.cache.disk.folder import INDEX, MARKER
from mbaas.errors import ConfigError, ResourceError


@pytest.mark.parametrize(
    "marker",
    [json.dumps({"format": "mbaas disk tier", "version": 99, "fingerprint": PRINT}), "", '{"format": "mbaas d'],
)
def test_a_folder_of_another_version_or_with_a_torn_marker_is_emptied(tmp_path: Path, marker: str) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(50))
    (folder(tmp_path) / MARKER).write_text(marker)
    for expected in ([], [7]):
        with open_tier(tmp_path) as tier:
            assert get(tier, range(50)) == expected
            put(tier, [7])


def test_a_folder_that_was_renamed_is_emptied(tmp_path: Path) -> None:
    with open_tier(tmp_path, fingerprint=OTHER) as tier:
        put(tier, range(50))
    folder(tmp_path, OTHER).rename(folder(tmp_path))
    with open_tier(tmp_path) as tier:
        assert tier.stats().samples == 0


def test_a_folder_of_somebody_else_is_refused_and_left_alone(tmp_path: Path) -> None:
    folder(tmp_path).mkdir()
    (folder(tmp_path) / "thesis.tex").write_text("ten years")
    with pytest.raises(ConfigError, match=r"holds files, for instance thesis.tex, but no mbaas-disk-tier.json"):
        open_tier(tmp_path)
    assert (folder(tmp_path) / "thesis.tex").read_text() == "ten years"


def fill_other(path: Path, fingerprint: str, opened_at: float, samples: int = 50) -> int:
    """Create another dataset's folder with a given time of last opening; return its bytes."""
    with open_tier(path, fingerprint=fingerprint) as tier:
        put(tier, range(samples))
        nbytes = tier.stats().used_bytes
    os.utime(folder(path, fingerprint) / MARKER, (opened_at, opened_at))
    return nbytes


def test_stale_folders_go_oldest_first_and_only_when_their_bytes_are_needed(tmp_path: Path) -> None:
    """The budget holds the three stale folders and 1,000 bytes."""
    sizes = {name: fill_other(tmp_path, name, at) for name, at in (("new", 3e8), ("old", 1e8), ("mid", 2e8))}
    with open_tier(tmp_path, budget=sum(sizes.values()) + 1_000) as tier:
        assert tier.stats().stale_bytes == sum(sizes.values())
        assert put(tier, [100]) == [100]
        assert {path.name for path in tmp_path.iterdir()} == {PRINT, "old", "mid", "new"}
        assert put(tier, range(101, 120)) == [*range(101, 120)]
        assert {path.name for path in tmp_path.iterdir()} == {PRINT, "mid", "new"}
        assert put(tier, range(SAMPLES))
        assert tier.stats().stale_bytes == 0
        assert {path.name for path in tmp_path.iterdir()} == {PRINT}
        assert disk_bytes(tmp_path) <= tier.stats().budget_bytes


def test_a_stale_folder_that_cannot_be_removed_keeps_its_bytes_and_fails_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example another user's folder; the next one is removed instead."""
    sizes = [fill_other(tmp_path, name, at) for name, at in (("theirs", 1e8), ("ours", 2e8))]
    unlink = Path.unlink

    def refuse(path: Path, missing_ok: bool = False) -> None:
        if "theirs" in path.parts:
            raise PermissionError(13, "Operation not permitted", str(path))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    with open_tier(tmp_path, budget=sum(sizes) + 1_000) as tier:
        kept = put(tier, range(SAMPLES))
        assert 0 < len(kept) < SAMPLES
        stats = tier.stats()
        assert (stats.stale_bytes, stats.write_failure) == (0, "")
        assert {path.name for path in tmp_path.iterdir()} == {PRINT, "theirs"}
        assert re.search(r"removing .*theirs, which nobody uses, failed: .*not permitted", stats.removal_failure)
        assert sizes[0] + stats.used_bytes <= stats.budget_bytes
        assert get(tier, range(SAMPLES)) == kept


def test_a_smaller_budget_removes_stale_folders_at_once(tmp_path: Path) -> None:
    nbytes = fill_other(tmp_path, OTHER, 1e8)
    with open_tier(tmp_path, budget=nbytes - 1):
        assert not folder(tmp_path, OTHER).exists()


def test_only_our_files_in_folders_with_our_marker_are_removed(tmp_path: Path) -> None:
    fill_other(tmp_path, "marked", 1e8)
    (tmp_path / "marked" / "notes.txt").write_text("mine")
    (tmp_path / "unmarked").mkdir()
    (tmp_path / "unmarked" / "segment-000001.bin").write_text("mine")
    fill_other(tmp_path / "elsewhere", "linked", 1e8)
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere" / "linked")
    open_tier(tmp_path, budget=10).close()
    assert [path.name for path in (tmp_path / "marked").iterdir()] == ["notes.txt"]
    assert (tmp_path / "unmarked" / "segment-000001.bin").exists()
    assert (tmp_path / "elsewhere" / "linked" / MARKER).exists()


@pytest.mark.parametrize("name", ["segment-000001.bin", "segment-000077.bin", INDEX, f"{INDEX}.new", MARKER])
@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_nothing_is_written_through_a_link_and_no_pipe_is_waited_for(tmp_path: Path, name: str, kind: str) -> None:
    with open_tier(tmp_path) as tier:
        put(tier, range(40))
    somebodys = tmp_path / "somebody's file"
    somebodys.write_bytes(b"not ours" * 1000)
    ours = folder(tmp_path) / name
    ours.unlink(missing_ok=True)
    ours.symlink_to(somebodys) if kind == "link" else os.mkfifo(ours)
    if name == MARKER:
        with pytest.raises(ConfigError, match=f"but no {MARKER}: not ours to use"):
            open_tier(tmp_path)
    else:
        with open_tier(tmp_path) as tier:
            put(tier, range(60))
            assert get(tier, range(60)) == [*range(60)]
    assert somebodys.read_bytes() == b"not ours" * 1000


def test_a_folder_in_use_is_not_stale(tmp_path: Path) -> None:
    with open_tier(tmp_path, fingerprint=OTHER) as other:
        put(other, range(50))
        with open_tier(tmp_path) as tier:
            assert tier.stats().stale_bytes == 0
            assert put(tier, range(SAMPLES)) == [*range(SAMPLES)]
        assert get(other, range(50)) == [*range(50)]


def test_a_stale_folder_that_is_taken_up_meanwhile_stays(tmp_path: Path) -> None:
    fill_other(tmp_path, OTHER, 1e8)
    with open_tier(tmp_path, budget=EVERYTHING) as tier, open_tier(tmp_path, fingerprint=OTHER) as other:
        put(tier, range(SAMPLES))
        assert tier.stats().stale_bytes == 0
        assert get(other, range(50)) == [*range(50)]


def test_one_at_a_time(tmp_path: Path) -> None:
    with open_tier(tmp_path):
        with pytest.raises(ResourceError, match="in use by another process"):
            open_tier(tmp_path)
    open_tier(tmp_path).close()
