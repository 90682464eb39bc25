"""Ray accepts the files for `ray up`, and their commands start nodes with the right roles and settings."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
from autoscaler_view import FOLDER, ROLE, launches, load, node_env
from ray._private.label_utils import validate_node_label_syntax
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig

FILES = ("aws.yaml", "onprem.yaml")

STUB = """#!/usr/bin/env python3
import json, os, sys
with open(os.environ["CALLS"], "a") as calls:
    calls.write(json.dumps([sys.argv[1:], dict(os.environ)]) + "\\n")
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder with the ssh key that onprem.yaml names."""
    (tmp_path / ".ssh").mkdir()
    (tmp_path / ".ssh" / "id_ed25519").write_text("a key")
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("name", FILES)
def test_ray_accepts_the_file(name: str) -> None:
    validate_config(prepare_config(load(name)))


@pytest.mark.parametrize("name", FILES)
def test_a_typo_would_be_caught(name: str) -> None:
    with pytest.raises(jsonschema.ValidationError, match="'idle_timeout' was unexpected"):
        validate_config(prepare_config(load(name) | {"idle_timeout": 5}))


def test_aws_nodes_as_the_autoscaler_sees_them() -> None:
    config = AutoscalingConfig(load("aws.yaml"), skip_content_hash=True)
    kinds = config.get_node_type_configs()
    seen = {
        name: (kind.labels[ROLE], kind.resources, kind.min_worker_nodes, kind.max_worker_nodes, kind.idle_timeout_s)
        for name, kind in kinds.items()
    }
    assert seen == {
        "head": ("head", {"CPU": 0}, 0, 1, None),
        "trial": ("trial", {"CPU": 4, "GPU": 1}, 0, 8, 300),
        "prep": ("prep", {"CPU": 16}, 1, 4, 600),
        "prep_gpu": ("prep", {"CPU": 4, "GPU": 1}, 0, 2, 600),
    }
    for kind in kinds.values():
        validate_node_label_syntax(kind.labels)
    workers = sum(kind.max_worker_nodes for name, kind in kinds.items() if name != "head")
    assert config.get_max_num_worker_nodes() == workers
    assert config.get_idle_timeout_s() == 600


@pytest.mark.parametrize(
    ("demands", "role", "started"),
    [
        ([{"CPU": 1, "GPU": 1}] * 3, None, {"trial": 3}),
        ([{"CPU": 1}] * 40, None, {"prep": 2}),
        ([{"CPU": 1}] * 40, "prep", {"prep": 2}),
        ([{"CPU": 1, "GPU": 0.1}] * 4, "prep", {"prep_gpu": 1}),
        ([{"CPU": 1, "GPU": 1}] * 2, "trial", {"trial": 2}),
    ],
)
def test_who_gets_which_node(demands: list[dict[str, float]], role: str | None, started: dict[str, int]) -> None:
    """Trials with GPUs start trial nodes, prep starts prep nodes; one prep node of 16 CPUs always exists."""
    config = AutoscalingConfig(load("aws.yaml"), skip_content_hash=True)
    assert launches(config, *demands, role=role) == started


def test_the_head_can_start_machines_with_the_image() -> None:
    """The head looks up the image itself, and the role that Ray creates for it may not read SSM parameters."""
    images = {kind["node_config"]["ImageId"] for kind in load("aws.yaml")["available_node_types"].values()}
    assert all(re.fullmatch(r"ami-[0-9a-f]{17}", image) for image in images)


def test_all_machines_of_ones_own_belong_to_the_cluster(home: Path) -> None:
    content = load("onprem.yaml")
    config = AutoscalingConfig(content, skip_content_hash=True)
    (kind,) = config.get_node_type_configs().values()
    machines = len(content["provider"]["worker_ips"])
    assert kind.min_worker_nodes == config.get_max_num_worker_nodes() == machines
    assert config.get_idle_timeout_s() == 600


@pytest.mark.parametrize("name", FILES)
def test_the_token_goes_to_all_nodes(name: str) -> None:
    assert load(name)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"


def test_machines_of_ones_own_use_the_checkout_that_is_copied_to_them() -> None:
    content = load("onprem.yaml")
    (copy,) = [remote for remote, local in content["file_mounts"].items() if local == "."]
    assert f"-c {copy}/constraints.txt {copy}" in content["setup_commands"][-1]
    for kind in ("head", "worker"):
        assert f". {copy}/cluster/node.env;" in content[f"{kind}_start_ray_commands"][-1]


@pytest.mark.parametrize(
    ("name", "kind", "arguments"),
    [
        ("aws.yaml", "head", ["--head", "--port=6379", "--object-manager-port=8076", "--dashboard-host=127.0.0.1"]),
        ("aws.yaml", "worker", ["--address=10.0.0.1:6379", "--object-manager-port=8076"]),
        ("onprem.yaml", "head", ["--head", "--port=6379", "--num-cpus=0", "--labels=mbaas.io/role=head"]),
        ("onprem.yaml", "worker", ["--address=10.0.0.1:6379", "--labels=mbaas.io/role=prep"]),
    ],
)
def test_nodes_start_ray_with_our_settings_and_tokens(home: Path, name: str, kind: str, arguments: list[str]) -> None:
    (stop, _), (start, environment) = started_by(home, load(name)[f"{kind}_start_ray_commands"])
    assert stop == ["stop"]
    assert start[0] == "start"
    assert set(arguments) <= set(start), start
    assert ("--autoscaling-config=~/ray_bootstrap_config.yaml" in start) == (kind == "head")
    assert environment.items() >= node_env().items()
    assert environment["RAY_AUTH_MODE"] == "token"


@pytest.mark.parametrize(
    ("gpu", "said", "role"), [(False, None, "prep"), (True, None, "trial"), (True, "prep", "prep")]
)
def test_role_of_a_machine_of_ones_own(home: Path, gpu: bool, said: str | None, role: str) -> None:
    """A GPU makes it a trial node, unless ~/.mbaas-role names another role."""
    (home / "bin").mkdir()
    (home / "bin" / "nvidia-smi").write_text(f"#!/bin/sh\nexit {0 if gpu else 9}\n")
    (home / "bin" / "nvidia-smi").chmod(0o755)
    if said:
        (home / ".mbaas-role").write_text(f"{said}\n")
    _, (start, _) = started_by(home, load("onprem.yaml")["worker_start_ray_commands"])
    assert f"--labels=mbaas.io/role={role}" in start


def started_by(home: Path, commands: list[str]) -> list[tuple[list[str], dict[str, str]]]:
    """Arguments and environment of each ``ray`` call when ``commands`` run on a node with home folder ``home``."""
    for folder in ("bin", "mbaas-venv/bin"):
        stub = home / folder / "ray"
        stub.parent.mkdir(parents=True, exist_ok=True)
        stub.write_text(STUB)
        stub.chmod(0o755)
    checkout = home / "mbaas"
    checkout.mkdir()
    (checkout / "cluster").symlink_to(FOLDER)
    clean = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    env = clean | {
        "HOME": str(home),
        "PATH": f"{home / 'bin'}:/usr/bin:/bin",
        "CALLS": str(home / "calls"),
        "RAY_HEAD_IP": "10.0.0.1",
    }
    for command in commands:
        here = command.replace("/etc/mbaas/node.env", str(FOLDER / "node.env"))
        subprocess.run(["bash", "-c", here], env=env, check=True, timeout=30)
    return [tuple(json.loads(line)) for line in (home / "calls").read_text().splitlines()]


def test_ray_knows_every_setting_of_node_env() -> None:
    """Ray ignores unknown settings silently."""
    binary = (Path(ray.__file__).parent / "_raylet.so").read_bytes()
    sources = (Path(ray.__file__).parent / folder for folder in ("_private", "_common"))
    text = "".join(path.read_text() for folder in sources for path in folder.rglob("*.py"))
    unknown = [name for name in node_env() if name.removeprefix("RAY_").encode() not in binary and name not in text]
    assert unknown == []


def test_sample_of_what_is_not_valid_is_refused() -> None:
    """Ray's own check refuses contradictory bounds."""
    config: dict[str, Any] = load("aws.yaml")
    config["max_workers"] = 0
    with pytest.raises(ValueError, match="smaller than the sum of `min_workers`"):
        validate_config(prepare_config(config))
