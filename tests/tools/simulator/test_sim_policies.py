"""Policies match hand calculations, and invariants hold for each policy on any system.

The hand-calculated systems take, per byte: training 10 s, prep 1 s, ram 1 s, ssd 2 s, remote ram 1.25 s, PFS 5 s.
"""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_systems import decodable, machine, preset, run, system, systems, with_cache

from mbaas.errors import ConfigError
from mbaas.model.curves import ThroughputCurve
from mbaas.tools.simulator import POLICIES, simulate
from mbaas.tools.simulator.policies.clairvoyant import classes_by_worker, reads_by_worker
from mbaas.tools.simulator.policies.partitioned import MbaasDecoded, assign_workers, classes_by_form, form_plan_of
from mbaas.tools.simulator.results import loading_limit, plain_outcomes
from mbaas.tools.simulator.simulation import locations_of
from mbaas.tools.simulator.system import Cores, StorageClass, System
from mbaas.tools.simulator.world import NOWHERE, World

FAST = 1e6
"""Training so fast that only loading counts."""


def trained_at(given: System, bytes_per_s: float) -> System:
    return replace(given, machine=replace(given.machine, compute_bytes_per_s=bytes_per_s))


def test_perfect_naive_and_staging_buffer_by_hand() -> None:
    """Four samples of one byte, one worker, one epoch.

    perfect trains 4 x 10 = 40 s. naive also reads 4 x (5 + 1) s: 64 s, including 20 s of fetching and 4 s of prep.
    staging_buffer waits 6 s for the first sample only, and reads the next ones while training.
    """
    small = system(machine())
    assert run(small, "perfect").total_s == pytest.approx(40)
    naive = run(small, "naive")
    assert naive.total_s == pytest.approx(64)
    assert naive.seconds == pytest.approx({"compute": 40, "staging": 4, "ram": 0, "ssd": 0, "remote": 0, "pfs": 20})
    assert run(small, "staging_buffer").seconds["pfs"] == pytest.approx(5)
    assert run(small, "staging_buffer").total_s == pytest.approx(46)


def test_minio_by_hand() -> None:
    """Four samples, room for one in ram and one in ssd, two epochs, limited by loading.

    Epoch 0: 4 x (5 + 1) = 24 s. Epoch 1: one at 1 + 1, one at 2 + 1, two at 5 + 1: 17 s.
    """
    found = run(trained_at(system(machine(ram_bytes=1, ssd_bytes=1), epochs=2), FAST), "minio")
    assert found.epoch_s == pytest.approx((24, 17), abs=0.001)
    assert found.samples == {"staging": 0, "ram": 1, "ssd": 1, "remote": 0, "pfs": 6}
    seconds = {"compute": 0, "staging": 8, "ram": 1, "ssd": 2, "remote": 0, "pfs": 30}
    assert found.seconds == pytest.approx(seconds, abs=0.001)


def test_partitioned_minio_by_hand() -> None:
    """Four samples, two workers with room for two in ram: in epoch 1 each sample comes from local or remote ram.

    Epoch 0 reads 2 x (5 + 1) = 12 s. In epoch 1 a worker needs 2 to 2.25 s per sample.
    """
    found = run(trained_at(system(machine(ram_bytes=2), epochs=2, workers=2), FAST), "partitioned_minio")
    assert found.epoch_s[0] == pytest.approx(12, abs=0.001)
    assert 4 - 0.001 < found.epoch_s[1] < 4.5 + 0.001
    assert found.samples["pfs"] == 4
    assert found.samples["ram"] + found.samples["remote"] == 4


