"""Measurements find the true rates of known systems: throttled storage, sleeping steps, prep of a fixed duration."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import ray
from stated_rates import decodable_rates, round_rates

import mbaas
from mbaas import transforms as T
from mbaas.cache.disk.store import DiskStore
from mbaas.dataset import synthetic
from mbaas.dataset.base import SampleReader, WrappedDataset
from mbaas.errors import BadSampleError, ConfigError
from mbaas.model.quantity import Quantity, stated
from mbaas.prep.decoded import container_bytes
from mbaas.prep.engines import Batch, make_engine
from mbaas.samples.fields import LABEL, Field
from mbaas.settings import FeedOptions
from mbaas.tools.analysis.measuring import service
from mbaas.tools.analysis.measuring.effort import Effort, repeat
from mbaas.tools.analysis.measuring.prep import decode_samples, prep_rate, subset
from mbaas.tools.analysis.measuring.service import (
    PREP_KIND,
    EpochRun,
    PacedStep,
    ServiceRun,
    Workload,
    busy_while_idle,
    epochs_of,
    is_settled_after,
    load_step,
    merge_runs,
    ready_step,
    run_service,
    staged_bytes,
    step_rate,
    synthetic_batch,
)
from mbaas.tools.analysis.measuring.storage import (
    ColdDataset,
    Span,
    disk_rate,
    drop,
    kept_cold,
    local_spans,
    memory_rate,
    portion,
    resident_share,
    spans_of,
    storage_rate,
)
from mbaas.tools.analysis.measuring.system import TRIALS, cost_s, costs_of, serving_seconds
from mbaas.tools.analysis.measuring.verify import split_of
from mbaas.tools.bench.cpu import CpuReading
from mbaas.wire.samples import SampleSpec
from support.waiting import wait_until

QUICK = Effort(least=3, most=8, window_s=0.2, budget_s=2.0)
SPEC = SampleSpec(Field("image", (8, 8, 3), "uint8"), (LABEL,))


def burner(cpu_s: float) -> Callable[[], None]:
    """Make a function that uses ``cpu_s`` of CPU time and can be sent to an actor."""

    def burn() -> None:
        end = time.thread_time() + cpu_s
        while time.thread_time() < end:
            pass

    return burn


@dataclass(frozen=True, eq=False, repr=False)
class BurningDataset(WrappedDataset):
    """Reading a sample takes 20 ms of CPU, far more than the 0.4 ms needed to request one."""

    def reader(self) -> SampleReader:
        return BurningReader(self.inner.reader())


class BurningReader(SampleReader):
    def __init__(self, inner: SampleReader) -> None:
        self._inner, self._burn = inner, burner(0.02)

    def read_into(self, sample_id: int, buffer: memoryview | np.ndarray) -> None:
        self._inner.read_into(sample_id, buffer)
        self._burn()


class FakeTime:
    """A clock that advances by one tick at each reading."""

    def __init__(self, tick_s: float) -> None:
        self.now, self.tick_s = 0.0, tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


def test_a_measurement_is_repeated_until_its_spread_is_small() -> None:
    """The first value, 50, is warm-up. Six of 99, 101, 99, ... span 99 to 101: 1 % each way, within the 2 % allowed."""
    values = iter([50.0, *([99.0, 101.0] * 10)])
    found = repeat(lambda: next(values), Effort(spread=0.02, least=6), unit="samples/s", clock=FakeTime(0.01))
    assert (found.samples, found.low, found.high) == (6, 99, 101)


def test_a_measurement_that_scatters_ends_with_its_budget_or_its_most() -> None:
    scattered = iter([0.0, *([10.0, 100.0] * 50)])
    wild = Effort(spread=0.001, least=3, most=20, budget_s=1.0)
    assert repeat(lambda: next(scattered), wild, unit="s", clock=FakeTime(0.001)).samples == 20
    clock = FakeTime(0.0)

    def slow() -> float:
        clock.now += 0.3
        return next(scattered)

    assert repeat(slow, wild, unit="s", clock=clock).samples == 4, "1.2 s are beyond the budget, 0.9 s are not"


def skip_in_memory(path: Path) -> None:
    kind = subprocess.run(["stat", "-f", "-c", "%T", path], capture_output=True, text=True, check=True).stdout.strip()
    if kind == "tmpfs":
        pytest.skip("files live in memory here: they cannot be dropped from it")


def test_what_was_read_is_resident_until_it_is_dropped(tmp_path: Path) -> None:
    file = tmp_path / "file"
    with file.open("wb") as out:
        out.write(bytes(1_000_003))
        out.flush()
        os.fsync(out.fileno())
    middle = Span(str(file), 300_001, 400_000)
    file.read_bytes()
    assert resident_share([middle]) == 1.0
    assert resident_share([Span(str(tmp_path / "none"), 0, 1)]) is None
    skip_in_memory(file)
    drop([Span(str(file), 0, 1_000_003)])
    assert resident_share([middle]) == 0.0


def test_what_a_cold_dataset_reads_does_not_stay(tmp_path: Path) -> None:
    skip_in_memory(tmp_path)
    for number in range(2):
        cv2.imwrite(str(tmp_path / f"{number}.png"), np.full((8, 8, 3), number, np.uint8))
    found = mbaas.read_images(tmp_path, classes=False)
    files = {Path(span.path).name: span for span in spans_of(tmp_path)}
    encoded, reader = (tmp_path / "1.png").read_bytes(), ColdDataset.around(found).reader()
    buffer = np.empty(len(encoded), np.uint8)

    def is_cold() -> bool:
        reader.read_into(1, buffer)
        return resident_share([files["1.png"]]) == 0.0

    # the kernel may keep recently written pages for a while
    wait_until(is_cold, "the page of a sample that was read to be dropped")
    assert buffer.tobytes() == encoded
    assert resident_share([files["0.png"]]) == 1.0


def test_files_are_kept_cold(tmp_path: Path) -> None:
    """Including files that are written meanwhile."""
    skip_in_memory(tmp_path)
    file = tmp_path / "file"
    whole = Span(str(file), 0, 1_000_003)
    with kept_cold(tmp_path):
        file.write_bytes(bytes(whole.length))
        wait_until(lambda: resident_share([whole]) == 0.0, "the file to be dropped")
    file.read_bytes()
    assert resident_share([whole]) == 1.0


@pytest.mark.alone
def test_the_rate_of_throttled_storage_is_found() -> None:
    """About 12 kB at 0.25 MB/s take 50 ms, however many readers there are; 2 ms of other work are only 4 %."""
    slow = portion(synthetic(301, height=64, width=64), bytes_per_s=250_000)
    true = 250_000 / (slow.total_bytes / len(slow))
    found = storage_rate(slow, QUICK, readers=(1, 4))
    assert [count for count, _ in found.curve.points] == [1, 4]
    for _, rate in found.curve.points:
        assert rate.value == pytest.approx(true, rel=0.05)


@pytest.mark.slow
def test_the_cpu_time_of_reading_is_found() -> None:
    """Waiting takes almost no CPU; storage that burns 20 ms a sample takes 20 ms, even on a busy machine."""
    waits = storage_rate(portion(synthetic(301, height=64, width=64), bytes_per_s=1_000_000), QUICK, readers=(1,))
    assert waits.cpu_s.value < 0.2 / waits.curve.points[0][1].value
    burns = storage_rate(BurningDataset.around(synthetic(200)), QUICK, readers=(1,))
    assert burns.cpu_s.value == pytest.approx(0.02, rel=0.1)


def test_whether_storage_was_cold_is_said(small_images: mbaas.Dataset) -> None:
    computed = storage_rate(synthetic(200), QUICK, readers=(1,))
    assert computed.resident is None
    assert "cannot be known" in (computed.note or "")
    local = storage_rate(small_images, QUICK, readers=(1,))
    assert local.resident is not None
    assert (local.note is None) == (local.resident <= 0.02)


def test_a_portion_has_the_samples_it_says(small_images: mbaas.Dataset) -> None:
    part = portion(small_images, samples=101, seed=3)
    assert len(part) == 101
    whole = {small_images.uri(i): i for i in range(len(small_images))}
    ids = [whole[part.uri(i)] for i in range(101)]
    assert len(set(ids)) == 101
    assert part.total_bytes == int(small_images.lengths(np.array(ids)).sum())
    assert part.labels(np.arange(101)).tolist() == small_images.labels(np.array(ids)).tolist()
    buffer, same = (np.empty(int(part.lengths(np.array([7]))[0]), np.uint8) for _ in range(2))
    part.reader().read_into(7, buffer)
    small_images.reader().read_into(ids[7], same)
    assert buffer.tobytes() == same.tobytes()
    assert [span.length for span in local_spans(part, [7])] == [len(same)]


def test_what_a_disk_tier_gives(tmp_path: Path) -> None:
    """All written bytes are read in whole samples. Nothing is left behind, and a feed's files are not touched."""
    (tmp_path / "kept").write_text("by a feed")
    raw = subset(synthetic(50, height=64, width=64))
    found = disk_rate(raw, tmp_path, Effort(least=3, most=3, window_s=0.02))
    assert (found.rate.unit, found.rate.samples) == ("bytes/s", 3)
    assert 1e5 < found.rate.value < 1e11
    assert (found.note is None) == (found.resident is None or found.resident <= 0.02)
    assert [file.name for file in tmp_path.iterdir()] == ["kept"]


