"""``python -m benchmarks``: the commands and their help. Commands import their modules when they run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_args

import typer

from mbaas.base.units import WANTED_BYTES_PER_S, parse_bytes_per_s
from mbaas.cli.bench import check_installed, numbers
from mbaas.cli.console import AsJson, command, end_as_ctrl_c, err, group, line, out, write_result
from mbaas.errors import ConfigError, MbaasError
from mbaas.tools.bench import SAMPLES

# Otherwise Ctrl-C ends the running search as if it were finished, and the next measurement begins.
os.environ.setdefault("TUNE_DISABLE_SIGINT_HANDLER", "1")

app = group(name="python -m benchmarks")

Found = TypeVar("Found")

Data = Annotated[
    Path | None,
    typer.Option(
        help="Your own class-per-folder images instead of generated photographs.", metavar="DIR", show_default=False
    ),
]
Images = Annotated[int, typer.Option(help="Number of generated photographs, without --data.")]
Rounds = Annotated[int, typer.Option(help="Repetitions; results are medians.", min=1)]
Trials = Annotated[int, typer.Option(help="Trials of a search.")]
Slots = Annotated[int, typer.Option(help="Concurrent trials.")]
StepMs = Annotated[float, typer.Option(help="Milliseconds of a training step.")]
Cores = Annotated[int | None, typer.Option(help="CPUs to use. Default: all.", show_default=False)]
Processes = Annotated[int | None, typer.Option(help="Default: one for each core.", show_default=False)]


@app.callback()
def benchmarks() -> None:
    """Measurements, fuzzing and proofs for developers of mbaas. For users there is `mbaas bench`."""


@command(app)
def bookkeeping(as_json: AsJson = False) -> None:
    """Measure the cost of sample order and bookkeeping for 10^3 to 10^8 samples, without files, pixels and Ray.

    Examples:
        python -m benchmarks bookkeeping
    """
    from benchmarks.bookkeeping import measure, table

    _show(measure, table, as_json)


@command(app)
def pipelines(
    samples: Annotated[int, typer.Option(help="Number of generated images.")] = 40_000,
    cached: Annotated[float, typer.Option(help="Share of the samples that the cache holds for the reads.")] = 0.5,
    staged: Annotated[float, typer.Option(help="Staging memory, as a share of a prepared epoch.")] = 0.25,
    numbers_of: Annotated[str, typer.Option("--pipelines", help="Pipelines at a time.", metavar="N,N")] = "1,2,4",
    epochs: Annotated[int, typer.Option(help="Epochs of each trial.", min=2)] = 5,
    as_json: AsJson = False,
) -> None:
    """Measure trials with pipelines of their own: reads from storage, equal pipelines, an expensive one.

    Examples:
        python -m benchmarks pipelines
    """
    from benchmarks.pipelines import measure, table

    sizes = numbers("--pipelines", numbers_of)
    _show(
        lambda: measure(samples=samples, cached=cached, staged=staged, pipelines=sizes, epochs=epochs), table, as_json
    )


@command(app)
def draws(
    samples: Annotated[int, typer.Option(help="Number of generated images, and of draws in an epoch.")] = 20_000,
    cached: Annotated[str, typer.Option(help="Shares of the samples that the cache holds.", metavar="X,X")] = "0.1",
    warm: Annotated[int, typer.Option(help="Epochs that fill the cache.", min=1)] = 5,
    epochs: Annotated[int, typer.Option(help="Epochs that are measured.", min=1)] = 2,
    as_json: AsJson = False,
) -> None:
    """Measure what a cache reads from storage that knows how often each sample is drawn, and one that does not.

    Examples:
        python -m benchmarks draws
    """
    from benchmarks.draws import measure, table

    shares = _shares("--cached", cached)
    _show(lambda: measure(samples=samples, cached=shares, warm=warm, epochs=epochs), table, as_json)


@command(app)
def threads(
    feeds: Annotated[
        str | None, typer.Option(help="Feeds. Default: all.", metavar="NAME,NAME", show_default=False)
    ] = None,
    divisions: Annotated[
        str | None, typer.Option(help="Divisions of threads. Default: all.", metavar="NAME,NAME", show_default=False)
    ] = None,
    images: Images = 400,
    half: Annotated[float, typer.Option(help="Seconds of each half of a run.", min=1)] = 20.0,
    rounds: Rounds = 3,
    as_json: AsJson = False,
) -> None:
    """Measure divisions of threads between reading storage and preparing, with two ranks.

    Examples:
        python -m benchmarks threads --feeds "storage slow" --rounds 1
    """
    check_installed()
    from benchmarks.threads import DIVISIONS, FEEDS, measure, table
    from mbaas.tools.bench.rows import BenchSettings

    options: Any = {
        "feeds": _some_of("--feeds", feeds or ",".join(FEEDS), tuple(FEEDS)),
        "divisions": _some_of("--divisions", divisions or ",".join(DIVISIONS), tuple(DIVISIONS)),
        "images": images,
        "half_s": half,
        "rounds": rounds,
        "cache_dir": BenchSettings().cache_dir,
    }
    _show(lambda: measure(**options, tell=_progress), table, as_json)


@command(app)
def page_cache(
    samples: Annotated[int, typer.Option(help="Number of samples, of 110 kB on average.")] = 4_000,
    cached: Annotated[
        str, typer.Option(help="Shares of the data that the page cache has room for.", metavar="S,S")
    ] = "0.35,0.5,0.65,0.8",
    threads: Annotated[str, typer.Option(help="Numbers of readers.", metavar="N,N")] = "1,4",
    trials: Annotated[
        str,
        typer.Option(help="Numbers of trials, each with orders of its own; several read files only.", metavar="N,N"),
    ] = "1,4",
    epochs: Annotated[int, typer.Option(help="Epochs of each run; the first three do not count.", min=4)] = 13,
    folder: Annotated[
        Path | None,
        typer.Option(help="Folder on the disk to read. Default: temporary files.", metavar="DIR", show_default=False),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of sample sizes and orders.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Measure the hit rate of the page cache in random orders, in a memory cgroup, against the model.

    Examples:
        python -m benchmarks page-cache --cached 0.35,0.65
    """
    from benchmarks.page_cache.measure import figures, measure, table

    options: Any = {
        "samples": samples,
        "shares": _shares("--cached", cached),
        "threads": numbers("--threads", threads),
        "trials": numbers("--trials", trials),
        "epochs": epochs,
        "folder": folder,
        "seed": seed,
    }
    _show(lambda: measure(**options, tell=_progress), table, as_json, figures)


