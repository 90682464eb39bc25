"""COCO annotations are read field by field as pycocotools reads them, and invalid files are refused with a reason."""

from __future__ import annotations

import json
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.compute as pc
import pyarrow.fs
import pytest
from contents import content
from pycocotools.coco import COCO

import mbaas
from mbaas import transforms as T
from mbaas.dataset import read_coco
from mbaas.errors import ConfigError, DatasetError
from mbaas.prep.geometry import make_masks
from mbaas.samples.fields import Field, Packed

IMAGES = 40
POINTS = 5

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept a copy keyword")


def described() -> dict[str, Any]:
    """Contents of a COCO file: unordered ids with gaps, images without objects, crowds, key points for some objects."""
    rng = np.random.default_rng(0)
    ids = (rng.permutation(IMAGES) * 1_000_003 + 139).tolist()
    images = [
        {"id": number, "file_name": f"{row % 3}/{number:012d}.jpg", "height": 40 + row, "width": 60, "license": 3}
        for row, number in enumerate(ids)
    ]
    categories = [
        {"id": number, "name": name, "supercategory": "x", "keypoints": ["nose"] * POINTS}
        for number, name in [(18, "dog"), (1, "person"), (90, "toothbrush")]
    ]
    annotations = []
    for number in range(130):
        image = images[int(rng.integers(3, IMAGES))]
        height, width = image["height"], image["width"]
        (left, top), (w, h) = rng.random(2) * (width / 2, height / 2), 1 + rng.random(2) * (width / 3, height / 3)
        box = [round(float(each), 2) for each in (left, top, w, h)]
        segmentation: Any = [[left, top, left + w, top, left + w / 2, top + h], [1, 1, 9, 1, 9, 9, 1, 9]]
        crowd = number % 11 == 0
        if crowd:
            segmentation = {"counts": [7, 30, height * width - 37], "size": [height, width]}
        annotation: dict[str, Any] = {
            "id": 900_000 - number,
            "image_id": image["id"],
            "category_id": (1, 18, 90)[number % 3],
            "bbox": box,
            "area": w * h / 2,
            "iscrowd": int(crowd),
            "segmentation": segmentation,
        }
        if number % 3 == 0:
            points = rng.random((POINTS, 2)) * (width, height)
            annotation |= {"keypoints": [x for point in points for x in (*point.round(1).tolist(), 2)]}
            annotation |= {"num_keypoints": POINTS}
        annotations.append(annotation)
    return {"info": {"year": 2017}, "images": images, "annotations": annotations, "categories": categories}


def written(folder: Path, said: Any, *, indent: int | None = None) -> Path:
    """Write the file and its images; the bytes of each image are its name."""
    for image in said["images"]:
        path = folder / "images" / image["file_name"]
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(image["file_name"])
    path = folder / "instances.json"
    path.write_text(json.dumps(said, indent=indent))
    return path


ALL = ("boxes", "labels", "area", "iscrowd", "keypoints", "segmentation", "image_id")


