"""Advice from predictions: the verdict, ranked changes to the setup, costs of loading, and machines to rent."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

from mbaas.base import units
from mbaas.base.units import BYTES, BytesPerS
from mbaas.base.validation import options
from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.model.pace import Epoch, Waits, fewest_prep_cores, predict, smallest_cache, speedup, stall_range
from mbaas.model.quantity import BOUNDS, OPPOSITE, AsJson, Bound, Quantity, spanning, stated
from mbaas.model.rates import Rates, Setup
from mbaas.model.sharing import HOUR_S, LoadingCosts
from mbaas.model.supply import read_shares, resource_times
from mbaas.tools.analysis.decoding import decoding

LEAST_GAIN = 1.02
"""Minimum speedup of a recommended change."""

CLEAR_GAIN = 1.1
"""Settings with at least this speedup rank before all purchases."""

PROBLEM = 0.05
"""Loading is a problem if a trial waits for data for more than this share of its time."""

LEAST_PART = 0.005
"""Stalls below this share of the time are not mentioned."""

SHORT_S = 0.5
"""No change is worthwhile for shorter epochs (seconds): starting a trial takes longer."""

MOST_TRIALS = 64
"""Most trials for which the costs of a feed and of DataLoaders are compared."""

DISAGREEMENT = 0.1
"""Maximum difference between two measurements of a stall, as a share of the epoch. Beyond it the stall is unknown."""

Kind = Literal["setting", "purchase"]


@dataclass(frozen=True, kw_only=True)
class Change(AsJson):
    """A change to the setup.

    Attributes:
        advice: the change as a clause: "use 4 prep workers instead of 2".
        setup: the changed setup.
        epoch_s, speedup: of steady epochs after the change.
    """

    kind: Kind
    advice: str
    setup: Setup
    epoch_s: Quantity
    speedup: Quantity


Candidate = tuple[Kind, str, Setup]
"""A change to evaluate: (kind, advice, changed setup)."""


def recommend(
    rates: Rates, setup: Setup, *, memory_bytes: float = math.inf, seen: Mapping[str, Waits] = MappingProxyType({})
) -> list[Change]:
    """Return the changes that each make steady epochs at least 2 % faster.

    Settings with a clear gain come first, then all other changes by gain. The list is empty for epochs below `SHORT_S`,
    if it is unknown how long or why trials wait, and if the rates are too uncertain for a verdict.

    Args:
        memory_bytes: memory of a node that a cache could use without a purchase.
        seen: see `verdict`.
    """
    now = predict(rates, setup)
    if _is_short(now.steady) or _unknown(_views(now.steady, seen)) or _too_noisy(rates, setup, now.steady):
        return []
    made = []
    for kind, advice, changed in (*_settings(rates, setup, memory_bytes), *_purchases(rates, setup, memory_bytes)):
        prediction = predict(rates, changed)
        gain = speedup(now, prediction)
        if gain.value >= LEAST_GAIN:
            epoch_s = prediction.steady.epoch_s
            made.append(Change(kind=kind, advice=advice, setup=changed, epoch_s=epoch_s, speedup=gain))
    # a setting is free, so it ranks before a purchase with a higher gain, unless its own gain is small
    return sorted(made, key=lambda c: (c.kind != "setting" or c.speedup.value < CLEAR_GAIN, -c.speedup.value))


def _settings(rates: Rates, setup: Setup, memory_bytes: float) -> Iterator[Candidate]:
    if setup.trials > 1 and not setup.sharing:
        once = "so that each sample is fetched and prepared once for all"
        yield "setting", f"let all {setup.trials} trials share one feed, {once}", replace(setup, sharing=True)
    workers = setup.workers_of(rates.cores)
    best = _best_workers(rates, setup)
    if best != workers:
        advice = f"use {units.counted(best, 'prep worker')} instead of {workers}"
        yield "setting", advice, replace(setup, prep_workers=best)
    wanted_bytes = _useful_cache(rates, setup)
    affordable_bytes = min(wanted_bytes, memory_bytes)
    if affordable_bytes > setup.cache_bytes:
        yield "setting", _about_cache(setup, affordable_bytes), replace(setup, cache_bytes=affordable_bytes)
    yield from _decoded(rates, setup, memory_bytes)


def _decoded(rates: Rates, setup: Setup, memory_bytes: float) -> Iterator[Candidate]:
    # two candidates: the cache at its present size, and a cache that is large enough
    found = decoding(rates, setup)
    if found is None or not found.is_worthwhile:
        return
    keeping = replace(setup, decoded=True)
    if not setup.decoded:
        yield "setting", "keep samples decoded (cache_decoded: true)", keeping
    if found.enough_bytes > setup.cache_bytes:
        share = read_shares(rates, replace(keeping, cache_bytes=found.enough_bytes), steady=True).decoded
        kept = "all samples are" if share > 0.995 else f"{units.percent(share)} of samples are"
        option = "" if setup.decoded else " with cache_decoded: true"
        advice = f"{_about_cache(setup, found.enough_bytes)}{option}, so that {kept} kept decoded"
        # Decoded samples can take more memory than all encoded ones, so this is a setting only if the node is known to
        # have enough memory.
        has_room = math.isfinite(memory_bytes) and found.enough_bytes <= memory_bytes
        larger = replace(keeping, cache_bytes=found.enough_bytes)
        yield ("setting" if has_room else "purchase"), advice, larger


def _purchases(rates: Rates, setup: Setup, memory_bytes: float) -> Iterator[Candidate]:
    wanted_bytes = _useful_cache(rates, setup)
    # a cache that fits into the existing memory is one of the settings
    if wanted_bytes > max(memory_bytes, setup.cache_bytes):
        advice = f"{_about_cache(setup, wanted_bytes)}, more memory than there is"
        yield "purchase", advice, replace(setup, cache_bytes=wanted_bytes)
    cores, workers = setup.cores_of(rates.cores), setup.workers_of(rates.cores)
    enough = fewest_prep_cores(rates, setup).amount
    if enough is not None and enough > workers:
        more = replace(setup, cores=cores + enough - workers, prep_workers=enough)
        yield "purchase", f"give each node {units.counted(enough - workers, 'more core')} for prep", more
    for thing, name in (
        ("storage that is", "storage_factor"),
        ("accelerators that are", "accelerator_factor"),
        ("a network that is", "network_bytes_per_s"),
    ):
        doubled: dict[str, Any] = {name: 2 * getattr(setup, name)}
        yield "purchase", f"use {thing} twice as fast", replace(setup, **doubled)
    yield "purchase", f"use {setup.nodes + 1} nodes instead of {setup.nodes}", replace(setup, nodes=setup.nodes + 1)


def _best_workers(rates: Rates, setup: Setup) -> int:
    """Return the fewest workers within the node's cores whose epochs are within 1 % of the shortest."""
    # all are tried: one more worker may slow prep down, and steps compete for the same cores
    counts = range(1, setup.cores_of(rates.cores) + 1)
    seconds = [predict(rates, replace(setup, prep_workers=count)).steady.epoch_s.value for count in counts]
    return next(count for count, s in zip(counts, seconds, strict=True) if s <= 1.01 * min(seconds))


