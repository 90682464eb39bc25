"""Audio files decode to soundfile's numbers, and some decode that soundfile cannot read."""

from __future__ import annotations

import io
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from numpy.typing import NDArray

from mbaas import transforms as T
from mbaas.prep.header import UndecodableError
from mbaas.prep.sound import SoundDecoder
from mbaas.transforms.arrays import ArrayWindow

RATE, LENGTH = 16_000, 9001
NOISE = np.random.default_rng(5).uniform(-0.5, 0.5, (LENGTH, 2)).astype(np.float32)


def encoded(sound: Any, format: str, subtype: str | None = None, **options: Any) -> bytes:
    stream = io.BytesIO()
    soundfile.write(stream, sound, RATE, format=format, subtype=subtype, **options)
    return stream.getvalue()


def decoded(file: bytes, window: ArrayWindow | None = None, u: float = 0.4, **options: Any) -> NDArray[np.float32]:
    """Audio at the file's own sampling rate, whole or cropped by ``window``."""
    rate = soundfile.SoundFile(io.BytesIO(file)).samplerate
    decode = T.DecodeAudio(rate, **options)
    chance = np.full(1, u)
    sound, is_window = SoundDecoder(decode, 1 << 28, window)(memoryview(file), chance)
    if window is None or is_window:
        return sound
    return window.apply(sound, chance, T.Pipeline([decode, window]).forms[0])


def refusal(file: bytes, **options: Any) -> str:
    with pytest.raises(UndecodableError) as caught:
        SoundDecoder(T.DecodeAudio(RATE, **options), 1 << 28)(memoryview(file), np.zeros(1))
    return str(caught.value)


def written() -> dict[str, bytes]:
    """Mono noise in every format and encoding that soundfile can both write and read."""
    found = {}
    # RAW has no header. SD2 has it in a separate file, which is written to the current folder.
    for container in soundfile.available_formats().keys() - {"RAW", "SD2"}:
        for subtype in soundfile.available_subtypes(container):
            try:
                file = encoded(NOISE[:, 0], container, subtype)
                soundfile.read(io.BytesIO(file))
            except soundfile.LibsndfileError:
                continue
            found[f"{container} {subtype}"] = file
    return found


WRITTEN = written()
FLAC, MP3, WAV = WRITTEN["FLAC PCM_16"], WRITTEN["MP3 MPEG_LAYER_III"], WRITTEN["WAV PCM_16"]
ID3V2, ID3V1 = b"ID3\x03\0\0\0\0\1\0" + bytes(128), b"TAG" + bytes(125)


def patched(file: bytes, at: int, value: bytes) -> bytes:
    return file[:at] + value + file[at + len(value) :]


def with_total(file: bytes, total: int) -> bytes:
    """FLAC with another sample count (36 bits) in its header."""
    return patched(file, 21, bytes([(file[21] & 0xF0) | total >> 32]) + (total & 0xFFFFFFFF).to_bytes(4, "big"))


def sized(nbytes: int) -> bytes:
    """WAV as written to a pipe: its header has a size from before the length was known."""
    size = struct.pack("<I", nbytes)
    return patched(patched(WAV, 4, size), WAV.index(b"data") + 4, size)


ODD = {
    "WAV of size 0xFFFFFFFF": sized(0xFFFFFFFF),
    "WAV of size 0x7FFFFFFF": sized(0x7FFFFFFF),
    "WAV above full scale": encoded(NOISE[:, 0] * 20, "WAV", "FLOAT"),
    "WAV with bytes behind": WAV + b"junk" * 9,
    "AU of unknown size": patched(WRITTEN["AU PCM_16"], 8, b"\xff" * 4),
    "FLAC with ID3 before": ID3V2 + FLAC,
    "FLAC with ID3 before and behind": ID3V2 + FLAC + ID3V1,
    "FLAC that claims less": with_total(FLAC, LENGTH - 1000),
    "MP3 with ID3 before and behind": ID3V2 + MP3 + ID3V1,
    "Ogg streams, one after the other": WRITTEN["OGG VORBIS"] * 2,
}


@pytest.mark.parametrize("name", sorted([*WRITTEN, *ODD]))
def test_all_that_soundfile_reads_has_the_same_numbers_and_so_have_windows(name: str) -> None:
    file = {**WRITTEN, **ODD}[name]
    wanted, _ = soundfile.read(io.BytesIO(file), dtype="float32")
    np.testing.assert_array_equal(decoded(file), wanted)
    for crop in (T.RandomCrop(1000), T.CropOrPad(len(wanted) - 1), T.CropOrPad(len(wanted) + 1)):
        forms = T.Pipeline([T.DecodeAudio(), crop]).forms
        for u in (0.0, 0.4, 0.999):
            np.testing.assert_array_equal(decoded(file, crop, u), crop.apply(wanted, np.full(1, u), forms[0]))


def test_eight_channels_of_24_bits() -> None:
    sound = np.random.default_rng(1).uniform(-1, 1, (500, 8))
    file = encoded(sound, "WAV", "PCM_24")
    np.testing.assert_array_equal(decoded(file, channels=8), soundfile.read(io.BytesIO(file), dtype="float32")[0])


@pytest.mark.parametrize("subtype", ["DWVW_16", "DWVW_24"])
def test_encodings_that_libsndfile_reads_in_order_only(subtype: str) -> None:
    """soundfile fails because it seeks after each read."""
    np.testing.assert_allclose(decoded(encoded(NOISE[:, 0], "AIFF", subtype)), NOISE[:, 0], atol=1e-4)


# ---- missing or wrong lengths in headers ----


