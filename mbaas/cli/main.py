"""The commands and their help. Each imports its dependencies when it runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mbaas.cli.bench import EXAMPLES as BENCH_EXAMPLES
from mbaas.cli.bench import bench
from mbaas.cli.chaos import EXAMPLES as CHAOS_EXAMPLES
from mbaas.cli.chaos import chaos
from mbaas.cli.cluster import app as cluster_app
from mbaas.cli.console import AsJson, command, examples, group
from mbaas.cli.simulate import app as simulate_app
from mbaas.errors import ConfigError

app = group(name="mbaas")
app.add_typer(simulate_app, name="simulate")
app.add_typer(cluster_app, name="cluster")

Address = Annotated[
    str | None,
    typer.Option(
        help="host:port of the Ray cluster's head. Default: RAY_ADDRESS, else the cluster of this machine.",
        metavar="HOST:PORT",
        show_default=False,
    ),
]


def _show_version(wanted: bool) -> None:
    if wanted:
        from mbaas import __version__

        typer.echo(f"mbaas {__version__}")
        raise typer.Exit


@app.callback(
    epilog=examples(
        "mbaas show feed.yaml          [dim]draw the first minibatch of this feed[/]",
        "mbaas serve feed.yaml         [dim]serve it, until Ctrl-C[/]",
        "mbaas status                  [dim]list the running feeds[/]",
        "mbaas status train --watch    [dim]the status of one feed, repeatedly[/]",
        "mbaas stop train",
    )
)
def mbaas(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Minibatch as a service on Ray: fetch and prepare each minibatch once, and deliver it to every trial."""


@command(
    app,
    "mbaas serve feed.yaml",
    "mbaas serve feed.yaml --name val --address 10.0.0.1:6379",
    "nohup mbaas serve feed.yaml > feed.log &    [dim]writes lines, ends with mbaas stop[/]",
    "mbaas serve feed.yaml --detach              [dim]for several jobs, on a cluster that runs[/]",
    "mbaas serve --schema > feed.schema.json     [dim]for editors that complete and check YAML[/]",
)
def serve(
    config: Annotated[
        Path | None,
        typer.Argument(
            help="YAML: name, data, pipeline, batch_size, options.", metavar="CONFIG.yaml", show_default=False
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="A name that replaces the file's.", show_default=False),
    ] = None,
    detach: Annotated[
        bool,
        typer.Option("--detach", "-d", help="Return once the feed serves; it runs until [bold]mbaas stop[/]."),
    ] = False,
    local: Annotated[
        bool, typer.Option("--local", help="Start a Ray cluster for this feed alone, even if one runs here already.")
    ] = False,
    schema: Annotated[
        bool, typer.Option("--schema", help="Print the JSON schema of the file, and serve nothing.")
    ] = False,
    address: Address = None,
) -> None:
    """Serve a feed in the foreground, until Ctrl-C or [bold]mbaas stop[/].

    Joins the Ray cluster of this machine, or starts one for the lifetime of the feed, and prints which. With
    [bold]--detach[/] the feed belongs to the cluster, which must already be running: every job finds it by its name.
    """
    from mbaas.cli.serve import print_schema, serve

    if schema:
        print_schema()
        return
    if config is None:
        raise ConfigError("mbaas serve needs a file that describes a feed; examples/feed.yaml shows all keys")
    serve(config, name=name, address=address, detach=detach, local=local)


@command(
    app,
    "mbaas show feed.yaml --out grid.png",
    "mbaas show feed.yaml --out later.png --epoch 7 --count 64",
)
def show(
    config: Annotated[
        Path, typer.Argument(help="The file that `mbaas serve` reads.", metavar="CONFIG.yaml", show_default=False)
    ],
    to: Annotated[Path, typer.Option("--out", help="The picture to write.", metavar="FILE.png")] = Path("grid.png"),
    epoch: Annotated[int, typer.Option(help="Which epoch of the feed.", min=0)] = 0,
    count: Annotated[
        int | None,
        typer.Option(help="Number of samples. Default: a minibatch, 32 at most.", min=1, show_default=False),
    ] = None,
) -> None:
    """Draw the first samples of an epoch as a grid, with their classes, boxes, masks and key points.

    They are exactly the samples that trials will get, before [bold]Normalize[/], which runs in the trial. A minibatch
    is determined by the data, the pipeline and the seed, so neither a feed nor Ray is needed. The cpu engine prepares
    the samples; dali's pixels differ by a few grey levels.
    """
    from mbaas.cli.show import show

    show(config, to=to, epoch=epoch, count=count)


