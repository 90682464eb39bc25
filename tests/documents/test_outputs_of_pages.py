"""Outputs of commands on pages are what the commands print for these figures.

The figures are those of real runs. `measured.json` is the file of the `mbaas analyze --save` on the page.
"""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

from command_output import run
from rich.console import Console, RenderableType

from mbaas.cli import analysis_view, chaos, what_if
from mbaas.model.pace import predict
from mbaas.tools.analysis.advice import epoch_costs, recommend
from mbaas.tools.analysis.decoding import decoding
from mbaas.tools.analysis.whole import Analysis, Subject
from mbaas.tools.bench import render
from mbaas.tools.bench.report import BenchReport, Machine, RowResult
from mbaas.tools.bench.rows import BenchSettings
from mbaas.tools.chaos.report import Checked, KindReport, Report
from mbaas.tools.chaos.usage import Growth
from support.pages import ROOT, block_with

MEASURED = Path(__file__).with_name("measured.json")

WIDTH = 100


def shown(page: str, line: str) -> dict[str, list[str]]:
    """Outputs in the block of a page that contains a command line: command line -> printed lines."""
    found: dict[str, list[str]] = {}
    for each in block_with(ROOT / "docs" / page, f"$ {line}").text.splitlines():
        if each.startswith("$ "):
            printed = found[each.removeprefix("$ ")] = []
        else:
            printed.append(each)
    return found


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().splitlines()]


def printed(page: RenderableType) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=WIDTH).print(page)
    return lines_of(out.getvalue())


def test_analyze_and_what_if() -> None:
    analysis, answer = shown("analyze.md", "mbaas analyze feed.yaml --rate 900").items()
    said = json.loads(MEASURED.read_text())
    rates, setup = what_if.load(MEASURED)
    found = Analysis(
        subject=Subject(**said["subject"]),
        sentence=said["verdict"],
        rates=rates,
        setup=setup,
        prediction=predict(rates, setup),
        changes=tuple(recommend(rates, setup)),
        costs=epoch_costs(rates, setup),
        decoding=decoding(rates, setup),
    )
    assert printed(analysis_view.page(found)) == analysis[1]
    line, output = answer
    assert lines_of(run(line.removeprefix("mbaas ").replace("measured.json", str(MEASURED)))) == output


def test_bench() -> None:
    ((line, output),) = shown("loading.md", "mbaas bench --trials 2").items()

    def row(name: str, *figures: float, share: float | None = None, cpu_share: float | None = None) -> RowResult:
        rate, cpu_s, cores, peak_gb = figures
        more: dict[str, Any] = dict.fromkeys(("decoded_share", "decoded_cpu_share", "best_share", "best_cpu_share"))
        return RowResult(
            name,
            2,
            64,
            samples_per_s=rate,
            cores_by_kind=(("trial", cores),),
            peak_bytes=int(peak_gb * 1e9),
            rounds=1,
            share=share,
            cpu_share=cpu_share,
            cpu_s_per_1000=cpu_s,
            errors=(),
            **more,
        )

    results = (
        row("prep", 1838, 0.956, 1.76, 0.974),
        row("prep-decoded", 12778, 0.149, 1.91, 1.73),
        row("memory", 3_069_038, 0.000627, 1.92, 0.65),
        row("dataloader", 1068, 1.18, 1.26, 0.828, share=0.29, cpu_share=0.41),
        row("dali", 792, 1.78, 1.41, 0.43, share=0.22, cpu_share=0.27),
        row("mbaas", 3748, 0.492, 1.84, 2.09, share=1.02, cpu_share=0.97),
        row("mbaas-decoded", 19395, 0.0877, 1.7, 3.23, share=5.27, cpu_share=5.45),
    )
    settings = BenchSettings(trials=(2,), batch=(64,), rounds=1)
    table = printed(render.render(BenchReport(settings, Machine(), 1500, results)))
    first = table.index("2 trials, batches of 64")
    assert table[first : first + len(output)] == output, line


def test_chaos() -> None:
    output = shown("chaos.md", "mbaas chaos --faults 6")["mbaas chaos --faults 6"]
    waits_s = {
        "add-node": 0.688,
        "kill-coordinator": 0.0275,
        "kill-driver": 0.0,
        "lose-storage": 7.32,
        "pause-three": 15.4,
        "slow-link": 0.391,
    }
    growth = (
        Growth("processes", 20.5, 20, 0),
        Growth("threads", 602, 538, -154),
        Growth("descriptors", 996, 928, -206),
        Growth("memory_bytes", 1.77e9, 1.71e9, -13.6e6),
        Growth("shared_files", 0, 0, 0),
    )
    checked = Checked(trials=3, samples=24_036, epochs=12, incarnations=3, is_independent=True)
    kinds = {kind: KindReport(1, 1, (wait_s,)) for kind, wait_s in waits_s.items()}
    assert printed(chaos.render(Report(seed=0, seconds=33.9, kinds=kinds, checked=checked, growth=growth))) == output
