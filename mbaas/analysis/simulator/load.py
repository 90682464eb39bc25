"""What steps need of the cores that prep, reading and training share on a worker's machine.

The terms are those of the row ``cores`` in `mbaas.analysis.stages`. With T trials on N workers a step needs, in CPU
seconds on each machine,

    made (prep + staging) + read from shared storage x read + T / N x trained (delivery + step)

and so long divided by the number of its cores. Costs are proportional to sizes, as everything else in the model.
"""

from __future__ import annotations

from dataclasses import dataclass

from mbaas.analysis.simulator.machine import Cores
from mbaas.analysis.simulator.model import Floats, Places


@dataclass(frozen=True, kw_only=True)
class Load:
    """Seconds of all cores of a machine, for raw bytes by step, worker and place: float64[H, N, places].

    Attributes:
        cores: of each machine.
        sample_bytes: mean size of a sample, whose costs they are.
        workers: N.
        trials: T, spread evenly over the machines.
    """

    cores: Cores
    sample_bytes: float
    workers: int
    trials: int

    def making_s(self, nbytes: Floats, *, places: Places) -> Floats:
        """Of reading, preparing and staging once what was read: [H, N]."""
        prepared = self._per_core(nbytes[..., : places.staged].sum(axis=-1))
        read = self._per_core(nbytes[..., places.pfs])
        return prepared * (self.cores.prep_cpu_s + self.cores.staging_cpu_s) + read * self.cores.read_cpu_s

    def delivering_s(self, nbytes: Floats) -> Floats:
        """Of handing minibatches to trials: [H]."""
        return self._taken_per_core(nbytes) * self.cores.delivery_cpu_s

    def training_s(self, nbytes: Floats) -> Floats:
        """Of the trials' steps: [H]."""
        return self._taken_per_core(nbytes) * self.cores.step_cpu_s

    def _taken_per_core(self, nbytes: Floats) -> Floats:
        """Samples of a machine's trials."""
        return self._per_core(nbytes.sum(axis=(1, 2))) * (self.trials / self.workers)

    def _per_core(self, nbytes: Floats) -> Floats:
        """Samples of mean size for each core."""
        return nbytes / (self.sample_bytes * self.cores.count)
