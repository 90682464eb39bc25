"""How far the report can be trusted: predictions that were run, doubts, what was measured, and how."""

from __future__ import annotations

import math

from mbaas.analysis import words
from mbaas.analysis.quantity import Quantity
from mbaas.analysis.rates import Rates
from mbaas.analysis.report.amounts import SHORT, between, sentence, setting, with_interval
from mbaas.analysis.report.markup import Markup, element, joined, text
from mbaas.analysis.report.studies import NAMES_OF
from mbaas.analysis.report.tables import details, table
from mbaas.analysis.setup import Setup
from mbaas.analysis.whole import Analysis

WORDS = {
    "sample": "one item of the dataset, such as an image",
    "minibatch": "the samples that one step of training takes at once",
    "epoch": "one pass over the whole dataset; a steady one is any after the first, when caches are full",
    "trial": "one training run of a search; several can train at the same time",
    "feed": "what prepares minibatches and hands them to trials; if trials share it, each sample is read and prepared "
    "once for all of them",
    "prep": "to turn the bytes of a sample into numbers: decoding, cropping, flipping",
    "interval": "two numbers between which a figure lies: repeated measurements leave that much open (95 % sure where "
    "there are six or more); those of predictions assume that all rates are off the same way at once",
}


def checks(analysis: Analysis) -> Markup:
    """Predicted points that were run, and their errors."""
    found = analysis.verification
    if found is None:
        return element(
            "p",
            "No prediction was run for this report. ",
            element("code", "mbaas analyze --verify"),
            " runs some of them, and marks what it measures in the curves above.",
        )
    rows = [
        (
            f"{NAMES_OF.get(check.parameter, check.parameter)}: {setting(check.parameter, check.value)}",
            with_interval(check.predicted),
            with_interval(check.found),
            f"{100 * check.error:+.1f} %",
            f"{100 * check.simulated_error:+.1f} %",
            SHORT[check.limit],
        )
        for check in found.checks
    ]
    said = (
        f"{words.counted(len(rows), 'prediction')} {'was' if len(rows) == 1 else 'were'} run. Half of them are off by "
        f"at most {words.share(found.median_error)}, all by at most {words.share(found.worst_error)}. An error above 0 "
        "is a prediction that was too fast. The simulator predicted the same points too."
    )
    heads = (
        "what was run",
        "predicted, samples/s in each trial",
        "measured",
        "error",
        "simulator's error",
        "said to set the pace",
    )
    return joined(
        [
            element("p", said),
            table("Predictions that were run", heads, rows, numbers=(1, 2, 3, 4)),
        ]
    )


def doubts(analysis: Analysis) -> Markup:
    """What makes a figure doubtful."""
    notes = list(dict.fromkeys(analysis.notes))
    if not notes:
        return element("p", "Nothing was seen that makes a figure doubtful.")
    return element("ul", *(element("li", sentence(note)) for note in notes), class_="doubts")


def rates_table(analysis: Analysis) -> Markup:
    """G, P, S, C and costs in plain words."""
    rates, setup = analysis.rates, analysis.setup
    workers = setup.workers_of(rates.cores)
    readers = max(rates.storage.points, key=lambda point: point[1].value)[0]
    cached = rates.cache.scaled(1 / rates.sample_bytes, unit="samples/s")
    rows = [
        _rate("G", "Training takes", rates.step, "one trial alone, on made-up data that is always ready"),
        _rate(
            "P", "Prep makes", rates.prep.quantity(workers), f"{_workers(workers)}, all data in memory, nobody trains"
        ),
        *_serving(rates, workers),
        _rate("S", "Storage gives", rates.storage.quantity(readers), f"{_readers(readers)}, at random, nothing cached"),
        _rate("C", "The cache gives", cached, f"memory, {words.size(rates.cache.value)}/s"),
    ]
    if rates.disk is not None:
        disk = rates.disk.scaled(1 / rates.sample_bytes, unit="samples/s")
        rows.append(_rate("", "The local disk gives", disk, f"{words.size(rates.disk.value)}/s"))
    heads = ("part", "samples/s", "between", "how")
    return table("What was measured, each part on its own", heads, rows, numbers=(1, 2))


