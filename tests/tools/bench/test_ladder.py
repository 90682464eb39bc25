"""The ladder's storage, cells, stalls and tables, without pixels; and one real cell."""

from __future__ import annotations

import contextlib
import json
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.ladder import runs
from benchmarks.ladder.cells import (
    STEPS,
    Cell,
    CellResult,
    Mode,
    Plan,
    Record,
    Stalls,
    Workload,
    append_record,
    differential,
    read_records,
    unfinished,
)
from benchmarks.ladder.report import CLAIMS, HEADINGS, Results, cells_of, figures, tables
from benchmarks.ladder.storage import (
    LinuxCache,
    MinIOCache,
    NodeStorage,
    ReadCounts,
    StorageClient,
    StorageSettings,
    served_storage,
)
from benchmarks.ladder.trials import Training, TrialSpec, faults, local_source
from mbaas.dataset import synthetic
from mbaas.errors import ConfigError, MbaasError
from mbaas.tools.bench.report import Machine
from mbaas.tools.bench.rows import Minibatch
from mbaas.tools.bench.rows.dataloader import EpochIndices

PAGE = 4096
SLOW = StorageSettings(bytes_per_s=100.0, policy="minio", cache_bytes=0, sizes=(PAGE,) * 8)


def misses(storage: NodeStorage, order: list[int], nbytes: int = 10) -> int:
    before = storage.counts()
    storage.request([(sample, nbytes) for sample in order], 0.0)
    return (storage.counts() - before).reads


# ---- storage ----


def test_processes_share_the_bytes_of_one_disk() -> None:
    """100 bytes/s. At 0 s, 50 and 100 bytes are there after 0.5 and 1.5 s; at 10 s, 100 bytes after another second."""
    storage = NodeStorage(SLOW)
    assert storage.request([(0, 50)], 0.0) == 0.5
    assert storage.request([(1, 60), (2, 40)], 0.0) == 1.5
    assert storage.request([(3, 100)], 10.0) == 11.0
    assert storage.counts() == ReadCounts(hits=0, reads=4, read_bytes=250)


def test_a_hit_waits_for_the_read_that_brings_the_sample() -> None:
    storage = NodeStorage(replace(SLOW, cache_bytes=100))
    assert storage.request([(0, 100)], 0.0) == 1.0
    assert storage.request([(0, 100)], 0.25) == 1.0
    assert storage.request([(0, 100)], 7.0) == 7.0
    assert storage.counts() == ReadCounts(hits=2, reads=1, read_bytes=100)


def test_reading_takes_no_time_without_a_limit() -> None:
    assert NodeStorage(replace(SLOW, bytes_per_s=None)).request([(0, 10**9)], 3.0) == 3.0


def test_minio_reads_what_does_not_fit_in_every_epoch_and_the_page_cache_reads_more() -> None:
    """400 samples of 25 pages and room for half of them, in a new random order each epoch."""
    sizes, rng, means = (25 * PAGE,) * 400, np.random.default_rng(1), []
    for policy in ("minio", "page_cache"):
        storage = NodeStorage(StorageSettings(None, policy, 200 * 25 * PAGE, sizes))  # type: ignore[arg-type]
        epochs = [misses(storage, rng.permutation(400).tolist(), 25 * PAGE) for _ in range(8)]
        assert epochs[0] == 400
        means.append(np.mean(epochs[2:]) / 400)
    assert means == [0.5, pytest.approx(0.78, abs=0.04)]


def test_minio_does_not_depend_on_the_order() -> None:
    storage = NodeStorage(replace(SLOW, cache_bytes=40))
    assert misses(storage, list(range(8))) == 8
    assert misses(storage, [7, 0, 6, 1, 5, 2, 4, 3]) == 4


def test_a_sample_larger_than_the_cache_is_never_in_it() -> None:
    for cache in (LinuxCache(PAGE, [2 * PAGE]), MinIOCache(PAGE)):
        assert [cache.access(0, 2 * PAGE) for _ in range(2)] == [False, False]


