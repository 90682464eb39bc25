"""Systems small enough to calculate by hand, and a hypothesis strategy for arbitrary ones."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from mbaas.model.curves import ThroughputCurve
from mbaas.tools.simulator import catalog, simulate
from mbaas.tools.simulator.simulation import Outcome, changed
from mbaas.tools.simulator.system import DatasetShape, Machine, StagingClass, StorageClass, System, Training


def machine(*, ram_bytes: float = 0, ssd_bytes: float = 0, threads: int = 1, ahead_bytes: float = 1e9) -> Machine:
    """A machine with times that are easy to add.

    Per byte and thread: training 10 s, prep 1 s, local ram 1 s, local ssd 2 s, remote ram 1.25 s, remote ssd 2 s. The
    PFS takes 5 s for each reader, however many there are.
    """
    return Machine(
        compute_bytes_per_s=0.1,
        prep_bytes_per_s=1,
        network_bytes_per_s=0.8,
        storage=ThroughputCurve.through({1: 0.2, 64: 12.8}),
        staging=StagingClass(capacity_bytes=ahead_bytes, threads=threads),
        classes=(
            StorageClass(name="ram", capacity_bytes=ram_bytes, threads=2, read=ThroughputCurve.through({2: 2})),
            StorageClass(name="ssd", capacity_bytes=ssd_bytes, read=ThroughputCurve.through({1: 0.5})),
        ),
    )


def system(
    given: Machine, *, samples: int = 4, sample_bytes: float = 1, sigma_bytes: float = 0, **training: int
) -> System:
    shape = DatasetShape(samples=samples, sample_bytes=sample_bytes, sigma_bytes=sigma_bytes)
    return System(name="small", machine=given, dataset=shape, training=Training(**training))


def decodable(*, ram_bytes: float, ssd_bytes: float = 0, ssd_rate: float = 0.5, threads: int = 1) -> System:
    """Four samples and two epochs, with prep as the limit because training and the PFS are fast.

    Decoded samples have two bytes and are prepared four times as fast.
    """
    given = machine(ram_bytes=ram_bytes, ssd_bytes=ssd_bytes, threads=threads)
    ram, ssd = given.classes
    found = system(
        replace(
            given,
            compute_bytes_per_s=1e6,
            storage=ThroughputCurve.through({1: 100, 64: 6400}),
            classes=(ram, replace(ssd, read=ThroughputCurve.through({1: ssd_rate}))),
        ),
        epochs=2,
    )
    return replace(found, dataset=replace(found.dataset, decoded_bytes=2.0, decoded_speedup=4.0))


def run(given: System, policy: str) -> Outcome:
    return next(iter(simulate(given, [policy])))


def preset(name: str, **values: float) -> System:
    found = catalog.load(name)
    for parameter, value in values.items():
        found = changed(found, parameter, value)
    return found


def with_cache(given: System, *, ram_bytes: float, ssd_bytes: float) -> System:
    ram, ssd = given.machine.classes
    classes = (replace(ram, capacity_bytes=ram_bytes), replace(ssd, capacity_bytes=ssd_bytes))
    return replace(given, machine=replace(given.machine, classes=classes))


@st.composite
def systems(draw: st.DrawFn) -> System:
    """Draw systems where any part may be the bottleneck."""
    rate = st.floats(0.05, 20)
    given = Machine(
        compute_bytes_per_s=draw(rate),
        prep_bytes_per_s=draw(rate),
        network_bytes_per_s=draw(rate),
        storage=ThroughputCurve.through({1: draw(rate), 4: draw(rate)}),
        staging=StagingClass(capacity_bytes=draw(st.floats(1, 500)), threads=draw(st.integers(1, 5))),
        classes=(
            StorageClass(
                name="ram", capacity_bytes=draw(st.floats(0, 60)), threads=2, read=ThroughputCurve.through({2: 40})
            ),
            StorageClass(
                name="ssd", capacity_bytes=draw(st.floats(0, 60)), read=ThroughputCurve.through({1: draw(rate)})
            ),
        ),
    )
    found = system(
        given,
        samples=draw(st.integers(1, 97)),
        sigma_bytes=draw(st.sampled_from([0, 0.5])),
        workers=draw(st.integers(1, 5)),
        batch=draw(st.integers(1, 7)),
        epochs=draw(st.integers(1, 4)),
        trials=draw(st.sampled_from([1, 3])),
        locality=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )
    decoded = {"decoded_bytes": draw(st.none() | st.floats(0.5, 9)), "decoded_speedup": draw(st.floats(0.8, 9))}
    return replace(found, dataset=replace(found.dataset, **decoded))  # type: ignore[arg-type]