def test_what_is_local() -> None:
    """Everything is cached, at random: with five workers a fifth of the reads are local.

    The expected count is 1,600 of 4 x 2,000 reads, with a standard deviation of 36. Locality-aware loading uses local
    samples and moves about 0.4 / sqrt(16) = 10 %.
    """
    given = system(machine(ram_bytes=1e6), samples=2000, workers=5, batch=16, epochs=5)
    for policy in ("partitioned_minio", "deepio_ordered", "lbann_dynamic"):
        assert run(given, policy).samples["ram"] == pytest.approx(1600, abs=180), policy
    for policy in ("deepio_optimistic", "nopfs", "mbaas"):
        assert run(given, policy).samples["ram"] == 8000, policy
    assert run(given, "locality_aware").samples["remote"] == pytest.approx(800, abs=120)


@pytest.mark.parametrize("seed", [4, 5, 6])
def test_minio_is_full_for_good(seed: int) -> None:
    """Samples of different sizes: the cache contents after the first epoch stay the same in every later one."""
    given = system(machine(ram_bytes=20), samples=61, sigma_bytes=0.6, epochs=2, seed=seed)
    once = run(given, "minio").samples["ram"]
    longer = replace(given, training=replace(given.training, epochs=5))
    assert run(longer, "minio").samples["ram"] == 4 * once > 0


def test_mbaas_by_hand() -> None:
    """Two trials, two workers, four samples: each is fetched and prepared once, then sent as pixels.

    Each home node reads its two samples from the PFS and prepares them: 2 x (5 + 1) = 12 s. Half of a worker's two
    samples come from the other worker at 1 / 0.8 s per byte: 1.25 s. Without sharing, each trial reads all it needs:
    24 s. With locality, a worker holds 0 to 4 samples of a minibatch and needs 2: on average 2 / 16 + 4 / 16 = 0.375
    samples travel to it, which takes 0.469 s.
    """
    small = trained_at(system(machine(), workers=2, batch=2, trials=2, locality=False), FAST)
    homes = np.bincount(World(small).homes[:4])
    assert homes.tolist() == [2, 2]
    shared = run(small, "mbaas")
    assert shared.total_s == pytest.approx(12 + 1.25, abs=0.001)
    local = replace(small, training=replace(small.training, locality=True))
    assert run(local, "mbaas").total_s == pytest.approx(12 + 0.375 * 1.25, abs=0.001)
    assert run(small, "partitioned_minio").total_s == pytest.approx(24, abs=0.001)


def test_mbaas_moves_pixels_not_bytes() -> None:
    """One trial, two epochs, pixels six times as large.

    Transfers take 7.5 s a step, and a staging buffer holds a sixth. Epoch 0 takes 10 s for bytes, then 2 + 7.5 s for
    prep and transfer. In epoch 1 the bytes come from ram in time, so it takes 2 s of prep and 7.5 s of transfer: 9.5 s.
    """
    small = trained_at(system(machine(ram_bytes=99), workers=2, batch=2, epochs=2, locality=False), FAST)
    large = replace(small, dataset=replace(small.dataset, pixel_bytes=6))
    found = run(large, "mbaas")
    assert found.epoch_s == pytest.approx((19.5, 9.5), abs=0.001)
    seconds = {"compute": 0, "staging": 2, "ram": 0, "ssd": 0, "remote": 7.5, "pfs": 19.5}
    assert found.seconds == pytest.approx(seconds, abs=0.001)
    tight = replace(large, machine=replace(large.machine, staging=replace(large.machine.staging, capacity_bytes=36)))
    assert POLICIES["mbaas"].ahead(World(replace(tight, training=replace(tight.training, epochs=99)))) == 3


def test_preloading_by_hand() -> None:
    """Four samples, two workers, ram for two: both read two from the PFS with one thread, 10 s, then train from ram.

    With parallel_staging a worker's samples are in its local ram: 2 x (1 + 1) = 4 s for the epoch.
    """
    small = trained_at(system(machine(ram_bytes=2), workers=2), FAST)
    found = run(small, "parallel_staging")
    assert found.total_s == pytest.approx(14, abs=0.001)
    assert found.seconds["pfs"] == pytest.approx(10, abs=0.001)
    assert found.samples["ram"] == 4
    assert run(small, "lbann_preload").seconds["pfs"] == pytest.approx(10, abs=0.001)


