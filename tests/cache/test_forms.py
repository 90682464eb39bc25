"""A node's decoded samples change to another form while pipelines with other prefixes read them."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from played_node import FORM, SMALLER, Node

from mbaas.samples.placement import ENCODED, PartRequest, StreamKey

SAMPLES, BYTES, BLOCK = 96, 6, 8

SHORT, LONG = (FORM,), (FORM, SMALLER)
"""The forms for a pipeline with one deterministic transform, and for one with two."""


def node(memory: float, *, readahead: int = 0) -> Node:
    """A node with ``memory`` bytes for each byte in storage."""
    return Node([BYTES] * SAMPLES, block_samples=BLOCK, cache=int(memory * SAMPLES * BYTES), readahead=readahead)


def read(of: Node, request: PartRequest) -> tuple[int, int]:
    """Fetch a part and hand in the requested samples; return the numbers of samples from storage, and decoded."""
    form = of.planner.tier.form
    of.begin(request)
    while awaited := of.planner.awaited(request):
        of.fill(min(awaited))
    asked, rows = of.asked(request), of.planner.locate(request)
    of.deliver(request)
    if asked:
        assert form in request.forms
        hand_in = of.hand_in(request, asked, form=form)
        if len(hand_in.sample_ids):
            of.land(hand_in.slab)
    return rows.counts.storage.samples, rows.counts.decoded.samples


def epoch(of: Node, number: int, *streams: tuple[int, ...]) -> list[tuple[int, int]]:
    """Read an epoch with several pipelines side by side; return these numbers for each pipeline."""
    sums = np.zeros((len(streams), 2), np.int64)
    for block in range(number * SAMPLES // BLOCK, (number + 1) * SAMPLES // BLOCK):
        for index, forms in enumerate(streams):
            sums[index] += read(of, of.placements.own(block, None, StreamKey(0, forms)))
    return [(int(storage), int(decoded)) for storage, decoded in sums]


def kept_in(of: Node, form: int) -> int:
    amount = of.planner.directory.by_form.get(form)
    return 0 if amount is None else amount.samples


@pytest.mark.parametrize("readahead", [0, 100])
def test_a_shorter_prefix_replaces_the_longer_one_while_both_pipelines_go_on(readahead: int) -> None:
    """Samples are read from storage once more, for the pipeline that is new; the other one goes on from its copies."""
    of = node(6.0, readahead=readahead)
    of.aim(6 * SAMPLES * BYTES, SMALLER)
    epoch(of, 0, LONG)
    assert epoch(of, 1, LONG) == [(0, SAMPLES)]
    of.aim(6 * SAMPLES * BYTES, FORM)
    assert epoch(of, 2, LONG, SHORT) == [(0, SAMPLES), (SAMPLES, 0)]
    assert (kept_in(of, FORM), kept_in(of, SMALLER)) == (SAMPLES, 0)
    assert epoch(of, 3, LONG, SHORT) == [(0, SAMPLES)] * 2


def test_a_pipeline_that_cannot_use_the_decoded_form_reads_stored_bytes_once_for_all_like_it() -> None:
    of = node(6.0)
    of.aim(6 * SAMPLES * BYTES, SMALLER)
    epoch(of, 0, LONG)
    assert epoch(of, 1, LONG, SHORT, ()) == [(0, SAMPLES), (SAMPLES, 0), (SAMPLES, 0)]
    assert kept_in(of, SMALLER) == SAMPLES


@pytest.mark.parametrize("memory", [6.0, 3.1])
def test_a_longer_prefix_is_made_from_the_shorter_one(memory: float) -> None:
    """Nothing is read from storage, unless memory was full: then some samples give way to the first new ones."""
    of = node(memory)
    of.aim(int(memory * SAMPLES * BYTES), FORM)
    epoch(of, 0, LONG)
    epoch(of, 1, LONG)
    assert kept_in(of, FORM) == SAMPLES
    of.aim(int(memory * SAMPLES * BYTES), SMALLER)
    ((storage, _),) = epoch(of, 2, LONG)
    assert storage <= (0 if memory > 5 else SAMPLES // 3)
    epoch(of, 3, LONG)
    assert (kept_in(of, FORM), kept_in(of, SMALLER)) == (0, SAMPLES)
    assert epoch(of, 4, LONG) == [(0, SAMPLES)]


def test_memory_full_of_the_form_of_before_is_given_to_the_new_one() -> None:
    """Memory for all samples in the smaller form, and for two thirds in the other."""
    of = node(2.0)
    of.aim(2 * SAMPLES * BYTES, SMALLER)
    for number in range(3):
        epoch(of, number, LONG)
    of.aim(2 * SAMPLES * BYTES, FORM)
    for number in range(3, 6):
        epoch(of, number, SHORT)
    assert kept_in(of, FORM) >= SAMPLES * 2 // 3 - BLOCK
    ((storage, decoded),) = epoch(of, 6, SHORT)
    assert storage + decoded == SAMPLES
    assert decoded == kept_in(of, FORM)


def test_a_hand_in_in_the_form_of_before_is_not_kept() -> None:
    of, request = (
        node(6.0),
        Node([BYTES] * SAMPLES, block_samples=BLOCK, cache=0).placements.own(0)._replace(forms=LONG),
    )
    of.aim(6 * SAMPLES * BYTES, SMALLER)
    of.begin(request)
    while awaited := of.planner.awaited(request):
        of.fill(min(awaited))
    asked = of.asked(request)
    of.deliver(request)
    of.aim(6 * SAMPLES * BYTES, FORM)
    assert len(of.hand_in(request, asked, form=SMALLER).sample_ids) == 0
    assert read(of, request) == (0, 0)
    assert kept_in(of, FORM) == BLOCK


def test_a_sample_that_could_not_be_handed_in_is_asked_for_again_in_another_form() -> None:
    of = node(6.0)
    request = of.placements.own(0, None, StreamKey(0, LONG))
    for form in (SMALLER, FORM):
        of.aim(6 * SAMPLES * BYTES, form)
        of.begin(request)
        while awaited := of.planner.awaited(request):
            of.fill(min(awaited))
        asked = of.asked(request)
        of.deliver(request)
        assert len(asked) == BLOCK
        of.hand_in(request, [], asked, form=form)


def test_no_form_at_all_frees_memory_for_stored_bytes() -> None:
    """Memory for all samples as they are stored, or for a third decoded."""
    of = node(1.0)
    of.aim(SAMPLES * BYTES, FORM)
    for number in range(2):
        epoch(of, number, SHORT)
    assert kept_in(of, FORM) == SAMPLES // 3
    of.aim(0, ENCODED)
    for number in range(2, 4):
        epoch(of, number, SHORT)
    assert epoch(of, 4, SHORT) == [(0, 0)]


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lengths=st.lists(st.integers(0, 30), min_size=8, max_size=60),
    share=st.sampled_from([0.0, 0.4, 1.0, 2.5, 5.0]),
    readahead=st.sampled_from([0, 60, 500]),
)
def test_any_schedule_with_several_forms_keeps_every_invariant(
    seed: int, lengths: list[int], share: float, readahead: int
) -> None:
    """Fetches of pipelines with other prefixes, hand-ins in any form at any time, moves and compactions."""
    rng, total = random.Random(seed), sum(lengths)
    of = Node(lengths, block_samples=5, cache=int(total * share), readahead=readahead)
    of.aim(int(total * share), rng.choice(LONG))
    given_out: dict[PartRequest, tuple[int, list[int]]] = {}
    for _ in range(100):
        action = rng.choices(
            ["begin", "fill", "deliver", "fail", "hand in", "land", "aim", "lose", "compact"],
            [4, 6, 6, 0.5, 5, 5, 1, 0.5, 2],
        )[0]
        if action == "begin" and len(of.waiting) < 6:
            stream = StreamKey(rng.choice([0, 3, 7]), rng.choice([(), SHORT, LONG, (SMALLER,)]))
            length = -(-len(lengths) // (stream.block_samples or 5))
            of.begin(of.placements.own(rng.randrange(3 * length), None, stream), str(stream))
        elif action == "fill" and of.filling:
            of.fill(rng.choice([*of.filling]))
        elif action == "deliver" and (ready := of.ready()):
            request = of.request(rng.choice(ready))
            if of.planner._plans[request].failure is not None:
                of.end(request)
            else:
                given_out[request] = of.planner.tier.form, of.asked(request)
                of.deliver(request)
        elif action == "fail" and of.filling:
            of.fail(rng.choice([*of.filling]))
        elif action == "hand in" and given_out:
            request, (form, ids) = rng.choice([*given_out.items()])
            some = [i for i in ids if rng.random() < 0.9]
            of.hand_in(request, some, [i for i in ids[:1] if i not in some], form=form, is_last=rng.random() < 0.7)
        elif action == "land" and of.coming:
            of.land(rng.choice([*of.coming]), fails=rng.random() < 0.1)
        elif action == "aim":
            of.aim(rng.randint(0, int(total * share)), rng.choice([ENCODED, *LONG]))
        elif action == "lose" and (cached := of.planner.directory.cached_ids().tolist()):
            of.lose(rng.sample(cached, rng.randrange(1, len(cached) + 1)))
        elif action == "compact":
            of.begin_compaction() if rng.random() < 0.5 or not of.compactions else of.compact()
    while of.waiting or of.filling or of.coming:  # nothing waits forever
        for slab in [*of.filling]:
            if slab in of.filling:
                of.fill(slab)
        for slab in [*of.coming]:
            of.land(slab)
        for request in of.ready():
            if of.planner._plans[of.request(request)].failure is not None:
                of.end(request)
            else:
                of.deliver(request)
