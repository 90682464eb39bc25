"""The fuzz targets: each creates its files in a folder, and returns the function for one case.

A case passes if it ends without an exception. Targets expect errors of mbaas as the answer to hostile input. Any other
exception is a finding, and so is an impossible result (a changed neighbour, a wrong byte).
"""

from __future__ import annotations

import asyncio
import contextlib
import io
import itertools
import json
import math
import os
import shutil
import tarfile
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import ray
from msgspec.structs import replace
from pyarrow import parquet
from pyarrow.fs import PyFileSystem

from benchmarks.fuzz import samples
from benchmarks.fuzz.lying import LyingHandler
from benchmarks.fuzz.mutations import NAMES, changed, damaged, odd_value
from benchmarks.fuzz.run import Case, Target
from benchmarks.fuzz.samples import MAX_PIXELS, images
from mbaas import transforms
from mbaas.cache.disk.store import DiskStore
from mbaas.cache.row_server import RowPool, check_pick
from mbaas.calls import encoding
from mbaas.calls import socket as local_socket
from mbaas.calls.server import CallServer
from mbaas.cli import feed_file, what_if
from mbaas.client.saved_state import read_state, resumption
from mbaas.coordinator.status_report import story_of
from mbaas.core.layout import StagingLimits
from mbaas.core.staging import calls, events
from mbaas.core.staging.state import StagingState
from mbaas.dataset import Dataset, read_coco, read_huggingface, read_images, read_manifest, read_webdataset
from mbaas.dataset.base import bounded, read_encoded
from mbaas.dataset.storage.location import locate
from mbaas.errors import ConfigError, ConsumerRemovedError, MbaasError, PrepFailedError
from mbaas.memory.part_memory import StoredObject
from mbaas.memory.slots import Slot, SlotColumn
from mbaas.model.quantity import plain_fields
from mbaas.prep.engines import Batch, make_engine
from mbaas.ray_cluster.references import OBJECT_ID_BYTES
from mbaas.samples.fields import Arrays, Field
from mbaas.samples.order import OwnEpoch, SampleOrder, Shuffle
from mbaas.samples.placement import BlockPart
from mbaas.settings import FeedSettings
from mbaas.tools.plan import jobs as plan_jobs
from mbaas.transforms.base import DrawInputs, WindowTransform
from mbaas.wire.blocks import ROW, DeliveredBlock, DeliveredPart, PartMeta, UnreadablePart
from mbaas.wire.consumers import (
    BlockCall,
    ConsumerName,
    ConsumerReport,
    Delivery,
    FeedInfo,
    JoinRequest,
    ReadBytes,
    Resumption,
    SocketAnswer,
    SocketCall,
    Start,
)
from mbaas.wire.ranks import RankCall, RankReport
from mbaas.wire.samples import BadSample, EpochLedger, SampleSpec

MAX_FILE_BYTES = 1 << 20
"""Size limit of samples: low, so that unbounded memory use shows."""

_ROOT = Path(__file__).parents[2]


_expected = partial(contextlib.suppress, MbaasError)


# ---- folders and files ----


def _content(data: Dataset, sample: int) -> bytes:
    return read_encoded(data, data.reader(), sample).tobytes()


