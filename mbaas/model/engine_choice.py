"""The choice between the cpu and the dali engine for a feed with ``engine="auto"``.

CoorDL found that prep on a GPU slows some models, because it takes GPU time from the training step. So the preferred
engine is the one that leaves the trials' GPUs alone. The other engine must promise `MARGIN` times its rate.
"""

from __future__ import annotations

from typing import Literal

from msgspec import Struct

from mbaas.base import units

EngineName = Literal["cpu", "dali"]
"""The engines that prepare samples."""

MARGIN = 1.25
"""Factor by which the other engine must be faster than the preferred one.

It is above the noise of the cpu engine's rate: at most 11 % in eight probes on an overloaded machine. The noise of a
GPU's rate was not measured. It is below the ratios that matter to a search: on an H200, DALI prepares three times as
many photographs as 16 CPUs.
"""

NOISE = 0.15
"""Relative distance of the ratio from the threshold within which another probe may choose the other engine."""

SECOND_ON_GPU = 0.35
"""Rate of a further worker on a GPU, relative to the first one. On an H200, a second worker added 23 % to a feed with
one trial, and 37 % with eight trials. Prep without a feed gained 80 %.
"""


class WorkerRates(Struct, frozen=True):
    """Samples/s of one prep worker with each engine, as `mbaas.prep.probe` measures them."""

    cpu_per_s: float
    dali_per_s: float


class EngineRoom(Struct, frozen=True, kw_only=True):
    """Workers that a feed would start with each engine, and their GPUs, which trials may share.

    Attributes:
        cpu_workers: workers of the cpu engine; a fraction if the only worker reserves less than a CPU.
        dali_workers, gpus: workers of the dali engine, and the GPUs that they share, on all nodes.
        is_shared: whether trials may train on these GPUs.
        step_per_s: samples/s of a trial's training step that has a GPU for itself; None if unknown.
    """

    cpu_workers: float
    dali_workers: int
    gpus: int
    is_shared: bool
    step_per_s: float | None = None


class EngineChoice(Struct, frozen=True):
    """The engine of a feed, for the feed's whole life.

    Attributes:
        reason: why, as a clause.
        gpus: GPUs of the cluster when the choice was made.
        cpu_per_s, dali_per_s: samples/s that all workers of a feed would prepare with each engine, predicted from
            measured rates of one worker; None if nothing was measured.
    """

    engine: EngineName
    reason: str
    gpus: int = 0
    cpu_per_s: float | None = None
    dali_per_s: float | None = None

    @property
    def sentence(self) -> str:
        """The choice with its reason."""
        return f"{self.engine} engine: {self.reason}"


def choose(rates: WorkerRates, room: EngineRoom) -> EngineChoice:
    """Choose the engine that gives trials more samples/s, with a margin for the preferred engine.

    If trials may train on the GPUs of prep, the preferred engine is "cpu", otherwise "dali", which leaves more CPUs to
    the trials. If the step is known, the rates of a trial that trains on one of the GPUs are compared.
    """
    cpu_per_s, dali_per_s = rates.cpu_per_s * room.cpu_workers, _on_gpus(rates.dali_per_s, room)
    gained = {"cpu": cpu_per_s, "dali": dali_per_s}
    if room.step_per_s is not None:
        gained = {name: min(per_s, room.step_per_s) for name, per_s in gained.items()}
        if room.is_shared and dali_per_s:
            # Until more is known, a sample that is prepared on a GPU takes all of the GPU for that time.
            gained["dali"] = 1 / (1 / room.step_per_s + 1 / dali_per_s)
    preferred: EngineName = "cpu" if room.is_shared else "dali"
    other: EngineName = "dali" if room.is_shared else "cpu"
    threshold = MARGIN * gained[preferred]
    engine = other if gained[other] >= threshold > 0 or not gained[preferred] else preferred
    clauses = [_measured(room, cpu_per_s, dali_per_s), _compared(room, gained), _rule(engine, preferred, other)]
    if threshold and abs(gained[other] / threshold - 1) < NOISE:
        clauses.append("it is close, so name the engine if later feeds must prepare the same bytes")
    return EngineChoice(engine, "; ".join(filter(None, clauses)), room.gpus, cpu_per_s, dali_per_s)


def _on_gpus(per_s: float, room: EngineRoom) -> float:
    first = min(room.dali_workers, room.gpus)
    return per_s * (first + SECOND_ON_GPU * (room.dali_workers - first))


def _measured(room: EngineRoom, cpu_per_s: float, dali_per_s: float) -> str:
    workers = f"{units.exact(room.cpu_workers)} {'worker' if room.cpu_workers <= 1 else 'workers'}"
    on_gpus = f"{units.counted(room.dali_workers, 'worker')} on {units.counted(room.gpus, 'GPU')}"
    return (
        f"cpu prepares {units.number(cpu_per_s)} samples/s with {workers}, dali {units.number(dali_per_s)} with "
        f"{on_gpus}"
    )


def _compared(room: EngineRoom, gained: dict[str, float]) -> str:
    if room.step_per_s is None:
        return ""
    return (
        f"a trial whose step takes {units.number(room.step_per_s)} samples/s gets {units.number(gained['cpu'])} with "
        f"cpu and {units.number(gained['dali'])} with dali"
    )


def _rule(engine: EngineName, preferred: EngineName, other: EngineName) -> str:
    enough = f"{units.number(MARGIN)} times as fast"
    why = "leaves the trials' GPUs alone" if preferred == "cpu" else "has GPUs of its own"
    if engine == other:
        return f"{other} is at least {enough}"
    return f"{preferred} {why}, and {other} is not {enough}"
