"""What an epoch of a trial costs: CPU time for loading, and money, beside a DataLoader for each trial."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mbaas.analysis import words
from mbaas.analysis.quantity import BOUNDS, OPPOSITE, Bound, Quantity, plain_fields, spanning, stated
from mbaas.analysis.rates import Rates
from mbaas.analysis.setup import Setup
from mbaas.analysis.stages import stages
from mbaas.costs import HOUR_S, LoadingCosts


@dataclass(frozen=True, kw_only=True)
class EpochCosts:
    """What loading takes for an epoch of one trial, after the first epoch.

    Attributes:
        cpu_h: CPU-hours of fetching, preparing, staging and handing over, and of what goes on all the time: the trial's
            part of what a feed takes for all of its trials, or what its own feed takes if each has one. Training is not
            in it.
        alone_cpu_h: CPU-hours that a DataLoader of its own would take at least: those of preparing each sample once.
            It would also read them, and hand minibatches from its workers to the trial.
        price, alone_price: what these hours cost; None where the price of a CPU is not known.
    """

    cpu_h: Quantity
    alone_cpu_h: Quantity
    price: Quantity | None
    alone_price: Quantity | None

    @property
    def sentence(self) -> str:
        """Both as a clause for people."""
        here, alone = _said(self.cpu_h, self.price), _said(self.alone_cpu_h, self.alone_price)
        return f"loading takes {here} for an epoch of each trial; a DataLoader for each would take at least {alone}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields by name."""
        return plain_fields(self)


def epoch_costs(rates: Rates, setup: Setup) -> EpochCosts:
    """Predict what loading costs from measured rates."""
    hours = spanning(*(rates.samples * _loading_s(rates, setup, bound) / HOUR_S for bound in BOUNDS), unit="CPU-h")
    alone = rates.prepared_cpu_s.scaled(rates.samples / HOUR_S, unit="CPU-h")
    return _priced(hours, alone, setup.cpu_price_per_h)


def costs_so_far(costs: LoadingCosts, samples: int) -> EpochCosts | None:
    """Return what a running feed took on average for an epoch of ``samples``; None before it has delivered any."""
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
    """Return the CPU-seconds of loading for a sample of one trial; ``bound`` is of the speed, as in `stages`."""
    found = stages(rates, setup, steady=True, step=bound, prep=bound)
    # what keeps a node's cores busy for one sample of every trial, less the steps of the trials there
    busy_s = max(found.prep["cores"], found.cores_s) - found.compute["steps' cores"]
    delivery_s, trials = rates.delivery_cpu_s.at(OPPOSITE[bound]), setup.node_trials
    cores = setup.cores_of(rates.cores)
    free_cores, pace_s = rates.free_cores(cores, bound), max(found.compute_s, found.prep_s, found.fetch_s)
    made_s = free_cores * busy_s - trials * delivery_s
    # What is made once for all is divided by all; the node that has most trials stands for all nodes in `stages`.
    share = setup.nodes / setup.trials if setup.sharing else 1 / trials
    background_s = (cores - free_cores) * pace_s * setup.nodes / setup.trials
    return max(0.0, made_s) * share + background_s + delivery_s
