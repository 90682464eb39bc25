"""The shell's deadlines end before the supervisor's, so the shell can report the reason."""

import pytest

from mbaas.coordinator import cache_pool, lending, supervision, worker_pool
from mbaas.core.cluster import supervised, supervisor


@pytest.mark.parametrize(
    ("sooner_s", "later_s"),
    [
        (supervision.MACHINE_S + worker_pool.BEGIN_S, supervisor.START_S),
        (worker_pool.TAKE_IN_S, supervisor.BRIEFING_S),
        (supervision.BRIEFING_CALL_S, supervisor.BRIEFING_S),
        (lending.ANSWER_S, supervisor.HAND_OVER_S),
        (cache_pool.START_CALL_S, supervised.CACHE_START_S),
        (cache_pool.PROBE_CALL_S + cache_pool.ANSWER_S, supervisor.PROBE_S),
        (cache_pool.MOVE_OUT_CALL_S, supervisor.VACATE_S),
    ],
)
def test_the_shell_gives_up_before_the_supervisor_does(sooner_s: float, later_s: float) -> None:
    assert sooner_s < later_s
