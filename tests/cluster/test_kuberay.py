"""The KubeRay manifests are valid for its operator and for Ray's autoscaler."""

from __future__ import annotations

import re
import shlex
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from autoscaler_view import FOLDER, ROLE, documents, launches, load, node_env
from kuberay_schema import SCHEMAS
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler.v2.instance_manager.config import AutoscalingConfig
from ray.runtime_env import RuntimeEnv

GIB = 2**30
IN_IMAGE = "/opt/mbaas/"
"""The folder of this checkout in the image."""


def cluster(name: str) -> dict[str, Any]:
    """A manifest as the autoscaler receives it: a RayJob's cluster becomes a RayCluster."""
    manifest = load(name)
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    return {"metadata": manifest["metadata"], "spec": spec}


def autoscaling(name: str) -> AutoscalingConfig:
    return AutoscalingConfig(_derive_autoscaling_config_from_ray_cr(cluster(name)), skip_content_hash=True)


def containers(name: str) -> list[dict[str, Any]]:
    spec = cluster(name)["spec"]
    groups = [spec["headGroupSpec"], *spec["workerGroupSpecs"]]
    return [container for group in groups for container in group["template"]["spec"]["containers"]]


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_manifest_has_only_known_fields(name: str) -> None:
    jsonschema.validate(load(name), SCHEMAS[name])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("enableInTreeAutoscaler",), True),
        (("headGroupSpec", "rayStartParams", "num-cpus"), 0),
        (("workerGroupSpecs", 0, "idleTimeoutSecond"), 60),
        (("workerGroupSpecs", 0, "template", "spec", "restartPolicy"), "Always"),
    ],
)
def test_a_mistake_would_be_caught(path: tuple[Any, ...], value: object) -> None:
    manifest = load("raycluster.yaml")
    within = manifest["spec"]
    for key in path[:-1]:
        within = within[key]
    within[path[-1]] = value
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(manifest, SCHEMAS["raycluster.yaml"])


def test_groups_as_the_autoscaler_sees_them() -> None:
    kinds = autoscaling("raycluster.yaml").get_node_type_configs()
    seen = {
        name: (kind.labels[ROLE], kind.resources, kind.min_worker_nodes, kind.max_worker_nodes, kind.idle_timeout_s)
        for name, kind in kinds.items()
    }
    assert seen == {
        "headgroup": ("head", {"CPU": 0, "memory": 8 * GIB}, 0, 1, None),
        "trial": ("trial", {"CPU": 3, "GPU": 1, "memory": 12 * GIB}, 0, 8, 300),
        "prep": ("prep", {"CPU": 15, "memory": 26 * GIB}, 1, 4, 600),
        "prep-gpu": ("prep", {"CPU": 7, "GPU": 1, "memory": 26 * GIB}, 0, 2, 600),
    }


def test_groups_of_the_job_as_the_autoscaler_sees_them() -> None:
    config = autoscaling("rayjob.yaml")
    seen = {
        name: (kind.labels[ROLE], kind.resources["CPU"], kind.min_worker_nodes, kind.max_worker_nodes)
        for name, kind in config.get_node_type_configs().items()
    }
    assert seen == {"headgroup": ("head", 0, 0, 1), "trial": ("trial", 3, 0, 4), "prep": ("prep", 7, 1, 2)}
    assert config.get_idle_timeout_s() == 300


@pytest.mark.parametrize(
    ("demands", "role", "started"),
    [
        ([{"CPU": 1, "GPU": 1}] * 3, None, {"trial": 3}),
        ([{"CPU": 1}] * 40, None, {"prep": 2}),
        ([{"CPU": 1, "GPU": 0.1}] * 4, "prep", {"prep-gpu": 1}),
    ],
)
def test_who_gets_which_group(demands: list[dict[str, float]], role: str | None, started: dict[str, int]) -> None:
    """Trials with GPUs start trial pods, prep starts prep pods; one prep pod of 15 CPUs always exists."""
    assert launches(autoscaling("raycluster.yaml"), *demands, role=role) == started


