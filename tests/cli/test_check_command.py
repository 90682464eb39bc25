"""`mbaas check` lists the bad samples of a feed file, and writes them for its key `exclude`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator
from pathlib import Path

import numpy as np
import pytest
from commandline import call, mbaas

from mbaas.cli import excluded, feed_file
from support import readers

pytestmark = pytest.mark.slow  # a check starts processes, which import mbaas

PIPELINE = "batch_size: 4\npipeline: [DecodeImage]\n"


@pytest.fixture
def feed(tmp_path: Path) -> Path:
    """31 images in 3 classes, one of them bad."""
    readers.images().in_folders(tmp_path / "data")
    file = tmp_path / "feed.yaml"
    file.write_text(f"name: train\ndata: data\n{PIPELINE}")
    return file


def test_bad_samples_are_listed_and_can_be_left_out(feed: Path) -> None:
    bad = feed.parent / "bad.txt"
    said = call("check", feed, "--exclude", bad, "--processes", 1)
    assert said.exit_code == 1
    assert "007.png: it is not JPEG, PNG, WebP or BMP" in said.stdout
    assert "31 checked, 30 good, 1 bad" in said.stdout
    assert 'exclude: "bad.txt"' in said.stderr
    feed.write_text(feed.read_text() + "exclude: bad.txt\n")
    assert len(feed_file.load(feed).data.read()) == 30
    # a later file contains the earlier samples, too
    second = feed.parent / "data" / "bee" / "012.png"
    second.write_bytes(second.read_bytes()[::-1])
    again = call("check", feed, "--exclude", bad, "--json", "--processes", 1)
    found = json.loads(again.stdout)
    assert (again.exit_code, found["samples"], found["bad"]) == (1, 30, 1)
    assert found["bad_samples"][0]["uri"].endswith("012.png")
    assert len(feed_file.load(feed).data.read()) == 29
    clean = call("check", feed, "--processes", 1)
    assert (clean.exit_code, clean.stderr) == (0, "")
    assert "all 10x8 pixels" in clean.stdout


def test_a_page_with_many_bad_samples_names_the_option_that_lists_all(feed: Path) -> None:
    for file in sorted((feed.parent / "data").rglob("*.png"))[6:]:
        file.write_bytes(b"text")
    page = call("check", feed, "--processes", 1).stdout
    assert page.count(".png: it is not JPEG") == 20
    assert "and 5 more bad samples, listed by --json; 25 with: it is not JPEG" in page
    found = json.loads(call("check", feed, "--processes", 1, "--json").stdout)
    assert (found["bad"], len(found["bad_samples"])) == (25, 25)


def test_the_advice_is_a_command_that_can_be_copied(feed: Path) -> None:
    said = call("check", feed, "--processes", 1)
    assert f"mbaas check {feed} --exclude bad.txt" in said.stderr


def test_each_sample_of_a_table_is_checked_once_although_it_is_drawn_often(feed: Path) -> None:
    names = [str(file.relative_to(feed.parent)) for file in sorted((feed.parent / "data").rglob("*.png"))]
    rows = [f"{name},{int(name.endswith('7.png'))}" for name in names]
    (feed.parent / "t.csv").write_text("\n".join(["uri,label", *rows]))
    feed.write_text(f"name: a\ndata: {{read_manifest: t.csv}}\nresample: {{balance: label, samples: 90}}\n{PIPELINE}")
    found = json.loads(call("check", feed, "--json", "--processes", 1).stdout)
    assert (found["samples"], found["checked"], [each["sample_id"] for each in found["bad_samples"]]) == (31, 31, [7])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "No such file"),
        ("ids", "must be a file that mbaas check --exclude wrote"),
        ("# bad samples of the data with fingerprint 00\n1\n", "its samples have changed; run mbaas check again"),
        ("# bad samples of the data with fingerprint {}\n31\n", "must begin with a sample's id below 31, got '31'"),
    ],
)
def test_a_file_to_exclude_must_fit(feed: Path, text: str | None, sentence: str) -> None:
    fingerprint = feed_file.load(feed).data.read().fingerprint
    if text is not None:
        (feed.parent / "bad.txt").write_text(text.replace("{}", fingerprint))
    feed.write_text(feed.read_text() + "exclude: bad.txt\n")
    said = call("check", feed)
    assert said.exit_code == 2
    assert sentence in said.stderr
    assert "feed.yaml:5" in said.stderr


def test_own_code_that_ends_a_process_is_found_by_sample(feed: Path) -> None:
    (feed.parent / "own.py").write_text(
        "import os\nfrom pathlib import Path\n\ndef end(image, rng):\n"
        "    if image[0, 0].tolist() == TARGET: os._exit(7)\n    return image\n"
    )
    target = readers.picture(20)[0, 0].tolist()
    text = (feed.parent / "own.py").read_text().replace("TARGET", str(target))
    (feed.parent / "own.py").write_text(text)
    feed.write_text(feed.read_text().replace("[DecodeImage]", "[DecodeImage, Map: own:end]"))
    found = json.loads(mbaas("check", feed, "--json").stdout)
    assert [each["sample_id"] for each in found["bad_samples"]] == [readers.BAD, 20]
    assert found["bad_samples"][1]["reason"] == "the process that prepared it ended with code 7"


def test_ctrl_c_shows_what_was_found(feed: Path) -> None:
    calls = feed.parent / "calls"
    calls.touch()
    (feed.parent / "own.py").write_text(
        "import time\n\ndef wait(image, rng):\n    time.sleep(0.02)\n"
        f"    open({str(calls)!r}, 'a').write('1')\n    return image\n"
    )
    feed.write_text(feed.read_text().replace("[DecodeImage]", "[DecodeImage, Map: own:wait]"))
    many = readers.images(600)
    many.in_folders(feed.parent / "data")
    with subprocess.Popen(
        [sys.executable, "-m", "mbaas", "check", str(feed), "--processes", "1", "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    ) as process:
        end = time.monotonic() + 60
        while calls.stat().st_size < 80 and time.monotonic() < end:  # two pieces of 32, and a part of the third
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=20)
    found = json.loads(out)
    assert process.returncode == 130
    assert found["was_stopped"]
    assert 0 < found["checked"] < 600
    assert [each["sample_id"] for each in found["bad_samples"]] == [readers.BAD]
    assert "interrupted: " in err
    assert "Traceback" not in err


def test_a_closed_pipe_ends_it_quietly(feed: Path) -> None:
    command = f"{sys.executable} -m mbaas check {feed} | true"
    said = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=90, check=False)
    assert "Traceback" not in said.stderr
    assert "Error" not in said.stderr


def test_data_without_a_good_sample_are_one_sentence(feed: Path) -> None:
    for file in (feed.parent / "data").rglob("*.png"):
        file.write_bytes(b"")
    said = call("check", feed)
    assert said.exit_code == 1
    assert "ant/000.png: the file is empty (0 bytes)" in said.stderr


def test_ids_of_the_list_are_of_the_data_that_were_checked(feed: Path) -> None:
    """A sample that is added during the check moves all ids behind it."""
    (feed.parent / "own.py").write_text(
        "import shutil\nfrom pathlib import Path\n\nTOP = Path(__file__).parent / 'data'\n\ndef add(image, rng):\n"
        "    shutil.copy(TOP / 'ant' / '000.png', TOP / 'ant' / '0.png')\n    return image\n"
    )
    before = feed_file.load(feed).data.read().fingerprint
    feed.write_text(feed.read_text().replace("[DecodeImage]", "[DecodeImage, Map: own:add]"))
    mbaas("check", feed, "--exclude", feed.parent / "bad.txt")
    first, line = (feed.parent / "bad.txt").read_text().splitlines()
    assert first.endswith(before)
    assert line.endswith("007.png")
    assert feed_file.load(feed).data.read().fingerprint != before


def test_a_check_of_some_samples_keeps_an_earlier_list(feed: Path) -> None:
    bad = feed.parent / "bad.txt"
    call("check", feed, "--exclude", bad, "--processes", 1)
    whole = bad.read_text()
    said = call("check", feed, "--exclude", bad, "--processes", 1, "--limit", 2)
    assert bad.read_text() == whole
    assert "bad.txt was not replaced, because not all samples were checked" in " ".join(said.stderr.split())


def test_a_list_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = readers.folders(tmp_path / "data", readers.images(), None)
    file = tmp_path / "bad.txt"
    excluded.write(file, images, np.array([1]))
    before = file.read_text()

    def full(part: Path, text: str) -> None:
        part.write_bytes(text.encode()[:10])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        excluded.write(file, images, np.array([1, 2]))
    assert file.read_text() == before
    assert [each.name for each in tmp_path.iterdir() if each.is_file()] == ["bad.txt"]


def test_an_outage_of_storage_is_no_damage(feed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mbaas.tools.check import scan
    from mbaas.tools.check.samples import Outcome

    def some(*_: object, **__: object) -> Generator[None, None, None]:
        totals = _[3]
        totals.add(Outcome(samples=31, bad={7: "damaged"}, unread={3: "connection reset"}), str)  # type: ignore[attr-defined]
        yield

    monkeypatch.setattr(scan, "scan", some)
    bad = feed.parent / "bad.txt"
    said = call("check", feed, "--exclude", bad, "--processes", 1)
    assert said.exit_code == 1
    assert "29 good, 1 bad, 1 not returned by storage" in said.stdout
    assert "3: connection reset" in said.stdout
    assert "storage did not return 1 sample, which may be good" in " ".join(said.stderr.split())
    assert [line.split("\t")[0] for line in bad.read_text().splitlines()[1:]] == ["7"]
