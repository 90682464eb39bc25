"""A node sends each rank its rows of parts, and gives threads to the ranks that need them."""

from __future__ import annotations

import asyncio
import heapq
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import ray

from mbaas.cache.row_server import (
    RATE_BYTES_PER_S,
    Chunk,
    Queue,
    RowPool,
    RowQueues,
    check_pick,
    part_rows,
    plan_threads,
)
from mbaas.errors import ConfigError
from mbaas.samples.fields import Packed

Plan = Callable[[int, Sequence[Queue]], list[int]]


def part(rows: list[int], *, whole: bool = False) -> dict[str, np.ndarray]:
    ids = np.array(rows, np.int64)
    arrays = {"image": np.full((len(ids), 300, 300), ids[:, None, None], np.uint8), "sample_id": ids + 100}
    return arrays if whole else {**arrays, "row": ids}


def test_rows_of_each_part_come_as_a_smaller_part():
    """Parts of 6 rows and one without requested rows. A row has 90 kB, so a thread copies 11 at a time."""
    parts = [part(list(range(0, 60, 2))), part([1, 3, 9]), part([61])]
    for one in parts:  # sample r has r % 3 boxes
        lengths = one["row"] % 3
        bounds = np.concatenate([[0], np.cumsum(lengths)])
        one["boxes"] = Packed(np.repeat(one["row"], lengths), bounds)
        # ... and an image of 1 to 3 rows of 100 kB, so that threads copy few at a time
        sizes = np.stack([1 + lengths, np.full(len(lengths), 100_000)], axis=1)
        pixels = np.repeat(one["row"].astype(np.uint8), sizes.prod(axis=1))
        one["sized"] = Packed(pixels, np.concatenate([[0], np.cumsum(sizes.prod(axis=1))]), sizes)
    rows, pool = np.array([0, 3, 8, *range(20, 50)]), RowPool(threads=2)
    try:
        got = asyncio.run(pool.pick("r", parts, rows, np.empty(0, np.int64), left_s=0.0))
    finally:
        pool.close()
    assert [one["row"].tolist() for one in got] == [[0, 8, *range(20, 50, 2)], [3], []]
    for one in got:
        assert (one["sample_id"] == one["row"] + 100).all()
        assert (one["image"] == one["row"].astype(np.uint8)[:, None, None]).all()
        values, bounds = one["boxes"].own()
        assert values.tolist() == np.repeat(one["row"], one["row"] % 3).tolist()
        assert np.diff(bounds).tolist() == (one["row"] % 3).tolist()
        for number, row in enumerate(one["row"].tolist()):
            image = one["sized"].value(number)
            assert (image.shape, np.unique(image).tolist()) == ((1 + row % 3, 100_000), [row])


def test_a_whole_block_without_its_bad_rows():
    """Rows 2 and 4 of 6 were bad, so the entries are rows 0, 1, 3, 5."""
    block = part([0, 1, 3, 5], whole=True)
    assert part_rows(block, np.array([2, 4])).tolist() == [0, 1, 3, 5]
    pool = RowPool(threads=1)
    try:
        (got,) = asyncio.run(pool.pick("r", [block], np.array([1, 5]), np.array([2, 4]), left_s=0.0))
    finally:
        pool.close()
    assert got["row"].tolist() == [1, 5]
    assert got["sample_id"].tolist() == [101, 105]


@pytest.mark.parametrize(
    ("total", "queues", "shares"),
    [
        (4, [(3.0, 9.0), (1.0, 9.0)], [3, 1]),  # by length: none is late
        (8, [(4.0, 9.0), (4.0, 0.7)], [2, 6]),  # by length 4 and 4, the second 0.3 s late; in time with 6
        (8, [(4.0, 9.0), (4.0, 0.0)], [1, 7]),  # late in any case: all threads but one
        (2, [(1.0, 0.0), (1.0, 0.0), (2.0, 0.0)], [1, 0, 1]),  # fewer threads than queues
        (3, [(0.0, 0.0), (5.0, 0.0)], [0, 3]),
        (4, [], []),
    ],
)
def test_threads_go_by_work_and_to_who_will_be_late(total, queues, shares):
    assert plan_threads(total, [Queue(*queue) for queue in queues]) == shares


