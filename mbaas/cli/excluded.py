"""The file of samples that a feed leaves out, which ``mbaas check --exclude`` writes and the key ``exclude`` names.

Text: a line with the fingerprint of the data, then the id and the location of one sample per line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from mbaas.errors import ConfigError

if TYPE_CHECKING:
    from mbaas.dataset import Dataset
    from mbaas.samples.order import Ids

HEADER = "# bad samples of the data with fingerprint "


def write(file: Path, whole: Dataset, ids: Ids) -> None:
    """Write the ids of bad samples of the ``whole`` data, ascending. A file that exists is replaced at once."""
    lines = [f"{number}\t{ascii(whole.uri(number))[1:-1]}" for number in ids.tolist()]
    text = "\n".join([HEADER + whole.fingerprint, *lines]) + "\n"
    if file.exists() and not file.is_file():  # such as /dev/stdout
        file.write_text(text)
        return
    target = file.resolve()  # a link remains one
    part = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        part.write_text(text)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def read(file: Path, whole: Dataset) -> Ids:
    """Return the ids of the samples to leave out, ascending: int64[k].

    Raises:
        ConfigError: the file cannot be read, was written for other data, or is not such a file.
    """
    try:
        first, *lines = file.read_text().splitlines() or [""]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {file}: {getattr(error, 'strerror', None) or error}") from None
    if not first.startswith(HEADER):
        raise ConfigError(f"{file} must be a file that mbaas check --exclude wrote, and begins with {first[:60]!r}")
    if (found := first.removeprefix(HEADER)) != whole.fingerprint:
        raise ConfigError(
            f"{file} is for data with fingerprint {found}, and {whole.root} has {whole.fingerprint}: its samples have "
            "changed; run mbaas check again"
        )
    ids = []
    for number, line in enumerate(lines, 2):
        text = line.partition("\t")[0].strip()
        if text and not (text.isdecimal() and int(text) < len(whole)):
            raise ConfigError(f"line {number} of {file} must begin with a sample's id below {len(whole)}, got {line!r}")
        ids += [int(text)] if text else []
    return np.unique(np.array(ids, np.int64))
