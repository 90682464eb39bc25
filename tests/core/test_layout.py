"""Block sizes and staging limits follow from the workload, the workers and the budget."""

import dataclasses

import pytest
from msgspec.structs import replace
from timed_staging import Search

from mbaas.core.layout import (
    MOST_SLACK_BLOCKS,
    StagingLimits,
    block_samples,
    blocks_in_flight,
    lay_out,
    own_block_samples,
    wanted_staging,
)
from mbaas.errors import ConfigError
from mbaas.model.forms import SampleCosts
from mbaas.samples.fields import LABEL, Field
from mbaas.settings import FeedSettings, Scaling, Staging, Threads
from mbaas.wire.samples import DecodedCosts, DecodedSamples, Probe, SampleSpec

PHOTO = 224 * 224 * 3


def size(**changes):
    usual = {
        "num_samples": 10**6,
        "batch_size": 64,
        "sample_bytes": PHOTO,
        "staging_bytes": 2**30,
        "workers": 2,
        "sample_s": 0.001,
    }
    given = {**usual, **changes}
    return block_samples(**{"most_workers": given["workers"], **given})


def test_a_block_is_whole_minibatches_of_about_128_mib():
    """128 MiB / 150,528 bytes = 891.6 samples; 13 x 64 = 832 fit, 896 do not."""
    assert size(staging_bytes=2**32) == 832


def test_an_eighth_of_the_budget_is_the_most():
    """256 MiB / 8 / 150,528 bytes = 222.9 samples: 3 x 64 = 192. An eighth of 1 GiB is 128 MiB."""
    assert size(staging_bytes=2**28) == 192
    assert size(staging_bytes=2**30) == 832


def test_all_workers_of_a_node_find_room_for_what_they_make():
    """16 workers x 2 tasks + 2 ready blocks + 1 that is read = 35 blocks of 30.7 MB: 3 x 64 samples."""
    assert size(workers=16) == 192
    assert size(workers=2, most_workers=16) == 192, "more workers may start while the feed runs"
    assert size(workers=16, staging_bytes=wanted_staging(16)) == 832, "as large as there are"


def test_few_workers_want_a_gibibyte_and_more_want_more():
    """Eight blocks of 128 MiB, or 2 x workers + 3 if that is more."""
    assert [wanted_staging(workers) for workers in (1, 2, 3, 16)] == [2**30, 2**30, 9 * 2**27, 35 * 2**27]


def test_a_small_epoch_gives_every_worker_a_block():
    """1,797 samples are 29 minibatches, 14 or 15 for each of two workers: two blocks, no third for the last 5."""
    assert size(num_samples=1797, sample_bytes=1000) == 15 * 64


def test_a_small_epoch_has_no_third_block_because_of_a_noisy_measurement():
    """1,500 samples are 24 minibatches, 12 for each of two workers. A second of work is 730 or 690 samples."""
    assert size(num_samples=1500, sample_s=1 / 730) == 12 * 64, "5 % more than a second"
    assert size(num_samples=1500, sample_s=1 / 690) == 10 * 64, "12 minibatches would be 11 % more"


def test_slow_samples_make_small_blocks():
    """At 5 ms a sample, one second is 200 samples: 3 x 64 = 192."""
    assert size(sample_s=0.005) == 192


def test_a_block_of_many_minibatches_comes_sooner():
    """At 0.1 ms a sample, a quarter of a second is 2,500 samples (39 x 64), and a second is 10,000.

    32 minibatches of 128 samples are more than 2,500.
    """
    small = {"num_samples": 50_000, "sample_bytes": 200, "sample_s": 0.0001}
    assert size(**small) == 2496
    assert size(**small, batch_size=128) == 32 * 128
    assert size(**small, batch_size=1024) == 9216, "within a second there are only 9"
    assert size(**small, nodes=2) == 2 * 2500 // 64 * 64, "each makes its part"


def test_a_block_is_at_least_one_minibatch():
    assert size(sample_s=10.0) == 64
    assert size(num_samples=5, workers=8) == 64


def test_a_budget_below_three_minibatches_is_refused_with_both_figures():
    """3 x 64 x 150,528 bytes = 28.9 MB."""
    with pytest.raises(ConfigError, match=r"at least 3 minibatches of 64 samples \(28\.9 MB\), got 20 MB$"):
        size(staging_bytes=20_000_000)