@pytest.mark.alone
def test_the_rate_of_a_disk_that_is_slow_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """8 readers, each reading 16 samples of about 12 kB in 40 ms."""
    raw = subset(synthetic(16 * 40, height=64, width=64))
    monkeypatch.setattr(DiskStore, "get", lambda *_, **__: time.sleep(0.040))
    found = disk_rate(raw, tmp_path, Effort(least=5, most=5, window_s=0.1))
    assert found.rate.value == pytest.approx(8 * len(raw.content) / 40 / 0.040, rel=0.25)


def test_a_disk_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"needs a folder that it may write to, got .*/file"):
        disk_rate(subset(synthetic(3)), tmp_path / "file", QUICK)


def test_memory_is_measured_in_bytes() -> None:
    rate = memory_rate(100_000, Effort(least=3, most=3, window_s=0.02))
    assert rate.unit == "bytes/s"
    assert 5e7 < rate.value < 1e12


@pytest.mark.alone
def test_the_rate_of_a_step_that_sleeps_is_found() -> None:
    """64 samples in 100 ms are 640 samples/s, with no CPU use."""

    def step(batch: dict[str, object]) -> None:
        time.sleep(0.100)

    found = step_rate(ready_step(step), synthetic_batch(SPEC, 64, format="numpy"), QUICK)
    assert found.batch_size == 64
    assert found.rate.value == pytest.approx(640, rel=0.05)
    assert found.cpu_s.value < 0.1 / 640