def _serving(rates: Rates, workers: int) -> list[tuple[str, str, str, str]]:
    """What workers prepare in a feed, if that was measured."""
    if not rates.serving_s.high:
        return []
    more = (
        f"the same workers, who hand on what they made: {_micro(rates.serving_s)} µs more for each sample of a worker"
    )
    return [_rate("", "Prep of a feed makes", rates.feed_quantity(workers), more)]


def costs(rates: Rates) -> Markup:
    """What a sample costs, for those who want to know."""
    rows = [
        (name, _micro(cost), between(cost.scaled(1e6)) or "–")
        for name, cost in (
            ("to prepare it", rates.prepared_cpu_s),
            ("to stage it, once for all trials", rates.staging_cpu_s),
            ("to hand it to a trial", rates.delivery_cpu_s),
            ("a trial's step", rates.step_cpu_s),
        )
    ]
    sizes = (
        f"A sample is {words.size(rates.sample_bytes)} raw and {words.size(rates.pixel_bytes)} prepared; the dataset "
        f"is {words.size(rates.dataset_bytes)}."
    )
    heads = ("CPU time of a sample", "µs", "between")
    return details("What a sample costs", element("p", sizes), table("CPU time", heads, rows, numbers=(1, 2)))


def facts(analysis: Analysis, command: str | None) -> Markup:
    """What was analyzed, where, when, and how it is run."""
    subject, rates = analysis.subject, analysis.rates
    rows = [
        ("dataset", subject.data),
        ("pipeline", element("code", text(subject.pipeline))),
        ("training step", subject.step),
        ("machine", subject.machine),
        ("date", subject.date),
        *([("command", element("code", text(command)))] if command is not None else []),
        *_setup_rows(analysis.setup, rates),
    ]
    return element(
        "dl", *(part for name, value in rows for part in (element("dt", name), element("dd", value))), class_="facts"
    )


def glossary() -> Markup:
    """Words that the report uses."""
    entries = [part for word, meaning in WORDS.items() for part in (element("dt", word), element("dd", meaning))]
    return details("Words", element("dl", *entries, class_="words"))


def _rate(letter: str, name: str, rate: Quantity, how: str) -> tuple[str, str, str, str]:
    label = joined([name, *([" ", element("abbr", letter)] if letter else [])])
    return label, words.number(rate.value), between(rate) or "as stated", how


def _workers(count: int) -> str:
    return f"{words.counted(count, 'prep worker')}"


def _readers(count: float) -> str:
    return f"{words.number(count)} {'reader' if count == 1 else 'readers'}"


def _micro(cost: Quantity) -> str:
    return words.number(1e6 * cost.value)


def _setup_rows(setup: Setup, rates: Rates) -> list[tuple[str, str]]:
    workers, cores = setup.workers_of(rates.cores), setup.cores_of(rates.cores)
    rows = [
        ("trials", f"{setup.trials:,}" + (_sharing(setup) if setup.trials > 1 else "")),
        ("nodes", f"{setup.nodes:,}"),
        ("of a node", f"{words.counted(workers, 'prep worker')} on {words.counted(cores, 'core')}"),
        ("cache of a node", words.size(setup.cache_bytes)),
        ("minibatch", words.counted(setup.batch_size or rates.batch_size, "sample")),
    ]
    if setup.disk_bytes:
        rows.append(("local disk of a node", words.size(setup.disk_bytes)))
    if setup.dram_bytes:
        rows.append(("page cache of a node", words.size(setup.dram_bytes)))
    if setup.readers is not None:
        rows.append(("readers of a node", f"{setup.readers:,}"))
    if setup.accelerators is not None:
        rows.append(("accelerators of a node", f"{setup.accelerators:,}"))
    if setup.storage_factor != 1:
        rows.append(("storage", f"{words.number(setup.storage_factor)} times as fast as measured"))
    if setup.accelerator_factor != 1:
        rows.append(("step", f"{words.number(setup.accelerator_factor)} times as fast as measured"))
    if setup.network_bytes_per_s < math.inf:
        rows.append(("network of a node", f"{words.size(setup.network_bytes_per_s)}/s"))
    return rows


def _sharing(setup: Setup) -> str:
    return ", sharing one feed" if setup.sharing else ", each with a feed of its own"
