"""CPU time and price of loading an epoch, compared with a DataLoader per trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas.costs import HOUR_S, LoadingCosts
from mbaas.model import words
from mbaas.model.quantity import BOUNDS, OPPOSITE, Bound, Quantity, plain_fields, spanning, stated
from mbaas.model.rates import Rates, Setup
from mbaas.model.supply import resource_times


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """Cost of loading a steady epoch for one trial.

    Attributes:
        cpu_h: CPU-hours of fetching, preparing, staging, delivery and background work, without training. With a shared
            feed, this is the trial's part of the feed's total; otherwise the total of its own feed.
        alone_cpu_h: minimum CPU-hours of a separate DataLoader: those of preparing each sample once. Reads, and the
            transfer of minibatches to the trial, are not included.
        price, alone_price: price of these hours; None if the price of a CPU is unknown.
    """

    cpu_h: Quantity
    alone_cpu_h: Quantity
    price: Quantity | None
    alone_price: Quantity | None

    @property
    def sentence(self) -> str:
        """Both costs as a clause."""
        here, alone = _said(self.cpu_h, self.price), _said(self.alone_cpu_h, self.alone_price)
        return f"loading takes {here} for an epoch of each trial; a DataLoader for each would take at least {alone}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


def epoch_costs(rates: Rates, setup: Setup) -> EpochCosts:
    """Predict the cost of loading from measured rates."""
    hours = spanning(*(rates.samples * _loading_s(rates, setup, bound) / HOUR_S for bound in BOUNDS), unit="CPU-h")
    alone = rates.prepared_cpu_s.scaled(rates.samples / HOUR_S, unit="CPU-h")
    return _priced(hours, alone, setup.cpu_price_per_h)


def costs_so_far(costs: LoadingCosts, samples: int) -> EpochCosts | None:
    """Return a running feed's mean cost for an epoch of ``samples``; None before its first delivery."""
    if not costs.delivered_samples or not costs.encoded_samples:
        return None
    hours, alone = (stated(each(samples), unit="CPU-h") for each in (costs.cpu_hours, costs.alone_cpu_hours))
    return _priced(hours, alone, costs.cpu_price_per_h)


def _priced(hours: Quantity, alone: Quantity, per_h: float | None) -> EpochCosts:
    price, alone_price = (each.scaled(per_h, unit="price") if per_h is not None else None for each in (hours, alone))
    return EpochCosts(cpu_h=hours, alone_cpu_h=alone, price=price, alone_price=alone_price)


def _said(hours: Quantity, price: Quantity | None) -> str:
    money = "" if price is None else f" for {words.with_interval(price)}"
    return f"{words.with_interval(hours)} CPU-hours{money}"


def _loading_s(rates: Rates, setup: Setup, bound: Bound) -> float:
    """Return the CPU-seconds of loading per sample of one trial; ``bound`` refers to speed, as in `stages`."""
    found = resource_times(rates, setup, steady=True, step=bound, prep=bound)
    # busy time of a node's cores for one sample of every trial, without the steps of its trials
    busy_s = max(found.prep["cores"], found.cores_s) - found.compute["steps' cores"]
    delivery_s, trials = rates.delivery_cpu_s.at(OPPOSITE[bound]), setup.node_trials
    cores = setup.cores_of(rates.cores)
    free_cores, pace_s = rates.free_cores(cores, bound), max(found.compute_s, found.prep_s, found.fetch_s)
    made_s = free_cores * busy_s - trials * delivery_s
    # Work done once for all trials is divided by their number. In `stages`, the node with the most trials represents
    # all nodes.
    share = setup.nodes / setup.trials if setup.sharing else 1 / trials
    background_s = (cores - free_cores) * pace_s * setup.nodes / setup.trials
    return max(0.0, made_s) * share + background_s + delivery_s