@pytest.mark.parametrize("indent", [None, 1])
def test_each_field_is_what_pycocotools_reads(tmp_path: Path, indent: int | None) -> None:
    path = written(tmp_path, described(), indent=indent)
    data, known = read_coco(path, tmp_path / "images", fields=ALL), COCO(path)
    category_ids = sorted(known.getCatIds())
    assert data.class_names == tuple(category["name"] for category in known.loadCats(category_ids))
    assert content(data) == [image["file_name"].encode() for image in known.dataset["images"]]
    values = data.values(np.arange(len(data)))
    assert list(values) == [*ALL, "annotated_size"]
    assert values["image_id"].tolist() == [image["id"] for image in known.dataset["images"]]
    sizes = np.array([(image["height"], image["width"]) for image in known.dataset["images"]])
    assert values["annotated_size"].tolist() == sizes.tolist()
    bounds = values["boxes"].own()[1]
    for row, image_id in enumerate(values["image_id"].tolist()):
        own = known.loadAnns(known.getAnnIds(imgIds=image_id))
        boxes, labels, area, iscrowd, points = (values[name][row : row + 1].own()[0] for name in ALL[:5])
        assert len(own) == len(boxes) == len(labels) == len(area) == len(iscrowd) == len(points)
        edges = [[x, y, x + w, y + h] for x, y, w, h in (each["bbox"] for each in own)]
        assert boxes.tolist() == np.array(edges, np.float32).reshape(-1, 4).tolist()
        assert [category_ids[label] for label in labels.tolist()] == [each["category_id"] for each in own]
        assert area.tolist() == [np.float32(each["area"]) for each in own]
        assert iscrowd.tolist() == [each["iscrowd"] for each in own]
        wanted = [each.get("keypoints", [0] * 3 * POINTS) for each in own]
        assert points.tolist() == np.array(wanted, np.float32).reshape(-1, POINTS, 3).tolist()
        kept = np.zeros(bounds[-1], bool)
        kept[bounds[row] : bounds[row + 1]] = True
        masks, bad = make_masks(values["segmentation"], kept, bounds, sizes, [], tuple(sizes[row].tolist()))
        assert bad == {}
        for mask, each in zip(masks.own()[0], own, strict=True):
            np.testing.assert_array_equal(mask, known.annToMask(each))
    assert not values["boxes"].lengths.all(), "some images have no object"


@pytest.mark.parametrize(
    ("width", "height", "size"),
    [
        (60, 40, [40, 60]),
        (60.0, "40", [40, 60]),
        (None, 40, [0, 0]),
        (60, 0, [0, 0]),
        ("wide", 40, [0, 0]),
        (float("nan"), 40, [0, 0]),
    ],
)
def test_the_size_of_an_image_is_zeros_where_it_cannot_be(tmp_path: Path, width: Any, height: Any, size: Any) -> None:
    said = described()
    said["images"][0] |= {"width": width, "height": height}
    data = read_coco(written(tmp_path, said), tmp_path / "images")
    assert data.values(np.arange(1))["annotated_size"].tolist() == [size]


def test_sizes_are_read_beside_what_lies_on_the_image_only(tmp_path: Path) -> None:
    said = described()
    path = written(tmp_path, said)
    for fields, has in [(["labels"], False), (["image_id"], False), (["boxes"], True), (["segmentation"], True)]:
        data = read_coco(path, tmp_path / "images", fields=fields)
        assert [field.name for field in data.fields] == [*fields, "annotated_size"][: 1 + has]
    for image in said["images"]:
        del image["width"], image["height"]
    bare = read_coco(written(tmp_path, said), tmp_path / "images")
    assert "annotated_size" not in [field.name for field in bare.fields], "the file has no image sizes"


def test_by_default_all_is_there_but_segmentations(tmp_path: Path) -> None:
    said = described()
    data = read_coco(written(tmp_path, said), tmp_path / "images")
    longest = int(data.values(np.arange(IMAGES))["labels"].lengths.max())
    assert data.fields == (
        Field("boxes", (None, 4), "float32", longest),
        Field("labels", (None,), "int64", longest),
        Field("area", (None,), "float32", longest),
        Field("iscrowd", (None,), "uint8", longest),
        Field("keypoints", (None, POINTS, 3), "float32", longest),
        Field("image_id", (), "int64"),
        Field("annotated_size", (2,), "int32"),
    )
    for annotation in said["annotations"]:
        annotation.pop("keypoints", None)
        del annotation["area"], annotation["iscrowd"], annotation["segmentation"]
    plain = read_coco(written(tmp_path, said), tmp_path / "images")
    assert [field.name for field in plain.fields] == [
        "boxes", "labels", "area", "iscrowd", "image_id", "annotated_size"
    ]  # fmt: skip
    first = int(np.flatnonzero(plain.values(np.arange(IMAGES))["boxes"].lengths)[0])
    values = {name: column[first : first + 1] for name, column in plain.values(np.arange(IMAGES)).items()}
    left, top, right, bottom = values["boxes"].own()[0][0].tolist()
    assert values["area"].own()[0][0] == pytest.approx((right - left) * (bottom - top), rel=1e-5)
    assert not values["iscrowd"].own()[0].any()
    few = read_coco(written(tmp_path, said), tmp_path / "images", fields=["image_id", "boxes"])
    assert ([field.name for field in few.fields], few.class_names) == (["boxes", "image_id", "annotated_size"], ())
    assert few.fingerprint != plain.fingerprint != data.fingerprint


