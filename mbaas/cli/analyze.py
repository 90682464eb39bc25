"""``mbaas analyze`` measures where an epoch's time is spent, and lists changes that would help."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from mbaas import units
from mbaas.analysis.measuring.effort import SavedStages
from mbaas.analysis.whole import Analysis
from mbaas.cli import analysis_view, feed_data, feed_file
from mbaas.cli.connection import connect
from mbaas.cli.console import CUT_OFF, end_as_ctrl_c, err, line, out, say_error, say_note, write_json
from mbaas.core.layout import wanted_staging
from mbaas.errors import ConfigError
from mbaas.memory.budgets import default_cache, default_staging, free_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mbaas.settings import FeedOptions


@dataclass(frozen=True, kw_only=True)
class AnalyzeRequest:
    """The command line of ``mbaas analyze``.

    Attributes:
        file: the file that describes a feed; None if ``feed`` is given.
        feed: the name of a running feed.
        step: "module:function"; None with ``rate_per_s`` or a running feed.
        rate_per_s: samples/s that one trial could take, as stated by the user.
        device: device for the step's minibatches.
        trials: number of trials that will train.
        storage_bytes_per_s: limit storage to this rate.
        verify, run: see `mbaas.analysis.whole.analyze`.
        quick: measure for only half a minute, and run no feed.
        address: the Ray cluster of ``feed``.
    """

    file: Path | None
    feed: str | None
    step: str | None
    rate_per_s: float | None
    device: str | None
    trials: int
    storage_bytes_per_s: float | None
    verify: bool
    run: bool
    quick: bool
    address: str | None


def request_of(*, storage: str | None, **given: Any) -> AnalyzeRequest:
    """Check the combination of options.

    Raises:
        ConfigError: both a file and a feed, or neither; a step and a rate, or neither; an invalid rate of storage.
    """
    limit = units.parse_bytes_per_s(storage) if storage is not None else None
    if storage is not None and not limit:
        raise ConfigError(f"--storage must be a rate such as '330 MB/s', above 0, got {storage!r}")
    if storage is not None and not re.search(r"[a-z]", re.sub(r"e[+-]?\d|/\s*s", "", storage.lower())):
        number = storage.partition("/")[0].strip()
        wanted = f"write '{number} MB/s', or '{number} B/s' for bytes"
        raise ConfigError(f"--storage must have a unit: {wanted}, got {storage!r}")
    request = AnalyzeRequest(storage_bytes_per_s=limit, **given)
    if (request.file is None) == (request.feed is None):
        raise ConfigError("name either a file that describes a feed, as for `mbaas serve`, or a running --feed")
    if request.feed is None and (request.step is None) == (request.rate_per_s is None):
        raise ConfigError("say how fast training is: either --step module:function, which is measured, or --rate")
    if request.feed is not None and (request.step, request.rate_per_s, request.verify) != (None, None, False):
        raise ConfigError("a running --feed has its own rates: leave out --step, --rate and --verify")
    if request.quick and (request.verify or request.feed is not None):
        other = "--verify" if request.verify else "--feed"
        raise ConfigError(f"--quick measures rates of a file and runs no feed: leave out --quick or {other}")
    if request.trials < 1:
        raise ConfigError(f"--trials must be at least 1, got {request.trials}")
    return request


def analyze(
    request: AnalyzeRequest, *, as_json: bool, save: Path | None, report: Path | None, plots: Path | None
) -> None:
    """Measure, and show the result.

    Args:
        request: the command line.
        as_json: write one line with one JSON object.
        save: a file for the same object.
        report: a file for the report as an HTML page.
        plots: a folder for its plots.

    Raises:
        ConfigError: an invalid file or step, or a missing folder.
        MbaasError: a measurement failed.
    """
    for path in (save, report):  # before minutes of measuring
        if path is not None and not path.resolve().parent.is_dir():
            raise ConfigError(f"the folder of {path} must exist")
    has_ended, saved = threading.Event(), list[SavedStages]()
    try:
        with end_as_ctrl_c(lambda: _see_to_the_end(has_ended, saved)):
            found = _of_feed(request) if request.feed is not None else _of_file(request, saved.append)
    except KeyboardInterrupt:
        _say_saved(saved)
        raise
    finally:
        has_ended.set()
    text = json.dumps(found.to_json())
    if save is not None:
        save.write_text(text + "\n")
    if report is not None or plots is not None:
        from mbaas.analysis.report import write_plots, write_report

        if report is not None:
            write_report(found, report, command=shlex.join(["mbaas", *sys.argv[1:]]))
        if plots is not None:
            write_plots(found, plots)
    if as_json:
        write_json(text)
    else:
        out.print(analysis_view.page(found))
    for note in found.notes:  # last, and on stderr: below the page, and not in the JSON
        say_note(note)
    if found.was_stopped:
        _say_saved(saved)
        raise typer.Exit(CUT_OFF)


def _say_saved(saved: Sequence[SavedStages]) -> None:
    for each in saved:
        if each.stages and each.path is not None:
            say_note(f"the same command continues after {each.stages[-1]}: results so far are in {each.path}")


def _see_to_the_end(has_ended: threading.Event, saved: Sequence[SavedStages]) -> None:
    """Exit this process by force if the measurements do not end."""
    from mbaas import runtime

    if not runtime.see_to_the_end(has_ended):
        return
    try:
        _say_saved(saved)
        say_error("interrupted; Ray ended first, and with it the measurement")
    finally:
        sys.stdout.flush()
        os._exit(CUT_OFF)


def _of_feed(request: AnalyzeRequest) -> Analysis:
    assert request.feed is not None
    connect(request.address, start=False)
    from mbaas.analysis.live import analyze_feed

    return analyze_feed(request.feed)


def _of_file(request: AnalyzeRequest, saving: Callable[[SavedStages], None]) -> Analysis:
    assert request.file is not None
    described = feed_file.load(request.file)
    from mbaas import __version__, runtime
    from mbaas.analysis.measuring.effort import QUICK, Effort, saved_path
    from mbaas.analysis.measuring.portion import portion
    from mbaas.analysis.measuring.service import Workload
    from mbaas.analysis.measuring.steps import PacedStep, load_step
    from mbaas.analysis.measuring.system import cores_here, workers_here
    from mbaas.analysis.whole import analyze
    from mbaas.model.rates import Setup

    options = described.options
    step = load_step(request.step) if request.step is not None else PacedStep(request.rate_per_s or 0.0)
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
    same = replace(request, verify=False, run=True)  # without options that change no result of a stage
    about = repr((__version__, cores, effort, dataset.fingerprint, workload.pipeline, options, same))
    saved = SavedStages(saved_path(about), about=about)
    saving(saved)
    if saved.earlier:
        stages = ", ".join(saved.earlier)
        say_note(f"continuing an interrupted analysis after {stages}; delete {saved.path} to measure these again")
    # Ray gets at least as many CPUs as there are workers, even with fewer cores: workers would wait forever for a CPU.
    with _own_ray(max(cores, options.prep_workers or 0)):
        gpus = runtime.gpus()
        workers = options.prep_workers or workers_here(workload, cores=cores, gpus=gpus)
        memory_bytes = _memory_bytes(options, workers)
        return analyze(
            workload,
            setup=Setup(
                prep_workers=workers,
                cache_bytes=_cache_bytes(options, dataset.total_bytes, memory_bytes),
                # a tier never holds more than the data
                disk_bytes=min(options.disk.max_bytes, dataset.total_bytes) if options.disk is not None else 0,
                decoded=options.cache_decoded,
                trials=request.trials,
                cpu_price_per_h=options.cpu_price_per_h,
            ),
            step=_said_of_step(request),
            rate_per_s=request.rate_per_s,
            check=request.verify,
            run=request.run,
            effort=effort,
            gpus=gpus,
            memory_bytes=memory_bytes,
            tell=lambda text: line(err, text, style="dim"),
            saved=saved,
        )


def _memory_bytes(options: FeedOptions, workers: int) -> int:
    """Return the bytes of memory for a feed's cache on this machine, next to its staging."""
    from mbaas import runtime

    store_bytes = max(runtime.store_bytes().values())
    staged = options.staging_bytes or default_staging(store_bytes, wanted_staging(workers))
    return max(0, free_bytes(store_bytes, ()) - staged)


def _cache_bytes(options: FeedOptions, total_bytes: int, memory_bytes: int) -> int:
    if options.cache_bytes is not None:
        return options.cache_bytes
    return default_cache(total_bytes, memory_bytes, grows=options.cache_decoded)


def _said_of_step(request: AnalyzeRequest) -> str:
    if request.rate_per_s is None:
        return f"{request.step}, measured"
    return f"{units.number(request.rate_per_s)} samples/s, as stated"


@contextmanager
def _own_ray(cpus: int) -> Iterator[None]:
    """Start a separate Ray, so that no other work affects the measurements; end it afterwards."""
    import ray

    from mbaas import runtime

    runtime.start_ray(cpus)
    try:
        yield
    finally:
        ray.shutdown()