def test_a_server_for_several_threads(tmp_path: Path) -> None:
    """4 threads read 5 x 100 bytes each at 20,000 bytes/s: 0.1 s together. A read of the same sample is a hit."""
    settings = StorageSettings(bytes_per_s=20_000.0, policy="minio", cache_bytes=10_000, sizes=(100,) * 20)
    with served_storage(tmp_path, "disk", settings) as path:
        client = pickle.loads(pickle.dumps(StorageClient(path)))

        def read(first: int) -> None:
            for sample in range(first, first + 5):
                client.wait_for([(sample, 100)])
            client.close()

        threads = [threading.Thread(target=read, args=(first,)) for first in (0, 5, 10, 15)]
        began = time.monotonic()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert time.monotonic() - began >= 0.1
        client.wait_for([(sample, 100) for sample in range(20)])
        counts = client.counts()
        client.close()
    assert (counts.hits, counts.reads, counts.read_bytes) == (20, 20, 2000)
    assert counts.cpu_us > 0
    with contextlib.closing(StorageClient(path)) as late, pytest.raises(ConnectionRefusedError):
        late.counts()


# ---- order of a DataLoader ----


def test_ranks_divide_the_order_of_an_epoch() -> None:
    """11 samples over 2 ranks: 6 and 5, each sample once, in another order in the next epoch."""
    ranks = [EpochIndices(11, 3, rank=rank, world_size=2, epoch=4) for rank in range(2)]
    assert [len(each) for each in ranks] == [6, 5]
    epochs = [[list(each) for each in ranks] for _ in range(2)]
    for number, (first, second) in zip((4, 5), epochs, strict=True):
        assert sorted(first + second) == list(range(11 * number, 11 * number + 11))
    assert [index % 11 for index in epochs[0][0]] != [index % 11 for index in epochs[1][0]]


def test_the_ranks_of_each_trial_are_counted_together() -> None:
    """Two trials of two ranks: each trial of the second lacks sample 2."""
    ranks = [[[1, 0, 1]], [[0, 1, 0]], [[1, 0, 0]], [[0, 1, 0]]]
    found = runs.by_trial([np.array(each) for each in ranks], 2)
    assert [each.tolist() for each in found] == [[[1, 1, 1]], [[1, 1, 0]]]
    assert [faults(each) for each in found] == [(0, 0), (1, 0)]


@pytest.mark.parametrize(("mode", "trials"), [("one", 1), ("eight", 8), ("ranks-2", 4), ("ranks-8", 1), ("nodes", 1)])
def test_trials_of_several_ranks_are_fewer(mode: Mode, trials: int) -> None:
    assert Workload().trials_in(mode) == trials


# ---- cells and results ----

WORKLOAD = Workload(images=100, epochs=2, trials=2, cores=2)


def result(seconds: float, *, compute_s: float = 0.1, trials: int = 1) -> CellResult:
    return CellResult(
        seconds=seconds,
        rounds=2,
        epochs=2 * trials,
        samples=200 * trials,
        compute_s=compute_s,
        storage_bytes=10_000_000,
        storage_reads=100,
        cpu_s=0.5,
        checked_epochs=3 * trials,
        missing=0,
        repeated=0,
    )


def record(cell: Cell, found: CellResult, workload: Workload = WORKLOAD) -> Record:
    return Record(cell, workload, found, Machine(libraries=("ray 1",)), "abc1234")


def test_a_plan_has_the_references_of_its_cells() -> None:
    plan = Plan((15e6,), (0.35, 1.0), ("one", "hyperband"), ("dataloader", "prep"))
    assert list(plan.cells()) == [
        Cell("one", "dataloader", None, 1.0),
        Cell("one", "prep", None, 1.0),
        Cell("one", "dataloader", 15e6, 0.35),
        Cell("one", "prep", 15e6, 0.35),
        Cell("one", "dataloader", 15e6, 1.0),
        Cell("one", "prep", 15e6, 1.0),
        Cell("hyperband", "compute", None, 1.0),
        Cell("hyperband", "dataloader", None, 1.0),
        Cell("hyperband", "prep", None, 1.0),
        Cell("hyperband", "dataloader", 15e6, 0.35),
        Cell("hyperband", "prep", 15e6, 0.35),
        Cell("hyperband", "dataloader", 15e6, 1.0),
        Cell("hyperband", "prep", 15e6, 1.0),
    ]
    assert {cell.reference for cell in plan.cells() if cell.mode == "one"} <= set(plan.cells())