def test_what_pycocotools_writes_itself_is_read(tmp_path: Path) -> None:
    """Model results: `loadRes` adds boxes and areas, and the run lengths are compressed."""
    import pycocotools.mask

    path = written(tmp_path, described())
    truth = COCO(path)
    results = [
        {"image_id": each["image_id"], "category_id": each["category_id"], "score": 0.5, "segmentation": runs}
        for each in truth.dataset["annotations"][:50]
        if (runs := {**(found := truth.annToRLE(each)), "counts": found["counts"].decode()})
    ]
    (tmp_path / "results.json").write_text(json.dumps(results))
    found = truth.loadRes(str(tmp_path / "results.json"))
    for annotation in found.dataset["annotations"]:
        annotation["bbox"], annotation["area"] = annotation["bbox"].tolist(), float(annotation["area"])
    written(tmp_path, found.dataset)
    data = read_coco(path, tmp_path / "images", fields=ALL[:2] + ALL[5:])
    values = data.values(np.arange(IMAGES))
    bounds = values["boxes"].own()[1]
    for row, image in enumerate(found.dataset["images"]):
        own = found.loadAnns(found.getAnnIds(imgIds=image["id"]))
        kept = np.zeros(50, bool)
        kept[bounds[row] : bounds[row + 1]] = True
        size = (image["height"], image["width"])
        masks, bad = make_masks(values["segmentation"], kept, bounds, np.array([size] * IMAGES), [], size)
        assert bad == {}
        assert masks.own()[0].sum(axis=(1, 2)).tolist() == [each["area"] for each in own]
        expected = [pycocotools.mask.decode(each["segmentation"]) for each in own]
        np.testing.assert_array_equal(masks.own()[0], np.array(expected).reshape(-1, *size))


def test_images_without_annotations_may_be_left_out(tmp_path: Path) -> None:
    path = written(tmp_path, described())
    whole = read_coco(path, tmp_path / "images", fields=ALL)
    lengths = whole.values(np.arange(IMAGES))["boxes"].lengths
    some = read_coco(path, tmp_path / "images", fields=ALL, keep_empty=False)
    wanted = whole.select(np.flatnonzero(lengths))
    assert len(some) == len(wanted) < IMAGES
    assert content(some) == content(wanted)
    for name, column in wanted.values(np.arange(len(wanted))).items():
        assert_equal(some.values(np.arange(len(some)))[name], column)


def test_a_filter_may_count_objects(tmp_path: Path) -> None:
    data = read_coco(written(tmp_path, described()), tmp_path / "images")
    lengths = data.values(np.arange(IMAGES))["labels"].lengths
    few = data.filter(pc.list_value_length(pc.field("labels")) <= 3)
    assert few.source_ids(np.arange(len(few))).tolist() == np.flatnonzero(lengths <= 3).tolist()
    assert 0 < len(few) < IMAGES


def assert_equal(one: Any, other: Any) -> None:
    if isinstance(one, Packed):
        for mine, its in zip(one.own(), other.own(), strict=True):
            np.testing.assert_array_equal(mine, its)
    else:
        np.testing.assert_array_equal(one, other)


def test_a_dataset_of_coco_travels_and_is_kept_in_a_listing(tmp_path: Path) -> None:
    path, listing = written(tmp_path, described()), tmp_path / "kept.parquet"
    options: dict[str, Any] = {"fields": ALL, "listing": listing}
    data = read_coco(path, tmp_path / "images", **options)
    (tmp_path / "images/0").rename(tmp_path / "gone")
    again = read_coco(path, tmp_path / "images", **options)  # reads the listing and checks no image
    sent = pickle.loads(pickle.dumps(data, protocol=5))
    for other in (again, sent):
        assert other.fingerprint == data.fingerprint
        assert (other.fields, other.class_names) == (data.fields, data.class_names)
        for name, column in data.values(np.arange(IMAGES)).items():
            assert_equal(other.values(np.arange(IMAGES))[name], column)
    (tmp_path / "gone").rename(tmp_path / "images/0")
    said = described()
    said["annotations"] = said["annotations"][:-1]
    written(tmp_path, said)
    changed = read_coco(path, tmp_path / "images", **options)
    assert len(changed.values(np.arange(IMAGES))["labels"].own()[0]) == 129
    with pytest.raises(DatasetError, match=r"was made with fields \(.*\), not None; remove it"):
        read_coco(path, tmp_path / "images", listing=listing)