@command(
    app,
    "mbaas status",
    "mbaas status train",
    "mbaas status train --watch --every 5",
    "mbaas status train --story trial-3    [dim]what happened to it, and why[/]",
    "mbaas status train --json | jq '.consumers\\[] | {name, stall_share}'",
)
def status(
    name: Annotated[
        str | None,
        typer.Argument(help="Name of a feed; without it, a table of all.", show_default=False),
    ] = None,
    as_json: AsJson = False,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Repeat until Ctrl-C or the feed's end.")] = False,
    every: Annotated[float, typer.Option(help="Seconds between two looks of --watch.", min=0.1)] = 2.0,
    story: Annotated[
        str | None,
        typer.Option(
            help="History of one consumer, prep worker, cache node or block, with times and causes.",
            metavar="THING",
            show_default=False,
        ),
    ] = None,
    address: Address = None,
) -> None:
    """Show the running feeds: trials, rates, staging, cache, data stalls.

    [bold]stall[/]: fraction of a trial's time spent waiting for data, and the parts due to fetching bytes and to
    preparing them. [bold]held[/]: blocks of minibatches that a trial has received and still uses. [bold]exact[/]: in
    its last epoch, the trial received each sample exactly once.

    [bold]--story[/] takes a name from the tables (a node's name stands for its cache node), or
    "block 17": blocks are counted over all epochs.
    """
    from mbaas.cli.status import status, tell

    if story is not None:
        if name is None:
            raise typer.BadParameter("say whose it is: mbaas status NAME --story THING", param_hint="--story")
        tell(name, story, as_json=as_json, address=address)
        return
    status(name, as_json=as_json, watch_s=every if watch else None, address=address)


@command(
    app,
    "mbaas top            [dim]all feeds that run[/]",
    "mbaas top train",
)
def top(
    name: Annotated[
        str | None, typer.Argument(help="Name of a feed; without it, all that run.", show_default=False)
    ] = None,
    address: Address = None,
) -> None:
    """Show feeds and their trials live until Ctrl-C, updated every second; once if stdout is not a terminal.

    Rates and stalls are for the last seconds; [bold]mbaas status[/] shows totals since each trial joined.

    [bold]samples/s[/]: of the trial while it trains. [bold]stall[/]: fraction of that time spent waiting for data:
    while prep was computing, while bytes were fetched, or for other trials, because a slower trial must not fall behind
    or another cohort has the staging memory. [bold]done[/]: progress in the feed's epoch.
    """
    from mbaas.cli.top import top

    top(name, address=address)


@command(
    app,
    "mbaas ledger train",
    "mbaas ledger train trial-3                   [dim]each of its epochs[/]",
    "mbaas ledger train --parquet ledgers.parquet",
)
def ledger(
    name: Annotated[str, typer.Argument(help="Name of the feed.", show_default=False)],
    consumer: Annotated[
        str | None, typer.Argument(help="Show each epoch of this trial.", metavar="[TRIAL]", show_default=False)
    ] = None,
    inexact: Annotated[bool, typer.Option("--inexact", help="Only epochs whose ledger does not match.")] = False,
    as_json: AsJson = False,
    parquet: Annotated[
        Path | None, typer.Option(help="Write the rows to this file.", metavar="FILE", show_default=False)
    ] = None,
    address: Address = None,
) -> None:
    """Show the samples that each trial received in each of its epochs, against the expected ones.

    A ledger counts samples and hashes their ids, in any order: it matches if the trial received each sample of the
    epoch exactly once. [bold]from[/] and [bold]shuffled as[/], with the seed, determine the contents of every
    minibatch.
    """
    from mbaas.cli.ledger import ledger

    ledger(name, consumer, only_inexact=inexact, as_json=as_json, parquet=parquet, address=address)


@command(app, "mbaas stop train")
def stop(
    name: Annotated[str, typer.Argument(help="Name of the feed.", show_default=False)],
    address: Address = None,
) -> None:
    """End a feed, wherever it was started, and wait until it is gone.

    Trials that still use it get an error with this reason.
    """
    from mbaas.cli.serve import stop

    stop(name, address=address)


command(app, *BENCH_EXAMPLES)(bench)
command(app, *CHAOS_EXAMPLES)(chaos)


