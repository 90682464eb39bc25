"""All tests of the service share one Ray, and a check after each test finds anything left behind."""

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
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # otherwise Ray inspects each of its processes every five seconds
    "RAY_worker_niceness": "0",  # default 15: next to two busy processes, as tests are, Ray's would hardly run
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "TUNE_DISABLE_AUTO_CALLBACK_LOGGERS": "1",
    "NO_ALBUMENTATIONS_UPDATE": "1",  # otherwise it asks the network for newer releases when it is imported
    "MBAAS_VALIDATE": "1",
}.items():
    os.environ.setdefault(name, value)
# A run of the suite imports mbaas in hundreds of processes; without bytecode files each would compile it.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# pytest finds `support` in this folder; processes started by Ray and the tests find it through PYTHONPATH
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
# A shell script's background processes ignore Ctrl-C, and so would every process that the tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import gc
import logging
import tempfile
import uuid
from collections.abc import Callable, Generator, Iterator
from functools import partialmethod
from typing import Any

import cv2
import hypothesis
import numpy as np
import pytest
import ray
from ray._private.parameter import RayParams
from xdist.scheduler import LoadFileScheduling

import mbaas
from mbaas.coordinator.background import BROKEN
from mbaas.ray_cluster.bugs import INTERNAL_ERROR
from mbaas.tools.chaos.nodes import environment
from support import forked_worker, nursery
from support.leaks import Traces, leaks
from support.turns import Turns

LOG_TAIL = 8000
"""Characters of each Ray worker log shown for a failed test."""

NOT_QUICK = ("slow", "chaos", "long", "alone", "gpu")
"""Markers of tests that are left out of the quick part."""

ALL_WITH_RAY = {TESTS / name for name in ("nodes", "trainers")}
"""Folders in which no test is quick. To import their files takes seconds, for Ray Train, Lightning and transformers."""

BUGS = (INTERNAL_ERROR, BROKEN)
"""Log texts of a coordinator that met a bug in mbaas."""

hypothesis.settings.register_profile("same", derandomize=True, deadline=None)  # a busy machine is not a failure
hypothesis.settings.load_profile("same")  # every change is tested with the same examples; see CONTRIBUTING.md


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave folders without quick tests out of ``-m quick``."""
    return True if config.option.markexpr == "quick" and collection_path in ALL_WITH_RAY else None


@pytest.hookimpl(tryfirst=True)  # before pytest selects by marker
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run files whose tests need Ray first, so that with several processes the short files even out the end.

    Files with tests marked ``alone`` come even earlier. These tests wait until no other test runs, which can take a
    minute while long tests run. Within a file they follow each other, because all other processes wait for them. Files
    that start clusters come last among the files with Ray; otherwise the shared Ray would have to start again. Tests
    without Ray and without a marker to the contrary are ``quick``.
    """
    for item in items:
        if not _needs_ray(item) and not any(map(item.get_closest_marker, NOT_QUICK)):
            item.add_marker("quick")
            if not ALL_WITH_RAY.isdisjoint(item.path.parents):
                raise pytest.UsageError(f"{item.nodeid} is quick: take its folder out of ALL_WITH_RAY in conftest.py")
    heavy = {item.path for item in items if _needs_ray(item) or item.get_closest_marker("slow")}
    if items:
        items[0].config.stash[_HEAVY] = heavy
    files = {path: number for number, path in enumerate(dict.fromkeys(item.path for item in items))}
    first_alone: dict[Path, int] = {}
    for number, item in enumerate(items):
        if _is_alone(item):
            first_alone.setdefault(item.path, number)
    own = {item.path for item in items if not _OWN_RAY.isdisjoint(item.fixturenames)}
    places = {
        item: (
            item.path not in first_alone,
            item.path not in heavy,
            item.path in own,
            files[item.path],
            first_alone[item.path] if _is_alone(item) else number,
        )
        for number, item in enumerate(items)
    }
    items.sort(key=places.__getitem__)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """With ``-n``, keep the tests of a file together, since they share feeds, and start files in the order above."""
    config.option.loadscopereorder = False
    return Scheduling(config, log)


_TOGETHER = [f"tests/nodes/test_{name}.py" for name in ("nodes", "ranks", "relayed_calls")]
"""Files that share a cluster of three nodes."""


