"""A sweep equals simulations of changed systems, and figures are reproducible and drawn without pyplot."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
from small_systems import preset, run

from mbaas.errors import ConfigError
from mbaas.model import words
from mbaas.tools.analysis import plots
from mbaas.tools.simulator import results, simulate, sweep
from mbaas.tools.simulator.chance import frequency, imbalance
from mbaas.tools.simulator.results import plain_sweep
from mbaas.tools.simulator.simulation import Axis, parse

CACHE = Axis("cache_bytes", (0, 2e6, 40e6))
TRIALS = Axis("trials", (1, 9))


def test_each_cell_is_a_simulation() -> None:
    given = preset("mnist", samples=3001, compute_bytes_per_s=5e9, epochs=2)
    swept = sweep(given, policy="mbaas", x=CACHE, y=TRIALS, versus="minio")
    assert swept.total_s.shape == (2, 3)
    changed = preset("mnist", samples=3001, compute_bytes_per_s=5e9, epochs=2, cache_bytes=2e6, trials=9)
    assert swept.total_s[1, 1] == run(changed, "mbaas").total_s
    assert swept.speedup is not None
    assert swept.speedup[1, 1] == run(changed, "minio").total_s / run(changed, "mbaas").total_s
    assert (np.diff(swept.total_s, axis=1) <= 0).all()
    assert plain_sweep(swept)["total_s"] == swept.total_s.tolist()


def test_samples_may_be_swept_too() -> None:
    swept = sweep(preset("mnist"), policy="perfect", x=Axis("samples", (100, 200)), y=Axis("workers", (1, 2)))
    assert swept.total_s[0] == pytest.approx([100 * 5 * 760 / 64e6, 200 * 5 * 760 / 64e6])
    assert swept.total_s[0] == pytest.approx(2 * swept.total_s[1])


def test_sweeps_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="two parameters, got 'trials' twice"):
        sweep(preset("mnist"), policy="mbaas", x=TRIALS, y=TRIALS)
    with pytest.raises(ConfigError, match="must be one of"):
        sweep(preset("mnist"), policy="mbass", x=CACHE, y=TRIALS)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("9" * 400, "must have at most 1,000 bits, got 1,329"),
        ("010", "must be a decimal number, got '010'"),
        ("1.5", "must be a whole number, got '1.5'"),
        ("many", "must be a whole number, got 'many'"),
    ],
)
def test_text_that_is_no_count(text: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=f"trials {sentence}"):
        parse(preset("mnist"), "trials", text)


def test_labels_have_units() -> None:
    assert [words.setting("cache_bytes", value) for value in (0, 1.5e9, 2e12)] == ["0 B", "1.5 GB", "2 TB"]
    assert words.setting("pfs_bytes_per_s", 330e6) == "330 MB/s"
    assert [words.setting("samples", value) for value in (16, 1_281_167.0)] == ["16", "1,281,167"]
    assert words.setting("storage_factor", 2) == "2 times"


def test_figures_are_drawn_as_files(tmp_path: Path) -> None:
    before = {*sys.modules}
    given = preset("mnist", samples=2003, epochs=2)
    outcomes = list(simulate(given, ["perfect", "naive", "mbaas"]))
    found = frequency(workers=4, epochs=9, samples=500, delta=0.5, monte_carlo=True)
    made = {
        "policies": results.policies_figure(given, outcomes),
        "sweep": results.sweep_figure(given, sweep(given, policy="mbaas", x=CACHE, y=TRIALS)),
        "hits": results.hit_rates_figure("page_cache", 0.5, (0.0, 0.15, 0.21)),
        "frequency": results.frequency_figure(found, samples=500, workers=4, epochs=9),
        "imbalance": results.imbalance_figure(imbalance(nodes=4, local_batch=8, steps=50), nodes=4, local_batch=8),
        "even": results.imbalance_figure(imbalance(nodes=1, local_batch=8, steps=5), nodes=1, local_batch=8),
    }
    for name, figure in made.items():
        plots.save(figure, tmp_path / f"{name}.svg")
        assert (tmp_path / f"{name}.svg").read_text().startswith("<?xml")
    plots.save(made["policies"], tmp_path / "policies.png")
    assert (tmp_path / "policies.png").read_bytes().startswith(b"\x89PNG")
    words = (tmp_path / "policies.svg").read_text()
    assert all(word in words for word in ("naive", "mbaas", "compute", "mnist: 2 epochs"))
    assert "matplotlib.pyplot" not in sys.modules.keys() - before


def test_the_same_results_give_the_same_svg(tmp_path: Path) -> None:
    for name in ("one.svg", "two.svg"):
        plots.save(results.hit_rates_figure("minio", 0.5, (0.0, 0.5)), tmp_path / name)
    assert (tmp_path / "one.svg").read_bytes() == (tmp_path / "two.svg").read_bytes()
