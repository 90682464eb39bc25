"""Says what the side-by-side benchmark is asked to do, and sums up its runs: medians, and shares of N x P."""

from __future__ import annotations

import math
import os
import platform
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Literal

from mbaas.bench import SAMPLES
from mbaas.bench.host import RowRun
from mbaas.bench.peers import PEERS
from mbaas.bench.tasks import TASKS
from mbaas.errors import ConfigError

ROWS = ("prep", "prep-decoded", "memory", "dataloader", "dali", *PEERS, "mbaas", "mbaas-decoded")
"""All rows, in the order in which they are run and shown; "prep" is P, which the others are compared with."""

PREP_ROWS = ("prep", "prep-decoded")
"""Rows that run a process for each core, whatever the number of trials."""

READ_ROW = "memory"
"""The row of trials that only read: what the machine could carry if minibatches were there for nothing."""

DECODED_ROWS = ("prep-decoded", "mbaas-decoded")
"""Rows that keep samples decoded. All others have them encoded, and can be compared with older figures."""

GPU_ROWS = ("prep", "dataloader", "dali", "mbaas")
"""Rows that can be run on a GPU."""

USUAL_ROWS = tuple(row for row in ROWS if row not in PEERS)
"""Those that are run unless somebody says otherwise: they need nothing but mbaas[bench]."""


def usable_cores() -> int:
    """Return the number of CPUs that this process may run on: in a container fewer than the machine has."""
    return len(os.sched_getaffinity(0))


@dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """Options of `mbaas.bench.runner.run`; those that `mbaas bench` has are called the same there.

    Attributes:
        task: one of `mbaas.bench.tasks.TASKS`: "images", "detection" or "audio".
        data: the user's own: a folder with a folder of images, or of recordings, for each class; for detection a JSON
            file of COCO's instances. None makes `samples` of them (see `mbaas.bench.photos`, `mbaas.bench.objects` and
            `mbaas.bench.sounds`).
        image_folder: where the images of that JSON file are.
        cache_dir: where what was made is kept for the next time.
        samples: how many photographs or recordings to make.
        rows: which of `ROWS` to run. "prep" has to be one of them for the share of N x P.
        trials: numbers of trials N, each tried with each batch size.
        batch: numbers of samples in a minibatch.
        rounds: how often everything is run. The rows of a round run one after the other, so that what else the machine
            does meets all of them; results are medians over rounds.
        seconds: least length of each trial's timed window, which is whole epochs after a warm-up of the same length: by
            then every process has touched the memory that it uses again and again.
        epochs: if given, the window has exactly this many epochs instead.
        cores: CPUs that prep may use: prep workers of P and mbaas, threads of DALI, workers of the DataLoaders.
        gpu: whether DALI prepares on the first GPU, in as many workers for P as a feed has, and minibatches are
            delivered there. DataLoaders prepare on CPUs, and copy. Only `GPU_ROWS`, with images.
        dataloader_workers: worker processes of each trial's DataLoader; None: see
            `mbaas.bench.rows.dataloader.workers_for`.
        array: what an mbaas trial asks for: "numpy" are read-only views of shared memory, "torch" are private copies.
        peers_python: the interpreter of another environment, for peers that are not installed in this one.
        read: what trials read of their minibatches, in all rows: a byte of each page ("pages"), or "all".
        seed: order and transforms follow from it.
        timeout_s: a row that takes longer is stopped and reported as failed.

    Raises:
        ConfigError: an option out of range.
    """

    task: str = "images"
    data: Path | None = None
    image_folder: Path | None = None
    cache_dir: Path = field(default_factory=lambda: Path(tempfile.gettempdir()) / "mbaas-bench")
    samples: int = SAMPLES
    rows: tuple[str, ...] = USUAL_ROWS
    trials: tuple[int, ...] = (1, 4, 8)
    batch: tuple[int, ...] = (64, 256)
    rounds: int = 3
    seconds: float = 8.0
    epochs: int | None = None
    cores: int = field(default_factory=usable_cores)
    gpu: bool = False
    dataloader_workers: int | None = None
    array: Literal["torch", "numpy"] = "numpy"
    read: Literal["pages", "all"] = "pages"
    peers_python: Path | None = None
    seed: int = 0
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        self._check_choices()
        counts: dict[str, tuple[int, ...]] = {
            "samples": (self.samples,),
            "rounds": (self.rounds,),
            "cores": (self.cores,),
            "epochs": (1 if self.epochs is None else self.epochs,),
            "trials": self.trials,
            "batch": self.batch,
        }
        for name, values in counts.items():
            if not values or min(values) < 1:
                raise ConfigError(f"{name} must be at least 1, got {', '.join(map(str, values)) or 'nothing'}")
        # one refusal for each, with its own name: `mbaas bench` has an option for the first only
        if not 0 <= self.seconds < math.inf:
            raise ConfigError(f"seconds must be at least 0 and finite, got {self.seconds}")
        if not self.timeout_s > 0:
            raise ConfigError(f"timeout_s must be above 0, got {self.timeout_s}")
        if self.dataloader_workers is not None and self.dataloader_workers < 0:
            raise ConfigError(f"dataloader_workers must be 0 or more, got {self.dataloader_workers}")

    def _check_choices(self) -> None:
        if self.task not in TASKS:
            raise ConfigError(f"task must be one of {', '.join(TASKS)}, got {self.task}")
        if self.task == "detection" and self.data is not None and self.image_folder is None:
            raise ConfigError(f"image_folder must name the folder of the images that {self.data} tells of, got nothing")
        if self.image_folder is not None and (self.task != "detection" or self.data is None):
            raise ConfigError("image_folder is for task detection, beside data, which names the file that tells of it")
        unknown = [row for row in self.rows if row not in ROWS]
        if unknown or not self.rows:
            raise ConfigError(f"rows must be among {', '.join(ROWS)}, got {', '.join(unknown) or 'none'}")
        peers = [row for row in self.rows if row in PEERS]
        if peers and self.task != "images":
            raise ConfigError(f"task must be images where peers are run ({', '.join(peers)}), got {self.task}")
        if self.gpu and self.task != "images":
            raise ConfigError(f"task must be images on a GPU, got {self.task}")
        elsewhere = [row for row in self.rows if row not in GPU_ROWS]
        if self.gpu and elsewhere:
            raise ConfigError(f"rows must be among {', '.join(GPU_ROWS)} on a GPU, got {', '.join(elsewhere)}")
        if self.peers_python is not None and not os.access(self.peers_python, os.X_OK):
            raise ConfigError(
                f"peers_python must be a Python interpreter, got {self.peers_python}, which cannot be run"
            )
        if self.array not in ("torch", "numpy"):
            raise ConfigError(f"array must be 'torch' or 'numpy', got {self.array!r}")
        if self.read not in ("pages", "all"):
            raise ConfigError(f"read must be 'pages' or 'all', got {self.read!r}")


