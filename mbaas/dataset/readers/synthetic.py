"""A dataset without files, of any size, for tests and for measuring the overhead of ordering and bookkeeping."""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from mbaas.dataset.base import Dataset, SampleReader, exact_view
from mbaas.errors import ConfigError
from mbaas.samples.fields import LABEL, Arrays
from mbaas.samples.order import Ids


def synthetic(num_samples: int, *, height: int = 8, width: int = 8, num_classes: int = 10) -> Dataset:
    """Create a dataset of computed images, which needs no memory or disk for any number of images.

    Sample i is a PNG file of noise determined by i, with label i mod `num_classes`. The files are not compressed, so
    all have the same length and no table is needed.

    Args:
        num_samples: at least 1.
        height: image height in pixels, at least 1.
        width: image width in pixels, at least 1.
        num_classes: at least 1.

    Raises:
        ConfigError: an argument is below 1.
    """
    given = {"num_samples": num_samples, "height": height, "width": width, "num_classes": num_classes}
    for name, value in given.items():
        if value < 1:
            raise ConfigError(f"{name} must be at least 1, got {value}")
    root = f"synthetic://{num_samples}x{height}x{width}x{num_classes}"
    return SyntheticDataset(
        root=root,
        class_names=tuple(str(label) for label in range(num_classes)),
        fingerprint=hashlib.blake2b(root.encode(), digest_size=16).hexdigest(),
        num_samples=num_samples,
        height=height,
        width=width,
    )


@dataclass(frozen=True, eq=False, repr=False)
class SyntheticDataset(Dataset):
    """A dataset of computed images; see `synthetic`."""

    num_samples: int
    height: int
    width: int

    def __len__(self) -> int:
        return self.num_samples

    def values(self, sample_ids: Ids) -> Arrays:
        return {LABEL.name: np.asarray(sample_ids % len(self.class_names))}

    def lengths(self, sample_ids: Ids) -> NDArray[np.int64]:
        return np.full(len(sample_ids), self._sample_bytes)

    @property
    def total_bytes(self) -> int:
        return self.num_samples * self._sample_bytes

    def uri(self, sample_id: int) -> str:
        return f"{self.root}/{sample_id}.png"

    def reader(self) -> SampleReader:
        return _SyntheticReader(self)

    @cached_property
    def _sample_bytes(self) -> int:
        # the same for all samples
        return len(_png_of_noise(0, self.height, self.width))


class _SyntheticReader(SampleReader):
    def __init__(self, dataset: SyntheticDataset) -> None:
        self._dataset = dataset

    def read_into(self, sample_id: int, buffer: memoryview | NDArray[np.uint8]) -> None:
        content = _png_of_noise(sample_id, self._dataset.height, self._dataset.width)
        exact_view(buffer, len(content), self._dataset.uri(sample_id))[:] = content


def _png_of_noise(sample_id: int, height: int, width: int) -> bytes:
    # The pixels are a hash of the sample id.
    row_bytes = 3 * width
    noise = hashlib.shake_128(struct.pack("<q", sample_id)).digest(height * row_bytes)
    # The byte before each row is its filter; 0 means none.
    rows = b"".join(b"\0" + noise[i : i + row_bytes] for i in range(0, len(noise), row_bytes))
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)  # 8 bits per channel, RGB, not interlaced
    # Level 0 only stores: compressed samples would differ in length.
    pieces = ((b"IHDR", header), (b"IDAT", zlib.compress(rows, 0)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_png_chunk(kind, data) for kind, data in pieces)


def _png_chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
