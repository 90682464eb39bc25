"""Presets are the paper's, files are checked with the place of what is wrong, measured rates make a system."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from mbaas.analysis.simulator import Cores, System, catalog, simulate, system_of
from mbaas.analysis.simulator.files import EntryError, system_from
from mbaas.analysis.simulator.sweep import PARAMETERS, changed, parse
from mbaas.analysis.simulator.system import CORE_COSTS
from mbaas.analysis.simulator.units import parse_rate, parse_seconds, parse_size
from mbaas.errors import ConfigError

PAPER = {
    "mnist": (50_000, 0.00076, 0, 4, 32),
    "imagenet-1k": (1_281_167, 0.1077, 0.1, 4, 32),
    "openimages": (1_743_042, 0.2937, 0.2, 4, 32),
    "imagenet-22k": (14_197_122, 0.1077, 0.2, 4, 32),
    "cosmoflow": (262_144, 17, 0, 4, 16),
    "cosmoflow-512": (10_000, 1000, 0, 8, 1),
}
"""Samples, MB, sigma, workers, minibatch of a worker."""


def test_presets_are_the_papers_datasets_on_its_machine() -> None:
    assert catalog.names() == list(PAPER)
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


def given(change: str = "") -> Any:
    """A whole file, with some lines of it replaced: "old => new"."""
    text = """
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
    old, _, new = change.partition(" => ")
    assert old in text
    return yaml.safe_load(text.replace(old, new) if old else text)


def test_a_file() -> None:
    system = system_from(given(), machines=catalog.machine)
    assert system.machine.classes[0].capacity_bytes == 2**30
    assert system.machine.storage.rate(3) == 500e6
    assert system.policies == ("minio", "mbaas")
    assert [each.policy for each in simulate(system)] == ["minio", "mbaas"]


def test_cores_of_a_file() -> None:
    """Costs are CPU times of a sample; those that are left out are nothing."""
    cores = "{count: 8, prep: 2.5 ms, read: 30 us, step: 0.001}"
    system = system_from(given(f"  classes: =>   cores: {cores}\n  classes:"), machines=catalog.machine)
    assert system.machine.cores == Cores(count=8, prep_cpu_s=0.0025, read_cpu_s=30e-6, step_cpu_s=0.001)
    assert system_from(given(), machines=catalog.machine).machine.cores is None


def test_the_cores_in_the_documentation() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    system = system_from({**given(), "machine": given()["machine"] | _cores_on(page)}, machines=catalog.machine)
    assert system.machine.cores is not None
    assert {name for name in CORE_COSTS if getattr(system.machine.cores, name) > 0} == set(CORE_COSTS)


def _cores_on(page: str) -> Any:
    return yaml.safe_load(page.split("```yaml")[2].split("```")[0])


def test_the_file_in_the_documentation_is_the_reference_machine() -> None:
    page = (Path(__file__).parents[3] / "docs" / "simulate.md").read_text()
    system = system_from(yaml.safe_load(page.split("```yaml")[1].split("```")[0]), machines=catalog.machine)
    assert system.machine == catalog.load("imagenet-1k").machine
    assert system.dataset == catalog.load("imagenet-1k").dataset


