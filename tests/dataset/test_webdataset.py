"""WebDataset shards are read field by field as the package webdataset reads them, and invalid ones are refused."""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pyarrow.fs
import pytest
from contents import content, values
from moto.server import ThreadedMotoServer
from webdataset import TarWriter
from webdataset.shardlists import expand_urls
from webdataset.tariterators import group_by_keys, tar_file_iterator

from mbaas.dataset import read_images, read_webdataset
from mbaas.errors import BadSampleError, ConfigError, DatasetError
from mbaas.samples.fields import Field
from support.s3 import UnreliableProxy, unreliable

Sample = dict[str, Any]

SAMPLES: list[Sample] = [
    {
        "__key__": f"{'deep/' * (number % 3)}{number:04d}",
        ("jpg", "png", "jpeg")[number % 3]: bytes([number]) * (1 + 700 * number),
        "cls": number % 5,
        "json": {"age": number / 2, "box": [number, 1], "kind": "ab"[number % 2], "odd": number % 2 == 1},
        "txt": "what is seen",
    }
    for number in range(11)
]


def written(path: Path, samples: list[Sample] = SAMPLES) -> Path:
    """Write a shard with the package webdataset."""
    with TarWriter(str(path)) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def packed(path: Path, members: dict[str, bytes], kind: int = tarfile.DEFAULT_FORMAT) -> Path:
    """Write a shard with ``tarfile``, in one of its three formats."""
    with tarfile.open(path, "w", format=kind) as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def by_webdataset(*shards: Path) -> list[Sample]:
    """All samples as webdataset reads them, not decoded. The public functions of webdataset leave files open."""
    found: list[Sample] = []
    for shard in shards:
        with shard.open("rb") as stream:
            files = [{**each, "__url__": str(shard)} for each in tar_file_iterator(stream)]
        found += group_by_keys(files)
    return found


def test_each_field_is_what_the_package_reads(tmp_path: Path) -> None:
    first, second = written(tmp_path / "a-00.tar", SAMPLES[:4]), written(tmp_path / "a-01.tar", SAMPLES[4:])
    data = read_webdataset(tmp_path / "a-{00..01}.tar", fields=["age", "box", "odd"])
    read = by_webdataset(first, second)
    assert len(data) == len(read) == 11
    assert content(data) == [next(sample[kind] for kind in ("jpg", "png", "jpeg") if kind in sample) for sample in read]
    objects = [json.loads(sample["json"]) for sample in read]
    assert values(data) == {
        "label": [int(sample["cls"]) for sample in read],
        **{key: [known[key] for known in objects] for key in ("age", "box", "odd")},
    }
    numbers = [Field("label", (), "int64"), Field("age", (), "float64")]
    assert data.fields == (*numbers, Field("box", (2,), "int64"), Field("odd", (), "uint8"))
    for number, sample in enumerate(read):
        assert data.uri(number).startswith(f"{sample['__url__']}#{sample['__key__']}.")


def test_labels_may_be_text_numbers_or_missing(tmp_path: Path) -> None:
    shard = written(tmp_path / "a.tar")
    named = read_webdataset(shard, label_column="kind")
    assert (named.class_names, values(named)) == (("a", "b"), {"label": [number % 2 for number in range(11)]})
    assert values(read_webdataset(shard, label_column="age", fields=["age"])) == {
        name: [number / 2 for number in range(11)] for name in ("label", "age")
    }
    bare = read_webdataset(shard, label_column=None)
    assert (bare.fields, len(bare)) == ((), 11)


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_all_formats_of_tar_are_read(tmp_path: Path, kind: int) -> None:
    """A name of more than 100 characters is split in ustar, and has extra headers in the other formats."""
    long = "/".join(["folder"] * 20)
    members = {f"{long}/1.jpg": b"one", f"{long}/1.cls": b"1", "2.cls": b" 2\n", "2.jpg": b"two" * 999}
    shard = packed(tmp_path / "a.tar", members, kind)
    data = read_webdataset(shard)
    assert (content(data), values(data)) == ([b"one", b"two" * 999], {"label": [1, 2]})
    assert [sample["jpg"] for sample in by_webdataset(shard)] == content(data)
    assert data.uri(0) == f"{shard}#{long}/1.jpg"


