"""Plans of CPU and GPU stages agree with arithmetic by hand, with exhaustive search, and with a simulation."""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from mbaas.errors import ConfigError
from mbaas.model.gpu_stages import DevicePlan, Devices, Route, Stage, best_plan, gpu_seconds

MS = 1e-3
DECODE = Route(
    first_on_gpu="decode", cpu_s=0.2 * MS, gpu_s=0.4 * MS, up_bytes=100e3, down_bytes=150e3, memory_bytes=3e9
)
RESIZE = Route(first_on_gpu="resize", cpu_s=3 * MS, gpu_s=0.1 * MS, up_bytes=600e3, down_bytes=150e3, memory_bytes=1e9)
NORMALIZE = Route(first_on_gpu="normalize", cpu_s=4 * MS)
ROUTES = DECODE, RESIZE, NORMALIZE


def devices(**changes: Any) -> Devices:
    """Four trials on four GPUs, each training on 2,000 samples/s; eight cores prepare."""
    usual: dict[str, Any] = {"cpus": 8.0, "gpus": 4, "trials": 4, "step_per_s": 2000.0, "pixel_bytes": 150e3}
    return Devices(**{**usual, **changes})


def only(plan: DevicePlan) -> Stage:
    (stage,) = (stage for stage, share in plan.shares.items() if share)
    return stage


def test_cpus_prepare_all_where_they_are_fast_enough() -> None:
    """8 cores prepare 2,000 samples/s, as many as each trial takes, so GPUs only train."""
    plan = best_plan(ROUTES, devices())
    assert [only(plan), plan.trial_per_s, plan.limit] == ["normalize", pytest.approx(2000), "steps"]
    assert (plan.cpu_cores, plan.prep_gpus, plan.options) == (8, 0, {"engine": "cpu"})
    assert plan.sentence == (
        "8 cores prepare all samples (engine: cpu): each trial gets 2,000 samples/s, and the training step "
        "sets the pace"
    )


def test_gpus_decode_where_there_are_few_cores() -> None:
    """2 cores: 500 samples/s by CPUs alone, 667 with decoded samples, 1 / (0.5 ms + 0.1 ms) = 1,667 by GPUs alone.

    With a slow transform, CPUs could prepare hardly any samples, so GPUs decode every sample.
    """
    slow = replace(NORMALIZE, cpu_s=2.0)
    plan = best_plan((DECODE, RESIZE, slow), devices(cpus=2.0))
    assert [only(plan), plan.trial_per_s, plan.limit] == ["decode", pytest.approx(1 / 0.6e-3), "GPUs"]
    assert (plan.cpu_cores, plan.prep_gpus, plan.options) == (0, 4, {"engine": "dali"})
    assert plan.sentence.startswith(
        "DALI prepares all samples on 4 GPUs (engine: dali): each trial gets 1,670 samples/s"
    )


@pytest.mark.parametrize(
    ("changes", "shares", "per_s", "limit"),
    [
        ({"cpus": 2.0, "memory_bytes": 2e9}, {"resize": 1.0}, 2000 / 3, "CPUs"),
        ({"cpus": 2.0, "memory_bytes": 5e8}, {"normalize": 1.0}, 500, "CPUs"),
        ({"cpus": 2.0, "gpus": 1}, {"normalize": 1.0}, 500, "steps"),
        # GPUs prepare nothing if CPUs suffice, and otherwise no more than necessary
        ({"cpus": 8.0, "gpus": 8, "trials": 4}, {"normalize": 1.0}, 2000, "steps"),
        ({"cpus": 2.0, "gpus": 8, "trials": 4}, {"decode": 0.79, "normalize": 0.21}, 2000, "steps"),
    ],
)
def test_what_decides(changes: dict[str, Any], shares: dict[Stage, float], per_s: float, limit: str) -> None:
    plan = best_plan(ROUTES, devices(**changes))
    assert {stage: share for stage, share in plan.shares.items() if share} == pytest.approx(shares)
    assert [plan.trial_per_s, plan.limit] == [pytest.approx(per_s), limit]


def test_samples_that_are_kept_decoded_may_be_what_gpus_begin_with() -> None:
    plan = best_plan((replace(RESIZE, cpu_s=0.1 * MS), DECODE, NORMALIZE), devices(cpus=2.0))
    assert (only(plan), plan.options) == ("resize", {"engine": "dali"})
    assert plan.sentence.startswith(
        "DALI prepares all samples on 4 GPUs from what caches keep decoded (engine: dali): "
    )