@pytest.mark.parametrize("each", [0, 2])
def test_a_listing_keeps_kinds_where_all_images_have_equally_many_objects(tmp_path: Path, each: int) -> None:
    said = described()
    said["annotations"] = [
        {"image_id": image["id"], "category_id": 18, "bbox": [number, 0, 5, 5]}
        for image in said["images"]
        for number in range(each)
    ]
    path, listing = written(tmp_path, said), tmp_path / "kept.parquet"
    data = read_coco(path, tmp_path / "images", listing=listing)
    assert data.fields[0] == Field("boxes", (None, 4), "float32", each)
    again = read_coco(path, tmp_path / "images", listing=listing)
    assert (again.fields, again.fingerprint) == (data.fields, data.fingerprint)


def test_files_may_lie_in_any_file_system(tmp_path: Path) -> None:
    written(tmp_path, described())
    there = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    data = read_coco("instances.json", "images", filesystem=there)
    assert data.fingerprint == read_coco(tmp_path / "instances.json", tmp_path / "images").fingerprint
    assert content(data)[0] == described()["images"][0]["file_name"].encode()
    by_uri = read_coco((tmp_path / "instances.json").as_uri(), (tmp_path / "images").as_uri())
    assert by_uri.fingerprint == data.fingerprint


def test_ids_may_be_written_as_fractions(tmp_path: Path) -> None:
    path = written(tmp_path, described())
    wanted = read_coco(path, tmp_path / "images")
    path.write_text(re.sub(r'("(?:image_|category_)?id": \d+|"iscrowd": [01])', r"\1.0", path.read_text()))
    assert ".0" in path.read_text()
    assert read_coco(path, tmp_path / "images").fingerprint == wanted.fingerprint


def changed(*keys: Any, to: Any = None, drop: bool = False) -> dict[str, Any]:
    said = described()
    inner = said
    for key in keys[:-1]:
        inner = inner[key]
    if drop:
        del inner[keys[-1]]
    else:
        inner[keys[-1]] = to
    return said


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (changed("images", drop=True), "is no JSON of COCO's instances or key points: .* required field `images`"),
        (changed("images", to=[]), "has no images"),
        (changed("images", 3, "file_name", to=7), "Expected `str`, got `int` - at `\\$.images\\[3\\].file_name`"),
        (changed("images", 3, "file_name", to="../a.jpg"), "must name images below .*/images, got '../a.jpg'"),
        (changed("images", 3, "id", to=described()["images"][5]["id"]), "has the image \\d+ more than once"),
        (changed("images", 3, "id", to=1.5), "the ids of each image in .* must be whole numbers or strings, got 1.5"),
        (changed("images", 3, "id", to=10**30), "the ids of each image in .* must have at most 64 bits, got 1000"),
        (changed("images", 3, "id", to=-1e30), "the ids of each image in .* must have at most 64 bits, got -1000"),
        (changed("categories", 1, "id", to=18), "has the category 18 more than once"),
        (
            changed("annotations", 9, "bbox", to=[1, 2, 3]),
            "bbox of annotation 9 .* must have 4 numbers, got \\[1.0, 2.0, 3.0\\]",
        ),
        (changed("annotations", 9, "bbox", to=[1, 2, 3, "wide"]), "each bbox of .* must be of numbers: .*'wide'"),
        (changed("annotations", 9, "category_id", drop=True), "annotation 9 .* has no category_id"),
        (changed("annotations", 9, "keypoints", to=[1, 2, 3]), "must be equally many, .*, got lists of 3, 15"),
    ],
)
def test_a_file_that_cannot_be_is_refused(tmp_path: Path, said: Any, told: str) -> None:
    path = tmp_path / "instances.json"
    path.write_text(json.dumps(said))
    if "images" in said and "../" not in json.dumps(said):
        written(tmp_path, {**said, "images": [each for each in said["images"] if isinstance(each["file_name"], str)]})
        path.write_text(json.dumps(said))
    with pytest.raises(DatasetError, match=told):
        read_coco(path, tmp_path / "images")


