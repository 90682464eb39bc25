"""Decodes sound: libsndfile reads, soxr resamples, and what is damaged or too long is refused.

Where a pipeline begins with a window of the sound, only that is read, if reading from there gives the same numbers as
reading all: of uncompressed sound and of FLAC that need not be resampled. soxr's numbers depend, in their last bits, on
where it begins; MP3, Vorbis, Opus and ADPCM depend on what comes before.
"""

from __future__ import annotations

import functools
import math
import os
from contextlib import suppress
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from mbaas.errors import ConfigError
from mbaas.prep.header import UndecodableError
from mbaas.transforms import DecodeAudio
from mbaas.transforms.arrays import ArrayWindow
from mbaas.units import exact, size

_QUALITY = "HQ"
"""soxr's, which is its default, and librosa's: 20 bits."""


def sound_libraries() -> tuple[Any, Any]:
    """Return soundfile and soxr.

    Raises:
        ConfigError: they are not installed.
    """
    try:
        import soundfile
        import soxr
    except (ImportError, OSError) as error:  # OSError: soundfile is there, and libsndfile is not
        raise ConfigError(
            f'DecodeAudio needs soundfile and soxr on every node: pip install "mbaas[audio]" ({error})'
        ) from error
    return soundfile, soxr


_CONTAINERS = ("WAV", "WAVEX", "RF64", "W64", "AIFF", "AU", "CAF")
_INDEPENDENT = ("PCM_S8", "PCM_U8", "PCM_16", "PCM_24", "PCM_32", "FLOAT", "DOUBLE", "ULAW", "ALAW")
"""Encodings, by libsndfile's names, in which no number depends on another one; and files that have them."""


_UNKNOWN = (1 << 63) - 1  # libsndfile's length of a FLAC file that was written to a pipe
_BLOCK = 1 << 18  # samples that are read at a time of a file whose length is not known

_LONGER_TAG = 8  # times the bytes of a file; frames of MPEG audio differ in their bytes by a factor of 40 at most
_MOST_TAG_BYTES = (1 << 28) - 1


class _LowEstimateError(UndecodableError):
    """libsndfile takes a recording for shorter than it is."""


class _Encoded:
    """The bytes of a file where they lie, for libsndfile, which copies what it asks for."""

    def __init__(self, encoded: memoryview, tag_bytes: int = 0) -> None:
        """
        Args:
            encoded: the bytes of the file.
            tag_bytes: of an empty ID3 tag to put before them; MPEG audio without a tag gets a short one. Otherwise
                libsndfile first looks for a resource fork in the current folder, and if a file `._` or a folder
                `.AppleDouble` is there, it takes the recording for Sound Designer II.
        """
        encoded = encoded.cast("B")
        if not tag_bytes and len(encoded) > 1 and encoded[0] == 0xFF and encoded[1] & 0xE0 == 0xE0:
            tag_bytes = 10
        if tag_bytes:
            size = bytes(tag_bytes >> bits & 0x7F for bits in (21, 14, 7, 0))
            encoded = memoryview(b"".join((b"ID3\x04\0\0", size, bytes(tag_bytes), encoded)))
        self._bytes, self._at = encoded, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Go to a place; stay where it is none. An exception would be printed, and go no further than libsndfile."""
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: len(self._bytes)}[whence]
        if base + offset >= 0:  # a damaged file may tell it to go to a place before its beginning
            self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place."""
        return self._at

    def readinto(self, into: Any) -> int:
        """Copy the next bytes, as many as there is room for; return how many there were."""
        found = self._bytes[self._at : self._at + len(into)]
        into[: len(found)] = found
        self._at += len(found)
        return len(found)


