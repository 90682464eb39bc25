"""``mbaas plan``: workers, threads, caches and nodes for several searches and jobs."""

from __future__ import annotations

import json
from pathlib import Path

from mbaas.cli.console import out, write_json


def plan(file: Path, *, as_json: bool) -> None:
    """Print the plan for what a file describes.

    Args:
        file: YAML, as docs/plan.md describes.
        as_json: one line that holds one object.

    Raises:
        ConfigError: the file, or jobs that do not fit the cluster.
    """
    from mbaas.analysis.plan.planner import plan
    from mbaas.cli import plan_view
    from mbaas.cli.plan_file import load

    jobs, cluster = load(file)
    made = plan(jobs, cluster)
    if as_json:
        write_json(json.dumps(made.to_json()))
    else:
        out.print(plan_view.page(made))
