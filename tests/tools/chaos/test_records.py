"""Trial records survive the trial's death, and each minibatch counts once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mbaas.errors import ConfigError
from mbaas.tools.chaos import records
from mbaas.tools.chaos.checker import Delivery
from mbaas.tools.chaos.records import Incarnation, Step, Writer, history

STATE = {"feed_epoch": 3, "position": 2}


def batch(*ids: int) -> dict[str, Any]:
    images = np.stack([np.full((4, 4, 3), i, np.uint8) for i in ids])
    return {"image": images, "label": np.array(ids) % 2, "sample_id": np.array(ids)}


def step(number: int) -> Step:
    return Step(Delivery(0, ((number, "x"),)), 0.0, 0.0, {"position": number})


def test_what_was_written_is_read_back_and_the_next_process_goes_on_after_it(tmp_path: Path) -> None:
    writer = Writer.open(tmp_path, "t")
    assert writer.state is None
    writer.step(batch(4, 5), {**STATE, "position": 2}, asked_at=1.0, got_at=2.5)
    writer.error(ValueError("no"))
    second = Writer.open(tmp_path, "t")
    assert second.state == {**STATE, "position": 2}
    second.step(batch(6), {**STATE, "position": 3}, asked_at=3.0, got_at=4.0)
    second.nothing({**STATE, "feed_epoch": 4, "position": 0})
    second.close()
    first, last = records.read(tmp_path)["t"]
    assert (first.builds_on, last.builds_on) == (0, 1)
    assert (first.is_closed, last.is_closed) == (False, True)
    assert [(kind, message) for _, kind, message in first.errors] == [("ValueError", "no")]
    steps = history([first, last])
    assert [[sample for sample, _ in each.delivery.rows] for each in steps] == [[4, 5], [6], []]
    assert [each.delivery.epoch for each in steps] == [3, 3, 4]
    assert (steps[0].asked_at, steps[0].got_at) == (1.0, 2.5)


def test_a_line_that_was_being_written_does_not_count(tmp_path: Path) -> None:
    Writer.open(tmp_path, "t").step(batch(1), STATE, asked_at=0.0, got_at=0.0)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = records.read(tmp_path).get("t", [])
        assert len(history(found)) == 0, length
    path.write_bytes(whole)
    assert len(history(records.read(tmp_path)["t"])) == 1


@pytest.mark.parametrize("change", ["image", "label"])
def test_one_bit_makes_another_digest(tmp_path: Path, change: str) -> None:
    exact, other = batch(1, 2), batch(1, 2)
    other[change][1] ^= 1
    for name, content in (("exact", exact), ("other", other)):
        Writer.open(tmp_path, name).step(content, STATE, asked_at=0.0, got_at=0.0)
    found = {name: history(each)[0].delivery.rows for name, each in records.read(tmp_path).items()}
    assert [a == b for a, b in zip(found["exact"], found["other"], strict=True)] == [True, False]


def test_what_a_process_wrote_after_its_successor_began_does_not_count() -> None:
    old = Incarnation("t", 1, 0, (step(1), step(2), step(3)))
    new = Incarnation("t", 2, 2, (step(30), step(4)))
    assert [each.state["position"] for each in history([old, new])] == [1, 2, 30, 4]


def test_more_than_ten_processes_stay_in_order(tmp_path: Path) -> None:
    for number in range(12):
        Writer.open(tmp_path, "t").step(batch(number), {**STATE, "position": number}, asked_at=0.0, got_at=0.0)
    steps = history(records.read(tmp_path)["t"])
    assert [each.state["position"] for each in steps] == list(range(12))


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        (b'"pid"', b'"pdi"', r"t\.0\.jsonl:1: no line of a trial's record: pid: Field required"),
        (b'"builds_on": 0', b'"builds_on": -1', r"t\.0\.jsonl:1: .*builds_on: .* greater than or equal to 0"),
        (
            b'"ids": [1, 2]',
            b'"ids": [1]',
            r"t\.0\.jsonl:2: .* must have a digest for each of 1 samples, got 2",
        ),
        (b'"epoch"', b"epoch", r"t\.0\.jsonl:2: no line of a trial's record: Invalid JSON"),
        (b'"ids": [1, 2]', b'"ids": [1, "2"]', r"t\.0\.jsonl:2: .*ids\.1: Input should be a valid integer"),
    ],
)
def test_what_no_trial_writes_is_refused_with_its_line(
    tmp_path: Path, before: bytes, after: bytes, sentence: str
) -> None:
    writer = Writer.open(tmp_path, "t")
    writer.step(batch(1, 2), STATE, asked_at=0.0, got_at=0.0)
    path = tmp_path / "t.0.jsonl"
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after, 1))
    with pytest.raises(ConfigError, match=sentence):
        records.read(tmp_path)


def test_a_file_of_another_name_is_no_record(tmp_path: Path) -> None:
    (tmp_path / "notes.jsonl").write_text("{}\n")
    with pytest.raises(ConfigError, match=r"notes\.jsonl: a record must be called 'trial\.number\.jsonl'"):
        records.read(tmp_path)


def test_the_order_of_an_epoch_is_empty_only_if_it_is_shuffled_as_a_whole(tmp_path: Path) -> None:
    writer = Writer.open(tmp_path, "ranks[0]")
    for shuffle, begin in (([[3, []]], 0), ([[2, []], [3, [7]]], 5)):
        writer.step(batch(1), {**STATE, "shuffle": shuffle, "begin": begin}, asked_at=0.0, got_at=0.0)
    deliveries = [each.delivery for each in history(records.read(tmp_path, "ranks[0]")["ranks[0]"])]
    assert [(each.order, each.begin) for each in deliveries] == [("", 0), ("[[2, []], [3, [7]]]", 5)]


def test_the_newest_of_trials_goes_on_until_it_has_ended_by_itself(tmp_path: Path) -> None:
    numbers = []
    for _ in range(3):
        number = records.newest(tmp_path, "newcomer")
        Writer.open(tmp_path, f"newcomer.{number}").step(batch(1), STATE, asked_at=0.0, got_at=0.0)
        again = records.newest(tmp_path, "newcomer")
        Writer.open(tmp_path, f"newcomer.{again}").close()
        numbers += [number, again]
    assert numbers == [0, 0, 1, 1, 2, 2]
    assert [len(each) for each in records.read(tmp_path).values()] == [2, 2, 2]
