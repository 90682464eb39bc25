"""Decodes audio: libsndfile reads, soxr resamples. Damaged or too long files are rejected.

If the pipeline starts with a window, only the window is read where this gives the same values as reading the whole
file: for uncompressed audio and FLAC without resampling. The last bits of soxr's output depend on its start, and MP3,
Vorbis, Opus and ADPCM depend on earlier data.
"""

from __future__ import annotations

import functools
import io
import math
import os
from contextlib import suppress
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.base.units import exact, size
from mbaas.errors import ConfigError
from mbaas.prep.header import UndecodableError
from mbaas.transforms import DecodeAudio
from mbaas.transforms.arrays import ArrayWindow

_QUALITY = "HQ"
"""Quality of soxr: 20 bits, the default of soxr and of librosa."""


def sound_libraries() -> tuple[Any, Any]:
    """Import and return soundfile and soxr; raise ConfigError if they are not installed."""
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile is installed, libsndfile is not
        raise ConfigError(
            f"DecodeAudio needs soundfile and soxr on every node: pip install soundfile soxr ({error})"
        ) from error
    return soundfile, soxr


_CONTAINERS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF")
_INDEPENDENT = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
"""Encodings (libsndfile names) whose values are independent of each other, in the containers above."""


_UNKNOWN = (1 << 63) - 1  # length reported by libsndfile for a FLAC file that was written to a pipe
_BLOCK = 1 << 18  # samples per read if the file's length is unknown

_LONGER_TAG = 8  # tag bytes per file byte, to raise the estimate; MPEG frame sizes differ by a factor of 40 at most
_MOST_TAG_BYTES = (1 << 28) - 1


class _LowEstimateError(UndecodableError):
    """libsndfile underestimated the length of an MP3."""


class _SoundFile(io.BytesIO):
    # A file for libsndfile. MPEG audio without an ID3 tag gets a short, empty one (or one of `tag_bytes`).
    # Otherwise libsndfile first looks for a resource fork in the current folder. If there is a file `._` or a folder
    # `.AppleDouble`, it takes the audio for Sound Designer II.
    def __init__(self, encoded: memoryview, tag_bytes: int = 0) -> None:
        encoded = encoded.cast("B")
        if not tag_bytes and len(encoded) > 1 and encoded[0] == 0xFF and encoded[1] & 0xE0 == 0xE0:
            tag_bytes = 10
        if tag_bytes:
            size = bytes(tag_bytes >> bits & 0x7F for bits in (21, 14, 7, 0))
            encoded = memoryview(b"".join((b"ID3\x04\0\0", size, bytes(tag_bytes), encoded)))
        super().__init__(encoded)
        self._nbytes = len(encoded)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        # A damaged file may cause a seek before its beginning. That is ignored: an exception would only be printed, as
        # it cannot pass through libsndfile.
        to = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._nbytes}[whence]
        return super().seek(to) if to >= 0 else self.tell()


