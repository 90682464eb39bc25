"""A loader's state is JSON with a schema, and an invalid state is refused with the reason."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from mbaas.client.ledger import EpochProgress
from mbaas.client.saved_state import read_state, schema
from mbaas.errors import StateError
from mbaas.samples.fields import Field
from mbaas.samples.order import SampleOrder, Shuffle
from mbaas.settings import FeedSettings
from mbaas.wire.consumers import FeedInfo
from mbaas.wire.samples import SampleSpec

ORDER = SampleOrder(num_samples=1003, seed=0, block_samples=192)
FINGERPRINT = "data-pipeline-0"
SETTINGS = FeedSettings(name="train", batch_size=64, cache_bytes=0, staging_bytes=1, prep_workers=1)
INFO = FeedInfo(
    SETTINGS,
    ORDER,
    SampleSpec(Field("image", (1,), "uint8"), ()),
    FINGERPRINT,
    None,
    has_images=True,
    class_names=(),
    engine="cpu",
    engine_reason="cpu prepares 400 samples/s",
)
GUIDE = Path(__file__).parents[2] / "docs" / "how-to" / "resume.md"


def state(**changed: Any) -> dict[str, Any]:
    """A state of rank 1 of 2 after 64 samples of both ranks, with changes."""
    share = {"rank": 1, "world_size": 2, "samples": 32, "id_hash": 2**63}
    return {
        "version": 3, "fingerprint": FINGERPRINT, "engine": "cpu", "epoch": 3, "feed_epoch": 7, "position": 65,
        "samples": 64, "id_hash": 2**64 - 1, "left_out": [17], "share": share,
        "begin": 0, "shuffle": [[6, []], [7, [96, 192]]], **changed,
    }  # fmt: skip


def share(**changed: Any) -> dict[str, Any]:
    return state(share={**state()["share"], **changed})


def read(value: object) -> Any:
    return read_state(value, info=INFO)


def test_a_state_comes_through_json_as_it_was():
    saved = read(json.loads(json.dumps(state())))
    progress = EpochProgress.restored(saved, rank=1, world_size=2)
    told = ("begin", "position", "shuffle", "samples", "id_hash", "left_out", "share")
    assert progress.state() == {key: state()[key] for key in told}
    assert (progress.feed_epoch, progress.shuffle) == (7, Shuffle(7, (96, 192), Shuffle(6)))


def test_a_state_of_the_other_engine_is_refused_if_auto_chose_this_one():
    with pytest.raises(StateError) as caught:
        read(state(engine="dali"))
    told = str(caught.value)
    assert "prepared by engine 'dali', and feed 'train' has 'cpu'" in told
    assert "(cpu prepares 400 samples/s)" in told
    assert "engine='dali' to continue with the same bytes, or with engine='cpu'" in told


def test_a_state_of_the_other_engine_is_read_with_a_warning_if_the_engine_is_named(caplog):
    named = structs.replace(INFO, settings=replace(SETTINGS, engine="cpu"))
    assert read_state(state(engine="dali"), info=named).position == 65
    assert "prepared by engine 'dali', those of feed 'train' are by 'cpu'" in caplog.text


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ([], r"loader state must be the dict that state_dict\(\) returned, got list"),
        (None, "got NoneType"),
        ({}, "loader state must have version 3, got None"),
        (state(version=1), "loader state must have version 3, got 1"),
        (state(version=2), "loader state must have version 3, got 2"),
        (state(version=True), "loader state must have version 3, got True"),
        (state(begin=1003), "state.begin must be at most 1002, the last sample's position, got 1003"),
        (state(shuffle=[[7, [96]]]), "state.shuffle cannot be: a shuffle must have cuts exactly if it has a base"),
        (state(shuffle=[[6, []], [7, [2000]]]), "state.shuffle must be at most 1002, the last sample's position"),
        (state(shuffle=[[6, []], [7, [5, 5]]]), "state.shuffle cannot be: cuts must ascend"),
        (state(shuffle=[[8, []]]), "state.shuffle must be of epoch 7, the epoch of position 65, got one of epoch 8"),
        (state(begin=960), "state.shuffle must be of epoch 8, the epoch of position 65, got one of epoch 7"),
        (state(shuffle=[[number, []] for number in range(200)]), "state.shuffle must be at most"),
        (state(shuffle=[["7", []]]), "state.shuffle.0.0 must be a whole number"),
        ({"version": 3}, "state.fingerprint is missing"),
        (state(engine="tpu"), "state.engine must be"),
        (state(position=-1), "state.position must be at least 0, got -1"),
        (state(position=1.5), "state.position must be a whole number, got 1.5"),
        (state(position="5"), "state.position must be a whole number, got '5'"),
        (state(position=1004), "state.position must be at most 1003, the number of samples of the dataset, got 1004"),
        (state(position=10**12), "state.position must be at most 1003"),
        (state(epoch=-1), "state.epoch must be at least 0, got -1"),
        (state(feed_epoch=2**41), r"state.feed_epoch must be at most 2,\d{3},\d{3},\d{3}, got 2199023255552"),
        (state(feed_epoch=float("nan")), "state.feed_epoch must be"),
        (state(samples=66), "state.samples must be at most 65, the position, got 66"),
        (state(left_out=[0, 1003]), "state.left_out must be at most 1002, the last sample's id, got 1003"),
        (state(left_out=[4, 4]), "state.left_out must name each sample once"),
        (state(left_out=[0, None]), "state.left_out.1 must be a whole number, got None"),
        (state(more=1), "state.more is not known; a loader's state of version 3 has version, fingerprint, engine"),
        (state(fingerprint="other"), "its fingerprint is other, the feed's is data-pipeline-0"),
        (state(samples={1, 2}), "loader state must be plain JSON: .* set is not JSON"),
        (state(fingerprint="\ud800"), "loader state must be plain JSON"),
        (share(rank=2), "state.share.rank must be at most 1, the last rank, got 2"),
        (share(samples=65), "state.share.samples must be at most 64, the samples of all ranks, got 65"),
        (share(world_size=0), "state.share.world_size must be at least 1, got 0"),
        (share(id_hash=None), "state.share.id_hash must be a whole number, got None"),
    ],
    ids=str,
)
def test_what_cannot_be_a_state_is_refused_by_its_value_and_what_it_must_be(wrong, sentence):
    with pytest.raises(StateError, match=sentence):
        read(wrong)


def test_a_number_that_python_cannot_write_is_refused():
    with pytest.raises(StateError, match="loader state must have version 3, got a value of type int"):
        read({"version": 10**5000})


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.sampled_from(sorted(state())), JSON, max_size=3), st.sets(st.sampled_from(sorted(state()))))
@settings(deadline=None)  # the first example imports pydantic
def test_a_value_is_read_or_refused_with_a_sentence_and_only_what_the_schema_allows_is_read(changed, left):
    value = {key: found for key, found in {**state(), **changed}.items() if key not in left}
    try:
        saved = read(value)
    except StateError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert re.match("state|loader state|the state", refusal)
        return
    jsonschema.validate(value, schema())
    assert 0 <= saved.samples <= saved.position <= ORDER.num_samples


def test_the_guide_says_what_each_key_means():
    text = GUIDE.read_text()
    for name, about in schema()["properties"].items():
        assert f"| `{name}` |" in text, name
        assert about.get("description") or "$ref" in str(about), name
