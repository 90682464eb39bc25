"""The DALI engine for sound agrees with the cpu engine, on the CPU everywhere and on a GPU if there is one."""

from __future__ import annotations

import io
import threading
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from mbaas import transforms as T
from mbaas.errors import BadSampleError
from mbaas.prep.engines import Batch, Engine, make_engine
from mbaas.prep.engines.dali_runs import GraphRuns
from mbaas.prep.engines.dali_sound import DaliSoundEngine
from mbaas.samples.fields import Packed

NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no CUDA device")
DEVICES = [pytest.param(None, id="cpu"), pytest.param(0, id="gpu", marks=[pytest.mark.gpu, NO_GPU])]
every_device = pytest.mark.parametrize("device_id", DEVICES)

RATE = 16_000
DECODE = T.DecodeAudio(RATE, max_s=2)
MELS = T.MelSpectrogram(n_fft=512, hop_length=160, n_mels=64)
DECIBELS = T.AmplitudeToDB(top_db=80)
MASKS = T.SpecAugment(2, 20, 2, 8)
WHOLE = [DECODE, MELS, DECIBELS, MASKS]
CROPPED = [DECODE, T.RandomCrop(9000), MELS, DECIBELS, MASKS]


def recording(number: int, channels: int = 1, rate: int = RATE) -> Any:
    """float64 [time, channels]: loud and soft stretches of noise, weaker at high frequencies, like speech."""
    samples = 9000 + 1511 * number
    noise = np.random.default_rng(number).standard_normal((samples, channels))
    falling = np.stack([np.convolve(each, 0.97 ** np.arange(200), "same") for each in noise.T], axis=1)
    loudness = 0.02 + np.clip(np.sin(2 * np.pi * 2 * np.arange(samples) / rate), 0, 1)
    return 0.03 * falling * loudness[:, None]


def encoded(sound: Any, format: str = "FLAC", subtype: str = "PCM_16", rate: int = RATE) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, sound, rate, format=format, subtype=subtype)
    return stream.getvalue()


FILES = [encoded(recording(number)) for number in range(7)]
STEREO = [encoded(recording(number, channels=2), "WAV", "PCM_24") for number in range(7)]
OTHER_RATE = [encoded(recording(number, rate=22_050), rate=22_050) for number in range(7)]


def run(engine: Engine, files: list[bytes], ids: Any = None, epoch: int = 0) -> tuple[list[Any], Any]:
    """Value of each file (meaningless for bad ones) and the engine's result; the first file must be good."""
    numbers = np.arange(len(files)) if ids is None else np.array(ids)
    out = engine.field(files[0], "first", {"id": numbers[:1]}).empty(len(files))
    out[:] = 77
    said = engine.prepare(Batch(files, numbers, epoch, {"id": numbers}), out)
    made = said.made
    return [made.value(row) if isinstance(made, Packed) else made[row] for row in range(len(files))], said


def prepared(
    kind: Any, steps: list[T.Transform], files: list[bytes], ids: Any = None, epoch: int = 0, **options: Any
) -> Any:
    engine = make_engine(kind, T.Pipeline(steps), seed=7, **options)
    try:
        return run(engine, files, ids, epoch)
    finally:
        engine.close()


