"""The form of decoded samples is chosen for all pipelines in use, and changes only for one that stays the best."""

from __future__ import annotations

import dataclasses

import pytest
from msgspec.structs import replace

from mbaas.core.kept_form import FEED_PIPELINE, STAY_S, KeptForm
from mbaas.model.forms import SampleCosts
from mbaas.samples.placement import ENCODED
from mbaas.wire.samples import DecodedCosts, DecodedSamples

WHOLE, SMALL, OTHER = 11, 12, 13
"""Whole images, and two forms to which pipelines reduce them next."""

SAMPLES, PLENTY = 1000.0, 1e9


def costs(form: int, *, kilobytes: float, rest_ms: float) -> DecodedCosts:
    """Costs of one form of a sample whose file has 100 kB and takes 10 ms."""
    return DecodedCosts(kilobytes * 1e3, 0.010, rest_ms / 1e3, kilobytes * 1e3 * SAMPLES, form)


DECODED = costs(WHOLE, kilobytes=600, rest_ms=3)
FEEDS = (DECODED, costs(SMALL, kilobytes=150, rest_ms=1))
RESIZED_OTHERWISE = (DECODED, costs(OTHER, kilobytes=300, rest_ms=1))

FIRST = DecodedSamples(
    "as ever",
    SMALL,
    SampleCosts(encoded_bytes=100e3, decoded_bytes=150e3, encoded_s=0.010, decoded_s=0.001, storage_s=0.0001),
    threads=2,
)


def chosen(pipelines: dict[str, tuple[DecodedCosts, ...]], memory_bytes: float = PLENTY, **options: object) -> int:
    """Return the form in use after these pipelines have stayed."""
    first = replace(FIRST, costs=dataclasses.replace(FIRST.costs, **options))
    kept = KeptForm(first, is_new=True)
    for now in (0.0, STAY_S):
        kept.look(now, pipelines, samples=SAMPLES, memory_bytes=memory_bytes)
    assert kept.current is not None
    return kept.current.form


def test_the_feeds_own_pipeline_alone_keeps_its_own_form() -> None:
    assert chosen({FEED_PIPELINE: FEEDS}) == SMALL
    assert chosen({}) == SMALL


def test_pipelines_with_the_same_prefix_keep_all_of_it() -> None:
    assert chosen({FEED_PIPELINE: FEEDS, "a": FEEDS, "b": FEEDS}) == SMALL


def test_pipelines_that_part_after_decoding_keep_whole_images() -> None:
    assert chosen({FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}) == WHOLE


def test_a_form_that_the_feeds_own_pipeline_does_not_have_is_kept_if_all_others_have_it() -> None:
    assert chosen(dict.fromkeys("abc", RESIZED_OTHERWISE)) == OTHER


def test_many_with_a_longer_prefix_outweigh_one_without_it() -> None:
    """Eight times 1 ms and once 10 ms take less than nine times 3 ms."""
    pipelines = {FEED_PIPELINE: FEEDS, **dict.fromkeys("abcdefg", FEEDS), "z": RESIZED_OTHERWISE}
    assert chosen(pipelines) == SMALL
    assert chosen({FEED_PIPELINE: FEEDS, "a": FEEDS, "y": RESIZED_OTHERWISE, "z": RESIZED_OTHERWISE}) == WHOLE


def test_nothing_is_kept_decoded_if_everyone_would_wait_for_storage() -> None:
    """There is memory for all files, or for 60 % of the smaller images and the other files. A pipeline that cannot use
    the images reads these 60 % from slow storage.
    """
    pipelines = {FEED_PIPELINE: FEEDS, "z": (costs(OTHER, kilobytes=5000, rest_ms=1),)}
    assert chosen(pipelines, memory_bytes=130e6, storage_s=0.1) == ENCODED
    assert chosen(pipelines, memory_bytes=130e6, storage_s=1e-5) == SMALL


@pytest.mark.parametrize("without", [(), (costs(OTHER, kilobytes=300, rest_ms=10),)])
def test_a_pipeline_without_a_common_form_is_counted(without: tuple[DecodedCosts, ...]) -> None:
    assert chosen({"a": FEEDS, "b": FEEDS, "c": without}) == SMALL