@pytest.mark.alone
def test_a_stated_rate_is_kept_by_sleeping() -> None:
    found = step_rate(PacedStep(500.0), synthetic_batch(SPEC, 50, format="numpy"), QUICK)
    assert found.rate.value == pytest.approx(500, rel=0.05)
    with pytest.raises(ConfigError, match="the rate of a step must be above 0 samples/s, got 0"):
        PacedStep(0)


def test_a_synthetic_minibatch_is_like_a_loaders() -> None:
    torch_batch = synthetic_batch(SPEC, 5, normalize=T.Normalize((0.5, 0.5, 0.5), (0.2, 0.2, 0.2)))
    assert tuple(torch_batch["image"].shape) == (5, 3, 8, 8)
    assert str(torch_batch["image"].dtype) == "torch.float32"
    assert {str(torch_batch[name].dtype) for name in ("label", "sample_id")} == {"torch.int64"}
    arrays = synthetic_batch(SampleSpec(Field("image", (7,), "float32"), (LABEL,)), 3, format="numpy")
    assert (arrays["image"].shape, arrays["image"].dtype) == ((3, 7), np.float32)


def test_a_synthetic_minibatch_of_sound_is_a_list_of_the_longest() -> None:
    spec = SampleSpec(Field("audio", (None, 2), "float32", longest=5), ())
    batch = synthetic_batch(spec, 3, has_images=False)
    assert [tuple(sound.shape) for sound in batch["audio"]] == [(5, 2)] * 3
    assert all(sound.std() > 0 for sound in batch["audio"])


