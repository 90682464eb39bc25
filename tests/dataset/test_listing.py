"""`read_images` lists the images of a tree in the order of torchvision, and reports why a tree cannot be listed."""

from __future__ import annotations

import os
import re
import traceback
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fsspec.implementations.local import LocalFileSystem as FsspecLocal  # type: ignore[import-untyped]
from fsspec.implementations.memory import MemoryFileSystem  # type: ignore[import-untyped]
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow.fs import (
    FileInfo,
    FileSelector,
    FileSystem,
    FSSpecHandler,
    LocalFileSystem,
    PyFileSystem,
    SubTreeFileSystem,
)

from mbaas.dataset import read_images
from mbaas.dataset.readers.folders import IMAGE_EXTENSIONS
from mbaas.dataset.table import TableDataset
from mbaas.errors import ConfigError, DatasetError


def grow(root: Path, *names: str) -> Path:
    """Create files below a folder, each as long as its name; a name that ends in / is a folder."""
    for name in names:
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(name)
    return root


def listed(uri: str | Path, **options: Any) -> list[tuple[str, int]]:
    """(name relative to the root, label) of each image."""
    data = read_images(uri, **options)
    assert isinstance(data, TableDataset)
    return list(zip(data.table["uri"].to_pylist(), data.table["label"].to_pylist(), strict=True))


def test_folders_are_classes_and_images_lie_at_any_depth_below(tmp_path: Path) -> None:
    grow(tmp_path, "dog/1.jpg", "cat/2.jpg", "cat/1.jpg", "cat/young/far/3.png", "Eel/1.jpeg")
    data = read_images(tmp_path)
    assert data.class_names == ("Eel", "cat", "dog")
    assert len(data) == 5
    names = ["Eel/1.jpeg", "cat/1.jpg", "cat/2.jpg", "cat/young/far/3.png", "dog/1.jpg"]
    assert [data.uri(i) for i in range(5)] == [f"{tmp_path}/{name}" for name in names]
    assert data.labels(np.array([4, 0, 1, 1])).tolist() == [2, 0, 1, 1]
    assert data.lengths(np.array([3, 0])).tolist() == [len(names[3]), len(names[0])]
    assert data.labels(np.arange(5)).dtype == data.lengths(np.arange(5)).dtype == np.int64
    assert data.total_bytes == sum(map(len, names))
    assert repr(data) == (
        f"Dataset({str(tmp_path)!r}, samples=5, classes=3, bytes={data.total_bytes}, fingerprint={data.fingerprint!r})"
    )


def image_folder(root: Path) -> list[tuple[str, int]]:
    """The walk of torchvision.datasets.folder.make_dataset (0.20), with names relative to the root."""
    found = []
    for label, name in enumerate(sorted(entry.name for entry in os.scandir(root) if entry.is_dir())):
        for folder, _, files in sorted(os.walk(root / name, followlinks=True)):
            images = [file for file in sorted(files) if file.lower().endswith((".jpg", ".jpeg", ".png"))]
            found += [(str(Path(folder, file).relative_to(root)), label) for file in images]
    return found


parts = st.text(alphabet="aB1-_ é+", min_size=1, max_size=3).filter(lambda part: part.strip(" ") == part)
trees = st.lists(st.lists(parts, min_size=2, max_size=4), min_size=1, max_size=12)


