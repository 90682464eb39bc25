"""Runs a search under faults on a separate cluster, from the first node to the report."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from mbaas.base.units import counted, seconds
from mbaas.coordinator.background import BROKEN
from mbaas.errors import (
    ConfigError,
    FeedFailedError,
    FeedNotFoundError,
    FeedRestartingError,
    MbaasError,
    WaitTimeoutError,
)
from mbaas.feed import connect
from mbaas.ray_cluster import actor_names
from mbaas.ray_cluster.bugs import INTERNAL_ERROR
from mbaas.tools.chaos import records, search, usage
from mbaas.tools.chaos.injector import CPUS, Injector
from mbaas.tools.chaos.network import Network, why_not
from mbaas.tools.chaos.nodes import FAST_DETECTION, Nodes, address_kept_in, environment, own_token
from mbaas.tools.chaos.plan import OF_LINKS, OF_OUR_SEARCH, Fault, chosen_kinds, plan
from mbaas.tools.chaos.records import Incarnation
from mbaas.tools.chaos.report import Checked, Report, check_records, kinds_of
from mbaas.tools.chaos.usage import Usage

NODES = 2
"""Nodes besides the head, before the first fault."""

WARM_UP_S = 60.0
"""Longest wait for the trials' first minibatches, before the first fault."""

HUNG_S = 120.0
"""Time without a record after which a trial counts as hung; several times the longest fault."""

HOLD_S = 30.0
"""Faults pause while a trial has recorded nothing for this long, since nodes may die faster than they are replaced."""

CALM_S = 150.0
"""Longest wait for trials to end their epochs after the last fault."""

HASTE_S = 10.0
"""The same after Ctrl-C, and for a command to end."""

LOOK_S = 0.05
USAGE_S = 3.0
"""Seconds between checks for due actions, and between measurements of resource use."""

POLL_S = 5.0
"""Pause between polls of feeds; a poll may take longer while a coordinator is away."""

GONE_S = 15.0
"""Time after the end at which remaining processes count as left behind."""

RUN = "MBAAS_CHAOS_RUN"
"""Environment variable that identifies the processes of a run."""

ENVIRONMENT = {
    **FAST_DETECTION,
    "RAY_health_check_timeout_ms": "1000",
    "RAY_free_objects_period_milliseconds": "20",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "REPORTER_UPDATE_INTERVAL_MS": "60000",  # otherwise Ray examines each of its processes every 5 s
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "MBAAS_VALIDATE": "1",
}
"""Settings of the cluster, for a single machine. Coordinators validate their own state."""

Say = Callable[[str], None]


@dataclass(frozen=True)
class ChaosSettings:
    """Settings of a run.

    Attributes:
        seed, faults: determine the plan, with the number of its faults.
        every_s: mean seconds between faults.
        kinds: patterns of kinds, such as ``kill-*``; empty for all kinds possible here.
        ranks: ranks of a data-parallel trial that reads the feed next to the others, while newcomers join mid-epoch; 0
            for none.
        with_pipelines: whether readers bring pipelines of their own.
        command: program and arguments to run instead of the default search, on the cluster in RAY_ADDRESS.
    """

    seed: int = 0
    faults: int = 20
    every_s: float = 6.0
    kinds: tuple[str, ...] = ()
    ranks: int = 0
    with_pipelines: bool = False
    command: tuple[str, ...] = ()

    def plan(self) -> tuple[Fault, ...]:
        """Draw the faults. Raises ConfigError, also for a kind that is not possible here."""
        if self.ranks == 1 or self.ranks < 0:
            raise ConfigError(f"--ranks must be 0 or at least 2, got {self.ranks}")
        if self.ranks and self.command:
            raise ConfigError(f"--ranks {self.ranks} is for the search that runs without a command")
        if self.with_pipelines and self.command:
            raise ConfigError("--pipelines is for the search that runs without a command")
        kinds = chosen_kinds(self.kinds or ("*",))
        named = chosen_kinds([pattern for pattern in self.kinds if pattern != "*"])
        for impossible, reason in (
            (OF_OUR_SEARCH, "a program serves a feed of its own" if self.command else None),
            (OF_LINKS, why_not() if set(kinds) & set(OF_LINKS) else None),
        ):
            if reason is not None:
                if wrong := [kind for kind in named if kind in impossible]:
                    raise ConfigError(f"--kinds has {' and '.join(wrong)}, which cannot happen here: {reason}")
                kinds = tuple(kind for kind in kinds if kind not in impossible)
        return plan(self.seed, faults=self.faults, every_s=self.every_s, kinds=kinds)


