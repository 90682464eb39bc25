"""Run Ray's autoscaler on the files of cluster/."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import yaml
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.common_pb2 import LabelSelectorOperator

FOLDER = Path(__file__).parents[2] / "cluster"
ROLE = "mbaas.io/role"


def load(name: str) -> dict[str, Any]:
    """A file of cluster/; for a manifest with several documents the last one, which is the Ray cluster's."""
    return documents(name)[-1]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / name).read_text()))


def node_env() -> dict[str, str]:
    lines = (FOLDER / "node.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


def launches(config: AutoscalingConfig, *demands: dict[str, float], role: str | None = None) -> dict[str, int]:
    """Nodes that the autoscaler starts in an empty cluster for ``demands``, in addition to its minimum.

    Args:
        config: of the cluster.
        demands: resources of each actor or trial.
        role: label that their node must have.
    """
    selector = [[(ROLE, LabelSelectorOperator.LABEL_OPERATOR_IN, [role])]] if role else None
    requests = [ResourceRequestUtil.make(demand, label_selectors=selector) for demand in demands]
    types = config.get_node_type_configs()
    reply = ResourceDemandScheduler().schedule(
        SchedulingRequest(
            disable_launch_config_check=True,
            node_type_configs=types,
            max_num_nodes=config.get_max_num_nodes(),
            resource_requests=ResourceRequestUtil.group_by_count(requests),
        )
    )
    assert not reply.infeasible_resource_requests, reply.infeasible_resource_requests
    started = Counter({launch.instance_type: launch.count for launch in reply.to_launch})
    return dict(started - Counter({name: kind.min_worker_nodes for name, kind in types.items()}))