def test_a_minibatch_larger_than_the_dataset_counts_as_the_dataset():
    assert size(num_samples=10, batch_size=10**6, staging_bytes=30 * PHOTO) == 10**6


def laid_out(
    *,
    nodes=("a", "a"),
    staging_bytes=2**30,
    shape=(224, 224, 3),
    shuffle=True,
    is_random=True,
    read_s=0.0,
    earlier=None,
    num_samples=1000,
    max_prep_workers=None,
    **staging,
):
    """Layout and settings for photographs of 64 KB in storage, in minibatches of 64."""
    settings = FeedSettings(
        name="f",
        batch_size=64,
        shuffle=shuffle,
        staging_bytes=staging_bytes,
        staging=Staging(**staging),
        scaling=Scaling(max_prep_workers=max_prep_workers),
        cache_bytes=2**30,
    )
    probe = Probe(SampleSpec(Field("image", shape, "uint8"), (LABEL,)), 0.001, read_s)
    of = {"num_samples": num_samples, "is_random": is_random}
    of |= {"stored_samples": num_samples, "stored_bytes": 64_000 * num_samples}
    return lay_out(settings, probe, nodes, **of, earlier=earlier), settings


PIPELINE = Probe(SampleSpec(Field("image", (224, 224, 3), "uint8"), (LABEL,)), 0.0001, 0.0)


def test_blocks_of_own_pipelines_leave_room_for_those_of_all_trials():
    """2 GB / 2.5 / 16 are 332 photographs, 5 minibatches. For 64 trials it is one."""
    layout, settings = laid_out(staging_bytes=2 * 10**9)
    sizes = [own_block_samples(settings, layout, PIPELINE, trials, 1) for trials in (1, 16, 64)]
    assert sizes == [512, 320, 64], "at most the feed's"


def test_a_slow_own_pipeline_gets_blocks_of_a_second():
    layout, settings = laid_out(staging_bytes=2 * 10**9)
    assert own_block_samples(settings, layout, replace(PIPELINE, sample_s=0.005), 1, 1) == 192
    assert own_block_samples(settings, layout, replace(PIPELINE, sample_s=0.005), 1, 2) == 384, "on two nodes"


def test_an_own_pipeline_whose_minibatches_do_not_fit_is_refused_with_both_figures():
    layout, settings = laid_out(staging_bytes=2**28)
    large = Probe(SampleSpec(Field("image", (1024, 1024, 3), "uint8"), (LABEL,)), 0.001, 0.0)
    with pytest.raises(ConfigError, match=r"3 minibatches of 64 samples of each pipeline, here 604 MB, and feed 'f'"):
        own_block_samples(settings, layout, large, 1, 1)


def test_samples_that_are_slow_to_read_make_small_blocks_too():
    """1 ms to prepare + 4 ms to read: 200 samples a second, 3 x 64 = 192; on two nodes 6 x 64 = 384."""
    assert laid_out(read_s=0.004)[0].order.block_samples == 192
    assert laid_out(read_s=0.004, nodes=("a", "b"))[0].order.block_samples == 384


def test_a_feed_that_is_served_again_keeps_its_blocks():
    """Storage speed has changed, but waiting consumers are in the middle of the earlier blocks."""
    before, _ = laid_out(read_s=0.004)
    assert laid_out(read_s=0.02, earlier=before)[0].order == laid_out(earlier=before)[0].order == before.order
    assert laid_out(earlier=before, nodes=("a", "b", "c"))[0].order == before.order


def test_blocks_are_kept_if_three_fit_the_budget_to_the_byte():
    before, _ = laid_out(read_s=0.004)
    fitting = 3 * 192 * (PHOTO + 16)
    assert laid_out(earlier=before, staging_bytes=fitting)[0].order == before.order
    assert laid_out(earlier=before, staging_bytes=fitting - 1)[0].order != before.order


def test_blocks_that_will_not_do_are_not_kept():
    """Three blocks of 512 exceed a budget for 1,000 samples, and a layout for other samples does not apply."""
    before, _ = laid_out()
    tight = 1000 * (PHOTO + 16)
    assert laid_out(earlier=before, staging_bytes=tight)[0].order == laid_out(staging_bytes=tight)[0].order
    assert laid_out(earlier=before, shape=(8, 8, 3), read_s=0.02)[0].order.block_samples == 64
    others = replace(before, order=replace(before.order, num_samples=999))
    assert laid_out(earlier=others, read_s=0.02)[0].order.block_samples == 64
    odd = replace(before, order=replace(before.order, block_samples=100))
    assert laid_out(earlier=odd)[0].order == before.order, "100 is not a multiple of the batch size 64"