def test_lobster_by_hand() -> None:
    """Two threads, limited by loading: one fetches, one prepares fetched samples: 4 x 5 + 1 = 21 s, not 4 x 6 / 2."""
    found = run(trained_at(system(machine(threads=2)), FAST), "lobster")
    assert found.total_s == pytest.approx(21, abs=0.001)
    assert found.seconds["pfs"] == pytest.approx(21, abs=0.001)


def test_lobster_keeps_last_copies_and_what_it_reads_next() -> None:
    """With room for everything, nothing comes from the PFS after the first epoch."""
    found = run(system(machine(ram_bytes=99), samples=31, workers=3, batch=2, epochs=4), "lobster")
    assert found.samples["pfs"] == 31
    tight = run(system(machine(ram_bytes=5), samples=31, workers=3, batch=2, epochs=4), "lobster")
    assert tight.samples["ram"] > 0
    assert tight.samples["pfs"] >= 31 + 3 * (31 - 15)


def test_trials_that_do_not_share_take_turns() -> None:
    """Three trials, limited by loading: three times the reading, except with the service."""
    one = trained_at(system(machine(), samples=20), FAST)
    three = replace(one, training=replace(one.training, trials=3))
    assert run(three, "minio").total_s == pytest.approx(3 * run(one, "minio").total_s, rel=1e-3)
    assert run(three, "mbaas").total_s == pytest.approx(run(one, "mbaas").total_s)


def test_decoded_samples_by_hand() -> None:
    """Four samples of one byte, limited by loading.

    Decoded samples have two bytes and take 0.25 s of prep instead of 1 s. The first epoch takes 0.01 s to fetch a
    sample, and 4 x 1 s. With 6 bytes of ram two samples are then cached decoded and two encoded: 2 x 0.25 + 2 x 1 s.
    The encoded ones still come from storage, which is faster here. 2 bytes hold one decoded sample.
    """
    found = run(decodable(ram_bytes=6), "mbaas_decoded")
    assert found.epoch_s == pytest.approx((4.01, 2.5), abs=0.02)
    assert found.samples == {"staging": 0, "ram": 2, "ssd": 0, "remote": 0, "pfs": 6}
    assert found.remark == "50 % of the samples are kept decoded"
    few = run(decodable(ram_bytes=2), "mbaas_decoded")
    assert few.epoch_s == pytest.approx((4.01, 3.25), abs=0.02)
    assert few.samples == {"staging": 0, "ram": 1, "ssd": 0, "remote": 0, "pfs": 7}
    assert run(decodable(ram_bytes=6), "mbaas").epoch_s[1] >= 3.99


def test_a_fast_ssd_keeps_decoded_samples_and_a_slow_one_encoded_ones() -> None:
    """A decoded sample from the ssd takes 0.02 s, or 4 s; decoding one takes 0.75 s."""
    fast = run(decodable(ram_bytes=2, ssd_bytes=6, ssd_rate=100), "mbaas_decoded")
    assert fast.epoch_s[1] == pytest.approx(1, abs=0.05)
    assert (fast.samples["ram"], fast.samples["ssd"]) == (1, 3)
    slow = run(decodable(ram_bytes=2, ssd_bytes=6), "mbaas_decoded")
    assert slow.epoch_s[1] == pytest.approx(3.25, abs=0.05)
    assert slow.samples["ram"] == 1


def test_slower_classes_than_the_second_take_encoded_samples_that_are_left() -> None:
    """The ram holds one decoded sample, the slow ssd and the disk one encoded sample each; one stays in storage."""
    given = decodable(ram_bytes=2, ssd_bytes=1)
    disk = StorageClass(name="disk", capacity_bytes=1, read=ThroughputCurve.through({1: 200}))
    given = replace(given, machine=replace(given.machine, classes=(*given.machine.classes, disk)))
    world = World(given)
    plan = form_plan_of(world)
    assert plan is not None
    held, decoded = classes_by_form(world, plan)
    assert held.tolist() == [0, 1, 2, NOWHERE, NOWHERE]
    assert decoded.tolist() == [True, False, False, False, False]


