"""``mbaas init`` writes a feed file for the data in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Column
from rich.text import Text

from mbaas.base.units import counted
from mbaas.cli import console
from mbaas.errors import ConfigError, DatasetError

if TYPE_CHECKING:
    from mbaas.tools.recognize.look import Sight


NAMED = 3
"""Folders, and data that are not used, that are named in messages."""


@console.command(console.app, console.FIRST)
def init(
    folder: Annotated[Path, typer.Argument(metavar="DIR")],
    to: Annotated[Path, typer.Option("--out", metavar="FILE.yaml")] = Path("feed.yaml"),
    force: Annotated[bool, typer.Option("--force")] = False,
) -> None:
    """Write a feed file for the data in a folder, with a pipeline that fits.

    Recognizes images, audio files and arrays, with or without a folder per class; tables that name files; COCO
    annotations; and shards: tar, TFRecord, Parquet and saved Hugging Face datasets. It looks at names and at the
    beginnings of a few files. For data with a part for validation, it also writes FILE-val.yaml.

    Args:
        folder: A local folder.
        to: The file to write; paths in it are relative to its folder.
        force: Overwrite files that exist.

    Examples:
        mbaas init data/flowers
        mbaas init /data/imagenet --out imagenet.yaml
        mbaas check feed.yaml && mbaas serve feed.yaml    [dim]afterwards[/]
    """
    if "://" in str(folder) or ":/" in str(folder):
        raise ConfigError(f"mbaas init looks at local folders, got {folder}; examples/feed.yaml shows data: with a URI")
    console.check_folders(to)
    from mbaas.tools.recognize.kinds import datasets_in, recognize
    from mbaas.tools.recognize.look import look_at
    from mbaas.tools.recognize.text import feed_file

    with console.doing(f"looking at {folder}"):
        sight = look_at(folder)
    if several := datasets_in(sight):
        names = ", ".join(several[:5])
        raise DatasetError(f"{folder} has several datasets: {names}; name one: mbaas init {folder / several[0]}")
    found = recognize(sight)
    if found is None:
        raise DatasetError(_nothing(folder, sight))
    val_file = to.with_name(f"{to.stem}-val{to.suffix}")
    texts = {
        to: feed_file(found.train, name="train", folder=folder, file=to, has_validation=found.validation is not None)
    }
    if found.validation is not None:
        texts[val_file] = feed_file(found.validation, name="val", folder=folder, file=val_file, is_validation=True)
    _write(texts, force=force)
    rows = [("found", found.train.what)]
    rows += [("", f"for validation: {found.validation.what}")] if found.validation is not None else []
    rows += [("", f"not used: {other}") for other in found.others[:NAMED]]
    rows += [("", f"not used: {len(found.others) - NAMED} more")] if len(found.others) > NAMED else []
    rows += [("", f"may not be listed: {name}") for name in sight.tree.unreadable[:NAMED]]
    rows += [("wrote", " and ".join(map(str, texts)))]
    steps = [step.name for step in found.train.steps if not step.is_off]
    rows += [("pipeline", ", ".join(steps)), ("next", f"mbaas check {to}"), ("", f"mbaas serve {to}")]
    if steps[0] == "DecodeImage":
        rows.insert(-1, ("", f"mbaas show {to}"))
    console.out.print(console.facts(((name, Text(text)) for name, text in rows), Column(overflow="fold")))


def _write(texts: dict[Path, str], *, force: bool) -> None:
    for file, text in texts.items():
        try:
            if not force and (there := [str(each) for each in texts if each.exists()]):
                exist, them = ("exist", "them") if len(there) > 1 else ("exists", "it")
                text = f"{' and '.join(there)} {exist}; --force overwrites {them}, --out writes another file"
                raise ConfigError(text)
            file.write_text(text)
        except OSError as error:
            raise ConfigError(f"cannot write {file}: {error.strerror}") from None
        force = True  # the files that did not exist before are written now


def _nothing(folder: Path, sight: Sight) -> str:
    from collections import Counter

    from mbaas.tools.recognize.kinds import known_endings
    from mbaas.tools.recognize.look import ending

    files = sight.tree.all_files
    if sight.tree.unreadable:
        names = ", ".join(sight.tree.unreadable[:NAMED])
        return f"nothing that mbaas reads was found in {folder}; these folders may not be listed: {names}"
    if not files:
        return f"{folder} has no files; mbaas init knows {known_endings()}"
    endings = Counter(ending(file) or "without an ending" for file in files).most_common(5)
    there = ", ".join(f"{number} {name}" for name, number in endings)
    return f"{folder} has {counted(len(files), 'file')} ({there}), of no kind that is known: {known_endings()}"