def test_a_feed_runs_ahead_by_what_its_workers_have_in_hand_and_two_blocks():
    """1,000 samples are 16 minibatches, 8 for each of two workers: 2 blocks. Two workers have 4 tasks in progress."""
    layout, _ = laid_out()
    assert layout.order.block_samples == 512
    assert layout.ahead_blocks == 2 * 2 + 2
    assert layout.readahead_bytes == 64_000 * 512 * 4
    assert layout.spec.nbytes == PHOTO + 16
    assert layout.block_bytes(1) == (1000 - 512) * (PHOTO + 16)


@pytest.mark.parametrize("staging_bytes", [2**30, None], ids=["1 GiB", "as by default"])
@pytest.mark.parametrize("workers", [2, 4, 16, 32])
def test_no_worker_of_a_node_waits_for_room(workers, staging_bytes):
    """A sample takes 1 ms, blocks vary by 30 %, and a trial reads them immediately."""
    layout, settings = laid_out(
        nodes=("a",) * workers, num_samples=10**6, staging_bytes=staging_bytes or wanted_staging(workers)
    )
    limits, block_s = layout.limits(settings), 0.001 * layout.order.block_samples
    search = Search(
        {"trial": 1e-4},
        prep_s=block_s,
        jitter=0.3,
        workers=workers,
        blocks=layout.order.blocks_per_epoch,
        budget_blocks=limits.budget_bytes // layout.block_bytes(0),
        ahead_blocks=limits.ahead_blocks,
    )
    rates = search.rates(100 * block_s, warm_s=10 * block_s)
    assert rates["trial"] >= 0.97 * workers / block_s
    assert search.all_exact()


def test_a_feed_says_when_its_workers_have_no_room():
    """A minibatch of 64 takes 9.6 MB: 4 workers need 11 blocks, and with fewer than 6 some workers wait."""
    each = 64 * (PHOTO + 16)
    layout, settings = laid_out(nodes=("a",) * 4, staging_bytes=6 * each)
    assert not layout.shortage(settings)
    layout, settings = laid_out(nodes=("a",) * 4, staging_bytes=6 * each - 1)
    assert layout.shortage(settings) == (
        "some of 4 prep workers of a node will wait: the staging memory, 57.8 MB, has room for 5 blocks of 64 samples, "
        "and they need 11; raise staging_bytes to 106 MB, or take smaller minibatches"
    )
    layout, settings = laid_out(nodes=("a",) * 4, staging_bytes=4 * each, num_samples=128)
    assert not layout.shortage(settings), "at most two epochs of two blocks are prepared at once"
    layout, settings = laid_out(nodes=("a",) * 4, staging_bytes=4 * each - 1, num_samples=100)
    assert "room for 3 blocks" in layout.shortage(settings), "the epoch's second block, of 36, is not the measure"
    whole = {"shuffle": False, "is_random": False, "staging_bytes": 4 * each, "num_samples": 256}
    layout, settings = laid_out(nodes=("a",) * 4, **whole)
    assert layout.keeps_all
    assert not layout.shortage(settings), "a whole epoch fits, and each block is prepared once"
    layout, settings = laid_out(staging_bytes=3 * each, max_prep_workers=4)
    assert "some of 4 prep workers" in layout.shortage(settings), "as soon as they are started"


def test_a_feed_that_may_start_more_workers_runs_ahead_for_all_of_them():
    """Eight workers on two nodes are four on each, with eight blocks in progress."""
    for nodes, in_hand in ((("a", "b"), 8), (("a", "b", "b"), 8), (("a",), 16), (("a",) * 9, 18)):
        layout, _ = laid_out(nodes=nodes, max_prep_workers=8)
        assert layout.ahead_blocks == in_hand + 2, nodes


@pytest.mark.parametrize("workers", [1, 3, 8, 24])
def test_blocks_in_flight_fit_the_budget(workers):
    layout, settings = laid_out(nodes=("a",) * workers, num_samples=10**6, staging_bytes=2**31)
    assert layout.ahead_blocks == blocks_in_flight(workers) - 1
    assert (layout.ahead_blocks + 1) * layout.block_bytes(0) <= settings.staging_bytes


