"""Presets equal the paper's, errors in files name their line, and measured rates make a system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from mbaas.base import files
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.model.quantity import stated
from mbaas.model.rates import Rates, Setup
from mbaas.tools.simulator import catalog, simulate, system_of
from mbaas.tools.simulator.simulation import PARAMETERS, changed, parse
from mbaas.tools.simulator.system import CORE_COSTS, Cores, System

PAPER = {
    "mnist": (50_000, 0.00076, 0, 4, 32),
    "imagenet-1k": (1_281_167, 0.1077, 0.1, 4, 32),
    "openimages": (1_743_042, 0.2937, 0.2, 4, 32),
    "imagenet-22k": (14_197_122, 0.1077, 0.2, 4, 32),
    "cosmoflow": (262_144, 17, 0, 4, 16),
    "cosmoflow-512": (10_000, 1000, 0, 8, 1),
}
"""Samples, MB, sigma, workers, minibatch size of a worker."""


def test_presets_are_the_papers_datasets_on_its_machine() -> None:
    assert [name for name in catalog.names() if not name.startswith("nopfs-figure")] == list(PAPER)
    for name, (samples, mb, sigma_mb, workers, batch) in PAPER.items():
        preset = catalog.load(name)
        assert preset.name == name
        assert (preset.dataset.samples, preset.training.workers, preset.training.batch) == (samples, workers, batch)
        assert (preset.dataset.sample_bytes, preset.dataset.sigma_bytes) == pytest.approx((mb * 1e6, sigma_mb * 1e6))
        assert catalog.about(name)


def test_the_reference_machine_is_the_papers() -> None:
    machine = catalog.load("imagenet-1k").machine
    assert (machine.compute_bytes_per_s, machine.prep_bytes_per_s, machine.network_bytes_per_s) == (64e6, 200e6, 24e9)
    assert [machine.storage.rate(readers) for readers in (1, 2, 4, 8, 99)] == [330e6, 730e6, 1540e6, 2870e6, 2870e6]
    assert (machine.staging.capacity_bytes, machine.staging.threads) == (5e9, 8)
    assert machine.staging.write is not None
    assert machine.staging.write.rate(8) == 111e9
    classes = [(each.name, each.capacity_bytes, each.threads, each.read.rate(each.threads)) for each in machine.classes]
    assert classes == [("ram", 120e9, 4, 85e9), ("ssd", 900e9, 2, 4e9)]


WHOLE = """\
name: own
machine:
  compute: 64 MB/s
  prep: 200 MB/s
  network: 24 GB/s
  pfs: {readers: [1, 2], rates: [330 MB/s, 500 MB/s]}
  staging: {capacity: 5 GB, threads: 8}
  classes:
    - {name: ram, capacity: 1 GiB, threads: 4, read: 85 GB/s}
