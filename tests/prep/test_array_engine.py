"""The engine of sound and arrays reads files of many writers and refuses invalid ones."""

from __future__ import annotations

import io
import re
import sys
import threading
import wave as wave_file
import zipfile
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import soundfile
import soxr
from scipy.io import wavfile

import mbaas
from mbaas import transforms as T
from mbaas.dataset import synthetic
from mbaas.errors import BadSampleError, ConfigError
from mbaas.prep.engines import Batch, Prepared, make_engine
from mbaas.samples.fields import Field, Packed
from mbaas.samples.order import generator, uniforms

RATE = 16_000


def prepared(steps: list[T.Transform], files: list[bytes], *, epoch: int = 0, ids: Any = None, **options: Any) -> Any:
    """Values, result and field; the first file must be good."""
    engine = make_engine("cpu", T.Pipeline(steps), seed=7, **options)
    try:
        field = engine.field(files[0], "first", {})
        out = np.full_like(field.empty(len(files)), 77)
        numbers = np.arange(len(files)) if ids is None else np.array(ids)
        said = engine.prepare(Batch(files, numbers, epoch, {"id": numbers}), out)
    finally:
        engine.close()
    assert isinstance(said, Prepared)
    return said.made, said, field


def one(steps: list[T.Transform], file: bytes, **options: Any) -> Any:
    made, said, _ = prepared(steps, [file], **options)
    assert said.bad == []
    return made.own()[0] if isinstance(made, Packed) else made[0]


def refusal(steps: list[T.Transform], file: bytes, **options: Any) -> str:
    engine = make_engine("cpu", T.Pipeline(steps), seed=7, **options)
    with pytest.raises(BadSampleError) as caught:
        engine.field(file, "the file", {})
    assert caught.value.uri == "the file"
    return caught.value.reason


# ---- arrays ----


def npy(array: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array, **options)
    return stream.getvalue()


def npz(save: Callable[..., None] = np.savez, **arrays: Any) -> bytes:
    stream = io.BytesIO()
    save(stream, **arrays)
    return stream.getvalue()


VOLUME = np.arange(2 * 3 * 4 * 5, dtype=np.int16).reshape(2, 3, 4, 5)


@pytest.mark.parametrize(
    "array",
    [
        VOLUME,
        np.asfortranarray(VOLUME),
        VOLUME.astype(">i2"),
        VOLUME[0, 0, 0] % 2 == 0,
        VOLUME.astype(np.float16),
        VOLUME.astype(np.complex64) * 1j,
        np.array(3.5),
        np.zeros((3, 0, 2), np.uint16),
    ],
)
def test_npy_files_are_read_as_numpy_reads_them(array: Any) -> None:
    made = one([T.DecodeArray()], npy(array))
    np.testing.assert_array_equal(made, np.load(io.BytesIO(npy(array))))
    assert made.dtype == array.dtype.newbyteorder("=")


def test_npz_and_raw_files_are_read() -> None:
    both = {"volume": VOLUME, "target": np.ones(4)}
    for save in (np.savez, np.savez_compressed):
        made = one([T.DecodeArray("npz", "volume")], npz(save, **both))
        np.testing.assert_array_equal(made, VOLUME)
    np.testing.assert_array_equal(one([T.DecodeArray("npz")], npz(volume=VOLUME)), VOLUME)
    raw = T.DecodeArray("raw", dtype=">i2", shape=VOLUME.shape)
    np.testing.assert_array_equal(one([raw], VOLUME.astype(">i2").tobytes()), VOLUME)
    rows = T.DecodeArray("raw", dtype="int16", shape=(None, 5), longest=30)
    np.testing.assert_array_equal(one([rows], VOLUME.tobytes()), VOLUME.reshape(24, 5))


@pytest.mark.parametrize("behind", [b"x", bytes(64), npy(np.ones(3)), npy(np.array(["text"]))])
def test_of_several_arrays_in_an_npy_file_the_first_is_read_as_by_numpy(behind: bytes) -> None:
    for array in (VOLUME, VOLUME[:0]):
        file = npy(array) + behind
        np.testing.assert_array_equal(one([T.DecodeArray()], file), np.load(io.BytesIO(file)))


