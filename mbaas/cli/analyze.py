"""``mbaas analyze`` measures where an epoch's time is spent, and lists changes that would help."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mbaas.base import units
from mbaas.cli import console
from mbaas.errors import ConfigError
from mbaas.memory.budgets import default_cache, default_staging, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mbaas.settings import FeedOptions
    from mbaas.tools.analysis.measuring.effort import SavedStages
    from mbaas.tools.analysis.whole import Analysis


@dataclass(frozen=True, kw_only=True)
class AnalyzeRequest:
    """The command line of ``mbaas analyze``, with its help; raises ConfigError for options that exclude each other."""

    file: Annotated[Path | None, typer.Argument(metavar="CONFIG.yaml")] = None
    step: Annotated[str | None, typer.Option(metavar="MODULE:FUNCTION")] = None
    rate_per_s: Annotated[float | None, typer.Option("--rate")] = None
    trials: int = 1
    device: str | None = None
    storage: Annotated[str | None, typer.Option(metavar="RATE")] = None
    feed: str | None = None
    verify: Annotated[bool, typer.Option("--verify")] = False
    run: Annotated[bool, typer.Option("--run/--no-run")] = True
    quick: Annotated[bool, typer.Option("--quick")] = False
    report: Annotated[Path | None, typer.Option(metavar="FILE.html")] = None
    plots: Annotated[Path | None, typer.Option(metavar="DIR")] = None
    save: Annotated[Path | None, typer.Option(metavar="FILE.json")] = None
    as_json: console.AsJson = False
    address: console.Address = None

    def __post_init__(self) -> None:
        self.storage_bytes_per_s  # noqa: B018 (for its errors)
        if (self.file is None) == (self.feed is None):
            raise ConfigError("give either a feed file, as for `mbaas serve`, or a running feed with --feed")
        if self.feed is None and (self.step is None) == (self.rate_per_s is None):
            raise ConfigError("give the speed of training: either --step module:function, which is measured, or --rate")
        if self.feed is not None and (self.step, self.rate_per_s, self.verify) != (None, None, False):
            raise ConfigError("--feed uses the rates of a running feed: leave out --step, --rate and --verify")
        if self.quick and (self.verify or self.feed is not None):
            other = "--verify" if self.verify else "--feed"
            raise ConfigError(f"--quick only measures rates of a file: leave out --quick or {other}")
        if self.trials < 1:
            raise ConfigError(f"--trials must be at least 1, got {self.trials}")

    @property
    def storage_bytes_per_s(self) -> float | None:
        """The rate to which storage is limited, if any."""
        if self.storage is None:
            return None
        limit = units.parse_bytes_per_s(self.storage)
        if not limit:
            raise ConfigError(f"--storage must be a rate such as '330 MB/s', above 0, got {self.storage!r}")
        if not re.search(r"[a-z]", re.sub(r"e[+-]?\d|/\s*s", "", self.storage.lower())):
            number = self.storage.partition("/")[0].strip()
            wanted = f"write '{number} MB/s', or '{number} B/s' for bytes"
            raise ConfigError(f"--storage must have a unit: {wanted}, got {self.storage!r}")
        return limit


@console.command(console.app, console.DECISIONS)
@console.takes(AnalyzeRequest)
def analyze(request: AnalyzeRequest) -> None:
    """Find out whether loading is the bottleneck, and which change or purchase would help.

    Measures the training step on synthetic data, prep with its data in memory, uncached storage, and memory. Then
    splits an epoch's time into compute, waiting for prep and waiting for bytes, and lists changes that would help.

    Args:
        file: The file that `mbaas serve` reads.
        step: The training step: a function of one minibatch, or one without parameters that returns it.
        rate_per_s: Instead of a step: samples/s that one trial could take.
        trials: Trials that will train on it.
        device: Device that minibatches are copied to, such as cuda.
        storage: Limit storage to this rate.
        feed: Instead of a file: the name of a running feed.
        verify: Run some of the predictions, and report the error.
        run: Run the feed, to split an epoch's time.
        quick: Take fewer measurements, and run no feed.
        report: Write the report as one page.
        plots: Write its plots as SVG.
        save: Write the measurements, for `mbaas what-if`.

    Examples:
        mbaas analyze feed.yaml --step train:step            [dim]measures the step, too[/]
        mbaas analyze feed.yaml --step train:step --quick    [dim]a quick estimate from fewer measurements[/]
        mbaas analyze feed.yaml --rate 1200 --trials 8       [dim]each trial takes 1,200 samples a second[/]
        mbaas analyze feed.yaml --rate 1200 --storage 50MB/s [dim]with storage limited to 50 MB/s[/]
        mbaas analyze feed.yaml --step train:step --verify --report report.html
        mbaas analyze --feed train                           [dim]a running feed, from its counters[/]
    """
    from mbaas.cli import analysis_view

    console.check_folders(request.save, request.report)  # before minutes of measuring
    has_ended = threading.Event()
    saved: list[SavedStages] = []
    try:
        with console.end_as_ctrl_c(lambda: _exit_by_force(has_ended, saved)):
            found = _of_feed(request) if request.feed is not None else _of_file(request, saved.append)
    except KeyboardInterrupt:
        _note_saved(saved)
        raise
    finally:
        has_ended.set()
    if request.save is not None:
        request.save.write_text(json.dumps(found.to_json()) + "\n")
    if request.report is not None or request.plots is not None:
        from mbaas.tools.analysis.report import write_plots, write_report

        if request.report is not None:
            write_report(found, request.report, command=shlex.join(["mbaas", *sys.argv[1:]]))
        if request.plots is not None:
            write_plots(found, request.plots)
    console.write_result(found.to_json(), lambda: analysis_view.page(found), as_json=request.as_json)
    for note in found.notes:  # last, and on stderr: below the page, and not in the JSON
        console.say_note(note)
    if found.was_stopped:
        _note_saved(saved)
        raise typer.Exit(console.CUT_OFF)


def _note_saved(saved: Sequence[SavedStages]) -> None:
    for each in saved:
        if each.stages and each.path is not None:
            console.say_note(f"the same command continues after {each.stages[-1]}: results so far are in {each.path}")


def _exit_by_force(has_ended: threading.Event, saved: Sequence[SavedStages]) -> None:
    """Exit this process by force if the measurements do not end."""
    from mbaas.ray_cluster import connection

    if not connection.see_to_the_end(has_ended):
        return
    try:
        _note_saved(saved)
        console.say_error("interrupted: Ray ended, and the measurement with it")
    finally:
        sys.stdout.flush()
        os._exit(console.CUT_OFF)


def _of_feed(request: AnalyzeRequest) -> Analysis:
    assert request.feed is not None
    console.connect(request.address, start=False)
    from mbaas.tools.analysis.whole import analyze_feed

    return analyze_feed(request.feed)


def _of_file(request: AnalyzeRequest, saving: Callable[[SavedStages], None]) -> Analysis:
    assert request.file is not None
    from mbaas import __version__
    from mbaas.cli import feed_data, feed_file
    from mbaas.model.rates import Setup
    from mbaas.ray_cluster import connection, resources
    from mbaas.tools.analysis.measuring.effort import QUICK, Effort, SavedStages, saved_path
    from mbaas.tools.analysis.measuring.service import PacedStep, Workload, load_step
    from mbaas.tools.analysis.measuring.storage import portion
    from mbaas.tools.analysis.measuring.system import Survey, cores_here
    from mbaas.tools.analysis.whole import analyze

    described = feed_file.load(request.file)
    options = described.options
    rate = request.rate_per_s
    step = load_step(request.step) if request.step is not None else PacedStep(rate or 0.0)
    dataset = feed_data.listed(described.data)
    if request.storage_bytes_per_s is not None:
        dataset = portion(dataset, bytes_per_s=request.storage_bytes_per_s)
    cores = cores_here()
    workload = Workload(
        dataset=dataset,
        pipeline=described.pipeline,
        step=step,
        device=request.device,
        options=replace(options, detached=False),  # measured feeds end with this command
    )
    effort = QUICK if request.quick else Effort()
    # without options that change no result of a stage
    same = replace(request, verify=False, run=True, report=None, plots=None, save=None, as_json=False)
    about = repr((__version__, cores, effort, dataset.fingerprint, workload.pipeline, options, same))
    saved = SavedStages(saved_path(about), about=about)
    saving(saved)
    if saved.earlier:
        stages = ", ".join(saved.earlier)
        console.say_note(
            f"continuing an interrupted analysis after {stages}; delete {saved.path} to measure these again"
        )
    # So that no other work affects the measurements. At least as many CPUs as there are workers, even with fewer cores:
    # workers would wait forever for a CPU.
    with connection.separate_ray(max(cores, options.prep_workers or 0)):
        gpus = resources.gpus()
        workers = options.prep_workers or Survey(workload=workload, cores=cores, gpus=gpus).workers
        memory_bytes = _memory_bytes(options, workers)
        cached = options.cache_bytes
        if cached is None:
            cached = default_cache(dataset.total_bytes, memory_bytes, grows=options.cache_decoded)
        return analyze(
            workload,
            setup=Setup(
                prep_workers=workers,
                cache_bytes=cached,
                # a tier never holds more than the data
                disk_bytes=min(sum(disk.max_bytes for disk in options.disk), dataset.total_bytes),
                decoded=options.cache_decoded,
                trials=request.trials,
                cpu_price_per_h=options.cpu_price_per_h,
            ),
            step=f"{request.step}, measured" if rate is None else f"{units.number(rate)} samples/s, as stated",
            rate_per_s=rate,
            check=request.verify,
            run=request.run,
            effort=effort,
            gpus=gpus,
            memory_bytes=memory_bytes,
            tell=lambda text: console.line(console.err, text, style="dim"),
            saved=saved,
        )


def _memory_bytes(options: FeedOptions, workers: int) -> int:
    """Return the bytes of memory for a feed's cache on this machine, next to its staging."""
    from mbaas.core.layout import wanted_staging
    from mbaas.ray_cluster import resources

    store_bytes = max(resources.store_bytes().values())
    staged = options.staging_bytes or default_staging(store_bytes, wanted_staging(workers))
    return max(0, free_bytes(store_bytes, ()) - staged)