def even(total: int, queues: Sequence[Queue]) -> list[int]:
    """Give each rank the same number of threads."""
    return [total // len(queues) + (i < total % len(queues)) for i in range(len(queues))]


def in_turn(total: int, queues: Sequence[Queue]) -> list[int]:
    """Give all threads to the first in line, as any thread pool does."""
    return [total, *[0] * (len(queues) - 1)]


def simulate(plan: Plan, work: dict[str, list[float]], left_s: dict[str, float], threads: int) -> dict[str, float]:
    """Return each rank's wait: time of its last chunk, requested at 0 s, minus its spare seconds.

    ``work``: rank -> seconds that a thread takes for each of its chunks.
    """
    queues = RowQueues(threads, plan)
    seconds: dict[Chunk, float] = {}
    for rank, takes in work.items():
        chunks = [Chunk(int(s * RATE_BYTES_PER_S), left_s[rank], lambda: None) for s in takes]
        seconds.update(zip(chunks, takes, strict=True))
        queues.put(rank, chunks)
    free, ends, left = [0.0] * threads, dict.fromkeys(work, 0.0), len(seconds)
    running: list[tuple[float, int, str, Chunk]] = []
    while left or running:
        while left and free:
            now = heapq.heappop(free)
            rank, chunk = queues.take(now)
            heapq.heappush(running, (now + seconds[chunk], left, rank, chunk))
            left -= 1
        now, _, rank, chunk = heapq.heappop(running)
        queues.finish(rank, chunk, seconds[chunk])
        ends[rank] = max(ends[rank], now)
        heapq.heappush(free, now)
    return {rank: max(0.0, ends[rank] - left_s[rank]) for rank in work}


@pytest.mark.parametrize("plan", [even, in_turn])
def test_the_slowest_rank_waits_less_when_threads_follow_the_queues(plan):
    """A and B request 24 chunks of 10 ms a step ahead (150 ms). C requests last and waits.

    6 threads need 120 ms for all.

    C waits 120 ms if it is served last, or with 2 threads. With all threads but one per other rank it waits 60 ms.
    """
    work, left_s = {rank: [0.01] * 24 for rank in "abc"}, {"a": 0.15, "b": 0.15, "c": 0.0}
    before, after = simulate(plan, work, left_s, 6), simulate(plan_threads, work, left_s, 6)
    assert before == {"a": 0.0, "b": 0.0, "c": pytest.approx(0.12)}
    assert after == {"a": 0.0, "b": 0.0, "c": pytest.approx(0.06, abs=0.011)}


def test_with_injected_delays_the_straggler_waits_less():
    """Real threads and chunks delayed by 20 ms: 24 of rank a with time to spare, then 12 of rank b without.

    In turn, b waits 180 ms with 4 threads; with 3 dedicated threads it waits 80 ms. The smallest of three results
    counts: on a busy machine, a chunk delayed for longer makes rank a seem late as well.
    """

    def wait_of_b(plan: Plan) -> float:
        pool = RowPool(threads=4, queues=RowQueues(4, plan))

        async def ask() -> float:
            loop = asyncio.get_running_loop()
            patient = loop.create_task(pool.run("a", delayed(24, left_s=1.0)))
            await asyncio.sleep(0)
            began = loop.time()
            await pool.run("b", delayed(12, left_s=0.0))
            waited_s = loop.time() - began
            await patient
            return waited_s

        try:
            return asyncio.run(ask())
        finally:
            pool.close()

    planned, turns = (min(wait_of_b(plan) for _ in range(3)) for plan in (plan_threads, in_turn))
    assert planned < 0.75 * turns


def delayed(count: int, *, left_s: float) -> list[Chunk]:
    """Chunks of 1 MiB that take 20 ms each."""
    never = threading.Event()
    due = time.monotonic() + left_s
    return [Chunk(1 << 20, due, lambda: never.wait(0.02) and None) for _ in range(count)]


def asked(**changed: object) -> dict[str, object]:
    """A rank's request to a node for a block of 8 rows, with some values changed."""
    rows = np.array([0, 3, 7])
    good = {"rank": "t[1]", "part_refs": [ray.ObjectRef.from_random()], "rows": rows, "left_s": 0.0}
    return {**good, "bad_rows": np.array([5]), **changed}


@pytest.mark.parametrize(
    "changed",
    [{}, {"rows": np.empty(0, np.int64)}, {"bad_rows": np.arange(8)}, {"left_s": 3}, {"left_s": np.float64(86_400.0)}],
)
def test_what_ranks_ask_for_is_let_in(changed):
    check_pick(**asked(**changed), most=8)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"rank": 7}, "rank must be text of 1 to 500 characters, got 7"),
        ({"rank": ""}, "rank must be text of 1 to 500 characters, got ''"),
        ({"rank": "x" * 501}, "rank must be text of 1 to 500 characters"),
        ({"part_refs": []}, r"part_refs must be a list of 1 to 10000 references, got \[\]"),
        ({"part_refs": None}, "part_refs must be a list of 1 to 10000 references, got None"),
        ({"part_refs": [3]}, "part_refs must hold references to parts of a block, got 3"),
        ({"rows": [0, 3]}, r"rows must be an array int64\[k\], got \[0, 3\]"),
        ({"rows": np.array([0.0, 3.0])}, r"rows must be an array int64\[k\], got float64\[2\]"),
        ({"rows": np.array([[0, 3]])}, r"rows must be an array int64\[k\], got int64\[1, 2\]"),
        ({"rows": np.array([0, 8])}, r"rows must be in \[0, 7\], got 0 to 8"),
        ({"bad_rows": np.array([-1, 3])}, r"bad_rows must be in \[0, 7\], got -1 to 3"),
        ({"rows": np.array([0, 5, 3])}, "rows must be ascending, got 5 before 3"),
        ({"bad_rows": np.array([2, 2])}, "bad_rows must be ascending, got 2 before 2"),
        ({"left_s": "1"}, "left_s must be a number, got '1'"),
        ({"left_s": True}, "left_s must be a number, got True"),
        ({"left_s": float("nan")}, r"left_s must be 0 to 1,000,000,000, got nan"),
        ({"left_s": -0.5}, r"left_s must be 0 to 1,000,000,000, got -0.5"),
        ({"left_s": float("inf")}, r"left_s must be 0 to 1,000,000,000, got inf"),
    ],
)
def test_what_no_rank_can_ask_for_is_an_error_of_the_rank(changed, told):
    with pytest.raises(ConfigError, match=f"^{told}"):
        check_pick(**asked(**changed), most=8)
