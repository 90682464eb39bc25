"""Decides which reader, options and pipeline fit a folder, from names and the beginnings of files."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from mbaas.base.units import count, counted, seconds
from mbaas.tools.recognize.look import MEDIA, Peek, Sight, ending, is_shard, numberless

TRAIN = ("train", "training")
VALIDATION = ("val", "valid", "validation", "dev", "test", "testing")
"""Names of parts, the preferred ones first."""

LABELS = ("label", "labels", "class", "cls", "class_name", "label_name", "category", "target", "species", "y", "kind")
"""Usual names of columns with labels."""

USUAL_SIDE, SMALL_SIDE = 224, 96
"""Pixels of images in minibatches; images of one size up to SMALL_SIDE are left as they are."""

MOST_WINDOW_S = 10.0
"""Longest window of sound, in seconds."""

_PLURAL = {"image": "image", "audio": "audio file", "array": "array"}
_READER = {"image": "read_images", "audio": "read_audio", "array": "read_arrays"}


class Path(str):
    """A path relative to the folder that was looked at."""

    __slots__ = ()


@dataclass(frozen=True)
class Step:
    """A transform in a feed file.

    Attributes:
        name: of the transform.
        value: its parameters by name, its first parameter, or None.
        comment: when to change it.
        is_off: whether it is written as a comment.
    """

    name: str
    value: Any = None
    comment: str = ""
    is_off: bool = False


@dataclass(frozen=True)
class Feed:
    """A feed for the data that were recognised.

    Attributes:
        what: the data, in words.
        data: the key ``data`` of the feed file; strings of type `Path` are to be made relative to the file.
        steps: the pipeline for training.
        plain: the same without random transforms, for validation.
        keys: further keys of the file, such as boxes.
        hints: commented lines about the data.
    """

    what: str
    data: Any
    steps: tuple[Step, ...]
    plain: tuple[Step, ...]
    keys: dict[str, Any] = field(default_factory=dict)
    hints: tuple[str, ...] = ()


@dataclass(frozen=True)
class Found:
    """The result: feeds for training and, if the folder has such a part, validation; and names of other data."""

    train: Feed
    validation: Feed | None = None
    others: tuple[str, ...] = ()


def recognize(sight: Sight) -> Found | None:
    """Return the feeds for a folder; None if nothing in it is known."""
    if (parts := _parts(sight)) is not None:
        return parts
    if len(folders := sight.tree.folders) == 1 and not any("/" not in file for file in sight.peeks):
        inner = recognize(sight.below(folders[0]))
        return None if inner is None else _found_in(inner, folders[0])
    found = [feed for kind in KINDS for feed in kind(sight)]
    if not found:
        return None
    first, *others = found
    validation = None
    if isinstance(first, tuple):
        first, validation = first
    names = tuple(each[0].what if isinstance(each, tuple) else each.what for each in others)
    return Found(first, validation, names)


def known_endings() -> str:
    """Return the kinds of data that are recognised, in words."""
    shown = {kind: [end for end, of in MEDIA.items() if of == kind][:4] for kind in _READER}
    files = "; ".join(f"{_PLURAL[kind]}s ({', '.join(endings)} ...)" for kind, endings in shown.items())
    return (
        f"{files}, in one folder per class or in any folders; tables that name files (.csv, .tsv, .jsonl, .json, "
        ".parquet); COCO annotations (.json); Parquet files with images; tar shards; TFRecord files; folders of "
        "save_to_disk of Hugging Face datasets"
    )


# ---- parts for training and validation ----


def _parts(sight: Sight) -> Found | None:
    """Return the feeds of a folder with one folder for training and one for validation."""
    folders = {folder.lower(): folder for folder in sight.tree.folders}
    train = next((folders[name] for name in TRAIN if name in folders), None)
    if train is None or "dataset_dict.json" in sight.peeks:
        return None
    found = recognize(sight.below(train))
    # Annotations next to the folders, such as COCO annotations, name their files.
    if found is None or any("annotations" in folder.lower() for folder in folders):
        return None
    other = next((folders[name] for name in VALIDATION if name in folders), None)
    validation = None if other is None else recognize(sight.below(other))
    used = (train,) if validation is None else (train, other)
    others = (*found.others, *(f"the folder {name}" for name in sight.tree.folders if name not in used))
    feed = _moved(found.train, train)
    if validation is None or other is None:
        return Found(feed, others=others)
    return Found(feed, _moved(validation.train, other), (*others, *validation.others))


def _found_in(found: Found, folder: str) -> Found:
    validation = None if found.validation is None else _moved(found.validation, folder)
    return Found(_moved(found.train, folder), validation, found.others)


def _moved(feed: Feed, folder: str) -> Feed:
    return replace(feed, data=mapped(feed.data, lambda path: Path(f"{folder}/{path}".rstrip("/."))))


def mapped(data: Any, change: Callable[[Path], Any]) -> Any:
    """Return data with each `Path` changed."""
    if isinstance(data, Path):
        return change(data)
    if isinstance(data, dict):
        return {key: mapped(value, change) for key, value in data.items()}
    return [mapped(each, change) for each in data] if isinstance(data, list) else data


def _paired(feeds: Sequence[tuple[str, Feed]]) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield the feeds named like parts for training and validation together, and then the others."""
    train = next((feed for name, feed in feeds if _is_named(name, TRAIN)), None)
    validation = next((feed for word in VALIDATION for name, feed in feeds if _is_named(name, (word,))), None)
    if train is not None:
        yield train if validation is None or validation is train else (train, validation)
    yield from (feed for _, feed in feeds if train is None or (feed is not train and feed is not validation))