def test_a_form_changes_only_for_pipelines_that_stay() -> None:
    kept, both = KeptForm(FIRST, is_new=True), {FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}
    room = {"samples": SAMPLES, "memory_bytes": PLENTY}
    assert kept.look(0.0, both, **room) is None
    assert kept.look(STAY_S - 1, both, **room) is None
    assert kept.look(STAY_S, {FEED_PIPELINE: FEEDS}, **room) is None, "it has gone"
    assert kept.look(STAY_S + 1, both, **room) is None, "it starts again"
    changed = kept.look(2 * STAY_S + 1, both, **room)
    assert changed is not None
    assert changed.form == WHOLE
    assert changed.costs.decoded_bytes == 600e3
    assert (changed.costs.encoded_s, changed.costs.decoded_s) == (0.020, 0.006), "one sample in both pipelines"
    assert kept.look(3 * STAY_S, both, **room) is None, "it is in use"
    assert kept.look(4 * STAY_S, {FEED_PIPELINE: FEEDS}, **room) is None
    back = kept.look(5 * STAY_S, {FEED_PIPELINE: FEEDS}, **room)
    assert back == FIRST


def test_nobody_there_changes_nothing() -> None:
    kept, room = KeptForm(FIRST, is_new=True), {"samples": SAMPLES, "memory_bytes": PLENTY}
    both = {FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}
    kept.look(0.0, both, **room)
    assert kept.look(STAY_S, both, **room) is not None
    for now in (STAY_S + 1, 9 * STAY_S):
        assert kept.look(now, {}, **room) is None


def test_a_restarted_coordinator_tells_the_nodes_again() -> None:
    """Their present form is unknown to it."""
    kept, room = KeptForm(FIRST, is_new=False), {"samples": SAMPLES, "memory_bytes": PLENTY}
    assert kept.look(0.0, {FEED_PIPELINE: FEEDS}, **room) is None
    assert kept.look(STAY_S, {FEED_PIPELINE: FEEDS}, **room) == FIRST
    assert kept.look(2 * STAY_S, {FEED_PIPELINE: FEEDS}, **room) is None


def test_the_reason_names_who_can_use_the_form() -> None:
    kept, both = KeptForm(FIRST, is_new=True), {FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}
    for now in (0.0, STAY_S):
        kept.look(now, both, samples=SAMPLES, memory_bytes=PLENTY)
    assert "after 1 transform" in kept.reason(both)
    assert "2 of 2 pipelines" in kept.reason(both)
    kept = KeptForm(replace(FIRST, form=ENCODED), is_new=True)
    assert kept.reason(both) == "no decoded samples are kept from now on, for 2 pipelines together"


def test_a_single_pipeline_that_a_consumer_brought_keeps_its_own_form() -> None:
    assert chosen({"a": RESIZED_OTHERWISE}) == OTHER


def test_a_form_of_one_pipeline_among_several_is_no_choice() -> None:
    """Its form would leave 10 ms for both, whole images leave 16 ms, and 20 ms is all that they take."""
    feeds = (costs(WHOLE, kilobytes=600, rest_ms=8), costs(SMALL, kilobytes=150, rest_ms=10))
    others = (costs(WHOLE, kilobytes=600, rest_ms=8), costs(OTHER, kilobytes=150, rest_ms=0))
    assert chosen({FEED_PIPELINE: feeds, "a": others}) == WHOLE


@pytest.mark.parametrize(("rest_ms", "form"), [(5.3, SMALL), (5.2, WHOLE)])
def test_a_form_changes_only_for_five_percent(rest_ms: float, form: int) -> None:
    """The feed's form takes 1 ms with its own pipeline and 10 ms with the other; whole images take as long with both.

    11 ms change to 10.4 ms, not to 10.6 ms.
    """
    whole = costs(WHOLE, kilobytes=600, rest_ms=rest_ms)
    pipelines = {FEED_PIPELINE: (whole, FEEDS[1]), "a": (whole, costs(OTHER, kilobytes=300, rest_ms=1))}
    assert chosen(pipelines, storage_s=0.0) == form


@pytest.mark.parametrize(("storage_s", "changes"), [(0.008, True), (0.004, False)])
def test_nodes_hear_of_more_pipelines_in_their_form_if_more_of_it_is_worth_keeping(
    storage_s: float, changes: bool
) -> None:
    """There is memory for 60 % of the files, or for 40 % of the decoded samples.

    At 8 ms for a read, one pipeline keeps 21 % decoded, and three keep 40 %. At 4 ms, 40 % are best for both.
    """
    first = replace(FIRST, costs=dataclasses.replace(FIRST.costs, storage_s=storage_s))
    kept, room = KeptForm(first, is_new=True), {"samples": SAMPLES, "memory_bytes": 60e6}
    three = dict.fromkeys((FEED_PIPELINE, "a", "b"), FEEDS)
    assert kept.look(0.0, three, **room) is None
    told = kept.look(STAY_S, three, **room)
    assert (told is not None) == changes
    assert kept.current is not None
    assert kept.current.form == SMALL
    assert kept.current.costs.encoded_s == pytest.approx(0.030 if changes else 0.010)


