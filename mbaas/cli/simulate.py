"""``mbaas simulate`` predicts training time under different ways to load data."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Column
from rich.text import Text

from mbaas.base.units import count, number, percent
from mbaas.cli import console
from mbaas.errors import ConfigError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from mbaas.tools.simulator.simulation import Axis, Outcome
    from mbaas.tools.simulator.system import System

app = console.group(
    help="Simulate training time and its breakdown for each loading strategy, without a cluster.",
    epilog=console.examples("mbaas simulate policies imagenet-1k", "mbaas simulate presets"),
)

GIVEN: Any = typer.Argument(
    help="A preset (see [bold]mbaas simulate presets[/]), or a YAML file like it.", metavar="PRESET|FILE.yaml"
)
Changes = Annotated[
    list[str] | None, typer.Option("--set", help="Change a parameter; may be repeated.", metavar="NAME=VALUE")
]
Seed = Annotated[int, typer.Option(help="Seed of sample sizes, orders and all other randomness.")]


def _checked_plot(plot: Path | None) -> Path | None:
    # Fails before the simulation if the file cannot be drawn.
    if plot is not None:
        from mbaas.tools.analysis import plots

        plots.check_path(plot)
    return plot


Plot = Annotated[
    Path | None, typer.Option(callback=_checked_plot, help="Also draw it, into a .png or .svg file.", metavar="FILE")
]


@console.command(app)
def policies(
    system: Annotated[str | None, GIVEN] = None,
    from_feed: str | None = None,
    address: console.Address = None,
    epochs: int | None = None,
    policies: Annotated[str | None, typer.Option(metavar="NAME,NAME")] = None,
    change: Changes = None,
    plot: Plot = None,
    as_json: console.AsJson = False,
) -> None:
    """Simulate policies, and break down their time by source of the wait.

    [bold]compute[/] is training. The rest is waiting: for samples from a storage class, from another worker or
    from shared storage (pfs), or for samples to be prepared and written to the staging buffer.

    Args:
        from_feed: Simulate a running feed, which then compares its next epoch with the result.
        epochs: Number of epochs, instead of the one in the file.
        policies: Policies to simulate. Default: the policies in the file, or all.

    Examples:
        mbaas simulate policies imagenet-1k
        mbaas simulate policies imagenet-1k --set trials=16 --plot policies.svg
        mbaas simulate policies my.yaml --epochs 10 --policies minio,nopfs,mbaas --json
        mbaas simulate policies --from-feed train    [dim]a running feed, from its rates[/]
    """
    from mbaas.tools.simulator import simulate
    from mbaas.tools.simulator.results import outcomes_table, plain_outcomes, policies_figure

    if (system is None) == (from_feed is None):
        raise ConfigError("give either a preset or file, or a running feed with --from-feed")
    if from_feed is not None:
        described, outcomes = _of_feed(from_feed, address, _names(policies), epochs=epochs, change=change)
    else:
        changes = [*(change or []), *([f"epochs={epochs}"] if epochs is not None else [])]
        described = _changed(_system_of(system or ""), changes)
        outcomes = list(simulate(described, _names(policies)))
    _draw(plot, policies_figure, described, outcomes)
    plain = plain_outcomes(described, outcomes)
    console.write_result(plain, lambda: outcomes_table(described, outcomes), as_json=as_json)


@console.command(app)
def sweep(
    system: Annotated[str, GIVEN],
    x: Annotated[str, typer.Option(metavar="NAME=V,V")],
    y: Annotated[str, typer.Option(metavar="NAME=V,V")],
    policy: str = "mbaas",
    versus: str | None = None,
    change: Changes = None,
    plot: Plot = None,
    as_json: console.AsJson = False,
) -> None:
    """Simulate a policy over any two parameters.

    Parameters: [bold]cache_bytes[/], workers, trials, batch, epochs, threads, staging_bytes, compute_bytes_per_s,
    prep_bytes_per_s, network_bytes_per_s, pfs_bytes_per_s, samples, sample_bytes, pixel_bytes; and the capacity of one
    storage class, such as ram_bytes. Rates and sizes are per worker, except for pfs_bytes_per_s.

    Args:
        x: First parameter and its values.
        y: Second parameter and its values.
        policy: Policy to simulate.
        versus: Show how many times as fast as this policy it is.

    Examples:
        mbaas simulate sweep imagenet-1k --x "cache_bytes=5 GB,20 GB,80 GB" --y trials=1,4,16
        mbaas simulate sweep my.yaml --x workers=1,2,4,8 --y "pfs_bytes_per_s=200 MB/s,1 GB/s" --versus minio
    """
    from mbaas.tools.simulator import sweep
    from mbaas.tools.simulator.results import plain_sweep, sweep_figure, sweep_table

    described = _changed(_system_of(system), change or [])
    axes = _axis(described, "--x", x), _axis(described, "--y", y)
    swept = sweep(described, policy=policy, x=axes[0], y=axes[1], versus=versus)
    _draw(plot, sweep_figure, described, swept)
    console.write_result(plain_sweep(swept), lambda: sweep_table(swept), as_json=as_json)


@console.command(app)
def cache(
    policy: str,
    cached: float,
    epochs: int = 5,
    samples: int = 100_000,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: console.AsJson = False,
) -> None:
    """Show the fraction of each epoch that a cache serves, if every epoch has its own order.

    [bold]minio[/] keeps the samples that it read first. [bold]page_cache[/] is the operating system's cache: Linux with
    an active and an inactive list. [bold]belady[/] evicts the samples with the furthest next read: the bound for caches
    that do not prefetch.

    Args:
        policy: minio, page_cache or belady.
        cached: Share of the samples that the cache holds.
        epochs: Number of epochs.
        samples: Samples of the dataset, of 110 kB each.

    Examples:
        mbaas simulate cache --policy page_cache --cached 0.5 --epochs 5
        mbaas simulate cache --policy minio --cached 0.5 --epochs 5 --plot hits.png
    """
    from mbaas.tools.simulator.chance import hit_fractions
    from mbaas.tools.simulator.results import hit_rates_figure

    hits = hit_fractions(policy, cached=cached, epochs=epochs, samples=samples, seed=seed)
    _draw(plot, hit_rates_figure, policy, cached, hits)
    asked = {"policy": policy, "cached": cached, "epochs": epochs, "samples": samples, "seed": seed}
    lines = [f"Hit rate of {policy} with room for {percent(cached)} of {samples:,} samples:"]
    lines += [f"  epoch {epoch}: {percent(fraction)}" for epoch, fraction in enumerate(hits)]
    _write({**asked, "hit_fraction": hits}, "\n".join(lines), as_json=as_json)


@console.command(app)
def frequency(
    workers: int,
    epochs: int,
    samples: int,
    delta: float,
    monte_carlo: Annotated[bool, typer.Option("--monte-carlo")] = False,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: console.AsJson = False,
) -> None:
    """Count the samples that one worker reads more than (1 + delta) times the mean.

    Each epoch assigns a sample to one of N workers at random, so a worker reads it Binomial(E, 1/N) times. Samples that
    a worker reads far more often than others are worth keeping close to it.

    Args:
        workers: Workers that divide each epoch among themselves.
        epochs: Number of epochs.
        samples: Samples of the dataset.
        delta: Reads of a sample above the mean, as a share of the mean.
        monte_carlo: Also count such samples in simulated orders.

    Examples:
        mbaas simulate frequency --workers 16 --epochs 90 --samples 1281167 --delta 0.8
        mbaas simulate frequency --workers 16 --epochs 90 --samples 1281167 --delta 0.8 --monte-carlo --plot reads.svg
    """
    from mbaas.tools.simulator.chance import frequency
    from mbaas.tools.simulator.results import frequency_figure

    found = frequency(workers=workers, epochs=epochs, samples=samples, delta=delta, monte_carlo=monte_carlo, seed=seed)
    _draw(plot, frequency_figure, found, samples=samples, workers=workers, epochs=epochs)
    asked = {"workers": workers, "epochs": epochs, "samples": samples, "delta": delta, "seed": seed}
    results = {"least": found.least, "expected": found.expected, "simulated": found.simulated}
    counted = f"; counted: {found.simulated:,}" if found.simulated is not None else ""
    sentence = (
        f"In {epochs} epochs, one of {workers} workers reads {count(found.expected)} of {samples:,} samples at least "
        f"{found.least} times; the mean is {number(epochs / workers)}{counted}."
    )
    _write({**asked, **results}, sentence, as_json=as_json)


@console.command(app)
def imbalance(
    nodes: int,
    local_batch: int,
    steps: int = 1000,
    seed: Seed = 0,
    plot: Plot = None,
    as_json: console.AsJson = False,
) -> None:
    """Show the fraction of a global minibatch that is transferred if each node trains on its cached samples.

    Samples are cached on random nodes, so some nodes have more than their part of a minibatch and some less; only the
    difference is transferred.

    Args:
        nodes: Number of nodes, which cache samples and train.
        local_batch: Samples of a minibatch on one node.
        steps: Minibatches to draw.

    Examples:
        mbaas simulate imbalance --nodes 16 --local-batch 64 --steps 1000
        mbaas simulate imbalance --nodes 16 --local-batch 64 --steps 1000 --plot imbalance.png --json
    """
    import numpy as np

    from mbaas.tools.simulator.chance import imbalance
    from mbaas.tools.simulator.results import imbalance_figure

    found = imbalance(nodes=nodes, local_batch=local_batch, steps=steps, seed=seed)
    low, median, high = np.quantile(found, (0.25, 0.5, 0.75)).tolist()
    _draw(plot, imbalance_figure, found, nodes=nodes, local_batch=local_batch)
    asked = {"nodes": nodes, "local_batch": local_batch, "steps": steps, "seed": seed}
    sentence = (
        f"{percent(median)} of a global minibatch is transferred (median of {steps:,} steps; middle half: "
        f"{percent(low)} to {percent(high)})."
    )
    _write({**asked, "median": median, "p25": low, "p75": high}, sentence, as_json=as_json)


@console.command(app)
def presets(
    name: Annotated[str | None, typer.Argument()] = None,
) -> None:
    """List the systems and policies that ship with mbaas, or print the YAML of one system.

    Args:
        name: Print this preset, or a machine by name, as a start for your own file.

    Examples:
        mbaas simulate presets
        mbaas simulate presets imagenet-1k > my.yaml
    """
    from mbaas.tools.simulator import POLICIES, catalog

    if name is not None:
        console.line(console.out, catalog.text(name).rstrip("\n"))
        return
    for title, rows in (
        ("presets", {name: catalog.about(name) for name in catalog.names()}),
        ("policies", {policy.name: policy.about for policy in POLICIES.values()}),
    ):
        console.out.print(Text(title, "bold"), console.facts(rows.items(), Column()))


def _write(plain: dict[str, Any], text: str, *, as_json: bool) -> None:
    if as_json:
        console.write_json(plain)
    else:
        console.line(console.out, text)


def _system_of(given: str) -> System:
    from mbaas.tools.simulator import catalog

    file = Path(given)
    return catalog.read(file) if file.suffix.lower() in (".yaml", ".yml") else catalog.load(given)


def _of_feed(
    name: str, address: str | None, policies: list[str] | None, *, epochs: int | None, change: list[str] | None
) -> tuple[System, list[Outcome]]:
    if change:
        raise ConfigError("--set is for presets and files; a running feed is simulated unchanged")
    from mbaas.tools.analysis.whole import simulate_feed
    from mbaas.tools.simulator.system import EPOCHS

    console.connect(address, start=False)
    return simulate_feed(name, policies, epochs=EPOCHS if epochs is None else epochs)


def _changed(system: System, changes: list[str]) -> System:
    from mbaas.tools.simulator.simulation import changed, parse

    for change in changes:
        name, _, text = change.partition("=")
        system = changed(system, name.strip(), parse(system, name.strip(), text.strip()))
    return system


def _axis(system: System, option: str, text: str) -> Axis:
    from mbaas.tools.simulator.simulation import Axis, parse

    name, equals, values = text.partition("=")
    if not equals:
        raise ConfigError(f"{option} must be a parameter and its values, such as trials=1,4,16, got {text!r}")
    return Axis(name.strip(), tuple(parse(system, name.strip(), value.strip()) for value in values.split(",")))


def _names(text: str | None) -> list[str] | None:
    return [name.strip() for name in text.split(",")] if text is not None else None


def _draw(plot: Path | None, make: Callable[..., Figure], *arguments: Any, **options: Any) -> None:
    if plot is not None:
        from mbaas.tools.analysis import plots

        plots.save(make(*arguments, **options), plot)
