"""Execution of cases in a separate process, and detection of failures.

A case is a target and a number: the same number gives the same case as long as the code is the same. The process
reports each case over a pipe before it begins. So the failing case is known after a crash, and the next case runs in a
new process.
"""

from __future__ import annotations

import faulthandler
import json
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from rich.console import Group
from rich.table import Table
from rich.text import Text

from mbaas.errors import ConfigError

PATIENCE_S = 60.0
"""Timeout of a case in seconds, with a margin for a busy machine."""

MORE_BYTES = 400 << 20
"""Limit of resident memory for all cases of a process: an image of the largest size takes a few megabytes."""

_ADDRESSES = 8 << 30
"""Address space beyond the mappings at the start: larger requests get a MemoryError."""

_CASES_OF_A_SEED = 1 << 40
"""Case numbers reserved for each seed; seed 0 has the cases of the test suite."""

_MOST_FAILURES = 5
"""Findings after which a target is left: more would be similar."""


Case = Callable[[Random], None]
"""Runs one case, determined by the random numbers; an exception is a finding."""


@dataclass(frozen=True)
class Target:
    """A fuzz target.

    Attributes:
        prepare: creates the files of all cases in a folder, and returns the function for one case.
        in_suite: number of cases in the test suite: about one second's worth.
    """

    prepare: Callable[[Path], Case]
    in_suite: int


@dataclass(frozen=True)
class Failure:
    """A failed case.

    Attributes:
        target, case: arguments to repeat it: ``python -m benchmarks fuzz --target TARGET --case CASE``.
        kind: "error", "crash", "hang" or "memory".
        told: the traceback, or other evidence.
    """

    target: str
    case: int
    kind: str
    told: str


@dataclass(frozen=True)
class Fuzzed:
    """Results of a target."""

    target: str
    cases: int
    seconds: float
    failures: tuple[Failure, ...]


def fuzz(
    target: str,
    *,
    first: int,
    cases: int | None = None,
    seconds: float | None = None,
    patience_s: float = PATIENCE_S,
    where: str = "benchmarks.fuzz.targets",
) -> Fuzzed:
    """Run cases of a target from ``first`` on, until their number or the time is reached.

    Args:
        target: its name in ``TARGETS`` of the module ``where``.
        first: number of the first case.
        cases: number of cases; None: no limit.
        seconds: time limit; None: no limit.
        patience_s: timeout of one case.
        where: module with the targets.
    """
    began, following, last = time.monotonic(), first, first + cases if cases is not None else sys.maxsize
    failures: list[Failure] = []
    while following < last and len(failures) < _MOST_FAILURES:
        left_s = None if seconds is None else seconds - (time.monotonic() - began)
        if left_s is not None and left_s <= 0:
            break
        spec = {"target": target, "first": following, "last": last, "seconds": left_s, "patience_s": patience_s}
        following, failure = _in_a_process({**spec, "where": where})
        if failure is None:
            break
        failures.append(failure)
    return Fuzzed(target, following - first, time.monotonic() - began, tuple(failures))


