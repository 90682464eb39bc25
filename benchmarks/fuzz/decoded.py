"""Fuzz target for decoded samples: damaged containers, many with a correct checksum, between good ones."""

from __future__ import annotations

import io
import zlib
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.fuzz.mutations import damaged
from benchmarks.fuzz.run import Case
from mbaas import transforms
from mbaas.prep.decoded import HEADER_BYTES, DecodedRows
from mbaas.prep.engines import Batch, make_engine

_MAX_PIXELS = 1 << 18
"""Pixel limit: low, so that unbounded memory use shows."""

_KEPT_BYTES = 1 << 22


def _files() -> dict[str, list[bytes]]:
    """Make small files for each decoder class; all files of a class lead to the same field."""
    pixels = np.random.default_rng(0).integers(256, size=(2, 48, 40, 3), dtype=np.uint8)
    images, arrays = [], []
    for picture in pixels:
        stream = io.BytesIO()
        Image.fromarray(picture).save(stream, "PNG")
        images.append(stream.getvalue())
        stream = io.BytesIO()
        np.save(stream, picture.astype(np.float32))
        arrays.append(stream.getvalue())
    return {"DecodeImage": images, "DecodeArray": arrays}


def _upside_down(values: Any) -> Any:
    return values[::-1]


def _pipelines() -> list[transforms.Pipeline]:
    image, turn = transforms.DecodeImage(), transforms.Map(_upside_down, deterministic=True)
    flip, crop = transforms.RandomHorizontalFlip(), transforms.RandomResizedCrop(24)
    steps: list[list[transforms.Transform]] = [
        [image, crop, flip],
        [image, transforms.Resize(30), transforms.CenterCrop(24), flip],
        [image, turn, transforms.Resize((30, 20)), crop],
        [transforms.DecodeImage(max_pixels=4000), transforms.Resize(30), transforms.ColorJitter(0.4)],
        [transforms.DecodeArray(), transforms.RandomCrop((24, 20))],
        [transforms.DecodeArray(shape=(None, None, 3), longest=9000), turn, transforms.SpecAugment(1, 9, 1, 3)],
    ]
    return [transforms.Pipeline(each) for each in steps]


def decoded(_: Path) -> Case:
    """Containers of decoded samples: one that is damaged, or of another pipeline, between good ones."""
    files, pipelines = _files(), _pipelines()
    engines, wanted, kept = [], [], []
    for pipeline in pipelines:
        engines.append(make_engine("cpu", pipeline, seed=0, max_pixels=_MAX_PIXELS, max_bytes=_KEPT_BYTES))
        kept.append(_containers(engines[-1], files[type(pipeline.decoder).__name__]))
    fields = [engine.field(containers[0], "a good one", {}) for engine, containers in zip(engines, kept, strict=True)]

    def prepared(which: int, block: list[bytes]) -> tuple[list[Any], list[int]]:
        out = fields[which].empty(len(block))
        out[:] = 77
        done = engines[which].prepare(Batch(block, np.arange(len(block)), 0, {}), out)
        return [done.made[row : row + 1] for row in range(len(block))], [bad.row for bad in done.bad]

    def content(column: Any) -> bytes:
        values = column if isinstance(column, np.ndarray) else column.own()[0]
        return bytes(values.tobytes())

    for which, containers in enumerate(kept):
        wanted.append([content(each) for each in prepared(which, [containers[0]] * 3)[0]])
    all_kept = [container for containers in kept for container in containers]

    def case(chance: Random) -> None:
        which = chance.randrange(len(engines))
        data = damaged(chance, chance.choice(all_kept), all_kept) if chance.random() < 0.9 else chance.choice(all_kept)
        if chance.random() < 0.8 and len(data) >= HEADER_BYTES:  # otherwise no case would get past the checksum
            head = data[: HEADER_BYTES - 4]
            data = head + zlib.crc32(head).to_bytes(4, "little") + data[HEADER_BYTES:]
        made, bad = prepared(which, [kept[which][0], data, kept[which][0]])
        assert bad in ([], [1]), bad
        for row in (0, 2):
            assert content(made[row]) == wanted[which][row], "a bad sample changed its neighbours"
        assert not bad or not any(content(made[1])), "a bad row is not zero"

    return case


def _containers(engine: Any, files: list[bytes]) -> list[bytes]:
    keep, count = DecodedRows(range(len(files)), _KEPT_BYTES), len(files)
    done = engine.prepare(Batch(files, np.arange(count), 0, {}), engine.field(files[0], "", {}).empty(count), keep)
    assert not done.bad, done.bad
    _, lengths, packed = keep.taken()
    ends = np.cumsum(lengths).tolist()
    return [packed[end - length : end].tobytes() for length, end in zip(lengths.tolist(), ends, strict=True)]
