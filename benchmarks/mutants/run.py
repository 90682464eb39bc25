"""Runs the tests of the core for each mutant, in a fork of a process that has collected them."""

from __future__ import annotations

import importlib
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from rich.console import RenderableType
from rich.text import Text

from benchmarks.mutants.equivalent import EQUIVALENT
from benchmarks.mutants.generate import Mutant, mutants, mutated_code
from mbaas.base.units import duration, percent
from mbaas.cli.console import stack
from mbaas.tools.bench.render import figure_table

ROOT = Path(__file__).parents[2]
CORE = ROOT / "mbaas" / "core"
SCHEDULES = "schedules"
"""Part of the names of the files in tests/core with random schedules, which take seconds; others take milliseconds."""

SEEDS = 40
"""Random schedules of each kind for a mutant that passes all tests."""

MOST_CPU_S = 30
"""CPU limit of the tests of a mutant; beyond it counts as detected. CPU time, because a busy machine is not a bug."""


@dataclass
class Result:
    """Results of all mutants.

    Attributes:
        killed: module -> number of detected mutants.
        survived: undetected mutants.
        equivalent: undetected mutants that do not change behaviour.
        seconds: duration of the run.
    """

    killed: dict[str, int] = field(default_factory=dict)
    survived: list[Mutant] = field(default_factory=list)
    equivalent: list[Mutant] = field(default_factory=list)
    seconds: float = 0.0

    def score(self, module: str | None = None) -> float:
        """Return the fraction of detected mutants, without equivalent ones; of a module, or of all."""
        killed = sum(self.killed.values()) if module is None else self.killed.get(module, 0)
        survived = sum(module in (None, mutant.module) for mutant in self.survived)
        return killed / max(1, killed + survived)


def core_modules() -> list[Path]:
    """Return the source files of the core."""
    return sorted(path for path in CORE.rglob("*.py") if path.stem != "__init__")


def dotted(path: Path) -> str:
    """Return the name of the module in a source file."""
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def chosen(modules: Sequence[str], sample: int | None, seed: int) -> list[Mutant]:
    """Return the mutants of some modules of the core, or of all; with ``sample``, only that many."""
    paths = [path for path in core_modules() if not modules or path.stem in modules]
    all_mutants = [mutant for path in paths for mutant in mutants(dotted(path), path)]
    if sample is None or sample >= len(all_mutants):
        return all_mutants
    return sorted(random.Random(seed).sample(all_mutants, sample), key=lambda mutant: (mutant.module, mutant.line))


def run(todo: list[Mutant], *, processes: int, tell: Callable[[str], None]) -> Result:
    """Try each mutant; ``tell`` is called with progress messages."""
    began = time.monotonic()
    sys.path.insert(0, str(ROOT / "tests"))
    plugin = _Mutation(todo, processes, tell)
    files = [str(path) for path in sorted((ROOT / "tests" / "core").glob("test_*.py")) if SCHEDULES not in path.name]
    # Without the options of pyproject.toml, which concern the terminal. Mutants have their own time limit.
    options = ["-o", "addopts=", "-o", "timeout=0", "--rootdir", str(ROOT)]
    without = [option for name in ("terminal", "cacheprovider", "xdist") for option in ("-p", f"no:{name}")]
    code = pytest.main([*options, *without, *files], plugins=[plugin])
    if plugin.broken:
        raise RuntimeError(f"tests fail without any mutant: {', '.join(plugin.broken)}")
    if not (plugin.is_done or plugin.result.killed):  # an interrupted run shows its results so far
        raise RuntimeError(f"the tests could not be collected, pytest ended with {code}")
    plugin.result.seconds = time.monotonic() - began
    return plugin.result