dataset: {samples: 1000, sample: 107.7 KB, sigma: 1e3}
training: {workers: 2, batch: 8}
policies: [minio, mbaas]
"""


def given(change: str = "") -> System:
    """Read the system of a whole file, with some text replaced: "old => new"."""
    old, _, new = change.partition(" => ")
    assert old in WHOLE
    return described(WHOLE.replace(old, new) if old else WHOLE)


def described(text: str) -> System:
    return catalog.system_from(files.parse(text, Path("own.yaml")))


def test_a_file() -> None:
    system = given()
    assert system.machine.classes[0].capacity_bytes == 2**30
    assert system.machine.storage.rate(3) == 500e6
    assert (system.dataset.sample_bytes, system.dataset.sigma_bytes) == (107_700, 1000)
    assert system.policies == ("minio", "mbaas")
    assert [each.policy for each in simulate(system)] == ["minio", "mbaas"]


def test_one_rate_is_that_of_all_threads_together() -> None:
    """2 of 4 threads get half of the 80 GB/s, 8 threads no more than 4. Storage gives a single reader its full rate."""
    system = given("read: 85 GB/s => read: 80 GB/s")
    assert [system.machine.classes[0].read.rate(threads) for threads in (2, 4, 8)] == [40e9, 80e9, 80e9]
    shared = given("{readers: [1, 2], rates: [330 MB/s, 500 MB/s]} => 330 MB/s").machine.storage
    assert [shared.rate(readers) for readers in (1, 2, 8)] == [330e6] * 3
    several = given("read: 85 GB/s => read: {threads: [2, 4], rates: [60 GB/s, 80 GB/s]}")
    assert [several.machine.classes[0].read.rate(threads) for threads in (1, 2, 3, 4)] == [30e9, 60e9, 70e9, 80e9]


def test_cores_of_a_file() -> None:
    """Costs are CPU times per sample; omitted costs are zero."""
    cores = "{count: 8, background: 0.5, prep: 2.5 ms, read: 30 us, step: 0.001}"
    system = given(f"  classes: =>   cores: {cores}\n  classes:")
    assert system.machine.cores == Cores(
        count=8, background=0.5, prep_cpu_s=0.0025, read_cpu_s=30 * 1e-6, step_cpu_s=0.001
    )
    assert given().machine.cores is None


def test_the_cores_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    cores = page.split("```yaml")[2].split("```")[0].strip()
    system = given(f"  classes: =>   {cores}\n  classes:")
    assert system.machine.cores is not None
    assert {name for name in CORE_COSTS if getattr(system.machine.cores, name)} == set(CORE_COSTS)


def test_the_file_in_the_documentation_is_the_reference_machine() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    system = described(page.split("```yaml")[1].split("```")[0])
    assert system.machine == catalog.load("imagenet-1k").machine
    assert system.dataset == catalog.load("imagenet-1k").dataset


@pytest.mark.parametrize(
    ("change", "line", "sentence"),
    [
        ("name: own\n => ", 1, "the file lacks 'name'"),
        ("compute: 64 MB/s => compute: 64 miles", 3, "machine.compute must be a rate such as .*, got '64 miles'"),
        ("network: 24 GB/s => network: 0", 2, "machine: network_bytes_per_s must be above 0, got 0"),
        ("500 MB/s] => 0 B/s]", 6, "machine.pfs: a table of rates must have points above 0"),
        ("[1, 2] => [1, 2.5]", 6, r"machine.pfs.readers\[1\] must be a whole number, got 2.5"),
        ("330 MB/s, 500 => 500", 6, "machine.pfs: needs a rate for each number, got 2 readers and 1 rates"),
        ("threads: 8 => threads: 0", 7, "machine.staging: threads of staging must be at least 1, got 0"),
        ("name: ram => name: pfs", 9, r"machine.classes\[0\]: .*may not be called .*, got 'pfs'"),
        ("threads: 4 => threads: 0", 9, r"machine.classes\[0\]: threads of ram must be at least 1, got 0"),
        ("  classes: =>   cores: {prep: 1 ms}\n  classes:", 8, "machine.cores lacks 'count'"),
        (
            "  classes: =>   cores: {count: 2, prep: 1 mile}\n  classes:",
            8,
            "machine.cores.prep must be a time such as .*, got '1 mile'",
        ),
        (
            "  classes: =>   cores: {count: 2, background: 2}\n  classes:",
            8,
            "machine.cores: background must be 0 or more and below 2 cores, got 2",
        ),
        (
            "  classes: =>   cores: {count: 0}\n  classes:",
            8,
            "machine.cores: count of cores must be at least 1, got 0",
        ),
        ("classes: => clases:", 8, "unknown key 'clases'; did you mean 'classes'"),
        ("sigma => sgma", 10, "unknown key 'sgma'; did you mean 'sigma'"),
        ("107.7 KB => large", 10, "dataset.sample must be a size such as .*, got 'large'"),
        ("samples: 1000 => samples: 0", 10, r"dataset: samples must be in \[1, 2\*\*31\), got 0"),
        ("batch: 8 => batch: 0", 11, "training: batch must be at least 1, got 0"),
        ("name: own => name: own\nmodel: paper", 2, "model must be one of 'extended', 'published', got 'paper'"),
        ("batch: 8 => bach: 8", 11, "unknown key 'bach'; did you mean 'batch'"),
        ("training: {workers: 2, batch: 8} => training: 3", 11, "training must be 'key: value' lines, got 3"),
        ("[minio, mbaas] => minio", 12, "policies must be a list, got 'minio'"),
        ("mbaas] => nopf]", 12, r"policies\[1\] must be one of .*, got 'nopf'"),
    ],
)
def test_files_that_cannot_be(change: str, line: int, sentence: str) -> None:
    with pytest.raises(ConfigError, match=rf"^own\.yaml:{line}: {sentence}"):
        given(change)


def test_names_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'imagenet'; known are cosmoflow"):
        catalog.load("imagenet")
    with pytest.raises(ConfigError, match=r"own\.yaml:2: machine: there is no machine 'laptop'; known are reference"):
        described("name: own\nmachine: laptop\ndataset: {samples: 1, sample: 1 KB}\n")


def test_every_parameter_changes_what_it_says() -> None:
    preset = catalog.load("mnist")
    for name in [*PARAMETERS, "ram_bytes"]:
        value = parse(preset, name, "3")
        assert value == 3
        other = changed(preset, name, value)
        assert other != preset
        assert changed(other, name, 3) == other


def test_parameters_by_hand() -> None:
    preset = catalog.load("mnist")
    slow = changed(preset, "pfs_bytes_per_s", parse(preset, "pfs_bytes_per_s", "287 MB/s")).machine.storage
    assert [slow.rate(readers) for readers in (1, 8, 64)] == pytest.approx([33e6, 287e6, 287e6])
    only = changed(preset, "cache_bytes", parse(preset, "cache_bytes", "50 GB")).machine.classes
    assert [(each.name, each.capacity_bytes) for each in only] == [("ram", 50e9)]
    assert changed(preset, "ssd_bytes", 1).machine.classes[1].capacity_bytes == 1
    with pytest.raises(ConfigError, match=r"workers must be a whole number, got '1\.5'"):
        parse(preset, "workers", "1.5")
    with pytest.raises(ConfigError, match=r"one of cache_bytes, .*, ssd_bytes, got 'disk_bytes'"):
        changed(preset, "disk_bytes", 1)


def test_measured_rates_make_a_system() -> None:
    """1,000 samples of 100 KB in batches of 10.

    Training takes 2 s at 500/s, prep 1 s at 1,000/s, storage 4 s at 250/s.

    Storage limits a cold epoch to 4 s, during which the service prepares and trains. The 4 threads of a private cache
    read and prepare in turn, 4 s / 4 + 1 s / 4 of their time each: 5 s. If one reader alone reaches 250/s, storage
    stays full while threads spend a fifth of their time on prep: 4 s. A later epoch comes from memory, and training
    takes its 2 s.
    """

    def measured(readers: int) -> System:
        rates = Rates(
            samples=1000,
            sample_bytes=100e3,
            pixel_bytes=100e3,
            cores=4,
            batch_size=10,
            step=stated(500, unit="samples/s"),
            prep=MeasuredCurve.linear(stated(250, unit="samples/s")),
            storage=MeasuredCurve.of([(readers, 250)], unit="samples/s"),
            cache=stated(1e12, unit="bytes/s"),
        )
        return system_of(rates, Setup(cache_bytes=200e6), epochs=2)

    system = measured(4)
    found, private = simulate(system, ["mbaas", "minio"])
    assert found.epoch_s == pytest.approx((4, 2), rel=0.01)
    assert private.epoch_s == pytest.approx((5, 2), rel=0.01)
    assert next(iter(simulate(measured(1), ["minio"]))).epoch_s[0] == pytest.approx(4, rel=0.01)
    assert found.samples == {"staging": 0, "ram": 1000, "remote": 0, "pfs": 1000}
    half = replace(
        system, machine=replace(system.machine, classes=changed(system, "cache_bytes", 50e6).machine.classes)
    )
    assert next(iter(simulate(half, ["minio"]))).samples["ram"] == 500
