"""Odd files are prepared, and bad files are named in an error or skipped for all consumers."""

from __future__ import annotations

import io
import os
import zlib
from pathlib import Path

import cv2
import numpy as np
import pytest
from PIL import Image

import mbaas
from mbaas import transforms as T
from support.trials import Trials, record_epoch, result

pytestmark = pytest.mark.usefixtures("ray_clean")

GOOD, BATCH_SIZE = 60, 16


def picture(size=(40, 30)):
    """A smooth image, uint8[height, width, 3]: red increases to the right, green downwards."""
    width, height = size
    across, down = np.meshgrid(np.linspace(0, 255, width), np.linspace(0, 255, height))
    return np.stack([across, down, np.full_like(across, 128)], axis=2).astype(np.uint8)


def encoded(image, kind, **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def odd_files():
    """Unusual but valid files, by name."""
    image = Image.fromarray(picture())
    turned = Image.Exif()
    turned[0x0112] = 6
    return {
        "1x1.jpg": encoded(Image.fromarray(picture()[:1, :1]), "JPEG"),
        "1x1.png": encoded(Image.fromarray(picture()[:1, :1]), "PNG"),
        "cmyk.jpg": encoded(image.convert("CMYK"), "JPEG"),
        "grey.jpg": encoded(image.convert("L"), "JPEG"),
        "16-bit.png": cv2.imencode(".png", picture()[:, :, ::-1].astype(np.uint16) * 257)[1].tobytes(),
        "turned.jpg": encoded(image.transpose(Image.Transpose.ROTATE_90), "JPEG", quality=95, exif=turned),
    }


def bomb():
    """A PNG of a few hundred bytes with valid checksums that claims 30,000x30,000 pixels."""

    def chunk(kind, content):
        body = kind + content
        return len(content).to_bytes(4, "big") + body + zlib.crc32(body).to_bytes(4, "big")

    header = chunk(b"IHDR", (30_000).to_bytes(4, "big") * 2 + bytes((8, 2, 0, 0, 0)))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(bytes(1000))) + chunk(b"IEND", b"")