@command(app)
def ready(
    batch: Annotated[str, typer.Option(help="Samples in a minibatch.", metavar="N,N")] = "64",
    rounds: Rounds = 7,
    data: Data = None,
    images: Images = SAMPLES,
    cores: Cores = None,
    as_json: AsJson = False,
) -> None:
    """Measure the cost of a loader to a trial whose data is always ready, against a loop over memory.

    Examples:
        python -m benchmarks ready --batch 64 --rounds 7
    """
    check_installed()
    from benchmarks.ready import Readiness, measure, table
    from mbaas.tools.bench.rows import BenchSettings, usable_cores
    from mbaas.tools.bench.runner import find_data

    sizes, cores = numbers("--batch", batch), usable_cores() if cores is None else cores
    settings = BenchSettings(data=data, samples=images, batch=sizes, rounds=rounds, cores=cores)

    def measured() -> list[Readiness]:
        folder = find_data(settings, _progress).folder
        each = {"cores": cores, "rounds": rounds, "seed": settings.seed}
        return [result for size in sizes for result in measure(folder, batch=size, **each)]

    _show(measured, table, as_json, lambda results: [{**asdict(each), "loss": each.loss} for each in results])


@command(app)
def first(
    images: Annotated[int, typer.Option(help="Number of images, of 8x8 pixels.")] = 200_000,
    rounds: Rounds = 5,
    as_json: AsJson = False,
) -> None:
    """Measure the time to the first minibatch of many small files: list, serve, read.

    Examples:
        python -m benchmarks first --images 200000
    """
    from benchmarks.first import measure, table

    _show(lambda: measure(images=images, rounds=rounds), table, as_json)


