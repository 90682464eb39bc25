"""`mbaas plan` reads its file, and explains mistakes in it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from mbaas.cli.plan import plan
from mbaas.errors import ConfigError
from mbaas.model.curves import MeasuredCurve
from mbaas.tools.plan.jobs import load

EXAMPLE = Path(__file__).parents[2] / "examples" / "plan" / "jobs.yaml"

GOOD = """\
cluster:
  nodes: {least: 1, most: 3}
  node: {cores: 8, memory_bytes: 10 GB, network_bytes_per_s: 1 GB/s}
  storage_bytes_per_s: [[1, 10 MB/s], [4, 40 MB]]
datasets:
  photos: {samples: 24001, dataset_bytes: 2.4 GB}
jobs:
  search:
    dataset: photos
    trials: 2
    batch_size: 64
    pixel_bytes: 150528
    step_per_s: 250
    prep: [[1, 100], [2, 195.5]]
"""

Write = Callable[[str], Path]


def medians(curve: MeasuredCurve | None) -> list[tuple[float, float]]:
    """The points of a curve without their intervals."""
    assert curve is not None
    return [(count, rate.value) for count, rate in curve.points]


def test_a_file(write: Write) -> None:
    jobs, cluster = load(write(GOOD))
    (job,) = jobs
    assert (job.name, job.dataset.samples, job.dataset.dataset_bytes) == ("search", 24001, 2_400_000_000)
    assert (medians(job.prep), job.step_per_s, job.trials) == ([(1, 100), (2, 195.5)], 250, 2)
    assert medians(cluster.storage) == [(1, 10_000_000), (4, 40_000_000)]
    assert (cluster.nodes.least, cluster.nodes.most, cluster.storage_shared) == (1, 3, True)
    assert cluster.node.network_bytes_per_s == 1_000_000_000


def test_short_forms(write: Write) -> None:
    text = GOOD.replace("{least: 1, most: 3}", "2").replace("[[1, 100], [2, 195.5]]", "120")
    (job,), cluster = load(write(text))
    assert medians(job.prep) == [(1, 120)]
    assert (cluster.nodes.least, cluster.nodes.most) == (2, 2)


@pytest.mark.parametrize(
    ("old", "new", "line", "sentence"),
    [
        ("trials: 2", "trails: 2", 10, "unknown key 'trails'; did you mean 'trials'?"),
        ("dataset: photos", "dataset: photo", 9, "jobs.search: unknown dataset 'photo'; did you mean 'photos'?"),
        ("    step_per_s: 250\n", "", 8, "jobs.search: 'step_per_s' must be given, or 'rates', a file that holds them"),
        ("trials: 2", "trials: two", 10, "jobs.search.trials must be a whole number, got 'two' (text)"),
        ("trials: 2", "trials: 0", 10, "jobs.search: trials must be at least 1, got 0"),
        (
            "10 GB",
            "10 gb!",
            3,
            "cluster.node.memory_bytes must be a size such as '2 GiB' or '500 MB', or a whole number of bytes",
        ),
        ("most: 3", "most: 0", 2, "cluster: nodes must be 1 <= least <= most, got least 1, most 0"),
        ("[2, 195.5]", "[2]", 14, "jobs.search.prep[1] must hold at least 2 values, got [2] (a list)"),
        ("[4, 40 MB]", "[0, 40 MB]", 4, "cluster.storage_bytes_per_s[1][0] must be above 0, got 0 (a whole number)"),
        ("  photos:", "  photos: 3\n  other:", 6, "datasets.photos must be 'key: value' lines, got 3 (a whole number)"),
        ("24001", "0", 6, "datasets.photos.samples must be at least 1, got 0"),
    ],
)
def test_wrong_files(write: Write, old: str, new: str, line: int, sentence: str) -> None:
    file = write(GOOD.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(f"{file}:{line}: {sentence}")):
        load(file)


def test_rates_that_were_measured(write: Write, tmp_path: Path) -> None:
    rate = {"low": 90.0, "high": 110.0, "unit": "samples/s", "samples": 5}
    measured = {
        "samples": 10, "sample_bytes": 1e5, "pixel_bytes": 150528.0, "cores": 2, "batch_size": 32,
        "step": {"value": 101.0, **rate}, "prep": [[1, {"value": 99.0, **rate}]],
        "storage": [[1, {"value": 99.0, **rate}]], "cache": {"value": 100.0, **rate},
    }  # fmt: skip
    (tmp_path / "found.json").write_text(json.dumps({"rates": measured}))
    text = re.sub(r"    (pixel_bytes|step_per_s|prep): .*\n", "", GOOD) + "    rates: found.json\n"
    ((job,), _) = load(write(text))
    assert (job.step_per_s, medians(job.prep), job.pixel_bytes, job.batch_size) == (101.0, [(1, 99.0)], 150528, 64)
    assert job.prep_cores == 2
    assert (job.step.low, job.step.high, job.prep.spread) == (90, 110, pytest.approx((90 / 99, 110 / 99)))
    ((stated,), _) = load(write(text + "    step_per_s: 250\n"))
    assert (stated.step.low, stated.step.high, stated.prep.spread) == (250, 250, job.prep.spread)
    ((stated,), _) = load(write(text + "    prep: 120\n"))
    assert stated.prep_cores is None
    assert (job.decoded_prep, job.decoded_bytes) == (None, None)
    measured |= {"decoded_bytes": 5e5, "decoded_prep": [[1, {"value": 99.0, **rate}]]}
    (tmp_path / "found.json").write_text(json.dumps(measured))
    ((job,), _) = load(write(text))
    assert (medians(job.decoded_prep), job.decoded_bytes) == ([(1, 99.0)], 500_000)
    assert job.decoded_prep == job.prep
    ((stated,), _) = load(write(text + "    decoded_prep: 900\n    decoded_bytes: 1 MB\n"))
    assert (medians(stated.decoded_prep), stated.decoded_bytes) == ([(1, 900.0)], 10**6)
    (tmp_path / "found.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"feed.yaml:12: .*does not hold measured rates: rates lack 'samples'"):
        load(write(text))
    with pytest.raises(ConfigError, match=r"feed.yaml:12: .*cannot read .*lost.json: No such file"):
        load(write(text.replace("found", "lost")))


def test_the_example_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan(EXAMPLE, as_json=True)
    (line,) = capsys.readouterr().out.splitlines()
    made = json.loads(line)
    assert {"nodes", "least_nodes", "most_nodes", "why_nodes", "pool", "idle_workers", "jobs", "caches", "storage"} < {
        *made
    }
    assert [job["job"] for job in made["jobs"]] == ["resnet-search", "vit-search", "cars-finetune"]
    assert {"workers", "trial_per_s", "limit", "reason", "threads", "fit"} < {*made["jobs"][0]}
    assert {"prep", "fetch"} < {*made["jobs"][0]["threads"]}
    assert {"r_squared", "worst_error"} < {*made["jobs"][0]["fit"]}
    assert [cache["dataset"] for cache in made["caches"]] == ["imagenet", "cars"]


def test_the_example_for_people(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    plan(EXAMPLE, as_json=False)
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    assert shown.startswith("request 4 nodes from the autoscaler")
    told = " ".join(shown.split())
    assert "vit-search: trains at full speed, 420 samples/s in each trial: 3 workers prepare 570 samples/s" in told
    assert all(word in told for word in ("R²", "worst error", "in memory", "threads of a node", "training"))