@pytest.mark.parametrize(
    ("pattern", "instead"),
    [
        (r'("(?:image_|category_)?id": )(\d+)', r'\1"\2"'),
        (r'("iscrowd": )0', r"\1null"),
        (r'("file_name": ")', r"\1IMAGES/"),
        (r'("file_name": "\d)/', r"\1\\\\"),
        (r'("file_name": ")', r"\1/home/me/coco/images/"),
        (r'("file_name": ")(\d)/', r"\1D:\\\\coco\\\\images\\\\\2\\\\"),
        (r'("bbox": \[)([\d.]+), ', r'\1"\2", '),
        (r'("iscrowd": )(\d)', r'\1"\2"'),
        (r'("keypoints": \[)([\d.]+), ', r'\1"\2", '),
    ],
    ids=[
        "ids are strings",
        "iscrowd is null",
        "absolute names",
        "Windows' names",
        "absolute names of another machine",
        "absolute names of Windows",
        "numbers are strings",
        "iscrowd is a string",
        "key points are strings",
    ],
)
def test_what_tools_write_in_other_forms_is_the_same(tmp_path: Path, pattern: str, instead: str) -> None:
    path = written(tmp_path, described())
    wanted = read_coco(path, tmp_path / "images")
    content = re.sub(pattern, instead.replace("IMAGES", str(tmp_path / "images")), path.read_text())
    assert content != path.read_text()
    path.write_text(content)
    assert read_coco(path, tmp_path / "images").fingerprint == wanted.fingerprint


def test_a_name_may_have_a_backslash(tmp_path: Path) -> None:
    said = changed("images", 3, "file_name", to="a\\b.jpg")
    data = read_coco(written(tmp_path, said), tmp_path / "images")
    assert data.uri(3) == f"{tmp_path}/images/a\\b.jpg"


def test_ids_that_are_no_numbers_are_categories(tmp_path: Path) -> None:
    path = written(tmp_path, described())
    wanted = read_coco(path, tmp_path / "images")
    path.write_text(re.sub(r'("(?:image_|category_)?id": )(\d+)', r'\1"no-\2"', path.read_text()))
    data = read_coco(path, tmp_path / "images")
    texts = next(field.categories for field in data.fields if field.name == "image_id")
    ids = [texts[number] for number in data.values(np.arange(IMAGES))["image_id"]]
    assert ids == [f"no-{image['id']}" for image in described()["images"]]
    boxes, others = (each.values(np.arange(IMAGES))["boxes"] for each in (wanted, data))
    assert np.array_equal(boxes.values, others.values)
    assert np.array_equal(boxes.bounds, others.bounds)


@pytest.mark.parametrize("box", [None, [], [None] * 4, [float("nan")] * 4])
def test_annotations_without_a_box_are_left_out_and_counted(tmp_path: Path, box: Any) -> None:
    said = described()
    del said["annotations"][9]
    wanted = read_coco(written(tmp_path, said), tmp_path / "images")
    path = written(tmp_path, changed("annotations", 9, "bbox", to=box))
    with pytest.warns(UserWarning, match=r"instances.json: annotations left out: 1 without a box$") as said_so:
        assert read_coco(path, tmp_path / "images").fingerprint == wanted.fingerprint
    assert read_coco(path, tmp_path / "images", fields=["labels"]).fingerprint != wanted.fingerprint
    assert said_so[0].filename == __file__, "the warning points at the caller"


def test_annotations_of_images_that_were_taken_out_are_left_out_and_counted(tmp_path: Path) -> None:
    said = described()
    gone = said["images"].pop(5)["id"]
    count = sum(each["image_id"] == gone for each in said["annotations"])
    assert count > 1
    with pytest.warns(UserWarning, match=rf"annotations left out: {count} of images that the file does not list$"):
        data = read_coco(written(tmp_path, said), tmp_path / "images")
    assert len(data) == IMAGES - 1
    assert data.values(np.arange(IMAGES - 1))["boxes"].bounds[-1] == len(said["annotations"]) - count