def _useful_cache(rates: Rates, setup: Setup) -> float:
    enough = smallest_cache(rates, setup).amount
    # if no cache ends fetch stalls, every cached byte still shortens them
    return math.ceil(setup.read_bytes(rates.dataset_bytes)) if enough is None else enough


def _about_cache(setup: Setup, cache_bytes: float) -> str:
    each = " on each node" if setup.nodes > 1 else ""
    instead = f" instead of {units.size(setup.cache_bytes)}" if setup.cache_bytes else ""
    return f"give the cache {units.size(cache_bytes)}{each}{instead}"


def verdict(
    rates: Rates,
    setup: Setup,
    *,
    changes: Sequence[Change] | None = None,
    seen: Mapping[str, Waits] = MappingProxyType({}),
    knows_cores: bool = True,
) -> str:
    """Return a sentence with the stall share, the bottleneck, the best change and its gain.

    If the rates are so uncertain that loading may or may not be a problem, it reports that instead, and the rate to
    measure again. For an epoch shorter than `SHORT_S`, it reports the stall share without a judgement.

    Args:
        changes: the result of `recommend`, if already computed.
        seen: stall shares of a real run, by their source. If they differ from the prediction by more than
            `DISAGREEMENT`, the verdict reports the difference instead of a recommendation.
        knows_cores: whether the cores of ``rates`` are all cores of the machine; otherwise only some are known.
    """
    epoch = predict(rates, setup).steady
    if _is_short(epoch):
        takes = f"an epoch takes only {words.duration(epoch.epoch_s)}, too short for a recommendation"
        return f"No verdict: {takes}; {_who(setup)} for data {units.percent(epoch.waits.all)} of it."
    best = next(iter(recommend(rates, setup) if changes is None else changes), None)
    unknown = _unknown(_views(epoch, seen))
    if unknown is not None:
        contention = _contention(rates, setup) if knows_cores else ""
        pace = f"By the prediction {words.NAMES[epoch.limit]} {_pace(epoch)}"
        return f"{unknown}{contention}. {pace}; nothing is recommended, because that may be wrong."
    if noisy := _too_noisy(rates, setup, epoch):
        return noisy
    return f"{_waits(epoch, setup)}, and {words.NAMES[epoch.limit]} {_pace(epoch)}; {_advice(best)}."


