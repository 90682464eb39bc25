"""One Ray for all tests of the service, and a check after every test that nothing is left behind."""

from __future__ import annotations

import os
import signal
from pathlib import Path

TESTS = Path(__file__).parent

for name, value in {
    "RAY_AUTH_MODE": "disabled",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # else Ray looks at each of its processes every five seconds
    "RAY_worker_niceness": "0",  # by default 15: beside two busy processes, such as tests are, Ray's hardly run at all
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "MBAAS_VALIDATE": "1",
}.items():
    os.environ.setdefault(name, value)
# Hundreds of processes import mbaas in a run of the suite; without files of bytecode each would compile it anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# pytest finds `support` beside this file; the processes that Ray and the tests start find it as they find mbaas
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
# What a script runs in the background ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import gc
import logging
import tempfile
import uuid
from collections.abc import Generator, Iterator
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
import ray
from xdist.scheduler import LoadFileScheduling

import mbaas
from mbaas.bugs import INTERNAL_ERROR
from mbaas.coordinator.background import BROKEN
from support.leaks import Traces, leaks
from support.turns import Turns

LOG_TAIL = 8000
"""Characters that a failed test shows of the log of each of Ray's workers."""

BUGS = (INTERNAL_ERROR, BROKEN)
"""What a coordinator logs when it meets a bug in itself."""

hypothesis.settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is no error
hypothesis.settings.load_profile("same")  # a change is judged by the same examples each time; see CONTRIBUTING.md


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files whose tests need Ray come first: where files run side by side, the short ones even out the end.

    In a file those that are to be alone come first, one after the other, for all others wait meanwhile.
    """
    heavy = {item.path for item in items if _needs_ray(item) or item.get_closest_marker("slow")}
    if items:
        items[0].config.stash[_HEAVY] = heavy
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    items.sort(key=lambda item: (item.path not in heavy, files[item.path], not _is_alone(item)))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n`` a file's tests stay together, for they share feeds, and files begin in the order above."""
    config.option.loadscopereorder = False
    return LoadFileScheduling(config, log)


_HEAVY = pytest.StashKey[set[Path]]()
"""Files with tests that need Ray, or much time."""

_turns = tempfile.TemporaryDirectory(prefix="mbaas-tests-")
_TURNS = pytest.StashKey[Turns | None]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With ``-n`` tests that are to be alone wait for each other by files in a folder that all processes know."""
    node.workerinput["turns"] = _turns.name


def _needs_ray(item: pytest.Item) -> bool:
    return not {"ray_session", "no_ray", "three_nodes"}.isdisjoint(item.fixturenames)


def pytest_collection_finish() -> None:
    """What is imported by now stays: without this each full collection of garbage looks at all of it again."""
    gc.collect()
    gc.freeze()


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {})
    config.stash[_TURNS] = Turns(Path(given["turns"])) if "turns" in given else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """After the last file that needs Ray the shared one ends: it would take a tenth of the machine until the end."""
    if ray.is_initialized() and item.path not in item.config.stash[_HEAVY]:
        ray.shutdown()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # around the timeout, which is for the test and not for its turn
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """A test marked ``alone`` runs while no other does."""
    turns = item.config.stash[_TURNS]
    if turns is None:
        return (yield)
    with turns.turn(alone=_is_alone(item), keep=_is_alone(item) and _is_alone(nextitem)):
        return (yield)


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[str]:
    """Where the shared Ray keeps its files; it is gone when the session ends."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_session(ray_folder: str) -> None:
    """A running Ray of 8 CPUs, the same for all modules unless a test ended it to start a cluster of its own."""
    if not ray.is_initialized():
        ray.init(
            num_cpus=8,
            include_dashboard=False,
            object_store_memory=512 << 20,
            _temp_dir=ray_folder,
            namespace="mbaas",
            logging_level=logging.ERROR,
            log_to_driver=False,
        )
        # Nobody reads what it sends, and with every worker that ever wrote a log it takes more of the CPU.
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)


@pytest.fixture
def no_ray() -> None:
    """No Ray in this process, for a test that starts clusters of its own; `ray_session` starts one again."""
    if ray.is_initialized():
        ray.shutdown()


@pytest.fixture
def ray_clean(ray_session: None) -> Iterator[None]:
    """The session's Ray; the test fails if it leaves an actor, thread, object, spill or shared file
    behind.
    """
    before = Traces.now()
    yield
    found = leaks(before)
    assert not found, "left behind: " + "; ".join(found)


@pytest.fixture
def feed_name() -> str:
    """A name that no other test uses."""
    return f"feed-{uuid.uuid4().hex[:8]}"


def write_images(root: Path, samples: int, classes: int = 3, size: int = 8) -> Path:
    """A class-per-folder tree of small PNGs, each different."""
    for number in range(samples):
        folder = root / f"class-{number % classes}"
        folder.mkdir(parents=True, exist_ok=True)
        image = np.random.default_rng(number).integers(0, 255, (size, size, 3), np.uint8)
        cv2.imwrite(str(folder / f"{number:06d}.png"), image)
    return root


@pytest.fixture(scope="session")
def small_images(tmp_path_factory: pytest.TempPathFactory) -> mbaas.Dataset:
    """1,003 PNGs of 8x8 pixels in three classes."""
    return mbaas.read_images(write_images(tmp_path_factory.mktemp("small"), 1003))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what Ray's workers wrote to their logs meanwhile: a stuck one writes where it is.

    One that passed fails if a coordinator met a bug in itself: it goes on, and nobody would see that otherwise.
    """
    report = yield
    looks_for_bugs = report.when == "call" and not item.get_closest_marker("meets_bugs")
    if not ray.is_initialized() or not (report.failed or looks_for_bugs):
        return report
    session = Path(ray._private.worker.global_worker.node.get_session_dir_path())
    for log in sorted(session.glob("logs/worker-*.err")):
        if log.stat().st_mtime > report.start:
            text = log.read_text(errors="replace")[-LOG_TAIL:]
            if report.passed and (found := [bug for bug in BUGS if bug in text]):
                report.outcome, report.longrepr = "failed", f"{log.name} tells of {found[0]!r}"
            if report.failed:
                report.sections.append((log.name, text))
    return report
