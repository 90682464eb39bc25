"""Runs the rows of the benchmark, interleaved, round by round."""

from __future__ import annotations

from collections.abc import Iterator

from mbaas import units
from mbaas.bench.host import RowRun, RowSpec, run_row
from mbaas.bench.report import BenchReport, BenchSettings, Machine, Round, summarize
from mbaas.bench.rows import TrialSpec
from mbaas.bench.rows.dataloader import workers_for
from mbaas.bench.tasks import TASKS
from mbaas.bench.tasks.base import Data, Report
from mbaas.bench.trial import Window
from mbaas.units import counted


def run(settings: BenchSettings, report: Report = print) -> BenchReport:
    """Measure all rows side by side.

    A row that fails does not end the benchmark: its error is in the report.

    Raises:
        DatasetError: no samples can be made, or ``settings.data`` has none of the task.
    """
    data = find_data(settings, report)
    samples = len(TASKS[settings.task].samples(data).files)
    points = [(trials, batch) for trials in settings.trials for batch in settings.batch]
    rounds: dict[tuple[int, int], list[Round]] = {point: [] for point in points}
    # rounds outside: what changes on the machine in the course of minutes meets all points alike
    for number in range(1, settings.rounds + 1):
        for trials, batch in points:
            runs = _run_rows(settings, data, trials, batch, f"round {number}/{settings.rounds}", report)
            rounds[trials, batch].append(Round(tuple(runs)))
    results = [result for (trials, _), some in rounds.items() for result in summarize(some, trials)]
    return BenchReport(settings, Machine(), samples, tuple(results))


def find_data(settings: BenchSettings, report: Report = print) -> Data:
    """Return where the samples are that are benchmarked; they are made if they are not the user's own.

    Raises:
        DatasetError: as `run`.
    """
    task = TASKS[settings.task]
    if settings.data is not None:
        return task.find(settings.data, settings.image_folder)
    return task.make(settings.cache_dir, settings.samples, seed=settings.seed, report=report)


def _run_rows(
    settings: BenchSettings, data: Data, trials: int, batch: int, label: str, report: Report
) -> Iterator[RowRun]:
    for row in settings.rows:
        run = run_row(row_spec(settings, data, row, trials, batch))
        report(f"{label}, {_described(run)}")
        yield run


def row_spec(settings: BenchSettings, data: Data, row: str, trials: int, batch: int) -> RowSpec:
    """Describe one run of ``row`` with N = ``trials``; P runs one process for each core, whatever N is."""
    processes = settings.cores if row == "prep" else trials
    workers = settings.dataloader_workers
    trial = TrialSpec(
        row=row,
        trial=0,
        trials=processes,
        task=TASKS[settings.task],
        data=data,
        batch=batch,
        cores=settings.cores,
        seed=settings.seed,
        workers=workers_for(settings.cores, trials) if workers is None else workers,
        array=settings.array,
    )
    return RowSpec(trial, processes, Window(settings.seconds, settings.epochs), settings.timeout_s)


def _described(run: RowRun) -> str:
    noun = "core" if run.row == "prep" else "trial"
    what = f"{run.row}, {counted(run.trials, noun)}, batches of {run.batch}"
    if run.error:
        return f"{what}: failed: {run.error.strip().splitlines()[-1]}"
    return f"{what}: {units.count(run.samples_per_s)} samples/s, {units.number(run.cpu_s_per_1000)} CPU-s per 1,000"