def run(settings: ChaosSettings, say: Say) -> Report:
    """Run a search under faults. Ctrl-C ends it early with a report of the results so far.

    Raises:
        ConfigError: an invalid setting.
        MbaasError: the search did not start.
    """
    faults = settings.plan()
    shared, mark = usage.shared_files(), uuid.uuid4().hex
    # In /tmp regardless of TMPDIR: Ray's sockets are inside, and their paths have at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="chaos-", dir="/tmp"))
    report = None
    try:
        with (
            environment({**ENVIRONMENT, RUN: mark, **address_kept_in(str(folder))}),
            own_token(),
            (folder / "ray.out").open("w") as told,
            contextlib.redirect_stdout(told),  # Ray's driver writes pages about each death to stdout
        ):
            report = _Run(settings, faults, folder, mark, say).run()
    finally:
        left = _end_what_is_left(mark) + [f"/dev/shm/{each}" for each in sorted(usage.shared_files() - shared)]
        if report is None or (report.is_sound and not report.bugs):
            shutil.rmtree(folder, ignore_errors=True)
    report.left_behind, report.kept = tuple(left), str(folder) if folder.exists() else None
    return report


class FeedWatch:
    """A thread that polls all feeds during faults and writes their notes to the file ``log``.

    `inexact` is feed -> epochs that were not exact according to the loaders' ledgers.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._noted: dict[str, None] = {}
        self._failed: dict[str, str] = {}
        self._away: dict[str, str] = {}  # feeds that did not answer the last poll; they may restart
        self.inexact: dict[str, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mbaas-chaos-watch", daemon=True)

    @property
    def ended(self) -> tuple[str, ...]:
        """A message for each feed that failed, or was missing at the last poll."""
        return tuple((self._away | self._failed).values())

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """A hanging poll is abandoned."""
        self._stop.set()
        self._thread.join(POLL_S)

    def poll(self, name: str) -> None:
        try:
            status = connect(name).status()
        except FeedRestartingError:
            return
        except (FeedNotFoundError, FeedFailedError) as error:
            self._away[name] = f"feed {name!r}: {error}"
            return
        self._away.pop(name, None)
        self._write(f"{name}: {note}" for note in status.notes)
        if status.failed:
            self._failed[name] = f"feed {name!r}: {status.failed}"
        self.inexact[name] = max(self.inexact.get(name, 0), status.inexact_epochs)

    def _write(self, notes: Iterable[str]) -> None:
        new = [note for note in notes if note not in self._noted]
        self._noted.update(dict.fromkeys(new))
        with self._log.open("a") as log:
            log.writelines(f"{note}\n" for note in new)

    def _run(self) -> None:
        while not self._stop.wait(POLL_S):
            # Any exception: Ray may be shut down under this thread, and has no specific class for that.
            with contextlib.suppress(Exception):
                for name in actor_names.feed_names():
                    with contextlib.suppress(MbaasError):
                        self.poll(name)


class _Run:
    def __init__(self, settings: ChaosSettings, faults: Sequence[Fault], folder: Path, mark: str, say: Say) -> None:
        self._settings, self._faults, self._folder, self._mark, self._say = settings, faults, folder, mark, say
        self._records = folder / "records"
        self._records.mkdir()
        self._usage: list[Usage] = []
        self._watch = FeedWatch(folder / "feeds.log")
        self.report = Report(settings.seed)

    def run(self) -> Report:
        has_links = any(fault.kind in OF_LINKS for fault in self._faults)
        with self._cluster("faults", NODES, Network if has_links else Nodes) as nodes:
            injector = Injector(nodes, self._say)
            try:
                (self._run_command if self._settings.command else self._run_search)(nodes, injector)
            except KeyboardInterrupt:
                self.report.was_interrupted = True
        report, incarnations = self.report, records.read(self._records)
        report.checked = self._checked(incarnations)
        report.kinds = kinds_of(self._faults, injector.log, incarnations)
        report.feeds_ended, report.inexact_epochs = self._watch.ended, sum(self._watch.inexact.values())
        report.bugs, report.growth = _bugs(self._folder), tuple(usage.growth(self._usage))
        return report

    @contextlib.contextmanager
    def _cluster(self, name: str, count: int, kind: type[Nodes] = Nodes) -> Iterator[Nodes]:
        self._say(f"starting a Ray cluster with {counted(count, 'node')}")
        nodes = kind(str(self._folder / name))
        try:
            nodes.connect()
            for _ in range(count):
                nodes.add(CPUS)
            yield nodes
        finally:
            nodes.end()

    def _checked(self, incarnations: Mapping[str, Sequence[Incarnation]]) -> Checked:
        """Check the trials' records. After Ctrl-C, which may also arrive in here, the fault-free run is omitted."""
        references = None
        deliveries = [step.delivery for each in incarnations.values() for process in each for step in process.steps]
        if deliveries and not self.report.was_interrupted:
            epochs = 1 + max(each.epoch + bool(each.begin) for each in deliveries)
            pipelines = sorted({each.pipeline for each in deliveries})
            try:
                # Afterwards, on a separate cluster: next to the faults it would also be hit.
                with self._cluster("calm", 1):
                    with_each = f", with each of {len(pipelines)} pipelines" if len(pipelines) > 1 else ""
                    self._say(f"the same without faults: {counted(epochs, 'epoch')}{with_each}")
                    references = {
                        number: search.reference(self._folder / f"reference-{number}", self._data, epochs, number)
                        for number in pipelines
                    }
            except KeyboardInterrupt:
                self.report.was_interrupted = True
        return check_records(incarnations, references, samples=search.SAMPLES)

    # ---- searches under faults ----

    def _run_search(self, nodes: Nodes, injector: Injector) -> None:
        self._data = search.dataset(self._folder)
        readers = search.readers(self._settings.ranks, with_pipelines=self._settings.with_pipelines)
        with search.Server(self._folder, nodes.address) as injector.server:
            trials = search.Trials(self._records, readers)
            self._wait_for_trials(len(readers))
            try:
                self._strike(injector, lambda: not self.report.hung)
            except KeyboardInterrupt:
                self.report.was_interrupted = True
                self._say("interrupted; trials end, a moment for the report")
            # Undo all faults before trials are judged: a trial that waits for a paused process is not hung.
            injector.undo_what_is_due(all_of_it=True)
            patience_s = HASTE_S if self.report.was_interrupted or self.report.hung else CALM_S
            late = trials.stop(patience_s, injector.undo_what_is_due)
            if late and not self.report.was_interrupted:
                did_not = f"did not end an epoch within {seconds(patience_s)} after the faults"
                self.report.hung += (f"{counted(late, 'trial')} {did_not}",)
            self._watch.poll(search.FEED)

    def _run_command(self, nodes: Nodes, injector: Injector) -> None:
        command = self._settings.command
        variables = {**os.environ, "RAY_ADDRESS": nodes.address}
        try:  # stdout is reserved for --json
            process = subprocess.Popen(command, env=variables, stdout=sys.stderr, start_new_session=True)
        except OSError as error:
            raise ConfigError(f"cannot run {command[0]!r}: {error.strerror}") from None
        try:
            while not actor_names.feed_names() and process.poll() is None:
                time.sleep(LOOK_S)
            self._strike(injector, lambda: process.poll() is None)
            self._say("no more faults; the command goes on to its end")
            while process.poll() is None:
                injector.undo_what_is_due()
                time.sleep(LOOK_S)
            self.report.command_code = process.returncode
        finally:
            injector.undo_what_is_due(all_of_it=True)
            _end(process)

    def _strike(self, injector: Injector, goes_on: Callable[[], bool]) -> None:
        began = time.monotonic()
        held_s, looked_at, waits = 0.0, began, False
        self._watch.start()
        try:
            for number, fault in enumerate(self._faults, 1):
                # A hold delays all later faults; otherwise they would all happen at its end.
                while (waits or time.monotonic() < began + held_s + fault.at_s) and goes_on():
                    injector.undo_what_is_due()
                    if (passed_s := time.monotonic() - looked_at) >= USAGE_S:
                        looked_at += passed_s
                        held_s += passed_s if waits else 0.0
                        waits = self._look()
                    time.sleep(LOOK_S)
                if not goes_on():
                    break
                injected = injector.inject(fault)
                self._say(f"{injected.at - began:7.1f} s  {number}/{len(self._faults)}  {injected}")
        finally:
            self._watch.stop()
            self.report.seconds = time.monotonic() - began

    def _look(self) -> bool:
        self._usage.append(Usage.now([os.getpid(), *usage.pids_with(RUN, self._mark)]))
        newest: dict[str, float] = {}
        # From file times, because hung trials would not respond to calls.
        for path in self._records.iterdir():
            if path.suffix == records.SUFFIX:
                trial = path.name.partition(".")[0]
                newest[trial] = max(newest.get(trial, 0.0), path.stat().st_mtime)
        waits_s = {trial: time.time() - at for trial, at in newest.items()}
        hung = [trial for trial, wait_s in waits_s.items() if wait_s > HUNG_S]
        self.report.hung += tuple(f"{trial} got nothing for {seconds(HUNG_S)}" for trial in hung)
        return any(wait_s > HOLD_S for wait_s in waits_s.values())

    def _wait_for_trials(self, count: int) -> None:
        """Wait until each trial has a minibatch, so that faults do not hit the feed's startup."""
        end = time.monotonic() + WARM_UP_S
        while True:
            found = records.read(self._records).items()
            if len({name.partition(".")[0] for name, each in found if any(process.steps for process in each)}) >= count:
                return
            if time.monotonic() > end:
                raise WaitTimeoutError(
                    f"waited {seconds(WARM_UP_S)} for a first minibatch of each of {count} trials, before any fault"
                )
            time.sleep(LOOK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGINT, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(HASTE_S)


def _end_what_is_left(mark: str) -> list[str]:
    """Kill processes of the run that remain after `GONE_S`, and return their descriptions."""
    end = time.monotonic() + GONE_S
    # Found by environment variable: Ray's processes outlive their parents, and no complete list exists.
    while (pids := set(usage.pids_with(RUN, mark)) - {os.getpid()}) and time.monotonic() < end:
        time.sleep(LOOK_S)
    said = []
    for pid in pids:
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            said.append(f"process {pid}, {' '.join(process.cmdline())[:80]}")
            process.kill()
    return said


def _bugs(folder: Path) -> tuple[str, ...]:
    found = []
    for log in sorted(folder.glob("faults/session_*/logs/worker-*.err")):
        lines = log.read_text(errors="replace").splitlines()
        for at, line in enumerate(lines):
            if INTERNAL_ERROR in line or BROKEN in line:
                raised = [text for text in lines[at + 1 : at + 200] if text and not text[0].isspace()]
                found.append(f"{log.name}: {' '.join([line, *raised[1:2]])}")
    return tuple(found)
