"""Names with accents are found and read in a non-UTF-8 locale, under the same names as in a UTF-8 one."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import pytest

from mbaas.dataset import read_webdataset

PROGRAM = r"""
import json, os, sys
import numpy as np
from mbaas.dataset import read_images, read_manifest, read_webdataset

assert sys.getfilesystemencoding() != "utf-8", sys.getfilesystemencoding()
here = os.getcwd()
(root,) = (name for name in os.listdir(".") if os.path.isdir(name))  # as Python has it
(shard,) = (name for name in os.listdir(root) if name.endswith(".tar"))

def content(data):
    found, reader = {}, data.reader()
    for sample, length in enumerate(data.lengths(np.arange(len(data))).tolist()):
        buffer = np.empty(length, np.uint8)
        reader.read_into(sample, buffer)
        found[data.uri(sample).rpartition("r\xe9pertoire/")[2]] = buffer.tobytes().decode()
    return found

given = {
    "relative": lambda: read_images(root),
    "absolute": lambda: read_images(os.path.join(here, root)),
    "as bytes of UTF-8": lambda: read_images(os.fsencode(root).decode(), listing=os.path.join(root, "kept.parquet")),
    "again": lambda: read_images(root, listing=os.path.join(root, "kept.parquet")),
    "manifest": lambda: read_manifest(os.path.join(root, "table.csv")),
    "shard": lambda: read_webdataset(os.path.join(root, shard), label_column=None),
    "shards": lambda: read_webdataset([os.path.join(root, shard), "b.tar"], label_column=None),
}
print(json.dumps({name: content(read()) for name, read in given.items()}))
"""


def ascii_locale(_: Path) -> dict[str, str]:
    return {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def latin1_locale(folder: Path) -> dict[str, str]:
    if shutil.which("localedef") is None:
        pytest.skip("needs localedef")
    made = subprocess.run(
        ["localedef", "-i", "de_DE", "-f", "ISO-8859-1", folder / "de_DE"], capture_output=True, check=False
    )
    if not (folder / "de_DE").is_dir():
        pytest.skip(f"localedef made no locale: {made.stderr.decode()}")
    return {"LC_ALL": "de_DE", "LOCPATH": str(folder)}


def tar_of(path: Path, name: str) -> None:
    with tarfile.open(path, "w") as tar:
        member = tarfile.TarInfo(f"{name}.jpg")
        member.size = 4
        tar.addfile(member, io.BytesIO(b"tar!"))


@pytest.mark.slow
@pytest.mark.parametrize("locale", [ascii_locale, latin1_locale])
def test_names_with_accents_are_read_in_a_locale_that_is_not_utf_8(tmp_path: Path, locale: Any) -> None:
    root, places = tmp_path / "data/répertoire", tmp_path / "locales"
    (root / "chaton né").mkdir(parents=True)
    places.mkdir()
    files = {f"chaton né/{name}.jpg": f"image {number}" for number, name in enumerate(("a", "été", "日本"))}
    for name, text in files.items():
        (root / name).write_text(text)
    (root / "table.csv").write_text("uri\n" + "".join(f"{name}\n" for name in files), encoding="utf-8")
    tar_of(root / "forêt.tar", "é")
    tar_of(tmp_path / "data/b.tar", "b")
    settings = {name: value for name, value in os.environ.items() if not name.startswith(("LC_", "LANG", "PYTHONUTF8"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path / "data", env={**settings, **locale(places)},
        capture_output=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    in_shard = {"forêt.tar#é.jpg": "tar!"}
    found = json.loads(done.stdout)
    beside = f"{tmp_path}/data/b.tar#b.jpg"
    assert found == {
        **dict.fromkeys(("relative", "absolute", "as bytes of UTF-8", "again", "manifest"), files),
        "shard": in_shard,
        "shards": {**in_shard, beside: "tar!"},
    }
    (same,) = (uri.rpartition("/")[2] for uri in [read_webdataset(root / "forêt.tar", label_column=None).uri(0)])
    assert same in in_shard