def listing(folder: Path) -> Case:
    """List a tree of hostile names, links, pipes, devices and huge holes; read it after changes."""
    content = images()["png"]
    number = itertools.count()

    def case(chance: Random) -> None:
        root = folder / "links may lead" / "two folders up" / str(next(number))
        try:
            _grow(chance, root, content)
            with _expected(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                data = bounded(read_images(_way_to(chance, root)), MAX_FILE_BYTES)
                _spoil(chance, root)
                for sample in range(min(len(data), 50)):
                    with _expected():
                        assert content.startswith(_content(data, sample))
        finally:
            shutil.rmtree(os.fsencode(root), ignore_errors=True)

    return case


def remote(_: Path) -> Case:
    """List and read a remote file system with wrong answers."""
    content = images()["png"]

    def case(chance: Random) -> None:
        # The fraction of errors varies: a file system that fails in every call would never be read.
        handler = LyingHandler(chance, chance.choice((0.0, 0.02, 0.3)), content)
        with _expected(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            data = bounded(read_images("tree", filesystem=PyFileSystem(handler)), MAX_FILE_BYTES)
            assert len(set(data.class_names)) == len(data.class_names), data.class_names
            ids = np.arange(len(data))
            assert len(ids)
            assert (data.lengths(ids) >= 0).all()
            assert (data.labels(ids) < len(data.class_names)).all()
            for sample, label in enumerate(data.labels(ids).tolist()):
                assert data.uri(sample).startswith(f"tree/{data.class_names[label]}/"), data.uri(sample)
                with _expected():
                    assert content.startswith(_content(data, sample))

    return case


def kept_listing(folder: Path) -> Case:
    """A damaged saved listing: refused, or equal to the original."""
    for number in range(20):
        image = folder / "tree" / f"class {number % 3}" / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        image.write_bytes(b"0" * number)
    file = folder / "listing.parquet"
    whole = read_images(folder / "tree", listing=file)
    good = file.read_bytes()

    def case(chance: Random) -> None:
        file.write_bytes(damaged(chance, good))
        with _expected():
            found = read_images(folder / "tree", listing=file)
            assert (found.fingerprint, found.class_names) == (whole.fingerprint, whole.class_names)

    return case


def shards(folder: Path) -> Case:
    """Damaged tar shards: refused, or each sample is a part of the file."""
    good = [_shard(kind) for kind in (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)]
    file = folder / "shard.tar"

    def case(chance: Random) -> None:
        content = damaged(chance, chance.choice(good), good)
        file.write_bytes(content)
        with _expected():
            data = read_webdataset(
                file, label_column=chance.choice(("cls", "kind", None)), fields=chance.choice(([], ["age"]))
            )
            for sample, length in enumerate(data.lengths(np.arange(len(data))).tolist()):
                assert 0 <= length <= len(content), data.uri(sample)
                assert _content(data, sample) in content, data.uri(sample)

    return case


def arrow(folder: Path) -> Case:
    """Damaged Arrow files of Hugging Face datasets: refused, or each sample is a part of the file."""
    rows: list[dict[str, Any]] = [
        {"image": {"bytes": content, "path": f"{n}.png"}, "label": n, "more": {"boxes": [[n, 1.5]] * (n % 3)}}
        for n, content in enumerate(images().values())
    ]
    table, good = pa.Table.from_pylist(rows), []
    for rows_of_batch, compression in ((3, None), (100, None), (3, "zstd")):
        with pa.BufferOutputStream() as out:
            options = pa.ipc.IpcWriteOptions(compression=compression)
            with pa.ipc.new_stream(out, table.schema, options=options) as writer:
                writer.write_table(table, max_chunksize=rows_of_batch)
            good.append(out.getvalue().to_pybytes())
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "a.arrow"}], "_fingerprint": "x"}))

    def case(chance: Random) -> None:
        content = chance.choice(good)
        content = damaged(chance, content, good) if chance.random() < 0.5 else _misled(chance, content)
        (folder / "a.arrow").write_bytes(content)
        unpacked = folder / "unpacked" if chance.random() < 0.3 else None
        try:
            with _expected():
                data = read_huggingface(
                    folder, fields=chance.choice((None, ["label"], ["more.boxes"])), unpacked=unpacked
                )
                for sample in range(len(data)):
                    found = _content(data, sample)
                    assert unpacked or found in content, data.uri(sample)
        finally:
            shutil.rmtree(folder / "unpacked", ignore_errors=True)

    return case


def _misled(chance: Random, arrow: bytes) -> bytes:
    """Change a number in the metadata of an Arrow file: a row count or an offset."""
    starts = [place + 8 for place in range(0, len(arrow) - 8, 8) if arrow[place : place + 4] == b"\xff" * 4]
    start = chance.choice(starts)
    place = start + chance.randrange(0, max(8, int.from_bytes(arrow[start - 4 : start], "little") % 4096), 8)
    word = chance.choice((-1, 0, 1, 2, 3, 5, 8, 41, 1000, 2**31, 2**62, start - place))
    return arrow[:place] + word.to_bytes(8, "little", signed=True) + arrow[place + 8 :]


def manifest(folder: Path) -> Case:
    """A damaged or odd manifest: all listed samples, also of its splits, can be read."""
    content = images()["png"]
    (folder / "a").mkdir()
    for number in range(5):
        (folder / "a" / f"{number}.png").write_bytes(content)
    rows = [{"uri": f"a/{n}.png", "label": "xyz"[n % 3], "age": n, "box": [n, 1.5], "bytes": 9} for n in range(5)]
    flat = [{name: value for name, value in row.items() if name != "box"} for row in rows]
    encoded = {
        ".jsonl": "\n".join(map(json.dumps, rows)).encode(),
        ".csv": "\n".join(",".join(map(str, row)) for row in ([*flat[0]], *(row.values() for row in flat))).encode(),
    }
    parquet.write_table(pa.Table.from_pylist(rows), folder / "good.parquet")
    encoded[".parquet"] = (folder / "good.parquet").read_bytes()

    def case(chance: Random) -> None:
        ending, good = chance.choice([*encoded.items()])
        if ending == ".jsonl" and chance.random() < 0.5:
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                good = "\n".join(json.dumps(changed(chance, row)) for row in rows).encode(errors="replace")
        path = folder / f"table{ending}"
        path.write_bytes(good if chance.random() < 0.3 else damaged(chance, good, [*encoded.values()]))
        columns = [None, "uri", "label", "age", "box", "bytes", "no"]
        given: dict[str, Any] = {
            name: chance.choice(columns) for name in ("label_column", "length_column") if chance.random() < 0.5
        }
        if chance.random() < 0.3:
            given["uri_column"] = chance.choice(columns[1:])
        with _expected():
            data = bounded(read_manifest(path, **given), MAX_FILE_BYTES)
            data = chance.choice((data, data.split(chance.random())[0], data.limit(chance.randrange(7))))
            ids = np.arange(len(data))
            assert len(ids)
            assert all(len(array) == len(ids) for array in data.values(ids).values())
            assert not data.class_names or data.labels(ids).max() < len(data.class_names)
            for sample in range(len(data)):
                assert data.uri(sample).startswith(f"{folder}/"), data.uri(sample)
                with _expected():
                    assert content.startswith(_content(data, sample))

    return case