@dataclass(frozen=True)
class Machine:
    """The machine and the libraries with which figures were measured; without them a figure means little."""

    cpu: str = field(default_factory=lambda: _cpu_model())
    cpus: int = field(default_factory=lambda: os.cpu_count() or 1)
    memory_bytes: int = field(default_factory=lambda: os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    gpu: str = ""
    python: str = field(default_factory=platform.python_version)
    libraries: tuple[str, ...] = field(
        default_factory=lambda: tuple(f"{name} {version(name)}" for name in ("ray", "torch", "nvidia-dali-cuda120"))
    )
    when: str = field(default_factory=lambda: datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC"))


def _cpu_model() -> str:
    with Path("/proc/cpuinfo").open() as lines:
        return next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
        )


@dataclass(frozen=True)
class Round:
    """Rows that ran one after the other, for the same number of trials and batch size."""

    runs: tuple[RowRun, ...]

    @property
    def prep(self) -> RowRun | None:
        """The run of P; None if it was not asked for, or failed."""
        return self._run("prep")

    @property
    def prep_decoded(self) -> RowRun | None:
        """The run of P'; None as above."""
        return self._run("prep-decoded")

    @property
    def reading(self) -> RowRun | None:
        """The run of trials that only read; None as above."""
        return self._run(READ_ROW)

    def _run(self, row: str) -> RowRun | None:
        return next((run for run in self.runs if run.row == row and not run.error), None)


@dataclass(frozen=True)
class RowResult:
    """A row with N trials and a batch size, over all rounds.

    Attributes:
        row: one of `ROWS`.
        trials: N. P does not depend on it: its own row was run beside those with N trials.
        batch: samples in a minibatch.
        rounds: number of runs that succeeded; all medians are over them.
        samples_per_s: median of the delivered samples, summed over trials.
        share: median of samples/s divided by N x P of the same round; None where P is not known, and for rows that
            deliver nothing. What has decoded samples may be above 1.
        decoded_share: the same of N x P', for a row that has decoded samples; else None.
        cpu_share: median of P's CPU seconds a sample divided by N x this row's: the share of N x P that this row's
            CPU seconds allow. Other programs on the machine hardly change it. None as above.
        decoded_cpu_share: the same of N x P'; None as above.
        best_share: median of samples/s divided by the most that the machine could carry: by all cores preparing each
            sample once (P, or P' for a row that has decoded samples), and N trials reading it, one after the other.
            None where one of both is not known, and for rows that deliver nothing.
        best_cpu_share: the same by CPU seconds, as `cpu_share` is.
        cpu_s_per_1000: median CPU seconds, of all processes of the row, for 1,000 delivered samples.
        cores_by_kind: medians of the cores kept busy by each kind of process (see `mbaas.bench.cpu.kind_of`).
        trial_us: median CPU microseconds of a trial's own process for a sample.
        peak_bytes: median of the largest memory, in bytes; shared pages count once.
        spilled_bytes: the most that Ray wrote to disk in any run; anything but 0 means that staging was too large.
        epochs: how many were checked in all runs and trials.
        missing, repeated: samples that an epoch did not hold, or held again; summed over all runs and trials.
        errors: the errors of runs that failed.
    """

    row: str
    trials: int
    batch: int
    rounds: int
    samples_per_s: float
    share: float | None
    decoded_share: float | None
    cpu_share: float | None
    decoded_cpu_share: float | None
    best_share: float | None
    best_cpu_share: float | None
    cpu_s_per_1000: float
    cores_by_kind: tuple[tuple[str, float], ...]
    trial_us: float
    peak_bytes: int
    spilled_bytes: int
    epochs: int
    missing: int
    repeated: int
    errors: tuple[str, ...]

    @property
    def busy_cores(self) -> float:
        """Cores kept busy by all processes of the row."""
        return sum(cores for _, cores in self.cores_by_kind)

    @property
    def is_sound(self) -> bool:
        """Whether every run succeeded, each sample came exactly once in every epoch, and nothing was spilled."""
        return not (self.errors or self.missing or self.repeated or self.spilled_bytes)


@dataclass(frozen=True)
class BenchReport:
    """What came of the benchmark.

    Attributes:
        settings: what was asked.
        machine: where it ran.
        samples: how many there are in an epoch.
        results: one for each row, number of trials and batch size.
        peers: which peers were run, with their versions.
        left_out: why rows of peers were not run, a sentence each.
    """

    settings: BenchSettings
    machine: Machine
    samples: int
    results: tuple[RowResult, ...]
    peers: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()

    @property
    def is_sound(self) -> bool:
        """Whether every result is (see `RowResult.is_sound`), but for those of peers: what these lose is a finding."""
        return all(result.is_sound for result in self.results if result.row not in PEERS)


def summarize(rounds: Sequence[Round], trials: int) -> tuple[RowResult, ...]:
    """Sum up the rounds with N = ``trials`` and one batch size, in the order of `ROWS`."""
    rows = [row for row in ROWS if any(run.row == row for run in rounds[0].runs)]
    return tuple(_summarize_row(rounds, row, trials) for row in rows)


def _summarize_row(rounds: Sequence[Round], row: str, trials: int) -> RowResult:
    pairs = [(run, one) for one in rounds for run in one.runs if run.row == row]
    runs = [run for run, _ in pairs]
    good = [run for run in runs if not run.error]
    # each run against P of its own round: both met the machine in the same state
    delivering = [(run, one) for run, one in pairs if not run.error and row not in (*PREP_ROWS, READ_ROW)]
    against = [(run, one.prep) for run, one in delivering if one.prep]
    decoded = [(run, one.prep_decoded) for run, one in delivering if one.prep_decoded and row in DECODED_ROWS]
    reading = [
        (run, prep, one.reading)
        for run, one in delivering
        if one.reading and (prep := one.prep_decoded if row in DECODED_ROWS else one.prep)
    ]
    return RowResult(
        row=row,
        trials=trials,
        batch=runs[0].batch,
        rounds=len(good),
        samples_per_s=_median(run.samples_per_s for run in good),
        share=_median_or_none(_share(run, prep, trials) for run, prep in against),
        decoded_share=_median_or_none(_share(run, prep, trials) for run, prep in decoded),
        cpu_share=_median_or_none(_cpu_share(run, prep, trials) for run, prep in against),
        decoded_cpu_share=_median_or_none(_cpu_share(run, prep, trials) for run, prep in decoded),
        best_share=_median_or_none(_best(trials, prep, reads) * run.samples_per_s for run, prep, reads in reading),
        best_cpu_share=_median_or_none(
            (prep.cpu_s_per_1000 / trials + reads.cpu_s_per_1000) / run.cpu_s_per_1000 for run, prep, reads in reading
        ),
        cpu_s_per_1000=_median(run.cpu_s_per_1000 for run in good),
        cores_by_kind=_medians(good),
        trial_us=_median(run.trial_us for run in good),
        peak_bytes=int(_median(run.peak_bytes for run in good)),
        spilled_bytes=max((run.spilled_bytes for run in good), default=0),
        epochs=sum(run.epochs for run in good),
        missing=sum(run.missing for run in good),
        repeated=sum(run.repeated for run in good),
        errors=tuple(run.error for run in runs if run.error),
    )


def _best(trials: int, prep: RowRun, reading: RowRun) -> float:
    """Return the seconds that the machine takes at best for each sample that it delivers."""
    return 1 / (trials * prep.samples_per_s) + 1 / reading.samples_per_s


def _share(run: RowRun, prep: RowRun, trials: int) -> float:
    return run.samples_per_s / (trials * prep.samples_per_s)


def _cpu_share(run: RowRun, prep: RowRun, trials: int) -> float:
    return prep.cpu_s_per_1000 / (trials * run.cpu_s_per_1000)


def _medians(runs: Sequence[RowRun]) -> tuple[tuple[str, float], ...]:
    """Return the median cores of each kind of process, busiest first; a kind that a run lacks was not busy in it."""
    kinds = {kind for run in runs for kind, _ in run.cores_by_kind}
    medians = {kind: median(dict(run.cores_by_kind).get(kind, 0.0) for run in runs) for kind in kinds}
    return tuple(sorted(medians.items(), key=lambda item: -item[1]))


def _median_or_none(values: Iterable[float]) -> float | None:
    listed = list(values)
    return median(listed) if listed else None


def _median(values: Iterable[float]) -> float:
    """Return the median, or 0 where no run succeeded."""
    return _median_or_none(values) or 0.0