def test_a_synthetic_minibatch_of_images_of_any_size_has_about_the_largest() -> None:
    spec = SampleSpec(Field("image", (None, None, 3), "uint8", longest=30), ())
    batch = synthetic_batch(spec, 3)
    assert [tuple(image.shape) for image in batch["image"]] == [(3, 5, 6)] * 3
    assert all(image.float().std() > 0 for image in batch["image"])


def test_a_maker_of_a_step_is_called_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "steps_of_test.py").write_text(
        "def make():\n    seen = []\n    def step(batch):\n        seen.append(batch)\n        return len(seen)\n"
        "    return step\n"
        "def two(batch, other): pass\n"
        "def nothing(): pass\n"
        "number = 3\n"
    )
    monkeypatch.chdir(tmp_path)
    step = ready_step(load_step("steps_of_test:make"))
    assert [step({}), step({})] == [1, 2]
    with pytest.raises(ConfigError, match="must take one minibatch, or nothing if it makes the step, got 2 parameters"):
        ready_step(load_step("steps_of_test:two"))
    with pytest.raises(ConfigError, match="must return a function of a minibatch, got NoneType"):
        ready_step(load_step("steps_of_test:nothing"))
    for path, sentence in [
        ("steps_of_test:number", "the step must be a function, and 'steps_of_test:number' is of type int"),
        ("steps_of_test:missing", "cannot find the step 'steps_of_test:missing'"),
        ("no_such_module_here:step", "cannot find the step"),
        ("steps_of_test", "the step must be 'module:function', got 'steps_of_test'"),
    ]:
        with pytest.raises(ConfigError, match=sentence):
            load_step(path)


def test_how_much_slower_a_worker_of_a_feed_is() -> None:
    """500 samples/s alone, 400 (350 to 520) in a feed: 2.5 - 2 = 0.5 ms, from 0 to 1000 / 350 - 2 = 0.857 ms."""
    found = serving_seconds(500, Quantity(400, low=350, high=520, unit="samples/s"))
    assert (found.value, found.low, found.high, found.unit) == (
        pytest.approx(0.0005),
        0,
        pytest.approx(0.000857, rel=1e-3),
        "s",
    )


def a_run(
    prep_s: float = 0.0,
    beside_s: float = 0.0,
    *,
    samples: int = 1000,
    trials: int = 1,
    epochs_s: Sequence[float] = (1.0,),
    decoded: float = 0.0,
    background: dict[str, float] | None = None,
) -> ServiceRun:
    """A run with the given CPU seconds per sample, for prep workers and for all other processes."""
    background, seconds = background or {}, sum(epochs_s)
    busy_s = {PREP_KIND: prep_s * samples * len(epochs_s), "Coordinator": beside_s * samples * len(epochs_s)}
    return ServiceRun(
        tuple((EpochRun(samples, each_s, 0.0, 0.0, 0.0),) * trials for each_s in epochs_s),
        {kind: cpu_s + background.get(kind, 0.0) * seconds for kind, cpu_s in busy_s.items()},
        seconds,
        background,
        decoded,
    )


def test_rounds_of_a_feed_are_one_run() -> None:
    """Two trials, epochs of 1 and 2 s, then one of 4 s: 300 samples in 7 s for each trial, 600 samples in all."""
    runs = [a_run(0.01, 0.02, samples=100, trials=2, epochs_s=each, decoded=len(each) / 4) for each in ([1, 2], [4])]
    both = merge_runs(runs)
    assert (both.trial_per_s, both.samples, both.seconds, both.decoded) == (300 / 7, 600, 7, 0.375)
    assert dict(both.cpu_s) == {PREP_KIND: pytest.approx(3), "Coordinator": pytest.approx(6)}