def test_a_decoded_sample_takes_its_bytes_from_a_disk_and_none_from_memory() -> None:
    """One of the four is in ram, and three with two bytes each are on the ssd: 6 bytes."""
    world = World(decodable(ram_bytes=2, ssd_bytes=6, ssd_rate=100))
    _, traffic = MbaasDecoded().traffic(world)
    moved = MbaasDecoded().moved_bytes(world, traffic).sum(axis=(0, 1))
    assert (moved[0], moved[1], moved.sum()) == (0, 6, 6)


def test_cores_spend_less_on_decoded_samples() -> None:
    """One core takes 1 s a sample. A decoded one takes its stated cost, by default 0.25 s from the speedup of 4."""
    for said, epoch_s in ((None, 1.0), (0.5, 2.0)):
        given = decodable(ram_bytes=8, threads=4)
        cores = Cores(count=1, prep_cpu_s=1.0, decoded_cpu_s=said)
        given = replace(given, machine=replace(given.machine, cores=cores))
        assert run(given, "mbaas_decoded").epoch_s[1] == pytest.approx(epoch_s, abs=0.05)


def test_without_decoded_samples_it_is_the_policy_that_keeps_encoded_ones() -> None:
    plain = system(machine(ram_bytes=2, ssd_bytes=1), samples=20, epochs=3)
    found, other = run(plain, "mbaas_decoded"), run(plain, "mbaas")
    assert (found.total_s, found.samples) == (other.total_s, other.samples)
    assert found.remark == "nothing is said about decoded samples, so none are kept"
    useless = replace(plain, dataset=replace(plain.dataset, decoded_bytes=3.0, decoded_speedup=1.01))
    assert run(useless, "mbaas_decoded").total_s == other.total_s
    assert (
        run(useless, "mbaas_decoded").remark
        == "no decoded samples are kept, because preparing one takes only 1.0 % less CPU time"
    )


@settings(max_examples=25, deadline=None)
@given(given=systems())
def test_forms_fill_the_classes_of_every_home(given: System) -> None:
    """No class exceeds its capacity, and the planned shares are reached except for a few samples."""
    world, dataset = World(given), given.dataset
    plan = form_plan_of(world)
    if plan is None:
        return
    held, decoded = classes_by_form(world, plan)
    large = np.where(decoded[:-1], (dataset.decoded_bytes or 0) / dataset.sample_bytes, 1.0) * world.sizes[:-1]
    for home in range(world.workers):
        mine = slice(home, world.samples, world.workers)
        for number, each in enumerate(world.classes):
            used = large[mine][held[mine] == number].sum()
            assert used <= each.capacity_bytes * (1 + 1e-6) + 1e-6
        count = world.samples / world.workers
        bytes_each = world.sizes[mine] / dataset.sample_bytes
        for number, share in ((0, plan.memory_decoded), (1, plan.disk_decoded)):
            kept = bytes_each[(held[mine] == number) & decoded[mine]].sum()
            assert kept <= share * count * (1 + 1e-6) + 1e-6
            if not dataset.sigma_bytes:  # never more than all samples, and rounded down cumulatively
                assert kept >= min(share * count, len(held[mine])) - 3


def test_nopfs_keeps_what_a_worker_reads_most() -> None:
    """With room for k samples, no sample outside a worker's ram is read more often than one inside."""
    world = World(system(machine(ram_bytes=7), samples=50, workers=3, batch=2, epochs=9))
    reads, held = reads_by_worker(world), classes_by_worker(world)
    assert reads.sum() == 9 * 50
    for counts, classes in zip(reads, held[:, :-1], strict=True):
        inside = classes == 0
        assert inside.sum() == 7
        assert counts[inside].min() >= counts[~inside].max()