def test_an_epoch_is_kept_if_all_are_the_same_and_it_fits():
    """1,000 photographs of 150,544 bytes."""
    whole = 1000 * (PHOTO + 16)
    layout, _ = laid_out(shuffle=False, is_random=False, staging_bytes=whole)
    assert layout.keeps_all
    assert layout.order.sample_ids(0).tolist() == list(range(layout.order.block_samples))
    assert not laid_out(shuffle=False, is_random=False, staging_bytes=whole - 1)[0].keeps_all, "it does not fit"
    assert not laid_out(shuffle=True, is_random=False, staging_bytes=whole)[0].keeps_all
    assert not laid_out(shuffle=False, is_random=True, staging_bytes=whole)[0].keeps_all


def test_a_node_reads_its_own_part_ahead():
    layout, _ = laid_out(nodes=("a", "b"))
    assert layout.readahead_bytes == 64_000 * layout.order.block_samples * 2 / 2


def test_what_is_set_is_not_computed_and_no_more_is_made_ahead_than_fits():
    layout, _ = laid_out(ahead_blocks=5, readahead_bytes=7)
    assert (layout.ahead_blocks, layout.readahead_bytes) == (5, 7)
    layout, _ = laid_out(ahead_blocks=50)
    assert layout.ahead_blocks == 2**30 // (512 * (PHOTO + 16))
    assert layout.slack_blocks == 0


def test_trials_may_be_as_far_apart_as_there_is_room():
    """1 GiB has room for 13 blocks of 512 photographs, and six are prepared ahead of the fastest trial."""
    layout, settings = laid_out()
    assert layout.ahead_blocks + layout.slack_blocks == 2**30 // (512 * (PHOTO + 16))
    assert layout.limits(settings).slack_blocks == layout.slack_blocks
    layout, _ = laid_out(shape=(84,))
    assert layout.slack_blocks == MOST_SLACK_BLOCKS, "a GiB would hold thousands"


def test_the_id_of_a_sample_takes_its_place_in_the_budget():
    """84 bytes and an ID of 16 bytes: three minibatches of 64 are 19,200 bytes."""
    layout, _ = laid_out(shape=(84,), staging_bytes=19_200)
    assert layout.order.block_samples == 64
    with pytest.raises(ConfigError, match="at least 3 minibatches"):
        laid_out(shape=(84,), staging_bytes=19_199)


def test_a_block_is_large_enough_for_the_node_that_has_most_workers():
    """16 minibatches / 3 workers = 5.3: 6 x 64."""
    layout, _ = laid_out(nodes=("a", "b", "a", "a"))
    assert layout.order.block_samples == 384


def test_while_one_block_is_read_the_next_is_made_however_little_is_asked_for():
    layout, settings = laid_out(ahead_blocks=1)
    assert layout.ahead_blocks == 2
    assert layout.limits(settings).ahead_blocks == 2


def test_the_bounds_of_staging_are_those_of_the_feed():
    layout, settings = laid_out()
    limits = layout.limits(settings)
    assert (limits.budget_bytes, limits.timeouts) == (settings.staging_bytes, settings.timeouts)
    assert limits.ahead_blocks == layout.ahead_blocks


@pytest.mark.parametrize(
    ("decoded", "needed"),
    [
        ((), 64e6),
        ((DecodedCosts(600e3, 0.004, 0.0039, 500e6, 1),), 64e6),  # saves 2.5 % of the CPU time, too little
        ((DecodedCosts(600e3, 0.004, 0.001, 500e6, 1),), 564e6),  # both forms, until all are decoded
        ((DecodedCosts(600e3, 0.004, 0.001, 5e9, 1),), 2**30),  # the default bounds it
        (
            (DecodedCosts(600e3, 0.004, 0.003, 500e6, 1), DecodedCosts(150e3, 0.005, 0.001, 100e6, 2)),
            164e6,
        ),  # the last form
    ],
)
def test_the_default_cache_has_room_for_the_measured_samples(decoded, needed):
    """1,000 samples of 64 KB, plus the samples in the workers' blocks."""
    settings = FeedSettings(
        name="f", batch_size=64, staging_bytes=2**30, prep_workers=1, cache_bytes=2**30, sizes_cache=True
    )
    probe = Probe(SampleSpec(Field("image", (224, 224, 3), "uint8"), (LABEL,)), 0.001, 0.0, decoded)
    of = {"num_samples": 1000, "stored_samples": 1000, "stored_bytes": 64_000_000, "is_random": True}
    layout = lay_out(settings, probe, ("a",), **of)
    assert layout.cache_bytes == min(2**30, needed + layout.readahead_bytes)
    assert layout.sized(settings) == dataclasses.replace(settings, cache_bytes=layout.cache_bytes)
    assert lay_out(dataclasses.replace(settings, sizes_cache=False), probe, ("a",), **of).cache_bytes == 2**30, (
        "an explicit size is unchanged"
    )


