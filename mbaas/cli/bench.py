"""``mbaas bench``: the side-by-side benchmark as a command."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mbaas.cli.console import err, line, out, write_json
from mbaas.cli.signals import end_as_ctrl_c
from mbaas.errors import ConfigError, MbaasError

if TYPE_CHECKING:
    from mbaas.bench.node_report import NodesReport, NodesSettings
    from mbaas.bench.report import BenchReport
    from mbaas.bench.settings import BenchSettings

NEEDED = {"skimage": "scikit-image"}
"""Modules of the bench extra, and the names under which pip knows them."""


def check_installed() -> None:
    """Refuse at once what would fail in the middle.

    Raises:
        MbaasError: the bench extra is not installed.
    """
    missing = [package for module, package in NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise MbaasError(f"mbaas bench needs {' and '.join(missing)}; install them with: pip install 'mbaas[bench]'")


def numbers(option: str, text: str) -> tuple[int, ...]:
    """The numbers of ``1,4,8``."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} must be whole numbers with commas between, such as 1,4,8, got {text!r}") from None


def settings_of(
    *, data: Path | None, images: int, trials: str, batch: str, rows: str | None, **options: Any
) -> BenchSettings:
    """What the command line asks for; ``options`` are further fields of `BenchSettings`, None for the default."""
    from mbaas.bench.settings import ROWS, BenchSettings

    return BenchSettings(
        data=data,
        photos=images,
        trials=numbers("--trials", trials),
        batches=numbers("--batch", batch),
        rows=tuple(row.strip() for row in rows.split(",")) if rows is not None else ROWS,
        **{name: value for name, value in options.items() if value is not None},
    )


def bench(settings: BenchSettings, *, as_json: bool) -> None:
    """Run it, show it, and fail if a row failed, a sample was missing or repeated, or something was spilled.

    Raises:
        MbaasError: the extra is not installed, or a result is not sound.
        DatasetError: there are no images.
    """
    check_installed()
    from mbaas.bench.render import render
    from mbaas.bench.runner import run

    with end_as_ctrl_c():
        report = run(settings, lambda text: line(err, text, style="dim"))
    if as_json:
        write_json(json.dumps(_plain(report), default=str))
    else:
        out.print(render(report))
    if not report.is_sound:
        raise MbaasError(
            "the benchmark is not sound: a row failed, or samples were missing, repeated or spilled; see above"
        )


def bench_ready(settings: BenchSettings, *, as_json: bool) -> None:
    """Measure what a loader costs a trial that never waits, for each batch size.

    Raises:
        MbaasError: the extra is not installed.
        DatasetError: there are no images.
    """
    check_installed()
    from mbaas.bench.ready import measure
    from mbaas.bench.render import render_readiness
    from mbaas.bench.runner import images

    with end_as_ctrl_c():
        folder = images(settings, lambda text: line(err, text, style="dim"))
        results = [
            result
            for batch in settings.batches
            for result in measure(folder, batch=batch, cores=settings.cores, rounds=settings.rounds, seed=settings.seed)
        ]
    if as_json:
        write_json(json.dumps([{**asdict(result), "loss": result.loss} for result in results]))
    else:
        out.print(render_readiness(results))


def bench_bookkeeping(*, as_json: bool) -> None:
    """Measure what order and bookkeeping cost a sample, from a thousand samples to a hundred million."""
    from mbaas.bench.bookkeeping import measure
    from mbaas.bench.render import render_costs

    with end_as_ctrl_c():
        costs = measure()
    if as_json:
        write_json(json.dumps([asdict(cost) for cost in costs]))
    else:
        out.print(render_costs(costs))


def nodes_settings_of(*, nodes: str, cache_share: str, images: int | None, **options: Any) -> NodesSettings:
    """What ``--nodes`` asks for; ``options`` are further fields of `NodesSettings`, None for the default."""
    from mbaas.bench.node_report import NodesSettings

    try:
        shares = tuple(float(part) for part in cache_share.split(","))
    except ValueError:
        raise ConfigError(
            f"--cache-share must be numbers from 0 to 1 with commas between, got {cache_share!r}"
        ) from None
    given = {"photos": images, **options}
    return NodesSettings(
        nodes=numbers("--nodes", nodes),
        cache_shares=shares,
        **{name: value for name, value in given.items() if value is not None},
    )


def bench_nodes(settings: NodesSettings, *, as_json: bool) -> None:
    """Run local clusters of several nodes, show what sharing saves, and fail if a check did.

    Raises:
        MbaasError: the extra is not installed, or a result is not sound.
        DatasetError: there are no images.
    """
    check_installed()
    from mbaas.bench.nodes import run
    from mbaas.bench.render import render_nodes

    with end_as_ctrl_c():
        report = run(settings, lambda text: line(err, text, style="dim"))
    if as_json:
        write_json(json.dumps(_plain_nodes(report), default=str))
    else:
        out.print(render_nodes(report))
    if not report.is_sound:
        faults = [fault for result in report.results for fault in result.faults]
        raise MbaasError(f"the benchmark is not sound: {'; '.join(faults)}")


def bench_scale(nodes: str | None, *, as_json: bool) -> None:
    """Calibrate the model of a large feed on this machine, check it on ``nodes`` nodes here, and show what it says.

    Raises:
        MbaasError: the extra is not installed, or a feed did not get on.
    """
    check_installed()
    from mbaas.bench.render import render_scaling
    from mbaas.bench.scale_plan import run

    check_nodes = numbers("--nodes", nodes) if nodes is not None else ()
    with end_as_ctrl_c():
        scaling = run(check_nodes, lambda text: line(err, text, style="dim"))
    if as_json:
        write_json(json.dumps(asdict(scaling)))
    else:
        out.print(render_scaling(scaling))


def _plain_nodes(report: NodesReport) -> dict[str, Any]:
    results = [{**asdict(result), "faults": result.faults} for result in report.results]
    return {**asdict(report), "results": results, "is_sound": report.is_sound}


def _plain(report: BenchReport) -> dict[str, Any]:
    return {**asdict(report), "is_sound": report.is_sound}