def test_the_rate_of_a_trial_is_that_of_the_slowest_over_all_epochs() -> None:
    """One trial has epochs of 2 and 1 s, the other of 1 and 3 s. The slower one takes 4 s for 200 samples."""
    fast, slow = ([EpochRun(100, each_s, 0.0, 0.0, 0.0) for each_s in epochs_s] for epochs_s in ((2, 1), (1, 3)))
    assert ServiceRun(tuple(zip(fast, slow, strict=True))).trial_per_s == 50


def test_an_epoch_is_split_by_the_means_of_its_runs() -> None:
    """100 samples: 0.5 s of steps; on average 1 s from memory, and 3 s with 2.2 s of waiting in the real setup."""
    in_memory = ServiceRun(tuple((EpochRun(100, each_s, 0.0, 0.0, 0.0),) for each_s in (0.4, 0.4, 2.2)))
    waits = ((1.0, 0.6, 0.1), (4.0, 3.0, 0.2), (1.6, 0.9, 0.3))  # in total, for bytes, for other trials
    real = ServiceRun(tuple((EpochRun(100, each_s, *waited),) for each_s, waited in zip((2, 2, 5), waits, strict=True)))
    found = split_of(100, stated(200, unit="samples/s"), in_memory, real)
    assert found.epoch_s == Quantity(3.0, low=2.0, high=5.0, unit="s")
    assert (found.compute_s.value, found.prep_stall_s.value, found.fetch_stall_s.value) == pytest.approx((0.5, 0.5, 2))
    assert found.live_fetch_stall_s.value == pytest.approx(1.5)
    assert found.live_peer_stall_s.value == pytest.approx(0.2)
    assert found.live_prep_stall_s.value == pytest.approx(0.5)
    assert found.disagreement == pytest.approx(0.5 / 3)


def test_what_goes_on_all_the_time_is_no_cost_of_a_sample() -> None:
    """Prep workers keep 0.2 cores busy in a round of 3 s and 0.6 in one of 1 s: 0.3 on average."""
    rounds = [
        a_run(0.001, 0.0005, trials=2, epochs_s=(3.0,), background={PREP_KIND: 0.2, "Coordinator": 0.1}),
        a_run(0.001, 0.0005, trials=2, epochs_s=(1.0,), background={PREP_KIND: 0.6, "Coordinator": 0.1}),
    ]
    both = merge_runs(rounds)
    assert both.background == {PREP_KIND: pytest.approx(0.3), "Coordinator": pytest.approx(0.1)}
    assert both.background_cores == pytest.approx(0.4)
    assert cost_s(both, 2, of_prep=True) == pytest.approx(0.001)
    assert cost_s(both, 2, of_prep=False) == pytest.approx(0.0005)
    assert cost_s(replace(both, background={PREP_KIND: 2.0}), 2, of_prep=True) == 0.0


def feeds_that_cost(*, share: float, pace: float) -> dict[str, ServiceRun]:
    """Feeds of a machine with that pace; times are in ms per sample.

    Prep takes 6, or 0.6 when decoded; staging 0.1, delivery 0.05, reading 0.4. One worker takes 5 or 0.5 alone, and 0.5
    more in a feed.
    """
    made_s, alone_s = ((1 - share) * encoded_s + share * encoded_s / 10 for encoded_s in (0.006, 0.005))
    return {
        "few": a_run(made_s / pace, 0.00015 / pace, decoded=share, epochs_s=[1000 * (alone_s + 0.0005) / pace]),
        "one": a_run(made_s / pace, 0.00015 / pace, decoded=share, background={"Coordinator": 0.2}),
        "many": a_run(made_s / pace, (0.0001 + TRIALS * 0.00005) / pace, trials=TRIALS, decoded=share),
        "encoded": a_run(0.006 / pace, 0.00015 / pace),
        "cold": a_run(0.006 / pace, (0.00015 + 0.0004) / pace),
    }