def test_the_feeds_own_pipeline_alone_keeps_its_own_form_even_if_another_one_seems_shorter() -> None:
    """Whole images leave nothing to do here, and smaller ones leave 5 ms."""
    feeds = (costs(WHOLE, kilobytes=600, rest_ms=0), costs(SMALL, kilobytes=150, rest_ms=5))
    assert chosen({FEED_PIPELINE: feeds}) == SMALL
    assert chosen({"a": feeds}) == WHOLE


def test_a_form_is_used_in_time_although_trials_come_and_go() -> None:
    """Whole images are the best form from 0 s on, for two pipelines as for three."""
    kept, room = KeptForm(FIRST, is_new=True), {"samples": SAMPLES, "memory_bytes": PLENTY}
    two = {FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}
    assert kept.look(0.0, two, **room) is None
    assert kept.look(STAY_S / 2, {**two, "b": RESIZED_OTHERWISE}, **room) is None
    changed = kept.look(STAY_S, two, **room)
    assert changed is not None
    assert changed.form == WHOLE


def test_a_restarted_coordinator_finds_the_form_of_several_pipelines() -> None:
    kept, room = KeptForm(FIRST, is_new=False), {"samples": SAMPLES, "memory_bytes": PLENTY}
    both = {FEED_PIPELINE: FEEDS, "a": RESIZED_OTHERWISE}
    assert kept.look(0.0, both, **room) is None
    told = kept.look(STAY_S, both, **room)
    assert told is not None
    assert told.form == WHOLE


def test_where_storage_takes_as_long_with_either_form_the_one_that_saves_cpu_time_is_kept() -> None:
    """There is memory for 60 % of the samples in any form. Reads take 0.4 x 100 = 40 ms with either one.

    CPUs take (20 - 0.6 x 4) / 2 = 8.8 ms with smaller images, and (20 - 0.6 x 18) / 2 = 4.6 ms with whole ones: 44.6 ms
    in place of 48.8 ms.
    """
    feeds = (costs(WHOLE, kilobytes=100, rest_ms=1), costs(SMALL, kilobytes=100, rest_ms=8))
    assert chosen({FEED_PIPELINE: feeds, "a": feeds}, memory_bytes=60e6, storage_s=0.1) == WHOLE


def test_a_form_with_a_shorter_epoch_is_kept_even_if_it_takes_more_time_of_all_resources() -> None:
    """Eight pipelines take 8 x 3 / 2 = 12 ms of the CPUs from whole images.

    From smaller ones, seven pipelines take 1 ms and one takes 10 ms: 8.5 ms. That one needs the file, which is read
    meanwhile in 4 ms.
    """
    first = replace(FIRST, form=WHOLE, costs=dataclasses.replace(FIRST.costs, storage_s=0.004))
    kept, room = KeptForm(first, is_new=True), {"samples": SAMPLES, "memory_bytes": PLENTY}
    pipelines = {FEED_PIPELINE: FEEDS, **dict.fromkeys("abcdef", FEEDS), "z": RESIZED_OTHERWISE}
    assert kept.look(0.0, pipelines, **room) is None
    changed = kept.look(STAY_S, pipelines, **room)
    assert changed is not None
    assert changed.form == SMALL


@pytest.mark.parametrize(("threads", "form"), [(2, ENCODED), (1, SMALL)])
def test_with_fewer_threads_decoded_samples_are_worth_more_reads(threads: int, form: int) -> None:
    """There is memory for all files, or for 60 % of the smaller images and the other files, as above.

    Then 60 % of the files are read in 20 ms each: 12 ms. CPUs take 14.6 ms / threads, and 20 ms / threads without
    decoded samples. So an epoch takes 12 or 10 ms with two threads, and 14.6 or 20 ms with one.
    """
    first = replace(FIRST, threads=threads, costs=dataclasses.replace(FIRST.costs, storage_s=0.02))
    kept = KeptForm(first, is_new=True)
    pipelines = {FEED_PIPELINE: FEEDS, "z": (costs(OTHER, kilobytes=5000, rest_ms=1),)}
    for now in (0.0, STAY_S):
        kept.look(now, pipelines, samples=SAMPLES, memory_bytes=130e6)
    assert kept.current is not None
    assert kept.current.form == form