@pytest.mark.parametrize("cached", [(), (0.0,), (0.5, 1.1)])
def test_a_share_outside_of_its_range(cached: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="cached shares must be above 0 and at most 1"):
        Plan((15e6,), cached, ("one",), ("prep",))


def test_finished_cells_are_not_measured_again(tmp_path: Path) -> None:
    """A cell of another workload is not finished."""
    file, plan = tmp_path / "a" / "ladder.jsonl", Plan((15e6,), (0.5,), ("one",), ("dataloader", "minio"))
    cells = list(plan.cells())
    assert read_records(file) == []
    records = [record(cells[0], result(1.0)), record(cells[1], result(2.0), replace(WORKLOAD, images=200))]
    for each in records:
        append_record(file, each)
    assert read_records(file) == records
    assert unfinished(cells, WORKLOAD, read_records(file)) == cells[1:]


def test_a_file_of_something_else(tmp_path: Path) -> None:
    file = tmp_path / "other.jsonl"
    file.write_text('{"cell": 3}\n')
    with pytest.raises(ConfigError, match=r"other\.jsonl must contain results of this version"):
        read_records(file)


def test_a_cell_that_fails_does_not_end_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next run repeats only that cell."""
    plan, said, failing = Plan((15e6,), (0.5,), ("one",), ("dataloader", "minio")), [], ["minio"]

    def run_cell(cell: Cell, bench: runs.Bench) -> CellResult:
        if cell.step in failing:
            raise MbaasError("the disk is broken")
        return result(1.0)

    monkeypatch.setattr(runs, "run_cell", run_cell)
    monkeypatch.setattr(runs, "make_photos", lambda *_, **__: tmp_path)
    monkeypatch.setattr(runs.mbaas, "read_images", lambda _: synthetic(WORKLOAD.images))
    options = {"cache_dir": tmp_path, "results": tmp_path / "ladder.jsonl", "report": said.append}
    assert [each.cell.step for each in runs.run_all(plan, WORKLOAD, **options)] == ["dataloader"] * 2
    assert sum("the disk is broken" in line for line in said) == 2
    failing.clear()
    records = runs.run_all(plan, WORKLOAD, **options)
    assert [each.cell.step for each in records] == ["dataloader"] * 2 + ["minio"] * 2
    assert runs.run_all(None, WORKLOAD, **options) == records


def test_the_storage_of_a_cell() -> None:
    """DataLoaders share a cache of their node; a feed has its own, so it reads from the disk."""
    bench = runs.Bench(WORKLOAD, Path(), synthetic(WORKLOAD.images))
    total = bench.dataset.total_bytes
    found = {step: runs.storage_settings(Cell("one", step, 15e6, 0.5), bench) for step in STEPS["one"]}
    assert (found["dataloader"].policy, found["dataloader"].cache_bytes) == ("page_cache", total // 2)
    assert (found["minio"].policy, found["minio"].cache_bytes) == ("minio", total // 2)
    assert {found[step].cache_bytes for step in ("fetch", "prep", "decoded")} == {0}
    search = runs.storage_settings(Cell("hyperband", "prep-page-cache", 15e6, 0.75), bench)
    assert (search.policy, search.cache_bytes) == ("page_cache", int(0.75 * total))
    assert runs.cache_bytes(Cell("nodes", "prep", 15e6, 0.5), bench) > total // 2, "both nodes together hold all"


# ---- trials ----


def test_training_counts_what_it_gets() -> None:
    """Of 4 samples, the second epoch lacks 1 and has 2 twice in a minibatch."""
    epochs = iter([[[0, 1], [2, 3]], [[2, 2], [0, 3]]])

    def epoch() -> Iterator[Minibatch]:
        for ids in next(epochs):
            yield [np.zeros(4096, np.uint8)], np.array(ids)

    counts = Training(epoch, replace(WORKLOAD, images=4, samples_per_s=1e6)).run(2)
    assert counts.tolist() == [[1, 1, 1, 1], [1, 0, 2, 1]]
    assert faults(counts) == (1, 1)


def test_a_trial_without_data_takes_only_its_steps() -> None:
    """100 samples at 2,000 samples/s take 0.05 s, in minibatches of 64 and 36."""
    workload = replace(WORKLOAD, samples_per_s=2000.0)
    began = time.monotonic()
    counts = Training(local_source(TrialSpec("compute", workload, Path())), workload).run(1)
    assert time.monotonic() - began >= 0.05
    assert faults(counts) == (0, 0)


# ---- stalls and tables ----


def test_stalls_are_differences() -> None:
    """Steps alone 2 s, everything cached 3 s, this cell 7 s: 1 s for prep and 4 s for fetching."""
    assert differential(7.0, cached_epoch_s=3.0, compute_s=2.0) == Stalls(2.0, 1.0, 4.0, 0.0)


def test_a_cached_run_that_was_slower_is_noise() -> None:
    assert differential(2.5, cached_epoch_s=3.0, compute_s=2.0) == Stalls(2.0, 1.0, 0.0, -0.5)


def one(step: str, seconds: float, *, cached: float = 0.5, storage: float | None = 15e6) -> Record:
    return record(Cell("one", step, storage, cached), result(seconds))  # type: ignore[arg-type]


RECORDS = [
    one("dataloader", 0.6, storage=None, cached=1.0),
    one("dataloader", 8.0),
    one("minio", 4.0),
    one("minio", 5.0, cached=0.75),
]
"""Two epochs each: 0.3, 4, 2 and 2.5 s."""


def test_rows_have_speed_ups_and_stalls_where_their_references_are_there() -> None:
    rows = {(row.record.cell.step, row.record.cell.cached): row for row in Results(RECORDS).rows()}
    assert len(rows) == 3, "references are not rows"
    assert rows["dataloader", 0.5].speed_up == 1.0
    assert rows["dataloader", 0.5].stalls == Stalls(0.1, pytest.approx(0.2), pytest.approx(3.7), pytest.approx(0.0))
    assert rows["minio", 0.5].speed_up == 2.0
    assert rows["minio", 0.5].stalls is None
    assert rows["minio", 0.75].speed_up is None


def test_a_search_is_compared_with_a_search_that_only_trains() -> None:
    cells = {"compute": (None, 1.0), "dataloader": (None, 1.0)}
    found = [record(Cell("hyperband", step, *where), result(2.0, compute_s=0.0)) for step, where in cells.items()]  # type: ignore[arg-type]
    found[0] = replace(found[0], result=result(1.0, compute_s=0.0))
    found.append(record(Cell("hyperband", "dataloader", 15e6, 0.75), result(3.0, compute_s=0.0)))
    (row,) = Results(found).rows()
    assert row.stalls == Stalls(0.5, 0.5, 0.5, 0.0)


def test_the_paper_is_beside_our_speed_ups() -> None:
    (claim,) = (claim for claim in CLAIMS if claim.where == "Fig. 13a")
    assert Results(RECORDS).speed_ups(claim) == [2.0]
    hdd = next(claim for claim in CLAIMS if claim.what == "HyperBand on HDD, prep shared")
    cells = [
        Cell("hyperband", step, rate, 0.75) for rate in (15e6, 530e6) for step in ("dataloader", "prep-page-cache")
    ]  # type: ignore[arg-type]
    found = [record(cell, result(seconds)) for cell, seconds in zip(cells, (5.0, 2.0, 5.0, 5.0), strict=True)]
    assert Results(found).speed_ups(hdd) == [2.5]


def test_the_last_record_of_a_cell_counts() -> None:
    assert [row.record.result.seconds for row in Results([*RECORDS, one("minio", 1.0)]).rows()] == [8.0, 1.0, 5.0]


def test_tables_and_figures() -> None:
    rows = Results(RECORDS).rows()
    assert all(len(cells_of(row)) == len(HEADINGS) for row in rows)
    assert cells_of(rows[1])[:5] == ["minio", "50", "2.0x", "2", "5"]
    console = Console(width=250)
    with console.capture() as capture:
        console.print(tables(RECORDS))
    for text in ("one trial", "15 MB/s, 75 % cached", "dataloader", "2.0x", "1.8x, 2.1x", "not measured", "abc1234"):
        assert text in capture.get()
    assert json.loads(json.dumps(figures(RECORDS)))[2]["speed_up"] == 2.0
    with console.capture() as capture:
        console.print(tables([]))
    assert "no cell is finished" in capture.get()


def test_faults_are_shown() -> None:
    faulty = replace(RECORDS[1], result=replace(RECORDS[1].result, missing=2))
    (row,) = Results([faulty]).rows()
    assert cells_of(row)[-1] == "2 missing"


# ---- the command ----


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--modes", "two"], "--modes must be of one, eight, ranks-2, ranks-4, ranks-8, hyperband, nodes, got two"),
        (["--modes", "ranks-4", "--trials", "6"], "trials must be a multiple of 4 for mode ranks-4, got 6"),
        (["--steps", "prepare"], "got prepare"),
        (["--storage", "fast"], "--storage must be"),
        (["--cached", "half"], "--cached must be numbers"),
    ],
)
def test_options_that_are_not_there(arguments: list[str], message: str) -> None:
    done = CliRunner().invoke(app, ["ladder", *arguments])
    assert isinstance(done.exception, MbaasError | SystemExit)
    assert message in f"{done.exception} {' '.join(done.output.split())}"


@pytest.mark.long
@pytest.mark.timeout(400)
def test_cells_for_real(tmp_path: Path) -> None:
    """With half of the images cached, each trial over MinIO reads half per epoch. A feed reads it once for both.

    Two ranks of one trial divide its samples.
    """
    file = tmp_path / "ladder.jsonl"
    options = ["--images", "96", "--epochs", "2", "--trials", "2", "--storage", "20MB/s", "--cached", "0.5"]
    command = [sys.executable, "-m", "benchmarks", "ladder", *options, "--modes", "eight,ranks-2"]
    command += ["--steps", "minio,prep"]
    command += ["--results", str(file), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=380, check=False)
    assert done.returncode == 0, done.stderr
    cells = json.loads(done.stdout)
    assert [tuple(each["cell"][name] for name in ("mode", "step", "storage_bytes_per_s")) for each in cells] == [
        ("eight", "minio", None),
        ("eight", "prep", None),
        ("eight", "minio", 20e6),
        ("eight", "prep", 20e6),
        ("ranks-2", "prep", None),
        ("ranks-2", "prep", 20e6),
    ]
    for each in cells:
        found, trials = each["result"], 2 if each["cell"]["mode"] == "eight" else 1
        assert (found["missing"], found["repeated"], found["checked_epochs"]) == (0, 0, 4 * trials)
        assert found["samples"] == 2 * trials * 96
        assert found["cpu_s"] > 0
    read = [each["result"]["storage_bytes"] / 2 for each in cells]
    half = read[3]
    assert [read[0], read[1], read[4]] == [0, 0, 0], "everything is cached"
    assert 4e6 < half < 5.5e6, "half of 96 photographs of 100 kB"
    assert read[2] == pytest.approx(2 * half, rel=0.1), "each trial reads for itself"
    assert read[5] == pytest.approx(half, rel=0.1)
    assert cells[3]["stalls"]["fetch_s"] > 0
    again = subprocess.run([*command[:-1], "--only-table"], capture_output=True, text=True, timeout=100, check=False)
    assert again.returncode == 0
    assert len(read_records(file)) == 6