def test_a_size_in_a_pax_header_and_a_name_that_is_no_text(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        for name, told in (("1.jpg", {"size": "5"}), ("é.jpg", {})):
            member = tarfile.TarInfo(name)
            member.size, member.pax_headers = 5, told
            tar.addfile(member, io.BytesIO(b"abcde"))
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.GNU_FORMAT, encoding="latin-1") as tar:
        tar.addfile(tarfile.TarInfo("é.jpg"))
    data = read_webdataset(tmp_path / "{a,b}.tar", label_column=None)
    assert content(data) == [b"abcde", b"abcde", b""]
    assert [data.uri(i).rpartition("#")[2] for i in range(3)] == ["1.jpg", "é.jpg", "\N{REPLACEMENT CHARACTER}.jpg"]


def test_what_belongs_to_no_sample_is_left_out_as_by_the_package(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        for name in ("./v1.0/1.JPG", "v1.0/.hidden.jpg", "README", "__meta__", "__x__/1.jpg", "./v1.0/1.seg.png"):
            member = tarfile.TarInfo(name)
            member.size = len(name)
            tar.addfile(member, io.BytesIO(name.encode()))
        for kind in (tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.FIFOTYPE):
            other = tarfile.TarInfo("2.jpg")
            other.type, other.linkname = kind, "1.jpg"
            tar.addfile(other)
    with pytest.warns(UserWarning, match=r"left out: .*/a\.tar: the member '2\.jpg' is a link to '1\.jpg', .* not in"):
        data = read_webdataset(tmp_path / "a.tar", label_column=None)
    assert content(data) == [b"./v1.0/1.JPG"]
    (masks,) = content(read_webdataset(tmp_path / "a.tar", label_column=None, image_column="seg.PNG"))
    assert masks == b"./v1.0/1.seg.png"
    read = {key: value for sample in by_webdataset(tmp_path / "a.tar") for key, value in sample.items()}
    assert (read["jpg"], read["seg.png"]) == (b"./v1.0/1.JPG", masks)


# ---- links, and concatenated tar files ----


def linked(path: Path, *members: tuple[str, bytes | str]) -> Path:
    """Write files and links in the given order; a link is "hard " or "soft " and its target."""
    with tarfile.open(path, "w") as tar:
        for name, what in members:
            member = tarfile.TarInfo(name)
            if isinstance(what, str):
                kind, _, member.linkname = what.partition(" ")
                member.type = tarfile.LNKTYPE if kind == "hard" else tarfile.SYMTYPE
            else:
                member.size = len(what)
            tar.addfile(member, io.BytesIO(what) if isinstance(what, bytes) else None)
    return path


def images_of(path: Path) -> list[bytes]:
    """All images in a tar file, as ``tarfile`` reads them."""
    with tarfile.open(path) as tar:
        found = [tar.extractfile(member) for member in tar.getmembers() if member.name.endswith(".jpg")]
        return [each.read() for each in found if each is not None]


def test_links_are_the_members_that_they_lead_to(tmp_path: Path) -> None:
    shard = linked(
        tmp_path / "a.tar",
        ("./x/0.jpg", "soft ../y/./1.jpg"),  # to a later member that is itself a link
        ("x/a.jpg", b"first"), ("x/a.cls", b"1"),
        ("y/1.jpg", "hard ./x/a.jpg"), ("y/1.cls", "soft ../x/a.cls"),
        ("x/a.jpg", b"second"),  # the link before it still means the first one
        ("y/2.jpg", "hard x/a.jpg"), ("y/3.jpg", "soft ../x/a.jpg"), ("z.jpg", "hard y/1.jpg"),
    )  # fmt: skip
    assert content(read_webdataset(shard, label_column=None)) == images_of(shard)
    assert images_of(shard) == [b"first", b"first", b"first", b"second", b"second", b"second", b"first"]
    assert read_webdataset(shard, label_column=None).uri(0) == f"{shard}#./x/0.jpg"
    labels = linked(tmp_path / "b.tar", ("1.jpg", b"1"), ("1.cls", b"7"), ("2.jpg", b"2"), ("2.cls", "hard 1.cls"))
    assert values(read_webdataset(labels)) == {"label": [7, 7]}


def test_hard_links_as_gnu_tar_writes_them(tmp_path: Path) -> None:
    (tmp_path / "in/v1.0").mkdir(parents=True)
    (tmp_path / "in/a.jpg").write_bytes(b"one")
    (tmp_path / "in/b.jpg").hardlink_to(tmp_path / "in/a.jpg")
    (tmp_path / "in/c.jpg").write_bytes(b"three")
    (tmp_path / "in/v1.1").symlink_to("v1.0")  # neither the link nor the folder is a sample
    subprocess.run(["tar", "-cf", tmp_path / "a.tar", "-C", tmp_path / "in", "--sort=name", "."], check=True)
    assert content(read_webdataset(tmp_path / "a.tar", label_column=None)) == [b"one", b"one", b"three"]


def test_links_that_lead_out_of_the_shard_or_in_a_circle_are_named_and_counted(tmp_path: Path) -> None:
    shard = linked(
        tmp_path / "a.tar",
        ("1.jpg", b"1"), ("2.jpg", "soft /data/2.jpg"), ("3.jpg", "soft 4.jpg"), ("4.jpg", "soft 3.jpg"),
        ("5.jpg", "hard 6.jpg"), ("6.jpg", b"6"), ("7.txt", "soft nowhere.txt"),
    )  # fmt: skip
    told = r"left out: .*a\.tar: the member '2\.jpg' is a link to '/data/2\.jpg', which is not .* \(and 3 more\)$"
    with pytest.warns(UserWarning, match=told) as caught:
        assert content(read_webdataset(shard, label_column=None)) == [b"1", b"6"]
    assert caught[0].filename == __file__, "the warning points to the caller's line"


def test_tar_files_that_were_concatenated_are_all_read(tmp_path: Path) -> None:
    """As with ``tar --ignore-zeros``. The same name in two of the tar files makes two samples."""
    parts = [linked(tmp_path / f"{n}.tar", ("1.jpg", b"%d" % n), ("1.cls", b"%d" % n)) for n in range(2)]
    links = linked(tmp_path / "2.tar", ("2.jpg", "hard 1.jpg"), ("2.cls", b"2"))
    empty = linked(tmp_path / "3.tar")
    (tmp_path / "a.tar").write_bytes(b"".join(path.read_bytes() for path in (empty, *parts, empty, links)))
    data = read_webdataset(tmp_path / "a.tar")
    assert (content(data), values(data)) == ([b"0", b"1", b"1"], {"label": [0, 1, 2]})
    with tarfile.open(tmp_path / "a.tar", ignore_zeros=True) as tar:
        assert len(tar.getmembers()) == 6


def test_what_is_behind_the_end_and_is_no_tar_file_is_named(tmp_path: Path) -> None:
    whole = packed(tmp_path / "a.tar", {"1.jpg": b"1"}).read_bytes()
    for rest in (gzip.compress(whole), b"x", b"x" * 2000):
        (tmp_path / "a.tar").write_bytes(whole + rest)
        with pytest.warns(UserWarning, match=r"a\.tar: all after the end mark, from byte 10,240 on, which is neither"):
            assert content(read_webdataset(tmp_path / "a.tar", label_column=None)) == [b"1"]
    (tmp_path / "a.tar").write_bytes(whole + whole[:700])
    with pytest.raises(DatasetError, match=r"a\.tar is cut off or damaged"):
        read_webdataset(tmp_path / "a.tar", label_column=None)


@pytest.mark.parametrize(
    ("kind", "told"),
    [(b"M", r"'1\.jpg' begins in another volume of the tar file$"), (b"S", r"'1\.jpg' is .* \(a sparse file\)$")],
)
def test_members_that_are_not_whole_are_refused(tmp_path: Path, kind: bytes, told: str) -> None:
    member = tarfile.TarInfo("1.jpg")
    member.type = kind
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(DatasetError, match=told):
        read_webdataset(tmp_path / "a.tar", label_column=None)


@pytest.mark.parametrize(
    "pattern",
    ["{0..11}.tar", "{008..011}.tar", "{8..011}.tar", "x-{a,b}{0..1}/{,y}.tar", "{3..1}.tar", "none.tar"],
)
def test_braces_stand_for_what_they_stand_for_elsewhere(tmp_path: Path, pattern: str) -> None:
    expected = [str(tmp_path / name) for name in expand_urls(pattern)]
    for number, name in enumerate(expected):
        Path(name).parent.mkdir(exist_ok=True)
        packed(Path(name), {f"{number}.jpg": b"x"})
    data = read_webdataset(f"{tmp_path}/{pattern}", label_column=None)
    assert [data.uri(number) for number in range(len(data))] == [
        f"{name}#{number}.jpg" for number, name in enumerate(expected)
    ]


def test_shards_may_be_a_list_of_several_folders_and_of_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    monkeypatch.chdir(tmp_path / "in")
    packed(tmp_path / "in/a.tar", {"1.jpg": b"a"})
    packed(tmp_path / "b-1.tar", {"1.jpg": b"b"})
    data = read_webdataset(["a.tar", tmp_path / "b-{1..1}.tar"], label_column=None)
    assert (data.root, content(data)) == (str(tmp_path), [b"a", b"b"])
    inside = pyarrow.fs.SubTreeFileSystem(str(tmp_path), pyarrow.fs.LocalFileSystem())
    assert content(read_webdataset(["b-1.tar", "in/a.tar"], label_column=None, filesystem=inside)) == [b"b", b"a"]
    assert content(read_webdataset((tmp_path / "in/a.tar").as_uri(), label_column=None)) == [b"a"]


def test_a_pickle_reads_and_a_copy_elsewhere_has_the_same_fingerprint(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    written(tmp_path / "here/a.tar")
    data = read_webdataset(tmp_path / "here/a.tar", fields=["age"])
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    assert read_webdataset(tmp_path / "there/a.tar", fields=["age"]).fingerprint == data.fingerprint
    assert read_webdataset(tmp_path / "there/a.tar").fingerprint != data.fingerprint
    again = pickle.loads(pickle.dumps(data, protocol=5))
    assert (content(again), values(again), again.uri(3)) == (content(data), values(data), data.uri(3))


def test_a_shard_that_changed_is_noticed_when_it_is_read(tmp_path: Path) -> None:
    shard = written(tmp_path / "a.tar")
    data = read_webdataset(shard)
    size = shard.stat().st_size
    with shard.open("ab") as file:
        file.write(bytes(512))
    with pytest.raises(BadSampleError) as caught:
        content(data)
    assert caught.value.uri == f"{shard}#0000.jpg"
    assert caught.value.reason == f"the file has {size + 512} bytes now, {size} when the dataset was listed"


# ---- stored listings ----


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the shards that have been indexed."""
    from mbaas.dataset.readers import webdataset as module

    found: list[str] = []
    index = module.tar_samples

    def noted(*given: Any, **options: Any) -> Iterator[Any]:
        found.append(options["shard"].rpartition("/")[2])
        return index(*given, **options)

    monkeypatch.setattr(module, "tar_samples", noted)
    return found


def test_what_was_kept_is_read_until_a_shard_changes(tmp_path: Path, opened: list[str]) -> None:
    shards = [written(tmp_path / f"{name}.tar", SAMPLES[:4]) for name in "ab"]
    options: dict[str, Any] = {"fields": ["box", "age"], "label_column": "kind", "listing": tmp_path / "kept.parquet"}
    first = read_webdataset(shards, **options)
    assert sorted(opened) == ["a.tar", "b.tar"]
    again = read_webdataset(shards, **options)
    assert sorted(opened) == ["a.tar", "b.tar"], "nothing is looked into again"
    assert (again.fingerprint, again.class_names, again.fields) == (first.fingerprint, ("a", "b"), first.fields)
    assert (values(again), content(again), again.uri(5)) == (values(first), content(first), first.uri(5))
    opened.clear()
    before = shards[1].stat()
    os.utime(shards[1], ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    assert read_webdataset(shards, **options).fingerprint == first.fingerprint
    assert sorted(opened) == ["a.tar", "b.tar"], "the time of one has changed"
    opened.clear()
    written(shards[1], SAMPLES[:5])
    assert len(read_webdataset(shards, **options)) == 9
    assert len(read_webdataset(shards, **options)) == 9
    assert sorted(opened) == ["a.tar", "b.tar"], "inspected once, then cached"


def test_what_is_kept_of_something_else_is_refused_with_both(tmp_path: Path) -> None:
    shard, kept = written(tmp_path / "a.tar"), tmp_path / "kept.parquet"
    read_webdataset(shard, fields=["age"], listing=kept)
    for options, told in (
        ({"fields": ["box"]}, r"was made with fields \('age',\), not \('box',\)"),
        ({"fields": ["age"], "label_column": "kind"}, r"was made with label_column 'cls', not 'kind'"),
        (
            {"fields": ["age"], "image_column": "png"},
            r"was made with image_column \('jpg', 'jpeg', 'png', 'webp'\), not \('png',\)",
        ),
    ):
        with pytest.raises(DatasetError, match=rf"the listing .*kept\.parquet {told}; remove it"):
            read_webdataset(shard, listing=kept, **options)
    (tmp_path / "tree/cat").mkdir(parents=True)
    (tmp_path / "tree/cat/1.jpg").touch()
    with pytest.raises(DatasetError, match="is not a listing of read_images"):
        read_images(tmp_path / "tree", listing=kept)


# ---- invalid shards ----


@pytest.mark.parametrize(
    ("members", "options", "told"),
    [
        ({"1.cls": b"1"}, {}, r"the sample '1' has no images instead of one: its members end in \.cls, and images in"),
        ({"1.jpg": b"", "1.png": b"", "1.cls": b"1"}, {}, r"the sample '1' has 2 images instead of one: .*\.jpg, "),
        ({"1.jpg": b""}, {}, r"the sample '1' has no member that ends in \.cls; label_column=None leaves labels out"),
        ({"1.jpg": b"", "1.cls": b"cat"}, {}, r"the label in '1\.cls' must be the text of an integer, got b'cat'$"),
        ({"1.jpg": b"", "1.cls": b"9" * 20}, {}, r"the values of '\.cls' cannot be one column: "),
        ({"1.jpg": b""}, {"label_column": "kind"}, r"the sample '1' has no member that ends in \.json$"),
        ({"1.jpg": b"", "1.json": b"[1]"}, {"label_column": "kind"}, r"'1\.json' must be a JSON object, got \[1\]$"),
        ({"1.jpg": b"", "1.json": b"{"}, {"label_column": "kind"}, r"'1\.json' must be a JSON object: Expecting"),
        ({"1.jpg": b"", "1.json": b'{"a": 1}'}, {"label_column": "kind"}, r"must have a value for 'kind'; it has 'a'$"),
        ({"1.jpg": b"", "1.json": b'{"a": null}'}, {"label_column": "a"}, r"must have a value for 'a'; it has 'a'$"),
        (
            {"1.jpg": b"", "1.json": b'{"a": 1}', "2.jpg": b"", "2.json": b'{"a": "x"}'},
            {"label_column": "a"},
            r"the values of 'a' cannot be one column: ",
        ),
        ({"1.txt": b"", "1.TXT": b""}, {}, r"the sample '1' has two members that end in \.txt$"),
        ({"1": b"", ".2.jpg": b""}, {}, r"no sample is in 1 shard$"),
    ],
)  # fmt: skip
def test_a_sample_that_cannot_be_is_named(
    tmp_path: Path, members: dict[str, bytes], options: dict[str, Any], told: str
) -> None:
    shard = packed(tmp_path / "a.tar", members)
    with pytest.raises(DatasetError, match=told) as caught:
        read_webdataset(shard, **options)
    assert str(caught.value).startswith(str(tmp_path))


def test_kinds_of_values_that_differ_between_shards_are_refused(tmp_path: Path) -> None:
    for name, value in (("a", b"1"), ("b", b"2.5"), ("c", b'"x"')):
        packed(tmp_path / f"{name}.tar", {"1.jpg": b"", "1.json": b'{"a": %s}' % value})
    assert values(read_webdataset(tmp_path / "{a,b}.tar", label_column="a")) == {"label": [1.0, 2.5]}
    with pytest.raises(DatasetError, match=r"a column has values of another kind in another shard: "):
        read_webdataset(tmp_path / "{a,b,c}.tar", label_column="a")
    (named,) = read_webdataset(tmp_path / "c.tar", label_column=None, fields=["a"]).fields
    assert named.categories == ("x",)


def test_every_cut_of_a_shard_is_refused(tmp_path: Path) -> None:
    """Includes cuts between members. Half of the end mark (one of its two zero blocks) is enough."""
    whole = packed(tmp_path / "a.tar", {"1.jpg": b"x" * 700, "1.cls": b"1", "2.jpg": b"", "2.cls": b"2"}).read_bytes()
    end = max(at for at in range(0, len(whole), 512) if any(whole[at : at + 512])) + 512
    assert end == 512 * 8
    for cut in (*range(0, end + 512, 256), 1, 511, 513, end - 1, end + 511):
        (tmp_path / "cut.tar").write_bytes(whole[:cut])
        with pytest.raises(
            DatasetError, match=r"cut\.tar is (cut off or damaged: |not a tar file, or it is damaged: )"
        ):
            read_webdataset(tmp_path / "cut.tar")
    (tmp_path / "cut.tar").write_bytes(whole[:700])
    with pytest.raises(DatasetError, match=r"'1\.jpg' at byte 0 would end at byte 1,536, and the file has 700 bytes$"):
        read_webdataset(tmp_path / "cut.tar")
    (tmp_path / "cut.tar").write_bytes(whole[: end + 512])
    assert len(read_webdataset(tmp_path / "cut.tar")) == 2


def test_a_header_that_makes_no_sense_is_not_the_end(tmp_path: Path) -> None:
    """``tarfile``, and so the package, stops there silently."""
    whole = bytearray(packed(tmp_path / "a.tar", {"1.jpg": b"", "2.jpg": b""}).read_bytes())
    whole[512 + 100] ^= 1
    (tmp_path / "a.tar").write_bytes(whole)
    assert len(by_webdataset(tmp_path / "a.tar")) == 1
    with pytest.raises(DatasetError, match=r"at byte 512, where a member or the mark .* must be, is no header"):
        read_webdataset(tmp_path / "a.tar", label_column=None)


def test_a_size_below_nothing_is_refused(tmp_path: Path) -> None:
    """GNU sizes may be negative, which would send the reader back to an earlier offset."""
    member = tarfile.TarInfo("1.jpg")
    member.size = -1024
    header = member.tobuf(tarfile.GNU_FORMAT)
    (tmp_path / "a.tar").write_bytes(packed(tmp_path / "b.tar", {"0.jpg": b""}).read_bytes()[:512] + header * 2)
    with pytest.raises(DatasetError, match=r"a\.tar is (cut off or damaged|no tar file)"):
        read_webdataset(tmp_path / "a.tar", label_column=None)


def test_what_is_no_plain_tar_is_named(tmp_path: Path) -> None:
    shard = written(tmp_path / "a.tar")
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(shard.read_bytes()))
    with pytest.raises(DatasetError, match=r"a\.tar\.gz is compressed by gzip, but must be a plain tar file"):
        read_webdataset(tmp_path / "a.tar.gz")
    (tmp_path / "b.tar").write_bytes(b"my notes" * 100)
    with pytest.raises(DatasetError, match=r"b\.tar is not a tar file, or it is damaged: "):
        read_webdataset(tmp_path / "b.tar")
    with pytest.raises(DatasetError, match=r"the shard .*/c\.tar is not there$"):
        read_webdataset([shard, tmp_path / "c.tar"])
    with pytest.raises(DatasetError, match=rf"the shard {tmp_path} is not a file$"):
        read_webdataset(tmp_path)


@pytest.mark.parametrize(
    ("shards", "options", "told"),
    [
        ([], {}, "path must name at least one shard, got none"),
        ("a-{0-9}.tar", {}, r"braces must hold a range such as {000\.\.127} or .* got {0-9} in 'a-{0-9}\.tar'"),
        ("{0..9999999999}.tar", {}, r"must name at most 1,000,000 shards, got '{0\.\.9999999999}\.tar'"),
        ("{0..9999}{0..9999}.tar", {}, r"must name at most 1,000,000 shards"),
        ("a.tar", {"image_column": ()}, "image_column must name at least one ending, such as 'jpg', got none"),
        ("a.tar", {"image_column": ".jpg"}, r"endings without their first dot, such as 'jpg', got '\.jpg'"),
        ("a.tar", {"fields": "age"}, r"fields must be a list of keys, such as \['age'\], got 'age'"),
        ("a.tar", {"fields": ["image"]}, r"a field must not be called 'image', which minibatches have already"),
        ("a.tar", {"fields": ["label"]}, r"a field must not be called 'label', which minibatches have already"),
    ],
)
def test_arguments_that_cannot_be_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shards: Any, options: dict[str, Any], told: str
) -> None:
    monkeypatch.chdir(tmp_path)
    packed(tmp_path / "a.tar", {"1.jpg": b"", "1.cls": b"1", "1.json": b'{"image": 1, "label": 2}'})
    with pytest.raises(ConfigError, match=told):
        read_webdataset(shards, **options)


@pytest.mark.parametrize(
    ("shards", "told"),
    [
        (["s3://one/a.tar", "s3://two/b.tar"], "in one file system, got s3://one/a.tar and s3://two/b.tar"),
        (["/data/a.tar", "s3://two/b.tar"], "in one file system, got /data/a.tar and s3://two/b.tar"),
        (["a.tar", "./a.tar"], r"each shard must be named once, got .*/a\.tar 2 times"),
        ("a#1.tar", r"the name of a shard must not have '#' in it, got .*/a#1\.tar"),
    ],
)
def test_shards_that_cannot_go_together_are_named(shards: Any, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with pytest.raises(DatasetError, match=told):
        read_webdataset(shards)


# ---- in S3 ----


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """Address of an S3 server with three shards. Their images are larger than one read of a header."""
    folder = tmp_path_factory.mktemp("shards")
    moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    secrets = {"aws_access_key_id": "testing", "aws_secret_access_key": "not-a-secret"}
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1", **secrets)
    client.create_bucket(Bucket="shards")
    for number in range(3):
        shard = written(folder / f"{number}.tar", [{"__key__": f"{number}", "cls": number, "jpg": bytes(100_000)}] * 1)
        client.put_object(Bucket="shards", Key=f"train/{number}.tar", Body=shard.read_bytes())
    client.close()
    yield host, port
    moto.stop()


@pytest.fixture
def proxy(server: tuple[str, int], monkeypatch: pytest.MonkeyPatch) -> Iterator[UnreliableProxy]:
    for name, value in {
        "AWS_ACCESS_KEY_ID": "testing", "AWS_SECRET_ACCESS_KEY": "not-a-secret", "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_EC2_METADATA_DISABLED": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    with unreliable(server) as found:
        yield found


def test_shards_in_s3_are_found_by_their_headers(proxy: UnreliableProxy, tmp_path: Path) -> None:
    """Four requests per shard: size and time, size again on opening, first members, end."""
    uri = f"s3://shards/train/{{0..2}}.tar?endpoint_override=http://127.0.0.1:{proxy.port}&scheme=http"
    data = read_webdataset(uri, listing=tmp_path / "kept.parquet")
    assert (data.root, values(data)) == ("s3://shards/train", {"label": [0, 1, 2]})
    assert [(request.method, request.answer) for request in proxy.requests("1.tar")] == [
        ("HEAD", 200), ("HEAD", 200), ("GET", 206), ("GET", 206)
    ]  # fmt: skip
    proxy.forget()
    again = read_webdataset(uri, listing=tmp_path / "kept.parquet")
    assert [request.method for request in proxy.requests()] == ["HEAD"] * 3
    assert again.fingerprint == data.fingerprint
    assert content(again) == [bytes(100_000)] * 3
