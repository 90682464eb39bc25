"""Several programs on one cluster each serve a feed and read the feeds of the others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from ray_heads import Head, ray_head

SAMPLES = 60

PROGRAM = """
# Serve a feed. For each line on standard input, a list of feeds, read one epoch of each and print its samples.
import json, sys
import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic

name, samples, detached = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "detached"
if name == "newer":  # its messages are others
    from mbaas.wire import protocol
    protocol.PROTOCOL = "0badcafe"
mbaas.serve(name, synthetic(samples), T.Pipeline([T.DecodeImage()]), batch_size=8, prep_workers=1,
            staging_bytes=200_000, detached=detached)
print(json.dumps(name), flush=True)
for line in sys.stdin:
    read = {}
    for feed in json.loads(line):
        with mbaas.join(feed, f"reader-of-{name}", format="numpy", wait_timeout_s=30) as loader:
            read[feed] = sorted(sum((batch["sample_id"].tolist() for batch in loader), []))
    print(json.dumps(read), flush=True)
"""

READER = """
import sys
import mbaas
for feed in sys.argv[1:]:
    with mbaas.join(feed, format="numpy", wait_timeout_s=30) as loader:
        print(feed, sum(len(batch["label"]) for batch in loader), loader.ledger.exact)
"""
"""Reads an epoch of each feed, and serves none."""


@pytest.fixture(scope="module")
def head() -> Iterator[Head]:
    with ray_head(cpus=8, forks=True) as head:
        yield head


@contextmanager
def programs(head: Head, **detached: bool) -> Iterator[list[subprocess.Popen[str]]]:
    """Programs that start together. Each serves the feed of its name, and reads the feeds requested by `read`."""
    with ExitStack() as stack:
        started = {}
        for name, is_detached in detached.items():
            started[name] = head.start(PROGRAM, name, str(SAMPLES), "detached" if is_detached else "attached")
            stack.callback(end, started[name])
        for name, serving in started.items():
            assert answer_of(serving) == name
        yield [*started.values()]


def end(serving: subprocess.Popen[str]) -> None:
    serving.kill()
    serving.communicate()


def answer_of(serving: subprocess.Popen[str]) -> object:
    assert serving.stdout is not None
    for line in serving.stdout:
        if line.startswith(('"', "{")):
            return json.loads(line)
    raise AssertionError(f"the program ended with {serving.wait()} before it answered")


def read(serving: subprocess.Popen[str], *feeds: str) -> None:
    """Let a program read one epoch of each feed in ``feeds``."""
    assert serving.stdin is not None
    serving.stdin.write(json.dumps(feeds) + "\n")
    serving.stdin.flush()
    assert answer_of(serving) == {feed: list(range(SAMPLES)) for feed in feeds}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_three_programs_read_the_feeds_of_each_other(head: Head) -> None:
    """Two feeds are detached. The third ends with its program, which is killed; the others continue."""
    with programs(head, one=True, two=True, three=False) as (one, two, three):
        for each in (one, two, three):
            read(each, "one", "two", "three")
        three.kill()
        for each in (two, one):
            read(each, "two", "one")
    last = head.run(sys.executable, "-c", READER, "one", "two")  # the programs that served them are gone
    assert last.stdout.splitlines()[-2:] == [f"one {SAMPLES} True", f"two {SAMPLES} True"], last.stdout


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_program_with_another_version_is_refused_with_a_sentence(head: Head) -> None:
    with programs(head, newer=False):
        older = head.run(sys.executable, "-c", "import mbaas; mbaas.join('newer', format='numpy')")
    assert older.returncode == 1
    assert re.search(
        r"^mbaas\.errors\.ConfigError: feed 'newer' is served with mbaas [\d.]+ \(messages 0badcafe\), and this "
        r"program has [\d.]+ \(messages [0-9a-f]{8}\): install the same one in both; it is served by ",
        older.stdout,
        re.MULTILINE,
    ), older.stdout


LENDER = """
# Serve a feed of so many workers, from a working directory of its own if one is named. For each line on standard input,
# train until the feed has as many workers as it says, for as many seconds at most, and print what came of it.
import json, sys, time
import ray
name, workers, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
if folder:
    sys.path.insert(0, folder)
    ray.init(runtime_env={"working_dir": folder}, log_to_driver=False)
import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic

own = []
if folder:
    import my_module
    own = [T.Map(my_module.darker)]
steps = [T.DecodeImage(), T.ColorJitter(brightness=0.5, saturation=0.5), *own]
feed = mbaas.serve(name, synthetic(200, height=256, width=256), T.Pipeline(steps), batch_size=20, prep_workers=workers,
                   lending=mbaas.Lending(hold_s=0.5, pause_s=0.5))
print(json.dumps(name), flush=True)
for line in sys.stdin:
    enough, seconds = map(int, line.split())
    end, most, exact = time.monotonic() + seconds, 0, True
    with mbaas.join(name, "trial", format="numpy") as loader:
        while most < enough and time.monotonic() < end:
            for batch in loader:
                pass
            exact, most = exact and loader.ledger.exact, max(most, len(feed.status().workers))
    status = feed.status()
    print(json.dumps({"exact": exact, "workers": most, "errors": status.internal_errors}), flush=True)
"""


def lent(head: Head, folders: tuple[str, str], until: str) -> object:
    """Serve a feed with three idle workers and one with a busy worker, from two programs; train on the second."""
    with ExitStack() as stack:
        started = []
        for name, workers, folder in zip(("rich", "poor"), ("3", "1"), folders, strict=True):
            started.append(head.start(LENDER, name, workers, folder))
            stack.callback(end, started[-1])
        rich, poor = started
        assert (answer_of(rich), answer_of(poor)) == ("rich", "poor")
        assert poor.stdin is not None
        poor.stdin.write(f"{until}\n")
        poor.stdin.flush()
        return answer_of(poor)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_are_lent_to_the_feed_of_another_program(head: Head) -> None:
    assert lent(head, ("", ""), "3 30") == {"exact": True, "workers": 3, "errors": 0}


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_workers_are_not_lent_to_a_program_whose_code_they_cannot_import(head: Head, tmp_path: Path) -> None:
    """Two working directories, as `ray job submit` makes them, each with a module of the same name."""
    for name, factor in (("one", 2), ("two", 3)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "my_module.py").write_text(f"def darker(image, rng):\n    return image // {factor}\n")
    folders = str(tmp_path / "one"), str(tmp_path / "two")
    assert lent(head, folders, "2 6") == {"exact": True, "workers": 1, "errors": 0}