@pytest.mark.parametrize("name", SCHEMAS)
def test_tokens_autoscaler_and_version(name: str) -> None:
    spec = cluster(name)["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert spec["enableInTreeAutoscaling"] is True
    assert spec["autoscalerOptions"]["version"] == "v2"
    assert spec["rayVersion"] == ray.__version__


@pytest.mark.parametrize("name", SCHEMAS)
def test_every_container_has_the_settings_of_node_env(name: str) -> None:
    for container in containers(name):
        # authOptions sets the mode of authentication: the operator adds it to every pod, with the token
        wanted = {name: value for name, value in node_env().items() if name != "RAY_AUTH_MODE"}
        assert {entry["name"]: entry["value"] for entry in container["env"]} == wanted
        assert container["resources"]["requests"] == container["resources"]["limits"]


NODES = {
    "raycluster.yaml": {"trial": (4, 16), "prep": (16, 32), "prep-gpu": (8, 32)},
    "rayjob.yaml": {"trial": (4, 16), "prep": (8, 16)},
}
"""CPUs and GiB of the nodes named in each file, by group."""


@pytest.mark.parametrize("name", SCHEMAS)
def test_each_worker_fits_the_node_that_the_file_names(name: str) -> None:
    """Pods get a node's allocatable part: Kubernetes and its daemons reserve half a CPU and 18 % of memory."""
    text = " ".join((FOLDER / name).read_text().replace("\n#", " ").split())
    named = re.findall(r"(\d+) CPUs and (\d+) GiB(?: with a GPU)? \(([\w-]+)\)", text)
    assert {group: (int(cpus), int(gib)) for cpus, gib, group in named} == NODES[name]
    groups = cluster(name)["spec"]["workerGroupSpecs"]
    assert {group["groupName"] for group in groups} == set(NODES[name])
    for group in groups:
        (container,) = group["template"]["spec"]["containers"]
        cpus, memory_gib = NODES[name][group["groupName"]]
        requests = container["resources"]["requests"]
        assert float(requests["cpu"]) <= cpus - 0.5
        assert float(requests["memory"].removesuffix("Gi")) <= 0.82 * memory_gib


@pytest.mark.parametrize("name", SCHEMAS)
def test_pods_have_an_account_that_the_file_makes_and_those_with_gpus_may_run_on_tainted_nodes(name: str) -> None:
    account, manifest = documents(name)
    spec = manifest["spec"].get("rayClusterSpec", manifest["spec"])
    assert account["kind"] == "ServiceAccount"
    assert account["metadata"]["namespace"] == manifest["metadata"]["namespace"]
    for group in [spec["headGroupSpec"], *spec["workerGroupSpecs"]]:
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert pod["serviceAccountName"] == account["metadata"]["name"]
        has_gpu = "nvidia.com/gpu" in container["resources"]["requests"]
        assert [entry["key"] for entry in pod.get("tolerations", [])] == ["nvidia.com/gpu"] * has_gpu
        mounted = {mount["name"] for mount in container.get("volumeMounts", [])}
        assert mounted == {volume["name"] for volume in pod.get("volumes", [])}
        assert ("scratch" in mounted) == ("groupName" in group)


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_object_store_leaves_half_of_a_pods_memory(name: str) -> None:
    """Ray's default is 30 %."""
    spec = cluster(name)["spec"]
    for group in spec["workerGroupSpecs"]:
        (container,) = group["template"]["spec"]["containers"]
        memory = int(container["resources"]["limits"]["memory"].removesuffix("Gi")) * GIB
        assert int(group["rayStartParams"].get("object-store-memory", 0)) <= memory / 2


def test_the_job_runs_the_example_that_the_image_has() -> None:
    spec = load("rayjob.yaml")["spec"]
    runtime_env = yaml.safe_load(spec["runtimeEnvYAML"])
    folder = runtime_env.pop("working_dir")
    RuntimeEnv(**runtime_env)
    assert folder.startswith(IN_IMAGE)
    here = FOLDER.parent / folder.removeprefix(IN_IMAGE)
    program, script = shlex.split(spec["entrypoint"])[:2]
    assert program == "python"
    assert (here / script).is_file()
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert f"WORKDIR {IN_IMAGE.rstrip('/')}\n" in dockerfile
    assert "COPY examples examples\n" in dockerfile