def test_a_way_for_which_a_gpu_has_no_memory_is_told() -> None:
    assert best_plan(ROUTES, devices(memory_bytes=2e9)).told == (
        "no sample crosses to the GPU before decoding: that takes 3 GB of a GPU's memory, and training leaves 2 GB",
    )


def test_a_mix_uses_all_that_there_is() -> None:
    """2 cores, G = 2,000. GPUs decode the share x with 0.5 + 0.1 x = (0.2 x + 4 (1 - x)) / 2 ms: x = 0.75."""
    plan = best_plan(ROUTES, devices(cpus=2.0))
    assert plan.shares == pytest.approx({"decode": 0.75, "resize": 0.0, "normalize": 0.25})
    assert plan.trial_per_s == pytest.approx(1 / 0.575e-3)
    assert (plan.cpu_cores, plan.prep_gpus, plan.options) == (2, 4, {"engine": "dali", "dali_share": 0.75})
    assert plan.sentence.startswith(
        "DALI prepares 75 % of the samples on 4 GPUs, and 2 cores the others (engine: dali, dali_share: 0.75): each "
        "trial gets 1,740 samples/s"
    )


def test_the_time_of_a_gpu_follows_from_what_training_loses() -> None:
    """During prep of 1,000 samples/s, training falls from 2,000 to 1,500 samples/s: a quarter of a second per 1,000."""
    assert gpu_seconds(step_per_s=2000, step_beside_per_s=1500, made_per_s=1000) == pytest.approx(0.25 * MS)
    assert gpu_seconds(step_per_s=2000, step_beside_per_s=2010, made_per_s=1000) == 0.0


def test_no_route_fits_the_memory_of_the_gpus() -> None:
    with pytest.raises(ConfigError, match="that takes 3 GB of a GPU's memory"):
        best_plan([DECODE], devices(memory_bytes=1e9))


def pace(routes: Sequence[Route], shares: Sequence[float], d: Devices) -> float:
    """Samples/s of each trial with these shares: the minimum over all resources."""

    def mean(name: str) -> float:
        return sum(share * getattr(route, name) for route, share in zip(routes, shares, strict=True))

    link = d.gpus * d.link_bytes_per_s
    return 1 / max(
        math.ceil(d.trials / d.gpus) / d.step_per_s,
        (d.trials / d.step_per_s + mean("gpu_s")) / d.gpus,
        mean("cpu_s") / d.cpus,
        (mean("up_bytes") + d.trials * d.pixel_bytes) / link,
        mean("down_bytes") / link,
    )


@st.composite
def any_routes(draw: st.DrawFn) -> list[Route]:
    stages: list[Stage] = draw(st.permutations(["decode", "resize", "normalize"]))
    routes = []
    for stage in stages[: draw(st.integers(1, 3))]:
        on_gpu = 0.0 if stage == "normalize" else 1.0
        routes.append(
            Route(
                first_on_gpu=stage,
                cpu_s=draw(st.floats(1e-5, 1e-2)),
                gpu_s=on_gpu * draw(st.just(0.0) | st.floats(1e-6, 2e-3)),
                up_bytes=on_gpu * draw(st.just(0.0) | st.floats(1, 1e6)),
                down_bytes=on_gpu * draw(st.just(0.0) | st.floats(1, 1e6)),
            )
        )
    return routes


DEVICES = st.builds(
    Devices,
    cpus=st.floats(0.5, 64),
    gpus=st.integers(1, 8),
    trials=st.integers(1, 16),
    step_per_s=st.floats(50, 20_000),
    pixel_bytes=st.just(0.0) | st.floats(1, 1e6),
    link_bytes_per_s=st.sampled_from([math.inf, 1e8, 1e10]),
)


@settings(max_examples=50)
@given(any_routes(), DEVICES)
def test_no_other_shares_are_faster(routes: list[Route], d: Devices) -> None:
    """Among all feasible shares in whole percent. The planned rate is the rate of the planned shares."""
    plan = best_plan(routes, d)
    feasible = corners(len(routes))
    pair = [number for number, route in enumerate(routes) if route.first_on_gpu in ("decode", "normalize")]
    if len(pair) == 2:
        for percent in range(101):
            row = [0.0] * len(routes)
            row[pair[0]], row[pair[1]] = percent / 100, (100 - percent) / 100
            feasible.append(row)
    assert plan.trial_per_s == pytest.approx(max(pace(routes, row, d) for row in feasible))
    assert any(list(plan.shares.values()) == pytest.approx(row) for row in feasible)
    assert plan.trial_per_s == pytest.approx(pace(routes, list(plan.shares.values()), d))
    on_cpus = sum(
        plan.shares[route.first_on_gpu] * route.cpu_s for route in routes if route.first_on_gpu == "normalize"
    )
    assert plan.cpu_cores == math.ceil(on_cpus * plan.trial_per_s * (1 - 1e-9))
    assert plan.options["engine"] == ("cpu" if plan.shares.get("normalize") == 1 else "dali")