def _shard(kind: int) -> bytes:
    """Make a shard of five samples, with names that take several headers in two of the tar formats."""
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w", format=kind) as tar:
        for number in range(5):
            known = json.dumps({"kind": "cat", "age": number}).encode()
            for ending, content in (("jpg", bytes(600 * number)), ("cls", b"%d" % number), ("json", known)):
                member = tarfile.TarInfo(f"{'folder/' * 20}{number}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def _grow(chance: Random, root: Path, content: bytes) -> None:
    folders = [os.fsencode(root)]
    for _ in range(chance.randrange(1, 25)):
        where = os.path.join(chance.choice(folders), chance.choice((b"cat", b"dog", *NAMES)))  # noqa: PTH118 (bytes)
        with contextlib.suppress(OSError):
            _put(chance, where, content, folders)
            if os.path.isdir(where) and not os.path.islink(where):  # noqa: PTH112, PTH114 (bytes)
                folders.append(where)


def _put(chance: Random, where: bytes, content: bytes, folders: list[bytes]) -> None:
    kind = chance.randrange(10)
    if kind < 4:
        os.makedirs(where, exist_ok=True)  # noqa: PTH103 (bytes)
    elif kind < 7:
        with open(where, "xb") as file:  # noqa: PTH123 (bytes)
            file.write(content[: chance.choice((0, 10, len(content)))])
            if chance.random() < 0.2:
                file.truncate(chance.choice((MAX_FILE_BYTES + 1, 64 << 30, 2**43)))
    elif kind == 7:
        os.mkfifo(where)
    else:
        nowhere = (b"/dev/zero", b"/dev/stdin", b"nowhere", b".", b"..", b"../..", os.path.basename(where))  # noqa: PTH119
        os.symlink(chance.choice((*nowhere, *folders)), where)  # noqa: PTH211


def _way_to(chance: Random, root: Path) -> str:
    ways = (str(root), str(root), f"{root}/", root.as_uri(), f"{root}/cat/..", f"{root}\n", f"{root}\0", f"{root}/none")
    return chance.choice(ways)


def _spoil(chance: Random, root: Path) -> None:
    for path, _, names in os.walk(os.fsencode(root)):
        for name in names:
            where = os.path.join(path, name)  # noqa: PTH118 (bytes)
            kind = chance.randrange(6)
            if kind < 3:
                os.unlink(where)  # noqa: PTH108 (bytes)
            if kind == 0:
                os.mkfifo(where)
            elif kind == 1:
                os.mkdir(where)  # noqa: PTH102 (bytes)


def coco(folder: Path) -> Case:
    """Damaged or odd COCO annotations: samples that were read can be prepared, with their masks."""
    from pycocotools import mask

    content = images()["png"]  # 150x120
    (folder / "a").mkdir()
    for number in range(3):
        (folder / "a" / f"{number}.png").write_bytes(content)
    triangle: Any = mask.merge(mask.frPyObjects([[5, 5, 90, 7, 40, 60]], 120, 150))
    segmentations: list[Any] = [
        [[5, 5, 90, 7, 40, 60], [100, 100, 140, 100, 140, 110]],
        {"size": [120, 150], "counts": [40, 17_000, 960]},
        {"size": [120, 150], "counts": triangle["counts"].decode()},
    ]
    said: dict[str, Any] = {
        "images": [{"id": number + 7, "file_name": f"{number}.png"} for number in range(3)],
        "categories": [{"id": 3, "name": "x"}, {"id": 1, "name": "y"}],
        "annotations": [
            {
                "image_id": number % 2 + 7,
                "category_id": number % 2 * 2 + 1,
                "bbox": [4.5, 5, 90, 60],
                "area": 9,
                "keypoints": [9.5, 60, 2, 0, 0, 0],
                "segmentation": segmentation,
            }
            for number, segmentation in enumerate(segmentations * 2)
        ],
    }
    fields = ("boxes", "labels", "area", "iscrowd", "keypoints", "segmentation", "image_id")
    steps = [transforms.RandomIoUCrop(), transforms.Resize((16, 16)), transforms.RandomHorizontalFlip()]
    pipeline = transforms.Pipeline(
        [transforms.DecodeImage(), *steps],
        boxes=transforms.Boxes(beside=("labels", "keypoints")),
        keypoints=transforms.Keypoints(swaps=((0, 1),)),
        masks=transforms.Masks(),
    )
    engine = make_engine("cpu", pipeline, seed=0, max_pixels=MAX_PIXELS)

    def case(chance: Random) -> None:
        good = json.dumps(said).encode()
        if chance.random() < 0.7:
            with contextlib.suppress(TypeError, ValueError, RecursionError):
                if chance.random() < 0.6:  # otherwise few cases would reach a mask
                    odd = {"segmentation": changed(chance, chance.choice(segmentations))}
                    annotations = [said["annotations"][0] | odd, *said["annotations"][1:]]
                    good = json.dumps(said | {"annotations": annotations}).encode(errors="replace")
                else:
                    good = json.dumps(changed(chance, said)).encode(errors="replace")
        path = folder / "a.json"
        path.write_bytes(good if chance.random() < 0.7 else damaged(chance, good))
        with _expected():
            data = read_coco(path, folder / "a", fields=fields, keep_empty=chance.random() < 0.5)
            assert [field.name for field in pipeline.known(data.fields)][5] == "masks"
            ids = np.arange(len(data))
            values, out = data.values(ids), np.empty((len(data), 16, 16, 3), np.uint8)
            assert values["labels"].own()[0].max(initial=-1) < len(data.class_names)
            made = engine.prepare(Batch([content] * len(data), ids, chance.randrange(4), values), out)
            assert all(len(column) == len(data) - len(made.bad) for column in made.known.values())
            masks, boxes = made.known["masks"], made.known["boxes"]
            assert masks.lengths.tolist() == boxes.lengths.tolist()
            assert masks.own()[0].max(initial=0) <= 1
            assert ((boxes.own()[0] >= 0) & (boxes.own()[0] <= 16)).all()

    return case


def location(_: Path) -> Case:
    """Invalid URIs and paths."""
    schemes = ("file://", "s3://", "gs://", "hdfs://", "abfs://", "mock://", "nope://", "", "//", "file:", "://")
    hosts = ("", "/", "a b", "%", "%zz", "[::1", "[", "u:p@h:99999/x", "\ud800", "\0", "é", "?x=1#y", "..", "~nobody")

    def case(chance: Random) -> None:
        uri = chance.choice(schemes) + "".join(chance.choice(hosts) for _ in range(chance.randrange(4)))
        if uri.startswith(("s3://", "gs://", "hdfs://", "abfs://")) and chance.random() < 0.97:
            return  # these may connect to servers, which takes seconds
        with _expected():
            found = locate(uri, None)
            assert not found.root.partition("://")[2].startswith("u:p@"), f"{found.root} shows credentials"

    return case


_YAML = (
    b"!!python/object/apply:os.system [x]",
    b"&a [*a, *a]",
    b"!!bool 3",
    b"!!int ''",
    b"!!timestamp x",
    b"!!float x",
    b"!!binary '=x'",
    b"!!set {a, b}",
    b"{<<: {name: x}}",
    b"? [a]\n: b",
    b"[" * 3000,
    b"- " * 3000,
    b"0x" + b"f" * 5000,
    b"9" * 5000,
    b"1:2:3",
    b".nan",
    b"-.inf",
    b"1e999",
    b"'\\ud800'",
    b'"\\ud800"',
    b"\xff\xfe",
    b"%YAML 9.9\n---\n",
    b"a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
)


def files(folder: Path) -> Case:
    """YAML of feeds, plans, systems and price lists, and the JSON of `mbaas analyze`."""
    from mbaas.tools.simulator import catalog

    readers: list[tuple[Path, Callable[[Path], object]]] = [
        (_ROOT / "examples/feed.yaml", feed_file.load),
        (_ROOT / "examples/plan/jobs.yaml", plan_jobs.load),
        (_ROOT / "mbaas/tools/simulator/presets/mnist.yaml", catalog.read),
        (_ROOT / "mbaas/tools/simulator/presets/machines/reference.yaml", what_if.read_machines),
    ]
    texts = [(path.read_bytes(), read) for path, read in readers]
    texts.append((json.dumps(_saved_analysis()).encode(), what_if.load))
    others = [text for text, _ in texts]
    file = folder / "file.yaml"

    def case(chance: Random) -> None:
        text, read = chance.choice(texts)
        if chance.random() < 0.3:
            at = text.find(b":", chance.randrange(len(text))) + 1
            text = text[:at] + b" " + chance.choice(_YAML) + text[chance.choice((at, text.find(b"\n", at))) :]
        else:
            text = damaged(chance, text, others)
        if b"Map" in text:
            return  # a file that names a function is trusted like the function
        file.write_bytes(text)
        with _expected():
            read(file)

    return case


def saved(folder: Path) -> Case:
    """Saved measurements of `mbaas analyze` with other values."""
    file, good = folder / "saved.json", _saved_analysis()

    def case(chance: Random) -> None:
        with contextlib.suppress(
            TypeError, ValueError, RecursionError
        ):  # values that are not JSON cannot occur in such a file
            file.write_text(json.dumps(changed(chance, good)))
            with _expected():
                what_if.load(file)

    return case


def _saved_analysis() -> dict[str, Any]:
    rate = {"value": 1000.0, "low": 900.0, "high": 1100.0, "unit": "samples/s", "samples": 3}
    rates = {"samples": 1000, "sample_bytes": 1e5, "pixel_bytes": 1.5e5, "cores": 4, "batch_size": 64, "step": rate}
    curves = {"prep": [[1, rate], [2, rate]], "storage": [[1, rate]], "cache": rate}
    return {"rates": {**rates, **curves}, "setup": {"nodes": 1, "trials": 2, "cache_bytes": 0.0}}


def disk(folder: Path) -> Case:
    """A damaged folder of the disk tier, also with foreign files: it serves only bytes that were stored."""
    lengths = np.random.default_rng(1).integers(1, 300, 60)
    ids, starts = np.arange(60), np.cumsum(lengths) - lengths
    content = np.random.default_rng(2).integers(0, 255, int(lengths.sum()), np.uint8)
    fingerprint, number, victim = "0" * 32, itertools.count(), folder / "somebody's.bin"
    store: dict[str, Any] = {"num_samples": 60, "segment_bytes": 2000, "lock_wait_s": 0.0}
    with DiskStore(folder / "good", 1 << 20, fingerprint, **store) as tier:
        tier.put(ids, lengths, content)
    victim.write_bytes(b"nobody may touch this" * 500)

    def case(chance: Random) -> None:
        root = folder / str(next(number))
        shutil.copytree(folder / "good", root)
        try:
            _harm(chance, root / fingerprint, victim)
            budget = chance.choice((0, 3000, 1 << 20))
            with _expected(), DiskStore(root, budget, fingerprint, **store) as tier:
                buffer = np.zeros(len(content), np.uint8)
                found = tier.get(ids, lengths, buffer=buffer, offsets=starts)
                for start, length in zip(starts[found], lengths[found], strict=True):
                    assert (buffer[start : start + length] == content[start : start + length]).all(), start
                tier.put(ids, lengths, content)
            assert victim.read_bytes() == b"nobody may touch this" * 500, "a foreign file was changed"
        finally:
            shutil.rmtree(root)

    return case


def _harm(chance: Random, folder: Path, victim: Path) -> None:
    for _ in range(chance.choice((1, 1, 2, 4))):
        path = chance.choice(sorted(folder.iterdir()))
        kind = chance.randrange(10)
        if kind < 6 and path.is_file() and not path.is_symlink():
            path.write_bytes(damaged(chance, path.read_bytes()))
            continue
        name = chance.choice((path.name, "segment-999999.bin", "index.bin.new", "mbaas-disk-tier.json.new"))
        path = path.with_name(name)
        if path.is_dir() and not path.is_symlink():
            continue
        path.unlink(missing_ok=True)
        if kind == 6:
            os.mkfifo(path)
        elif kind == 7:
            path.mkdir()
        elif kind < 9:
            path.symlink_to(chance.choice((victim, "nowhere", path.name, "/dev/zero")))


# ---- values ----


def state(_: Path) -> Case:
    """Loader states that other programs changed."""
    order = SampleOrder(1000, 0, block_samples=64)
    settings = FeedSettings(name="f", batch_size=64, cache_bytes=0, staging_bytes=1, prep_workers=1)
    spec = SampleSpec(Field("image", (1,), "uint8"), ())
    info = FeedInfo(settings, order, spec, "f", None, has_images=True, class_names=(), engine="cpu")
    share = {"rank": 1, "world_size": 2, "samples": 32, "id_hash": 7}
    good: dict[str, Any] = {
        "version": 3,
        "fingerprint": "f",
        "engine": "cpu",
        "epoch": 2,
        "feed_epoch": 3,
        "position": 64,
    }
    good |= {"samples": 64, "id_hash": 5, "left_out": [1, 2], "share": share}
    good |= {"begin": 128, "shuffle": [[1, []], [2, [128, 192]], [3, [64, 128]]]}

    def case(chance: Random) -> None:
        with _expected():
            found = read_state(changed(chance, good), info=info)
            assert 0 <= found.position <= 1000
            if found.position:
                there, row = resumption(found, order)
                assert there.own_epoch.first <= there.start < there.own_epoch.end
                assert 0 <= row <= order.block_samples
                calls.resumption(encoding.decoded(encoding.encode(there), Resumption), order)
            json.dumps(vars(found), default=vars)

    return case


def consumers(_: Path) -> Case:
    """Calls of consumers to a coordinator."""
    order = SampleOrder(1000, 0, block_samples=64)
    resumed = Resumption(4, OwnEpoch(2, 18, 128), 0, Shuffle(0, (64,), Shuffle(3)))
    name, ledger = ConsumerName("a", 1, 2), EpochLedger(0, 0, 5, 7, 5, 7)
    sent: tuple[Any, ...] = (
        JoinRequest(name, Start(4, resumed=resumed), "n0", 5),
        BlockCall(events.Ask("a", 1, 5, 3, 4, 2, 9, 5, (3, 4)), 0.5, (UnreadablePart(1, 2, 3),)),
        events.HandBack("a", 1, 5, 3, 9),
        events.Heartbeat("a", 1, 3, 4),
        events.Leave("a", 1, 2),
        ConsumerReport("loader", 5, 4, 1.0, 0.5, 0.1, 2, ReadBytes(3, 4), (ledger,)),
        RankCall(RankReport(name, 64, 5, "n0", 0, True), 3, 0.5, resumed.shuffle),
    )

    def case(chance: Random) -> None:
        good = chance.choice(sent)
        message = encoding.encode(good)
        try:
            changed_call = encoding.encode(changed(chance, msgspec.msgpack.decode(message)))
        except (OverflowError, RecursionError, TypeError, ValueError):  # cannot be sent
            changed_call = message
        with _expected():
            found = encoding.decoded(chance.choice((changed_call, damaged(chance, message))), type(good))
            if isinstance(found, JoinRequest):
                calls.join(found, 1, order=order)
            elif isinstance(found, RankCall):
                calls.consumer_name(found.report.name)
        with _expected():
            number = odd_value(chance)
            chance.choice((calls.name, calls.thing, partial(calls.announce, ["a"]), partial(calls.whole, "most")))(
                number
            )

    return case


def socket_calls(_: Path) -> Case:
    """Data on a coordinator's socket: invalid senders are disconnected, and a neighbour still gets its answer."""
    loop, answering = asyncio.new_event_loop(), set[asyncio.Task[Any]]()
    encoded = [encoding.encode(BlockCall(events.Ask("a", 1, number, 0, 0), 0.0)) for number in range(3)]
    sent = [encoding.encode(SocketCall(number, msgspec.Raw(call))) for number, call in enumerate(encoded)]
    good = [local_socket.framed(message) for message in sent]

    async def deliver(asked: BlockCall) -> Delivery:
        return Delivery(progress=asked.ask.cursor)

    async def no_relay(node: str, may_start: bool) -> None:
        raise AssertionError(f"no relay of {node} is needed, may_start={may_start}")

    server = CallServer(deliver, lambda coroutine: answering.add(loop.create_task(coroutine)), no_relay)
    address = loop.run_until_complete(server.address())

    async def both(chance: Random) -> None:
        (_, stranger), (answers, neighbour) = [await asyncio.open_unix_connection(f"\0{address}") for _ in range(2)]
        try:
            for message in (damaged(chance, b"".join(good), good), chance.choice(good)):
                stranger.write(message)
            neighbour.write(good[2])
            length = int.from_bytes(await asyncio.wait_for(answers.readexactly(4), 10.0), "big")
            answer = encoding.decode_answer(await asyncio.wait_for(answers.readexactly(length), 10.0))
            assert answer == SocketAnswer(2, Delivery(progress=2)), answer
        finally:
            stranger.close()
            neighbour.close()
        await asyncio.gather(*answering)  # raises errors that would otherwise be lost
        answering.clear()

    return lambda chance: loop.run_until_complete(both(chance))


def answers(_: Path) -> Case:
    """Answers of a coordinator over a socket: a damaged one is an answer or an invalid message."""
    meta = PartMeta(8, (BadSample(3, "/data/3.jpg", "not an image"),), 0.1, 0.2, 80)
    slot = Slot("/proc/1/fd/3", b"t" * 16, 1, 4096, 80, 2, (SlotColumn("image", 0, "uint8", (8, 10)),))
    stored = StoredObject(b"i" * OBJECT_ID_BYTES, b"owner", b"status")
    parts = tuple(DeliveredPart(meta, address, 0, 1, "n0", BlockPart("n0", 1)) for address in (slot, stored))
    block = DeliveredBlock(5, Shuffle(2, (64,), Shuffle(1)), parts)
    failed = replace(block, parts=(), error=PrepFailedError("three workers died"))
    good = [
        encoding.encode_answer(SocketAnswer(1, Delivery((block, failed), 0.5, progress=9))),
        encoding.encode_answer(SocketAnswer(2, Delivery(error=ConsumerRemovedError("silent"), expelled=True))),
        encoding.encode_answer(SocketAnswer(3, error=ConfigError("no", option="cursor"))),
    ]

    def case(chance: Random) -> None:
        with contextlib.suppress(*encoding.INVALID):
            found = encoding.decode_answer(damaged(chance, chance.choice(good), good))
            assert isinstance(found, SocketAnswer)

    return case


def rows(_: Path) -> Case:
    """Requests of ranks to a cache node: invalid ones never delay or change the rows of other ranks."""
    block_rows, pool = 24, RowPool(threads=2)
    ids = np.arange(block_rows)
    image = np.repeat(ids, 50).astype(np.uint8).reshape(block_rows, 50)
    parts: list[Arrays] = [
        {"image": image[some], "sample_id": ids[some], ROW: ids[some]} for some in (ids[::2], ids[1::2])
    ]
    whole: Arrays = {"image": image[2:], "sample_id": ids[2:]}  # the first two rows were bad
    refs: list[Any] = [ray.ObjectRef.from_random()]

    def numbers(chance: Random) -> Any:
        kind = chance.randrange(6)
        if kind < 3:
            return np.array(sorted(chance.sample(range(block_rows), chance.randrange(block_rows))), np.int64)
        shape = chance.choice(((0,), (3,), (1, 3), (), (0, 2)))
        dtype = chance.choice((np.int64, np.int64, np.int64, np.int32, np.float64, np.bool_, object, ">i8", "M8[s]"))
        made = np.zeros(shape, dtype)
        if kind == 3 and dtype is np.int64 and made.size:
            made[...] = chance.choice((-1, block_rows, 2**63 - 1, -(2**63)))
        return made if kind < 5 else odd_value(chance)

    async def ask(chance: Random) -> None:
        given, wanted, bad = chance.choice((refs, refs, odd_value(chance))), numbers(chance), numbers(chance)
        asked = chance.choice((parts, parts[:1], [whole], [*parts, whole]))
        wait = asyncio.wait_for(pool.pick(parts, ids, ids[:0]), 10.0)
        neighbour = asyncio.ensure_future(wait)
        with _expected():
            check_pick(given, wanted, bad, most=block_rows)
            # IndexError: fewer rows are left than were bad; only the requesting rank gets this error.
            with contextlib.suppress(IndexError):
                for got in await asyncio.wait_for(pool.pick(asked, wanted, bad), 10.0):
                    assert np.isin(got[ROW], wanted).all(), "a row that was not asked for"
        for part, got in zip(parts, await neighbour, strict=True):
            assert all((got[name] == part[name]).all() for name in part), "a neighbour's rows changed"

    return lambda chance: asyncio.run(ask(chance))


def thing(_: Path) -> Case:
    """Names of things in requests for a story."""
    core = StagingState(StagingLimits(budget_bytes=100, ahead_blocks=2), 16, lambda _: 10)
    for consumer in ("trial-3", "trial[0]", "x" * 500):
        core.handle(events.Join(consumer, 1, None, False), 0.0)
    numbers = ("0", "17", "-1", "9" * 19, "9" * 400, "9" * 5000, "\u0661", "1_0", "x" * 100_000, "trial-" * 50_000)

    def case(chance: Random) -> None:
        name = chance.choice(("block {}", "cache {}", "trial-{}", "{}")).format(chance.choice(numbers))
        with _expected():
            asked = calls.thing(chance.choice((name, name, odd_value(chance))))
            try:
                story_of(core.stories, core.stories, asked)
            except ConfigError as error:
                if len(str(error)) >= 10_000:
                    raise AssertionError(f"an error of {len(str(error))} characters") from error
                raise

    return case


def parameters(_: Path) -> Case:
    """Parameters of transforms, and their windows in images of any size."""
    kinds: list[Callable[..., transforms.Transform]] = [
        transforms.RandomResizedCrop,
        transforms.CenterCrop,
        transforms.Resize,
        transforms.RandomHorizontalFlip,
        transforms.ColorJitter,
        transforms.Normalize,
    ]
    counts = ((1, 3), (1, 1), (1, 1), (0, 1), (0, 4), (2, 3))
    sizes = np.array([[1, 1], [1, 65_500], [65_500, 1], [3, 4], [10_000, 10_000]])

    def value(chance: Random) -> Any:
        number = chance.choice((1, 5, 65_535, 0.5, 1e-300, 1e300, 0.0, 224, 3.0))
        return chance.choice((odd_value(chance), number, (number, number), (0.1, number), (number,) * 3))

    def case(chance: Random) -> None:
        which = chance.randrange(len(kinds))
        with _expected():
            transform = kinds[which](*(value(chance) for _ in range(chance.randint(*counts[which]))))
            transforms.Pipeline([transforms.DecodeImage(), transform]).fingerprint  # noqa: B018 (is computed)
            if isinstance(transform, WindowTransform):
                u = np.random.default_rng(chance.randrange(1000)).random((len(sizes), transform.draws))
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    chosen = transform.step(DrawInputs(u, sizes))
                assert (chosen.sizes > 0).all()
                assert (chosen.boxes[:, 2:] > 0).all()
                if not isinstance(transform, transforms.CenterCrop):  # its window may exceed the image
                    assert (chosen.boxes[:, :2] >= 0).all(), chosen.boxes
                    assert (chosen.boxes[:, :2] + chosen.boxes[:, 2:] <= sizes).all(), chosen.boxes

    return case


_TYPED = (
    *("", " ", "0", "-1", "1e999", "1e-999", "9" * 400, "1" * 5000, "0x" + "f" * 5000, "nan", "inf", "-inf", ".inf"),
    *("2 GiB", "1.5 kB", "330 MB/s", "1e400 MB/s", "30 s", "1.6 ms", "2 min", "3 days", "1e999 h", "1_000", "1__0"),
    *("on", "off", "null", "~", "true", "١٢", "²", "４", "µs", "1 µs", "é", "\ud800", "\0", "a\nb", "=", ",", "1,,2"),
    *("[1", "{a: b}", "!!bool 3", "&a [*a]", "*a", "2026-02-31", "'", "- - -", "1:2:3", "%s", "--x", "*", "[", "_"),
    "[" * 3000,
)
"""Values as typed by users and their programs."""


def typed(_: Path) -> Case:
    """Values of the command line: sizes, rates, times, changes, curves, sweeps, lists of numbers and kinds."""
    from mbaas.base import units
    from mbaas.cli import bench
    from mbaas.model.rates import Setup
    from mbaas.tools.chaos.plan import chosen_kinds
    from mbaas.tools.simulator import catalog
    from mbaas.tools.simulator.simulation import PARAMETERS, Axis, parse
    from mbaas.tools.simulator.simulation import changed as with_value

    system = catalog.read(_ROOT / "mbaas/tools/simulator/presets/mnist.yaml")
    fields, axes = list(vars(Setup())), [*PARAMETERS, "cores", "ram_bytes", "ssd_bytes", "", "nothing"]
    parsers = (units.parse_bytes, units.parse_bytes_per_s, units.parse_seconds)
    writers = (units.size, units.rate, units.seconds)

    def text(chance: Random) -> str:
        one = chance.choice(_TYPED)
        kind = chance.randrange(4)
        if kind == 0:
            return one + chance.choice(_TYPED)
        if kind == 1:
            return damaged(chance, one.encode(errors="surrogatepass")).decode(errors="surrogateescape")[:10_000]
        return (
            f"{chance.random() * 10 ** chance.randrange(-9, 30)}{chance.choice(('', ' ', ' kB', 'GiB', ' s', 'h'))}"
            if (kind == 2)
            else one
        )

    def read(chance: Random) -> None:
        which = chance.randrange(len(parsers))
        found = parsers[which](text(chance))
        assert found is None or (math.isfinite(found) and found >= 0), found
        if found is not None and 1e-9 < found < 8e7:  # 1,000 days are written with a comma, which is not valid input
            again = parsers[which](writers[which](found))
            assert again is not None, writers[which](found)
            assert math.isclose(again, found, rel_tol=0.006), (found, again)

    def set_to(chance: Random) -> None:
        found = what_if.changed(Setup(), [f"{chance.choice(fields)}={text(chance)}"])
        json.dumps(plain_fields(found), allow_nan=False)

    def swept(chance: Random) -> None:
        name = chance.choice(axes)
        value = parse(system, name, text(chance))
        Axis(name, (value,))
        with_value(system, name, value)

    ways: tuple[Callable[[Random], object], ...] = (
        read,
        set_to,
        swept,
        lambda chance: what_if.read_curve(f"{chance.choice(fields)}={text(chance)},{text(chance)}"),
        lambda chance: bench.numbers("--trials", text(chance)),
        lambda chance: chosen_kinds([text(chance)]),
    )

    def case(chance: Random) -> None:
        with _expected():
            chance.choice(ways)(chance)

    return case


def records(folder: Path) -> Case:
    """Records of trials of `mbaas chaos`: truncated as by a kill, or damaged."""
    from mbaas.tools.chaos import records

    where = folder / "records"
    where.mkdir()
    batch = {"image": np.zeros((3, 4, 4, 3), np.uint8), "label": np.arange(3), "sample_id": np.arange(3)}
    writer = records.Writer.open(where, "trial")
    for position in range(4):
        writer.step(batch, {"feed_epoch": 1, "position": position}, asked_at=0.5, got_at=1.5)
    writer.error(ValueError("said by a loader"))
    writer.close()
    file = where / f"trial.0{records.SUFFIX}"
    good = file.read_bytes()
    whole = records.history(records.read(where)["trial"])

    def case(chance: Random) -> None:
        is_cut = chance.random() < 0.3
        file.write_bytes(good[: chance.randrange(len(good))] if is_cut else damaged(chance, good))
        with contextlib.nullcontext() if is_cut else _expected():  # truncation by a kill is not an error
            steps = records.history(records.read(where).get("trial", []))
            assert not is_cut or steps == whole[: len(steps)]

    return case


TARGETS = {
    "header": Target(samples.header, 3000),
    "cpu": Target(samples.cpu, 200),
    "dali": Target(samples.dali, 16),
    "sound": Target(samples.sound, 300),
    "arrays": Target(samples.arrays, 500),
    "decoded": Target(samples.decoded, 300),
    "listing": Target(listing, 60),
    "remote": Target(remote, 300),
    "kept listing": Target(kept_listing, 300),
    "shards": Target(shards, 300),
    "arrow": Target(arrow, 100),
    "manifest": Target(manifest, 100),
    "coco": Target(coco, 200),
    "location": Target(location, 300),
    "files": Target(files, 40),
    "saved": Target(saved, 1000),
    "disk": Target(disk, 40),
    "state": Target(state, 1000),
    "consumers": Target(consumers, 300),
    "socket": Target(socket_calls, 300),
    "answers": Target(answers, 3000),
    "rows": Target(rows, 300),
    "thing": Target(thing, 300),
    "parameters": Target(parameters, 500),
    "typed": Target(typed, 100),
    "records": Target(records, 500),
}