@command(
    app,
    "mbaas analyze feed.yaml --step train:step            [dim]measures the step too; says how long it takes[/]",
    "mbaas analyze feed.yaml --step train:step --quick    [dim]a first answer, by fewer measurements[/]",
    "mbaas analyze feed.yaml --rate 1200 --trials 8       [dim]each trial takes 1,200 samples a second[/]",
    "mbaas analyze feed.yaml --rate 1200 --storage 50MB/s [dim]as if storage gave 50 MB a second[/]",
    "mbaas analyze feed.yaml --step train:step --verify --report report.html",
    "mbaas analyze --feed train                           [dim]a feed that runs, from its own counters[/]",
)
def analyze(
    config: Annotated[
        Path | None,
        typer.Argument(help="The file that `mbaas serve` reads.", metavar="CONFIG.yaml", show_default=False),
    ] = None,
    step: Annotated[
        str | None,
        typer.Option(
            help="The training step: a function of one minibatch, or one without parameters that returns it.",
            metavar="MODULE:FUNCTION",
            show_default=False,
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(help="Instead of a step: samples/s that one trial could take.", show_default=False)
    ] = None,
    trials: Annotated[int, typer.Option(help="Trials that will train on it.")] = 1,
    device: Annotated[
        str | None, typer.Option(help="Device on which the step wants minibatches, such as cuda.", show_default=False)
    ] = None,
    storage: Annotated[
        str | None,
        typer.Option(help="Pretend that storage gives no more than this.", metavar="RATE", show_default=False),
    ] = None,
    feed: Annotated[
        str | None, typer.Option(help="Instead of a file: the name of a running feed.", show_default=False)
    ] = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Run some of the predictions, and report the error.")
    ] = False,
    run: Annotated[bool, typer.Option("--run/--no-run", help="Run the feed, to split an epoch's time.")] = True,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A first answer by fewer measurements; no feed is run."),
    ] = False,
    report: Annotated[
        Path | None, typer.Option(help="Write the report as one page.", metavar="FILE.html", show_default=False)
    ] = None,
    plots: Annotated[
        Path | None, typer.Option(help="Write its plots as SVG.", metavar="DIR", show_default=False)
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(help="Write the measurements, for `mbaas what-if`.", metavar="FILE.json", show_default=False),
    ] = None,
    as_json: AsJson = False,
    address: Address = None,
) -> None:
    """Find out whether loading is the bottleneck, and which change or purchase would help.

    Measures the training step on synthetic data, prep with its data in memory, uncached storage, and memory. Then
    splits an epoch's time into compute, waiting for prep and waiting for bytes, and lists what would help.
    """
    from mbaas.cli.analyze import analyze, request_of

    request = request_of(
        file=config,
        feed=feed,
        step=step,
        rate_per_s=rate,
        device=device,
        trials=trials,
        storage=storage,
        verify=verify,
        run=run,
        quick=quick,
        address=address,
    )
    analyze(request, as_json=as_json, save=save, report=report, plots=plots)


@command(
    app,
    "mbaas what-if a.json --set trials=8 --set sharing=off",
    "mbaas what-if a.json --set cache_bytes=20GB --set storage_factor=0.5",
    "mbaas what-if a.json --curve cache_bytes=0,10GB,20GB,40GB",
    "mbaas what-if a.json --machines prices.yaml --epochs 90    [dim]the cheapest first[/]",
    "mbaas what-if a.json --gpu gpu.yaml    [dim]decode on the CPU, or on the GPU?[/]",
)
def what_if(
    measured: Annotated[
        Path, typer.Argument(help="A file written by `mbaas analyze --save`.", metavar="FILE.json", show_default=False)
    ],
    changes: Annotated[
        list[str] | None,
        typer.Option("--set", help="Change one of nodes, cores, cache_bytes, ...", metavar="NAME=VALUE"),
    ] = None,
    curve: Annotated[
        str | None,
        typer.Option(help="Predict several values of one parameter.", metavar="NAME=V,V", show_default=False),
    ] = None,
    machines: Annotated[
        Path | None,
        typer.Option(help="A price list; see docs/analyze.md.", metavar="FILE.yaml", show_default=False),
    ] = None,
    epochs: Annotated[int, typer.Option(help="Epochs of the job that --machines is for.")] = 90,
    gpu: Annotated[
        Path | None,
        typer.Option(help="Measurements on a GPU; see docs/analyze.md.", metavar="FILE.yaml", show_default=False),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Predict the effect of more cache, cores, nodes, trials or faster storage from measured rates."""
    from mbaas.cli.what_if import what_if

    what_if(measured, changes or [], curve=curve, machines=machines, epochs=epochs, gpu=gpu, as_json=as_json)


@command(
    app, "mbaas plan examples/plan/jobs.yaml", "mbaas plan jobs.yaml --json | jq '.jobs\\[] | {job, workers, limit}'"
)
def plan(
    jobs: Annotated[
        Path, typer.Argument(help="YAML: cluster, datasets, jobs.", metavar="JOBS.yaml", show_default=False)
    ],
    as_json: AsJson = False,
) -> None:
    """Plan workers, threads, caches and nodes for several searches and jobs, before anything runs."""
    from mbaas.cli.plan import plan

    plan(jobs, as_json=as_json)