def corners(count: int) -> list[list[float]]:
    return [[float(a == b) for b in range(count)] for a in range(count)]


class Simulation:
    """A feed that chooses a route for each block in proportion to the shares; all trials take all blocks.

    A block first needs one core, then a GPU if its route uses one. It starts when all trials have taken the block 16
    before. A GPU does one thing at a time, and prepares before it trains.
    """

    AHEAD, SAMPLES = 16, 64

    def __init__(self, routes: Sequence[Route], plan: DevicePlan, d: Devices) -> None:
        self.routes, self.shares, self.d = {route.first_on_gpu: route for route in routes}, plan.shares, d
        self.behind = dict.fromkeys(plan.shares, 0.0)
        self.now, self.events, self.count = 0.0, list[tuple[float, int, Callable[[], None]]](), itertools.count()
        self.cores, self.begun = int(d.cpus), 0
        self.to_make: list[tuple[int, float]] = []  # blocks that wait for a GPU, and seconds of GPU work for each
        self.made: set[int] = set()
        self.is_free = [True] * d.gpus
        self.taken = [0] * d.trials

    def later(self, seconds: float, then: Callable[[], None]) -> None:
        heapq.heappush(self.events, (self.now + seconds, next(self.count), then))

    def begin(self) -> None:
        """Start work on all free cores and GPUs."""
        while self.cores and self.begun < min(self.taken) + self.AHEAD:
            self.behind = {stage: lag + self.shares[stage] for stage, lag in self.behind.items()}
            stage = max(self.behind, key=self.behind.__getitem__)
            self.behind[stage] -= 1
            self.cores -= 1
            self.later(self.SAMPLES * self.routes[stage].cpu_s, partial(self.prepared, self.begun, self.routes[stage]))
            self.begun += 1
        # First GPUs whose trials are furthest ahead: the others have less time to prepare.
        free = [gpu for gpu, is_free in enumerate(self.is_free) if is_free]
        for gpu in sorted(free, key=lambda gpu: -min(self.taken[gpu :: self.d.gpus], default=math.inf)):
            ready = [trial for trial in range(gpu, self.d.trials, self.d.gpus) if self.taken[trial] in self.made]
            if self.to_make:
                block, seconds = self.to_make.pop(0)
                self.later(seconds, partial(self.ended, gpu, partial(self.made.add, block)))
            elif ready:
                trial = min(ready, key=self.taken.__getitem__)
                self.later(self.SAMPLES / self.d.step_per_s, partial(self.ended, gpu, partial(self.take, trial)))
            else:
                continue
            self.is_free[gpu] = False

    def prepared(self, block: int, route: Route) -> None:
        self.cores += 1
        if route.gpu_s:
            self.to_make.append((block, self.SAMPLES * route.gpu_s))
        else:
            self.made.add(block)

    def ended(self, gpu: int, then: Callable[[], None]) -> None:
        self.is_free[gpu] = True
        then()

    def take(self, trial: int) -> None:
        self.taken[trial] += 1

    def per_s(self, blocks: int = 400) -> float:
        """Samples/s of each trial over the second half of ``blocks``."""
        half: float | None = None
        while min(self.taken) < blocks:
            self.begin()
            self.now = self.events[0][0]
            while self.events and self.events[0][0] <= self.now + 1e-9:  # all events at the same time
                heapq.heappop(self.events)[2]()
            if half is None and min(self.taken) >= blocks // 2:
                half = self.now
        assert half is not None
        return self.SAMPLES * (blocks - blocks // 2) / (self.now - half)


@pytest.mark.parametrize(
    "changes",
    [{}, {"cpus": 2.0}, {"cpus": 4.0}, {"cpus": 2.0, "gpus": 1}, {"cpus": 6.0, "step_per_s": 5000.0}, {"trials": 8}],
    ids=str,
)
def test_a_simulated_feed_is_as_fast_as_planned(changes: dict[str, Any]) -> None:
    """Within 6 %, because blocks are whole and reach trials at different times."""
    d = devices(**changes)
    for routes in (ROUTES, ROUTES[1:], ROUTES[:1]):
        plan = best_plan(routes, d)
        assert Simulation(routes, plan, d).per_s() == pytest.approx(plan.trial_per_s, rel=0.06)