def test_members_of_an_npz_file_are_named_as_by_numpy() -> None:
    """By the full name or without .npy; the full name takes precedence."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_LZMA) as archive:
        for number, name in enumerate(("a", "a.npy", "deep/b.npy", "folder/", "__MACOSX/._a.npy")):
            archive.writestr(name, b"" if name.endswith("/") or "MAC" in name else npy(VOLUME + number))
    file = stream.getvalue()
    with np.load(io.BytesIO(file)) as read:
        for key in ("a", "a.npy", "deep/b", "deep/b.npy"):
            np.testing.assert_array_equal(one([T.DecodeArray("npz", key)], file), read[key])
    assert "name one with DecodeArray's key" in refusal([T.DecodeArray("npz")], file)


def test_numpy_s_later_headers_are_read() -> None:
    """Version 2 has a longer header, version 3 a header in UTF-8."""
    stream = io.BytesIO()
    np.lib.format.write_array(stream, VOLUME, version=(2, 0))
    np.testing.assert_array_equal(one([T.DecodeArray()], stream.getvalue()), VOLUME)


def claiming(shape: str, descr: str = "<f4", data: bytes = b"") -> bytes:
    header = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}".ljust(118).encode() + b"\n"
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data


def damaged_zip() -> bytes:
    good = bytearray(npz(np.savez_compressed, a=np.zeros(100)))
    good[60:70] = b"\xff" * 10
    return bytes(good)


def misplaced_zip() -> bytes:
    """Archive whose index starts 110 bytes too late, so that its first member starts before the file."""
    good = bytearray(npz(a=np.zeros(100)))
    good[-6:-2] = (int.from_bytes(good[-6:-2], "little") + 110).to_bytes(4, "little")
    return bytes(good)


def zip_bomb() -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a.npy", npy(np.zeros(1 << 20)))
    return stream.getvalue()


@pytest.mark.parametrize(
    ("decode", "file", "says"),
    [
        (T.DecodeArray(), b"", "it is not an npy file: it starts with b''"),
        (T.DecodeArray(), b"RIFF1234", "it is not an npy file: it starts with b'RIFF1234'"),
        (T.DecodeArray(), npy(VOLUME)[:-1], "has 239 bytes of numbers, and int16 [2, 3, 4, 5] takes 240"),
        (T.DecodeArray(), npy(VOLUME)[:20], "its npy header cannot be read: "),
        (T.DecodeArray(), claiming("(1 << 40,)"), "its npy header cannot be read: "),
        (
            T.DecodeArray(),
            claiming("(1000000000000,)"),
            "has 0 bytes of numbers, and float32 [1000000000000] takes 4,0",
        ),
        (T.DecodeArray(), claiming("(-1, -4)", data=bytes(16)), "its npy header has a shape that cannot be: [-1, -4]"),
        (T.DecodeArray(), npy(np.array(["a"])), "it holds <U1, and an array must be of numbers"),
        (T.DecodeArray(), claiming("(1,)", "|O", bytes(8)), "it holds object, and an array must be of numbers"),
        (T.DecodeArray(), npy(np.zeros(3, "f4,i2")), "and an array must be of numbers"),
        (T.DecodeArray(), npy(np.zeros(300)), "it is 2.4 kB, over the limit of 1 kB"),
        (T.DecodeArray(dtype="float32"), npy(VOLUME), "its numbers are int16, and must be float32"),
        (T.DecodeArray(shape=(2, 3, 4, 6)), npy(VOLUME), "has the shape [2, 3, 4, 5], and must have [2, 3, 4, 6]"),
        (T.DecodeArray(shape=(2, 3, 4)), npy(VOLUME), "has the shape [2, 3, 4, 5], and must have [2, 3, 4]"),
        (
            T.DecodeArray(shape=(None, 3), longest=4),
            npy(np.zeros((5, 3))),
            "its first length is 5, over the limit of 4 (longest)",
        ),
        (
            T.DecodeArray(shape=(None, None, 3), longest=19),
            npy(np.zeros((5, 4, 3))),
            "it has the shape [5, 4, 3], of whose first 2 lengths the product is 20, over the limit of 19 (longest)",
        ),
        (T.DecodeArray("npz"), npy(VOLUME), "it is not an npz file: it starts with b'\\x93NUMPY\\x01\\x00'"),
        (T.DecodeArray("npz"), npz(a=VOLUME, b=VOLUME), "it has the arrays 'a', 'b'; name one with DecodeArray's key"),
        (T.DecodeArray("npz", "c"), npz(a=VOLUME, b=VOLUME), "it has no array 'c'; it has 'a', 'b'"),
        (T.DecodeArray("npz"), npz(a=VOLUME)[:-30], "its zip archive is damaged: "),
        (T.DecodeArray("npz"), damaged_zip(), "its zip archive is damaged: "),
        (T.DecodeArray("npz"), misplaced_zip(), "its zip archive is damaged: "),
        (T.DecodeArray("npz"), zip_bomb(), "'a.npy' in it is 8.39 MB, over the limit of 1 kB"),
        (T.DecodeArray("raw", dtype="int16", shape=(5,)), bytes(9), "has 9 bytes of numbers, and int16 [5] takes 10"),
        (
            T.DecodeArray("raw", dtype="int16", shape=(None, 5), longest=9),
            bytes(21),
            "has 21 bytes of numbers, and int16 [2, 5] takes 20",
        ),
    ],
)
def test_files_that_are_no_such_arrays_are_refused(decode: T.DecodeArray, file: bytes, says: str) -> None:
    assert says in refusal([decode], file, max_bytes=1000)


# ---- sound ----


def wave(seconds: float, *, rate: int = RATE, channels: int = 1) -> Any:
    """float32 [time] or [time, channels]: a tone of a different frequency in each channel."""
    time = np.arange(round(seconds * rate)) / rate
    tones = [0.4 * np.sin(2 * np.pi * 220 * (channel + 1) * time) for channel in range(channels)]
    return np.stack(tones, axis=1).astype(np.float32)[:, slice(None) if channels > 1 else 0]


def encoded(sound: Any, format: str, subtype: str | None = None, rate: int = RATE) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, sound, rate, format=format, subtype=subtype)
    return stream.getvalue()


WRITTEN = [
    *[
        ("WAV", subtype)
        for subtype in ("PCM_16", "PCM_24", "PCM_32", "PCM_U8", "FLOAT", "DOUBLE", "ULAW", "ALAW", "IMA_ADPCM")
    ],
    *[
        ("WAVEX", "PCM_16"),
        ("RF64", "PCM_24"),
        ("W64", "PCM_16"),
        ("AIFF", "PCM_16"),
        ("AU", "PCM_16"),
        ("CAF", "ALAC_16"),
    ],
    *[("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS"), ("MP3", "MPEG_LAYER_III")],
]


@pytest.mark.parametrize(("format", "subtype"), WRITTEN)
def test_what_libsndfile_writes_is_decoded_to_the_same_numbers(format: str, subtype: str) -> None:
    file = encoded(wave(0.6), format, subtype)
    wanted, rate = soundfile.read(io.BytesIO(file), dtype="float32")
    assert rate == RATE
    made = one([T.DecodeAudio(max_s=2)], file)
    np.testing.assert_array_equal(made, wanted)
    assert made.dtype == np.float32
    np.testing.assert_allclose(made[1000:9000], wave(0.6)[1000:9000], atol=0.06)  # the written signal


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.float32, np.float64])
def test_wav_files_of_other_writers_are_read_as_these_read_them(dtype: Any) -> None:
    """Every dtype that SciPy writes, compared with SciPy's reader; integers are scaled to fractions of full scale."""
    numbers = np.random.default_rng(2).integers(0, 200, (500, 2)).astype(dtype)
    if np.dtype(dtype).kind == "f":
        numbers = numbers / dtype(300)
    stream = io.BytesIO()
    wavfile.write(stream, RATE, numbers)
    rate, read = wavfile.read(io.BytesIO(stream.getvalue()))
    np.testing.assert_array_equal(read, numbers)
    scale = {np.uint8: 128, np.int16: 1 << 15, np.int32: 1 << 31}.get(dtype, 1)
    wanted = (read.astype(np.float64) - (128 if dtype == np.uint8 else 0)) / scale
    made = one([T.DecodeAudio(rate, channels=2, max_s=1)], stream.getvalue())
    np.testing.assert_array_equal(made, wanted.astype(np.float32))


