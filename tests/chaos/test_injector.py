"""The injector restarts nodes that fail to start."""

from typing import Any

import pytest

from mbaas.errors import WaitTimeoutError
from mbaas.tools.chaos.injector import TRIES, Injector


class SlowNodes:
    """Nodes of a machine so busy that the first ones fail to start."""

    def __init__(self, failures: int) -> None:
        self.failures = failures
        self.there: list[Any] = []

    def add(self, cpus: int) -> str:
        if self.failures:
            self.failures -= 1
            raise WaitTimeoutError("a node did not come: waited 60 s for it to be up")
        return "node"


@pytest.mark.parametrize(("failures", "came"), [(0, "node"), (2, "node"), (TRIES, None)])
def test_a_node_that_does_not_come_is_started_again_and_ends_no_run(failures, came):
    told: list[str] = []
    injector = Injector(SlowNodes(failures), told.append)  # type: ignore[arg-type]
    coming = injector._start_soon()
    injector.undo_what_is_due(all_of_it=True)
    assert coming.result() == came
    assert told == failures * ["another node is started: a node did not come: waited 60 s for it to be up"]