class _Mutation:
    """A pytest plugin: it runs the collected tests once, and then for each mutant the tests that reach it."""

    def __init__(self, todo: list[Mutant], processes: int, tell: Callable[[str], None]) -> None:
        self._todo, self._processes, self._tell = todo, processes, tell
        self.result, self.broken, self.is_done = Result(), list[str](), False
        self._items: list[tuple[float, pytest.Item, set[tuple[str, int]]]] = []
        # Tests that detected mutants of a function, the newest first: they often detect its next mutant, too.
        self._detectors: dict[tuple[str, int], list[int]] = {}

    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        for item in session.items:
            met: set[tuple[str, int]] = set()
            began = time.monotonic()
            with _traced(met):
                passed = _passes(item)
            self._items.append((time.monotonic() - began, item, met))
            if not passed:
                self.broken.append(item.nodeid)
        if not self.broken:
            self._items.sort(key=lambda entry: entry[0])
            self._try_all()
            self.is_done = True
        return True

    def _try_all(self) -> None:
        waiting, running = list(reversed(self._todo)), dict[int, tuple[Mutant, int]]()
        while waiting or running:
            while waiting and len(running) < self._processes:
                mutant = waiting.pop()
                pid, detector = self._fork(mutant)
                running[pid] = mutant, detector
            pid, status = os.wait()
            mutant, detector = running.pop(pid)
            with os.fdopen(detector) as file:
                if number := file.read():
                    known = self._detectors.setdefault((mutant.module, mutant.starts), [])
                    known[:] = [int(number), *(each for each in known if each != int(number))]
            self._note(mutant, survived=status == 0, left=len(waiting) + len(running))

    def _note(self, mutant: Mutant, *, survived: bool, left: int) -> None:
        if not survived:
            self.result.killed[mutant.module] = self.result.killed.get(mutant.module, 0) + 1
        elif mutant.key in EQUIVALENT:
            self.result.equivalent.append(mutant)
        else:
            self.result.survived.append(mutant)
            self._tell(f"survived: line {mutant.line} of {mutant.key}")
        if left % 100 == 0:
            self._tell(f"{left} mutants left, {percent(self.result.score())} noticed so far")

    def _fork(self, mutant: Mutant) -> tuple[int, int]:
        """Return the process that tests the mutant, and a pipe for the index of the test that detects it, if any."""
        detector, write = os.pipe()
        pid = os.fork()
        if pid:
            os.close(write)
            return pid, detector
        noticed = True
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (MOST_CPU_S, MOST_CPU_S))
            sink = os.open(os.devnull, os.O_WRONLY)
            os.dup2(sink, 1)
            os.dup2(sink, 2)
            _install(mutant)
            noticed = self._is_noticed(mutant, write)
        finally:
            os._exit(1 if noticed else 0)

    def _is_noticed(self, mutant: Mutant, detector: int) -> bool:
        function = mutant.module, mutant.starts
        first = self._detectors.get(function, [])
        met = [number for number, (_, _, calls) in enumerate(self._items) if function in calls and number not in first]
        for number in (*first, *met):
            if not _passes(self._items[number][1]):
                os.write(detector, str(number).encode())
                return True
        return _schedules_notice()


def _passes(item: pytest.Item) -> bool:
    return all(report.passed or report.skipped for report in runtestprotocol(item, log=False, nextitem=None))


def _schedules_notice() -> bool:
    from support.schedules import Simulation
    from support.system_schedules import System

    try:
        for seed in range(SEEDS):
            Simulation(seed).run()
            Simulation(seed, calm=True).run()
            Simulation(seed, pipelines=3).run()
            Simulation(seed, keeps_all=True, pipelines=3).run()
            System(seed).run()
    except Exception:  # a mistake can raise anything
        return True
    return False


@contextmanager
def _traced(met: set[tuple[str, int]]) -> Iterator[None]:
    """Record the functions of the core that are called: module, and first line of the function."""
    called: dict[int, CodeType] = {}  # by id: equal code may belong to another function, and hashing is slow

    def trace(frame: FrameType, *_: Any) -> None:
        called[id(frame.f_code)] = frame.f_code

    sys.setprofile(trace)
    try:
        yield
    finally:
        sys.setprofile(None)
    for code in called.values():
        if code.co_filename.startswith(str(CORE)):
            met.add((dotted(Path(code.co_filename)), code.co_firstlineno))


def _install(mutant: Mutant) -> None:
    """Replace the code of the function, for all modules that imported it."""
    module = importlib.import_module(mutant.module)
    found: Any = module
    for part in mutant.function.split("."):
        found = vars(found)[part]
    found = getattr(found, "fget", found)  # a property
    found = getattr(found, "__func__", found)  # a static method
    found = getattr(found, "__wrapped__", found)
    assert isinstance(found, FunctionType)
    found.__code__ = mutated_code(mutant, Path(str(module.__file__)))


def table(result: Result) -> RenderableType:
    """Return a table with a row for each module, and a list of the survivors."""
    shown = figure_table("mutants of the core", ("module", "noticed", "survived", "equivalent", "score"), ("module",))
    modules = sorted({*result.killed, *(mutant.module for mutant in (*result.survived, *result.equivalent))})
    for module in [*modules, None]:
        survived, equivalent = (
            sum(module in (None, mutant.module) for mutant in group) for group in (result.survived, result.equivalent)
        )
        killed = sum(result.killed.values()) if module is None else result.killed.get(module, 0)
        name = f"all, in {duration(result.seconds)}" if module is None else module.removeprefix("mbaas.core.")
        shown.add_row(name, str(killed), str(survived), str(equivalent), percent(result.score(module)))
    listed = [
        f"{mutant.module.removeprefix('mbaas.')}:{mutant.line} {mutant.function}: {mutant.before} -> {mutant.after}"
        for mutant in result.survived
    ]
    return stack([shown, *([Text("\n".join(listed))] if listed else [])])
