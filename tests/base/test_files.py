"""Every value of a file has a line number, and errors name it."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
from pydantic import Field

from mbaas.base import files, validation
from mbaas.base.units import Bytes, Seconds
from mbaas.base.validation import options
from mbaas.errors import ConfigError


@options(within="patience")
class Patience:
    """A group of options."""

    lease_s: Annotated[Seconds, Field(gt=0)] = 30.0
    tries: Annotated[int, Field(ge=1, le=9)] = 3

    def __post_init__(self) -> None:
        if self.tries > self.lease_s:
            raise ConfigError(f"tries must be at most lease_s, got {self.tries}", option="tries")


@options()
class Thing:
    """The content of the files in these tests."""

    size_bytes: Bytes
    flag: bool = False
    names: tuple[str, ...] = ()
    patience: Patience = Patience()


TEXT = """\
size_bytes: 2 GiB
flag:
names:
  - a
  - b
patience:
  lease_s: 1 min
"""


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "thing.yaml").write_text(text)
        return tmp_path / "thing.yaml"

    return write


def test_a_file_becomes_a_dataclass(write: Callable[[str], Path]) -> None:
    """Sizes and times have units; a key without a value has its default."""
    found = files.read(write(TEXT)).to(Thing)
    assert found == Thing(size_bytes=2 << 30, names=("a", "b"), patience=Patience(lease_s=60.0))


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("2 GiB", "much", "1: size_bytes must be a size such as '2 GiB' or '500 MB', or a whole number of bytes, 0 or"),
        ("2 GiB", "", "1: the file lacks 'size_bytes'"),
        ("flag:", "flag: 1", "2: flag must be true or false, got 1 (a whole number)"),
        ("flag:", "flg: true", "2: unknown key 'flg'; did you mean 'flag'?"),
        ("- b", "- 3", "5: names[1] must be text, got 3 (a whole number)"),
        ("1 min", "-1", "7: patience.lease_s must be a time such as '30 s', '1.6 ms' or '2 min', or a number of"),
        ("1 min", "0", "7: patience.lease_s must be above 0 seconds, got 0 (a whole number)"),
        ("lease_s: 1 min", "tries: 2.5", "7: patience.tries must be a whole number, got 2.5 (a number)"),
        ("lease_s: 1 min", "tries: '2'", "7: patience.tries must be a whole number, got '2' (text)"),
        ("lease_s: 1 min", "tries: true", "7: patience.tries must be a whole number, got true (true or false)"),
        ("lease_s: 1 min", "tries: 10", "7: patience.tries must be at most 9, got 10 (a whole number)"),
        ("lease_s: 1 min", "lease: 3", "7: unknown key 'lease'; did you mean 'lease_s'?"),
        ("lease_s: 1 min", "lease_s: 2\n  tries: 3", "8: patience: tries must be at most lease_s, got 3"),
        ("\n  lease_s: 1 min", " 5", "6: patience must be 'key: value' lines, got 5 (a whole number)"),
        ("flag:", "tries: 3", "2: unknown key 'tries'; it is 'patience.tries'"),
        ("flag:", "size_bytes: 3", "2: 'size_bytes' is given twice, first in line 1"),
        ("flag:", "3: 3", "2: a key must be text, got 3 (a whole number)"),
        ("flag:", "flag: [", "not valid YAML"),
        ("flag:", "flag: 2026-02-31", "2: flag must be true or false, got '2026-02-31' (text)"),
        ("flag:", "flag: !!timestamp 2026-02-31", "2: day "),
        ("- b", "- no", "5: names[1] must be text, got no (true or false); quote it if it is text: 'no'"),
        ("- b", "- 010", "5: names[1]: 010 is 8 in YAML: write 8, or with quotes '010' if it is text"),
        ("- b", "- 12:30", "5: names[1]: 12:30 is 750 in YAML: write 750, or with quotes '12:30' if it is text"),
        ("lease_s: 1 min", "tries: 03", "7: patience.tries: 03 is 3 in YAML: write 3, or"),
        ("flag:", "on: 3", "2: a key must be text, got on (true or false); quote it if it is text: 'on'"),
        ("flag:", "flag: [1, {a: b}]", "2: flag must be true or false, got [1, {a: b}] (a list)"),
        ("  - b", "\t- b", "5: not valid YAML: found character '\\t' that cannot start any token; indent with spaces"),
        ("lease_s: 1 min", "<<: 5", "7: << must name a mapping, or a list of mappings, got 5"),
        ("flag:", "flag: !!bool 3", "2: '3' is no bool"),
        ("flag:", "flag: !!timestamp then", "2: 'then' is no timestamp"),
        ("flag:", "flag: !!python/name:os.abort x", "2: not valid YAML: could not determine a constructor"),
        ("flag:", "flag: 0x" + "f" * 300, "2: a whole number must have at most 1000 bits, got 1,200"),
        ("flag:", "flag: " + "[" * 5000, "values must lie in at most 100 others, and lie deeper"),
    ],
)
def test_what_cannot_be_is_named_with_its_line(write: Callable[[str], Path], old: str, new: str, sentence: str) -> None:
    assert old in TEXT
    file = write(TEXT.replace(old, new))
    with pytest.raises(ConfigError, match=re.escape(sentence)) as caught:
        files.read(file).to(Thing, elsewhere={"tries": ("patience.tries",)})
    assert str(caught.value).startswith(f"{file}:")
    assert "\n" not in str(caught.value)


def read_value(text: str) -> object:
    return files.parse(f"value: {text}", Path("thing.yaml")).value["value"]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 0.001),
        ("2.5e3", 2500.0),
        ("-1E+2", -100.0),
        (".5e1", 5.0),
        ("'1e-3'", "1e-3"),
        ("e3", "e3"),
        ("1e", "1e"),
        ("2020-01-01", "2020-01-01"),
        ("2020-01-01T10:00:00Z", "2020-01-01T10:00:00Z"),
        ("'001'", "001"),
        ("0", 0),
        ("0.5", 0.5),
        ("0x10", 16),
        ("089", "089"),
    ],
)
def test_numbers_and_dates_are_what_people_mean(text: str, value: object) -> None:
    found = read_value(text)
    assert found == value
    assert type(found) is type(value)


def test_merged_keys_give_way_to_those_beside_them() -> None:
    text = "a: &a {x: 1, y: 1}\nb: &b {y: 2, z: 2}\nc: {<<: [*a, *b], x: 3}\nd:\n  <<: *b\n  y: 4\ne: {'<<': 5}\n"
    found = files.parse(text, Path("thing.yaml"))
    assert found.value["c"] == {"x": 3, "y": 1, "z": 2}
    assert found.value["d"] == {"y": 4, "z": 2}
    assert found.value["e"] == {"<<": 5}
    assert found.fields["d"].fields["z"].error("wrong").args[0] == "thing.yaml:2: wrong"


@pytest.mark.parametrize(
    ("python", "yaml"),
    [
        ("label=None leaves labels out", "label: null leaves labels out"),
        ("name a folder with unpacked=, into which", "name a folder with unpacked: ..., into which"),
        ("dali_share must be 1 with engine='cpu', which", "dali_share must be 1 with engine: 'cpu', which"),
        ("draw with each_epoch=False", "draw with each_epoch: false"),
        ("must make one of another name: field=...", "must make one of another name: field: ..."),
        ("with n_fft=400 needs a == b", "with n_fft: 400 needs a == b"),
        ("s3://bucket/a?region=x&scheme=http is missing", "s3://bucket/a?region=x&scheme=http is missing"),
    ],
)
def test_hints_are_in_the_words_of_the_file(python: str, yaml: str) -> None:
    assert files.in_yaml(python) == yaml


def test_null_is_a_value_and_nothing_is_none(write: Callable[[str], Path]) -> None:
    @options()
    class Table:
        label: str | None = "cls"
        rows: int = 1

    assert files.read(write("label: null\n")).to(Table).label is None
    assert files.read(write("label:\n")).to(Table).label == "cls"
    with pytest.raises(ConfigError, match="1: rows must be a whole number, got ~"):
        files.read(write("rows: ~\n")).to(Table)


def test_a_mapping_that_merges_itself_is_refused(write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"thing\.yaml"):
        files.read(write("a: &a {x: 1, <<: *a}\n"))


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_files_of_windows_are_read(tmp_path: Path, mark: str) -> None:
    file = tmp_path / "thing.yaml"
    file.write_bytes((mark + TEXT.replace("\n", "\r\n")).encode())
    assert files.read(file).to(Thing).names == ("a", "b")
    file.write_bytes((mark + '{"a": 1}\r\n').encode())
    assert files.read_json(file) == {"a": 1}


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Patience(lease_s=-1), "patience.lease_s must be a time such as"),
        (lambda: Patience(lease_s=0), "patience.lease_s must be above 0 seconds, got 0"),
        (lambda: Patience(tries=True), "patience.tries must be a whole number, got True"),
        (lambda: Patience(trise=1), "unknown option 'patience.trise'; did you mean 'tries'?"),
        (lambda: Patience(tries=3, lease_s=2), "tries must be at most lease_s, got 3"),
        (lambda: Thing(), "size_bytes is missing"),
        (lambda: Thing(size=3, size_bytes=3), "unknown option 'size'; known are flag, names, patience, size_bytes"),
        (lambda: Thing(size_bytes=3, names=("a", 4)), "names.1 must be text, got 4"),
        (lambda: Thing(size_bytes=3, patience={"lease_s": 3}), "patience must be Patience(...), got {'lease_s': 3}"),
    ],
)
def test_python_callers_get_the_same_sentences(make: Callable[[], object], sentence: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(sentence)):
        make()


@pytest.mark.parametrize("text", ["", "just text", "- a\n- list", "\tname: x"])
def test_a_file_without_a_mapping_is_refused(write: Callable[[str], Path], text: str) -> None:
    with pytest.raises(ConfigError, match=r"thing\.yaml"):
        files.read(write(text))


def test_a_file_that_cannot_be_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read .*none.yaml: No such file"):
        files.read(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"^cannot read .*none.json: No such file"):
        files.read_json(tmp_path / "none.json")
    (tmp_path / "bytes.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="it is not UTF-8 text"):
        files.read(tmp_path / "bytes.yaml")


def test_aliases_that_mean_billions_of_values_are_refused(write: Callable[[str], Path]) -> None:
    lines = ["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 10)}]" for i in range(12))]
    with pytest.raises(
        ConfigError, match=r"thing\.yaml:\d+: the file must hold at most 100,000 values, and holds more"
    ):
        files.read(write("\n".join(lines)))


def test_a_value_that_holds_itself_is_refused(write: Callable[[str], Path]) -> None:
    with pytest.raises(ConfigError, match=r"thing\.yaml:1: values must lie in at most 100 others"):
        files.read(write("a: &a [*a]"))


@pytest.mark.parametrize("text", ['{"a": ' + "9" * 5000 + "}", '{"a": ' + "[" * 100_000])
def test_json_that_python_cannot_hold_is_refused(write: Callable[[str], Path], text: str) -> None:
    with pytest.raises(ConfigError, match=r"thing\.yaml: (not valid JSON: Exceeds|values must lie)"):
        files.read_json(write(text))


def test_a_file_without_an_end_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"cannot read /dev/zero: it must have at most 67,108,864 bytes, and has more"
    ):
        files.read(Path("/dev/zero"))


def test_a_pipe_is_read_and_one_into_which_nobody_writes_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "PIPE_S", 0.05)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match=r"cannot read .*pipe: it sent nothing for 50 ms"):
        files.read(tmp_path / "pipe")
    reading, writing = os.pipe()
    os.write(writing, b"size_bytes: 2 GiB\n")
    os.close(writing)
    assert files.read(Path(f"/dev/fd/{reading}")).to(Thing).size_bytes == 2 << 30
    os.close(reading)


@pytest.mark.parametrize("text", ["2026-02-31", "!!bool 3", "!!int ''", "[" * 5000, "'", "\ud800"])
def test_what_is_typed_and_is_no_value_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"cores must be a (value|whole number), got"):
        files.read_value(int, text, name="cores")


def test_a_typed_number_has_no_thousands_of_digits() -> None:
    with pytest.raises(ConfigError, match=r"cores must have at most 1,000 bits, got 20,000"):
        files.read_value(int, "0x" + "f" * 5000, name="cores")


def test_the_reader_of_a_class_is_made_once_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In CPython 3.11, ``ast.parse``, by which readers find docstrings, may fail in two threads at once."""

    @dataclass
    class Read:
        value: int

    made = []

    def slowly(kind: type) -> pydantic.TypeAdapter[Any]:
        made.append(kind)
        time.sleep(0.05)
        return adapter(kind)

    adapter = pydantic.TypeAdapter
    monkeypatch.setattr(pydantic, "TypeAdapter", slowly)
    with ThreadPoolExecutor(4) as threads:
        readers = [*threads.map(validation.adapter_of, [Read] * 4)]
    assert made == [Read]
    assert len(set(map(id, readers))) == 1
    assert readers[0].validate_json('{"value": 3}') == Read(3)