def test_categories_without_names_have_their_ids(tmp_path: Path) -> None:
    said = described()
    said["categories"] = [{"id": 18}, {"id": 90, "name": 7}]
    with pytest.warns(UserWarning, match=r"have 1 category id that the file does not list, for instance 1;"):
        assert read_coco(written(tmp_path, said), tmp_path / "images").class_names == ("1", "18", "7")
    del said["categories"]
    assert read_coco(written(tmp_path, said), tmp_path / "images").class_names == ("1", "18", "90")


@pytest.mark.parametrize(("key", "value"), [("bbox", [1, 2, 3, 1e300]), ("area", -1e300), ("area", float("nan"))])
def test_numbers_out_of_range_are_clipped(tmp_path: Path, key: str, value: Any) -> None:
    data = read_coco(written(tmp_path, changed("annotations", 9, key, to=value)), tmp_path / "images")
    values = data.values(np.arange(IMAGES))
    assert np.isfinite(values["boxes"].values).all()
    assert np.isfinite(values["area"].values).all()
    assert values["boxes"].bounds[-1] == len(described()["annotations"])


@pytest.mark.parametrize(
    "text", [b"", b"[]", b'{"images": [', b"\xff", b'{"images": [{"id": 1, "file_name": "\xff"}]}']
)
def test_what_is_no_json_is_refused(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    with pytest.raises(DatasetError, match=rf"^{tmp_path}/a.json is no JSON of COCO's instances or key points: "):
        read_coco(tmp_path / "a.json", tmp_path)


def test_what_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=rf"^the file of annotations, {tmp_path}/a.json, is not there$"):
        read_coco(tmp_path / "a.json", tmp_path)
    with pytest.raises(DatasetError, match=rf"^the file of annotations, {tmp_path}, is not a file$"):
        read_coco(tmp_path, tmp_path)
    said = described()
    path = written(tmp_path, said)
    first, second = (said["images"][row]["file_name"] for row in (2, 7))
    for name in (first, second):
        (tmp_path / "images" / name).unlink()
    told = rf"^2 of 40 files that {path} names cannot be read; .* row 2 .* is not there: {tmp_path}/images/{first}$"
    with pytest.raises(DatasetError, match=told):
        read_coco(path, tmp_path / "images")
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps({**said, "annotations": []}))
    with pytest.raises(DatasetError, match=r"has annotations of none of its 40 images$"):
        read_coco(empty, tmp_path / "images", keep_empty=False)
    with pytest.raises(
        DatasetError, match=r"key points of .* must be equally many, three numbers each, got lists of none"
    ):
        read_coco(empty, tmp_path / "images", fields=["keypoints"])


def test_fields_that_there_are_not_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^fields must be of boxes, labels, .*, image_id, got 'bbox'$"):
        read_coco(tmp_path, tmp_path, fields=["bbox"])
    with pytest.raises(ConfigError, match=r"^fields must be a list of names, such as \['boxes'\], got 'boxes'$"):
        read_coco(tmp_path, tmp_path, fields="boxes")


def test_a_pipeline_takes_its_fields() -> None:
    """Field names and shapes match the defaults of the transforms."""
    fields = tuple(Field(name, shape, kind, 9) for name, shape, kind in [
        ("boxes", (None, 4), "float32"), ("labels", (None,), "int64"), ("keypoints", (None, 17, 3), "float32"),
        ("segmentation", (None,), "uint8"),
    ])  # fmt: skip
    boxes = T.Boxes(beside=("labels", "keypoints"))
    pipeline = T.Pipeline([T.DecodeImage(), T.Resize((9, 9))], boxes=boxes, keypoints=T.Keypoints(), masks=T.Masks())
    assert [field.name for field in pipeline.known(fields)] == ["boxes", "labels", "keypoints", "masks"]
    assert mbaas.read_coco is read_coco