def _is_short(epoch: Epoch) -> bool:
    return epoch.epoch_s.value < SHORT_S


def _views(epoch: Epoch, seen: Mapping[str, Waits]) -> dict[str, Waits]:
    return {"the prediction says": epoch.waits, **seen}


def _unknown(views: Mapping[str, Waits]) -> str | None:
    """Describe the stall that the views disagree about, its length or its cause; None if they agree."""
    if _differ(waits.all for waits in views.values()):
        what, tell = "The share of time that trials wait for data", _how_long
    # a view that cannot separate the two counts waits for other trials as waits for prep
    elif _differ(waits.fetch for waits in views.values()) or _differ(w.prep + w.peers for w in views.values()):
        what, tell = "The cause of the trials' waits", _parts
    else:
        return None
    return f"{what} is not known: {', '.join(f'{who} {tell(waits)}' for who, waits in views.items())}"


def _too_noisy(rates: Rates, setup: Setup, epoch: Epoch) -> str:
    """Return the reason why the rates allow no verdict; empty if they do."""
    low, high = stall_range(rates, setup)
    if not low <= PROBLEM < high or high - low <= DISAGREEMENT:
        return ""
    # a resource that is never the slowest may be as uncertain as it likes
    slowest = {name: bound for name, bound in epoch.bounds.items() if bound.low <= epoch.trial_per_s.high}
    name = max(slowest, key=lambda each: slowest[each].spread)
    return (
        f"The measurements are too noisy for a verdict: {_who(setup)} for data {units.percent(low)} to "
        f"{units.percent(high)} of the time, and the least certain rate belongs to "
        f"{words.RESOURCES.get(name, 'reading')} (±{units.percent(slowest[name].spread)}); measure again while the "
        "machine is idle, and without --quick."
    )


def _differ(shares: Iterable[float]) -> bool:
    ordered = sorted(shares)
    return ordered[-1] - ordered[0] > DISAGREEMENT


def _how_long(waits: Waits) -> str:
    # waits for other trials are not caused by loading, so they are shown separately where measured
    peers = f" ({units.percent(waits.peers)} for other trials)" if waits.peers >= LEAST_PART else ""
    return f"{units.percent(waits.all)}{peers}"


def _contention(rates: Rates, setup: Setup) -> str:
    """Explain a disagreement by too few cores for all processes; empty if there are enough."""
    workers, cores = setup.workers_of(rates.cores), setup.cores_of(rates.cores)
    trials = setup.node_trials
    if workers + trials <= cores:
        return ""
    # A trial that has its data but no core counts itself as busy, while a comparison of epochs counts it as waiting.
    wanting = f"{units.counted(trials, 'trial')} and {units.counted(workers, 'prep worker')}"
    return f"; {wanting} contend for {units.counted(cores, 'core')}"


def _waits(epoch: Epoch, setup: Setup) -> str:
    who, waits = _who(setup), epoch.waits
    if waits.all <= PROBLEM:
        share = f"only {units.percent(waits.all)}" if waits.all >= 0.01 else "less than 1 %"
        return f"Loading is not the problem: {who} for data {share} of the time"
    return f"Loading is the problem: {who} for data {units.percent(waits.all)} of the time ({_parts(waits)})"


def _who(setup: Setup) -> str:
    return "the trial waits" if setup.trials == 1 else f"each of {setup.trials} trials waits"