@pytest.mark.parametrize(("share", "decoded_s"), [(1.0, 0.0006), (0.5, 0.0006), (0.4, 0.0004)])
def test_what_samples_cost_is_found_in_feeds(share: float, decoded_s: float) -> None:
    """The pace does not matter. A feed with less than half of its samples decoded gives no new decoded cost."""
    rates = decodable_rates(decoded_cpu_s=stated(0.0004, unit="CPU-s"))
    found = costs_of(rates, [feeds_that_cost(share=share, pace=0.5)] * 2, pace=0.5)
    assert found.prep_cpu_s is not None
    assert found.decoded_cpu_s is not None
    assert found.prep_cpu_s.value == pytest.approx(0.006)
    assert found.decoded_cpu_s.value == pytest.approx(decoded_s)
    assert found.staging_cpu_s.value == pytest.approx(0.0001)
    assert found.delivery_cpu_s.value == pytest.approx(0.00005)
    assert found.read_cpu_s.value == pytest.approx(0.0004)
    assert found.serving_s.value == pytest.approx(0.0005)
    assert found.background_cores.value == pytest.approx(0.2)


def test_what_samples_cost_is_found_where_none_can_be_kept_decoded_and_reading_is_not_measured_in_a_feed() -> None:
    rates = round_rates(read_cpu_s=stated(0.0007, unit="CPU-s"))
    feeds = feeds_that_cost(share=0.0, pace=1.0)
    del feeds["encoded"], feeds["cold"]
    slower = dict(feeds, one=a_run(0.008, 0.00015))
    found = costs_of(rates, [feeds, slower], pace=1.0)
    assert found.prep_cpu_s == Quantity(0.007, low=0.006, high=0.008, unit="CPU-s", samples=2)
    assert found.decoded_cpu_s is None
    assert found.read_cpu_s.value == 0.0007


@pytest.mark.long
def test_the_cpu_time_of_prep_in_a_feed_is_found(ray_clean: None) -> None:
    """Deterministic transforms take 10 ms of CPU a sample, random ones 20 ms; decoded samples need only the latter."""
    burn_before, burn_after = burner(0.01), burner(0.02)

    def alike(image):
        burn_before()
        return image

    def random(image, rng):
        burn_after()
        return image

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(alike, deterministic=True), T.Map(random)])
    workload = Workload(
        dataset=synthetic(40), pipeline=pipeline, step=lambda batch: None, options=FeedOptions(batch_size=8)
    )
    options = {"trials": 1, "prep_workers": 1, "sample_bytes": 192.0, "epochs": 2}
    run = run_service(workload, **options, cache_bytes=None, decoded=True)
    assert run.decoded == 1.0
    assert cost_s(run, 1, of_prep=True) == pytest.approx(0.02, rel=0.15)
    assert 0 < cost_s(run, 1, of_prep=False) < 0.02
    run = run_service(workload, **options, cache_bytes=1_000_000)
    assert run.decoded == 0.0
    assert cost_s(run, 1, of_prep=True) == pytest.approx(0.03, rel=0.15)


def a_workload(batch_size: int = 8, **options: Any) -> Workload:
    """100 images that are only decoded, and steps that do nothing."""
    return Workload(
        dataset=synthetic(100),
        pipeline=T.Pipeline([T.DecodeImage()]),
        step=lambda batch: None,
        options=FeedOptions(batch_size=batch_size, **options),
    )


@pytest.mark.parametrize(("staging_bytes", "staged"), [(None, None), (100_000, 100_000)])
@pytest.mark.parametrize(
    ("pipeline", "shuffle"), [((T.DecodeImage(),), True), ((T.DecodeImage(), T.RandomHorizontalFlip()), False)]
)
def test_a_feed_that_stands_for_another_stages_as_much(
    pipeline: tuple[T.Transform, ...], shuffle: bool, staging_bytes: int | None, staged: int | None
) -> None:
    workload = replace(a_workload(staging_bytes=staging_bytes, shuffle=shuffle), pipeline=T.Pipeline(pipeline))
    assert staged_bytes(workload, 192.0, 2, 2**30) == staged


@pytest.mark.parametrize(
    ("staging_bytes", "store_bytes", "batch_size", "staged"),
    [
        (None, 2**30, 8, 99 * 208),
        (None, 100_000, 8, 15_000),
        (10_000, 2**30, 8, 10_000),
        (10**9, 2**30, 8, 99 * 208),
        (None, 2**30, 64, 192 * 208),
    ],
)
def test_what_would_be_prepared_once_for_all_epochs_is_staged_in_part(
    staging_bytes: int | None, store_bytes: int, batch_size: int, staged: int
) -> None:
    """100 samples of 192 bytes, a label and an id: 99, or as many as fit, but at least three minibatches."""
    workload = a_workload(staging_bytes=staging_bytes, batch_size=batch_size, shuffle=False)
    assert staged_bytes(workload, 192.0, 2, store_bytes) == staged


