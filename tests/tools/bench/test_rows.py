"""Every row runs for real at a small size, and delivers each sample once in each epoch."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
import torch

from mbaas.errors import ConfigError, DatasetError
from mbaas.tools.bench import host
from mbaas.tools.bench.host import RowRun, run_row
from mbaas.tools.bench.rows import GPU_ROWS, BenchSettings, memory
from mbaas.tools.bench.runner import row_spec, run
from mbaas.tools.bench.tasks.base import Data, files_below
from mbaas.tools.bench.tasks.images import EXTENSIONS, make_photos
from support.waiting import wait_until

pytestmark = pytest.mark.slow

SAMPLES = 43


@pytest.fixture(scope="session")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """43 photographs: batches of 16 leave a remainder of 11."""
    return make_photos(tmp_path_factory.mktemp("bench"), SAMPLES, report=lambda _: None)


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Folder for temporary files. No files and no started processes may remain after a row."""
    # a short path, because sockets are created below it
    with tempfile.TemporaryDirectory(prefix="b", dir="/tmp", ignore_cleanup_errors=True) as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        before = set(psutil.Process().children())
        yield Path(folder)
        assert set(psutil.Process().children()) <= before
        assert {path.name for path in Path(folder).iterdir()} <= {"ray"}  # Ray keeps its logs


def run_small(photos: Path, row: str, trials: int, **options: object) -> RowRun:
    settings = BenchSettings(epochs=2, cores=2, timeout_s=100.0, **options)  # type: ignore[arg-type]
    return run_row(row_spec(settings, Data(photos), row, trials, 16))


@pytest.mark.parametrize(
    ("row", "trials", "options"),
    [
        ("prep", 1, {}),
        ("memory", 2, {}),
        ("memory", 1, {"read": "all"}),
        pytest.param("prep-decoded", 1, {}, marks=pytest.mark.long),
        ("dataloader", 2, {}),
        ("dali", 2, {}),
        pytest.param("mbaas", 3, {}, marks=pytest.mark.long),
        pytest.param("mbaas-decoded", 2, {}, marks=pytest.mark.long),
    ],
)
def test_each_sample_comes_once_in_each_epoch(photos: Path, row: str, trials: int, options: dict[str, object]) -> None:
    result = run_small(photos, row, trials, **options)
    assert result.error == ""
    processes = 2 if row.startswith("prep") else trials
    assert (result.row, result.trials, result.epochs) == (row, processes, 4 * processes)
    assert (result.missing, result.repeated, result.spilled_bytes) == (0, 0, 0)
    assert result.samples_per_s > 0
    assert result.cpu_s_per_1000 > 0 or row == "memory", "two epochs are read in less than a tick"
    assert result.peak_bytes > 10 * 2**20