def _parts(waits: Waits) -> str:
    # reads first: a sample must be read before it can be prepared, so that stall is the first to look at
    parts = [("samples to be read", waits.fetch), ("samples to be prepared", waits.prep), ("other trials", waits.peers)]
    told = [f"{units.percent(part)} for {why}" for why, part in parts if part >= LEAST_PART]
    return " and ".join(told) or units.percent(waits.all)


def _pace(epoch: Epoch) -> str:
    between = units.interval(epoch.epoch_s.low, epoch.epoch_s.high, units.seconds)
    others = " or ".join(words.NAMES[name] for name in epoch.limits[1:])
    doubt = f"(or, within the measured interval, {others}) " if others else ""
    return f"{doubt}sets the pace at {units.seconds(epoch.epoch_s.value)} an epoch" + (
        f" ({between})" if between else ""
    )


def _advice(best: Change | None) -> str:
    if best is None:
        return "nothing that was looked at would make it 2 % faster"
    epoch = words.duration(best.epoch_s)
    return f"{best.advice}, and an epoch takes {epoch}, {units.number(best.speedup.value)} times as fast"


@options()
class MachineType:
    """A machine on a price list. Fields that are not listed here are those of `Setup`.

    Attributes:
        price_per_h: price of one machine for an hour, in any currency.
        cores: number of cores, assumed to be as fast as the measured machine's.
        prep_workers: prep workers of one machine; None: one per core.
        most: number of machines available.

    Raises:
        ConfigError: a negative price, or a number below 1.
    """

    name: str
    price_per_h: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    cores: int
    prep_workers: int | None = None
    cache_bytes: Annotated[float, BYTES] = 0.0
    disk_bytes: Annotated[float, BYTES] = 0.0
    dram_bytes: Annotated[float, BYTES] = 0.0
    network_bytes_per_s: BytesPerS = math.inf
    storage_factor: float = 1.0
    accelerator_factor: float = 1.0
    accelerators: int | None = None
    most: Annotated[int, Field(ge=1)] = 1

    def setup(self, base: Setup, *, nodes: int) -> Setup:
        """Return a setup of ``nodes`` such machines with the trials, sharing and batch size of ``base``."""
        priced = ("name", "price_per_h", "most")  # all other fields have the names of `Setup` fields
        own: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self) if each.name not in priced}
        return replace(base, nodes=nodes, **own)


@dataclass(frozen=True, kw_only=True)
class Offer(AsJson):
    """A number of machines of one type, with the duration and cost of a job.

    Attributes:
        machine: name of the type.
        cost: in the currency of the price list.
        alone_cost: cost of the same job on the same machines without a shared feed.
        limit: bottleneck of steady epochs, a resource of `mbaas.model.pace`.
        in_time: whether the job is predicted to meet the deadline; always true without one.
    """

    machine: str
    nodes: int
    job_s: Quantity
    cost: Quantity
    alone_cost: Quantity
    limit: str
    in_time: bool


def offers(
    rates: Rates, setup: Setup, machines: Sequence[MachineType], *, epochs: int, deadline_s: float = math.inf
) -> list[Offer]:
    """Rank every number of every machine type: first the offers in time, then by cost, then by duration.

    Args:
        setup: provides trials, sharing, batch size and readers; the machine type provides the rest.
        epochs: number of epochs of the job; the first starts with empty caches.

    Raises:
        ConfigError: ``machines`` is empty.
    """
    if not machines:
        raise ConfigError("a price list needs at least 1 machine, got 0")
    # Each number needs a prediction: caches add up over nodes, so two nodes may be more than twice as fast as one.
    found = []
    for machine in machines:
        for nodes in range(1, machine.most + 1):
            rented, per_s = machine.setup(setup, nodes=nodes), nodes * machine.price_per_h / HOUR_S
            prediction = predict(rates, rented)
            job_s, alone_s = (
                each.run_s(epochs) for each in (prediction, predict(rates, replace(rented, sharing=False)))
            )
            found.append(
                Offer(
                    machine=machine.name,
                    nodes=nodes,
                    job_s=job_s,
                    cost=job_s.scaled(per_s, unit="price"),
                    alone_cost=alone_s.scaled(per_s, unit="price"),
                    limit=prediction.steady.limit,
                    in_time=job_s.value <= deadline_s,
                )
            )
    return sorted(found, key=lambda offer: (not offer.in_time, offer.cost.value, offer.job_s.value))