def test_locality_moves_only_what_evens_out_numbers() -> None:
    """Two workers, minibatches of two.

    Step 0: worker 0 owns three samples, worker 1 one, so one sample moves to worker 1.
    Step 1: worker 0 owns one, worker 1 two; the last sample has no owner, and worker 0 takes it.
    """
    world = World(system(machine(), samples=8, workers=2, batch=2))
    owned = np.array([[1, 1, 2, 1], [2, 0, 1, 2]], dtype=np.uint16)
    workers = assign_workers(owned, world).reshape(2, 4).tolist()
    assert workers == [[0, 0, 1, 1], [1, 0, 0, 1]]


@pytest.mark.parametrize(
    ("cache_bytes", "best"),
    [
        pytest.param(
            1000e6, {"minio", "page_cache", "partitioned_minio", "nopfs", "mbaas"}, id="fits a worker's class 1"
        ),
        pytest.param(120e6, {"partitioned_minio", "mbaas"}, id="fits all workers together"),
        pytest.param(40e6, set(), id="exceeds all workers"),
    ],
)
def test_regimes(cache_bytes: float, best: set[str]) -> None:
    """400 MB on four workers that are limited by loading: some policies need no storage in late epochs.

    Private caches need the dataset in each worker, partitioned ones in all workers together. NoPFS finds missing
    samples in other workers, but caches some samples several times.
    """
    given = preset(
        "imagenet-1k", samples=4000, sample_bytes=100e3, cache_bytes=cache_bytes, compute_bytes_per_s=5e9, epochs=24
    )
    names = ["minio", "page_cache", "partitioned_minio", "nopfs", "mbaas"]
    found = {each.policy: each for each in simulate(given, names)}
    direct = run(given, "staging_buffer").epoch_s[-1]
    fast = {name for name, each in found.items() if each.epoch_s[-1] < 0.5 * direct}
    assert fast >= best
    if cache_bytes == 40e6:
        shares = {name: each.samples["pfs"] / (24 * 4000) for name, each in found.items()}
        assert shares["partitioned_minio"] == pytest.approx(1 / 24 + 23 / 24 * 0.6, abs=0.02)
        assert shares["partitioned_minio"] < shares["nopfs"] < shares["minio"]
        assert found["page_cache"].total_s > 0.9 * found["minio"].total_s


def test_a_dataset_that_fits_a_worker_but_not_its_first_class() -> None:
    """Regime 2: 400 MB; 200 MB of ram and 300 MB of ssd on each worker. minio reads from both, not from the PFS."""
    given = with_cache(preset("imagenet-1k", samples=4000, epochs=40), ram_bytes=200e6, ssd_bytes=300e6)
    found = run(trained_at(given, 5e9), "minio")
    assert found.samples["ram"] > 0
    assert found.samples["ssd"] > 0
    assert found.epoch_s[-1] < 0.5 * found.epoch_s[0]


@settings(max_examples=40, deadline=None)
@given(given=systems())
def test_every_policy_on_any_system(given: System) -> None:
    """Totals add up by location and by epoch, every sample is read once an epoch, and no policy beats perfect."""
    outcomes = list(simulate(given))
    assert [each.policy for each in outcomes] == list(POLICIES)
    perfect = outcomes[0].total_s
    training = given.training
    assert perfect == pytest.approx(
        training.epochs * World(given).sizes.sum(dtype=float) / training.workers / given.machine.compute_bytes_per_s,
        rel=1e-5,
    )
    for each in outcomes:
        assert tuple(each.seconds) == locations_of(given)
        assert sum(each.seconds.values()) == pytest.approx(each.total_s)
        assert sum(each.epoch_s) == pytest.approx(each.total_s)
        assert min(each.seconds.values()) >= 0
        assert sum(each.samples.values()) == training.epochs * given.dataset.samples
        assert each.total_s >= perfect * (1 - 1e-9), each.policy
    assert json.loads(json.dumps(plain_outcomes(given, outcomes)))["policies"]["mbaas"]["total_s"] > 0