@pytest.mark.parametrize("before", [b"", ID3V2], ids=["", "ID3"])
def test_flac_that_was_written_to_a_pipe_is_read_to_its_end(before: bytes) -> None:
    long = encoded(np.resize(NOISE[:, 0], 300_000), "FLAC")
    for file in (FLAC, long):
        wanted, _ = soundfile.read(io.BytesIO(file), dtype="float32")
        unknown = before + with_total(file, 0)
        np.testing.assert_array_equal(decoded(unknown, max_s=20), wanted)
        crop = T.RandomCrop(2000)
        np.testing.assert_array_equal(decoded(unknown, crop), decoded(file, crop))
    assert refusal(before + with_total(long, 0), max_s=10).endswith("over the limit of 10 s (max_s)")
    assert "flac decoder lost sync" in refusal(before + with_total(FLAC, 0)[:-9000])


def test_flac_that_has_less_than_its_header_claims_is_refused_with_both_numbers() -> None:
    assert refusal(with_total(FLAC, LENGTH + 500)) == f"it breaks off after {LENGTH:,} of {LENGTH + 500:,} samples"


def test_flac_that_is_read_only_in_order_has_its_windows_too() -> None:
    """Its header gives a maximum block size that is too small, so libFLAC cannot seek."""
    file = patched(FLAC, 8, struct.pack(">HH", 16, 16))
    with soundfile.SoundFile(io.BytesIO(file)) as opened, pytest.raises(soundfile.LibsndfileError):
        opened.seek(LENGTH - 1)
    crop = T.RandomCrop(1000)
    np.testing.assert_array_equal(decoded(file, crop), decoded(FLAC, crop))


def without_first_frame(file: bytes) -> bytes:
    """MP3 without the frame that contains its length."""
    return file[file.index(file[:2], 4) :]


@pytest.mark.parametrize(
    "around", [(b"", b""), (b"", ID3V1), (ID3V2, b""), (b"ID3\3\0\0\0\1\0\0" + bytes(1 << 14), b"")]
)
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_mp3_that_does_not_tell_its_length_is_read_to_its_end(mode: str, around: tuple[bytes, bytes]) -> None:
    """libsndfile overestimates the length if a tag contains a picture or the sound begins quietly."""
    sound = np.concatenate([np.zeros(40_000, np.float32), NOISE[:, 0]])
    bare = without_first_frame(encoded(sound, "MP3", bitrate_mode=mode, compression_level=0.5))
    file = around[0] + bare + around[1]
    wanted, _ = soundfile.read(io.BytesIO(file), dtype="float32")
    np.testing.assert_array_equal(decoded(file, max_s=4), wanted)


@pytest.mark.parametrize("before", [b"", ID3V2], ids=["", "ID3"])
def test_mp3_that_libsndfile_takes_for_shorter_is_read_to_its_end(
    before: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file begins with noise, whose frames have more bytes than the silent frames after it."""
    quiet = np.concatenate([NOISE[:, 0], np.zeros(100_000, np.float32)])
    whole = encoded(quiet, "MP3", bitrate_mode="VARIABLE", compression_level=0.5)
    bare = before + without_first_frame(whole)
    cut, _ = soundfile.read(io.BytesIO(bare), dtype="float32")
    made = decoded(bare)
    assert len(cut) < len(quiet) / 2 < len(quiet) <= len(made)
    np.testing.assert_array_equal(made[: len(cut)], cut)
    padding = 1105  # samples of encoder and decoder delay, also stored in the missing frame
    np.testing.assert_allclose(made[padding:][: len(quiet)], decoded(whole)[: len(made) - padding], atol=1e-5)
    monkeypatch.setattr("mbaas.prep.sound._LONGER_TAG", 1)
    assert "libsndfile estimates from its first frame" in refusal(bare)


# ---- not sound ----


def test_names_in_the_current_folder_are_no_part_of_a_recording(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """libsndfile searches it for the resource fork of a Sound Designer II file before it tries MPEG."""
    wanted, _ = soundfile.read(io.BytesIO(MP3), dtype="float32")
    (tmp_path / "folder/.AppleDouble").mkdir(parents=True)
    (tmp_path / "file").mkdir()
    monkeypatch.chdir(tmp_path / "file")
    with open("._", "wb") as fork:  # noqa: PTH123 (written where libsndfile would look for it)
        fork.write(bytes(500))
    for name in ("folder", "file"):
        monkeypatch.chdir(tmp_path / name)
        with pytest.raises(soundfile.LibsndfileError):
            soundfile.read(io.BytesIO(MP3))
        sound, _ = SoundDecoder(T.DecodeAudio(RATE), 1 << 28)(memoryview(MP3), np.zeros(1))
        np.testing.assert_array_equal(sound, wanted)
        assert refusal(b"no sound at all" * 99).startswith("libsndfile cannot decode it: ")


@pytest.mark.parametrize("format", ["WAV", "AIFF", "AU", "CAF", "OGG", "W64", "RF64", "XI"])
@pytest.mark.parametrize("rate", [RATE, 8000])
def test_a_recording_without_sound_is_refused_in_words(format: str, rate: int) -> None:
    file = encoded(NOISE[:0, 0], format)
    with pytest.raises(UndecodableError, match=r"^it has no sound \(0 samples\)$"):
        SoundDecoder(T.DecodeAudio(rate), 1 << 28)(memoryview(file), np.zeros(1))


def test_flac_without_frames_has_no_sound() -> None:
    header = patched(FLAC[:42], 4, b"\x80")  # STREAMINFO marked as the last metadata block
    assert refusal(with_total(header, 0)) == "it has no sound (0 samples)"