@dataclass(frozen=True, kw_only=True)
class EpochCosts(AsJson):
    """Cost of loading a steady epoch for one trial.

    Attributes:
        cpu_s: CPU-seconds of fetching, preparing, staging, delivery and background work, without training. With a
            shared feed, this is the trial's part of the feed's total; otherwise the total of its own feed.
        alone_cpu_s: minimum CPU-seconds of a separate DataLoader: those of preparing each sample once. Reads, and the
            transfer of minibatches to the trial, are not included.
        price, alone_price: price of this time; None if the price of a CPU is unknown.
        pays_from: fewest trials for which a feed takes less CPU time than their DataLoaders; None if no number does, or
            if unknown.
    """

    cpu_s: Quantity
    alone_cpu_s: Quantity
    price: Quantity | None
    alone_price: Quantity | None
    pays_from: int | None

    @property
    def sentence(self) -> str:
        here, alone = _said(self.cpu_s, self.price), _said(self.alone_cpu_s, self.alone_price)
        pays = f"; a feed pays from {units.counted(self.pays_from, 'trial')} on" if self.pays_from is not None else ""
        return f"{self._compared}: {here} instead of at least {alone} for an epoch of each trial{pays}"

    @property
    def _compared(self) -> str:
        here, alone, least = self.cpu_s, self.alone_cpu_s, "a DataLoader for each trial"
        if here.low <= alone.high and alone.low <= here.high:  # also if both are 0
            return f"loading takes about as much CPU time as {least}"
        if here.value < alone.value:
            return f"loading takes {units.number(alone.value / here.value)} times less CPU time than {least}"
        return f"loading takes {units.number(here.value / alone.value)} times the CPU time of {least}"


def epoch_costs(rates: Rates, setup: Setup) -> EpochCosts:
    cpu_s = spanning(*(rates.samples * _loading_s(rates, setup, bound) for bound in BOUNDS), unit="CPU-s")
    alone = rates.prepared_cpu_s.scaled(rates.samples, unit="CPU-s")
    least_s = rates.prepared_cpu_s.value
    numbers = range(1, MOST_TRIALS + 1)
    paying = (n for n in numbers if _loading_s(rates, replace(setup, trials=n, sharing=True), "value") < least_s)
    return _priced(cpu_s, alone, setup.cpu_price_per_h, next(paying, None))


def costs_so_far(costs: LoadingCosts, samples: int, prepared: int = 0) -> EpochCosts | None:
    """Return a running feed's mean cost for an epoch of ``samples``; None before its first delivery.

    ``prepared`` is the number of samples prepared so far; 0 if unknown.
    """
    if not costs.delivered_samples or not costs.encoded_samples:
        return None
    cpu_s, alone = (stated(each(samples), unit="CPU-s") for each in (costs.cpu_s_of, costs.alone_cpu_s_of))
    return _priced(cpu_s, alone, costs.cpu_price_per_h, costs.pays_from(prepared))


def _priced(cpu_s: Quantity, alone: Quantity, per_h: float | None, pays_from: int | None) -> EpochCosts:
    price, alone_price = (
        each.scaled(per_h / HOUR_S, unit="price") if per_h is not None else None for each in (cpu_s, alone)
    )
    return EpochCosts(cpu_s=cpu_s, alone_cpu_s=alone, price=price, alone_price=alone_price, pays_from=pays_from)


def _said(cpu_s: Quantity, price: Quantity | None) -> str:
    money = "" if price is None else f" for {words.with_interval(price)}"
    return f"{words.duration(cpu_s)}{money}"


def _loading_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    """Return the CPU-seconds of loading per sample of one trial; ``bound`` refers to speed."""
    found = resource_times(rates, setup, steady=True, step=bound, prep=bound)
    # busy time of a node's cores for one sample of every trial, without the steps of its trials
    busy_s = max(found.prep["cores"], found.cores_s) - found.compute["steps' cores"]
    delivery_s, taken = rates.delivery_cpu_s.at(OPPOSITE[bound]), setup.taken_on_node
    cores = setup.cores_of(rates.cores)
    free_cores = rates.free_cores(cores, bound)
    made_s = free_cores * busy_s - taken * delivery_s
    # Work done once for all trials is divided by their number. The node with the most trials represents all nodes.
    share = setup.nodes / setup.trials if setup.sharing else 1 / taken
    background_s = (cores - free_cores) * found.pace_s * setup.nodes / setup.trials
    return max(0.0, made_s) * share + background_s + delivery_s