class SoundDecoder:
    """Turns the bytes of recordings into sound, float32 [time] or [time, channels]. Threads may share it.

    Args:
        decode: what it is to make.
        max_bytes: of one recording, decoded; one that claims more is refused from its header.
        window: what is cut out of the sound next, if anything is, along its first axis only; only that is read where it
            can be read alone.

    Raises:
        ConfigError: soundfile or soxr is not installed.
    """

    def __init__(self, decode: DecodeAudio, max_bytes: int, window: ArrayWindow | None = None) -> None:
        self._soundfile, self._soxr = sound_libraries()
        self._to, self._max_bytes, self._window = decode, max_bytes, window

    def __call__(self, encoded: memoryview, u: NDArray[np.float64]) -> tuple[NDArray[np.float32], bool]:
        """Decode one recording, or the window of it.

        Args:
            encoded: its bytes.
            u: float64[draws], the window's random numbers.

        Returns:
            The sound, and whether it is the window alone.

        Raises:
            UndecodableError: it is damaged, of too many channels, or too long.
        """
        try:
            return self._decode(encoded, self._window, u)
        except _LowEstimateError:  # the estimate is in proportion to all bytes
            return self._decode(encoded, None, u, tag_bytes=min(_LONGER_TAG * len(encoded), _MOST_TAG_BYTES))
        except UndecodableError:
            if self._window is None:
                raise
            with suppress(UndecodableError):  # FLAC whose header is wrong may be read in order, but not from a place
                return self._decode(encoded, None, u)
            raise

    def _decode(
        self, encoded: memoryview, window: ArrayWindow | None, u: NDArray[np.float64], tag_bytes: int = 0
    ) -> tuple[NDArray[np.float32], bool]:
        begins = f"; it starts with {bytes(encoded[:12])!r}" if len(encoded) else "; the file is empty (0 bytes)"
        try:
            with self._soundfile.SoundFile(_Encoded(encoded, tag_bytes)) as file:
                begins = ""  # of a file of sound its first bytes say nothing
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
        """Read the window, or all: float32 [time, channels]; and whether it is the window alone."""
        can_seek = file.seekable()
        # soundfile would seek after each read, which fails where libsndfile can only read in order, or too few samples
        # are there.
        file.seekable = lambda: False
        if not has_length:
            return self._read_to_the_end(file), False
        self._check(file, file.frames)
        start, end = self._stretch(file, window, u)
        return _read(file, start, end, can_seek), (start, end) != (0, file.frames)

    def _read_to_the_end(self, file: Any) -> NDArray[np.float32]:
        """Read a file in order whose header has no length."""
        if file.frames != _UNKNOWN:
            _go_to(file, 0)  # as in `_read`
        blocks: list[NDArray[np.float32]] = []
        length = 0
        while not blocks or len(blocks[-1]) == _BLOCK:
            blocks.append(file.read(_BLOCK, dtype="float32", always_2d=True))
            length += len(blocks[-1])
            self._check(file, length)
        if length == file.frames:  # libsndfile stops there
            estimated = f"libsndfile estimates from its first frame that it has {length:,} samples, and it has more"
            raise _LowEstimateError(f"{estimated}; a Xing header has the right number (ffmpeg -c copy writes one)")
        return np.concatenate(blocks)

    def _stretch(self, file: Any, window: ArrayWindow | None, u: NDArray[np.float64]) -> tuple[int, int]:
        """Return which samples of a file are read, the second number excluded: the window, or all."""
        if window is not None and file.samplerate == self._to.rate and _begins_anywhere(file):
            (start,), (size,) = window.starts((file.frames,), u), window.sizes
            if start >= 0 and size <= file.frames:
                return start, start + size
        return 0, file.frames

    def _check(self, file: Any, length: int) -> None:
        """Refuse a file that has too many samples, or claims it."""
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
        """Return the channels that are wanted of [time, channels]."""
        there, wanted = sound.shape[1], self._to.channels
        if wanted == 1:
            return sound[:, 0] if there == 1 else sound.mean(axis=1, dtype=np.float32)
        if there not in (1, wanted):
            raise UndecodableError(f"it has {there} channels, and DecodeAudio makes {wanted} of as many, or of one")
        return np.repeat(sound, wanted, axis=1) if there == 1 else sound


def _has_length(file: Any, encoded: memoryview) -> bool:
    """Whether the header of a file has its length.

    MPEG audio has it in its first frame, after "Xing" or "Info", if it has such a frame. Otherwise libsndfile
    estimates the length from the bit rate and the bytes, tags with pictures among them.
    """
    if file.format != "MP3":
        return bool(file.frames != _UNKNOWN)
    at = 0
    while bytes(encoded[at : at + 3]) == b"ID3":
        at += 10 + functools.reduce(lambda size, byte: size << 7 | byte, encoded[at + 6 : at + 10], 0)
    start = bytes(encoded[at : at + 64])
    found = max(start.find(b"Xing"), start.find(b"Info"))
    return found >= 0 and bool(int.from_bytes(start[found + 4 : found + 8], "big") & 1)


def _begins_anywhere(file: Any) -> bool:
    """Whether a file gives the same numbers from each place on, whether or not it is read from the beginning."""
    return file.format == "FLAC" or (file.format in _CONTAINERS and file.subtype in _INDEPENDENT)


def _read(file: Any, start: int, end: int, can_seek: bool) -> NDArray[np.float32]:
    """Read samples of a file: float32 [time, channels]."""
    if end < file.frames and file.format == "FLAC":
        # One that breaks off after the window is bad in all epochs, not only where a window reaches so far. Of others
        # libsndfile tells how long they are, not how long they were.
        _go_to(file, file.frames - 1)
        file.read(1, dtype="float32")
    if can_seek:
        _go_to(file, start)  # also to 0, as soundfile.read does: the MP3 decoder rounds in another way after it
    sound: NDArray[np.float32] = file.read(end - start, dtype="float32", always_2d=True)
    # Of a file that breaks off libsndfile gives what is there, and no error.
    if len(sound) < end - start:
        raise UndecodableError(f"it breaks off after {start + len(sound):,} of {file.frames:,} samples")
    return sound


def _go_to(file: Any, sample: int) -> None:
    try:
        file.seek(sample)
    except RuntimeError as error:  # soundfile's LibsndfileError, which says no more than that it failed
        place = f"sample {sample:,} of {file.frames:,}"
        raise UndecodableError(f"it is damaged or breaks off: libsndfile does not find {place}") from error