class Scheduling(LoadFileScheduling):
    """Runs all tests of a file in one process, and all files of `_TOGETHER`."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return _TOGETHER[0] if file in _TOGETHER else file


_HEAVY = pytest.StashKey[set[Path]]()
"""Files with tests that need Ray or much time."""

_turns = tempfile.TemporaryDirectory(prefix="mbaas-tests-")
_TURNS = pytest.StashKey[Turns | None]()


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """With ``-n``, let ``alone`` tests wait for each other through files in a folder shared by all processes."""
    node.workerinput["turns"] = _turns.name


_OWN_RAY = {"no_ray", "three_nodes"}
"""Fixtures that shut the shared Ray down."""


def _needs_ray(item: pytest.Item) -> bool:
    return not {"ray_session", *_OWN_RAY}.isdisjoint(item.fixturenames)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect tests without garbage collections: imports leave little garbage, and each would visit all of them."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exempt all objects imported so far from garbage collection: each full collection would visit them."""
    gc.collect()
    gc.freeze()


def _is_alone(item: pytest.Item | None) -> bool:
    return item is not None and item.get_closest_marker("alone") is not None


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {})
    config.stash[_TURNS] = Turns(Path(given["turns"])) if "turns" in given else None


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Shut down the shared Ray after the last file that needs it: an idle Ray uses a tenth of the machine."""
    if ray.is_initialized() and item.path not in item.config.stash[_HEAVY]:
        ray.shutdown()


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost, so that the timeout covers the test and not its wait
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Run a test marked ``alone`` while no other test runs."""
    turns = item.config.stash[_TURNS]
    if turns is None:
        return (yield)
    with turns.turn(alone=_is_alone(item), keep=_is_alone(item) and _is_alone(nextitem)):
        return (yield)


@pytest.fixture(scope="session", autouse=True)
def forked_workers() -> Iterator[Callable[..., None]]:
    """Clusters that tests start in this process fork their workers, which takes a third of the CPU time.

    The value is the constructor of Ray's parameters without this.
    """
    own = RayParams.__init__
    with pytest.MonkeyPatch.context() as patch:  # not a public option
        patch.setattr(RayParams, "__init__", partialmethod(own, worker_path=forked_worker.__file__))
        yield own


@pytest.fixture
def own_workers(forked_workers: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters that the test starts have Ray's own workers. `usefixtures` requests this before the cluster."""
    monkeypatch.setattr(RayParams, "__init__", forked_workers)


@pytest.fixture(scope="session")
def ray_folder() -> Iterator[str]:
    """The folder of the shared Ray's files, deleted when the session ends."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as folder:
        yield folder
        ray.shutdown()


@pytest.fixture(scope="module")
def ray_session(ray_folder: str) -> None:
    """A running Ray of 8 CPUs, shared by all modules unless a test shut it down to start its own cluster."""
    if not ray.is_initialized():
        with environment({nursery.MORE: "torch tune_integration"}):
            ray.init(
                num_cpus=8,
                include_dashboard=False,
                object_store_memory=512 << 20,
                _temp_dir=ray_folder,
                namespace="mbaas",
                logging_level=logging.ERROR,
                log_to_driver=False,
            )
        # No process reads the log monitor's output, and its CPU use grows with every worker log.
        ray._private.worker._global_node.kill_log_monitor(check_alive=False)


@pytest.fixture
def no_ray() -> None:
    """No Ray in this process, for a test that starts its own clusters; `ray_session` starts one again."""
    if ray.is_initialized():
        ray.shutdown()


@pytest.fixture
def ray_clean(ray_session: None) -> Iterator[None]:
    """The session's Ray; the test fails if it leaves an actor, thread, object, spill or shared file behind."""
    before = Traces.now()
    yield
    found = leaks(before)
    assert not found, "left behind: " + "; ".join(found)


@pytest.fixture
def feed_name() -> str:
    return f"feed-{uuid.uuid4().hex[:8]}"


def write_images(root: Path, samples: int, classes: int = 3, size: int = 8) -> Path:
    """Write small PNGs, each different, in one folder per class."""
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
    """Add the Ray worker logs to the report of a failed test: a stuck worker logs its stack.

    A passed test fails if a coordinator logged a bug, because the coordinator continues and the bug would stay hidden.
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