def test_what_is_read_alone_comes_from_more_memory_than_caches_hold(photos: Path) -> None:
    spec = row_spec(BenchSettings(cores=2), Data(photos), "memory", 1, 16)
    with memory.service(spec) as address, memory.loader(replace(spec, address=address)) as epoch:
        most = memory.STAGED_BYTES // (16 * spec.task.made.nbytes)
        starts = []
        while len(starts) <= most:
            starts += [values[0].ctypes.data for values, _ in epoch()]
    assert len(set(starts[:most])) == most
    assert starts[most] == starts[0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
@pytest.mark.parametrize("row", GPU_ROWS)
@pytest.mark.parametrize("read", ["pages", "all"])
def test_each_sample_comes_once_in_each_epoch_on_a_gpu(photos: Path, row: str, read: str) -> None:
    result = run_small(photos, row, 2, gpu=True, read=read, rows=GPU_ROWS)
    assert result.error == ""
    assert (result.row, result.trials, result.epochs) == (row, 2, 8)
    assert (result.missing, result.repeated, result.spilled_bytes) == (0, 0, 0)
    assert result.samples_per_s > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_is_run_there(photos: Path) -> None:
    with pytest.raises(ConfigError, match=r"a GPU is asked for, but torch .* finds no CUDA device on this machine"):
        run(BenchSettings(data=photos, gpu=True, rows=("prep",)))


def test_a_row_that_fails_says_why(photos: Path, tmp_path: Path) -> None:
    folder = tmp_path / "bad" / "class"
    folder.mkdir(parents=True)
    (folder / "text.jpg").write_text("not a photograph")
    result = run_small(tmp_path / "bad", "prep", 1)
    assert "BadSampleError" in result.error
    assert "text.jpg" in result.error


@pytest.mark.long
def test_a_row_that_takes_too_long_is_ended(photos: Path) -> None:
    settings = BenchSettings(seconds=1e6, cores=2, timeout_s=8.0)
    result = run_row(row_spec(settings, Data(photos), "dataloader", 2, 16))
    assert "took longer than 8 s" in result.error


def test_rows_without_a_service_do_not_load_it() -> None:
    """Otherwise the memory of mbaas would count as theirs."""
    rows = ", ".join(f"mbaas.tools.bench.{module}" for module in ("rows.dataloader", "rows.dali", "rows.prep", "host"))
    code = f"import sys, {rows}; print(*sorted(sys.modules))"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert not {"ray", "mbaas.feed", "mbaas.loader", "mbaas.coordinator.coordinator", "mbaas.prep.worker"} & set(loaded)


def test_the_whole_benchmark(photos: Path, tmp_path: Path) -> None:
    told: list[str] = []
    rows = ("prep", "dataloader")
    settings = BenchSettings(data=photos, rows=rows, trials=(1,), batch=(16,), rounds=1, epochs=1, cores=1)
    report = run(settings, told.append)
    assert report.is_sound, report.results
    assert report.samples == SAMPLES
    prep, loader = report.results
    assert (prep.row, loader.row) == rows
    assert loader.share == pytest.approx(loader.samples_per_s / prep.samples_per_s)
    assert [line.split(":")[0] for line in told] == [
        "round 1/1, prep, 1 core, batches of 16",
        "round 1/1, dataloader, 1 trial, batches of 16",
    ]


def test_a_row_that_is_interrupted_leaves_nothing(
    photos: Path, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are killed in the middle, after they created temporary folders as multiprocessing does."""
    made: list[Path] = []
    monkeypatch.setattr(host, "HOST", "import tempfile, time; tempfile.mkdtemp(prefix='pymp-'); time.sleep(600)")

    wait = subprocess.Popen.wait

    def interrupt(process: subprocess.Popen[bytes], timeout: float | None = None) -> int:
        if timeout is None:  # after the kill
            return wait(process)
        made.append(wait_until(lambda: next(temporary.glob("mbaas-*/pymp-*"), None), "a folder is made"))
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "wait", interrupt)
    settings = BenchSettings(seconds=1e6, cores=2)
    with pytest.raises(KeyboardInterrupt):
        run_row(row_spec(settings, Data(photos), "dataloader", 2, 16))
    assert not made[0].exists()


RUN = """
import sys
from pathlib import Path
from mbaas.tools.bench.host import run_row
from mbaas.tools.bench.rows import BenchSettings
from mbaas.tools.bench.runner import row_spec
from mbaas.tools.bench.tasks.base import Data
run_row(row_spec(BenchSettings(seconds=1e6, cores=2), Data(Path(sys.argv[1])), "dataloader", 2, 16))
"""


def test_a_row_ends_when_the_program_that_runs_it_is_killed(photos: Path) -> None:
    def below(top: psutil.Process) -> list[psutil.Process]:
        """The host and its two trials, once they run."""
        found = top.children(recursive=True)
        return found if sum("spawn_main" in " ".join(each.cmdline()) for each in found) >= 2 else []

    with subprocess.Popen([sys.executable, "-c", RUN, str(photos)]) as program:
        row = wait_until(lambda: below(psutil.Process(program.pid)), "two trials run", deadline_s=60)
        program.kill()
    wait_until(lambda: not any(runs(each) for each in row), "the row has ended", deadline_s=30)


def runs(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_folder_that_is_not_there_is_not_called_empty(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"none does not exist; data must be a folder with a folder of images"):
        run(BenchSettings(data=tmp_path / "none"))
    (tmp_path / "file").touch()
    with pytest.raises(DatasetError, match=r"file is no folder"):
        run(BenchSettings(data=tmp_path / "file"))


def test_a_folder_without_images_is_refused(tmp_path: Path) -> None:
    (tmp_path / "class").mkdir()
    with pytest.raises(DatasetError, match=str(tmp_path)):
        run(BenchSettings(data=tmp_path))


def test_files_below_sees_what_read_images_sees(tmp_path: Path) -> None:
    for name in ("a/1.jpg", "a/deep/2.PNG", "b/3.jpeg", "b/.hidden.jpg", ".c/4.jpg", "b/notes.txt", "5.jpg"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x")
    assert [str(path.relative_to(tmp_path)) for path in files_below(tmp_path, EXTENSIONS)] == [
        "a/1.jpg",
        "a/deep/2.PNG",
        "b/3.jpeg",
    ]
