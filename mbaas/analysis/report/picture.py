"""The pipeline from storage to the training step: what could flow from each place to the next, and what does."""

from __future__ import annotations

from collections.abc import Callable

from mbaas.analysis import words
from mbaas.analysis.quantity import spanning
from mbaas.analysis.rates import Rates
from mbaas.analysis.report.markup import Markup, element, joined
from mbaas.analysis.report.pipes import MOST_ROOM, SETS_THE_PACE, Link, Place, Tall, Wide, picture
from mbaas.analysis.report.tables import details, table
from mbaas.analysis.setup import Setup
from mbaas.analysis.stages import Stages, stages
from mbaas.analysis.whatif import BOUNDS
from mbaas.analysis.whole import Analysis


def places_of(rates: Rates, setup: Setup, *, stored: float, cached: float) -> list[Place]:
    """From storage to the step; shares of samples come from storage and from caches."""
    where = f"on {words.counted(setup.nodes, 'node')}"
    workers = setup.nodes * setup.workers_of(rates.cores)
    shared = "one feed" if setup.sharing else "a feed each"
    batch_size = rates.batch_size if setup.batch_size is None else setup.batch_size
    return [
        Place("Storage", (f"{words.share(stored)} of", "samples")),
        Place("Cache", (f"{words.share(cached)} of", "samples")),
        Place("Prep", (words.counted(workers, "worker"), where)),
        Place("Staging", ("minibatches", "in memory")),
        Place("Trials", (words.counted(setup.trials, "trial"), shared if setup.trials > 1 else where)),
        Place("Step", (f"{batch_size:,} samples", "at a time")),
    ]


def links_of(analysis: Analysis) -> list[Link]:
    """The five links between the six places, in a steady epoch."""
    rates, setup, epoch = analysis.rates, analysis.setup, analysis.prediction.steady
    found = dict(
        zip(BOUNDS, (stages(rates, setup, steady=True, step=b, prep=b, supply=b) for b in BOUNDS), strict=True)
    )

    def link(
        verb: str,
        seconds: Callable[[Stages], float],
        names: tuple[str, ...],
        *,
        share: float = 1.0,
        flows: bool = True,
    ) -> Link:
        spent = {bound: seconds(at) for bound, at in found.items()}
        limited = min(spent.values()) > 0
        allowed = spanning(*(share / spent[b] for b in ("value", "low", "high")), unit="samples/s") if limited else None
        room = 1 / (spent["value"] * epoch.trial_per_s.value) if limited else MOST_ROOM
        return Link(verb, allowed, share, room, flows, epoch.limit in names)

    middle = found["value"]
    prep = "prep makes" if middle.prep["prep"] >= middle.prep["cores"] else "cores allow"
    compute = max(middle.compute, key=middle.compute.__getitem__)
    takes = {"step": "step takes", "accelerators": "accelerators take", "steps' cores": "cores allow"}
    stored, cached = epoch.reads.storage, epoch.reads.memory + epoch.reads.disk
    return [
        link("storage gives", lambda s: s.fetch["storage"], ("storage",), share=stored, flows=stored > 0),
        link("cache gives", _from_caches, ("memory", "disk"), share=cached),
        link(prep, lambda s: max(s.prep["prep"], s.prep["cores"]), ("prep", "cores")),
        link("network carries" if setup.nodes > 1 else "handed over", lambda s: s.prep["network"], ("network",)),
        link(takes[compute], lambda s: s.compute_s, tuple(takes)),
    ]


def _from_caches(found: Stages) -> float:
    """Seconds of memory and disk."""
    return sum(seconds for name, seconds in found.fetch.items() if name != "storage")


def pipeline(analysis: Analysis) -> Markup:
    """Both pictures, what they show in words, and the same as a table."""
    epoch = analysis.prediction.steady
    links = links_of(analysis)
    stored, cached = epoch.reads.storage, epoch.reads.memory + epoch.reads.disk
    places = places_of(analysis.rates, analysis.setup, stored=stored, cached=cached)
    flow = f"{words.number(epoch.trial_per_s.value)} samples/s"
    said = (
        f"The stream is what flows now: {flow} in each trial. A pipe is what its part could carry by itself, as the "
        "number at it says, and what was measured leaves open below it. Where the stream fills its pipe, that part "
        f"sets the pace. Pipes are drawn at most {MOST_ROOM:g} times as wide as the stream."
    )
    if stored and cached:
        said += f" Storage has to give only {words.share(stored)} of the samples, the cache the others, in turns."
    return joined(
        [
            element(
                "figure",
                picture(
                    places, links, Wide(), f"Pipeline from storage to the training step; {flow} flow in each trial"
                ),
                picture(places, links, Tall(), f"Pipeline from top to bottom; {flow} flow in each trial"),
                element("figcaption", said),
            ),
            details("The picture as a table", _table(places, links)),
        ]
    )


def _table(places: list[Place], links: list[Link]) -> Markup:
    rows = []
    for number, link in enumerate(links):
        said = f"{link.verb} {link.said}" if link.bounded else link.said
        busy = f"{words.share(min(1.0, 1 / link.room))}" if link.bounded else "–"
        rows.append(
            (
                f"{places[number].name} to {places[number + 1].name}",
                said,
                link.interval or "–",
                busy,
                SETS_THE_PACE if link.limit else "",
            )
        )
    heads = ("from, to", "could carry, in each trial", "between", "of that is used", "pace")
    return table("What each part could carry", heads, rows, numbers=(2, 3))