def both(steps: list[T.Transform], files: list[bytes], device_id: int | None) -> list[tuple[Any, Any]]:
    """Pairs of the cpu engine's and DALI's value of each file; no file is bad."""
    ours, said = prepared("cpu", steps, files, epoch=2)
    theirs, also = prepared("dali", steps, files, epoch=2, device_id=device_id)
    assert said.bad == also.bad == []
    for one, other in zip(ours, theirs, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
    return list(zip(ours, theirs, strict=True))


SPECTRA = {
    "htk": MELS,
    "librosa": T.MelSpectrogram(512, 400, 160, n_mels=80, norm="slaney", mel_scale="slaney"),
    "limits": T.MelSpectrogram(400, 333, 77, f_min=60, f_max=7600, n_mels=23),
    "magnitude": T.MelSpectrogram(power=1, norm="slaney"),
    "coarse": T.MelSpectrogram(1024, hop_length=1500, n_mels=5, mel_scale="slaney"),
}


@every_device
@pytest.mark.parametrize("name", SPECTRA)
def test_spectrograms_are_equal_but_for_rounding(name: str, device_id: int | None) -> None:
    """A different FFT and a different summation order leave 6 digits of float32.

    Error measured on the CPU: at most 1e-6 of the loudest value, and at most 1.5e-4 of each single value.
    """
    for ours, theirs in both([DECODE, SPECTRA[name]], FILES, device_id):
        np.testing.assert_allclose(theirs, ours, rtol=1e-3, atol=5e-6 * ours.max())


DECIBELS_OF = {
    "log mel": ([DECODE, MELS, T.AmplitudeToDB()], FILES),
    "bounded": ([DECODE, MELS, DECIBELS], FILES),
    "magnitude": ([DECODE, SPECTRA["magnitude"], T.AmplitudeToDB("magnitude", top_db=60)], FILES),
    "masked": (WHOLE, FILES),
    "short masks": ([DECODE, MELS, DECIBELS, T.SpecAugment(2, 40, 1, 40, p=0.2)], FILES),
    "cropped": (CROPPED, FILES),
    "padded": ([DECODE, T.CropOrPad(20_000), MELS, DECIBELS, MASKS], FILES),
    "of another rate": (CROPPED, OTHER_RATE),
    "crops of spectrograms": ([DECODE, MELS, DECIBELS, T.RandomCrop((80, 40)), T.CropOrPad(120)], FILES),
    "stereo": (
        [T.DecodeAudio(RATE, channels=2, max_s=2), MELS, DECIBELS, MASKS, T.RandomCrop((70, 2, 80))],
        [*STEREO[:6], FILES[6]],
    ),
    "stereo, mixed": (WHOLE, STEREO),
    "masks first": ([DECODE, T.RandomCrop(9000), MELS, MASKS, DECIBELS], FILES),
}


@every_device
@pytest.mark.parametrize("name", DECIBELS_OF)
def test_decibels_are_equal_to_a_thousandth(name: str, device_id: int | None) -> None:
    """So windows and masks have the same offsets. Error measured on the CPU: at most 2e-4, for values of -70 to 20."""
    steps, files = DECIBELS_OF[name]
    for ours, theirs in both(steps, files, device_id):
        np.testing.assert_allclose(theirs, ours, rtol=0, atol=1e-3)


@every_device
def test_masks_are_exact_and_silence_is_silent(device_id: int | None) -> None:
    steps = [DECODE, MELS, T.SpecAugment(2, 20, 2, 8, zero_masking=True)]
    for ours, theirs in both(steps, FILES, device_id):
        assert (ours == 0).any()
        np.testing.assert_array_equal(theirs == 0, ours == 0)
    silence = [encoded(np.zeros(9000))]
    ((ours, theirs),) = both([DECODE, MELS, T.AmplitudeToDB()], silence, device_id)
    assert (ours == -100).all()
    np.testing.assert_allclose(theirs, -100, rtol=0, atol=1e-4)


@every_device
@pytest.mark.parametrize("steps", [WHOLE, CROPPED], ids=["whole", "cropped"])
def test_a_sample_does_not_depend_on_its_minibatch_or_threads(steps: list[T.Transform], device_id: int | None) -> None:
    alone = [prepared("dali", steps, [FILES[k]], [k], 3, device_id=device_id)[0][0] for k in range(7)]
    order = np.random.default_rng(0).permutation(7)
    for threads in (1, 3):
        mixed, _ = prepared("dali", steps, [FILES[k] for k in order], order, 3, device_id=device_id, threads=threads)
        for made, number in zip(mixed, order, strict=True):
            np.testing.assert_array_equal(made, alone[number])
    engine = make_engine("dali", T.Pipeline(steps), seed=7, device_id=device_id)
    for count in (2, 5, 1, 7):
        for made, wanted in zip(run(engine, FILES[:count], epoch=3)[0], alone[:count], strict=True):
            np.testing.assert_array_equal(made, wanted)
    field = engine.field(FILES[0], "", {})
    assert engine.prepare(Batch([], np.zeros(0, np.int64), 0, {}), field.empty(0)).bad == []
    engine.close()


BAD = {
    "text": b"hello, this is text",
    "damaged": FILES[0][:3000] + bytes(50) + FILES[0][3050:],
    "broken off": FILES[1][: len(FILES[1]) * 2 // 3],
    "too long": encoded(np.zeros(33_000)),
    "too short": encoded(np.full(256, 0.1)),
    "no sound": encoded(np.zeros(0), "WAV"),
    "channels": encoded(np.zeros((9000, 3)), "WAV"),
    "no numbers": encoded(np.full(9000, np.nan), "WAV", "FLOAT"),
}


@every_device
def test_the_same_samples_are_bad_for_the_same_reasons_and_leave_the_others_alone(device_id: int | None) -> None:
    good = STEREO[0]
    files = [item for bad in BAD.values() for item in (good, bad)] + [good]
    steps: list[T.Transform] = [T.DecodeAudio(RATE, channels=2, max_s=2), MELS, DECIBELS, MASKS]
    _, ours = prepared("cpu", steps, files)
    made, theirs = prepared("dali", steps, files, device_id=device_id)
    assert theirs.bad == ours.bad
    assert [bad.row for bad in theirs.bad] == list(range(1, len(files), 2))
    assert theirs.made.lengths.tolist() == ours.made.lengths.tolist() == [57, 0] * len(BAD) + [57]
    np.testing.assert_array_equal(theirs.known["id"], np.arange(0, len(files), 2))
    apart, _ = prepared("dali", steps, files[::2], np.arange(0, len(files), 2), device_id=device_id)
    for one, other in zip(made[::2], apart, strict=True):
        np.testing.assert_array_equal(one, other)
    fixed = [DECODE, T.CropOrPad(9000), MELS]
    made, theirs = prepared("dali", fixed, files, device_id=device_id)
    assert theirs.bad == prepared("cpu", fixed, files)[1].bad
    assert isinstance(theirs.made, np.ndarray)
    assert not np.array([made[bad.row] for bad in theirs.bad]).any()
    with pytest.raises(BadSampleError, match="libsndfile cannot decode it"):
        prepared("dali", steps, [BAD["text"]], device_id=device_id)


@every_device
def test_a_block_of_bad_samples_alone_is_no_work_for_dali(device_id: int | None) -> None:
    engine = make_engine("dali", T.Pipeline(WHOLE), seed=7, device_id=device_id)
    out = engine.field(FILES[0], "", {}).empty(2)
    said = engine.prepare(Batch([b"text", b"more"], np.arange(2), 0, {"id": np.arange(2)}), out)
    assert [bad.row for bad in said.bad] == [0, 1]
    assert isinstance(said.made, Packed)
    assert (said.made.lengths.tolist(), len(said.known["id"])) == ([0, 0], 0)
    engine.close()


@every_device
def test_what_is_infinite_is_what_the_cpu_engine_makes(device_id: int | None) -> None:
    """The square of 1e30 overflows float32."""
    files = [FILES[0], encoded(np.full(12_000, 1e30), "WAV", "FLOAT"), FILES[2]]
    ours, _ = prepared("cpu", WHOLE, files)
    theirs, said = prepared("dali", WHOLE, files, device_id=device_id)
    assert (said.bad, said.made.lengths.tolist()) == ([], [57, 76, 76])
    assert not np.isfinite(ours[1]).all()
    np.testing.assert_array_equal(theirs[1], ours[1])
    np.testing.assert_allclose(theirs[2], ours[2], rtol=0, atol=1e-3)


MEETING = threading.Barrier(2)


def met(sound: Any, rng: np.random.Generator) -> Any:
    """Wait until two threads have a sample each, unless the sample is the short one for `Engine.field`."""
    if len(sound) == 12_000:
        MEETING.wait(20)
    return sound


def test_all_threads_prepare_what_is_infinite() -> None:
    """The Map runs twice for each infinite sample: before DALI makes the spectrogram, and in the cpu engine."""
    pipeline = T.Pipeline([DECODE, T.Map(met), MELS])
    engine = make_engine("dali", pipeline, seed=7, threads=2)
    try:
        infinite = encoded(np.full(12_000, 1e30), "WAV", "FLOAT")
        _, said = run(engine, [FILES[0], infinite, infinite])
    finally:
        engine.close()
    assert said.bad == []


def longer(sound: Any, rng: np.random.Generator) -> Any:
    return np.repeat(sound, 1 if len(sound) == 9000 else 4)


def test_what_is_too_long_is_bad_whether_or_not_it_is_finite() -> None:
    steps = [DECODE, T.Map(longer), MELS]
    files = [FILES[0], encoded(np.full(12_000, 1e30), "WAV", "FLOAT"), FILES[2]]
    (_, ours), (_, theirs) = (prepared(kind, steps, files) for kind in ("cpu", "dali"))
    assert [bad.row for bad in theirs.bad] == [1, 2]
    assert theirs.bad == ours.bad


def louder(given: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    return {"audio": given["audio"] * np.float32(1 + rng.random()), "id": given["id"] + 100}


def backwards(sound: Any, rng: np.random.Generator) -> Any:
    return sound[::-1]


def as_double(sound: Any, rng: np.random.Generator) -> Any:
    return sound.astype(np.float64) if len(sound) == 9000 else sound


@every_device
def test_a_map_before_the_spectrogram_is_called(device_id: int | None) -> None:
    steps: list[T.Transform] = [DECODE, T.Map(louder, fields=["id"]), MELS, DECIBELS]
    ours, _ = prepared("cpu", steps, FILES, epoch=2)
    theirs, said = prepared("dali", steps, FILES, epoch=2, device_id=device_id)
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-3)
    assert said.known["id"].tolist() == list(range(100, 107))
    for one, other in both([DECODE, T.Map(backwards), MELS, DECIBELS], FILES, device_id):
        np.testing.assert_allclose(other, one, rtol=0, atol=1e-3)
    files = [FILES[1], FILES[0], FILES[2]]
    _, said = prepared("dali", [DECODE, T.Map(as_double), MELS], files, device_id=device_id)
    assert said.bad == prepared("cpu", [DECODE, T.Map(as_double), MELS], files)[1].bad
    assert said.bad[0].reason == "it is float64 [9000] before MelSpectrogram, which needs float32 [time]"


@every_device
@pytest.mark.parametrize("limit", [1, 30_000, 10**9])
def test_batches_are_bounded_in_values_and_change_nothing(
    monkeypatch: pytest.MonkeyPatch, device_id: int | None, limit: int
) -> None:
    """9,000 samples of sound give 57 frames of 257 values, 14,649. Two fit into 30,000; two stereo ones do not."""
    expected, _ = prepared("dali", WHOLE, FILES, device_id=device_id)
    batches, once = [], GraphRuns._feed

    def counted(runs: Any, feeds: Any, indices: Any) -> Any:
        batches.append(indices.tolist())
        return once(runs, feeds, indices)

    monkeypatch.setattr(GraphRuns, "_feed", counted)
    engine = DaliSoundEngine(T.Pipeline(WHOLE), seed=7, device_id=device_id, batch_values=limit)
    made, _ = run(engine, [*FILES[:1], *FILES[:2], *FILES[3:]], [0, 0, 1, 3, 4, 5, 6])
    engine.close()
    for one, number in zip(made, [0, 0, 1, 3, 4, 5, 6], strict=True):
        np.testing.assert_array_equal(one, expected[number])
    whole = {1: [[k] for k in range(7)], 30_000: [[0, 1], [2], [3], [4], [5], [6]], 10**9: [list(range(7))]}
    assert batches == whole[limit]
    if limit == 30_000:
        batches.clear()
        stereo = T.Pipeline([T.DecodeAudio(RATE, channels=2, max_s=2), MELS])
        run(DaliSoundEngine(stereo, seed=7, device_id=device_id, batch_values=limit), [STEREO[0], STEREO[0]])
        assert batches == [[0], [1]]


@pytest.mark.parametrize("room", [2, 0])
def test_out_of_memory_halves_batches_and_then_leaves_a_sample_to_the_cpu_engine(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, room: int
) -> None:
    once = GraphRuns._feed

    def cramped(runs: Any, feeds: Any, indices: Any) -> Any:
        if len(indices) > room:
            raise RuntimeError("CUDA runtime API error cudaErrorMemoryAllocation (2): out of memory")
        return once(runs, feeds, indices)

    expected, _ = prepared("dali" if room else "cpu", WHOLE, FILES)
    monkeypatch.setattr(GraphRuns, "_feed", cramped)
    made, said = prepared("dali", WHOLE, FILES)
    assert said.bad == []
    for one, wanted in zip(made, expected, strict=True):
        np.testing.assert_array_equal(one, wanted)
    assert "the CPU is out of memory: batches of 32000000 values from now on" in caplog.text