class Prepares:
    """A feed whose status returns the given block counts in turn."""

    def __init__(self, *blocks: int) -> None:
        self._blocks = iter(blocks)

    def status(self) -> SimpleNamespace:
        return SimpleNamespace(prepared_blocks=next(self._blocks))


class Watches:
    """Readings of the CPU seconds of one prep worker; a host process uses ten times as much."""

    def __init__(self, *cpu_s: float) -> None:
        self._readings = enumerate(cpu_s)

    def cpu(self) -> CpuReading:
        at_s, used_s = next(self._readings)
        return CpuReading(at_s, {(1, PREP_KIND): used_s, (2, "host"): 10 * used_s})


def test_what_goes_on_all_the_time_is_looked_at_when_nothing_is_prepared_any_more() -> None:
    """Two blocks are prepared during the first look, so only the second counts."""
    feed: Any = Prepares(5, 7, 7)
    watch: Any = Watches(0.0, 0.9, 0.9, 1.0)
    assert busy_while_idle(feed, watch, 0.01) == {PREP_KIND: pytest.approx(0.1)}


@ray.remote(num_cpus=0)
class HangingTrial:
    def __init__(self) -> None:
        self._is_over = threading.Event()

    def epochs(self, count: int) -> Iterator[EpochRun]:
        yield EpochRun(count, 1.0, 0.0, 0.0, 0.0)
        self._is_over.wait()


def test_a_trial_that_hangs_is_not_waited_for_forever(ray_clean: None, monkeypatch: pytest.MonkeyPatch) -> None:
    trials = [HangingTrial.remote(), HangingTrial.remote()]
    ended = epochs_of(trials, 3)
    assert next(ended) == (EpochRun(3, 1.0, 0.0, 0.0, 0.0),) * 2
    monkeypatch.setattr(service, "EPOCH_S", 0.5)
    with pytest.raises(TimeoutError, match=r"2 trials did not end epoch 2 of 3 within 500 ms"):
        next(ended)
    for trial in trials:
        ray.kill(trial)


@pytest.mark.parametrize(
    ("kept", "is_settled"),
    [
        ([40, 40, 40, 40], False),
        ([0, 40, 40, 40, 40], False),
        ([40, 40, 40, 40, 40], True),
        ([40, 40, 41, 41, 41], False),
        ([30, 41, 41, 41, 41, 41], True),
        (list(range(16)), False),
        (list(range(17)), True),
    ],
)
def test_a_feed_keeps_all_that_it_will_when_no_sample_came_in_four_epochs(kept: list[int], is_settled: bool) -> None:
    """After 16 epochs the feed counts as settled in any case."""
    assert is_settled_after(kept) == is_settled


@pytest.mark.long
def test_the_rate_of_prep_that_sleeps_is_found(ray_clean: None) -> None:
    """8 ms a sample are 125 samples/s for each worker, however many cores there are."""

    def doze(image, rng):
        time.sleep(0.008)
        return image

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(doze)])
    effort = Effort(least=3, most=8, window_s=0.5, budget_s=2.0)
    found = prep_rate(subset(synthetic(301)), pipeline, effort, workers=(1, 2))
    (_, one), (_, two) = found.workers.points
    assert one.value == pytest.approx(125, rel=0.1)
    assert two.value / one.value == pytest.approx(2, rel=0.1)
    assert found.made == SPEC.made
    assert found.threads is None


def test_the_cpu_time_of_prep_is_found(ray_clean: None) -> None:
    """40 ms of CPU a sample, on a machine that other programs may use too."""

    burn = burner(0.04)

    def burned(image, rng):
        burn()
        return image

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(burned)])
    found = prep_rate(subset(synthetic(20)), pipeline, QUICK, workers=(1,), threads=(1, 2))
    assert found.cpu_s.value == pytest.approx(0.04, rel=0.05)
    assert found.workers.points[0][1].value <= 1 / 0.04 * 1.01
    assert found.threads is not None
    assert found.from_memory


