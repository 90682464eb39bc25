"""A short ``mbaas chaos`` run: a real search under faults, on its own cluster."""

from __future__ import annotations

import pytest

from mbaas.tools.chaos.runner import ChaosSettings, run

pytestmark = [pytest.mark.chaos, pytest.mark.slow, pytest.mark.timeout(300)]

SHORT = ("kill-worker", "kill-coordinator", "kill-raylet", "err-storage")
OTHERS = ("kill-cache", "pause-coordinator", "kill-trial", "pause-worker")


@pytest.mark.parametrize("kinds", [SHORT, pytest.param(SHORT + OTHERS, marks=pytest.mark.long)], ids=["4", "8"])
def test_a_search_misses_nothing_under_faults_of_many_kinds(no_ray: None, kinds: tuple[str, ...]) -> None:
    said: list[str] = []
    report = run(ChaosSettings(seed=1, faults=len(kinds), every_s=2.0, kinds=kinds), said.append)
    story = "\n".join(said)
    assert report.is_sound, f"{report}\n{story}"
    assert report.checked.is_independent
    assert report.checked.count("missing") == report.checked.count("different") == 0
    assert report.happened >= 0.75 * len(kinds), story
    assert set(report.kinds) == set(kinds)
    assert report.checked.trials == 3
    assert report.checked.incarnations > 3 or "kill-trial" not in kinds
    assert report.checked.epochs >= 3
    assert (report.left_behind, report.bugs, report.kept) == ((), (), None)


@pytest.mark.long
def test_ranks_miss_nothing_under_faults_while_others_join_in_the_middle_of_epochs(no_ray: None) -> None:
    said: list[str] = []
    kinds = ("kill-trial", "kill-coordinator", "pause-trial", "kill-two")
    report = run(ChaosSettings(seed=1, faults=12, every_s=3.0, kinds=kinds, ranks=2), said.append)
    story = "\n".join(said)
    assert report.is_sound, f"{report}\n{story}"
    assert report.checked.cut_epochs > 0, story
    assert report.checked.trials >= 5


@pytest.mark.long
def test_trials_with_pipelines_of_their_own_miss_nothing_under_faults(no_ray: None) -> None:
    said: list[str] = []
    kinds = ("kill-worker", "kill-coordinator", "kill-cache", "kill-trial", "kill-two")
    report = run(ChaosSettings(seed=2, faults=10, every_s=3.0, kinds=kinds, with_pipelines=True), said.append)
    story = "\n".join(said)
    assert report.is_sound, f"{report}\n{story}"
    assert "each of 3 pipelines" in story
    assert report.checked.trials == 3