def test_a_wav_file_of_the_standard_library_is_read_whatever_chunks_it_has() -> None:
    stream, numbers = io.BytesIO(), np.arange(-300, 300, dtype=np.int16)
    with wave_file.open(stream, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(numbers.tobytes())
    plain = stream.getvalue()
    noted = plain[:36] + b"LIST\x04\x00\x00\x00INFO" + plain[36:]
    noted = noted[:4] + (len(noted) - 8).to_bytes(4, "little") + noted[8:]
    for content in (plain, noted):
        np.testing.assert_array_equal(one([T.DecodeAudio(max_s=1)], content) * (1 << 15), numbers)


@pytest.mark.parametrize(("rate", "to"), [(44_100, 16_000), (8000, 16_000), (11_025, 8000)])
def test_other_rates_are_resampled_as_soxr_does(rate: int, to: int) -> None:
    sound = wave(0.5, rate=rate)
    made = one([T.DecodeAudio(rate=to, max_s=2)], encoded(sound, "WAV", "FLOAT", rate))
    np.testing.assert_array_equal(made, soxr.resample(sound, rate, to, quality="HQ"))
    assert abs(len(made) - 0.5 * to) <= 1
    np.testing.assert_allclose(made[500:-500], wave(0.5, rate=to)[500 : len(made) - 500], atol=1e-3)


def test_channels_are_mixed_kept_or_repeated() -> None:
    stereo, mono = wave(0.1, channels=2), wave(0.1)
    file, alone = encoded(stereo, "WAV", "FLOAT"), encoded(mono, "FLAC")
    np.testing.assert_array_equal(one([T.DecodeAudio(max_s=1)], file), (stereo[:, 0] + stereo[:, 1]) / 2)
    np.testing.assert_array_equal(one([T.DecodeAudio(channels=2, max_s=1)], file), stereo)
    twice = one([T.DecodeAudio(channels=2, max_s=1)], alone)
    np.testing.assert_array_equal(twice, np.stack([soundfile.read(io.BytesIO(alone))[0]] * 2, axis=1))
    said = refusal([T.DecodeAudio(channels=3, max_s=1)], file)
    assert said == "it has 2 channels, and DecodeAudio makes 3 of as many, or of one"


@pytest.fixture
def numbers_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Samples per channel returned by each read of a file."""
    counts, read = [], soundfile.SoundFile.read

    def counted(file: Any, *given: Any, **options: Any) -> Any:
        found = read(file, *given, **options)
        counts.append(len(found))
        return found

    monkeypatch.setattr(soundfile.SoundFile, "read", counted)
    return counts


SEEKABLE = [each for each in WRITTEN if each[1] not in ("IMA_ADPCM", "ALAC_16", "VORBIS", "OPUS", "MPEG_LAYER_III")]
NOISES = np.random.default_rng(4).uniform(-0.5, 0.5, (14_503, 3)).astype(np.float32)


@pytest.mark.parametrize(("format", "subtype"), WRITTEN)
def test_a_window_of_a_recording_is_that_of_all_of_it(format: str, subtype: str, numbers_read: list[int]) -> None:
    """In noise, no two stretches are equal. Seekable formats read only the window; FLAC also reads its last sample."""
    can = (format, subtype) in SEEKABLE
    file = encoded(NOISES if can else NOISES[:, :2], format, subtype)
    whole = one([T.DecodeAudio(max_s=1)], file)
    longer = T.RandomCrop(20_001), T.CropOrPad(len(whole) + 1)  # the second begins at 0
    for crop in (T.RandomCrop(4001), T.CropOrPad(4001), T.RandomCrop(len(whole)), *longer):
        steps: list[T.Transform] = [T.DecodeAudio(), crop]
        numbers_read.clear()
        made, said, _ = prepared(steps, [file] * 9, epoch=1, threads=2)
        assert said.bad == []
        chance = uniforms(7, 1, np.arange(9), substream=1, draws=crop.draws)
        wanted = [crop.apply(whole, u, T.Pipeline(steps).forms[0]) for u in chance]
        np.testing.assert_array_equal(made, wanted)
        only = {4001, 1} if format == "FLAC" else {4001}
        assert set(numbers_read) == (only if can and crop.sizes[0] < len(whole) else {len(whole)})


def test_of_sound_of_another_rate_all_is_read(numbers_read: list[int]) -> None:
    """The last bits of soxr's result depend on where its input starts."""
    file = encoded(NOISES, "WAV", "FLOAT", 44_100)
    made = one([T.DecodeAudio(), T.CropOrPad(1000)], file)
    whole = soxr.resample(NOISES.mean(axis=1), 44_100, 16_000, quality="HQ")
    first = (len(whole) - 1000) // 2
    np.testing.assert_array_equal(made, whole[first : first + 1000])
    assert set(numbers_read) == {len(NOISES)}
    # Alternative: resample only the window, with a margin of 2,205 samples (800 after resampling) on each side.
    begin = (first - 800) // 160 * 441
    apart = soxr.resample(NOISES[begin : begin + 9000].mean(axis=1), 44_100, 16_000, quality="HQ")
    at = first - begin * 160 // 441
    assert 0 < np.abs(apart[at : at + 1000] - made).max() < 1e-5


def test_a_flac_that_breaks_off_or_is_damaged_there_is_bad_whichever_window_is_taken() -> None:
    """Besides the window, only the end of the file is checked; damage in between is not detected."""
    file = encoded(NOISES, "FLAC")
    cut = file[: len(file) * 9 // 10]
    _, said, _ = prepared([T.DecodeAudio(), T.RandomCrop(100)], [file, *[cut] * 20])
    assert {bad.reason for bad in said.bad} == {
        "it is damaged or breaks off: libsndfile does not find sample 14,502 of 14,503"
    }
    assert [bad.row for bad in said.bad] == [*range(1, 21)]
    middle = len(file) // 2
    torn = file[:middle] + bytes(30) + file[middle + 30 :]
    assert refusal([T.DecodeAudio(max_s=1)], torn).startswith("libsndfile cannot decode it: ")
    assert refusal([T.DecodeAudio(), T.CropOrPad(4000)], torn)
    begins = [T.DecodeAudio(), T.RandomCrop(100)]
    made, said, _ = prepared(begins, [file, *[torn] * 20])
    whole, _, _ = prepared(begins, [file] * 21)
    rows = np.setdiff1d(np.arange(21), [bad.row for bad in said.bad])
    assert 2 < len(rows) < 21
    np.testing.assert_array_equal(made[rows], whole[rows])


NOISE = np.random.default_rng(0).standard_normal(16_000) / 10


def huge_flac() -> bytes:
    """FLAC header that claims 68 billion samples."""
    file = bytearray(encoded(wave(0.1), "FLAC"))
    file[21] |= 0x0F
    file[22:26] = b"\xff" * 4
    return bytes(file)


@pytest.mark.parametrize(
    ("file", "says"),
    [
        (b"", "libsndfile cannot decode it: .*; the file is empty"),
        (b"hello, this is text\n" * 20, "libsndfile cannot decode it: .*; it starts with b'hello, this '"),
        (encoded(NOISE, "FLAC")[:9000], "libsndfile cannot decode it: flac decoder lost sync$"),
        (encoded(NOISE, "MP3")[:2000], r"it breaks off after [\d,]+ of 16,000 samples"),
        (encoded(wave(1), "WAV")[:30], "libsndfile cannot decode it"),
        (encoded(wave(2.5), "WAV"), r"it is 2.5 s long, over the limit of 2 s \(max_s\)"),
        (huge_flac(), "s long, over the limit of 2 s"),
        (encoded(wave(0), "WAV"), r"it has no sound \(0 samples\)"),
        (encoded(np.where(np.arange(99) == 50, np.nan, 0.1), "WAV", "FLOAT"), "it has numbers that are not finite"),
    ],
)
def test_files_that_are_no_such_sound_are_refused(file: bytes, says: str) -> None:
    assert re.search(says, refusal([T.DecodeAudio(max_s=2)], file))


def test_sound_that_claims_too_much_is_refused_before_memory_is_taken() -> None:
    steps = [T.DecodeAudio(), T.CropOrPad(100)]
    assert "275 GB once it is decoded, over the limit of 1.07 GB" in refusal(steps, huge_flac())
    slow = encoded(wave(0.01), "WAV", rate=1)  # 160 samples of 1 s, 16,000 each after resampling
    assert "160 s of 1 Hz in 1 channels, 10.2 MB once it is decoded, over" in refusal(steps, slow, max_bytes=1 << 20)


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "soxr", None)
    pipeline = T.Pipeline([T.DecodeAudio(max_s=1)])
    says = r"^DecodeAudio needs soundfile and soxr on every node: pip install soundfile soxr \(.*soxr"
    with pytest.raises(ConfigError, match=says):
        make_engine("cpu", pipeline, seed=0)
    with pytest.raises(ConfigError, match=says):  # raised before anything is started
        mbaas.serve("no sound", synthetic(3), pipeline, batch_size=1)


# ---- transforms, randomness and threads ----


CLIPS = [encoded(wave(0.1 + 0.05 * number), "FLAC") for number in range(7)]
DECODE = T.DecodeAudio(max_s=1)


@pytest.mark.parametrize("threads", [1, 3])
def test_what_a_sample_becomes_depends_on_seed_epoch_and_id_alone(threads: int) -> None:
    steps = [DECODE, T.RandomCrop(2000), T.MelSpectrogram(n_mels=20), T.SpecAugment(1, 9, 1, 9)]
    whole, _, field = prepared(steps, CLIPS, epoch=3, threads=threads)
    assert field == Field("audio", (11, 20), "float32")
    for number in (4, 0):
        alone, _, _ = prepared(steps, [CLIPS[number]], epoch=3, ids=[number])
        np.testing.assert_array_equal(alone[0], whole[number])
    other, _, _ = prepared(steps, CLIPS, epoch=4, threads=threads)
    assert all((other[number] != whole[number]).any() for number in range(7))
    u = uniforms(7, 3, np.array([5]), substream=1, draws=1)[0]
    sound = soundfile.read(io.BytesIO(CLIPS[5]), dtype="float32")[0]
    cropped, _, _ = prepared(steps[:2], CLIPS, epoch=3, threads=threads)
    np.testing.assert_array_equal(cropped[5], T.RandomCrop(2000).apply(sound, u, T.Pipeline(steps).forms[0]))


def test_numbers_that_are_too_large_for_their_squares_are_no_warning() -> None:
    """Warnings are errors in these tests."""
    loud = encoded(np.full(900, 1e30), "WAV", "DOUBLE")
    made = one([DECODE, T.MelSpectrogram(n_mels=8), T.SpecAugment(1, 3, 1, 3)], loud)
    assert not np.isfinite(made).all()


def louder(sound: Any, rng: np.random.Generator) -> Any:
    sound *= np.float32(1 + rng.random())
    return sound


def test_a_map_has_its_own_generator_and_may_change_what_it_gets() -> None:
    file, before = npy(VOLUME.astype(np.float32)), npy(VOLUME.astype(np.float32))
    made, _, _ = prepared([T.DecodeArray(), T.Map(louder)], [file] * 3, epoch=2)
    assert file == before
    for number in range(3):
        factor = np.float32(1 + generator(7, 2, number, substream=1).random())
        np.testing.assert_array_equal(made[number], VOLUME.astype(np.float32) * factor)


def test_samples_that_differ_in_length_are_as_long_as_they_are() -> None:
    steps = [DECODE, T.MelSpectrogram(n_mels=20)]
    made, _, field = prepared(steps, CLIPS, threads=2)
    assert field == Field("audio", (None, 20), "float32", longest=81)
    assert made.lengths.tolist() == [1 + (1600 + 800 * number) // 200 for number in range(7)]
    values, bounds = made.own()
    for number, clip in enumerate(CLIPS):
        np.testing.assert_array_equal(values[bounds[number] : bounds[number + 1]], one(steps, clip))


def emptied(sound: Any, rng: np.random.Generator) -> Any:
    return np.zeros((20_000,) if len(sound) > 4000 else (), np.float32)


def turned(volume: Any, rng: np.random.Generator) -> Any:
    return volume.swapaxes(0, 1) if rng.random() < 0.5 else volume


def test_volumes_that_differ_in_several_lengths_are_as_large_as_they_are() -> None:
    shapes = [(2, 3, 4, 2), (1, 5, 1, 2), (3, 0, 2, 2), (4, 2, 3, 2), (2, 2, 7, 2)]
    volumes = [np.arange(int(np.prod(shape)), dtype=np.int16).reshape(shape) for shape in shapes]
    decode = T.DecodeArray(shape=(None, None, None, 2), longest=24)
    made, said, field = prepared([decode, T.Map(turned)], [npy(volume) for volume in volumes], threads=2)
    assert field == Field("array", (None, None, None, 2), "int16", longest=24)
    assert [bad.row for bad in said.bad] == [4]
    kept = 0
    for row, volume in enumerate(volumes[:4]):
        found = made.value(row)
        kept += found.shape == volume.shape
        np.testing.assert_array_equal(found, volume if found.shape == volume.shape else volume.swapaxes(0, 1))
    assert 0 < kept < 4
    assert made.value(4).size == 0
    cropped, _, _ = prepared([decode, T.CropOrPad((2, 2, 2))], [npy(volumes[0]), npy(volumes[1])])
    assert cropped.shape == (2, 2, 2, 2, 2)


def flattened(volume: Any, rng: np.random.Generator) -> Any:
    return volume.ravel() if volume.size > 12 else volume


def test_what_differs_in_several_lengths_must_have_as_many() -> None:
    decode = T.DecodeArray(shape=(None, None), longest=99)
    _, said, _ = prepared([decode, T.Map(flattened)], [npy(np.zeros((3, 4))), npy(np.zeros((4, 4)))])
    assert [bad.reason for bad in said.bad] == [
        "it is prepared to float64 [16], but the samples of this feed are float64 [any, any]; "
        "a RandomCrop or a CropOrPad in the pipeline gives all the same lengths"
    ]
    with pytest.raises(ConfigError, match=r"may differ in their first 2 lengths, but the first one is float64 \[16\]$"):
        prepared([decode, T.Map(flattened)], [npy(np.zeros((4, 4)))])


@pytest.mark.parametrize("threads", [1, 2])
def test_bad_samples_are_reported_and_leave_the_others_alone(threads: int) -> None:
    files = [*CLIPS[:2], b"text", CLIPS[2], encoded(wave(1.5), "WAV")]
    made, said, _ = prepared([DECODE], files, threads=threads)
    assert [(bad.row, bad.reason[:20]) for bad in said.bad] == [
        (2, "libsndfile cannot de"),
        (4, "it is 1.5 s long, ov"),
    ]
    assert said.known["id"].tolist() == [0, 1, 3]
    assert made.lengths.tolist() == [1600, 2400, 0, 3200, 0]
    fixed, said, _ = prepared([DECODE, T.CropOrPad(100)], files, threads=threads)
    assert [bad.row for bad in said.bad] == [2, 4]
    assert said.made is fixed
    assert not fixed[[2, 4]].any()
    assert fixed[[0, 1, 3]].any(axis=1).all()


SECOND_IS_DONE = threading.Event()


def second_first(sound: Any, rng: np.random.Generator) -> Any:
    """Fail for both samples, later for the first than for the second."""
    if len(sound) == 1600:
        assert SECOND_IS_DONE.wait(10)
    else:
        SECOND_IS_DONE.set()
    return "no array"


def test_bad_samples_are_in_order_whichever_was_done_first() -> None:
    good = one([DECODE], CLIPS[2])
    engine = make_engine("cpu", T.Pipeline([DECODE, T.Map(second_first)]), seed=7, threads=2)
    said = engine.prepare(Batch(CLIPS[:2], np.arange(2), 0, {}), np.empty((2, len(good)), np.float32))
    engine.close()
    assert [bad.row for bad in said.bad] == [0, 1]


def test_what_differs_from_the_first_sample_is_bad() -> None:
    files = [npy(np.zeros((3, 2))), npy(np.zeros((4, 2))), npy(np.zeros((3, 2), np.float32))]
    _, said, _ = prepared([T.DecodeArray()], files)
    assert [bad.row for bad in said.bad] == [1, 2]
    assert said.bad[0].reason == (
        "it is prepared to float64 [4, 2], but the samples of this feed are float64 [3, 2]; "
        "a RandomCrop or a CropOrPad in the pipeline gives all the same lengths"
    )
    short, long = encoded(wave(0.2), "WAV"), encoded(wave(0.5), "WAV")
    _, said, _ = prepared([DECODE, T.Map(grown)], [short, long])
    assert [bad.reason for bad in said.bad] == [
        "it is prepared to 24000, which is 24,000 values, over the limit of 16,000"
    ]


def grown(sound: Any, rng: np.random.Generator) -> Any:
    return np.repeat(sound, 3)


def texts(sound: Any, rng: np.random.Generator) -> Any:
    return np.array(["no number"])


def number(sound: Any, rng: np.random.Generator) -> Any:
    return sound.mean()[...]


def test_what_is_no_number_cannot_be_served() -> None:
    with pytest.raises(ConfigError, match=r"samples are arrays of str\d+, and must be numbers that torch has"):
        prepared([DECODE, T.Map(texts)], CLIPS)
    with pytest.raises(
        ConfigError, match=r"may differ in their first length, but the first one is a number without any"
    ):
        prepared([DECODE, T.Map(number)], CLIPS)
    made, _, field = prepared([T.DecodeArray(), T.Map(number)], [npy(VOLUME)])
    assert (made.tolist(), field.shape) == ([VOLUME.mean()], ())