class SoundDecoder:
    """Decodes audio files to float32 [time] or [time, channels]. Thread-safe.

    Args:
        max_bytes: maximum decoded size, checked against the header.
        window: window of the time axis that the pipeline cuts next, if any; read alone where that is exact.

    Raises:
        ConfigError: soundfile or soxr is not installed.
    """

    def __init__(self, decode: DecodeAudio, max_bytes: int, window: ArrayWindow | None = None) -> None:
        self._soundfile, self._soxr = sound_libraries()
        self._to, self._max_bytes, self._window = decode, max_bytes, window

    def __call__(self, encoded: memoryview, u: NDArray[np.float64]) -> tuple[NDArray[np.float32], bool]:
        """Decode one file, or its window; return the audio, and True if it is the window alone.

        Args:
            u: float64[draws], the window's random numbers.

        Raises:
            UndecodableError: the file is damaged, too long, or has an unsuitable number of channels.
        """
        try:
            return self._decode(encoded, self._window, u)
        except _LowEstimateError:  # the estimate is proportional to the file size, tags included
            return self._decode(encoded, None, u, tag_bytes=min(_LONGER_TAG * len(encoded), _MOST_TAG_BYTES))
        except UndecodableError:
            if self._window is None:
                raise
            with suppress(UndecodableError):  # FLAC with a wrong header may allow sequential reading, but not seeking
                return self._decode(encoded, None, u)
            raise

    def _decode(
        self, encoded: memoryview, window: ArrayWindow | None, u: NDArray[np.float64], tag_bytes: int = 0
    ) -> tuple[NDArray[np.float32], bool]:
        begins = f"; it starts with {bytes(encoded[:12])!r}" if len(encoded) else "; the file is empty (0 bytes)"
        try:
            with self._soundfile.SoundFile(_SoundFile(encoded, tag_bytes)) as file:
                begins = ""  # the first bytes of a valid audio file explain nothing
                rate = int(file.samplerate)
                sound, is_window = self._read(file, _has_length(file, encoded), window, u)
        except self._soundfile.LibsndfileError as error:
            said = error.error_string.removeprefix("Error : ").rstrip(".")
            raise UndecodableError(f"libsndfile cannot decode it: {said}{begins}") from error
        if not np.isfinite(sound).all():
            raise UndecodableError("it has numbers that are not finite")
        sound = self._mixed(sound)
        if rate != self._to.rate:
            sound = cast("NDArray[np.float32]", self._soxr.resample(sound, rate, self._to.rate, quality=_QUALITY))
        if not len(sound):
            raise UndecodableError("it has no sound (0 samples)")
        return sound, is_window

    def _read(
        self, file: Any, has_length: bool, window: ArrayWindow | None, u: NDArray[np.float64]
    ) -> tuple[NDArray[np.float32], bool]:
        """Read the window or the whole file: float32 [time, channels], and True if it is the window alone."""
        can_seek = file.seekable()
        # soundfile would seek after each read, which fails in files that can only be read sequentially or are
        # truncated.
        file.seekable = lambda: False
        if not has_length:
            return self._read_to_the_end(file), False
        self._check(file, file.frames)
        start, end = self._stretch(file, window, u)
        return _read(file, start, end, can_seek), (start, end) != (0, file.frames)

    def _read_to_the_end(self, file: Any) -> NDArray[np.float32]:
        if file.frames != _UNKNOWN:
            _go_to(file, 0)  # see `_read`
        blocks: list[NDArray[np.float32]] = []
        length = 0
        while not blocks or len(blocks[-1]) == _BLOCK:
            blocks.append(file.read(_BLOCK, dtype="float32", always_2d=True))
            length += len(blocks[-1])
            self._check(file, length)
        if length == file.frames:  # libsndfile stops at its estimate
            estimated = f"libsndfile estimates from its first frame that it has {length:,} samples, and it has more"
            raise _LowEstimateError(f"{estimated}; a Xing header has the right number (ffmpeg -c copy writes one)")
        return np.concatenate(blocks)

    def _stretch(self, file: Any, window: ArrayWindow | None, u: NDArray[np.float64]) -> tuple[int, int]:
        """Return the range [start, end) of samples to read: the window, or the whole file."""
        if window is not None and file.samplerate == self._to.rate and _begins_anywhere(file):
            (start,), (size,) = window.starts((file.frames,), u), window.sizes
            if start >= 0 and size <= file.frames:
                return start, start + size
        return 0, file.frames

    def _check(self, file: Any, length: int) -> None:
        seconds, most_s = length / file.samplerate, self._to.max_s
        if most_s is not None and seconds > most_s:
            raise UndecodableError(f"it is {exact(seconds)} s long, over the limit of {exact(most_s)} s (max_s)")
        longer = max(length, math.ceil(seconds * self._to.rate))
        nbytes = longer * max(file.channels, self._to.channels) * np.dtype(np.float32).itemsize
        if nbytes > self._max_bytes:
            raise UndecodableError(
                f"it is {exact(seconds)} s of {file.samplerate} Hz in {file.channels} channels, {size(nbytes)} once it "
                f"is decoded, over the limit of {size(self._max_bytes)}"
            )

    def _mixed(self, sound: NDArray[np.float32]) -> NDArray[np.float32]:
        there, wanted = sound.shape[1], self._to.channels
        if wanted == 1:
            return sound[:, 0] if there == 1 else sound.mean(axis=1, dtype=np.float32)
        if there not in (1, wanted):
            raise UndecodableError(f"it has {there} channels, and DecodeAudio makes {wanted} of as many, or of one")
        return np.repeat(sound, wanted, axis=1) if there == 1 else sound


def _has_length(file: Any, encoded: memoryview) -> bool:
    # MPEG audio has the exact length in its first frame, after "Xing" or "Info", if there is such a frame. Otherwise
    # libsndfile estimates it from the bit rate and the file size, which includes tags with pictures.
    if file.format != "MP3":
        return bool(file.frames != _UNKNOWN)
    at = 0
    while bytes(encoded[at : at + 3]) == b"ID3":
        at += 10 + functools.reduce(lambda size, byte: size << 7 | byte, encoded[at + 6 : at + 10], 0)
    start = bytes(encoded[at : at + 64])
    found = max(start.find(b"Xing"), start.find(b"Info"))
    return found >= 0 and bool(int.from_bytes(start[found + 4 : found + 8], "big") & 1)


def _begins_anywhere(file: Any) -> bool:
    """Return whether reading after a seek gives the same values as reading from the beginning."""
    return file.format == "FLAC" or (file.format in _CONTAINERS and file.subtype in _INDEPENDENT)


def _read(file: Any, start: int, end: int, can_seek: bool) -> NDArray[np.float32]:
    """Read a range of samples: float32 [time, channels]."""
    if end < file.frames and file.format == "FLAC":
        # A truncated file must be bad in all epochs, not only if the window reaches the end, so read the last sample.
        # For other formats libsndfile derives the length from the file size.
        _go_to(file, file.frames - 1)
        file.read(1, dtype="float32")
    if can_seek:
        _go_to(file, start)  # even to 0, like soundfile.read: after a seek, the MP3 decoder rounds differently
    sound: NDArray[np.float32] = file.read(end - start, dtype="float32", always_2d=True)
    # For a truncated file, libsndfile returns fewer samples, and no error.
    if len(sound) < end - start:
        raise UndecodableError(f"it breaks off after {start + len(sound):,} of {file.frames:,} samples")
    return sound


def _go_to(file: Any, sample: int) -> None:
    try:
        file.seek(sample)
    except RuntimeError as error:  # LibsndfileError of soundfile, without a reason
        place = f"sample {sample:,} of {file.frames:,}"
        raise UndecodableError(f"it is damaged or breaks off: libsndfile does not find {place}") from error
