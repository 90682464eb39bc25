"""Facts in, verdicts out: each check of `mbaas doctor`, without a machine."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from mbaas.tools.doctor import checks
from mbaas.tools.doctor.checks import Verdict, findings, worst
from mbaas.tools.doctor.collect import cgroup_limits
from mbaas.tools.doctor.facts import Facts, FeedFacts, NodeFacts, StorageFacts

OK, NOTE, PROBLEM = Verdict.OK, Verdict.NOTE, Verdict.PROBLEM
GB = 10**9
ROOT = Path(__file__).parents[3]

GOOD = NodeFacts(
    node="n1",
    shm_bytes=32 * GB,
    shm_free_bytes=30 * GB,
    memory_bytes=64 * GB,
    memory_free_bytes=50 * GB,
    store_bytes=19 * GB,
    cpus=16,
    affinity_cpus=16,
    ray_cpus=16,
    open_files=1024,
    most_open_files=1_048_576,
    versions=(("python", "3.11.7"), ("ray", "2.60.0"), ("mbaas", "0.2.0"), ("nvidia-dali-cuda120", "2.4.0")),
    temp_folder="/tmp/ray",
    temp_free_bytes=50 * GB,
    clock_ahead_s=0.01,
)
CLUSTER = Facts(nodes=(GOOD,), address="10.0.0.1:6379")


def test_a_good_machine_has_no_finding_to_mend() -> None:
    found = findings(CLUSTER)
    assert {each.verdict for each in found} == {OK}
    assert {(each.wanted, each.remedy) for each in found} == {("", "")}
    assert worst(found) is OK


NODES = [
    ("shared_memory", {"shm_bytes": None}, PROBLEM),
    ("shared_memory", {"shm_bytes": 64 * 2**20, "shm_free_bytes": 64 * 2**20}, PROBLEM),  # docker's default
    ("shared_memory", {"shm_bytes": 18 * GB}, PROBLEM),  # smaller than the object store
    ("shared_memory", {"shm_free_bytes": GB // 2}, NOTE),
    ("memfd", {"memfd_error": "memfd_create fails: not permitted"}, NOTE),
    ("memory", {"memory_limit_bytes": 16 * GB}, PROBLEM),  # below the object store
    ("memory", {"memory_limit_bytes": 24 * GB}, NOTE),
    ("memory", {"memory_limit_bytes": 100 * GB}, OK),
    ("object_store", {"store_bytes": None}, NOTE),
    ("object_store", {"store_bytes": 100_000_000}, NOTE),
    ("cpus", {"quota_cpus": 4.0}, PROBLEM),  # Ray counts 16
    ("cpus", {"affinity_cpus": 4}, PROBLEM),
    ("cpus", {"quota_cpus": 4.0, "ray_cpus": 4.0}, OK),
    ("cpus", {"quota_cpus": 3.5, "ray_cpus": 4.0}, OK),  # Ray counts whole CPUs
    ("cpus", {"ray_cpus": 4.0}, NOTE),
    ("cpus", {"ray_cpus": 0.0}, OK),  # a head without CPUs
    ("cpus", {"cpus": 1, "affinity_cpus": 1, "ray_cpus": 1.0}, NOTE),
    ("open_files", {"open_files": 512, "most_open_files": 512}, PROBLEM),
    ("open_files", {"most_open_files": 4096}, NOTE),
    ("open_files", {"most_open_files": 2**63 - 1}, OK),
    ("temp_folder", {"temp_error": "it cannot be written: Read-only file system"}, PROBLEM),
    ("temp_folder", {"temp_folder": "/scratch/" + "a" * 40}, PROBLEM),
    ("temp_folder", {"temp_free_bytes": GB // 10}, NOTE),
    ("gpu", {"gpu_files": 2, "cuda_error": "cuInit: CUDA_ERROR_UNKNOWN"}, PROBLEM),
    ("gpu", {"cuda_error": "cuInit: CUDA_ERROR_NO_DEVICE"}, NOTE),
    ("gpu", {"gpus": ("H200", "H200"), "cuda_version": (12, 8)}, OK),
    ("gpu", {"gpus": ("V100",), "cuda_version": (11, 4)}, PROBLEM),
    ("gpu", {"gpus": ("H200",), "dali_error": "ImportError: no"}, PROBLEM),
    ("gpu", {"dali_error": "ImportError: no"}, OK),  # needed with a GPU only
    ("clock", {"clock_ahead_s": None}, NOTE),
    ("clock", {"clock_ahead_s": -3.0}, NOTE),
    ("clock", {"clock_ahead_s": 900.0}, PROBLEM),
]


@pytest.mark.parametrize(("check", "changed", "verdict"), NODES)
def test_a_machine(check: str, changed: dict[str, object], verdict: Verdict) -> None:
    finding = getattr(checks, check)(replace(GOOD, **changed))
    assert finding.verdict is verdict, finding
    assert finding.node == "n1"
    assert bool(finding.wanted) == bool(finding.remedy) == (verdict is not OK)


def test_the_remedies_have_the_figures() -> None:
    small = checks.shared_memory(replace(GOOD, shm_bytes=64 * 2**20))
    assert "--shm-size=20g" in small.remedy  # 19 GB and a tenth are 19.5 GiB
    counted = checks.cpus(replace(GOOD, quota_cpus=4.0))
    assert counted.remedy == "ray start --num-cpus=4"
    assert counted.found == "4 usable, 16 in the machine (cgroup quota), Ray counts 16"


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"address": ""}, OK),
        ({"address": "", "named_address": "10.0.0.9:6379", "cluster_error": "no cluster answers"}, PROBLEM),
        ({"address": "", "cluster_error": "it wants a token"}, PROBLEM),
    ],
)
def test_a_named_cluster_must_answer(changed: dict[str, str], verdict: Verdict) -> None:
    assert checks.cluster(replace(CLUSTER, **changed)).verdict is verdict


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({"auth_mode": "token"}, PROBLEM),
        ({"auth_mode": "token", "has_token": True}, OK),
        ({"open_token": "/home/me/.ray/auth_token"}, NOTE),
        ({"auth_mode": "disabled"}, OK),
    ],
)
def test_a_token(changed: dict[str, object], verdict: Verdict) -> None:
    assert checks.token(replace(CLUSTER, **changed)).verdict is verdict


@pytest.mark.parametrize(
    ("package", "version", "verdict"),
    [
        ("ray", "2.60.0", OK),
        ("ray", "2.9.3", PROBLEM),
        ("ray", "3.0.0", PROBLEM),
        ("ray", "2.61.0", PROBLEM),  # another one than on the first node
        ("python", "3.11.2", OK),
        ("python", "3.12.2", PROBLEM),
        ("mbaas", "0.1.0", PROBLEM),
    ],
)
def test_versions_of_a_second_node(package: str, version: str, verdict: Verdict) -> None:
    other = replace(GOOD, node="n2", versions=tuple({**dict(GOOD.versions), package: version}.items()))
    assert checks.versions(replace(CLUSTER, nodes=(GOOD, other))).verdict is verdict


def test_the_versions_of_ray_are_those_that_the_package_requires() -> None:
    (required,) = re.findall(r'"(ray\[default,tune\].*?)"', (ROOT / "pyproject.toml").read_text())
    ray = Requirement(required)
    for version, is_right in (("2.52.1", False), ("2.53.0", True), ("2.99.0", True), ("3.0.0", False)):
        node = replace(GOOD, versions=tuple({**dict(GOOD.versions), "ray": version}.items()))
        assert (
            (checks.versions(replace(CLUSTER, nodes=(node,))).verdict is OK) == is_right == (version in ray.specifier)
        )


def test_a_node_that_does_not_answer_has_no_other_findings() -> None:
    lost = NodeFacts(node="n2", error="ModuleNotFoundError: No module named 'mbaas'")
    found = [each for each in findings(replace(CLUSTER, nodes=(GOOD, lost))) if each.node == "n2"]
    assert [(each.verdict, each.remedy) for each in found] == [(PROBLEM, "pip install mbaas")]


def test_feeds_are_listed_with_the_program_that_serves_them() -> None:
    well = FeedFacts(name="train", server="search.py (process 7) of user me", consumers=2)
    silent = FeedFacts(name="val", error="it does not answer")
    first, second = checks.feeds(replace(CLUSTER, feeds=(well, silent)))
    assert (first.verdict, "search.py (process 7)" in first.found, "2 consumers" in first.found) == (OK, True, True)
    assert (second.verdict, second.remedy) == (NOTE, "mbaas stop val")


READ = StorageFacts(
    where="/data", files=64, read_bytes=64 * 10**5, read_s=0.1, latency_s=0.005, samples=1000, total_bytes=10**8
)


@pytest.mark.parametrize(
    ("changed", "verdict"),
    [
        ({}, OK),
        ({"files": 0, "error": "/data does not exist"}, PROBLEM),
        ({"files": 0}, PROBLEM),
        ({"was_listed": False}, NOTE),
        ({"latency_s": 0.5}, NOTE),
        ({"read_s": 10.0}, NOTE),
        ({"read_s": 10.0, "from_memory": 0.9}, OK),  # says nothing about storage
        ({"read_s": 10.0, "read_bytes": 64 * 1000}, OK),  # small files
    ],
)
def test_storage(changed: dict[str, object], verdict: Verdict) -> None:
    (finding,) = checks.storage(replace(READ, **changed))
    assert finding.verdict is verdict, finding


def test_failed_reads_are_counted() -> None:
    failed, rest = checks.storage(replace(READ, failed=3, error="no permission"))
    assert (failed.verdict, "3 of 67 reads failed" in failed.found, rest.verdict) == (PROBLEM, True, OK)


def test_the_limits_of_control_groups(tmp_path: Path) -> None:
    """Limits of all groups up to the top apply, in both versions of control groups."""
    own = tmp_path / "own"
    own.write_text("0::/pod/job\n")
    (tmp_path / "pod" / "job").mkdir(parents=True)
    (tmp_path / "pod" / "cpu.max").write_text("250000 100000\n")
    (tmp_path / "pod" / "job" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "pod" / "job" / "memory.max").write_text("8000000000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_limits(tmp_path, own) == (2.5, 8_000_000_000)
    own.write_text("5:cpu,cpuacct:/job\n4:memory:/\n")
    for folder, name, text in (
        ("cpu/job", "cpu.cfs_quota_us", "150000"),
        ("cpu/job", "cpu.cfs_period_us", "100000"),
        ("memory", "memory.limit_in_bytes", "9223372036854771712"),
    ):
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        (tmp_path / folder / name).write_text(text)
    assert cgroup_limits(tmp_path, own) == (1.5, None)
    assert cgroup_limits(tmp_path / "none", tmp_path / "none") == (None, None)