@command(app)
def one_trial(
    data: Data = None,
    images: Images = SAMPLES,
    window: Annotated[float, typer.Option(help="Seconds of each row.", min=0.1)] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Measure where the time of one trial goes with the dali engine, on the first GPU, beside DALI alone.

    Without a GPU it uses DALI's CPU operators, which only tests the command.

    Examples:
        python -m benchmarks one-trial
    """
    check_installed()
    import torch

    from benchmarks.one_trial import measure, table
    from mbaas.tools.bench.rows import BenchSettings
    from mbaas.tools.bench.runner import find_data

    found = find_data(BenchSettings(data=data, samples=images), _progress)
    gpu = torch.cuda.is_available()
    _show(lambda: measure(found, gpu=gpu, window_s=window, tell=_progress), table, as_json)


@command(app)
def searches(
    schedulers: Annotated[str, typer.Option(help="Schedulers.", metavar="NAME,NAME")] = "FIFO,ASHA,HyperBand,PBT",
    trials: Trials = 9,
    slots: Slots = 3,
    step_ms: StepMs = 20.0,
    starts: Annotated[
        str, typer.Option(help="Start of a trial in a feed, or a separate DataLoader.", metavar="START,START")
    ] = "epoch,now,dataloader",
    side: Annotated[int, typer.Option(help="Height and width of an image; large ones take longer to prepare.")] = 64,
    rounds: Rounds = 1,
    as_json: AsJson = False,
) -> None:
    """Measure sharing in searches by Ray Tune's schedulers, with trials that join, pause, resume and are cloned.

    Examples:
        python -m benchmarks searches --schedulers FIFO,ASHA,HyperBand,PBT
    """
    from benchmarks.searches import SCHEDULERS, Way, measure, table

    names = _some_of("--schedulers", schedulers, tuple(SCHEDULERS))
    ways = cast("tuple[Way, ...]", _some_of("--starts", starts, get_args(Way)))
    options: Any = {"trials": trials, "slots": slots, "step_s": step_ms / 1e3, "side": side, "rounds": rounds}
    _show(lambda: measure(schedulers=names, ways=ways, **options), table, as_json)


@command(app)
def costs(
    images: Images = SAMPLES,
    trials: Trials = 16,
    slots: Slots = 4,
    step_ms: StepMs = 50.0,
    rounds: Rounds = 3,
    cores: Cores = None,
    as_json: AsJson = False,
) -> None:
    """Compare a whole ASHA search over photographs with mbaas and with DataLoaders: time, CPU time, samples.

    Examples:
        python -m benchmarks costs --trials 32
    """
    check_installed()
    from benchmarks.costs import figures, measure, table
    from mbaas.tools.bench.rows import usable_cores

    cores = usable_cores() if cores is None else cores
    options: Any = {"trials": trials, "slots": slots, "step_s": step_ms / 1e3, "rounds": rounds, "cores": cores}
    _show(lambda: measure(images=images, **options, tell=_progress), table, as_json, figures)


@command(app)
def accuracy(
    seeds: Annotated[int, typer.Option(help="Searches of each kind.", min=2)] = 5,
    trials: Trials = 12,
    epochs: Annotated[int, typer.Option(help="Epochs of the longest trial.")] = 12,
    as_json: AsJson = False,
) -> None:
    """Measure the effect of starting in mid-epoch on accuracy: small searches over real images, several seeds.

    Examples:
        python -m benchmarks accuracy --seeds 5
    """
    from benchmarks.accuracy import measure, table

    _show(lambda: measure(seeds=seeds, trials=trials, epochs=epochs), table, as_json)


@command(app)
def nodes(
    nodes: Annotated[str, typer.Option(help="Numbers of nodes of the local clusters.", metavar="N,N")] = "1,2,4",
    storage: Annotated[str, typer.Option(help="Storage bandwidth of each node.", metavar="RATE")] = "8 MB/s",
    cache_share: Annotated[
        str, typer.Option(help="Capacity of all caches together, as fractions of the images.", metavar="S,S")
    ] = "1,0.5",
    data: Data = None,
    images: Images = 400,
    as_json: AsJson = False,
) -> None:
    """Compare nodes that share a feed with nodes that load alone, on local clusters with storage of a fixed speed.

    Examples:
        python -m benchmarks nodes --nodes 1,2,4 --storage "8 MB/s"
    """
    check_installed()
    from benchmarks.nodes.report import NodesSettings, figures, tables
    from benchmarks.nodes.runs import run

    settings = NodesSettings(
        data=data,
        images=images,
        nodes=numbers("--nodes", nodes),
        cache_shares=_shares("--cache-share", cache_share),
        storage_bytes_per_s=_rate("--storage", storage),
    )
    report = _show(lambda: run(settings, _progress), tables, as_json, figures)
    if not report.is_sound:
        faults = [fault for result in report.results for fault in result.faults]
        raise MbaasError(f"the benchmark is not sound: {'; '.join(faults)}")


@command(app)
def predictions(images: Images = 1000, rounds: Rounds = 2, as_json: AsJson = False) -> None:
    """Grade the predictions of `mbaas analyze`: measure once, then run other storage, nodes, networks and pipelines.

    Takes about 20 minutes, needs root rights for the networks, and a machine with nothing else running.

    Examples:
        python -m benchmarks predictions
    """
    check_installed()
    from benchmarks.predictions.points import figures, table
    from benchmarks.predictions.runs import run
    from mbaas.tools.bench.rows import BenchSettings

    options: Any = {"cache_dir": BenchSettings().cache_dir, "report": _progress}
    _show(lambda: run(images=images, rounds=rounds, seed=0, **options), table, as_json, figures)


@command(app)
def ladder(
    storage: Annotated[
        str | None,
        typer.Option(
            help="Speeds of storage. Default: 15MB/s,50MB/s,530MB/s.", metavar="RATE,RATE", show_default=False
        ),
    ] = None,
    cached: Annotated[
        str | None,
        typer.Option(
            help="Caches of a node, as fractions of the images. Default: 0.35,0.5,0.75,1.",
            metavar="S,S",
            show_default=False,
        ),
    ] = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="Consumers. Default: one,eight,ranks-2,ranks-4,ranks-8,hyperband,nodes.",
            metavar="MODE,MODE",
            show_default=False,
        ),
    ] = None,
    steps: Annotated[
        str, typer.Option(help="Sources of minibatches; each mode has some of them.", metavar="STEP,STEP")
    ] = "dataloader,minio,fetch,prep-page-cache,prep,decoded",
    images: Annotated[
        int | None, typer.Option(help="Number of generated photographs. Default: 800.", show_default=False)
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Measured epochs, after two others. Default: 3.", show_default=False)
    ] = None,
    pace: Annotated[float, typer.Option(help="Samples/s of a trial that never waits.")] = 1000.0,
    trials: Annotated[int, typer.Option(help="Concurrent trials of eight and hyperband; all ranks of ranks-N.")] = 8,
    search_samples: Annotated[int, typer.Option(help="Trials of the mode hyperband.")] = 16,
    search_epochs: Annotated[int, typer.Option(help="Epochs of its longest trials.")] = 9,
    cores: Cores = None,
    results: Annotated[
        Path, typer.Option(help="Results of finished cells, which are not measured again.", metavar="FILE.jsonl")
    ] = Path("ladder.jsonl"),
    short: Annotated[
        bool, typer.Option("--short", help="Other defaults: 15MB/s, 0.5, eight, 200 images, 2 epochs.")
    ] = False,
    only_table: Annotated[bool, typer.Option("--only-table", help="Measure nothing.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure CoorDL's mechanisms one after the other: MinIO, shared fetching, shared preparation, decoded samples.

    Storage of a fixed speed is modelled, below a cache of a limited size. The whole table takes hours.

    Examples:
        python -m benchmarks ladder --short
        python -m benchmarks ladder --modes hyperband --storage 15MB/s,530MB/s
    """
    check_installed()
    from benchmarks.ladder.cells import LONG, SHORT, STEPS, Mode, Plan, Step, Workload, unfinished
    from benchmarks.ladder.report import figures, tables
    from benchmarks.ladder.runs import run_all
    from mbaas.tools.bench.rows import BenchSettings, usable_cores

    usual = SHORT if short else LONG
    plan = Plan(
        tuple(_rate("--storage", each) for each in (storage or usual.storage).split(",")),
        _shares("--cached", cached or usual.cached),
        cast("tuple[Mode, ...]", _some_of("--modes", modes or usual.modes, tuple(STEPS))),
        cast("tuple[Step, ...]", _some_of("--steps", steps, get_args(Step))),
    )
    workload = Workload(
        images=usual.images if images is None else images,
        epochs=usual.epochs if epochs is None else epochs,
        trials=trials,
        search_samples=search_samples,
        search_epochs=search_epochs,
        samples_per_s=pace,
        cores=usable_cores() if cores is None else cores,
    )
    for mode in plan.modes:
        workload.trials_in(mode)  # before hours of measurement
    options: Any = {"cache_dir": BenchSettings().cache_dir, "results": results, "report": _progress}
    records = _show(lambda: run_all(None if only_table else plan, workload, **options), tables, as_json, figures)
    if failed := [] if only_table else unfinished(plan.cells(), workload, records):
        raise MbaasError(f"{len(failed)} cells have failed; run the command again to repeat them")
    if faulty := [record.cell for record in records if record.result.missing or record.result.repeated]:
        raise MbaasError(f"samples were missing or repeated in {len(faulty)} cells, for instance {faulty[0]}")


@command(app)
def calls(
    trials: Annotated[str, typer.Option(help="Numbers of trials of a machine.", metavar="N,N")] = "3,8",
    rounds: Rounds = 3,
    seconds: Annotated[float, typer.Option(help="Length of each measurement.", min=1)] = 6.0,
    apart: Annotated[bool, typer.Option("--apart", help="Prepare nothing on the machine of the trials.")] = False,
    step: Annotated[float, typer.Option(help="Seconds that a trial sleeps over a minibatch.", min=0)] = 0.0,
    as_json: AsJson = False,
) -> None:
    """Measure calls for blocks on a machine without the coordinator: each through Ray, or relayed together.

    Examples:
        python -m benchmarks calls --trials 3,8
    """
    check_installed()
    from benchmarks.calls import measure, table

    options: Any = {"rounds": rounds, "seconds": seconds, "is_apart": apart, "step_s": step, "tell": _progress}
    _show(lambda: measure(numbers("--trials", trials), **options), table, as_json)


@command(app)
def scale(
    check: Annotated[
        str | None,
        typer.Option(help="Also compare the model with real feeds on these numbers of local nodes.", metavar="N,N"),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Model feeds with up to 256 nodes, with the service's own decisions and costs measured on this machine.

    Examples:
        python -m benchmarks scale --check 1,2,4
    """
    check_installed()
    from benchmarks.scale.forecast import run, tables

    _show(lambda: run(numbers("--check", check) if check is not None else (), _progress), tables, as_json)


@command(app)
def allocation(
    jobs: Annotated[str, typer.Option(help="Numbers of jobs of the simulated workloads.", metavar="N,N")] = "8,64",
    workloads: Annotated[int, typer.Option(help="Random workloads of each size; results are means.", min=1)] = 10,
    real_rounds: Annotated[int, typer.Option("--real", help="Also run eight real jobs this many times.", min=0)] = 0,
    scale: Annotated[float, typer.Option(help="Length of the real jobs; 1: as simulated.", min=0.01)] = 0.2,
    as_json: AsJson = False,
) -> None:
    """Compare ways to divide prep workers between jobs that arrive and end: makespan, stall, time to move a worker.

    Jobs that all train at once are compared by their total rate.

    Examples:
        python -m benchmarks allocation --jobs 8,64 --real 2
    """
    from benchmarks.allocation import real, simulation
    from benchmarks.allocation.report import Report, figures, tables

    def measured() -> Report:
        sizes = numbers("--jobs", jobs)
        outcomes = [each for size in sizes for each in simulation.measure(size, seeds=workloads, tell=_progress)]
        static = [each for size in sizes for each in simulation.measure_static(size, seeds=workloads)]
        runs = real.measure(real.jobs(scale), rounds=real_rounds, tell=_progress) if real_rounds else []
        return Report(tuple(outcomes), tuple(static), tuple(runs))

    _show(measured, tables, as_json, figures)


@command(app)
def fuzz(
    minutes: Annotated[float, typer.Option(help="Duration, over all targets.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Another seed, other cases.")] = 1,
    target: Annotated[
        str | None, typer.Option(help="Only this target. Default: all.", metavar="NAME", show_default=False)
    ] = None,
    case: Annotated[
        int | None, typer.Option(help="Repeat one case, with --target.", metavar="N", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Fuzz every decoder and reader with damaged and hostile data, files, names, states and calls.

    Examples:
        python -m benchmarks fuzz --minutes 60 --seed 7
    """
    from benchmarks.fuzz.run import fuzz_all, table

    options: Any = {"seed": seed, "target": target, "case": case, "progress": _progress}
    done = _show(lambda: fuzz_all(minutes * 60, **options), table, as_json)
    if found := [failure for each in done for failure in each.failures]:
        raise MbaasError(f"{len(found)} findings, for instance {found[0].told.strip().splitlines()[-1]}")


@command(app)
def soak(
    minibatches: Annotated[int, typer.Option(help="Minibatches that all consumers together take.")] = 100_000,
    minutes: Annotated[float, typer.Option(help="Longest duration.")] = 60.0,
    as_json: AsJson = False,
) -> None:
    """Measure growth of a feed's memory, descriptors and threads while consumers join and leave.

    Examples:
        python -m benchmarks soak --minibatches 1000000
    """
    from benchmarks.soak import figures, table
    from benchmarks.soak import soak as run

    _show(lambda: run(minibatches, minutes, _progress), table, as_json, figures)


@command(app)
def schedules(
    seeds: Annotated[
        str, typer.Option(help="Seeds, the first included, the last not; or a single one, to replay it.", metavar="A:B")
    ] = "0:10000",
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Run random fault schedules of a whole feed on virtual time; report violations with seed and story.

    Examples:
        python -m benchmarks schedules --seeds 0:1000000
    """
    from benchmarks.schedules import run, table

    chosen, count = _seeds(seeds), processes or os.cpu_count() or 1
    result = _show(lambda: run(chosen, processes=count, tell=_progress), table, as_json)
    if result.broken:
        raise MbaasError(f"a promise was broken with {len(result.broken)} seeds, first with {min(result.broken)}")


@command(app)
def mutants(
    modules: Annotated[
        str, typer.Option(help="Modules of mbaas/core. Default: all.", metavar="M,M", show_default=False)
    ] = "",
    sample: Annotated[
        int | None, typer.Option(help="Number of mutants, chosen at random. Default: all.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses the sample.")] = 0,
    processes: Processes = None,
    as_json: AsJson = False,
) -> None:
    """Test the tests: make small mistakes in the pure core, one at a time, and list the undetected ones.

    Examples:
        python -m benchmarks mutants --modules window,tasks
    """
    from benchmarks.mutants.run import chosen, run, table

    todo = chosen([name for name in modules.split(",") if name], sample, seed)
    _show(lambda: run(todo, processes=processes or os.cpu_count() or 1, tell=_progress), table, as_json)


@command(app)
def charts() -> None:
    """Draw the charts of the documents: docs/images, from the tables in docs/results.

    Examples:
        python -m benchmarks charts
    """
    from benchmarks.charts.charts import write

    for file in write():
        line(out, str(file))


@command(app)
def pictures() -> None:
    """Make all pictures again: charts, Grafana dashboards, and status, top, samples and report of a small real feed.

    Examples:
        python -m benchmarks pictures
    """
    check_installed()
    from benchmarks import dashboards, pictures
    from benchmarks.charts import charts
    from mbaas.tools.bench.rows import BenchSettings

    for file in (*charts.write(), *dashboards.write(), *pictures.write(BenchSettings().cache_dir, report=_progress)):
        line(out, str(file))


@command(app)
def dashboards() -> None:
    """Write the Grafana dashboards in cluster/grafana, after a change of the metrics or of the panels.

    Examples:
        python -m benchmarks dashboards
    """
    from benchmarks.dashboards import write

    for file in write():
        line(out, str(file))


def _seeds(text: str) -> range:
    first, _, last = text.partition(":")
    try:
        return range(int(first), int(last) if last else int(first) + 1)
    except ValueError:
        raise ConfigError(f"--seeds must be a number, or two with a colon between, got {text!r}") from None


def _shares(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be numbers from 0 to 1 with commas between, got {text!r}") from None


def _rate(option: str, text: str) -> float:
    bytes_per_s = parse_bytes_per_s(text)
    if bytes_per_s is None:
        raise ConfigError(f"{option} must be {WANTED_BYTES_PER_S}, got {text!r}")
    return bytes_per_s


def _some_of(option: str, text: str, known: tuple[str, ...]) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(f"{option} must be of {', '.join(known)}, got {', '.join(unknown)}")
    return names


def _progress(text: str) -> None:
    line(err, text, style="dim")


def _plain(found: Any) -> object:
    return [asdict(each) for each in found] if isinstance(found, list) else asdict(found)


def _show(
    measure: Callable[[], Found],
    table: Callable[[Found], Any],
    as_json: bool,
    figures: Callable[[Found], object] = _plain,
) -> Found:
    """Measure, write the result as JSON values or as a table, and return it."""
    with end_as_ctrl_c():
        found = measure()
    write_result(figures(found), lambda: table(found), as_json=as_json)
    return found


if __name__ == "__main__":
    app()