def test_loading_limits_from_a_rate_of_compute_on() -> None:
    """One thread takes 5 + 1 s for a byte, so it limits training from 1 / 6 B/s on."""
    small = system(machine(), samples=2000)
    for compute, is_limited in ((0.1, False), (0.16, False), (0.17, True)):
        found = run(trained_at(small, compute), "staging_buffer")
        assert loading_limit(small, found) == pytest.approx(1 / 6)
        assert (found.total_s > 1.01 * found.seconds["compute"]) == is_limited


def test_policies_of_the_first_example_are_equal_until_loading_limits() -> None:
    """Just below its limit a policy takes as long as training, and just above it longer."""
    given = preset("imagenet-1k", samples=20_011)
    for each in simulate(given):
        limit = loading_limit(given, each)
        if each.policy in ("perfect", "naive") or each.total_s > 1.01 * each.seconds["compute"]:
            continue
        slow, fast = (run(trained_at(given, factor * limit), each.policy) for factor in (0.95, 1.05))
        assert slow.total_s < 1.01 * slow.seconds["compute"], each.policy
        assert fast.total_s > 1.005 * fast.seconds["compute"], each.policy


@settings(max_examples=40, deadline=None)
@given(given=systems(), more=st.floats(0, 80), ram=st.booleans())
def test_more_cache_never_slows_down(given: System, more: float, ram: bool) -> None:
    """Assumes a PFS that gives each reader a fixed rate.

    On a saturated PFS, a worker that waits less for its caches requests more, which can slightly delay another worker.
    """
    pfs = ThroughputCurve.linear(given.machine.storage.rate(1))
    given = replace(given, machine=replace(given.machine, storage=pfs))
    sizes = [each.capacity_bytes for each in given.machine.classes]
    larger = with_cache(given, ram_bytes=sizes[0] + more * ram, ssd_bytes=sizes[1] + more * (not ram))
    for policy in ("minio", "partitioned_minio", "deepio_ordered", "deepio_optimistic", "nopfs", "mbaas"):
        assert run(larger, policy).total_s <= run(given, policy).total_s * (1 + 1e-9), policy


@settings(max_examples=10, deadline=None)
@given(given=systems())
def test_the_same_seed_gives_the_same(given: System) -> None:
    assert list(simulate(given)) == list(simulate(given))


def test_another_seed_gives_another_order() -> None:
    given = system(machine(ram_bytes=9), samples=60, workers=3, batch=2, epochs=3, seed=1)
    other = replace(given, training=replace(given.training, seed=2))
    assert run(given, "minio").samples != run(other, "minio").samples


def test_sizes_have_the_mean_that_was_asked_for() -> None:
    """Sizes are normal with sigma twice the mean, and floored; the floor alone would add about 100 % to the mean."""
    sizes = World(preset("imagenet-22k", samples=20_000)).sizes[:-1]
    assert sizes.mean(dtype=float) == pytest.approx(107_700, rel=1e-5)
    assert sizes.min() > 0


def test_a_full_cache_stays_as_it_is() -> None:
    """Samples of different sizes: after the first one without room, smaller ones are not admitted either."""
    world = World(system(machine(ram_bytes=4, ssd_bytes=3), samples=6))
    codes = world.admit(np.array([3, 2, 1, 2, 1, 1], dtype=np.float32), world.classes)
    assert codes.tolist() == [0, 1, 1, NOWHERE, NOWHERE, NOWHERE]


def test_unknown_policies_are_named() -> None:
    with pytest.raises(ConfigError, match=r"one of perfect, naive, .*, mbaas, mbaas_decoded, got 'nopf'"):
        simulate(system(machine()), ["minio", "nopf"])


@pytest.mark.long
def test_imagenet_22k_takes_less_than_a_minute() -> None:
    """All policies, one epoch, 14,197,122 samples on four workers; CPU seconds of this process."""
    import time

    given = preset("imagenet-22k", epochs=1)
    start = time.process_time()
    outcomes = list(simulate(given))
    assert len(outcomes) == len(POLICIES)
    assert time.process_time() - start < 60