def _in_a_process(spec: dict[str, Any]) -> tuple[int, Failure | None]:
    """Run cases until one fails; return the number of the next case, and the failure."""
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="mbaas-fuzz-") as folder, tempfile.TemporaryFile() as crash:
        run = [sys.executable, "-m", "benchmarks.fuzz.run", json.dumps(spec), str(writing), str(crash.fileno()), folder]
        # C libraries print many useless messages about damaged images
        child = subprocess.Popen(
            run, pass_fds=(writing, crash.fileno()), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(writing)
        at, message = spec["first"] - 1, None
        try:
            for line in _lines(reading, silence_s=2 * spec["patience_s"] + 60):
                message = json.loads(line)
                at = message["case"]
        finally:
            os.close(reading)
            child.kill()
            code = child.wait()
        if message is not None and message["kind"] == "done":
            return at, None
        crash.seek(0)
        told = crash.read(20_000).decode(errors="replace")
        if message is not None and message["kind"] != "begin":
            return at + 1, Failure(spec["target"], at, message["kind"], message["told"])
        kind = "hang" if "Timeout (" in told or code == -signal.SIGKILL else "crash"
        return max(at, spec["first"]) + 1, Failure(spec["target"], at, kind, f"it ended with {code}\n{told}")


def _lines(reading: int, *, silence_s: float) -> Iterator[bytes]:
    """Read lines from a pipe, until its end or until it is silent for ``silence_s``."""
    rest = b""
    while select.select([reading], [], [], silence_s)[0] and (content := os.read(reading, 1 << 16)):
        *lines, rest = (rest + content).split(b"\n")
        yield from lines


def main(spec: dict[str, Any], writing: int, crash: int, folder: Path) -> None:
    """Entry point of the process: run cases, and report each before it begins."""
    import importlib

    def tell(kind: str, case: int, told: str = "") -> None:
        os.write(writing, json.dumps({"kind": kind, "case": case, "told": told[-8000:]}).encode() + b"\n")

    faulthandler.enable(crash)
    patience_s = spec["patience_s"]
    faulthandler.dump_traceback_later(patience_s + 60, exit=True, file=crash)  # imports may take long
    try:
        case = importlib.import_module(spec["where"]).TARGETS[spec["target"]].prepare(folder)
    except Exception:
        tell("error", spec["first"], traceback.format_exc())
        return
    for warming in range(3):  # imports and caches of the first cases are not findings
        _run(case, spec["target"], -1 - warming)
    _limit_addresses()
    least, ends = _peak_bytes(), None if spec["seconds"] is None else time.monotonic() + spec["seconds"]
    armed, number = 0.0, spec["first"]
    while number < spec["last"] and (ends is None or time.monotonic() < ends):
        if time.monotonic() - armed > patience_s / 10:  # not for each case: it starts a thread
            faulthandler.dump_traceback_later(patience_s, exit=True, file=crash)
            armed = time.monotonic()
        tell("begin", number)
        if told := _run(case, spec["target"], number):
            tell("error", number, told)
            return
        if (more := _peak_bytes() - least) > MORE_BYTES:
            tell("memory", number, f"the process takes {more:,} bytes more than at its start")
            return
        number += 1
    tell("done", number)


def _run(case: Callable[[Random], None], target: str, number: int) -> str:
    try:
        case(Random(f"{target} {number}"))
    except BaseException:  # a reader must not exit either
        return traceback.format_exc()
    return ""


def _peak_bytes() -> int:
    # Not `getrusage`: its peak starts with the peak of the parent process.
    status = Path("/proc/self/status").read_text()
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def _limit_addresses() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * os.sysconf("SC_PAGE_SIZE") + _ADDRESSES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))


def fuzz_all(
    seconds: float, *, seed: int, target: str | None, case: int | None, progress: Callable[[str], None]
) -> list[Fuzzed]:
    """Fuzz every target, or one, for an equal part of the time; with ``case`` only that case.

    Raises:
        ConfigError: an unknown target, or a case without a target.
    """
    from benchmarks.fuzz.targets import TARGETS  # which imports this module

    if target is not None and target not in TARGETS:
        raise ConfigError(f"--target must be one of {', '.join(TARGETS)}, got {target!r}")
    if case is not None:
        if target is None:
            raise ConfigError("--case needs --target: each has cases of its own")
        return [fuzz(target, first=case, cases=1)]
    chosen = [target] if target is not None else list(TARGETS)
    done = []
    for name in chosen:
        done.append(fuzz(name, first=seed * _CASES_OF_A_SEED, seconds=seconds / len(chosen)))
        progress(f"{name}: {done[-1].cases:,} cases, {len(done[-1].failures)} findings")
    return done


def table(done: Sequence[Fuzzed]) -> Group:
    """Return a table of the runs, then each finding with the command that repeats it."""
    shown = Table("target", "cases", "cases/s", "findings")
    for each in done:
        rate = f"{each.cases / max(each.seconds, 1e-9):,.0f}"
        shown.add_row(each.target, f"{each.cases:,}", rate, str(len(each.failures)))
    told = [
        Text(
            f"\n{failure.kind}: python -m benchmarks fuzz --target {failure.target} --case {failure.case}\n"
            f"{failure.told.strip()}"
        )
        for each in done
        for failure in each.failures
    ]
    return Group(shown, *told)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