def bad_files():
    """Files that must be refused: name -> (content, part of the reason)."""
    jpeg = encoded(Image.fromarray(picture()), "JPEG", quality=95)
    return {
        "truncated.jpg": (jpeg[: len(jpeg) // 2], "truncated JPEG"),
        "text.jpg": (b"this is text\n" * 9, "it is not JPEG, PNG, WebP or BMP"),
        "empty.jpg": (b"", "the file is empty (0 bytes)"),
        "bomb.png": (bomb(), "30000x30000 is 900,000,000 pixels, over the limit"),
        "deleted.png": (encoded(Image.fromarray(picture()), "PNG"), ""),
        "sparse.png": (b"", "it has 68,719,476,736 bytes, over the limit of "),
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A folder of good, odd and bad files. One vanished after listing, and the folder "good" is listed first."""
    root: Path = tmp_path_factory.mktemp("tree")
    contents = {f"good/{n:03d}.png": encoded(Image.fromarray(picture((32, 20 + n))), "PNG") for n in range(GOOD)}
    contents |= {f"odd/{name}": content for name, content in odd_files().items()}
    contents |= {f"troubled/{name}": content for name, (content, _) in bad_files().items()}
    for name, content in contents.items():
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_bytes(content)
    os.truncate(root / "troubled/sparse.png", 64 << 30)  # a sparse file, larger than any memory
    data = mbaas.read_images(root)
    (root / "troubled/deleted.png").unlink()
    return data


CROPPED, RESIZED = T.CenterCrop(20), T.Resize((30, 40))
"""Transforms to one size. Resizing makes each prep worker import torch, so only the tests of pixels resize."""


def serve(name, tree, on_bad_sample, to_one_size=CROPPED):
    pipeline = T.Pipeline([T.DecodeImage(), to_one_size])
    options = {"batch_size": BATCH_SIZE, "prep_workers": 1, "staging_bytes": 4 << 20, "cache_bytes": 0}
    limits = {"staging": mbaas.Staging(readahead_bytes=0), "timeouts": mbaas.Timeouts(storage_s=1.0)}
    return mbaas.serve(name, tree, pipeline, on_bad_sample=on_bad_sample, **limits, **options)


@pytest.fixture(scope="module")
def skipping(ray_session, tree):
    with serve("skipping", tree, "skip", RESIZED) as feed:
        yield feed


def ids_by_name(data):
    return {Path(data.uri(i)).name: i for i in range(len(data))}


def test_skipped_samples_are_the_same_for_all_consumers_and_listed_with_their_reasons(skipping, tree):
    """6 of 72 files are bad. The other 66 make four minibatches of 16 and one of 2."""
    ids = ids_by_name(tree)
    bad = {ids[name]: reason for name, (_, reason) in bad_files().items()}
    good = set(range(len(tree))) - set(bad)
    feed = skipping
    with Trials(feed.name) as trials:
        names = ["other size", "other process", "here"]
        mbaas.announce(feed.name, names)
        running = [trials.join(names[0], batch_size=7).epochs(2), trials.join(names[1]).epochs(2)]
        with mbaas.join(feed.name, consumer=names[2], format="numpy") as loader:
            here = [record_epoch(loader), record_epoch(loader)]
            state = loader.state_dict()
        epochs = [*result(running), here]
        for records in epochs:
            assert [record.flaws(good) for record in records] == [[], []]
            assert [r.row_digest for r in records] == [r.row_digest for r in here]
        assert here[0].sizes == (16, 16, 16, 16, 2)
        assert epochs[0][0].sizes == (7,) * 9 + (3,)
        status = feed.status()
        assert {skipped.sample_id for skipped in status.skipped} == set(bad)
        for skipped in status.skipped:
            assert skipped.uri == tree.uri(skipped.sample_id)
            assert bad[skipped.sample_id] in skipped.reason
            assert skipped.times >= 2
        assert len(status.skipped) == len(bad)
        assert status.skipped_total == sum(skipped.times for skipped in status.skipped)
        assert (status.inexact_epochs, status.failed) == (0, None)
        assert state["left_out"] == []


def test_odd_files_are_prepared_rightly(skipping, tree):
    """Other encodings decode to the same picture, and the photo on its side is turned upright."""
    ids = ids_by_name(tree)
    with mbaas.join(skipping.name, consumer="me", format="numpy") as loader:
        seen = {
            int(i): np.array(row) for batch in loader for i, row in zip(batch["sample_id"], batch["image"], strict=True)
        }
    for name in ("16-bit.png", "turned.jpg"):
        difference = np.abs(seen[ids[name]].astype(int) - picture())
        assert difference.mean() < 3.0, name
    assert {ids[name] for name in odd_files()} <= set(seen)
    assert np.ptp(seen[ids["1x1.png"]], axis=(0, 1)).max() == 0
    assert np.ptp(seen[ids["grey.jpg"]], axis=2).max() == 0


def test_a_state_remembers_which_samples_were_left_out(skipping):
    with mbaas.join(skipping.name, consumer="me", format="numpy") as loader:
        loop = iter(loader)
        first = [int(i) for _ in range(4) for i in next(loop)["sample_id"]]
        loader.load_state_dict(loader.state_dict())
        rest = record_epoch(loader)
        assert len(first) == 64
        assert rest.ledger.exact
        assert rest.sizes == (2,)


def test_a_bad_sample_that_is_not_skipped_is_raised_in_every_consumer_with_file_and_reason(feed_name, tree):
    ids = ids_by_name(tree)
    reasons = {tree.uri(ids[name]): reason for name, (_, reason) in bad_files().items()}
    with serve(feed_name, tree, "raise") as feed:
        mbaas.announce(feed.name, ["one", "two"])
        errors = []
        for loader in [mbaas.join(feed.name, consumer=name, format="numpy") for name in ("one", "two")]:
            with pytest.raises(mbaas.BadSampleError) as caught:
                record_epoch(loader)
            errors.append(caught.value)
            loader.close()
        assert errors[0].uri in reasons
        assert reasons[errors[0].uri] in errors[0].reason
        assert errors[0].uri in str(errors[0])
        assert 'on_bad_sample="skip"' in str(errors[0])
        assert any(str(errors[0]) in note for note in feed.status().notes)
        assert str(errors[1]) == str(errors[0])


def test_after_a_bad_sample_the_epoch_does_not_look_over(feed_name, tmp_path):
    """The iterator raises the same error again, and so does a new loop."""
    (tmp_path / "class").mkdir()
    for number in range(24):
        image = cv2.imencode(".png", np.full((8, 8, 3), number, np.uint8))[1].tobytes()
        (tmp_path / "class" / f"{number:02d}.png").write_bytes(b"damaged" if number == 13 else image)
    with (
        serve(feed_name, mbaas.read_images(tmp_path), "raise") as feed,
        mbaas.join(feed.name, consumer="me", format="numpy") as loader,
    ):
        batches = iter(loader)
        for _ in range(3):
            with pytest.raises(mbaas.BadSampleError, match=r"13\.png"):
                for _ in batches:
                    pass
        assert (loader.ledger, loader.epoch) == (None, 0)
        with pytest.raises(mbaas.BadSampleError, match=r"13\.png"):
            record_epoch(loader)


def test_files_that_are_too_large_are_named_where_nothing_else_is_wrong(feed_name, tmp_path):
    """A third of the files, including the first, are sparse with 64 GiB. The probe continues; an error names one."""
    (tmp_path / "class").mkdir()
    for number in range(9):
        path = tmp_path / "class" / f"{number}.png"
        path.write_bytes(encoded(Image.fromarray(picture()), "PNG"))
        if number % 3 == 0:
            os.truncate(path, 64 << 30)
    with (
        serve(feed_name, mbaas.read_images(tmp_path), "raise") as feed,
        mbaas.join(feed.name, consumer="me", format="numpy") as loader,
    ):
        with pytest.raises(mbaas.BadSampleError) as caught:
            record_epoch(loader)
        assert Path(caught.value.uri).name in ("0.png", "3.png", "6.png")
        # 30 % of the session's object store of 512 MiB
        assert caught.value.reason == "it has 68,719,476,736 bytes, over the limit of 161,061,274 bytes for a sample"


def test_that_images_of_other_sizes_are_left_out_is_said_where_the_trial_and_the_feed_are_looked_at(
    feed_name, tmp_path, caplog
):
    """The pipeline does not resize the 36 images of three sizes, so only 12 are delivered."""
    (tmp_path / "class").mkdir()
    for number in range(36):
        image = Image.fromarray(picture((40, 30 + number % 3)))
        (tmp_path / "class" / f"{number:02d}.png").write_bytes(encoded(image, "PNG"))
    data, pipeline = mbaas.read_images(tmp_path), T.Pipeline([T.DecodeImage()])
    options = {"batch_size": BATCH_SIZE, "prep_workers": 1, "staging_bytes": 4 << 20, "on_bad_sample": "skip"}
    with mbaas.serve(feed_name, data, pipeline, **options) as feed, mbaas.join(feed_name, format="numpy") as loader:
        samples = [sum(len(batch["label"]) for batch in loader) for _ in range(2)]
        notes = [note for note in feed.status().notes if "left out as bad" in note]
    assert samples == [12, 12]
    assert len(notes) == 1
    (warned,) = [record.getMessage() for record in caplog.records if record.name == "mbaas.loader"]
    assert warned.startswith(f"feed {feed_name!r} skips 24 of 36 samples as bad in every epoch, ")
    assert "gives all the same size" in warned


def test_a_dataset_without_a_good_sample_is_refused_when_it_is_served(feed_name, tmp_path):
    (tmp_path / "class").mkdir()
    for number in range(3):
        (tmp_path / "class" / f"{number}.jpg").write_bytes(b"no picture")
    with pytest.raises(mbaas.BadSampleError, match=r"0.jpg: it is not JPEG, PNG, WebP or BMP"):
        serve(feed_name, mbaas.read_images(tmp_path), "skip")