def test_prep_of_decoded_samples_does_only_what_is_left(ray_clean: None) -> None:
    """Deterministic transforms take 15 ms of CPU a sample, random ones 20 ms; decoded samples need only the latter."""
    burn_before, burn_after = burner(0.015), burner(0.02)

    def alike(image):
        burn_before()
        return image[:4]

    def random(image, rng):
        burn_after()
        return image

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(alike, deterministic=True), T.RandomHorizontalFlip(), T.Map(random)])
    kept = decode_samples(subset(synthetic(20)), pipeline)
    assert kept is not None
    assert len(kept.ends) == 20
    assert np.diff(kept.ends, prepend=0).tolist() == [container_bytes((4, 8, 3), np.dtype(np.uint8))] * 20
    found = prep_rate(kept, pipeline, QUICK, workers=(1,))
    assert found.cpu_s.value == pytest.approx(0.02, rel=0.1)


def test_decoded_samples_are_prepared_like_the_encoded_ones_and_only_as_many_as_fit() -> None:
    raw, pipeline = subset(synthetic(130)), T.Pipeline([T.DecodeImage(), T.RandomResizedCrop(6)])
    kept = decode_samples(raw, pipeline, most_bytes=70 * 320)  # 8 x 8 x 3 bytes and a header
    assert kept is not None
    assert kept.sample_ids.tolist() == raw.sample_ids[:70].tolist()
    assert kept.uris == raw.uris[:70]
    engine, made = make_engine("cpu", pipeline, seed=0), [np.empty((70, 6, 6, 3), np.uint8) for _ in range(2)]
    for each, out in zip((raw, kept), made, strict=True):
        known = {name: column[:70] for name, column in each.known.items()}
        engine.prepare(Batch(each.rows()[:70], each.sample_ids[:70], 3, known), out)
    assert np.array_equal(*made)
    engine.close()
    assert decode_samples(raw, pipeline, most_bytes=100) is None


def test_prep_goes_by_the_boxes_of_samples(ray_clean: None, tmp_path: Path) -> None:
    cv2.imwrite(str(tmp_path / "0.png"), np.zeros((40, 50, 3), np.uint8))
    (tmp_path / "a.jsonl").write_text("".join(f'{{"uri": "0.png", "boxes": [[{n}, 5, 30, 30]]}}\n' for n in range(9)))
    raw = subset(mbaas.read_manifest(tmp_path / "a.jsonl"))
    assert raw.known["boxes"][:, 0, 0].tolist() == raw.sample_ids.tolist()
    pipeline = T.Pipeline([T.DecodeImage(), T.RandomIoUCrop(), T.Resize((8, 8))], boxes=T.Boxes())
    found = prep_rate(raw, pipeline, Effort(least=1, most=1, window_s=0.05), workers=(1,))
    assert found.workers.points[0][1].value > 0
    assert found.made == SPEC.made


def test_prep_of_samples_that_cannot_be_prepared_names_one(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    for number in range(3):
        (folder / f"{number}.jpg").write_text("no image")
    with pytest.raises(BadSampleError, match=r"class/[012]\.jpg"):
        prep_rate(subset(mbaas.read_images(tmp_path)), T.Pipeline([T.DecodeImage()]), QUICK, workers=(1,))


def test_a_file_for_which_nobody_has_the_memory_is_left_out_of_what_is_measured(tmp_path: Path) -> None:
    folder = tmp_path / "class"
    folder.mkdir()
    for name in ("hole.png", "text.png"):
        (folder / name).write_text("no image")
    os.truncate(folder / "hole.png", 64 << 30)
    data = mbaas.read_images(tmp_path)
    assert [Path(uri).name for uri in subset(data).uris] == ["text.png"]
    with pytest.raises(BadSampleError, match=r"hole\.png: it has 68,719,476,736 bytes, over the limit"):
        storage_rate(data, QUICK, readers=(1,))
