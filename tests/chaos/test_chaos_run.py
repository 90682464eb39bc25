"""``mbaas chaos`` in short: a real search under eight faults, on a cluster of its own."""

from __future__ import annotations

import pytest

from mbaas.chaos.runner import ChaosSettings, run

pytestmark = [pytest.mark.chaos, pytest.mark.long, pytest.mark.timeout(300)]

KINDS = (
    "kill-worker",
    "kill-cache",
    "kill-coordinator",
    "kill-lane",
    "kill-trial",
    "kill-raylet",
    "pause-worker",
    "err-storage",
)


def test_a_search_misses_nothing_under_eight_faults_of_eight_kinds(no_ray: None) -> None:
    said: list[str] = []
    report = run(ChaosSettings(seed=1, faults=len(KINDS), every_s=2.0, kinds=KINDS), said.append)
    story = "\n".join(said)
    assert report.is_sound, f"{report}\n{story}"
    assert report.checked.is_independent
    assert report.checked.count("missing") == report.checked.count("different") == 0
    assert report.happened >= 6, story
    assert set(report.kinds) == set(KINDS)
    assert report.checked.trials == 3 < report.checked.incarnations
    assert report.checked.epochs >= 3
    assert (report.left_behind, report.bugs, report.kept) == ((), (), None)