def _is_named(name: str, words: Sequence[str]) -> bool:
    return any(re.search(rf"(^|[^a-z]){word}([^a-z]|$)", name.lower()) for word in words)


# ---- pipelines ----


def _pipelines(kind: str, peeks: Sequence[Peek]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[str, ...]]:
    """Return the pipelines for training and for validation, and hints."""
    if kind == "audio":
        return _sound(peeks)
    return _arrays(peeks) if kind == "array" else _images(peeks)


def _images(peeks: Sequence[Peek]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[str, ...]]:
    sizes = [peek.size for peek in peeks if peek.size is not None]
    flip = Step("RandomHorizontalFlip", comment="leave it out where left and right differ, as in digits and text")
    normalize = Step("Normalize", {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}, "", is_off=True)
    if sizes and len(set(sizes)) == 1 and max(sizes[0]) <= SMALL_SIDE:
        decode = Step("DecodeImage", comment=f"{sizes[0][0]}x{sizes[0][1]} pixels, so no resizing")
        return (decode, replace(flip, is_off=True), normalize), (decode, normalize), ()
    side = USUAL_SIDE
    if sizes and (usual := median(min(size) for size in sizes)) < USUAL_SIDE:
        side = max(16, int(usual) // 16 * 16)
    size = "pixels of the square images in minibatches"
    decode = Step("DecodeImage")
    plain = (decode, Step("Resize", round(side * 8 / 7)), Step("CenterCrop", side, size), normalize)
    return (decode, Step("RandomResizedCrop", side, size), flip, normalize), plain, ()


def _sound(peeks: Sequence[Peek]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[str, ...]]:
    known = [peek for peek in peeks if peek.rate]
    rate = Counter(peek.rate for peek in known).most_common(1)[0][0] if known else 16_000
    window_s = min(MOST_WINDOW_S, median(peek.seconds for peek in known)) if known else 1.0
    window = max(1, int(window_s * rate))
    decode = Step("DecodeAudio", {"rate": rate}, "Hz; sound of other rates is resampled")
    spectrum = Step(
        "MelSpectrogram", {"n_fft": 2 ** round(rate * 0.032).bit_length() // 2, "hop_length": rate // 100, "n_mels": 64}
    )
    rest = (spectrum, Step("AmplitudeToDB", {"top_db": 80}, "leave out both for waveforms"))
    length = f"samples: {seconds(window / rate)}; shorter sound is padded with zeros"
    masks = Step(
        "SpecAugment", {"n_time_masks": 2, "time_mask_param": 20, "n_freq_masks": 2, "freq_mask_param": 8}, is_off=True
    )
    hints = () if known else ("Sound needs soundfile and soxr: pip install soundfile soxr",)
    return (
        (decode, Step("RandomCrop", window, length), *rest, masks),
        (decode, Step("CropOrPad", window, length), *rest),
        hints,
    )


def _arrays(peeks: Sequence[Peek]) -> tuple[tuple[Step, ...], tuple[Step, ...], tuple[str, ...]]:
    known = [peek.arrays for peek in peeks if peek.arrays]
    options: dict[str, Any] = {}
    if not known:
        return (Step("DecodeArray"),), (Step("DecodeArray"),), ()
    # The array with the most numbers is the sample; others are usually labels.
    key = max(known[0], key=lambda name: math.prod(known[0][name][1]))
    if key:
        options["format"] = "npz"
    if len(known[0]) > 1:
        options["key"] = key
    shapes = [arrays[key][1] for arrays in known if key in arrays]
    dtype = known[0][key][0]
    hints = (f"Arrays {dtype} of shape {list(shapes[0])}" + (", and others" if len(set(shapes)) > 1 else ""),)
    if len(set(shapes)) == 1 or len({len(shape) for shape in shapes}) > 1 or not shapes[0]:
        step = Step("DecodeArray", options or None)
        return (step,), (step,), hints
    differing = max(axis for axis in range(len(shapes[0])) if len({shape[axis] for shape in shapes}) > 1) + 1
    if differing == 1 and len(shapes[0]) <= 2:
        options |= {"dtype": dtype, "shape": [None, *shapes[0][1:]], "longest": 2 * max(shape[0] for shape in shapes)}
        step = Step("DecodeArray", options, "longest: the greatest first length; a longer array is a bad sample")
        return (step,), (step,), hints
    least = [min(shape[axis] for shape in shapes) for axis in range(differing)]
    size = "lengths along the first axes; shorter arrays are padded with zeros"
    decode = Step("DecodeArray", options or None)
    return (decode, Step("RandomCrop", least, size)), (decode, Step("CropOrPad", least, size)), hints


# ---- kinds of data ----


def _data(reader: str, path: str, **options: tuple[Any, Any]) -> dict[str, Any]:
    """Return the key ``data`` of a feed file; options are pairs of a value and the default, which is left out."""
    given = {name: value for name, (value, default) in options.items() if value != default}
    return {reader: {"path": Path(path), **given} if given else Path(path)}


Kind = Callable[[Sight], Iterator["Feed | tuple[Feed, Feed]"]]


def _saved(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for folders written by save_to_disk of Hugging Face datasets."""
    splits = sight.peeks.get("dataset_dict.json")
    if splits is None:
        if (info := sight.peeks.get("dataset_info.json")) is not None and info.kind == "huggingface":
            yield _huggingface(info, None)
        return
    feeds = [
        (name, _huggingface(info, name))
        for name in splits.splits
        if (info := sight.peeks.get(f"{name}/dataset_info.json")) is not None
    ]
    yield from _paired(feeds)


def _huggingface(info: Peek, split: str | None) -> Feed:
    media = [(name, kind) for name, kind in info.features.items() if kind in ("Image", "Audio")]
    column, kind = media[0] if media else ("image", "Image")
    labels = [] if "label" in info.features else [name for name, of in info.features.items() if of == "ClassLabel"]
    label = labels[0] if labels else None
    steps, plain, hints = _pipelines("audio" if kind == "Audio" else "image", ())
    part = "" if split is None else f", split {split}"
    data = _data(
        "read_huggingface", "", split=(split, None), image_column=(column, "image"), label_column=(label, None)
    )
    return Feed(f"a dataset of Hugging Face datasets{part}", data, steps, plain, hints=hints)


def _coco(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for COCO annotations."""
    feeds = []
    for file, peek in sight.peeks.items():
        if peek.kind == "coco" and "file_name" in peek.roots:
            images = Path(peek.roots["file_name"])
            named = peek.columns["file_name"]
            sizes = [
                sight.peeks[name] for name in sight.peeks if name.startswith(str(images)) and sight.peeks[name].size
            ]
            data = {"read_coco": {"path": Path(file), "images": images or Path(".")}}
            boxes = {"boxes": {"field": "boxes", "beside": ["labels", "area", "iscrowd"]}}
            side = 512 if not sizes or median(min(each.size or (0, 0)) for each in sizes) >= 256 else 256
            size = Step("Resize", [side, side], "height and width; boxes move along")
            decode, flip = Step("DecodeImage"), Step("RandomHorizontalFlip")
            what = f"COCO annotations {file} of images such as {named[0]}"
            feeds.append((file, Feed(what, data, (decode, size, flip), (decode, size), boxes)))
    # Instances before keypoints and captions, whose files have the same images.
    feeds.sort(key=lambda each: "instances" not in each[0])
    yield from _paired(feeds)


def _class_folders(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for files that are one sample each, with a folder per class."""
    for kind, number in _media(sight):
        if _are_classes(sight, kind):
            where = f" in {count(len(sight.tree.folders))} class folders"
            yield _tree(sight, kind, number, where, Path() if kind == "image" else {_READER[kind]: Path()})


def _are_classes(sight: Sight, kind: str) -> bool:
    tree = sight.tree
    with_files = [folder for folder in tree.folders if _has(tree.within(folder), kind)]
    return len(with_files) > 1 and with_files == tree.folders and not _has(tree.files.get("", ()), kind)


def datasets_in(sight: Sight) -> list[str]:
    """Return the folders that are separate datasets, if there are several. Then the user must name one of them."""
    tree = sight.tree
    if any(folder.lower() in (*TRAIN, *VALIDATION) for folder in tree.folders) or any(
        "/" not in file for file in sight.peeks
    ):
        return []
    found = [
        folder
        for folder in tree.folders
        if not any(ending(file) in MEDIA for file in tree.files.get(folder, ())) and _is_dataset(sight.below(folder))
    ]
    return found if len(found) > 1 and found == tree.folders else []


def _is_dataset(sight: Sight) -> bool:
    return _parts(sight) is not None or any(True for kind in KINDS[:-1] for _ in kind(sight))


def _any_folders(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for files that are one sample each, without classes."""
    for kind, number in _media(sight):
        if _are_classes(sight, kind):
            continue
        yield _tree(sight, kind, number, ", without classes", _data(_READER[kind], "", classes=(False, True)))


def _media(sight: Sight) -> list[tuple[str, int]]:
    """Return the kinds of files that are samples, and their number, the most frequent first."""
    return Counter(MEDIA[ending(file)] for file in sight.tree.all_files if ending(file) in MEDIA).most_common()


def _tree(sight: Sight, kind: str, number: int, where: str, data: Any) -> Feed:
    files = [file for file in sight.tree.all_files if MEDIA.get(ending(file)) == kind]
    endings = ", ".join(end for end, _ in Counter(map(ending, files)).most_common(3))
    peeks = [peek for peek in sight.peeks.values() if peek.kind == kind]
    steps, plain, hints = _pipelines(kind, peeks)
    some = "" if sight.tree.is_whole else "at least "
    what = f"{some}{counted(number, _PLURAL[kind])} ({endings}){where}{_sizes(peeks)}"
    return Feed(what, data, steps, plain, hints=hints)


def _has(files: Sequence[str], kind: str) -> bool:
    return any(MEDIA.get(ending(file)) == kind for file in files)


def _sizes(peeks: Sequence[Peek]) -> str:
    sizes = sorted({peek.size for peek in peeks if peek.size is not None}, key=lambda size: size[0] * size[1])
    if not sizes:
        return ""
    least, most = (f"{width}x{height}" for width, height in (sizes[0], sizes[-1]))
    return f", {least} pixels" if least == most else f", for example {least} and {most} pixels"


def _tables(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for tables that name files."""
    feeds = []
    for file, peek in sight.peeks.items():
        if peek.kind not in ("table", "parquet") or not peek.roots:
            continue
        column = "uri" if "uri" in peek.roots else next(iter(peek.roots))
        own, root = file.rpartition("/")[0], peek.roots[column]
        kind = MEDIA[ending(next(value for value in peek.columns[column] if isinstance(value, str)))]
        label = _label_column(peek, column)
        data = _data(
            "read_manifest",
            file,
            uri_column=(column, "uri"),
            label_column=(label or "label", "label"),
            root=(None if root in ("://", own) else Path(root or "."), None),
        )
        steps, plain, hints = _pipelines(kind, [each for each in sight.peeks.values() if each.kind == kind])
        labelled = f", labels in column {label}" if label is not None else ""
        feeds.append((file, Feed(f"the table {file} of {_PLURAL[kind]}s{labelled}", data, steps, plain, hints=hints)))
    yield from _paired(feeds)


def _label_column(peek: Peek, uri: str) -> str | None:
    names = {name.lower(): name for name in peek.columns if name != uri}
    if (named := next((names[name] for name in LABELS if name in names), None)) is not None:
        return named
    for name, values in peek.columns.items():  # a string column whose values repeat
        texts = [value for value in values if isinstance(value, str)]
        if (
            name != uri
            and len(texts) == len(values) > 3
            and len(set(texts)) <= len(texts) // 2
            and not _is_number(texts[0])
        ):
            return name
    return None


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[-+.\d]+([eE][-+]?\d+)?", text) is not None


def _parquets(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for Parquet files that contain images."""
    feeds = []
    for pattern, files in _patterns(sight, "parquet"):
        peek = sight.peeks[files[0]]
        column = next((name for name, values in peek.columns.items() if _is_encoded(values)), None)
        if column is None:
            continue
        label = _label_column(peek, column) or "label"
        columns = {"image_column": (column, "image"), "label_column": (label, "label")}
        data = _data("read_parquet", pattern, unpacked=(Path("unpacked"), None), **columns)
        steps, plain, _ = _images([Peek("image", size=_size_in(peek.columns[column]))])
        hint = "unpacked: the images are written there once, because Parquet has no random access; all nodes read it"
        what = f"{_number_of(sight, files, 'Parquet file')} with images, {pattern}"
        feeds.append((pattern, Feed(what, data, steps, plain, hints=(hint,))))
    yield from _paired(feeds)


def _content(value: Any) -> Any:
    return value.get("bytes") if isinstance(value, dict) else value


def _is_encoded(values: Sequence[Any]) -> bool:
    return bool(values) and any(_is_image(_content(value)) for value in values)


def _is_image(content: Any) -> bool:
    return isinstance(content, bytes) and content.startswith((b"\x89PNG", b"RIFF", b"\xff\xd8", b"BM"))


def _size_in(values: Sequence[Any]) -> tuple[int, int] | None:
    from mbaas.tools.recognize.look import image_size

    return next((image_size(content) for value in values if _is_image(content := _content(value))), None)


def _tars(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for WebDataset shards."""
    feeds = []
    for pattern, files in _patterns(sight, "tar"):
        peek = sight.peeks[files[0]]
        media = [member for member in peek.members if f".{member.rpartition('.')[2]}" in MEDIA]
        if not media:
            continue
        kind = MEDIA[f".{media[0].rpartition('.')[2]}"]
        image = None if media[0] in ("jpg", "jpeg", "png", "webp") else media[0]
        label = "cls" if "cls" in peek.members else _label_column(peek, "")
        data = _data("read_webdataset", pattern, image_column=(image, None), label_column=(label, "cls"))
        steps, plain, hints = _pipelines(kind, ())
        what = f"{_number_of(sight, files, 'tar shard')}, {pattern}, whose samples have {', '.join(peek.members)}"
        feeds.append((pattern, Feed(what, data, steps, plain, hints=hints)))
    yield from _paired(feeds)


def _records(sight: Sight) -> Iterator[Feed | tuple[Feed, Feed]]:
    """Yield feeds for TFRecord files."""
    feeds = []
    for pattern, files in _patterns(sight, "tfrecord"):
        peek = sight.peeks[files[0]]
        column = next(
            (name for name, values in peek.columns.items() if len(values) == 1 and _is_image(values[0])), None
        )
        if column is None:
            continue
        names = [name for name, values in peek.columns.items() if len(values) == 1 and name != column]
        named: list[str] = [name for name in ("image/class/label", "label") if name in names]
        named += [name for word in LABELS for name in names if name.lower().endswith(word)]
        label = named[0] if named else None
        columns = {"image_column": (column, "image/encoded"), "label_column": (label, "image/class/label")}
        data = _data("read_tfrecord", pattern, **columns)
        steps, plain, hints = _images([Peek("image", size=_size_in(peek.columns[column]))])
        what = f"{_number_of(sight, files, 'TFRecord file')}, {pattern}, with {', '.join(peek.columns)}"
        feeds.append((pattern, Feed(what, data, steps, plain, hints=hints)))
    yield from _paired(feeds)


def _patterns(sight: Sight, kind: str) -> Iterator[tuple[str, list[str]]]:
    """Yield files of one kind in groups whose names differ in one number, with the pattern that names them."""
    peeked = {file for file, peek in sight.peeks.items() if peek.kind == kind}
    groups: dict[str, list[str]] = {}
    for file in sight.tree.all_files if peeked else ():
        if is_shard(file.rpartition("/")[2]):
            groups.setdefault(numberless(file), []).append(file)
    for files in groups.values():
        if any(file in peeked for file in files):
            yield pattern_of(files), sorted(files, key=lambda file: file not in peeked)


def _number_of(sight: Sight, files: Sequence[str], what: str) -> str:
    some = "" if sight.tree.has_all_folders else "at least "  # in folders that were not listed may be others
    return f"{some}{counted(len(files), what)}"


def pattern_of(files: Sequence[str]) -> str:
    """Return a pattern with braces for names that differ in one number, such as a-{0..7}.tar, or in a list."""
    if len(files) == 1:
        return files[0]
    parts = [re.split(r"(\d+)", file) for file in files]
    differing = [index for index in range(len(parts[0])) if len({part[index] for part in parts}) > 1]
    (index, *more) = differing
    numbers = sorted((part[index] for part in parts), key=int)
    is_range = not more and [int(number) for number in numbers] == list(range(int(numbers[0]), int(numbers[-1]) + 1))
    if not is_range:
        return "{" + ",".join(files) + "}"
    start, end = "".join(parts[0][:index]), "".join(parts[0][index + 1 :])
    return f"{start}{{{numbers[0]}..{numbers[-1]}}}{end}"


KINDS: tuple[Kind, ...] = (_saved, _coco, _class_folders, _tables, _parquets, _tars, _records, _any_folders)
"""The kinds of data, in the order of preference: data with labels first."""