def test_the_costs_of_decoded_samples_are_the_measured_ones_of_the_longest_form():
    """Two nodes with two workers of three threads each; DALI prepares a quarter of the samples, which stay encoded."""
    forms = (DecodedCosts(600e3, 0.004, 0.003, 500e6, 1), DecodedCosts(150e3, 0.005, 0.001, 100e6, 2))
    threads = Threads(prep=3)
    room = {"staging_bytes": 2**30, "cache_bytes": 2**30}
    settings = FeedSettings(name="f", batch_size=64, engine="dali", dali_share=0.25, threads=threads, **room)
    probe = Probe(PIPELINE.spec, 0.001, 0.02, forms)
    of = {"num_samples": 1000, "is_random": True, "stored_samples": 500, "stored_bytes": 32e6, "identity": "made so"}
    decoded = lay_out(settings, probe, ("a", "b", "a", "b"), **of).decoded
    costs = SampleCosts(
        encoded_bytes=64e3, decoded_bytes=150e3, encoded_s=0.005, decoded_s=0.001, storage_s=0.02, decodable=0.75
    )
    assert decoded == DecodedSamples("made so, form 2", 2, costs, threads=6, undecoded_share=0.25)


def test_limits_that_are_below_the_smallest_are_refused():
    StagingLimits(budget_bytes=1, ahead_blocks=1, slack_blocks=0)
    for wrong, sentence in {"ahead_blocks": "at least 1, got 0", "slack_blocks": "at least 0, got -1"}.items():
        with pytest.raises(ConfigError, match=f"{wrong} must be {sentence}"):
            StagingLimits(**{"budget_bytes": 1, "ahead_blocks": 1, wrong: int(sentence.split()[-1])})


@pytest.mark.parametrize(("pipelines", "samples"), [(3, 320), (4, 384)])
def test_with_four_pipelines_or_more_each_gets_room_for_fewer_and_larger_blocks(pipelines, samples):
    """600 MB have room for 4 blocks of each of three pipelines, of 332 photographs, or 2.5 of each of four, of 398."""
    layout, settings = laid_out(staging_bytes=600_000_000)
    assert own_block_samples(settings, layout, PIPELINE, pipelines, 1) == samples


def test_blocks_of_own_pipelines_have_a_minibatch_even_if_more_trials_come_than_there_is_room_for():
    """2 GB / 2.5 / 200 are 26 photographs. A budget of exactly three minibatches is enough."""
    layout, settings = laid_out(staging_bytes=2 * 10**9)
    assert own_block_samples(settings, layout, PIPELINE, 200, 1) == 64
    layout, settings = laid_out(staging_bytes=3 * 64 * (PHOTO + 16))
    assert own_block_samples(settings, layout, PIPELINE, 1, 1) == 64


def test_own_pipelines_count_the_time_to_read_and_none_is_too_fast():
    """1 ms to prepare + 4 ms to read: 200 samples a second, 3 x 64 = 192."""
    layout, settings = laid_out(staging_bytes=2 * 10**9)
    assert own_block_samples(settings, layout, replace(PIPELINE, sample_s=0.001, read_s=0.004), 1, 1) == 192
    fastest = replace(PIPELINE, sample_s=0.0)
    assert own_block_samples(settings, layout, fastest, 1, 1) == layout.order.block_samples


def test_decoded_samples_of_empty_files_have_costs_too():
    """The model of forms needs a size above 0."""
    settings = FeedSettings(name="f", batch_size=64, staging_bytes=2**30, cache_bytes=2**30)
    probe = Probe(PIPELINE.spec, 0.001, 0.0, (DecodedCosts(600e3, 0.004, 0.001, 500e6, 1),))
    of = {"num_samples": 1000, "stored_samples": 1000, "stored_bytes": 0, "is_random": True}
    decoded = lay_out(settings, probe, ("a",), **of).decoded
    assert decoded is not None
    assert decoded.costs.encoded_bytes == 1.0