@pytest.mark.parametrize(
    ("change", "where", "sentence"),
    [
        ("name: own\n => ", (), "'name' is missing; needed are name, machine, dataset"),
        ("compute: 64 MB/s => compute: 64 MB", ("machine", "compute"), "must be a rate such as .*, got '64 MB'"),
        ("network: 24 GB/s => network: 0", ("machine",), "network_bytes_per_s must be above 0, got 0.0"),
        ("500 MB/s] => 0 B/s]", ("machine", "pfs"), "a table of rates must have points above 0"),
        ("[1, 2] => [1, 2.5]", ("machine", "pfs", "readers", 1), "must be a whole number, got 2.5"),
        ("threads: 8 => threads: 0", ("machine", "staging"), "threads of staging must be at least 1, got 0"),
        ("name: ram => name: pfs", ("machine", "classes", 0), "may not be called .*, got 'pfs'"),
        ("  classes: =>   cores: {prep: 1 ms}\n  classes:", ("machine", "cores"), "'count' is missing"),
        (
            "  classes: =>   cores: {count: 2, prep: 1 h}\n  classes:",
            ("machine", "cores", "prep"),
            "must be a time such as .*, got '1 h'",
        ),
        (
            "  classes: =>   cores: {count: 0}\n  classes:",
            ("machine", "cores"),
            "count of cores must be at least 1, got 0",
        ),
        ("sigma => sgma", ("dataset", "sgma"), "unknown key 'sgma'; did you mean 'sigma'"),
        ("107.7 KB => large", ("dataset", "sample"), "must be a size such as .*, got 'large'"),
        ("batch: 8 => batch: 0", ("training",), "batch must be at least 1, got 0"),
        ("training: {workers: 2, batch: 8} => training: 3", ("training",), "must be a mapping of workers, batch"),
        ("[minio, mbaas] => minio", ("policies",), "must be a list, got 'minio'"),
        ("mbaas] => nopf]", ("policies", 1), "a policy must be one of .*, got 'nopf'"),
    ],
)
def test_files_that_cannot_be(change: str, where: tuple, sentence: str) -> None:
    with pytest.raises(EntryError, match=sentence) as caught:
        system_from(given(change), machines=catalog.machine)
    assert caught.value.path == where


def test_names_that_are_not_there() -> None:
    with pytest.raises(ConfigError, match="there is no preset 'imagenet'; known are cosmoflow"):
        catalog.load("imagenet")
    with pytest.raises(EntryError, match="machine: there is no machine 'laptop'; known are reference"):
        system_from({**given(), "machine": "laptop"}, machines=catalog.machine)


@pytest.mark.parametrize(
    ("text", "size", "rate"),
    [
        ("2 GiB", 2 * 1024**3, None),
        ("107.7 KB", 107_700, None),
        ("330 MB/s", None, 330e6),
        ("5", 5, 5),
        (7, 7, 7),
        ("1.5", 1.5, 1.5),
        ("fast", None, None),
        (True, None, None),
        (-1, None, None),
        ("3 MB/h", None, None),
    ],
)
def test_units(text: object, size: float | None, rate: float | None) -> None:
    assert parse_size(text) == (pytest.approx(size) if size is not None else None)
    assert parse_rate(text) == (pytest.approx(rate) if rate is not None else None)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1.6 ms", 0.0016), ("30 us", 30e-6), ("30µs", 30e-6), ("2s", 2), (0.5, 0.5), (0, 0), ("3", None), ("1 h", None)],
)
def test_times(text: object, seconds: float | None) -> None:
    assert parse_seconds(text) == (pytest.approx(seconds) if seconds is not None else None)


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
    """1,000 samples of 100 KB, batch 10; training takes 2 s at 500/s, prep 1 s at 1,000/s, storage 4 s at 250/s.

    Cold, storage bounds the epoch: 4 s, beside which the service prepares and trains. A private cache's threads do one
    after the other, 4 s / 4 + 1 s / 4 of their time: 5 s, unless one reader alone reaches 250/s; then storage is full
    when the threads do something else a fifth of their time: 4 s. Later, from memory, training takes its 2 s.
    """

    def measured(**more: int) -> System:
        return system_of(
            "train",
            samples=1000,
            sample_bytes=100e3,
            batch=10,
            train_samples_per_s=500,
            prep_samples_per_s=1000,
            storage_samples_per_s=250,
            prep_workers=4,
            cache_bytes=200e6,
            epochs=2,
            **more,
        )

    system = measured()
    found, private = simulate(system, ["mbaas", "minio"])
    assert found.epoch_s == pytest.approx((4, 2), rel=0.01)
    assert private.epoch_s == pytest.approx((5, 2), rel=0.01)
    assert next(iter(simulate(measured(storage_readers=1), ["minio"]))).epoch_s[0] == pytest.approx(4, rel=0.01)
    assert found.samples == {"staging": 0, "ram": 1000, "remote": 0, "pfs": 1000}
    half = replace(
        system, machine=replace(system.machine, classes=changed(system, "cache_bytes", 50e6).machine.classes)
    )
    assert next(iter(simulate(half, ["minio"]))).samples["ram"] == 500
