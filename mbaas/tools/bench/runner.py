"""Runs the rows of the benchmark, interleaved, round by round."""

from __future__ import annotations

from dataclasses import replace

from mbaas.base import units
from mbaas.base.units import counted
from mbaas.errors import ConfigError
from mbaas.prep.engines import workers_per_gpu
from mbaas.tools.bench.host import RowRun, run_row
from mbaas.tools.bench.peers import PEERS, find_peers
from mbaas.tools.bench.report import BenchReport, Machine, Round, summarize
from mbaas.tools.bench.rows import PREP_ROWS, BenchSettings, RowSpec
from mbaas.tools.bench.tasks import TASKS
from mbaas.tools.bench.tasks.base import Data, Report


def run(settings: BenchSettings, report: Report = print) -> BenchReport:
    """Measure all rows side by side.

    Errors of rows that fail are in the report. A peer that fails is not run again with the same number of trials and
    batch size.

    Raises:
        ConfigError: ``settings.peers_python`` is not a Python interpreter; or no GPU is found, and one is requested.
        DatasetError: no samples can be generated, or ``settings.data`` has none for the task.
    """
    machine = Machine(gpu=gpu_name() if settings.gpu else "")
    data = find_data(settings, report)
    samples = len(TASKS[settings.task].samples(data).files)
    found, left_out = find_peers(settings.rows, settings.peers_python)
    for sentence in left_out:
        report(sentence)
    rows = [row for row in settings.rows if row in found or row not in PEERS]
    points = [(trials, batch) for trials in settings.trials for batch in settings.batch]
    rounds: dict[tuple[int, int], list[Round]] = {point: [] for point in points}
    given_up: set[tuple[str, int, int]] = set()
    # rounds are the outer loop, so that changes over minutes affect all points equally
    for number in range(1, settings.rounds + 1):
        for trials, batch in points:
            runs = []
            for row in rows:
                if (row, trials, batch) in given_up:
                    continue
                spec = row_spec(settings, data, row, trials, batch)
                if row in found:
                    spec = replace(spec, python=found[row].python)
                runs.append(run_row(spec))
                report(f"round {number}/{settings.rounds}, {_described(runs[-1], settings)}")
                if row in PEERS and runs[-1].error:
                    given_up.add((row, trials, batch))  # a second hang would take minutes again
            rounds[trials, batch].append(Round(tuple(runs)))
    results = [result for (trials, _), some in rounds.items() for result in summarize(some, trials, settings.pipelines)]
    peers = tuple(each.version for each in found.values())
    return BenchReport(settings, machine, samples, tuple(results), peers, left_out)


def find_data(settings: BenchSettings, report: Report = print) -> Data:
    """Return the location of the samples, which are generated unless the user provides data; raise as `run` does."""
    task = TASKS[settings.task]
    if settings.data is not None:
        return task.find(settings.data, settings.image_folder)
    return task.make(settings.cache_dir, settings.samples, seed=settings.seed, report=report)


def row_spec(settings: BenchSettings, data: Data, row: str, trials: int, batch: int) -> RowSpec:
    """Return the specification of one run of ``row`` with N = ``trials``.

    P and P' run one process per core, or on a GPU as many as a feed has, for any N.
    """
    alone = workers_per_gpu(TASKS[settings.task].pipeline()) if settings.gpu else settings.cores
    return RowSpec(settings, row, alone if row in PREP_ROWS else trials, data, batch)


def gpu_name() -> str:
    """Return the name of the first GPU; raise ConfigError if torch finds none."""
    import torch

    if not torch.cuda.is_available():
        raise ConfigError(f"a GPU is asked for, but torch {torch.__version__} finds no CUDA device on this machine")
    return torch.cuda.get_device_name(0)


def _described(run: RowRun, settings: BenchSettings) -> str:
    alone = "worker" if settings.gpu else "core"
    noun = alone if run.row in PREP_ROWS else "trial"
    what = f"{run.row}, {counted(run.trials, noun)}, batches of {run.batch}"
    if run.error:
        return f"{what}: failed: {run.error.strip().splitlines()[-1]}"
    return f"{what}: {units.count(run.samples_per_s)} samples/s, {units.number(run.cpu_s_per_1000)} CPU-s per 1,000"