@given(tree=trees)
@settings(max_examples=40, deadline=None)
def test_the_order_is_that_of_torchvisions_image_folder(
    tree: list[list[str]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    root = grow(tmp_path_factory.mktemp("tree"), *("/".join(names) + ".Jpg" for names in tree))
    assert listed(root) == image_folder(root)


def test_the_order_of_sub_folders_is_that_of_their_whole_paths(tmp_path: Path) -> None:
    """'-' sorts before '/', so b-c precedes b/d, although b itself is first."""
    grow(tmp_path, "x/b/d/1.jpg", "x/b-c/1.jpg", "x/b/1.jpg", "x/z.jpg")
    assert [name for name, _ in listed(tmp_path)] == ["x/z.jpg", "x/b/1.jpg", "x/b-c/1.jpg", "x/b/d/1.jpg"]


def test_hidden_files_other_endings_and_files_beside_the_classes_are_left_out(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg", "cat/.2.jpg", "cat/.cache/3.jpg", ".git/4.jpg", "cat/notes.txt", "5.jpg")
    grow(tmp_path, "cat/6jpg", "cat/jpg")
    with pytest.warns(
        UserWarning, match=r"left out 2 files whose names do not end as images do, for instance 'cat/6jpg'"
    ):
        assert listed(tmp_path) == [("cat/1.jpg", 0)]


def test_a_hidden_root_is_not_hidden(tmp_path: Path) -> None:
    grow(tmp_path, ".data/cat/1.jpg")
    assert listed(tmp_path / ".data") == [("cat/1.jpg", 0)]


def test_endings_count_in_any_case_and_can_be_chosen(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.JPG", "cat/2.JpEg", "cat/3.pNg")
    assert [name for name, _ in listed(tmp_path)] == ["cat/1.JPG", "cat/2.JpEg", "cat/3.pNg"]
    grow(tmp_path, "cat/4.npy")
    assert [name for name, _ in listed(tmp_path, extensions=(".NPY", ".jpg"))] == ["cat/1.JPG", "cat/4.npy"]
    assert [name for name, _ in listed(tmp_path, extensions=".npy")] == ["cat/4.npy"]


def test_an_image_that_our_engines_cannot_decode_is_not_dropped_in_silence(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg", "dog/2.gif", "dog/3.TIFF", "dog/4.jpg", "dog/5.xml")
    with pytest.warns(UserWarning, match=r"left out 2 files .*, for instance 'dog/2.gif'; .*extensions=$") as caught:
        assert listed(tmp_path) == [("cat/1.jpg", 0), ("dog/4.jpg", 1)]
    assert str(tmp_path) in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points to the caller's line"


def test_links_are_followed_and_those_that_lead_nowhere_are_left_out(tmp_path: Path) -> None:
    grow(tmp_path, "far/1.jpg", "tree/cat/2.jpg")
    (tmp_path / "tree/dog").symlink_to(tmp_path / "far")
    (tmp_path / "tree/cat/3.jpg").symlink_to(tmp_path / "far/1.jpg")
    (tmp_path / "tree/cat/4.jpg").symlink_to(tmp_path / "nowhere")
    assert listed(tmp_path / "tree") == [("cat/2.jpg", 0), ("cat/3.jpg", 0), ("dog/1.jpg", 1)]


def test_links_that_run_in_a_circle_are_listed_once(tmp_path: Path) -> None:
    """Followed to the kernel's limit of 40, these links make 3^40 paths, and dogs are also listed as cats."""
    grow(tmp_path, "tree/cat/1.jpg", "tree/cat/in/2.jpg", "tree/dog/3.jpg")
    for name in ("up", "in/up", "in/to-itself"):
        (tmp_path / "tree/cat" / name).symlink_to(tmp_path / "tree")
    assert listed(tmp_path / "tree") == [("cat/1.jpg", 0), ("cat/in/2.jpg", 0), ("dog/3.jpg", 1)]


def test_links_that_multiply_are_an_error_and_no_wait(tmp_path: Path) -> None:
    """Thirty folders, each with two links to the next, make 2^30 paths (a billion) without a circle."""
    grow(tmp_path, "tree/cat/1.jpg", *(f"far/{depth}/" for depth in range(31)))
    for depth in range(30):
        for link in ("a", "b"):
            (tmp_path / "far" / str(depth) / link).symlink_to(tmp_path / "far" / str(depth + 1))
    (tmp_path / "tree/cat/far").symlink_to(tmp_path / "far/0")
    with pytest.raises(DatasetError, match=r"tree/cat: links lead to '.*/far/\d+' in more than 1,000 ways"):
        read_images(tmp_path / "tree")


def test_what_is_no_file_is_left_out(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg", "cat/folder.jpg/2.jpg")
    os.mkfifo(tmp_path / "cat/pipe.jpg")
    (tmp_path / "cat/zero.jpg").symlink_to("/dev/zero")
    (tmp_path / "cat/itself.jpg").symlink_to("itself.jpg")
    assert listed(tmp_path) == [("cat/1.jpg", 0), ("cat/folder.jpg/2.jpg", 0)]


def test_an_empty_file_is_a_sample_of_length_zero(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg")
    (tmp_path / "cat/0.jpg").touch()
    assert read_images(tmp_path).lengths(np.arange(2)).tolist() == [0, len("cat/1.jpg")]


def filesystems(root: Path) -> list[tuple[str, FileSystem | None]]:
    """Equivalent (URI, file system) pairs for one tree."""
    return [
        (f"{root}/", None),
        (root.as_uri(), None),
        (os.path.relpath(root), None),
        (os.path.relpath(root), LocalFileSystem()),
        ("", SubTreeFileSystem(str(root), LocalFileSystem())),
        (f"/{root.name}/", SubTreeFileSystem(str(root.parent), LocalFileSystem())),
        (str(root), PyFileSystem(FSSpecHandler(FsspecLocal()))),
    ]


@pytest.mark.parametrize("way", range(7))
def test_every_way_to_name_a_folder_lists_and_reads_the_same(tmp_path: Path, way: int) -> None:
    root = grow(tmp_path / "tree with spaces", "cat/1.jpg", "dog/a b.jpg", "dog/å/2.jpg")
    uri, filesystem = filesystems(root)[way]
    data = read_images(uri, filesystem=filesystem)
    assert data.fingerprint == read_images(root).fingerprint
    for sample_id, name in enumerate(["cat/1.jpg", "dog/a b.jpg", "dog/å/2.jpg"]):
        buffer = np.zeros(len(name.encode()), np.uint8)
        data.reader().read_into(sample_id, buffer)
        assert buffer.tobytes().decode() == name
        assert data.uri(sample_id).endswith(name)


@pytest.mark.parametrize("uri", ["bucket", "/bucket", "bucket/"])
def test_a_file_system_may_answer_with_another_leading_slash(uri: str) -> None:
    memory = MemoryFileSystem()
    memory.pipe({"/bucket/cat/1.jpg": b"one", "/bucket/dog/2.jpg": b"two"})
    try:
        filesystem = PyFileSystem(FSSpecHandler(memory))
        assert listed(uri, filesystem=filesystem) == [("cat/1.jpg", 0), ("dog/2.jpg", 1)]
    finally:
        memory.rm("/bucket", recursive=True)


def test_a_remote_listing_is_in_order_though_many_threads_make_it(tmp_path: Path) -> None:
    names = [f"class {label:02}/{i}.jpg" for label in range(30) for i in range(3)]
    grow(tmp_path, *names)
    remote = PyFileSystem(FSSpecHandler(FsspecLocal()))
    assert listed(tmp_path, filesystem=remote) == [(name, i // 3) for i, name in enumerate(names)]


@pytest.mark.parametrize("filesystem", [None, LocalFileSystem()])
def test_a_relative_path_stays_good_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, filesystem: FileSystem | None
) -> None:
    monkeypatch.chdir(grow(tmp_path, "data/cat/1.jpg"))
    data = read_images("data/../data", filesystem=filesystem)
    monkeypatch.chdir("/")
    assert data.root == f"{tmp_path}/data"
    data.reader().read_into(0, np.zeros(len("data/cat/1.jpg"), np.uint8))


def test_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(grow(tmp_path, "data/cat/1.jpg")))
    assert listed("~/data") == [("cat/1.jpg", 0)]


def refusal(uri: str | Path, **options: Any) -> str:
    with pytest.raises(DatasetError) as caught:
        read_images(uri, **options)
    return str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nope") == (
        f"{tmp_path}/nope does not exist; "
        "expected a folder with a folder of images for each class, as in cat/1.jpg, dog/2.jpg"
    )


def test_a_file_instead_of_a_folder_is_named(tmp_path: Path) -> None:
    assert refusal(grow(tmp_path, "file.jpg") / "file.jpg").startswith(f"{tmp_path}/file.jpg is a file; expected")


def test_an_empty_folder_is_named(tmp_path: Path) -> None:
    assert refusal(tmp_path).startswith(f"{tmp_path} holds no folders; expected")
    assert refusal(grow(tmp_path, ".git/1.jpg", "notes.txt")).startswith(f"{tmp_path} holds no folders; expected")


def test_images_without_class_folders_are_pointed_out(tmp_path: Path) -> None:
    grow(tmp_path, "a.txt", "b.JPG")
    assert f"{tmp_path} holds images, for instance b.JPG, but no folders; expected" in refusal(tmp_path)


def test_images_without_classes_lie_anywhere_and_have_no_label(tmp_path: Path) -> None:
    for name in ("b.jpg", "a/2.jpg", "a/deep/1.png", "notes.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(name.encode())
    data = read_images(tmp_path, classes=False, listing=tmp_path / "kept.parquet")
    names = [data.uri(number).removeprefix(f"{tmp_path}/") for number in range(len(data))]
    assert (names, data.fields, data.class_names) == (["b.jpg", "a/2.jpg", "a/deep/1.png"], (), ())
    again = read_images(tmp_path, classes=False, listing=tmp_path / "kept.parquet")
    assert again.fingerprint == data.fingerprint
    for kept, classes in (("kept.parquet", True), ("classes.parquet", False)):
        read_images(tmp_path, classes=not classes, listing=tmp_path / kept)
        with pytest.raises(DatasetError, match="was made with classes"):
            read_images(tmp_path, classes=classes, listing=tmp_path / kept)


def test_classes_without_images_are_named(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg", "dog/", "eel/notes.txt", "fox/.1.jpg")
    assert refusal(tmp_path) == (
        f"{tmp_path}: 3 of 4 class folders hold no file that ends in {' or '.join(IMAGE_EXTENSIONS)}: "
        "'dog', 'eel', 'fox'; remove them, or name other endings with extensions="
    )


def test_of_many_classes_without_images_five_are_named(tmp_path: Path) -> None:
    grow(tmp_path, *(f"class {i}/" for i in range(8)))
    message = refusal(tmp_path)
    assert "8 of 8 class folders" in message
    assert "'class 4' and 3 more;" in message


class Troubled(FSSpecHandler):  # type: ignore[misc]
    """Local file system that fails to list the folder `where`."""

    def __init__(self, where: str, error: Exception) -> None:
        super().__init__(FsspecLocal())
        self.where = where
        self.error = error

    def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
        if selector.base_dir.endswith(self.where):
            raise self.error
        return list(super().get_file_info_selector(selector))


@pytest.mark.parametrize("where", ["tree", "tree/dog"])
def test_a_folder_that_may_not_be_read_is_named(tmp_path: Path, where: str) -> None:
    root = grow(tmp_path / "tree", "cat/1.jpg", "dog/2.jpg")
    filesystem = PyFileSystem(Troubled(where, PermissionError(13, "Permission denied")))
    message = refusal(root, filesystem=filesystem)
    assert message.startswith(f"cannot list {tmp_path}/{where}: expected a folder that may be read; ")
    assert "Permission denied" in message


def test_a_folder_that_cannot_be_listed_is_named_with_the_cause(tmp_path: Path) -> None:
    root = grow(tmp_path / "tree", "cat/1.jpg", "dog/2.jpg")
    message = refusal(root, filesystem=PyFileSystem(Troubled("tree/dog", OSError(5, "Input/output error"))))
    assert message.startswith(f"cannot list {tmp_path}/tree/dog: ")
    assert "Input/output error" in message


def test_an_image_whose_name_is_not_utf_8_is_left_out_with_a_warning(tmp_path: Path) -> None:
    """Other images of the folder are listed, and other files cause no warning."""
    grow(tmp_path, "cat/1.jpg", "cat/old/2.jpg", "dog/3.jpg")
    for name in (b"/cat/caf\xe9.JPG", b"/cat/old/\xff.jpg", b"/cat/\xe9.txt", b"/\xe9.jpg"):
        Path(os.fsdecode(os.fsencode(tmp_path) + name)).touch()
    with pytest.warns(
        UserWarning, match=r"left out 2 images whose names are not UTF-8, for instance b'.*(JPG|jpg)'"
    ) as caught:
        assert listed(tmp_path) == [("cat/1.jpg", 0), ("cat/old/2.jpg", 0), ("dog/3.jpg", 1)]
    assert len(caught) == 1
    assert str(tmp_path) in str(caught[0].message)
    assert caught[0].filename == __file__, "the warning points to the caller's line"


def test_images_in_a_folder_whose_name_is_not_utf_8_are_left_out_with_a_warning(tmp_path: Path) -> None:
    grow(tmp_path, "cat/1.jpg", "cat/old/2.jpg")
    odd = Path(os.fsdecode(os.fsencode(tmp_path) + b"/cat/caf\xe9"))
    odd.mkdir()
    (odd / "3.jpg").touch()
    with pytest.warns(UserWarning, match=r"not UTF-8, for instance b'.*caf\\xe9.*'"):
        assert listed(tmp_path) == [("cat/1.jpg", 0), ("cat/old/2.jpg", 0)]


def test_a_class_whose_name_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    """Leaving it out would shift the labels of later classes."""
    grow(tmp_path, "cat/1.jpg")
    Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9")).mkdir()
    message = refusal(tmp_path)
    assert message.startswith(f"{tmp_path}: the name of the class folder ")
    assert message.endswith(r"caf\xe9' is not UTF-8; rename it")


def test_a_file_system_that_does_not_know_lengths_is_refused(tmp_path: Path) -> None:
    class Vague(FSSpecHandler):  # type: ignore[misc]
        def get_file_info_selector(self, selector: FileSelector) -> list[FileInfo]:
            return [FileInfo(info.path, info.type) for info in super().get_file_info_selector(selector)]

    grow(tmp_path, "cat/1.jpg")
    message = refusal(tmp_path, filesystem=PyFileSystem(Vague(FsspecLocal())))
    assert message == f"{tmp_path}/cat/1.jpg: its file system does not tell how long the file is"


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda found: [FileInfo(found[0].path, found[0].type, size=-2)], "/1.jpg: its file system does not tell how "),
        (lambda found: found * 2, ": its file system names 'cat/1.jpg' twice"),
        (lambda found: [FileInfo("/a/1.jpg", found[0].type, size=1)], ": its file system says that '/a/1.jpg' is in"),
        (lambda found: {}["Contents"], ": KeyError: 'Contents'"),
        (lambda found: None, ": TypeError: get_file_info_selector should have returned a list"),
    ],
)
def test_a_file_system_that_answers_what_cannot_be_is_refused(tmp_path: Path, answer: Any, message: str) -> None:
    class Lying(FSSpecHandler):  # type: ignore[misc]
        def get_file_info_selector(self, selector: FileSelector) -> Any:
            found = super().get_file_info_selector(selector)
            return answer(found) if selector.base_dir.endswith("/cat") else found

    grow(tmp_path, "cat/1.jpg")
    told = refusal(tmp_path, filesystem=PyFileSystem(Lying(FsspecLocal())))
    assert f"{tmp_path}/cat{message}" in told


def test_a_class_that_a_file_system_names_twice_is_one(tmp_path: Path) -> None:
    class Stammering(FSSpecHandler):  # type: ignore[misc]
        def get_file_info_selector(self, selector: FileSelector) -> Any:
            found = super().get_file_info_selector(selector)
            return found if selector.recursive else found * 2

    grow(tmp_path, "cat/1.jpg")
    assert read_images(tmp_path, filesystem=PyFileSystem(Stammering(FsspecLocal()))).class_names == ("cat",)


@pytest.mark.parametrize("uri", ["nope://KEY:SECRET@bucket/train?token=SECRET", "s3://KEY:SECRET@bucket/a b"])
def test_a_uri_that_cannot_be_opened_is_named_without_its_secrets(uri: str) -> None:
    with pytest.raises(DatasetError) as caught:
        read_images(uri)
    assert str(caught.value).startswith(f"cannot open {uri.split(':')[0]}://bucket/")
    assert "expected a local path, or a URI that pyarrow.fs can open" in str(caught.value)
    assert "SECRET" not in "".join(traceback.format_exception(caught.value))


def test_the_root_of_a_uri_has_no_secrets_and_no_options(tmp_path: Path) -> None:
    from mbaas.dataset.storage.location import locate

    where = locate("s3://KEY:SECRET@bucket/train/?region=eu-west-1", None)
    assert where.root == "s3://bucket/train"
    assert where.base == "bucket/train"


@pytest.mark.parametrize(
    ("extensions", "message"),
    [
        ((), "at least one ending, such as '.jpg', got none"),
        ((".jpg", "png"), "must begin with a dot"),
        ("", "''"),
    ],
)
def test_wrong_extensions_are_refused(tmp_path: Path, extensions: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        read_images(grow(tmp_path, "cat/1.jpg"), extensions=extensions)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        (lambda: read_images(["a.jpg"]), "expected a path or URI, got ['a.jpg']; mbaas.read_manifest reads a table of"),
        (lambda: read_images(None), "expected a path or URI, got None"),
        (lambda: read_images("x", extension=".jpg"), "unknown parameter 'extension' of read_images; did you mean 'ext"),
        (lambda: read_images("x", recursive=True), "; known are classes, extensions, filesystem, listing, path"),
    ],
)
def test_wrong_arguments_of_a_reader_are_named(call: Any, sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        call()


@pytest.mark.parametrize("uri", ["/data/\udcff", "s3://bucket/\ud800", "~\0\ud800"])
def test_a_path_that_is_no_text_is_refused(uri: str) -> None:
    with pytest.raises(DatasetError, match=r"cannot open '.*\\ud.*': expected a path or URI that is UTF-8 text"):
        read_images(uri)


def test_a_uri_that_is_none_is_refused_without_what_it_may_hold() -> None:
    with pytest.raises(DatasetError, match="cannot open a URI that begins with s3://: Invalid IPv6 URL") as caught:
        read_images("s3://KEY:SECRET@[bucket")
    assert "SECRET" not in str(caught.value)
